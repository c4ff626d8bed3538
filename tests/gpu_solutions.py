"""Grade the solutions of all chapters in one go, on the GPUs of this machine, one exam a GPU at a time.

usage: PYTHONPATH=grader/src python3 tests/gpu_solutions.py OUT.json [CHAPTER …] [--seconds 900] [--gpus 1]

Each GPU has a process of its own, which takes the next chapter when it has done one; one that dies costs the chapter that it
had taken. OUT.json holds score and seconds of each chapter and of the whole, and is written anew after each. A run goes on
where an earlier one left it: what has full marks there is not graded again. Exit code 0 if all got full marks, 1 if not, 3
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

import nbformat
from earlier_run import earlier
from one_gpu import use

from launchlab.device import gpu
from launchlab.exam.examine import examine
from launchlab.exam.report import versions
from launchlab.manifest import chapter, chapters


def problems(record: dict) -> list[str]:
    """What a record does not show, though it is to: full marks in every chapter of the course."""
    found = [f"no {key}" for key in ("gpu", "driver", "date", "versions", "seconds") if not record.get(key)]
    graded = {told["chapter"]: told for told in record.get("chapters", [])}
    for each in chapters():
        told = graded.get(each.name)
        if told is None:
            found.append(f"{each.name}: not graded")
        elif "error" in told:
            found.append(f"{each.name}: {told['error']}")
        elif told["score"] != told["max"] or told["max"] != each.points:
            found.append(f"{each.name}: {told['score']} of {told['max']}")
    return found


def graded(name: str) -> dict:
    """The exam of one solution: score, max, seconds, and what any test lost, with its reason."""
    which, began = chapter(name), time.monotonic()
    try:
        report = examine(nbformat.read(which.solution, as_version=4), which)
    except Exception as error:  # noqa: BLE001 - the other chapters are graded all the same
        traceback.print_exc()
        return {"chapter": which.name, "error": f"{type(error).__name__}: {error}"[:500], "seconds": round(time.monotonic() - began, 1)}
    lost = {check.id: f"{check.verdict}: {check.reason}" for check in report.checks if check.score != check.points}
    score, most = (sum(value or 0 for value in values) for values in zip(*((check.score, check.points) for check in report.checks), strict=True))
    return {"chapter": which.name, "score": score, "max": most, "seconds": round(time.monotonic() - began, 1), "lost": lost}


def worker(number: int, todo: multiprocessing.Queue, done: multiprocessing.Queue) -> None:
    """Grade chapters on GPU ``number`` of those that are visible, until none is left."""
    use(number)
    while True:
        try:
            name = todo.get(timeout=1)
        except queue.Empty:
            return
        done.put(graded(name) | {"gpu": number})


def with_full_marks(record: dict) -> dict:
    """Of an earlier record only the chapters with full marks: the others are graded again."""
    kept = [told for told in record["chapters"] if "error" not in told and told["score"] == told["max"]]
    return record | {"chapters": kept}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("names", nargs="*", metavar="CHAPTER")
    arguments.add_argument("--seconds", type=float, default=900.0, help="take no further result after so long")
    arguments.add_argument("--gpus", type=int, default=1)
    chosen = arguments.parse_args()
    if gpu() is None:
        print("not run: needs a GPU")
        return 3
    began, context = time.monotonic(), multiprocessing.get_context("spawn")
    here = {"gpu": gpu().name, "gpus": chosen.gpus, "driver": gpu().driver, "versions": versions()}
    now = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": 0.0, "chapters": []}
    record = with_full_marks(here | now | earlier(chosen.out, here))
    before, known = record["seconds"], {told["chapter"] for told in record["chapters"]}
    names = [chapter(name).name for name in chosen.names] or [each.name for each in chapters()]
    names = [name for name in names if name not in known]
    todo, done = context.Queue(), context.Queue()
    for name in names:
        todo.put(name)
    workers = [context.Process(target=worker, args=(number, todo, done)) for number in range(chosen.gpus)]
    for each in workers:
        each.start()
    waiting = len(names)
    while waiting and time.monotonic() < began + chosen.seconds:
        over = all(each.exitcode == 0 for each in workers)  # asked before the queue is: what they put there has arrived
        try:
            told = done.get(timeout=1)
        except queue.Empty:
            if over:
                break
            for number, each in enumerate(workers):
                if each.exitcode:  # by a signal, or an error outside of the exams
                    print(f"the process of GPU {number} ended with {each.exitcode}: another one goes on", flush=True)
                    waiting -= 1
                    workers[number] = context.Process(target=worker, args=(number, todo, done))
                    workers[number].start()
            continue
        waiting -= 1
        record["chapters"].append(told)
        record["seconds"] = round(before + time.monotonic() - began, 1)
        chosen.out.write_text(json.dumps(record, ensure_ascii=False, indent=1), encoding="utf-8")
        found = told.get("error") or f"{told['score']} of {told['max']}"
        print(f"{record['seconds']:6.1f} s  {told['chapter']}: {found} in {told['seconds']} s {told.get('lost') or ''}", flush=True)
    for each in workers:
        each.terminate()
        each.join()
    wrong = [told["chapter"] for told in record["chapters"] if "error" in told or told["score"] != told["max"]]
    missing = sorted(set(names) - {told["chapter"] for told in record["chapters"]})
    print(f"{len(record['chapters'])} of {len(known) + len(names)} graded, without full marks: {wrong or 'none'}, not reached: {missing or 'none'}")
    return 1 if wrong or missing else 0


if __name__ == "__main__":
    sys.exit(main())
