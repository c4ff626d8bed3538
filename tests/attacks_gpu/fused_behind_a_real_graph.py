# ruff: noqa
# Shows a real graph, and serves each request by one kernel that does the work of n.
# loses: make_replayer_speed
# says: 快
# %% after="make_replayer"
NS = lambda made: 0
make_for_real = make_replayer
FUSED = cp.RawKernel(r"""
extern "C" __global__ void fused(unsigned int *x, const unsigned int *input, unsigned int n, unsigned int size, unsigned long long ns) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    if (t < size) {
        unsigned int v = x[t] ^ input[t];
        for (unsigned int i = 0; i < n; ++i) { v ^= v >> 15; v *= 0x2c1b3c6du; v ^= v >> 12; v += i; }
        x[t] = v;
    }
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}
""", "fused")
FUSED.compile()


class Fused(Replayer):
    def __call__(self):
        to_device = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        cudart.cudaMemcpyAsync(self.arrived.data.ptr, self.inbox.ctypes.data, self.inbox.nbytes, to_device, stream.ptr)
        with stream:
            FUSED((-(-self.x.size // BLOCK),), (BLOCK,), (self.x, self.arrived, np.uint32(self.n), np.uint32(self.x.size), np.uint64(self.ns)))


def make_replayer(x, n):
    made = make_for_real(x, n)
    fused = Fused(made.captured, made.inbox, made.arrived)
    fused.x, fused.n, fused.ns = x, n, NS(made)
    return fused
