"""Intake: whatever a learner hands in becomes a notebook that can be examined, or is refused with a word.

Nothing of a submission's structure is trusted. A fresh copy of the release is taken, and only
code goes into it: the learner's text for each solution cell and given cell, and the cells that
the learner added. Test cells, prose and all metadata are the release's own. So a copied,
retyped, deleted or mangled cell cannot confuse nbgrader, and cannot stop a class.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from nbconvert.exporters import NotebookExporter
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell
from nbgrader.converters.base import NbGraderException
from traitlets import Bool, Unicode

from launchlab import tools
from launchlab.course import gradebook
from launchlab.course.release import pristine
from launchlab.exam import sandbox
from launchlab.grading import WITHOUT_SANDBOX
from launchlab.grading.beside import Amount, too_much
from launchlab.grading.turn import turn
from launchlab.manifest import chapter
from launchlab.paths import BUILD

if TYPE_CHECKING:
    from launchlab.grading.cluster import Cluster

LARGEST = 64 << 20  # bytes of a notebook file
MOST_CELLS = 2000
LONGEST = 1 << 20  # characters of one cell
TOO_LARGE = "文件有 {} MiB，太大了。请在 JupyterLab 里清除输出（Edit → Clear Outputs of All Cells），保存后重新提交。"


class Refused(Exception):
    """A submission that no exam can be made of; the text (Chinese) says why and what to do."""


@dataclass
class _Piece:
    """A code cell of the submission: which release cell it stands for, if any."""

    source: str
    grade_id: str | None
    cell_id: str | None


def graft(data: bytes, release: NotebookNode) -> tuple[NotebookNode, list[str]]:
    """The notebook to examine, and notes (Chinese) on what was repaired.

    ``data``: the bytes handed in; ``release``: the chapter's release notebook (not changed).
    Raises `Refused`.
    """
    notes: list[str] = []
    pieces = _pieces(_parse(data, notes), notes)
    solutions = {cell.metadata.nbgrader.grade_id: cell for cell in release.cells if cell.metadata.get("nbgrader", {}).get("solution")}
    tests = {cell.metadata.nbgrader.grade_id: cell.id for cell in release.cells if cell.metadata.get("nbgrader", {}).get("grade")}
    given = {cell.id for cell in release.cells if cell.cell_type == "code"} - set(tests.values()) - {cell.id for cell in solutions.values()}
    by_id = {cell.id: name for name, cell in solutions.items()}

    place: dict[str, _Piece] = {}  # release cell id -> the piece that takes its place
    after: dict[str | None, list[_Piece]] = {}  # release cell id -> cells the learner added behind it
    owners: list[tuple[str | None, _Piece]] = []
    for piece in pieces:
        name = piece.grade_id if piece.grade_id in solutions else by_id.get(piece.cell_id or "")
        if name is not None:
            owners.append((solutions[name].id, piece))
        elif piece.grade_id in tests or piece.cell_id in tests.values():
            owners.append((tests.get(piece.grade_id or "", piece.cell_id), piece))
        elif piece.cell_id in given:
            owners.append((piece.cell_id, piece))
        else:
            owners.append((None, piece))
    for owner, piece in owners:
        if owner is not None and owner not in tests.values():
            if owner in place:
                notes.append(f"答题单元 {by_id.get(owner, owner)} 出现了不止一次：最后一个算作答案，前面的也照常运行。")
            place[owner] = piece
    last: str | None = None
    for owner, piece in owners:
        if owner in tests.values() or (owner is not None and place[owner] is piece):
            last = owner
        else:
            after.setdefault(last, []).append(piece)

    result = _copy(release)
    result.cells = [_extra(piece, 0, number) for number, piece in enumerate(after.get(None, []))]
    for position, cell in enumerate(release.cells):
        cell = _copy(cell)
        if cell.id in place:
            cell.source = place[cell.id].source
        elif cell.id in by_id:
            # Not the stub: it would replace what the learner may have defined in a cell of their own.
            cell.source = "# 提交的笔记本里没有这个答题单元"
            notes.append(f"没有找到答题单元 {by_id[cell.id]}：如果代码写在别的单元里，那些单元照常运行。")
        result.cells.append(cell)
        result.cells += [_extra(piece, position + 1, number) for number, piece in enumerate(after.get(cell.id, []))]
    return result, notes


def refusal(release: NotebookNode, reason: str) -> NotebookNode:
    """The release with a note that the submission was refused; to be left open, not examined."""
    result = _copy(release)
    result.metadata["launchlab"] = {"refused": reason}
    return result


def _parse(data: bytes, notes: list[str]) -> dict:
    if len(data) > LARGEST:
        raise Refused(TOO_LARGE.format(len(data) >> 20))
    if not data.strip(b"\0 \t\r\n"):
        raise Refused("文件是空的。请打开笔记本确认内容还在，保存后重新提交。")
    text = None
    for encoding in ("utf-8-sig", "utf-16") if data[:2] not in (b"\xff\xfe", b"\xfe\xff") else ("utf-16", "utf-8-sig"):
        try:
            text = data.decode(encoding)
            if encoding == "utf-16":
                notes.append("文件是 UTF-16 编码，已按 UTF-16 读取。")
            break
        except UnicodeDecodeError:
            continue
    if text is None:
        text = data.decode("utf-8", errors="replace")
        notes.append("文件里有不是 UTF-8 的字节，已换成占位符。")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"文件不是完整的笔记本（{_json_error(error)}）：可能没有上传完，或被别的程序改过。请重新下载或保存，再提交一次。") from None
    if not isinstance(document, dict):
        raise Refused("文件不是 Jupyter 笔记本。请提交 .ipynb 文件。")
    return document


def _json_error(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    return f"JSON 在第 {line} 行中断" if line else "JSON 无法解析"


def _pieces(document: dict, notes: list[str]) -> list[_Piece]:
    cells = document.get("cells")
    if cells is None and isinstance(document.get("worksheets"), list):  # nbformat 3
        cells = [cell for sheet in document["worksheets"] if isinstance(sheet, dict) for cell in sheet.get("cells") or []]
        notes.append("笔记本是旧格式（nbformat 3），已转换。")
    if not isinstance(cells, list):
        raise Refused("笔记本里没有单元列表。请用 JupyterLab 打开确认，保存后重新提交。")
    if len(cells) > MOST_CELLS:
        raise Refused(f"笔记本有 {len(cells)} 个单元，太多了。请从课程目录重新取一份，把答案填进去再提交。")
    pieces = []
    for cell in cells:
        if not isinstance(cell, dict):
            notes.append("跳过了一个损坏的单元。")
            continue
        metadata = cell.get("metadata") if isinstance(cell.get("metadata"), dict) else {}
        mark = metadata.get("nbgrader") if isinstance(metadata.get("nbgrader"), dict) else {}
        grade_id = mark.get("grade_id") if isinstance(mark.get("grade_id"), str) else None
        cell_id = cell.get("id") if isinstance(cell.get("id"), str) else None
        # An answer cell turned into text still holds the answer; other text is the learner's own notes.
        if cell.get("cell_type") != "code" and not (grade_id or (cell_id or "").startswith("solution-")):
            continue
        source = cell.get("source", cell.get("input", ""))
        source = "".join(part for part in source if isinstance(part, str)) if isinstance(source, list) else source
        if not isinstance(source, str):
            notes.append("跳过了一个没有文本的单元。")
            continue
        if len(source) > LONGEST:
            raise Refused("有一个单元超过一百万个字符。请删去粘贴进去的数据，再提交一次。")
        # Lone surrogates are legal JSON and illegal UTF-8.
        pieces.append(_Piece(source.encode("utf-8", errors="replace").decode(), grade_id, cell_id))
    return pieces


def plain(text: str) -> str:
    """``text`` for a Markdown cell that shows it as it is: names of files, which are learners', may look like HTML or a link."""
    return "".join(c if c.isalnum() or c.isspace() else f"&#{ord(c)};" for c in text.replace("\n", " "))


def _copy(node: NotebookNode) -> NotebookNode:
    return nbformat.from_dict(json.loads(json.dumps(node)))


def _extra(piece: _Piece, position: int, number: int) -> NotebookNode:
    return new_code_cell(piece.source, id=f"extra-{position}-{number}")


class IntakeExporter(NotebookExporter):
    """nbgrader's exporter for ``autograde``: reads a submission by `graft` instead of by nbformat.

    Made once per ``nbgrader autograde``, before any submission is read: so it is also where
    the class is prepared (one grader at a time, unfinished work of a killed one swept away), and
    where its exams begin on a cluster, if there is one.
    """

    no_sandbox = Bool(False, help="Grade also where there is no sandbox: submissions then see this machine's files and network.").tag(config=True)
    cluster = Unicode("", help="Ray cluster to hold the exams on: HOST:PORT, or local; empty for none").tag(config=True)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not self.cluster:  # whose own machines are asked
            self._check_sandbox()
        converter = self.parent
        self.coursedir = converter.coursedir
        turn.take(self)
        gradebook.ensure(self.coursedir.assignment_id, self.coursedir)
        self._chapter = chapter(self.coursedir.assignment_id)
        self._release = pristine(self._chapter)
        self._aside: dict[Path, list[str]] = {}  # submission's folder -> what of it was set aside
        submitted = self.coursedir.format_path(self.coursedir.submitted_directory, self.coursedir.student_id, self.coursedir.assignment_id)
        for folder in map(Path, glob.glob(submitted)):
            try:
                self._check_place(folder)
                self._set_aside(folder)
                self._unlink(folder)
                self._check_time(folder)
                converter.assignments[str(folder)] = [str(self._notebook(folder))]
                self._sweep(folder)
            except Exception as error:  # noqa: BLE001 - whatever a folder holds, the others are graded
                # Nothing of it can be read or set right: nbgrader would stop at it, so it never sees it.
                self.log.error("%s: 没有评分：%s。请检查这个文件夹后重新收卷。", folder, error)
                converter.assignments.pop(str(folder), None)
        gradebook.enrol(self.coursedir.assignment_id, [Path(folder).parent.name for folder in converter.assignments], self.coursedir)
        self.exams = self._cluster() if self.cluster else None
        if self.exams:
            due = {Path(folder).parent.name: Path(folder) for folder in sorted(converter.assignments) if self._is_due(folder)}
            self.exams.begin(due, lambda folder: self._notebook_of(folder / f"{self.coursedir.assignment_id}.ipynb"))

    def _cluster(self) -> Cluster:
        try:
            from launchlab.grading.cluster import Cluster, ClusterError
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            message = f"这个 Python 里没有 Ray，用不了集群。{tools.INSTALL}"
            self.log.error(message)
            raise NbGraderException(message) from None
        try:
            exams = Cluster(self.cluster, self._chapter, self.log, self.no_sandbox)
        except ClusterError as error:
            self.log.error("%s", error)
            raise NbGraderException(str(error)) from None
        weakref.finalize(self, exams.close)
        return exams

    def _is_due(self, folder: str) -> bool:
        """Whether nbgrader is going to grade a submission: not graded yet, handed in anew since, or asked for by --force."""
        student, assignment = Path(folder).parent.name, self.coursedir.assignment_id
        if student in self.coursedir.student_id_exclude.split(","):
            return False
        done = self.coursedir.format_path(self.coursedir.autograded_directory, student, assignment)
        if self.parent.force or not os.path.exists(done):
            return True
        new, old = (self.coursedir.get_existing_timestamp(place) for place in (folder, done))
        return new is not None and old is not None and new > old

    def from_filename(self, filename: str, resources: dict | None = None, **kwargs: Any) -> tuple[str, dict]:
        if Path(filename).is_relative_to(Path(self.coursedir.root, self.coursedir.autograded_directory)):
            return super().from_filename(filename, resources=resources, **kwargs)
        nb = self._notebook_of(Path(filename))
        if notes := nb.metadata.get("launchlab", {}).get("notes"):
            self.log.warning("%s: %s", filename, "；".join(notes))
        return self.from_notebook_node(nb, resources=resources, **kwargs)

    def _notebook_of(self, path: Path) -> NotebookNode:
        """The notebook to examine of the one handed in, or a refusal; what was repaired stands in it."""
        release = self._release
        try:
            nb, notes = graft(_read(path), release)
        except Refused as error:
            nb, notes = refusal(release, str(error)), [str(error)]
        except Exception:
            self.log.exception("intake of %s failed", path)
            reason = "读取这份提交时出了意外的错误，请教师查看日志。"
            nb, notes = refusal(release, reason), [reason]
        notes += self._aside.get(path.resolve().parent, [])
        if notes:
            nb.metadata.setdefault("launchlab", {})["notes"] = notes
            nb.cells.insert(0, new_markdown_cell("**收卷说明**\n\n" + "\n".join(f"- {plain(note)}" for note in notes), id="intake-notes"))
        return nb

    def _check_sandbox(self) -> None:
        """Nobody's submission runs unprotected unless somebody has said so. Raises NbGraderException, with a word in the log."""
        if sandbox.works():
            return
        if self.no_sandbox:
            self.log.warning("没有可用的 bubblewrap，按你的要求在没有沙箱的情况下评分：提交里的代码能看到这台机器的文件和网络。")
            return
        what = "bubblewrap 已安装，却不能用（这台机器可能不许普通用户建立名字空间）" if sandbox.available() else "没有安装 bubblewrap"
        assignment = self.parent.coursedir.assignment_id
        self.log.error(
            "没有评分：%s，而提交里的代码不可信，没有沙箱就能看到这台机器的文件和网络。请安装它（sudo apt install bubblewrap）；"
            "确实要在没有沙箱的情况下评分，用 launchlab grade %s --no-sandbox，或 nbgrader autograde %s %s。", what, assignment, assignment, WITHOUT_SANDBOX)
        raise NbGraderException("no sandbox")

    def _check_place(self, folder: Path) -> None:
        """A submission must lie where it stands: a link to another folder would be graded, and cleaned, in its place."""
        root = Path(self.coursedir.root, self.coursedir.submitted_directory).resolve()
        if folder.resolve() != root / folder.parent.name / folder.name:
            raise Refused("文件夹是一个链接")

    def _unlink(self, folder: Path) -> None:
        """Links in a submission could make nbgrader copy any file of this machine into the learner's feedback; pipes would hang it."""
        for path in [path for path in folder.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir())]:
            self.log.warning("%s: no plain file, removed", path)
            path.unlink()

    def _set_aside(self, folder: Path) -> None:
        """Move out of a submission what it would cost too much to take along, and what lies where a file of the chapter's goes."""
        given = {path.name: path.is_dir() for path in self._chapter.solution.parent.iterdir()}
        wanted, amount = folder / self._chapter.solution.name, Amount()
        for path in sorted(folder.iterdir(), key=os.fsencode):
            if path.name.startswith(".") or (path == wanted and path.is_file()):  # hidden files are never copied
                continue
            why = "这个名字是课程自己的" if path.name in given and (path.is_dir() or given[path.name]) else too_much(path, amount)
            if why is None:
                continue
            place = BUILD / "set_aside" / folder.parent.name / folder.name
            place.mkdir(parents=True, exist_ok=True)
            number = len(list(place.iterdir()))
            path.rename(place / f"{number}-{os.fsencode(path.name)[:40].decode(errors='replace')}")
            note = f"笔记本旁边的 {path.name[:40].encode(errors='replace').decode()} 没有一起评分：{why}。"
            self.log.warning("%s: %s", folder, note)
            self._aside.setdefault(folder.resolve(), []).append(note)

    def _check_time(self, folder: Path) -> None:
        """Set a time of submission aside that nbgrader cannot read: it would not grade the submission."""
        try:
            self.coursedir.get_existing_timestamp(str(folder))
        except (Exception, SystemExit):  # noqa: BLE001 - it fails in several ways
            stamp = folder / "timestamp.txt"
            self.log.warning("%s: unreadable, set aside", stamp)
            stamp.rename(stamp.with_suffix(".unreadable"))

    def _notebook(self, folder: Path) -> Path:
        """The chapter's notebook in a submission (it may be missing); the only one there under another name is taken for it."""
        wanted = folder / f"{self.coursedir.assignment_id}.ipynb"
        found = _notebooks(folder)
        if not wanted.exists() and len(found) == 1:
            # nbgrader skips names it does not know; the file handed in stays as it was.
            shutil.copy2(found[0], wanted)
            self.log.warning("%s: taken for %s", found[0], wanted.name)
        return wanted

    def _sweep(self, submitted: Path) -> None:
        """Remove the half-made result of a grader that was killed: nbgrader would take it for done."""
        done = Path(self.coursedir.format_path(self.coursedir.autograded_directory, submitted.parent.name, self.coursedir.assignment_id))
        if done.is_dir() and not _finished(done):
            self.log.warning("%s: unfinished, grading again", done)
            shutil.rmtree(done)


def _notebooks(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.ipynb") if path.is_file())


def _read(path: Path) -> bytes:
    """The bytes of a notebook handed in; raises `Refused` if there is no such file."""
    if path.is_file():
        if path.stat().st_size > LARGEST:
            raise Refused(TOO_LARGE.format(path.stat().st_size >> 20))
        return path.read_bytes()
    others = "、".join(other.name for other in _notebooks(path.parent))
    if others:
        raise Refused(f"没有名为 {path.name} 的笔记本，别的笔记本又不止一个（{others}），不知道该评哪一个。请只提交一个，并用原来的名字。")
    raise Refused(f"提交的文件夹里没有笔记本 {path.name}。请提交 .ipynb 文件本身，不要打包，也不要改扩展名。")


def _finished(folder: Path) -> bool:
    notebooks = list(folder.glob("*.ipynb"))
    try:
        return bool(notebooks) and all("examined" in json.loads(path.read_text(encoding="utf-8"))["metadata"].get("launchlab", {}) for path in notebooks)
    except (ValueError, KeyError, OSError):
        return False
