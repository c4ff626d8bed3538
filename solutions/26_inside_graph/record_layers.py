"""Record `layers.json` on the GPU of this machine: time and traffic of each layer of real engines.

Run in an environment with CuPy and TensorRT: ``python solutions/26_inside_graph/record_layers.py``. With --placeholder it
needs no GPU and writes made-up data, marked as such.

layers.json: gpu, tensorrt, recorded_at, gb_per_s (of a copy within the device, bytes read and written), synthetic, and
models: name → {"graph_us": time of one launch of the engine's graph, "layers": [[name, µs, MB], …] in the order in which
they run}. µs is the median of what IProfiler reports; MB (10⁶ bytes) is what the layer's inputs and outputs hold by the
inspector, 0 where it does not tell.
"""

import json
import math
import random
import sys
import time
from pathlib import Path
from statistics import median

TARGET = Path(__file__).resolve().parent / "layers.json"
RUNS = 50


def megabytes(layer: dict) -> float:
    """Of an inspector's layer: what its inputs and outputs hold, 10⁶ bytes."""
    total = 0
    for tensor in [*layer.get("Inputs", []), *layer.get("Outputs", [])]:
        shape, kind = tensor.get("Dimensions", []), str(tensor.get("Format/Datatype", "")).lower()
        size = 2 if "half" in kind or "fp16" in kind else 1 if "int8" in kind or "bool" in kind else 8 if "int64" in kind else 4
        if shape and all(isinstance(each, int) and each > 0 for each in shape):
            total += size * math.prod(shape)
    return total / 1e6


def bandwidth(cp, stream) -> float:
    """GB/s of a copy of 256 MiB within the device, read and written bytes together."""
    with stream:
        source = cp.zeros(1 << 28, cp.uint8)
        target = cp.zeros_like(source)
    times = []
    begin, end = cp.cuda.Event(), cp.cuda.Event()
    for _ in range(11):
        begin.record(stream)
        target.data.copy_from_device_async(source.data, source.nbytes, stream)
        end.record(stream)
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(begin, end) / 1e3)
    return 2 * source.nbytes / median(times[1:]) / 1e9


def layers_of(trt, cp, lab, stream, builder, network) -> dict:
    """Build the network, then time its layers and its graph."""
    config = builder.create_builder_config()
    config.builder_optimization_level = 1
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    with lab.timing_cache(config):
        plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise SystemExit("the build failed: " + "; ".join(lab.trt_errors()))
    runtime = trt.Runtime(lab.trt_logger())
    engine = runtime.deserialize_cuda_engine(plan)
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    traffic = {layer["Name"]: megabytes(layer) for layer in json.loads(text)["Layers"] if isinstance(layer, dict)}
    with stream:
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        arrays = {name: cp.ones(tuple(engine.get_tensor_shape(name)), trt.nptype(engine.get_tensor_dtype(name))) for name in names}
    stream.synchronize()

    class Times(trt.IProfiler):
        def __init__(self):
            trt.IProfiler.__init__(self)
            self.reports = []

        def report_layer_time(self, layer_name, ms):
            self.reports.append((layer_name, ms * 1e3))

    def bound():
        context = engine.create_execution_context()
        for name, array in arrays.items():
            context.set_tensor_address(name, array.data.ptr)
        return context

    def enqueue(context):
        if not context.execute_async_v3(stream.ptr):
            raise SystemExit("enqueue failed: " + "; ".join(lab.trt_errors()))
        stream.synchronize()

    plain = bound()
    for _ in range(3):
        enqueue(plain)
    with stream:
        stream.begin_capture()
        accepted = plain.execute_async_v3(stream.ptr)
        graph = stream.end_capture()
    if not accepted:
        raise SystemExit("capture failed: " + "; ".join(lab.trt_errors()))
    begin, end, launches = cp.cuda.Event(), cp.cuda.Event(), []
    for _ in range(RUNS):
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        launches.append(1e3 * cp.cuda.get_elapsed_time(begin, end))

    profiled, profiler = bound(), Times()
    profiled.profiler = profiler
    runs = []
    for _ in range(RUNS + 3):
        profiler.reports.clear()
        enqueue(profiled)
        runs.append(list(profiler.reports))
    runs = runs[3:]
    layers = [
        [name, round(median(run[index][1] for run in runs), 3), round(traffic.get(name, 0.0), 4)]
        for index, (name, _) in enumerate(runs[0])
    ]
    return {"graph_us": round(median(launches), 2), "layers": layers}


def recorded() -> dict:
    import cupy as cp
    import tensorrt as trt

    from launchlab import lab
    from launchlab.lab import models

    stream = cp.cuda.Stream(non_blocking=True)
    builder = trt.Builder(lab.trt_logger())
    networks = {"resnet50": lambda: models.resnet50(builder, batch=1), "bert": lambda: models.bert(builder, batch=1, length=128)}
    return {
        "gpu": lab.gpu_name(),
        "tensorrt": trt.__version__,
        "gb_per_s": round(bandwidth(cp, stream), 1),
        "models": {name: layers_of(trt, cp, lab, stream, builder, make()) for name, make in networks.items()},
    }


def placeholder() -> dict:
    """Made-up layers of plausible size."""
    draw = random.Random(26)
    made = {}
    for name, count, typical in (("resnet50", 56, 4.0), ("bert", 74, 6.0)):
        layers = [
            [f"{name}_layer_{i:02d}", round(draw.lognormvariate(math.log(typical), 0.6), 3), round(draw.lognormvariate(0.3, 0.9), 4)]
            for i in range(count)
        ]
        made[name] = {"graph_us": round(sum(us for _, us, _ in layers) * 1.05, 2), "layers": layers}
    return {"gpu": "合成占位数据，不是实测", "tensorrt": "0", "gb_per_s": 3000.0, "synthetic": True, "models": made}


def main() -> None:
    record = placeholder() if "--placeholder" in sys.argv[1:] else recorded()
    record["recorded_at"] = time.strftime("%Y-%m-%d")
    text = json.dumps(record, indent=1, ensure_ascii=False)
    TARGET.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
