"""What the sealed exam costs: seconds per submission of it and of plain nbgrader, for a class of one and of ten.

usage: PYTHONPATH=grader/src python3 tests/gpu_cost.py OUT.json [--students 1 10] [--chapter NAME] [--without-demos]
                                                           [--grader plain]

Both grade the same notebook, the solution of chapter 3 and of the tests' mini course (or of
--chapter), by ``nbgrader autograde`` in a process of its own: once with the course's
configuration, once with nbgrader's defaults. Without a GPU the sealed exam leaves open what needs
one, and plain nbgrader lets those cells fail. For the sealed exam OUT.json also tells the seconds of
its parts (tests/exam_parts.py). --without-demos drops the experiments, which the
sealed exam does not run, for both. --grader measures one of the two alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat

import launchlab
from launchlab.course.release import CONFIG
from launchlab.device import gpu

REPOSITORY = Path(__file__).resolve().parents[1]
MINI = Path(__file__).parent / "mini_course"
PLAIN = """
c = get_config()
c.CourseDirectory.course_id = "plain"
c.CourseDirectory.root = {root!r}
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.submitted_directory = "build/submitted"
c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__", "feedback", "*.py", ".*"]
c.CourseDirectory.db_url = "sqlite:///{root}/plain.db"
"""
# At the end of the course's configuration.
PARTS = """
import sys

sys.path.append({tests!r})
import exam_parts

exam_parts.begin({out!r})
"""


def environment(root: Path) -> dict[str, str]:
    found = {**os.environ, "LAUNCHLAB_ROOT": str(root), "PYTHONPATH": os.pathsep.join([str(Path(launchlab.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
    found["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])  # nbgrader starts alembic by name
    return found


def run(root: Path, *arguments: str) -> float:
    """Seconds of one command; its output is shown if it fails."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=root / "grader", env=environment(root), capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        raise SystemExit(f"{' '.join(arguments)}: exit {done.returncode}")
    return time.perf_counter() - began


def course(root: Path, name: str | None, without_demos: bool) -> str:
    """A course of one chapter in ``root``; returns the chapter's name."""
    if name is None:
        shutil.copytree(MINI, root)
        run(root, "-c", "import sys; from launchlab.course import build; sys.exit(build.main([], check=False))")
        name = "90_mini"
    else:
        for part in ("solutions", "course"):
            shutil.copytree(REPOSITORY / part / name, root / part / name)
        (root / "grader").mkdir()
        shutil.copy(REPOSITORY / "grader" / "chapters.toml", root / "grader")
    shutil.copy(CONFIG, root / "grader")
    if without_demos:
        path = root / "solutions" / name / f"{name}.ipynb"
        nb = nbformat.read(path, as_version=4)
        nb.cells = [cell for cell in nb.cells if "demo" not in cell.metadata.get("tags", [])]
        nbformat.write(nb, path)
    return name


def measure(name: str | None, students: int, sealed: bool, without_demos: bool) -> dict:
    """Grade a class of ``students`` copies of the solution, and say how long it took."""
    with tempfile.TemporaryDirectory(prefix="cost-") as place:
        root = Path(place, "c")
        name = course(root, name, without_demos)
        for number in range(students):
            folder = root / "build" / "submitted" / f"s{number:02d}" / name
            folder.mkdir(parents=True)
            shutil.copy(root / "solutions" / name / f"{name}.ipynb", folder)
        parts = Path(place, "parts.json")
        if sealed:
            with open(root / "grader" / CONFIG.name, "a", encoding="utf-8") as config:
                config.write(PARTS.format(tests=str(Path(__file__).parent), out=str(parts)))
        else:
            (root / "grader" / CONFIG.name).write_text(PLAIN.format(root=str(root)), encoding="utf-8")
            run(root, "-m", "nbgrader", "generate_assignment", name, "--create")
        seconds = run(root, "-m", "nbgrader", "autograde", name)
        graded = list(root.glob(f"{'build/' if sealed else ''}autograded/*/{name}/*.ipynb"))
        assert len(graded) == students, (len(graded), students)
        return {
            "chapter": name, "students": students, "grader": "sealed" if sealed else "plain", "seconds": round(seconds, 2),
            "seconds_each": round(seconds / students, 2),
        } | ({"parts": json.loads(parts.read_text(encoding="utf-8"))} if sealed else {})  # fmt: skip


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--students", type=int, nargs="+", default=[1, 10])
    arguments.add_argument("--chapter", action="append")
    arguments.add_argument("--without-demos", action="store_true")
    arguments.add_argument("--grader", choices=("sealed", "plain"))
    chosen = arguments.parse_args()
    names = [None if name == "90_mini" else name for name in chosen.chapter or ["90_mini", "03_cuda_graph_concepts"]]
    record = {"gpu": gpu().name if gpu() else None, "cores": os.cpu_count(), "without_demos": chosen.without_demos, "runs": [], "added": []}
    for name in names:
        totals = {}
        for students in chosen.students:
            for sealed in [True, False] if chosen.grader is None else [chosen.grader == "sealed"]:
                found = measure(name, students, sealed, chosen.without_demos)
                totals[students, sealed] = found["seconds"]
                record["runs"].append(found)
                print(f"{found['chapter']}, class of {students}, {found['grader']}: {found['seconds']:.1f} s, {found['seconds_each']:.1f} s each", flush=True)
                chosen.out.write_text(json.dumps(record, ensure_ascii=False, indent=1), encoding="utf-8")
        if chosen.grader is not None:
            continue
        few, many = min(chosen.students), max(chosen.students)
        added = {"chapter": found["chapter"], "first": round(totals[few, True] - totals[few, False], 2)}
        if many > few:
            each = {sealed: (totals[many, sealed] - totals[few, sealed]) / (many - few) for sealed in (True, False)}
            added |= {"each_further": round(each[True] - each[False], 2), "sealed_each": round(each[True], 2), "plain_each": round(each[False], 2)}
        record["added"].append(added)
        print(f"the sealed exam adds {added}", flush=True)
        chosen.out.write_text(json.dumps(record, ensure_ascii=False, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
