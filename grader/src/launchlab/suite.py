"""`launchlab test`: the linters, then pytest, whose closing line comes last."""

import os
import subprocess
import sys
from pathlib import Path

from launchlab import paths, tools


def main(arguments: list[str]) -> int:
    """Run all steps, each even when an earlier one failed; `arguments` go to pytest. Returns 0; 1 if any step failed; 2 where the tools are missing."""
    if missing := tools.missing("dev"):
        print(f"✗ 没有安装 {'、'.join(missing)}，不能运行测试。{tools.INSTALL}", file=sys.stderr)
        return 2
    config = str(paths.GRADER / "pyproject.toml")
    scripts = Path(sys.executable).parent
    steps = {
        "ruff check": [str(scripts / "ruff"), "check", "--config", config, "."],
        "typos": [str(scripts / "typos"), "--config", config],
        "pytest": [sys.executable, "-m", "pytest", "-c", config, "--rootdir", ".", "-n", "2", "--dist", "loadfile", *(arguments or ["tests"])],
    }
    environment = {**os.environ, "PYTHONPATH": str(paths.GRADER / "src"), "LAUNCHLAB_ROOT": str(paths.ROOT)}
    failed = False
    for name, command in steps.items():
        print(f"── {name}", flush=True)
        failed |= subprocess.call(command, cwd=paths.ROOT, env=environment) != 0
    return int(failed)
