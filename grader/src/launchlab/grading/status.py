"""`launchlab status`: how far this learner has come: chapters, marks, and the best speed-ups measured."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launchlab.grading import history
from launchlab.grading.history import Run
from launchlab.grading.titles import exercise_titles
from launchlab.manifest import Chapter, chapters


def main() -> int:
    """Print the table; 0, or 1 where the history cannot be read in full."""
    console = Console()
    try:
        runs, unreadable = history.read()
    except OSError as error:
        console.print(
            f"✗ 打不开学习记录 {history.path()}：{error.strerror}。请检查它的权限；文件没有改动。",
            style="red",
            markup=False,
            highlight=False,
        )
        return 1
    known = [chapter for chapter in chapters() if chapter.ready or any(run.chapter == chapter.name for run in runs)]
    done = sum(_done(_of(chapter, runs)) for chapter in known)
    console.print(_table(known, runs))
    console.print(
        f"{done} / {len(known)} 章得了满分。评一章：./grader/launch check 编号。把一章恢复成原样（旧的会留着）：./grader/launch restore 编号。",
        markup=False,
        highlight=False,
    )
    if others := sorted({run.chapter for run in runs} - {chapter.name for chapter in known}):
        console.print(f"另有课程里没有的章节的记录：{'、'.join(others)}。", markup=False, highlight=False)
    if unreadable:
        lines = "、".join(str(number) for number in unreadable)
        console.print(
            f"⚠ 学习记录 {history.path()} 的第 {lines} 行读不出来：可能写到一半被中断，也可能被别的程序改过。其余 {len(runs)} 条都在上面，"
            "文件一个字也没有改，以后的结果会接着往后写。用文本编辑器打开它，改好或删掉这几行，这条提示就不再出现。",
            style="yellow", markup=False, highlight=False,
        )  # fmt: skip
    return 1 if unreadable else 0


def _table(known: list[Chapter], runs: list[Run]) -> Table:
    table = Table(title="我的进度", expand=True)
    for heading, options in {
        "编号": {"justify": "right"}, "章节": {"ratio": 4}, "进度": {}, "最好得分": {"justify": "right"}, "最近一次": {"ratio": 3}, "实测加速比（最好的一次）": {"ratio": 6},
    }.items():  # fmt: skip
        table.add_column(heading, overflow="fold", **options)
    for place, chapter in enumerate(known):
        mine = _of(chapter, runs)
        table.add_row(
            str(chapter.number), Text(chapter.title), _progress(mine), _marks(max(mine, key=_merit)) if mine else "",
            f"{mine[-1].at.astimezone():%Y-%m-%d %H:%M}，{_marks(mine[-1])}" if mine else "", _ratios(chapter, mine),
            end_section=place + 1 == len(known) or known[place + 1].module != chapter.module,
        )  # fmt: skip
    return table


def _of(chapter: Chapter, runs: list[Run]) -> list[Run]:
    return [run for run in runs if run.chapter == chapter.name]


def _merit(run: Run) -> float:
    return run.score / run.max if run.max else 0.0


def _done(mine: list[Run]) -> bool:
    return any(run.score == run.max for run in mine)


def _progress(mine: list[Run]) -> Text:
    if not mine:
        return Text("○ 未评过", style="dim")
    return Text("✓ 满分", style="green") if _done(mine) else Text("◐ 进行中", style="yellow")


def _marks(run: Run) -> str:
    return f"{run.score:g}/{run.max:g}" + (f"（{run.open} 题未评）" if run.open else "")


def _ratios(chapter: Chapter, mine: list[Run]) -> Text:
    """One line for each exercise with a measured speed-up: its best, and on which GPU."""
    best: dict[str, tuple[float, str]] = {}
    for run in mine:
        for name, ratio in run.ratios.items():
            best[name] = max(best.get(name, (0.0, "")), (ratio, run.gpu or ""))
    if not best:
        return Text()
    titles = exercise_titles(chapter) if chapter.solution.is_file() else {}
    return Text("\n".join(f"{titles.get(name, name)}：{ratio:.2f} 倍（{gpu}）" for name, (ratio, gpu) in best.items()))
