"""Every solution runs here from top to bottom: without a GPU all that needs none, with one everything."""

import nbformat
import pytest
from nbgrader.utils import is_grade

from launchlab.course import source
from launchlab.course.execute import CellFailed, execute
from launchlab.device import has_gpu
from launchlab.manifest import chapters

READY = [pytest.param(each, id=each.name) for each in chapters() if each.ready]


@pytest.mark.parametrize("chapter", READY)
def test_solution_runs(chapter):
    done = execute(nbformat.read(chapter.solution, as_version=4), chapter.source.parent)
    code = [cell for cell in done.nb.cells if cell.cell_type == "code"]
    gpu = [cell.id for cell in code if "gpu" in source.tags(cell)]
    assert done.skipped == ([] if has_gpu() else gpu)
    assert set(done.seconds) == {cell.id for cell in code} - set(done.skipped)
    for cell in code:
        if is_grade(cell) and cell.id not in done.skipped:
            assert "✓" in "".join(output.get("text", "") for output in cell.outputs), cell.id


def test_mini_chapter_runs_and_leaves_its_folder_alone(mini):
    before = sorted(mini.source.parent.iterdir())
    done = execute(nbformat.read(mini.solution, as_version=4), mini.source.parent)
    assert sorted(mini.source.parent.iterdir()) == before
    table = next(cell for cell in done.nb.cells if "demo" in source.tags(cell))
    assert "平均每个 5.05 µs" in table.outputs[0].text


@pytest.mark.skipif(has_gpu(), reason="这台机器有 GPU")
def test_gpu_cells_say_that_they_were_skipped(mini):
    done = execute(nbformat.read(mini.solution, as_version=4), mini.source.parent)
    cell = next(cell for cell in done.nb.cells if "gpu" in source.tags(cell))
    assert done.skipped == [cell.id]
    assert "需要 GPU" in cell.outputs[0].text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def f():\n    return missing\n\n\nf()", "NameError: name 'missing' is not defined"),
        ("import os\nos._exit(3)", "内核进程在这个单元里退出了"),
    ],
    ids=["error", "dead kernel"],
)
def test_failing_cell_is_named(mini, code, words):
    nb = nbformat.read(mini.solution, as_version=4)
    nb.cells[4].source = code
    with pytest.raises(CellFailed) as failure:
        execute(nb, mini.source.parent)
    assert f"第 5 个单元（{code.splitlines()[0]}）" in str(failure.value)
    assert words in str(failure.value)
    assert "\x1b" not in str(failure.value)
