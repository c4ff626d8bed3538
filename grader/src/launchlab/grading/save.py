"""Verdicts into the gradebook; what is left open stays open."""

from __future__ import annotations

from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbgrader.preprocessors import SaveAutoGrades


class SaveVerdicts(SaveAutoGrades):
    """nbgrader's step, but for verdicts that are left to a person: they get no score instead of one."""

    def _add_score(self, cell: NotebookNode, resources: ResourcesDict) -> None:
        super()._add_score(cell, resources)
        if cell.metadata.get("launchlab", {}).get("open"):
            grade = self.gradebook.find_grade(cell.metadata.nbgrader.grade_id, self.notebook_id, self.assignment_id, self.student_id)
            grade.auto_score = None
            grade.needs_manual_grade = True
            self.gradebook.db.commit()
