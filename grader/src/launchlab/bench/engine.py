"""A TensorRT engine built within a deadline, and contexts of it, each with a stream and buffers of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from launchlab import lab

if TYPE_CHECKING:
    import numpy as np
    import tensorrt as trt

LEVEL = 3  # the builder's own choice of effort
T = TypeVar("T")


@dataclass(frozen=True)
class Built:
    """An engine. seconds: of its build, with the timing cache that was there; plan_bytes: of its plan."""

    engine: trt.ICudaEngine
    seconds: float
    plan_bytes: int


def must(result: T, what: str) -> T:
    """Return result, unless it is False or None, TensorRT's ways of refusing: then RuntimeError with its reasons."""
    if result is False or result is None:
        raise RuntimeError(f"{what}没有成功：" + ("；".join(lab.trt_errors()) or "TensorRT 没有说原因"))
    return result


def build(describe: Callable[[Any], Any], deadline: float) -> Built:
    """Build describe(builder), an INetworkDefinition of static shapes.

    deadline: of time.monotonic(), after which the build is given up. RuntimeError where it is, or where TensorRT refuses.
    """
    begun = time.monotonic()
    network = describe(_builder())
    config = _builder().create_builder_config()
    config.builder_optimization_level = LEVEL
    config.progress_monitor = _until(deadline)
    lab.trt_errors()
    with lab.timing_cache(config):
        plan = _builder().build_serialized_network(network, config)
    if plan is None and time.monotonic() >= deadline:
        raise RuntimeError("到了时间限制，构建还没有完成，已放弃。请用 --seconds 给更多时间")
    plan = bytes(must(plan, "构建"))
    engine = must(_runtime().deserialize_cuda_engine(plan), "载入计划文件")
    return Built(engine, time.monotonic() - begun, len(plan))


class Seat:
    """What one request in flight needs: a context, a stream, and a buffer for each tensor.

    inputs: {name: numpy array} for every input. enqueue(): submits one inference, returns at once; False is a refusal.
    output: cupy array, of the one output "y".
    """

    def __init__(self, engine: trt.ICudaEngine, inputs: Mapping[str, np.ndarray]):
        import cupy as cp
        import tensorrt as trt

        self.stream = cp.cuda.Stream(non_blocking=True)
        self._context = must(engine.create_execution_context(), "创建执行上下文")
        self._inputs = {name: cp.asarray(values) for name, values in inputs.items()}
        self.output = cp.zeros(tuple(engine.get_tensor_shape("y")), trt.nptype(engine.get_tensor_dtype("y")))
        cp.cuda.runtime.deviceSynchronize()  # filled on the default stream, which this one does not wait for
        for name, array in {**self._inputs, "y": self.output}.items():
            must(self._context.set_tensor_address(name, array.data.ptr), f"设 {name} 的地址")
        self.enqueue = partial(self._context.execute_async_v3, self.stream.ptr)


@cache
def _builder() -> trt.Builder:
    """The one builder of this process: loading its library takes seconds."""
    import tensorrt as trt

    return trt.Builder(lab.trt_logger())


@cache
def _runtime() -> trt.Runtime:
    import tensorrt as trt

    return trt.Runtime(lab.trt_logger())


def _until(deadline: float):
    """An IProgressMonitor that gives a build up at the first step after the deadline."""
    import tensorrt as trt

    class Until(trt.IProgressMonitor):
        def __init__(self):
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name, parent_phase, num_steps):
            pass

        def step_complete(self, phase_name, step):
            return time.monotonic() < deadline

        def phase_finish(self, phase_name):
            pass

    return Until()
