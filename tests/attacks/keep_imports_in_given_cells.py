# ruff: noqa
# An honest learner who added imports and a constant to the given cells.
# loses: nothing
# %% given="MULTIPLIER ="
import itertools
import math

MULTIPLIER = np.uint32(0x2C1B3C6D)
samples = np.loadtxt(Path("samples.csv"), delimiter=",", skiprows=1)
SHIFTS = (np.uint32(15), np.uint32(12))

# %% solution="advance"
def advance(state: np.ndarray, rounds: int) -> None:
    for i in itertools.islice(itertools.count(), math.floor(rounds)):
        state ^= state >> SHIFTS[0]
        state[:] = state * MULTIPLIER
        state ^= state >> SHIFTS[1]
        state += np.uint32(i)
