"""Environments: the table of GPUs and its page, what the doctor makes of machines that are described to it, and the container's file."""

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from launchlab import device, doctor, paths, platforms
from launchlab.surroundings import Surroundings, look

CARD = device.Gpu(name="NVIDIA H200", driver="580.1", cuda=(13, 0), compute_capability=(9, 0), memory=140 * 2**30)
DOCKER, WSL2 = Surroundings(container="Docker"), Surroundings(wsl=2)


def test_the_page_holds_the_tables_of_the_data_file():
    assert platforms.main(check=True) == 0, "grader/PLATFORMS.md: run `launchlab build`"
    page = platforms.PAGE.read_text(encoding="utf-8")
    for row in [*platforms.gpus().values(), *platforms.pythons().values()]:
        assert row.sources and all(title in page for title in row.sources)


def test_a_stale_page_is_told_and_mended(tmp_path, monkeypatch, capsys):
    text = platforms.PAGE.read_text(encoding="utf-8")
    page = tmp_path / "PLATFORMS.md"
    page.write_text(text.replace("10.13 及以上", "10.6 及以上"), encoding="utf-8")
    monkeypatch.setattr(platforms, "PAGE", page)
    assert platforms.main(check=True) == 1
    assert "不一致" in capsys.readouterr().out
    assert platforms.main(check=False) == 0
    assert page.read_text(encoding="utf-8") == text


def test_the_data_file_agrees_with_the_rest_of_the_project():
    pin = re.search(r"tensorrt-cu12==(\d+)\.(\d+)", (paths.ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert platforms.recorded() == (int(pin[1]), int(pin[2]))
    for path in (paths.GRADER / "receipts").glob("*.json"):
        versions = json.loads(path.read_text(encoding="utf-8"))["versions"]
        for name, version in versions.items():
            if name.startswith("tensorrt"):
                assert version.startswith("{}.{}.".format(*platforms.recorded())), path.name
    oldest, newest = doctor.TESTED_PYTHON
    assert [key for key in platforms.pythons() if oldest <= key <= newest] == [(3, minor) for minor in range(oldest[1], newest[1] + 1)]


@pytest.mark.parametrize(
    ("gpu", "python", "wanted"),
    [
        ((7, 5), (3, 12), "tensorrt-cu12==10.6.0.post1"),
        ((9, 0), (3, 11), "tensorrt-cu12==10.6.0.post1"),
        (None, (3, 13), "'tensorrt-cu12>=10.9,<12'"),
        ((12, 0), (3, 12), "'tensorrt-cu12>=10.8,<12'"),
        ((12, 0), (3, 13), "'tensorrt-cu12>=10.9,<12'"),
        ((10, 3), (3, 13), "'tensorrt-cu12>=10.13,<12'"),
        ((8, 6), (3, 14), "'tensorrt-cu12>=11.1,<12'"),
        ((13, 5), (3, 12), "tensorrt-cu12==10.6.0.post1"),
    ],
)
def test_what_pip_is_asked_for(gpu, python, wanted):
    assert doctor.tensorrt_requirement(gpu, python) == wanted


@pytest.mark.parametrize(
    ("capability", "version", "state", "words"),
    [
        ((9, 0), (10, 6), "ok", "认识这块 GPU"),
        ((12, 0), (10, 6), "missing", "Target GPU SM 120"),
        ((12, 0), (10, 8), "ok", "认识这块 GPU"),
        ((10, 3), (10, 12), "missing", "10.13"),
        ((10, 3), (10, 13), "ok", "认识这块 GPU"),
        ((13, 5), (11, 4), "warning", "支持表里没有"),
        ((7, 0), (10, 6), "missing", "10.5"),
        ((9, 0), (10, 5), "warning", "没有测试过"),
        ((9, 0), (12, 0), "warning", "没有测试过"),
        ((12, 0), None, "later", "没有安装"),
    ],
)
def test_tensorrt_and_the_gpu_must_know_each_other(capability, version, state, words):
    found = doctor.about_tensorrt(replace(CARD, compute_capability=capability), version)
    assert found.state == state
    assert words in f"{found.found} {found.meaning} {found.action}"
    assert found.action or state == "ok"


def test_a_chapter_lacks_the_tensorrt_that_its_gpu_needs():
    from launchlab.manifest import chapter

    machine = doctor.Machine(python=(3, 12), gpu=replace(CARD, compute_capability=(12, 0)), cupy=True, tensorrt=(10, 6), packages=frozenset())
    assert doctor.lacks(chapter(9), machine)[0].startswith("TensorRT 10.")
    assert doctor.lacks(chapter(3), machine) == []
    assert doctor.lacks(chapter(9), replace(machine, tensorrt=(11, 4))) == []


def picture(tmp_path, **files: str):
    """A file system of the given files, "/" written as "__"."""
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


UBUNTU = {"proc__sys__kernel__osrelease": "6.8.0-45-generic\n", "proc__1__cgroup": "0::/init.scope\n"}
WSL = {"proc__sys__kernel__osrelease": "5.15.153.1-microsoft-standard-WSL2\n"}
DRIVER = {"usr__lib__x86_64-linux-gnu__libcuda.so.1": ""}


@pytest.mark.parametrize(
    ("files", "environment", "wanted"),
    [
        ({}, {}, Surroundings()),
        (UBUNTU | DRIVER, {}, Surroundings()),
        (UBUNTU | {".dockerenv": ""}, {}, DOCKER),
        (UBUNTU | {"run__.containerenv": ""}, {}, Surroundings(container="Podman")),
        ({"proc__1__cgroup": "1:cpu:/kubepods/besteffort/pod1\n"}, {}, Surroundings(container="容器")),
        ({}, {"container": "lxc"}, Surroundings(container="容器")),
        (WSL, {}, WSL2),
        (WSL | DRIVER, {}, Surroundings(wsl=2, linux_driver=True)),
        (WSL | {".dockerenv": ""}, {}, Surroundings(wsl=2, container="Docker")),
        ({"proc__sys__kernel__osrelease": "4.4.0-19041-Microsoft\n"}, {}, Surroundings(wsl=1)),
        ({"proc__sys__kernel__osrelease": "6.1.0-microsoft\n", "dev__dxg": ""}, {}, WSL2),
        ({"proc__sys__user__max_user_namespaces": "0\n"}, {}, Surroundings(forbidden="user.max_user_namespaces")),
        ({"proc__sys__user__max_user_namespaces": "63000\n", "proc__sys__kernel__unprivileged_userns_clone": "0\n"}, {}, Surroundings(forbidden="kernel.unprivileged_userns_clone")),
        ({"proc__sys__kernel__apparmor_restrict_unprivileged_userns": "1\n"}, {}, Surroundings(forbidden="kernel.apparmor_restrict_unprivileged_userns")),
    ],
)
def test_where_it_runs_is_told_by_files(tmp_path, files, environment, wanted):
    assert look(picture(tmp_path, **files), environment) == wanted


@pytest.mark.parametrize(
    ("where", "state", "words"),
    [
        (Surroundings(), "ok", "Linux"),
        (DOCKER, "ok", "Docker"),
        (WSL2, "ok", "Windows 一侧的驱动"),
        (Surroundings(wsl=2, linux_driver=True), "warning", "apt purge"),
        (Surroundings(wsl=1), "warning", "--set-version"),
    ],
)
def test_the_system_is_named(where, state, words):
    found = doctor.about_system(where)
    assert found.state == state
    assert words in f"{found.found} {found.meaning} {found.action}"


@pytest.mark.parametrize(
    ("where", "installed", "works", "words"),
    [
        (Surroundings(), True, True, "没有网络"),
        (Surroundings(), False, False, "apt install bubblewrap"),
        (Surroundings(), True, False, "请让管理员"),
        (DOCKER, True, False, "seccomp=unconfined"),
        (Surroundings(forbidden="kernel.apparmor_restrict_unprivileged_userns"), True, False, "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
        (Surroundings(forbidden="kernel.unprivileged_userns_clone"), True, False, "sysctl kernel.unprivileged_userns_clone=1"),
        (Surroundings(forbidden="user.max_user_namespaces", container="Docker"), True, False, "宿主机的管理员"),
    ],
)
def test_a_sandbox_that_is_forbidden_is_explained(where, installed, works, words):
    found = doctor.about_sandbox(where, installed, works)
    assert found.state == ("ok" if works else "warning")
    assert words in f"{found.meaning} {found.action}"


@pytest.mark.parametrize(("where", "words"), [(Surroundings(), "525"), (DOCKER, "NVIDIA Container Toolkit"), (WSL2, "在 Windows 里安装")])
def test_a_missing_gpu_is_looked_for_where_it_should_be(where, words):
    found = doctor.about_gpu(where, None)
    assert found.state == "missing"
    assert words in found.action


@pytest.mark.parametrize(
    ("change", "state"),
    [({}, "ok"), ({"name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"}, "warning"), ({"compute_capability": (7, 0)}, "missing"), ({"cuda": (11, 8)}, "missing")],
)
def test_a_gpu_is_judged(change, state):
    assert doctor.about_gpu(Surroundings(), replace(CARD, **change)).state == state


# The container


CONTAINERFILE = paths.GRADER / "Containerfile"


def test_the_container_names_no_host_and_copies_what_there_is():
    text = CONTAINERFILE.read_text(encoding="utf-8")
    assert "://" not in text and not re.search(r"FROM \S*\.\S+/", text)
    copied = re.search(r"^COPY (.+) /opt/pins/$", text, re.MULTILINE)[1].split()
    assert all((paths.ROOT / name).is_file() for name in copied)
    assert {"grader/" + path.name for path in paths.GRADER.glob("lock*.txt")} | {"environment.yml"} == set(copied)


def test_the_container_adds_what_no_lock_pins(tmp_path):
    """Its own commands, run here on the real files: the rest of environment.yml, and the TensorRT that was asked for."""
    script = re.search(r"^RUN (sed .+?) \\\n    && /opt/launchlab/bin/pip", CONTAINERFILE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[1]
    for path in [paths.ROOT / "environment.yml", *paths.GRADER.glob("lock*.txt")]:
        shutil.copy(path, tmp_path)
    from test_environment import comments, pins

    locked = {name for path in paths.GRADER.glob("lock*.txt") for name in pins(path.name)}
    rest = {f"{name}=={version}" for name, (version, _) in comments().items() if name not in locked and name not in ("python", "pip")}
    for asked, wanted in (("", rest), ("none", {each for each in rest if not each.startswith("tensorrt")})):
        subprocess.run(["sh", "-euc", script], cwd=tmp_path, env={"TENSORRT": asked, "PATH": "/usr/bin:/bin"}, check=True)
        assert set((tmp_path / "others.txt").read_text(encoding="utf-8").split()) == wanted
    subprocess.run(["sh", "-euc", script], cwd=tmp_path, env={"TENSORRT": "tensorrt-cu12>=10.8,<12", "PATH": "/usr/bin:/bin"}, check=True)
    assert "tensorrt-cu12>=10.8,<12" in (tmp_path / "others.txt").read_text(encoding="utf-8").split()


def test_the_devcontainer_builds_that_file():
    path = paths.ROOT / ".devcontainer" / "devcontainer.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    assert (path.parent / settings["build"]["dockerfile"]).resolve() == CONTAINERFILE.resolve()
    assert (path.parent / settings["build"]["context"]).resolve() == paths.ROOT.resolve()
    text, page = CONTAINERFILE.read_text(encoding="utf-8"), platforms.PAGE.read_text(encoding="utf-8")
    assert settings["workspaceFolder"] == re.findall(r"^WORKDIR (\S+)", text, re.MULTILINE)[-1]
    assert settings["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"] == re.search(r"LAUNCHLAB_PYTHON=(\S+)", text)[1]
    assert f"useradd --create-home --uid 1000 {settings['remoteUser']}" in text
    for option in settings["runArgs"]:  # what the page and the doctor recommend
        assert option.replace("=", " ", 1) in page
        assert option.replace("=", " ", 1) in doctor.about_sandbox(DOCKER, installed=True, works=False).action
