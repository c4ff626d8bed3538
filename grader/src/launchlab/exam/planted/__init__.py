"""Instruments that test cells plant in the learner's or the reference's process: functions of files whose source is sent there.

`launchlab.exam.remote.Namespace.plant` sends one. They are no part of a chapter: mended here, no chapter need be recorded again.
"""

from pathlib import Path

FILES = {"held_up": "stream", "overtakes": "stream"}


def source(name: str) -> str:
    """The source that defines an instrument. ValueError if there is none of that name."""
    if name not in FILES:
        raise ValueError(f"no instrument {name!r}, only {', '.join(FILES)}")
    return Path(__file__).with_name(f"{FILES[name]}.py").read_text(encoding="utf-8")
