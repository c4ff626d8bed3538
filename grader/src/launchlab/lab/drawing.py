"""Drawing a graph: nodes in layers from left to right, each where its longest path from a root ends."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter

from .dot import Node, parse
from .plotting import FAMILIES, add_font

MOST_NODES = 40
COLUMN, ROW = 1.3, 0.75  # of a drawing with a figure of its own, inches
HALF_BOX = 0.32, 0.23  # with some air around it, inches
BENDS = 0, 0.2, -0.2, 0.35, -0.35, 0.5, -0.5  # how far an arrow bows, as a part of its length: the first that meets no box
# Kind: word in the picture, fill, shape of the box. Text and shape tell kinds apart without colour.
LOOKS = {
    "kernel": ("内核", "#cfe3f3", "round,pad=0.35"),
    "memcpy": ("拷贝", "#f7dcc8", "square,pad=0.35"),
    "memset": ("memset", "#f7ecc8", "square,pad=0.35"),
    "event": ("事件", "#d3ecdf", "circle,pad=0.3"),
    "host": ("CPU 函数", "#ecdcea", "roundtooth,pad=0.35"),
    "alloc": ("分配", "#e4e4e4", "larrow,pad=0.3"),
    "free": ("释放", "#e4e4e4", "rarrow,pad=0.3"),
    "child": ("子图", "#cfe3f3", "sawtooth,pad=0.35"),
    "conditional": ("条件", "#ecdcea", "darrow,pad=0.3"),
    "empty": ("空", "#ffffff", "circle,pad=0.3"),
    "other": ("", "#e4e4e4", "square,pad=0.35"),
}


def draw_graph(
    graph: str | tuple[Mapping[str, str | Node], Iterable[tuple[str, str]]],
    *,
    ax=None,
    title: str | None = None,
):
    """Draw a captured graph and return the matplotlib Axes.

    graph: DOT text (from cudaGraphDebugDotPrint or cupy.cuda.Graph.debug_dot_str), or (nodes, edges): nodes
    maps an identifier to its kind ("kernel", "memcpy", "memset", "event", "host", …) or to a Node; edges are
    pairs (tail, head). The Chinese words are drawn whatever style is in force. ax: where to draw; without it a figure of its own. Raises ValueError for no nodes, for
    more than 40, or for an edge to an unknown node, and graphlib.CycleError for a cycle.
    """
    nodes, edges = parse(graph) if isinstance(graph, str) else graph
    nodes = {name: node if isinstance(node, Node) else Node(node, name) for name, node in nodes.items()}
    edges = list(edges)
    if not nodes:
        raise ValueError("这张图里一个节点也没有：捕获期间没有在被捕获的流上发起任何工作，或传入的不是 DOT 文本。")
    if len(nodes) > MOST_NODES:
        raise ValueError(f"这张图有 {len(nodes)} 个节点，画出来看不清；请捕获一张不超过 {MOST_NODES} 个节点的小图来画。")
    places = layered(nodes, edges)
    add_font()
    columns, rows = (1 + max(place[axis] for place in places.values()) for axis in (0, 1))
    if ax is None:
        from matplotlib import pyplot as plt

        _, ax = plt.subplots(figsize=(1.0 + COLUMN * min(columns, 9), 0.9 + ROW * rows))
    _draw(ax, nodes, edges, places)
    ax.set_xlim(-0.6, columns - 0.4)
    ax.set_ylim(rows - 0.4, -0.6)
    ax.set_axis_off()
    if title:
        ax.set_title(title, fontfamily=FAMILIES)
    return ax


def layered(nodes: Iterable[str], edges: Iterable[tuple[str, str]]) -> dict[str, tuple[int, float]]:
    """Return (layer, row) of each node. The layer is the number of edges on the longest path to the node.

    Within a layer, nodes stand in the order of the mean row of their predecessors, and layers are centred.
    """
    before: dict[str, list[str]] = {node: [] for node in nodes}
    for tail, head in edges:
        if tail not in before or head not in before:
            raise ValueError(f"边 {tail} → {head} 的一端不在节点表里。")
        before[head].append(tail)
    layer: dict[str, int] = {}
    members = defaultdict(list)
    for node in TopologicalSorter(before).static_order():
        layer[node] = 1 + max((layer[tail] for tail in before[node]), default=-1)
        members[layer[node]].append(node)
    widest = max(map(len, members.values()))
    written = {node: position for position, node in enumerate(before)}
    row: dict[str, float] = {}
    for number in sorted(members):
        ordered = sorted(members[number], key=lambda node: (_mean(row[tail] for tail in before[node]), written[node]))
        for position, node in enumerate(ordered):
            row[node] = position + (widest - len(ordered)) / 2
    return {node: (layer[node], row[node]) for node in before}


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def _draw(ax, nodes, edges, places) -> None:
    boxes = {}
    for name, node in nodes.items():
        word, fill, shape = LOOKS.get(node.kind, LOOKS["other"])
        text = "\n".join(part for part in (word, _shortened(node.name)) if part)
        style = {"boxstyle": shape, "facecolor": fill, "edgecolor": "#444444"}
        boxes[name] = ax.text(*places[name], text, ha="center", va="center", fontsize=9, fontfamily=FAMILIES, bbox=style, zorder=2)
    for tail, head in edges:
        # Shrinking to the boxes' outlines keeps every arrow head visible, whatever the text is long.
        ax.annotate(
            "",
            places[head],
            places[tail],
            arrowprops={
                "arrowstyle": "-|>",
                "color": "#444444",
                "patchA": boxes[tail].get_bbox_patch(),
                "patchB": boxes[head].get_bbox_patch(),
                "shrinkA": 0,
                "shrinkB": 0,
                "connectionstyle": f"arc3,rad={_bend(places, tail, head)}",
            },
            zorder=3,  # after the boxes: before, their outlines stand where an earlier draw, or one of another size, left them
        )


def _bend(places: Mapping[str, tuple[int, float]], tail: str, head: str) -> float:
    """How far an arrow bows, so as not to run through the box of another node: the ``rad`` of matplotlib's arc3."""
    at = {name: (COLUMN * layer, -ROW * row) for name, (layer, row) in places.items()}
    (x, y), (to_x, to_y) = at.pop(tail), at.pop(head)
    for bend in BENDS:
        # arc3: a quadratic Bézier curve, whose control point lies beside the middle.
        middle_x, middle_y = (x + to_x) / 2 + bend * (to_y - y), (y + to_y) / 2 - bend * (to_x - x)
        weights = [((1 - part) ** 2, 2 * part * (1 - part), part**2) for part in (step / 40 for step in range(41))]
        curve = [(a * x + b * middle_x + c * to_x, a * y + b * middle_y + c * to_y) for a, b, c in weights]
        if not any(abs(px - bx) < HALF_BOX[0] and abs(py - by) < HALF_BOX[1] for px, py in curve for bx, by in at.values()):
            return bend
    return 0


def _shortened(name: str, most: int = 12) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
