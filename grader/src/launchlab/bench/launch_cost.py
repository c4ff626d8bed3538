"""What the CPU pays to submit N kernels in a row, one by one and as one graph, over N."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from launchlab import lab
from launchlab.bench.case import is_straight
from launchlab.exam.agent import describe_graph

COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
PAIRS = 101
PORTION = 256  # launches that are timed at a stretch: a stream's queue holds about a thousand, and then the CPU waits
SOURCE = """
extern "C" __global__ void step(unsigned int *x) { *x = *x * 1664525u + 1013904223u; }
"""


def measure(left: Callable[[], float]) -> dict[str, Any]:
    """Time both sides for each of COUNTS, in turn, A B B A; µs of CPU time, a sample each.

    left(): seconds that remain; counts that there is no time for are left out. RuntimeError if not every kernel ran, or if a
    graph is no straight line of as many kernels.
    """
    import cupy as cp

    stream = cp.cuda.Stream(non_blocking=True)
    kernel = cp.RawKernel(SOURCE, "step")
    x = cp.zeros(1, cp.uint32)
    cp.cuda.runtime.deviceSynchronize()
    steps, samples = 1, []
    with stream:
        launch = partial(kernel, (1,), (1,), (x,))
        launch()
        stream.synchronize()
        for nodes in COUNTS:
            if left() <= 0:
                break
            stream.begin_capture()
            try:
                _repeat(launch, nodes)
            finally:
                graph = stream.end_capture()
            shape = describe_graph(graph)
            if shape["kinds"] != ["Kernel"] * nodes or not is_straight(shape):
                raise RuntimeError(f"捕获了 {nodes} 次启动，图却不是 {nodes} 个内核连成的一条直线")
            pairs = compare(partial(_portions_us, launch, nodes), partial(_once_us, partial(graph.launch, stream)), PAIRS)
            steps += 2 * nodes * (PAIRS + 1)
            samples.append({"nodes": nodes, "eager": pairs[0], "graph": pairs[1]})
        got = int(x.get()[0])
    if got != _after(steps):
        raise RuntimeError("不是每个内核都运行了：状态和启动的次数不符")
    return {"portion": PORTION, "samples": samples}


def compare(eager_us: Callable[[], float], graph_us: Callable[[], float], pairs: int) -> tuple[list[float], list[float]]:
    """Call two measurements in turn, A B B A, after one of each that does not count. Returns both sides' samples, µs."""
    sides = (eager_us, graph_us)
    samples: tuple[list[float], list[float]] = ([], [])
    for side in sides:
        side()
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            samples[side].append(round(sides[side](), 3))
    return samples


def _portions_us(launch: Callable[[], object], nodes: int) -> float:
    """CPU time of so many launches, in portions that find an empty queue; the waits between them do not count."""
    return sum(_once_us(partial(_repeat, launch, min(PORTION, nodes - done))) for done in range(0, nodes, PORTION))


def _once_us(work: Callable[[], object]) -> float:
    return float(lab.submit_us(work, repeats=1, warmup=0).us[0])


def _repeat(launch: Callable[[], object], times: int) -> None:
    for _ in range(times):
        launch()


def _after(steps: int) -> int:
    """The state of `step` after so many steps from 0."""
    x = 0
    for _ in range(steps):
        x = (x * 1664525 + 1013904223) & 0xFFFFFFFF
    return x
