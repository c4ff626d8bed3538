"""Built notebooks are what their sources say, byte for byte, and give nothing away."""

import json
import os
import re
import subprocess
import sys

import nbformat
import pytest
from nbgrader.utils import is_grade, is_solution

from launchlab import paths
from launchlab.course import build, rules, source
from launchlab.course.release import ReleaseError
from launchlab.manifest import chapters

READY = [pytest.param(each, id=each.name) for each in chapters() if each.ready]
REGION = re.compile(r"### BEGIN (?:SOLUTION|HIDDEN TESTS).*?\n(.*?)### END (?:SOLUTION|HIDDEN TESTS)", re.DOTALL)


@pytest.mark.parametrize("chapter", READY)
def test_committed_notebooks_are_what_the_source_builds(chapter):
    assert build.differences(chapter, build.build(chapter)) == []


@pytest.mark.parametrize("chapter", READY)
def test_release_gives_nothing_away(chapter):
    assert leaks(chapter) == []


def leaks(chapter) -> list[str]:
    """Lines that only solutions, hidden tests or instructor's cells hold, found in the release's files."""
    nb = source.parse(chapter.source.read_text(encoding="utf-8"))
    shown, secret = set(), {"### BEGIN SOLUTION", "### BEGIN HIDDEN TESTS"}
    for cell in nb.cells:
        if "instructor" in source.tags(cell):
            secret |= lines(cell.source)
        else:
            shown |= lines(REGION.sub("", cell.source))
            secret |= {line for region in REGION.findall(cell.source) for line in lines(region)}
    secret = {line for line in secret - shown if len(line) >= 8}
    assert secret
    found = []
    for path in chapter.release.parent.rglob("*"):
        if path.is_file():
            text = path.read_bytes().decode(errors="replace")
            held = "\n".join(strings(json.loads(text))) if path.suffix == ".ipynb" else text
            found += [f"{path.name}: {line}" for line in sorted(secret & lines(held))]
            found += [f"{path.name}: {mark}" for mark in ("BEGIN SOLUTION", "BEGIN HIDDEN", "# %%") if mark in held]
    return found


def lines(text: str) -> set[str]:
    return {line.strip() for line in text.split("\n")}


def strings(value) -> list[str]:
    """All strings within a JSON value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    return [text for item in value for text in strings(item)] if isinstance(value, list) else []


def test_leaks_are_found(mini):
    """The test above, tested: each kind of secret, put into the release, is found."""
    assert leaks(mini) == []
    clean = mini.release.read_text(encoding="utf-8")
    nb = nbformat.reads(clean, as_version=4)
    for leak in (
        "    known: dict = {}",
        "for shape in ((257,), (3, 5)):",
        "给教师：这一章只供测试使用。INSTRUCTOR-ONLY 这个单元不会出现在发布版里。",
    ):
        nb.cells[1].source = leak
        mini.release.write_text(nbformat.writes(nb), encoding="utf-8")
        assert len(leaks(mini)) == 1, leak
    mini.release.write_text(clean, encoding="utf-8")
    (mini.release.parent / "notes.txt").write_bytes(mini.source.read_bytes())
    assert leaks(mini)


def test_release_of_the_mini_chapter(mini):
    nb = nbformat.read(mini.release, as_version=4)
    assert sorted(path.name for path in mini.release.parent.iterdir()) == ["90_mini.ipynb", "samples.csv"]
    assert not any("instructor" in source.tags(cell) for cell in nb.cells)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert all(cell.metadata.get("editable", True) for cell in code if not is_grade(cell))
    assert [cell.id for cell in code if is_solution(cell)] == ["solution-total_us", "solution-advance", "solution-longest_path"]
    advance = next(cell for cell in code if cell.id == "solution-advance")
    assert advance.source.split("\n")[-1] == '    raise NotImplementedError("每一轮四步，都直接改 state 本身，不要返回新数组")'
    test = next(cell for cell in code if cell.id == "test-advance")
    assert test.metadata.launchlab.kind == "structure" and test.metadata.nbgrader.points == 3
    assert nb.metadata.kernelspec.name == "python3" and "version" not in nb.metadata.language_info


def test_build_is_repeatable_in_another_process(mini):
    before = {path: path.read_bytes() for path in (mini.solution, mini.release)}
    for path in before:
        path.unlink()
    command = [sys.executable, "-c", "import sys; from launchlab.course import build; sys.exit(build.main(['90_mini'], False))"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "1"}, cwd=mini.source.parent)
    assert {path: path.read_bytes() for path in before} == before


def test_check_names_what_differs_and_writes_nothing(mini, capsys):
    assert build.main(["90_mini"], check=True) == 0
    mini.release.write_text(mini.release.read_text(encoding="utf-8").replace("总时间", "总的时间"), encoding="utf-8")
    (mini.release.parent / "samples.csv").unlink()
    (mini.release.parent / "stray.txt").write_text("x")
    before = mini.release.read_bytes()
    capsys.readouterr()
    assert build.main(["90_mini"], check=True) == 1
    told = capsys.readouterr().out
    assert "course/90_mini/90_mini.ipynb：与源文件不一致" in told
    assert "course/90_mini/samples.csv：缺失" in told
    assert "course/90_mini/stray.txt：不属于发布版" in told
    assert mini.release.read_bytes() == before
    assert build.main(["90_mini"], check=False) == 0
    assert (mini.release.parent / "stray.txt").exists()


def test_building_touches_no_gradebook(mini):
    assert not (paths.BUILD / "gradebook.db").exists()


HINT = "<details><summary>点拨</summary>\n#\n# CPU 和 GPU"
STUB = "### BEGIN SOLUTION: 想一想：稳定以后，每一步等的是 CPU 的启动，还是 GPU 的运行？"
REFUSED = {
    "solution name twice": ('solution="advance"', 'solution="total_us"', "练习名 total_us 用了 2 次"),
    "test name twice": ('test="advance"', 'test="total_us"', "练习名 test_total_us 用了 2 次"),
    "one hint only": (HINT, "CPU 和 GPU", "练习 total_us：答题单元的前一个要是文字单元，里面正好两层提示"),
    "empty hint": (
        "# 用 `^=`、`*=`、`+=`，或者 `state[:] = …`；`uint32` 数组的溢出本来就按 2³² 取模。\n",
        "",
        "练习 advance：第 2 层提示是空的",
    ),
    "hint elsewhere": ('# %% solution="advance"', '# %%\npass\n\n# %% solution="advance"', "练习 advance：答题单元的前一个"),
    "no hidden tests": (
        "### BEGIN HIDDEN TESTS\ncheck.equal(student.longest_path([])",
        "check.equal(student.longest_path([])",
        "test_longest_path：要有 ### BEGIN HIDDEN TESTS",
    ),
    "stub without text": (STUB, "### BEGIN SOLUTION", "答题单元 total_us：BEGIN SOLUTION 后面缺一句会教人的话"),
    "solution without region": (STUB, "# 想一想", "答题单元 total_us：没有 ### BEGIN SOLUTION"),
    "demo name in a solution": (
        "    if n == 0:\n",
        "    if n == 0 or not table:\n",
        "total_us：用到的 table 只在演示单元（demo）里定义",
    ),
    "demo name in a test": (
        "### BEGIN HIDDEN TESTS\ncheck.equal(student.total_us",
        '### BEGIN HIDDEN TESTS\nstudent.value("table")\ncheck.equal(student.total_us',
        "test_total_us：用到的 table 只在演示单元（demo）里定义",
    ),
    "test that overwrites a function": (
        "### BEGIN HIDDEN TESTS\ncheck.equal(student.total_us",
        "### BEGIN HIDDEN TESTS\nfor total_us in ():\n    pass\ncheck.equal(student.total_us",
        "test_total_us：total_us 是笔记本里的函数或类，测试单元里换个名字",
    ),
    "two titles": ("# ## 小结", "# # 小结", "正好要有一个一级标题（# …），现在有 2 个"),
    "skipped level": ("# ## 小结", "# #### 小结", "标题从 2 级跳到了 4 级"),
    "points": ("points=2", "points=1", "测试单元的分数合计 7，chapters.toml 里写的是 8"),
    "no points": (" points=2", "", "test_total_us：points 要是正数"),
    "unknown kind": ('kind="answer"', 'kind="speed"', "test_total_us：kind 要是 answer、structure、speedup 之一"),
    "unknown tag": ('tags=["demo"]', 'tags=["dmeo"]', "不认识的标签 dmeo"),
    "unknown metadata": ("points=2", "points=2 pionts=2", "test_total_us：不认识的元数据 pionts"),
    "test without solution": ('# %% solution="total_us"', "# %%", "test_total_us：测试单元前面没有答题单元"),
    "solution without test": (
        '# %% test="longest_path" kind="structure" points=3',
        "# %%",
        "练习 longest_path：答题单元后面没有测试单元",
    ),
    "hidden test in a given cell": (
        '# %% tags=["demo"]',
        '# %% tags=["demo"]\n### BEGIN HIDDEN TESTS\n### END HIDDEN TESTS',
        "只有测试单元能有隐藏测试",
    ),
    "magic command": ('# %% tags=["demo"]', '# %% tags=["demo"]\n# %matplotlib inline', "不是合法的 Python"),
    "instructor's code": ('# %% tags=["gpu"]', '# %% tags=["gpu", "instructor"]', "instructor 只用于文字单元"),
}


@pytest.mark.parametrize(("old", "new", "words"), REFUSED.values(), ids=REFUSED)
def test_broken_chapter_is_refused(mini, capsys, old, new, words):
    text = mini.source.read_text(encoding="utf-8")
    assert old in text
    mini.source.write_text(text.replace(old, new, 1), encoding="utf-8")
    before = mini.release.read_bytes()
    assert build.main(["90_mini"], check=False) == 1
    assert words in capsys.readouterr().out
    assert mini.release.read_bytes() == before


def test_stray_end_of_region_is_refused(mini):
    text = mini.source.read_text(encoding="utf-8").replace("    ### END SOLUTION", "", 1)
    mini.source.write_text(text, encoding="utf-8")
    with pytest.raises(ReleaseError, match="total_us"):
        build.build(mini)


@pytest.mark.parametrize("comprehension", ["[{0} for {0} in ()]", "{{{0} for {0} in ()}}", "{{{0}: {0} for {0} in ()}}", "list({0} for {0} in ())"])
def test_names_of_a_comprehension_are_its_own(comprehension):
    """Python 3.12 counts them to the scope around, 3.11 does not: here neither does."""
    cells = '# %% tags=["demo"]\n' + comprehension.format("value") + "\n\n# %%\nkept = "
    assert not [text for text in rules.problems(source.parse(cells + "student.value('kept')\n"), 0) if "demo" in text]
    assert not [text for text in rules.problems(source.parse(cells + comprehension.format("value") + "\n"), 0) if "demo" in text]
    # A name that a demo cell really binds, in a comprehension too, stays one that the exam lacks.
    for binding in ("value = 1", "[value := 1 for _ in ()]"):
        nb = source.parse(cells.replace("\n", f"\n{binding}\n", 1) + "value\n")
        assert [text for text in rules.problems(nb, 0) if "用到的 value 只在演示单元" in text]


def test_names_know_scopes():
    nb = source.parse(
        '# %% tags=["demo"]\nx = 1\nfor rows in []: pass\n\n# %%\ndef f(x):\n    return [rows for rows in x]\n\n# %%\nclass A:\n    y = x\n'
    )
    assert [text for text in rules.problems(nb, 0) if "demo" in text] == [
        "第 3 个单元（class A:）：用到的 x 只在演示单元（demo）里定义，考试时不会运行那些单元"
    ]
