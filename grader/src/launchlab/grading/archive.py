"""What a learning platform exports, read with care: a zip or a folder becomes a list of files.

Nothing in it is trusted. No path of an archive is ever used on this machine: each file is stored
under a number. Sizes are counted as the bytes come, whatever the archive claims. What cannot be
read is told and left where it is.
"""

from __future__ import annotations

import lzma
import os
import re
import stat
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import IO

from launchlab.grading.intake import LARGEST

LARGEST_TOTAL = 4 << 30  # bytes of all files of an export
MOST_FILES = 20_000
LONGEST_NAME, LONGEST_PATH = 255, 1000  # bytes
DEEPEST = 3  # zips within zips: a folder of exports, an export, what a student packed
CHUNK = 1 << 20
JUNK = {"__macosx", ".ds_store", "thumbs.db", "desktop.ini", ".ipynb_checkpoints", "__pycache__"}  # of operating systems and Jupyter
PACKED = {".rar", ".7z", ".gz", ".tar", ".xz", ".bz2"}
ENCRYPTED, UTF8 = 0x1, 0x800  # flags of a zip's entry
UNIX_TIME, UNICODE_PATH = 0x5455, 0x7075  # extra fields of a zip's entry
EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)  # earlier: the writer of the archive left the time out


SUSPECT = re.compile(r"^[A-Za-z]:|[\x00-\x1f\x7f]")  # a drive of Windows, control characters
BROKEN = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error)


class Unusable(Exception):
    """An export of which nothing can be read; the text (Chinese) says why and what to do."""


@dataclass(frozen=True)
class Item:
    """One file: its path in the export (relative, without ``..``), when it was last changed (None: unknown), and where its bytes lie."""

    path: PurePosixPath
    time: datetime | None
    stored: Path


@dataclass
class Export:
    """The files of an export, and those left alone: (path, why), both as told to people."""

    items: list[Item] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)


def read(source: Path, store: Path) -> Export:
    """Read the zip or folder ``source``; what zips hold is unpacked into the folder ``store``. Raises `Unusable`."""
    reader = _Reader(store)
    if source.is_dir():
        reader.folder(source)
    elif not source.exists():
        raise Unusable(f"没有找到 {source}。请检查路径；路径里有空格时，要用引号括起来。")
    elif source.suffix.lower() in PACKED:
        raise Unusable(f"{source.name} 是 {source.suffix} 文件，这里只读 zip 和文件夹。请先解开，再给出那个文件夹。")
    elif not zipfile.is_zipfile(source):
        raise Unusable(f"{source.name} 不是完整的 zip 文件：可能没有下载完。请重新从学习平台下载，或解开后给出文件夹。")
    else:
        reader.zip(source, PurePosixPath(), 1)
    return reader.export


class _Reader:
    def __init__(self, store: Path):
        self.export, self._store = Export(), store
        self._files = self._bytes = 0

    def folder(self, source: Path) -> None:
        for place, folders, names in os.walk(source):
            folders.sort()
            for name in sorted(names):
                path = Path(place, name)
                relative = PurePosixPath(path.relative_to(source).as_posix())
                if _is_junk(relative):
                    continue
                self._count()
                if path.is_symlink() or not path.is_file():
                    self._leave(relative, "是链接，不是文件")
                elif path.suffix.lower() == ".zip" and zipfile.is_zipfile(path):
                    self.zip(path, relative.with_suffix(""), 1)
                elif not os.access(path, os.R_OK):
                    self._leave(relative, "没有读取的权限")
                elif path.stat().st_size > LARGEST:
                    self._leave(relative, _too_large())
                else:
                    self.export.items.append(Item(relative, _plausible(path.stat().st_mtime), path))

    def zip(self, source: Path, prefix: PurePosixPath, depth: int) -> None:
        try:
            with zipfile.ZipFile(source) as archive:
                entries = [entry for entry in archive.infolist() if not entry.is_dir()]
                for entry, name in zip(entries, _names(entries), strict=True):
                    self._entry(archive, entry, prefix, name, depth)
        except BROKEN as error:
            if depth == 1 and not prefix.parts:
                raise Unusable(f"{source.name} 打不开，它的目录坏了（{error}）。请重新从学习平台下载，或解开后给出文件夹。") from None
            self._leave(prefix, "压缩包打不开")

    def _entry(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, prefix: PurePosixPath, name: str, depth: int) -> None:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or SUSPECT.search(name):
            self._count()
            self._leave(PurePosixPath(repr(name)), "路径可疑：指向了文件夹以外，或者有控制字符")
            return
        path = prefix / path
        if _is_junk(path):
            return
        self._count()
        if max(len(part.encode()) for part in path.parts) > LONGEST_NAME or len(str(path).encode()) > LONGEST_PATH:
            self._leave(PurePosixPath(f"{str(path)[:60]}……"), "名字太长")
        elif stat.S_ISLNK(entry.external_attr >> 16):
            self._leave(path, "是链接，不是文件")
        elif entry.flag_bits & ENCRYPTED:
            self._leave(path, "有密码，读不了")
        elif (stored := self._unpack(archive, entry, path)) is None:
            return
        elif path.suffix.lower() == ".zip" and depth < DEEPEST and zipfile.is_zipfile(stored):
            self.zip(stored, path.with_suffix(""), depth + 1)
        else:
            self.export.items.append(Item(path, _time(entry), stored))

    def _unpack(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: PurePosixPath) -> Path | None:
        """Write an entry's bytes under the next number; None, and a word, for what cannot be read or is too large."""
        stored, size = self._store / str(self._files), 0
        with stored.open("wb") as unpacked:
            try:
                with archive.open(entry) as packed:
                    while chunk := _next(packed):
                        size += len(chunk)
                        self._bytes += len(chunk)
                        if self._bytes > LARGEST_TOTAL:
                            raise Unusable(f"解开以后超过 {LARGEST_TOTAL >> 30} GiB，像是压缩包炸弹，没有再读下去。请看看里面有什么，解开需要的部分再试。")
                        if size > LARGEST:
                            self._leave(path, _too_large())
                            break
                        unpacked.write(chunk)
                    else:
                        return stored
            except BROKEN:
                self._leave(path, "在压缩包里坏了，读不出来")
        stored.unlink()
        return None

    def _count(self) -> None:
        self._files += 1
        if self._files > MOST_FILES:
            raise Unusable(f"里面有 {MOST_FILES} 个以上的文件，不像是一次作业的提交。请检查给的是不是要收的那个。")

    def _leave(self, path: PurePosixPath, why: str) -> None:
        self.export.left.append((str(path), why))


def _next(packed: IO[bytes]) -> bytes:
    try:
        return packed.read(CHUNK)
    except OSError as error:  # bz2's word for broken data: not to be taken for a full disk
        raise zipfile.BadZipFile(str(error)) from error


def _too_large() -> str:
    return f"超过 {LARGEST >> 20} MiB，太大了：请学生清除输出后重新提交"


def _is_junk(path: PurePosixPath) -> bool:
    return any(part.lower() in JUNK or part.startswith(".") for part in path.parts)


def _names(entries: list[zipfile.ZipInfo]) -> list[str]:
    """The entries' paths. A zip rarely tells the encoding of its names; one is chosen for all that it leaves open."""
    raw = [entry.orig_filename.encode("utf-8" if entry.flag_bits & UTF8 else "cp437", errors="replace") for entry in entries]
    open_ones = [name for entry, name in zip(entries, raw, strict=True) if not entry.flag_bits & UTF8]
    encoding = next((each for each in ("utf-8", "gb18030") if _fits(open_ones, each)), "cp437")
    found = []
    for entry, name in zip(entries, raw, strict=True):
        text = _unicode_path(entry, name) or name.decode("utf-8" if entry.flag_bits & UTF8 else encoding, errors="replace")
        text = text.partition("\0")[0]
        found.append(text if "/" in text else text.replace("\\", "/"))  # some Windows programs write backslashes
    return found


def _fits(names: list[bytes], encoding: str) -> bool:
    """Whether these names can be of that encoding.

    Letters with accents of Western names would make Chinese characters too, but each of one high byte and the letter
    behind it. Common Chinese characters are of two high bytes: one of them must be there.
    """
    try:
        texts = [name.decode(encoding) for name in names]
    except UnicodeDecodeError:
        return False
    others = [char.encode(encoding) for text in texts for char in text if not char.isascii()]
    return encoding == "utf-8" or not others or any(min(char[:2]) >= 0xA1 for char in others)


def _fields(entry: zipfile.ZipInfo) -> dict[int, bytes]:
    """The extra fields of an entry, by their number."""
    found, rest = {}, entry.extra
    while len(rest) >= 4:
        number, size = struct.unpack("<HH", rest[:4])
        found[number] = rest[4 : 4 + size]
        rest = rest[4 + size :]
    return found


def _unicode_path(entry: zipfile.ZipInfo, name: bytes) -> str | None:
    """The path in UTF-8 that Info-ZIP writes beside the other one, if it belongs to this one."""
    told = _fields(entry).get(UNICODE_PATH, b"")
    if len(told) > 5 and told[0] == 1 and struct.unpack("<L", told[1:5])[0] == zlib.crc32(name):
        return told[5:].decode("utf-8", errors="replace")
    return None


def _time(entry: zipfile.ZipInfo) -> datetime | None:
    """When the file was last changed: to the second and in UTC where the archive tells, else on this machine's clock."""
    told = _fields(entry).get(UNIX_TIME, b"")
    if len(told) >= 5 and told[0] & 1:
        return _plausible(struct.unpack("<l", told[1:5])[0])
    try:
        return _plausible(datetime(*entry.date_time).timestamp())
    except ValueError:  # month 0, say
        return None


def _plausible(seconds: float) -> datetime | None:
    time = datetime.fromtimestamp(int(seconds), UTC)
    return time if EARLIEST <= time <= datetime.now(UTC) + timedelta(days=1) else None
