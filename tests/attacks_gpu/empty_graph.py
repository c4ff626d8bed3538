# ruff: noqa
# A capture in which nothing is launched.
# loses: capture_chain
# says: 内核节点
# %% solution="capture_chain"
def capture_chain(x, n):
    stream.begin_capture()
    return stream.end_capture()
