"""Record workloads.json: what cheap probes tell of ten services before any graph is built, and what graphs gained in the end.

    python record_workloads.py [OUT.json]          (default: workloads.json beside this file)

Needs CuPy, cuda.bindings and a GPU that nobody else uses; nothing of this course; less than 10 s. The services, the
probes and the policy are those of the chapter: graphs for the `room` most frequent lengths, each captured after the
first request of its length, building included in the time. All times are µs by the host's clock, medians.
"""

import json
import sys
from collections import Counter
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import cupy as cp
import cupyx
import numpy as np
from cuda.bindings import runtime

BLOCK, LONGEST, NODES, BUILDS, SAMPLES = 256, 4096, 100, 4, 6

SOURCE = r"""
__device__ unsigned long long now_ns() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

extern "C" __global__ void step(unsigned int *x, unsigned int k, unsigned int length, unsigned int hold_ns) {
    unsigned long long start = hold_ns ? now_ns() : 0;
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < length) {
        unsigned int v = x[t];
        v ^= v >> 15;
        v *= 0x2c1b3c6du;
        v ^= v >> 12;
        x[t] = v + (k ^ hold_ns);
    }
    if (hold_ns) while (now_ns() - start < hold_ns) {}
}

extern "C" __global__ void spin(unsigned int ns) {
    unsigned long long start = now_ns();
    while (now_ns() - start < ns) {}
}
"""
module = cp.RawModule(code=SOURCE)
step, spin = module.get_function("step"), module.get_function("spin")
stream = cp.cuda.Stream(non_blocking=True)
with stream:
    x = cp.zeros(LONGEST, cp.uint32)


def must(result):
    """The value of a call of cuda.bindings, if it has one; RuntimeError with its error code."""
    error, *values = result
    if int(error):
        raise RuntimeError(error.name)
    return values[0] if values else None


def busy_us(us):
    until = perf_counter_ns() + us * 1000
    while us and perf_counter_ns() < until:
        pass


def plug(us):
    """Keep the GPU busy for us microseconds. Returns at once."""
    with stream:
        spin((1,), (1,), (np.uint32(us * 1000),))


def capture(work):
    stream.begin_capture()
    try:
        work()
    finally:
        graph = stream.end_capture()
    return graph


class Service:
    """See the chapter."""

    def __init__(self, lengths, kernels, hold_us=0.0, dispatch_us=0.0, host_us=0.0, copy_bytes=0, room=1000):
        self.lengths, self.kernels, self.hold_us, self.dispatch_us, self.host_us, self.room = lengths, kernels, hold_us, dispatch_us, host_us, room
        self.copy_bytes = copy_bytes
        if copy_bytes:
            self.outside, self.inbox = cupyx.zeros_pinned(copy_bytes, np.uint8), cp.zeros(copy_bytes, cp.uint8)
            cp.cuda.Device().synchronize()

    def prepare(self, i):
        busy_us(self.host_us)

    def submit(self, i):
        length = self.lengths[i]
        ns = np.uint32(self.hold_us * 1000 * length / LONGEST)
        with stream:
            if self.copy_bytes:
                up = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
                must(runtime.cudaMemcpyAsync(self.inbox.data.ptr, self.outside.ctypes.data, self.copy_bytes, up, stream.ptr))
            for k in range(self.kernels):
                busy_us(self.dispatch_us)
                step((-(-length // BLOCK),), (BLOCK,), (x, np.uint32(k), np.uint32(length), ns))


def serve_all(service):
    for i in range(len(service.lengths)):
        service.prepare(i)
        service.submit(i)
    stream.synchronize()


def serve_with_graphs(service):
    planned = {length for length, _ in Counter(service.lengths).most_common(service.room)}
    graphs = {}
    for i, length in enumerate(service.lengths):
        service.prepare(i)
        if length in graphs:
            graphs[length].launch(stream)
            continue
        service.submit(i)
        if length in planned:
            graphs[length] = capture(partial(service.submit, i))
    stream.synchronize()


def once_us(work, wait):
    """µs of work(), and of the wait for the GPU if that counts."""
    begin = perf_counter_ns()
    work()
    if wait:
        stream.synchronize()
    us = (perf_counter_ns() - begin) / 1000
    stream.synchronize()
    return us


def clock(works, repeats, wait):
    """Medians, µs, of pieces of work that take turns: by the time they return, or by the time the GPU is done."""
    taken = [[] for _ in works]
    for turn in range(-1, repeats):
        for k in range(len(works))[:: 1 if turn % 2 else -1]:
            us = once_us(works[k], wait)
            if turn >= 0:
                taken[k].append(us)
    return [median(each) for each in taken], median(a / b for a, b in zip(taken[0], taken[-1], strict=True))


def submit_us(work):
    return clock([work], 15, False)[0][0]


def gpu_us(work):
    """GPU time of what work() launches, queued up behind a plug."""
    us = 500 + 3 * submit_us(work)

    def plugged():
        plug(us)
        work()

    (both, alone), _ = clock([plugged, partial(plug, us)], 9, True)
    return max(0.0, both - alone)


def prices():
    """launch_us, closer_us and node_us of this machine: see the chapter."""
    work = partial(Service([BLOCK], NODES).submit, 0)
    replay = partial(capture(work).launch, stream)

    def builds():
        for _ in range(BUILDS):
            capture(work)

    def submits():
        for _ in range(BUILDS):
            work()

    (built, submitted), _ = clock([builds, submits], 7, False)
    return submit_us(replay), max(0.0, gpu_us(work) - gpu_us(replay)) / NODES, (built - submitted) / BUILDS / NODES


def record(name, service):
    """Probes first, then graphs."""
    counts = Counter(service.lengths)
    sample = counts.most_common(SAMPLES)
    weight = sum(count for _, count in sample)
    submit = gpu = 0.0
    for length, count in sample:
        work = partial(service.submit, service.lengths.index(length))
        submit += count / weight * submit_us(work)
        gpu += count / weight * gpu_us(work)
    launch, closer, node = prices()
    facts = {
        "name": name,
        "host_us": submit_us(partial(service.prepare, 0)) if service.host_us else 0.0,
        "submit_us": submit,
        "gpu_us": gpu,
        "kernels": service.kernels,
        "launch_us": launch,
        "closer_us": closer,
        "build_us": submit + service.kernels * node,
        "counts": sorted(counts.values(), reverse=True),
        "room": service.room,
        "measured": clock([partial(serve_all, service), partial(serve_with_graphs, service)], 5, True)[1],
    }
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in facts.items()}


def services():
    rng = np.random.default_rng(28)
    pool = rng.permutation(np.arange(300, 4000)).tolist()
    three = [1024, 2048, 4096] * 20
    popular = 1 / np.arange(1, 21)
    long_tail = rng.choice(np.arange(200, 4001, 200), 80, p=popular / popular.sum()).tolist()
    return {
        "小内核，三种形状": Service(three, 30),
        "同上，批量大": Service(three, 20, hold_us=60),
        "同上，每次上传 16 MiB": Service(three, 10, copy_bytes=16 << 20),
        "一个小内核，CPU 另有活": Service(three, 1, host_us=100),
        "厚框架，小内核": Service([2000, 3000] * 30, 20, dispatch_us=25, hold_us=6),
        "厚框架，CPU 另有很多活": Service([2000, 3000] * 20, 10, dispatch_us=12, host_us=800),
        "每个请求一个新形状": Service(pool[:50], 30, dispatch_us=10),
        "一半请求只来一次": Service(rng.permutation(pool[:40] + [4000] * 40).tolist(), 20, dispatch_us=15),
        "长尾的形状，放得下 3 张": Service(long_tail, 20, dispatch_us=15, room=3),
        "长短混着来": Service(rng.permutation([256] * 10 + [2048] * 10 + [4096] * 20).tolist(), 15, hold_us=70),
    }


def main():
    with stream:
        step((1,), (BLOCK,), (x, np.uint32(0), np.uint32(BLOCK), np.uint32(0)))
    plug(1)
    stream.synchronize()
    version = must(runtime.cudaDriverGetVersion())
    recorded = {
        "gpu": cp.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": f"CUDA {version // 1000}.{version % 1000 // 10}",
        "recorded_at": date.today().isoformat(),
        "synthetic": False,
        "workloads": [record(name, service) for name, service in services().items()],
    }
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("workloads.json")
    out.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for each in recorded["workloads"]:
        print(each["name"], {key: value for key, value in each.items() if key not in ("name", "counts")})


main()
