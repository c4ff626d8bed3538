# %% [markdown]
# # 多流调度
#
# 一个推理服务嫌慢，加了八个线程。头一版八个线程合用一个执行上下文（execution context），结果时对时错；
# 第二版给了八个上下文，却都往同一条流（stream）里放，一点没快；第三版八条流都分开了，GPU 还是闲着一大半：
# CPU 一个一个地入队，喂不饱八条流。
#
# 三个版本，三个不同的病：**共用了不该共用的，排在了不该排的队里，吩咐的人忙不过来。**
# 这一章把多个推理请求放到多条流上，让它们既不打架，又真的同时在跑，最后收进一张图里，一次交出去。
#
# **学完以后，你能够**
#
# - 说清楚引擎、执行上下文、流、缓冲各由谁独占、谁能共用，写一个不出错的多线程推理池；
# - 画出泳道图，看着图说出时间花在 CPU 提交、排队还是 GPU；
# - 把几个引擎录成一张图里并排的分支，比一张接一张地启动快几倍；
# - 用优先级和辅助流，并且知道它们什么时候不起作用；
# - 在吞吐（throughput）和延迟（latency）之间，用量到的数字选流的条数。
#
# **需要的基础**：《多流捕获与图的生命周期》里的分叉、汇合和泳道，《捕获 TensorRT 推理》里的预热、捕获和“`False` 不能放过”。
#
# **时间**：约 60 分钟，其中三道练习约 40 分钟。
#
# 下一格导入的 `check`、`student` 等五个名字只给练习后面的测试单元用，现在不用管它们。

# %%
import numpy as np
from functools import partial
from launchlab import lab
from launchlab.exam import check, on_gpu, reference, secret, student

lab.here()

# %% [markdown]
# ## 准备：一座小塔
#
# 全章的引擎都是同一种“塔”：`depth` 层，每层一次矩阵乘、一次 ReLU，再把数折回 −8…7。输入输出都叫 `x` 和 `y`，
# 形状是 (行数, 64)，行数在 1 到 16 之间随意。权重只有 −1、0、1，所有中间值都是小整数，
# 所以结果不管用哪种策略（tactic）都一位不差：**谁被谁踩了一脚，一眼就能看出来。**
#
# `first` 不同，权重就不同，得到的就是不同的引擎。NumPy 版的标准答案（不需要 GPU）：

# %%
WIDTH = 64
MOST_ROWS = 16


def weight(i):
    """Weights of layer number i: float32, shape (WIDTH, WIDTH), values -1, 0, 1."""
    return np.random.default_rng(2000 + i).integers(-1, 2, (WIDTH, WIDTH)).astype(np.float32)


def fold(t):
    """Bring integers (any float dtype) back to -8 … 7."""
    return t - 16 * np.floor(t / 16) - 8


def inferred(x, depth, first=0):
    """What the tower of layers first … first + depth - 1 makes of x (numpy float32 integers, shape (rows, WIDTH))."""
    h = x.astype(np.float64)
    for i in range(first, first + depth):
        h = fold(np.maximum(h @ weight(i), 0))
    return h.astype(np.float32)


# %% [markdown]
# TensorRT 版。`tower_plan` 构建计划文件（plan），同样的参数只构建一次；`load` 把它变成引擎。
#
# - `require`：TensorRT 的 `False` 和 `None` 一律变成 `RuntimeError`，并带上它自己说的原因；
# - `bind`：给上下文设好输入的形状和两个地址；
# - `capturing`：善后周全的捕获，出错时结束捕获、清掉最后一个错误，再把原来的异常放出去；
# - 四个小内核（kernel）：`spin` 空转一段时间；`stamp` 把 GPU 的时刻记进日志；`combine` 后面的练习三再讲；
#   `refill` 把一块缓冲抄进另一块，扮演“别的流上的前处理”。
#
# `stream` 是起始流，`sides` 是八条给分支用的流，都用 `non_blocking=True` 创建，和默认流互不等待。

# %% tags=["gpu"]
from contextlib import contextmanager
from functools import cache

import cupy as cp
import tensorrt as trt
from cuda.bindings import runtime as cudart

stream = cp.cuda.Stream(non_blocking=True)
sides = [cp.cuda.Stream(non_blocking=True) for _ in range(8)]
runtime = trt.Runtime(lab.trt_logger())

SOURCE = r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
}

extern "C" __global__ void stamp(unsigned long long *log, unsigned int slot) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    log[slot] = now;
}

extern "C" __global__ void combine(float *x, const float *y, unsigned int parts, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= parts * size) return;
    unsigned int k = t / size, i = t % size;
    float v = x[t] + y[t] + y[(k + 1) % parts * size + i] + (float)k;
    x[t] = v - 16.0f * floorf(v / 16.0f) - 8.0f;
}

extern "C" __global__ void refill(float *x, const float *source, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) x[t] = source[t];
}
"""
module = cp.RawModule(code=SOURCE)
spin, stamp, combine, refill = (module.get_function(name) for name in ("spin", "stamp", "combine", "refill"))
BLOCK = 256


def require(result, what):
    """Return result, unless it is False or None, TensorRT's ways of refusing: then RuntimeError with its reasons."""
    if result is False or result is None:
        raise RuntimeError(f"{what}失败。" + " ".join(lab.trt_errors()))
    return result


@cache
def the_builder():
    """The one builder of this notebook: while it lives, TensorRT's builder library stays loaded, which takes seconds."""
    return trt.Builder(lab.trt_logger())


@cache
def tower_plan(depth, first=0):
    """Plan (bytes) of the tower of layers first … first + depth - 1: x → y, both float32 (1 … MOST_ROWS, WIDTH)."""
    builder = the_builder()
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    kept = []  # TensorRT does not copy weights: they must live until the build is done

    def constant(array):
        kept.append(np.ascontiguousarray(array, np.float32))
        return network.add_constant(kept[-1].shape, trt.Weights(kept[-1])).get_output(0)

    def pair(a, b, operation):
        return network.add_elementwise(a, b, operation).get_output(0)

    operation, plain = trt.ElementWiseOperation, trt.MatrixOperation.NONE
    sixteen, eight = constant([[16]]), constant([[8]])
    h = network.add_input("x", trt.DataType.FLOAT, (-1, WIDTH))
    for i in range(first, first + depth):
        t = network.add_matrix_multiply(h, plain, constant(weight(i)), plain).get_output(0)
        t = network.add_activation(t, trt.ActivationType.RELU).get_output(0)
        whole = pair(pair(t, sixteen, operation.FLOOR_DIV), sixteen, operation.PROD)
        h = pair(pair(t, whole, operation.SUB), eight, operation.SUB)
    h.name = "y"
    network.mark_output(h)
    config = builder.create_builder_config()
    config.builder_optimization_level = 1  # quick to build; speed of single kernels is no subject here
    config.progress_monitor = lab.build_progress()
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, WIDTH), (4, WIDTH), (MOST_ROWS, WIDTH))
    config.add_optimization_profile(profile)
    with lab.timing_cache(config):
        return bytes(require(builder.build_serialized_network(network, config), "构建"))


def load(plan):
    """The engine (trt.ICudaEngine) of a plan (bytes)."""
    return require(runtime.deserialize_cuda_engine(plan), "载入计划文件")


def bind(context: "trt.IExecutionContext", x, y):
    """Set the input's shape and both addresses. x, y: contiguous cupy float32, same shape (rows, WIDTH). RuntimeError if refused."""
    require(context.set_input_shape("x", x.shape), "设置 x 的形状")
    require(context.set_tensor_address("x", x.data.ptr), "设置 x 的地址")
    require(context.set_tensor_address("y", y.data.ptr), "设置 y 的地址")


@contextmanager
def capturing(queue):
    """Capture on queue (a cupy Stream). Yields a list; afterwards it holds the cupy Graph, instantiated.

    Whatever is raised inside ends the capture, is followed by no graph, and goes on as it is.
    """
    captured = []
    queue.begin_capture()
    try:
        yield captured
    except BaseException:
        ended, half = cudart.cudaStreamEndCapture(queue.ptr)
        if not int(ended):
            cudart.cudaGraphDestroy(half)
        cudart.cudaGetLastError()
        raise
    try:
        captured.append(queue.end_capture())
    except cp.cuda.runtime.CUDARuntimeError:
        cudart.cudaGetLastError()
        raise


def launch_spin(queue, us, blocks=1, threads=1):
    """Keep `threads` GPU threads of each of `blocks` blocks busy for us microseconds, on queue. Returns at once."""
    with queue:
        spin((blocks,), (threads,), (np.uint64(us * 1000),))


def launch_stamp(queue, log, slot):
    """Write the GPU's time (ns) to log[slot] (cupy uint64), on queue. Returns at once."""
    with queue:
        stamp((1,), (1,), (log, np.uint32(slot)))


def launch_combine(queue, x, y):
    """Advance x by y (both cupy float32, (parts, rows, WIDTH), contiguous), on queue. Returns at once."""
    with queue:
        combine((-(-x.size // BLOCK),), (BLOCK,), (x, y, np.uint32(x.shape[0]), np.uint32(x[0].size)))


def launch_refill(queue, x, source):
    """Copy source to x (cupy float32, same shape, contiguous), on queue. Returns at once."""
    with queue:
        refill((-(-x.size // BLOCK),), (BLOCK,), (x, source, np.uint32(x.size)))


# The first launch of a kernel loads its code, which may be refused while a stream is capturing: warm up.
with stream:
    warm = cp.zeros((2, 2, WIDTH), cp.float32)
    launch_stamp(stream, cp.zeros(1, cp.uint64), 0)
launch_spin(stream, 1)
launch_combine(stream, warm, warm)
launch_refill(stream, warm, warm)
stream.synchronize()

# %% [markdown]
# ## 谁能共用，谁要独占
#
# 先看一张表。它是这一章的交通规则：
#
# | 东西 | 里面有什么 | 同时在跑的请求能不能共用 |
# |:--|:--|:--|
# | 引擎（engine） | 权重、编译好的内核，造好以后只读 | 能，八个上下文共用一个引擎，权重只有一份 |
# | 执行上下文 | 这一次的形状、地址，**以及中间结果用的显存** | 不能，一个在跑的请求一个 |
# | 流 | 一条先后次序 | 能，但放在同一条流里就是排队 |
# | 输入、输出缓冲 | 数据 | 输入只读就能；输出不能 |
# | 可执行图（`cudaGraphExec_t`） | 一套写死的地址 | 同一张图的两次启动本来就不会同时跑 |
#
# 所以一个“工位”要配齐四样：上下文、流、输入缓冲、输出缓冲。演示里用这个类：

# %% tags=["demo", "gpu"]
import matplotlib.pyplot as plt

lab.plot_style()
DEPTH = 4
engine = load(tower_plan(DEPTH))


class Seat:
    """What one request in flight needs: a context, a stream, and buffers of its own. rows: of x and y."""

    def __init__(self, engine: "trt.ICudaEngine", queue=None, context=None, rows=4, seed=0):
        self.context = context or require(engine.create_execution_context(), "创建执行上下文")
        self.stream = queue or cp.cuda.Stream(non_blocking=True)
        self.data = np.random.default_rng(seed).integers(-8, 8, (rows, WIDTH)).astype(np.float32)
        with self.stream:
            self.x, self.y = cp.asarray(self.data), cp.zeros((rows, WIDTH), cp.float32)
        self.stream.synchronize()
        bind(self.context, self.x, self.y)
        self.enqueue()  # a context prepares itself at its first enqueue
        self.stream.synchronize()

    def enqueue(self, queue=None):
        require(self.context.execute_async_v3((queue or self.stream).ptr), "入队")


seats = [Seat(engine, seed=k) for k in range(8)]
right = sum(np.array_equal(seat.y.get(), inferred(seat.data, DEPTH)) for seat in seats)
lab.say(
    f"{len(seats)} 个工位轮流各推理一次，{right} 个结果与 NumPy 一位不差。"
    f"每个上下文的中间结果要 {engine.device_memory_size_v2 / 1024:.0f} KiB 显存，八个上下文就是八份。"
)

# %% [markdown]
# ### 误区一：一个上下文，多条流，也能并行
#
# 上下文里那块“中间结果用的显存”最容易被忘记。下面让两条流同时推理，共用的东西不同，各做 40 轮，数一数错了几个。
# 两条流都等同一个事件，一声令下同时起步。先猜：哪一行会出错？
#
# 第二行的上下文有两个，但显存由我们自己提供（`USER_MANAGED`，用 `set_device_memory` 交进去），两个上下文给了同一块。
# 这是省显存的常用办法，《执行上下文与显存》一章专门讲；**前提是它们绝不同时在跑**。

# %% tags=["demo", "gpu"]
DEEP = 32
deep = load(tower_plan(DEEP))
USER_MANAGED = trt.ExecutionContextAllocationStrategy.USER_MANAGED
inputs = [np.random.default_rng(70 + k).integers(-8, 8, (16, WIDTH)).astype(np.float32) for k in range(2)]
answers = [inferred(data, DEEP) for data in inputs]
with stream:
    pair_x = [cp.asarray(data) for data in inputs]
    pair_y = [cp.zeros_like(x) for x in pair_x]
    block = cp.zeros(max(1, deep.device_memory_size_v2), cp.uint8)
stream.synchronize()
gate, opened = sides[7], cp.cuda.Event(disable_timing=True)


def own_contexts(engine):
    return [require(engine.create_execution_context(), "创建执行上下文") for _ in range(2)]


def one_context(engine):
    return own_contexts(engine)[:1] * 2


def one_block(engine):
    contexts = [require(engine.create_execution_context(USER_MANAGED), "创建执行上下文") for _ in range(2)]
    for context in contexts:
        context.set_device_memory(block.data.ptr, block.nbytes)
    return contexts


def wrong_results(contexts, queues, rounds=40):
    """How many of 2 * rounds results are wrong when the two contexts run on these two streams, from one common start."""
    wrong = 0
    for turn in range(rounds + 1):
        for y in pair_y:
            with stream:
                y.fill(99)
        stream.synchronize()
        launch_spin(gate, 1500)  # time to submit both
        opened.record(gate)
        for k in range(2):
            queues[k].wait_event(opened)
            bind(contexts[k], pair_x[k], pair_y[k])
            require(contexts[k].execute_async_v3(queues[k].ptr), "入队")
        for queue in queues:
            queue.synchronize()
        if turn:  # the first turn is a warm-up
            wrong += sum(not np.array_equal(y.get(), answer) for y, answer in zip(pair_y, answers, strict=True))
    return wrong


SHARING = (
    ("一个上下文", "两条", one_context, sides[:2]),
    ("两个上下文，一块显存", "两条", one_block, sides[:2]),
    ("两个上下文，一块显存", "同一条", one_block, [stream, stream]),
    ("两个上下文，各有显存", "两条", own_contexts, sides[:2]),
)
rows = [(what, where, wrong_results(prepare(deep), queues)) for what, where, prepare, queues in SHARING]
lab.say(lab.table(("共用了什么", "流", "80 个结果里错的"), rows))
lab.say(
    "与别人同时在跑的前两行，" + ("这一次真的踩到了。" if rows[0][2] + rows[1][2] else "这一次一个也没错：**没有踩到不等于不会踩到**，它取决于内核的长短和起步的先后。")
    + ("放在同一条流里，一先一后，共用也不出错。" if rows[2][2] == 0 else "")
)

# %% [markdown]
# 这就是“时对时错”的来历：错不错，看两次推理的内核碰巧怎么交错。负载一高，交错变多，错误才冒出来。
# 所以不能靠“跑了一千次没错”来证明没有共用，要靠**看清楚谁用了什么**。
#
# 下面这个“看守” `Ledger` 就干这件事：它包住引擎，记下每次入队时用的是哪个上下文、哪条流、哪块显存、哪块输出；
# 只要两次入队可能同时在跑（在不同的流上，前一次还没做完；或者录在同一张图的不同流上），却共用了其中一样，就记一笔。
# 练习的测试用的也是它。不必细读，知道它的报告有哪几种就行：
#
# | 报告 | 意思 |
# |:--|:--|
# | `context` | 同一个上下文，可能同时在跑 |
# | `memory` | 两个上下文的中间结果用了重叠的显存 |
# | `output` | 两次推理写同一块输出 |
# | `thread` | 一个线程在设上下文，另一个线程也来设同一个（造上下文的线程事先设好的，不算） |

# %%
WATCH = '''
import threading
import time
import weakref

import cupy as cp
import numpy as np
from cuda.bindings import runtime as cudart

spin = cp.RawKernel(r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}
""", "spin")


class Foreign:
    """A stream of which only the handle is known, by the CUDA stream protocol."""

    def __init__(self, handle):
        self.handle = int(handle)

    def __cuda_stream__(self):
        return 0, self.handle


class Ledger:
    """Watches what the contexts of engines share while they may run at the same time."""

    def __init__(self, delay_us=0):
        self.delay_us = delay_us  # how long the GPU is kept busy before each enqueue
        self.lock, self.contexts, self.made, self.entries = threading.RLock(), 0, weakref.WeakSet(), []
        self.faults, self.most, self.enqueued, self.denied = set(), 0, 0, None
        spin((1,), (1,), (np.uint64(0),))  # the first launch of a kernel takes longer
        cp.cuda.get_current_stream().synchronize()

    def watch(self, engine):
        return Watched(self, engine)

    def deny(self, method):
        """The next call of this method of any context answers False."""
        self.denied = method

    def report(self):
        """What was seen since the last report: contexts made so far, those still alive, enqueues, most at once, faults."""
        with self.lock:
            told = {"contexts": self.contexts, "alive": len(self.made), "enqueued": self.enqueued, "most": self.most, "faults": sorted(self.faults)}
            self.faults, self.most, self.enqueued = set(), 0, 0
            self.entries = [entry for entry in self.entries if entry["event"] is not None]
        return told

    def enqueue(self, context, handle, call):
        capturing = int(cudart.cudaStreamIsCapturing(handle)[1]) != 0
        output = context._inner.get_tensor_address("y")
        size = 4 * abs(int(np.prod(tuple(context._inner.get_tensor_shape("y")))))
        entry = {"context": context._token, "stream": handle, "output": (output, output + size), "memory": context._memory, "event": None}
        if not capturing:  # asking an event is no work for a capture
            self.entries = [other for other in self.entries if other["event"] is None or not other["event"].done]
        beside = [other for other in self.entries if other["stream"] != handle and (other["event"] is None) == capturing]
        for other in beside:
            if other["context"] is context._token:
                self.faults.add("context")
            elif overlap(other["memory"], entry["memory"]):
                self.faults.add("memory")
            if overlap(other["output"], entry["output"]):
                self.faults.add("output")
        self.most = max(self.most, 1 + len({other["stream"] for other in beside}))
        queue = cp.cuda.Stream.from_external(Foreign(handle))
        if self.delay_us and not capturing:
            with queue:
                spin((1,), (1,), (np.uint64(self.delay_us * 1000),))
        accepted = call()
        if not capturing:
            entry["event"] = cp.cuda.Event(disable_timing=True)
            entry["event"].record(queue)
        self.entries.append(entry)
        self.enqueued += 1
        return accepted


def overlap(a, b):
    return a is not None and b is not None and a[0] < b[1] and b[0] < a[1]


class Watched:
    """Stands for an engine."""

    def __init__(self, ledger, engine):
        self._ledger, self._inner = ledger, engine

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def create_execution_context(self, *args, **kwargs):
        context = Context(self._ledger, self._inner.create_execution_context(*args, **kwargs))
        with self._ledger.lock:
            self._ledger.contexts += 1
            self._ledger.made.add(context)
        return context


class Context:
    """Stands for a context."""

    def __init__(self, ledger, context):
        vars(self).update(_ledger=ledger, _inner=context, _memory=None, _setter=None)
        vars(self).update(_token=object(), _maker=threading.get_ident())  # the ledger knows a context by its token, and keeps none alive

    def __setattr__(self, name, value):
        if name == "device_memory":
            vars(self)["_memory"] = (int(value), int(value) + 1)
        setattr(self._inner, name, value)

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args, **kwargs):
            ledger, me, given = self._ledger, threading.get_ident(), [*args, *kwargs.values()]
            with ledger.lock:
                if ledger.denied == name:
                    ledger.denied = None
                    vars(self)["_setter"] = None
                    return False
                if name == "set_device_memory":
                    vars(self)["_memory"] = (given[0], given[0] + given[1])
                if name in ("set_input_shape", "set_tensor_address"):
                    if self._setter not in (None, me):
                        ledger.faults.add("thread")
                    if me != self._maker:  # who made it may have set once and for all what stays
                        vars(self)["_setter"] = me
            if name == "execute_async_v3":
                with ledger.lock:
                    if self._setter not in (None, me):
                        ledger.faults.add("thread")
                    vars(self)["_setter"] = None
                    return ledger.enqueue(self, given[0], lambda: found(*args, **kwargs))
            if name == "set_tensor_address" and ledger.delay_us:
                time.sleep(0.001)  # lets another thread come in between, if nothing keeps it out
            return found(*args, **kwargs)

        return call
'''

# %% tags=["demo", "gpu"]
guard = {}
exec(WATCH, guard)
Ledger = guard["Ledger"]


def watched(prepare, queues):
    """What the ledger reports when two contexts made by prepare run on these two streams."""
    ledger = Ledger(delay_us=20_000)  # longer than the CPU takes to set up the second context: both are in flight
    wrong_results(prepare(ledger.watch(deep)), queues, rounds=1)
    told = ledger.report()
    return told["most"], "、".join(told["faults"]) or "没有"


rows = [(what, where, *watched(prepare, queues)) for what, where, prepare, queues in SHARING]
lab.say(lab.table(("共用了什么", "流", "最多几个同时在跑", "看守的报告"), rows), measured=False)

# %% [markdown]
# 看守不看结果，只看共用；所以踩没踩到，它都说得出来。（它在每次入队前先让那条流空转 20 毫秒，好让两次推理一定赶到一起。）
#
# ### 误区二：一张图，两条流上各启动一次，就是两份并行
#
# 可执行图里的地址也是写死的，同一张图同时跑两份会自己踩自己。CUDA 干脆不许：后一次启动总要等前一次做完。
# 一张空转 2 毫秒的图，在两条流上各启动一次；再换成两张一样的图：

# %% tags=["demo", "gpu"]
two_ms = []
for _ in range(2):
    with capturing(stream) as captured:
        launch_spin(stream, 2000)
    two_ms += captured


def launch_both(graphs):
    for graph, queue in zip(graphs, sides, strict=False):
        graph.launch(queue)


same_or_two = lab.compare_us(partial(launch_both, two_ms[:1] * 2), partial(launch_both, two_ms), clock="end_to_end", pairs=7)
lab.say(
    f"同一张图在两条流上：{same_or_two.first.median / 1000:.1f} ms；两张图在两条流上：{same_or_two.second.median / 1000:.1f} ms。"
)

# %% [markdown]
# 所以要并行，**图也要一个工位一张**；或者，像后面那样，把所有工位收进同一张图的不同分支。

# %% [markdown]
# ## 交接：数据从别的流来，结果到别的流去
#
# 每个工位一条流以后，新的风险在交接处。前处理在它自己的流上写 `x`，推理在工位的流上读；结果又要被别人读走。
# 流与流之间没有先后，**先后要用事件（event）说出来**。
#
# 下面前处理先空转 3 毫秒再写新数据，扮演“还没准备好”。四种写法，看读到的是什么：

# %% tags=["demo", "gpu"]
seat, producer = seats[0], sides[0]
fresh = np.random.default_rng(99).integers(-8, 8, seat.data.shape).astype(np.float32)
with stream:
    fresh_on_gpu, stale_on_gpu = cp.asarray(fresh), cp.asarray(seat.data)
stream.synchronize()
ready = cp.cuda.Event(disable_timing=True)


def handed_over(wait_for_input, wait_for_output):
    """What a request gets whose input is written late on another stream."""
    launch_refill(seat.stream, seat.x, stale_on_gpu)
    with seat.stream:
        seat.y.fill(99)
    seat.stream.synchronize()
    launch_spin(producer, 3000)
    launch_refill(producer, seat.x, fresh_on_gpu)
    ready.record(producer)
    if wait_for_input:
        seat.stream.wait_event(ready)
    else:
        launch_spin(seat.stream, 500)  # some other work of this stream
    seat.enqueue()
    if wait_for_output:
        seat.stream.synchronize()
    got = seat.y.get()  # on the default stream, which waits for nobody here
    cp.cuda.Device().synchronize()
    for what, answer in (("正确", inferred(fresh, DEPTH)), ("上一份数据的结果", inferred(seat.data, DEPTH)), ("还没写过的输出", np.full_like(got, 99))):
        if np.array_equal(got, answer):
            return what
    return "别的"


rows = [
    ("等" if first else "不等", "等" if second else "不等", handed_over(first, second))
    for first, second in ((False, False), (False, True), (True, False), (True, True))
]
lab.say(lab.table(("推理的流等前处理的事件", "读之前等推理的流", "读到的结果"), rows))

# %% [markdown]
# 两头都要等，少哪一头都不行，而且都不报错：一头读到旧输入，一头读到旧输出。公开的问题报告里，
# “第一次的结果总是不对”“换成阻塞的流就好了”，多半是少了其中一个。
#
# - **来的一头**：写的人写完以后记录事件，推理的流 `wait_event` 等它。等在 GPU 上，CPU 不停。
# - **去的一头**：结果还没好就把数组交出去，对方读到的是旧内容。要么同步以后再交，要么交出一个 `Future`
#   （“将来的结果”，`concurrent.futures.Future`）：用 `.result()` 去取，没做完就等。练习二就这样做。

# %% [markdown]
# ## 五百个内核：讲义的第三行
#
# 讲义的表里还有一行没验证过：多流并发推理，约 500 个内核，传统启动开销约 400 µs，用 CUDA 图约 80 µs，
# 收益来源写的是“减少 CPU 干预，GPU 自主调度”。
#
# 八条流，每条流上几个请求排着队，总共凑够大约 500 个内核。五种做法：

# %% tags=["demo", "gpu"]
from concurrent.futures import ThreadPoolExecutor

CLAIMED_KERNELS, CLAIMED_EAGER_US, CLAIMED_GRAPH_US = 500, 400, 80  # 讲义的数字


def topology(captured):
    """(kinds of the nodes, edges as pairs of positions) of a cupy Graph, as the driver tells them."""
    graph = cudart.cudaGraph_t(int(captured.graph))
    _, count = lab.check_cuda(cudart.cudaGraphGetNodes(graph, 0))
    nodes, _ = lab.check_cuda(cudart.cudaGraphGetNodes(graph, count)) if count else ([], 0)
    number = {int(node): position for position, node in enumerate(nodes)}
    kinds = [lab.check_cuda(cudart.cudaGraphNodeGetType(node)).name.removeprefix("cudaGraphNodeType") for node in nodes]
    n_edges = lab.check_cuda(cudart.cudaGraphGetEdges(graph, 0))[-1]
    ends = lab.check_cuda(cudart.cudaGraphGetEdges(graph, n_edges))[:2] if n_edges else ([], [])
    return kinds, [(number[int(tail)], number[int(head)]) for tail, head in zip(*ends, strict=True)]


def shape_of(captured):
    """(kernels, edges, nodes on the longest path, most nodes on one level) of a cupy Graph."""
    kinds, edges = topology(captured)
    level = [1] * len(kinds)
    changed = True
    while changed:
        changed = False
        for tail, head in edges:
            if level[head] <= level[tail]:
                level[head], changed = level[tail] + 1, True
    return kinds.count("Kernel"), len(edges), max(level, default=0), max((level.count(n) for n in set(level)), default=0)


forked = cp.cuda.Event(disable_timing=True)
ended = [cp.cuda.Event(disable_timing=True) for _ in range(16)]  # kept: an event must not die while a capture may use it


def fork_join(branches):
    """Run branches, a list of (stream, callable), side by side: from `stream`, and back to it."""
    forked.record(stream)
    for queue, _ in branches:
        queue.wait_event(forked)
    for (queue, work), done in zip(branches, ended, strict=False):
        work()
        done.record(queue)
    for _, done in zip(branches, ended, strict=False):
        stream.wait_event(done)


with capturing(stream) as captured:
    seats[0].enqueue(stream)
per_request = shape_of(captured[0])[0]
EACH = max(1, round(CLAIMED_KERNELS / per_request / len(seats)))  # requests on each stream
total_kernels = EACH * len(seats) * per_request


def several(seat, queue=None):
    for _ in range(EACH):
        seat.enqueue(queue)


def one_stream():
    for seat in seats:
        several(seat, stream)


def in_turn():
    for _ in range(EACH):
        for seat in seats:
            seat.enqueue()


crew = ThreadPoolExecutor(len(seats))


def by_threads():
    list(crew.map(several, seats))


each_graph = []
for seat in seats:
    with capturing(seat.stream) as captured:
        several(seat)
    each_graph += captured


def graph_each():
    for graph, seat in zip(each_graph, seats, strict=True):
        graph.launch(seat.stream)


with capturing(stream) as captured:
    fork_join([(seat.stream, partial(several, seat)) for seat in seats])
whole = captured[0]


def one_graph():
    whole.launch(stream)


ways = {
    "一条流，逐个入队": one_stream,
    "八条流，一个线程轮流入队": in_turn,
    "八条流，八个线程各自入队": by_threads,
    "八条流，每条一张图": graph_each,
    "一张图，八条分支": one_graph,
}
measured = {name: ([], []) for name in ways}
for turn in range(12):
    for name, work in ways.items():  # in turn: a machine that slows down slows all of them
        submitted, finished = lab.submit_us(work, repeats=1, warmup=1), lab.end_to_end_us(work, repeats=1, warmup=0)
        if turn:
            measured[name][0].append(submitted.median)
            measured[name][1].append(finished.median)
medians = {name: tuple(float(np.median(us)) for us in pair) for name, pair in measured.items()}
lab.say(
    lab.table(
        (f"{len(seats)} 条流 × {EACH} 个请求 × {per_request} 个内核 = {total_kernels} 个内核", "CPU 提交 µs", "端到端 µs"),
        [(name, f"{submit:.0f}", f"{total:.0f}") for name, (submit, total) in medians.items()],
    )
)
eager_us, graph_us = medians["八条流，一个线程轮流入队"], medians["一张图，八条分支"]
lab.say(
    f"讲义：约 {CLAIMED_KERNELS} 个内核，约 {CLAIMED_EAGER_US} µs → 约 {CLAIMED_GRAPH_US} µs，快 {CLAIMED_EAGER_US / CLAIMED_GRAPH_US:.0f} 倍。"
    f"这里 {total_kernels} 个内核：CPU 提交 {eager_us[0]:.0f} µs → {graph_us[0]:.0f} µs，快 **{eager_us[0] / graph_us[0]:.0f} 倍**；"
    f"端到端 {eager_us[1]:.0f} µs → {graph_us[1]:.0f} µs，快 **{eager_us[1] / graph_us[1]:.1f} 倍**。"
)

# %% [markdown]
# 讲义那一行没有说明两个数字是 CPU 提交还是端到端。以你自己的表为准，再问三个问题：
#
# - 多了七条流，逐个入队快了多少？要是没快，说明瓶颈不在 GPU，在吩咐的人。
# - 八个线程呢？线程能不能分担入队，要看入队时别的线程能不能跑：Python 的全局锁（GIL）、驱动里的锁都会让它们互相等。
#   抢锁、换线程本身也要时间，所以八个线程可能比一个线程还慢；这一行是几行里最不稳的，多跑几次看看。
# - 图的“收益来源”，在提交那一列；端到端那一列，是提交和 GPU 的路里**更长的那一个**。
#
# ### 泳道图
#
# 在每个请求的前后各放一个 `stamp`，把 GPU 的时刻记下来，就能看见每条流上每个请求什么时候开始、什么时候做完。
# 这里多画一种次序：一条流全部入队完，再轮到下一条。先猜：哪几幅图会有“台阶”？

# %% tags=["demo", "gpu"]
SLOTS = 2 * len(seats) * EACH
with stream:
    log = cp.zeros(4096, cp.uint64)
stream.synchronize()


def stamped(k, r, queue=None):
    """Request r of seat k, with a stamp before and after it."""
    slot, queue = 2 * (k * EACH + r), queue or seats[k].stream
    launch_stamp(queue, log, slot)
    seats[k].enqueue(queue)
    launch_stamp(queue, log, slot + 1)


def stamped_lane(k):
    for r in range(EACH):
        stamped(k, r)


def lane_by_lane():
    for k in range(len(seats)):
        stamped_lane(k)


def round_robin():
    for r in range(EACH):
        for k in range(len(seats)):
            stamped(k, r)


def lanes_by_threads():
    list(crew.map(stamped_lane, range(len(seats))))


with capturing(stream) as captured:
    fork_join([(seat.stream, partial(stamped_lane, k)) for k, seat in enumerate(seats)])
stamped_graph = captured[0]


def timeline(work):
    """Run work(); return when each request began and ended: float64 (seats, EACH, 2), µs after the first began."""
    work()
    cp.cuda.Device().synchronize()
    times = log.get()[:SLOTS].astype(np.int64).reshape(len(seats), EACH, 2)
    return (times - times.min()) / 1000


pictures = {
    "一个线程，一条流接一条流": lane_by_lane,
    "一个线程，轮流": round_robin,
    "八个线程": lanes_by_threads,
    "一张图，八条分支": partial(stamped_graph.launch, stream),
}
fig, axes = plt.subplots(len(pictures), 1, figsize=(10, 9))
rows = []
for ax, (name, work) in zip(axes, pictures.items(), strict=True):
    timeline(work)  # discarded: the first run finds everything cold
    times = timeline(work)
    for k, lane in enumerate(times):
        ax.broken_barh([(began, max(done - began, 0.1)) for began, done in lane], (k - 0.4, 0.8), color=[f"C{k % 8}", "#bbbbbb"])
    ax.set_yticks(range(0, len(seats), 2), [f"流 {k}" for k in range(0, len(seats), 2)])
    ax.invert_yaxis()
    ax.set_title(f"{name}：共 {times.max():.0f} µs", fontsize=10)
    busy = (times[..., 1] - times[..., 0]).sum()
    rows.append((name, f"{times.max():.0f}", f"{times[:, 0, 0].max():.0f}", f"{busy / times.max():.1f}"))
axes[-1].set_xlabel(f"GPU 上的时刻（µs，{lab.gpu_name()}；各幅的横轴长短不同）")
plt.show()
lab.say(lab.table(("做法", "全程 µs", "最晚起步的流，起步时刻 µs", "平均几个请求同时在跑"), rows))

# %% [markdown]
# 一行是一条流，一根条是一个请求，一深一浅轮着来，好分清相邻的两个。前三幅里，条与条之间的空白就是那条流在等 CPU；
# 图那一幅里的窄缝不是：请求已经全部交上去了，那是 GPU 自己换到下一个内核的工夫。
#
# 有台阶的，是由一个线程吩咐的那两幅：它一次只能喂一条流，后面的流只好晚起步。看最后一列：
# **“用了八条流”和“八个请求同时在跑”是两回事。**
#
# 再看八个线程那一幅：“同时在跑”的多了好几倍，全程却没有跟着短几倍，甚至可能更长。比一比条的长短：同样的请求，那里的条比图里的长得多。
# 一个请求的几个内核之间也在等 CPU，条里大半是空的；“在跑”只是说它开始了、还没做完。
#
# ### 捕获的次序要不要紧
#
# 逐个入队时，次序决定谁先起步。录成图以后呢？用两种次序各捕获一次，比一比图的形状和时间：

# %% tags=["demo", "gpu"]
def forked_round_robin():
    forked.record(stream)
    for seat in seats:
        seat.stream.wait_event(forked)
    for _ in range(EACH):
        for seat in seats:
            seat.enqueue()
    for seat, done in zip(seats, ended, strict=False):
        done.record(seat.stream)
        stream.wait_event(done)


with capturing(stream) as captured:
    forked_round_robin()
turned = captured[0]
orders = lab.compare_us(one_graph, partial(turned.launch, stream), clock="end_to_end")
rows = [
    (name, *shape_of(graph), f"{samples.median:.0f}")
    for name, graph, samples in (("一条流接一条流", whole, orders.first), ("轮流", turned, orders.second))
]
lab.say(lab.table(("捕获的次序", "内核", "边", "最长路径", "最宽的一层", "端到端 µs"), rows))

# %% [markdown]
# 图只记得边，边一样，次序就不要紧。《多流捕获与图的生命周期》里用小内核得到的结论，对引擎照样成立；
# 要当心的那一处也一样：打算用 `cudaGraphExecUpdate` 更新的图，要照同样的次序重新捕获。

# %% [markdown]
# ### 误区三：捕获只关正在捕获的那个线程
#
# 服务已经在跑，一个线程想为新的工位录一张图，别的线程还在推理、同步。三种捕获模式各录 20 次，
# 旁边有一个线程不停地“入队、等结果”。CuPy 的 `begin_capture()` 默认是 relaxed；讲义的例子是 global。

# %% tags=["demo", "gpu"]
import threading

MODE = cudart.cudaStreamCaptureMode


def captured_beside_a_worker(mode, attempts=20):
    """(captures that came to be, requests that another thread served meanwhile, what that thread died of)."""
    mine, other = Seat(engine), Seat(engine, seed=1)
    stop, done, trouble = threading.Event(), [0], []

    def keep_serving():
        try:
            while not stop.is_set():
                other.enqueue()
                other.stream.synchronize()
                done[0] += 1
        except Exception as error:  # noqa: BLE001 - shown to the reader
            trouble.append(f"{type(error).__name__}：{str(error)[:60]}")

    worker, good = threading.Thread(target=keep_serving), 0
    worker.start()
    for _ in range(attempts):
        lab.check_cuda(cudart.cudaStreamBeginCapture(mine.stream.ptr, mode))
        accepted = mine.context.execute_async_v3(mine.stream.ptr)
        code, graph = cudart.cudaStreamEndCapture(mine.stream.ptr)
        cudart.cudaGetLastError()
        good += bool(accepted) and not int(code)
        if not int(code):
            cudart.cudaGraphDestroy(graph)
    stop.set()
    worker.join()
    lab.trt_errors()
    return good, done[0], trouble[0].replace("|", "/") if trouble else "没有出错"


rows = [
    (name, *captured_beside_a_worker(mode))
    for name, mode in (
        ("relaxed", MODE.cudaStreamCaptureModeRelaxed),
        ("thread-local", MODE.cudaStreamCaptureModeThreadLocal),
        ("global", MODE.cudaStreamCaptureModeGlobal),
    )
]
lab.say(lab.table(("模式", "20 次里录成的", "旁边的线程做完的请求", "旁边的线程"), rows))

# %% [markdown]
# global 模式管的是**整个进程**：捕获期间，别的线程哪怕只是等一下自己的流，也可能被拒绝，还会连累捕获作废；
# 捕获里的入队也可能跟着被拒绝，表格上方要是印着 TensorRT 报的错，就是这么来的。
# 撞没撞上看时机，所以这种故障是偶发的。多线程的服务里捕获，用 thread-local 或 relaxed；更稳妥的是：开门接客之前，把图全部录好。

# %% [markdown]
# ## 吞吐与延迟：流要几条
#
# 照理说，流越多，同时在跑的越多，每秒做完的（吞吐）就越多；可是大家分一块 GPU、排一个 CPU，每个请求自己要的时间（延迟）也可能变长。
# 在稳定的服务里，三个数被一个恒等式拴在一起（利特尔法则，Little's law）：
#
# $$\text{同时在跑的请求数} = \text{吞吐} \times \text{延迟}$$
#
# 用 `M` 个工位跑 96 个请求，量每秒做完几个，以及一个请求在 GPU 上从开始到做完的时间（中位数）。
# 逐个入队一条线，每个工位一张图一条线：

# %% tags=["demo", "gpu"]
WORKERS, REQUESTS = (1, 2, 4, 8, 16), 96
more = seats + [Seat(engine, seed=k) for k in range(len(seats), max(WORKERS))]
stamped_graphs, plain_graphs = [], []
for k, seat in enumerate(more):
    with capturing(seat.stream) as captured:
        launch_stamp(seat.stream, log, 2 * k)
        seat.enqueue()
        launch_stamp(seat.stream, log, 2 * k + 1)
    stamped_graphs += captured
    with capturing(seat.stream) as captured:
        seat.enqueue()
    plain_graphs += captured


def served(m, graphs, n=REQUESTS):
    """n requests over m seats, in turn: eager, or by the seats' graphs."""
    for r in range(n):
        if graphs is None:
            more[r % m].enqueue()
        else:
            graphs[r % m].launch(more[r % m].stream)


def stamped_eager(m):
    for r in range(REQUESTS):
        k = r % m
        launch_stamp(more[k].stream, log, 2 * k)
        more[k].enqueue()
        launch_stamp(more[k].stream, log, 2 * k + 1)


def spans_us(work, m):
    """Median time on the GPU, µs, of the last request of each of m seats, over a few runs."""
    spans = []
    for turn in range(6):
        work()
        cp.cuda.Device().synchronize()
        times = log.get()[: 2 * m].astype(np.int64).reshape(m, 2)
        if turn:
            spans.append(times[:, 1] - times[:, 0])
    return float(np.median(spans)) / 1000


curves = {"逐个入队": ([], []), "每个工位一张图": ([], [])}
for m in WORKERS:
    both = lab.compare_us(partial(served, m, None), partial(served, m, plain_graphs), clock="end_to_end", pairs=9)
    for samples, spans, (throughput, latency) in zip(
        (both.first, both.second),
        (spans_us(partial(stamped_eager, m), m), spans_us(partial(served, m, stamped_graphs), m)),
        curves.values(),
        strict=True,
    ):
        throughput.append(REQUESTS / samples.median * 1000)
        latency.append(spans)
fig, ax = plt.subplots()
for name, (throughput, latency) in curves.items():
    ax.plot(throughput, latency, marker="o", label=name)
for m, x, y in zip(WORKERS, *curves["每个工位一张图"], strict=True):
    ax.annotate(f"M={m}", (x, y), textcoords="offset points", xytext=(4, 5) if m < WORKERS[-1] else (-10, 15), fontsize=8)
throughput, latency = curves["逐个入队"]  # its points lie close together: one label for all of them, and the table below
ax.annotate(f"M={WORKERS[0]}～{WORKERS[-1]}", (max(throughput), np.median(latency)), textcoords="offset points", xytext=(8, -3), fontsize=8)
ax.set_xlabel("吞吐（请求 / ms）")
ax.set_ylabel("一个请求在 GPU 上的时间（µs，中位数）")
ax.set_ylim(bottom=0)
ax.set_title(f"吞吐与延迟（{lab.gpu_name()}）")
ax.legend()
plt.show()
heads = (f"{name}，{what}" for name in curves for what in ("吞吐（请求 / ms）", "延迟（µs）"))
lab.say(lab.table(("M", *heads), [(m, *(f"{each:.1f}" for curve in curves.values() for each in np.take(curve, k, axis=1))) for k, m in enumerate(WORKERS)]))
for name, (throughput, _) in curves.items():
    best = WORKERS[int(np.argmax(throughput))]
    lab.say(f"{name}：M = 1 时每毫秒 {throughput[0]:.0f} 个，最多是 M = {best} 时的 {max(throughput):.0f} 个，**{max(throughput) / throughput[0]:.1f} 倍**。")

# %% [markdown]
# ### 误区四：流越多越快
#
# 先用那个恒等式验一验：把表里一行的吞吐和延迟乘起来（单位都换成毫秒），就是真正同时在跑的请求数。它跟着 `M` 长吗？
# 不跟着长的那条线，流虽然多了，请求却没有真的排开：CPU 喂不上。这样的线，吞吐就算多出一两成，也不是并排跑出来的，多半是 CPU 那一阵提交得快些。
# （乘积只是约数：量延迟时每个请求前后各多一个 `stamp`，量吞吐时没有，所以 `M` 是 1 也可能算出比 1 多一点。）
#
# 再沿着每条线，从 `M` 小的点往 `M` 大的点走：往右走得动、乘积也跟着长的那一段，加流是赚的；一旦不再往右，只往上，甚至往回走，
# 多出来的流就只是在加长每个请求的延迟。后面的点挤成一团的线，再加多少流都一样。
# 还一直往右的线，也要看它抬高了多少：`M` 翻一倍，吞吐没有跟着翻一倍，差的那一截，就是每个请求多花的时间。
# 拐点在哪里，由最先用完的东西决定：CPU 的提交能力，还是 GPU 的 SM。图把前一个瓶颈往后推，后一个推不动。
# 延迟有上限的服务，就在吞吐还在涨的那一段里，选**延迟还没越线的最大的 M**。

# %% [markdown]
# ## 优先级：有急事的请求
#
# 离线的批处理占满了 GPU，这时来了一个在线请求。给它一条高优先级（priority）的流，它的内核就先拿到空出来的位置。
# 《多流捕获与图的生命周期》里有两条规矩：优先级在捕获时抄进**节点**；实例化时要带上 `cudaGraphInstantiateFlagUseNodePriority`，节点里的才算数。
# 不带这个标志，整张图用的是**启动它的那条流**的优先级。引擎的内核不是我们启动的，规矩还管用吗？
#
# 批处理用许多块、每块空转 50 µs 的 `spin` 扮演；在线请求是一次推理。图都在高优先级的流上捕获，启动在哪条流上见表。量它的端到端时间：

# %% tags=["demo", "gpu"]
least, greatest = lab.check_cuda(cudart.cudaDeviceGetStreamPriorityRange())
low = cp.cuda.Stream(non_blocking=True, priority=least)
normal_seat = Seat(engine, queue=cp.cuda.Stream(non_blocking=True, priority=least))
urgent_seat = Seat(engine, queue=cp.cuda.Stream(non_blocking=True, priority=greatest))
gpu = cp.cuda.Device().attributes
WIDE = min(1024, gpu["MaxThreadsPerMultiProcessor"])
SLOTS_AT_ONCE = gpu["MultiProcessorCount"] * (gpu["MaxThreadsPerMultiProcessor"] // WIDE)
USE_PRIORITY = int(cudart.cudaGraphInstantiateFlags.cudaGraphInstantiateFlagUseNodePriority)
with capturing(urgent_seat.stream) as captured:
    urgent_seat.enqueue()
urgent_graph = captured[0]
heeded = lab.check_cuda(cudart.cudaGraphInstantiate(cudart.cudaGraph_t(int(urgent_graph.graph)), USE_PRIORITY))


def launch_heeded():
    lab.check_cuda(cudart.cudaGraphLaunch(heeded, normal_seat.stream.ptr))


cases = {
    "逐个入队，普通的流": (normal_seat.enqueue, normal_seat.stream),
    "逐个入队，高优先级的流": (urgent_seat.enqueue, urgent_seat.stream),
    "图，没有标志，启动在普通的流上": (partial(urgent_graph.launch, normal_seat.stream), normal_seat.stream),
    "图，没有标志，启动在高优先级的流上": (partial(urgent_graph.launch, urgent_seat.stream), urgent_seat.stream),
    "图，带 UseNodePriority，启动在普通的流上": (launch_heeded, normal_seat.stream),
}
waited = {name: [] for name in cases}
alone = lab.end_to_end_us(urgent_seat.enqueue, sync=urgent_seat.stream.synchronize, repeats=15)
for turn in range(8):
    for name, (work, queue) in cases.items():
        launch_spin(low, 50, blocks=40 * SLOTS_AT_ONCE, threads=WIDE)
        us = lab.end_to_end_us(work, sync=queue.synchronize, repeats=1, warmup=0).median
        cp.cuda.Device().synchronize()
        if turn:
            waited[name].append(us)
lab.say(
    lab.table(
        ("在线请求（背后有批处理占满 GPU）", "端到端 µs（中位数）"),
        [("没有批处理时", f"{alone.median:.0f}"), *((name, f"{np.median(us):.0f}") for name, us in waited.items())],
    )
)
lab.check_cuda(cudart.cudaGraphExecDestroy(heeded))
plain_us, high_us, graph_plain_us, graph_high_us, graph_flag_us = (float(np.median(us)) for us in waited.values())
lab.say(
    f"逐个入队，高优先级把等待变成原来的 **{high_us / plain_us:.0%}**。没有标志的图，换到高优先级的流上启动，是在普通的流上的 **{graph_high_us / graph_plain_us:.0%}**；"
    f"带上标志、仍在普通的流上启动，是不带时的 **{graph_flag_us / graph_plain_us:.0%}**。"
)

# %% [markdown]
# 引擎的内核也在你给的那条流上启动，所以逐个入队时，优先级跟着流走；捕获时它跟着进了节点，节点里的管不管用，看最后一行。两点提醒：
#
# - 优先级只管**空位给谁**，不打断正在跑的块。批处理的块如果一个就要跑 10 毫秒，在线请求最坏要等 10 毫秒。
# - 引擎自己另开的流（下一节）不一定继承你的优先级：要它也优先，就自己给它流。

# %% [markdown]
# ## 辅助流：一个引擎内部的并行
#
# ### 误区五：网络里有并排的分支，引擎自然就并排地跑
#
# 到此为止，并行都发生在上下文之间。一个引擎内部呢？一次入队只给了一条流，引擎的内核就在这条流上一个接一个；
# 除非构建时允许它另开**辅助流**（auxiliary stream）：`config.max_aux_streams`。不设，由 TensorRT 自己斟酌；设成 0，就一条也不开。
# 允许不等于采用：构建器认为不划算，就仍然是一条链。**采用了几条，问 `engine.num_aux_streams`；并排没有，捕获下来数一数图有多宽。**
#
# 一个输入，四条并排的分支，每条六层卷积：

# %% tags=["demo", "gpu"]
def branched_engine(most_aux, kind="conv", branches=4, layers=6, channels=32, side=16):
    """An engine of parallel branches: x → y0, y1, … most_aux: max_aux_streams, or None to leave it alone.

    kind: "conv" for layers of convolutions, "matmul" for layers of matrix products.
    """
    builder = the_builder()
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    rng, kept = np.random.default_rng(20), []

    def weights(*shape):
        kept.append((rng.standard_normal(shape) / 17).astype(np.float32))
        return trt.Weights(kept[-1])

    def layer(h):
        if kind == "conv":
            made = network.add_convolution_nd(h, channels, (3, 3), weights(channels, channels, 3, 3), weights(channels))
            made.padding_nd = (1, 1)
        else:
            other = network.add_constant((1, 1, side, side), weights(1, 1, side, side)).get_output(0)
            made = network.add_matrix_multiply(h, trt.MatrixOperation.NONE, other, trt.MatrixOperation.NONE)
        return network.add_activation(made.get_output(0), trt.ActivationType.RELU).get_output(0)

    x = network.add_input("x", trt.DataType.FLOAT, (1, channels, side, side))
    for branch in range(branches):
        h = x
        for _ in range(layers):
            h = layer(h)
        h.name = f"y{branch}"
        network.mark_output(h)
    config = builder.create_builder_config()
    config.builder_optimization_level = 1
    config.progress_monitor = lab.build_progress()
    if most_aux is not None:
        config.max_aux_streams = most_aux
    with lab.timing_cache(config):
        return load(bytes(require(builder.build_serialized_network(network, config), "构建")))


class Branched:
    """A branched engine with a context and buffers, and one enqueue of it as a graph."""

    def __init__(self, most_aux, kind="conv"):
        self.engine = branched_engine(most_aux, kind)
        self.context = require(self.engine.create_execution_context(), "创建执行上下文")
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        with stream:
            self.arrays = {name: cp.ones(tuple(self.engine.get_tensor_shape(name)), cp.float32) for name in names}
        stream.synchronize()
        for name, array in self.arrays.items():
            require(self.context.set_tensor_address(name, array.data.ptr), "设置地址")
        self.enqueue()
        stream.synchronize()
        with capturing(stream) as captured:
            self.enqueue()
        self.graph = captured[0]

    def enqueue(self):
        require(self.context.execute_async_v3(stream.ptr), "入队")

    def launch(self):
        self.graph.launch(stream)


SETTINGS = {"卷积，设成 0": (0,), "卷积，不设": (None,), "卷积，设成 3": (3,), "矩阵乘，设成 3": (3, "matmul")}
branched = {name: Branched(*setting) for name, setting in SETTINGS.items()}
rows = []
for name, each in branched.items():
    eager, graph = lab.end_to_end_us(each.enqueue), lab.end_to_end_us(each.launch)
    kernels, _, longest, widest = shape_of(each.graph)
    memory = f"{each.engine.device_memory_size_v2 / 1024:.0f}"
    rows.append((name, each.engine.num_aux_streams, kernels, longest, widest, memory, f"{eager.median:.0f}", f"{graph.median:.0f}"))
lab.say(lab.table(("分支与 max_aux_streams", "采用的辅助流", "图里的内核", "最长路径", "最宽的一层", "中间结果 KiB", "逐个入队 µs", "图 µs"), rows))
adopted = [name for name, each in branched.items() if each.engine.num_aux_streams]
lab.say("采用了辅助流的：" + ("；".join(adopted) or "一个也没有") + "。")

# %% [markdown]
# 对照你的表读四件事：
#
# - 采用了辅助流的，捕获下来图就变宽，最长路径变短：引擎内部的分叉、汇合也是用事件做的，照样能进图。
# - 时间看最后两列。逐个入队时，内核还是由 CPU 一个一个地交，内部再宽，快得也有限，甚至一点也不快；录成图重放，并排的好处才全看得出来。
# - 中间结果的显存变多了：同时在跑的分支不能再轮流用同一块。**这正是“不能共用”那条规矩，在引擎内部又来了一次。**
# - 有的网络，允许了也不采用。所以先问 `num_aux_streams`，再谈并行；构建器不肯，就像练习三那样，拆成几个引擎，自己并排。
#
# ### 自己给辅助流
#
# 辅助流默认由上下文自己建。`context.set_aux_streams([句柄, …])` 可以换成你的流：要它们也有高优先级，或者不想多出一批看不见的流，就这样做。
# 但给出去的流要**专用**：下面在其中一条上先放 3 毫秒别的活，再推理一次。

# %% tags=["demo", "gpu"]
wide = branched["卷积，设成 3"]
if wide.engine.num_aux_streams:
    given = [cp.cuda.Stream(non_blocking=True) for _ in range(wide.engine.num_aux_streams)]
    wide.context.set_aux_streams([each.ptr for each in given])
    idle_us = lab.end_to_end_us(wide.enqueue, sync=stream.synchronize, repeats=15).median
    launch_spin(given[0], 3000)
    busy_us = lab.end_to_end_us(wide.enqueue, sync=stream.synchronize, repeats=1, warmup=0).median
    cp.cuda.Device().synchronize()
    lab.say(f"辅助流空着：{idle_us:.0f} µs；其中一条上还有 3 ms 别的活：**{busy_us:.0f} µs**。推理要等所有辅助流上的分支做完，也就连别人的活一起等了。")
else:
    print("这个版本的构建器没有采用辅助流，这一格跳过。")

# %% [markdown]
# ## 练习
#
# 三道练习，共 12 分。解答里可以用这些给定的名字：
#
# - 模块与工具：`np`、`cp`、`trt`、`cudart`、`partial`、`lab`、`contextmanager`；
# - 塔：`WIDTH`、`MOST_ROWS`、`tower_plan`、`load`、`bind`、`require`、`inferred`、`fold`；
# - 流与捕获：`stream`、`sides`（八条）、`capturing`；
# - 内核：`launch_spin`、`launch_stamp`、`launch_combine`、`launch_refill`、`BLOCK`；
# - 各题里另外给出的名字。
#
# `Seat`、`fork_join`、`shape_of`、`engine` 等来自演示单元（只做实验，评分时不运行），解答里不能用；要用就自己写。
#
# ### 练习一：从 DOT 重放泳道（4 分，不需要 GPU）
#
# 一张图放到只有几条泳道的 GPU 上，哪个节点在哪条泳道、什么时候跑？写 `replay_lanes(dot, us, lanes)`，把它推算出来：
#
# - `dot`：`cudaGraphDebugDotPrint` 写出的文本；给定的 `read_dot` 已经把它拆成节点和边；
# - `us`：字典，内核名 → 时间（正整数，µs）；
# - `lanes`：泳道的条数，泳道从 0 编号，一条泳道同时只跑一个节点。
#
# 规则：
#
# 1. 从 0 时刻开始。一个节点的前驱全部做完，它就**就绪**；没有前驱的，0 时刻就绪。
# 2. 只要有空着的泳道，又有就绪的节点，就立刻开始一个，绝不闲着。
# 3. 就绪的不止一个：**就绪得早的先跑**；同时就绪的，在 DOT 文本里**写得靠前**的先跑（不是编号小的）。
# 4. 空着的泳道不止一条：用编号最小的。
# 5. 同一时刻既有节点做完、又有节点要开始：先把这一刻做完的**全部**收齐，再决定谁开始。
#
# 返回列表，每个节点一项 `[编号, 泳道, 开始, 结束]`，按编号由小到大。没有节点就返回空列表。

# %%
import re


def read_dot(dot):
    """Read a graph's DOT text: ({number: kernel name}, in the order written; [(tail, head), …] by number)."""
    nodes = {int(number): name for number, name in re.findall(r'_node_(\d+)"\s*\[[^\]]*?label="\d+\n([^\n]*)', dot)}
    edges = [(int(tail), int(head)) for tail, head in re.findall(r'_node_(\d+)"\s*->\s*"[^"]*_node_(\d+)"', dot)]
    return nodes, edges


def dot_of(nodes, edges):
    """The DOT text, as the driver writes it, of nodes [(number, kernel name), …] and edges [(tail, head), …]."""
    lines = [f'"graph_1_node_{number}"[style="bold" shape="octagon" label="{number}\n{name}\n"];\n' for number, name in nodes]
    arrows = [f'"graph_1_node_{tail}" -> "graph_1_node_{head}";' for tail, head in edges]
    return "\n".join(['digraph dot {\nsubgraph cluster_1 {\nlabel="graph_1" graph[style="dashed"];', *lines, *arrows, "}\n}\n"])


SAMPLE = dot_of(
    [(0, "start"), (1, "long"), (2, "short"), (3, "short"), (4, "short"), (5, "join")],
    [(0, 1), (0, 2), (2, 3), (0, 4), (1, 5), (3, 5), (4, 5)],
)
SAMPLE_US = {"start": 2, "long": 9, "short": 4, "join": 3}

# %% tags=["demo"]
import matplotlib.pyplot as plt

lab.plot_style()
lab.draw_graph(SAMPLE, title="两条泳道：先自己排一排，join 几时做完？")
plt.show()

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 时间不必一微秒一微秒地走，只在“有节点做完”的时刻才有事发生。每到一个这样的时刻，按什么次序做两件事？
# 要记住哪几样东西：每个节点还差几个前驱，哪些就绪了、几时就绪的，哪些泳道空着，哪些节点在跑、几时做完？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 三个“总要取最小的”的集合（就绪的、空着的泳道、在跑的）正好各用一个堆：`heapq.heappush(堆, 元组)`、`heapq.heappop(堆)`，
# 元组按次序逐项比较。`read_dot` 返回的字典保持着文本里的先后：`enumerate(nodes)` 给出谁写得靠前。
#
# </details>

# %% solution="replay_lanes"
def replay_lanes(dot, us, lanes):
    """Place the nodes of a graph (DOT text) on `lanes` lanes by the rules above. us: {kernel name: µs, int > 0}.

    Returns [[number, lane, start, end], …], sorted by number.
    """
    ### BEGIN SOLUTION: 先想：时间只需要停在哪些时刻？每停一次，按规则 5 分两步做什么？要记住哪几样东西？
    from heapq import heappop, heappush

    nodes, edges = read_dot(dot)
    position = {number: place for place, number in enumerate(nodes)}
    missing, after = dict.fromkeys(nodes, 0), {number: [] for number in nodes}
    for tail, head in edges:
        missing[head] += 1
        after[tail].append(head)
    ready = sorted((0, position[number], number) for number in nodes if not missing[number])
    free, running, placed, now = list(range(lanes)), [], [], 0
    while ready or running:
        while ready and free:
            number, lane = heappop(ready)[-1], heappop(free)
            end = now + us[nodes[number]]
            placed.append([number, lane, now, end])
            heappush(running, (end, lane, number))
        now = running[0][0]
        while running and running[0][0] == now:
            _, lane, number = heappop(running)
            heappush(free, lane)
            for head in after[number]:
                missing[head] -= 1
                if not missing[head]:
                    heappush(ready, (now, position[head], head))
    return sorted(placed)
    ### END SOLUTION


# %% test="replay_lanes" kind="answer" points=4
sample, times = reference.value("SAMPLE"), reference.value("SAMPLE_US")
check.equal(
    student.replay_lanes(sample, times, 2), [[0, 0, 0, 2], [1, 0, 2, 11], [2, 1, 2, 6], [3, 1, 10, 14], [4, 1, 6, 10], [5, 0, 14, 17]],
    why="两条泳道：0 做完以后 1、2、4 同时就绪，1 和 2 先跑；2 在 6 做完时，4 早就就绪了，3 刚刚就绪，所以 4 先。",
)
check.equal(
    student.replay_lanes(sample, times, 1), [[0, 0, 0, 2], [1, 0, 2, 11], [2, 0, 11, 15], [3, 0, 19, 23], [4, 0, 15, 19], [5, 0, 23, 26]],
    why="一条泳道：没有并排，总时间是所有节点之和；谁先谁后仍按就绪的早晚。",
)
check.equal(
    student.replay_lanes(sample, times, 9), [[0, 0, 0, 2], [1, 0, 2, 11], [2, 1, 2, 6], [3, 1, 6, 10], [4, 2, 2, 6], [5, 0, 11, 14]],
    why="泳道足够多：没有谁在排队，做完的时刻由最长路径决定。6 时刻 1 号和 2 号泳道都空了，3 用编号小的。",
)
check.equal(student.replay_lanes(reference.dot_of([], []), {}, 3), [], why="没有节点，应当返回空列表。")
### BEGIN HIDDEN TESTS
def placed_by_the_rules(nodes, edges, us, lanes):
    """The rules once more, microsecond by microsecond. nodes: [(number, name), …] as written."""
    before = {number: [tail for tail, head in edges if head == number] for number, _ in nodes}
    ended, ready_at, found, busy, now = {}, {}, {}, {}, 0
    while len(ended) < len(nodes):
        for lane, number in list(busy.items()):
            if found[number][3] == now:
                ended[number] = now
                del busy[lane]
        for number, _ in nodes:
            if number not in ready_at and all(tail in ended for tail in before[number]):
                ready_at[number] = now
        waiting = [(ready_at[number], place, number, name) for place, (number, name) in enumerate(nodes) if number in ready_at and number not in found]
        idle = [lane for lane in range(lanes) if lane not in busy]
        for (_, _, number, name), lane in zip(sorted(waiting), idle, strict=False):
            found[number] = [number, lane, now, now + us[name]]
            busy[lane] = number
        now += 1
    return [found[number] for number in sorted(found)]


def drawn(size, links, shuffled):
    """A secret graph: nodes as written, edges, times."""
    names = [str(name) for name in secret.choice(["a", "b", "c", "d"], size)]
    label = secret.permutation(size) if shuffled else np.arange(size)
    edges = {(int(min(a, b)), int(max(a, b))) for a, b in secret.integers(0, size, (links, 2)) if a != b}
    edges = [(int(label[a]), int(label[b])) for a, b in edges]
    nodes = [(int(label[i]), names[i]) for i in range(size)]
    if shuffled:
        nodes = [nodes[i] for i in secret.permutation(size)]
    return nodes, [edges[i] for i in secret.permutation(len(edges))], {name: int(secret.integers(1, 9)) for name in "abcd"}


for size, links, lanes, shuffled, why in (
    (12, 14, 20, False, "泳道足够多的图里有排错的。前驱全部做完才就绪，就绪了就立刻开始。"),
    (14, 16, 2, False, "泳道不够的图里有排错的。先看谁就绪得早，再看谁在文本里写得靠前。"),
    (16, 12, 3, True, "编号和书写次序不一致的图里有排错的。同时就绪时，比的是文本里的先后，不是编号。"),
    (30, 24, 4, True, "大一些的图里有排错的。同一时刻做完的要先全部收齐，再决定谁开始、用哪条泳道。"),
):
    graphs = [drawn(size, links, shuffled) for _ in range(12)]
    got = [student.replay_lanes(reference.dot_of(nodes, edges), us, lanes) for nodes, edges, us in graphs]
    check.equal(got, [placed_by_the_rules(nodes, edges, us, lanes) for nodes, edges, us in graphs], why=why)
### END HIDDEN TESTS

# %% [markdown]
# 用你的推算去对真的图：三条分支，各四个空转 60 µs 的内核，捕获、导出 DOT、推算，再量一次。（这一格要先做完练习一。）

# %% tags=["demo", "gpu"]
with capturing(stream) as captured:
    fork_join([(queue, lambda queue=queue: [launch_spin(queue, 60) for _ in range(4)]) for queue in sides[:3]])
spinning = captured[0]
dot = spinning.debug_dot_str()
took = lab.end_to_end_us(partial(spinning.launch, stream), repeats=15)
guesses = [(n, max(end for *_, end in replay_lanes(dot, dict.fromkeys(read_dot(dot)[0].values(), 60), n))) for n in (1, 2, 3, 8)]
lab.say(lab.table(("推算：泳道", "做完的时刻 µs"), guesses) + f"\n\n量到的端到端时间：**{took.median:.0f} µs**。它像是有几条泳道？")

# %% [markdown]
# 三条分支最多用得上三条泳道，所以给三条和给八条，推算出来一样。量到的时间和它们接近，只说明这块 GPU 上的泳道**够用**，说不出到底有几条。
#
# ### 练习二：N 个请求，M 个工位（4 分）
#
# 写 `make_pool(engine, workers)`：造一个推理池，它有两个方法：
#
# - `submit(x, ready)`：交一个请求，**马上返回**一个 `concurrent.futures.Future`，哪怕 `x` 还没写好、工位都忙着。`x` 是 CuPy float32 数组，连续，形状 (行数, WIDTH)，
#   行数 1 到 16，每次可以不同；它由**别的流**写好，写完以后记录了 CuPy 事件 `ready`。
#   `future.result()` 给出 NumPy 数组 `y`，形状与 `x` 相同，每个请求一个新数组；
# - `close()`：等手上的请求全部做完，然后不再接受新的：再 `submit` 就抛出 `RuntimeError`。
#
# 要求：
#
# - 正好 `workers` 个工位，**每个工位有自己的上下文、自己的流、自己的输出缓冲**，一次造好，反复使用；
# - 一次来 `workers` 个请求，就真的 `workers` 个同时在 GPU 上（看守数的是 `execute_async_v3`，所以请求来了就直接入队，不要预先录成图）；请求比工位多，就排队；`submit` 可能同时被好几个线程调用；
# - 推理要等 `ready`，结果要等推理；
# - TensorRT 说“不”（返回 `False`），那个请求的 `result()` 抛出 `RuntimeError`；**工位不能因此少一个**，别的请求照常。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 一个工位处理一个请求，从头到尾是哪几步？这几步如果由一个线程独自做完，上下文还会有别人来碰吗？
# 工位借出去、还回来，用什么数据结构，线程之间才不会借到同一个？中途抛了异常，谁来还？
# 结果从显存抄到主机，是在哪条流上抄的？那条流知道推理做完了没有？
# 抄到普通内存的拷贝要等流做完才返回；它在驱动里等的时候，别的线程还提交得了吗？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `concurrent.futures.ThreadPoolExecutor(workers)`：`.submit(函数, 参数…)` 返回 `Future`，函数里的异常由 `result()` 抛出；
# `.shutdown()` 等全部做完，之后再 `.submit` 就是 `RuntimeError`。
# `queue.SimpleQueue()`：`.get()` 拿走一个，没有就等；`.put(东西)` 还回去；配 `try … finally`。
# `流.wait_event(ready)`；`bind(上下文, x, y)`；`require(上下文.execute_async_v3(流.ptr), "入队")`；
# `流.synchronize()` 等这条流做完，等的时候不妨碍别的线程；
# `y.get(stream=流)` 把 CuPy 数组在这条流上抄成新的 NumPy 数组，抄完才返回。推理做完了再抄，抄的时间就很短。
#
# </details>

# %% solution="make_pool" tags=["gpu"]
def make_pool(engine: "trt.ICudaEngine", workers):
    """Make a pool of `workers` workers, each with a context, a stream and an output buffer of its own.

    engine: a tower, x → y. Returns an object with submit(x, ready), which returns a concurrent.futures.Future of y (numpy,
    shape of x; RuntimeError where TensorRT refuses), and close().
    """
    ### BEGIN SOLUTION: 先写一个工位：它独占哪几样东西，处理一个请求从头到尾有哪几步？再想线程怎样借到工位、失败了谁来还
    from concurrent.futures import ThreadPoolExecutor
    from queue import SimpleQueue

    class Worker:
        def __init__(self):
            self.context = require(engine.create_execution_context(), "创建执行上下文")
            self.stream = cp.cuda.Stream(non_blocking=True)
            with self.stream:
                self.y = cp.empty((MOST_ROWS, WIDTH), cp.float32)

        def infer(self, x, ready):
            y = self.y[: x.shape[0]]
            bind(self.context, x, y)
            self.stream.wait_event(ready)
            require(self.context.execute_async_v3(self.stream.ptr), "入队")
            self.stream.synchronize()  # a copy to pageable memory that waits for the stream may keep other threads from submitting
            return y.get(stream=self.stream)

    class Pool:
        def __init__(self):
            self.idle, self.threads = SimpleQueue(), ThreadPoolExecutor(workers)
            for _ in range(workers):
                self.idle.put(Worker())

        def submit(self, x, ready):
            return self.threads.submit(self._serve, x, ready)

        def close(self):
            self.threads.shutdown()

        def _serve(self, x, ready):
            worker = self.idle.get()
            try:
                return worker.infer(x, ready)
            finally:
                self.idle.put(worker)

    return Pool()
    ### END SOLUTION


# %% test="make_pool_result" kind="structure" points=2 tags=["gpu"]
import time

CLIENT = """
import threading
from concurrent.futures import TimeoutError

import cupy as cp
import numpy as np

writers = [cp.cuda.Stream(non_blocking=True) for _ in range(4)]


def arrive(data, writer, stale=None, late=None):
    '''A request as a producer makes it: x on the device and the event of its writing.'''
    ready = cp.cuda.Event(disable_timing=True)
    with writer:
        x = cp.asarray(data if stale is None else stale)
        writer.synchronize()
        if late is not None:
            source = cp.asarray(data)
            writer.synchronize()
            late(writer, x, source)
        ready.record(writer)
    return x, ready


def collect(futures):
    '''All results, or the index of the first that did not come.'''
    results = []
    for index, future in enumerate(futures):
        try:
            results.append(future.result(timeout=20))
        except TimeoutError:
            return index
    kinds = [f"{type(y).__name__} {y.dtype} {y.shape}" for y in results if not (isinstance(y, np.ndarray) and y.dtype == np.float32 and y.ndim == 2)]
    return kinds[0] if kinds else np.concatenate(results)


def serve(pool, data, rows):
    '''One request after the other from the rows of data; all are submitted before the first result is read.'''
    requests, first = [], 0
    for number, count in enumerate(rows):
        requests.append(arrive(data[first:first + count], writers[number % 4]))
        first += count
    return collect([pool.submit(*request) for request in requests])


def serve_late(pool, data, stale, late):
    '''Requests whose data are written late, over other data.'''
    return collect([pool.submit(*arrive(each, writers[number % 4], old, late)) for number, (each, old) in enumerate(zip(data, stale))])


def one(pool, data):
    return pool.submit(*arrive(data, writers[0])).result(timeout=20)


def kinds_of(pool, data):
    future = pool.submit(*arrive(data, writers[0]))
    told = [hasattr(future, "result"), hasattr(future, "done")]
    future.result(timeout=20)
    return told


def soak(pool, data, rows, picks):
    '''Many requests from four threads at once: picks[i] is the number of the input. Returns results in that order, and the memory used.'''
    firsts = np.concatenate([[0], np.cumsum(rows)])
    inputs = [arrive(data[firsts[i]:firsts[i + 1]], writers[i % 4]) for i in range(len(rows))]
    futures = [None] * len(picks)

    def client(begin):
        for position in range(begin, len(picks), 4):
            futures[position] = pool.submit(*inputs[picks[position]])

    def used():
        cp.cuda.runtime.deviceSynchronize()
        return cp.get_default_memory_pool().total_bytes()

    collect([pool.submit(*each) for each in inputs])
    before = used()
    clients = [threading.Thread(target=client, args=(begin,)) for begin in range(4)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    return [collect(futures), used() - before]


class HeldBack:
    '''Requests that are ready only when 'hold', started on their writer, has ended.'''

    def __init__(self, data, hold):
        with writers[0]:
            self.inputs, self.ready = [cp.asarray(each) for each in data], cp.cuda.Event(disable_timing=True)
            writers[0].synchronize()
            hold(writers[0])
            self.ready.record(writers[0])

    def hand_in(self, pool):
        self.futures = [pool.submit(x, self.ready) for x in self.inputs]

    def results(self):
        return collect(self.futures)


def done_at_close(pool, data, n, late):
    '''Submit n requests whose data are written late, close, and tell how many had been served when close returned.'''
    futures = [pool.submit(*arrive(data, writers[0], data, late)) for _ in range(n)]
    pool.close()
    return sum(future.done() and not future.cancelled() and future.exception() is None for future in futures)
"""


def client(name):
    return student.define(CLIENT, name)


def integers(*shape):
    return secret.integers(-8, 9, shape).astype(np.float32)


tower = student.load(reference.tower_plan(4))
pool = student.make_pool(tower, 2)
data = integers(4, 64)
check.equal(client("kinds_of")(pool, data), [True, True], why="submit 应当马上返回一个 concurrent.futures.Future。")
check.equal(client("one")(pool, data), reference.inferred(data, 4), why="一个请求的结果不对。推理等过 ready 吗？结果是在推理的那条流上取的吗？")
rows = [1, 16, 4, 4, 7, 16, 2, 1]
data = integers(sum(rows), 64)
check.equal(
    client("serve")(pool, data, rows), reference.inferred(data, 4),
    why="八个行数不同的请求，先全部交出去、再取结果，有不对的。每个请求的形状都要重新设；每个结果都要是自己的新数组，不能指着工位的缓冲。",
)
### BEGIN HIDDEN TESTS
LATE = """
import cupy as cp
import numpy as np
spin = cp.RawKernel(r'extern "C" __global__ void spin(unsigned long long ns) { unsigned long long start, now; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start)); do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns); }', "spin")

def late(writer, x, source):
    with writer:
        spin((1,), (1,), (np.uint64(15_000_000),))
        x[...] = source

def hold(writer):
    with writer:
        spin((1,), (1,), (np.uint64(300_000_000),))
"""
warm = client("serve_late")(pool, integers(1, 4, 64), integers(1, 4, 64), student.define(LATE, "late"))
data, stale = integers(4, 4, 64), integers(4, 4, 64)
got = client("serve_late")(pool, data, stale, student.define(LATE, "late"))
check.equal(got, reference.inferred(data.reshape(16, 64), 4), why="前处理慢一点，结果就不对：推理读到了还没写好的 x。工位的流要先等 ready 这个事件。")
check.raises("RuntimeError", client("one"), pool, integers(17, 64), why="17 行超出范围，TensorRT 会返回 False，result() 应当抛出 RuntimeError。")
for _ in range(3):
    check.raises("RuntimeError", client("one"), pool, integers(17, 64), why="17 行超出范围，result() 应当抛出 RuntimeError；如果是等不到结果，就是前一次失败的工位没有还回来。")
data = integers(6, 64)
check.equal(client("one")(pool, data), reference.inferred(data, 4), why="拒绝了几个请求以后，合法的请求不对，或者再也等不到结果：失败的请求也要把工位还回来。")
for _ in range(2):  # the second time only if the machine may just have been busy
    data = integers(5, 4, 64)
    requests = client("HeldBack")(data, student.define(LATE, "hold"))
    start = time.perf_counter()
    requests.hand_in(pool)
    took = time.perf_counter() - start
    check.equal(requests.results(), reference.inferred(data.reshape(20, 64), 4), why="五个请求的数据都来得晚，结果就不对。工位的流要先等 ready 这个事件。")
    if took < 0.15:
        break
check.that(took < 0.15, why="submit 没有马上返回：工位都在等数据，或者都忙着，交请求的人就得陪着等。submit 只管排队和交出 Future，等 ready、等工位、等结果，都是别的线程的事。")
data = integers(6, 64)
check.equal(client("done_at_close")(pool, data, 3, student.define(LATE, "late")), 3, why="close() 返回的时候，还有请求没做完。")
check.raises("RuntimeError", client("one"), pool, data, why="关闭以后再 submit，应当抛出 RuntimeError。")

pool = student.make_pool(student.load(reference.tower_plan(4)), 6)
rows = [int(count) for count in secret.integers(1, 17, 48)]
data = integers(sum(rows), 64)
picks = [int(pick) for pick in secret.integers(0, 48, 1000)]
got, grown = client("soak")(pool, data, rows, picks)
parts = np.split(reference.inferred(data, 4), np.cumsum(rows)[:-1])
check.equal(got, np.concatenate([parts[pick] for pick in picks]), why="四个线程一共交了一千个大小不一的请求，有结果不对。工位之间共用了什么？借出去的工位会不会被两个线程同时拿到？")
check.that(isinstance(grown, int) and grown < 8 << 20, why="一千个请求以后，显存池大了许多。缓冲应当一次造好，反复使用；用过的东西是不是一直留着没放？")
pool.close()
### END HIDDEN TESTS

# %% test="make_pool_apart" kind="structure" points=2 tags=["gpu"]
SERVE = """
import threading
from concurrent.futures import TimeoutError

import cupy as cp
import numpy as np


def serve(pool, data):
    '''All requests at once, each from a stream of its own. The results, or the number of the first that did not come.'''
    requests = []
    cp.cuda.runtime.deviceSynchronize()
    for each in data:
        writer, ready = cp.cuda.Stream(non_blocking=True), cp.cuda.Event(disable_timing=True)
        with writer:
            x = cp.asarray(each)
            ready.record(writer)
        writer.synchronize()
        requests.append((x, ready))
    results = []
    for number, future in enumerate([pool.submit(*request) for request in requests]):
        try:
            results.append(future.result(timeout=20))
        except TimeoutError:
            return number
    return np.stack(results)
"""
WHY = {
    "context": "两个请求同时在跑，用的却是同一个执行上下文。上下文里有这一次的地址和中间结果，每个工位要有自己的上下文。",
    "memory": "两个上下文同时在跑，中间结果用的却是同一块显存（USER_MANAGED 的显存重叠了）。只有绝不同时在跑的上下文才能共用显存。",
    "output": "两个请求同时在跑，写的却是同一块输出缓冲。每个工位要有自己的输出缓冲。",
    "thread": "两个线程同时在设置同一个执行上下文：一个刚设好地址，就被另一个改掉了。每个工位只由一个线程使用，到它还回来为止。",
}


def examine(workers, requests):
    """Serve requests by a pool whose GPU work is slowed down, under the ledger's eyes."""
    ledger = student.define(reference.value("WATCH"), "Ledger")(40_000)
    pool = student.make_pool(ledger.watch(student.load(reference.tower_plan(4))), workers)
    serve = student.define(SERVE, "serve")
    for fault in ledger.report()["faults"]:  # what was seen while the pool was made counts for nothing else
        check.that(False, why=WHY[fault])
    most = []
    for _ in range(3):
        data = secret.integers(-8, 9, (requests, 4, 64)).astype(np.float32)
        got = serve(pool, data)
        told = ledger.report()
        for fault in told["faults"]:
            check.that(False, why=WHY[fault])
        check.equal(got, reference.inferred(data.reshape(-1, 64), 4).reshape(data.shape), why="推理慢一点，结果就不对。结果要等推理做完再取，而且在推理的那条流上取；每个结果都要是自己的新数组。")
        check.that(told["contexts"] == workers, why=f"{workers} 个工位应当正好造 {workers} 个执行上下文，一次造好，反复使用。")
        most.append(told["most"])
    check.that(max(most) == workers, why=f"一次来了足够多的请求，应当有 {workers} 个同时在 GPU 上，实际没有。是不是都放进了同一条流，一把锁从头锁到尾，或者没等推理做完就去抄结果（那次拷贝在驱动里等着，别的线程可能提交不了）？")
    return ledger, pool, serve


examine(2, 2)[1].close()
### BEGIN HIDDEN TESTS
workers = int(secret.integers(3, 6))
ledger, pool, serve = examine(workers, 2 * workers + 1)
for rows, method in enumerate(("set_input_shape", "set_tensor_address", "execute_async_v3") * 2, 5):  # shapes that no graph was made for
    data = secret.integers(-8, 9, (1, rows, 64)).astype(np.float32)
    ledger.deny(method)
    check.raises("RuntimeError", serve, pool, data, why=f"{method} 返回了 False，result() 应当抛出 RuntimeError，而不是给出一个没有算过的结果。")
    got = serve(pool, data)
    check.equal(got, reference.inferred(data.reshape(-1, 64), 4).reshape(data.shape), why="TensorRT 拒绝过以后，合法的请求结果不对，或者等不到：失败的请求也要把工位还回来。")
pool.close()
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：几个引擎，一张图（4 分）
#
# 一个请求要经过 K 个小引擎，彼此无关，最后汇总：
#
# - `x` 是 CuPy float32，形状 (K, 行数, WIDTH)，连续。第 `k` 个引擎读 `x[k]`，结果写进 `y[k]`；
# - K 个都做完以后，`launch_combine(…, x, y)` 把 `y` 揉进 `x`。这样走一步，`x` 就前进一步。
#
# 给定的 `SerialEnsemble` 每个引擎一张图，在 `stream` 上一张接一张地启动。每个引擎都很小，只占几个 SM，GPU 大半闲着。
#
# 你来写 `make_ensemble(engines, x)`：把一步录成**一张**图，K 个引擎是并排的 K 条分支，然后汇合，最后是 `combine`。返回给定的 `Ensemble`。
#
# - K 是 1 到 8；`engines` 里**同一个引擎可以出现几次**；
# - 每条分支用自己的上下文；捕获之前要先预热；
# - 建图的时候 `x` 一个字节也不能变；
# - 图要用的上下文和缓冲，有人替它留住；
# - TensorRT 在哪一步说“不”，就抛出 `RuntimeError`：不能返回一张少了引擎的图，也不能让哪条流停在捕获里。
#
# 速度：考官启动 `Ensemble` 里的那张图（`captured`），与 `SerialEnsemble` 比端到端时间（从提交到全部做完，最后做一次整个设备的同步），至少快 2 倍。
# 如果在这台机器上参考实现自己也快得不多，门槛会降到它的加速比的一半。

# %%
def stepped(x, depth, firsts, steps=1):
    """The state x (numpy float32, (K, rows, WIDTH)) after `steps` steps of the towers (depth, firsts[k])."""
    for _ in range(steps):
        y = np.stack([inferred(part, depth, first) for part, first in zip(x, firsts, strict=True)])
        x = fold(x + y + np.roll(y, -1, axis=0) + np.arange(len(x), dtype=np.float32)[:, None, None]).astype(np.float32)
    return x


# %% tags=["gpu"]
class Ensemble:
    """A captured step: call it to go one step on `stream`, without waiting.

    captured: cupy.cuda.Graph. kept: whatever the graph needs that nobody else keeps (contexts, buffers).
    """

    def __init__(self, captured, kept):
        self.captured, self.kept = captured, kept

    def __call__(self):
        self.captured.launch(stream)


class SerialEnsemble:
    """The same step as a graph for each engine and one for combine, launched one after the other on `stream`. The baseline.

    engines: K towers; x: cupy float32, (K, rows, WIDTH), advanced in place.
    """

    def __init__(self, engines, x):
        with stream:
            self.x, self.y = x, cp.zeros(x.shape, cp.float32)
        self.contexts = [require(engine.create_execution_context(), "创建执行上下文") for engine in engines]
        self.graphs = []
        for k, context in enumerate(self.contexts):
            bind(context, x[k], self.y[k])
            require(context.execute_async_v3(stream.ptr), "预热")
            stream.synchronize()
            with capturing(stream) as captured:
                require(context.execute_async_v3(stream.ptr), "捕获中入队")
            self.graphs += captured
        with capturing(stream) as captured:
            launch_combine(stream, x, self.y)
        self.graphs += captured

    def __call__(self):
        for graph in self.graphs:
            graph.launch(stream)


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 分叉用几个事件，汇合用几个？`combine` 应当在谁的后面？
# 哪些事要在捕获之前做完：造上下文、绑定、预热、分配 `y`、造事件？预热会不会碰 `x`？
# 中途抛了异常，被拉进来的流有没有人管？看看 `capturing` 做了什么。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `cp.cuda.Event(disable_timing=True)`；`事件.record(流)`；`流.wait_event(事件)`。套路：`with capturing(stream) as captured:` 里，
# 起始流记录一个事件，每条 `sides[k]` 等它、入队、记录自己的事件，`stream` 等齐所有的事件，再 `launch_combine(stream, x, y)`；
# 出了 `with`，图在 `captured[0]`。绑定用 `bind(context, x[k], y[k])`，入队用 `require(context.execute_async_v3(sides[k].ptr), "…")`。
#
# </details>

# %% solution="make_ensemble" tags=["gpu"]
def make_ensemble(engines: "list[trt.ICudaEngine]", x):
    """Capture one step of the state x as one graph: the engines as parallel branches, then combine.

    engines: 1 to 8 towers, the same one perhaps several times. x: cupy float32, (K, rows, WIDTH), contiguous, advanced in
    place by each call of the result; it stays the caller's, and is not changed here. Returns an Ensemble. RuntimeError where
    TensorRT refuses.
    """
    ### BEGIN SOLUTION: 先把捕获之前能做完的都做完（上下文、缓冲、绑定、预热、事件）；再想捕获里从哪里分叉、谁等谁、combine 在谁后面；最后想想谁替图留住这些东西
    with stream:
        y = cp.zeros(x.shape, cp.float32)
    stream.synchronize()
    contexts = [require(engine.create_execution_context(), "创建执行上下文") for engine in engines]
    branches = list(zip(contexts, sides, strict=False))
    for k, (context, side) in enumerate(branches):
        bind(context, x[k], y[k])
        require(context.execute_async_v3(side.ptr), "预热")
        side.synchronize()
    forked = cp.cuda.Event(disable_timing=True)
    joined = [cp.cuda.Event(disable_timing=True) for _ in branches]
    with capturing(stream) as captured:
        forked.record(stream)
        for (context, side), done in zip(branches, joined, strict=True):
            side.wait_event(forked)
            require(context.execute_async_v3(side.ptr), "捕获中入队")
            done.record(side)
        for done in joined:
            stream.wait_event(done)
        launch_combine(stream, x, y)
    return Ensemble(captured[0], (contexts, x, y, forked, joined))
    ### END SOLUTION


# %% test="make_ensemble_result" kind="structure" points=2 tags=["gpu"]
WHY = {
    "context": "两条并排的分支用了同一个执行上下文：它们的中间结果在同一块显存里。引擎可以共用，上下文每条分支要有自己的。",
    "memory": "两条并排的分支，上下文不同，中间结果用的却是同一块显存（USER_MANAGED 的显存重叠了）。只有绝不同时在跑的上下文才能共用显存。",
    "output": "两条并排的分支写同一块输出。第 k 条分支的结果应当写进自己的 y[k]。",
    "thread": "两个线程在设置同一个执行上下文。",
}
SHAPE = """
def shape(ensemble):
    '''[nodes on the longest path, kernels, nodes that nothing waits for] of an ensemble's graph.'''
    from launchlab.exam.agent import describe_graph
    told = describe_graph(ensemble.captured)
    level = [1] * len(told["kinds"])
    changed = True
    while changed:
        changed = False
        for tail, head in told["edges"]:
            if level[head] <= level[tail]:
                level[head], changed = level[tail] + 1, True
    return [max(level, default=0), told["kinds"].count("Kernel"), len(set(range(len(level))) - {tail for tail, _ in told["edges"]})]
"""
ATTEMPT = """
def attempt(make, engines, x):
    '''["", what make gives], or the code of a capture that was not joined (904) or not forked (905).'''
    try:
        return ["", make(engines, x)]
    except Exception as error:
        told = f"{type(error).__name__} {error}"
        for code, word in (("904", "Unjoined"), ("905", "Isolation")):
            if word in told:
                return [code, None]
        raise
"""
# Whoever frees the graph's buffers lets the pool hand their memory to these arrays.
TENANTS = """
def tenants(streams, size):
    import gc, cupy
    gc.collect()
    held = [cupy.full(size, 0x5A5A5A5A, cupy.int32) for _ in range(6)]
    for each in streams:
        with each:
            held += [cupy.full(size, 0x5A5A5A5A, cupy.int32) for _ in range(4)]
    cupy.cuda.runtime.deviceSynchronize()
    return held
"""
UNSPOILT = """
def spoilt(held):
    return sum(bool((each != 0x5A5A5A5A).any()) for each in held)
"""
streams = [student.value("stream"), *student.value("sides")]


def integers(*shape):
    return secret.integers(-8, 8, shape).astype(np.float32)


class Trial:
    """Towers of `depth` layers, watched, and the ensemble that the student made of them."""

    def __init__(self, depth, firsts, rows):
        self.depth, self.firsts = depth, firsts
        self.ledger = student.define(reference.value("WATCH"), "Ledger")()
        loaded = {first: student.load(reference.tower_plan(depth, first)) for first in set(firsts)}
        watched = {first: self.ledger.watch(loaded[first]) for first in loaded}
        self.engines = [watched[first] for first in firsts]
        self.data = integers(len(firsts), rows, 64)
        self.x = on_gpu(self.data)

    def make(self):
        code, self.ensemble = student.define(ATTEMPT, "attempt")(student.value("make_ensemble"), self.engines, self.x)
        self.others = student.define(TENANTS, "tenants")(streams, self.data.size)
        told = self.ledger.report()
        check.that(code != "904", why="有分支没有汇合（904）：stream 要等每条分支最后的事件，一条也不能少，然后才是 combine 和结束捕获。")
        check.that(code != "905", why="有分支没有从起始流分叉出来（905）：它的内核当场就执行了，没有进图。每条分支先等起始流的事件，再入队。")
        check.equal(self.x.read(), self.data, why="建图的时候 x 就变了。预热只应当运行引擎，combine 只能在捕获里出现。")
        for fault in told["faults"]:
            check.that(False, why=WHY[fault])
        check.that(told["contexts"] == len(self.firsts), why="每条分支应当正好造一个执行上下文，哪怕几条分支用的是同一个引擎。")
        check.that(told["alive"] == len(self.firsts), why="图还在，它的执行上下文却已经没有人引用、被回收了：图里的内核还要用上下文的中间结果那块显存。请把上下文也交给 Ensemble 保管。")
        loaded = {first: reference.load(reference.tower_plan(self.depth, first)) for first in set(self.firsts)}
        mine = reference.make_ensemble([loaded[first] for first in self.firsts], on_gpu(self.data))
        longest, kernels, last = reference.define(SHAPE, "shape")(mine)
        found, _, sinks = student.define(SHAPE, "shape")(self.ensemble)
        check.nodes(self.ensemble.get("captured"), kernels=kernels, why="图里的内核数不对：K 个引擎各一次，combine 一次，都要在捕获里。")
        check.that(found <= longest + 1, why="分支没有并排：图里最长的路径比一条分支长得多。每条分支要从起始流分叉出来，在自己的流上入队，彼此不要等。")
        check.that(sinks == last, why="combine 没有等齐所有的分支：图里有引擎的内核，后面没有谁在等它。先让 stream 等每条分支的事件，再启动 combine。")

    def steps(self, n, why):
        self.ensemble.run(n)
        check.that(student.define(UNSPOILT, "spoilt")(self.others) == 0, why="重放写坏了别人的数组：图用到的缓冲已经被回收，内存池把它给了别人。请把它们交给 Ensemble 保管。")
        self.data = reference.stepped(self.data, self.depth, self.firsts, n)
        check.equal(self.x.read(), self.data, abs=0.5, why=why)


trial = Trial(4, [0, 50, 0], 4)
trial.make()
trial.steps(1, "走一步的结果不对。combine 要等全部的分支做完；第 k 个引擎读 x[k]，写 y[k]。")
trial.steps(3, "再走三步，结果不对。每次重放都要从 x 重新算起，combine 要等全部的分支。")
### BEGIN HIDDEN TESTS
for firsts, rows in (([0, 0, 50, 0, 50, 50, 0, 50], int(secret.integers(1, 17))), ([50], 16), ([50, 0], int(secret.integers(1, 17)))):
    trial = Trial(4, firsts, rows)
    trial.make()
    for _ in range(2):
        trial.steps(int(secret.integers(2, 7)), "换了 K、行数、引擎的次序和步数，结果不对。有没有写死的尺寸？有没有哪条分支没有汇合？")

trial = Trial(4, [0, 50, 0, 50], 4)
for method in ("set_input_shape", "set_tensor_address", "execute_async_v3"):
    trial.ledger.deny(method)
    check.raises("RuntimeError", student.make_ensemble, trial.engines, trial.x, why=f"{method} 返回了 False，应当抛出 RuntimeError，不能返回一张少了引擎的图。")
    check.equal(trial.x.read(), trial.data, why="失败的建图改动了 x。")
REFUSES = """
def refusing(ledger, make, engines, x, streams):
    '''Let the first enqueue in a capture be refused; tell how make ended, and how many streams still capture.'''
    from cuda.bindings import runtime
    whole = ledger.enqueue
    refused = []
    def enqueue(context, handle, call):
        if int(runtime.cudaStreamIsCapturing(handle)[1]) != 0 and not refused:
            refused.append(handle)
            return False
        return whole(context, handle, call)
    ledger.enqueue = enqueue
    try:
        make(engines, x)
        ended = "returned"
    except RuntimeError:
        ended = "RuntimeError"
    except Exception as error:
        ended = type(error).__name__
    finally:
        ledger.enqueue = whole
    return [len(refused), ended, sum(int(runtime.cudaStreamIsCapturing(each.ptr)[1]) != 0 for each in streams)]
"""
asked, ended, capturing_still = student.define(REFUSES, "refusing")(trial.ledger, student.value("make_ensemble"), trial.engines, trial.x, streams)
check.that(asked == 1, why="捕获中没有一次入队：引擎应当在捕获里入队。")
check.that(ended == "RuntimeError", why="捕获中的一次入队被拒绝（返回 False），应当抛出 RuntimeError，不能返回一张少了引擎的图。")
check.that(capturing_still == 0, why="建图失败以后，还有流停在捕获里。用给定的 capturing，它会善后。")
trial = Trial(4, [0, 50], 4)
trial.make()
trial.steps(2, "失败过几次以后再建一张图，结果不对。")
### END HIDDEN TESTS

# %% test="make_ensemble_speed" kind="speedup" points=2 tags=["gpu"]
FIRSTS, SHAPE = [0, 50, 0, 50, 0, 50, 0, 50], (8, 4, 64)
KERNELS = """
def kernels(ensemble):
    from launchlab.exam.agent import describe_graph
    return describe_graph(ensemble.captured)["kinds"].count("Kernel")
"""


def integers():
    return secret.integers(-8, 8, SHAPE).astype(np.float32)


plans = {first: reference.tower_plan(8, first) for first in (0, 50)}
own = {first: student.load(plan) for first, plan in plans.items()}
theirs = {first: reference.load(plan) for first, plan in plans.items()}
x, y, z = on_gpu(integers()), on_gpu(integers()), on_gpu(integers())
ensemble = student.make_ensemble([own[first] for first in FIRSTS], x)
towers = [theirs[first] for first in FIRSTS]
serial, best = reference.SerialEnsemble(towers, y), reference.make_ensemble(towers, z)
captured = ensemble.get("captured")
check.nodes(captured, kernels=reference.define(KERNELS, "kernels")(best), why="计时的是 captured 里那一张图，由考官启动：一步的全部工作，八个引擎和 combine，都要在这张图里。")
check.speedup(
    captured.instantiate(),
    over=serial,
    best=best.get("captured").instantiate(),
    state=(x, z),
    at_least=2.0,
    draw=integers,
    abs=0.5,
    why="还不够快。八条分支真的并排吗？每走一步应当只有一次图启动，分支之间没有路径相连。",
)
### BEGIN HIDDEN TESTS
data = x.write(integers())
steps = int(secret.integers(3, 9))
ensemble.run(steps)
check.equal(x.read(), reference.stepped(data, 8, FIRSTS, steps), abs=0.5, why="计时以后换一个状态再走几步，结果不对：快，但没有做完该做的工作。")
### END HIDDEN TESTS

# %% [markdown]
# 用你写的函数看一看：分支从 1 条加到 8 条，两种做法的时间怎么变？（这一格要先做完练习三。）

# %% tags=["demo", "gpu"]
pair_of_engines = [load(tower_plan(8, first)) for first in (0, 50)]
BRANCHES = (1, 2, 4, 8)
serial_us, parallel_us = [], []
for k in BRANCHES:
    chosen = [pair_of_engines[i % 2] for i in range(k)]
    with stream:
        states = [cp.zeros((k, 4, WIDTH), cp.float32) for _ in range(2)]
    stream.synchronize()
    pair = lab.compare_us(SerialEnsemble(chosen, states[0]), make_ensemble(chosen, states[1]), clock="end_to_end")
    serial_us.append(pair.first.median)
    parallel_us.append(pair.second.median)
fig, ax = plt.subplots()
ax.plot(BRANCHES, serial_us, label="每个引擎一张图，一张接一张")
ax.plot(BRANCHES, parallel_us, label="一张图，并排的分支")
ax.set_xticks(BRANCHES)
ax.set_ylim(bottom=0)
ax.set_xlabel("引擎（分支）的个数")
ax.set_ylabel("一步的端到端时间（µs，中位数）")
ax.set_title(f"几个引擎，一张图（{lab.gpu_name()}）")
ax.legend()
plt.show()
lab.say(f"8 个引擎：一张接一张 {serial_us[-1]:.0f} µs，一张图 {parallel_us[-1]:.0f} µs，快 **{serial_us[-1] / parallel_us[-1]:.1f} 倍**。")

# %% [markdown] tags=["instructor"]
# 给教师：练习二、三的“共用”不靠碰运气抓：看守 `WATCH` 包住引擎，记下每次入队的上下文、流、显存和输出，可能同时在跑却共用的就报告，各有各的原因。
# 练习二里它还在每次入队前让 GPU 空转 40 毫秒，少了同步、提前交出的结果一定是错的；前处理迟到的测试则让写 `x` 的流空转 15 毫秒。
# 失败的请求若不归还工位，几次以后就等不到结果，测试会在 20 秒后说出来。练习三把捕获中的第一次入队换成 `False`，看是不是仍交出一张图。
# 练习三计时的是 `captured` 那张图的定义，由考官自己实例化、自己启动：每个引擎一张图、启动得再快，也不算“一张图”。

# %% [markdown]
# ## 小结
#
# | 以前以为 | 实验以后 |
# |:--|:--|
# | 一个上下文，多条流，也能并行 | 上下文里有中间结果；一个在跑的请求一个上下文，引擎才是共用的 |
# | 跑了很多次没错，就没有共用 | 错不错看交错；要看谁用了什么，不看运气 |
# | 一张图在两条流上启动，就是两份 | 同一张图的两次启动总是一先一后；一个工位一张图，或者一张图几条分支 |
# | 八条流就是八个请求同时在跑 | 逐个入队喂不饱八条流时，流再多也在等 CPU；看泳道图 |
# | 流越多越快 | 吞吐到头以后，多出来的流只加延迟 |
# | 捕获的次序决定谁先跑 | 图只记得边 |
# | 网络有分支，引擎就会并行 | 要允许辅助流，还要构建器采用；问引擎，数图 |
# | 多流约 500 个内核，图把约 400 µs 变成约 80 µs | 要说清是 CPU 提交还是端到端；以自己的表为准 |
#
# **带走三句话**
#
# 1. 一个在跑的请求，配齐四样：上下文、流、输入、输出；交接处两头都要等事件。
# 2. 并行要三样同时成立：没有共用，没有排在一条队里，CPU 喂得上。图管的是第三样。
# 3. 加流之前先看泳道图：空白在等 CPU，就用图；条子排满了，就别再加。
#
# 下一步：《执行上下文与显存》讲八个上下文怎样少占显存：不同时在跑的，共用一块。
