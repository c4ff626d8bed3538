# %% [markdown]
# # CUDA 图优化概念
#
# 一个深度学习模型推理一次，CPU 往往要启动上百个内核（kernel）。如果每个内核只算几微秒，
# CPU 光是“一个一个地吩咐”，就可能比 GPU 干活还慢。
#
# CUDA 图（CUDA Graph）的办法很朴素：**把要吩咐的事情先录下来，以后一次交出去。**
#
# 这一章弄清楚三件事：录下来的到底是什么，省掉的到底是什么，以及什么时候不值得录。
#
# **学完以后，你能够**
#
# - 说出捕获（capture）、实例化（instantiate）、图启动（graph launch）各做什么，并用真实的 API 一步步走完；
# - 分清图记住了什么（地址、标量、依赖），没记住什么（数据、Python 代码）；
# - 自己测出图省下的时间，并说清楚是谁的时间；
# - 用几个数字判断一个任务值不值得用图。
#
# **需要的基础**：《课程导入》里的动机，《CUDA 执行模型》里的流（stream）、事件（event）和异步执行。
#
# **时间**：约 90 分钟，其中四道练习约 40 分钟。
#
# 本章的一些说法和数字来自课程最初的讲义。讲义给了一个好起点，但我们不照单全收：
# 每一条都用一个小实验去问 GPU，不准确的地方就地改正。
#
# 下一格导入的 `check`、`student` 等五个名字只给练习后面的测试单元用，现在不用管它们。

# %%
import numpy as np
from functools import partial
from launchlab import lab
from launchlab.exam import check, on_gpu, reference, secret, student

lab.here()

# %% [markdown]
# ## 逐个启动：钱花在哪里
#
# 先准备三个小内核。这三个名字后面会反复用到：
#
# - `mix`：把数组里的每个 32 位整数“搅拌”一次。它的结果依赖顺序，也很少停在一个值上，
#   所以漏做一次、多做一次、顺序颠倒，结果都会不同，最适合用来验证“该做的真的做了”。
# - `absorb`：把另一块缓冲的内容异或进来，当作“吸收一份新输入”。
# - `spin`：让 GPU 空转一段给定的时间，用来模拟长短不同的内核。
#
# 所有工作都放进同一条流 `stream`。它用 `non_blocking=True` 创建，和默认流互不等待；误区二会看到这为什么要紧。

# %% tags=["gpu"]
import cupy as cp
import cupyx
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

extern "C" __global__ void absorb(unsigned int *x, const unsigned int *input, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) x[t] ^= input[t];
}

extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}
"""
module = cp.RawModule(code=SOURCE)
mix, absorb, spin = (module.get_function(name) for name in ("mix", "absorb", "spin"))

stream = cp.cuda.Stream(non_blocking=True)
BLOCK = 256


# -(-size // BLOCK) is size / BLOCK rounded up: enough blocks to cover every element.
def launch_mix(x, i):
    """Launch mix with index i on x (cupy uint32, 1-D), on the current stream. Returns at once."""
    mix((-(-x.size // BLOCK),), (BLOCK,), (x, np.uint32(i), np.uint32(x.size)))


def launch_absorb(x, arrived):
    """Launch x ^= arrived (cupy uint32, 1-D, same size), on the current stream. Returns at once."""
    absorb((-(-x.size // BLOCK),), (BLOCK,), (x, arrived, np.uint32(x.size)))


def launch_spin(us):
    """Keep one GPU thread busy for us microseconds, on the current stream. Returns at once."""
    spin((1,), (1,), (np.uint64(us * 1000),))


def eager_chain(x, n):
    """Launch mix n times on x, one launch after the other: indices 0 … n-1, on `stream`."""
    with stream:
        for i in range(n):
            launch_mix(x, i)


# The first launch of a kernel loads its code, which may be refused while a stream is capturing: warm up.
with stream:
    warm = cp.zeros(BLOCK, cp.uint32)
    launch_mix(warm, 0)
    launch_absorb(warm, warm)
    launch_spin(1)
stream.synchronize()

# %% [markdown]
# 还要一个 NumPy 版的 `mix`，好知道正确答案是什么。

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
# ### 两块表
#
# 启动 200 个 `mix`，要多久？这个问题其实有两个答案，取决于你问的是谁：
#
# - **提交时间**：CPU 把 200 个内核都交出去用了多久。函数一返回就停表，不管 GPU 做完没有。
# - **端到端时间**：从开始提交，到 GPU 全部做完。停表之前要先同步。
#
# 下面用最原始的方法把两块表都掐一遍。

# %% tags=["demo", "gpu"]
from time import perf_counter

SIZE = 4096
with stream:
    xs = cp.arange(SIZE, dtype=cp.uint32)
stream.synchronize()

start = perf_counter()
eager_chain(xs, 200)
submitted = perf_counter()
stream.synchronize()
finished = perf_counter()

lab.say(
    f"CPU 提交 200 个内核用了 **{(submitted - start) * 1e6:.0f} µs**，"
    f"GPU 全部做完是在第 **{(finished - start) * 1e6:.0f} µs**：提交占了全程的 **{(submitted - start) / (finished - start):.0%}**。"
    f"CPU 平均每个内核要忙 {(submitted - start) * 1e6 / 200:.1f} µs。"
)

# %% [markdown]
# 提交占了全程的绝大部分吗？那就是说，CPU 刚交出最后一个内核，GPU 也差不多做完了：**GPU 一直在等 CPU**。
# 这种情况叫启动受限（launch-bound）。CPU 为每次启动付出的时间，就是启动开销（launch overhead）。
#
# 掐一次表不够可靠：同样的 200 次启动，本章后面还会量到好几回，数字可能差出一半，
# 因为 CPU 的频率、缓存和系统里别的程序都在变。所以要重复，还要轮流：
#
# - `lab.submit_us` 和 `lab.end_to_end_us` 做的就是上面这几行，重复很多次，取中位数；
# - `lab.compare_us` 让两种做法轮流上场（甲乙乙甲，A B B A），机器忽快忽慢对两边是公平的。
#
# ### 内核之间真的有“隐式同步”吗
#
# 讲义说：逐个启动时，“每个 kernel 之间隐式同步”，GPU 要等前一个内核完成才能开始下一个。
# 这句话说的是 CPU 在等，还是 GPU 在等？如果不用同一条流，还等不等？
#
# 拿四个各 2 毫秒的 `spin` 试一试：一次都放在一条流里，一次放在四条流里。

# %% tags=["demo", "gpu"]
SPIN_US = 2000
sides = [cp.cuda.Stream(non_blocking=True) for _ in range(4)]


def spins_in_one_stream():
    with stream:
        for _ in sides:
            launch_spin(SPIN_US)


def spins_in_four_streams():
    for side in sides:
        with side:
            launch_spin(SPIN_US)


submit, total = (lab.compare_us(spins_in_one_stream, spins_in_four_streams, clock=clock) for clock in ("submit", "end_to_end"))
lab.say(
    lab.table(
        ("4 个 2 ms 的内核", "CPU 提交", "端到端"),
        [
            ("一条流", f"{submit.first.median:.0f} µs", f"{total.first.median / 1000:.1f} ms"),
            ("四条流", f"{submit.second.median:.0f} µs", f"{total.second.median / 1000:.1f} ms"),
        ],
    )
)

# %% [markdown]
# 一张表，两个结论：
#
# - **CPU 和 GPU 之间没有同步。** 提交的时间远远少于内核的运行时间：CPU 交完就走，不等任何内核。
#   所以，图也没有什么“同步”可省。
# - **GPU 上的等待来自“同一条流”，不来自“逐个启动”。** 同一条流里的工作按顺序做，这叫流内顺序；
#   放进四条流，四个内核就同时在跑。
#
# 所以更准确的说法是：逐个启动的代价不是“每个内核同步一次”，而是**每个内核都要 CPU 忙一次**，
# 于是提交时间和内核数量成正比，也就是 $O(N)$。

# %% [markdown]
# ## CUDA 图是什么
#
# CUDA 图是一张有向无环图（directed acyclic graph，DAG）：
#
# - **节点（node）** 是一件要做的事：内核、内存拷贝、memset、事件记录，甚至一个 CPU 函数……
# - **边（edge）** 是依赖（dependency）：箭头指向的节点，要等箭头出发的节点做完才能开始。
# - 没有路径相连的两个节点，谁先谁后都可以，也可以同时做。
#
# 比如“先拷入数据，再算两个互不相关的分支，最后合并”，画出来是这样（这一格不需要 GPU）：

# %% tags=["demo"]
import matplotlib.pyplot as plt

lab.plot_style()
lab.draw_graph(
    (
        {"input": "memcpy", "left": "kernel", "right": "kernel", "merge": "kernel", "output": "memcpy"},
        [("input", "left"), ("input", "right"), ("left", "merge"), ("right", "merge"), ("merge", "output")],
    ),
    title="节点是工作，边是依赖",
)
plt.show()

# %% [markdown]
# 图有两种形态，名字很像，别混：
#
# | 形态 | 类型 | 像什么 |
# |:--|:--|:--|
# | 图的定义 | `cudaGraph_t` | 一份菜谱：有哪些步骤，谁先谁后，可以查看和修改 |
# | 可执行图（executable graph） | `cudaGraphExec_t` | 照菜谱备好的一套料：检查过、编好了命令，随时可以下锅，但看不见里面 |
#
# 从代码到执行，正好三步：
#
# 1. **捕获**：照常调用 CUDA，但工作不执行，只被记成节点，得到 `cudaGraph_t`；
# 2. **实例化**：由定义造出 `cudaGraphExec_t`。检查、分配、编排的钱大部分在这一步付；剩下的（把图上传到设备）留到第一次启动，
#    也可以用 `cudaGraphUpload` 提前付；
# 3. **启动**：把可执行图交给一条流，一次调用。想重放（replay）多少次都行。
#
# 讲义把这叫“捕获阶段”和“执行阶段”；实例化夹在两者之间，是最容易被忘记的一步。它和捕获谁更贵，取决于语言和图，后面会量。
#
# ## 第一步：捕获
#
# 最常用的捕获方式是流捕获（stream capture）：让一条流进入捕获状态，此后往这条流里放的工作都被“录”下来。
# 下面的内容和讲义里的 C++ 例子一一对应：两个内核、一次设备内拷贝，我们再添一次事件记录。
# 捕获流也一样：`cp.cuda.Stream(non_blocking=True)` 就是讲义里带 `cudaStreamNonBlocking` 标志的 `cudaStreamCreateWithFlags`。
#
# `cuda.bindings` 的每个函数都返回一个元组，第一项是错误码；`lab.check_cuda` 只做一件事：
# 错误码不为零就抛出带解释的异常，否则把其余的值交给你。

# %% tags=["demo", "gpu"]
GLOBAL = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal
DEVICE_TO_DEVICE = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice

with stream:
    xs = cp.arange(SIZE, dtype=cp.uint32)
    ys = cp.zeros_like(xs)
stopwatch = cp.cuda.Event()
stream.synchronize()
before = xs.get()

lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, GLOBAL))
with stream:
    launch_mix(xs, 0)
    launch_mix(xs, 1)
lab.check_cuda(cudart.cudaMemcpyAsync(ys.data.ptr, xs.data.ptr, xs.nbytes, DEVICE_TO_DEVICE, stream.ptr))
lab.check_cuda(cudart.cudaEventRecordWithFlags(stopwatch.ptr, stream.ptr, cudart.cudaEventRecordExternal))
first_graph = lab.check_cuda(cudart.cudaStreamEndCapture(stream.ptr))

stream.synchronize()
lab.say(
    f"捕获结束后，`xs` 变了吗？**{'没有变' if np.array_equal(xs.get(), before) else '变了'}**。"
    "捕获只记录，不执行：那两个 `mix` 一次也没有运行。"
)

# %% [markdown]
# 录到了什么？可以问驱动：`cudaGraphGetNodes` 给出节点，`cudaGraphNodeGetType` 给出每个节点的种类。

# %% tags=["demo", "gpu"]
from collections import Counter


def kinds(graph):
    """Count the nodes of a graph (cudaGraph_t or int) by kind."""
    _, count = lab.check_cuda(cudart.cudaGraphGetNodes(graph, 0))  # asks only how many there are
    nodes, _ = lab.check_cuda(cudart.cudaGraphGetNodes(graph, count)) if count else ([], 0)
    types = (lab.check_cuda(cudart.cudaGraphNodeGetType(node)) for node in nodes)
    return dict(Counter(kind.name.removeprefix("cudaGraphNodeType") for kind in types))


print(kinds(first_graph))

# %% [markdown]
# 讲义建议先用 `cudaGraphDebugDotPrint` 导出图结构，检查依赖是否符合预期。这是个好习惯：
# 它写出 DOT 格式的文本，看一眼就知道有没有漏录、有没有多出一条边。

# %% tags=["demo", "gpu"]
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "graph.dot")
    lab.check_cuda(cudart.cudaGraphDebugDotPrint(first_graph, str(path).encode(), 0))
    dot = path.read_text()

print(dot[:420], "…")
lab.draw_graph(dot, title="刚才捕获到的图")
plt.show()

# %% [markdown]
# 四个节点连成一条直线。为什么是直线？`mix` 和拷贝确实有先后关系，但驱动并没有去分析数据：
# **同一条流里的先后，被原样记成了边**。后面还会回到这一点。
#
# 关于事件有一个细节。讲义把“事件记录”也列为节点，这只对了一半：
# 普通的 `cudaEventRecord` 在捕获中只是一个记号，用来表达依赖，不产生节点；
# 带 `cudaEventRecordExternal` 标志的才会变成节点，图每次执行都真的记录一次。比较一下：

# %% tags=["demo", "gpu"]
def record(work):
    """Capture what work() launches on `stream`, by CuPy's short form. Returns an instantiated cupy Graph."""
    with stream:
        stream.begin_capture()
        try:
            work()
        finally:
            captured = stream.end_capture()
    return captured


def mix_event_mix(flags):
    launch_mix(xs, 0)
    lab.check_cuda(cudart.cudaEventRecordWithFlags(stopwatch.ptr, stream.ptr, flags))
    launch_mix(xs, 1)


for name, flags in (("普通记录", cudart.cudaEventRecordDefault), ("External", cudart.cudaEventRecordExternal)):
    captured = record(partial(mix_event_mix, flags))
    print(name, kinds(captured.graph))

# %% [markdown]
# 上面的 `record` 用的是 CuPy 的短写法，下一节就讲。先把三步走完。
#
# ## 第二步：实例化
#
# `cudaGraphInstantiate` 检查图的结构，分配需要的资源，把节点编排成可以直接交给 GPU 的形式。
#
# 讲义里的写法有五个参数：`cudaGraphInstantiate(&graphExec, graph, NULL, NULL, 0)`。C 接口从 CUDA 12 起是 `(&exec, graph, flags)`；
# C++ 头文件仍留着五个参数的重载，错误节点和日志被忽略，所以讲义的代码还能编译。在 Python 里只写图和标志位，结果从返回值里拿。

# %% tags=["demo", "gpu"]
first_exec = lab.check_cuda(cudart.cudaGraphInstantiate(first_graph, 0))
print(first_exec)

# %% [markdown]
# ## 第三步：启动
#
# 每次提交只要一次 `cudaGraphLaunch`。它是异步的：函数返回时 GPU 可能还没开始，要读结果必须先同步。
# 同一张可执行图的两次启动不会同时执行，后一次总要等前一次做完。
#
# 连续启动三次，`xs` 应当被搅拌 3 × 2 轮，`ys` 是最后的副本。

# %% tags=["demo", "gpu"]
for _ in range(3):
    lab.check_cuda(cudart.cudaGraphLaunch(first_exec, stream.ptr))
lab.check_cuda(cudart.cudaStreamSynchronize(stream.ptr))

expected = before
for _ in range(3):
    expected = mixed(expected, 2)
print("三次重放的结果与 NumPy 一致：", np.array_equal(ys.get(), expected))

# %% [markdown]
# 可执行图是照着定义造的。造好以后，从定义里删掉“拷贝”那个节点，可执行图还拷贝吗？把定义整个销毁呢？

# %% tags=["demo", "gpu"]
nodes, _ = lab.check_cuda(cudart.cudaGraphGetNodes(first_graph, 4))
(copying,) = (node for node in nodes if lab.check_cuda(cudart.cudaGraphNodeGetType(node)).name == "cudaGraphNodeTypeMemcpy")
lab.check_cuda(cudart.cudaGraphDestroyNode(copying))
print("定义里还剩：", kinds(first_graph))

lab.check_cuda(cudart.cudaGraphLaunch(first_exec, stream.ptr))
lab.check_cuda(cudart.cudaStreamSynchronize(stream.ptr))
expected = mixed(expected, 2)
print("从定义里删掉拷贝以后，可执行图照样拷贝：", np.array_equal(ys.get(), expected))

lab.check_cuda(cudart.cudaGraphDestroy(first_graph))
lab.check_cuda(cudart.cudaGraphLaunch(first_exec, stream.ptr))
lab.check_cuda(cudart.cudaStreamSynchronize(stream.ptr))
print("销毁定义以后，可执行图照样工作：", np.array_equal(ys.get(), mixed(expected, 2)))

lab.check_cuda(cudart.cudaGraphExecDestroy(first_exec))

# %% [markdown]
# 定义和可执行图是两个独立的对象：菜谱改了，备好的料不会跟着变。
# 想让可执行图变，要么更新它，要么用新的定义重新实例化。
#
# ### CuPy 的短写法
#
# 平时不必写这么多。CuPy 的 `stream.end_capture()` 一次做完“结束捕获”和“实例化”，
# 返回的 `cupy.cuda.Graph` 同时拿着两个句柄（handle，指代驱动里某个对象的一个数）：`graph`（定义）和 `graphExec`（可执行图）。

# %% tags=["demo", "gpu"]
with stream:
    stream.begin_capture()
    launch_mix(xs, 0)
    launch_mix(xs, 1)
    short = stream.end_capture()

short.launch(stream)
stream.synchronize()
print(type(short).__name__, kinds(short.graph), "可执行图句柄：", hex(short.graphExec))
print(short.debug_dot_str()[:60], "…")

# %% [markdown]
# 两处小差别值得记住：
#
# - CuPy 默认用最宽松的捕获模式（relaxed），上面的原始调用用的是讲义里的 `cudaStreamCaptureModeGlobal`，检查最严；
# - `record` 把 `end_capture` 放在 `finally` 里：中途出错也一定要结束捕获，否则这条流就一直停在捕获状态。
#   前面的原始调用没有这样做；如果你改动它们时半路出错，运行一次 `cudart.cudaStreamEndCapture(stream.ptr)`，流就恢复正常。

# %% [markdown]
# ## 图记住了什么，没记住什么
#
# 捕获时执行过的 Python 代码，重放时还会执行吗？内核的标量参数，重放时取当时的值还是现在的值？
#
# 猜一猜下面的 `calls` 最后是几，结果里加的是 5 还是 7。

# %% tags=["demo", "gpu"]
calls = 0
index = 5


def step():
    global calls
    calls += 1
    launch_mix(xs, index)


replay = record(step)
index = 7

stream.synchronize()
expected = xs.get()
for _ in range(10):
    replay.launch(stream)
    expected = mixed(expected, 1, first=5)
stream.synchronize()

print("calls =", calls)
print("10 次重放用的都是捕获时的 5：", np.array_equal(xs.get(), expected))

# %% [markdown]
# - **标量按值记录**：捕获那一刻的 5 被抄进了节点，之后变量改成 7 与图无关。
# - **指针也按值记录**：抄进去的是地址。地址里的数据每次重放时才去读，所以数据可以变，见后面的误区一。
# - **Python 代码不被记录**：`step` 只在捕获时跑了一次。计数、打印、`if` 判断都在那一次定下来，重放时不会重来。
#
# 最后一条意味着：如果程序要根据 GPU 的中间结果决定下一步做什么，一张普通的图是录不下来的。
# CUDA 12.4 起可以用条件节点（conditional node）把这种判断也交给 GPU，《形状变化时更新图》会用到。

# %% [markdown]
# ## 捕获期间禁止什么
#
# 捕获时什么都没有真正执行，所以“等它做完”没有意义。那么“现在就要一块显存”呢？
# 讲义点名了几个：`cudaStreamSynchronize`、`cudaDeviceSynchronize`、`cudaMalloc`；并说 `cudaMalloc` 可以换成 `cudaMallocAsync`。
#
# 逐个试：每次开始一次捕获，做一个操作，再结束捕获，把两处的返回码都记下来。`cudaMalloc` 在最严和最宽松的模式下各试一次。

# %% tags=["demo", "gpu"]
RELAXED = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
allocated = []


def sync_stream():
    return cudart.cudaStreamSynchronize(stream.ptr)


def sync_device():
    return cudart.cudaDeviceSynchronize()


def malloc():
    error, pointer = cudart.cudaMalloc(1 << 20)
    if not int(error):
        allocated.append(pointer)
    return (error,)


def malloc_async():
    error, pointer = cudart.cudaMallocAsync(1 << 20, stream.ptr)
    return (error,) if int(error) else cudart.cudaFreeAsync(pointer, stream.ptr)


rows = []
for operation, mode in ((sync_stream, GLOBAL), (sync_device, GLOBAL), (malloc, GLOBAL), (malloc, RELAXED), (malloc_async, GLOBAL)):
    lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, mode))
    with stream:
        launch_mix(xs, 0)
    error = operation()[0]
    ended, graph = cudart.cudaStreamEndCapture(stream.ptr)  # always, also after a refusal
    cudart.cudaGetLastError()  # the runtime remembers a refusal: do not leave it for a later check to find
    found = "没有图" if int(ended) else str(kinds(graph))
    if not int(ended):
        lab.check_cuda(cudart.cudaGraphDestroy(graph))
    name = f"`{operation.__name__}`，{mode.name.removeprefix('cudaStreamCaptureMode').lower()}"
    rows.append((name, f"{error.name}（{int(error)}）", f"{ended.name}（{int(ended)}）", found))
for pointer in allocated:
    lab.check_cuda(cudart.cudaFree(pointer))
lab.say(lab.table(("操作，捕获模式", "操作返回", "结束捕获返回", "得到"), rows))

# %% [markdown]
# 这张表里有四件事：
#
# - 被拒绝的操作返回 900（`cudaErrorStreamCaptureUnsupported`），**同时整次捕获作废**；结束时得到的 901
#   （`cudaErrorStreamCaptureInvalidated`）只是回声，真正的原因是前面那个 900。排错时要找第一个出错的调用：
#   `end_capture` 放在 `finally` 里时，Python 的回溯里会有两个异常，看上面那个。
# - 作废之后仍然要调用 `cudaStreamEndCapture`，流才会回到正常状态。上面的循环能接着试下一个操作，靠的就是这一行。
# - **`cudaMalloc` 不是流里的工作，录不进图。** 它可能暗中同步别的流，所以 global 和 thread-local 模式拒绝它；
#   relaxed 模式放行：当场分配，不成为节点。两种同步则在哪种模式下都不行。
# - `cudaMallocAsync` 是流里的工作，被记成了节点（分配和释放），重放时由图自己管理那块显存。
#   如果只分配、不在图里释放，第二次启动这张图会得到 `cudaErrorInvalidValue`：《流捕获：规则与恢复》会试一遍，《内存池优化》讲怎么办。
#
# 完整的禁令、捕获模式和恢复办法，是《流捕获：规则与恢复》一章的内容。

# %% [markdown]
# ## 讲义最醒目的数字：80 µs → 15 µs？
#
# 一个典型的推理模型有几十层，每层对应一个或几个内核，加起来就是几百次启动。讲义用一张表说明图在这里的收益。
# 先不急着测，只对讲义自己的数字做几次除法（这一格不需要 GPU）：

# %% tags=["demo"]
FOUNDING = {"ResNet-50 推理": (100, 80, 15), "BERT 推理": (200, 150, 30), "多流并发推理": (500, 400, 80)}  # kernels, µs, µs

lab.say(
    lab.table(
        ("讲义的场景", "内核数", "逐个启动 µs", "图 µs", "倍数", "逐个启动：每个内核 µs", "图：每个节点 µs"),
        [
            (name, n, eager, graph, f"{eager / graph:.1f}", f"{eager / n:.2f}", f"{graph / n:.3f}")
            for name, (n, eager, graph) in FOUNDING.items()
        ],
    ),
    measured=False,
)

# %% [markdown]
# 有意思的是最后一列。讲义的正文说，图的启动开销“与图节点数量近似解耦”；
# 可是按它自己的表，图这一列随节点数一起涨，每个节点的开销几乎不变。两种说法不可能都对。
#
# 那就测。我们比三种提交方式：
#
# - **CuPy 逐个启动**：`eager_chain`，包含 Python 和 CuPy 的开销；
# - **`cuLaunchKernel` 逐个启动**：参数事先备好，直接调驱动，更接近“纯粹的启动”；
# - **图启动**：一次 `launch`。
#
# 内核数除了讲义的 100、200、500，还加上 59 和 98：
# 它们是《捕获 TensorRT 推理》一章有一次在 H200 上从真实引擎（ResNet-50 和 BERT-base）的图里数出来的节点数。
# 同一个模型，换一种精度、形状或者融合的方式，节点数就会变；什么都不换，重新构建一次，也可能差上几个。到了那一章，数你自己的引擎。

# %% tags=["demo", "gpu"]
import ctypes

from cuda.bindings import driver


def graph_of_chain(n):
    """Capture n dependent launches of mix on xs."""
    return record(lambda: [launch_mix(xs, i) for i in range(n)])


def driver_chain(n):
    """Return a function that launches the same chain by cuLaunchKernel, with arguments made beforehand."""
    kept = [(ctypes.c_void_p(xs.data.ptr), ctypes.c_uint32(i), ctypes.c_uint32(xs.size)) for i in range(n)]
    arrays = [(ctypes.c_void_p * 3)(*map(ctypes.addressof, values)) for values in kept]  # void *[3] for each launch
    pointers = [ctypes.addressof(array) for array in arrays]
    function, queue, blocks = driver.CUfunction(mix.kernel.ptr), driver.CUstream(stream.ptr), -(-xs.size // BLOCK)

    def launch(kept=kept, arrays=arrays):  # named here so that they live as long as their addresses are used
        for pointer in pointers:
            driver.cuLaunchKernel(function, blocks, 1, 1, BLOCK, 1, 1, 0, queue, pointer, 0)

    # launch() has no time to look at errors: look once, here.
    lab.check_cuda(driver.cuLaunchKernel(function, blocks, 1, 1, BLOCK, 1, 1, 0, queue, pointers[0], 0))
    return launch


def submit_three_ways(n):
    """Median CPU time in µs to submit n launches: by CuPy, by cuLaunchKernel, and as one graph."""
    pair = lab.compare_us(partial(eager_chain, xs, n), partial(graph_of_chain(n).launch, stream), pairs=51)
    return pair.first.median, lab.submit_us(driver_chain(n)).median, pair.second.median


submit_three_ways(100)  # discarded: the first one to be measured pays for a CPU that is still waking up
founding = {n: (eager, graph) for n, eager, graph in FOUNDING.values()}
rows = []
for n, who in ((59, "ResNet-50 引擎"), (98, "BERT-base 引擎"), (100, "讲义"), (200, "讲义"), (500, "讲义")):
    cupy_us, driver_us, graph_us = submit_three_ways(n)
    told = founding.get(n, ("—", "—"))
    rows.append((f"{n}（{who}）", *told, f"{cupy_us:.0f}", f"{driver_us:.0f}", f"{graph_us:.1f}", f"{driver_us / graph_us:.0f}"))
lab.say(
    "CPU 提交时间（µs，中位数）\n\n"
    + lab.table(("内核数", "讲义：逐个", "讲义：图", "实测：CuPy 逐个", "实测：cuLaunchKernel", "实测：图", "cuLaunchKernel / 图"), rows)
    + f"\n\n{n} 个内核，摊到每次启动：讲义 {founding[n][0] / n:.2f} µs，CuPy {cupy_us / n:.2f} µs，`cuLaunchKernel` {driver_us / n:.2f} µs。"
)

# %% [markdown]
# 绝对值和讲义对不上很正常：逐个启动的价格取决于 CPU、驱动和语言，而讲义没有说明它用的是什么。
# 两列实测里还都含着 Python 自己的开销，所以倍数偏大；C++ 程序的启动便宜些，图的收益也就小一些。
#
# 要是哪一行的“图”比节点更多的一行还贵，那是量它的时候机器受了打扰，再跑一遍就会变。
#
# **别背绝对值；能带走的是“逐个”与“图”的对比，而且要在自己的机器上测。**
#
# 再把 N 拉开，画出提交时间随内核数量的变化。色带从第 10 到第 90 百分位；图启动的色带要是很宽，多半也是受了打扰，算出来的斜率会偏大。

# %% tags=["demo", "gpu"]
COUNTS = np.array([1, 3, 10, 30, 100, 300, 1000])
eager, replayed = [], []
for n in COUNTS:
    pair = lab.compare_us(partial(eager_chain, xs, int(n)), partial(graph_of_chain(int(n)).launch, stream))
    eager.append(pair.first)
    replayed.append(pair.second)

fig, ax = plt.subplots()
for label, samples in (("逐个启动（CuPy）", eager), ("图启动", replayed)):
    (line,) = ax.loglog(COUNTS, [s.median for s in samples], label=label)
    ax.fill_between(COUNTS, [s.percentile(10) for s in samples], [s.percentile(90) for s in samples], color=line.get_color(), alpha=0.15)
ax.set_xlabel("内核数量 N")
ax.set_ylabel("CPU 提交时间（µs）")
ax.set_title(f"提交 N 个内核，CPU 要忙多久（{lab.gpu_name()}）")
ax.legend()
plt.show()

per_launch = np.polyfit(COUNTS, [s.median for s in eager], 1)[0]
per_node = np.polyfit(COUNTS, [s.median for s in replayed], 1)[0]
lab.say(
    f"每多一个内核：逐个启动，CPU 多忙 **{per_launch:.2f} µs**；图启动，CPU 多忙 **{per_node * 1000:.1f} ns**。"
    f"在 N = 1000 处，{eager[-1].median:.0f} µs 对 {replayed[-1].median:.1f} µs。"
)

# %% [markdown]
# ### “与节点数解耦”是有条件的
#
# 刚才的图是一条直线，而较新的驱动（CUDA 12.6 起）对直线形的图做了专门优化。讲义的数字也许来自更早的驱动，这只是猜测。
# 如果图有分叉，还这么便宜吗？另外，CPU 不忙了，GPU 上每个节点还要不要时间？
#
# 下面捕获两种形状：一条直线，和四条并排的分支，节点总数相同。从一条流分到几条流叫分叉（fork），合回来叫汇合（join），
# 都用事件表达；这里只是先看一眼，《多流捕获与图的生命周期》一章会细讲。

# %% tags=["demo", "gpu"]
with stream:
    branches = [cp.zeros(SIZE, cp.uint32) for _ in sides]
forked = cp.cuda.Event(disable_timing=True)
joined = [cp.cuda.Event(disable_timing=True) for _ in sides]
stream.synchronize()


def fork_join(works):
    """Run works[k]() on sides[k], between a fork from `stream` and a join back to it."""
    forked.record(stream)
    for side, work, done in zip(sides, works, joined, strict=True):
        side.wait_event(forked)
        with side:
            work()
        done.record(side)
        stream.wait_event(done)


def branched_chain(n):
    """n launches of mix, dealt out to four branches."""
    fork_join([lambda b=b: [launch_mix(b, i) for i in range(n // 4)] for b in branches])


widths = {"直线": graph_of_chain, "四条分支": lambda n: record(partial(branched_chain, n))}
sizes = np.array([40, 100, 200, 500, 1000])
fig, axes = plt.subplots(1, 2, figsize=(9.5, 3.9))
slopes = []
for label, capture in widths.items():
    graphs = [capture(int(n)) for n in sizes]
    submit = [lab.submit_us(partial(g.launch, stream)).median for g in graphs]
    total = [lab.end_to_end_us(partial(g.launch, stream)).median for g in graphs]
    axes[0].plot(sizes, submit, label=label)
    axes[1].plot(sizes, total, label=label)
    (slope, fixed), per_node = np.polyfit(sizes, submit, 1), np.polyfit(sizes, total, 1)[0]
    slopes.append((label, f"{fixed:.1f}", f"{slope * 1000:.1f}", f"{per_node * 1000:.0f}"))
for ax, title in zip(axes, ("CPU 提交一次图", "从提交到 GPU 做完"), strict=True):
    ax.set_xlabel("图的节点数")
    ax.set_ylabel("时间（µs）")
    ax.set_title(title)
    ax.set_ylim(bottom=0)
axes[0].legend()
plt.show()

eager_500 = lab.submit_us(partial(branched_chain, 500), repeats=20)
lab.say(
    lab.table(("图的形状", "CPU：固定部分 µs", "CPU：每个节点多 ns", "端到端：每个节点多 ns"), slopes)
    + f"\n\n同样 500 个内核、四条流，不用图时 CPU 要提交 {eager_500.median:.0f} µs。"
)

# %% [markdown]
# 三句话改正原来的那一句：
#
# - 图把 **CPU 的提交时间**从“随 N 成正比”降到几乎不随 N 变。在较新的驱动上，每个节点的 CPU 开销可以低到几 ns；
#   较旧的驱动约 100～200 ns，与讲义的 150 ns 相符。看你自己的表。
#   （“直线”就是上一张图里的“图启动”。那里的斜率要是大得多，多半是量它时受了打扰，以这里为准：这里一次只量一张图，不和逐个启动轮流。）
# - 有分叉的图也差不多，往往只是固定部分贵一点。
# - **GPU 该做的内核一个也没少**：右图的两条线都随节点数上升。四条分支升得慢，是因为分支重叠着做，不是节点变便宜了。
#
# $O(N) \to O(1)$ 说的是 CPU 的提交，不是 GPU 的执行。

# %% [markdown]
# ## 图会替你安排执行顺序吗
#
# 讲义说驱动会“解析整张图，优化执行顺序”，没有依赖的节点可以并行。那么，
# 如果四个 `spin` 彼此毫无关系，却是在同一条流里捕获的，图能看出来并让它们并行吗？

# %% tags=["demo", "gpu"]
spin_once = partial(launch_spin, SPIN_US)
in_line = record(spins_in_one_stream)
side_by_side = record(lambda: fork_join([spin_once] * 4))

fig, axes = plt.subplots(1, 2, figsize=(10, 3.4), width_ratios=(3, 1))
lab.draw_graph(in_line.debug_dot_str(), ax=axes[0], title="在一条流里捕获")
lab.draw_graph(side_by_side.debug_dot_str(), ax=axes[1], title="分叉到四条流")
plt.show()

rows = [
    (name, f"{lab.end_to_end_us(partial(g.launch, stream), repeats=10).median / 1000:.1f} ms")
    for name, g in (("在一条流里捕获", in_line), ("分叉到四条流捕获", side_by_side))
]
lab.say(lab.table(("4 个互不相关的 2 ms 内核", "图的端到端时间"), rows))

# %% [markdown]
# 看不出来。**驱动不分析数据，只看边。** 在一条流里捕获，先后顺序就成了边，图必须遵守；
# 要并行，就得在捕获时分叉，让它们之间没有路径相连。
#
# 还要注意：不用图、直接放进四条流，四个内核本来也能并行（见“隐式同步”一节的表）。
# 并行来自依赖关系，不是图带来的；图带来的是“把整张依赖关系一次交出去”，让 GPU 自己按边调度，CPU 不再插手。
#
# 回头看讲义那张表的“收益来源”，一行一个说法：
#
# - 消除逐核启动与同步等待：前一半成立；同步本来就没有；
# - 图内节点并行调度：要靠你自己在捕获时分叉；
# - 减少 CPU 干预：成立，而且和第一行的前一半是同一件事。

# %% [markdown]
# ## 值不值得
#
# ### 收益取决于内核有多短
#
# 讲义说启动开销可占总延迟的 10%～30%。图能省下的，最多就是启动占的这一份；那么图真能省下百分之几，是固定的吗？
# 用 50 个 `spin` 组成链，让每个内核空转的时间从 0 到 100 µs 逐渐变长，量一量图省下的端到端时间。

# %% tags=["demo", "gpu"]
DURATIONS = (0, 2, 5, 10, 20, 50, 100)


def spin_chain(us):
    with stream:
        for _ in range(50):
            launch_spin(us)


spin_pairs = [
    lab.compare_us(partial(spin_chain, us), partial(record(partial(spin_chain, us)).launch, stream), clock="end_to_end")
    for us in DURATIONS
]
gains = [100 * (1 - 1 / pair.ratio) for pair in spin_pairs]

fig, ax = plt.subplots()
ax.axhspan(10, 30, color="#E69F00", alpha=0.18, label="讲义：启动占 10%～30%")
ax.plot(range(len(DURATIONS)), gains, label="实测")
ax.axhline(0, color="#555555", linewidth=0.8)
ax.set_xticks(range(len(DURATIONS)), [str(us) for us in DURATIONS])
ax.set_xlabel("要求每个内核空转的时间（µs）")
ax.set_ylabel("图省下的端到端时间（%）")
ax.set_title(f"内核越短，图越值钱（{lab.gpu_name()}）")
ax.legend()
plt.show()
lab.say("；".join(f"空转 {us} µs 省 {gain:.0f}%" for us, gain in zip(DURATIONS, gains, strict=True)) + "。")

# %% [markdown]
# 没有固定的比例。提交和执行是同时进行的：CPU 在提交第 5 个内核时，GPU 可能在做第 3 个。所以慢的一方说了算：
#
# - 内核比启动还短：GPU 等 CPU，启动受限，图能省下一大块；
# - 内核比启动长：CPU 早就排好了队，启动开销被藏住了，这叫计算受限（compute-bound），图几乎不省时间，但 CPU 仍然轻松了。
#
# 这里的“计算受限”只是说 GPU 一直有活干，不分瓶颈是算力还是显存带宽；在屋顶线模型（roofline）里，同一个词是与访存受限相对的。
#
# 10%～30% 是从一头走到另一头时经过的一段。这一段落在哪里，看启动有多贵：Python 的启动比 C++ 贵，所以这条曲线偏右。
#
# ### 建一张图要多少钱
#
# 捕获和实例化都要时间，第一次启动也比以后慢一些，慢出来的部分一并算在建图里。
# 重放多少次才能回本？这个次数叫盈亏平衡点（break-even）。

# %% tags=["demo", "gpu"]
from math import ceil
from time import perf_counter_ns

N = 200


def capture_chain_raw():
    """Capture the chain of N launches with explicit calls. Returns a cudaGraph_t."""
    lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, GLOBAL))
    eager_chain(xs, N)
    return lab.check_cuda(cudart.cudaStreamEndCapture(stream.ptr))


steps = {"捕获": [], "实例化": [], "第一次启动（端到端）": []}
for _ in range(10):
    clock = [perf_counter_ns()]
    graph = capture_chain_raw()
    clock.append(perf_counter_ns())
    graph_exec = lab.check_cuda(cudart.cudaGraphInstantiate(graph, 0))
    clock.append(perf_counter_ns())
    lab.check_cuda(cudart.cudaGraphLaunch(graph_exec, stream.ptr))
    stream.synchronize()
    clock.append(perf_counter_ns())
    for name, spent in zip(steps, np.diff(clock), strict=True):
        steps[name].append(spent / 1000)
    lab.check_cuda(cudart.cudaGraphExecDestroy(graph_exec))
    lab.check_cuda(cudart.cudaGraphDestroy(graph))

chain = graph_of_chain(N)
pair = lab.compare_us(partial(eager_chain, xs, N), partial(chain.launch, stream), clock="end_to_end")
t_eager, t_graph = pair.first.median, pair.second.median
cost = {name: float(np.median(spent)) for name, spent in steps.items()}
t_build = cost["捕获"] + cost["实例化"] + max(0.0, cost["第一次启动（端到端）"] - t_graph)
cost |= {"稳定以后重放一次": t_graph, "逐个启动一次": t_eager}
lab.say(lab.table((f"{N} 个节点", "µs"), [(name, f"{us:.0f}") for name, us in cost.items()]))

# %% tags=["demo", "gpu"]
crossing = t_build / (t_eager - t_graph) if t_eager > t_graph else None
runs = np.array([0, max(6, 2.5 * crossing) if crossing else 20])
fig, ax = plt.subplots()
ax.plot(runs, runs * t_eager / 1000, marker="", label="逐个启动")
ax.plot(runs, (t_build + runs * t_graph) / 1000, marker="", label="建图 + 重放")
ax.set_xlabel("重放次数")
ax.set_ylabel("累计时间（ms）")
ax.set_title(f"多少次才能回本（{N} 个内核，{lab.gpu_name()}）")
ax.legend()
plt.show()
if crossing is None:
    lab.say("这一次，图重放一轮并不比逐个启动快：两条线不相交，永远回不了本。")
else:
    lab.say(
        f"建图花 {t_build:.0f} µs，每次重放省 {t_eager - t_graph:.0f} µs。"
        f"两条线在 {crossing:.1f} 次处相交：重放到第 **{ceil(crossing)}** 次回本。"
    )

# %% [markdown]
# **轮到你**：如果链上只有 20 个内核，交点往左还是往右移？500 个呢？先写下猜测，再改上面的 `N`，重新运行这两格。
#
# 重放成千上万次的推理服务，回本只是一眨眼；可要是每个请求都重新捕获一次，
# 每张图就只重放一次：交点在 1 附近，是白忙一场；在 1 的右边，是次次亏本。
# 练习三会让你写出这个计算。
#
# ### 抖动
#
# 讲义还说，图可以降低实时渲染的帧延迟抖动。把 100 个内核当作一帧，逐个启动和图各跑 300 帧，
# 比较 p50（中位数）和 p99（100 帧里有 99 帧不超过它）。

# %% tags=["demo", "gpu"]
frame = graph_of_chain(100)
pair = lab.compare_us(partial(eager_chain, xs, 100), partial(frame.launch, stream), clock="end_to_end", pairs=300)
lab.say(
    lab.table(
        ("一帧的端到端时间", "p50 µs", "p99 µs", "p99 − p50 µs"),
        [
            (name, f"{s.median:.0f}", f"{s.percentile(99):.0f}", f"{s.percentile(99) - s.median:.0f}")
            for name, s in (("逐个启动", pair.first), ("图", pair.second))
        ],
    )
)

# %% [markdown]
# 讲义的道理是：逐个启动时，CPU 在一帧里有 100 次被打断的机会；用图只有一次。图的抖动应当小得多。
#
# 但这只说了提交。别的程序也在用这块 GPU，或者 CPU 等结果时被叫走了，用图的一帧照样会拖长。
# 而且 300 帧的 p99 只看最慢的三四帧，再量一遍就可能变，图的那一行比逐个启动还大也不奇怪。
# 要下结论，就在你真正部署的、忙碌的机器上多量一些帧。
#
# ### 一条可以算的规则
#
# 现在可以把“适合”写成算式了。对一个要反复执行的任务，设每一轮有 `n_kernels` 个内核，
#
# - 逐个启动一轮：`n_kernels × max(launch_us, kernel_us) + other_us`，慢的一方说了算；
# - 用图一轮：`graph_us + n_kernels × kernel_us + other_us`，再摊上建图的 `build_us / replays`。
#
# 其中 `kernel_us` 指内核首尾相接时平均每个占的时间；`other_us` 是图管不到的时间，例如图外的拷贝和 CPU 的前后处理；
# `replays` 是这张图作废之前能重放的次数。**本课程约定：平均每轮至少省下 10%，才算值得**，省得太少，抵不上维护的麻烦。
# 还有一条先决条件：如果一轮的中途必须把结果读回 CPU，才知道下一步做什么，这一轮就录不成一张图，不值得。
#
# 这条规则有多准？把它画到刚才那条实测曲线上：`launch_us` 另外量一次，`kernel_us` 就取图里平均每个节点的时间。

# %% tags=["demo", "gpu"]
launch_us = lab.submit_us(partial(spin_chain, 0)).median / 50
node_us = np.array([pair.second.median for pair in spin_pairs]) / 50  # graph_us included, shared out among the nodes
ruled = 100 * (1 - node_us / np.maximum(launch_us, node_us))

fig, ax = plt.subplots()
ax.plot(range(len(DURATIONS)), gains, label="实测")
ax.plot(range(len(DURATIONS)), ruled, label="规则")
ax.set_xticks(range(len(DURATIONS)), [str(us) for us in DURATIONS])
ax.set_xlabel("要求每个内核空转的时间（µs）")
ax.set_ylabel("图省下的端到端时间（%）")
ax.set_title(f"规则与实测（每次启动 {launch_us:.1f} µs，{lab.gpu_name()}）")
ax.legend()
plt.show()

# %% [markdown]
# 走势大体对得上，数值是近似的。内核和启动差不多长的地方差得最多：`launch_us` 稍有出入，规则就从“省一截”变成“不省”。
# 内核较长时，实测多半还比规则多省一点：图里相邻节点之间的间隙通常更短，规则把它忽略不计。
# 离 10% 那条界线远的任务，这样的精度足够判断；离得近的，还是要直接量。拿它去看常见的任务：
#
# | 任务 | 为什么适合或不适合 |
# |:--|:--|
# | 深度学习推理，小批量 | 几十到几百个短内核，流程固定，重放无数次：最适合 |
# | 强化学习、仿真 | 每次迭代都是同一串内核 |
# | 科学计算，如分子动力学 | 每一步的计算流程固定，步数极多 |
# | 实时渲染 | 每帧工作流固定，看重抖动 |
# | 动态形状的批处理 | 每种尺寸要有自己的图，或者更新已有的图；尺寸反复出现才划算 |
# | 大批量训练 | 内核很长，启动开销被藏住，收益很小 |
# | 每次流程都不同 | 图建好就作废，建图的钱收不回来 |
# | 拷贝或 CPU 处理占大头 | 图管不到那一段，省下的只是零头 |

# %% [markdown]
# ## 误区一：捕获以后，输入数据就不能变了
#
# 图记住的是地址，不是数据。同一块显存，换一份数据再重放，结果就是新数据的；
# 另开一块显存放新数据，图却看不见。两种情况都试一遍：

# %% tags=["demo", "gpu"]
with stream:
    a = cp.arange(SIZE, dtype=cp.uint32)
    b = cp.full(2 * SIZE, 9, dtype=cp.uint32)  # longer: a shape that changed
on_a = record(lambda: [launch_mix(a, i) for i in range(3)])

fresh = np.full(SIZE, 7, np.uint32)
with stream:
    a.set(fresh)  # new data, same address
on_a.launch(stream)
stream.synchronize()
print("同一地址，新数据：结果正确", np.array_equal(a.get(), mixed(fresh, 3)))
print("另一块缓冲 b：图没有碰它 ", np.array_equal(b.get(), np.full(2 * SIZE, 9, np.uint32)))

# %% [markdown]
# 输出也一样：它总在同一个地址。再重放一次，上一次的结果还在吗？

# %% tags=["demo", "gpu"]
with stream:
    copied = a.copy()
on_a.launch(stream)
stream.synchronize()
print("a 里还是上一次的结果：    ", np.array_equal(a.get(), mixed(fresh, 3)))
print("事先拷出来的那份没有变：  ", np.array_equal(copied.get(), mixed(fresh, 3)))

# %% [markdown]
# 所以结果要在下一次重放之前取走，或者拷出来。
#
# 那么输入来自另一个地址，比如另一块缓冲，怎么办？
#
# - 最常用的办法是不换地址：先把新数据拷进固定的缓冲。练习二会把这次拷贝也录进图里。
# - 只改几个参数：`cudaGraphExecKernelNodeSetParams` 改内核节点，`cudaGraphExecMemcpyNodeSetParams` 改拷贝的地址。
#   用法留给《更新一张活的图》。
# - 整张图一起改：`cudaGraphExecUpdate`，用一张结构相同的新定义去覆盖旧的可执行图。
#
# 讲义还提到“针对不同输入尺寸重新实例化”。把 `on_a` 的旧定义重新实例化一次，再用 `cudaGraphExecUpdate` 把它改成处理 `b`，
# 看看哪一种能让图去碰 `b`。`b` 的长度也不同，正是动态形状会遇到的情况。

# %% tags=["demo", "gpu"]
old = b.get()
again = lab.check_cuda(cudart.cudaGraphInstantiate(on_a.graph, 0))
lab.check_cuda(cudart.cudaGraphLaunch(again, stream.ptr))
stream.synchronize()
print("旧定义重新实例化，b 变了吗：", not np.array_equal(b.get(), old))
lab.check_cuda(cudart.cudaGraphExecDestroy(again))

on_b = record(lambda: [launch_mix(b, i) for i in range(3)])
info = lab.check_cuda(cudart.cudaGraphExecUpdate(on_a.graphExec, on_b.graph))
on_a.launch(stream)
stream.synchronize()
print(f"{info.result.name}，同一个可执行图处理了 b：", np.array_equal(b.get(), mixed(old, 3)))

# %% [markdown]
# 旧定义里记的还是老地址、老尺寸，重新实例化多少次都一样：要么重新捕获，要么更新。
#
# 讲义建议“优先使用 `cudaGraphExecUpdate`，而不是重新捕获整张图”。仔细看上面的代码：更新之前，我们还是捕获了一次 `b`。
# 省下来的是哪一步？量一量。

# %% tags=["demo", "gpu"]
template = capture_chain_raw()
target = lab.check_cuda(cudart.cudaGraphInstantiate(template, 0))
steps = {"捕获": [], "实例化": [], "cudaGraphExecUpdate": []}
for _ in range(10):
    clock = [perf_counter_ns()]
    graph = capture_chain_raw()
    clock.append(perf_counter_ns())
    graph_exec = lab.check_cuda(cudart.cudaGraphInstantiate(graph, 0))
    clock.append(perf_counter_ns())
    lab.check_cuda(cudart.cudaGraphExecUpdate(target, graph))
    clock.append(perf_counter_ns())
    for name, spent in zip(steps, np.diff(clock), strict=True):
        steps[name].append(spent / 1000)
    lab.check_cuda(cudart.cudaGraphExecDestroy(graph_exec))
    lab.check_cuda(cudart.cudaGraphDestroy(graph))
lab.check_cuda(cudart.cudaGraphExecDestroy(target))
lab.check_cuda(cudart.cudaGraphDestroy(template))
capture_us, instantiate_us, update_us = (np.median(spent) for spent in steps.values())
rebuild_us, renew_us = capture_us + instantiate_us, capture_us + update_us
lab.say(
    lab.table((f"{N} 个节点", "µs（中位数）"), [(name, f"{np.median(spent):.0f}") for name, spent in steps.items()])
    + f"\n\n重新捕获并实例化共 {rebuild_us:.0f} µs；重新捕获并更新共 {renew_us:.0f} µs，省下 **{1 - renew_us / rebuild_us:.0%}**。"
)

# %% [markdown]
# 更新省掉的是**实例化**；新的定义通常仍要靠捕获得到，而在 Python 里，捕获要把每次启动的代码重跑一遍，往往是更贵的那一半。
# 连捕获也想省，就得直接改节点参数。
#
# 什么时候更新会被拒绝、被拒绝以后怎么办，是《更新一张活的图》一章的主题。

# %% [markdown]
# ## 误区二：捕获期间用一下默认流没关系
#
# 创建时没有 `non_blocking=True`（C++ 里是 `cudaStreamNonBlocking`）的流叫阻塞流（blocking stream）：
# 它和传统默认流（legacy default stream，也叫 NULL 流）互相等待。捕获遇到默认流会怎样？三个小实验：
#
# 1. 直接在默认流上开始捕获；
# 2. 在一条阻塞流上捕获，中途往默认流里放一个 memset；
# 3. 在 `non_blocking=True` 的流上捕获，中途忘了写 `with stream:`，把一个 `mix` 启动到了默认流上。

# %% tags=["demo", "gpu"]
(error,) = cudart.cudaStreamBeginCapture(0, GLOBAL)
print(f"1. 在默认流上开始捕获：{error.name}（{int(error)}）")

blocking = cp.cuda.Stream()
lab.check_cuda(cudart.cudaStreamBeginCapture(blocking.ptr, GLOBAL))
(error,) = cudart.cudaMemsetAsync(xs.data.ptr, 0, 4, 0)
ended, _ = cudart.cudaStreamEndCapture(blocking.ptr)
cudart.cudaGetLastError()
print(f"2. 阻塞流捕获时使用默认流：{error.name}（{int(error)}），结束捕获：{ended.name}（{int(ended)}）")

cp.cuda.Device().synchronize()
untouched = xs.get()
with stream:
    stream.begin_capture()
    launch_mix(xs, 0)
launch_mix(xs, 1)  # forgot `with stream:`, so this goes to the legacy default stream
leaky = stream.end_capture()
cp.cuda.Device().synchronize()
print(f"3. 非阻塞流捕获：没有报错，图里是 {kinds(leaky.graph)}；那个 mix 当场执行了：{np.array_equal(xs.get(), mixed(untouched, 1, first=1))}")

# %% [markdown]
# 前两种至少会报错：第一种是 900，默认流本身不能捕获；第二种是 906（`cudaErrorStreamCaptureImplicit`），说的正是“隐式依赖”。
#
# 第三种才可怕：**一点错误也没有，只是少录了一个节点**，而且那个内核当场就执行了。
# 所以捕获之后要数一数节点，或者画出来看一眼。
#
# 讲义的建议仍然成立：用 `cudaStreamNonBlocking` 创建捕获流，捕获期间所有工作都明确放在这条流上。
# 非阻塞流的好处是，别人（库、别的线程）用到默认流时，不会打断你的捕获；代价是忘写 `with stream:` 时没有报警，所以要自己数节点。

# %% [markdown]
# ## 误区三：用事件计时，就一定看得到图的收益
#
# 讲义建议用 `cudaEvent` 精确测量，免得被 CPU 的开销干扰。可是图省下的**正是** CPU 的开销。
# 事件记录的是 GPU 走到两个位置的时刻之差，它看得见 CPU 慢吗？
#
# 量“建一张图要多少钱”里的那条链，两种情形：GPU 空闲；GPU 前面先堵一个足够长的 `spin`，让 CPU 有时间把队排好。

# %% tags=["demo", "gpu"]
def event_us(work, plug_us):
    """Time of work() between two events on `stream`, in µs, behind plug_us of other work."""
    first, last = cp.cuda.Event(), cp.cuda.Event()
    with stream:
        if plug_us:
            launch_spin(plug_us)
        first.record()
        work()
        last.record()
    last.synchronize()
    return cp.cuda.get_elapsed_time(first, last) * 1000


PLUG_US = 50 * N  # far longer than the CPU takes for N launches
works = {"逐个启动": partial(eager_chain, xs, N), "图": partial(chain.launch, stream)}
submit, total = (lab.compare_us(*works.values(), clock=clock) for clock in ("submit", "end_to_end"))
timed = {(name, plug): [] for plug in (0, PLUG_US) for name in works}
for _ in range(15):
    for (name, plug), spent in timed.items():
        spent.append(event_us(works[name], plug))

rows = [
    (name, *(f"{us:.0f}" for us in (submitted.median, finished.median, np.median(timed[name, 0]), np.median(timed[name, PLUG_US]))))
    for name, submitted, finished in zip(works, (submit.first, submit.second), (total.first, total.second), strict=True)
]
lab.say(lab.table((f"{N} 个内核，µs", "CPU 提交", "端到端", "事件，GPU 空闲", "事件，前面堵着"), rows))

# %% [markdown]
# GPU 空闲时，逐个启动的每个内核都要等 CPU 送来，等待也落在两个事件之间，所以事件看得见 CPU 慢。
#
# 前面堵着的时候，CPU 趁机把整条链都排进了队。两行的差距缩小了很多，但不一定为零：CPU 那一份收益被藏住了；
# 剩下的差，是图让 GPU 在相邻节点之间少等的那一点间隙。
#
# 事件适合回答“GPU 忙了多久”。要回答“图省了什么”，就要量提交时间和端到端时间，并且让两种做法轮流上场。

# %% [markdown]
# ## 误区四：图不占地方
#
# 讲义提醒注意图实例的内存占用。占多少？一批批地造图，每批 20 张，都留着，看空闲显存每次少了多少；
# 最后全部销毁，再造一批大的。`cudaMemGetInfo` 看的是整块 GPU，别的程序也会让它变动。

# %% tags=["demo", "gpu"]
def free_bytes():
    cp.cuda.Device().synchronize()
    return lab.check_cuda(cudart.cudaMemGetInfo())[0]


def batch_of_graphs(n):
    """Capture 20 chains of n launches and launch each once: memory may be taken as late as that."""
    graphs = [graph_of_chain(n) for _ in range(20)]
    for each in graphs:
        each.launch(stream)
    return graphs


batches, rows = [], []
free = [free_bytes()]
for n in (200, 1000, 4000):
    batches.append(batch_of_graphs(n))
    free.append(free_bytes())
    rows.append(f"造 20 张 {n} 个节点的图")
batches.clear()
free.append(free_bytes())
rows.append("全部销毁")
batches.append(batch_of_graphs(n))
free.append(free_bytes())
rows.append(f"又造 20 张 {n} 个节点的图")
batches.clear()
taken = -np.diff(free) / 2**20
lab.say(
    lab.table(("动作", "显存占用的变化 MiB"), [(what, f"{mib:+.1f}") for what, mib in zip(rows, taken, strict=True)])
    + ("\n\n造图的行里出现了负数：这期间还有别的显存被释放，多半是别的程序的。这张表不算数，请再运行一遍。" if min(*taken[:3], taken[4]) < 0 else "")
)

# %% [markdown]
# 一张图占得不多；但如果给每种输入尺寸都留一张大图，乘起来就不能不算了。
#
# 最后两行要连起来看：销毁以后，占用降下来了吗？如果没有，而再造一批又几乎不新增，说明驱动没有归还，是留着给以后的图用。
#
# 占用的另一半是**图引用的缓冲**：图里有它们的地址，所以只要图还活着，这些缓冲就不能释放、不能挪作他用。
# 图自己不会替你留住它们，下面的练习二会碰到。

# %% [markdown]
# ## 练习
#
# 四道练习，共 12 分。解答里可以用这些给定的名字：
#
# - 模块与工具：`np`、`cp`、`cupyx`、`cudart`、`partial`、`lab`；
# - 流与内核：`stream`、`BLOCK`、`mix`、`absorb`、`spin`、`launch_mix`、`launch_absorb`、`launch_spin`、`eager_chain`、`mixed`；
# - 练习二给出的 `Replayer`。
#
# `record`、`kinds`、`xs` 等名字来自演示单元（只做实验，评分时不运行），解答里不能用：
# 评分会在干净的环境里运行给定的单元和你的解答，跳过演示单元。
#
# ### 练习一：捕获一条链（3 分）
#
# 写 `capture_chain(x, n)`：用给定的 `stream` 捕获在 `x` 上依次启动的 `n` 个 `mix`，第 `i` 次启动的序号是 `i`（从 0 数起），
# 返回可以反复 `launch` 的 `cupy.cuda.Graph`。
#
# 要求：
#
# - 捕获本身不能改变 `x`；
# - 图里正好 `n` 个内核节点，连成一条链；
# - 每次重放都在 `x` **当时**的内容上继续，别人可能在两次重放之间改写 `x`。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# `eager_chain` 做的正是这 `n` 次启动。如果在它发起工作之前，让 `stream` 进入捕获状态，会发生什么？
# 哪两个调用要把它夹在中间？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `stream.begin_capture()` 开始，`stream.end_capture()` 结束并返回 `cupy.cuda.Graph`。
# 启动必须发生在 `stream` 上：用 `with stream:`，或者直接用 `eager_chain`。
# 把 `end_capture` 放进 `finally`，中途出错时流才不会停在捕获状态。
#
# </details>

# %% solution="capture_chain" tags=["gpu"]
def capture_chain(x, n):
    """Capture, on `stream`, n dependent launches of mix on x, with indices 0 … n-1.

    x: cupy uint32, 1-D; only read and written when the graph is launched. n: at least 1.
    Returns the instantiated cupy.cuda.Graph.
    """
    ### BEGIN SOLUTION: 先让 stream 进入捕获状态，再像平常一样启动 n 次 mix，最后结束捕获并返回得到的图
    stream.begin_capture()
    try:
        eager_chain(x, n)
    finally:
        graph = stream.end_capture()
    return graph
    ### END SOLUTION


# %% test="capture_chain" kind="structure" points=3 tags=["gpu"]
data = np.arange(1000, dtype=np.uint32)
x = on_gpu(data)
graph = student.capture_chain(x, 8)
check.nodes(graph, kernels=8, total=8, edges=7, why="图应当是 8 个内核连成的一条链。每次启动都发生在被捕获的流上了吗？")
check.equal(x.read(), data, why="捕获完成后 x 就变了。捕获期间的启动不会执行；是不是有启动落在了别的流上，或在捕获之外先运行了一遍？")
graph.run(1)
check.equal(x.read(), reference.mixed(data, 8), why="重放一次的结果不对。第 i 次启动的序号是 i（从 0 数起）吗？")
### BEGIN HIDDEN TESTS
size, n = int(secret.integers(2000, 9000)), int(secret.integers(9, 40))
data = secret.integers(0, 2**32, size, dtype=np.uint32)
x = on_gpu(data)
graph = student.capture_chain(x, n)
check.nodes(graph, kernels=n, total=n, edges=n - 1, why="换一个 n，图的节点数就不对了。n 是不是写死了？")
check.equal(x.read(), data, why="捕获不应当执行任何内核，可是 x 已经变了。")
# The learner's own launches, and the definition instantiated once more: what was counted has to do the work itself.
for replay in (graph, graph.instantiate(), graph):
    data = x.write(secret.integers(0, 2**32, size, dtype=np.uint32))
    runs = int(secret.integers(2, 9))
    replay.run(runs)
    for _ in range(runs):
        data = reference.mixed(data, n)
    check.equal(x.read(), data, why="在同一块缓冲里换了新数据再重放，结果不对。图必须直接读写 x 的地址：不要先复制 x，也不要缓存结果。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习二：一次图启动服务一个请求（4 分）
#
# 真实的服务里，每个请求都带着 CPU 上的新数据。能不能连“把数据拷到 GPU”也录进图里？
# 可以：拷贝也是节点，它记住的是**主机缓冲的地址**。于是只要有一块固定的主机缓冲当“收件箱”，每次就地写入新数据，再启动图。
#
# 收件箱要用锁页内存（pinned memory）：GPU 能直接读它，拷贝才能真正异步。
#
# 下面给出外壳 `Replayer`：`feed` 往收件箱里就地写数据，调用它就是启动一次图。
# 你来写 `make_replayer(x, n)`，用给定的 `stream` 捕获这样一张图：
#
# 1. 把收件箱拷到一块设备缓冲（1 个拷贝节点）；
# 2. `launch_absorb`：把它吸收进 `x`（1 个内核）；
# 3. 在 `x` 上启动 `n` 次 `mix`，序号 0 … n−1（`n` 个内核）。
#
# 每个 `Replayer` 有自己的收件箱和设备缓冲：做两个，各喂各的输入，互不相干。
#
# 除了结果正确，还要快：`n = 200` 时，一个请求的端到端时间不超过 `eager_chain` 启动 200 次 `mix` 的一半。
# 如果在这台机器上参考实现还不到 4 倍，门槛降为它的一半（不低于 1.2 倍）；加速只走完一半路的，给一半分。

# %% tags=["gpu"]
class Replayer:
    """A captured request: call it to replay it once on `stream`, without waiting.

    captured: cupy.cuda.Graph. inbox: pinned numpy array that the graph copies from. arrived: the device
    buffer that it copies to. A graph remembers addresses only, so whoever owns the graph keeps the buffers.
    """

    def __init__(self, captured, inbox, arrived):
        self.captured, self.inbox, self.arrived = captured, inbox, arrived

    def feed(self, batch):
        """Put batch (numpy, same shape and dtype as inbox) in place, once earlier replays have read the inbox."""
        stream.synchronize()
        self.inbox[...] = batch

    def __call__(self):
        self.captured.launch(stream)


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 哪些东西只需要准备一次，哪些要每个请求做一次？凡是准备一次的（缓冲、捕获、实例化）都放在 `make_replayer` 里，
# 每个请求只剩下写收件箱和一次图启动。
# 还有：函数返回以后，收件箱和设备缓冲谁来保管？图只记得地址。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `cupyx.zeros_pinned(x.shape, x.dtype)` 给出锁页的 numpy 数组，它的地址是 `.ctypes.data`；设备缓冲用 `cp.empty_like(x)`，地址是 `.data.ptr`。
# 两者都在捕获之前准备好：捕获期间要内存，可能被拒绝，也可能牵出图里不该有的操作。
#
# 拷贝用 `lab.check_cuda(cudart.cudaMemcpyAsync(目标地址, 源地址, 字节数, 方向, stream.ptr))`，
# 方向是 `cudart.cudaMemcpyKind.cudaMemcpyHostToDevice`。为什么不用 CuPy 的 `arrived.set(inbox)`？
# 它是为任意的数组写的，内部会不会先复制一份、会不会等待，由 CuPy 决定；这里要确定录下的就是收件箱的地址。
#
# </details>

# %% solution="make_replayer" tags=["gpu"]
def make_replayer(x, n):
    """Capture one request as a graph: copy the inbox to the device, absorb it into x, mix x n times.

    x: cupy uint32, 1-D, advanced in place by each replay; it stays the caller's. n: at least 1. Captures on `stream`.
    Returns a Replayer that owns the inbox (pinned, zeros at first), the device buffer and the graph.
    """
    ### BEGIN SOLUTION: 先分配锁页的收件箱和设备缓冲，再捕获“拷贝、absorb、n 次 mix”，最后交给 Replayer 一起保管
    inbox = cupyx.zeros_pinned(x.shape, x.dtype)
    arrived = cp.empty_like(x)
    to_device = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
    stream.begin_capture()
    try:
        lab.check_cuda(cudart.cudaMemcpyAsync(arrived.data.ptr, inbox.ctypes.data, inbox.nbytes, to_device, stream.ptr))
        with stream:
            launch_absorb(x, arrived)
        eager_chain(x, n)
    finally:
        captured = stream.end_capture()
    return Replayer(captured, inbox, arrived)
    ### END SOLUTION


# %% test="make_replayer_result" kind="structure" points=2 tags=["gpu"]
state = np.arange(1000, dtype=np.uint32)
batch = np.full(1000, 12345, np.uint32)
x = on_gpu(state)
replay = student.make_replayer(x, 4)
check.equal(x.read(), state, why="建图的时候 x 就变了。make_replayer 只应当准备和捕获，不执行。")
PINNED = """
def is_pinned(replayer):
    from cuda.bindings import runtime
    error, found = runtime.cudaPointerGetAttributes(replayer.inbox.ctypes.data)
    return int(error) == 0 and found.type == runtime.cudaMemoryType.cudaMemoryTypeHost
"""
check.that(student.define(PINNED, "is_pinned")(replay), why="收件箱不是锁页内存，GPU 不能直接读它，拷贝就不能真正异步。收件箱是用 cupyx.zeros_pinned 分配的吗？")
check.nodes(replay.get("captured"), kernels=5, memcpys=1, total=6, why="图里应当有 1 个拷贝节点和 n + 1 个内核节点。拷贝是不是写在了捕获之外？")
replay.feed(batch)
replay.run(1)
check.equal(x.read(), reference.mixed(state ^ batch, 4), why="处理一个请求的结果不对。顺序应当是：拷贝收件箱，absorb 进 x，再做 n 次 mix。")
### BEGIN HIDDEN TESTS
size, n = int(secret.integers(2000, 9000)), int(secret.integers(5, 30))
state = secret.integers(0, 2**32, size, dtype=np.uint32)
x = on_gpu(state)
replay = student.make_replayer(x, n)
check.nodes(replay.get("captured"), kernels=n + 1, memcpys=1, total=n + 2, why="换一个 n，节点数就不对了。n 是不是写死了？")
# Whoever frees the device buffer lets the pool hand its memory to these arrays.
TENANTS = """
def tenants(stream, size):
    import gc, cupy
    gc.collect()
    pattern = [cupy.full(size, 0xA5A5A5A5, cupy.uint32) for _ in range(4)]
    with stream:
        pattern += [cupy.full(size, 0xA5A5A5A5, cupy.uint32) for _ in range(4)]
    cupy.cuda.runtime.deviceSynchronize()
    return pattern
"""
others = student.define(TENANTS, "tenants")(student.value("stream"), size)
for launches in (replay, replay.get("captured").instantiate(), replay):
    batch = secret.integers(0, 2**32, size, dtype=np.uint32)
    runs = int(secret.integers(1, 6))
    replay.feed(batch)
    launches.run(runs)
    for _ in range(runs):
        state = reference.mixed(state ^ batch, n)
    check.equal(x.read(), state, why="换了几份输入，结果不对。每次重放都要从收件箱重新拷贝当时的内容：收件箱是同一块锁页内存吗？有没有在捕获时就把数据固定下来？")
for other in others:
    check.equal(other, np.full(size, 0xA5A5A5A5, np.uint32), why="重放写坏了别人的数组：设备缓冲已经被回收，内存池把它给了别的数组，而图还在往老地址写。请把它交给 Replayer 保管。")
# Two requests of one size and shape: each is fed before either is launched.
twin_state = secret.integers(0, 2**32, size, dtype=np.uint32)
twin_x = on_gpu(twin_state)
twin = student.make_replayer(twin_x, n)
batch, twin_batch = (secret.integers(0, 2**32, size, dtype=np.uint32) for _ in range(2))
replay.feed(batch)
twin.feed(twin_batch)
for each in (replay, twin):
    each.run(1)
want = [reference.mixed(state ^ batch, n), reference.mixed(twin_state ^ twin_batch, n)]
check.equal(np.stack([x.read(), twin_x.read()]), np.stack(want), why="做两个 Replayer，各喂各的输入，再各启动一次，结果不对。收件箱是不是两个合用了一块？每个 Replayer 要有自己的收件箱。")
### END HIDDEN TESTS

# %% test="make_replayer_speed" kind="speedup" points=2 tags=["gpu"]
start = secret.integers(0, 2**32, 4096, dtype=np.uint32)
x, y, z = on_gpu(start), on_gpu(start), on_gpu(start)
replay, best = student.make_replayer(x, 200), reference.make_replayer(z, 200)
batch = secret.integers(0, 2**32, 4096, dtype=np.uint32)
replay.feed(batch)
best.feed(batch)
check.speedup(
    replay,
    over=partial(reference.eager_chain, y, 200),
    best=best,
    state=(x, z),
    at_least=2.0,
    why="还不够快。图里除了拷贝、absorb 和 n 次 mix 还有别的节点吗？返回的是给定的 Replayer 吗？",
)
### BEGIN HIDDEN TESTS
batch = secret.integers(0, 2**32, 4096, dtype=np.uint32)
replay.feed(batch)
data = x.write(secret.integers(0, 2**32, 4096, dtype=np.uint32))
runs = int(secret.integers(2, 9))
replay.run(runs)
for _ in range(runs):
    data = reference.mixed(data ^ batch, 200)
check.equal(x.read(), data, why="计时以后换一份输入再重放，结果不对：快，但没有做完该做的工作。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：什么时候回本（2 分）
#
# 写 `break_even(t_eager_us, t_graph_us, t_build_us)`：逐个启动一轮要 `t_eager_us`，图重放一轮要 `t_graph_us`，
# 建图一次性花 `t_build_us`。返回最小的正整数 $n$，使得
#
# $$t_\text{build} + n \cdot t_\text{graph} \le n \cdot t_\text{eager}$$
#
# 如果无论重放多少次都回不了本，返回 `None`。这道题不需要 GPU。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 每重放一次省多少？省下的要凑够建图的钱。如果每次一点也不省，甚至倒贴，会怎样？
# 再想两个边角：建图不要钱的时候，$n$ 最小是几？正好整除的时候，要不要再多一次？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 向上取整用 `math.ceil`，它返回 `int`；`np.ceil` 返回的是浮点数，要再转换。
# 别忘了下限：`max(1, …)`。
#
# </details>

# %% solution="break_even"
def break_even(t_eager_us, t_graph_us, t_build_us):
    """Smallest number of replays (int >= 1) after which the graph has paid for itself, or None for never.

    Times in µs, not negative: one eager round, one replay, and building the graph once.
    """
    ### BEGIN SOLUTION: 先算每次重放省多少；省的不是正数就要单独想一想，否则把建图的钱除以它，向上取整
    import math

    saved = t_eager_us - t_graph_us
    if saved > 0:
        return max(1, math.ceil(t_build_us / saved))
    return 1 if saved == 0 and t_build_us == 0 else None
    ### END SOLUTION


# %% test="break_even" kind="answer" points=2
check.equal(student.break_even(10, 4, 60), 10, why="每次省 6 µs，建图 60 µs，正好第 10 次回本。")
check.equal(student.break_even(10, 4, 61), 11, why="每次省 6 µs，建图 61 µs：10 次还差 1 µs，要到第 11 次。")
check.equal(student.break_even(5, 9, 1), None, why="图比逐个启动还慢，永远回不了本，应当返回 None。")
### BEGIN HIDDEN TESTS
check.equal(student.break_even(8, 8, 100), None, why="一样快，建图的钱就永远省不回来。")
check.equal(student.break_even(8, 3, 0), 1, why="建图不要钱时，重放一次就已经回本；题目要的是最小的正整数。")
check.equal(student.break_even(8, 8, 0), 1, why="一样快、建图又不要钱：重放一次时，不等式已经成立。")
check.equal(student.break_even(3, 5, 0), None, why="建图不要钱，但每次都更慢，仍然回不了本。")
check.equal(student.break_even(900.5, 100.5, 0.25), 1, why="第一次重放就省回来了，答案不应当小于 1。")
# Whole eighths, so that every time and every difference is exact.
saved, graph_us, build_us = (secret.integers(1, most, 40) for most in (4000, 4000, 800_000))
build_us[:8] = saved[:8] * secret.integers(1, 500, 8)
got = [student.break_even(float(s + g) / 8, float(g) / 8, float(b) / 8) for s, g, b in zip(saved, graph_us, build_us, strict=True)]
want = [-int(-b // s) for s, b in zip(saved, build_us, strict=True)]
check.equal(got, want, why="随机的几组时间里有算错的。向上取整了吗？正好整除时有没有多算一次？返回的是 int 吗？")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：哪些任务值得用图（3 分）
#
# 下面有八个任务，每个用几个数字描述。先别算，只看数字猜一猜：有几个值得用图？
#
# 写 `worth_a_graph(workload)`，按“一条可以算的规则”那一节的约定，返回两个值 `(worth, saved_us)`：
#
# - `saved_us`：平均每轮省下的微秒数，即逐个启动的时间减去图的时间；图的时间含摊到每轮的建图。图更慢时它是负数。
# - `worth`：值得为 `True`。图的时间**不超过逐个启动的 90%** 才值得。
# - `reads_back` 为真时，一轮的中途要读回结果才能继续，录不成一张图：返回 `(False, 0.0)`。
#
# 评分时会换数字，所以要写规则，不要背答案。不需要 GPU。

# %%
FIELDS = ("name", "n_kernels", "kernel_us", "launch_us", "graph_us", "other_us", "build_us", "replays", "reads_back")
WORKLOADS = [
    dict(zip(FIELDS, values, strict=True))
    for values in (
        ("小批量 BERT 推理", 86, 4.0, 5.0, 4.0, 20.0, 1500.0, 1_000_000, False),
        ("大批量训练的一步", 120, 900.0, 5.0, 4.0, 500.0, 3000.0, 100_000, False),
        ("强化学习的仿真循环", 400, 2.0, 6.0, 5.0, 50.0, 6000.0, 500_000, False),
        ("每个请求都重新捕获", 200, 2.0, 6.0, 4.0, 20.0, 1800.0, 1, False),
        ("以拷贝和解码为主的预处理", 10, 5.0, 6.0, 4.0, 3000.0, 300.0, 100_000, False),
        ("每步读回结果再决定下一步", 300, 2.0, 6.0, 4.0, 10.0, 4000.0, 100_000, True),
        ("分子动力学的时间步", 60, 3.0, 6.0, 4.0, 5.0, 900.0, 10_000_000, False),
        ("场景每五帧一变的渲染", 80, 3.0, 7.0, 4.0, 30.0, 900.0, 5, False),
    )
]

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 先处理录不成图的情况。剩下的，把两种做法平均到一轮的时间各写成一个算式，再比大小。
# 哪一项只出现在图这一边？`max(launch_us, kernel_us)` 为什么只出现在逐个启动那一边？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 只用到字典取值、`max` 和比较。按那一节的两个算式逐项翻译；`replays` 作除数。
# 两个值用逗号隔开一起返回：Python 的 `bool` 和数值。
#
# </details>

# %% solution="worth_a_graph"
def worth_a_graph(workload):
    """Tell whether a workload (a dict with the keys FIELDS, times in µs) gains from a CUDA graph, and how much.

    Returns (worth, saved_us): eager time less graph time of an average round, building included; worth if the
    graph takes at most 90 % of the eager time. (False, 0.0) for a workload that cannot be captured.
    """
    ### BEGIN SOLUTION: 先排除录不成图的任务，再写出两种做法平均每轮的时间，相减得到省下的，再按“至少省 10%”比较
    if workload["reads_back"]:
        return False, 0.0
    n, kernel_us = workload["n_kernels"], workload["kernel_us"]
    eager_us = n * max(workload["launch_us"], kernel_us) + workload["other_us"]
    graph_us = workload["graph_us"] + n * kernel_us + workload["other_us"] + workload["build_us"] / workload["replays"]
    return graph_us <= 0.9 * eager_us, eager_us - graph_us
    ### END SOLUTION


# %% test="worth_a_graph" kind="answer" points=3
tiny = {"name": "短内核", "n_kernels": 100, "kernel_us": 1.0, "launch_us": 6.0, "graph_us": 4.0, "other_us": 0.0, "build_us": 2000.0, "replays": 1000, "reads_back": False}
check.equal(student.worth_a_graph(tiny), (True, 494.0), abs=1e-6, why="每轮从 600 µs 降到 106 µs（其中建图摊到 2 µs），省 494 µs，值得。")
check.equal(student.worth_a_graph(tiny | {"kernel_us": 50.0}), (False, -6.0), abs=1e-6, why="内核长达 50 µs，比启动慢，逐个启动一轮是 5000 µs；图没有可省的，反而多花 6 µs。")
check.equal(student.worth_a_graph(tiny | {"other_us": 10_000.0}), (False, 494.0), abs=1e-6, why="图外还有 10000 µs：同样省 494 µs，却不到一轮 10600 µs 的 10%，不值得。")
check.equal(student.worth_a_graph(tiny | {"replays": 2}), (False, -504.0), abs=1e-6, why="只重放 2 次，每轮要摊 1000 µs 的建图时间，反而多花 504 µs。")
check.equal(student.worth_a_graph(tiny | {"reads_back": True}), (False, 0.0), abs=1e-6, why="中途要读回结果，录不成一张图：应当返回 (False, 0.0)。")
### BEGIN HIDDEN TESTS
def rule(w):
    if w["reads_back"]:
        return False, 0.0
    eager = w["n_kernels"] * max(w["launch_us"], w["kernel_us"]) + w["other_us"]
    graph = w["graph_us"] + w["n_kernels"] * w["kernel_us"] + w["other_us"] + w["build_us"] / w["replays"]
    return graph <= 0.9 * eager, eager - graph


def drawn(shortest, longest):
    """A workload whose kernels take from `shortest` to `longest` times as long as a launch."""
    launch_us = float(secret.uniform(3, 10))
    return tiny | {
        "name": "随机任务",
        "n_kernels": int(secret.integers(20, 600)),
        "kernel_us": launch_us * float(secret.uniform(shortest, longest)),
        "launch_us": launch_us,
        "graph_us": float(secret.uniform(2, 12)),
        "other_us": float(secret.choice([0.0, 30.0, 400.0, 4000.0])),
        "build_us": float(secret.uniform(200, 9000)),
        "replays": int(secret.choice([3, 50, 10_000])),
    }


def near_the_bar(share):
    """A workload with just so much time outside the graph that the graph takes `share` of the eager time."""
    w = drawn(0.1, 0.6) | {"other_us": 0.0, "replays": 1_000_000}
    return w | {"other_us": rule(w)[1] / (1 - share) - w["n_kernels"] * w["launch_us"]}


listed = reference.value("WORKLOADS")
longer = [drawn(1.1, 40) for _ in range(8)]
shorter = [drawn(0.1, 0.9) for _ in range(12)]
close = [near_the_bar(share) for share in (0.88, 0.895, 0.905, 0.92) for _ in range(4)]
for workloads, why in (
    (listed, "八个任务里有判断错的。请把每一项都代进算式：慢的一方、图管不到的时间、摊到每轮的建图。"),
    (longer, "内核比启动长的任务里有算错的。逐个启动时，是慢的一方说了算吗？"),
    (shorter, "内核比启动短的任务里有算错的。每一项都代进去了吗？建图的时间是不是除以了重放次数？"),
    (close, "靠近 90% 的任务里有算错的。比的是两个完整的时间吗？图管不到的时间两边都要算，10% 是对逐个启动说的。"),
):
    check.equal([student.worth_a_graph(w) for w in workloads], [rule(w) for w in workloads], abs=1e-6, why=why)
### END HIDDEN TESTS

# %% [markdown]
# 现在用你写的函数看看那八个任务，和你猜的一样吗？有没有哪一个，省了时间却仍然不值得？

# %% tags=["demo"]
rows = [(each["name"], worth_a_graph(each)) for each in WORKLOADS]
lab.say(
    lab.table(("任务", "用图", "平均每轮省 µs"), [(name, "值得" if worth else "不值得", f"{us:.1f}") for name, (worth, us) in rows]),
    measured=False,
)

# %% [markdown] tags=["instructor"]
# 给教师：练习一和二的隐藏测试用新数据、未公布的 `n` 和重放次数，漏做或多做一次都会得到不同的字节。
# 练习二还会在重放前向内存池再要几块同样大小的缓冲：如果学习者没有留住设备缓冲，图就会写坏它们，这正是“图只记得地址”的后果。
# 练习四的隐藏测试专门有一组任务落在 90% 两侧，但不贴着 90%，算式写法不同不会误判；省下的微秒数也要对上。

# %% [markdown]
# ## 小结
#
# | 讲义的说法 | 实验以后的说法 |
# |:--|:--|
# | 逐个启动，内核之间隐式同步 | CPU 不等 GPU；GPU 上的先后来自同一条流。代价是每个内核都要 CPU 忙一次 |
# | 启动开销与节点数近似解耦 | CPU 的提交时间几乎不随 N 变（驱动越新越明显）；GPU 该做的内核一个不少，节点之间的间隙可能略短 |
# | 驱动解析整张图，优化执行顺序 | 驱动只看边。没有路径相连才可能并行，边由捕获时的流和事件决定 |
# | 启动开销占 10%～30% | 从接近零到大半都有可能，取决于内核与启动谁更慢 |
# | 事件也是节点 | 流捕获里，只有 External 的事件记录才是节点，普通的只表达依赖 |
# | 用 `cudaEvent` 精确测量 | 事件只看 GPU；图省的主要是 CPU 的时间，要量提交时间和端到端时间 |
# | 捕获期间不能 `cudaMalloc` | 看捕获模式；relaxed 放行，但它永远不成为节点 |
# | 优先 `cudaGraphExecUpdate`，不要重新捕获 | 更新省的是实例化；新定义通常仍要捕获 |
# | 针对不同输入尺寸重新实例化 | 旧定义实例化多少次都是旧尺寸：要重新捕获，或者更新 |
# | 输入地址变了才要更新参数 | 这条说得对：数据就地变，地址不变，什么都不用做 |
#
# **带走三句话**
#
# 1. 图把“吩咐 N 次”变成“吩咐一次”：省的主要是 CPU 的时间，GPU 该做的内核一个不少。
# 2. 图记住地址、标量和依赖，不记数据和 Python 代码；缓冲要有人替它留住。
# 3. 内核多而短、流程固定、反复重放、看重延迟：值得。动手之前先算一算。
#
# 讲义最后说，TensorRT 已经深度集成了 CUDA 图。准确地说，TensorRT 的推理**可以被捕获**，但要由你来捕获、
# 你来重放，输入尺寸变了也要由你来决定怎么办；ONNX Runtime、Torch-TensorRT 等上层可以代劳一部分。
# 这些留给课程的第三个模块“实战篇”，用真实的引擎来验证。
#
# 下一步：《内核启动开销分析》把提交时间拟合成一个模型；《流捕获：规则与恢复》讲全禁令和善后。
