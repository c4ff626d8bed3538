# ruff: noqa
# Logs to stderr while it loads, builds and feeds, as TensorRT does.
# loses: nothing
# %% after="make_replayer"
import logging
import os
import sys

logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
make_quietly = make_replayer


def make_replayer(x, n):
    logging.warning("building a graph of %d", n)
    os.write(2, b"[TRT] [W] lazy loading is enabled\n")
    return make_quietly(x, n)
