"""`launchlab restore`: a chapter as released, with what the learner made of it kept beside it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from datetime import datetime
from pathlib import Path

from launchlab.course.release import ReleaseError, released
from launchlab.manifest import Chapter
from launchlab.manifest import chapter as find_chapter
from launchlab.paths import short

KEPT = re.compile(r"\.kept-\d{8}-\d{6}(-\d+)?(\.\w+)?$")


def main(name: str) -> int:
    """Restore chapter ``name`` and tell what was kept; 0, or 2 where there is nothing to restore from."""
    chapter = find_chapter(name)
    if not chapter.ready or not chapter.solution.is_file():
        print(
            f"✗ {chapter.name} 没有发布版可以恢复：它还没有写完，或者这份课程不完整。用 git 取回完整的仓库再试。",
            file=sys.stderr,
        )
        return 2
    try:
        changed = restore(chapter)
    except (OSError, ReleaseError) as error:
        print(
            f"✗ 没有恢复 {chapter.name}：{error}\n  原来的文件都还在。请检查文件夹的权限和磁盘空间，再运行一次。",
            file=sys.stderr,
        )
        return 2
    if not changed:
        print(f"{chapter.name} 和发布时一样，不用恢复。")
        return 0
    for path, kept in changed.items():
        print(f"✓ {short(path)} 已恢复成发布时的样子" + (f"；你的旧文件留在 {kept.name}" if kept else "（原来没有这个文件）"))
    print("如果这一章正在 JupyterLab 里打开，请不要保存，先关闭标签页再打开。旧笔记本也可以照常打开，从里面复制答案。")
    return 0


def restore(chapter: Chapter) -> dict[Path, Path | None]:
    """Put the release's files back where they differ: path -> the copy that was kept of it, None where there was none.

    A file is replaced only once its copy is complete. OSError, or ReleaseError if there is no release to be made.
    """
    changed: dict[Path, Path | None] = {}
    for name, content in released(chapter).items():
        path = chapter.release.parent / name
        if path.is_file() and path.read_bytes() == content:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        changed[path] = _keep(path) if path.exists() else None
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_bytes(content)
        os.replace(fresh, path)
    return changed


def _keep(path: Path) -> Path:
    stamp, number = f"{datetime.now():%Y%m%d-%H%M%S}", 1
    while True:
        kept = path.with_name(f"{path.stem}.kept-{stamp}{f'-{number}' if number > 1 else ''}{path.suffix}")
        try:
            with open(path, "rb") as old, open(kept, "xb") as copy:
                shutil.copyfileobj(old, copy)
        except FileExistsError:
            number += 1
            continue
        shutil.copystat(path, kept)
        return kept
