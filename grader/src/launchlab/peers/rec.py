"""PP-OCRv4's recognition model for ONNX Runtime and PyTorch, both from the ONNX file that TensorRT parses.

PyTorch has no reader of ONNX files, and converters that keep shapes in tensors cannot be captured in a CUDA graph. The
model has 24 kinds of nodes, so it is translated here into plain PyTorch calls, shapes as Python integers. What the export
spelt out (hardswish, SiLU, layer norm, linear) becomes PyTorch's own operation again: otherwise PyTorch's peers would launch
twice as many kernels as a PyTorch programmer would.
"""

from collections.abc import Callable
from pathlib import Path

import onnx
import torch
from onnx import helper, numpy_helper
from torch import fx, nn
from torch.nn import functional


def with_answer(path: Path) -> onnx.ModelProto:
    """The model, its output replaced by "ids" (1, steps) int64, the likeliest class of each step, and "probs", its probability."""
    model = onnx.load(path)
    (output,) = model.graph.output
    del model.graph.output[:]
    model.graph.node.append(helper.make_node("ArgMax", [output.name], ["ids"], axis=2, keepdims=0))
    model.graph.node.append(helper.make_node("ReduceMax", [output.name], ["probs"], axes=[2], keepdims=0))
    for name, kind in (("ids", onnx.TensorProto.INT64), ("probs", onnx.TensorProto.FLOAT)):
        model.graph.output.append(helper.make_tensor_value_info(name, kind, (1, "steps")))
    return model


def to_torch(path: Path) -> fx.GraphModule:
    """The model as straight-line PyTorch on the CPU, FP32: (1, 3, 48, width) → (ids int64, probs), both (steps,)."""
    traced = fx.symbolic_trace(_Rec(onnx.load(path)))
    for pattern, replacement in _PATTERNS:
        fx.replace_pattern(traced, pattern, replacement)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced.requires_grad_(False).eval()


class _Rec(nn.Module):
    """Walks the nodes. A value is a tensor, or what is known beforehand or belongs to shapes: a list of integers, a number."""

    def __init__(self, model: onnx.ModelProto):
        super().__init__()
        self._nodes = [node for node in model.graph.node if node.op_type != "Constant"]
        self._input, self._output = model.graph.input[0].name, model.graph.output[0].name
        self._known: dict[str, object] = {}
        stored = {node.output[0]: node.attribute[0].t for node in model.graph.node if node.op_type == "Constant"}
        for name, tensor in stored.items():
            array = numpy_helper.to_array(tensor)
            if array.dtype.kind in "iu":
                self._known[name] = array.reshape(-1).tolist()
            elif array.size == 1:
                self._known[name] = float(array.reshape(-1)[0])
            else:
                self.register_buffer(f"constant_{len(self._known)}", torch.from_numpy(array.copy()))
                self._known[name] = f"constant_{len(self._known)}"

    def forward(self, x: torch.Tensor):
        values: dict[str, object] = {self._input: x}
        for name, known in self._known.items():
            values[name] = getattr(self, known) if isinstance(known, str) else known
        for node in self._nodes:
            attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
            inputs = [values[name] for name in node.input]
            values[node.output[0]] = _OPERATIONS[node.op_type](*inputs, **attributes)
        probs, ids = values[self._output][0].max(dim=1)
        return ids, probs


def _convolution(x, weight, bias=None, *, strides, pads, dilations, group, kernel_shape):
    return functional.conv2d(x, weight, bias, tuple(strides), (pads[0], pads[1]), tuple(dilations), group)


def _batch_norm(x, gain, bias, mean, variance, *, epsilon, momentum):
    return functional.batch_norm(x, mean, variance, gain, bias, False, 0.0, epsilon)


def _average_pool(x, *, kernel_shape, strides, pads, ceil_mode, count_include_pad):
    return functional.avg_pool2d(x, tuple(kernel_shape), tuple(strides), (pads[0], pads[1]))


def _slice(x, starts, ends, axes, steps=(1,)):
    if isinstance(x, list):
        return x[starts[0] : ends[0]]
    return x.narrow(axes[0], starts[0], ends[0] - starts[0])


def _concat(*parts, axis):
    if isinstance(parts[0], list):
        return [each for part in parts for each in part]
    return torch.cat(parts, axis)


def _reshape(x, shape):
    return x.reshape([x.shape[place] if isinstance(size, int) and size == 0 else size for place, size in enumerate(shape)])


def _hard_sigmoid(x, *, alpha, beta):
    """PyTorch's own has the slope 1/6, which the export rounded to seven digits."""
    if abs(alpha - 1 / 6) > 1e-4 or beta != 0.5:
        raise ValueError(f"HardSigmoid with alpha = {alpha}, beta = {beta} is not PyTorch's")
    return functional.hardsigmoid(x)


_OPERATIONS: dict[str, Callable] = {
    "Add": lambda a, b: a + b,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": lambda x, to: x,  # of shapes only
    "Clip": lambda x, low, high: torch.clamp(x, low, high),
    "Concat": _concat,
    "Conv": _convolution,
    "Div": lambda a, b: a / b,
    "GlobalAveragePool": lambda x: x.mean((2, 3), keepdim=True),
    "HardSigmoid": _hard_sigmoid,
    "MatMul": lambda a, b: torch.matmul(a, b),
    "Mul": lambda a, b: a * b,
    "Pow": lambda x, exponent: torch.pow(x, exponent),
    "ReduceMean": lambda x, axes, keepdims=1: x.mean(list(axes), keepdim=bool(keepdims)),
    "Relu": lambda x: functional.relu(x),
    "Reshape": _reshape,
    "Shape": lambda x: [x.shape[place] for place in range(4)],
    "Sigmoid": lambda x: torch.sigmoid(x),
    "Slice": _slice,
    "Softmax": lambda x, axis: torch.softmax(x, axis),
    "Sqrt": lambda x: torch.sqrt(x),
    "Squeeze": lambda x, axes: x.squeeze(axes[0]),
    "Sub": lambda a, b: a - b,
    "Transpose": lambda x, perm: x.permute(list(perm)),
}


def _spelt_hardswish(x):
    return (x * torch.clamp(x + 3.0, 0.0, 6.0)) / 6.0


def _spelt_silu(x):
    return x * torch.sigmoid(x * 1.0)


def _spelt_layer_norm(x, gain, bias, epsilon):
    centred = x - x.mean([-1], keepdim=True)
    return (centred / torch.sqrt(torch.pow(centred, 2.0).mean([-1], keepdim=True) + epsilon)) * gain + bias


def _layer_norm(x, gain, bias, epsilon):
    return functional.layer_norm(x, (gain.shape[0],), gain, bias, epsilon)


def _linear(x, weight, bias):
    return functional.linear(x, weight.t(), bias)


_PATTERNS = (
    (lambda x, weight, bias: torch.matmul(x, weight) + bias, _linear),
    (_spelt_hardswish, lambda x: functional.hardswish(x)),
    (_spelt_silu, lambda x: functional.silu(x)),
    (_spelt_layer_norm, _layer_norm),
)
