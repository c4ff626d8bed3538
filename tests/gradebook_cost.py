"""What the grader itself costs for each submission, the exam aside: intake, nbgrader's own steps, gradebook, files.

usage: PYTHONPATH=grader/src python3 tests/gradebook_cost.py OUT.json [--students 1000] [--chapter NAME]

On a cluster this is what one process does alone, one submission after the other, and so what no
number of GPUs makes faster. The solution is examined once, its outcome is laid out for each student
as if a cluster had held the exam, and plain ``nbgrader autograde`` takes them all into one gradebook.
OUT.json holds the seconds a submission of each tenth of the class (do they grow?), the bytes on
disk, and the peak of memory. Needs no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def lay_out(name: str, students: int) -> int:
    """Hand in ``students`` copies of the solution, each with the outcome of one exam; returns an outcome's bytes."""
    import nbformat

    from launchlab.course.release import pristine
    from launchlab.exam.examine import Master, examine
    from launchlab.grading import outcome
    from launchlab.grading.intake import graft
    from launchlab.manifest import chapter
    from launchlab.paths import BUILD

    which = chapter(name)
    nb, _ = graft(which.solution.read_bytes(), pristine(which))
    folder = BUILD / "submitted" / "s00000" / which.name
    for number in range(students):
        folder = BUILD / "submitted" / f"s{number:05d}" / which.name
        folder.mkdir(parents=True)
        shutil.copy(which.solution, folder)
    key = outcome.key_of(nbformat.from_dict(nb), which, folder)
    report = examine(nb, which, files=folder)
    Master.dismiss()
    held = outcome.Outcome.of(key, report, nb)
    for number in range(students):
        outcome.keep(held, f"s{number:05d}")
    return outcome.place("s00000", which.name).stat().st_size


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--students", type=int, default=1000)
    arguments.add_argument("--chapter", default="03_cuda_graph_concepts")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="book-") as place:
        build = Path(place, "build")
        os.environ["LAUNCHLAB_BUILD"] = str(build)  # before anything of launchlab's is imported
        size = lay_out(chosen.chapter, chosen.students)
        began = time.time()
        with open(Path(place, "log"), "w") as log:
            code = subprocess.call([sys.executable, "-m", "launchlab", "grade", chosen.chapter], stdout=log, stderr=subprocess.STDOUT)
        total = time.time() - began
        if code:
            print(Path(place, "log").read_text(encoding="utf-8")[-3000:])
            return 1
        ended = sorted(path.stat().st_mtime for path in build.glob("reports/*/*.json"))
        assert len(ended) == chosen.students and not list(build.glob("exams/*/*.json")), "each is graded, and from its outcome"
        marks = [0, *range(chosen.students // 10, chosen.students + 1, chosen.students // 10)] if chosen.students >= 20 else [0, chosen.students]
        record = {
            "chapter": chosen.chapter, "cores": os.cpu_count(), "students": chosen.students, "seconds": round(total, 1),
            "until_the_first": round(ended[0] - began, 2), "seconds_each": round((ended[-1] - ended[0]) / (len(ended) - 1), 4),
            "seconds_each_of_tenths": [round((ended[b - 1] - ended[max(a - 1, 0)]) / (b - max(a, 1)), 4) for a, b in itertools.pairwise(marks)],
            "outcome_bytes": size, "gradebook_bytes": (build / "gradebook.db").stat().st_size,
            "kept_bytes_each": round(sum(path.stat().st_size for folder in ("autograded", "reports") for path in (build / folder).rglob("*") if path.is_file()) / chosen.students),
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10,
        }  # fmt: skip
        chosen.out.write_text(json.dumps(record, indent=1), encoding="utf-8")
        print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
