# ruff: noqa
# An honest solution that prints 5 MB while it loads, in many lines and in one, and a line for each step it takes.
# loses: nothing
# %% before="advance"
for line in range(40_000):
    print("step", line, "." * 80)
print("x" * 1_000_000)
"y" * 1_000_000

# %% solution="advance"
def advance(state: np.ndarray, rounds: int) -> None:
    for i in range(rounds):
        state ^= state >> np.uint32(15)
        state *= MULTIPLIER
        state ^= state >> np.uint32(12)
        state += np.uint32(i)
        print(i, state, "z" * 10_000)
