"""Programs of this course to be recorded by Nsight Systems; export_timelines.py makes the chapter's exports of it.

    python record_timelines.py build FOLDER             builds the two engines into FOLDER (once, without nsys)
    nsys profile -t cuda,nvtx --cuda-graph-trace=node --sample=none --cpuctxsw=none -f true -o node \
        python record_timelines.py run FOLDER node.json      every program once, each in an NVTX range of its name

`run` without nsys measures what the programs take when nobody watches; `run FOLDER OUT.json eager graph` takes only
the programs named. Needs TensorRT, CuPy, this course's package and a GPU that nobody else uses. `build` takes about
15 s, `run` about 5 s.

NVTX ranges come from cupy.cuda.nvtx: nsys 2023.4 does not see those of the package nvtx 0.2.17. Within a program the
phases are named after what the CPU does: upload, enqueue, capture, wait, download, decode, prepare.
"""

import json
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import cupy as cp
import numpy as np
import tensorrt as trt
from cupy.cuda import nvtx
from launchlab import lab
from launchlab.lab import models

MINI = {"layers": 6, "hidden": 128, "heads": 2, "batch": 1, "length": 32}  # many short kernels
ROWS, WIDTH, LAYERS = 4096, 1024, 6  # few long ones
REQUESTS = 6
RUNTIME = trt.Runtime(lab.trt_logger())


def must(result, what):
    """Return result; end the program if it is False or None, TensorRT's ways of refusing."""
    if result is False or result is None:
        raise SystemExit(f"failed: {what}: {lab.trt_errors()}")
    return result


@contextmanager
def phase(name):
    """An NVTX range on this thread."""
    nvtx.RangePush(name)
    try:
        yield
    finally:
        nvtx.RangePop()


def describe_wide(builder, kept):
    """An MLP, float32: x (ROWS, WIDTH) → y of the same shape. kept: a list that must live until the build is done."""
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    y, none = network.add_input("x", trt.DataType.FLOAT, (ROWS, WIDTH)), trt.MatrixOperation.NONE
    for seed in range(LAYERS):
        kept.append(np.random.default_rng(seed).normal(0, (2 / WIDTH) ** 0.5, (WIDTH, WIDTH)).astype(np.float32))
        weights = network.add_constant((WIDTH, WIDTH), trt.Weights(kept[-1])).get_output(0)
        y = network.add_matrix_multiply(y, none, weights, none).get_output(0)
        y = network.add_activation(y, trt.ActivationType.RELU).get_output(0)
    y.name = "y"
    network.mark_output(y)
    return network


def build(folder):
    """Build mini.plan and wide.plan into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    builder, kept = trt.Builder(lab.trt_logger()), []
    for name in ("mini", "wide"):
        began = time.perf_counter()
        network = models.bert(builder, **MINI) if name == "mini" else describe_wide(builder, kept)
        config = builder.create_builder_config()
        config.builder_optimization_level = 1
        (folder / f"{name}.plan").write_bytes(bytes(must(builder.build_serialized_network(network, config), name)))
        print(f"{name}: built in {time.perf_counter() - began:.1f} s", flush=True)


class Engine:
    """An engine with one context on one stream, its buffers, and a graph of one inference; warmed up."""

    def __init__(self, plan):
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.engine = must(RUNTIME.deserialize_cuda_engine(plan), "load")
        self.context = must(self.engine.create_execution_context(), "context")
        self.context.nvtx_verbosity = trt.ProfilingVerbosity.NONE  # a range per layer would slow the enqueueing down
        self.arrays = {}
        for i in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(i)
            self.arrays[name] = cp.ones(tuple(self.engine.get_tensor_shape(name)), trt.nptype(self.engine.get_tensor_dtype(name)))
            must(self.context.set_tensor_address(name, self.arrays[name].data.ptr), name)
        cp.cuda.Device().synchronize()
        for _ in range(3):
            self.enqueue()
        self.wait()
        self.graph = self.capture()
        for _ in range(3):
            self.graph.launch(self.stream)
        self.wait()

    def enqueue(self):
        must(self.context.execute_async_v3(self.stream.ptr), "enqueue")

    def capture(self):
        with self.stream:
            self.stream.begin_capture()
            ok = self.context.execute_async_v3(self.stream.ptr)
            graph = self.stream.end_capture()
        must(ok, "capture")
        return graph

    def wait(self):
        self.stream.synchronize()

    def copy(self, destination, source, nbytes, upload):
        kind = cp.cuda.runtime.memcpyHostToDevice if upload else cp.cuda.runtime.memcpyDeviceToHost
        cp.cuda.runtime.memcpyAsync(destination, source, nbytes, kind, self.stream.ptr)


def pinned(shape, dtype):
    """A NumPy array in page-locked memory."""
    count = int(np.prod(shape))
    memory = cp.cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype, count).reshape(shape)


class Programs:
    """The programs; each method runs all the requests of one of them, from an idle GPU to an idle GPU."""

    def __init__(self, folder):
        mini, wide = ((folder / f"{name}.plan").read_bytes() for name in ("mini", "wide"))
        self.mini, self.second, self.big = Engine(mini), Engine(mini), Engine(wide)
        self.ids, self.answer = pinned((32,), np.int32), pinned((32, 128), np.float16)
        self.ids[:] = 1
        self.rows, self.pageable = pinned((1024, WIDTH), np.float32), np.ones((1024, WIDTH), np.float32)
        self.rows[:] = 1
        self.tops = [pinned((96, WIDTH), np.float32) for _ in range(2)]

    # BERT of many short kernels, one request after the other, the answer copied back each time
    def _serve_mini(self, run):
        m = self.mini
        for _ in range(REQUESTS):
            with phase("request"):
                with phase("upload"):
                    m.copy(m.arrays["ids"].data.ptr, self.ids.ctypes.data, self.ids.nbytes, upload=True)
                run()
                with phase("download"):
                    m.copy(self.answer.ctypes.data, m.arrays["y"].data.ptr, self.answer.nbytes, upload=False)
                with phase("wait"):
                    m.wait()

    def eager(self):
        def run():
            with phase("enqueue"):
                self.mini.enqueue()

        self._serve_mini(run)

    def graph(self):
        def run():
            with phase("enqueue"):
                self.mini.graph.launch(self.mini.stream)

        self._serve_mini(run)

    def recapture(self):
        """Captures and instantiates a graph for each request, as if the graph could not be kept."""

        def run():
            with phase("capture"):
                self.fresh = self.mini.capture()
            with phase("enqueue"):
                self.fresh.launch(self.mini.stream)

        self._serve_mini(run)

    # the same engine in two contexts on two streams, waited for once
    def two_streams(self):
        for _ in range(REQUESTS):
            for each in (self.mini, self.second):
                with phase("request"), phase("enqueue"):
                    each.graph.launch(each.stream)
        with phase("wait"):
            self.mini.wait()
            self.second.wait()

    # an MLP of few long kernels
    def _serve_big(self, run):
        for _ in range(REQUESTS):
            with phase("request"), phase("enqueue"):
                run()
        with phase("wait"):
            self.big.wait()

    def big_eager(self):
        self._serve_big(self.big.enqueue)

    def big_graph(self):
        self._serve_big(lambda: self.big.graph.launch(self.big.stream))

    # the same MLP, whose answer the CPU has to decode
    def _start(self, slot):
        b = self.big
        with phase("enqueue"):
            b.graph.launch(b.stream)
        with phase("download"):
            b.copy(self.tops[slot].ctypes.data, b.arrays["y"].data.ptr, self.tops[slot].nbytes, upload=False)

    def _decode(self, slot):
        with phase("decode"):
            return float(np.sort(self.tops[slot], axis=1)[:, -5:].sum())

    def serial(self):
        for _ in range(REQUESTS):
            with phase("request"):
                self._start(0)
                with phase("wait"):
                    self.big.wait()
                self._decode(0)

    def pipelined(self):
        """Starts the next request before it decodes the last; an event tells which answers have arrived."""
        arrived = [cp.cuda.Event(disable_timing=True) for _ in range(2)]
        self._start(0)
        arrived[0].record(self.big.stream)
        for i in range(REQUESTS):
            with phase("request"):
                if i + 1 < REQUESTS:
                    self._start((i + 1) % 2)
                    arrived[(i + 1) % 2].record(self.big.stream)
                with phase("wait"):
                    arrived[i % 2].synchronize()
                self._decode(i % 2)

    # 4 MiB of input per request, from pageable and from page-locked memory
    def _serve_copies(self, source):
        b = self.big
        for _ in range(REQUESTS):
            with phase("request"):
                with phase("upload"):
                    b.copy(b.arrays["x"].data.ptr, source.ctypes.data, source.nbytes, upload=True)
                with phase("enqueue"):
                    b.graph.launch(b.stream)
        with phase("wait"):
            b.wait()

    def pageable_copy(self):
        self._serve_copies(self.pageable)

    def pinned_copy(self):
        self._serve_copies(self.rows)


NAMES = (
    "eager", "graph", "recapture", "two_streams", "big_eager", "big_graph", "serial", "pipelined", "pageable_copy", "pinned_copy",
)  # fmt: skip


def run(folder, out, names):
    """Run the programs and write what each took, in µs per request, and the GPU and versions."""
    began = time.perf_counter()
    programs, took, failed = Programs(folder), {}, {}
    for name in names:
        try:
            with phase("warm-up"):
                getattr(programs, name)()
                getattr(programs, name)()
            cp.cuda.Device().synchronize()
            time.sleep(0.002)
            start = time.perf_counter()
            with phase(name):
                getattr(programs, name)()
            took[name] = (time.perf_counter() - start) * 1e6 / REQUESTS
            cp.cuda.Device().synchronize()
        except Exception:  # noqa: BLE001 - one program less is better than no recording
            failed[name] = traceback.format_exc()
            print(failed[name], flush=True)
    properties = cp.cuda.runtime.getDeviceProperties(0)
    out.write_text(
        json.dumps(
            {
                "gpu": properties["name"].decode(),
                "driver": cp.cuda.runtime.driverGetVersion(),
                "versions": {"tensorrt": trt.__version__, "cupy": cp.__version__},
                "requests": REQUESTS,
                "us_per_request": {name: round(us, 1) for name, us in took.items()},
                "failed": failed,
            },
            indent=1,
        )
        + "\n"
    )
    print({name: round(us) for name, us in took.items()}, f"{time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    command, folder, *rest = sys.argv[1:] or ["", "."]
    if command == "build":
        build(Path(folder))
    elif command == "run" and rest:
        run(Path(folder), Path(rest[0]), rest[1:] or NAMES)
    else:
        sys.exit(__doc__)
