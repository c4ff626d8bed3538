"""The launcher as run: real interpreters, real pip, and lock files that name tiny packages made here."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SCRIPT = REPOSITORY / "grader" / "launch"
# Stands for the package launchlab, of which the launcher only knows that it can be run.
PROGRAM = """\
import importlib.metadata, json, os, sys
names = ("first", "second", "third", "gpu-part", "tool", "by-hand")
found = {d.name: d.version for d in importlib.metadata.distributions() if d.name in names}
print(json.dumps({"arguments": sys.argv[1:], "prefix": sys.prefix, "found": found, "path": os.environ["PATH"]}))
"""


class Bench:
    """A repository with the launcher in it, an index of its own, and the way to start it."""

    def __init__(self, root: Path):
        # The index lies beside it: pip takes a space in PIP_FIND_LINKS for the end of a path.
        self.root, self.index, self.venv = root, root.parent / "index", root / "grader" / ".venv"
        package = root / "grader" / "src" / "launchlab"
        package.mkdir(parents=True)
        self.index.mkdir()
        shutil.copy(SCRIPT, root / "grader" / "launch")
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(PROGRAM)

    def wheel(self, name: str, version: str) -> str:
        """Put a package into the index; return its line for a lock file."""
        stem = f"{name.replace('-', '_')}-{version}"
        path = self.index / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{name.replace('-', '_')}.py", "")
            wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{stem}.dist-info/RECORD", "")
        return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"

    def lock(self, *lines: str, name: str = "lock.txt") -> None:
        (self.root / "grader" / name).write_text("".join(lines))

    def environment(self, **extra: str) -> dict[str, str]:
        """The tests' own, but for what would steer the launcher or pip; the index is the folder unless told otherwise."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LAUNCHLAB_", "PIP_", "PYTHON"))}
        return kept | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index), "PIP_NO_CACHE_DIR": "1", **extra}

    def start(self, *arguments: str, python: str = sys.executable, **extra: str) -> subprocess.CompletedProcess:
        command = [python, str(self.root / "grader" / "launch"), *arguments]
        return subprocess.run(command, env=self.environment(**extra), capture_output=True, text=True, timeout=120)

    def runs(self, *arguments: str, **extra: str) -> dict:
        """Start it; it must succeed. What the program saw."""
        ended = self.start(*arguments, **extra)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout) | {"said": ended.stderr}

    def refuses(self, *arguments: str, **extra: str) -> str:
        """Start it; it must stop with a message in Chinese and a short English line, and no traceback."""
        ended = self.start(*arguments, **extra)
        assert ended.returncode == 1, ended.stderr
        assert ended.stdout == ""
        assert "Traceback" not in ended.stderr
        assert re.search(r"^✗ .*[\u4e00-\u9fff]", ended.stderr, re.MULTILINE)
        assert re.search(r"^  \([ -~]{20,}\)$", ended.stderr, re.MULTILINE)
        return ended.stderr


@pytest.fixture
def bench(tmp_path) -> Bench:
    made = Bench(tmp_path / "a course")
    made.lock(made.wheel("first", "1.0"), made.wheel("second", "1.0"))
    made.lock(name="lock-tools.txt")
    return made


@pytest.fixture(scope="module")
def lasting(tmp_path_factory) -> Bench:
    """A bench whose environment tests make and change one after the other: a new one takes seconds."""
    return Bench(tmp_path_factory.mktemp("launch") / "a course")


def test_environment_is_made_once_and_follows_the_locks(lasting):
    bench = lasting
    bench.lock(*(bench.wheel(name, "1.0") for name in ("first", "second", "third")))
    bench.lock(name="lock-tools.txt")
    made = bench.runs("doctor", "--json")
    assert made["arguments"] == ["doctor", "--json"]
    assert made["prefix"] == str(bench.venv)
    assert made["path"].startswith(str(bench.venv / "bin") + os.pathsep)
    assert made["found"] == {"first": "1.0", "second": "1.0", "third": "1.0"}
    assert "首次启动" in made["said"]
    assert "虚拟环境就绪" in made["said"]

    began = time.monotonic()
    assert bench.runs()["said"] == ""
    assert time.monotonic() - began < 3

    # Another lock: the new version comes, what is not named any more goes. What a person installed stays, and so does what
    # only some commands need now: the other may use it.
    bench.wheel("by-hand", "1.0")
    pip = [bench.venv / "bin" / "python", "-m", "pip", "install", "-q", "by-hand"]
    subprocess.run(pip, check=True, env=bench.environment())
    bench.lock(bench.wheel("first", "2.0"))
    bench.lock(bench.wheel("third", "1.0"), name="lock-tools.txt")
    changed = bench.runs()
    assert changed["found"] == {"first": "2.0", "third": "1.0", "by-hand": "1.0"}
    assert "锁定文件变了" in changed["said"]
    assert bench.runs()["said"] == ""

    # Beside a driver the lock of its CUDA comes too, and stays where a later start sees no driver.
    bench.lock(bench.wheel("gpu-part", "1.0"), name="lock-cuda13.txt")
    assert bench.runs(LAUNCHLAB_CUDA="13")["found"] == {"first": "2.0", "third": "1.0", "by-hand": "1.0", "gpu-part": "1.0"}
    assert "LAUNCHLAB_CUDA" in bench.refuses(LAUNCHLAB_CUDA="11")

    # A folder that was moved: the environment's paths are wrong, so it is made anew.
    bench.root = bench.root.rename(bench.root.with_name("moved"))
    bench.venv = bench.root / "grader" / ".venv"
    moved = bench.runs(LAUNCHLAB_CUDA="none")
    assert moved["prefix"] == str(bench.venv)
    assert moved["found"] == {"first": "2.0"}


# What the command line holds, and the environment -> whether it needs lock-tools.txt.
COMMANDS = [
    ("test -x", {}, True), ("site", {}, True), ("doctor --tools", {}, True), ("grade 3 --cluster", {}, True), ("grade 3 --cluster=gpu1:6379", {}, True),
    ("grade 3 --IntakeExporter.cluster=local", {}, True), ("open 3", {"LAUNCHLAB_GRADEBOOK": "postgresql://me@server/course"}, True),
    ("", {}, False), ("lab", {}, False), ("doctor --json", {}, False), ("site --help", {}, False), ("grade 3 --no-sandbox", {}, False),
    ("open 3", {"LAUNCHLAB_GRADEBOOK": "sqlite:////tmp/gradebook.db"}, False),
]  # fmt: skip


def test_what_some_commands_need_comes_with_the_first_of_them_and_stays(lasting):
    lasting.lock(lasting.wheel("first", "2.0"))
    lasting.lock(lasting.wheel("tool", "1.0"), name="lock-tools.txt")
    assert "tool" not in lasting.runs("lab")["found"]

    # Who would install waits for the test, which has the lock.
    with open(lasting.root / "grader" / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for line, extra, needed in COMMANDS:
            command = [sys.executable, str(lasting.root / "grader" / "launch"), *line.split()]
            with subprocess.Popen(
                command, env=lasting.environment(**extra), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            ) as started:
                waits = "另一个进程正在安装" in started.stderr.readline()
                started.kill()
            assert waits == needed, line

    came = lasting.runs("site")
    assert came["found"] == {"first": "2.0", "tool": "1.0"} and came["arguments"] == ["site"]
    assert "这条命令要用到" in came["said"] and "锁定文件变了" not in came["said"]
    later = lasting.runs("lab")
    assert later["found"] == came["found"] and later["said"] == ""


def test_a_link_to_the_interpreter_is_only_needed_for_the_first_start(bench):
    link = bench.root / "bin" / "python"
    link.parent.mkdir()
    link.symlink_to(Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info)))
    made = bench.runs(python=str(link))
    assert made["prefix"] == str(bench.venv)
    link.unlink()
    assert bench.runs()["said"] == ""


def test_killed_first_start_is_resumed(bench):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hanging = {"PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/", "PIP_NO_INDEX": "0", "PIP_FIND_LINKS": ""}
        command = [sys.executable, str(bench.root / "grader" / "launch")]
        started = subprocess.Popen(command, env=bench.environment(**hanging), start_new_session=True, stderr=subprocess.DEVNULL)
        silent.settimeout(60)
        silent.accept()  # pip is downloading
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    made = (bench.venv / "pyvenv.cfg").stat().st_mtime_ns
    # What a pip leaves that was killed while it unpacked: metadata without the list of files that comes last.
    site = bench.venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    half = site / "first-1.0.dist-info"
    half.mkdir()
    (half / "METADATA").write_text("Metadata-Version: 2.1\nName: first\nVersion: 1.0\n")
    resumed = bench.runs()
    assert "接着装" in resumed["said"]
    assert (bench.venv / "pyvenv.cfg").stat().st_mtime_ns == made
    assert resumed["found"] == {"first": "1.0", "second": "1.0"}
    assert (site / "first.py").exists()


def test_two_first_starts_at_once_make_one_environment(bench):
    command = [sys.executable, str(bench.root / "grader" / "launch")]
    options = {"env": bench.environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **options) for _ in range(2)]
    ended = [each.communicate(timeout=120) for each in both]
    assert [each.returncode for each in both] == [0, 0]
    assert sum("首次启动" in said for _, said in ended) == 1
    assert sum("另一个进程正在安装" in said for _, said in ended) == 1


def test_failed_downloads_say_what_to_do(lasting):
    bench = lasting
    bench.lock(bench.wheel("first", "3.0"), bench.wheel("second", "1.0"))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    offline = {"PIP_INDEX_URL": f"http://127.0.0.1:{port}/", "PIP_NO_INDEX": "0", "PIP_FIND_LINKS": ""}
    said = bench.refuses(**offline)
    assert "连不上" in said
    assert "LAUNCHLAB_PYTHON" in said

    right = (bench.root / "grader" / "lock.txt").read_text()
    bench.lock(re.sub(r"sha256:\w+", "sha256:" + "0" * 64, right))
    assert "校验值" in bench.refuses()

    bench.lock(right.replace("second==1.0", "second==1.1"))
    assert "没有适合这台机器的安装包" in bench.refuses()

    bench.lock(right)
    done = bench.runs()["found"]
    assert (done["first"], done["second"]) == ("3.0", "1.0")

    # Without a network the site fails, and what needs nothing new goes on.
    bench.lock(bench.wheel("tool", "2.0"), name="lock-tools.txt")
    assert "连不上" in bench.refuses("site", **offline)
    assert bench.runs("lab", **offline)["found"] == done


def _interpreters(condition: str) -> list[str]:
    """Interpreters on this machine, under pyenv and /usr, whose version fulfils a Python condition on `v`."""
    candidates = [*Path.home().glob(".pyenv/versions/3.*/bin/python3"), *Path("/usr/bin").glob("python3.[0-9]*")]
    found = {}
    for path in candidates:
        code = f"import sys; v = sys.version_info; sys.exit(not ({condition}))"
        if os.access(path, os.X_OK) and subprocess.run([path, "-c", code], capture_output=True).returncode == 0:
            found.setdefault(path.resolve(), str(path))
    return sorted(found.values())


OLD = _interpreters("(3, 6) <= v < (3, 11)")


@pytest.mark.skipif(not OLD, reason="no Python older than 3.11 on this machine")
@pytest.mark.parametrize("python", OLD)
def test_old_python_is_told_what_to_install(bench, python):
    (bench.root / "empty").mkdir()
    said = bench.refuses(python=python, PATH=str(bench.root / "empty"), LC_ALL="C")
    assert "3.11" in said
    assert not bench.venv.exists()


@pytest.mark.skipif(not OLD, reason="no Python older than 3.11 on this machine")
def test_old_python_goes_on_in_a_newer_one_of_the_path(lasting, tmp_path):
    lasting.lock(lasting.wheel("first", "4.0"))
    lasting.lock(name="lock-tools.txt")
    folder = tmp_path / "programs"
    folder.mkdir()
    base = Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info))
    (folder / "python3.11").symlink_to(base)
    seen = lasting.runs("build", python=OLD[-1], PATH=str(folder))
    assert seen["arguments"] == ["build"]
    assert seen["found"]["first"] == "4.0"


def test_python_without_ensurepip_is_told_its_package(bench):
    """Debian's python3 without python3-venv: all of this interpreter's library, but that one package."""
    home, stdlib = bench.root / "home", Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix}))
    library = home / sys.platlibdir / stdlib.name
    library.mkdir(parents=True)
    for entry in stdlib.iterdir():
        if entry.name not in ("ensurepip", "site-packages"):
            (library / entry.name).symlink_to(entry)
    base = str(Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info)))
    said = bench.refuses(python=base, PYTHONHOME=str(home))
    assert "apt install python{}.{}-venv".format(*sys.version_info) in said


def test_full_disk_is_told(bench):
    """On a file system of 40 MB, in namespaces of its own."""
    disk = bench.root / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=40m tmpfs "$1" && cp -r "$2" "$1/grader" && exec "$3" "$1/grader/launch"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-ec", script, "-", disk, bench.root / "grader", sys.executable]
    if subprocess.run([*command[:3], "sh", "-c", f"mount -t tmpfs tmpfs '{disk}'"], capture_output=True).returncode:
        pytest.skip("this machine lets no one mount a file system in a namespace")
    ended = subprocess.run(command, env=bench.environment(), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "磁盘空间不足" in ended.stderr
    assert "disk full" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_named_interpreter_is_used_as_it_is(bench):
    seen = bench.runs("lab", LAUNCHLAB_PYTHON=sys.executable)
    assert seen["arguments"] == ["lab"]
    assert seen["prefix"] == sys.prefix
    assert not bench.venv.exists()
    assert "LAUNCHLAB_PYTHON" in bench.refuses(LAUNCHLAB_PYTHON="/nowhere/python")
    if OLD:
        assert "LAUNCHLAB_PYTHON" in bench.refuses(LAUNCHLAB_PYTHON=OLD[0])


def test_a_missing_package_is_named():
    """The real package under an interpreter that has none of its packages."""
    bare = str(Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info)))
    if subprocess.run([bare, "-c", "import nbformat"], capture_output=True).returncode == 0:
        pytest.skip("the base interpreter has the course's packages")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"LAUNCHLAB_PYTHON": bare}
    ended = subprocess.run([SCRIPT, "build"], env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert re.search(r"✗ .*没有包 \w+", ended.stderr)
    assert "Traceback" not in ended.stderr
