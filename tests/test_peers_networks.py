"""PyTorch's networks of the comparison against ONNX Runtime, on the CPU. Run where torch, onnx and the OCR model are installed."""

from importlib.util import find_spec

import numpy as np
import pytest

from launchlab.lab import models
from launchlab.peers import stream
from launchlab.peers.reference import TOLERANCE, error
from launchlab.peers.stream import Request

torch = pytest.importorskip("torch")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
pytestmark = pytest.mark.skipif(
    find_spec("rapidocr_onnxruntime") is None, reason="needs rapidocr-onnxruntime, which holds the OCR model"
)

CPU = ["CPUExecutionProvider"]


def test_the_translated_rec_reads_what_onnx_runtime_reads():
    from launchlab.peers import rec

    network = rec.to_torch(models.ppocr("rec"))
    names = [str(node.target) for node in network.graph.nodes if node.op == "call_function"]
    assert [sum(word in name for name in names) for word in ("hardswish", "silu", "layer_norm", "linear", "sqrt", "clamp")] == [
        28,
        7,
        5,
        9,
        0,
        0,
    ]
    scores = ort.InferenceSession(str(models.ppocr("rec")), providers=CPU)
    answers = ort.InferenceSession(rec.with_answer(models.ppocr("rec")).SerializeToString(), providers=CPU)
    for width in (96, 328, 640):
        x = stream.payload("rec", Request(width, 0))
        (right,) = scores.run(None, {"x": x})[0]
        two = np.partition(right, -2, axis=1)[:, -2:]
        right = np.stack([right.argmax(axis=1).astype(float), two[:, 1], two[:, 1] - two[:, 0]])
        with torch.no_grad():
            ids, probs = network(torch.from_numpy(x))
        assert error("rec", (ids.numpy(), probs.numpy()), right) < 1e-4
        ids, probs = answers.run(None, {"x": x})
        assert error("rec", (ids[0], probs[0]), right) < 1e-4


def test_bert_keeps_its_vectors_as_checkpoint_and_as_onnx(tmp_path):
    from launchlab.peers import bert

    network = bert.bert()
    requests = [stream.payload("bert", Request(length, 0)) for length in (9, 63)]
    with torch.no_grad():
        right = [network(torch.from_numpy(ids)).numpy().astype(np.float64) for ids in requests]
        assert error("bert", (right[0],), right[1]) > TOLERANCE["bert"]
        bert.save(network, tmp_path / bert.CHECKPOINT)
        loaded = bert.load(tmp_path / bert.CHECKPOINT)
        assert all(torch.equal(mine, other) for mine, other in zip(network.parameters(), loaded.parameters(), strict=True))
    bert.export(network, tmp_path / "bert.onnx")
    session = ort.InferenceSession(str(tmp_path / "bert.onnx"), providers=CPU)
    for ids, vector in zip(requests, right, strict=True):
        assert error("bert", (session.run(None, {"ids": ids})[0],), vector) < TOLERANCE["bert"] / 4
