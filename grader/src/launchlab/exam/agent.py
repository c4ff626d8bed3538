"""The small agent inside a learner's (or the reference's) process.

It puts, calls, repeats and gets what the examiner asks for. Nothing that it says is taken
for true: the examiner checks bytes against inputs it drew itself, and reads its own clock
and its own memory. So the agent needs no defence against the code beside it, only care
for the honest learner: it keeps its own names, and it never leaves an error unanswered.
"""

from __future__ import annotations

import gc
import json
import linecache
import sys
import traceback
from typing import Any

import numpy as np

from launchlab.exam.memory import checked
from launchlab.exam.wire import BufferRef, Ref, decode, encode

TARGET = "launchlab"
OWN_FILES = ("ipykernel_", "<ipython-input", "<planted")


class NotAGraph(TypeError):
    """Asked about the nodes of something that holds no graph; the text is its class name."""


class Agent:
    """Answers asks about one namespace.

    ``namespace`` is the dictionary that holds the learner's names. Objects that are no plain
    data stay here under a number; device buffers lent by the examiner appear to the learner
    as ordinary ``cupy.ndarray``.
    """

    def __init__(self, namespace: dict[str, Any]):
        self.namespace = namespace
        self._objects: dict[int, Any] = {}
        self._buffers: dict[int, Any] = {}
        self._next = 1

    def perform(self, request: dict, blobs: list[bytes]) -> tuple[Any, list[bytes]]:
        """Do what ``request["op"]`` names; returns the encoded result and its blobs.

        Raises whatever the learner's code raises, and AttributeError for an unknown op.
        """
        operation = getattr(self, "_op_" + request["op"])
        arguments = {key: self._resolve(decode(value, blobs)) for key, value in request.items() if key != "op"}
        out: list[bytes] = []
        return encode(operation(**arguments), out, self._keep), out

    def answer(self, text: str, blobs: list[bytes]) -> tuple[str, list[bytes]]:
        """`perform` for a JSON request; an exception becomes an ``error`` in the reply."""
        try:
            request = json.loads(text)
            number = request.pop("n")
            value, out = self.perform(request, blobs)
            return json.dumps({"n": number, "value": value}), out
        except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are answers too
            return json.dumps({"n": number, "error": describe(error)}), []

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._objects[value.id]
        if isinstance(value, BufferRef):
            return self._buffers[value.id]
        if type(value) is list:
            return [self._resolve(item) for item in value]
        if type(value) is dict:
            return {key: self._resolve(item) for key, item in value.items()}
        return value

    def _keep(self, value: Any) -> Ref:
        number, self._next = self._next, self._next + 1
        self._objects[number] = value
        return Ref(number, type(value).__name__)

    def _find(self, name: str) -> Any:
        try:
            return self.namespace[name]
        except KeyError:
            raise NameError(name) from None

    @staticmethod
    def _launcher(target: Any) -> Any:
        """What one run of ``target`` means: a graph is launched, a callable is called."""
        return target.launch if hasattr(target, "launch") and not callable(target) else target

    # Each _op_ method is one ask. A target is a name in the namespace or a kept object.

    def _target(self, target: Any) -> Any:
        return self._find(target) if type(target) is str else target

    def _op_value(self, name: str) -> Any:
        return self._find(name)

    def _op_call(self, target: Any, args: list, kwargs: dict, method: str | None = None) -> Any:
        function = self._target(target)
        if method is not None:
            function = getattr(function, method)
        return self._launcher(function)(*args, **kwargs)

    def _op_get(self, target: Any, name: str) -> Any:
        return getattr(target, name)

    def _op_define(self, source: str, name: str) -> Any:
        # A namespace of its own, so that planted helpers cannot collide with the learner's names;
        # linecache makes tracebacks and inspect show the planted source.
        filename = f"<planted {name} {self._next}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        namespace: dict[str, Any] = {"__name__": "launchlab_planted"}
        exec(compile(source, filename, "exec"), namespace)
        return self._keep(namespace[name])

    def _op_repeat(self, target: Any, args: list, kwargs: dict, times: int, sync: bool, state: Any, start: Any) -> Any:
        launch = self._launcher(self._target(target))
        if state is not None:
            self._op_write(state, start)
        if kwargs:
            for _ in range(times):
                launch(*args, **kwargs)
        else:
            for _ in range(times):
                launch(*args)
        if sync:
            synchronize()
        return None if state is None else to_host(state)

    def _op_host(self, target: Any) -> np.ndarray:
        return to_host(target)

    def _op_lend(self, buffer: int, shape: list, dtype: str, handle: str | None) -> bool:
        """Open the examiner's memory by its CUDA IPC ``handle`` (hex), or allocate a copy here."""
        import cupy

        size = max(1, int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize)
        if handle is None:
            memory = cupy.cuda.alloc(size)
        else:
            pointer = cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(handle))
            memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, size, self), 0)
        self._buffers[buffer] = cupy.ndarray(tuple(shape), np.dtype(dtype), memory)
        return True

    def _op_write(self, buffer: Any, data: np.ndarray) -> None:
        synchronize()
        buffer.set(data)
        synchronize()

    def _op_read(self, buffer: Any) -> np.ndarray:
        synchronize()
        return buffer.get()

    def _op_graph(self, target: Any) -> dict:
        return describe_graph(target)

    def _op_instantiate(self, target: Any) -> Any:
        return self._keep(Instantiated(target))

    def _op_probe(self) -> str | None:
        """Wait for the device; the name of the CUDA error that has poisoned this process's context, or None."""
        try:
            synchronize()
        except Exception as error:  # noqa: BLE001 - whatever it is, the context is unusable
            return str(error)[:200]
        return None

    def _op_errors(self) -> list[str]:
        """What TensorRT reported since the last time, if the notebook uses the course's logger."""
        engines = sys.modules.get("launchlab.lab.engines")
        return engines.trt_errors() if engines else []

    def _op_forget(self) -> None:
        """Give back what the last exercise left here: objects, newest first, and the examiner's memory."""
        while self._objects:
            self._objects.popitem()
        gc.collect()
        cupy = sys.modules.get("cupy")
        while self._buffers:
            _, array = self._buffers.popitem()
            if isinstance(array.data.mem, cupy.cuda.UnownedMemory):
                cupy.cuda.runtime.ipcCloseMemHandle(array.data.ptr)
        if cupy is not None and cupy.is_available():
            cupy.get_default_memory_pool().free_all_blocks()


class Instantiated:
    """An executable graph that the agent made of ``target``'s definition: what its nodes say is what it launches.

    ``target``: as for `describe_graph`. ``graph``: the definition's handle, an int. Launches go to a stream of its own.
    """

    def __init__(self, target: Any):
        from cuda.bindings import runtime

        self._runtime, self._target, self.graph = runtime, target, int(definition(target))
        self._executable = checked(runtime.cudaGraphInstantiate(runtime.cudaGraph_t(self.graph), 0))
        self._stream = checked(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))

    def launch(self) -> None:
        checked(self._runtime.cudaGraphLaunch(self._executable, self._stream))

    def __del__(self) -> None:
        for destroy, name in (("cudaGraphExecDestroy", "_executable"), ("cudaStreamDestroy", "_stream")):
            if name in vars(self):
                getattr(self._runtime, destroy)(getattr(self, name))


def definition(target: Any) -> Any:
    """The ``cudaGraph_t`` of ``target``; raises `NotAGraph` where there is none."""
    from cuda.bindings import runtime

    try:
        return runtime.cudaGraph_t(int(getattr(target, "graph", target)))
    except (TypeError, ValueError):
        raise NotAGraph(type(target).__name__) from None


def synchronize() -> None:
    """Wait for the whole device, if this process uses one."""
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        try:
            cupy.cuda.runtime.deviceSynchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            if "InsufficientDriver" not in str(error) and "NoDevice" not in str(error):
                raise


def to_host(target: Any) -> np.ndarray:
    """``target`` (cupy or numpy array, or anything numpy takes) as a numpy array."""
    synchronize()
    return np.array(target.get() if hasattr(target, "get") and hasattr(target, "device") else target)


def describe_graph(target: Any) -> dict:
    """Nodes and edges of a captured graph, as the driver reports them.

    ``target`` is a ``cupy.cuda.Graph``, an object with an attribute ``graph``, or a
    ``cudaGraph_t``. Returns ``{"kinds": [str, …], "edges": [[from, to], …]}``, kinds named as
    in ``cudaGraphNodeType`` without the prefix ("Kernel", "Memcpy", …), edges as indices.
    """
    from cuda.bindings import runtime

    graph = definition(target)
    _, count = checked(runtime.cudaGraphGetNodes(graph, 0))
    nodes = list(checked(runtime.cudaGraphGetNodes(graph, count))[0])[:count] if count else []
    kinds = [checked(runtime.cudaGraphNodeGetType(node)).name.removeprefix("cudaGraphNodeType") for node in nodes]
    position = {int(node): index for index, node in enumerate(nodes)}
    # CUDA 13 returns edge data between the ends and the count, CUDA 12 does not: take both by position.
    n_edges = checked(runtime.cudaGraphGetEdges(graph, 0))[-1]
    edges = []
    if n_edges:
        result = checked(runtime.cudaGraphGetEdges(graph, n_edges))
        edges = [[position[int(a)], position[int(b)]] for a, b in zip(result[0], result[1], strict=True)][:n_edges]
    return {"kinds": kinds, "edges": edges}


def describe(error: BaseException) -> dict:
    """An exception as plain data, with the learner's own line where one is on the stack."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if any(mark in frame.filename for mark in OWN_FILES)]
    return {
        "type": type(error).__name__,
        "bases": [base.__name__ for base in type(error).__mro__],
        "message": _text(error)[:500],
        "line": (own[-1].line or "")[:200] if own else "",
        "own": bool(own) and frames[-1] is own[-1],
    }


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - also an exception that cannot be put into words is answered
        return ""


def serve(shell: Any) -> None:
    """Answer asks that reach the kernel of ``shell`` as messages of a comm.

    A comm passes by all that a learner can hang into IPython's execution (input transformers,
    hooks, history), so an honest notebook that uses them is examined like any other.
    """
    agent = Agent(shell.user_ns)

    def opened(comm: Any, _message: dict) -> None:
        @comm.on_msg
        def asked(message: dict) -> None:
            content = message["content"]["data"]
            text, blobs = agent.answer(content["ask"], [bytes(blob) for blob in message["buffers"]])
            comm.send(data={"reply": text}, buffers=blobs)

    shell.kernel.comm_manager.register_target(TARGET, opened)
