"""Zips as platforms and people write them: with times of their own, and names in encodings that nobody tells."""

from __future__ import annotations

import zipfile
from datetime import datetime
from pathlib import Path

FRIDAY = datetime(2026, 11, 27, 10, 30).astimezone()


def entry(name: str, when: datetime = FRIDAY) -> zipfile.ZipInfo:
    """An entry whose file was changed at that time, written as an old program does: on its own clock."""
    return zipfile.ZipInfo(name, when.astimezone().timetuple()[:6])


def zipped(path: Path, *files: tuple[str | zipfile.ZipInfo, bytes], encoding: str = "") -> Path:
    """Write a zip. ``encoding``: of the names, with no word about it in the zip; otherwise UTF-8, as zips tell it."""
    raw = {}
    with zipfile.ZipFile(path, "w") as made:
        for name, data in files:
            info = entry(name) if isinstance(name, str) else name
            if encoding and not info.filename.isascii():
                name_bytes = info.filename.encode(encoding)
                placeholder = f"{len(raw):04}".ljust(len(name_bytes), "~")
                raw[placeholder.encode()] = name_bytes
                info = entry(placeholder, datetime(*info.date_time))
            made.writestr(info, data, zipfile.ZIP_DEFLATED)
    whole = path.read_bytes()
    for placeholder, name_bytes in raw.items():
        assert whole.count(placeholder) == 2
        whole = whole.replace(placeholder, name_bytes)
    path.write_bytes(whole)
    return path
