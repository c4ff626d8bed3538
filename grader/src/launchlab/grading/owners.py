"""Whose file it is: what the names of learning platforms' exports tell.

Moodle    ``张三_12345_assignsubmission_file_/work.ipynb`` (or ``…_file_work.ipynb``)
Canvas    ``zhangsan_LATE_123_4567_work-1.ipynb``
Blackboard ``quiz_zhangsan_attempt_2026-11-30-13-45-00_work.ipynb``
nbgrader  ``zhangsan/03_chapter/03_chapter.ipynb``
by hand   a folder for each student, or ``张三_03_chapter.ipynb``, or ``03_chapter_张三.ipynb``
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import PurePosixPath

MOODLE = re.compile(r"(?P<name>.+?)_(?P<key>\d+)_assignsubmission_(?:file|onlinetext)(?:_(?P<file>.*))?")
CANVAS = re.compile(r"(?P<name>[^_]+)_(?P<late>LATE_)?(?P<key>\d+)_(?P<rank>\d+)_(?P<file>.+)")
BLACKBOARD = re.compile(r".+_(?P<name>[^_]+)_attempt_(?P<time>\d{4}(?:-\d\d){5})(?:_(?P<file>.+))?")
NOTEBOOK = re.compile(r"(.+)\.ipynb(?:\.txt|\.json)?", re.IGNORECASE)
# What would be a pattern, a path or markup to a program that meets the name later.
UNSAFE = re.compile(r'[\x00-\x1f\x7f/\\\[\]*?{}<>"`$|%#]')
# What is put behind a chapter's name by programs and by people with several versions, and names nobody.
VERSION = re.compile(r"\(?v?\d{1,3}\)?|copy\d*|副本.*|final.*|new|最终.*|修改.*", re.IGNORECASE)
STRIPPED = " .\u3000=+@-"  # at either end: hidden files, and formulas to a spreadsheet
LONGEST = 60  # characters of a student's name: at most 240 bytes, and a folder's may have 255


@dataclass(frozen=True)
class Owner:
    """``name``: as the platform writes it; ``key``: its number for the student, which tells namesakes apart (None: it has none);
    ``file``: the path below the student's own folder; ``time``: when it was handed in, where the name tells; ``rank``: later
    uploads have larger ones; ``late``: the platform says so."""

    name: str
    key: str | None
    file: PurePosixPath
    time: datetime | None = None
    rank: int = 0
    late: bool = False


def owners(paths: list[PurePosixPath], chapter: str) -> dict[PurePosixPath, Owner]:
    """Each path of an export -> its owner; a path that tells none is left out. ``chapter``: `03_cuda_graph_concepts`."""
    canvas = _canvas_folders(paths)
    found = {path: owner for path in paths if (owner := _by_platform(path, canvas) or _by_nbgrader(path, chapter))}
    loose = [path for path in paths if path not in found]
    notebooks = [path for path in loose if notebook_stem(path)]
    wrapper = _wrapper(notebooks)
    flat = _flat_folders(notebooks, chapter)
    for path in loose:
        rest = path.parts[wrapper:]
        name = _beside(notebook_stem(path) or path.stem, chapter) if len(rest) == 1 or path.parent in flat else None
        if name:
            found[path] = Owner(name, None, PurePosixPath(path.name))
        elif len(rest) > 1 and path.parent not in flat:
            found[path] = Owner(rest[0], None, PurePosixPath(*rest[1:]))
    return found


def notebook_stem(path: PurePosixPath) -> str | None:
    """A notebook's name without its ending; None for other files. Browsers like to add another ending."""
    match = NOTEBOOK.fullmatch(path.name)
    return match[1] if match else None


def folder_names(identities: set[tuple[str, str | None]]) -> dict[tuple[str, str | None], str]:
    """(name, key) of each student -> the name of the student's folder. Namesakes get their keys as well."""
    plain = {identity: safe(identity[0]) for identity in identities}
    taken = list(plain.values())
    return {identity: name if taken.count(name) == 1 else apart(identity) for identity, name in plain.items() if name}


def apart(identity: tuple[str, str | None]) -> str:
    """The folder's name of a student who has a namesake."""
    name, key = identity
    return f"{safe(name)}_{key or hashlib.sha256(name.encode()).hexdigest()[:6]}"


def safe(name: str) -> str:
    """A student's name as the name of a folder, which nbgrader takes for the student's id; empty if nothing is left of it."""
    return UNSAFE.sub("-", unicodedata.normalize("NFC", name)).strip(STRIPPED)[:LONGEST].rstrip(STRIPPED)


def _by_platform(path: PurePosixPath, canvas: set[PurePosixPath]) -> Owner | None:
    for place, part in enumerate(path.parts):
        below = path.parts[place + 1 :]
        patterns = (MOODLE, BLACKBOARD, CANVAS) if PurePosixPath(*path.parts[:place]) in canvas else (MOODLE, BLACKBOARD)
        for match in filter(None, (pattern.fullmatch(part) for pattern in patterns)):
            told = match.groupdict()
            # A folder's own name adds nothing to the path below it; a file's name does.
            file = PurePosixPath(*below) if below else PurePosixPath(told["file"] or part)
            return Owner(told["name"], told.get("key"), file, _time(told.get("time")), int(told.get("rank") or 0), bool(told.get("late")))
    return None


def _canvas_folders(paths: list[PurePosixPath]) -> set[PurePosixPath]:
    """The folders in which names are Canvas's: the outermost, and those that hold files of several students. One such name may be chance."""
    students: dict[PurePosixPath, set[tuple[str, str]]] = {}
    for path in paths:
        for place, part in enumerate(path.parts):
            if match := CANVAS.fullmatch(part):
                students.setdefault(PurePosixPath(*path.parts[:place]), set()).add((match["name"], match["key"]))
    return {folder for folder, names in students.items() if len(names) > 1} | {PurePosixPath()}


def _by_nbgrader(path: PurePosixPath, chapter: str) -> Owner | None:
    parts = path.parts[:-1]
    if chapter in parts[1:]:
        place = parts.index(chapter, 1)
        return Owner(parts[place - 1], None, PurePosixPath(*path.parts[place + 1 :]))
    return None


def _wrapper(notebooks: list[PurePosixPath]) -> int:
    """How many outer folders all notebooks share that are not a student's: an archive often wraps all in one or two.

    Where a single student's folders cannot be told from a wrapper, the outermost is taken for the student's.
    """
    folders = {path.parent.parts for path in notebooks}
    shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, zip(*folders, strict=False)))
    return 0 if any(len(folder) == shared for folder in folders) else shared


def _flat_folders(notebooks: list[PurePosixPath], chapter: str) -> set[PurePosixPath]:
    """The folders in which the files' names, and not the folder's, tell the students apart."""
    names: dict[PurePosixPath, list[str | None]] = {}
    for path in notebooks:
        names.setdefault(path.parent, []).append(_beside(notebook_stem(path) or "", chapter))
    return {folder for folder, told in names.items() if None not in told and len(set(told)) > 1}


def _beside(stem: str, chapter: str) -> str | None:
    """The student's part of a file's name that also holds the chapter's."""
    before, named, after = stem.partition(chapter)
    parts = [part.strip("_-. 　") for part in (before, re.sub(r"\s*\(\d+\)$", "", after))]
    return next((part for part in parts if part and not VERSION.fullmatch(part)), None) if named else None


def _time(text: str | None) -> datetime | None:
    try:
        return datetime.strptime(text, "%Y-%m-%d-%H-%M-%S").astimezone(UTC) if text else None
    except ValueError:
        return None
