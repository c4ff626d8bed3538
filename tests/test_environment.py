"""pyproject.toml, the lock files, environment.yml and the README agree with each other and with the manifest."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launchlab import paths
from launchlab.manifest import chapters

PROJECT = tomllib.loads((paths.GRADER / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
TOOLS = [*EXTRAS["cluster"], *EXTRAS["postgresql"], *EXTRAS["site"], *PROJECT["dependency-groups"]["dev"]]
LOCKS = {"lock.txt": [], "lock-tools.txt": TOOLS, "lock-cuda12.txt": EXTRAS["cuda12"], "lock-cuda13.txt": EXTRAS["cuda13"]}
ENVIRONMENT = paths.ROOT / "environment.yml"
EVERY = "every chapter"


def pins(lock: str) -> dict[str, str]:
    """name -> version, of all platforms."""
    text = (paths.GRADER / lock).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9.-]+)==([^ ;]+)", text, re.MULTILINE))


def comments() -> dict[str, tuple[str, str]]:
    """name -> (version, comment), as environment.yml pins them."""
    text = ENVIRONMENT.read_text(encoding="utf-8")
    found = re.findall(r"^ +- ([a-z0-9-]+)(?:\[\w+\])?==?([\w.]+)(?:  # (.+))?$", text, re.MULTILINE)
    return {name: (version, comment) for name, version, comment in found}


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_pins_every_file_and_names_no_host(lock):
    text = (paths.GRADER / lock).read_text(encoding="utf-8")
    assert "://" not in text
    assert "index" not in text.replace("nbconvert", "")
    head, *entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)
    assert head.startswith("# ")
    assert head.count("\n") == 1
    for entry in entries:
        first, *hashes = entry.rstrip("\n").split("\n")
        assert re.fullmatch(r"[a-z0-9.-]+==[\w.+]+( ; .+)? \\", first), first
        assert hashes, first
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes), first
        if ";" in first:
            Marker(first.split(";")[1].rstrip(" \\"))


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_fulfils_the_project(lock):
    asked = [*PROJECT["project"]["dependencies"], *LOCKS[lock]]
    locked = pins("lock.txt") | pins(lock)
    for text in asked:
        wanted = Requirement(text)
        assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), text


@pytest.mark.parametrize("cuda", ["lock-cuda12.txt", "lock-cuda13.txt"])
def test_no_package_is_in_two_locks_that_are_installed_together(cuda):
    together = [name for lock in ("lock.txt", "lock-tools.txt", cuda) for name in pins(lock)]
    assert len(together) == len(set(together))
    assert not any(name.startswith("tensorrt") for name in together)


def test_the_common_lock_is_what_the_course_itself_asks_for():
    """A learner waits for it: nothing of what only the site, a cluster, PostgreSQL or the tests need."""
    only_theirs = {canonicalize_name(Requirement(text).name) for text in TOOLS} - {"babel"}  # JupyterLab has it too
    assert not set(pins("lock.txt")) & only_theirs


def test_the_package_imports_only_what_it_declares():
    imported = set()
    for path in (paths.GRADER / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {name.partition(".")[0] for name in names}
    declared = {canonicalize_name(Requirement(text).name) for text in [*PROJECT["project"]["dependencies"], *EXTRAS["site"]]}
    owners = importlib.metadata.packages_distributions()
    gpu = {"cupy", "cupyx", "cuda", "cupti", "tensorrt", "tensorrt_bindings"}
    optional = {Requirement(text).name.removesuffix("-gpu") for text in [*EXTRAS["peers"], *EXTRAS["cluster"]]}
    for name in sorted(imported - set(sys.stdlib_module_names) - {"launchlab", "__main__"} - gpu - optional):
        assert declared & {canonicalize_name(owner) for owner in owners.get(name, [])}, f"{name} is not declared"


def test_environment_is_pinned_exactly_and_says_for_whom():
    conda = yaml.safe_load(ENVIRONMENT.read_text(encoding="utf-8"))["dependencies"]
    listed = [entry for entry in conda if isinstance(entry, str)] + conda[-1]["pip"]
    assert [entry for entry in listed if "=" not in entry] == ["-e ./grader"]
    assert len(comments()) == len(listed) - 1
    assert all(comment for _, comment in comments().values())


def test_environment_has_the_versions_of_the_locks():
    locked = pins("lock.txt") | pins("lock-cuda12.txt")
    outside = {name: version for name, (version, _) in comments().items() if name not in locked}
    assert set(outside) == {"python", "pip", "tensorrt-cu12", "onnx", "onnxscript", "onnxruntime", "rapidocr-onnxruntime", "aiohttp", "fastapi", "uvicorn"}
    for name, (version, _) in comments().items():
        assert version == locked.get(name, version), name


def test_every_pin_outside_the_locks_exists():
    """pip's own list of versions. What the locks pin exists: its hashes prove it. conda's two (python, pip) are not looked up."""
    outside = {name: version for name, (version, _) in comments().items() if name not in pins("lock.txt") | pins("lock-cuda12.txt")}
    for name in ("python", "pip"):
        del outside[name]
    with ThreadPoolExecutor(4) as pool:
        known = dict(zip(outside, pool.map(versions, outside), strict=True))
    if not any(known.values()):
        pytest.skip("no package registry can be reached from here")
    assert {name: version for name, version in outside.items() if version not in known[name]} == {}


def versions(name: str) -> set[str]:
    """The versions of a distribution that pip finds for environment.yml's Python; none where it reaches no registry."""
    python = comments()["python"][0].rpartition(".")[0]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", name, "--python-version", python, "--only-binary", ":none:"]
    said = subprocess.run([*command, "--retries", "1", "--timeout", "15"], capture_output=True, text=True, timeout=300).stdout
    found = re.search(r"^Available versions: (.+)$", said, re.MULTILINE)
    return set(found[1].split(", ")) if found else set()


def test_environment_names_the_chapters_of_the_manifest():
    needed: dict[str, list[str]] = {}
    for each in chapters():
        for package in each.needs.packages:
            needed.setdefault(package, []).append(each.name)
    for name, (_, comment) in comments().items():
        if name in needed:
            assert comment == ", ".join(needed.pop(name)), name
        elif name != "tensorrt-cu12":
            assert comment == EVERY, name
    assert needed == {}, "packages of the manifest that environment.yml lacks"


def test_environment_names_the_chapters_of_tensorrt():
    first, *others = re.findall(r"\d\d_\w+", comments()["tensorrt-cu12"][1])
    wanted = [each.name for each in chapters() if each.needs.tensorrt]
    assert [each.name for each in chapters() if each.name >= first and each.name not in others] == wanted


def test_commands_in_prose_name_the_pins():
    pinned = {name: version for name, (version, _) in comments().items()} | pins("lock-cuda12.txt")
    for path in (ENVIRONMENT, paths.ROOT / "README.md", paths.GRADER / "PLATFORMS.md"):
        for name, version in re.findall(r"([a-z][a-z0-9-]+)==([\w.]+\w)", path.read_text(encoding="utf-8")):
            assert pinned.get(name, pins("lock.txt").get(name)) == version, f"{path.name}: {name}"


def test_ci_runs_the_test_command_of_the_readme():
    command = "./grader/launch test"
    assert command in (paths.ROOT / "README.md").read_text(encoding="utf-8")
    assert Path(paths.ROOT, ".ci", "run").read_text(encoding="utf-8").rstrip().endswith("\n" + command)
