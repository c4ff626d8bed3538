"""A learner's progress: what `launchlab check` keeps, what `status` tells of it, and a chapter restored with the old work kept."""

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import attack_files
import nbformat
import pytest

from launchlab import cli, manifest
from launchlab.course import build, restore
from launchlab.exam import judge
from launchlab.grading import history, status

CHAPTER = "03_cuda_graph_concepts"


def launchlab(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "COLUMNS": "240"}
    return subprocess.run(
        [sys.executable, "-m", "launchlab", *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


def recorded(name: str = CHAPTER) -> dict:
    """What an exam of the solution found on a real GPU, as a report."""
    told = json.loads(manifest.chapter(name).receipt.read_text(encoding="utf-8"))
    return {"chapter": name, "gpu": told["gpu"], "checks": told["checks"]}


def speed(report: dict) -> dict:
    return next(check for check in report["checks"] if check["kind"] == "speedup")


def slowed(check: dict, by: float) -> None:
    """Stretch the learner's times in what was measured."""
    record = next(record for record in check["records"] if record["check"] == "speedup")
    for pair in record["attempts"][-1]:
        pair["candidate"] = [pair["candidate"][0], pair["candidate"][1] * by]


@pytest.fixture
def told(monkeypatch, capsys):
    """What `launchlab status` prints, and its exit status."""

    def run() -> tuple[str, int]:
        monkeypatch.setenv("COLUMNS", "240")
        code = status.main()
        return capsys.readouterr().out, code

    return run


# What check keeps


def test_check_keeps_each_run_and_status_tells(mini):
    assert launchlab("status").stdout.count("○ 未评过") == 1
    assert "已记入学习记录" in launchlab("check", "90").stdout
    solution = nbformat.read(mini.solution, as_version=4)
    mini.release.write_text(
        nbformat.writes(attack_files.honest(solution, nbformat.read(mini.release, as_version=4))), encoding="utf-8"
    )
    assert launchlab("check", "90").returncode == 0
    runs, unreadable = history.read()
    assert [(run.chapter, run.score, run.max, run.open, run.ratios) for run in runs] == [
        ("90_mini", 0, 8, 0, {}),
        ("90_mini", 8, 8, 0, {}),
    ]
    assert unreadable == []
    ended = launchlab("status")
    assert ended.returncode == 0
    assert "✓ 满分" in ended.stdout and "8/8" in ended.stdout and "1 / 1 章得了满分" in ended.stdout


def test_status_keeps_the_best_mark_and_the_best_ratio(told):
    best = recorded()
    history.add(best)
    ratio = history.read()[0][0].ratios[speed(best)["id"]]
    worse = recorded()
    slowed(speed(worse), 1.25)
    worse["gpu"] = "a slower GPU"
    worse["checks"][0] |= {"verdict": judge.FAILED, "score": 0.0, "records": []}
    history.add(worse)
    later = history.read()[0][1]
    assert later.ratios[speed(worse)["id"]] == pytest.approx(ratio / 1.25, rel=0.1), (
        "what asking costs is not stretched with it"
    )
    text, code = told()
    assert code == 0
    total = manifest.chapter(CHAPTER).points
    assert f" {total}/{total} " in text
    assert f"，{later.score:g}/{total}" in text
    assert f"{ratio:.2f} 倍（NVIDIA H200）" in text and "a slower GPU" not in text


@pytest.mark.parametrize("name", [chapter.name for chapter in manifest.chapters() if chapter.receipt.is_file()])
def test_every_recorded_speed_up_has_a_ratio(name):
    report = recorded(name)
    history.add(report)
    (run,) = history.read()[0]
    assert set(run.ratios) == {
        check["id"] for check in report["checks"] if any(record["check"] in ("speedup", "faster") for record in check["records"])
    }
    assert all(ratio >= judge.FLOOR for ratio in run.ratios.values())


def test_no_ratio_of_work_that_was_wrong():
    """Fast and wrong is no best time: what was refused, and what failed for another reason than its speed."""
    for spoil in (
        lambda check: [record.update(states_differ=True) for record in check["records"]],
        lambda check: check["records"].append({"check": "that", "holds": False}),
        lambda check: slowed(check, 1 / 50),
    ):
        report = recorded()
        spoil(speed(report))
        speed(report).update(verdict=judge.FAILED, score=0.0)
        history.add(report)
    assert [run.ratios for run in history.read()[0]] == [{}, {}, {}]


def test_open_exercises_are_told_apart_from_failed_ones(told):
    report = recorded()
    for check in report["checks"]:
        if check["needs_gpu"]:
            check.update(verdict=judge.NEEDS_GPU, score=None, records=[])
    history.add(report)
    assert "题未评）" in told()[0] and "◐ 进行中" in told()[0]


# The file


def test_an_unreadable_file_is_told_and_loses_nothing(told):
    history.add(recorded())
    good = history.path().read_bytes()
    spoilt = (
        good + b"\xff\xfe\x00 not json\n" + b'["a list"]\n' + good.replace(b'"checks"', b'"cells"') + good[: len(good) // 2]
    )
    history.path().write_bytes(spoilt)
    text, code = told()
    assert code == 1
    assert "第 2、3、4、5 行读不出来" in text and str(history.path()) in text.replace("\n", "") and "Traceback" not in text
    assert "✓ 满分" in text
    history.add(recorded())
    assert history.path().read_bytes().startswith(spoilt + b"\n")
    runs, unreadable = history.read()
    assert len(runs) == 2 and unreadable == [2, 3, 4, 5]


def test_a_file_that_cannot_be_opened_is_told(told):
    history.path().mkdir(parents=True)
    text, code = told()
    assert code == 1
    assert "打不开学习记录" in text


def test_a_result_that_cannot_be_kept_is_told_and_still_counts(mini):
    history.path().mkdir(parents=True)
    ended = launchlab("check", "90")
    assert "没能记入学习记录" in ended.stdout and "得分 0 / 8" in ended.stdout
    assert ended.returncode == 1 and "Traceback" not in ended.stderr


def test_checks_at_the_same_time_do_not_mix():
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: history.add(recorded()), range(24)))
    runs, unreadable = history.read()
    assert (len(runs), unreadable) == (24, [])


# Restore


def test_restore_keeps_the_old_work(mini, capsys):
    as_released = {path.name: path.read_bytes() for path in mini.release.parent.iterdir()}
    assert cli.run(["restore", "90"]) == 0
    assert "不用恢复" in capsys.readouterr().out
    for mine in (b"my work", b"my later work"):
        mini.release.write_bytes(mine)
        (mini.release.parent / "samples.csv").unlink()
        assert cli.run(["restore", "90_mini"]) == 0
        told = capsys.readouterr().out
        assert "90_mini.kept-" in told and "原来没有这个文件" in told
        assert {name: (mini.release.parent / name).read_bytes() for name in as_released} == as_released
    kept = sorted(set(mini.release.parent.iterdir()) - {mini.release.parent / name for name in as_released})
    assert sorted(path.read_bytes() for path in kept) == [b"my later work", b"my work"]
    assert all(path.suffix == ".ipynb" for path in kept)
    assert build.differences(mini, build.build(mini)) == [], "work that was kept is nothing to complain of"


def test_restore_brings_a_deleted_chapter_back(mini):
    before = mini.release.read_bytes()
    for path in mini.release.parent.iterdir():
        path.unlink()
    mini.release.parent.rmdir()
    assert cli.run(["restore", "90"]) == 0
    assert mini.release.read_bytes() == before


def test_restore_says_when_there_is_nothing_to_restore_from(mini, capsys):
    mini.solution.unlink()
    mini.release.write_bytes(b"my work")
    assert cli.run(["restore", "90"]) == 2
    assert "没有发布版可以恢复" in capsys.readouterr().err
    assert mini.release.read_bytes() == b"my work"


def test_restore_that_fails_loses_nothing(mini, capsys, monkeypatch):
    mini.release.write_bytes(b"my work")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(restore.os, "replace", full)
    assert cli.run(["restore", "90"]) == 2
    assert "没有恢复" in capsys.readouterr().err
    assert mini.release.read_bytes() == b"my work"
