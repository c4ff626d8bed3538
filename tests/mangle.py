"""Spoil valid notebooks at random, thousands of them, and see what intake, the class and the marks of others make of it.

usage: PYTHONPATH=grader/src python tests/mangle.py [2000] [--graded 60] [--out tests/records/mangled.json]

Every notebook goes through intake, which must repair it or refuse it with a reason, and make of it one that nbgrader
takes. ``--graded`` of them, one in so many, are handed in as a class with honest learners between them and graded by the
real nbgrader: the class must come to its end, everybody must have marks or be left to a person, and the honest all of
theirs. Needs no GPU. Exit code 0 if all that held; the figures are printed and written.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from course_copy import NAME, POINTS, Course
from mangling import Quiet, answers_standing, code, many, marks, sound

from launchlab.grading.intake import Refused, graft

HONEST = ("a_honest", "m5_honest", "z_honest")  # before, between and after the spoiled ones


class Figures:
    """What became of each notebook at intake, and a sample of them."""

    def __init__(self, course: Course, every: int):
        self.release, self.honest = course.release, Quiet(json.loads(json.dumps(course.honest)))
        self.whole = code(self.release)
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.every, self.number, self.sample = every, 0, {}

    def take(self, raw: bytes, nb: dict | None) -> None:
        made = sound(raw, self.release)
        if made is None:
            self.counts["refused"] += 1
            try:
                graft(raw, self.release)
            except Refused as refused:
                self.reasons[re.sub(r"[0-9]+|（.*?）", "", str(refused)).split("：")[0].split("。")[0]] += 1
        else:
            assert nb is None or answers_standing(nb, self.honest) <= set(code(made))
            wanted = {cell.source for cell in self.honest_cells()}
            kept = {cell.source for name, cell in marks(made).items() if not name.startswith("test_")} == wanted
            self.counts["repaired, all answers in their places" if kept else "repaired, some answers lost or elsewhere"] += 1
        if self.number % self.every == 0:
            self.sample[f"m{self.number % 10}_{self.number:05d}"] = raw
        self.number += 1

    def honest_cells(self) -> list:
        import nbformat

        return [cell for cell in nbformat.from_dict(dict(self.honest)).cells if cell.metadata.get("nbgrader", {}).get("solution")]


def graded(course: Course, sample: dict[str, bytes]) -> dict:
    """Grade the sample as one class; what came of it. Raises AssertionError if the class or an honest learner took harm."""
    began = time.monotonic()
    for name in HONEST:
        course.hand_in(name, course.honest)
    for name, raw in sample.items():
        course.hand_in(name, raw)
    exit_code, log = course.nbgrader("autograde", NAME, seconds=7200)
    assert exit_code == 0, log[-2000:]
    found = course.marks()
    assert set(found) == {*HONEST, *sample}
    assert all(found[name] == POINTS for name in HONEST), {name: found[name] for name in HONEST}
    counts: Counter[str] = Counter()
    for name in sample:
        checks = course.report(name)["checks"]
        assert set(checks) == set(POINTS) and all(len(check["reason"]) > 2 for check in checks.values()), name
        assert {test: check["score"] for test, check in checks.items()} == found[name], name
        refused = all(check["verdict"] == "refused" for check in checks.values())
        counts["left to a person" if refused else "full marks" if found[name] == POINTS else "part of the marks or none"] += 1
    assert course.survivors() == []
    return {"submissions": len(found), "honest": len(HONEST), **counts, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("number", type=int, nargs="?", default=2000)
    arguments.add_argument("--graded", type=int, default=60)
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "mangled.json")
    chosen = arguments.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="mangled-") as folder:
        course = Course.make(Path(folder) / "course")
        figures, began = Figures(course, max(1, chosen.number // max(1, chosen.graded))), time.monotonic()
        many(figures.honest, chosen.number, figures.take)
        record = {"python": platform.python_version(), "notebooks": figures.number, "intake": dict(figures.counts), "refused_for": dict(figures.reasons.most_common())}
        record["intake_seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(record, ensure_ascii=False, indent=1), flush=True)
        record["class"] = graded(course, figures.sample) if chosen.graded else None
    print(json.dumps(record["class"], ensure_ascii=False, indent=1), flush=True)
    chosen.out.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
