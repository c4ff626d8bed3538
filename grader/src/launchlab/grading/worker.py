"""The other end of `launchlab.grading.cluster`: an examiner in a process of its own, on whatever machine Ray puts it."""

from __future__ import annotations

import io
import os
import platform
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nbformat

from launchlab.device import gpu
from launchlab.exam import sandbox
from launchlab.exam.examine import examine
from launchlab.grading.outcome import Outcome, course_key
from launchlab.manifest import chapter as find_chapter


@dataclass(frozen=True)
class About:
    """Who a worker is. ``course``: `course_key` of the chapter as its machine has it; ``gpu``: a name or None."""

    name: str
    course: str
    gpu: str | None
    sandbox: bool


@dataclass(frozen=True)
class Task:
    """One submission to examine: ``notebook`` as JSON text, ``files``: a tar of what lies beside it, or None."""

    key: str
    chapter: str
    notebook: str
    files: bytes | None


class Worker:
    """Examines one submission after another, the reference's process kept between them. Ray makes an actor of it."""

    def about(self, chapter: str) -> About:
        """What the driver must know before it gives out work."""
        device = gpu()
        return About(f"{platform.node()}:{os.getpid()}", course_key(find_chapter(chapter)), device.name if device else None, sandbox.works())

    def examine(self, task: Task) -> Outcome:
        """The exam, by the same function as on one machine."""
        nb = nbformat.reads(task.notebook, as_version=4)
        with tempfile.TemporaryDirectory(prefix="launchlab-files-") as folder:
            if task.files is not None:
                unpack(task.files, Path(folder))
            report = examine(nb, find_chapter(task.chapter), files=Path(folder) if task.files is not None else None, of_class=True)
        return Outcome.of(task.key, report, nb)


def pack(folder: Path) -> bytes:
    """A tar of the plain files in ``folder``, but for its notebooks."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path.suffix != ".ipynb"):
            tar.add(path, path.relative_to(folder).as_posix(), recursive=False)
    return packed.getvalue()


def unpack(packed: bytes, folder: Path) -> None:
    """The files of `pack` into ``folder``, none outside it."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(folder, filter="data")
