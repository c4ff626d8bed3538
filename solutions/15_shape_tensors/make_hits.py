"""Write hits.csv, the synthetic traffic of this chapter: how many requests had each number of hits.

    python make_hits.py

Two kinds of requests, as a text detector sees them: photographs with a few lines of text, and scanned pages with
many; some have none. Seeded: the file is the same on every machine with the same NumPy stream.
"""

from collections import Counter
from pathlib import Path

import numpy as np

MOST, REQUESTS, SEED = 1000, 5000, 15

rng = np.random.default_rng(SEED)
kind = rng.choice(3, REQUESTS, p=(0.06, 0.72, 0.22))
drawn = np.choose(
    kind,
    (np.zeros(REQUESTS), rng.lognormal(np.log(9), 0.7, REQUESTS), rng.lognormal(np.log(70), 0.55, REQUESTS)),
)
count = Counter(np.clip(np.round(drawn), 0, MOST).astype(int).tolist())
lines = [f"# synthetic traffic, not recorded: {REQUESTS} requests, seed {SEED}, made by make_hits.py", "hits,requests"]
lines += [f"{hits},{count[hits]}" for hits in sorted(count)]
Path(__file__).with_name("hits.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
