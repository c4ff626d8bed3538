# ruff: noqa
# An honest learner who times cells with a hook, and transforms input for convenience.
# loses: nothing
# %% first
import time

get_ipython().events.register("pre_run_cell", lambda info: globals().__setitem__("began", time.perf_counter()))
get_ipython().events.register("post_run_cell", lambda result: print(f"{time.perf_counter() - began:.3f} s"))
get_ipython().input_transformers_cleanup.append(lambda lines: [line.replace("÷", "/") for line in lines])

# %% solution="total_us"
def total_us(launch_us: float, n: int, kernel_us: float) -> float:
    mean = (launch_us + kernel_us) ÷ 2
    return 2 * mean + (n - 1) * max(launch_us, kernel_us) if n else 0.0
