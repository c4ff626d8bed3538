"""Whatever is done to a notebook, intake makes of it one that nbgrader and the exam can take, or refuses it."""

import json
import os

import accidents
import pytest
from course_copy import Course, once
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mangling import Quiet, answers_standing, code, cut, mangled, marks, sound, text

# tests/mangle.py makes thousands in one run; here a hundred of each kind, or as many as are asked for.
EXAMPLES = settings(max_examples=int(os.environ.get("LAUNCHLAB_MANGLED", "100")), deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Course:
    return Course(once(tmp_path_factory, "intake", Course.make))


@pytest.fixture(scope="module")
def release(course):
    return course.release


@pytest.fixture(scope="module")
def honest(course) -> dict:
    return Quiet(json.loads(json.dumps(course.honest)))


@EXAMPLES
@given(data=st.data())
def test_any_structure(data, honest, release):
    nb = data.draw(mangled(honest))
    made = sound(json.dumps(nb).encode(), release)
    # No answer that still stands in a code cell is lost: it is in its place, or runs beside it.
    assert made is None or answers_standing(nb, honest) <= set(code(made))


@EXAMPLES
@given(data=st.data())
def test_any_bytes(data, honest, release):
    sound(data.draw(cut(honest)), release)


def test_controls(honest, release):
    """The honest notebook comes through whole; what cannot be read at all is refused."""
    made = sound(json.dumps(honest).encode(), release)
    assert {cell.source for name, cell in marks(made).items() if name in accidents.TESTS} == {
        text(cell) for cell in honest["cells"] if cell["metadata"].get("nbgrader", {}).get("solution")
    }
    assert len(made.cells) == len(release.cells)
    for data in (b"", b"{", b"[]", b'{"cells": 5}', b"[" * 200_000, b'{"cells": [' + b"1," * 3000 + b"1]}"):
        assert sound(data, release) is None
