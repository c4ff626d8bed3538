"""A kernel in waiting, so that its start costs nobody time: begun for a submission while the reference is loaded, and for the
next one while this one is examined.

It is as fresh as any: behind its own sandbox, in its own folder, and so far it has run nothing but
the imports of the chapter's given cells. While something is timed it is stopped.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from launchlab.exam.kernel import Kernel, KernelDied


class Waiting:
    """Gives out kernels that ``make`` makes, each once. With ``ahead`` it begins the next one meanwhile.

    ``least_cpus``: with fewer it does not, for it would take its time from the exam under way.
    """

    def __init__(self, make: Callable[[], Kernel], least_cpus: int):
        self.ahead = False
        self._make, self._enough = make, _cpus() >= least_cpus
        self._kernel: Kernel | None = None
        self._stopped = False

    def take(self, own: Path | None) -> Kernel:
        """A fresh kernel, for the submission whose folder is ``own``."""
        kernel, self._kernel = self._kernel, None
        if kernel is not None and kernel.process.poll() is not None:
            kernel.close()
            kernel = None
        if kernel is not None and self._stopped:  # a learner's process broke down in the middle of something timed
            kernel.resume()
        kernel = kernel or self._make()
        kernel.own = own
        if self.ahead and not self._stopped:
            self.begin()
        return kernel

    def begin(self) -> None:
        """Begin a kernel for whoever comes next, unless one waits already or would take others their time."""
        if self._kernel is None and self._enough:
            with contextlib.suppress(OSError):  # it is then made when it is needed
                self._kernel = self._make()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """While something is timed: whoever waits is kept from working, or given up."""
        if self._kernel is not None:
            try:
                self._kernel.pause()
            except KernelDied:
                self.close()
        self._stopped = True
        try:
            yield
        finally:
            self._stopped = False
            if self._kernel is not None:
                self._kernel.resume()

    def close(self) -> None:
        """End the kernel in waiting, if there is one."""
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.close()


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
