# ruff: noqa
# Subclasses of float, of an array and of int whose comparisons lie.
# loses: total_us, advance, longest_path
# %% solution="total_us"
class Near(float):
    __eq__ = __le__ = __ge__ = __lt__ = lambda self, other: True
    __sub__ = __rsub__ = lambda self, other: 0.0
    __hash__ = float.__hash__
    __class__ = float


def total_us(launch_us, n, kernel_us):
    return Near(0)

# %% solution="advance"
class Same(np.ndarray):
    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        return np.bool_(True)

    def __eq__(self, other):
        return np.ones(self.shape, bool)

    def tobytes(self, *_):
        return b"\0" * self.nbytes


def advance(state, rounds):
    return state.view(Same)

# %% solution="longest_path"
class Whole(int):
    __eq__ = lambda self, other: True
    __hash__ = int.__hash__
    __index__ = lambda self: 3


def longest_path(edges):
    return Whole(0)
