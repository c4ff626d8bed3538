"""The command that puts a student's kernel behind bubblewrap.

Inside: no network, no sight of other processes, a read-only view of what Python and CUDA
need, and one writable folder of its own. The repository, the gradebook, home folders and
other submissions are not hidden there: they do not exist.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import launchlab
from launchlab import paths
from launchlab.exam import limits

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/sys", "/etc")
# Files that programs look for in /etc; the rest of it may hold what is nobody's business.
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "fonts", "localtime", "passwd", "group", "nsswitch.conf", "OpenCL", "vulkan", "ssl/openssl.cnf")

# Of our own package, what notebooks and the agent import. What examines, grades and builds is nobody's business there.
SHOWN = ("__init__", "device", "paths", "lab", "exam")
SHOWN_OF_EXAM = ("__init__", "agent", "check", "compare", "judge", "memory", "party", "remote", "timing", "wire")
LARGEST_SCRATCH = 1 << 30  # bytes in /tmp, and as many in /dev/shm, which lie in memory


def available() -> bool:
    """Whether bubblewrap is installed; `works` tells whether it may be used."""
    return shutil.which("bwrap") is not None


def python_paths() -> list[Path]:
    """Folders that a Python process like this one imports from, each once, outermost first.

    Of the repository only the package itself and its environment: never the folder that a
    command was started in, nor one that holds solutions or what grading makes.
    """
    package = Path(launchlab.__file__).resolve().parents[1]
    candidates = [Path(sys.prefix), Path(sys.base_prefix), package, *(Path(entry) for entry in sys.path if entry)]
    candidates += [Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
    private = [Path.cwd().resolve(), package.parent, paths.GRADER.resolve(), paths.SOLUTIONS.resolve(), paths.BUILD]
    found: list[Path] = []
    for path in sorted({p.resolve() for p in candidates if p.exists()}, key=lambda p: len(p.parts)):
        if not any(secret.is_relative_to(path) for secret in private) and not any(path.is_relative_to(outer) for outer in found):
            found.append(path)
    return found


def python_links(folders: list[Path]) -> list[Path]:
    """Symbolic links outside of ``folders``, and of the system's, by which this process's interpreter and its library are named.

    A home folder may be one, an environment's ``bin/python`` may lead through one in ``~/.local/bin``.
    """
    shown = [*map(Path, SYSTEM), *folders]
    found: dict[Path, None] = {}
    for name in (sys.executable, sys.prefix, sys.base_prefix):
        followed, rest = Path("/"), list(Path(name).absolute().parts[1:])
        while rest:
            path = followed / rest.pop(0)
            if path.is_symlink():
                if not any(path.is_relative_to(folder) for folder in shown):
                    found[path] = None
                path = followed / os.readlink(path)
                followed, rest = Path("/"), [*path.parts[1:], *rest]
            else:
                followed = path.parent.parent if path.name == ".." else path
    return list(found)


def wrap(command: list[str], folder: Path, environment: dict[str, str]) -> list[str]:
    """``command`` to be run in ``folder`` (writable, same path inside) with ``environment``."""
    bwrap = ["bwrap", "--die-with-parent", "--unshare-all", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    for entry in SYSTEM:
        path = Path(entry)
        if entry == "/etc":
            for name in ETC:
                bwrap += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        elif path.is_symlink():
            bwrap += ["--symlink", os.readlink(path), entry]
        elif path.exists():
            bwrap += ["--ro-bind", entry, entry]
    scratch = ["--size", str(LARGEST_SCRATCH)] if "--size" in _options() else []
    bwrap += ["--dev", "/dev", *scratch, "--tmpfs", "/dev/shm", "--proc", "/proc", *scratch, "--tmpfs", "/tmp"]
    for device in [*sorted(Path("/dev").glob("nvidia*")), Path("/dev/dxg")]:
        bwrap += ["--dev-bind-try", str(device), str(device)]
    folders = python_paths()
    for path in folders:
        if not any(path.is_relative_to(entry) for entry in SYSTEM):
            bwrap += ["--ro-bind", str(path), str(path)]
    for link in python_links(folders):
        bwrap += ["--symlink", os.readlink(link), str(link)]
    for path in hidden():
        bwrap += ["--tmpfs", str(path)] if path.is_dir() else ["--ro-bind", os.devnull, str(path)]
    bwrap += ["--bind", str(folder), str(folder), "--chdir", str(folder)]
    for name, value in environment.items():
        bwrap += ["--setenv", name, value]
    return [*bwrap, "--", *command]


def hidden() -> list[Path]:
    """Files and folders of our package that a student's process does not see: all that is not named above."""
    package = Path(launchlab.__file__).resolve().parent
    found = []
    for folder, shown in ((package, SHOWN), (package / "exam", SHOWN_OF_EXAM)):
        for path in sorted(folder.iterdir()):
            if path.name == "__pycache__":  # files in the making come and go: only what has its final name
                found += [made for made in sorted(path.glob("*.pyc")) if made.name.partition(".")[0] not in shown]
            elif path.stem not in shown:
                found.append(path)
    return found


@cache
def _options() -> str:
    """The help text of this bubblewrap: older ones know fewer options."""
    return subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False).stdout


@cache
def works() -> bool:
    """Whether a sandboxed process can be started here (user namespaces may be forbidden). Tried once per process."""
    return _tried(["/usr/bin/env", "true"]) is not None


@cache
def counts_tasks() -> bool:
    """Whether RLIMIT_NPROC, set inside, counts what runs inside and nothing else."""
    inside = _tried(["/usr/bin/env", "readlink", "/proc/self/ns/user"])
    return limits.counts_by_namespace() and inside not in (None, os.readlink("/proc/self/ns/user"))


def _tried(command: list[str]) -> str | None:
    """What a sandboxed command says; None if it cannot be run."""
    if not available():
        return None
    with tempfile.TemporaryDirectory(prefix="ll-") as folder:
        wrapped = wrap(command, Path(folder), {"PATH": "/usr/bin:/bin"})
        ended = subprocess.run(wrapped, capture_output=True, text=True, timeout=20, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else None
