"""Reading the DOT text that cudaGraphDebugDotPrint writes."""

import re
from dataclasses import dataclass

NODE = re.compile(r'"(?P<id>[^"]+)"\s*\[(?P<attributes>[^\]]*?label="(?P<label>(?:[^"\\]|\\.)*)"[^\]]*)\]', re.DOTALL)
EDGE = re.compile(r'"(?P<tail>[^"]+)"\s*->\s*"(?P<head>[^"]+)"')
LAUNCH_SIZES = re.compile(r"\\<\\<\\<.*", re.DOTALL)
NAME_IN_RECORD = re.compile(r"\{ID \| \d+ (?:\(topoId: \d+\) )?\| (?P<name>.*?)\}")
# Words that CUDA writes for nodes other than kernels, longest first where one holds another.
KINDS = {
    "MEM_ALLOC": "alloc",
    "MEM_FREE": "free",
    "MEMCPY": "memcpy",
    "MEMSET": "memset",
    "EVENT_RECORD": "event",
    "EVENT_WAIT": "event",
    "WAIT_EVENT": "event",
    "CONDITIONAL": "conditional",
    "HOST": "host",
    "EMPTY": "empty",
}


@dataclass(frozen=True)
class Node:
    """A node of a graph. kind: "kernel", "memcpy", …; name: the kernel's name, or "" for other kinds."""

    kind: str
    name: str = ""


def parse(text: str) -> tuple[dict[str, Node], list[tuple[str, str]]]:
    """Return the nodes, by identifier and in the order written, and the edges (tail, head) of a DOT text.

    Understands the plain and the verbose form. Text without a single node gives ({}, []).
    """
    nodes = {found["id"]: _node(found["attributes"], found["label"]) for found in NODE.finditer(text)}
    edges = [(found["tail"], found["head"]) for found in EDGE.finditer(text)]
    return nodes, edges


def _node(attributes: str, label: str) -> Node:
    lines = [line.strip() for line in label.replace("\\n", "\n").splitlines() if line.strip()]
    if label.startswith("{KERNEL"):
        name = NAME_IN_RECORD.search(label)
        return Node("kernel", LAUNCH_SIZES.sub("", name["name"]) if name else "")
    if 'shape="octagon"' in attributes:
        return Node("kernel", LAUNCH_SIZES.sub("", lines[1]) if len(lines) > 1 else "")
    head = " ".join(lines[:2]).upper()
    for word, kind in KINDS.items():
        if word in head.replace(" ", "_"):
            return Node(kind)
    if len(lines) > 1 and re.fullmatch(r"graph_\d+", lines[1]):
        return Node("child", lines[1])
    return Node("other", lines[1] if len(lines) > 1 else label.strip())
