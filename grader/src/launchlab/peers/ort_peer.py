"""ONNX Runtime's peer: its CUDA provider, as it comes, one session, shapes as they arrive."""

from pathlib import Path

import numpy as np
import onnxruntime as ort

from launchlab.lab import models
from launchlab.peers import Absent

PROVIDER = "CUDAExecutionProvider"


def offered() -> bool:
    """Whether the installed ONNX Runtime was built with the CUDA provider."""
    return PROVIDER in ort.get_available_providers()


class Session:
    """`InferenceSession.run`, which copies in and out itself. Absent if there is no CUDA provider, or it does not load."""

    def __init__(self, model: str, folder: Path):
        if not offered():
            raise Absent(
                f"onnxruntime {ort.__version__} has no {PROVIDER} (it offers {', '.join(ort.get_available_providers())})"
            )
        ort.preload_dlls()
        ort.set_default_logger_severity(3)
        if model == "rec":
            from launchlab.peers import rec

            source: bytes | str = rec.with_answer(models.ppocr("rec")).SerializeToString()
        else:
            from launchlab.peers import bert

            source = str(folder / bert.ONNX)
        self._session = ort.InferenceSession(source, providers=[(PROVIDER, {"use_tf32": "0"})])
        if PROVIDER not in self._session.get_providers():
            raise Absent(f"onnxruntime {ort.__version__} could not load its {PROVIDER}")
        self._input = self._session.get_inputs()[0].name

    def serve(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """The answer to one request, in host memory."""
        return tuple(each.reshape(-1) for each in self._session.run(None, {self._input: array}))

    def facts(self) -> dict[str, int]:
        """Nothing is kept for a shape."""
        return {}
