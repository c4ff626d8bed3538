"""Lists every public name of TensorRT's Python bindings, for ``test_tensorrt_names.py`` to compare the course with.

usage: python tests/tensorrt_names.py OUT.json ["a note on how the bindings were loaded"]

Run it where ``import tensorrt`` works, or with the folder of an unpacked wheel ``tensorrt-cuNN-bindings`` on PYTHONPATH.
Nothing of TensorRT is called, so it needs no GPU. The bindings' libraries must load: TensorRT's own, or empty ones of the
same names that only define the functions which the bindings import (``nm -D --undefined-only tensorrt.so`` lists them).

A listing holds ``version`` and ``note``, then, a line each:
    functions   name -> signatures, one of each overload
    constants   name -> class
    classes     name (``ILogger.Severity``) -> bases; members (of an enum); methods (name -> signatures); overrides (methods
                that the docstring asks a subclass for); properties (name -> type); writable (properties that can be set)
A signature is Python's, without self and without types of arguments: ``(input, axis=...) -> ITensor``. Arguments that cannot
be passed by keyword stand before a ``/``.
"""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

PROTOCOLS = {"__init__", "__call__", "__getitem__", "__setitem__", "__len__", "__iter__", "__contains__"}
OPEN, CLOSE = "([{<", ")]}>"


def split(text: str, separator: str) -> list[str]:
    """text cut at each separator that stands in no bracket or quotes."""
    parts, depth, quote = [""], 0, ""
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in OPEN:
            depth += 1
        elif char in CLOSE and text[at - 1 : at + 1] != "->":
            depth -= 1
        if char == separator and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def plain_type(text: str) -> str:
    """A type as a docstring gives it, without names of modules and of C++ namespaces."""
    bare = re.sub(r"\b(?:[a-z_]\w*(?:\.|::))+(?=\w)", "", text.strip())
    return re.sub(r"\b(?:List|Tuple|Dict)\b", lambda name: name[0].lower(), bare)


def signature(arguments: str, returns: str) -> str:
    """'self: m.C, x: int, y: int = 3', 'm.D' -> '(x, y=...) -> D'"""
    given = []
    for argument in split(arguments, ","):
        name = re.match(r"\**\w+|\*|/", argument)[0]
        if name != "self":
            given.append(name + "=..." * (len(split(argument, "=")) > 1))
    # So pybind11 calls arguments to which the bindings gave no name.
    unnamed = sum(bool(re.fullmatch(r"arg\d+", name)) for name in given)
    if unnamed:
        given.insert(unnamed, "/")
    return f"({', '.join(given)}) -> {plain_type(returns)}"


def signatures(function: object, name: str) -> list[str]:
    """One of each overload; none where the docstring tells none."""
    if inspect.isfunction(function):
        return [signature(str(inspect.signature(function))[1:-1], "object")]
    found = []
    for line in (function.__doc__ or "").splitlines():
        head = re.match(rf"(?:\d+\. )?{re.escape(name)}\((.*)\) -> (.+)$", line)
        if head and head[1] != "*args, **kwargs":
            found.append(signature(head[1], head[2]))
    return found


def public(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("_") or name in PROTOCOLS)


def describe(cls: type) -> dict:
    """What the class itself defines; what it inherits is found by its bases."""
    members = sorted(getattr(cls, "__members__", {}))
    methods, properties, writable = {}, {}, []
    for name in public(vars(cls)):
        value = inspect.getattr_static(cls, name)
        if name in members or inspect.isclass(value):
            continue
        if inspect.isdatadescriptor(value):
            told = re.search(r"\) -> (.+)", getattr(getattr(value, "fget", None), "__doc__", None) or "")
            properties[name] = plain_type(told[1]) if told else "object"
            if getattr(value, "fset", None):
                writable.append(name)
        elif callable(getattr(cls, name)):
            methods[name] = signatures(getattr(cls, name), name)
        else:
            properties[name] = type(getattr(cls, name)).__qualname__
    asked = re.findall(r"def (\w+)\((self\b.*)\):", cls.__doc__ or "")
    kept = {
        "bases": [base.__qualname__ for base in cls.__bases__ if base.__module__.startswith("tensorrt")],
        "members": members,
        "methods": methods,
        "overrides": {name: signature(arguments, "object") for name, arguments in asked if name != "__init__"},
        "properties": properties,
        "writable": writable,
    }
    return {key: value for key, value in kept.items() if value}


def classes(owner: object, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Classes of a module and, under names with a dot, those that they hold. One class may bear two names."""
    for name in public(vars(owner)):
        value = inspect.getattr_static(owner, name)
        if inspect.isclass(value) and value.__module__.startswith("tensorrt"):
            yield prefix + name, value
            if not prefix:
                yield from classes(value, f"{name}.")


def listing(module: ModuleType, note: str = "") -> dict:
    found = dict(classes(module))
    others = {name: vars(module)[name] for name in public(vars(module)) if name not in found}
    others = {name: value for name, value in others.items() if not inspect.ismodule(value)}
    return {
        "version": module.__version__,
        "note": note,
        "functions": {name: signatures(value, name) for name, value in others.items() if inspect.isroutine(value)},
        "constants": {name: type(value).__qualname__ for name, value in others.items() if not inspect.isroutine(value)},
        "classes": {name: describe(cls) for name, cls in sorted(found.items())},
    }


def text(found: dict) -> str:
    """JSON with a function, constant or class a line."""
    lines = []
    for key, value in found.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            lines.append(f"{json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def bindings() -> ModuleType:
    try:
        return importlib.import_module("tensorrt")
    except ModuleNotFoundError:
        return importlib.import_module("tensorrt_bindings")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(listing(bindings(), *sys.argv[2:])), encoding="utf-8")
