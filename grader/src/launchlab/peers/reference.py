"""The right answers, computed on the CPU in FP32, and what a peer may differ from them.

    python -m launchlab.peers.reference FOLDER      writes MODEL.npz, BERT's checkpoint and, where ONNX Runtime has a GPU, MODEL.onnx

rec: ONNX Runtime, each request both at its own width and at the course's bucket, because rec sees what it is filled up
with: the width is part of the question, as in PP-OCR itself. bert: PyTorch; masked tokens change nothing.
"""

import sys
import time
from pathlib import Path

import numpy as np

from launchlab.peers import MODELS
from launchlab.peers.buckets import bucket_of
from launchlab.peers.stream import HEIGHT, Request, payload, recorded

TOLERANCE = {"rec": 0.01, "bert": 0.02}
"""rec: the greatest difference of a probability, and the margin below which a step's class may differ. bert: the length of the
difference over the length of the right vector; FP16 itself costs about 0.001."""


def key(request: Request, size: int) -> str:
    """The name of an answer to a request that was filled up to `size`."""
    return f"{request.size}-{request.variant}-{size}"


def error(model: str, answer: tuple[np.ndarray, ...], right: np.ndarray) -> float:
    """How far off an answer is, in the unit of TOLERANCE; infinite where it is wrong beyond measure, or of another shape."""
    if model == "bert":
        (vector,) = answer
        if vector.shape != right.shape or not np.isfinite(vector).all():
            return float("inf")
        return float(np.linalg.norm(vector.astype(np.float64) - right) / np.linalg.norm(right))
    ids, probs = answer
    right_ids, right_probs, margin = right
    if ids.shape != right_ids.shape or not np.isfinite(probs).all():
        return float("inf")
    if ((ids != right_ids) & (margin > TOLERANCE["rec"])).any():
        return float("inf")
    return float(np.abs(probs - right_probs).max())


def read(ids: np.ndarray) -> tuple[int, ...]:
    """The characters of a line, as classes: CTC's rule, equal neighbours once and no blanks."""
    return tuple(int(each) for place, each in enumerate(ids) if each and (place == 0 or each != ids[place - 1]))


def filled(array: np.ndarray, size: int) -> np.ndarray:
    """A rec input filled up with 0 to `size` pixels."""
    wide = np.zeros((1, 3, HEIGHT, size), np.float32)
    wide[..., : array.shape[3]] = array
    return wide


def _rec(requests: list[Request], folder: Path) -> dict[str, np.ndarray]:
    """float64 (3, steps) each: class, probability, and by how much it exceeds the second likeliest."""
    import onnxruntime as ort

    from launchlab.lab import models
    from launchlab.peers import ort_peer, rec

    session = ort.InferenceSession(str(models.ppocr("rec")), providers=["CPUExecutionProvider"])
    right = {}
    for request in requests:
        for size in {request.size, bucket_of("rec", request.size)}:
            (scores,) = session.run(None, {session.get_inputs()[0].name: filled(payload("rec", request), size)})[0]
            two = np.partition(scores, -2, axis=1)[:, -2:]
            right[key(request, size)] = np.stack([scores.argmax(axis=1).astype(np.float64), two[:, 1], two[:, 1] - two[:, 0]])
    if ort_peer.offered():
        (folder / "rec.onnx").write_bytes(rec.with_answer(models.ppocr("rec")).SerializeToString())
    return right


def _bert(requests: list[Request], folder: Path) -> dict[str, np.ndarray]:
    """float64 (HIDDEN,) each."""
    import torch

    from launchlab.peers import bert, ort_peer

    net, right = bert.bert(), {}
    with torch.inference_mode():
        for request in requests:
            vector = net(torch.from_numpy(payload("bert", request))).numpy().astype(np.float64)
            right.update({key(request, size): vector for size in (request.size, bucket_of("bert", request.size))})
    bert.save(net, folder / bert.CHECKPOINT)
    if ort_peer.offered():
        bert.export(net, folder / "bert.onnx")
    return right


def main(folder: Path) -> None:
    for model in MODELS:
        began = time.monotonic()
        requests = sorted(set(recorded(model)), key=lambda request: (request.size, request.variant))
        right = (_rec if model == "rec" else _bert)(requests, folder)
        np.savez(folder / f"{model}.npz", **right)
        print(f"{model}: {len(right)} right answers in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
