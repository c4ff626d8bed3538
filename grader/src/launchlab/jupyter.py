"""`launchlab lab`: JupyterLab in Chinese, opened on `course/`, with the course's defaults and nbgrader's extensions."""

import os
import sys

from launchlab import paths


def main(arguments: list[str]) -> int:
    """Become JupyterLab; `arguments` are its own. Returns 1 where there is no course to open."""
    if not paths.COURSE.is_dir():
        print(f"✗ 找不到课程文件夹 {paths.COURSE}。请先运行 launchlab build 生成它。", file=sys.stderr)
        return 1
    print("正在启动 JupyterLab；按 Ctrl+C 两次退出。", flush=True)
    os.chdir(paths.GRADER)  # where nbgrader finds its configuration
    os.execve(sys.executable, [sys.executable, "-m", "jupyterlab", *_options(), *arguments], _environment())


def _options() -> list[str]:
    # The root is the repository and not course/: formgrader works only where the whole course lies below the root.
    # No login shell in terminals, where Jupyter would start one: it sets PATH anew, and `launch` would not be found.
    shell = {"shell_command": [os.environ.get("SHELL") or "sh"]}
    options = [f"--ServerApp.root_dir={paths.ROOT}", f"--FileContentsManager.preferred_dir={paths.COURSE.name}", f"--ServerApp.terminado_settings={shell}"]
    return [*options, "--allow-root"] if os.geteuid() == 0 else options


def _environment() -> dict[str, str]:
    """Defaults come from grader/jupyter, below the user's own settings; open tabs are remembered for this course alone.

    A terminal opens in whatever folder the file browser shows: there `launch check 3` works, from any folder.
    """
    ours, theirs = paths.GRADER / "jupyter", os.environ.get("JUPYTER_CONFIG_PATH")
    return {
        **os.environ,
        "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), str(paths.GRADER)]),
        "JUPYTER_CONFIG_PATH": os.pathsep.join([str(ours), *([theirs] if theirs else [])]),
        "JUPYTERLAB_WORKSPACES_DIR": str(paths.BUILD / "workspaces"),
    }
