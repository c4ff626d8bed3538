"""`launchlab bench`: measure here, or make plots and table anew from a report that was made elsewhere."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from launchlab import device, paths, readme
from launchlab.bench import report


def main(seconds: float, source: Path | None) -> int:
    """Measure within about ``seconds`` and write report, plots and table; with ``source`` only make those anew from a report.

    Returns 1 where nothing could be measured or read, or where the report has a gap; what it has is written all the same.
    """
    if source is None:
        if missing := _missing():
            print(f"✗ {missing}")
            return 1
        from launchlab.bench import measure

        source = report.PATH
        made = measure.run(seconds, lambda so_far: report.save(source, so_far))
    else:
        try:
            made = report.load(source)
        except FileNotFoundError:
            print(f"✗ 没有报告 {source}：先在有 GPU 和 TensorRT 的机器上运行 launchlab bench，或者检查路径。")
            return 1
        except (OSError, json.JSONDecodeError, report.Inconsistent) as error:
            print(f"✗ 用不了报告 {source}：{error}")
            return 1
    from launchlab.bench import plots

    for drawn in plots.draw(made, source.parent):
        print(f"✓ {paths.short(drawn)}")
    if source.resolve() == report.PATH.resolve():
        readme.main(check=False)
    for problem in made["problems"]:
        print(f"✗ {problem}")
    return 1 if made["problems"] else 0


def _missing() -> str:
    """What this machine lacks for a measurement, in Chinese; "" if nothing."""
    again = "在别处测好的报告可以这样重画：launchlab bench --from grader/reports/bench.json"
    if device.gpu() is None:
        return f"launchlab bench 要在有 NVIDIA GPU 的机器上运行，这台机器上没有可用的 CUDA GPU（launchlab doctor 会说明原因）。{again}"
    for package, name in (("cupy", "CuPy"), ("cuda.bindings.runtime", "cuda-bindings"), ("tensorrt", "TensorRT")):
        try:
            importlib.import_module(package)
        except (ImportError, OSError) as error:
            return f"launchlab bench 要用 {name}，但导入失败：{error}。请先安装（launchlab doctor 会给出命令）。{again}"
    return ""
