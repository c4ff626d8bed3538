"""The exam's own parts: from samples to verdicts, the wire, comparisons, and what is measured of whom."""

import ast
import json
import math
import types
from collections import Counter, OrderedDict, defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from launchlab.exam import judge, planted, timing, wire
from launchlab.exam.check import CannotTell, Check, CheckFailed
from launchlab.exam.compare import difference
from launchlab.exam.memory import Buffer
from launchlab.exam.party import OpenParty, Party
from launchlab.exam.remote import Handle, Namespace

QUICK = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


# --- order statistics ------------------------------------------------------------------------------


def test_the_rank_is_what_the_text_claims():
    """By the binomial itself: fewer than RANK of PAIRS below the median, with 99.6 % either side."""
    tail = sum(math.comb(judge.PAIRS, k) for k in range(judge.RANK)) / 2**judge.PAIRS
    assert round(1 - tail, 3) == 0.996
    assert 1 - sum(math.comb(judge.PAIRS, k) for k in range(judge.RANK + 2)) / 2**judge.PAIRS < 0.97  # control: two ranks more


@QUICK
@given(st.permutations(range(judge.PAIRS)))
def test_bounds_are_the_fifth_from_either_end(order):
    values = [float(v) for v in order]
    assert judge.bounds(values) == (judge.RANK - 1, judge.PAIRS - judge.RANK)
    assert judge.bounds([v if v >= judge.RANK - 1 else math.nan for v in values])[0] == judge.RANK - 1
    # NaN counts for the worst on either side.
    assert judge.bounds([v if v >= judge.RANK else math.nan for v in values]) == (0.0, math.inf)


def test_bounds_hold_in_practice():
    rng = np.random.default_rng(1)
    inside = [low <= 1.0 <= high for low, high in (judge.bounds(list(rng.lognormal(0, 0.7, judge.PAIRS))) for _ in range(2000))]
    assert 0.985 < np.mean(inside) < 1.0


# --- pass and fail rates on made-up samples ----------------------------------------------------------


def rounds(rng, candidate: float, best: float = 5.3, noise: float = 0.05, spikes: float = 0.0, asking: float = 0.004) -> list[dict]:
    """21 rounds of a candidate and a reference that are ``candidate`` and ``best`` times as fast as a baseline of 1.3 ms."""

    def seconds(runs: int, per_run: float) -> float:
        value = (asking + runs * per_run) * rng.lognormal(0, noise)
        return value * rng.uniform(1.5, 4) if rng.random() < spikes else value

    made = []
    for _ in range(judge.PAIRS):
        few, own, common = int(rng.integers(1, 4)), 10, int(rng.integers(48, 60))
        made.append({
            "baseline": [[few, seconds(few, 1.3e-3)], [few + own, seconds(few + own, 1.3e-3)]],
            "candidate": [few + common, seconds(few + common, 1.3e-3 / candidate)],
            "best": [[few, seconds(few, 1.3e-3 / best)], [few + common, seconds(few + common, 1.3e-3 / best)]],
        })  # fmt: skip
    return made


def verdicts(candidate: float, times: int = 200, seed: int = 3, at_least: float = 2.0, **more) -> dict[tuple, float]:
    """Shares of (verdict, credit) over many exams."""
    rng, found = np.random.default_rng(seed), {}
    for _ in range(times):
        result = judge.speedup(rounds(rng, candidate, **more), at_least)
        found[result["verdict"], result["credit"]] = found.get((result["verdict"], result["credit"]), 0) + 1 / times
    return found


@pytest.mark.parametrize("more", [{}, {"noise": 0.15}, {"spikes": 0.15}, {"noise": 0.1, "spikes": 0.1}], ids=str)
def test_far_from_the_bar_no_noise_matters(more):
    """The reference's own speed never fails, and one launch after the other never passes."""
    assert {verdict for verdict, _ in verdicts(5.3, **more)} <= {"passed", "inconclusive"}
    assert {verdict for verdict, _ in verdicts(1.0, **more)} <= {"failed", "inconclusive"}


def test_a_quiet_machine_decides():
    assert verdicts(5.3, noise=0.03) == {("passed", 1.0): pytest.approx(1)}
    assert verdicts(1.0, noise=0.03) == {("failed", 0.0): pytest.approx(1)}
    assert verdicts(1.75, noise=0.02).get(("passed", 0.5), 0) > 0.9


def test_near_misses_are_rarely_taken_for_hits():
    below, above = verdicts(1.9, times=400), verdicts(2.15, times=400)
    assert below.get(("passed", 1.0), 0) < 0.02 and below.get(("failed", 0.0), 0) < 0.02
    assert above.get(("failed", 0.0), 0) == 0
    assert verdicts(1.4, times=400).get(("passed", 0.5), 0) < 0.02


def test_too_fast_is_refused():
    assert verdicts(5.3 * 3, noise=0.03) == {("failed", 0.0): pytest.approx(1)}
    assert verdicts(5.3 * 1.4, noise=0.03) == {("passed", 1.0): pytest.approx(1)}


def test_a_reference_that_is_not_faster_judges_nobody():
    assert {verdict for verdict, _ in verdicts(5.0, best=1.1, noise=0.02)} == {"inconclusive"}


@QUICK
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 4), st.integers(5, 500), st.floats(1e-5, 2), st.integers(1, 600))
def test_cost_never_flatters_by_more_than_asking(short, more, few, many, seconds, runs):
    """What an untrusted party is charged lies between its whole time and that less a trusted short sample."""
    trusted = [[few, short], [few + many, short + more]]
    charged = judge.cost([runs, seconds], trusted)
    assert (seconds - short) / runs - 1e-12 <= charged <= seconds / runs + 1e-12 and charged > 0


@pytest.mark.parametrize(("found", "wanted", "passes"), [
    (64, 64, True), (63, 64, False), (9, [1, None], True), (0, [1, None], False), (3, [2, 5], True), (6, [2, 5], False), (1, [2, 5], False),
])
def test_numbers_of_nodes_may_be_ranges(found, wanted, passes):
    record = {"check": "nodes", "wanted": {"kernels": wanted}, "found": {"kernels": found, "total": found, "edges": 0}}
    assert judge.recompute([record], 1.0) == (("passed", 1.0) if passes else ("failed", 0.0))


def test_verdicts_are_recomputed_from_records():
    good, bad = {"check": "that", "holds": True}, {"check": "equal", "mismatch": None, "differing": 1}
    assert judge.recompute([good, good], 3) == ("passed", 3)
    assert judge.recompute([good, bad], 3) == ("failed", 0.0)
    assert judge.recompute([], 3) == ("failed", 0.0)
    assert judge.recompute([{"check": "that", "holds": 1}], 3)[0] == "failed"
    assert judge.recompute([good, {"check": "stopped", "verdict": "timed out"}], 3) == ("timed out", 0.0)
    assert judge.recompute([{"check": "stopped", "verdict": "inconclusive"}], 3) == ("inconclusive", None)
    for record in ({"check": "stopped", "verdict": "passed"}, {"check": "unheard of"}, {}):
        with pytest.raises(ValueError):
            judge.recompute([record], 3)


# --- measuring, with a clock of our own ---------------------------------------------------------------


class World:
    """A clock, and what burdens the machine."""

    def __init__(self, monkeypatch):
        self.now, self.rng, self.burden, self.asking = 0.0, np.random.default_rng(5), 1.0, 0.004
        clock = types.SimpleNamespace(perf_counter=lambda: self.now, monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(timing, "time", clock)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Side(Party):
    """A party whose work takes made-up time and advances a made-up state."""

    def __init__(self, world: World, per_run: float):
        super().__init__()
        self.world, self.per_run, self.state, self.paused = world, per_run, None, False

    def lend(self, buffer: Buffer) -> int:
        return 1

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def ask(self, op, *, seconds=0.0, **fields):
        assert not self.paused
        if op == "write":
            self.state = fields["data"].copy()
        elif op == "repeat":
            if fields["start"] is not None:
                self.state = fields["start"].copy()
            self.world.sleep(self.world.asking * self.world.rng.lognormal(0, 0.1))
            self.world.sleep(self.seconds(fields["times"]) * self.world.rng.lognormal(0, 0.03))
            self.advance(fields["times"])
            return self.state.copy() if fields["state"] is not None else None
        return None

    def seconds(self, times: int) -> float:
        return times * self.per_run * self.world.burden

    def advance(self, times: int) -> None:
        if self.state is not None:
            for _ in range(times):
                self.state = self.state * np.uint32(0x2C1B3C6D) + np.uint32(1)


class Student(Side):
    """The learner's side burdens nobody else's time, and is itself not slowed by what it does to others."""

    def seconds(self, times: int) -> float:
        return times * self.per_run


class Skips(Student):
    def advance(self, times):
        super().advance(times - 1 if times > 1 else times)


class FewRuns(Student):
    def advance(self, times):
        super().advance(min(times, 30))

    def seconds(self, times):
        return super().seconds(min(times, 30))


class Idempotent(Student):
    """Brings the right state of the first sample of a kind again and again."""

    def ask(self, op, **fields):
        value = super().ask(op, **fields)
        if op == "repeat" and fields["state"] is not None and fields["times"]:
            self.first = getattr(self, "first", value)
            return self.first
        return value


class StretchesShortSamples(Student):
    """Slow where few runs are asked, in the hope of a small slope."""

    def seconds(self, times):
        return super().seconds(times) + (0.05 if times < 8 else 0.0)


class BurdensOthers(Student):
    """Leaves something behind that slows everyone else down."""

    def ask(self, op, **fields):
        self.world.burden = 1.0
        value = super().ask(op, **fields)
        if op == "repeat":
            self.world.burden = 3.0
        return value


class Lent:
    """Memory that the examiner reaches whatever the party does: ``bytes``, and what the party still has to put into them."""

    def __init__(self):
        self.bytes, self.coming = b"", []

    def write(self, data):
        self.bytes = data.tobytes()

    def read(self, out):
        out[...] = np.frombuffer(self.bytes, out.dtype).reshape(out.shape)
        return out


class Enqueues(Party):
    """Its GPU is busy: what it was asked for is done when somebody waits for it, and not before."""

    def __init__(self):
        super().__init__()
        self.lent = Lent()

    def lend(self, buffer):
        buffer.block = self.lent
        return 1

    def exchange(self, request, blobs, seconds):
        if request["op"] == "probe":
            for value in self.lent.coming:
                self.lent.write(value)
            self.lent.coming.clear()
        return wire.encode(None, [], None), []


def test_lent_memory_is_read_and_written_once_the_partys_work_is_done():
    """A right answer comes back before its work is done; on a GPU that others use the examiner's copy would overtake it."""
    party, buffer = Enqueues(), Buffer(np.zeros(4, np.uint32))
    buffer.bind(party)
    party.lent.coming.append(np.full(4, 7, np.uint32))
    assert buffer.read(at_rest=True).tolist() == [0] * 4  # control: it is not done by itself
    assert buffer.read().tolist() == [7] * 4
    party.lent.coming.append(np.full(4, 8, np.uint32))
    buffer.poison()
    assert buffer.read().view(np.uint8).tolist() == [0xA5] * 16, "what was enqueued before wrote over what the examiner wrote after"


def test_every_instrument_defines_what_it_is_called_by():
    """Each is sent to another process as source, and has to stand there alone."""
    files = {path.stem for path in Path(planted.__file__).parent.glob("*.py")}
    assert {*planted.FILES.values(), "__init__"} == files
    for name in planted.FILES:
        tree = ast.parse(planted.source(name))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not [each for each in imported if each.split(".")[0] == "launchlab"], "the sandbox shows little of the package"


@pytest.mark.parametrize("name", ["nothing", "../memory", "__init__"])
def test_an_instrument_that_is_not_there_is_named(name):
    with pytest.raises(ValueError, match="no instrument"):
        Namespace(OpenParty()).plant(name)


def exam(monkeypatch, student_type: type, per_run: float, best: float = 2.5e-4, baseline: float = 1.3e-3) -> tuple[Check, str]:
    """Run ``check.speedup`` on such parties; the check, and its verdict."""
    world = World(monkeypatch)
    student, reference, base = student_type(world, per_run), Side(world, best), Side(world, baseline)
    check = Check(np.random.default_rng(7))
    state = Buffer(np.zeros(16, np.uint32)), Buffer(np.zeros(16, np.uint32))
    work = [Handle(party, 1, "x") for party in (student, base, reference)]
    try:
        check.speedup(work[0], over=work[1], best=work[2], state=state, at_least=2.0)
        world.burden = 1.0  # the learner's process has ended, and with it all that it left behind
        check.settle()
        verdict = "passed"
    except CannotTell:
        verdict = "inconclusive"
    except CheckFailed:
        verdict = "failed"
    assert judge.recompute(check.records, 2.0)[0] == verdict
    return check, verdict


@pytest.mark.parametrize(
    ("student_type", "per_run", "verdict"),
    [
        (Student, 2.5e-4, "passed"),  # as good as the reference
        (Student, 5.0e-4, "passed"),
        (Student, 1.3e-3, "failed"),  # one launch after the other
        (Student, 2.0e-3, "failed"),
        (Student, 0.5e-4, "failed"),  # too fast to be true
        (Skips, 2.5e-4, "failed"),
        (FewRuns, 2.5e-4, "failed"),
        (Idempotent, 2.5e-4, "failed"),
        (StretchesShortSamples, 1.3e-3, "failed"),
        (BurdensOthers, 2.5e-4, "failed"),  # three times as fast as a reference that it slowed down itself
        (BurdensOthers, 1.3e-3, "inconclusive"),  # seems fast enough, but the baseline at rest tells
    ],
)
def test_who_passes_a_speedup(monkeypatch, student_type, per_run, verdict):
    _, found = exam(monkeypatch, student_type, per_run)
    assert found == verdict


@pytest.mark.parametrize("asking", [0.0003, 0.004, 0.02])
@pytest.mark.parametrize("per_run", [5e-6, 2.5e-4, 5e-3])
def test_what_is_timed_is_the_work_however_long_asking_takes(monkeypatch, asking, per_run):
    world = World(monkeypatch)
    world.asking = asking
    runs = timing.Lane(Handle(Side(world, per_run), 1, "x"), None).calibrate()
    wanted = max(timing.LEAST_RUNS, min(timing.MOST_RUNS, timing.SEGMENT_SECONDS / per_run))
    assert 0.5 * wanted <= runs <= 2 * wanted


@pytest.mark.parametrize(("candidate", "slowed", "best_slowed", "due"), [
    (0.20, 1.0, 1.0, False),  # a graph, on a quiet machine
    (0.20, 2.0, 1.0, False),  # a graph; the baseline ran at half its speed, and it is fast enough all the same
    (1.00, 2.5, 1.0, True),  # as slow as the baseline, which was slowed down
    (0.80, 1.5, 3.0, True),  # the bar fell with a reference that was slowed down
])
def test_a_pass_owed_to_a_slow_neighbour_is_left_open(candidate, slowed, best_slowed, due):
    def pair(per_run):
        return [[2, 0.002 + 2 * per_run], [22, 0.002 + 22 * per_run]]

    best = 2e-4 * best_slowed
    rounds = [{"baseline": pair(1e-3 * slowed), "best": pair(best), "candidate": [22, 0.002 + 22e-3 * candidate]} for _ in range(judge.PAIRS)]
    quiet = [{"baseline": pair(1e-3), "best": pair(2e-4)}] * 7
    record = {"check": "speedup", "at_least": 2.0, "ceiling": 2.0, "states_differ": 0, "attempts": [rounds], "quiet": quiet}
    assert judge.speedup(rounds, 2.0)["verdict"] == "passed"
    assert judge.disturbed(record) is due
    assert judge.recompute([record], 2.0) == (("inconclusive", None) if due else ("passed", 2.0))
    assert judge.recompute([record | {"quiet": []}], 2.0)[0] == "inconclusive"


class Adds(Side):
    """Adds 1 in each run."""

    def advance(self, times):
        if self.state is not None:
            self.state = self.state + np.float32(times)


class Drifts(Adds, Student):
    """Does all of the work, and rounds otherwise than the reference."""

    def advance(self, times):
        super().advance(times * (1 + 1e-6))


class DriftsFar(Adds, Student):
    def advance(self, times):
        super().advance(times - 1)


@pytest.mark.parametrize(("student_type", "tolerance", "verdict"), [(Drifts, 1e-3, "passed"), (Drifts, 0.0, "failed"), (DriftsFar, 1e-3, "failed")])
def test_states_of_floats_may_differ_by_a_tolerance(monkeypatch, student_type, tolerance, verdict):
    world = World(monkeypatch)
    parties = student_type(world, 2.5e-4), Adds(world, 1.3e-3), Adds(world, 2.5e-4)
    check = Check(np.random.default_rng(7))
    state = Buffer(np.zeros((4, 4), np.float32)), Buffer(np.zeros((4, 4), np.float32))
    work = [Handle(party, 1, "x") for party in parties]
    drawn = []

    def draw():
        drawn.append(np.random.default_rng(len(drawn)).normal(0, 100, (4, 4)))
        return drawn[-1]

    try:
        check.speedup(work[0], over=work[1], best=work[2], state=state, at_least=2.0, draw=draw, abs=tolerance)
        check.settle()
        found = "passed"
    except CheckFailed:
        found = "failed"
    assert found == verdict == judge.recompute(check.records, 2.0)[0]
    assert len(drawn) == (judge.PAIRS if verdict == "passed" else 1)


def test_a_speedup_leaves_its_samples(monkeypatch):
    check, _ = exam(monkeypatch, Student, 2.5e-4)
    (record,) = json.loads(json.dumps(check.records))
    assert len(record["attempts"][-1]) == judge.PAIRS and record["quiet"]
    assert len({many[0] for many in (r["candidate"] for r in record["attempts"][-1])}) > 3  # secret numbers of runs


# --- the wire ------------------------------------------------------------------------------------------

NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20) | st.binary(max_size=20), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12
)
ARRAYS = arrays.arrays(
    st.sampled_from(["|b1", "|i1", "<u4", ">i8", "<f2", "<f4", "<f8", "<c16"]), arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
)


@QUICK
@given(PLAIN)
def test_plain_data_comes_back_as_it_went(value):
    blobs: list[bytes] = []
    assert wire.decode(json.loads(json.dumps(wire.encode(value, blobs))), blobs) == value


@pytest.mark.parametrize("kind", [Counter, OrderedDict, partial(defaultdict, int)], ids=["Counter", "OrderedDict", "defaultdict"])
def test_dictionaries_of_collections_are_plain_data_too(kind):
    got = wire.decode(json.loads(json.dumps(wire.encode({"types": kind({"FP16": 2})}, []))), [])
    assert got == {"types": {"FP16": 2}} and type(got["types"]) is dict


@QUICK
@given(ARRAYS)
def test_arrays_come_back_as_they_went(array):
    blobs: list[bytes] = []
    back = wire.decode(json.loads(json.dumps(wire.encode(array, blobs))), blobs)
    assert back.dtype == array.dtype and back.shape == array.shape and back.tobytes() == array.tobytes()
    assert back.flags["W"]


def test_scalars_lists_and_references():
    blobs: list[bytes] = []
    kept: list = []

    def keep(value):
        kept.append(value)
        return wire.Ref(7, "Thing")

    class Liar(float):
        __eq__ = __lt__ = lambda self, other: True
        __hash__ = float.__hash__

    thing, liar = object(), Liar(1)
    back = wire.decode(json.loads(json.dumps(wire.encode((np.int64(3), np.float32(0.5), np.bool_(True), (1, 2), thing, liar), blobs, keep))), blobs)
    assert back == [3, 0.5, True, [1, 2], wire.Ref(7, "Thing"), wire.Ref(7, "Thing")] and kept == [thing, liar]
    assert [type(item) for item in back[:3]] == [int, float, bool]
    with pytest.raises(wire.WireError):
        wire.encode({"a": thing}, blobs)
    loop: list = []
    loop.append(loop)
    with pytest.raises(wire.WireError):
        wire.encode(loop, blobs)


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([2**31, 2**63, 2**64, -1, 10**30]) | st.floats() | st.text(max_size=6)
    | st.sampled_from(["array", "list", "dict", "ref", "buffer", "bytes", "<f8", "|O8", "<u4", "<M8", "O", "c3", "b8", "<f16", "|V8"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["t", "v", "id", "kind", "dtype", "shape", "blob", "x"]), inner, max_size=5)
    | st.fixed_dictionaries({"t": st.sampled_from(["array"]), "dtype": st.sampled_from(["<f8", "<u4", "|b1", "<i3", "<c16", "|S4", "<f0", "b99"]), "shape": st.lists(st.integers(-1, 5) | st.sampled_from([0, 2**31, 2**62, 2**64]), max_size=70), "blob": st.integers(-2, 3)})
    | st.fixed_dictionaries({"t": st.sampled_from(["list", "dict"]), "v": inner}),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(HOSTILE, st.lists(st.binary(max_size=40), max_size=3))
def test_whatever_comes_becomes_plain_data_or_is_refused(message, blobs):
    try:
        value = wire.decode(message, blobs)
    except wire.WireError:
        return

    def plain(item):
        if isinstance(item, list):
            return all(map(plain, item))
        if isinstance(item, dict):
            return all(type(key) is str and plain(value) for key, value in item.items())
        if isinstance(item, np.ndarray):
            return type(item) is np.ndarray and item.dtype.kind in "biufc" and item.dtype.itemsize > 0
        return item is None or type(item) in (bool, int, float, str, bytes, wire.Ref, wire.BufferRef)

    assert plain(value)


def test_only_numbers_make_arrays():
    def array(dtype):
        return wire.decode({"t": "array", "dtype": dtype, "shape": [2], "blob": 0}, [b"\0" * 2 * np.dtype(dtype).itemsize])

    assert array("<u4").tolist() == [0, 0]  # control
    for dtype in ("|S4", "<U2", "<M8[s]", "<m8[s]", "|V8", "|O8", "O", "<u4,<u4"):
        with pytest.raises(wire.WireError):
            assert array(dtype) is None


def test_depth_and_length_are_limited():
    deep: object = 1
    for _ in range(1000):
        deep = {"t": "list", "v": [deep]}
    for message in (deep, {"t": "list", "v": [0] * (wire.MAX_ITEMS + 1)}):
        with pytest.raises(wire.WireError):
            wire.decode(message, [])


# --- comparing -----------------------------------------------------------------------------------------


def same(got, want, rel=0.0, abs=0.0) -> bool:
    mismatch, differing, _ = difference(got, want, rel, abs)
    return mismatch is None and differing == 0


@pytest.mark.parametrize(
    ("got", "want", "equal"),
    [
        (3, 3, True), (3.0, 3, False), (3, 3.0, True), (True, 1, False), (1, True, False), (None, None, True), (0, None, False), ("a", "a", True),
        (float("nan"), float("nan"), False), (float("nan"), 1.0, False), (float("inf"), float("inf"), True),
        ([1, 2], [1, 2], True), ([1, 2], (1, 2), True), ([1], [1, 2], False), ([True], [1], False), ([], [], True), ([None], [], False),
        (2**53 + 1, 2**53, False), (2**64 - 1, 2**64 - 2, False), (10**400, 10**400, True), (10**400, 3, False),
        (np.uint32([1, 2]), np.uint32([1, 2]), True), (np.int64([1, 2]), np.uint32([1, 2]), False), (np.uint32([1]), np.uint32([[1]]), False),
        (np.uint64([2**63 + 1]), np.uint64([2**63]), False), (np.float32([1]), np.float64([1]), True), (np.float64([np.nan]), np.float64([np.nan]), False),
        (np.zeros((0, 3)), np.zeros((0, 3)), True), (np.zeros((0, 3)), np.zeros((3, 0)), False), ([1, 2], np.array([1, 2]), False), (np.array(1), 1, False),
        (10**400, 3.5, False), ({"a": 1}, 1, False), ({"a": 1}, None, False), ("1", 1, False), (1 + 0j, 1.0, False),
    ],
)  # fmt: skip
def test_difference(got, want, equal):
    assert same(got, want) is equal


@pytest.mark.parametrize(("got", "want", "differing", "size"), [
    ([1, 2, 3], [1, 2, 4], 1, 3), ([[1, 2], [3, 4]], [[1, 0], [0, 0]], 3, 4), ([], [], 0, 1), ([np.zeros(5), 1], [np.ones(5), 1], 5, 6),
])
def test_values_of_nested_lists_are_counted_one_by_one(got, want, differing, size):
    assert difference(got, want, 0, 0) == (None, differing, size)


def test_difference_with_tolerance_of_a_number_too_large():
    assert not same(10**400, 3, abs=1)


@QUICK
@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(0, 0.5), st.floats(0, 10))
def test_tolerance_is_what_it_says(got, want, rel, abs_):
    close = abs(got - want) <= abs_ + rel * abs(want)
    assert same(got, want, rel, abs_) is bool(close or got == want)
    assert same(np.array([got]), np.array([want]), rel, abs_) is bool(close or got == want)


def test_only_true_is_true():
    check = Check(np.random.default_rng())
    check.that(True, why="…")
    check.that(np.bool_(True), why="…")
    for value in (1, "True", [True], np.array([True]), object(), 2.5, Handle(Party(), 1, "bool")):
        with pytest.raises(CheckFailed):
            check.that(value, why="…")
    with pytest.raises(CheckFailed):
        check.equal(1, 2, why="…")
    assert [judge.recompute([record], 1)[0] for record in check.records] == ["passed"] * 2 + ["failed"] * 8


def test_one_timed_exam_at_a_time_on_a_gpu_but_equal_gpus_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(timing.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(timing, "LOCK_SECONDS", 0.2)
    first, twin = "a" * 32, "b" * 32  # UUIDs of two GPUs of one name
    with timing.exclusive(first):
        with timing.exclusive(twin):
            pass
        with pytest.raises(timing.GpuBusy), timing.exclusive(first):
            pass
    with timing.exclusive(first):  # free again
        pass


@pytest.mark.parametrize(("candidate", "best", "verdict"), [
    (0.010, 0.010, "passed"),
    (0.040, 0.010, "passed"),
    (0.120, 0.010, "failed"),
    (0.070, 0.040, "passed"),  # the bar falls with the reference: 0.100 / 0.040 / 2
    (0.010, 0.090, "inconclusive"),  # nothing to be gained on this machine
])
def test_who_passes_by_the_examiners_own_seconds(candidate, best, verdict):
    check = Check(np.random.default_rng(7))
    wobble = np.linspace(0.95, 1.05, 7)
    seconds = {"baseline": 0.1 * wobble, "candidate": candidate * wobble[::-1], "best": best * np.ones(7)}
    try:
        check.faster(seconds, at_least=2.0)
        assert check.ratio > 1.2
        found = "passed"
    except CannotTell:
        found = "inconclusive"
    except CheckFailed as error:
        found = "failed"
        assert "实测" in str(error)
    assert found == verdict
    assert judge.recompute(json.loads(json.dumps(check.records)), 2.0)[0] == verdict


def test_seconds_that_differ_too_much_are_left_open_and_the_wrong_ones_refused():
    check = Check(np.random.default_rng(7))
    with pytest.raises(CannotTell, match="差得太多"):
        check.faster({"baseline": [0.1] * 5, "candidate": [0.01, 0.09, 0.09, 0.01, 0.09], "best": [0.01] * 5}, at_least=2.0)
    for wrong in ({"baseline": [1, 1, 1], "candidate": [1, 1, 1]}, {name: [1, 1] for name in ("baseline", "candidate", "best")},
                  {"baseline": [1, 1, 1], "candidate": [1, 1, 1], "best": [1, 1]}):
        with pytest.raises(ValueError):
            check.faster(wrong, at_least=2.0)
