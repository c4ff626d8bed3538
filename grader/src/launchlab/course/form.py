"""Whether everybody can read a chapter: with a screen reader, without colours, in either theme, in Chinese.

`rules` refuses to build what breaks a course; this names what leaves a reader out. Headings are a rule of `rules`.
"""

from __future__ import annotations

import ast
import base64
import io
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from nbformat import NotebookNode

from launchlab.course.alt import FENCE, HEADING_ALONE, alts
from launchlab.course.source import label, tags

IMAGE = re.compile(r"!\[([^\]]*)\]\(|<img\b([^>]*)>")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\([^)]+\)")
VAGUE = {"这里", "点这里", "点击这里", "此处", "链接", "here", "click here", "link"}
TABLE = re.compile(r"^\s*\|(.*)\|\s*\n\s*\|[ :|-]+\|?\s*$", re.MULTILINE)
CODE = re.compile(r"`[^`]*`|\$[^$]*\$")
STYLED = re.compile(r"<font\b|<\w+[^>]*\bstyle\s*=", re.IGNORECASE)
COLOUR = re.compile(r"[红绿蓝橙黄灰紫青](?:色|点|线|块|柱|格|条|框|的|是|\s)|颜色")
# Maps whose lightness alone orders the values.
ORDERED = {"viridis", "cividis", "magma", "inferno", "plasma", "Greys", "Greens", "Blues", "Purples", "Oranges", "gray"}
LEAST_TEXT, LEAST_MARK = 4.5, 3.0  # WCAG 2.2, 1.4.3 and 1.4.11: contrast of text, and of lines and marks
TEXTS = {"text", "annotate", "set_title", "title", "suptitle", "set_xlabel", "set_ylabel", "xlabel", "ylabel", "figtext"}
FILLED = {
    "bar",
    "barh",
    "broken_barh",
    "fill_between",
    "axvspan",
    "axhspan",
    "imshow",
    "Patch",
}  # a mark with an edge or a word of its own


class Flaw(NamedTuple):
    """``rule``: its short name; ``where``: the cell; ``what``: Chinese, with what to do."""

    rule: str
    where: str
    what: str


def flaws(nb: NotebookNode) -> list[Flaw]:
    """What is wrong with a chapter's cells, outputs apart, once a cell and rule; cells for instructors are passed over."""
    cells = [(label(cell, number), cell) for number, cell in enumerate(nb.cells, 1) if "instructor" not in tags(cell)]
    names = {cell.id: where for where, cell in cells}
    found = [flaw for where, cell in cells if cell.cell_type == "markdown" for flaw in _prose(where, cell.source)]
    figures = {cell.id: words for cell, words in alts(nb)}
    found += [
        Flaw("alt", names[cell], "这张图没有标题、轴标签或图例，写不出替代文字：给它一个标题")
        for cell, words in figures.items()
        if words.endswith(HEADING_ALONE)
    ]
    styled = False
    for where, cell in cells:
        if cell.cell_type == "code":
            styled |= "plot_style(" in cell.source
            if cell.id in figures and not styled:
                found.append(Flaw("style", where, "画图以前没有调用 lab.plot_style()：中文会变成方框，深色主题下看不清"))
            found += _code(where, cell.source)
    return _once(found)


def recorded_flaws(nb: NotebookNode) -> list[Flaw]:
    """What is wrong with a solution's recorded outputs, once a cell and rule."""
    found = []
    for number, cell in enumerate(nb.cells, 1):
        for output in cell.get("outputs", []):
            where, data = label(cell, number), output.get("data", {})
            said = data.get("text/markdown", "")
            found += [*_tables(where, said), *_emphasis(where, said)]
            if re.search(r"^#{1,6}\s", said, re.MULTILINE):
                found.append(Flaw("heading", where, "输出里有标题，目录和标题的层次会乱"))
            if "missing from" in output.get("text", "") and "Glyph" in output.get("text", ""):
                found.append(Flaw("glyph", where, "matplotlib 说字体里缺字"))
            elif output.get("name") == "stderr" and "Warning:" in output.text:
                found.append(Flaw("warning", where, "输出里留着一条警告，还带着录制那台机器上的路径：改掉起因，重新录制"))
            if "image/png" in data and not _opaque_and_light(base64.b64decode(data["image/png"])):
                found.append(Flaw("theme", where, "图的底不是不透明的浅色，在深色主题下看不清"))
    return _once(found)


def contrast(colour: str, other: str | None = None) -> float:
    """The contrast ratio of two colours, 1–21, as WCAG defines it; by default with the ground of the plot style.

    Colours as matplotlib takes them; "C1" is the plot style's.
    """
    other = other or _style()["figure.facecolor"]
    light, dark = sorted((_luminance(colour), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def lacking_glyphs(text: str) -> set[str]:
    """Characters of ``text`` that none of the plot style's fonts can draw."""
    return {
        character for character in text if character.isprintable() and not any(ord(character) in drawn for drawn in _drawn())
    }


def _once(found: list[Flaw]) -> list[Flaw]:
    merged: dict[tuple[str, str], list[str]] = {}
    for flaw in found:
        merged.setdefault((flaw.rule, flaw.where), []).append(flaw.what)
    return [Flaw(rule, where, "；".join(dict.fromkeys(texts))) for (rule, where), texts in merged.items()]


def _prose(where: str, text: str) -> Iterator[Flaw]:
    plain = FENCE.sub("", text)
    for words, attributes in IMAGE.findall(plain):
        if not words.strip() and not re.search(r'alt="[^"]+"', attributes):
            yield Flaw("alt", where, "图片没有替代文字：![写在这里](…)")
    for words in LINK.findall(plain):
        if words.strip().lower() in VAGUE:
            yield Flaw("link", where, f"链接的文字“{words}”没有说通向哪里")
    if STYLED.search(CODE.sub("", plain)):
        yield Flaw("inline style", where, "文字里写了样式，另一种主题下可能看不清")
    yield from _tables(where, plain)
    yield from _colours(where, plain)
    yield from _emphasis(where, text)


def _tables(where: str, text: str) -> Iterator[Flaw]:
    for header in TABLE.findall(text):
        if not all(cell.strip() for cell in header.replace(r"\|", "").split("|")):
            yield Flaw("table", where, f"表头有空格子：|{header.strip()}|")


def _emphasis(where: str, text: str) -> Iterator[Flaw]:
    """Asterisks that CommonMark shows as they are: between punctuation and a Chinese character ** neither opens nor closes."""
    for block in _markdown().parse(text):
        for part in block.children or ():
            if part.type == "text" and "**" in part.content:
                around = part.content[max(0, part.content.index("**") - 8) :][:20]
                yield Flaw("emphasis", where, f"这里的 ** 不成对，会原样显示：…{around}…；标点、引号放到 ** 外面")


@cache
def _markdown():
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").enable("table")


def _colours(where: str, text: str) -> Iterator[Flaw]:
    for found in COLOUR.finditer(text):
        around = text[max(0, found.start() - 8) : found.end() + 8].replace("\n", " ")
        yield Flaw("colour word", where, f"靠颜色说话的地方要再写上名称、形状或位置：…{around}…")


def _code(where: str, source: str) -> Iterator[Flaw]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    nodes = list(ast.walk(tree))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for text in strings:
        yield from _colours(where, text)
    if lost := lacking_glyphs("".join(strings)):
        yield Flaw("glyph", where, f"画图的字体里没有：{' '.join(sorted(lost))}")
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    named = {
        id(node): node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "") for node in calls
    }
    writes = any(name in ("text", "annotate", "bar_label") for name in named.values())
    for call in calls:
        name = named[id(call)]
        for keyword in call.keywords:
            if keyword.arg == "cmap" and not writes and getattr(keyword.value, "value", None) not in ORDERED:
                yield Flaw("colour map", where, "只有颜色分得出这些格子：在格子里写字，或者换一种明暗有序的颜色表")
            if (
                keyword.arg in ("color", "c")
                and isinstance(keyword.value, ast.Constant)
                and isinstance(keyword.value.value, str)
            ):
                yield from _contrast(where, name, keyword.value.value)
        header = call.args[0].elts if name == "table" and call.args and isinstance(call.args[0], (ast.Tuple, ast.List)) else []
        if any(isinstance(cell, ast.Constant) and not str(cell.value).strip() for cell in header):
            yield Flaw("table", where, "lab.table 的表头有空格子")


def _contrast(where: str, name: str, colour: str) -> Iterator[Flaw]:
    from matplotlib.colors import is_color_like

    if name in FILLED or not is_color_like(colour) or colour == "white":  # white is written on a bar, never on the ground
        return
    least = LEAST_TEXT if name in TEXTS else LEAST_MARK
    if (found := contrast(colour)) < least:
        yield Flaw("contrast", where, f"{name} 的颜色 {colour} 与底色的对比度只有 {found:.1f}，至少要 {least}")


@cache
def _style() -> dict:
    """The plot style's settings: ground, colours, and fonts in the order in which they are asked for a character."""
    from matplotlib import rc_context, rcParams

    from launchlab.lab import plot_style

    with rc_context():
        plot_style()
        return {name: rcParams[name] for name in ("figure.facecolor", "font.sans-serif", "axes.prop_cycle")}


@cache
def _drawn() -> tuple[set[int], ...]:
    """The code points that each font of the plot style has."""
    from matplotlib import font_manager, ft2font

    files = [font_manager.findfont(family, fallback_to_default=False) for family in _style()["font.sans-serif"]]
    return tuple(set(ft2font.FT2Font(file).get_charmap()) for file in files)


def _luminance(colour: str) -> float:
    from matplotlib.colors import to_rgb

    if re.fullmatch(r"C\d", colour):
        colours = _style()["axes.prop_cycle"].by_key()["color"]
        colour = colours[int(colour[1]) % len(colours)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _opaque_and_light(png: bytes) -> bool:
    """Whether a picture brings a card of its own: all of its rim opaque and light."""
    from matplotlib import image

    pixels = image.imread(io.BytesIO(png), format="png")
    sides = (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])
    return all(side[:, :3].min() > 0.9 and (side.shape[1] == 3 or side[:, 3].min() == 1) for side in sides)
