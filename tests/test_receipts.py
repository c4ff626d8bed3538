"""A receipt holds only while everything in it can be computed again, and any tampering shows."""

import os
import re
from copy import deepcopy

import nbformat
import pytest

from launchlab import paths
from launchlab.course import build, receipt, record
from launchlab.device import Gpu
from launchlab.manifest import chapters

READY = [pytest.param(each, id=each.name) for each in chapters() if each.ready]
GPU = Gpu("Test GPU", "580.00", (13, 0), (7, 5), 6 << 30)


@pytest.mark.parametrize("chapter", READY)
def test_receipt_holds(chapter):
    assert chapter.receipt.exists(), "还没有录制：在有 GPU 的机器上运行 launchlab record"
    assert receipt.problems(chapter, receipt.load(chapter)) == []


@pytest.fixture
def recorded(mini, monkeypatch):
    """The mini chapter after a real recording: all of it but the GPU's name is genuine."""
    monkeypatch.setattr(record, "gpu", lambda: GPU)
    assert record.record(mini) == []
    return mini


def test_recording_and_tampering(recorded):
    """One recording (it takes two exams) serves all that is asked of a receipt."""
    genuine = receipt.load(recorded)
    assert receipt.problems(recorded, genuine) == []
    assert genuine["gpu"] == "Test GPU"
    assert genuine["solution"] == {"score": 8, "max": 8} and genuine["release"] == {"score": 0, "max": 8}
    assert [check["verdict"] for check in genuine["checks"]] == ["passed"] * 3
    assert genuine["seconds"]["total"] > 0

    for words, tamper in TAMPERED.items():
        copy = deepcopy(genuine)
        tamper(copy)
        assert copy != genuine
        found = receipt.problems(recorded, copy)
        assert any(words.split("|")[0] in problem for problem in found), (words, found)

    nb = nbformat.read(recorded.solution, as_version=4)
    shown = next(cell for cell in nb.cells if cell.get("outputs"))
    assert "平均每个" in shown.outputs[0].text

    # Building keeps what the receipt vouches for, to the byte ...
    kept = recorded.solution.read_bytes()
    assert build.main([recorded.name], check=True) == 0
    # ... but not outputs that somebody else's run left there ...
    shown.outputs[0].text = shown.outputs[0].text.replace("5.05", "0.01")
    recorded.solution.write_text(build.text(nb), encoding="utf-8")
    assert any("输出不是录制时的" in problem for problem in receipt.problems(recorded, genuine))
    assert not any(cell.get("outputs") for cell in build.build(recorded).solution.cells)
    recorded.solution.write_bytes(kept)
    # ... while a mended sentence measures nothing anew ...
    text = recorded.source.read_text(encoding="utf-8")
    prose = re.search(r"^# (?!%%)\S.*$", text[text.index("[markdown]") :], re.MULTILINE)[0]
    recorded.source.write_text(text.replace(prose, prose + "（改了一句）", 1), encoding="utf-8")
    assert receipt.problems(recorded, genuine) == []
    built = build.build(recorded).solution
    assert "（改了一句）" in "".join(cell.source for cell in built.cells) and any(cell.get("outputs") for cell in built.cells)
    # ... and none are kept once the code or a data file has changed.
    recorded.source.write_text(text.replace("return launch_us + (n - 1)", "return launch_us + n - 1"), encoding="utf-8")
    assert any("需要重新录制" in problem for problem in receipt.problems(recorded, genuine))
    recorded.source.write_text(text, encoding="utf-8")
    assert receipt.problems(recorded, genuine) == []
    data = recorded.source.with_name("samples.csv")
    data.write_text(data.read_text() + "1000,5005.0\n")
    assert any("需要重新录制" in problem for problem in receipt.problems(recorded, genuine))
    assert not any(cell.get("outputs") for cell in build.build(recorded).solution.cells)


def _first(records: list, kind: str) -> dict:
    return next(each for each in records if each["check"] == kind)


# What must be said of it -> the tampering (a "|" tells equal sayings apart).
TAMPERED = {
    "需要重新录制": lambda r: r.update(source_sha256="0" * 64),
    "输出不是录制时的": lambda r: r.update(outputs_sha256="0" * 64),
    "回执里的数字不是解答笔记本里录下的数字": lambda r: r.update(figures={"made up": 1}),
    "没有写明 GPU": lambda r: r.update(gpu=None),
    "录制时间在将来": lambda r: r.update(recorded_at="2999-01-01T00:00:00+00:00"),
    "是另一章的回执": lambda r: r.update(chapter="03_cuda_graph_concepts"),
    "应是 failed、0.0 分": lambda r: _first(r["checks"][1]["records"], "equal").update(differing=3),
    "写的是 failed、3.0 分": lambda r: r["checks"][1].update(verdict="failed"),
    "写的是 passed、2.5 分": lambda r: r["checks"][1].update(score=2.5),
    "应是 failed、0.0 分|no records": lambda r: r["checks"][2].update(records=[]),
    "检查项与解答笔记本的测试单元不一致|points": lambda r: r["checks"][0].update(points=4.0),
    "检查项与解答笔记本的测试单元不一致|kind": lambda r: r["checks"][0].update(kind="speedup"),
    "检查项与解答笔记本的测试单元不一致|gpu": lambda r: r["checks"][0].update(needs_gpu=True),
    "检查项与解答笔记本的测试单元不一致|one dropped": lambda r: r["checks"].pop(),
    "检查项与解答笔记本的测试单元不一致|order": lambda r: r["checks"].reverse(),
    "发布版的检查项与解答的不一致": lambda r: r["release_checks"].pop(),
    "没有作答的发布版得了": lambda r: r["release_checks"][0].update(score=2.0, verdict="passed"),
    "没有作答的发布版得了 None": lambda r: r["release_checks"][0].update(score=None, verdict="needs a GPU"),
    "解答的总分与各项之和不符": lambda r: r["solution"].update(score=7),
    "发布版的总分与各项之和不符": lambda r: r["release"].update(score=1),
    "回执缺少内容": lambda r: r.pop("checks"),
    "回执缺少内容|unknown record": lambda r: r["checks"][0]["records"].append({"check": "trust me"}),
}


def test_exercise_that_passes_unsolved_leaves_no_receipt(mini, monkeypatch, capsys):
    monkeypatch.setattr(record, "gpu", lambda: GPU)
    text = mini.source.read_text(encoding="utf-8")
    asking = re.compile(r"^( *)check\.equal\(student\.longest_path.*$", re.MULTILINE)
    mini.source.write_text(asking.sub(r'\1check.that(True, why="…")', text), encoding="utf-8")
    assert record.main([mini.name]) == 1
    assert "test_longest_path：没有作答的发布版得了 3.0 分" in capsys.readouterr().out
    assert not mini.receipt.exists()
    assert build.main([mini.name], check=True) == 1
    told = capsys.readouterr().out
    assert "test_longest_path：没有作答的发布版就通过了" in told and "ipynb：与源文件不一致" not in told
    assert list((paths.BUILD / "rejected").glob("*.json"))


def test_figures_of_the_notebook_are_kept_in_the_receipt(mini, monkeypatch):
    monkeypatch.setattr(record, "gpu", lambda: GPU)
    more = '\n# %%\nfrom launchlab import lab\n\nlab.say("**7** µs", figures={"services": {"graph": {"p50_ms": 7}}})\n'
    mini.source.write_text(mini.source.read_text(encoding="utf-8") + more, encoding="utf-8")
    assert record.main([mini.name]) == 0
    assert receipt.load(mini)["figures"] == {"services": {"graph": {"p50_ms": 7}}}
    assert receipt.problems(mini, receipt.load(mini)) == []
    shown = nbformat.read(mini.solution, as_version=4).cells[-1].outputs[0].data
    assert shown["text/markdown"].startswith("**7** µs")


def test_one_failure_does_not_stop_the_others(mini, monkeypatch, capsys):
    monkeypatch.setattr(record, "gpu", lambda: GPU)
    text = mini.source.read_text(encoding="utf-8")
    mini.source.write_text(text.replace("return launch_us + (n - 1)", "return launch_us / 0"), encoding="utf-8")
    assert record.main([mini.name, mini.name]) == 1
    told = capsys.readouterr().out
    assert told.count("test_total_us 出错：ZeroDivisionError") == 2
    assert "没有录成：90_mini、90_mini" in told


def test_recording_beside_others_is_told(mini, monkeypatch, capsys):
    monkeypatch.setattr(record, "gpu", lambda: GPU)
    monkeypatch.setattr(record, "record", lambda chapter: [])
    for others, told in (({os.getpid(): 7}, False), ({os.getpid(): 7, 4321: None}, True)):
        monkeypatch.setattr(record, "processes", lambda others=others: others)
        assert record.main([mini.name]) == 0
        assert ("4321" in capsys.readouterr().out) is told


def test_recording_needs_a_gpu(mini, monkeypatch, capsys):
    monkeypatch.setattr(record, "gpu", lambda: None)
    assert record.main([mini.name]) == 1
    assert "没有可用的 CUDA GPU" in capsys.readouterr().out
    assert not mini.receipt.exists()
