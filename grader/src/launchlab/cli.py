"""The command line. Each command imports what it needs when it runs, so that `--help` comes at once."""

import argparse
import difflib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from launchlab import manifest, paths

_EPILOG = """\
首次运行 ./grader/launch 会建立虚拟环境 grader/.venv（virtual environment），以后直接启动。环境变量：
  LAUNCHLAB_PYTHON=/path/to/python   不建虚拟环境，直接用这个装好全部包的解释器（没有网络时，或用 conda 时）
  LAUNCHLAB_CUDA=12|13|none          指定安装哪一套 GPU 包，默认由驱动版本决定
  LAUNCHLAB_ROOT=/path/to/repo       课程仓库的位置，默认由程序自己找到
  LAUNCHLAB_GRADEBOOK=postgresql://… 成绩册放在 PostgreSQL 服务器上，供几位教师同时使用

教师在 grader/ 里可以直接用 nbgrader（先 source .venv/bin/activate），例如 nbgrader autograde 03_cuda_graph_concepts。
"""


class _Parser(argparse.ArgumentParser):
    """argparse with its own words in Chinese."""

    def __init__(self, **options: object) -> None:
        super().__init__(add_help=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._positionals.title, self._optionals.title = "参数", "选项"
        self.add_argument("-h", "--help", action="help", help="显示这份说明")

    def format_usage(self) -> str:
        return super().format_usage().replace("usage:", "用法：", 1)

    def format_help(self) -> str:
        return super().format_help().replace("usage:", "用法：", 1)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"✗ 命令不完整或有多余的部分（{message}）。\n{self.format_usage()}")


def run(arguments: list[str]) -> int:
    """Run one command with its arguments; return the exit status. Errors of use end in SystemExit(2)."""
    parser, commands = _parser()
    if not arguments:
        parser.print_help()
        return 0
    if not arguments[0].startswith("-") and arguments[0] not in commands:
        near = difflib.get_close_matches(arguments[0], commands, n=1)
        hint = f"你要找的是不是 {near[0]}？" if near else f"可用的命令：{'、'.join(commands)}。"
        print(f"✗ 没有名为“{arguments[0]}”的命令。{hint}", file=sys.stderr)
        return 2
    chosen, rest = parser.parse_known_args(arguments)
    if "command" not in chosen:
        parser.error(" ".join(rest))
    if rest and not chosen.passes_on:
        commands[arguments[0]].error(" ".join(rest))
    try:
        return chosen.command(chosen, rest)
    except (manifest.UnknownChapter, manifest.ManifestError) as error:
        print(f"✗ {error}", file=sys.stderr)
        return 2


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="launchlab",
        description="《CUDA 图优化与 TensorRT 动态形状》：学习、自测、评分与编写（LaunchLab）。",
        epilog=_EPILOG,
    )
    group = parser.add_subparsers(title="命令", metavar="命令")
    commands: dict[str, _Parser] = {}

    def add(name: str, command: Callable[..., int], text: str, passes_on: str = "") -> _Parser:
        usage = f"launchlab {name} {passes_on}" if passes_on else None
        commands[name] = group.add_parser(name, help=text, description=text, usage=usage)
        commands[name].set_defaults(command=command, passes_on=bool(passes_on))
        return commands[name]

    add("lab", _lab, "在 JupyterLab 里打开课程", "[JupyterLab 的选项，如 --no-browser --port 8890]")
    check = add("check", _check, "给自己的笔记本评分并讲解（用本机的 GPU）")
    check.add_argument("chapter", metavar="章节", help="编号或名称，如 3 或 03_cuda_graph_concepts")
    check.add_argument("notebook", metavar="笔记本", nargs="?", type=Path, help="要评的 .ipynb，默认是 course/ 里的那一份")
    add("status", _status, "我的进度：各章的得分和测到过的最好加速比")
    restore = add("restore", _restore, "把一章恢复成发布时的样子；你的旧笔记本改名留在旁边")
    restore.add_argument("chapter", metavar="章节", help="编号或名称")
    doctor = add("doctor", _doctor, "检查这台机器：有什么、缺什么、能运行哪些章节")
    doctor.add_argument("--tools", action="store_true", help="也检查网站、集群、PostgreSQL 和测试要用的包；经 ./grader/launch 启动时，缺的会先装好")
    doctor.add_argument("--json", action="store_true", help="输出 JSON，供程序读取")
    add("demo", _demo, "给一个示例班级评分，看看评分器怎样工作")
    release = add("release", _release, "把一章打包发给学生，并设定截止时间")
    release.add_argument("chapter", metavar="章节", help="编号或名称")
    release.add_argument("--due", metavar="时间", help="截止时间，如 '2026-12-07 23:59'（本机的时区）")
    collect = add("collect", _collect, "收卷：把学习平台导出的 zip（或一个文件夹）变成可以评分的提交")
    collect.add_argument("chapter", metavar="章节", help="编号或名称")
    collect.add_argument(
        "source", metavar="来源", type=Path, help="zip 文件或文件夹：Moodle、Canvas、Blackboard 的导出，或每人一个文件夹"
    )
    collect.add_argument("--at", metavar="时间", help="统一的交卷时间，如 '2026-11-30 18:00'；默认用文件自己的时间")
    grade = add("grade", _grade, "给一章的全部提交评分（nbgrader autograde）", "章节 [--no-sandbox] [--cluster [地址]] [nbgrader autograde 的选项]")
    grade.add_argument("chapter", metavar="章节", help="编号或名称")
    grade.add_argument("--no-sandbox", action="store_true", help="没有 bubblewrap 也评分：提交里的代码能看到这台机器的文件和网络")
    grade.add_argument("--cluster", metavar="地址", nargs="?", const="local", help="在 Ray 集群上评分，每块 GPU 同时评一份：集群的地址（主机:端口），不写就用这台机器的全部 GPU")
    waiting = add("open", _open, "列出一章里还没有定分、等教师处理的项目")
    waiting.add_argument("chapter", metavar="章节", help="编号或名称")
    report = add("report", _report, "把一章的评分结果做成网页：每份提交一页，全班一页")
    report.add_argument("chapter", metavar="章节", help="编号或名称")
    add("site", _site, "把全部章节与录制的输出做成网站（阅读版），没有 GPU、没有网络也能读")
    build = add("build", _build, "由源文件生成解答、发布版、README 的章节表与 PLATFORMS.md 的支持表")
    build.add_argument("chapters", metavar="章节", nargs="*", help="编号或名称，默认是全部已完成的章节")
    build.add_argument("--check", action="store_true", help="只检查，不写文件；有出入时退出码为 1")
    new = add("new", _new, "新建一章、一道练习或一项检查的骨架")
    kinds = new.add_subparsers(title="种类", metavar="种类", dest="what", required=True)
    made = {
        "chapter": ("一章，排在最后", {"slug": "英文短名，如 green_contexts", "title": "中文标题"}),
        "exercise": ("一道练习，放在小结之前", {"chapter": "章节的编号或名称", "name": "函数名"}),
        "check": ("给一道练习再加一项检查", {"chapter": "章节的编号或名称", "name": "练习的函数名", "test": "检查的名字"}),
    }
    for what, (text, arguments) in made.items():
        kind = kinds.add_parser(what, help=text, description=text)
        for name, help_text in arguments.items():
            kind.add_argument(name, metavar={"slug": "短名", "title": "标题", "chapter": "章节", "name": "练习", "test": "检查"}[name], help=help_text)
        if what == "chapter":
            kind.add_argument("--module", metavar="模块", required=True, help="chapters.toml 里的模块，如 tuning")
        else:
            kind.add_argument("--kind", metavar="种类", default="answer", help="answer、structure 或 speedup，默认 answer")
    record = add("record", _record, "在真实 GPU 上录制章节的输出与回执（receipt）")
    record.add_argument("chapters", metavar="章节", nargs="+", help="编号或名称")
    bench = add("bench", _bench, "在 GPU 上测量：逐次入队与 CUDA 图，真实的引擎；写出 JSON、图表和 README 里的表")
    bench.add_argument(
        "--seconds", metavar="秒", type=float, default=300, help="时间限制，到时没测的部分会写明（默认 %(default)s）"
    )
    bench.add_argument(
        "--from", dest="source", metavar="报告", type=Path, help="不测量，只由这份 JSON 重画图表和表格（不需要 GPU）"
    )
    peers = add("peers", _peers, "在真实 GPU 上，把本课程的方法与 PyTorch、ONNX Runtime、TensorRT 的常见用法并排测量")
    peers.add_argument("--seconds", metavar="秒", type=float, default=400.0, help="最多用多少秒，默认 400；来不及的会写明")
    peers.add_argument(
        "--level",
        metavar="级别",
        type=int,
        choices=range(1, 6),
        default=1,
        help="TensorRT 的优化级别，1 到 5，默认 1；来不及就用 1",
    )
    peers.add_argument("--redraw", action="store_true", help="不测量，只由已有的报告重新画图")
    peers.add_argument("--out", metavar="文件", type=Path, help="报告写到哪里，默认 grader/reports/peers.json")
    add("test", _test, "运行全部检查与测试（ruff、typos、pytest）", "[pytest 的选项]")
    return parser, commands


def _lab(_: argparse.Namespace, rest: list[str]) -> int:
    from launchlab import jupyter

    return jupyter.main(rest)


def _check(chosen: argparse.Namespace, _: list[str]) -> int:
    name = manifest.chapter(chosen.chapter).name
    from launchlab.grading import learner

    return learner.main(name, chosen.notebook)


def _status(_: argparse.Namespace, __: list[str]) -> int:
    from launchlab.grading import status

    return status.main()


def _restore(chosen: argparse.Namespace, _: list[str]) -> int:
    name = manifest.chapter(chosen.chapter).name
    from launchlab.course import restore

    return restore.main(name)


def _doctor(chosen: argparse.Namespace, _: list[str]) -> int:
    from launchlab import doctor

    return doctor.main(chosen.json, chosen.tools)


def _demo(_: argparse.Namespace, __: list[str]) -> int:
    from launchlab import demo

    return demo.main()


def _release(chosen: argparse.Namespace, _: list[str]) -> int:
    name = manifest.chapter(chosen.chapter).name
    from launchlab.grading import handout

    return handout.main(name, chosen.due)


def _collect(chosen: argparse.Namespace, _: list[str]) -> int:
    name = manifest.chapter(chosen.chapter).name
    from launchlab.grading import collect

    return collect.main(name, chosen.source, chosen.at)


def _grade(chosen: argparse.Namespace, rest: list[str]) -> int:
    from launchlab.grading import WITHOUT_SANDBOX

    options = [WITHOUT_SANDBOX] if chosen.no_sandbox else []
    options += [f"--IntakeExporter.cluster={chosen.cluster}"] if chosen.cluster else []
    command = [sys.executable, "-m", "nbgrader", "autograde", manifest.chapter(chosen.chapter).name, *options, *rest]
    return subprocess.call(command, cwd=paths.GRADER)


def _open(chosen: argparse.Namespace, _: list[str]) -> int:
    name = manifest.chapter(chosen.chapter).name
    from launchlab.grading import open_cases

    return open_cases.main(name)


def _report(chosen: argparse.Namespace, _: list[str]) -> int:
    name = manifest.chapter(chosen.chapter).name
    from launchlab.grading import pages

    return pages.main(name)


def _site(_: argparse.Namespace, __: list[str]) -> int:
    from launchlab import site

    return site.main()


def _build(chosen: argparse.Namespace, _: list[str]) -> int:
    names = [manifest.chapter(name).name for name in chosen.chapters]
    from launchlab import platforms, readme
    from launchlab.course import build

    return build.main(names, chosen.check) | readme.main(chosen.check) | platforms.main(chosen.check)


def _new(chosen: argparse.Namespace, _: list[str]) -> int:
    from launchlab.course import scaffold

    match chosen.what:
        case "chapter":
            return scaffold.chapter(chosen.slug, chosen.title, chosen.module)
        case "exercise":
            return scaffold.exercise(chosen.chapter, chosen.name, chosen.kind)
        case _:
            return scaffold.check(chosen.chapter, chosen.name, chosen.test, chosen.kind)


def _record(chosen: argparse.Namespace, _: list[str]) -> int:
    names = [manifest.chapter(name).name for name in chosen.chapters]
    from launchlab.course import record

    return record.main(names)


def _bench(chosen: argparse.Namespace, _: list[str]) -> int:
    from launchlab.bench import command

    return command.main(chosen.seconds, chosen.source)


def _peers(chosen: argparse.Namespace, _: list[str]) -> int:
    from launchlab.peers import report, run

    out = chosen.out or report.REPORT
    if chosen.redraw:
        report.draw(report.load(out), out.with_suffix(".svg"))
        return 0
    return run.main(chosen.seconds, chosen.level, out)


def _test(_: argparse.Namespace, rest: list[str]) -> int:
    from launchlab import suite

    return suite.main(rest)
