"""What a call does to a stream that is held up by a kernel in front of it: does it wait, does its work overtake?"""

import cupy
import cupyx
import numpy

kernel = cupy.RawKernel(
    r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}
""",
    "spin",
)


def spin(stream, ms):
    """A kernel of so many ms, and an event behind it."""
    behind = cupy.cuda.Event(disable_timing=True)
    with stream:
        kernel((1,), (1,), (numpy.uint64(ms * 1_000_000),))
    behind.record(stream)
    return behind


def held_up(stream, ms, call, *arguments):
    """call(*arguments) while the stream is held up for so many ms, once all before is over; waits for the stream at the end.

    Returns [early, busy]. early: the call was back before the stream went on. busy: it was back while work was in the stream;
    a call that waits first and then enqueues is busy, and not early.
    """
    spin(stream, 0).synchronize()  # compiles
    goes_on = spin(stream, ms)
    try:
        call(*arguments)
        busy = not stream.done  # asked at once: its own work may be short
        return [not goes_on.done, busy]
    finally:
        stream.synchronize()


def overtakes(stream, ms, x, call, *arguments):
    """The same, with a look at the cupy array x before and after the call, the stream held up still.

    Returns [early, changed]. early: the call was back, and x was read, before the stream went on. changed: x was another then,
    so something was not put into the stream; of no meaning if not early.
    """
    aside, before, then = cupy.cuda.Stream(non_blocking=True), *(cupyx.empty_pinned(x.shape, x.dtype) for _ in range(2))
    spin(stream, 0).synchronize()
    before[...] = cupy.asnumpy(x, stream=stream)
    goes_on = spin(stream, ms)
    try:
        call(*arguments)
        early = not goes_on.done
        spin(aside, 5)  # time for what went elsewhere to arrive
        x.data.copy_to_host_async(then.ctypes.data, x.nbytes, aside)
        aside.synchronize()
        return [early and not goes_on.done, bool((before != then).any())]
    finally:
        stream.synchronize()
