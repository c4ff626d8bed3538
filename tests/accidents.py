"""What learners hand in by accident, or to see what happens: each a function that spoils an honest notebook.

A spoiler gets the honest notebook (all answers right) and returns what is handed in: a notebook
or bytes, or None if it has put its files into ``folder`` itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

TESTS = ("total_us", "advance", "longest_path")
ALL: list[Accident] = []


@dataclass
class Accident:
    """``loses``: exercises that get 0 for it; ``opens``: those left to a person; ``says``: what the reason or a note must tell."""

    name: str
    spoil: Callable[[NotebookNode, Path], NotebookNode | bytes | None]
    loses: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()
    says: str = ""
    file: str = "90_mini.ipynb"
    beside: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def accident(loses: str = "", opens: str = "", **more) -> Callable:
    """Register a spoiler under its function's name."""

    def register(spoil: Callable) -> Callable:
        ALL.append(Accident(spoil.__name__, spoil, tuple(loses.split()), tuple(opens.split()), **more))
        return spoil

    return register


def answers(name: str, code: str) -> Callable:
    """A spoiler that gives another answer to one exercise."""

    def spoil(nb: NotebookNode, _folder: Path) -> NotebookNode:
        cell(nb, name).source = code
        return nb

    return spoil


def cell(nb: NotebookNode, grade_id: str) -> NotebookNode:
    return next(c for c in nb.cells if c.metadata.get("nbgrader", {}).get("grade_id") == grade_id)


def after(nb: NotebookNode, grade_id: str, new: NotebookNode) -> NotebookNode:
    nb.cells.insert(nb.cells.index(cell(nb, grade_id)) + 1, new)
    return nb


def copy(node: NotebookNode) -> NotebookNode:
    return NotebookNode(json.loads(json.dumps(node)), metadata=NotebookNode(json.loads(json.dumps(node.metadata))))


EVERYTHING = " ".join(TESTS)

# --- structure -----------------------------------------------------------------------------------


@accident()
def solution_cell_pasted_twice(nb, _folder):
    after(nb, "advance", copy(cell(nb, "advance")))
    twin = copy(cell(nb, "total_us"))
    twin.id = "pasted"
    return after(nb, "total_us", twin)


@accident()
def test_cell_pasted_twice(nb, _folder):
    after(nb, "test_advance", copy(cell(nb, "test_advance")))
    twin = copy(cell(nb, "test_total_us"))
    twin.id = "pasted"
    return after(nb, "longest_path", twin)


@accident()
def schema_version_edited(nb, _folder):
    cell(nb, "advance").metadata.nbgrader.schema_version = 1
    cell(nb, "test_advance").metadata.nbgrader.schema_version = 99
    cell(nb, "total_us").metadata.nbgrader.schema_version = "three"
    del cell(nb, "test_total_us").metadata.nbgrader["schema_version"]
    return nb


@accident()
def test_cell_deleted(nb, _folder):
    nb.cells.remove(cell(nb, "test_advance"))
    return nb


@accident()
def test_metadata_removed(nb, _folder):
    for name in ("test_advance", "test_longest_path"):
        found = cell(nb, name)
        del found.metadata["nbgrader"]
        found.metadata["tags"] = ["demo"]
    return nb


@accident()
def test_cell_made_markdown(nb, _folder):
    found = cell(nb, "test_longest_path")
    found.cell_type = "markdown"
    del found["outputs"], found["execution_count"]
    return nb


@accident()
def test_cell_marked_solution(nb, _folder):
    cell(nb, "test_total_us").metadata.nbgrader |= {"solution": True, "grade": False, "locked": False}
    return nb


@accident(loses="total_us")
def own_tests_and_points(nb, _folder):
    cell(nb, "total_us").source = "def total_us(*args):\n    return 2.0"
    cell(nb, "test_total_us").source = "2.0"
    cell(nb, "test_total_us").metadata.nbgrader.points = 100
    mark = {"grade": True, "grade_id": "test_bonus", "locked": True, "points": 50, "schema_version": 3, "solution": False, "task": False}
    return after(nb, "test_total_us", new_code_cell("50.0", metadata={"nbgrader": mark}))


@accident()
def metadata_of_all_cells_gone(nb, _folder):
    for each in nb.cells:
        each.metadata = {}
    return nb


@accident()
def answers_in_cells_of_their_own(nb, _folder):
    code = [cell(nb, name).source for name in TESTS]
    nb.cells = [c for c in nb.cells if not c.metadata.get("nbgrader")]
    nb.cells += [new_code_cell(text) for text in code]
    return nb


@accident()
def answer_made_markdown(nb, _folder):
    found = cell(nb, "advance")
    found.cell_type = "markdown"
    del found["outputs"], found["execution_count"]
    return nb


@accident(loses="advance", says="没有找到答题单元 advance")
def solution_cell_deleted(nb, _folder):
    nb.cells.remove(cell(nb, "advance"))
    return nb


@accident(loses=EVERYTHING, says="没有找到答题单元")
def another_chapters_notebook(nb, _folder):
    nb.cells = [new_markdown_cell("# 另一章"), new_code_cell("print(1)")]
    return nb


@accident()
def cells_in_another_order(nb, _folder):
    answered = [cell(nb, name) for name in TESTS]
    nb.cells = [c for c in nb.cells if c not in answered]
    nb.cells += reversed(answered)
    return nb


@accident(loses=EVERYTHING)
def forged_notebook_metadata(nb, _folder):
    for name in TESTS:
        cell(nb, name).source = "raise NotImplementedError('later')"
    nb.metadata["launchlab"] = {"refused": "please look at this yourself", "examined": True, "notes": ["✓ 通过"]}
    for name in TESTS:
        cell(nb, f"test_{name}").outputs = [new_output("execute_result", data={"text/plain": "3.0"}, execution_count=1)]
        cell(nb, f"test_{name}").metadata["launchlab"] = {"verdict": "passed", "open": True}
    return nb


# --- processes -----------------------------------------------------------------------------------

ALL += [
    Accident("exit_in_a_cell", answers("advance", "import os\n\ndef advance(state, rounds):\n    pass\n\nos._exit(0)"), ("advance",), says="退出"),
    Accident("exit_by_name", answers("total_us", "import sys\n\ndef total_us(*args):\n    sys.exit(0)\n\nexit"), ("total_us",)),
    Accident("segfault", answers("advance", "import ctypes\n\ndef advance(state, rounds):\n    ctypes.string_at(0)"), ("advance",), says="SIGSEGV"),
    Accident("segfault_in_a_cell", answers("longest_path", "import ctypes\n\ndef longest_path(edges):\n    return 3\n\nctypes.string_at(0)"), ("longest_path",), says="SIGSEGV"),
    Accident("endless_loop", answers("longest_path", "def longest_path(edges):\n    while True:\n        pass"), ("longest_path",), says="没有回答"),
    Accident("endless_loop_in_a_cell", answers("total_us", "def total_us(*args):\n    return 7.0\n\nwhile True:\n    pass"), ("total_us",), says="单元运行超过"),
    Accident("asks_for_input", answers("advance", "def advance(state, rounds):\n    input('rounds? ')"), ("advance",), says="input("),
    Accident("recursion_without_end", answers("longest_path", "def longest_path(edges):\n    return longest_path(edges)"), ("longest_path",), says="RecursionError"),
    # What the engine itself allows is tested with the engine; here the cell keeps the machine safe by a limit of its own.
    Accident("memory_exhausted", answers("advance", (
        "import resource\n\n"
        "def advance(state, rounds):\n"
        "    resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n"
        "    hoard = []\n"
        "    while True:\n"
        "        hoard.append(bytearray(64 << 20))")), ("advance",), says="MemoryError"),
    Accident("uses_a_name_of_a_demo", answers("total_us", "def total_us(launch_us, n, kernel_us):\n    return table[n]"), ("total_us",), says="table 定义在演示单元里"),
    Accident("forgot_an_import", answers("longest_path", "def longest_path(edges):\n    return scipy.longest(edges)"), ("longest_path",), says="没有找到 scipy"),
    Accident("renamed_its_function", answers("advance", "def go_on(state, rounds):\n    pass"), ("advance",), says="没有找到 advance"),
    Accident("does_not_parse", answers("advance", "def advance(state, rounds)\n    pass"), ("advance",), says="SyntaxError"),
    Accident("killed_for_memory", answers("advance", "import os, signal\n\ndef advance(state, rounds):\n    os.kill(os.getpid(), signal.SIGKILL)"), ("advance",), says="内存"),
]  # fmt: skip


# --- output --------------------------------------------------------------------------------------


@accident()
def one_line_of_30_mb(nb, _folder):
    return after(nb, "advance", new_code_cell("print('x' * 30_000_000)"))


@accident()
def one_value_of_30_mb(nb, _folder):
    after(nb, "advance", new_code_cell("from IPython.display import HTML\nHTML('x' * 15_000_000)"))
    after(nb, "advance", new_code_cell("raise RuntimeError('x' * 15_000_000)"))
    return after(nb, "advance", new_code_cell("'y' * 30_000_000"))


@accident(loses="total_us")
def numbers_as_last_expressions(nb, _folder):
    cell(nb, "total_us").source = "def total_us(*args):\n    return 7.0\n\nnp.float64(2.5)"
    for text in ("np.float64(2.5)", "True", "float('nan')", "-1", "1e9", "float('inf')", "2.0"):
        after(nb, "total_us", new_code_cell(text))
    return nb


@accident()
def marks_of_hidden_tests_in_own_text(nb, _folder):
    after(nb, "advance", new_code_cell("# ### BEGIN HIDDEN TESTS\nx = 1"))
    cell(nb, "advance").source += "\n### END HIDDEN TESTS\n### BEGIN SOLUTION\n"
    return nb


@accident(loses="total_us")
def control_characters(nb, _folder):
    cell(nb, "total_us").source += "\nx = '\x00'"
    after(nb, "total_us", new_code_cell("print('\x1b[31m\x07\u202e\ud800')"))
    return json.dumps(nb).encode()


# --- files ---------------------------------------------------------------------------------------


def raw(nb: NotebookNode) -> bytes:
    return json.dumps(nb, ensure_ascii=False).encode()


@accident(opens=EVERYTHING, says="不是完整的笔记本")
def truncated(nb, _folder):
    return raw(nb)[:-2000]


@accident(opens=EVERYTHING, says="空的")
def empty(_nb, _folder):
    return b""


@accident(opens=EVERYTHING, says="空的")
def zeros_after_a_crash(nb, _folder):
    return b"\0" * len(raw(nb))


@accident()
def utf_16(nb, _folder):
    return raw(nb).decode().encode("utf-16")


@accident()
def utf_8_with_bom_and_crlf(nb, _folder):
    return b"\xef\xbb\xbf" + json.dumps(nb, ensure_ascii=False, indent=1).replace("\n", "\r\n").encode()


@accident()
def gb18030(nb, _folder):
    return raw(nb).decode().encode("gb18030")


@accident(opens=EVERYTHING, says="不是")
def binary(_nb, _folder):
    return b"\x89PNG\r\n\x1a\n" + os.urandom(5000)


@accident(opens=EVERYTHING, says="不是")
def a_zip_of_it(nb, _folder):
    return b"PK\x03\x04" + raw(nb)


@accident(opens=EVERYTHING, says="不是")
def json_of_something_else(_nb, _folder):
    return b"[1, 2, 3]"


@accident(opens=EVERYTHING, says="单元")
def notebook_without_cells(_nb, _folder):
    return b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}}'


@accident(opens=EVERYTHING, says="太多")
def three_thousand_cells(nb, _folder):
    nb.cells += [new_code_cell("1") for _ in range(3000)]
    return nb


@accident()
def damaged_cells(nb, _folder):
    nb.cells += [None, 5, [], {}, {"cell_type": "code"}, {"cell_type": "code", "source": 5, "metadata": None}, {"cell_type": "raw", "source": ["x", 1]}]
    return json.dumps(nb).encode()


@accident(says="旧格式")
def nbformat_3(nb, _folder):
    cells = [{"cell_type": c.cell_type, "metadata": c.metadata, "input" if c.cell_type == "code" else "source": c.source} for c in nb.cells]
    return json.dumps({"nbformat": 3, "nbformat_minor": 0, "metadata": {"name": ""}, "worksheets": [{"cells": cells, "metadata": {}}]}).encode()


@accident()
def nbformat_4_0_without_ids(nb, _folder):
    nb.nbformat_minor = 0
    for each in nb.cells:
        del each["id"]
    return nb


@accident()
def unknown_kernel(nb, _folder):
    nb.metadata["kernelspec"] = {"display_name": "R", "language": "R", "name": "ir-of-my-own"}
    nb.metadata["language_info"] = {"name": "R"}
    return nb


@accident(file="90_mini (1).ipynb")
def renamed_by_a_browser(nb, _folder):
    return nb


@accident(file="作业 最终版.ipynb")
def renamed_by_hand(nb, _folder):
    return nb


@accident()
def copies_beside_it(nb, folder):
    for name in ("90_mini-Copy1.ipynb", "Untitled.ipynb"):
        (folder / name).write_bytes(raw(nb)[:500])
    return nb


@accident(opens=EVERYTHING, says="不止一个")
def two_under_other_names(nb, folder):
    for name in ("old.ipynb", "new.ipynb"):
        (folder / name).write_bytes(raw(nb))


@accident(opens=EVERYTHING, says="没有")
def no_notebook_at_all(nb, folder):
    (folder / "90_mini.ipynb.txt").write_bytes(raw(nb))
    (folder / "homework.zip").write_bytes(b"PK\x03\x04")


@accident()
def checkpoints_beside_it(nb, folder):
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "90_mini-checkpoint.ipynb").write_bytes(b"{")
    return nb


@accident(beside={"timestamp.txt": "last tuesday, I think"})
def time_of_submission_unreadable(nb, _folder):
    return nb


@accident()
def time_of_submission_not_text(nb, folder):
    (folder / "timestamp.txt").write_bytes(b"\xff\xfe\x00\xd8")
    return nb


@accident(says="没有一起评分")
def a_terabyte_of_nothing_beside_it(nb, folder):
    with open(folder / "data.bin", "wb") as file:
        file.truncate(1 << 40)
    return nb


@accident(opens=EVERYTHING, says="太大了")
def notebook_of_a_terabyte(_nb, folder):
    with open(folder / "90_mini.ipynb", "wb") as file:
        file.truncate(1 << 40)


@accident(says="没有一起评分")
def time_of_submission_of_a_terabyte(nb, folder):
    with open(folder / "timestamp.txt", "wb") as file:
        file.truncate(1 << 40)
    return nb


@accident(says="没有一起评分")
def ten_thousand_files_beside_it(nb, folder):
    (folder / "many").mkdir()
    for number in range(10_000):
        (folder / "many" / str(number)).touch()
    return nb


@accident(says="没有一起评分")
def folders_without_end_beside_it(nb, folder):
    here = os.getcwd()
    try:
        os.chdir(folder)
        for _ in range(2000):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    return nb


@accident(says="没有一起评分")
def folder_named_like_a_file_of_the_chapter(nb, folder):
    (folder / "samples.csv").mkdir()
    (folder / "samples.csv" / "x").touch()
    return nb


@accident(says="没有一起评分")
def names_that_are_no_text(nb, folder):
    for name in (b"\xff\xfe.txt", "两行\n的名字.txt".encode(), b"\x1b[31mred\x1b[0m", b"x" * 255):
        (folder / os.fsdecode(name)).touch()
    return nb


@accident(opens=EVERYTHING, says="不止一个")
def names_that_are_markup(nb, folder):
    for name in ("<img src=x onerror=alert(1)>.ipynb", "[link](javascript:alert(1)) <b>.ipynb"):
        (folder / name).write_bytes(raw(nb))


@accident()
def dangling_link_beside_it(nb, folder):
    (folder / "data").symlink_to("/nowhere/at/all")
    return nb


@accident()
def pipe_beside_it(nb, folder):
    os.mkfifo(folder / "pipe")
    return nb


@accident(loses="longest_path")
def link_to_the_solution_beside_it(nb, folder):
    (folder / "notes.txt").symlink_to("../../../../solutions/90_mini/90_mini.ipynb")
    (folder / "solutions").symlink_to("../../../../solutions")
    cell(nb, "longest_path").source = (
        "import json\nfrom pathlib import Path\n\n"
        "for path in [Path('notes.txt'), *Path('.').rglob('90_mini*')]:\n"
        "    if path.is_file() and path.read_text().startswith('{'):\n"
        "        for cell in json.loads(path.read_text())['cells']:\n"
        "            text = ''.join(cell['source'])\n"
        "            if 'def longest_path' in text:\n"
        "                exec(text)\n"
    )
    return nb


@accident(opens=EVERYTHING)
def notebook_is_a_link_to_the_solution(_nb, folder):
    (folder / "90_mini.ipynb").symlink_to("../../../../solutions/90_mini/90_mini.ipynb")


@accident(opens=EVERYTHING)
def notebook_is_a_folder(_nb, folder):
    (folder / "90_mini.ipynb").mkdir()
    (folder / "90_mini.ipynb" / "x").touch()


@accident()
def pictures_without_end(nb, _folder):
    """Each picture is small enough, and there are many."""
    code = "import base64, os\nfrom IPython.display import display\ndisplay({'image/png': base64.b64encode(b'\\x89PNG\\r\\n' + os.urandom(2 << 20)).decode()}, raw=True)"
    nb.cells += [new_code_cell(code) for _ in range(20)] + [new_code_cell("print('x' * 60_000)") for _ in range(40)]
    return nb
