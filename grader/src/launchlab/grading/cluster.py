"""Exams on a Ray cluster: one at a time on each GPU, or on a few CPUs each where the cluster has none.

The grader stays what it is: one process that takes submissions in and writes the gradebook, in
nbgrader's order. A thread of it runs ahead, hands submissions to workers as they become free and
keeps what comes back (`launchlab.grading.outcome`), so that a grader that was killed goes on from
there. A worker that is lost costs the one exam that it held, which another one holds anew.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ray
from nbformat import NotebookNode, writes
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from launchlab.exam import judge
from launchlab.grading import outcome
from launchlab.grading.outcome import Outcome
from launchlab.grading.worker import About, Task, Worker, pack
from launchlab.manifest import Chapter

HERE = "local"  # in place of an address: a cluster of this machine alone, for this run
PORT = 6379
REACH_SECONDS = 5.0
# What an exam holds meanwhile. Its three processes take turns, so that two CPUs are plenty.
GPU_SHARE = {"num_gpus": 1, "num_cpus": 1}
CPU_SHARE = {"num_cpus": 2}
ATTEMPTS = 3  # for one submission, or for a worker to begin
EXAM_SECONDS = 3600.0  # no exam takes so long: its own deadlines are far shorter
LOOK_SECONDS = 5.0  # between two looks at what the cluster has
PATIENCE_SECONDS = 60.0  # without any worker, before that is told
# Ray starts its workers at nice 15: beside anything else that runs there, exams would starve and miss their deadlines.
NICENESS = "RAY_worker_niceness"
QUIET = {"log_to_driver": False, "logging_level": logging.WARNING}


class ClusterError(Exception):
    """The cluster cannot be used, or can no longer; the text (Chinese) says why and what to do."""


class ExamFailed(Exception):
    """One submission's exam came to no end, for reasons that are not the cluster's."""


@dataclass
class _Job:
    """A submission on its way: its folder, and how many workers were lost over it."""

    student: str
    folder: Path
    nb: NotebookNode | None = None
    key: str = ""
    lost: int = 0


@dataclass
class _Member:
    """A worker that has told who it is, and the job that it has."""

    actor: ActorHandle
    about: About
    job: _Job | None = None
    since: float = 0.0


class Cluster:
    """A connection to the cluster at ``address`` ("HOST:PORT", or `HERE`), for exams of ``chapter``.

    ``log``: the grader's; ``no_sandbox``: take workers without a sandbox, too. Raises `ClusterError`.
    """

    def __init__(self, address: str, chapter: Chapter, log: logging.Logger, no_sandbox: bool):
        self._chapter, self._log, self._no_sandbox = chapter, log, no_sandbox
        self._course = outcome.course_key(chapter)
        self._jobs: deque[_Job] = deque()
        self._read: Callable[[Path], NotebookNode] | None = None
        self._open: set[str] = set()  # students with a job that is not done
        self._failed: dict[str, str] = {}
        self._broken: str | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._members: dict[ray.ObjectRef, _Member] = {}  # by the exam that each holds
        self._idle: list[_Member] = []
        self._joining: dict[ray.ObjectRef, ActorHandle] = {}
        self._failures = 0  # to begin, in a row
        self._slots, self._looked, self._last_seen = 0, 0.0, time.monotonic()
        self._done = self._total = 0
        _connect(address)
        self._gpus = any(node.get("GPU") for node in _nodes())
        self._thread = threading.Thread(target=self._work, name="launchlab-cluster", daemon=True)

    def begin(self, folders: Mapping[str, Path], read: Callable[[Path], NotebookNode]) -> None:
        """Begin to examine ``folders`` (by student), in their order. ``read``: makes the notebook to examine of a folder."""
        if found := outcome.waiting(self._chapter.name):
            self._log.warning("接着上次：%d 份提交已经考完，还没有登记。内容没有变的直接采用，不重考。", found)
        self._read = read
        self._jobs.extend(_Job(student, folder) for student, folder in folders.items())
        self._open.update(folders)
        self._total = len(folders)
        self._thread.start()

    def result(self, student: str, nb: NotebookNode, folder: Path) -> Outcome:
        """The outcome of the exam of ``nb``; waits for it. Raises `ExamFailed`.

        Without a cluster any more, no further submission can be graded: that ends the grader (SystemExit).
        """
        key = outcome.key_of(nb, self._chapter, folder)
        self._await(student)
        if (found := outcome.kept(student, self._chapter.name, key)) is None and student not in self._failed:
            # Not begun ahead, or nbgrader's own steps changed it: examined as it is now.
            with self._changed:
                self._jobs.appendleft(_Job(student, folder, nb))
                self._open.add(student)
            self._await(student)
            found = outcome.kept(student, self._chapter.name, key)
        if found is None:
            raise ExamFailed(self._failed.get(student, "没有结果"))
        return found

    def close(self) -> None:
        """End the connection, and all workers with it."""
        self._closed = True
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        ray.shutdown()

    def _await(self, student: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: student not in self._open or self._broken)
        if student in self._open:
            self._log.error("%s", self._broken)
            raise SystemExit(1)

    def _finish(self, job: _Job, failed: str | None = None) -> None:
        with self._changed:
            if failed is not None:
                self._failed[job.student] = failed
            self._open.discard(job.student)
            self._changed.notify_all()

    # The thread's own: nothing below is called from elsewhere.

    def _work(self) -> None:
        try:
            while not self._closed:
                self._hire()
                self._give()
                self._collect()
        except ClusterError as error:
            self._broken = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits must hear of it
            self._broken = f"与 Ray 集群的连接中断了（{type(error).__name__}: {error}）。已经考完的都在，再运行一次会接着评。"
        with self._changed:
            self._changed.notify_all()

    def _hire(self) -> None:
        """As many workers as there is work and room for: the cluster may grow or shrink meanwhile."""
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            self._slots, self._looked = self._count(), now
        present = len(self._members) + len(self._idle) + len(self._joining)
        for _ in range(min(self._slots, len(self._members) + len(self._jobs)) - present):
            actor = ray.remote(**GPU_SHARE if self._gpus else CPU_SHARE)(Worker).remote()
            self._joining[actor.about.remote(self._chapter.name)] = actor
        if self._members or self._idle or not self._jobs:
            self._last_seen = now
        elif now - self._last_seen > PATIENCE_SECONDS:
            self._last_seen = now
            self._log.warning("Ray 集群里没有空闲的%s，等着。用 ray status 可以看到谁占着。", "GPU" if self._gpus else "CPU（每份提交要两个）")

    def _count(self) -> int:
        nodes = _nodes()
        return int(sum(node.get("GPU", 0) if self._gpus else node.get("CPU", 0) // CPU_SHARE["num_cpus"] for node in nodes))

    def _give(self) -> None:
        while self._idle and self._jobs:
            with self._changed:
                job = self._jobs.popleft()
            try:
                task = self._prepare(job)
            except Exception as error:  # noqa: BLE001 - one submission must not end the class
                self._finish(job, f"{type(error).__name__}: {error}")
                continue
            if task is None:
                self._finish(job)
                continue
            member = self._idle.pop()
            member.job, member.since = job, time.monotonic()
            self._members[member.actor.examine.remote(task)] = member

    def _prepare(self, job: _Job) -> Task | None:
        """What a worker needs of a job; None if there is nothing to examine, or it has been."""
        if job.nb is None:
            job.nb = self._read(job.folder)
        if "refused" in job.nb.metadata.get("launchlab", {}):
            return None
        job.key = outcome.key_of(job.nb, self._chapter, job.folder)
        if outcome.kept(job.student, self._chapter.name, job.key):
            return None
        return Task(job.key, self._chapter.name, writes(job.nb), pack(job.folder))

    def _collect(self) -> None:
        waited = [*self._members, *self._joining]
        if not waited:
            time.sleep(0.2)
            return
        ready, _ = ray.wait(waited, num_returns=1, timeout=1.0)
        for each in ready:
            if each in self._joining:
                self._welcome(each, self._joining.pop(each))
            else:
                self._take(each, self._members.pop(each))
        for member in self._members.values():
            if time.monotonic() - member.since > EXAM_SECONDS:
                ray.kill(member.actor)  # and it is lost, with the next look

    def _welcome(self, answer: ray.ObjectRef, actor: ActorHandle) -> None:
        try:
            about: About = ray.get(answer)
        except RayError as error:
            self._failures += 1
            self._log.warning("一个评分进程没能启动（%s）", _first_line(error))
            if self._failures >= ATTEMPTS:
                raise ClusterError(f"评分进程启动不了：{_first_line(error)}。请确认集群的每台机器上都有同一个课程仓库，Ray 是用那里的环境启动的（grader/.venv/bin/ray start）。") from None
            return
        self._failures = 0
        if about.course != self._course:
            raise ClusterError(f"{about.name} 上的课程与这里的不是同一版本，评出来的分数不能放在一起。请在那台机器上更新到同一版本，再运行一次。")
        if self._gpus and about.gpu is None:
            raise ClusterError(f"Ray 说 {about.name} 有 GPU，但 CUDA 用不了它。请在那台机器上运行 ./grader/launch doctor。")
        if not (about.sandbox or self._no_sandbox):
            raise ClusterError(f"{about.name} 上没有可用的沙箱，提交里的代码会看到那台机器的文件和网络，还有整个集群。请在那里安装 bubblewrap；确实要这样评分，加 --no-sandbox。")
        self._log.info("%s（%s）加入评分%s", about.name, about.gpu or "没有 GPU", "" if about.sandbox else "，那里没有沙箱")
        self._idle.append(_Member(actor, about))

    def _take(self, answer: ray.ObjectRef, member: _Member) -> None:
        job, member.job = member.job, None
        try:
            found: Outcome = ray.get(answer)
        except RayTaskError as error:
            self._log.error("exam of %s failed on %s: %s", job.student, member.about.name, error)
            self._idle.append(member)
            self._finish(job, _first_line(error))
            return
        except RayError as error:  # it died, or its machine did, or what it answered is gone
            self._let_go(member, job, _first_line(error))
            # Those that have nothing to do would not be missed until they have: perhaps they are gone too.
            while self._idle:
                ray.kill(self._idle.pop().actor)
            if job.lost >= ATTEMPTS:
                self._finish(job, f"接连失去了 {job.lost} 个评分进程，都是在评这一份的时候")
            return
        if examiner_failed(found) and job.lost + 1 < ATTEMPTS:
            self._let_go(member, job, "那里的考官自己出了错")
            return
        outcome.keep(found, job.student)
        self._done += 1
        self._log.info("[%d/%d] %s：%.1f 秒，%s", self._done, self._total, job.student, time.monotonic() - member.since, member.about.name)
        job.nb = None
        self._idle.append(member)
        self._finish(job)

    def _let_go(self, member: _Member, job: _Job, why: str) -> None:
        """Do without a worker that can no longer be relied on, and have its exam held by another."""
        ray.kill(member.actor)  # lost to us, if perhaps not to itself
        job.lost += 1
        self._log.warning("%s 不能用了（%s），它正在评的 %s 换一个评分进程重评", member.about.name, why, job.student)
        if job.lost < ATTEMPTS:
            with self._changed:
                self._jobs.appendleft(job)


def examiner_failed(found: Outcome) -> bool:
    """Whether an exam says more of its examiner than of the submission: with its CUDA context broken, say, all that follow would go the same way."""
    stopped = {"check": "stopped", "verdict": judge.INCONCLUSIVE}
    return any(stopped in check["records"] for check in found.report["checks"])


def _connect(address: str) -> None:
    address = os.environ.get("RAY_ADDRESS") or HERE if address == HERE else address
    if address == HERE:
        _start_here()
        return
    host, _, port = address.rpartition(":") if ":" in address else (address, ":", str(PORT))
    address = f"{host}:{port}"
    try:
        # Ray itself would wait for minutes.
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ClusterError(f"连不上 Ray 集群 {address}（{error}）。请检查地址和防火墙，在它的主机上用 ray status 看它是否在运行；没有集群时，--cluster 后面不写地址，就只用这台机器。") from None
    try:
        ray.init(address=address, **QUIET)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - Ray raises whatever it likes
        raise ClusterError(f"进不了 Ray 集群 {address}（{_first_line(error)}）。运行评分的机器自己要在集群里（ray start --address={address}），Python、Ray 的版本和口令（~/.ray/auth_token）都要与集群相同。") from None


def _start_here() -> None:
    os.environ.setdefault(NICENESS, "0")
    for again in (True, False):
        try:
            ray.init(address=HERE, include_dashboard=False, **QUIET)
            return
        except (Exception, SystemExit) as error:  # noqa: BLE001
            ray.shutdown()
            if not again:  # a busy machine may miss Ray's own deadlines once, with nothing in memory yet
                raise ClusterError(f"这台机器上的 Ray 没能启动（{_first_line(error)}）。机器太忙时会这样，可以稍后再试；不用集群时去掉 --cluster。") from None


def _nodes() -> list[dict[str, float]]:
    """What each living machine of the cluster has, by Ray's names."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if isinstance(error, RayTaskError) else lines[0]}"[:300] if lines else type(error).__name__
