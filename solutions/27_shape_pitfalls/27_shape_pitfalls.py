# %% [markdown]
# # 动态形状的性能陷阱
#
# 三条值班记录。第一条：“上线两天，所有人拿到的都是同一个答案，日志里一行错误也没有。”第二条：“用了图，反而比不用还慢。”
# 第三条：“单独测永远是对的，一忙就错，加一行打印又好了。”
#
# 它们都来自真实的项目，都发生在“动态形状 + CUDA 图”的交界处。这一章收了十个这样的程序，每个不超过 40 行，
# 每个的毛病都能**稳定地**重现，不靠运气。你来当医生：先看症状，再找病因，再动手术。
#
# **学完以后，你能够**
#
# - 分清两种毛病：**错的**和**慢的**，并且知道为什么一定先查错，再查慢；
# - 从计数、节点数、长度和缓冲的规律里，推出是哪一种病；
# - 让“偶尔出错”变成“必然出错”：用一个慢内核把时间差撑开，用涂满垃圾的缓冲让旧结果现形；
# - 修好十个程序，而且修得不过头：不靠处处同步，不靠每次重来。
#
# **需要的基础**：《每个形状一张图》里的键、分桶和哨兵；《执行上下文与显存》里上下文有什么状态、谁不能和谁同时跑。
#
# **时间**：约 90 分钟，其中练习约 60 分钟。
#
# 下一格导入的 `check`、`student` 等五个名字只给练习后面的测试单元用，现在不用管它们。

# %%
import numpy as np
from functools import partial
from launchlab import lab
from launchlab.exam import check, on_gpu, reference, secret, student

lab.here()

# %% [markdown]
# ## 诊室里的东西
#
# 先认识要用的东西，一共四样：一个引擎，几个小函数，三个内核，一套仪器。
#
# ### 引擎
#
# 和《每个形状一张图》里的引擎做法相同：只算小整数，所以不管 TensorRT 用哪种策略，结果都一位不差，**错一点就看得见**。
#
# - 输入 `x`：(长度, 64)，一行一个 token；`mask`：(长度, 1)，1 是真的 token，0 是填充；
# - 几层“矩阵乘、ReLU、折回 −7…8”，再把所有真 token 的行加起来，加回每一行。所以每一行都受整句话的影响。
#
# `PLANS` 列出两个引擎，只有 Profile 的范围不同：每个有两个 Profile，0 号给短句，1 号给长句。

# %%
HIDDEN, LAYERS = 64, 8
LONGEST = 512
PLANS = {  # name: the profiles, each (min, opt, max) lengths
    "wide": ((8, 32, 64), (8, 128, 512)),
    "tight": ((10, 20, 40), (10, 100, 300)),
}


def weights(layer):
    """Weights of one layer: float32, shape (HIDDEN, HIDDEN), values -1, 0, 1."""
    return np.random.default_rng(27 + layer).integers(-1, 2, (HIDDEN, HIDDEN)).astype(np.float32)


def fold(t):
    """Bring integers (any float dtype) back to -7 … 8."""
    return t - 16 * np.floor(t / 16) - 7


def expected(x):
    """The right y, by NumPy: float32 (length, HIDDEN). x: float32 integers in -8 … 8, all rows real."""
    h = np.asarray(x, np.float32)  # integers below 2**24 are exact
    for layer in range(LAYERS):
        h = fold(np.maximum(h @ weights(layer), 0))
    return fold(h + fold(h.sum(axis=0, keepdims=True)))


# %% [markdown]
# 构建和装载都是前几章讲过的写法。`make_plan` 会记住已经构建过的计划文件。
#
# ### 几个小函数
#
# 十个程序都用它们，名字要记住：
#
# - `must(result, what)`：`result` 是 `False` 或 `None`（TensorRT 说“不”的方式）就抛出 `RuntimeError`，否则原样还给你；
# - `new_context(engine, profile)`：一个新的上下文，选好 Profile；
# - `bind(context, x, mask, y)`：设两个形状、三个地址，每一步都查返回值；
# - `enqueue(context, lane=stream)`：入队一次，查返回值；
# - `capture(context)`：在 `stream` 上捕获一次入队，返回 `cupy.cuda.Graph`。上下文要先这样入队过一次（预热）；
# - `kernel_nodes(graph)`：问驱动，图里有几个内核节点；
# - `zeros(rows)`、`ones(rows)`：在 `stream` 上建 (rows, HIDDEN) 的零、(rows, 1) 的一。

# %% tags=["gpu"]
import functools

import cupy as cp
import tensorrt as trt
from cuda.bindings import runtime as cudart

stream = cp.cuda.Stream(non_blocking=True)
loader = trt.Runtime(lab.trt_logger())


def must(result, what):
    """Return result, unless it is False or None, TensorRT's ways of refusing: then RuntimeError with its reasons."""
    if result is False or result is None:
        raise RuntimeError(f"{what}没有成功：" + ("；".join(lab.trt_errors()) or "TensorRT 没有说原因"))
    return result


@functools.cache
def builder():
    """The one builder of this process, made when first needed: loading its library takes seconds."""
    return trt.Builder(lab.trt_logger())


@functools.cache
def make_plan(name):
    """Build the network with the profiles PLANS[name]. Returns the plan, bytes. RuntimeError if TensorRT refuses."""
    network = builder().create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    kept = []  # TensorRT does not copy weights: they must live until the build is done

    def constant(array):
        kept.append(np.ascontiguousarray(array, np.float32))
        return network.add_constant(kept[-1].shape, trt.Weights(kept[-1])).get_output(0)

    def element(a, b, operation):
        return network.add_elementwise(a, b, operation).get_output(0)

    sixteen, seven = constant(np.full((1, 1), 16)), constant(np.full((1, 1), 7))

    def folded(t):
        whole = element(element(t, sixteen, trt.ElementWiseOperation.FLOOR_DIV), sixteen, trt.ElementWiseOperation.PROD)
        return element(element(t, whole, trt.ElementWiseOperation.SUB), seven, trt.ElementWiseOperation.SUB)

    x = network.add_input("x", trt.DataType.FLOAT, (-1, HIDDEN))
    mask = network.add_input("mask", trt.DataType.FLOAT, (-1, 1))
    for tensor in (x, mask):
        tensor.set_dimension_name(0, "length")
    h, none = x, trt.MatrixOperation.NONE
    for layer in range(LAYERS):
        product = network.add_matrix_multiply(h, none, constant(weights(layer)), none).get_output(0)
        h = folded(network.add_activation(product, trt.ActivationType.RELU).get_output(0))
    masked = element(h, mask, trt.ElementWiseOperation.PROD)
    total = network.add_reduce(masked, trt.ReduceOperation.SUM, 1 << 0, True).get_output(0)  # over axis 0, kept as 1
    y = folded(element(h, folded(total), trt.ElementWiseOperation.SUM))
    y.name = "y"
    network.mark_output(y)

    config = builder().create_builder_config()
    config.builder_optimization_level = 1  # quick to build; this chapter is not about the best tactic
    config.progress_monitor = lab.build_progress()
    for lengths in PLANS[name]:
        profile = builder().create_optimization_profile()
        profile.set_shape("x", *((length, HIDDEN) for length in lengths))
        profile.set_shape("mask", *((length, 1) for length in lengths))
        config.add_optimization_profile(profile)
    with lab.timing_cache(config):
        plan = must(builder().build_serialized_network(network, config), "构建")
    kept.clear()  # the plan holds the weights now
    return bytes(plan)


def load(plan):
    """Load a plan (bytes). Returns a trt.ICudaEngine. RuntimeError if TensorRT refuses."""
    return must(loader.deserialize_cuda_engine(plan), "装载")


def zeros(rows):
    """float32 zeros (rows, HIDDEN), made on `stream`."""
    with stream:
        return cp.zeros((rows, HIDDEN), cp.float32)


def ones(rows):
    """float32 ones (rows, 1), made on `stream`: the mask of a request without padding."""
    with stream:
        return cp.ones((rows, 1), cp.float32)


def new_context(engine: "trt.ICudaEngine", profile):
    """A fresh context with this profile. RuntimeError if TensorRT refuses."""
    context = must(engine.create_execution_context(), "创建执行上下文")
    if context.active_optimization_profile != profile:
        must(context.set_optimization_profile_async(profile, stream.ptr), f"选择 {profile} 号 Profile ")
        stream.synchronize()
    return context


def bind(context: "trt.IExecutionContext", x, mask, y):
    """Give a context its shapes and addresses. RuntimeError if TensorRT refuses one.

    x: cupy float32 (length, HIDDEN); mask: at least (length, 1), of which the first length rows are read; y: (length, HIDDEN).
    """
    must(context.set_input_shape("x", x.shape), f"把 x 的形状设成 {x.shape} ")
    must(context.set_input_shape("mask", (len(x), 1)), f"把 mask 的形状设成 {(len(x), 1)} ")
    for name, array in (("x", x), ("mask", mask), ("y", y)):
        must(context.set_tensor_address(name, array.data.ptr), f"设 {name} 的地址")


def enqueue(context: "trt.IExecutionContext", lane=stream):
    """Enqueue one inference on the stream `lane`. RuntimeError if it is refused."""
    must(context.execute_async_v3(lane.ptr), "入队")


def capture(context: "trt.IExecutionContext"):
    """Capture one enqueue on `stream`. Returns a cupy Graph. The context must have been enqueued once like this. RuntimeError: refused."""
    stream.synchronize()
    with stream:
        stream.begin_capture()
        try:
            enqueue(context)
        finally:
            graph = stream.end_capture()
    return graph


def kernel_nodes(graph):
    """How many kernel nodes the driver counts in a cupy Graph."""
    _, count = lab.check_cuda(cudart.cudaGraphGetNodes(graph.graph, 0))
    nodes = lab.check_cuda(cudart.cudaGraphGetNodes(graph.graph, count))[0] if count else []
    return sum(lab.check_cuda(cudart.cudaGraphNodeGetType(node)).name.endswith("Kernel") for node in nodes)


# %% [markdown]
# ### 三个内核
#
# - `launch_spin(ms)`：让当前流空转若干毫秒。它是“让偶然变成必然”的工具：把时间差撑到人也来得及看的程度；
# - `launch_blend(x, y, i)`：把 `y` 搅进 `x`（折回小整数），当作引擎后面的一长串小内核；
# - `launch_halve(source, target)`：把一串 32 位整数两两合成一个，长度减半（奇数个时最后一个单独成对）。

# %% tags=["gpu"]
kernels = cp.RawModule(
    code=r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}

extern "C" __global__ void blend(float *x, const float *y, int size, int i) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    float sum = x[t] + y[(t + 65 * i) % size] + (float)i;
    x[t] = sum - 16.0f * floorf(sum / 16.0f) - 7.0f;
}

extern "C" __global__ void halve(const unsigned int *source, unsigned int *target, int n) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (2 * t >= n) return;
    unsigned int v = source[2 * t] * 0x9e3779b9u + (2 * t + 1 < n ? source[2 * t + 1] : 1u);
    v ^= v >> 15;
    v *= 0x2c1b3c6du;
    v ^= v >> 12;
    target[t] = v;
}
"""
)
spin, blend, halve = (kernels.get_function(name) for name in ("spin", "blend", "halve"))
BLOCK = 256


def blocks(threads):
    """A grid of enough blocks for so many threads."""
    return (max(1, -(-threads // BLOCK)),)


def launch_spin(ms):
    """Keep one GPU thread busy for ms milliseconds, on the current stream. Returns at once."""
    spin((1,), (1,), (np.uint64(ms * 1_000_000),))


def launch_blend(x, y, i):
    """x = fold(x + y shifted by i + i), on the current stream. x, y: cupy float32, same size, integers in -8 … 8."""
    blend(blocks(x.size), (BLOCK,), (x, y, np.int32(x.size), np.int32(i)))


def launch_halve(source, target):
    """Mix pairs of source (cupy uint32, n) into target (at least ceil(n / 2)), on the current stream."""
    halve(blocks(-(-source.size // 2)), (BLOCK,), (source, target, np.int32(source.size)))


with stream:  # the first launch of a kernel loads its code, which a capture may not allow
    launch_spin(0)
    launch_blend(zeros(1), zeros(1), 0)
    launch_halve(cp.zeros(2, cp.uint32), cp.zeros(1, cp.uint32))
stream.synchronize()

# %% [markdown]
# 它们的 NumPy 版，用来核对：

# %%
def blended(x, y, i):
    """x after launch_blend(x, y, i), by NumPy: a new float32 array."""
    return fold(x + np.roll(y.ravel(), -65 * i).reshape(x.shape) + i)


def peak(x):
    """What is left of x (uint32, n >= 1) when it is halved until one number remains, at least once. Returns uint32 (1,)."""
    v = np.asarray(x, np.uint32)
    while True:
        pairs = np.ones(2 * -(-len(v) // 2), np.uint32)
        pairs[: len(v)] = v
        v = pairs[0::2] * np.uint32(0x9E3779B9) + pairs[1::2]
        v ^= v >> np.uint32(15)
        v *= np.uint32(0x2C1B3C6D)
        v ^= v >> np.uint32(12)
        if len(v) == 1:
            return v


# %% [markdown]
# ### 仪器
#
# 出毛病的程序自己不会承认，所以要从外面看。`Watched(engine, stream)` 假扮成引擎：每个调用都转给真的引擎，顺便记下来：
#
# - `contexts`：创建过几个上下文；
# - `enqueues`：每次入队一行，`[上下文的编号, 流的句柄, 是不是在捕获里, Profile, 长度]`；
# - `refusals`：TensorRT 说过几次“不”。
#
# `burst(target, lane, requests, ms)` 先让流 `lane` 忙上 `ms` 毫秒，再把一串请求**一口气**交给 `target.infer`，中间不等，最后一起等。
# 它返回交出请求用了几毫秒。能让流水线里的错误原形毕露的，就是这个“一口气”。
#
# 测试也用这套仪器。细节可以跳过，往下看病人。

# %%
INSTRUMENTS = r'''
import time

import cupy as cp
import numpy as np

SOURCE = r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}

extern "C" __global__ void add(float *y, int size, const float *amount) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size && *amount != 0.0f) y[t] += *amount;
}
"""
module = cp.RawModule(code=SOURCE)
spin_kernel, add_kernel = (module.get_function(name) for name in ("spin", "add"))


def spin(ms):
    spin_kernel((1,), (1,), (np.uint64(ms * 1_000_000),))


def add(address, size, amount):
    add_kernel((-(-size // 256),), (256,), (np.uint64(address), np.int32(size), amount))


def wait():
    cp.cuda.runtime.deviceSynchronize()


spin(0)
trial = cp.zeros(2, cp.float32)
add(trial.data.ptr, 1, trial[1:])
wait()


class Foreign:
    """A stream of which only the handle is known, by the CUDA stream protocol."""

    def __init__(self, handle):
        self.handle = int(handle)

    def __cuda_stream__(self):
        return 0, self.handle


class Context:
    """Stands for a context, and notes what is asked of it."""

    def __init__(self, watched, real, number):
        self.__dict__.update(_watched=watched, _real=real, _number=number, _profile=0, _length=None)
        watched.real.append(real)  # it lives on, so that dropping it too early is a note and no crash

    def __getattr__(self, name):
        return getattr(self._real, name)

    def __setattr__(self, name, value):
        setattr(self._real, name, value)

    def _noted(self, accepted):
        self._watched.refusals += accepted is False
        return accepted

    def set_optimization_profile_async(self, profile_index, stream_handle):
        self._watched.switches += 1
        self.__dict__["_profile"] = int(profile_index)
        return self._noted(self._real.set_optimization_profile_async(profile_index, stream_handle))

    def set_input_shape(self, name, shape):
        accepted = self._noted(self._real.set_input_shape(name, shape))
        if accepted and name == "x":
            self.__dict__["_length"] = int(tuple(shape)[0])
        return accepted

    def execute_async_v3(self, stream_handle):
        watched, capturing = self._watched, bool(cp.cuda.runtime.streamIsCapturing(stream_handle))
        watched.enqueues.append([self._number, int(stream_handle), capturing, self._profile, self._length])
        if watched.mood == "slow":
            with cp.cuda.Stream.from_external(Foreign(stream_handle)):
                spin(15)
        if capturing and watched.mood == "torn":
            with cp.cuda.Stream.from_external(Foreign(stream_handle)):
                spin(0)
        if capturing and watched.mood in ("shy", "torn"):
            return self._noted(False)
        if capturing and watched.mood == "deaf":
            stream_handle = watched.elsewhere.ptr
        accepted = self._noted(self._real.execute_async_v3(stream_handle))
        if capturing and accepted and watched.mood == "marked":
            with cp.cuda.Stream.from_external(Foreign(stream_handle)):
                add(self._real.get_tensor_address("y"), int(np.prod(tuple(self._real.get_tensor_shape("y")))), watched.amount)
        return accepted

    def __del__(self):
        watched = self._watched
        watched.alive -= 1
        watched.dropped_busy += not watched.stream.is_capturing() and not watched.stream.done


class Watched:
    """Stands for an engine. mood: "" honest; "shy" refuses to be captured, "torn" too, when something is recorded already; "deaf" enqueues elsewhere
    while capturing; "slow" spins first; "marked" adds to y, in all that is captured of it, the amount that mark(amount) has set last."""

    def __init__(self, engine, stream, mood=""):
        self.engine, self.stream, self.mood, self.elsewhere = engine, stream, mood, cp.cuda.Stream(non_blocking=True)
        self.amount = cp.zeros(1, cp.float32)
        wait()
        self.real, self.enqueues, self.contexts, self.switches, self.refusals, self.alive, self.dropped_busy = [], [], 0, 0, 0, 0, 0

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def count(self):
        return len(self.enqueues)

    def mark(self, amount):
        wait()
        self.amount.fill(amount)
        wait()

    def create_execution_context(self, *arguments, **more):
        real = self.engine.create_execution_context(*arguments, **more)
        self.contexts += 1
        self.alive += 1
        return real if real is None else Context(self, real, self.contexts)


def burst(target, lane, requests, ms=0):
    """Call target.infer(*request) for each, without waiting, behind a kernel that keeps lane busy; then wait. Returns ms on the host."""
    wait()
    if ms:
        with lane:
            spin(ms)
    begin = time.perf_counter()
    try:
        for request in requests:
            target.infer(*request)
    finally:
        spent = (time.perf_counter() - begin) * 1000
        wait()
    return spent


def tenants(stream, sizes):
    """Arrays of so many int32, filled: whoever freed memory that a graph still uses has given it to them."""
    import gc

    gc.collect()
    held = []
    for size in sizes:
        held += [cp.full(size, 0x5A5A5A5A, cp.int32) for _ in range(2)]
        with stream:
            held += [cp.full(size, 0x5A5A5A5A, cp.int32) for _ in range(2)]
    wait()
    return held


class Late:
    """write(x) for a Feeder: after ms milliseconds, x = source. Notes whether that was on the stream `inference`."""

    def __init__(self, source, ms, inference):
        self.source, self.ms, self.inference, self.same = source, ms, inference, False

    def __call__(self, x):
        self.same = self.same or cp.cuda.get_current_stream().ptr == self.inference.ptr
        if self.ms:
            spin(self.ms)
        x[...] = self.source
'''

# %% [markdown]
# 演示里这样用：先生成一个请求，跑一遍，对答案。`fresh(length)` 给出输入、涂满垃圾的输出和正确答案。

# %% tags=["demo", "gpu"]
import matplotlib.pyplot as plt

lab.plot_style()
tools = {}
exec(compile(INSTRUMENTS, "<instruments>", "exec"), tools)
Watched, burst, Late = tools["Watched"], tools["burst"], tools["Late"]
engine = load(make_plan("wide"))
POISON = 99.0


def fresh(length):
    """A request: x, a poisoned y (cupy), and the right y (numpy)."""
    host = np.random.default_rng().integers(-8, 9, (length, HIDDEN)).astype(np.float32)
    with stream:
        x, y = cp.asarray(host), cp.full((length, HIDDEN), POISON, cp.float32)
    stream.synchronize()
    return x, y, expected(host)


def state_of(y, want):
    """What an output looks like, in a word."""
    cp.cuda.Device().synchronize()
    got = y.get()
    if np.array_equal(got, want):
        return "对"
    return "没有写过" if np.all(got == POISON) else "错"


def seen(watched, requests):
    """One line of evidence about a run of some requests."""
    captured = sum(line[2] for line in watched.enqueues)
    return (
        f"{requests} 个请求：上下文 {watched.contexts} 个，入队 {len(watched.enqueues)} 次（其中在捕获里 {captured} 次），"
        f"TensorRT 说了 {watched.refusals} 次“不”。"
    )


x, y, want = fresh(40)
context = new_context(engine, 1)
bind(context, x, ones(40), y)
enqueue(context)
lab.say(f"40 行的请求，直接入队：**{state_of(y, want)}**。", measured=False)

# %% [markdown]
# ### 先查错，再查慢
#
# 十个病人里有七个是**错的**：答案不对，或者早晚不对。三个是**慢的**：答案一直对，只是图白用了。
#
# 次序不能反。错的程序往往跑得飞快：一张空图眨眼就“算”完一个请求。**拿错的程序测出来的速度，没有意义。**
# 所以看病的第一步永远是：换新数据，输出先涂满垃圾，逐个对答案；全对了，才拿起秒表。

# %% [markdown]
# ## 第一组：图记住的是旧的
#
# ### 一号：所有人都拿到第一个人的缓冲
#
# 现场：“图像换了，结果不换。重启以后第一张永远是对的。”（onnxruntime 的 20050 号 issue，imp 的 1648 号 issue 是同一种病。）

# %% tags=["gpu"]
class StaleAddress:
    """y = engine(x), by one graph for each length."""

    def __init__(self, engine):
        self.engine, self.kept = engine, {}

    def infer(self, x, y):
        """On `stream`, without waiting. x, y: cupy float32 (length, HIDDEN)."""
        n = len(x)
        if n not in self.kept:
            context, mask = new_context(self.engine, 1), ones(n)
            bind(context, x, mask, y)
            enqueue(context)
            self.kept[n] = context, mask, capture(context)
        self.kept[n][-1].launch(stream)


# %% tags=["demo", "gpu"]
watched = Watched(engine, stream)
patient = StaleAddress(watched)
calls = [fresh(20) for _ in range(4)]
rows = []
for number, (x, y, want) in enumerate(calls):
    patient.infer(x, y)
    rows.append((number, f"{x.data.ptr:#x}", state_of(y, want)))
lab.say(lab.table(("请求", "x 的地址", "y"), rows) + "\n\n" + seen(watched, len(rows)), measured=False)

# %% [markdown]
# **症状**：第一个请求对，后面的 `y` 一个字节也没有写过。没有报错，计数看起来非常健康：一次捕获，次次命中。
#
# **病因**：图里写死的是第一个请求的**地址**。后面的请求长度一样，缓冲不一样，图照样去读第一个人的 `x`，写第一个人的 `y`。
#
# **治法**有两条。把地址也放进键（《每个形状一张图》里的做法），适合缓冲会重复的服务。
# 如果每个请求的缓冲都是新的，那样每次都要重新捕获；这时要另一条：**图用自己的固定缓冲，数据拷进来，结果拷出去**。

# %% [markdown]
# ### 二号：上一个人的尾巴
#
# 现场：“跑几个小时以后，短请求开始出错；把服务重启，又好了。”（sglang 的 24401 号、rvllm 的 32 号改动修的就是它。）

# %% tags=["gpu"]
class DirtyPadding:
    """y = engine(x), for up to `rows` rows: padded to that many, by one graph."""

    def __init__(self, engine, rows):
        self.x, self.y = zeros(rows), zeros(rows)
        with stream:
            self.mask = cp.zeros((rows, 1), cp.float32)
        self.context = new_context(engine, 1)
        bind(self.context, self.x, self.mask, self.y)
        enqueue(self.context)
        self.graph = capture(self.context)

    def infer(self, x, y):
        """On `stream`, without waiting. x, y: cupy float32 (n, HIDDEN), n <= rows."""
        n = len(x)
        with stream:
            self.x[:n] = x
            self.mask[:n] = 1
            self.graph.launch(stream)
            y[...] = self.y[:n]


# %% tags=["demo", "gpu"]
patient = DirtyPadding(engine, 64)
rows = []
for length in (12, 30, 30, 18, 45, 44):
    x, y, want = fresh(length)
    patient.infer(x, y)
    rows.append((length, state_of(y, want)))
lab.say(lab.table(("长度", "y"), rows), measured=False)

# %% [markdown]
# **症状**：越来越长的请求都对，**比前面某一个短**的就错。单独测任何一个请求都是对的。
#
# **病因**：`mask` 只写了前 `n` 行，后面还留着上一个请求的 1；那些行的 `x` 也还是别人的。
#
# **治法**：每次重放之前，填充的行**全部**写上中性的值，一直写到桶的最后一行。中性的值是什么要看网络：
# 这里一行零经过“折回”就不再是零，所以只把 `x` 填零是不够的；而别人的行里万一有 NaN，$0 \times \mathrm{NaN}$ 还是 NaN，只清 `mask` 也不够
# （NaN 经过 ReLU 还在不在，各种实现不一样，别指望它）。

# %% [markdown]
# ### 三号：快得离谱
#
# 现场：“上了图以后快了一百倍！”三天后：“结果怎么都是捕获那一刻的？”（pytorch 的 87894 号 issue。）

# %% tags=["gpu"]
class EmptyGraph:
    """y = engine(x) for two fixed buffers, on the stream `lane`."""

    def __init__(self, engine, x, y, lane):
        self.x, self.y, self.lane, self.mask = x, y, lane, ones(len(x))
        self.context = new_context(engine, 1)
        bind(self.context, x, self.mask, y)
        enqueue(self.context)  # warm up
        stream.synchronize()
        with lane:
            lane.begin_capture()
            enqueue(self.context)
            self.graph = lane.end_capture()

    def infer(self):
        """What x holds now becomes y. On `lane`, without waiting."""
        self.graph.launch(self.lane)


# %% tags=["demo", "gpu"]
x, y, want = fresh(40)
lane = cp.cuda.Stream(non_blocking=True)
patient = EmptyGraph(engine, x, y, lane)
rows = [("刚捕获完，还没有启动过", state_of(y, want))]
for number in (1, 2):
    host = np.random.default_rng().integers(-8, 9, x.shape).astype(np.float32)
    with stream:
        x.set(host)
        y.fill(POISON)
    stream.synchronize()
    patient.infer()
    rows.append((f"换了数据，第 {number} 次启动", state_of(y, expected(host))))
lab.say(lab.table(("时刻", "y"), rows) + f"\n\n图里的内核：**{kernel_nodes(patient.graph)}** 个。", measured=False)

# %% [markdown]
# **症状**：以后换数据，`y` 再也不变。启动次数、返回码全都正常。第一行的“对”不算证据：预热那一次就已经把 `y` 写好了，
# 健康的程序也是这样；它只是让人放了心。
#
# **病因**：`lane` 在捕获，可是 `enqueue` 默认入队到 `stream`。那次推理当场就真的执行了，`lane` 上什么也没有录到。
# 图是空的，启动一张空图当然快。插件（plugin）不用传给它的流、或者当前流没有切换，都会落到同一个结果。
#
# **治法**：入队到正在捕获的那条流上；捕获完**数一数节点**。一张没有内核的图，绝不能拿去重放：要报错，或者回退。

# %% [markdown]
# ### 四号：更新被拒绝了，谁也没听见
#
# 现场：“跑了几千步，突然全错。”（tiny-cuda-nn 的 206 号 issue、llama.cpp 的 7302 号改动：形状一变，图的拓扑就变。）
#
# 这个程序不用引擎，只用一个内核：把一串数反复减半，直到只剩一个。长度变了，减半的次数可能也变，图里的节点就多一个或少一个。
# `record_pyramid` 录下这一串；每次录一遍，再用 `cudaGraphExecUpdate` 更新可执行图，省下实例化。

# %% tags=["gpu"]
def record_pyramid(x, rooms, out):
    """Capture, on `stream`, the halving of x until one number is left, in out. Returns a definition, a cudaGraph_t, yours to destroy.

    x: cupy uint32 (n,), n >= 1; rooms: two scratch arrays, cupy uint32 (2, at least ceil(n / 2)); out: cupy uint32 (1,).
    """
    relaxed = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, relaxed))
    source, room = x, 0
    with stream:
        while True:
            half = -(-len(source) // 2)
            target = out if half == 1 else rooms[room, :half]
            launch_halve(source, target)
            if half == 1:
                return lab.check_cuda(cudart.cudaStreamEndCapture(stream.ptr))
            source, room = target, 1 - room


class StaleUpdate:
    """The peak of x, by one executable graph that is updated for each request."""

    def __init__(self, most):
        with stream:
            self.rooms = cp.zeros((2, most), cp.uint32)
        self.live = None

    def infer(self, x, out):
        """On `stream`, without waiting. x: cupy uint32 (n,), 1 <= n <= most; out: cupy uint32 (1,)."""
        definition = record_pyramid(x, self.rooms, out)
        if self.live is None:
            self.live = lab.check_cuda(cudart.cudaGraphInstantiate(definition, 0))
        else:
            cudart.cudaGraphExecUpdate(self.live, definition)
        lab.check_cuda(cudart.cudaGraphDestroy(definition))
        lab.check_cuda(cudart.cudaGraphLaunch(self.live, stream.ptr))


# %% tags=["demo", "gpu"]
patient = StaleUpdate(4096)
rows, kept = [], []  # the arrays stay alive: a stale graph still writes to old ones
for length in (200, 256, 129, 300, 40, 180):
    host = np.random.default_rng().integers(0, 2**32, length, dtype=np.uint32)
    with stream:
        x, out = cp.asarray(host), cp.zeros(1, cp.uint32)
    kept.append((x, out))
    patient.infer(x, out)
    stream.synchronize()
    got = out.get()
    rows.append((length, (length - 1).bit_length(), "对" if np.array_equal(got, peak(host)) else "没有写过" if got[0] == 0 else "错"))
lab.say(lab.table(("长度", "减半几次", "结果"), rows), measured=False)

# %% [markdown]
# **症状**：减半次数和第一个请求一样的都对，不一样的都错。
#
# **病因**：拓扑不同，`cudaGraphExecUpdate` 返回 910（`cudaErrorGraphExecUpdateFailure`），可执行图**原封不动**。
# 程序没看返回值，启动的还是上一次成功的那张：上一个人的地址，上一个人的长度。
#
# **治法**：看返回值。成功就启动；被拒绝就销毁旧的，重新实例化，并且记一笔。被拒绝不是故障，是正常的一种回答。

# %% [markdown]
# ## 练习一：治好前四个（4 分）
#
# 四个解答单元，各 1 分。可以用的给定名字：
#
# - `np`、`partial`、`lab`、`HIDDEN`、`LONGEST`、`PLANS`、`fold`、`expected`、`blended`、`peak`；
# - 需要 GPU 的：`cp`、`trt`、`cudart`、`stream`、`must`、`load`、`zeros`、`ones`、`new_context`、`bind`、`enqueue`、`capture`、`kernel_nodes`、
#   `launch_spin`、`launch_blend`、`launch_halve`、`record_pyramid`。
#
# 病人的类（`StaleAddress` 等）可以抄过来改。`fresh`、`engine`、`Watched` 来自演示单元，评分时不运行，解答里不能用。
#
# 四个都有三条共同的规矩：
#
# - 全部工作放在 `stream` 上（或者题目指定的流上），**不在主机上等**：几个请求会一口气交进来。只有第一次备好一张图的时候例外，`capture` 自己会等；
# - 调用者的 `x` 不能被改；
# - 不许每个请求都重来：入队、捕获的次数会被数。
#
# ### 一号的手术：`FixedAddress(engine)`
#
# `infer(x, y)`：每个请求的缓冲都可能是新的。每种长度最多创建一个上下文，最多入队两次（预热一次，捕获一次）：
# 一种长度一张图，见过的长度只拷贝、启动它的图，不再入队。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 图只认识捕获时的地址。哪些地址由你说了算，永远不变？调用者的数据怎么到那里去？
# 拷贝放在哪条流上，才能保证前一个请求的图读完了，后一个请求的数据才写进来？
# `infer` 返回以后，谁还拿着那些固定的缓冲？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `zeros(n)`、`ones(n)` 建缓冲；`new_context`、`bind`、`enqueue`、`capture` 和病人里的用法一样；`with stream:` 里，`a[...] = b` 是 `stream` 上的异步拷贝；`graph.launch(stream)`。
#
# </details>

# %% solution="FixedAddress" tags=["gpu"]
class FixedAddress:
    """y = engine(x), by one graph for each length, whatever the buffers."""

    def __init__(self, engine):
        ### BEGIN SOLUTION: 一种长度一份：固定的缓冲、上下文、图
        self.engine, self.kept = engine, {}
        ### END SOLUTION

    def infer(self, x, y):
        """On `stream`, without waiting. x, y: cupy float32 (length, HIDDEN), each time perhaps other ones."""
        ### BEGIN SOLUTION: 拷进固定缓冲，启动，拷出去，三步都在 stream 上；没见过的长度先备好
        n = len(x)
        if n not in self.kept:
            own_x, own_y, mask, context = zeros(n), zeros(n), ones(n), new_context(self.engine, 1)
            bind(context, own_x, mask, own_y)
            enqueue(context)
            self.kept[n] = own_x, own_y, mask, context, capture(context)
        own_x, own_y, _, _, graph = self.kept[n]
        with stream:
            own_x[...] = x
            graph.launch(stream)
            y[...] = own_y
        ### END SOLUTION


# %% test="FixedAddress" kind="structure" points=1 tags=["gpu"]
kit = reference.value("INSTRUMENTS")
send = student.define(kit, "burst")
lanes_here = student.value("stream")


def drawn(length):
    return secret.integers(-8, 9, (length, 64)).astype(np.float32)


def asked(server, lengths, why, ms=0, amount=0):
    """Requests with new buffers, without waiting in between; all must be right, and have the amount. Returns ms on the host."""
    hosts = [drawn(n) for n in lengths]
    calls = [[on_gpu(host), on_gpu(np.zeros_like(host))] for host in hosts]
    for _, y in calls:
        y.poison()
    spent = send(server, lanes_here, calls, ms)
    for host, (x, y) in zip(hosts, calls, strict=True):
        check.equal(y, reference.expected(host) + np.float32(amount), why=why)
        check.equal(x, host, why="调用者的 x 被改了。图要用自己的缓冲，别把结果写进别人的 x。")
    kept_buffers.extend(calls)
    return spent


kept_buffers = []
rig = student.define(kit, "Watched")(student.load(reference.make_plan("wide")), lanes_here)
server = student.FixedAddress(rig)
for turn in range(3):
    asked(server, [20], "长度一样、缓冲不一样的请求，y 不对。图里写死的地址是谁的？" if turn else "第一个请求就不对。")
check.that(rig.get("contexts") <= 1 and len(rig.get("enqueues")) <= 2, why="三个长度一样的请求，上下文不该超过 1 个，入队不该超过 2 次。缓冲每次都是新的，把地址放进键就等于每次重新捕获。")
### BEGIN HIDDEN TESTS
lengths = [int(n) for n in secret.choice(np.arange(8, 400), 3, replace=False)]
asked(server, lengths, "几种长度轮流来，有一个不对。每种长度要有自己的缓冲、上下文和图。")
sizes = sorted({n * 64 for n in [20, *lengths]} | {20, *lengths})
others = student.define(kit, "tenants")(lanes_here, sizes)
for _ in range(3):
    order = [int(n) for n in secret.choice([20, *lengths], 5)]
    asked(server, [*order, order[-1], order[0]], "一口气交进来的几个请求，有一个不对。拷进、启动、拷出三步都要在 stream 上：在别的流上拷，会盖掉还没用完的数据。", ms=30)
for _ in range(3):  # again if the machine may just have been busy
    spent = asked(server, [20, lengths[0], 20], "一口气交进来的请求不对。", ms=120)
    if spent < 80:
        break
check.that(spent < 80, why="infer 在主机上等了 GPU。三步都放在 stream 上，次序就对了，不用等。")
check.that(rig.get("contexts") <= 4 and len(rig.get("enqueues")) <= 8, why="每种长度最多 1 个上下文、2 次入队。缓冲每次都是新的，不能靠重新捕获。")
check.equal(sorted({line[4] for line in rig.get("enqueues") if line[2]}), sorted({20, *lengths}), why="每种长度都要捕获一张图，用的是交给你的引擎。")
# What does the work? All that was captured adds an amount to y, which is drawn when the graphs are there: who enqueues has none of it.
marked = student.define(kit, "Watched")(student.load(reference.make_plan("wide")), lanes_here, "marked")
server = student.FixedAddress(marked)
for _ in range(2):
    asked(server, [20, lengths[0]], "又造一个，两种长度轮流来，有一个不对。")
for _ in range(2):
    amount = int(secret.integers(100, 10000))
    marked.mark(amount)
    asked(server, [lengths[0], 20, 20], "见过的长度，infer 里没有图启动，或者 y 不是图算出来的：考官让每张录下来的图都给 y 加上一个数，这一次的 y 里却没有它。不要再逐次入队，启动做好的那张图，把它的结果拷出去。", amount=amount)
for other in others:
    check.equal(other, np.full(other.numpy().shape, 0x5A5A5A5A, np.int32), why="重放写坏了别人的数组：固定缓冲已经被回收，图还在往老地址写。请把它们和图一起留住。")
### END HIDDEN TESTS

# %% [markdown]
# ### 二号的手术：`FixedPadding(engine, rows)`
#
# `infer(x, y)`：长短任意穿插，都对。有的请求里会混进 NaN，它自己的结果不算数，但**不许影响后面的请求**。
# 上下文 1 个，入队最多 2 次，图正好一张，有 `rows` 行；`infer` 里启动它，不入队。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 重放的时候，图会读 `x` 和 `mask` 的**每一行**。第 `n` 行到最后一行，各应该是什么？
# 想想网络怎样用 `mask`：它乘在哪里？乘数是 0，被乘的是 NaN，结果是什么？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `with stream:` 里，给数组的一段赋值（例如 `a[2:5] = 1`、`a[2:5] = b`）就是在 `stream` 上启动的小内核，主机不等。一段可以是空的。
#
# </details>

# %% solution="FixedPadding" tags=["gpu"]
class FixedPadding:
    """y = engine(x), for up to `rows` rows: padded to that many, by one graph."""

    def __init__(self, engine, rows):
        ### BEGIN SOLUTION: 固定缓冲、上下文、图，和病人一样
        self.x, self.y, self.mask = zeros(rows), zeros(rows), ones(rows)
        self.context = new_context(engine, 1)
        bind(self.context, self.x, self.mask, self.y)
        enqueue(self.context)
        self.graph = capture(self.context)
        ### END SOLUTION

    def infer(self, x, y):
        """On `stream`, without waiting. x, y: cupy float32 (n, HIDDEN), n <= rows."""
        ### BEGIN SOLUTION: 真的行照抄；填充的行，x 和 mask 都写成中性的值，写到最后一行
        n = len(x)
        with stream:
            self.x[:n] = x
            self.x[n:] = 0
            self.mask[:n] = 1
            self.mask[n:] = 0
            self.graph.launch(stream)
            y[...] = self.y[:n]
        ### END SOLUTION


# %% test="FixedPadding" kind="structure" points=1 tags=["gpu"]
kit = reference.value("INSTRUMENTS")
send = student.define(kit, "burst")
lanes_here = student.value("stream")


def asked(server, lengths, why, ms=0, spoilt=(), amount=0):
    """Requests without waiting in between; all but the spoilt ones must be right, and have the amount. Returns ms on the host."""
    hosts = [secret.integers(-8, 9, (n, 64)).astype(np.float32) for n in lengths]
    for which in spoilt:
        hosts[which][-3:] = np.nan
    calls = [[on_gpu(host), on_gpu(np.zeros_like(host))] for host in hosts]
    for _, y in calls:
        y.poison()
    spent = send(server, lanes_here, calls, ms)
    for number, (host, (_, y)) in enumerate(zip(hosts, calls, strict=True)):
        if number not in spoilt:
            check.equal(y, reference.expected(host) + np.float32(amount), why=why)
    return spent


rig = student.define(kit, "Watched")(student.load(reference.make_plan("wide")), lanes_here)
server = student.FixedPadding(rig, 64)
asked(server, [60], "60 行的请求不对。")
took = asked(server, [20], "60 行之后来了 20 行，不对。第 20 行往后还留着什么？x 和 mask 各应当写什么？")
### BEGIN HIDDEN TESTS
rows = int(secret.integers(70, 200))
rig = student.define(kit, "Watched")(student.load(reference.make_plan("wide")), lanes_here)
server = student.FixedPadding(rig, rows)
asked(server, [rows], "正好填满桶的请求不对。")
asked(server, [8], "填满之后来了最短的请求，不对。哨兵要写到桶的最后一行。")
for _ in range(4):
    asked(server, [int(n) for n in secret.integers(8, rows + 1, 6)], "长短穿插的请求，有一个不对。")
asked(server, [rows, 20, 9], "前一个请求里有 NaN，后面的请求也坏了。0 乘 NaN 还是 NaN：填充的行里，x 也要写成有限的数。", spoilt=[0])
for _ in range(2):
    asked(server, [rows - 1, 30, rows - 5, 9], "一口气交进来的几个请求，有一个不对。写哨兵也要在 stream 上，否则会改到前一个请求还没用完的缓冲。", ms=30)
for _ in range(3):  # again if the machine may just have been busy
    spent = asked(server, [30, 20, 40], "一口气交进来的请求不对。", ms=120)
    if spent < 80:
        break
check.that(spent < 80, why="infer 在主机上等了 GPU。全都放在 stream 上，次序就对了，不用等。")
check.that(rig.get("contexts") <= 1 and len(rig.get("enqueues")) <= 2, why="桶只有一个，上下文 1 个、入队 2 次就够了。不要按长度重新捕获。")
check.equal([line[4] for line in rig.get("enqueues") if line[2]], [rows], why="应当捕获正好一张图，桶有多少行，它就有多少行，用的是交给你的引擎。")
# What does the work? All that was captured adds an amount to y, which is drawn when the graph is there: who enqueues has none of it.
marked = student.define(kit, "Watched")(student.load(reference.make_plan("wide")), lanes_here, "marked")
server = student.FixedPadding(marked, rows)
asked(server, [rows, 20], "又造一个，两个请求有一个不对。")
for _ in range(2):
    amount = int(secret.integers(100, 10000))
    marked.mark(amount)
    asked(server, [int(n) for n in secret.integers(8, rows + 1, 3)], "infer 里没有图启动，或者 y 不是图算出来的：考官让录下来的图给 y 加上一个数，这一次的 y 里却没有它。不要再逐次入队，启动做好的那张图，从它的结果里取 y。", amount=amount)
### END HIDDEN TESTS

# %% [markdown]
# ### 三号的手术：`FixedCapture(engine, x, y, lane)`
#
# - 图录在 `lane` 上，`infer()` 在 `lane` 上启动它；属性 `graph` 就是这张 `cupy.cuda.Graph`；
# - 图里没有内核、或者入队被拒绝：构造时抛出 `RuntimeError`。测试会交来两种不老实的引擎：一种在捕获里返回 `False`（这时图里也许已经录进了别的内核），一种把工作入队到别的流上去；
# - 不管成败，构造完以后 `lane` 不能还停在捕获里。
#
# 调用者保证 `x`、`y` 活着；你自己建的东西要自己留住。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# `execute_async_v3` 的参数决定什么？预热在哪条流上都行，捕获呢？
# 捕获开始以后，哪几步可能抛异常？怎样保证每一条路都会走到 `end_capture`？
# 入队被拒绝可能已经毁掉了捕获，这时 `end_capture` 自己也会抛异常：那个异常该不该传出去？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `enqueue(context, lane)` 或 `context.execute_async_v3(lane.ptr)`（返回真或假）；`lane.begin_capture()`、`lane.end_capture()`，
# 后者失败时抛出 `cp.cuda.runtime.CUDARuntimeError`；`kernel_nodes(graph)`。
#
# </details>

# %% solution="FixedCapture" tags=["gpu"]
class FixedCapture:
    """y = engine(x) for two fixed buffers, by a graph on the stream `lane`. graph: the cupy Graph, never an empty one."""

    def __init__(self, engine, x, y, lane):
        """x, y: cupy float32 (length, HIDDEN), alive as long as this. RuntimeError: the engine does not let itself be captured."""
        ### BEGIN SOLUTION: 入队到 lane；每条路都结束捕获；被拒绝或者没有内核，就抛 RuntimeError
        self.lane, self.mask, self.context = lane, ones(len(x)), new_context(engine, 1)
        bind(self.context, x, self.mask, y)
        enqueue(self.context)  # warm up
        stream.synchronize()
        graph = None
        with lane:
            lane.begin_capture()
            try:
                accepted = self.context.execute_async_v3(lane.ptr)
            finally:
                try:
                    graph = lane.end_capture()
                except cp.cuda.runtime.CUDARuntimeError:  # the refusal has spoilt the capture
                    accepted = False
        if not accepted or graph is None or kernel_nodes(graph) == 0:
            raise RuntimeError("捕获到的图是空的，或者入队被拒绝：" + "；".join(lab.trt_errors()))
        self.graph = graph
        ### END SOLUTION

    def infer(self):
        """What x holds now becomes y. On `lane`, without waiting."""
        ### BEGIN SOLUTION: 启动图
        self.graph.launch(self.lane)
        ### END SOLUTION


# %% test="FixedCapture" kind="structure" points=1 tags=["gpu"]
kit = reference.value("INSTRUMENTS")
send = student.define(kit, "burst")
watch = student.define(kit, "Watched")
TRACK = "def track():\n    import cupy\n    return cupy.cuda.Stream(non_blocking=True)"
track = student.define(TRACK, "track")()
plan = reference.make_plan("wide")


def replayed(server, x, y, why):
    """New numbers in place, one launch; y must be right."""
    host = x.write(secret.integers(-8, 9, x.shape).astype(np.float32))
    y.poison()
    send(server, track, [[]])
    check.equal(y, reference.expected(host), why=why)


x, y = on_gpu(secret.integers(-8, 9, (40, 64)).astype(np.float32)), on_gpu(np.zeros((40, 64), np.float32))
server = student.FixedCapture(student.load(plan), x, y, track)
check.nodes(server.get("graph"), kernels=(1, None), why="捕获到的图里没有内核：入队没有落在正在捕获的那条流上。")
for _ in range(2):
    replayed(server, x, y, "换了 x 里的数据，启动以后 y 不对。图里的工作要读 x 现在的内容。")
### BEGIN HIDDEN TESTS
check.that(not track.is_capturing(), why="构造完以后，lane 还停在捕获里。")
n = int(secret.integers(65, 400))
x, y = on_gpu(np.zeros((n, 64), np.float32)), on_gpu(np.zeros((n, 64), np.float32))
for mood, why in (("deaf", "引擎把工作入队到了别的流上，图是空的，应当抛出 RuntimeError，不能留着一张空图去重放。"), ("shy", "引擎拒绝被捕获（execute_async_v3 返回 False），应当抛出 RuntimeError。"), ("torn", "引擎拒绝被捕获（execute_async_v3 返回 False），图里虽然已经有一个内核，也应当抛出 RuntimeError：要看返回值，不能只数节点。")):
    check.raises("RuntimeError", student.FixedCapture, watch(student.load(plan), student.value("stream"), mood), x, y, track, why=why)
    check.that(not track.is_capturing(), why="抛出异常以后，lane 还停在捕获里，这条流再也用不了。结束捕获要放进 finally。")
rig = watch(student.load(plan), student.value("stream"))
server = student.FixedCapture(rig, x, y, track)
begun = rig.count()
others = student.define(kit, "tenants")(student.value("stream"), [n, n * 64])
for _ in range(3):
    replayed(server, x, y, "别的捕获失败过以后，同一条流上再捕获，结果不对；或者你自己建的 mask 已经被回收，别人的数据进来了。")
for other in others:
    check.equal(other, np.full(other.numpy().shape, 0x5A5A5A5A, np.int32), why="重放写坏了别人的数组。")
check.equal(rig.count(), begun, why="启动图以后就不该再入队：infer 里只启动图。")
check.nodes(server.get("graph"), kernels=(1, None), why="graph 应当是捕获到的那张图，里面有内核。")
host = x.write(secret.integers(-8, 9, x.shape).astype(np.float32))
y.poison()
server.get("graph").instantiate().run(1)
check.equal(y, reference.expected(host), why="考官启动 graph 里的那张图，y 不对：引擎的工作应当都录在这张图里。")
### END HIDDEN TESTS

# %% [markdown]
# ### 四号的手术：`FixedUpdate(most)`
#
# - `infer(x, out)`：任意长度（1 ≤ n ≤ most）都对；
# - 优先更新，被拒绝才重新实例化。`updates` 记成功的更新，`rebuilds` 记被拒绝以后的重新实例化，都从 0 开始；第一次实例化两样都不算；
# - 别的错误不许吞掉。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# `cudaGraphExecUpdate` 返回一个元组，第一项是什么？被拒绝以后，`live` 里是谁的图？
# 旧的可执行图可能还在跑，能销毁吗？（`cudaGraphExecDestroy` 的文档：正在跑的会跑完，然后才释放。）
# 驱动记下了这次错误，后面的调用如果去查“最后一次错误”会怎样？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `error, info = cudart.cudaGraphExecUpdate(live, definition)`，`error` 是 `cudart.cudaError_t`，被拒绝时等于 `cudart.cudaError_t.cudaErrorGraphExecUpdateFailure`（910）；
# `cudart.cudaGetLastError()` 清掉记下的错误；`cudart.cudaGraphExecDestroy(live)`；`cudart.cudaGraphInstantiate(definition, 0)`；`lab.check_cuda(结果)` 出错就抛异常。
#
# </details>

# %% solution="FixedUpdate" tags=["gpu"]
class FixedUpdate:
    """The peak of x, by one executable graph: updated where the driver accepts it, made anew where not."""

    def __init__(self, most):
        ### BEGIN SOLUTION: 两块暂存，还没有可执行图，两个计数从 0 开始
        with stream:
            self.rooms = cp.zeros((2, most), cp.uint32)
        self.live, self.updates, self.rebuilds = None, 0, 0
        ### END SOLUTION

    def infer(self, x, out):
        """On `stream`, without waiting. x: cupy uint32 (n,), 1 <= n <= most; out: cupy uint32 (1,)."""
        ### BEGIN SOLUTION: 录一遍；看更新的返回值；被拒绝就销毁旧的，重新实例化
        definition = record_pyramid(x, self.rooms, out)
        refused = False
        if self.live is not None:
            error, _ = cudart.cudaGraphExecUpdate(self.live, definition)
            refused = error == cudart.cudaError_t.cudaErrorGraphExecUpdateFailure
            if refused:
                cudart.cudaGetLastError()  # an expected answer: nobody shall find it later
                lab.check_cuda(cudart.cudaGraphExecDestroy(self.live))
                self.live = None
                self.rebuilds += 1
            else:
                lab.check_cuda((error,))
                self.updates += 1
        if self.live is None:
            self.live = lab.check_cuda(cudart.cudaGraphInstantiate(definition, 0))
        lab.check_cuda(cudart.cudaGraphDestroy(definition))
        lab.check_cuda(cudart.cudaGraphLaunch(self.live, stream.ptr))
        ### END SOLUTION


# %% test="FixedUpdate" kind="structure" points=1 tags=["gpu"]
send = student.define(reference.value("INSTRUMENTS"), "burst")
lanes_here = student.value("stream")


def asked(server, lengths, why, ms=0):
    """Requests without waiting in between; all must be right."""
    hosts = [secret.integers(0, 2**32, n, dtype=np.uint32) for n in lengths]
    calls = [[on_gpu(host), on_gpu(np.zeros(1, np.uint32))] for host in hosts]
    for _, out in calls:
        out.poison()
    send(server, lanes_here, calls, ms)
    for host, (_, out) in zip(hosts, calls, strict=True):
        check.equal(out, reference.peak(host), why=why)
    kept_buffers.extend(calls)


kept_buffers = []
server = student.FixedUpdate(4096)
asked(server, [200, 256], "减半次数一样的两个请求不对。更新以后启动了吗？")
check.equal([server.get("updates"), server.get("rebuilds")], [1, 0], why="200 和 256 都是减半 8 次，第二个请求应当是一次成功的更新。第一次实例化不算。")
asked(server, [300], "300 要减半 9 次，结果不对：更新被拒绝以后，启动的还是旧的图吗？")
check.equal([server.get("updates"), server.get("rebuilds")], [1, 1], why="拓扑变了，更新会被拒绝：rebuilds 应当加 1，updates 不变。")
### BEGIN HIDDEN TESTS
from itertools import pairwise

server = student.FixedUpdate(5000)
levels, counts = None, [0, 0]
for _ in range(4):
    lengths = [int(n) for n in np.concatenate((secret.integers(1, 5001, 3), secret.integers(1, 12, 2), 2 ** secret.integers(0, 12, 2) + secret.integers(0, 2, 2)))]
    lengths = [lengths[i] for i in secret.permutation(len(lengths)) for _ in range(2)]
    asked(server, lengths, "长短穿插的一串请求，有一个不对。被拒绝以后要换新的可执行图；以后的更新，是更新那张新的。")
    for n in lengths:
        halvings = max(1, (n - 1).bit_length())
        if levels is not None:
            counts[halvings != levels] += 1
        levels = halvings
    check.equal([server.get("updates"), server.get("rebuilds")], counts, why="updates 或 rebuilds 不对。能更新的都要更新，被拒绝的才重建；每个请求恰好记一次（第一个不记）。")
ODD = """
class Odd:
    # While it is on, record_pyramid adds a node that does nothing to what it records of one length.

    def __init__(self, record_pyramid, length):
        from cuda.bindings import runtime

        def recorded(x, *args, **kwargs):
            self.calls += 1
            definition = record_pyramid(x, *args, **kwargs)
            if len(x) == length:
                runtime.cudaGraphAddEmptyNode(definition, [], 0)
            return definition

        self.names, self.original, self.calls = record_pyramid.__globals__, record_pyramid, 0
        self.names["record_pyramid"] = recorded

    def off(self):
        self.names["record_pyramid"] = self.original
        return self.calls
"""
BREAK = """
class Broken:
    # While it is on, an update of an executable graph is answered with error code 1, and changes nothing.

    def __init__(self):
        from cuda.bindings import driver, runtime
        self.kept = [(module, name, getattr(module, name)) for module, name in ((runtime, "cudaGraphExecUpdate"), (driver, "cuGraphExecUpdate"))]
        runtime.cudaGraphExecUpdate = lambda *args: (runtime.cudaError_t(1), runtime.cudaGraphExecUpdateResultInfo())
        driver.cuGraphExecUpdate = lambda *args: (driver.CUresult(1), driver.CUgraphExecUpdateResultInfo())

    def off(self):
        for each in self.kept:
            setattr(*each)
"""
plain, odd = (int(n) for n in secret.choice(np.arange(130, 257), 2, replace=False))  # both are halved 8 times
turns = [plain, plain, odd, odd, plain, odd, *(int(n) for n in secret.choice([plain, odd], 4))]
server = student.FixedUpdate(500)
planted = student.define(ODD, "Odd")(student.value("record_pyramid"), odd)
try:
    asked(server, turns, "减半次数一样，图却不一样的一串请求，有一个不对。")
finally:
    calls = planted.off()
changes = sum(before != after for before, after in pairwise(turns)) if calls else 0  # without record_pyramid all are alike
check.equal([server.get("updates"), server.get("rebuilds")], [len(turns) - 1 - changes, changes], why="updates 或 rebuilds 不对：能不能更新，由 cudaGraphExecUpdate 的返回值说了算，不要由长度或减半的次数去猜。")
planted = student.define(BREAK, "Broken")()
try:
    check.raises("Exception", send, server, lanes_here, [[on_gpu(np.ones(plain, np.uint32)), on_gpu(np.zeros(1, np.uint32))]], why="更新得到 910 以外的错误码，应当抛出异常：别的错误不许吞掉，也不能当作“被拒绝”。")
finally:
    planted.off()
server = student.FixedUpdate(5000)
asked(server, [700, 600, 90, 70, 1, 2, 4000], "一口气交进来的请求，有一个不对。更新或重建的，是下一次启动用的图，别动正在跑的那一次。", ms=30)
### END HIDDEN TESTS

# %% [markdown]
# ## 第二组：没人检查，没人等
#
# ### 五号：被拒绝的形状
#
# 现场：“长一点的句子，返回的是上一句的结果。”（TensorRT 的 2215 号、4011 号 issue。）

# %% tags=["gpu"]
class IgnoredRefusal:
    """y = engine(x), for any length."""

    def __init__(self, engine):
        self.context, self.mask = new_context(engine, 0), ones(LONGEST)

    def infer(self, x, y):
        """On `stream`, without waiting. x, y: cupy float32 (length, HIDDEN)."""
        self.context.set_input_shape("x", x.shape)
        self.context.set_input_shape("mask", (len(x), 1))
        for name, array in (("x", x), ("mask", self.mask), ("y", y)):
            self.context.set_tensor_address(name, array.data.ptr)
        self.context.execute_async_v3(stream.ptr)


# %% tags=["demo", "gpu"]
watched = Watched(engine, stream)
patient = IgnoredRefusal(watched)
rows = []
for length in (40, 64, 65, 100, 30):
    before = watched.refusals
    x, y, want = fresh(length)
    patient.infer(x, y)
    rows.append((length, watched.refusals - before, state_of(y, want)))
heard = lab.trt_errors()
lab.say(
    lab.table(("长度", "TensorRT 说了几次“不”", "y"), rows)
    + (f"\n\n日志里的最后一句：`{heard[-1][:160]}`" if heard else ""),
    measured=False,
)

# %% [markdown]
# **症状**：超过某个长度的请求，`y` 不是答案。Python 没有抛任何异常；TensorRT 的日志里倒是写得明明白白，如果有人看的话。
#
# **病因**：TensorRT 用**返回值**说“不”。这个上下文用的是 0 号 Profile，最长 64。谁来拒绝 65 行，看日志那一句的开头：
# 有的版本里 `set_input_shape` 当场就返回 `False`；TensorRT 10.6 的 `set_input_shape` 只问“有没有**哪一个** Profile 装得下”，1 号装得下，它就收下，
# 到了 `execute_async_v3`（日志里叫 `enqueueV3`）才返回 `False`。这个程序两处都没听，所以只查其中一处也不够。
# 更可惜的是：65 行其实这个引擎会算，只是要用 1 号 Profile。
#
# **治法**：入队之前自己查范围，选一个装得下的 Profile；一个也装不下，当场抛出清楚的错误，什么也不入队，下一个请求照常。

# %% [markdown]
# ### 六号：没等数据到
#
# 现场：“偶尔黑一帧。加一句打印就好了。”（StreamDiffusion 的 51 号改动，cupy 的 6104 号 issue。）

# %% tags=["gpu"]
class MissingEvent:
    """y = engine(x): the data arrive on a stream of their own, the engine runs on `stream`."""

    def __init__(self, engine, rows):
        self.arrivals = cp.cuda.Stream(non_blocking=True)
        self.x, self.mask, self.y, self.context = zeros(rows), ones(rows), zeros(rows), new_context(engine, 1)
        bind(self.context, self.x, self.mask, self.y)
        enqueue(self.context)
        self.graph = capture(self.context)

    def infer(self, write, y):
        """Without waiting. write(x): launches on the current stream what fills x, cupy float32 (rows, HIDDEN). y: like x, written."""
        with self.arrivals:
            write(self.x)
        self.graph.launch(stream)
        with stream:
            y[...] = self.y


# %% tags=["demo", "gpu"]
patient = MissingEvent(engine, 40)
rows = []
for ms in (0, 30):
    calls = [fresh(40) for _ in range(4)]
    for x, y, _ in calls:  # one after the other
        patient.infer(Late(x, ms, stream), y)
        cp.cuda.Device().synchronize()
    careful = [state_of(y, want) for _, y, want in calls]
    calls = [fresh(40) for _ in range(4)]
    burst(patient, stream, [(Late(x, ms, stream), y) for x, y, _ in calls])
    rows.append((f"{ms} ms", f"{careful.count('对')} / 4", f"{sum(state_of(y, want) == '对' for _, y, want in calls)} / 4"))
lab.say(lab.table(("数据晚到", "每个请求之后都等，对几个", "一口气交进去，对几个"), rows))

# %% [markdown]
# **症状**：数据到得快，多半是对的，那是运气。数据一慢，就错；而且错成**上一个请求的答案**，看起来很像真的。
#
# **病因**：两条流互不等待。`launch` 的时候，数据还在路上，图读到的是旧的 `x`。反方向也有一个洞，更隐蔽：
# 后一个请求的数据写进 `x` 的时候，前一个请求的图可能还没读完。
#
# **治法**：事件，**两个方向都要**。数据写完记一个事件，`stream` 等它；图读完记一个事件，`arrivals` 下次写之前等它。
# 在主机上同步也能“治好”，代价是流水线全停：那是把错的改成慢的。

# %% [markdown]
# ### 七号：差不多长的两个请求
#
# 现场：“两个窗口一起用就串，一个人用没事；奇怪的是，一长一短也没事。”（TensorRT 的 1300 号、846 号 issue。）
#
# 这个服务有几条“道”（lane），每条道一条自己的流，同时各做各的请求。`start` 和 `go` 是一个请求的两步。真实的服务里它们在两个线程里跑，线程什么时候切换由不得你；这里由我们来安排次序，一次就能看到。

# %% tags=["gpu"]
class SharedContext:
    """Two or more lanes with a stream each. One context for each profile: that is what TensorRT used to demand."""

    def __init__(self, engine, lanes):
        self.lanes, self.mask, self.chosen = lanes, ones(LONGEST), {}
        self.contexts = [new_context(engine, profile) for profile in range(engine.num_optimization_profiles)]
        stream.synchronize()  # the mask is there

    def start(self, lane, x, y):
        """Lane number `lane` gets a request. x, y: cupy float32 (length, HIDDEN), length 8 … 512."""
        self.chosen[lane] = self.contexts[0 if len(x) <= 64 else 1]
        bind(self.chosen[lane], x, self.mask, y)

    def go(self, lane):
        """Enqueue that request on the lane's stream, without waiting."""
        enqueue(self.chosen[lane], self.lanes[lane])


# %% tags=["demo", "gpu"]
lanes = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
patient = SharedContext(engine, lanes)
rows = []
for pair in ((20, 300), (20, 25), (300, 100)):
    for steps in ("start 0，go 0，等，start 1，go 1", "start 0，start 1，go 0，go 1"):
        calls = [fresh(length) for length in pair]
        for step in steps.split("，"):
            name, number = step[:-1].strip(), step[-1]
            if name == "start":
                patient.start(int(number), *calls[int(number)][:2])
            elif name == "go":
                patient.go(int(number))
            else:
                cp.cuda.Device().synchronize()
        rows.append((str(pair), steps, *(state_of(y, want) for _, y, want in calls)))
lab.say(lab.table(("长度", "次序", "0 号的 y", "1 号的 y"), rows), measured=False)

# %% [markdown]
# **症状**：两个请求**交错**、而且落进**同一个 Profile**，先来的那个就没有答案；一长一短，或者一前一后，都没事。
#
# **病因**：形状和地址是上下文的**状态**。0 号刚设好，1 号又把同一个上下文改了；0 号入队的，其实是 1 号的请求。
# 一个 Profile 只配一个上下文，是早年 TensorRT 的规矩；现在同一个 Profile 可以有许多上下文，这份代码还照着老规矩写。
#
# 就算 `start` 和 `go` 没有交错，两条流上的两次入队也会同时在跑，共用一个上下文的暂存，互相写坏中间结果。这种错就真的要看运气了，《多流调度》里专门讨论过。
#
# **治法**：每条道、每个 Profile 一个上下文，谁也不碰谁的。不要走到另一个极端：每个请求新建一个，那是十号。

# %% [markdown]
# ## 练习二：治好五、六、七号（3 分）
#
# 可以用的名字和练习一相同。
#
# ### 五号的手术：`FixedRefusal(engine)`
#
# - `infer(x, y)`：在**装得下的 Profile 里选编号最小的**，入队，不等；
# - 一个也装不下：抛出 `ValueError`，`y` 一个字节也不动，什么也不入队，后面的请求照常；
# - 不合法的形状根本不交给上下文：TensorRT 一次“不”也不该有机会说；
# - 范围问引擎要，不要写死：测试会换一个 Profile 不同的引擎；
# - 每个 Profile 一个上下文，都在构造时备好；`infer` 里不再切换 Profile。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 等 TensorRT 返回 `False` 再抛异常，和自己先查范围，有什么不同？被拒绝了一半的上下文，处在什么状态？
# 范围的两头都要查：太短的呢？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `engine.num_optimization_profiles`；`engine.get_tensor_profile_shape("x", profile)` 返回最小、最优、最大三个形状，各是一串维度，第 0 维是长度；
# `new_context(engine, profile)`、`bind`、`enqueue`、`ones(LONGEST)`。
#
# </details>

# %% solution="FixedRefusal" tags=["gpu"]
class FixedRefusal:
    """y = engine(x), by the first profile that holds its length."""

    def __init__(self, engine):
        ### BEGIN SOLUTION: 每个 Profile：最短、最长、一个上下文
        self.mask, self.routes = ones(LONGEST), []
        for profile in range(engine.num_optimization_profiles):
            least, _, most = (int(shape[0]) for shape in engine.get_tensor_profile_shape("x", profile))
            self.routes.append((least, most, new_context(engine, profile)))
        ### END SOLUTION

    def infer(self, x, y):
        """On `stream`, without waiting. x, y: cupy float32 (length, HIDDEN). ValueError: no profile holds that length; y is untouched."""
        ### BEGIN SOLUTION: 先查范围，再碰上下文；都装不下就 ValueError
        for least, most, context in self.routes:
            if least <= len(x) <= most:
                bind(context, x, self.mask, y)
                enqueue(context)
                return
        raise ValueError(f"长度 {len(x)} 不在任何 Profile 里：" + "，".join(f"{least}～{most}" for least, most, _ in self.routes))
        ### END SOLUTION


# %% test="FixedRefusal" kind="structure" points=1 tags=["gpu"]
kit = reference.value("INSTRUMENTS")


def opened(plan_name, side=student):
    """A watched engine, the server on it, and how to send it requests."""
    on = side.value("stream")
    rig = side.define(kit, "Watched")(side.load(reference.make_plan(plan_name)), on)
    server = side.FixedRefusal(rig)
    return rig, partial(side.define(kit, "burst"), server, on)


def asked(rig, send, lengths, profiles, why, ms=0):
    hosts = [secret.integers(-8, 9, (n, 64)).astype(np.float32) for n in lengths]
    calls = [[on_gpu(host), on_gpu(np.zeros_like(host))] for host in hosts]
    for _, y in calls:
        y.poison()
    begun = len(rig.get("enqueues"))
    spent = send(calls, ms)
    for host, (_, y) in zip(hosts, calls, strict=True):
        check.equal(y, reference.expected(host), why=why)
    check.equal([line[3] for line in rig.get("enqueues")[begun:]], profiles, why="选的 Profile 不对：应当是装得下的里面编号最小的，每个请求入队一次。")
    return spent


def refused(rig, send, length):
    x, y = on_gpu(np.zeros((length, 64), np.float32)), on_gpu(np.zeros((length, 64), np.float32))
    y.poison()
    untouched, begun = y.read(), len(rig.get("enqueues"))
    check.raises("ValueError", send, [[x, y]], why="没有 Profile 装得下的长度，应当抛出 ValueError。")
    check.equal(y, untouched, why="被拒绝的请求，y 不该被改动。")
    check.equal(len(rig.get("enqueues")), begun, why="被拒绝的请求，什么也不该入队：先查范围，再碰上下文。")


rig, send = opened("wide")
asked(rig, send, [40], [0], "40 行的请求不对。")
asked(rig, send, [65], [1], "65 行的请求不对：0 号 Profile 装不下，1 号装得下。")
refused(rig, send, 513)
### BEGIN HIDDEN TESTS
for name in ("wide", "tight"):
    (low, _, middle), (_, _, high) = reference.value("PLANS")[name]
    rig, send = opened(name)
    inside = [int(secret.integers(low, middle + 1)), int(secret.integers(middle + 1, high + 1))]
    asked(rig, send, [low, middle, middle + 1, high], [0, 0, 1, 1], "正好在范围两头的长度，有一个不对。")
    for length in (low - 1, high + 1, 1):
        refused(rig, send, length)
        asked(rig, send, inside, [0, 1], "拒绝过一个请求以后，合法的请求不对。")
    twin_rig, twin_send = opened(name, reference)  # should TensorRT itself wait here, nobody is blamed for it
    asked(twin_rig, twin_send, inside, [0, 1], "参考实现的结果不对。")
    patience = asked(twin_rig, twin_send, inside * 3, [0, 1] * 3, "参考实现的结果不对。", ms=200)
    for _ in range(3):  # again if the machine may just have been busy
        spent = asked(rig, send, inside * 3, [0, 1] * 3, "一口气交进来的请求，有一个不对。", ms=200)
        if spent < max(130, 1.5 * patience):
            break
    check.that(spent < max(130, 1.5 * patience), why="infer 在主机上等了 GPU。同一条流上，换形状、换地址都不用等前一个做完。")
    check.equal(rig.get("refusals"), 0, why="TensorRT 说了“不”：应当先自己查范围，不合法的形状根本不交给上下文。被拒绝了一半的上下文处在什么状态，没有人保证。")
    check.that(rig.get("contexts") <= 2 and rig.get("switches") <= 2, why="每个 Profile 一个上下文，构造时选好 Profile，以后不再切换，也不再新建。")
### END HIDDEN TESTS

# %% [markdown]
# ### 六号的手术：`FixedEvent(engine, rows)`
#
# - `infer(write, y)`：`write(x)` 还是在 `arrivals` 这条自己的流上调用（它和推理能够重叠，正是分两条流的原因），不许挪到 `stream` 上；
# - 两个方向都不能读错：数据可能很慢，图也可能很慢；
# - **不在主机上等**。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 画两条横线，一条 `arrivals`，一条 `stream`。第 1、第 2 个请求各有“写 x”“读 x”两件事，画出必须有的箭头。
# 一共几种箭头？第一个请求的“写 x”要等谁？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `event = cp.cuda.Event(disable_timing=True)`；`event.record(流)`；`流.wait_event(event)`。一个从未记录过的事件，等它等于不等。
# 事件可以反复记录，`wait_event` 等的是**调用它的那一刻**最近一次的记录。
#
# </details>

# %% solution="FixedEvent" tags=["gpu"]
class FixedEvent:
    """y = engine(x): the data arrive on the stream `arrivals`, the engine runs on `stream`, and each waits for the other."""

    def __init__(self, engine, rows):
        ### BEGIN SOLUTION: 固定缓冲和图，和病人一样；再加两个事件
        self.arrivals = cp.cuda.Stream(non_blocking=True)
        self.written, self.read = cp.cuda.Event(disable_timing=True), cp.cuda.Event(disable_timing=True)
        self.x, self.mask, self.y, self.context = zeros(rows), ones(rows), zeros(rows), new_context(engine, 1)
        bind(self.context, self.x, self.mask, self.y)
        enqueue(self.context)
        self.graph = capture(self.context)
        ### END SOLUTION

    def infer(self, write, y):
        """Without waiting. write(x): launches on the current stream what fills x, cupy float32 (rows, HIDDEN). y: like x, written."""
        ### BEGIN SOLUTION: 写之前等上一次读完，读之前等这一次写完
        self.arrivals.wait_event(self.read)
        with self.arrivals:
            write(self.x)
        self.written.record(self.arrivals)
        stream.wait_event(self.written)
        self.graph.launch(stream)
        self.read.record(stream)
        with stream:
            y[...] = self.y
        ### END SOLUTION


# %% test="FixedEvent" kind="structure" points=1 tags=["gpu"]
kit = reference.value("INSTRUMENTS")
send, late = student.define(kit, "burst"), student.define(kit, "Late")
lanes_here = student.value("stream")


def asked(server, delays, why, ms=0, n=40, amount=0):
    """Requests whose data come after these ms, `stream` being busy for ms, without waiting in between; all must be right, and have the amount.

    Returns ms on the host.
    """
    hosts = [secret.integers(-8, 9, (n, 64)).astype(np.float32) for _ in delays]
    sources, targets = [on_gpu(host) for host in hosts], [on_gpu(np.zeros_like(host)) for host in hosts]
    writers = [late(source, delay, lanes_here) for source, delay in zip(sources, delays, strict=True)]
    for y in targets:
        y.poison()
    spent = send(server, lanes_here, [[writer, y] for writer, y in zip(writers, targets, strict=True)], ms)
    for host, y in zip(hosts, targets, strict=True):
        check.equal(y, reference.expected(host) + np.float32(amount), why=why)
    check.that(not any(writer.get("same") for writer in writers), why="write 应当在自己的流 arrivals 上调用。挪到 stream 上结果是对的，可是数据和推理再也不能重叠。")
    return spent


server = student.FixedEvent(student.load(reference.make_plan("wide")), 40)
asked(server, [0], "一个请求，数据马上就到，结果不对。")
took = asked(server, [40, 40], "数据慢了 40 毫秒，结果不对：图读到的是旧的 x。stream 要等数据写完的事件。")
### BEGIN HIDDEN TESTS
for _ in range(2):
    asked(server, [0, 0, 0], "stream 正忙的时候一口气来了三个请求，结果不对：后一个请求的数据盖掉了前一个还没读的 x。写之前也要等上一次读完。", ms=40)
asked(server, [25, 0, 25, 0], "有快有慢的几个请求，有一个不对。两个方向的事件都要有，而且每个请求都要记、都要等。", ms=20)
sluggish = student.FixedEvent(student.define(kit, "Watched")(student.load(reference.make_plan("wide")), lanes_here, "slow"), 40)
for _ in range(2):
    asked(sluggish, [0, 0, 0], "图自己很慢的时候，结果不对：后一个请求的数据盖掉了图还没读的 x。“读完了”的事件要记在图的后面，不是前面。")
n = int(secret.integers(8, 300))
rig = student.define(kit, "Watched")(student.load(reference.make_plan("wide")), lanes_here, "marked")
server = student.FixedEvent(rig, n)
begun = rig.count()
asked(server, [30, 0], "换一个行数，数据慢的时候结果不对。", n=n)
for _ in range(3):  # again if the machine may just have been busy
    spent = asked(server, [0, 30, 0], "一口气交进来的请求不对。", ms=120, n=n)
    if spent < 80:
        break
check.that(spent < 80, why="infer 在主机上等了。事件让一条流等另一条流，主机不用停：用 wait_event，不要用 synchronize。")
amount = int(secret.integers(100, 10000))
rig.mark(amount)  # all that was captured adds it to y: who enqueues has none of it
asked(server, [0, 10], "y 不是图算出来的：考官让录下来的图给 y 加上一个数，这一次的 y 里却没有它。infer 里只启动做好的那张图，从它的结果里取 y。", n=n, amount=amount)
check.equal(rig.count(), begun, why="infer 里应当只启动图，不再入队。")
### END HIDDEN TESTS

# %% [markdown]
# ### 七号的手术：`FixedLanes(engine, lanes)`
#
# - `lanes` 是流的列表，两条或更多；`start(lane, x, y)`、`go(lane)` 和病人的一样，任何交错的次序都要对。同一条道上，一次 `start` 之后总跟着一次 `go`；
# - Profile 照旧：不超过 64 行用 0 号，否则用 1 号；
# - 同一个上下文不能出现在两条道上，连“先后用”也不行：它们会同时在跑；
# - 上下文的个数不随请求增加，最多“道数 × Profile 数”个；
# - 不在主机上等。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 把 `bind` 推迟到 `go` 里，用同一个上下文，次序就不会错了。可是两条流上的两次入队会同时在跑，它们的中间结果放在哪里？
# 上下文属于“Profile”，还是属于“谁在用它”？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `new_context(engine, profile)`、`engine.num_optimization_profiles`、`bind`、`enqueue(context, lane)`。用 `(道, Profile)` 当字典的键。
#
# </details>

# %% solution="FixedLanes" tags=["gpu"]
class FixedLanes:
    """Two or more lanes with a stream each; nobody touches the contexts of another lane."""

    def __init__(self, engine, lanes):
        ### BEGIN SOLUTION: 每条道、每个 Profile 一个上下文
        self.lanes, self.mask, self.chosen = lanes, ones(LONGEST), {}
        profiles = range(engine.num_optimization_profiles)
        self.contexts = {(lane, profile): new_context(engine, profile) for lane in range(len(lanes)) for profile in profiles}
        stream.synchronize()  # the mask is there
        ### END SOLUTION

    def start(self, lane, x, y):
        """Lane number `lane` gets a request. x, y: cupy float32 (length, HIDDEN), length 8 … 512."""
        ### BEGIN SOLUTION: 只碰自己这条道的上下文
        self.chosen[lane] = self.contexts[lane, 0 if len(x) <= 64 else 1]
        bind(self.chosen[lane], x, self.mask, y)
        ### END SOLUTION

    def go(self, lane):
        """Enqueue that request on the lane's stream, without waiting."""
        ### BEGIN SOLUTION: 入队到这条道的流上
        enqueue(self.chosen[lane], self.lanes[lane])
        ### END SOLUTION


# %% test="FixedLanes" kind="structure" points=1 tags=["gpu", "alone"]
kit = reference.value("INSTRUMENTS")
SHIFT = """
import time
import cupy as cp


def tracks(count):
    return [cp.cuda.Stream(non_blocking=True) for _ in range(count)]


def handle(lanes, number):
    return int(lanes[number].ptr)


def shift(desk, lanes, steps, spin, ms):
    '''Keep each lane busy for ms, then the steps: [lane, x, y] starts, [lane] goes. Waits at the end. Returns ms on the host.'''
    cp.cuda.runtime.deviceSynchronize()
    for lane in lanes if ms else ():
        with lane:
            spin(ms)
    begin = time.perf_counter()
    try:
        for lane, *request in steps:
            desk.start(lane, *request) if request else desk.go(lane)
    finally:
        spent = (time.perf_counter() - begin) * 1000
        cp.cuda.runtime.deviceSynchronize()
    return spent
"""


def opened(count, side=student):
    """A watched engine, so many lanes, and how to make the desk on them work."""
    rig, on = side.define(kit, "Watched")(side.load(reference.make_plan("wide")), side.value("stream")), side.define(SHIFT, "tracks")(count)
    desk = side.FixedLanes(rig, on)
    return rig, on, lambda steps, ms: side.define(SHIFT, "shift")(desk, on, steps, side.define(kit, "spin"), ms)


def worked(shift, order, lengths, why, ms=0):
    """order: lane numbers; the first time a lane starts, the second time it goes, and so on. All results must be right."""
    hosts, calls, steps, at = [], [], [], {}
    for lane in order:
        if at.pop(lane, False):
            steps.append([lane])
            continue
        at[lane] = True
        hosts.append(secret.integers(-8, 9, (lengths[len(hosts)], 64)).astype(np.float32))
        calls.append([on_gpu(hosts[-1]), on_gpu(np.zeros_like(hosts[-1]))])
        calls[-1][1].poison()
        steps.append([lane, *calls[-1]])
    spent = shift(steps, ms)
    for host, (_, y) in zip(hosts, calls, strict=True):
        check.equal(y, reference.expected(host), why=why)
    return spent


rig, on, shift = opened(2)
worked(shift, [0, 0, 1, 1], [20, 30], "两个请求先后做，就已经不对。")
worked(shift, [0, 1, 0, 1], [20, 30], "两个差不多长的请求交错着来，先来的那个不对：它的形状和地址被后来的改掉了。")
took = worked(shift, [0, 1, 1, 0], [300, 200], "两个长请求交错着来，有一个不对。")
### BEGIN HIDDEN TESTS
used = {}
rig, on, shift = opened(3)
for turn in range(4):
    order = [int(lane) for lane in secret.permutation([0, 0, 1, 1, 2, 2])] + [int(lane) for lane in secret.permutation([0, 0, 1, 1, 2, 2])]
    lengths = [int(n) for n in (secret.integers(8, 65, 6), secret.integers(65, 513, 6), [8, 64, 65, 512, 64, 65], secret.integers(8, 513, 6))[turn]]
    begun = len(rig.get("enqueues"))
    worked(shift, order, lengths, "三条道任意交错，有一个请求不对。")
    worked(shift, order, lengths, "三条道都正忙的时候，一口气交错着来的请求，有一个不对。", ms=20)
    lines = rig.get("enqueues")[begun:]
    check.equal(sorted((line[3], line[4]) for line in lines), sorted((int(n > 64), n) for n in lengths * 2), why="入队的 Profile 或长度不对：不超过 64 行用 0 号，否则用 1 号；每个请求入队一次。")
    for number, lane, *_ in lines:
        used.setdefault(number, set()).add(lane)
handles = {student.define(SHIFT, "handle")(on, number) for number in range(3)}
check.that(all(len(lanes_of) == 1 for lanes_of in used.values()), why="同一个上下文在两条流上入队过。它们会同时在跑，共用一块暂存，互相写坏中间结果；这次碰巧没错，不等于没有错。")
check.that(set().union(*used.values()) == handles, why="请求没有入队到自己那条道的流上。")
check.that(rig.get("contexts") <= 6, why="上下文太多了：最多道数 × Profile 数个，不能每个请求新建。")
every_lane, twice = [0, 1, 2, 2, 1, 0], [20, 100, 30]
_, _, twin = opened(3, reference)  # should TensorRT itself wait here, nobody is blamed for it
worked(twin, every_lane, twice, "参考实现的结果不对。")
patience = worked(twin, every_lane, twice, "参考实现的结果不对。", ms=200)
worked(shift, every_lane, twice, "三条道交错，有一个请求不对。")
for _ in range(3):  # again if the machine may just have been busy
    spent = worked(shift, every_lane, twice, "三条道都正忙的时候，有一个请求不对。", ms=200)
    if spent < max(130, 1.5 * patience):
        break
check.that(spent < max(130, 1.5 * patience), why="start 或 go 在主机上等了 GPU。各用各的上下文，谁也不用等谁。")
### END HIDDEN TESTS

# %% [markdown]
# ## 第三组：都对，可是慢
#
# 后三个病人，答案永远是对的。先证明这一点，再拿秒表。
#
# ### 八号：形状一换，图就重来
#
# 现场：“两种长度轮流来，比不用图还慢。”（pytorch/TensorRT 的 2881、3276 号改动，TensorRT-LLM 的 3724 号 issue 像是同一种病。）

# %% tags=["gpu"]
class Recapture:
    """y = engine(x), by a graph; for another shape or other buffers, a new graph."""

    def __init__(self, engine):
        self.context, self.mask, self.key = new_context(engine, 1), ones(LONGEST), None

    def infer(self, x, y):
        """On `stream`. x, y: cupy float32 (length, HIDDEN)."""
        key = x.shape, x.data.ptr, y.data.ptr
        if key != self.key:
            stream.synchronize()  # the old graph may still be at work
            bind(self.context, x, self.mask, y)
            enqueue(self.context)
            self.graph, self.key = capture(self.context), key
        self.graph.launch(stream)


# %% [markdown]
# ### 九号：悄悄回退
#
# 现场：“开关是开的，日志里没有错误，可就是没有加速。”（TensorRT 的 3011 号 issue，onnxruntime 的 27329 号 issue。）
#
# 它的一步是：引擎，后面跟着 `BLENDS` 个小内核。

# %% tags=["gpu"]
BLENDS = 32


class SilentFallback:
    """x advances in place: y = engine(x), then y is blended into x. By a graph, of course."""

    def __init__(self, engine, x, y):
        self.x, self.y, self.mask = x, y, ones(len(x))
        self.context, self.graph = new_context(engine, 1), None
        bind(self.context, x, self.mask, y)
        enqueue(self.context)  # warm up; x stays as it is
        stream.synchronize()
        try:
            with stream:
                stream.begin_capture()
                try:
                    self.step()
                finally:
                    graph = stream.end_capture()
            self.graph = graph
        except Exception:  # noqa: BLE001
            pass  # no graph, no harm: it works without, too

    def step(self):
        """The work itself, launch by launch."""
        enqueue(self.context)
        with stream:
            for i in range(BLENDS):
                launch_blend(self.x, self.y, i)
        stream.synchronize()  # make sure that the result is there

    def infer(self):
        """One step, on `stream`."""
        if self.graph is None:
            self.step()
        else:
            self.graph.launch(stream)


# %% [markdown]
# 它的标准答案：

# %%
def stepped(x, times=1):
    """x after so many steps, by NumPy: float32, like x."""
    for _ in range(times):
        y = expected(x)
        for i in range(32):  # BLENDS
            x = blended(x, y, i)
    return x


# %% [markdown]
# ### 十号：每个请求一个新上下文
#
# 现场：“听说上下文不能共用，那就一个请求一个，用完就扔，总安全了吧。”（TensorRT 的 3501 号 issue：还常常伴着显存越占越多。）

# %% tags=["gpu"]
class ThrowawayContext:
    """y = engine(x). A context must not be shared: take a new one for each request."""

    def __init__(self, engine):
        self.engine, self.mask = engine, ones(LONGEST)

    def infer(self, x, y):
        """On `stream`. x, y: cupy float32 (length, HIDDEN), length 8 … 512."""
        context = new_context(self.engine, 1)
        bind(context, x, self.mask, y)
        enqueue(context)
        stream.synchronize()  # the context must outlive its work


# %% [markdown]
# ### 先对答案，再拿秒表
#
# 八号和十号：两种长度轮流来，一共 6 个请求。九号的长度是固定的，走 6 步。数一数。

# %% tags=["demo", "gpu"]
rows = []
for name, broken in (("八号", Recapture), ("十号", ThrowawayContext)):
    watched = Watched(engine, stream)
    patient = broken(watched)
    pair = [fresh(20), fresh(50)]
    wrong = 0
    for turn in range(6):
        x, y, want = pair[turn % 2]
        y.fill(POISON)
        cp.cuda.Device().synchronize()
        patient.infer(x, y)
        wrong += state_of(y, want) != "对"
    captured = sum(line[2] for line in watched.enqueues)
    rows.append((name, f"{wrong} / 6", watched.contexts, len(watched.enqueues), captured))
watched = Watched(engine, stream)
x, y, _ = fresh(40)
start = x.get()
stuck = SilentFallback(watched, x, y)
for _ in range(6):
    stuck.infer()
stream.synchronize()
wrong = 0 if np.array_equal(x.get(), stepped(start, 6)) else 6
rows.append(("九号", f"{wrong} / 6", watched.contexts, len(watched.enqueues), sum(line[2] for line in watched.enqueues)))
lab.say(
    lab.table(("病人", "错的", "上下文", "入队", "其中在捕获里"), rows)
    + f"\n\n九号手里有没有图？**{'有' if stuck.graph is not None else '没有'}**。",
    measured=False,
)

# %% [markdown]
# 三个都没有错。毛病藏在后三列里：八号的捕获次数和请求数一样多；九号捕获过一次，以后却还在一次次入队；十号的上下文和请求一样多。
#
# 每个请求多花多少时间？拿“老实入队”和“启动现成的图”当尺子。

# %% tags=["demo", "gpu"]
pair = [fresh(20), fresh(50)]
ready = []
for x, y, _ in pair:
    context = new_context(engine, 1)
    mask = ones(len(x))
    bind(context, x, mask, y)
    enqueue(context)
    ready.append((context, mask, capture(context)))


def eager_pair():
    for context, _, _ in ready:
        enqueue(context)


def graph_pair():
    for _, _, graph in ready:
        graph.launch(stream)


def pair_through(server):
    for x, y, _ in pair:
        server.infer(x, y)


eighth, tenth = partial(pair_through, Recapture(engine)), partial(pair_through, ThrowawayContext(engine))
x, y, _ = fresh(40)
ninth_context, ninth_mask = new_context(engine, 1), ones(40)
bind(ninth_context, x, ninth_mask, y)


def ninth_body():
    enqueue(ninth_context)
    with stream:
        for i in range(BLENDS):
            launch_blend(x, y, i)


ninth_body()
stream.synchronize()
with stream:
    stream.begin_capture()
    ninth_body()
    ninth_graph = stream.end_capture()
graph_time = lab.compare_us(eager_pair, graph_pair, clock="end_to_end")
times = {
    "两种长度，老实入队": graph_time.first.median / 2,
    "两种长度，现成的图": graph_time.second.median / 2,
    "八号：每换必捕获": lab.end_to_end_us(eighth, repeats=20).median / 2,
    "十号：每次新上下文": lab.end_to_end_us(tenth, repeats=10, warmup=2).median / 2,
    "九号：悄悄回退": lab.end_to_end_us(stuck.infer).median,
    "九号的工作，做成图": lab.end_to_end_us(partial(ninth_graph.launch, stream)).median,
}
fig, ax = plt.subplots(figsize=(8.5, 3.4))
ax.barh(list(times), list(times.values()))
ax.invert_yaxis()
ax.set_xscale("log")
ax.set_xlabel("每个请求的端到端时间（µs，中位数，对数轴）")
ax.set_title(f"对的，可是慢（{lab.gpu_name()}）")
plt.show()
base = times["两种长度，老实入队"]
lab.say(
    f"和老实入队比：八号用时是它的 **{times['八号：每换必捕获'] / base:.1f} 倍**，十号是 **{times['十号：每次新上下文'] / base:.0f} 倍**。"
    f"九号和它本该有的图比，是 **{times['九号：悄悄回退'] / times['九号的工作，做成图']:.1f} 倍**。"
)

# %% [markdown]
# 三种病，三种治法：
#
# - **八号**只留了一张图，一换就扔。留一个字典，键是形状和地址，再加一个上限；扔之前确认它不在跑。
# - **九号**的病根是 `step` 里那句 `synchronize()`：捕获里不许同步，捕获因此作废；而 `except Exception: pass` 把唯一的线索吞掉了。
#   回退本身没有错，**不出声的回退**才是错：要有计数，要有原因。
# - **十号**的道理只对了一半。上下文不能**同时**给两个人用；在同一条流上先后用，完全可以：
#   `execute_async_v3` 返回的时候，这次的形状和地址已经交出去了，接着就能为下一个请求改，不用等。
#
# 注意十号的治法和七号正好相对：七号是共用得太多，十号是一点也不敢用第二次。

# %% [markdown]
# ## 练习三：三个慢的（3 分）
#
# 每个 1 分，可以用的名字和练习一相同，再加 `BLENDS`。速度都和病人比端到端时间（从提交到全部做完，最后做一次整个设备的同步）；
# 如果在这台机器上参考实现自己也快得不多，门槛会降到它的加速比的一半，但不低于 1.2 倍。结果必须始终是对的：先对后快。
#
# `Laps` 是计时用的：跑一圈，就是把状态的每一段送进服务，再把结果写回去当新的状态。

# %% tags=["gpu"]
class Laps:
    """Sends a state through a server: each call infers every part of it, then makes the results the new state."""

    def __init__(self, server, state, lengths):
        """server: has infer(x, y). state: cupy float32 (sum of lengths, HIDDEN), advanced in place. lengths: rows of each part."""
        ends = np.cumsum(lengths).tolist()
        self.server = server
        self.parts = [(state[end - length : end], zeros(length)) for end, length in zip(ends, lengths, strict=True)]
        stream.synchronize()

    def __call__(self):
        for x, y in self.parts:
            self.server.infer(x, y)
        with stream:
            for x, y in self.parts:
                x[...] = y


# %% [markdown]
# 它的标准答案：

# %%
def lapped(state, lengths, laps):
    """The state after so many laps, by NumPy."""
    ends = np.cumsum(lengths)[:-1]
    for _ in range(laps):
        state = np.concatenate([expected(part) for part in np.split(state, ends)])
    return state


# %% [markdown]
# ### 八号的手术：`FixedRecapture(engine, capacity)`
#
# - `infer(x, y)`：同一个键（形状、两个地址）第二次以后只启动图；一个键最多入队两次；
# - 最多留 `capacity` 个键（至少 1），满了扔最久没用过的。被扔的上下文和图可能还在跑：扔之前要等；
# - 两种长度轮流来，至少快 2 倍。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 病人为什么要留住 `key`？如果留住**每一个**键的图，换来换去要付什么？
# 缓冲的地址一直在变的话，字典会长到多大？谁来管？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `collections.OrderedDict`：`move_to_end(key)`、`popitem(last=False)`；`new_context`、`bind`、`enqueue`、`capture`；扔之前 `stream.synchronize()`。
#
# </details>

# %% solution="FixedRecapture" tags=["gpu"]
class FixedRecapture:
    """y = engine(x), by graphs: one for each shape and pair of buffers, at most `capacity`, the least recently used goes first."""

    def __init__(self, engine, capacity):
        ### BEGIN SOLUTION: 一个有序的字典
        from collections import OrderedDict

        self.engine, self.capacity, self.mask, self.kept = engine, capacity, ones(LONGEST), OrderedDict()
        ### END SOLUTION

    def infer(self, x, y):
        """On `stream`; waits only where something is captured or thrown away. x, y: cupy float32 (length, HIDDEN), length 8 … 512."""
        ### BEGIN SOLUTION: 查字典；没有就备上下文、捕获；满了先等，再扔最老的
        key = x.shape, x.data.ptr, y.data.ptr
        if key not in self.kept:
            if len(self.kept) >= self.capacity:
                stream.synchronize()  # the one that goes may still be at work
                self.kept.popitem(last=False)
            context = new_context(self.engine, 1)
            bind(context, x, self.mask, y)
            enqueue(context)
            self.kept[key] = context, capture(context)
        self.kept.move_to_end(key)
        self.kept[key][1].launch(stream)
        ### END SOLUTION


# %% test="FixedRecapture" kind="speedup" points=1 tags=["gpu"]
kit = reference.value("INSTRUMENTS")
send = student.define(kit, "burst")
lanes_here = student.value("stream")
plan = reference.make_plan("wide")


def pairs_of(lengths):
    return [[on_gpu(np.zeros((n, 64), np.float32)), on_gpu(np.zeros((n, 64), np.float32))] for n in lengths]


def asked(server, calls, order, why, ms=0, amount=0):
    """Requests in this order, without waiting; all must be right, and have the amount."""
    hosts = [x.write(secret.integers(-8, 9, x.shape).astype(np.float32)) for x, _ in calls]
    for _, y in calls:
        y.poison()
    send(server, lanes_here, [calls[i] for i in order], ms)
    for i in set(order):
        check.equal(calls[i][1], reference.expected(hosts[i]) + np.float32(amount), why=why)


rig = student.define(kit, "Watched")(student.load(plan), lanes_here)
server = student.FixedRecapture(rig, 4)
calls = pairs_of([20, 50])
for _ in range(3):
    asked(server, calls, [0, 1, 0, 1], "两种长度轮流来，有一个不对。")
check.that(len(rig.get("enqueues")) <= 4, why="两个键，入队不该超过 4 次（各预热一次、捕获一次）。见过的键只启动图。")
state = secret.integers(-8, 8, (70, 64)).astype(np.float32)
mine, other, yardstick = on_gpu(state), on_gpu(state), on_gpu(state)
timed = student.define(kit, "Watched")(student.load(plan), lanes_here)
laps = student.Laps(student.FixedRecapture(timed, 4), mine, [20, 50])
check.speedup(
    laps,
    over=reference.Laps(reference.Recapture(reference.load(plan)), other, [20, 50]),
    best=reference.Laps(reference.FixedRecapture(reference.load(plan), 4), yardstick, [20, 50]),
    state=(mine, yardstick),
    at_least=2.0,
    draw=lambda: secret.integers(-8, 8, (70, 64)).astype(np.float32),
    abs=0.5,
    why="还不够快。见过的键应当只有一次图启动：没有捕获，没有入队，没有同步。",
)
### BEGIN HIDDEN TESTS
began, turns = mine.write(secret.integers(-8, 8, (70, 64)).astype(np.float32)), int(secret.integers(2, 5))
laps.run(turns)
check.equal(mine, reference.lapped(began, [20, 50], turns), abs=0.5, why="计时以后换一个状态再跑几圈，结果不对。")
check.that(2 <= timed.count() <= 4, why="计时的时候还在入队：两个键各预热一次、捕获一次，以后只启动图。")
capacity = int(secret.integers(2, 5))
lengths = [int(n) for n in secret.choice(np.arange(8, 300), capacity + 2, replace=False)]
calls = pairs_of([*lengths, lengths[0]])
rig = student.define(kit, "Watched")(student.load(plan), lanes_here)
server = student.FixedRecapture(rig, capacity)
for _ in range(4):
    order = [int(i) for i in secret.integers(0, len(calls), 8)]
    asked(server, calls, order, "键比容量多，来来回回，有一个不对。同一个长度、不同的缓冲，是两个键。", ms=20)
    check.that(rig.get("alive") <= capacity + 1, why="留下的上下文比容量多：满了要扔掉最久没用过的。")
check.that(rig.get("dropped_busy") == 0, why="被扔掉的上下文，它的图可能还在跑：扔之前要先等 stream 做完。")
begun = len(rig.get("enqueues"))
asked(server, calls, [*range(capacity), *range(capacity)], "填满以后再来一遍，有一个不对。")
check.that(len(rig.get("enqueues")) - begun <= 2 * capacity, why="正好装得下的几个键再来一遍，应当全部命中。")
single = student.define(kit, "Watched")(student.load(plan), lanes_here)
asked(student.FixedRecapture(single, 1), calls[:2], [0, 0, 1, 1, 0], "容量是 1 的时候，有一个请求不对。", ms=20)
check.that(single.count() <= 6 and single.get("dropped_busy") == 0, why="容量是 1 的时候：连着来的同一个键应当命中；被扔掉的图可能还在跑，扔之前要等。")
begun = len(rig.get("enqueues"))
asked(server, calls, [0, capacity, 0], "扔过一个以后，有一个不对。")
check.that(len(rig.get("enqueues")) - begun <= 2, why="0 号刚刚用过，来了新的键，应当扔掉最久没用过的，而不是它。")
marked = student.define(kit, "Watched")(student.load(plan), lanes_here, "marked")
server = student.FixedRecapture(marked, 2)
for _ in range(2):
    asked(server, calls[:2], [0, 1, 0, 1], "又造一个，两个键轮流来，有一个不对。")
amount = int(secret.integers(100, 10000))
marked.mark(amount)  # all that was captured adds it to y: who enqueues has none of it
asked(server, calls[:2], [1, 0], "见过的键，y 不是图算出来的：考官让录下来的图都给 y 加上一个数，这一次的 y 里却没有它。见过的键只启动它的图，不再入队。", amount=amount)
### END HIDDEN TESTS

# %% [markdown]
# ### 九号的手术：`FixedFallback(engine, x, y)`
#
# - 构造时捕获 `step` 的工作（引擎和 `BLENDS` 次 `launch_blend`），**不改 `x`**；`infer()` 启动图，不等；
# - 引擎拒绝被捕获：不抛异常，回退到逐个启动，结果照样对；每回退一次 `infer()`，`fallbacks` 加 1；`reason` 是一个字符串，说明为什么没有图，有图时是空字符串；
# - 不管成败，`stream` 不能停在捕获里。属性 `graph` 是图或 `None`；
# - 比病人至少快 1.8 倍。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 病人的哪一行让捕获作废？那一行想保证什么？同一条流上，后面的工作本来就会等前面的。
# “捕获失败”这件事，谁应当知道？怎样知道？
# 引擎被拒绝的那次，它后面的小内核该不该也录进图里？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `stream.begin_capture()`、`stream.end_capture()`（捕获已经作废时抛 `cp.cuda.runtime.CUDARuntimeError`）；`enqueue` 被拒绝时抛 `RuntimeError`（`CUDARuntimeError` 也是它的一种）；
# `str(error)`；`try … finally …`。
#
# </details>

# %% solution="FixedFallback" tags=["gpu"]
class FixedFallback:
    """x advances in place: y = engine(x), then y is blended into x. graph: or None; reason: why none; fallbacks: steps without."""

    def __init__(self, engine, x, y):
        """x, y: cupy float32 (length, HIDDEN), alive as long as this; x is not advanced here."""
        ### BEGIN SOLUTION: 预热，捕获没有同步的一步；失败就记下原因，流不留在捕获里
        self.x, self.y, self.mask = x, y, ones(len(x))
        self.context, self.graph, self.reason, self.fallbacks = new_context(engine, 1), None, "", 0
        bind(self.context, x, self.mask, y)
        enqueue(self.context)  # warm up; x stays as it is
        stream.synchronize()
        try:
            with stream:
                stream.begin_capture()
                try:
                    self.step()
                finally:
                    graph = stream.end_capture()
            self.graph = graph
        except RuntimeError as error:
            self.reason = f"没有捕获成：{error}"
        ### END SOLUTION

    def step(self):
        """The work itself, launch by launch, on `stream`, without waiting."""
        ### BEGIN SOLUTION: 入队，然后 BLENDS 个小内核；不同步
        enqueue(self.context)
        with stream:
            for i in range(BLENDS):
                launch_blend(self.x, self.y, i)
        ### END SOLUTION

    def infer(self):
        """One step, on `stream`, without waiting."""
        ### BEGIN SOLUTION: 有图就启动；没有就逐个启动，并且记一笔
        if self.graph is not None:
            self.graph.launch(stream)
            return
        self.fallbacks += 1
        self.step()
        ### END SOLUTION


# %% test="FixedFallback" kind="speedup" points=1 tags=["gpu"]
kit = reference.value("INSTRUMENTS")
send, watch = student.define(kit, "burst"), student.define(kit, "Watched")
lanes_here = student.value("stream")
plan = reference.make_plan("wide")


def opened(n, mood=""):
    host = secret.integers(-8, 8, (n, 64)).astype(np.float32)
    x, y = on_gpu(host), on_gpu(np.zeros((n, 64), np.float32))
    rig = watch(student.load(plan), lanes_here, mood)
    server = student.FixedFallback(rig, x, y)
    check.that(not lanes_here.is_capturing(), why="构造完以后，stream 还停在捕获里：每一条路都要走到 end_capture。")
    check.equal(x, host, why="构造的时候 x 就变了。预热只需要引擎入队一次；小内核只应当出现在捕获里。")
    return rig, server, x, host


rig, server, x, host = opened(40)
check.that(server.get("graph") is not None, why="老实的引擎，捕获应当成功，graph 不该是 None。捕获里的哪一步让它作废了？")
check.nodes(server.get("graph"), kernels=(33, None), why="图里应当有引擎的内核和 32 个小内核。")
for _ in range(3):  # again if the machine may just have been busy
    spent = send(server, lanes_here, [[]] * 3, 120)
    host = reference.stepped(host, 3)
    if spent < 80:
        break
check.equal(x, host, why="一口气走几步，x 不对。")
check.equal([server.get("fallbacks"), server.get("reason")], [0, ""], why="没有回退的时候，fallbacks 是 0，reason 是空字符串。")
state = secret.integers(-8, 8, (40, 64)).astype(np.float32)
blank = np.zeros((40, 64), np.float32)
mine, other, yardstick = on_gpu(state), on_gpu(state), on_gpu(state)
timed = watch(student.load(plan), lanes_here)
swift = student.FixedFallback(timed, mine, on_gpu(blank))
begun = timed.count()
check.speedup(
    swift.get("infer"),
    over=reference.SilentFallback(reference.load(plan), other, on_gpu(blank)).get("infer"),
    best=reference.FixedFallback(reference.load(plan), yardstick, on_gpu(blank)).get("infer"),
    state=(mine, yardstick),
    at_least=1.8,
    draw=lambda: secret.integers(-8, 8, (40, 64)).astype(np.float32),
    abs=0.5,
    why="还不够快。每一步应当只有一次图启动。",
)
### BEGIN HIDDEN TESTS
check.equal(timed.count(), begun, why="计时的时候还在入队：有了图，infer 里就只启动图。")
began = mine.write(secret.integers(-8, 8, (40, 64)).astype(np.float32))
swift.get("graph").instantiate().run(2)
check.equal(mine, reference.stepped(began, 2), why="考官启动 graph 里的那张图，x 不对：引擎和小内核都要录在这张图里。")
check.that(spent < 80, why="infer 在主机上等了 GPU。结果什么时候要，由调用者去等。")
rig, server, x, host = opened(int(secret.integers(8, 300)), "shy")
check.that(server.get("graph") is None, why="入队被拒绝的捕获里没有引擎，这样的图不能用，graph 应当是 None。")
turns = int(secret.integers(3, 7))
send(server, lanes_here, [[]] * turns, 0)
check.equal(x, reference.stepped(host, turns), why="引擎拒绝被捕获，应当回退到逐个启动，结果照样对。")
check.equal(server.get("fallbacks"), turns, why="每回退一次，fallbacks 加 1：不出声的回退，等于没有监控。")
reason = server.get("reason")
check.that(isinstance(reason, str) and len(reason) > 0, why="没有图的时候，reason 应当说明原因。")
rig, server, x, host = opened(int(secret.integers(8, 300)))
begun = rig.count()
send(server, lanes_here, [[]] * 4, 20)
check.equal(x, reference.stepped(host, 4), why="别的捕获失败过以后，老实的引擎走四步，x 不对。")
check.equal(rig.count(), begun, why="有了图，infer 里就不该再入队。")
### END HIDDEN TESTS

# %% [markdown]
# ### 十号的手术：`FixedContext(engine)`
#
# - `infer(x, y)`：任意长度（8 到 512），任意缓冲，一口气交进来，都对；
# - 从头到尾只有**一个**上下文；不在主机上等；
# - 至少快 3 倍。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 病人怕的是什么？前一个请求还没算完，就去改上下文的形状和地址，会改到它吗？
# 地址和形状是在 `execute_async_v3` 被调用的时候读走的，还是在 GPU 执行的时候？想一想图为什么会“写死”地址。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 还是 `new_context`、`bind`、`enqueue` 这三个。问自己：哪个贵，哪个便宜？哪个只该做一次，哪个每个请求都要做？
#
# </details>

# %% solution="FixedContext" tags=["gpu"]
class FixedContext:
    """y = engine(x), with one context for all requests on `stream`."""

    def __init__(self, engine):
        ### BEGIN SOLUTION: 上下文只建一个
        self.context, self.mask = new_context(engine, 1), ones(LONGEST)
        ### END SOLUTION

    def infer(self, x, y):
        """On `stream`, without waiting. x, y: cupy float32 (length, HIDDEN), length 8 … 512."""
        ### BEGIN SOLUTION: 改状态，入队，不等
        bind(self.context, x, self.mask, y)
        enqueue(self.context)
        ### END SOLUTION


# %% test="FixedContext" kind="speedup" points=1 tags=["gpu"]
kit = reference.value("INSTRUMENTS")
lanes_here = student.value("stream")
plan = reference.make_plan("wide")


def asked(server, lengths, why, ms=0, side=student):
    """Requests without waiting in between; all must be right. Returns ms on the host."""
    hosts = [secret.integers(-8, 9, (n, 64)).astype(np.float32) for n in lengths]
    calls = [[on_gpu(host), on_gpu(np.zeros_like(host))] for host in hosts]
    for _, y in calls:
        y.poison()
    spent = side.define(kit, "burst")(server, side.value("stream"), calls, ms)
    for host, (_, y) in zip(hosts, calls, strict=True):
        check.equal(y, reference.expected(host), why=why)
    kept_buffers.extend(calls)
    return spent


kept_buffers = []
rig = student.define(kit, "Watched")(student.load(plan), lanes_here)
server = student.FixedContext(rig)
asked(server, [20, 300, 20], "三个请求，有一个不对。")
check.that(rig.get("contexts") == 1, why="从头到尾只应当有一个上下文。")
state = secret.integers(-8, 8, (40, 64)).astype(np.float32)
mine, other, yardstick = on_gpu(state), on_gpu(state), on_gpu(state)
laps = student.Laps(student.FixedContext(student.load(plan)), mine, [40])
check.speedup(
    laps,
    over=reference.Laps(reference.ThrowawayContext(reference.load(plan)), other, [40]),
    best=reference.Laps(reference.FixedContext(reference.load(plan)), yardstick, [40]),
    state=(mine, yardstick),
    at_least=3.0,
    ceiling=None,
    draw=lambda: secret.integers(-8, 8, (40, 64)).astype(np.float32),
    abs=0.5,
    why="还不够快。新建上下文是最贵的一步，只做一次就够；也不用在主机上等。",
)
### BEGIN HIDDEN TESTS
began, turns = mine.write(secret.integers(-8, 8, (40, 64)).astype(np.float32)), int(secret.integers(2, 5))
laps.run(turns)
check.equal(mine, reference.lapped(began, [40], turns), abs=0.5, why="计时以后换一个状态再跑几圈，结果不对。")
for _ in range(2):
    asked(server, [int(n) for n in secret.integers(8, 513, 5)], "一口气交进来的几个请求，有一个不对。", ms=20)
twin = reference.FixedContext(reference.load(plan))  # should TensorRT itself wait here, nobody is blamed for it
asked(twin, [20, 300], "参考实现的结果不对。", side=reference)
patience = asked(twin, [20, 300, 20], "参考实现的结果不对。", ms=200, side=reference)
for _ in range(3):  # again if the machine may just have been busy
    spent = asked(server, [20, 300, 20], "一口气交进来的请求不对。", ms=200)
    if spent < max(130, 1.5 * patience):
        break
check.that(spent < max(130, 1.5 * patience), why="infer 在主机上等了 GPU。同一条流上，改形状、改地址都不用等前一个请求做完。")
check.that(rig.get("contexts") == 1, why="从头到尾只应当有一个上下文，换长度也不用新建。")
### END HIDDEN TESTS

# %% [markdown]
# ## 练习四：会诊（2 分，不需要 GPU）
#
# 病人不在眼前，只有一份病历。写 `suspects(case)`，返回**解释得通的病因**，一个按字母排序的字符串列表。
#
# `case` 是字典：
#
# - `requests`：请求的列表，按到达的次序。每个是字典：`length` 长度；`x`、`y` 缓冲的名字；`wave` 第几波（同一波的请求交错在一起）；`right` 答案对不对；
# - `limits`：`[最短, 最长]`，正在用的 Profile 的范围；
# - `split`：短请求和长请求的分界，不超过它的用短的 Profile；
# - `counters`：`contexts` 创建的上下文数，`captures` 捕获的次数，`launches` 图启动的次数。
#
# **先查错。** 只要有一个请求不对，就只看下面六种病因。每种病因都**预言**了哪些请求会错；预言和实际**一个不差**，才算解释得通：
#
# | 病因 | 一个请求会错，当且仅当 |
# |:--|:--|
# | `"address"`（一号） | 前面有同样长度的请求，而且这种长度的**第一个**请求，`x`、`y` 和它不全一样 |
# | `"padding"`（二号） | 前面有比它长的请求 |
# | `"empty"`（三号） | 它不是第一个请求 |
# | `"refused"`（五号） | 长度不在 `limits` 里（两头都算在里面） |
# | `"shared"`（七号） | 同一波里，**后面**还有和它同一边的请求（都不超过 `split`，或者都超过） |
# | `"update"`（四号） | 减半的次数和第一个请求不同；次数是反复把 n 换成 ⌈n/2⌉、直到剩 1 要做几次，1 算 0 次 |
#
# **再查慢。** 全对的话，只看三种，照计数判断：
#
# | 病因 | 当且仅当 |
# |:--|:--|
# | `"context"`（十号） | 上下文数不少于请求数 |
# | `"fallback"`（九号） | 图一次也没有启动过 |
# | `"recapture"`（八号） | 捕获的次数多于长度的种类数 |
#
# 都不符合，返回空列表：错的病人是“别的病”，对的病人是“没有病”。六号不在表里：它错不错要看时间，光看病历看不出来，只能做实验。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 不要看着症状猜。对每种病因，先写一个函数，不看 `right`，只回答“要是这个病，哪些请求会错”。然后呢？
# 两种病因可能预言同样的错：这时两个都要列出来，还要再做一个实验才能分开。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 预言写成布尔的列表，和 `[not request["right"] for request in requests]` 比 `==`。
# `enumerate`、`any`、`next(…)`；减半的次数：循环，或者 `(n - 1).bit_length()`。`sorted`。
#
# </details>

# %% solution="suspects"
def suspects(case):
    """The causes that explain a case. case: see above. Returns a sorted list of str."""
    ### BEGIN SOLUTION: 每种病因先预言谁会错，再和实际比；全对了才看计数
    requests, counters = case["requests"], case["counters"]
    low, high = case["limits"]

    def first_like(request):
        return next(other for other in requests if other["length"] == request["length"])

    def buffers(request):
        return request["x"], request["y"]

    def halvings(request):
        return (request["length"] - 1).bit_length()

    def side(request):
        return request["length"] <= case["split"]

    predictions = {
        "address": lambda i, r: buffers(first_like(r)) != buffers(r),
        "padding": lambda i, r: any(other["length"] > r["length"] for other in requests[:i]),
        "empty": lambda i, r: i > 0,
        "refused": lambda i, r: not low <= r["length"] <= high,
        "shared": lambda i, r: any(other["wave"] == r["wave"] and side(other) == side(r) for other in requests[i + 1 :]),
        "update": lambda i, r: halvings(r) != halvings(requests[0]),
    }
    wrong = [not request["right"] for request in requests]
    if any(wrong):
        return sorted(name for name, rule in predictions.items() if [rule(i, r) for i, r in enumerate(requests)] == wrong)
    lengths = {request["length"] for request in requests}
    slow = {
        "context": counters["contexts"] >= len(requests),
        "fallback": counters["launches"] == 0,
        "recapture": counters["captures"] > len(lengths),
    }
    return sorted(name for name, found in slow.items() if found)
    ### END SOLUTION


# %% test="suspects" kind="answer" points=2
def record_of(rows, counters=(1, 2, 5), limits=(8, 64), split=64):
    """rows: (length, x, y, wave, right)."""
    requests = [dict(zip(("length", "x", "y", "wave", "right"), row, strict=True)) for row in rows]
    return {"requests": requests, "limits": list(limits), "split": split, "counters": dict(zip(("contexts", "captures", "launches"), counters, strict=True))}


CASES = [
    (record_of([(20, "a", "b", 0, True), (20, "c", "b", 1, False), (20, "a", "b", 2, True), (30, "c", "d", 3, True)]), ["address"]),
    (record_of([(12, "a", "b", 0, True), (30, "a", "b", 1, True), (18, "a", "b", 2, False)]), ["padding"]),
    (record_of([(40, "a", "b", 0, True), (65, "c", "d", 1, False), (64, "e", "f", 2, True)]), ["refused", "update"]),
    (record_of([(20, "a", "b", 0, False), (25, "c", "d", 0, True), (90, "e", "f", 1, True)], limits=(8, 512)), ["shared"]),
    (record_of([(20, "a", "b", 0, True), (50, "a", "b", 1, True), (20, "a", "b", 2, True)], counters=(1, 3, 3)), ["recapture"]),
    (record_of([(20, "a", "b", 0, True), (20, "a", "b", 1, True)], counters=(2, 1, 0)), ["context", "fallback"]),
    (record_of([(20, "a", "b", 0, True), (20, "a", "b", 1, True)], counters=(1, 1, 2)), []),
]
check.equal(student.suspects(CASES[0][0]), CASES[0][1], why="第一份病历不对：第二个请求和同长度的第一个缓冲不同，错了；第三个又回到原来的缓冲，对了。是 address。")
check.equal([student.suspects(case) for case, _ in CASES], [causes for _, causes in CASES], why="这几份病历里有不对的。错的病人只看预言是否一个不差；全对的才看计数。")
### BEGIN HIDDEN TESTS
def foretold(name, requests, limits, split):
    """Which requests a cause makes wrong."""
    said = []
    for i, request in enumerate(requests):
        n, before = request["length"], requests[:i]
        same = [other for other in before if other["length"] == n]
        steps, m = 0, n
        while m > 1:
            m, steps = (m + 1) // 2, steps + 1
        first, m = 0, requests[0]["length"]
        while m > 1:
            m, first = (m + 1) // 2, first + 1
        said.append({
            "address": bool(same) and (same[0]["x"], same[0]["y"]) != (request["x"], request["y"]),
            "padding": max([other["length"] for other in before], default=0) > n,
            "empty": i > 0,
            "refused": n < limits[0] or n > limits[1],
            "shared": any(other["wave"] == request["wave"] and (other["length"] > split) == (n > split) for other in requests[i + 1 :]),
            "update": steps != first,
        }[name])
    return said


WRONG = ("address", "padding", "empty", "refused", "shared", "update")


def made(cause):
    """A case with this cause (None: all right; "noise": wrong by no rule)."""
    count = int(secret.integers(3, 12))
    menu = [int(n) for n in secret.integers(1, 300, 5)] + [64, 65, 128, 129]
    limits, split = (int(secret.integers(2, 20)), int(secret.choice([64, 128, 200]))), int(secret.choice([32, 64, 129]))
    rows, wave = [], 0
    for _ in range(count):
        wave += int(secret.random() < 0.6)
        rows.append((int(secret.choice(menu)), f"x{secret.integers(3)}", f"y{secret.integers(2)}", wave, True))
    counters = tuple(int(n) for n in (secret.choice([1, 2, count - 1, count, count + 2]), secret.integers(0, count + 1), secret.choice([0, 1, count])))
    case = record_of(rows, counters, limits, split)
    if cause == "noise":
        said = [bool(secret.random() < 0.5) for _ in rows]
    else:
        said = foretold(cause, case["requests"], limits, split) if cause else [False] * count
    for request, wrong in zip(case["requests"], said, strict=True):
        request["right"] = not wrong
    return case


def truth(case):
    requests, counters = case["requests"], case["counters"]
    wrong = [not request["right"] for request in requests]
    if any(wrong):
        return [name for name in sorted(WRONG) if foretold(name, requests, case["limits"], case["split"]) == wrong]
    slow = (
        ("context", counters["contexts"] >= len(requests)),
        ("fallback", counters["launches"] == 0),
        ("recapture", counters["captures"] > len({request["length"] for request in requests})),
    )
    return [name for name, found in slow if found]


def edge(cause, lengths, limits=(8, 64), split=64, counters=(1, 2, 5)):
    """A case with this cause (None: all right) whose requests, all in one wave, lie on either side of a line."""
    case = record_of([(n, f"x{i}", "y0", 0, True) for i, n in enumerate(lengths)], counters, limits, split)
    for request, wrong in zip(case["requests"], foretold(cause, case["requests"], limits, split) if cause else [False] * len(lengths), strict=True):
        request["right"] = not wrong
    return case


low, high, split = (int(secret.integers(*ends)) for ends in ((3, 20), (60, 250), (30, 200)))
ward = [made(cause) for cause in (*WRONG, None, None, "noise") for _ in range(12)]
ward += [
    edge("refused", [low + 9, low, low - 1], (low, high)),
    edge("refused", [high + 1, high, high - 1], (low, high)),
    edge("shared", [split, split + 1, split + 2, split - 1], split=split),
    edge("shared", [split, split + 1, split], split=split),
    edge("update", [1, 2, 1, 3]),
    edge("update", [128, 129, 65, 64]),
    edge("padding", [low, high, low + 1, low, high]),
    *(edge(None, [20, 50, 20, 50], counters=(contexts, captures, 3)) for contexts in (3, 4) for captures in (2, 3)),
]
ward = [ward[i] for i in secret.permutation(len(ward))]
for causes, why in (
    (("address", "padding", "empty"), "一、二、三号的病历里有不对的。address 比的是同长度的第一个请求，x 和 y 都要比；padding 比的是前面所有的请求；empty 从第二个请求起全错。"),
    (("refused", "shared", "update"), "四、五、七号的病历里有不对的。refused 的两头都算合法；shared 只看同一波里后面的、同一边的；update 比的是第一个请求的减半次数。"),
    (("context", "fallback", "recapture"), "全对的病历里有不对的。只有一个请求也没错，才看计数。"),
):
    chosen = [case for case in ward if set(truth(case)) & set(causes)]
    check.equal([student.suspects(case) for case in chosen], [truth(case) for case in chosen], why=why)
check.equal([student.suspects(case) for case in ward], [truth(case) for case in ward], why="还有病历不对：没有病因解释得通的，应当返回空列表；解释得通的不止一个，都要列出来，按字母排序。")
### END HIDDEN TESTS

# %% [markdown] tags=["instructor"]
# 给教师：十个程序对应的现场记录，以及故障靠什么必然出现：
#
# | 号 | 现场 | 凭什么必然 |
# |:--|:--|:--|
# | 1 | onnxruntime#20050，imp#1648 | 输出涂毒；图里写死的地址 |
# | 2 | sglang PR 24401，rvllm PR 32 | 先长后短；掩码留着 1 |
# | 3 | pytorch#87894 | 节点数为 0；换数据 |
# | 4 | tiny-cuda-nn#206，llama.cpp PR 7302 | 减半次数变，节点数变，返回 910 |
# | 5 | TensorRT#2215、#4011 | 返回值 False：`set_input_shape` 的，或 `execute_async_v3` 的（10.6 是后者） |
# | 6 | StreamDiffusion PR 51，cupy#6104 | 写数据前空转几十毫秒 |
# | 7 | TensorRT#1300、#846 | start、start、go、go 的次序 |
# | 8 | pytorch/TensorRT PR 2881、3276 | 捕获次数 |
# | 9 | TensorRT#3011 | 捕获里同步，三种模式都是 900 |
# | 10 | TensorRT#3501 | 上下文个数 |
#
# 测试用的仪器（`INSTRUMENTS`）取自参考进程，学习者改不到；它留住真的上下文，所以“在跑的时候被扔掉”只记一笔，不会让进程崩溃。
#
# 一、二、六、八号要求干活的是图。只数入队还不够：绕过仪器、直接用真的上下文入队，仪器数不到。所以有一种引擎（`"marked"`）在捕获里的每次入队后面
# 再录一个小内核，它给 `y` 加上一个数；这个数等图都录好了才抽，之前是 0。图算出来的 `y` 带着它，逐次入队算出来的没有；
# 用哪个 API 启动、图存在哪里，都不管。

# %% [markdown]
# ## 小结
#
# | 以前的说法 | 实验以后的说法 |
# |:--|:--|
# | 没有报错，就是对的 | 七个错的程序，没有一个抛异常。换数据，涂毒，对答案，才算数 |
# | 快，说明图起作用了 | 空图最快。先数节点，再看时间 |
# | 形状一样，图就能用 | 地址也要一样；或者图用自己的固定缓冲，数据拷进拷出 |
# | 填充只要 `mask` 对就行 | 每一行都要写成中性的值，NaN 乘 0 还是 NaN |
# | 更新失败会有人告诉我 | 910 是返回值，不看就没有；可执行图还是旧的 |
# | 加一句同步就好了 | 那是把错的改成慢的；两条流之间用事件，两个方向都要 |
# | 上下文不能共用，所以每次新建 | 不能**同时**用。一条道一个，先后用没有问题 |
# | 有回退，所以安全 | 不出声的回退，等于没有图；要有计数和原因 |
#
# **带走三句话**
#
# 1. 先查错，再查慢：错的程序测出来的速度没有意义。
# 2. 每种病因都能预言谁会错。预言对得上，才是病因；对不上，就再做一个实验。
# 3. 让偶然变成必然：慢内核撑开时间差，涂毒让旧结果现形，计数让悄悄发生的事留下痕迹。
#
# 下一步：《图何时无用》。有些程序既没有错，也没有病，图就是帮不上忙；怎样在动手之前就算出来？
