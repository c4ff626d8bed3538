"""The pages of the reading edition, as Sphinx reads them: two notebooks a chapter, and Markdown around them.

A reader sees what students see: instructor's prose and hidden tests are left out, and so is what hidden tests printed.
"""

from __future__ import annotations

import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from jinja2 import Environment, PackageLoader, StrictUndefined
from nbconvert.preprocessors import TagRemovePreprocessor
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_output
from nbgrader.preprocessors import ClearHiddenTests

from launchlab import manifest, paths
from launchlab.course import receipt
from launchlab.course.release import pristine, settings
from launchlab.exam import judge
from launchlab.exam.show import WORDS
from launchlab.lab.prose import FIGURES
from launchlab.manifest import Chapter

RELEASE = "/release"
PLATFORMS = paths.GRADER / "PLATFORMS.md"
_MARKS = re.compile(r"^([ \t]*)### BEGIN SOLUTION: (.+)\n|^[ \t]*### END SOLUTION\n?", re.MULTILINE)
_SHOWN = {"cuda-bindings": "cuda-bindings", "cupy-cuda12x": "CuPy", "cupy-cuda13x": "CuPy", "tensorrt-cu12-bindings": "TensorRT", "tensorrt-cu13-bindings": "TensorRT"}
# What the theme says, and Sphinx's own Chinese lacks.
_WORDS = {"On this page": "本页目录", "Next": "下一页", "Previous": "上一页", "Home": "首页", "Back to top": "回到顶部"}


def read() -> list[Chapter]:
    """The chapters that have pages of their own: those that are recorded."""
    return [each for each in manifest.chapters() if each.ready]


def write(folder: Path) -> None:
    """Write everything that Sphinx reads to ``folder``, which does not exist yet."""
    templates = Environment(loader=PackageLoader("launchlab.site"), undefined=StrictUndefined, trim_blocks=True, autoescape=True)
    folder.mkdir(parents=True)
    for chapter in read():
        proof = receipt.load(chapter)
        home = folder / chapter.name
        home.mkdir()
        nbformat.write(_solution(chapter, proof, templates), home / "solution.ipynb")
        nbformat.write(_release(chapter, proof, templates), home / "release.ipynb")
    for chapter in manifest.chapters():
        if not chapter.ready:
            text = templates.get_template("planned.md").render(chapter=chapter, before=_titles(chapter))
            (folder / f"{chapter.name}.md").write_text(text, encoding="utf-8")
    groups = [(module, [each for each in manifest.chapters() if each.module == module.id]) for module in manifest.modules()]
    (folder / "index.md").write_text(templates.get_template("index.md").render(groups=groups), encoding="utf-8")
    shutil.copyfile(PLATFORMS, folder / "platforms.md")
    _write_words(folder / "locales" / "zh_CN" / "LC_MESSAGES")


def _write_words(folder: Path) -> None:
    catalog = Catalog(locale="zh_CN")
    for english, chinese in _WORDS.items():
        catalog.add(english, chinese)
    folder.mkdir(parents=True)
    with open(folder / "sphinx.mo", "wb") as file:
        write_mo(file, catalog)


def _solution(chapter: Chapter, proof: dict[str, Any], templates: Environment) -> NotebookNode:
    nb = nbformat.read(chapter.solution, as_version=4)
    recorded = receipt.vouches(proof, chapter, nb)
    verdicts = {check["id"]: check for check in proof["checks"]}
    nb, _ = TagRemovePreprocessor(enabled=True, remove_cell_tags={"instructor"}).preprocess(nb, {})
    sources = {cell.id: cell.source for cell in nb.cells}
    nb, _ = ClearHiddenTests(config=settings()).preprocess(nb, {})
    for cell in nb.cells:
        if cell.cell_type == "code" and cell.source != sources[cell.id]:
            cell.outputs = [new_output("display_data", data={"text/markdown": _verdict(verdicts[cell.metadata.nbgrader.grade_id])})]
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(FIGURES, None)  # for receipts; a reader has them in the text beside it
        cell.source = _MARKS.sub(lambda mark: f"{mark[1]}# 解答：{mark[2]}\n" if mark[2] else "", cell.source)
    header = templates.get_template("header.html").render(
        chapter=chapter, before=_titles(chapter), other="release", run=_run(proof), recorded=recorded
    )
    return _page(nb, chapter.title, header, {})


def _release(chapter: Chapter, proof: dict[str, Any], templates: Environment) -> NotebookNode:
    header = templates.get_template("header.html").render(
        chapter=chapter, before=_titles(chapter), other="solution", run=_run(proof), recorded=True
    )
    # The search would find everything twice; the table of contents has the solutions.
    return _page(pristine(chapter), f"{chapter.title}（练习版）", header, {"nosearch": True, "orphan": True})


def _page(nb: NotebookNode, title: str, header: str, metadata: dict[str, Any]) -> NotebookNode:
    """``nb`` with its one H1 set to ``title`` and the header put beneath; of its metadata only what Sphinx is to know."""
    first = next(cell for cell in nb.cells if cell.cell_type == "markdown" and cell.source.startswith("# "))
    _, _, rest = first.source.partition("\n")
    place = nb.cells.index(first)
    nb.cells[place : place + 1] = [new_markdown_cell(f"# {title}\n\n{header}"), *([new_markdown_cell(rest)] if rest.strip() else [])]
    for number, cell in enumerate(nb.cells):
        cell.id = f"cell-{number}"
        cell.metadata = NotebookNode()
    nb.metadata = NotebookNode(metadata, kernelspec={"name": "python3", "display_name": "Python 3", "language": "python"})
    return nb


def _verdict(check: dict[str, Any]) -> str:
    """What the exam that was recorded said of a test, in place of what its hidden part printed."""
    text = f"录制时的封闭考试：**{WORDS[check['verdict']]}**，{check['score']:g} / {check['points']:g} 分。"
    for record in check["records"]:
        if measured := judge.measured(record):
            judged = measured[1]
            text += f"加速比的可信下界 {judged['low']:.2f} 倍，门槛 {judged['bar']:.2f} 倍。"
    return f"{text}\n\n<small>这道测试还有隐藏的部分，不在这里显示。</small>"


def _run(proof: dict[str, Any]) -> dict[str, str]:
    """What a page tells of the recorded run: GPU, driver, date and the versions that matter."""
    versions = {_SHOWN[name]: version for name, version in proof["versions"].items() if name in _SHOWN}
    return {
        "gpu": proof["gpu"],
        "driver": proof["driver"],
        "date": datetime.fromisoformat(proof["recorded_at"]).date().isoformat(),
        "versions": "，".join(f"{name} {version}" for name, version in versions.items()),
    }


def _titles(chapter: Chapter) -> list[Chapter]:
    return [manifest.chapter(name) for name in chapter.prerequisites]
