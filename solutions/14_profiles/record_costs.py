"""Record costs.json: what each length costs on engines with one wide profile, three narrow ones, and static shapes.

    python record_costs.py [OUT.json]          (default: costs.json beside this file)

Needs TensorRT, CuPy and a GPU that nobody else uses; nothing of this course. A small transformer in FP16, fixed
weights, lengths and batches as in the chapter. Two clocks, both in µs, medians of ROUNDS, engines taking turns:

gpu_us          one inference on the GPU alone: a plug holds the stream back until all are submitted, so no gap
                between two kernels is the CPU's; events around them
end_to_end_us   one inference from the call to the end of a stream synchronisation, by the host's clock
"""

import json
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import cupy as cp
import numpy as np
import tensorrt as trt

HIDDEN, HEADS, LAYERS, LEVEL = 512, 8, 2, 2
LENGTHS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
BATCHES = (1, 8)
THREE = ((8, 32, 64), (65, 128, 192), (193, 384, 512))  # lengths: min, opt, max
STATIC = (64, 128, 256, 512)
ROUNDS, BURST = 9, 8

SPIN = r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}
"""


class Log(trt.ILogger):
    """Prints errors, drops the rest."""

    def __init__(self):
        trt.ILogger.__init__(self)

    def log(self, severity, message):
        if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
            print("TensorRT:", message, flush=True)


LOG = Log()
RUNTIME = trt.Runtime(LOG)
spin = cp.RawKernel(SPIN, "spin")
stream = cp.cuda.Stream(non_blocking=True)


class Layers:
    """Layers of one network; keeps the weights alive, which TensorRT does not copy before the build."""

    def __init__(self, network: trt.INetworkDefinition):
        self.network, self.rng, self.kept = network, np.random.default_rng(14), []

    def constant(self, values):
        values = np.ascontiguousarray(values, np.float16)
        self.kept.append(values)
        return self.network.add_constant(values.shape, trt.Weights(values)).get_output(0)

    def weights(self, rows, columns):
        return self.constant(self.rng.normal(0, rows**-0.5, (1, rows, columns)))

    def product(self, a, b, transposed=trt.MatrixOperation.NONE):
        return self.network.add_matrix_multiply(a, trt.MatrixOperation.NONE, b, transposed).get_output(0)

    def pair(self, a, b, operation):
        return self.network.add_elementwise(a, b, operation).get_output(0)

    def heads(self, x):
        """(batch, length, HIDDEN) -> (batch, HEADS, length, HIDDEN / HEADS)."""
        split = self.network.add_shuffle(x)
        split.reshape_dims = (0, 0, HEADS, HIDDEN // HEADS)
        split.second_transpose = (0, 2, 1, 3)
        return split.get_output(0)

    def block(self, x):
        """One transformer block: attention and a feed-forward part, each with a residual; then normalisation."""
        q, k, v = (self.heads(self.product(x, self.weights(HIDDEN, HIDDEN))) for _ in range(3))
        scores = self.product(q, k, trt.MatrixOperation.TRANSPOSE)
        scale = self.constant(np.full((1, 1, 1, 1), (HIDDEN // HEADS) ** -0.5))
        attention = self.network.add_softmax(self.pair(scores, scale, trt.ElementWiseOperation.PROD))
        attention.axes = 1 << 3
        merged = self.network.add_shuffle(self.product(attention.get_output(0), v))
        merged.first_transpose = (0, 2, 1, 3)
        merged.reshape_dims = (0, 0, HIDDEN)
        x = self.pair(x, self.product(merged.get_output(0), self.weights(HIDDEN, HIDDEN)), trt.ElementWiseOperation.SUM)
        inner = self.network.add_activation(self.product(x, self.weights(HIDDEN, 4 * HIDDEN)), trt.ActivationType.RELU)
        outer = self.product(inner.get_output(0), self.weights(4 * HIDDEN, HIDDEN))
        x = self.pair(x, outer, trt.ElementWiseOperation.SUM)
        ones, zeros = self.constant(np.ones((1, 1, HIDDEN))), self.constant(np.zeros((1, 1, HIDDEN)))
        return self.network.add_normalization(x, ones, zeros, 1 << 2).get_output(0)


def build(ranges):
    """Build for the length ranges (min, opt, max), batch 1 … 8 tuned at 8. Returns (engine, plan bytes, seconds).

    Without a timing cache from elsewhere, so that the seconds are those of a first build.
    """
    builder = trt.Builder(LOG)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    layers = Layers(network)
    x = network.add_input("x", trt.DataType.HALF, (-1, -1, HIDDEN))
    for _ in range(LAYERS):
        x = layers.block(x)
    x.name = "y"
    network.mark_output(x)
    config = builder.create_builder_config()
    config.builder_optimization_level = LEVEL
    for least, best, most in ranges:
        profile = builder.create_optimization_profile()
        profile.set_shape("x", (1, least, HIDDEN), (max(BATCHES), best, HIDDEN), (max(BATCHES), most, HIDDEN))
        config.add_optimization_profile(profile)
    began = time.perf_counter()
    plan = builder.build_serialized_network(network, config)
    seconds = time.perf_counter() - began
    if plan is None:
        raise SystemExit("the build failed")
    engine = RUNTIME.deserialize_cuda_engine(bytes(plan))
    print(f"built {list(ranges)} in {seconds:.1f} s", flush=True)
    return engine, plan.nbytes, seconds


class Engine:
    """An engine to be measured: a context for each profile, and the medians found."""

    def __init__(self, kind, ranges):
        self.engine, plan_bytes, seconds = build(ranges)
        self.ranges = ranges
        self.contexts = []
        for index in range(len(ranges)):
            context = self.engine.create_execution_context()
            if not context.set_optimization_profile_async(index, stream.ptr):
                raise SystemExit(f"no profile {index}")
            self.contexts.append(context)
        stream.synchronize()
        memory = self.engine.device_memory_size_v2 / 2**20
        self.record = {"kind": kind, "profiles": [list(each) for each in ranges], "build_s": round(seconds, 2),
                       "plan_mib": round(plan_bytes / 2**20, 2), "memory_mib": round(memory, 2), "times": {}}

    def at(self, batch, length, x, y):
        """The call that enqueues one inference of this shape, or None where no profile covers the length."""
        for context, (least, _, most) in zip(self.contexts, self.ranges, strict=True):
            if least <= length <= most:
                if not context.set_input_shape("x", (batch, length, HIDDEN)):
                    raise SystemExit(f"shape {(batch, length)} refused")
                context.set_tensor_address("x", x.data.ptr)
                context.set_tensor_address("y", y.data.ptr)
                return lambda: context.execute_async_v3(stream.ptr)
        return None


def end_to_end_us(run):
    began = time.perf_counter()
    run()
    stream.synchronize()
    return (time.perf_counter() - began) * 1e6


def gpu_us(run, plug_us):
    first, last = cp.cuda.Event(), cp.cuda.Event()
    with stream:
        spin((1,), (1,), (np.uint64(plug_us * 1000),))
    first.record(stream)
    for _ in range(BURST):
        run()
    last.record(stream)
    last.synchronize()
    return cp.cuda.get_elapsed_time(first, last) * 1000 / BURST


def measure(engines, batch, length):
    """Put the medians of this shape into the records of all engines that serve it."""
    with stream:
        x = cp.asarray(np.random.default_rng(length).normal(size=(batch, length, HIDDEN)).astype(np.float16))
        y = cp.empty_like(x)
    stream.synchronize()
    runs = [(engine, run) for engine in engines if (run := engine.at(batch, length, x, y)) is not None]
    for _, run in runs:
        for _ in range(3):
            if not run():
                raise SystemExit(f"enqueue of {(batch, length)} failed")
    stream.synchronize()
    began = time.perf_counter()
    for _, run in runs:
        for _ in range(BURST):
            run()
    plug_us = 300 + 2e6 * (time.perf_counter() - began) / len(runs)  # twice as long as submitting a burst takes
    stream.synchronize()
    samples = {id(engine): ([], []) for engine, _ in runs}
    for number in range(ROUNDS):
        for engine, run in runs if number % 2 == 0 else reversed(runs):
            on_gpu, whole = samples[id(engine)]
            on_gpu.append(gpu_us(run, plug_us))
            whole.append(min(end_to_end_us(run) for _ in range(2)))
    for engine, _ in runs:
        times = engine.record["times"].setdefault(str(batch), {"lengths": [], "gpu_us": [], "end_to_end_us": []})
        times["lengths"].append(length)
        for name, values in zip(("gpu_us", "end_to_end_us"), samples[id(engine)], strict=True):
            times[name].append(round(statistics.median(values), 2))


def main(out):
    with stream:
        spin((1,), (1,), (np.uint64(1000),))  # loads the kernel
    stream.synchronize()
    engines = [Engine("wide", [(LENGTHS[0], opt, LENGTHS[-1])]) for opt in LENGTHS]
    engines.append(Engine("three", THREE))
    engines += [Engine("static", [(length, length, length)]) for length in STATIC]
    for batch in BATCHES:
        for length in LENGTHS:
            measure(engines, batch, length)
    runtime, driver = cp.cuda.runtime.runtimeGetVersion(), "unknown"
    try:
        driver = Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        pass
    head = {
        "gpu": cp.cuda.runtime.getDeviceProperties(0)["name"].decode(), "driver": driver, "recorded_at": date.today().isoformat(),
        "versions": {"tensorrt": trt.__version__, "cupy": cp.__version__, "cuda": f"{runtime // 1000}.{runtime % 1000 // 10}", "numpy": np.__version__},
        "synthetic": False,
        "network": {"kind": "transformer", "hidden": HIDDEN, "heads": HEADS, "layers": LAYERS, "dtype": "float16", "level": LEVEL},
        "lengths": list(LENGTHS),
    }
    lines = ",\n".join("  " + json.dumps(engine.record) for engine in engines)
    out.write_text(json.dumps(head, ensure_ascii=False)[:-1] + ',\n "engines": [\n' + lines + "\n ]}\n", encoding="utf-8")
    json.loads(out.read_text(encoding="utf-8"))
    print(out, out.stat().st_size, "bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("costs.json"))
