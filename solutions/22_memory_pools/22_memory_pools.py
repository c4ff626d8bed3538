# %% [markdown]
# # 内存池优化
#
# 一个推理服务，每个请求都要一块暂存区（scratch），大小随请求变。第一版老老实实地 `cudaMalloc`、用完 `cudaFree`，
# 请求里有一大半时间花在这两句上。换成内存池（memory pool），快了；几天以后运维来问：夜里没有请求，为什么显存一点没降，是不是泄漏？
# 有人加了一句“修剪”，数字还是没动，因为占着显存的根本不是他修剪的那个池子。
#
# 毛病都出在一处：进程里同时有**三本账**，CuPy 的池、驱动的池、CUDA 图的显存，各记各的，谁也不替谁说话。
#
# **学完以后，你能够**
#
# - 说出几种要显存的办法各花多少时间，哪一句会让 CPU 停下来等；
# - 读懂一本账里的四个数，分清“还在用”“留着”和“泄漏”；
# - 用释放门槛（release threshold）和修剪（trim），在快和省之间选一个位置；
# - 让一段没有改过的 CuPy 代码，捕获以后由图自己管理临时数组，并且把动过的分配器还原；
# - 画出一段流量的占用曲线，照着它选办法；让 TensorRT 引擎的工作区也从图里来。
#
# **需要的基础**：《流捕获：规则与恢复》里“在捕获里要显存”一节，《多流捕获与图的生命周期》里“图的显存”一节；
# 最后一个实验用到《构建第一个 TensorRT 引擎》。
#
# **时间**：约 70 分钟，其中四道练习约 40 分钟。
#
# 下一格导入的 `check`、`student` 等五个名字只给练习后面的测试单元用，现在不用管它们。

# %%
import numpy as np
from functools import partial
from launchlab import lab
from launchlab.exam import check, on_gpu, reference, secret, student

lab.here()

# %% [markdown]
# ## 准备
#
# 一个请求做两件事，各是一个内核（kernel）：
#
# - `expand`：由状态 `x` 和请求的序号 `i` 算出一大片数，填满暂存区；
# - `shrink`：把整片暂存区再揉回 `x`。
#
# 状态 `x` 是 32 位无符号整数，每个请求都往前走一步，漏做一个、换了次序，结果就不同。暂存区有多大，每个请求自己说。
# `spin` 空转一段给定的时间，用来让 GPU 忙着。
#
# `make_pool` 把建池子的几行真实的调用收在一起；`pool_bytes`、`graph_bytes` 各读一本账里的一个数。`MIB` 是 1 MiB 的字节数，
# `KEEP_ALL` 是能写进门槛的最大值。`capturing` 和《多流捕获与图的生命周期》里的一样：出错也善后，录到的定义放在 `as` 后面的列表里。

# %% tags=["gpu"]
import gc
import warnings
from contextlib import contextmanager

import cupy as cp
from cuda.bindings import driver
from cuda.bindings import runtime as cudart

warnings.filterwarnings("ignore", message=".*experimental", category=FutureWarning)  # CuPy says so of its stream-ordered allocators

SOURCE = r"""
__device__ unsigned int stirred(unsigned int v, unsigned int i) {
    v ^= v >> 15;
    v *= 0x2c1b3c6du;
    v ^= v >> 12;
    return v + i;
}

extern "C" __global__ void expand(unsigned int *scratch, const unsigned int *x, unsigned int words, unsigned int size, unsigned int i) {
    for (unsigned int t = blockIdx.x * blockDim.x + threadIdx.x; t < words; t += gridDim.x * blockDim.x)
        scratch[t] = stirred(x[t % size] + t, i);
}

extern "C" __global__ void shrink(unsigned int *x, const unsigned int *scratch, unsigned int words, unsigned int size, unsigned int i) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) x[t] = stirred(x[t] ^ scratch[t] ^ scratch[words - 1 - t], i);
}

extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
}
"""
module = cp.RawModule(code=SOURCE)
expand, shrink, spin = (module.get_function(name) for name in ("expand", "shrink", "spin"))

stream = cp.cuda.Stream(non_blocking=True)
BLOCK = 256
MIB = 1 << 20
KEEP_ALL = 2**64 - 1
DEVICE = cp.cuda.Device().id


def launch_request(x, scratch, nbytes, i):
    """Launch request i on the current stream: fill the scratch, stir it back into x. Returns at once.

    x: cupy uint32, 1-D. scratch: address (int) of nbytes of device memory. ValueError, before anything is launched, when
    nbytes is no multiple of 4 or less than x.nbytes.
    """
    if nbytes % 4 or nbytes < x.nbytes:
        raise ValueError(f"暂存区要 {nbytes} 字节？它应当是 4 的倍数，至少 {x.nbytes}。")
    words = nbytes // 4
    arguments = np.uint32(words), np.uint32(x.size), np.uint32(i)
    expand((min(-(-words // BLOCK), 2048),), (BLOCK,), (np.uint64(scratch), x, *arguments))
    shrink((-(-x.size // BLOCK),), (BLOCK,), (x, np.uint64(scratch), *arguments))


def launch_spin(us):
    """Keep one GPU thread busy for us microseconds, on the current stream. Returns at once."""
    spin((1,), (1,), (np.uint64(us * 1000),))


def set_threshold(pool, threshold):
    """Let the pool (cudaMemPool_t) keep up to `threshold` bytes when somebody synchronises."""
    attribute = cudart.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
    lab.check_cuda(cudart.cudaMemPoolSetAttribute(pool, attribute, driver.cuuint64_t(threshold)))


def make_pool(threshold=0):
    """A new memory pool (cudaMemPool_t) on this device, with this release threshold in bytes. The caller destroys it."""
    properties = cudart.cudaMemPoolProps()
    properties.allocType = cudart.cudaMemAllocationType.cudaMemAllocationTypePinned  # ordinary device memory: it stays put
    properties.handleTypes = cudart.cudaMemAllocationHandleType.cudaMemHandleTypeNone  # not shared with other processes
    properties.location.type = cudart.cudaMemLocationType.cudaMemLocationTypeDevice
    properties.location.id = DEVICE
    pool = lab.check_cuda(cudart.cudaMemPoolCreate(properties))
    set_threshold(pool, threshold)
    return pool


def pool_bytes(pool, name):
    """One number of a pool's account, bytes. name: "UsedMemCurrent", "ReservedMemCurrent", "UsedMemHigh", "ReservedMemHigh"."""
    attribute = getattr(cudart.cudaMemPoolAttr, "cudaMemPoolAttr" + name)
    return int(lab.check_cuda(cudart.cudaMemPoolGetAttribute(pool, attribute)))


def graph_bytes(name):
    """The same numbers of the memory of all CUDA graphs of this process on this device, bytes."""
    attribute = getattr(cudart.cudaGraphMemAttributeType, "cudaGraphMemAttr" + name)
    return int(lab.check_cuda(cudart.cudaDeviceGetGraphMemAttribute(DEVICE, attribute)))


@contextmanager
def capturing(queue):
    """Capture on queue (a cupy Stream), thread-local, queue being the current stream inside. Yields a list for the definition.

    The caller owns the definition (cudaGraph_t). An exception from inside goes on as it is; the rest of the graph is then
    destroyed and the last error cleared. lab.CudaError if ending the capture fails.
    """
    lab.check_cuda(cudart.cudaStreamBeginCapture(queue.ptr, cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
    captured = []
    try:
        with queue:
            yield captured
    except BaseException:
        ended, half = cudart.cudaStreamEndCapture(queue.ptr)
        if not int(ended):
            cudart.cudaGraphDestroy(half)
        cudart.cudaGetLastError()
        raise
    ended = cudart.cudaStreamEndCapture(queue.ptr)
    if int(ended[0]):
        cudart.cudaGetLastError()
    captured.append(lab.check_cuda(ended))


def node_kinds(graph):
    """How many nodes of each kind the definition (cudaGraph_t) has: {"MemAlloc": 1, "Kernel": 2, …}."""
    _, count = lab.check_cuda(cudart.cudaGraphGetNodes(graph, 0))
    nodes, _ = lab.check_cuda(cudart.cudaGraphGetNodes(graph, count)) if count else ([], 0)
    kinds = [lab.check_cuda(cudart.cudaGraphNodeGetType(node)).name.removeprefix("cudaGraphNodeType") for node in nodes]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


class OwnedGraph:
    """A definition made executable: call it to launch it on `stream`. close() destroys both; called twice, it does nothing."""

    def __init__(self, definition, flags=0):
        self.graph = definition
        self.executable = lab.check_cuda(cudart.cudaGraphInstantiate(definition, flags))

    def __call__(self):
        lab.check_cuda(cudart.cudaGraphLaunch(self.executable, stream.ptr))

    def close(self):
        if self.graph is not None:
            lab.check_cuda(cudart.cudaGraphExecDestroy(self.executable))
            lab.check_cuda(cudart.cudaGraphDestroy(self.graph))
            self.graph = self.executable = None


# The first launch of a kernel loads its code, which may be refused while a stream is capturing: warm up.
with stream:
    warm = cp.zeros(BLOCK, cp.uint32)
    warm_scratch = cp.zeros(BLOCK, cp.uint32)
    launch_request(warm, warm_scratch.data.ptr, warm_scratch.nbytes, 0)
    launch_spin(1)
stream.synchronize()

# %% [markdown]
# NumPy 版的参照（不需要 GPU）：

# %%
def stirred(v, i):
    """One round of stirring with index i on v (numpy uint32); v stays as it is."""
    v = v ^ (v >> np.uint32(15))
    v = v * np.uint32(0x2C1B3C6D)
    return (v ^ (v >> np.uint32(12))) + np.uint32(i)


def requested(x, nbytes, i):
    """What request i with nbytes of scratch makes of x (numpy uint32)."""
    words, size = nbytes // 4, x.size
    t = np.arange(size, dtype=np.int64)

    def scratch(places):  # what expand writes there
        return stirred(x[places % size] + places.astype(np.uint32), i)

    return stirred(x ^ scratch(t) ^ scratch(words - 1 - t), i)


def served(x, sizes):
    """What the requests 0, 1, … with these scratch sizes (bytes) make of x (numpy uint32), one after the other."""
    for i, nbytes in enumerate(sizes):
        x = requested(x, nbytes, i)
    return x


# %% [markdown]
# ## 要一块显存，要等谁
#
# 先看最朴素的问题：GPU 正忙着，这时候要一块、还一块显存，CPU 要不要停下来等？
#
# 下面先在 `stream` 上空转 20 ms，然后马上依次调用四个函数，看每个函数自己多久才返回。
# 先猜：哪几个会等到那 20 ms 过去？

# %% tags=["demo", "gpu"]
from time import perf_counter_ns

import matplotlib.pyplot as plt

lab.plot_style()
with stream:
    xs = cp.arange(4096, dtype=cp.uint32)
stream.synchronize()
BUSY_US = 20_000


def behind_a_spin(calls):
    """ms that each call takes to return, called one after the other just after a spin began on `stream`."""
    with stream:
        launch_spin(BUSY_US)
    times = []
    for call in calls:
        begun = perf_counter_ns()
        call()
        times.append((perf_counter_ns() - begun) / 1e6)
    stream.synchronize()
    return times


CALLS = ("`cudaMalloc`", "`cudaMallocAsync`", "`cudaFreeAsync`", "`cudaFree`")
held = {}


def plain():
    held["plain"] = lab.check_cuda(cudart.cudaMalloc(MIB))


def ordered():
    held["ordered"] = lab.check_cuda(cudart.cudaMallocAsync(MIB, stream.ptr))


def free_ordered():
    lab.check_cuda(cudart.cudaFreeAsync(held["ordered"], stream.ptr))


def free_plain():
    lab.check_cuda(cudart.cudaFree(held["plain"]))


rounds = [behind_a_spin([plain, ordered, free_ordered, free_plain]) for _ in range(4)]
waits = np.median(rounds[1:], axis=0)  # the first round is a warm-up
lab.say(lab.table(("GPU 正忙时调用", "多久返回（ms，中位数）"), [(call, f"{ms:.3f}") for call, ms in zip(CALLS, waits, strict=True)]))
waited = [call for call, ms in zip(CALLS, waits, strict=True) if ms > BUSY_US / 2000]
lab.say(f"等到 GPU 做完才返回的：{'、'.join(waited) or '没有'}。")

# %% [markdown]
# 道理在“什么时候才算数”：
#
# - `cudaFree` 一返回，那块显存就可以给任何人，所以它得先保证没有内核还在用。**它要等整个设备**，别的流也包括在内。
# - `cudaMallocAsync`、`cudaFreeAsync` 是**流序分配**（stream-ordered allocation）：分配和释放像内核一样排进流里，
#   排在后面的工作才看得到，所以 CPU 不用等。
#
# ### 误区一：`cudaFree` 只是还一块显存
#
# 它是还显存，外加一次没有写出来的设备同步。每个请求都同步一次，流水线就断了：CPU 没法趁 GPU 忙着，把下一个请求先准备好。
#
# 那么，一个完整的请求（要暂存区、两个内核、还暂存区、等结果），换几种办法要显存，各要多久？五种办法轮流量：

# %% tags=["demo", "gpu"]
def with_malloc(nbytes):
    scratch = lab.check_cuda(cudart.cudaMalloc(nbytes))
    with stream:
        launch_request(xs, scratch, nbytes, 0)
    stream.synchronize()
    lab.check_cuda(cudart.cudaFree(scratch))


def with_pool(pool, nbytes):
    scratch = lab.check_cuda(cudart.cudaMallocFromPoolAsync(nbytes, pool, stream.ptr))
    with stream:
        launch_request(xs, scratch, nbytes, 0)
    lab.check_cuda(cudart.cudaFreeAsync(scratch, stream.ptr))
    stream.synchronize()


def with_cupy_pool(pool, nbytes):
    with stream:
        scratch = pool.malloc(nbytes)  # a MemoryPointer: the memory goes back when the object does
        launch_request(xs, scratch.ptr, nbytes, 0)
    del scratch
    stream.synchronize()


def with_buffer(address, nbytes):
    with stream:
        launch_request(xs, address, nbytes, 0)
    stream.synchronize()


def in_turns(ways, turns=9):
    """{name: median µs} of callables that wait for the GPU themselves, measured in turns after one warm-up."""
    times = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            begun = perf_counter_ns()
            way()
            if turn:
                times[name].append((perf_counter_ns() - begun) / 1000)
    return {name: float(np.median(us)) for name, us in times.items()}


SIZES_MIB = (0.25, 1, 4, 16, 64)
impatient, patient, cupy_pool = make_pool(0), make_pool(KEEP_ALL), cp.cuda.MemoryPool()
biggest = lab.check_cuda(cudart.cudaMalloc(int(max(SIZES_MIB) * MIB)))
lines = {}
for size in SIZES_MIB:
    nbytes = int(size * MIB)
    medians = in_turns(
        {
            "cudaMalloc / cudaFree": partial(with_malloc, nbytes),
            "驱动的池，门槛 0": partial(with_pool, impatient, nbytes),
            "驱动的池，全留着": partial(with_pool, patient, nbytes),
            "CuPy 的池": partial(with_cupy_pool, cupy_pool, nbytes),
            "一块固定的缓冲": partial(with_buffer, biggest, nbytes),
        }
    )
    for name, us in medians.items():
        lines.setdefault(name, []).append(us)
lab.check_cuda(cudart.cudaFree(biggest))
for pool in (impatient, patient):
    lab.check_cuda(cudart.cudaMemPoolDestroy(pool))
cupy_pool.free_all_blocks()

fig, ax = plt.subplots()
for name, us in lines.items():
    ax.plot(SIZES_MIB, us, label=name)
ax.set_xscale("log", base=2)
ax.set_yscale("log")
ax.set_xlabel("暂存区（MiB）")
ax.set_ylabel("一个请求的端到端时间（µs，中位数）")
ax.set_title(f"暂存区从哪里来（{lab.gpu_name()}）")
ax.set_ylim(top=6 * max(map(max, lines.values())))  # room for the legend
ax.legend(ncols=2)
plt.show()
place = SIZES_MIB.index(16)
base = lines["一块固定的缓冲"][place]
lab.say(
    "16 MiB 的暂存区，比固定缓冲多花的时间："
    + "；".join(f"{name} **{us[place] - base:.0f} µs**" for name, us in lines.items() if name != "一块固定的缓冲")
    + "。"
)

# %% [markdown]
# 固定的缓冲是底线：什么也不要，只有两个内核和一次等待。别的线高出底线多少，就是要显存的代价。
# 最小的一档，`cudaMalloc` 也许并不贵：小块多半是从驱动早先拿到手的大块里切的（《执行上下文与显存》量过它的刻度），大一些的才要现去拿。
#
# 请注意两条“驱动的池”：用的是同样的函数，只差一个数，叫**释放门槛**。它们之间差多少，以你自己的图为准；
# 差在哪里，要看账本。

# %% [markdown]
# ## 池子的账本：used 和 reserved
#
# 一个池子有四个数（字节），用 `cudaMemPoolGetAttribute` 读：
#
# - **used**（`UsedMemCurrent`）：此刻借出去的；
# - **reserved**（`ReservedMemCurrent`）：池子从驱动那里拿来、还没有交回去的，包括借出去的和空着的；
# - **最高水位**（`UsedMemHigh`、`ReservedMemHigh`）：上次清零以来的最大值。写入 0 就是清零，从当前值重新开始。
#
# 两个新池子，一个门槛 0，一个全留着，走同样的八步。先猜：哪一步以后 used 变小，哪一步以后 reserved 才变小？

# %% tags=["demo", "gpu"]
def account(pool):
    return tuple(f"{pool_bytes(pool, name) / MIB:.0f}" for name in ("UsedMemCurrent", "ReservedMemCurrent", "UsedMemHigh", "ReservedMemHigh"))


def reset_highs(pool):
    for name in ("UsedMemHigh", "ReservedMemHigh"):
        attribute = getattr(cudart.cudaMemPoolAttr, "cudaMemPoolAttr" + name)
        lab.check_cuda(cudart.cudaMemPoolSetAttribute(pool, attribute, driver.cuuint64_t(0)))


def eight_steps(pool):
    """[(step, used, reserved, highest used, highest reserved in MiB), …]"""
    blocks = []

    def lend(mib):
        blocks.append(lab.check_cuda(cudart.cudaMallocFromPoolAsync(mib * MIB, pool, stream.ptr)))

    def take_back():
        lab.check_cuda(cudart.cudaFreeAsync(blocks.pop(), stream.ptr))

    steps = [
        ("要三块，各 64 MiB", lambda: [lend(64) for _ in range(3)]),
        ("GPU 忙着，释放其中两块", lambda: [on_stream_spin(2000), take_back(), take_back()]),
        ("`stream.synchronize()`", stream.synchronize),
        ("又要一块 64 MiB", lambda: lend(64)),
        ("全部释放", lambda: [take_back() for _ in range(len(blocks))]),
        ("`stream.synchronize()`", stream.synchronize),
        ("`cudaMemPoolTrimTo(pool, 0)`", lambda: lab.check_cuda(cudart.cudaMemPoolTrimTo(pool, 0))),
        ("最高水位清零", partial(reset_highs, pool)),
    ]
    rows = [("刚建好", *account(pool))]
    for step, call in steps:
        call()
        rows.append((step, *account(pool)))
    return rows


def on_stream_spin(us):
    with stream:
        launch_spin(us)


impatient, patient = make_pool(0), make_pool(KEEP_ALL)
accounts = [eight_steps(impatient), eight_steps(patient)]
for pool in (impatient, patient):
    lab.check_cuda(cudart.cudaMemPoolDestroy(pool))
header = ("这一步之后（MiB）", "used", "reserved", "used 最高", "reserved 最高")
for title, rows in zip(("门槛 0", "全留着（门槛是最大值）"), accounts, strict=True):
    lab.say(f"**{title}**\n\n" + lab.table(header, rows))

# %% [markdown]
# 对着两张表看：
#
# - 释放让 **used** 变小。这两张表里，一句 `cudaFreeAsync` 之后账上就少了，没有等 GPU。几时划掉由驱动定，
#   有时要到同步才划，所以要读准 used，先同步（练习一后面拿真池子再对照一次）；
# - **reserved** 不跟着释放走。等到 CPU 在释放所在的那条流上（或者整个设备上）**同步**，池子才把超过门槛的空闲部分交还给驱动；
# - 门槛 0，就是每次同步都交得干干净净；门槛是最大值，就一直留着，只有修剪（trim）才交；
# - `cudaMemPoolTrimTo(pool, n)`：现在就交还，至少留下 n 字节。只有空着的能交，借出去的一个字节也不动；
# - 池子向驱动要的时候按大块取整，再切开借出去，所以 reserved 可能比要的多一些。
#
# 于是上一张图里两条“驱动的池”的差别有了答案：推理服务每个请求都要等结果，也就是每个请求都同步一次。
# 门槛 0 的池子每次都把显存全交回去，下一个请求再去驱动那里拿，等于没有池子，有时比直接 `cudaMalloc` 还慢。**而 0 正是新池子的默认值。**
#
# ### 误区二：释放了还占着，就是泄漏
#
# 看 used，不看 reserved。used 在没有请求的时候不回到原位，才是泄漏；reserved 高只是**留着**，留多少由你定。
# `nvidia-smi` 和 `cudaMemGetInfo` 看到的是 reserved 这一层，还混着别的池子、上下文和别的进程，所以光看它们分不清。
#
# 最高水位回答另一个问题：门槛该设多少？让服务跑一天真实的流量，读 `UsedMemHigh`，就知道留多少刚好够用。

# %% [markdown]
# ## 别的流什么时候能用上
#
# 池子里空着的块，记得自己是在哪条流上、排在什么工作后面释放的。同一条流马上就能再用：次序本来就保证了。
# 另一条流呢？下面先在 `stream` 上空转 20 ms，再释放一块 64 MiB，然后立刻在另一条流 `other` 上要一块同样大的。
# 先猜：哪一种拿到的是刚释放的那一块，哪一种要等 20 ms 才能用上？

# %% tags=["demo", "gpu"]
other = cp.cuda.Stream(non_blocking=True)
fence = cp.cuda.Event(disable_timing=True)


def reused_by(queue, ordered):
    """(same block?, reserved MiB, ms until queue is done) when queue wants memory just freed behind a spin on `stream`."""
    pool = make_pool(KEEP_ALL)
    first = lab.check_cuda(cudart.cudaMallocFromPoolAsync(64 * MIB, pool, stream.ptr))
    stream.synchronize()
    on_stream_spin(BUSY_US)
    lab.check_cuda(cudart.cudaFreeAsync(first, stream.ptr))
    if ordered:
        fence.record(stream)
        queue.wait_event(fence)
    begun = perf_counter_ns()
    second = lab.check_cuda(cudart.cudaMallocFromPoolAsync(64 * MIB, pool, queue.ptr))
    lab.check_cuda(cudart.cudaFreeAsync(second, queue.ptr))
    reserved = pool_bytes(pool, "ReservedMemCurrent")
    queue.synchronize()
    waited = (perf_counter_ns() - begun) / 1e6
    cp.cuda.Device().synchronize()
    lab.check_cuda(cudart.cudaMemPoolDestroy(pool))
    return "是" if first == second else "不是", f"{reserved / MIB:.0f}", f"{waited:.1f}"


reused_by(stream, False)  # discarded
rows = [
    ("同一条流", *reused_by(stream, False)),
    ("另一条流，用事件排在释放之后", *reused_by(other, True)),
    ("另一条流，没有排", *reused_by(other, False)),
]
lab.say(lab.table(("谁来要", "是刚释放的那一块", "reserved MiB", "多久能用上（ms）"), rows))

# %% [markdown]
# 同一条流拿到的就是刚释放的那一块，一点也不用另要；表里的 20 ms 是它自己排在前面的空转，不是在等显存。
# 两行“另一条流”正好是一笔交易：排在释放之后，就能合用一块显存，可是要等；不排，就不等，可是要另占一块（看 reserved）。
# 池子不会把还可能有人在用的块给别的流。
#
# 池子有三个开关管这件事，默认都开：`cudaMemPoolReuseFollowEventDependencies`（认得你用事件排好的次序，就是第二行）、
# `cudaMemPoolReuseAllowOpportunistic`（碰巧已经做完了的，也拿来用）、`cudaMemPoolReuseAllowInternalDependencies`
# （实在没有显存的时候，替你插一个依赖，让那条流等）。最后一个会让本来并行的两条流悄悄排成一队；
# 第二个让“拿到哪一块”随时间变。所以占用要可重复，就自己用事件把次序写明白。

# %% [markdown]
# ## CuPy 的池子
#
# 写 `cp.empty(…)` 的时候，显存由**当前的分配器**给。默认的分配器是 `cp.cuda.MemoryPool` 的 `malloc`：一个用 `cudaMalloc` 拿大块、
# 在 Python 进程里自己切分的池子，和驱动的池子没有关系。换分配器有两种写法：
#
# - `cp.cuda.set_allocator(f)`：整个进程，一直有效，直到再换；
# - `with cp.cuda.using_allocator(f):`：只在这个块里、这个线程里有效，离开时（包括出错）还原。
#
# `f` 可以是某个池子的 `malloc`，也可以是 `cp.cuda.malloc_async`（每次都直接用 `cudaMallocAsync`），或者 `None`（每次都直接用 `cudaMalloc`）。
# 先看默认这一种的账本，用一个私有的 `MemoryPool`：

# %% tags=["demo", "gpu"]
own = cp.cuda.MemoryPool()
rows = []


def noted(step):
    rows.append((step, f"{own.used_bytes() / MIB:.2f}", f"{own.total_bytes() / MIB:.2f}", own.n_free_blocks()))


with cp.cuda.using_allocator(own.malloc):
    with stream:
        small, large = cp.empty(1000, cp.uint8), cp.empty(3 * MIB, cp.uint8)
    noted("`stream` 上要 1000 字节和 3 MiB")
    del small, large
    noted("两个数组都没有人用了")
    with stream:
        again = cp.empty(2 * MIB, cp.uint8)
    noted("`stream` 上要 2 MiB")
    del again
    with other:
        elsewhere = cp.empty(2 * MIB, cp.uint8)
    noted("还掉，在 `other` 上要 2 MiB")
    del elsewhere
own.free_all_blocks()
noted("`free_all_blocks()`")
lab.say(lab.table(("这一步之后", "used_bytes MiB", "total_bytes MiB", "空闲块"), rows))

# %% [markdown]
# `used_bytes` 就是 used，`total_bytes` 就是 reserved。还有三件事要知道：
#
# - 大小凑成 512 字节的倍数；
# - 空闲块**按流分开放**：`stream` 上还着的块，`other` 拿不到，只好再去要一块新的。这样永远不会弄错次序，代价是每条流各留一份；
# - 它不看同步，也没有门槛，一直留着，直到 `free_all_blocks()`。
#
# ### 次序也会改变占用
#
# 一个池子，依次要几块大小不同的显存，用完就还。从小到大和从大到小，留下的一样多吗？先猜。
#
# 捕获每个形状一张图时就是这样：每捕获一张，向图的私有池要一次暂存区。

# %% tags=["demo", "gpu"]
STEPS_MIB = (1, 2, 4, 8, 16, 32)


def total_after(order):
    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc), stream:
        for mib in order:
            scratch = cp.empty(mib * MIB, cp.uint8)
            del scratch  # it goes back before the next one is wanted
    total = pool.total_bytes() / MIB
    pool.free_all_blocks()
    return total


upwards, downwards = total_after(STEPS_MIB), total_after(STEPS_MIB[::-1])
lab.say(f"先小后大，池子留下 **{upwards:.0f} MiB**；先大后小，**{downwards:.0f} MiB**。最大的一块是 {max(STEPS_MIB)} MiB，加起来是 {sum(STEPS_MIB)} MiB。")

# %% [markdown]
# 大块可以切开给小的用，小块拼不成大的。所以几张不会同时跑的图合用一个池子时，**先捕获最大的**。
#
# ### 误区三：`set_limit` 设好了，池子就不会超
#
# CuPy 另有一种池子 `cp.cuda.MemoryAsyncPool`，外壳一样，里面换成了驱动的池子。两种池子都有 `set_limit`。
# 都设成 4 MiB，再要 8 MiB，看谁给、谁不给；第三行绕过 CuPy，直接向同一个驱动池子要。

# %% tags=["demo", "gpu"]
@contextmanager
def driver_pool_restored():
    """Put back this device's current pool and the release threshold of its default pool, whatever happens inside."""
    current = lab.check_cuda(cudart.cudaDeviceGetMemPool(DEVICE))
    default = lab.check_cuda(cudart.cudaDeviceGetDefaultMemPool(DEVICE))
    threshold = lab.check_cuda(cudart.cudaMemPoolGetAttribute(default, cudart.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold))
    try:
        yield default
    finally:
        lab.check_cuda(cudart.cudaDeviceSetMemPool(DEVICE, current))
        set_threshold(default, int(threshold))


def mib_text(nbytes):
    return "最大值" if nbytes == KEEP_ALL else f"{nbytes / MIB:.0f} MiB"


def threshold_of(pool):
    return int(lab.check_cuda(cudart.cudaMemPoolGetAttribute(pool, cudart.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold)))


def wants_8_mib(pool):
    pool.set_limit(size=4 * MIB)
    try:
        with cp.cuda.using_allocator(pool.malloc), stream:
            wanted = cp.empty(8 * MIB, cp.uint8)
    except MemoryError as error:
        return type(error).__name__
    return f"给了 {wanted.nbytes // MIB} MiB"


ours = make_pool(77 * MIB)
with driver_pool_restored():
    rows = [("`MemoryPool`", wants_8_mib(cp.cuda.MemoryPool()))]
    async_pool = cp.cuda.MemoryAsyncPool(int(ours))
    became_current = int(lab.check_cuda(cudart.cudaDeviceGetMemPool(DEVICE))) == int(ours)
    after_making = threshold_of(ours)
    rows.append(("`MemoryAsyncPool`", wants_8_mib(async_pool)))
    after_limit = threshold_of(ours)
    error, address = cudart.cudaMallocFromPoolAsync(8 * MIB, ours, stream.ptr)
    rows.append(("同一个驱动池，不经过 CuPy", f"返回 {int(error)}" if int(error) else "给了 8 MiB"))
    if not int(error):
        lab.check_cuda(cudart.cudaFreeAsync(address, stream.ptr))
    stream.synchronize()
lab.check_cuda(cudart.cudaMemPoolDestroy(ours))
lab.say(lab.table(("`set_limit(size=4 MiB)` 之后要 8 MiB", "结果"), rows))
lab.say(
    f"- 我们的池子，门槛原来是 77 MiB；拿它建一个 `MemoryAsyncPool` 以后，门槛是 **{mib_text(after_making)}**，"
    f"它{'成了设备的“当前池”' if became_current else '没有成为设备的“当前池”'}（`cudaMallocAsync` 用的那个）。\n"
    f"- `set_limit(size=4 MiB)` 以后，门槛是 **{mib_text(after_limit)}**。"
)

# %% [markdown]
# `MemoryPool` 的上限由它自己把着，超过就是 `OutOfMemoryError`。`MemoryAsyncPool` 的文档说它是**软**上限，底下写进的是驱动池的释放门槛：
# 第二行的结果随 CuPy 的版本变，第三行说明它管不着别人。
#
# 更要紧的是上面那两行字：**建一个 `MemoryAsyncPool`，就可能改动整个设备的设置**，当前池和门槛，看哪些被它动过。
# 进程里别的库用的也是它们。所以动之前先记下，用完还原，像 `driver_pool_restored` 那样。
# 只想让 CuPy 用流序分配，`using_allocator(cp.cuda.malloc_async)` 什么设置也不动。

# %% [markdown]
# ## 捕获时，换一个分配器就换一种图
#
# 下面这个 `layer` 是普普通通的 CuPy 代码，每一行都产生临时数组。不改它一个字，只换分配器，各捕获一次。
# 捕获以后给别人分配十六个同样大的新数组，再重放，看有几个被写坏。
#
# 《流捕获：规则与恢复》和《多流捕获与图的生命周期》里看过前两种，这次多一种：先猜 `malloc_async` 的图里有几个分配节点。

# %% tags=["gpu"]
def layer(x):
    """Three rounds on x (cupy uint32), in plain CuPy: every round makes temporary arrays."""
    for i in range(3):
        mixed = x * np.uint32(0x2C1B3C6D)
        mixed ^= mixed >> np.uint32(12)
        x ^= mixed + np.uint32(i)


with stream:
    layer(warm)  # CuPy compiles its element-wise kernels at first use: not in a capture
stream.synchronize()

# %%
def layered(x):
    """What layer makes of x (numpy uint32)."""
    for i in range(3):
        mixed = x * np.uint32(0x2C1B3C6D)
        mixed = mixed ^ (mixed >> np.uint32(12))
        x = x ^ (mixed + np.uint32(i))
    return x


# %% tags=["demo", "gpu"]
def captured_with(allocator):
    """(kinds of nodes, right?, new arrays spoilt) of layer captured with this allocator."""
    with stream:
        x = cp.arange(4096, dtype=cp.uint32)
        layer(x)  # the pool has what the capture will ask for: no cudaMalloc in there
    stream.synchronize()
    before = x.get(stream=stream)
    with cp.cuda.using_allocator(allocator):
        with stream:
            layer(x)  # this allocator's pool, too
        stream.synchronize()
        gc.collect()
        with capturing(stream) as captured:
            layer(x)
    graph = OwnedGraph(captured[0])
    with stream:
        tenants = [cp.full(x.size, 13, cp.uint32) for _ in range(16)]
    stream.synchronize()
    graph()
    stream.synchronize()
    spoilt = sum(not bool((tenant.get(stream=stream) == 13).all()) for tenant in tenants)
    right = np.array_equal(x.get(stream=stream), layered(layered(before)))
    kinds = node_kinds(graph.graph)
    graph.close()
    return "，".join(f"{kind} {count}" for kind, count in kinds.items()), "对" if right else "不对", spoilt


private = cp.cuda.MemoryPool()
rows = [
    ("默认的 `MemoryPool`", *captured_with(cp.get_default_memory_pool().malloc)),
    ("私有的 `MemoryPool`", *captured_with(private.malloc)),
    ("`cp.cuda.malloc_async`", *captured_with(cp.cuda.malloc_async)),
]
lab.say(lab.table(("分配器", "图里的节点", "`x` 的结果", "16 个新数组里被写坏的"), rows))
private.free_all_blocks()

# %% [markdown]
# - **默认池**：池子切块只在 CPU 上记账，图里没有分配节点，图记住的是早已还回去的地址；
# - **私有池**：还是没有分配节点，但那些地址只有这个池子的用户拿得到。代价是图活着，池子就得整个留着；
# - **`malloc_async`**：每个临时数组变成一个分配节点（MemAlloc），数组没人用的那一刻变成一个释放节点（MemFree）。
#   图自己管，别人碰不到，图不跑的时候还能把物理显存让出来。
#
# 前两种还要先预热：捕获里池子不够用，就要 `cudaMalloc`，会打断捕获。（`MemoryAsyncPool` 的 `malloc` 也别在捕获里用：
# 有的 CuPy 版本每次都要读池子的属性，thread-local 模式下会被拒绝。）
#
# 最后一种有一个条件：数组**要在捕获里面死掉**，释放才录得进去。结果如果逃了出去（比如存进一个列表），图里就只有分配、没有释放，
# 正是《流捕获：规则与恢复》和《多流捕获与图的生命周期》里第二次启动被拒绝的那种图。垃圾回收（garbage collection）也会搅局：捕获中途收到一个从前的流序数组，它的释放就被录进了别人的图。
#
# ## 第三本账：图的显存
#
# 图里的分配节点用的不是任何一个池子，而是设备的图显存。它有同样的四个数，`cudaDeviceGetGraphMemAttribute` 读，`graph_bytes` 就是它。
#
# ### 误区四：修剪默认的池子，图的显存就还了
#
# 一张图，分配 64 MiB、用完释放。两种捕获：普通的 `cudaMallocAsync`，和指名要某个池子的 `cudaMallocFromPoolAsync`。看启动以后三本账各是多少，
# 修剪池子以后又是多少：

# %% tags=["demo", "gpu"]
def scratch_graph(nbytes, pool=None):
    """A graph of one request on xs whose scratch is allocated and freed inside, nominally from this pool."""
    with capturing(stream) as captured:
        if pool is None:
            scratch = lab.check_cuda(cudart.cudaMallocAsync(nbytes, stream.ptr))
        else:
            scratch = lab.check_cuda(cudart.cudaMallocFromPoolAsync(nbytes, pool, stream.ptr))
        launch_request(xs, scratch, nbytes, 0)
        lab.check_cuda(cudart.cudaFreeAsync(scratch, stream.ptr))
    return OwnedGraph(captured[0])


def trim_graphs():
    """Wait, then give back what graph memory is reserved and not used."""
    cp.cuda.Device().synchronize()
    lab.check_cuda(cudart.cudaDeviceGraphMemTrim(DEVICE))


default_pool = lab.check_cuda(cudart.cudaDeviceGetDefaultMemPool(DEVICE))
named_pool = make_pool(KEEP_ALL)
trim_graphs()
lab.check_cuda(cudart.cudaMemPoolTrimTo(default_pool, 0))
rows = []


def three_accounts(step):
    stream.synchronize()
    reserved = (pool_bytes(default_pool, "ReservedMemCurrent"), pool_bytes(named_pool, "ReservedMemCurrent"), graph_bytes("ReservedMemCurrent"))
    rows.append((step, *(f"{nbytes / MIB:.0f}" for nbytes in reserved)))


three_accounts("开始")
for how, pool in (("`cudaMallocAsync`", None), ("`cudaMallocFromPoolAsync`", named_pool)):
    graph = scratch_graph(64 * MIB, pool)
    graph()
    three_accounts(f"{how} 的图启动过")
    for each in (default_pool, named_pool):
        lab.check_cuda(cudart.cudaMemPoolTrimTo(each, 0))
    three_accounts("修剪两个池子")
    trim_graphs()
    three_accounts("`cudaDeviceGraphMemTrim`，图还在")
    graph()
    three_accounts("再启动一次")
    graph.close()
    trim_graphs()
    three_accounts("销毁，修剪图的显存")
lab.check_cuda(cudart.cudaMemPoolDestroy(named_pool))
lab.say(lab.table(("这一步之后，reserved（MiB）", "默认池", "指名的池", "图的显存"), rows))

# %% [markdown]
# 开头那位修剪了池子的同事，修剪的是别的账。图的显存只听 `cudaDeviceGraphMemTrim`，而且**图还活着、没有在跑，也能修剪**：
# 虚拟地址仍归图所有，下次启动再配物理显存。
#
# 那次重配要花多少？先猜和平时的启动差多少倍，再看一直不修剪、每次都修剪、事先分配好这三种：

# %% tags=["demo", "gpu"]
def launched_and_done(graph):
    graph()
    stream.synchronize()


def launched_after_trim(graph):
    launched_and_done(graph)
    trim_graphs()


NBYTES = 64 * MIB
inside = scratch_graph(NBYTES)
beforehand = lab.check_cuda(cudart.cudaMalloc(NBYTES))
with capturing(stream) as captured:
    launch_request(xs, beforehand, NBYTES, 0)
outside = OwnedGraph(captured[0])
costs = in_turns({"事先分配好": partial(launched_and_done, outside), "图里分配，不修剪": partial(launched_and_done, inside)}, turns=21)
costs |= in_turns({"图里分配，每次都修剪": partial(launched_after_trim, inside)}, turns=9)
for graph in (inside, outside):
    graph.close()
lab.check_cuda(cudart.cudaFree(beforehand))
trim_graphs()
lab.say(lab.table(("64 MiB 暂存区的图", "启动到做完（µs，中位数）"), [(how, f"{us:.0f}") for how, us in costs.items()]))
extra = costs["图里分配，每次都修剪"] - costs["图里分配，不修剪"]
lab.say(f"每次都修剪，一次启动{'多' if extra >= 0 else '少'}花 **{abs(extra):.0f} µs**（修剪本身也在内）。")

# %% [markdown]
# 所以修剪不是每个请求做的事，是**空闲下来**才做的事，和池子的门槛一个道理。
#
# ### 每个形状一张图，暂存区占多少
#
# 形状一多，图就多。每张图一块自己的固定缓冲，占用就一张张地加上去；分配节点呢？启动在同一条流上的图不会同时跑，
# 驱动可以让它们轮流用同一份物理显存。从大到小建十张图，每建一张就启动一次（固定缓冲那条线是把大小加起来，没有真的分配）：

# %% tags=["demo", "gpu"]
SHAPES_MIB = tuple(range(100, 0, -10))
owned, shared, shared_total = [], [], []
graphs = []
trim_graphs()
for mib in SHAPES_MIB:
    graphs.append(scratch_graph(mib * MIB))
    graphs[-1]()
    stream.synchronize()
    shared.append(graph_bytes("ReservedMemCurrent") / MIB)
    owned.append((owned[-1] if owned else 0) + mib)
for graph in graphs:
    graph.close()
trim_graphs()
left_over = graph_bytes("ReservedMemCurrent") / MIB

fig, ax = plt.subplots()
count = range(1, len(SHAPES_MIB) + 1)
ax.plot(count, owned, label="每张图一块固定缓冲（相加）")
ax.plot(count, shared, label="图里分配，同一条流（图的显存 reserved）")
ax.axhline(max(SHAPES_MIB), color="grey", linestyle=":", label="最大的一张要的")
ax.set_xlabel("图（张）")
ax.set_ylabel("暂存区占用（MiB）")
ax.set_title(f"十张图，暂存区 100 … 10 MiB（{lab.gpu_name()}）")
ax.set_ylim(bottom=0)
ax.legend()
plt.show()
lab.say(f"十张图以后：固定缓冲 **{owned[-1]:.0f} MiB**，图里分配 **{shared[-1]:.0f} MiB**；全部销毁、修剪以后剩 {left_over:.0f} MiB。")

# %% [markdown]
# 图里分配的那条线是平的：十张图轮流用同一份，最大的一张要多少，大家就占多少；高出的那一截，是驱动按大块取整。
#
# ### 结果要留在图外面：AutoFreeOnLaunch
#
# 暂存区在图里释放，结果不行：外面还要读。一种办法是图外的固定缓冲；另一种是图里只分配、不释放，
# 实例化时带上 `cudaGraphInstantiateFlagAutoFreeOnLaunch`，每次启动先替你释放上一次的。
# 它有两个容易忘的地方：**下一次启动会收走这一次的结果**，最后一次的要你自己还。看 300 次启动的账：

# %% tags=["demo", "gpu"]
AUTO_FREE = int(cudart.cudaGraphInstantiateFlags.cudaGraphInstantiateFlagAutoFreeOnLaunch)
trim_graphs()
at_first = graph_bytes("UsedMemCurrent")
with capturing(stream) as captured:
    result = lab.check_cuda(cudart.cudaMallocAsync(64 * MIB, stream.ptr))
    launch_request(xs, result, 64 * MIB, 1)
keeper = OwnedGraph(captured[0], AUTO_FREE)
seen, history = [], []
window = cp.ndarray((4,), cp.uint32, cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(result, 64 * MIB, None, DEVICE), 0))
for launch in range(300):
    keeper()
    if launch in (0, 299):
        with stream:
            seen.append(window.copy())
    if launch % 10 == 0:
        stream.synchronize()
        history.append(graph_bytes("UsedMemCurrent") - at_first)
stream.synchronize()
changed = not np.array_equal(seen[0].get(stream=stream), seen[1].get(stream=stream))
keeper.close()
trim_graphs()
after_destroy = graph_bytes("UsedMemCurrent") - at_first
lab.check_cuda(cudart.cudaFreeAsync(result, stream.ptr))
trim_graphs()
after_free = graph_bytes("UsedMemCurrent") - at_first
lab.say(
    f"300 次启动之中，used 最少 {min(history) / MIB:.0f} MiB，最多 {max(history) / MIB:.0f} MiB；同一个地址上的结果{'已经变了' if changed else '没有变'}。"
    f"销毁图、修剪以后 used 还有 **{after_destroy / MIB:.0f} MiB**；`cudaFreeAsync` 以后 **{after_free / MIB:.0f} MiB**。"
)

# %% [markdown]
# ## 占用随时间：一张图选办法
#
# 现在把办法摆在同一段流量下比。流量有四段：清闲、一阵高峰（最大 256 MiB）、歇一会儿（没有请求，可以做点收拾）、又是清闲。
# 每个请求都等到结果。七种办法：
#
# - 不用池子：`cudaMalloc` / `cudaFree`；每种大小一块固定缓冲，用过就留着；
# - 驱动的池：门槛 0；全留着；全留着，歇的时候 `cudaMemPoolTrimTo(pool, 0)`；
# - 图里分配（每种大小一张图，事先捕获好）：不修剪；歇的时候 `cudaDeviceGraphMemTrim`。
#
# 横轴是**真的过去的时间**：同样的请求，慢的办法线就长。每个请求记两个点，做到一半时和做完以后，各占多少。
# 先猜：哪条线最短，哪条线歇过以后还是高高的？

# %% tags=["demo", "gpu"]
rng = np.random.default_rng(22)
QUIET = [16] * 10
BURST = [int(mib) for mib in rng.choice((64, 128, 192, 256), 20)]
TRAFFIC_MIB = [*QUIET, *BURST, None, *QUIET]  # None: nothing to do for a moment


class PlainWay:
    """cudaMalloc and cudaFree for each request. There is no account to read: what is held is known."""

    held = 0

    def begin(self, nbytes):
        self.scratch, self.held = lab.check_cuda(cudart.cudaMalloc(nbytes)), nbytes
        with stream:
            launch_request(xs, self.scratch, nbytes, 0)

    def end(self):
        stream.synchronize()
        lab.check_cuda(cudart.cudaFree(self.scratch))
        self.held = 0

    def footprint(self):
        return self.held

    def rest(self):
        pass

    def close(self):
        pass


class FixedWay(PlainWay):
    """A buffer for each size, made at first use and kept."""

    def __init__(self):
        self.buffers = {}

    def begin(self, nbytes):
        if nbytes not in self.buffers:
            self.buffers[nbytes] = lab.check_cuda(cudart.cudaMalloc(nbytes))
        with stream:
            launch_request(xs, self.buffers[nbytes], nbytes, 0)

    def end(self):
        stream.synchronize()

    def footprint(self):
        return sum(self.buffers)

    def close(self):
        for address in self.buffers.values():
            lab.check_cuda(cudart.cudaFree(address))


class PoolWay(PlainWay):
    def __init__(self, threshold, tidy=False):
        self.pool, self.tidy = make_pool(threshold), tidy

    def begin(self, nbytes):
        scratch = lab.check_cuda(cudart.cudaMallocFromPoolAsync(nbytes, self.pool, stream.ptr))
        with stream:
            launch_request(xs, scratch, nbytes, 0)
        lab.check_cuda(cudart.cudaFreeAsync(scratch, stream.ptr))

    def end(self):
        stream.synchronize()

    def footprint(self):
        return pool_bytes(self.pool, "ReservedMemCurrent")

    def rest(self):
        if self.tidy:
            lab.check_cuda(cudart.cudaMemPoolTrimTo(self.pool, 0))

    def close(self):
        lab.check_cuda(cudart.cudaMemPoolDestroy(self.pool))


class GraphWay(PlainWay):
    def __init__(self, tidy=False):
        self.tidy = tidy
        self.graphs = {mib * MIB: scratch_graph(mib * MIB) for mib in sorted(set(filter(None, TRAFFIC_MIB)), reverse=True)}

    def begin(self, nbytes):
        self.graphs[nbytes]()

    def end(self):
        stream.synchronize()

    def footprint(self):
        return graph_bytes("ReservedMemCurrent")

    def rest(self):
        if self.tidy:
            trim_graphs()

    def close(self):
        for graph in self.graphs.values():
            graph.close()
        trim_graphs()


def day(way):
    """Run the traffic. Returns (times ms, footprints MiB, µs of each request); reading the account is not timed."""
    clock, times, footprints, each = 0, [], [], []

    def timed(call, *arguments):
        begun = perf_counter_ns()
        call(*arguments)
        return perf_counter_ns() - begun

    for mib in TRAFFIC_MIB:
        steps = [(way.rest, ())] if mib is None else [(way.begin, (mib * MIB,)), (way.end, ())]
        begun = clock
        for step, arguments in steps:
            clock += timed(step, *arguments)
            times.append(clock / 1e6)
            footprints.append(way.footprint() / MIB)
        if mib is not None:
            each.append((clock - begun) / 1000)
    return np.array(times), np.array(footprints), np.array(each)


MAKERS = {
    "cudaMalloc / cudaFree": PlainWay,
    "固定缓冲，每种大小一块": FixedWay,
    "池，门槛 0": partial(PoolWay, 0),
    "池，全留着": partial(PoolWay, KEEP_ALL),
    "池，全留着，歇时修剪": partial(PoolWay, KEEP_ALL, tidy=True),
    "图里分配，不修剪": GraphWay,
    "图里分配，歇时修剪": partial(GraphWay, tidy=True),
}
days = {}
for _ in range(2):  # the first time is a warm-up
    for name, maker in MAKERS.items():
        trim_graphs()
        way = maker()
        days[name] = day(way)
        way.close()

fig, axes = plt.subplots(1, 2, figsize=(12, 4.6), sharex=True, sharey=True)
for name, (times, footprints, _) in days.items():
    ax = axes[1] if name.startswith(("图", "固定")) else axes[0]
    style = "--" if name.endswith("歇时修剪") else {"池，门槛 0": ":", "池，全留着": "-.", "图里分配，不修剪": "-."}.get(name, "-")
    ax.step(np.append(0, times), np.append(0, footprints), where="post", marker="", linestyle=style, label=name)
for ax, title in zip(axes, ("不用池子，和驱动的池", "固定缓冲，和图里分配"), strict=True):
    ax.set_title(title)
    ax.set_xlabel("过去的时间（ms）")
    ax.legend(fontsize=8)
axes[0].set_ylabel("占用（MiB）")
fig.suptitle(f"{2 * len(QUIET) + len(BURST)} 个请求，暂存区 16 … {max(BURST)} MiB（{lab.gpu_name()}）")
plt.show()
rows = [
    (name, f"{times[-1]:.1f}", f"{np.median(each):.0f}", f"{footprints.max():.0f}", f"{footprints[-1]:.0f}")
    for name, (times, footprints, each) in days.items()
]
lab.say(lab.table(("办法", "全程 ms", "一个请求 µs（中位数）", "最多占 MiB", "最后占 MiB"), rows))
fastest = min(days, key=lambda name: days[name][0][-1])
lean = [name for name in days if days[name][1][-1] <= 64]
lab.say(f"全程最短的是“{fastest}”。最后（又清闲下来）占用不超过 64 MiB 的：{'、'.join(lean) or '没有'}。")

# %% [markdown]
# 读图的时候分开看两件事：**线有多长**是快慢，**线有多高**是占用。
# “全留着”的两条、“图里分配”的两条，歇之前几乎重合，歇过以后才分开。
#
# - 每次都还给驱动的（`cudaMalloc` / `cudaFree`，门槛 0 的池），做完一个请求就落回底：低，但每个请求都去驱动那里要一次、还一次；
# - 留着的不用跑这一趟，可高峰过后就停在高处。夜里还占着显存的服务，就是这条线；
# - **留着，歇的时候修剪**：忙的时候每个请求和留着的一样快，闲下来只占清闲时的用量（按大块取整）。
#   全程长出来的那一段，主要是修剪本身，和修剪以后头一个请求又去驱动那里要的那一次；
# - 固定缓冲按“种类”相加，图里分配按“同时”算。
#
# 快多少，以你自己的那张表为准。
#
# ### 误区五：全留着的池子最好
#
# 独占整块 GPU，最好；和别人合用，就是拿别人的显存换自己的一点时间。还有折中：把门槛设成清闲时的用量，
# 平时不用去驱动那里要，高峰过后自动退下来，连修剪都省了；代价在高峰里：超出门槛的部分，每个请求还得去要一次。
#
# 折中的门槛怎么定？练习一让你把池子的规则写成一个模型，拿任何一份流量去试。

# %% [markdown]
# ## TensorRT 引擎的工作区，也从图里来
#
# 执行上下文要一块工作区，放中间结果。默认（STATIC）在创建上下文时就分配，按最大的形状，一直占着。
# 用 USER_MANAGED 创建，这块显存由你给：设好形状，`update_device_memory_size_for_shapes()` 告诉你**这个形状**要多少，
# `set_device_memory(地址, 字节数)` 交给它（《执行上下文与显存》细讲）。
#
# 地址只要在引擎跑的时候有效就行，那正好可以是图里的一个分配节点。三种批大小各捕获一张图：分配工作区 → 引擎 → 释放。
# 捕获前先用池子里的一块预热一次，这是《捕获 TensorRT 推理》的规矩。

# %% tags=["demo", "gpu"]
import tensorrt as trt


def require(result, what):
    """result, unless TensorRT refused: then RuntimeError with what its log says."""
    if result is None or result is False:
        raise RuntimeError(f"{what}失败：" + "；".join(lab.trt_errors()))
    return result


def small_network_plan():
    """The plan (bytes) of four convolutions with softmax between them: x (batch 1 … 32, 16, 64, 64) float32 -> y, alike."""
    builder = trt.Builder(lab.trt_logger())
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    tensor = network.add_input("x", trt.float32, (-1, 16, 64, 64))
    weights = []  # TensorRT does not copy them: they must live until the build is done
    for seed in range(4):
        weights.append(np.random.default_rng(seed).integers(-1, 2, (16, 16, 3, 3)).astype(np.float32))
        layer_ = network.add_convolution_nd(tensor, 16, (3, 3), trt.Weights(weights[-1]))
        layer_.padding_nd = (1, 1)
        softmax = network.add_softmax(layer_.get_output(0))
        softmax.axes = 1 << 1
        tensor = softmax.get_output(0)
    tensor.name = "y"
    network.mark_output(tensor)
    config = builder.create_builder_config()
    config.builder_optimization_level = 1
    config.progress_monitor = lab.build_progress()
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, 16, 64, 64), (4, 16, 64, 64), (32, 16, 64, 64))
    config.add_optimization_profile(profile)
    with lab.timing_cache(config):
        return bytes(require(builder.build_serialized_network(network, config), "构建"))


runtime = trt.Runtime(lab.trt_logger())
plan = small_network_plan()
engine = require(runtime.deserialize_cuda_engine(plan), "载入")
context = require(engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED), "创建上下文")


def infer(batch, source, target, allocate):
    """Enqueue on `stream` with a workspace from allocate(nbytes), given back to the stream afterwards. Returns its bytes."""
    require(context.set_input_shape("x", (batch, 16, 64, 64)), "设置形状")
    nbytes = max(int(context.update_device_memory_size_for_shapes()), 512)
    require(context.set_tensor_address("x", source.data.ptr), "设置 x 的地址")
    require(context.set_tensor_address("y", target.data.ptr), "设置 y 的地址")
    workspace = lab.check_cuda(allocate(nbytes))
    context.set_device_memory(workspace, nbytes)
    require(context.execute_async_v3(stream.ptr), "入队")
    lab.check_cuda(cudart.cudaFreeAsync(workspace, stream.ptr))
    return nbytes


def from_stream(nbytes):
    return cudart.cudaMallocAsync(nbytes, stream.ptr)  # in a capture this becomes a node


BATCHES = (32, 8, 1)
trim_graphs()
rows, needs, engine_graphs = [], [], []
for batch in BATCHES:
    data = np.random.default_rng(batch).random((batch, 16, 64, 64), dtype=np.float32)
    with stream:
        source, by_pool, by_graph = cp.asarray(data), cp.zeros(data.shape, cp.float32), cp.zeros(data.shape, cp.float32)
    needs.append(infer(batch, source, by_pool, from_stream))  # the warm-up, and the answer to compare with
    stream.synchronize()
    with capturing(stream) as captured:
        infer(batch, source, by_graph, from_stream)
    engine_graphs.append(OwnedGraph(captured[0]))
    kinds = node_kinds(captured[0])
    engine_graphs[-1]()
    stream.synchronize()
    far = float(cp.abs(by_pool - by_graph).max())
    rows.append((batch, f"{needs[-1] / MIB:.2f}", f"分配 {kinds.get('MemAlloc', 0)}，释放 {kinds.get('MemFree', 0)}", f"{far:.1e}", f"{graph_bytes('ReservedMemCurrent') / MIB:.0f}"))
lab.say(lab.table(("批大小", "工作区 MiB", "图里的内存节点", "和逐个启动最大差", "图的显存 reserved MiB"), rows))
lab.say(f"三张图的工作区相加 {sum(needs) / MIB:.1f} MiB，最大的一块 {max(needs) / MIB:.1f} MiB；默认的 STATIC 上下文每个要 {engine.device_memory_size_v2 / MIB:.1f} MiB。")
for graph in engine_graphs:
    graph.close()
trim_graphs()

# %% [markdown]
# 前处理的暂存区、引擎的工作区、后处理的暂存区，都这样写进同一张图，图跑完就全部让出来；几张图轮流用同一份。
# 要注意的只有一条：这些图**不能同时跑在两条流上还指望只占一份**，那时驱动会各配一份，正确，但不省。
#
# TensorRT 还有另一扇门：给 `runtime.gpu_allocator` 一个自己写的分配器，继承 `trt.IGpuAsyncAllocator`，它就向你要**长住**的显存：
# 引擎的权重、STATIC 上下文的工作区。让它们都从一个自己的池子里来，这本账就一眼看得清：

# %% tags=["demo", "gpu"]
class PoolAllocator(trt.IGpuAsyncAllocator):
    """TensorRT's own memory, from a pool of ours. It must outlive all that was allocated through it."""

    def __init__(self, pool):
        trt.IGpuAsyncAllocator.__init__(self)  # not super(): the bindings ask for it
        self.pool = pool

    def allocate_async(self, size, alignment, flags, stream):
        error, address = cudart.cudaMallocFromPoolAsync(size, self.pool, stream)  # a multiple of 512: aligned well enough
        return 0 if int(error) else int(address)

    def deallocate_async(self, memory, stream):
        return int(cudart.cudaFreeAsync(int(memory), stream)[0]) == 0


trt_pool = make_pool(0)
allocator = PoolAllocator(trt_pool)
rows = [("开始", f"{pool_bytes(trt_pool, 'UsedMemCurrent') / MIB:.2f}")]
pooled_runtime = trt.Runtime(lab.trt_logger())
pooled_runtime.gpu_allocator = allocator
pooled_engine = require(pooled_runtime.deserialize_cuda_engine(plan), "载入")
rows.append(("载入引擎", f"{pool_bytes(trt_pool, 'UsedMemCurrent') / MIB:.2f}"))
static_context = require(pooled_engine.create_execution_context(), "创建上下文")
rows.append(("创建 STATIC 上下文", f"{pool_bytes(trt_pool, 'UsedMemCurrent') / MIB:.2f}"))
del static_context
rows.append(("上下文没有了", f"{pool_bytes(trt_pool, 'UsedMemCurrent') / MIB:.2f}"))
del pooled_engine, pooled_runtime
rows.append(("引擎也没有了", f"{pool_bytes(trt_pool, 'UsedMemCurrent') / MIB:.2f}"))
cp.cuda.Device().synchronize()
lab.check_cuda(cudart.cudaMemPoolDestroy(trt_pool))
lab.say(lab.table(("这一步之后", "池子的 used MiB"), rows))

# %% [markdown]
# 长住的由分配器管，随请求来去的由图管，各记各的账。

# %% [markdown]
# ## 练习
#
# 练习里可以用的给定名字：`stream`、`MIB`、`KEEP_ALL`、`DEVICE`、`launch_request`、`make_pool`、`set_threshold`、`pool_bytes`、`graph_bytes`、
# `capturing`、`node_kinds`、`OwnedGraph`、`launch_spin`、`stirred`、`requested`、`served`、`layer`、`layered`，以及 `np`、`cp`、`cudart`、`driver`、`gc`、`partial`、`lab`。
# 演示单元里的名字（比如 `trim_graphs`、`driver_pool_restored`、`xs`）考试时不存在，需要就自己写。
#
# 没有特别说明时，工作都排在 `stream` 上。动过的设置（分配器、默认池的门槛、当前池）要还原：考试的进程里，别的练习还要用。
#
# ### 练习一：池子的账本，不用 GPU（3 分）
#
# 把池子的规则写成一个模型。`replay_account(events, threshold)` 从一个空池子开始，依次处理事件：
#
# | 事件 | 规则 |
# |:--|:--|
# | `("alloc", 名字, 字节)` | 借出这么多。空着的够用就用空着的，不够就向驱动再要，**刚好补到够** |
# | `("free", 名字)` | 还回池子，名字以后可以再用；没有借出的名字：抛 `ValueError` |
# | `("sync",)` | 把空着的一个字节一个字节地交还给驱动，直到 reserved 不超过 `threshold`，或者已经没有空着的 |
# | `("trim", 字节)` | 同样交还空着的，但界限是这次给的字节 |
# | `("reset",)` | 两个最高水位清零，从当前值重新开始 |
#
# 空着的显存当作可以随意切、随意拼（不管碎片），释放立刻记账。同一个名字还没有释放又 `alloc`：抛 `ValueError`。
#
# 返回列表 `[used, reserved, used_high, reserved_high, grown]`，前四个是最后的值（字节），`grown` 是向驱动**再要过几次**。
#
# 向驱动要一次就慢一次，`grown` 少就快；reserved 低就省。有了这个模型，门槛可以在纸上挑。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 池子的状态只有几个数？每个事件改哪一个？`alloc` 以后 reserved 至少是多少？
# `sync` 和 `trim` 其实是同一件事，界限不同：交还以后，reserved 不能低于什么？本来就低于界限的池子，会不会因为修剪反而变大？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 只用 Python：一个字典记着谁借了多少；`max`、`min`。事件的第一项是种类：`kind, *rest = event`。
# 最高水位在每次变大以后更新。
#
# </details>

# %% solution="replay_account"
def replay_account(events, threshold):
    """Replay events on a model of an empty pool with this release threshold (bytes).

    events: iterable of ("alloc", name, nbytes), ("free", name), ("sync",), ("trim", nbytes), ("reset",).
    Returns [used, reserved, used_high, reserved_high, grown]. ValueError: a free of what is not lent, an alloc of a name
    that is.
    """
    ### BEGIN SOLUTION: 记住谁借了多少和四个数；逐个处理事件，每个事件想清楚 used 和 reserved 各怎么变
    lent = {}
    used = reserved = used_high = reserved_high = grown = 0
    for kind, *rest in events:
        if kind == "alloc":
            name, nbytes = rest
            if name in lent:
                raise ValueError(f"{name} 还没有释放")
            lent[name] = nbytes
            used += nbytes
            grown += used > reserved
            reserved = max(reserved, used)
        elif kind == "free":
            if rest[0] not in lent:
                raise ValueError(f"{rest[0]} 没有借出")
            used -= lent.pop(rest[0])
        elif kind == "reset":
            used_high, reserved_high = used, reserved
        else:
            keep = threshold if kind == "sync" else rest[0]
            reserved = min(reserved, max(used, keep))
        used_high, reserved_high = max(used_high, used), max(reserved_high, reserved)
    return [used, reserved, used_high, reserved_high, grown]
    ### END SOLUTION


# %% test="replay_account" kind="answer" points=3
events = [("alloc", "a", 60), ("alloc", "b", 40), ("free", "a"), ("sync",)]
check.equal(student.replay_account(events, 0), [40, 40, 100, 100, 2], why="门槛 0：同步以后只剩借出去的 40；两次分配都要向驱动拿。")
check.equal(student.replay_account(events, 70), [40, 70, 100, 100, 2], why="门槛 70：同步时交还空着的，直到 reserved 不超过 70。")
check.equal(student.replay_account([*events, ("alloc", "c", 30)], 70), [70, 70, 100, 100, 2], why="池里空着 30，正好够，不用向驱动再要。")
check.equal(student.replay_account([*events, ("alloc", "c", 31)], 70), [71, 71, 100, 100, 3], why="空着的不够：只补差的那一点，算再要一次。")
check.equal(student.replay_account([*events, ("trim", 90)], 200), [40, 90, 100, 100, 2], why="修剪的界限是这次给的字节，和门槛无关。")
check.raises("ValueError", student.replay_account, [("free", "a")], 0, why="释放没有借出的名字，应当抛 ValueError。")
### BEGIN HIDDEN TESTS
def rules(events, threshold):
    lent, used, reserved, highs, grown = {}, 0, 0, [0, 0], 0
    for event in events:
        if event[0] == "alloc":
            lent[event[1]] = event[2]
            used = sum(lent.values())
            if used > reserved:
                reserved, grown = used, grown + 1
        elif event[0] == "free":
            del lent[event[1]]
            used = sum(lent.values())
        elif event[0] == "reset":
            highs = [used, reserved]
        else:
            limit = threshold if event[0] == "sync" else event[1]
            if reserved > limit:
                reserved = max(limit, used)
        highs = [max(highs[0], used), max(highs[1], reserved)]
    return [used, reserved, *highs, grown]


def random_events(count):
    events, lent, past = [], [], []
    for number in range(count):
        draw = secret.random()
        if draw < 0.4 or not lent:
            again = past and secret.random() < 0.5
            lent.append(past.pop() if again else f"n{secret.integers(0, 1000)}_{number}")
            events.append(("alloc", lent[-1], int(secret.integers(1, 500))))
        elif draw < 0.7:
            past.append(lent.pop(int(secret.integers(0, len(lent)))))
            events.append(("free", past[-1]))
        elif draw < 0.85:
            events.append(("sync",))
        elif draw < 0.95:
            events.append(("trim", int(secret.integers(0, 1500))))
        else:
            events.append(("reset",))
    return events


cases = [(random_events(int(secret.integers(5, 60))), int(secret.integers(0, 1500))) for _ in range(40)]
got = [student.replay_account(*case) for case in cases]
check.equal(got, [rules(*case) for case in cases], why="几十个池子一起看，有的账不对。逐个事件对照规则表：修剪会不会让 reserved 变大？最高水位清零以后从哪里开始？还掉的名字再来分配呢？")
check.equal(student.replay_account([], 5), [0, 0, 0, 0, 0], why="没有事件，就是一个空池子。")
for begun in ([], [("alloc", "b", 3)]):
    check.raises("ValueError", student.replay_account, [*begun, ("alloc", "a", 1), ("free", "a"), ("free", "a")], 9, why="释放两次，第二次应当抛 ValueError，不管还有没有别的名字借着。")
    check.raises("ValueError", student.replay_account, [("alloc", "a", 1), *begun, ("alloc", "a", 2)], 9, why="还没有释放的名字又来分配，应当抛 ValueError。")
### END HIDDEN TESTS

# %% [markdown]
# 用你的模型给上面那段流量挑门槛：横轴是门槛，看“向驱动再要几次”（实线，左轴）和“清闲时占多少”（虚线，右轴，就是最后的 reserved）各怎么变。（要先做完练习一；不需要 GPU。）

# %% tags=["demo"]
import matplotlib.pyplot as plt

lab.plot_style()
chooser = np.random.default_rng(22)
day_mib = [*[16] * 10, *(int(mib) for mib in chooser.choice((64, 128, 192, 256), 20)), *[16] * 10]
day_events = [event for number, mib in enumerate(day_mib) for event in (("alloc", number, mib), ("free", number), ("sync",))]
thresholds = range(0, 321, 16)
outcomes = [replay_account(day_events, threshold) for threshold in thresholds]
fig, ax = plt.subplots()
ax.plot(thresholds, [outcome[4] for outcome in outcomes], color="C0")
ax.set_xlabel("门槛（MiB）")
ax.set_ylabel("向驱动再要几次", color="C0")
right_axis = ax.twinx()
right_axis.grid(visible=False)
right_axis.plot(thresholds, [outcome[1] for outcome in outcomes], color="C1", linestyle="--")
right_axis.set_ylabel("最后 reserved（MiB，虚线）")
ax.set_title("模型：同一段流量，不同的门槛")
plt.show()
first = next(threshold for threshold, outcome in zip(thresholds, outcomes, strict=True) if outcome[4] == outcomes[-1][4])
lab.say(
    f"门槛 0：再要 {outcomes[0][4]} 次；16 MiB：{outcomes[1][4]} 次；从 {first} MiB 起不再变少，是 {outcomes[-1][4]} 次。",
    measured=False,
)

# %% [markdown]
# 真的池子和模型差在哪里？它向驱动要、交还，都以大块为单位；空着的也不能随意拼；释放也不一定立刻记账，
# 有时要到同步或修剪，used 才变小。把一串事件在真池子上走一遍，和模型对照；
# 再专门试试碎片：借十六块 10 MiB，隔一块还一块，空出来的总数够 40 MiB，却不相连。


# %% tags=["demo", "gpu"]
TRIAL = [("alloc", "a", 96), ("alloc", "b", 64), ("free", "a"), ("sync",), ("alloc", "c", 32), ("free", "b"), ("free", "c"), ("trim", 64), ("sync",)]
real_pool, blocks, rows = make_pool(64 * MIB), {}, []
for position, (kind, *rest) in enumerate(TRIAL, 1):
    if kind == "alloc":
        blocks[rest[0]] = lab.check_cuda(cudart.cudaMallocFromPoolAsync(rest[1] * MIB, real_pool, stream.ptr))
    elif kind == "free":
        lab.check_cuda(cudart.cudaFreeAsync(blocks.pop(rest[0]), stream.ptr))
    elif kind == "sync":
        stream.synchronize()
    else:
        stream.synchronize()  # only what has been freed for good can be given back
        lab.check_cuda(cudart.cudaMemPoolTrimTo(real_pool, rest[0] * MIB))
    modelled = replay_account(TRIAL[:position], 64)
    real = [pool_bytes(real_pool, name) / MIB for name in ("UsedMemCurrent", "ReservedMemCurrent")]
    rows.append((f"`{(kind, *rest)}`", modelled[0], f"{real[0]:.0f}", modelled[1], f"{real[1]:.0f}"))
stream.synchronize()
set_threshold(real_pool, KEEP_ALL)
tenths = [lab.check_cuda(cudart.cudaMallocFromPoolAsync(10 * MIB, real_pool, stream.ptr)) for _ in range(16)]
for address in tenths[::2]:
    lab.check_cuda(cudart.cudaFreeAsync(address, stream.ptr))
stream.synchronize()
used_then, reserved_then = (pool_bytes(real_pool, name) / MIB for name in ("UsedMemCurrent", "ReservedMemCurrent"))
tenths = [*tenths[1::2], lab.check_cuda(cudart.cudaMallocFromPoolAsync(40 * MIB, real_pool, stream.ptr))]
reserved_now = pool_bytes(real_pool, "ReservedMemCurrent") / MIB
for address in tenths:
    lab.check_cuda(cudart.cudaFreeAsync(address, stream.ptr))
stream.synchronize()
lab.check_cuda(cudart.cudaMemPoolDestroy(real_pool))
lab.say(lab.table(("事件（MiB），门槛 64", "used 模型", "used 真的", "reserved 模型", "reserved 真的"), rows))
lab.say(
    f"碎片：空着 **{reserved_then - used_then:.0f} MiB**，要 40 MiB，reserved 从 {reserved_then:.0f} 变成 **{reserved_now:.0f} MiB**"
    + ("：空着的够数，却一块也用不上。" if reserved_now > reserved_then else "：这一次够用。")
)

# %% [markdown]
# ### 练习二：三本账，谁漏了、谁只是留着（3 分）
#
# 有人给你一段工作 `work()`，说它“吃显存”。写 `audit(work, pool)`：调用一次 `work()`，查出三本账各发生了什么。
#
# 返回八个数（字节，都是**和调用之前相比多了多少**）：
#
# `[池 left, 池 peak, 池 kept, 图 left, 图 peak, 图 kept, CuPy left, CuPy kept]`
#
# - **池**是传进来的 `pool`（`cudaMemPool_t`），**图**是图的显存，**CuPy** 是默认的 `MemoryPool`（`cp.get_default_memory_pool()`）；
# - **left**：工作全部做完、该回收的都回收以后，还借着没还的，也就是泄漏；
# - **peak**：`work()` 期间 used 的最高点，比调用之前的 used 高多少（CuPy 的池没有最高水位，不用报）；
# - **kept**：工作做完以后 reserved 多了多少。图的 kept 在你修剪**之前**读。
#
# 要当心的：
#
# - `work()` 返回的时候，GPU 可能还没做完（`work()` 可能用到别的流）；
# - Python 里不再可达、但还没有回收的数组，不算泄漏；
# - 调用之前，三本账都不一定是零，最高水位也不一定；
# - 图的 used 有时要到 `cudaDeviceGraphMemTrim` 才划掉已经释放的，所以图的 left 在修剪之后读。调用之前也先修剪，再读图的基准，used 和 reserved 都是；
# - 查账的人不动账：`pool` 和 CuPy 的池留着多少，查完还是多少；`pool` 的门槛不变。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 每个数要读两次，各在什么时候？读之前，哪些事情必须先做完？
# 最高水位是“上次清零以来”的：什么时候清零？调用之前已经借出去的，算不算在 peak 里？
# 图的三个数里，哪两个要在修剪之前读？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 等：`gc.collect()`，然后 `cp.cuda.Device().synchronize()`。读：`pool_bytes(pool, 名字)`、`graph_bytes(名字)`、
# `cp.get_default_memory_pool().used_bytes()` 和 `.total_bytes()`。修剪：`cudart.cudaDeviceGraphMemTrim(DEVICE)`。
# 清零：`cudart.cudaMemPoolSetAttribute(pool, cudart.cudaMemPoolAttr.cudaMemPoolAttrUsedMemHigh, driver.cuuint64_t(0))`、
# `cudart.cudaDeviceSetGraphMemAttribute(DEVICE, cudart.cudaGraphMemAttributeType.cudaGraphMemAttrUsedMemHigh, driver.cuuint64_t(0))`。
# 都用 `lab.check_cuda(…)` 包起来。
#
# </details>

# %% solution="audit" tags=["gpu"]
def audit(work, pool):
    """Call work() once and tell what it did to three accounts, in bytes more than before.

    work: function without arguments; it may use any stream. pool: cudaMemPool_t, changed by nothing but work.
    Returns [pool left, pool peak, pool kept, graph left, graph peak, graph kept, CuPy left, CuPy kept].
    """
    ### BEGIN SOLUTION: 先等、先收、先修剪，再读基准、清最高水位；做完以后按同样的次序读第二遍，图的账在修剪前后各读一部分
    cupy_pool = cp.get_default_memory_pool()
    zero = driver.cuuint64_t(0)

    def settle():
        gc.collect()
        cp.cuda.Device().synchronize()

    def trim():
        lab.check_cuda(cudart.cudaDeviceGraphMemTrim(DEVICE))

    settle()
    trim()
    pool_used, pool_reserved = pool_bytes(pool, "UsedMemCurrent"), pool_bytes(pool, "ReservedMemCurrent")
    graph_used, graph_reserved = graph_bytes("UsedMemCurrent"), graph_bytes("ReservedMemCurrent")
    cupy_used, cupy_total = cupy_pool.used_bytes(), cupy_pool.total_bytes()
    lab.check_cuda(cudart.cudaMemPoolSetAttribute(pool, cudart.cudaMemPoolAttr.cudaMemPoolAttrUsedMemHigh, zero))
    lab.check_cuda(cudart.cudaDeviceSetGraphMemAttribute(DEVICE, cudart.cudaGraphMemAttributeType.cudaGraphMemAttrUsedMemHigh, zero))
    work()
    settle()
    graph_peak, graph_kept = graph_bytes("UsedMemHigh") - graph_used, graph_bytes("ReservedMemCurrent") - graph_reserved
    trim()
    return [
        pool_bytes(pool, "UsedMemCurrent") - pool_used,
        pool_bytes(pool, "UsedMemHigh") - pool_used,
        pool_bytes(pool, "ReservedMemCurrent") - pool_reserved,
        graph_bytes("UsedMemCurrent") - graph_used,
        graph_peak,
        graph_kept,
        cupy_pool.used_bytes() - cupy_used,
        cupy_pool.total_bytes() - cupy_total,
    ]
    ### END SOLUTION


# %% test="audit" kind="structure" points=3 tags=["gpu"]
# Work with known effects. Leaked memory is given back afterwards, so that one case does not disturb the next.
PLANTED = """
import gc

import cupy
from cuda.bindings import driver, runtime

MIB = 1 << 20
DEVICE = cupy.cuda.Device().id
POOL, GRAPH = runtime.cudaMemPoolAttr, runtime.cudaGraphMemAttributeType
side = cupy.cuda.Stream(non_blocking=True)


def checked(result):
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) > 1 else None


def pool_now(pool, name):
    return int(checked(runtime.cudaMemPoolGetAttribute(pool, getattr(POOL, "cudaMemPoolAttr" + name))))


def graph_used():
    cupy.cuda.runtime.deviceSynchronize()
    checked(runtime.cudaDeviceGraphMemTrim(DEVICE))
    return int(checked(runtime.cudaDeviceGetGraphMemAttribute(DEVICE, GRAPH.cudaGraphMemAttrUsedMemCurrent)))


def graph_of(mib, freed):
    \"\"\"A graph made, launched and destroyed that allocates so much, and frees it again or not. Returns the address.\"\"\"
    checked(runtime.cudaStreamBeginCapture(side.ptr, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
    address = checked(runtime.cudaMallocAsync(mib * MIB, side.ptr))
    checked(runtime.cudaMemsetAsync(address, 1, mib * MIB, side.ptr))
    if freed:
        checked(runtime.cudaFreeAsync(address, side.ptr))
    graph = checked(runtime.cudaStreamEndCapture(side.ptr))
    executable = checked(runtime.cudaGraphInstantiate(graph, 0))
    checked(runtime.cudaGraphLaunch(executable, side.ptr))
    checked(runtime.cudaGraphExecDestroy(executable))
    checked(runtime.cudaGraphDestroy(graph))
    return address


def case(audit, make_pool, launch_spin, before, pooled, graphed, arrays, garbage):
    \"\"\"[what audit told, [pool's reserved before, after, CuPy's total before, after, threshold kept?, graph memory left]].

    before: MiB lent by the pool, and once more lent and freed, before the audit. pooled, graphed: [[MiB, freed again?], ...].
    arrays: MiB kept. garbage: MiB held by a reference cycle. Graphs, too, hold 192 MiB before the audit, and have held more.
    \"\"\"
    threshold = 1 << 40
    pool = make_pool(threshold)
    early = [checked(runtime.cudaMallocFromPoolAsync(before * MIB, pool, side.ptr)) for _ in range(3)]
    for address in early[1:]:
        checked(runtime.cudaFreeAsync(address, side.ptr))
    kept, debts = [], [graph_of(192, False)]
    graph_of(320, True)

    def work():
        with side:
            launch_spin(20000)
        for mib, freed in pooled:
            address = checked(runtime.cudaMallocFromPoolAsync(mib * MIB, pool, side.ptr))
            if freed:
                checked(runtime.cudaFreeAsync(address, side.ptr))
            else:
                debts.append(address)
        for mib, freed in graphed:
            address = graph_of(mib, freed)
            if not freed:
                debts.append(address)
        with side:
            kept.extend(cupy.empty(mib * MIB, cupy.uint8) for mib in arrays)
            for mib in garbage:
                ring = [cupy.empty(mib * MIB, cupy.uint8)]
                ring.append(ring)

    gc.collect()
    in_graphs = graph_used()
    with side:
        spare = cupy.empty(3 * MIB, cupy.uint8)
        del spare  # CuPy's pool keeps it
    cupy_pool = cupy.get_default_memory_pool()
    reserved, total = pool_now(pool, "ReservedMemCurrent"), cupy_pool.total_bytes()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        told = [int(value) for value in audit(work, pool)]
        after = [reserved, pool_now(pool, "ReservedMemCurrent"), total, cupy_pool.total_bytes(), int(pool_now(pool, "ReleaseThreshold") == threshold)]
        after.append(graph_used() - in_graphs)
    finally:
        if was_enabled:
            gc.enable()
        cupy.cuda.runtime.deviceSynchronize()
        for address in [*debts, early[0]]:
            runtime.cudaFreeAsync(address, side.ptr)
        kept.clear()
        cupy.cuda.runtime.deviceSynchronize()
        runtime.cudaDeviceGraphMemTrim(DEVICE)
        runtime.cudaMemPoolDestroy(pool)
        gc.collect()
    return [told, after]
"""
case = student.define(PLANTED, "case")
given = [student.value(name) for name in ("audit", "make_pool", "launch_spin")]
MB = 1 << 20
told, after = case(*given, 4, [[8, True], [16, False]], [], [], [])
check.equal(told[:2], [16 * MB, 16 * MB], why="池子：借 8 MiB、还掉，再借 16 MiB、没有还。泄漏 16，最高点也是 16（先还了那 8）。work 返回以后，等它在别的流上做完了吗？")
check.equal(told[2], after[1] - after[0], why="池 kept 应当是 reserved 的变化。读之前要等，读的时候不要修剪 pool。")
told, after = case(*given, 2, [], [[32, False], [32, True]], [2], [4])
check.equal(told[3], after[5], why="图：两张，各 32 MiB，一张没有还，一张在图里还了。等 GPU 做完、修剪以后还在的才是泄漏。")
check.equal(told[6], 2 * MB, why="CuPy：2 MiB 有人拿着；另外 4 MiB 已经没有人用，只是等着回收，不算泄漏。")
### BEGIN HIDDEN TESTS
for _ in range(4):
    before = int(secret.integers(1, 12))
    pooled = [[int(mib), bool(freed)] for mib, freed in zip(secret.integers(1, 20, 6), secret.integers(0, 2, 6), strict=True)]
    graphed = [[32, bool(freed)] for freed in secret.integers(0, 2, int(secret.integers(1, 4)))] + [[32, True]]
    arrays, garbage = [int(mib) for mib in secret.integers(1, 6, 2)], [int(mib) for mib in secret.integers(1, 6, 2)]
    told, after = case(*given, before, pooled, graphed, arrays, garbage)
    lent = peak = 0
    for mib, freed in pooled:
        peak = max(peak, lent + mib)
        lent += 0 if freed else mib
    leaked = sum(mib for mib, freed in graphed if not freed)
    check.equal(told[:2], [lent * MB, peak * MB], why="换一段工作，池子的 left 或 peak 不对。调用之前借出去的不算；最高水位清零了吗，是在调用之前清的吗？")
    check.equal(told[2], after[1] - after[0], why="换一段工作，池子的 kept 不对。")
    check.equal(told[3], after[5], why="换一段工作，图的 left 不对。先等、再修剪、再读。")
    check.that(told[4] >= max(leaked, 32) * MB, why="图的 peak 太小：最高水位要在调用之前清零，之后、修剪之前读。")
    check.that(told[5] >= told[3] and told[5] > 0, why="图的 kept 不对：它要在修剪之前读，这时候释放了的也还留着。")
    most = (32 * len(graphed) + 32) * MB  # all of them at once, and some for rounding up
    check.that(told[4] <= most, why="图的 peak 太大，比 work() 里所有的图加起来还多：以前的最高水位清零了吗，调用之前就在用的减掉了吗？")
    check.that(told[5] <= most, why="图的 kept 太大，比 work() 里所有的图加起来还多：要减去调用之前、修剪以后的 reserved。")
    check.equal(told[6], sum(arrays) * MB, why="换一段工作，CuPy 的 left 不对。")
    check.equal(told[7], after[3] - after[2], why="CuPy 的 kept 应当是 total_bytes 的变化；查账的人不要 free_all_blocks。")
    check.that(after[1] >= after[0] and after[3] >= after[2], why="查账以后，pool 或 CuPy 的池留着的变少了：查账的人不动账，不修剪，也不 free_all_blocks。")
    check.equal(after[4], 1, why="查账以后，pool 的门槛变了。")
told, after = case(*given, 20, [[1, True]], [[32, True]], [], [])
check.equal(told[:3], [0, MB, 0], why="一段只借 1 MiB 的小工作，前面有过大得多的最高水位：peak 应当只有 1 MiB。也不要替 pool 修剪掉它原来留着的。")
check.that(after[1] >= after[0], why="查账以后，pool 留着的变少了：查账的人不修剪 pool。")
check.that(told[5] >= 32 * MB, why="图里释放了的显存，做完以后还留着：图的 kept 要在修剪之前读。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：没有改过的代码，图自己管暂存（3 分）
#
# 写 `capture_scratch(work)`：在 `stream` 上捕获一次 `work()`，里面 CuPy 产生的每个临时数组都由图自己分配、自己释放。`work` 是普通的 CuPy 代码，
# 比如 `partial(layer, x)`，已经预热过，你不能改它。
#
# - 返回给定的 `OwnedGraph`；捕获本身不改变任何数据；
# - 临时数组变成分配节点和释放节点，一样多；图可以反复启动几百次，占用平坦；
# - 分配器只在捕获期间、只在这个线程里换掉：返回以后，或者 `work()` 抛出异常以后，`cp.cuda.get_allocator()` 和调用之前一样，
#   默认池的门槛、设备的当前池也没有动过，`stream` 不在捕获中；
# - `work()` 的异常原样出去；
# - 有数组从 `work()` 里**逃了出去**（图里的分配比释放多）：这样的图第二次启动会被拒绝，所以销毁它，抛 `ValueError`；
# - 捕获期间不能有垃圾回收：回收到一个捕获之前的流序数组，它的释放会被录进这张图。进来之前先收一次，里面关掉，
#   离开时恢复**原来的**状态（原来就关着，就还关着）。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 哪个分配器会让分配变成节点？怎样换，才能保证出错时也换回来？两层 `with`，谁在外、谁在里？
# 怎么知道有没有数组逃出去：谁能告诉你图里有几个分配、几个释放？发现以后，半成品归谁销毁？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `cp.cuda.using_allocator(cp.cuda.malloc_async)` 和 `capturing(stream)` 都是上下文管理器。
# `gc.isenabled()`、`gc.collect()`、`gc.disable()`、`gc.enable()`，恢复放在 `finally`。
# `node_kinds(定义)` 返回字典，键是 `"MemAlloc"`、`"MemFree"`，没有的键不出现：用 `.get(键, 0)`。
# `lab.check_cuda(cudart.cudaGraphDestroy(定义))`，`OwnedGraph(定义)`。
#
# </details>

# %% solution="capture_scratch" tags=["gpu"]
def capture_scratch(work):
    """Capture work() on `stream` such that CuPy's temporary arrays are allocated and freed by the graph.

    work: function without arguments, warmed up, that launches on the current stream. What it raises goes on.
    Returns an OwnedGraph. ValueError if an array outlives the capture: then nothing is left of the graph.
    The allocator, the pools' settings and the garbage collector's state are afterwards what they were before.
    """
    ### BEGIN SOLUTION: 收一次垃圾并关掉回收，换上流序的分配器，捕获；离开时都恢复；数一数分配和释放，不一样多就销毁并拒绝
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with cp.cuda.using_allocator(cp.cuda.malloc_async), capturing(stream) as captured:
            work()
    finally:
        if collecting:
            gc.enable()
    definition = captured[0]
    kinds = node_kinds(definition)
    escaped = kinds.get("MemAlloc", 0) - kinds.get("MemFree", 0)
    if escaped:
        lab.check_cuda(cudart.cudaGraphDestroy(definition))
        raise ValueError(f"有 {escaped} 个数组从 work() 里逃了出去，图里没有它们的释放")
    return OwnedGraph(definition)
    ### END SOLUTION


# %% test="capture_scratch" kind="structure" points=3 tags=["gpu"]
# Captures, and looks at what is left around it.
SCENES = """
import ctypes
import gc
import weakref

import cupy
import numpy as np
from cuda.bindings import runtime


class Planned(Exception):
    pass


def step(x, rounds):
    for i in range(rounds):
        mixed = x * np.uint32(0x2C1B3C6D)
        mixed ^= mixed >> np.uint32(12)
        x ^= mixed + np.uint32(i)


def make_work(stream, x, rounds):
    with stream:
        step(x, 1)  # compiles; x is filled anew by the caller
    stream.synchronize()
    return lambda: step(x, rounds)


def surroundings(stream):
    device = cupy.cuda.Device().id
    default = runtime.cudaDeviceGetDefaultMemPool(device)[1]
    threshold = int(runtime.cudaMemPoolGetAttribute(default, runtime.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold)[1])
    current = int(runtime.cudaDeviceGetMemPool(device)[1])
    capturing = int(runtime.cudaStreamIsCapturing(stream.ptr)[1])
    return [threshold, current, capturing, int(gc.isenabled())]


def trial(name, capture_scratch, stream, x):
    \"\"\"[exception, settings changed, allocator changed, garbage gone inside, collector on inside, definitions left, alloc nodes, frees].\"\"\"
    inside = []
    pool = cupy.cuda.MemoryPool()

    class Mark:
        pass

    mark = Mark()
    mark.me = mark
    gone = weakref.ref(mark)
    destroyed, ended = [], []
    destroy, end = runtime.cudaGraphDestroy, runtime.cudaStreamEndCapture

    def counted_destroy(graph):
        destroyed.append(int(graph))
        return destroy(graph)

    def counted_end(queue):
        result = end(queue)
        if int(result[0]) == 0:
            ended.append(int(result[1]))
        return result

    def work():
        inside.append([int(gone() is None), int(gc.isenabled())])
        if name == "raises":
            raise Planned  # before anything is allocated: a traceback would keep it alive
        mixed = x * np.uint32(3)
        if name == "escapes":
            escaped = x + np.uint32(1)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(escaped))  # never let go: its memory dies with the graph
        target = x
        target ^= mixed

    x_before = x.get(stream=stream)
    stream.synchronize()
    was_enabled = gc.isenabled()
    raised, kinds = "", [0, 0]
    with cupy.cuda.using_allocator(pool.malloc):
        with stream:
            warm = x * np.uint32(3)
            warm ^= warm + np.uint32(1)
            del warm
        stream.synchronize()
        if name == "off":
            gc.disable()
        before, allocator = surroundings(stream), cupy.cuda.get_allocator()
        del mark
        runtime.cudaGraphDestroy, runtime.cudaStreamEndCapture = counted_destroy, counted_end
        try:
            graph = capture_scratch(work)
            count = runtime.cudaGraphGetNodes(graph.graph, 0)[-1]
            names = [runtime.cudaGraphNodeGetType(node)[1].name for node in runtime.cudaGraphGetNodes(graph.graph, count)[1]]
            kinds = [sum(kind.endswith(word) for kind in names) for word in ("MemAlloc", "MemFree")]
            graph.close()
        except NotImplementedError:
            raise
        except BaseException as error:
            raised = type(error).__name__
        finally:
            runtime.cudaGraphDestroy, runtime.cudaStreamEndCapture = destroy, end
        changed = [int(a != b) for a, b in zip(before, surroundings(stream))]
        allocator_changed = int(cupy.cuda.get_allocator() != allocator)
        gc.enable() if was_enabled else gc.disable()
        if int(runtime.cudaStreamIsCapturing(stream.ptr)[1]):
            runtime.cudaStreamEndCapture(stream.ptr)
        runtime.cudaGetLastError()
    left = len([graph for graph in ended if graph not in destroyed])
    gone_inside, on_inside = inside[0] if inside else [-1, -1]
    same = int(np.array_equal(x_before, x.get(stream=stream)))
    return [raised, sum(changed), allocator_changed, gone_inside, on_inside, left, *kinds, same]


def flat(capture_scratch, stream, x, times):
    \"\"\"Many graphs, one after the other: [used, reserved beyond one graph's, CuPy's total, device bytes] in the end.\"\"\"
    device, kinds = cupy.cuda.Device().id, runtime.cudaGraphMemAttributeType

    def graph_now(name):
        return int(runtime.cudaDeviceGetGraphMemAttribute(device, getattr(kinds, "cudaGraphMemAttr" + name))[1])

    pool = cupy.get_default_memory_pool()
    gc.collect()
    gc.freeze()  # what lives so far is left out of the many collections that follow: they take no time
    try:
        cupy.cuda.runtime.deviceSynchronize()
        runtime.cudaDeviceGraphMemTrim(device)
        used, high, one, total, free = graph_now("UsedMemCurrent"), 0, 0, 0, 0
        for number in range(times):
            graph = capture_scratch(lambda: step(x, 2))
            graph()
            graph()
            if number % 10 == 0 or number == times - 1:
                stream.synchronize()
                high = max(high, graph_now("ReservedMemCurrent"))
            graph.close()
            if number == 10:
                cupy.cuda.runtime.deviceSynchronize()
                one, total, free = high, pool.total_bytes(), cupy.cuda.runtime.memGetInfo()[0]
    finally:
        gc.unfreeze()
    cupy.cuda.runtime.deviceSynchronize()
    grown, lost = pool.total_bytes() - total, free - cupy.cuda.runtime.memGetInfo()[0]
    runtime.cudaDeviceGraphMemTrim(device)
    return [graph_now("UsedMemCurrent") - used, high - one, grown, lost]
"""
make_work, trial = student.define(SCENES, "make_work"), student.define(SCENES, "trial")
capture, queue = student.value("capture_scratch"), student.value("stream")
data = np.arange(5000, dtype=np.uint32)
x = on_gpu(data)
work = make_work(queue, x, 2)
x.write(data)
graph = student.capture_scratch(work)
check.equal(x.read(), data, why="捕获的时候 x 就变了，有工作落在了捕获之外。")
check.nodes(graph, allocs=(1, None), kernels=(1, None), why="图里没有分配节点：捕获期间的分配器还是一个在 CPU 上记账的池子。")
graph.run(1)
mixed = data.copy()
for i in range(2):
    scrambled = mixed * np.uint32(0x2C1B3C6D)
    scrambled = scrambled ^ (scrambled >> np.uint32(12))
    mixed = mixed ^ (scrambled + np.uint32(i))
check.equal(x.read(), mixed, why="重放一次，x 的结果不对。")
told = trial("plain", capture, queue, x)
check.equal(told[:3], ["", 0, 0], why="一次平常的捕获以后，分配器、默认池的门槛、当前池、回收器、流的状态应当和之前一样。")
told = trial("raises", capture, queue, x)
check.equal(told[:3], ["Planned", 0, 0], why="work() 抛出异常以后：异常应当原样出来，分配器和设置应当恢复，流不在捕获中。")
### BEGIN HIDDEN TESTS
told = trial("escapes", capture, queue, x)
check.equal(told[0], "ValueError", why="work() 把一个数组存进了外面的列表，图里的分配比释放多，应当抛 ValueError。")
check.equal([told[1], told[2], told[5]], [0, 0, 0], why="拒绝了逃出去的数组，但设置没有恢复，或者捕获到的定义没有销毁。")
told = trial("plain", capture, queue, x)
check.equal(told[3:5], [1, 0], why="进捕获之前没有收一次垃圾，或者捕获期间回收还开着。")
told = trial("off", capture, queue, x)
check.equal(told[1], 0, why="进来之前回收是关着的，离开时却被打开了（或者别的设置变了）。要恢复的是原来的状态。")
check.equal(told[3:5], [1, 0], why="进捕获之前没有收一次垃圾，或者捕获期间回收还开着。")
check.that(told[6] == told[7] and told[6] > 0, why="图里的分配节点和释放节点应当一样多。")
check.equal(told[8], 1, why="捕获改变了数据。")

# Whoever scratches in CuPy's pool writes over these arrays.
TENANTS = """
def tenants(stream, size):
    import gc, cupy
    gc.collect()
    arrays = [cupy.full(size, 0xA5A5A5A5, cupy.uint32) for _ in range(6)]
    with stream:
        arrays += [cupy.full(size, 0xA5A5A5A5, cupy.uint32) for _ in range(6)]
    cupy.cuda.runtime.deviceSynchronize()
    return arrays
"""
size, rounds = int(secret.integers(3000, 9000)), int(secret.integers(2, 5))
x = on_gpu(np.zeros(size, np.uint32))
work = make_work(queue, x, rounds)
graph = student.capture_scratch(work)
others = student.define(TENANTS, "tenants")(queue, size)
for runs in (1, int(secret.integers(2, 6)), 300):
    data = x.write(secret.integers(0, 2**32, size, dtype=np.uint32))
    graph.run(runs)
    for _ in range(runs):
        for i in range(rounds):
            scrambled = data * np.uint32(0x2C1B3C6D)
            scrambled = scrambled ^ (scrambled >> np.uint32(12))
            data = data ^ (scrambled + np.uint32(i))
    check.equal(x.read(), data, why="换一份数据，重放几次（最多几百次）以后结果不对。")
check.equal([one.numpy() for one in others], [np.full(size, 0xA5A5A5A5, np.uint32)] * len(others), why="重放写坏了别人的数组：暂存区来自 CuPy 的池，捕获以后又被分给了别人。")
graph.close()
big = on_gpu(secret.integers(0, 2**32, 1 << 18, dtype=np.uint32))
make_work(queue, big, 2)
flat = student.define(SCENES, "flat")
told = [flat(capture, queue, big, 100) for _ in range(3)]
check.equal([each[0] for each in told], [0, 0, 0], why="三百张图都关掉、修剪以后，图的显存 used 没有回到原来。")
check.that(max(each[1] for each in told) <= 4 << 20, why="一张接一张的图，图的显存 reserved 却一直在长：前面的图没有释放干净。")
check.that(max(each[2] for each in told) <= 4 << 20, why="三百张图以后，CuPy 的池子变大了：捕获期间还在向它要显存吗？")
check.that(min(each[3] for each in told) <= 32 << 20, why="三百张图以后，设备的空闲显存少了许多：有什么东西没有还。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：每个请求都要一块，也要快（3 分）
#
# `serve_plain` 是故事开头那个服务：每个请求 `cudaMalloc`，用完 `cudaFree`。每个请求做完都要把结果交出去，所以每个请求都等一次 `stream`，
# 这一次等待不能省。
#
# 补全 `PooledServer`，用一个**自己的**池子做同样的事：
#
# - `server = PooledServer()`：建好池子，放在 `server.pool`；默认池、当前池的设置不动；
# - `server(x, sizes)`：依次服务，第 `i` 个请求用 `sizes[i]` 字节的暂存区，`launch_request(x, 地址, sizes[i], i)`，还掉，等 `stream`。
#   `launch_request` 对不合规矩的大小抛 `ValueError`：异常原样出去，但那一块也要还，之前的请求照样算数；
# - 忙的时候不把显存交还给驱动；
# - `server.idle(keep)`：歇下来时调用，把空着的交还给驱动，至少留下 `keep` 字节；
# - `server.close()`：做完、还完，销毁池子。关过再关一次，什么也不做。
#
# 快慢看端到端：请求一个一个地来，每个从提交到整个设备做完，你的用时不超过 `serve_plain` 的一半。如果参考解答在这台机器上快不到 4 倍，
# 门槛降到它的倍数的一半，最低 1.2 倍；差一点的，得一半分。在笔记本里运行测试时，参考解答由你自己的答案充当，以 `./grader/launch check 22` 为准。

# %% tags=["gpu"]
def serve_plain(x, sizes):
    """Serve requests 0, 1, … on x (cupy uint32), one after the other: cudaMalloc, two kernels, wait, cudaFree."""
    for i, nbytes in enumerate(sizes):
        scratch = lab.check_cuda(cudart.cudaMalloc(nbytes))
        with stream:
            launch_request(x, scratch, nbytes, i)
        stream.synchronize()  # the result goes out
        lab.check_cuda(cudart.cudaFree(scratch))


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 新池子的门槛默认是多少？每个请求都同步一次，那个门槛会让池子做什么？
# 还暂存区，排在等待之前还是之后更好？出错时谁来还？`idle` 之前，GPU 都做完了吗？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `make_pool(门槛)`；`cudart.cudaMallocFromPoolAsync(字节, self.pool, stream.ptr)`、`cudart.cudaFreeAsync(地址, stream.ptr)`、
# `cudart.cudaMemPoolTrimTo(self.pool, keep)`、`cudart.cudaMemPoolDestroy(self.pool)`，都用 `lab.check_cuda(…)` 包起来。
# `try … finally`。当前流：`with stream:`。
#
# </details>

# %% solution="PooledServer" tags=["gpu"]
class PooledServer:
    """Serves requests with scratch from a pool of its own: pool (cudaMemPool_t, None after close)."""

    def __init__(self):
        ### BEGIN SOLUTION: 建一个自己的池子；想想门槛设多少，同步的时候它才不会交还
        self.pool = make_pool(KEEP_ALL)
        ### END SOLUTION

    def __call__(self, x, sizes):
        """Serve requests 0, 1, … on x (cupy uint32), with sizes[i] bytes of scratch for request i; wait after each."""
        ### BEGIN SOLUTION: 每个请求：从池子里要，启动，无论如何都还，再等
        for i, nbytes in enumerate(sizes):
            scratch = lab.check_cuda(cudart.cudaMallocFromPoolAsync(nbytes, self.pool, stream.ptr))
            try:
                with stream:
                    launch_request(x, scratch, nbytes, i)
            finally:
                lab.check_cuda(cudart.cudaFreeAsync(scratch, stream.ptr))
            stream.synchronize()
        ### END SOLUTION

    def idle(self, keep):
        """Nothing to do: give what is free back to the driver, but keep at least `keep` bytes."""
        ### BEGIN SOLUTION: 先等做完，再修剪，留下 keep 字节
        stream.synchronize()
        lab.check_cuda(cudart.cudaMemPoolTrimTo(self.pool, keep))
        ### END SOLUTION

    def close(self):
        """Wait, and destroy the pool; a second time, do nothing."""
        ### BEGIN SOLUTION: 等做完，销毁池子，记住已经关了
        if self.pool is not None:
            stream.synchronize()
            lab.check_cuda(cudart.cudaMemPoolDestroy(self.pool))
            self.pool = None
        ### END SOLUTION


# %% test="PooledServer_result" kind="structure" points=1 tags=["gpu"]
LEDGER = """
import cupy
from cuda.bindings import runtime

ATTRIBUTES = runtime.cudaMemPoolAttr


def ledger(server):
    \"\"\"[used, reserved] of the server's pool; [threshold of the default pool, whether the server's is the current or the default one].\"\"\"
    device = cupy.cuda.Device().id
    default, current = (get(device)[1] for get in (runtime.cudaDeviceGetDefaultMemPool, runtime.cudaDeviceGetMemPool))

    def read(pool, name):
        return int(runtime.cudaMemPoolGetAttribute(pool, getattr(ATTRIBUTES, "cudaMemPoolAttr" + name))[1])

    used, reserved = read(server.pool, "UsedMemCurrent"), read(server.pool, "ReservedMemCurrent")
    return [used, reserved, read(default, "ReleaseThreshold"), int(int(server.pool) in (int(default), int(current)))]
"""
HELD_UP = """
from time import sleep


def waits(server, x, sizes, launch_spin, stream):
    \"\"\"Whether the stream is done when the server comes back, though a kernel held it up before.\"\"\"
    with stream:
        launch_spin(50000)
    server(x, sizes)
    sleep(0.002)  # if the last thing that it did was to free
    return stream.done
"""
ledger = student.define(LEDGER, "ledger")
given = [student.value(name) for name in ("launch_spin", "stream")]
MB = 1 << 20
data = np.arange(1000, dtype=np.uint32)
x = on_gpu(data)
server = student.PooledServer()
before = ledger(server)
check.that(student.define(HELD_UP, "waits")(server, x, [MB, 8 * MB, 2 * MB], *given), why="server 返回的时候，stream 还没有做完：每个请求都要等 stream，结果才交得出去。")
check.equal(x.read(), reference.served(data, [MB, 8 * MB, 2 * MB]), why="三个请求以后 x 不对。第 i 个请求的序号是 i，大小是 sizes[i] 吗？")
server.run(0)  # the whole device is done: what the pool gives back is given back
after = ledger(server)
check.equal(after[0], 0, why="请求都做完了，池子的 used 却不是 0：每块暂存区都要还。")
check.that(after[1] >= 8 * MB, why="请求做完以后，池子把显存都交还给了驱动：同步的时候，超过门槛的空闲部分会交还。门槛是多少？（如果暂存区不是从 server.pool 来的，这里也会是 0。）")
server.idle(0)
check.equal(ledger(server)[1], 0, why="idle(0) 以后，池子里还留着显存。先等做完，再修剪。")
### BEGIN HIDDEN TESTS
check.equal(before[3], 0, why="server.pool 应当是自己建的池子，不是设备的默认池或当前池：改它的门槛会影响整个进程。")
check.equal(after[2], before[2], why="默认池的门槛变了。用自己的池子，不要动别人的。")
AROUND = """
from time import perf_counter

import cupy
from cuda.bindings import driver, runtime


def over(events):
    \"\"\"1 if all of them have passed, or do within 2 ms; else 0.\"\"\"
    until = perf_counter() + 0.002
    while not all(event.done for event in events) and perf_counter() < until:
        pass
    return int(all(event.done for event in events))


def watched(server, x, sizes, launch_request, launch_spin):
    \"\"\"Serve, with every request kept busy for a while after its kernels, on the stream on which they are.

    Returns ([[whether all before was over at a request's launch, whether the pool lent that much then], ...], all over in the end).
    \"\"\"
    names, told, events = launch_request.__globals__, [], []

    def noted(x, scratch, nbytes, i):
        used = int(runtime.cudaMemPoolGetAttribute(server.pool, runtime.cudaMemPoolAttr.cudaMemPoolAttrUsedMemCurrent)[1])
        told.append([over(events), int(used >= nbytes)])
        launch_request(x, scratch, nbytes, i)
        launch_spin(20000)
        events.append(cupy.cuda.Event(disable_timing=True))
        events[-1].record()  # on the current stream, as the launches

    names["launch_request"] = noted
    try:
        server(x, sizes)
        return told, over(events)
    finally:
        names["launch_request"] = launch_request


def gone(server, x, nbytes):
    \"\"\"Whether close() destroys the pool: a call that is seen, or at least half of nbytes that come back to the device.\"\"\"
    server(x, [nbytes])
    cupy.cuda.runtime.deviceSynchronize()
    free, calls = cupy.cuda.runtime.memGetInfo()[0], []
    originals = [(module, name, getattr(module, name)) for module, name in ((runtime, "cudaMemPoolDestroy"), (driver, "cuMemPoolDestroy"))]

    def noted(original, pool):
        calls.append(pool)
        return original(pool)

    for module, name, original in originals:
        setattr(module, name, lambda pool, original=original: noted(original, pool))
    try:
        server.close()
    finally:
        for each in originals:
            setattr(*each)
    cupy.cuda.runtime.deviceSynchronize()
    return int(bool(calls) or cupy.cuda.runtime.memGetInfo()[0] - free >= nbytes // 2)
"""
third, sizes = student.PooledServer(), [4 * int(words) for words in secret.integers(2000, 3_000_000, 6)]
data = x.write(secret.integers(0, 2**32, data.size, dtype=np.uint32))
told, done = student.define(AROUND, "watched")(third, x, sizes, student.value("launch_request"), given[0])
check.that(all(each[0] for each in [*told, [done]]), why="一个请求还没有做完，下一个就启动了，或者最后一个没有做完就返回了：每个请求都要等 stream，内核也要在 stream 上，结果才交得出去。")
check.equal(x.read(), reference.served(data, sizes), why="几个请求以后 x 不对。")
check.that(all(each[1] for each in told), why="请求启动的时候，server.pool 没有借出这么多：每个请求的暂存区都要从 server.pool 里来。")
third.close()

sizes = [4 * int(words) for words in secret.integers(2000, 3_000_000, 30)]
size = int(secret.integers(500, 2000))
data = secret.integers(0, 2**32, size, dtype=np.uint32)
x = on_gpu(data)
server(x, sizes)
check.equal(x.read(), reference.served(data, sizes), why="几十个大小不同的请求以后 x 不对。")
high = ledger(server)
check.that(max(sizes) <= high[1] <= max(sizes) + 96 * MB, why="忙的时候，池子留着的应当和最大的一块差不多：用完的还回去了吗，下一个请求用的是同一片吗？")
keep = 4 * MB
server.idle(keep)
kept = ledger(server)[1]
check.that(keep <= kept <= high[1], why="idle(keep) 应当至少留下 keep 字节，多余的交还。")
data = x.write(secret.integers(0, 2**32, size, dtype=np.uint32))
bad = int(secret.integers(3, 20))
broken = [*sizes[:bad], 4 * size - 4, *sizes[bad:]]
check.raises("ValueError", server, x, broken, why="暂存区太小，launch_request 抛出的 ValueError 应当原样出来。")
check.equal(x.read(), reference.served(data, sizes[:bad]), why="出错之前的请求应当做完，出错以后的不做。")
server.idle(0)
check.equal(ledger(server)[:2], [0, 0], why="出错的那个请求，它的暂存区没有还。释放放在 finally 里了吗？")
second = student.PooledServer()
server.close()
server.close()
data = x.write(secret.integers(0, 2**32, size, dtype=np.uint32))
second(x, sizes[:5])
check.equal(x.read(), reference.served(data, sizes[:5]), why="两个服务同时在，关掉一个，另一个就不对了：池子不能共用。")
second.close()
gone = student.define(AROUND, "gone")
check.that(any(gone(student.PooledServer(), x, 256 * MB) for _ in range(3)), why="close() 以后，池子留着的显存没有还给驱动：池子销毁了吗？")
### END HIDDEN TESTS

# %% test="PooledServer_speed" kind="speedup" points=2 tags=["gpu"]
# 4 … 16 MiB, and so many that what asking costs, and by how much that varies on a busy machine, does not drown them
sizes = [4 * int(words) for words in secret.integers(1 << 20, 1 << 22, 24)]
start = secret.integers(0, 2**32, 1024, dtype=np.uint32)
x, y, z = on_gpu(start), on_gpu(start), on_gpu(start)
server, best = student.PooledServer(), reference.PooledServer()
# One request a call, and the result goes out, whoever serves: who does not wait gains nothing, and his pool is told of it.
ONE_BY_ONE = """
from cupy.cuda.runtime import deviceSynchronize


def one_by_one(serve, x, sizes):
    for nbytes in sizes:
        serve(x, [nbytes])
        deviceSynchronize()


class Closing:
    def __init__(self, server):
        self.server = server

    def __del__(self):
        self.server.close()
"""
closing = reference.define(ONE_BY_ONE, "Closing")(best)  # when the test is over, and best has been timed once more
mine, own = student.define(ONE_BY_ONE, "one_by_one"), reference.define(ONE_BY_ONE, "one_by_one")
check.speedup(
    partial(mine, server, x, sizes),
    over=partial(own, reference.value("serve_plain"), y, sizes),
    best=partial(own, best, z, sizes),
    state=(x, z),
    at_least=2.0,
    why="还不够快。每次同步，池子会把超过门槛的空闲显存交还给驱动，下一个请求又要去拿：门槛设了吗？每个请求只要一块、等一次吗？",
)
### BEGIN HIDDEN TESTS
data = x.write(secret.integers(0, 2**32, 1024, dtype=np.uint32))
server(x, sizes[::-1])
check.equal(x.read(), reference.served(data, sizes[::-1]), why="计时以后换一份数据，结果不对：快，但没有做完该做的工作。")
server.close()
### END HIDDEN TESTS

# %% [markdown]
# 验收：把 `serve_plain`、你的 `PooledServer`、门槛 0 的同一个服务摆在一起。（要先做完练习四。）

# %% tags=["demo", "gpu"]
eager_server, pooled = partial(serve_plain, xs), PooledServer()
stingy = PooledServer()
set_threshold(stingy.pool, 0)
wanted = [mib * MIB for mib in (4, 16, 6, 8)]
versus = lab.compare_us(partial(eager_server, wanted), partial(pooled, xs, wanted), clock="end_to_end")
stingily = lab.compare_us(partial(eager_server, wanted), partial(stingy, xs, wanted), clock="end_to_end")
for each in (pooled, stingy):
    each.close()
lab.say(
    lab.table(
        ("四个请求", "µs（中位数）", "比 serve_plain 快"),
        [
            ("`serve_plain`", f"{versus.first.median:.0f}", "1.0 倍"),
            ("`PooledServer`，门槛改成 0", f"{stingily.second.median:.0f}", f"{stingily.ratio:.1f} 倍"),
            ("`PooledServer`", f"{versus.second.median:.0f}", f"{versus.ratio:.1f} 倍"),
        ],
    )
)

# %% [markdown]
# 最后一列不到 1 倍，就是比 `serve_plain` 还慢：门槛 0 的池子每次同步都把显存全交回去，每个请求照样要去驱动那里拿，白白多了一层。
#
# **轮到你**：在“占用随时间”那一节，给 `MAKERS` 加一种办法 `partial(PoolWay, 32 * MIB)`，再用练习一的模型预测它向驱动要几次。
# 先猜：它的线有多长，最后停在多高？

# %% [markdown] tags=["instructor"]
# 给教师：练习一的隐藏测试自己写一遍规则；事件随机，含清零和各种修剪。
# 练习二的工作在另一条流上，前面空转 20 ms：不等就读的会读错；审计前池子已经有借出、有空闲、有更高的水位。
# 泄漏的显存由测试自己还掉，所以一个错误的答案不会连累后面的题。
# 练习三用计数的 `cudaStreamEndCapture`、`cudaGraphDestroy` 看定义有没有销毁；分配器按线程还原。
# 练习四门槛 0 的池子结果正确，但留不住显存，速度也不够。计时的时候每个请求之后都由考官等一次设备，所以不等 `stream` 换不来速度，
# 也救不了门槛 0；考官每问一次学习者的进程，本身就要几毫秒，机器忙的时候还忽长忽短，所以一次调用做二十四个请求，免得它们淹没在里面。
# 等没等、暂存区是不是从 `server.pool` 来，由套在 `launch_request` 外面的一层查看：每个请求后面空转 20 ms，再记一个事件，
# 下一个请求启动、`server` 返回的时候，事件都应当已经完成；没等的，或者内核没放在 `stream` 上的，一定看得出来，所以它排在看结果之前。
# 看得见的那一次先让 `stream` 空转 50 ms，学习者在笔记本里就能知道自己没等；考官读 `x` 会等，看不出来。
# 参考实现的池子在这一题完了以后销毁，免得每评一份答卷就留下一个。

# %% [markdown]
# ## 小结
#
# | 以前以为 | 实验以后 |
# |:--|:--|
# | `cudaFree` 只是还一块显存 | 它还要等整个设备；流序分配排进流里，CPU 不等 |
# | 用了池子就快 | 新池子的门槛是 0：每次同步都交还，等于没有池子 |
# | 释放了还占着，就是泄漏 | used 不回来才是泄漏；reserved 只是留着，留多少由门槛和修剪定 |
# | 空着的显存谁都能用 | 同一条流马上能用；别的流要么排队等，要么另占一块 |
# | `set_limit` 设好就不会超 | `MemoryPool` 自己把着；`MemoryAsyncPool` 的是软上限，写的是驱动池的门槛，建它就可能动设备的设置 |
# | 捕获时用池子就行 | 默认池会写坏别人；私有池要陪着图；流序的分配器让临时数组成为图的节点 |
# | 修剪池子，显存就还了 | 图的显存是另一本账，`cudaDeviceGraphMemTrim` 才管；图还活着也能修剪 |
# | 全留着最快，所以最好 | 快和省可以都要：忙的时候留，歇的时候修剪，或者门槛设成清闲时的用量 |
#
# **带走三句话**
#
# 1. 先问是哪本账：CuPy 的池、驱动的池、图的显存；再问 used 还是 reserved。
# 2. 同步的时候交还多少，由门槛说了算；歇下来的时候，由你说了算。
# 3. 动了分配器和池子的设置，就负责还原。
#
# 下一步：《形状变化时更新图》讲形状变了以后图怎么跟上；《生产环境部署》把这里的预算放进一个真的服务。
# 引擎的工作区，可以回头看《执行上下文与显存》。
