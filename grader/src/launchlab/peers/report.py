"""What peers.json says: figures, the table for README.md, a plot. Everything is computed from the raw times it holds."""

import json
import math
from pathlib import Path

from launchlab import paths
from launchlab.peers import MODELS

REPORT = paths.GRADER / "reports" / "peers.json"
NAMES = {
    "course": "**本课程：分桶的图缓存**",
    "tensorrt.recapture": "TensorRT，换形状就重新捕获",
    "tensorrt": "TensorRT，逐次入队",
    "onnxruntime": "ONNX Runtime（CUDA）",
    "torch.cuda.graph": "torch.cuda.graph，每个形状一张图",
    "torch.compile": "torch.compile（reduce-overhead）",
    "torch": "PyTorch eager",
}
COLUMNS = {"p50": "p50", "p99": "p99", "fresh_p50": "新服务 p50", "fresh_p99": "新服务 p99"}
TITLES = {"rec": "PP-OCRv4 rec，FP32", "bert": "BERT-base，FP16"}


def rank(values: list[float], q: float) -> float:
    """The smallest value that at least a share q of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def figures(entry: dict) -> dict[str, float]:
    """Of a measured peer: p50 and p99 of its steady state and of the fresh stream, and its first request, all in ms; requests
    a second in steady state, one after the other.
    """
    steady = [us for round_ in entry["steady"] for us in round_]
    return {
        "p50": rank(steady, 0.5) / 1000,
        "p99": rank(steady, 0.99) / 1000,
        "fresh_p50": rank(entry["fresh"], 0.5) / 1000,
        "fresh_p99": rank(entry["fresh"], 0.99) / 1000,
        "first": entry["fresh"][0] / 1000,
        "throughput": len(steady) / sum(steady) * 1e6,
    }


def measured(report: dict, model: str) -> dict[str, dict[str, float]]:
    """The figures of the peers that served the model's stream to the end without a wrong answer, best p50 first."""
    whole = [
        each
        for each in report["peers"]
        if each["model"] == model and each["state"] == "measured" and each["steady"] and not each["wrong"]
    ]
    found = {each["peer"]: figures(each) for each in whole}
    return dict(sorted(found.items(), key=lambda item: item[1]["p50"]))


def verdict(report: dict, model: str) -> str:
    """One sentence: in which of the four latencies the course's method leads, and who is ahead of it in the others."""
    found = measured(report, model)
    if "course" not in found:
        return f"{TITLES[model]}：本课程的方法没有结果，无法比较。"
    if len(found) < 2:
        return f"{TITLES[model]}：别的方案都没有结果，无法比较。"
    won, lost = [], []
    for column, title in COLUMNS.items():
        best = min((peer for peer in found if peer != "course"), key=lambda peer: found[peer][column])
        mine, other = found["course"][column], found[best][column]
        if mine <= other:
            won.append(f"{title} 领先，第二名「{NAMES[best]}」是它的 {other / mine:.2f} 倍")
        else:
            lost.append(f"{title} 落后于「{NAMES[best]}」，是它的 {mine / other:.2f} 倍")
    return f"{TITLES[model]}：{'；'.join(won + lost)}。"


def table(report: dict) -> str:
    """Markdown: one table a model, measured peers by p50, then those without a result and why."""
    return "\n".join(_model(report, model) for model in MODELS)


def _model(report: dict, model: str) -> str:
    found, rows = measured(report, model), []
    entries = {each["peer"]: each for each in report["peers"] if each["model"] == model}
    for peer, each in found.items():
        numbers = [f"{each[column]:.2f}" for column in COLUMNS]
        entry = entries[peer]
        rows.append(
            [
                NAMES[peer],
                *numbers,
                f"{each['throughput']:.0f}",
                "—" if entry["memory_mib"] is None else str(entry["memory_mib"]),
                f"{entry['start_s']:.1f}",
                f"{each['first']:.1f}",
            ]
        )
    for peer, entry in entries.items():
        if peer not in found:
            rows.append([NAMES[peer], _why(entry), *[""] * 7])
    head = ["", *COLUMNS.values(), "个/秒", "显存 MiB", "启动 秒", "第一个请求 ms"]
    lines = [head, ["---", *["---:"] * 8], *rows]
    return f"**{TITLES[model]}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _why(entry: dict) -> str:
    if entry["state"] == "measured" and entry["wrong"]:
        return f"答错 {entry['wrong']} 次"
    state = "没有运行：" if entry["state"] == "not run" else "没有跑完："
    return state + entry.get("why", "时间不够").replace("|", "/").replace("\n", " ")[:160]


def section() -> str:
    """The part of README.md between its markers, from the report that is kept."""
    if not REPORT.exists():
        return "还没有测量：在有 GPU 的机器上运行 `./grader/launch peers`。\n"
    report = load(REPORT)
    plot = REPORT.with_suffix(".svg").relative_to(paths.ROOT).as_posix()
    verdicts = "".join(f"- {verdict(report, model)}\n" for model in MODELS)
    return f"{report['gpu']}，驱动 {report['driver']}，{report['recorded_at']}；延迟的单位是 ms。\n\n{verdicts}\n{table(report)}\n![每个方案的 p50 与 p99]({plot})\n"


def load(path: Path) -> dict:
    """A report that `write` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def write(report: dict, path: Path) -> None:
    """Write the report, each list of numbers on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_json(report, 0) + "\n", encoding="utf-8")


def _json(value: object, depth: int) -> str:
    """JSON that git can compare: objects and lists of objects are broken into lines, all else stays on one."""
    inner, end = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict) and value:
        return (
            "{"
            + ",".join(
                f"{inner}{json.dumps(name, ensure_ascii=False)}: {_json(each, depth + 1)}" for name, each in value.items()
            )
            + end
            + "}"
        )
    if isinstance(value, list) and value and (isinstance(value[0], dict) or (isinstance(value[0], list) and len(value[0]) > 2)):
        return "[" + ",".join(f"{inner}{_json(each, depth + 1)}" for each in value) + end + "]"
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def draw(report: dict, path: Path) -> None:
    """p50 and p99 of every measured peer in steady state, one panel a model, as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from launchlab.lab.plotting import log_ticks, plot_style

    plot_style()
    plt.rcParams["svg.hashsalt"] = "launchlab"
    figure, panels = plt.subplots(1, len(MODELS), figsize=(11, 3.6), layout="constrained")
    for panel, model in zip(panels, MODELS, strict=True):
        found = list(measured(report, model).items())[::-1]
        for place, (peer, each) in enumerate(found):
            colour = "#D55E00" if peer == "course" else "#0072B2"
            panel.plot([each["p50"], each["p99"]], [place, place], color=colour, linestyle="-", linewidth=2, marker="")
            panel.plot(each["p50"], place, "o", color=colour)
            panel.plot(each["p99"], place, "|", color=colour, markersize=14)
        panel.set_yticks(range(len(found)), [NAMES[peer].strip("*") for peer, _ in found])
        panel.set_xscale("log")
        panel.set_xlabel("延迟（ms）：圆点 p50，竖线 p99")
        panel.set_title(TITLES[model])
        log_ticks(panel.xaxis)
    figure.suptitle(f"同一段请求流，同样的输入（{report['gpu']}）", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
