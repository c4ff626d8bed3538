"""Looks after a student's process and all that it started, and ends them when they take more than their share.

What the kernel can limit for a whole family of processes, it does (see `launchlab.exam.limits`); the rest, and
everything where it may not, is looked at again and again: processes, memory, disk, and memory of the GPU.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from launchlab.device import free_memory, identity
from launchlab.exam import family
from launchlab.exam.limits import MOST_TASKS, family_memory
from launchlab.exam.timing import GpuBusy, exclusive

GLANCE_SECONDS, LOOK_SECONDS = 0.03, 0.25
TASKS_SEEN = MOST_TASKS * 5 // 4  # where the kernel refuses more than MOST_TASKS, a program is told so, and lives
LEAST_DISK = 1 << 30  # bytes to be left free where a student's process may write
LEAST_GPU = 0.02  # of the GPU's memory, to be left free for the reference and the examiner
SETTLE_SECONDS = 10.0  # for the GPU memory of a family that has ended to be free again
GPU_FULL = "它把显存用完了，已停止"


class NoRoom(RuntimeError):
    """The GPU's memory has run out, and not by the process that was ended for it; the text (Chinese) says so."""


class Watch:
    """Watches the family of process ``root``, which may write in ``folder``.

    ``alive`` tells whether it still runs, ``kill`` ends it and waits until it has ended. ``why``: the reason (Chinese)
    for which it was ended, or None.
    """

    def __init__(self, root: int, folder: Path, alive: Callable[[], bool], kill: Callable[[], None]):
        self.why: str | None = None
        self._root, self._folder, self._alive, self._kill = root, folder, alive, kill
        self._innocent = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._not_before = 0.0
        self._low = 0  # looks in a row that found the GPU's memory nearly gone
        self._before = running_tasks()
        threading.Thread(target=self._watch, daemon=True, name="watch").start()

    def rest(self, seconds: float = LOOK_SECONDS) -> None:
        """Do not look for ``seconds`` (math.inf: until told otherwise): what happens meanwhile may be timed."""
        self._not_before = time.monotonic() + seconds

    def end(self) -> None:
        """Stop watching."""
        self._over.set()

    def check(self) -> None:
        """Look now; what is found is acted upon, and told by `verdict`."""
        self._act(self._share(sure=True))

    def verdict(self) -> str | None:
        """Why the family was ended, once that is settled; None if it was not. Raises `NoRoom` if it was not to blame."""
        with self._lock:
            if self._innocent:
                raise NoRoom("显存快用完了，但不是这份提交占的：请结束占用 GPU 的其他程序，再评一次")
            return self.why

    def _watch(self) -> None:
        next_look = 0.0
        while not self._over.wait(GLANCE_SECONDS):
            now = time.monotonic()
            if now < self._not_before:
                continue
            if now >= next_look or running_tasks() > self._before + TASKS_SEEN:
                next_look = now + LOOK_SECONDS
                with contextlib.suppress(OSError, GpuBusy):  # gone between two steps of a look, its folder too
                    if self._alive():
                        self._act(self._share(sure=False))

    def _share(self, sure: bool) -> str | None:
        """What the family takes too much of (Chinese), or None. ``sure``: a GPU nearly full need not be seen twice."""
        pids = family.family(self._root, most=TASKS_SEEN)
        if len(pids) > TASKS_SEEN or family.tasks(pids) > TASKS_SEEN:
            return f"它同时运行的进程和线程超过了 {MOST_TASKS} 个，已停止"
        limit = family_memory()
        if family.resident(pids) > limit and family.memory(pids) > limit:
            return f"它和它启动的进程一共占用了超过 {limit >> 30} GiB 内存，已停止"
        if shutil.disk_usage(self._folder).free < LEAST_DISK and folder_size(self._folder) > LEAST_DISK:
            return "它快把磁盘写满了，已停止"
        self._low = self._low + 1 if is_full(free_memory()) else 0
        return GPU_FULL if self._low > (0 if sure else 1) else None

    def _act(self, why: str | None) -> None:
        if why is None:
            return
        with self._lock:
            if self.why is not None or not self._alive():
                return
            if why == GPU_FULL:
                self._find_out()
            else:
                self.why = why
                self._kill()

    def _find_out(self) -> None:
        """End the family for a GPU that is full, and see whether that was its doing.

        One family at a time on a GPU, whoever examines it: what another, ended meanwhile, gives back would be held against
        this one. Who comes later and finds room again has nothing to find out.
        """
        with exclusive(f"{identity()} memory"):
            before = free_memory()
            if not is_full(before):
                return
            self.why = GPU_FULL
            self._kill()
            self._innocent = not self._freed(before)

    def _freed(self, before: tuple[int, int]) -> bool:
        """Whether the GPU has got back a good part of its memory since ``before``: then it was theirs who have just ended."""
        until = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:
            now = free_memory()
            if now is None:
                break
            if now[0] - before[0] > LEAST_GPU * now[1]:
                return True
            time.sleep(0.02)
        return False


def is_full(found: tuple[int, int] | None) -> bool:
    """Whether a GPU's memory, as `free_memory` found it, is nearly used up; False where that could not be told."""
    return found is not None and found[0] < LEAST_GPU * found[1]


def running_tasks() -> int:
    """How many threads there are on this machine: quick, and enough to notice that they multiply."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        return 0


def folder_size(folder: Path) -> int:
    """Bytes in the files below ``folder``; links are not followed."""
    whole = 0
    for place, _, names in os.walk(folder, onerror=None):
        for name in names:
            try:
                whole += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
    return whole
