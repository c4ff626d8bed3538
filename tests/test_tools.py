"""What works without the packages of lock-tools.txt, and what is said where one is missing: in an interpreter that has only the others."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from test_environment import pins

from launchlab import paths, tools

GPU = {"cupy", "cupyx", "cuda", "cupti", "tensorrt", "tensorrt_bindings"}
IMPORT_ALL = """\
import importlib, json, pkgutil, launchlab
failed = {}
for module in pkgutil.walk_packages(launchlab.__path__, "launchlab."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        failed[module.name] = error.name.partition(".")[0]
print(json.dumps(failed))
"""


@pytest.fixture(scope="module")
def slim(tmp_path_factory) -> Callable[..., subprocess.CompletedProcess]:
    """Runs an interpreter with this one's packages but for those that lock-tools.txt pins."""
    root, here = tmp_path_factory.mktemp("slim"), Path(sysconfig.get_path("purelib"))
    venv.create(root / "venv", with_pip=False, symlinks=True)
    hidden = {"__pycache__"}
    for distribution in importlib.metadata.distributions(path=[str(here)]):
        if distribution.name.lower().replace("_", "-") in pins("lock-tools.txt"):
            hidden |= {file.parts[0] for file in distribution.files or ()}
    site = root / "venv" / here.relative_to(sys.prefix)
    for entry in here.iterdir():
        if entry.name not in hidden:
            (site / entry.name).symlink_to(entry)

    def run(*arguments: str, **extra: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"PYTHONPATH": str(paths.GRADER / "src"), "LAUNCHLAB_BUILD": str(root / "build"), **extra}
        command = [root / "venv" / "bin" / "python", *arguments]
        return subprocess.run(command, cwd=paths.GRADER, env=environment, capture_output=True, text=True, timeout=120)

    return run


def test_the_packages_are_those_of_the_project():
    project = tomllib.loads((paths.GRADER / "pyproject.toml").read_text(encoding="utf-8"))
    asked = project["project"]["optional-dependencies"] | project["dependency-groups"]
    assert {use: [Requirement(text).name for text in asked[use]] for use in tools.PACKAGES} == {
        use: list(names) for use, names in tools.PACKAGES.items()
    }


def test_only_the_site_and_the_cluster_import_them(slim):
    ended = slim("-c", IMPORT_ALL)
    assert ended.returncode == 0, ended.stderr
    failed = {
        module: missing
        for module, missing in json.loads(ended.stdout).items()
        if missing not in GPU and not module.startswith("launchlab.peers.")
    }
    assert failed == {"launchlab.grading.cluster": "ray", "launchlab.site.extension": "docutils"}


@pytest.mark.parametrize(
    ("command", "missing"),
    [("launchlab site", "sphinx"), ("launchlab test", "ruff"), ("nbgrader export", "psycopg"), ("launchlab open 3", "psycopg")],
)
def test_a_command_says_what_is_missing_and_what_installs_it(slim, command, missing):
    ended = slim("-m", *command.split(), LAUNCHLAB_GRADEBOOK="postgresql://me@/course?host=/nowhere")
    assert ended.returncode in (1, 2) and ended.stdout == ""
    assert ended.stderr.startswith("✗ ") and missing in ended.stderr and "./grader/launch doctor --tools" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_doctor_looks_at_them_when_asked(slim):
    rows = json.loads(slim("-m", "launchlab", "doctor", "--tools", "--json").stdout)["machine"]
    told = next(row for row in rows if row["item"] == "其他工具")
    assert told["state"] == "missing" and all(name in told["meaning"] for name in ("sphinx", "ray", "psycopg", "pytest"))
    assert told["action"] == tools.INSTALL
    ended = subprocess.run(
        [sys.executable, "-m", "launchlab", "doctor", "--tools", "--json"], capture_output=True, text=True, check=True
    )
    told = next(row for row in json.loads(ended.stdout)["machine"] if row["item"] == "其他工具")
    absent = [name for use in tools.PACKAGES for name in tools.missing(use)]
    assert (told["state"] == "ok") == (not absent) and all(name in told["meaning"] for name in absent)
    assert f"pytest {pytest.__version__}" in told["found"]
