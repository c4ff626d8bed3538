"""A class of the course of one chapter, graded by the real ``nbgrader``, in a folder of its own."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attack_files
import nbformat
from nbformat import NotebookNode
from nbgrader.api import Gradebook

import launchlab
from launchlab.course.release import CONFIG

if TYPE_CHECKING:
    import pytest

MINI = Path(__file__).parent / "mini_course"
NAME = "90_mini"
POINTS = {"test_total_us": 2.0, "test_advance": 3.0, "test_longest_path": 3.0}
# Hangs are part of the class: here they are not waited for as long as in a real one.
SHORT = """
import importlib as _importlib

_party, _process, _remote = (_importlib.import_module("launchlab.exam." + _name) for _name in ("party", "process", "remote"))
_process.CELL_SECONDS, _process.LOAD_SECONDS, _remote.BUILD_SECONDS = 6.0, 60.0, 5.0
_party.Party.ask.__kwdefaults__["seconds"] = 5.0
"""


class Course:
    """A built copy of the mini course under ``root``, and the class that handed in there."""

    def __init__(self, root: Path, build: str = "build"):
        self.root = root
        self.build = root / build
        self.scratch = root / "t"  # a short name: sockets lie in there

    @classmethod
    def make(cls, root: Path) -> Course:
        """Copy and build the course."""
        shutil.copytree(MINI, root)
        shutil.copy(CONFIG, root / "grader")
        with open(root / "grader" / CONFIG.name, "a", encoding="utf-8") as config:
            config.write(SHORT)
        course = cls(root)
        course.scratch.mkdir()
        course.rebuild()
        return course

    @property
    def source(self) -> Path:
        return self.root / "solutions" / NAME / f"{NAME}.py"

    @property
    def solution(self) -> NotebookNode:
        return nbformat.read(self.source.with_suffix(".ipynb"), as_version=4)

    @property
    def release(self) -> NotebookNode:
        return nbformat.read(self.root / "course" / NAME / f"{NAME}.ipynb", as_version=4)

    @property
    def honest(self) -> NotebookNode:
        """A learner's notebook with all answers right."""
        return attack_files.honest(self.solution, self.release)

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(Path(launchlab.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**os.environ, "LAUNCHLAB_ROOT": str(self.root), "PYTHONPATH": path, "TMPDIR": str(self.scratch)}

    def rebuild(self) -> None:
        """Solution notebook and release from the source as it is now."""
        code = "import sys; from launchlab.course import build; sys.exit(build.main([], check=False))"
        subprocess.run([sys.executable, "-c", code], env=self.environment, check=True, capture_output=True)

    def hand_in(self, student: str, notebook: NotebookNode | bytes, files: dict[str, str] | None = None, name: str = f"{NAME}.ipynb") -> Path:
        """Put a submission in its place; returns its folder. ``notebook`` may be any bytes."""
        folder = self.build / "submitted" / student / NAME
        folder.mkdir(parents=True, exist_ok=True)
        data = notebook if isinstance(notebook, bytes) else json.dumps(notebook, ensure_ascii=False).encode()
        (folder / name).write_bytes(data)
        for file, text in (files or {}).items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")
        return folder

    def start(self, *arguments: str) -> subprocess.Popen:
        """Start ``nbgrader`` as an instructor does, from the folder ``grader``; all its output in one pipe."""
        return subprocess.Popen(
            [sys.executable, "-m", "nbgrader", *arguments], cwd=self.root / "grader", env=self.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def nbgrader(self, *arguments: str, seconds: float = 900) -> tuple[int, str]:
        """Run ``nbgrader``; exit code and output."""
        process = self.start(*arguments)
        text, _ = process.communicate(timeout=seconds)
        return process.returncode, text

    def students(self) -> list[str]:
        """Who handed in."""
        return sorted(path.name for path in (self.build / "submitted").iterdir())

    def report(self, student: str) -> dict:
        """The exam's report of one submission: ``checks`` by id, beside what else it holds."""
        report = json.loads((self.build / "reports" / student / f"{NAME}.json").read_text(encoding="utf-8"))
        return report | {"checks": {check["id"]: check for check in report["checks"]}}

    def marks(self) -> dict[str, dict[str, float | None]]:
        """Student -> test -> ``auto_score`` in the gradebook; duplicate rows are an error."""
        with Gradebook(f"sqlite:///{self.build / 'gradebook.db'}", "launchlab") as gradebook:
            found = {}
            for submission in gradebook.assignment_submissions(NAME):
                rows = [(grade.name, grade.auto_score) for notebook in submission.notebooks for grade in notebook.grades]
                assert len(rows) == len(dict(rows)), submission.student_id
                assert submission.student_id not in found
                found[submission.student_id] = dict(rows)
            return found

    def survivors(self) -> list[str]:
        """Command lines of the processes that still run with this course's temporary folder."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"TMPDIR={self.scratch}".encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # gone, or another user's
                continue
        return found

    def feedback(self, student: str) -> str:
        """The HTML that a student gets."""
        return (self.build / "feedback" / student / NAME / f"{NAME}.html").read_text(encoding="utf-8")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that ``make`` fills once per test run, however many workers share the run."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / name
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder
