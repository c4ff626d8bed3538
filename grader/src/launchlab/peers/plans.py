"""TensorRT's plans, built once and shared by its three peers.

python -m launchlab.peers.plans FOLDER SECONDS LEVEL
"""

import json
import sys
import time
from pathlib import Path

import tensorrt as trt

from launchlab import lab
from launchlab.lab import models

# The smallest, usual and largest size of each profile, ascending; TensorRT tunes its kernels for the usual one.
PROFILES = {
    "bert": ((8, 32, 64), (65, 128, 192), (193, 384, 512)),
    "rec": ((96, 320, 640),),
}


def shapes(model: str, size: int) -> dict[str, tuple[int, ...]]:
    """The shape of each input for a request of that size."""
    return {"x": (1, 3, 48, size)} if model == "rec" else {"ids": (1, size), "mask": (1, size)}


def profile_of(model: str, size: int) -> int:
    """The number of the first profile that takes a size. ValueError if none does."""
    for number, (smallest, _, largest) in enumerate(PROFILES[model]):
        if smallest <= size <= largest:
            return number
    raise ValueError(f"{model}: no profile takes the size {size}")


class _Deadline(trt.IProgressMonitor):
    """Gives a build up at its next step once the time is over."""

    def __init__(self, seconds: float):
        trt.IProgressMonitor.__init__(self)
        self._until = time.monotonic() + seconds

    def phase_start(self, phase_name, parent_phase, num_steps):
        pass

    def phase_finish(self, phase_name):
        pass

    def step_complete(self, phase_name, step):
        return time.monotonic() < self._until


def _network(builder: trt.Builder, model: str) -> trt.INetworkDefinition:
    if model == "bert":
        network = models.bert(builder, length=-1)
        for number in range(network.num_inputs):
            network.get_input(number).set_dimension_name(1, "length")  # equal names: TensorRT may count on equal lengths
        return network
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, lab.trt_logger())
    if not parser.parse(models.ppocr("rec").read_bytes()):
        raise RuntimeError("; ".join(parser.get_error(i).desc() for i in range(parser.num_errors)))
    return network


def build(builder: trt.Builder, model: str, level: int, seconds: float) -> bytes | None:
    """The plan, without TF32; None if it was not done in time. RuntimeError if TensorRT refuses."""
    network = _network(builder, model)
    config = builder.create_builder_config()
    config.builder_optimization_level = level
    config.clear_flag(trt.BuilderFlag.TF32)
    monitor = _Deadline(seconds)
    config.progress_monitor = monitor
    for sizes in PROFILES[model]:
        profile = builder.create_optimization_profile()
        for name in shapes(model, 1):
            profile.set_shape(name, *(shapes(model, size)[name] for size in sizes))
        if config.add_optimization_profile(profile) < 0:
            raise RuntimeError(f"{model}: the profile {sizes} is refused. {' '.join(lab.trt_errors())}")
    began = time.monotonic()
    plan = builder.build_serialized_network(network, config)
    if plan is None and time.monotonic() - began < seconds:
        raise RuntimeError(f"{model}: the build failed. {' '.join(lab.trt_errors())}")
    return None if plan is None else bytes(plan)


def load(folder: Path, model: str) -> trt.ICudaEngine:
    """The engine of a plan in the folder. RuntimeError if TensorRT refuses it."""
    engine = trt.Runtime(lab.trt_logger()).deserialize_cuda_engine((folder / f"{model}.plan").read_bytes())
    if engine is None:
        raise RuntimeError(f"{model}: the plan is refused. {' '.join(lab.trt_errors())}")
    return engine


def main(folder: Path, seconds: float, level: int) -> None:
    """Write MODEL.plan for each model, and built.json: {model: {"level", "seconds", "mib", "tensorrt"}}.

    First every plan at level 1; if `level` is higher, then at that level too, as far as the time goes.
    """
    began = time.monotonic()
    builder = trt.Builder(lab.trt_logger())  # one for all: its libraries take many seconds to load
    built: dict[str, dict] = {"builder": {"seconds": round(time.monotonic() - began, 2)}}
    for model, at in ((model, at) for at in sorted({1, level}) for model in PROFILES):
        started = time.monotonic()
        left = seconds - (started - began)
        try:
            plan = build(builder, model, at, left)
        except RuntimeError as error:
            print(f"{model} at level {at}: {error}", flush=True)
            plan = None
        took = round(time.monotonic() - started, 2)
        print(f"{started - began:6.1f} s  {model} at level {at}: {'built' if plan else 'not built'} in {took} s", flush=True)
        if plan:
            (folder / f"{model}.plan").write_bytes(plan)
            built[model] = {"level": at, "seconds": took, "mib": round(len(plan) / 2**20, 1), "tensorrt": trt.__version__}
        (folder / "built.json").write_text(json.dumps(built), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
