"""A chapter's source: jupytext percent script in, solution notebook without outputs out."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import jupytext
from nbformat import NotebookNode, v4

KINDS = ("answer", "structure", "speedup")
ALONE = "alone"  # a test that measures time, as all of kind speedup do: no other exam times anything on the GPU meanwhile
TAGS = ("gpu", "demo", "instructor", ALONE)
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
# Fixed, so that a notebook does not depend on the Python or kernel that built it.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "pygments_lexer": "ipython3",
    },
}


class SourceError(Exception):
    """A chapter that cannot be built; ``problems`` are Chinese sentences that name cells."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


def parse(text: str) -> NotebookNode:
    """The notebook of a chapter's source text, with nbgrader's metadata and stable cell ids.

    ``solution="x"`` and ``test="x" kind=… points=…`` become nbgrader's metadata. SourceError:
    metadata or a tag that the course does not know, or one that is missing.
    """
    written = jupytext.reads(text, fmt="py:percent")
    problems, cells, seen = [], [], Counter()
    for number, cell in enumerate(written.cells, 1):
        metadata = {key: value for key, value in cell.metadata.items() if key != "lines_to_next_cell"}
        tags = metadata.pop("tags", [])
        problems += [f"{label(cell, number)}：{problem}" for problem in _unknown(cell, metadata, tags)]
        kept = {"tags": tags} if tags else {}
        if "solution" in metadata:
            kept |= _solution(metadata)
            identity = f"solution-{metadata['solution']}"
        elif "test" in metadata:
            kept |= _test(metadata)
            identity = f"test-{metadata['test']}"
        else:
            identity = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[identity] += 1
        if seen[identity] > 1:
            identity += f"-{seen[identity]}"
        new = v4.new_markdown_cell if cell.cell_type == "markdown" else v4.new_code_cell
        cells.append(new(cell.source, id=identity, metadata=kept))
    if problems:
        raise SourceError(problems)
    return v4.new_notebook(cells=cells, metadata=METADATA)


def label(cell: NotebookNode, number: int) -> str:
    """What an author finds a cell by: its exercise's name, or its number and first line."""
    meta = cell.metadata
    grade_id = meta.get("nbgrader", {}).get("grade_id")
    if grade_id or "solution" in meta or "test" in meta:
        name = grade_id or meta.get("solution") or f"test_{meta['test']}"
        return f"第 {number} 个单元 {name}"
    first = cell.source.strip().split("\n")[0]
    return f"第 {number} 个单元（{first[:30]}）"


def tags(cell: NotebookNode) -> set[str]:
    """The cell's tags."""
    return set(cell.metadata.get("tags", []))


def files(folder: Path) -> list[Path]:
    """All that a chapter's run depends on: the files of its folder but notebooks and caches."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".ipynb", ".pyc"))
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def sha256(folder: Path) -> str:
    """One hash, in hexadecimal, of all that a chapter's run comes from: ``files(folder)``, of its source the code alone.

    Prose is not in it: who mends a sentence has measured nothing anew, and needs no GPU to do so.
    """
    total = hashlib.sha256()
    for path in files(folder):
        name = path.relative_to(folder).as_posix()
        content = _code(path.read_text(encoding="utf-8")) if name == f"{folder.name}.py" else path.read_bytes()
        total.update(f"{name}\n{hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()


def _code(text: str) -> bytes:
    """Sources and metadata of the code cells of a chapter's source text, in order."""
    cells = [cell for cell in jupytext.reads(text, fmt="py:percent").cells if cell.cell_type == "code"]
    kept = [[cell.source, _run_by(cell.metadata)] for cell in cells]
    return json.dumps(kept, ensure_ascii=False, sort_keys=True).encode()


def _run_by(metadata: dict) -> dict:
    """What of a code cell's metadata a run comes from: all but how exams share a GPU, and what jupytext notes."""
    kept = {key: value for key, value in metadata.items() if key not in ("lines_to_next_cell", "tags")}
    tags = [tag for tag in metadata.get("tags", []) if tag != ALONE]
    return kept | ({"tags": tags} if tags else {})


def _unknown(cell: NotebookNode, metadata: dict, tags: list[str]) -> list[str]:
    allowed = {"solution"} if "solution" in metadata else {"test", "kind", "points"} if "test" in metadata else set()
    problems = [f"不认识的标签 {tag}，可用：{'、'.join(TAGS)}" for tag in tags if tag not in TAGS]
    problems += [f"不认识的元数据 {key}" for key in metadata if key not in allowed]
    if allowed and cell.cell_type != "code":
        problems.append("答题单元和测试单元必须是代码单元")
    if "instructor" in tags and cell.cell_type != "markdown":
        problems.append("instructor 只用于文字单元：代码单元删掉以后，学习者的笔记本就缺了一段")
    if ALONE in tags and "test" not in metadata:
        problems.append(f"{ALONE} 只用于测试单元：评分时它独占 GPU")
    for key in allowed & {"solution", "test"}:
        if not NAME.fullmatch(str(metadata[key])):
            problems.append(f"{key} 的名字要像变量名：{metadata[key]!r}")
    if "test" in metadata:
        if metadata.get("kind") not in KINDS:
            problems.append(f"kind 要是 {'、'.join(KINDS)} 之一，现在是 {metadata.get('kind')!r}")
        points = metadata.get("points")
        if type(points) not in (int, float) or not 0 < points < 1000:
            problems.append(f"points 要是正数，现在是 {points!r}")
    return problems


def _solution(metadata: dict) -> dict:
    return {"nbgrader": _nbgrader(metadata["solution"], grade=False)}


def _test(metadata: dict) -> dict:
    graded = _nbgrader(f"test_{metadata['test']}", grade=True) | {"points": metadata.get("points")}
    return {"nbgrader": graded, "launchlab": {"kind": metadata.get("kind")}}


def _nbgrader(grade_id: str, grade: bool) -> dict:
    return {
        "grade": grade,
        "grade_id": grade_id,
        "locked": grade,
        "schema_version": 3,
        "solution": not grade,
        "task": False,
    }
