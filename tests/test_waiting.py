"""The process of the next submission begins while one is examined, fresh as any; and speed-ups are examined last."""

import json
from collections.abc import Iterator

import nbformat
import pytest

from launchlab.exam import family, sandbox
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
