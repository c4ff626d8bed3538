"""The measurement: part after part, each kept as soon as it is there, and none able to cost the others their result."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from launchlab.bench import engine, launch_cost, report
from launchlab.bench.case import Case
from launchlab.bench.figures import FOUNDING
from launchlab.lab import models

FOR_CUPTI = 15  # seconds, of those given, that no build may take
MOST_STREAMS = 16
LENGTH = 128  # tokens


def run(seconds: float, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure all parts within about ``seconds``; the report goes to keep() after each part, and is returned.

    What failed, or was not reached, stands in the report's ``problems``, in Chinese. CUPTI comes last: it slows what it sees.
    """
    work = _Measurement(seconds, keep)
    work.part("启动成本", work.launch_cost)
    work.part("ResNet-50", partial(work.alone, "resnet50", "ResNet-50, batch 1", models.resnet50, _image))
    work.part("多流", work.streams)
    work.part(
        "BERT-base", partial(work.alone, "bert", f"BERT-base, 1 × {LENGTH}", partial(models.bert, length=LENGTH), _sentence)
    )
    for id in list(work.cases):
        work.part(f"CUPTI：{id}", partial(work.gpu_runs, id))
    return work.report


class _Measurement:
    """A report in the making. cases: those measured, by id."""

    def __init__(self, seconds: float, keep: Callable[[dict[str, Any]], None]):
        self._begun, self._seconds, self._keep = time.monotonic(), seconds, keep
        self.cases: dict[str, Case] = {}
        self.report = report.begin(f"launchlab bench --seconds {seconds:g}")

    def part(self, name: str, work: Callable[[], None]) -> None:
        """Do a part; what goes wrong becomes a problem of the report. Then keep the report."""
        self._say(name)
        try:
            if self._left() <= 0:
                raise TimeoutError(f"{self._seconds:g} 秒用完了，没有测。请用 --seconds 给更多时间")
            work()
        except Exception as error:  # noqa: BLE001 - told in the report; the other parts are measured all the same
            self.report["problems"].append(f"{name}：{type(error).__name__}：{error}")
            self._say(f"✗ {name}：{error!r}")
        self.report["seconds"] = round(time.monotonic() - self._begun, 1)
        self._keep(self.report)

    def launch_cost(self) -> None:
        cost = launch_cost.measure(self._left)
        measured = len(cost["samples"])
        if measured >= 2:  # enough for a line
            self.report["launch_cost"] = cost
        if measured < len(launch_cost.COUNTS):
            raise TimeoutError(f"时间用完了，{len(launch_cost.COUNTS)} 个 N 只测了 {measured} 个")

    def alone(
        self, id: str, title: str, describe: Callable[[Any], Any], inputs: Callable[[int], dict[str, np.ndarray]]
    ) -> None:
        """Build an engine and measure one request of it. inputs: seed → {name: array}."""
        built = engine.build(describe, time.monotonic() + self._left() - FOR_CUPTI)
        self._say(f"  构建和载入用了 {built.seconds:.1f} 秒")
        self._measure(Case(id, title, built, [engine.Seat(built.engine, inputs(0))]))

    def streams(self) -> None:
        """As many ResNet-50 side by side as come nearest to the founding text's number of kernels."""
        if "resnet50" not in self.cases:
            raise RuntimeError("它用 ResNet-50 的引擎，而 ResNet-50 没有测成")
        one = self.cases["resnet50"]
        number = min(MOST_STREAMS, max(2, round(FOUNDING["streams"][0] / one.kernels)))
        seats = [engine.Seat(one.built.engine, _image(seed)) for seed in range(number)]
        self._measure(Case("streams", f"{number} streams, a ResNet-50 on each", one.built, seats))

    def gpu_runs(self, id: str) -> None:
        found = next(case for case in self.report["cases"] if case["id"] == id)
        found["gpu_runs"] = self.cases[id].gpu_runs()

    def _measure(self, case: Case) -> None:
        self.report["cases"].append(case.measure())
        self.cases[case.id] = case

    def _left(self) -> float:
        return self._begun + self._seconds - time.monotonic()

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._begun:6.1f} s  {what}", flush=True)


def _image(seed: int) -> dict[str, np.ndarray]:
    """An input of `models.resnet50`, batch 1."""
    return {"x": np.random.default_rng(seed).standard_normal((1, 3, 224, 224)).astype(np.float16)}


def _sentence(seed: int) -> dict[str, np.ndarray]:
    """Inputs of `models.bert`, batch 1: LENGTH tokens, none of them padding."""
    ids = np.random.default_rng(seed).integers(0, models.VOCABULARY, (1, LENGTH)).astype(np.int32)
    return {"ids": ids, "mask": np.ones((1, LENGTH), np.float16)}
