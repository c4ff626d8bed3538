"""Marks as CSV, by plain ``nbgrader export``: what is still open is told, and a spreadsheet reads it as it is meant."""

from __future__ import annotations

import csv
from typing import Any

from nbgrader.api import Assignment, Gradebook, MissingEntry, Student, SubmittedAssignment
from nbgrader.plugins import ExportPlugin

from launchlab import paths
from launchlab.grading import clock

COLUMNS = (
    "assignment", "duedate", "timestamp", "hours_late", "student_id", "last_name", "first_name", "email",
    "raw_score", "late_submission_penalty", "score", "max_score", "open",
)  # fmt: skip
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would compute


class MarksExport(ExportPlugin):
    """nbgrader's columns, and two more: ``hours_late``, and ``open``: how many exercises wait for a person.

    The score of a submission with open exercises is what it has so far. Times are on this machine's clock.
    UTF-8 with a mark at the beginning, without which spreadsheets read Chinese as garbage; fields are quoted.
    """

    def export(self, gradebook: Gradebook) -> None:
        """Write the file named by ``--to``, by default ``build/grades.csv``: a row for each chapter and student."""
        target = self.to or str(paths.BUILD / "grades.csv")
        chapters, students = {str(each) for each in self.assignment}, {str(each) for each in self.student}
        with open(target, "w", encoding="utf-8-sig", newline="") as file:
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            for assignment in gradebook.assignments:
                for student in gradebook.students:
                    if (not chapters or assignment.name in chapters) and (not students or student.id in students):
                        table.writerow({name: _safe(value) for name, value in _row(gradebook, assignment, student).items()})
        self.log.info("成绩写到了 %s", target)


def _row(gradebook: Gradebook, assignment: Assignment, student: Student) -> dict[str, Any]:
    row = {
        "assignment": assignment.name, "duedate": _time(assignment.duedate), "student_id": student.id, "last_name": student.last_name,
        "first_name": student.first_name, "email": student.email, "max_score": assignment.max_score,
    }  # fmt: skip
    try:
        submission: SubmittedAssignment = gradebook.find_submission(assignment.name, student.id)
    except MissingEntry:
        return row | {"raw_score": 0.0, "late_submission_penalty": 0.0, "score": 0.0}
    penalty = submission.late_submission_penalty or 0.0
    return row | {
        "duedate": _time(submission.duedate), "timestamp": _time(submission.timestamp), "hours_late": round(submission.total_seconds_late / 3600, 1),
        "raw_score": submission.score, "late_submission_penalty": penalty, "score": max(0.0, submission.score - penalty),
        "open": sum(bool(grade.needs_manual_grade) for notebook in submission.notebooks for grade in notebook.grades),
    }  # fmt: skip


def _time(time: Any) -> str:
    return clock.told(time).astimezone().isoformat(" ") if time else ""


def _safe(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else "" if value is None else value
