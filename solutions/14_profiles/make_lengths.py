"""Write lengths.csv, the synthetic traffic of this chapter: how many requests of each length (tokens) there were.

    python make_lengths.py

Three kinds of requests, as a text service sees them: short queries, paragraphs, long documents. Seeded: the file
is the same on every machine with the same NumPy stream.
"""

from collections import Counter
from pathlib import Path

import numpy as np

SHORTEST, LONGEST, REQUESTS, SEED = 8, 512, 4000, 14

rng = np.random.default_rng(SEED)
kind = rng.choice(3, REQUESTS, p=(0.6, 0.3, 0.1))
drawn = np.choose(
    kind,
    (rng.lognormal(np.log(24), 0.55, REQUESTS), rng.lognormal(np.log(110), 0.35, REQUESTS), rng.normal(430, 70, REQUESTS)),
)
count = Counter(np.clip(np.round(drawn), SHORTEST, LONGEST).astype(int).tolist())
lines = [f"# synthetic traffic, not recorded: {REQUESTS} requests, seed {SEED}, made by make_lengths.py", "length,requests"]
lines += [f"{length},{count[length]}" for length in sorted(count)]
Path(__file__).with_name("lengths.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
