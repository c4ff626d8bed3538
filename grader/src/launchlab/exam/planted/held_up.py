"""Whether a call waits for the GPU."""

import cupy
import numpy

spin = cupy.RawKernel(
    r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}
""",
    "spin",
)


def held_up(stream, ms, call, *arguments):
    """call(*arguments) while a kernel of so many ms holds ``stream`` up; waits for the stream at the end.

    Returns [early, busy]. early: the call was back before the stream went on, told by an event right behind the kernel. busy: it
    was back while work was in the stream; a call that waits first and then enqueues is busy, and not early.
    """
    goes_on = cupy.cuda.Event(disable_timing=True)
    with stream:
        spin((1,), (1,), (numpy.uint64(0),))  # compiles
        stream.synchronize()
        spin((1,), (1,), (numpy.uint64(ms * 1_000_000),))
    goes_on.record(stream)
    try:
        call(*arguments)
        return [not goes_on.done, not stream.done]
    finally:
        stream.synchronize()
