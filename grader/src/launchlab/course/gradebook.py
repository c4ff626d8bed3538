"""The gradebook knows each chapter's cells as the committed solution notebook has them.

nbgrader takes them in by generate_assignment, and refuses to once a submission has been graded.
Here both happen by themselves, so that plain ``nbgrader autograde`` works on a fresh clone and
after a test was added.

The gradebook is a file of SQLite, or a database of a PostgreSQL server that graders on several
machines share: what must happen once is guarded by a lock on this machine and one in the server.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import sqlalchemy
from nbformat import NotebookNode
from nbgrader.api import Comment, Grade, Gradebook, GradeCell, MissingEntry, SolutionCell, SourceCell
from nbgrader.converters import GenerateAssignment
from nbgrader.coursedir import CourseDirectory
from nbgrader.utils import compute_checksum, is_grade, is_locked, is_solution

from launchlab import paths
from launchlab.course.release import ReleaseError, generate, settings
from launchlab.course.stubs import StubSolutions

SERVER_LOCK = 0x4C61756E63684C61  # "LaunchLa": the one key that all graders of one server agree on


class Unreachable(Exception):
    """The gradebook cannot be opened; the text (Chinese) says why and what to try."""


@contextmanager
def opened(coursedir: CourseDirectory | None = None) -> Iterator[Gradebook]:
    """The gradebook of ``coursedir`` (by default that of the configuration), closed afterwards. Raises `Unreachable`."""
    coursedir = coursedir or CourseDirectory(config=settings())
    with _alone(coursedir.db_url):  # opening an empty one makes its tables
        gradebook = _open(coursedir)
    with gradebook:
        yield gradebook


def ensure(name: str, coursedir: CourseDirectory | None = None) -> bool:
    """Bring the gradebook's cells of assignment ``name`` up to date; True if it had to be changed.

    ``coursedir``: nbgrader's, when one is at work (its root and database count); else that of
    the configuration. May be called within a running converter: it starts one of its own, which
    writes to a temporary folder, never to ``course/``. Marks of cells that still exist are kept;
    a new test cell is left open in submissions that were graded before.
    ReleaseError: there is no such solution notebook, or nbgrader refused it. Unreachable: no gradebook.
    """
    config = settings()
    coursedir = coursedir or CourseDirectory(config=config)
    folder = Path(coursedir.format_path(coursedir.source_directory, ".", name))
    wanted = {path.stem: _cells(path) for path in folder.glob("*.ipynb")}
    if not wanted:
        raise ReleaseError(f"没有 {name} 的解答笔记本（{folder}）。章节名写对了吗？先运行 launchlab build {name}。")
    with _alone(coursedir.db_url):
        with _open(coursedir) as gradebook:
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


def enrol(name: str, students: list[str], coursedir: CourseDirectory) -> None:
    """Have a row for each of ``students`` and their submissions of assignment ``name``, which the gradebook must know.

    nbgrader makes them while it grades. Two graders of one class would both make them, and one would fail.
    """
    with _alone(coursedir.db_url), _open(coursedir) as gradebook:
        for student in students:
            try:
                gradebook.update_or_create_student(student)
                gradebook.update_or_create_submission(name, student)
            except Exception:  # noqa: BLE001 - a name that no database takes, say: nbgrader tells so at that submission
                gradebook.db.rollback()


def _open(coursedir: CourseDirectory) -> Gradebook:
    # nbgrader's own steps open it without naming the course, and make another then: here first, behind the lock.
    Gradebook(coursedir.db_url).close()
    return Gradebook(coursedir.db_url, coursedir.course_id)


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
def _alone(db_url: str) -> Iterator[None]:
    """One process at a time: two graders that start together must not both fill the gradebook. Raises `Unreachable`."""
    paths.BUILD.mkdir(parents=True, exist_ok=True)
    with open(paths.BUILD / "gradebook.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not db_url.startswith("postgres"):
            yield
            return
        try:
            connection = sqlalchemy.create_engine(db_url, poolclass=sqlalchemy.NullPool).connect()
        except sqlalchemy.exc.SQLAlchemyError as error:
            where = sqlalchemy.make_url(db_url).render_as_string(hide_password=True)
            reason = str(getattr(error, "orig", None) or error).strip()
            raise Unreachable(f"连不上成绩册 {where}：{reason}\n请检查环境变量 LAUNCHLAB_GRADEBOOK，以及服务器是否在运行。") from None
        with connection:  # the lock ends with it
            connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": SERVER_LOCK})
            yield
