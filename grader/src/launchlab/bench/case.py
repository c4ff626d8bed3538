"""One row of the headline table: requests that run eagerly or as one graph, and what is measured of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from launchlab import lab
from launchlab.bench import cupti
from launchlab.bench.engine import Built, Seat, must
from launchlab.exam.agent import describe_graph

if TYPE_CHECKING:
    import cupy as cp

PAIRS, WARM_UP = 101, 20
CLOCKS = {"submit": "submit", "latency": "end_to_end"}  # the report's word → that of lab.compare_us
MOST_APART = 0.01  # of the largest value: FP16, and kernels that need not add in the same order


class Case:
    """One inference on each seat, side by side.

    eager(): enqueues them, seat after seat, and returns at once. replay(): launches the graph of the same work.
    kernels: in that graph. built: the engine of all seats.
    """

    def __init__(self, id: str, title: str, built: Built, seats: list[Seat]):
        import cupy as cp

        self.id, self.title, self.built, self._seats = id, title, built, seats
        self.eager: Callable[[], object] = seats[0].enqueue if len(seats) == 1 else self._in_turn
        self._forked = cp.cuda.Event(disable_timing=True)
        self._joined = [cp.cuda.Event(disable_timing=True) for _ in seats[1:]]
        for seat in seats:  # a context's first enqueue prepares what no capture allows
            must(seat.enqueue(), "预热")
        cp.cuda.runtime.deviceSynchronize()
        self._graph = self._capture()
        self._shape = describe_graph(self._graph)
        self.kernels = self._shape["kinds"].count("Kernel")
        self.replay = partial(self._graph.launch, seats[0].stream)

    def measure(self) -> dict[str, Any]:
        """Both sides by both clocks, in turn, A B B A; µs. RuntimeError if the graph's results are not the eager ones."""
        apart = self._apart()
        samples = {}
        for name, clock in CLOCKS.items():
            pair = lab.compare_us(self.eager, self.replay, clock=clock, pairs=PAIRS, warmup=WARM_UP)
            samples[name] = {"eager": _listed(pair.first.us), "graph": _listed(pair.second.us)}
        return {
            "id": self.id,
            "title": self.title,
            "streams": len(self._seats),
            "engine_layers": self.built.engine.num_layers,
            "plan_bytes": self.built.plan_bytes,
            "build_seconds": round(self.built.seconds, 2),
            "nodes": dict(Counter(self._shape["kinds"])),
            "edges": len(self._shape["edges"]),
            "straight": is_straight(self._shape),
            "largest_difference": apart,
            "samples": samples,
            "gpu_runs": {},
        }

    def gpu_runs(self) -> dict[str, Any]:
        """What CUPTI sees the GPU do in a few runs of each side; see `cupti.runs`."""
        return {
            "eager": cupti.runs(lambda: self.eager),
            "graph": cupti.runs(lambda: partial(self._capture().launch, self._seats[0].stream)),
        }

    def _in_turn(self) -> None:
        for seat in self._seats:
            seat.enqueue()

    def _capture(self) -> cp.cuda.Graph:
        """One graph: a branch for each seat, from the first seat's stream and back to it."""
        (origin, *sides), answers = self._seats, []
        origin.stream.begin_capture()
        try:
            self._forked.record(origin.stream)
            for seat in sides:
                seat.stream.wait_event(self._forked)
            answers = [seat.enqueue() for seat in self._seats]
            for seat, done in zip(sides, self._joined, strict=True):
                done.record(seat.stream)
                origin.stream.wait_event(done)
        finally:
            graph = origin.stream.end_capture()
        must(all(answers), "捕获中入队")
        return graph

    def _apart(self) -> float:
        """The largest difference between the results of eager and graph, as a share of the largest result."""
        eager, graph = self._results(self.eager), self._results(self.replay)
        apart = float(np.abs(graph - eager).max() / np.abs(eager).max())
        if not apart <= MOST_APART or np.ptp(eager) == 0:  # not a number is refused, too
            raise RuntimeError(f"图的结果和逐次入队的不一致（最大相差 {apart:.2%}），或者结果全都一样，所以没有计时")
        return round(apart, 6)

    def _results(self, work: Callable[[], object]) -> np.ndarray:
        """All seats' outputs after one run of work(), float64; what was there before is overwritten first."""
        import cupy as cp

        for seat in self._seats:
            seat.output.fill(float("nan"))
        cp.cuda.runtime.deviceSynchronize()
        work()
        cp.cuda.runtime.deviceSynchronize()
        return np.stack([seat.output.get() for seat in self._seats]).astype(np.float64)


def is_straight(graph: dict[str, Any]) -> bool:
    """Whether a graph, as `describe_graph` tells it, is one straight line through all its nodes."""
    tails, heads = Counter(a for a, _ in graph["edges"]), Counter(b for _, b in graph["edges"])
    return len(graph["edges"]) == len(graph["kinds"]) - 1 and max([*tails.values(), *heads.values()], default=1) == 1


def _listed(us: np.ndarray) -> list[float]:
    return [round(float(value), 3) for value in us]
