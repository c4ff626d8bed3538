"""What tests put in the place of a TensorRT object takes arguments as the real one does: by keyword too, so that no right call fails."""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from launchlab import manifest

LISTING = json.loads((Path(__file__).parent / "records" / "tensorrt_10.6.json").read_text(encoding="utf-8"))
PLANTED = ("IExecutionContext", "ICudaEngine", "Builder", "Runtime", "OnnxParser", "IBuilderConfig", "INetworkDefinition", "IOptimizationProfile", "Refitter", "ITimingCache")
METHOD = re.compile(r"^ +def (\w+)\(self(?:, )?(.*)\)(?: ->.*)?:", re.MULTILINE)


def names(parameters: str) -> list[str]:
    """Names of parameters, as "name: type = default" tells them one after the other."""
    return [part.split(":")[0].split("=")[0].strip() for part in parameters.split(",") if part.strip()]


def real() -> dict[str, set[tuple[str, ...]]]:
    """Method: the names of its parameters, one tuple an overload."""
    found = defaultdict(set)
    for owner in PLANTED:
        for method, signatures in LISTING["classes"][owner]["methods"].items():
            for signature in signatures:
                found[method].add(tuple(names(signature[1 : signature.rindex(")")])))
    return found


def wrong(source: str) -> list[str]:
    """Methods of classes in ``source``, or in its strings, that are named like TensorRT's and refuse their arguments by name."""
    found, known = [], real()
    for method, parameters in METHOD.findall(source):
        own = names(parameters)
        plain = tuple(name for name in own if not name.startswith("*"))
        if not method.startswith("__") and method in known and not any(name.startswith("**") for name in own) and not any(plain[: len(wanted)] == wanted for wanted in known[method]):
            found.append(f"{method}({parameters})")
    return found


@pytest.mark.parametrize(("method", "refuses"), [
    ("def execute_async_v3(self, lane):", True),
    ("def execute_async_v3(self, *rest):", True),
    ("def execute_async_v3(self, stream_handle):", False),
    ("def execute_async_v3(self, stream_handle, *rest):", False),
    ("def set_named_weights(self, name, *rest, **more):", False),
    ("def set_tensor_address(self, name: str, pointer=0) -> bool:", True),
    ("def set_input_shape(self, name, shape):", False),
    ("def note(self, what):", False),
])
def test_what_is_looked_for(method, refuses):
    assert bool(wrong(f"class Planted:\n    {method}\n        pass\n")) is refuses


@pytest.mark.parametrize("chapter", [pytest.param(each, id=each.name) for each in manifest.chapters() if each.source.exists()])
def test_stand_ins_take_arguments_by_their_real_names(chapter):
    assert wrong(chapter.source.read_text(encoding="utf-8")) == []
