"""What README.md holds between markers: the table of chapters, from the manifest and the receipts, and the figures of committed reports."""

from collections.abc import Callable
from pathlib import Path

from launchlab import generated, manifest, paths
from launchlab.bench import table as bench
from launchlab.course import receipt
from launchlab.exam import judge
from launchlab.peers import report as peers

BEGIN, END = "<!-- chapters: begin (made by `launchlab build`) -->", "<!-- chapters: end -->"
PEERS_BEGIN, PEERS_END = "<!-- peers: begin (made by `launchlab build`) -->", "<!-- peers: end -->"
README = paths.ROOT / "README.md"


def main(check: bool) -> int:
    """Bring all parts up to date; with `check` write nothing and return 1 where one is out of date, or cannot be made."""
    found = 0
    for begin, end, body, stale in _parts():
        try:
            found |= generated.refresh(README, begin, end, body(), stale, check)
        except ValueError as error:  # a marker is lost, or a report is broken
            print(f"✗ README.md：{error}")
            found = 1
    return found


def updated(text: str) -> str:
    """`text` with what lies between each two markers made anew; ValueError where a marker is missing."""
    for begin, end, body, _ in _parts():
        text = generated.between(text, begin, end, body())
    return text


def _parts() -> list[tuple[str, str, Callable[[], str], str]]:
    """Begin, end, what makes the text between them, and what to say where it is out of date."""
    return [
        (BEGIN, END, table, "章节表与 chapters.toml 或回执不一致"),
        (PEERS_BEGIN, PEERS_END, peers.section, "同类方案的表与 grader/reports/peers.json 不一致"),
        (bench.BEGIN, bench.END, bench.block, "基准数字与 grader/reports/bench.json 不一致"),
    ]


def table() -> str:
    """Which GPU the gains are of; one Markdown table a module. A chapter that is ready links to its notebook and to the solution with its outputs."""
    gpus = sorted({receipt.load(chapter)["gpu"] for chapter in manifest.chapters() if chapter.receipt.exists()})
    measured = f"\nGains as recorded on {', '.join(gpus)}.\n" if gpus else ""
    return measured + "".join(_module(module) for module in manifest.modules()) + "\n"


def _module(module: manifest.Module) -> str:
    rows = "".join(_row(chapter) for chapter in manifest.chapters() if chapter.module == module.id)
    return f"\n**{module.title}** · {module.about}\n\n| chapter | solution | minutes | gain | needs |\n|---|---|---:|---:|---|\n{rows}"


def _gains(chapter: manifest.Chapter) -> str:
    """How much faster than the exam's baseline the recorded solution was: of each speed-up exercise the bound that its verdict rests on."""
    if not chapter.receipt.exists():
        return "—"
    records = (record for check in receipt.load(chapter)["checks"] for record in check["records"])
    lows = [measured[1]["low"] for record in records if (measured := judge.measured(record))]
    return " · ".join(f"{low:.0f}×" if low >= 100 else f"{low:.1f}×" for low in lows) or "—"


def _row(chapter: manifest.Chapter) -> str:
    title, solution = f"{chapter.title} *(planned)*", ""
    if chapter.ready:
        title, solution = _link(chapter.title, chapter.release), _link("解答", chapter.solution)
    needs = chapter.needs
    parts = [f"{needs.memory_gib:g} GB"]
    if needs.cuda > (12, 0):
        parts.append("CUDA {}.{}".format(*needs.cuda))
    if needs.tensorrt:
        parts.append("TensorRT")
    return f"| {title} | {solution} | {chapter.minutes} | {_gains(chapter)} | {', '.join([*parts, *needs.packages])} |\n"


def _link(text: str, path: Path) -> str:
    return f"[{text}]({path.relative_to(paths.ROOT).as_posix()})"
