"""Instruments that test cells plant in the learner's or the reference's process: each a file, whose source is sent there.

`launchlab.exam.remote.Namespace.plant` sends one. They are no part of a chapter: mended here, no chapter need be recorded again.
"""

from pathlib import Path


def source(name: str) -> str:
    """The source of an instrument, which defines a function of that name. ValueError if there is none."""
    found = {path.stem: path for path in Path(__file__).parent.glob("*.py")}
    if name not in found.keys() - {"__init__"}:
        raise ValueError(f"no instrument {name!r}")
    return found[name].read_text(encoding="utf-8")
