# ruff: noqa
# Returns at once; a thread does the work a little later.
# loses: make_replayer_result, make_replayer_speed
# %% after="make_replayer"
import queue
import threading
import time

make_for_real = make_replayer
JOBS = queue.Queue()


def work():
    while True:
        job = JOBS.get()
        time.sleep(0.02)
        job()


threading.Thread(target=work, daemon=True).start()


class Later(Replayer):
    def __call__(self):
        JOBS.put(super().__call__)


def make_replayer(x, n):
    made = make_for_real(x, n)
    return Later(made.captured, made.inbox, made.arrived)
