"""The gradebook follows the solution notebook, whatever has been graded already."""

import multiprocessing
import os
import subprocess
import sys

import pytest
from nbgrader.api import Gradebook
from nbgrader.coursedir import CourseDirectory

from launchlab import paths
from launchlab.course import build, gradebook
from launchlab.course.release import CONFIG, ReleaseError, settings


@pytest.fixture
def mini(mini_with_gradebook):
    return mini_with_gradebook


@pytest.fixture
def marks():
    """Opens the gradebook of the course under test."""
    opened = []

    def connect() -> Gradebook:
        opened.append(Gradebook(f"sqlite:///{paths.BUILD / 'gradebook.db'}", "launchlab"))
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


def cells(gb: Gradebook) -> dict[str, float | None]:
    """Cell name -> maximum, None for solution cells."""
    notebook = gb.find_notebook("90_mini", "90_mini")
    return {cell.name: cell.max_score for cell in notebook.grade_cells} | {cell.name: None for cell in notebook.solution_cells}


def test_gradebook_follows_the_chapter(mini, marks):
    before = {path: path.read_bytes() for path in mini.release.parent.iterdir()}
    assert gradebook.ensure(mini.name)
    assert not gradebook.ensure(mini.name)
    gb = marks()
    assert cells(gb) == {
        "test_total_us": 2, "test_advance": 3, "test_longest_path": 3, "total_us": None, "advance": None, "longest_path": None,
    }  # fmt: skip
    assert "BEGIN HIDDEN TESTS" in gb.find_source_cell("test_advance", "90_mini", "90_mini").source
    assert "NotImplementedError" in gb.find_source_cell("advance", "90_mini", "90_mini").source

    # A class is graded, a person adds a mark, and then the chapter gains a test, loses another and changes a third.
    gb.update_or_create_student("alice")
    gb.update_or_create_submission("90_mini", "alice")
    for test, score in (("test_total_us", 2), ("test_advance", 1), ("test_longest_path", 3)):
        gb.find_grade(test, "90_mini", "90_mini", "alice").auto_score = score
    gb.find_grade("test_advance", "90_mini", "90_mini", "alice").manual_score = 2.5
    gb.db.commit()
    gb.close()
    text = mini.source.read_text(encoding="utf-8")
    text = text.replace('test="longest_path" kind="structure" points=3', 'test="paths" kind="structure" points=3')
    mini.source.write_text(text.replace("secret.integers(5, 40)", "secret.integers(6, 40)"), encoding="utf-8")
    build.write(mini, build.build(mini))
    assert gradebook.ensure(mini.name)
    assert not gradebook.ensure(mini.name)
    gb = marks()
    assert cells(gb) == {
        "test_total_us": 2, "test_advance": 3, "test_paths": 3, "total_us": None, "advance": None, "longest_path": None,
    }  # fmt: skip
    assert "integers(6, 40)" in gb.find_source_cell("test_advance", "90_mini", "90_mini").source
    grades = {
        grade.name: (grade.auto_score, grade.manual_score)
        for grade in gb.find_submission_notebook("90_mini", "90_mini", "alice").grades
    }
    assert grades == {"test_total_us": (2, None), "test_advance": (1, 2.5), "test_paths": (None, None)}
    assert gb.find_grade("test_paths", "90_mini", "90_mini", "alice").needs_manual_grade
    assert {path: path.read_bytes() for path in mini.release.parent.iterdir()}.keys() == before.keys()


def test_two_at_once(mini):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        changed = pool.map(gradebook.ensure, [mini.name] * 2, chunksize=1)
    assert sorted(changed) == [False, True]


def test_enrolling_is_done_once_and_stops_at_no_name(mini, marks):
    gradebook.ensure(mini.name)
    coursedir = CourseDirectory(config=settings())
    for _ in range(2):
        gradebook.enrol(mini.name, ["alice", "\udcff not UTF-8", "学生 甲"], coursedir)
    gb = marks()
    assert {each.student_id: len(each.notebooks[0].grades) for each in gb.assignment_submissions(mini.name)} == {"alice": 3, "学生 甲": 3}


def test_unknown_chapter_is_refused(mini):
    with pytest.raises(ReleaseError, match="没有 91_none 的解答笔记本"):
        gradebook.ensure("91_none")


def test_nbgrader_itself_makes_the_same_release(mini):
    """What an instructor's own ``nbgrader generate_assignment`` writes is what the build wrote."""
    built = {path: path.read_bytes() for path in mini.release.parent.iterdir()}
    for path in built:
        path.unlink()
    environment = {**os.environ, "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}
    command = [sys.executable, "-m", "nbgrader", "generate_assignment", "--force", mini.name]
    subprocess.run(command, check=True, cwd=CONFIG.parent, env=environment, capture_output=True)
    assert {path: path.read_bytes() for path in mini.release.parent.iterdir()} == built
    assert not gradebook.ensure(mini.name)
