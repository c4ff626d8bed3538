"""Pages for learners and instructors, made from what a real GPU measured (the receipts) and from submissions that were not examined."""

import json
import re

import pytest

from launchlab import manifest
from launchlab.exam import judge
from launchlab.grading import figures, pages, sealed

RECORDED = [chapter for chapter in manifest.chapters() if chapter.receipt.is_file()]


def measured(chapter):
    """The checks of a chapter's recorded solution, as a report has them."""
    return [{"reason": "通过。", **check} for check in json.loads(chapter.receipt.read_text(encoding="utf-8"))["checks"]]


def speedups(chapter):
    return [record for check in measured(chapter) for record in check["records"] if record["check"] == "speedup"]


@pytest.fixture
def graded(tmp_path, monkeypatch):
    """Puts reports of chapter 3 where grading leaves them; returns the pages, by student, and that of the class."""
    chapter = manifest.chapter("3")
    monkeypatch.setattr(sealed, "BUILD", tmp_path)
    marks = {}
    monkeypatch.setattr(pages, "_marks_by_hand", lambda name: marks)

    def make(by_hand=None, **reports):
        marks.update(by_hand or {})
        for student, checks in reports.items():
            path = tmp_path / "reports" / student / f"{chapter.name}.json"
            path.parent.mkdir(parents=True)
            report = {"chapter": chapter.name, "gpu": "NVIDIA H200", "notes": [f"{student} <i>的说明</i>"], "checks": checks}
            path.write_text(json.dumps(report, ensure_ascii=False), encoding="utf-8")
        assert pages.main("3") == 0
        found = {path.parent.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("reports/*/*.html")}
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
    assert all(title in found["甲"] for title in pages.exercise_titles(manifest.chapter("3")).values())
    assert "&lt;script&gt;alert(1)" in found["乙"] and "<script" not in found["乙"] and "&lt;i&gt;" in found["乙"]
    assert "./grader/launch check" in found["乙"]


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
    title = pages.exercise_titles(manifest.chapter("3"))[checks[-1]["id"]]
    assert table.index(title) == min(table.index(each) for each in pages.exercise_titles(manifest.chapter("3")).values())
    assert "不够快。（2）" in table


def test_submissions_examined_by_older_tests_do_not_stop_the_class(graded):
    checks = measured(manifest.chapter("3"))
    found, overview = graded(甲=checks, 乙=checks, 丙=checks[1:])
    assert set(found) == {"甲", "乙", "丙"} and "全班 3 份提交" in overview


def test_nothing_graded_yet_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sealed, "BUILD", tmp_path)
    assert pages.main("3") == 2
    assert "请先评分" in capsys.readouterr().out
