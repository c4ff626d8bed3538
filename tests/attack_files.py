"""Cheats and must-keep cases as small files, and how one becomes a submission.

A file begins with comments: what it attacks, ``loses:`` the exercises it must get nothing for
(``nothing``, where full marks are due), ``opens:`` exercises that must at least get no points
(left to a person, where the examiner cannot tell whose doing it was), ``says:`` what the reason
must tell, ``fools: open`` where the same trick beats tests that share the learner's process,
``keeps:`` exercises that are to keep full marks where not all are examined. ``chapter:`` whose
notebook it is and ``tests:`` which of its tests are asked (all, without), where it is not the
chapter that the folder is for. Cells follow, each after ``# %%`` and its place:

    # %% first                  a cell before all others
    # %% solution="advance"     in place of that exercise's answer
    # %% before="advance"       a cell of the learner's own before that answer (also after=)
    # %% given="MULTIPLIER"     in place of the given cell in which that text stands
    # %% file="numpy.py"        a file beside the notebook

All other exercises are answered as the solution answers them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from launchlab.course import source
from launchlab.manifest import Chapter

PLACE = re.compile(r'^# %% (\w+)(?:="([^"]*)")?$')
REGION = re.compile(r"^\s*### (BEGIN|END) SOLUTION.*\n?", re.MULTILINE)


@dataclass
class Attack:
    """One file. ``cells``: (place, name, code); ``files``: name -> text, to lie beside the notebook."""

    name: str
    about: str
    loses: tuple[str, ...]
    says: str = ""
    fools: str = ""
    opens: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    chapter: str = ""
    tests: tuple[str, ...] = ()
    cells: list[tuple[str, str, str]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


@cache
def code_of(folder: Path) -> str:
    """A chapter's `source.sha256`, reckoned once in a process: it reads the chapter, and many attacks are on the same one."""
    return source.sha256(folder)


def fingerprint(attack: Attack, which: Chapter, asked: Iterable[str]) -> str:
    """What an exam of it depends on: the answers, the tests asked (ids), the chapter's code. Equal: no need to examine it anew."""
    told = [attack.cells, attack.files, sorted(asked), code_of(which.source.parent)]
    return hashlib.sha256(json.dumps(told, ensure_ascii=False).encode()).hexdigest()


def load(folder: Path) -> list[Attack]:
    """All attacks of a folder, by name."""
    return [parse(path) for path in sorted(folder.glob("*.txt"))]


def parse(path: Path) -> Attack:
    """Read one file; ValueError for a place or a heading that is not known."""
    about, headings, parts = [], {}, []
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := PLACE.match(line):
            parts.append((match[1], match[2] or "", []))
        elif parts:
            parts[-1][2].append(line)
        elif match := re.match(r"^# (loses|opens|keeps|says|fools|chapter|tests): (.*)$", line):
            headings[match[1]] = match[2]
        elif line.startswith("# "):
            about.append(line[2:])
    lists = {
        key: tuple(name for name in headings.pop(key, "nothing").split(", ") if name != "nothing")
        for key in ("loses", "opens", "keeps", "tests")
    }
    attack = Attack(path.stem, " ".join(about), **lists, **headings)
    for place, name, lines in parts:
        code = "\n".join(lines).strip("\n")
        if place == "file":
            attack.files[name] = code + "\n"
        elif place in ("first", "solution", "before", "after", "given"):
            attack.cells.append((place, name, code))
        else:
            raise ValueError(f"{path.name}: unknown place {place}")
    return attack


def honest(solution: NotebookNode, release: NotebookNode) -> NotebookNode:
    """What a learner hands in who answers as the solution does: the release, with its answers."""
    nb = release.copy()
    answers = {cell.id: REGION.sub("", cell.source) for cell in solution.cells if cell.cell_type == "code"}
    nb.cells = [cell.copy() for cell in release.cells]
    for cell in nb.cells:
        if is_solution(cell):
            cell.source = answers[cell.id]
    return nb


def submission(attack: Attack, solution: NotebookNode, release: NotebookNode) -> NotebookNode:
    """The notebook of one attack: honest answers, but for what the file puts in their place."""
    nb = honest(solution, release)
    for number, (place, name, code) in enumerate(attack.cells):
        if place == "given":
            chosen = [cell for cell in nb.cells if cell.cell_type == "code" and not cell.metadata.get("nbgrader") and name in cell.source]
        else:
            chosen = [cell for cell in nb.cells if is_solution(cell) and cell.metadata.nbgrader.grade_id == name]
        if place != "first" and len(chosen) != 1:
            raise ValueError(f"{attack.name}: {place} {name!r} means {len(chosen)} cells")
        if place in ("solution", "given"):
            chosen[0].source = code
        else:
            at = 0 if place == "first" else nb.cells.index(chosen[0]) + (place == "after")
            nb.cells.insert(at, new_code_cell(code, id=f"learner-{number}"))
    return nb


def is_solution(cell: NotebookNode) -> bool:
    """Whether a cell is where an answer goes."""
    return bool(cell.metadata.get("nbgrader", {}).get("solution"))
