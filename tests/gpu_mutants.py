"""Examine natural mistakes with graphs and TensorRT, those of tests/mutants_gpu, on a real GPU: each must fail its exercise.

usage: PYTHONPATH=grader/src python3 tests/gpu_mutants.py OUT.json [--seconds 250] [NAME …]

A file is named after the chapter and the mistake; its cell takes the place of one answer in the chapter's solution. Only the
tests that it names are examined: of what it loses each is to fail, for a reason that tells and that no other mistake gets;
what it keeps is to have full marks. OUT.json is written anew after each. A run goes on where an earlier one left it: what
failed as it is to, and has not changed since (answer, tests, the chapter's code), is not examined again. Exit code 0 if all
is so, 1 if not, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

import attack_files
import nbformat
from earlier_run import earlier

from launchlab.device import gpu
from launchlab.exam.examine import examine
from launchlab.exam.report import versions
from launchlab.manifest import chapter

FOLDER = Path(__file__).parent / "mutants_gpu"
SLOW = ("24", "30")  # the slowest to begin come last
KEPT = ("id", "verdict", "score", "points", "reason", "seconds")
CLOSED = ("failed", "crashed")


def chapter_of(mutant: attack_files.Attack) -> str:
    """The chapter that a mutant's file name begins with."""
    return mutant.name.partition(".")[0]


def mutants() -> list[attack_files.Attack]:
    """All of them, in the order in which they are examined: chapter after chapter, as a chapter's reference is started once."""
    return sorted(attack_files.load(FOLDER), key=lambda mutant: (mutant.name[:2] in SLOW, mutant.name))


def fingerprint(mutant: attack_files.Attack) -> str:
    """See `attack_files.fingerprint`."""
    return attack_files.fingerprint(mutant, chapter(chapter_of(mutant)), (*mutant.loses, *mutant.keeps))


def notebook(mutant: attack_files.Attack, solution: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The solution with the mistake in place of an answer, and only those tests that the mutant names. ValueError: no such test."""
    nb = attack_files.submission(mutant, solution, solution)
    named = {f"test_{name}" for name in (*mutant.loses, *mutant.keeps)}
    grades = {cell.id: cell.metadata.nbgrader.grade_id for cell in nb.cells if cell.metadata.get("nbgrader", {}).get("grade")}
    if unknown := named - set(grades.values()):
        raise ValueError(f"{mutant.name}: no test {sorted(unknown)}")
    nb.cells = [cell for cell in nb.cells if grades.get(cell.id, next(iter(named))) in named]
    return nb


def reasons(case: dict) -> list[str]:
    """Why the exercises that it was to lose were lost."""
    return [check["reason"] for check in case["checks"] if check["id"].removeprefix("test_") in case["loses"]]


def problems(case: dict, others: list[dict]) -> list[str]:
    """What is not as due in a case; ``others``: all cases, whose reasons must be different ones."""
    if "error" in case:
        return [case["error"]]
    checks = {check["id"].removeprefix("test_"): check for check in case["checks"]}
    found = []
    if set(checks) != {*case["loses"], *case["keeps"]}:
        found.append(f"examined were {sorted(checks)}")
    for name, check in checks.items():
        if name in case["loses"] and (check["verdict"] not in CLOSED or check["score"] != 0):
            found.append(f"{name}: {check['verdict']}, {check['score']} points")
        if name not in case["loses"] and (check["verdict"] != "passed" or check["score"] != check["points"]):
            found.append(f"{name}: {check['verdict']}, {check['score']} points, {check['reason']}")
    mine = reasons(case)
    found += [f"no word of {case['says']!r}: {reason}" for reason in mine if case["says"] not in reason]
    found += [
        f"the same reason as {other['name']}" for other in others if other is not case and set(mine) & set(reasons(other))
    ]
    return found


def examined(mutant: attack_files.Attack) -> dict:
    """One exam, and what came of it."""
    which = chapter(chapter_of(mutant))
    case = {
        "name": mutant.name,
        "about": mutant.about,
        "loses": mutant.loses,
        "keeps": mutant.keeps,
        "says": mutant.says,
        "of": fingerprint(mutant),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "checks": [],
    }
    try:
        report = examine(notebook(mutant, nbformat.read(which.solution, as_version=4)), which).to_json()
    except Exception as error:  # noqa: BLE001 - the next one is examined all the same
        traceback.print_exc()
        return case | {"error": f"{type(error).__name__}: {error}"[:500]}
    return case | {
        "seconds": report["seconds"], "sandbox": report["sandbox"],
        "checks": [{key: check[key] for key in KEPT} for check in report["checks"]],
    }  # fmt: skip


def told(case: dict, mutant: attack_files.Attack) -> dict:
    """A recorded case, with what the mutant is expected to lose, keep and be told now."""
    return case | {"about": mutant.about, "loses": list(mutant.loses), "keeps": list(mutant.keeps), "says": mutant.says}


def as_due(cases: list[dict]) -> list[dict]:
    """Of recorded cases those of what the mutants are now that failed as they are to."""
    known = {mutant.name: mutant for mutant in mutants()}
    present = [told(case, known[case["name"]]) for case in cases if case["name"] in known and case["of"] == fingerprint(known[case["name"]])]
    return [case for case in present if not problems(case, present)]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--seconds", type=float, default=250.0, help="begin no further exam after so long")
    chosen = arguments.parse_args()
    if gpu() is None:
        print("not run: needs a GPU")
        return 3
    began, here = time.monotonic(), {"gpu": gpu().name, "driver": gpu().driver, "versions": versions()}
    cases = as_due(earlier(chosen.out, here).get("cases", []))
    done = {case["name"] for case in cases}
    asked = [mutant for mutant in mutants() if mutant.name not in done and (not chosen.names or mutant.name in chosen.names)]
    record = here | {"cases": cases, "not_reached": [mutant.name for mutant in asked]}
    for mutant in asked:
        if time.monotonic() - began > chosen.seconds:
            break
        cases.append(examined(mutant))
        record["not_reached"].remove(mutant.name)
        record["seconds"] = round(time.monotonic() - began, 1)
        chosen.out.write_text(json.dumps(record, ensure_ascii=False, indent=1), encoding="utf-8")
        wrong = problems(cases[-1], cases)
        print(
            f"{'XX' if wrong else 'ok'} {record['seconds']:6.1f} s  {mutant.name}: {'; '.join(wrong or reasons(cases[-1]))[:300]}",
            flush=True,
        )
    wrong = [case["name"] for case in cases if problems(case, cases)]
    print(f"{len(cases)} examined, not as due: {wrong or 'none'}, not reached: {record['not_reached'] or 'none'}")
    return 1 if wrong or record["not_reached"] else 0


if __name__ == "__main__":
    sys.exit(main())
