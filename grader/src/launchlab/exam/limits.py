"""What a student's process may use: limits that the operating system keeps.

They are set by the shell before it becomes the kernel, so that everything started from there has them. Data pages are
limited, not address space, of which CUDA reserves more than there is memory. If memory runs out all the same, this
process is to go first, not the examiner.

The number of processes is limited for all of a family together: by a control group, which root may make where the
control file system is writable, or by RLIMIT_NPROC, which counts by user and user namespace and so fits a sandboxed
process, but not root's, whom it never stops. Where neither can be had, `launchlab.exam.watch` alone sees to it.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import cache
from pathlib import Path

from launchlab.device import free_memory

LARGEST_FILE = 4 << 30  # bytes of a file that a student's process may write
MOST_TASKS = 512 + 16 * (os.cpu_count() or 1)  # processes and threads; libraries start a thread or two a core
GROUPS = Path("/sys/fs/cgroup")
SET = 'echo 1000 >/proc/self/oom_score_adj; ulimit -d "$1"; ulimit -f "$2"; for group in $3; do echo $$ >"$group/cgroup.procs"; done; shift 3; exec "$@"'
SET_TASKS = 'ulimit -u "$1" 2>/dev/null || ulimit -p "$1"; shift; exec "$@"'  # shells call it -u or -p


def process_memory() -> int:
    """Bytes of data that one process may hold: half of the machine's memory, at least 4 GiB."""
    return max(4 << 30, machine_memory() // 2)


def family_memory() -> int:
    """Bytes of memory that a process and all that it started may hold together: three quarters of the machine's, at least 5 GiB."""
    return max(5 << 30, machine_memory() * 3 // 4)


def machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limited(command: list[str], group: Group | None = None) -> list[str]:
    """``command`` under the limits of one process and, if there is one, in a control group."""
    folders = " ".join(map(str, group.folders)) if group else ""
    return ["/bin/sh", "-c", SET, "limits", str(process_memory() >> 10), str(LARGEST_FILE >> 9), folders, *command]


def few_tasks(command: list[str]) -> list[str]:
    """``command`` under a limit of processes; for the inside of a sandbox, whose user namespace has a count of its own."""
    return ["/bin/sh", "-c", SET_TASKS, "limits", str(MOST_TASKS), *command]


@cache
def told(sandboxed: bool) -> dict[str, str]:
    """What keeps the number of processes and the GPU's memory in bounds here: the kernel, or being watched alone."""
    group = Group.make(f"ll-{os.getpid()}-trial")
    if group is not None:
        group.remove()
    by_user = sandboxed and counts_by_namespace() and not _is_root_of_all()
    processes = "control group" if group is not None else "RLIMIT_NPROC" if by_user else "watched"
    return {"processes": processes, "gpu_memory": "watched" if free_memory() else "none"}


def counts_by_namespace() -> bool:
    """Whether this kernel counts the processes of each user namespace apart (Linux 5.14 on): before, all of a user's
    others, outside, would count too, and the process might not even start."""
    try:
        major, minor = (int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    except ValueError:
        return False
    return (major, minor) >= (5, 14)


def _is_root_of_all() -> bool:
    """Whether this is the root that RLIMIT_NPROC never stops: of the first namespace, whoever it says it is within another."""
    try:
        return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
    except OSError:
        return False


class Group:
    """A control group for one kernel's family. ``folders``: one for each hierarchy it is in."""

    def __init__(self, folders: list[Path]):
        self.folders = folders

    @classmethod
    def make(cls, name: str) -> Group | None:
        """A new group, limited in processes and, where that can be, in memory; None where none may be made."""
        made = []
        limits = {"pids": ("pids.max", MOST_TASKS), "memory": ("memory.max", family_memory())}
        old = {"memory": "memory.limit_in_bytes"}
        for controllers, parent in _parents():
            place = parent / name
            try:
                place.mkdir()
            except OSError:
                continue
            try:
                for controller in controllers & limits.keys():
                    file, value = limits[controller]
                    (place / (file if (place / file).exists() else old.get(controller, file))).write_text(str(value))
                made.append(place)
            except OSError:
                with contextlib.suppress(OSError):
                    place.rmdir()
        if any((place / "pids.max").exists() for place in made):
            return cls(made)
        cls(made).remove()
        return None

    def remove(self) -> None:
        """Remove the group, whose processes have been killed; what cannot be removed yet is left to `sweep`."""
        until = time.monotonic() + 1.0
        left = list(self.folders)
        while left and time.monotonic() < until:
            left = [place for place in left if not _removed(place)]
            if left:
                time.sleep(0.005)


def sweep() -> None:
    """Remove the groups of examiners that were killed before they could."""
    for _, parent in _parents():
        for place in parent.glob("ll-*-*"):
            owner = place.name.split("-")[1]
            if owner.isdecimal() and not Path("/proc", owner).exists():
                _removed(place)


def _removed(place: Path) -> bool:
    try:
        place.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _parents() -> list[tuple[set[str], Path]]:
    """Where a group of ours could be made, and for which controllers: of version 1 beside this process, of version 2 at
    the nearest place above it that hands the controllers on."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = set(controllers.split(",")) & {"pids", "memory"}
        if names and os.access(place := GROUPS / controllers / path.lstrip("/"), os.W_OK):
            found.append((names, place))
        elif not controllers:
            here = GROUPS / path.lstrip("/")
            for place in [here, *here.parents]:
                if not place.is_relative_to(GROUPS):
                    break
                handed_on = _handed_on(place)
                if "pids" in handed_on and os.access(place, os.W_OK):
                    found.append((handed_on & {"pids", "memory"}, place))
                    break
    return found


def _handed_on(place: Path) -> set[str]:
    try:
        return set((place / "cgroup.subtree_control").read_text().split())
    except OSError:
        return set()
