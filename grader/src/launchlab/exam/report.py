"""What an exam found, as data: written beside the grade, into receipts and feedback."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from typing import Any

VERSIONS = ("nbgrader", "jupyter-client", "ipykernel", "numpy", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "tensorrt", "tensorrt-cu12", "tensorrt-cu12-bindings", "tensorrt-cu13", "tensorrt-cu13-bindings")


@dataclass
class CheckReport:
    """One test cell: ``score`` is None where the verdict is left open; ``records`` are raw samples."""

    id: str
    kind: str
    needs_gpu: bool
    points: float
    score: float | None = None
    verdict: str = ""
    reason: str = ""
    records: list[dict] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Report:
    """One examined notebook. ``sandbox``: "bubblewrap" or "none"; ``gpu``: its name, or None; ``notes``: of the intake.

    ``limits``: what keeps a student's processes and GPU memory in bounds, see `launchlab.exam.limits.told`.
    """

    chapter: str
    sandbox: str
    gpu: str | None
    driver: str | None
    versions: dict[str, str] = field(default_factory=dict)
    limits: dict[str, str] = field(default_factory=dict)
    checks: list[CheckReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def score(self) -> float:
        return sum(check.score or 0.0 for check in self.checks)

    @property
    def max(self) -> float:
        return sum(check.points for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for ``json.dump``."""
        return asdict(self) | {"score": self.score, "max": self.max}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        """The report that `to_json` gave ``data`` of. TypeError or KeyError if it is none."""
        values = {each.name: data[each.name] for each in fields(cls)}
        return cls(**values | {"checks": [CheckReport(**check) for check in data["checks"]]})


def versions() -> dict[str, str]:
    """Versions of what a verdict rests on, of those installed here."""
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
