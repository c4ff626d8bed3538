"""A learner's history on this machine: one line for each `launchlab check`, appended and never rewritten.

It lies in the user's own data folder, not in the repository: it outlives a new clone, and learners who share a
checkout do not share it.
"""

from __future__ import annotations

import fcntl
import json
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import platformdirs

from launchlab.exam import judge


@dataclass(frozen=True)
class Run:
    """One check of one notebook. ``at``: with its time zone; ``score``, ``max``: points; ``open``: exercises left open.

    ratios: id of a test -> the measured median speed-up, of those whose work was found right; ``gpu`` is where.
    """

    chapter: str
    at: datetime
    gpu: str | None
    score: float
    max: float
    open: int
    ratios: dict[str, float]


def path() -> Path:
    """The history file of this user: JSON, one object a line."""
    return platformdirs.user_data_path("launchlab") / "history.jsonl"


def add(report: dict[str, Any]) -> None:
    """Append what an exam found, as `Report.to_json` has it. OSError: it cannot be written."""
    checks = [
        {"id": check["id"], "verdict": check["verdict"], "score": check["score"], "points": check["points"]}
        | ({} if (ratio := _ratio(check)) is None else {"ratio": round(ratio, 3)})
        for check in report["checks"]
    ]
    run = {
        "chapter": report["chapter"],
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": report["gpu"],
        "checks": checks,
    }
    line = json.dumps(run, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a+b") as history:
        fcntl.flock(history, fcntl.LOCK_EX)
        history.seek(0, 2)
        # What an interrupted writer left stays a line of its own: it must not spoil this one.
        if history.tell() and (history.seek(-1, 2), history.read(1))[1] != b"\n":
            line = b"\n" + line
        history.write(line)


def read() -> tuple[list[Run], list[int]]:
    """All runs in the order in which they were made, and the numbers of the lines that cannot be read.

    OSError: the file is there and cannot be opened.
    """
    try:
        lines = path().read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], []
    runs, unreadable = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            runs.append(_run(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            unreadable.append(number)
    return runs, unreadable


def _run(told: dict[str, Any]) -> Run:
    checks = told["checks"]
    at = datetime.fromisoformat(told["at"])
    if at.tzinfo is None or not checks or not isinstance(told["chapter"], str):
        raise ValueError("not a run")
    return Run(
        told["chapter"], at, told["gpu"] and str(told["gpu"]),
        score=sum(float(check["score"]) for check in checks if check["score"] is not None),
        max=sum(float(check["points"]) for check in checks),
        open=sum(check["score"] is None for check in checks),
        ratios={str(check["id"]): float(check["ratio"]) for check in checks if "ratio" in check},
    )  # fmt: skip


def _ratio(check: dict[str, Any]) -> float | None:
    """The speed-up that a test measured, or None: of work that was found wrong, or in noise, no figure is kept."""
    sound = [record for record in check["records"] if _is_sound(record)]
    too_slow = check["verdict"] == judge.FAILED and check["records"] and check["records"][-1] in sound
    if not sound or not (check["verdict"] == judge.PASSED or too_slow):
        return None
    return min(statistics.median(judge.measured(record)[0]["candidate"]) for record in sound)


def _is_sound(record: dict[str, Any]) -> bool:
    """Whether a record is of a speed-up that was measured, of work that was done."""
    found = None if record.get("states_differ") else judge.measured(record)
    return found is not None and found[1]["why"] == "measured"
