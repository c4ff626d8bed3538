"""ONNX Runtime's peer: its CUDA provider, one session, shapes as they arrive.

How a convolution is done is chosen by cuDNN's heuristic. The provider's default tries all ways whenever a shape is new: measured
on an H200, the stream's 84 requests for PP-OCRv4 rec then took 150 s. Who serves dynamic shapes turns that off.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime as ort

from launchlab.peers import Absent

PROVIDER = "CUDAExecutionProvider"
OPTIONS = {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}


def offered() -> bool:
    """Whether the installed ONNX Runtime was built with the CUDA provider."""
    return PROVIDER in ort.get_available_providers()


def _load_cuda() -> None:
    """Load the CUDA and cuDNN libraries of PyPI's packages, which ONNX Runtime looks for beside itself alone."""
    found = find_spec("nvidia")
    for place in found.submodule_search_locations if found else ():
        for libraries in Path(place).glob("cu[0-9]*/lib"):
            ort.preload_dlls(cudnn=False, directory=str(libraries))
        for libraries in Path(place).glob("cudnn/lib"):
            ort.preload_dlls(cuda=False, directory=str(libraries))


class Session:
    """`InferenceSession.run`, which copies in and out itself. Absent if there is no CUDA provider, or it does not load."""

    def __init__(self, model: str, folder: Path):
        if not offered():
            raise Absent(
                f"onnxruntime {ort.__version__} has no {PROVIDER} (it offers {', '.join(ort.get_available_providers())})"
            )
        _load_cuda()
        ort.set_default_logger_severity(3)
        self._session = ort.InferenceSession(str(folder / f"{model}.onnx"), providers=[(PROVIDER, OPTIONS)])
        if PROVIDER not in self._session.get_providers():
            raise Absent(f"onnxruntime {ort.__version__} could not load its {PROVIDER}")
        self._input = self._session.get_inputs()[0].name

    def serve(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """The answer to one request, in host memory."""
        return tuple(each.reshape(-1) for each in self._session.run(None, {self._input: array}))

    def facts(self) -> dict[str, int]:
        """Nothing is kept for a shape."""
        return {}
