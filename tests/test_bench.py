"""The benchmark: figures from samples, what is made of a report, and how a measurement ends where there is no GPU."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchlab import cli, device, readme
from launchlab.bench import case, cupti, figures, launch_cost, measure, plots, report, table
from launchlab.lab import tracing

KERNELS = {"resnet50": 57, "bert": 98, "streams": 513}
TIMES = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 100)), min_size=1, max_size=12)
needs_report = pytest.mark.skipif(not report.PATH.exists(), reason="no benchmark was recorded yet")


def made_up(**changes) -> dict:
    """A report with samples that no machine ever measured."""
    draw = np.random.default_rng(9)

    def us(middle, count=21):
        return [round(float(value), 3) for value in middle * draw.uniform(0.9, 1.2, count)]

    def run(kernels, gap):
        return {"kernel_start_ns": [gap * place for place in range(kernels)], "kernel_ns": [2000] * kernels, "others": 0}

    def one(id, kernels):
        return {
            "id": id,
            "title": f"case {id}",
            "streams": 1,
            "engine_layers": 59,
            "plan_bytes": 1,
            "build_seconds": 1.0,
            "nodes": {"Kernel": kernels, "Memset": 1},
            "edges": kernels,
            "straight": True,
            "largest_difference": 0.0,
            "samples": {
                "submit": {"eager": us(4 * kernels), "graph": us(5)},
                "latency": {"eager": us(5 * kernels), "graph": us(3 * kernels)},
            },
            "gpu_runs": {"eager": [run(kernels, 4000)] * 3, "graph": [run(kernels, 1000)] * 3},
        }

    cost = [{"nodes": n, "eager": us(3 * n), "graph": us(2.5 + n / 1000)} for n in launch_cost.COUNTS]
    return {
        "command": "launchlab bench --seconds 1",
        "measured_at": "2026-11-30T12:00:00+00:00",
        "seconds": 1.0,
        "gpu": "A GPU of this test",
        "driver": "1.2.3",
        "cpu": "a CPU",
        "cpu_count": 2,
        "load": 0.1,
        "versions": {"python": "3.12.3", "cupy-cuda13x": "14.2.0", "tensorrt-cu12-bindings": "10.6.0"},
        "problems": [],
        "cases": [one(id, kernels) for id, kernels in reversed(KERNELS.items())],
        "launch_cost": {"portion": 256, "samples": cost},
    } | changes


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder in which a report counts as the committed one, beside a README of its own."""
    text = readme.README.read_text(encoding="utf-8")
    monkeypatch.setattr(report, "PATH", tmp_path / "reports" / "bench.json")
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    readme.README.write_text(text, encoding="utf-8")
    return tmp_path / "reports"


# Figures


def test_quartiles_and_ratio_come_from_the_samples():
    made = made_up()
    found = figures.of(made)["cases"]["bert"]
    samples = next(case for case in made["cases"] if case["id"] == "bert")["samples"]["latency"]
    assert found["kernels"] == 98
    assert found["latency"]["eager"] == [sorted(samples["eager"])[place] for place in (5, 10, 15)]
    ratios = sorted(a / b for a, b in zip(samples["eager"], samples["graph"], strict=True))
    assert found["latency"]["ratio"] == pytest.approx(ratios[10], abs=6e-4)


def test_kernel_times_add_up_and_overlaps_count_once_as_busy():
    gpu = figures.of(made_up())["cases"]["resnet50"]["gpu"]
    assert gpu["eager"]["kernels"] == [57] * 3
    assert gpu["eager"]["sum"] == gpu["graph"]["sum"] == gpu["eager"]["busy"] == [114.0] * 3
    assert gpu["graph"]["busy"] == [58.0] * 3  # one of 2 µs begins each µs


@given(TIMES)
def test_busy_is_the_time_that_some_kernel_runs(times):
    made = made_up(cases=made_up()["cases"][:1], launch_cost=None)
    starts, lengths = [4 * start for start, _ in times], [4 * length for _, length in times]
    made["cases"][0]["gpu_runs"] = {"graph": [{"kernel_start_ns": starts, "kernel_ns": lengths, "others": 0}]}
    busy = {ns for start, length in zip(starts, lengths, strict=True) for ns in range(start, start + length)}
    assert figures.of(made)["cases"]["streams"]["gpu"]["graph"]["busy"][1] == pytest.approx(len(busy) / 1000)


def test_the_line_is_found_in_samples_that_lie_on_it():
    cost = {"samples": [{"nodes": n, "eager": [3.0 * n + 1] * 3, "graph": [2.5 + 0.002 * n] * 3} for n in (1, 10, 100, 1000)]}
    found = figures.of(made_up(launch_cost=cost))["launch_cost"]
    assert (found["graph"]["const_us"], found["graph"]["per_node_ns"]) == (2.5, 2.0)
    assert (found["eager"]["const_us"], found["eager"]["per_node_ns"]) == (1.0, 3000.0)


def test_the_published_figure_is_nvidias():
    assert figures.published_us(0) == 2.5
    assert figures.published_us(2000) == pytest.approx(4.5)


# Reports


def test_a_report_comes_back_as_it_was_written(place):
    report.save(report.PATH, made_up())
    made = report.load(report.PATH)
    assert made["figures"] == figures.of(made_up())
    assert {key: made[key] for key in made if key != "figures"} == made_up()
    assert [path.name for path in place.iterdir()] == ["bench.json"]


def damaged(change):
    made = json.loads(json.dumps(made_up() | {"figures": figures.of(made_up())}))
    change(made)
    return json.dumps(made)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "nothing",
        damaged(lambda made: made["cases"][0]["samples"]["submit"].update(graph=[1.0] * 21)),
        damaged(lambda made: made["figures"]["launch_cost"]["graph"].update(const_us=2.5001)),
        damaged(lambda made: made["cases"].pop()),
        damaged(lambda made: made.pop("figures")),
    ],
    ids=["empty", "list", "no JSON", "sample", "figure", "case", "figures"],
)
def test_a_report_that_does_not_hold_is_refused(place, capsys, text):
    place.mkdir()
    report.PATH.write_text(text, encoding="utf-8")
    assert cli.run(["bench", "--from", str(report.PATH)]) == 1
    assert "用不了报告" in capsys.readouterr().out
    assert [path.name for path in place.iterdir()] == ["bench.json"]
    assert readme.main(check=True) == 1


# What is made of a report


def test_plots_and_table_are_made_anew_without_a_gpu(place, capsys):
    report.save(report.PATH, made_up())
    assert cli.run(["bench", "--from", str(report.PATH)]) == 0
    drawn = {path: path.read_bytes() for path in place.glob("*.svg")}
    assert {path.name for path in drawn} == {plots.HEADLINE, plots.LAUNCH}
    assert readme.main(check=True) == 0
    text = readme.README.read_text(encoding="utf-8")
    for word in ("A GPU of this test", "driver 1.2.3", "TensorRT 10.6.0", "2026-11-30", "`launchlab bench --seconds 1`"):
        assert word in text
    assert cli.run(["bench", "--from", str(report.PATH)]) == 0
    assert {path: path.read_bytes() for path in drawn} == drawn
    assert "✗" not in capsys.readouterr().out


def test_a_row_has_the_medians_with_the_founding_text_beside_them(place):
    report.save(report.PATH, made_up())
    rows = [line for line in table.block().splitlines() if line.startswith("| case ")][1:]
    found = figures.of(made_up())["cases"]
    for row, (id, kernels), told in zip(rows, KERNELS.items(), figures.FOUNDING.values(), strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[:2] == [f"case {id}", str(kernels)]
        for cell, clock in zip(cells[2:4], ("submit", "latency"), strict=True):
            medians = [float(number) for number in re.findall(r"([\d.]+) \(", cell)]
            wanted = [found[id][clock][side][1] for side in ("eager", "graph")]
            assert medians == pytest.approx(wanted, rel=0.02)
        assert float(cells[4].split()[0]) == pytest.approx(2 * kernels)
        assert cells[5] == "~{} kernels, ~{} → ~{}".format(*told)


def test_gaps_of_a_report_are_told(place, capsys):
    gap = made_up(cases=made_up()["cases"][:1], launch_cost=None, problems=["BERT-base：没有测"])
    gap["cases"][0]["gpu_runs"] = {}
    report.save(report.PATH, gap)
    assert cli.run(["bench", "--from", str(report.PATH)]) == 1
    assert "✗ BERT-base：没有测" in capsys.readouterr().out
    text = table.block()
    assert "| bert | — | — | — | — | ~200 kernels" in text
    assert "Missing from this run: BERT-base：没有测" in text
    assert plots.HEADLINE in text and plots.LAUNCH not in text
    assert [path.name for path in place.glob("*.svg")] == [plots.HEADLINE]


def test_another_count_by_cupti_is_told(place):
    made = made_up()
    one = made["cases"][1]["gpu_runs"]["eager"][0]
    more = {"kernel_start_ns": [*one["kernel_start_ns"], 10**6], "kernel_ns": [*one["kernel_ns"], 2000], "others": 0}
    made["cases"][1]["gpu_runs"]["eager"] = [more] * 3
    report.save(report.PATH, made)
    assert "| case bert | 98 (eager, by CUPTI: 99) |" in table.block()


# The measurement, as far as it needs no GPU


def test_sides_take_turns():
    order = []

    def side(name):
        order.append(name)
        return float(len(order))

    eager, graph = launch_cost.compare(lambda: side("A"), lambda: side("B"), 4)
    assert "".join(order) == "AB" + "ABBA" * 2
    assert (eager, graph) == ([3.0, 6.0, 7.0, 10.0], [4.0, 5.0, 8.0, 9.0])


@pytest.mark.parametrize(
    ("nodes", "edges", "straight"),
    [
        (1, [], True),
        (3, [[0, 1], [1, 2]], True),
        (3, [[2, 0], [0, 1]], True),
        (3, [[0, 1], [0, 2]], False),
        (3, [[0, 1]], False),
    ],
)
def test_a_straight_line_is_told_from_other_graphs(nodes, edges, straight):
    assert case.is_straight({"kinds": ["Kernel"] * nodes, "edges": edges}) is straight


def kernel(start, end):
    row = {"start": start, "end": end, "correlationId": 0, "demangledName": "k", "shortName": "k"}
    return "CUPTI_ACTIVITY_KIND_KERNEL", row


def test_kernels_are_told_apart_by_run():
    ms = 1_000_000
    memset = (
        "CUPTI_ACTIVITY_KIND_MEMSET",
        {"start": 10 * ms + 50, "end": 10 * ms + 60, "correlationId": 0, "value": 0, "bytes": 4},
    )
    rows = [
        kernel(ms, ms + 5),
        kernel(10 * ms + 100, 10 * ms + 400),
        kernel(10 * ms + 300, 10 * ms + 350),
        memset,
        kernel(20 * ms - 30, 20 * ms),
    ]
    ranges = [(10 * ms, 10 * ms + 900, "run", 1), (20 * ms, 20 * ms + 900, "run", 1), (30 * ms, 30 * ms + 900, "other", 1)]
    assert cupti.runs_in(tracing.database(rows, ranges)) == [
        {"kernel_start_ns": [0, 200], "kernel_ns": [300, 50], "others": 1},
        {"kernel_start_ns": [0], "kernel_ns": [30], "others": 0},
    ]
    with pytest.raises(RuntimeError, match="没有看到内核"):
        cupti.runs_in(tracing.database(rows, [(40 * ms, 41 * ms, "run", 1)]))


@pytest.mark.skipif(device.has_gpu(), reason="shows how a measurement ends without a GPU")
@pytest.mark.parametrize(("seconds", "word"), [(60, "Error"), (0, "用完了")])
def test_a_part_that_fails_costs_no_other_its_turn(monkeypatch, capsys, seconds, word):
    monkeypatch.setattr(device, "gpu", lambda: device.Gpu("none", "0", (13, 0), (9, 0), 0))
    kept = []
    made = measure.run(seconds, lambda so_far: kept.append(len(so_far["problems"])))
    assert kept == [1, 2, 3, 4]
    assert [problem.partition("：")[0] for problem in made["problems"]] == ["启动成本", "ResNet-50", "多流", "BERT-base"]
    assert all(word in problem for problem in made["problems"])
    assert (made["cases"], made["launch_cost"]) == ([], None)
    assert "ResNet-50" in capsys.readouterr().out


@pytest.mark.skipif(device.has_gpu(), reason="what is said without a GPU")
def test_without_a_gpu_the_command_says_so_and_writes_nothing(place, capsys):
    assert cli.run(["bench"]) == 1
    assert "没有可用的 CUDA GPU" in capsys.readouterr().out
    assert not place.exists()


def test_a_report_that_is_not_there_is_named(place, capsys):
    assert cli.run(["bench", "--from", str(place / "other.json")]) == 1
    assert "没有报告" in capsys.readouterr().out


# The committed report


def labels(svg: str) -> list[str]:
    """The words of a plot: matplotlib draws letters as curves, and writes each text beside them as a comment."""
    return re.findall(r"<!-- (.*?) -->", svg)


@needs_report
def test_the_committed_report_holds_and_its_plots_are_of_it(tmp_path):
    made = report.load(report.PATH)
    missing = [id for id in figures.FOUNDING if id not in made["figures"]["cases"]]
    assert len(made["problems"]) == len(missing) < len(figures.FOUNDING), "what was not measured is told, and nothing else"
    assert [each["nodes"] for each in made["launch_cost"]["samples"]] == list(launch_cost.COUNTS)
    assert all(case["gpu_runs"] for case in made["cases"])
    for drawn in plots.draw(made, tmp_path):
        committed = report.PATH.with_name(drawn.name).read_text(encoding="utf-8")
        assert labels(drawn.read_text(encoding="utf-8")) == labels(committed), "run `launchlab bench --from` the report"


@needs_report
def test_in_the_committed_report_no_single_stream_beats_its_kernels():
    found = report.load(report.PATH)["figures"]["cases"]
    alone = [id for id in ("resnet50", "bert") if id in found]
    assert alone
    for id in alone:
        assert found[id]["latency"]["eager"][1] > found[id]["gpu"]["eager"]["sum"][1]
