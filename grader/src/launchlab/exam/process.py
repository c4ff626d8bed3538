"""The processes that notebooks run in: the learner's, untrusted, and the reference's.

Both are kernels that have run a notebook's code cells and now answer asks. A process that
dies, hangs or poisons its CUDA context is started anew, without the cell that did it, so
that one exercise's accident stays that exercise's.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from launchlab.exam import party
from launchlab.exam.judge import CRASHED, FAILED, TIMED_OUT
from launchlab.exam.kernel import CellResult, Kernel, KernelDied, KernelTimeout, Room
from launchlab.exam.memory import Block, CudaError, in_blocks
from launchlab.exam.party import ASK_SECONDS, Party, PartyError, PartyLost
from launchlab.exam.watch import NoRoom

CELL_SECONDS = 30.0  # of a learner's cell, or
SLOWER = 4.0  # times as long as the longest of the reference's, where that is more
LOAD_SECONDS = 240.0  # all cells of a notebook together, restarts included
TOTAL_SECONDS = 600.0  # of loading a learner's process, all reloads of one exam together
RESTARTS = 12


@dataclass(frozen=True)
class Cell:
    """A code cell to run: its place in the notebook and its source."""

    index: int
    source: str


class Process(Party):
    """A notebook's process as a party: loaded on first use, loaded again after an accident.

    ``cells``: what to run, in order. ``make_kernel``: starts a fresh kernel. ``gpu``: probe the
    CUDA context after each cell. ``trusted``: the reference's; ``reference``: that one, where this is a learner's. ``outputs`` and ``errors`` (by index) come from the first time
    a cell ran; ``deadly`` holds (verdict, text) of cells that are left out.
    """

    def __init__(self, cells: list[Cell], make_kernel: Callable[[], Kernel], gpu: bool, trusted: bool = False, reference: Process | None = None):
        super().__init__()
        self.cells, self.gpu, self._trusted, self._reference = cells, gpu, trusted, reference
        self.longest = 0.0  # seconds of a cell
        self.outputs: dict[int, list] = {}
        self.errors: dict[int, CellResult] = {}
        self.deadly: dict[int, tuple[str, str]] = {}
        self._room = Room()
        self._make_kernel = make_kernel
        self._kernel: Kernel | None = None
        self._spent = 0.0
        self._blocks: list[Block] = []  # once lent to this process, and to be lent to nobody else

    @property
    def kernel(self) -> Kernel | None:
        """The running kernel, if there is one."""
        return self._kernel

    def load(self) -> None:
        """Start the process and run the cells, unless that is done. Raises `PartyLost`."""
        if self._kernel is not None:
            return
        # What an exercise is allowed is not for loading: cells have their own.
        allowed, self._deadline = self._deadline, None
        started = time.monotonic()
        try:
            # The reference serves a whole class, whose accidents add up.
            self._load(started + (LOAD_SECONDS if self._trusted else min(LOAD_SECONDS, TOTAL_SECONDS - self._spent)))
        except BaseException:
            self.close()
            raise
        finally:
            self._spent += time.monotonic() - started
            self._deadline = allowed

    def _load(self, until: float) -> None:
        for _ in range(RESTARTS):
            self._kernel = self._make_kernel()
            try:
                self._kernel.wait_ready()
            except (KernelDied, KernelTimeout) as error:
                raise PartyLost(f"内核没能启动（{error}）", self) from None
            if all(self._ran(cell, until) for cell in self.cells if cell.index not in self.deadly):
                return
            self.close()
        raise PartyLost("代码一再让进程崩溃，无法继续", self)

    def _ran(self, cell: Cell, until: float) -> bool:
        """Run one cell; False if the process must be started anew without it."""
        began = time.monotonic()
        seconds = min(until - began, self._cell_seconds())
        if seconds <= 0:
            self.deadly[cell.index] = (TIMED_OUT, "单元没有轮到运行：前面的单元用完了时间")
            return True
        try:
            kept = cell.index in self.outputs  # from the first time: what it puts out now takes no room
            result = self._kernel.run_cell(cell.source, seconds, room=None if kept else self._room)
            self.longest = max(self.longest, time.monotonic() - began)
            poison = self.ask("probe") if self.gpu else None
            if poison:
                raise KernelDied(f"CUDA 上下文被破坏：{poison}")
            self._kernel.check_share()
        except KernelTimeout:
            self.deadly[cell.index] = (TIMED_OUT, f"单元运行超过 {seconds:.0f} 秒：可能有停不下来的循环，或一直在等待")
        except (KernelDied, PartyLost) as died:
            self.deadly[cell.index] = (CRASHED, f"单元运行时，{died}")
        else:
            self.outputs.setdefault(cell.index, result.outputs)
            if result.error:
                self.errors.setdefault(cell.index, result)
            return True
        return False

    def _cell_seconds(self) -> float:
        """How long a cell may take. On a slow machine engines take long to build, and a learner's given cells build them too."""
        if self._trusted:
            return math.inf
        return max(CELL_SECONDS, SLOWER * self._reference.longest if self._reference else 0.0)

    def ask(self, op: str, *, seconds: float = ASK_SECONDS, **fields: Any) -> Any:
        """As `Party.ask`; the reference takes its time."""
        return super().ask(op, seconds=party.REFERENCE_SECONDS if self._trusted else seconds, **fields)

    def exchange(self, request: dict, blobs: list[bytes], seconds: float) -> tuple[Any, list[bytes]]:
        self.load()
        with self._lost_with_its_kernel():
            try:
                reply, out = self._kernel.ask(request, blobs, seconds)
            except KernelTimeout:
                self.close()
                raise PartyLost(f"等了 {seconds:.0f} 秒没有回答", self, timed_out=True) from None
        if "error" in reply:
            raise PartyError(reply["error"] if type(reply["error"]) is dict else {}, self)
        return reply.get("value"), out

    @contextlib.contextmanager
    def _lost_with_its_kernel(self) -> Iterator[None]:
        """End the party where its kernel ends: the next ask starts it anew."""
        try:
            yield
        except KernelDied as error:
            self.close()
            raise PartyLost(str(error), self) from None
        except NoRoom:
            self.close()
            raise

    def _block(self, size: int) -> Block | None:
        self.load()
        for block in self._blocks:
            if block.size == in_blocks(size):
                self._blocks.remove(block)
                return block
        try:
            return Block(size)
        except (CudaError, ImportError):
            return None

    def _take_back(self, block: Block) -> None:
        if self._trusted:
            block.free()
        else:  # the process may have it open still, whatever it says: as somebody else's memory it could be read there
            self._blocks.append(block)

    def pause(self) -> None:
        if self._kernel is not None:
            with self._lost_with_its_kernel():
                self._kernel.pause()

    def resume(self) -> None:
        if self._kernel is not None:
            self._kernel.resume()

    def check_share(self) -> None:
        """Raise `PartyLost` if the process and all that it started hold more than their share; they are then ended."""
        if self._kernel is not None:
            with self._lost_with_its_kernel():
                self._kernel.check_share()

    def probe(self) -> str | None:
        """The CUDA error that poisons the process now, or None; a poisoned process is ended."""
        if self._kernel is None or not self.gpu:
            return None
        poison = self.ask("probe")
        if poison:
            self.close()
        return str(poison) if poison else None

    def restart(self) -> None:
        """Begin anew, with all cells: nothing of earlier accidents is remembered."""
        self.close()
        self.outputs.clear()
        self.errors.clear()
        self.deadly.clear()

    def close(self) -> None:
        """End the process; the next ask starts it anew."""
        kernel, self._kernel = self._kernel, None
        self.used = False
        self.generation += 1
        try:
            if kernel is not None:
                kernel.close()
        finally:
            for buffer in self._buffers:
                buffer.free()
            self._buffers.clear()
            for block in self._blocks:
                block.free()
            self._blocks.clear()

    def why_missing(self, name: str) -> tuple[str, str] | None:
        """(verdict, reason) if a cell that defines ``name`` did not run well."""
        for cell in self.cells:
            if defines(cell.source, name):
                if cell.index in self.deadly:
                    verdict, text = self.deadly[cell.index]
                    return verdict, f"定义 {name} 的{text}。"
                if cell.index in self.errors:
                    result = self.errors[cell.index]
                    return FAILED, f"定义 {name} 的单元自己就出错了：{result.error}: {result.message}"
        return None


def defines(source: str, name: str) -> bool:
    """Whether ``source`` seems to bind ``name`` (it need not parse). Linear in its length."""
    word = re.escape(name)
    binding = re.compile(rf"[ \t]*(?:(?:async[ \t]+def|def|class)[ \t]+{word}\b|{word}[ \t]*(?::[^=]+)?=(?!=)|(?:from|import)[ \t].*\b{word}\b)")
    return any(name in line and binding.match(line[:500]) for line in source.splitlines())
