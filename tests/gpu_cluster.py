"""What a second GPU gives: a class graded by `launchlab grade --cluster` on one GPU of this machine, then on two.

usage: PYTHONPATH=grader/src python3 tests/gpu_cluster.py OUT.json [--students 8] [--gpus 1 2] [--seconds 150] [--chapter NAME]

Each class is copies of the chapter's solution, graded into a gradebook of its own by the real
command, with CUDA_VISIBLE_DEVICES naming the GPUs. OUT.json holds, for each number of GPUs: seconds
in all (the start of Ray and of nbgrader with them), when each worker joined and each exam ended, and
the rate once all workers are warm; and whether all have the same marks. Written anew after each
class. --gpus 0 tries it all without a GPU. Exit code 0 if all was graded alike, 1 if not, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from nbgrader.api import Gradebook

from launchlab.device import gpu
from launchlab.manifest import chapter

JOINED = re.compile(r"\] (\S+)（.*加入评分")
EXAMINED = re.compile(r"\] \[\d+/\d+\] (\S+)：([\d.]+) 秒，(\S+)")


def grade(name: str, students: int, gpus: int, seconds: float) -> dict:
    """Grade a class on ``gpus`` GPUs, within ``seconds``; what was seen, as JSON."""
    given = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    with tempfile.TemporaryDirectory(prefix="cluster-") as place:
        build = Path(place, "build")
        for number in range(students):
            folder = build / "submitted" / f"s{number:02d}" / name
            folder.mkdir(parents=True)
            shutil.copy(chapter(name).solution, folder)
        environment = os.environ | {
            "LAUNCHLAB_BUILD": str(build), "PYTHONUNBUFFERED": "1", "RAY_ADDRESS": "",
            "CUDA_VISIBLE_DEVICES": ",".join((given or [str(number) for number in range(gpus)])[:gpus]),
        }  # fmt: skip
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "launchlab", "grade", name, "--cluster"], env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        timer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        joined, exams, tail = {}, [], []
        for line in process.stdout:
            now = round(time.monotonic() - began, 2)
            tail = [*tail[-40:], line.rstrip()[:300]]
            if found := JOINED.search(line):
                joined[found[1]] = now
                print(f"  {now:6.1f} s  {found[1]} joined", flush=True)
            elif found := EXAMINED.search(line):
                exams.append({"student": found[1], "ended": now, "seconds": float(found[2]), "worker": found[3]})
                print(f"  {now:6.1f} s  {found[1]} examined in {found[2]} s by {found[3]}", flush=True)
        code = process.wait()
        timer.cancel()
        result = {
            "gpus": gpus,
            "students": students,
            "exit": code,
            "seconds": round(time.monotonic() - began, 2),
            "joined": joined,
            "exams": exams,
        }
        if code:
            result["tail"] = tail
            print("\n".join(tail[-15:]), flush=True)
        result |= rates(joined, exams, result["seconds"])
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in build.glob(f"reports/*/{name}.json")]
        result["sandbox"], result["gpu"] = (sorted({str(report[key]) for report in reports}) for key in ("sandbox", "gpu"))
        result["marks"] = marks(build, name)
        return result


def rates(joined: dict[str, float], exams: list[dict], total: float) -> dict:
    """Submissions a minute: of the whole run, of the exams from the first start on, and with all workers past their first exam."""
    if not exams:
        return {}
    ends = sorted(exam["ended"] for exam in exams)
    found = {
        "a_minute": round(60 * len(ends) / total, 2),
        "exams_a_minute": round(60 * len(ends) / (ends[-1] - min(joined.values())), 2),
    }
    first = {worker: min((exam["ended"] for exam in exams if exam["worker"] == worker), default=None) for worker in joined}
    if None not in first.values():
        warm = max(first.values())
        later = [end for end in ends if end > warm]
        if later:
            found |= {"warm_exams": len(later), "warm_a_minute": round(60 * len(later) / (later[-1] - warm), 2)}
    return found


def marks(build: Path, name: str) -> dict[str, dict[str, float | None]]:
    """Student -> test -> score, from the one gradebook; each test once."""
    if not (build / "gradebook.db").exists():
        return {}
    with Gradebook(f"sqlite:///{build / 'gradebook.db'}", "launchlab") as gradebook:
        return {
            submission.student_id: {
                grade.name: grade.auto_score for notebook in submission.notebooks for grade in notebook.grades
            }
            for submission in gradebook.assignment_submissions(name)
        }


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--students", type=int, default=8)
    arguments.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--seconds", type=float, default=150.0, help="for all classes together")
    arguments.add_argument("--chapter", default="03_cuda_graph_concepts")
    chosen = arguments.parse_args()
    device = gpu()
    if device is None and any(chosen.gpus):
        print("not run: needs a GPU")
        return 3
    began = time.monotonic()
    record = {
        "chapter": chosen.chapter, "gpu": device.name if device else None, "driver": device.driver if device else None,
        "cores": os.cpu_count(), "students": chosen.students, "classes": [],
    }  # fmt: skip
    for gpus in chosen.gpus:
        print(f"{chosen.students} copies of {chosen.chapter}, {gpus} GPU(s)", flush=True)
        try:
            found = grade(
                chapter(chosen.chapter).name, chosen.students, gpus, max(1.0, chosen.seconds - (time.monotonic() - began))
            )
        except Exception as error:  # noqa: BLE001 - the other class is still worth its time
            found = {"gpus": gpus, "error": f"{type(error).__name__}: {error}"}
        record["classes"].append(found)
        every = [score for one in record["classes"] for score in one.get("marks", {}).values()]
        record["all_graded"] = all(
            len(one.get("marks", {})) == chosen.students and len(one["exams"]) == chosen.students for one in record["classes"]
        )
        record["marks_equal"] = bool(every) and all(score == every[0] for score in every)
        whole = [one for one in record["classes"] if one.get("exit") == 0]
        if len(whole) > 1:
            record["speedup"] = {
                key: round(whole[-1][key] / whole[0][key], 2)
                for key in ("a_minute", "exams_a_minute", "warm_a_minute")
                if key in whole[0] and key in whole[-1]
            }
        chosen.out.write_text(json.dumps(record, ensure_ascii=False, indent=1), encoding="utf-8")
        print(
            f"  exit {found.get('exit')}, {found.get('seconds')} s; a minute: {found.get('a_minute')} in all, {found.get('warm_a_minute')} warm",
            flush=True,
        )
    print(
        f"all graded: {record['all_graded']}, marks equal: {record['marks_equal']}, speed-up {record.get('speedup')}, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return 0 if record["all_graded"] and record["marks_equal"] and all(one.get("exit") == 0 for one in record["classes"]) else 1


if __name__ == "__main__":
    sys.exit(main())
