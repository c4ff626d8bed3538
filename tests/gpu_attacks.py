"""Examine every cheat and must-keep case of tests/attacks_gpu against chapter 3, on a real GPU.

usage: PYTHONPATH=grader/src python3 tests/gpu_attacks.py OUT.json [--seconds 270] [NAME …]

OUT.json holds a record for each: verdicts, reasons and seconds, and whether all is as it is due.
Exit code 0 if it is, 1 if not, 3 without a GPU. Written anew after each case, so that a run cut
short leaves what it had.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import attack_files
import nbformat

from launchlab.device import gpu
from launchlab.exam.examine import examine
from launchlab.grading.intake import graft
from launchlab.manifest import Chapter, chapter

FOLDER = Path(__file__).parent / "attacks_gpu"
CHAPTER = "03_cuda_graph_concepts"
CLOSED = ("failed", "crashed", "timed out")
SLOW = "test_make_replayer_speed"


def notebook(attack: attack_files.Attack, which: Chapter) -> nbformat.NotebookNode:
    """The submission of one attack as intake makes it. Who is after the first exercise alone is not timed."""
    solution, release = (nbformat.read(path, as_version=4) for path in (which.solution, which.release))
    handed_in = attack_files.submission(attack, solution, release)
    nb, _ = graft(json.dumps(handed_in).encode(), release)
    if attack.loses == ("capture_chain",):
        nb.cells = [cell for cell in nb.cells if cell.metadata.get("nbgrader", {}).get("grade_id") != SLOW]
    return nb


def as_due(attack: attack_files.Attack, checks: list[dict]) -> bool:
    """Whether the attack got nothing where it is to get nothing, and full marks elsewhere."""
    told = "".join(check["reason"] for check in checks)
    for check in checks:
        if check["id"].removeprefix("test_") in attack.loses:
            if check["score"] != 0 or check["verdict"] not in CLOSED:
                return False
        elif check["id"].removeprefix("test_") in attack.opens:
            if check["score"]:
                return False
        elif check["score"] != check["points"]:
            return False
    return attack.says in told


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--seconds", type=float, default=270.0, help="begin no further case after so long")
    chosen = arguments.parse_args()
    if gpu() is None:
        print("not run: needs a GPU")
        return 3
    which, began = chapter(CHAPTER), time.monotonic()
    attacks = [attack for attack in attack_files.load(FOLDER) if not chosen.names or attack.name in chosen.names]
    record = {"gpu": gpu().name, "driver": gpu().driver, "sandbox": None, "cases": [], "not_reached": [attack.name for attack in attacks]}
    for attack in attacks:
        if time.monotonic() - began > chosen.seconds:
            break
        report = examine(notebook(attack, which), which).to_json()
        kept = ("id", "verdict", "score", "points", "reason", "seconds")
        checks = [{key: check[key] for key in kept} for check in report["checks"]]
        for check, full in zip(checks, report["checks"], strict=True):
            if full["kind"] == "speedup":
                check["attempts"] = [len(r["attempts"]) for r in full["records"] if r["check"] == "speedup"]
        due = as_due(attack, checks)
        record["sandbox"] = report["sandbox"]
        record["cases"].append({"name": attack.name, "about": attack.about, "loses": attack.loses, "opens": attack.opens, "as_due": due, "seconds": report["seconds"], "checks": checks})
        record["not_reached"].remove(attack.name)
        record["seconds"] = round(time.monotonic() - began, 1)
        chosen.out.write_text(json.dumps(record, ensure_ascii=False, indent=1), encoding="utf-8")
        words = "; ".join(f"{check['id'][5:]} {check['verdict']}" for check in checks if check["verdict"] != "passed")
        print(f"{'ok' if due else 'XX'} {report['seconds']:6.1f} s  {attack.name}: {words or 'all passed'}", flush=True)
    wrong = [case["name"] for case in record["cases"] if not case["as_due"]]
    print(f"{len(record['cases'])} examined in {record.get('seconds', 0):.0f} s, not as due: {wrong or 'none'}, not reached: {record['not_reached'] or 'none'}")
    return 1 if wrong or record["not_reached"] else 0


if __name__ == "__main__":
    sys.exit(main())
