"""Parts of committed pages that are made from data: what lies between two markers."""

import re
from pathlib import Path

from launchlab.paths import short


def between(text: str, begin: str, end: str, body: str) -> str:
    """`text` with what lies between the two markers replaced by `body`; ValueError where a marker is missing."""
    made, count = re.subn(f"(?s)(?<={re.escape(begin)}\n).*(?={re.escape(end)})", lambda _: body, text)
    if count != 1:
        raise ValueError(f"the page has lost its markers {begin} and {end}")
    return made


def refresh(page: Path, begin: str, end: str, body: str, stale: str, check: bool) -> int:
    """Bring the page's part up to date; with `check` write nothing, and say `stale` and return 1 where it is out of date."""
    current = page.read_text(encoding="utf-8")
    wanted = between(current, begin, end, body)
    if wanted == current:
        return 0
    if check:
        print(f"✗ {short(page)}：{stale}")
        return 1
    page.write_text(wanted, encoding="utf-8")
    print(f"✓ {short(page)}：已更新")
    return 0
