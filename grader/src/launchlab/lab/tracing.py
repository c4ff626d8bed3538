"""A recorder of this process by CUPTI, whose tables bear the names that `nsys export --type sqlite` gives them.

    with tracing.record() as recording:
        with tracing.range("request"):
            graph.launch(stream)
    recording.db.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL")

So one set of queries serves a file of Nsight Systems and the reader's own GPU. Only columns that the course asks for
are there, and times count from the beginning of the recording, in ns. Needs the package cupti-python; importing this
module does not. What is captured into a graph should be captured within a recording if its nodes are to be told apart.
"""

import ctypes
import os
import re
import sqlite3
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

GPU = "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, contextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER"
TABLES = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, globalTid INTEGER, textId INTEGER, domainId INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, "
    "correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{GPU}, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, gridX INTEGER, gridY INTEGER, "
    "gridZ INTEGER, blockX INTEGER, blockY INTEGER, blockZ INTEGER, graphNodeId INTEGER, graphId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{GPU}, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER, "
    "graphNodeId INTEGER, graphId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{GPU}, value INTEGER NOT NULL, bytes INTEGER NOT NULL, graphNodeId INTEGER, graphId INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{GPU}, graphId INTEGER",
}
PUSH_POP, RUNTIME_API, DRIVER_API = 59, 0, 1  # nsys: ENUM_NSYS_EVENT_TYPE, ENUM_NSYS_EVENT_CLASS
MEMORY_KINDS = {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6}  # CUPTI's number of pageable, pinned, device … → nsys's
BUFFER_BYTES = 8 << 20
PID_SHIFT, TID_MASK = 24, (1 << 24) - 1

_recorder: "_Recorder | None" = None  # CUPTI has one set of callbacks per process


class Recording:
    """What a recording left. db: sqlite3.Connection in memory with the tables of TABLES; set when the recording ends."""

    db: sqlite3.Connection


@contextmanager
def record(granularity: str = "node") -> Iterator[Recording]:
    """Record the CUDA calls, GPU work and ranges of this process within the block; yields the Recording.

    granularity: of launched graphs: "node" gives a row to each kernel, copy and memset in them; "graph" gives one row
    in CUPTI_ACTIVITY_KIND_GRAPH_TRACE to each launch of a graph, and disturbs less. The GPU is waited for at both ends.
    Raises ValueError for another granularity, and RuntimeError without cupti-python, without a GPU, within another
    recording, or if CUPTI refuses because another profiler watches this process.
    """
    global _recorder
    if granularity not in ("node", "graph"):
        raise ValueError(
            f"granularity 要么是 'node'（图里每个节点一行），要么是 'graph'（每次图启动一行），不能是 {granularity!r}。"
        )
    if _recorder and _recorder.active:
        raise RuntimeError("已经有一份录制在进行，CUPTI 同时只能录一份：先结束外面那个 with tracing.record()。")
    _recorder = _recorder or _Recorder(_load_cupti())
    recording = Recording()
    _recorder.begin(granularity)
    try:
        yield recording
    finally:
        recording.db = _recorder.end()


@contextmanager
def range(name: str) -> Iterator[None]:
    """Name what this thread does within the block: a row of NVTX_EVENTS in a recording, an NVTX range for nsys.

    Outside of recordings it costs about a microsecond, so it may stay in the code.
    """
    nvtx = sys.modules.get("cupy.cuda.nvtx")
    recorder = _recorder if _recorder and _recorder.active else None
    if nvtx:
        nvtx.RangePush(name)
    start = recorder.now() if recorder else 0
    try:
        yield
    finally:
        if recorder:
            recorder.ranges.append((start, recorder.now(), name, threading.get_native_id()))
        if nvtx:
            nvtx.RangePop()


def _load_cupti():
    try:
        from cupti import cupti
    except ImportError as error:
        raise RuntimeError(
            "没有装 cupti-python，录不了时间线。请先安装：pip install cupti-python（主版本号和 CUDA 的一样）"
        ) from error
    return cupti


class _Recorder:
    """The process's one client of CUPTI's activity API."""

    def __init__(self, cupti):
        self.cupti, self.active, self.ranges = cupti, False, []
        self._rows: list[tuple[str, dict[str, Any]]] = []
        kind = cupti.ActivityKind
        self._always = (kind.RUNTIME, kind.DRIVER, kind.CONCURRENT_KERNEL, kind.MEMCPY, kind.MEMSET)
        with suppress(Exception):  # an older CUPTI names threads otherwise; the ranges then have another number than the calls
            cupti.set_thread_id_type(cupti.ActivityThreadIdType.SYSTEM)
        self._call(cupti.activity_register_callbacks, lambda: (BUFFER_BYTES, 0), self._completed)

    def now(self) -> int:
        """CUPTI's clock, ns: that of the records."""
        return self.cupti.get_timestamp()

    def begin(self, granularity: str) -> None:
        kind = self.cupti.ActivityKind
        self._kinds = (*self._always, kind.GRAPH_TRACE) if granularity == "graph" else self._always
        _synchronize()
        for each in self._kinds:
            self._call(self.cupti.activity_enable, each)
        self._call(self.cupti.activity_flush_all, 1)
        self._rows, self.ranges, self._start, self.active = [], [], self.now(), True

    def end(self) -> sqlite3.Connection:
        self.active, end = False, self.now()
        try:
            _synchronize()
            self._call(self.cupti.activity_flush_all, 1)
        finally:
            for each in self._kinds:
                self._call(self.cupti.activity_disable, each)
        rows = [
            (table, row)
            for table, row in self._rows
            if self._start <= row["start"] and (table != "CUPTI_ACTIVITY_KIND_RUNTIME" or row["start"] <= end)
        ]
        return database(rows, self.ranges, self._start)

    def _call(self, function, *args):
        try:
            return function(*args)
        except Exception as error:
            raise RuntimeError(
                f"CUPTI 拒绝了 {getattr(function, '__name__', function)}：{error}。多半是已经有别的剖析工具（nsys、ncu、另一个 CUPTI 客户）附在这个进程上，或者这里没有 GPU。"
            ) from error

    def _completed(self, activities) -> None:
        """CUPTI's buffer is full or flushed: its records live as long as this call, so copy what is wanted."""
        for activity in activities:
            row = row_of(activity, self.cupti)
            if row:
                self._rows.append(row)


def _synchronize() -> None:
    from launchlab.lab.cuda_errors import check_cuda

    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise RuntimeError("没有装 cuda-bindings，录不了时间线。") from error
    check_cuda(runtime.cudaDeviceSynchronize())


def row_of(activity, cupti) -> tuple[str, dict[str, Any]] | None:
    """The table and the row, column → value, that a record of CUPTI becomes; None for records of no interest.

    Names stay text under the key of their column (`nameId`, `demangledName`, `shortName`) until `database` numbers them.
    """
    kind, a = cupti.ActivityKind, activity
    if a.kind in (kind.RUNTIME, kind.DRIVER):
        runtime = a.kind == kind.RUNTIME
        domain = cupti.CallbackDomain.RUNTIME_API if runtime else cupti.CallbackDomain.DRIVER_API
        return "CUPTI_ACTIVITY_KIND_RUNTIME", {
            "start": a.start, "end": a.end, "eventClass": RUNTIME_API if runtime else DRIVER_API, "globalTid": _global(a.process_id, a.thread_id),
            "correlationId": a.correlation_id, "nameId": cupti.get_callback_name(domain, a.cbid), "returnValue": a.return_value,
        }  # fmt: skip
    if a.kind not in (kind.CONCURRENT_KERNEL, kind.KERNEL, kind.MEMCPY, kind.MEMSET, kind.GRAPH_TRACE):
        return None
    row = {
        "start": a.start, "end": a.end, "deviceId": a.device_id, "contextId": a.context_id, "streamId": a.stream_id,
        "correlationId": a.correlation_id, "globalPid": _global(os.getpid(), 0), "graphId": a.graph_id or None,
    }  # fmt: skip
    if a.kind == kind.GRAPH_TRACE:
        return "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", row
    row["graphNodeId"] = a.graph_node_id or None
    if a.kind == kind.MEMCPY:
        return "CUPTI_ACTIVITY_KIND_MEMCPY", row | {
            "bytes": a.bytes, "copyKind": a.copy_kind, "srcKind": MEMORY_KINDS.get(a.src_kind, 7), "dstKind": MEMORY_KINDS.get(a.dst_kind, 7),
        }  # fmt: skip
    if a.kind == kind.MEMSET:
        return "CUPTI_ACTIVITY_KIND_MEMSET", row | {"value": a.value, "bytes": a.bytes}
    name = _demangled(a.name or "?")
    return "CUPTI_ACTIVITY_KIND_KERNEL", row | {
        "demangledName": name, "shortName": _short(name), "gridX": a.grid_x, "gridY": a.grid_y, "gridZ": a.grid_z,
        "blockX": a.block_x, "blockY": a.block_y, "blockZ": a.block_z,
    }  # fmt: skip


@cache
def _demangled(name: str) -> str:
    """A C++ symbol in words, by the C++ library; the symbol itself where that is missing."""
    if not name.startswith("_Z"):
        return name
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return name
    demangle.restype, status = ctypes.c_void_p, ctypes.c_int()
    text = demangle(name.encode(), None, None, ctypes.byref(status))  # never freed: a few dozen names per process
    return ctypes.string_at(text).decode(errors="replace") if text else name


def _short(name: str) -> str:
    """The name of a kernel without its return type, namespaces, template arguments and parameters."""
    bare = re.split(r"[<(]", name.replace("(anonymous namespace)::", ""))[0]
    return bare.split("::")[-1].split()[-1] if bare.strip() else name


def database(
    rows: Iterable[tuple[str, dict[str, Any]]], ranges: Iterable[tuple[int, int, str, int]] = (), zero: int = 0
) -> sqlite3.Connection:
    """Make the tables of TABLES in memory.

    rows: (table, {column: value}); ranges: (start, end, name, thread id); zero: ns, subtracted from every time. A driver
    call that a runtime call made within itself is left out, as nsys leaves it out.
    """
    db = sqlite3.connect(":memory:", check_same_thread=False)
    for table, columns in TABLES.items():
        db.execute(f"CREATE TABLE {table} ({columns})")
    strings: dict[str, int] = {}
    pid = os.getpid()
    named = ("nameId", "demangledName", "shortName")
    marks = [
        (
            "NVTX_EVENTS",
            {"start": start, "end": end, "eventType": PUSH_POP, "text": name, "globalTid": _global(pid, thread), "domainId": 0},
        )
        for start, end, name, thread in ranges
    ]
    for table, row in sorted([*_outermost(list(rows)), *marks], key=lambda each: (each[1]["start"], -each[1]["end"])):
        values = {key: strings.setdefault(value, len(strings)) if key in named else value for key, value in row.items()}
        values["start"], values["end"] = values["start"] - zero, values["end"] - zero
        db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", list(values.values()))
    db.executemany("INSERT INTO StringIds (value, id) VALUES (?, ?)", strings.items())
    db.commit()
    return db


def _outermost(rows: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """All rows but those of driver calls within a runtime call of their thread, whose GPU work goes to the outer call."""
    calls = sorted(
        (row for table, row in rows if table == "CUPTI_ACTIVITY_KIND_RUNTIME"),
        key=lambda row: (row["start"], -row["end"], row["eventClass"]),
    )
    last: dict[int, dict] = {}  # thread → the runtime call that began last
    outer = {}  # correlation id of an inner call → of the outer
    inner = set()
    for row in calls:
        around = last.get(row["globalTid"])
        if row["eventClass"] == RUNTIME_API:
            last[row["globalTid"]] = row
        elif around and row["end"] <= around["end"]:
            outer[row["correlationId"]] = around["correlationId"]
            inner.add(id(row))
    kept = [(table, row) for table, row in rows if id(row) not in inner]
    return [(table, row | {"correlationId": outer.get(row["correlationId"], row["correlationId"])}) for table, row in kept]


def _global(pid: int, tid: int) -> int:
    """nsys's serialised id of a thread; of a process with tid 0."""
    return pid << PID_SHIFT | (tid & TID_MASK)
