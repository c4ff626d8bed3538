"""TensorRT's peers: enqueued kernel by kernel, captured anew whenever the shape changes, and the course's method.

All three use one plan, one set of buffers at fixed addresses and the same four steps: the input goes up, the engine runs,
the answer is taken out of its output, and comes down.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import cupy as cp
import cupyx
import numpy as np
import tensorrt as trt

from launchlab import lab
from launchlab.peers import plans
from launchlab.peers.buckets import BUCKETS, bucket_of
from launchlab.peers.stream import HEIGHT, RANGE, STEP

CLASSES, HIDDEN = 6625, 768

LIKELIEST = cp.RawKernel(
    r"""
extern "C" __global__ void likeliest(const float *rows, int classes, int *ids, float *probs) {
    __shared__ float most[8];
    __shared__ int where[8];
    const float *row = rows + (size_t)blockIdx.x * classes;
    float value = -1.0f;
    int place = classes;
    for (int c = threadIdx.x; c < classes; c += 256)
        if (row[c] > value) { value = row[c]; place = c; }
    for (int lanes = 16; lanes; lanes /= 2) {
        float other = __shfl_down_sync(~0u, value, lanes);
        int there = __shfl_down_sync(~0u, place, lanes);
        if (other > value || (other == value && there < place)) { value = other; place = there; }
    }
    if (threadIdx.x % 32 == 0) { most[threadIdx.x / 32] = value; where[threadIdx.x / 32] = place; }
    __syncthreads();
    if (threadIdx.x) return;
    for (int warp = 1; warp < 8; warp++)
        if (most[warp] > value || (most[warp] == value && where[warp] < place)) { value = most[warp]; place = where[warp]; }
    ids[blockIdx.x] = place;
    probs[blockIdx.x] = value;
}
""",
    "likeliest",
)


def must(result, what: str):
    """Return result, unless it is False or None, TensorRT's ways of refusing: then RuntimeError with its reasons."""
    if result is False or result is None:
        raise RuntimeError(f"{what}: refused. {' '.join(lab.trt_errors())}")
    return result


class _Desk:
    """Buffers at fixed addresses for sizes up to the largest, and the steps of a request on `stream`."""

    def __init__(self, sent: int, came: int, scores: int, dtype: type):
        """sent, came: bytes that go up and come down at most; scores: elements of the engine's output, of `dtype`."""
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.sent_host, self.came_host = cupyx.zeros_pinned(sent, np.uint8), cupyx.zeros_pinned(came, np.uint8)
        with self.stream:
            self.sent, self.came, self.scores = cp.zeros(sent, cp.uint8), cp.zeros(came, cp.uint8), cp.zeros(scores, dtype)
        self.stream.synchronize()

    def up(self, count: int) -> None:
        """Copy the first bytes of sent_host to the GPU."""
        kind = cp.cuda.runtime.memcpyHostToDevice
        cp.cuda.runtime.memcpyAsync(self.sent.data.ptr, self.sent_host.ctypes.data, count, kind, self.stream.ptr)

    def down(self, source: int, count: int) -> None:
        """Copy bytes at a device address into came_host."""
        kind = cp.cuda.runtime.memcpyDeviceToHost
        cp.cuda.runtime.memcpyAsync(self.came_host.ctypes.data, source, count, kind, self.stream.ptr)


class _Rec:
    """A line of text, filled up with 0 on the right → each step's likeliest class and its probability."""

    def __init__(self):
        largest = RANGE["rec"][1]
        steps = largest // STEP
        self.desk = _Desk(3 * HEIGHT * largest * 4, 2 * steps * 4, steps * CLASSES, np.float32)
        self._floats = self.desk.sent_host.view(np.float32)
        LIKELIEST.compile()  # not at the first request's cost

    def put(self, array: np.ndarray, size: int) -> None:
        """Fill the input, `size` pixels wide."""
        width = array.shape[3]
        x = self._floats[: 3 * HEIGHT * size].reshape(1, 3, HEIGHT, size)
        x[..., :width] = array
        x[..., width:] = 0

    def addresses(self) -> dict[str, int]:
        """Of the engine's inputs, by name."""
        return {"x": self.desk.sent.data.ptr}

    def submit(self, context: "trt.IExecutionContext", size: int) -> bool:
        """All steps of a request. Returns what the engine answered to its enqueue."""
        desk, steps = self.desk, size // STEP
        desk.up(3 * HEIGHT * size * 4)
        queued = context.execute_async_v3(desk.stream.ptr)
        with desk.stream:
            LIKELIEST((steps,), (256,), (desk.scores, np.int32(CLASSES), desk.came, desk.came[steps * 4 :]))
        desk.down(desk.came.data.ptr, 2 * steps * 4)
        return queued

    def get(self, size: int) -> tuple[np.ndarray, ...]:
        """(class, probability) of each step."""
        steps = size // STEP
        came = self.desk.came_host
        return came[: steps * 4].view(np.int32).copy(), came[steps * 4 : 2 * steps * 4].view(np.float32).copy()


class _Bert:
    """Token numbers, filled up with masked ones → the first token's vector."""

    def __init__(self):
        largest = RANGE["bert"][1]
        self.desk = _Desk(largest * (4 + 2), HIDDEN * 2, largest * HIDDEN, np.float16)
        self._mask_at = largest * 4  # a multiple of 256, as TensorRT wants addresses
        self._ids, self._mask = (
            self.desk.sent_host[: self._mask_at].view(np.int32),
            self.desk.sent_host[self._mask_at :].view(np.float16),
        )

    def put(self, array: np.ndarray, size: int) -> None:
        """Fill the inputs, `size` tokens long."""
        length = array.shape[1]
        self._ids[:length], self._ids[length:size] = array[0], 0
        self._mask[:length], self._mask[length:size] = 1, 0

    def addresses(self) -> dict[str, int]:
        """Of the engine's inputs, by name."""
        return {"ids": self.desk.sent.data.ptr, "mask": self.desk.sent.data.ptr + self._mask_at}

    def submit(self, context: "trt.IExecutionContext", size: int) -> bool:
        """All steps of a request. Returns what the engine answered to its enqueue."""
        desk = self.desk
        desk.up(desk.sent_host.nbytes)
        queued = context.execute_async_v3(desk.stream.ptr)
        desk.down(desk.scores.data.ptr, HIDDEN * 2)
        return queued

    def get(self, size: int) -> tuple[np.ndarray, ...]:
        """The vector, float16."""
        return (self.desk.came_host.view(np.float16).copy(),)


class _Served:
    """What the three peers share: the engine, the buffers, and contexts that are bound to them."""

    def __init__(self, model: str, folder: Path):
        self._model, self._engine = model, plans.load(folder, model)
        self._work = _Rec() if model == "rec" else _Bert()
        self._stream = self._work.desk.stream

    def _context(self, profile: int, scratch: cp.ndarray | None = None) -> "trt.IExecutionContext":
        """A context on a profile, its addresses bound; it works in `scratch` (uint8), or in memory of its own."""
        if scratch is None:
            context = must(self._engine.create_execution_context(), "a context")
        else:
            context = must(
                self._engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED), "a context"
            )
        if context.active_optimization_profile != profile:
            must(context.set_optimization_profile_async(profile, self._stream.ptr), "the profile")
            self._stream.synchronize()
        for name, address in self._work.addresses().items():
            must(context.set_tensor_address(name, address), f"the address of {name}")
        must(context.set_tensor_address(self._output(), self._work.desk.scores.data.ptr), "the address of the output")
        return context

    def _output(self) -> str:
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        return next(name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT)

    def _shape(self, context: "trt.IExecutionContext", size: int) -> None:
        for name, shape in plans.shapes(self._model, size).items():
            must(context.set_input_shape(name, shape), f"the shape {shape} of {name}")

    def _captured(self, work: Callable[[], bool]) -> cp.cuda.Graph:
        """Run work() once as a warm-up, then capture it. RuntimeError if the engine refuses either."""
        must(work(), "the warm-up")
        self._stream.synchronize()
        self._stream.begin_capture()
        try:
            queued = work()
        finally:
            graph = self._stream.end_capture()
        must(queued, "the capture")
        return graph


class Eager(_Served):
    """A context for each profile; a request sets the shape, if it changed, and enqueues."""

    def __init__(self, model: str, folder: Path):
        super().__init__(model, folder)
        self._contexts = [self._context(profile) for profile in range(len(plans.PROFILES[model]))]
        self._sizes = [0] * len(self._contexts)

    def _ready(self, size: int) -> "trt.IExecutionContext":
        profile = plans.profile_of(self._model, size)
        if self._sizes[profile] != size:
            self._shape(self._contexts[profile], size)
            self._sizes[profile] = size
        return self._contexts[profile]

    def serve(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """The answer to one request, in host memory."""
        size = array.shape[-1]
        self._work.put(array, size)
        must(self._work.submit(self._ready(size), size), "the enqueue")
        self._stream.synchronize()
        return self._work.get(size)

    def facts(self) -> dict[str, int]:
        """Nothing is kept for a shape."""
        return {}


class Recaptured(Eager):
    """One graph at a time: a request whose shape differs from the one before it warms up, captures and instantiates anew."""

    def __init__(self, model: str, folder: Path):
        super().__init__(model, folder)
        self._size, self._graph, self._captures = 0, None, 0

    def serve(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """The answer to one request, in host memory."""
        size = array.shape[-1]
        self._work.put(array, size)
        if size != self._size:
            self._size, self._graph = 0, None
            self._graph = self._captured(partial(self._work.submit, self._ready(size), size))
            self._size, self._captures = size, self._captures + 1
        self._graph.launch(self._stream)
        self._stream.synchronize()
        return self._work.get(size)

    def facts(self) -> dict[str, int]:
        """How often it captured."""
        return {"captures": self._captures}


class Course(_Served):
    """The course's method: a graph for each bucket, captured before the first request, and one launch a request.

    Largest bucket first; every bucket has a context of its own, and all work in one scratch buffer, since no two run at a
    time. A request is filled up to the smallest bucket that holds it: masked tokens (bert), zeros (rec).
    """

    def __init__(self, model: str, folder: Path):
        super().__init__(model, folder)
        with self._stream:
            self._scratch = cp.empty(max(1, self._engine.device_memory_size_v2), cp.uint8)
        self._stream.synchronize()
        self._buckets, self._kept, self._graphs = BUCKETS[model], [], {}
        for bucket in reversed(self._buckets):
            context = self._context(plans.profile_of(model, bucket), self._scratch)
            self._shape(context, bucket)
            context.update_device_memory_size_for_shapes()
            context.set_device_memory(self._scratch.data.ptr, self._scratch.nbytes)
            self._graphs[bucket] = self._captured(partial(self._work.submit, context, bucket))
            self._kept.append(context)

    def serve(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """The answer to one request, in host memory."""
        bucket = bucket_of(self._model, array.shape[-1])
        self._work.put(array, bucket)
        self._graphs[bucket].launch(self._stream)
        self._stream.synchronize()
        return self._work.get(bucket)

    def facts(self) -> dict[str, int]:
        """How many graphs are kept."""
        return {"graphs": len(self._graphs)}
