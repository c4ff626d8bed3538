# %% [markdown]
# # 课程导入
#
# 你有一个模型，跑得不够快。于是换了一块算力翻倍的 GPU，可单次推理只快了一点点。
# 打开监控一看：GPU 有一大半时间闲着。它在等谁？
#
# 还有另一个麻烦。用户的请求有长有短：一句话可能只有 8 个 token，也可能有 512 个。
# 全按最长的准备，短的就白算许多；每种长度都单独准备，又准备不完。怎么办？
#
# 这门课回答的就是这两个问题。第一个用 CUDA 图（CUDA Graph），第二个用 TensorRT 的动态形状（dynamic shape）；
# 把两者放到一起还会冒出新的问题，我们也一个一个解决。
# 这一章先不讲原理，先让你在自己的机器上**亲手量到**这两个麻烦。
#
# **学完这一章，你能够**
#
# - 说出一次推理里 CPU 和 GPU 各在忙什么，用两块表把“交出去”和“做完了”分开；
# - 由启动开销、内核数量和内核时长预测总时间，再拿自己的 GPU 来对照；
# - 自己启动一串内核：块数、参数和流都给对；
# - 为尺寸会变的请求准备图：每种尺寸只录一次，以后只重放；
# - 会用课程的评分器，看得懂它的结论。
#
# **需要的基础**：会 Python 和 NumPy（或 PyTorch）就够了。不要求会写 CUDA，内核都已经写好。
#
# **时间**：约 55 分钟，其中三道练习约 30 分钟。
#
# 课程最初有一份讲义，本章的许多说法和数字来自它。我们不照单全收：能在这里试的，当场用小实验去问 GPU；
# 要用到后面知识的，就写成一个问题，并注明哪一章回答。
#
# ## 怎么用这本笔记本
#
# 从上往下读，遇到代码就按 `Shift+Enter` 运行。代码单元有四种：
#
# - **给定单元**：练习和评分都要用到的内核、函数。照着运行，不用改。
# - **演示单元**：做实验、画图。评分时不运行，你可以随意改着玩。
# - **答题单元**：里面有一句 `raise NotImplementedError("…")`，等着换成你的代码。
# - **测试单元**：紧跟在答题单元后面，告诉你做得对不对。

# %%
import numpy as np
from functools import partial
from launchlab import lab
from launchlab.exam import check, on_gpu, reference, secret, student

lab.here()

# %% [markdown]
# 上面这一行就是环境自检的第一步。三种情况：
#
# - **说出了你的 GPU**：一切就绪。
# - **说没有 GPU，而你确实没有**：也没关系。需要 GPU 的单元会显示一行说明，其余的照常运行；
#   仓库里 `solutions/` 下的同名笔记本附有在真实 GPU 上录下的输出，可以对着读（练习的答案也在里面，先自己做）。
# - **说没有 GPU，而你明明有**：打开一个终端（菜单：文件 → 新建 → 终端），在仓库的根目录（能看到 `grader` 文件夹的那一层）运行
#
#   ```
#   ./grader/launch doctor
#   ```
#
#   它会逐项检查 Python、驱动、CuPy、沙箱，告诉你缺什么、怎么补，以及这台机器能运行哪些章节。
#
# 第一个单元最后导入的 `check`、`on_gpu`、`reference`、`secret`、`student` 是测试单元用的工具，你读题、答题时用不到它们。

# %% [markdown]
# ## CPU 交任务，GPU 干活
#
# 先认识三个词，后面天天见：
#
# - **内核（kernel）**：在 GPU 上运行的一个函数。一个模型的推理，就是许多内核按顺序执行：矩阵乘法、加偏置、激活函数……
# - **启动（launch）**：CPU 对 GPU 说“请运行这个内核”。说的时候要交代：分成多少个**块**（block），每块多少个**线程**（thread），参数是什么。
#   全部块合起来叫**网格**（grid）。每个线程算出自己的编号 `t`，负责第 `t` 个元素。
# - **流（stream）**：GPU 门口的一条队。CPU 把任务排进队里就走；同一条队里的任务，GPU 按先后次序做。
#
# 下面这一格用 CuPy（GPU 上的 NumPy）准备本章的三个内核。CUDA C++ 看不懂没关系，读名字和注释就够：
#
# - `mix` 把每个 32 位整数“搅拌”一次。漏做一次、多做一次、换了顺序，结果都会不同，所以很适合检查“该做的是不是真的做了”。
#   它冒充模型里一个逐元素的小内核，例如激活函数。
# - `layer` 冒充模型的一层：从 `src` 读，往 `dst` 写。练习二会用到。
# - `spin` 让 GPU 空转一段指定的时间，并记下自己何时开始、何时结束。
#
# `launch_chain` 里的 `mix((块数,), (每块线程数,), (参数…))` 就是一次启动；写在 `with stream:` 里，任务就排进 `stream` 这条流。
# `cp.cuda.Stream(non_blocking=True)` 建一条自己的流，它不和 CUDA 的默认流（default stream）互相等待。

# %%
BLOCK = 256  # threads per block
SIZE = 4096  # elements of the demonstrations' arrays
LAYERS = 100  # kernels of one request

# %% tags=["gpu"]
import cupy as cp

SOURCE = r"""
__device__ unsigned int scramble(unsigned int v, unsigned int i) {
    v ^= v >> 15;
    v *= 0x2c1b3c6du;
    v ^= v >> 12;
    return v + i;
}

// One element per thread. Start exactly as many threads as x has elements.
extern "C" __global__ void mix(unsigned int *x, unsigned int i) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    x[t] = scramble(x[t], i);
}

// An element of dst depends on two of src. Threads with t >= size do nothing.
extern "C" __global__ void layer(const unsigned int *src, unsigned int *dst, unsigned int i, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) dst[t] = scramble(src[t] + 3u * src[(t + 1) % size], i);
}

__device__ unsigned long long now_ns() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Keep one thread busy for ns nanoseconds; times[2 * i] and times[2 * i + 1] tell when it began and ended.
extern "C" __global__ void spin(unsigned long long *times, unsigned int i, unsigned long long ns) {
    unsigned long long start = now_ns(), now;
    do now = now_ns(); while (now - start < ns);
    times[2 * i] = start;
    times[2 * i + 1] = now;
}
"""
module = cp.RawModule(code=SOURCE)
mix, layer, spin = (module.get_function(name) for name in ("mix", "layer", "spin"))

stream = cp.cuda.Stream(non_blocking=True)
with stream:
    times = cp.zeros((64, 2), cp.uint64)


def launch_chain(x, n):
    """Launch mix n times on x, with indices 0 … n-1, on `stream`. Returns without waiting for the GPU.

    x: cupy uint32, 1-D, its size a multiple of BLOCK.
    """
    with stream:
        for i in range(n):
            mix((x.size // BLOCK,), (BLOCK,), (x, np.uint32(i)))


def launch_spin(us, i=0):
    """Keep one GPU thread busy for us microseconds, and note its times in row i of `times`, on `stream`."""
    with stream:
        spin((1,), (1,), (times, np.uint32(i), np.uint64(us * 1000)))


# The first launch of a kernel loads its code. Do that now, so that no measurement includes it.
with stream:
    warm = cp.zeros(BLOCK, cp.uint32)
    layer((1,), (BLOCK,), (warm, cp.zeros_like(warm), np.uint32(0), np.uint32(BLOCK)))
launch_chain(warm, 1)
launch_spin(1)
stream.synchronize()

# %% [markdown]
# 再用 NumPy 写出同样的计算，好知道正确答案是什么。

# %%
def scrambled(v, i):
    """What the kernels do to each element: v (numpy uint32) and an index, to numpy uint32."""
    v = v ^ (v >> np.uint32(15))
    v = v * np.uint32(0x2C1B3C6D)
    v = v ^ (v >> np.uint32(12))
    return v + np.uint32(i)


def mixed(x, n):
    """Return x (numpy uint32) after n rounds of mix with indices 0 … n-1; x stays as it is."""
    for i in range(n):
        x = scrambled(x, i)
    return x


def layered(x, n):
    """Return x (numpy uint32, 1-D) after n layers with indices 0 … n-1; x stays as it is."""
    for i in range(n):
        x = scrambled(x + np.uint32(3) * np.roll(x, -1), i)
    return x


# %% [markdown]
# 自检的第二步：GPU 算的和 NumPy 算的一样吗？（`x.get()` 把数据从 GPU 拷回来。）

# %% tags=["demo", "gpu"]
with stream:
    x = cp.arange(SIZE, dtype=cp.uint32)
launch_chain(x, 3)
stream.synchronize()  # wait until the GPU has done all that is queued

same = np.array_equal(x.get(), mixed(np.arange(SIZE, dtype=np.uint32), 3))
print(f"CuPy {cp.__version__}；三次 mix 的结果与 NumPy 一致：{same}")

# %% [markdown]
# ### 先猜：启动要多久才返回
#
# 下面让 GPU 空转 20 毫秒。猜一猜：负责启动的那个函数，多久以后返回？20 毫秒，还是更短？

# %% tags=["demo", "gpu"]
from time import perf_counter

rows = []
for attempt in ("第一次", "第二次", "第三次"):
    start = perf_counter()
    launch_spin(20_000)
    returned = perf_counter()
    stream.synchronize()
    finished = perf_counter()
    rows.append((attempt, f"{(returned - start) * 1e6:.0f} µs", f"{(finished - start) * 1e3:.1f} ms"))
lab.say(lab.table(("启动一个 20 ms 的内核", "启动函数返回", "GPU 做完"), rows))

# %% [markdown]
# CPU 没有等。它把任务排进队里就走了，这叫**异步**（asynchronous）；要等结果，得明确地同步（`stream.synchronize()`）。
# （头一次往往返回得慢一些，那多半是一次性的准备，不是在等 GPU。所以量时间之前要先预热。）
#
# 所以“多久”有两块表，别拿错：
#
# - **提交时间**：CPU 把任务交出去用了多久。
# - **端到端时间**，也叫墙钟时间（wall time）：从开始提交，到 GPU 全部做完。
#
# 课程里的 `lab.submit_us` 和 `lab.end_to_end_us` 分别量这两块表：先预热几次，再重复许多次，取中位数。
# `lab.compare_us` 让两种做法轮流上场，机器忽快忽慢时对两边公平。

# %% [markdown]
# ## 一次推理的时间去哪了
#
# 深度学习的一次推理，往往要启动上百个内核，而许多内核短得很。CPU 一个一个地交代，GPU 一个一个地做。谁在等谁？
#
# 与其猜，不如画下来。我们要比较两种交法。第一种是**逐个启动**，刚才已经见过。
# 第二种是 CUDA 图：把要做的事先**捕获**（capture）下来，也就是“录”成一张图，以后每次只交代一句“照着做”，这叫**重放**（replay）。
#
# 下面的 `record` 只做这件事：让流进入捕获状态，运行 `work()`（这时内核只被记下，并不执行），结束捕获，拿到图。
# 里面的细节《CUDA 图优化概念》一章会一步步讲，现在先把它当成一台录音机。

# %% tags=["gpu"]
def record(work):
    """Capture what work() launches on `stream`; nothing is executed. Returns a cupy.cuda.Graph.

    graph.launch(stream) replays it, without waiting for the GPU.
    """
    stream.begin_capture()
    try:
        work()
    finally:
        captured = stream.end_capture()
    return captured


# %% [markdown]
# 现在记录一条真实的时间线。20 个内核，每个在 GPU 上空转约 2 µs，并写下自己的起止时刻；CPU 也记下每次调用的起止时刻。
#
# CPU 和 GPU 各有各的钟，要先对齐。这里的办法是：找出从交完到开始隔得最短的那个内核，假定它一点也没有等。
# 因此 GPU 那一行整体上可能画早了几微秒，但空隙的宽窄不受影响。

# %% tags=["demo"]
import matplotlib.pyplot as plt

lab.plot_style()

# %% tags=["demo", "gpu"]
from time import perf_counter_ns

COUNT = 20


def one_by_one():
    """Return the CPU's and the GPU's (begin, end) of each step, int64 ns, by their own clocks."""
    calls = []
    for i in range(COUNT):
        begin = perf_counter_ns()
        launch_spin(2, i)
        calls.append((begin, perf_counter_ns()))
    stream.synchronize()
    return np.array(calls), times.get()[:COUNT].astype(np.int64)


def all_at_once(graph):
    """The same for one replay."""
    begin = perf_counter_ns()
    graph.launch(stream)
    end = perf_counter_ns()
    stream.synchronize()
    return np.array([(begin, end)]), times.get()[:COUNT].astype(np.int64)


spins_20 = record(lambda: [launch_spin(2, i) for i in range(COUNT)])
for _ in range(6):  # the last round counts, the others warm up
    lanes = {"逐个启动": one_by_one(), "图": all_at_once(spins_20)}

calls, kernels = lanes["逐个启动"]
offset = (kernels[:, 0] - calls[:, 1]).min()  # GPU clock minus CPU clock

fig, axes = plt.subplots(2, 1, sharex=True, figsize=(9, 4.2))
busy = {}
for ax, (name, (calls, kernels)) in zip(axes, lanes.items(), strict=True):
    zero = calls[0, 0]
    for height, spans, color in ((1, calls - zero, "#D55E00"), (0, kernels - offset - zero, "#0072B2")):
        ax.broken_barh([(a / 1000, (b - a) / 1000) for a, b in spans], (height - 0.35, 0.7), color=color, edgecolor="white")
    ax.set_yticks([0, 1], ["GPU 执行", "CPU 提交"])
    ax.set_title(name)
    busy[name] = (kernels[:, 1] - kernels[:, 0]).sum() / (kernels[-1, 1] - kernels[0, 0])
axes[1].set_xlabel("从开始提交算起的时间（µs）")
fig.suptitle(f"20 个内核的真实时间线（{lab.gpu_name()}）")
plt.show()
lab.say(
    "从第一个内核开始到最后一个内核结束，GPU 真正在干活的时间："
    + "，".join(f"{name} **{share:.0%}**" for name, share in busy.items())
    + "。其余的是空隙。"
)

# %% [markdown]
# “GPU 执行”那一行里，条与条之间的空隙，就是 GPU 在等。
#
# 上图里，每个内核都要 CPU 单独忙一次（“CPU 提交”那一行的一根条）。内核比那根条还短的时候，GPU 做完手里的，下一个还没送到，只好闲着。
# 要是有一根条比别的长得多，那是 CPU 这一次被别的事耽搁了，GPU 也跟着多闲了那么久。
# 这种情况叫**启动受限**（launch-bound）；CPU 为每次启动付出的时间，叫**启动开销**（launch overhead）。
# 下图里，CPU 只忙了一次，后面的次序由 GPU 自己照图执行，空隙通常小得多，看上面那两个百分数。
#
# 开头那个谜，答案多半就在这里：GPU 再快一倍，“GPU 执行”的条短一半，可“CPU 提交”的条一点没变。
# 内核越多、越短，推理越频繁，这笔账就越不能忽视。
#
# **动手改一改**：把 `launch_spin(2, i)` 的两处 2 都改成 20，再运行一遍。先猜：“GPU 执行”的条之间还有空隙吗？
#
# ### 一次启动里有什么
#
# 讲义说，每次启动都要“发起一次系统调用”，再经过驱动、命令解析。系统调用（system call）就是程序请操作系统内核代办一件事，
# 花的时间记在“内核态”的账上（这里的“内核”是操作系统的，和 GPU 的内核不是一回事）。
#
# 这可以查账。操作系统分开记录一个线程在用户态和内核态花的时间：启动几万次，再做几十万次最短的系统调用（`os.getppid`）作对照。

# %% tags=["demo", "gpu"]
import os
import resource


def ledger_us(work, repeats):
    """CPU time of this thread per call of work(): (in user mode, in the operating system), µs."""
    before = resource.getrusage(resource.RUSAGE_THREAD)
    for _ in range(repeats):
        work()
    after = resource.getrusage(resource.RUSAGE_THREAD)
    spent = (after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime)
    return tuple(seconds * 1e6 / repeats for seconds in spent)


launch_once = partial(mix, (x.size // BLOCK,), (BLOCK,), (x, np.uint32(0)))
with stream:
    ledger_us(launch_once, 1000)  # a warm-up
    launches = ledger_us(launch_once, 60_000)
stream.synchronize()
calls_of_os = ledger_us(os.getppid, 600_000)

if calls_of_os[1] < 0.01:
    verdict = "这台机器的账记得太粗，连系统调用本身都看不出来，这个实验在这里得不出结论。"
elif launches[1] < calls_of_os[1] / 2:
    verdict = "平均下来，一次启动连半次系统调用都摊不到：**时间几乎都花在用户态**。"
else:
    verdict = f"在这台机器上，一次启动在内核态花的时间相当于 {launches[1] / calls_of_os[1]:.1f} 次最短的系统调用。"
lab.say(
    lab.table(
        ("每次，µs", "用户态", "内核态"),
        [(name, f"{user:.2f}", f"{system:.3f}") for name, (user, system) in (("启动一个内核", launches), ("最短的系统调用", calls_of_os))],
    )
    + f"\n\n{verdict}"
)

# %% [markdown]
# 通常的情形是这样的：驱动（driver）的大部分代码就在你的进程里运行。它检查参数，把命令写进一块 GPU 也看得见的内存，
# 再写一个寄存器，等于按一下门铃，一般不需要麻烦操作系统。
#
# 所以更准确的说法是：**启动的代价是一次库调用：打包参数、写命令、按门铃**。它一般不来自系统调用，但每个内核都要付一份，多少以上表为准。

# %% [markdown]
# ## 从 O(N) 到 O(1)
#
# 每个内核都要 CPU 忙一次，那么 N 个内核，CPU 就要忙 N 份，写作 $O(N)$。
# 讲义说，CUDA 图把它降到 $O(1)$：不管多少内核，只启动一次。
#
# 把 N 从 1 加到 1000，两块表都量。先猜：用图以后，**墙钟时间**还会随 N 增长吗？

# %% tags=["demo", "gpu"]
COUNTS = np.array([1, 3, 10, 30, 100, 300, 1000])
CLOCKS = {"end_to_end": "墙钟时间（做完为止）", "submit": "CPU 提交时间"}
WAYS = ("逐个启动", "图")

curves = {clock: ([], []) for clock in CLOCKS}
for n in COUNTS:
    graph = record(partial(launch_chain, x, int(n)))
    for clock, (eager, replayed) in curves.items():
        pair = lab.compare_us(partial(launch_chain, x, int(n)), partial(graph.launch, stream), clock=clock)
        eager.append(pair.first)
        replayed.append(pair.second)

fig, axes = plt.subplots(1, 2, sharey=True, figsize=(10, 4.2))
for ax, (clock, title) in zip(axes, CLOCKS.items(), strict=True):
    for way, samples in zip(WAYS, curves[clock], strict=True):
        (line,) = ax.loglog(COUNTS, [s.median for s in samples], label=way)
        low, high = ([s.percentile(q) for s in samples] for q in (10, 90))
        ax.fill_between(COUNTS, low, high, color=line.get_color(), alpha=0.15)
    ax.set_xlabel("内核数量 N")
    ax.set_title(title)
axes[0].set_ylabel("时间（µs）")
axes[0].legend()
fig.suptitle(f"N 个很短的内核，要多久（{lab.gpu_name()}）")
plt.show()


def per_kernel(clock, way):
    """µs for each kernel more, between N = 100 and N = 1000."""
    samples = dict(zip(COUNTS.tolist(), curves[clock][WAYS.index(way)], strict=True))
    return (samples[1000].median - samples[100].median) / 900


slopes = {(clock, way): per_kernel(clock, way) for clock in CLOCKS for way in WAYS}
lab.say(
    lab.table(
        ("每多一个内核，多花", *CLOCKS.values()),
        [(way, *(f"{slopes[clock, way]:.3f} µs" for clock in CLOCKS)) for way in WAYS],
    )
)

# %% [markdown]
# 两张图要分开读（色带是第 10 到第 90 百分位：最快的一成和最慢的一成不算）：
#
# - **右图：$O(1)$ 说的是 CPU 的提交时间。** 逐个启动的线一路上升；图的线平得多，每多一个内核只多花上表右下角那么一点。
# - **左图：墙钟时间仍随 N 增长。** 内核一个也没少，GPU 还是要一个一个做。图去掉的是等 CPU 的那一份。
#
# 所以准确的说法是：图把 CPU 的**启动开销**从 $O(N)$ 降到近似 $O(1)$，不是把推理时间降到 $O(1)$。
#
# 讲义还有一个数字：对于有数百个内核的 Transformer，能省下数十到数百微秒。用刚才的曲线来查：

# %% tags=["demo", "gpu"]
saved = {}
for n, eager, replayed in zip(COUNTS.tolist(), *curves["end_to_end"], strict=True):
    saved[n] = eager.median - replayed.median
few, many = saved[100], saved[300]
if few > 1000:
    verdict = "比讲义说的还多。"
elif many >= 10:
    verdict = "与讲义说的量级相符。" if many < 1000 else "从讲义说的量级起步，内核多了还会超出。"
else:
    verdict = "这台机器上省得比讲义说的少。"
lab.say(
    f"100 个内核，每轮省 **{few:.0f} µs**；300 个内核，省 **{many:.0f} µs**。{verdict}"
    "注意我们的内核特别短，又是从 Python 启动，比 C++ 程序贵，所以这里省下的偏多。"
)

# %% [markdown]
# 真实的模型有多少个内核、能省多少，《捕获 TensorRT 推理》一章会用 ResNet-50 和 BERT 来数、来量。
#
# ### 启动比计算还久？
#
# 讲义说，处理短小内核（逐元素操作、激活函数）时，启动开销甚至可能超过内核本身的计算时间。多短才算短？
# 让 `mix` 处理的数据越来越多，比较 GPU 做一个内核的时间和 CPU 启动一个内核的时间。

# %% tags=["demo", "gpu"]
launch_us = slopes["submit", "逐个启动"]
rows, shorter = [], []
for size in (2**12, 2**16, 2**20, 2**22):
    with stream:
        big = cp.zeros(size, cp.uint32)
    more, less = record(partial(launch_chain, big, 60)), record(partial(launch_chain, big, 10))
    pair = lab.compare_us(partial(more.launch, stream), partial(less.launch, stream), clock="end_to_end")
    kernel_us = (pair.first.median - pair.second.median) / 50
    if kernel_us < launch_us:
        shorter.append(size)
    rows.append((f"{size:,}", f"{big.nbytes / 2**20:g}", f"{kernel_us:.1f}", f"{launch_us:.1f}", "CPU" if kernel_us < launch_us else "GPU"))
lab.say(
    lab.table(("元素个数", "数据 MiB", "GPU 做一个 µs", "CPU 启动一个 µs", "谁更慢"), rows)
    + (f"\n\n在这里，{max(shorter):,} 个元素以内的内核，启动比计算还久。" if shorter else "\n\n在这里，这几种大小的内核都比启动久。")
)

# %% [markdown]
# “谁更慢”，就是本课程最常问的一句话。慢的是 CPU，图才有大用处；慢的是 GPU，启动早就藏在计算后面了。
# 练习一会让你把这句话写成能预测时间的函数。

# %% [markdown]
# ## 输入的尺寸为什么总在变
#
# 第二个麻烦。真实服务里，请求的尺寸由用户决定。讲义举了三个例子：
#
# - 自然语言模型：句子长短不一，8 到 512 个 token；
# - 目标检测：图片来自不同的设备，720p 或 1080p；
# - 推荐系统：一批（batch）攒了多少条请求就算多少条，1、4、8、16。
#
# 尺寸变了，对内核意味着什么？下面只做算术，不需要 GPU。最后一列是逐元素内核要启动的块数，每块 256 个线程。

# %% tags=["demo"]
SCENES = {
    "句子，8 个 token": (1, 8, 768),
    "句子，512 个 token": (1, 512, 768),
    "图片，720p": (1, 3, 720, 1280),
    "图片，1080p": (1, 3, 1080, 1920),
    **{f"推荐，batch {b}": (b, 256) for b in (1, 4, 8, 16)},
}
smallest = {}
rows = []
for name, shape in SCENES.items():
    elements = int(np.prod(shape))
    first = smallest.setdefault(name[:2], elements)  # scenes are told apart by their first two characters
    rows.append((name, " × ".join(map(str, shape)), f"{elements:,}", f"{elements * 2 / 2**10:,.1f}", f"{elements / first:g}", f"{-(-elements // 256):,}"))
lab.say(
    "由形状推算（假设：句子的隐藏维度 768，推荐每条 256 个特征，数据是半精度，每个元素 2 字节）\n\n"
    + lab.table(("一次请求", "形状", "元素个数", "KiB", "同类里最小的几倍", "块数"), rows),
    measured=False,
)

# %% [markdown]
# 同一个模型，同一个内核，块数各不相同。记住这一列：**启动时要交代的东西，随尺寸而变**。后面会看到，这正是图的麻烦所在。
#
# 最省事的办法是填充（padding）：全部补到最长，尺寸就不变了。代价是多少？
#
# 算一算 BERT-base 那样的一层 Transformer 要做多少乘加：投影和前馈网络与长度 $L$ 成正比，注意力与 $L^2$ 成正比。
# 再造一份**合成的**流量（按对数正态分布抽一万个长度，大多是短句），比较三种做法的总计算量：全补到 512、补到最近的一档（分桶，bucketing）、一点不补。

# %% tags=["demo"]
WIDTH = 768  # of BERT-base


def layer_flops(tokens):
    """Operations of one encoder layer, a multiply-add counted as two; matrix products only."""
    projections, feed_forward = 8 * tokens * WIDTH**2, 16 * tokens * WIDTH**2
    return projections + feed_forward + 4 * tokens**2 * WIDTH


BUCKETS = np.array([64, 128, 256, 512])
lengths = np.clip(np.random.default_rng(7).lognormal(np.log(40), 0.8, 10_000), 8, 512).astype(np.int64)
exact = layer_flops(lengths).sum()
plans = {
    "全补到 512": layer_flops(np.full_like(lengths, 512)).sum() / exact,
    "分四档": layer_flops(BUCKETS[np.searchsorted(BUCKETS, lengths)]).sum() / exact,
}

fig, axes = plt.subplots(1, 2, figsize=(10, 4))
tokens = np.arange(8, 513, 8)
axes[0].plot(tokens, layer_flops(tokens) / 1e9, marker="", label="不填充")
axes[0].plot(tokens, layer_flops(BUCKETS[np.searchsorted(BUCKETS, tokens)]) / 1e9, marker="", drawstyle="steps-pre", label="分四档")
axes[0].plot(tokens, np.full(tokens.size, layer_flops(512) / 1e9), marker="", label="全补到 512")
axes[0].set_xlabel("句子长度（token）")
axes[0].set_ylabel("一层的计算量（GFLOP）")
axes[0].set_title("推算：填充让短句白算多少")
axes[0].legend()
axes[1].hist(lengths, bins=np.arange(0, 520, 16), color="#0072B2")
for edge in BUCKETS:
    axes[1].axvline(edge, color="#555555", linewidth=0.9, linestyle=":")
axes[1].set_xlabel("句子长度（token），虚线是四档的边界")
axes[1].set_ylabel("请求数")
axes[1].set_title("合成的一万个请求")
plt.show()
lab.say(
    f"推算：补到 512 以后，一个 8 token 的句子要做 **{layer_flops(512) / layer_flops(8):.0f} 倍**的计算。"
    "对这份合成流量，总计算量是不填充的 " + "，".join(f"{ratio:.1f} 倍（{name}）" for name, ratio in plans.items()) + "。",
    measured=False,
)

# %% [markdown]
# 三种做法，各有各的代价：
#
# - 全补到最长：只要一种尺寸，但短句白算许多；
# - 一点不补：不白算，但尺寸有几百种；
# - 分桶：白算一点，尺寸只有几种。流量不同，最合算的分法也不同，《每个形状一张图》一章会让你自己选。
#
# TensorRT 的**动态形状**让同一个引擎（engine，编译好的模型）在运行时接受不同的尺寸，不必为每种尺寸重新构建。
# 它靠的是**优化 Profile**（optimization profile）：为每个会变的维度（动态维度，dynamic dimension）写明最小、最优、最大三个尺寸，
# TensorRT 据此挑选内核、安排内存。
# 讲义提醒：这不是万能药。引擎是照着最优尺寸（opt）调的，实际尺寸离它远了可能变慢，
# 所以 opt 通常设成最常见、或最要紧的那个尺寸。慢多少、怎么选，《优化 Profile 的设计与管理》一章来量。

# %% [markdown]
# ## 两者放到一起
#
# 一边想把整个流程录下来反复重放，一边尺寸总在变。直接放到一起会怎样？
# 用 1024 个元素捕获一张图，再把 4096 个元素的新数据放进同一块显存，重放：

# %% tags=["demo", "gpu"]
with stream:
    data = cp.zeros(4096, cp.uint32)
small = record(partial(launch_chain, data[:1024], 3))  # data[:1024] is a view: the same memory, from the same address

fresh = np.arange(4096, dtype=np.uint32)
with stream:
    data.set(fresh)
small.launch(stream)
stream.synchronize()

after = data.get()
print("前 1024 个元素算对了：", np.array_equal(after[:1024], mixed(fresh[:1024], 3)))
print("其余的元素一个也没动：", np.array_equal(after[1024:], fresh[1024:]))

# %% [markdown]
# 没有报错，也没有算完。图记住了捕获时的**地址**和**块数**：新数据放在老地址，它看得见；多出来的元素，它不知道。
#
# 这就是两者放到一起的核心困难。讲义把它分成三项，每一项在后面都有专门的章节：
#
# | 挑战 | 讲义怎么说 | 要回答的问题 | 在哪里回答 |
# |:--|:--|:--|:--|
# | 捕获时机 | 捕获时引擎必须处于可执行的状态，输入、输出的内存地址必须固定 | 怎样才算“可执行”？新数据怎么送进固定的地址？ | 《捕获 TensorRT 推理》《静态缓冲与拷贝》 |
# | 形状适配 | 尺寸变化时要重新绑定内存、更新图的参数，执行上下文（execution context）要精细管理 | 每种尺寸一张图，还是更新同一张图？ | 《每个形状一张图》《形状变化时更新图》 |
# | 内存管理 | 动态形状让显存分配变复杂，要结合图的内存池（memory pool） | 一张图会占住哪些显存？能共用吗？ | 《执行上下文与显存》《内存池优化》 |
#
# 讲义里还有几句话，这一章没有条件验证，也先记成问题：
#
# | 讲义的说法 | 要回答的问题 | 在哪里回答 |
# |:--|:--|:--|
# | 一个模型通常有数百个内核 | 真实的引擎到底有多少个？ | 《捕获 TensorRT 推理》 |
# | 图“在 GPU 上实例化”成可重用的对象 | 实例化（instantiate）在哪里做，要花多少时间？ | 《CUDA 图优化概念》 |
# | GPU 按依赖关系自动调度 | 依赖从哪里来？不相干的内核会自动并行吗？ | 《CUDA 图优化概念》《多流捕获与图的生命周期》 |
# | 动态形状不必重新构建引擎 | 换一次尺寸，要付什么代价？ | 《动态形状》 |
# | Nsight Systems 能定位启动开销 | 时间线上看哪里？ | 《用 Nsight Systems 读时间线》 |

# %% [markdown]
# ## 四个误区，先变成四个问题
#
# 讲义列了初学者的四个误区。先别急着背结论，把它们当成问题，写下你的猜测，等实验来回答。
#
# ### 误区一：CUDA 图适用于所有场景
#
# 问题：如果每个请求的内核序列都不一样（比如代码里有许多分支），图录一次只用一次，还划算吗？
# 比三种做法：逐个启动；重放录好的图；每次都重新录，只放一遍。

# %% tags=["demo", "gpu"]
chain_100 = record(partial(launch_chain, x, LAYERS))


def capture_every_time():
    record(partial(launch_chain, x, LAYERS)).launch(stream)


eager_100, replay_100 = partial(launch_chain, x, LAYERS), partial(chain_100.launch, stream)
once = lab.compare_us(eager_100, replay_100, clock="end_to_end")
always = lab.compare_us(eager_100, capture_every_time, clock="end_to_end")
lab.say(
    lab.table(
        (f"{LAYERS} 个内核，端到端", "µs", "逐个启动的几倍"),
        [
            ("逐个启动", f"{once.first.median:.0f}", "1"),
            ("录好一次，只重放", f"{once.second.median:.0f}", f"{1 / once.ratio:.2f}"),
            ("每次重新录", f"{always.second.median:.0f}", f"{1 / always.ratio:.2f}"),
        ],
    )
    + "\n\n"
    + (
        "每次重新录，比不用图还慢。" if always.ratio < 0.95
        else "每次重新录，和不用图差不多。" if always.ratio < 1.05
        else "每次重新录，省不了多少。" if always.ratio < 1.2
        else "在这台机器上，每次重新录居然也不亏。"
    )
)

# %% [markdown]
# 录也要花时间：每次启动的代码照样走一遍，之后还要编成可以重放的图。重放省下的，录的时候又花掉了。
# 图适合**同一串内核反复执行**的场景，录一次、放许多次。
# 什么任务适合，怎么算回本的次数：《CUDA 图优化概念》；什么时候图毫无用处：《图何时无用》。
#
# ### 误区二：动态形状就是“无限灵活”
#
# 问题：给引擎一个超出范围的尺寸，会怎样？自动变慢，报错，还是悄悄算错？
#
# 讲义说，范围必须在构建引擎时由 Profile 指定，超出就报错；动态形状解决的是已知范围内的变化，不是任意尺寸。
# 报的是什么样的错、会不会被你的代码漏掉：《动态形状》一章用真实的引擎来试。
#
# ### 误区三：忽略 CPU 和 GPU 之间的数据传输
#
# 问题：图省的是启动开销。如果一次请求还要把数据拷进 GPU（host to device，H2D）、把结果拷回来（device to host，D2H），图还能省下百分之几？
# 让拷贝的数据越来越大，内核不变：

# %% tags=["demo", "gpu"]
def serve(work, there, sent, back):
    """One request: copy sent to the GPU, work(), copy the result back; returns when it has arrived."""
    there.set(sent, stream=stream)
    work()
    there.get(stream=stream, out=back)


rows, percents = [], []
for kib in (4, 256, 4096, 16384):
    sent = np.zeros(kib * 256, np.uint32)
    back = np.empty_like(sent)
    with stream:
        there = cp.zeros(sent.size, cp.uint32)
    copies = lab.end_to_end_us(partial(serve, lambda: None, there, sent, back), repeats=11)
    pair = lab.compare_us(
        partial(serve, eager_100, there, sent, back), partial(serve, replay_100, there, sent, back), clock="end_to_end", pairs=11
    )
    percents.append(100 * (1 - 1 / pair.ratio))
    rows.append((f"{kib:,}", f"{copies.median:.0f}", f"{pair.first.median:.0f}", f"{pair.second.median:.0f}", f"{percents[-1]:.0f}%"))
lab.say(
    lab.table(("来回各拷 KiB", "只拷贝 µs", "拷贝 + 逐个启动 µs", "拷贝 + 图 µs", "图省下"), rows)
    + f"\n\n拷贝从 4 KiB 涨到 16 MiB，图省下的比例从 **{percents[0]:.0f}%** 变成 **{percents[-1]:.0f}%**。"
)

# %% [markdown]
# 图没有变差：“拷贝 + 逐个启动”减去“拷贝 + 图”，每一行都差不多，是拷贝那一份变大了。
# 上面的图里只有内核，拷贝仍由 CPU 一次次发起，图管不到。（“只拷贝”是另外量的。拷贝占大头时，它和“拷贝 + 图”几乎一样长，谁大一点只是波动。）
#
# 拷贝其实也能录进图里，还能和计算重叠：《静态缓冲与拷贝》。
#
# ### 误区四：TensorRT 动态形状和 CUDA 图天然兼容
#
# 问题：刚才那张“只认 1024 个元素”的图，换成真实的引擎，会报错吗？要做哪些事才能让两者配合？
#
# 讲义说，要处理地址固定、参数更新等细节，不是简单叠加。实战篇八章专门解决这个问题；
# 不过最朴素的一种办法，今天的练习三你就会写出来。

# %% [markdown]
# ## 课程地图
#
# 学完整门课，你应当能够：
#
# - **说清 CUDA 图的机制**：捕获、实例化、执行各做什么，为什么能降低启动开销；
# - **配置 TensorRT 动态形状**：设置 Profile，绑定动态维度，知道什么时候不如用静态形状；
# - **把两者集成起来**：把动态形状的引擎放进捕获流程，解决工程里的兼容问题；
# - **分析和调优**：用 Nsight Systems 等工具找到启动开销，为动态形状的场景定出策略。
#
# 课程分四个模块，后面的用到前面的：

# %% tags=["demo"]
from launchlab import manifest

chapters = manifest.chapters()
lines = [f"共 {len(chapters)} 章：", ""]
for part in manifest.modules():
    titles = [chapter.title for chapter in chapters if chapter.module == part.id]
    lines.append(f"- **{part.title}**（{len(titles)} 章）：{part.about}。\\\n  {'　'.join(f'《{title}》' for title in titles)}")
lab.say("\n".join(lines), measured=False)

# %% [markdown]
# ## 练习怎么做，怎么评
#
# 每章有三四道练习，样子都一样：题目，两层折叠的提示，答题单元，测试单元。
#
# 1. 读题，先自己想。卡住了，点开第一层提示，它只问你一个问题；还不行，再点第二层，它告诉你用什么 API。
# 2. 在答题单元里删掉 `raise NotImplementedError("…")`，换成你的代码。函数名和参数不要改。没作答时看到的那句报错，说的就是下一步该想什么。
# 3. 依次运行答题单元和测试单元。通过的检查各显示一行 `✓`；没通过就显示 `✗ 没有通过` 和原因。测试单元不用改，改了也不算数，评分用的是原版。
# 4. 看得见的测试只是一部分。先保存笔记本（`Ctrl+S`），再到终端里、仓库的根目录下运行
#
#    ```
#    ./grader/launch check 1
#    ```
#
#    它在你自己的 GPU 上，用全部的测试给你存下的那份笔记本评分，想评几次就评几次。命令里的数字是章的编号，写文件夹的名字也行。
#
# 评分结果是一张表，每个测试一行，“结论”一列可能是：
#
# | 结论 | 意思 | 你可以做什么 |
# |:--|:--|:--|
# | 通过 | 做到了全部要求。加速题做到一半，会写明“部分通过”，得一半分 | 做下一题 |
# | 未通过 | 有一项检查不成立，或还没有作答 | “原因”一列说明哪里可能错了、该试什么 |
# | 无法判断 | 测了几轮，噪声太大，说不准快慢。不算错，也不算 0 分 | 关掉占用 GPU 和 CPU 的程序，再评一次 |
# | 崩溃 | 运行你的代码的进程退出了，或者内核访问了不该访问的显存 | 检查下标、块数、缓冲大小；别的练习不受影响 |
# | 超时 | 一道练习的时间用完了 | 找停不下来的循环或内核，或在等输入的 `input()` |
# | 需要 GPU | 这台机器没有 GPU，这一题没评，不算 0 分 | 换一台有 GPU 的机器再评 |
#
# ### 为什么评分器只信自己量到的
#
# 你在笔记本里自己测，是“开卷”：测试和你的代码在同一个进程里，方便，但不可靠。忘了同步，表会停得太早；算错的缓存，看上去快得惊人；
# 前面某一格留下的变量，会让缺了定义的代码照样能跑。这些多半是无心的，可谁也说不准。所以正式评分是“密封”的：
# 你的代码在单独的进程里（装了 bubblewrap 时还在沙箱里）从头运行一遍，只运行给定单元和答题单元；题目的数据在代码装好**以后**才抽取，
# 你的函数要在没见过的尺寸和数据上算对。
#
# 速度也由考官来量：用考官自己的钟，停表之前等整个设备做完；用考官自己的基线，和你的做法轮流上场；运行的次数是保密的，
# 每轮之后还要逐字节核对状态，少做一次都会露馅。它不看你的 GPU 是快是慢，只看**比值**：
# 在你的机器上、同一场考试里，比逐个启动快几倍，门槛也不会超过参考解答在你这台机器上所得的一半（最低 1.2 倍）。
# 这和本课程的主张是一回事：**不相信没有量过的快。**

# %% [markdown]
# ## 练习
#
# 三道练习，共 10 分。可以用前面**给定单元**里的名字：`np`、`partial`、`cp`、`stream`、`BLOCK`、`LAYERS`、
# `mix`、`layer`、`spin`、`launch_chain`、`launch_spin`、`record`，以及 NumPy 版的 `scrambled`、`mixed`、`layered`。练习三还会给出 `request`、`requested` 和 `in_turn`。
# 演示单元里的名字，评分时不存在。
#
# ### 练习一：预测总时间（3 分，不需要 GPU）
#
# 有一串内核，第 1 个要做 `kernels_us[0]` 微秒，第 2 个要做 `kernels_us[1]` 微秒……请预测全部做完的时刻。规则如下。
#
# **逐个启动**
#
# - 从 0 时刻起，CPU 一个接一个地启动，每次启动花 `launch_us`，中间不停，也不等 GPU。第 1 个内核在 `launch_us` 时交到 GPU 手里，第 2 个在 `2 × launch_us` 时……
# - GPU 按次序做，一次只做一个。一个内核**交到了**，并且**前一个做完了**，就立刻开始。
#
# **图**
#
# - CPU 只花一次 `graph_us`，全部内核同时交到；GPU 从那时起一个接一个地做，中间没有空隙。
#
# 例如 `launch_us = 5`、`kernels_us = [2, 12, 3]`、`graph_us = 4`，画出来是这样：

# %% tags=["demo"]
EXAMPLE = {  # (begin, length) of each step, µs
    "逐个启动": ([(0, 5), (5, 5), (10, 5)], [(5, 2), (10, 12), (22, 3)]),
    "图": ([(0, 4)], [(4, 2), (6, 12), (18, 3)]),
}
fig, axes = plt.subplots(2, 1, sharex=True, figsize=(9, 3.6))
for ax, (name, spans) in zip(axes, EXAMPLE.items(), strict=True):
    for height, bars, color in ((1, spans[0], "#D55E00"), (0, spans[1], "#0072B2")):
        ax.broken_barh(bars, (height - 0.35, 0.7), color=color, edgecolor="white")
    end = sum(spans[1][-1])
    ax.annotate(f"{end} µs", (end, 0), xytext=(6, 0), textcoords="offset points", va="center")
    ax.set_yticks([0, 1], ["GPU 执行", "CPU 提交"])
    ax.set_title(name)
axes[1].set_xlabel("时间（µs）")
axes[1].set_xlim(0, 28)
plt.show()

# %% [markdown]
# 写 `predict(launch_us, kernels_us, graph_us)`，返回两个数：逐个启动时最后一个内核做完的时刻，和用图时最后一个内核做完的时刻。
# 内核至少有一个，长短可以各不相同。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 盯着第 3 个内核：它交到的时刻是 15，为什么 22 才开始？再盯着第 2 个：前一个 7 就做完了，为什么 10 才开始？
# 一个内核的开始时刻，由哪两个时刻决定？
#
# 再想一想：把 `[2, 12, 3]` 换成 `[12, 2, 3]`，总时间会变吗？如果会，只看总和或最大值的公式就不够用。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 只需要 `for` 循环、`max(a, b)` 和 `sum(list)`。循环里随手记住两个时刻：这个内核何时交到，上一个内核何时做完。
# 两个数一起返回：`return a, b`。
#
# </details>

# %% solution="predict"
def predict(launch_us, kernels_us, graph_us):
    """Predict when a chain of kernels is done: (launched one by one, replayed as a graph), µs.

    launch_us: CPU time of one launch. kernels_us: list of the kernels' times on the GPU, at least one.
    graph_us: CPU time of one graph launch. Times are not negative, and counted from the first launch's begin.
    """
    ### BEGIN SOLUTION: 一个内核何时开始，取决于它何时交到、前一个何时做完；从第一个起逐个推下去
    handed_over = done = 0.0
    for kernel_us in kernels_us:
        handed_over += launch_us
        done = max(handed_over, done) + kernel_us
    return done, graph_us + sum(kernels_us)
    ### END SOLUTION


# %% test="predict" kind="answer" points=3
both_us = student.predict(5, [2, 12, 3], 4)
check.that(isinstance(both_us, (list, tuple)) and len(both_us) == 2, why="predict 要返回两个数：逐个启动的时刻，用图的时刻。")
one_by_one_us, as_graph_us = both_us
check.equal(one_by_one_us, 25, abs=1e-6, why="这就是图上画的例子，逐个启动应当在 25 µs 做完。对照图，看第 2、第 3 个内核各在等谁。")
check.equal(as_graph_us, 21, abs=1e-6, why="这就是图上画的例子，用图应当在 21 µs 做完：一次图启动 4，加上 GPU 的 2 + 12 + 3。")
one_by_one_us, as_graph_us = student.predict(5, [12, 2, 3], 4)
check.equal(one_by_one_us, 22, abs=1e-6, why="同样三个内核，长的排在最前面，它做的时候 CPU 已把后面的都交出去了，应当是 22 µs。次序会影响结果。")
one_by_one_us, as_graph_us = student.predict(5, [1] * 10, 4)
check.equal(one_by_one_us, 51, abs=1e-6, why="10 个 1 µs 的内核：CPU 交完最后一个是 50 µs，GPU 再做 1 µs。GPU 的活大都藏在 CPU 提交的时间里，不要再加一遍。")
check.equal(as_graph_us, 14, abs=1e-6, why="用图时 CPU 只花一次 graph_us，与内核的个数无关。")
### BEGIN HIDDEN TESTS
def rule(launch, kernels, graph):
    # The last kernel is done when the latest of these is: hand over the k-th, then do it and all after it without a pause.
    late = max((k + 1) * launch + sum(kernels[k:]) for k in range(len(kernels)))
    return late, graph + sum(kernels)


def eighths(low, high, size):
    """Random whole eighths, so that sums are exact."""
    return [float(v) / 8 for v in secret.integers(low * 8, high * 8, size)]


def case_of(kernels):
    return eighths(2, 12, 1)[0], kernels, eighths(1, 30, 1)[0]


# All short, all long, mixed; then one long kernel first, last and in between.
drawn = [case_of(eighths(low, high, int(secret.integers(8, 40)))) for low, high in ((0, 2), (20, 60), (0, 20), (0, 20))]
tiny = eighths(0, 2, 20)
drawn += [case_of([*tiny[:k], 90.0, *tiny[k:]]) for k in (0, 7, 20)]
check.equal([student.predict(*case)[0] for case in drawn], [rule(*case)[0] for case in drawn], abs=1e-6, why="换一串长短不一的内核，逐个启动的时间就不对了。每个内核都要比较“何时交到”和“前一个何时做完”，不能只看总和、平均值或最大值。")
check.equal([student.predict(*case)[1] for case in drawn], [rule(*case)[1] for case in drawn], abs=1e-6, why="换一组数字，用图的时间就不对了：一次 graph_us，加上全部内核的时间。")
check.equal(student.predict(6.5, [0.25], 9), (6.75, 9.25), abs=1e-6, why="只有一个内核时不对：它也要先交到，再执行。")
### END HIDDEN TESTS

# %% [markdown]
# 做完了？现在让你的函数预测你自己的 GPU。
#
# 下面只在“空转 0 µs”时量三个数：启动一次多久，一个空内核多久，图启动一次多久。
# 其余各种时长全靠 `predict` 推算，再与实测画在一起。（没作答之前，这一格会显示你的答题单元里那句报错。）

# %% tags=["demo", "gpu"]
REPEATED = 50
DURATIONS = (0, 1, 2, 4, 8, 16, 32)


def spins(durations):
    for us in durations:
        launch_spin(us)


empty_graphs = [record(partial(spins, [0] * n)) for n in (10, REPEATED)]
pair = lab.compare_us(*(partial(graph.launch, stream) for graph in empty_graphs), clock="end_to_end")
empty_us = (pair.second.median - pair.first.median) / (REPEATED - 10)
graph_us = pair.second.median - REPEATED * empty_us
launch_us = lab.submit_us(partial(spins, [0] * REPEATED)).median / REPEATED

predicted, measured = [], []
for us in DURATIONS:
    chain = [us] * REPEATED
    predicted.append(predict(launch_us, [empty_us + each for each in chain], graph_us))
    pair = lab.compare_us(partial(spins, chain), partial(record(partial(spins, chain)).launch, stream), clock="end_to_end")
    measured.append((pair.first.median, pair.second.median))
predicted, measured = np.array(predicted), np.array(measured)

fig, ax = plt.subplots()
for column, (way, color, line, marker) in enumerate(zip(WAYS, ("#0072B2", "#D55E00"), ("-", "--"), ("o", "s"), strict=True)):
    ax.plot(DURATIONS, predicted[:, column], color=color, marker="", linestyle=line, label=f"{way}：predict 的预测")
    ax.plot(DURATIONS, measured[:, column], color=color, marker=marker, linestyle="", label=f"{way}：实测")
ax.axvline(max(0.0, launch_us - empty_us), color="#555555", linewidth=0.9, linestyle=":", label="内核与启动一样久")
ax.set_xlabel("每个内核要求空转的时间（µs）")
ax.set_ylabel(f"{REPEATED} 个内核的端到端时间（µs）")
ax.set_title(f"三个数，预测一条线（{lab.gpu_name()}）")
ax.legend()
plt.show()
errors = np.abs(predicted / measured - 1).max(axis=0)
lab.say(
    f"量到的三个数：启动一次 {launch_us:.1f} µs，空内核 {empty_us:.1f} µs，图启动（连同最后的等待）{graph_us:.1f} µs。"
    f"预测与实测最多相差：逐个启动 {errors[0]:.0%}，图 {errors[1]:.0%}。"
)

# %% [markdown]
# 竖线左边（如果有），启动比内核久，逐个启动的线几乎是平的：时间由 CPU 决定，GPU 快慢无所谓。右边，内核比启动久，两条线靠拢：图再也省不下多少。
#
# 模型当然不是全部：它没有算最后的等待，也没有算逐个启动时内核与内核之间的间隙。差多少，以你自己的图为准。
# 要是左边有几个点离线很远，高也好，低也好，那多半是启动的单价中途变了：它会一阵一阵地变，而三个数是在另一刻量的；
# 别的程序也在用这块 GPU 或 CPU 的时候更是这样。关掉它们，隔一会儿再运行一遍。
#
# 《内核启动开销分析》一章会把它拟合得更细。

# %% [markdown]
# ### 练习二：自己启动一串内核（3 分）
#
# 模型里，一层的输出是下一层的输入。`layer` 就是这样：从 `src` 读，往 `dst` 写。它的每个输出都要用到两个输入，所以不能就地改写。
# 常见的办法是两块缓冲轮流用：第 1 层从 `x` 读、写进 `y`；第 2 层从 `y` 读、写回 `x`；第 3 层又从 `x` 到 `y`……
#
# 写 `run_layers(x, y, n, queue)`，把 `n` 层依次启动：
#
# - 第 `i` 层（从 0 数起）启动一次 `layer`，参数依次是 `src`、`dst`、序号 `i`、元素个数 `size`；
# - 数组可以是任意长度，**不一定**是 `BLOCK` 的整数倍，也可能比一块还小。每个元素都要有一个线程；多出来的线程会自己跳过；
# - 所有启动都放进参数给的那条流 `queue`，不要放进别的流；
# - 交完就返回，不要同步，也不要新建数组或拷贝；
# - 返回放着最终结果的那个数组（`x` 或 `y` 本身），`n` 至少是 1。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 1000 个元素，每块 256 个线程，要几块？3 块只有 768 个线程，够吗？`launch_chain` 里的 `x.size // BLOCK` 为什么在这里不能照抄？
#
# 每做完一层，“从哪里读”和“往哪里写”就互换一次。循环结束的时候，刚写完的那一块现在叫什么名字？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 启动：`layer((块数,), (BLOCK,), (src, dst, np.uint32(i), np.uint32(size)))`，写在 `with queue:` 里就进了那条流。
# 整数除法向上取整：`-(-a // b)`，或者 `(a + b - 1) // b`。元素个数是 `x.size`。
# 交换两个名字：`a, b = b, a`。
#
# </details>

# %% solution="run_layers" tags=["gpu"]
def run_layers(x, y, n, queue):
    """Launch n layers on the stream queue, from x to y, from y to x, and so on; returns without waiting.

    x, y: cupy uint32, 1-D, of one size (any size >= 1); x holds the input. n: at least 1.
    Returns x or y, whichever the last layer wrote.
    """
    ### BEGIN SOLUTION: 先算要几块才能让每个元素都有线程，再在 queue 上逐层启动，每层之后交换“读”和“写”
    blocks = -(-x.size // BLOCK)
    src, dst = x, y
    with queue:
        for i in range(n):
            layer((blocks,), (BLOCK,), (src, dst, np.uint32(i), np.uint32(x.size)))
            src, dst = dst, src
    return src
    ### END SOLUTION


# %% test="run_layers" kind="structure" points=3 tags=["gpu"]
queue = student.value("stream")  # any stream would do: here, the one given above
given = np.arange(7, 1007, dtype=np.uint32)
front, back_buffer = on_gpu(given), on_gpu(np.zeros_like(given))
check.equal(student.run_layers(front, back_buffer, 1, queue), reference.layered(given, 1), why="做一层，返回的数组不对。1000 不是 256 的整数倍，最后那几个元素有线程吗？返回的是写好的那一块吗？")
check.equal(front.read(), given, why="只做一层时 x 是输入，不应当被改写：第 1 层从 x 读，往 y 写。")
check.equal(student.run_layers(front, back_buffer, 2, queue), reference.layered(given, 2), why="做两层，返回的数组不对。第 2 层读的是第 1 层的输出吗？序号是 0、1 吗？两层以后，结果在哪一块里？")
check.equal(back_buffer.read(), reference.layered(given, 1), why="做完两层以后，y 里应当留着第 1 层的输出。两块缓冲要轮流读写。")
### BEGIN HIDDEN TESTS
even, odd = 2 * int(secret.integers(2, 9)), 2 * int(secret.integers(2, 9)) + 1
short, whole, uneven = int(secret.integers(2, 256)), 256 * int(secret.integers(2, 9)), 256 * int(secret.integers(9, 20)) + int(secret.integers(1, 256))
large = int(secret.integers(1_100_000, 1_500_000))
for length, depth in ((short, even), (whole, odd), (uneven, even), (uneven, odd), (1, 3), (large, 2)):
    given = secret.integers(0, 2**32, length, dtype=np.uint32)
    front, back_buffer = on_gpu(given), on_gpu(np.zeros_like(given))
    back_buffer.poison()
    check.equal(student.run_layers(front, back_buffer, depth, queue), reference.layered(given, depth), why="换了数组的长度或层数，返回的结果不对。块数向上取整了吗？size 传的是元素个数吗？层数是奇数和偶数时，返回的都是最后写的那一块吗？")
    last, before_last = (back_buffer, front) if depth % 2 else (front, back_buffer)
    both = np.stack([last.read(), before_last.read()])
    check.equal(both, np.stack([reference.layered(given, k) for k in (depth, depth - 1)]), why="返回的数组是对的，可 x 和 y 里不是最后两层的输出：请直接用这两块缓冲轮流读写，不要新建数组，也不要拷贝。")
# Whatever lands on the stream given is recorded here, whatever does not, or waits, shows: waiting for the notebook's own stream too.
RECORDED = """
def recorded(run, x, y, n, own):
    import contextlib
    import cupy
    failure = cupy.cuda.runtime.CUDARuntimeError
    given, graphs, refused = cupy.cuda.Stream(non_blocking=True), [], False
    own.begin_capture()
    given.begin_capture()
    try:
        run(x, y, n, given)
    except failure:
        refused = True
    finally:
        for each in (own, given):
            with contextlib.suppress(failure):
                graphs.append(each.end_capture())
    return None if refused or len(graphs) < 2 else graphs[1]
"""
length, depth = int(secret.integers(300, 2000)), int(secret.integers(4, 12))
given = secret.integers(0, 2**32, length, dtype=np.uint32)
front, back_buffer = on_gpu(given), on_gpu(np.zeros_like(given))
chain_found = student.define(RECORDED, "recorded")(student.value("run_layers"), front, back_buffer, depth, queue)
check.that(chain_found is not None, why="把另一条流传给 run_layers，并让它和笔记本里的 stream 都处于捕获状态，就出错了：函数里是不是等待了 GPU（synchronize、get），或者新建、拷贝了数组？这道题只要求把任务交出去。")
check.nodes(chain_found, kernels=depth, total=depth, edges=depth - 1, why="在参数给的那条流里，没有正好看到 n 次启动。有的启动是不是放进了别的流（例如全局的 stream，或默认流）？或者多做了拷贝？")
check.equal(front.read(), given, why="有工作没有放进参数给的那条流，自己先执行了。")
chain_found.run(1)
check.equal((back_buffer if depth % 2 else front).read(), reference.layered(given, depth), why="放进参数给的那条流以后，结果不对。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：尺寸会变，每种只录一次（4 分）
#
# 一个请求要在 `x` 的前 `size` 个元素上做 `LAYERS` 次 `mix`。逐个启动的做法，就是下面给定的 `request`。请求的尺寸会变，但同样的尺寸会一再出现。
#
# 前面看到：一张图只认一种尺寸；每次都重新录，多半省不下时间，还可能更慢（看误区一里你自己的表）。那么，**每种尺寸第一次出现时录一次，以后只重放**。
#
# 写一个类 `Player`：
#
# - `Player(x)` 记住缓冲 `x`，只做准备，不改动 `x`；
# - `player(size)` 处理一个请求，效果与 `request(x, size)` 完全相同，也一样不等 GPU。`size` 是 `BLOCK` 的整数倍，不超过 `x.size`；
# - 第一次遇到的尺寸也要处理：请求一个都不能丢，也不能做两遍；
# - `x` 里的数据随时可能被别人就地改写，要用**当时**的数据；
# - 不同的 `Player` 各管各的 `x`；
# - 图在 `stream` 上重放；捕获用给定的 `record`。
#
# 还要快：五到八种尺寸（几种、各多大，计时的时候才定）的请求轮流来，端到端时间（停表前等整个设备做完）不超过逐个启动的**一半**。
# 不计时的测试里，尺寸还要多些，而且以前的尺寸随时会再来：录过的图都要留着，扔掉哪一张，再遇到它就得重录。
# 如果参考解答在你的机器上快不到 4 倍，门槛就降到它的倍数的一半，最低 1.2 倍；差一点的，得一半分。
# 在笔记本里运行测试时，手边没有参考解答，只能拿你自己的答案充当，快慢可能判得不准；以 `./grader/launch check 1` 的结论为准。

# %% tags=["gpu"]
def request(x, size):
    """Serve one request by single launches: LAYERS rounds of mix on the first size elements of x, on `stream`."""
    launch_chain(x[:size], LAYERS)


# %% [markdown]
# `x[:size]` 是视图（view）：不拷贝，只是“从 `x` 的地址开始的 `size` 个元素”。下面是 NumPy 版的正确答案，
# 和一个测试要用的小工具：`in_turn(player, [512, 1024])` 返回一个函数，调用它一次，就依次处理这些尺寸的请求。

# %%
def requested(x, size):
    """Return x (numpy uint32, 1-D) after one request of that size; x stays as it is."""
    return np.concatenate([mixed(x[:size], LAYERS), x[size:]])


def in_turn(serve, sizes, *before):
    """Return a function of no arguments; a call of it serves requests of these sizes, one after the other."""

    def work():
        for size in sizes:
            serve(*before, size)

    return work


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 来了一个尺寸，你想知道“这种尺寸录过没有，录过的话图在哪里”。Python 里哪种容器最适合按键查找？它该放在哪里，才不会被另一个 `Player` 共用？
#
# 还有：捕获的时候，内核执行了吗？那么第一次遇到某个尺寸，录完以后还差什么？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `record(work)` 捕获 `work()` 往 `stream` 里放的工作，返回图；`work` 不带参数，可以用 `partial(request, x, size)` 做一个。
# 重放：`graph.launch(stream)`。字典（`dict`）：`key in d`、`d[key] = value`；在 `__init__` 里建，每个对象就各有一个。
#
# </details>

# %% solution="Player" tags=["gpu"]
class Player:
    """Serves requests of varying size on one buffer: captures each size once, and replays it ever after.

    x: cupy uint32, 1-D, its size a multiple of BLOCK; requests change it in place.
    """

    def __init__(self, x):
        ### BEGIN SOLUTION: 记住 x，再准备一个能按尺寸找到图的地方
        self.x = x
        self.graphs = {}
        ### END SOLUTION

    def __call__(self, size):
        """Serve one request, like request(x, size), without waiting. size: a multiple of BLOCK, at most x.size."""
        ### BEGIN SOLUTION: 这种尺寸录过吗？没录过先录下来；无论录没录过，都要重放一次
        if size not in self.graphs:
            self.graphs[size] = record(partial(request, self.x, size))
        self.graphs[size].launch(stream)
        ### END SOLUTION


# %% test="Player_result" kind="structure" points=2 tags=["gpu"]
want = np.arange(1024, dtype=np.uint32)
served = on_gpu(want)
player = student.Player(served)
check.equal(served.read(), want, why="还没有请求，x 就变了。Player(x) 只做准备。")
student.in_turn(player, [512]).run(1)
want = reference.requested(want, 512)
check.equal(served.read(), want, why="第一个请求的结果不对。捕获只记录、不执行，录完以后还要重放一次，也不要又逐个启动、又重放；只有前 size 个元素该变。")
student.in_turn(player, [512, 1024, 512]).run(1)
for requested_size in (512, 1024, 512):
    want = reference.requested(want, requested_size)
check.equal(served.read(), want, why="换了尺寸，结果不对。一张图只认捕获时的尺寸：每种尺寸要有自己的图。")
### BEGIN HIDDEN TESTS
several = [256 * int(k) for k in secret.permutation(np.arange(1, 17))[:4]]
wants = [secret.integers(0, 2**32, 4096, dtype=np.uint32) for _ in range(2)]
buffers = [on_gpu(w) for w in wants]
players = [student.Player(b) for b in buffers]
for _ in range(3):
    for which in (0, 1):
        order = [several[int(k)] for k in secret.integers(0, 4, 5)]
        student.in_turn(players[which], order).run(1)
        for requested_size in order:
            wants[which] = reference.requested(wants[which], requested_size)
    check.equal(np.stack([each.read() for each in buffers]), np.stack(wants), why="两个 Player 各有各的 x，请求的尺寸也变来变去，结果不对。图记住的是地址：两个 Player 的图是不是混用了？有没有丢掉或重做了请求？")
    wants = [each.write(secret.integers(0, 2**32, 4096, dtype=np.uint32)) for each in buffers]
# Of many sizes, all seen before, three things are asked. First: while the stream is capturing, a graph cannot be launched, single kernels can.
SUBMITTED = """
def submitted(player, size, stream):
    import contextlib
    import cupy
    from cuda.bindings import runtime
    failure, graph, refused = cupy.cuda.runtime.CUDARuntimeError, None, False
    stream.begin_capture()
    try:
        player(size)
    except failure:
        refused = True
    finally:
        with contextlib.suppress(failure):
            graph = stream.end_capture()
        runtime.cudaGetLastError()
    if refused or graph is None:
        return None
    return int(runtime.cudaGraphGetNodes(runtime.cudaGraph_t(int(graph.graph)), 0)[-1])
"""
# Second: where mix does nothing any more, only what was recorded before can do the work.
WITHOUT_MIX = """
def without_mix(work, launch_chain):
    names = launch_chain.__globals__
    kept = names["mix"]
    names["mix"] = lambda *args, **kwargs: None
    try:
        work()
    finally:
        names["mix"] = kept
"""
# Third: behind a kernel that keeps the stream busy, a request comes back while it still does. A pause of this process may look like waiting: tried again.
WAITED = """
def waited(player, sizes, stream, launch_spin):
    import cupy
    behind = cupy.cuda.Event()
    for us in (20_000, 80_000, 320_000):
        stream.synchronize()
        launch_spin(us)
        behind.record(stream)
        for size in sizes:
            player(size)
        if not behind.done:
            stream.synchronize()
            return False
    return True
"""
many = [256 * int(k) for k in secret.permutation(np.arange(1, 33))[: int(secret.integers(12, 21))]]
start = secret.integers(0, 2**32, 8192, dtype=np.uint32)
mine, spare = on_gpu(start), on_gpu(start)
player, trusted = student.Player(mine), reference.Player(spare)
for turns in (many * 3, many[::-1]):
    student.in_turn(player, turns).run(1)
    reference.in_turn(trusted, turns).run(1)
check.equal(mine.read(), spare.read(), why="同一种尺寸来第二次、第三次，结果不对。有没有丢掉或重做了请求？或者有工作没有放进 stream？")
theirs = [student.define(SUBMITTED, "submitted")(player, each, student.value("stream")) for each in many[:4]]
right = [reference.define(SUBMITTED, "submitted")(trusted, each, reference.value("stream")) for each in many[:4]]
check.that(theirs == right, why="处理见过的尺寸，应当只往 stream 里放一次图启动。你的 Player 放进去的不是这样：是不是仍然逐个启动内核，或者用了别的流？")
check.equal(mine.read(), spare.read(), why="stream 处于捕获状态时处理见过的尺寸，x 却变了：有工作没有放进 stream。")
again = [many[int(k)] for k in secret.permutation(len(many))]
student.define(WITHOUT_MIX, "without_mix")(student.in_turn(player, again), student.value("launch_chain"))
reference.in_turn(trusted, again).run(1)
check.equal(mine.read(), spare.read(), why="许多种尺寸都来过以后，把 mix 换成什么也不做的函数，再来一轮：录过的图照样能算，结果却不对。见过的尺寸是不是又录了一遍，或者仍然逐个启动？每种尺寸的图都要留着，不要只留最近的几张。")
check.that(
    student.define(WAITED, "waited")(player, many[:1], student.value("stream"), student.value("launch_spin")) is False,
    why="stream 里前面的任务还没有做完，处理见过的尺寸就应当返回，你的 Player 却等到它做完才返回：是不是同步了（synchronize、get）？请求只管把图启动放进队里。",
)
### END HIDDEN TESTS

# %% test="Player_speed" kind="speedup" points=2 tags=["gpu"]
TURNS = [256 * int(k) for k in secret.permutation(np.arange(1, 17))[: int(secret.integers(5, 9))]]  # five to eight sizes
initial = secret.integers(0, 2**32, 4096, dtype=np.uint32)
theirs, base, own = on_gpu(initial), on_gpu(initial), on_gpu(initial)
check.speedup(
    student.in_turn(student.Player(theirs), TURNS),
    over=reference.in_turn(reference.value("request"), TURNS, base),
    best=reference.in_turn(reference.Player(own), TURNS),
    state=(theirs, own),
    at_least=2.0,
    why="还不够快。几种尺寸轮流来，每个请求应当只有一次图启动：是不是每次都在捕获？是不是只留着最近几种尺寸的图，换回来又要重录？",
)
### BEGIN HIDDEN TESTS
want = theirs.write(secret.integers(0, 2**32, 4096, dtype=np.uint32))
runs = int(secret.integers(2, 9))
again = student.Player(theirs)
student.in_turn(again, TURNS * runs).run(1)
for requested_size in TURNS * runs:
    want = reference.requested(want, requested_size)
check.equal(theirs.read(), want, why="计时以后换一份数据再处理，结果不对：快，但没有做完该做的工作。")
### END HIDDEN TESTS

# %% [markdown] tags=["instructor"]
# 给教师：练习一的隐藏测试用另一种写法算同一条规则（对每个 k 求“交到第 k 个，然后一口气做完其余”的最大值），
# 长内核放在开头、中间、结尾都有，所以“总和”“平均”“最大值”一类的公式都会露馅。
# 练习二的隐藏测试把一条处于捕获状态的新流传给 `run_layers`，笔记本里的 `stream` 也同时在捕获：落在别的流里的启动不会进图，同步哪一条都会报错。
# 练习三的隐藏测试先让十几种尺寸都来过几次，再问三件事：`stream` 处于捕获状态时，图启动会被驱动拒绝，逐个启动却会被记下（要与参考解答相同）；
# 把 `mix` 换成什么也不做的函数，只有录好的图还能算对，重新捕获、只留几张图的写法都会露馅；用 `spin` 堵住 `stream`，调用要在它做完之前返回，同步的写法过不去。
# 三问里有一问过不去，结果正确也不得分。计时用五到八种尺寸轮流，几种、各多大都是抽的：只缓存最近几张图的写法速度不够。

# %% [markdown]
# 你刚才写的 `Player`，就是“每个形状一张图”的雏形：键是尺寸，值是图。真实的引擎还要考虑地址、Profile、显存上限和淘汰，
# 《每个形状一张图》一章会回到这里。

# %% [markdown]
# ## 小结
#
# | 以前的说法 | 实验以后的说法 |
# |:--|:--|
# | 换更快的 GPU，推理就会快 | 内核比启动还短时，时间由 CPU 决定，GPU 再快也是等 |
# | 每次启动都是一次系统调用 | 是一次库调用，通常几乎全在用户态；但每个内核都要付一份 |
# | 图把 $O(N)$ 降到 $O(1)$ | 降的是 CPU 的启动开销；墙钟时间里 GPU 的那一份仍随 N 增长 |
# | 启动开销可能超过计算 | 对短内核确实如此；数据大到一定程度就反过来，以自己的表为准 |
# | 尺寸变了，图照样能放 | 图记住地址和块数，不报错，也不会多算；每种尺寸要有自己的图 |
# | 有图就快 | 每次重新录反而可能更慢；拷贝占大头时，省下的比例就小了 |
#
# **带走三句话**
#
# 1. CPU 和 GPU 同时在忙，谁慢谁说了算；先问“谁在等谁”，再谈优化。
# 2. 图省的是 CPU 一次次吩咐的时间。录一次、放许多次，才划算。
# 3. 尺寸会变是常态。填充、分桶、每种尺寸一张图，都是拿一种代价换另一种代价，要算，也要量。
#
# **带着两个问题往下学**：在你自己的项目里，一次推理有多少个内核，平均每个多久？（估个数，代进 `predict`，看图能省多少。）
# 输入的尺寸常变吗，常见的有几种？
#
# 下一步：《CUDA 执行模型》讲清楚网格、块、流和事件，以及怎样计时才经得起推敲。
