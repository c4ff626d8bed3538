"""nbgrader's generate_assignment, run in this process: on a throw-away copy, or for the gradebook."""

from __future__ import annotations

import io
import logging
import shutil
import tempfile
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbgrader.converters import GenerateAssignment
from nbgrader.converters.base import NbGraderException
from nbgrader.coursedir import CourseDirectory
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

import launchlab
from launchlab.course import source
from launchlab.manifest import Chapter

CONFIG = Path(launchlab.__file__).parents[2] / "nbgrader_config.py"


class ReleaseError(Exception):
    """nbgrader refused; the message holds what it logged."""


def settings() -> Config:
    """A fresh copy of what ``nbgrader`` reads from its configuration file."""
    return PyFileConfigLoader(CONFIG.name, path=str(CONFIG.parent)).load_config()


def release(name: str, notebook: str, folder: Path) -> dict[str, bytes]:
    """What nbgrader releases of a chapter: path within the release -> bytes.

    ``notebook``: the solution notebook's text; ``folder``: where its data files lie. Neither the
    folder nor any gradebook is touched. ReleaseError: nbgrader refused.
    """
    config = settings()
    config.SaveCells.enabled = False
    with tempfile.TemporaryDirectory(prefix="launchlab-build-") as root:
        copy = Path(root, config.CourseDirectory.source_directory, name)
        for path in source.files(folder):
            target = copy / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        copy.mkdir(parents=True, exist_ok=True)
        (copy / f"{name}.ipynb").write_text(notebook, encoding="utf-8")
        coursedir = CourseDirectory(config=config, root=root, assignment_id=name)
        generate(GenerateAssignment(coursedir=coursedir, config=config, no_database=True))
        released = Path(root, config.CourseDirectory.release_directory, name)
        files = sorted(path for path in released.rglob("*") if path.is_file())
        return {path.relative_to(released).as_posix(): path.read_bytes() for path in files}


def released(chapter: Chapter) -> dict[str, bytes]:
    """The chapter's release as the course has it, whatever a learner did to the copy in ``course/``: path within it -> bytes."""
    return release(chapter.name, chapter.solution.read_text(encoding="utf-8"), chapter.solution.parent)


def pristine(chapter: Chapter) -> NotebookNode:
    """The notebook of `released`."""
    return nbformat.reads(released(chapter)[f"{chapter.name}.ipynb"].decode(), as_version=4)


def generate(converter: GenerateAssignment) -> None:
    """Run a converter with its log kept aside; ReleaseError, with that log, if it fails."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    converter.log = logging.Logger("launchlab.release", logging.INFO)  # not the application's: a grader's screen is for grading
    converter.log.addHandler(handler)
    try:
        converter.start()
    except NbGraderException as error:
        raise ReleaseError(f"nbgrader generate_assignment 失败：{error}\n{written.getvalue()}") from error
