"""The recorded stream: which shapes arrive in which order, and what each request holds.

    python -m launchlab.peers.stream        writes stream.csv beside this file anew

A request is a line of stream.csv: the model, the size (width in pixels, or number of tokens) and which of VARIANTS inputs
of that size it carries. Sizes are quantiles of the chapters' own traffic: the lengths of 18_graph_per_shape, and lines of
text put together from the words of 24_ocr_pipeline.
"""

import csv
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from launchlab import paths

SHAPES, VARIANTS, REQUESTS, SEED = 12, 4, 300, 9
RANGE = {"rec": (96, 640), "bert": (8, 512)}  # smallest and largest size that may be asked for
HEIGHT, STEP = 48, 8  # of rec: pixels of a line's height, and pixels of width for each step of the answer
VOCABULARY = 30522
RECORD = Path(__file__).with_name("stream.csv")
LENGTHS = paths.SOLUTIONS / "18_graph_per_shape" / "lengths.csv"
WORDS = paths.SOLUTIONS / "24_ocr_pipeline" / "words.npz"


@dataclass(frozen=True)
class Request:
    """One request: size in pixels (rec) or tokens (bert), and the number of its input, below VARIANTS."""

    size: int
    variant: int


def recorded(model: str) -> list[Request]:
    """The requests of a model ("rec" or "bert"), in the order in which they arrive."""
    with RECORD.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    return [Request(int(row["size"]), int(row["variant"])) for row in rows]


def payload(model: str, request: Request) -> np.ndarray:
    """What a request carries, in host memory.

    rec: float32 (1, 3, 48, size), -1 … 1, a line of text; bert: int32 (1, size), token numbers.
    """
    draw = np.random.default_rng([SEED, request.size, request.variant])
    if model == "bert":
        return draw.integers(0, VOCABULARY, (1, request.size), dtype=np.int32)
    line = _line(draw, request.size)[:, : request.size].astype(np.float32) / 255
    return np.ascontiguousarray(np.broadcast_to((line - 0.5) / 0.5, (1, 3, HEIGHT, request.size)))


@cache
def _words() -> list[np.ndarray]:
    """uint8, 48 × width each: 0 is ink, 255 is paper."""
    with np.load(WORDS) as stored:
        return [stored[name] for name in sorted(stored.files)]


def _line(draw: np.random.Generator, width: int) -> np.ndarray:
    """Words in a row, with gaps, at least so many pixels wide; at least one word."""
    words, parts = _words(), []
    while not parts or sum(part.shape[1] for part in parts) < width:
        parts += [words[draw.integers(len(words))], np.full((HEIGHT, int(draw.integers(4, 24))), 255, np.uint8)]
    return np.concatenate(parts, axis=1)


def _day(model: str, draw: np.random.Generator) -> np.ndarray:
    """Sizes of a day's requests, ascending."""
    if model == "bert":
        length, count = np.loadtxt(LENGTHS, delimiter=",", skiprows=2, dtype=np.int64, unpack=True)
        return np.repeat(length, count)
    words = [word.shape[1] for word in _words()]
    widths = np.array([draw.choice(words, n).sum() + draw.integers(4, 24, n).sum() for n in draw.integers(1, 5, 4000)])
    return np.sort(np.clip(-(-widths // STEP) * STEP, *RANGE[model]))


def drawn(model: str) -> list[Request]:
    """A stream anew: SHAPES sizes, one out of each quantile of the day, and REQUESTS requests among them."""
    draw = np.random.default_rng([SEED, len(model)])
    day = _day(model, draw)
    quantiles = np.array_split(day, SHAPES)
    sizes = [int(np.median(part)) for part in quantiles[:-1]] + [int(quantiles[-1].max())]
    sizes = [size if model == "bert" else size // STEP * STEP for size in sizes]
    return [Request(sizes[which], int(draw.integers(VARIANTS))) for which in draw.integers(SHAPES, size=REQUESTS)]


def main() -> None:
    lines = ["model,size,variant"]
    for model in RANGE:
        stream = drawn(model)
        lines += [f"{model},{request.size},{request.variant}" for request in stream]
        print(model, sorted(Counter(request.size for request in stream).items()))
    RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
