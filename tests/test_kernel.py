"""A student's process from outside: its deaths, its floods, its limits, and what it can reach."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from kernels import BEST, BOTH, needs_sandbox, told

from launchlab.exam import judge, sandbox
from launchlab.exam.examine import explain
from launchlab.exam.kernel import Kernel, KernelDied, KernelTimeout
from launchlab.exam.party import PartyError, PartyLost
from launchlab.exam.process import Cell, Process
from launchlab.exam.remote import Namespace

# --- ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os; os._exit(0)", "退出码 0"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    ],
)
@pytest.mark.parametrize("sandboxed", BOTH)
def test_a_death_is_noticed_at_once(start, sandboxed, code, says):
    kernel = start(sandboxed)
    began = time.monotonic()
    with pytest.raises(KernelDied, match=says):
        kernel.run_cell(code, 30)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("sandboxed", BOTH)
def test_a_subscription_that_comes_late_costs_no_start(sandboxed):
    """Each socket connects when it does: what the kernel published before it had our subscription has reached nobody."""
    kernel = Kernel(sandboxed=sandboxed)
    client, asked = kernel.client, []
    client.iopub_channel.socket.setsockopt(zmq.UNSUBSCRIBE, b"")
    ask = client.kernel_info

    def late() -> str:
        asked.append(time.monotonic())
        if len(asked) == 3:
            client.iopub_channel.socket.setsockopt(zmq.SUBSCRIBE, b"")
        return ask()

    client.kernel_info = late
    try:
        kernel.wait_ready(20)
        assert len(asked) >= 3  # control: the answers to the first two could not be heard
        assert kernel.run_cell("6 * 7", 10).outputs[0].data["text/plain"] == "42"
    finally:
        kernel.close()


def test_deadlines_and_floods(start):
    kernel = start()
    assert kernel.run_cell("6 * 7", 10).outputs[0].data["text/plain"] == "42"  # control
    began = time.monotonic()
    # A stream of small outputs keeps the line busy: the deadline counts all the same.
    with pytest.raises((KernelTimeout, KernelDied)):
        kernel.run_cell("while True:\n    print('.', flush=True)", 2)
    assert time.monotonic() - began < 6


@contextlib.contextmanager
def little_memory(most: int):
    """This process must not grow by more than ``most`` bytes meanwhile."""
    peak = [0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            peak[0] = max(peak[0], resident(os.getpid()))

    before = resident(os.getpid())
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert peak[0] - before < most


def test_a_flood_of_output_is_stopped_and_costs_little_memory(start):
    kernel = start()
    with little_memory(2 << 30), pytest.raises((KernelDied, KernelTimeout)):
        kernel.run_cell("import sys\nwhile True:\n    sys.stdout.write('x' * 30_000_000)\n    sys.stdout.flush()", 20)


def test_a_reply_of_millions_of_values_costs_little_memory(start):
    """A list of nothing takes three bytes there and sixty-four here."""
    kernel = start()
    kernel.run_cell("from launchlab.exam.agent import Agent\nAgent.answer = lambda self, text, blobs: ('{\"n\": 1, \"value\": [' + '[],' * 30_000_000 + '0]}', [])", 10)
    with little_memory(1 << 30), pytest.raises(KernelTimeout):
        kernel.ask({"op": "value", "name": "x"}, [], 8)
    assert kernel.run_cell("6 * 7", 20).outputs[0].data["text/plain"] == "42"  # control: it can still be heard


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_outputs_are_data(start):
    kernel = start()
    result = kernel.run_cell(
        "import sys\n"
        "from IPython.display import HTML, SVG, Javascript, display\n"
        "print('a' * 200_000); print('b', file=sys.stderr)\n"
        "display(HTML('<script>x</script>'), Javascript('x'))\n"
        "display({'text/plain': 5, 'image/png': ['x'], 'text/latex': '$x$'}, raw=True)\n"
        "for picture in ('iVBORw0KGgoAAAA=', 'aGVsbG8=', 'iVBORw0KGgoAAAA=\" onerror=\"x'):\n"
        "    display({'text/plain': 'fine', 'image/png': picture}, raw=True)\n"
        "raise ValueError('y' * 300_000)",
        20,
    )
    text = json.dumps(result.outputs)
    assert len(text) < 200_000 and "script" not in text and "latex" not in text
    assert result.error == "ValueError" and len(result.message) <= 500
    # A picture is the base64 of one, and nothing that could leave the attribute of a page that it is put into.
    assert [output["data"] for output in json.loads(text) if "image/png" in output.get("data", {})] == [{"image/png": "iVBORw0KGgoAAAA="}]


def test_a_null_byte_is_an_error_of_syntax(start):
    kernel = start()
    result = kernel.run_cell("x = 1\ny = '\0'", 10)
    assert result.error == "SyntaxError" and "null bytes" in result.message
    assert [(output.output_type, output.ename) for output in result.outputs] == [("error", "SyntaxError")]
    assert kernel.run_cell("x", 10).error == "NameError"


def test_limits(start):
    kernel = start()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = told(kernel, (
        "import json, resource\n"
        "limit = resource.getrlimit(resource.RLIMIT_DATA)[0]\n"
        "tried = {}\n"
        "try:\n"
        "    bytearray(limit + (1 << 20)); tried['memory'] = 'allowed'\n"
        "except MemoryError:\n"
        "    tried['memory'] = 'refused'\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try:\n"
        "    open('big', 'wb').truncate(1 << 45); tried['file'] = 'allowed'\n"
        "except OSError:\n"
        "    tried['file'] = 'refused'\n"
        "print(json.dumps(tried | {'limit': limit, 'oom': int(open('/proc/self/oom_score_adj').read())}))"
    ))  # fmt: skip
    assert 0 < found["limit"] <= max(memory, 4 << 30)
    assert (found["memory"], found["file"]) == ("refused", "refused")
    assert found["oom"] == 1000 or os.getuid()  # the examiner is not the one to go


# --- asked ---------------------------------------------------------------------------------------------


def test_asks_are_answered_or_time_out(start):
    kernel = start()
    kernel.run_cell("def twice(x):\n    return x * 2\n\ndef never():\n    while True:\n        pass", 10)
    call = {"op": "call", "args": {"t": "list", "v": [21]}, "kwargs": {"t": "dict", "v": []}, "method": None}
    assert kernel.ask(call | {"target": "twice"}, [], 10)[0]["value"] == 42
    assert kernel.ask({"op": "value", "name": "nothing"}, [], 10)[0]["error"]["type"] == "NameError"
    assert kernel.ask({"op": "no such thing"}, [], 10)[0]["error"]["type"] == "AttributeError"
    began = time.monotonic()
    with pytest.raises(KernelTimeout):
        kernel.ask(call | {"target": "never", "args": {"t": "list", "v": []}}, [], 1)
    assert time.monotonic() - began < 3


HEART = """
import os, time
def beat(name):
    while True:
        with open(name, "a") as file:
            file.write(".")
        time.sleep(0.002)
"""
FAMILY = HEART + """
import threading
threading.Thread(target=beat, args=("thread",), daemon=True).start()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        beat("grandchild")
    os._exit(0)
"""
HOPPER = HEART + """
import signal
def hop():
    while True:
        with open("hopper", "a") as file:
            file.write(".")
        if os.fork():
            os._exit(0)
        os.setsid()
        time.sleep(0.001)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork() == 0:
    hop()
"""


@needs_sandbox
def test_a_paused_process_does_nothing_at_all(start):
    kernel = start(True)
    kernel.run_cell(FAMILY, 10)
    time.sleep(0.3)
    sizes = [partial(lambda name: (kernel.work / name).stat().st_size, name) for name in ("thread", "grandchild")]
    for _ in range(5):
        kernel.pause()
        before = [size() for size in sizes]
        time.sleep(0.1)
        assert [size() for size in sizes] == before and min(before) > 0
        kernel.resume()
        time.sleep(0.1)
        assert all(size() > old for size, old in zip(sizes, before, strict=True))  # control: it lives on
    assert kernel.run_cell("1", 10).error is None


@needs_sandbox
def test_a_family_that_forks_on_is_stopped_or_gives_itself_away(start):
    kernel = start(True)
    kernel.run_cell(HOPPER, 10)
    time.sleep(0.3)
    beats = partial(lambda: (kernel.work / "hopper").stat().st_size)
    assert beats() > 5  # control
    for _ in range(5):
        try:
            kernel.pause()
        except KernelDied:
            return
        before = beats()
        time.sleep(0.1)
        assert beats() == before
        kernel.resume()
        time.sleep(0.02)


@needs_sandbox
def test_nothing_survives_its_end(start):
    kernel = start(True)
    mark = f"import time; time.sleep(98{os.getpid()})"
    kernel.run_cell((
        "import os, signal, sys\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):\n"
        "            signal.signal(number, signal.SIG_IGN)\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', {mark!r}])"
    ), 10)  # fmt: skip
    time.sleep(0.5)
    assert len(running(mark)) == 3  # control
    folder = kernel.folder
    kernel.close()
    time.sleep(0.3)
    assert running(mark) == [] and not folder.exists()


def running(mark: str) -> list[int]:
    """Processes with ``mark`` in their command lines, this one and shells apart."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in arguments:
            found.append(int(process.name))
    return found


EXAMINER = """
import sys, time
from launchlab.exam import family
from launchlab.exam.kernel import Kernel
kernels = [Kernel(sandboxed=sandboxed) for sandboxed in {kinds}]
for kernel in kernels:
    kernel.wait_ready()
for kernel in kernels if {paused} else []:
    kernel.pause()
print(" ".join(str(pid) for kernel in kernels for pid in family.family(kernel.process.pid)), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("paused", [False, True], ids=["at work", "paused"])
def test_an_examiner_killed_leaves_nobody_running(paused):
    code = EXAMINER.format(kinds=[False, True] if BEST else [False], paused=paused)
    examiner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    family = [int(pid) for pid in examiner.stdout.readline().split()]
    assert len(family) >= 3 + 4 * BEST
    examiner.kill()
    examiner.wait()
    until = time.monotonic() + 10
    while left := [pid for pid in family if Path(f"/proc/{pid}").exists() and state(pid) != "Z"]:
        assert time.monotonic() < until, left
        time.sleep(0.1)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


# --- reach ---------------------------------------------------------------------------------------------

PROBE = """
import json, os, socket
from pathlib import Path

def tried(action):
    try:
        action()
        return True
    except Exception:
        return False

def peek(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""

def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(1)
        s.connect(address)

def write(path):
    with open(path, "w") as file:
        file.write("escaped")

known = json.loads(KNOWN)
print(json.dumps({
    "tcp": tried(lambda: connect(socket.AF_INET, ("127.0.0.1", known["port"]))),
    "abstract": tried(lambda: connect(socket.AF_UNIX, "\\0" + known["abstract"])),
    "unix": tried(lambda: connect(socket.AF_UNIX, known["unix"])),
    "secret file": tried(lambda: Path(known["secret"]).read_text()),
    "tests": tried(lambda: Path(known["tests"]).read_text()),
    "solutions": tried(lambda: os.listdir(known["solutions"])),
    "home": bool(tried(lambda: os.listdir(known["home"])) and set(os.listdir(known["home"])) & set(known["in home"])),
    "environment": "LAUNCHLAB_TEST_SECRET" in os.environ or any(
        b"LAUNCHLAB_TEST_SECRET" in peek(path) for path in Path("/proc").glob("[0-9]*/environ")),
    "examiner": tried(lambda: os.kill(known["examiner"], 0)),
    "examiner's name": any(b"pytest" in peek(path) for path in Path("/proc").glob("[0-9]*/cmdline")),
    "write beside": tried(lambda: write(known["secret"] + ".new")),
    "write to python": known["caged"] and tried(lambda: write(Path(json.__file__).parent / "escaped.py")),
    "write to usr": known["caged"] and tried(lambda: write("/usr/escaped")),
    "mount": known["caged"] and __import__("ctypes").CDLL(None).mount(b"none", b"/mnt", b"tmpfs", 0, None) == 0,
    "sees other kernels": any(path.name.startswith("ll-") and str(path) not in os.getcwd() for path in Path(known["temporary"]).glob("ll-*")),
    "own folder": tried(lambda: write("mine")),
    "own processes": tried(lambda: os.kill(os.getpid(), 0)),
}))
"""
ALLOWED = {"own folder", "own processes"}


@needs_sandbox
def test_a_sandboxed_process_reaches_nothing_of_ours(start, tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setenv("LAUNCHLAB_TEST_SECRET", "x")
    (tmp_path / "secret").write_text("secret")
    tests = Path(__file__).resolve()
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as unix:
        abstract.bind(f"\0launchlab-{os.getpid()}")
        unix.bind(f"{tmp_path}/socket")
        for server in (abstract, unix):
            server.listen()
        known = {
            "port": tcp.getsockname()[1], "abstract": f"launchlab-{os.getpid()}", "unix": f"{tmp_path}/socket", "secret": f"{tmp_path}/secret",
            "tests": str(tests), "solutions": str(tests.parents[1] / "solutions"), "home": str(Path.home()),
            # Python itself may live in a home folder: it is the one thing seen there.
            "in home": [path.name for path in Path.home().iterdir() if not any(seen.is_relative_to(path) for seen in sandbox.python_paths())],
            "examiner": os.getpid(), "temporary": tempfile.gettempdir(),
        }  # fmt: skip
        # Where nothing would stop it, what would do harm is not tried.
        inside, other = (told(start(caged), f"KNOWN = {json.dumps(known | {'caged': caged})!r}\n{PROBE}") for caged in (True, False))
    assert {name for name, reached in inside.items() if reached} == ALLOWED
    # Control: without the sandbox the same attempts succeed, so they are attempts.
    wanted = {"tcp", "abstract", "unix", "secret file", "tests", "examiner", "write beside", "own folder"}
    assert wanted <= {name for name, reached in other.items() if reached}


# --- a notebook's process --------------------------------------------------------------------------------


def process(*sources: str) -> Process:
    return Process([Cell(index, source) for index, source in enumerate(sources)], partial(Kernel, sandboxed=BEST), gpu=False)


def test_a_deadly_cell_is_left_out_and_the_rest_runs():
    party = process("def first():\n    return 1", "def second():\n    return 2\nimport os\nos._exit(1)", "def third():\n    return 3", "third(", "1/0\nfourth = 4")
    try:
        names = Namespace(party)
        assert (names.first(), names.third()) == (1, 3)
        with pytest.raises(PartyError) as missing:
            names.second()
        assert missing.value.info["type"] == "NameError"
        assert party.why_missing("second") == (judge.CRASHED, "定义 second 的单元运行时，进程自行退出（退出码 1），代码里可能调用了 exit。")
        assert party.why_missing("fourth")[1].startswith("定义 fourth 的单元自己就出错了：ZeroDivisionError")
        assert party.why_missing("fifth") is None
        # It dies while it is asked: the next ask finds it alive again, and handles of before are void.
        handle = names.define("def f():\n    return 5", "f")
        assert handle() == 5
        with pytest.raises(PartyLost):
            names.define("import os\ndef g():\n    os._exit(9)", "g")()
        assert names.first() == 1
        with pytest.raises(PartyLost):
            handle()
        assert names.third() == 3
    finally:
        party.close()


def test_cells_that_never_end_do_not_take_forever(monkeypatch):
    monkeypatch.setattr("launchlab.exam.process.CELL_SECONDS", 1.0)
    party = process("x = 1", "while True:\n    pass", "y = 2")
    try:
        began = time.monotonic()
        assert (Namespace(party).value("x"), Namespace(party).value("y")) == (1, 2)
        assert time.monotonic() - began < 25
        assert party.deadly[1][0] == judge.TIMED_OUT
    finally:
        party.close()


def test_the_reference_is_loaded_again_however_long_its_class_has_lasted(monkeypatch):
    monkeypatch.setattr("launchlab.exam.process.TOTAL_SECONDS", 0.01)
    loaded = {}
    for trusted in (True, False):
        party = Process([Cell(0, "x = 1")], partial(Kernel, sandboxed=sandbox.works()), gpu=False, trusted=trusted)
        for _ in range(2):
            with contextlib.suppress(PartyLost):
                party.load()
            loaded[trusted] = not party.deadly
            party.close()
    assert loaded == {True: True, False: False}  # a learner's time, for one exam, is used up


# --- words ---------------------------------------------------------------------------------------------


def reason(info: dict, hidden: bool = False, source: str = "def answer(x):\n    return helper(x) + 1") -> str:
    student = SimpleNamespace(cells=[Cell(0, source)], why_missing=lambda name: None)
    cells = [SimpleNamespace(source="### BEGIN SOLUTION: 先想一想边界\nanswer"), SimpleNamespace(source="plotted = 1")]
    master = SimpleNamespace(notebook=SimpleNamespace(cells=cells), demos=["plotted = 1"])
    error = PartyError({"own": True, "line": "return helper(x) + 1", **info}, student)
    verdict, text = explain(error, student, master, hidden=hidden)
    assert verdict == judge.FAILED
    return text


def test_reasons_are_for_learners():
    assert reason({"type": "NotImplementedError", "message": "先想一想边界"}) == "还没有作答：先想一想边界"
    assert "没有找到 answer" in reason({"type": "NameError", "message": "name 'answer' is not defined"})
    assert "没有找到 helper" in reason({"type": "NameError", "message": "helper"})
    assert "plotted 定义在演示单元里" in reason({"type": "NameError", "message": "name 'plotted' is not defined"})
    assert reason({"type": "TypeError", "message": "unsupported"}) == "调用你的函数时抛出 TypeError，出错的一行：return helper(x) + 1"
    assert "：CUDA error" in reason({"type": "CUDARuntimeError", "message": "CUDA error", "own": False})


@pytest.mark.parametrize("kind", ["NotImplementedError", "NameError", "ValueError"])
def test_reasons_tell_nothing_of_hidden_calls(kind):
    told = reason({"type": kind, "message": "answer(31415) failed", "own": False, "line": "raise X(31415)"}, hidden=True)
    assert "31415" not in told and kind in told


def test_a_lost_process_is_told_apart():
    lost = [explain(PartyLost("等了 8 秒没有回答", None, timed_out=timed_out), None, None, hidden=False)[0] for timed_out in (True, False)]
    assert lost == [judge.TIMED_OUT, judge.CRASHED]
