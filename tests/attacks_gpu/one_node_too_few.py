# ruff: noqa
# The last launch is left out of the graph.
# loses: capture_chain
# says: 内核节点
# %% solution="capture_chain"
def capture_chain(x, n):
    stream.begin_capture()
    eager_chain(x, n - 1)
    return stream.end_capture()
