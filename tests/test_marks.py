"""The table of marks, as a spreadsheet reads it."""

import csv
from datetime import datetime

import pytest
from nbgrader.api import Gradebook

from launchlab import paths
from launchlab.course import gradebook
from launchlab.grading.marks import MarksExport


@pytest.fixture
def book(mini_with_gradebook):
    gradebook.ensure(mini_with_gradebook.name)
    with Gradebook(f"sqlite:///{paths.BUILD / 'gradebook.db'}", "launchlab") as book:
        book.find_assignment("90_mini").duedate = datetime(2026, 3, 20, 12, 0)
        for student in ("=1+1", "Li, Ming", "absent"):
            book.update_or_create_student(student)
        book.update_or_create_submission("90_mini", "=1+1", timestamp="2026-03-20 11:00:00 UTC")
        book.update_or_create_submission("90_mini", "Li, Ming", timestamp="2026-03-20 13:30:00 UTC")
        for test, score in (("test_total_us", 2), ("test_advance", 1.5)):
            grade = book.find_grade(test, "90_mini", "90_mini", "Li, Ming")
            grade.auto_score, grade.needs_manual_grade = score, False
        waiting = book.find_grade("test_longest_path", "90_mini", "90_mini", "Li, Ming")
        waiting.auto_score, waiting.needs_manual_grade = None, True
        book.find_submission("90_mini", "Li, Ming").notebooks[0].late_submission_penalty = 0.5
        book.db.commit()
        yield book


def rows(path) -> dict:
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    with path.open(encoding="utf-8-sig", newline="") as file:
        return {row["student_id"]: row for row in csv.DictReader(file)}


def test_marks_and_what_is_open(book, tmp_path):
    MarksExport(to=str(tmp_path / "marks.csv")).export(book)
    found = rows(tmp_path / "marks.csv")
    assert set(found) == {"'=1+1", "Li, Ming", "absent"}  # no formula, no column too many
    late = found["Li, Ming"]
    assert [late[name] for name in ("raw_score", "late_submission_penalty", "score", "max_score", "open", "hours_late")] == ["3.5", "0.5", "3.0", "8.0", "1", "1.5"]
    assert datetime.fromisoformat(late["timestamp"]).timestamp() - datetime.fromisoformat(late["duedate"]).timestamp() == 5400
    assert (found["absent"]["score"], found["absent"]["timestamp"], found["absent"]["open"]) == ("0.0", "", "")


def test_some_students_only(book):
    MarksExport(student=["absent"], assignment=["90_mini"]).export(book)
    assert set(rows(paths.BUILD / "grades.csv")) == {"absent"}
