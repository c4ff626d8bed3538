# ruff: noqa
# An honest solution that takes its time to load and to answer the first time.
# loses: nothing
# %% before="total_us"
import time

time.sleep(3)

# %% solution="total_us"
from functools import lru_cache


@lru_cache(None)
def prepared():
    time.sleep(2)
    return max


def total_us(launch_us: float, n: int, kernel_us: float) -> float:
    return launch_us + (n - 1) * prepared()(launch_us, kernel_us) + kernel_us if n else 0.0
