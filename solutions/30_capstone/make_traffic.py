"""Write traffic.csv, the synthetic traffic of this chapter: when each request is due, and its number.

    python make_traffic.py

A quiet stream of requests at random times, and five bursts, as when somebody hands in a page that was cut into lines.
Short lines are the most common. Seeded: the file is the same on every machine with the same NumPy stream.
"""

from pathlib import Path

import numpy as np

SECONDS, RATE, BURSTS, SEED = 1.6, 60, 5, 30
SCENES = 12  # of the chapter: a request's number modulo this says which words are in the picture
COMMON = (0, 2, 4, 5, 7, 10)  # those with one word

rng = np.random.default_rng(SEED)
quiet = rng.uniform(0, SECONDS, rng.poisson(RATE * SECONDS))
starts = (np.arange(BURSTS) + rng.uniform(0.2, 0.8, BURSTS)) * SECONDS / BURSTS
due = np.concatenate([quiet, *(start + rng.uniform(0, 0.004, rng.integers(12, 21)) for start in starts)])
due = np.sort(np.round(due * 1000, 2))
weight = np.where(np.isin(np.arange(SCENES), COMMON), 3.0, 1.0)
numbers = rng.choice(SCENES, len(due), p=weight / weight.sum()) + SCENES * rng.integers(0, 80000, len(due))
lines = [f"# synthetic traffic, not recorded: {len(due)} requests, seed {SEED}, made by make_traffic.py", "ms,number"]
lines += [f"{ms:.2f},{number}" for ms, number in zip(due, numbers, strict=True)]
Path(__file__).with_name("traffic.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
