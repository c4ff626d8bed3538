"""What notebooks import: clocks on CPU work, text, errors in Chinese, pictures with Chinese, and a machine without a GPU."""

import itertools
import time

import matplotlib
import numpy as np
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from launchlab import lab
from launchlab.device import has_gpu
from launchlab.lab import dot, drawing, plotting, without_gpu
from launchlab.lab.measuring import _rank_below_median


def nothing():
    pass


def sleeps(us):
    return lambda: time.sleep(us / 1e6)


# Clocks


def test_submit_stops_before_the_sync_and_end_to_end_after_it():
    work = {"work": nothing, "sync": sleeps(3000), "repeats": 5, "warmup": 0}
    assert lab.submit_us(**work).median < 1500
    assert lab.end_to_end_us(**work).median >= 3000


def test_every_sample_has_its_sync_and_warm_up_is_not_measured():
    log = []
    samples = lab.submit_us(lambda: log.append("work"), sync=lambda: log.append("sync"), repeats=3, warmup=2)
    assert log == ["work", "work", "sync"] + ["work", "sync"] * 3
    assert samples.us.shape == (3,) and samples.us.dtype == np.float64


def test_comparison_takes_turns_and_finds_the_ratio():
    order = []

    def logged(name, us):
        def work():
            order.append(name)
            time.sleep(us / 1e6)

        return work

    pair = lab.compare_us(logged("A", 3000), logged("B", 1000), sync=nothing, pairs=21, warmup=0)
    assert "".join(order[:8]) == "ABBAABBA"
    assert 1.5 < pair.at_least <= pair.ratio < 4
    assert pair.first.median > pair.second.median >= 1000
    assert pair.ratios.shape == (21,)


def test_unknown_clock_is_an_error():
    with pytest.raises(KeyError):
        lab.compare_us(nothing, nothing, clock="event", sync=nothing)


def test_lower_bound_is_the_fifth_smallest_of_21():
    assert _rank_below_median(21) == 4
    pair = lab.Comparison(None, None, np.arange(21.0))
    assert (pair.ratio, pair.at_least) == (10, 4)


def test_samples_tell_themselves_in_chinese():
    samples = lab.Samples(np.arange(1.0, 12.0))
    assert str(samples) == "6.0 µs（p10 2.0，p90 10.0，11 次）"


# Text


def test_table_is_markdown_and_refuses_a_ragged_row():
    assert lab.table(("名字", "µs"), [("图", 3)]) == "| 名字 | µs |\n| :-- | --: |\n| 图 | 3 |"
    with pytest.raises(ValueError):
        lab.table(("名字", "µs"), [("图",)])


def test_say_prints_outside_a_notebook_and_names_the_gpu(capsys):
    lab.say("提交用了 **3** µs")
    said = capsys.readouterr().out
    assert "**3** µs" in said
    assert ("实测" in said) == (lab.gpu_name() is not None)
    lab.say("讲义说 **80** µs", measured=False)
    assert "实测" not in capsys.readouterr().out


# Errors of CUDA


class Code(int):
    name = "cudaErrorStreamCaptureUnsupported"


def test_check_cuda_unpacks():
    assert lab.check_cuda((0,)) is None
    assert lab.check_cuda((0, "graph")) == "graph"
    assert lab.check_cuda((0, 1, 2)) == (1, 2)


def test_check_cuda_explains_an_error():
    with pytest.raises(lab.CudaError, match="cudaErrorStreamCaptureUnsupported（900）：捕获期间不允许") as caught:
        lab.check_cuda((Code(900), None))
    assert (caught.value.code, caught.value.name) == (900, Code.name)


def test_check_cuda_names_an_error_it_cannot_explain():
    with pytest.raises(lab.CudaError, match=r"（9999）$"):
        lab.check_cuda((Code(9999),))


# Pictures

PLAIN = """digraph dot {
subgraph cluster_1 {
label="graph_1" graph[style="dashed"];
"graph_1_node_0"[style="bold" shape="octagon" label="0
mix
"];
"graph_1_node_1"[style="solid" shape="rectangle" label="1
MEMCPY
(DtoD,16384)
"];
"graph_1_node_2"[style="solid" shape="rectangle" label="2
graph_2
"];
"graph_1_node_3"[style="bold" shape="octagon" label="3
graph_reduce\\<\\<\\<1,256,0\\>\\>\\>
"];
"graph_1_node_0" -> "graph_1_node_1";
"graph_1_node_1" -> "graph_1_node_2";
"graph_1_node_1" -> "graph_1_node_3";
}
}
"""
VERBOSE = r"""digraph dot {
"graph_1_node_0"[style="bold" shape="record" label="{KERNEL
| {ID | 0 (topoId: 1) | mix\<\<\<1,128,0\>\>\>}
| {{node handle | func handle} | {0x000055E7277A5C20 | 0x000055E7270A5A90}}
}"];
"graph_1_node_1"[style="solid" shape="record" label="{
MEMCPY
| {{ID | node handle} | {1 (topoId: 0) | 0x000055E7277A6AC0}}
}"];
"graph_1_node_0" -> "graph_1_node_1";
}
"""


def test_plain_dot_is_read():
    nodes, edges = dot.parse(PLAIN)
    assert list(nodes.values()) == [
        dot.Node("kernel", "mix"),
        dot.Node("memcpy"),
        dot.Node("child", "graph_2"),
        dot.Node("kernel", "graph_reduce"),
    ]
    assert [(tail[-1], head[-1]) for tail, head in edges] == [("0", "1"), ("1", "2"), ("1", "3")]


def test_verbose_dot_is_read():
    nodes, edges = dot.parse(VERBOSE)
    assert list(nodes.values()) == [dot.Node("kernel", "mix"), dot.Node("memcpy")]
    assert len(edges) == 1


def test_layers_follow_the_longest_path():
    edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "d")]
    assert drawing.layered("abcd", edges) == {"a": (0, 0.5), "b": (1, 0), "c": (1, 1), "d": (2, 0.5)}


def test_drawing_shows_every_node_and_edge():
    ax = lab.draw_graph(PLAIN, title="图")
    assert [text.get_text() for text in ax.texts if text.get_text()] == [
        "内核\nmix",
        "拷贝",
        "子图\ngraph_2",
        "内核\ngraph_reduce",
    ]
    assert sum(not text.get_text() for text in ax.texts) == 3
    assert ax.get_title() == "图"


def test_each_arrow_ends_at_its_box_however_often_it_is_drawn():
    """Shrunk to where a box stood in an earlier draw, an arrow would lose its head behind the box, or stop short of it."""
    ax = lab.draw_graph(({"a": "kernel", "b": "kernel", "c": "memset", "d": "kernel"}, [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")]), title="上下")
    figure = ax.figure
    for dpi in (60, 150):
        figure.set_dpi(dpi)
        figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(int)
    arrows = [each.arrow_patch for each in ax.texts if getattr(each, "arrow_patch", None)]
    assert len(arrows) == 4
    for arrow in arrows:
        shaft, head = arrow.get_path().vertices[[0, 2]]
        tip = head - 4 * (head - shaft) / np.hypot(*(head - shaft))  # 4 pixels back: within the head
        column, row = round(tip[0]), round(pixels.shape[0] - tip[1])
        around = pixels[row - 1 : row + 2, column - 1 : column + 2].mean(axis=(0, 1))
        assert (abs(around - 0x44) < 12).all(), (arrow, around)


@pytest.mark.parametrize("edges", [
    [("0", "1"), ("1", "2"), ("2", "3"), ("0", "3")],
    [("0", "1"), ("0", "2"), ("1", "3"), ("2", "3"), ("3", "4"), ("0", "4"), ("1", "5"), ("4", "5")],
])
def test_no_arrow_runs_through_the_box_of_another_node(edges):
    ax = lab.draw_graph(({name: "kernel" for edge in edges for name in edge}, edges))
    ax.figure.canvas.draw()
    boxes = [each.get_bbox_patch().get_window_extent() for each in ax.texts if each.get_bbox_patch()]
    arrows = [each.arrow_patch for each in ax.texts if getattr(each, "arrow_patch", None)]
    assert len(arrows) == len(edges)
    for arrow in arrows:
        begin, control, end = arrow.get_path().vertices[:3]  # of a quadratic curve, shrunk to the boxes of its own two nodes
        part = np.linspace(0.05, 0.95, 50)[:, None]
        curve = (1 - part) ** 2 * begin + 2 * part * (1 - part) * control + part**2 * end
        assert not [box for box in boxes if box.count_contains(curve)], arrow


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        ("digraph dot {\n}\n", "一个节点也没有"),
        (({str(i): "kernel" for i in range(200)}, []), "200 个节点"),
        (({"a": "kernel"}, [("a", "b")]), "a → b"),
    ],
    ids=["empty", "large", "loose edge"],
)
def test_drawing_refuses(graph, words):
    with pytest.raises(ValueError, match=words):
        lab.draw_graph(graph)


@pytest.fixture
def styled():
    with matplotlib.rc_context():
        lab.plot_style()
        yield


@pytest.mark.parametrize(("low", "high"), [(0.64, 3.6), (334, 2773), (1.8, 11000), (0.02, 90)])
def test_numbers_of_a_logarithmic_axis_are_plain_and_apart(styled, low, high):
    figure, axes = plt.subplots(figsize=(4, 2))
    axes.semilogx([low, high], [0, 1])
    plotting.log_ticks(axes.xaxis)
    figure.canvas.draw()
    left, right = axes.get_xlim()
    shown = [label for place, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True) if left <= place <= right and label.get_text()]
    assert len(shown) >= 2 and all(float(label.get_text()) for label in shown)
    assert not [label for label in axes.get_xticklabels(minor=True) if label.get_text()]
    boxes = sorted((label.get_window_extent() for label in shown), key=lambda box: box.x0)
    assert all(one.x1 < next_one.x0 for one, next_one in itertools.pairwise(boxes))


def test_chinese_glyphs_are_really_drawn(styled):
    """Different characters give different ink; a missing glyph would give the same box for each, and a warning."""
    drawn = [ink(text) for text in ("图", "核", "启", "µ", "—", "：", "→", "≈")]
    assert all(picture.any() for picture in drawn)
    assert all((one != other).any() for number, one in enumerate(drawn) for other in drawn[:number])


def ink(text):
    from matplotlib import pyplot as plt

    fig = plt.figure(figsize=(1, 1), dpi=100, layout="none")
    fig.text(0.5, 0.5, text, fontsize=40, ha="center", va="center")
    fig.canvas.draw()
    pixels = np.asarray(fig.canvas.buffer_rgba())[..., :3].copy()
    plt.close(fig)
    return pixels.min(axis=2) < 128


def test_lines_differ_without_colour(styled):
    looks = [(style["marker"], style["linestyle"]) for style in matplotlib.rcParams["axes.prop_cycle"]]
    assert len(set(looks)) == len(looks) >= 6


def test_text_stands_out_from_the_figure_in_any_theme(styled):
    from matplotlib.colors import to_rgba

    params = matplotlib.rcParams
    *card, opacity = to_rgba(params["figure.facecolor"])
    assert opacity == 1
    for key in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"):
        assert contrast(card, to_rgba(params[key])[:3]) > 7, key


def contrast(one, other):
    lights = sorted((luminance(one), luminance(other)), reverse=True)
    return (lights[0] + 0.05) / (lights[1] + 0.05)


def luminance(rgb):
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


# A machine without a GPU


def test_names_that_a_cell_would_have_bound():
    source = "import cupy as cp, cupyx.profiler\nx, (y, z) = 1, (2, 3)\ndef f():\n    local = 1\nfor i in a: pass\nwith b as c: pass\n"
    assert without_gpu.names_bound_by(source) == {"cp", "cupyx", "x", "y", "z", "f", "i", "c"}


def test_lack_of_a_gpu_is_told_from_other_errors():
    assert without_gpu.is_for_lack_of_gpu(ModuleNotFoundError("No module named 'cupy'", name="cupy.cuda"))
    assert without_gpu.is_for_lack_of_gpu(RuntimeError("Failed to dlopen libcuda.so.1"))
    assert without_gpu.is_for_lack_of_gpu(lab.CudaError(100, "cudaErrorNoDevice"))
    assert not without_gpu.is_for_lack_of_gpu(ModuleNotFoundError("No module named 'pandas'", name="pandas"))
    assert not without_gpu.is_for_lack_of_gpu(lab.CudaError(900, "cudaErrorStreamCaptureUnsupported"))
    outer = ValueError("build failed")
    outer.__cause__ = lab.CudaError(35, "cudaErrorInsufficientDriver")
    assert without_gpu.is_for_lack_of_gpu(outer)


def run(*cells, **options):
    """Run cells in a real kernel; the cells with their outputs."""
    nb = new_notebook(cells=[new_code_cell(source) for source in cells])
    NotebookClient(nb, timeout=60, kernel_name="python3", **options).execute()
    return nb.cells


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


# `lack` stands for whatever fails on such a machine: with or without CuPy installed.
LACK = "def lack():\n    raise ModuleNotFoundError(\"No module named 'cupy'\", name='cupy')\n"


@pytest.mark.skipif(has_gpu(), reason="这台机器有 GPU")
def test_here_without_a_gpu_lets_the_rest_run():
    cells = run(
        "from launchlab import lab\nlab.here()",
        LACK,
        "lack()\nimport cupy as cp",
        "x = cp.arange(3)",
        "print(x)",
        "print(1 + 1)",
    )
    here, _, missing, follows, further, fine = cells
    assert "没有可用的 GPU" in printed(here)
    for cell in (missing, follows, further):
        assert "需要 GPU" in printed(cell)
        assert len(printed(cell).splitlines()) == 1
        assert all(output.output_type != "error" for output in cell.outputs)
    assert printed(fine) == "2\n"


@pytest.mark.skipif(has_gpu(), reason="这台机器有 GPU")
def test_other_errors_keep_their_traceback():
    cells = run("from launchlab import lab\nlab.here()", "typo = 1\ntypoo", "1 / 0", allow_errors=True)
    for cell, name in zip(cells[1:], ("NameError", "ZeroDivisionError"), strict=True):
        (error,) = cell.outputs
        assert (error.output_type, error.ename) == ("error", name)
        assert error.traceback


@pytest.mark.skipif(has_gpu(), reason="这台机器有 GPU")
def test_a_test_cell_that_could_not_run_stays_failed():
    nb = new_notebook(
        cells=[
            new_code_cell(
                "from launchlab import lab\nfrom launchlab.exam import check, on_gpu, student\nimport numpy as np\nlab.here()"
            ),
            new_code_cell(LACK + "def first(x):\n    lack()\n"),
            new_code_cell("check.equal(student.first(on_gpu(np.zeros(3))), 0, why='…')"),
        ]
    )
    replies = []
    client = NotebookClient(nb, timeout=60, kernel_name="python3", allow_errors=True)
    client.on_cell_executed = lambda cell, cell_index, execute_reply: replies.append(execute_reply["content"]["status"])
    client.execute()
    (error,) = nb.cells[2].outputs
    assert error.output_type == "error"
    assert "需要 GPU" in error.traceback[0] and len(error.traceback) == 1
    assert replies == ["ok", "ok", "error"]
