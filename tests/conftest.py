"""What tests share: a course of one chapter that needs no GPU, in a folder of its own."""

import shutil
import sys
from pathlib import Path

import pytest
from kernels import BEST
from nbgrader.api import Gradebook

from launchlab import manifest, paths
from launchlab.course import build
from launchlab.course.release import settings
from launchlab.exam.kernel import Kernel

MINI = Path(__file__).parent / "mini_course"


@pytest.fixture(autouse=True)
def no_history(tmp_path, monkeypatch) -> None:
    """What tests check goes into no learner's history."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user data"))


@pytest.fixture
def mini(tmp_path, monkeypatch) -> manifest.Chapter:
    """The chapter of ``tests/mini_course``, built, in a copy that this process and its children take for the course."""
    root = tmp_path / "course of tests"
    shutil.copytree(MINI, root)
    monkeypatch.setenv("LAUNCHLAB_ROOT", str(root))
    for name, folder in {
        "ROOT": "",
        "SOLUTIONS": "solutions",
        "COURSE": "course",
        "GRADER": "grader",
        "BUILD": "build",
    }.items():
        monkeypatch.setattr(paths, name, root / folder)
    chapter = manifest.chapter("90_mini")
    build.write(chapter, build.build(chapter))
    return chapter


@pytest.fixture(scope="session")
def new_gradebook(tmp_path_factory):
    """An empty gradebook's file: nbgrader takes seconds to make one."""
    path = tmp_path_factory.mktemp("gradebook") / "gradebook.db"
    settings()  # lets nbgrader find alembic
    Gradebook(f"sqlite:///{path}", "launchlab").close()
    return path


@pytest.fixture
def mini_with_gradebook(mini, new_gradebook) -> manifest.Chapter:
    """`mini`, with an empty gradebook."""
    paths.BUILD.mkdir(exist_ok=True)
    shutil.copy(new_gradebook, paths.BUILD)
    return mini


@pytest.fixture
def start(monkeypatch):
    """Starts kernels as grading does, and ends them."""
    # pytest puts this folder on the path, and so into the sandbox's view: graders have no such entry.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent])
    started = []

    def make(sandboxed: bool = BEST) -> Kernel:
        started.append(Kernel(sandboxed=sandboxed))
        started[-1].wait_ready()
        return started[-1]

    yield make
    for kernel in started:
        kernel.close()
