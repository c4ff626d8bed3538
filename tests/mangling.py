"""Valid notebooks spoiled at random, and what must hold of whatever intake makes of one."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable

import nbformat
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from nbgrader.nbgraderformat import MetadataValidator

from launchlab.grading.intake import Refused, graft

JUNK = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=6)
KEYS = st.sampled_from(["grade", "grade_id", "locked", "points", "schema_version", "solution", "task", "checksum", "cell_type"])
IDS = st.sampled_from(["total_us", "advance", "longest_path", "test_total_us", "test_advance", "new", "", "学生"])
TYPES = st.sampled_from(["code", "markdown", "raw", "heading", "", 7, None])


class Quiet(dict):
    """A notebook that does not fill the report of a failing example."""

    def __repr__(self) -> str:
        return "<honest>"


def marks(nb) -> dict:
    return {cell.metadata.nbgrader.grade_id: cell for cell in nb.cells if "nbgrader" in cell.metadata}


def sound(data: bytes, release) -> nbformat.NotebookNode | None:
    """``graft`` of ``data``, after checking all that must hold of it; None if it was refused."""
    before = json.dumps(release)
    try:
        nb, notes = graft(data, release)
    except Refused as error:
        assert len(str(error)) > 6
        return None
    finally:
        assert json.dumps(release) == before
    nbformat.validate(nb)
    json.dumps(nb, ensure_ascii=False).encode()
    assert all(isinstance(note, str) for note in notes)
    assert len({cell.id for cell in nb.cells}) == len(nb.cells)
    validator = MetadataValidator()
    for cell in nb.cells:
        validator.validate_cell(cell)
    wanted, found = marks(release), marks(nb)
    assert found.keys() == wanted.keys()
    assert sum("nbgrader" in cell.metadata for cell in nb.cells) == len(wanted)
    for name, cell in wanted.items():
        assert found[name].metadata == cell.metadata and found[name].cell_type == "code"
        if cell.metadata.nbgrader.grade:
            assert found[name].source == cell.source
    order = [cell.id for cell in release.cells]
    assert [cell.id for cell in nb.cells if cell.id in order] == order
    assert nb.metadata == release.metadata
    assert not any(cell.get("outputs") for cell in nb.cells)
    return nb


def code(nb) -> list[str]:
    return [cell.source for cell in nb.cells if cell.cell_type == "code"]


@st.composite
def mangled(draw, honest: dict) -> dict:
    """A spoiled notebook: cells dropped, copied, moved, retyped, filled with junk; marks, metadata and ids edited."""
    nb = copy.deepcopy(dict(honest))
    for _ in range(draw(st.integers(1, 12))):
        cells = nb["cells"]
        if not cells:
            break
        at = draw(st.integers(0, len(cells) - 1))
        cell = cells[at] if isinstance(cells[at], dict) else {}
        metadata = cell.get("metadata") if isinstance(cell.get("metadata"), dict) else {}
        match draw(st.sampled_from(["drop", "copy", "move", "retype", "key", "mark", "no mark", "no metadata", "id", "no id", "source", "lines", "top", "junk"])):
            case "drop":
                del cells[at]
            case "copy":
                cells.insert(draw(st.integers(0, len(cells))), copy.deepcopy(cell))
            case "move":
                cells.insert(draw(st.integers(0, len(cells) - 1)), cells.pop(at))
            case "retype":
                cell["cell_type"] = draw(TYPES)
            case "key":
                metadata[draw(st.sampled_from(["nbgrader", "tags", "launchlab", "x"]))] = draw(JUNK)
            case "mark":
                if isinstance(metadata.get("nbgrader"), dict):
                    metadata["nbgrader"][draw(KEYS)] = draw(JUNK | IDS)
            case "no mark":
                metadata.pop("nbgrader", None)
            case "no metadata":
                cell["metadata"] = draw(st.just({}) | JUNK)
            case "id":
                cell["id"] = draw(st.sampled_from(["test-advance", "solution-advance", "solution-total_us", "x"]) | JUNK)
            case "no id":
                cell.pop("id", None)
            case "source":
                cell["source"] = draw(st.text(max_size=40) | JUNK | st.just("### BEGIN HIDDEN TESTS\n\ud800\0"))
            case "lines":
                if isinstance(cell.get("source"), str):
                    cell["source"] = cell["source"].splitlines(True)
            case "top":
                nb[draw(st.sampled_from(["metadata", "nbformat", "nbformat_minor", "x"]))] = draw(JUNK)
            case "junk":
                cells.insert(at, draw(JUNK))
    return nb


@st.composite
def cut(draw, honest: dict) -> bytes:
    """A file in one of several encodings, parts of which were replaced by other bytes, or by none."""
    encoding = draw(st.sampled_from(["utf-8", "utf-16", "utf-8-sig", "gb18030", "utf-32"]))
    raw = bytearray(json.dumps(honest, ensure_ascii=False).encode(encoding))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(raw)))
        end = draw(st.integers(start, min(len(raw), start + 400)))
        raw[start:end] = draw(st.binary(max_size=20))
    if draw(st.integers(0, 9)) == 0:  # the rest of it never arrived
        del raw[draw(st.integers(0, len(raw))) :]
    return bytes(raw)


def answers_standing(nb: dict, honest: dict) -> set[str]:
    """The texts of answers that still stand whole in a code cell of ``nb``, wherever that is."""
    answers = {text(cell) for cell in honest["cells"] if cell.get("metadata", {}).get("nbgrader", {}).get("solution")}
    return answers & {text(cell) for cell in nb["cells"] if isinstance(cell, dict) and cell.get("cell_type") == "code" and not is_test(cell)}


def text(cell: dict) -> str:
    source = cell.get("source", "")
    return "".join(part for part in source if isinstance(part, str)) if isinstance(source, list) else str(source)


def is_test(cell: dict) -> bool:
    """Whether a cell passes itself off as a test, by its mark or its id: what stands there is not an answer."""
    metadata = cell.get("metadata") if isinstance(cell.get("metadata"), dict) else {}
    mark = metadata.get("nbgrader") if isinstance(metadata.get("nbgrader"), dict) else {}
    return str(mark.get("grade_id")).startswith("test_") or str(cell.get("id")).startswith("test-")


def many(honest: dict, number: int, take: Callable[[bytes, dict | None], None]) -> None:
    """Call ``take`` with ``number`` different spoiled files, the same at each run, and the notebook that was spoiled if it is one."""
    seen: set[str] = set()

    @settings(max_examples=number, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def each(data: st.DataObject) -> None:
        nb = data.draw(mangled(honest)) if data.draw(st.booleans()) else None
        raw = data.draw(cut(honest)) if nb is None else json.dumps(nb).encode()
        digest = hashlib.sha256(raw).hexdigest()
        if digest not in seen and len(seen) < number:
            seen.add(digest)
            take(raw, nb)

    turns = 0
    while len(seen) < number:
        before, turns = len(seen), turns + 1
        seed(turns)(each)()
        if len(seen) == before:
            raise RuntimeError(f"only {before} different ones come of it")
