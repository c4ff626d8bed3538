"""Write lengths.csv, the synthetic traffic of this chapter: how many requests of each length (tokens) there were.

    python make_lengths.py

Four kinds of requests, as a text service sees them: short questions, paragraphs, filled-in forms of a few fixed lengths,
and long documents, of which those that are too long were cut off at the limit. Seeded: the file is the same on every
machine with the same NumPy stream.
"""

from collections import Counter
from pathlib import Path

import numpy as np

SHORTEST, LONGEST, REQUESTS, SEED = 8, 512, 6000, 18

rng = np.random.default_rng(SEED)
kind = rng.choice(4, REQUESTS, p=(0.55, 0.25, 0.10, 0.10))
drawn = np.choose(
    kind,
    (
        rng.lognormal(np.log(21), 0.6, REQUESTS),
        rng.lognormal(np.log(95), 0.45, REQUESTS),
        rng.choice((43, 77, 130), REQUESTS, p=(0.5, 0.3, 0.2)),
        rng.lognormal(np.log(330), 0.6, REQUESTS),
    ),
)
count = Counter(np.clip(np.round(drawn), SHORTEST, LONGEST).astype(int).tolist())
lines = [f"# synthetic traffic, not recorded: {REQUESTS} requests, seed {SEED}, made by make_lengths.py", "length,requests"]
lines += [f"{length},{count[length]}" for length in sorted(count)]
Path(__file__).with_name("lengths.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
