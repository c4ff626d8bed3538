"""Everybody can read the course: all chapters, drafts too, and what each of the rules is there to find."""

import ast
import base64
import io
from datetime import date

import matplotlib
import nbformat
import pytest
from matplotlib.figure import Figure

matplotlib.use("Agg")

from launchlab import paths
from launchlab.course import alt, build, form, receipt, rules, source
from launchlab.manifest import chapter, chapters

# Chapters that break a rule and cannot be mended without a recording on a GPU, or that break it by their text alone:
# (chapter, rule): (since, number of cells, why). An entry with no cell left, or with fewer, is an error: strike it out.
AT_NEXT_RECORDING: dict[tuple[str, str], tuple[date, int, str]] = {}
# What the rule names, and a person has read and found right: the colour is not all that tells.
READ_AND_RIGHT = {
    ("05_stream_capture", "colour word"): (date(2026, 11, 30), 1, "每一格里还写着两个返回码"),
    ("11_precision", "colour word"): (date(2026, 11, 30), 1, "回归测试是绿的：不是图"),
    ("14_profiles", "colour word"): (date(2026, 11, 30), 1, "灰色虚线：还说了是虚线"),
    ("19_static_io", "colour word"): (date(2026, 11, 30), 1, "每一块上写着请求的编号，缓冲轮流用"),
    ("24_ocr_pipeline", "colour word"): (date(2026, 11, 30), 1, "归一化以后的 0 是灰色：说的就是颜色"),
}
EXCEPTIONS = AT_NEXT_RECORDING | READ_AND_RIGHT
ALL = [pytest.param(each, id=each.name) for each in chapters()]
READY = [pytest.param(each, id=each.name) for each in chapters() if each.ready]


def parsed(each):
    return source.parse(each.source.read_text(encoding="utf-8"))


@pytest.mark.parametrize("each", ALL)
def test_everybody_can_read_the_chapter(each):
    nb = parsed(each)
    assert rules.problems(nb, each.points) == []
    found = form.flaws(nb)
    if each.receipt.is_file():
        found += form.recorded_flaws(nbformat.read(each.solution, as_version=4))
    cells: dict[str, set[str]] = {}
    for flaw in found:
        cells.setdefault(flaw.rule, set()).add(flaw.where)
    excepted = {rule: count for (name, rule), (_, count, _) in EXCEPTIONS.items() if name == each.name}
    told = "\n".join(f"{flaw.rule}: {flaw.where}: {flaw.what}" for flaw in found)
    assert {rule: len(where) for rule, where in cells.items()} == excepted, f"found, other than the exceptions say:\n{told}"


def test_exceptions_are_dated_explained_and_of_this_course():
    names = {each.name for each in chapters()}
    for (name, rule), (since, cells, why) in EXCEPTIONS.items():
        assert name in names and since <= date.today() and cells > 0 and len(why) >= 4, (name, rule)
    assert not AT_NEXT_RECORDING.keys() & READ_AND_RIGHT.keys()


@pytest.mark.parametrize("each", READY)
def test_every_picture_has_its_words(each):
    """The words are found in the code, the pictures were made by a run: they must be of the same cells."""
    drawn = {cell.id for cell, _ in alt.alts(parsed(each))}
    solution, release = (nbformat.read(path, as_version=4) for path in (each.solution, each.release))
    for nb in (solution, release):
        told = {cell.id: cell.metadata.alt for cell in nb.cells if "alt" in cell.metadata}
        assert set(told) == drawn
        assert all(len(words) > len(alt.HEADING_ALONE) and "\n" not in words for words in told.values())
    if receipt.vouches(receipt.load(each), each, solution):  # else its pictures are not of this text: test_receipts says so
        assert {
            cell.id
            for cell in solution.cells
            if any("image/png" in output.get("data", {}) for output in cell.get("outputs", []))
        } == drawn


def test_words_of_a_picture():
    cells = {
        "literal": 'fig, ax = plt.subplots()\nax.plot(x, label="图启动")\nax.set_title(f"快多少（{lab.gpu_name()}）")\nax.set_xlabel("内核数量 N")\nax.set_ylabel(f"{name} 的时间（µs）")\n',
        "loop": 'fig, axes = plt.subplots(1, 2)\nfor ax, title in zip(axes, ("左边", "右边"), strict=True):\n    ax.set_title(title)\n',
        "function": 'def show(data):\n    fig, ax = plt.subplots()\n    ax.set_title("画在函数里")\n',
        "calls it": "show(3)\n",
        "no picture": 'ax.set_title("没有新的图")\n',
    }
    text = "# %% [markdown]\n# # 标题\n" + "".join(f"\n# %% tags=['demo']\n{code}" for code in cells.values())
    assert [words for _, words in alt.alts(source.parse(text.replace("'", '"')))] == [
        "标题（图）。快多少。横轴：内核数量 N。纵轴：… 的时间（µs）。图例：图启动。",
        "标题（图）。左边；右边。",
        "标题（图）。画在函数里。",
    ]


# Each rule finds what it is for

PLOT = '# %% tags=["demo"]\nlab.plot_style()\nfig, ax = plt.subplots()\nax.set_title("标题")\n'
BROKEN = {
    "image without words": ("# %% [markdown]\n# ![](a.png)\n", "alt"),
    "html image without words": ('# %% [markdown]\n# <img src="a.png">\n', "alt"),
    "plot without words": (PLOT.replace('ax.set_title("标题")\n', ""), "alt"),
    "plot without style": (PLOT.replace("lab.plot_style()\n", ""), "style"),
    "link that says nothing": ("# %% [markdown]\n# 看[这里](a.md)\n", "link"),
    "style in prose": ('# %% [markdown]\n# <span style="color:red">红</span>\n', "inline style"),
    "table without a header": ("# %% [markdown]\n# |  | 值 |\n# |---|---|\n# | a | 1 |\n", "table"),
    "computed table without a header": ('# %%\nlab.say(lab.table(("", "值"), rows))\n', "table"),
    "colours in prose": ("# %% [markdown]\n# 红色的那条更快\n", "colour word"),
    "colours in a title": (PLOT + 'ax.set_title("绿色接受")\n', "colour word"),
    "only colours": (PLOT + 'ax.imshow(grid, cmap="RdYlGn")\n', "colour map"),
    "pale line": (PLOT + 'ax.plot(x, color="#cccccc")\n', "contrast"),
    "pale text": (PLOT + 'ax.text(0, 0, "值", color="#888888")\n', "contrast"),
    "a glyph that no font has": (PLOT + 'ax.set_title("\U0001f680")\n', "glyph"),
}


@pytest.mark.parametrize(("text", "rule"), BROKEN.values(), ids=BROKEN)
def test_flaw_is_found(text, rule):
    assert [flaw.rule for flaw in form.flaws(source.parse(text))] == [rule]


@pytest.mark.parametrize(
    "text",
    [
        "# %% [markdown]\n# ![一条流](a.png) <img src='b.png' alt=\"两条流\">，见[流捕获](a.md)，`<b style=x>`\n",
        "# %% [markdown]\n# | 名称 | 值 |\n# |---|---|\n# | a |  |\n",
        PLOT + 'ax.imshow(grid, cmap="RdYlGn")\nax.text(0, 0, "接受", color="#222222")\n',
        PLOT + 'ax.plot(x, color="C1", label="µs × 2³² ✓ ≤ →")\n',
        '# %% [markdown] tags=["instructor"]\n# ![](a.png)\n',
    ],
)
def test_what_is_right_is_left_alone(text):
    assert form.flaws(source.parse(text)) == []


def outputs(data=None, text=""):
    cell = nbformat.v4.new_code_cell("pass", id="x")
    cell.outputs = [
        nbformat.v4.new_output("display_data", data=data)
        if data
        else nbformat.v4.new_output("stream", name="stderr", text=text)
    ]
    return [flaw.rule for flaw in form.recorded_flaws(nbformat.v4.new_notebook(cells=[cell]))]


def picture(**options):
    file = io.BytesIO()
    Figure(figsize=(1, 1)).savefig(file, format="png", **options)
    return {"image/png": base64.b64encode(file.getvalue()).decode()}


def test_flaws_of_outputs_are_found():
    assert outputs({"text/markdown": "## 标题"}) == ["heading"]
    assert outputs({"text/markdown": "| | 值 |\n| :-- | --: |\n| a | 1 |"}) == ["table"]
    assert outputs({"text/markdown": "撞上了：**没有一行日志。**没有用事件。"}) == ["emphasis"]
    assert outputs({"text/markdown": "撞上了：**没有一行日志**。`a**b` 是乘方。"}) == []
    assert outputs(text="UserWarning: Glyph 22270 (\\N{CJK}) missing from font(s) DejaVu Sans.") == ["glyph"]
    assert outputs(text="/tmp/x.py:51: DeprecationWarning: ExternalStream is deprecated.") == ["warning"]
    assert outputs(picture(transparent=True)) == outputs(picture(facecolor="#202020")) == ["theme"]
    assert outputs(picture(facecolor="#fcfcfa")) == []


# The plot style


def test_palette_stands_out_and_does_not_tell_by_colour_alone():
    from matplotlib import pyplot, rc_context

    from launchlab import lab

    with rc_context():
        lab.plot_style()
        kinds = list(pyplot.rcParams["axes.prop_cycle"])
        assert all(form.contrast(kind["color"]) >= form.LEAST_MARK for kind in kinds)
        assert len({kind["marker"] for kind in kinds}) == len(kinds)
        for name in ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"):
            assert form.contrast(pyplot.rcParams[name]) >= form.LEAST_TEXT, name


def test_contrast_is_that_of_wcag():
    assert form.contrast("black", "white") == pytest.approx(21)
    assert form.contrast("#777777", "white") == pytest.approx(4.48, abs=0.01)


@pytest.mark.filterwarnings("error:Glyph")
def test_chinese_is_drawn_whoever_draws(tmp_path):
    """In a process that knows no style, too: a graph drawn by hand, and a page's figure."""
    from matplotlib import pyplot, rc_context

    from launchlab import lab

    with rc_context():
        pyplot.rcdefaults()
        axes = lab.draw_graph(({"甲": "kernel", "乙": "memset"}, [("甲", "乙")]), title="两个节点")
        axes.figure.savefig(tmp_path / "graph.png")
        pyplot.close(axes.figure)


def test_whatever_makes_figures_asks_for_the_style():
    for path in sorted((paths.GRADER / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if ".subplots(" in text or "plt.figure(" in text:
            assert "plot_style()" in text or "add_font()" in text, path


def test_alt_texts_reach_the_release_and_survive_a_rebuild(mini):
    text = mini.source.read_text(encoding="utf-8")
    mini.source.write_text(
        text.replace(
            '# %% tags=["demo"]\n',
            '# %% tags=["demo"]\nimport matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.set_title("总时间")\n',
            1,
        ),
        encoding="utf-8",
    )
    made = build.build(chapter("90_mini"))
    release = nbformat.reads(made.release["90_mini.ipynb"].decode(), as_version=4)
    for nb in (made.solution, release):
        assert [cell.metadata.alt for cell in nb.cells if "alt" in cell.metadata] == ["最小的一章（图）。总时间。"]
    assert [flaw.rule for flaw in form.flaws(made.solution)] == ["style"]


def valued(source: str) -> str:
    """What the last line of a test cell calls, if that returns a value, which the notebook would show; "" if not."""
    tree = ast.parse(source)
    returning = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        inner = {node for other in ast.walk(function) if other is not function and isinstance(other, ast.FunctionDef | ast.Lambda) for node in ast.walk(other)}
        if any(isinstance(node, ast.Return) and node.value and node not in inner for node in ast.walk(function)):
            returning.add(function.name)
    match tree.body[-1]:
        case ast.Expr(ast.Call(func=ast.Name(name) | ast.Attribute(_, name))) if name in returning:
            return name
    return ""


@pytest.mark.parametrize(("source", "shown"), [
    ("def told(x):\n    return x\ntold(1)", "told"),
    ("def told(x):\n    def inner():\n        return x\n    inner()\ntold(1)", ""),
    ("class Desk:\n    def serves(self):\n        return 1\nDesk().serves()", "serves"),
    ("def told(x):\n    return x\ncheck.equal(told(1), 1)", ""),
    ("def told(x):\n    return x\nkept = told(1)", ""),
])
def test_what_a_notebook_would_show_is_found(source, shown):
    assert valued(source) == shown


@pytest.mark.parametrize("each", ALL)
def test_a_test_cell_shows_no_value(each):
    for path in (each.solution, each.release):
        nb = nbformat.read(path, as_version=4)
        assert {cell.id: name for cell in nb.cells if cell.metadata.get("nbgrader", {}).get("grade") if (name := valued(cell.source))} == {}
