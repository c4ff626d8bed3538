"""`launchlab doctor`: what this machine has, what it lacks, and which chapters it can run."""

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from launchlab import device, manifest, paths, platforms, surroundings, tools
from launchlab.exam import sandbox
from launchlab.surroundings import Surroundings

TESTED_PYTHON = ((3, 11), (3, 13))
ROOM_GB = 2.0  # notebooks, engines and a class's submissions
# A tiny kernel, compiled here: an incomplete CUDA toolkit shows only when NVRTC looks for its headers.
_CUPY_PROBE = """\
import cupy
cupy.RawKernel('extern "C" __global__ void f(int *x) { x[threadIdx.x] += 1; }', "f")((1,), (32,), (x := cupy.zeros(32, "i"),))
assert int(x.sum()) == 32
print("CUDA runtime {}.{}".format(*divmod(cupy.cuda.runtime.runtimeGetVersion() // 10, 100)))
"""
_TENSORRT_PROBE = "import tensorrt; print(tensorrt.__version__)"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    state: "ok"; "missing" (something cannot run); "warning" (runs, but not as it should); "later" (not there, and
    not needed yet). The texts are Chinese: what was found, what it means, and what to do ("" for nothing).
    """

    item: str
    state: str
    found: str
    meaning: str
    action: str = ""


@dataclass(frozen=True)
class Machine:
    """What chapters ask of a machine. python, tensorrt: (major, minor); packages: those of the manifest that are installed."""

    python: tuple[int, int]
    gpu: device.Gpu | None
    cupy: bool
    tensorrt: tuple[int, int] | None
    packages: frozenset[str]


def main(as_json: bool, with_tools: bool = False) -> int:
    """Print the report, as tables or as JSON; with_tools: with what only some commands need. Always 0: a lack is no failure of the doctor's."""
    findings, here = list(examine()), machine()
    if with_tools:
        findings.append(_tools())
    chapters = [(chapter, lacks(chapter, here)) for chapter in manifest.chapters()]
    if as_json:
        rows = [{"name": chapter.name, "ready": chapter.ready, "lacks": missing} for chapter, missing in chapters]
        print(json.dumps({"machine": [asdict(each) for each in findings], "chapters": rows}, ensure_ascii=False, indent=2))
    else:
        _show(findings, chapters)
    return 0


def examine() -> Iterator[Finding]:
    """Everything the course builds on, in the order in which it is needed."""
    where, gpu = surroundings.look(), device.gpu()
    yield about_system(where)
    for part in (_python, _packages, _fonts, _disk, _writable):
        yield part()
    yield about_sandbox(where, sandbox.available(), sandbox.works())
    yield about_gpu(where, gpu)
    for part in (_cupy, _bindings):
        yield part()
    yield about_tensorrt(gpu, _tensorrt_version())


def machine() -> Machine:
    """This machine, as far as chapters depend on it."""
    outside = {package for chapter in manifest.chapters() for package in chapter.needs.packages}
    installed = frozenset(package for package in outside if _version(package))
    return Machine(sys.version_info[:2], device.gpu(), _cupy_distribution() is not None, _tensorrt_version(), installed)


def lacks(chapter: manifest.Chapter, machine: Machine) -> list[str]:
    """What a machine lacks, in Chinese, to run all of a chapter; empty when it lacks nothing."""
    needs, gpu = chapter.needs, machine.gpu
    if gpu is None:
        return ["GPU"]
    missing = []
    if gpu.compute_capability < needs.compute_capability:
        missing.append("计算能力 {}.{}".format(*needs.compute_capability))
    if gpu.memory < needs.memory_gib * 0.9 * 2**30:  # a "6 GB" card reports somewhat less than 6 GiB
        missing.append(f"{needs.memory_gib:g} GB 显存")
    if gpu.cuda < needs.cuda:
        missing.append("支持 CUDA {}.{} 的驱动".format(*needs.cuda))
    if not machine.cupy:
        missing.append("CuPy")
    if needs.tensorrt:
        least = max(needs.tensorrt, platforms.least_tensorrt(gpu.compute_capability, machine.python))
        if (machine.tensorrt or (0, 0)) < least:
            missing.append("TensorRT {}.{}".format(*least))
    return missing + [package for package in needs.packages if package not in machine.packages]


def _python() -> Finding:
    oldest, newest = TESTED_PYTHON
    version, where = ".".join(map(str, sys.version_info[:3])), sys.prefix
    if oldest <= sys.version_info[:2] <= newest:
        return Finding("Python", "ok", version, f"环境在 {where}")
    return Finding(
        "Python",
        "warning",
        version,
        "课程在 {}.{} 到 {}.{} 上测试过，这个版本没有".format(*oldest, *newest),
        "遇到奇怪的错误时，换一个测试过的版本再试",
    )


def _packages() -> Finding:
    locks = "".join((paths.GRADER / name).read_text(encoding="utf-8") for name in ("lock.txt", "lock-tools.txt"))
    pins = re.findall(r"^([\w.-]+)==([\w.+]+)(?: ;.*)? \\$", locks, re.MULTILINE)
    differing = [name for name, pin in pins if (have := _version(name)) and have != pin]
    missing = [name for name in ("nbgrader", "jupyterlab", "ipykernel", "jupytext", "matplotlib") if not _version(name)]
    found = f"nbgrader {_version('nbgrader')}，JupyterLab {_version('jupyterlab')}"
    if missing:
        return Finding("课程的包", "missing", found, f"没有 {'、'.join(missing)}", "用 ./grader/launch 启动，它会装好")
    if differing:
        few = "、".join(differing[:4]) + ("等" if len(differing) > 4 else "")
        meaning = f"{len(differing)} 个包与锁定文件的版本不同（{few}）"
        return Finding("课程的包", "warning", found, meaning, "一般可以使用；出错时用 ./grader/launch 建立的环境")
    return Finding("课程的包", "ok", found, "版本与锁定文件一致")


def _tools() -> Finding:
    uses = {"site": "生成网站", "cluster": "在集群上评分", "postgresql": "把成绩册放在 PostgreSQL 上", "dev": "运行测试"}
    found = "，".join(f"{name} {version}" for use in uses for name, version in tools.versions(use).items() if version)
    lacking = [f"{meaning}要 {'、'.join(missing)}" for use, meaning in uses.items() if (missing := tools.missing(use))]
    if lacking:
        return Finding("其他工具", "missing", found or "没有安装", f"{'；'.join(lacking)}。学习和在一台机器上评分用不到", tools.INSTALL)
    return Finding("其他工具", "ok", found, f"可以{'、'.join(uses.values())}")


def _fonts() -> Finding:
    if importlib.util.find_spec("pylopdf_fonts_zh_cn"):
        return Finding("中文字体", "ok", "Noto Sans SC", "图中的中文可以正常显示")
    return Finding("中文字体", "warning", "没有找到", "图中的中文会显示成方框", "用 ./grader/launch 启动，它会装好字体包")


def _disk() -> Finding:
    free = shutil.disk_usage(paths.ROOT).free / 1e9
    if free >= ROOM_GB:
        return Finding("磁盘", "ok", f"剩余 {free:.0f} GB", "足够存放引擎和评分结果")
    return Finding("磁盘", "warning", f"剩余 {free:.1f} GB", "引擎和评分结果可能写不下", f"请至少腾出 {ROOM_GB:g} GB")


def _writable() -> Finding:
    try:
        with tempfile.TemporaryFile(dir=paths.ROOT):
            return Finding("课程目录", "ok", str(paths.ROOT), "可以写入")
    except OSError as error:
        meaning = f"不能写入（{error.strerror}），笔记本无法保存"
        return Finding("课程目录", "missing", str(paths.ROOT), meaning, "请检查这个目录的权限，或把仓库复制到自己的目录")


def about_system(where: Surroundings) -> Finding:
    """Linux itself, WSL or a container, and what differs there."""
    if where.wsl == 1:
        action = "在 Windows 的 PowerShell 里运行 wsl --set-version 发行版名 2，转成 WSL2"
        return Finding("系统", "warning", "WSL1", "WSL1 用不了 GPU，也没有沙箱", action)
    if where.wsl and where.linux_driver:
        return Finding(
            "系统",
            "warning",
            "WSL2，里面装了 Linux 的 NVIDIA 驱动",
            "WSL2 用的是 Windows 一侧的驱动，里面的这一份会挡住它",
            "卸载 WSL 里的驱动（sudo apt purge 'libnvidia-compute-*' 'nvidia-driver-*'），再在 PowerShell 里运行 wsl --shutdown",
        )
    if where.wsl:
        meaning = "用 Windows 一侧的驱动；锁页内存和性能计数器有限制，见 grader/PLATFORMS.md"
        return Finding("系统", "ok", "WSL2" + (f"，{where.container}" if where.container else ""), meaning)
    if where.container:
        return Finding("系统", "ok", f"Linux，在容器里（{where.container}）", "驱动来自宿主机；沙箱与剖析的限制见 grader/PLATFORMS.md")
    return Finding("系统", "ok", "Linux", "课程在 Linux 上录制")


def about_sandbox(where: Surroundings, installed: bool, works: bool) -> Finding:
    """bubblewrap: whether it is there, whether it works, and where not, what forbids it."""
    if works:
        return Finding("沙箱", "ok", "bubblewrap", "评分时，学生的代码没有网络，文件系统只读")
    alone = "只评自己的笔记本时不需要；评全班时，"
    if not installed:
        meaning = "评全班会被拒绝，除非加 --no-sandbox：那时学生的代码能看到这台机器的文件和网络"
        return Finding("沙箱", "warning", "没有 bubblewrap", meaning, f"{alone}请安装：sudo apt install bubblewrap")
    meaning = "系统不允许用户命名空间（user namespace），评全班会被拒绝，除非加 --no-sandbox"
    if where.forbidden:
        allowed = {"user.max_user_namespaces": 10_000, "kernel.unprivileged_userns_clone": 1}.get(where.forbidden, 0)
        meaning = f"内核的设置 {where.forbidden} 不允许用户命名空间（user namespace），评全班会被拒绝，除非加 --no-sandbox"
        host = "请宿主机的管理员" if where.container else "请管理员"
        return Finding("沙箱", "warning", "bubblewrap 启动失败", meaning, f"{alone}{host}运行：sudo sysctl {where.forbidden}={allowed}")
    if where.container:
        options = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"
        meaning = "容器不允许用户命名空间（user namespace），评全班会被拒绝，除非加 --no-sandbox"
        action = f"{alone}启动容器时加上 {options}；租来的容器改不了这些选项，请换用虚拟机"
        return Finding("沙箱", "warning", "bubblewrap 启动失败", meaning, action)
    return Finding("沙箱", "warning", "bubblewrap 启动失败", meaning, f"{alone}请让管理员允许用户命名空间")


def about_gpu(where: Surroundings, gpu: device.Gpu | None) -> Finding:
    """The GPU, and whether the course can use it; without one, what to do where this process runs."""
    if gpu is None:
        if where.wsl:
            action = "如果机器上有 GPU，请在 Windows 里安装或更新 NVIDIA 驱动，再运行 wsl --shutdown；不要在 WSL 里装 Linux 驱动"
        elif where.container:
            action = "如果宿主机有 GPU，请在宿主机安装 NVIDIA Container Toolkit，启动容器时加 --gpus all（podman：--device nvidia.com/gpu=all）"
        else:
            action = "如果机器上有 GPU，请安装 525 或更新的驱动（nvidia-smi 能列出它）；在容器里请加 --gpus all"
        meaning = "可以阅读全部章节（附有录制的输出），并完成不需要 GPU 的练习"
        return Finding("GPU", "missing", "没有可用的 NVIDIA GPU", meaning, action)
    found = "{}，计算能力 {}.{}，{:.1f} GiB，驱动 {}".format(gpu.name, *gpu.compute_capability, gpu.memory / 2**30, gpu.driver)
    least = manifest.chapters()[0].needs
    if gpu.compute_capability < least.compute_capability:
        meaning = "课程需要计算能力 {}.{} 或更高".format(*least.compute_capability)
        return Finding("GPU", "missing", found, meaning, "请换用更新的 GPU")
    if gpu.cuda < least.cuda:
        return Finding("GPU", "missing", found, "驱动只支持 CUDA {}.{}".format(*gpu.cuda), "请把驱动升级到 525 或更新的版本")
    spoken = "驱动支持 CUDA {}.{}".format(*gpu.cuda)
    if " MIG " in gpu.name:
        meaning = f"{spoken}；这是一块 GPU 的切片（MIG），剖析可能受限，带宽可能与别人共用"
        return Finding("GPU", "warning", found, meaning, "可以学习；测速的练习结果飘忽时，换用整块的 GPU")
    return Finding("GPU", "ok", found, spoken)


def _cupy() -> Finding:
    name = _cupy_distribution()
    if device.gpu() is None:
        found = f"{name} {_version(name)}" if name else "没有安装"
        return Finding("CuPy", "later", found, "没有 GPU 时用不上")
    if not name:
        return Finding(
            "CuPy", "missing", "没有安装", "需要 GPU 的练习无法运行", "用 ./grader/launch 启动，它会按驱动安装合适的版本"
        )
    done, said = _probe(_CUPY_PROBE)
    found = f"{name} {_version(name)}"
    if done:
        return Finding("CuPy", "ok", f"{found}，{said}", "试编译并运行了一个内核，结果正确")
    return Finding("CuPy", "missing", found, f"试运行一个内核失败：{said}", "删除 grader/.venv，再用 ./grader/launch 重新安装")


def _bindings() -> Finding:
    versions = {name: _version(name) for name in ("cuda-bindings", "cuda-core", "cupti-python")}
    found = "，".join(f"{name} {version}" for name, version in versions.items() if version) or "没有安装"
    missing = [name for name, version in versions.items() if not version]
    if not missing:
        return Finding("CUDA 绑定", "ok", found, "可以直接调用驱动 API，并用 CUPTI 追踪")
    if device.gpu() is None:
        return Finding("CUDA 绑定", "later", found, "没有 GPU 时用不上")
    action = "用 ./grader/launch 启动，它会装好"
    if missing == ["cupti-python"]:
        action = "CUDA 12 的 cupti-python 只有 Python 3.12 及更早的版本；可以换用 Python 3.12，或把驱动升级到 580"
    return Finding("CUDA 绑定", "missing", found, f"没有 {'、'.join(missing)}，用到它们的章节无法运行", action)


def about_tensorrt(gpu: device.Gpu | None, version: tuple[int, int] | None) -> Finding:
    """TensorRT, and whether it and the GPU know each other."""
    first = next(chapter for chapter in manifest.chapters() if chapter.needs.tensorrt)
    capability = gpu.compute_capability if gpu else None
    install = f"{_here(sys.executable)} -m pip install {tensorrt_requirement(capability, sys.version_info[:2])}"
    if version is None:
        return Finding("TensorRT", "later", "没有安装", f"{first.name} 之前的章节用不到它", f"学到那里时安装：{install}")
    found = "{}.{}".format(*version)
    if not first.needs.tensorrt <= version < (12, 0):
        return Finding("TensorRT", "warning", found, "课程支持 10.6 到 11，这个版本没有测试过", "请换用支持的版本")
    if capability is None:
        return Finding("TensorRT", "ok", found, "课程支持 10.6 到 11")
    row, named = platforms.gpus().get(capability), "计算能力 {}.{}".format(*capability)
    if row is None:
        meaning = f"支持表里没有这块 GPU（{named}），不知道这个版本认不认识它"
        return Finding("TensorRT", "warning", found, meaning, "如果构建引擎时报 Target GPU SM … is not supported，请装更新的版本")
    if version < row.tensorrt:
        meaning = "这块 GPU（{}）要 TensorRT {}.{} 或更新；现在构建引擎会报 Target GPU SM {}{} is not supported".format(named, *row.tensorrt, *capability)
        return Finding("TensorRT", "missing", found, meaning, f"换一个版本：{install}")
    if row.removed and version >= row.removed:
        meaning = "TensorRT 从 {}.{} 起不再支持这块 GPU（{}）".format(*row.removed, named)
        return Finding("TensorRT", "missing", found, meaning, "请换用更新的 GPU")
    return Finding("TensorRT", "ok", found, f"课程支持 10.6 到 11，这个版本认识这块 GPU（{named}）")


@cache
def _tensorrt_version() -> tuple[int, int] | None:
    """(major, minor) of a TensorRT that can really be imported."""
    if not importlib.util.find_spec("tensorrt"):
        return None
    done, said = _probe(_TENSORRT_PROBE)
    found = re.match(r"(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if done and found else None


def _cupy_distribution() -> str | None:
    return next((name for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if _version(name)), None)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _probe(code: str) -> tuple[bool, str]:
    """Run code in a process of its own, which may crash; whether it ended well, and the last line that it wrote."""
    try:
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return False, "120 秒没有应答"
    lines = (ran.stdout if ran.returncode == 0 else ran.stderr).strip().splitlines()
    return ran.returncode == 0, lines[-1] if lines else f"退出码 {ran.returncode}"


def _here(path: str) -> str:
    """A path as typed in the repository, where it lies inside."""
    return str(Path(path).relative_to(paths.ROOT)) if Path(path).is_relative_to(paths.ROOT) else path


def tensorrt_requirement(gpu: tuple[int, int] | None, python: tuple[int, int]) -> str:
    """What to ask pip for: environment.yml's pin, or where the GPU or Python is too new for it, the versions that know them."""
    least = platforms.least_tensorrt(gpu, python)
    if least > platforms.recorded():
        return "'tensorrt-cu12>={}.{},<12'".format(*least)
    text = (paths.ROOT / "environment.yml").read_text(encoding="utf-8")
    return re.search(r"^ *- (tensorrt-cu12==\S+)", text, re.MULTILINE)[1]


def _show(findings: list[Finding], chapters: list[tuple[manifest.Chapter, list[str]]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    marks = {"ok": "[green]✓ 具备", "missing": "[red]✗ 缺少", "warning": "[yellow]! 注意", "later": "[dim]· 暂不需要"}
    table = Table(title="这台机器", title_justify="left", title_style="bold", show_lines=True)
    table.add_column("项目", no_wrap=True)
    table.add_column("状态", no_wrap=True)
    table.add_column("结果与建议", overflow="fold")
    for each in findings:
        lines = [f"[bold]{escape(each.found)}[/]", escape(each.meaning), *([f"→ {escape(each.action)}"] if each.action else [])]
        table.add_row(each.item, marks[each.state], "\n".join(lines))
    groups: dict[tuple[str, ...], list[manifest.Chapter]] = {}
    for chapter, missing in chapters:
        if chapter.ready:
            groups.setdefault(tuple(missing), []).append(chapter)
    console = Console(highlight=False)
    console.print(table)
    console.print("[bold]章节")
    for missing, members in sorted(groups.items(), key=lambda group: len(group[0])):
        names = "、".join(chapter.name for chapter in members)
        can = f"可以阅读，并完成不需要 GPU 的部分；要完整运行还缺 {'、'.join(missing)}" if missing else "可以完整运行"
        console.print(f"  {'[yellow]![/]' if missing else '[green]✓[/]'} {names}：{can}", soft_wrap=True)
    if planned := sum(not chapter.ready for chapter, _ in chapters):
        console.print(f"  · 还有 {planned} 章尚未写成")
