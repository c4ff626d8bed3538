# ruff: noqa
# An honest solution that logs to stderr while it loads and while it runs, as TensorRT does.
# loses: nothing
# %% before="total_us"
import logging
import os
import sys
import warnings

logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
warnings.warn("this is only a warning")
os.write(2, b"[TRT] [W] written by a library, past Python\n")

# %% solution="total_us"
def total_us(launch_us: float, n: int, kernel_us: float) -> float:
    logging.warning("total_us(%s, %s, %s)", launch_us, n, kernel_us)
    print("asked", file=sys.stderr)
    os.write(2, b"[TRT] [W] and again\n")
    if n == 0:
        return 0.0
    return launch_us + (n - 1) * max(launch_us, kernel_us) + kernel_us
