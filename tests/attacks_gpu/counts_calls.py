# ruff: noqa
# Honest for the first thirty calls, then every other call does nothing.
# loses: make_replayer_speed
# says: 数据和应有的不一样
# %% after="make_replayer"
make_for_real = make_replayer
calls = 0


class Counting(Replayer):
    def __call__(self):
        global calls
        calls += 1
        if calls < 30 or calls % 2:
            super().__call__()


def make_replayer(x, n):
    made = make_for_real(x, n)
    return Counting(made.captured, made.inbox, made.arrived)
