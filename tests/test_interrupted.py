"""A grader that is killed, two at once, and a chapter that changes after a class was graded."""

import time
from pathlib import Path

import pytest
from course_copy import NAME, POINTS, Course, once
from nbformat.v4 import new_code_cell

NOTHING, ALL = dict.fromkeys(POINTS, 0.0), dict(POINTS)
ONE_WRONG = ALL | {"test_advance": 0.0}
EXPECTED = {"a": ALL, "b": ONE_WRONG, "c": ALL, "d": ONE_WRONG, "e": NOTHING}
MORE = '''
# %% test="longest_path_again" kind="structure" points=2
check.equal(student.longest_path([[1, 2]]), 2, why="一条边上有两个节点。")
### BEGIN HIDDEN TESTS
check.equal(student.longest_path([[1, 2], [3, 4], [4, 5]]), 3, why="有两段的时候，取较长的一段。")
### END HIDDEN TESTS
'''


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Course:
    def make(folder: Path) -> None:
        course = Course.make(folder)
        for name in "abcd":
            nb = course.honest
            if EXPECTED[name] == ONE_WRONG:
                next(cell for cell in nb.cells if cell.id == "solution-advance").source = "def advance(state, rounds):\n    pass"
            if name == "c":
                nb.cells.insert(0, new_code_cell("import time\ntime.sleep(4)"))
            course.hand_in(name, nb)
        course.hand_in("e", course.release)

    return Course(once(tmp_path_factory, "interrupted", make))


def wait_for(condition, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_killed_in_mid_class_then_two_at_once(course):
    report = course.build / "reports" / "b" / f"{NAME}.json"
    third = course.build / "autograded" / "c" / NAME / f"{NAME}.ipynb"
    grader = course.start("autograde", NAME)
    wait_for(lambda: report.exists() and third.exists(), 120)
    assert grader.poll() is None
    grader.kill()
    grader.communicate()
    wait_for(lambda: course.survivors() == [], 15)
    done = {name: (course.build / "reports" / name / f"{NAME}.json").stat().st_mtime_ns for name in "ab"}
    assert not (course.build / "reports" / "c").exists()  # control: it was killed at the third

    both = [course.start("autograde", NAME) for _ in range(2)]
    outputs = [grader.communicate(timeout=240)[0] for grader in both]
    assert [grader.returncode for grader in both] == [0, 0], outputs
    assert course.marks() == EXPECTED
    assert {name: (course.build / "reports" / name / f"{NAME}.json").stat().st_mtime_ns for name in "ab"} == done
    assert sorted(path.name for path in (course.build / "autograded").iterdir()) == sorted(EXPECTED)
    # Each submission was graded by one of the two, and by one only.
    graded = [line.split("/autograded/")[1].split("/")[0] for output in outputs for line in output.splitlines() if "] Autograding " in line]
    assert sorted(graded) == ["c", "d", "e"]
    assert course.survivors() == []


def test_a_test_is_added_after_submissions_exist(course):
    if not (course.build / "reports" / "e").exists():  # this test is run alone
        course.nbgrader("autograde", NAME)
    before = course.marks()
    assert before == EXPECTED
    old_notebook = course.honest
    source = course.source.read_text(encoding="utf-8")
    course.source.write_text(source.replace("\n# %% [markdown]\n# ## 小结", f"{MORE}\n# %% [markdown]\n# ## 小结"), encoding="utf-8")
    manifest = course.root / "grader" / "chapters.toml"
    manifest.write_text(manifest.read_text(encoding="utf-8").replace("points = 8", "points = 10"), encoding="utf-8")
    course.rebuild()
    assert any(cell.id == "test-longest_path_again" for cell in course.release.cells)

    # Handed in afterwards, made from the release of before.
    course.hand_in("f", old_notebook)
    code, text = course.nbgrader("autograde", NAME)
    assert code == 0, text
    assert course.marks() == {name: marks | {"test_longest_path_again": None} for name, marks in before.items()} | {"f": ALL | {"test_longest_path_again": 2.0}}
    # Who was graded before is graded anew on demand.
    code, text = course.nbgrader("autograde", NAME, "--force", "--student", "b")
    assert code == 0, text
    assert course.marks()["b"] == before["b"] | {"test_longest_path_again": 2.0}
    assert course.marks()["a"] == before["a"] | {"test_longest_path_again": None}
