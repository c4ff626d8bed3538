"""The manifest of the real course, and what a broken one says."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from launchlab import manifest, paths
from launchlab.manifest import chapter, chapters, modules

NAMES = [each.name for each in chapters()]


def test_thirty_chapters_in_four_modules():
    assert [each.number for each in chapters()] == list(range(1, 31))
    assert len({each.slug for each in chapters()}) == 30
    order = [each.module for each in chapters()]
    assert Counter(order) == {"basics": 8, "advanced": 8, "practice": 8, "tuning": 6}
    assert list(dict.fromkeys(order)) == [module.id for module in modules()]


@pytest.mark.parametrize("each", chapters(), ids=NAMES)
def test_chapter_is_whole(each):
    assert each.name == f"{each.number:02d}_{each.slug}"
    assert 15 <= each.minutes <= 180
    assert each.points > 0
    assert set(each.prerequisites) <= set(NAMES[: each.number - 1]), "prerequisites come earlier"
    assert each.needs.compute_capability >= (7, 5)
    assert 0 < each.needs.memory_gib <= 6
    assert each.needs.cuda >= (12, 0)


def test_learners_get_the_chapters_that_are_ready_and_no_draft():
    sources = {path.stem for path in paths.SOLUTIONS.glob("[0-9][0-9]_*/[0-9][0-9]_*.py")}
    ready = {each.name for each in chapters() if each.ready}
    assert ready <= sources
    assert {path.name for path in paths.COURSE.iterdir() if path.is_dir() and not path.name.startswith(".")} == ready


def test_files_of_a_chapter_bear_its_name():
    each = chapter(3)
    assert each.source == paths.ROOT / "solutions/03_cuda_graph_concepts/03_cuda_graph_concepts.py"
    assert each.solution == each.source.with_suffix(".ipynb")
    assert each.release == paths.ROOT / "course/03_cuda_graph_concepts/03_cuda_graph_concepts.ipynb"
    assert each.receipt == paths.ROOT / "grader/receipts/03_cuda_graph_concepts.json"


@pytest.mark.parametrize("word", [3, "3", "03", "03_cuda_graph_concepts", "cuda_graph_concepts", "03_cuda_graph_concepts/"])
def test_a_chapter_has_several_handles(word):
    assert chapter(word) is chapters()[2]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("cuda_grph_concept", "03_cuda_graph_concepts"),
        ("3_cuda_graph_concepts", "03_cuda_graph_concepts"),
        ("profile", "14_profiles"),
        ("31", "从 1 到 30"),
        ("0", "从 1 到 30"),
        ("²", "从 1 到 30"),
        ("", "从 1 到 30"),
    ],
)
def test_an_unknown_chapter_gets_a_hint(word, hint):
    with pytest.raises(manifest.UnknownChapter) as told:
        chapter(word)
    assert f"“{word}”" in str(told.value)
    assert hint in str(told.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "LAUNCHLAB_ROOT"),
        ("[needs", "不是合法的 TOML"),
        ('modules = []\n[needs]\n[[chapters]]\nnumber = 1\nslug = "a"\n', "缺失或多余的字段"),
        ('chapters = []\n[needs]\n[[modules]]\nid = "a"\ntitle = "b"\nabuot = "c"\n', "缺失或多余的字段"),
    ],
    ids=["none", "no TOML", "field missing", "field misspelt"],
)
def test_a_broken_manifest_is_explained(tmp_path, text, word):
    (tmp_path / "grader").mkdir()
    if text is not None:
        (tmp_path / "grader" / "chapters.toml").write_text(text)
    environment = {**os.environ, "LAUNCHLAB_ROOT": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-m", "launchlab", "check", "1"], env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert word in ended.stderr
    assert "Traceback" not in ended.stderr
