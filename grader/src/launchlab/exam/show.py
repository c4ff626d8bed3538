"""Verdicts as notebook outputs: for nbgrader's score, for instructors, and for feedback."""

from __future__ import annotations

import html

from nbformat import NotebookNode
from nbformat.v4 import new_output

from launchlab.exam import judge
from launchlab.exam.report import CheckReport

WORDS = {
    judge.PASSED: "通过", judge.FAILED: "未通过", judge.INCONCLUSIVE: "无法判断，留待复核", judge.CRASHED: "崩溃",
    judge.TIMED_OUT: "超时", judge.NEEDS_GPU: "需要 GPU", judge.REFUSED: "未能受理",
}
MARKS = {judge.PASSED: "✓", judge.FAILED: "✗", judge.CRASHED: "✗", judge.TIMED_OUT: "✗"}


def verdict(cell: NotebookNode, report: CheckReport) -> None:
    """Write ``report`` as the outputs of its test cell.

    nbgrader takes the number of an execute_result for the score, an error for 0, and no
    output for full marks: so there always is a number, and never anything on stderr.
    """
    open_case = report.verdict in judge.OPEN
    score = "未评分" if open_case else f"{report.score:g} / {report.points:g} 分"
    line = f"{MARKS.get(report.verdict, '○')} {WORDS[report.verdict]}（{score}）：{report.reason}"
    number = report.score if report.score is not None else 0.0
    cell.execution_count = None
    cell.outputs = [
        new_output("display_data", data={"text/plain": line, "text/html": f"<p><strong>{html.escape(line.split('：', 1)[0])}</strong>：{html.escape(report.reason)}</p>"}),
        new_output("execute_result", data={"text/plain": repr(float(number))}, execution_count=None),
    ]
    cell.metadata["launchlab"] = {"verdict": report.verdict, "open": open_case}


def note(text: str) -> NotebookNode:
    """A one-line note as an output."""
    return new_output("display_data", data={"text/plain": f"[LaunchLab] {text}"})
