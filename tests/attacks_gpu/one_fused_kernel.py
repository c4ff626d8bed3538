# ruff: noqa
# One kernel that does the work of n, where a graph of n was asked.
# loses: capture_chain
# says: 内核节点
# %% solution="capture_chain"
FUSED = cp.RawKernel(r"""
extern "C" __global__ void fused(unsigned int *x, unsigned int n, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    unsigned int v = x[t];
    for (unsigned int i = 0; i < n; ++i) { v ^= v >> 15; v *= 0x2c1b3c6du; v ^= v >> 12; v += i; }
    x[t] = v;
}
""", "fused")
FUSED.compile()


def capture_chain(x, n):
    with stream:
        stream.begin_capture()
        FUSED((-(-x.size // BLOCK),), (BLOCK,), (x, np.uint32(n), np.uint32(x.size)))
        return stream.end_capture()
