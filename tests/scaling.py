"""The figures of grader/SCALING.md, from the records of real runs: never typed.

usage: python3 tests/scaling.py [--check]

Fills the page between its markers from tests/records/gpu_cluster.json (tests/gpu_cluster.py), gpu_solutions.json
(tests/gpu_solutions.py), gradebook_cost.json (tests/gradebook_cost.py) and cpu_cost.json (tests/gpu_cost.py without a GPU).
Where a record is missing, the page says so.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "grader" / "SCALING.md"
RECORDS = Path(__file__).parent / "records"
BEGIN, END = "<!-- figures: begin (made by tests/scaling.py) -->", "<!-- figures: end -->"
CLASS = 10_000
GPUS = (1, 2, 4, 8, 16, 32)


def load(name: str) -> dict | None:
    """A record, or None if that run has not been made."""
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def warm(cluster: dict) -> float:
    """Median seconds of an exam on one GPU, each worker's first one aside."""
    exams = cluster["classes"][0]["exams"]
    return statistics.median(exam["seconds"] for exam in exams[1:])


def every_chapter(solutions: dict) -> str:
    """A row: one exam of each chapter's solution, its reference started anew for it."""
    seconds = [told["seconds"] for told in solutions["chapters"]]
    gpus = f"{solutions['gpus']} {solutions['gpu']}" if solutions["gpus"] > 1 else f"one {solutions['gpu']}"
    return (
        f"| one exam of each of the {len(seconds)} chapters, each reference started anew ({gpus}) | {solutions['seconds']:.0f} s in all; "
        f"a chapter {min(seconds):.0f} to {max(seconds):.0f} s, in the middle {statistics.median(seconds):.0f} s |"
    )


def measured(cluster: dict | None, book: dict | None, solutions: dict | None) -> list[str]:
    lines = ["| measured | |", "|---|---|"]
    lines.append(every_chapter(solutions) if solutions else "| one exam of each chapter | not measured yet: `tests/gpu_solutions.py` needs a GPU |")
    if cluster is None:
        lines.append("| exams on one GPU and on two | not measured yet: `tests/gpu_cluster.py` needs a machine with two GPUs |")
    else:
        lines.append(f"| where | {cluster['gpu']}, {cluster['cores']} cores, {cluster['students']} copies of the solution of {cluster['chapter']} |")
        lines.append(f"| one exam, a worker's first aside | {warm(cluster):.1f} s |")
        lines.append(f"| a worker's first exam (reference started, kernels compiled) | {cluster['classes'][0]['exams'][0]['seconds']:.1f} s |")
        for one in cluster["classes"]:
            word = "GPU" if one["gpus"] == 1 else "GPUs"
            lines.append(f"| {one['gpus']} {word} | {one['warm_a_minute']:.1f} submissions a minute once warm; the whole class in {one['seconds']:.0f} s, the start of Ray and nbgrader with it |")
        if "warm_a_minute" in cluster.get("speedup", {}):
            lines.append(f"| two GPUs against one | {cluster['speedup']['warm_a_minute']:.2f} times the throughput; marks {'the same' if cluster['marks_equal'] else 'DIFFER'} |")
    if book is None:
        lines.append("| the grader's own work a submission | not measured yet: `tests/gradebook_cost.py` |")
    else:
        tenths = book["seconds_each_of_tenths"]
        lines.append(
            f"| the grader's own work a submission (SQLite, {book['students']} submissions, {book['cores']} cores) | {book['seconds_each']:.2f} s; "
            f"{tenths[0]:.2f} s in the first tenth of the class, {tenths[-1]:.2f} s in the last |"
        )
        lines.append(f"| on disk a submission | {book['kept_bytes_each'] / 1000:.0f} kB, and {book['gradebook_bytes'] / book['students'] / 1000:.1f} kB of the gradebook |")
        lines.append(f"| memory of the grader at its peak | {book['peak_memory_mib']} MiB |")
    return lines


def beside_plain(cost: dict | None) -> list[str]:
    """What the sealed exam takes, and plain nbgrader, which trusts the notebook and runs its experiments too."""
    if cost is None:
        return ["Beside plain nbgrader: not measured yet (`tests/gpu_cost.py`)."]
    lines = [f"| `nbgrader autograde` ({cost['cores']} cores, {cost['gpu'] or 'no GPU'}) | sealed exam | plain nbgrader |", "|---|---:|---:|"]
    seconds = {(run["chapter"], run["grader"], run["students"]): run["seconds"] for run in cost["runs"]}
    few, many = (choose(students for _, _, students in seconds) for choose in (min, max))
    for chapter in dict.fromkeys(chapter for chapter, _, _ in seconds):
        small, large = ([seconds[chapter, grader, students] for grader in ("sealed", "plain")] for students in (few, many))
        further = [(long - short) / (many - few) for short, long in zip(small, large, strict=True)]
        for what, (sealed, plain) in {f"class of {few}": small, f"class of {many}": large, "a further submission": further}.items():
            lines.append(f"| {chapter}, {what} | {sealed:.1f} s | {plain:.1f} s |")
    return lines


def projected(cluster: dict, book: dict) -> list[str]:
    exam, own = warm(cluster), book["seconds_each"]
    lines = [f"| GPUs | {CLASS:,} submissions in | limited by |", "|---:|---:|---|"]
    for gpus in GPUS:
        hours = CLASS * max(exam / gpus, own) / 3600
        lines.append(f"| {gpus} | {hours:.1f} h | {'the exams' if exam / gpus > own else 'the gradebook'} |")
    lines += ["", f"Beyond {exam / own:.0f} GPUs the one process that writes the gradebook is the limit ({3600 / own:,.0f} submissions an hour)."]
    return lines


def figures() -> str:
    cluster, book = load("gpu_cluster"), load("gradebook_cost")
    lines = [*measured(cluster, book, load("gpu_solutions")), "", *beside_plain(load("cpu_cost"))]
    if cluster and book:
        lines += ["", *projected(cluster, book)]
    return "\n".join(lines)


def updated(text: str) -> str:
    """The page with today's figures. ValueError if its markers are not there."""
    head, _, rest = text.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise ValueError(f"no markers in {PAGE}")
    return f"{head}{BEGIN}\n\n{figures()}\n\n{END}{tail}"


def main(check: bool) -> int:
    text = PAGE.read_text(encoding="utf-8")
    wanted = updated(text)
    if check:
        return int(text != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
