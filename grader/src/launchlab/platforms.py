"""Which TensorRT knows which GPU and which Python: `platforms.toml`, read once, and the tables of PLATFORMS.md made from it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from launchlab import generated, paths

Version = tuple[int, int]
BEGIN, END = "<!-- tables: begin (made by `launchlab build`) -->", "<!-- tables: end -->"
PAGE = paths.GRADER / "PLATFORMS.md"


@dataclass(frozen=True)
class Row:
    """One GPU's compute capability, or one Python: (major, minor), and the versions of TensorRT that know it.

    what: its name in Chinese; tensorrt: the first; removed: the first that no longer does, or None; note: Chinese, may be
    empty; sources: titles of the vendor's pages.
    """

    key: Version
    what: str
    tensorrt: Version
    removed: Version | None
    note: str
    sources: tuple[str, ...]


def gpus() -> dict[Version, Row]:
    """By compute capability."""
    return _read()[0]


def pythons() -> dict[Version, Row]:
    """By version of Python."""
    return _read()[1]


def recorded() -> Version:
    """The TensorRT that the course's figures were recorded with."""
    return _read()[2]


def least_tensorrt(gpu: Version | None, python: Version) -> Version:
    """The oldest TensorRT of the course's range for a GPU (None: no GPU) and a Python; what is unknown asks for nothing."""
    rows = [gpus().get(gpu) if gpu else None, pythons().get(python)]
    return max([recorded(), *(row.tensorrt for row in rows if row)])


def main(check: bool) -> int:
    """Bring the page's tables up to date; with `check` write nothing and return 1 where they are out of date."""
    return generated.refresh(PAGE, BEGIN, END, tables(), "与 platforms.toml 不一致", check)


def tables() -> str:
    """The tables, and the list of the vendor's pages that their figures stand for."""
    titles = list(dict.fromkeys(title for row in [*gpus().values(), *pythons().values()] for title in row.sources))
    head = "\n| {} | TensorRT（10.6 起） | 说明 | 出处 |\n|:--|:--|:--|:--|\n"
    parts = [
        head.format("GPU（计算能力）"),
        *(_line(f"{row.what}（{_text(row.key)}）", row, titles) for row in gpus().values()),
        head.format("Python"),
        *(_line(_text(row.key), row, titles) for row in pythons().values()),
        "\n出处（NVIDIA 的文档）：\n\n",
        *(f"{number}. {title}\n" for number, title in enumerate(titles, 1)),
    ]
    return "".join([*parts, "\n"])


def _line(what: str, row: Row, titles: list[str]) -> str:
    if row.removed and row.removed <= recorded():
        versions = f"没有（{_text(row.removed)} 起移除）"
    else:
        versions = f"{_text(max(row.tensorrt, recorded()))} 及以上"
    numbers = "、".join(str(titles.index(title) + 1) for title in row.sources)
    return f"| {what} | {versions} | {row.note} | {numbers} |\n"


def _text(version: Version) -> str:
    return "{}.{}".format(*version)


@cache
def _read() -> tuple[dict[Version, Row], dict[Version, Row], Version]:
    table = tomllib.loads((files("launchlab") / "platforms.toml").read_text(encoding="utf-8"))

    def row(key: str, what: str, entry: dict) -> Row:
        removed = entry.get("removed")
        return Row(
            key=_version(entry[key]),
            what=what,
            tensorrt=_version(entry["tensorrt"]),
            removed=_version(removed) if removed else None,
            note=entry.get("note", ""),
            sources=tuple(table["sources"][name] for name in entry["sources"]),
        )

    cards = [row("compute_capability", f"{entry['architecture']}：{entry['devices']}", entry) for entry in table["gpus"]]
    snakes = [row("python", entry["python"], entry) for entry in table["pythons"]]
    return {each.key: each for each in cards}, {each.key: each for each in snakes}, _version(table["recorded"])


def _version(text: str) -> Version:
    major, minor = text.split(".")
    return int(major), int(minor)
