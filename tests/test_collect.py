"""`launchlab collect` on what learning platforms export, on what people zip up by hand, and on what is meant to harm."""

import io
import json
import os
import shutil
import struct
import time
import zipfile
import zlib
from datetime import UTC, datetime
from pathlib import Path

import pytest
from nbgrader.api import Gradebook
from zips import entry, zipped

from launchlab import cli, paths
from launchlab.grading import archive

NAME = "90_mini"
FRIDAY, SATURDAY, SUNDAY = (datetime(2026, 11, day, 10, 30, tzinfo=UTC) for day in (27, 28, 29))
TIMES = {"FRIDAY": FRIDAY, "SATURDAY": SATURDAY}


@pytest.fixture
def mini(mini_with_gradebook):
    return mini_with_gradebook


@pytest.fixture
def collect(mini, capsys):
    """Runs the command as typed; returns (exit status, all that it said, on one line)."""

    def run(source: Path, *options: str) -> tuple[int, str]:
        code = cli.run(["collect", NAME, str(source), *options])
        return code, capsys.readouterr().out.replace("\n", "")

    return run


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")


def notebook(text: str = "") -> bytes:
    return json.dumps({"cells": [], "metadata": {"mark": text}, "nbformat": 4, "nbformat_minor": 5}).encode()


def submitted() -> dict[str, str]:
    """student -> the mark in the notebook that counts."""
    found = {}
    for path in sorted((paths.BUILD / "submitted").glob(f"*/{NAME}/{NAME}.ipynb")):
        found[path.parents[1].name] = json.loads(path.read_bytes())["metadata"]["mark"]
    return found


def stamp(student: str) -> str:
    return (paths.BUILD / "submitted" / student / NAME / "timestamp.txt").read_text().strip()


def everything() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in paths.BUILD.rglob("*") if path.is_file() and path.suffix not in (".lock", ".log", ".db")}


EXPORTS = {
    "Moodle": [("张三_10001_assignsubmission_file_/作业.ipynb", "a"), ("李四 Li_10002_assignsubmission_file_/90_mini.ipynb", "b"), ("李四 Li_10002_assignsubmission_onlinetext_/onlinetext.html", None)],
    "Moodle without folders": [("张三_10001_assignsubmission_file_90_mini.ipynb", "a"), ("李四 Li_10002_assignsubmission_file_work_1_2_x.ipynb", "b")],
    "Canvas": [("张三_10001_55501_90_mini.ipynb", "a"), ("lisi_LATE_10002_55502_90_mini-1.ipynb", "b")],
    "Canvas, a single one": [("lisi_10002_55502_90_mini.ipynb", "b")],
    "Blackboard": [("hw1_张三_attempt_2026-11-27-18-30-00_90_mini.ipynb", "a"), ("hw1_张三_attempt_2026-11-27-18-30-00.txt", None), ("hw1_lisi_attempt_2026-11-28-18-30-00_x.ipynb", "b")],
    "nbgrader": [("submitted/张三/90_mini/90_mini.ipynb", "a"), ("submitted/lisi/90_mini/90_mini.ipynb", "b")],
    "a folder each": [("张三/作业.ipynb", "a"), ("lisi/work_1_2_x.ipynb", "b")],
    "a folder each, wrapped": [("第三周/提交/张三/作业.ipynb", "a"), ("第三周/提交/lisi/x.ipynb", "b"), ("第三周/说明.txt", None)],
    "a folder each, a zip in each": [("张三/作业.zip", zipfile), ("lisi/x.ipynb", "b")],
    "by the files' names": [("张三_90_mini.ipynb", "a"), ("90_mini-lisi.ipynb", "b"), ("90_mini.ipynb", None)],
    "by the files' names, wrapped": [("作业/张三_90_mini.ipynb", "a"), ("作业/90_mini_lisi (2).ipynb", "b")],
    "of a Mac": [("张三/x.ipynb", "a"), ("__MACOSX/张三/._x.ipynb", "no"), ("张三/.DS_Store", None), ("张三/.ipynb_checkpoints/x-checkpoint.ipynb", "no"), ("lisi/x.ipynb.txt", "b")],
}  # fmt: skip


def contents(text) -> bytes:
    if text is zipfile:  # what a student packed
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as inner:
            inner.writestr(entry("作业/90_mini.ipynb"), notebook("a"))
            inner.writestr(entry("作业/helper.py"), "x = 1\n")
        return packed.getvalue()
    return b"text" if text is None else notebook(text)


@pytest.mark.parametrize("kind", ["zip", "folder"])
@pytest.mark.parametrize("export", EXPORTS)
def test_exports_of_platforms(collect, tmp_path, export, kind):
    files = [(name, contents(text)) for name, text in EXPORTS[export]]
    if kind == "zip":
        source = zipped(tmp_path / "export.zip", *files)
    else:
        source = tmp_path / "export"
        for name, data in files:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(data)
            os.utime(source / name, (FRIDAY.timestamp(), FRIDAY.timestamp()))
    code, said = collect(source)
    assert code == 0, said
    expected = {"李四 Li" if "Moodle" in export else "lisi": "b"} | ({} if "single" in export else {"张三": "a"})
    assert submitted() == expected, said
    if "Blackboard" not in export:
        assert stamp(next(iter(expected))) == "2026-11-27 10:30:00 UTC"
    if "zip in each" in export:
        assert (paths.BUILD / "submitted/张三/90_mini/helper.py").read_text() == "x = 1\n"
    if export == "by the files' names":
        assert "90_mini.ipynb：看不出是谁的" in said
    assert not list(paths.BUILD.glob("collecting-*"))
    before = everything()
    assert collect(source)[0] == 0
    assert everything() == before  # once more changes nothing


@pytest.mark.parametrize(
    ("encoding", "students"),
    [("gbk", ["张三", "朱镕喆"]), ("gb18030", ["龘龘 王", "李四"]), ("utf-8", ["张三", "朱镕喆"]), ("cp437", ["José", "Müller", "Ñoño"])],
)
def test_names_whose_encoding_nobody_tells(collect, tmp_path, encoding, students):
    files = [(f"{name}_{number}_assignsubmission_file_/x.ipynb", notebook(name)) for number, name in enumerate(students)]
    code, said = collect(zipped(tmp_path / "export.zip", *files, encoding=encoding))
    assert code == 0 and submitted() == {name: name for name in students}, said


def test_extra_fields_tell_names_and_times(collect, tmp_path):
    raw, name = b"wang_1_assignsubmission_file_/x.ipynb", "王五_1_assignsubmission_file_/x.ipynb"
    told = entry(raw.decode(), SUNDAY)
    text = b"\1" + struct.pack("<L", zlib.crc32(raw)) + name.encode()
    told.extra = struct.pack("<HH", 0x7075, len(text)) + text + struct.pack("<HHBl", 0x5455, 5, 1, int(FRIDAY.timestamp()))
    assert collect(zipped(tmp_path / "export.zip", (told, notebook())))[0] == 0
    assert set(submitted()) == {"王五"}
    assert stamp("王五") == "2026-11-27 10:30:00 UTC"


def test_the_newest_counts_and_the_earlier_are_kept(collect, tmp_path):
    code, said = collect(zipped(
        tmp_path / "1.zip",
        (entry("zhang_10001_55501_90_mini.ipynb", SATURDAY), notebook("newest")), (entry("zhang_10001_55502_90_mini-1.ipynb", FRIDAY), notebook("draft")),
        (entry("li_10002_55503_90_mini.ipynb", FRIDAY), notebook("first")), (entry("li_10002_55504_90_mini.ipynb", FRIDAY), notebook("second")),
        ("zhang_10001_55505_91_other_chapter.ipynb", notebook("no part of it")),
    ))  # fmt: skip
    assert code == 0 and "交了 3 个笔记本" in said
    assert submitted() == {"zhang": "newest", "li": "second"}  # of one time: the later upload
    assert sorted(json.loads(path.read_bytes())["metadata"]["mark"] for path in (paths.BUILD / "earlier").rglob("*.ipynb")) == ["draft", "first", "no part of it"]


def test_a_notebook_of_another_chapter_is_left(collect, tmp_path, monkeypatch):
    manifest = paths.GRADER / "chapters.toml"
    text = manifest.read_text(encoding="utf-8")
    other = text[text.index("[[chapters]]") :].replace("number = 90", "number = 91").replace('"mini"', '"other"')
    monkeypatch.setattr(paths, "GRADER", tmp_path / "grader")
    shutil.copytree(manifest.parent, paths.GRADER)
    (paths.GRADER / "chapters.toml").write_text(text + other, encoding="utf-8")
    _, said = collect(zipped(tmp_path / "1.zip", (entry("张三/91_other.ipynb", SUNDAY), notebook("b")), ("张三/作业.ipynb", notebook("a")), ("李四/91_other.ipynb", notebook("b"))))
    assert submitted() == {"张三": "a"}
    assert "李四/91_other.ipynb：是另一章的笔记本" in said


def test_a_second_submission_replaces_the_first_only_if_newer(collect, tmp_path):
    exports = {when: zipped(tmp_path / f"{when}.zip", (entry("张三/x.ipynb", time), notebook(when)), ("张三/data.csv", b"1")) for when, time in TIMES.items()}
    assert collect(exports["FRIDAY"])[0] == 0
    graded = paths.BUILD / "autograded" / "张三" / NAME / f"{NAME}.ipynb"
    graded.parent.mkdir(parents=True)
    graded.write_text("graded on Friday", encoding="utf-8")
    code, said = collect(exports["SATURDAY"])
    assert code == 0 and "换成新的一份" in said
    assert submitted() == {"张三": "SATURDAY"} and stamp("张三").startswith("2026-11-28")
    assert not graded.exists()  # nbgrader would skip the new one
    (kept,) = (paths.BUILD / "earlier" / "张三" / NAME).iterdir()
    assert json.loads((kept / f"{NAME}.ipynb").read_bytes())["metadata"]["mark"] == "FRIDAY"
    assert (kept / "data.csv").read_bytes() == b"1"
    assert (kept / "autograded" / f"{NAME}.ipynb").read_text(encoding="utf-8") == "graded on Friday"
    before = everything()
    code, said = collect(exports["FRIDAY"])
    assert code == 0 and "没有换" in said and everything() == before
    assert "迟交" not in said


def test_late_by_the_due_date(collect, tmp_path, capsys):
    assert cli.run(["release", NAME, "--due", FRIDAY.isoformat()]) == 0
    with zipfile.ZipFile(paths.BUILD / "release" / f"{NAME}.zip") as made:
        assert {f"{NAME}/{NAME}.ipynb", f"{NAME}/samples.csv"} == set(made.namelist())
        assert b"BEGIN HIDDEN" not in made.read(f"{NAME}/{NAME}.ipynb")
    capsys.readouterr()
    source = zipped(tmp_path / "export.zip", (entry("a/x.ipynb", SATURDAY), notebook()), (entry("b/x.ipynb", FRIDAY), notebook()), (entry("c_LATE_11_22_x.ipynb", FRIDAY), notebook()))
    _, said = collect(source)
    assert said.count("迟交 24 小时 0 分") == 1 and said.count("平台记为迟交") == 1
    shutil.rmtree(paths.BUILD / "submitted")
    _, said = collect(source, "--at", FRIDAY.replace(hour=13, minute=0).isoformat())
    assert said.count("迟交 2 小时 30 分") == 3 and stamp("b") == "2026-11-27 13:00:00 UTC"
    with Gradebook(f"sqlite:///{paths.BUILD / 'gradebook.db'}", "launchlab") as book:
        assert book.find_assignment(NAME).duedate == FRIDAY.replace(tzinfo=None)


def test_namesakes_are_told_apart(collect, tmp_path):
    both = [("张伟_1_assignsubmission_file_/x.ipynb", notebook("one")), ("张伟_2_assignsubmission_file_/x.ipynb", notebook("two"))]
    assert collect(zipped(tmp_path / "1.zip", *both))[0] == 0
    assert submitted() == {"张伟_1": "one", "张伟_2": "two"}
    shutil.rmtree(paths.BUILD / "submitted")
    collect(zipped(tmp_path / "2.zip", both[0]))
    _, said = collect(zipped(tmp_path / "3.zip", both[1]))
    assert submitted() == {"张伟": "one", "张伟_2": "two"} and "同名" in said


def test_what_is_no_submission_is_told_and_left(collect, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "名单.xlsx").write_bytes(b"PK")
    (tmp_path / "folder" / "张三").mkdir()
    (tmp_path / "folder" / "张三" / "报告.pdf").write_bytes(b"%PDF")
    (tmp_path / "folder" / "李四").mkdir()
    (tmp_path / "folder" / "李四" / "x.ipynb").symlink_to("/etc/passwd")
    code, said = collect(tmp_path / "folder")
    assert code == 1 and not (paths.BUILD / "submitted").exists()
    for word in ("名单.xlsx：看不出是谁的", "张三 交的文件里没有笔记本", "李四/x.ipynb：是链接", "没有认出任何人的提交", "每人一个文件夹"):
        assert word in said
    assert (tmp_path / "folder" / "张三" / "报告.pdf").exists()


@pytest.mark.parametrize(
    ("name", "data", "word"),
    [("没有.zip", None, "没有找到"), ("x.rar", b"Rar!", "只读 zip"), ("x.zip", b"PK\3\4 cut", "没有下载完"), ("x.zip", "cut", "没有下载完"), ("x.pdf", b"%PDF", "不是完整的 zip")],
)
def test_a_source_that_cannot_be_read(collect, tmp_path, name, data, word):
    if data == "cut":
        data = zipped(tmp_path / "whole.zip", ("张三/x.ipynb", os.urandom(5000))).read_bytes()[:3000]
    if data is not None:
        (tmp_path / name).write_bytes(data)
    code, said = collect(tmp_path / name)
    assert code == 2 and word in said and "Traceback" not in said
    assert not (paths.BUILD / "submitted").exists()


def test_a_time_that_cannot_be_read(collect, tmp_path):
    code, said = collect(zipped(tmp_path / "x.zip", ("张三/x.ipynb", notebook())), "--at", "昨天")
    assert code == 2 and "2026-11-30 18:00" in said
    assert not (paths.BUILD / "submitted").exists()


def test_nothing_escapes_from_an_archive(collect, tmp_path):
    outside = sorted(tmp_path.rglob("*"))
    link = entry("链接/x.ipynb")
    link.external_attr = 0o120777 << 16
    evil = ["../../外面/x.ipynb", "/etc/外面/x.ipynb", "C:/外面/x.ipynb", "张三/../../../x.ipynb", "a\x1b[2J/x.ipynb", f"{'长' * 90}/x.ipynb"]
    source = zipped(tmp_path / "export.zip", *((name, notebook("evil")) for name in evil), (link, b"/etc/passwd"), ("..\\..\\外面\\x.ipynb", notebook("evil")), ("[b]*?{c}<img>/x.ipynb", notebook("odd")), (".隐藏/x.ipynb", notebook("evil")))
    code, said = collect(source)
    assert code == 0, said
    assert said.count("路径可疑") == 6 and said.count("名字太长") == 1 and said.count("是链接") == 1, said
    assert list(submitted().values()) == ["odd"]
    assert not set("[]*?{}<>") & set("".join(submitted()))
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in outside and not path.is_relative_to(paths.BUILD)] == [source]


def test_bombs(collect, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "LARGEST", 1 << 20)
    zeros = bytes(3 << 20)
    source = zipped(tmp_path / "export.zip", ("张三/x.ipynb", notebook("a")), ("张三/big.bin", zeros), ("李四/x.ipynb", zeros))
    code, said = collect(source)
    assert code == 0 and submitted() == {"张三": "a"} and said.count("太大了") == 2
    monkeypatch.setattr(archive, "LARGEST_TOTAL", 4 << 20)
    inner = zipped(tmp_path / "inner.zip", *((f"{number}.bin", bytes(1 << 20)) for number in range(9))).read_bytes()
    code, said = collect(zipped(tmp_path / "nested.zip", ("王五/x.ipynb", notebook()), ("王五/bomb.zip", inner)))
    assert code == 2 and "压缩包炸弹" in said and submitted() == {"张三": "a"}
    monkeypatch.setattr(archive, "MOST_FILES", 5)
    code, said = collect(zipped(tmp_path / "many.zip", *((f"王五/{number}", b"") for number in range(9))))
    assert code == 2 and "5 个以上的文件" in said
    assert not list(paths.BUILD.glob("collecting-*"))


def test_broken_and_locked_entries_cost_only_themselves(collect, tmp_path):
    body = os.urandom(4000)
    source = zipped(tmp_path / "export.zip", ("张三/x.ipynb", notebook("a")), ("李四/x.ipynb", body), ("王五/x.ipynb", notebook("c")))
    data = bytearray(source.read_bytes())
    at = data.index(body[100:120])
    data[at] ^= 0xFF
    for signature, offset in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):  # the last entry says that it is encrypted
        data[data.rindex(signature) + offset] |= 1
    source.write_bytes(data)
    code, said = collect(source)
    assert code == 0 and submitted() == {"张三": "a"}
    assert "李四/x.ipynb：在压缩包里坏了" in said and "王五/x.ipynb：有密码" in said


def test_files_beside_the_notebook(collect, tmp_path):
    files = {"hw/x.ipynb": notebook("a"), "hw/helper.py": b"1", "hw/data/d.csv": b"2", "hw/data": b"3", "hw/timestamp.txt": b"1999-01-01", "notes.txt": b"4"}
    code, said = collect(zipped(tmp_path / "1.zip", *((f"张三_1_assignsubmission_file_/{name}", data) for name, data in files.items())))
    assert code == 0
    folder = paths.BUILD / "submitted" / "张三" / NAME
    assert (folder / "helper.py").read_bytes() == b"1" and (folder / "data" / "d.csv").read_bytes() == b"2"
    assert stamp("张三").startswith("2026-11-27")
    for word in ("交卷时间不能由学生自己写", "notes.txt：不在笔记本旁边", "hw/data：和另一个文件或文件夹同名"):
        assert word in said


def test_times_that_archives_leave_out(collect, tmp_path):
    source = zipped(tmp_path / "1.zip", (zipfile.ZipInfo("张三/x.ipynb"), notebook("first")))  # 1980
    began = time.time()
    code, said = collect(source)
    assert code == 0 and "不知道交卷时间" in said
    assert abs(datetime.fromisoformat(stamp("张三").replace(" UTC", "+00:00")).timestamp() - began) < 60
    assert "已经收过" in collect(source)[1]


def test_a_full_disk_loses_nothing(collect, tmp_path, monkeypatch):
    source = zipped(tmp_path / "1.zip", ("张三/x.ipynb", notebook("a")))
    assert collect(source)[0] == 0
    before = everything()

    def full(*_):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(shutil, "copyfile", full)
    code, said = collect(zipped(tmp_path / "2.zip", (entry("张三/x.ipynb", SUNDAY), notebook("b"))))
    assert code == 2 and "已经收下的都还在" in said and everything() == before


def test_an_unreachable_gradebook_is_said_before_anything_is_touched(collect, tmp_path, monkeypatch):
    monkeypatch.setenv("LAUNCHLAB_GRADEBOOK", f"postgresql://me:geheim@/x?host={tmp_path}")
    code, said = collect(zipped(tmp_path / "1.zip", ("张三/x.ipynb", notebook("a"))))
    assert code == 2 and "连不上成绩册" in said and "LAUNCHLAB_GRADEBOOK" in said and "geheim" not in said
    assert not (paths.BUILD / "submitted").exists()
