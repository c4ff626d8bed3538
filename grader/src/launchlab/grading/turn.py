"""Whose turn it is to touch submissions: one grader at a time, and no collecting meanwhile."""

from __future__ import annotations

import fcntl
import os
import weakref
from typing import Any

from launchlab import paths
from launchlab.exam.examine import Master


class _Turn:
    """The course's grading lock. Held as long as a holder of this process lives.

    A process that goes on after grading, as formgrader's server does, thus lets others have their
    turn, and lets go of the reference's process and its GPU memory.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._holders = 0

    def take(self, holder: Any) -> None:
        """Wait for another process's turn to end, and hold the lock for ``holder``, whose ``log.warning`` tells of the wait."""
        if self._descriptor is None:
            paths.BUILD.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(paths.BUILD / "grading.lock", os.O_RDWR | os.O_CREAT, 0o664)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder.log.warning("另一个评分进程正在运行，等它结束……")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._descriptor = descriptor
        self._holders += 1
        weakref.finalize(holder, self._leave)

    def _leave(self) -> None:
        self._holders -= 1
        if not self._holders:
            Master.dismiss()
            os.close(self._descriptor)
            self._descriptor = None


turn = _Turn()
