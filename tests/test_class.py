"""One class, graded once by the real nbgrader: all cheats, all accidents, and the honest between them."""

import html
import re
import subprocess
import sys
from pathlib import Path

import accidents
import attack_files
import pytest
from course_copy import NAME, POINTS, Course, once
from nbgrader.api import Gradebook

ATTACKS = attack_files.load(Path(__file__).parent / "attacks")
CLOSED = ("failed", "crashed", "timed out")
OPEN = ("inconclusive", "refused")
HONEST = ("aa_reference", "mm_reference", "zz_reference", "学生 甲")
# The region in a solution notebook that no learner may ever see.
HIDDEN = re.compile(r"### BEGIN HIDDEN TESTS\n(.*?)### END HIDDEN TESTS", re.DOTALL)


def hand_in_all(course: Course) -> None:
    solution, release = course.solution, course.release
    for name in HONEST:
        course.hand_in(name, course.honest)
    course.hand_in("untouched", release)
    for attack in ATTACKS:
        course.hand_in(attack.name, attack_files.submission(attack, solution, release), attack.files)
    for each in accidents.ALL:
        folder = course.build / "submitted" / each.name / NAME
        folder.mkdir(parents=True)
        spoiled = each.spoil(course.honest, folder)
        if spoiled is not None:
            course.hand_in(each.name, spoiled, each.beside, each.file)


@pytest.fixture(scope="module")
def graded(tmp_path_factory) -> Course:
    def make(folder: Path) -> None:
        course = Course.make(folder)
        hand_in_all(course)
        for step in ("autograde", "generate_feedback"):
            code, text = course.nbgrader(step, NAME)
            (folder / f"{step}.log").write_text(f"{text}\nexit {code}\n", encoding="utf-8")
        with Gradebook(f"sqlite:///{course.build / 'gradebook.db'}", "launchlab") as gradebook:  # a person looks at one mark
            gradebook.find_grade("test_advance", NAME, NAME, "truncated").manual_score = 1.5
            gradebook.db.commit()
        # Python's own ways of removing a folder give up at such a depth.
        subprocess.run(["rm", "-r", str(course.build / "set_aside" / "folders_without_end_beside_it")], check=True)
        subprocess.run([sys.executable, "-m", "launchlab", "report", NAME], env=course.environment, check=True, capture_output=True)

    return Course(once(tmp_path_factory, "class", make))


@pytest.fixture(scope="module")
def marks(graded) -> dict:
    return graded.marks()


def plain(reason: str) -> None:
    """A reason that a learner can read: Chinese, and nothing of the machinery."""
    assert len(re.findall(r"[\u4e00-\u9fff]", reason)) >= 4, reason
    assert not re.search(r"Traceback|/tmp/|launchlab\.|None：None|<class|object at 0x", reason), reason
    assert len(reason) < 700, reason


def judged(graded: Course, marks: dict, name: str, loses: tuple, opens: tuple = (), says: str = "") -> None:
    """Every exercise of a submission has the verdict due to it, and the gradebook says the same."""
    report = graded.report(name)
    assert set(report["checks"]) == set(POINTS)
    told = " ".join(report["notes"])
    for test, check in report["checks"].items():
        exercise, where = test.removeprefix("test_"), f"{name}, {test}: {check['verdict']}, {check['reason']}"
        if exercise in loses:
            assert check["score"] == 0 and check["verdict"] in CLOSED, where
            plain(check["reason"])
            told += check["reason"]
        elif exercise in opens:
            assert check["score"] is None and check["verdict"] in OPEN, where
            plain(check["reason"])
            told += check["reason"]
        else:
            assert (check["score"], check["verdict"]) == (POINTS[test], "passed"), where
        assert marks[name][test] == check["score"], where
    assert says in told, f"{name}: {told}"


def test_the_class_was_graded_to_its_end(graded, marks):
    log = (graded.root / "autograde.log").read_text(encoding="utf-8")
    ungraded = [name for name in graded.students() if name not in marks or not (graded.build / "reports" / name).is_dir()]
    assert not ungraded
    assert log.endswith("exit 0\n"), [line for line in log.splitlines() if "ERROR" in line]


@pytest.mark.parametrize("name", HONEST)
def test_the_honest_keep_full_marks(graded, marks, name):
    judged(graded, marks, name, loses=())


def test_the_untouched_release_gets_nothing(graded, marks):
    judged(graded, marks, "untouched", loses=accidents.TESTS, says="还没有作答")


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_attack(graded, marks, attack):
    judged(graded, marks, attack.name, attack.loses, says=attack.says)


@pytest.mark.parametrize("accident", accidents.ALL, ids=str)
def test_accident(graded, marks, accident):
    judged(graded, marks, accident.name, accident.loses, accident.opens, accident.says)


def test_what_was_open_waits_for_a_person(graded):
    with Gradebook(f"sqlite:///{graded.build / 'gradebook.db'}", "launchlab") as gradebook:
        assert gradebook.find_grade("test_advance", NAME, NAME, "truncated").needs_manual_grade
        assert not gradebook.find_grade("test_advance", NAME, NAME, "segfault").needs_manual_grade
        assert gradebook.find_submission(NAME, "aa_reference").score == sum(POINTS.values())
        assert gradebook.find_submission(NAME, "own_tests_and_points").max_score == sum(POINTS.values())


def test_outputs_are_cut_to_size(graded):
    for path in (graded.build / "autograded").glob(f"*/{NAME}/{NAME}.ipynb"):
        assert path.stat().st_size < (20 << 20 if "pictures_without_end" in path.parts else 1_500_000), path


def hidden_lines(graded: Course) -> list[str]:
    regions = [region for cell in graded.solution.cells for region in HIDDEN.findall(cell.source)]
    return [line.strip() for region in regions for line in region.splitlines() if len(line.strip()) > 12]


def test_feedback_shows_no_hidden_test(graded):
    log = (graded.root / "generate_feedback.log").read_text(encoding="utf-8")
    assert log.endswith("exit 0\n"), [line for line in log.splitlines() if "ERROR" in line]
    lines = hidden_lines(graded)
    assert len(lines) > 10
    for name in graded.students():
        page = re.sub(r"<[^>]+>", "", graded.feedback(name))
        text = html.unescape(page)
        # What a solution cell of the cheat that carries test lines of its own says is the learner's text.
        shown = [line for line in lines if line in text]
        assert not shown, (name, shown)
        assert "BEGIN HIDDEN" not in text or name == "marks_of_hidden_tests_in_own_text", name
        assert "check.equal(student.total_us(5.0, 1, 2.0), 7.0" in text, name  # the visible part is there
        assert "这里还有隐藏测试" in text, name


def test_each_has_a_page_without_hidden_tests(graded):
    lines = hidden_lines(graded)
    for name in graded.students():
        page = html.unescape(re.sub(r"<[^>]+>", "", (graded.build / "reports" / name / f"{NAME}.html").read_text(encoding="utf-8")))
        assert [line for line in lines if line in page] == [], name
        reasons = {check["reason"] for check in graded.report(name)["checks"].values()} - {"通过。"}  # which the verdict says
        assert "LEAK " not in page and all(reason in page for reason in reasons), name


def test_the_page_of_the_class_counts_what_is_in_the_gradebook(graded, marks):
    page = (graded.build / "reports" / f"{NAME}.html").read_text(encoding="utf-8")
    assert f"全班 {len(graded.students())} 份提交" in page
    missed = sum(marks[name]["test_longest_path"] == 0 for name in graded.students())
    full = sum(marks[name]["test_longest_path"] == 3 for name in graded.students())
    still_open = sum(marks[name]["test_longest_path"] is None for name in graded.students())
    row = page[page.index("练习三：最长路径") :][:400]
    assert re.search(rf"{full}</td><td class=\"number\">0</td><td class=\"number\">{missed}</td><td class=\"number\">{still_open}</td>", row), row
    assert "1.5 / 8" in page  # the mark that a person gave
    assert "教师改过这个分数" in (graded.build / "reports" / "truncated" / f"{NAME}.html").read_text(encoding="utf-8")
    assert not re.search(r"<(script|img|iframe)\b", page)


@pytest.mark.parametrize("name", ["asks_feedback_for_inputs", "leaks_by_names_and_shapes"])
def test_feedback_gives_no_secret_input_away(graded, name):
    """What a learner's process says in the exam must not become a way out for what the examiner drew."""
    for test, check in graded.report(name)["checks"].items():
        assert "LEAK" not in check["reason"] and not re.search(r"（[^）]*[0-9]", check["reason"]), (test, check["reason"])
    assert not re.search(r"LEAK (n|rounds|edges)=[\d\[]|LEAK_[a-j]", graded.feedback(name))


@pytest.mark.parametrize("name", ["rewrites_the_feedback", "pictures_hold_scripts"])
def test_feedback_runs_no_script_of_a_learner(graded, name):
    page = graded.feedback(name)
    assert "FORGED-BY-SCRIPT" in page  # as text, in the source cell
    live = [found for found in re.findall(r"<(script|svg|img|iframe|style)\b[^>]*>.{0,300}", page, re.DOTALL) if "FORGED" in found]
    assert not live
    assert not re.search(r"<script>[^<]*FORGED-BY-SCRIPT|<svg[^>]*FORGED-BY-SCRIPT|onerror=\"[^\"]*FORGED-BY-SCRIPT", page)


def test_a_file_name_is_no_markup(graded):
    page = graded.feedback("names_that_are_markup")
    assert "onerror" in page and "javascript:" in html.unescape(page)  # as text
    assert not re.search(r"<img[^>]*onerror|href=\"javascript", page)


def test_what_would_cost_the_class_too_much_lies_aside(graded):
    aside = graded.build / "set_aside"
    assert (aside / "a_terabyte_of_nothing_beside_it" / NAME / "0-data.bin").stat().st_size == 1 << 40
    assert len(list((aside / "names_that_are_no_text" / NAME).iterdir())) == 4
    for part in ("autograded", "feedback"):
        assert sum(path.lstat().st_size for path in (graded.build / part).rglob("*")) < 200 << 20


def test_nothing_is_left_running(graded):
    assert graded.survivors() == []


def test_nothing_is_left_lying(graded):
    assert sorted(path.name for path in graded.scratch.iterdir() if path.name.startswith("ll-")) == []
