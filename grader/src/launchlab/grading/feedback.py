"""Feedback without hidden tests: learners see the visible part of a test cell and its verdict."""

from __future__ import annotations

from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbgrader.preprocessors import ClearHiddenTests
from nbgrader.utils import is_grade

PLACEHOLDER = "# （这里还有隐藏测试）"


class RedactHidden(ClearHiddenTests):
    """Cuts hidden tests out of feedback. Their outputs are verdicts, which hold no test code."""

    def preprocess_cell(self, cell: NotebookNode, resources: ResourcesDict, index: int) -> tuple[NotebookNode, ResourcesDict]:
        # Only where hidden tests can be: the same marks in a learner's own text are text.
        if is_grade(cell) and self._remove_hidden_test_region(cell):
            cell.source = f"{cell.source.rstrip()}\n{PLACEHOLDER}".lstrip()
        return cell, resources
