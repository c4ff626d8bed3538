"""Measuring a speed-up from outside: rounds of baseline, candidate and reference, interleaved.

The clock is the examiner's. Each of the three is asked for a few runs and for many; the
slope between the two is the time of one run, end to end with a device-wide sync. Counts
differ from round to round and are secret, and after every round the state that the
candidate advanced must equal, byte for byte, the state that the reference advanced by as
many runs: the time of work that was not done is never counted.

While the others are measured, the candidate's process is stopped: it can neither work ahead
nor slow them down. Its state is drawn and written when its own turn begins.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from launchlab.exam.judge import INCONCLUSIVE, PAIRS, TOO_FAST, speedup
from launchlab.exam.memory import Buffer
from launchlab.exam.remote import repeat, unit

SEGMENT_SECONDS = 0.012  # of the longer sample: some ten times the jitter of an ask
ATTEMPTS = 3
MOST_RUNS = 4000
WARM_RUNS = 3


@contextlib.contextmanager
def exclusive(gpu: str) -> Iterator[None]:
    """Hold the GPU's lock: one timed exam at a time on each, across processes and users."""
    name = "".join(c if c.isalnum() else "-" for c in gpu)
    path = Path(tempfile.gettempdir()) / f"launchlab-{name}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):
            os.chmod(path, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Lane:
    """One of the three sides of a measurement: what to run, and the state it advances."""

    def __init__(self, work: Any, state: Buffer | None):
        self.work, self.state = work, state
        self.party = unit(work)[0]
        self.bytes = b""

    def time(self, runs: int) -> float:
        """Seconds that ``runs`` runs took, asked from here and synchronised there.

        Where the state is staged its bytes come back inside the measured time: an answer
        given before the work was done would be an answer with the wrong bytes.
        """
        staged = self.state is not None and self.state.party is not None and self.state.block is None
        start = time.perf_counter()
        value = repeat(self.work, runs, read=self.state if staged else None)
        elapsed = time.perf_counter() - start
        if self.state is not None:
            # Read at once: memory of the examiner's own shows what had been done by now.
            self.bytes = (self.state.shaped(value) if staged else self.state.read()).tobytes()
        return elapsed

    def turn(self, start: np.ndarray | None, few: int, many: int) -> list[list[float]]:
        """A short and a long sample, ``[[few, seconds], [many, seconds]]``, from state ``start``."""
        self.party.resume()
        try:
            if self.state is not None:
                self.state.write(start)
            return [[few, self.time(few)], [many, self.time(many)]]
        finally:
            self.party.pause()

    def calibrate(self) -> int:
        """How many runs fill about `SEGMENT_SECONDS`."""
        self.time(WARM_RUNS)
        runs = 4
        while True:
            seconds = self.time(runs)
            if seconds > SEGMENT_SECONDS / 2 or runs >= MOST_RUNS:
                return max(4, min(MOST_RUNS, round(runs * SEGMENT_SECONDS / seconds)))
            runs *= 4


def measure(baseline: Any, candidate: Any, best: Any, state: tuple[Buffer, Buffer], at_least: float,
            secret: np.random.Generator, ceiling: float | None = TOO_FAST) -> dict[str, Any]:
    """Measure until the verdict is sure, at most `ATTEMPTS` times.

    Returns the record of a speed-up check: ``attempts`` (a list of lists of rounds; each round
    holds ``[[runs, seconds], [runs, seconds]]`` under "baseline", "candidate" and "best"),
    ``states_differ`` (rounds whose bytes differed), ``at_least``, ``ceiling``.
    """
    lanes = {"baseline": Lane(baseline, None), "candidate": Lane(candidate, state[0]), "best": Lane(best, state[1])}
    record: dict[str, Any] = {"check": "speedup", "at_least": at_least, "ceiling": ceiling, "states_differ": 0, "attempts": []}
    lanes["candidate"].time(WARM_RUNS)
    learner = lanes["candidate"].party
    learner.pause()
    try:
        own, common = lanes["baseline"].calibrate(), lanes["best"].calibrate()
        for _ in range(ATTEMPTS):
            rounds: list[dict] = []
            record["attempts"].append(rounds)
            for number in range(PAIRS):
                start = secret.integers(0, 256, state[0].nbytes, dtype=np.uint8).view(state[0].dtype)
                few = int(secret.integers(1, 4))
                many = few + common + int(secret.integers(0, 1 + common // 4))
                counts = {"baseline": few + own, "candidate": many, "best": many}
                order = ("baseline", "candidate", "best")
                rounds.append({name: lanes[name].turn(start, few, counts[name]) for name in (order if number % 2 == 0 else reversed(order))})
                if lanes["candidate"].bytes != lanes["best"].bytes:
                    record["states_differ"] += 1
                    return record
            if speedup(rounds, at_least, ceiling)["verdict"] != INCONCLUSIVE:
                break
    finally:
        learner.resume()
    return record
