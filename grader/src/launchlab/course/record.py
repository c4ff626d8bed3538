"""Record: a chapter's run on a real GPU, its outputs put into the solution notebook, its proof into a receipt."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterable
from copy import deepcopy

import nbformat

from launchlab import paths
from launchlab.course import build, receipt
from launchlab.course.execute import execute
from launchlab.device import gpu, processes
from launchlab.exam.examine import examine
from launchlab.manifest import Chapter, chapter, chapters


def main(names: Iterable[str]) -> int:
    """Record the named chapters, or all that are ready, one after the other; 1 if any was not recorded."""
    if gpu() is None:
        print("录制要在有 NVIDIA GPU 的机器上进行：这台机器上没有可用的 CUDA GPU。运行 launchlab doctor 查看原因。")
        return 1
    chosen = [chapter(name) for name in names] or [each for each in chapters() if each.ready]
    if others := sorted(processes().keys() - {os.getpid()}):
        print(f"! 这块 GPU 上还有别的进程（{'、'.join(map(str, others))}）在用：录下的时间会受它们影响。最好先停掉它们，再录制。")
    failed = []
    for number, each in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {each.name}", flush=True)
        try:
            found = record(each)
        except Exception:  # noqa: BLE001 - one broken chapter must not cost the others their time on the GPU
            found = [traceback.format_exc()]
        for problem in found:
            print("  ✗ " + problem.replace("\n", "\n    "))
        if found:
            failed.append(each.name)
    print(f"没有录成：{'、'.join(failed)}" if failed else f"{len(chosen)} 章已录制。README 里的章节表写着实测的加速比：运行 launchlab build 更新它。")
    return 1 if failed else 0


def record(chapter: Chapter) -> list[str]:
    """Build, execute and examine a chapter, then write its outputs and its receipt.

    A run that does not prove the chapter leaves notebook and receipt as they were: what went
    wrong is returned in Chinese, and the run's receipt lies under ``build/rejected`` to be read.
    """
    start = time.perf_counter()
    built = build.build(chapter)
    build.write(chapter, built)
    _step(start, "生成完毕，运行解答")
    execution = execute(built.solution, chapter.source.parent)
    _step(start, f"解答运行了 {sum(execution.seconds.values()):.1f} 秒，考解答")
    solution = examine(deepcopy(built.solution), chapter)
    _step(start, "考没有作答的发布版")
    release = examine(nbformat.read(chapter.release, as_version=4), chapter)
    made = receipt.make(chapter, gpu(), execution, solution, release)
    before = chapter.solution.read_bytes()
    chapter.solution.write_text(build.text(execution.nb), encoding="utf-8")
    found = receipt.problems(chapter, made)
    if not found:
        receipt.write(chapter, made)
        _step(start, f"已录制：解答 {made['solution']['score']}/{made['solution']['max']}，发布版 {made['release']['score']}")
        return []
    chapter.solution.write_bytes(before)
    rejected = paths.BUILD / "rejected" / f"{chapter.name}.json"
    rejected.parent.mkdir(parents=True, exist_ok=True)
    rejected.write_text(receipt.text(made), encoding="utf-8")
    reasons = [f"{check.id}：{check.verdict}，{check.reason}" for check in solution.checks if check.score != check.points]
    return [*found, *reasons, f"这次运行的全部数据在 {rejected}"]


def _step(start: float, what: str) -> None:
    print(f"  {time.perf_counter() - start:6.1f} s  {what}", flush=True)
