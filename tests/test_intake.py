"""Whatever is done to a notebook, intake makes of it one that nbgrader and the exam can take, or refuses it."""

import copy
import json

import accidents
import nbformat
import pytest
from course_copy import Course, once
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nbgrader.nbgraderformat import MetadataValidator

from launchlab.grading.intake import Refused, graft

JUNK = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=6)
KEYS = st.sampled_from(["grade", "grade_id", "locked", "points", "schema_version", "solution", "task", "checksum", "cell_type"])
IDS = st.sampled_from(["total_us", "advance", "longest_path", "test_total_us", "test_advance", "new", "", "学生"])
TYPES = st.sampled_from(["code", "markdown", "raw", "heading", "", 7, None])


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Course:
    return Course(once(tmp_path_factory, "intake", Course.make))


@pytest.fixture(scope="module")
def release(course):
    return course.release


@pytest.fixture(scope="module")
def honest(course) -> dict:
    return Quiet(json.loads(json.dumps(course.honest)))


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
def mangled(draw, honest: dict) -> tuple[dict, set[str]]:
    """A spoiled notebook, and the answers that still stand in it whole, each under its own mark or id."""
    nb = copy.deepcopy(dict(honest))
    for _ in range(draw(st.integers(1, 6))):
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


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_structure(data, honest, release):
    nb = data.draw(mangled(honest))
    made = sound(json.dumps(nb).encode(), release)
    if made is None:
        return
    # No answer that still stands in a code cell is lost: it is in its place, or runs beside it.
    answers = {text(cell): cell for cell in honest["cells"] if cell.get("metadata", {}).get("nbgrader", {}).get("solution")}
    standing = {text(cell) for cell in nb["cells"] if isinstance(cell, dict) and cell.get("cell_type") == "code" and not is_test(cell)}
    assert answers.keys() & standing <= set(code(made))


def text(cell: dict) -> str:
    source = cell.get("source", "")
    return "".join(part for part in source if isinstance(part, str)) if isinstance(source, list) else str(source)


def is_test(cell: dict) -> bool:
    """Whether a cell passes itself off as a test, by its mark or its id: what stands there is not an answer."""
    metadata = cell.get("metadata") if isinstance(cell.get("metadata"), dict) else {}
    mark = metadata.get("nbgrader") if isinstance(metadata.get("nbgrader"), dict) else {}
    return str(mark.get("grade_id")).startswith("test_") or str(cell.get("id")).startswith("test-")


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_bytes(data, honest, release):
    raw = bytearray(json.dumps(honest, ensure_ascii=False).encode(data.draw(st.sampled_from(["utf-8", "utf-16", "utf-8-sig", "gb18030", "utf-32"]))))
    for _ in range(data.draw(st.integers(0, 4))):
        start = data.draw(st.integers(0, len(raw)))
        end = data.draw(st.integers(start, min(len(raw), start + 400)))
        raw[start:end] = data.draw(st.binary(max_size=20))
    sound(bytes(raw), release)


def test_controls(honest, release):
    """The honest notebook comes through whole; what cannot be read at all is refused."""
    made = sound(json.dumps(honest).encode(), release)
    assert {cell.source for name, cell in marks(made).items() if name in accidents.TESTS} == {
        text(cell) for cell in honest["cells"] if cell["metadata"].get("nbgrader", {}).get("solution")
    }
    assert len(made.cells) == len(release.cells)
    for data in (b"", b"{", b"[]", b'{"cells": 5}', b"[" * 200_000, b'{"cells": [' + b"1," * 3000 + b"1]}"):
        assert sound(data, release) is None
