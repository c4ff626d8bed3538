# ruff: noqa
# A kernel writes far outside of its array: the CUDA context of the process is lost.
# loses: capture_chain
# %% solution="capture_chain"
def capture_chain(x, n):
    far = cp.ndarray((1 << 20,), cp.uint32, cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(0x10, 1 << 22, None), 0))
    stream.begin_capture()
    eager_chain(far, n)
    return stream.end_capture()
