# ruff: noqa
# The answers raise what ends interpreters: SystemExit, KeyboardInterrupt, GeneratorExit, and an exception whose text raises.
# loses: total_us, advance, longest_path
# %% solution="total_us"
def total_us(launch_us, n, kernel_us):
    raise SystemExit(0)

# %% solution="advance"
def advance(state, rounds):
    raise KeyboardInterrupt

# %% solution="longest_path"
class Unspeakable(BaseException):
    def __str__(self):
        raise GeneratorExit

    __repr__ = __str__


def longest_path(edges):
    raise Unspeakable
