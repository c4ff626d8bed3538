"""BERT-base in PyTorch, with the layers and the very weights of `launchlab.lab.models.bert`."""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from launchlab.lab.models import LONGEST, VOCABULARY, Weights

LAYERS, HIDDEN, HEADS, INNER = 12, 768, 12, 3072
CHECKPOINT = "bert.pt"


class _Layer(nn.Module):
    """Attention and feed-forward, each followed by a residual sum and a layer norm."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.mix = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.after_attention, self.after_all = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], HEADS, HIDDEN // HEADS)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = self.after_attention(x + self.mix(mixed))
        return self.after_all(x + self.down(functional.gelu(self.up(x))))


class Bert(nn.Module):
    """The encoder without padding: token numbers (1, length), int32 or int64, → the first token's vector, (HIDDEN,).

    No mask: PyTorch's peers run every length as it is, so there is no padding that a token could attend to.
    """

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Parameter(torch.zeros(1, LONGEST, HIDDEN))
        self.first = nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.words(ids) + self.places[:, : ids.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return x[0, 0]


def bert(seed: int = 0) -> Bert:
    """BERT-base on the CPU, FP32, for inference, with the FP16 weights of ``models.bert(..., seed=seed)``."""
    weights, net = Weights(seed), Bert().requires_grad_(False).eval()

    def fill(parameter: torch.Tensor, values: np.ndarray) -> None:
        parameter.copy_(torch.from_numpy(values))

    fill(net.words.weight, weights.draw((VOCABULARY, HIDDEN), 0.02))
    fill(net.places, weights.draw((1, LONGEST, HIDDEN), 0.02))
    for layer in net.layers:
        for part in (
            layer.query,
            layer.key,
            layer.value,
            layer.mix,
            layer.up,
            layer.down,
        ):  # the order in which they were drawn
            inputs, outputs = part.in_features, part.out_features
            fill(part.weight, weights.draw((1, inputs, outputs), inputs**-0.5)[0].T)
            fill(part.bias, weights.draw((1, 1, outputs), 0.02)[0, 0])
    for part in net.modules():
        if isinstance(part, nn.LayerNorm):
            part.weight.fill_(1.0)
            part.bias.zero_()
    return net


def save(net: Bert, path: Path) -> None:
    """Keep the weights as FP16, which they are: nothing is lost."""
    torch.save(net.half().state_dict(), path)


def load(path: Path) -> Bert:
    """What `save` kept: BERT-base on the CPU, FP16, for inference."""
    net = Bert().requires_grad_(False).half().eval()
    net.load_state_dict(torch.load(path, weights_only=True))
    return net


def export(net: Bert, path: Path) -> None:
    """Write the FP16 network as ONNX, "ids" int32 (1, length) → "vector" (HIDDEN,), for ONNX Runtime."""
    ids = torch.zeros(1, 16, dtype=torch.int32)
    axes = {"ids": {1: "length"}}
    torch.onnx.export(
        net.half(),
        (ids,),
        path,
        input_names=["ids"],
        output_names=["vector"],
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )
