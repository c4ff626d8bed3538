"""Runs a command and, when that has ended, ends all that it started, also what has left its session.

usage: python -I -S keeper.py COMMAND …

It takes in every process that its descendants leave behind, ends as the command did, and ends everything on SIGTERM, which
it gets when the examiner ends. Where it has ended, nobody is left. It is two processes that do the same, one kept by the
other, so that one may be killed: whoever forces an examiner to end may kill all that this has started, too, as Ray does with
its workers. A script of the standard library alone: it runs before, and beside, whatever the command imports.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SWEEP_SECONDS = 5.0


def main(command: list[str]) -> None:
    keep(signal.SIGTERM, partial(keep, signal.SIGKILL, partial(os.execvp, command[0], command)))


def keep(number: int, run: Callable[[], object]) -> None:
    """Have a child process ``run`` something; it gets the signal ``number`` when this process ends, however it ends. Never returns."""
    libc, keeper = ctypes.CDLL(None), os.getpid()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is a child to take along
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != keeper:  # it has ended before that
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        run()
    signal.signal(signal.SIGTERM, lambda *_: end(128 + signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    while True:  # others that end here were left behind, and are only taken note of
        pid, status = os.wait()
        if pid == child:
            end(os.waitstatus_to_exitcode(status))


def end(code: int) -> None:
    """End all that is left, then this process: by the exit code, or by the signal if it is negative."""
    until = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < until:
        for pid in children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break  # nobody is left
        time.sleep(0.001)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def children() -> list[int]:
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        found += [int(pid) for pid in path.read_text().split()]
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
