# ruff: noqa
# A graph with half of the kernels.
# loses: make_replayer_result, make_replayer_speed
# %% after="make_replayer"
make_for_real = make_replayer


def make_replayer(x, n):
    return make_for_real(x, n // 2)
