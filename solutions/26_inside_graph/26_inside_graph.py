# %% [markdown]
# # 图内剖析
#
# 服务用上 CUDA 图以后快了一截，可还差一点才达标。想知道时间花在图里的哪一步，却发现老办法都不灵了：
# 在捕获（capture）里记两个事件，重放完一读，报错；给 TensorRT 装上逐层剖析器，重放一千次，它一个字也不说；
# 用工具录一段，倒是每个节点都看得见，但录制的时候整张图变慢了，这些数字还能信吗？
#
# 这一章把图拆开来量：每个节点多久，加起来对不对得上整张图，量的时候又添了多少麻烦。
# 能对上账，才谈得上“该改哪一个”。
#
# **学完以后，你能够**
#
# - 用 CUPTI 给图里的每个节点（node）算账，并用一块**不相干的表**核对；
# - 说清为什么一串节点的时间之和等于图的时间，有分支的图却要看关键路径（critical path）；
# - 不用任何工具，用图里的事件节点量出其中一段；
# - 让 TensorRT 的逐层剖析器在图里也开口，并说清它为此改动了图；
# - 算出改好哪一层最划算，然后真的把它改好。
#
# **需要的基础**：《用 Nsight Systems 读时间线》里的录制、`correlationId` 和几张表；《捕获 TensorRT 推理》里的捕获与重放（replay）。
#
# **时间**：约 75 分钟，其中四道练习约 45 分钟。
#
# 下一格导入的 `check`、`student` 等五个名字只给练习后面的测试单元用，现在不用管它们。

# %%
import numpy as np
from functools import partial
from launchlab import lab
from launchlab.exam import check, on_gpu, reference, secret, student

lab.here()

# %% [markdown]
# ## 准备：长短已知的节点
#
# 要检验一把尺子，先得有长度已知的东西。`spin` 是一个只有一个线程的内核（kernel），空转给定的微秒数：它的时间是我们自己定的，
# 尺子报多少，一看就知道准不准。`tick` 则小得几乎不花时间，用来看节点**之间**的开销。
#
# 三个给定的函数：
#
# - `captured(work)`：把 `work()` 放进当前流（stream）的工作录成一张图；
# - `own_us(graph, replays)`：图**自己**的时间。一前一后两个 CUDA 事件（event）夹住一次图启动，读两个事件之间的时间，重放 `replays` 次取中位数。
#   事件在图的**外面**，不需要任何工具，这就是那块不相干的表；
# - `kinds(graph)`：图里各种节点有几个。

# %% tags=["gpu"]
from collections import Counter
from statistics import median

import cupy as cp
from cuda.bindings import runtime as cudart

from launchlab.lab import tracing

SOURCE = r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}

extern "C" __global__ void tick(unsigned int *x) {
    unsigned int v = x[0];
    v ^= v >> 15; v *= 0x2c1b3c6du; v ^= v >> 12; v += 0x9e3779b9u;
    x[0] = v;
}
"""
module = cp.RawModule(code=SOURCE)
spin, tick = module.get_function("spin"), module.get_function("tick")
stream = cp.cuda.Stream(non_blocking=True)


def launch_spin(us):
    """Keep one GPU thread busy for us microseconds, on the current stream. Returns at once."""
    spin((1,), (1,), (np.uint64(us * 1000),))


def captured(work):
    """What work() puts on `stream`, the current stream meanwhile, as a cupy.cuda.Graph."""
    with stream:
        stream.begin_capture()
        try:
            work()
        finally:
            graph = stream.end_capture()
    return graph


def own_us(graph, replays=15):
    """The time of one launch of a graph by two events around it, µs: the median of `replays`, after one that does not count."""
    begin, end = cp.cuda.Event(), cp.cuda.Event()
    times = []
    for _ in range(replays + 1):
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        times.append(1000 * cp.cuda.get_elapsed_time(begin, end))
    return median(times[1:])


def kinds(graph):
    """How many nodes of each kind a cupy.cuda.Graph has."""
    _, count = lab.check_cuda(cudart.cudaGraphGetNodes(graph.graph, 0))
    nodes, _ = lab.check_cuda(cudart.cudaGraphGetNodes(graph.graph, count)) if count else ([], 0)
    types = (lab.check_cuda(cudart.cudaGraphNodeGetType(node)) for node in nodes)
    return dict(Counter(kind.name.removeprefix("cudaGraphNodeType") for kind in types))


with stream:  # the first launch of a kernel loads its code, which may be refused while capturing
    counter = cp.zeros(1, cp.uint32)
    launch_spin(1)
    tick((1,), (1,), (counter,))
stream.synchronize()

# %% [markdown]
# 先趁还没有录过任何东西，把两张图的时间记下来：一张 100 个 `tick`，一张 100 个 20 µs 的 `spin`。后面量“追踪要花多少”的时候，它们是干净的对照。

# %% tags=["demo", "gpu"]
TICKS = 100


def ticks():
    for _ in range(TICKS):
        tick((1,), (1,), (counter,))


def long_ticks():
    for _ in range(TICKS):
        launch_spin(20)


def clocks(graph):
    launch = partial(graph.launch, stream)
    return lab.submit_us(launch, repeats=15).median, lab.end_to_end_us(launch, repeats=15).median


SUBJECTS = {"小节点": ticks, "20 µs 的节点": long_ticks}
never = {subject: clocks(captured(work)) for subject, work in SUBJECTS.items()}
clean_own = own_us(captured(ticks))
clean_submit, clean_total = never["小节点"]
lab.say(f"从来没有录制过的时候：一张 {TICKS} 个小节点的图，CPU 提交 {clean_submit:.1f} µs，端到端 {clean_total:.1f} µs；两个事件量它自己是 {clean_own:.1f} µs。")

# %% [markdown]
# ## 图里的每个节点，一行记录
#
# 图启动只有一次 CUDA 调用，但 GPU 上的节点还是一个一个跑的。CUPTI 按节点记录时，图里的每个内核、拷贝、填充，每次重放各有一行，
# 比普通的内核多填两列：
#
# - `graphId`：哪一张图；
# - `graphNodeId`：图里的哪一个节点。**同一个节点每次重放都带同一个编号**，所以按它分组，就能给每个节点算中位数。
#
# 这里的编号属于**可执行图**里的节点。实例化（instantiate）时，定义里的节点被抄了一份，编号也换了，
# 所以拿不到“定义里第几个节点 → 记录里哪个编号”的现成对照。认节点要靠别的：内核的名字、网格（grid）大小、开始的先后。
#
# 录一串 12 个 `spin`，长短各不相同。图在录制里面捕获，重放 6 次，第一次不算：第一次启动还要把图上传到 GPU。

# %% tags=["demo", "gpu"]
WORK = """
    SELECT k.graphNodeId AS node, s.value AS name, k.gridX AS blocks, k.start, k.end
    FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.shortName WHERE k.graphNodeId IS NOT NULL
    UNION ALL
    SELECT graphNodeId, '（拷贝）', 0, start, end FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE graphNodeId IS NOT NULL
    UNION ALL
    SELECT graphNodeId, '（填充）', 0, start, end FROM CUPTI_ACTIVITY_KIND_MEMSET WHERE graphNodeId IS NOT NULL
    ORDER BY 4
"""


def record_replays(work, replays=6):
    """Record a graph of work(). Returns (the graph, its nodes in the order in which they start, µs of each replay by nodes).

    A node is (id, name, blocks, rows, median µs); a replay lasts from its first node's start to its last node's end. The first
    replay is left out.
    """
    with tracing.record() as recording:
        graph = captured(work)
        for _ in range(replays):
            graph.launch(stream)
            stream.synchronize()
    times, spans = {}, []
    for node, name, blocks, start, end in recording.db.execute(WORK):
        times.setdefault((node, name, blocks), []).append((start, end))
    for replay in list(zip(*times.values(), strict=False))[1:]:
        spans.append((max(end for _, end in replay) - min(start for start, _ in replay)) / 1e3)
    nodes = [(*key, len(each), median((end - start) / 1e3 for start, end in each[1:])) for key, each in times.items() if len(each) > 1]
    return graph, nodes, spans


LENGTHS = (20, 60, 35, 120, 50, 15, 200, 40, 80, 30, 100, 25)  # µs


def chain(count=None):
    for us in LENGTHS[:count]:
        launch_spin(us)


chain_graph, chain_nodes, chain_spans = record_replays(chain)
rows = [(i, hex(node), f"`{name}`", count, us, f"{measured:.1f}") for i, (us, (node, name, _, count, measured)) in enumerate(zip(LENGTHS, chain_nodes, strict=False))]
lab.say(lab.table(("第几个", "graphNodeId", "内核", "行数", "我们定的（µs）", "CUPTI 量的（µs）"), rows))

# %% [markdown]
# 12 个节点名字都叫 `spin`，靠编号分得清清楚楚；每个编号的行数，就是重放的次数。
#
# ### 对账
#
# 一串节点，一个接一个。那么这三个数应当差不多：
#
# 1. 各节点时间之和；
# 2. 录制里，从第一个节点开始到最后一个节点结束；
# 3. `own_us`：关掉工具，图外面的两个事件量的。

# %% tags=["demo", "gpu"]
chain_sum, chain_span, chain_own = sum(us for *_, us in chain_nodes), median(chain_spans or [0.0]), own_us(chain_graph)
lab.say(
    lab.table(
        ("一串 12 个节点", "µs", "与第三个相比"),
        [(what, f"{us:.1f}", f"{us / chain_own - 1:+.1%}") for what, us in (("节点之和", chain_sum), ("录制里的跨度", chain_span), ("图自己（不录，两个事件）", chain_own))],
    )
)

# %% [markdown]
# 账对得上，差的那一点去了节点之间的间隙，还有事件和图之间的间隙。
#
# 还有一个不用任何工具的核对法：**把图截短**。只录前 1 个、前 2 个……前 12 个节点，各量一次 `own_us`。
# 第 $k$ 张和第 $k-1$ 张的差，就是第 $k$ 个节点的时间，再加上它前面那道间隙。把它和 CUPTI 报的逐个累加，画在一起：

# %% tags=["demo", "gpu"]
import matplotlib.pyplot as plt

lab.plot_style()
prefix_own = [own_us(captured(partial(chain, count)), 9) for count in range(1, len(LENGTHS) + 1)]
reported = np.cumsum([us for *_, us in chain_nodes])
figure, ax = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
ax.plot(range(1, len(prefix_own) + 1), prefix_own, "o-", label="截短的图自己的时间（不录）")
ax.plot(range(1, len(reported) + 1), reported, "x--", label="CUPTI 节点时间累加")
ax.set_xlabel("前几个节点")
ax.set_ylabel("时间（µs）")
ax.set_title(f"两块表，一笔账（{lab.gpu_name()}）")
ax.legend()
plt.show()
apart = [own - us for own, us in zip(prefix_own, reported, strict=False)]
lab.say(f"两条线最多差 **{max(map(abs, apart), default=0):.1f} µs**，最后一点上差 {apart[-1] if apart else 0:+.1f} µs，全程是 {prefix_own[-1]:.0f} µs。")

# %% [markdown]
# ### 误区：节点时间之和，就是图的时间
#
# 上面成立，有两个条件：节点够长，而且排成一串。各拆掉一个试试。
#
# **节点很短**：100 个 `tick`。节点之间的间隙不再是零头。

# %% tags=["demo", "gpu"]
_, tick_nodes, tick_spans = record_replays(ticks)
tick_graph = captured(ticks)  # another one, captured while nothing records
tick_sum, tick_span, tick_own = sum(us for *_, us in tick_nodes), median(tick_spans or [0.0]), own_us(tick_graph)
gap_ns = (tick_span - tick_sum) / TICKS * 1e3
lab.say(
    lab.table(
        (f"{TICKS} 个小节点", "µs"),
        [
            ("节点之和", f"{tick_sum:.1f}"),
            ("录制里的跨度", f"{tick_span:.1f}"),
            ("图自己（录过以后，现在不录）", f"{tick_own:.1f}"),
            ("图自己（开头量的，从来没有录过）", f"{clean_own:.1f}"),
        ],
    )
    + f"\n\n同一份录制里，跨度减去节点之和，平均每个节点 **{gap_ns:.0f} ns**。"
    + ("这就是间隙：内核都记在节点头上，换下一个节点的功夫不记。" if gap_ns > 0 else "小到这个程度，记录本身的误差已经盖过了间隙。")
    + ("从来没有录过的图，比录到的节点之和还快：节点这么短的时候，记录本身也把节点拉长了，单看录制里的微秒数不准。" if clean_own < tick_sum else "")
)

# %% [markdown]
# 间隙里 GPU 在做什么？收尾、查依赖、装填下一个节点的参数。要省它，不能靠改快某个内核，只能**让节点变少**（融合），或者让分支并行。
#
# **有分支**：三个分支同时跑，最后汇合。

# %% tags=["demo", "gpu"]
def capture_branches(branches, last_us):
    """Capture branches side by side, joined by one last node. branches: lists of µs, a node each. Returns the graph."""
    sides = [cp.cuda.Stream(non_blocking=True) for _ in branches]
    begin, ends = cp.cuda.Event(disable_timing=True), [cp.cuda.Event(disable_timing=True) for _ in branches]

    def work():
        begin.record(stream)
        for side, end, lengths in zip(sides, ends, branches, strict=True):
            side.wait_event(begin)
            with side:
                for us in lengths:
                    launch_spin(us)
            end.record(side)
        for end in ends:
            stream.wait_event(end)
        launch_spin(last_us)

    return captured(work)


BRANCHES, LAST = ((100, 200), (400,), (50, 50, 50)), 30
with tracing.record() as forked:
    fork = capture_branches(BRANCHES, LAST)
    for _ in range(6):
        fork.launch(stream)
        stream.synchronize()
per_node = {}
for node, _, _, start, end in forked.db.execute(WORK):
    per_node.setdefault(node, []).append((end - start) / 1e3)
fork_sum = sum(median(each[1:] or each) for each in per_node.values())
critical, fork_own = max(map(sum, BRANCHES)) + LAST, own_us(fork)
lab.say(
    lab.table(
        ("三个分支", "µs"),
        [("节点之和", f"{fork_sum:.0f}"), ("最长的一条路（按我们定的长度）", f"{critical:.0f}"), ("图自己（不录）", f"{fork_own:.0f}")],
    )
    + f"\n\n图自己的时间更接近 **{'最长的一条路' if abs(fork_own - critical) < abs(fork_own - fork_sum) else '节点之和'}**。"
)

# %% [markdown]
# 从头到尾、沿着依赖走，时间之和最大的那条路，叫关键路径。分支真的并行时，图的时间由它决定：
# 不在这条路上的节点，改到零也不会让图变快；在这条路上的，改快了也可能换成另一条路当家。练习二就考这个。
#
# ## 不用工具：图里的事件节点
#
# 有时候只想知道图中间的一段，又不想开工具。自然的想法：捕获的时候，在那一段前后各记一个事件。
#
# ### 误区：捕获里照常记录事件，重放完就能读时间

# %% tags=["demo", "gpu"]
THIRDS = (150, 300, 80)


def three_parts(first, second, flags):
    for index, us in enumerate(THIRDS):
        launch_spin(us)
        if index < 2:
            event = (first, second)[index]
            lab.check_cuda(cudart.cudaEventRecordWithFlags(event.ptr, stream.ptr, flags))


rows = []
for what, flags in (("普通", cudart.cudaEventRecordDefault), ("External", cudart.cudaEventRecordExternal)):
    first, second = cp.cuda.Event(), cp.cuda.Event()
    graph = captured(partial(three_parts, first, second, flags))
    graph.launch(stream)
    stream.synchronize()
    answer = cudart.cudaEventElapsedTime(first.ptr, second.ptr)
    cudart.cudaGetLastError()  # the runtime remembers a refusal: do not leave it for a later check to find
    rows.append((what, str(kinds(graph)), f"{answer[1] * 1e3:.0f} µs" if not int(answer[0]) else f"`{answer[0].name}`"))
lab.say(lab.table(("记录的方式", "图里的节点", "重放以后读两个事件之间"), rows) + f"\n\n中间那一段我们定的是 {THIRDS[1]} µs。")

# %% [markdown]
# 普通的 `cudaEventRecord` 在捕获里只是一个记号，用来接依赖，图里没有它的节点，重放时也就没有人去记时间。
# 带 `cudaEventRecordExternal` 标志的才会变成一个**事件记录节点**，每次重放都真的记一次。
# 好几个框架都在这里摔过跤：用户在图里放了计时事件，读的时候得到“invalid argument”一类的错误。
#
# 事件节点不是白来的：它也是节点，也要占一个位置。每个 `tick` 后面都放一个，看看贵多少：

# %% tags=["demo", "gpu"]
marks = [cp.cuda.Event() for _ in range(TICKS)]


def marked_ticks():
    for mark in marks:
        tick((1,), (1,), (counter,))
        lab.check_cuda(cudart.cudaEventRecordWithFlags(mark.ptr, stream.ptr, cudart.cudaEventRecordExternal))


marked = captured(marked_ticks)
cost = lab.compare_us(partial(marked.launch, stream), partial(tick_graph.launch, stream), clock="end_to_end")
lab.say(
    f"每个小节点后面跟一个事件节点：{kinds(marked)}。端到端 {cost.second.median:.1f} → {cost.first.median:.1f} µs，是原来的 **{cost.ratio:.2f}** 倍。"
    + (f"（没有事件的这张图，开头从来没有录过的时候是 {clean_total:.1f} µs。录过以后启动慢了一截；上面两个数是在同样的状态下轮流量的，看倍数。）" if cost.second.median > 1.2 * clean_total else "")
)

# %% [markdown]
# 所以：事件节点适合切**几段**大的，不适合给每个节点都来一个。
#
# ## 追踪本身花多少
#
# CUPTI 按节点记录，每个节点一行；按整图记录（`tracing.record("graph")`），每次图启动一行。
# 对照是开头那一遍，从来没有录过；再轮流量三种情形，各三遍：录过、现在关着，按整图录，按节点录。
# 两张图，节点一样多，一张的节点几乎不做事，一张的节点各 20 µs。

# %% tags=["demo", "gpu"]
MODES = {"录过，现在关着": None, "按整图录": "graph", "按节点录": "node"}
traced = {(subject, mode): [] for subject in SUBJECTS for mode in MODES}
for _ in range(3):
    for subject, work in SUBJECTS.items():
        for mode, granularity in MODES.items():
            if granularity is None:
                traced[subject, mode].append(clocks(captured(work)))
                continue
            try:
                with tracing.record(granularity):
                    traced[subject, mode].append(clocks(captured(work)))
            except RuntimeError as error:  # a CUPTI that does not know the granularity
                print(mode, error)
middle = {key: [median(each) for each in zip(*pairs, strict=True)] for key, pairs in traced.items() if pairs}
rows = []
for subject, clean in never.items():
    rows.append((subject, "从来没有录过", f"{clean[0]:.1f}", f"{clean[1]:.1f}", ""))
    for submit, total, mode in [(*middle[subject, mode], mode) for mode in MODES if (subject, mode) in middle]:
        rows.append((subject, mode, f"{submit:.1f}", f"{total:.1f}", f"{(total - clean[1]) / TICKS * 1e3:+.0f}"))
lab.say(f"{TICKS} 个节点的图：\n\n" + lab.table(("图", "追踪", "CPU 提交（µs）", "端到端（µs）", "平均每个节点多花（ns）"), rows))
figure, ax = plt.subplots(figsize=(7.5, 2.8), layout="constrained")
for offset, subject in ((-0.2, "小节点"), (0.2, "20 µs 的节点")):
    slower = [middle[subject, mode][1] / never[subject][1] if (subject, mode) in middle else 0 for mode in MODES]
    ax.barh(np.arange(len(MODES)) + offset, slower, 0.36, label=subject)
ax.set_yticks(range(len(MODES)), list(MODES))
ax.set_xlabel("端到端时间，是从来没有录过时的几倍")
ax.set_title(f"追踪的代价（{lab.gpu_name()}）")
ax.invert_yaxis()
ax.legend()
plt.show()

# %% [markdown]
# 按节点录，每个节点要多取两次时间戳、多写一行记录。最后一列就是你这台机器上的追踪费，和从来没有录过的时候相比，摊到每个节点上（出现负数，就是差别比噪声还小）。
# 差不多的费用，摊在几乎不做事的节点上，倍数就难看；摊在 20 µs 的节点上，就不显眼了。
# 所以先看自己的图里节点有多长，再决定录制里的总时间能不能信。
#
# 也看看“录过，现在关着”那一行：它要是比“从来没有录过”慢一截（甚至比正按整图录的还慢），说明工具关了也没有走干净。
#
# 三条规矩：
#
# 1. 看**谁长谁短**，按节点录；
# 2. 报**整张图多长**，别带工具，最好换一个从来没有录过的进程，用事件或者端到端的时钟；
# 3. 两边对一次账。对不上，先弄清差在间隙、分支，还是工具身上。
#
# `nsys` 的 `--cuda-graph-trace=node` 和 `=graph` 是同样的两种粒度（granularity），同样的取舍。
#
# ## TensorRT 引擎的图：层、内核、节点
#
# 换成真的引擎：五层卷积，一层特别宽。`profiling_verbosity = DETAILED` 让检查器（inspector）有话可说。
# 录一遍它的图，再把检查器报的层放在旁边：

# %% tags=["demo", "gpu"]
import json

import tensorrt as trt

builder = trt.Builder(lab.trt_logger())
runtime = trt.Runtime(lab.trt_logger())
CHANNELS = (3, 16, 32, 160, 32, 16)


def conv_plan():
    """A chain of 3×3 convolutions with ReLU on 4 images of 64×64, as a plan, bytes."""
    rng = np.random.default_rng(26)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    tensor = network.add_input("x", trt.DataType.FLOAT, (4, CHANNELS[0], 64, 64))
    kept = []  # trt.Weights does not copy
    for number in range(1, len(CHANNELS)):
        ins, outs = CHANNELS[number - 1 : number + 1]
        kept.append((rng.standard_normal((outs, ins, 3, 3)) / np.sqrt(9 * ins)).astype(np.float32))
        layer = network.add_convolution_nd(tensor, outs, (3, 3), trt.Weights(kept[-1]))
        layer.padding_nd = (1, 1)
        layer.name = f"conv{number}"
        relu = network.add_activation(layer.get_output(0), trt.ActivationType.RELU)
        relu.name = f"relu{number}"
        tensor = relu.get_output(0)
    tensor.name = "y"
    network.mark_output(tensor)
    config = builder.create_builder_config()
    config.builder_optimization_level = 1
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.progress_monitor = lab.build_progress()
    with lab.timing_cache(config):
        plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("构建失败：" + "；".join(lab.trt_errors()))
    return bytes(plan)


plan = conv_plan()
engine = runtime.deserialize_cuda_engine(plan)
context = engine.create_execution_context()
with stream:
    images = cp.asarray(np.random.default_rng(1).standard_normal((4, CHANNELS[0], 64, 64)).astype(np.float32))
    maps = cp.zeros((4, CHANNELS[-1], 64, 64), cp.float32)
context.set_tensor_address("x", images.data.ptr)
context.set_tensor_address("y", maps.data.ptr)


def enqueue():
    if not context.execute_async_v3(stream.ptr):
        raise RuntimeError("入队没有成功：" + "；".join(lab.trt_errors()))


for _ in range(3):
    enqueue()
stream.synchronize()
engine_graph, engine_nodes, engine_spans = record_replays(enqueue, 12)
inspector = engine.create_engine_inspector()
layers = json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON)).get("Layers", [])
engine_sum = sum(us for *_, us in engine_nodes)
rows = [(f"`{name[:60]}`", blocks, f"{us:.1f}", f"{us / engine_sum:.0%}") for _, name, blocks, _, us in engine_nodes]
lab.say(
    f"图里的节点 {kinds(engine_graph)}：\n\n"
    + lab.table(("内核", "gridX", "µs", "占"), rows)
    + f"\n\n节点之和 {engine_sum:.1f} µs，录制里的跨度 {median(engine_spans or [0.0]):.1f} µs，图自己（不录）{own_us(engine_graph):.1f} µs。"
)
described = [(each.get("Name", "?"), each.get("LayerType", "?"), str(each.get("TacticName", each.get("TacticValue", "")))) if isinstance(each, dict) else (each, "?", "") for each in layers]
lab.say("检查器报的层：\n\n" + lab.table(("Name", "LayerType", "策略"), [(f"`{name[:40]}`", kind, f"`{tactic[:60]}`") for name, kind, tactic in described]))

# %% [markdown]
# 两张表就算一样长，也未必一一对应。融合让几个网络层变成一个引擎层；有的引擎层（`NoOp`）什么也不做，图里没有它的节点；
# 反过来，一个引擎层也可能是好几个节点，比如先填充，再算。
# 节点上写的是内核的名字，检查器报的是层的名字，能对上号的是策略（tactic）：看看有几个节点的内核名能在某一层的策略或名字里找到：

# %% tags=["demo", "gpu"]
def same_thing(kernel, name, tactic):
    """Whether a kernel's name and a layer's tactic or name begin alike, in their first 40 letters."""
    return any(len(text) > 8 and (kernel.startswith(text[:40]) or text.startswith(kernel[:40])) for text in (name, tactic))


matched = sum(any(same_thing(kernel, name, tactic) for name, _, tactic in described) for _, kernel, *_ in engine_nodes)
lab.say(f"{len(engine_nodes)} 个节点里，按名字对上层的有 **{matched}** 个。对不上的，要靠先后次序，或者靠 TensorRT 自己的剖析器。")

# %% [markdown]
# ## 逐层剖析器：装上了，为什么不说话
#
# TensorRT 自己就能报每一层的时间：继承 `trt.IProfiler`，实现 `report_layer_time(layer_name, ms)`，交给 `context.profiler`。
# 它靠的是**事件**：入队的时候在层与层之间记事件，做完以后读时间，再逐层回调。谁去“读”，由 `context.enqueue_emits_profile` 决定：
#
# - `True`（默认）：`execute_async_v3` 自己等着读，于是入队不再是异步的；
# - `False`：入队只记事件，以后由你调用 `context.report_to_profiler()` 去读**最近一次**的时间。它返回真假，要检查。
#
# 现在把它和图放在一起想。重放一张图的时候，`execute_async_v3` 根本没有被调用，谁来回调？
# 再想一步：层间的事件，在捕获里会变成什么？先猜，再看实验：
#
# | 情形 | 做什么 |
# |:--|:--|
# | `eager` | 装上剖析器，逐次入队一次 |
# | `later` | `enqueue_emits_profile = False`，入队一次，然后 `report_to_profiler()` |
# | `default graph` | 装着剖析器、默认设置，捕获，重放 |
# | `asked graph` | 装着剖析器、`enqueue_emits_profile = False`，捕获，重放，然后 `report_to_profiler()` |
# | `asked again` | 再调一次 `report_to_profiler()`，中间没有重放 |
# | `three replays` | 重放三次，再问一次 |
# | `plain graph` | 没有剖析器的时候捕获，重放 |
# | `late profiler` | 给上一张图的上下文补装剖析器，再重放这张**旧图**，再问 |
#
# 最后一种已经偏离了常规用法，问剖析器也有人遇到过段错误。所以整个实验放进一个子进程，走到哪一步印到哪一步，就算它半路倒下，这个笔记本也没事。

# %% tags=["demo", "gpu"]
import subprocess
import sys
import tempfile
from pathlib import Path

PROFILING = r"""
import json, sys
from collections import Counter
from pathlib import Path
from statistics import median

import cupy as cp
import numpy as np
import tensorrt as trt
from cuda.bindings import runtime as cudart
from launchlab import lab


def tell(step, **what):
    print(json.dumps({"step": step} | what), flush=True)


class Times(trt.IProfiler):
    def __init__(self):
        trt.IProfiler.__init__(self)
        self.reports = []

    def report_layer_time(self, layer_name, ms):
        self.reports.append((layer_name, ms))


stream = cp.cuda.Stream(non_blocking=True)
runtime = trt.Runtime(lab.trt_logger())
engine = runtime.deserialize_cuda_engine(Path(sys.argv[1]).read_bytes())
with stream:
    arrays = {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        arrays[name] = cp.zeros(tuple(engine.get_tensor_shape(name)), cp.float32)
stream.synchronize()


def new_context(profiler=None, emits=True):
    context = engine.create_execution_context()
    for name, array in arrays.items():
        context.set_tensor_address(name, array.data.ptr)
    if profiler is not None:
        context.profiler = profiler
        context.enqueue_emits_profile = emits
    for _ in range(2):
        assert context.execute_async_v3(stream.ptr)
        stream.synchronize()
        if profiler is not None and not emits:
            context.report_to_profiler()
    if profiler is not None:
        profiler.reports.clear()
    return context


def capture(context: "trt.IExecutionContext"):
    with stream:
        stream.begin_capture()
        try:
            accepted = context.execute_async_v3(stream.ptr)
        finally:
            graph = stream.end_capture()
    assert accepted
    _, count = lab.check_cuda(cudart.cudaGraphGetNodes(graph.graph, 0))
    nodes, _ = lab.check_cuda(cudart.cudaGraphGetNodes(graph.graph, count))
    kinds = Counter(lab.check_cuda(cudart.cudaGraphNodeGetType(node)).name for node in nodes)
    return graph, {"kernels": kinds["cudaGraphNodeTypeKernel"], "events": kinds["cudaGraphNodeTypeEventRecord"]}


def replay(graph, times=1):
    for _ in range(times):
        graph.launch(stream)
        stream.synchronize()


def took(graph):
    replay(graph, 5)
    return lab.end_to_end_us(lambda: graph.launch(stream), sync=stream.synchronize, repeats=30).median


first = Times()
context = new_context(first)
assert context.execute_async_v3(stream.ptr)
stream.synchronize()
tell("eager", reports=len(first.reports))

second = Times()
quiet = new_context(second, emits=False)
assert quiet.execute_async_v3(stream.ptr)
stream.synchronize()
before = len(second.reports)
told = quiet.report_to_profiler()
tell("later", reports=len(second.reports), before=before, told=bool(told))

plain_context = new_context()
plain, found = capture(plain_context)
replay(plain)
tell("plain graph", us=took(plain), **found)

first.reports.clear()
loud, found = capture(context)
replay(loud, 2)
tell("default graph", reports=len(first.reports), us=took(loud), **found)

second.reports.clear()
asked, found = capture(quiet)
replay(asked)
before = len(second.reports)
told = quiet.report_to_profiler()
layers = list(second.reports)
tell("asked graph", reports=len(layers), before=before, told=bool(told), us=took(asked), layers=layers, **found)

replay(asked)
second.reports.clear()
quiet.report_to_profiler()
one = list(second.reports)
second.reports.clear()
told = quiet.report_to_profiler()
tell("asked again", reports=len(second.reports), told=bool(told), same=second.reports == one)

second.reports.clear()
replay(asked, 3)
told = quiet.report_to_profiler()
tell("three replays", reports=len(second.reports), told=bool(told))

late = Times()
plain_context.profiler = late
plain_context.enqueue_emits_profile = False
replay(plain)
told = plain_context.report_to_profiler()
tell("late profiler", reports=len(late.reports), told=bool(told))
"""

with tempfile.TemporaryDirectory() as folder:
    plan_file, output = Path(folder, "engine.plan"), Path(folder, "out.txt")
    plan_file.write_bytes(plan)
    with output.open("w", encoding="utf-8") as out:
        try:
            ended = subprocess.run([sys.executable, "-X", "utf8", "-c", PROFILING, str(plan_file)], stdout=out, stderr=subprocess.DEVNULL, timeout=25, check=False).returncode
        except subprocess.TimeoutExpired:
            ended = "超时"
    steps = {}
    for line in output.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith('{"step"') and line.endswith("}"):
            steps[json.loads(line)["step"]] = json.loads(line)
STEPS = ("eager", "later", "plain graph", "default graph", "asked graph", "asked again", "three replays", "late profiler")


def shown(step, key, form="{}"):
    value = steps.get(step, {}).get(key)
    return "" if value is None else {True: "是", False: "否"}.get(value) if isinstance(value, bool) else form.format(value)


rows = [(f"`{step}`", *(shown(step, key) for key in ("kernels", "events", "before", "told", "reports")), shown(step, "us", "{:.1f}")) if step in steps else (f"`{step}`", *["（没有走到）"] * 6) for step in STEPS]
lab.say(
    lab.table(("情形", "内核节点", "事件节点", "问之前的报告", "report_to_profiler", "一共报告", "图的端到端 µs"), rows)
    + (f"\n\n`asked again`：第二次问到的数字，和第一次{'完全相同' if steps['asked again']['same'] else '不同'}。" if "asked again" in steps else "")
    + ("" if ended == 0 else f"\n\n子进程没有走完（退出码 {ended}）：走到哪一步，看表里哪一行开始是“没有走到”。")
)

# %% [markdown]
# 对着表看，按这个次序问自己：
#
# 1. `default graph` 报告了几次？默认设置下，回调发生在 `execute_async_v3` 里面；重放不经过它。剖析器“装上了却不说话”，多半就是这种情形；
# 2. 装着剖析器捕获的图，事件节点有几个？和没装的那张比：**为了量，图变了**。端到端那一列也跟着变，所以这样的图只用来剖析，不要拿去上线；
# 3. `asked graph` 呢？图里有事件节点，重放会记时间，再用 `report_to_profiler()` 去读，这是文档给出的正路；
# 4. `asked again` 和 `three replays`：它读的是最近一次的时间，多问不会有新的，少问就漏掉了中间的；
# 5. `late profiler` 的旧图里没有事件节点，重放不会记下任何层间的时间。如果这一行仍然报告了什么，那是以前的入队留下的旧数：**有数字，不等于是这次的数字**。
#
# 还有一条：`report_to_profiler()` 用的是上一次入队的那条流，流要还活着。有人先销毁了捕获用的流，再问剖析器，得到的是段错误（NVIDIA/TensorRT 的 issue 3387）。
#
# 把 `asked graph` 报的层加起来，和 CUPTI 的节点之和比一比：

# %% tags=["demo", "gpu"]
reported_layers = steps.get("asked graph", {}).get("layers") or []
if reported_layers:
    total = sum(ms for _, ms in reported_layers) * 1e3
    named = {name for name, _, _ in described}
    lab.say(
        lab.table(("剖析器报的层", "µs"), [(f"`{name[:60]}`", f"{ms * 1e3:.1f}") for name, ms in reported_layers[:12]])
        + f"\n\n{len(reported_layers)} 层一共 {total:.1f} µs；CUPTI 的 {len(engine_nodes)} 个节点一共 {engine_sum:.1f} µs。"
        + f"层名在检查器报告里找得到的有 {sum(name in named for name, _ in reported_layers)} 个。"
        + ("剖析器的和更大：层间的事件、节点之间的间隙，都记在了层的头上。" if total > engine_sum else "")
    )
else:
    lab.say("这一次没有拿到图里的逐层时间：看上一张表停在哪里。CUPTI 的节点时间不受影响。", measured=False)

# %% [markdown]
# 层的次序和名字来自检查器，时间来自剖析器，两边按名字连起来，就是一张“层、时间、搬了多少字节”的表。练习二用的就是这样录下来的表。
#
# ## 再往下一层：ncu
#
# 知道**哪个**内核慢以后，要问它**为什么**慢，那是 Nsight Compute（`ncu`）的事：把一个内核反复重放许多遍，每遍读一组硬件计数器。
# 对 CUDA 图，它有两种粒度，由 `--graph-profiling` 选：
#
# - `node`（默认）：图里的每个内核节点各当作一个内核来剖析，和逐个启动时一样有完整的指标。代价是节点被拆开、**一个个单独跑**，
#   并行的分支不再并行；默认每遍之前还要清空缓存（cache），前一个节点留在缓存里的数据也用不上了；
# - `graph`：整张图当作一件工作来量，保留节点之间的并行，但只有整体的指标，看不到单个节点。
#
# 所以次序是：先用 CUPTI 或 nsys 找到关键路径上值得改的节点，再用 `ncu --graph-profiling node -k 内核名` 看它自己的毛病：
# 访存是不是合并的（coalesced），占了几个 SM，算得多还是搬得多。ncu 要用硬件计数器，很多机器上需要管理员放开权限，
# 所以本章没有运行它；练习四的毛病，用节点记录里的网格大小就看得出来。
#
# ## 练习
#
# 四道题，共 12 分。可以用的给定名字：
#
# - `np`、`partial`、`lab`；需要 GPU 的还有 `cp`、`cudart`、`tracing`、`median`、`stream`、`captured`、`own_us`、`kinds`、`launch_spin`；
# - 各题前面另外给出的名字。演示单元（标着 demo，评分时不运行）里的名字不能用，里面的写法可以抄。
#
# ### 练习一：节点的账，对得上图的账（4 分）
#
# 写 `node_times(make, after, replays)`：
#
# - `make()` 捕获一张图并返回它（`cupy.cuda.Graph`）。图里每个内核的名字都不同。`make` 里面还可能做别的：预热内核，捕获并启动**另一张**图，内核名字还一样。
#   要在录制**里面**调用它，只调用一次；
# - `after` 是字典，内核名 → 它要等的那些内核名的列表（可能是空的）；字典的次序不一定是执行的次序；
# - 录制里，在 `stream` 上把这张图启动 `replays + 1` 次，每次都等它做完；第一次不算。录制结束以后，再用 `own_us(图, replays)` 量它自己的时间。
#
# 返回字典：
#
# - `"nodes"`：字典，内核名 → 这个节点的时间，µs，取 `replays` 次的中位数；
# - `"sum_us"`：所有节点的中位数之和；
# - `"critical_us"`：关键路径的长度：沿着 `after` 走，中位数之和最大的一条路；
# - `"graph_us"`：`own_us` 的结果。
#
# 偶尔有一次重放里某个节点特别慢，是正常的，中位数不怕它。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# `make` 里启动的那些工作，也会出现在录制里，名字还和你的节点一样。怎样只留下**你自己那几次启动**引出的内核？
# 《用 Nsight Systems 读时间线》里，请求和内核是怎样对上号的？
# 关键路径：一个节点最早什么时候能做完，取决于它等的那些里最晚的一个。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `with tracing.record() as recording:`，每次启动放进 `with tracing.range(f"replay {i}"):`；块结束以后查 `recording.db`。
# `CUPTI_ACTIVITY_KIND_KERNEL` 和 `CUPTI_ACTIVITY_KIND_RUNTIME` 按 `correlationId` 相连，再要求调用的 `start`、`end` 落在 `NVTX_EVENTS` 里那个 `text` 的区间内；
# 名字是 `StringIds` 里编号为 `shortName` 的 `value`。时间是 ns。
# 最长路可以写一个递归的小函数 `finish(name)`，用 `functools.cache` 记住算过的。
#
# </details>

# %% solution="node_times" tags=["gpu"]
def node_times(make, after, replays):
    """Times of the nodes of the graph that make() captures, by CUPTI, beside the graph's own.

    make: called once within the recording; returns a cupy.cuda.Graph whose kernels have different names. after: {kernel:
    [kernels that it waits for]}. Returns {"nodes": {kernel: median µs}, "sum_us", "critical_us", "graph_us": float}.
    """
    ### BEGIN SOLUTION: 录制里捕获，每次启动放进一个区间；按 correlationId 只取这些启动引出的内核，再求中位数、和、最长路
    with tracing.record() as recording:
        graph = make()
        for replay in range(replays + 1):
            with tracing.range(f"replay {replay}"):
                graph.launch(stream)
            stream.synchronize()
    query = """
        SELECT s.value, k.end - k.start
        FROM CUPTI_ACTIVITY_KIND_KERNEL k
        JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId
        JOIN NVTX_EVENTS n ON r.start >= n.start AND r.end <= n.end
        JOIN StringIds s ON s.id = k.shortName
        WHERE n.text LIKE 'replay %' AND n.text <> 'replay 0'
    """
    times = {}
    for name, ns in recording.db.execute(query):
        times.setdefault(name, []).append(ns / 1e3)
    nodes = {name: median(each) for name, each in times.items()}
    finished = {}

    def finish(name):
        if name not in finished:
            finished[name] = nodes[name] + max(map(finish, after[name]), default=0.0)
        return finished[name]

    return {
        "nodes": nodes,
        "sum_us": sum(nodes.values()),
        "critical_us": max(map(finish, after)),
        "graph_us": own_us(graph, replays),
    }
    ### END SOLUTION


# %% test="node_times" kind="structure" points=4 tags=["gpu"]
MAKER = r"""
NEVER = 0xffffffff


def maker(stream, counts, names, spins, after, odd, decoys, late):
    # counts: how often each node ran. The first run of a node takes 4 times as long; of every 5 runs of node `odd` one takes
    # 3 times, one half as long. From run number `late` on all take twice as long.
    import cupy, numpy
    body = r'''
    extern "C" __global__ void NAME(unsigned* c, int at, unsigned long long ns, int odd, unsigned late) {
        unsigned k = c[at];
        unsigned long long half = k == 0 ? 8 : odd && k % 5 == 3 ? 6 : odd && k % 5 == 4 ? 1 : 2;
        unsigned long long want = ns * half / 2 * (k >= late ? 2 : 1), start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < want);
        c[at] = k + 1;
    }
    '''
    module = cupy.RawModule(code="".join(body.replace("NAME", name) for name in names))
    kernels = {name: module.get_function(name) for name in names}
    with stream:
        scratch = cupy.zeros(len(names), cupy.uint32)
    stream.synchronize()

    def capture(target, scale, late):
        sides = {name: cupy.cuda.Stream(non_blocking=True) for name in names}
        done = {name: cupy.cuda.Event(disable_timing=True) for name in names}
        begin = cupy.cuda.Event(disable_timing=True)
        waited = {each for name in names for each in after[name]}
        with stream:
            stream.begin_capture()
            try:
                begin.record(stream)
                for at, name in enumerate(names):
                    side = sides[name]
                    for each in [done[other] for other in after[name]] or [begin]:
                        side.wait_event(each)
                    with side:
                        kernels[name]((1,), (1,), (target, numpy.int32(at), numpy.uint64(spins[at] * scale * 1000), numpy.int32(name == odd), numpy.uint32(late)))
                    done[name].record(side)
                for name in names:
                    if name not in waited:
                        stream.wait_event(done[name])
            finally:
                graph = stream.end_capture()
        return graph, sides, done, begin

    kept = []
    calls = []

    def make():
        calls.append(1)
        with stream:
            for at, name in enumerate(names):
                kernels[name]((1,), (1,), (scratch, numpy.int32(at), numpy.uint64(1000), numpy.int32(0), numpy.uint32(NEVER)))
        stream.synchronize()
        if decoys:
            kept.append(capture(scratch, 0.1, NEVER))
            for _ in range(decoys):
                kept[-1][0].launch(stream)
            stream.synchronize()
        kept.append(capture(counts, 1, late))
        return kept[-1][0]

    make.calls = calls
    return make
"""


def longest(names, spins, after):
    """Length of the critical path of the spins, µs; names in an order in which they may run."""
    finish = {}
    for name, us in zip(names, spins, strict=True):
        finish[name] = us + max((finish[each] for each in after[name]), default=0)
    return max(finish.values())


def examined(side, names, spins, after, odd, decoys, replays, shuffled, late=2**32 - 1):
    """What node_times says of such a graph, how often each node ran, and how often make was called."""
    counts = on_gpu(np.zeros(len(names), np.uint32))
    make = side.define(MAKER, "maker")(side.value("stream"), counts, names, spins, after, odd, decoys, late)
    found = side.node_times(make, shuffled, replays)
    return found, counts.read(), len(make.get("calls"))


def judge_account(names, spins, after, odd, decoys, replays, shuffled, why, late=2**32 - 1):
    found, ran, calls = examined(student, names, spins, after, odd, decoys, replays, shuffled, late)
    check.equal(calls, 1, why="make 只应当调用一次：一张图，重放多次。")
    check.equal(len(set(ran.tolist())), 1, why="各个节点跑的次数不一样：整张图要完整地重放。")
    check.that(int(ran[0]) >= 2 * replays, why="重放的次数不够：录制里 replays + 1 次，录制以后 own_us 还要再重放。")
    check.equal(sorted(found["nodes"]), sorted(names), why="nodes 应当正好包含图里的每个内核名，一个不多，一个不少。")
    got = [float(found["nodes"][name]) for name in names]
    check.equal(got, [float(us) for us in spins], rel=0.06, abs=12.0, why=why + "节点的时间和它真正的长度对不上。单位是 µs 吗？第一次重放去掉了吗？取的是中位数吗？有没有混进 make 里别的启动？")
    check.equal(float(found["sum_us"]), float(sum(spins)), rel=0.06, abs=12.0 * len(names), why=why + "sum_us 应当是所有节点的中位数之和。")
    check.equal(float(found["critical_us"]), float(longest(names, spins, after)), rel=0.06, abs=12.0 * len(names), why=why + "critical_us 应当是最长的一条路：每个节点要等它 after 里最晚做完的那个。")
    return found


line = {"opening": [], "middle": ["opening"], "ending": ["middle"]}
found = judge_account(list(line), [200, 350, 120], line, "middle", 0, 7, {name: line[name] for name in ("ending", "opening", "middle")}, "一串三个节点：")
check.equal(float(found["graph_us"]), 670.0, rel=0.1, abs=60.0, why="一串节点：graph_us 应当和节点之和相差不大。它要在录制结束以后，用 own_us 量。")
### BEGIN HIDDEN TESTS
words = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven"]
shapes = [
    ([[], [0], [1], [2], [3], [4]], "一串六个节点："),
    ([[], [0], [0], [1], [1, 2], [3, 4], [0]], "有分支、有汇合："),
    ([[], [], [0, 1], [2], [2], [2], [3, 4, 5]], "两个起点："),
]
for edges, why in shapes:
    names = [str(each) for each in secret.permutation(words)][: len(edges)]
    spins = [int(us) for us in secret.integers(90, 420, len(edges))]
    after = {name: [names[i] for i in each] for name, each in zip(names, edges, strict=True)}
    shuffled = {name: after[name] for name in [str(each) for each in secret.permutation(names)]}
    rest = (names, spins, after, str(secret.choice(names)), 14, 8, shuffled)
    late = 9  # once the recording is over, all nodes take twice as long: graph_us has to be measured
    found = judge_account(*rest, why, late)
    theirs, _, _ = examined(reference, *rest, late)
    check.equal(float(found["graph_us"]), float(theirs["graph_us"]), rel=0.12, abs=60.0, why=why + "graph_us 和这张图自己的时间对不上：它要在录制结束以后，用 own_us(图, replays) 量，不能由节点的时间算出来。")
    check.that(float(found["graph_us"]) > 0.93 * 2 * longest(names, spins, after), why=why + "graph_us 比关键路径还短，量的不是整张图。")
# One replay that counts: with the first one beside it the median is 2.5 times as long. Of three tries the quickest, lest a hiccup decides.
spins = [int(us) for us in secret.integers(90, 420, 3)]
tries = [examined(student, list(line), spins, line, "", 3, 1, line)[0]["nodes"] for _ in range(3)]
for each in tries:
    check.equal(sorted(each), sorted(line), why="replays = 1 的时候，nodes 也应当正好包含图里的每个内核名。")
check.equal([min(float(each[name]) for each in tries) for name in line], [float(us) for us in spins], rel=0.06, abs=12.0, why="replays = 1 的时候，节点的时间不对：第一次重放不算，只看第二次。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习二：该改哪一层（3 分）
#
# 有了每个节点的时间，该改哪个？“最长的那个”是最常见的回答，但它在三种情况下会错：最长的已经接近下限；最长的不在关键路径上；另一层散成了许多个小节点，每个都不起眼，加起来却更多。
#
# 写 `which_to_mend(nodes, gb_per_s)`。`nodes` 是字典的列表，每个节点：
#
# - `"layer"`：属于哪一层（一层可以有好几个节点）；`"us"`：现在的时间，µs；
# - `"mb"`：它至少要搬的数据，MB（1 MB = 10⁶ 字节）；`"after"`：它要等的那些节点在列表里的**下标**，都比自己的小。
#
# 约定：
#
# - 图的时间 = 关键路径的长度；
# - 一个节点再怎么改，也快不过把数据搬一遍：下限是 `mb / gb_per_s` 换算成 µs，但不小于 `LEAST_US`；比下限还快的节点，保持原样；
# - 改好一层 = 这一层的**所有**节点都降到各自的下限，别的层不变。
#
# 返回 `(layer, saved_us)`：改好哪一层，图的时间省得最多，省多少 µs。哪一层都省不了，就返回 `(None, 0.0)`。测试里没有并列。
#
# 随题附了一份录下来的表：真实引擎的逐层时间（剖析器）和每层输入输出的字节数（检查器）。先看看它，不需要 GPU。

# %%
import json
from pathlib import Path

LEAST_US = 1.5  # not even an empty node is quicker
RECORDED = json.loads(Path("layers.json").read_text(encoding="utf-8"))


def recorded_nodes(model):
    """The layers of a recorded engine, as a list for which_to_mend: one node each, one after the other."""
    layers = RECORDED["models"][model]["layers"]
    return [{"layer": name, "us": us, "mb": mb, "after": [i - 1] if i else []} for i, (name, us, mb) in enumerate(layers)]


# %% tags=["demo"]
parts = []
for model, told in RECORDED["models"].items():
    longest_first = sorted(recorded_nodes(model), key=lambda node: -node["us"])[:5]
    rows = [(f"`{node['layer'][:50]}`", f"{node['us']:.1f}", f"{node['mb']:.2f}", f"{node['mb'] / RECORDED['gb_per_s'] * 1e3:.1f}") for node in longest_first]
    parts.append(f"**{model}**：{len(told['layers'])} 层，整张图 {told['graph_us']:.0f} µs。最长的五层：\n\n" + lab.table(("层", "µs", "MB", "只搬数据要 µs"), rows))
origin = "这是占位用的合成数据，不是实测。" if RECORDED.get("synthetic") else f"录于 {RECORDED['gpu']}，TensorRT {RECORDED['tensorrt']}，{RECORDED['recorded_at']}；显存带宽按量到的 {RECORDED['gb_per_s']:.0f} GB/s。"
lab.say(origin + "\n\n" + "\n\n".join(parts), measured=False)

# %% [markdown]
# 字节数只含每层的输入和输出，没有算权重，也没有算计算量：下限是偏低的，实际未必达得到。用它排先后够了，别拿它当承诺。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 先写一个“给定每个节点的时间，算图的时间”的小函数。改好一层，就是把其中几个时间换掉，再算一次。
# 改完以后当家的可能是另一条路，所以不能用“省下的节点时间”代替“省下的图时间”。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 下标都指向前面的节点，所以从头到尾扫一遍就能算出每个节点最早做完的时间：自己的时间加上 `max(…, default=0.0)`。
# 下限：`min(us, max(LEAST_US, mb / gb_per_s * 1000))`（1 MB ÷ 1 GB/s = 1 ms = 1000 µs）。
# 层的名字：`{node["layer"] for node in nodes}`；最大的用 `max(…, key=…)`，列表可能是空的。
#
# </details>

# %% solution="which_to_mend"
def which_to_mend(nodes, gb_per_s):
    """The layer whose mending shortens the graph most, and by how many µs; (None, 0.0) if none does.

    nodes: list of {"layer": str, "us": float, "mb": float, "after": [indices]}; gb_per_s: memory bandwidth.
    """
    ### BEGIN SOLUTION: 先算现在的关键路径；再想：改好某一层以后，图的时间会变成多少？哪一层省得最多？
    def graph_us(times):
        finish = []
        for node, us in zip(nodes, times, strict=True):
            finish.append(us + max((finish[i] for i in node["after"]), default=0.0))
        return max(finish, default=0.0)

    now = graph_us([node["us"] for node in nodes])
    best = (None, 0.0)
    for layer in {node["layer"] for node in nodes}:
        mended = [min(node["us"], max(LEAST_US, node["mb"] / gb_per_s * 1000)) if node["layer"] == layer else node["us"] for node in nodes]
        saved = now - graph_us(mended)
        if saved > best[1] + 1e-9:
            best = (layer, saved)
    return best
    ### END SOLUTION


# %% test="which_to_mend" kind="answer" points=3
def node(layer, us, mb, *after):
    return {"layer": layer, "us": us, "mb": mb, "after": list(after)}


def answer(nodes, gb_per_s):
    layer, saved = student.which_to_mend(nodes, gb_per_s)
    return layer, float(saved)


layer, saved = answer([node("big", 50.0, 48.0), node("slow", 20.0, 4.0, 0), node("end", 5.0, 4.0, 1)], 1000.0)
check.equal(layer, "slow", why="big 有 50 µs，可光搬数据就要 48 µs，改好只省 2；slow 从 20 降到 4。")
check.equal(saved, 16.0, abs=1e-6, why="slow 从 20 µs 降到 4 µs，图省 16 µs。")
layer, saved = answer([node("start", 5.0, 4.0), node("side", 30.0, 2.0, 0), node("main", 33.0, 25.0, 0), node("end", 5.0, 4.0, 1, 2)], 1000.0)
check.equal(layer, "main", why="side 不在关键路径上：改到再快，也要等 main。")
check.equal(saved, 3.0, abs=1e-6, why="main 从 33 降到 25，可是 30 µs 的 side 接着当家：图只省 3 µs，不是 8。")
layer, saved = answer([node("many", 4.0, 1.0, *([i - 1] if i else [])) for i in range(10)] + [node("one", 24.0, 12.0, 9)], 1000.0)
check.equal(layer, "many", why="many 有 10 个小节点，每个从 4 降到 1.5 µs，一共省 25；one 只省 12。")
check.equal(saved, 25.0, abs=1e-6, why="一个节点再快也不低于 LEAST_US。")
### BEGIN HIDDEN TESTS
def rule(nodes, gb_per_s):
    """The answer and how far it is ahead of the next."""
    def length(times):
        ends = np.zeros(len(times))
        for i, us in enumerate(times):
            ends[i] = us + max((ends[j] for j in nodes[i]["after"]), default=0.0)
        return ends.max() if len(ends) else 0.0

    now = length([each["us"] for each in nodes])
    gains = {}
    for layer in {each["layer"] for each in nodes}:
        floors = [max(1.5, each["mb"] / gb_per_s * 1000) for each in nodes]
        gains[layer] = now - length([min(each["us"], floor) if each["layer"] == layer else each["us"] for each, floor in zip(nodes, floors, strict=True)])
    ranked = sorted(gains.items(), key=lambda item: -item[1])
    if not ranked or ranked[0][1] < 1e-6:
        return (None, 0.0), 1.0
    return (ranked[0][0], float(ranked[0][1])), ranked[0][1] - (ranked[1][1] if len(ranked) > 1 else 0.0)


def drawn(count, layers, gb_per_s):
    made = []
    for i in range(count):
        near = [int(j) for j in secret.choice(range(max(0, i - 3), i), size=min(i, int(secret.integers(1, 3))), replace=False)] if i else []
        us = float(secret.uniform(2, 60))
        made.append(node(f"layer {int(secret.integers(layers))}", us, us * gb_per_s / 1000 * float(secret.choice([0.05, 0.3, 0.9, 1.4])), *near))
    return made


examined_graphs = 0
for _ in range(60):
    bandwidth = float(secret.uniform(200, 5000))
    graph = drawn(int(secret.integers(4, 30)), int(secret.integers(2, 9)), bandwidth)
    (layer, saved), margin = rule(graph, bandwidth)
    if margin < 0.05:
        continue
    examined_graphs += 1
    if examined_graphs > 25:
        break
    got = answer(graph, bandwidth)
    check.equal(got[0], layer, why="随机的图里选错了层。所有节点一起改吗？改完重新算关键路径了吗？下限的单位对吗？")
    check.equal(got[1], saved, rel=1e-6, abs=1e-6, why="随机的图里，省下的时间算错了。")
for model in reference.value("RECORDED")["models"]:
    for factor in (1.0, float(secret.uniform(0.2, 0.8))):
        bandwidth = reference.value("RECORDED")["gb_per_s"] * factor
        graph = reference.recorded_nodes(model)
        (layer, saved), margin = rule(graph, bandwidth)
        got = answer(graph, bandwidth)
        if margin > 1e-3:
            check.equal(got[0], layer, why="录下来的引擎里选错了层（或者换一个带宽以后选错了）。")
        check.equal(got[1], saved, rel=1e-6, abs=1e-6, why="录下来的引擎里，省下的时间算错了。")
check.equal(answer([node("a", 3.0, 9.0), node("b", 1.0, 0.1, 0)], 1000.0), (None, 0.0), why="每个节点都不比下限慢：没有哪一层能省，返回 (None, 0.0)。比下限还快的，保持原样。")
check.equal(answer([node("a", 40.0, 1.0), node("b", 40.0, 1.0)], 1000.0), (None, 0.0), why="两条一样长的路并排：只改一层，另一条还在，图一点也不省。")
check.equal(answer([], 1000.0), (None, 0.0), why="一个节点也没有的时候，返回 (None, 0.0)。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：不用工具，量图里的每一段（2 分）
#
# 写 `time_parts(part, count, replays)`：`part(i)` 往当前流放第 `i` 段的工作（一个或几个内核，只能捕获，**每段只调用一次**）。
#
# - 在 `stream` 上，用**一次**捕获把 `part(0)` … `part(count - 1)` 依次录进同一张图；
# - 把图重放 `replays + 1` 次，第一次不算；
# - 返回一个列表：每一段的时间，µs，取 `replays` 次的中位数。不开 CUPTI，不用 CPU 的时钟。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# `count` 段有几条边界？事件要在哪一种记录方式下，重放时才真的记时间？
# 事件里只留得下最近一次的时间：什么时候去读？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `cp.cuda.Event()`（默认就能计时）；`lab.check_cuda(cudart.cudaEventRecordWithFlags(event.ptr, stream.ptr, cudart.cudaEventRecordExternal))`；
# `captured(work)` 录图；`stream.synchronize()` 以后 `cp.cuda.get_elapsed_time(a, b)` 返回**毫秒**。
#
# </details>

# %% solution="time_parts" tags=["gpu"]
def time_parts(part, count, replays):
    """Times of the parts of one graph, by events within it. part(i): puts part i on the current stream, called once.

    Returns a list of `count` floats: median µs of `replays` replays, after one that does not count.
    """
    ### BEGIN SOLUTION: 在每段前后各放一个 External 的事件记录，一起录进图；每次重放以后等它做完，再读相邻两个事件之间的时间
    events = [cp.cuda.Event() for _ in range(count + 1)]

    def mark(event):
        lab.check_cuda(cudart.cudaEventRecordWithFlags(event.ptr, stream.ptr, cudart.cudaEventRecordExternal))

    def work():
        mark(events[0])
        for i in range(count):
            part(i)
            mark(events[i + 1])

    graph = captured(work)
    times = []
    for _ in range(replays + 1):
        graph.launch(stream)
        stream.synchronize()
        times.append([1000 * cp.cuda.get_elapsed_time(events[i], events[i + 1]) for i in range(count)])
    return [median(each) for each in zip(*times[1:], strict=True)]
    ### END SOLUTION


# %% test="time_parts" kind="structure" points=2 tags=["gpu", "alone"]
PARTS = r"""
def parts(stream, counts, plan, odd):
    # plan: for each part the µs of its kernels. The first run takes 4 times as long; of every 5 runs of part `odd` one takes
    # 3 times, one half as long.
    import cupy, numpy
    from cuda.bindings import runtime
    kernel = cupy.RawKernel(r'''
    extern "C" __global__ void stretch(unsigned* c, int at, unsigned long long ns, int odd) {
        unsigned k = c[at];
        unsigned long long half = k == 0 ? 8 : odd && k % 5 == 3 ? 6 : odd && k % 5 == 4 ? 1 : 2;
        unsigned long long want = ns * half / 2, start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < want);
        c[at] = k + 1;
    }
    ''', "stretch")
    with stream:
        kernel((1,), (1,), (cupy.zeros(1, cupy.uint32), numpy.int32(0), numpy.uint64(1000), numpy.int32(0)))
    stream.synchronize()
    first = [sum(len(each) for each in plan[:i]) for i in range(len(plan))]

    def part(i):
        part.calls.append(int(i))
        _, status, number, *_ = runtime.cudaStreamGetCaptureInfo(cupy.cuda.get_current_stream().ptr)
        part.captures.append(int(number) if int(status) == 1 else 0)
        for j, us in enumerate(plan[i]):
            kernel((1,), (1,), (counts, numpy.int32(first[i] + j), numpy.uint64(us * 1000), numpy.int32(i == odd)))

    part.calls, part.captures = [], []
    return part
"""


def judge_parts(layout, odd, replays, why):
    counts = on_gpu(np.zeros(sum(map(len, layout)), np.uint32))
    part = student.define(PARTS, "parts")(student.value("stream"), counts, layout, odd)
    got = student.time_parts(part, len(layout), replays)
    check.equal(part.get("calls"), list(range(len(layout))), why="part 应当按次序每段调用一次：那是捕获；重放不再调用它。")
    captures = part.get("captures")
    check.that(captures[0] != 0 and len(set(captures)) == 1, why="各段不在同一次捕获里：每段各录一张图、各量各的，量的就不是一张图里的段了。把所有的段和它们之间的事件一起录进一张图。")
    ran = counts.read()
    check.equal(len(set(ran.tolist())), 1, why="各段跑的次数不一样：它们应当在同一张图里。")
    check.that(int(ran[0]) >= replays, why="重放的次数不够。")
    got = [float(us) for us in got]
    if replays > 1:  # one alone may have met a hiccup
        check.equal(got, [float(sum(each)) for each in layout], rel=0.12, abs=20.0, why=why)
    return got


parts_seen = judge_parts([[150], [300], [80]], 1, 7, "三段的时间和它们真正的长度对不上。单位是 µs 吗？第一次去掉了吗？每次重放都等做完再读吗？")
### BEGIN HIDDEN TESTS
for _ in range(2):
    layout = [[int(us) for us in secret.integers(60, 260, int(secret.integers(1, 4)))] for _ in range(int(secret.integers(2, 6)))]
    judge_parts(layout, int(secret.integers(len(layout))), 8, "段数、每段的内核数变了以后，时间不对。取的是中位数吗？一段里有几个内核时，要量整段。")
judge_parts([[int(secret.integers(100, 400))]], 0, 8, "只有一段的时候不对。")
layout = [[int(us)] for us in secret.integers(100, 400, 3)]
tries = [judge_parts(layout, -1, 1, "") for _ in range(3)]
check.equal([min(each) for each in zip(*tries, strict=True)], [float(us) for us, in layout], rel=0.12, abs=20.0, why="replays = 1 的时候，时间不对：第一次重放不算，只看第二次。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：找到它，改好它（3 分）
#
# 一条流水线，17 个阶段（stage），每个阶段一个节点，名字只有 `stage_00` … `stage_16`。真实的引擎也是这样，名字里看不出毛病。
# 其中一个阶段比其余的慢得多，而它做的事其实不多。
#
# 数据 `x` 是 cupy 的 uint32 数组，n + 1 个：n 个数据，最后一个 `x[n]` 是钥匙（key）。阶段的写法有五种，见 `FORMULAS`，`ORDER` 说每个阶段用哪一种。
# `capture_stages(x, instead)` 录整条流水线；`instead` 是字典，阶段的序号 → 函数 `f(x, y)`，录到那个阶段时就改为调用它
# （`y` 是暂存用的数组，和 x 的数据一样长；函数往当前流放工作）。

# %% tags=["gpu"]
LOOP = "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)"
FORMULAS = {  # letter: (blocks, None: as many as the data need; body with the stage's number for STEP)
    "m": (None, LOOP + " { unsigned v = x[i]; v ^= v >> 15; v *= 0x2c1b3c6du; v ^= x[n] + STEP * 0x9e3779b9u; v ^= v >> 12; v += (unsigned)i; x[i] = v; }"),
    "t": (None, LOOP + " y[i] = x[(unsigned long long)i * 7919u % (unsigned)n];"),
    "w": (None, LOOP + " x[i] ^= (y[i] << 7) | (y[i] >> 25);"),
    "g": (None, LOOP + " { unsigned v = x[i]; for (int k = 0; k < 24; k++) { v ^= v << 13; v ^= v >> 17; v ^= v << 5; v += STEP; } x[i] = v; }"),
    "f": (1, "int part = (n + blockDim.x - 1) / blockDim.x, from = threadIdx.x * part; unsigned sum = 0;"
             " for (int i = from; i < from + part && i < n; i++) { unsigned v = x[i] * (2u * i + 1u);"
             " for (int k = 0; k < 8; k++) { v ^= v << 13; v ^= v >> 17; v ^= v << 5; } sum += v; } atomicAdd(&x[n], sum);"),
}  # fmt: skip
ORDER = "mgtwmtwmgtwfmtwgm"
THREADS = 256
stage_code = "".join(
    f'extern "C" __global__ void stage_{i:02d}(unsigned* x, unsigned* y, int n) {{ {FORMULAS[letter][1].replace("STEP", f"{i}u")} }}\n'
    for i, letter in enumerate(ORDER)
)
stage_module = cp.RawModule(code=stage_code)
stages = [stage_module.get_function(f"stage_{i:02d}") for i in range(len(ORDER))]
STAGE_AFTER = {f"stage_{i:02d}": [f"stage_{i - 1:02d}"] if i else [] for i in range(len(ORDER))}


def launch_stage(i, x, y):
    """Launch stage i on x (cupy uint32 (n + 1,)) with scratch y (n,), on the current stream."""
    n = x.size - 1
    blocks = FORMULAS[ORDER[i]][0] or -(-n // THREADS)
    stages[i]((blocks,), (THREADS,), (x, y, np.int32(n)))


class Captured:
    """A captured pipeline: call it to replay it once on `stream`, without waiting. Keeps the scratch that the graph uses."""

    def __init__(self, graph, scratch):
        self.captured, self.scratch = graph, scratch

    def __call__(self):
        self.captured.launch(stream)


def capture_stages(x, instead=None):
    """Capture all stages on x (cupy uint32 (n + 1,)), one after the other; x itself is left as it is.

    instead: {number of a stage: function of (x, y) that launches its replacement on the current stream}.
    """
    instead = instead or {}
    with stream:
        y = cp.zeros(x.size - 1, cp.uint32)
    stream.synchronize()

    def work():
        for i in range(len(ORDER)):
            if i in instead:
                instead[i](x, y)
            else:
                launch_stage(i, x, y)

    return Captured(captured(work), y)


with stream:
    for warm_i in range(len(ORDER)):
        launch_stage(warm_i, cp.zeros(THREADS + 1, cp.uint32), cp.zeros(THREADS, cp.uint32))
stream.synchronize()

# %% [markdown]
# 写 `capture_mended(x)`，返回 `Captured`，要求：
#
# - 每次重放的效果和 `capture_stages(x)` **完全相同**，包括 `x[n]`，n 可以是任何不小于 2 的数；捕获不能改动 `x`；
# - 只换掉一个阶段，其余的照旧；换上去的可以用一到三个节点，图里只有内核、填充和拷贝节点；
# - 快。测试的时钟从外面看，连续重放 `captured` 里的那张图许多次，最后等一次 GPU；基线是 `capture_stages` 自己的图，所以省下的只能是 GPU 的时间。
#   数据有 2 MiB。要求快到 2 倍；参考实现在这台机器上快得不多时，门槛降到它的加速比的一半，但不低于 1.2 倍。
#
# 先别猜，量。练习一的 `node_times` 正好用得上，新开一格就能运行：
#
# ```python
# trial, keep = cp.zeros((1 << 19) + 1, cp.uint32), []
#
# def make():
#     keep.append(capture_stages(trial))  # 留住 Captured：图只记得暂存数组的地址
#     return keep[-1].captured
#
# node_times(make, STAGE_AFTER, 9)
# ```
#
# 看着最复杂的写法，未必是最慢的那个。量出是哪一个，就把它写进代码，`capture_mended` 里不必再量；
# 也别再启动原来那个慢的内核：测试调用 `capture_mended` 的时候，它已经被换成了算别的东西的内核。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 那个阶段用了几个线程块？GPU 上其余的 SM 在做什么？相邻的线程读的是相邻的地址吗？
# 把它拆给许多线程块以后，每块各有一个部分和：怎样合起来，次序不同结果也完全一样？（uint32 的加法，溢出就绕回。）
# 要是每个线程都去加同一个地址，会不会又排起队来？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `cp.RawKernel(源码, 名字)`，按 `kernel((块数,), (THREADS,), (x, np.int32(n)))` 启动；循环的写法抄 `LOOP`，相邻的线程就读相邻的地址。
# 先在线程里累加若干个，再在 warp（32 个线程）里合并：`for (int d = 16; d; d >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, d);`，
# 最后每个 warp 只由一个线程 `atomicAdd(&x[n], sum)`。循环里不能有线程提前 `return`，合并时 32 个都要在场。
# 第一次启动要加载代码，捕获前先对一个**别的**小数组启动一次，再 `stream.synchronize()`。
#
# </details>

# %% solution="capture_mended" tags=["gpu"]
def capture_mended(x):
    """capture_stages(x) with its one slow stage replaced by something quick with the same result.

    x: cupy uint32 (n + 1,), advanced in place by each replay. Returns a Captured.
    """
    ### BEGIN SOLUTION: 先用 node_times 找出最慢的阶段，看清它为什么慢；再写一个结果完全相同、让整块 GPU 一起做的内核，录的时候换上去
    kernel = cp.RawKernel(
        r"""
        extern "C" __global__ void fold_wide(unsigned* x, int n) {
            unsigned sum = 0;
            for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
                unsigned v = x[i] * (2u * i + 1u);
                for (int k = 0; k < 8; k++) { v ^= v << 13; v ^= v >> 17; v ^= v << 5; }
                sum += v;
            }
            for (int d = 16; d; d >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, d);
            if ((threadIdx.x & 31) == 0) atomicAdd(&x[n], sum);
        }
        """,
        "fold_wide",
    )

    def quick(x, y):
        n = x.size - 1
        kernel((min(128, -(-n // THREADS)),), (THREADS,), (x, np.int32(n)))

    with stream:
        quick(cp.zeros(THREADS + 1, cp.uint32), None)  # loads its code
    stream.synchronize()
    return capture_stages(x, {ORDER.index("f"): quick})
    ### END SOLUTION


# %% test="capture_mended" kind="structure" points=1 tags=["gpu"]
def after_replays(x, times):
    """What so many replays make of x, by NumPy."""
    data, key = x[:-1].copy(), x[-1:].copy()
    where = np.arange(data.size, dtype=np.uint32)
    turned = (where.astype(np.uint64) * np.uint64(7919) % np.uint64(data.size)).astype(np.int64)
    y = np.zeros_like(data)
    for _ in range(times):
        for step, letter in enumerate("mgtwmtwmgtwfmtwgm"):
            if letter == "m":
                data ^= data >> np.uint32(15)
                data *= np.uint32(0x2C1B3C6D)
                data ^= key + np.uint32(step * 0x9E3779B9 & 0xFFFFFFFF)
                data ^= data >> np.uint32(12)
                data += where
            elif letter == "t":
                y = data[turned]
            elif letter == "w":
                data ^= (y << np.uint32(7)) | (y >> np.uint32(25))
            elif letter == "g":
                for _ in range(24):
                    data ^= data << np.uint32(13)
                    data ^= data >> np.uint32(17)
                    data ^= data << np.uint32(5)
                    data += np.uint32(step)
            else:
                v = data * (np.uint32(2) * where + np.uint32(1))
                for _ in range(8):
                    v ^= v << np.uint32(13)
                    v ^= v >> np.uint32(17)
                    v ^= v << np.uint32(5)
                key += v.sum(dtype=np.uint32)
    return np.concatenate([data, key])


WITHOUT = """
def without_the_slow_stage(capture_mended, launch_stage, x):
    # Whoever still launches the slow stage gets another one's kernel meanwhile, and a wrong result.
    stages = launch_stage.__globals__["stages"]
    slow, stages[11] = stages[11], stages[13]
    try:
        return capture_mended(x)
    finally:
        stages[11] = slow
"""


def judge_mended(fresh, times, why):
    lent = on_gpu(fresh)
    mended = student.define(WITHOUT, "without_the_slow_stage")(student.value("capture_mended"), student.value("launch_stage"), lent)
    check.equal(lent.read(), fresh, why="捕获不该改动 x：为了加载代码而启动的那一次，用的是别的数组吗？")
    check.nodes(mended.get("captured"), kernels=(16, 19), total=(17, 19), hosts=0, children=0, why="除了换掉的那一个阶段，其余 16 个都要照旧；图里只有内核、填充和拷贝节点。")
    mended.run(times)
    check.equal(lent.read(), after_replays(fresh, times), why=why)
    return lent, mended


mended_seen = judge_mended(np.arange(1001, dtype=np.uint32), 1, "重放一次，结果和原来的流水线不同：换掉的是最慢的那个阶段吗？（测试里，原来的那个内核已经用不得了。）新的写法算的是同一件事吗？")
### BEGIN HIDDEN TESTS
for n in (2, 31, 257, int(secret.integers(1000, 5000)), int(secret.integers(40_000, 90_000))):
    fresh = secret.integers(0, 2**32, n + 1, dtype=np.uint32)
    lent, mended = judge_mended(fresh, int(secret.integers(1, 4)), "换了大小和数据以后，结果不同。n 不是线程数的整数倍时，每个数正好加一次吗？x[n] 是加上去的，不是盖掉的吗？")
    again = secret.integers(0, 2**32, n + 1, dtype=np.uint32)
    lent.write(again)
    mended.run(2)
    check.equal(lent.read(), after_replays(again, 2), why="x 被就地改写以后再重放，结果不对：重放时要重新求和。")
    lent.write(fresh)
    mended.get("captured").instantiate().run(2)
    check.equal(lent.read(), after_replays(fresh, 2), why="考官只启动 captured 里的那一张图，结果不对：一次重放的全部工作都要在这张图里。")
### END HIDDEN TESTS

# %% test="capture_mended_speed" kind="speedup" points=2 tags=["gpu"]
fresh = secret.integers(0, 2**32, (1 << 19) + 1, dtype=np.uint32)
mine, baseline, yardstick = on_gpu(fresh), on_gpu(fresh), on_gpu(fresh)
quick, model = student.capture_mended(mine), reference.capture_mended(yardstick)
captured_graph = quick.get("captured")
check.nodes(captured_graph, kernels=(16, 19), total=(17, 19), hosts=0, children=0, why="除了换掉的那一个阶段，其余 16 个都要照旧；图里只有内核、填充和拷贝节点。")
check.speedup(
    captured_graph.instantiate(),
    over=reference.capture_stages(baseline),
    best=model,
    state=(mine, yardstick),
    at_least=2.0,
    why="还不够快。换掉的真的是最慢的那个阶段吗？用 node_times 量一量改过的图，看它现在是多少。",
)
### BEGIN HIDDEN TESTS
fresh, turns = secret.integers(0, 2**32, (1 << 19) + 1, dtype=np.uint32), int(secret.integers(2, 6))
mine.write(fresh)
yardstick.write(fresh)
quick.run(turns)
model.run(turns)
check.equal(mine.read(), yardstick.read(), why="量完速度以后，换一份数据再重放几次，结果不对。")
### END HIDDEN TESTS

# %% [markdown]
# 改完以后，用练习一的函数把前后两张图各量一遍，看账目怎么变：

# %% tags=["demo", "gpu"]
with stream:
    words = cp.arange((1 << 19) + 1, dtype=cp.uint32)
stream.synchronize()
kept = []


def keeping(capture):
    kept.append(capture(words))
    return kept[-1].captured


old = node_times(partial(keeping, capture_stages), STAGE_AFTER, 7)
with tracing.record() as mended_recording:
    mended_graph = keeping(capture_mended)
    for _ in range(4):
        mended_graph.launch(stream)
        stream.synchronize()
new_times = {}
for node, name, blocks, start, end in mended_recording.db.execute(WORK):
    new_times.setdefault((node, name, blocks), []).append((end - start) / 1e3)
slowest = max(old["nodes"], key=old["nodes"].get)
new_slowest = max(new_times, key=lambda key: median(new_times[key]))
figure, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
ax.bar([name[-2:] for name in STAGE_AFTER], [old["nodes"][name] for name in STAGE_AFTER], color="#d98a3d")
ax.set_xlabel("阶段")
ax.set_ylabel("时间（µs）")
ax.set_title(f"改之前，每个阶段的时间（{lab.gpu_name()}）")
plt.show()
lab.say(
    f"改之前：`{slowest}` 一个占了 {old['nodes'][slowest] / old['sum_us']:.0%}，图自己 {old['graph_us']:.0f} µs。"
    f"改之后：最长的节点是 `{new_slowest[1]}`，{median(new_times[new_slowest]):.1f} µs，图自己 {own_us(mended_graph):.0f} µs。"
)

# %% [markdown] tags=["instructor"]
# 给教师：练习一的隐藏测试里，`make` 还会捕获并启动一张内核同名、时间只有十分之一的图，次数比重放还多；每个节点第一次跑要四倍的时间，
# 有一个节点每五次慢一次、快一次；录制一结束，所有节点都变慢一倍。
# 所以按名字或按 `graphNodeId IS NOT NULL` 一把抓、不去掉第一次、取平均或最小、拿关键路径充当 `graph_us`，都对不上。
# 时间的对错由测试定下的空转长度判断；只有 `graph_us` 和参考进程比，因为分支能并行多少由 GPU 决定。
# 练习四的基线本身就是一张图，所以“用图”不算分，只有改快那个节点才算。
# `layers.json` 由 `python record_layers.py` 在 GPU 上录。

# %% [markdown]
# ## 小结
#
# | 以前的说法 | 实验以后的说法 |
# |:--|:--|
# | 图是一个整体，里面看不见 | 按节点录，每次重放每个节点一行，编号不变 |
# | 节点时间之和就是图的时间 | 一串长节点才是；节点短要加间隙，有分支要看关键路径 |
# | 在捕获里记两个事件就能计时 | 要 External 的，它是一个真的节点，也真的要花时间 |
# | 装上逐层剖析器就有数字 | 重放不经过入队；要先设 `enqueue_emits_profile = False` 再捕获，重放以后再问，问到的是最近一次 |
# | 剖析不影响被剖析的 | 按节点追踪按节点收费，剖析器往图里添事件节点：看结构时开着，报时间时关掉 |
# | 先改最长的那个 | 先改省得最多的：看下限、看关键路径、看同一层的总数 |
#
# **带走三句话**
#
# 1. 一个数字只有一块表，就还不是事实；两块不相干的表对上了，才是。
# 2. 图的时间由关键路径决定，力气要花在那条路上。
# 3. 量，会改变被量的东西：先知道改了多少，再决定信多少。
#
# 下一步：《动态形状的性能陷阱》里有十个坏掉的程序等着你；《图何时无用》先预测、再测量。
