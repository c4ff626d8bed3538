"""The gradebook knows each chapter's cells as the committed solution notebook has them.

nbgrader takes them in by generate_assignment, and refuses to once a submission has been graded.
Here both happen by themselves, so that plain ``nbgrader autograde`` works on a fresh clone and
after a test was added.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbgrader.api import Comment, Grade, Gradebook, GradeCell, MissingEntry, SolutionCell, SourceCell
from nbgrader.converters import GenerateAssignment
from nbgrader.coursedir import CourseDirectory
from nbgrader.utils import compute_checksum, is_grade, is_locked, is_solution

from launchlab import paths
from launchlab.course.release import ReleaseError, generate, settings
from launchlab.course.stubs import StubSolutions


def ensure(name: str, coursedir: CourseDirectory | None = None) -> bool:
    """Bring the gradebook's cells of assignment ``name`` up to date; True if it had to be changed.

    ``coursedir``: nbgrader's, when one is at work (its root and database count); else that of
    the configuration. May be called within a running converter: it starts one of its own, which
    writes to a temporary folder, never to ``course/``. Marks of cells that still exist are kept;
    a new test cell is left open in submissions that were graded before.
    ReleaseError: there is no such solution notebook, or nbgrader refused it.
    """
    config = settings()
    coursedir = coursedir or CourseDirectory(config=config)
    folder = Path(coursedir.format_path(coursedir.source_directory, ".", name))
    wanted = {path.stem: _cells(path) for path in folder.glob("*.ipynb")}
    if not wanted:
        raise ReleaseError(f"没有 {name} 的解答笔记本（{folder}）。章节名写对了吗？先运行 launchlab build {name}。")
    with _alone():
        with Gradebook(coursedir.db_url, coursedir.course_id) as gradebook:
            if _known(gradebook, name) == {notebook: _checksums(cells) for notebook, cells in wanted.items()}:
                return False
            for notebook, cells in wanted.items():
                _make_room(gradebook, name, notebook, cells)
        with tempfile.TemporaryDirectory(prefix="launchlab-gradebook-") as release:
            here = CourseDirectory(
                config=config,
                root=coursedir.root,
                source_directory=coursedir.source_directory,
                release_directory=release,
                db_url=coursedir.db_url,
                course_id=coursedir.course_id,
                assignment_id=name,
            )
            generate(GenerateAssignment(coursedir=here, config=config))
    return True


def _cells(path: Path) -> dict[str, NotebookNode]:
    """grade_id -> cell, of a solution notebook's cells that the gradebook keeps, as it keeps them."""
    nb, _ = StubSolutions().preprocess(nbformat.read(path, as_version=4), {})
    return {cell.metadata.nbgrader.grade_id: cell for cell in nb.cells if is_grade(cell) or is_solution(cell)}


def _checksums(cells: dict[str, NotebookNode]) -> dict[str, str]:
    return {name: compute_checksum(cell) for name, cell in cells.items()}


def _known(gradebook: Gradebook, assignment: str) -> dict[str, dict[str, str]]:
    """notebook -> grade_id -> checksum, as the gradebook has them."""
    try:
        notebooks = gradebook.find_assignment(assignment).notebooks
    except MissingEntry:
        return {}
    return {notebook.name: {cell.name: cell.checksum for cell in notebook.source_cells} for notebook in notebooks}


def _make_room(gradebook: Gradebook, assignment: str, name: str, wanted: dict[str, NotebookNode]) -> None:
    """Give a notebook that has submissions the wanted cells, which nbgrader's SaveCells insists on finding."""
    try:
        notebook = gradebook.find_notebook(name, assignment)
    except MissingEntry:
        return
    if not notebook.submissions:
        return
    db = gradebook.db
    for cell in [*notebook.grade_cells, *notebook.solution_cells, *notebook.source_cells]:
        if cell.name not in wanted:
            for mark in [*(getattr(cell, "grades", None) or []), *(getattr(cell, "comments", None) or [])]:
                db.delete(mark)
            db.delete(cell)
    for grade_id in wanted.keys() - {cell.name for cell in notebook.source_cells}:
        cell = wanted[grade_id]
        db.add(SourceCell(name=grade_id, notebook=notebook, cell_type=cell.cell_type, locked=is_locked(cell)))
        if is_grade(cell):
            points = cell.metadata.nbgrader.points
            graded = GradeCell(name=grade_id, notebook=notebook, cell_type=cell.cell_type, max_score=points)
            db.add_all(Grade(cell=graded, notebook=submission) for submission in notebook.submissions)
        else:
            solved = SolutionCell(name=grade_id, notebook=notebook)
            db.add_all(Comment(cell=solved, notebook=submission) for submission in notebook.submissions)
    db.commit()


@contextmanager
def _alone() -> Iterator[None]:
    """One process at a time: two graders that start together must not both fill the gradebook."""
    with open(paths.BUILD / "gradebook.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
