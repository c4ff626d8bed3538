"""What the exam does for notebooks with TensorRT, as far as it shows without one: its log, its timings, its absence."""

import json
import re
from types import SimpleNamespace

import nbformat
import pytest

from launchlab import device, manifest
from launchlab.exam import examine as exam
from launchlab.exam import judge, sandbox
from launchlab.exam.kernel import Kernel

GPU = device.Gpu("Some GPU", "580.0", (13, 0), (9, 0), 8 << 30)


@pytest.fixture
def kernel(tmp_path):
    """Starts a student's kernel that is given the timings in ``tmp_path``."""
    made = Kernel(sandboxed=sandbox.works(), timing_cache=tmp_path / "timing")
    made.wait_ready()
    yield made
    made.close()


def solved(mini: manifest.Chapter, source: str, name: str) -> nbformat.NotebookNode:
    """The chapter's release with one exercise answered by ``source``."""
    nb = nbformat.read(mini.release, as_version=4)
    next(cell for cell in nb.cells if cell.id == f"solution-{name}").source = source
    return nb


REPORTS = """
from launchlab.lab import engines


def total_us(*args):
    engines._errors.append("Error Code 3: dimension 17 is out of range [1, 16]")
    {then}
"""


@pytest.mark.parametrize("then", ["return -1.0", "raise RuntimeError('no engine')"])
def test_the_last_error_of_tensorrt_stands_in_the_reason_without_its_numbers(mini, then):
    checks = {check.id: check for check in exam.examine(solved(mini, REPORTS.format(then=then), "total_us"), mini).checks}
    assert checks["test_total_us"].verdict == judge.FAILED
    told = checks["test_total_us"].reason
    assert "dimension # is out of range [#, #]" in told and not re.search("1[67]", told)
    # The exercises after it are not told of it.
    assert all("TensorRT" not in check.reason for name, check in checks.items() if name != "test_total_us")


def test_a_log_alone_costs_no_mark(mini):
    nb = nbformat.read(mini.solution, as_version=4)
    cell = next(cell for cell in nb.cells if cell.id == "solution-total_us")
    cell.source = "from launchlab.lab import engines\nengines._errors.append('noise')\nimport sys; print('noise', file=sys.stderr)\n" + cell.source
    check = next(check for check in exam.examine(nb, mini).checks if check.id == "test_total_us")
    assert (check.verdict, check.score) == (judge.PASSED, check.points)


def test_timings_are_lent_as_a_copy(kernel, tmp_path):
    code = "from pathlib import Path; p = Path.home() / '.cache/launchlab/timing'; p.is_dir() or 1 / 0; (p / 'x').write_text('changed'); print(p)"
    result = kernel.run_cell(code, 20)
    assert result.error is None, result
    assert (kernel.timing_cache / "x").read_text() == "changed" and not (tmp_path / "timing" / "x").exists()


def test_what_is_kept_of_a_cache_is_whole_and_takes_nothing_away(tmp_path):
    """Exams of two graders keep theirs in one place, while others read there: a file is replaced, never written in place."""
    mine, kept = tmp_path / "mine", tmp_path / "build" / "cupy"
    (mine / "below").mkdir(parents=True)
    kept.mkdir(parents=True)
    for path, text in ((mine / "a", "new"), (mine / "below" / "b", "new"), (kept / "a", "old"), (kept / "other", "old")):
        path.write_text(text)
    with open(kept / "a", encoding="utf-8") as reader:
        exam._keep(mine, kept)
        assert reader.read() == "old"
    assert {path.relative_to(kept).as_posix(): path.read_text() for path in kept.rglob("*") if path.is_file()} == {"a": "new", "below/b": "new", "other": "old"}
    assert [path.name for path in kept.parent.iterdir()] == ["cupy"]


def test_known_timings_are_found_by_the_next(tmp_path):
    (tmp_path / "timing").mkdir()
    (tmp_path / "timing" / "known.cache").write_bytes(b"1234")
    kernel = Kernel(sandboxed=sandbox.works(), timing_cache=tmp_path / "timing")
    try:
        kernel.wait_ready()
        result = kernel.run_cell("from pathlib import Path; import json; print(json.dumps([p.name for p in (Path.home() / '.cache/launchlab/timing').iterdir()]))", 20)
        assert json.loads(result.outputs[0].text) == ["known.cache"]
    finally:
        kernel.close()


@pytest.mark.parametrize(("gpu", "needs", "word"), [
    (None, {"tensorrt": None, "packages": ()}, "没有 GPU"),
    (GPU, {"tensorrt": (10, 6), "packages": ()}, "没有安装 no_tensorrt"),
    (GPU, {"tensorrt": None, "packages": ("no-such-package",)}, "没有安装 no_such_package"),
    (GPU, {"tensorrt": None, "packages": ()}, None),
])
def test_what_is_missing_is_named(monkeypatch, gpu, needs, word):
    monkeypatch.setattr(exam, "find_gpu", lambda: gpu)
    monkeypatch.setattr(exam, "TENSORRT", "no_tensorrt")
    found = exam.lacking(SimpleNamespace(needs=SimpleNamespace(**needs)))
    assert found is None if word is None else (word in found and "launchlab doctor" in found) or "换一台" in found
