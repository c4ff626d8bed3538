# ruff: noqa
# The right number of kernels in the graph, on an array of its own.
# loses: capture_chain
# says: 重放一次的结果不对
# %% solution="capture_chain"
kept = []


def capture_chain(x, n):
    kept.append(cp.zeros_like(x))
    stream.begin_capture()
    eager_chain(kept[-1], n)
    return stream.end_capture()
