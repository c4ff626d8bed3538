"""`launchlab release`: a chapter as a zip to be handed out, and its due date."""

from __future__ import annotations

import zipfile
from datetime import datetime
from pathlib import Path

from nbgrader.api import Gradebook
from rich.console import Console

from launchlab import paths
from launchlab.course import gradebook
from launchlab.course.release import ReleaseError, release
from launchlab.grading import clock
from launchlab.manifest import Chapter
from launchlab.manifest import chapter as find_chapter


def main(name: str, due: str | None = None) -> int:
    """Write the zip of chapter ``name`` under ``build/release`` and have the gradebook know the chapter and, if told, its due date; 0, or 2."""
    console, chapter = Console(), find_chapter(name)
    try:
        time = clock.typed(due) if due else None
        gradebook.ensure(chapter.name)
        with gradebook.opened() as book:
            until = _due(book, chapter, time)
        target = _pack(chapter)
    except (clock.Unreadable, ReleaseError, gradebook.Unreachable, OSError) as error:
        console.print(f"✗ {error}", markup=False)
        return 2
    console.print(f"发给学生的压缩包：{paths.short(target)}\n截止时间：{until}", soft_wrap=True)
    return 0


def _due(book: Gradebook, chapter: Chapter, time: datetime | None) -> str:
    assignment = book.find_assignment(chapter.name)
    if time:
        assignment.duedate = clock.kept(time)
        book.db.commit()
    return clock.shown(clock.told(assignment.duedate)) if assignment.duedate else "没有设定（--due 可以设定）"


def _pack(chapter: Chapter) -> Path:
    target = paths.BUILD / "release" / f"{chapter.name}.zip"
    target.parent.mkdir(parents=True, exist_ok=True)
    made = release(chapter.name, chapter.solution.read_text(encoding="utf-8"), chapter.solution.parent)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in made.items():
            archive.writestr(f"{chapter.name}/{path}", data)
    return target
