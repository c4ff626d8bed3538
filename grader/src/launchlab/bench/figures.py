"""The figures of a report, from its raw samples alone. All times are in µs unless a name says otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np

FOUNDING = {"resnet50": (100, 80, 15), "bert": (200, 150, 30), "streams": (500, 400, 80)}  # kernels, eager µs, graph µs
# NVIDIA: H. Hoffman and F. Oh, "Constant Time Launch for Straight-Line CUDA Graphs and Other Performance Enhancements",
# NVIDIA Technical Blog, 11 September 2024. CPU time of a repeated launch with CUDA 12.6, for a graph that is a straight line.
PUBLISHED_CONST_US, PUBLISHED_PER_NODE_NS = 2.5, 1.0


def of(report: dict[str, Any]) -> dict[str, Any]:
    """All figures: ``cases`` by id, in the founding text's order, and ``launch_cost``; None where that was not measured."""
    cost, cases = report["launch_cost"], {case["id"]: case for case in report["cases"]}
    return {"cases": {id: _case(cases[id]) for id in FOUNDING if id in cases}, "launch_cost": cost and _launch_cost(cost)}


def published_us(nodes: int | np.ndarray) -> float | np.ndarray:
    """NVIDIA's published CPU time, µs, of a repeated launch of a straight line of so many nodes."""
    return PUBLISHED_CONST_US + PUBLISHED_PER_NODE_NS / 1000 * nodes


def _case(case: dict[str, Any]) -> dict[str, Any]:
    """Quartiles of each clock and side, the ratios eager / graph, and what CUPTI saw; None for what was not measured."""
    found: dict[str, Any] = {"kernels": case["nodes"].get("Kernel", 0)}
    for clock, sides in case["samples"].items():
        found[clock] = {side: _quartiles(us) for side, us in sides.items()}
        found[clock]["ratio"] = _round(np.median(np.divide(sides["eager"], sides["graph"])))
    for side, runs in case["gpu_runs"].items():
        found.setdefault("gpu", {})[side] = {
            "kernels": [len(run["kernel_ns"]) for run in runs],
            "sum": _quartiles([sum(run["kernel_ns"]) / 1000 for run in runs]),
            "busy": _quartiles([_busy_ns(run["kernel_start_ns"], run["kernel_ns"]) / 1000 for run in runs]),
        }
    found.setdefault("gpu", None)
    return found


def _launch_cost(cost: dict[str, Any]) -> dict[str, Any]:
    """Quartiles over the counts of kernels, and the line const + per_node * N through the medians of each side."""
    counts = [each["nodes"] for each in cost["samples"]]
    found: dict[str, Any] = {"nodes": counts}
    for side in ("eager", "graph"):
        quartiles = [_quartiles(each[side]) for each in cost["samples"]]
        found[side] = {"quartiles": quartiles, **_line(counts, [median for _, median, _ in quartiles])}
    return found


def _line(counts: list[int], medians: list[float]) -> dict[str, float]:
    """The line through (N, µs) that least squares give when each point counts by its relative error."""
    slope, const = np.polyfit(counts, medians, 1, w=1 / np.array(medians))
    return {"const_us": _round(const), "per_node_ns": _round(1000 * slope)}


def _busy_ns(starts: list[int], lengths: list[int]) -> int:
    """How long at least one of the intervals runs."""
    total, until = 0, min(starts, default=0)
    for start, length in sorted(zip(starts, lengths, strict=True)):
        total += max(0, start + length - max(start, until))
        until = max(until, start + length)
    return total


def _quartiles(us: list[float]) -> list[float]:
    """[first quartile, median, third quartile]."""
    return [_round(value) for value in np.percentile(us, (25, 50, 75))]


def _round(value: float) -> float:
    return round(float(value), 3)  # the clock counts ns
