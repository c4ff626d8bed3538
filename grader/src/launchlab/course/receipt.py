"""Receipts: proof of a chapter's last recorded run, checked anywhere from its raw samples."""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbgrader.utils import is_grade

from launchlab.course import source
from launchlab.course.execute import Execution
from launchlab.device import Gpu
from launchlab.exam import judge
from launchlab.lab.prose import FIGURES
from launchlab.manifest import Chapter

NUMBERS = re.compile(r"\[\s+((?:-?[0-9][0-9.eE+-]*,?\s+)+)\]")


def make(chapter: Chapter, gpu: Gpu, execution: Execution, solution: Any, release: Any) -> dict:
    """The receipt of one run: ``solution`` and ``release`` are the exam's Reports."""
    return {
        "chapter": chapter.name,
        "source_sha256": source.sha256(chapter.source.parent),
        "outputs_sha256": outputs_sha256(execution.nb),
        "gpu": gpu.name,
        "driver": gpu.driver,
        "versions": solution.versions,
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": {
            "total": round(sum(execution.seconds.values()), 3),
            "cells": {cell: round(seconds, 3) for cell, seconds in execution.seconds.items()},
        },
        "figures": figures(execution.nb),
        "solution": _score(solution),
        "release": _score(release),
        "checks": [
            {
                "id": check.id,
                "kind": check.kind,
                "needs_gpu": check.needs_gpu,
                "points": check.points,
                "verdict": check.verdict,
                "score": check.score,
                "seconds": round(check.seconds, 3),
                "records": check.records,
            }
            for check in solution.checks
        ],
        "release_checks": [
            {"id": check.id, "verdict": check.verdict, "score": check.score, "reason": check.reason} for check in release.checks
        ],
    }


def write(chapter: Chapter, receipt: dict) -> None:
    """Put a receipt in its place."""
    chapter.receipt.parent.mkdir(parents=True, exist_ok=True)
    chapter.receipt.write_text(text(receipt), encoding="utf-8")


def text(receipt: dict) -> str:
    """A receipt's JSON, one value a line, but a list of numbers on one line: samples come in hundreds."""
    lines = json.dumps(receipt, ensure_ascii=False, indent=1)
    return NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", lines) + "\n"


def load(chapter: Chapter) -> dict:
    """The chapter's receipt; FileNotFoundError or ValueError (not JSON)."""
    return json.loads(chapter.receipt.read_text(encoding="utf-8"))


def outputs_sha256(nb: NotebookNode) -> str:
    """One hash, in hexadecimal, of the ids, sources and outputs of a notebook's code cells."""
    cells = [[cell.id, cell.source, cell.outputs] for cell in nb.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(cells, ensure_ascii=False, sort_keys=True).encode()).hexdigest()


def figures(nb: NotebookNode) -> dict[str, Any]:
    """What the notebook's outputs hold for the receipt (see `launchlab.lab.say`), by name."""
    outputs = (output for cell in nb.cells if cell.cell_type == "code" for output in cell.outputs)
    return {name: data for output in outputs for name, data in output.get("data", {}).get(FIGURES, {}).items()}


def vouches(receipt: dict, chapter: Chapter, nb: NotebookNode) -> bool:
    """Whether the outputs in ``nb`` are those recorded, from the source as it is now."""
    return receipt.get("source_sha256") == source.sha256(chapter.source.parent) and receipt.get(
        "outputs_sha256"
    ) == outputs_sha256(nb)


def problems(chapter: Chapter, receipt: dict) -> list[str]:
    """All that a receipt says wrongly, in Chinese; empty when it holds.

    Everything that can be known without a GPU is computed again: hashes, what is examined,
    every verdict and score from its raw samples, and the totals.
    """
    try:
        return _problems(chapter, receipt)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"回执缺少内容，或者内容不成样子：{error!r}"]


def _problems(chapter: Chapter, receipt: dict) -> list[str]:
    nb = nbformat.read(chapter.solution, as_version=4)
    checks, release = receipt["checks"], receipt["release_checks"]
    found = []
    if receipt["chapter"] != chapter.name:
        found.append(f"是另一章的回执：{receipt['chapter']}")
    if receipt["source_sha256"] != source.sha256(chapter.source.parent):
        found.append("代码或数据在录制之后改过，需要重新录制（launchlab record）")
    elif receipt["outputs_sha256"] != outputs_sha256(nb):
        found.append("解答笔记本里的输出不是录制时的输出")
    if receipt.get("figures", {}) != figures(nb):  # receipts of chapters that keep none may lack them
        found.append("回执里的数字不是解答笔记本里录下的数字")
    if not (receipt["gpu"] and receipt["driver"] and receipt["versions"]):
        found.append("没有写明 GPU、驱动和软件版本")
    if datetime.fromisoformat(receipt["recorded_at"]) > datetime.now(UTC):
        found.append("录制时间在将来")
    examined = [_examined(cell) for cell in nb.cells if is_grade(cell)]
    if [{key: check[key] for key in ("id", "kind", "needs_gpu", "points")} for check in checks] != examined:
        found.append("检查项与解答笔记本的测试单元不一致")
    if [check["id"] for check in release] != [check["id"] for check in checks]:
        found.append("发布版的检查项与解答的不一致")
    for check in checks:
        verdict, score = judge.recompute(check["records"], check["points"])
        if (check["verdict"], check["score"]) != (verdict, score):
            found.append(f"{check['id']}：写的是 {check['verdict']}、{check['score']} 分，按原始数据应是 {verdict}、{score} 分")
        if score != check["points"]:
            found.append(f"{check['id']}：解答没有得满分")
    for check in release:
        if check["score"] != 0 or check["verdict"] == judge.PASSED:
            found.append(f"{check['id']}：没有作答的发布版得了 {check['score']} 分（{check['verdict']}），应是 0 分")
    total = sum(check["points"] for check in checks)
    if receipt["solution"] != {"score": sum(check["score"] or 0 for check in checks), "max": total}:
        found.append("解答的总分与各项之和不符")
    if receipt["release"] != {"score": sum(check["score"] or 0 for check in release), "max": total}:
        found.append("发布版的总分与各项之和不符")
    if total != chapter.points:
        found.append(f"满分 {total} 与 chapters.toml 里的 {chapter.points} 不符")
    return found


def _examined(cell: NotebookNode) -> dict:
    return {
        "id": cell.metadata.nbgrader.grade_id,
        "kind": cell.metadata.launchlab.kind,
        "needs_gpu": "gpu" in source.tags(cell),
        "points": cell.metadata.nbgrader.points,
    }


def _score(report: Any) -> dict:
    return {
        "score": sum(check.score or 0 for check in report.checks),
        "max": sum(check.points for check in report.checks),
    }
