"""The process of the next submission begins while one is examined, fresh as any; and speed-ups are examined last."""

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from launchlab.exam import examine as engine
from launchlab.exam import family, party, process, remote, sandbox, timing
from launchlab.exam.examine import Master, Reference, examine
from launchlab.exam.kernel import Kernel
from launchlab.exam.waiting import Waiting
from launchlab.manifest import Chapter

TELL = """
import os, sys
print([name for name in ("numpy", "yaml") if name in sys.modules], sorted(os.listdir()), "_import" in globals())
"""


def make() -> Kernel:
    return Kernel(sandboxed=sandbox.works(), imports=["import numpy as np", "import no_such_module"])


@pytest.fixture
def ahead() -> Iterator[Waiting]:
    """Kernels that import NumPy first, the next begun meanwhile."""
    made = Waiting(make, least_cpus=1)
    made.ahead = True
    yield made
    made.close()


def stopped(kernel: Kernel) -> bool:
    """Whether all that its keeper started has come to rest."""
    members = family.family(kernel.process.pid)[2:]
    return bool(members) and all(family.is_stopped(pid) for pid in members)


def told(kernel: Kernel) -> str:
    kernel.wait_ready()
    result = kernel.run_cell(TELL, 20)
    assert result.error is None, result
    return result.outputs[0]["text"].strip()


def test_each_is_given_out_once_with_its_own_files_alone(ahead, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
    first = ahead.take(tmp_path / "a")
    following = ahead._kernel
    try:
        assert told(first) == "['numpy'] ['a.txt'] False"
        second = ahead.take(tmp_path / "b")
        assert second is following and second.process.pid != first.process.pid
        assert told(second) == "['numpy'] ['b.txt'] False"
    finally:
        first.close()
        following.close()


def test_a_file_cannot_stand_in_for_a_module_of_the_given_cells(ahead, tmp_path):
    (tmp_path / "numpy.py").write_text("raise SystemExit")
    (tmp_path / "yaml.py").write_text("mine = 1")
    kernel = ahead.take(tmp_path)
    try:
        kernel.wait_ready()
        result = kernel.run_cell("import yaml, numpy; print(yaml.mine, numpy.arange(2).sum())", 20)
        assert result.error is None and result.outputs[0]["text"] == "1 1\n", result
    finally:
        kernel.close()


def test_it_sleeps_while_something_is_timed(ahead):
    taken = ahead.take(None)
    following = ahead._kernel
    try:
        with ahead.stopped():
            assert stopped(following) and not stopped(taken)
        assert not stopped(following)
        assert "numpy" in told(ahead.take(None))
    finally:
        taken.close()
        following.close()


def test_it_is_given_out_awake_while_something_is_timed_and_none_begins_then(ahead):
    first = ahead.take(None)
    try:
        with ahead.stopped():
            second = ahead.take(None)
            try:
                assert told(second) == "['numpy'] [] False"
                assert ahead._kernel is None
            finally:
                second.close()
    finally:
        first.close()


HELD = """
from launchlab.exam import examine, timing
try:
    with timing.exclusive(examine.identity()):
        free = True
except timing.GpuBusy:
    free = False
check.that(not free, why="free")
check.equal(student.longest_path([[0, 1]]), 2, why="two")
### BEGIN HIDDEN TESTS
### END HIDDEN TESTS
"""


@pytest.fixture
def own_gpu(monkeypatch) -> Iterator[str]:
    """A GPU of which no other test knows: its lock is this test's alone."""
    name = f"of-the-test-{os.getpid()}"
    monkeypatch.setattr(engine, "identity", lambda: name)
    yield name
    (Path(tempfile.gettempdir()) / f"launchlab-{name}.lock").unlink(missing_ok=True)


def timed(mini: Chapter, tags: list[str], source: str = "") -> nbformat.NotebookNode:
    """The mini course's solution, whose last test has such tags and, if it is given, another source."""
    nb = nbformat.read(mini.solution, as_version=4)
    cell = next(cell for cell in nb.cells if cell.id == "test-longest_path")
    cell.metadata.tags = tags
    cell.source = source or cell.source
    nbformat.write(nb, mini.solution)
    return nb


def test_who_measures_time_keeps_other_exams_from_measuring(mini, own_gpu, monkeypatch):
    monkeypatch.setattr(timing, "LOCK_SECONDS", 0.2)
    for tags, verdict in (([], "failed"), (["alone"], "passed")):
        checks = {check.id: check for check in examine(timed(mini, tags, HELD), mini).checks}
        assert checks["test_longest_path"].verdict == verdict
    Master.dismiss()


def test_waiting_for_the_gpu_is_not_the_learners_time(mini, own_gpu, monkeypatch):
    monkeypatch.setattr(engine, "EXERCISE_SECONDS", 3.0)
    nb, over, held = timed(mini, ["alone"]), threading.Event(), threading.Event()

    def other_exam() -> None:
        with timing.exclusive(own_gpu):
            held.set()
            over.wait(30)

    other = threading.Thread(target=other_exam)
    other.start()
    threading.Timer(6.0, over.set).start()  # twice as long as an exercise has
    try:
        assert held.wait(5)
        checks = {check.id: check for check in examine(nb, mini).checks}
        assert checks["test_longest_path"].verdict == "passed" and checks["test_longest_path"].seconds > 3.0
        monkeypatch.setattr(timing, "LOCK_SECONDS", 0.2)
        over.clear()
        other.join()
        held.clear()
        other = threading.Thread(target=other_exam)
        other.start()
        assert held.wait(5)
        check = next(check for check in examine(nb, mini).checks if check.id == "test_longest_path")
        assert (check.verdict, check.score) == ("inconclusive", None) and "占着 GPU" in check.reason
    finally:
        over.set()
        other.join()
        Master.dismiss()


SLOW_REFERENCE = """
reference.define("import time\\ndef build():\\n    time.sleep({0})\\n", "build")()
student.define("import time\\ndef answer():\\n    time.sleep({1})\\n", "answer")()
check.equal(student.longest_path([[0, 1]]), 2, why="two")
### BEGIN HIDDEN TESTS
### END HIDDEN TESTS
"""


@pytest.mark.parametrize(("reference", "learner", "verdict"), [(5, 0, "passed"), (0, 5, "timed out"), (2, 5, "timed out"), (9, 0, "inconclusive")])
def test_on_a_slow_machine_the_reference_takes_its_time_and_none_of_the_learners(mini, monkeypatch, reference, learner, verdict):
    monkeypatch.setattr(engine, "EXERCISE_SECONDS", 3.0)
    monkeypatch.setattr(remote, "BUILD_SECONDS", 4.0)  # of a call
    monkeypatch.setattr(party, "REFERENCE_SECONDS", 7.0)
    try:
        checks = {check.id: check for check in examine(timed(mini, [], SLOW_REFERENCE.format(reference, learner)), mini).checks}
    finally:
        Master.dismiss()
    assert checks["test_longest_path"].verdict == verdict
    assert {check.verdict for name, check in checks.items() if name != "test_longest_path"} == {"passed"}


def sleeps(seconds: float, **kind) -> process.Process:
    """A process whose one cell sleeps, loaded."""
    made = process.Process([process.Cell(0, f"import time; time.sleep({seconds})")], lambda: Kernel(sandboxed=sandbox.works()), False, **kind)
    try:
        made.load()
    finally:
        made.close()
    return made


def test_how_long_a_learners_cell_may_take_depends_on_the_references(monkeypatch):
    monkeypatch.setattr(process, "CELL_SECONDS", 1.0)
    reference = sleeps(2, trusted=True)
    assert not reference.deadly
    assert set(sleeps(2).deadly) == {0}
    assert not sleeps(4, reference=reference).deadly
    assert set(sleeps(12, reference=reference).deadly) == {0}


def test_one_that_died_is_not_given_out(ahead):
    taken = ahead.take(None)
    following = ahead._kernel
    taken.close()
    following.process.kill()
    following.process.wait()
    another = ahead.take(None)
    try:
        assert another is not following and not following.folder.exists()
        assert "numpy" in told(another)
    finally:
        another.close()


def test_none_begins_where_it_would_cost_the_exam_time():
    busy = Waiting(make, least_cpus=10_000)
    busy.ahead = True
    taken = busy.take(None)
    taken.close()
    assert busy._kernel is None


@pytest.mark.skipif(not sandbox.works(), reason="bubblewrap is not installed, or may not be used here")
def test_the_learners_process_comes_up_while_the_reference_is_loaded(mini, monkeypatch):
    """It has run nothing of the learner's then, and is the one that runs it; no other begins where no other follows."""
    seen = []
    load, run_cell = Reference.load, Kernel.run_cell

    def loading(self):
        waiting = self._master.waiting._kernel
        load(self)
        seen.append((waiting.process.pid, waiting.own, [each for each, _ in ran if each == waiting.process.pid]))

    ran = []

    def running(self, code, *arguments, **options):
        ran.append((self.process.pid, code))
        return run_cell(self, code, *arguments, **options)

    monkeypatch.setattr(Reference, "load", loading)
    monkeypatch.setattr(Kernel, "run_cell", running)
    monkeypatch.setattr("launchlab.exam.waiting._cpus", lambda: 4)
    try:
        report = examine(nbformat.read(mini.solution, as_version=4), mini, files=mini.release.parent)
        assert Master.of(mini).waiting._kernel is None
    finally:
        Master.dismiss()
    assert report.score == report.max
    [(pid, own, before)] = seen
    assert own is None and before == [] and pid in [each for each, _ in ran]


def with_a_speedup_first(chapter: Chapter) -> nbformat.NotebookNode:
    """The mini chapter's solution, its first test a speed-up by name, which passes only if the two others were examined before it."""
    nb = nbformat.read(chapter.solution, as_version=4)
    for cell in nb.cells:
        if cell.id == "solution-total_us":
            cell.source += "\n\ncalls = []\n\ndef call():\n    calls.append(1)\n    return len(calls)\n"
        elif cell.id.startswith("test-"):
            first = cell.id == "test-total_us"
            cell.metadata.launchlab.kind = "speedup" if first else "structure"
            cell.source = f"check.that(student.call() {'== 3' if first else '< 3'}, why='次序不对。')"
    chapter.solution.write_text(json.dumps(nb), encoding="utf-8")
    return nb


def test_speedups_are_examined_last_and_told_in_their_place(mini):
    nb = with_a_speedup_first(mini)
    try:
        report = examine(nb, mini, of_class=True)
    finally:
        Master.dismiss()
    assert [(check.id, check.verdict) for check in report.checks] == [(f"test_{name}", "passed") for name in ("total_us", "advance", "longest_path")]
