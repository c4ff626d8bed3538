# ruff: noqa
# Shows a real graph, and launches one with half of the kernels, each of which does two rounds.
# loses: make_replayer_speed
# %% after="make_replayer"
make_for_real = make_replayer
TWO = cp.RawKernel(r"""
extern "C" __global__ void two(unsigned int *x, unsigned int i, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    unsigned int v = x[t];
    for (unsigned int k = i; k < i + 2; ++k) { v ^= v >> 15; v *= 0x2c1b3c6du; v ^= v >> 12; v += k; }
    x[t] = v;
}
""", "two")
TWO.compile()


class Half(Replayer):
    def __call__(self):
        self.half.launch(stream)


def make_replayer(x, n):
    made = make_for_real(x, n)
    half = Half(made.captured, made.inbox, made.arrived)
    to_device = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
    stream.begin_capture()
    cudart.cudaMemcpyAsync(made.arrived.data.ptr, made.inbox.ctypes.data, made.inbox.nbytes, to_device, stream.ptr)
    with stream:
        launch_absorb(x, made.arrived)
        for i in range(0, n - 1, 2):
            TWO((-(-x.size // BLOCK),), (BLOCK,), (x, np.uint32(i), np.uint32(x.size)))
        if n % 2:
            launch_mix(x, n - 1)
    half.half = stream.end_capture()
    return half
