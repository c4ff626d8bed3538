"""PyTorch's peers: eager, torch.compile(mode="reduce-overhead") and torch.cuda.graph, each with the shapes as they come.

All three hand data over the same way, as one would who cares: through pinned memory, without waiting until the end.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from launchlab.lab import models
from launchlab.peers.stream import RANGE, STEP

WARM_UPS = 3  # before a capture, on a stream of its own, as PyTorch's documentation of CUDA graphs has it


def _network(model: str, folder: Path) -> torch.nn.Module:
    """rec in FP32 without TF32, or bert in FP16 from the checkpoint in the folder; on the GPU."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if model == "rec":
        from launchlab.peers import rec

        return rec.to_torch(models.ppocr("rec")).cuda()
    from launchlab.peers import bert

    return bert.load(folder / bert.CHECKPOINT).cuda()


class _Hands:
    """Pinned memory at fixed addresses: what goes to the GPU, and what comes back."""

    def __init__(self, model: str):
        _, largest = RANGE[model]
        if model == "rec":
            self._sent = torch.empty(3 * 48 * largest, dtype=torch.float32, pin_memory=True)
            shapes = [((largest // STEP,), torch.int64), ((largest // STEP,), torch.float32)]
        else:
            self._sent = torch.empty(largest, dtype=torch.int32, pin_memory=True)
            shapes = [((768,), torch.float16)]
        self._got = [torch.empty(shape, dtype=dtype, pin_memory=True) for shape, dtype in shapes]

    def sent(self, array: np.ndarray) -> torch.Tensor:
        """The array, in pinned memory."""
        pinned = self._sent[: array.size].view(array.shape)
        pinned.copy_(torch.from_numpy(array))
        return pinned

    def got(self, results: tuple[torch.Tensor, ...]) -> tuple[np.ndarray, ...]:
        """The results, once all work on the current stream is done."""
        copies = [
            pinned[: result.shape[0]].copy_(result, non_blocking=True)
            for pinned, result in zip(self._got, results, strict=True)
        ]
        torch.cuda.current_stream().synchronize()
        return tuple(copy.numpy().copy() for copy in copies)


def _tuple(results: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else results


class Eager:
    """The network as it is: every operation launches its kernels."""

    def __init__(self, model: str, folder: Path):
        self._network, self._hands = _network(model, folder), _Hands(model)

    @torch.no_grad()
    def serve(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """The answer to one request, in host memory."""
        x = self._hands.sent(array).to("cuda", non_blocking=True)
        return self._hands.got(_tuple(self._network(x)))

    def facts(self) -> dict[str, int]:
        """Nothing is kept for a shape."""
        return {}


class Compiled(Eager):
    """torch.compile(mode="reduce-overhead"): fused kernels, replayed from CUDA graphs that PyTorch keeps for each shape.

    `dynamic` is left to PyTorch: the first shape is compiled as it is, the second one compiles for shapes that change.
    """

    def __init__(self, model: str, folder: Path):
        super().__init__(model, folder)
        self._network = torch.compile(self._network, mode="reduce-overhead")

    def serve(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """The answer to one request, in host memory."""
        torch.compiler.cudagraph_mark_step_begin()
        return super().serve(array)

    def facts(self) -> dict[str, int]:
        """How often Dynamo compiled, and how often it went without a CUDA graph."""
        from torch._dynamo.utils import counters  # eager does without Dynamo, and is not to pay for its import

        return {"compilations": counters["stats"]["unique_graphs"], "cudagraph_skips": counters["inductor"]["cudagraph_skips"]}


class Graphed:
    """torch.cuda.graph: one graph for each shape, captured when the shape first arrives, kept for good; one pool for all."""

    def __init__(self, model: str, folder: Path):
        self._network, self._hands = _network(model, folder), _Hands(model)
        self._graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, torch.Tensor, tuple[torch.Tensor, ...]]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @torch.no_grad()
    def serve(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """The answer to one request, in host memory."""
        pinned = self._hands.sent(array)
        if array.shape not in self._graphs:
            self._graphs[array.shape] = self._captured(pinned)
        graph, x, results = self._graphs[array.shape]
        x.copy_(pinned, non_blocking=True)
        graph.replay()
        return self._hands.got(results)

    def _captured(self, pinned: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, tuple[torch.Tensor, ...]]:
        x = pinned.to("cuda")
        work, aside = partial(self._network, x), torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = _tuple(work())
        return graph, x, results

    def facts(self) -> dict[str, int]:
        """How many graphs are kept."""
        return {"graphs": len(self._graphs)}
