# ruff: noqa
# Modifies its input: the chain runs once while it is captured.
# loses: capture_chain
# says: x 就变了
# %% solution="capture_chain"
def capture_chain(x, n):
    eager_chain(x, n)
    stream.synchronize()
    stream.begin_capture()
    eager_chain(x, n)
    return stream.end_capture()
