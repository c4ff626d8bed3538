"""The examiner: runs a notebook's test cells against the processes of its code cells.

The test cells run here, in the trusted process, in namespaces of their own. The learner's
cells run in a sandboxed kernel, the solution's in another one; both only answer asks.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import hashlib
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import nbformat
import numpy as np
import zmq
from nbformat import NotebookNode

from launchlab.device import gpu as find_gpu
from launchlab.device import identity
from launchlab.exam import judge, limits, sandbox, show
from launchlab.exam.check import CannotTell, Check, CheckFailed, alone_on
from launchlab.exam.kernel import Kernel
from launchlab.exam.memory import Buffer, CudaError
from launchlab.exam.party import REFERENCE_SECONDS, PartyError, PartyLost
from launchlab.exam.process import Cell, Process, defines
from launchlab.exam.remote import Namespace
from launchlab.exam.report import CheckReport, Report, versions
from launchlab.exam.timing import GpuBusy
from launchlab.exam.waiting import Waiting
from launchlab.exam.watch import NoRoom
from launchlab.exam.wire import clean
from launchlab.manifest import Chapter
from launchlab.paths import BUILD

EXERCISE_SECONDS = 90.0
AFTERMATH_SECONDS = 10.0
TENSORRT = "tensorrt"
# Exceptions of libraries that learners meet.
LIBRARIES = {"CUDARuntimeError", "CUDADriverError", "CompileException", "NVRTCError", "OutOfMemoryError", "CudaError", "LinAlgError", "AxisError"}
SPEEDUP = "speedup"
WAITING_CPUS = (2, 4)  # for a process to begin while another is examined: without a GPU nothing is timed
# What can go wrong on the examiner's own side: the GPU, its lock, a disk, memory. Everything else is points not proved.
EXAMINERS = (CudaError, OSError, MemoryError, zmq.ZMQError, GpuBusy, NoRoom)


def examine(nb: NotebookNode, chapter: Chapter, files: Path | None = None, of_class: bool = False) -> Report:
    """Examine ``nb`` as a submission of ``chapter``; returns the report and writes verdicts into its test cells.

    ``nb``: an nbformat-4 notebook. Only its code cells count: what a test cell runs is the master's text,
    whatever stands in ``nb`` under that cell's name.
    ``files``: folder of the submission, whose other files the learner's code may open.
    ``of_class``: another submission of the chapter is likely to follow, whose process may begin already.
    Never raises for what a submission does.
    """
    started = time.perf_counter()
    master = Master.of(chapter)
    gpu, lack = find_gpu(), lacking(chapter)
    sandboxed = sandbox.works()
    report = Report(chapter.name, "bubblewrap" if sandboxed else "none", gpu.name if gpu else None, gpu.driver if gpu else None, versions(), limits.told(sandboxed))
    tests = [(cell, master.tests[cell.metadata.nbgrader.grade_id]) for cell in nb.cells if _is_test(cell, master)]
    master.waiting.ahead = of_class and sandboxed  # without a sandbox the learner's process could reach the next one
    if any(not lack or not test.needs_gpu for _, test in tests):
        if sandboxed:
            master.waiting.begin()  # the learner's process comes up meanwhile
        master.reference.load()  # before any of the learner's code can be in its way
        master.reference.keep_caches()
    student = Process(master.cells_to_run(nb), partial(master.waiting.take, files), bool(gpu), reference=master.reference.process)
    try:
        # Speed-ups last: they end the learner's process, and whatever is examined after them pays for a new one.
        for cell, test in sorted(tests, key=lambda each: each[1].kind == SPEEDUP):
            check = CheckReport(test.id, test.kind, test.needs_gpu, test.points)
            if test.needs_gpu and lack:
                check.verdict, check.reason = judge.NEEDS_GPU, lack
            else:
                _examine_one(test, check, student, master)
            report.checks.append(check)
            show.verdict(cell, check)
        places = {test.id: place for place, (_, test) in enumerate(tests)}
        report.checks.sort(key=lambda check: places[check.id])
        _fill_outputs(nb, student, master, lack)
        master.reference.keep_caches()
    finally:
        student.close()
    report.seconds = round(time.perf_counter() - started, 3)
    return report


def lacking(chapter: Chapter) -> str | None:
    """Why the parts of ``chapter`` that need a GPU cannot run here (Chinese), or None if they can."""
    if find_gpu() is None:
        return "这台机器没有 GPU，没有评分：换一台有 GPU 的机器再评。"
    wanted = ([TENSORRT] if chapter.needs.tensorrt else []) + [name.replace("-", "_") for name in chapter.needs.packages]
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        return f"这台机器没有安装 {'、'.join(missing)}，没有评分：运行 launchlab doctor 看怎样安装，装好以后再评。"
    return None


def _examine_one(test: Test, report: CheckReport, student: Process, master: Master) -> None:
    started = time.monotonic()
    secret = np.random.default_rng()
    check = Check(secret)
    reference = master.reference.process
    student.allow(None)
    hidden = True  # whether the words of the learner's process may hold hidden inputs
    names = {
        "student": Namespace(student), "reference": Namespace(reference), "check": check, "secret": secret,
        "on_gpu": Buffer, "np": np, "partial": partial, "__name__": "launchlab_test",
    }
    try:
        student.load()
        with _to_itself(test, master):
            student.allow(EXERCISE_SECONDS, beside=reference)  # waiting for the GPU, or for the reference, is not the learner's time
            reference.allow(EXERCISE_SECONDS + REFERENCE_SECONDS)  # what a learner built may keep it busy
            exec(compile(test.source, f"<{report.id}>", "exec"), names)
            verdict, reason = _aftermath(student, report) or (judge.PASSED, "通过。")
            if check.unsettled and verdict == judge.PASSED:
                student.close()
                check.settle()
    except CannotTell as error:
        verdict, reason = judge.INCONCLUSIVE, str(error)
    except CheckFailed as error:
        hidden = _in_hidden_test(error, test.source, report.id)
        verdict, reason = judge.FAILED, error.guarded if hidden else str(error)
    except (PartyError, PartyLost) as error:
        if error.party is reference:  # not the learner's fault, as far as can be told
            verdict, reason = _overdrawn(student) or (judge.INCONCLUSIVE, f"参考实现没能运行（{error}），这道练习没有评分，请教师处理。")
        else:
            hidden = _in_hidden_test(error, test.source, report.id)
            verdict, reason = explain(error, student, master, hidden=hidden)
    except EXAMINERS as error:
        verdict, reason = _overdrawn(student) or (judge.INCONCLUSIVE, f"考官自己出错了（{type(error).__name__}: {error}），这道练习没有评分，请教师处理。")
    except Exception as error:  # noqa: BLE001 - a learner's values can do anything to a test cell
        verdict, reason = judge.FAILED, f"返回值不是要求的样子，检查无法进行（{type(error).__name__}）。请对照函数说明，看返回的类型和形状。"
    if verdict == judge.FAILED:
        reason += "" if hidden else _last_error(student)
        verdict, reason = _aftermath(student, report) or (verdict, reason)
    reference.allow(None)
    try:
        reference.forget()
        reference.probe()
    except (PartyError, PartyLost):
        reference.close()
    if verdict != judge.PASSED and judge.recompute(check.records, report.points)[0] != verdict:
        # Something other than a check decided: keep that on record, so that it can be recomputed too.
        check.records.insert(0, {"check": "stopped", "verdict": verdict})
    report.records = check.records
    report.reason = reason
    report.verdict, report.score = judge.recompute(check.records, report.points)
    if report.verdict == judge.PASSED and report.score < report.points:
        report.reason = "部分通过：加速达到要求的一半。"
    report.seconds = round(time.monotonic() - started, 3)


@contextlib.contextmanager
def _to_itself(test: Test, master: Master) -> Iterator[None]:
    """What a test that measures time needs: no other exam that measures on this GPU (its equals may), no process just coming up."""
    if not test.alone:
        yield
        return
    with alone_on(identity()), master.waiting.stopped():
        yield


def _last_error(student: Process) -> str:
    """What TensorRT reported last in this exercise, without its numbers; "" if nothing. Any notebook can have it say anything."""
    with contextlib.suppress(PartyError, PartyLost):
        errors = student.ask("errors") if student.used else []
        if type(errors) is list and errors:
            return f"（TensorRT 最后报告的错误：{re.sub(r'[0-9]+', '#', clean(errors[-1], 300))}）"
    return ""


def _aftermath(student: Process, report: CheckReport) -> tuple[str, str] | None:
    """Verdict and reason for a process that an exercise left unusable; it is ended. None if that exercise is not to blame.

    A context broken after an exercise that needs no GPU was broken by what an earlier one left running.
    """
    trouble = _tidy(student)
    return trouble if report.needs_gpu else None


def _overdrawn(student: Process) -> tuple[str, str] | None:
    """Verdict and reason if the student's process has taken so much of the machine that others may have failed for it; it is ended."""
    try:
        student.check_share()
    except PartyLost as lost:
        return judge.CRASHED, f"{lost}。进程已重新启动，不影响其他练习。"
    except (NoRoom, GpuBusy):  # it was not this one, or others are still being looked at for the same
        return None
    return None


def _tidy(student: Process) -> tuple[str, str] | None:
    student.allow(AFTERMATH_SECONDS)
    if trouble := _overdrawn(student):
        return trouble
    try:
        student.forget()
        poison = student.probe()
    except PartyLost as lost:
        return judge.TIMED_OUT if lost.timed_out else judge.CRASHED, f"检查之后，{lost}：可能还有内核在无休止地运行。进程已重新启动，不影响其他练习。"
    except PartyError as error:
        student.close()
        poison = str(error) if student.gpu else None
    except Exception as error:  # noqa: BLE001 - a hostile process must not end the class
        student.close()
        return judge.CRASHED, f"检查之后，进程的回答无法理解（{type(error).__name__}）。进程已重新启动，不影响其他练习。"
    if poison and "StreamCapture" in poison:
        return judge.CRASHED, f"检查之后还有一条流停在捕获状态（{poison}）：每次 begin_capture 都要有对应的 end_capture，出错时也一样。进程已重新启动，不影响其他练习。"
    if poison:
        return judge.CRASHED, f"CUDA 上下文被破坏了（{poison}）：有内核越界访问了显存，或用了已释放的内存。进程已重新启动，不影响其他练习。"
    return None


def _in_hidden_test(error: Exception, source: str, name: str) -> bool:
    """Whether a test cell's ``source`` raised ``error`` from its hidden part."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == f"<{name}>"]
    before = "\n".join(source.split("\n")[: lines[0]]) if lines else source
    return before.rfind("### BEGIN HIDDEN TESTS") > before.rfind("### END HIDDEN TESTS")


def explain(error: Exception, student: Process, master: Master, hidden: bool) -> tuple[str, str]:
    """Verdict and reason (Chinese) for what the learner's process raised or did.

    The words of an exception are the learner's, who may have put the arguments of the call into
    them: of a ``hidden`` call only that is told which stands in the notebooks anyway.
    """
    if isinstance(error, PartyLost):
        if error.timed_out:
            return judge.TIMED_OUT, f"{error}。可能有停不下来的循环或内核，也可能在等待输入。进程已重新启动，不影响其他练习。"
        return judge.CRASHED, f"{error}。进程已重新启动，不影响其他练习。"
    info = error.info
    written = "\n".join([*(cell.source for cell in student.cells), *(cell.source for cell in master.notebook.cells)])
    name = re.sub(r"^name '(\w+)'.*$", r"\1", info["message"])
    if info["type"] == "NameError" and re.search(rf"\b{re.escape(name)}\b", written):
        missing = student.why_missing(name)
        if missing:
            return missing
        if any(defines(source, name) for source in master.demos):
            return judge.FAILED, f"{name} 定义在演示单元里，评分时不运行演示单元。请把用到的代码写进自己的答题单元。"
        return judge.FAILED, f"没有找到 {name}。请不要改函数名，也不要删掉给定的单元；自己用到的库要在自己的单元里导入。"
    if info["type"] == "NotImplementedError" and info["message"] in written:
        return judge.FAILED, f"还没有作答：{info['message']}"
    if info["type"] == "WireError":
        return judge.FAILED, "返回的值无法读取：太大、嵌套太深，或者不是普通数据。请对照函数说明，看返回的类型和形状。"
    what = "" if info["own"] or hidden or not info["message"] else f"：{info['message'][:200]}"
    where = f"，出错的一行：{info['line']}" if info["line"] and not hidden else ""
    kind = info["type"] if not hidden or _is_known(info["type"], written) else "异常"
    return judge.FAILED, f"调用你的函数时抛出 {kind}{what}{where}"


def _is_known(kind: str, written: str) -> bool:
    """Whether an exception's class has a name that tells nothing: one made up in the call could carry what was asked."""
    return hasattr(builtins, kind) or kind in LIBRARIES or bool(re.search(rf"\b{re.escape(kind)}\b", written))


class Test:
    """A test cell as the master has it."""

    def __init__(self, cell: NotebookNode):
        self.id: str = cell.metadata.nbgrader.grade_id
        self.source: str = cell.source
        self.points = float(cell.metadata.nbgrader.points)
        self.kind: str = cell.metadata.get("launchlab", {}).get("kind", "answer")
        tags = cell.metadata.get("tags", [])
        self.needs_gpu = "gpu" in tags
        self.alone = "alone" in tags or self.kind == SPEEDUP  # see `_to_itself`


class Master:
    """The solution notebook: what is to be tested, what to run, and the reference's process. Kept warm for a class.

    ``waiting`` gives out the processes of learners.
    """

    _known: ClassVar[dict[str, Master]] = {}

    def __init__(self, chapter: Chapter, text: str):
        self.notebook = nbformat.reads(text, as_version=4)
        cells = [cell for cell in self.notebook.cells if cell.cell_type == "code"]
        self.tests = {cell.metadata.nbgrader.grade_id: Test(cell) for cell in cells if cell.metadata.get("nbgrader", {}).get("grade")}
        self.tags = {cell.id: set(cell.metadata.get("tags", [])) for cell in cells}
        self.demos = [cell.source for cell in cells if "demo" in self.tags[cell.id]]
        self.cupy_cache, self.timing_cache = BUILD / "cupy", BUILD / "timing"
        self.lack = lacking(chapter)
        self.reference = Reference(chapter, self)
        make = partial(Kernel, given=chapter.solution.parent, sandboxed=sandbox.works(), timing_cache=self.timing_cache, imports=self._imports())
        self.waiting = Waiting(make, least_cpus=WAITING_CPUS[find_gpu() is not None])

    @classmethod
    def of(cls, chapter: Chapter) -> Master:
        text = chapter.solution.read_text(encoding="utf-8")
        key = hashlib.sha256(f"{chapter.solution}\n{text}".encode()).hexdigest()
        if key not in cls._known:
            cls.dismiss()
            cls._known[key] = cls(chapter, text)
        return cls._known[key]

    @classmethod
    def dismiss(cls) -> None:
        """End of a class: let go of the reference's process and its GPU memory."""
        while cls._known:
            _, old = cls._known.popitem()
            old.waiting.close()
            old.reference.close()

    def cells_to_run(self, nb: NotebookNode) -> list[Cell]:
        """Code cells for a process: neither tests nor demonstrations, nor, without a GPU, what needs one."""
        skip = {"demo", "gpu"} if self.lack else {"demo"}
        return [
            Cell(index, cell.source) for index, cell in enumerate(nb.cells)
            if cell.cell_type == "code" and cell.source.strip() and not _is_test(cell, self) and not skip & self.tags.get(cell.get("id"), set())
        ]

    def _imports(self) -> list[str]:
        """The import statements of the chapter's given cells, which every process runs anyway."""
        found = []
        for cell in self.cells_to_run(self.notebook):
            if "nbgrader" not in self.notebook.cells[cell.index].metadata:
                with contextlib.suppress(SyntaxError):  # a magic command
                    found += [ast.unparse(line) for line in ast.parse(cell.source).body if isinstance(line, ast.Import | ast.ImportFrom)]
        return found


class Reference:
    """The solution's process, trusted. Kept for the class, with the kernels it compiled kept for the next."""

    def __init__(self, chapter: Chapter, master: Master):
        self.process = Process(master.cells_to_run(master.notebook), self._kernel, bool(find_gpu()), trusted=True)
        self._chapter, self._master = chapter, master

    def _kernel(self) -> Kernel:
        master = self._master
        # Trusted, and yet in a sandbox: some chapters have it load what learners built.
        return Kernel(given=self._chapter.solution.parent, sandboxed=sandbox.works(), trusted=True, cupy_cache=master.cupy_cache, timing_cache=master.timing_cache)

    def load(self) -> None:
        """Have the process ready. Once more from the beginning if a cell went wrong: that cannot be the solution's fault alone."""
        for _ in range(2):
            with contextlib.suppress(PartyLost):  # told by the first check that asks
                self.process.load()
            if not (self.process.deadly or self.process.errors):
                return
            self.process.restart()

    def keep_caches(self) -> None:
        """Leave compiled kernels and timings for the next reference.

        A student's process gets the timings too, so that the same network is built from the same tactics; they tell
        nothing of the solution. It compiles its own kernels: those of the reference hold solutions.
        """
        kernel = self.process.kernel
        for cache, kept in [(kernel.cupy_cache, self._master.cupy_cache), (kernel.timing_cache, self._master.timing_cache)] if kernel else []:
            with contextlib.suppress(OSError):  # written at this very moment, say: the next exam keeps it
                _keep(cache, kept)

    def close(self) -> None:
        self.process.close()


def _keep(cache: Path, kept: Path) -> None:
    """Copy the files of ``cache`` into ``kept``, each of them whole: other exams read there meanwhile."""
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".keeping-") as place:
        shutil.copytree(cache, place, dirs_exist_ok=True)
        for path in Path(place).rglob("*"):
            if path.is_file():
                target = kept / path.relative_to(place)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)


def _is_test(cell: NotebookNode, master: Master) -> bool:
    return cell.cell_type == "code" and cell.metadata.get("nbgrader", {}).get("grade_id") in master.tests


atexit.register(Master.dismiss)


def _fill_outputs(nb: NotebookNode, student: Process, master: Master, lack: str | None) -> None:
    """Give the learner's cells the outputs they had, or say why a cell did not run."""
    for index, cell in enumerate(nb.cells):
        if cell.cell_type != "code" or _is_test(cell, master):
            continue
        cell.execution_count = None
        tags = master.tags.get(cell.get("id"), set())
        if index in student.deadly:
            cell.outputs = [show.note(student.deadly[index][1])]
        elif "demo" in tags:
            cell.outputs = [show.note("演示单元，评分时不运行。")]
        elif "gpu" in tags and lack:
            cell.outputs = [show.note(f"未运行：{lack}")]
        else:
            cell.outputs = student.outputs.get(index, [])


