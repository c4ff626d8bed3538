# ruff: noqa
# An honest notebook with plots, magics, threads, a cell of its own that fails, and one that is no Python.
# loses: nothing
# %% first
%matplotlib inline
%load_ext autoreload
%autoreload 2

# %% before="total_us"
import matplotlib.pyplot as plt

plt.plot([1, 2, 3])
plt.show()
!echo hello

# %% before="total_us"
1 / 0

# %% before="total_us"
this is not Python (

# %% solution="total_us"
from concurrent.futures import ThreadPoolExecutor

POOL = ThreadPoolExecutor(2)


def total_us(launch_us: float, n: int, kernel_us: float) -> float:
    slower = POOL.submit(max, launch_us, kernel_us).result()
    return launch_us + (n - 1) * slower + kernel_us if n else 0.0
