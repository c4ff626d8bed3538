"""A process that uses one GPU of those that the machine shows."""

from __future__ import annotations

import os


def use(number: int) -> None:
    """See GPU ``number`` alone, of those visible so far. To be called before CUDA begins in this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
