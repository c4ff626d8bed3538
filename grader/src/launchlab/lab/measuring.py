"""Host-clock measurements, short enough to read before you believe them. All times are in µs (microseconds)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from time import perf_counter_ns

import numpy as np

Work = Callable[[], object]


@dataclass(frozen=True)
class Samples:
    """Times of single calls.

    us: float64, shape (repeats,), µs, in the order in which they were measured.
    """

    us: np.ndarray

    @property
    def median(self) -> float:
        """The middle sample, µs: unlike the mean, one hiccup of the system does not move it."""
        return float(np.median(self.us))

    def percentile(self, q: float) -> float:
        """Return the time, µs, that q per cent of the samples do not exceed."""
        return float(np.percentile(self.us, q))

    def __str__(self) -> str:
        return f"{self.median:.1f} µs（p10 {self.percentile(10):.1f}，p90 {self.percentile(90):.1f}，{len(self.us)} 次）"


@dataclass(frozen=True)
class Comparison:
    """Two pieces of work measured in turn, A B B A.

    ratios: float64, shape (pairs,): first over second within each pair, so slow drifts of the machine cancel.
    """

    first: Samples
    second: Samples
    ratios: np.ndarray

    @property
    def ratio(self) -> float:
        """How many times as long the first takes as the second: the median of the pairs' ratios."""
        return float(np.median(self.ratios))

    @property
    def at_least(self) -> float:
        """A lower bound of the true median ratio (99 %): an order statistic, so no distribution is assumed."""
        return float(np.sort(self.ratios)[_rank_below_median(len(self.ratios))])


def device_sync() -> None:
    """Wait until the current device has finished all its work."""
    from cupy.cuda import runtime

    runtime.deviceSynchronize()


def submit_us(work: Work, *, sync: Work = device_sync, repeats: int = 50, warmup: int = 5) -> Samples:
    """Measure how long the CPU is busy with one call of work(), in µs.

    The clock stops as soon as work() returns, whether or not the GPU has finished. sync() runs between the
    samples, outside the clock, so that every call finds an idle GPU and no full launch queue.
    """
    _warm_up(work, sync, warmup)
    return Samples(np.array([_submit(work, sync) for _ in range(repeats)]))


def end_to_end_us(work: Work, *, sync: Work = device_sync, repeats: int = 50, warmup: int = 5) -> Samples:
    """Measure how long one call of work() takes until sync() says that its results are there, in µs."""
    _warm_up(work, sync, warmup)
    return Samples(np.array([_end_to_end(work, sync) for _ in range(repeats)]))


CLOCKS = {}


def compare_us(
    first: Work,
    second: Work,
    *,
    clock: str = "submit",
    sync: Work = device_sync,
    pairs: int = 21,
    warmup: int = 5,
) -> Comparison:
    """Measure two pieces of work in turn, A B B A, by the clock "submit" or "end_to_end" (see those functions).

    Taking turns matters: clocks, temperature and neighbours change while you measure, and both sides must
    suffer alike. Returns times in µs and the ratio first / second of each pair. Another clock: KeyError.
    """
    measure = CLOCKS[clock]
    _warm_up(first, sync, warmup)
    _warm_up(second, sync, warmup)
    times = np.empty((pairs, 2))
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            times[pair, side] = measure((first, second)[side], sync)
    return Comparison(Samples(times[:, 0]), Samples(times[:, 1]), times[:, 0] / times[:, 1])


def _warm_up(work: Work, sync: Work, times: int) -> None:
    for _ in range(times):
        work()
    sync()


def _submit(work: Work, sync: Work) -> float:
    start = perf_counter_ns()
    work()
    stop = perf_counter_ns()
    sync()
    return (stop - start) / 1000


def _end_to_end(work: Work, sync: Work) -> float:
    start = perf_counter_ns()
    work()
    sync()
    return (perf_counter_ns() - start) / 1000


CLOCKS.update(submit=_submit, end_to_end=_end_to_end)


def _rank_below_median(n: int) -> int:
    """Return the largest index k for which the k-th smallest (from 0) of n exceeds the median in <= 1 % of cases."""
    tail, rank = 0.0, 0
    for k in range(n):
        tail += comb(n, k) / 2**n
        if tail > 0.01:
            break
        rank = k
    return rank
