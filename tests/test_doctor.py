"""What the doctor says of this machine, and of machines that are described to it."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from launchlab import device, doctor
from launchlab.manifest import chapter, chapters

CARD = device.Gpu(name="a 6 GB card", driver="535.1", cuda=(12, 2), compute_capability=(7, 5), memory=6_000 * 2**20)
READY = doctor.Machine(
    python=(3, 12),
    gpu=CARD,
    cupy=True,
    tensorrt=(10, 6),
    packages=frozenset(package for each in chapters() for package in each.needs.packages),
)


def report(**extra: str) -> dict:
    command = [sys.executable, "-m", "launchlab", "doctor", "--json"]
    ended = subprocess.run(command, env={**os.environ, **extra}, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def here() -> dict:
    return report()


def test_every_line_has_a_state_and_a_meaning(here):
    items = {line["item"]: line for line in here["machine"]}
    assert {"系统", "Python", "课程的包", "中文字体", "磁盘", "课程目录", "沙箱", "GPU", "CuPy", "CUDA 绑定", "TensorRT"} == set(items)
    for line in items.values():
        assert line["state"] in ("ok", "missing", "warning", "later")
        assert line["found"]
        assert line["meaning"]
        if line["state"] in ("missing", "warning"):
            assert line["action"]
    assert items["Python"]["found"] == "{}.{}.{}".format(*sys.version_info)
    assert "nbgrader 0.9.6" in items["课程的包"]["found"]


def test_it_tells_whether_there_is_a_gpu(here):
    gpu = next(line for line in here["machine"] if line["item"] == "GPU")
    found = device.gpu()
    assert [each["name"] for each in here["chapters"]] == [each.name for each in chapters()]
    if found is None:
        assert gpu["state"] == "missing"
        assert all(each["lacks"] == ["GPU"] for each in here["chapters"])
    else:
        assert found.name in gpu["found"]
        assert found.driver in gpu["found"]
        assert all("GPU" not in each["lacks"] for each in here["chapters"])


def test_it_is_read_by_people_too():
    command = [sys.executable, "-m", "launchlab", "doctor"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, env={**os.environ, "COLUMNS": "80"})
    assert ended.returncode == 0, ended.stderr
    assert "03_cuda_graph_concepts" in ended.stdout
    for word in ("Python", "沙箱", "GPU", "TensorRT"):
        assert word in ended.stdout


def test_a_machine_without_bubblewrap_is_told_of_it(here, tmp_path):
    sandbox = next(line for line in report(PATH=str(tmp_path))["machine"] if line["item"] == "沙箱")
    assert sandbox["state"] == "warning"
    assert "apt install bubblewrap" in sandbox["action"]
    if shutil.which("bwrap"):
        assert sandbox != next(line for line in here["machine"] if line["item"] == "沙箱")


def test_a_complete_machine_lacks_nothing_before_the_newest_cuda_is_asked():
    assert [each.name for each in chapters() if doctor.lacks(each, READY)] == ["23_shape_updates"]
    assert doctor.lacks(chapter(23), READY) == ["支持 CUDA 12.8 的驱动"]
    assert doctor.lacks(chapter(23), replace(READY, gpu=replace(CARD, cuda=(13, 0)))) == []


@pytest.mark.parametrize(
    ("number", "change", "missing"),
    [
        (3, {"gpu": None}, ["GPU"]),
        (3, {"gpu": replace(CARD, compute_capability=(7, 0))}, ["计算能力 7.5"]),
        (3, {"gpu": replace(CARD, cuda=(11, 8))}, ["支持 CUDA 12.0 的驱动"]),
        (3, {"cupy": False}, ["CuPy"]),
        (3, {"tensorrt": None, "packages": frozenset()}, []),
        (9, {"tensorrt": None}, ["TensorRT 10.6"]),
        (9, {"tensorrt": (10, 5)}, ["TensorRT 10.6"]),
        (9, {"tensorrt": (11, 4)}, []),
        (9, {"python": (3, 13)}, ["TensorRT 10.9"]),
        (9, {"python": (3, 13), "tensorrt": (10, 9)}, []),
        (10, {"packages": frozenset({"onnx"})}, ["onnxscript", "onnxruntime", "rapidocr-onnxruntime"]),
        (24, {"gpu": replace(CARD, memory=4 * 2**30)}, ["6 GB 显存"]),
    ],
)
def test_what_a_chapter_lacks(number, change, missing):
    assert doctor.lacks(chapter(number), replace(READY, **change)) == missing
