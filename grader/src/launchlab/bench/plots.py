"""The plots of a report, as SVG files that look the same on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from launchlab.bench import figures
from launchlab.lab.plotting import log_ticks, plot_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EAGER, GRAPH, QUOTED = "C0", "C1", "#666666"
HEADLINE, LAUNCH = "bench_headline.svg", "bench_launch.svg"


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what the report has into the folder; returns the files written. The same report gives the same bytes."""
    import matplotlib
    from matplotlib import pyplot, rc_context

    matplotlib.use("Agg")
    found = figures.of(report)
    written = []
    with rc_context():
        plot_style()
        pyplot.rcParams["svg.hashsalt"] = "launchlab"
        for name, figure in _figures(report, found):
            path = folder / name
            figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
            pyplot.close(figure)
            written.append(path)
    return written


def _figures(report: dict[str, Any], found: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    if found["cases"]:
        yield HEADLINE, _headline(report, found["cases"])
    if found["launch_cost"]:
        yield LAUNCH, _launch(report, found["launch_cost"])


def _headline(report: dict[str, Any], cases: dict[str, Any]) -> Figure:
    """Eager → graph for each case: CPU time to submit, beside the founding text's, and latency, beside the kernels' own time."""
    from matplotlib import pyplot

    figure, (submit, latency) = pyplot.subplots(1, 2, figsize=(10.5, 1.7 + 0.75 * len(cases)), sharey=True)
    for place, (id, case) in enumerate(cases.items()):
        _pair(submit, place, case["submit"], labelled=not place)
        _pair(latency, place, case["latency"])
        _, before, after = figures.FOUNDING[id]
        style = {"color": QUOTED, "linestyle": "none", "markerfacecolor": "none", "markersize": 7}
        submit.plot([before], [place + 0.3], "o", label=None if place else "讲义：逐次", **style)
        submit.plot([after], [place + 0.3], "s", label=None if place else "讲义：图", **style)
        if case["gpu"]:
            style = {"color": QUOTED, "linestyle": "none", "markersize": 15, "markeredgewidth": 2}
            latency.plot(
                [case["gpu"]["eager"]["sum"][1]], [place], "|", label=None if place else "内核时间之和（CUPTI）", **style
            )
    titles = {case["id"]: f"{case['title']}\n{cases[case['id']]['kernels']} 个内核" for case in report["cases"]}
    submit.set_yticks(range(len(cases)), [titles[id] for id in cases])
    submit.set_ylim(len(cases) - 0.4, -0.5)
    for axes, title in ((submit, "CPU 提交"), (latency, "延迟（提交到做完）")):
        axes.set_xscale("log")
        axes.set_xlabel("时间（µs，中位数，对数轴）")
        axes.set_title(title)
        axes.margins(x=0.16)
        log_ticks(axes.xaxis)
    handles = [pair for axes in (submit, latency) for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    figure.legend(*zip(*handles, strict=True), loc="outside lower center", ncols=len(handles))
    figure.suptitle(f"逐次入队 → CUDA 图（{report['gpu']}）", fontsize=12)
    return figure


def _pair(axes: Axes, place: int, clock: dict[str, Any], labelled: bool = False) -> None:
    """An arrow's two ends in one row: the medians of eager and graph, each with its value."""
    (_, eager, _), (_, graph, _) = clock["eager"], clock["graph"]
    axes.plot([eager, graph], [place, place], "-", marker="", color="#bbbbbb", zorder=1)
    for value, colour, marker, label in ((eager, EAGER, "o", "逐次入队"), (graph, GRAPH, "s", "图")):
        axes.plot([value], [place], marker, color=colour, linestyle="none", label=label if labelled else None)
        axes.annotate(_short(value), (value, place), (0, 8), textcoords="offset points", ha="center", fontsize=9)


def _launch(report: dict[str, Any], cost: dict[str, Any]) -> Figure:
    """CPU time to submit N kernels over N: medians and quartiles of both sides, and NVIDIA's published line."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    nodes = np.array(cost["nodes"])
    for side, colour, marker, label in (("eager", EAGER, "o", "逐次启动"), ("graph", GRAPH, "s", "一次图启动")):
        low, middle, high = np.transpose(cost[side]["quartiles"])
        text = f"{label}：约 {cost[side]['const_us']:.1f} µs + 每个节点 {_per_node(cost[side]['per_node_ns'])}"
        axes.plot(nodes, middle, marker=marker, color=colour, linestyle="-", label=text)
        axes.fill_between(nodes, low, high, color=colour, alpha=0.2, linewidth=0)
    published = f"NVIDIA 公布：{figures.PUBLISHED_CONST_US:g} µs + 每个节点约 {_per_node(figures.PUBLISHED_PER_NODE_NS)}"
    axes.plot(nodes, figures.published_us(nodes), marker="", linestyle="--", color=QUOTED, label=published)
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
    axes.set_xlabel("一条直线上的内核数 N（对数轴）")
    axes.set_ylabel("CPU 提交时间（µs，中位数，对数轴）")
    axes.set_title(f"提交 N 个小内核（{report['gpu']}）")
    axes.legend()
    return figure


def _per_node(ns: float) -> str:
    return f"{ns / 1000:.1f} µs" if ns >= 1000 else f"{ns:.2g} ns"


def _short(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"
