# ruff: noqa
# Remembers results by the address and size of the array.
# loses: make_replayer_result, make_replayer_speed
# %% after="make_replayer"
make_for_real = make_replayer
RESULTS = {}


class ByPointer(Replayer):
    def __call__(self):
        key = (self.x.data.ptr, self.x.size)
        if key not in RESULTS:
            super().__call__()
            stream.synchronize()
            RESULTS[key] = self.x.copy()
        with stream:
            self.x[...] = RESULTS[key]


def make_replayer(x, n):
    made = make_for_real(x, n)
    made = ByPointer(made.captured, made.inbox, made.arrived)
    made.x = x
    return made
