"""What README.md says of the committed report, in Markdown."""

from __future__ import annotations

from typing import Any

from launchlab.bench import figures, report

BEGIN, END = "<!-- bench: begin (made by `launchlab bench`) -->", "<!-- bench: end -->"
NOT_YET = "\n*Not measured yet: `launchlab bench`, on a machine with a GPU and TensorRT, fills this in.*\n\n"
BLOG = (
    "https://developer.nvidia.com/blog/constant-time-launch-for-straight-line-cuda-graphs-and-other-performance-enhancements/"
)


def block() -> str:
    """All that stands between the markers. Raises what `report.load` does, but a missing report is told in words."""
    if not report.PATH.exists():
        return NOT_YET
    made = report.load(report.PATH)
    found = made["figures"]
    lines = ["", _machine(made), "", *_headline(made, found["cases"]), ""]
    if found["launch_cost"]:
        lines += [*_launch(found["launch_cost"]), ""]
    lines += [f"Missing from this run: {'; '.join(made['problems'])}", ""] if made["problems"] else []
    return "\n".join(lines) + "\n"


def _machine(made: dict[str, Any]) -> str:
    versions = made["versions"]
    names = {"TensorRT": "tensorrt", "CuPy": "cupy", "Python": "python"}
    told = [
        f"{name} {next(version for package, version in versions.items() if package.startswith(start))}"
        for name, start in names.items()
        if any(package.startswith(start) for package in versions)
    ]
    return (
        f"Measured on {made['measured_at'][:10]} with `{made['command']}`: {made['gpu']}, driver {made['driver']}, "
        f"{made['cpu']}, {', '.join(told)}. Medians in µs, quartiles in brackets; raw samples in "
        "[grader/reports/bench.json](grader/reports/bench.json)."
    )


def _headline(made: dict[str, Any], cases: dict[str, Any]) -> list[str]:
    lines = [
        "| case | kernels | CPU submit, eager → graph | latency, eager → graph | kernel time | the founding text |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    titles = {case["id"]: case["title"] for case in made["cases"]}
    for id, (kernels, eager, graph) in figures.FOUNDING.items():
        text = f"~{kernels} kernels, ~{eager} → ~{graph}"
        if id not in cases:
            lines.append(f"| {id} | — | — | — | — | {text} |")
            continue
        case = cases[id]
        floor = _quartiles(case["gpu"]["eager"]["sum"]) if case["gpu"] else "—"
        lines.append(
            f"| {titles[id]} | {case['kernels']}{_seen(case)} | {_change(case['submit'])} | {_change(case['latency'])} | {floor} | {text} |"
        )
    return [
        *lines,
        "",
        "*CPU submit*: the enqueue calls alone, on an idle GPU with an empty queue. *Latency*: the same, and the wait until all is "
        "done. *Kernel time*: the sum of the kernels' own times by CUPTI, eager, and thus the floor for whatever runs its kernels "
        f"one after the other; kernels of many streams overlap, and their latency may be shorter{_busy(cases)}. *The founding text*: the launch "
        "overhead that the course's founding text gives, without naming machine or clock.",
        "",
        "![CPU submit time and latency, eager and graph](grader/reports/bench_headline.svg)",
    ]


def _seen(case: dict[str, Any]) -> str:
    """How many kernels CUPTI saw in an eager run, where that is not what the graph has."""
    seen = sorted({*case["gpu"]["eager"]["kernels"]} if case["gpu"] else {case["kernels"]})
    return "" if seen == [case["kernels"]] else f" (eager, by CUPTI: {'–'.join(map(str, seen))})"


def _busy(cases: dict[str, Any]) -> str:
    if "streams" not in cases or not cases["streams"]["gpu"]:
        return ""
    return f": in a run of their graph, some kernel is running for {_quartiles(cases['streams']['gpu']['graph']['busy'])} µs"


def _launch(cost: dict[str, Any]) -> list[str]:
    eager, graph, nodes = cost["eager"], cost["graph"], cost["nodes"]
    return [
        f"Submitting N tiny kernels, N = {nodes[0]} … {nodes[-1]:,}, costs the CPU {eager['const_us']:.1f} µs + "
        f"{eager['per_node_ns'] / 1000:.2f} µs a kernel one by one, and {graph['const_us']:.1f} µs + {graph['per_node_ns']:.1f} ns a "
        f"node as one launch of a graph (lines fitted to the medians, calls made from Python through CuPy). NVIDIA's own figure "
        f"is {figures.PUBLISHED_CONST_US:g} µs + about {figures.PUBLISHED_PER_NODE_NS:g} ns a node, for a repeated launch of a "
        f"graph that is a straight line, with CUDA 12.6 ([Hoffman and Oh, 2024]({BLOG})); the graphs here are straight lines too.",
        "",
        "![CPU time to submit N kernels, one by one and as a graph](grader/reports/bench_launch.svg)",
    ]


def _change(clock: dict[str, Any]) -> str:
    return f"{_quartiles(clock['eager'])} → {_quartiles(clock['graph'])}"


def _quartiles(values: list[float]) -> str:
    low, middle, high = (f"{value:.1f}" if values[1] < 100 else f"{value:.0f}" for value in values)
    return f"{middle} ({low}–{high})"
