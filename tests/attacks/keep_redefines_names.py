# ruff: noqa
# An honest notebook that defines the same function several times, reuses names of the course and of Python for its own, and ends with the right one.
# loses: nothing
# %% before="total_us"
student = "my name is student"
check = secret = reference = None
sum = 0

# %% before="total_us"
def total_us(launch_us, n, kernel_us):
    raise ValueError("a first attempt")

# %% solution="total_us"
def total_us(launch_us: float, n: int, kernel_us: float) -> float:
    sum = launch_us + (n - 1) * max(launch_us, kernel_us) + kernel_us
    return np.float64(sum if n else 0.0)

# %% after="longest_path"
path_of_course = longest_path


def longest_path(edges):
    return np.int64(path_of_course(edges))
