"""What a plot shows, in words, for who cannot see it: from the titles, axes and legends that its cell writes.

The words go into the metadata of the cell (`alt`), where nbconvert looks for the text of an image: so every reader of
a solution, a release and a feedback has them, whichever machine recorded the picture.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from nbformat import NotebookNode

from launchlab.course.source import tags

HEADING = re.compile(r"^#{1,6}\s+(\S.*)$", re.MULTILINE)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
# The calls that make a figure: the notebook shows it at the end of its cell, `plt.show()` or not.
FIGURES = {"subplots", "figure", "subplot_mosaic", "draw_graph"}
PARTS = {
    "set_title": "title", "title": "title", "suptitle": "title", "set_xlabel": "x", "xlabel": "x", "supxlabel": "x",
    "set_ylabel": "y", "ylabel": "y", "supylabel": "y", "label": "legend", "set_xticks": "ticks", "set_yticks": "ticks", "xticks": "ticks", "yticks": "ticks",
}  # fmt: skip
WORDS = {"title": "", "x": "横轴：", "y": "纵轴：", "legend": "图例：", "ticks": "刻度："}
HEADING_ALONE = "（图）。"  # the end of a text that has no more to say
LITTLE = "…"  # in the place of what only a run knows


@dataclass
class _Part:
    """What one piece of code does: whether it makes a figure, the texts that it writes, the functions that it calls."""

    draws: bool = False
    texts: dict[str, list[str]] = field(default_factory=lambda: {part: [] for part in WORDS})
    calls: list[str] = field(default_factory=list)

    def add(self, other: _Part) -> None:
        self.draws |= other.draws
        for part, texts in other.texts.items():
            self.texts[part] += texts


def alts(nb: NotebookNode) -> Iterator[tuple[NotebookNode, str]]:
    """Each code cell that shows a figure, with the words for it: the section's heading, then what its code writes.

    Calls of functions that the notebook defines count with what those write. Where nothing is written, the heading
    stands alone (see `HEADING_ALONE`). Cells that are no Python are passed over.
    """
    functions: dict[str, _Part] = {}
    heading = ""
    for cell in nb.cells:
        if cell.cell_type == "markdown" and "instructor" not in tags(cell):
            heading = (HEADING.findall(FENCE.sub("", cell.source)) or [heading])[-1]
        if cell.cell_type != "code":
            continue
        try:
            tree = ast.parse(cell.source)
        except SyntaxError:
            continue
        whole = _Part()
        for statement in tree.body:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                functions[statement.name] = _read(statement)
            else:
                part = _read(statement)
                whole.add(part)
                _follow(part.calls, functions, whole, set())
        if whole.draws:
            yield cell, heading.rstrip("。") + HEADING_ALONE + _told(whole)


def _follow(calls: list[str], functions: dict[str, _Part], whole: _Part, seen: set[str]) -> None:
    for name in calls:
        if name in functions and name not in seen:
            seen.add(name)
            whole.add(functions[name])
            _follow(functions[name].calls, functions, whole, seen)


def _read(tree: ast.AST) -> _Part:
    part, nodes = _Part(), list(ast.walk(tree))
    loops = {
        name.id: [text for each in ast.walk(loop.iter) if (text := _text(each))]
        for loop in nodes if isinstance(loop, ast.For)
        for name in ast.walk(loop.target) if isinstance(name, ast.Name)
    }  # fmt: skip
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        )
        part.draws |= name in FIGURES and isinstance(node.func, ast.Attribute)
        part.calls.append(name)
        kind = PARTS.get(name)
        if kind == "ticks":
            given = node.args[1:2] + [keyword.value for keyword in node.keywords if keyword.arg == "labels"]
            part.texts[kind] += [
                text for each in given if isinstance(each, (ast.List, ast.Tuple)) for item in each.elts if (text := _text(item))
            ]
        elif kind and node.args:
            part.texts[kind] += _texts(node.args[0], loops)
        for keyword in node.keywords:
            if keyword.arg in ("title", "xlabel", "ylabel", "label"):
                part.texts[PARTS[keyword.arg]] += _texts(keyword.value, loops)
    return part


def _texts(node: ast.expr, loops: dict[str, list[str]]) -> list[str]:
    """The texts that an expression may give; for a loop's variable, all that the loop goes over."""
    if isinstance(node, ast.Name):
        return loops.get(node.id, [])
    return [text] if (text := _text(node)) else []


def _text(node: ast.AST) -> str:
    """The text that an expression is known to give; "" where nothing of it is known."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        found = node.value
    elif isinstance(node, ast.JoinedStr):
        found = "".join(str(value.value) if isinstance(value, ast.Constant) else LITTLE for value in node.values)
    else:
        return ""
    found = re.sub(rf"（[{LITTLE}\s，]*）", "", re.sub(r"\s+", " ", found)).strip()
    return found if found.strip(f"{LITTLE} ，：。") else ""


def _told(part: _Part) -> str:
    return "".join(f"{WORDS[kind]}{'；'.join(dict.fromkeys(texts))}。" for kind, texts in part.texts.items() if texts)
