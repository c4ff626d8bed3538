"""The report of a measurement: where it lies, how it is written and read back, and on what machine it was made."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from launchlab import device, paths
from launchlab.bench import figures
from launchlab.course.receipt import text
from launchlab.exam.report import versions

PATH = paths.GRADER / "reports" / "bench.json"


class Inconsistent(ValueError):
    """A report that is none, or whose figures are not those of its samples."""


def begin(command: str) -> dict[str, Any]:
    """A report without measurements: the machine, the versions, the time (UTC) and the command that makes the report."""
    gpu = device.gpu()
    return {
        "command": command,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": 0.0,
        "gpu": gpu.name,
        "driver": gpu.driver,
        "cpu": _cpu(),
        "cpu_count": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "versions": versions() | _cupti(),
        "problems": [],
        "cases": [],
        "launch_cost": None,
    }


def save(path: Path, made: dict[str, Any]) -> None:
    """Write a report, complete or not, with the figures of the samples that it has by now; a file is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(text(made | {"figures": figures.of(made)}), encoding="utf-8")
    fresh.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Read a report. OSError, json.JSONDecodeError, or Inconsistent where its figures do not follow from its samples."""
    made = json.loads(path.read_text(encoding="utf-8"))
    try:
        held = figures.of(made) == made["figures"]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise Inconsistent(f"它缺少内容，或者内容不成样子：{error!r}") from error
    if not held:
        raise Inconsistent("里面的数字与原始样本算出来的不一致，请重新测量")
    return made


def _cpu() -> str:
    """The processor's name, as far as this system tells it: the eager side of every figure is its work."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cupti() -> dict[str, str]:
    try:
        return {"cupti-python": metadata.version("cupti-python")}
    except metadata.PackageNotFoundError:
        return {}
