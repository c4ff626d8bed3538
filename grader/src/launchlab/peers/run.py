"""`launchlab peers`: every peer with every model on this machine's GPU, into grader/reports/peers.json."""

import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import date
from importlib import metadata
from pathlib import Path
from statistics import median

from launchlab import paths
from launchlab.device import gpu
from launchlab.peers import MODELS, report
from launchlab.peers.buckets import BUCKETS
from launchlab.peers.child import PEERS
from launchlab.peers.process import Failed, Process
from launchlab.peers.reference import TOLERANCE
from launchlab.peers.stream import recorded

ROUNDS = 3  # of the whole stream, in steady state
BEFORE = 8  # requests before the clock in each round: the GPU has just served another process
PLANS, SLACK = 0.4, 10.0  # the share of the time that building may take; seconds kept back beside those for the rounds
LAST = "torch.compile"  # it takes the longest to get ready, so it starts when all others have
PACKAGES = (
    "torch",
    "triton",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnx",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cuda-bindings",
    "numpy",
)


def main(seconds: float, level: int, out: Path) -> int:
    """Run all peers within so many seconds; what did not fit is told in the report. Returns 1 if nothing could be measured.

    level: TensorRT's builder optimization level; 1 where a higher one does not come to an end in time.
    """
    if gpu() is None:
        print("✗ 没有运行：同类方案的比较需要 GPU，这台机器上没有可用的 GPU。")
        return 1
    with tempfile.TemporaryDirectory(prefix="launchlab-peers-") as folder:
        return _Comparison(seconds, level, out, Path(folder)).run()


class _Comparison:
    """One run. The report on disk is brought up to date after every step."""

    def __init__(self, seconds: float, level: int, out: Path, folder: Path):
        self._level = level
        self._began, self._seconds, self._out, self._folder = time.monotonic(), seconds, out, folder
        self._alive: dict[tuple[str, str], Process] = {}
        self._report = {
            "gpu": gpu().name,
            "driver": gpu().driver,
            "recorded_at": date.today().isoformat(),
            "versions": _versions(),
            "tolerance": TOLERANCE,
            "buckets": BUCKETS,
            "stream": {model: [[request.size, request.variant] for request in recorded(model)] for model in MODELS},
            "built": {},
            "peers": [],
        }

    def run(self) -> int:
        try:
            self._prepare()
            order = [peer for peer in reversed(PEERS) if peer != LAST]
            for model in MODELS:
                for peer in order:
                    self._start(peer, model, self._left() - self._rounds_take())
            for number, model in enumerate(MODELS):
                self._start(LAST, model, (self._left() - self._rounds_take()) / (len(MODELS) - number))
            for number in range(ROUNDS):
                self._say(f"第 {number + 1} 轮，{len(self._alive)} 个")
                for key in list(self._alive)[:: 1 if number % 2 else -1]:
                    self._round(*key)
        finally:
            for process in self._alive.values():
                process.end()
        self._say(f"已写入 {paths.short(self._out)}")
        print(report.table(self._report), *(report.verdict(self._report, model) for model in MODELS), sep="\n", flush=True)
        report.draw(self._report, self._out.with_suffix(".svg"))
        return 0 if any(each["state"] == "measured" for each in self._report["peers"]) else 1

    def _prepare(self) -> None:
        """The right answers and TensorRT's plans, at the same time: one needs the CPU, the other the GPU."""
        limit = self._left() * PLANS
        self._say(f"计算标准答案，构建 TensorRT 引擎（最多 {limit:.0f} 秒）")
        command = [sys.executable, "-m"]
        right = subprocess.Popen([*command, "launchlab.peers.reference", str(self._folder)])
        plans = subprocess.Popen([*command, "launchlab.peers.plans", str(self._folder), f"{limit:.0f}", str(self._level)])
        try:
            if right.wait(limit + 10):
                raise RuntimeError("没有标准答案，比较无从谈起：原因见上面的输出。")
            with suppress(subprocess.TimeoutExpired):  # a plan that is done is on disk
                plans.wait(max(1.0, self._began + limit + 10 - time.monotonic()))
        finally:
            for process in (right, plans):
                process.kill()
                process.wait()
        with suppress(FileNotFoundError):
            self._report["built"] = json.loads((self._folder / "built.json").read_text(encoding="utf-8"))
        self._write()

    def _start(self, peer: str, model: str, seconds: float) -> None:
        """Start a peer and have it serve the stream as a service does that has just come up."""
        entry = {"peer": peer, "model": model, "state": "not run"}
        self._report["peers"].append(entry)
        if seconds < 5:
            self._lost(entry, None, Failed("no time was left"))
            return
        process, began = Process(peer, model, self._folder), time.monotonic()
        try:
            process.answer(seconds)
            entry["start_s"] = round(time.monotonic() - began, 2)
            process.ask(0)
            found = process.answer(max(1.0, began + seconds - time.monotonic()))
        except Failed as error:
            self._lost(entry, process, error)
            return
        self._alive[peer, model] = process
        entry |= {"state": "measured", "fresh": found["us"], "steady": [], "wrong": found["wrong"], "worst": found["worst"]}
        self._note(entry, found)
        self._say(
            f"{model} {peer}：启动 {entry['start_s']:.1f} 秒，第一个请求 {found['us'][0] / 1000:.1f} ms，错 {found['wrong']} 个"
        )
        self._write()

    def _round(self, peer: str, model: str) -> None:
        """Have a peer serve the stream once more."""
        entry = next(each for each in self._report["peers"] if (each["peer"], each["model"]) == (peer, model))
        process = self._alive[peer, model]
        process.ask(BEFORE)
        try:
            found = process.answer(max(2.0, self._left()))
        except Failed as error:
            del self._alive[peer, model]
            self._lost(entry, process, error)
            return
        entry["steady"].append(found["us"])
        entry["wrong"] += found["wrong"]
        worst = [each for each in (entry["worst"], found["worst"]) if each is not None]
        entry["worst"] = max(worst) if worst else None
        self._note(entry, found)
        self._write()

    @staticmethod
    def _note(entry: dict, found: dict) -> None:
        entry |= {name: found[name] for name in ("memory_mib", "facts", "read_otherwise") if name in found}

    def _lost(self, entry: dict, process: Process | None, error: Failed) -> None:
        """Write down why a peer is not in the comparison. What it measured before it failed stays."""
        entry |= {"state": "not run" if error.absent or "fresh" not in entry else "failed", "why": str(error)}
        self._say(f"{entry['model']} {entry['peer']}：没有结果。{error}")
        if process:
            process.end()
            if not error.absent:
                print("\n".join(process.log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]), flush=True)
        self._write()

    def _rounds_take(self) -> float:
        """Seconds that the rounds of those who have served the stream will take, by their median request."""
        fresh = [each["fresh"] for each in self._report["peers"] if "fresh" in each]
        return ROUNDS * sum(median(us) * len(us) for us in fresh) / 1e6 + SLACK

    def _left(self) -> float:
        return self._seconds - (time.monotonic() - self._began)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def _write(self) -> None:
        report.write(self._report, self._out)


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
