"""Measured speed-ups, in words, and as pictures: SVG that stands in a page by itself."""

from __future__ import annotations

import math
import statistics
from io import StringIO
from typing import Any

from launchlab.exam import judge


def told(record: dict[str, Any]) -> str:
    """What was measured by one speed-up check (see `speedup`), in words (Chinese)."""
    ratios, judged = judge.measured(record)
    median = statistics.median(ratios["candidate"])
    reference = f"参考实现 {judged['best']:.2f} 倍" if math.isfinite(judged["best"]) else "参考实现没有测出来"
    return f"实测 {median:.2f} 倍（中位数），可信下界 {judged['low']:.2f} 倍；门槛 {judged['bar']:.2f} 倍；{reference}。"


def speedup(record: dict[str, Any]) -> str:
    """The rounds of one speed-up check as SVG: the ratio of each pair, the learner's and the reference's, and the bar.

    ``record``: as `launchlab.exam.check` writes it, one that `launchlab.exam.judge.measured` knows.
    """
    from matplotlib import pyplot, rc_context, ticker

    from launchlab.lab import plot_style

    ratios, judged = judge.measured(record)
    with rc_context():
        plot_style()
        pyplot.rcParams["svg.hashsalt"] = "launchlab"  # the same record gives the same bytes
        figure, axes = pyplot.subplots(figsize=(7, 2.8))
        for name, label, marker in (("candidate", "这份提交", "o"), ("best", "参考实现", "s")):
            pairs = [(place, ratio) for place, ratio in enumerate(ratios[name], 1) if math.isfinite(ratio)]
            axes.plot([place for place, _ in pairs], [ratio for _, ratio in pairs], marker, markersize=5, linestyle="none", label=label)
        for value, label, style in ((judged["bar"], "门槛", "--"), (judged["low"], "可信下界", ":")):
            if math.isfinite(value):
                axes.axhline(value, linestyle=style, linewidth=1.2, color="#444444", label=f"{label} {value:.2f}")
        axes.set_ylim(bottom=0)
        axes.set_xlim(0.5, len(ratios["best"]) + 0.5)
        axes.set_xlabel("第几对测量")
        axes.set_ylabel("基准用时是它的几倍")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        text = StringIO()
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
