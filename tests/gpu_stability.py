"""How far the verdict of chapter 3's speed exercise is to be trusted: many exams of candidates whose speed is known, on a real GPU.

usage: PYTHONPATH=grader/src python3 tests/gpu_stability.py OUT.json [CASE …] [--seconds 550] [--exams 200] [--gpus 1]

The reference must always get full marks; an eager impersonator and a graph with half of the nodes must never get any. Four
near misses are as fast as the bar asks and 10 % and 25 % less or more: above it anything but full marks is a false failure,
below it full marks are a false pass (half of the marks are due halfway to the bar). What is left open to a person is neither.
Every second group of five exams runs beside one busy process a CPU core. A candidate's process stays warm until it has passed
an exam, and only the speed exercise is examined. With several GPUs each has a process and CPU cores of its own, and takes its
share of the candidates. OUT.json is written anew after each exam, and a run goes on where an earlier one of this machine's kind
left it. Exit code 0 if no verdict was wrong and all exams were held, 1 otherwise, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import attack_files
from earlier_run import earlier
from gpu_attacks import CHAPTER, FOLDER, SLOW, notebook
from one_gpu import use

from launchlab.device import gpu
from launchlab.exam import examine, judge, sandbox
from launchlab.exam.process import Process
from launchlab.exam.report import CheckReport, versions
from launchlab.manifest import chapter

NEAR_MISS = Path(__file__).with_name("near_miss.txt")
BAR = 2.0  # of the exercise, where the reference gains four times or more
CASES = {"reference": "keep_reference", "eager": "eager_impersonator", "half": "half_of_the_nodes"}
NEAR = {"25 % below": 0.75, "10 % below": 0.9, "10 % above": 1.1, "25 % above": 1.25}
DUE = {"reference", "10 % above", "25 % above"}  # full marks; nobody else may have them
GROUP = 5


def candidate(case: str) -> attack_files.Attack:
    """The submission of one case."""
    if case in CASES:
        return attack_files.parse(FOLDER / f"{CASES[case]}.txt")
    attack = attack_files.parse(NEAR_MISS)
    attack.cells = [(place, name, code.replace("RATIO = 2.0", f"RATIO = {BAR * NEAR[case]}")) for place, name, code in attack.cells]
    return attack


def one(master: examine.Master, student: Process) -> dict:
    """One exam of the speed exercise: verdict, reason, seconds, and the bounds of what was measured."""
    test = master.tests[SLOW]
    report = CheckReport(test.id, test.kind, test.needs_gpu, test.points)
    examine._examine_one(test, report, student, master)
    found = {"verdict": report.verdict, "score": report.score, "of": report.points, "seconds": report.seconds, "reason": report.reason}
    for record in report.records:
        if record["check"] == "speedup" and not record["states_differ"]:
            measured = judge.speedup(record["attempts"][-1], record["at_least"], record["ceiling"])
            found |= {key: measured[key] for key in ("low", "high", "bar", "best", "against_best")}
            found |= {"attempts": len(record["attempts"]), "disturbed": judge.disturbed(record)}
    return found


def is_wrong(exam: dict) -> bool:
    """Whether an exam ended in a false failure or a false pass."""
    if exam["score"] is None:
        return False
    if exam["case"] in DUE:
        return exam["score"] < exam["of"]
    return exam["score"] == exam["of"] or (exam["case"] in CASES and exam["score"] > 0)


def summary(exams: list[dict]) -> dict:
    """By candidate, quiet and busy: exams, seconds, verdicts with their marks, and how many were wrong."""
    found: dict = {}
    for exam in exams:
        key = f"{exam['case']}, {'busy' if exam['busy'] else 'quiet'}"
        counts = found.setdefault(key, {"exams": 0, "seconds": 0.0, "verdicts": {}, "wrong": 0})
        counts["exams"] += 1
        counts["seconds"] = round(counts["seconds"] + exam["seconds"], 1)
        verdict = exam["verdict"] if exam["score"] is None else f"{exam['verdict']}, {exam['score']:g} of {exam['of']:g}"
        counts["verdicts"][verdict] = counts["verdicts"].get(verdict, 0) + 1
        counts["wrong"] += is_wrong(exam)
    return found


def work(number: int, cpus: list[int], todo: list[tuple[str, int]], until: float, results: multiprocessing.Queue) -> None:
    """Hold the exams ``todo`` (case, number) on GPU ``number`` of those that are visible, with ``cpus`` to run on."""
    use(number)
    os.sched_setaffinity(0, cpus)
    master = examine.Master.of(chapter(CHAPTER))
    master.reference.load()
    master.waiting.ahead = sandbox.works()
    make_kernel = partial(master.waiting.take, None)
    students: dict[str, Process] = {}
    load: list[subprocess.Popen] = []
    try:
        for case, exam in todo:
            if time.time() > until:
                break
            if is_busy(exam) and not load:
                load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cpus]
            elif not is_busy(exam):
                end(load)
            if case not in students or students[case].kernel is None:  # a party of its own: seconds of loading add up
                students[case] = Process(master.cells_to_run(notebook(candidate(case))), make_kernel, True, reference=master.reference.process)
            results.put({"case": case, "number": exam, "busy": is_busy(exam)} | one(master, students[case]))
    finally:
        end(load)
        for student in students.values():
            student.close()
        examine.Master.dismiss()


def is_busy(number: int) -> bool:
    """Whether an exam is held on a loaded machine."""
    return number // GROUP % 2 == 1


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join([*CASES, *NEAR])}; all, if none is named".replace("%", "%%"))
    arguments.add_argument("--seconds", type=float, default=550.0)
    arguments.add_argument("--exams", type=int, default=200)
    arguments.add_argument("--gpus", type=int, default=1)
    chosen = arguments.parse_intermixed_args()
    cases = chosen.cases or [*CASES, *NEAR]
    if unknown := set(cases) - {*CASES, *NEAR}:
        arguments.error(f"no case {sorted(unknown)}")
    if gpu() is None:
        print("not run: needs a GPU")
        return 3
    began, context, cpus = time.monotonic(), multiprocessing.get_context("spawn"), sorted(os.sched_getaffinity(0))
    each = len(cpus) // chosen.gpus
    here = {"gpu": gpu().name, "driver": gpu().driver, "versions": versions(), "cores": each}
    exams = earlier(chosen.out, here).get("exams", [])
    known = {(exam["case"], exam["number"]) for exam in exams}
    results, workers = context.Queue(), []
    for number in range(chosen.gpus):
        todo = [(case, exam) for exam in range(chosen.exams) for case in cases[number :: chosen.gpus] if (case, exam) not in known]
        workers.append(context.Process(target=work, args=(number, cpus[number * each : (number + 1) * each], todo, time.time() + chosen.seconds, results)))
        workers[-1].start()
    while True:
        over = not any(worker.is_alive() for worker in workers)  # asked before the queue is: what they put there has arrived
        try:
            exams.append(results.get(timeout=1))
        except queue.Empty:
            if over:
                break
            continue
        record = here | {"gpus": chosen.gpus, "date": datetime.now(UTC).isoformat(timespec="seconds"), "summary": summary(exams), "exams": exams}
        chosen.out.write_text(json.dumps(record, ensure_ascii=False, indent=1), encoding="utf-8")
    for key, counts in summary(exams).items():
        print(f"{key}: {counts}")
    wrong = sum(is_wrong(exam) for exam in exams)
    print(f"{len(exams)} of {len(cases) * chosen.exams} exams in {time.monotonic() - began:.0f} s, {wrong} wrong")
    return 1 if wrong or len(exams) < len(cases) * chosen.exams else 0


def end(load: list[subprocess.Popen]) -> None:
    for process in load:
        process.kill()
        process.wait()
    load.clear()


if __name__ == "__main__":
    sys.exit(main())
