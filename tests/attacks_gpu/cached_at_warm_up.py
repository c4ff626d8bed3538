# ruff: noqa
# Computes once, then copies the remembered result.
# loses: make_replayer_result, make_replayer_speed
# %% after="make_replayer"
make_for_real = make_replayer


class Cached(Replayer):
    result = None

    def __call__(self):
        if self.result is None:
            super().__call__()
            stream.synchronize()
            self.result = self.x.copy()
        with stream:
            self.x[...] = self.result


def make_replayer(x, n):
    made = make_for_real(x, n)
    cached = Cached(made.captured, made.inbox, made.arrived)
    cached.x = x
    return cached
