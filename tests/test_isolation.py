"""What a submission's processes may take, see and leave: tried with programs that try."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from course_copy import NAME, Course, once
from kernels import BOTH, needs_sandbox, told

from launchlab import device
from launchlab.exam import examine, family, limits, sandbox, timing, watch
from launchlab.exam.examine import Master
from launchlab.exam.kernel import Kernel, KernelDied
from launchlab.exam.memory import Buffer, in_blocks
from launchlab.exam.party import PartyLost
from launchlab.exam.process import Cell, Process
from launchlab.exam.remote import Namespace
from launchlab.exam.watch import NoRoom

MARK = f"97{os.getpid()}"  # seconds to sleep, by which the sleepers of this test run are known


def ends(kernel: Kernel, code: str, says: str) -> None:
    """Running ``code`` costs the process its life, soon, for a reason that says so."""
    began = time.monotonic()
    with pytest.raises(KernelDied, match=says):
        kernel.run_cell(code, 30)
        time.sleep(2 * watch.LOOK_SECONDS)
        kernel.check_share()
    assert time.monotonic() - began < 15


def running(mark: str) -> list[int]:
    """Processes with ``mark`` among their arguments."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "cmdline").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def gone(mark: str, seconds: float = 5) -> bool:
    until = time.monotonic() + seconds
    while running(mark):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


# --- processes -------------------------------------------------------------------------------------------

CROWD = f"""
import os
started, refused = 0, 0
for _ in range({watch.TASKS_SEEN + 300}):
    try:
        if os.fork() == 0:
            os.setsid()
            os.execv("/bin/sleep", ["sleep", {MARK!r}])
        started += 1
    except OSError:
        refused += 1
import json
print(json.dumps([started, refused]))
"""


@pytest.mark.parametrize("by", ["kernel", "watch"])
@pytest.mark.parametrize("sandboxed", BOTH)
def test_nobody_starts_more_processes_than_allowed(start, monkeypatch, sandboxed, by):
    if by == "watch":  # as where neither a control group nor a user namespace can be had
        monkeypatch.setattr(limits.Group, "make", lambda name: None)
        monkeypatch.setattr(sandbox, "counts_tasks", lambda: False)
    kernel = start(sandboxed)
    if by == "kernel" and kernel._group is None:
        pytest.skip("control groups cannot be made here")
    if by == "kernel":
        started, refused = told(kernel, CROWD)
        assert 100 < started < limits.MOST_TASKS and refused >= 300
    else:
        ends(kernel, CROWD, "进程和线程超过")
    kernel.close()
    assert gone(MARK)


def test_a_users_own_namespace_limits_its_processes(tmp_path, monkeypatch):
    """RLIMIT_NPROC inside of a sandbox, for a user who is not root: by a shell that starts sleepers until it is refused."""
    if not sandbox.counts_tasks():
        pytest.skip("no sandbox with a user namespace of its own here")
    monkeypatch.setattr(limits, "MOST_TASKS", 40)
    for name in ("python_paths", "hidden"):  # not readable for everybody, and not needed
        monkeypatch.setattr(sandbox, name, list)
    script = 'n=0; while [ $n -lt 100 ]; do sleep 20 & n=$((n+1)); echo $n; done'
    with subprocess.Popen(["mktemp", "-d", "/tmp/ll-test-XXXXXX"], stdout=subprocess.PIPE, text=True) as made:
        folder = Path(made.stdout.read().strip())
    folder.chmod(0o777)
    other = [] if os.geteuid() else ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    try:
        counts = {}
        for name, command in (("limited", limits.few_tasks(["/bin/sh", "-c", script])), ("control", ["/bin/sh", "-c", script])):
            wrapped = [*other, *sandbox.wrap(command, folder, {"PATH": "/usr/bin:/bin"})]
            ended = subprocess.run(wrapped, capture_output=True, text=True, timeout=30, check=False)
            counts[name] = int(ended.stdout.split()[-1])
    finally:
        folder.rmdir()
    assert 20 < counts["limited"] < 41 and counts["control"] == 100


@needs_sandbox
def test_limits_cannot_be_lifted(start):
    kernel = start(True)
    lifted = told(kernel, """
import json, os, resource
from pathlib import Path
won = []
for name in ("RLIMIT_DATA", "RLIMIT_FSIZE"):
    try:
        resource.setrlimit(getattr(resource, name), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        won.append(name)
    except (OSError, ValueError):
        pass
group = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
places = [Path("/sys/fs/cgroup", names, path.lstrip("/"), file) for _, names, path in group for file in ("cgroup.procs", "pids.max")]
for path in [*places, *(path.parents[1] / "cgroup.procs" for path in places), Path("/proc/1/cgroup"), Path("/proc/sys/kernel/pid_max"), Path("/sys/power/state")]:
    try:
        path.write_text(str(os.getpid()))
        won.append(str(path))
    except OSError:
        pass
for call in (lambda: os.setuid(1), lambda: os.setgroups([0]), lambda: os.nice(-5), lambda: os.mknod("device", 0o60666, os.makedev(8, 0)), lambda: os.chroot("/"), lambda: os.sethostname("x") if hasattr(os, "sethostname") else open("/nowhere")):
    try:
        call()
        won.append("a privileged call")
    except OSError:
        pass
print(json.dumps(won))
""")  # fmt: skip
    assert lifted == []


# --- memory, disk, GPU -----------------------------------------------------------------------------------

HOARD = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        kept = bytearray(b"x") * (200 << 20)
        time.sleep(60)
time.sleep(20)
"""


@pytest.mark.parametrize("sandboxed", BOTH)
def test_a_family_holds_no_more_memory_than_allowed(start, monkeypatch, sandboxed):
    monkeypatch.setattr(watch, "family_memory", lambda: 600 << 20)
    ends(start(sandboxed), HOARD, "内存")


def test_pages_that_are_shared_count_once(start, monkeypatch):
    """Children of a large process do not look like a crowd of large processes."""
    monkeypatch.setattr(watch, "family_memory", lambda: 600 << 20)
    kernel = start(sandbox.works())
    shared = "import os, time\nkept = bytearray(b'x') * (200 << 20)\nfor _ in range(8):\n    if os.fork() == 0:\n        time.sleep(60)\ntime.sleep(1)"
    assert kernel.run_cell(shared, 20).error is None
    kernel.check_share()
    pids = family.family(kernel.process.pid)
    assert family.resident(pids) > 600 << 20 > family.memory(pids) > 200 << 20  # control: by a careless count it would be too much


def test_a_disk_nearly_full_is_not_filled(start, monkeypatch):
    monkeypatch.setattr(watch, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=50 << 20)))
    monkeypatch.setattr(watch, "LEAST_DISK", 100 << 20)
    modest, greedy = start(sandbox.works()), start(sandbox.works())
    write = "import time\nwith open('big', 'wb') as file:\n    file.write(b'x' * (%d << 20))\ntime.sleep(1)"
    assert modest.run_cell(write % 20, 20).error is None
    modest.check_share()  # somebody else has filled it
    ends(greedy, write % 200, "磁盘")


class Gpu:
    """Stands for NVML, which is asked for the memory that is free: nearly none while ``hoarder`` runs."""

    def __init__(self, hoarder: Kernel | None):
        self.hoarder = hoarder

    def __call__(self) -> tuple[int, int]:
        return (1 << 20 if self.hoarder is None or self.hoarder.process.poll() is None else 900 << 20), 1000 << 20


def test_who_takes_all_gpu_memory_is_ended_for_it(start, monkeypatch):
    kernel = start(sandbox.works())
    monkeypatch.setattr(watch, "free_memory", Gpu(kernel))
    with pytest.raises(KernelDied, match="显存"):
        kernel.check_share()
    with pytest.raises(KernelDied, match="显存"):  # also when it is asked again
        kernel.run_cell("1", 5)


def test_who_did_not_take_the_gpu_memory_is_not_blamed(start, monkeypatch):
    kernel = start(sandbox.works())
    monkeypatch.setattr(watch, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(watch, "free_memory", Gpu(None))
    with pytest.raises(NoRoom, match="不是这份提交"):
        kernel.check_share()


def test_of_two_on_a_gpu_only_the_hoarder_is_blamed(start, monkeypatch):
    """Both find it full at the same moment: what the one gives back is not held against the other."""
    hoarder, honest = start(sandbox.works()), start(sandbox.works())
    monkeypatch.setattr(watch, "SETTLE_SECONDS", 1.0)
    monkeypatch.setattr(watch, "free_memory", Gpu(hoarder))
    together, found = threading.Barrier(2), {}

    def check(name: str, kernel: Kernel) -> None:
        together.wait()
        try:
            kernel.check_share()
        except (KernelDied, NoRoom) as ended:
            found[name] = type(ended)

    threads = [threading.Thread(target=check, args=each) for each in (("hoarder", hoarder), ("honest", honest))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found["hoarder"] is KernelDied and found.get("honest") in (None, NoRoom)


def test_while_others_are_looked_at_for_a_full_gpu_nobody_is_blamed(start, monkeypatch):
    kernel = start(sandbox.works())
    monkeypatch.setattr(watch, "free_memory", Gpu(None))
    monkeypatch.setattr(timing, "LOCK_SECONDS", 0.0)
    with timing.exclusive(f"{device.identity()} memory"):
        with pytest.raises(timing.GpuBusy):  # control
            kernel.check_share()
        assert examine._overdrawn(kernel) is None
        assert kernel.run_cell("1", 5).error is None


@needs_sandbox
def test_what_lies_in_memory_is_limited_too(start):
    found = told(start(True), "import json, os\nprint(json.dumps([os.statvfs(p).f_blocks * os.statvfs(p).f_frsize for p in ('/tmp', '/dev/shm')]))")
    assert all(0 < size <= sandbox.LARGEST_SCRATCH for size in found) or "--size" not in sandbox._options()


class Memory:
    """Stands for a block of the examiner's GPU memory; ``freed`` lists those that were given up."""

    freed: ClassVar[list] = []

    def __init__(self, size: int):
        self.size = in_blocks(size)

    def handle(self) -> str:
        return "00"

    def free(self) -> None:
        self.freed.append(self)


@pytest.mark.parametrize("trusted", [False, True])
def test_memory_lent_to_a_students_process_is_lent_to_nobody_else(monkeypatch, trusted):
    monkeypatch.setattr("launchlab.exam.process.Block", Memory)
    monkeypatch.setattr(Memory, "freed", [])
    party = Process([], lambda: SimpleNamespace(wait_ready=lambda: None, close=lambda: None), gpu=False, trusted=trusted)
    party.ask = lambda op, **fields: None  # it says yes to everything, and may keep what it was to give back
    lent = []
    for size in (5, 6, 3 << 20):
        buffer = Buffer(np.zeros(size, np.uint8))
        buffer.write = lambda data, at_rest: data
        buffer.bind(party)
        lent.append(buffer.block)
        party.used = True
        party.forget()
    assert (Memory.freed == lent) is trusted
    if not trusted:
        assert Memory.freed == [] and lent[0] is lent[1] is not lent[2]  # it may have again what it had before
    party.close()
    assert set(Memory.freed) == set(lent)


# --- sight -----------------------------------------------------------------------------------------------


@needs_sandbox
def test_what_examines_is_out_of_sight(start):
    found = told(start(True), """
import json, sys
from pathlib import Path
import launchlab
package = Path(launchlab.__file__).parent
seen = []
for path in package.rglob("*"):
    try:
        if path.is_file() and path.read_bytes():
            seen.append(path.relative_to(package).as_posix())
    except OSError:
        pass
import importlib, pkgutil, launchlab.lab, launchlab.exam.agent
for each in pkgutil.iter_modules(launchlab.lab.__path__):
    importlib.import_module("launchlab.lab." + each.name)
used = [Path(module.__file__).relative_to(package).as_posix() for name, module in sys.modules.items() if name.startswith("launchlab") and module.__file__]
print(json.dumps([seen, used, [str(path) for path in package.parents[1].glob("*")]]))
""")  # fmt: skip
    seen, used, beside = found
    assert set(used) <= set(seen)  # whatever notebooks import is there
    modules = {path for path in seen if path.endswith(".py")}
    unused = modules - set(used)
    assert all(path.startswith("lab/") for path in unused), unused  # and nothing else of ours
    assert not any(word in path for path in seen for word in ("grading", "demo", "examine", "sandbox", "gradebook"))
    assert all(path.endswith(("/src", "/.venv")) for path in beside), beside  # the environment that runs it may lie there


@needs_sandbox
def test_an_interpreter_named_by_links_starts(start, tmp_path, monkeypatch):
    """As where the home folder is a link, and that leads to another, by way of "..": none of them lies in what is shown."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "environment").symlink_to(sys.prefix)
    (tmp_path / "home").symlink_to("data/../data")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "home" / "environment" / "bin" / "python"))
    seen = told(start(True), f"import json, os, sys\nprint(json.dumps([sys.executable, os.listdir({str(tmp_path / 'data')!r})]))")
    assert seen == [sys.executable, ["environment"]]


@needs_sandbox
def test_the_reference_has_a_sandbox_too(mini):
    """It may have to load what learners built."""
    reference = Namespace(Master.of(mini).reference.process)
    probe = "import os, socket\ndef seen(path):\n    return [os.path.exists(path), os.getpid() < 100, len(socket.if_nameindex())]\n"
    try:
        assert reference.define(probe, "seen")(str(mini.solution)) == [False, True, 1]
        assert reference.total_us(5.0, 1, 2.0) == 7.0
    finally:
        Master.dismiss()


# --- ends ------------------------------------------------------------------------------------------------

LEAVES = f"""
import os, signal
for kill_keeper in (False, KILL):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGSTOP, signal.SIGKILL) if kill_keeper else ():  # stopped first: each would end all if it saw the other end
                for keeper in KEEPERS:
                    os.kill(keeper, number)
            os.execv("/bin/sleep", ["sleep", {MARK!r}])
        os._exit(0)
"""


@pytest.mark.parametrize("kill_keeper", [False, True], ids=["leaves", "and kills its keeper"])
def test_children_that_leave_do_not_survive_without_a_sandbox(start, kill_keeper):
    kernel = start(False)
    keepers = family.family(kernel.process.pid)[:2]
    assert family.family(kernel.process.pid)[2:]  # control: the keeper is not the kernel itself
    try:
        kernel.run_cell(LEAVES.replace("KILL", str(kill_keeper), 1).replace("KEEPERS", str(keepers)), 10)
    except KernelDied:
        assert kill_keeper
    until = time.monotonic() + 5
    while len(running(MARK)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(running(MARK)) == 2  # control
    folder = kernel.folder
    kernel.close()
    assert gone(MARK) and not folder.exists()


def test_children_are_ended_with_a_process_that_ends_itself(start):
    kernel = start(False)
    with pytest.raises(KernelDied, match="退出码 7"):
        kernel.run_cell(LEAVES.replace("KILL", "False", 1) + "\nimport time\ntime.sleep(0.5)\nos._exit(7)", 10)
    assert gone(MARK)


def test_an_examiner_killed_leaves_nobody_who_has_left(tmp_path):
    code = (
        "import sys, time\nfrom launchlab.exam.kernel import Kernel\nkernel = Kernel(sandboxed=False)\nkernel.wait_ready()\n"
        f"kernel.run_cell({LEAVES.replace('KILL', 'False', 1)!r}, 10)\nprint('ready', flush=True)\ntime.sleep(1000)"
    )
    examiner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert examiner.stdout.readline() == "ready\n"
    until = time.monotonic() + 5
    while len(running(MARK)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    examiner.kill()
    examiner.wait()
    assert gone(MARK)


@needs_sandbox
@pytest.mark.parametrize("children_first", [False, True], ids=["alone", "after all that it started itself"])
def test_an_examiner_killed_while_a_sandbox_starts_leaves_nobody(children_first):
    """bubblewrap's first process may not yet know then that it is to die with its parent. Ray kills a worker's children, then the worker."""
    code = (
        "import time\nfrom launchlab.exam.kernel import Kernel\nfrom launchlab.exam import sandbox\nsandbox.counts_tasks()\nkernels = []\n"
        "for _ in range(8):  # some of them have come farther than others\n    kernels.append(Kernel(sandboxed=True))\nprint('go', flush=True)\ntime.sleep(1000)"
    )
    for turn in range(2):
        examiner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert examiner.stdout.readline() == "go\n"
        time.sleep(0.05 * turn)
        children = family.children(examiner.pid)
        assert len(children) == 8  # control
        for child in children if children_first else ():
            family.send(child, signal.SIGKILL)
        examiner.kill()
        examiner.wait()
        until = time.monotonic() + 10
        while left := family.marked(f"/ll-{examiner.pid}-"):
            assert time.monotonic() < until, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
            time.sleep(0.05)


def test_a_share_overdrawn_costs_one_exercise(monkeypatch):
    """The process is started anew without the cell that took too much; with a function that does, at the next ask."""
    monkeypatch.setattr(watch, "family_memory", lambda: 600 << 20)
    cells = [Cell(0, "def good():\n    return 1"), Cell(1, HOARD), Cell(2, "def bad():\n" + "\n".join(f"    {line}" for line in HOARD.strip().splitlines()))]
    party = Process(cells, partial(Kernel, sandboxed=sandbox.works()), gpu=False)
    try:
        assert Namespace(party).good() == 1
        assert "内存" in party.deadly[1][1]
        with pytest.raises(PartyLost, match="内存"):
            Namespace(party).bad()
        assert Namespace(party).good() == 1
    finally:
        party.close()


def test_sweeping_follows_no_link(tmp_path, monkeypatch):
    """Anybody may put a link with the name of an examiner's folder into the machine's temporary folder."""
    from launchlab.exam import kernel

    monkeypatch.setattr(kernel.tempfile, "gettempdir", lambda: str(tmp_path))
    home = tmp_path / "home"
    home.mkdir()
    (home / "file").touch(mode=0o400)
    (tmp_path / "ll-999999999-link").symlink_to(home)
    (tmp_path / "ll-999999999-left").mkdir()
    kernel.sweep()
    assert not (tmp_path / "ll-999999999-left").exists()  # control
    assert (home / "file").stat().st_mode & 0o777 == 0o400


def test_sweepers_side_by_side_do_not_stumble_over_each_other(tmp_path):
    """Graders sweep at each kernel's start, and what one finds another may remove in that moment."""
    for number in range(60):
        (tmp_path / f"ll-999999999-{number}" / "within").mkdir(parents=True)
    code = "import sys\nfrom launchlab.exam import kernel\nprint('ready', flush=True)\nsys.stdin.read()\nkernel.sweep()"
    environment, pipe = os.environ | {"TMPDIR": str(tmp_path)}, subprocess.PIPE
    sweepers = [subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, env=environment) for _ in range(3)]
    for sweeper in sweepers:
        assert sweeper.stdout.readline() == b"ready\n"
    for sweeper in sweepers:
        sweeper.stdin.close()
    assert [(sweeper.wait(60), sweeper.stderr.read()) for sweeper in sweepers] == [(0, b"")] * len(sweepers)
    assert list(tmp_path.iterdir()) == []


def test_processes_that_end_while_they_are_looked_at_are_no_trouble():
    """Once a look at /proc raised FileNotFoundError when a process ended between two steps of it."""
    parent = subprocess.Popen(["/bin/sh", "-c", "while :; do /bin/true & /bin/true; done"])
    try:
        until, seen = time.monotonic() + 3, set()
        while time.monotonic() < until:
            for pid in family.family(parent.pid)[1:]:
                seen.add(pid)
                for look in (family.tasks, family.resident, family.memory, lambda pids: family.children(*pids)):
                    look([pid])
        assert len(seen) > 20  # control
    finally:
        family.kill(parent.pid)
        parent.wait()


# --- without a sandbox -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Course:
    def make(folder: Path) -> None:
        course = Course.make(folder)
        course.hand_in("a", course.honest)

    return Course(once(tmp_path_factory, "unprotected", make))


def test_a_class_is_not_graded_without_a_sandbox_unless_asked(course, tmp_path, monkeypatch):
    for name in ("sh", "chmod", "rm", "env", "readlink"):  # a PATH without bubblewrap
        (tmp_path / name).symlink_to(f"/usr/bin/{name}" if Path(f"/usr/bin/{name}").exists() else f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path))
    code, text = course.nbgrader("autograde", NAME)
    assert code == 1 and "--no-sandbox" in text and "没有安装 bubblewrap" in text, text
    assert not (course.build / "reports").exists()
    code, text = course.nbgrader("autograde", NAME, "--IntakeExporter.no_sandbox=True")
    assert code == 0 and "没有沙箱的情况下评分" in text, text
    assert course.report("a")["sandbox"] == "none" and set(course.marks()["a"].values()) == {2.0, 3.0}
