# %% [markdown]
# # CUDA 执行模型
#
# 有人给自己的推理程序计时：推理只要一毫秒出头，把结果拷回 CPU 却要一百多毫秒。他花了两天优化拷贝，毫无起色。
#
# 拷贝其实很快。错的是那块表：推理只是“吩咐下去了”，GPU 还在干活；拷贝要等它干完，于是替它背了黑锅。
#
# 后面每一章都要比较“谁更快”。这一章先把两件事弄扎实：**一次启动之后到底发生了什么，以及怎样计时才经得起追问。**
#
# **学完以后，你能够**
#
# - 说出网格（grid）、线程块（block）、SM 各是什么，算出一次启动要分几波做完；
# - 分清“调用返回了”和“GPU 做完了”，用流（stream）和事件（event）安排先后；
# - 用 CuPy、`cuda.bindings`、`cuda.core` 三种方式发起同一次启动，知道每一层多花了什么；
# - 写出一个可靠的计时函数，并一眼认出几种常见的错表。
#
# **需要的基础**：《课程导入》里启动一串内核的代码。会写 Python 和 NumPy 就够，不要求写过 CUDA C++。
#
# **时间**：约 75 分钟，其中四道练习约 35 分钟。
#
# 演示单元只做实验，评分时不运行；练习开头会列出评分时可以用的名字。

# %%
import numpy as np
from functools import partial
from launchlab import lab
from launchlab.exam import check, on_gpu, reference, secret, student

lab.here()

# %% [markdown]
# 上面最后一行导入的五个名字是评分用的，读懂练习的测试单元时才会碰到，现在不用管。
#
# 下面是本章的三个小内核（kernel，在 GPU 上运行的函数）和启动它们的函数，先认识一下：
#
# - `mix`：把数组里的每个 32 位整数“搅拌”一轮。漏做一轮、多做一轮、换了顺序，结果都会不同，适合用来验证该做的真的做了。
# - `spin`：每个 block 空转一段给定的时间。我们事先就知道它该花多久，所以它是检验钟表的标准件。
# - `trace`：和 `spin` 一样空转，另外让每个 block 记下自己在哪个 SM 上、几点开始、几点结束。
#
# 内核里的 `%globaltimer` 是 GPU 自己的时钟，单位是纳秒（有些型号每微秒才走一格）；`%smid` 是当前 SM 的编号。

# %% tags=["gpu"]
import ctypes

import cupy as cp
import cupyx
from cuda.bindings import driver
from cuda.bindings import runtime as cudart

SOURCE = r"""
extern "C" __global__ void mix(unsigned int *x, unsigned int i, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    unsigned int v = x[t];
    v ^= v >> 15;
    v *= 0x2c1b3c6du;
    v ^= v >> 12;
    v += i;
    x[t] = v;
}

__device__ unsigned long long now_ns() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

extern "C" __global__ void spin(unsigned long long ns) {
    if (threadIdx.x == 0) {
        unsigned long long start = now_ns();
        while (now_ns() - start < ns) {}
    }
    __syncthreads();  // the other threads of the block stay until the first one is done
}

extern "C" __global__ void trace(unsigned long long ns, unsigned int *sm,
                                 unsigned long long *begin, unsigned long long *end) {
    if (threadIdx.x == 0) {
        unsigned int id;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
        unsigned long long start = now_ns(), now = start;
        while (now - start < ns) now = now_ns();
        sm[blockIdx.x] = id;
        begin[blockIdx.x] = start;
        end[blockIdx.x] = now;
    }
    __syncthreads();
}
"""
module = cp.RawModule(code=SOURCE)
mix, spin, trace = (module.get_function(name) for name in ("mix", "spin", "trace"))

# non_blocking=True: this stream and the default stream do not wait for each other (more on that below).
stream = cp.cuda.Stream(non_blocking=True)
BLOCK = 256  # threads per block


def launch_mix(x, i):
    """Launch one round of mix with index i on x (cupy uint32, 1-D), on the current stream. Returns at once."""
    blocks = -(-x.size // BLOCK)  # x.size / BLOCK, rounded up
    mix((blocks,), (BLOCK,), (x, np.uint32(i), np.uint32(x.size)))


def launch_spin(us, blocks=1, threads=32):
    """Launch `blocks` blocks of `threads` threads that each spin us microseconds, on the current stream. Returns at once."""
    spin((blocks,), (threads,), (np.uint64(us * 1000),))


def eager_chain(x, n):
    """Launch n rounds of mix on x, one launch after the other, indices 0 … n-1, on `stream`. Returns at once."""
    with stream:
        for i in range(n):
            launch_mix(x, i)


# The first launch of a kernel loads its code: get that over with.
with stream:
    launch_mix(cp.zeros(BLOCK, cp.uint32), 0)
    launch_spin(1)
stream.synchronize()

# %% [markdown]
# 还要一个 NumPy 版的 `mix`，好知道正确答案是什么（这一格不需要 GPU）。

# %%
def mixed(x, n, first=0):
    """Return x (numpy uint32) after n rounds of mix with indices first, first + 1, …; x stays as it is."""
    v = x.copy()
    for i in range(first, first + n):
        v ^= v >> np.uint32(15)
        v *= np.uint32(0x2C1B3C6D)
        v ^= v >> np.uint32(12)
        v += np.uint32(i)
    return v


# %% [markdown]
# ## 一次启动，谁来干活
#
# `mix((blocks,), (BLOCK,), …)` 里的前两个参数，说的是派多少人、怎么分组：
#
# - 最小的干活单位是线程（thread），每 32 个线程捆成一个 warp，由硬件一起调度；
# - 若干线程组成一个线程块，本章直接写 block；
# - 一次启动的全部 block 组成网格。
#
# GPU 这一边，干活的地方叫 SM（streaming multiprocessor，流式多处理器），一块 GPU 有几个到一百多个。分配的规矩只有三条：
#
# 1. 一个 block 整个放进一个 SM，做完之前不搬家；
# 2. 一个 SM 可以同时驻留（resident）好几个 block，直到线程、寄存器或共享内存不够，或者 block 的个数到了上限；
# 3. 全部 SM 都放满了，剩下的 block 就排队，谁腾出位置谁进。
#
# 第 3 条的结果是：block 一波（wave）一波地做。先在纸上演一遍：假想的 GPU 有 4 个 SM，每个能驻留 2 个 block，
# 一次启动 19 个 block，每个做 1 个单位时间。猜一猜：要多久做完？最后一波有几个 SM 在忙？

# %% tags=["demo"]
import matplotlib.pyplot as plt

lab.plot_style()


def draw_blocks(ax, sm, begin, end, per_sm):
    """Draw one bar per block, on the row of its SM: when it began and ended. per_sm blocks share a row."""
    length = np.median(end - begin)
    for row, which in enumerate(np.unique(sm)):
        free_at = [-np.inf] * per_sm
        for block in sorted(np.flatnonzero(sm == which), key=lambda b: begin[b]):
            lane = int(np.argmin(free_at))
            free_at[lane] = end[block]
            wave_number = round((begin[block] - begin.min()) / length)
            ax.barh(
                row + (lane + 0.5) / per_sm - 0.5, end[block] - begin[block], left=begin[block],
                height=0.8 / per_sm, color=f"C{wave_number % 5}", edgecolor="white",
            )
    ax.set_yticks(range(len(np.unique(sm))), [str(which) for which in np.unique(sm)])
    ax.set_ylabel("SM 编号")


paper = np.arange(19)
fig, ax = plt.subplots(figsize=(6.4, 2.6))
draw_blocks(ax, paper % 8 % 4, paper // 8 * 1.0, paper // 8 + 1.0, per_sm=2)
ax.set_xlabel("时间（单位：一个 block 的时间）")
ax.set_title("纸上的 GPU：4 个 SM，各驻留 2 个 block，共 19 个 block")
plt.show()

# %% [markdown]
# 容量是 4 × 2 = 8 个 block，19 个要分 3 波，第三波只剩 3 个 block，大半个 GPU 在闲着。这段收尾的浪费叫尾效应（tail effect）。
#
# ### 让每个 block 自己报到
#
# 真的 GPU 也这样吗？先问两个数：有几个 SM；对某个内核、某种 block 大小，一个 SM 能驻留几个 block。
# 后者由 `cuOccupancyMaxActiveBlocksPerMultiprocessor` 回答，驱动会把寄存器和共享内存都算进去。
# 驻留的线程占 SM 上限的比例，叫占用率（occupancy）。
#
# `cuda.bindings` 的函数都返回一个元组，第一项是错误码；`lab.check_cuda` 在出错时抛出带解释的异常，否则交出其余的值。

# %% tags=["gpu"]
ATTRIBUTES = cp.cuda.Device().attributes
SM_COUNT = ATTRIBUTES["MultiProcessorCount"]
THREADS_PER_SM = ATTRIBUTES["MaxThreadsPerMultiProcessor"]

# %% tags=["demo", "gpu"]
THREADS = 1024


def resident_blocks(kernel, threads):
    """How many blocks of that many threads of a RawKernel fit into one SM at the same time."""
    return lab.check_cuda(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel.kernel.ptr, threads, 0))


lab.say(
    f"这块 GPU 有 **{SM_COUNT}** 个 SM，每个最多驻留 {THREADS_PER_SM} 个线程。\n\n"
    + lab.table(
        ("`spin`，每个 block 的线程数", "每个 SM 驻留的 block", "一波能放的 block", "占用率"),
        [
            (threads, resident_blocks(spin, threads), resident_blocks(spin, threads) * SM_COUNT,
             f"{100 * threads * resident_blocks(spin, threads) / THREADS_PER_SM:.0f}%")
            for threads in (32, 128, 512, THREADS)
        ],
    )
)

# %% [markdown]
# 再启动 2.5 波的 `trace`，每个 block 空转 300 µs，然后把它们记下的时间画成和刚才一样的图。只画前 8 个 SM。

# %% tags=["demo", "gpu"]
WAVE_US = 300
per_sm = resident_blocks(trace, THREADS)
wave = per_sm * SM_COUNT
blocks = wave * 5 // 2


def traced(blocks):
    """Launch trace; return the SM of each block, and when it began and ended, in µs since the first one began."""
    with stream:
        sm = cp.zeros(blocks, cp.uint32)
        begin, end = cp.zeros(blocks, cp.uint64), cp.zeros(blocks, cp.uint64)
        trace((blocks,), (THREADS,), (np.uint64(WAVE_US * 1000), sm, begin, end))
    stream.synchronize()
    first = int(begin.get().min())
    return sm.get(), (begin.get() - np.uint64(first)) / 1000, (end.get() - np.uint64(first)) / 1000


traced(1)  # warm up
sm, begin, end = traced(blocks)
shown = np.isin(sm, np.unique(sm)[:8])
fig, ax = plt.subplots(figsize=(7, 3.4))
draw_blocks(ax, sm[shown], begin[shown], end[shown], per_sm)
ax.set_xlabel("时间（µs）")
ax.set_title(f"{blocks} 个 block 是怎样做完的（{lab.gpu_name()}）")
plt.show()

at_once = max(int(np.sum((begin <= t) & (end > t))) for t in np.unique(begin))
lab.say(
    f"{blocks} 个 block 用到了 **{len(np.unique(sm))}** 个 SM；同时在跑的最多有 **{at_once}** 个"
    f"（算出来的一波是 {wave} 个）；从第一个开始到最后一个结束是 {end.max():.0f} µs，约合 **{end.max() / WAVE_US:.1f}** 波。"
)

# %% [markdown]
# ### 时间是台阶，不是斜线
#
# 如果 block 一波一波地做，那么总时间随 block 数量的变化应当是台阶：每多出一波才跳一格。
# 注意 block 数正好是一波的整数倍，和再多一个 block，这两处的差别。

# %% tags=["demo", "gpu"]
step = resident_blocks(spin, THREADS) * SM_COUNT
counts = np.unique(np.r_[np.linspace(1, 3.4 * step, 28).astype(int), [k * step + extra for k in (1, 2, 3) for extra in (0, 1)]])
took = {
    int(count): lab.end_to_end_us(partial(launch_spin, WAVE_US, int(count), THREADS), repeats=7, warmup=2).median
    for count in counts
}

fig, ax = plt.subplots()
ax.step(counts, np.ceil(counts / step) * WAVE_US, where="post", color="#767676", marker="", label="波数 × 每个 block 的时间")
ax.plot(counts, list(took.values()), linestyle="", label="实测")
ax.set_xlabel("block 数量")
ax.set_ylabel("从提交到做完（µs）")
ax.set_ylim(bottom=0)
ax.set_title(f"每 {step} 个 block 一级台阶（{lab.gpu_name()}）")
ax.legend()
plt.show()
lab.say(
    f"{step} 个 block 用 {took[step]:.0f} µs；**多一个**，变成 {took[step + 1]:.0f} µs，是 {took[step + 1] / took[step]:.2f} 倍。"
    f"而从 1 个到 {step} 个，时间只从 {took[1]:.0f} µs 变到 {took[step]:.0f} µs。"
)

# %% [markdown]
# 两个结论，后面每一章都用得上：
#
# - **一个小内核填不满 GPU**，它慢不是因为 GPU 忙不过来，加几倍的 block 往往不多花时间；
# - 总时间看**波数**，也就是“block 总数 ÷ 一波能放的 block”向上取整。真实内核的 block 长短不一，台阶会变圆，但道理不变。
#
# ### 填满以后，别人就进不来了
#
# 不同的流里的内核可以同时跑，前提是还有空位。准备一个 `fill_gpu`，让所有 SM 都坐满，看看别的流里一个小小的 `mix` 要等多久。
#
# `fill_gpu` 为什么用 512 个线程的 block？本课程支持的各代 GPU，每个 SM 的线程上限都是 512 的整数倍，
# 所以能坐得一个空位都不剩。（你这块 GPU 的上限就是上面的 `THREADS_PER_SM`。）

# %% tags=["gpu"]
FULL_THREADS = 512
FULL_GRID = SM_COUNT * (THREADS_PER_SM // FULL_THREADS)


def fill_gpu(us):
    """Keep every SM full for us microseconds: meanwhile no other kernel can start, whatever its stream.

    The work goes to `stream`, which should be idle, as should the GPU. Returns as soon as the GPU has reached it.
    """
    reached = cp.cuda.Event(disable_timing=True)  # a mark in the stream; this one keeps no time stamp
    with stream:
        reached.record()
        launch_spin(us, FULL_GRID, FULL_THREADS)
    reached.synchronize()


# %% tags=["demo", "gpu"]
from time import perf_counter

SIZE = 4096
device = cp.cuda.Device()
side = cp.cuda.Stream(non_blocking=True)
with side:
    small = cp.zeros(SIZE, cp.uint32)


def one_block(us):
    with stream:
        launch_spin(us)


def small_us(busy):
    """Time until a small mix on another stream is done, in µs, once busy() has given `stream` something to do."""
    samples = []
    for _ in range(8):
        device.synchronize()
        busy()
        start = perf_counter()
        with side:
            launch_mix(small, 0)
        side.synchronize()
        samples.append((perf_counter() - start) * 1e6)
    device.synchronize()
    return np.median(samples[1:])  # the first one is the warm-up


rows = [
    (name, f"{small_us(busy):.0f}")
    for name, busy in (
        ("空闲", lambda: None),
        ("1 个 block 空转 5 ms", partial(one_block, 5000)),
        (f"{FULL_GRID} 个 block 空转 5 ms（填满）", partial(fill_gpu, 5000)),
    )
]
lab.say(lab.table(("`stream` 里的工作", "另一条流里的小 `mix`，做完要 µs"), rows))

# %% [markdown]
# 只占一个 SM 的长内核不碍别人的事；填满 GPU 的内核，别的流也得等它腾出位置。
# 所以最后一行应当在 5 ms 上下；要是多出几毫秒，那是别的程序也在用这块 GPU，两边在轮流占用。
#
# 所以“多开几条流就能并行”只在 GPU 没填满的时候成立。`fill_gpu` 这个“堵门”的办法请记住，练习里有大用。

# %% [markdown]
# ## 异步：吩咐完就走
#
# 一次启动里，CPU 做的只是把命令放进队列，然后就返回。GPU 什么时候做、做多久，CPU 不管。这叫异步（asynchronous）。
#
# 于是同一件工作有好几块表，停在不同的地方：

# %% tags=["demo"]
fig, ax = plt.subplots(figsize=(7.4, 2.7))
for row, left, width, color, text in ((1, 0, 2, "C0", "提交"), (1, 2, 6.5, "#DDDDDD", "CPU 在等（或者去做别的）"), (0, 1, 7, "C1", "GPU 干活")):
    ax.barh(row, width, left=left, height=0.5, color=color)
    ax.text(left + width / 2, row, text, ha="center", va="center")
for row, (start, stop, name) in enumerate(((0, 2, "提交时间"), (1, 8, "事件：GPU 上两个记号之间"), (0, 8.5, "端到端时间（停表前先同步）"))):
    ax.annotate("", (start, -0.75 - 0.5 * row), (stop, -0.75 - 0.5 * row), arrowprops={"arrowstyle": "<->"})
    ax.text(stop + 0.15, -0.75 - 0.5 * row, name, va="center")
ax.set_yticks([0, 1], ["GPU", "CPU"])
ax.set_ylim(-2.1, 1.5)
ax.set_xlim(0, 12)
ax.set_xticks([])
ax.grid(False)
ax.set_xlabel("时间 →")
ax.set_title("三块表，三个答案")
plt.show()

# %% [markdown]
# - **提交时间**：调用返回就停表；
# - **端到端时间**：停表之前先同步（synchronize），也就是等 GPU 做完；
# - **事件时间**：GPU 自己在队列的两个位置上盖时间戳，相减。
#
# `lab.submit_us` 和 `lab.end_to_end_us` 量的是前两种：重复很多次，默认先预热 5 次，每次开始前都等 GPU 空闲；`.median` 是中位数。
# 让 `spin` 从 10 µs 变到 10 ms，看看两块表。

# %% tags=["demo", "gpu"]
LENGTHS = (10, 30, 100, 300, 1000, 3000, 10_000)
submitted = [lab.submit_us(partial(launch_spin, us), repeats=20).median for us in LENGTHS]
finished = [lab.end_to_end_us(partial(launch_spin, us), repeats=20).median for us in LENGTHS]

fig, ax = plt.subplots()
ax.loglog(LENGTHS, finished, label="端到端时间")
ax.loglog(LENGTHS, submitted, label="提交时间")
ax.set_xlabel("内核在 GPU 上的时间（µs）")
ax.set_ylabel("量到的时间（µs）")
ax.set_title(f"返回不等于做完（{lab.gpu_name()}）")
ax.legend()
plt.show()
lab.say(
    f"GPU 上的时间从 {LENGTHS[0]} µs 变到 {LENGTHS[-1]} µs：提交时间最短 {min(submitted):.1f} µs，最长 {max(submitted):.1f} µs；"
    f"端到端时间从 {finished[0]:.0f} µs 变到 {finished[-1]:.0f} µs。"
)

# %% [markdown]
# 提交时间也有起伏：每次提交之前，CPU 都要先等上一个内核做完，等得久了，再回来干活往往慢一点。
# 可是内核越长，端到端时间就比它长得越多：提交不等内核做完。
#
# ### 拷贝背的黑锅
#
# 回到开头的故事。用 20 ms 的 `spin` 加一个 `mix` 代替“推理”，再把结果拷回来。只差一次同步，账就算到了不同的人头上：

# %% tags=["demo", "gpu"]
with stream:
    x = cp.arange(SIZE, dtype=cp.uint32)
stream.synchronize()


def infer():
    with stream:
        launch_spin(20_000)
        launch_mix(x, 0)


def bill(sync_between):
    """Return what the clock charges to the inference and to the copy, in µs: medians, without the first round."""
    spent = []
    for _ in range(6):
        stream.synchronize()
        clock = [perf_counter()]
        infer()
        if sync_between:
            stream.synchronize()
        clock.append(perf_counter())
        x.get(stream=stream)
        clock.append(perf_counter())
        spent.append(np.diff(clock) * 1e6)
    return np.median(spent[1:], axis=0)


lab.say(
    lab.table(
        ("怎样停表", "“推理” µs", "“拷贝” µs"),
        [
            (name, *(f"{us:.0f}" for us in bill(sync)))
            for name, sync in (("推理后直接停表", False), ("推理后先同步，再停表", True))
        ],
    )
)

# %% [markdown]
# ### 谁在偷偷等 GPU
#
# 拷回结果要等，这合情合理：数据还没算出来。但有些等待藏得很深。下面先给 `stream` 派 20 ms 的活，再做各种操作，看调用过多久才返回。
#
# 表里有两种主机内存：普通的 NumPy 数组是可分页内存（pageable memory），操作系统随时可能挪动它，GPU 不能直接读写；
# 锁页内存（pinned memory）被钉住不动，GPU 可以自己去写。

# %% tags=["demo", "gpu"]
TO_HOST = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
pageable, pinned = np.empty(SIZE, np.uint32), cupyx.empty_pinned(SIZE, np.uint32)


def copy_to(host):
    lab.check_cuda(cudart.cudaMemcpyAsync(host.ctypes.data, x.data.ptr, host.nbytes, TO_HOST, stream.ptr))


OPERATIONS = {
    "再启动一个内核：`launch_mix(x, 0)`": lambda: launch_mix(x, 0),
    "数组表达式：`x + 1`": lambda: x + 1,
    "记录事件：`stream.record()`": lambda: stream.record(),
    "查询：`stream.done`": lambda: stream.done,
    "`cudaMemcpyAsync` 到锁页内存": lambda: copy_to(pinned),
    "`cudaMemcpyAsync` 到可分页内存": lambda: copy_to(pageable),
    "`x.get()`": lambda: x.get(),
    "`int(x[0])`": lambda: int(x[0]),
    "`stream.synchronize()`": lambda: stream.synchronize(),
}


def behind_spin_us(operation):
    """µs that the CPU spends in operation() while `stream`, the current stream, has 20 ms of work ahead of it."""
    with stream:
        operation()  # warm up: the first time may compile
        device.synchronize()
        launch_spin(20_000)
        start = perf_counter()
        operation()
        spent = (perf_counter() - start) * 1e6
    device.synchronize()
    return spent


delays = {name: behind_spin_us(operation) for name, operation in OPERATIONS.items()}
lab.say(
    lab.table(
        ("操作", "调用花了 µs", "等 GPU 了吗"),
        [(name, f"{us:.0f}", "等了" if us > 10_000 else "没有") for name, us in delays.items()],
    )
)

# %% [markdown]
# 读这张表时注意几处：
#
# - 凡是 CPU 要**看到数值**的，都得等：`x.get()`、`int(x[0])`、`print(x)`、`if x.any():`。
# - 名字里带 `Async` 不等于一定异步。拷到可分页内存时，驱动通常要把数据经自己的缓冲转交，调用要等拷贝做完才返回；
#   目的地是锁页内存，才能放心地当它异步。你的机器是哪种情况，看上表的两行。
# - 查询（query）不等：它只回答“做完没有”。
#
# 等待也可能来自你调用的库：有的封装为了及时报错，每次启动之后都同步一次，于是什么都重叠不起来。
# 优化之前，先探一探是哪一层在等；练习三就要你写这样一个探测器。
#
# ### 能领先多远
#
# CPU 是不是可以无限地“吩咐完就走”？先让 GPU 忙 50 ms，然后一口气启动 2500 个 `mix`，记下每次调用花的时间。

# %% tags=["demo", "gpu"]
PILE = 2500
clock = np.empty(PILE + 1)
with stream:
    launch_spin(50_000)
    for i in range(PILE):
        clock[i] = perf_counter()
        launch_mix(x, i)
    clock[PILE] = perf_counter()
stream.synchronize()
calls_us = np.diff(clock) * 1e6
longest = int(np.argmax(calls_us))
usual = f"一次启动的中位数是 {np.median(calls_us):.1f} µs"
if calls_us[longest] > 5000:
    lab.say(f"{usual}；可是第 **{longest + 1}** 次启动花了 **{calls_us[longest] / 1000:.0f} ms**：前面的启动把队列排满了，它只好等 GPU 做掉一些。")
else:
    lab.say(f"{usual}，最长的一次也只有 {calls_us[longest]:.0f} µs：在这台机器上，{PILE} 次启动还没有把队列排满。")

# %% [markdown]
# 队列是有限的，一般能排大约一千次启动。排满以后，启动本身就变成了等待。计时的时候如果一口气提交太多，
# 量到的“提交时间”里就混进了 GPU 的时间。

# %% [markdown]
# ## 流与事件
#
# 流就是队列：同一条流里的工作按提交的先后做，不同的流互不等待。
#
# 那么一条流要用另一条流的结果时，怎么办？在两条流之间传递“做完了”的消息，用事件：
#
# - `event.record(a)`：在流 `a` 的当前位置立一个记号，GPU 走到这里，事件就完成；
# - `b.wait_event(event)`：让流 `b` 停在这里，等记号完成。等的是 GPU，CPU 不等；
# - `event.done` 是查询，`event.synchronize()` 才让 CPU 等。
#
# 下面，生产者先空转 3 ms 再做序号 0 的 `mix`，消费者做序号 1 的 `mix`。不等和等，结果一样吗？

# %% tags=["demo", "gpu"]
producer, consumer = (cp.cuda.Stream(non_blocking=True) for _ in range(2))


def hand_over(wait):
    """mix 0 on one stream, mix 1 on another, of the same array: return the order in which they really happened."""
    before = x.get()
    ready = cp.cuda.Event(disable_timing=True)
    with producer:
        launch_spin(3000)
        launch_mix(x, 0)
    ready.record(producer)
    if wait:
        consumer.wait_event(ready)
    with consumer:
        launch_mix(x, 1)
    device.synchronize()
    orders = {"先 0 后 1": mixed(before, 2), "先 1 后 0": mixed(mixed(before, 1, first=1), 1)}
    return next((name for name, result in orders.items() if np.array_equal(x.get(), result)), "混在一起了")


device.synchronize()
lab.say(lab.table(("怎样交接", "实际的先后"), [("没有等待", hand_over(False)), ("`wait_event`", hand_over(True))]))

# %% [markdown]
# 没有事件，代码里写在后面的工作先做了，而且**一点错误也不报**。
#
# ### 传统默认流
#
# 不指定流的时候，CuPy 用的是传统默认流（legacy default stream，也叫 NULL 流）。它有一条历史遗留的规矩：
# 它和每一条普通的流互相等待。会这样等的流叫阻塞流（blocking stream）；
# 用 `non_blocking=True` 创建的是非阻塞流，不参与这种等待。
#
# 让另一条流先忙 5 ms，再在默认流上做一个小 `mix`，看它多久做完：

# %% tags=["demo", "gpu"]
null = cp.cuda.Stream.null


def default_stream_us(busy):
    """Time until a small mix on the default stream is done, in µs, while the stream `busy` spins for 5 ms."""
    samples = []
    for _ in range(6):
        device.synchronize()
        with busy:
            launch_spin(5000)
        start = perf_counter()
        with null:
            launch_mix(small, 0)
        null.synchronize()
        samples.append((perf_counter() - start) * 1e6)
    device.synchronize()
    return np.median(samples[1:])


lab.say(
    lab.table(
        ("正在忙的流", "默认流上的小 `mix`，做完要 µs"),
        [("阻塞流 `Stream()`", f"{default_stream_us(cp.cuda.Stream()):.0f}"), ("非阻塞流 `Stream(non_blocking=True)`", f"{default_stream_us(side):.0f}")],
    )
)

# %% [markdown]
# 所以，一个忘了指定流的小操作，就能让整条流水线串行起来。反过来，用非阻塞流时，默认流也不再替你保证先后，
# 该等的要自己用事件等。本课程一律用非阻塞流。

# %% [markdown]
# ## 一次启动的解剖
#
# `mix((blocks,), (BLOCK,), (x, i, size))` 这一行，从 Python 走到 GPU，要经过好几层：
#
# | 层 | 它做什么 |
# |:--|:--|
# | CuPy `RawKernel` | 查当前的流，把每个参数换成 C 的值，再调下一层 |
# | `cuda.bindings` 的 `cuLaunchKernel` | 几乎就是 C 函数本身：流、参数都要你自己给 |
# | 驱动 | 检查参数，把参数抄进命令，写进队列 |
# | GPU 前端 | 取出命令，解析，把 block 分给有空位的 SM |
#
# ### `cuLaunchKernel` 和 `void**`
#
# 驱动要的内核参数是一个 C 数组，里面每一项是**一个参数的地址**（C 里写作 `void**`）。用 `cuda.bindings` 有两种给法：
#
# - 给一个元组 `(值, 类型)`，由它每次替你打包；
# - 自己用 `ctypes` 打包一次，以后每次只传数组的地址，一个整数。
#
# `kernel.ptr` 是函数的句柄（handle），也就是驱动用来指代这个函数的号码；`stream.ptr` 是流的句柄。
# 两种给法各启动一次，和 NumPy 对答案：

# %% tags=["demo", "gpu"]
FUNCTION, QUEUE = driver.CUfunction(mix.kernel.ptr), driver.CUstream(stream.ptr)
GRID = -(-x.size // BLOCK)

values, types = (x.data.ptr, 5, x.size), (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)
arguments = (ctypes.c_void_p(x.data.ptr), ctypes.c_uint32(5), ctypes.c_uint32(x.size))
addresses = (ctypes.c_void_p * 3)(*[ctypes.addressof(argument) for argument in arguments])
packed = ctypes.addressof(addresses)

before = x.get(stream=stream)
lab.check_cuda(driver.cuLaunchKernel(FUNCTION, GRID, 1, 1, BLOCK, 1, 1, 0, QUEUE, (values, types), 0))
lab.check_cuda(driver.cuLaunchKernel(FUNCTION, GRID, 1, 1, BLOCK, 1, 1, 0, QUEUE, packed, 0))
expected = mixed(mixed(before, 1, first=5), 1, first=5)
print("两次启动的结果与 NumPy 一致：", np.array_equal(x.get(stream=stream), expected))

# %% [markdown]
# 参数的顺序是：函数，grid 的三个维度，block 的三个维度，动态共享内存的字节数（这里是 0），流，内核参数，最后一项不用，填 0。
#
# 启动是异步的，那么内核真正开始的时候，我们的参数还在吗？猜一猜：先让 `stream` 忙 3 ms，启动序号为 5 的 `mix`，
# **在它开始之前**把序号改成 7。它用的是 5 还是 7？

# %% tags=["demo", "gpu"]
before = x.get(stream=stream)
with stream:
    launch_spin(3000)
lab.check_cuda(driver.cuLaunchKernel(FUNCTION, GRID, 1, 1, BLOCK, 1, 1, 0, QUEUE, packed, 0))
arguments[1].value = 7
waiting = not stream.done
after = x.get(stream=stream)
arguments[1].value = 5

used = next((i for i in (5, 7) if np.array_equal(after, mixed(before, 1, first=i))), None)
print("改的时候内核还没开始：", waiting, "；内核用的序号：", used)

# %% [markdown]
# 用的是调用那一刻的值：**驱动在 `cuLaunchKernel` 返回之前就把参数的值抄走了**。由此得到两条规矩：
#
# - 调用返回以后，参数的内存随便改、随便放；
# - 调用**的那一刻**，这块内存必须还活着。`packed` 只是一个整数，它不会替你留住 `addresses` 和 `arguments`；
#   它们要是被 Python 回收了，驱动抄走的就是垃圾。
#
# 注意抄走的是指针的值，不是数组的内容：`x` 里的数据要到内核运行时才去读。
#
# ### `cuda.core`
#
# `cuda.core` 是 NVIDIA 官方的 Python 风格接口，把这些概念做成了对象：`Device`、`Stream`、`Kernel`、`LaunchConfig`，以及一个函数 `launch`。
# 它能借用 CuPy 的流（`Stream.from_handle`）；内核由 `Program` 编译得到（`"cubin"` 是编译好的机器码）。
# Python 整数当作指针，其他标量要带上类型，例如 `np.uint32`。

# %% tags=["demo", "gpu"]
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, Stream, launch

core_device = Device()
core_device.set_current()
program = Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{core_device.arch}"))
core_mix = program.compile("cubin").get_kernel("mix")
core_stream = Stream.from_handle(stream.ptr)
config = LaunchConfig(grid=GRID, block=BLOCK)

before = x.get(stream=stream)
launch(core_stream, config, core_mix, x.data.ptr, np.uint32(5), np.uint32(x.size))
core_stream.sync()
print(config)
print("cuda.core 的结果与 NumPy 一致：", np.array_equal(x.get(stream=stream), mixed(before, 1, first=5)))

# %% [markdown]
# ### 每一层多花多少
#
# 最后再加一种最省事的写法：不写内核，直接写 CuPy 数组表达式。每个运算符是一个内核，
# 两次右移、两次异或、一次乘、一次加，一轮 `mix` 就成了 6 个内核，中间结果还要两块临时显存。

# %% tags=["gpu"]
def array_chain(x, n):
    """n rounds of mix on x (cupy uint32, in place), as array expressions: six kernels a round. On `stream`; returns at once."""
    with stream:
        for i in range(n):
            x ^= x >> np.uint32(15)
            x *= np.uint32(0x2C1B3C6D)
            x ^= x >> np.uint32(12)
            x += np.uint32(i)


# %% tags=["demo", "gpu"]
ROUNDS = 100


def core_chain():
    for i in range(ROUNDS):
        launch(core_stream, config, core_mix, x.data.ptr, np.uint32(i), np.uint32(x.size))


def repacked_chain():
    for i in range(ROUNDS):
        driver.cuLaunchKernel(FUNCTION, GRID, 1, 1, BLOCK, 1, 1, 0, QUEUE, ((x.data.ptr, i, x.size), types), 0)


def packed_chain():
    for _ in range(ROUNDS):
        driver.cuLaunchKernel(FUNCTION, GRID, 1, 1, BLOCK, 1, 1, 0, QUEUE, packed, 0)


WAYS = {
    "数组表达式（6 个内核）": partial(array_chain, x, ROUNDS),
    "CuPy RawKernel": partial(eager_chain, x, ROUNDS),
    "cuda.core launch": core_chain,
    "cuLaunchKernel，每次打包": repacked_chain,
    "cuLaunchKernel，事先打包": packed_chain,
}
per_round = {name: [] for name in WAYS}
for turn in range(23):
    # Everybody in turn, and the other way round every second time, so that a drift hits all alike.
    for name in list(WAYS)[:: 1 if turn % 2 == 0 else -1]:
        device.synchronize()
        start = perf_counter()
        WAYS[name]()
        per_round[name].append((perf_counter() - start) * 1e6 / ROUNDS)
device.synchronize()
per_round = {name: float(np.median(us[2:])) for name, us in per_round.items()}  # the first two are the warm-up

fig, ax = plt.subplots(figsize=(7, 2.9))
bars = ax.barh(list(per_round), list(per_round.values()))
ax.bar_label(bars, fmt="%.1f", padding=3)
ax.invert_yaxis()
ax.set_xlabel("CPU 提交一轮 mix 的时间（µs）")
ax.set_title(f"同样的工作，不同的启动方式（{lab.gpu_name()}）")
plt.show()
cheapest = min(per_round, key=per_round.get)
lab.say(f"最省的是“{cheapest}”，每轮 {per_round[cheapest]:.1f} µs；数组表达式每轮 {per_round['数组表达式（6 个内核）']:.1f} µs，是它的 **{per_round['数组表达式（6 个内核）'] / per_round[cheapest]:.1f}** 倍。")

# %% [markdown]
# 这些差别全在 CPU 上，GPU 执行的都是同样的 `mix`（数组表达式除外）。内核短的时候，GPU 在等的就是这段时间。
# 层的高低不是全部：`cuda.core` 的接口高一层，却可能比“每次打包”的 `cuLaunchKernel` 还省，因为参数怎样打包也要算。
#
# 《课程导入》查过账：这段时间通常不是系统调用，而是 Python、CuPy 和驱动里一条条普通的指令。
# 驱动把命令写进一块 GPU 也看得见的队列，再“按一下门铃”（写一个硬件寄存器），GPU 就来取。
#
# CPU 为一次启动付出的时间，叫启动开销（launch overhead）。它可以靠少做准备工作来减小，也可以靠少启动几次来减小；
# 后者是《CUDA 图优化概念》的主题。

# %% [markdown]
# ## 经得起追问的计时
#
# ### 错表陈列室
#
# 同一件工作：在 `side` 这条流上空转 2000 µs。下面八种量法都能在真实的代码里见到。运行之前，先猜每一种会量出多少。

# %% tags=["demo", "gpu"]
from time import perf_counter_ns

TRUE_US = 2000


def fresh_kernel(name):
    """Return a kernel of SOURCE that nobody has compiled before: the comment makes the source new."""
    return cp.RawKernel(f"// {perf_counter_ns()}\n{SOURCE}", name)


def job():
    with side:
        launch_spin(TRUE_US)


def clocked(work, wait):
    """µs that work() and then wait() take."""
    start = perf_counter()
    work()
    wait()
    return (perf_counter() - start) * 1e6


def by_events(where):
    """µs between two events on the stream `where`, recorded before and after the job."""
    first, last = cp.cuda.Event(), cp.cuda.Event()
    first.record(where)
    job()
    last.record(where)
    last.synchronize()
    return cp.cuda.get_elapsed_time(first, last) * 1000


def behind_others():
    with side:
        launch_spin(3000)
    return clocked(job, device.synchronize)


def cold_mean(calls):
    """Mean of so many calls of a kernel that nobody has compiled yet, the first one included."""
    kernel = fresh_kernel("spin")
    return np.mean([clocked(lambda: kernel((1,), (32,), (np.uint64(TRUE_US * 1000),)), device.synchronize) for _ in range(calls)])


TIMERS = {
    "没有同步": lambda: clocked(job, lambda: None),
    "同步了另一条流": lambda: clocked(job, stream.synchronize),
    "事件记在另一条流上": lambda: by_events(stream),
    "开表时队列里还有别人的 3 ms": behind_others,
    "对：预热，空闲时开表，等整个设备": lambda: clocked(job, device.synchronize),
    "对：事件记在同一条流上（只看 GPU）": lambda: by_events(side),
}
readings = {"只量一次，不预热": cold_mean(1), "量 5 次取平均，不预热": cold_mean(5)}
for name, timer in TIMERS.items():
    samples = []
    for _ in range(8):
        device.synchronize()
        samples.append(timer())
    readings[name] = np.median(samples[1:])
device.synchronize()
rows = [(name, f"{us:.0f}", f"{us / TRUE_US:.2f}") for name, us in readings.items()]
lab.say(lab.table(("量法", "量出来 µs", f"÷ {TRUE_US}"), rows))

# %% [markdown]
# 偏大的几种，量进了不该量的东西：编译，或者别人的那 3 ms。
#
# 偏小的几种更危险：它们看起来像是“优化成功”。共同的毛病是**停表的时候，没有等对人**。
#
# 工作在哪条流上，就要在哪条流上同步、记事件；不确定，就等整个设备。
#
# ### 第一次不算：预热
#
# 第一次调用常常要编译、加载代码、分配内存，还可能赶上 GPU 刚从省电状态醒来。看看一个新内核的前 20 次调用：

# %% tags=["demo", "gpu"]
newcomer = fresh_kernel("mix")
newcomer_us = [
    clocked(lambda: newcomer((GRID,), (BLOCK,), (small, np.uint32(0), np.uint32(SIZE))), device.synchronize) for _ in range(20)
]
fig, ax = plt.subplots()
ax.semilogy(range(1, 21), newcomer_us)
ax.set_xticks([1, 5, 10, 15, 20])
ax.set_xlabel("第几次调用")
ax.set_ylabel("端到端时间（µs）")
ax.set_title(f"新内核的头 20 次（{lab.gpu_name()}）")
plt.show()
lab.say(
    f"第 1 次 {newcomer_us[0] / 1000:.0f} ms，其余各次的中位数 {np.median(newcomer_us[1:]):.0f} µs。"
    f"20 次的平均数是 {np.mean(newcomer_us):.0f} µs：一次冷启动就把平均数抬高到中位数的 **{np.mean(newcomer_us) / np.median(newcomer_us):.0f}** 倍。"
)

# %% [markdown]
# 不算进去的头几次，叫预热（warm-up）。预热之后还要同步一次，再开始计时。
#
# ### 一个数不够：百分位
#
# 预热以后，每次也不一样长。量 2000 次小小的 `mix`，看它们的分布。p50 就是中位数：一半的样本不超过它；
# p99 是 100 次里有 99 次不超过的值，它说的是倒霉的时候有多慢，也叫尾延迟（tail latency）。

# %% tags=["demo", "gpu"]
many = lab.end_to_end_us(partial(launch_mix, small, 0), repeats=2000)
marks = {"p50": many.median, "平均": float(many.us.mean()), "p90": many.percentile(90), "p99": many.percentile(99)}
fig, ax = plt.subplots()
ax.hist(many.us, bins=np.geomspace(many.us.min(), many.us.max(), 60), histtype="stepfilled", facecolor="#DDDDDD", edgecolor="#555555")
ax.set_xscale("log")
ax.set_yscale("log")
for (name, us), color, line in zip(marks.items(), ("C0", "C1", "C4", "C6"), ("-", "--", "-.", ":"), strict=True):
    ax.axvline(us, color=color, linestyle=line, label=f"{name} {us:.1f} µs")
ax.set_xlabel("端到端时间（µs）")
ax.set_ylabel("次数")
ax.set_title(f"同一次启动，量 2000 遍（{lab.gpu_name()}）")
lab.log_ticks(ax.xaxis)
ax.legend()
plt.show()
lab.say(
    f"最短 {many.us.min():.1f} µs，p50 {many.median:.1f} µs，p99 {many.percentile(99):.1f} µs，最长 {many.us.max():.1f} µs（p50 的 {many.us.max() / many.median:.0f} 倍）。"
)

# %% [markdown]
# 左边有一堵墙（再快也快不过它），右边有一条长尾巴（操作系统、中断、别的进程）。少数几个离群的样本就能拖动平均数，却几乎动不了中位数。
# 所以比快慢看 p50，谈服务质量看 p99。
#
# ### 轮流上场
#
# 机器会变：温度升高，频率下降，邻居开工。把“变慢”做成看得见的：每量一次，工作都比上一次长一点点，从头到尾共长 40%。
# B 的时间其实比 A 少 10%。先量完 A 再量 B，与按 A B B A 的次序轮流，结论一样吗？

# %% tags=["demo", "gpu"]
def under_drift(order):
    """End-to-end times, µs, of calls in that order of "A" and "B", while everything slows down by 40 %. B is 10 % faster."""
    lengths = [500 * (1 + 0.4 * place / len(order)) * (0.9 if who == "B" else 1.0) for place, who in enumerate(order)]
    clocked(partial(launch_spin, 500), device.synchronize)  # warm up
    return np.array([clocked(partial(launch_spin, us), device.synchronize) for us in lengths])


ORDERS = {"先 A 后 B": "A" * 20 + "B" * 20, "A B B A": "ABBA" * 10}
fig, axes = plt.subplots(1, 2, figsize=(9.5, 3.4), sharey=True)
rows = []
for ax, (name, order) in zip(axes, ORDERS.items(), strict=True):
    us, who = under_drift(order), np.array(list(order))
    for color, letter in enumerate("AB"):
        ax.plot(np.flatnonzero(who == letter), us[who == letter], linestyle="", color=f"C{color}", label=letter)
    ratio = np.median(us[who == "A"]) / np.median(us[who == "B"])
    rows.append((name, f"{ratio:.2f}", "B 更快" if ratio > 1.02 else "A 更快" if ratio < 0.98 else "分不出来"))
    ax.set_title(name)
    ax.set_xlabel("第几次")
axes[0].set_ylabel("端到端时间（µs）")
axes[0].set_ylim(400, 900)
axes[1].legend()
plt.show()
lab.say(lab.table(("次序", "A 的时间 ÷ B 的时间", "结论"), rows) + f"\n\n按内核本身的长度，这个比值应当接近 {1 / 0.9:.2f}。")

# %% [markdown]
# A B B A 的妙处在于：A 和 B 的平均位置相同，匀速的漂移对两边一样多，正好抵消。`lab.compare_us(a, b)` 用的就是这种次序，
# 还会给出每一对的比值的中位数（`.ratio`）；`clock=` 选哪块表（`"submit"` 或 `"end_to_end"`），`pairs=` 说量多少对。
#
# ### 你量的是内核，还是 Python
#
# 两个内核，一个 5 µs，一个 25 µs，差 5 倍。三种量法看到的差距是多少？

# %% tags=["demo", "gpu"]
SHORT_US, LONG_US, REPEATS = 5, 25, 100


def back_to_back(us):
    for _ in range(REPEATS):
        launch_spin(us)


def event_us(work, plug_us):
    """GPU time of work() on `stream` between two events, in µs; the GPU first has plug_us of other work."""
    first, last = cp.cuda.Event(), cp.cuda.Event()
    with stream:
        if plug_us:
            launch_spin(plug_us)
        first.record()
        work()
        last.record()
    last.synchronize()
    return cp.cuda.get_elapsed_time(first, last) * 1000


single = lab.compare_us(partial(launch_spin, LONG_US), partial(launch_spin, SHORT_US), clock="end_to_end", pairs=51)
series = lab.compare_us(partial(back_to_back, LONG_US), partial(back_to_back, SHORT_US), clock="end_to_end")
queued = np.median([[event_us(partial(back_to_back, us), 10_000) for us in (LONG_US, SHORT_US)] for _ in range(9)], axis=0)
lab.say(
    lab.table(
        ("量法", f"{SHORT_US} µs 的内核", f"{LONG_US} µs 的内核", "看到的倍数"),
        [
            ("一次一量，端到端", f"{single.second.median:.1f}", f"{single.first.median:.1f}", f"{single.ratio:.2f}"),
            (f"连续 {REPEATS} 次，端到端，取平均", f"{series.second.median / REPEATS:.1f}", f"{series.first.median / REPEATS:.1f}", f"{series.ratio:.2f}"),
            (f"先堵 10 ms，再连续 {REPEATS} 次，事件，取平均", f"{queued[1] / REPEATS:.1f}", f"{queued[0] / REPEATS:.1f}", f"{queued[0] / queued[1]:.2f}"),
        ],
    )
)

# %% [markdown]
# 一次一量的时候，两边都加上了同样的固定开销：Python、启动、同步，差距被冲淡了。连着做很多次，同步的开销摊薄了，
# 可是启动一次也没有少：短内核要是比一次启动还短，量到的其实是启动。
# 先把 GPU 堵住，让 CPU 有时间把队排好，启动也就藏起来了，剩下的是内核加上相邻内核之间的一点空隙。
#
# 没有哪一种是“错的”，要看你问的是什么：问用户要等多久，量端到端；问内核本身谁快，让它们首尾相接。
#
# ### 事件看得到什么
#
# 常有人说“用事件最准”。对同一串 200 个 `mix`，四块表各说什么？

# %% tags=["demo", "gpu"]
chain_200 = partial(eager_chain, x, 200)
readings = {"CPU 提交": [], "端到端": [], "事件，GPU 空闲": [], "事件，前面堵着 20 ms": []}
for _ in range(16):
    device.synchronize()
    readings["CPU 提交"].append(clocked(chain_200, lambda: None))
    device.synchronize()
    readings["端到端"].append(clocked(chain_200, device.synchronize))
    readings["事件，GPU 空闲"].append(event_us(chain_200, 0))
    readings["事件，前面堵着 20 ms"].append(event_us(chain_200, 20_000))
readings = {name: float(np.median(us[1:])) for name, us in readings.items()}
lab.say(lab.table(("200 个 `mix`", "µs（中位数）"), [(name, f"{us:.0f}") for name, us in readings.items()]))

idle, plugged = readings["事件，GPU 空闲"], readings["事件，前面堵着 20 ms"]
lab.say(
    f"同样的工作，同样的事件，只因为前面堵没堵着，读数差了 **{idle / plugged:.1f}** 倍。"
    + ("差的那一段是 GPU 在两个记号之间空等 CPU 的时间。" if idle > 1.2 * plugged else "在这台机器上 GPU 很少空等 CPU，所以差别不大。")
)

# %% [markdown]
# “CPU 提交”和“端到端”要是几乎一样长，就是 GPU 一路在等 CPU：CPU 交完最后一个，GPU 也做完了。这两行是分开量的，谁大一点只是波动。
#
# 事件只看 GPU：它是 GPU 经过两个记号的时刻之差，分辨率约半微秒。GPU 在这中间空等 CPU，也照样算进去；
# CPU 为提交花了多少力气，它却看不见。**事件回答“GPU 上过了多久”，不回答“用户等了多久”，也不回答“CPU 忙了多久”。**
#
# ### 清单
#
# 1. 先预热，再同步，GPU 空闲时开表；
# 2. 停表之前，等对人：做工作的那条流，或者整个设备；
# 3. 重复多次，报告 p50；谈尾延迟再加 p99；
# 4. 比较两种做法，轮流上场；
# 5. 说清楚是哪块表：提交、端到端，还是事件；
# 6. 用一个已知长短的工作（`spin`）检验你的表：工作加倍，读数也要加倍。

# %% [markdown]
# ## 两个误区
#
# ### 误区一：每启动一次就同步一次，更保险
#
# 同一条流里的内核本来就按顺序做，后一个一定看得到前一个的结果。多余的同步买到了什么，又花了多少？

# %% tags=["demo", "gpu"]
def synced_chain(x, n):
    for i in range(n):
        with stream:
            launch_mix(x, i)
        stream.synchronize()


stream.synchronize()
before = x.get(stream=stream)
synced_chain(x, 200)
with_sync = x.get(stream=stream)
with stream:
    x.set(before)
eager_chain(x, 200)
without_sync = x.get(stream=stream)

pair = lab.compare_us(partial(synced_chain, x, 200), chain_200, clock="end_to_end")
lab.say(
    f"结果一样吗：**{'一样' if np.array_equal(with_sync, without_sync) else '不一样'}**，与 NumPy {'也' if np.array_equal(without_sync, mixed(before, 200)) else '不'}一致。"
    f"端到端时间：每次同步 {pair.first.median:.0f} µs，最后同步一次 {pair.second.median:.0f} µs，前者是后者的 **{pair.ratio:.1f}** 倍。"
)

# %% [markdown]
# 同步是给 CPU 用的：CPU 要读结果，或者要改写 GPU 正在用的内存，才需要等。
#
# ### 误区二：流越多，并行越多
#
# 四份同样的工作，放进一条流，或分到四条流。一份只占一个 SM，或者一份就填满整个 GPU：

# %% tags=["demo", "gpu"]
four = [cp.cuda.Stream(non_blocking=True) for _ in range(4)]


def four_spins(streams, blocks, threads):
    for each in streams:
        with each:
            launch_spin(2000, blocks, threads)


rows = []
for name, blocks_each, threads_each in (("1 个 block", 1, 32), (f"{FULL_GRID} 个 block（填满）", FULL_GRID, FULL_THREADS)):
    pair = lab.compare_us(
        partial(four_spins, [four[0]] * 4, blocks_each, threads_each),
        partial(four_spins, four, blocks_each, threads_each), clock="end_to_end", pairs=7, warmup=1,
    )
    rows.append((name, f"{pair.first.median / 1000:.1f}", f"{pair.second.median / 1000:.1f}", f"{pair.ratio:.2f}"))
lab.say(lab.table(("每份工作（2 ms）", "一条流 ms", "四条流 ms", "倍数"), rows))

# %% [markdown]
# 流只是**允许**并行；有没有空着的 SM，才决定能不能并行。

# %% [markdown]
# ## 练习
#
# 四道练习，共 12 分。评分在干净的环境里进行，只运行给定单元和你的解答，**不运行演示单元**。可以用的名字：
#
# - 模块：`np`、`partial`、`ctypes`、`cp`、`cupyx`、`driver`、`cudart`、`lab`；
# - 内核与启动：`mix`、`launch_mix`、`launch_spin`、`eager_chain`、`array_chain`、`fill_gpu`、`mixed`；
# - 其他：`stream`、`BLOCK`、`SM_COUNT`、`FULL_GRID`、`FULL_THREADS`，以及下面随练习给出的名字。
#
# 演示单元里的 `clocked`、`by_events`、`side`、`device` 等，评分时不存在；用得到就在自己的单元里重写或重新导入。
#
# ### 练习一：给三份测量找毛病（3 分，不需要 GPU）
#
# 三位同事各交来一份测量，都想知道 A 的时间是 B 的几倍。程序如下（`pc` 是 `perf_counter`，`sync` 是整个设备同步）：
#
# ```python
# # 甲
# warm_up(A); warm_up(B); sync()
# for work in (A, B, B, A, A, B, B, A):
#     start = pc(); work(); stop = pc()
#     sync(); wait_stop = pc()
# ```
#
# ```python
# # 乙
# sync()
# for work in (A, B, B, A, A, B, B, A):
#     start = pc(); work(); sync(); stop = pc()
#     sync(); wait_stop = pc()
# ```
#
# ```python
# # 丙
# warm_up(A); warm_up(B); sync()
# for work in (A, A, A, A, B, B, B, B):
#     start = pc(); work(); sync(); stop = pc()
#     sync(); wait_stop = pc()
# ```
#
# 每份记录是一个字典：
#
# - `order`：字符串，按时间先后，每次量的是 `"A"` 还是 `"B"`；
# - `us`：每次的 `stop - start`（µs）；
# - `wait_us`：停表以后马上再同步一次，又等了多久，即 `wait_stop - stop`（µs）。
#
# 写 `diagnose(log)`，返回一对 `(毛病, 倍数)`。**依次**检查，报告第一个成立的毛病：
#
# 1. `"order"`：一边倒。A 的平均位置与 B 的平均位置（从 0 数起）之差的绝对值，超过总次数的四分之一；
# 2. `"no_sync"`：没等 GPU。全部 `wait_us` 的中位数，超过全部 `us` 的中位数的 10%；
# 3. `"warm_up"`：没预热。A 或 B 的第一次 `us`，超过**同一方其余各次**的中位数的 2 倍；
# 4. `"fine"`：以上都不成立。
#
# 倍数是修正以后 A 与 B 之比：每一方去掉自己的第一次，其余取中位数，A 除以 B。
# `"no_sync"` 时，每次的时间按 `us + wait_us` 算，其他情况只用 `us`。`"order"` 救不回来，只能重新测量：倍数返回 `None`。
#
# 每一方都至少有两次。下面的记录是为练习编的，先看着数字猜一猜，再写规则。

# %%
LOGS = {
    "甲": {
        "order": "ABBAABBA",
        "us": [9.0, 8.0, 8.0, 9.0, 9.0, 8.0, 8.0, 9.0],
        "wait_us": [391.0, 192.0, 190.0, 391.0, 393.0, 192.0, 194.0, 391.0],
    },
    "乙": {
        "order": "ABBAABBA",
        "us": [90_000.0, 250.0, 200.0, 500.0, 480.0, 210.0, 200.0, 500.0],
        "wait_us": [3.0, 2.0, 2.0, 3.0, 2.0, 2.0, 2.0, 3.0],
    },
    "丙": {
        "order": "AAAABBBB",
        "us": [300.0, 310.0, 320.0, 330.0, 340.0, 350.0, 360.0, 370.0],
        "wait_us": [2.0, 3.0, 2.0, 2.0, 3.0, 2.0, 2.0, 2.0],
    },
}

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 先把 A 和 B 的位置各找出来。知道了位置，平均位置、第一次、其余各次，就都是对这些位置做下标。
# 再想：一份记录同时有两种毛病时，先检查哪一种？修正倍数时，去掉的“第一次”是整份记录的，还是每一方的？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `np.array(list("ABBA"))` 得到字符数组，可以和 `"A"` 比较；`np.flatnonzero(condition)` 给出为真的位置；
# `np.median(values)` 求中位数；数组可以用位置数组做下标。返回前把倍数转成 `float`。
#
# </details>

# %% solution="diagnose"
def diagnose(log):
    """Name the fault of a measurement and mend what can be mended.

    log: dict with "order" (str of "A" and "B"), "us" and "wait_us" (lists of floats, µs, one per call, in time order).
    Returns (fault, ratio): fault is "order", "no_sync", "warm_up" or "fine"; ratio is A's time over B's
    (float), None for "order".
    """
    ### BEGIN SOLUTION: 先找出 A 和 B 各自的位置，再按题目的次序逐条检查；倍数用每一方去掉第一次以后的中位数
    order = np.array(list(log["order"]))
    us, wait_us = np.array(log["us"], float), np.array(log["wait_us"], float)
    places = [np.flatnonzero(order == side) for side in "AB"]
    if abs(places[0].mean() - places[1].mean()) > len(order) / 4:
        return "order", None
    unsynced = np.median(wait_us) > 0.1 * np.median(us)
    true_us = us + wait_us if unsynced else us
    a, b = (np.median(true_us[place[1:]]) for place in places)
    cold = any(us[place[0]] > 2 * np.median(us[place[1:]]) for place in places)
    return ("no_sync" if unsynced else "warm_up" if cold else "fine"), float(a / b)
    ### END SOLUTION


# %% test="diagnose" kind="answer" points=3
logs = reference.value("LOGS")
check.equal(student.diagnose(logs["甲"]), ("no_sync", 2.0), rel=1e-9, why="甲：停表以后还要等几百微秒，GPU 根本没做完。加上等待，去掉每一方的第一次，A 是 400 µs，B 是 200 µs。")
check.equal(student.diagnose(logs["乙"]), ("warm_up", 2.5), rel=1e-9, why="乙：A 的第一次是其余各次的一百多倍。去掉每一方的第一次，A 的中位数是 500 µs，B 是 200 µs。")
check.equal(student.diagnose(logs["丙"]), ("order", None), why="丙：A 全在前面，B 全在后面，慢慢变长的时间分不清是谁的错。这份记录救不回来，倍数应当是 None。")
check.equal(student.diagnose({"order": "ABBAAB", "us": [30.0, 10.0, 11.0, 31.0, 29.0, 10.0], "wait_us": [1.0, 0.5, 0.5, 1.0, 1.0, 0.5]}), ("fine", 30 / 10.5), rel=1e-9, why="轮流、同步、预热都没问题，应当是 fine；倍数仍要去掉每一方的第一次，并且只用 us。")
### BEGIN HIDDEN TESTS
def rule(log):
    """The answer, and whether no threshold is anywhere near."""
    order, us, wait = np.array(list(log["order"])), np.array(log["us"]), np.array(log["wait_us"])
    places = [np.flatnonzero(order == side) for side in "AB"]
    apart = abs(places[0].mean() - places[1].mean()) / len(order)
    waits = np.median(wait) / np.median(us)
    colds = [us[place[0]] / np.median(us[place[1:]]) for place in places]
    clear = abs(apart - 0.25) > 0.03 and not 0.08 < waits < 0.13 and not any(1.7 < c < 2.4 for c in colds)
    total = us + wait if waits > 0.1 else us
    ratio = float(np.median(total[places[0][1:]]) / np.median(total[places[1][1:]]))
    if apart > 0.25:
        return ("order", None), clear
    return ("no_sync" if waits > 0.1 else "warm_up" if max(colds) > 2 else "fine", ratio), clear


def invented(order, a, b, share=0.01, cold="", hiccup=None, stall=None):
    """A log: A takes a, B takes b, share of it waited for afterwards; first calls of `cold` are slow; one hiccup, one long wait."""
    us = np.array([a if side == "A" else b for side in order]) * secret.uniform(0.96, 1.04, len(order))
    wait = us * share * secret.uniform(0.9, 1.1, len(order))
    for side in cold:
        us[order.index(side)] *= secret.uniform(4, 40)
    if hiccup is not None:
        us[hiccup] *= 30
    if stall is not None:
        wait[stall] = 40 * us.max()
    return {"order": order, "us": us.tolist(), "wait_us": wait.tolist()}


def leaning(least, most):
    """An order of sixteen calls, drawn until the mean places of A and B lie between these shares of all calls apart."""
    while True:
        order = "".join(secret.permutation(list("ABBA" * 4)))
        if least < abs(np.mean([k if side == "A" else -k for k, side in enumerate(order)])) * 2 / len(order) < most:
            return order


def first_call(side, times):
    """A log of ABBAABBA whose first call of that side takes `times` the median of its others."""
    log = invented("ABBAABBA", 100, 80)
    first, *others = [k for k, each in enumerate(log["order"]) if each == side]
    log["us"][first] = times * float(np.median([log["us"][k] for k in others]))
    return log


SPECIAL = [
    ("A 和 B 的长短差得多时，判断没预热要和同一方比，不能和全体比。", [invented("ABBAABBA", 100, 320), invented("BAABBAAB", 900, 120), invented("AABAABAABAA", 50, 160), invented("BBABBABBABB", 200, 60)]),
    ("冷的可能是 A，可能是 B，也可能两边都冷；卡顿若不在第一次，就不算没预热。", [invented("ABBAABBA", 100, 100, cold="B"), invented("BAABBAAB", 100, 90, cold="AB"), invented("ABBAABBA", 100, 80, hiccup=4), {"order": "ABBAABBA", "us": [310.0, 82.0, 80.0, 104.0, 2900.0, 79.0, 81.0, 98.0], "wait_us": [1.0] * 8}]),
    ("10% 比的是两个中位数：每一次停表后的等待都差不多长时，不能因为 B 很短就算没等 GPU。", [{"order": "ABBAABBA", "us": [400.0, 11.0, 9.0, 410.0, 390.0, 10.0, 9.5, 405.0], "wait_us": [10.0, 9.0, 10.0, 11.0, 10.0, 9.5, 10.0, 10.5]}]),
    ("一次特别长的等待或一次卡顿，不应当改变“没等 GPU”的判断：要用中位数。", [invented("ABBAABBA", 100, 80, stall=3), invented("ABBAABBA", 100, 50, share=0.3, hiccup=5), invented("BABAABBA", 200, 60, share=9.0, hiccup=3)]),
    ("一边倒不一定是整整齐齐的两半；交替或成对轮流则不算。", [invented("AAABAABBABBB", 90, 100), invented("BBBBABBAAAAA", 90, 100), invented("ABABABAB", 90, 100), invented("AABBBBAABBAAAABB", 90, 100), invented("BABBAABA", 90, 100)]),
    ("几种毛病一起出现时，按题目的次序报告第一个；倍数仍要修正。", [invented("AAAAABBBBB", 90, 100, share=5.0), invented("BBBBAAAA", 90, 100, cold="AB"), invented("ABBAABBA", 300, 100, share=2.0, cold="AB")]),
    ("一边倒看的是平均位置之差，不是位置的中位数，也不看谁先谁后。", [invented("AAABBBBBAA", 90, 100), invented("ABBBABAAAB", 90, 100)]),
    ("差一点和刚过线都要分清：一边倒是总次数的四分之一，没等 GPU 是 10%，没预热是 2 倍。", [invented(leaning(0.21, 0.245), 90, 100), invented(leaning(0.255, 0.29), 90, 100), invented("ABBAABBA", 90, 100, share=0.085), invented("ABBAABBA", 90, 100, share=0.12), first_call("A", 1.85), first_call("B", 1.85), first_call("A", 2.15), first_call("B", 2.15)]),
    ("每一方只有两三次、两方次数不同时也要对。", [invented("ABBA", 90, 30, cold="A"), invented("BAAB", 30, 90), invented("ABBABA", 50, 20, share=3.0), invented("ABBABBABBABB"[:9], 70, 40)]),
]
for why, special in SPECIAL:
    check.equal([student.diagnose(log) for log in special], [rule(log)[0] for log in special], rel=1e-6, why=why)

drawn = {fault: [] for fault in ("order", "no_sync", "warm_up", "fine")}
while min(map(len, drawn.values())) < 8:
    n = int(secret.integers(3, 12))
    letters = "".join(secret.permutation(list("ABBA" * n)))
    order = str(secret.choice(["ABBA" * n, letters, "A" * 2 * n + "B" * 2 * n, "B" * n + "A" * n]))
    log = invented(order, float(secret.uniform(20, 900)), float(secret.uniform(20, 900)), share=float(secret.choice([0.005, 0.04, 0.5, 20.0])), cold=str(secret.choice(["", "", "A", "B", "AB"])))
    answer, clear = rule(log)
    if clear and len(drawn[answer[0]]) < 8:
        drawn[answer[0]].append((log, answer))
for cases in drawn.values():
    check.equal([student.diagnose(log) for log, _ in cases], [answer for _, answer in cases], rel=1e-6, why="换了随机的记录以后，毛病或倍数不对。请逐条对照题目的四条规则，以及倍数的修正办法。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习二：一块信得过的表（3 分）
#
# 写 `time_gpu(work)`：`work` 是一个没有参数的函数，它启动一些 GPU 工作，通常不等做完就返回。
# 返回**一次** `work()` 的端到端时间（µs，`float`）：从调用它，到它交出去的全部 GPU 工作做完。要求：
#
# - `work` 可能用自己的流，也可能用好几条流，你不知道是哪几条；
# - 第一次调用可能特别慢（编译、加载），不能算进去；
# - 每次的长短可能不同：预热之外至少量 10 次，返回**中位数**；
# - 每次开表的时候，GPU 应当是空闲的：上一次的工作不能拖进来，下一次的也不能提前叠上去；
# - 自己写，不调用 `lab` 里现成的计时函数（评分时会查）。
#
# 评分用的是已知长短的空转：读数与实际相差不能超过 15%；把空转加倍，读数也要加倍。
#
# 先给一个造 `work` 的函数，自己试的时候可以用它：

# %% tags=["gpu"]
def make_work(us, wait=False):
    """Return a function that spins us µs on a non-blocking stream of its own; with wait=True it returns only once that is done."""
    own = cp.cuda.Stream(non_blocking=True)

    def work():
        with own:
            launch_spin(us)
        if wait:
            own.synchronize()

    return work


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# “错表陈列室”里每一种错法，对应上面的哪一条要求？你不知道工作在哪条流上，停表之前该等谁？
# 预热的那一次，GPU 上的工作什么时候才算完？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `cp.cuda.Device().synchronize()` 等整个设备；`time.perf_counter_ns()` 返回整数纳秒，记得在自己的单元里导入；
# `np.median(samples)` 返回 NumPy 标量，用 `float(...)` 转换。1 µs = 1000 ns。
#
# </details>

# %% solution="time_gpu" tags=["gpu"]
def time_gpu(work):
    """Median end-to-end time of one call of work(), in µs (float): until all GPU work that it launched is done.

    work: a function without arguments that launches on whatever streams it likes. The first call is not counted;
    at least 10 calls are, each starting on an idle GPU.
    """
    ### BEGIN SOLUTION: 先调用一次当作预热并等 GPU 做完；然后每次开表、调用、等整个设备、停表，重复十几次取中位数
    from time import perf_counter_ns

    device = cp.cuda.Device()
    work()
    device.synchronize()
    samples = []
    for _ in range(15):
        start = perf_counter_ns()
        work()
        device.synchronize()
        samples.append(perf_counter_ns() - start)
    return float(np.median(samples)) / 1000
    ### END SOLUTION


# %% test="time_gpu" kind="structure" points=3 tags=["gpu", "alone"]
check.equal(student.time_gpu(student.make_work(4000)), 4000.0, rel=0.15, why="空转 4000 µs，读数应当接近 4000。停表之前等整个设备了吗？单位是 µs 吗？")
check.equal(student.time_gpu(student.make_work(8000)), 8000.0, rel=0.15, why="空转加倍到 8000 µs，读数没有跟着加倍。")
### BEGIN HIDDEN TESTS
PLANNED = r'''
import sys
from time import perf_counter, sleep

import cupy
import numpy

KERNEL = cupy.RawKernel(r"""
extern "C" __global__ void planned(const unsigned long long *plan, unsigned int period, unsigned int *calls) {
    unsigned long long start, now, ns = plan[*calls % period];
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
    *calls += 1;
}
""", "planned")


def make_planned(lanes, cpu_us=0, first_ms=0):
    """Work: cpu_us on the CPU, then one kernel per lane [plan, calls], each on a stream of its own. The first call sleeps."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in lanes]
    called = []

    def work():
        caller = sys._getframe(1)
        while caller is not None:
            if caller.f_globals.get("__name__", "").startswith("launchlab.lab"):
                raise RuntimeError("这道题要自己写计时，不用 lab 里现成的函数")
            caller = caller.f_back
        if not called:
            sleep(first_ms / 1000)
        called.append(True)
        until = perf_counter() + cpu_us / 1e6
        while perf_counter() < until:
            pass
        for side, (plan, calls) in zip(streams, lanes):
            with side:
                KERNEL((1,), (1,), (plan, numpy.uint32(plan.size), calls))

    return work
'''


def plan_of(*us):
    """Two buffers of the examiner's: how long each call spins, in turn; and how many calls the GPU has finished."""
    return [on_gpu(np.array([each * 1000 for each in us], np.uint64)), on_gpu(np.zeros(1, np.uint32))]


make_planned = student.define(PLANNED, "make_planned")
spin_us = int(secret.integers(3000, 5000))
lane = plan_of(spin_us)
planned = make_planned([lane])
once = student.time_gpu(planned)
check.equal(once, float(spin_us), rel=0.15, why="换一个长短不同的工作，读数与实际相差超过 15%。它用的是自己的流：你等的是整个设备吗？")
calls = int(lane[1].read()[0])
check.that(calls >= 11, why="调用 work 的次数太少：预热之外至少要量 10 次。")
lane[0].write(np.array([2 * spin_us * 1000], np.uint64))
check.equal(student.time_gpu(planned) / once, 2.0, rel=0.15, why="同一个工作，GPU 上的时间加倍，读数没有加倍。读数里混进了别的时间，或者缓存了上一次的结果。")
parallel = make_planned([plan_of(spin_us), plan_of(3 * spin_us)])
check.equal(student.time_gpu(parallel), 3.0 * spin_us, rel=0.15, why="工作分在两条并行的流上，端到端时间由较长的一条决定。只等其中一条，或把两条相加，都不对。")
prepared_first = make_planned([plan_of(4000)], cpu_us=4000)
check.equal(student.time_gpu(prepared_first), 8000.0, rel=0.15, why="CPU 先忙一阵才启动内核，一次的端到端时间是两段之和。如果先提交很多次，最后才同步、再除以次数，两段就会叠在一起，量出来偏小；只看 GPU 的事件也会漏掉 CPU 的一段。")
lengths = [spin_us * 2 // 5, spin_us, 3 * spin_us]
for turned in range(3):  # whichever call somebody picks, it is of the middle length once only
    uneven = make_planned([plan_of(*lengths[turned:], *lengths[:turned])], first_ms=0 if turned else 300)
    check.equal(student.time_gpu(uneven), float(spin_us), rel=0.15, why="各次的长短不同，而且第一次特别慢：应当返回预热之后各次的中位数，不是平均数、最小值，也不是某一次的时间。")
# Each call is a step shorter than the one before, and the last one takes one step: the median of the last ten takes 5.5, of fewer at most 5.
step_us = 750
shrinking = make_planned([plan_of(*[step_us * min(calls - k, 8) for k in range(calls)])])
check.that(student.time_gpu(shrinking) > 5.2 * step_us, why="参与中位数的测量不到 10 次：预热的那几次不算，预热之外至少还要量 10 次，再取它们全部的中位数。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：是真的异步吗（3 分）
#
# 写 `is_async(launch)`：`launch` 是一个没有参数的函数，至少启动一个内核。如果它**不等 GPU 做完**就返回，返回 `True`；
# 如果它要等自己的工作做完才返回，返回 `False`。要求：
#
# - 内核有长有短，短的只有 20 µs，也许比一次启动长不了多少；
# - `launch` 用哪条流你不知道：可能是它自己的流，可能是默认流；
# - 它在 CPU 上可能还做别的事，启动之前或之后都有可能，最多忙 20 ms。忙归忙，只要不是在等 GPU，就算异步；
# - 等待的方式五花八门：同步流、同步设备、反复查询、读回结果……（去同步或查询一条闲着的、与自己的内核无关的流，等于没等。）
# - 第一次调用可能特殊（编译、加载，甚至只在第一次等一下），不算数；
# - 调用你的函数时 GPU 是空闲的；你返回之前也要让它恢复空闲。
#
# 光看调用花了多少微秒是不行的：异步而 CPU 很忙的，比“阻塞但内核很短”的要长得多。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 难点在于内核太短：等你去看的时候，GPU 已经做完了，分不清它是“等出来的”还是“碰巧做完的”。
# 有没有办法让 `launch` 的内核**在一段时间里根本不可能开始**？如果它在这段时间里就返回了，说明什么？如果它一直不返回呢？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `fill_gpu(us)` 把整个 GPU 堵上 `us` 微秒，堵的工作在 `stream` 上；它不等堵完就返回。
# `stream.done` 查询这条流做完没有，不等待；`cp.cuda.Device().synchronize()` 等整个设备。
# 堵的时间要比 `launch` 在 CPU 上可能花的时间宽裕得多，例如 100 ms。
#
# </details>

# %% solution="is_async" tags=["gpu"]
def is_async(launch):
    """Tell (bool) whether launch() returns without waiting for the GPU work that it launches.

    launch: a function without arguments that launches at least one kernel, on any stream, and keeps the CPU busy
    for at most 20 ms. Its first call does not count. The GPU is idle before and after.
    """
    ### BEGIN SOLUTION: 先预热；再把整个 GPU 堵住，让 launch 的内核无法开始，看它返回时堵的工作还在不在
    device = cp.cuda.Device()
    launch()
    device.synchronize()
    fill_gpu(100_000)
    launch()
    still_full = not stream.done
    device.synchronize()
    return still_full
    ### END SOLUTION


# %% test="is_async" kind="structure" points=3 tags=["gpu", "alone"]
check.equal(student.is_async(student.make_work(1000)), True, why="make_work(1000) 启动以后立刻返回，是异步的。它用的是自己的流。")
check.equal(student.is_async(student.make_work(1000, wait=True)), False, why="make_work(1000, wait=True) 等到自己的内核做完才返回，是阻塞的。堵住的是整个 GPU，还是只有 stream 这一条流？")
check.equal(student.is_async(student.make_work(20)), True, why="内核只有 20 µs，但 make_work(20) 没有等它，仍然是异步的。")
check.equal(student.is_async(student.make_work(20, wait=True)), False, why="内核只有 20 µs，调用很快就返回了，但它确实等了 GPU。")
### BEGIN HIDDEN TESTS
LAUNCHERS = r'''
from time import perf_counter

import cupy
import numpy

SPIN = cupy.RawKernel(r"""
extern "C" __global__ void planted_spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
}
""", "planted_spin")


def poll(stream, array):
    event = stream.record()
    while not event.done:
        pass


def query(stream, array):
    while not stream.done:
        pass


WAITS = {
    "": lambda stream, array: None,
    "stream": lambda stream, array: stream.synchronize(),
    "device": lambda stream, array: cupy.cuda.runtime.deviceSynchronize(),
    "event": lambda stream, array: stream.record().synchronize(),
    "poll": poll,
    "query": query,
    "read": lambda stream, array: array.get(stream=stream),
}
STREAMS = {
    "own": lambda: cupy.cuda.Stream(non_blocking=True),
    "blocking": cupy.cuda.Stream,
    "default": lambda: cupy.cuda.Stream.null,
}


def busy(us):
    until = perf_counter() + us / 1e6
    while perf_counter() < until:
        pass


def make_launcher(us, where="own", wait="", launches=1, before_us=0, after_us=0, first_wait="", idle=False):
    """What idle waits for is a stream of which nothing is ever asked: no wait at all."""
    stream, array = STREAMS[where](), cupy.zeros(64, cupy.uint32)
    watched = cupy.cuda.Stream(non_blocking=True) if idle else stream
    first, later = WAITS[wait or first_wait], WAITS[wait]
    cupy.cuda.runtime.deviceSynchronize()
    called = []

    def launch():
        busy(before_us)
        with stream:
            for _ in range(launches):
                SPIN((1,), (1,), (numpy.uint64(us * 1000),))
        busy(after_us)
        (later if called else first)(watched, array)
        called.append(True)

    launch.stream = stream
    return launch
'''
make_launcher = student.define(LAUNCHERS, "make_launcher")
student.is_async(make_launcher(us=50))
check.equal(student.value("stream").get("done"), True, why="你的函数返回以后，stream 上还有没做完的工作：返回之前要让 GPU 恢复空闲。")
lasting = make_launcher(us=60_000)
student.is_async(lasting)
check.equal(lasting.get("stream").get("done"), True, why="你的函数返回以后，launch 自己的流上还有没做完的工作：返回之前要让整个 GPU 恢复空闲，不只是 stream。")
GROUPS = [
    ("内核很短的时候判断错了。等你去看的时候，短内核可能已经碰巧做完：要让它在一段时间里无法开始。",
     [{"us": 20}, {"us": 20, "wait": "stream"}, {"us": 50}, {"us": 50, "wait": "event"}, {"us": 1000}, {"us": 1000, "wait": "stream"}]),
    ("CPU 忙不等于在等 GPU：启动前后在 CPU 上多花几毫秒，仍然可以是异步的；反过来也一样。不要拿调用花了多久去判断。",
     [{"us": 300, "after_us": 6000}, {"us": 300, "before_us": 6000}, {"us": 30, "before_us": 3000, "wait": "stream"}, {"us": 300, "after_us": 6000, "wait": "stream"}, {"us": 5000, "after_us": 2000}]),
    ("launch 在 CPU 上最多可能忙 20 ms：堵住 GPU 的时间要比它宽裕得多，否则等它返回，堵的工作早就做完了。",
     [{"us": 300, "after_us": 18_000}, {"us": 20, "before_us": 18_000}, {"us": 300, "before_us": 9000, "after_us": 9000, "wait": "stream"}]),
    ("同步或查询一条闲着的、与自己的内核无关的流，不算等 GPU。不要看函数里写了什么，要看 GPU 被堵住时它回不回来。",
     [{"us": 50, "wait": "stream", "idle": True}, {"us": 50, "wait": "stream"}, {"us": 300, "wait": "query", "idle": True}, {"us": 300, "wait": "query"}]),
    ("launch 用的流可能是它自己的、阻塞的，也可能是默认流，而且可能一次启动很多个内核。",
     [{"us": 200, "where": "blocking"}, {"us": 200, "where": "default"}, {"us": 200, "where": "blocking", "wait": "stream"}, {"us": 200, "where": "default", "wait": "stream"}, {"us": 10, "launches": 100}, {"us": 10, "launches": 100, "wait": "event"}]),
    ("等待的方式很多：同步设备、反复查询、读回结果都算；只在第一次调用时等一下的，不算。",
     [{"us": 100, "wait": "device"}, {"us": 100, "wait": "poll"}, {"us": 100, "wait": "read"}, {"us": 100, "first_wait": "device"}, {"us": 20, "first_wait": "stream"}, {"us": 20_000, "wait": "poll"}]),
]
for reason, planted in GROUPS:
    shuffled = [planted[k] for k in secret.permutation(len(planted))]
    answers = [student.is_async(make_launcher(**each)) for each in shuffled]
    check.equal(answers, [not each.get("wait") or each.get("idle", False) for each in shuffled], why=reason)
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：把准备工作做在前面（3 分）
#
# 写 `prepare(function, x, n)`，返回一个没有参数的函数 `run`。每次调用 `run()`，就用 `cuLaunchKernel` 启动 `n` 次内核，
# 第 `i` 次（从 0 数起）的参数是 `x` 的地址、序号 `i`、`x.size`，与 `mix` 的三个参数一一对应。要求：
#
# - `function` 是内核的 `CUfunction` 句柄，一个整数，例如下面的 `MIX_FUNCTION`。评分时会换别的内核，参数的形式相同；
# - 全部启动都放进 `stream`，每个 block 是 `BLOCK` 个线程，block 数像 `launch_mix` 那样向上取整，刚好盖住 `x`；
# - `prepare` 本身什么也不启动；`run` 只启动，不等待；
# - 参数事先打包好，并且一直有人保管：`run` 可能在很久以后才被调用，也可能被调用很多次；
# - 可以先后准备好几个 `run`，互不干扰。
#
# 参数如果没人保管，驱动抄走的就是垃圾：轻则结果不对，重则报非法地址（illegal address，错误码 700）。
# 出了 700，这个进程的 CUDA 就不能再用了：先重启 Jupyter 的内核，再改代码。
#
# 速度：`n = 64`、`x` 有 4096 个元素时，`run` 的时间不超过 `array_chain` 的三分之一。计时用评分者的时钟，
# 端到端（从提交到整个设备同步），两边轮流上场；如果参考实现在这台机器上还不到 6 倍，门槛降为它的一半（不低于 1.2 倍）；加速只走完一半路的，给一半分。
# 内核必须真的一个一个启动 `n` 次：评分时会查；速度超过参考实现的 4 倍，也会被当作没有做完。（下一章的 CUDA 图，留到下一章再用。）

# %% tags=["gpu"]
MIX_FUNCTION = int(mix.kernel.ptr)  # the CUfunction of mix

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 对一次 `run`，哪些东西每次都一样，哪些随 `i` 变？驱动什么时候抄走参数的值？
# 由此，`n` 次启动可以各有一份打好的参数，也可以共用一份、启动之前只改序号，两种都行。
# 还要想：`prepare` 返回以后，那些 `ctypes` 对象由谁留着？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `driver.cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, params, 0)`，
# 其中 `params` 是一个整数：`(ctypes.c_void_p * 3)(地址, 地址, 地址)` 这个数组的 `ctypes.addressof`。
# 参数本身用 `ctypes.c_void_p` 和 `ctypes.c_uint32`，后者的 `.value` 可以改。
# 把整数句柄先换成 `driver.CUfunction(function)` 和 `driver.CUstream(stream.ptr)`，就不必每次启动都换。
# 内层函数用到的外层变量会一直活着；只出现在外层、内层没有提到的，函数返回就没了。
#
# </details>

# %% solution="prepare" tags=["gpu"]
def prepare(function, x, n):
    """Pack the arguments of n launches once. Returns run(), which makes the launches on `stream` and does not wait.

    function: CUfunction handle (int) of a kernel (uint32 *x, uint32 i, uint32 size). x: cupy uint32, 1-D.
    Launch i of 0 … n-1 gets (x, i, x.size), with blocks of BLOCK threads.
    """
    ### BEGIN SOLUTION: 用 ctypes 把三个参数和它们的地址数组准备好，返回一个内层函数去逐个启动；别忘了让内层函数留住这些对象
    kernel, queue, blocks = driver.CUfunction(function), driver.CUstream(stream.ptr), -(-x.size // BLOCK)
    pointer, index, size = ctypes.c_void_p(x.data.ptr), ctypes.c_uint32(0), ctypes.c_uint32(x.size)
    addresses = (ctypes.c_void_p * 3)(*[ctypes.addressof(value) for value in (pointer, index, size)])
    params = ctypes.addressof(addresses)

    def run(kept=(x, pointer, size, addresses)):  # params is a bare number: it keeps nothing alive
        for i in range(n):
            index.value = i  # the driver copies the values before the call returns
            driver.cuLaunchKernel(kernel, blocks, 1, 1, BLOCK, 1, 1, 0, queue, params, 0)

    return run
    ### END SOLUTION


# %% test="prepare_result" kind="structure" points=1 tags=["gpu"]
ones = np.arange(1000, dtype=np.uint32)
state_x = on_gpu(ones)
run = student.prepare(student.value("MIX_FUNCTION"), state_x, 5)
check.equal(state_x.read(), ones, why="prepare 只做准备，不应当启动任何内核，可是 x 已经变了。")
run.run(1)
check.equal(state_x.read(), reference.mixed(ones, 5), why="run() 一次应当启动 5 次，序号 0 … 4。序号是不是都一样？block 数盖住整个 x 了吗？")
run.run(2)
check.equal(state_x.read(), reference.mixed(reference.mixed(reference.mixed(ones, 5), 5), 5), why="再调用两次，应当每次都从序号 0 开始，在 x 当时的内容上继续。")
### BEGIN HIDDEN TESTS
STIR = r'''
import ctypes
import gc
from contextlib import suppress
from time import sleep

import cupy
import numpy

stir = cupy.RawKernel(r"""
extern "C" __global__ void stir(unsigned int *x, unsigned int i, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    unsigned int v = x[t];
    v = (v << 7) | (v >> 25);
    v ^= i * 0x9e3779b9u + size + gridDim.x * 0x01000193u + blockDim.x;
    v *= 0x85ebca6bu;
    x[t] = v;
}
""", "stir")
hold = cupy.RawKernel(r"""
extern "C" __global__ void hold(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
}
""", "hold")


def stir_function():
    return int(stir.kernel.ptr)


def churn(size):
    """Fill memory that nobody keeps with arguments that lead to an array of our own, so that a stale address does no harm."""
    gc.collect()
    decoy = cupy.zeros(size + 4096, cupy.uint32)
    cells = [ctypes.c_void_p(decoy.data.ptr) for _ in range(30_000)]
    arrays = [(ctypes.c_void_p * 3)(*[ctypes.addressof(cell)] * 3) for cell in cells]
    return lambda: (decoy, cells, arrays)


def seen_early(run, stream, x):
    """Launch run() behind 30 ms of work on `stream`; return x as it is before that work is done."""
    other = cupy.cuda.Stream(non_blocking=True)
    with stream:
        hold((1,), (1,), (numpy.uint64(1000),))
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        hold((1,), (1,), (numpy.uint64(30_000_000),))
    run()
    sleep(0.005)
    early = x.get(stream=other)
    cupy.cuda.runtime.deviceSynchronize()
    return early


def recorded(run, stream):
    """What one run() puts into `stream`, as a graph; None where that cannot be captured."""
    failure, graph, refused = cupy.cuda.runtime.CUDARuntimeError, None, False
    stream.begin_capture()
    try:
        run()
    except failure:
        refused = True
    finally:
        with suppress(failure):
            graph = stream.end_capture()
    return None if refused else graph
'''


def stirred(x, n):
    """Return x (numpy uint32) after n rounds of stir, by just as many blocks of 256 threads as cover x."""
    v = x.copy()
    for i in range(n):
        v = (v << np.uint32(7)) | (v >> np.uint32(25))
        v ^= np.uint32((i * 0x9E3779B9 + x.size + -(-x.size // 256) * 0x01000193 + 256) % 2**32)
        v *= np.uint32(0x85EBCA6B)
    return v


kernel_function = student.define(STIR, "stir_function")()
first_size, second_size = 256 * int(secret.integers(2, 12)), int(secret.integers(1, 200))
first_n, second_n = int(secret.integers(6, 40)), int(secret.integers(1, 6))
first_data, second_data = (secret.integers(0, 2**32, size, dtype=np.uint32) for size in (first_size, second_size))
first_x, second_x = on_gpu(first_data), on_gpu(second_data)
first_run = student.prepare(kernel_function, first_x, first_n)
second_run = student.prepare(kernel_function, second_x, second_n)
check.equal(first_x.read(), first_data, why="prepare 不应当启动任何内核。")
kept_alive = student.define(STIR, "churn")(first_size)
first_run.run(1)
check.equal(first_x.read(), stirred(first_data, first_n), why="换了内核、长度和 n，又过了一会儿才调用 run，结果不对。用的是传进来的 function 吗？block 数是不是刚好盖住 x？打包好的参数有没有一直留着：地址只是整数，留不住 ctypes 对象。")
second_run.run(2)
check.equal(second_x.read(), stirred(stirred(second_data, second_n), second_n), why="先后准备两个 run，第二个的结果不对：它们不应当共用参数；它的 x 很小，block 数是不是仍然刚好盖住？")
fresh = first_x.write(secret.integers(0, 2**32, first_size, dtype=np.uint32))
first_run.run(3)
check.equal(first_x.read(), stirred(stirred(stirred(fresh, first_n), first_n), first_n), why="在同一块缓冲里换了新数据，再调用几次 run，结果不对。")
before_run = first_x.read()
early = student.define(STIR, "seen_early")(first_run, student.value("stream"), first_x)
check.equal(early, before_run, why="stream 前面还有没做完的工作，x 却已经变了：启动没有放进 stream，或者 run 里等待了。")
check.equal(first_x.read(), stirred(before_run, first_n), why="排在 stream 里的 run 最后应当照常做完。")
launches = student.define(STIR, "recorded")(first_run, student.value("stream"))
check.that(launches is not None, why="让 stream 处于捕获状态，再调用 run，就出错了：run 里是不是等待了 GPU，或者做了启动以外的事？")
check.nodes(launches, kernels=first_n, total=first_n, edges=first_n - 1, why="run() 每次应当正好往 stream 里逐个启动 n 次内核，别的什么也不放。用 CUDA 图重放不算：那是下一章的办法。")
before_run = first_x.read()
launches.run(1)
check.equal(first_x.read(), stirred(before_run, first_n), why="run() 放进 stream 的那 n 次启动，做出来的结果不对。")
### END HIDDEN TESTS

# %% test="prepare_speed" kind="speedup" points=2 tags=["gpu"]
start_data = secret.integers(0, 2**32, 4096, dtype=np.uint32)
speed_x, speed_y, speed_z = on_gpu(start_data), on_gpu(start_data), on_gpu(start_data)
candidate = student.prepare(student.value("MIX_FUNCTION"), speed_x, 64)
check.speedup(
    candidate,
    over=partial(reference.array_chain, speed_y, 64),
    best=reference.prepare(reference.value("MIX_FUNCTION"), speed_z, 64),
    state=(speed_x, speed_z),
    at_least=3.0,
    ceiling=4.0,  # most of the time is Python's: who calls the driver by a shorter way may well be twice as fast
    why="还不够快。每次启动之前，是不是又重新打包了参数、换算了句柄，或者在 run 里同步了？",
)
### BEGIN HIDDEN TESTS
again = speed_x.write(secret.integers(0, 2**32, 4096, dtype=np.uint32))
runs = int(secret.integers(2, 9))
candidate.run(runs)
for _ in range(runs):
    again = reference.mixed(again, 64)
check.equal(speed_x.read(), again, why="计时以后换一份数据再运行，结果不对：快，但没有做完该做的工作。")
RECORDED = """
def recorded(run, stream):
    import contextlib
    import cupy
    failure, graph, refused = cupy.cuda.runtime.CUDARuntimeError, None, False
    stream.begin_capture()
    try:
        run()
    except failure:
        refused = True
    finally:
        with contextlib.suppress(failure):
            graph = stream.end_capture()
    return None if refused else graph
"""
launches = student.define(RECORDED, "recorded")(candidate, student.value("stream"))
check.that(launches is not None, why="让 stream 处于捕获状态，再调用计过时的 run，就出错了：它是不是等待了 GPU，或者做了启动以外的事？")
check.nodes(launches, kernels=64, total=64, edges=63, why="计过时的 run，没有正好往 stream 里逐个启动 64 次内核。用 CUDA 图重放，或把几次启动合成一次，都不算。")
launches.run(1)
check.equal(speed_x.read(), reference.mixed(again, 64), why="计过时的 run 放进 stream 的那 64 次启动，做出来的结果不对。")
### END HIDDEN TESTS

# %% [markdown] tags=["instructor"]
# 给教师：
#
# - 练习二的空转长度放在评分者的显存里，由内核自己去读，`work` 的 Python 一侧看不到；加倍时改的也只是显存。调用次数由 GPU 数；
#   最后一题让每次比前一次短一步，中位数因此说出自己是几次的中位数，预热很多次、只量几次的写法就露馅了。
# - 练习三的判据不依赖时间长短：`fill_gpu` 坐满所有 SM，`launch` 的内核在 100 ms 内无法开始；只堵一条流、只堵一小会儿、只看当前流、只比较时间，
#   以及不运行、只去看函数里写了什么的写法，各有一组暗题会揭穿。
# - 练习四按整数句柄传内核，逼着用 `cuLaunchKernel`；暗题的内核把 block 数也算进结果，`run` 放进 `stream` 的节点用捕获来数，图的重放不算。门槛由“参考实现的一半”封顶，所以分不出“每次打包”和“事先打包”；
#   保管参数的要求由正确性暗题检查：`churn` 用指向诱饵数组的参数占住被回收的内存，忘了保管的写法会改错数组，而不会弄坏进程。

# %% [markdown]
# ## 小结
#
# | 常听到的说法 | 实验以后的说法 |
# |:--|:--|
# | 启动函数返回，就是做完了 | 返回只表示交出去了；要看结果先同步 |
# | 拷贝真慢 | 拷贝在等前面的内核；先同步再分别计时 |
# | 名字带 `Async` 就不会等 | 目的地是锁页内存才放心；库的封装也可能偷偷同步 |
# | 启动的价钱是固定的 | 同一个内核，经过的层少、参数事先打好包，CPU 就省力；数组表达式一行可能是好几次启动 |
# | 多开几条流就能并行 | 流只是允许并行；填满的 GPU 谁也插不进去 |
# | 每步都同步，更保险 | 同一条流本来就有先后；同步只留给 CPU 要看数据的时候 |
# | 事件最准 | 事件只看 GPU 经过两个记号的时刻；CPU 的力气它看不见 |
# | 多量几次取平均 | 先预热，看中位数；两种做法要轮流上场 |
#
# **带走三句话**
#
# 1. 调用返回、GPU 做完、用户拿到结果，是三个时刻；报数字之前先说是哪一块表。
# 2. 时间按“波”走：block 填不满 GPU 时加活几乎不加时间，填满以后谁来都要排队。
# 3. 一次启动的钱花在 CPU 的准备工作上：能事先做的事先做，能少做的少做。
#
# 下一步：《CUDA 图优化概念》把“吩咐 N 次”变成“吩咐一次”。
