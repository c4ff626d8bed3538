"""Record costs.json: what each length costs on engines with one wide profile, three narrow ones, and static shapes.

    python record_costs.py [OUT.json]          (default: costs.json beside this file)

Needs TensorRT, CuPy and a GPU that nobody else uses; nothing of this course. An MLP over tokens in FP16, fixed
weights, lengths and batches as in the chapter. It takes at most 80 s: the engines without which the chapter has
nothing to show are always built, further ones as long as BUDGET_S lasts. The lengths of the table are those for
which there is an engine with that opt. Two clocks, both in µs, medians of ROUNDS, engines taking turns:

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

HIDDEN, INNER, BLOCKS, LEVEL = 512, 2048, 2, 1
SHORTEST, LONGEST = 8, 512
BATCHES = (1, 8)
THREE = ((8, 32, 64), (65, 128, 192), (193, 512, 512))  # lengths: min, opt, max
NEEDED_OPTS = (512, 32, 128)  # those of THREE: without them its cost can't be looked up in the table
MORE_OPTS = (8, 256, 64, 16, 384)  # the most telling first
MORE_STATIC = (128, 32)  # beside LONGEST
BUDGET_S = 60.0  # after so many seconds no further engine is begun
ROUNDS, BURST = 7, 8

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
BUILDER = trt.Builder(LOG)  # one, and it stays: its library takes seconds to load, and goes with the last builder
spin = cp.RawKernel(SPIN, "spin")
stream = cp.cuda.Stream(non_blocking=True)
_rng = np.random.default_rng(14)
WEIGHTS = [
    np.ascontiguousarray(_rng.normal(0, (2 / rows) ** 0.5, (1, rows, columns)), np.float16)
    for rows, columns in ((HIDDEN, INNER), (INNER, HIDDEN)) * BLOCKS
]


def must(ok, what):
    """End the program if ok is False or None; otherwise return it."""
    if ok is None or ok is False:
        raise SystemExit(f"failed: {what}")
    return ok


def build(ranges):
    """Build for the length ranges (min, opt, max), batch 1 … 8 tuned at 8. Returns (engine, plan bytes, seconds).

    Without a timing cache from elsewhere, so that the seconds are those of a first build.
    """
    network = BUILDER.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    x = network.add_input("x", trt.DataType.HALF, (-1, -1, HIDDEN))
    for weights in WEIGHTS:
        constant = network.add_constant(weights.shape, trt.Weights(weights)).get_output(0)
        product = network.add_matrix_multiply(x, trt.MatrixOperation.NONE, constant, trt.MatrixOperation.NONE).get_output(0)
        x = network.add_activation(product, trt.ActivationType.RELU).get_output(0)
    x.name = "y"
    network.mark_output(x)
    config = BUILDER.create_builder_config()
    config.builder_optimization_level = LEVEL
    for least, best, most in ranges:
        profile = BUILDER.create_optimization_profile()
        profile.set_shape("x", (1, least, HIDDEN), (max(BATCHES), best, HIDDEN), (max(BATCHES), most, HIDDEN))
        must(config.add_optimization_profile(profile) >= 0, f"add profile {(least, best, most)}")
    began = time.perf_counter()
    plan = must(BUILDER.build_serialized_network(network, config), f"build {ranges}")
    seconds = time.perf_counter() - began
    engine = must(RUNTIME.deserialize_cuda_engine(bytes(plan)), "deserialize")
    print(f"built {list(ranges)} in {seconds:.1f} s", flush=True)
    return engine, plan.nbytes, seconds


class Engine:
    """An engine to be measured: a context for each profile, and the medians found."""

    def __init__(self, kind, ranges):
        self.engine, plan_bytes, seconds = build(ranges)
        self.ranges = ranges
        self.contexts = []
        for index in range(self.engine.num_optimization_profiles):
            context = must(self.engine.create_execution_context(), "create a context")
            if index:  # a fresh one has profile 0
                must(context.set_optimization_profile_async(index, stream.ptr), f"profile {index}")
                stream.synchronize()  # no shape before the switch is done
            self.contexts.append(context)
        memory = self.engine.device_memory_size_v2 / 2**20
        self.record = {"kind": kind, "profiles": [list(each) for each in ranges], "build_s": round(seconds, 2),
                       "plan_mib": round(plan_bytes / 2**20, 2), "memory_mib": round(memory, 2), "times": {}}

    def at(self, batch, length, x, y):
        """The call that enqueues one inference of this shape, or None where no profile covers the length."""
        for context, (least, _, most) in zip(self.contexts, self.ranges, strict=True):
            if least <= length <= most:
                must(context.set_input_shape("x", (batch, length, HIDDEN)), f"shape {(batch, length)}")
                must(context.set_tensor_address("x", x.data.ptr) and context.set_tensor_address("y", y.data.ptr), "set addresses")
                return lambda: context.execute_async_v3(stream.ptr)
        return None


def engines_within(began):
    """Build the engines, the needed ones first, further ones while there is time. Returns (engines, opts, ascending)."""

    def wide(opt):
        return Engine("wide", [(SHORTEST, opt, LONGEST)])

    def static(length):
        return Engine("static", [(length, length, length)])

    # The first build of a process pays for much that later ones find ready: let it be one whose seconds aren't shown.
    engines = [static(LONGEST), Engine("three", THREE)]
    opts = list(NEEDED_OPTS)
    engines += [wide(opt) for opt in NEEDED_OPTS]
    more = [(static, MORE_STATIC[0]), *((wide, opt) for opt in MORE_OPTS), *((static, length) for length in MORE_STATIC[1:])]
    for number, (kind, length) in enumerate(more):
        if time.perf_counter() - began > BUDGET_S:
            print(f"no time left for {len(more) - number} further engines", flush=True)
            break
        engines.append(kind(length))
        if kind is wide:
            opts.append(length)
    order = ("wide", "three", "static")
    engines.sort(key=lambda each: (order.index(each.record["kind"]), each.ranges[0][1]))
    return engines, sorted(opts)


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
            must(run(), f"enqueue {(batch, length)}")
    stream.synchronize()
    began = time.perf_counter()
    for _, run in runs:
        for _ in range(BURST):
            run()
    # Twice as long as submitting a burst takes; not without bound, should the machine have stumbled just then.
    plug_us = min(5000.0, 300 + 2e6 * (time.perf_counter() - began) / len(runs))
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
    began = time.perf_counter()
    with stream:
        spin((1,), (1,), (np.uint64(1000),))  # loads the kernel
    stream.synchronize()
    engines, lengths = engines_within(began)
    for batch in BATCHES:
        for length in lengths:
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
        "network": {"kind": "mlp", "hidden": HIDDEN, "inner": INNER, "products": len(WEIGHTS), "dtype": "float16", "level": LEVEL},
        "lengths": lengths,
    }
    lines = ",\n".join("  " + json.dumps(engine.record) for engine in engines)
    text = json.dumps(head, ensure_ascii=False)[:-1] + ',\n "engines": [\n' + lines + "\n ]}\n"
    json.loads(text)
    out.write_text(text, encoding="utf-8")
    print(out, len(text), "characters,", len(engines), "engines,", f"{time.perf_counter() - began:.1f} s in all")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("costs.json"))
