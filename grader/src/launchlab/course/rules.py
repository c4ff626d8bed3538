"""What a chapter must be before it is built: each rule names the cell that breaks it."""

from __future__ import annotations

import ast
import re
import symtable
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from nbformat import NotebookNode
from nbgrader.utils import is_grade, is_solution

from launchlab.course.source import label, tags

HINT = re.compile(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>", re.DOTALL)
HIDDEN = re.compile(r"### BEGIN HIDDEN TESTS\n(.*?)### END HIDDEN TESTS", re.DOTALL)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
TIMED = re.compile(r"\bcheck\.(speedup|faster)\(")
HEADING = re.compile(r"^(#{1,6})\s+\S", re.MULTILINE)


@dataclass
class Exercise:
    """Solution cells and the test cells that follow; ``hint`` is the cell right before them."""

    name: str
    hint: NotebookNode | None
    tests: list[NotebookNode] = field(default_factory=list)


def problems(nb: NotebookNode, points: float) -> list[str]:
    """All that is wrong with a parsed chapter worth ``points``, in Chinese; empty when nothing is."""
    rules = (_names, _exercises, _hidden_tests, _demo_names, _overwritten, _headings)
    return [problem for rule in rules for problem in rule(nb)] + list(_points(nb, points))


def exercises(nb: NotebookNode) -> list[Exercise]:
    """The chapter's exercises, in order. Test cells before any solution cell belong to none."""
    found: list[Exercise] = []
    before = None
    for cell in nb.cells:
        if is_solution(cell) and (not found or found[-1].tests):
            found.append(Exercise(cell.metadata.nbgrader.grade_id, before))
        elif is_grade(cell) and found:
            found[-1].tests.append(cell)
        if "instructor" not in tags(cell):
            before = cell
    return found


def _names(nb: NotebookNode) -> Iterator[str]:
    names = Counter(cell.metadata.nbgrader.grade_id for cell in nb.cells if is_solution(cell) or is_grade(cell))
    for name, times in names.items():
        if times > 1:
            yield f"练习名 {name} 用了 {times} 次：每个答题单元、测试单元的名字在一章里只能出现一次"


def _exercises(nb: NotebookNode) -> Iterator[str]:
    found = exercises(nb)
    tested = {test.id for exercise in found for test in exercise.tests}
    for number, cell in enumerate(nb.cells, 1):
        if is_grade(cell) and cell.id not in tested:
            yield f"{label(cell, number)}：测试单元前面没有答题单元"
    for exercise in found:
        if not exercise.tests:
            yield f"练习 {exercise.name}：答题单元后面没有测试单元"
        yield from (f"练习 {exercise.name}：{problem}" for problem in _hint(exercise.hint))


def _hint(cell: NotebookNode | None) -> Iterator[str]:
    layers = HINT.findall(cell.source) if cell is not None and cell.cell_type == "markdown" else []
    if len(layers) != 2 or cell.source.count("<details") != 2:
        yield "答题单元的前一个要是文字单元，里面正好两层提示，各是 <details><summary>…</summary> … </details>：先点拨，再给 API"
    for layer, (summary, body) in enumerate(layers, 1):
        if not summary.strip() or not body.strip():
            yield f"第 {layer} 层提示是空的"


def _hidden_tests(nb: NotebookNode) -> Iterator[str]:
    for number, cell in enumerate(nb.cells, 1):
        regions = HIDDEN.findall(cell.source)
        marks = cell.source.count("BEGIN HIDDEN TESTS") + cell.source.count("END HIDDEN TESTS")
        if is_grade(cell):
            if len(regions) * 2 != marks or not regions:
                yield f"{label(cell, number)}：要有 ### BEGIN HIDDEN TESTS … ### END HIDDEN TESTS，各占一行，一一对应"
            elif not any(_does_something(region) for region in regions):
                yield f"{label(cell, number)}：隐藏测试是空的"
            if bool(TIMED.search(cell.source)) != (cell.metadata.launchlab.kind == "speedup"):
                yield f"{label(cell, number)}：用 check.speedup 或 check.faster 计时的测试，kind 要是 speedup，别的不是：评分时它独占 GPU，排在最后"
        elif marks:
            yield f"{label(cell, number)}：只有测试单元能有隐藏测试"
        if "BEGIN SOLUTION" in cell.source and not is_solution(cell):
            yield f"{label(cell, number)}：只有答题单元能有 BEGIN SOLUTION"


def _does_something(region: str) -> bool:
    return any(line.strip() and not line.strip().startswith("#") for line in region.split("\n"))


def _demo_names(nb: NotebookNode) -> Iterator[str]:
    """The exam skips demo cells: what it does run must not need a name that only they define."""
    code = [(number, cell) for number, cell in enumerate(nb.cells, 1) if cell.cell_type == "code"]
    names = {}
    for number, cell in code:
        try:
            names[number] = _Names(cell.source)
        except SyntaxError as error:
            yield f"{label(cell, number)}：不是合法的 Python（第 {error.lineno} 行：{error.msg}）；课程里不用魔法命令"
            return
    given = set().union(*(names[number].defined for number, cell in code if "demo" not in tags(cell)))
    demo = set().union(*(names[number].defined for number, cell in code if "demo" in tags(cell)))
    for number, cell in code:
        if "demo" not in tags(cell):
            for name in sorted(names[number].used & (demo - given)):
                yield f"{label(cell, number)}：用到的 {name} 只在演示单元（demo）里定义，考试时不会运行那些单元"


def _overwritten(nb: NotebookNode) -> Iterator[str]:
    """In the learner's notebook a test cell shares its names with all others: after it, their functions are to be there still."""
    code = [(number, cell) for number, cell in enumerate(nb.cells, 1) if cell.cell_type == "code"]
    with suppress(SyntaxError):  # told by `_demo_names`
        definitions = (node for _, cell in code if not is_grade(cell) for node in ast.parse(cell.source).body)
        functions = {node.name for node in definitions if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
        for number, cell in code:
            if is_grade(cell):
                for name in sorted(_Names(cell.source).defined & functions):
                    yield f"{label(cell, number)}：{name} 是笔记本里的函数或类，测试单元里换个名字：在学生的笔记本里，测试会把它盖掉"


class _Names:
    """The global names that one cell's code defines, and those it uses (also as ``student.NAME``)."""

    def __init__(self, source: str):
        tree, outermost = ast.parse(source), _Outermost()
        outermost.visit(tree)
        self.defined, self.used = outermost.bound, outermost.read
        inner = list(symtable.symtable(source, "<cell>", "exec").get_children())
        while inner:
            table = inner.pop()
            inner += table.get_children()
            self.used |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
            self.defined |= {s.get_name() for s in table.get_symbols() if s.is_declared_global() and s.is_assigned()}
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(ast.Name("student" | "reference"), "value"), args=[ast.Constant(str(name))]):
                    self.used.add(name)
                case ast.Attribute(ast.Name("student" | "reference"), name) if name not in ("value", "define"):
                    self.used.add(name)


class _Outermost(ast.NodeVisitor):
    """Names that a cell binds and reads outside of functions and classes; those of a comprehension are its own.

    symtable does not tell: from Python 3.12 on it counts the names of a comprehension to the scope around.
    """

    def __init__(self) -> None:
        self.bound: set[str] = set()
        self.read: set[str] = set()
        self._own: list[set[str]] = []

    def visit_Name(self, node: ast.Name) -> None:
        if not any(node.id in names for names in self._own):
            (self.read if isinstance(node.ctx, ast.Load) else self.bound).add(node.id)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.bound.add(node.target.id)
        self.visit(node.value)

    def visit_comprehension_of(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        targets = (name for part in node.generators for name in ast.walk(part.target) if isinstance(name, ast.Name))
        self._own.append({name.id for name in targets})
        self.generic_visit(node)
        self._own.pop()

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_comprehension_of

    def visit_definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.bound.add(node.name)
        outside = [*node.decorator_list, *(node.bases if isinstance(node, ast.ClassDef) else [node.args])]
        outside += node.keywords if isinstance(node, ast.ClassDef) else [node.returns] if node.returns else []
        for part in outside:
            self.visit(part)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_definition

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)

    def visit_alias(self, node: ast.alias) -> None:
        self.bound.add((node.asname or node.name).partition(".")[0])

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self.bound.add(node.name)
        self.generic_visit(node)


def _headings(nb: NotebookNode) -> Iterator[str]:
    level, titles = 0, 0
    for number, cell in enumerate(nb.cells, 1):
        if cell.cell_type != "markdown" or "instructor" in tags(cell):
            continue
        for marks in HEADING.findall(FENCE.sub("", cell.source)):
            titles += len(marks) == 1
            if len(marks) > level + 1:
                yield f"{label(cell, number)}：标题从 {level} 级跳到了 {len(marks)} 级"
            level = len(marks)
    if titles != 1:
        yield f"一章正好要有一个一级标题（# …），现在有 {titles} 个"


def _points(nb: NotebookNode, points: float) -> Iterator[str]:
    total = sum(cell.metadata.nbgrader.points for cell in nb.cells if is_grade(cell))
    if total != points:
        yield f"测试单元的分数合计 {total}，chapters.toml 里写的是 {points}"
