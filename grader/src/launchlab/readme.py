"""What README.md holds between markers: the table of chapters, from the manifest, and the figures of the committed benchmark."""

import re
from pathlib import Path

from launchlab import manifest, paths
from launchlab.bench import table as bench

BEGIN, END = "<!-- chapters: begin (made by `launchlab build`) -->", "<!-- chapters: end -->"
README = paths.ROOT / "README.md"


def main(check: bool) -> int:
    """Bring both up to date; with `check` write nothing and return 1 where one is out of date."""
    current = README.read_text(encoding="utf-8")
    try:
        wanted = updated(current)
    except ValueError as error:  # a marker is lost, or the benchmark's report is broken
        print(f"✗ README.md：{error}")
        return 1
    if wanted == current:
        return 0
    if check:
        print("✗ README.md：章节表与 chapters.toml，或者基准数字与 grader/reports/bench.json 不一致")
        return 1
    README.write_text(wanted, encoding="utf-8")
    print("✓ README.md：章节表和基准数字已更新")
    return 0


def updated(text: str) -> str:
    """`text` with what lies between each two markers made anew; ValueError where a marker is missing."""
    return _replaced(_replaced(text, BEGIN, END, table()), bench.BEGIN, bench.END, bench.block())


def _replaced(text: str, begin: str, end: str, body: str) -> str:
    made, count = re.subn(f"(?s)(?<={re.escape(begin)}\n).*(?={re.escape(end)})", lambda _: body, text)
    if count != 1:
        raise ValueError(f"README.md has lost the markers {begin} … {end}")
    return made


def table() -> str:
    """One Markdown table a module; a chapter that is ready links to its notebook and to the solution with its outputs."""
    return "\n".join(_module(module) for module in manifest.modules()) + "\n"


def _module(module: manifest.Module) -> str:
    rows = "".join(_row(chapter) for chapter in manifest.chapters() if chapter.module == module.id)
    return f"\n**{module.title}** · {module.about}\n\n| chapter | solution | minutes | needs |\n|---|---|---:|---|\n{rows}"


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
    return f"| {title} | {solution} | {chapter.minutes} | {', '.join([*parts, *needs.packages])} |\n"


def _link(text: str, path: Path) -> str:
    return f"[{text}]({path.relative_to(paths.ROOT).as_posix()})"
