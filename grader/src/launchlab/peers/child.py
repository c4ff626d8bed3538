"""One peer with one model, in a process of its own.

    python -m launchlab.peers.child PEER MODEL FOLDER FD

Commands come on standard input, a line each: a number, so many requests at the stream's end that go before the clock, and
then the stream. Answers go to the file descriptor FD, a line of JSON each: first {"ready"}, then {"us", "wrong", "worst"}.
A peer that cannot run says {"absent"}, one that fails {"failed"}, and ends.
"""

import ctypes
import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from launchlab.device import memory_of
from launchlab.peers import Absent
from launchlab.peers.buckets import bucket_of
from launchlab.peers.reference import TOLERANCE, error, key, read
from launchlab.peers.stream import payload, recorded

PEERS = {
    "torch": ("torch_peers", "Eager"),
    "torch.compile": ("torch_peers", "Compiled"),
    "torch.cuda.graph": ("torch_peers", "Graphed"),
    "onnxruntime": ("ort_peer", "Session"),
    "tensorrt": ("tensorrt_peers", "Eager"),
    "tensorrt.recapture": ("tensorrt_peers", "Recaptured"),
    "course": ("tensorrt_peers", "Course"),
}


def used_memory() -> int | None:
    """Bytes that this process holds on GPU 0, in NVML's words; None where it does not tell. Other peers come and go meanwhile."""
    return memory_of(os.getpid())


def open_context() -> None:
    """Open this process's primary context: what CUDA itself takes is the same for all, and counted for none."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for failed in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), 0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
    ):
        if failed:
            raise RuntimeError(f"CUDA error {failed}")


class Stream:
    """The recorded stream of one model: its requests, their inputs in host memory, and the right answers."""

    def __init__(self, model: str, folder: Path, padded: bool):
        """padded: the answers are those of inputs that were filled up to their bucket."""
        self.model, self.requests = model, recorded(model)
        self._payloads = {request: payload(model, request) for request in set(self.requests)}
        with np.load(folder / f"{model}.npz") as right:
            self._right = {name: right[name] for name in right.files}
        self._padded = padded

    def run(self, serve, before: int) -> dict:
        """Serve the last `before` requests unmeasured, then all of them. Times are whole µs, by the host's clock."""
        for request in self.requests[len(self.requests) - before :]:
            serve(self._payloads[request])
        us, answers = [], []
        for request in self.requests:
            array = self._payloads[request]
            began = perf_counter_ns()
            answer = serve(array)
            us.append((perf_counter_ns() - began) // 1000)
            answers.append(answer)
        errors = [
            error(self.model, answer, self._right[self._key(request)])
            for request, answer in zip(self.requests, answers, strict=True)
        ]
        wrong = sum(not each <= TOLERANCE[self.model] for each in errors)
        finite = [each for each in errors if np.isfinite(each)]
        return {"us": us, "wrong": wrong, "worst": round(max(finite), 6) if finite else None} | self._read_otherwise(answers)

    def _key(self, request) -> str:
        return key(request, bucket_of(self.model, request.size) if self._padded else request.size)

    def _read_otherwise(self, answers: list) -> dict:
        """How many texts of padded lines are not those of the lines as they came."""
        if not (self._padded and self.model == "rec"):
            return {}
        pairs = (
            (read(ids), read(self._right[key(request, request.size)][0]))
            for request, (ids, _) in zip(self.requests, answers, strict=True)
        )
        return {"read_otherwise": sum(mine != unpadded for mine, unpadded in pairs)}


def main(peer: str, model: str, folder: Path, tell) -> None:
    stream = Stream(model, folder, padded=peer == "course")
    open_context()
    before = used_memory()
    module, name = PEERS[peer]
    served = getattr(importlib.import_module(f"launchlab.peers.{module}"), name)(model, folder)
    gc.collect()
    gc.disable()  # for all alike: a collection in the middle of a request is Python's, not the peer's
    tell({"ready": True})
    for line in sys.stdin:
        found = stream.run(served.serve, int(line))
        now = used_memory()
        grown = None if None in (before, now) else round((now - before) / 2**20)
        tell(found | {"memory_mib": grown, "facts": served.facts()})
        gc.collect()


if __name__ == "__main__":
    pipe = os.fdopen(int(sys.argv[4]), "w", encoding="utf-8")

    def tell(message: dict) -> None:
        print(json.dumps(message), file=pipe, flush=True)

    try:
        main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), tell)
    except (Absent, ImportError, FileNotFoundError) as error_:
        tell({"absent": str(error_)})
    except Exception as error_:  # noqa: BLE001 - whatever a peer's library raises is told, and costs this peer alone
        traceback.print_exc()
        tell({"failed": f"{type(error_).__name__}: {error_}"[:500]})
