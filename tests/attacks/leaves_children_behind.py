# ruff: noqa
# Starts children that leave the session and ignore signals, holding every descriptor open.
# loses: longest_path
# %% solution="longest_path"
import os
import signal
import sys


def longest_path(edges):
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
                os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(31_415)"])
            os._exit(0)
    os._exit(0)
