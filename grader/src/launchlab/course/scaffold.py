"""`launchlab new`: the beginnings of a chapter, an exercise or a check, with a mark wherever an author has to write.

What is made builds at once; `launchlab build --check` complains until every mark is gone (see `selfcheck`).
"""

from __future__ import annotations

import re
import sys
from importlib import resources
from itertools import pairwise
from pathlib import Path
from string import Template

from launchlab import manifest, paths
from launchlab.course.source import KINDS, NAME
from launchlab.manifest import Chapter
from launchlab.paths import short

MARK = "【待写"
SLUG = re.compile(r"[a-z][a-z0-9_]*")
POINTS = 2
CELL = re.compile(r"^# %%", re.MULTILINE)
SUMMARY = re.compile(r"^# %% \[markdown\]\n# ## 小结", re.MULTILINE)


class ScaffoldError(Exception):
    """Nothing was made; the message (Chinese) says why and what to do."""


def chapter(slug: str, title: str, module: str, minutes: int = 60) -> int:
    """A new chapter with one exercise, at the end of the manifest, not ready. Returns the exit status."""
    return _told(lambda: _new_chapter(slug, title, module, minutes))


def exercise(name: str, exercise: str, kind: str) -> int:
    """A new exercise with one check in chapter ``name``, before its summary. Returns the exit status."""
    return _told(lambda: _new_exercise(manifest.chapter(name), exercise, kind))


def check(name: str, exercise: str, test: str, kind: str) -> int:
    """One check more of an exercise. Returns the exit status."""
    return _told(lambda: _new_check(manifest.chapter(name), exercise, test, kind))


def _told(make) -> int:
    try:
        path, number = make()
    except (ScaffoldError, OSError) as error:
        print(f"✗ {error}", file=sys.stderr)
        return 2
    print(
        f"✓ {short(path)} 写好了骨架。把每一处“{MARK}…】”换成内容，然后：\n  ./grader/launch build {number}          # 生成笔记本\n  ./grader/launch build --check {number}  # 自查：还缺什么"
    )
    return 0


def _new_chapter(slug: str, title: str, module: str, minutes: int) -> tuple[Path, int]:
    known = manifest.chapters()
    modules = [each.id for each in manifest.modules()]
    if not SLUG.fullmatch(slug):
        raise ScaffoldError(f"章节名 {slug!r} 要用小写字母、数字和下划线，以字母开头，例如 green_contexts。")
    if slug in (each.slug for each in known):
        raise ScaffoldError(f"已经有名为 {slug} 的章节，请换一个名字。")
    if module not in modules:
        raise ScaffoldError(f"没有名为 {module!r} 的模块，可用的：{'、'.join(modules)}。")
    number = max((each.number for each in known), default=0) + 1
    folder = paths.SOLUTIONS / f"{number:02d}_{slug}"
    if folder.exists():
        raise ScaffoldError(f"{short(folder)} 已经存在，而清单里没有它。请先移走它。")
    text = _filled("chapter", title=title, minutes=minutes, exercise=_exercise(f"{slug}_first", "answer"))
    row = (
        f'\n[[chapters]]\nnumber = {number}\nslug = "{slug}"\ntitle = {_quoted(title)}\nmodule = "{module}"\nminutes = {minutes}\n'
        f"points = {POINTS}\nneeds = {{}}\nprerequisites = []\nready = false\n"
    )
    folder.mkdir(parents=True)
    source = folder / f"{folder.name}.py"
    source.write_text(text, encoding="utf-8")
    with open(_manifest(), "a", encoding="utf-8") as file:
        file.write(row)
    return source, number


def _new_exercise(chapter: Chapter, name: str, kind: str) -> tuple[Path, int]:
    text = _source_without(chapter, name, name)
    _known_kind(kind)
    summary = SUMMARY.search(text)
    at = summary.start() if summary else len(text.rstrip("\n")) + 1
    _insert(chapter, text, at, _exercise(name, kind))
    return chapter.source, chapter.number


def _new_check(chapter: Chapter, exercise: str, test: str, kind: str) -> tuple[Path, int]:
    text = _source_without(chapter, None, test)
    _known_kind(kind)
    starts = [found.start() for found in CELL.finditer(text)] + [len(text)]
    at, inside = None, False
    for start, end in pairwise(starts):
        head = text[start:end].split("\n", 1)[0]
        if "solution=" in head:
            inside = f'solution="{exercise}"' in head
        elif inside and "test=" in head:
            at = end
    if at is None:
        raise ScaffoldError(f"{chapter.name} 里没有名为 {exercise} 的练习，或者它还没有测试单元。")
    _insert(chapter, text, at, _check(exercise, test, kind))
    return chapter.source, chapter.number


def _source_without(chapter: Chapter, solution: str | None, test: str) -> str:
    """The chapter's source; ScaffoldError if it has a solution or a test of that name already, or cannot be read."""
    if not chapter.source.is_file():
        raise ScaffoldError(f"没有源文件 {short(chapter.source)}：这一章还没有开始写。")
    text = chapter.source.read_text(encoding="utf-8")
    if not NAME.fullmatch(test):
        raise ScaffoldError(f"名字 {test!r} 要像变量名。")
    for key, name in (("solution", solution), ("test", test)):
        if name and re.search(rf'^# %%.*\b{key}="{re.escape(name)}"', text, re.MULTILINE):
            raise ScaffoldError(
                f"{chapter.name} 里已经有名为 {name} 的{'练习' if key == 'solution' else '测试单元'}，请换一个名字。"
            )
    return text


def _known_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ScaffoldError(f"没有 {kind!r} 这一种，可用的：{'、'.join(KINDS)}。")


def _insert(chapter: Chapter, text: str, at: int, piece: str) -> None:
    before = text[:at] if text[:at].endswith("\n\n") else text[:at].rstrip("\n") + "\n\n"
    chapter.source.write_text((before + piece + text[at:]).rstrip("\n") + "\n", encoding="utf-8")
    path = _manifest()
    row = re.compile(rf"(\nnumber = {chapter.number}\n(?:(?!\[\[).*\n)*?points = ){chapter.points:g}\n")
    told, count = row.subn(rf"\g<1>{chapter.points + POINTS:g}\n", path.read_text(encoding="utf-8"))
    if count != 1:
        raise ScaffoldError(
            f"源文件已经写好，但在 {short(path)} 里没有找到这一章的 points = {chapter.points:g}，请自己加上 {POINTS}。"
        )
    path.write_text(told, encoding="utf-8")


def _exercise(name: str, kind: str) -> str:
    tags = ' tags=["gpu"]' if kind == "speedup" else ""
    return _filled("exercise", name=name, tags=tags, check=_check(name, name, kind)).rstrip("\n") + "\n\n"


def _check(name: str, test: str, kind: str) -> str:
    return _filled("check_speedup" if kind == "speedup" else "check_value", name=name, test=test, kind=kind, points=POINTS)


def _filled(template: str, **words: object) -> str:
    text = resources.files("launchlab.course").joinpath("templates", f"{template}.txt").read_text(encoding="utf-8")
    return Template(text).substitute(words)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _manifest() -> Path:
    return paths.GRADER / "chapters.toml"
