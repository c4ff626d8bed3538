"""What an author still has to do to a chapter before it can be handed on; part of `launchlab build --check`.

`rules` has refused by now what cannot be built (an empty hint, say); a receipt proves more than is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator

import nbformat
from nbformat import NotebookNode

from launchlab import paths
from launchlab.course import form, source
from launchlab.course.scaffold import MARK
from launchlab.exam import judge
from launchlab.exam.examine import examine
from launchlab.manifest import Chapter, chapters
from launchlab.paths import short


def problems(chapter: Chapter, nb: NotebookNode) -> list[str]:
    """All that is unfinished or left over in one chapter, as built, in Chinese; empty when nothing is."""
    found = [*_marks(nb), *strays(chapter)]
    if not chapter.receipt.exists():
        found += [f"{flaw.where}：{flaw.what}" for flaw in form.flaws(nb)]
        if not found and chapter.solution.exists() and chapter.release.exists():
            found += _passing_stubs(chapter)
    return found


def unlisted() -> list[str]:
    """Folders and receipts of chapters that the manifest does not have, in Chinese."""
    names = {each.name for each in chapters()}
    found = [
        path
        for folder in (paths.SOLUTIONS, paths.COURSE)
        if folder.is_dir()
        for path in folder.iterdir()
        if not path.name.startswith(".")
    ]
    found += (paths.GRADER / "receipts").glob("*.json")
    return [f"{short(path)}：chapters.toml 里没有这一章，请登记它或移走它" for path in sorted(found) if path.stem not in names]


def _marks(nb: NotebookNode) -> Iterator[str]:
    for number, cell in enumerate(nb.cells, 1):
        if count := cell.source.count(MARK):
            yield f"{source.label(cell, number)}：还有 {count} 处“{MARK}…】”没有写"


def strays(chapter: Chapter) -> Iterator[str]:
    """Files beside the source that nothing names, by its own name or by that of its folder, and scripts that make nothing here."""
    folder = chapter.source.parent
    files = [path for path in source.files(folder) if path != chapter.source]
    texts = {path: path.read_text(encoding="utf-8") for path in [chapter.source, *files] if path.suffix == ".py"}
    for path in [*files, *(path for path in folder.glob("*.ipynb") if path != chapter.solution)]:
        words = [path.name, *(part for part in path.relative_to(folder).parts[:-1])]
        named = any(word in text for other, text in texts.items() if other != path for word in words)
        makes = any(other.name in texts.get(path, "") for other in files if other != path)
        if not named and not makes:
            yield f"{path.relative_to(folder).as_posix()}：这一章的源文件没有提到它；用不到就删掉"


def _passing_stubs(chapter: Chapter) -> Iterator[str]:
    """Examine the release, which nobody has answered. What needs a GPU is left to `launchlab record`, where there is none."""
    for check in examine(nbformat.read(chapter.release, as_version=4), chapter).checks:
        if check.verdict == judge.PASSED or check.score:
            yield f"{check.id}：没有作答的发布版就通过了（{check.score:g} 分），这项测试什么也没有考"
