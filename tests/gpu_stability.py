"""How steady the verdict of chapter 3's speed exercise is: 50 exams each of three candidates, on a real GPU.

usage: PYTHONPATH=grader/src python3 tests/gpu_stability.py OUT.json [seconds]

The reference must never fail; an eager impersonator and a graph with half of the nodes must
never pass. Every second group of five exams runs beside one busy process a CPU core. Each candidate's process
stays warm, and only the speed exercise is examined. OUT.json is written anew after each exam, and a run goes
on where an earlier one left it; ``seconds`` (550) bounds the run. Exit code 0, 1 if a verdict was wrong, 3 without a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import attack_files
from gpu_attacks import CHAPTER, FOLDER, SLOW, notebook

from launchlab.device import gpu
from launchlab.exam import examine, judge, sandbox
from launchlab.exam.kernel import Kernel
from launchlab.exam.process import Process
from launchlab.exam.report import CheckReport
from launchlab.manifest import chapter

CASES = {"reference": "keep_reference", "eager": "eager_impersonator", "half": "half_of_the_nodes"}
EXAMS, GROUP = 50, 5


def one(master: examine.Master, student: Process) -> dict:
    """One exam of the speed exercise: verdict, reason, seconds, and the bounds of what was measured."""
    test = master.tests[SLOW]
    report = CheckReport(test.id, test.kind, test.needs_gpu, test.points)
    examine._examine_one(test.source, report, student, master, gpu().name)
    found = {"verdict": report.verdict, "score": report.score, "seconds": report.seconds, "reason": report.reason}
    for record in report.records:
        if record["check"] == "speedup" and not record["states_differ"]:
            measured = judge.speedup(record["attempts"][-1], record["at_least"], record["ceiling"])
            found |= {key: measured[key] for key in ("low", "high", "bar", "best", "against_best")}
            found |= {"attempts": len(record["attempts"]), "disturbed": judge.disturbed(record)}
    return found


def summary(exams: list[dict]) -> dict:
    """Verdicts by candidate, quiet and busy."""
    found: dict = {}
    for exam in exams:
        key = f"{exam['case']}, {'busy' if exam['busy'] else 'quiet'}"
        counts = found.setdefault(key, {"exams": 0, "seconds": 0.0, "verdicts": {}})
        counts["exams"] += 1
        counts["seconds"] = round(counts["seconds"] + exam["seconds"], 1)
        counts["verdicts"][exam["verdict"]] = counts["verdicts"].get(exam["verdict"], 0) + 1
    return found


def main(out: Path, seconds: float) -> int:
    if gpu() is None:
        print("not run: needs a GPU")
        return 3
    began, which = time.monotonic(), chapter(CHAPTER)
    master = examine.Master.of(which)
    master.reference.load()
    students = {}
    for case, name in CASES.items():
        nb = notebook(attack_files.parse(FOLDER / f"{name}.txt"), which)
        make_kernel = partial(Kernel, given=which.solution.parent, sandboxed=sandbox.works())
        students[case] = Process(master.cells_to_run(nb), make_kernel, True)
    exams: list[dict] = json.loads(out.read_text(encoding="utf-8"))["exams"] if out.exists() else []
    known = {(exam["case"], exam["number"]) for exam in exams}
    load: list[subprocess.Popen] = []
    try:
        for number in range(EXAMS):
            busy = number // GROUP % 2 == 1
            if {(case, number) for case in CASES} <= known:
                continue
            if busy and not load:
                load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
            elif not busy:
                end(load)
            for case, student in students.items():
                if (case, number) not in known and time.monotonic() - began < seconds:
                    exams.append({"case": case, "number": number, "busy": busy} | one(master, student))
                    record = {"gpu": gpu().name, "cores": os.cpu_count(), "seconds": round(time.monotonic() - began, 1), "summary": summary(exams), "exams": exams}
                    out.write_text(json.dumps(record, ensure_ascii=False, indent=1), encoding="utf-8")
    finally:
        end(load)
        for student in students.values():
            student.close()
    for key, counts in summary(exams).items():
        print(f"{key}: {counts}")
    wrong = [exam for exam in exams if exam["verdict"] == ("failed" if exam["case"] == "reference" else "passed")]
    print(f"{len(exams)} of {3 * EXAMS} exams in {time.monotonic() - began:.0f} s, {len(wrong)} wrong")
    return 1 if wrong or len(exams) < 3 * EXAMS else 0


def end(load: list[subprocess.Popen]) -> None:
    for process in load:
        process.kill()
        process.wait()
    load.clear()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 550.0))
