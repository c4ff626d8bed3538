"""What a chapter's release tells about each test: the exercise's heading, and its hints. Nothing else gets into a page from there."""

from __future__ import annotations

import re
from dataclasses import dataclass

import nbformat
from nbconvert.filters.markdown import markdown2html
from nbgrader.utils import is_grade

from launchlab.grading.titles import KINDS
from launchlab.manifest import Chapter

DETAILS = re.compile(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>", re.DOTALL)


@dataclass(frozen=True)
class Hint:
    """One layer of hints: its title, and HTML made of the chapter's own Markdown."""

    title: str
    html: str


@dataclass(frozen=True)
class Exercise:
    """A test as a learner knows it: the exercise's heading and what is tested of it, and the exercise's hints."""

    title: str
    hints: tuple[Hint, ...]


def exercises(chapter: Chapter) -> dict[str, Exercise]:
    """id of a test -> its exercise, in the chapter's order."""
    found, heading, hints = {}, chapter.title, ()
    for cell in nbformat.read(chapter.release, as_version=4).cells:
        if cell.cell_type == "markdown":
            headings = [line.lstrip("# ") for line in cell.source.splitlines() if line.startswith("##")]
            if headings:
                heading, hints = headings[-1], ()
            hints += tuple(Hint(title.strip(), markdown2html(text.strip())) for title, text in DETAILS.findall(cell.source))
        elif is_grade(cell):
            found[cell.metadata.nbgrader.grade_id] = Exercise(f"{heading} · {KINDS[cell.metadata.launchlab.kind]}", hints)
    return found
