"""A process and all that it started, seen and stopped through /proc."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that ``pid`` started, or was left with, and that are still there."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []  # it has just ended
    found: list[int] = []
    for thread in threads:
        try:
            found += [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
        except OSError:
            continue
    return found


def family(root: int, most: int = 100_000) -> list[int]:
    """``root`` and its descendants, parents first; ``most``: how many are enough."""
    found = [root]
    for pid in found:  # grows while it is walked
        found += children(pid)
        if len(found) > most:
            break
    return found


def send(pid: int, number: int) -> None:
    """Send a signal; a process that is gone is none too many."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def kill(root: int) -> None:
    """Kill ``root`` and its descendants."""
    for pid in family(root):
        send(pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether a process has come to rest: stopped, ended, or gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True


def tasks(pids: list[int]) -> int:
    """How many threads these processes have together; a process that is gone has none."""
    count = 0
    for pid in pids:
        try:
            count += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            continue
    return count


def memory(pids: list[int]) -> int:
    """Bytes of memory that these processes hold, each page counted once for all who share it."""
    whole = 0
    for pid in pids:
        try:
            told = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        whole += next((int(line.split()[1]) << 10 for line in told.splitlines() if line.startswith("Pss:")), 0)
    return whole


def resident(pids: list[int]) -> int:
    """Bytes of memory that these processes have in sight, shared pages counted for each: quick, and never less than `memory`."""
    page, whole = os.sysconf("SC_PAGE_SIZE"), 0
    for pid in pids:
        try:
            whole += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
        except (OSError, IndexError):
            continue
    return whole


def marked(mark: str) -> list[int]:
    """Processes that were started with ``mark`` in their environment, as far as this user may see it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found
