"""What an exam held elsewhere left: kept on disk until it is in the gradebook, so that nobody is examined twice.

Only a grader writes here, whole files or none; a learner's process never sees the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from nbformat import NotebookNode, from_dict
from nbgrader.utils import is_grade

import launchlab
from launchlab.course import source
from launchlab.exam.report import Report
from launchlab.manifest import Chapter
from launchlab.paths import BUILD


@dataclass(frozen=True)
class Outcome:
    """One exam's result. ``key``: of what was examined; ``report``: as JSON; ``cells``: what the exam wrote into each code cell."""

    key: str
    report: dict
    cells: list[dict]

    @classmethod
    def of(cls, key: str, report: Report, nb: NotebookNode) -> Outcome:
        """The outcome of an exam that has just written its verdicts into ``nb``."""
        cells = [{"outputs": cell.outputs, "launchlab": cell.metadata.get("launchlab", {})} for cell in _code(nb)]
        return cls(key, report.to_json(), cells)

    def write_into(self, nb: NotebookNode) -> Report:
        """Give ``nb``, of the same key, the outputs and verdicts of the exam; returns its report."""
        for cell, left in zip(_code(nb), self.cells, strict=True):
            cell.execution_count = None
            cell.outputs = from_dict(left["outputs"])
            if is_grade(cell):
                cell.metadata["launchlab"] = from_dict(left["launchlab"])
        return Report.from_json(self.report)


def key_of(nb: NotebookNode, chapter: Chapter, files: Path | None) -> str:
    """A hash, in hexadecimal, of all that an exam of ``nb`` depends on: equal keys, equal exams.

    Of a test cell its name alone counts, for the exam runs the solution's text. ``files``: the submission's folder.
    """
    cells = [[cell.get("id"), cell.metadata.nbgrader.grade_id, None] if is_grade(cell) else [cell.get("id"), None, cell.source] for cell in _code(nb)]
    parts = [json.dumps(cells), course_key(chapter), source.sha256(files) if files else ""]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def course_key(chapter: Chapter) -> str:
    """A hash, in hexadecimal, of a chapter as it is here, and of the program that examines it."""
    solution = hashlib.sha256(chapter.solution.read_bytes()).hexdigest()
    return hashlib.sha256(f"{_program()} {solution} {source.sha256(chapter.solution.parent)}".encode()).hexdigest()


@cache
def _program() -> str:
    return source.sha256(Path(launchlab.__file__).parent)


def place(student: str, chapter: str) -> Path:
    """Where the outcome of a student's exam waits."""
    return BUILD / "exams" / student / f"{chapter}.json"


def keep(outcome: Outcome, student: str) -> None:
    """Put an outcome in its place, in that of an older one."""
    path = place(student, outcome.report["chapter"])
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(outcome), ensure_ascii=False), encoding="utf-8")
    os.replace(part, path)


def kept(student: str, chapter: str, key: str) -> Outcome | None:
    """The outcome that waits for a student, if it is one of ``key``."""
    try:
        found = Outcome(**json.loads(place(student, chapter).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # none, or none that this version wrote
        return None
    return found if found.key == key else None


def waiting(chapter: str) -> int:
    """How many outcomes of a chapter wait."""
    return sum(1 for _ in BUILD.glob(f"exams/*/{chapter}.json"))


def settled(notebooks: Iterable[str], **_: object) -> None:
    """nbgrader's ``post_convert_hook``: a submission is in the gradebook, and its outcome no longer needed.

    ``notebooks``: the paths handed in, ``…/STUDENT/CHAPTER/CHAPTER.ipynb``.
    """
    for path in map(Path, notebooks):
        place(path.parts[-3], path.parts[-2]).unlink(missing_ok=True)


def _code(nb: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in nb.cells if cell.cell_type == "code"]
