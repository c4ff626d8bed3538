"""Build: a chapter's source becomes its solution notebook and its release, byte for byte repeatable."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from launchlab import paths
from launchlab.course import receipt, rules, selfcheck, source
from launchlab.course.alt import alts
from launchlab.course.release import ReleaseError, release
from launchlab.course.restore import KEPT
from launchlab.course.source import SourceError
from launchlab.manifest import Chapter, chapter, chapters


@dataclass
class Built:
    """A chapter as built: the solution notebook, and path within the release -> bytes."""

    solution: NotebookNode
    release: dict[str, bytes]


def build(chapter: Chapter) -> Built:
    """Build in memory. SourceError, with all problems in Chinese, or ReleaseError."""
    if not chapter.source.exists():
        raise SourceError([f"没有源文件 {chapter.source}"])
    nb = source.parse(chapter.source.read_text(encoding="utf-8"))
    if problems := rules.problems(nb, chapter.points):
        raise SourceError(problems)
    for cell, words in alts(nb):
        cell.metadata["alt"] = words
    for cell, recorded in zip(nb.cells, _recorded(chapter, nb), strict=True):
        if recorded is not None:
            cell.outputs, cell.execution_count = recorded.outputs, recorded.execution_count
    return Built(nb, release(chapter.name, text(nb), chapter.source.parent))


def text(nb: NotebookNode) -> str:
    """A notebook's one canonical text."""
    return nbformat.writes(nb) + "\n"


def write(chapter: Chapter, built: Built) -> list[Path]:
    """Write what differs, each file at once or not at all; the paths written."""
    changed = [path for path, content in _targets(chapter, built) if not _holds(path, content)]
    for path, content in _targets(chapter, built):
        if path in changed:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f".{path.name}.new")
            fresh.write_bytes(content)
            os.replace(fresh, path)
    return changed


def differences(chapter: Chapter, built: Built) -> list[str]:
    """What on disk is not as built, in Chinese."""
    expected = dict(_targets(chapter, built))
    found = [f"{_shown(path)}：缺失" for path in expected if not path.exists()]
    found += [
        f"{_shown(path)}：与源文件不一致" for path, content in expected.items() if path.exists() and not _holds(path, content)
    ]
    return found + [f"{_shown(path)}：不属于发布版，请删除" for path in _extra(chapter, built)]


def main(names: Iterable[str], check: bool) -> int:
    """Build the named chapters, or all that are ready. With ``check``: write nothing, name what differs and what is unfinished.

    Returns 0, or 1 if a chapter cannot be built or, with ``check``, there is anything to name.
    """
    chosen = [chapter(name) for name in names] or [each for each in chapters() if each.ready]
    failed = 0
    for each in chosen:
        try:
            built = build(each)
        except (SourceError, ReleaseError) as error:
            failed += 1
            print(f"✗ {each.name}\n  " + str(error).replace("\n", "\n  "))
            continue
        if check:
            changed = [*differences(each, built), *selfcheck.problems(each, built.solution)]
            failed += bool(changed)
        else:
            changed = [f"{_shown(path)}：已写" for path in write(each, built)]
            changed += [f"{_shown(path)}：不属于发布版，请删除" for path in _extra(each, built)]
        print("\n  ".join([f"{'✗' if check and changed else '✓'} {each.name}", *changed]))
    for problem in selfcheck.unlisted() if check else []:
        failed += 1
        print(f"✗ {problem}")
    if failed:
        print("照上面说的改好；与源文件不一致的，运行 launchlab build 重新生成。" if check else f"{failed} 章没有生成。")
    return 1 if failed else 0


def _targets(chapter: Chapter, built: Built) -> Iterator[tuple[Path, bytes]]:
    yield chapter.solution, text(built.solution).encode()
    for name, content in built.release.items():
        yield chapter.release.parent / name, content


def _holds(path: Path, content: bytes) -> bool:
    return path.exists() and path.read_bytes() == content


def _extra(chapter: Chapter, built: Built) -> list[Path]:
    """Files beside the release that no build and no `restore` makes; they may be a learner's, so nothing deletes them."""
    folder = chapter.release.parent
    found = {*source.files(folder), *folder.rglob("*.ipynb")} if folder.exists() else set()
    left = {path for path in found if KEPT.search(path.name) or any(part.startswith(".") for part in path.relative_to(folder).parts)}
    return sorted(found - left - {path for path, _ in _targets(chapter, built)})


def _recorded(chapter: Chapter, nb: NotebookNode) -> Iterator[NotebookNode | None]:
    """For each cell of ``nb`` the cell of the recorded notebook whose outputs it keeps, or None.

    Outputs are kept only while the receipt vouches for them: same source and data, same outputs.
    """
    old = {}
    if chapter.solution.exists() and chapter.receipt.exists():
        recorded, proof = nbformat.read(chapter.solution, as_version=4), receipt.load(chapter)
        if receipt.vouches(proof, chapter, recorded):
            old = {(cell.id, cell.source): cell for cell in recorded.cells if cell.cell_type == "code"}
    return (old.get((cell.id, cell.source)) for cell in nb.cells)


def _shown(path: Path) -> str:
    return path.relative_to(paths.ROOT).as_posix() if path.is_relative_to(paths.ROOT) else str(path)
