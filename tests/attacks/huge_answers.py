# ruff: noqa
# Answers that are far too large: a list of a million, a number of 40,000 digits, a text of 64 MB.
# loses: total_us, longest_path
# %% solution="total_us"
def total_us(launch_us, n, kernel_us):
    return 7.0 if n == 1 else "0" * (64 << 20)

# %% solution="longest_path"
def longest_path(edges):
    return [0] * 1_000_000 if len(edges) == 3 else 2**130_000
