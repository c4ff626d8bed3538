"""Record costs.json: what the ways to follow a change of shape cost, for this chapter's chain of CuPy kernels.

    python record_costs.py [OUT.json]          (default: costs.json beside this file)

Needs CuPy, cuda.bindings and a GPU that nobody else uses; nothing of this course; about 2 s. A request is 139 launches
of a small kernel and 11 of a shrinking one, 150 nodes. Whole µs by the host's clock, medians of ROUNDS:

eager         one request launched one by one, from the first launch to the end of a synchronisation
replay        one launch of the executable graph, the same way
capture       the CPU's time to capture one request, without instantiation
instantiate   to instantiate its definition and to destroy the executable graph again
update        cudaGraphExecUpdate by the definition of another length
"""

import json
import sys
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import cupy as cp
import numpy as np
from cuda.bindings import runtime as cudart

N, LENGTHS, BLOCK, ROUNDS = 139, (2100, 3900), 256, 41

SOURCE = r"""
extern "C" __global__ void mix(unsigned int *x, unsigned int i, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    unsigned int v = x[t];
    v ^= v >> 15;
    v *= 0x2c1b3c6du;
    v ^= v >> 12;
    v += i;
    x[t] = v;
}

extern "C" __global__ void halve(unsigned int *x, unsigned int half) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < half) x[t] ^= x[t + half] * 0x85ebca6bu;
}
"""
module = cp.RawModule(code=SOURCE)
mix, halve = module.get_function("mix"), module.get_function("halve")
stream = cp.cuda.Stream(non_blocking=True)


def must(result):
    """The value of a call of cuda.bindings; RuntimeError with its error code."""
    error, *values = result
    if int(error):
        raise RuntimeError(error.name)
    return values[0] if values else None


def request(x, length):
    """Launch one request on `stream`."""
    with stream:
        for i in range(N):
            mix((-(-length // BLOCK),), (BLOCK,), (x, np.uint32(i), np.uint32(length)))
        half = length // 2
        while half:
            halve((-(-half // BLOCK),), (BLOCK,), (x, np.uint32(half)))
            half //= 2


def capture(x, length):
    """The definition of one request."""
    must(cudart.cudaStreamBeginCapture(stream.ptr, cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
    try:
        request(x, length)
    finally:
        ended = cudart.cudaStreamEndCapture(stream.ptr)
    return must(ended)


def clock(work):
    """Whole µs of work(), on an idle GPU: the median of ROUNDS, the first few left out."""
    taken = []
    for _ in range(ROUNDS + 5):
        stream.synchronize()
        began = perf_counter_ns()
        work()
        taken.append((perf_counter_ns() - began) / 1000)
    return round(median(taken[5:]))


def main():
    with stream:
        x = cp.arange(1 << 14, dtype=cp.uint32)
    request(x, LENGTHS[0])
    stream.synchronize()
    definitions = [capture(x, length) for length in LENGTHS]
    live = must(cudart.cudaGraphInstantiate(definitions[0], 0))
    turn = [0]

    def eager():
        request(x, LENGTHS[0])
        stream.synchronize()

    def replay():
        must(cudart.cudaGraphLaunch(live, stream.ptr))
        stream.synchronize()

    def update():
        turn[0] ^= 1
        must(cudart.cudaGraphExecUpdate(live, definitions[turn[0]]))

    captured = []
    us = {
        "eager": clock(eager),
        "replay": clock(replay),
        "capture": clock(lambda: captured.append(capture(x, LENGTHS[0]))),
        "instantiate": clock(lambda: must(cudart.cudaGraphExecDestroy(must(cudart.cudaGraphInstantiate(definitions[0], 0))))),
        "update": clock(update),
    }
    gpu = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("costs.json")
    out.write_text(json.dumps({"gpu": gpu, "recorded_at": date.today().isoformat(), "us": us}, indent=2) + "\n", encoding="utf-8")
    print(us)


main()
