"""Examine every cheat and must-keep case of tests/attacks_gpu against the chapter it is for, on a real GPU.

usage: PYTHONPATH=grader/src python3 tests/gpu_attacks.py OUT.json [--seconds 270] [--one-by-one] [NAME …]

Cases in which nothing is timed run first, in several processes side by side; then those with a speed-up, or with a test that
is marked `alone`, one after the other, so that nobody disturbs a measurement. OUT.json holds a record for each: verdicts,
reasons and seconds, and what was left running or lying when it was over. Exit code 0 if all is as it is due, 1 if not, 3
without a GPU. Written anew after each case. A run goes on where an earlier one left it: what ended as due, and has not changed
since (answers, tests, the chapter's code), is not examined again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import attack_files
import nbformat
from earlier_run import earlier

from launchlab.device import free_memory, gpu
from launchlab.exam import limits, sandbox
from launchlab.exam.examine import Master, examine, lacking
from launchlab.grading.intake import graft
from launchlab.manifest import Chapter, chapter

FOLDER = Path(__file__).parent / "attacks_gpu"
CHAPTER = "03_cuda_graph_concepts"
CLOSED = ("failed", "crashed", "timed out")
SLOW = "test_make_replayer_speed"
GROUP = 4  # cases of one chapter that a process examines one after the other
CORES = 3  # for each process: examiner, learner and reference
KEPT = ("id", "verdict", "score", "points", "reason", "seconds")


@cache
def notebooks(name: str) -> tuple[nbformat.NotebookNode, nbformat.NotebookNode]:
    """The solution and the release of a chapter."""
    which = chapter(name)
    return nbformat.read(which.solution, as_version=4), nbformat.read(which.release, as_version=4)


def chapter_of(attack: attack_files.Attack) -> Chapter:
    return chapter(attack.chapter or CHAPTER)


def asked(attack: attack_files.Attack) -> dict[str, nbformat.NotebookNode]:
    """The test cells that are asked, by id. Who is after chapter 3's first exercise alone is not timed."""
    _, release = notebooks(chapter_of(attack).name)
    tests = {cell.metadata.nbgrader.grade_id: cell for cell in release.cells if cell.metadata.get("nbgrader", {}).get("grade")}
    if attack.tests:
        return {f"test_{name}": tests[f"test_{name}"] for name in attack.tests}
    return {name: cell for name, cell in tests.items() if attack.loses != ("capture_chain",) or name != SLOW}


def measures(attack: attack_files.Attack) -> bool:
    """Whether a test that is asked measures time: a speed-up, or one marked `alone`."""
    return any(cell.metadata.launchlab.kind == "speedup" or "alone" in cell.metadata.get("tags", ()) for cell in asked(attack).values())


def fingerprint(attack: attack_files.Attack) -> str:
    """See `attack_files.fingerprint`."""
    return attack_files.fingerprint(attack, chapter_of(attack), asked(attack))


def ended_as_due(attack: attack_files.Attack, case: dict) -> bool:
    """Whether a recorded case, of what the attack is now, ended as it is due."""
    return as_due(attack, case["checks"]) and len(case["checks"]) > 0 and not case.get("left_behind") and "examiner_failed" not in case


def notebook(attack: attack_files.Attack) -> nbformat.NotebookNode:
    """The submission of one attack as intake makes it, with the tests that are asked."""
    solution, release = notebooks(chapter_of(attack).name)
    handed_in = attack_files.submission(attack, solution, release)
    nb, _ = graft(json.dumps(handed_in).encode(), release)
    names = asked(attack)
    nb.cells = [cell for cell in nb.cells if not cell.metadata.get("nbgrader", {}).get("grade") or cell.metadata.nbgrader.grade_id in names]
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


def case(attack: attack_files.Attack) -> dict:
    """Examine one attack; its record."""
    which = chapter_of(attack)
    head = {
        "name": attack.name, "about": attack.about, "chapter": which.name, "loses": attack.loses, "opens": attack.opens,
        "of": fingerprint(attack), "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    try:
        report = examine(notebook(attack), which).to_json()
    except Exception:  # noqa: BLE001 - the examiner must not fall: if it does, that is what is found, and the others go on
        return head | {"seconds": 0.0, "checks": [], "examiner_failed": traceback.format_exc()[-2000:]}
    checks = [{key: check[key] for key in KEPT} for check in report["checks"]]
    for check, full in zip(checks, report["checks"], strict=True):
        if full["kind"] == "speedup":
            check["attempts"] = [len(r["attempts"]) for r in full["records"] if r["check"] == "speedup"]
    free = free_memory()
    return head | {"seconds": report["seconds"], "checks": checks, "left_behind": left_behind(), "gpu_free_mib": free and free[0] >> 20}


def left_behind() -> list[str]:
    """Folders and processes of exams of this process that are still there a moment later, those of the reference apart."""
    until = time.monotonic() + 10
    while (found := remains()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def remains() -> list[str]:
    mark = f"ll-{os.getpid()}-"
    kept = {master.reference.process.kernel.folder.name for master in Master._known.values() if master.reference.process.kernel}
    found = [path.name for path in Path(tempfile.gettempdir()).glob(f"{mark}*") if path.name not in kept]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            told = b" ".join((process / name).read_bytes() for name in ("cmdline", "environ")).replace(b"\0", b" ").decode(errors="replace")
            running = (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:  # gone, or another user's
            continue
        if running and mark in told and not any(name in told for name in kept):
            found.append(f"{process.name}: {told[:200]}")
    return found


def work(todo: multiprocessing.Queue, results: multiprocessing.Queue) -> None:
    """A worker: examine the attacks of one group of names after the other, and put their records into ``results``."""
    attacks = {attack.name: attack for attack in attack_files.load(FOLDER)}
    with contextlib.suppress(queue.Empty):
        while True:
            for name in todo.get(timeout=1):
                results.put(case(attacks[name]))
            Master.dismiss()


def groups(attacks: list[attack_files.Attack]) -> list[list[str]]:
    """Lists of at most `GROUP` names, each of one chapter, whose reference is then started once a list."""
    found = []
    for name in sorted({chapter_of(attack).name for attack in attacks}):
        names = [attack.name for attack in attacks if chapter_of(attack).name == name]
        found += [names[start : start + GROUP] for start in range(0, len(names), GROUP)]
    return found


class Run:
    """One run: the record, and the file that it is written to after each case."""

    def __init__(self, out: Path, attacks: list[attack_files.Attack], seconds: float):
        self.out, self.until, self.began = out, time.monotonic() + seconds, time.monotonic()
        self.scratch = tempfile.TemporaryDirectory(prefix="attacks-")
        sandboxed = "bubblewrap" if sandbox.works() else "none"
        here = {"gpu": gpu().name, "driver": gpu().driver, "sandbox": sandboxed, "limits": limits.told(sandbox.works())}
        self.known = {attack.name: attack for attack in attack_files.load(FOLDER)}
        past = [each for each in earlier(out, here).get("cases", ()) if each["name"] in self.known]
        cases = [each for each in past if each["of"] == fingerprint(self.known[each["name"]]) and self.due(each)]
        done = {each["name"] for each in cases}
        self.todo = [attack for attack in attacks if attack.name not in done]
        self.record = here | {"cases": cases, "not_reached": [attack.name for attack in self.todo]}

    def due(self, found: dict) -> bool:
        """Whether a case ended as it is due: told by what the attack is now, so it is kept nowhere."""
        return ended_as_due(self.known[found["name"]], found)

    def over(self) -> bool:
        return time.monotonic() > self.until

    def take(self, found: dict) -> None:
        """Add a case to the record, write it, and say so in a line."""
        self.record["cases"].append(found)
        self.record["cases"].sort(key=lambda each: each["name"])
        self.record["not_reached"].remove(found["name"])
        self.record["seconds"] = round(time.monotonic() - self.began, 1)
        self.out.write_text(json.dumps(self.record, ensure_ascii=False, indent=1), encoding="utf-8")
        words = "; ".join(f"{check['id'][5:]} {check['verdict']}" for check in found["checks"] if check["verdict"] != "passed")
        words = found.get("examiner_failed") or words or "all passed"
        left = f", left behind: {found['left_behind']}" if found.get("left_behind") else ""
        print(f"{self.record['seconds']:6.1f} s  {'ok' if self.due(found) else 'XX'} {found['seconds']:6.1f} s  {found['name']}: {words}{left}", flush=True)

    def side_by_side(self, attacks: list[attack_files.Attack]) -> None:
        """Examine attacks in which nothing is timed, in several processes."""
        context = multiprocessing.get_context("spawn")
        results, todo = context.Queue(), context.Queue()
        for names in groups(attacks):
            todo.put(names)
        # Some tests see whether a call comes back while the GPU is held up: that asks for cores to spare.
        most = max(1, len(os.sched_getaffinity(0)) // CORES)
        processes = [context.Process(target=work, args=(todo, results)) for _ in groups(attacks)[:most]]
        for number, process in enumerate(processes):
            # What an exam keeps for the next one lies in a folder of its own: nobody reads what another is just writing.
            os.environ["LAUNCHLAB_BUILD"] = f"{self.scratch.name}/{number}"
            process.start()
        os.environ.pop("LAUNCHLAB_BUILD", None)
        left = len(attacks)
        while left and not self.over():
            running = any(process.is_alive() for process in processes)
            try:
                self.take(results.get(timeout=0.5))
                left -= 1
            except queue.Empty:
                if not running:  # asked before the queue was: what a process put there has arrived
                    break
        for process in processes:
            process.join(timeout=30 if not left else 1)
            if process.is_alive():
                process.terminate()
                process.join()

    def one_by_one(self, attacks: list[attack_files.Attack]) -> None:
        """Examine attacks here, one after the other."""
        for attack in attacks:
            if self.over():
                break
            self.take(case(attack))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--seconds", type=float, default=270.0, help="begin no further case after so long")
    arguments.add_argument("--one-by-one", action="store_true", help="nothing side by side")
    chosen = arguments.parse_intermixed_args()
    if gpu() is None:
        print("not run: needs a GPU")
        return 3
    attacks = [attack for attack in attack_files.load(FOLDER) if not chosen.names or attack.name in chosen.names]
    run = Run(chosen.out, attacks, chosen.seconds)
    for which in {attack.chapter: chapter_of(attack) for attack in run.todo}.values():
        if lack := lacking(which):
            print(f"{which.name}: {lack}", flush=True)
    timed = [attack for attack in run.todo if chosen.one_by_one or measures(attack)]
    run.side_by_side([attack for attack in run.todo if attack not in timed])
    run.one_by_one(sorted(timed, key=lambda attack: chapter_of(attack).name, reverse=True))
    record = run.record
    wrong = [each["name"] for each in record["cases"] if not run.due(each)]
    print(f"{len(record['cases'])} examined in {record.get('seconds', 0):.0f} s, not as due: {wrong or 'none'}, not reached: {record['not_reached'] or 'none'}")
    return 1 if wrong or record["not_reached"] else 0


if __name__ == "__main__":
    sys.exit(main())
