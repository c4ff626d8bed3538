"""Finds in Python source what some version of TensorRT lacks, by the listings that ``tensorrt_names.py`` made.

Types are followed as far as a reader would: ``trt.X``, what constructors, methods and properties of TensorRT return,
annotations, attributes of ``self``, and functions of the source that return such things. Where the type is known, each
attribute, setting of an attribute and call is compared with every version. Where it is not, only names that are TensorRT's
beyond doubt are judged: those with an underscore that some version lacks, near misses of such names, and arguments that no
method of that name takes.
"""

from __future__ import annotations

import ast
import difflib
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tensorrt_versions import FOREIGN, MODULE, Type, Version, fits, returned

# Of launchlab: its functions may return anything.
COURSE = Type("course")
ORDINARY = {name for owner in (np, np.ndarray, dict, list, str, set, bytes, Path) for name in dir(owner)}


@dataclass(eq=False)
class Scope:
    """Names of a module, a function or a class (for a class: its attributes too), and what they are bound to."""

    parent: Scope | None = None
    node: ast.AST | None = None
    bound: dict[str, list] = field(default_factory=lambda: defaultdict(list))
    busy: set[str] = field(default_factory=set)


class Uses:
    """problems: (line, text) of each wrong use in a source. checked: how many attributes and calls were compared."""

    def __init__(self, source: str, versions: list[Version]) -> None:
        self.versions = versions
        self.problems: list[tuple[int, str]] = []
        self.checked = 0
        tree = ast.parse(source)
        self.own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        self.own |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if isinstance(node.ctx, ast.Store)
        }
        self.own |= {
            node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        shared = set.intersection(*({*version.classes} for version in versions))
        named = [{name for cls in shared for name in version.names(Type("class", cls))} for version in versions]
        self.everywhere = {name for name in set.intersection(*named) if "_" in name} - ORDINARY
        self.somewhere = {name for name in set.union(*named) if "_" in name and not name.isupper()} - ORDINARY
        self.scope_of: dict[ast.AST, Scope] = {}
        self._visit(tree, self._open(tree, Scope()))
        self.problems = sorted(set(self.problems))

    # What names are bound to.

    def _open(self, node: ast.AST, scope: Scope) -> Scope:
        """A scope filled with all that the statements below node bind, functions and classes below it included."""
        self.scope_of[node] = scope
        scope.node = node
        for child in ast.iter_child_nodes(node):
            self._bind(child, scope)
        return scope

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                inner = Scope(scope)
                marks = {ast.unparse(mark).rsplit(".")[-1] for mark in getattr(node, "decorator_list", ())}
                if not isinstance(node, ast.Lambda):
                    got = marks & {"property", "cached_property"}
                    scope.bound[node.name].append(("returned", inner) if got else Type("def", node.name, inner))
                method = isinstance(scope.node, ast.ClassDef) and "staticmethod" not in marks
                for place, one in enumerate([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]):
                    own = method and place == 0
                    inner.bound[one.arg].append(Type("user", scope=scope) if own else ("annotation", one.annotation, scope))
                self._open(node, inner)
                return
            case ast.ClassDef():
                inner = Scope(scope)
                scope.bound[node.name].append(Type("userclass", node.name, inner))
                self._open(node, inner)
                return
            case ast.Import():
                for one in node.names:
                    root, _, inner = one.name.partition(".")
                    scope.bound[one.asname or root].append(FOREIGN if inner and one.asname else _imported(root))
            case ast.ImportFrom():
                root = COURSE if node.level else _imported(node.module)
                for one in node.names:
                    scope.bound[one.asname or one.name].append(("member", MODULE, one.name) if root == MODULE else root)
            case ast.Assign():
                for target in node.targets:
                    self._target(target, ("value", node.value, scope), scope)
            case ast.AnnAssign():
                self._target(node.target, ("annotation", node.annotation, scope), scope)
            case ast.AugAssign():
                self._target(node.target, None, scope)
            case ast.NamedExpr():
                self._target(node.target, ("value", node.value, scope), scope)
            case ast.withitem(optional_vars=ast.expr()):
                self._target(node.optional_vars, ("value", node.context_expr, scope), scope)
            case ast.For() | ast.comprehension():
                self._target(node.target, ("element", node.iter, scope), scope)
        for child in ast.iter_child_nodes(node):
            self._bind(child, scope)

    def _target(self, target: ast.expr, binding: tuple | None, scope: Scope) -> None:
        match target:
            case ast.Name():
                scope.bound[target.id].append(binding)
            case ast.Attribute(value=ast.Name(id=owner)) if scope.bound.get(owner) and isinstance(scope.bound[owner][0], Type):
                if scope.bound[owner][0].kind == "user":
                    scope.bound[owner][0].scope.bound[target.attr].append(binding)
            case ast.Tuple() | ast.List():
                pairs = isinstance(binding, tuple) and binding[0] == "value" and isinstance(binding[1], ast.Tuple | ast.List)
                values = binding[1].elts if pairs and len(binding[1].elts) == len(target.elts) else [None] * len(target.elts)
                for one, value in zip(target.elts, values, strict=True):
                    self._target(one, value and ("value", value, binding[2]), scope)

    # What an expression is.

    def look_up(self, name: str, scope: Scope | None, start: Scope | None = None) -> Type | None:
        start = start or scope
        if scope is None:
            return MODULE if name in ("trt", "tensorrt") else None
        # A method does not see the names of its class.
        if name not in scope.bound or (isinstance(scope.node, ast.ClassDef) and scope is not start):
            return self.look_up(name, scope.parent, start)
        return self.bound_in(scope, name)

    def bound_in(self, scope: Scope, name: str) -> Type | None:
        """The one type of all that is bound to the name; None where they differ. None of Python says nothing."""
        if name in scope.busy or name not in scope.bound:
            return None
        scope.busy.add(name)
        try:
            silent = [b for b in scope.bound[name] if isinstance(b, tuple) and b[0] == "value" and _is_none(b[1])]
            types = {self.of_binding(one) for one in scope.bound[name] if one not in silent}
        finally:
            scope.busy.discard(name)
        return types.pop() if len(types) == 1 else None

    def of_binding(self, binding: object) -> Type | None:
        match binding:
            case Type():
                return binding
            case ("member", owner, name):
                return self.attribute(owner, name)
            case ("value", node, scope):
                return self.type_of(node, scope)
            case ("annotation", node, scope):
                return self.annotated(node, scope)
            case ("element", node, scope):
                return self.element(self.type_of(node, scope))
            case ("returned", scope):
                return self.returned_by(scope)
        return None

    def annotated(self, node: ast.expr | None, scope: Scope) -> Type | None:
        match node:
            case ast.Constant(value=str()):
                try:
                    return self.annotated(ast.parse(node.value, mode="eval").body, scope)
                except SyntaxError:
                    return None
            case ast.BinOp(op=ast.BitOr()):
                kept = [side for side in (node.left, node.right) if not _is_none(side)]
                return self.annotated(kept[0], scope) if len(kept) == 1 else None
            case ast.Name() | ast.Attribute():
                found = self.type_of(node, scope)
                if found and found.kind in ("class", "userclass"):
                    return self.made_by(found)
        return None

    def attribute(self, owner: Type, name: str) -> Type | None:
        return next((found for version in self.versions if (found := version.attribute(owner, name))), None)

    def made_by(self, function: Type | None) -> Type | None:
        """What a call returns."""
        match function:
            case Type(kind="class"):
                return Type("object", function.name)
            case Type(kind="userclass"):
                return Type("user", scope=function.scope)
            case Type(kind="method" | "function"):
                for version in self.versions:
                    kinds = {version.object(returned(text)) for text in version.signatures(function)}
                    if kinds:
                        return kinds.pop() if len(kinds) == 1 else FOREIGN
                return FOREIGN
            case Type(kind="def"):
                return self.returned_by(function.scope)
        return FOREIGN if function == FOREIGN else None

    def returned_by(self, scope: Scope) -> Type | None:
        if scope.node.returns:
            return self.annotated(scope.node.returns, scope.parent)
        if "return" in scope.busy:
            return None
        scope.busy.add("return")
        try:
            values = [node.value for node in _statements(scope.node) if isinstance(node, ast.Return)]
            types = {self.type_of(value, scope) for value in values if value and not _is_none(value)}
        finally:
            scope.busy.discard("return")
        return types.pop() if len(types) == 1 else None

    def element(self, owner: Type | None) -> Type | None:
        if owner and owner.kind == "object":
            return self.made_by(self.attribute(owner, "__getitem__"))
        return FOREIGN if owner == FOREIGN else None

    def type_of(self, node: ast.expr, scope: Scope) -> Type | None:
        match node:
            case ast.Name():
                return self.look_up(node.id, scope)
            case ast.Attribute():
                owner = self.type_of(node.value, scope)
                if owner in (None, COURSE, FOREIGN):
                    return owner
                if owner.kind == "user":
                    return self.bound_in(owner.scope, node.attr)
                return self.attribute(owner, node.attr) if owner.kind in ("module", "class", "object") else None
            case ast.Call():
                return self.made_by(self.type_of(node.func, scope))
            case ast.Subscript():
                return self.element(self.type_of(node.value, scope))
            case ast.NamedExpr():
                return self.type_of(node.value, scope)
            case ast.IfExp():
                types = {self.type_of(one, scope) for one in (node.body, node.orelse) if not _is_none(one)}
                return types.pop() if len(types) == 1 else None
            case ast.BoolOp(op=ast.Or()):
                return self.type_of(node.values[0], scope)
            case ast.Constant():
                return FOREIGN
        return None

    # What is wrong.

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Attribute():
                self._check_attribute(node, node.attr, self.type_of(node.value, scope), isinstance(node.ctx, ast.Store))
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str() as name)]):
                self._check_attribute(node, name, self.type_of(owner, scope), False)
            case ast.Call():
                self._check_call(node, scope)
            case ast.ImportFrom(module="tensorrt", level=0):
                for one in node.names:
                    self._check_attribute(node, one.name, MODULE, False)
            case ast.ClassDef():
                self._check_subclass(node, scope)
            case ast.Constant(value=str() as text) if "\n" in text and "tensorrt" in text:
                self._check_program(node, text)
        for child in ast.iter_child_nodes(node):
            self._visit(child, self.scope_of.get(child, scope))

    def _report(self, node: ast.AST, text: str) -> None:
        shown = ast.unparse(node)
        self.problems.append((node.lineno, f"{shown if len(shown) < 100 else shown[:97] + '...'}: {text}"))

    def _check_attribute(self, node: ast.AST, name: str, owner: Type | None, stored: bool) -> None:
        if name.startswith("__") or name == "*":
            return
        if owner is None:
            self._check_unknown(node, name)
        elif owner.kind in ("module", "class", "object"):
            self.checked += 1
            knowing = [version for version in self.versions if version.knows(owner)]
            lacking = [version for version in knowing if not version.attribute(owner, name)]
            what = f"{owner.name}.{name}" if owner.name else name
            if lacking:
                near = difflib.get_close_matches(name, knowing[0].names(owner), 1) if lacking == knowing else []
                self._report(node, f"{_in(lacking)} has no {what}" + (f"; {near[0]}?" if near else ""))
            elif stored:
                fixed = [version for version in knowing if not version.writable(owner, name)]
                if fixed:
                    self._report(node, f"{what} cannot be set in {_in(fixed)}")

    def _check_unknown(self, node: ast.AST, name: str) -> None:
        if name in self.own or "_" not in name or name in self.everywhere or name in ORDINARY:
            return
        if name in self.somewhere:
            self.checked += 1
            lacking = [v for v in self.versions if not any(name in v.names(Type("class", cls)) for cls in v.classes)]
            if lacking:
                self._report(node, f"{_in(lacking)} has no {name}")
        elif len(name) >= 10 and (near := difflib.get_close_matches(name, sorted(self.somewhere), 1, cutoff=0.92)):
            self._report(node, f"TensorRT has no {name}; {near[0]}?")

    def _check_call(self, node: ast.Call, scope: Scope) -> None:
        function = self.type_of(node.func, scope)
        keywords = {one.arg for one in node.keywords if one.arg}
        more = any(one.arg is None for one in node.keywords)
        positional = sum(not isinstance(one, ast.Starred) for one in node.args)
        more |= positional < len(node.args)
        if function is None:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name not in self.everywhere or name in self.own:
                return
            told = {version.name: version.methods_called(name) for version in self.versions}
        elif function.kind in ("class", "method", "function"):
            name = function.name
            told = {version.name: version.signatures(function) for version in self.versions}
        else:
            return
        self.checked += 1
        # trt.ILogger.__init__(self): the object is an argument.
        unbound = (
            isinstance(node.func, ast.Attribute) and (owner := self.type_of(node.func.value, scope)) and owner.kind == "class"
        )
        counts = (positional, positional - 1) if unbound else (positional,)
        wrong = [
            version
            for version in self.versions
            if (known := told[version.name]) and not any(fits(text, n, keywords, more) for text in known for n in counts)
        ]
        if wrong:
            shown = " or ".join(dict.fromkeys(told[wrong[0].name]))
            self._report(node, f"{_in(wrong)} has {name}{shown}")

    def _check_subclass(self, node: ast.ClassDef, scope: Scope) -> None:
        """A method of a wrong name is never called; one that takes other arguments fails when TensorRT calls it."""
        # _visit comes with the scope inside the class; its bases are looked up outside.
        bases = [found for base in node.bases if (found := self.type_of(base, scope.parent or scope)) and found.kind == "class"]
        defined = [one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("__")]
        for base in bases:
            known = {version.name: version.overrides(base.name) for version in self.versions}
            for one in defined:
                self.checked += 1
                self._check_override(one, f"{node.name}.{one.name}", base.name, known)

    def _check_override(self, method: ast.FunctionDef, shown: str, base: str, known: dict[str, dict[str, list[str]]]) -> None:
        taken = len([*method.args.posonlyargs, *method.args.args]) - 1
        free = method.args.vararg or method.args.defaults
        asked = {version: known[version.name].get(method.name) for version in self.versions}
        # Docstrings of interfaces leave the arguments out at times.
        told = {
            version: texts for version, texts in asked.items() if texts and not any(text.startswith("()") for text in texts)
        }
        wrong = [version for version, texts in told.items() if not any(fits(text, taken, set()) for text in texts)]
        if wrong and not free:
            self.problems.append((method.lineno, f"{shown}: {_in(wrong)} calls it with {asked[wrong[0]][0]}"))
        elif not any(asked.values()) and (
            near := difflib.get_close_matches(method.name, set().union(*known.values()), 1, 0.85)
        ):
            self.problems.append((method.lineno, f"{shown}: {base} calls {near[0]}"))

    def _check_program(self, node: ast.Constant, text: str) -> None:
        """A program in a string, such as a test cell hands to ``student.define``."""
        try:
            inside = Uses(textwrap.dedent(text), self.versions)
        except SyntaxError:
            return
        self.checked += inside.checked
        self.problems += [(node.lineno + line - 1, what) for line, what in inside.problems]


def _imported(package: str) -> Type:
    return MODULE if package == "tensorrt" else COURSE if package.split(".")[0] == "launchlab" else FOREIGN


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _in(versions: list[Version]) -> str:
    return "TensorRT " + ", ".join(".".join(version.name.split(".")[:2]) for version in versions)


def _statements(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function, without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield child
            yield from _statements(child)


def unknown_in_prose(text: str, versions: list[Version]) -> list[tuple[int, str]]:
    """(line, name) of each ``trt.X`` and ``trt.X.Y`` in any text, comments and prose included, that no version has."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for name in re.findall(r"\btrt\.([A-Z]\w*(?:\.\w+)?)", line):
            owner, _, attribute = name.partition(".")
            if not any(
                (cls := version.attribute(MODULE, owner)) and (not attribute or version.attribute(cls, attribute))
                for version in versions
            ):
                found.append((number, f"trt.{name}"))
    return found
