"""Measuring a speed-up from outside: rounds of baseline, candidate and reference, interleaved.

The clock is the examiner's. A sample is a number of runs and the seconds from the writing of
a fresh start state to the reading of the state that the runs left. What asking costs is taken
away by the difference between a short and a long sample of the trusted sides. The candidate
gives one sample a round, and is proved in each: its bytes must equal those that the reference
made of the same start by as many runs. The time of work that was not done is never counted.

While the others are measured, the candidate's process is stopped: it can neither work ahead
nor slow them down. Work that it left on the GPU shows afterwards, when its process has ended
and the trusted sides are measured once more.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from launchlab.exam.compare import near
from launchlab.exam.judge import INCONCLUSIVE, PAIRS, TOO_FAST, speedup
from launchlab.exam.memory import Buffer
from launchlab.exam.remote import repeat, unit

SEGMENT_SECONDS = 0.012  # of a long sample: some ten times the jitter of an ask
ATTEMPTS = 3
LEAST_RUNS, MOST_RUNS = 8, 4000  # of a long sample, beyond those of the short one
WARM_RUNS = 3
QUIET_SAMPLES = 7
LOCK_SECONDS = 600.0


class GpuBusy(Exception):
    """Another timed exam kept the GPU for too long."""


@contextlib.contextmanager
def exclusive(gpu: str) -> Iterator[None]:
    """Hold the lock of the GPU that ``gpu`` (its UUID) tells: one timed exam at a time on it, across processes and users."""
    import fcntl  # not on Windows, where a chapter can still be read

    name = "".join(c if c.isalnum() else "-" for c in gpu)
    path = Path(tempfile.gettempdir()) / f"launchlab-{name}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        os.fchmod(descriptor, 0o666)  # whatever the umask: graders of several users share it
    try:
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until:
                    raise GpuBusy from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


class Lane:
    """One of the three sides of a measurement: what to run, and the state it advances (None: not looked at)."""

    def __init__(self, work: Any, state: Buffer | None):
        self.work, self.state = work, state
        self.party = unit(work)[0]
        self.bytes = b""

    def sample(self, runs: int, start: np.ndarray | None = None) -> list[float]:
        """``[runs, seconds]``: write ``start``, run ``runs`` times, synchronise, read. The bytes read stay in ``bytes``.

        Writing and reading lie within the measured time: nobody can begin early, and an
        answer given before the work was done would be an answer with the wrong bytes.
        """
        state, staged = self.state, False
        if state is not None and start is not None:
            state.bind(self.party)
            staged = state.block is None
        begin = time.perf_counter()
        if state is None or start is None:
            repeat(self.work, runs)
        elif staged:
            self.bytes = state.shaped(repeat(self.work, runs, state=state, start=start)).tobytes()
        else:
            state.write(start, at_rest=True)  # `repeat` waits: each sample ends, and so begins, at rest
            repeat(self.work, runs)
            self.bytes = state.read(at_rest=True).tobytes()
        return [runs, time.perf_counter() - begin]

    def calibrate(self) -> int:
        """How many runs fill about `SEGMENT_SECONDS`, beside what asking for them costs: milliseconds, on a busy machine."""
        self.sample(WARM_RUNS)
        asking = min(self.sample(0)[1] for _ in range(3))
        runs = 4
        while True:
            seconds = self.sample(runs)[1] - asking
            if SEGMENT_SECONDS / 2 < seconds < 10 * SEGMENT_SECONDS:  # is it the work, or was it the asking this time?
                seconds = min(seconds, *(self.sample(runs)[1] - asking for _ in range(2)))
            if seconds > SEGMENT_SECONDS / 2 or runs >= MOST_RUNS:
                return max(LEAST_RUNS, min(MOST_RUNS, round(runs * SEGMENT_SECONDS / max(seconds, 1e-9))))
            runs *= 4


def same(candidate: bytes, best: bytes, dtype: np.dtype, tolerance: tuple[float, float]) -> bool:
    """Whether two states are the same bytes or, where a tolerance is given, values within it."""
    if candidate == best or not any(tolerance):
        return candidate == best
    return bool(np.all(near(np.frombuffer(candidate, dtype), np.frombuffer(best, dtype), *tolerance)))


def measure(baseline: Any, candidate: Any, best: Any, state: tuple[Buffer, Buffer], at_least: float,
            secret: np.random.Generator, ceiling: float | None = TOO_FAST,
            draw: Callable[[], np.ndarray] | None = None, tolerance: tuple[float, float] = (0.0, 0.0)) -> dict[str, Any]:
    """Measure until the verdict is sure, at most `ATTEMPTS` times.

    Returns the record of a speed-up check: ``attempts`` (a list of lists of rounds; a round
    holds two samples ``[runs, seconds]`` under "baseline" and "best" each, and one under
    "candidate"), ``quiet`` (still empty: see `measure_quiet`), ``states_differ`` (rounds whose
    states differed by more than ``tolerance``, relative and absolute), ``at_least``, ``ceiling``.
    ``draw`` makes a round's start state; without it the bytes are random.
    """
    lanes = {"baseline": Lane(baseline, None), "candidate": Lane(candidate, state[0]), "best": Lane(best, state[1])}
    record: dict[str, Any] = {"check": "speedup", "at_least": at_least, "ceiling": ceiling, "tolerance": tolerance, "states_differ": 0, "attempts": [], "quiet": []}
    lanes["candidate"].sample(WARM_RUNS)
    learner = lanes["candidate"].party
    learner.pause()
    try:
        own, common = lanes["baseline"].calibrate(), lanes["best"].calibrate()
        for _ in range(ATTEMPTS):
            rounds: list[dict] = []
            record["attempts"].append(rounds)
            for number in range(PAIRS):
                start = draw() if draw else secret.integers(0, 256, state[0].nbytes, dtype=np.uint8).view(state[0].dtype)
                start = np.ascontiguousarray(start, state[0].dtype).reshape(state[0].shape)
                few = int(secret.integers(1, 4))
                many = few + common + int(secret.integers(0, 1 + common // 4))
                order = ("baseline", "candidate", "best")
                measured = {}
                for name in order if number % 2 == 0 else reversed(order):
                    if name == "baseline":
                        measured[name] = [lanes[name].sample(few), lanes[name].sample(few + own)]
                    elif name == "best":
                        measured[name] = [lanes[name].sample(few, start), lanes[name].sample(many, start)]
                    else:
                        learner.resume()
                        lanes[name].sample(0)  # awake, and no clock running yet
                        measured[name] = lanes[name].sample(many, start)
                        learner.pause()
                rounds.append(measured)
                if not same(lanes["candidate"].bytes, lanes["best"].bytes, state[0].dtype, tolerance):
                    record["states_differ"] += 1
                    return record
            if speedup(rounds, at_least, ceiling)["verdict"] != INCONCLUSIVE:
                break
    finally:
        learner.resume()
    return record


def measure_quiet(baseline: Any, best: Any, rounds: list[dict]) -> list[dict]:
    """The trusted sides once more, by the run counts of the last of ``rounds``, with nobody else at work.

    Returns rounds of two samples under "baseline" and "best" each.
    """
    sides = {"baseline": Lane(baseline, None), "best": Lane(best, None)}
    runs = {name: [sample[0] for sample in rounds[-1][name]] for name in sides}
    return [{name: [side.sample(count) for count in runs[name]] for name, side in sides.items()} for _ in range(QUIET_SAMPLES)]
