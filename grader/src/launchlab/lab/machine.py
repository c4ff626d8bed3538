"""Which GPU a notebook runs on, told in one line."""

from importlib.util import find_spec

from launchlab.device import gpu

from . import without_gpu

ELSEWHERE = "用到 CuPy 或 CUDA 的单元在这里不会执行，运行时只显示一行说明；其余单元（包括不需要 GPU 的练习）照常运行。"


def gpu_name() -> str | None:
    """Return the name of the GPU that cells run on, such as "NVIDIA H200"; None where they cannot run."""
    return gpu().name if _usable() else None


def here() -> None:
    """Say in one line which GPU this notebook runs on, or that there is none and what will not run.

    Without a usable GPU, from then on a cell that fails for lack of it shows one line instead of a traceback.
    """
    found = gpu()
    if _usable():
        major, minor = found.compute_capability
        print(
            f"这台机器的 GPU：{found.name}（计算能力 {major}.{minor}，显存 {found.memory / 2**30:.0f} GiB，"
            f"驱动 {found.driver}）。所有单元都可以运行。"
        )
        return
    missing = "没有可用的 GPU" if found is None else f"有 GPU（{found.name}），但没有安装 CuPy"
    print(f"这台机器上{missing}：{ELSEWHERE}")
    without_gpu.install_notes()


def _usable() -> bool:
    return gpu() is not None and find_spec("cupy") is not None
