"""What one version of TensorRT's bindings has, by a listing that ``tensorrt_names.py`` made."""

from collections.abc import Iterator
from typing import NamedTuple


class Type(NamedTuple):
    """kind: module, class, object, method, function of TensorRT; def, userclass, user: of the source; course; foreign."""

    kind: str
    name: str = ""
    scope: object = None


# FOREIGN: of other packages, and so is all that comes of it.
MODULE, FOREIGN = Type("module"), Type("foreign")


class Version:
    """One listing."""

    def __init__(self, listing: dict) -> None:
        self.name = listing["version"]
        self.functions, self.constants, self.classes = listing["functions"], listing["constants"], listing["classes"]

    def lineage(self, name: str) -> Iterator[tuple[str, dict]]:
        """A class and those that it inherits from."""
        if name in self.classes:
            yield name, self.classes[name]
            for base in self.classes[name].get("bases", ()):
                yield from self.lineage(base)

    def knows(self, owner: Type) -> bool:
        return owner == MODULE or owner.name in self.classes

    def object(self, type_name: str) -> Type:
        """``IBuilder`` and ``IParserError`` are what some docstrings call Builder and ParserError."""
        found = next((name for name in (type_name, type_name.removeprefix("I")) if name in self.classes), None)
        return Type("object", found) if found else FOREIGN

    def attribute(self, owner: Type, name: str) -> Type | None:
        """What owner.name is; None where this version has no such name."""
        if owner == MODULE:
            if name in self.classes:
                return Type("class", name)
            if name in self.constants:
                return self.object(self.constants[name])
            return Type("function", name) if name in self.functions else None
        for cls, found in self.lineage(owner.name):
            if f"{cls}.{name}" in self.classes:
                return Type("class", f"{cls}.{name}")
            if name in found.get("members", ()):
                return Type("object", cls)
            if name in found.get("methods", ()):
                return Type("method", f"{cls}.{name}")
            if name in found.get("properties", ()):
                return self.object(found["properties"][name])
        return None

    def names(self, owner: Type) -> set[str]:
        if owner == MODULE:
            return {*self.functions, *self.constants, *self.classes}
        parts = ("members", "methods", "overrides", "properties")
        return {name for _, found in self.lineage(owner.name) for part in parts for name in found.get(part, ())}

    def writable(self, owner: Type, name: str) -> bool:
        return any(name in found.get("writable", ()) for _, found in self.lineage(owner.name))

    def signatures(self, function: Type) -> list[str]:
        """Of a function, a method, or a class (its constructor); none where the bindings do not tell."""
        if function.kind == "function":
            return self.functions.get(function.name, [])
        cls, method = (function.name, "__init__") if function.kind == "class" else function.name.rsplit(".", 1)
        return next((found["methods"][method] for _, found in self.lineage(cls) if method in found.get("methods", ())), [])

    def overrides(self, cls: str) -> dict[str, list[str]]:
        """Methods of cls that a subclass may define -> signatures."""
        found: dict[str, list[str]] = {}
        for _, one in reversed(list(self.lineage(cls))):
            found |= one.get("methods", {}) | {name: [text] for name, text in one.get("overrides", {}).items()}
        return found

    def methods_called(self, name: str) -> list[str]:
        """Signatures of every method of that name."""
        return [text for one in self.classes.values() for text in one.get("methods", {}).get(name, ())]


def returned(signature: str) -> str:
    return signature.rsplit("-> ", 1)[1]


def fits(signature: str, positional: int, keywords: set[str], more: bool = False) -> bool:
    """Whether a call with so many positional arguments and these keywords is one of signature. more: with * or ** besides."""
    inside = signature.rsplit(") ->", 1)[0][1:]
    names = [name for name in inside.split(", ") if name and name != "/"]
    by_position_only = names[: inside.split(", ").index("/")] if "/" in inside.split(", ") else []
    bare = [name.removesuffix("=...") for name in names]
    if positional > len(names) or not keywords <= set(bare[positional:]) - set(by_position_only):
        return False
    return more or all(
        name in keywords or text.endswith("=...") for name, text in list(zip(bare, names, strict=True))[positional:]
    )
