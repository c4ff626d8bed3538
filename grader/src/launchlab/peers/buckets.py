"""The sizes for which the course's method keeps a graph. They are fixed beforehand: no peer knows the stream."""

import bisect

BUCKETS = {
    "rec": tuple(range(96, 641, 32)),
    "bert": (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512),
}


def bucket_of(model: str, size: int) -> int:
    """The smallest bucket that holds a size. ValueError if none does."""
    place = bisect.bisect_left(BUCKETS[model], size)
    if place == len(BUCKETS[model]):
        raise ValueError(f"{model}: no bucket holds the size {size}")
    return BUCKETS[model][place]
