"""The command line as typed."""

import json
import subprocess
import sys

import pytest

from launchlab import cli, paths, readme

CONFIG = paths.GRADER / "nbgrader_config.py"
COMMANDS = ("lab", "check", "status", "restore", "doctor", "demo", "grade", "report", "build", "new", "record", "bench", "test", "site", "release", "collect", "open")


def launchlab(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "launchlab", *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_every_command(arguments):
    ended = launchlab(*arguments)
    assert ended.returncode == 0
    for command in COMMANDS:
        assert f"    {command} " in ended.stdout
    assert "usage" not in ended.stdout
    assert "LAUNCHLAB_PYTHON" in ended.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    ended = launchlab(command, "--help")
    assert ended.returncode == 0
    assert f"launchlab {command}" in ended.stdout
    assert "显示这份说明" in ended.stdout


def test_help_loads_nothing_heavy():
    code = "import sys; from launchlab import cli; cli.run([]); print(*sys.modules)"
    loaded = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()
    )
    assert "argparse" in loaded
    assert not {"numpy", "nbformat", "nbgrader", "rich", "jupyter_client", "cupy"} & set(loaded)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["grad", "3"], ["grad", "grade"]),
        (["frobnicate"], ["frobnicate", "doctor"]),
        (["check", "3O"], ["没有名为“3O”的章节"]),
        (["grade", "cuda_graph_concept"], ["03_cuda_graph_concepts"]),
        (["record", "3", "99"], ["没有名为“99”的章节"]),
        (["check"], ["用法：", "launchlab check"]),
        (["doctor", "--jsno"], ["--jsno", "launchlab doctor"]),
        (["--frob"], ["--frob", "用法："]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_explained(arguments, words):
    ended = launchlab(*arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    for word in words:
        assert word in ended.stderr
    assert "Traceback" not in ended.stderr


def test_grade_hands_its_options_to_nbgrader(mini, capfd):
    (paths.GRADER / "nbgrader_config.py").symlink_to(CONFIG)
    assert cli.run(["grade", "90_mini", "--student", "nobody"]) != 0
    assert "nobody" in "".join(capfd.readouterr())


def test_table_of_chapters_tells_what_the_receipts_measured(monkeypatch):
    def slower(chapter):
        """Its receipt, had the baseline of its speed-up taken twice as long."""
        receipt = json.loads(chapter.receipt.read_text(encoding="utf-8"))
        for record in (record for check in receipt["checks"] for record in check["records"] if record["check"] == "speedup"):
            for samples in (each["baseline"] for each in record["attempts"][-1]):
                samples[:] = [[runs, 2 * seconds] for runs, seconds in samples]
        return receipt

    def gain():
        (row,) = [row for row in readme.table().splitlines() if "CUDA 图优化概念" in row]
        return float(row.split("|")[4].strip(" ×"))

    before = gain()
    monkeypatch.setattr(readme.receipt, "load", slower)
    assert gain() == pytest.approx(2 * before, rel=0.02)


def test_table_of_chapters_follows_the_manifest(tmp_path, monkeypatch):
    text = readme.README.read_text(encoding="utf-8")
    assert readme.updated(text) == text, "README.md: run `launchlab build`"
    stale = tmp_path / "README.md"
    stale.write_text(text.replace("内核启动开销分析", "内核"), encoding="utf-8")
    monkeypatch.setattr(readme, "README", stale)
    assert readme.main(check=True) == 1
    assert readme.main(check=False) == 0
    assert stale.read_text(encoding="utf-8") == text
    with pytest.raises(ValueError, match="markers"):
        readme.updated(text.replace(readme.END, ""))
