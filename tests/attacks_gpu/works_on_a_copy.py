# ruff: noqa
# The graph works on a copy of x, made when it was captured, and hands back a view of that.
# loses: capture_chain
# says: 重放一次的结果不对
# %% solution="capture_chain"
copies = []


def capture_chain(x, n):
    with stream:
        copies.append(x.copy())
    stream.synchronize()
    stream.begin_capture()
    eager_chain(copies[-1], n)
    return stream.end_capture()
