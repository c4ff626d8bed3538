"""What an earlier run on a GPU left, for one that goes on there."""

from __future__ import annotations

import json
from pathlib import Path


def earlier(out: Path, here: dict) -> dict:
    """The record of an earlier run; empty if there is none.

    here: what a record tells of the machine. SystemExit for a record of another one: its figures are not to be added to ours.
    """
    if not out.exists():
        return {}
    record = json.loads(out.read_text(encoding="utf-8"))
    if differing := [name for name, value in here.items() if record.get(name) != value]:
        raise SystemExit(f"{out} is of another machine ({', '.join(differing)}): name another file")
    return record
