"""`launchlab open`: what waits for a person: exercises without a mark, and marks given by hand to what has been graded anew."""

from __future__ import annotations

import json
from dataclasses import dataclass

from nbgrader.api import Gradebook, MissingEntry
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launchlab.course import gradebook
from launchlab.exam.show import WORDS
from launchlab.grading.hints import exercises
from launchlab.grading.sealed import report_path
from launchlab.manifest import Chapter
from launchlab.manifest import chapter as find_chapter


@dataclass(frozen=True)
class Case:
    """One open exercise: ``page``: its submission in formgrader, below the server's address."""

    student: str
    test: str
    verdict: str
    reason: str
    page: str


def main(name: str) -> int:
    """List the open cases of chapter ``name``; 0, or 2 if the gradebook cannot be opened."""
    console, chapter = Console(), find_chapter(name)
    try:
        with gradebook.opened() as book:
            found = cases(book, chapter)
    except gradebook.Unreachable as error:
        console.print(f"✗ {error}", markup=False)
        return 2
    if not found:
        console.print(f"{chapter.title}：没有未定的项目。")
        return 0
    table = Table(title=f"{chapter.title}：{len(found)} 项未定", expand=True)
    for heading, ratio in (("学生", 3), ("练习", 4), ("结论", 2), ("原因", 7), ("Formgrader 里的页面", 6)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    known = exercises(chapter)
    for case in found:
        title = known[case.test].title if case.test in known else case.test.removeprefix("test_")
        table.add_row(escape(case.student), title, case.verdict, escape(case.reason), case.page)
    console.print(table)
    console.print(
        "需要 GPU 的：换到有 GPU 的机器上，nbgrader autograde 章节名 --force 再评一次。\n"
        "其余的：./launch lab 打开 JupyterLab，在它的地址后面接上面的页面，看过以后填分数，填好就定了。"
    )
    return 0


def cases(book: Gradebook, chapter: Chapter) -> list[Case]:
    """The open cases of a chapter, by student and in the chapter's order of exercises."""
    try:
        submissions = sorted(book.assignment_submissions(chapter.name), key=lambda each: each.student_id)
    except MissingEntry:
        return []
    order = list(exercises(chapter))
    found = []
    for submission in submissions:
        told = _verdicts(submission.student_id, chapter)
        for notebook in submission.notebooks:
            waiting = [grade for grade in notebook.grades if grade.needs_manual_grade]
            for grade in sorted(waiting, key=lambda each: order.index(each.name) if each.name in order else len(order)):
                verdict, reason = _why(grade, told)
                found.append(Case(submission.student_id, grade.name, verdict, reason, f"formgrader/submissions/{notebook.id}/"))
    return found


def _why(grade, told: dict[str, tuple[str, str]]) -> tuple[str, str]:
    if grade.manual_score is not None:
        return "待复核", f"教师给过 {grade.manual_score:g} 分，之后又评过一次：请确认这个分数还对。"
    if not told:
        return "未评分", "这份提交还没有评分。"
    return told.get(grade.name, ("未评分", "上次评分之后才有这道测试：nbgrader autograde 章节名 --force 再评一次。"))


def _verdicts(student: str, chapter: Chapter) -> dict[str, tuple[str, str]]:
    """id of a test -> (verdict in words, reason), of the last exam; empty where there was none."""
    try:
        report = json.loads(report_path(student, chapter.name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {check["id"]: (WORDS[check["verdict"]], check["reason"]) for check in report["checks"]}
