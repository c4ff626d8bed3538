# ruff: noqa
# Copies the inbox of the moment of capture: later inputs are never read.
# loses: make_replayer_result, make_replayer_speed
# %% solution="make_replayer"
kept = []


def make_replayer(x, n):
    inbox, frozen = cupyx.zeros_pinned(x.shape, x.dtype), cupyx.zeros_pinned(x.shape, x.dtype)
    arrived = cp.empty_like(x)
    kept.append(frozen)
    to_device = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
    stream.begin_capture()
    lab.check_cuda(cudart.cudaMemcpyAsync(arrived.data.ptr, frozen.ctypes.data, frozen.nbytes, to_device, stream.ptr))
    with stream:
        launch_absorb(x, arrived)
    eager_chain(x, n)
    return Replayer(stream.end_capture(), inbox, arrived)
