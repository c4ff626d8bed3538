"""`launchlab demo`: a small sample class, graded from end to end by plain nbgrader."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from launchlab.course import receipt
from launchlab.demo import sample_class
from launchlab.device import gpu
from launchlab.exam import judge, sandbox
from launchlab.grading import WITHOUT_SANDBOX
from launchlab.grading.table import verdicts
from launchlab.manifest import Chapter, chapter
from launchlab.paths import BUILD, GRADER, short

CHAPTER = "03_cuda_graph_concepts"
PLACE = BUILD / "demo"


class StepFailed(Exception):
    """A command of the demo failed; the text (Chinese) says which and where its log is."""


def main() -> int:
    """Grade the sample class and show what came of it; 0 if every step worked."""
    console, target, started = Console(), chapter(CHAPTER), time.perf_counter()
    if PLACE.exists():
        shutil.rmtree(PLACE)
    students = sample_class.submit(target, PLACE / "submitted")
    device = gpu()
    console.print(f"样例班级：{len(students)} 份提交，{target.title}。" + (f"GPU：{device.name}，全部真实评分。" if device else "这台机器没有可用的 GPU：不需要 GPU 的练习真实评分，其余留空。"))
    without = [] if sandbox.works() else [WITHOUT_SANDBOX]
    if without:
        console.print("这台机器没有可用的 bubblewrap：样例是课程自带的，这次不用沙箱；评自己的班级之前请安装它。")
    try:
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
            _nbgrader(progress, f"nbgrader autograde {CHAPTER}", ["autograde", CHAPTER, *without], count=len(students))
            _nbgrader(progress, f"nbgrader generate_feedback {CHAPTER}", ["generate_feedback", CHAPTER])
            _nbgrader(progress, "nbgrader export", ["export", "--to", str(PLACE / "grades.csv")])
    except StepFailed as error:
        console.print(str(error))
        return 1
    reports = {name: json.loads((PLACE / "reports" / name / f"{CHAPTER}.json").read_text(encoding="utf-8")) for name in students}
    rows = [(f"{name}\n[dim]{about}[/]", reports[name]["checks"]) for name, about in students.items()]
    console.print(verdicts(f"{target.number:02d} {target.title}", rows, None if device else recorded(target)))
    shown = [PLACE / "feedback" / name / CHAPTER / f"{CHAPTER}.html" for name in students]
    console.print("反馈页面：", *(f"\n  {short(path)}" for path in shown if path.is_file()))
    console.print(f"成绩表：{short(PLACE / 'grades.csv')}")
    console.print(f"用时 {time.perf_counter() - started:.0f} 秒。接下来：./grader/launch lab 打开课程，./grader/launch check 3 给自己的笔记本评分。")
    return 0


def _nbgrader(progress: Progress, title: str, arguments: list[str], count: int = 0) -> None:
    task = progress.add_task(title, total=None)
    environment = os.environ | {"LAUNCHLAB_BUILD": str(PLACE)}
    log = PLACE / "demo.log"
    with log.open("a", encoding="utf-8") as out:
        process = subprocess.Popen([sys.executable, "-m", "nbgrader", *arguments], cwd=GRADER, env=environment, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.2)
            if count:
                done = len(list((PLACE / "reports").glob("*/*.json")))
                progress.update(task, description=f"{title}（{done}/{count}）")
    progress.update(task, total=1, completed=1)
    if process.returncode:
        raise StepFailed(f"{title} 失败了（退出码 {process.returncode}）。日志在 {short(log)}，最后几行：\n" + "\n".join(log.read_text(encoding="utf-8").splitlines()[-8:]))


def recorded(target: Chapter) -> dict[str, str]:
    """What the recorded run of the solution found, in words, by check id; for machines without a GPU."""
    try:
        proof = receipt.load(target)
    except (FileNotFoundError, ValueError):
        return {}
    texts = {}
    for check in proof["checks"]:
        if not check["needs_gpu"]:
            continue
        found = f"参考解答的录制结果（{proof['gpu']}，{proof['recorded_at'][:10]}）：{check['score']:g}/{check['points']:g} 分"
        for record in check["records"]:
            if measured := judge.measured(record):
                result = measured[1]
                found += f"，加速的可信下界 {result['low']:.1f} 倍，门槛 {result['bar']:.1f} 倍"
        texts[check["id"]] = found
    return texts
