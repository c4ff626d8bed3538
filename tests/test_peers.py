"""The comparison with the course's peers: what can be asked of it without a GPU. What it measured, its report shows."""

import json
from collections import Counter

import numpy as np
import pytest

from launchlab.peers import MODELS, report, run, stream
from launchlab.peers.buckets import BUCKETS, bucket_of
from launchlab.peers.child import PEERS
from launchlab.peers.process import Failed, Process
from launchlab.peers.reference import error, read
from launchlab.peers.stream import Request


@pytest.mark.parametrize("model", MODELS)
def test_the_recorded_stream_is_the_one_that_its_recipe_draws(model):
    requests = stream.recorded(model)
    assert requests == stream.drawn(model)
    sizes = Counter(request.size for request in requests)
    assert len(requests) == stream.REQUESTS and len(sizes) == stream.SHAPES
    assert min(sizes.values()) >= 3  # torch.compile replays a shape's graph from the third time on
    smallest, largest = stream.RANGE[model]
    assert smallest <= min(sizes) and max(sizes) <= largest


@pytest.mark.parametrize("model", MODELS)
def test_a_request_always_carries_the_same_input(model):
    request = stream.recorded(model)[0]
    first, again = stream.payload(model, request), stream.payload(model, request)
    assert first.tobytes() == again.tobytes()
    assert first.shape[-1] == request.size and first.flags.c_contiguous
    others = [stream.payload(model, Request(request.size, variant)).tobytes() for variant in range(stream.VARIANTS)]
    assert len(set(others)) == stream.VARIANTS


@pytest.mark.parametrize("model", MODELS)
def test_a_bucket_holds_what_it_is_chosen_for(model):
    smallest, largest = stream.RANGE[model]
    for size in range(smallest, largest + 1):
        bucket = bucket_of(model, size)
        assert bucket >= size and all(other < size for other in BUCKETS[model] if other < bucket)
    with pytest.raises(ValueError, match=str(largest + 1)):
        bucket_of(model, largest + 1)


def lines(*steps):
    """A right answer of rec: a class, its probability and its margin for each step."""
    return np.array(steps, float).T


def test_rec_answers_are_right_up_to_near_ties():
    right = lines((7, 0.9, 0.8), (3, 0.5, 0.001))
    assert error("rec", (np.array([7, 3]), np.array([0.9, 0.5])), right) == 0
    assert error("rec", (np.array([7, 4]), np.array([0.9, 0.5])), right) == 0
    assert error("rec", (np.array([7, 3]), np.array([0.8, 0.5])), right) == pytest.approx(0.1)
    assert error("rec", (np.array([6, 3]), np.array([0.9, 0.5])), right) == np.inf
    assert error("rec", (np.array([7]), np.array([0.9])), right) == np.inf
    assert error("rec", (np.array([7, 3]), np.array([0.9, np.nan])), right) == np.inf


def test_bert_answers_are_measured_by_their_distance():
    right = np.array([3.0, 4.0])
    assert error("bert", (np.array([3, 4], np.float16),), right) == 0
    assert error("bert", (np.array([3, 4.5], np.float16),), right) == pytest.approx(0.1)
    assert error("bert", (np.array([3, np.nan], np.float16),), right) == np.inf
    assert error("bert", (np.zeros(3, np.float16),), right) == np.inf


def test_lines_are_read_by_the_rule_of_ctc():
    assert read(np.array([0, 8, 8, 0, 8, 3, 3, 0])) == (8, 8, 3)


def entry(peer, model, us, **more):
    made = {"peer": peer, "model": model, "state": "measured", "start_s": 2.5, "memory_mib": 300, "wrong": 0, "worst": 0.001}
    return made | {"fresh": [9000, *[each + 5 for each in us[1:]]], "steady": [us, us]} | more


@pytest.fixture
def made():
    """A report of made-up times: the course's method leads with rec, and is behind torch.cuda.graph's p99 with bert."""
    return {
        "gpu": "Test GPU",
        "driver": "580.00",
        "recorded_at": "2026-01-01",
        "stream": {model: [[100, 0]] * 100 for model in MODELS},
        "peers": [
            entry("course", "rec", [500] * 98 + [700] * 2, fresh=[600] * 100),
            entry("torch", "rec", list(range(4000, 4100))),
            entry("torch.compile", "rec", [100] * 100, wrong=3),
            {"peer": "onnxruntime", "model": "rec", "state": "not run", "why": "no CUDA provider"},
            entry("course", "bert", [400] * 90 + [900] * 10, fresh=[600] * 100),
            entry("torch.cuda.graph", "bert", [600] * 100),
        ],
    }


def test_figures_follow_from_the_raw_times(made):
    found = report.measured(made, "rec")
    assert list(found) == ["course", "torch"]  # by p50; a wrong answer is no result
    assert found["course"]["p50"] == 0.5 and found["course"]["p99"] == 0.7
    assert found["torch"]["p50"] == 4.049 and found["torch"]["p99"] == 4.098 and found["torch"]["first"] == 9.0
    assert found["torch"]["throughput"] == pytest.approx(200 / (2 * sum(range(4000, 4100))) * 1e6)


def test_the_table_says_who_has_no_result_and_why(made):
    table = report.table(made)
    assert "| torch.compile（reduce-overhead） | 答错 3 次 |" in table
    assert "没有运行：no CUDA provider" in table
    assert table.index("本课程") < table.index("PyTorch eager")
    assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1


def test_memory_that_nobody_told_is_no_number(made):
    made["peers"][0]["memory_mib"] = None
    rows = [line for line in report.table(made).splitlines() if "本课程" in line]
    assert [row.split(" | ")[6] for row in rows] == ["—", "300"]


def test_the_verdict_tells_where_the_course_is_behind(made):
    assert "落后" not in report.verdict(made, "rec")
    behind = report.verdict(made, "bert")
    assert "p50 领先" in behind and "p99 落后于「torch.cuda.graph，每个形状一张图」，是它的 1.50 倍" in behind


def test_a_report_is_read_as_it_was_written_and_drawn(made, tmp_path):
    path = tmp_path / "new" / "peers.json"
    report.write(made, path)
    assert report.load(path) == made == json.loads(path.read_text(encoding="utf-8"))
    assert max(map(len, path.read_text(encoding="utf-8").splitlines())) < 2000
    report.draw(made, tmp_path / "peers.svg")
    drawn = (tmp_path / "peers.svg").read_text(encoding="utf-8")
    assert drawn.startswith("<?xml") and "<svg" in drawn


def test_the_kept_report_holds():
    """Each peer with each model once, as many times as there were requests, and the stream is the recorded one."""
    if not report.REPORT.exists():
        pytest.skip("not measured yet: needs a GPU")
    kept = report.load(report.REPORT)
    assert sorted((each["peer"], each["model"]) for each in kept["peers"]) == sorted(
        (peer, model) for peer in PEERS for model in MODELS
    )
    for model in MODELS:
        assert kept["stream"][model] == [[request.size, request.variant] for request in stream.recorded(model)]
    for each in kept["peers"]:
        if each["state"] != "measured":
            assert each["why"]
            continue
        assert [len(us) for us in [each["fresh"], *each["steady"]]] == [len(kept["stream"][each["model"]])] * (1 + run.ROUNDS)
        assert each["worst"] <= kept["tolerance"][each["model"]] or each["wrong"]


def test_a_peer_that_cannot_run_says_why_and_is_gone(tmp_path):
    process = Process("torch", "bert", tmp_path)  # a folder without right answers
    try:
        with pytest.raises(Failed, match=r"bert\.npz"):
            process.answer(60)
        process.ask(0)
        with pytest.raises(Failed, match="status 0"):
            process.answer(60)
    finally:
        process.end()


def test_a_peer_that_does_not_answer_is_given_up(tmp_path):
    process = Process("torch", "bert", tmp_path)
    try:
        with pytest.raises(Failed, match="within 0 s"):
            process.answer(0)
    finally:
        process.end()


def test_without_a_gpu_nothing_is_measured_and_nothing_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "gpu", lambda: None)
    assert run.main(60, 1, tmp_path / "peers.json") == 1
    assert "没有可用的 GPU" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
