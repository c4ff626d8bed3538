"""The instructor's day, by the commands of grader/INSTRUCTORS.md as they are typed there; then several graders on one PostgreSQL server."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import postgres
import pytest
from course_copy import NAME, POINTS, Course
from lab_server import answering, free_port
from nbformat import NotebookNode
from nbgrader.api import Gradebook
from zips import entry, zipped

from launchlab import paths

PAGE = (paths.GRADER / "INSTRUCTORS.md").read_text(encoding="utf-8")
DUE = datetime(2026, 3, 20, 23, 59)  # as the page has it, on this machine's clock
ALL = dict(POINTS)
MORE = '''
# %% test="no_edges" kind="structure" points=2
check.equal(student.longest_path([[1, 2]]), 2, why="一条边上有两个节点。")
### BEGIN HIDDEN TESTS
check.equal(student.longest_path([]), 0, why="没有边的时候应该返回 0。")
### END HIDDEN TESTS
'''
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


class Desk:
    """An instructor's desk: the course, a folder of downloads, and a shell in the folder ``grader``."""

    def __init__(self, root: Path, database: str | None = None, build: str = "build"):
        self.course, self.build = Course(root, build), root / build
        self.downloads = root / "home" / "Downloads"
        self.downloads.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # what activating the environment does
        kept = {name: value for name, value in self.course.environment.items() if not name.startswith("JUPYTER")}
        self.environment = kept | {
            "HOME": str(root / "home"), "PATH": path, "LAUNCHLAB_PYTHON": sys.executable, "LAUNCHLAB_BUILD": str(self.build), "COLUMNS": "300",
            **({"LAUNCHLAB_GRADEBOOK": database} if database else {}),
        }  # fmt: skip
        self.database = database or f"sqlite:///{self.build / 'gradebook.db'}"
        self.typed: set[str] = set()

    def start(self, command: str, more: str = "") -> subprocess.Popen:
        """Start a command of the page, for the tests' chapter instead of chapter 3."""
        self.typed.add(command)
        line = re.sub(r"(\./launch \w+) 3\b", rf"\1 {NAME}", command).replace("03_cuda_graph_concepts", NAME)
        return subprocess.Popen(
            ["bash", "-c", f"exec {line} {more}"], cwd=self.course.root / "grader", env=self.environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def type(self, command: str) -> str:
        """Run a command; its output, on one line."""
        process = self.start(command)
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, f"{command}\n{said}"
        return re.sub(r"\s*\n\s*", "", said)

    def section(self, heading: str) -> str:
        """Run all commands under a heading; what they said."""
        return "\n".join(self.type(command) for command in commands(heading))

    def export(self, name: str, files: dict[str, tuple[NotebookNode | bytes, datetime]]) -> None:
        """What the learning platform exports, as Moodle names it, with names in GBK as old programs write them."""
        entries = [
            (entry(f"{student}_assignsubmission_file_/作业.ipynb", when), nb if isinstance(nb, bytes) else json.dumps(nb, ensure_ascii=False).encode())
            for student, (nb, when) in files.items()
        ]
        zipped(self.downloads / name, *entries, ("说明.txt", b""), encoding="gbk")

    def marks(self) -> dict[str, dict[str, float | None]]:
        """Student -> test -> the mark in force; None while it waits for a person."""
        with Gradebook(self.database, "launchlab") as book:
            found = {}
            for submission in book.assignment_submissions(NAME):
                grades = [grade for notebook in submission.notebooks for grade in notebook.grades]
                assert len(grades) == len({grade.name for grade in grades})
                found[submission.student_id] = {grade.name: None if grade.needs_manual_grade else grade.score for grade in grades}
            return found

    def table(self) -> dict[str, dict[str, str]]:
        """The rows of the exported marks, by student."""
        with (self.build / "grades.csv").open(encoding="utf-8-sig", newline="") as file:
            return {row["student_id"]: row for row in csv.DictReader(file)}

    @contextlib.contextmanager
    def lab(self) -> Iterator[Callable]:
        """JupyterLab as the page starts it; yields a function that asks it over HTTP: (path, data to put) -> body."""
        port = free_port()
        process = self.start("./launch lab", f"--no-browser --port={port} --IdentityProvider.token=t >{self.build}/lab.log 2>&1")

        def ask(path: str, put: dict | None = None) -> str:
            data = json.dumps(put).encode() if put is not None else None
            headers = {"Authorization": "token t", "Content-Type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data, headers, method="PUT" if put is not None else "GET")
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.read().decode()

        with answering(process, lambda: ask("api/status")):
            yield ask


def commands(heading: str) -> list[str]:
    """What the page says to type under a heading."""
    section = PAGE[PAGE.index(f"\n## {heading}\n") :].split("\n## ")[1]
    return [line for block in re.findall(r"```\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]


def wrong(nb: NotebookNode) -> NotebookNode:
    """A submission with one answer wrong."""
    next(cell for cell in nb.cells if cell.id == "solution-advance").source = "def advance(state, rounds):\n    pass"
    return nb


def class_of(course: Course) -> dict[str, NotebookNode | bytes]:
    """Three students: one is right, one made a mistake, and one file was cut off on its way."""
    return {"王芳": course.honest, "张三": wrong(course.honest), "李四": json.dumps(course.honest).encode()[:3000]}


def give_mark(ask: Callable, page: str, test: str, mark: float) -> None:
    """What a click in formgrader does: look at the submission, then set the mark of one exercise."""
    assert "文件不是完整的笔记本" in ask(page)
    submission = page.strip("/").split("/")[-1]
    (grade,) = [grade for grade in json.loads(ask(f"formgrader/api/grades?submission_id={submission}")) if grade["name"] == test]
    assert grade["needs_manual_grade"] and grade["auto_score"] is None
    assert not json.loads(ask(f"formgrader/api/grade/{grade['id']}", put={"manual_score": mark, "extra_credit": None}))["needs_manual_grade"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    course = Course.make(tmp_path_factory.mktemp("day") / "c")
    (course.root / "grader" / "launch").symlink_to(paths.GRADER / "launch")
    for page in ("README.md", "grader/PLATFORMS.md"):  # `build` keeps tables there
        shutil.copy(paths.ROOT / page, course.root / page)
    return course.root


@pytest.fixture
def desk(made, tmp_path) -> Desk:
    return Desk(shutil.copytree(made, tmp_path / "c", symlinks=True))


def test_the_day(desk):
    assert "2026-03-20 23:59" in desk.section("1 发布")
    before = DUE - timedelta(days=1)
    desk.export("第三章.zip", {f"{student}_{number}": (nb, before) for number, (student, nb) in enumerate(class_of(desk.course).items())})
    said = desk.section("2 收卷")
    assert "3 份提交" in said and "说明.txt：看不出是谁的" in said
    desk.section("3 评分")
    open_ones = dict.fromkeys(POINTS)
    assert desk.marks() == {"王芳": ALL, "张三": ALL | {"test_advance": 0}, "李四": open_ones}

    # What is open is listed, and closed in formgrader.
    list_open, start_lab = commands("4 未定的项目")
    said = desk.type(list_open)
    assert "3 项未定" in said and "李四" in said and "王芳" not in said and "未能受理" in said
    page = re.search(r"formgrader/submissions/\w+/", said)[0]
    with desk.lab() as ask:
        assert start_lab in desk.typed
        waiting = {each["student"]: each["needs_manual_grade"] for each in json.loads(ask(f"formgrader/api/submitted_notebooks/{NAME}/{NAME}"))}
        assert waiting == {"王芳": False, "张三": False, "李四": True}
        for test, mark in (("test_total_us", 2), ("test_advance", 1.5)):
            give_mark(ask, page, test, mark)
    by_hand = {"test_total_us": 2, "test_advance": 1.5, "test_longest_path": None}
    assert desk.marks()["李四"] == by_hand

    # A second submission, late, with a penalty for it; and one that is older than what was collected.
    with (desk.course.root / "grader" / "nbgrader_config.py").open("a", encoding="utf-8") as config:
        config.write(PYTHON_BLOCK.search(PAGE)[1])
    late = DUE + timedelta(hours=26)
    desk.export("第三章-补交.zip", {"张三_1": (desk.course.honest, late), "王芳_0": (wrong(desk.course.honest), DUE - timedelta(days=2))})
    graded = (desk.build / "reports" / "王芳" / f"{NAME}.json").stat().st_mtime_ns
    said = desk.section("迟交，第二次提交")
    assert "迟交 26 小时 0 分" in said and "换成新的一份" in said and "没有换" in said
    assert desk.marks() == {"王芳": ALL, "张三": ALL, "李四": by_hand}
    assert (desk.build / "reports" / "王芳" / f"{NAME}.json").stat().st_mtime_ns == graded  # not again
    # Whoever looks at feedback and reports sees the marks in force. (This section has the commands of section 5.)
    assert set(commands("5 反馈")) <= desk.typed
    assert "未通过" not in (desk.build / "feedback" / "张三" / NAME / f"{NAME}.html").read_text(encoding="utf-8")
    assert "教师改过这个分数" in (desk.build / "reports" / "李四" / f"{NAME}.html").read_text(encoding="utf-8")
    assert "全班 3 份提交" in (desk.build / "reports" / f"{NAME}.html").read_text(encoding="utf-8")
    assert len(list((desk.build / "earlier" / "张三" / NAME).iterdir())) == 1

    # A test is mended so that it asks for more, and the chapter gains one, in mid-course.
    source = desk.course.source.read_text(encoding="utf-8").replace("rounds = int(secret.integers(5, 40))", "rounds = int(secret.integers(50, 90))")
    more = f'{MORE}\n# %% [markdown]\n# ## 小结'
    desk.course.source.write_text(source.replace("\n# %% [markdown]\n# ## 小结", more), encoding="utf-8")
    manifest = desk.course.root / "grader" / "chapters.toml"
    manifest.write_text(manifest.read_text(encoding="utf-8").replace("points = 8", "points = 10"), encoding="utf-8")
    for command in commands("测试修好了，或者学期中换了内容")[:-1]:  # the last makes reports, as above
        desk.type(command)
    new = {"test_no_edges": 2}
    assert desk.marks() == {"王芳": ALL | new, "张三": ALL | new, "李四": open_ones | {"test_no_edges": None}}
    assert "教师给过 1.5 分" in desk.type(list_open)  # whoever gave marks by hand looks at them again
    desk.section("6 成绩")
    told = {student: (row["raw_score"], row["score"], row["max_score"], row["hours_late"], row["open"]) for student, row in desk.table().items()}
    assert told == {"王芳": ("10.0", "10.0", "10.0", "0.0", "0"), "张三": ("10.0", "0.0", "10.0", "26.0", "0"), "李四": ("3.5", "3.5", "10.0", "0.0", "4")}
    wanted = {command for heading in re.findall(r"^## (.*)$", PAGE, re.MULTILINE) for command in commands(heading)}
    assert {command for command in wanted - desk.typed if not command.startswith("export ")} == set()
    assert desk.course.survivors() == []


def test_several_graders_on_one_postgresql_server(desk):
    """Two machines, each with files of its own, grade the same class at the same time; then one looks at it in formgrader."""
    with postgres.server() as url:
        assert any(command.startswith("export LAUNCHLAB_GRADEBOOK='postgresql://") for command in commands("几位教师一起评"))
        desks = [Desk(desk.course.root, url, f"build{number}") for number in (1, 2)]
        for each in desks:
            for student, nb in class_of(desk.course).items():
                each.course.hand_in(student, nb)
        grade = commands("3 评分")[0]
        running = [each.start(grade) for each in desks]  # the first to come makes the gradebook
        outputs = [process.communicate(timeout=240)[0] for process in running]
        assert [process.returncode for process in running] == [0, 0], outputs
        assert not (desk.build / "gradebook.db").exists() and not list(desk.course.root.glob("build*/gradebook.db"))
        expected = {"王芳": ALL, "张三": ALL | {"test_advance": 0}, "李四": dict.fromkeys(POINTS)}
        assert desks[0].marks() == expected
        with desks[1].lab() as ask:
            (waiting,) = [each for each in json.loads(ask(f"formgrader/api/submitted_notebooks/{NAME}/{NAME}")) if each["needs_manual_grade"]]
            assert len(json.loads(ask("formgrader/api/assignments"))) == 1
            assert {each["id"]: each["score"] for each in json.loads(ask("formgrader/api/students"))} == {"王芳": 8, "张三": 5, "李四": 0}
            give_mark(ask, f"formgrader/submissions/{waiting['id']}/", "test_advance", 1.5)
        assert desks[0].marks() == expected | {"李四": expected["李四"] | {"test_advance": 1.5}}  # at the other desk
        desks[0].section("6 成绩")
        assert {student: row["score"] for student, row in desks[0].table().items()} == {"王芳": "8.0", "张三": "5.0", "李四": "1.5"}
