"""Real architectures for chapters that measure whole models: ResNet-50, BERT and PP-OCRv4.

The first two have the layers of the published models and seeded random weights: how long an engine takes does not
depend on its weights' values, and nothing has to be downloaded. What a chapter teaches to build, it builds itself.
TensorRT is imported on first use only.
"""

import math
from importlib.util import find_spec
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

VOCABULARY, LONGEST = 30522, 512  # BERT-base, uncased: Devlin et al. 2018, and its released configuration
RESNET50_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width and number of blocks: He et al. 2015, table 1
PPOCR_FILES = {
    "det": "ch_PP-OCRv4_det_infer.onnx",
    "rec": "ch_PP-OCRv4_rec_infer.onnx",
    "cls": "ch_ppocr_mobile_v2.0_cls_infer.onnx",
}
_weights_of: WeakKeyDictionary = WeakKeyDictionary()  # TensorRT reads them when it builds, and keeps no copy until then


def resnet50(builder, batch: int = 1, *, seed: int = 0):
    """Return a strongly typed FP16 `INetworkDefinition` of ResNet-50 v1.5, batch norms folded into the convolutions.

    Input "x" (batch, 3, 224, 224) FP16, output "y" (batch, 1000) FP16. A batch of -1 is dynamic and needs a profile.
    """
    net = _Network(builder, seed)
    x = net.input("x", "HALF", (batch, 3, 224, 224))
    x = net.relu(net.convolution(x, 3, 64, 7, stride=2))
    x = net.max_pool(x)
    channels = 64
    for stage, (width, blocks) in enumerate(RESNET50_STAGES):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = net.relu(net.convolution(x, channels, width, 1))
            y = net.relu(net.convolution(y, width, width, 3, stride=stride))
            y = net.convolution(y, width, 4 * width, 1, gain=0.2)  # keeps the sum of sixteen blocks within FP16
            if not block:
                x = net.convolution(x, channels, 4 * width, 1, stride=stride)
            x = net.relu(net.add(x, y))
            channels = 4 * width
    x = net.reshape(net.mean_of_image(x), (0, channels))
    net.output("y", net.linear(x, channels, 1000))
    return net.definition


def bert(builder, *, layers: int = 12, hidden: int = 768, heads: int = 12, batch: int = 1, length: int = 128, seed: int = 0):
    """Return a strongly typed FP16 `INetworkDefinition` of a BERT encoder; as given, BERT-base.

    Inputs "ids" (batch, length) INT32, each in 0…30521, and "mask" (batch, length) FP16, 1 for a token and 0 for
    padding, which no token then attends to. Output "y" (batch, length, hidden) FP16. A batch or length of -1 is dynamic
    and needs a profile, the length within 1…512. Raises ValueError if the heads do not divide the hidden size.
    """
    if hidden % heads:
        raise ValueError(f"hidden = {hidden} 不能被 heads = {heads} 整除：每个注意力头要分到同样多的通道，请换一组数。")
    net = _Network(builder, seed)
    ids = net.input("ids", "INT32", (batch, length))
    mask = net.input("mask", "HALF", (batch, length))
    away = net.scale(net.reshape(mask, (0, 1, 1, -1)), 1e4, -1e4)  # 0 for a token, -10000 for padding
    x = net.add(net.embedding(ids, VOCABULARY, hidden), net.positions(ids, hidden))
    x = net.layer_norm(x, hidden)
    for _ in range(layers):
        q, k, v = (net.transpose(net.reshape(net.linear(x, hidden, hidden), (0, 0, heads, hidden // heads)), (0, 2, 1, 3)) for _ in range(3))
        scores = net.scale(net.matmul(q, k, transpose=True), (hidden // heads) ** -0.5, 0.0)
        mixed = net.matmul(net.softmax(net.add(scores, away), axis=3), v)
        mixed = net.reshape(net.transpose(mixed, (0, 2, 1, 3)), (0, 0, hidden))
        x = net.layer_norm(net.add(x, net.linear(mixed, hidden, hidden)), hidden)
        y = net.linear(net.gelu(net.linear(x, hidden, 4 * hidden)), 4 * hidden, hidden)
        x = net.layer_norm(net.add(x, y), hidden)
    net.output("y", x)
    return net.definition


def ppocr(part: str) -> Path:
    """Return where PP-OCRv4's ONNX file of ``part`` ("det", "rec" or "cls") lies: in the package rapidocr-onnxruntime.

    The package is found without being imported. Raises FileNotFoundError if it is missing, KeyError for another part.
    """
    name = PPOCR_FILES[part]
    spec = find_spec("rapidocr_onnxruntime")
    path = Path(spec.submodule_search_locations[0]) / "models" / name if spec else None
    if path is None or not path.is_file():
        raise FileNotFoundError(f"没有找到 PP-OCRv4 的模型 {name}：它在 rapidocr-onnxruntime 这个包里。请先安装：pip install rapidocr-onnxruntime")
    return path


class Weights:
    """The random weights of `resnet50` and `bert`: equal seeds and equal calls in the same order give equal weights."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)
        self._normal = self._rng.standard_normal(1 << 20, dtype=np.float32)

    def draw(self, shape: tuple[int, ...], spread: float) -> np.ndarray:
        """Normal values, float16, the same million over again in a larger tensor: a hundred million take seconds to draw."""
        begin = self._rng.integers(len(self._normal) // 2)
        values = (self._normal[begin : begin + math.prod(shape)] * np.float32(spread)).astype(np.float16)
        return np.resize(values, shape)


class _Network:
    """The few layers that these models are made of, in FP16; weights are drawn as they are asked for."""

    def __init__(self, builder, seed: int):
        import tensorrt as trt

        self._trt, self._draw = trt, Weights(seed).draw
        self.definition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self._kept = _weights_of.setdefault(self.definition, [])

    def input(self, name: str, dtype: str, shape: tuple[int, ...]):
        return self.definition.add_input(name, getattr(self._trt.DataType, dtype), shape)

    def output(self, name: str, tensor) -> None:
        tensor.name = name
        self.definition.mark_output(tensor)

    def convolution(self, x, inputs: int, outputs: int, size: int, *, stride: int = 1, gain: float = 1.0):
        kernel = self._draw((outputs, inputs, size, size), gain * (2 / (inputs * size * size)) ** 0.5)  # He et al. 2015
        layer = self.definition.add_convolution_nd(x, outputs, (size, size), self._weights(kernel), self._weights(self._draw((outputs,), 0.02)))
        layer.stride_nd, layer.padding_nd = (stride, stride), (size // 2, size // 2)
        return layer.get_output(0)

    def relu(self, x):
        return self.definition.add_activation(x, self._trt.ActivationType.RELU).get_output(0)

    def gelu(self, x):
        return self.definition.add_activation(x, self._trt.ActivationType.GELU_ERF).get_output(0)

    def max_pool(self, x):
        layer = self.definition.add_pooling_nd(x, self._trt.PoolingType.MAX, (3, 3))
        layer.stride_nd, layer.padding_nd = (2, 2), (1, 1)
        return layer.get_output(0)

    def mean_of_image(self, x):
        return self.definition.add_reduce(x, self._trt.ReduceOperation.AVG, (1 << 2) | (1 << 3), keep_dims=True).get_output(0)

    def add(self, a, b):
        return self.definition.add_elementwise(a, b, self._trt.ElementWiseOperation.SUM).get_output(0)

    def scale(self, x, factor: float, offset: float):
        shape = (1,) * len(x.shape)
        y = self.definition.add_elementwise(x, self._constant(np.full(shape, factor)), self._trt.ElementWiseOperation.PROD).get_output(0)
        return self.add(y, self._constant(np.full(shape, offset))) if offset else y

    def matmul(self, a, b, *, transpose: bool = False):
        plain, turned = self._trt.MatrixOperation.NONE, self._trt.MatrixOperation.TRANSPOSE
        return self.definition.add_matrix_multiply(a, plain, b, turned if transpose else plain).get_output(0)

    def linear(self, x, inputs: int, outputs: int):
        ones = (1,) * (len(x.shape) - 2)
        weights = self._constant(self._draw((*ones, inputs, outputs), inputs**-0.5))
        return self.add(self.matmul(x, weights), self._constant(self._draw((*ones, 1, outputs), 0.02)))

    def layer_norm(self, x, width: int):
        shape = (1,) * (len(x.shape) - 1) + (width,)
        gain, bias = self._constant(np.ones(shape)), self._constant(np.zeros(shape))
        return self.definition.add_normalization(x, gain, bias, 1 << (len(x.shape) - 1)).get_output(0)

    def softmax(self, x, axis: int):
        layer = self.definition.add_softmax(x)
        layer.axes = 1 << axis
        return layer.get_output(0)

    def embedding(self, ids, rows: int, width: int):
        return self.definition.add_gather(self._constant(self._draw((rows, width), 0.02)), ids, 0).get_output(0)

    def positions(self, ids, width: int):
        """The first ``length`` rows of the position table, (1, length, width); the length may be known at run time only."""
        table = self._constant(self._draw((1, LONGEST, width), 0.02))
        length = ids.shape[1]
        layer = self.definition.add_slice(table, (0, 0, 0), (1, max(length, 1), width), (1, 1, 1))
        if length < 0:
            shape = self.definition.add_shape(ids).get_output(0)
            one, wide = (self._constant(np.array([n]), np.int64) for n in (1, width))
            size = self.definition.add_gather(shape, one, 0).get_output(0)  # its dimension 1, the length
            layer.set_input(2, self.definition.add_concatenation([one, size, wide]).get_output(0))
        return layer.get_output(0)

    def reshape(self, x, shape: tuple[int, ...]):
        """0 keeps the dimension of the same place, -1 is what remains."""
        layer = self.definition.add_shuffle(x)
        layer.reshape_dims = shape
        return layer.get_output(0)

    def transpose(self, x, order: tuple[int, ...]):
        layer = self.definition.add_shuffle(x)
        layer.first_transpose = order
        return layer.get_output(0)

    def _constant(self, values: np.ndarray, dtype: type = np.float16):
        return self.definition.add_constant(values.shape, self._weights(values, dtype)).get_output(0)

    def _weights(self, values: np.ndarray, dtype: type = np.float16):
        self._kept.append(np.ascontiguousarray(values, dtype))
        return self._kept[-1]
