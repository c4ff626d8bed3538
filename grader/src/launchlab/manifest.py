"""The manifest of the course: `grader/chapters.toml`, read once."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from launchlab import paths


class ManifestError(Exception):
    """The manifest is missing or contradicts itself."""


class UnknownChapter(LookupError):
    """No chapter has that name or number; the message names near ones."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Module:
    """One of the four parts of the course: its id (`basics`), Chinese title and one line on what it is about."""

    id: str
    title: str
    about: str


@dataclass(frozen=True)
class Needs:
    """What a machine must have to run a chapter to its end.

    compute_capability: (major, minor), the least of the GPU.
    memory_gib: free device memory, GiB.
    cuda: (major, minor), the least CUDA version that the driver must support.
    tensorrt: (major, minor), the least TensorRT, or None where the chapter uses none.
    packages: distributions outside the lock file, by their name in `environment.yml`.
    """

    compute_capability: tuple[int, int]
    memory_gib: float
    cuda: tuple[int, int]
    tensorrt: tuple[int, int] | None
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Chapter:
    """One chapter: a row of the manifest, and where its files lie.

    number: 1–30; slug: `cuda_graph_concepts`; title: Chinese; module: a Module's id; minutes: reading and exercises;
    points: the sum of its test cells; prerequisites: names of earlier chapters; ready: recorded on a GPU, and built for learners.
    """

    number: int
    slug: str
    title: str
    module: str
    minutes: int
    points: int
    needs: Needs
    prerequisites: tuple[str, ...]
    ready: bool

    @property
    def name(self) -> str:
        """`03_cuda_graph_concepts`: the one name of its folder, its notebook and its nbgrader assignment."""
        return f"{self.number:02d}_{self.slug}"

    @property
    def source(self) -> Path:
        """The only hand-edited file: jupytext py:percent."""
        return paths.SOLUTIONS / self.name / f"{self.name}.py"

    @property
    def solution(self) -> Path:
        """The notebook built from the source, with its recorded outputs."""
        return paths.SOLUTIONS / self.name / f"{self.name}.ipynb"

    @property
    def release(self) -> Path:
        """The notebook that a learner opens."""
        return paths.COURSE / self.name / f"{self.name}.ipynb"

    @property
    def receipt(self) -> Path:
        """Proof of the last recorded run."""
        return paths.GRADER / "receipts" / f"{self.name}.json"


def chapters() -> tuple[Chapter, ...]:
    """All chapters of the manifest in the course's order, those not `ready` too."""
    return _read(paths.GRADER / "chapters.toml")[1]


def modules() -> tuple[Module, ...]:
    """The parts of the course, in order."""
    return _read(paths.GRADER / "chapters.toml")[0]


def chapter(name_or_number: str | int) -> Chapter:
    """The chapter of that number (`3`, `"03"`), name (`"03_cuda_graph_concepts"`) or slug; UnknownChapter if there is none."""
    wanted = str(name_or_number).strip().rstrip("/").lower()
    known = chapters()
    for each in known:
        if wanted in (each.name, each.slug) or (wanted.isdecimal() and int(wanted) == each.number):
            return each
    words = {word: each.name for each in known for word in (each.slug, each.name)}
    near = list(dict.fromkeys(words[word] for word in difflib.get_close_matches(wanted, words, n=5, cutoff=0.5)))
    hint = f"你要找的是不是：{'、'.join(near)}？" if near else f"编号从 1 到 {len(known)}，例如 {known[0].name}。"
    raise UnknownChapter(f"没有名为“{name_or_number}”的章节。{hint}")


@cache
def _read(path: Path) -> tuple[tuple[Module, ...], tuple[Chapter, ...]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ManifestError(
            f"找不到章节清单 {path}。请在课程仓库里运行，或用环境变量 LAUNCHLAB_ROOT 指明仓库的位置。"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(f"章节清单 {path} 不是合法的 TOML：{error}") from None
    try:
        parts = tuple(Module(**row) for row in table["modules"])
        rows = tuple(_chapter(row, table["needs"]) for row in table["chapters"])
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"章节清单 {path} 里有缺失或多余的字段：{error}") from None
    return parts, rows


def _chapter(row: Mapping[str, Any], common: Mapping[str, Any]) -> Chapter:
    needs = {**common, **row["needs"]}
    return Chapter(
        **{
            **row,
            "prerequisites": tuple(row["prerequisites"]),
            "needs": Needs(
                compute_capability=_version(needs.pop("compute_capability")),
                cuda=_version(needs.pop("cuda")),
                tensorrt=_version(needs.pop("tensorrt")) if "tensorrt" in needs else None,
                packages=tuple(needs.pop("packages", ())),
                **needs,
            ),
        }
    )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
