"""The sealed exam as nbgrader's Execute step."""

from __future__ import annotations

import json
import os
from pathlib import Path

from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor

from launchlab.exam import judge, show
from launchlab.exam.examine import examine
from launchlab.exam.report import CheckReport, Report
from launchlab.grading import outcome
from launchlab.manifest import chapter
from launchlab.paths import BUILD


class SealedExecute(NbGraderPreprocessor):
    """Examines a submission and writes its verdicts as outputs, and its report under ``build/reports``."""

    def preprocess(self, nb: NotebookNode, resources: ResourcesDict) -> tuple[NotebookNode, ResourcesDict]:
        student, assignment = resources["nbgrader"]["student"], resources["nbgrader"]["assignment"]
        told = nb.metadata.get("launchlab", {})
        if "refused" in told:
            report = refuse(nb, assignment, told["refused"])
        else:
            try:
                report = self._examine(nb, student, assignment)
            except Exception:
                self.log.exception("exam of %s failed", student)
                report = refuse(nb, assignment, "评分时出了意外的错误，请教师查看日志。这份提交没有评分。")
        report.notes = list(told.get("notes", []))
        write_report(report, student)
        # The mark by which a finished result is told from one that a killed grader left behind.
        nb.metadata.setdefault("launchlab", {})["examined"] = True
        return nb, resources

    def _examine(self, nb: NotebookNode, student: str, assignment: str) -> Report:
        """The exam: held already by a grader that was killed, on the cluster, or here."""
        coursedir, exams = self.parent.coursedir, self.parent.exams  # the exporter's
        folder = Path(coursedir.format_path(coursedir.submitted_directory, student, assignment))
        of = chapter(assignment)
        if exams:
            return exams.result(student, nb, folder).write_into(nb)
        if held := outcome.kept(student, assignment, outcome.key_of(nb, of, folder)):
            return held.write_into(nb)
        return examine(nb, of, files=folder, of_class=True)


def refuse(nb: NotebookNode, assignment: str, reason: str) -> Report:
    """A report that leaves every exercise open, for a submission that could not be read."""
    report = Report(assignment, "not needed", None, None)
    for cell in nb.cells:
        mark = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "code" and mark.get("grade"):
            check = CheckReport(mark["grade_id"], "answer", False, float(mark["points"]), None, judge.REFUSED, reason, [{"check": "stopped", "verdict": judge.REFUSED}])
            report.checks.append(check)
            show.verdict(cell, check)
    return report


def report_path(student: str, assignment: str) -> Path:
    """Where the report of a graded submission lies."""
    return BUILD / "reports" / student / f"{assignment}.json"


def reports(assignment: str) -> list[Path]:
    """The reports of all graded submissions of ``assignment``, by student."""
    return sorted(BUILD.glob(f"reports/*/{assignment}.json"))


def write_report(report: Report, student: str) -> None:
    """Write ``report`` as JSON, whole or not at all."""
    path = report_path(student, report.chapter)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report.to_json(), ensure_ascii=False, indent=1), encoding="utf-8")
    os.replace(part, path)
