# %% [markdown]
# # 静态缓冲与拷贝
#
# 一个图片服务把推理录成了 CUDA 图，CPU 的提交时间少了九成，大家很高兴。上线一看，用户等的时间几乎没变。
# 时间去哪儿了？请求从主机内存来，结果要回到主机内存去，而那张图只管中间的一段。
#
# 这一章把两头的拷贝也管起来：放进图里，或者藏到计算的背后；并且算清楚，什么时候图已经无关紧要。
#
# **学完以后，你能够**
#
# - 把拷入、推理、拷出录成一张图，用固定的锁页缓冲（pinned memory）收发，换多少次输入都不出错；
# - 说出锁页与可分页内存（pageable memory）的三处差别：带宽、谁在等、捕获时怎样；
# - 找出生产者和消费者之间缺了哪个事件，并且让“缺事件”必然露馅，而不是碰运气；
# - 用两三条流和双缓冲（double buffering）让拷贝与计算重叠；
# - 用几个数字判断：图在什么时候不再重要。
#
# **需要的基础**：《捕获 TensorRT 推理》里的预热、捕获和返回值检查；《多流捕获与图的生命周期》里的事件、分叉与汇合。
#
# **时间**：约 50 分钟，其中三道练习约 30 分钟。
#
# 下一格导入的 `check`、`student` 等五个名字只给练习后面的测试单元用，现在不用管它们。

# %%
import numpy as np
from functools import partial
from launchlab import lab
from launchlab.exam import check, on_gpu, reference, secret, student

lab.here()

# %% [markdown]
# ## 准备：一个吃图片的小引擎
#
# 讲义说图片的分辨率会变，比如 720p、1080p。本章的网络把图片切成 8 × 8 的小块，每块三个通道，就是一行 192 个数；
# 一张 720p 的图是 14400 行。网络有 16 层，每层一次矩阵乘法、一次折回：
#
# $$\mathrm{fold}(t) = t - 16\left\lfloor t / 16 \right\rfloor - 8$$
#
# 输入是 −8 到 8 的整数（存成 FP32），权重只有 −1、0、1，折回以后仍在 −8 到 7。中间值都是小整数，浮点数存得下，
# 所以引擎的结果和 NumPy **一位不差**。网络本身很轻，图片却很大：正是拷贝容易占上风的那种服务。
#
# 先写 NumPy 版，它是标准答案。

# %%
PATCH, WIDTH, LAYERS = 192, 32, 16  # numbers per input row, numbers per output row, layers
FRAMES = {"64×64": 64, "112×112": 196, "224×224": 784, "360p": 3600, "720p": 14400, "1080p": 32400}  # rows of a picture


def layer_weights():
    """The weights: a list of LAYERS float32 matrices of -1, 0, 1; the first (PATCH, WIDTH), then (WIDTH, WIDTH)."""
    rng = np.random.default_rng(19)
    return [rng.integers(-1, 2, (PATCH if k == 0 else WIDTH, WIDTH)).astype(np.float32) for k in range(LAYERS)]


def expected(x):
    """What the engine must answer: float32, shape (rows, WIDTH). x: float32 integers in -8 … 8, shape (rows, PATCH)."""
    h = x.astype(np.float64)
    for w in layer_weights():
        h = h @ w
        h = h - 16 * np.floor(h / 16) - 8
    return h.astype(np.float32)


# %% [markdown]
# 再用 TensorRT 写一遍。行数是动态维度（dynamic dimension），优化 Profile（optimization profile）从 1 行到 1080p。
# `require` 把 TensorRT 的拒绝（`False` 或 `None`）变成异常。`lab.build_progress()` 显示构建进度，`lab.timing_cache` 让重复构建更快。
#
# 全章的工作默认都放在 `stream` 上；另外三条流 `copy_in`、`running`、`copy_out` 留给后面的重叠。
# 它们都带 `non_blocking=True`：和默认流互不等待。
#
# `launch_spin` 让一条流停在原地一段给定的时间。本章用它当“塞子”：**把某一步故意拖慢，缺了事件的程序就一定出错**，不靠运气。

# %% tags=["gpu"]
import functools

import cupy as cp
import cupyx
import tensorrt as trt
from cuda.bindings import runtime as cudart

HOST_TO_DEVICE = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
DEVICE_TO_HOST = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
stream, copy_in, running, copy_out = (cp.cuda.Stream(non_blocking=True) for _ in range(4))
loader = trt.Runtime(lab.trt_logger())


def require(result, what):
    """Return result, unless it is False or None, TensorRT's ways of refusing: then RuntimeError with its reasons."""
    if result is False or result is None:
        raise RuntimeError(f"{what}失败。" + " ".join(lab.trt_errors()))
    return result


@functools.cache
def make_plan():
    """Build the engine. Returns its plan (bytes): input "x" (-1, PATCH), output "y" (-1, WIDTH), both FP32."""
    builder = trt.Builder(lab.trt_logger())
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    kept = []  # the builder reads the weights later: they must live until it is done
    none, how = trt.MatrixOperation.NONE, trt.ElementWiseOperation

    def constant(array):
        kept.append(np.ascontiguousarray(array, np.float32))
        return network.add_constant(kept[-1].shape, trt.Weights(kept[-1])).get_output(0)

    def element(a, b, operation):
        return network.add_elementwise(a, b, operation).get_output(0)

    h = network.add_input("x", trt.DataType.FLOAT, (-1, PATCH))
    for w in layer_weights():
        h = network.add_matrix_multiply(h, none, constant(w), none).get_output(0)
        sixteen, eight = constant(np.full((1, 1), 16)), constant(np.full((1, 1), 8))
        whole = element(element(h, sixteen, how.FLOOR_DIV), sixteen, how.PROD)
        h = element(element(h, whole, how.SUB), eight, how.SUB)
    h.name = "y"
    network.mark_output(h)
    config = builder.create_builder_config()
    config.builder_optimization_level = 1  # quick to build; this chapter is not about the best tactic
    config.progress_monitor = lab.build_progress()
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, PATCH), (FRAMES["360p"], PATCH), (FRAMES["1080p"], PATCH))
    config.add_optimization_profile(profile)
    with lab.timing_cache(config):
        return bytes(require(builder.build_serialized_network(network, config), "构建"))


@functools.cache
def load(plan):
    """The trt.ICudaEngine of a plan (bytes), loaded once."""
    return require(loader.deserialize_cuda_engine(plan), "反序列化")


def load_context(plan, rows):
    """A new execution context of a plan (bytes), its input set to (rows, PATCH). No addresses are set yet."""
    context = require(load(plan).create_execution_context(), "创建执行上下文")
    require(context.set_input_shape("x", (rows, PATCH)), "设置输入形状")
    return context


def copy_up(device, host, on):
    """Submit the copy of a host array (numpy) to a device array (cupy) of the same size, on the stream `on`."""
    lab.check_cuda(cudart.cudaMemcpyAsync(device.data.ptr, host.ctypes.data, host.nbytes, HOST_TO_DEVICE, on.ptr))


def copy_down(host, device, on):
    """Submit the copy of a device array (cupy) to a host array (numpy) of the same size, on the stream `on`."""
    lab.check_cuda(cudart.cudaMemcpyAsync(host.ctypes.data, device.data.ptr, host.nbytes, DEVICE_TO_HOST, on.ptr))


spin = cp.RawKernel(
    r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}
""",
    "spin",
)


def launch_spin(us):
    """Keep one GPU thread busy for us microseconds, on the current stream. Returns at once."""
    spin((1,), (1,), (np.uint64(us * 1000),))


def gpu_us(work, repeats=9):
    """Median GPU time of what work() submits to `stream`, in µs: between two events, behind a spin that hides the CPU."""
    first, last, spent = cp.cuda.Event(), cp.cuda.Event(), []
    for _ in range(repeats):
        with stream:
            launch_spin(300)
            first.record()
            work()
            last.record()
        last.synchronize()
        spent.append(cp.cuda.get_elapsed_time(first, last) * 1000)
    return float(np.median(spent))


with stream:
    launch_spin(1)
stream.synchronize()

# %% [markdown]
# `copy_up` 和 `copy_down` 直接调用 `cudaMemcpyAsync`，不做别的：录进图里的就是你给的两个地址。
# 拷贝的方向常简写成 H2D（主机到设备）和 D2H（设备到主机）。
#
# ## 一个请求的账
#
# 请求到达时，图片在一块普通的 NumPy 数组里；结果也要交回一块普通的数组。全程五步：
#
# 1. 把图片写进锁页的**收件箱**（CPU 做）；
# 2. 收件箱 → 显存（H2D）；
# 3. 推理；
# 4. 显存 → 锁页的**发件箱**（D2H）；
# 5. 从发件箱取走结果（CPU 做）。
#
# 先猜：一张 720p 的图，推理占多少？

# %% tags=["demo", "gpu"]
class Desk:
    """All buffers of one request size, and a warm context: pinned and pageable host arrays, device arrays."""

    def __init__(self, rows):
        self.context = load_context(make_plan(), rows)
        self.x, self.y = cp.empty((rows, PATCH), cp.float32), cp.empty((rows, WIDTH), cp.float32)
        self.inbox, self.outbox = cupyx.zeros_pinned(self.x.shape, np.float32), cupyx.zeros_pinned(self.y.shape, np.float32)
        self.picture = np.random.default_rng(rows).integers(-8, 9, self.x.shape).astype(np.float32)  # pageable
        self.answer = np.zeros(self.y.shape, np.float32)  # pageable
        require(self.context.set_tensor_address("x", self.x.data.ptr), "设置 x 的地址")
        require(self.context.set_tensor_address("y", self.y.data.ptr), "设置 y 的地址")
        self.inbox[...] = self.picture
        self.whole()
        stream.synchronize()

    def fill(self):
        self.inbox[...] = self.picture

    def up(self):
        copy_up(self.x, self.inbox, stream)

    def infer(self):
        require(self.context.execute_async_v3(stream.ptr), "入队")

    def down(self):
        copy_down(self.outbox, self.y, stream)

    def take(self):
        self.answer[...] = self.outbox

    def whole(self):
        self.up()
        self.infer()
        self.down()


desks = {name: Desk(rows) for name, rows in FRAMES.items()}
nothing = {"sync": lambda: None, "repeats": 15}
rows = []
for name in ("224×224", "720p", "1080p"):
    desk = desks[name]
    parts = [
        lab.submit_us(desk.fill, **nothing).median,
        gpu_us(desk.up),
        lab.end_to_end_us(desk.infer, repeats=15).median,
        gpu_us(desk.down),
        lab.submit_us(desk.take, **nothing).median,
    ]
    rows.append((name, f"{desk.x.nbytes / 2**20:.1f}", *(f"{us:.0f}" for us in parts), f"{parts[2] / sum(parts):.0%}"))
lab.say(lab.table(("图片", "输入 MiB", "写收件箱 µs", "H2D µs", "推理 µs", "D2H µs", "取结果 µs", "推理占"), rows))
print("引擎的结果与 NumPy 一位不差：", all(np.array_equal(desk.outbox, expected(desk.picture)) for name, desk in desks.items() if name != "1080p"))

# %% [markdown]
# 从上往下看“推理占”那一列，图片越大，推理占得越少。**图能加速的主要是那一格**，而且主要是其中 CPU 提交的那一份。
#
# 讲义把这列为误区：“忽略 CPU 端的数据传输开销”。它的正确理解里有三句话，本章逐句检验：
#
# 1. CUDA 图优化的是内核启动；
# 2. H2D/D2H 数据传输仍由 CPU 控制；
# 3. 如果数据搬运频繁，整体延迟改善有限。

# %% [markdown]
# ## 锁页与可分页
#
# 普通的 `malloc`、`np.empty` 得到的是可分页内存：操作系统随时可以把它的某一页挪走。
# GPU 的拷贝引擎（copy engine，专管搬运的硬件，和计算单元各干各的）按物理地址搬运，不能容忍这种事。
# 所以可分页的数据要先由驱动搬进一块锁页的中转缓冲，再由拷贝引擎搬走。锁页内存钉在原地，省掉中转。
#
# 差别有多大？先比带宽：

# %% tags=["demo", "gpu"]
import matplotlib.pyplot as plt

lab.plot_style()
SIZES = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24)


def host_array(nbytes, pinned):
    """A host array of nbytes bytes, touched once so that its pages exist."""
    array = cupyx.zeros_pinned(nbytes, np.uint8) if pinned else np.empty(nbytes, np.uint8)
    array.fill(1)
    return array


curves = {}
device = cp.empty(SIZES[-1], cp.uint8)
for pinned in (True, False):
    for label, copy in (("H2D", lambda host: copy_up(device, host, stream)), ("D2H", lambda host: copy_down(host, device, stream))):
        hosts = [host_array(nbytes, pinned) for nbytes in SIZES]
        curves["锁页" if pinned else "可分页", label] = [lab.end_to_end_us(partial(copy, host), sync=stream.synchronize, repeats=11, warmup=2).median for host in hosts]

fig, ax = plt.subplots()
for (memory, label), spent in curves.items():
    ax.loglog(np.array(SIZES) / 2**20, np.array(SIZES) / np.array(spent) / 1000, label=f"{memory} {label}", linestyle="-" if memory == "锁页" else "--")
ax.set_xlabel("一次拷贝的大小（MiB）")
ax.set_ylabel("带宽（GB/s，含启动与等待）")
ax.set_title(f"拷贝的带宽（{lab.gpu_name()}）")
ax.legend()
plt.show()
rates = {key: SIZES[-1] / spent[-1] / 1000 for key, spent in curves.items()}
small = curves["锁页", "H2D"][0]
lab.say(
    f"16 MiB：锁页 H2D **{rates['锁页', 'H2D']:.0f}** GB/s，D2H **{rates['锁页', 'D2H']:.0f}** GB/s；"
    f"可分页 H2D **{rates['可分页', 'H2D']:.1f}** GB/s，D2H **{rates['可分页', 'D2H']:.1f}** GB/s。"
    f"4 KiB 的一次锁页 H2D 也要 {small:.0f} µs：几乎全是固定开销，小拷贝的快慢和带宽无关。"
)

# %% [markdown]
# ### 谁在等
#
# 比带宽更要紧的是第二处差别。函数名字里的 Async 说“不等”，它说到做到吗？
#
# 公开的问题报告里有一例：“异步”的 D2H 把主机堵住了；另一例更吓人：“推理 1.2 ms，拷回 163 ms”。第二例就是《CUDA 执行模型》开头的故事：
# 推理是异步的，没有等就停了表，它的时间算到了后面的拷贝头上。第一例呢？
#
# 往流里塞一个 20 ms 的 `spin`，再提交一次拷贝，看调用隔多久返回，返回时流里的工作做完了没有：

# %% tags=["demo", "gpu"]
import time

PLUG_US = 20_000


def returns_after(submit):
    """Submit behind a spin. Returns (ms until the call came back, whether the stream was done by then)."""
    with stream:
        launch_spin(PLUG_US)
    start = time.perf_counter()
    submit()
    spent, done = (time.perf_counter() - start) * 1000, stream.done
    stream.synchronize()
    return spent, done


rows = []
for nbytes, size in ((2**14, "16 KiB"), (2**23, "8 MiB")):
    part = device[:nbytes]
    for pinned in (True, False):
        host = host_array(nbytes, pinned)
        for label, copy in (("H2D", partial(copy_up, part, host, stream)), ("D2H", partial(copy_down, host, part, stream))):
            stream.synchronize()
            spent, done = returns_after(copy)
            rows.append((f"{size}，{'锁页' if pinned else '可分页'}，{label}", f"{spent:.2f}", "做完了" if done else "还没做完"))
lab.say(lab.table((f"前面堵着 {PLUG_US // 1000} ms", "调用返回 ms", "返回时，流里的工作"), rows))

# %% [markdown]
# 锁页的四行，CPU 交完就走，远远没有等到 20 ms。
#
# 可分页的 D2H 要把数据交到你的数组里才返回，前面堵多久就等多久：函数名叫 Async，其实是同步的。
# 可分页的 H2D 则看大小：小的，驱动当场把数据抄进自己的缓冲，可以先走；大的要一块块中转，往往也等。看你自己的表。
#
# 一次这样的等待就足以毁掉流水线：CPU 被扣在那里，别的流也没有人去喂。
#
# ### 锁页也有价钱
#
# 那为什么不把所有内存都锁页？量一量：

# %% tags=["demo", "gpu"]
NBYTES = 2**26


def cost_ms(make):
    start = time.perf_counter()
    kept = make()
    return (time.perf_counter() - start) * 1000, kept


error, pointer = cudart.cudaHostAlloc(2**12, 0)  # the first one sets things up
lab.check_cuda((error,))
lab.check_cuda(cudart.cudaFreeHost(pointer))
pin_ms, pointer = cost_ms(lambda: lab.check_cuda(cudart.cudaHostAlloc(NBYTES, 0)))
lab.check_cuda(cudart.cudaFreeHost(pointer))
touch_ms, plain = cost_ms(lambda: host_array(NBYTES, False))
other = cupyx.zeros_pinned(NBYTES, np.uint8)
copy_ms = lab.submit_us(partial(np.copyto, other, plain), sync=lambda: None, repeats=7).median / 1000
up_ms = NBYTES / rates["锁页", "H2D"] / 1e6
del plain, other
lab.say(
    f"64 MiB：`cudaHostAlloc` **{pin_ms:.1f} ms**，普通分配并摸一遍 {touch_ms:.1f} ms；"
    f"CPU 从普通数组抄进锁页数组 **{copy_ms:.1f} ms**，而锁页 H2D 只要约 {up_ms:.1f} ms。"
)

# %% [markdown]
# 两条规矩：
#
# - **锁页内存一次分配，反复使用**，所以叫静态缓冲。每个请求都分配一次，省下的全赔进去；锁得太多，操作系统能调度的内存就少了。
# - **CPU 抄进收件箱也是一次拷贝**，有时比 H2D 还慢。最好让解码、预处理直接往收件箱里写，第 1 步就消失了。

# %% [markdown]
# ## 拷贝进图
#
# 现在检验讲义的第二句：“数据传输仍由 CPU 控制”。把三步录进一张图：

# %% tags=["demo", "gpu"]
from collections import Counter


def record(work):
    """Capture on `stream` what work() submits. Returns an instantiated cupy Graph."""
    stream.begin_capture()
    try:
        work()
    finally:
        captured = stream.end_capture()
    return captured


def kinds(graph):
    """Count the nodes of a captured graph (its handle, an int) by kind."""
    definition = cudart.cudaGraph_t(int(graph))
    _, count = lab.check_cuda(cudart.cudaGraphGetNodes(definition, 0))
    nodes = lab.check_cuda(cudart.cudaGraphGetNodes(definition, count))[0] if count else []
    return dict(Counter(lab.check_cuda(cudart.cudaGraphNodeGetType(node)).name.removeprefix("cudaGraphNodeType") for node in nodes))


desk = desks["224×224"]
replay = record(desk.whole)
lab.say(f"图里的节点：{kinds(replay.graph)}", measured=False)

right = 0
for seed in range(5):
    stream.synchronize()  # the last replay may still read the inbox
    desk.inbox[...] = np.random.default_rng(seed).integers(-8, 9, desk.inbox.shape)
    replay.launch(stream)
    stream.synchronize()
    right += int(np.array_equal(desk.outbox, expected(desk.inbox)))
submit = lab.compare_us(desk.whole, partial(replay.launch, stream))
lab.say(
    f"换 5 次输入，{right} 次结果正确。CPU 提交整个请求：逐个 **{submit.first.median:.0f} µs**，图 **{submit.second.median:.1f} µs**，"
    "两次拷贝都在图里，CPU 没有再为它们做任何事。"
)

# %% [markdown]
# 所以第二句要改：拷贝**可以**成为图的节点，由 GPU 按依赖自己启动，和内核一样；留在图外，才由 CPU 一次次提交。
# CPU 逃不掉的是另一件事：往收件箱里写，从发件箱里取。
#
# ### 可分页内存录得进去吗
#
# 同样两次拷贝，主机一侧换成普通的 NumPy 数组，在三种捕获模式下各试一次。如果录成了，再问三个问题：
# 换了数据再重放，取到的是新数据吗？前面堵着的时候，图启动多久返回？返回以后才改主机上的数据，图读到的是改前的还是改后的？

# %% tags=["demo", "gpu"]
MODES = {name: getattr(cudart.cudaStreamCaptureMode, f"cudaStreamCaptureMode{name}") for name in ("Global", "ThreadLocal", "Relaxed")}


def try_copies(nbytes, pinned, mode):
    """Capture up and down copies of nbytes bytes. Returns (what happened, replays or None, what keeps the buffers alive)."""
    source, target, between = host_array(nbytes, pinned), host_array(nbytes, pinned), device[:nbytes]
    lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, mode))
    codes = [
        cudart.cudaMemcpyAsync(between.data.ptr, source.ctypes.data, nbytes, HOST_TO_DEVICE, stream.ptr)[0],
        cudart.cudaMemcpyAsync(target.ctypes.data, between.data.ptr, nbytes, DEVICE_TO_HOST, stream.ptr)[0],
    ]
    ended, definition = cudart.cudaStreamEndCapture(stream.ptr)
    cudart.cudaGetLastError()  # a refusal is shown below: do not leave it for a later check to find
    if any(map(int, codes)) or int(ended):
        return "、".join(f"{int(code)}" for code in (*codes, ended)), None, None
    executable = lab.check_cuda(cudart.cudaGraphInstantiate(definition, 0))
    found = str(kinds(definition))
    lab.check_cuda(cudart.cudaGraphDestroy(definition))
    return found, executable, (source, target)


rows = []
for nbytes, size in ((2**12, "4 KiB"), (2**23, "8 MiB")):
    for pinned in (True, False):
        for name, mode in MODES.items():
            found, executable, arrays = try_copies(nbytes, pinned, mode)
            row = [f"{size}，{'锁页' if pinned else '可分页'}，{name}", found]
            if executable is None:
                rows.append((*row, "—", "—", "—"))
                continue
            source, target = arrays
            launch = partial(cudart.cudaGraphLaunch, executable, stream.ptr)
            for value in (2, 3):
                source.fill(value)
                lab.check_cuda(launch())
                stream.synchronize()
            fresh = "是" if (target == 3).all() else "不是"
            with stream:
                launch_spin(PLUG_US)
            start = time.perf_counter()
            (error,) = launch()
            spent = (time.perf_counter() - start) * 1000
            lab.check_cuda((error,))
            source.fill(4)
            stream.synchronize()
            seen = "改后的" if (target == 4).all() else "改前的" if (target == 3).all() else "半新半旧"
            lab.check_cuda(cudart.cudaGraphExecDestroy(executable))
            rows.append((*row, fresh, f"{spent:.2f}", seen))
lab.say(lab.table((f"大小，内存，捕获模式（前面堵着 {PLUG_US // 1000} ms）", "录到的节点，或错误码", "重放取到新数据", "图启动返回 ms", "启动后才改，读到"), rows))

# %% [markdown]
# 三点要带走：
#
# - **节点记住的是主机地址**，重放时才去读。所以收件箱里换数据不必重新捕获；同样，数组被回收、换了地址，图也不会知道。
#   谁拿着图，谁就得拿着两块主机缓冲。
# - 看锁页几行的最后一列：图启动返回**不等于**收件箱读完了。这时改收件箱，改的可能是上一个请求的数据。要等事件。
# - 可分页的几行看“图启动返回”：如果也录成了图，却要等到前面的塞子走完才返回，那么**整张图的启动都变成了同步的**，
#   里面哪怕有几百个内核，CPU 也被一次拷贝扣住。录得进去，结果也对，图该省的却没有省下来。静态缓冲用锁页内存，这些都不会发生。
#
# ### 捕获中的 `.get()`，和启动以后的 `.get()`
#
# 公开的问题报告里还有一例，分两幕。第一幕：捕获里写了一句“取回主机”的方法，报 906；第二幕：把它挪到图启动之后，不报错了，取到的却是垃圾。
# CuPy 里对应的方法是 `.get()` 和 `.set()`。先看第一幕：

# %% tags=["demo", "gpu"]
y, pinned_y, plain_y = desk.y, cupyx.zeros_pinned(desk.y.shape, np.float32), np.zeros(desk.y.shape, np.float32)
attempts = {
    "`y.get()`": lambda: y.get(),
    "`y.get(out=锁页)`": lambda: y.get(out=pinned_y),
    "`y.get(out=锁页, blocking=False)`": lambda: y.get(out=pinned_y, blocking=False),
    "`y.set(普通数组)`": lambda: y.set(plain_y),
    "`float(y[0, 0])`": lambda: float(y[0, 0]),
    "`copy_down(锁页, y, stream)`": lambda: copy_down(pinned_y, y, stream),
}
rows = []
for name, attempt in attempts.items():
    lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, MODES["Relaxed"]))
    try:
        with stream:
            attempt()
        said = "没有报错"
    except Exception as error:  # noqa: BLE001 - whatever it is, the table shows it
        text = str(error)
        said = f"{type(error).__name__}：" + (text if len(text) <= 60 else text[:60].rsplit(" ", 1)[0] + " …")
    ended, definition = cudart.cudaStreamEndCapture(stream.ptr)
    cudart.cudaGetLastError()
    rows.append((name, said, "没有图" if int(ended) else "、".join(f"{kind} {n} 个" for kind, n in kinds(definition).items()) or "一张空图"))
    if not int(ended):
        lab.check_cuda(cudart.cudaGraphDestroy(definition))
lab.say(lab.table(("捕获中（relaxed）", "当场", "得到"), rows))

# %% [markdown]
# 看“当场”那一列：CuPy 的 `.get()`、`.set()` 发现流正在捕获，可能自己就先拒绝了，连 `blocking=False`（不等结果）的也不例外。
# 再看“得到”那一列：写着“一张空图”的，捕获没有坏，收尾也不报错，录到的却什么都没有；程序要是吞掉了那个异常，重放的就是一张空图。
# 能录进去的，是直接提交的 `cudaMemcpyAsync`，这正是本章用 `copy_up`、`copy_down` 的原因。
# 报告里的 906 从哪来，《流捕获：规则与恢复》讲过：读取走了传统默认流，和捕获的流有隐式依赖。
#
# 第二幕用塞子演，一演一个准：

# %% tags=["demo", "gpu"]
stream.synchronize()
desk.outbox.fill(-99)
desk.inbox[...] = desk.picture
with stream:
    launch_spin(PLUG_US)
replay.launch(stream)
finished = cp.cuda.Event(disable_timing=True)
finished.record(stream)
too_early = desk.outbox.copy()
finished.synchronize()
in_time = desk.outbox.copy()
want = expected(desk.picture)
lab.say(
    f"启动后马上读：{'正确' if np.array_equal(too_early, want) else '读到的是' + ('旧内容' if (too_early == -99).all() else '半新半旧的内容')}；"
    f"等事件 `finished` 以后再读：{'正确' if np.array_equal(in_time, want) else '不对'}。",
    measured=False,
)

# %% [markdown]
# 没有塞子的时候，马上读**有时也对**：图片小，或者 CPU 在读之前恰好做了点别的事，GPU 已经做完了。
# 这种错最难找：测试时 CPU 慢半拍，一直没事，换个场合就出错。所以本章的练习都带着塞子考。

# %% [markdown]
# ## 生产者和消费者
#
# 一块静态缓冲总有人写、有人读。把它们放在同一条流里，先后自然成立，可是也就排成了一队。分到两条流里，要自己用事件补上两种先后：
#
# | 少了它 | 会怎样 | 怎么补 |
# |:--|:--|:--|
# | 写完才能读 | 读到旧数据 | 写的人 `event.record(写的流)`，读的流 `wait_event(event)` |
# | **读完才能再写** | 还没读的数据被下一份覆盖 | 读的人 `record`，写的流 `wait_event` |
#
# 第一种谁都想得到，第二种最常被忘记。`wait_event` 让**流**等，CPU 不等；`event.synchronize()` 才让 CPU 等。
#
# 用塞子试：`copy_in` 上传，`stream` 推理，同一块 `x`，先后送两张图 A、B，只看 A 的结果。四种写法，各在该慢的地方塞 20 ms：

# %% tags=["demo", "gpu"]
picture_a, picture_b = (cupyx.zeros_pinned(desk.x.shape, np.float32) for _ in range(2))
picture_a[...], picture_b[...] = (np.random.default_rng(seed).integers(-8, 9, desk.x.shape) for seed in (101, 102))
answers = {"A 的": expected(picture_a), "B 的": expected(picture_b), "上传之前的旧数据": expected(np.zeros_like(picture_a))}


def two_pictures(slow, written, read):
    """Upload A, infer, fetch, upload B into the same x. slow: which step a spin holds up; written, read: use that event."""
    desk.x.fill(0)
    cp.cuda.Device().synchronize()
    uploaded, consumed = (cp.cuda.Event(disable_timing=True) for _ in range(2))
    with copy_in:
        if slow == "upload":
            launch_spin(PLUG_US)
        copy_up(desk.x, picture_a, copy_in)
        uploaded.record()
    with stream:
        if written:
            stream.wait_event(uploaded)
        if slow == "infer":
            launch_spin(PLUG_US)
        desk.infer()
        consumed.record()
        copy_down(desk.outbox, desk.y, stream)
    if read:
        copy_in.wait_event(consumed)
    copy_up(desk.x, picture_b, copy_in)
    cp.cuda.Device().synchronize()
    return next((name for name, answer in answers.items() if np.array_equal(desk.outbox, answer)), "对不上号的")


rows = []
for slow, written, read in (("upload", True, True), ("upload", False, True), ("infer", True, True), ("infer", True, False)):
    got = {two_pictures(slow, written, read) for _ in range(5)}
    rows.append(("上传" if slow == "upload" else "推理", *("有" if flag else "**缺**" for flag in (written, read)), "、".join(sorted(got))))
lab.say(lab.table(("塞住", "写完才能读", "读完才能再写", "A 的结果（5 次）"), rows), measured=False)

# %% [markdown]
# 缺哪个事件，错成什么样，一一对应：缺“写完才能读”，算的是旧数据；缺“读完才能再写”，A 的请求得到了 B 的答案。
# 后一种在线上就是“串了号”，没有任何报错。
#
# ### TensorRT 自己的事件：输入用完了
#
# 上面等到**整个推理**做完，才允许上传 B。可是输入也许只有前几层要读。
# `context.set_input_consumed_event(event.ptr)` 让 TensorRT 在入队时替你记录一个事件：从这个事件起，输入缓冲可以改写了。
# 它比推理做完早多少？猜一猜，再看：

# %% tags=["demo", "gpu"]
rows, gained = [], []
for name in ("224×224", "720p", "1080p"):
    each = Desk(FRAMES[name])  # a context of its own: the event stays set for as long as it lives
    began, consumed, done = (cp.cuda.Event() for _ in range(3))
    require(each.context.set_input_consumed_event(consumed.ptr), "设置输入用完的事件")
    spent = []
    for _ in range(7):
        with stream:
            launch_spin(500)
            began.record()
            each.infer()
            done.record()
        done.synchronize()
        spent.append([cp.cuda.get_elapsed_time(began, event) * 1000 for event in (consumed, done)])
    early, late = np.median(spent, axis=0)
    gained.append(1 - early / late)
    rows.append((name, f"{early:.1f}", f"{late:.1f}", f"{gained[-1]:.0%}"))
    del each
lab.say(
    lab.table(("图片", "输入用完 µs", "推理做完 µs", "可以提前"), rows)
    + "\n\n"
    + ("**几乎没有提前**：这个引擎、这个版本的 TensorRT，到最后才记录它。" if max(gained) < 0.1 else f"最多可以提前 **{max(gained):.0%}**：下一张图的上传能和推理的后一段重叠。")
)

# %% [markdown]
# 两句话要分清：
#
# - 它保证的是**对**：事件之后改写输入，结果不受影响。这正是“读完才能再写”要的那个事件，TensorRT 替你记录，不会忘。
# - 它不保证**早**。什么时候记录由 TensorRT 决定，要在自己的引擎上量。量出来不早，就老老实实用两块输入缓冲，那是下一节的办法。
#
# 它也只管输入：输出什么时候能读，仍要等整个推理做完。
#
# 捕获里还能用吗？捕获中的记录只是一个记号，可以从它分叉，把“下一次上传”录进同一张图；它不是一次真的记录，到图外去等它，会怎样？

# %% tags=["demo", "gpu"]
early = Desk(FRAMES["224×224"])
consumed, refilled = (cp.cuda.Event(disable_timing=True) for _ in range(2))
require(early.context.set_input_consumed_event(consumed.ptr), "设置输入用完的事件")
early.infer()
stream.synchronize()


def prefetching():
    """On `stream`: infer from x, fetch; on copy_in, as soon as the input is consumed: upload the inbox for the next round."""
    early.infer()
    copy_in.wait_event(consumed)  # recorded by TensorRT during the enqueue: the fork
    copy_up(early.x, early.inbox, copy_in)
    refilled.record(copy_in)
    early.down()
    stream.wait_event(refilled)  # the join


prefetch, failure = None, ""
try:
    prefetch = record(prefetching)
except Exception as error:  # noqa: BLE001 - a TensorRT or driver that refuses is a result, too
    failure = str(error)[:120]
    for each in (stream, copy_in):
        if each.is_capturing():
            cudart.cudaStreamEndCapture(each.ptr)
    cudart.cudaGetLastError()
if prefetch is None:
    lab.say(f"这里录不成：{failure}", measured=False)
else:
    early.x.set(picture_a)
    early.inbox[...] = picture_b
    cp.cuda.Device().synchronize()
    right = 0
    for name in ("A 的", "B 的", "B 的"):
        prefetch.launch(stream)
        stream.synchronize()
        right += int(np.array_equal(early.outbox, answers[name]))
    (error,) = cudart.cudaEventSynchronize(consumed.ptr)
    cudart.cudaGetLastError()
    lab.say(
        f"图里的节点：{kinds(prefetch.graph)}。三次重放，{right} 次正确：第一次算的是 A，同时把 B 预取进了 `x`。"
        f"在图外等 `consumed`，"
        + (f"当场就是一个错误码 `{error.name}`：没有一次真的记录可等。" if int(error) else "没有报错，但等的不是图里的那一次。"),
        measured=False,
    )

# %% [markdown]
# ## 重叠：让拷贝引擎和计算单元同时干活
#
# 一个请求内部只能排队：先上传，再算，再取回。但**相邻的请求**可以错开：算第 0 个时上传第 1 个，取回第 0 个时算第 1 个。
# GPU 通常有分管两个方向的拷贝引擎，和计算单元一起正好三个工位。
#
# 三个工位各要 $t$，$n$ 个请求：排队要 $3nt$，错开只要 $(n+2)t$。$n$ 很大时，最慢的工位说了算，另外两个的时间就藏起来了。
#
# 代价是缓冲要成双：上传第 1 个的时候，第 0 个的输入正在被读。两块轮流用，就是双缓冲；更一般地，有 `slots` 块，请求 `i` 用第 `i % slots` 块。
# 于是依赖多了一种：请求 `i` 要用的那块，请求 `i − slots` 用完了没有？画出来（这一格不需要 GPU）：

# %% tags=["demo"]
import matplotlib.pyplot as plt

lab.plot_style()
steps = {f"{what}{i}": kind for i in range(3) for what, kind in (("up", "memcpy"), ("run", "kernel"), ("down", "memcpy"))}
edges = [(f"{a}{i}", f"{b}{i}") for i in range(3) for a, b in (("up", "run"), ("run", "down"))]
edges += [(f"{what}{i}", f"{what}{i + 1}") for i in range(2) for what in ("up", "run", "down")]  # each stream keeps its order
edges += [("run0", "up2"), ("down0", "run2")]  # two slots: request 2 takes over the buffers of request 0
lab.draw_graph((steps, edges), title="三个请求，两块缓冲：run0 → up2 和 down0 → run2 是“读完才能再写”")
plt.show()

# %% [markdown]
# 为了随意调节计算的长短，重叠这一节用一个替身代替引擎：`work` 把一大块输入搅拌 `rounds` 轮得到输出，
# `fold` 再把输出的每一个字折进一行状态 `x[i]`。状态从不停在一个值上，少做一步、做错一步都看得出来。
#
# `Stages` 管着 `n` 个请求：锁页的 `inbox`、`outbox` 各 `n` 行，设备上输入、输出缓冲各 `slots` 块。
# 三个方法各**提交**一个请求的一步，都提交到**当前流**（`with 某条流:` 里的那条），不等待：
#
# | 方法 | 读 | 写 |
# |:--|:--|:--|
# | `upload(i)` | `inbox[i]` | 第 `i % slots` 块输入缓冲 |
# | `compute(i)` | 那块输入缓冲 | 第 `i % slots` 块输出缓冲，和状态 `x[i]` |
# | `download(i)` | 那块输出缓冲 | `outbox[i]` |

# %% tags=["gpu"]
SOURCE = r"""
__device__ unsigned int stir(unsigned int v, unsigned int i) {
    v ^= v >> 15;
    v *= 0x2c1b3c6du;
    v ^= v >> 12;
    return v + i;
}

// A state whose top bit is clear is fresh: its first input does not count, so that a run can start from a known state.
extern "C" __global__ void work(const unsigned int *arrived, const unsigned int *state, unsigned int *leaving,
                                unsigned int rounds, unsigned int size, unsigned int width) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    unsigned int s = state[t % width];
    unsigned int v = (s >> 31) ? arrived[t] ^ s : s + t;
    for (unsigned int r = 0; r < rounds; r++) v = stir(v, r);
    leaving[t] = v;
}

extern "C" __global__ void fold(const unsigned int *leaving, unsigned int *state, unsigned int size, unsigned int width) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= width) return;
    unsigned int v = state[t];
    for (unsigned int k = t; k < size; k += width) v = stir(v ^ leaving[k], k);
    state[t] = v | 0x80000000u;
}
"""
module = cp.RawModule(code=SOURCE)
work, fold = (module.get_function(name) for name in ("work", "fold"))
BLOCK = 256


class Stages:
    """The three steps of n requests, each submitted to the current stream.

    x: cupy uint32, shape (n, width), a row of state for each request. size: uint32 numbers in a request, a multiple of
    width. rounds: how long compute takes. slots: device buffers that the requests take in turn. echo: the results of a
    pass are the inputs of the next (inbox and outbox are the same memory). inbox, outbox: pinned numpy uint32, (n, size).
    """

    def __init__(self, x, size, rounds, slots=2, echo=False):
        self.n, self.x, self.size, self.rounds, self.slots = len(x), x, size, rounds, slots
        self.inbox = cupyx.zeros_pinned((self.n, size), np.uint32)
        self.outbox = self.inbox if echo else cupyx.zeros_pinned((self.n, size), np.uint32)
        self.arrived = [cp.zeros(size, cp.uint32) for _ in range(slots)]
        self.leaving = [cp.zeros(size, cp.uint32) for _ in range(slots)]
        cp.cuda.Device().synchronize()  # the zeros were written on another stream

    def upload(self, i):
        """Submit: inbox[i] to its input buffer."""
        copy_up(self.arrived[i % self.slots], self.inbox[i], cp.cuda.get_current_stream())

    def compute(self, i):
        """Submit: its input buffer and x[i] to its output buffer, and the output into x[i]."""
        state, leaving = self.x[i], self.leaving[i % self.slots]
        sizes = np.uint32(self.size), np.uint32(state.size)
        work((-(-self.size // BLOCK),), (BLOCK,), (self.arrived[i % self.slots], state, leaving, np.uint32(self.rounds), *sizes))
        fold((-(-state.size // BLOCK),), (BLOCK,), (leaving, state, *sizes))

    def download(self, i):
        """Submit: its output buffer to outbox[i]."""
        copy_down(self.outbox[i], self.leaving[i % self.slots], cp.cuda.get_current_stream())


def serve_serial(stages):
    """All requests one after the other on `stream`. Returns when the results are in stages.outbox."""
    with stream:
        for i in range(stages.n):
            stages.upload(i)
            stages.compute(i)
            stages.download(i)
    stream.synchronize()


def balanced_rounds(size):
    """How many rounds let compute take as long as upload on this GPU (int, at least 1), for requests of size numbers."""
    stages = Stages(cp.zeros((1, ROW), cp.uint32), size, 0)
    upload, least = gpu_us(partial(stages.upload, 0)), gpu_us(partial(stages.compute, 0))
    stages.rounds = 512
    each = (gpu_us(partial(stages.compute, 0)) - least) / stages.rounds
    return max(1, round((upload - least) / each))


ROW = 16384  # numbers in a row of state
serve_serial(Stages(cp.zeros((1, 256), cp.uint32), 256, 1))  # the first launch of a kernel loads its code

# %% [markdown]
# `work` 里有一句特例：状态的最高位是 0，表示这一行刚开张，第一份输入不算数。它只是为了让计时能从一个确定的起点开始，不影响你怎么排流水线。
#
# NumPy 版，用来知道正确答案：

# %%
def stirred(v, i):
    """One round of mixing: numpy uint32 array v, number i."""
    v = v ^ (v >> np.uint32(15))
    v = v * np.uint32(0x2C1B3C6D)
    v = v ^ (v >> np.uint32(12))
    return v + np.uint32(i)


def answered(x, inbox, rounds):
    """What one pass over all requests leaves: (outbox, new x), uint32. x: (n, width), inbox: (n, size); both stay."""
    size = inbox.shape[1]
    state = np.tile(x, size // x.shape[1])
    leaving = np.where(state >> np.uint32(31) != 0, inbox ^ state, state + np.arange(size, dtype=np.uint32))
    for r in range(rounds):
        leaving = stirred(leaving, r)
    after = x.copy()
    for k, part in enumerate(np.split(leaving, size // x.shape[1], axis=1)):
        for_each = (k * x.shape[1] + np.arange(x.shape[1])).astype(np.uint32)
        after = stirred(after ^ part, 0) + for_each
    return leaving, after | np.uint32(0x80000000)


# %% [markdown]
# ### 只做前一半：上传与计算重叠
#
# 取回先不管（所以这里不等输出缓冲）。两条流、两块输入缓冲、两种事件。8 个请求，每个 8 MiB，`balanced_rounds` 把计算调到和上传差不多长：

# %% tags=["demo", "gpu"]
BIG, REQUESTS = 2**21, 8


def half_serial(stages):
    with stream:
        for i in range(stages.n):
            stages.upload(i)
            stages.compute(i)


def half_overlapped(stages):
    """Upload on copy_in, compute on running. Submits only."""
    uploaded, computed = ([cp.cuda.Event(disable_timing=True) for _ in range(stages.n)] for _ in range(2))
    for i in range(stages.n):
        with copy_in:
            if i >= stages.slots:
                copy_in.wait_event(computed[i - stages.slots])  # read, before it is written again
            stages.upload(i)
            uploaded[i].record()
        with running:
            running.wait_event(uploaded[i])  # written, before it is read
            stages.compute(i)
            computed[i].record()


rounds = balanced_rounds(BIG)
stages = Stages(cp.zeros((REQUESTS, ROW), cp.uint32), BIG, rounds)
pair = lab.compare_us(partial(half_serial, stages), partial(half_overlapped, stages), clock="end_to_end", pairs=11, warmup=2)
up_us, run_us, down_us = (gpu_us(partial(step, 0)) for step in (stages.upload, stages.compute, stages.download))
lab.say(
    f"单独量：上传 {up_us:.0f} µs，计算 {run_us:.0f} µs，取回 {down_us:.0f} µs。"
    f"8 个请求：排队 **{pair.first.median:.0f} µs**，重叠 **{pair.second.median:.0f} µs**，快 **{pair.ratio:.2f}** 倍。"
    f"两个工位一样快时，$2nt$ 变成 $(n+1)t$，上限是 {2 * REQUESTS / (REQUESTS + 1):.2f} 倍。"
)

# %% [markdown]
# 一个重要的对照：**同样的流、同样的事件，只把主机内存换成可分页的**，还重叠吗？

# %% tags=["demo", "gpu"]
class PageableStages(Stages):
    """The same, with ordinary host memory."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.inbox, self.outbox = np.ones(self.inbox.shape, np.uint32), np.ones(self.outbox.shape, np.uint32)


pageable = PageableStages(stages.x, BIG, rounds)
plain = lab.compare_us(partial(half_serial, pageable), partial(half_overlapped, pageable), clock="end_to_end", pairs=5, warmup=1)
lab.say(
    lab.table(
        ("主机内存", "排队 µs", "两条流 µs", "倍数"),
        [(name, f"{p.first.median:.0f}", f"{p.second.median:.0f}", f"{p.ratio:.2f}") for name, p in (("锁页", pair), ("可分页", plain))],
    )
)
del pageable

# %% [markdown]
# 可分页的一行，上传本身就慢，而且 CPU 被扣在拷贝里。重叠与否要看驱动怎样中转；即使有一点重叠，总时间也远比锁页的长。
# 两条流不是重叠的保证，**锁页内存加事件**才是。
#
# ### 流水线也能录成一张图
#
# 录的时候从 `stream` 分叉到两条流，最后汇合。事件变成了边，CPU 只剩一次启动：

# %% tags=["demo", "gpu"]
forked, *joined = (cp.cuda.Event(disable_timing=True) for _ in range(3))


def forked_pipeline():
    forked.record(stream)
    for side in (copy_in, running):
        side.wait_event(forked)
    half_overlapped(stages)
    for side, event in zip((copy_in, running), joined, strict=True):
        event.record(side)
        stream.wait_event(event)


pipeline = record(forked_pipeline)
submit, total = (lab.compare_us(partial(half_overlapped, stages), partial(pipeline.launch, stream), clock=clock, pairs=9, warmup=2) for clock in ("submit", "end_to_end"))
lab.say(
    f"图里的节点：{kinds(pipeline.graph)}。\n\n"
    + lab.table(
        ("8 个请求的流水线", "CPU 提交 µs", "端到端 µs"),
        [("逐个提交", f"{submit.first.median:.0f}", f"{total.first.median:.0f}"), ("一张图", f"{submit.second.median:.1f}", f"{total.second.median:.0f}")],
    )
)
stages = pipeline = None

# %% [markdown]
# CPU 的提交只剩一次启动；端到端呢？看你的表：只要 CPU 本来就跑在 GPU 前面，图就省不下多少端到端的时间。下面正要讨论这件事。

# %% [markdown]
# ## 误区一：上了图，整个请求就快了
#
# 讲义的第三句话：“如果数据搬运频繁，整体延迟改善有限。”对每种图片，量两样东西：只看推理，图省几成；从拷入到拷出，图又省几成。

# %% tags=["demo", "gpu"]
gains, kept = {"只看推理": [], "拷入 + 推理 + 拷出": []}, []
for each in desks.values():
    for label, part in (("只看推理", each.infer), ("拷入 + 推理 + 拷出", each.whole)):
        kept.append(record(part))
        pair = lab.compare_us(part, partial(kept[-1].launch, stream), clock="end_to_end", pairs=15)
        gains[label].append((pair.first.median, pair.second.median))

fig, ax = plt.subplots()
for label, times in gains.items():
    ax.plot(range(len(desks)), [100 * (1 - graph / eager) for eager, graph in times], label=label)
ax.axhline(0, color="#555555", linewidth=0.8)
ax.set_xticks(range(len(desks)), [f"{name}\n{each.x.nbytes / 2**20:.2g} MiB" for name, each in desks.items()])
ax.set_xlabel("图片（输入的大小）")
ax.set_ylabel("图省下的端到端时间（%）")
ax.set_title(f"图片越大，图越无关紧要（{lab.gpu_name()}）")
ax.legend()
plt.show()
lab.say(
    lab.table(
        ("图片", "推理：逐个 µs", "推理：图 µs", "整个请求：逐个 µs", "整个请求：图 µs"),
        [(name, *(f"{us:.0f}" for us in (*a, *b))) for name, a, b in zip(desks, *gains.values(), strict=True)],
    )
)

# %% [markdown]
# 先看走势，别抠单个的点：逐个提交的快慢全看 CPU，哪一格恰好慢了，那里就鼓起一个包。看右端，“拷入 + 推理 + 拷出”的那条线，图片大了就贴近零。
#
# 为什么会趋近于零？有两个原因，第二个常被忽略：
#
# - **分母变大了**：图最多省下逐个提交的那一份，它不随图片变大，请求却越来越长；
# - **分子也没了**：计算一长，提交就藏在计算背后；再加上锁页的 H2D 是异步的，GPU 在搬图片的时候，CPU 正好把后面的内核一个个提交完。启动开销又藏在了拷贝的背后。
#
# 所以讲义的第三句成立，而且可以说得更狠：拷贝越长，图省下的份额越接近零。剩下的那一点，多半是图把内核之间的空当缩短了，和提交无关。
#
# ## 误区二：拷贝录进图里，拷贝就变快了
#
# 同一次 8 MiB 的 H2D，放在流里和放在图里，GPU 上各要多久？再看小的：

# %% tags=["demo", "gpu"]
rows = []
for nbytes, size in ((2**12, "4 KiB"), (2**23, "8 MiB")):
    host, part = host_array(nbytes, True), device[:nbytes]
    alone = record(partial(copy_up, part, host, stream))
    ways = {"流": partial(copy_up, part, host, stream), "图": partial(alone.launch, stream)}
    rows.append((size, *(f"{gpu_us(way):.1f}" for way in ways.values()), *(f"{lab.submit_us(way).median:.1f}" for way in ways.values())))
lab.say(lab.table(("一次锁页 H2D", "流里，GPU µs", "图里，GPU µs", "流里，CPU 提交 µs", "图里，CPU 提交 µs"), rows))

# %% [markdown]
# 总线还是那条总线：大拷贝不会因为进了图就快出一截。小拷贝单独成图，GPU 上可能多花几微秒，也可能少花几微秒：量到的大半是启动一次的固定开销，和总线无关。
# 图省的仍然只是提交；一次拷贝单独成图，也只省下几微秒。
# 拷贝值得进图，是因为它能和几十个内核**合在一次启动里**，并且把先后钉死在边上，谁也忘不了。
#
# ## 误区三：多放几个同步，总归安全
#
# 给流水线的每一步都加一次同步，结果当然对。代价呢？

# %% tags=["demo", "gpu"]
def half_cautious(stages):
    """The same two streams, but the CPU waits after each step."""
    for i in range(stages.n):
        with copy_in:
            stages.upload(i)
        copy_in.synchronize()
        with running:
            stages.compute(i)
        running.synchronize()


stages = Stages(cp.zeros((REQUESTS, ROW), cp.uint32), BIG, rounds)
three = [lab.end_to_end_us(partial(way, stages), repeats=9, warmup=2).median for way in (half_serial, half_cautious, half_overlapped)]
lab.say(lab.table(("8 个请求", "端到端 µs"), zip(("一条流排队", "两条流，步步同步", "两条流，用事件"), (f"{us:.0f}" for us in three), strict=True)))
stages = None

# %% [markdown]
# 步步同步的两条流，和一条流差不多，甚至更慢：CPU 等的时候，谁也没有活干。
# 事件表达的是“谁等谁”，同步说的是“大家都停下”。**CPU 只在要读结果、要改收件箱的那一刻等**，别的先后都交给事件。
#
# 下面给出一把算账的尺子，练习一要用它。
#
# ## 图什么时候不再重要
#
# 一个请求的几个时间（都是 µs）：
#
# - `host_us`：CPU 自己的活，如写收件箱、取结果；
# - `h2d_us`、`gpu_us`、`d2h_us`：三个工位各忙多久；
# - `submit_us`、`launch_us`：逐个提交、图启动，CPU 各忙多久；
# - `pinned`：主机内存是不是锁页的。
#
# **一次只做一个请求**，看延迟（latency）。图：`host + launch + h2d + gpu + d2h`。逐个提交要看 CPU 的提交能藏到谁背后：
#
# - 锁页：提交和 H2D、计算同时进行，慢的一方说了算：`host + max(submit, h2d + gpu) + d2h`；
# - 可分页：H2D 扣住 CPU，拷完才轮到提交内核：`host + h2d + max(submit, gpu) + d2h`。
#
# **许多请求重叠着做**，看每个请求的间隔（吞吐的倒数）。四个工位，CPU 也是一个，最慢的说了算：
# `max(host + submit, h2d, gpu, d2h)`；用图时把 `submit` 换成 `launch`。可分页的拷贝扣住 CPU，谈不上重叠：间隔就按一次做一个请求的时间算。
#
# 图省下的份额，是两个时间的差除以逐个提交的时间。

# %% [markdown]
# ## 练习
#
# 三道练习，共 12 分。解答里可以用这些给定的名字：
#
# - 模块与工具：`np`、`cp`、`cupyx`、`trt`、`cudart`、`partial`、`lab`、`require`、`gpu_us`；
# - 流与拷贝：`stream`、`copy_in`、`running`、`copy_out`、`copy_up`、`copy_down`、`launch_spin`；
# - 引擎：`PATCH`、`WIDTH`、`make_plan`、`load`、`load_context`、`expected`，以及练习二给出的 `Request`；
# - 流水线：`Stages`、`serve_serial`、`balanced_rounds`、`answered`。
#
# `Desk`、`record`、`half_overlapped` 等名字来自演示单元（只做实验，评分时不运行），解答里不能用。
#
# ### 练习一：图什么时候不再重要（3 分）
#
# 写两个函数。不需要 GPU。
#
# `graph_share(times)`：`times` 是一个字典，键就是上一节的七个名字。返回 `(serial, overlapped)`：
# 一次做一个请求、重叠着做，图各省下的份额（0.1 就是一成；图更慢时是负数）。
#
# `stops_at(shares, at_least)`：`shares` 是一串份额，请求从小到大排列。返回一个下标：**从它起直到最后**，份额都小于 `at_least`。
# 有好几个这样的下标时取最小的；如果最后一个份额还不小于 `at_least`，或者 `shares` 是空的，返回 `len(shares)`。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 先把四个时间写出来：延迟（逐个、图），间隔（逐个、图），再做除法。哪一个算式里 `submit_us` 完全不起作用？
# 第二个函数：中途偶尔低于门槛，后面又回来了，算不算“不再重要”？从哪一头开始找更方便？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `max(a, b, c)` 可以放任意多个数。`times["pinned"]` 是 `bool`，只影响逐个提交的延迟和“能不能重叠”。
# 从后往前找可以用 `range(len(shares) - 1, -1, -1)`，或者 `reversed`。
#
# </details>

# %% solution="graph_share"
def graph_share(times):
    """Share of a request's time that the graph saves: (serial, overlapped), floats; negative where the graph is slower.

    times: dict with host_us, h2d_us, gpu_us, d2h_us, submit_us, launch_us (µs, not negative) and pinned (bool).
    """
    ### BEGIN SOLUTION: 先写出逐个提交与图各自的延迟，再写出各自的间隔，份额 = （逐个 − 图）/ 逐个；可分页时两个份额有什么关系
    host, h2d, gpu, d2h, submit, launch = (times[f"{name}_us"] for name in ("host", "h2d", "gpu", "d2h", "submit", "launch"))
    graph = host + launch + h2d + gpu + d2h
    eager = host + max(submit, h2d + gpu) + d2h if times["pinned"] else host + h2d + max(submit, gpu) + d2h
    serial = (eager - graph) / eager
    if not times["pinned"]:
        return serial, serial
    eager, graph = (max(host + cpu, h2d, gpu, d2h) for cpu in (submit, launch))
    return serial, (eager - graph) / eager
    ### END SOLUTION


def stops_at(shares, at_least):
    """Smallest index from which on all shares are below at_least; len(shares) if the last one is not.

    shares: list of floats, requests in order of size. at_least: float.
    """
    ### BEGIN SOLUTION: 从最后一个往前走，走到第一个不小于门槛的为止；答案是它后面那个下标
    index = len(shares)
    while index and shares[index - 1] < at_least:
        index -= 1
    return index
    ### END SOLUTION


# %% test="graph_share" kind="answer" points=3
base = {"host_us": 10.0, "h2d_us": 20.0, "gpu_us": 60.0, "d2h_us": 5.0, "submit_us": 180.0, "launch_us": 5.0, "pinned": True}
check.equal(student.graph_share(base), (95 / 195, 130 / 190), rel=1e-9, why="启动受限：延迟从 195 降到 100 µs；重叠时间隔从 190 降到 60 µs（计算的工位最慢）。")
check.equal(student.graph_share(base | {"h2d_us": 500.0}), (-5 / 575, 0.0), abs=1e-9, why="锁页的 H2D 长达 500 µs：180 µs 的提交全藏在它背后，图反而多花一次启动；重叠时 H2D 的工位最慢，图没有用。")
check.equal(student.graph_share(base | {"h2d_us": 500.0, "pinned": False}), (115 / 695, 115 / 695), abs=1e-9, why="可分页的 H2D 扣住 CPU，提交藏不到它背后：延迟从 695 到 580 µs；不能重叠，第二个数和第一个相等。")
check.equal(student.stops_at([0.5, 0.3, 0.08, 0.02], 0.1), 2, why="从下标 2 起都小于 0.1。")
check.equal(student.stops_at([0.5, 0.05, 0.3, 0.02], 0.1), 3, why="下标 1 虽然低于门槛，但下标 2 又回来了，所以要到下标 3。")
check.equal(student.stops_at([0.5, 0.3], 0.1), 2, why="最后一个仍不小于门槛，应当返回 len(shares)。")
### BEGIN HIDDEN TESTS
check.equal(student.stops_at([0.05, -0.2, 0.0], 0.1), 0, why="全都小于门槛时，从第一个起就不再重要。")
check.equal(student.stops_at([0.1, 0.1], 0.1), 2, why="正好等于门槛不算小于。")
check.equal(student.stops_at([], 0.1), 0, why="空的一串：答案是 len(shares)，也就是 0。")


def rule(t):
    graph = t["host_us"] + t["launch_us"] + t["h2d_us"] + t["gpu_us"] + t["d2h_us"]
    if t["pinned"]:
        eager = t["host_us"] + max(t["submit_us"], t["h2d_us"] + t["gpu_us"]) + t["d2h_us"]
        slowest = max(t["h2d_us"], t["gpu_us"], t["d2h_us"])
        before, after = max(t["host_us"] + t["submit_us"], slowest), max(t["host_us"] + t["launch_us"], slowest)
        return (eager - graph) / eager, (before - after) / before
    eager = t["host_us"] + t["h2d_us"] + max(t["submit_us"], t["gpu_us"]) + t["d2h_us"]
    return (eager - graph) / eager, (eager - graph) / eager


def drawn(longest):
    """Random times; `longest` names the one that is made the longest by far."""
    times = {key: float(secret.uniform(5, 100)) for key in base if key.endswith("_us")} | {"launch_us": float(secret.uniform(2, 9)), "pinned": True}
    return times | {longest: float(secret.uniform(300, 900))}


for longest, why in (
    ("submit_us", "提交最慢的几组里有算错的。锁页时提交要和 h2d + gpu 比；重叠时 CPU 的工位是 host + submit。"),
    ("h2d_us", "H2D 最慢的几组里有算错的。重叠时它就是间隔，图省不了；一次做一个时，提交藏在它背后。"),
    ("d2h_us", "D2H 最慢的几组里有算错的。提交藏不到 D2H 背后：要等最后一个内核提交了，结果才有得拷。重叠时它也是一个工位。"),
    ("gpu_us", "计算最慢的几组里有算错的。"),
    ("host_us", "CPU 自己的活最慢的几组里有算错的。重叠时，host 和提交在同一个工位上，要相加。"),
):
    cases = [drawn(longest) for _ in range(8)]
    check.equal([student.graph_share(t) for t in cases], [rule(t) for t in cases], abs=1e-9, why=why)
cases = [drawn(str(secret.choice(["submit_us", "h2d_us", "gpu_us"]))) | {"pinned": False} for _ in range(8)]
check.equal([student.graph_share(t) for t in cases], [rule(t) for t in cases], abs=1e-9, why="可分页的几组里有算错的。H2D 拷完才轮到提交；不能重叠时，两个份额相等。")
series = [([float(v) for v in secret.choice([0.02, 0.05, 0.15, 0.3], 6)], float(secret.choice([0.03, 0.05, 0.1, 0.15, 0.2, 0.4]))) for _ in range(30)]
want = [max((i + 1 for i, v in enumerate(s) if v >= bar), default=0) for s, bar in series]
check.equal([student.stops_at(s, bar) for s, bar in series], want, why="随机的几串里有找错的。要的是“从它起直到最后都小于门槛”的最小下标；门槛是参数 at_least，不总是 0.1。")
### END HIDDEN TESTS

# %% [markdown]
# 用你的函数看一份真实的记录。`requests.json` 是在一块 GPU 上量好的：本章的引擎，六种图片，锁页内存，
# `host_us` 取“写收件箱 + 取结果”。三条线是尺子算的；黑点是整个请求（不含 `host_us`）的实测，可以和第一条线比：走势一样，黑点偏高。
# 尺子里的 `gpu_us` 是用图重放量的，逐个提交时内核之间的空当更长，尺子没有算进去；它判断的是趋势，不是零点几。线略低于零的地方，提交整个藏在拷贝和计算背后，多出来的是图启动的那几微秒。不需要 GPU。

# %% tags=["demo"]
import json
from pathlib import Path

recorded = json.loads(Path("requests.json").read_text(encoding="utf-8"))
requests = recorded["requests"]
names = [each["name"] for each in requests]
no_host = [each | {"host_us": 0.0} for each in requests]
lines = {
    "一次一个，CPU 直接写收件箱": [graph_share(each)[0] for each in no_host],
    "一次一个，另有写入和取走": [graph_share(each)[0] for each in requests],
    "重叠，CPU 直接写收件箱": [graph_share(each)[1] for each in no_host],
}
measured = {i: 100 * (1 - each["whole_graph_us"] / each["whole_eager_us"]) for i, each in enumerate(requests) if "whole_graph_us" in each}

fig, ax = plt.subplots()
for label, shares in lines.items():
    ax.plot(range(len(names)), 100 * np.array(shares), label=label)
ax.plot(measured.keys(), measured.values(), "o", color="black", label="实测：一次一个，CPU 直接写收件箱")
ax.axhline(10, color="#D55E00", linewidth=1, linestyle="--", label="门槛 10%")
ax.set_xticks(range(len(names)), names)
ax.set_xlabel("图片")
ax.set_ylabel("图省下的份额（%）")
ax.set_title(f"图什么时候不再重要（记录自 {recorded['gpu']}）")
fig.legend(*ax.get_legend_handles_labels(), loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=2)
plt.show()
where = {label: stops_at(shares, 0.1) for label, shares in lines.items()}
lab.say("以 10% 为门槛：" + "；".join(f"{label}，{'从 ' + names[i] + ' 起图不再重要' if i < len(names) else '图一直重要'}" for label, i in where.items()) + "。", measured=False)

# %% [markdown]
# 注意第三条线：重叠以后，只要 CPU 的提交比最慢的工位短，图就对吞吐没有帮助，一点也没有；而在那之前，它反而比第一条线高，
# 因为别的工位都重叠掉了，CPU 的提交成了唯一的瓶颈。两种情形里 CPU 都轻松了：它可以去解码、去喂别的流。
#
# ### 练习二：从主机到主机，一张图（4 分）
#
# 写三个函数，围绕给定的 `Request`（只是把东西保管在一起）：
#
# `make_request(context)`：`context` 的输入形状已经设好，地址还没有设。
#
# 1. 备好锁页的 `inbox`、`outbox` 和设备上的输入、输出；形状用 `context.get_tensor_shape("x")`、`("y")` 去问，类型都是 FP32；
# 2. 设地址，在 `stream` 上预热一次；
# 3. 在 `stream` 上捕获：收件箱 → 设备，推理，设备 → 发件箱；
# 4. 返回 `Request`，图要用到的都交给它保管：两箱、设备上的输入和输出，还有执行上下文。
#
# `execute_async_v3` 返回 `False` 时，不管是预热还是捕获，都要抛出 `RuntimeError`，而且 `stream` 不能停在捕获状态。
#
# `submit(request, batch)`：把 `batch` 写进收件箱，启动 `request.captured` 这张图（拷贝和推理都在图里，不再逐个提交），记录 `request.done`，**不等这一次做完就返回**。
# 它只等一件事：**这个 `request` 自己的**上一次重放（它可能还要读收件箱）。流里别人的工作再长，也不等。
#
# `collect(request)`：等最近一次 `submit` 做完，返回结果。以后再 `submit`，已经交出去的结果不能跟着变。

# %% tags=["gpu"]
class Request:
    """A host-to-host request, captured. It keeps alive whatever the graph points at.

    captured: cupy.cuda.Graph. inbox, outbox: pinned numpy float32 arrays that the graph reads and writes.
    kept: anything else that must live as long. done: an event for submit to record and collect to wait for; waiting for
    an event that was never recorded returns at once.
    """

    def __init__(self, captured, inbox, outbox, *kept):
        self.captured, self.inbox, self.outbox, self.kept = captured, inbox, outbox, kept
        self.done = cp.cuda.Event(disable_timing=True)


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 哪些东西要在捕获之前就备好？捕获失败时，谁来结束捕获？
# `submit` 要改收件箱：什么时候改才不会害到上一次？`collect` 要读发件箱：什么时候读才读得到？
# 如果返回的就是发件箱本身，下一次重放以后，调用者手里的“旧结果”会变成什么？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# - 缓冲：`cupyx.zeros_pinned(形状, np.float32)`；设备上用 `cp.empty(形状, cp.float32)`（`cp.zeros` 会往默认流里放一次清零）。
# - 上下文：`context.set_tensor_address(名字, 数组.data.ptr)`，`context.execute_async_v3(stream.ptr)`，都返回 `bool`，用 `require(结果, "哪一步")` 检查。
# - 捕获：`stream.begin_capture()`，`finally` 里 `stream.end_capture()`；拷贝用 `copy_up(设备, 主机, stream)`、`copy_down(主机, 设备, stream)`。
# - 事件：`request.done.record(stream)` 记录，`request.done.synchronize()` 让 CPU 等它。图：`request.captured.launch(stream)`。
#
# </details>

# %% solution="make_request" tags=["gpu"]
def make_request(context: "trt.IExecutionContext"):
    """Capture, on `stream`, one host-to-host request of a context whose input shape is set: copy in, infer, copy out.

    Sets the addresses of "x" and "y", enqueues once to warm up. Returns a Request. RuntimeError if TensorRT refuses an
    enqueue, outside the capture or inside; `stream` is not left capturing.
    """
    ### BEGIN SOLUTION: 先备好锁页的两箱和设备缓冲，设地址、预热，再捕获“拷入、推理、拷出”；每个返回的 bool 都要看，结束捕获放进 finally
    shapes = [tuple(context.get_tensor_shape(name)) for name in ("x", "y")]
    inbox, outbox = (cupyx.zeros_pinned(shape, np.float32) for shape in shapes)
    x, y = (cp.empty(shape, cp.float32) for shape in shapes)
    require(context.set_tensor_address("x", x.data.ptr), "设置 x 的地址")
    require(context.set_tensor_address("y", y.data.ptr), "设置 y 的地址")
    require(context.execute_async_v3(stream.ptr), "预热")
    stream.synchronize()
    stream.begin_capture()
    try:
        copy_up(x, inbox, stream)
        require(context.execute_async_v3(stream.ptr), "捕获时入队")
        copy_down(outbox, y, stream)
    finally:
        captured = stream.end_capture()
    return Request(captured, inbox, outbox, x, y, context)
    ### END SOLUTION


def submit(request, batch):
    """Start a request: batch (numpy float32, shape of the inbox) into the inbox, one graph launch on `stream`, request.done recorded.

    Waits for this request's previous replay only, and for nothing else.
    """
    ### BEGIN SOLUTION: 改收件箱之前，先等这个 request 上一次的事件；然后写入、启动、记录事件
    request.done.synchronize()
    request.inbox[...] = batch
    request.captured.launch(stream)
    request.done.record(stream)
    ### END SOLUTION


def collect(request):
    """Wait for the last submit; returns its result: numpy float32, an array of its own that later replays leave alone."""
    ### BEGIN SOLUTION: 先等 request.done，再读发件箱；交出去的要是一份自己的拷贝
    request.done.synchronize()
    return request.outbox.copy()
    ### END SOLUTION


# %% test="make_request" kind="structure" points=4 tags=["gpu"]
PLANTED = """
import gc, weakref
import cupy, numpy
from cuda.bindings import runtime
spin = cupy.RawKernel(r'''
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}''', "spin")
PLUG_NS = 60_000_000

def plugged(stream):
    "Hold the stream up; returns an event that is done when it goes on."
    event = cupy.cuda.Event(disable_timing=True)
    with stream:
        spin((1,), (1,), (numpy.uint64(PLUG_NS),))
    event.record(stream)
    return event

def pinned(request):
    found = []
    for array in (request.inbox, request.outbox):
        error, attributes = runtime.cudaPointerGetAttributes(array.ctypes.data)
        found.append(int(error) == 0 and attributes.type == runtime.cudaMemoryType.cudaMemoryTypeHost)
    return found

def late(stream, submit, collect, request, batch):
    "Submit to a stream that is held up: did it come back before the stream went on, and what was collected?"
    request.outbox.fill(77)
    plug = plugged(stream)
    submit(request, batch)
    early = not plug.done
    return early, collect(request)

def twice(stream, submit, collect, request, first, second):
    "Submit twice to a stream that is held up: had the first replay passed when the second submit returned? Results of both."
    plug = plugged(stream)
    submit(request, first)
    submit(request, second)
    passed = plug.done
    results = [collect(request)]
    for _ in range(3):
        submit(request, first)
        collect(request)
    return passed, results[0]

def beside(stream, submit, collect, request, other, batch, others_batch):
    "Submit to a stream that is held up, where another request waits too: did both come back before the stream went on? Results."
    plug = plugged(stream)
    submit(other, others_batch)
    submit(request, batch)
    early = not plug.done
    return early, collect(request), collect(other)

class Lent:
    "A context, every call passed on to the real one."
    def __init__(self, context):
        self._context = context
    def __getattr__(self, name):
        return getattr(self._context, name)

def keeps_context(make_request, context):
    "Whether a request keeps the context that it was made of. The real one outlives it: a graph without its context is fatal."
    lent = Lent(context)
    request, seen = make_request(lent), weakref.ref(lent)
    del lent
    gc.collect()
    return seen() is not None

class Refusing:
    "A context that says False to an enqueue: inside of a capture of the stream, or else outside of it."
    def __init__(self, context, stream, inside):
        self._context, self._stream, self._inside = context, stream, inside
    def __getattr__(self, name):
        return getattr(self._context, name)
    def execute_async_v3(self, stream_handle):
        capturing = self._stream.is_capturing()
        if capturing and self._inside:
            return False
        return self._context.execute_async_v3(stream_handle) and (capturing or self._inside)

def tenants(stream, shapes):
    "Arrays that take whatever memory of these shapes the pool has to give."
    gc.collect()
    arrays = []
    for shape in shapes:
        arrays += [cupy.full(shape, 7, cupy.float32) for _ in range(3)]
        with stream:
            arrays += [cupy.full(shape, 7, cupy.float32) for _ in range(3)]
    cupy.cuda.runtime.deviceSynchronize()
    return arrays

def spoilt(arrays):
    cupy.cuda.runtime.deviceSynchronize()
    return int(sum(not bool((array == 7).all()) for array in arrays))

def capturing(stream):
    return bool(stream.is_capturing())
"""
planted = {name: student.define(PLANTED, name) for name in ("pinned", "late", "twice", "beside", "plugged", "keeps_context", "Refusing", "tenants", "spoilt", "capturing")}
ours = [student.value(name) for name in ("stream", "submit", "collect")]
plan = reference.make_plan()
context = student.load_context(plan, 64)
request = student.make_request(context)
check.equal(planted["pinned"](request), [True, True], why="收件箱、发件箱都要是锁页内存：否则拷贝会扣住 CPU。它们是用 cupyx.zeros_pinned 分配的吗？")
check.nodes(request.get("captured"), kernels=(1, None), memcpys=2, why="图里应当有推理的内核，和拷入、拷出两个拷贝节点。拷贝是不是留在了图外？推理真的录进去了吗？")
picture = (np.arange(64 * 192) % 17 - 8).reshape(64, 192).astype(np.float32)
for each in (picture, -picture, picture):
    student.submit(request, each)
    check.equal(student.collect(request), reference.expected(each), why="结果和 NumPy 不同。换了输入，图读的是收件箱当时的内容吗？地址设的是图里用的那两块缓冲吗？")
early, got = planted["late"](*ours, request, -picture)
check.that(early, why="流里别人的工作还没做完，submit 就一直没有返回。它只应当等 request.done（自己的上一次），不要同步整条流，也不要等这一次的结果。")
check.equal(got, reference.expected(-picture), why="流被堵住的时候，collect 交出的不是这一次的结果：它没有等 request.done 就读了发件箱，或者 submit 忘了在启动之后记录它。")
### BEGIN HIDDEN TESTS
sizes = [int(n) for n in secret.integers(3, 900, 2)]
held = [student.make_request(student.load_context(plan, n)) for n in sizes]
others = planted["tenants"](ours[0], [[n, width] for n in sizes for width in (192, 32)])
for _ in range(5):
    batches = [secret.integers(-8, 9, (n, 192)).astype(np.float32) for n in sizes]
    for each, batch in zip(held, batches, strict=True):
        student.submit(each, batch)
    for each, batch in zip(held, batches, strict=True):
        check.equal(student.collect(each), reference.expected(batch), why="两个大小不同的请求交替着做，结果不对。每个 request 要有自己的缓冲、图和事件；形状是不是写死了？")
check.equal(planted["spoilt"](others), 0, why="重放写坏了别人的数组：图里用的设备缓冲没有人保管，被回收以后给了别人，图还在往老地址写。把它们交给 Request。")
first, second = (secret.integers(-8, 9, (sizes[0], 192)).astype(np.float32) for _ in range(2))
passed, kept = planted["twice"](*ours, held[0], first, second)
check.that(passed, why="连着 submit 两次：上一次重放还堵在流里，没有读收件箱，第二次就把收件箱改写了。改收件箱之前要等 request.done。")
check.equal(kept, reference.expected(second), why="collect 交出的结果，在下一次 submit 之后变了（或者一开始就不是最近一次的）：它要是一份自己的拷贝，不能就是发件箱。")
first, second = (secret.integers(-8, 9, (n, 192)).astype(np.float32) for n in sizes)
early, *both = planted["beside"](*ours, held[0], held[1], first, second)
check.that(early, why="流里堵着别的 request，submit 就一直没有返回。它只等这个 request 自己的上一次：事件是每个 request 各有一个吗？")
for got, batch in zip(both, (first, second), strict=True):
    check.equal(got, reference.expected(batch), why="两个 request 一起堵在流里，结果不对。每个 request 要有自己的缓冲、图和事件。")
large = student.make_request(student.load_context(plan, reference.value("FRAMES")["720p"]))
batch = secret.integers(-8, 9, large.get("inbox").shape).astype(np.float32)
early, got = planted["late"](*ours, large, batch)
check.that(early, why="流被堵住时 submit 没有立即返回。是不是在等整条流？")
check.equal(got, reference.expected(batch), why="流被堵住的时候，collect 交出的不是这一次的结果。request.done 是在图启动之后记录的吗？")
for _ in range(3):
    batch = secret.integers(-8, 9, batch.shape).astype(np.float32)
    student.submit(large, batch)
    check.equal(student.collect(large), reference.expected(batch), why="流空着的时候，一个大的请求结果不对。收件箱要在启动图之前写好：启动以后，图随时会来读。")
check.that(planted["keeps_context"](student.value("make_request"), student.load_context(plan, 16)), why="图还在，它的执行上下文却没有人引用、被回收了：图里的内核还要用上下文的显存。请把上下文也交给 Request 保管。")
for inside, why in (
    (False, "预热时 execute_async_v3 返回了 False，make_request 却没有抛出 RuntimeError：拒绝被忽略了。"),
    (True, "预热成功，捕获中 execute_async_v3 返回了 False，make_request 却没有抛出 RuntimeError：得到的是一张没有推理的空图，重放时只会拷来拷去。"),
):
    refusing = planted["Refusing"](student.load_context(plan, 16), ours[0], inside)
    check.raises("RuntimeError", student.make_request, refusing, why=why)
    check.equal(planted["capturing"](ours[0]), False, why="抛出异常以后，stream 还停在捕获状态，后面的请求全都做不了。把 end_capture 放进 finally。")
again = student.make_request(student.load_context(plan, 16))
batch = secret.integers(-8, 9, (16, 192)).astype(np.float32)
student.submit(again, batch)
check.equal(student.collect(again), reference.expected(batch), why="被拒绝过一次以后，再做一个新的请求，结果不对。")
# Whose work is it? With a copy of the graph switched off, the right answer must not arrive: nobody else may do the copy.
SWITCHED = """
import time
from cuda.bindings import runtime

def checked(result):
    if int(result[0]):
        raise RuntimeError(result[0].name)
    return result[1:]

def without(submit, collect, request, number, batch):
    "What is collected of a submit during which a memcpy node of request.captured, one of two, is switched off."
    graph = runtime.cudaGraph_t(int(request.captured.graph))
    executable = runtime.cudaGraphExec_t(int(request.captured.graphExec))
    count = checked(runtime.cudaGraphGetNodes(graph, 0))[-1]
    nodes = list(checked(runtime.cudaGraphGetNodes(graph, count))[0])[:count]
    copies = [node for node in nodes if checked(runtime.cudaGraphNodeGetType(node))[0] == runtime.cudaGraphNodeType.cudaGraphNodeTypeMemcpy]
    request.outbox.fill(77)
    checked(runtime.cudaGraphNodeSetEnabled(executable, copies[number], 0))
    try:
        submit(request, batch)
        return collect(request)
    finally:
        checked(runtime.cudaGraphNodeSetEnabled(executable, copies[number], 1))

def ahead(plugged, stream, submit, collect, request, batch):
    "The outbox some time after a submit to a stream that is held up; was it still held up then?"
    plug = plugged(stream)
    submit(request, batch)
    time.sleep(0.01)
    outbox = request.outbox.copy()
    held = not plug.done
    collect(request)
    return outbox, held
"""
without, ahead = (student.define(SWITCHED, name) for name in ("without", "ahead"))
check.nodes(again.get("captured"), kernels=(1, None), memcpys=2, why="换了大小，图里应当仍有推理的内核，和拷入、拷出两个拷贝节点。")
for number in range(2):
    batch = secret.integers(-8, 9, (16, 192)).astype(np.float32)
    got = without(*ours[1:], again, number, batch)
    check.that(not np.array_equal(got, reference.expected(batch)), why="把 request.captured 里的一个拷贝节点关掉，这一次的结果照样到了：做事的不是这张图。submit 是不是又逐个拷贝、入队了，或者启动的是另一张图？它应当只启动 request.captured 一次。")
batch = secret.integers(-8, 9, (16, 192)).astype(np.float32)
outbox, held = ahead(planted["plugged"], *ours, again, batch)
check.that(not held or not np.array_equal(outbox, reference.expected(batch)), why="stream 还堵着，这一次的结果却已经到了：图没有放在 stream 上启动。")
student.submit(again, batch := secret.integers(-8, 9, (16, 192)).astype(np.float32))
check.equal(student.collect(again), reference.expected(batch), why="连着做了几个请求以后，结果不对。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：三个工位的流水线（5 分）
#
# 写 `serve_overlapped(stages)`：把请求 0 … `stages.n − 1` 各做一遍，上传在 `copy_in`、计算在 `running`、取回在 `copy_out`。
# **返回的时候，全部结果已经在 `stages.outbox` 里。**
#
# - 缓冲有 `stages.slots` 块（不一定是两块），请求 `i` 用第 `i % stages.slots` 块，由 `Stages` 自己挑好；
# - 三条流之间的先后全用事件；CPU 只在最后等一次；
# - 只用 `stages` 的 `n`、`slots` 和三个方法：评分时传进来的对象，会把其中某一步**故意拖慢几十毫秒**，缺哪个事件，就在哪里出错；
# - 比 `serve_serial` 快。计时用 8 个请求，每个 8 MiB，计算用 `balanced_rounds` 调到和上传差不多长，端到端，每一遍都等到结果回到主机。
#   门槛是参考实现在同一次考试里所得倍数的一半，最高 1.6，最低 1.2；三个工位一样长时，8 个请求最多快 24 ÷ 10 = 2.4 倍，所以通常就是 1.2 倍。
#   参考实现自己不到 1.5 倍（例如 GPU 只有一个拷贝引擎）时，考官会说无法评分，不算你错。
#
# 数一数，一共要几种事件？“只做前一半”那一节已经有两种了。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 对照那张依赖图，逐条问：这条箭头的两头在不在同一条流里？不在，就要一个事件。
# 哪些箭头是“写完才能读”，哪些是“读完才能再写”？后一种从请求 `i − slots` 指过来，前 `slots` 个请求没有。
# 输入缓冲和输出缓冲，各是谁读完的？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# - 事件：`cp.cuda.Event(disable_timing=True)`，每个请求、每种先后一个最简单；先 `record` 再 `wait_event`，等一个还没记录过的事件等于没等。
# - `某流.wait_event(事件)` 让流等；`事件.record(某流)` 记录；`with 某流:` 里调用 `stages.upload(i)` 等三个方法。
# - 最后 `某流.synchronize()` 让 CPU 等：等哪一条，才等得到全部结果？
#
# </details>

# %% solution="serve_overlapped" tags=["gpu"]
def serve_overlapped(stages):
    """Serve all requests of stages, overlapped: upload on copy_in, compute on running, download on copy_out.

    Returns None when all results are in stages.outbox. Correct however long any single step takes.
    """
    ### BEGIN SOLUTION: 三条流各做一步，用事件补上“写完才能读”和“读完才能再写”（从 i - slots 指来），最后等取回的流
    uploaded, computed, downloaded = ([cp.cuda.Event(disable_timing=True) for _ in range(stages.n)] for _ in range(3))
    for i in range(stages.n):
        before = i - stages.slots
        with copy_in:
            if before >= 0:
                copy_in.wait_event(computed[before])
            stages.upload(i)
            uploaded[i].record(copy_in)
        with running:
            running.wait_event(uploaded[i])
            if before >= 0:
                running.wait_event(downloaded[before])
            stages.compute(i)
            computed[i].record(running)
        with copy_out:
            copy_out.wait_event(computed[i])
            stages.download(i)
            downloaded[i].record(copy_out)
    copy_out.synchronize()
    ### END SOLUTION


# %% test="serve_overlapped" kind="structure" points=3 tags=["gpu"]
DELAYED = """
import cupy, numpy
spin = cupy.RawKernel(r'''
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}''', "spin")

class Delayed:
    "Stages, some steps of which a spin holds up on the stream that they are submitted to. Notes steps on a wrong stream, and whether all came before the first spin was over."
    def __init__(self, stages, plugs, streams):
        self._stages, self._plugs, self.n, self.slots, self.log = stages, plugs, stages.n, stages.slots, []
        self._streams, self._plug, self.astray, self.early = streams, None, False, True
    def _step(self, name, i):
        self.log.append([name, int(i)])
        here = cupy.cuda.get_current_stream()
        self.astray = self.astray or here.ptr != self._streams[name]
        capturing = here.is_capturing()
        if self._plug is not None and not capturing:
            self.early = not self._plug.done
        if [name, i] in self._plugs:
            spin((1,), (1,), (numpy.uint64(40_000_000),))
            if self._plug is None and not capturing:
                self._plug = cupy.cuda.Event(disable_timing=True)
                self._plug.record(here)
        getattr(self._stages, name)(i)
    def upload(self, i):
        self._step("upload", i)
    def compute(self, i):
        self._step("compute", i)
    def download(self, i):
        self._step("download", i)

def deliver(serve, stages, inbox, plugs, copy_in, running, copy_out):
    "The outbox in the moment when serve returned, the steps that it submitted, and how: see Delayed."
    stages.inbox[...] = inbox
    stages.outbox.fill(0xA5A5A5A5)
    cupy.cuda.runtime.deviceSynchronize()
    delayed = Delayed(stages, [list(plug) for plug in plugs], {"upload": copy_in.ptr, "compute": running.ptr, "download": copy_out.ptr})
    try:
        serve(delayed)
        return stages.outbox.copy(), sorted(delayed.log), delayed.astray, delayed.early
    finally:
        cupy.cuda.runtime.deviceSynchronize()
"""
deliver = student.define(DELAYED, "deliver")
serve, lanes = student.value("serve_overlapped"), [student.value(name) for name in ("copy_in", "running", "copy_out")]
prompt = []  # of each delivery: were all steps submitted before the first one that was held up went on?


def delivered(n, plugs, slots=2, width=256, blocks=8, rounds=3):
    """Serve n small requests with some steps held up. Returns (outbox, right outbox, state, right state)."""
    x0 = secret.integers(2**31, 2**32, (n, width), dtype=np.uint32)
    inbox = secret.integers(0, 2**32, (n, width * blocks), dtype=np.uint32)
    x = on_gpu(x0)
    got, log, astray, early = deliver(serve, student.Stages(x, width * blocks, rounds, slots), inbox, plugs, *lanes)
    prompt.append(early)
    once = [[name, i] for name in ("compute", "download", "upload") for i in range(n)]
    check.equal(log, once, why="每个请求的上传、计算、取回都应当正好提交一次。循环从 0 走到 stages.n − 1 了吗？")
    check.that(not astray, why="有一步放错了流：上传在 copy_in，计算在 running，取回在 copy_out，各在 with 那条流里调用。")
    check.that(not bool((got[-1] == 0xA5A5A5A5).all()), why="函数返回时，最后一个请求的结果还没有回到 outbox。返回之前 CPU 要等：等的是最后做完的那条流吗？")
    want, right = reference.answered(x0, inbox, rounds)
    return got, want, x.read(), right


delivered(2, [("download", 1)])
for n, plug, why in (
    (2, ("compute", 0), "计算被拖慢时，取回的是旧内容：取回没有等计算。计算以后 record，copy_out 上 wait_event。"),
    (2, ("upload", 0), "上传被拖慢时，计算用的是旧内容：计算没有等上传。上传以后 record，running 上 wait_event。"),
    (3, ("compute", 0), "计算被拖慢时，请求 0 算的是请求 2 的输入：同一块输入缓冲还没读完，就被下一次上传覆盖了。上传请求 i 之前，要等请求 i − slots 的计算。"),
    (3, ("download", 0), "取回被拖慢时，请求 0 取到的是请求 2 的结果：同一块输出缓冲还没取走，就被下一次计算覆盖了。计算请求 i 之前，要等请求 i − slots 的取回。"),
):
    got, want, state, right = delivered(n, [plug])
    check.equal(got, want, why=why)
    check.equal(state, right, why="结果对了，状态 x 却不对：是不是有的请求算了不止一次？")
### BEGIN HIDDEN TESTS
for slots in (1, 2, 3):
    for name in ("upload", "compute", "download"):
        n = slots + int(secret.integers(2, 5))
        held = sorted({(name, int(i)) for i in secret.integers(0, n, 2)})
        got, want, state, right = delivered(n, held, slots=slots, blocks=int(secret.integers(2, 9)), rounds=int(secret.integers(1, 9)))
        check.equal(got, want, why="换了请求数和缓冲块数，某一步被拖慢时结果不对。缓冲块数要用 stages.slots，不要写死两块；每条依赖都有自己的事件吗？事件是先记录、再等待的吗？")
        check.equal(state, right, why="换了请求数和缓冲块数，状态 x 不对：是不是有的请求漏了，或者算了不止一次？")
got, want, state, right = delivered(1, [("download", 0)])
check.equal(got, want, why="只有一个请求时结果不对。")
for step in ("upload", "compute", "download"):
    for _ in range(3):  # again only if the machine may just have been busy
        got, want, state, right = delivered(int(secret.integers(4, 7)), [(step, 0)])
        check.equal(got, want, why="多几个请求，第一个的某一步被拖慢时结果不对。")
        if prompt[-1]:
            break
    check.that(prompt[-1], why="第一个请求的某一步还堵着，后面的请求就没有提交完：CPU 在中途等了 GPU。先后全用事件，让流去等；CPU 只在最后等一次。")
### END HIDDEN TESTS

# %% test="serve_overlapped_speed" kind="speedup" points=2 tags=["gpu"]
SIZE, SHAPE = 2**21, (8, 16384)
start = partial(secret.integers, 0, 2**31, SHAPE, dtype=np.uint32)
x, y, z = (on_gpu(start()) for _ in range(3))
balanced = reference.balanced_rounds(SIZE)
ours = student.Stages(x, SIZE, balanced, echo=True)
check.speedup(
    partial(student.serve_overlapped, ours),
    over=partial(reference.serve_serial, reference.Stages(y, SIZE, balanced, echo=True)),
    best=partial(reference.serve_overlapped, reference.Stages(z, SIZE, balanced, echo=True)),
    state=(x, z),
    draw=start,
    at_least=1.6,
    why="没有重叠起来。循环里有没有让 CPU 等（synchronize）？三步是不是真的在三条流上？有没有多余的等待，例如上传 i 等了请求 i − 1 的取回？",
)
### BEGIN HIDDEN TESTS
SAMPLE = """
def sample(stages):
    return stages.outbox[:, ::997].copy()
"""
last = on_gpu(start())
theirs = reference.Stages(last, SIZE, balanced, echo=True)
x.write(last.read())
for _ in range(int(secret.integers(2, 5))):
    student.serve_overlapped(ours)
    reference.serve_serial(theirs)
check.equal(x.read(), last.read(), why="计时以后再做几遍，状态和逐个做的不同：快，但没有做完该做的工作。")
check.equal(student.define(SAMPLE, "sample")(ours), reference.define(SAMPLE, "sample")(theirs), why="计时以后再做几遍，主机上的结果和逐个做的不同：结果每一遍都要真正取回到 outbox。")
### END HIDDEN TESTS

# %% [markdown]
# 看看你的流水线长什么样。`Timed` 在每一步前后各记一个事件，事件的时刻画成三条泳道；上面是 `serve_serial`，下面是你的。

# %% tags=["demo", "gpu"]
class Timed:
    """Stages that note when each step begins and ends on the GPU."""

    def __init__(self, stages):
        self._stages, self.n, self.slots, self.marks = stages, stages.n, stages.slots, []
        self.zero = cp.cuda.Event()
        self.zero.record(stream)
        for side in (copy_in, running, copy_out):
            side.wait_event(self.zero)

    def _step(self, name, i):
        first, last = cp.cuda.Event(), cp.cuda.Event()
        first.record()
        getattr(self._stages, name)(i)
        last.record()
        self.marks.append((name, i, first, last))

    def upload(self, i):
        self._step("upload", i)

    def compute(self, i):
        self._step("compute", i)

    def download(self, i):
        self._step("download", i)

    def bars(self):
        """(step, request, begin, length) in µs after the start."""
        for name, i, first, last in self.marks:
            yield name, i, cp.cuda.get_elapsed_time(self.zero, first) * 1000, cp.cuda.get_elapsed_time(first, last) * 1000


stages = Stages(cp.zeros((REQUESTS, ROW), cp.uint32), BIG, rounds)
fig, axes = plt.subplots(2, 1, figsize=(9.5, 4.6), sharex=True)
lanes, ends = {"download": 0, "compute": 1, "upload": 2}, []
for ax, way, title in zip(axes, (serve_serial, serve_overlapped), ("排队", "重叠"), strict=True):
    way(stages)
    timed = Timed(stages)
    way(timed)
    bars = list(timed.bars())
    for name, i, begin, length in bars:
        ax.barh(lanes[name], length, left=begin, height=0.7, color=f"C{i % stages.slots}", edgecolor="white")
        ax.text(begin + length / 2, lanes[name], str(i), ha="center", va="center", fontsize=8, color="white")
    ax.set_yticks([0, 1, 2], ["取回", "计算", "上传"])
    ax.set_title(f"{title}（{lab.gpu_name()}）")
    ends.append(max(begin + length for _, _, begin, length in bars))
axes[1].set_xlabel("时间（µs）")
plt.show()
lab.say(f"最后一个结果到达：排队 **{ends[0]:.0f} µs**，重叠 **{ends[1]:.0f} µs**。颜色是缓冲的编号：同一种颜色的下一块，总要等上一块用完。")
stages = None

# %% [markdown] tags=["instructor"]
# 给教师：练习二怎样知道做事的是那张图：隐藏测试把 `request.captured` 里的拷贝节点一个一个地关掉，各做一个请求，对的结果不该再到；
# 再堵住 `stream` 做一个，结果不该抢先到。用哪个 API 启动图都可以。
#
# 练习三的五个可见情形各塞住一步，每个只可能由一种缺失的事件引起：先考“返回太早”，再考两种“写完才能读”（两个请求，不重用缓冲），
# 最后考两种“读完才能再写”（三个请求）。塞子有 40 ms，远长于 CPU 提交全部工作的时间，所以缺事件必然出错，不会碰巧对。
# 每一步在哪条流上、第一步堵着的时候后面的是不是都提交了，也都看：全放在一条流里、步步同步的写法，结果再对也不得分。计时中上一遍的结果就是下一遍的输入，漏拷一次，状态就错。

# %% [markdown]
# ## 小结
#
# | 以前的说法 | 实验以后的说法 |
# |:--|:--|
# | 数据传输仍由 CPU 控制 | 拷贝可以是图的节点，一次启动全做完；CPU 剩下的是写收件箱、取结果 |
# | 数据搬运频繁，延迟改善有限 | 成立；拷贝够长时，提交整个藏在它背后，图省下的趋近于零 |
# | Async 就是不等 | 锁页才不等；可分页的 D2H 要等到数据交给你 |
# | 启动以后就能读结果、改输入 | 图启动返回时，收件箱可能还没读，发件箱可能还没写：各等各的事件 |
# | 用两条流就会重叠 | 还要锁页内存、成双的缓冲，和两个方向的事件 |
#
# **带走三句话**
#
# 1. 静态缓冲：锁页，一次分配，地址不变，由拿着图的人保管。
# 2. 每块缓冲有两种先后：写完才能读，读完才能再写。缺了哪个，塞住那一步就现形。
# 3. 先算账再上图：最慢的工位是拷贝时，图救不了延迟，重叠才救得了吞吐。
#
# 下一步：《多流调度》把引擎放到几条流上；《项目：一张图的文字识别》会用到本章的锁页缓冲。
