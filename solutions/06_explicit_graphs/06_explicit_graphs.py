# %% [markdown]
# # 显式构图
#
# 捕获得到的图长什么样，由代码怎么写、写在哪条流上决定：一条流录出来就是一条链，想要两条分支就得摆弄事件，
# 库里悄悄多发的一次 memset 也会跟着录进去。可是有时候，你心里清清楚楚：就这六个节点，谁等谁，一条边也不要多。
#
# 那就不录了，直接搭：**一个节点一个节点地加，每个节点说清楚它等谁。** 这叫显式构图（explicit graph construction）。
#
# **学完以后，你能够**
#
# - 用显式 API 加上内核、拷贝、memset、主机函数、事件、空节点和子图，再用依赖把它们连起来；
# - 说出节点里哪些东西是加入时抄下的副本，哪些只是一个地址，并替图保管好地址那一头的东西；
# - 读懂驱动写出的 DOT，从中算出最长路径：图再怎么并行，也快不过它；
# - 让互不相关的工作真正并排，也知道什么时候并排没有用；
# - 用 Python 函数做节点，而不被它弄崩、弄卡。
#
# **需要的基础**：《CUDA 图优化概念》里的定义、实例化和启动；《流捕获：规则与恢复》里的分叉、汇合和错误码。
#
# **时间**：约 75 分钟，其中四道练习约 35 分钟。
#
# 下一格导入的 `check`、`student` 等五个名字只给练习后面的测试单元用，现在不用管它们。

# %%
import numpy as np
from functools import partial
from launchlab import lab
from launchlab.exam import check, on_gpu, reference, secret, student

lab.here()

# %% [markdown]
# 本章的三个小内核（kernel）：
#
# - `mix`：把数组里的每个 32 位整数搅拌 `rounds` 轮，第 $r$ 轮加上序号 `first + r`。漏做、多做、换了顺序，结果都不同；
#   轮数越多，内核越长，所以它也用来模拟长短不同的内核。
# - `absorb`：`x ^= input`，把另一块缓冲异或进来。
# - `combine`：`x` 变成 `(x ^ left) * 常数`，再搅一下，加上 `right`。左右对调，结果就不同。
#
# 图都在 `stream` 上启动。`non_blocking=True` 的流和默认流互不等待。

# %% tags=["gpu"]
import ctypes

import cupy as cp
import cupyx
from cuda.bindings import driver
from cuda.bindings import runtime as cudart

SOURCE = r"""
extern "C" __global__ void mix(unsigned int *x, unsigned int first, unsigned int rounds, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    unsigned int v = x[t];
    for (unsigned int r = 0; r < rounds; ++r) {
        v ^= v >> 15;
        v *= 0x2c1b3c6du;
        v ^= v >> 12;
        v += first + r;
    }
    x[t] = v;
}

extern "C" __global__ void absorb(unsigned int *x, const unsigned int *input, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) x[t] ^= input[t];
}

extern "C" __global__ void combine(unsigned int *x, const unsigned int *left, const unsigned int *right, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    unsigned int v = (x[t] ^ left[t]) * 0x9e3779b1u;
    v ^= v >> 16;
    x[t] = v + right[t];
}
"""
module = cp.RawModule(code=SOURCE)
mix, absorb, combine = (module.get_function(name) for name in ("mix", "absorb", "combine"))

stream = cp.cuda.Stream(non_blocking=True)
BLOCK = 256  # threads per block


def blocks_for(x):
    """How many blocks of BLOCK threads cover x: x.size / BLOCK, rounded up."""
    return -(-x.size // BLOCK)


def launch_mix(x, first, rounds):
    """Launch `rounds` rounds of mix on x (cupy uint32, 1-D), on the current stream. Returns at once."""
    mix((blocks_for(x),), (BLOCK,), (x, np.uint32(first), np.uint32(rounds), np.uint32(x.size)))


# The first launch of a kernel loads its code: get that over with.
with stream:
    warm = cp.zeros(BLOCK, cp.uint32)
    launch_mix(warm, 0, 1)
    absorb((1,), (BLOCK,), (warm, warm, np.uint32(BLOCK)))
    combine((1,), (BLOCK,), (warm, warm, warm, np.uint32(BLOCK)))
stream.synchronize()

# %% [markdown]
# 还要 NumPy 版的 `mix` 和 `combine`，好知道正确答案是什么（这一格不需要 GPU）。

# %%
def mixed(x, rounds, first=0):
    """Return x (numpy uint32) after `rounds` rounds of mix, indices first, first + 1, …; x stays as it is."""
    v = x.copy()
    for i in range(first, first + rounds):
        v ^= v >> np.uint32(15)
        v *= np.uint32(0x2C1B3C6D)
        v ^= v >> np.uint32(12)
        v += np.uint32(i)
    return v


def combined(x, left, right):
    """Return what combine makes of x (all three numpy uint32, same shape); x stays as it is."""
    v = (x ^ left) * np.uint32(0x9E3779B1)
    v ^= v >> np.uint32(16)
    return v + right


# %% [markdown]
# ## 从一张空图开始
#
# `cudaGraphCreate` 给出一张空的定义，然后往里加节点。加一个内核节点，要把启动它所需的一切写进一个结构体：
# 哪个内核、多少个 block、多少个线程、参数是什么。下面是完整的过程，没有流，也没有捕获。

# %% tags=["demo", "gpu"]
SIZE = 4096
start = np.arange(SIZE, dtype=np.uint32)
with stream:
    xs = cp.asarray(start)
    ys = cp.zeros_like(xs)
stream.synchronize()

first_graph = lab.check_cuda(cudart.cudaGraphCreate(0))

params = driver.CUDA_KERNEL_NODE_PARAMS()
params.func = driver.CUfunction(mix.kernel.ptr)
params.gridDimX, params.gridDimY, params.gridDimZ = blocks_for(xs), 1, 1
params.blockDimX, params.blockDimY, params.blockDimZ = BLOCK, 1, 1
params.sharedMemBytes = 0
params.kernelParams = (
    (xs.data.ptr, 0, 3, xs.size),  # x, first, rounds, size
    (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32),
)
first_node = lab.check_cuda(driver.cuGraphAddKernelNode(first_graph, [], 0, params))

first_exec = lab.check_cuda(cudart.cudaGraphInstantiate(first_graph, 0))
for _ in range(2):
    lab.check_cuda(cudart.cudaGraphLaunch(first_exec, stream.ptr))
stream.synchronize()
print("启动两次，每次 3 轮，与 NumPy 一致：", np.array_equal(xs.get(), mixed(mixed(start, 3), 3)))

# %% [markdown]
# `cuGraphAddKernelNode(graph, [], 0, params)` 的四个参数：图、依赖列表、依赖个数、节点的内容。列表空着，就是谁也不等。
# 实例化和启动与捕获来的图完全一样：**可执行图不关心定义是录来的还是搭来的。**
#
# ### 为什么内核节点要用驱动 API
#
# 上面混用了两套接口：`cudaGraph…` 是运行时 API（runtime API），`cuGraph…` 是驱动 API（driver API）。
# 两边的句柄（handle）是同一个东西，可以随意混用。那为什么偏偏内核节点要用驱动 API？
#
# 捕获一次 CuPy 的启动，再分别用两套接口去读这个节点，就看出来了。

# %% tags=["demo", "gpu"]
with stream:
    stream.begin_capture()
    launch_mix(xs, 5, 2)
    recorded = stream.end_capture()
(recorded_node,), _ = lab.check_cuda(cudart.cudaGraphGetNodes(recorded.graph, 1))

error, _ = cudart.cudaGraphKernelNodeGetParams(recorded_node)
cudart.cudaGetLastError()  # an error stays as the last one until somebody asks for it
print(f"运行时 API：{error.name}（{int(error)}）")
error, found = driver.cuGraphKernelNodeGetParams(recorded_node)
print(f"驱动 API：{error.name}（{int(error)}），{found.gridDimX} 个 block，每个 {found.blockDimX} 个线程")

# %% [markdown]
# 运行时 API 认内核，认的是 nvcc 编译程序时登记的那个主机函数。CuPy 的 `RawKernel` 是运行中现编译、由驱动装载的，
# 没有登记过，运行时 API 不一定认得；驱动 API 认的是 `CUfunction`，CuPy 把它放在 `.kernel.ptr` 里。
# Triton、Numba 等现编译的内核也是这样。所以本章的规矩是：**内核节点用驱动 API，其余节点用运行时 API**，后者的参数更短。
#
# ### 收进两个函数
#
# 填结构体的七行，以后每个内核节点都一样，收进函数。`mix_arguments` 反过来，从节点里读出 `mix` 的参数；
# 最后的 `BuiltGraph` 是装图的外壳，它的 `keep` 用来干什么，后面有一节专门讲。

# %% tags=["gpu"]
def kernel_params(kernel, blocks, *arguments):
    """The parameters of a kernel node with BLOCK threads a block.

    arguments: in the kernel's order; a cupy array stands for its address, an int for an unsigned int, and a
    ctypes value, such as ctypes.c_void_p(address), for itself.
    """
    values = []
    for argument in arguments:
        if isinstance(argument, cp.ndarray):
            argument = ctypes.c_void_p(argument.data.ptr)
        elif isinstance(argument, (int, np.integer)):
            argument = ctypes.c_uint32(int(argument))
        values.append(argument)
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.func = driver.CUfunction(kernel.kernel.ptr)
    params.gridDimX, params.gridDimY, params.gridDimZ = int(blocks), 1, 1
    params.blockDimX, params.blockDimY, params.blockDimZ = BLOCK, 1, 1
    params.sharedMemBytes = 0
    params.kernelParams = (tuple(values), tuple(type(value) for value in values))
    return params


def kernel_node(graph, after, kernel, blocks, *arguments):
    """Add a kernel node that waits for the nodes in the list `after`; see kernel_params. Returns the node."""
    return lab.check_cuda(driver.cuGraphAddKernelNode(graph, after, len(after), kernel_params(kernel, blocks, *arguments)))


def mix_arguments(node):
    """(address of x, first, rounds, size) as a node with the kernel mix holds them: four ints, the driver's own copy."""
    params = lab.check_cuda(driver.cuGraphKernelNodeGetParams(node))
    slots = ctypes.cast(params.kernelParams, ctypes.POINTER(ctypes.c_void_p))  # void *[4]: where each argument lies
    types = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)
    return tuple(kind.from_address(slots[position]).value for position, kind in enumerate(types))


class BuiltGraph:
    """A graph made by hand, instantiated: call it to launch it once on `stream`, without waiting.

    graph: the definition (cudaGraph_t); this object owns it and destroys it. keep: whatever the nodes point at
    (arrays, pinned buffers, callbacks, events), kept alive as long as this object. Raises lab.CudaError if the
    definition cannot be instantiated.
    """

    def __init__(self, graph, *keep):
        self.graph, self.keep, self.executable = graph, keep, None
        self.executable = lab.check_cuda(cudart.cudaGraphInstantiate(graph, 0))

    def __call__(self):
        lab.check_cuda(cudart.cudaGraphLaunch(self.executable, stream.ptr))

    def __del__(self):
        if self.executable is not None:
            cudart.cudaGraphExecDestroy(self.executable)
        cudart.cudaGraphDestroy(self.graph)


# %% [markdown]
# ## 一共有哪些节点
#
# | 节点（node） | 函数 | 除了图和依赖，还要告诉它 |
# |:--|:--|:--|
# | 内核 | `cuGraphAddKernelNode` | 内核、形状、参数 |
# | 拷贝（memcpy） | `cudaGraphAddMemcpyNode1D` | 目标、来源、字节数、方向 |
# | memset | `cudaGraphAddMemsetNode` | 地址、填什么、元素大小、元素个数 |
# | 主机函数（host） | `cudaGraphAddHostNode` | C 函数的地址、传给它的指针 |
# | 事件（event） | `cudaGraphAddEventRecordNode`、`cudaGraphAddEventWaitNode` | 事件 |
# | 空节点（empty） | `cudaGraphAddEmptyNode` | 没有了：它什么也不做，只用来连边 |
# | 子图（child graph） | `cudaGraphAddChildGraphNode` | 另一张图的定义 |
#
# 前三个参数一律是“图、依赖列表、依赖个数”，返回新节点。
# 分配和释放显存的节点留给《内存池优化》，条件节点留给《形状变化时更新图》。
#
# 还有一个万能的 `cudaGraphAddNode`，什么节点都能加；但它的参数在 CUDA 12 和 13 里不一样，本章不用它。
#
# ### 拷贝和 memset
#
# 搭一张五个节点的图：把 CPU 上的新数据拷进 `xs`，搅拌；同时把 `tally` 清零；等两边都好了，把 `xs` 吸收进 `tally`，拷回 CPU。
#
# 主机缓冲用锁页内存（pinned memory），GPU 能直接读写它，`cupyx.zeros_pinned` 分配的就是。

# %% tags=["demo", "gpu"]
KIND = cudart.cudaMemcpyKind
inbox, outbox = (cupyx.zeros_pinned(SIZE, np.uint32) for _ in range(2))
with stream:
    tally = cp.empty_like(xs)

graph = lab.check_cuda(cudart.cudaGraphCreate(0))

arrive = lab.check_cuda(
    cudart.cudaGraphAddMemcpyNode1D(graph, [], 0, xs.data.ptr, inbox.ctypes.data, xs.nbytes, KIND.cudaMemcpyHostToDevice)
)
fill = cudart.cudaMemsetParams()
fill.dst, fill.value = tally.data.ptr, 0
fill.elementSize, fill.width, fill.height = 4, tally.size, 1  # bytes an element, elements a row, rows
wipe = lab.check_cuda(cudart.cudaGraphAddMemsetNode(graph, [], 0, fill))
stir = kernel_node(graph, [arrive], mix, blocks_for(xs), xs, 0, 3, xs.size)
fold = kernel_node(graph, [stir, wipe], absorb, blocks_for(tally), tally, xs, tally.size)
leave = lab.check_cuda(
    cudart.cudaGraphAddMemcpyNode1D(graph, [fold], 1, outbox.ctypes.data, tally.data.ptr, tally.nbytes, KIND.cudaMemcpyDeviceToHost)
)
request = BuiltGraph(graph, inbox, outbox, xs, tally)

for constant in (7, 1000):
    inbox[...] = constant
    request()
    stream.synchronize()
    print(f"收件箱填 {constant}：结果正确", np.array_equal(outbox, mixed(np.full(SIZE, constant, np.uint32), 3)))

# %% [markdown]
# memset 有两处容易写错：`width` 数的是**元素**，不是字节；`value` 按 `elementSize` 填，元素是 4 字节，填的就是整个 32 位数
# （`cudaMemset` 那个函数则总是按字节填）。
#
# ### 看一眼：DOT
#
# 讲义的建议是先用 `cudaGraphDebugDotPrint` 导出结构。搭出来的图更该看：多一条边、少一条边都是你自己写的，没有别人可怪。
# 最后一个参数是标志位，0 是最简短的格式。

# %% tags=["demo", "gpu"]
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt


def dot_of(graph, flags=0):
    """The DOT text that the driver writes of a graph (cudaGraph_t or int)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "graph.dot")
        lab.check_cuda(cudart.cudaGraphDebugDotPrint(graph, str(path).encode(), flags))
        return path.read_text()


lab.plot_style()
dot = dot_of(request.graph)
print(dot)
lab.draw_graph(dot, title="拷入 → 搅拌 → 吸收 → 拷出，memset 并排")
plt.show()

# %% [markdown]
# 每个节点一段：方括号里的 `label` 第一行是编号，第二行是内核的名字，或者 `MEMCPY` 这样的种类；最后是边。
#
# 想看参数，就加上标志位 `cudaGraphDebugDotFlagsVerbose`，网格、地址、句柄全写出来。下面只印开头一段：

# %% tags=["demo", "gpu"]
print(dot_of(request.graph, cudart.cudaGraphDebugDotFlags.cudaGraphDebugDotFlagsVerbose)[:700], "…")

# %% [markdown]
# ## 依赖：谁等谁
#
# ### 两种连法
#
# 加节点时给出依赖列表，是一种；先把节点都加好，再用 `cudaGraphAddDependencies` 补边，是另一种。
# 补边的函数在 CUDA 13 里多了一个参数：每条边的附加数据（edge data），放在个数之前，填 `None` 就是普通的边。
#
# 反过来查边也有同样的差别：`cudaGraphGetEdges` 在 CUDA 13 里多返回一项附加数据。
# 有的 cuda-bindings 版本返回的附加数据指向已经释放的内存，读出来是垃圾。所以**只按位置取两端和最后的个数，不碰附加数据**。

# %% tags=["demo", "gpu"]
import cuda.bindings

EDGE_DATA = (None,) if int(cuda.bindings.__version__.split(".")[0]) >= 13 else ()
WORDS = {"Graph": "child", "WaitEvent": "event", "EventRecord": "event"}


def add_edge(graph, tail, head):
    """Let head wait for tail. Returns the error code, for the reader to see."""
    (error,) = cudart.cudaGraphAddDependencies(graph, [tail], [head], *EDGE_DATA, 1)
    cudart.cudaGetLastError()
    return error


def topology(graph):
    """({number: kind}, [(tail, head), …]) as the driver tells them: what lab.draw_graph takes."""
    _, count = lab.check_cuda(cudart.cudaGraphGetNodes(graph, 0))
    nodes, _ = lab.check_cuda(cudart.cudaGraphGetNodes(graph, count)) if count else ([], 0)
    kinds = [lab.check_cuda(cudart.cudaGraphNodeGetType(node)).name.removeprefix("cudaGraphNodeType") for node in nodes]
    number = {int(node): str(position) for position, node in enumerate(nodes)}
    n_edges = lab.check_cuda(cudart.cudaGraphGetEdges(graph, 0))[-1]
    ends = lab.check_cuda(cudart.cudaGraphGetEdges(graph, n_edges))[:2] if n_edges else ([], [])
    edges = [(number[int(tail)], number[int(head)]) for tail, head in zip(*ends, strict=True)]
    return {number[int(node)]: WORDS.get(kind, kind.lower()) for node, kind in zip(nodes, kinds, strict=True)}, edges


graph = lab.check_cuda(cudart.cudaGraphCreate(0))
a, b = (kernel_node(graph, [], mix, blocks_for(xs), xs, i, 1, xs.size) for i in range(2))
print("补一条边 a → b：", add_edge(graph, a, b).name, topology(graph)[1])
print("再补一遍：      ", add_edge(graph, a, b).name, topology(graph)[1])
print("补成环 b → a：  ", add_edge(graph, b, a).name)
error, _ = cudart.cudaGraphInstantiate(graph, 0)
cudart.cudaGetLastError()
print("实例化：        ", error.name)
lab.check_cuda(cudart.cudaGraphDestroy(graph))

# %% [markdown]
# 重复的边和环，驱动会在补边或实例化的时候拒绝，各在哪一步，看上面的输出。
#
# 但**少一条边，驱动不会提醒你**：少边的图照样合法，只是先后没有了保证。
#
# ### 空节点：省边
#
# 四个节点都做完，另外四个才能开始，要多少条边？直接连是 4 × 4；中间放一个空节点，只要 4 + 4。
# 空节点不做事，只起“人到齐了”的作用。

# %% tags=["demo", "gpu"]
def four_then_four(with_empty):
    """Four mix nodes, then four more that wait for all of them. Returns the topology."""
    graph = lab.check_cuda(cudart.cudaGraphCreate(0))
    quarters = [xs[i * 1024 : (i + 1) * 1024] for i in range(4)]
    after = [kernel_node(graph, [], mix, blocks_for(q), q, 0, 1, q.size) for q in quarters]
    if with_empty:
        after = [lab.check_cuda(cudart.cudaGraphAddEmptyNode(graph, after, len(after)))]
    for q in quarters:
        kernel_node(graph, after, mix, blocks_for(q), q, 1, 1, q.size)
    found = topology(graph)
    lab.check_cuda(cudart.cudaGraphDestroy(graph))
    return found


fig, axes = plt.subplots(1, 2, figsize=(9, 3.6))
for ax, with_empty in zip(axes, (False, True), strict=True):
    nodes, edges = four_then_four(with_empty)
    lab.draw_graph((nodes, edges), ax=ax, title=f"{len(nodes)} 个节点，{len(edges)} 条边")
plt.show()

# %% [markdown]
# ## 事件节点：图里的秒表，图外的红绿灯
#
# **记录节点**每次执行都真的记录一次事件，于是可以给图的中间一段计时。
# **等待节点**让图等图外的工作：等的是启动这张图之前，别的流上最近一次记录的那个位置。
#
# 先看秒表：前后两个记录节点，中间夹十个 `mix`。

# %% tags=["demo", "gpu"]
began, ended = cp.cuda.Event(), cp.cuda.Event()
graph = lab.check_cuda(cudart.cudaGraphCreate(0))
after = [lab.check_cuda(cudart.cudaGraphAddEventRecordNode(graph, [], 0, began.ptr))]
for i in range(10):
    after = [kernel_node(graph, after, mix, blocks_for(xs), xs, i, 500, xs.size)]
lab.check_cuda(cudart.cudaGraphAddEventRecordNode(graph, after, 1, ended.ptr))
timed = BuiltGraph(graph, xs, began, ended)

inside = []
for _ in range(20):
    timed()
    stream.synchronize()
    inside.append(cp.cuda.get_elapsed_time(began, ended) * 1000)
outside = lab.end_to_end_us(timed, repeats=20)
lab.say(f"图里的秒表：十个内核 {np.median(inside[1:]):.0f} µs；CPU 从启动到同步完成：{outside.median:.0f} µs。")

# %% [markdown]
# 再看红绿灯。另一条流 `side` 上有一个很长的 `mix` 正在改 `xs`，图的任务是把 `xs` 拷到 `ys`。
# 图和 `side` 之间什么关系也没有，它会等吗？加一个等待节点呢？

# %% tags=["demo", "gpu"]
LONG = 200_000  # rounds: some milliseconds
side = cp.cuda.Stream(non_blocking=True)
changed = cp.cuda.Event(disable_timing=True)


def copy_after(wait):
    """A graph that copies xs to ys, after a wait for the event `changed` if asked."""
    graph = lab.check_cuda(cudart.cudaGraphCreate(0))
    after = [lab.check_cuda(cudart.cudaGraphAddEventWaitNode(graph, [], 0, changed.ptr))] if wait else []
    lab.check_cuda(
        cudart.cudaGraphAddMemcpyNode1D(graph, after, len(after), ys.data.ptr, xs.data.ptr, xs.nbytes, KIND.cudaMemcpyDeviceToDevice)
    )
    return BuiltGraph(graph, xs, ys, changed)


for wait in (False, True):
    copying = copy_after(wait)
    before = xs.get()
    with side:
        launch_mix(xs, 0, LONG)
        changed.record(side)
    copying()
    cp.cuda.Device().synchronize()
    got = "旧数据" if np.array_equal(ys.get(), before) else "新数据" if np.array_equal(ys.get(), xs.get()) else "半新半旧的数据"
    print(f"{'有' if wait else '没有'}等待节点：ys 拿到的是{got}")

# %% [markdown]
# 没有等待节点的那张图，拿到什么全凭运气；有等待节点的，一定是新数据。
#
# ## 主机函数节点：让图叫一声 CPU
#
# 图也可以在中途调用一个 CPU 函数，它的原型是 `void fn(void *)`。在 Python 里，用 `ctypes.CFUNCTYPE` 把 Python 函数包成 C 函数，
# 把它的地址写进节点。下面的图每执行一次，就把结果的第一个数记进列表。

# %% tags=["demo", "gpu"]
HOST_FN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # void (void *)
log = []


@HOST_FN
def note(_):
    log.append(int(outbox[0]))


def stir_and_tell(callback):
    """mix on xs, xs copied to outbox, and then the callback, if there is one."""
    graph = lab.check_cuda(cudart.cudaGraphCreate(0))
    stir = kernel_node(graph, [], mix, blocks_for(xs), xs, 0, 3, xs.size)
    copy = lab.check_cuda(
        cudart.cudaGraphAddMemcpyNode1D(graph, [stir], 1, outbox.ctypes.data, xs.data.ptr, xs.nbytes, KIND.cudaMemcpyDeviceToHost)
    )
    if callback is not None:
        host = cudart.cudaHostNodeParams()
        host.fn = cudart.cudaHostFn_t(ctypes.cast(callback, ctypes.c_void_p).value)
        host.userData = None  # would be passed to the callback
        lab.check_cuda(cudart.cudaGraphAddHostNode(graph, [copy], 1, host))
    return BuiltGraph(graph, xs, outbox, callback)


telling, silent = stir_and_tell(note), stir_and_tell(None)
state, want = xs.get(), []
for _ in range(10):
    telling()
    state = mixed(state, 3)
    want.append(int(state[0]))
stream.synchronize()
print("启动 10 次，回调运行了", len(log), "次，每次看到的都是当时的结果：", log == want)

lab.draw_graph(topology(telling.graph), title="图的最后叫一声 CPU")
plt.show()

pair = lab.compare_us(telling, silent, clock="end_to_end")
lab.say(f"有主机函数节点的图端到端 {pair.first.median:.0f} µs，没有的 {pair.second.median:.0f} µs：叫一声 CPU 多花 **{pair.first.median - pair.second.median:.0f} µs**。")

# %% [markdown]
# 每次重放，GPU 都要停下来等 CPU 的一个线程醒过来、拿到 Python 的锁、跑完函数，再继续。所以主机函数要短，能用事件就用事件。
# 它还有三个能让程序崩溃或卡死的坑，放在后面的误区三里。
#
# ## 子图：把一张图当一个节点
#
# 假设一个库把它的工作录成了图，并提供“启动”这个动作；而你正在捕获自己的图，想把库的工作也录进去。能直接启动吗？

# %% tags=["demo", "gpu"]
with stream:
    stream.begin_capture()
    for i in range(3):
        launch_mix(xs, i, 1)
    library = stream.end_capture()  # what some library would hold

RELAXED = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, RELAXED))
(launched,) = cudart.cudaGraphLaunch(library.graphExec, stream.ptr)
closed, _ = cudart.cudaStreamEndCapture(stream.ptr)
cudart.cudaGetLastError()
print(f"捕获中启动另一张图：{launched.name}（{int(launched)}）；结束捕获：{closed.name}（{int(closed)}）")

# %% [markdown]
# 如果你看到的是 900 和它的回声 901，那就是驱动在说：可执行图是成品，不能再录进别的图里。
# 能放进去的是**定义**：把库的图当作一个子图节点。CuPy 的图在 `.graph` 里留着定义，所以录来的和搭来的可以拼在一起。

# %% tags=["demo", "gpu"]
parent = lab.check_cuda(cudart.cudaGraphCreate(0))
take = kernel_node(parent, [], absorb, blocks_for(xs), xs, ys, xs.size)
inner = lab.check_cuda(cudart.cudaGraphAddChildGraphNode(parent, [take], 1, library.graph))
kernel_node(parent, [inner], mix, blocks_for(xs), xs, 100, 1, xs.size)
composed = BuiltGraph(parent, xs, ys)

state = xs.get()
composed()
stream.synchronize()
print("一次启动，三段都做了：", np.array_equal(xs.get(), mixed(mixed(state ^ ys.get(), 3), 1, first=100)))
lab.draw_graph(topology(composed.graph), title="中间那个节点，是库的三个内核")
plt.show()

# %% [markdown]
# ## 节点指向的东西，谁来保管
#
# 一个节点里，有的东西在加入时就抄了一份，有的只记下地址。抄下来的，原件丢了也不要紧；只记地址的，那一头的东西必须一直在。
#
# ### 内核的参数：抄下来了
#
# 参数放在一个 `ctypes` 变量里，加完节点再改它，然后问节点：你手里是几？

# %% tags=["demo", "gpu"]
first = ctypes.c_uint32(5)
values = (ctypes.c_void_p(xs.data.ptr), first, ctypes.c_uint32(1), ctypes.c_uint32(xs.size))
pointers = (ctypes.c_void_p * 4)(*map(ctypes.addressof, values))  # void *[4], as a C program would write it
params = kernel_params(mix, blocks_for(xs))
params.kernelParams = ctypes.addressof(pointers)
probe_graph = lab.check_cuda(cudart.cudaGraphCreate(0))
probe = lab.check_cuda(driver.cuGraphAddKernelNode(probe_graph, [], 0, params))
first.value = 7
print("变量改成了 7，节点里的 first 是", mix_arguments(probe)[1])

# %% [markdown]
# 驱动知道这个内核每个参数多长，加入的那一刻就照着抄走了。所以参数用的临时变量，加完就可以丢。
#
# 反过来读时要小心：`cuGraphKernelNodeGetParams` 给出的 `kernelParams` 指向**节点自己的**内存。
# 直接往那里写，或者把它当成自己的存起来以后再用，都是未定义的行为。要改参数，就另填一份完整的，再交给 `cuGraphKernelNodeSetParams`：

# %% tags=["demo", "gpu"]
address, old_first, rounds, size = mix_arguments(probe)
built_before = lab.check_cuda(cudart.cudaGraphInstantiate(probe_graph, 0))
fresh = kernel_params(mix, blocks_for(xs), ctypes.c_void_p(address), 40, rounds, size)
lab.check_cuda(driver.cuGraphKernelNodeSetParams(probe, fresh))
print("改完再读：first =", mix_arguments(probe)[1])

built_after = lab.check_cuda(cudart.cudaGraphInstantiate(probe_graph, 0))
for name, executable in (("改之前实例化的", built_before), ("改之后实例化的", built_after)):
    state = xs.get()
    lab.check_cuda(cudart.cudaGraphLaunch(executable, stream.ptr))
    stream.synchronize()
    used = [number for number in (5, 7, 40) if np.array_equal(xs.get(), mixed(state, 1, first=number))]
    print(f"{name}可执行图用的 first：{used}")
    lab.check_cuda(cudart.cudaGraphExecDestroy(executable))
lab.check_cuda(cudart.cudaGraphDestroy(probe_graph))

# %% [markdown]
# 改的是定义，已经造好的可执行图不会跟着变；怎样改一张活的可执行图，是《更新一张活的图》的主题。
#
# ### 缓冲：只记了地址
#
# 一个函数在里面分配了临时缓冲，建好图就返回。缓冲没有别人要，被内存池（memory pool）回收，又发给了下一个申请的人。
# 再启动图，会怎样？设备缓冲和锁页的主机缓冲各试一次；`keep` 决定要不要把缓冲交给 `BuiltGraph` 保管。

# %% tags=["demo", "gpu"]
MINE, THEIRS = 7, 13


def writes_to_scratch(keep):
    """A graph that copies xs into a device buffer of its own. Whether anyone keeps the buffer is the question."""
    scratch = cp.full(SIZE, MINE, cp.uint32)
    graph = lab.check_cuda(cudart.cudaGraphCreate(0))
    lab.check_cuda(cudart.cudaGraphAddMemcpyNode1D(graph, [], 0, scratch.data.ptr, xs.data.ptr, xs.nbytes, KIND.cudaMemcpyDeviceToDevice))
    return BuiltGraph(graph, *([scratch] if keep else []))


def reads_from_inbox(keep):
    """A graph that copies a pinned host buffer of its own to ys."""
    letter = cupyx.zeros_pinned(SIZE, np.uint32)
    letter[...] = MINE
    graph = lab.check_cuda(cudart.cudaGraphCreate(0))
    lab.check_cuda(cudart.cudaGraphAddMemcpyNode1D(graph, [], 0, ys.data.ptr, letter.ctypes.data, ys.nbytes, KIND.cudaMemcpyHostToDevice))
    return BuiltGraph(graph, *([letter] if keep else []))


rows = []
for keep in (False, True):
    with stream:
        writing = writes_to_scratch(keep)
        tenants = [cp.full(SIZE, THEIRS, cp.uint32) for _ in range(16)]  # other people's arrays
    writing()
    stream.synchronize()
    spoilt = sum(not np.array_equal(tenant.get(), np.full(SIZE, THEIRS, np.uint32)) for tenant in tenants)
    reading = reads_from_inbox(keep)
    letters = [cupyx.zeros_pinned(SIZE, np.uint32) for _ in range(4)]  # other people's letters
    for each in letters:
        each[...] = THEIRS
    reading()
    stream.synchronize()
    rows.append(("交给图保管" if keep else "没有人保管", f"{spoilt} 块", "自己的" if ys.get()[0] == MINE else f"别人的（{ys.get()[0]}）"))
lab.say(lab.table(("图的缓冲", "别人的 16 块新数组，被写坏", "从主机拷来的信，是谁的"), rows))

# %% [markdown]
# 没有一个错误码。没有人保管的那张图，照样往老地址写，照样从老地址读，不管那里现在住着谁。
# 真实的程序里，这表现为“偶尔有几个数不对”，往往要查好几天。
#
# 来源换成一个临时的 `bytes` 或普通的 NumPy 数组，道理一样，而且更糟：那块内存可能已经还给了系统，一读就可能让整个进程崩溃。
#
# 所以 `BuiltGraph` 有 `keep`：**谁拥有图，谁就拥有图指向的一切。** 整理一下：
#
# | 节点里的东西 | 加入时抄走 | 只记地址，要一直活着 |
# |:--|:--|:--|
# | 内核的参数、网格形状；memset 的值；拷贝的字节数 | ✓ | |
# | 参数里的指针所指的设备缓冲 | | ✓ |
# | 拷贝两端的缓冲，包括主机缓冲 | | ✓ |
# | 主机函数、传给它的指针所指的数据 | | ✓ |
# | 事件 | | ✓ |
# | 子图的定义 | ✓ | （它指向的缓冲仍然要活着） |
#
# 在 C++ 里还可以用 `cudaUserObjectCreate` 和 `cudaGraphRetainUserObject` 把一个带析构函数的对象挂在图上；在 Python 里，留一个引用就够了。

# %% [markdown]
# ## 并排能快多少
#
# 显式构图最直接的好处，是想并排就并排，不用摆弄流和事件。做个实验：`k` 条互不相关的分支，每条 4 个 `mix`，每个内核只有 1 个 block。
# 同样的 `4k` 个节点，一种全部连成一条链，一种并排成 `k` 条。GPU 上的时间会怎样随 `k` 变？先猜两条线的走势。

# %% tags=["demo", "gpu"]
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEPTH, ROUNDS = 4, 1000


def lanes(field, k, side_by_side):
    """k lanes of DEPTH mix nodes each, on k slices of field: side by side, or all in one chain."""
    graph = lab.check_cuda(cudart.cudaGraphCreate(0))
    width, after = field.size // k, []
    for lane in range(k):
        part = field[lane * width : (lane + 1) * width]
        if side_by_side:
            after = []
        for i in range(DEPTH):
            after = [kernel_node(graph, after, mix, blocks_for(part), part, i, ROUNDS, width)]
    return BuiltGraph(graph, field)


with stream:
    field = cp.zeros(max(COUNTS) * BLOCK, cp.uint32)
chain_us, lanes_us = [], []
for k in COUNTS:
    part = field[: k * BLOCK]
    pair = lab.compare_us(lanes(part, k, False), lanes(part, k, True), clock="end_to_end")
    chain_us.append(pair.first.median)
    lanes_us.append(pair.second.median)

sm_count = cp.cuda.Device().attributes["MultiProcessorCount"]
fig, ax = plt.subplots()
ax.loglog(COUNTS, chain_us, label="连成一条链")
ax.loglog(COUNTS, lanes_us, label="k 条并排")
if sm_count <= COUNTS[-1]:
    ax.axvline(sm_count, color="#555555", linewidth=0.8, linestyle=":", label=f"SM 数量 {sm_count}")
ax.set_xticks(COUNTS, [str(k) for k in COUNTS])
ax.minorticks_off()
ax.set_xlabel(f"分支数 k（每条 {DEPTH} 个内核，每个内核 1 个 block）")
ax.set_ylabel("端到端时间（µs）")
ax.set_title(f"同样的节点，不同的边（{lab.gpu_name()}）")
ax.legend()
plt.show()

ratios = [chain / side_us for chain, side_us in zip(chain_us, lanes_us, strict=True)]
best = int(np.argmax(ratios))
flat = max(k for k, us in zip(COUNTS, lanes_us, strict=True) if us <= 1.5 * lanes_us[0])
lab.say(
    f"8 条分支：一条链 {chain_us[3]:.0f} µs，并排 {lanes_us[3]:.0f} µs，快 **{ratios[3]:.1f}** 倍。"
    f"并排的时间直到 k = {flat} 都不超过一条分支的 1.5 倍；收益最大在 k = {COUNTS[best]}，{ratios[best]:.1f} 倍。"
)

# %% [markdown]
# 一条链的时间随 `k` 成正比：节点总数决定时间。并排的时间起先几乎不动：**最长的那条路径决定时间**，而路径长度一直是 4 个节点。
# 它后来如果往上翘，原因有两个：节点要由 GPU 一个个派发，节点多了，光派发也要时间；能同时运行的内核和 SM 的数量又都有限。
# 从哪里开始翘，看你自己的那张图。
#
# **轮到你**：把 `DEPTH` 从 4 改成 8，两条线各会怎样移动？先写下猜测，再重新运行那一格。
#
# 最长路径（longest path，也叫关键路径 critical path）于是成了一把尺子：**图再怎么并行，也快不过最长路径上所有节点的时间之和。**
# 练习三就从 DOT 里把它算出来。

# %% [markdown]
# ## 显式还是捕获
#
# 两种办法造出的定义是同一种东西，还能用子图拼起来。怎么选？
#
# | 情况 | 捕获 | 显式 |
# |:--|:--|:--|
# | 工作在库里（cuBLAS、TensorRT），看不到内核和参数 | 只能捕获 | 拿捕获来的图当子图 |
# | 想要的拓扑很明确，分支很多 | 要摆弄流和事件 | 直接写依赖 |
# | 建图时别的线程、默认流、同步调用 | 有种种禁令 | 不碰流，没有禁令 |
# | 先后和数据依赖 | 同一条流里自动成链，保守但安全 | 全靠自己，少一条边没人提醒 |
# | 节点的参数 | 在发起调用的代码里 | 在手里，以后更新时正好用得上 |
#
# 那么建图的速度呢？200 个节点的链，两种办法轮流各建十次，第一次不算。

# %% tags=["demo", "gpu"]
from time import perf_counter_ns

N = 200


def chain_by_hand():
    graph, after = lab.check_cuda(cudart.cudaGraphCreate(0)), []
    for i in range(N):
        after = [kernel_node(graph, after, mix, blocks_for(xs), xs, i, 1, xs.size)]
    return graph


def chain_by_capture():
    lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, RELAXED))
    with stream:
        for i in range(N):
            launch_mix(xs, i, 1)
    return lab.check_cuda(cudart.cudaStreamEndCapture(stream.ptr))


spent = {"显式": (chain_by_hand, []), "捕获": (chain_by_capture, [])}
for _ in range(11):
    for build, times in spent.values():
        began_ns = perf_counter_ns()
        graph = build()
        times.append((perf_counter_ns() - began_ns) / 1000)
        lab.check_cuda(cudart.cudaGraphDestroy(graph))
by_hand_us, by_capture_us = (float(np.median(times[1:])) for _, times in spent.values())
faster, slower = sorted((by_hand_us, by_capture_us))
lab.say(
    f"{N} 个节点：显式 {by_hand_us:.0f} µs，捕获 {by_capture_us:.0f} µs。"
    + (
        "两者差不多。"
        if slower < 1.3 * faster
        else f"这里{'显式' if by_hand_us < by_capture_us else '捕获'}快一些（{slower / faster:.1f} 倍）。"
    )
    + "两种办法都要在 Python 里逐个准备参数，这部分谁也省不掉。"
)

# %% [markdown]
# 选哪一种，不该看建图的快慢，图建好要重放成千上万次；该看的是谁更容易写对。

# %% [markdown]
# ## 误区一：先加的节点先执行
#
# 代码里先写内核、后写拷贝，读起来当然是先算后拷。图也这么想吗？
# 让一个很长的 `mix` 改 `xs`，再加一个“把 `xs` 拷到 `ys`”的节点。一张不写依赖，一张写上。

# %% tags=["demo", "gpu"]
def mix_then_copy(depend):
    graph = lab.check_cuda(cudart.cudaGraphCreate(0))
    slow = kernel_node(graph, [], mix, blocks_for(xs), xs, 0, LONG, xs.size)
    after = [slow] if depend else []
    lab.check_cuda(
        cudart.cudaGraphAddMemcpyNode1D(graph, after, len(after), ys.data.ptr, xs.data.ptr, xs.nbytes, KIND.cudaMemcpyDeviceToDevice)
    )
    return BuiltGraph(graph, xs, ys)


waited = {}
for depend in (False, True):
    both = mix_then_copy(depend)
    waited[depend] = 0
    for _ in range(5):
        both()
        stream.synchronize()
        waited[depend] += int(np.array_equal(ys.get(), xs.get()))
lab.say(f"启动 5 次，`ys` 等于算完以后的 `xs`：没有依赖的图 **{waited[False]}** 次，写了依赖的图 **{waited[True]}** 次。")

# %% [markdown]
# 加入的顺序不是执行的顺序，只有边才是。没有边的那张图，哪怕在你的机器上碰巧每次都对，换一块 GPU、换一个驱动就可能不对。
#
# 捕获时，同一条流会替你把先后都写成边；自己搭图，每一条都得自己想：**后面这个节点，读或写了谁正在改的东西？**

# %% [markdown]
# ## 误区二：子图是引用，改了原来的定义，里面也会变
#
# 把一张只有一个节点的图加成子图，再给原来的定义添一个节点。父图里的那份变了吗？

# %% tags=["demo", "gpu"]
original = lab.check_cuda(cudart.cudaGraphCreate(0))
only = kernel_node(original, [], mix, blocks_for(xs), xs, 0, 1, xs.size)
parent = lab.check_cuda(cudart.cudaGraphCreate(0))
inner = lab.check_cuda(cudart.cudaGraphAddChildGraphNode(parent, [], 0, original))
kernel_node(original, [only], mix, blocks_for(xs), xs, 1, 1, xs.size)

embedded = lab.check_cuda(cudart.cudaGraphChildGraphNodeGetGraph(inner))
print("原来的定义：", len(topology(original)[0]), "个节点；父图里的那份：", len(topology(embedded)[0]), "个节点")

lab.check_cuda(cudart.cudaGraphDestroy(original))
cloned = BuiltGraph(parent, xs)
state = xs.get()
cloned()
stream.synchronize()
print("销毁原来的定义以后，父图照样工作：", np.array_equal(xs.get(), mixed(state, 1)))

# %% [markdown]
# `cudaGraphAddChildGraphNode` 在加入时克隆（clone）了整张定义，从此各走各的。同一份定义加两次，就是两份独立的克隆。
#
# `cudaGraphChildGraphNodeGetGraph(节点)` 给出的正是父图里的那一份：改它，父图下一次实例化就跟着变。它归父图所有，不要销毁它。

# %% [markdown]
# ## 误区三：主机函数里什么都能做
#
# 主机函数是驱动的线程在调用，有三条规矩：**留住函数的引用；不要让等待 GPU 的人握着 Python 的锁；里面不要调用 CUDA。**
#
# 犯规的后果可能是崩溃或卡死，所以放到子进程里做：出了事，死的是子进程。子进程里有一只看门狗（`faulthandler`），
# 卡住 3 秒就报告停在哪里，然后结束进程。四种情形：
#
# 1. `kept`：规规矩矩，函数一直留着；
# 2. `dropped`：第一次启动之后，把函数的引用丢掉，再启动；
# 3. `gil`：用 `ctypes.PyDLL` 调用同步函数。它和常用的 `ctypes.CDLL` 只差一点：等待期间不放开 Python 的全局锁（GIL）；
# 4. `cuda`：在函数里分配显存。

# %% tags=["demo", "gpu"]
import re
import subprocess
import sys

CHILD = r'''
import ctypes, faulthandler, gc, sys
from cuda.bindings import runtime as cudart

HOST_FN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

def address(callback):
    return ctypes.cast(callback, ctypes.c_void_p).value

def done(result):
    assert int(result[0]) == 0, result[0].name
    return result[1] if len(result) > 1 else None

def graph_that_calls(callback):
    params = cudart.cudaHostNodeParams()
    params.fn = cudart.cudaHostFn_t(address(callback))
    graph = done(cudart.cudaGraphCreate(0))
    done(cudart.cudaGraphAddHostNode(graph, [], 0, params))
    return done(cudart.cudaGraphInstantiate(graph, 0))

def launch_and_wait(executable):
    done(cudart.cudaGraphLaunch(executable, stream))
    done(cudart.cudaStreamSynchronize(stream))

def wait_holding_the_gil():
    ctypes.PyDLL("libcuda.so.1").cuStreamSynchronize(ctypes.c_void_p(int(stream)))

def greet(_):
    print("my function ran", flush=True)

def allocate(_):
    print("cudaMalloc inside:", cudart.cudaMalloc(1024)[0].name, flush=True)

mode = sys.argv[1]
done(cudart.cudaFree(0))
stream = done(cudart.cudaStreamCreate())
faulthandler.enable()
faulthandler.dump_traceback_later(3, exit=True)

callback = HOST_FN(allocate if mode == "cuda" else greet)
executable = graph_that_calls(callback)
if mode == "gil":
    done(cudart.cudaGraphLaunch(executable, stream))
    wait_holding_the_gil()
else:
    launch_and_wait(executable)
if mode == "dropped":
    old = address(callback)
    del callback
    gc.collect()
    strangers = [HOST_FN(lambda _: print("a stranger's function ran", flush=True)) for _ in range(8)]
    print("old address has a new owner:", old in map(address, strangers), flush=True)
if mode in ("kept", "dropped"):
    launch_and_wait(executable)
'''

rows = []
for mode in ("kept", "dropped", "gil", "cuda"):
    run = subprocess.run([sys.executable, "-c", CHILD, mode], capture_output=True, text=True, timeout=120)
    where = re.search(r" in (\w+)", run.stderr)
    if run.returncode == 0:
        fate = "正常结束"
    elif "Timeout" in run.stderr:
        fate = f"卡死，停在 `{where[1] if where else '?'}`"
    elif run.returncode < 0:
        fate = f"崩溃，信号 {-run.returncode}"
    else:
        fate = "出错：" + run.stderr.strip().splitlines()[-1]
    rows.append((f"`{mode}`", fate, "；".join(run.stdout.split("\n")).strip("；") or "（没有输出）"))
lab.say(lab.table(("情形", "子进程的结局", "它的输出"), rows))

# %% [markdown]
# - `dropped`：节点里只有一个地址。函数对象没了，那块内存很快就会装上别的东西；这时再启动，可能叫到**别人的函数**，也可能崩溃，
#   也可能碰巧没事。三种都不能要，所以函数要交给 `BuiltGraph` 的 `keep`。
# - `gil`：等待的线程握着锁不放，等 GPU；GPU 等主机函数；主机函数等锁。谁也走不了，这叫死锁（deadlock）。
#   CuPy 和 `cuda.bindings` 在等待时都会放开 GIL，没有这个问题；别的扩展模块未必，所以函数越短越好，能用事件就不用它。
# - `cuda`：文档规定主机函数里不许调用 CUDA，调用可能得到 `cudaErrorNotPermitted`，也**可能卡死**。你这里是哪一种，看表。
#
# 还有一条不用试：主机函数里抛出的异常传不出来，只会在标准错误里印一段话，图照样往下走。

# %% [markdown]
# ## 误区四：并排总是更快
#
# 前面的分支各只有 1 个 block，GPU 空得很。要是一个内核就占满了整块 GPU 呢？4 条分支，再比一次：

# %% tags=["demo", "gpu"]
rows = []
for name, blocks in (("1 个 block", 1), (f"{8 * sm_count} 个 block（每个 SM 分到 8 个）", 8 * sm_count)):
    with stream:
        wide = cp.zeros(4 * blocks * BLOCK, cp.uint32)
    pair = lab.compare_us(lanes(wide, 4, False), lanes(wide, 4, True), clock="end_to_end")
    rows.append((name, f"{pair.first.median:.0f}", f"{pair.second.median:.0f}", f"{pair.ratio:.2f}"))
lab.say(lab.table(("每个内核", "一条链 µs", "4 条并排 µs", "快几倍"), rows))

# %% [markdown]
# 并排用的是 GPU 的**空位**。一个内核已经把 SM 占满，并排就只是轮流，省下的最多是相邻内核之间的那点间隙和收尾。
# 所以“没有依赖的节点可以并行”这句话，后半句是：前提是还有地方给它跑。

# %% [markdown]
# ## 练习
#
# 四道练习，共 12 分。解答里可以用这些给定的名字：
#
# - 模块与工具：`np`、`cp`、`cupyx`、`ctypes`、`driver`、`cudart`、`partial`、`lab`；
# - 内核与流：`mix`、`absorb`、`combine`、`stream`、`BLOCK`、`blocks_for`、`launch_mix`；
# - 构图：`kernel_params`、`kernel_node`、`mix_arguments`、`BuiltGraph`；
# - NumPy 版：`mixed`、`combined`；以及各题另外给出的名字。
#
# `topology`、`dot_of`、`lanes`、`xs` 等名字来自演示单元（只做实验，评分时不运行），解答里不能用：
# 评分会在干净的环境里运行给定的单元和你的解答，跳过演示单元。
#
# ### 练习一：照图纸搭一个菱形（3 分）
#
# 写 `build_diamond(x, rounds, fill)`，用显式 API 搭出下面这张图，返回 `BuiltGraph`。
# `left` 和 `right` 是你自己分配的两块设备缓冲，大小和 `x` 一样。
#
# | 节点 | 种类 | 做什么 | 等谁 |
# |:--|:--|:--|:--|
# | A | 内核 | `mix`：`x`，序号从 0 开始，`rounds` 轮 | 谁也不等 |
# | B | 拷贝 | `left` ← `x` | A |
# | C | memset | `right` 的每个元素填成 `fill`（32 位无符号整数） | 谁也不等 |
# | D | 内核 | `mix`：`left`，序号从 1000 开始，`rounds` 轮 | B |
# | E | 内核 | `absorb`：`right` ^= `x` | A、C |
# | F | 内核 | `combine`：`x`，左 `left`，右 `right` | D、E |
#
# 要求：
#
# - 建图不能改变 `x`；正好 6 个节点、6 条边；
# - 每次启动都在 `x` **当时**的内容上继续，别人可能在两次启动之间改写 `x`；
# - 函数返回以后，图仍然能用：两块缓冲不能被回收（`x` 由调用的人保管）；图没有人要了，缓冲也就还给内存池。
#
# 给定的 `diamond` 是 NumPy 版的正确答案。

# %%
def diamond(x, rounds, fill):
    """What one launch of the diamond makes of x (numpy uint32); x stays as it is."""
    stirred = mixed(x, rounds)
    left = mixed(stirred, rounds, first=1000)
    right = np.full_like(x, fill) ^ stirred
    return combined(stirred, left, right)


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 照表格一行一行地加，每加一个节点就留住它，后面的行要拿它当依赖。加入的先后可以不同于表格，但一个节点要等的，必须已经加好。
# 还有：`left` 和 `right` 在函数返回以后，谁还拿着它们？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# - 空图：`cudart.cudaGraphCreate(0)`；缓冲：`cp.empty_like(x)`，地址是 `.data.ptr`。
# - 内核：`kernel_node(graph, after, kernel, blocks, *arguments)`，参数的次序见 `SOURCE` 里的内核。
# - 拷贝：`cudart.cudaGraphAddMemcpyNode1D(graph, after, len(after), 目标地址, 来源地址, 字节数, 方向)`，
#   设备内的方向是 `cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice`。
# - memset：填好 `cudart.cudaMemsetParams()` 的 `dst`、`value`、`elementSize`（字节）、`width`（元素个数）、`height`（1），
#   交给 `cudart.cudaGraphAddMemsetNode(graph, after, len(after), 参数)`。
# - `cudart` 的调用都用 `lab.check_cuda` 包起来；`BuiltGraph(graph, *keep)` 的 `keep` 是要它保管的东西。
#
# </details>

# %% solution="build_diamond" tags=["gpu"]
def build_diamond(x, rounds, fill):
    """Build the diamond of the table by the explicit API. Returns a BuiltGraph, which owns left and right.

    x: cupy uint32, 1-D, advanced in place by each launch; it stays the caller's. rounds: int >= 1.
    fill: int, 0 … 2**32 - 1.
    """
    ### BEGIN SOLUTION: 先建一张空图，再照表格一行一行地加节点，每加一个就留住它；函数返回以后，left 和 right 还要有人拿着
    left, right = cp.empty_like(x), cp.empty_like(x)
    blocks, copy_kind = blocks_for(x), cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    graph = lab.check_cuda(cudart.cudaGraphCreate(0))

    a = kernel_node(graph, [], mix, blocks, x, 0, rounds, x.size)
    b = lab.check_cuda(cudart.cudaGraphAddMemcpyNode1D(graph, [a], 1, left.data.ptr, x.data.ptr, x.nbytes, copy_kind))
    filling = cudart.cudaMemsetParams()
    filling.dst, filling.value = right.data.ptr, fill
    filling.elementSize, filling.width, filling.height = 4, right.size, 1
    c = lab.check_cuda(cudart.cudaGraphAddMemsetNode(graph, [], 0, filling))
    d = kernel_node(graph, [b], mix, blocks, left, 1000, rounds, x.size)
    e = kernel_node(graph, [a, c], absorb, blocks, right, x, x.size)
    kernel_node(graph, [d, e], combine, blocks, x, left, right, x.size)
    return BuiltGraph(graph, left, right)
    ### END SOLUTION


# %% test="build_diamond" kind="structure" points=3 tags=["gpu"]
given = np.arange(1000, dtype=np.uint32)
buffer = on_gpu(given)
made = student.build_diamond(buffer, 3, 77)
check.equal(buffer.read(), given, why="建图的时候 x 就变了。build_diamond 只应当加节点和实例化，不启动。")
check.nodes(made, kernels=4, memcpys=1, memsets=1, total=6, edges=6, why="图应当是 4 个内核、1 个拷贝、1 个 memset，共 6 条边。对照表格的“等谁”一列数一数：有没有多等了谁，或者少等了谁？")
made.run(1)
check.equal(buffer.read(), reference.diamond(given, 3, 77), why="启动一次的结果不对。逐行对照表格：序号从几开始，memset 的 width 数的是不是元素，combine 的左和右有没有写反，等的是不是 D 和 E？")
### BEGIN HIDDEN TESTS
# Which kind waits for which: six edges drawn elsewhere would not be the diamond.
EDGES = """
def edge_kinds(built):
    from launchlab.exam.agent import describe_graph
    told = describe_graph(built)
    return sorted([told["kinds"][tail], told["kinds"][head]] for tail, head in told["edges"])
"""
wanted_edges = [["Kernel", "Kernel"]] * 3 + [["Kernel", "Memcpy"], ["Memcpy", "Kernel"], ["Memset", "Kernel"]]
check.equal(student.define(EDGES, "edge_kinds")(made), wanted_edges, why="边的条数对，连的节点不对。表格里谁等拷贝，谁等 memset，谁等两个内核？")
# Which node waits for which, by the names of nodes and of their neighbours; and how many bytes are copied and set.
WIRING = r"""
import re
import tempfile
from pathlib import Path

from cuda.bindings import runtime
from launchlab.exam.agent import definition


def wiring(built):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "graph.dot")
        if int(runtime.cudaGraphDebugDotPrint(definition(built), str(path).encode(), 0)[0]):
            return []
        text = path.read_text()
    names = dict(re.findall(r'"(\w+)"\[.*?label="\d+\n(.*)\n', text))
    edges = re.findall(r'"(\w+)" -> "(\w+)"', text)

    def told(node):
        waits = sorted(names.get(tail, "") for tail, head in edges if head == node)
        return [names.get(node, ""), waits, sorted(names.get(head, "") for tail, head in edges if tail == node)]

    return sorted([told(tail), told(head)] for tail, head in edges)


def extents(built):
    # Bytes that the memset node sets and the copy node copies; 0 where the driver does not tell.
    graph, found = definition(built), {}
    count = runtime.cudaGraphGetNodes(graph, 0)[-1]
    for node in list(runtime.cudaGraphGetNodes(graph, count)[1])[:count]:
        kind = runtime.cudaGraphNodeGetType(node)[1].name.removeprefix("cudaGraphNodeType")
        if kind == "Memset":
            error, params = runtime.cudaGraphMemsetNodeGetParams(node)
            if not int(error):
                found[kind] = int(params.elementSize) * int(params.width) * max(1, int(params.height))
        if kind == "Memcpy":
            error, params = runtime.cudaGraphMemcpyNodeGetParams(node)
            if not int(error):
                found[kind] = int(params.extent.width) * max(1, int(params.extent.height)) * max(1, int(params.extent.depth))
    return [found.get("Memset", 0), found.get("Memcpy", 0)]


def hoarded(build, x):
    # Bytes of CuPy's pool that five graphs leave in use when nobody holds them any more.
    import gc
    import cupy

    def some(count):
        for _ in range(count):
            build(x, 2, 7)
        gc.collect()
        return cupy.get_default_memory_pool().used_bytes()

    before = some(1)
    return some(5) - before


def use(name):
    return {"wiring": wiring, "extents": extents, "hoarded": hoarded}[name]
"""
theirs, ours = student.define(WIRING, "use"), reference.define(WIRING, "use")
yardstick = on_gpu(given)
reference_made = reference.build_diamond(yardstick, 3, 77)
wired, bytes_moved = ours("wiring")(reference_made), ours("extents")(reference_made)
if len(wired) == 6:
    check.equal(theirs("wiring")(made), wired, why="边的条数对，连的节点不对。请逐行对照表格的“等谁”：D 等的是拷贝，E 等的是 A 和 memset，F 等的是 D 和 E。")
check.equal(theirs("extents")(made), bytes_moved, why="拷贝或 memset 动的不是正好一块缓冲：少了会漏，多了会写坏后面的内存。memset 的 width 数的是元素，拷贝数的是字节。")
check.that(theirs("hoarded")(student.value("build_diamond"), buffer) < 5 * 4000, why="图已经没有人要了，left 和 right 却还占着。缓冲归图所有：交给 BuiltGraph 保管，图走了它们就走，别另外存在全局的地方。")
# Whoever frees left or right lets the pool hand their memory to these arrays.
TENANTS = """
def tenants(stream, size):
    import gc, cupy
    gc.collect()
    arrays = [cupy.full(size, 0xA5A5A5A5, cupy.uint32) for _ in range(4)]
    with stream:
        arrays += [cupy.full(size, 0xA5A5A5A5, cupy.uint32) for _ in range(4)]
    cupy.cuda.runtime.deviceSynchronize()
    return arrays
"""
size, rounds, fill = int(secret.integers(2000, 9000)), int(secret.integers(4, 30)), int(secret.integers(2**24, 2**32))
given = secret.integers(0, 2**32, size, dtype=np.uint32)
buffer = on_gpu(given)
made = student.build_diamond(buffer, rounds, fill)
check.nodes(made, kernels=4, memcpys=1, memsets=1, total=6, edges=6, why="换一个尺寸，图的结构就不对了。")
others = student.define(TENANTS, "tenants")(student.value("stream"), size)
for _ in range(3):
    given = buffer.write(secret.integers(0, 2**32, size, dtype=np.uint32))
    times = int(secret.integers(1, 6))
    made.instantiate().run(times)
    for _ in range(times):
        given = reference.diamond(given, rounds, fill)
    check.equal(buffer.read(), given, why="换了尺寸、轮数、填充值和数据，结果不对。有没有把哪个数写死，或者在建图时就读了 x 的内容？left 和 right 还有人保管吗？")
for other in others:
    check.equal(other, np.full(size, 0xA5A5A5A5, np.uint32), why="启动时写坏了别人的数组：left 或 right 已经被回收，内存池把它给了别人，而图还在往老地址写。请把两块缓冲交给 BuiltGraph 保管。")
### END HIDDEN TESTS

# %% [markdown]
# 画出来看看，是菱形吗？（这一格要先做完练习一。）

# %% tags=["demo", "gpu"]
yours = build_diamond(xs, 3, 77)  # held by a name: a graph that nobody holds is destroyed at once
lab.draw_graph(dot_of(yours.graph), title="你搭的图")
plt.show()

# %% [markdown]
# ### 练习二：同一张子图用两次（3 分）
#
# 你拿到一张现成的图 `body`：几个 `mix` 连成一条链。现在要把它用两次：先原样做一遍，再做一遍，
# 但第二遍里每个 `mix` 的序号 `first` 都要加上 `shift`，别的参数不变。
#
# 写 `build_twice(body, shift)`，返回 `BuiltGraph`：
#
# - 父图里正好 2 个子图节点，第二个等第一个，再没有别的节点；
# - `body`（一个 `BuiltGraph`）自己不能变：别人还要用它，包括它的定义 `body.graph`；
# - `body` 有几个节点、各做几轮，都不一定，要从图里读。
#
# 给定的 `chain_of` 用来造 `body`。

# %% tags=["gpu"]
def chain_of(x, steps):
    """A BuiltGraph of mix nodes on x, one after the other. steps: a list of (first, rounds), one for each node."""
    graph, after = lab.check_cuda(cudart.cudaGraphCreate(0)), []
    for first, rounds in steps:
        after = [kernel_node(graph, after, mix, blocks_for(x), x, first, rounds, x.size)]
    return BuiltGraph(graph, x)


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 加子图时克隆了一份，所以加两次就有两份互不相干的克隆，`body` 本身是第三份。要改的是哪一份？怎样拿到它？
# 改参数要在实例化之前还是之后？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# - `cudart.cudaGraphAddChildGraphNode(graph, after, len(after), 定义)` 返回子图节点；
#   `cudart.cudaGraphChildGraphNodeGetGraph(子图节点)` 返回父图里的那份定义。
# - `cudart.cudaGraphGetNodes(graph, 0)` 返回 `([], 个数)`，`cudart.cudaGraphGetNodes(graph, 个数)` 返回 `(节点列表, 个数)`。
# - `mix_arguments(node)` 读出四个参数；`driver.cuGraphKernelNodeGetParams(node)` 的 `.gridDimX` 是 block 数。
# - `kernel_params(mix, blocks, ctypes.c_void_p(address), first, rounds, size)` 另填一份，
#   `driver.cuGraphKernelNodeSetParams(node, params)` 交给节点。以上都要用 `lab.check_cuda` 包起来。
#
# </details>

# %% solution="build_twice" tags=["gpu"]
def build_twice(body, shift):
    """Build a graph that does body once as it is, and once more with every mix's `first` raised by shift (int).

    body: BuiltGraph whose nodes all are kernels mix; neither it nor its definition changes, and the buffer that it
    works on stays the caller's. Returns a BuiltGraph of two child graph nodes, one after the other.
    """
    ### BEGIN SOLUTION: 先让父图里有两份子图，一份等另一份；再想一想：要改的是哪一份，从哪里拿到它，在什么时候改
    graph = lab.check_cuda(cudart.cudaGraphCreate(0))
    once = lab.check_cuda(cudart.cudaGraphAddChildGraphNode(graph, [], 0, body.graph))
    again = lab.check_cuda(cudart.cudaGraphAddChildGraphNode(graph, [once], 1, body.graph))

    clone = lab.check_cuda(cudart.cudaGraphChildGraphNodeGetGraph(again))
    _, count = lab.check_cuda(cudart.cudaGraphGetNodes(clone, 0))
    nodes, _ = lab.check_cuda(cudart.cudaGraphGetNodes(clone, count))
    for node in nodes:
        blocks = lab.check_cuda(driver.cuGraphKernelNodeGetParams(node)).gridDimX
        address, first, rounds, size = mix_arguments(node)
        fresh = kernel_params(mix, blocks, ctypes.c_void_p(address), first + shift, rounds, size)
        lab.check_cuda(driver.cuGraphKernelNodeSetParams(node, fresh))
    return BuiltGraph(graph, body)
    ### END SOLUTION


# %% test="build_twice" kind="structure" points=3 tags=["gpu"]
given = np.arange(1000, dtype=np.uint32)
buffer = on_gpu(given)
body = student.chain_of(buffer, [(0, 2), (2, 3)])
twice = student.build_twice(body, 5)
check.equal(buffer.read(), given, why="建图的时候 x 就变了。build_twice 只应当加节点、改参数和实例化，不启动。")
check.nodes(twice, children=2, total=2, edges=1, why="父图里应当正好是 2 个子图节点（children）、1 条边。加第二个的时候，把第一个写进依赖列表了吗？")
twice.run(1)
check.equal(buffer.read(), reference.mixed(given, 10), why="body 做的是序号 0 … 4；第二遍的序号都加 5，就是 5 … 9，合起来应当等于从 0 连做 10 轮。改的是第二份克隆吗？是在实例化之前改的吗？")
### BEGIN HIDDEN TESTS
# A fresh executable shows what the definition says now; body's own one was made earlier.
RELAUNCH = """
def relaunch(built, stream):
    from cuda.bindings import runtime
    error, executable = runtime.cudaGraphInstantiate(built.graph, 0)
    assert int(error) == 0, error.name
    runtime.cudaGraphLaunch(executable, stream.ptr)
    runtime.cudaStreamSynchronize(stream.ptr)
    runtime.cudaGraphExecDestroy(executable)
"""
# What lies in the two child graphs: kernels and edges of each.
INSIDE = """
def inside(built):
    from cuda.bindings import runtime
    from launchlab.exam.agent import definition, describe_graph
    graph, found = definition(built), []
    count = runtime.cudaGraphGetNodes(graph, 0)[-1]
    for node in list(runtime.cudaGraphGetNodes(graph, count)[1])[:count]:
        told = describe_graph(runtime.cudaGraphChildGraphNodeGetGraph(node)[1])
        found.append([len(told["kinds"]), told["kinds"].count("Kernel"), len(told["edges"])])
    return found
"""
# A body of one node, and one of many, whose indices go on from node to node: one call of mixed says what it does.
for count in (1, int(secret.integers(150, 250))):
    size, shift, start = int(secret.integers(2000, 9000)), int(secret.integers(3000, 9000)), int(secret.integers(0, 1000))
    lengths = [int(rounds) for rounds in secret.integers(1, 4, count)]
    given = secret.integers(0, 2**32, size, dtype=np.uint32)
    buffer = on_gpu(given)
    body = student.chain_of(buffer, [(start + sum(lengths[:i]), rounds) for i, rounds in enumerate(lengths)])
    twice = student.build_twice(body, shift)
    check.equal(student.define(INSIDE, "inside")(twice), [[count, count, count - 1]] * 2, why="两个子图节点里应当各是一份完整的 body：节点和边都和它一样多。body 只有一个节点，或者有上百个，也是一样。")
    twice.instantiate().run(1)
    for first in (start, start + shift):
        given = reference.mixed(given, sum(lengths), first)
    check.equal(buffer.read(), given, why="body 只有一个节点，或者有上百个节点时，结果不对。节点的个数是从图里读的吗？")
for _ in range(2):
    size, shift = int(secret.integers(2000, 9000)), int(secret.integers(3000, 9000))
    steps = [(int(first), int(secret.integers(1, 9))) for first in secret.permutation(1000)[: secret.integers(3, 9)]]
    given = secret.integers(0, 2**32, size, dtype=np.uint32)
    buffer = on_gpu(given)
    body = student.chain_of(buffer, steps)
    twice = student.build_twice(body, shift)
    check.nodes(twice, children=2, total=2, edges=1, why="换一个 body，父图的结构就不对了。")
    times = int(secret.integers(2, 6))
    twice.instantiate().run(times)
    for _ in range(times):
        for extra in (0, shift):
            for first, rounds in steps:
                given = reference.mixed(given, rounds, first + extra)
    check.equal(buffer.read(), given, why="换了节点个数、序号、轮数和 shift，结果不对。第二份克隆里的每个节点都改了吗？改的是“原来的序号加 shift”，轮数和尺寸照旧吗？")
    student.define(RELAUNCH, "relaunch")(body, student.value("stream"))
    for first, rounds in steps:
        given = reference.mixed(given, rounds, first)
    check.equal(buffer.read(), given, why="body 的定义被改了：重新实例化它，做的不再是原来的序号。请改父图里的克隆，不要改 body.graph。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：最长路径（3 分）
#
# 写 `critical_path(dot, us)`，从驱动写出的 DOT 文本（标志位为 0 的那种）里算出两个数：`(最长路径上有几个节点, 最长路径要多少 µs)`。
# 不需要 GPU。
#
# - `us` 是一个字典，给出每种节点的时间；键是 `label` 的第二行：内核的名字，或者 `MEMCPY`、`MEMSET` 等。图里出现的名字，字典里一定有。
# - 两个数各自取最大：节点最多的路径和时间最长的路径，可以不是同一条。
# - 一条边也不连的节点，自己就是一条路径；一个节点也没有的图，返回 `(0, 0.0)`。
# - 节点的编号只是写出来的次序，**编号小的不一定先执行**；图的编号（`graph_1`）也不一定是 1。
# - 图里可以有上万个节点；路径的条数可能多得数不完，不能一条条列出来。
#
# `SAMPLE` 是一个小例子，`TIMES` 是它的时间：就是练习一的那个菱形，换了一套编号。

# %%
SAMPLE = """digraph dot {
subgraph cluster_1 {
label="graph_1" graph[style="dashed"];
"graph_1_node_0"[style="bold" shape="octagon" label="0
combine
"];

"graph_1_node_1"[style="solid" shape="trapezium"label="1
MEMCPY
(DtoD,16384)
"];

"graph_1_node_2"[style="bold" shape="octagon" label="2
mix
"];

"graph_1_node_3"[style="bold" shape="octagon" label="3
mix
"];

"graph_1_node_4"[style="bold" shape="octagon" label="4
absorb
"];

"graph_1_node_5"[style="solid" shape="invtrapezium"label="5
MEMSET
(0,16384)
"];

"graph_1_node_1" -> "graph_1_node_3";
"graph_1_node_2" -> "graph_1_node_1";
"graph_1_node_2" -> "graph_1_node_4";
"graph_1_node_3" -> "graph_1_node_0";
"graph_1_node_4" -> "graph_1_node_0";
"graph_1_node_5" -> "graph_1_node_4";
}
}
"""
TIMES = {"mix": 4.0, "MEMCPY": 2.0, "MEMSET": 1.5, "absorb": 3.0, "combine": 3.5}

# %% tags=["demo"]
import matplotlib.pyplot as plt

lab.plot_style()
lab.draw_graph(SAMPLE, title="先看图猜一猜：最长路径上有几个节点，要多少 µs？")
plt.show()

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 走到一个节点为止的最长路径，和走到它的那些前驱为止的最长路径，有什么关系？
# 这样一来，每个节点只要算一次，但要按什么次序算？没有前驱的节点又怎么办？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 读文本用 `re.findall(模式, dot)`：模式里的每个括号取出一段。节点行的样子是 `"编号"[… label="数字\n名字\n`，
# 边的样子是 `"编号" -> "编号"`；`\w+` 匹配编号，`.*?` 匹配同一行里尽量短的一段。
#
# 次序用标准库的 `graphlib.TopologicalSorter(前驱).static_order()`：`前驱` 是字典，节点 → 它等的那些节点；
# 它给出的次序里，每个节点都排在它的前驱之后。写成递归的函数，遇到上万个节点的链会超过 Python 的递归深度。
#
# 空的时候取最大：`max(…, default=0)`。
#
# </details>

# %% solution="critical_path"
def critical_path(dot, us):
    """The longest paths of a graph given as DOT text: (most nodes on a path: int, most time on a path: µs).

    dot: as cudaGraphDebugDotPrint writes it with flags 0, of one graph without child graphs.
    us: time of a node in µs, by the second line of its label.
    """
    ### BEGIN SOLUTION: 先从文本里取出节点和边，再想一想：走到一个节点的最长路径，怎样由它的前驱得到
    import re
    from graphlib import TopologicalSorter

    names = dict(re.findall(r'"(\w+)"\[.*?label="\d+\n(.*)\n', dot))
    before = {node: [] for node in names}
    for tail, head in re.findall(r'"(\w+)" -> "(\w+)"', dot):
        before[head].append(tail)
    count, time = {}, {}
    for node in TopologicalSorter(before).static_order():
        count[node] = 1 + max((count[tail] for tail in before[node]), default=0)
        time[node] = us[names[node]] + max((time[tail] for tail in before[node]), default=0.0)
    return max(count.values(), default=0), max(time.values(), default=0.0)
    ### END SOLUTION


# %% test="critical_path" kind="answer" points=3
sample, times_us = reference.value("SAMPLE"), reference.value("TIMES")
check.equal(student.critical_path(sample, times_us), (4, 13.5), why="SAMPLE 的最长路径是 mix → MEMCPY → mix → combine：4 个节点，4 + 2 + 4 + 3.5 = 13.5 µs。")
check.equal(student.critical_path(sample, times_us | {"absorb": 9.0}), (4, 16.5), why="absorb 变成 9 µs 以后，时间最长的是 mix → absorb → combine，16.5 µs；节点最多的仍然是另一条，4 个。两个数要各自取最大。")
check.equal(student.critical_path("digraph dot {\n}\n", {}), (0, 0.0), why="一个节点也没有的图，应当返回 (0, 0.0)。")
nodes = "".join(f'"graph_23_node_{i}"[style="bold" shape="octagon" label="{i}\nmix\n"];\n\n' for i in range(3000))
edges = "".join(f'"graph_23_node_{i}" -> "graph_23_node_{i + 1}";\n' for i in range(2999))
check.equal(student.critical_path("digraph dot {\n" + nodes + edges + "}\n", {"mix": 0.5}), (3000, 1500.0), why="3000 个 mix 连成的链，应当是 3000 个节点、1500 µs。这张图的编号是 23，有没有把 graph_1 写死？")
### BEGIN HIDDEN TESTS
NAMES = ("mix", "absorb", "_Z5scalePfj", "graph_reduce", "MEMCPY", "MEMSET", "HOST", "EMPTY", "EVENT_RECORD")
SHAPES = {"MEMCPY": 'style="solid" shape="trapezium"label=', "MEMSET": 'style="solid" shape="invtrapezium"label=', "HOST": 'style="solid" shape="rectangle" label=', "EMPTY": 'style="solid" shape="rectangle" label=', "EVENT_RECORD": 'style="solid" shape="rectangle" label='}
DETAILS = {"MEMCPY": "(DtoD,16384)\n", "MEMSET": "(0,16384)\n"}


def written(names, edges):
    """DOT text of nodes 0 … n-1 with these names, and edges (tail, head), numbered anew by a secret permutation."""
    graph, number = f"graph_{secret.integers(2, 400)}", secret.permutation(len(names))
    lines = ["digraph dot {", "subgraph cluster_" + graph[6:] + " {", f'label="{graph}" graph[style="dashed"];']
    for new, old in enumerate(np.argsort(number)):
        kind = SHAPES.get(names[old], 'style="bold" shape="octagon" label=')
        lines.append(f'"{graph}_node_{new}"[{kind}"{new}\n{names[old]}\n{DETAILS.get(names[old], "")}"];\n')
    for k in secret.permutation(len(edges)):
        tail, head = edges[k]
        lines.append(f'"{graph}_node_{number[tail]}" -> "{graph}_node_{number[head]}";')
    return "\n".join([*lines, "}", "}", ""])


def longest(names, edges, us):
    """The answer for nodes that stand in an order in which every edge leads forward."""
    count, time = [1] * len(names), [us[name] for name in names]
    for tail, head in sorted(edges):
        count[head] = max(count[head], count[tail] + 1)
        time[head] = max(time[head], time[tail] + us[names[head]])
    return max(count), max(time)


def drawn_names(n):
    return [str(name) for name in secret.choice(NAMES, n)]


def random_graph(n, share):
    """n nodes; each pair has an edge with probability `share`."""
    return drawn_names(n), [(tail, head) for head in range(n) for tail in range(head) if secret.random() < share]


def ladder(steps):
    """Diamonds in a row: 2**steps paths."""
    edges = [(3 * s + a, 3 * s + b) for s in range(steps) for a, b in ((0, 1), (0, 2), (1, 3), (2, 3))]
    return drawn_names(3 * steps + 1), edges


def chain(n):
    return drawn_names(n), [(i, i + 1) for i in range(n - 1)]


check.equal(
    student.critical_path(written(["mix"] * 4 + ["absorb"], [(0, 1), (1, 2), (2, 3)]), {"mix": 1.0, "absorb": 50.0}),
    (4, 50.0),
    why="节点最多的和时间最长的，可以是两条毫不相干的路径，其中一条可以只有一个不连边的节点。两个数有没有各自在所有节点里取最大？",
)
cases = (
    ([(drawn_names(1), []), (drawn_names(7), []), random_graph(12, 0.04)], "有的节点没有边的图里有算错的。孤零零的一个节点也是一条路径，一个节点。"),
    ([random_graph(int(secret.integers(6, 14)), 0.3) for _ in range(8)], "随机的小图里有算错的。节点的编号与先后无关，按编号的次序算会漏掉；时间取的是 label 的第二行吗？"),
    ([random_graph(60, 0.06) for _ in range(3)], "随机的大图里有算错的。每个节点都是在它的前驱之后算的吗？"),
    ([chain(12_000)], "一万多个节点的链算错了。"),
    ([ladder(200)], "一串菱形的图算错了。"),
)
for graphs, why in cases:
    got, want = [], []
    for names, edges in graphs:
        us = {name: float(secret.integers(1, 160)) / 8 for name in NAMES}  # whole eighths: every sum is exact
        got.append(student.critical_path(written(names, edges), us))
        want.append(longest(names, edges, us))
    check.equal(got, want, why=why)
### END HIDDEN TESTS

# %% [markdown]
# 用它量一量“并排能快多少”里的图：一个节点的时间，取一条链的时间除以节点数；最长路径给出的下限，和实测差多少？
# （这一格要先做完练习三。）

# %% tags=["demo", "gpu"]
rows = []
for k, chained, measured in zip(COUNTS, chain_us, lanes_us, strict=True):
    branched = lanes(field[: k * BLOCK], k, True)
    length, bound = critical_path(dot_of(branched.graph), {"mix": chained / (DEPTH * k)})
    rows.append((k, length, f"{bound:.0f}", f"{measured:.0f}"))
lab.say(lab.table(("分支数 k", "最长路径上的节点", "最长路径 µs", "实测并排 µs"), rows))

# %% [markdown]
# 前几行，两列靠得近吗？靠得近，说明图已经快到头了，再拆分支也没有用，只能缩短最长的那条路径。
# 后几行如果拉开了，限制它的就不再是路径：不是派发那么多节点要时间，就是 GPU 的空位用完了。

# %% [markdown]
# ### 练习四：从任务清单到并排的分支（3 分）
#
# 现在把两件事合起来：自己找出依赖，再让不相干的工作并排。
#
# `x` 被分成若干个**切片**，每片 `WIDTH` 个元素，第 `b` 片是 `lane(x, b)`。任务清单 `tasks` 是一个列表，每一项 `(b, first, rounds)`
# 的意思是：在第 `b` 片上做一次 `mix`，序号从 `first` 开始，共 `rounds` 轮。清单的次序就是程序的次序，各片的任务**交错**着出现。
# 给定的 `eager_tasks` 照着清单一个个启动，全在一条流里。
#
# 写 `build_tasks(x, tasks)`，返回 `BuiltGraph`：
#
# - 每个任务一个内核节点（1 个 block），不多也不少；
# - 同一片上的任务，严格按清单里的先后；不同片的任务互不等待；
# - 一条多余的边也没有：已经由别的边保证了先后的，不要再连一遍；
# - 结果和 `eager_tasks` 一样；切片可能有的忙、有的闲，也可能有一片一次也没出现。
#
# 速度按端到端时间算（启动之后做一次全设备同步）：8 片、48 个长度相同的任务，要比 `eager_tasks` 快到 3 倍；只快到 2 倍得一半的分。
# 如果在这台机器上参考实现自己也快得不多，门槛会降到它的加速比的一半。

# %% tags=["gpu"]
WIDTH = BLOCK  # elements of a slice: one block's work


def lane(x, b):
    """Slice b of x."""
    return x[b * WIDTH : (b + 1) * WIDTH]


def eager_tasks(x, tasks):
    """Launch the tasks (b, first, rounds) one by one, in the order of the list, on `stream`. Returns at once."""
    with stream:
        for b, first, rounds in tasks:
            launch_mix(lane(x, b), first, rounds)


# %%
def after_tasks(x, tasks, width=256):
    """What the tasks make of x (numpy uint32); x stays as it is."""
    v = x.copy()
    for b, first, rounds in tasks:
        v[b * width : (b + 1) * width] = mixed(v[b * width : (b + 1) * width], rounds, first)
    return v


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 轮到清单里的某个任务时，它必须等谁？清单里排在它前面的那么多任务，哪些和它动的是同一块内存？
# 那些里面，又有哪些已经由别的边保证了？为了随时答得出来，每一片要记住一样什么东西？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 空图：`cudart.cudaGraphCreate(0)`，用 `lab.check_cuda` 包起来。
#
# `kernel_node(graph, after, mix, 1, 切片, first, rounds, WIDTH)` 返回新节点；`after` 是列表，可以是空的。
#
# 按片记东西用字典；`d.get(键, [])` 在还没有记过的时候给出空列表。
#
# </details>

# %% solution="build_tasks" tags=["gpu"]
def build_tasks(x, tasks):
    """Build a graph of one mix node a task, in which tasks on the same slice keep their order and others are free.

    x: cupy uint32, 1-D, advanced in place by each launch; it stays the caller's. tasks: list of (b, first, rounds).
    Returns a BuiltGraph without an edge more than needed.
    """
    ### BEGIN SOLUTION: 先想一想：轮到一个任务时，清单里排在前面的任务，哪一个是它非等不可、又没有别的边替它保证的
    graph, latest = lab.check_cuda(cudart.cudaGraphCreate(0)), {}
    for b, first, rounds in tasks:
        latest[b] = [kernel_node(graph, latest.get(b, []), mix, 1, lane(x, b), first, rounds, WIDTH)]
    return BuiltGraph(graph, x)
    ### END SOLUTION


# %% test="build_tasks_result" kind="structure" points=1 tags=["gpu"]
given = np.arange(3 * 256, dtype=np.uint32)
buffer = on_gpu(given)
listed = [(0, 0, 2), (2, 1, 3), (0, 2, 4), (0, 3, 1), (2, 4, 5)]
tasked = student.build_tasks(buffer, listed)
check.equal(buffer.read(), given, why="建图的时候 x 就变了。build_tasks 只应当加节点和实例化，不启动。")
check.nodes(tasked, kernels=5, total=5, edges=3, why="5 个任务：第 0 片 3 个，第 2 片 2 个，应当有 2 + 1 = 3 条边。边多了，是不同的片也在互相等；边少了，是同一片的先后没有保证。")
tasked.run(1)
check.equal(buffer.read(), reference.after_tasks(given, listed), why="启动一次的结果不对。切片的位置、序号、轮数对吗？同一片上的任务按清单的先后连起来了吗？")
### BEGIN HIDDEN TESTS
for _ in range(3):
    n_lanes = int(secret.integers(5, 20))
    used = secret.permutation(n_lanes)[: n_lanes - 1]  # one slice is never named
    owners = np.concatenate([used[:3], secret.choice(used, int(secret.integers(20, 60)))])
    listed = [(int(b), int(secret.integers(0, 10**6)), int(secret.integers(1, 40))) for b in owners]
    given = secret.integers(0, 2**32, n_lanes * 256, dtype=np.uint32)
    buffer = on_gpu(given)
    tasked = student.build_tasks(buffer, listed)
    n_edges = len(listed) - len(set(owners.tolist()))
    check.nodes(tasked, kernels=len(listed), total=len(listed), edges=n_edges, why="换一份清单，节点或边的数目就不对了。每一片的第一个任务谁也不等，以后的每个任务正好等一个。")
    times = int(secret.integers(2, 5))
    tasked.instantiate().run(times)
    for _ in range(times):
        given = reference.after_tasks(given, listed)
    check.equal(buffer.read(), given, why="换了清单和数据，结果不对。任务等的是不是自己这一片最近的那个节点？")
### END HIDDEN TESTS

# %% test="build_tasks_speed" kind="speedup" points=2 tags=["gpu"]
owners = secret.permutation(np.repeat(np.arange(8), 6))
listed = [(int(b), i, 2000) for i, b in enumerate(owners)]
given = secret.integers(0, 2**32, 8 * 256, dtype=np.uint32)
buffer, baseline_buffer, best_buffer = on_gpu(given), on_gpu(given), on_gpu(given)
tasked, best_tasked = student.build_tasks(buffer, listed), reference.build_tasks(best_buffer, listed)
check.nodes(tasked, kernels=48, total=48, edges=40, why="8 片各 6 个任务，应当是 48 个节点、40 条边。")
check.speedup(
    tasked,
    over=partial(reference.eager_tasks, baseline_buffer, listed),
    best=best_tasked,
    state=(buffer, best_buffer),
    at_least=3.0,
    why="还不够快。不同片的任务之间有没有路径相连？只要有一条多余的边，并排就会变成排队。",
)
### BEGIN HIDDEN TESTS
given = buffer.write(secret.integers(0, 2**32, 8 * 256, dtype=np.uint32))
tasked.run(1)
check.equal(buffer.read(), reference.after_tasks(given, listed), why="计时以后换一份数据再启动，结果不对：快，但没有做完该做的工作。")
### END HIDDEN TESTS

# %% [markdown] tags=["instructor"]
# 给教师：四道练习都用新数据、未公布的尺寸和次数来验证，状态是 uint32 的搅拌，漏做、多做、换序都会露馅。
# 练习一另外核对每条边连的是哪两个节点、拷贝和 memset 各动多少字节、图走了以后缓冲还了没有，
# 并在启动前向内存池要几块同样大小的缓冲，看图有没有写坏它们。
# 练习二看两个子图里各有几个节点，也用一个节点和上百个节点的 `body`；用重新实例化检查 `body` 的定义没有被改：“先加一次、改 `body`、再加一次”能得到正确的结果，但改了别人的东西。
# 练习三的隐藏 DOT 由程序生成：编号随机、图号随机，有一万多个节点的链（递归会溢出）和一串菱形（路径有 2 的 200 次方条）。
# 练习四把 48 个节点连成一条链也能得到正确的结果，但加速约为 1，得不到分。

# %% [markdown]
# ## 小结
#
# | 以前以为 | 实验以后 |
# |:--|:--|
# | 图只能录出来 | 也可以一个节点一个节点地搭；两种定义是同一种东西，能用子图拼起来 |
# | 先加的节点先执行 | 只有边决定先后；少一条边没有人提醒 |
# | 子图是引用 | 加入时克隆，从此各走各的；要改就改父图里的那一份 |
# | 图会留住它用到的一切 | 参数的值抄走了，地址那一头的缓冲、函数、事件都要你来留 |
# | 主机函数就是普通的 Python 函数 | 驱动的线程在叫它：留住引用，别在里面调用 CUDA，别让等待的人握着 GIL |
# | 运行时 API 什么节点都能读 | 现编译的内核要用驱动 API |
# | 没有依赖的节点可以并行 | 前提是 GPU 有空位；而且再怎么并行，也快不过最长路径 |
#
# **带走三句话**
#
# 1. 节点是工作，边是你的承诺：驱动不分析数据，先后全由你写。
# 2. 谁拥有图，谁就拥有图指向的一切。
# 3. 先算最长路径，再谈并排。
#
# 下一步：《更新一张活的图》不再重新实例化，直接改可执行图里的参数；《多流捕获与图的生命周期》用捕获做出同样的分叉与汇合。
