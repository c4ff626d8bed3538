"""`launchlab check`: the learner's own examiner, the same exam as the instructor's."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from launchlab.course.release import pristine
from launchlab.exam.examine import examine
from launchlab.grading import history
from launchlab.grading.beside import Amount, too_much
from launchlab.grading.intake import Refused, graft
from launchlab.grading.table import verdicts
from launchlab.manifest import chapter as find_chapter


def main(name: str, notebook: Path | None = None) -> int:
    """Examine ``notebook`` (by default the chapter's in ``course/``) and explain; 0 if all is passed, 1 if not, 2 if it cannot be examined."""
    console = Console()
    chapter = find_chapter(name)
    path = Path(notebook) if notebook else chapter.release
    if not path.is_file():
        console.print(f"没有找到笔记本 {path}。请检查路径；要从头开始，可以用 git checkout 取回 course/{chapter.name}。")
        return 2
    if not chapter.solution.is_file():
        console.print(f"没有找到 {chapter.name} 的参考解答（solutions/），评分需要它。请使用完整的课程仓库。")
        return 2
    beside, amount = path.parent, Amount()
    try:
        nb, notes = graft(path.read_bytes(), pristine(chapter))
    except Refused as error:
        console.print(str(error))
        return 2
    if why := next((why for each in beside.iterdir() if each.name[0] != "." and (why := too_much(each, amount))), None):
        notes.append(f"笔记本旁边的文件没有一起评分：{why}。笔记本要用到其中的文件时，请把它们放进一个单独的文件夹。")
    with console.status(f"正在评 {chapter.name} ……"):
        report = examine(nb, chapter, files=None if why else beside).to_json()
    for note in notes:
        console.print(f"· {note}", markup=False)
    console.print(verdicts(chapter.title, [("我的笔记本", report["checks"])]))
    where = f"GPU：{report['gpu']}" if report["gpu"] else "没有 GPU：标着“需要 GPU”的练习没有评"
    console.print(f"得分 {report['score']:g} / {report['max']:g}。{where}。用时 {report['seconds']:.1f} 秒。")
    try:
        history.add(report)
        console.print("已记入学习记录；各章的进度：./grader/launch status。")
    except OSError as error:
        console.print(f"⚠ 这次的结果没能记入学习记录（{history.path()}：{error.strerror}）；得分不受影响。请检查那里的权限和磁盘空间。")
    return 0 if all(check["verdict"] == "passed" and check["score"] == check["points"] for check in report["checks"]) else 1
