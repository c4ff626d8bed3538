"""Course and grader use only names of TensorRT that its bindings of 10.6 and of 11 have.

The listings in ``records`` were made from the real bindings by ``tensorrt_names.py``; no TensorRT is needed here.
"""

import importlib.util
import json
import re
import textwrap
from pathlib import Path

import pytest
import tensorrt_names
from tensorrt_uses import Uses, unknown_in_prose
from tensorrt_versions import Version, fits

from launchlab import manifest, paths

RECORDS = sorted((Path(__file__).parent / "records").glob("tensorrt_*.json"))
LISTINGS = {path.stem.removeprefix("tensorrt_"): json.loads(path.read_text(encoding="utf-8")) for path in RECORDS}
VERSIONS = [Version(listing) for listing in LISTINGS.values()]
CHAPTERS = [chapter for chapter in manifest.chapters() if chapter.source.exists()]
# Findings that are right as they stand: text of the finding -> why.
ACCEPTED: dict[str, str] = {  # methods of a class, planted and put back: the bindings' classes allow it, as tried with 10.6
    f"{module}.{name}: {name} cannot be set in TensorRT {', '.join(LISTINGS)}": "planted"
    for module, name in (("trt", "IExecutionContext.execute_async_v3"), ("tensorrt", "Runtime.deserialize_cuda_engine"))
}

RIGHT = """
import numpy as np
import cupy as cp
import onnxruntime
import tensorrt as trt
import tensorrt.plugin as plugins
from tensorrt import ICudaEngine
from launchlab import lab
from launchlab.exam import student

class Allocator(trt.IOutputAllocator):
    def __init__(self):
        trt.IOutputAllocator.__init__(self)
        self.shapes = {}

    def reallocate_output_async(self, tensor_name, memory, size, alignment, stream):
        return self.grow(size)

    def notify_shape(self, tensor_name, shape):
        self.shapes[tensor_name] = tuple(shape)

    def grow(self, size):
        return size

def build(width: int, flag=trt.BuilderFlag.TF32) -> bytes | None:
    builder = trt.Builder(trt.Logger(trt.Logger.WARNING))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    x = network.add_input(name="x", dtype=trt.float32, shape=(-1, width))
    weights = network.add_constant((width, width), trt.Weights(np.ones((width, width), np.float32))).get_output(0)
    product = network.add_matrix_multiply(x, trt.MatrixOperation.NONE, weights, trt.MatrixOperation.NONE)
    scaled = network.add_quantize(product.get_output(0), weights, trt.DataType.INT8)
    scaled.axis = 1
    network.mark_output(scaled.get_output(0))
    network.get_output(0).name = "y"
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 1 << 20)
    config.set_flag(flag)
    if fp16 := getattr(trt.BuilderFlag, "FP16", None):
        config.set_flag(fp16)
    config.builder_optimization_level, config.profiling_verbosity = 2, trt.ProfilingVerbosity.DETAILED
    profile = builder.create_optimization_profile()
    profile.set_shape("x", min=(1, width), opt=(8, width), max=(64, width))
    profile.set_shape_input(input="n", min=[1], opt=[2], max=[3])
    config.add_optimization_profile(profile)
    for layer in network:
        print(layer.name, layer.type == trt.LayerType.CAST, layer.get_output(0).dtype.itemsize)
    return builder.build_serialized_network(network, config)

class Runner:
    def __init__(self, plan: bytes):
        self.engine = trt.Runtime(trt.Logger()).deserialize_cuda_engine(plan)
        self.context = None
        self.context = self.engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)

    @property
    def size(self):
        return self.engine.device_memory_size_v2

    def run(self, stream, **pointers):
        self.context.set_device_memory(0, self.size)
        for name, pointer in pointers.items():
            if not self.context.set_tensor_address(name, pointer):
                raise ValueError(name)
        return self.context.execute_async_v3(stream_handle=stream.ptr)

contexts = [engine.create_execution_context() for engine in student.build_engines(3)]
contexts[0].set_input_shape("x", (1, 2))
session = onnxruntime.InferenceSession("m.onnx")
session.get_inputs()[0].name
plugins.register('a::b')
HELPER = '''
import tensorrt as trt
def names(engine: trt.ICudaEngine) -> list[str]:
    return [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
'''
"""

WRONG = {
    # Enums and classes that 11 lost, or got.
    "trt.BuilderFlag.FP16": "TensorRT 11.0, 11.4 has no BuilderFlag.FP16",
    "flags = 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)": "11.0, 11.4 has no NetworkDefinitionCreationFlag.EXP",
    "from tensorrt import IInt8Calibrator": "11.0, 11.4 has no IInt8Calibrator",
    "import tensorrt\ntensorrt.DataType.FP4": "TensorRT 10.6 has no DataType.FP4",
    "from tensorrt import BuilderFlag as Flag\nFlag.INT8": "has no BuilderFlag.INT8",
    "Flag = trt.BuilderFlag\ngetattr(Flag, 'BF16')": "has no BuilderFlag.BF16",
    "def f(mode: trt.TacticSource = trt.TacticSource.CUDNN): pass": "has no TacticSource.CUDNN",
    "trt.bfloat": "has no bfloat; bfloat16?",
    # Names of objects whose class is known.
    "b = trt.Builder(trt.Logger())\nb.create_networks()": "Builder.create_networks; create_network?",
    "b = trt.Builder(trt.Logger())\nb.create_network().add_squeeze(x, 0)": "TensorRT 10.6 has no INetworkDefinition.add_squeeze",
    "def f(e: trt.ICudaEngine):\n    return e.device_memory_size": "11.0, 11.4 has no ICudaEngine.device_memory_size",
    "def f(n: 'trt.INetworkDefinition | None'):\n    for layer in n: layer.precision = trt.float16": "has no ILayer.precision",
    "def f(t: trt.ITensor):\n    t.dtype = trt.float16": "ITensor.dtype cannot be set in TensorRT 11.0, 11.4",
    "class R:\n    def __init__(self, e: trt.ICudaEngine):\n        self.c = e.create_execution_context()\n"
    "    def run(self): self.c.execute_async_v2()": "has no IExecutionContext.execute_async_v2",
    "def made(n: trt.INetworkDefinition):\n    return n.add_shape(n.get_input(0))\ndef g(n):\n    made(n).set_precision()": (
        "has no IShapeLayer.set_precision"
    ),
    "def f(p: trt.IOptimizationProfile):\n    p.profile_stream": "TensorRT 10.6, 11.0 has no IOptimizationProfile.profile_stream",
    # Names of objects whose class is not.
    "c.all_shape_inputs_specified": "11.0, 11.4 has no all_shape_inputs_specified",
    "engines[0].create_runtime_config()": "10.6 has no create_runtime_config",
    "c.set_tensors_address('x', 1)": "set_tensors_address; set_tensor_address?",
    # Arguments.
    "p.set_shape_input('n', minimum=[1], opt=[2], max=[3])": "has set_shape_input(input, min, opt, max)",
    "p.set_shape_input(name='n', min=[1], opt=[2], max=[3])": "has set_shape_input(input, min, opt, max)",
    "def f(c: trt.IExecutionContext):\n    c.set_device_memory(1)": "has IExecutionContext.set_device_memory(memory, size)",
    "def f(n: trt.INetworkDefinition):\n    n.add_quantize(x, s)": "11.0, 11.4 has INetworkDefinition.add_quantize(input, scale, o",
    "trt.Builder()": "has Builder(logger)",
    "def f(r: trt.IErrorRecorder):\n    r.get_error_desc(index=0)": "get_error_desc(arg0, /)",
    # Methods that TensorRT calls.
    "class A(trt.IOutputAllocator):\n    def reallocate_outputs_async(self, n, m, s, a, stream): pass": "calls reallocate_output_async",
    "class P(trt.IProgressMonitor):\n    def phase_start(self, name, parent): pass": "calls it with (phase_name, parent_phase, num_steps)",
    # A program in a string.
    'SOURCE = """\nimport tensorrt as trt\ndef f():\n    return trt.BuilderFlag.FP8\n"""': "has no BuilderFlag.FP8",
}  # fmt: skip


def problems(path: Path, text: str) -> list[str]:
    place = path.relative_to(paths.ROOT)
    found = [f"{place}:{line}: {what}" for line, what in Uses(text, VERSIONS).problems]
    found += [f"{place}:{line}: no version has {name}" for line, name in unknown_in_prose(text, VERSIONS)]
    return [text for text in found if text.split(": ", 1)[1] not in ACCEPTED]


def code(notebook: Path) -> str:
    """Code of a notebook, its other cells as comments; IPython's own lines left out."""
    lines = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            source = textwrap.indent(source, "# ", lambda line: True)
        lines += [re.sub(r"^( *)[%!].*", r"\1pass", line) for line in source.split("\n")]
    return "\n".join(lines)


def test_listings_are_of_10_6_and_of_11_and_written_by_the_script():
    assert {"10.6"} < set(LISTINGS)
    assert any(name.startswith("11.") for name in LISTINGS)
    for path, (name, listing) in zip(RECORDS, LISTINGS.items(), strict=True):
        assert listing["version"].startswith(f"{name}.")
        assert listing["note"]
        assert len(listing["classes"]) > 150
        assert path.read_text(encoding="utf-8") == tensorrt_names.text(listing)
        assert path.stat().st_size < 300_000


@pytest.mark.skipif(not importlib.util.find_spec("tensorrt"), reason="TensorRT is not installed")
def test_listing_is_that_of_the_installed_tensorrt():
    here = tensorrt_names.listing(tensorrt_names.bindings())
    name = ".".join(here["version"].split(".")[:2])
    if name not in LISTINGS:
        pytest.skip(f"no listing of TensorRT {name}")
    for part in ("functions", "constants", "classes"):
        assert here[part] == LISTINGS[name][part]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.name)
def test_chapter_uses_only_what_every_version_has(chapter):
    found = problems(chapter.source, chapter.source.read_text(encoding="utf-8"))
    for path in chapter.source.parent.glob("*.py"):
        if path != chapter.source:
            found += problems(path, path.read_text(encoding="utf-8"))
    if chapter.release.exists():
        found += problems(chapter.release, code(chapter.release))
    assert found == []


def test_grader_uses_only_what_every_version_has():
    assert [
        found
        for path in sorted((paths.GRADER / "src").rglob("*.py"))
        for found in problems(path, path.read_text(encoding="utf-8"))
    ] == []


def test_a_right_program_passes_and_is_looked_at():
    uses = Uses(RIGHT, VERSIONS)
    assert uses.problems == []
    assert unknown_in_prose(RIGHT, VERSIONS) == []
    assert uses.checked > 100


@pytest.mark.parametrize(("source", "told"), WRONG.items(), ids=[source.split("\n")[-1][:60] for source in WRONG])
def test_a_wrong_use_is_reported(source, told):
    found = Uses(source, VERSIONS).problems
    assert len(found) == 1, found
    assert told in found[0][1]
    assert 1 <= found[0][0] <= source.count("\n") + 1


def test_every_wrong_use_in_a_program_is_reported_at_its_line():
    program = RIGHT.replace("trt.BuilderFlag.TF32", "trt.BuilderFlag.FP16").replace(
        "device_memory_size_v2", "device_memory_size"
    )
    lines = [line for line, _ in Uses(program, VERSIONS).problems]
    assert [program.split("\n")[line - 1].strip() for line in lines] == [
        "def build(width: int, flag=trt.BuilderFlag.FP16) -> bytes | None:",
        "return self.engine.device_memory_size",
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("# `trt.BuilderFlag.FP16` is gone, `trt.Builder` is not, trt.float32", []),
        (
            "print('请用 trt.BuilderFlags.TF32，或 trt.Builder.create_networks')",
            ["trt.BuilderFlags.TF32", "trt.Builder.create_networks"],
        ),
    ],
)
def test_prose_names_nothing_that_never_was(text, names):
    assert [name for _, name in unknown_in_prose(text, VERSIONS)] == names


def test_notebooks_are_read_whatever_ipython_understands(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# 标题\n", "\n", "文字"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "if True:\n", "    !nvidia-smi\n", "trt.BuilderFlag.FP16"]},
    ]
    path = tmp_path / "one.ipynb"
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert Uses(code(path), VERSIONS).problems == [(7, "trt.BuilderFlag.FP16: TensorRT 11.0, 11.4 has no BuilderFlag.FP16")]


@pytest.mark.parametrize(
    ("arguments", "returns", "expected"),
    [
        (
            "self: m.tensorrt.Builder, flags: typing.SupportsInt = 0",
            "m.tensorrt.INetworkDefinition",
            "(flags=...) -> INetworkDefinition",
        ),
        ("self: m.C, arg0: int, arg1: List[str]", "Tuple[m.D, int]", "(arg0, arg1, /) -> tuple[D, int]"),
        (
            "self: m.C, f: Callable[[int, str], bool] = None, g: m.E = <E.A: 0>, h: str = ','",
            "None",
            "(f=..., g=..., h=...) -> None",
        ),
        ("", "nvinfer1::v_1_0::IGpuAllocator", "() -> IGpuAllocator"),
    ],
)
def test_signatures_of_docstrings_are_read(arguments, returns, expected):
    assert tensorrt_names.signature(arguments, returns) == expected


@pytest.mark.parametrize(
    ("signature", "positional", "keywords", "more", "expected"),
    [
        ("(a, b=...) -> C", 1, set(), False, True),
        ("(a, b=...) -> C", 0, {"a", "b"}, False, True),
        ("(a, b=...) -> C", 0, {"b"}, False, False),
        ("(a, b=...) -> C", 0, {"b"}, True, True),
        ("(a, b=...) -> C", 2, {"b"}, False, False),
        ("(a, b=...) -> C", 3, set(), False, False),
        ("(a, b=..., c) -> C", 1, {"c"}, False, True),
        ("(arg0, /) -> C", 1, set(), False, True),
        ("(arg0, /) -> C", 0, {"arg0"}, False, False),
        ("() -> tuple[A, B]", 0, set(), False, True),
        ("() -> tuple[A, B]", 1, set(), False, False),
    ],
)
def test_calls_are_compared_with_signatures(signature, positional, keywords, more, expected):
    assert fits(signature, positional, keywords, more) is expected
