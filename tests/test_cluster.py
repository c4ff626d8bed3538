"""A class graded on a real Ray cluster without GPUs: a grader and a worker killed on the way, and what is said when it cannot be."""

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
from course_copy import NAME, POINTS, Course

from launchlab import manifest
from launchlab.exam import family
from launchlab.exam.examine import Master, examine
from launchlab.grading import outcome
from launchlab.grading.worker import About, pack, unpack

pytest.importorskip("ray", reason="not run: Ray is not installed")
from launchlab.grading import cluster as cluster_module

ALL, NOTHING, OPEN = dict(POINTS), dict.fromkeys(POINTS, 0.0), dict.fromkeys(POINTS)
EXPECTED = {"a": ALL, "b": ALL, "c": ALL | {"test_advance": 0.0}, "d": NOTHING, "e": OPEN}
TRIES = 3  # Ray gives its own processes 15 seconds to start, which a busy machine may miss


def wait_for(condition, seconds: float):
    """The first true value of ``condition()``."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


class Cluster:
    """One machine of a Ray cluster: four CPUs, so that there are two workers, and no GPU."""

    def __init__(self, course: Course):
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets lie in there
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        (self.folder / "token").write_text("0" * 64)
        # jsonschema, which each of Ray's processes loads, would compile a grammar for two seconds.
        (self.folder / "rfc3987_syntax.py").write_text("raise ImportError")
        self.environment = course.environment | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"), "RAY_ADDRESS": "", cluster_module.NICENESS: "0"}
        self.environment["PYTHONPATH"] += os.pathsep + str(self.folder)

    def start(self) -> None:
        command = [
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={self.address.partition(':')[2]}",
            "--num-cpus=4", "--num-gpus=0", "--include-dashboard=false", "--include-log-monitor=false", "--disable-usage-stats",
            "--object-store-memory=100000000", f"--temp-dir={self.folder}",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in self.process.stdout:
            if "--block" in line:  # what it says once all runs
                return
        raise RuntimeError("Ray did not start")

    def stop(self) -> None:
        """End it, and whatever of it is left."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=20)
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Course:
    course = Course.make(tmp_path_factory.mktemp("cluster") / "c")
    wrong = course.honest
    next(cell for cell in wrong.cells if cell.id == "solution-advance").source = "def advance(state, rounds):\n    pass"
    for name, notebook in {"a": course.honest, "b": course.honest, "c": wrong, "d": course.release, "e": b'{"cells": ['}.items():
        course.hand_in(name, notebook, {"whose.txt": name})
    return course


@pytest.fixture(scope="module")
def cluster(course) -> Iterator[Cluster]:
    for attempt in range(TRIES):
        cluster = Cluster(course)
        try:
            cluster.start()
            break
        except RuntimeError:
            cluster.stop()
            if attempt == TRIES - 1:
                raise
    yield cluster
    cluster.stop()


def grade(course: Course, cluster: Cluster, *options: str, **environment: str) -> subprocess.Popen:
    """``launchlab grade``, started; all its output in one pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "launchlab", "grade", NAME, *options], env=cluster.environment | environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def examiner_of(course: Course, student: str) -> int | None:
    """The process that examines a student's submission now; one that was killed leaves its folder, and itself until Ray takes note of it."""
    for file in course.scratch.glob("ll-*-*/work/whose.txt"):
        with contextlib.suppress(OSError):
            examiner = int(file.parts[-3].split("-")[1])
            if file.read_text() == student and Path("/proc", str(examiner), "exe").exists():  # the dead have none
                return examiner
    return None


def stopped_at(course: Course, student: str) -> int | None:
    """The process that examines a student's submission, stopped in the midst of that: it is not through with it, and will not be."""
    if (examiner := examiner_of(course, student)) is None:
        return None
    os.kill(examiner, signal.SIGSTOP)
    wait_for(lambda: family.is_stopped(examiner), 10)
    if examiner_of(course, student) == examiner:
        return examiner
    os.kill(examiner, signal.SIGCONT)
    return None


def kernels(course: Course) -> list[str]:
    return [command for command in course.survivors() if "ipykernel" in command]


def test_killed_graders_and_workers_cost_nobody_and_nobody_is_examined_twice(course, cluster):
    exams = course.build / "exams"
    grader = grade(course, cluster, "--cluster", cluster.address)
    held_up = wait_for(lambda: stopped_at(course, "a"), 120)
    wait_for(lambda: (exams / "b" / f"{NAME}.json").exists() and (exams / "c" / f"{NAME}.json").exists(), 120)
    assert not (course.build / "reports").exists()  # control: nobody is graded before a is
    os.killpg(grader.pid, signal.SIGKILL)
    os.kill(held_up, signal.SIGKILL)
    grader.communicate()
    wait_for(lambda: kernels(course) == [], 30)
    kept = {student: json.loads((exams / student / f"{NAME}.json").read_text(encoding="utf-8")) for student in "bc"}
    assert not (exams / "a").exists()

    grader = grade(course, cluster, "--cluster", cluster.address)
    worker = wait_for(lambda: stopped_at(course, "a"), 120)
    os.kill(worker, signal.SIGKILL)
    text, _ = grader.communicate(timeout=240)
    assert grader.returncode == 0, text
    assert course.marks() == EXPECTED, text
    assert f":{worker} 不能用了" in text and "正在评的 a 换一个评分进程重评" in text, text
    waited = int(text.split("接着上次：")[1].split(" ")[0])
    assert waited >= 2
    held = sorted(line.split("] ")[2].split("：")[0] for line in text.splitlines() if " 秒，" in line)
    assert held == sorted({"a", "d"} if waited == 2 else {"a"})  # e is no notebook
    for student, found in kept.items():
        report = course.report(student)
        assert list(report["checks"].values()) == found["report"]["checks"] and report["seconds"] == found["report"]["seconds"]
    assert list(exams.glob("*/*")) == []
    wait_for(lambda: kernels(course) == [], 30)


def test_what_is_graded_stays_and_force_examines_anew(course, cluster):
    if course.marks() != EXPECTED:
        pytest.skip("the test before this one failed")
    before = course.report("b")
    grader = grade(course, cluster, "--cluster", cluster.address, "--student", "b")
    text, _ = grader.communicate(timeout=120)
    assert grader.returncode == 0 and " 秒，" not in text and course.report("b") == before, text
    grader = grade(course, cluster, "--cluster", cluster.address, "--student", "b", "--force")
    text, _ = grader.communicate(timeout=120)
    assert grader.returncode == 0 and text.count(" 秒，") == 1 and course.report("b")["seconds"] != before["seconds"], text
    assert course.marks() == EXPECTED, text


def test_another_version_of_the_course_is_not_graded_with(course, cluster, tmp_path):
    other = Course(tmp_path / "other")
    shutil.copytree(course.root, other.root, ignore=shutil.ignore_patterns("build", "t"))
    other.hand_in("a", other.honest)
    other.source.with_name("samples.csv").write_text("kernels,us\n1,1\n", encoding="utf-8")
    grader = grade(course, cluster, "--cluster", cluster.address, LAUNCHLAB_ROOT=str(other.root))
    text, _ = grader.communicate(timeout=120)
    assert grader.returncode == 1 and "不是同一版本" in text, text
    assert not (other.build / "reports").exists()


def test_a_cluster_out_of_reach(course, cluster):
    grader = grade(course, cluster, "--cluster", "127.0.0.1:1")
    text, _ = grader.communicate(timeout=60)
    assert grader.returncode == 1 and "连不上 Ray 集群 127.0.0.1:1" in text and "Traceback" not in text, text


def test_without_ray(course, cluster, tmp_path):
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(name='ray')")
    grader = grade(course, cluster, "--cluster", PYTHONPATH=f"{tmp_path}{os.pathsep}{cluster.environment['PYTHONPATH']}")
    text, _ = grader.communicate(timeout=60)
    assert grader.returncode == 1 and "没有 Ray" in text and "doctor --tools" in text and "Traceback" not in text, text


def test_an_outcome_is_what_the_exam_left(mini, tmp_path):
    nb = nbformat.read(mini.solution, as_version=4)
    examined, again = deepcopy(nb), deepcopy(nb)
    try:
        report = examine(examined, mini)
    finally:
        Master.dismiss()
    key = outcome.key_of(nb, mini, None)
    left = outcome.Outcome.of(key, report, examined)
    assert left.write_into(again) == report
    assert [(cell.source, cell.get("outputs")) for cell in again.cells] == [(cell.source, cell.get("outputs")) for cell in examined.cells]
    assert [cell.metadata.get("launchlab") for cell in again.cells if "nbgrader" in cell.metadata] == [cell.metadata.get("launchlab") for cell in examined.cells if "nbgrader" in cell.metadata]


@pytest.mark.parametrize(
    ("about", "gpus", "no_sandbox", "says"),
    [
        (About("m:1", "here", None, False), False, False, "没有可用的沙箱"),
        (About("m:1", "here", None, False), False, True, None),
        (About("m:1", "here", None, True), True, False, "CUDA 用不了它"),
        (About("m:1", "there", "a GPU", True), True, False, "不是同一版本"),
        (About("m:1", "here", "a GPU", True), True, False, None),
    ],
)
def test_a_worker_is_taken_only_as_it_should_be(monkeypatch, about, gpus, no_sandbox, says):
    one = object.__new__(cluster_module.Cluster)  # not connected: only what a worker tells of itself is looked at
    one._course, one._gpus, one._no_sandbox, one._failures, one._idle, one._log = "here", gpus, no_sandbox, 0, [], logging.getLogger("cluster")
    monkeypatch.setattr(cluster_module.ray, "get", lambda answer: answer)
    if says:
        with pytest.raises(cluster_module.ClusterError, match=says):
            one._welcome(about, None)
    else:
        one._welcome(about, None)
    assert [member.about for member in one._idle] == ([] if says else [about])


def test_an_examiner_that_fails_is_told_from_a_submission_that_does(mini):
    """Of the one no further exam is to be believed."""
    honest, crashing = (nbformat.read(mini.solution, as_version=4) for _ in range(2))
    cell = next(cell for cell in crashing.cells if cell.id == "solution-advance")
    cell.source = cell.source.replace("    ### END SOLUTION", "    import os; os._exit(1)\n    ### END SOLUTION")
    for nb, solution, expected in ((crashing, honest, ("crashed", False)), (honest, crashing, ("inconclusive", True))):
        nbformat.write(solution, mini.solution)
        try:
            found = outcome.Outcome.of("", examine(nb, mini), nb)
        finally:
            Master.dismiss()
        assert (found.report["checks"][1]["verdict"], cluster_module.examiner_failed(found)) == expected


def test_a_key_stands_for_all_that_an_exam_depends_on(mini, tmp_path):
    nb = nbformat.read(mini.solution, as_version=4)
    folder = tmp_path / "files"
    folder.mkdir()
    keys = [outcome.key_of(nb, mini, folder)]
    test = next(cell for cell in nb.cells if cell.id == "test-advance")
    test.source, test.outputs = "whatever stands here", []
    assert outcome.key_of(nb, mini, folder) == keys[0]
    (folder / "own.py").write_text("x = 1")
    keys.append(outcome.key_of(nb, mini, folder))
    next(cell for cell in nb.cells if cell.id == "solution-advance").source += "\n"
    keys.append(outcome.key_of(nb, mini, folder))
    mini.source.with_name("samples.csv").write_text("another\n")
    keys.append(outcome.key_of(nb, manifest.chapter(mini.name), folder))
    mini.solution.write_text(mini.solution.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    keys.append(outcome.key_of(nb, manifest.chapter(mini.name), folder))
    assert len(set(keys)) == len(keys)


def test_files_travel_and_stay_in_their_folder(tmp_path):
    folder, there = tmp_path / "from", tmp_path / "to"
    (folder / "deep").mkdir(parents=True)
    there.mkdir()
    (folder / "deep" / "数据.bin").write_bytes(bytes(range(256)))
    (folder / "x.ipynb").write_text("{}")
    (folder / "link").symlink_to("/etc/passwd")
    unpack(pack(folder), there)
    assert [path.relative_to(there).as_posix() for path in sorted(there.rglob("*"))] == ["deep", "deep/数据.bin"]
    assert (there / "deep" / "数据.bin").read_bytes() == bytes(range(256))
