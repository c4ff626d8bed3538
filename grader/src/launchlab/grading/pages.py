"""`launchlab report`: what the exam found, as pages: one for each learner, and one of the class for the instructor.

Everything shown comes from the reports that grading left, and from the gradebook where a person has changed a mark.
A learner's page holds verdicts, reasons and measured ratios; no test, and no input that the examiner drew.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from nbgrader.api import MissingEntry
from rich.console import Console

from launchlab.course import gradebook
from launchlab.exam import judge
from launchlab.exam.show import MARKS, WORDS
from launchlab.grading import figures
from launchlab.grading.hints import Exercise, Hint, exercises
from launchlab.grading.sealed import reports
from launchlab.manifest import Chapter
from launchlab.manifest import chapter as find_chapter
from launchlab.paths import short

NEXT = {
    judge.PASSED: "",
    judge.FAILED: "按上面说的改一改，再用 ./grader/launch check {number} 在自己的机器上评一次。",
    judge.CRASHED: "先在自己的笔记本里从头运行到这一题，看看是哪一行让进程退出的。",
    judge.TIMED_OUT: "看看有没有停不下来的循环，或者等不到的事件。",
    judge.INCONCLUSIVE: "这不是 0 分：教师会复核，或者在机器空闲时再评一次。",
    judge.NEEDS_GPU: "这不是 0 分：要在有 GPU 的机器上再评一次。",
    judge.REFUSED: "这不是 0 分：教师会看这份提交。",
}
FIGURES = re.compile(r"（[^（）]*\d[^（）]*）$")  # what was counted and measured: different in each submission, though the reason is the same


@dataclass
class Row:
    """One test of one submission: ``score`` is the mark in force, None while it is open; ``by_hand``: a person gave it;
    ``state``: "all", "part", "none" or "open"; ``hints``: of the exercise, where not all points were reached."""

    id: str
    title: str
    word: str
    reason: str
    advice: str
    hints: tuple[Hint, ...]
    points: float
    score: float | None
    by_hand: bool
    pictures: list[dict[str, str]]

    @property
    def state(self) -> str:
        return "open" if self.score is None else "all" if self.score >= self.points else "part" if self.score else "none"


def main(name: str) -> int:
    """Write the pages of chapter ``name`` under ``build/reports``; 0, or 2 if nothing of it has been graded."""
    console, chapter = Console(), find_chapter(name)
    found = reports(chapter.name)
    if not found:
        console.print(f"还没有 {chapter.name} 的评分结果。请先评分：./grader/launch grade {chapter.number}。")
        return 2
    try:
        known, by_hand = exercises(chapter), _marks_by_hand(chapter.name)
    except gradebook.Unreachable as error:
        console.print(f"✗ {error}", markup=False)
        return 2
    templates = _templates()
    page, overview = templates.get_template("page.html"), templates.get_template("class.html")
    graded = {}
    for path in found:
        student = path.parent.name
        report = json.loads(path.read_text(encoding="utf-8"))
        graded[student] = rows = [_row(check, chapter, known, by_hand.get(student, {})) for check in report["checks"]]
        path.with_suffix(".html").write_text(page.render(chapter=chapter, student=student, report=report, rows=rows, total=_total(rows)), encoding="utf-8")
    target = found[0].parents[1] / f"{chapter.name}.html"
    totals = {student: _total(rows) for student, rows in graded.items()}
    target.write_text(overview.render(chapter=chapter, totals=totals, exercises=_exercises(graded), spread=_spread(list(totals.values()))), encoding="utf-8")
    console.print(f"{len(found)} 份提交，每份一页：{short(target.parent)}/姓名/{chapter.name}.html\n全班一页（给教师）：{short(target)}")
    return 0


def _row(check: dict[str, Any], chapter: Chapter, known: dict[str, Exercise], by_hand: dict[str, float]) -> Row:
    given = by_hand.get(check["id"])
    exercise = known.get(check["id"], Exercise(check["id"].removeprefix("test_"), ()))
    score = check["score"] if given is None else given
    missed = score is None or score < check["points"]
    return Row(
        check["id"], exercise.title, f"{MARKS.get(check['verdict'], '○')} {WORDS[check['verdict']]}", check["reason"],
        NEXT[check["verdict"]].format(number=chapter.number) if given is None else "", exercise.hints if missed else (), check["points"], score, given is not None,
        [_picture(exercise.title, record) for record in check["records"] if judge.measured(record)],
    )  # fmt: skip


def _picture(title: str, record: dict[str, Any]) -> dict[str, str]:
    told = figures.told(record)
    return {"svg": figures.speedup(record), "told": told, "alt": f"{title}：每对测量里，基准用时是这份提交和参考实现的几倍。{told}"}


def _marks_by_hand(name: str) -> dict[str, dict[str, float]]:
    """student -> id of a test -> the mark that a person gave in formgrader."""
    found = {}
    with gradebook.opened() as book:
        try:
            submissions = book.assignment_submissions(name)
        except MissingEntry:
            return {}
        for submission in submissions:
            grades = [grade for notebook in submission.notebooks for grade in notebook.grades]
            found[submission.student_id] = {grade.name: grade.manual_score for grade in grades if grade.manual_score is not None}
    return found


def _total(rows: list[Row]) -> dict[str, float]:
    return {"score": sum(row.score or 0.0 for row in rows), "max": sum(row.points for row in rows), "open": sum(row.score is None for row in rows)}


def _exercises(graded: dict[str, list[Row]]) -> list[dict[str, Any]]:
    """One entry for each test, the most often missed first: how many got all, part, nothing, and how many are open."""
    found = []
    for rows in zip(*_same_tests(graded), strict=True):
        judged = [row for row in rows if row.score is not None]
        counts = Counter(row.state for row in rows)
        missed = (counts["part"] + counts["none"]) / len(judged) if judged else 0.0
        mean = statistics.fmean(row.score for row in judged) if judged else None
        reasons = Counter(FIGURES.sub("", row.reason) for row in judged if row.score < row.points).most_common(3)
        found.append({"row": rows[0], "counts": counts, "of": len(rows), "missed": missed, "mean": mean, "reasons": reasons})
    return sorted(found, key=lambda each: -each["missed"])


def _same_tests(graded: dict[str, list[Row]]) -> list[list[Row]]:
    """The rows of each submission that was examined by the tests that most of the class were: a chapter may change in mid-course."""
    tests = {student: tuple((row.id, row.points) for row in rows) for student, rows in graded.items()}
    common = Counter(tests.values()).most_common(1)[0][0]
    return [rows for student, rows in graded.items() if tests[student] == common]


def _spread(totals: list[dict[str, float]]) -> list[dict[str, Any]]:
    """How many of the class lie in each fifth of the marks; submissions with open exercises are not counted."""
    shares = [total["score"] / total["max"] for total in totals if not total["open"] and total["max"]]
    fifths = Counter(min(4, int(share * 5)) for share in shares)
    return [{"label": f"{20 * i}–{20 * i + 20} %", "count": fifths[i], "share": fifths[i] / max(1, len(shares))} for i in range(5)]


def _templates() -> Environment:
    return Environment(loader=PackageLoader("launchlab.grading"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
