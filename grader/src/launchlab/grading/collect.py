"""`launchlab collect`: what a learning platform exported, or a folder of files, becomes submissions that nbgrader can grade.

Nothing is lost. A submission is put in its place whole or not at all; a later one takes the place of an earlier one, which
is kept under ``build/earlier/``; what belongs to nobody is told and left where it is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from nbgrader.api import Gradebook, MissingEntry
from nbgrader.utils import parse_utc
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launchlab import paths
from launchlab.course import gradebook
from launchlab.grading import clock
from launchlab.grading.archive import Export, Item, Unusable, read
from launchlab.grading.owners import Owner, apart, folder_names, notebook_stem, owners
from launchlab.grading.turn import turn
from launchlab.manifest import Chapter, chapters
from launchlab.manifest import chapter as find_chapter
from launchlab.paths import short

RECORD = ".collected.json"  # nbgrader and the exam overlook names that begin with a dot
STAMP = "timestamp.txt"  # nbgrader's time of submission
NEW, NEWER, SAME, OLDER = "收下", "换成新的一份", "已经收过", "没有换：收过更新的一份"


@dataclass
class Submission:
    """One student's files of one export: the notebook that counts, files that lie beside it, and notebooks that don't count."""

    owner: Owner
    notebook: Item
    beside: dict[str, Path]
    others: list[Item]
    time: datetime | None
    notes: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """What became of one student's submission: ``student`` is the folder's name and nbgrader's id."""

    student: str
    what: str
    time: datetime
    notes: list[str]


def main(name: str, source: Path, at: str | None = None) -> int:
    """Collect chapter ``name`` from the zip or folder ``source``; 0 if submissions were found there, 1 if none, 2 if nothing can be read.

    ``at``: the time of submission of all of them, on this machine's clock, where the files' own times are not to be trusted.
    """
    console, chapter = Console(), find_chapter(name)
    try:
        time = clock.typed(at) if at else None
        outcomes, left = Collector(chapter, console).collect(source, time)
    except (Unusable, clock.Unreadable, gradebook.Unreachable) as error:
        console.print(f"✗ {error}", markup=False)
        return 2
    except OSError as error:
        console.print(f"✗ 写不进去：{error.strerror}（{error.filename}）。已经收下的都还在；腾出空间或检查权限后再运行一次。", markup=False)
        return 2
    if outcomes:
        console.print(_table(chapter, outcomes))
    if left:
        console.print(f"\n没有收的文件（{len(left)} 个，留在原处）：")
        for path, why in left:
            console.print(f"· {path}：{why}", markup=False)
    if not outcomes:
        console.print("\n✗ 没有认出任何人的提交。每人一个文件夹（文件夹名是学生的名字），或者文件名写成“姓名_章节名.ipynb”，都能认出来。")
        return 1
    console.print(f"\n{len(outcomes)} 份提交在 {short(paths.BUILD / 'submitted')}。接下来：nbgrader autograde {chapter.name}")
    return 0


class Collector:
    """Collects into ``build/submitted``; no grader works meanwhile."""

    def __init__(self, chapter: Chapter, console: Console):
        self.chapter, self.log = chapter, logging.getLogger("launchlab.collect")
        self.log.handlers[:] = [_Said(console)]

    def collect(self, source: Path, time: datetime | None) -> tuple[list[Outcome], list[tuple[str, str]]]:
        """What became of each submission in ``source``, by student; and the files left alone, each with why. Raises `Unusable`, OSError."""
        turn.take(self)
        paths.BUILD.mkdir(parents=True, exist_ok=True)
        for abandoned in paths.BUILD.glob("collecting-*"):  # by a collector that was killed
            shutil.rmtree(abandoned)
        with gradebook.opened() as book, tempfile.TemporaryDirectory(prefix="collecting-", dir=paths.BUILD) as scratch:
            stage = Path(scratch)
            (stage / "unpacked").mkdir()
            export = read(source, stage / "unpacked")
            submissions = _sort(export, self.chapter)
            names = folder_names({(each.owner.name, each.owner.key) for each in submissions})
            outcomes = []
            for submission in submissions:
                student = names.get((submission.owner.name, submission.owner.key))
                if student:
                    outcome = self._place(submission, student, time or submission.time, stage)
                    outcome.notes += _lateness(book, self.chapter.name, outcome, submission.owner.late)
                    outcomes.append(outcome)
                else:
                    export.left.append((str(submission.notebook.path), f"“{submission.owner.name}”不能当文件夹的名字"))
        return sorted(outcomes, key=lambda each: each.student), sorted(export.left)

    def _place(self, submission: Submission, student: str, time: datetime | None, stage: Path) -> Outcome:
        """Put one submission where nbgrader looks for it, unless the same or a newer one lies there."""
        target, owner, notes = _submitted(student, self.chapter), submission.owner, list(submission.notes)
        known = _record(target)
        if known.get("key") not in (None, owner.key) and owner.key:
            student = apart((owner.name, owner.key))
            target = _submitted(student, self.chapter)
            notes.append(f"与收过的另一位同名（平台编号 {known['key']}），所以加上了编号")
        files = {f"{self.chapter.name}.ipynb": submission.notebook.stored, **submission.beside}
        if time is None:
            time = datetime.now(UTC).replace(microsecond=0)
            notes.append("不知道交卷时间，记为现在")
        if not target.exists():
            what = NEW
        else:
            before = _time_of(target)
            if _digest(files) == _digest(_files(target)):
                return Outcome(student, SAME, before, notes)
            if time <= before:
                return Outcome(student, OLDER, before, notes)
            what = NEWER
        made = stage / "made"
        made.mkdir()
        for name, path in files.items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, made / name)
        (made / STAMP).write_text(time.strftime("%Y-%m-%d %H:%M:%S UTC\n"), encoding="utf-8")
        (made / RECORD).write_text(json.dumps({"name": owner.name, "key": owner.key}, ensure_ascii=False), encoding="utf-8")
        if what == NEWER:
            notes.append(f"旧的一份在 {short(self._set_aside(student, target))}")
        for item in submission.others:
            kept = _aside(student, self.chapter, item.time)
            kept.mkdir(parents=True)
            shutil.copyfile(item.stored, kept / item.path.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(made, target)
        return Outcome(student, what, time, notes)

    def _set_aside(self, student: str, submitted: Path) -> Path:
        """Move a submission, and what grading made of it, out of the way of a newer one; returns where they are."""
        kept = _aside(student, self.chapter, _time_of(submitted))
        kept.parent.mkdir(parents=True, exist_ok=True)
        os.rename(submitted, kept)
        graded = paths.BUILD / "autograded" / student / self.chapter.name
        if graded.is_dir():  # nbgrader would take the newer one for graded
            os.rename(graded, kept / "autograded")
        return kept


class _Said(logging.Handler):
    """A log's lines, for people."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), markup=False)


def _sort(export: Export, chapter: Chapter) -> list[Submission]:
    """The submissions of an export; what is no part of one is added to the export's ``left``."""
    whose = owners([item.path for item in export.items], chapter.name)
    grouped: dict[tuple[str, str | None], list[tuple[Item, Owner]]] = {}
    for item in export.items:
        if item.path in whose:
            owner = whose[item.path]
            grouped.setdefault((owner.name, owner.key), []).append((item, owner))
        else:
            export.left.append((str(item.path), "看不出是谁的"))
    submissions = []
    for files in grouped.values():
        submission = _submission(files, chapter, export)
        if submission:
            submissions.append(submission)
    return submissions


def _submission(files: list[tuple[Item, Owner]], chapter: Chapter, export: Export) -> Submission | None:
    """The submission that one student's files make: the newest notebook of this chapter counts."""
    notebooks = [(item, owner) for item, owner in files if notebook_stem(item.path)]
    elsewhere = [pair for pair in notebooks if _chapter_in(pair[1].file, chapter) not in (None, chapter.name)]
    candidates = [pair for pair in notebooks if pair not in elsewhere]
    candidates = [pair for pair in candidates if _chapter_in(pair[1].file, chapter)] or candidates
    export.left += [(str(item.path), f"是另一章的笔记本（{_chapter_in(owner.file, chapter)}）") for item, owner in elsewhere]
    rest = [pair for pair in files if pair not in notebooks]
    if not candidates:
        export.left += [(str(item.path), f"{owner.name} 交的文件里没有笔记本（.ipynb）") for item, owner in rest]
        return None
    oldest = datetime.min.replace(tzinfo=UTC)
    item, owner = max(candidates, key=lambda pair: (pair[1].time or pair[0].time or oldest, pair[1].rank, str(pair[0].path)))
    others = [other for other, _ in notebooks if other is not item and (other, _) not in elsewhere]
    submission = Submission(owner, item, {}, others, owner.time or item.time)
    if others:
        submission.notes.append(f"交了 {len(others) + 1} 个笔记本，算最新的 {owner.file.name}，其余的留在 {short(paths.BUILD / 'earlier')}")
    for other, its in rest:
        place = its.file.relative_to(owner.file.parent) if its.file.is_relative_to(owner.file.parent) else None
        if place is None or place.name.lower() == STAMP:
            # A time of submission in a student's own hand.
            export.left.append((str(other.path), "不在笔记本旁边" if place is None else "交卷时间不能由学生自己写"))
        elif any(place in (used, *used.parents) or used in place.parents for used in map(PurePosixPath, submission.beside)):
            export.left.append((str(other.path), "和另一个文件或文件夹同名"))
        else:
            submission.beside[str(place)] = other.stored
    return submission


def _chapter_in(file: PurePosixPath, chapter: Chapter) -> str | None:
    """The name of the chapter that a file's name holds, if any: its own rather than another's."""
    names = [chapter.name, *(each.name for each in chapters())]
    return next((name for name in names if name in file.name), None)


def _submitted(student: str, chapter: Chapter) -> Path:
    return paths.BUILD / "submitted" / student / chapter.name


def _aside(student: str, chapter: Chapter, time: datetime | None) -> Path:
    """A folder, not there yet, for an earlier submission of that time."""
    name = time.astimezone().strftime("%Y-%m-%d_%H-%M-%S") if time else "unknown"
    place = paths.BUILD / "earlier" / student / chapter.name
    free = (place / (name if number == 1 else f"{name}_{number}") for number in range(1, 1_000_000))
    return next(path for path in free if not path.exists())


def _record(folder: Path) -> dict:
    """What `collect` wrote of a submission's origin; empty for one that was put there by hand."""
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _files(folder: Path) -> dict[str, Path]:
    """The files of a collected submission, by their path in it, without what `collect` added."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path for path in paths if path != folder / STAMP}


def _digest(files: dict[str, Path]) -> str:
    """A hash of names and contents."""
    parts = (f"{name}\0{hashlib.sha256(files[name].read_bytes()).hexdigest()}" for name in sorted(files))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _time_of(folder: Path) -> datetime:
    """When a collected submission was handed in: by its time stamp, else by its newest file."""
    try:
        return parse_utc((folder / STAMP).read_text(encoding="utf-8").strip()).replace(tzinfo=UTC)
    except (OSError, ValueError, OverflowError):
        newest = max((path.stat().st_mtime for path in _files(folder).values()), default=0.0)
        return datetime.fromtimestamp(int(newest), UTC)


def _lateness(book: Gradebook, name: str, outcome: Outcome, marked: bool) -> list[str]:
    """How late a submission is by the gradebook's due date (with the student's own extension), in words."""
    try:
        due = book.find_submission(name, outcome.student).duedate
    except MissingEntry:
        try:
            due = book.find_assignment(name).duedate
        except MissingEntry:
            due = None
    late = clock.lateness(outcome.time, clock.told(due)) if due else ""
    if late:
        return [late]
    return ["平台记为迟交，按文件的时间却没有：请核对，可以用 --at 指定时间"] if marked else []


def _table(chapter: Chapter, outcomes: list[Outcome]) -> Table:
    table = Table(title=f"收卷：{chapter.title}", expand=True)
    for heading, ratio in (("学生", 3), ("交卷时间", 3), ("结果", 3), ("说明", 8)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    for each in outcomes:
        table.add_row(escape(each.student), clock.shown(each.time), each.what, escape("；".join(each.notes)))
    return table
