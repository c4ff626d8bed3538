# ruff: noqa
# An honest learner whose helpers stand in a module and a table beside the notebook.
# loses: nothing
# %% file="my_helpers.py"
from pathlib import Path


def slower(a, b):
    return max(a, b)


TABLE = Path("my data/table.txt").read_text().split()

# %% file="my data/table.txt"
1 2 3
# %% solution="total_us"
import my_helpers


def total_us(launch_us: float, n: int, kernel_us: float) -> float:
    assert len(my_helpers.TABLE) == 3
    return launch_us + (n - 1) * my_helpers.slower(launch_us, kernel_us) + kernel_us if n else 0.0
