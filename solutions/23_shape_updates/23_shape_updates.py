# %% [markdown]
# # 形状变化时更新图
#
# 推理服务用上了 CUDA 图（CUDA Graph），快了好几倍。然后请求的形状开始变：这一句 30 个 token，下一句 300 个。
# 三个团队各想了办法：
#
# - 第一个团队读到“优先使用 `cudaGraphExecUpdate`，而不是重新捕获”，于是每个请求都捕获一遍、更新一遍，结果**比不用图还慢**；
# - 第二个团队的更新偶尔被拒绝。返回值没有人看，程序接着重放旧图，用户拿到的是**上一个形状的答案**；
# - 第三个团队每算一步就把一个标志拷回 CPU，好决定还要不要算下一步。GPU 大半时间在等 CPU 点头。
#
# 这一章把形状变了以后的每条路都走一遍、量一遍，画成**一张能照着选的图**；再把“还要不要做、做几遍、做哪一种”的决定权交给 GPU 自己。
#
# **学完以后，你能够**
#
# - 读出两个形状的图究竟差在哪里，事先知道更新会不会被接受；
# - 量出重新捕获、整图更新、改节点参数、每个形状一张图各要多少，按形状变化的快慢来选；
# - 写一条带核对、带回退（fall back）的更新路径，任何时候都不重放旧图；
# - 用条件节点（conditional node）在设备上做 IF、WHILE、SWITCH，不必让 CPU 参与每一步。
#
# **需要的基础**：《更新一张活的图》里的 `cudaGraphExecUpdate`、节点参数和拒绝的原因；《每个形状一张图》里的上下文和缓存。
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
# ## 准备：两种会变形状的工作
#
# **第一种，一串 CuPy 内核（kernel）**，形状就是长度 `length`：
#
# - `mix`：把前 `length` 个 32 位整数各搅拌一次，带一个序号 `i`。漏做、多做、换了次序，结果都不同；
# - `halve`：把后一半折到前一半上，一直折到只剩一个，像一棵归约的树。**长度不同，折的次数可能不同**：`length` 每翻一倍多折一次。
#
# 所有工作都放在同一条流（stream）`stream` 上；`non_blocking=True` 表示它和默认流互不等待。

# %% tags=["gpu"]
import ctypes

import cuda.bindings
import cupy as cp
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

extern "C" __global__ void halve(unsigned int *x, unsigned int half) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < half) x[t] ^= x[t + half] * 0x85ebca6bu;
}
"""
module = cp.RawModule(code=SOURCE)
mix, halve = module.get_function("mix"), module.get_function("halve")

stream = cp.cuda.Stream(non_blocking=True)
BLOCK = 256


def blocks(size):
    """How many blocks cover `size` elements: size / BLOCK rounded up."""
    return -(-size // BLOCK)


def launch_mixes(x, length, n):
    """Launch mix n times (indices 0 … n-1) on the first `length` elements of x (cupy uint32, 1-D), on the current stream."""
    for i in range(n):
        mix((blocks(length),), (BLOCK,), (x, np.uint32(i), np.uint32(length)))


def launch_halving(x, length):
    """Fold the first `length` elements of x (cupy uint32, 1-D) down to one, half by half, on the current stream."""
    half = length // 2
    while half:
        halve((blocks(half),), (BLOCK,), (x, np.uint32(half)))
        half //= 2


# The first launch of a kernel loads its code, which may be refused while a stream is capturing: warm up.
with stream:
    warm = cp.zeros(BLOCK, cp.uint32)
    launch_mixes(warm, BLOCK, 1)
    launch_halving(warm, 2)
stream.synchronize()

# %% [markdown]
# 正确答案用 NumPy 算；`steps_of` 说出一个长度要启动几个内核。

# %%
def mixed(v, n):
    """Return v (numpy uint32) after n rounds of mix with indices 0 … n-1; v stays as it is."""
    v = v.copy()
    for i in range(n):
        v ^= v >> np.uint32(15)
        v *= np.uint32(0x2C1B3C6D)
        v ^= v >> np.uint32(12)
        v += np.uint32(i)
    return v


def served(x, length, n):
    """Return x (numpy uint32) after one request: n mixes of the first `length` elements, then the halving. x stays as it is."""
    x = x.copy()
    x[:length] = mixed(x[:length], n)
    half = length // 2
    while half:
        x[:half] ^= x[half : 2 * half] * np.uint32(0x85EBCA6B)
        half //= 2
    return x


def steps_of(length, n):
    """How many kernels a request of that length launches: n mixes and one halving per power of two."""
    return n + length.bit_length() - 1


# %% [markdown]
# **第二种，一个 TensorRT 引擎**：16 层小网络，批大小（batch size）1 到 64 都行。
# 输入是 −8 到 8 的整数，权重只有 −1、0、1，每层之后用 `fold` 折回 −8 到 7，所以怎么选策略（tactic）、怎么排次序，结果都一位不差。

# %%
HIDDEN, LAYERS, MOST = 128, 16, 64  # width, layers, largest batch


def weights():
    """The engine's weights: float32, shape (LAYERS, HIDDEN, HIDDEN), values -1, 0, 1."""
    return np.random.default_rng(23).integers(-1, 2, (LAYERS, HIDDEN, HIDDEN)).astype(np.float32)


def fold(t):
    """Bring integers (any float dtype) back to -8 … 7."""
    return t - 16 * np.floor(t / 16) - 8


def expected(x):
    """What the engine makes of x (numpy float32 integers in -8 … 8, shape (batch, HIDDEN)): float32, the same shape."""
    t = x.astype(np.float64)
    for w in weights():
        t = fold(np.maximum(t @ w, 0))
    return t.astype(np.float32)


# %% tags=["gpu"]
from functools import cache

import tensorrt as trt

loader = trt.Runtime(lab.trt_logger())


def must(ok, what):
    """Raise RuntimeError, with what TensorRT reported, if ok is False or None, its ways of refusing; else return ok."""
    if ok is False or ok is None:
        raise RuntimeError(f"{what}没有成功：" + ("；".join(lab.trt_errors()) or "TensorRT 没有说原因"))
    return ok


@cache
def make_plan():
    """Build the network for batches 1 … MOST. Returns the plan (bytes). The first use of the builder takes some seconds."""
    builder = trt.Builder(lab.trt_logger())
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    kept = []  # TensorRT does not copy weights: they must live until the build is done

    def constant(array):
        kept.append(np.ascontiguousarray(array, np.float32))
        return network.add_constant(kept[-1].shape, trt.Weights(kept[-1])).get_output(0)

    def element(a, b, operation):
        return network.add_elementwise(a, b, operation).get_output(0)

    t = network.add_input("x", trt.DataType.FLOAT, (-1, HIDDEN))
    none = trt.MatrixOperation.NONE
    for w in weights():
        t = network.add_matrix_multiply(t, none, constant(w), none).get_output(0)
        t = network.add_activation(t, trt.ActivationType.RELU).get_output(0)
        sixteen, eight = constant(np.full((1, 1), 16)), constant(np.full((1, 1), 8))
        whole = element(element(t, sixteen, trt.ElementWiseOperation.FLOOR_DIV), sixteen, trt.ElementWiseOperation.PROD)
        t = element(element(t, whole, trt.ElementWiseOperation.SUB), eight, trt.ElementWiseOperation.SUB)
    t.name = "y"
    network.mark_output(t)
    config = builder.create_builder_config()
    config.builder_optimization_level = 1  # quick to build; the best tactic is no subject here
    config.progress_monitor = lab.build_progress()
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, HIDDEN), (8, HIDDEN), (MOST, HIDDEN))
    config.add_optimization_profile(profile)
    with lab.timing_cache(config):
        plan = must(builder.build_serialized_network(network, config), "构建")
    return bytes(plan)


# %% [markdown]
# 两种工作包成一个样子，后面的每种办法就可以不管里面是什么：
#
# - `prepare(shape)`：把形状设好，**不做**这个请求。不接受这个形状就返回 `False`；
# - `launch()`：把工作交给 `stream`，立刻返回。不肯做就返回 `False`；`True` 才算交上去了。
#
# 引擎的 `prepare` 多做一件事：换了形状以后，先在捕获之外入队（enqueue）一次，结果写进没人要的 `spare`。
# 执行上下文（execution context）换形状后的第一次入队要做些准备，捕获里不一定许可。`warm=False` 省去这一次，给不捕获的做法用。

# %% tags=["gpu"]
class ChainWork:
    """A request of n mixes and the halving on the first `shape` elements of x (cupy uint32, 1-D), in place."""

    def __init__(self, x, n):
        self.x, self.n, self.length = x, n, None

    def prepare(self, shape, warm=True):
        """Take `shape` (elements) for the launches to come. False, and nothing changed, unless 1 <= shape <= x.size."""
        if not 1 <= shape <= self.x.size:
            return False
        self.length = shape
        return True

    def launch(self):
        """Launch one request on `stream`. Returns True."""
        with stream:
            launch_mixes(self.x, self.length, self.n)
            launch_halving(self.x, self.length)
        return True


class EngineWork:
    """A request of the engine on the first `shape` rows of x; the answers go to the first rows of y. One context.

    plan: bytes. x, y: cupy float32, contiguous, shape (MOST, HIDDEN).
    """

    def __init__(self, plan, x, y):
        self.x, self.y, self.spare = x, y, cp.empty_like(y)
        self.engine = must(loader.deserialize_cuda_engine(plan), "载入计划文件")
        self.context = must(self.engine.create_execution_context(), "创建执行上下文")
        must(self.context.set_tensor_address("x", x.data.ptr), "设 x 的地址")
        self.ready = None  # the shape that has been enqueued at least once since it was set

    def prepare(self, shape, warm=True):
        """Set the batch; if it has changed and `warm`, enqueue once into a spare buffer. False if TensorRT refuses."""
        if not self.context.set_input_shape("x", (shape, HIDDEN)):
            return False
        if warm and shape != self.ready:
            self.ready = None
            if not (self.context.set_tensor_address("y", self.spare.data.ptr) and self.context.execute_async_v3(stream.ptr)):
                return False
            self.ready = shape
        elif shape != self.ready:
            self.ready = None
        return self.context.set_tensor_address("y", self.y.data.ptr)

    def launch(self):
        """Enqueue one request on `stream`. Returns TensorRT's answer, a bool."""
        return self.context.execute_async_v3(stream.ptr)


# %% [markdown]
# 最后是和图打交道的几个函数。`record` 只捕获、不实例化（instantiate），而且**把三个答复原样交出来**，由你决定怎么办；
# `try_update` 直接问驱动，所以说得出拒绝的原因，它在《更新一张活的图》里解释过。

# %% tags=["gpu"]
THREAD_LOCAL = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal


def record(launch):
    """Capture launch() on `stream`. Returns (answer, error, graph).

    answer: what launch() returned. error: the CUDA error code of ending the capture, 0 if all is well.
    graph: the definition (cudaGraph_t, the caller destroys it), None with an error. An exception of launch() passes on,
    after the capture has been ended.
    """
    lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, THREAD_LOCAL))
    answer = None
    try:
        answer = launch()
    finally:
        error, graph = cudart.cudaStreamEndCapture(stream.ptr)
    return answer, int(error), None if int(error) else graph


def nodes_of(graph):
    """All nodes of a definition (cudaGraph_t), in the order in which they were recorded."""
    _, count = lab.check_cuda(cudart.cudaGraphGetNodes(graph, 0))
    return lab.check_cuda(cudart.cudaGraphGetNodes(graph, count))[0] if count else []


def instantiate(graph):
    """Make an executable graph (cudaGraphExec_t) of a definition."""
    return lab.check_cuda(cudart.cudaGraphInstantiate(graph, 0))


def replay(graph_exec):
    """Launch an executable graph on `stream`; does not wait."""
    lab.check_cuda(cudart.cudaGraphLaunch(graph_exec, stream.ptr))


class UpdateInfo(ctypes.Structure):
    """CUgraphExecUpdateResultInfo: why an update was refused, and at which node of the new definition."""

    _fields_ = [("result", ctypes.c_int), ("error_node", ctypes.c_void_p), ("error_from_node", ctypes.c_void_p)]


update_address, _ = lab.check_cuda(driver.cuGetProcAddress(b"cuGraphExecUpdate", 12000, 0))
exec_update = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(UpdateInfo))(update_address)


def try_update(graph_exec, graph):
    """Ask the driver to update an executable graph by a definition. Returns (error, reason); never raises for a CUDA error.

    error: 0, 910 for a refusal, or any other CUDA error code. reason: the cudaGraphExecUpdateResult without its prefix
    "cudaGraphExecUpdate", such as "ErrorTopologyChanged"; it means something with the errors 0 and 910 only.
    """
    info = UpdateInfo(result=cudart.cudaGraphExecUpdateResult.cudaGraphExecUpdateError.value)
    error = exec_update(int(graph_exec), int(graph), ctypes.byref(info))
    return error, cudart.cudaGraphExecUpdateResult(info.result).name.removeprefix("cudaGraphExecUpdate")


# %% [markdown]
# ## 形状变了，图里变的是什么
#
# 同一份工作，两个形状，各录一张定义。把节点一个一个对着看：种类、函数、网格、参数，哪些变了？
#
# 内核节点的参数用驱动 API `cuGraphKernelNodeGetParams` 读。先看内核链，长度 2100、3900 和 5000。猜一猜：每一对里，函数不同的、网格不同的节点各有几个？

# %% tags=["demo", "gpu"]
def described(node):
    """What stands in a node: (kind, function, grid); the last two None for what is no readable kernel."""
    kind = lab.check_cuda(cudart.cudaGraphNodeGetType(node)).name.removeprefix("cudaGraphNodeType")
    if kind != "Kernel":
        return kind, None, None
    error, params = driver.cuGraphKernelNodeGetParams(node)
    if int(error):
        return kind, None, None
    return kind, int(params.func) or int(params.kern), (params.gridDimX, params.gridDimY, params.gridDimZ)


def compared(a, b):
    """Compare two definitions. Returns (nodes of a, nodes of b, other functions, other grids), pairs in recorded order."""
    first, second = [described(node) for node in nodes_of(a)], [described(node) for node in nodes_of(b)]
    pairs = list(zip(first, second, strict=False))
    return len(first), len(second), sum(p[:2] != q[:2] for p, q in pairs), sum(p[2] != q[2] for p, q in pairs)


def defined(work, shape):
    """The definition of a request of that shape; RuntimeError if it cannot be captured."""
    must(work.prepare(shape), f"准备形状 {shape}")
    answer, error, graph = record(work.launch)
    if not answer or error:
        raise RuntimeError(f"形状 {shape} 没有录成：答复 {answer}，错误码 {error}")
    return graph


def asked(a, b):
    """The driver's answer to updating an executable of definition a by definition b."""
    live = instantiate(a)
    error, reason = try_update(live, b)
    lab.check_cuda(cudart.cudaGraphExecDestroy(live))
    return "接受" if error == 0 else reason if error == 910 else f"错误码 {error}"


N = 139
with stream:
    xs = cp.arange(1 << 14, dtype=cp.uint32)
stream.synchronize()
chain = ChainWork(xs, N)
lengths = (2100, 3900, 5000)
drawn = {length: defined(chain, length) for length in lengths}
rows = []
for a, b in ((2100, 3900), (2100, 5000)):
    nodes_a, nodes_b, functions, grids = compared(drawn[a], drawn[b])
    rows.append((f"{a} → {b}", f"{nodes_a} → {nodes_b}", functions, grids, f"`{asked(drawn[a], drawn[b])}`"))
lab.say(lab.table(("长度", "节点数", "函数不同", "网格不同", "更新的回答"), rows))
for graph in drawn.values():
    lab.check_cuda(cudart.cudaGraphDestroy(graph))

# %% [markdown]
# 2100 和 3900 都要折 11 次，骨架相同：网格和 `size` 变了，函数一个没变。
# 5000 要折 12 次，多出一个节点，骨架就变了，驱动只能拒绝。**形状变化会不会被接受，看的是它改没改骨架**，与变化的大小无关。
#
# 引擎呢？引擎里的内核不是我们启动的，要问 TensorRT。把几种批大小两两配对，行是实例化时的批大小，列是拿来更新的：

# %% tags=["demo", "gpu"]
import matplotlib.pyplot as plt

lab.plot_style()

plan = make_plan()
rng = np.random.default_rng(5)
with stream:
    rows_in = cp.asarray(rng.integers(-8, 9, (MOST, HIDDEN)).astype(np.float32))
    rows_out = cp.zeros((MOST, HIDDEN), cp.float32)
stream.synchronize()
network = EngineWork(plan, rows_in, rows_out)
batches = [1, 2, 4, 8, 16, 32, 64]
library = {batch: defined(network, batch) for batch in batches}

answers = [[asked(library[a], library[b]) for b in batches] for a in batches]
fig, ax = plt.subplots(figsize=(5.2, 4.2))
ax.imshow([[answer == "接受" for answer in row] for row in answers], cmap="cividis", vmin=-0.6, vmax=1.2)
for row, column in np.ndindex(len(batches), len(batches)):
    taken = answers[row][column] == "接受"
    ax.text(column, row, "接受" if taken else "拒绝", ha="center", va="center", fontsize=8, color="black" if taken else "white")
ax.set_xticks(range(len(batches)), batches)
ax.set_yticks(range(len(batches)), batches)
ax.set_xlabel("更新成的批大小")
ax.set_ylabel("实例化时的批大小")
ax.set_title(f"驱动的回答（{lab.gpu_name()}）")
ax.grid(visible=False)
plt.show()

rows = []
for batch in batches[1:]:
    nodes_a, nodes_b, functions, grids = compared(library[1], library[batch])
    rows.append((f"1 → {batch}", f"{nodes_a} → {nodes_b}", functions, grids, f"`{asked(library[1], library[batch])}`"))
lab.say(lab.table(("批大小", "节点数", "函数不同", "网格不同", "更新的回答"), rows))
accepted = sum(answer == "接受" for row in answers for answer in row)
lab.say(f"{len(batches) ** 2} 种配对里，驱动接受了 **{accepted}** 种。" + ("对这个引擎，更新一路畅通。" if accepted == len(batches) ** 2 else "同一个引擎，有的形状之间也更新不过去。"))

# %% [markdown]
# 引擎在不同的形状上可以换函数、换网格，有的引擎连节点的个数也换：同一个 Profile 里，小批量和大批量走的路可能不一样。
# 换函数多半不要紧（少数换法驱动也拒绝，原因是 `ErrorUnsupportedFunctionChange`）；换了节点的个数或种类，一定被拒绝。**哪一对行、哪一对不行，只有问驱动，而且换一块 GPU、换一个版本都要重新问。**
#
# 上面还有一个不起眼的发现：更新用的定义可以**事先录好、反复使用**。`library` 里的每份定义都被拿去更新了很多次。
# 这就引出一条《更新一张活的图》里没有走过的路。

# %% [markdown]
# ## 六条路
#
# | 办法 | 换形状时做什么 | 事先要有什么 |
# |:--|:--|:--|
# | 逐个启动 | 什么都不用做 | 没有 |
# | 重建 | 捕获，实例化，销毁旧的 | 没有 |
# | 捕获 + 更新 | 捕获，整图更新 | 一张可执行图 |
# | **定义库 + 更新** | 只做整图更新 | 每个形状一份**定义**，一张可执行图 |
# | 定义库 + 节点参数 | 逐个节点改参数，从定义里照抄 | 同上 |
# | 每个形状一张图 | 什么都不做，换一张启动 | 每个形状一张**可执行图** |
#
# 讲义的建议“优先 `cudaGraphExecUpdate`，而不是重新捕获”，说的通常是第三行。可第三行照样要捕获，
# 省下的只是实例化；**真正不用重新捕获的是第四行**。两者差多少，量了才知道。
#
# 六种办法写成同一个样子，`serve(shape)` 做一个请求，不等待。“节点参数”那一种只在各个形状用**同样的函数**时才走得通：
# 从一份定义里读出的参数，原样写给可执行图里同一个位置的节点；函数要是不同，参数表和别的属性也可能不同，抄过去就不安全了。

# %% tags=["demo", "gpu"]
class Eager:
    """Launch one by one."""

    def __init__(self, work, shapes):
        self.work = work

    def serve(self, shape):
        must(self.work.prepare(shape, warm=False), "准备")
        must(self.work.launch(), "启动")

    def close(self):
        stream.synchronize()


class Rebuild:
    """Capture and instantiate anew whenever the shape changes."""

    def __init__(self, work, shapes):
        self.work, self.shape, self.live = work, None, None

    def change(self, shape):
        graph, old = defined(self.work, shape), self.live
        self.live = instantiate(graph)
        lab.check_cuda(cudart.cudaGraphDestroy(graph))
        if old is not None:
            lab.check_cuda(cudart.cudaGraphExecDestroy(old))

    def serve(self, shape):
        if shape != self.shape:
            self.change(shape)
            self.shape = shape
        replay(self.live)

    def close(self):
        stream.synchronize()
        if self.live is not None:
            lab.check_cuda(cudart.cudaGraphExecDestroy(self.live))


class Recapture(Rebuild):
    """Capture anew and update; rebuild if refused."""

    def change(self, shape):
        if self.live is None:
            return super().change(shape)
        graph = defined(self.work, shape)
        if try_update(self.live, graph)[0]:
            lab.check_cuda(cudart.cudaGraphExecDestroy(self.live))
            self.live = instantiate(graph)
        lab.check_cuda(cudart.cudaGraphDestroy(graph))


class Library(Rebuild):
    """Definitions are captured once; the one executable is updated from them, or rebuilt if refused."""

    def __init__(self, work, shapes):
        super().__init__(work, shapes)
        self.definitions = {shape: defined(work, shape) for shape in shapes}
        self.shape = shapes[0]
        self.live = instantiate(self.definitions[self.shape])

    def change(self, shape):
        if try_update(self.live, self.definitions[shape])[0]:
            lab.check_cuda(cudart.cudaGraphExecDestroy(self.live))
            self.live = instantiate(self.definitions[shape])

    def close(self):
        super().close()
        for graph in self.definitions.values():
            lab.check_cuda(cudart.cudaGraphDestroy(graph))


class Parameters(Library):
    """The same, but node by node: the parameters come ready from the other shape's definition."""

    def __init__(self, work, shapes):
        super().__init__(work, shapes)
        self.nodes = nodes_of(self.definitions[shapes[0]])
        self.params = {shape: [lab.check_cuda(driver.cuGraphKernelNodeGetParams(node)) for node in nodes_of(graph)] for shape, graph in self.definitions.items()}
        functions = {tuple((int(each.func), int(each.kern)) for each in params) for params in self.params.values()}
        if len(functions) > 1:  # another function may want other arguments and attributes: not by parameters alone
            raise RuntimeError("各个形状的节点数或函数不同，只抄参数不够")

    def change(self, shape):
        for node, params in zip(self.nodes, self.params[shape], strict=True):
            lab.check_cuda(driver.cuGraphExecKernelNodeSetParams(self.live, node, params))


class PerShape(Library):
    """One executable graph per shape."""

    def __init__(self, work, shapes):
        super().__init__(work, shapes)
        self.execs = {shape: self.live if shape == self.shape else instantiate(graph) for shape, graph in self.definitions.items()}

    def serve(self, shape):
        replay(self.execs[shape])

    def close(self):
        super().close()
        for shape, each in self.execs.items():
            if shape != self.shape:
                lab.check_cuda(cudart.cudaGraphExecDestroy(each))


WAYS = {"逐个启动": Eager, "重建": Rebuild, "捕获 + 更新": Recapture, "定义库 + 更新": Library, "定义库 + 节点参数": Parameters, "每个形状一张图": PerShape}

# %% [markdown]
# ### 先验对错
#
# 快不快之前，先看对不对。三种长度、七种批大小，次序打乱，每种办法各服务一串请求，逐个和 NumPy 比。
# 引擎这里还多问一句：**一份定义录好以后，它的上下文又去了别的形状，这份定义还算得对吗？**
# （`Library` 和 `PerShape` 里的定义都是从同一个上下文录来的，录完以后上下文停在最后一个形状上。）

# %% tags=["demo", "gpu"]
def all_right(way, work, shapes, serve_and_check):
    """Serve 12 requests in a shuffled order; how many came out right, or why the way cannot be taken."""
    order = np.random.default_rng(8).permutation(np.resize(shapes, 12))
    try:
        made = way(work, shapes)
        right = sum(serve_and_check(made, int(shape)) for shape in order)
        made.close()
    except (RuntimeError, lab.CudaError) as error:
        return f"走不通：{str(error)[:80]}"
    return f"{right} / {len(order)}"


def chain_request(made, shape):
    before = xs.get()
    made.serve(shape)
    stream.synchronize()
    return bool(np.array_equal(xs.get(), served(before, shape, N)))


def engine_request(made, batch):
    data = rng.integers(-8, 9, (MOST, HIDDEN)).astype(np.float32)
    with stream:
        rows_in.set(data)
        rows_out.fill(-99)
    made.serve(batch)
    stream.synchronize()
    got = rows_out.get()
    return bool(np.array_equal(got[:batch], expected(data[:batch])) and (got[batch:] == -99).all())


rows = []
for name, way in WAYS.items():
    rows.append((name, all_right(way, chain, [2100, 3900, 2600], chain_request), all_right(way, network, batches, engine_request)))
lab.say(lab.table(("办法", "内核链", "引擎"), rows))
kept = rows[-1][2]
lab.say(
    "从同一个上下文录来的各个形状的图，在上下文换了形状以后"
    + ("**照样算对**：这个引擎要的一切都写在节点里了。" if kept == "12 / 12" else f"**不是都对**（{kept}）：图用着上下文里会变的东西。")
)

# %% [markdown]
# 别把“这个引擎照样算对”当成通则。别的引擎可能在上下文的显存里放着随形状而变的表，换了形状就改写。
# 《每个形状一张图》的规矩仍然是最稳的：**要留着重放的图，给它一个自己的上下文**；非要共用，就像上面这样逐个形状验过再用。
# 下面量快慢时，各个形状的图都出自同一个上下文；一张图一个上下文的话，重放做的事一样，准备一个形状还要加上创建上下文的时间和它的显存。

# %% [markdown]
# ### 再量快慢
#
# 只量“换一次形状”不够：GPU 忙着的时候，CPU 换形状的时间可能被盖住，也可能盖不住。所以直接量真实的请求流：
# 每个形状连着来 $k$ 个请求再换下一个，一口气提交，最后同步，算平均每个请求的时间。$k=1$ 就是个个都换。

# %% tags=["demo", "gpu"]
from time import perf_counter_ns

CHAIN_SHAPES, ENGINE_SHAPES = [2100, 2600, 3100, 3900], [4, 8, 12, 16]
RUNS = (1, 8, 64)


def stream_us(made, shapes, k):
    """µs per request, end to end, of a stream that keeps each shape for k requests: the median of three passes, after one more."""
    keys = [shapes[i // k % len(shapes)] for i in range(max(16, 2 * k))]
    taken = []
    for _ in range(4):
        stream.synchronize()
        began = perf_counter_ns()
        for shape in keys:
            made.serve(shape)
        stream.synchronize()
        taken.append((perf_counter_ns() - began) / 1000 / len(keys))
    return float(np.median(taken[1:]))


def measured(work, shapes, serve_and_check):
    """{way: {"build": µs per shape, "at": {k: µs per request}}} for all ways that serve these shapes right."""
    found = {}
    for name, way in WAYS.items():
        if all_right(way, work, shapes, serve_and_check) != "12 / 12":  # warms up, too
            continue
        began = perf_counter_ns()
        made = way(work, shapes)
        build = (perf_counter_ns() - began) / 1000 / len(shapes)
        found[name] = {"build": build, "at": {k: stream_us(made, shapes, k) for k in RUNS}}
        made.close()
    return found


flow = {
    "内核链": measured(chain, CHAIN_SHAPES, chain_request),
    "引擎": measured(network, ENGINE_SHAPES, engine_request),
}
for what, found in flow.items():
    lab.say(
        lab.table(
            (f"{what}，每个请求 µs", *(f"每 {k} 个请求换一次" for k in RUNS), "事先准备一个形状"),
            [(name, *(f"{us:.0f}" for us in each["at"].values()), f"{each['build']:.0f}" if issubclass(WAYS[name], Library) else "—") for name, each in found.items()],
        )
    )

# %% [markdown]
# 看“逐个启动”那一行。内核链逐个启动，换形状什么都不用做，三列本该差不多；差得多，那是起伏：CPU 启动内核的快慢一阵一阵地变。
# 引擎不同：执行上下文换了形状，下一次入队要多做些准备，所以换得越勤越慢。
#
# 两个端点就能画出整条线：一个请求的代价 = 只重放的代价 + 换一次的代价 ÷ $k$。用 $k=1$ 和 $k=64$ 定出两个数，中间的 $k=8$ 用来检验这个模型。
#
# 还有一个问题曲线上看不出来：定义库和“每个形状一张图”，**遇到没见过的形状**要先花钱准备。设平均每 $R$ 个请求冒出一个新形状，这笔钱摊到每个请求就是“准备 ÷ $R$”。
# 下半张图把两个频率都摆出来，每一格涂上最便宜的办法（相差不到 5% 的，取占资源少的，也就是表里靠前的）：
# **横着找你的 $k$，竖着找你的 $R$，那一块上的号码就是答案**：它是“六条路”那张表里的第几行，图例里也写着。如果只容得下一张可执行图，“每个形状一张图”的地方就改用“定义库 + 更新”。

# %% tags=["demo", "gpu"]
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

COLORS = {name: f"C{number}" for number, name in enumerate(WAYS)}
DASHES = dict(zip(WAYS, ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)), ":", (0, (8, 2))), strict=True))
NUMBERS = {name: number for number, name in enumerate(WAYS, 1)}


def model(each):
    """(µs of a replay, µs of a change of shape, µs of preparing a new one) of a measured way."""
    first, last = RUNS[0], RUNS[-1]
    change = max(0.0, (each["at"][first] - each["at"][last]) / (1 / first - 1 / last))
    return max(each["at"][last] - change / last, 0.1), change


def cost(found, name, k, r):
    """µs per request, if a shape lasts k requests and every r-th brings a new one (arrays)."""
    base, change = model(found[name])
    build = found[name]["build"] if issubclass(WAYS[name], Library) else 0.0
    return base + change / k + build / r


fig, axes = plt.subplots(2, 2, figsize=(10.5, 8), height_ratios=(1.15, 1))
ks = np.geomspace(1, 1000, 60)
for ax, below, (what, found) in zip(*axes, flow.items(), strict=True):
    for name, each in found.items():
        ax.loglog(ks, cost(found, name, ks, np.inf), linestyle=DASHES[name], marker="", color=COLORS[name], label=name)
        ax.loglog(RUNS, list(each["at"].values()), "o", linestyle="", color=COLORS[name])
    ax.set_title(f"{what}（{lab.gpu_name()}）")
    ax.set_xlabel("一个形状保持几个请求 k")
    ax.set_ylabel("每个请求（µs）")
    rs = np.geomspace(1, 10_000, 60)
    grid_k, grid_r = np.meshgrid(ks, rs)
    every = np.array([cost(found, name, grid_k, grid_r) for name in found])
    good = (every <= 1.05 * every.min(axis=0)).argmax(axis=0)  # the first, of fewest resources, within 5 % of the cheapest
    best = np.where(grid_r >= grid_k * 0.999, good, -1)  # a new shape is a change, too
    below.pcolormesh(grid_k, grid_r, np.ma.masked_less(best, 0), cmap=ListedColormap([COLORS[name] for name in found]), vmin=-0.5, vmax=len(found) - 0.5)
    below.set_xscale("log")
    below.set_yscale("log")
    below.set_xlabel("一个形状保持几个请求 k")
    below.set_ylabel("几个请求冒出一个新形状 R")
    below.set_title("该选哪一种")
    for i in np.unique(best[best >= 0]):
        inside = np.argwhere(best == i)
        row, column = inside[((inside - np.median(inside, axis=0)) ** 2).sum(axis=1).argmin()]  # well within its region
        below.text(ks[column], rs[row], f"{NUMBERS[list(found)[i]]}", ha="center", va="center", fontsize=13, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})
    below.legend(handles=[Patch(color=COLORS[name], label=f"{NUMBERS[name]} {name}") for i, name in enumerate(found) if (best == i).any()], loc="lower right")
axes[0, 0].legend(handlelength=3.5)
plt.show()
off = {f"{what}，{name}": cost(found, name, RUNS[1], np.inf) / each["at"][RUNS[1]] - 1 for what, found in flow.items() for name, each in found.items()}
worst = max(off, key=lambda name: abs(off[name]))
lab.say(
    f"检验：$k={RUNS[1]}$ 时，模型和实测差得最多的是“{worst}”，差 {off[worst]:+.0%}。"
    "正数是模型算贵了：换形状的时间有一部分被 GPU 手上的活盖住了。所以曲线和分界线都只是约数，$k$ 超过 64 的一段尤其如此。"
)

# %% [markdown]
# （右下角空着，因为 $R$ 不会小于 $k$：新形状也是一次变化。右边要是涂成了“重建”，不是说它更快：
# 形状很久才换一次，几种图的代价相差不到 5%，取的是占资源最少的。）
#
# 现在可以诚实地检验讲义那句话了：

# %% tags=["demo", "gpu"]
def crossing(found, name, other="逐个启动"):
    """From how many requests per shape on `name` is cheaper than `other`: text."""
    (base, change), (base_other, change_other) = model(found[name]), model(found[other])
    if base + change <= base_other + change_other:
        return "个个都换形状也合算"
    if base >= base_other:
        return "多久换一次都不合算"
    return f"一个形状平均保持 **{(change - change_other) / (base_other - base):.1f}** 个请求以上才合算"


for what, found in flow.items():
    at_once = {name: each["at"][1] for name, each in found.items()}
    saved = at_once["重建"] / at_once["捕获 + 更新"]
    lines = [
        f"**{what}，个个请求都换形状**：重建 {at_once['重建']:.0f} µs，捕获 + 更新 {at_once['捕获 + 更新']:.0f} µs（重建是它的 {saved:.1f} 倍），"
        f"逐个启动 {at_once['逐个启动']:.0f} µs。",
    ]
    for name in ("捕获 + 更新", "定义库 + 更新", "每个形状一张图"):
        if name in found:
            lines.append(f"- {name}，和逐个启动比：{crossing(found, name)}；")
    lab.say("\n".join(lines).rstrip("；") + "。")

# %% [markdown]
# 怎么读：
#
# - **“捕获 + 更新”对“重建”**：更新省的是实例化和销毁，捕获的钱照付。省下的占多大的份量，就是上面那个倍数。
#   倍数贴着 1，甚至不到 1，说明捕获占了大头，省下的那一点还不及测量的起伏。
# - **“捕获 + 更新”对“逐个启动”**：捕获一次，CPU 要跑的代码和逐个启动一样多，只是每次启动改成记一笔，多半便宜一些。
#   引擎还要先热身，等于入队两次，第一个团队吃的就是这个亏。一个形状连着用上几次，捕获的钱才摊得薄。到底几次，上面替你算好了。
# - “**定义库 + 更新**”才是 `cudaGraphExecUpdate` 真正划算的用法：不捕获，只更新。代价是每个见过的形状留一份定义。
# - “**定义库 + 节点参数**”要一个节点一个节点地改，节点越多越不划算；只有一两个节点变的时候，它最便宜（《更新一张活的图》里就是那样）。
#   内核链的形状一变，几乎每个节点的网格都变；引擎要看是哪两个形状，而且函数一变，这条路就走不通，所以引擎的表里可能没有这一行。
# - “**每个形状一张图**”换形状不花钱，每张图却要占着资源。占多少？下一格。
#
# 所以那句话应当改成：**优先更新，但别为了更新而重新捕获。** 定义留得住就留着；留不住、形状又变得快，先和逐个启动比一比。

# %% tags=["demo", "gpu"]
def free_bytes():
    stream.synchronize()
    return lab.check_cuda(cudart.cudaMemGetInfo())[0]


COUNT = 40
rows = []
for what, work, shape in (("内核链", chain, 3900), ("引擎", network, 16)):
    before = free_bytes()
    graphs = [defined(work, shape) for _ in range(COUNT)]
    between = free_bytes()
    execs = [instantiate(graph) for graph in graphs]
    for each in execs:
        lab.check_cuda(cudart.cudaGraphUpload(each, stream.ptr))
    after = free_bytes()
    nodes = len(nodes_of(graphs[0]))
    rows.append((what, nodes, f"{(before - between) / COUNT / 1024:.0f}", f"{(between - after) / COUNT / 1024:.0f}"))
    for each in execs:
        lab.check_cuda(cudart.cudaGraphExecDestroy(each))
    for graph in graphs:
        lab.check_cuda(cudart.cudaGraphDestroy(graph))
lab.say(
    lab.table(("工作", "节点数", "一份定义占显存 KiB", "一张可执行图占显存 KiB"), rows)
    + f"\n\n（各造 {COUNT} 份，看 `cudaMemGetInfo` 少了多少，取平均。驱动按大块要显存，别的程序也在用同一块 GPU，所以只是约数。"
    + "读到 0 不等于不占：这么多份合起来还不到驱动向 GPU 要的一大块，或者住在主机内存里（定义多半如此），这样量不出来。）"
)

# %% [markdown]
# ## 误区：更新成功，图就是对的
#
# 更新只做一件事：让可执行图变得和**你给的那份定义**一样。那份定义录得对不对，驱动不知道，也不负责。
#
# 用引擎做一次。批大小 16 正在服务，来了一个批大小 100 的请求，超出 Profile。下面的程序漏看了一个返回值：

# %% tags=["demo", "gpu"]
must(network.prepare(16), "准备批大小 16")
_, _, graph = record(network.launch)
live = instantiate(graph)

taken = network.prepare(100)  # its answer is what the program forgets to look at
answer, error, new = record(network.launch)
refused, reason = try_update(live, new) if new is not None else (None, "没有定义可用")
shape = tuple(network.context.get_tensor_shape("x"))
lab.trt_errors()
lab.say(
    lab.table(
        ("一步", "答复"),
        [
            ("`set_input_shape`，批大小 100", f"**{taken}**"),
            ("捕获里的 `execute_async_v3`", answer),
            ("结束捕获的错误码", error),
            ("整图更新", f"`{reason}`" if refused in (0, 910, None) else f"错误码 {refused}"),
            ("这张图做的是", f"批大小 {shape[0]}"),
        ],
    )
)
lab.say(
    "后面的每一步都成功了，更新也成功了，而图做的还是**上一个形状**。唯一说了实话的是第一行的 `False`。"
    if not taken and answer and not error and refused == 0
    else "这个版本在后面的某一步拦住了它。不能指望每次都有人拦：第一行的 `False` 就应当让程序停下。"
)
lab.check_cuda(cudart.cudaGraphExecDestroy(live))
for each in (graph, new):
    if each is not None:
        lab.check_cuda(cudart.cudaGraphDestroy(each))

# %% [markdown]
# 第二个团队的事故是它的孪生：更新返回 910，没有人看，接着重放。两种事故合起来，一条能上线的更新路径要核对**五件事**，少一件都可能重放旧图：
#
# 1. 形状被接受了（`prepare` 的答复）；
# 2. 捕获里的工作说它交上去了（`launch` 的答复）；
# 3. 捕获正常结束（错误码 0）；
# 4. 定义里真的有节点：工作要是跑到别的流上去了，录到的是一张空图，重放它什么都不做，也不报错；
# 5. 更新的错误码：0 是改好了，910 是改不动、应当重建，别的是真的出了错。
#
# 第一件不成，拒绝这个请求；第二到第四件不成，退回逐个启动；无论哪一种，都不许碰可执行图。
# **旧图只属于旧形状**，记着它的形状，别让它替别人服务。练习一就写这个。

# %% [markdown]
# ## 让 GPU 自己决定
#
# 到这里，换形状都是 CPU 说了算：它知道形状，选图，启动。可有些决定只有 GPU 知道：迭代收敛了没有，这一步要不要做，前面那个内核数出来几个目标。
# 把答案拷回 CPU 再决定，一来一回，GPU 干等着。
#
# CUDA 12.4 起，图里可以有**条件节点**。它带着一个句柄（handle）和几张**体图（body graph）**，走到它的时候看句柄里的值：
#
# | 种类 | 体图 | 值的意思 | 驱动 |
# |:--|:--|:--|:--|
# | IF | 1 张 | 不为 0 就做 | 12.4 |
# | IF / ELSE | 2 张 | 不为 0 做第 0 张，为 0 做第 1 张 | 12.8 |
# | WHILE | 1 张 | 不为 0 就做一遍，再看；为 0 停 | 12.4 |
# | SWITCH | 任意张 | 值是几就做第几张，超出范围就都不做 | 12.8 |
#
# 值由谁写？由**内核**写：设备函数 `cudaGraphSetConditional(句柄, 值)`。所以决定的那一刻 CPU 完全不在场。
#
# 句柄就是一个 64 位整数，当普通参数传给内核。设备函数不在 CuPy 的头文件里，照下面这样自己声明，NVRTC（CuPy 用的运行时编译器）认得它：

# %% tags=["gpu"]
CONTROL = r"""
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

// The condition is the value at an address: for IF and SWITCH. One thread decides.
extern "C" __global__ void choose(unsigned long long handle, const unsigned int *value) {
    if (threadIdx.x == 0) cudaGraphSetConditional(handle, *value);
}

// Go on while something is pending, but never for more than 100000 rounds: a loop on the GPU can't be interrupted.
extern "C" __global__ void decide(unsigned long long handle, unsigned int *pending, const unsigned int *rounds) {
    if (threadIdx.x) return;  // one thread decides
    cudaGraphSetConditional(handle, *pending != 0 && *rounds < 100000);
    *pending = 0;
}

// One round of Euclid on each pair that is not done; counts the rounds and the pairs that need another one.
extern "C" __global__ void gcd_round(unsigned long long *a, unsigned long long *b, unsigned int *pending, unsigned int *rounds, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t == 0) *rounds += 1;
    if (t >= size || b[t] == 0) return;
    unsigned long long rest = a[t] % b[t];
    a[t] = b[t];
    b[t] = rest;
    if (rest) atomicAdd(pending, 1u);
}

// One Collatz step of each number above 1: v / 2 or 3 v + 1; counts the steps, the rounds, and the numbers still above 1.
extern "C" __global__ void collatz_round(unsigned long long *x, unsigned int *steps, unsigned int *pending, unsigned int *rounds, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t == 0) *rounds += 1;
    if (t >= size || x[t] <= 1) return;
    unsigned long long v = x[t] % 2 ? 3 * x[t] + 1 : x[t] / 2;
    x[t] = v;
    steps[t] += 1;
    if (v > 1) atomicAdd(pending, 1u);
}

// Before any round: no rounds yet, and how many numbers are above 1?
extern "C" __global__ void collatz_open(const unsigned long long *x, unsigned int *pending, unsigned int *rounds, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t == 0) *rounds = 0;
    if (t < size && x[t] > 1) atomicAdd(pending, 1u);
}
"""


@cache
def control_kernels():
    """{name: kernel} of the kernels above, compiled and loaded: RuntimeError where device-side control flow can't be had."""
    version = lab.check_cuda(cudart.cudaDriverGetVersion())
    if version < 12080:
        raise RuntimeError(f"设备上的 IF / ELSE 和 SWITCH 需要支持 CUDA 12.8 的驱动，这里的驱动支持到 {version // 1000}.{version % 1000 // 10}。请升级驱动。")
    made = cp.RawModule(code=CONTROL)
    kernels = {name: made.get_function(name) for name in ("choose", "decide", "gcd_round", "collatz_round", "collatz_open")}
    for kernel in kernels.values():  # they have no meaning outside a graph: load their code without launching them
        lab.check_cuda(driver.cuFuncLoad(driver.CUfunction(kernel.kernel.ptr)))
    return kernels


def launch_control(name, size, *arguments):
    """Launch a control kernel with at least `size` threads on the current stream; arguments as CuPy takes them."""
    control_kernels()[name]((blocks(size),), (min(size, BLOCK),), arguments)


# %% [markdown]
# `decide` 和 `choose` 只在图里才有意义。在图外启动，句柄不指向任何东西，我们在 H200 上试过：非法地址，整个 CUDA 上下文报废。
# 所以 `control_kernels` 用 `cuFuncLoad` 把它们的代码先装好，而不是像别的内核那样启动一次。
#
# 造一个条件节点要三个调用，都在 CUDA 运行时里：
#
# 1. `cudaGraphConditionalHandleCreate(图, 默认值, 标志)`：句柄属于这张图。标志为 1（C 里叫 `cudaGraphCondAssignDefault`，
#    运行时的 Python 绑定漏了这个名字，驱动那边叫 `CU_GRAPH_COND_ASSIGN_DEFAULT`）时，**每次启动图**都先把值设成默认值。
#    不带这个标志、走到条件节点时又没有内核写过，值就没有定义：我们试过一次，得到的是启动失败，上下文一样报废。**所以总是带上它**；
# 2. `cudaGraphAddNode`：一个什么节点都能加的通用入口。填好种类、句柄、体图的张数，加完以后体图就在参数的 `phGraph_out` 里；
# 3. 往体图里填东西：用显式 API 加节点，或者用 `cudaStreamBeginCaptureToGraph` 把一段捕获**录进指定的图**。
#
# 两版 CUDA 的 `cudaGraphAddNode` 参数个数不同，所以给一个小函数，第二个给定函数做“录进某张图”：

# %% tags=["gpu"]
CONDITION = cudart.cudaGraphConditionalNodeType
RESET_EACH_LAUNCH = int(driver.CU_GRAPH_COND_ASSIGN_DEFAULT)


def new_handle(graph, default):
    """A conditional handle of a graph (cudaGraph_t); its value is `default` at the start of each launch of the graph."""
    control_kernels()  # compiled here at the latest: while a stream is capturing, it may be refused
    return lab.check_cuda(cudart.cudaGraphConditionalHandleCreate(graph, default, RESET_EACH_LAUNCH))


def add_conditional(graph, after, handle, kind, size):
    """Add a conditional node to a graph, after the nodes `after` (a list). Returns its body graphs, a list of `size` cudaGraph_t.

    kind: CONDITION.cudaGraphCondTypeIf, …While or …Switch. The bodies belong to the node; they start empty.
    """
    params = cudart.cudaGraphNodeParams()
    params.type = cudart.cudaGraphNodeType.cudaGraphNodeTypeConditional
    params.conditional.handle = handle
    params.conditional.type = kind
    params.conditional.size = size
    edge_data = (None,) if int(cuda.bindings.__version__.split(".")[0]) >= 13 else ()  # a new argument in CUDA 13
    lab.check_cuda(cudart.cudaGraphAddNode(graph, after, *edge_data, len(after), params))
    return list(params.conditional.phGraph_out)[:size]


def record_into(graph, launch):
    """Capture launch() into a graph that exists (a body, or an empty one), on `stream`. Returns the nodes of the graph."""
    lab.check_cuda(cudart.cudaStreamBeginCaptureToGraph(stream.ptr, graph, None, None, 0, THREAD_LOCAL))
    try:
        with stream:
            launch()
    finally:
        ended = cudart.cudaStreamEndCapture(stream.ptr)
    lab.check_cuda(ended)
    return nodes_of(graph)


# %% [markdown]
# ### IF：做还是不做
#
# 一张图，启动一次：第一个内核看显存里的 `flag`，写句柄；IF 的体图里有两次 `mix`。主机全程不读 `flag`。
# 另一张带 ELSE：值为 0 时做一次 `mix`。猜一猜 `flag` 是 0、1、7 时各做了几次：

# %% tags=["demo", "gpu"]
def conditional_graph(kind, flag, bodies):
    """A graph: choose(flag), then a conditional node with these bodies (functions that launch). Returns (definition, executable)."""
    graph = lab.check_cuda(cudart.cudaGraphCreate(0))
    handle = new_handle(graph, 0)
    nodes = record_into(graph, partial(launch_control, "choose", 1, np.uint64(int(handle)), flag))
    for body, launch in zip(add_conditional(graph, nodes[-1:], handle, kind, len(bodies)), bodies, strict=True):
        record_into(body, launch)
    return graph, instantiate(graph)


with stream:
    flag = cp.zeros(1, cp.uint32)
stream.synchronize()
try:
    control_kernels()
    missing = None
except (RuntimeError, lab.CudaError) as error:
    missing = f"这台机器上没有设备端控制流，下面的实验跳过：{error}"
    lab.say(missing)

if not missing:
    rows = []
    for title, bodies in (("IF", (2,)), ("IF / ELSE", (2, 1))):
        graph, made = conditional_graph(CONDITION.cudaGraphCondTypeIf, flag, [partial(launch_mixes, xs, 1000, n) for n in bodies])
        done = []
        for value in (0, 1, 7):
            with stream:
                flag.fill(value)
            stream.synchronize()
            before = xs.get()
            replay(made)
            stream.synchronize()
            done.append(next((str(n) for n in range(4) if np.array_equal(xs.get()[:1000], mixed(before[:1000], n))), "?"))
        rows.append((title, *done))
        lab.check_cuda(cudart.cudaGraphExecDestroy(made))
        lab.check_cuda(cudart.cudaGraphDestroy(graph))
    lab.say(lab.table(("做了几次 `mix`", "flag = 0", "flag = 1", "flag = 7"), rows))

# %% [markdown]
# ### WHILE：做到好为止
#
# 求最大公约数的欧几里得算法，每一对数要的轮数不同，事先不知道。一批数一起算，**有一对没算完就再来一轮**：
#
# - 体图里两个内核：`gcd_round` 做一轮，数出还没完的对数；`decide` 按这个数写句柄；
# - 句柄的默认值是 1，所以第一轮一定做，之后由 `decide` 说了算。
#
# 下面的 `rounds` 在显存里数轮数。剖析工具有时只看得见循环的第一轮，设备上的计数器才靠得住。

# %% tags=["demo", "gpu"]
def euclid_graph(a, b, pending, rounds):
    """A graph that replaces each pair by (gcd, 0). a, b: cupy uint64, 1-D; pending, rounds: cupy uint32, shape (1,), 0 at first."""
    graph = lab.check_cuda(cudart.cudaGraphCreate(0))
    handle = new_handle(graph, 1)
    (body,) = add_conditional(graph, [], handle, CONDITION.cudaGraphCondTypeWhile, 1)

    def one_round():
        launch_control("gcd_round", a.size, a, b, pending, rounds, np.uint32(a.size))
        launch_control("decide", 1, np.uint64(int(handle)), pending, rounds)

    record_into(body, one_round)
    return graph, instantiate(graph)


if not missing:
    pairs = rng.integers(1, 10**12, (2, 2000)).astype(np.uint64)
    with stream:
        a, b = cp.asarray(pairs[0]), cp.asarray(pairs[1])
        pending, rounds = cp.zeros(1, cp.uint32), cp.zeros(1, cp.uint32)
    stream.synchronize()
    euclid, euclid_exec = euclid_graph(a, b, pending, rounds)
    replay(euclid_exec)
    stream.synchronize()
    lab.say(
        f"一次启动，2000 对数，GPU 自己做了 **{int(rounds.get()[0])}** 轮，与 NumPy 的最大公约数"
        + ("**全部一致**。" if np.array_equal(a.get(), np.gcd(*pairs)) else "**不一致**。")
    )

# %% [markdown]
# 和主机循环比一比值多少。主机循环用一张图做一轮、把 `pending` 拷回锁页内存（pinned memory），同步，看一眼，决定要不要下一轮。
# 相邻的两个斐波那契数让欧几里得算法走得最慢，正好用来指定轮数：

# %% tags=["demo", "gpu"]
import cupyx

TO_HOST = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost

if not missing:
    fibonacci = [1, 1]
    while len(fibonacci) < 90:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    told = cupyx.zeros_pinned(1, np.uint32)

    def round_and_tell():
        launch_control("gcd_round", a.size, a, b, pending, rounds, np.uint32(a.size))
        lab.check_cuda(cudart.cudaMemcpyAsync(told.ctypes.data, pending.data.ptr, 4, TO_HOST, stream.ptr))
        lab.check_cuda(cudart.cudaMemsetAsync(pending.data.ptr, 0, 4, stream.ptr))
        return True

    def captured_round():
        with stream:
            return round_and_tell()

    _, _, single = record(captured_round)
    single_exec = instantiate(single)

    def on_the_host():
        while True:
            replay(single_exec)
            stream.synchronize()
            if told[0] == 0:
                return

    def timed(work, f):
        """µs, end to end, and rounds, for pairs of neighbouring Fibonacci numbers."""
        taken = []
        for _ in range(8):
            with stream:
                a.fill(fibonacci[f + 1])
                b.fill(fibonacci[f])
                rounds.fill(0)
            stream.synchronize()
            began = perf_counter_ns()
            work()
            stream.synchronize()
            taken.append((perf_counter_ns() - began) / 1000)
        return float(np.median(taken[2:])), int(rounds.get()[0])

    results = {"主机循环": [], "WHILE": []}
    for f in (2, 6, 12, 24, 48, 86):
        results["主机循环"].append(timed(on_the_host, f))
        results["WHILE"].append(timed(partial(replay, euclid_exec), f))
    fig, ax = plt.subplots()
    for name, each in results.items():
        ax.plot([n for _, n in each], [us for us, _ in each], label=name)
    ax.set_xlabel("轮数")
    ax.set_ylabel("端到端（µs）")
    ax.set_title(f"一次启动做到好（{lab.gpu_name()}）")
    ax.legend()
    plt.show()
    slope = {name: np.polyfit([n for _, n in each], [us for us, _ in each], 1)[0] for name, each in results.items()}
    lab.say(f"每一轮：主机循环 **{slope['主机循环']:.1f} µs**，WHILE **{slope['WHILE']:.1f} µs**，相差 {slope['主机循环'] / slope['WHILE']:.1f} 倍。")
    for each in (euclid_exec, single_exec):
        lab.check_cuda(cudart.cudaGraphExecDestroy(each))
    for each in (euclid, single):
        lab.check_cuda(cudart.cudaGraphDestroy(each))

# %% [markdown]
# ### SWITCH：形状由 GPU 来选
#
# 现在回到形状。前一个内核在 GPU 上数出了有几个目标，后面的工作应当按这个数挑一个桶（bucket）。CPU 不知道这个数；
# 而一张普通的图只认一个形状，于是大家只好总按最大的算。
#
# 用 SWITCH，**一张图里装着所有的桶**，GPU 看着显存里的 `which` 自己挑。体图里是各个长度的请求，从 `ChainWork` 直接录进去。

# %% tags=["demo", "gpu"]
if not missing:
    BUCKETS = [1000, 4000, 16000]
    with stream:
        which = cp.zeros(1, cp.uint32)
    stream.synchronize()
    small = ChainWork(xs, 20)

    def in_bucket(length):
        small.prepare(length)
        small.launch()

    graph, switch = conditional_graph(CONDITION.cudaGraphCondTypeSwitch, which, [partial(in_bucket, length) for length in BUCKETS])
    plain = {}
    for length in BUCKETS:
        small.prepare(length)
        _, _, each = record(small.launch)
        plain[length] = instantiate(each)
        lab.check_cuda(cudart.cudaGraphDestroy(each))
    rows = []
    for number, length in enumerate([*BUCKETS, None]):
        with stream:
            which.fill(number)
        stream.synchronize()
        before = xs.get()
        replay(switch)
        stream.synchronize()
        want = before if length is None else served(before, length, 20)
        right = "对" if np.array_equal(xs.get(), want) else "不对"
        both = None if length is None else lab.compare_us(partial(replay, switch), partial(replay, plain[length]), clock="end_to_end", pairs=11)
        rows.append((number, "都不做" if length is None else f"长度 {length}", right, "—" if both is None else f"{both.first.median:.0f}", "—" if both is None else f"{both.second.median:.0f}"))
    extra = [float(row[3]) - float(row[4]) for row in rows if row[3] != "—"]
    lab.say(
        lab.table(("`which`", "应当做的", "结果", "SWITCH µs", "这个长度单独一张图 µs"), rows)
        + f"\n\n让 GPU 自己挑，每次多花约 **{np.median(extra):.0f} µs**：这就是不问 CPU 的价钱，和一次拷回、同步、再启动比一比。"
    )
    for each in (switch, *plain.values()):
        lab.check_cuda(cudart.cudaGraphExecDestroy(each))
    lab.check_cuda(cudart.cudaGraphDestroy(graph))

# %% [markdown]
# ### 体图里放不下什么
#
# 文档说，体图里只许有内核、空节点、拷贝、memset、子图和条件节点。放了别的会怎样？带条件节点的图，还能像普通的图那样随意实例化、克隆吗？

# %% tags=["demo", "gpu"]
def body_with(launch):
    """Put launch() into the body of an IF. Returns (definition, what the body holds)."""
    graph = lab.check_cuda(cudart.cudaGraphCreate(0))
    (body,) = add_conditional(graph, [], new_handle(graph, 0), CONDITION.cudaGraphCondTypeIf, 1)
    kinds = [lab.check_cuda(cudart.cudaGraphNodeGetType(node)).name.removeprefix("cudaGraphNodeType") for node in record_into(body, launch)]
    return graph, "，".join(kinds)


if not missing:
    letter = np.zeros(64, np.uint32)  # ordinary, pageable host memory
    CASES = {
        "一个内核": lambda: launch_mixes(xs, 64, 1),
        "memset": lambda: lab.check_cuda(cudart.cudaMemsetAsync(xs.data.ptr, 0, 256, stream.ptr)),
        "拷到普通的主机内存": lambda: lab.check_cuda(cudart.cudaMemcpyAsync(letter.ctypes.data, xs.data.ptr, 256, TO_HOST, stream.ptr)),
        "分配显存，再释放": lambda: lab.check_cuda(cudart.cudaFreeAsync(lab.check_cuda(cudart.cudaMallocAsync(1024, stream.ptr)), stream.ptr)),
    }
    rows = []
    for title, launch in CASES.items():
        graph, kinds = body_with(launch)
        error, made = cudart.cudaGraphInstantiate(graph, 0)
        rows.append((f"体图：{title}", kinds, f"{error.name}（{int(error)}）"))
        if title == "一个内核":
            again, _ = cudart.cudaGraphInstantiate(graph, 0)
            rows.append(("同一份定义，再实例化一次", "—", f"{again.name}（{int(again)}）"))
            cloned, _ = cudart.cudaGraphClone(graph)
            rows.append(("克隆这份定义", "—", f"{cloned.name}（{int(cloned)}）"))
        if not int(error):
            lab.check_cuda(cudart.cudaGraphExecDestroy(made))
        cudart.cudaGetLastError()
        lab.check_cuda(cudart.cudaGraphDestroy(graph))
    lab.say(lab.table(("试什么", "录到的节点", "实例化（或克隆）的回答"), rows))

# %% [markdown]
# - 录进体图的时候没有谁拦，**要到实例化才知道不行**，而且只有一句“参数无效”。体图里要用的显存，在外面备好；要交给主机的数，放进锁页内存。
# - 句柄的值住在可执行图里，所以带条件节点的定义受的限制比普通的多。要几份，就造几份定义。
# - 句柄只能用于创建它的那张图。
# - 体图录到一半要是坏了（比如里面同步了一次），有公开的报告说整个进程会崩溃。这种试验别在服务进程里做。
# - WHILE 停不下来的时候，**没有谁能从外面叫停**，只能结束进程。所以 `decide` 里留了一个轮数的上限。

# %% [markdown]
# ## 练习
#
# 四道练习，共 12 分。解答里可以用这些给定的名字：
#
# - 模块与工具：`np`、`cp`、`ctypes`、`cudart`、`driver`、`partial`、`lab`；
# - 工作：`stream`、`BLOCK`、`blocks`、`launch_mixes`、`launch_halving`、`ChainWork`、`EngineWork`、`make_plan`、`must`；
# - 图：`record`、`nodes_of`、`instantiate`、`replay`、`try_update`；
# - 控制流：`CONDITION`、`control_kernels`、`launch_control`、`new_handle`、`add_conditional`、`record_into`；
# - NumPy 参考：`mixed`、`served`、`steps_of`、`expected`；
# - 练习二给出的 `TRAFFIC`、`COST`，练习三给出的 `serve_by_rebuilding`，练习四给出的 `DeviceLoop`。
#
# `defined`、`Rebuild`、`Library`、`conditional_graph` 等名字来自演示单元（只做实验，评分时不运行），解答里不能用，但可以照着写。
#
# ### 练习一：绝不重放旧图（3 分）
#
# 写 `make_live(work)`，返回一个对象，它有方法 `infer(shape)`，用**一张**可执行图服务一个请求，不等待，返回做法的名字：
#
# - 形状就是可执行图的形状：只重放，返回 `"replay"`，不再碰 `work`；
# - 否则先 `work.prepare(shape)`。答复是 `False` 就抛出 `ValueError`，什么都不启动；
# - 再用 `record(work.launch)` 录一份定义。答复不是 `True`、错误码不为 0、或者定义里没有节点，都算没录成：
#   逐个启动 `work.launch()`，返回 `"eager"`；连逐个启动也答复 `False`，就抛出 `RuntimeError`；
# - 录成了，就更新可执行图并重放，返回 `"update"`；更新得到 910，就实例化一张新的、销毁旧的，再重放，返回 `"rebuild"`。第一次没有可执行图，也是 `"rebuild"`；
# - 更新得到别的错误码，抛出 `RuntimeError`，旧图留着；
# - 用完的定义要销毁。录失败时运行时会记住一个错误，用 `cudart.cudaGetLastError()` 清掉它；
# - 没录成、被拒绝的请求过后，可执行图仍然属于**它原来的**形状：那个形状再来，应当还是 `"replay"`。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# “可执行图现在是哪个形状”由谁来记？在哪一行之后改它才不会记错：准备好形状时，录好定义时，还是更新或重建成功以后？
#
# 录到一半答复 `False` 的定义，里面可能已经有几个节点。它和一份好的定义，光看节点数分得出来吗？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `record(work.launch)` 返回三个值；出错时图是 `None`。节点数是 `len(nodes_of(graph))`。
#
# `try_update(可执行图, 定义)` 返回 `(错误码, 原因)`。`instantiate(定义)`、`replay(可执行图)` 都是给定的；
# 销毁用 `lab.check_cuda(cudart.cudaGraphExecDestroy(…))` 和 `lab.check_cuda(cudart.cudaGraphDestroy(…))`。
#
# </details>

# %% solution="make_live" tags=["gpu"]
def make_live(work):
    """Make a server of one executable graph that follows the requests' shapes. work: see ChainWork, EngineWork.

    Returns an object whose infer(shape) does one request on `stream`, without waiting, and returns how: "replay",
    "update", "rebuild" or "eager". ValueError, and nothing launched, for a shape that work refuses; RuntimeError if
    the work cannot even be launched, or the update fails other than by a refusal.
    """
    ### BEGIN SOLUTION: 记住可执行图属于哪个形状；换形状时逐项核对准备、捕获的答复、错误码、节点数，再更新，910 才重建；成功以后才改记着的形状
    class Live:
        def __init__(self):
            self.shape, self.graph_exec = None, None

        def infer(self, shape):
            if shape == self.shape:
                replay(self.graph_exec)
                return "replay"
            if not work.prepare(shape):
                raise ValueError(f"形状 {shape} 不被接受")
            answer, error, graph = record(work.launch)
            if answer is not True or error or not nodes_of(graph):
                if graph is not None:
                    lab.check_cuda(cudart.cudaGraphDestroy(graph))
                cudart.cudaGetLastError()  # the runtime remembers a broken capture
                if not work.launch():
                    raise RuntimeError(f"形状 {shape} 没有录成，逐个启动也没有成功")
                return "eager"
            try:
                how = self.follow(graph)
            finally:
                lab.check_cuda(cudart.cudaGraphDestroy(graph))
            self.shape = shape
            replay(self.graph_exec)
            return how

        def follow(self, graph):
            """Bring the executable graph to this definition. Returns "update" or "rebuild"."""
            if self.graph_exec is not None:
                error, reason = try_update(self.graph_exec, graph)
                if error == 0:
                    return "update"
                if error != 910:
                    raise RuntimeError(f"更新出错：错误码 {error}，{reason}")
            old, self.graph_exec = self.graph_exec, instantiate(graph)
            if old is not None:
                lab.check_cuda(cudart.cudaGraphExecDestroy(old))
            return "rebuild"

    return Live()
    ### END SOLUTION


# %% test="make_live" kind="structure" points=3 tags=["gpu"]
PLANTED = """
class Planted:
    '''Stands for a work: counts its calls; fault(shape, name) makes its capture, or more, go wrong at that shape.'''

    def __init__(self, work, stream):
        self.work, self.stream, self.faults, self.shape, self.calls = work, stream, {}, None, []

    def fault(self, shape, name):
        self.faults[shape] = name

    def seen(self):
        calls, self.calls = self.calls, []
        return calls

    def prepare(self, shape, warm=True):
        self.calls.append("prepare")
        if self.faults.get(shape) == "shape" or not self.work.prepare(shape, warm):
            return False
        self.shape = shape
        return True

    def launch(self):
        from cuda.bindings import runtime
        capturing = runtime.cudaStreamIsCapturing(self.stream.ptr)[1] != runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusNone
        self.calls.append("capture" if capturing else "launch")
        fault = self.faults.get(self.shape)
        if fault == "dead":
            return False
        if capturing and fault == "empty":
            return True
        if capturing and fault == "half":
            n, self.work.n = self.work.n, 1
            self.work.launch()
            self.work.n = n
            return False
        if capturing and fault == "none":
            self.work.launch()
            return None
        if capturing and fault == "sync":
            self.work.launch()
            runtime.cudaStreamSynchronize(self.stream.ptr)
            return True
        return self.work.launch()
"""
WATCH = """
class Watch:
    '''Counts what is instantiated, destroyed and captured through cuda.bindings while it is on.'''

    def __init__(self):
        from cuda.bindings import driver, runtime
        self.events, self.definitions, self.kept, self.runtime = [], 0, [], runtime
        for module, prefix in ((runtime, "cuda"), (driver, "cu")):
            for name, what in (
                ("GraphInstantiate", "made"), ("GraphInstantiateWithFlags", "made"), ("GraphInstantiateWithParams", "made"),
                ("GraphExecDestroy", "destroyed"), ("StreamEndCapture", 1), ("GraphDestroy", -1),
            ):
                original = getattr(module, prefix + name, None)
                if original is not None:
                    self.kept.append((module, prefix + name, original))
                    setattr(module, prefix + name, self.noted(original, what))
        runtime.cudaGetLastError()

    def noted(self, original, what):
        def call(*args, **kwargs):
            if type(what) is str:
                self.events.append(what)
            result = original(*args, **kwargs)
            if type(what) is int and int(result[0]) == 0:
                self.definitions += what
            return result
        return call

    def off(self):
        '''[what was instantiated and destroyed, definitions more than before, the error that the runtime remembers].'''
        for module, name, original in self.kept:
            setattr(module, name, original)
        return [self.events, self.definitions, int(self.runtime.cudaGetLastError()[0])]
"""
BREAK = """
class Broken:
    '''While it is on, an update of an executable graph is answered with error code 1, and changes nothing.'''

    def __init__(self, try_update):
        from cuda.bindings import driver, runtime
        names = try_update.__globals__
        self.names, self.exec_update = names, names["exec_update"]
        self.kept = [(module, name, getattr(module, name)) for module, name in ((runtime, "cudaGraphExecUpdate"), (driver, "cuGraphExecUpdate"))]
        names["exec_update"] = lambda *args: 1
        runtime.cudaGraphExecUpdate = lambda *args: (runtime.cudaError_t(1), runtime.cudaGraphExecUpdateResultInfo())
        driver.cuGraphExecUpdate = lambda *args: (driver.CUresult(1), driver.CUgraphExecUpdateResultInfo())

    def off(self):
        self.names["exec_update"] = self.exec_update
        for each in self.kept:
            setattr(*each)
"""
INFER = "def infer(live, length): live.infer(length)"


class Desk:
    """The learner's server on a chain work of `size` elements with planted faults, and what x must hold."""

    def __init__(self, size, n):
        self.data = secret.integers(0, 2**32, size, dtype=np.uint32)
        self.x, self.n = on_gpu(self.data), n
        self.work = student.define(PLANTED, "Planted")(student.ChainWork(self.x, n), student.value("stream"))
        self.live, self.begun, self.definitions = student.make_live(self.work), False, 0

    def serves(self, length, how, event):
        """One request of that length, served in that way ("replay" …), and right."""
        self.work.seen()
        watch = student.define(WATCH, "Watch")()
        try:
            answer = self.live.infer(length)
        finally:
            events, definitions, error = watch.off()
        student.value("stream").synchronize()
        self.data = reference.served(self.data, length, self.n)
        stale = "重放了旧图" if how in ("update", "rebuild", "eager") else "结果不对"
        check.equal(self.x.read(), self.data, why=f"{event}：{stale}，或者用了没录好的定义。应当的做法是 {how!r}：逐项核对了答复、错误码和节点数吗？")
        check.equal(answer, how, why=f"{event}：返回的做法不对，应当是 {how!r}。")
        calls = self.work.seen()
        if how == "replay":
            check.equal([calls, events], [[], []], why=f"{event}：形状没有变，应当只重放，不碰 work，也不实例化。")
        else:
            check.equal(calls, ["prepare", "capture"] + ["launch"] * (how == "eager"), why=f"{event}：应当先 prepare，再捕获一次 launch；没录成才逐个启动一次。")
        if how in ("update", "eager"):
            check.equal(events, [], why=f"{event}：可执行图没有理由换掉，却实例化或销毁了。")
        if how == "rebuild":
            check.equal(events, ["made", "destroyed"] if self.begun else ["made"], why=f"{event}：应当实例化一张新的；有旧的，等新的造好再销毁，各一次。")
            self.begun = True
        if how == "eager":
            check.equal(error, 0, why=f"{event}：录失败以后，运行时还记着那个错误，用 cudart.cudaGetLastError() 清掉它。")
        self.tidy(definitions)

    def tidy(self, definitions):
        """At most the newest definition may still be there."""
        self.definitions += definitions
        check.that(self.definitions <= 1, why="录出来的定义越来越多：用完的定义要用 cudart.cudaGraphDestroy 销毁，没录成的、更新过的、出了错的都一样。")

    def refuses(self, error, length, event):
        """One request that must raise, and leave x and the executable graph alone."""
        watch = student.define(WATCH, "Watch")()
        try:
            check.raises(error, self.live.infer, length, why=f"{event}：应当抛出 {error}。")
        finally:
            events, definitions, _ = watch.off()
        student.value("stream").synchronize()
        check.equal(self.x.read(), self.data, why=f"{event}：抛出了异常，却已经启动了什么，x 变了。是不是重放了旧图？")
        check.equal(events, [], why=f"{event}：不应当实例化或销毁可执行图。")
        self.tidy(definitions)

    def fails_to_update(self, length):
        """One request whose update ends in another error than a refusal."""
        broken = student.define(BREAK, "Broken")(student.value("try_update"))
        try:
            self.refuses("RuntimeError", length, "更新得到 910 以外的错误码")
        finally:
            broken.off()

    def returns_at_once(self, lengths):
        """Requests behind work that takes long: one of them at least must have returned before that was done."""
        held_up, infer, early = student.plant("held_up"), student.define(INFER, "infer"), False
        for length in lengths:
            early = held_up(student.value("stream"), 200, infer, self.live, length)[0] or early
            self.data = reference.served(self.data, length, self.n)
        check.equal(self.x.read(), self.data, why="stream 正忙的时候来了几个请求，结果不对。")
        check.that(early, why="stream 正忙的时候，infer 一直等到它做完才返回：infer 只提交，不等待。")


desk = Desk(4096, 3)
desk.serves(1000, "rebuild", "第一个请求")
desk.serves(1000, "replay", "同样的形状再来一次")
desk.serves(700, "update", "长度变了，节点数没变")
desk.serves(2000, "rebuild", "长度变了，节点数也变了")
desk.refuses("ValueError", 5000, "长度超出了 x")
desk.serves(2000, "replay", "拒绝了一个请求之后，原来的形状")
desk.work.fault(1500, "half")
desk.serves(1500, "eager", "捕获到一半，launch 答复 False")
desk.serves(2000, "replay", "没录成一个请求之后，原来的形状")
### BEGIN HIDDEN TESTS
n = int(secret.integers(4, 12))
desk = Desk(9000, n)
lengths = [int(length) for length in secret.choice(np.arange(1100, 2000), 6, replace=False)]
desk.serves(lengths[0], "rebuild", "第一个请求")
for length in lengths[1:4]:
    desk.serves(length, "update", "换到节点数相同的长度")
    desk.serves(length, "replay", "换过以后再来一次")
desk.serves(int(secret.integers(4200, 8000)), "rebuild", "换到节点数不同的长度")
desk.serves(lengths[0], "rebuild", "换回节点数不同的长度")
desk.serves(lengths[1], "update", "重建以后再更新")
desk.fails_to_update(lengths[2])
desk.serves(lengths[1], "replay", "更新出错之后，原来的形状")
desk.serves(lengths[2], "update", "更新出过错的形状，这一次更新得成")
desk.returns_at_once(lengths[2:0:-1])
for fault, event in (
    ("half", "捕获到一半，launch 答复 False"),
    ("none", "launch 什么也没有答复（None）"),
    ("empty", "录到的是一张空图"),
    ("sync", "捕获被破坏，结束时出错"),
):
    desk.work.fault(lengths[5], fault)
    desk.serves(lengths[5], "eager", event)
    desk.serves(lengths[5], "eager", f"{event}，同样的形状再来一次：没录成的形状不能记成可执行图的形状")
    desk.serves(lengths[1], "replay", f"{event}之后，原来的形状")
desk.work.fault(lengths[5], "dead")
desk.refuses("RuntimeError", lengths[5], "捕获和逐个启动都答复 False")
desk.serves(lengths[1], "replay", "逐个启动也失败之后，原来的形状")
desk.work.fault(lengths[4], "shape")
desk.refuses("ValueError", lengths[4], "prepare 答复 False")
desk.refuses("ValueError", lengths[4], "prepare 再次答复 False")
desk.serves(lengths[1], "replay", "prepare 被拒绝之后，原来的形状")
desk.work.fault(lengths[5], None)
desk.serves(lengths[5], "update", "毛病好了的形状应当又能用上图")
fresh = Desk(3000, 2)
fresh.work.fault(1000, "empty")
fresh.serves(1000, "eager", "第一个请求就没录成")
fresh.serves(1200, "rebuild", "第一个请求没录成，第二个正常")

plan = reference.make_plan()
x, y = on_gpu(np.zeros((64, 128), np.float32)), on_gpu(np.zeros((64, 128), np.float32))
live = student.make_live(student.EngineWork(plan, x, y))
for batch in [*(int(each) for each in secret.permutation([1, 2, 5, 16, 33, 64])), 2, 2, 65, 2, 16]:
    data = x.write(secret.integers(-8, 9, (64, 128)).astype(np.float32))
    rest = y.write(np.full((64, 128), -99, np.float32))
    if batch > 64:
        check.raises("ValueError", live.infer, batch, why="引擎不接受这个批大小，应当抛出 ValueError，而不是用旧的形状。")
    else:
        live.infer(batch)
    student.value("stream").synchronize()
    got, want = y.read(), rest if batch > 64 else np.concatenate([reference.expected(data[:batch]), rest[batch:]])
    check.equal(got, want, abs=0.5, why="用引擎服务一串批大小，结果不对：算的是别的批大小，还是重放了旧图？")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习二：四种流量，各选一种办法（3 分）
#
# 这道题不需要 GPU。`COST` 是在一块真实的 GPU 上量来的单价（µs），工作是本章的内核链，150 个节点。
# 它是另外单独量的，和“再量快慢”那张表对不齐：每次从空闲的 GPU 量起，CPU 当时的快慢也不同。本题只按这份单价算：

# %%
import json
from pathlib import Path

COST = json.loads(Path("costs.json").read_text(encoding="utf-8"))


def synthetic_traffic(seed=23):
    """Four streams of lengths, made up: {name: list of 400 lengths}."""
    rng = np.random.default_rng(seed)
    steady = np.repeat(rng.choice([300, 700, 900, 1200], 5), 80)
    pair = np.resize([700, 900], 400)
    bursts = np.repeat(rng.choice(np.arange(260, 4000, 37), 50), 8)
    endless = rng.permutation(np.arange(260, 4000))[:400]
    return {"长时间不变": steady.tolist(), "两种来回跳": pair.tolist(), "一阵一阵，形状很多": bursts.tolist(), "个个都是新的": endless.tolist()}


TRAFFIC = synthetic_traffic()

# %% tags=["demo"]
def summary(keys):
    """(requests, different lengths, changes, the first six)."""
    return len(keys), len(set(keys)), sum(keys[i] != keys[i - 1] for i in range(1, len(keys))), keys[:6]


lab.say(
    lab.table(("`COST`", "µs"), COST["us"].items())
    + f"\n\n记录于 {COST['gpu']}，{COST['recorded_at']}。四种流量是合成的，不是真实的记录：\n\n"
    + lab.table(("流量", "请求", "不同的长度", "换了几次", "开头"), [(name, *summary(keys)) for name, keys in TRAFFIC.items()]),
    measured=False,
)

# %% [markdown]
# 写 `choose(keys, us, room, n=139)`，算出五种办法服务这一串请求 `keys`（长度的列表）各要多少，返回 `(最便宜的名字, 账单)`。账单是字典 `{名字: µs}`，五个名字（依次是逐个启动、重建、捕获 + 更新、定义库 + 更新、每个形状一张图）和规则：
#
# | 名字 | 规则 |
# |:--|:--|
# | `"eager"` | 每个请求 `us["eager"]` |
# | `"rebuild"` | 每个请求 `us["replay"]`；第一个请求，以及长度和前一个请求不同的每个请求，另加 `us["capture"] + us["instantiate"]` |
# | `"update"` | 每个请求 `us["replay"]`；第一个请求另加 `us["capture"] + us["instantiate"]`。以后换长度时，新旧两个长度的节点数（`steps_of(length, n)`）相同就加 `us["capture"] + us["update"]`；不同则更新被拒绝，加 `us["capture"] + us["update"] + us["instantiate"]` |
# | `"library"` | 每个请求 `us["replay"]`；每个长度**第一次出现**时加 `us["capture"]`，第一个请求也不例外；第一个请求另加 `us["instantiate"]`。以后换长度时加 `us["update"]`，节点数不同则再加 `us["instantiate"]` |
# | `"per_shape"` | 每个请求 `us["replay"]`；最多同时留 `room` 张可执行图。没有这个长度的图就加 `us["capture"] + us["instantiate"]`；满了就先淘汰（eviction）**最久没有用过**的一张 |
#
# “换长度”是说和**前一个请求**不同；第一个请求前面没有请求，不算换长度。最便宜的有并列时，取表里靠前的。`keys` 至少有一个，`room` 至少是 1。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 五种办法都可以边走边记账：走到一个请求，只需要知道前一个长度、见过哪些长度、手上有哪些图。各要记住什么？
#
# `"update"` 和 `"library"` 在换长度时都要看节点数，差别只在捕获的钱什么时候付。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 前后两两配对：`zip([None, *keys], keys)`。最久没用过的：Python 的字典记得插入的次序，用过的 `pop` 出来再放回去，最前面的就是最久没用过的，`next(iter(d))` 取得到它。
#
# 字典里值最小的键：`min(bill, key=bill.get)`；并列时给出先放进去的那一个。
#
# </details>

# %% solution="choose"
def choose(keys, us, room, n=139):
    """The cheapest way to serve requests of these lengths, by the rules of the table.

    keys: list of int, at least one. us: {"eager", "replay", "capture", "instantiate", "update"}: µs. room: how many
    executable graphs fit, at least 1. n: mixes in a request. Returns (name, {name: total µs of each of the five ways}).
    """
    ### BEGIN SOLUTION: 一次遍历，五本账一起记：前一个长度、见过的长度、手上的图（按最近使用排好）
    bill = dict.fromkeys(("eager", "rebuild", "update", "library", "per_shape"), 0.0)
    seen, held = set(), {}
    for before, key in zip([None, *keys], keys, strict=False):
        bill["eager"] += us["eager"]
        for name in ("rebuild", "update", "library", "per_shape"):
            bill[name] += us["replay"]
        if key != before:
            changed_nodes = before is not None and steps_of(before, n) != steps_of(key, n)
            instantiate_us = us["instantiate"] if before is None or changed_nodes else 0.0
            update_us = us["update"] if before is not None else 0.0
            bill["rebuild"] += us["capture"] + us["instantiate"]
            bill["update"] += us["capture"] + update_us + instantiate_us
            bill["library"] += (us["capture"] if key not in seen else 0.0) + update_us + instantiate_us
        seen.add(key)
        if key not in held:
            bill["per_shape"] += us["capture"] + us["instantiate"]
            if len(held) == room:
                del held[next(iter(held))]
        held[key] = held.pop(key, None)
    return min(bill, key=bill.get), bill
    ### END SOLUTION


# %% test="choose" kind="answer" points=3
simple = {"eager": 1000.0, "replay": 100.0, "capture": 900.0, "instantiate": 300.0, "update": 40.0}
NAMES = ("eager", "rebuild", "update", "library", "per_shape")


def compare(answer, name, bill, why):
    """The learner's (name, bill) against the right one."""
    check.that(isinstance(answer, (list, tuple)) and len(answer) == 2 and isinstance(answer[1], dict), why="应当返回两个值：名字，和一个字典。")
    check.equal(sorted(answer[1]), sorted(NAMES), why="账单里应当正好有表里的五个名字。")
    for each, us in zip(NAMES, bill, strict=True):
        check.equal(float(answer[1][each]), us, abs=1e-6, why=f"{why}{each} 应当是 {us:.0f} µs。")
    check.equal(answer[0], name, why=why + "账单对了，最便宜的名字不对。")


compare(student.choose([700], simple, 4), "eager", [1000.0, 1300.0, 1300.0, 1300.0, 1300.0], "只有一个请求：")
compare(student.choose([700, 700, 900, 700], simple, 4), "library", [4000.0, 4000.0, 3480.0, 2580.0, 2800.0], "700、700、900、700（节点数都相同）：")
compare(student.choose([700, 2000], simple, 1), "eager", [2000.0, 2600.0, 2640.0, 2640.0, 2600.0], "700、2000（节点数不同，更新被拒绝）：")
compare(student.choose([700, 2000, 700, 2000], simple, 2), "per_shape", [4000.0, 5200.0, 5320.0, 3520.0, 2800.0], "两个节点数不同的长度来回跳：")
### BEGIN HIDDEN TESTS
def steps(length):
    return length.bit_length()


def right(keys, us, room):
    """The rules once more, one way after the other."""
    change = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
    other = {i for i in change if i and steps(keys[i]) != steps(keys[i - 1])}
    base = len(keys) * us["replay"]
    rebuilt = base + len(change) * (us["capture"] + us["instantiate"])
    follow = sum(us["update"] + (us["instantiate"] if i in other else 0.0) for i in change[1:])
    updated = base + len(change) * us["capture"] + us["instantiate"] + follow
    library = base + len(set(keys)) * us["capture"] + us["instantiate"] + follow
    held, misses = [], 0
    for key in keys:
        if key in held:
            held.remove(key)
        else:
            misses += 1
            held = held[1:] if len(held) == room else held
        held.append(key)
    bill = [len(keys) * us["eager"], rebuilt, updated, library, base + misses * (us["capture"] + us["instantiate"])]
    return NAMES[int(np.argmin(bill))], bill


def drawn_costs():
    """Whole µs, so that every sum is exact."""
    ranges = {"eager": (100, 2000), "replay": (20, 300), "capture": (100, 2000), "instantiate": (50, 900), "update": (10, 200)}
    return {key: float(secret.integers(*span)) for key, span in ranges.items()}


def several(keys_of, room_of, why, count=8):
    """Some random streams, compared at once."""
    got, want = [], []
    for _ in range(count):
        keys, us, room = [int(key) for key in keys_of()], drawn_costs(), int(room_of())
        name, bill = right(keys, us, room)
        answer = student.choose(keys, us, room)
        check.that(isinstance(answer, (list, tuple)) and len(answer) == 2 and isinstance(answer[1], dict), why="应当返回两个值：名字，和一个字典。")
        got.append([answer[0], *(float(answer[1].get(each, -1.0)) for each in NAMES)])
        want.append([name, *bill])
    for column, title in enumerate(NAMES, 1):
        check.equal([each[column] for each in got], [each[column] for each in want], abs=1e-6, why=f"{why}{title} 的账算错了。")
    check.equal([each[0] for each in got], [each[0] for each in want], why=f"{why}账单对了，最便宜的名字不对。")


several(lambda: secret.integers(512, 1024, 40), lambda: 64, "节点数都相同、形状很多的流量里，")
several(lambda: np.repeat(secret.integers(300, 5000, 12), secret.integers(1, 9, 12)), lambda: 64, "一阵一阵的流量里，")
several(lambda: secret.choice([600, 700, 1500, 3000, 3500], 60), lambda: secret.integers(2, 5), "形状比放得下的图多的流量里，")
several(lambda: np.resize([600, 700, 800], 30), lambda: 2, "轮流出现、正好放不下的流量里（淘汰的应当是最久没有用过的），")
several(lambda: np.repeat(secret.integers(300, 5000, 3), 20), lambda: 1, "只放得下一张图的流量里，")
recorded_us = reference.value("COST")["us"]
streams = list(reference.value("TRAFFIC").values())
answers = [student.choose(keys, recorded_us, 4)[0] for keys in streams]
check.equal(answers, [right(keys, recorded_us, 4)[0] for keys in streams], why="TRAFFIC 的四种流量里有选错的。")
tie = {"eager": 1300.0, "replay": 100.0, "capture": 900.0, "instantiate": 300.0, "update": 40.0}
check.equal(student.choose([700], tie, 4)[0], "eager", why="五种办法一样贵的时候，应当取表里靠前的。")
check.equal(student.choose([600, 1500, 3500], {**tie, "eager": 2000.0}, 4)[0], "rebuild", why="最便宜的有两种的时候，应当取表里靠前的。")
### END HIDDEN TESTS

# %% [markdown]
# 用你的 `choose` 看看四种流量，只留得下 4 张可执行图。再把 `room` 改成 100，答案变了几个？
# “个个都是新的”那一行，`update` 和 `library` 的账一模一样，`rebuild` 和 `per_shape` 也是：没有哪个形状来第二次，留着什么都用不上。

# %% tags=["demo"]
rows = []
for name, keys in TRAFFIC.items():
    best, bill = choose(keys, COST["us"], 4)
    rows.append((name, f"`{best}`", *(f"{us / 1000:.0f}" for us in bill.values())))
lab.say(lab.table(("流量", "选", "eager ms", "rebuild ms", "update ms", "library ms", "per_shape ms"), rows), measured=False)

# %% [markdown]
# ### 练习三：个个都换形状，只留一张可执行图（3 分）
#
# 显存紧张，只许有**一张**可执行图；形状却个个请求都换。所有可能的长度事先知道。
#
# 写 `make_follower(x, lengths, n)`，返回一个可以调用的对象：`serve(picks)` 依次服务一串请求，`picks` 里是 `lengths` 的下标。
# 一个请求就是 `launch_mixes(x, 长度, n)`，节点数总是 `n`，所以更新不会因为骨架被拒绝；但错误码还是要看，不为 0 就抛出 `RuntimeError`。
#
# - 捕获全部放在 `make_follower` 里；`serve` 里不捕获、不实例化、不分配、不等待；
# - 整个过程只实例化一次，用 `instantiate`（或者 `cudart`、`driver` 的同名函数；CuPy 的 `end_capture` 每次都实例化，也算）；每个请求启动一次可执行图，用 `replay`；
# - 形状没有变，就不必更新；
# - 可执行图和定义都要活到对象用完为止。
#
# 速度：`n = 150`，每次都换长度。端到端时间（从开始提交到整个设备做完）不超过给定的 `serve_by_rebuilding`（每个请求重新捕获、实例化）的三分之一得满分。
# 参考实现在这台机器上不到 6 倍的话，门槛就是它的加速比的一半，但不低于 1.2 倍。

# %% tags=["gpu"]
def serve_by_rebuilding(x, lengths, n, picks):
    """Serve requests by capturing and instantiating each anew. The baseline of this exercise; does not wait."""
    for pick in picks:

        def request(length=lengths[pick]):
            with stream:
                launch_mixes(x, length, n)
            return True

        _, error, graph = record(request)
        if error:
            raise RuntimeError(f"没有录成：错误码 {error}")
        graph_exec = instantiate(graph)
        replay(graph_exec)
        lab.check_cuda(cudart.cudaGraphExecDestroy(graph_exec))  # the driver waits with this until the launch is done
        lab.check_cuda(cudart.cudaGraphDestroy(graph))


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 换形状时，哪一步最贵？它能不能挪到 `make_follower` 里，每个长度只做一次？留下来的东西占不占显存？
#
# 提交了一个请求，GPU 还没做完，就去更新可执行图，会不会改到已经提交的那一个？（《更新一张活的图》试过。）
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `record(函数)` 返回 `(答复, 错误码, 定义)`；函数里用 `with stream:` 和 `launch_mixes`。
#
# `try_update(可执行图, 定义)` 返回 `(错误码, 原因)`，定义可以反复使用。`replay(可执行图)` 启动它。
#
# </details>

# %% solution="make_follower" tags=["gpu"]
def make_follower(x, lengths, n):
    """Prepare to serve requests of these lengths with one executable graph. x: cupy uint32, 1-D, advanced in place.

    Returns a callable serve(picks): for each index into lengths launches n mixes on that many elements of x, on
    `stream`, in order, without waiting. Nothing is executed while preparing.
    """
    ### BEGIN SOLUTION: 每个长度先录一份定义留着，用其中一份实例化；服务时长度变了就用它的定义更新，再重放
    def request(length):
        with stream:
            launch_mixes(x, length, n)
        return True

    definitions = []
    for length in lengths:
        answer, error, graph = record(partial(request, length))
        if not answer or error:
            raise RuntimeError(f"长度 {length} 没有录成：错误码 {error}")
        definitions.append(graph)

    class Follower:
        def __init__(self):
            self.x, self.current, self.graph_exec = x, 0, instantiate(definitions[0])

        def __call__(self, picks):
            for pick in picks:
                if pick != self.current:
                    error, reason = try_update(self.graph_exec, definitions[pick])
                    if error:
                        raise RuntimeError(f"更新没有成功：错误码 {error}，{reason}")
                    self.current = pick
                replay(self.graph_exec)

    return Follower()
    ### END SOLUTION


# %% test="make_follower_result" kind="structure" points=1 tags=["gpu"]
COUNTING = """
class Counting:
    '''Counts instantiations, captures begun and graph launches, through cuda.bindings and CuPy, while it is on.'''

    def __init__(self):
        import cupy
        from cuda.bindings import driver, runtime
        self.count, self.kept, self.last = {"made": 0, "captured": 0, "launched": 0}, [], None
        for module, prefix in ((runtime, "cuda"), (driver, "cu")):
            for name, what in (
                ("GraphInstantiate", "made"), ("GraphInstantiateWithFlags", "made"), ("GraphInstantiateWithParams", "made"),
                ("StreamBeginCapture", "captured"), ("StreamBeginCaptureToGraph", "captured"), ("GraphLaunch", "launched"),
            ):
                self.watch(module, prefix + name, (what,))
        for kind in cupy.cuda.Stream.__mro__:
            if "begin_capture" in vars(kind):
                self.watch(kind, "begin_capture", ("captured", "made"))  # its end instantiates

    def watch(self, owner, name, what):
        original = getattr(owner, name, None)
        if original is None:
            return

        def call(*args, **kwargs):
            for each in what:
                self.count[each] += 1
            if what == ("launched",):
                self.last = original, args, kwargs
            return original(*args, **kwargs)

        self.kept.append((owner, name, original))
        setattr(owner, name, call)

    def off(self):
        for each in self.kept:
            setattr(*each)
        return self.count

    def again(self):
        '''Launch once more what was launched last, and wait.'''
        import cupy
        original, args, kwargs = self.last
        original(*args, **kwargs)
        cupy.cuda.runtime.deviceSynchronize()
"""


def advanced(data, lengths, n, picks):
    """What x must hold after these requests."""
    data = data.copy()
    for pick in picks:
        data[: lengths[pick]] = reference.mixed(data[: lengths[pick]], n)
    return data


def watched(function, *args):
    """(what function returns, counts of instantiations, captures and graph launches meanwhile, who counted)."""
    counting = student.define(COUNTING, "Counting")()
    try:
        answer = function(*args)
    finally:
        count = counting.off()
    return answer, count, counting


def proved(counting, pick):
    """The executable graph that was launched last holds the request served last: once more, and it is served once more."""
    counting.again()
    check.equal(x.read(), advanced(data, lengths, n, [pick]), why="把你最后启动的那张可执行图再启动一次，x 应当照最后一个请求再走一遍，它却没有：那个请求的内核不在这张图里。每个请求的工作都要由那张可执行图来做。")


lengths, n = [1000, 300, 600], 4
data = np.arange(1000, dtype=np.uint32)
x = on_gpu(data)
serve, count, _ = watched(student.make_follower, x, lengths, n)
student.value("stream").synchronize()
check.equal(x.read(), data, why="准备的时候 x 就变了。make_follower 只应当录定义、实例化，不执行。")
check.equal(count["made"], 1, why="准备时应当正好实例化一次（用 instantiate，或 cudart、driver 的同名函数；CuPy 的 end_capture 每次都实例化，也算）。")
picks = [1, 0, 0, 2, 1]
_, count, counting = watched(serve, picks)
student.value("stream").synchronize()
data = advanced(data, lengths, n, picks)
check.equal(x.read(), data, why="服务几个请求以后结果不对。换形状时更新成那个长度的定义了吗？更新的错误码看了吗？")
check.equal([count["made"], count["captured"]], [0, 0], why="serve 里又实例化或捕获了。捕获要全部放在 make_follower 里。")
check.equal(count["launched"], len(picks), why="每个请求应当正好启动一次可执行图（用 replay）。是不是逐个启动了内核？")
proved(counting, picks[-1])
### BEGIN HIDDEN TESTS
n, size = int(secret.integers(5, 20)), int(secret.integers(5000, 12000))
lengths = [int(each) for each in secret.integers(1, size + 1, int(secret.integers(5, 9)))]
data = secret.integers(0, 2**32, size, dtype=np.uint32)
x = on_gpu(data)
serve, count, _ = watched(student.make_follower, x, lengths, n)
check.equal(count["made"], 1, why="长度多了，实例化的次数也多了：只许有一张可执行图。")
for _ in range(4):
    picks = [int(each) for each in secret.integers(0, len(lengths), int(secret.integers(10, 40)))]
    _, count, counting = watched(serve, picks)
    student.value("stream").synchronize()
    data = advanced(data, lengths, n, picks)
    check.equal(x.read(), data, why="随机的一串请求，结果不对：有的请求用的是别的长度。前一串最后的长度记住了吗？")
    check.equal([count["made"], count["captured"], count["launched"]], [0, 0, len(picks)], why="serve 里又实例化或捕获了，或者不是每个请求启动一次可执行图。")
    proved(counting, picks[-1])
    data = x.write(secret.integers(0, 2**32, size, dtype=np.uint32))
for pick in (len(lengths) - 1, 0, 0, 1, 0):
    serve([pick])
    student.value("stream").synchronize()
    data = advanced(data, lengths, n, [pick])
    check.equal(x.read(), data, why="一个一个地来，结果不对：可执行图停在哪个长度上，要跨过 serve 的每次调用记住。")
held_up = student.plant("held_up")
for pick in (1, 0, 1):
    early, _ = held_up(student.value("stream"), 200, serve, [pick])
    data = advanced(data, lengths, n, [pick])
    check.equal(x.read(), data, why="stream 正忙的时候来了一个请求，结果不对。")
    if early:
        break
check.that(early, why="stream 正忙的时候，serve 一直等到它做完才返回：serve 只提交，不等待。")
### END HIDDEN TESTS

# %% test="make_follower_speed" kind="speedup" points=2 tags=["gpu"]
SIDE = 4096
start = secret.integers(0, 2**32, SIDE, dtype=np.uint32)
x, y, z = on_gpu(start), on_gpu(start), on_gpu(start)
lengths = sorted(int(each) for each in secret.choice(np.arange(1024, SIDE), 4, replace=False))
picks = [0, 2, 3, 1]
COUNTING = """
class Counting:
    '''Counts instantiations, captures begun and graph launches, through cuda.bindings and CuPy, while it is on.'''

    def __init__(self):
        import cupy
        from cuda.bindings import driver, runtime
        self.count, self.kept, self.last = {"made": 0, "captured": 0, "launched": 0}, [], None
        for module, prefix in ((runtime, "cuda"), (driver, "cu")):
            for name, what in (
                ("GraphInstantiate", "made"), ("GraphInstantiateWithFlags", "made"), ("GraphInstantiateWithParams", "made"),
                ("StreamBeginCapture", "captured"), ("StreamBeginCaptureToGraph", "captured"), ("GraphLaunch", "launched"),
            ):
                self.watch(module, prefix + name, (what,))
        for kind in cupy.cuda.Stream.__mro__:
            if "begin_capture" in vars(kind):
                self.watch(kind, "begin_capture", ("captured", "made"))  # its end instantiates

    def watch(self, owner, name, what):
        original = getattr(owner, name, None)
        if original is None:
            return

        def call(*args, **kwargs):
            for each in what:
                self.count[each] += 1
            if what == ("launched",):
                self.last = original, args, kwargs
            return original(*args, **kwargs)

        self.kept.append((owner, name, original))
        setattr(owner, name, call)

    def off(self):
        for each in self.kept:
            setattr(*each)
        return self.count

    def again(self):
        '''Launch once more what was launched last, and wait.'''
        import cupy
        original, args, kwargs = self.last
        original(*args, **kwargs)
        cupy.cuda.runtime.deviceSynchronize()
"""
counting = student.define(COUNTING, "Counting")()
try:
    serve = student.make_follower(x, lengths, 150)
finally:
    count = counting.off()
check.equal(count["made"], 1, why="准备时应当正好实例化一次：只许有一张可执行图，每个长度一张的不算（CuPy 的 end_capture 每次都实例化，也算）。")
best = reference.make_follower(z, lengths, 150)
check.speedup(
    partial(serve, picks),
    over=partial(reference.serve_by_rebuilding, y, lengths, 150, picks),
    best=partial(best, picks),
    state=(x, z),
    at_least=3.0,
    why="还不够快。serve 里是不是还在捕获、实例化，或者等待？换形状时真正要做的只有一次整图更新。",
)
### BEGIN HIDDEN TESTS
data = x.write(secret.integers(0, 2**32, SIDE, dtype=np.uint32))
picks = [int(each) for each in secret.integers(0, 4, 15)]
counting = student.define(COUNTING, "Counting")()
try:
    serve(picks)
finally:
    count = counting.off()
student.value("stream").synchronize()
for pick in picks:
    data[: lengths[pick]] = reference.mixed(data[: lengths[pick]], 150)
check.equal(x.read(), data, why="计时以后换一串请求，结果不对：快，但没有做完该做的工作。")
check.equal([count["made"], count["captured"], count["launched"]], [0, 0, len(picks)], why="serve 里又实例化或捕获了，或者不是每个请求启动一次可执行图。")
counting.again()
data[: lengths[picks[-1]]] = reference.mixed(data[: lengths[picks[-1]]], 150)
check.equal(x.read(), data, why="把最后启动的那张可执行图再启动一次，x 没有照最后一个请求再走一遍：工作不是它做的。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：自己会停的 WHILE（3 分）
#
# 考拉兹（Collatz）数列：偶数折半，奇数乘 3 加 1，一直到 1。要走几步，只有走了才知道。
#
# 写 `make_collatz(x, steps, rounds)`，造一张图，返回给定的 `DeviceLoop`。每启动一次：
#
# - `x`（uint64，每个数至少是 1）里的每个数都走到 1；`steps`（uint32）的对应元素**加上**它走的步数；
# - `rounds`（uint32，一个元素）是这一次启动里体图执行的遍数，正好等于最长的那一个走的步数；
# - **如果开始时所有的数都已经是 1，体图一遍也不许做**，`rounds` 是 0。上面的 `euclid_graph` 做不到这一点；
# - 循环由 GPU 决定，图里正好有一个 WHILE 节点；启动是异步的；
# - 同一张图要能启动很多次，每次 `x` 里是新的数。
#
# 用给定的三个内核，参数依次是（数组直接给 CuPy 数组，句柄用 `np.uint64(int(handle))`，大小用 `np.uint32(x.size)`）：
#
# | 内核 | 线程数 | 参数 | 做什么 |
# |:--|:--|:--|:--|
# | `collatz_open` | `x.size` | `x, pending, rounds, 大小` | `rounds` 清零；大于 1 的数有几个，**加到** `pending` 里 |
# | `collatz_round` | `x.size` | `x, steps, pending, rounds, 大小` | 每个大于 1 的数走一步；`rounds` 加 1；走完还大于 1 的，加到 `pending` 里 |
# | `decide` | 1 | `handle, pending, rounds` | `pending` 不为 0 就把条件设成 1，否则设成 0；然后 `pending` 清零 |
#
# `pending` 由你准备：一个 uint32，开始时是 0。

# %% tags=["gpu"]
class DeviceLoop:
    """A graph that loops on the device: call it to launch it once on `stream`, without waiting.

    graph: its definition (cudaGraph_t). kept: what the graph's nodes point at, to be kept alive with it.
    """

    def __init__(self, graph, kept):
        self.graph, self.kept = int(graph), kept
        self.graph_exec = instantiate(graph)

    def __call__(self):
        replay(self.graph_exec)


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# WHILE 节点第一次看句柄之前，谁应当先把值写好？写这个值的内核放在 WHILE 的外面还是里面？
# 体图的最后一个内核又要做什么，循环才停得下来？
#
# 默认值是几，在这里还重要吗？函数返回以后，`pending` 由谁保管？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `graph = lab.check_cuda(cudart.cudaGraphCreate(0))`，`new_handle(graph, 默认值)`。
#
# `record_into(graph, 函数)` 把捕获录进一张图，返回它的全部节点，次序就是录的次序；
# `add_conditional(graph, 依赖的节点列表, handle, CONDITION.cudaGraphCondTypeWhile, 1)` 返回体图的列表。
#
# `launch_control(名字, 线程数, *参数)`。数组要在捕获之外、在 `stream` 上准备好。
#
# </details>

# %% solution="make_collatz" tags=["gpu"]
def make_collatz(x, steps, rounds):
    """Make a graph whose every launch walks all numbers of x down to 1, in a loop that the GPU ends by itself.

    x: cupy uint64, 1-D, at least 1 each. steps: cupy uint32, same shape: the steps taken are added. rounds: cupy uint32,
    shape (1,): how often the body ran in this launch. Returns a DeviceLoop.
    """
    ### BEGIN SOLUTION: WHILE 之前先数有没有大于 1 的，由 decide 写好条件；体图里走一步，再由 decide 决定要不要下一遍
    size = np.uint32(x.size)
    with stream:
        pending = cp.zeros(1, cp.uint32)
    stream.synchronize()
    graph = lab.check_cuda(cudart.cudaGraphCreate(0))
    handle = new_handle(graph, 0)

    def ask():
        launch_control("collatz_open", x.size, x, pending, rounds, size)
        launch_control("decide", 1, np.uint64(int(handle)), pending, rounds)

    def walk():
        launch_control("collatz_round", x.size, x, steps, pending, rounds, size)
        launch_control("decide", 1, np.uint64(int(handle)), pending, rounds)

    before = record_into(graph, ask)
    (body,) = add_conditional(graph, before[-1:], handle, CONDITION.cudaGraphCondTypeWhile, 1)
    record_into(body, walk)
    return DeviceLoop(graph, (x, steps, rounds, pending))
    ### END SOLUTION


# %% test="make_collatz" kind="structure" points=3 tags=["gpu"]
def walked(numbers):
    """Collatz steps of each number: numpy uint32."""
    counts = []
    for number in numbers.tolist():
        count = 0
        while number > 1:
            number = 3 * number + 1 if number % 2 else number // 2
            count += 1
        counts.append(count)
    return np.array(counts, np.uint32)


class Walk:
    """The learner's loop on buffers of `size` numbers, and the steps that must have gathered."""

    def __init__(self, size):
        self.x = on_gpu(np.ones(size, np.uint64))
        self.total = secret.integers(0, 1000, size).astype(np.uint32)
        self.steps, self.rounds = on_gpu(self.total), on_gpu(np.full(1, 77, np.uint32))
        self.loop = student.make_collatz(self.x, self.steps, self.rounds)

    def unchanged(self):
        check.equal(self.steps.read(), self.total, why="造图的时候 steps 就变了：make_collatz 只应当造图，不执行。")

    def walks(self, numbers, event):
        numbers = self.x.write(np.asarray(numbers, np.uint64))
        count = walked(numbers)
        self.total = self.total + count
        self.loop.run(1)
        check.equal(self.x.read(), np.ones(numbers.size, np.uint64), why=f"{event}：启动一次以后，不是每个数都走到了 1。循环是不是停早了，或者一遍也没做？decide 读到的 pending 是这一遍的吗？")
        check.equal(self.steps.read(), self.total, why=f"{event}：步数不对。每个数的步数要加到 steps 里。")
        check.equal(self.rounds.read(), np.array([count.max()], np.uint32), why=f"{event}：体图执行的遍数不对，应当正好等于最长的那一个走的步数；都是 1 的时候应当是 0。")


walk = Walk(6)
walk.unchanged()
check.nodes(walk.loop, conditionals=1, why="图里应当正好有一个条件节点。")
walk.walks([1, 2, 3, 6, 7, 27], "六个小数")
walk.walks([1, 1, 1, 1, 1, 1], "全都是 1")
walk.walks([1, 1, 4, 1, 1, 1], "再来一批")
### BEGIN HIDDEN TESTS
# Whoever frees `pending` lets the pool hand its memory to these arrays.
TENANTS = """
class Tenants:
    def __init__(self, stream):
        import gc, cupy
        gc.collect()
        self.made = [cupy.full(1, 0xA5A5A5A5, cupy.uint32) for _ in range(64)]
        with stream:
            self.made += [cupy.full(1, 0xA5A5A5A5, cupy.uint32) for _ in range(64)]
        cupy.cuda.runtime.deviceSynchronize()

    def spoiled(self):
        return sum(int(each.get()[0]) != 0xA5A5A5A5 for each in self.made)
"""
walk = Walk(int(secret.integers(1500, 4000)))
check.nodes(walk.loop, conditionals=1, kernels=(1, 3), why="图里应当正好有一个条件节点，外面只有少数几个内核。循环是不是展开了？")
others = student.define(TENANTS, "Tenants")(student.value("stream"))
size = walk.total.size
walk.walks(secret.integers(1, 60000, size), "一批随机的数")
walk.walks(secret.choice([1, 2, 4, 8], size), "只要几步的数")
walk.walks(np.ones(size), "全都是 1")
long = np.ones(size)
long[int(secret.integers(size))] = int(secret.choice([837799, 626331, 511935, 410011]))
walk.walks(long, "只有一个数要走很久")
walk.walks(secret.integers(1, 2**20, size), "又一批随机的数")
walk.walks(np.ones(size), "又全都是 1")
lone = Walk(1)
for number in (int(secret.integers(2, 10**6)), 1, 2):
    lone.walks([number], "只有一个数")
walk.walks(secret.integers(1, 60000, size), "两个循环轮流用")
held_up = student.plant("held_up")
for _ in range(3):
    numbers = walk.x.write(secret.integers(1, 60000, size).astype(np.uint64))
    walk.total = walk.total + walked(numbers)
    early, _ = held_up(student.value("stream"), 200, walk.loop)
    check.equal(walk.steps.read(), walk.total, why="stream 正忙的时候启动，步数不对：循环要排在 stream 上已有的工作后面，由 GPU 自己走完。")
    if early:
        break
check.that(early, why="stream 正忙的时候，启动一直等到它做完才返回：循环由 GPU 决定，CPU 只启动，不等待，也不读 pending。")
check.equal(others.spoiled(), 0, why="重放写坏了别人的数组：pending 已经被回收，内存池把它给了别人。把它交给 DeviceLoop 保管。")
### END HIDDEN TESTS

# %% [markdown] tags=["instructor"]
# 给教师：练习一的 `Planted` 在指定的形状上让捕获以四种方式失败（录一半答复 `False`、不答复、空图、捕获被破坏），也让 `prepare` 和逐个启动失败；
# 每次之后都再试同一个形状（不许记成可执行图的形状）和原来的形状（应当还是重放）。忽略 910 的解答会重放旧图，状态对不上。
# 练习二的隐藏测试分五类流量随机出题，五本账分别报错。练习三每个请求都换长度，`mix` 的状态不收敛，漏更新一次就对不上；实例化和捕获的次数在调用前后数，计时的那一个也数；
# 最后启动的可执行图由考官再启动一次，里面没有那个请求的就露馅。
# 练习一、三、四都在 `stream` 正忙的时候再试一次：紧跟在占住它的内核后面记一个事件，调用返回时看这个事件，解答要是等过 `stream`，它就已经完成了。
# 不看 `stream` 本身：等过以后再放进去一点工作，它又忙了，看不出等过。
# 练习四每次启动换数据，也考“全都是 1”（一遍也不做）和需要五百多步的数；`rounds` 由内核在设备上数，展开成固定次数的解答会露馅。

# %% [markdown]
# ## 小结
#
# | 以前的说法 | 实验以后的说法 |
# |:--|:--|
# | 形状变了，优先 `cudaGraphExecUpdate`，别重新捕获 | 更新省的是实例化；为更新而重新捕获，捕获的钱照付。留住定义，更新才真的便宜 |
# | 更新总比逐个启动好 | 看一个形状能用几次；个个都换又没有定义库，逐个启动可能更便宜 |
# | 同一个引擎，形状之间总能更新 | 看骨架：节点数和种类不变才行，要问驱动 |
# | 更新成功，图就是对的 | 更新只保证和定义一样；定义录的是不是这个请求，要自己核对 |
# | 被拒绝了，旧图还能顶一下 | 旧图只属于旧形状；改不动就重建，录不成就逐个启动 |
# | 循环次数要由 CPU 决定 | WHILE 让 GPU 自己停；IF、SWITCH 让它自己选 |
#
# **带走三句话**
#
# 1. 先问两个频率：多久换一次形状，多久来一个新形状；再按量出来的单价选。
# 2. 五样都核对：准备、答复、错误码、节点数、更新的结果。哪一样不成，都不重放旧图。
# 3. 只有 GPU 知道的事，让 GPU 决定：少一次拷回来问 CPU 的往返。一轮省多少，看你那张图。
#
# 下一步：《项目：一张图的文字识别》把这些用到真实的模型上；《动态形状的性能陷阱》里有十个坏掉的程序等你来修。
