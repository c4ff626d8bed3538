# %% [markdown]
# # 内核启动开销分析
#
# 三个团队听说 CUDA 图（CUDA Graph）能省启动开销，都用上了。第一个说：提交快了一百倍，运行时间却一点没变。
# 第二个说：小图片快了近六倍，大图片几乎没快。第三个说：服务启动以后，第一个回答等了十几秒。
#
# 三个人都没有做错，只是没有先算。这一章给你一个小小的成本模型：几个能在自己机器上量到的数，一条“谁慢谁说了算”的规则。
# 有了它，**动手之前就能说出图会省多少**，也能解释上面三种结果。
#
# **学完以后，你能够**
#
# - 把启动开销从测量里拆成“固定的”和“每个内核的”两部分，不被离群的样本骗；
# - 判断一串内核是启动受限还是 GPU 受限，并在自己的 GPU 上找出交叉点；
# - 说清“启动占延迟的 10%～30%”指的是什么，又不是什么；
# - 把建图的账算全：捕获、实例化、上传、第一次启动；
# - 预测图的加速，误差在四分之一以内，然后做到它。
#
# **需要的基础**：《CUDA 图优化概念》。会用到流（stream）、捕获（capture）、实例化（instantiate）和“两块表”。
#
# **时间**：约 75 分钟，其中四道练习约 40 分钟。
#
# 下一格导入的 `check`、`student` 等五个名字只给练习后面的测试单元用，现在不用管它们。

# %%
import numpy as np
from functools import partial
from launchlab import lab
from launchlab.exam import check, on_gpu, reference, secret, student

lab.here()

# %% [markdown]
# ## 三种结果，一个谜
#
# 这三件事都有公开的讨论可查。数字是当事人说的，不是我们量的（这一格不需要 GPU）：

# %% tags=["demo"]
STORIES = [
    ("[推理框架接上图](https://github.com/PaddlePaddle/Paddle/pull/53406)", "提交 12.9 ms → 0.12 ms", 12.9 / 0.12, "运行时间没有变"),
    ("[图像分割，512 像素](https://github.com/facebookresearch/sam2/issues/768)", "整体加速", 5.9, "1024 像素只有 1.4 倍"),
    ("[大模型服务](https://github.com/lablup/mlxcel/issues/1545)", "208 次实例化，每次约 10 ms", None, "13 秒以后才有第一个词"),
]
lab.say(
    lab.table(
        ("谁", "看到了什么", "倍数", "可是"),
        [(who, what, "—" if times is None else f"{times:.1f}", but) for who, what, times, but in STORIES],
    ),
    measured=False,
)

# %% [markdown]
# 先猜：第一个故事里，省下的那十几毫秒去哪了？第二个故事里，大图片和小图片差在哪里？第三个里，13 秒都花在实例化上吗？
# 猜完往下读，小结里再回来对答案。

# %% [markdown]
# ## 准备：一个长短可调的内核
#
# 要研究“内核长短”，就要有一个长短能调的内核。`step` 做两件事：
#
# - 把数组里的每个 32 位整数搅拌一次。序号 `i` 和时长 `hold_ns` 都搅进结果里，所以漏做、多做、换序、偷工减时都会露馅；
# - 在 GPU 上停留至少 `hold_ns` 纳秒（ns），`hold_ns` 为 0 就不停留，称为“空内核”。
#
# 停留的时间看 GPU 自己的时钟。有些 GPU 的这个时钟一格约 1 µs，所以“要求 3 µs”可能得到 3 µs 多一点：后面图上的横轴都是**要求的**时长。
#
# 一串内核用一个列表 `holds_us` 描述，每个内核一项，单位 µs：`[0] * 100` 是一百个空内核，`[0, 0, 50]` 是两个空内核加一个 50 µs 的。

# %%
BLOCK = 256  # threads per block
SIZE = 4096  # elements of the arrays used here

# %% tags=["gpu"]
import cupy as cp
from cuda.bindings import runtime as cudart

SOURCE = r"""
__device__ unsigned long long now_ns() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

extern "C" __global__ void step(unsigned int *x, unsigned int i, unsigned int size, unsigned int hold_ns) {
    unsigned long long start = hold_ns ? now_ns() : 0;
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) {
        unsigned int v = x[t];
        v ^= v >> 15;
        v *= 0x2c1b3c6du;
        v ^= v >> 12;
        x[t] = v + (i ^ hold_ns);
    }
    if (hold_ns) while (now_ns() - start < hold_ns) {}
}
"""
step = cp.RawModule(code=SOURCE).get_function("step")
stream = cp.cuda.Stream(non_blocking=True)


def launch_step(x, i, hold_us):
    """Launch step with index i on x (cupy uint32, 1-D) for hold_us microseconds, on the current stream. Returns at once."""
    blocks = -(-x.size // BLOCK)  # x.size / BLOCK, rounded up
    step((blocks,), (BLOCK,), (x, np.uint32(i), np.uint32(x.size), np.uint32(hold_us * 1000)))


def eager_chain(x, holds_us):
    """Launch step on x once for each entry of holds_us (µs), with indices 0, 1, …, on `stream`. Returns at once."""
    with stream:
        for i, hold_us in enumerate(holds_us):
            launch_step(x, i, hold_us)


def capture(work):
    """Capture what work() launches on `stream`; nothing runs. Returns the instantiated cupy.cuda.Graph.

    The graph remembers addresses only: whoever keeps the graph keeps the arrays too.
    """
    stream.begin_capture()
    try:
        work()
    finally:
        captured = stream.end_capture()
    return captured


# The first launch of a kernel loads its code: get that over with.
with stream:
    warm = cp.zeros(SIZE, cp.uint32)
eager_chain(warm, [0, 1])
stream.synchronize()

# %% [markdown]
# 再用 NumPy 写出同样的计算，好知道正确答案是什么。

# %%
def stepped(x, holds_us):
    """Return x (numpy uint32) after the chain holds_us, as eager_chain leaves it; x itself stays as it is."""
    v = x.copy()
    for i, hold_us in enumerate(holds_us):
        v ^= v >> np.uint32(15)
        v *= np.uint32(0x2C1B3C6D)
        v ^= v >> np.uint32(12)
        v += np.uint32(i) ^ np.uint32(hold_us * 1000)
    return v


# %% [markdown]
# ## 一次启动要多少钱
#
# 《CUDA 图优化概念》里用了一条直线：提交 $N$ 个内核的时间，随 $N$ 直线上升。写成式子只有两个数：
#
# $$t_\text{提交}(N) = \text{const} + N \cdot \text{per\_launch}$$
#
# - `per_launch`：每多一个内核，CPU 多忙多久。这是真正的“单价”；
# - `const`：不管几个内核都要付的。调用函数、进出 `with stream:`，都在里面。
#
# 端到端时间也可以写成同样的形状，只是 `const` 里多了别的：命令传到 GPU、第一个内核开始、最后的同步返回。
#
# ### 录一份样本
#
# 下面的 `record_samples` 把本章要用的东西一次量全：三种提交方式、各种 $N$、各种内核时长、建图的每一步，每项重复许多遍。
# 各种方式、各种 $N$ 轮流上场，机器忽快忽慢对大家一样。其中 `cuLaunchKernel` 那种把参数事先备好，省掉了 CuPy 那一层，
# 更接近 C++ 程序的价格（见《CUDA 执行模型》）。
#
# 其中用到的 `measure_costs` 是一个给定函数，先把它放在这里，后面“四个数”一节再讲它量的是什么。

# %% tags=["gpu"]
PLUG_US = 10_000  # keeps the GPU busy while the CPU queues up what is to be measured


def measure_costs(x):
    """Measure the four numbers of the cost model on this machine, with step on x (cupy uint32, 1-D), in µs.

    launch_us: CPU time for each launch more. eager_node_us: GPU time for each empty kernel more, launched one by one
    and waiting in the queue. graph_us: CPU time of one graph launch. graph_node_us: GPU time for each empty node more.
    """
    few, many = [0] * 100, [0] * 300

    def per_kernel(work_of, **options):
        pair = lab.compare_us(work_of(many), work_of(few), **options)
        return (pair.first.median - pair.second.median) / (len(many) - len(few))

    graphs = [capture(partial(eager_chain, x, chain)) for chain in (few, many)]
    return {
        "launch_us": per_kernel(lambda chain: partial(eager_chain, x, chain), clock="submit", pairs=11),
        "eager_node_us": per_kernel(lambda chain: partial(eager_chain, x, [PLUG_US, *chain]), clock="end_to_end", pairs=5, warmup=1),
        "graph_us": lab.submit_us(partial(graphs[0].launch, stream)).median,
        # graphs[False] is the one of few, graphs[True] the one of many.
        "graph_node_us": per_kernel(lambda chain: partial(graphs[chain is many].launch, stream), clock="end_to_end", pairs=11),
    }


# %% tags=["demo", "gpu"]
import ctypes
from time import perf_counter_ns

from cuda.bindings import driver

COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 400)
HOLDS_US = (0, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100)
CHAIN = 50
NODES = (10, 50, 100, 200, 500, 1000)
RELAXED = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed


def prepared_chain(x, n):
    """Return a function that launches n empty kernels on x by cuLaunchKernel, with arguments made beforehand."""
    kept = [(ctypes.c_void_p(x.data.ptr), ctypes.c_uint32(i), ctypes.c_uint32(x.size), ctypes.c_uint32(0)) for i in range(n)]
    arrays = [(ctypes.c_void_p * 4)(*map(ctypes.addressof, values)) for values in kept]  # void *[4] for each launch
    pointers = [ctypes.addressof(array) for array in arrays]
    function, queue, blocks = driver.CUfunction(step.kernel.ptr), driver.CUstream(stream.ptr), -(-x.size // BLOCK)

    def launch(kept=kept, arrays=arrays):  # named here so that they live as long as their addresses are used
        for pointer in pointers:
            driver.cuLaunchKernel(function, blocks, 1, 1, BLOCK, 1, 1, 0, queue, pointer, 0)

    lab.check_cuda(driver.cuLaunchKernel(function, blocks, 1, 1, BLOCK, 1, 1, 0, queue, pointers[0], 0))  # launch() does not look
    return launch


def sample_us(work):
    """One sample of work(), by both clocks: µs until it returned, and µs until the GPU was done."""
    start = perf_counter_ns()
    work()
    returned = perf_counter_ns()
    stream.synchronize()
    return (returned - start) / 1000, (perf_counter_ns() - start) / 1000


def in_turn(works, repeats):
    """Sample works, pairs of (facts, function), in turn, every second time the other way round. Returns a record for each."""
    records = [{**facts, "submit_us": [], "end_to_end_us": []} for facts, _ in works]
    for turn in range(-2, repeats):  # two turns to warm up
        for k in range(len(works))[:: 1 if turn % 2 == 0 else -1]:
            readings = sample_us(works[k][1])
            if turn >= 0:
                for clock, us in zip(("submit_us", "end_to_end_us"), readings, strict=True):
                    records[k][clock].append(round(us, 2))
    return records


STEP_NAMES = ("capture_us", "instantiate_us", "upload_us", "first_us", "later_us", "first_without_upload_us")


def build_us(x, nodes):
    """Build and launch a graph of `nodes` empty kernels. Returns how long each of STEP_NAMES took, µs."""
    clock = [perf_counter_ns()]
    lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, RELAXED))
    eager_chain(x, [0] * nodes)
    definition = lab.check_cuda(cudart.cudaStreamEndCapture(stream.ptr))
    clock.append(perf_counter_ns())
    executable = lab.check_cuda(cudart.cudaGraphInstantiate(definition, 0))
    clock.append(perf_counter_ns())
    lab.check_cuda(cudart.cudaGraphUpload(executable, stream.ptr))
    stream.synchronize()
    clock.append(perf_counter_ns())
    for _ in range(2):
        lab.check_cuda(cudart.cudaGraphLaunch(executable, stream.ptr))
        stream.synchronize()
        clock.append(perf_counter_ns())
    other = lab.check_cuda(cudart.cudaGraphInstantiate(definition, 0))
    clock.append(perf_counter_ns())
    lab.check_cuda(cudart.cudaGraphLaunch(other, stream.ptr))
    stream.synchronize()
    clock.append(perf_counter_ns())
    for each in (executable, other):
        lab.check_cuda(cudart.cudaGraphExecDestroy(each))
    lab.check_cuda(cudart.cudaGraphDestroy(definition))
    return np.delete(np.diff(clock), 5) / 1000  # without the second instantiation


def record_samples():
    """Measure all that this chapter plots. Returns {"chains", "holds", "builds", "costs"}: lists of records, times in µs."""
    with stream:
        x = cp.zeros(SIZE, cp.uint32)
    chains, holds, builds = [], [], [{"nodes": nodes} | {name: [] for name in STEP_NAMES} for nodes in NODES]
    for n in COUNTS:
        work = partial(eager_chain, x, [0] * n)
        chains.append(({"way": "cupy", "n": n}, work))
        chains.append(({"way": "prepared", "n": n}, prepared_chain(x, n)))
        chains.append(({"way": "graph", "n": n}, partial(capture(work).launch, stream)))
    for hold_us in HOLDS_US:
        work = partial(eager_chain, x, [hold_us] * CHAIN)
        holds.append(({"way": "cupy", "n": CHAIN, "hold_us": hold_us}, work))
        holds.append(({"way": "graph", "n": CHAIN, "hold_us": hold_us}, partial(capture(work).launch, stream)))
    for turn in range(10):
        for record in builds:
            spent = build_us(x, record["nodes"])
            if turn:  # the first turn is the warm-up
                for name, us in zip(STEP_NAMES, spent, strict=True):
                    record[name].append(round(float(us), 2))
    return {"chains": in_turn(chains, 25), "holds": in_turn(holds, 21), "builds": builds, "costs": [measure_costs(x) for _ in range(3)]}


own = record_samples()
lab.say(f"在你的 GPU 上录好了：{sum(len(record['submit_us']) for kind in ('chains', 'holds') for record in own[kind])} 个样本，每个都有两块表的读数。")

# %% [markdown]
# 没有 GPU 也能往下学：同一个函数在另一台机器上录下的样本，存成 `launch_samples.json` 随本章一起发布。
# 后面先用这份样本讲，有 GPU 的话再看你自己的。

# %%
import json
from pathlib import Path

SAMPLES = json.loads(Path("launch_samples.json").read_text(encoding="utf-8"))

# %% tags=["demo"]
lab.say(
    f"随章样本录自 **{SAMPLES['gpu']}**（驱动 {SAMPLES['driver']}，CPU {SAMPLES['cpu']}，{SAMPLES['recorded_at']}）。",
    measured=False,
)

# %% [markdown]
# CPU 的型号也要记：启动开销是 CPU 付的，换一颗 CPU，往往比换一块 GPU 变得更多。
#
# 画出来看看。小点是一个个样本，线是由每个 $N$ 的中位数拟合出的直线。
# 横轴和纵轴都是对数刻度，所以直线看上去会弯：`const` 明显的话，左端就是平的。

# %% tags=["demo"]
import matplotlib.pyplot as plt

lab.plot_style()
WAYS = {"cupy": "CuPy 逐个启动", "prepared": "cuLaunchKernel 逐个启动", "graph": "图启动"}


def of_way(records, way):
    """Those of the records that were measured in this way."""
    return [record for record in records if record["way"] == way]


def line_of(samples, way, clock):
    """Fit const + n * per_launch to the medians of each n. Returns (const, per_launch), µs."""
    records = of_way(samples["chains"], way)
    per_launch, const = np.polyfit([r["n"] for r in records], [np.median(r[clock]) for r in records], 1)
    return float(const), float(per_launch)


def draw_lines(samples, where):
    """Plot samples and fitted lines by both clocks, and say const and per_launch of each way in a table."""
    fig, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for ax, (clock, title) in zip(axes, {"submit_us": "CPU 提交", "end_to_end_us": "端到端"}.items(), strict=True):
        for number, (way, label) in enumerate(WAYS.items()):
            for record in of_way(samples["chains"], way):
                ax.plot([record["n"]] * len(record[clock]), record[clock], linestyle="", marker=".", markersize=3, color=f"C{number}", alpha=0.3)
            const, per_launch = line_of(samples, way, clock)
            n = np.geomspace(1, 400, 60)
            ax.plot(n, const + n * per_launch, marker="", color=f"C{number}", label=label)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("内核数量 N")
        ax.set_title(title)
    axes[0].set_ylabel("时间（µs）")
    axes[0].legend()
    fig.suptitle(f"const + N · per_launch（{where}）")
    plt.show()
    rows = [
        (label, *(f"{value:.3g}" for clock in ("submit_us", "end_to_end_us") for value in line_of(samples, way, clock)))
        for way, label in WAYS.items()
    ]
    return lab.table(("µs", "提交：const", "提交：每个内核", "端到端：const", "端到端：每个内核"), rows)


lab.say(draw_lines(SAMPLES, SAMPLES["gpu"]), measured=False)

# %% [markdown]
# 读这张表的时候，先看“每个内核”两列：
#
# - 逐个启动的两行，**提交**和**端到端**的单价几乎一样吗？如果是，说明 GPU 一直在等 CPU：内核这么短，时间全由启动决定。
# - 图那一行，提交的单价小到可以忽略，端到端的单价却不是零：那是 GPU 执行一个空内核的时间，谁也省不掉。
#
# `const` 要小心看。直线主要由大的 $N$ 决定，`const` 是把线延长到 $N = 0$ 得来的，单价差一点点，它就会差出好几微秒，甚至变成负数。
#
# 你自己的机器：

# %% tags=["demo", "gpu"]
lab.say(draw_lines(own, lab.gpu_name()))

# %% [markdown]
# ### 总时间除以 N，不就是单价吗
#
# 很多人这样量启动开销：启动 $N$ 次，总时间除以 $N$。差别就在 `const`：$N$ 越小，它摊得越多。
# 还有人干脆“启动一次、同步一次”，拿端到端时间当启动开销。用随章样本算算看：

# %% tags=["demo"]
const, per_launch = line_of(SAMPLES, "cupy", "submit_us")
rows = [
    (r["n"], *(f"{np.median(r[clock]) / r['n']:.2f}" for clock in ("submit_us", "end_to_end_us")))
    for r in of_way(SAMPLES["chains"], "cupy")
]
single = of_way(SAMPLES["chains"], "cupy")[0]
lab.say(
    lab.table(("N（CuPy 逐个启动）", "提交 ÷ N，µs", "端到端 ÷ N，µs"), rows)
    + f"\n\n斜率说单价是 {per_launch:.2f} µs；“启动一次、同步一次”的端到端是 {np.median(single['end_to_end_us']):.1f} µs，"
    + f"是它的 **{np.median(single['end_to_end_us']) / per_launch:.1f} 倍**。",
    measured=False,
)

# %% [markdown]
# 启动一次就同步，量到的是**延迟**：命令传到 GPU、开始、做完、通知 CPU，一个来回。它回答“一个请求最快多久”，不回答“每多一个内核多久”。
# 要单价，就要用斜率。
#
# ### 一次打扰能把直线拽多远
#
# 样本里总有几个离群的：操作系统刚好去忙别的，一次提交就多出几毫秒。最小二乘法（`np.polyfit`）让误差的**平方**和最小，
# 一个离群点的平方，可能比其余全部加起来还大，直线就会迁就它。
#
# 每个 $N$ 只留一个样本（中位数那个），再假装 $N = 10$ 的那次被打扰了 3 ms：

# %% tags=["demo"]
records = of_way(SAMPLES["chains"], "cupy")
counts = np.array([r["n"] for r in records])
undisturbed = np.array([np.median(r["submit_us"]) for r in records])
disturbed = undisturbed + np.where(counts == 10, 3000.0, 0.0)
worst = max(records, key=lambda r: max(r["submit_us"]) / np.median(r["submit_us"]))
lab.say(
    lab.table(
        ("最小二乘法", "const，µs", "per_launch，µs"),
        [(name, f"{line[1]:.1f}", f"{line[0]:.2f}") for name, line in (("原样", np.polyfit(counts, undisturbed, 1)), ("一个样本被打扰", np.polyfit(counts, disturbed, 1)))],
    )
    + f"\n\n打扰不是凭空想的：这份样本里最离群的一个，是 N = {worst['n']} 的某一次，为中位数的 {max(worst['submit_us']) / np.median(worst['submit_us']):.1f} 倍。",
    measured=False,
)

# %% [markdown]
# 九个点里坏了一个，两个数就都没法用了。上面画图的时候先取了中位数，所以不怕；可要是每个 $N$ 只有一个样本，就没有中位数可取。
# **练习一**请你写一个不怕打扰的拟合。
#
# ### 歇一会儿再测，更干净吗
#
# 另一种打扰是自己造成的：两次测量之间停一停，以为这样“互不影响”。可是 CPU 和 GPU 一闲下来，就可能降频、睡眠、丢掉缓存。
# 提交 100 个空内核，一种是接着上一次马上再来，一种是先歇 10 ms，两种轮流各量 40 次：

# %% tags=["demo", "gpu"]
from time import sleep

with stream:
    xs = cp.zeros(SIZE, cp.uint32)
hundred = partial(eager_chain, xs, [0] * 100)
after_work, after_rest = [], []
for _ in range(40):
    sample_us(hundred)
    after_work.append(sample_us(hundred)[0])
    sleep(0.01)
    after_rest.append(sample_us(hundred)[0])
busy_us, rested_us = np.median(after_work), np.median(after_rest)
if rested_us > 1.1 * busy_us:
    verdict = f"歇过以后反而贵了 **{rested_us / busy_us - 1:.0%}**。"
else:
    verdict = f"在这台机器上，歇不歇差别不大（相差 {abs(rested_us / busy_us - 1):.0%}）。"
lab.say(f"马上再来：{busy_us:.0f} µs；歇过 10 ms：{rested_us:.0f} µs。{verdict}")

# %% [markdown]
# 两个数都是真的，只是回答的问题不同：一直在忙的服务该看前一个，偶尔来一个请求的服务该看后一个。
# 即使不歇，启动的单价也会一阵一阵地变：操作系统换了一颗核心，同一颗核心上来了邻居，都能让它连着几秒贵上三五成。
# 所以同一条链在一章里量几回，读数会不一样。比较两种做法时，让它们轮流上场、处境相同，比“等机器安静”更要紧；
# 拿“刚才量的单价”去推算“现在的时间”，也要先看两次之间它变了没有。

# %% [markdown]
# ## 两条流水线：谁慢谁说了算
#
# CPU 和 GPU 是一前一后两条流水线：CPU 一个接一个地启动，GPU 一个接一个地执行，中间隔着一条队列。
# 画两种极端：启动一次都是 5 µs，内核一种只要 2 µs，一种要 12 µs（按规则推算，不需要 GPU）。

# %% tags=["demo"]
LAUNCH_US, KERNELS = 5, 6
fig, axes = plt.subplots(2, 1, figsize=(9, 4), sharex=True)
for ax, (kernel_us, name) in zip(axes, ((2, "内核 2 µs：GPU 等 CPU"), (12, "内核 12 µs：CPU 早就交完了")), strict=True):
    slower_us = max(LAUNCH_US, kernel_us)
    ax.broken_barh([(i * LAUNCH_US, LAUNCH_US) for i in range(KERNELS)], (0.65, 0.7), color="#D55E00", edgecolor="white")
    ax.broken_barh([(LAUNCH_US + i * slower_us, kernel_us) for i in range(KERNELS)], (-0.35, 0.7), color="#0072B2", edgecolor="white")
    ax.set_yticks([0, 1], ["GPU 执行", "CPU 启动"])
    ax.set_title(name)
axes[1].set_xlabel("时间（µs）")
plt.show()

# %% [markdown]
# - **启动受限（launch-bound）**：GPU 做得比 CPU 交得快，“GPU 执行”的条之间全是空隙，总时间由“CPU 启动”的条决定；
# - **计算受限（compute-bound）**：GPU 做不过来，队里排着等。这里只问 GPU 是不是瓶颈，不分它慢在算力还是显存带宽，所以也叫 GPU 受限。
#
# 稳定下来以后，每多一个内核，端到端时间就多出两者里**慢的那一个**：
#
# $$t_\text{端到端}(N) \approx \text{const} + N \cdot \max(\text{CPU 每个},\ \text{GPU 每个})$$
#
# 真是这样吗？让内核从 0 到 20 µs 逐渐变长，只看斜率：从 100 个加到 300 个，每多一个多花多少。
# 各种时长、两种做法轮流上场，两块表读的是同一批样本，这样才好比。

# %% tags=["demo", "gpu"]
lengths_us = (0, 2, 5, 10, 20)  # the last one counts for the sentence below the table
works = []
for hold_us in lengths_us:
    chains = [partial(eager_chain, xs, [hold_us] * n) for n in (300, 100)]
    works += [({}, work) for work in (*chains, *(partial(capture(chain).launch, stream) for chain in chains))]
records = in_turn(works, 15)
submits_us, totals_us = (np.array([record[clock] for record in records]) for clock in ("submit_us", "end_to_end_us"))
rows = []
for k, hold_us in zip(range(0, len(records), 4), lengths_us, strict=True):
    # Differences within a turn: what slows the machine for a while slows both.
    submit, total, replayed = (float(np.median(us[long] - us[long + 1])) / 200 for us, long in ((submits_us, k), (totals_us, k), (totals_us, k + 2)))
    rows.append((hold_us, f"{submit:.1f}", f"{total:.1f}", "CPU" if total < 1.15 * submit else "GPU", f"{replayed:.1f}"))
lab.say(
    "每多一个内核，多花的 µs\n\n"
    + lab.table(("要求的时长，µs", "CPU 提交", "端到端，逐个启动", "谁说了算", "端到端，图"), rows)
    + f"\n\n时长 {hold_us} µs 的那一行，图与逐个启动相差 {total - replayed:+.2f} µs。"
)

# %% [markdown]
# 竖着看“CPU 提交”：内核变长，它不变长，因为 CPU 只管交，不等（单价一阵一阵地变，各行之间差出几成也不奇怪）。
# 再横着比：“端到端，逐个启动”先跟着“CPU 提交”走，内核长过启动以后改跟 GPU 走。
#
# 最后一列也跟着内核变长。GPU 受限的时候，CPU 那一份早已不算数，图却往往还能少一点点：
# 它让 GPU 在相邻两个内核之间少等一会儿。少多少，看表下面那句话。
#
# ### 四个数
#
# 于是一台机器的成本可以压缩成四个数，给定的 `measure_costs` 量的就是它们：
#
# | 名字 | 意思 | 怎么量 |
# |:--|:--|:--|
# | `launch_us` | CPU 每次启动的单价 | 提交 300 个与 100 个空内核之差，除以 200 |
# | `eager_node_us` | 排着队的时候，GPU 每个空内核要多久 | 前面先堵一个 10 ms 的内核，让 CPU 把队排好，再看端到端之差 |
# | `graph_us` | 启动一次图，CPU 要多久 | 提交时间的中位数 |
# | `graph_node_us` | 图里每个空节点，GPU 要多久 | 300 个与 100 个节点的图，端到端之差 |
#
# 两个 `node_us` 里的“空”字很重要：一个停留 $h$ µs 的内核，在 GPU 上占的时间大约是 $h$ 加上对应的那个 `node_us`。

# %% tags=["demo"]
NAMES = ("launch_us", "eager_node_us", "graph_us", "graph_node_us")


def median_costs(samples):
    """The median of each of the four numbers, µs."""
    return {name: float(np.median([costs[name] for costs in samples["costs"]])) for name in NAMES}


lab.say(
    lab.table(("随章样本，µs", *(f"`{name}`" for name in NAMES)), [(SAMPLES["gpu"], *(f"{us:.2f}" for us in median_costs(SAMPLES).values()))]),
    measured=False,
)

# %% tags=["demo", "gpu"]
lab.say(lab.table(("你的机器，µs", *(f"`{name}`" for name in NAMES)), [(lab.gpu_name(), *(f"{us:.2f}" for us in median_costs(own).values()))]))

# %% [markdown]
# ### 误区：时间线上启动调用很长，说明启动很贵
#
# 用剖析工具打开一段 GPU 受限的程序，常会看到 `cudaLaunchKernel` 一条就是几十微秒。启动真有这么贵吗？
#
# 《CUDA 执行模型》里见过，队列是有限的，大约排一千次启动。那么一口气启动 3000 个 20 µs 的内核，每次启动调用本身花多久？

# %% tags=["demo", "gpu"]
HELD_US, LAUNCHES = 20, 3000


def launch_times_us():
    """How long each of the launches took to return, µs."""
    stamps = np.empty(LAUNCHES + 1)
    with stream:
        for i in range(LAUNCHES):
            stamps[i] = perf_counter_ns()
            launch_step(xs, i, HELD_US)
        stamps[LAUNCHES] = perf_counter_ns()
    stream.synchronize()
    return np.diff(stamps) / 1000


launch_times_us()  # a warm-up
took_us = launch_times_us()
late = took_us[-500:].mean()
hundreds = took_us.reshape(-1, 100).mean(axis=1)
usual = np.median(np.sort(hundreds)[:5])  # the cheapest stretches: what a launch costs while the queue has room
slow = hundreds > 1.5 * usual

fig, ax = plt.subplots()
ax.plot(np.arange(1, LAUNCHES + 1), np.cumsum(took_us) / 1000, marker="")
ax.set_xlabel("第几次启动")
ax.set_ylabel("到它返回为止，CPU 一共花了（ms）")
ax.set_title(f"队列排满以后，CPU 只能按 GPU 的节奏走（{lab.gpu_name()}）")
plt.show()
if slow[-1]:
    verdict = f"大约从第 {100 * (len(slow) - np.argmin(slow[::-1]))} 次起，队列满了：启动调用要等 GPU 腾出位置，才能返回。"
else:
    verdict = "在这台机器上，3000 次还没有把队列排满。"
lab.say(f"最省的几段平均 **{usual:.1f} µs**，最后 500 次平均 **{late:.1f} µs**。{verdict}")

# %% [markdown]
# 折线一旦拐弯，后半段的斜率就是 GPU 的节奏，和启动的单价没有关系。在时间线上，这些等待都记在启动调用的名下。
# （队列大约排一千个，拐弯却往往更晚：CPU 一边交，GPU 一边做，队里只多出两者之差。图下面那句话里，“最省的几段”是每 100 次算一段，取最便宜的五段的中位数。）
#
# 换成图，这些长条会消失，**总时间却不会变**：它们本来就是在等 GPU。
#
# 反过来也一样：看启动调用变短了多少，不能当作图的收益。第一个故事里的十几毫秒，多半就是这样“省”下来的。做一个小的：

# %% tags=["demo", "gpu"]
rows = []
for hold_us in (0, 50):
    chain = partial(eager_chain, xs, [hold_us] * 50)
    replay = partial(capture(chain).launch, stream)
    submit, total = (lab.compare_us(chain, replay, clock=clock, pairs=15, warmup=2) for clock in ("submit", "end_to_end"))
    rows.append((f"50 个 {hold_us} µs 的内核", f"{submit.ratio:.0f}", f"{total.ratio:.2f}"))
lab.say(lab.table(("图的加速，倍", "CPU 提交", "端到端"), rows))

# %% [markdown]
# 同样的图，提交都快了许多倍；端到端快不快，要看内核长短。这不等于图在第二行没有用：CPU 腾出手来，可以去做预处理、服务别的请求。
# 只是不要指望延迟跟着变短。

# %% [markdown]
# ## 交叉点在哪里
#
# 从启动受限走到 GPU 受限，总有一个内核时长，超过它图就省不下多少了。**本课程把“图省下不到 10% 的端到端时间”的那个时长叫作交叉点。**
#
# 四个数已经足够画出整条曲线。$h$ 是要求的时长：
#
# $$\text{省下} = 1 - \frac{h + \text{graph\_node}}{\max(\text{launch},\ h + \text{eager\_node})}$$
#
# 点是实测（50 个内核的链），线是只用四个数推算的。

# %% tags=["demo"]
def saved_share(samples):
    """Hold times (µs) and the share of the end-to-end time that the graph saved at each, from the medians."""
    eager, graph = (of_way(samples["holds"], way) for way in ("cupy", "graph"))
    share = [1 - np.median(g["end_to_end_us"]) / np.median(e["end_to_end_us"]) for e, g in zip(eager, graph, strict=True)]
    return np.array([e["hold_us"] for e in eager], float), np.array(share)


def modelled_share(costs, hold_us):
    """The same share from the four numbers alone."""
    return 1 - (hold_us + costs["graph_node_us"]) / np.maximum(costs["launch_us"], hold_us + costs["eager_node_us"])


def last_worth(hold_us, share):
    """The longest of the hold times at which the graph still saves 10 %, in words."""
    worth = hold_us[share >= 0.1]
    return f"{worth[-1]:.3g} µs" if worth.size else "一个也没有"


def draw_crossover(samples, where):
    """Plot the measured and the modelled share, and say where either passes 10 %."""
    hold_us, share = saved_share(samples)
    fine = np.linspace(0, 100, 2001)
    model = modelled_share(median_costs(samples), fine)
    _, ax = plt.subplots()
    ax.plot(fine, 100 * model, marker="", color="C1", label="四个数推算")
    ax.plot(hold_us, 100 * share, linestyle="", color="C0", label="实测")
    ax.axhline(10, color="#555555", linewidth=0.9, linestyle=":", label="10%")
    ax.set_xscale("symlog", linthresh=1)
    ax.set_xlim(0, 110)
    ax.set_xlabel("要求的内核时长（µs）")
    ax.set_ylabel("图省下的端到端时间（%）")
    ax.set_title(f"内核越长，图越省不下（{where}）")
    ax.legend()
    plt.show()
    return f"最后一个还省 10% 以上的时长：实测的几点里是 **{last_worth(hold_us, share)}**，推算是 **{last_worth(fine, model)}**。"


lab.say(draw_crossover(SAMPLES, SAMPLES["gpu"]), measured=False)

# %% tags=["demo", "gpu"]
lab.say(draw_crossover(own, lab.gpu_name()))

# %% [markdown]
# 你的点要是整片高出线，多半是量它们的那一阵，启动的单价恰好更贵：四个数是在另一刻量的。
#
# 交叉点不是 GPU 的常数，它首先取决于**启动的单价**：CPU 慢、语言慢、启动层厚，它就往右移；C++ 程序的交叉点比这里靠左。
# 所以“内核要长于几微秒才不用图”没有通用的答案，**练习三**请你写一个函数，把任何一串内核的交叉点当场找出来。
#
# ### 分辨率和批量，其实是内核时长
#
# 第二个故事：同一个模型，小图片快了近六倍，大图片几乎没快。分辨率变了，内核的个数没变，变的是每个内核有多少活。
# 让 `step` 处理边长从 64 到 4096 的“图片”，100 个内核一条链：

# %% tags=["demo", "gpu"]
sides = (64, 256, 512, 1024, 2048, 4096)
works = []
for side in sides:
    with stream:
        picture = cp.zeros(side * side, cp.uint32)
    chain, short = (partial(eager_chain, picture, [0] * n) for n in (100, 50))
    works += [({}, work) for work in (chain, partial(capture(chain).launch, stream), partial(capture(short).launch, stream))]
records = in_turn(works, 15)
medians = np.array([[np.median(record["end_to_end_us"]) for record in records[k : k + 3]] for k in range(0, len(records), 3)])
eager_us, replay_us, short_replay_us = medians.T
launch_us = np.median([np.median(record["submit_us"]) for record in records[::3]]) / 100
node_us = (replay_us - short_replay_us) / 50
speedups = eager_us / replay_us
gap_us = median_costs(own)["eager_node_us"] - median_costs(own)["graph_node_us"]
model = np.maximum(launch_us, node_us + gap_us) / node_us

fig, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
for ax, horizontal in zip(axes, (sides, node_us), strict=True):
    ax.plot(horizontal, speedups, linestyle="", label="实测")
    ax.plot(horizontal, model, marker="", label="模型推算")
axes[0].set_xscale("log", base=2)
axes[0].set_xticks(sides, [str(side) for side in sides])
axes[0].set_xlabel("边长（像素）")
axes[0].set_ylabel("图的加速（倍，端到端）")
axes[1].set_xscale("log")
axes[1].set_xlabel("图里每个节点在 GPU 上的时间（µs）")
axes[1].axvline(launch_us, color="#555555", linewidth=0.9, linestyle=":", label="启动的单价")
axes[1].legend()
fig.suptitle(f"换一根横轴，就看出了原因（{lab.gpu_name()}）")
plt.show()
lab.say(
    lab.table(("边长", "每个节点，µs", "图的加速", "模型推算"), [(side, f"{us:.1f}", f"{ratio:.2f}", f"{told:.2f}") for side, us, ratio, told in zip(sides, node_us, speedups, model, strict=True)])
    + f"\n\n启动的单价，在同一批样本里是 {launch_us:.1f} µs。"
)

# %% [markdown]
# 左图的横轴是像素，看上去像“图不喜欢大图片”；右图换成每个节点的 GPU 时间，拐弯就在启动的单价附近。
# 边长翻倍，像素变四倍，内核很快从启动比它久，变成它比启动久。批量（batch）、序列长度也是一样：**决定收益的是内核时长和启动单价之比**。

# %% [markdown]
# ## 10%～30% 从哪里来
#
# 讲义说“启动开销可达总延迟的 10%～30%”。这句话至少有两种读法：
#
# - **占比**：CPU 花在启动上的时间，除以端到端时间；
# - **能省**：换成图以后，端到端时间少了百分之几。
#
# 剖析工具里容易看到的是前者，你想要的是后者。它们是一回事吗？

# %% tags=["demo"]
def span(hold_us, share):
    """For which hold times a falling curve lies between 30 % and 10 %, in words."""
    falling = np.minimum.accumulate(share)
    if falling[0] < 0.3 or falling[-1] > 0.1:
        return "超出了这次扫描的范围"
    begin, end = np.interp([-0.3, -0.1], -falling, hold_us)
    return f"{begin:.0f}～{end:.0f} µs"


def draw_shares(samples, where):
    """Plot both shares over the hold time, and say which kernels either puts between 10 % and 30 %."""
    hold_us, saved = saved_share(samples)
    launching = np.array([np.median(r["submit_us"]) / np.median(r["end_to_end_us"]) for r in of_way(samples["holds"], "cupy")])
    _, ax = plt.subplots()
    ax.axhspan(10, 30, color="#E69F00", alpha=0.18, label="讲义：10%～30%")
    ax.plot(hold_us, 100 * launching, label="占比：启动 ÷ 延迟")
    ax.plot(hold_us, 100 * saved, label="能省：换成图少了多少")
    ax.set_xscale("symlog", linthresh=1)
    ax.set_xlim(0, 110)
    ax.set_xlabel("要求的内核时长（µs）")
    ax.set_ylabel("占端到端时间的百分比（%）")
    ax.set_title(f"同一个百分比，两种意思（{where}）")
    ax.legend()
    plt.show()
    text = f"落在 10%～30% 里的内核：按“占比”是 **{span(hold_us, launching)}**，按“能省”是 **{span(hold_us, saved)}**。"
    inside = saved[(launching > 0.1) & (launching < 0.3)]
    if inside.size:
        text += f"在占比 10%～30% 的那几点上，图实际省下的最多只有 **{max(inside.max(), 0):.0%}**。"
    return text


lab.say(draw_shares(SAMPLES, SAMPLES["gpu"]), measured=False)

# %% tags=["demo", "gpu"]
lab.say(draw_shares(own, lab.gpu_name()))

# %% [markdown]
# **占比不等于能省**。占比在 10%～30%，通常说明 CPU 早就跑在前面，启动被 GPU 的活盖住了，图几乎省不下延迟；
# 真正能省下 10%～30% 的那一段，启动的占比往往高得多。看到“启动占三成”就说“用图能快三成”，是把两条曲线混成了一条。
#
# 真实的引擎也能用来对照。下面是课程早先在 H200 上对三个 TensorRT 引擎的测量；入队（enqueue）就是 CPU 提交一次推理。
# 《捕获 TensorRT 推理》一章会带你另建引擎、自己量，那里的节点数和时间都和这里不同：
# 精度、形状、融合得多少都会改变它们，什么都不改，重新构建一次也可能差上几个（《CUDA 图优化概念》的表里用的 59 和 98，就是那一章有一次数出来的）。

# %% tags=["demo"]
ENGINES = {  # nodes, enqueue µs, latency µs, latency of the graph µs: measured on an H200, driver 580
    "ResNet-50": (105, 520, 534, 354),
    "BERT-base，64 个 token": (86, 439, 575, 476),
    "PP-OCRv4 检测": (127, 883, 888, 456),
}
rows = []
for name, (nodes, enqueue, latency, graph) in ENGINES.items():
    slower = max(enqueue, graph)
    rows.append((name, nodes, f"{enqueue / nodes:.1f}", f"{graph / nodes:.1f}", f"{enqueue / latency:.0%}", f"{1 - graph / latency:.0%}", latency, slower, f"{latency / slower:.2f}"))
lab.say(
    lab.table(("引擎", "节点", "入队 ÷ 节点，µs", "图延迟 ÷ 节点，µs", "占比", "能省", "延迟，µs", "较慢的一方，µs", "延迟 ÷ 较慢的一方"), rows),
    measured=False,
)

# %% [markdown]
# 占比个个都高，能省的却各不相同：入队和执行摊到每个节点都只有几微秒，谁慢一点，谁就说了算。
#
# 最后三列拿“谁慢谁说了算”去预测延迟（GPU 一方用图的延迟近似）。两个引擎很准，BERT 的实际延迟却比“较慢的一方”还长。原因在下面这个实验里。
#
# ### 内核有长有短，次序也有关系
#
# 长短不一的时候，“平均的 CPU 每个”和“平均的 GPU 每个”还不够。同样 50 个空内核和 10 个 40 µs 的，谁排在前面？
# 四种跑法轮流上场，提交和端到端取自同一批样本：

# %% tags=["demo", "gpu"]
LONG_US = 40
orders = {"短的在前": [0] * 50 + [LONG_US] * 10, "长的在前": [LONG_US] * 10 + [0] * 50}
works = [({}, partial(eager_chain, xs, order)) for order in orders.values()]
works += [({}, partial(capture(work).launch, stream)) for _, work in works]
records = in_turn(works, 21)
totals = [np.median(record["end_to_end_us"]) for record in records]
cpu_us = np.mean([np.median(record["submit_us"]) for record in records[:2]])
gpu_us = 10 * LONG_US + 60 * median_costs(own)["eager_node_us"]
lab.say(
    lab.table(("端到端，µs", *orders), [(name, *(f"{us:.0f}" for us in pair)) for name, pair in (("逐个启动", totals[:2]), ("图", totals[2:]))])
    + f"\n\nCPU 提交全部要 {cpu_us:.0f} µs，GPU 执行全部约 {gpu_us:.0f} µs：较慢的一方 {max(cpu_us, gpu_us):.0f} µs，两者之和 {cpu_us + gpu_us:.0f} µs。"
)

# %% [markdown]
# - **长的在前**：GPU 忙着做长的，CPU 趁机把短的全排进队里，后面一个也不用等。总时间接近较慢的一方。
# - **短的在前**：GPU 做完一个就等下一个，一直等到长的来；轮到长的，CPU 又没有多少事可做了。总时间接近“启动短的”加上“执行长的”。
#
# 所以对**一次**请求来说，较慢的一方是下限，两者之和是上限，实际落在中间，BERT 多半就是这样。
# 一轮接一轮连着跑、中间不同步的时候，这种错位会被下一轮填上，每一轮才真正趋近较慢的一方。图则不在乎次序：它不等 CPU。

# %% [markdown]
# ## 建图的账
#
# 图不是白来的。第三个故事里，服务一启动就要建两百多张图。建一张要付哪些钱？
#
# 1. **捕获**：把每次启动的调用照走一遍，只是不执行；
# 2. **实例化**：检查、分配、编好命令；
# 3. **上传（upload）**：把编好的命令搬到 GPU 上。`cudaGraphUpload` 可以提前做；不提前做，第一次启动会替你做；
# 4. **第一次启动**：上传过以后，它还比后来的贵吗？
#
# 对不同的节点数，每一步都量一遍。先看随章样本：

# %% tags=["demo"]
STEPS = {
    "capture_us": "捕获",
    "instantiate_us": "实例化",
    "upload_us": "上传（含等待）",
    "first_us": "上传之后，第一次启动",
    "first_without_upload_us": "没有上传，第一次启动",
    "later_us": "后来的启动",
}


def draw_builds(samples, where):
    """Plot the cost of each step over the nodes. Returns a table of const and per-node cost, and two remarks."""
    nodes = np.array([r["nodes"] for r in samples["builds"]])
    _, ax = plt.subplots()
    rows, at_200 = [], {}
    for name, label in STEPS.items():
        medians = np.array([np.median(r[name]) for r in samples["builds"]])
        ax.loglog(nodes, medians, label=label)
        per_node, fixed = np.polyfit(nodes, medians, 1)
        at_200[name] = float(np.interp(200, nodes, medians))
        rows.append((label, f"{fixed:.0f}", f"{per_node:.2f}", f"{at_200[name]:.0f}"))
    ax.set_xlabel("图的节点数")
    ax.set_ylabel("时间（µs）")
    ax.set_title(f"建一张图，每一步要多久（{where}）")
    ax.legend(fontsize=9)
    plt.show()
    build = at_200["capture_us"] + at_200["instantiate_us"] + at_200["upload_us"]
    eager_us, graph_us = (np.median(r["end_to_end_us"]) for way in ("cupy", "graph") for r in of_way(samples["chains"], way) if r["n"] == 200)
    return (
        lab.table(("µs", "const", "每个节点", "200 个节点"), rows)
        + f"\n\n200 个空节点：上传花 {at_200['upload_us']:.0f} µs；没有上传，第一次启动比后来的多 {at_200['first_without_upload_us'] - at_200['later_us']:.0f} µs，"
        + f"上传过的多 {at_200['first_us'] - at_200['later_us']:.0f} µs。建一张图约 {build / 1000:.1f} ms，每次重放省 {eager_us - graph_us:.0f} µs，"
        + f"**{max(1, int(np.ceil(build / (eager_us - graph_us))))} 次**回本；这样的图建 208 张，要 **{208 * build / 1e6:.2f} s**。"
    )


lab.say(draw_builds(SAMPLES, SAMPLES["gpu"]), measured=False)

# %% tags=["demo", "gpu"]
lab.say(draw_builds(own, lab.gpu_name()))

# %% [markdown]
# 又是 `const + 每个节点` 的形状：建图的钱随**节点数 × 图的张数**增长，与内核多长无关。由此得到几条实用的规矩：
#
# - 上传让你**挑时候付**：在服务开门之前付，第一个用户就不用等；
# - 重放成千上万次，回本不是问题；难的是**冷启动**：开门之前要等多久，或者第一个用户要等多久；
# - 给每种输入尺寸各建一张图，先把张数和节点数乘起来看一眼；
# - 结构相同、只是地址或尺寸变了的图，更新比重新实例化便宜，见《更新一张活的图》。
#
# 第三个故事里，实例化占多少？用当事人的数字除一下：

# %% tags=["demo"]
COLD_START_S, INSTANTIATIONS, EACH_MS = 13, 208, 10
lab.say(f"{INSTANTIATIONS} × {EACH_MS} ms = {INSTANTIATIONS * EACH_MS / 1000:.1f} s，占 {COLD_START_S} s 的 **{INSTANTIATIONS * EACH_MS / 1000 / COLD_START_S:.0%}**。", measured=False)

# %% [markdown]
# 其余是别的“第一次”，例如即时编译（JIT）内核、加载代码，它们与图无关。造四个谁也没见过的内核，看看各要多久
# （注释里写上时刻，源码就是全新的，CuPy 缓存里找不到）：

# %% tags=["demo", "gpu"]
def once_us(work):
    """µs that one call of work() takes."""
    start = perf_counter_ns()
    work()
    return (perf_counter_ns() - start) / 1000


def launch_fresh(fresh):
    with stream:
        fresh((1,), (BLOCK,), (xs, np.uint32(0), np.uint32(BLOCK), np.uint32(0)))


compiled, first, later = [], [], []
for _ in range(4):
    fresh_module = cp.RawModule(code=f"// {perf_counter_ns()}\n{SOURCE}")
    compiled.append(once_us(fresh_module.compile))
    fresh = fresh_module.get_function("step")
    first.append(sample_us(partial(launch_fresh, fresh))[1])
    later.append(np.median([sample_us(partial(launch_fresh, fresh))[1] for _ in range(9)]))
lab.say(
    lab.table(
        ("一个新内核", "中位数，µs"),
        [(name, f"{np.median(us):.0f}") for name, us in (("编译并载入", compiled), ("第一次启动（端到端）", first), ("后来的启动（端到端）", later))],
    )
    + f"\n\n按这个价，现编译 100 个这么小的内核要 **{100 * np.median(compiled) / 1e6:.1f} s**，还没算进任何一张图。"
)

# %% [markdown]
# 所以预热（warm-up）要把这些“第一次”都走一遍：编译、加载、捕获、实例化、上传。而且编译和加载必须在捕获**之前**：
# 捕获期间加载代码，在较旧的驱动上会让捕获作废。

# %% [markdown]
# ## 练习
#
# 四道练习，共 12 分。练习里可以用前面**给定单元**里的名字：
# `np`、`partial`、`lab`、`cp`、`cudart`、`stream`、`BLOCK`、`SIZE`、`step`、`launch_step`、`eager_chain`、`capture`、`stepped`、
# `measure_costs`、`PLUG_US`、`SAMPLES`，以及练习中间给定的几个。
#
# 演示单元（只做实验，评分时不运行）里的 `own`、`line_of`、`sample_us`、`median_costs` 等等，评分时不存在。
#
# ### 练习一：不怕打扰的拟合（3 分）
#
# 写 `fit(n, us)`：给出一批样本，第 $k$ 个样本启动了 `n[k]` 个内核，花了 `us[k]` µs，返回 `(const_us, per_launch_us)`，使得没有被打扰的样本都在
# $\text{const} + n \cdot \text{per\_launch}$ 附近。这道题不需要 GPU。
#
# - 样本不分先后，同一个 `n` 可能出现许多次，也可能只出现一次；
# - 最多五分之一的样本被打扰过，只会偏大，大多少说不准，可能几十倍；
# - 其余样本也有不到 ±0.3 µs 的抖动。
#
# 评分时，`per_launch_us` 与真值的差不超过 3% 加 0.02 µs，`const_us` 的差不超过 1 µs，就算对。还会用随章样本考你：
# 只给 $N \le 100$ 的样本，你的直线要能说中 $N = 400$ 时的中位数，误差不超过四分之一加 2 µs。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 两个没有被打扰的样本，就能定出一条直线。随手抓两个样本，两个都没被打扰的可能性有多大？
# 如果把每一对都抓一遍，得到一大堆斜率，哪个统计量不在乎其中一部分是胡说的？
#
# 斜率有了以后，`const` 也可以照这个思路来。别的路也走得通：先拟合，看谁离得远，去掉再来，反复几遍。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `i, j = np.triu_indices(m, 1)` 给出 0 … m−1 里所有 `i < j` 的下标对，可以直接拿去索引数组，例如 `us[j] - us[i]`。
# `n` 相同的一对没有斜率，用布尔数组挑掉。`np.median(values)` 是中位数。
# 走“反复剔除”那条路的话：`np.polyfit(n, us, 1)` 返回 `[斜率, 截距]`。
#
# </details>

# %% solution="fit"
def fit(n, us):
    """Fit us = const_us + n * per_launch_us, whatever became of up to a fifth of the samples.

    n: numpy array, 1-D, launches of each sample (at least two different values). us: numpy array of the same length, µs.
    Returns (const_us, per_launch_us), two floats.
    """
    ### BEGIN SOLUTION: 任意两个样本定一条直线；想一想，怎样从所有这些斜率里选出一个不受少数离群样本影响的
    n, us = np.asarray(n, float), np.asarray(us, float)
    i, j = np.triu_indices(n.size, 1)
    differ = n[i] != n[j]
    i, j = i[differ], j[differ]
    per_launch_us = np.median((us[j] - us[i]) / (n[j] - n[i]))
    return float(np.median(us - n * per_launch_us)), float(per_launch_us)
    ### END SOLUTION


# %% test="fit" kind="answer" points=3
lengths = np.array([1, 10, 50, 100, 200, 300])
const_us, per_launch_us = student.fit(lengths, 4 + 7.0 * lengths)
check.equal(per_launch_us, 7.0, abs=1e-6, why="这六个点正好在一条直线上，每多一个内核多 7 µs。返回的是 (const_us, per_launch_us) 这个次序吗？")
check.equal(const_us, 4.0, abs=1e-6, why="这六个点正好在一条直线上，延长到 0 个内核是 4 µs。")
const_us, per_launch_us = student.fit(lengths, 4 + 7.0 * lengths + np.array([0, 3000.0, 0, 0, 0, 0]))
check.equal(per_launch_us, 7.0, rel=0.03, abs=0.02, why="六个点里有一个被打扰了 3 ms，斜率就被它带走了。直接用最小二乘法会这样。")
check.equal(const_us, 4.0, abs=1.0, why="斜率对了，截距还是被那个离群的样本带走了。")
### BEGIN HIDDEN TESTS
def disturbed_samples(at_zero, per, n):
    times = at_zero + per * n + secret.uniform(-0.3, 0.3, n.size)
    hit = secret.permutation(n.size)[: n.size // 5]
    times[hit] += secret.uniform(0.5, 5, hit.size) * (times[hit] + 20)
    return times


for per in (float(secret.uniform(3, 20)), float(secret.uniform(0.001, 0.01))):
    for n in (secret.permutation(np.arange(1, 401))[:45], secret.permutation(np.repeat([1, 2, 5, 10, 20, 50, 100, 200, 400], 7))):
        true_const = float(secret.uniform(2, 15))
        const_us, per_launch_us = student.fit(n, disturbed_samples(true_const, per, n))
        check.equal(per_launch_us, per, rel=0.03, abs=0.02, why="五分之一的样本被打扰以后，斜率偏了。只取每个 n 的中位数不够：同一个 n 可能只有一个样本，也可能大半被打扰。")
        check.equal(const_us, true_const, abs=1.0, why="五分之一的样本被打扰以后，截距偏了。求截距的时候也要防着离群的样本，而且不能当它是零。")
for way in ("cupy", "prepared", "graph"):
    recorded = [(record["n"], record["submit_us"]) for record in reference.value("SAMPLES")["chains"] if record["way"] == way]
    known = [(n, us) for n, samples in recorded if n <= 100 for us in samples]
    const_us, per_launch_us = student.fit(np.array([n for n, _ in known]), np.array([us for _, us in known]))
    (told,) = (float(np.median(samples)) for n, samples in recorded if n == 400)
    check.equal(const_us + 400 * per_launch_us, told, rel=0.25, abs=2.0, why="用随章样本里 N ≤ 100 的部分拟合，去说 N = 400 的提交时间，差得太远。两个数是不是都来自样本本身？")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习二：队列有限的两条流水线（2 分）
#
# 《课程导入》里的 `predict` 把队列当成无限长，只问几时做完。现在把队列的长度也算进去，两块表都问：CPU 几时脱身，GPU 几时做完。
#
# 写 `queue_us(launch_us, kernels_us, depth)`，规则是：
#
# 1. CPU 从 0 时刻起逐个启动，每次忙 `launch_us`，忙完马上开始下一次；
# 2. 一个内核从启动完成到执行结束，占队列的一个位置（正在执行的也占着）。一共 `depth` 个位置，至少是 1。
#    位置全被占着的时候，CPU 要等最早的那个内核执行结束，才能**开始**下一次启动；
# 3. GPU 按启动的次序执行，一次一个：第 `i` 个占用 GPU `kernels_us[i]`，要等它自己启动完成、前一个也执行结束，才能开始。
#
# 返回 `(submitted_us, finished_us)`：CPU 完成最后一次启动的时刻，和 GPU 做完最后一个内核的时刻。`kernels_us` 至少有一项。这道题不需要 GPU。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 一个一个地过：第 `i` 次启动最早几时能开始？要看上一次启动几时完成；如果前面已经有 `depth` 个以上，还要看哪一个内核几时结束？
# 知道了启动几时完成，内核几时开始、几时结束也就知道了。
#
# `depth` 是 1 的时候会怎样？先手算三个内核，再写代码。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 只用到 `max`、`enumerate` 和一个记录“各个内核几时结束”的列表。内核按次序结束，
# 所以“最早的那个”就是往回数 `depth` 个的那一个；别忘了前 `depth` 次启动不用等。
#
# </details>

# %% solution="queue_us"
def queue_us(launch_us, kernels_us, depth):
    """When the CPU has made its last launch, and when the GPU has finished its last kernel, in µs from the start.

    launch_us: CPU time of each launch, µs. kernels_us: list of floats, GPU time of each kernel, in order, not empty.
    depth: places in the queue, at least 1. Returns (submitted_us, finished_us), two floats.
    """
    ### BEGIN SOLUTION: 逐个内核推进：先算这次启动几时能开始、几时完成，再算这个内核几时能开始、几时结束
    submitted_us, finished = 0.0, []
    for i, kernel_us in enumerate(kernels_us):
        if i >= depth:
            submitted_us = max(submitted_us, finished[i - depth])
        submitted_us += launch_us
        begin = max(submitted_us, finished[-1]) if finished else submitted_us
        finished.append(begin + kernel_us)
    return float(submitted_us), float(finished[-1])
    ### END SOLUTION


# %% test="queue_us" kind="answer" points=2
check.equal(student.queue_us(5, [2, 2, 2], 100), (15, 17), abs=1e-6, why="内核比启动短：CPU 在 15 µs 交完三个，GPU 接着做最后一个，17 µs 做完。")
check.equal(student.queue_us(5, [12, 12, 12], 100), (15, 41), abs=1e-6, why="内核比启动长、队列够长：CPU 仍在 15 µs 脱身；GPU 从 5 µs 开始，连做三个，41 µs 做完。")
check.equal(student.queue_us(5, [12, 12, 12], 2), (22, 41), abs=1e-6, why="只有两个位置：第三次启动要等第一个内核在 17 µs 结束才能开始，22 µs 完成；GPU 没有因此耽误。")
check.equal(student.queue_us(5, [12, 12, 12], 1), (39, 51), abs=1e-6, why="只有一个位置，等于每启动一次就等它做完：三次都是 5 + 12，一点也不重叠。")
### BEGIN HIDDEN TESTS
def waiting_line(launch, kernels, depth):
    # Event by event instead of kernel by kernel: the time at which each launch and each kernel is over.
    over = {("cpu", -1): 0.0, ("gpu", -1): 0.0} | {("gpu", -k): 0.0 for k in range(1, depth + 1)}
    for k, length in enumerate(kernels):
        over["cpu", k] = max(over["cpu", k - 1], over["gpu", k - depth]) + launch
        over["gpu", k] = max(over["cpu", k], over["gpu", k - 1]) + length
    return over["cpu", len(kernels) - 1], over["gpu", len(kernels) - 1]


lines = []
for low, high, depth in ((0, 3, 5), (0, 3, 1), (20, 60, 3), (20, 60, 1000), (0, 30, 2), (0, 30, 4), (0, 30, 1), (0, 30, 12)):
    kernels = [float(v) / 8 for v in secret.integers(low * 8, high * 8 + 1, int(secret.integers(15, 40)))]
    lines.append((float(secret.integers(16, 96)) / 8, kernels, depth))
lines += [(launch, [300.0, *kernels], depth) for launch, kernels, depth in lines[:1]] + [(launch, [*kernels, 300.0], depth) for launch, kernels, depth in lines[:1]]
lines += [(6.5, [0.25], 1), (6.5, [0.25], 7)]
results = [student.queue_us(*line) for line in lines]
check.equal([finished for _, finished in results], [waiting_line(*line)[1] for line in lines], abs=1e-6, why="换一串长短不一的内核或别的队列长度，GPU 做完的时刻不对。队列短的时候，CPU 的等待会不会也拖住 GPU？")
check.equal([submitted for submitted, _ in results], [waiting_line(*line)[0] for line in lines], abs=1e-6, why="GPU 做完的时刻都对，CPU 脱身的时刻不对。位置满了的时候，等的是往回数第 depth 个内核，而且等完才开始启动。")
### END HIDDEN TESTS

# %% [markdown]
# 做完以后可以玩一玩：用你自己机器的 `launch_us`，3000 个 20 µs 的内核，`depth` 取 1000，`submitted_us` 和前面那条拐弯的折线对得上吗？
#
# ### 练习三：找到交叉点（3 分）
#
# 写 `find_crossover(chain)`。`chain` 是一个函数：`chain(us)` 在 `stream` 上启动一串内核，其中有一些停留 `us` µs，其余的与 `us` 无关，然后马上返回。
# 一共多少个、怎么启动的、启动贵不贵，你都不知道，只能量。
#
# 返回交叉点：一个 `us`（float），超过它以后，图省下的端到端时间不到 `WORTH`（10%）。
#
# - 在 `SHORTEST_US` 到 `LONGEST_US` 之间找；在 `SHORTEST_US` 就已经不到 10%，返回 `SHORTEST_US`；到 `LONGEST_US` 仍有 10%，返回 `LONGEST_US`；
# - 端到端指从开始提交，到设备全部做完；
# - 图省下多少，要把这串内核真的录成图、和逐个启动比出来；一次图也没有录过的，不算数；
# - 不必量得太细：一次调用请控制在 5 秒以内（整道题评分限时 90 秒）。
#
# 评分时，考官在同一块 GPU 上用参考解答量同一串内核，你的结果在它的一半到两倍之间就算对。会考几种启动贵贱不同、长短搭配不同的链。

# %%
WORTH = 0.1  # the share of the end-to-end time that a graph must save to be worth it
SHORTEST_US, LONGEST_US = 1.0, 128.0

# %% [markdown]
# 给定的 `make_chain` 可以造出这样的链，供你试验：

# %% tags=["gpu"]
from time import perf_counter_ns


def make_chain(n, slow_us=0.0, empty=0):
    """Return chain(us): n times a kernel of us microseconds and `empty` empty ones, one by one on `stream`.

    slow_us: before each of the n the CPU is kept busy that long, as in a program whose launches are expensive.
    """
    with stream:
        x = cp.zeros(BLOCK, cp.uint32)

    def chain(us):
        for _ in range(n):
            until = perf_counter_ns() + slow_us * 1000
            while perf_counter_ns() < until:
                pass
            eager_chain(x, [us] + [0] * empty)

    return chain


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 给定一个 `us`，怎样得到“省下百分之几”？要量哪两样，用哪块表，怎样保证两样处境相同？
#
# 省下的比例随 `us` 变长而下降，下降的东西找一个门槛，不必从头扫到尾。答案只要求准到两倍以内：在普通刻度上对半分合适，还是在对数刻度上？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `partial(chain, us)` 是一个没有参数的函数；`capture(work)` 把它录成图，`partial(graph.launch, stream)` 重放一次。每个 `us` 都要重新录：时长被录进了图里。
# `lab.compare_us(a, b, clock="end_to_end", pairs=9, warmup=2).ratio` 是 a 的时间 ÷ b 的时间；默认 21 对更稳，但慢。
# 两个数的几何平均 `(low * high) ** 0.5`，就是对数刻度上的中点。
#
# </details>

# %% solution="find_crossover" tags=["gpu"]
def find_crossover(chain):
    """The kernel duration, µs, beyond which replaying the chain as a graph saves less than WORTH of the end-to-end time.

    chain: function of one float; chain(us) launches kernels on `stream`, some of them us microseconds long, and returns at once.
    Returns a float between SHORTEST_US and LONGEST_US.
    """
    ### BEGIN SOLUTION: 先写“给定 us，图省下百分之几”，再在 SHORTEST_US 和 LONGEST_US 之间找它降到 WORTH 的地方
    def saved(us):
        work = partial(chain, us)
        replay = partial(capture(work).launch, stream)
        return 1 - 1 / lab.compare_us(work, replay, clock="end_to_end", pairs=9, warmup=2).ratio

    low, high = SHORTEST_US, LONGEST_US
    if saved(low) < WORTH:
        return low
    if saved(high) >= WORTH:
        return high
    for _ in range(6):
        middle = (low * high) ** 0.5
        if saved(middle) >= WORTH:
            low = middle
        else:
            high = middle
    return (low * high) ** 0.5
    ### END SOLUTION


# %% test="find_crossover" kind="structure" points=3 tags=["gpu", "alone"]
plain = student.find_crossover(student.make_chain(30))
check.that(1.0 <= plain <= 128.0, why="返回的应当是 SHORTEST_US 到 LONGEST_US 之间的一个数，单位 µs。")
slow = student.find_crossover(student.make_chain(30, slow_us=50.0))
check.that(slow >= 1.5 * plain, why="启动贵了 50 µs，交叉点却没有明显右移：GPU 等 CPU 等得更久，图更值钱才对。结果是量出来的吗？看的是端到端那块表吗？")
# Where a launch costs a lot anyway, a coarse scale may have no point left below the longest.
check.that(slow <= 127.0 or plain > 16.0, why="启动贵了 50 µs，到 128 µs 还没有找到交叉点。比较的是端到端时间吗？每个 us 都重新录图了吗？")
### BEGIN HIDDEN TESTS
CHAINS = r'''
def make(stream, n, slow_us, empty, fixed_us):
    import time
    import cupy
    import numpy
    linger = cupy.RawKernel(r"""
    extern "C" __global__ void linger(unsigned int ns) {
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
    }
    """, "linger")

    def chain(us):
        chain.captured += int(stream.is_capturing())
        with stream:
            for _ in range(n):
                until = time.perf_counter_ns() + slow_us * 1000
                while time.perf_counter_ns() < until:
                    pass
                linger((1,), (32,), (numpy.uint32(us * 1000),))
                if fixed_us:
                    linger((1,), (32,), (numpy.uint32(fixed_us * 1000),))
                for _ in range(empty):
                    linger((1,), (32,), (numpy.uint32(0),))

    chain.captured = 0  # times that it was called in a capture
    chain(1)
    stream.synchronize()
    return chain
'''
theirs, ours = (party.define(CHAINS, "make") for party in (student, reference))
wants = []
# Three that cross midway, one that saves too little from the start, and one that still saves enough at the end.
for n, slow_us, empty, least_us in (
    (int(secret.integers(70, 90)), 0.0, 0, 0.0),
    (int(secret.integers(9, 13)), float(secret.uniform(50, 70)), 0, 0.0),
    (int(secret.integers(25, 45)), 0.0, int(secret.integers(3, 6)), 0.0),
    (int(secret.integers(9, 13)), 0.0, 0, float(secret.uniform(100, 130))),
    (int(secret.integers(6, 9)), float(secret.uniform(250, 350)), 0, 0.0),
):
    fixed_us = max(least_us, 4 * wants[0]) if least_us else 0.0  # by far longer than two launches, where they are dear too
    want = reference.find_crossover(ours(reference.value("stream"), n, slow_us, empty, fixed_us))
    wants.append(want)
    asked = theirs(student.value("stream"), n, slow_us, empty, fixed_us)
    got = student.find_crossover(asked)
    check.that(asked.get("captured") > 0, why="find_crossover 一次也没有把这串内核录成图。图省下多少，要拿图来量：同一个 us，录成图的和逐个启动的，轮流上场比一比。")
    check.that(want / 2 <= got <= want * 2, why="换一串内核，找到的交叉点和考官在同一块 GPU 上找到的差了两倍以上。链里有多少内核、启动贵不贵都不知道，只能量；量的时候两种做法轮流上场了吗？门槛是省下 10% 吗？一开头就不到 10% 的、到最后仍有 10% 的，返回的是两头吗？")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：先预测，再做到（4 分）
#
# **预测。** 写 `predict_speedup(holds_us, costs)`：一条链 `holds_us` 一轮接一轮地跑很多轮，中间不同步，图比逐个启动快多少倍？
# 只许用 `costs` 里的四个数算（`measure_costs` 返回的那种字典），不许量，所以这一半不需要 GPU。
#
# - “快多少倍”指稳定以后，每一轮的时间之比：逐个启动 ÷ 图；
# - 一轮的时间按本章的模型：CPU 一条流水线，GPU 一条流水线，一轮接一轮，谁慢谁说了算；
# - 停留 $h$ µs 的内核，在 GPU 上占 $h$ 加上一个空内核的时间；逐个启动和图，用各自的那个数。
#
# 评分时先换几组数字，看公式（误差不超过 1%）；再在考官的 GPU 上当场量四个数，请你预测几条长短搭配不同的链，和实测相差不超过 25%（实测前后各量一次四个数，单价中途变了，落在两次预测之间也算）。
# `holds_us` 至少有一项。
#
# **做到。** 写 `make_round(x, holds_us)`：返回一张可以反复 `launch` 的 `cupy.cuda.Graph`，每次重放的效果与 `eager_chain(x, holds_us)` 相同。
# 捕获本身不能改变 `x`；每次重放都从 `x` **当时**的内容出发。
#
# 评分时两种做法各自连续跑许多轮，最后等整个设备做完，比的是**每多一轮多花的时间**，`eager_chain` ÷ 图：
#
# - 至少快 2 倍得满分；如果参考解答在这台机器上快不到 4 倍，门槛降到它的一半，最低 1.2 倍；差一点的，得一半分；
# - 而且这个倍数要在你自己预测的 25% 以内。

# %% [markdown]
# 给定的 `measured_speedup` 按同样的意思当场量一次，你可以拿它检验自己的预测：

# %% tags=["gpu"]
ROUNDS = 10


def measured_speedup(x, holds_us):
    """How many times as fast as eager_chain(x, holds_us) its graph is, end to end, over ROUNDS rounds without a pause."""
    graph = capture(partial(eager_chain, x, holds_us))

    def eager():
        for _ in range(ROUNDS):
            eager_chain(x, holds_us)

    def replay():
        for _ in range(ROUNDS):
            graph.launch(stream)

    return lab.compare_us(eager, replay, clock="end_to_end", pairs=11, warmup=1).ratio


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 先算一轮里 CPU 总共忙多久、GPU 总共忙多久，各是两个数：逐个启动一份，图一份。一轮接一轮跑的时候，CPU 会不会跑到前面，去启动下一轮？
# 那么“谁慢谁说了算”，比的是一个一个的内核，还是整整一轮？拿九个空内核加一个很长的内核，在纸上画一画两轮的时间线。
#
# “做到”的那一半：哪些事只做一次，哪些事每轮都做？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 四个数：`costs["launch_us"]`、`costs["eager_node_us"]`、`costs["graph_us"]`、`costs["graph_node_us"]`。
# 用 `len(holds_us)`、`sum(holds_us)` 和 `max` 就够了；图一轮只启动一次。
# 录图可以用给定的 `capture(work)`，`work` 是没有参数的函数，`partial(函数, 参数…)` 可以做一个。
#
# </details>

# %% solution="predict_speedup"
def predict_speedup(holds_us, costs):
    """How many times as fast the chain runs as a graph as by single launches, round after round without a pause.

    holds_us: list of floats, µs, one for each kernel. costs: dict as returned by measure_costs, µs. Returns a float.
    """
    ### BEGIN SOLUTION: 逐个启动和图各算两个数：一轮里 CPU 忙多久，GPU 忙多久；想一想该在哪里取较大的
    n, held_us = len(holds_us), sum(holds_us)
    eager_us = max(n * costs["launch_us"], held_us + n * costs["eager_node_us"])
    graph_us = max(costs["graph_us"], held_us + n * costs["graph_node_us"])
    return eager_us / graph_us
    ### END SOLUTION


# %% solution="make_round" tags=["gpu"]
def make_round(x, holds_us):
    """Capture eager_chain(x, holds_us) as one graph, without running it.

    x: cupy uint32, 1-D; read and written only when the graph is launched. Returns the instantiated cupy.cuda.Graph.
    """
    ### BEGIN SOLUTION: 把整轮录成一张图返回，以后每轮只有一次图启动
    return capture(partial(eager_chain, x, holds_us))
    ### END SOLUTION


# %% test="predict_speedup" kind="answer" points=1
four = {"launch_us": 8.0, "eager_node_us": 2.0, "graph_us": 3.0, "graph_node_us": 1.0}
check.equal(student.predict_speedup([0] * 100, four), 8.0, rel=0.01, why="100 个空内核：逐个启动由 CPU 决定，每轮 800 µs；图由 GPU 决定，每轮 100 µs。")
check.equal(student.predict_speedup([98] * 10, four), 1000 / 990, rel=0.01, why="10 个 98 µs 的内核：两种做法都由 GPU 决定，每轮 1000 µs 对 990 µs，几乎不省。")
check.equal(student.predict_speedup([0] * 9 + [70], four), 90 / 80, rel=0.01, why="九个空的加一个长的：GPU 做长的时候，CPU 已经去启动后面的了。逐个启动每轮 CPU 忙 80 µs、GPU 忙 90 µs，图每轮 80 µs。")
### BEGIN HIDDEN TESTS
def by_hand(holds, launch, eager_node, graph, graph_node):
    cpu, gpu = (launch * len(holds), graph), (sum(h + eager_node for h in holds), sum(h + graph_node for h in holds))
    return max(cpu[0], gpu[0]) / max(cpu[1], gpu[1])


checked = []
for lowest, highest, count in ((0, 1, 80), (30, 90, 40), (0, 12, 60), (0, 1, 1), (0, 1, 2), (4, 9, 50), (0, 2, 150)):
    numbers = [float(secret.uniform(low, high)) for low, high in ((4, 9), (1.5, 3), (2.5, 12), (0.5, 1.4))]
    holds = [float(h) for h in secret.uniform(lowest, highest, count)]
    checked.append((holds, numbers))
    checked.append((([0.0] * 9 + [float(secret.uniform(30, 90))]) * int(secret.integers(3, 8)), numbers))
names = ("launch_us", "eager_node_us", "graph_us", "graph_node_us")
guesses = [student.predict_speedup(holds, dict(zip(names, numbers, strict=True))) for holds, numbers in checked]
check.equal(guesses, [by_hand(holds, *numbers) for holds, numbers in checked], rel=0.01, why="换了数字，预测就不对了。四个数都用上了吗？图的那一边，CPU 和 GPU 也要比一比；内核长短不一时，比的是整轮的和。")
### END HIDDEN TESTS

# %% test="predict_on_gpu" kind="structure" points=1 tags=["gpu"]
probe = on_gpu(np.zeros(4096, np.uint32))
MISSED = "当场量四个数，请你预测，再当场量加速：预测差了四分之一以上。公式在纸上对、在 GPU 上不对的话，看看是不是哪条流水线漏算了空内核的时间，或把该重叠的加了起来。"


def foretold(holds):
    """Whether a measured speed-up lies within 25 % of what is predicted from the costs just before and just after it."""
    before, gained, after = reference.measure_costs(probe), reference.measured_speedup(probe, holds), reference.measure_costs(probe)
    low, high = sorted(student.predict_speedup(holds, costs_now) for costs_now in (before, after))
    return 0.75 * low <= gained <= 1.25 * high


# Launches cost more in some seconds than in others, so a miss is measured again.
check.that(any(foretold([0.0] * 100) for _ in range(3)), why=MISSED)
### BEGIN HIDDEN TESTS
numbers = reference.measure_costs(probe)
price_us, groups = numbers["launch_us"], int(secret.integers(8, 14))
balancing = max(1.0, 10 * (price_us - numbers["eager_node_us"]))  # as much for the GPU to do as for the CPU
for holds in ([0.0] * (12 * groups), ([0.0] * 9 + [balancing]) * groups, [3 * price_us] * (5 * groups), [0.4 * price_us] * (10 * groups)):
    check.that(any(foretold(holds) for _ in range(3)), why=MISSED)
# Whoever measures instead of computing tells the same, whatever the four numbers are.
few, many = float(secret.uniform(4, 6)), float(secret.uniform(30, 40))
cheap, dear = (student.predict_speedup([0.0] * 60, numbers | {"launch_us": price, "eager_node_us": 1.5, "graph_us": 3.0, "graph_node_us": 1.0}) for price in (few, many))
check.that(dear >= 2 * cheap, why="启动的单价贵了好几倍，一串空内核的预测却几乎不变。predict_speedup 只许用 costs 里的四个数算，不许自己去量。")
### END HIDDEN TESTS

# %% test="make_round" kind="speedup" points=2 tags=["gpu"]
want = np.arange(1000, dtype=np.uint32)
short_holds = [0, 3, 0, 1.5]
buffer = on_gpu(want)
made = student.make_round(buffer, short_holds)
check.nodes(made, kernels=4, total=4, edges=3, why="图里应当是 4 个内核连成的一条链，每项一个。")
check.equal(buffer.read(), want, why="录完以后 x 就变了：捕获只记录，不应当执行。")
made.run(1)
check.equal(buffer.read(), reference.stepped(want, short_holds), why="重放一次的结果和 eager_chain 的不同。序号从 0 数起，时长也要照原样传给内核。")
### BEGIN HIDDEN TESTS
rounds = int(secret.integers(2, 7))
want = buffer.write(secret.integers(0, 2**32, 1000, dtype=np.uint32))
made.instantiate().run(rounds)
for _ in range(rounds):
    want = reference.stepped(want, short_holds)
check.equal(buffer.read(), want, why="换了数据再重放几轮，结果不对。图要直接读写 x 的地址，每一轮都做完全部内核。")

for _ in range(3):  # again if launches became dearer or cheaper in the very middle
    begin = secret.integers(0, 2**32, 4096, dtype=np.uint32)
    theirs, base, own_state = on_gpu(begin), on_gpu(begin), on_gpu(begin)
    costs_seen = [reference.measure_costs(base) for _ in range(3)]
    numbers = costs_seen[-1]
    tail_us = max(0.0, 20 * (numbers["launch_us"] / 3 - numbers["graph_node_us"]))  # for a speed-up of about 3
    holds = ([0.0] * 19 + [tail_us]) * int(secret.integers(8, 14))
    made, best = student.make_round(theirs, holds), reference.make_round(own_state, holds)
    check.nodes(made, kernels=len(holds), total=len(holds), edges=len(holds) - 1, why="换一条链，图里的内核个数或次序就不对了。")
    check.speedup(
        made,
        over=partial(reference.eager_chain, base, holds),
        best=best,
        state=(theirs, own_state),
        at_least=2.0,
        why="还不够快。每一轮应当只有一次图启动：捕获和实例化只做一次，返回的是图本身吗？",
    )
    # Launches cost more in some seconds than in others: what is predicted from the costs before and after is a range.
    costs_seen += [reference.measure_costs(base) for _ in range(3)]
    predictions = [student.predict_speedup(holds, each) for each in costs_seen]
    if as_predicted := 0.75 * min(predictions) <= check.ratio <= 1.25 * max(predictions):
        break
check.that(as_predicted, why="够快了，但和你自己的预测差了四分之一以上。predict_speedup 的两组测试都通过了吗？都通过了的话，多半是机器在测量中途变快或变慢了，过一会儿再评一次。")
### END HIDDEN TESTS

# %% [markdown] tags=["instructor"]
# 给教师：
#
# - 练习一的隐藏样本里，五分之一被打扰，同一个 n 有的只出现一次：直接最小二乘、只取中位数、只取最小值、只剔除一遍，都过不了；
#   两两斜率取中位数、最小绝对偏差、反复剔除都能过。
# - 练习二的隐藏测试换一种写法（按事件）算同一条规则；`depth` 为 1 和很大都有。
# - 练习三的前三条链，交叉点大致在启动单价、启动单价加五六十微秒、四五个启动单价附近，所以任何常数、只量启动单价的写法都过不了；
#   后两条一头一尾：一条里有与 `us` 无关的长内核，图从一开始就省不下 10%；一条启动贵到最后仍省得下。没有录过图的写法不得分。
#   参考解答在同一次考试里量同样的链，启动单价慢的机器也公平。
# - 练习四的四条链分别是：启动受限、CPU 与 GPU 持平的长短搭配、GPU 受限、内核比启动略短。把 `max` 写在每个内核上的公式，在第二条上会高出六成以上；
#   不取 `max` 的公式在第三条上露馅。启动的单价会一阵一阵地变，所以四个数在实测的前后各量一次，
#   实测要落在两个预测张开四分之一的范围里；没落进去就重来，最多三次。
#   不算而去量的预测，换一组编出来的数字就露馅。

# %% [markdown]
# ## 小结
#
# | 以前的说法 | 实验以后的说法 |
# |:--|:--|
# | 总时间除以 N 就是启动开销 | 那里面还有 `const`；单价要看斜率，而且拟合要不怕离群样本 |
# | 歇一会儿再测更干净 | 歇过以后，量的是另一种处境，贵多少要看机器；让两种做法处境相同、轮流上场 |
# | 提交快了一百倍，延迟也会快 | CPU 和 GPU 谁慢谁说了算；GPU 受限时，省下的是 CPU 的空闲 |
# | 启动调用很长，说明启动很贵 | 队列满了，它在等 GPU；单价要在队列不满的时候量 |
# | 启动占 10%～30%，用图就能省这么多 | 占比和能省是两条曲线；占比三成的时候，往往几乎省不下 |
# | 大图片不适合用图 | 看的不是分辨率，是内核时长与启动单价之比；交叉点要当场量 |
# | 建图就是实例化 | 还有捕获、上传和第一次启动，都随节点数和张数增长；内核自己的第一次（编译、加载）另算 |
#
# **对一对开头的谜**：第一个团队是 GPU 受限，省下的是 CPU 等队列的时间；第二个团队的内核随图片变长，走过了交叉点；
# 第三个团队为每种情况各建一张图，又没有在开门之前预热，第一个用户替大家付了账，而且付的大头还不是实例化。
#
# **带走三句话**
#
# 1. 一台机器的启动成本就是四个数，自己量，别背别人的。
# 2. 先问谁慢：较慢的一方是下限，图只能把 CPU 那一方拿掉。
# 3. 先预测，再动手，再核对。预测不准的时候，往往比预测准的时候学到更多。
#
# 下一步：《流捕获：规则与恢复》讲捕获时什么不许做、出了错怎么收拾；《图何时无用》会带着这里的模型去看更多不该用图的场合。
