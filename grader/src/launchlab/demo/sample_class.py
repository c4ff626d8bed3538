"""The sample class: submissions made from the chapter's own notebooks, each with one story to tell."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat

from launchlab.manifest import Chapter

# What replaces the text of a solution cell, by submission and exercise. The files are read as text, never imported.
REPLACED = Path(__file__).parent / "answers"
ABOUT = {
    "solution": "参考解答",
    "untouched": "没有作答",
    "honest-mistake": "认真做了，有一处算错",
    "eager-impersonator": "声称用了图，其实逐个启动",
    "cheat": "想骗过评分",
    "truncated": "文件没有传完",
}


def submit(chapter: Chapter, folder: Path) -> dict[str, str]:
    """Write the submissions into ``folder`` as nbgrader expects them; returns what each is (Chinese) by name."""
    for student in ABOUT:
        place = folder / student / chapter.name
        place.mkdir(parents=True)
        target = place / chapter.solution.name
        if student == "untouched":
            shutil.copyfile(chapter.release, target)
        elif student == "truncated":
            target.write_bytes(chapter.solution.read_bytes()[:20_000])
        else:
            nb = nbformat.read(chapter.solution, as_version=4)
            for cell in nb.cells:
                answer = REPLACED / student / f"{cell.metadata.get('nbgrader', {}).get('grade_id')}.txt"
                if answer.is_file():
                    cell.source = answer.read_text(encoding="utf-8")
            nbformat.write(nb, target)
    return ABOUT
