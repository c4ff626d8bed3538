"""What travels between the examiner and an agent: JSON plus raw bytes, never pickle.

A message is a JSON value and a list of byte strings ("blobs"). Plain data passes by value;
everything else stays where it is and passes by reference. Decoding is strict, because one
end of the line runs a learner's code: a reply can only ever become plain data.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_DEPTH = 16
MAX_ITEMS = 100_000
DICTIONARIES = (dict, Counter, defaultdict, OrderedDict)  # equal to one another in Python, so plain data here, too
_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")


class WireError(ValueError):
    """A message that does not follow the format."""


def clean(text: object, limit: int) -> str:
    """A party's words as text that any file and any terminal takes: at most ``limit`` characters of UTF-8, no controls."""
    whole = str(text)[:limit].encode("utf-8", errors="replace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in whole)


@dataclass(frozen=True)
class Ref:
    """An object that lives in the agent's process; ``kind`` is its class name there."""

    id: int
    kind: str = ""


@dataclass(frozen=True)
class BufferRef:
    """A device buffer that the examiner lent to the agent's process."""

    id: int


def encode(value: Any, blobs: list[bytes], by_reference: Callable[[Any], Any] | None = None, depth: int = 0) -> Any:
    """Turn ``value`` into JSON-ready data, appending array bytes to ``blobs``.

    ``by_reference`` is asked for a `Ref` or `BufferRef` where a value is no plain data;
    without it such a value raises `WireError`.
    """
    if depth > MAX_DEPTH:
        raise WireError("nested too deeply")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Ref):
        return {"t": "ref", "id": value.id, "kind": value.kind}
    if isinstance(value, BufferRef):
        return {"t": "buffer", "id": value.id}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        value = np.asarray(value)
        if value.dtype.kind != "c":
            return value.item()
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        blobs.append(np.ascontiguousarray(value).tobytes())
        return {"t": "array", "dtype": value.dtype.str, "shape": list(value.shape), "blob": len(blobs) - 1}
    if type(value) is bytes:  # a plan, say
        blobs.append(value)
        return {"t": "bytes", "blob": len(blobs) - 1}
    if type(value) in (list, tuple):
        return {"t": "list", "v": [encode(item, blobs, by_reference, depth + 1) for item in value]}
    if type(value) in DICTIONARIES and all(type(key) is str for key in value):
        return {"t": "dict", "v": [[key, encode(item, blobs, by_reference, depth + 1)] for key, item in value.items()]}
    if by_reference is None:
        raise WireError(f"cannot send a {type(value).__name__}")
    return encode(by_reference(value), blobs, None, depth + 1)


def decode(data: Any, blobs: list[bytes], depth: int = 0) -> Any:
    """Undo `encode`; raises `WireError` for anything that `encode` would not have written."""
    if depth > MAX_DEPTH:
        raise WireError("nested too deeply")
    if data is None or type(data) in (bool, int, float, str):
        return data
    if type(data) is not dict:
        raise WireError("not a tagged value")
    match data.get("t"):
        case "ref":
            return Ref(_integer(data.get("id")), clean(data.get("kind"), 80))
        case "buffer":
            return BufferRef(_integer(data.get("id")))
        case "list":
            return [decode(item, blobs, depth + 1) for item in _items(data)]
        case "dict":
            pairs = _items(data)
            if not all(type(pair) is list and len(pair) == 2 and type(pair[0]) is str for pair in pairs):
                raise WireError("not a dictionary")
            return {key: decode(item, blobs, depth + 1) for key, item in pairs}
        case "array":
            return _array(data, blobs)
        case "bytes":
            return _blob(data, blobs)
    raise WireError("unknown tag")


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise WireError("not an integer")
    return value


def _items(data: dict) -> list:
    items = data.get("v")
    if type(items) is not list or len(items) > MAX_ITEMS:
        raise WireError("not a list of a sensible length")
    return items


def _blob(data: dict, blobs: list[bytes]) -> bytes:
    index = _integer(data.get("blob"))
    if not 0 <= index < len(blobs):
        raise WireError("missing bytes")
    taken, blobs[index] = blobs[index], b""  # each blob once: a message must not grow by decoding
    return bytes(taken)


def _array(data: dict, blobs: list[bytes]) -> np.ndarray:
    dtype, shape = data.get("dtype"), data.get("shape")
    # The pattern keeps object dtypes out: an array must be bytes and nothing else.
    if type(dtype) is not str or not _DTYPE.fullmatch(dtype):
        raise WireError("dtype not allowed")
    if type(shape) is not list or not all(type(n) is int and n >= 0 for n in shape):
        raise WireError("not a shape")
    try:
        return np.frombuffer(_blob(data, blobs), np.dtype(dtype)).reshape(shape).copy()
    except (ValueError, TypeError) as error:
        raise WireError(f"bytes do not fill the array: {error}") from None
