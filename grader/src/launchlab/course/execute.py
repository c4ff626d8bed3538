"""Run a solution notebook here, cell by cell, in open mode; cells that need an absent GPU are skipped."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode, v4
from traitlets.config import Config

from launchlab.course import source
from launchlab.device import has_gpu

CELL_SECONDS = 300  # a whole chapter takes less than 60 s on the recording GPU
SKIPPED = "⏭ 这个单元需要 GPU，这台机器上没有可用的 CUDA GPU，所以跳过了它。"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class CellFailed(Exception):
    """A cell raised, hung or lost its kernel; the message names it and holds the traceback."""


@dataclass
class Execution:
    """A notebook as executed. ``seconds``: wall time by cell id, in order; ``skipped``: ids."""

    nb: NotebookNode
    seconds: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def execute(nb: NotebookNode, folder: Path) -> Execution:
    """Run a copy of ``nb`` in a fresh kernel, in a temporary copy of its chapter's ``folder``.

    Without a GPU, cells tagged ``gpu`` get an output that says they were skipped. CellFailed at
    the first cell that fails.
    """
    done = Execution(deepcopy(nb))
    with tempfile.TemporaryDirectory(prefix="launchlab-run-") as place:
        copy = Path(place, folder.name)
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        client = _Client(
            done.nb,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            record_timing=False,
            # Sockets in our own folder: TCP ports would be open to everyone on this machine.
            config=Config(KernelManager={"transport": "ipc", "ip": f"{place}/kernel"}),
            resources={"metadata": {"path": str(copy)}},
        )
        client.done, client.gpu = done, has_gpu()
        try:
            client.execute()
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise CellFailed(_explained(client.current, error)) from error
    done.nb.metadata = deepcopy(nb.metadata)  # nbclient notes the kernel's Python version
    return done


class _Client(NotebookClient):
    """nbclient, with cell times kept and GPU cells skipped where there is none."""

    done: Execution
    gpu: bool
    current: str = "启动内核"

    async def async_execute_cell(self, cell, cell_index, **options):
        if cell.cell_type != "code":
            return cell
        self.current = source.label(cell, cell_index + 1)
        if "gpu" in source.tags(cell) and not self.gpu:
            cell.outputs, cell.execution_count = [v4.new_output("stream", name="stdout", text=SKIPPED)], None
            self.done.skipped.append(cell.id)
            return cell
        cell.outputs, cell.execution_count = [], None
        start = time.perf_counter()
        try:
            return await super().async_execute_cell(cell, cell_index, **options)
        finally:
            self.done.seconds[cell.id] = time.perf_counter() - start


def _explained(current: str, error: Exception) -> str:
    match error:
        case CellTimeoutError():
            why = f"运行超过 {CELL_SECONDS} 秒。"
        case DeadKernelError():
            why = "内核进程在这个单元里退出了（崩溃或内存用尽）。"
        case CellExecutionError():
            why = ANSI.sub("", f"{error.ename}: {error.evalue}\n{error.traceback}")
    return f"{current} 出错：{why}"
