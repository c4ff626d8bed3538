# ruff: noqa
# A graph with the right kinds of nodes: the kernels work elsewhere, the copy brings a result from when it was made.
# loses: make_replayer_result, make_replayer_speed
# %% solution="make_replayer"
kept = []


def make_replayer(x, n):
    inbox = cupyx.zeros_pinned(x.shape, x.dtype)
    arrived, cached = cp.empty_like(x), cupyx.zeros_pinned(x.shape, x.dtype)
    cached[...] = mixed(x.get(), n)
    scratch = cp.zeros_like(x)
    kept.append((cached, scratch))
    to_device = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
    stream.begin_capture()
    lab.check_cuda(cudart.cudaMemcpyAsync(x.data.ptr, cached.ctypes.data, cached.nbytes, to_device, stream.ptr))
    with stream:
        launch_absorb(scratch, arrived)
    eager_chain(scratch, n)
    return Replayer(stream.end_capture(), inbox, arrived)
