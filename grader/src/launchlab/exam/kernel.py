"""A Jupyter kernel of the exam's own: started, asked, timed and killed from outside.

Used for the student (sandboxed where bubblewrap is) and for the reference (trusted). All
waiting has a deadline, and the end of the process is noticed at once. What a kernel sends
is data to be cut to size, never to be believed.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from jupyter_client import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from nbformat.v4 import new_output

from launchlab.exam import family, limits, sandbox
from launchlab.exam.agent import TARGET
from launchlab.exam.watch import LOOK_SECONDS, Watch
from launchlab.exam.wire import clean
from launchlab.paths import timing_cache_of

_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec nothing may be
PR_SET_PDEATHSIG = 1
START_SECONDS = 60.0
ASK_AGAIN_SECONDS = 0.2
OUTPUT_CHARACTERS = 64_000  # kept of one cell's text
PICTURE_CHARACTERS = 4 << 20  # kept of one cell's pictures
ALL_CHARACTERS, ALL_PICTURES = 1 << 20, 16 << 20  # kept of all cells of a notebook together
# Beside text, by how their files begin. No HTML, no SVG: they may hold a script, and teachers open these pages.
PICTURES = {"image/png": b"\x89PNG\r\n", "image/jpeg": b"\xff\xd8\xff"}
OUTPUT_FLOOD = 256 << 20  # bytes of output after which a cell is stopped
LARGEST_MESSAGE = 128 << 20  # bytes of one part of a message from a kernel
MOST_PARTS = 4_000_000  # values, about, in the JSON of one message: each takes many times as many bytes here as there
STOP_SECONDS = 1.0  # for a process and all that it started to come to rest
NULL_BYTES = "source code string cannot contain null bytes"  # what Python says
KEEPER = Path(__file__).with_name("keeper.py")
KEEPER_SECONDS = 8.0  # for it to end all that its command left behind
IMPORT = """
def _import():
    for statement in {}:
        try:
            exec(statement, {{}})
        except Exception:  # the cell that holds it will say so
            pass
_import()
del _import
"""
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CONDA_PREFIX", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


class KernelDied(Exception):
    """The process ended; ``args[0]`` says how, in Chinese."""


class KernelTimeout(Exception):
    """No answer before the deadline."""


@dataclass
class CellResult:
    """What one executed cell left: nbformat outputs, cut to size, and the error's name or None."""

    outputs: list = field(default_factory=list)
    error: str | None = None
    message: str = ""


@dataclass
class Room:
    """How much text and how many pictures, in characters, may still be kept of a notebook's outputs."""

    text: int = ALL_CHARACTERS
    pictures: int = ALL_PICTURES


class Kernel:
    """One kernel process in a folder of its own, ready to run cells after `wait_ready`.

    ``given``: the chapter's folder, whose data files (no notebook, no source) are copied into the
    working folder. ``sandboxed``: run behind bubblewrap. ``trusted``: the reference's, of which no
    share is taken. ``cupy_cache``, ``timing_cache``: folders of compiled kernels and of TensorRT's
    timings to begin with (copied, so that nobody can poison them for others). ``imports``: import
    statements, trusted, to run first of all.
    ``own``, to be set before `wait_ready`: the submission's folder, copied before ``given``, so that a
    chapter's file wins. It comes after the imports: a file there cannot stand in for a module of theirs.
    """

    def __init__(self, *, given: Path | None = None, sandboxed: bool, trusted: bool = False, cupy_cache: Path | None = None,
                 timing_cache: Path | None = None, imports: Sequence[str] = ()):
        sweep()
        # A short path: Unix sockets allow about 100 characters. The process id tells whose it is.
        self.folder = Path(tempfile.mkdtemp(prefix=f"ll-{os.getpid()}-"))
        self.process: subprocess.Popen | None = None
        self.client: BlockingKernelClient | None = None
        self.watch: Watch | None = None
        self.own: Path | None = None
        self._given, self._sandboxed, self._trusted = given, sandboxed, trusted
        self._group: limits.Group | None = None
        self._comm_open = False
        self._number = 0
        try:
            self._make_folders(cupy_cache, timing_cache)
            self._start()
            if imports:
                self.client.execute(IMPORT.format(list(imports)), silent=True)  # waited for by `wait_ready`
        except BaseException:
            self.close()
            raise

    def _make_folders(self, cupy_cache: Path | None, timing_cache: Path | None) -> None:
        self.work, self.home = self.folder / "work", self.folder / "home"
        self.work.mkdir()
        self.home.mkdir()
        self.cupy_cache, self.timing_cache = self.folder / "cupy", timing_cache_of(self.home)
        self._begin_with = {self.cupy_cache: cupy_cache, self.timing_cache: timing_cache}
        for cache in self._begin_with:
            cache.mkdir(parents=True)

    def _fill_folders(self) -> None:
        if self.own is not None:
            shutil.copytree(self.own, self.work, dirs_exist_ok=True, ignore=_ignore("*.ipynb", ".*", "__pycache__"))
        if self._given is not None:
            shutil.copytree(self._given, self.work, dirs_exist_ok=True, ignore=_ignore("*.ipynb", ".*", "__pycache__", "*.py"))
        for cache, begin in self._begin_with.items():
            if begin is not None and begin.is_dir():
                shutil.copytree(begin, cache, dirs_exist_ok=True)

    def _start(self) -> None:
        connection = self.folder / "k.json"
        write_connection_file(str(connection), ip=str(self.folder / "s"), transport="ipc", key=os.urandom(16).hex().encode())
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        if "PYTHONPATH" in environment:  # relative entries would mean another folder there
            environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in environment["PYTHONPATH"].split(os.pathsep) if entry)
        # Python puts the working folder first on the path, and learners may keep modules there.
        environment |= {
            "HOME": str(self.home), "TMPDIR": str(self.folder), "IPYTHONDIR": str(self.home), "JUPYTER_CONFIG_DIR": str(self.home),
            "MPLCONFIGDIR": str(self.home), "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "CUPY_CACHE_DIR": str(self.cupy_cache), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONFAULTHANDLER": "1",
        }
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", str(connection), "--HistoryManager.enabled=False"]
        if self._sandboxed:
            command = sandbox.wrap(limits.few_tasks(command) if sandbox.counts_tasks() else command, self.folder, environment)
        if not self._trusted:
            self._group = limits.Group.make(self.folder.name)
        command = limits.limited(command, self._group)
        # A sandbox's first process takes all others with it, but not while it is only just being started, and there may be none.
        command = [sys.executable, "-I", "-S", str(KEEPER), *command]
        self.process = subprocess.Popen(
            command, cwd=self.work, env=environment, start_new_session=True, preexec_fn=partial(end_with, os.getpid(), signal.SIGTERM),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        context = zmq.Context()
        context.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)  # a longer one ends the connection, not the examiner
        self.client = BlockingKernelClient(context=context)
        self.client.load_connection_file(str(connection))
        self.client.session.unpack = unpack
        self.client.allow_stdin = False
        # The heartbeat would be a thread per kernel; the process itself is watched instead.
        self.client.start_channels(stdin=False, hb=False)

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the kernel answers, install the agent and lay the files out."""
        if not self._trusted:  # up to now nothing of a learner's could run in it
            self.watch = Watch(self.process.pid, self.folder, lambda: self.process.poll() is None, self._kill)
        deadline = time.monotonic() + seconds
        self._wait_to_hear(deadline)
        result = self.run_cell(f"import os as _o; _o.chdir({str(self.work)!r}); from launchlab.exam.agent import serve as _s; _s(get_ipython()); del _s, _o", max(1.0, deadline - time.monotonic()), silent=True)
        if result.error:
            raise KernelDied(f"考试代理没能启动：{result.error}: {result.message}")
        self._fill_folders()

    def _wait_to_hear(self, deadline: float) -> None:
        """Ask until an answer comes and its outputs, too: what a kernel publishes before our subscription has reached it is lost."""
        while True:
            self.client.kernel_info()
            try:
                self._next_iopub(min(deadline, time.monotonic() + ASK_AGAIN_SECONDS))
            except KernelTimeout:
                if time.monotonic() >= deadline:
                    raise
            else:
                self._shell_reply(None, deadline)
                return

    def _check_alive(self) -> None:
        code = self.process.poll()
        if code is not None:
            raise KernelDied((self.watch and self.watch.verdict()) or how_it_ended(code))

    def _next(self, receive: Callable[..., dict], deadline: float) -> dict:
        """The next message of a channel that looks like one; what else a hostile process sends there is dropped."""
        # The deadline counts also while messages keep coming: an endless loop may print.
        while time.monotonic() < deadline:
            try:
                message = receive(timeout=min(0.05, max(0.001, deadline - time.monotonic())))
            except Exception:  # noqa: BLE001 - nothing came; or unsigned, sent twice, no JSON: whatever jupyter_client makes of it
                self._check_alive()
            else:
                parts = (message.get("header"), message.get("parent_header"), message.get("content"))
                if all(type(part) is dict for part in parts) and type(message.get("msg_type")) is str:
                    return message
        self._check_alive()
        raise KernelTimeout

    def _next_iopub(self, deadline: float) -> dict:
        return self._next(self.client.get_iopub_msg, deadline)

    def _shell_reply(self, parent: str | None, deadline: float) -> dict:
        while True:
            message = self._next(self.client.get_shell_msg, deadline)
            if parent is None or message["parent_header"].get("msg_id") == parent:
                return message

    def run_cell(self, code: str, seconds: float, silent: bool = False, room: Room | None = None) -> CellResult:
        """Execute ``code`` as a notebook cell; raises `KernelDied` or `KernelTimeout`. ``room``: what its outputs are taken from."""
        if "\0" in code:  # IPython asks a tokenizer first, which in Python 3.12 and 3.13 ends on it with an error of the interpreter
            return CellResult([new_output("error", ename="SyntaxError", evalue=NULL_BYTES, traceback=[NULL_BYTES])], "SyntaxError", NULL_BYTES)
        deadline = time.monotonic() + seconds
        parent = self.client.execute(code, silent=silent, allow_stdin=False, stop_on_error=False)
        collected = _Outputs(room or Room())
        while True:
            message = self._next_iopub(deadline)
            if message["parent_header"].get("msg_id") != parent:
                collected.count(message)
                continue
            if message["msg_type"] == "status" and message["content"].get("execution_state") == "idle":
                break
            collected.take(message)
        reply = self._shell_reply(parent, deadline)["content"]
        result = CellResult(collected.outputs)
        if reply.get("status") != "ok":
            result.error, result.message = clean(reply.get("ename", "Error"), 80), clean(reply.get("evalue", ""), 500)
        return result

    def ask(self, request: dict, blobs: list[bytes], seconds: float) -> tuple[Any, list[bytes]]:
        """One question to the agent; returns the parsed reply and its blobs."""
        deadline = time.monotonic() + seconds
        session, socket = self.client.session, self.client.shell_channel
        if not self._comm_open:
            socket.send(session.msg("comm_open", {"comm_id": TARGET, "target_name": TARGET, "data": {}}))
            self._comm_open = True
        self._number += 1
        content = {"comm_id": TARGET, "data": {"ask": json.dumps({**request, "n": self._number})}}
        message = session.msg("comm_msg", content)
        session.send(socket.socket, message, buffers=blobs)
        flood = _Outputs(Room())
        while True:
            message = self._next_iopub(deadline)
            if message["msg_type"] != "comm_msg" or message["content"].get("comm_id") != TARGET:
                flood.count(message)
                continue
            try:
                reply = unpack(message["content"]["data"]["reply"].encode())
                if type(reply) is dict and reply["n"] == self._number:
                    return reply, [bytes(blob) for blob in message["buffers"]]
            except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
                continue

    def check_share(self) -> None:
        """Raise `KernelDied` if the process and all it started have taken more than their share; they are then ended."""
        if self.watch is not None:
            self.watch.check()
            if why := self.watch.verdict():
                raise KernelDied(why)

    def pause(self) -> None:
        """Stop the process and all it started, so that it can neither work nor disturb.

        Raises `KernelDied` if some of it keeps running: a family that forks on, say.
        """
        self._rest(math.inf)  # who is stopped takes no more
        until = time.monotonic() + STOP_SECONDS
        while time.monotonic() < until:
            members = self._members()
            for pid in members:
                family.send(pid, signal.SIGSTOP)
            # A keeper alone has only just been started, and is about to start the others.
            if (members or self.process.poll() is not None) and all(family.is_stopped(pid) for pid in members) and self._members() == members:
                return
            time.sleep(0.0002)  # threads come to rest one by one
        raise KernelDied("计时的时候，它的进程不肯停下来")

    def resume(self) -> None:
        """Let a paused process go on."""
        self._rest(LOOK_SECONDS)
        for pid in self._members():
            family.send(pid, signal.SIGCONT)

    def _members(self) -> list[int]:
        """The process and all it started; not the keeper's two, which have to stay awake to end them."""
        return family.family(self.process.pid)[2:]

    def _rest(self, seconds: float) -> None:
        if self.watch is not None:
            self.watch.rest(seconds)

    def _kill(self) -> None:
        """Have the keeper end the process and all it started, and wait for that; kill them all if it does not come to it."""
        if self.process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGCONT):
                family.send(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=KEEPER_SECONDS)
        if self.process.poll() is None:
            family.kill(self.process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs keeps it
                self.process.wait(timeout=30)

    def close(self) -> None:
        """Kill the process and all it started, and remove its folder."""
        try:
            if self.watch is not None:
                self.watch.end()
            if self.process is not None:
                self._kill()
                if not self._sandboxed:  # who has killed the keeper, too
                    for pid in family.marked(f"TMPDIR={self.folder}"):
                        family.send(pid, signal.SIGKILL)
            if self._group is not None:
                self._group.remove()
            if self.client is not None:
                self.client.stop_channels()
        finally:
            remove(self.folder)


def unpack(data: bytes) -> Any:
    """JSON of a kernel's. Raises ValueError for one that would grow to gigabytes here."""
    if sum(data.count(mark) for mark in (b"[", b"{", b",")) > MOST_PARTS:
        raise ValueError("too many values")
    return json.loads(data)


def end_with(parent: int, number: int) -> None:
    """For a process just forked: get signal ``number`` when ``parent`` ends, however it ends, be it this very moment.

    What it becomes does so itself, but only once it has come to that.
    """
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)


def sweep() -> None:
    """Remove folders and control groups of examiners that were killed before they could; others may do the same meanwhile."""
    limits.sweep()
    for folder in Path(tempfile.gettempdir()).glob("ll-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdecimal() and not Path("/proc", owner).exists() and Path("/proc/self").exists() and _is_own_folder(folder):
            remove(folder)


def _is_own_folder(path: Path) -> bool:
    """Whether this user made a folder there: anybody may put a name, or a link, into the place for temporary files."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False  # its examiner, or another that sweeps, was quicker
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def remove(folder: Path) -> None:
    """Remove a folder that a student's process may have filled: whatever its modes, however deep."""
    script = 'chmod -R u+rwx "$1"; rm -rf "$1"'
    subprocess.run(["/bin/sh", "-c", script, "remove", str(folder)], stderr=subprocess.DEVNULL, check=False)


def _ignore(*patterns: str) -> Callable[[str, list[str]], set[str]]:
    """For copytree: leave out ``patterns``, and links, which could lead anywhere."""
    by_name = shutil.ignore_patterns(*patterns)
    return lambda folder, names: by_name(folder, names) | {name for name in names if os.path.islink(os.path.join(folder, name))}


class _Outputs:
    """Collects a cell's outputs up to a size, and as long as there is room; raises `KernelDied` for a flood."""

    def __init__(self, room: Room) -> None:
        self.outputs: list = []
        self._room, self._text, self._pictures = room, OUTPUT_CHARACTERS, PICTURE_CHARACTERS
        self._seen = 0

    def count(self, message: dict) -> None:
        self._seen += len(str(message["content"])) + sum(map(len, message["buffers"]))
        if self._seen > OUTPUT_FLOOD:
            raise KernelDied("输出超过 256 MiB，已停止。请去掉循环里的 print。")

    def take(self, message: dict) -> None:
        self.count(message)
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                if text := self._cut(content.get("text")):
                    self.outputs.append(new_output("stream", name="stderr" if content.get("name") == "stderr" else "stdout", text=text))
            case "error":
                lines = content.get("traceback")
                traceback = self._cut("\n".join(map(str, lines)) if type(lines) is list else "").split("\n")
                name, value = clean(content.get("ename"), 80), clean(content.get("evalue"), 500)
                self.outputs.append(new_output("error", ename=name, evalue=value, traceback=traceback))
            case "display_data" | "execute_result":
                data = content.get("data") if type(content.get("data")) is dict else {}
                shown = {"text/plain": self._cut(data.get("text/plain"))} | {mime: self._picture(data.get(mime), magic) for mime, magic in PICTURES.items()}
                if shown := {mime: value for mime, value in shown.items() if value}:
                    self.outputs.append(new_output("display_data", data=shown))

    def _cut(self, text: Any) -> str:
        left = min(self._text, self._room.text)
        if type(text) is not str or not text or left <= 0:
            return ""
        text = text.encode("utf-8", errors="replace").decode()
        self._text -= len(text)
        self._room.text -= min(len(text), left)
        return text if len(text) <= left else text[:left] + "\n…（输出太长，其余从略）\n"

    def _picture(self, text: Any, magic: bytes) -> str:
        """A picture as base64 and nothing else: it is put into the attributes of a page as it stands."""
        if type(text) is not str or len(text) > min(self._pictures, self._room.pictures):
            return ""
        try:
            picture = base64.b64decode("".join(text.split()), validate=True)
        except ValueError:
            return ""
        if not picture.startswith(magic):
            return ""
        self._pictures -= len(text)
        self._room.pictures -= len(text)
        return base64.b64encode(picture).decode()


def how_it_ended(code: int) -> str:
    """A process's return code in words (Chinese)."""
    # bubblewrap reports its child's death by a signal as 128 + signal.
    number = -code if code < 0 else code - 128 if code > 128 else 0
    if number:
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"信号 {number}"
        hints = {"SIGSEGV": "段错误，常见于用了已释放的内存或句柄", "SIGKILL": "被系统杀掉，常见于内存耗尽", "SIGABRT": "程序自己中止，常见于库内部的断言"}
        return f"进程被 {name} 终止" + (f"（{hints[name]}）" if name in hints else "")
    return f"进程自行退出（退出码 {code}），代码里可能调用了 exit"
