"""lab.tracing: CUPTI's records become nsys's tables. CUPTI itself is played by a stand-in."""

from enum import IntEnum
from types import SimpleNamespace

import pytest

from launchlab.lab import tracing

Kind = IntEnum("Kind", "MEMCPY MEMSET KERNEL DRIVER RUNTIME CONCURRENT_KERNEL GRAPH_TRACE STREAM")
Domain = IntEnum("Domain", "DRIVER_API RUNTIME_API")
COUNT = "SELECT count(*) FROM "


class Cupti:
    """A stand-in: a clock that the test sets, and records that it hands over when flushed."""

    ActivityKind, CallbackDomain = Kind, Domain
    ActivityThreadIdType = SimpleNamespace(SYSTEM=1)

    def __init__(self):
        self.time, self.pending, self.enabled, self.refuse = 1000, [], set(), False

    def set_thread_id_type(self, kind):
        pass

    def activity_register_callbacks(self, requested, completed):
        assert requested() == (tracing.BUFFER_BYTES, 0)
        self.completed = completed

    def activity_enable(self, kind):
        if self.refuse:
            raise OSError("MULTIPLE_SUBSCRIBERS")
        self.enabled.add(kind)

    def activity_disable(self, kind):
        self.enabled.discard(kind)

    def activity_flush_all(self, flag):
        self.completed(self.pending)
        self.pending = []

    def get_timestamp(self):
        return self.time

    def get_callback_name(self, domain, cbid):
        return f"{domain.name[:6]}{cbid}"


def call(start, end, correlation, *, kind=Kind.RUNTIME, cbid=211, thread=7):
    return SimpleNamespace(
        kind=kind, start=start, end=end, correlation_id=correlation, cbid=cbid, process_id=1, thread_id=thread, return_value=0
    )


def work(kind, start, end, correlation, **more):
    at = {"device_id": 0, "context_id": 1, "stream_id": 7, "graph_id": 0, "graph_node_id": 0}
    return SimpleNamespace(kind=kind, start=start, end=end, correlation_id=correlation, **at | more)


def kernel(start, end, correlation, name="void layer<int>(float*)", **more):
    size = {f"{what}_{axis}": 1 for what in ("grid", "block") for axis in "xyz"}
    return work(Kind.CONCURRENT_KERNEL, start, end, correlation, name=name, **size, **more)


@pytest.fixture
def cupti(monkeypatch):
    stand_in = Cupti()
    monkeypatch.setattr(tracing, "_recorder", None)
    monkeypatch.setattr(tracing, "_load_cupti", lambda: stand_in)
    monkeypatch.setattr(tracing, "_synchronize", lambda: None)
    return stand_in


def test_calls_work_and_ranges_share_one_clock_that_begins_with_the_recording(cupti):
    with tracing.record() as recording:
        cupti.time = 1100
        with tracing.range("request"):
            cupti.pending += [call(1110, 1120, 5), kernel(1130, 1150, 5), work(Kind.MEMSET, 1160, 1170, 5, value=0, bytes=4)]
            cupti.time = 1200
    db = recording.db
    assert db.execute("SELECT start, end, text FROM NVTX_EVENTS").fetchall() == [(100, 200, "request")]
    assert db.execute(
        "SELECT k.start, s.value FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName"
    ).fetchall() == [(130, "void layer<int>(float*)")]
    assert db.execute("SELECT s.value FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.shortName").fetchall() == [
        ("layer",)
    ]
    assert db.execute(
        "SELECT r.start, r.end, s.value FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN StringIds s ON s.id = r.nameId"
    ).fetchall() == [(110, 120, "RUNTIM211")]
    assert db.execute("SELECT start, end, bytes FROM CUPTI_ACTIVITY_KIND_MEMSET").fetchall() == [(160, 170, 4)]


@pytest.mark.parametrize(
    ("name", "demangled", "short"),
    [
        ("mix", "mix", "mix"),
        ("_ZN2ns4workILi2EEEvPf", "void ns::work<2>(float*)", "work"),
        (
            "void (anonymous namespace)::tile<float, (int)4>(Params)",
            "void (anonymous namespace)::tile<float, (int)4>(Params)",
            "tile",
        ),
    ],
)
def test_kernels_have_a_readable_and_a_short_name(cupti, name, demangled, short):
    with tracing.record() as recording:
        cupti.pending += [kernel(1010, 1020, 1, name)]
    strings = dict(recording.db.execute("SELECT id, value FROM StringIds"))
    ((long, brief),) = recording.db.execute("SELECT demangledName, shortName FROM CUPTI_ACTIVITY_KIND_KERNEL")
    assert (strings[long], strings[brief]) == (demangled, short)


def test_graph_nodes_have_an_id_and_other_work_has_none(cupti):
    with tracing.record() as recording:
        cupti.pending += [kernel(1010, 1020, 1), kernel(1030, 1040, 2, graph_id=3, graph_node_id=3 << 32 | 9)]
    assert recording.db.execute("SELECT graphNodeId, graphId FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchall() == [
        (None, None),
        (3 << 32 | 9, 3),
    ]


def test_by_graph_each_launch_is_one_row(cupti):
    with tracing.record("graph") as recording:
        assert Kind.GRAPH_TRACE in cupti.enabled
        cupti.pending += [work(Kind.GRAPH_TRACE, 1010, 1090, 4, graph_id=3)]
    assert recording.db.execute(
        "SELECT start, end, correlationId, graphId FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
    ).fetchall() == [(10, 90, 4, 3)]
    assert not cupti.enabled


def test_memory_kinds_are_numbered_as_nsys_does(cupti):
    copy = {"bytes": 64, "copy_kind": 1, "src_kind": 1, "dst_kind": 3}
    with tracing.record() as recording:
        cupti.pending += [work(Kind.MEMCPY, 1010, 1020, 1, **copy)]
    assert recording.db.execute("SELECT bytes, copyKind, srcKind, dstKind FROM CUPTI_ACTIVITY_KIND_MEMCPY").fetchall() == [
        (64, 1, 0, 2)
    ]


def test_a_driver_call_within_a_runtime_call_is_left_out_and_its_work_goes_to_the_outer_call(cupti):
    inner = {"kind": Kind.DRIVER, "cbid": 307}
    with tracing.record() as recording:
        cupti.pending += [call(1010, 1050, 1), call(1020, 1040, 2, **inner), kernel(1060, 1070, 2)]
        cupti.pending += [call(1060, 1080, 3, **inner), call(1022, 1030, 4, **inner, thread=8)]
        cupti.time = 1400
    calls = recording.db.execute("SELECT correlationId, eventClass FROM CUPTI_ACTIVITY_KIND_RUNTIME ORDER BY start").fetchall()
    assert calls == [(1, 0), (4, 1), (3, 1)]
    assert recording.db.execute("SELECT correlationId FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchall() == [(1,)]


def test_what_came_before_or_after_the_recording_is_not_in_it(cupti):
    cupti.pending += [kernel(100, 200, 1)]
    with tracing.record() as recording:
        cupti.pending += [kernel(900, 1010, 1), kernel(1020, 1030, 2), call(1500, 1600, 3), kernel(1500, 1600, 2)]
        cupti.time = 1400
    assert recording.db.execute(COUNT + "CUPTI_ACTIVITY_KIND_KERNEL").fetchone() == (2,)  # work that ends late belongs to it
    assert recording.db.execute(COUNT + "CUPTI_ACTIVITY_KIND_RUNTIME").fetchone() == (0,)
    with tracing.record() as second:
        pass
    assert second.db.execute(COUNT + "CUPTI_ACTIVITY_KIND_KERNEL").fetchone() == (0,)


def test_a_range_outside_of_a_recording_does_nothing(cupti):
    with tracing.range("alone"):
        pass
    with tracing.record() as recording:
        pass
    assert recording.db.execute(COUNT + "NVTX_EVENTS").fetchone() == (0,)


def test_an_error_in_the_block_ends_the_recording(cupti):
    with pytest.raises(ZeroDivisionError), tracing.record() as recording, tracing.range("broken"):
        raise ZeroDivisionError
    assert recording.db.execute("SELECT text FROM NVTX_EVENTS").fetchall() == [("broken",)]
    with tracing.record():
        pass


def test_two_recordings_at_once_are_refused(cupti):
    with tracing.record(), pytest.raises(RuntimeError, match="已经有一份录制"), tracing.record():
        pass


def test_a_refusal_of_cupti_says_what_may_be_wrong(cupti):
    cupti.refuse = True
    with pytest.raises(RuntimeError, match=r"MULTIPLE_SUBSCRIBERS.*剖析工具"), tracing.record():
        pass


def test_another_granularity_is_refused(cupti):
    with pytest.raises(ValueError, match="kernel"), tracing.record("kernel"):
        pass
