"""Picking the project up: what `launchlab new` makes builds at once, and is not let through until it is written."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from launchlab import cli, manifest, paths
from launchlab.course import build, scaffold, selfcheck

CONTRIBUTING = paths.ROOT / ".github" / "CONTRIBUTING.md"
REAL_MANIFEST = paths.GRADER / "chapters.toml"
ANSWER = "    return int(np.bitwise_xor.reduce(np.arange(x)))\n"


@pytest.fixture
def made(mini, capsys):
    """The course of tests with a chapter more, as `launchlab new chapter` leaves it; the manifest is read anew."""
    assert cli.run(["new", "chapter", "second", "第二章", "--module", "tests"]) == 0
    manifest._read.cache_clear()
    capsys.readouterr()
    yield manifest.chapter("second")
    manifest._read.cache_clear()


def new(*arguments: str) -> int:
    manifest._read.cache_clear()
    try:
        return cli.run(["new", *arguments])
    finally:
        manifest._read.cache_clear()


def checked(capsys) -> tuple[int, str]:
    """`launchlab build --check` of the new chapter."""
    capsys.readouterr()
    code = build.main(["second"], check=True)
    return code, capsys.readouterr().out


def written(chapter) -> None:
    """An author fills the chapter in."""
    text = chapter.source.read_text(encoding="utf-8")
    text = text.replace("    return x\n", ANSWER)
    text = re.sub(r"【待写[^】]*】", "从 0 到 x − 1 逐个异或", text)
    chapter.source.write_text(text, encoding="utf-8")
    assert build.main(["second"], check=False) == 0


def test_new_chapter_builds_at_once_and_fails_the_check_until_it_is_written(made, capsys):
    assert (made.name, made.title, made.ready, made.points) == ("91_second", "第二章", False, 2)
    assert build.main(["second"], check=False) == 0
    code, told = checked(capsys)
    assert code == 1
    marks = made.source.read_text(encoding="utf-8").count(scaffold.MARK)
    assert marks > 15 and sum(map(int, re.findall(r"还有 (\d+) 处“【待写", told))) == marks
    written(made)
    code, told = checked(capsys)
    assert (code, told) == (0, "✓ 91_second\n")


def test_new_exercise_and_check(made, capsys):
    assert new("exercise", "second", "chain", "--kind", "structure") == 0
    assert new("check", "second", "chain", "chain_twice", "--kind", "answer") == 0
    assert new("exercise", "91", "fast", "--kind", "speedup") == 0
    chapter = manifest.chapter("second")
    assert chapter.points == 2 + 2 + 2 + 2
    assert [each.points for each in manifest.chapters() if each.number == 90] == [8], "another chapter's points stay"
    heads = re.findall(r"^# %% (?:solution|test)=.*$", chapter.source.read_text(encoding="utf-8"), re.MULTILINE)
    assert heads == [
        '# %% solution="second_first"',
        '# %% test="second_first" kind="answer" points=2',
        '# %% solution="chain"',
        '# %% test="chain" kind="structure" points=2',
        '# %% test="chain_twice" kind="answer" points=2',
        '# %% solution="fast" tags=["gpu"]',
        '# %% test="fast" kind="speedup" points=2 tags=["gpu"]',
    ]
    assert chapter.source.read_text(encoding="utf-8").rstrip().endswith("【待写：带得走的三句话】"), "the summary stays the end"
    assert build.main(["second"], check=False) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chapter", "Second", "标题", "--module", "tests"], "要用小写字母"),
        (["chapter", "mini", "标题", "--module", "tests"], "已经有名为 mini 的章节"),
        (["chapter", "third", "标题", "--module", "basics"], "没有名为 'basics' 的模块，可用的：tests"),
        (["exercise", "second", "second_first"], "已经有名为 second_first 的练习"),
        (["exercise", "second", "a b"], "要像变量名"),
        (["exercise", "second", "fine", "--kind", "speed"], "没有 'speed' 这一种"),
        (["check", "second", "none", "x"], "没有名为 none 的练习"),
        (["exercise", "nowhere", "x"], "没有名为“nowhere”的章节"),
        (["nothing"], "用法："),
        ([], "用法："),
    ],
)
def test_mistakes_are_explained_and_change_nothing(made, capsys, arguments, words):
    before = {path: path.read_bytes() for path in (made.source, paths.GRADER / "chapters.toml")}
    try:
        assert new(*arguments) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert words in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_manifest_stays_one_that_people_wrote(made):
    text = (paths.GRADER / "chapters.toml").read_text(encoding="utf-8")
    assert text.startswith(
        (Path(__file__).parent / "mini_course/grader/chapters.toml").read_text(encoding="utf-8").rstrip("\n")
    )
    assert tomllib.loads(text)["chapters"][-1]["title"] == "第二章"


def test_commands_of_contributing_work_as_written(mini, capsys):
    """On the manifest of the course itself."""
    (paths.GRADER / "chapters.toml").write_bytes(REAL_MANIFEST.read_bytes())
    text = CONTRIBUTING.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40, "on one screen"
    commands = re.findall(r"`\./grader/launch (new [^`]+)`", text)
    assert [command.split()[1] for command in commands] == ["chapter", "exercise", "check"]
    for command in commands:
        assert new(*command.split()[1:]) == 0, capsys.readouterr().err
    number = re.search(r"launch build (\d+)", text)[1]
    try:
        assert build.main([number], check=False) == 0, capsys.readouterr().out
    finally:
        manifest._read.cache_clear()


# What the self-check finds


def test_empty_hint(made, capsys):
    written(made)
    text = made.source.read_text(encoding="utf-8")
    made.source.write_text(
        text.replace("用到的 API</summary>\n#\n# 从 0 到 x − 1 逐个异或", "用到的 API</summary>\n#\n# "), encoding="utf-8"
    )
    code, told = checked(capsys)
    assert code == 1 and "第 2 层提示是空的" in told


def test_stub_that_already_passes(made, capsys):
    """A test that asks nothing of the learner's code passes without an answer."""
    written(made)
    text = made.source.read_text(encoding="utf-8")
    made.source.write_text(
        re.sub(
            r"check\.equal\(student\.second_first\(\w+\), reference", "check.equal(reference.second_first(1), reference", text
        ).replace("second_first(x), why", "second_first(1), why"),
        encoding="utf-8",
    )
    assert build.main(["second"], check=False) == 0
    code, told = checked(capsys)
    assert code == 1 and "test_second_first：没有作答的发布版就通过了（2 分）" in told


@pytest.mark.parametrize("name", ["notes.txt", "copy.ipynb", "data/forgotten.csv", "helper.py"])
def test_stray_file(mini, capsys, name):
    stray = mini.source.parent / name
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("{}")
    assert [problem.partition("：")[0] for problem in selfcheck.problems(mini, build.build(mini).solution)] == [name]


def test_a_script_that_makes_a_file_of_the_chapter_is_no_stray(mini):
    (mini.source.parent / "make_samples.py").write_text('open("samples.csv", "w")\n')
    assert selfcheck.problems(mini, build.build(mini).solution) == []


def test_unlisted_chapter(mini, capsys):
    for folder in (paths.SOLUTIONS, paths.COURSE):
        shutil.copytree(mini.source.parent, folder / "92_forgotten")
    (paths.GRADER / "receipts").mkdir()
    (paths.GRADER / "receipts" / "93_gone.json").write_text("{}")
    assert build.main([], check=True) == 1
    told = capsys.readouterr().out
    for path in ("solutions/92_forgotten", "course/92_forgotten", "grader/receipts/93_gone.json"):
        assert f"✗ {path}：chapters.toml 里没有这一章" in told


def test_the_course_itself_has_nothing_left_over():
    assert selfcheck.unlisted() == []
    for each in manifest.chapters():
        assert list(selfcheck.strays(each)) == [], each.name
