"""From raw samples to a verdict: pure functions, so that a verdict can be recomputed anywhere.

A speed-up is judged on ratios of pairs measured close together, by order statistics. With 21
pairs the 5th smallest ratio lies below the median of all possible pairs, and the 5th largest
above it, each with probability 1 - P(Binomial(21, 1/2) <= 4) = 99.6 % (the sign test). No
mean, no variance, no assumption about the noise but that pairs are alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

PAIRS = 21
RANK = 5  # the RANK-th smallest and largest of PAIRS bound the median
FLOOR = 1.2  # no bar is lower: less cannot be told from noise on a busy machine
LEAST_GAIN = 1.5  # of the reference itself: a bar of 1.2 must lie clearly below it
SHARE = 0.5  # of the reference's own gain in the same exam
TOO_FAST = 2.0  # times the reference's own speed: the work asked for cannot have been done

PASSED, FAILED, INCONCLUSIVE = "passed", "failed", "inconclusive"
CRASHED, TIMED_OUT, NEEDS_GPU, REFUSED = "crashed", "timed out", "needs a GPU", "refused"
OPEN = (INCONCLUSIVE, NEEDS_GPU, REFUSED)  # left to a person: no score, never 0


def slope(samples: list[list[float]]) -> float:
    """Seconds per run from two samples ``[[runs, seconds], [runs, seconds]]``; NaN if not positive.

    The difference of the two cancels what asking and synchronising cost.
    """
    (few, short), (many, long) = samples
    value = (long - short) / (many - few)
    return value if value > 0 else math.nan


def cost(sample: list[float], trusted: list[list[float]]) -> float:
    """Seconds per run of an untrusted party, from one sample ``[runs, seconds]``.

    A second, shorter sample of its own could be stretched on purpose, to make a slope look
    small. What asking costs is taken from the ``trusted`` party's two samples instead; where
    that leaves nothing, asking is counted in: never less than a run took.
    """
    (few, short), _ = trusted
    runs, seconds = sample
    asking = short - few * slope(trusted)
    value = (seconds - max(0.0, asking)) / runs if not math.isnan(asking) else math.nan
    return value if value > 0 else seconds / runs


def bounds(ratios: list[float]) -> tuple[float, float]:
    """Lower and upper bound of the median ratio. A NaN counts for the worst on either side."""
    low = sorted(0.0 if math.isnan(r) else r for r in ratios)
    high = sorted(math.inf if math.isnan(r) else r for r in ratios)
    rank = max(1, RANK * len(ratios) // PAIRS)
    return low[rank - 1], high[-rank]


def ratios(rounds: list[dict], over: str, under: str) -> list[float]:
    """Per round: time of ``over`` by time of ``under`` (keys of a round: "baseline", "candidate", "best")."""

    def seconds(r: dict, name: str) -> float:
        return cost(r[name], r["best"]) if name == "candidate" else slope(r[name])

    return [seconds(r, over) / seconds(r, under) for r in rounds]


def speedup(rounds: list[dict], at_least: float, ceiling: float | None = TOO_FAST) -> dict[str, Any]:
    """Judge one set of rounds: each a dict of ``baseline`` and ``best`` (two samples each) and ``candidate`` (one).

    A sample is ``[runs, seconds]``.
    ``at_least``: the ratio asked for. The bar in force is never above half of what the
    reference reached in the same rounds, and never below `FLOOR`; half of the credit is
    given half of the way. Returns verdict, credit (0, 0.5 or 1), bar, and the bounds of the
    candidate's ratio (``low``, ``high``), of the reference's (``best``, its median) and
    by how much the candidate is faster than that at least (``against_best``).
    """
    low, high = bounds(ratios(rounds, "baseline", "candidate"))
    best_ratios = [r for r in ratios(rounds, "baseline", "best") if not math.isnan(r)]
    best = statistics.median(best_ratios) if best_ratios else math.nan
    faster_low, _ = bounds(ratios(rounds, "best", "candidate"))
    return _decide(low, high, best, faster_low, at_least, ceiling)


def faster(seconds: Mapping[str, Sequence[float]], at_least: float) -> dict[str, Any]:
    """Judge work that took the examiner's clock seconds a time: no slope, since each time is far above what asking costs.

    ``seconds``: of "baseline", "candidate" and "best", each a list of as many times; those at one place were measured close
    together. Returns what `speedup` does. Raises ValueError for lists of different lengths, or of fewer than three.
    """
    names = ("baseline", "candidate", "best")
    if set(seconds) != set(names) or len({len(seconds[name]) for name in names}) > 1 or len(seconds["best"]) < 3:
        raise ValueError("faster() wants the seconds of baseline, candidate and best, three or more of each")
    low, high = bounds(_quotients(seconds, "baseline", "candidate"))
    against_best, _ = bounds(_quotients(seconds, "best", "candidate"))
    return _decide(low, high, statistics.median(_quotients(seconds, "baseline", "best")), against_best, at_least, None)


def _quotients(seconds: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    """What `ratios` is for rounds, for times that stand as they are."""
    return [above / below for above, below in zip(seconds[over], seconds[under], strict=True)]


def _decide(low: float, high: float, best: float, against_best: float, at_least: float, ceiling: float | None) -> dict[str, Any]:
    """Verdict and credit from the bounds of the candidate's ratio, the reference's, and the candidate's against that."""
    result = {"low": low, "high": high, "best": best, "against_best": against_best, "credit": 0.0}
    if math.isnan(best) or best < LEAST_GAIN:
        return result | {"verdict": INCONCLUSIVE, "bar": FLOOR, "why": "reference"}
    bar = max(FLOOR, min(at_least, best * SHARE))
    result["bar"] = bar
    if ceiling is not None and against_best > ceiling:
        return result | {"verdict": FAILED, "why": "too fast"}
    steps = ((bar, 1.0), (max(FLOOR, (1 + bar) / 2), 0.5), (0.0, 0.0))
    sure = next(credit for threshold, credit in steps if low >= threshold)
    possible = next(credit for threshold, credit in steps if high >= threshold)
    if sure != possible:
        return result | {"verdict": INCONCLUSIVE, "why": "noise"}
    return result | {"verdict": PASSED if sure else FAILED, "credit": sure, "why": "measured"}


def measured(record: dict) -> tuple[dict[str, list[float]], dict[str, Any]] | None:
    """What the record of a check holds of a measured speed-up; None if it is of another kind, or was not measured to the end.

    Returns how many times as long as it the baseline took, pair by pair, for "candidate" and "best", and what `speedup` or
    `faster` says of that.
    """
    match record.get("check"):
        case "speedup" if record["attempts"]:
            rounds = record["attempts"][-1]
            found = {name: ratios(rounds, "baseline", name) for name in ("candidate", "best")}
            return found, speedup(rounds, record["at_least"], record["ceiling"])
        case "faster":
            judged = faster(record["seconds"], record["at_least"])  # first: it refuses what is no set of times
            return {name: _quotients(record["seconds"], "baseline", name) for name in ("candidate", "best")}, judged
    return None


def counted(found: int, wanted: int | Sequence[int | None]) -> bool:
    """Whether a number of nodes is the one ``wanted``, or lies in (least, most), where a most of None is no limit."""
    if isinstance(wanted, int):
        return found == wanted
    least, most = wanted
    return found >= least and (most is None or found <= most)


def disturbed(record: dict) -> bool:
    """Whether a passed speed-up may be owed to others having been slowed down.

    ``record["quiet"]`` holds the trusted sides as measured after the learner's process had
    ended. The candidate's ratio is taken for as much smaller as the baseline ran slower in the
    rounds than then, and the bar is set by the better of the reference's two gains: what still
    passes is no gift of a busy machine, whoever kept it busy.
    """
    quiet = {name: _typical(record["quiet"], name) for name in ("baseline", "best")}
    if any(math.isnan(value) for value in quiet.values()):
        return True
    result = speedup(record["attempts"][-1], record["at_least"], record["ceiling"])
    slowed = max(1.0, _typical(record["attempts"][-1], "baseline") / quiet["baseline"])
    bar = max(FLOOR, min(record["at_least"], SHARE * max(result["best"], quiet["baseline"] / quiet["best"])))
    needed = bar if result["credit"] == 1 else max(FLOOR, (1 + bar) / 2)
    return result["low"] / slowed < needed


def _typical(rounds: list[dict], name: str) -> float:
    slopes = [value for value in (slope(r[name]) for r in rounds) if not math.isnan(value)]
    return statistics.median(slopes) if slopes else math.nan


def recompute(records: list[dict], points: float) -> tuple[str, float | None]:
    """Verdict and score of one test cell from the raw records of its checks.

    ``records`` as written by `launchlab.exam.check`; ``points``: the cell's maximum. A score
    of None means left open. Raises ValueError for a record it does not know.
    """
    judged = [_judge(record) for record in records] or [(FAILED, 0.0)]
    # What is proved wrong outweighs what is left open, wherever it stands.
    for verdict, _ in judged:
        if verdict not in (PASSED, *OPEN):
            return verdict, 0.0
    for verdict, _ in judged:
        if verdict in OPEN:
            return verdict, None
    return PASSED, round(points * min(credit for _, credit in judged), 2)


def _judge(record: dict) -> tuple[str, float]:
    match record.get("check"):
        case "equal":
            ok = record["mismatch"] is None and record["differing"] == 0
        case "that":
            ok = record["holds"] is True
        case "raises":
            ok = record["wanted"] in record["raised"]
        case "nodes":
            ok = record["found"] is not None and all(counted(record["found"].get(key, 0), count) for key, count in record["wanted"].items())
        case "speedup":
            if record["states_differ"]:
                return FAILED, 0.0
            if not record["attempts"] or len(record["attempts"][-1]) != PAIRS:
                raise ValueError("a speed-up is judged on a full set of rounds")
            _, result = measured(record)
            if result["verdict"] == PASSED and disturbed(record):
                return INCONCLUSIVE, 0.0
            return result["verdict"], result["credit"]
        case "faster":
            _, result = measured(record)
            return result["verdict"], result["credit"]
        case "stopped":
            if record["verdict"] == PASSED:
                raise ValueError("nothing is passed by stopping")
            return record["verdict"], 0.0
        case other:
            raise ValueError(f"unknown record {other!r}")
    return (PASSED if ok else FAILED), 1.0
