"""Pages for learners and instructors, made from what a real GPU measured (the receipts) and from submissions that were not examined."""

import html
import json
import re

import nbformat
import pytest

from launchlab import manifest
from launchlab.exam import judge
from launchlab.grading import figures, hints, pages, sealed

HIDDEN = re.compile(r"### BEGIN HIDDEN TESTS\n(.*?)### END HIDDEN TESTS", re.DOTALL)
SOLUTION = re.compile(r"### BEGIN SOLUTION.*?\n(.*?)### END SOLUTION", re.DOTALL)
SECRET = 918273645.5
RECORDED = [chapter for chapter in manifest.chapters() if chapter.receipt.is_file()]


def measured(chapter):
    """The checks of a chapter's recorded solution, as a report has them."""
    return [{"reason": "通过。", **check} for check in json.loads(chapter.receipt.read_text(encoding="utf-8"))["checks"]]


def speedups(chapter):
    return [record for check in measured(chapter) for record in check["records"] if record["check"] in ("speedup", "faster")]


def titles(chapter):
    return {test: exercise.title for test, exercise in hints.exercises(manifest.chapter(chapter)).items()}


@pytest.fixture
def graded(tmp_path, monkeypatch):
    """Puts reports of a chapter, of chapter 3 if no other is told, where grading leaves them; returns the pages, by student, and that of the class."""
    monkeypatch.setattr(sealed, "BUILD", tmp_path)
    marks = {}
    monkeypatch.setattr(pages, "_marks_by_hand", lambda name: marks)

    def make(by_hand=None, chapter="3", **reports):
        chapter = manifest.chapter(chapter)
        marks.update(by_hand or {})
        for student, checks in reports.items():
            path = tmp_path / "reports" / student / f"{chapter.name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            report = {"chapter": chapter.name, "gpu": "NVIDIA H200", "notes": [f"{student} <i>的说明</i>"], "checks": checks}
            path.write_text(json.dumps(report, ensure_ascii=False), encoding="utf-8")
        assert pages.main(chapter.name) == 0
        found = {path.parent.name: path.read_text(encoding="utf-8") for path in tmp_path.glob(f"reports/*/{chapter.name}.html")}
        return found, (tmp_path / "reports" / f"{chapter.name}.html").read_text(encoding="utf-8")

    return make


def lost(checks, reason, verdict=judge.FAILED):
    score = None if verdict in judge.OPEN else 0.0
    return [check | {"verdict": verdict, "score": score, "reason": reason, "records": []} for check in checks]


def test_every_recorded_speed_up_can_be_drawn():
    drawn = 0
    for chapter in RECORDED:
        for record in speedups(chapter):
            picture = figures.speedup(record)
            assert picture.startswith("<svg") and picture.rstrip().endswith("</svg>"), chapter.name
            assert picture == figures.speedup(record), chapter.name
            drawn += 1
    assert drawn >= 15


def test_a_page_shows_marks_reasons_and_what_was_measured(graded):
    checks = measured(manifest.chapter("3"))
    found, _ = graded(甲=checks, 乙=lost(checks, "原因在 <script>alert(1)</script> 里"))
    assert "12 / 12 分" in found["甲"] and "NVIDIA H200" in found["甲"]
    assert found["甲"].count("<svg") == len(speedups(manifest.chapter("3"))) > 0
    assert all(title in found["甲"] for title in titles("3").values())
    assert "&lt;script&gt;alert(1)" in found["乙"] and "<script" not in found["乙"] and "&lt;i&gt;" in found["乙"]
    assert "./grader/launch check 3 " in found["乙"]
    assert "通过。" not in re.sub(r"<[^>]+>", "", found["甲"]).splitlines()  # nothing to say


def test_what_is_open_is_not_a_zero(graded):
    checks = measured(manifest.chapter("3"))
    found, overview = graded(甲=lost(checks, "这台机器没有 GPU。", judge.NEEDS_GPU), 乙=checks)
    assert "这不是 0 分" in found["甲"] and "未评分（满分" in found["甲"]
    assert re.search(r"80–100 %</td><td class=\"number\">1<", overview)
    assert re.search(r"0–20 %</td><td class=\"number\">0<", overview)


def test_a_mark_given_by_a_person_counts(graded):
    checks = measured(manifest.chapter("3"))
    found, overview = graded(by_hand={"甲": {checks[0]["id"]: 0.5}}, 甲=lost(checks, "全错。"))
    assert "教师改过这个分数" in found["甲"] and "0.5 / 12 分" in found["甲"]
    assert "0.5 / 12" in overview


def test_the_most_missed_exercise_comes_first(graded):
    checks = measured(manifest.chapter("3"))
    last = [*checks[:-1], *lost(checks[-1:], "不够快。")]
    _, overview = graded(甲=checks, 乙=last, 丙=last)
    table = overview[overview.index("最常丢分的在前") :]
    title = titles("3")[checks[-1]["id"]]
    assert table.index(title) == min(table.index(each) for each in titles("3").values())
    assert "不够快。（2）" in table


def test_the_same_mistake_counts_once_whatever_was_measured(graded):
    checks = measured(manifest.chapter("3"))
    _, overview = graded(甲=lost(checks, "不够快。（实测 1.07 倍，门槛 2 倍）"), 乙=lost(checks, "不够快。（实测 1.31 倍，门槛 2 倍）"), 丙=lost(checks, "不够快（没有图）。"))
    assert "不够快。（2）" in overview and "不够快（没有图）。（1）" in overview and "实测" not in overview


def test_hints_stand_where_points_are_missing(graded):
    checks = measured(manifest.chapter("3"))
    found, _ = graded(甲=checks, 乙=[*checks[:-1], *lost(checks[-1:], "算错了。")])
    exercise = hints.exercises(manifest.chapter("3"))[checks[-1]["id"]]
    assert len(exercise.hints) == 2
    assert "<details>" not in found["甲"]
    assert found["乙"].count("<details>") == 2 and all(hint.html in found["乙"] for hint in exercise.hints)


@pytest.mark.parametrize("chapter", RECORDED, ids=lambda chapter: chapter.name)
def test_every_test_of_every_chapter_has_its_heading_and_hints(chapter):
    known = hints.exercises(chapter)
    assert [check["id"] for check in measured(chapter)] == list(known)
    assert all(exercise.hints and chapter.title not in exercise.title for exercise in known.values())


@pytest.mark.parametrize("chapter", RECORDED, ids=lambda chapter: chapter.name)
def test_no_page_gives_a_hidden_test_a_solution_or_an_input_away(graded, chapter):
    """For what the solution and the untouched release earned; of the raw records, which may hold what the examiner drew, only times are told."""
    receipt = json.loads(chapter.receipt.read_text(encoding="utf-8"))
    solved = [check | {"records": [planted(record) for record in check["records"]]} for check in measured(chapter)]
    untouched = [check | told | {"records": check["records"]} for check, told in zip(solved, receipt["release_checks"], strict=True)]
    found, overview = graded(chapter=chapter.name, 甲=solved, 乙=untouched)
    cells = [cell.source for cell in nbformat.read(chapter.solution, as_version=4).cells if cell.cell_type == "code"]
    released = "\n".join(cell.source for cell in nbformat.read(chapter.release, as_version=4).cells)
    secret = {line.strip() for cell in cells for pattern in (HIDDEN, SOLUTION) for region in pattern.findall(cell) for line in region.splitlines()}
    secret = {line for line in secret if len(line) > 12 and line not in released}  # hints may quote a call
    assert len(secret) > 10
    for page in (*found.values(), overview):
        text = html.unescape(re.sub(r"<[^>]+>", "", page))
        assert [line for line in secret if line in text] == []
        assert "918273645" not in page and "LEAK" not in page and "HIDDEN" not in page


def planted(record):
    """A record with a mark in place of each value that is no measured time."""
    if record["check"] in ("speedup", "faster"):
        return record | {"start": [SECRET], "draw": "LEAK"}
    return {key: value if key == "check" else "LEAK" if isinstance(value, str) else [SECRET, "LEAK"] for key, value in record.items()}


def test_submissions_examined_by_older_tests_do_not_stop_the_class(graded):
    checks = measured(manifest.chapter("3"))
    found, overview = graded(甲=checks, 乙=checks, 丙=checks[1:])
    assert set(found) == {"甲", "乙", "丙"} and "全班 3 份提交" in overview


def test_nothing_graded_yet_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sealed, "BUILD", tmp_path)
    assert pages.main("3") == 2
    assert "请先评分" in capsys.readouterr().out
