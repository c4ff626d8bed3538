# ruff: noqa
# A kernel that never ends.
# loses: capture_chain
# says: 没有回答
# %% solution="capture_chain"
FOREVER = cp.RawKernel(r"""
extern "C" __global__ void forever(volatile unsigned int *x) { while (x[0] != 0xffffffffu || x[1] != 0x12345678u) {} }
""", "forever")
FOREVER.compile()


def capture_chain(x, n):
    with stream:
        stream.begin_capture()
        for _ in range(n):
            FOREVER((1,), (1,), (x,))
        return stream.end_capture()
