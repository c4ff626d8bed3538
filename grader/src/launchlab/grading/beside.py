"""What lies beside a notebook that was handed in, and how much of it is taken along to the exam.

Grading copies a submission's folder, more than once. A file that is a terabyte of nothing, a folder in a folder in a
folder, a data set: each would cost the class its disk or its time.
"""

from __future__ import annotations

import os
from pathlib import Path

MOST_BYTES = 256 << 20
MOST_FILES = 2000
DEEPEST = 20
LONGEST_NAME = 200  # bytes: copies get longer ones


def too_much(path: Path, among: Amount | None = None) -> str | None:
    """Why a file or folder is not taken along (Chinese), or None. ``among``: what was taken before it, and is added to."""
    among = among or Amount()
    waiting = [(os.fsencode(path), 0)]
    while waiting:
        place, depth = waiting.pop()
        try:
            name = os.path.basename(place).decode()
        except UnicodeDecodeError:
            return "文件名不是 UTF-8"
        if len(os.path.basename(place)) > LONGEST_NAME or not name.isprintable():
            return "文件名太长，或者有看不见的字符"
        if os.path.isdir(place) and not os.path.islink(place):
            if depth == DEEPEST:
                return f"文件夹套了 {DEEPEST} 层以上"
            waiting += [(entry.path, depth + 1) for entry in os.scandir(place)]
        elif why := among.add(os.lstat(place).st_size):
            return why
    return None


class Amount:
    """How many files, and bytes in them, were counted so far."""

    def __init__(self) -> None:
        self.files = self.bytes = 0

    def add(self, size: int) -> str | None:
        """Count one file; why that is too much (Chinese), or None."""
        self.files, self.bytes = self.files + 1, self.bytes + size
        if self.files > MOST_FILES:
            return f"一共超过 {MOST_FILES} 个文件"
        if self.bytes > MOST_BYTES:
            return f"一共超过 {MOST_BYTES >> 20} MiB"
        return None
