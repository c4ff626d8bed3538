"""How long the GPU's kernels themselves take, as CUPTI sees them: the floor under every latency."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Any

from launchlab.lab import tracing
from launchlab.lab.measuring import device_sync

RUNS = 9
APART_NS = 2_000_000  # between runs, more than CUPTI's clocks of CPU and GPU differ by


def runs(prepare: Callable[[], Callable[[], object]]) -> list[dict[str, Any]]:
    """Record RUNS runs of the work that prepare() returns, each waited for. A graph is to be captured in prepare().

    Returns for each run ``kernel_start_ns`` (from the first kernel's start), ``kernel_ns`` and ``others``, the number of
    copies and memsets. RuntimeError where CUPTI is missing, refuses, or sees no kernel.
    """
    with tracing.record() as recording:
        work = prepare()
        work()
        device_sync()
        for _ in range(RUNS):
            time.sleep(2 * APART_NS / 1e9)
            with tracing.range("run"):
                work()
                device_sync()
    return runs_in(recording.db)


def runs_in(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """What ran in each range "run" of a recording's database, and within APART_NS of it. RuntimeError as for `runs`."""
    windows = db.execute("SELECT start, end FROM NVTX_EVENTS WHERE text = 'run' ORDER BY start").fetchall()
    return [_run(db, start - APART_NS, end + APART_NS) for start, end in windows]


def _run(db: sqlite3.Connection, start: int, end: int) -> dict[str, Any]:
    """What ran between two times, ns, of a recording's database."""
    within = "WHERE start >= ? AND end <= ?"
    kernels = db.execute(f"SELECT start, end FROM CUPTI_ACTIVITY_KIND_KERNEL {within} ORDER BY start", (start, end)).fetchall()
    if not kernels:
        raise RuntimeError("CUPTI 在一次运行里没有看到内核")
    others = sum(
        db.execute(f"SELECT count(*) FROM CUPTI_ACTIVITY_KIND_{kind} {within}", (start, end)).fetchone()[0]
        for kind in ("MEMCPY", "MEMSET")
    )
    first = kernels[0][0]
    return {
        "kernel_start_ns": [begun - first for begun, _ in kernels],
        "kernel_ns": [ended - begun for begun, ended in kernels],
        "others": others,
    }
