# %% [markdown]
# # 多流捕获与图的生命周期
#
# 一个推理服务把前处理、三个互不相干的网络和汇总录成了一张 CUDA 图（CUDA Graph）。录图的代码用了三条流，
# 时间线上三个网络却还是排着队；运行几个小时以后，显存一点点变少；更怪的是，重启十次，总有一次死在捕获上，
# 报错的那一行什么也没做错，惹祸的是 Python 的垃圾回收。
#
# 三件事，病根各不相同：**边没有连对，图占着的东西没有还，该安静的时候有人在打扫。**
# 这一章把一张多分支的图从录制、启动一直管到销毁，最后把整个“基础篇”合成一个项目。
#
# **学完以后，你能够**
#
# - 用事件分叉、汇合，看一串调用就说出会录成什么图，还是 904、905；
# - 看懂一张图在 GPU 上占了几条泳道，知道捕获的次序、优先级各管什么、不管什么；
# - 说出图的显存何时拿、何时还，让建了又拆的图不留下一个字节；
# - 在正确的时刻上传、销毁图，放掉缓冲，不让垃圾回收打断捕获；
# - 把“前处理 → 三个分支 → 汇总”做成一张又快又能善终的图。
#
# **需要的基础**：《流捕获：规则与恢复》里的模式、错误码和善后，《显式构图》里的依赖和最长路径，《更新一张活的图》里的“图只记住地址”。
#
# **时间**：约 90 分钟，其中四道练习约 50 分钟。
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
# 六个小内核（kernel）：
#
# - `mix`：把每个 32 位整数搅拌 `rounds` 轮，第 $r$ 轮加上序号 `first + r`；漏做、多做、换序都会得到不同的结果。轮数越多，内核越长；
# - `absorb`：`x ^= input`；
# - `spread`：从 `x` 另算一份写进 `y`，`salt` 不同，得到的就不同，`x` 不变；
# - `reduce`：把三份结果依次揉进 `x`，三份对调位置，结果就变；
# - `spin`：空转一段给定的时间；
# - `stamp`：也空转，但把自己开始和结束的时刻写进一本日志，后面用它画时间线。
#
# 流（stream）有四条：`stream` 是起始流（origin stream），捕获从它开始、在它结束；`sides` 里的三条给分支用。
# 都是 `non_blocking=True`，和默认流互不等待。
#
# `capturing` 是《流捕获：规则与恢复》里那个善后周全的捕获：出错时结束捕获、销毁半张图、清掉最后一个错误，再把**原来的**异常放出去。
# 没出错时，录到的定义（`cudaGraph_t`）放在 `as` 后面那个列表里，还没有实例化。

# %% tags=["gpu"]
import gc
from contextlib import contextmanager

import cupy as cp
import cupyx
from cuda.bindings import runtime as cudart

SOURCE = r"""
__device__ unsigned int stirred(unsigned int v, unsigned int i) {
    v ^= v >> 15;
    v *= 0x2c1b3c6du;
    v ^= v >> 12;
    return v + i;
}

extern "C" __global__ void mix(unsigned int *x, unsigned int first, unsigned int rounds, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    unsigned int v = x[t];
    for (unsigned int r = 0; r < rounds; ++r) v = stirred(v, first + r);
    x[t] = v;
}

extern "C" __global__ void absorb(unsigned int *x, const unsigned int *input, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) x[t] ^= input[t];
}

extern "C" __global__ void spread(unsigned int *y, const unsigned int *x, unsigned int salt, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) y[t] = stirred(x[t] ^ 0x9e3779b1u, salt);
}

extern "C" __global__ void reduce(unsigned int *x, const unsigned int *a, const unsigned int *b, const unsigned int *c,
                                  unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    unsigned int v = stirred(x[t] ^ a[t], 1);
    v = stirred(v + b[t], 2);
    x[t] = stirred(v ^ c[t], 3);
}

extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
}

extern "C" __global__ void stamp(unsigned long long *log, unsigned int slot, unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
    log[2 * slot] = start;
    log[2 * slot + 1] = now;
}
"""
module = cp.RawModule(code=SOURCE)
mix, absorb, spread, reduce, spin, stamp = (module.get_function(name) for name in ("mix", "absorb", "spread", "reduce", "spin", "stamp"))

stream = cp.cuda.Stream(non_blocking=True)
sides = [cp.cuda.Stream(non_blocking=True) for _ in range(3)]
BLOCK = 256
RELAXED = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
THREAD_LOCAL = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal


def address(memory):
    """Device address of a cupy array, as a kernel's argument; an address (int) stays what it is."""
    return np.uint64(memory if isinstance(memory, int) else memory.data.ptr)


# -(-size // BLOCK) is size / BLOCK rounded up: enough blocks to cover every element.
def launch_mix(x, first, rounds=1):
    """Launch `rounds` rounds of mix on x (cupy uint32, 1-D), on the current stream. Returns at once."""
    mix((-(-x.size // BLOCK),), (BLOCK,), (x, np.uint32(first), np.uint32(rounds), np.uint32(x.size)))


def launch_absorb(x, other):
    """Launch x ^= other (an array like x, or the address of one), on the current stream. Returns at once."""
    absorb((-(-x.size // BLOCK),), (BLOCK,), (x, address(other), np.uint32(x.size)))


def launch_spread(y, x, salt):
    """Launch y = a copy of x altered by salt (y: an array like x, or an address), on the current stream. Returns at once."""
    spread((-(-x.size // BLOCK),), (BLOCK,), (address(y), x, np.uint32(salt), np.uint32(x.size)))


def launch_reduce(x, a, b, c):
    """Launch the stirring of a, b and c (cupy arrays like x) into x, in this order, on the current stream. Returns at once."""
    reduce((-(-x.size // BLOCK),), (BLOCK,), (x, a, b, c, np.uint32(x.size)))


def launch_spin(us, blocks=1, threads=1):
    """Keep `threads` GPU threads of each of `blocks` blocks busy for us microseconds, on the current stream. Returns at once."""
    spin((blocks,), (threads,), (np.uint64(us * 1000),))


def launch_stamp(log, slot, us):
    """Spin us microseconds and write when it began and ended (ns) to log[2 slot] and log[2 slot + 1] (cupy uint64)."""
    stamp((1,), (1,), (log, np.uint32(slot), np.uint64(us * 1000)))


@contextmanager
def capturing(queue, mode=THREAD_LOCAL):
    """Capture on queue (a cupy Stream), which is the current stream inside. Yields a list; afterwards it holds the definition.

    The caller owns the definition (cudaGraph_t). Whatever ends the block ends the capture: an exception from inside goes
    on as it is, the rest of the graph is destroyed and the last error cleared; lab.CudaError if ending the capture fails.
    """
    lab.check_cuda(cudart.cudaStreamBeginCapture(queue.ptr, mode))
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


# The first launch of a kernel loads its code, which may be refused while a stream is capturing: warm up.
with stream:
    warm = cp.zeros(BLOCK, cp.uint32)
    launch_mix(warm, 0)
    launch_absorb(warm, warm)
    launch_spread(warm, warm, 0)
    launch_reduce(warm, warm, warm, warm)
    launch_spin(1)
    launch_stamp(cp.zeros(2, cp.uint64), 0, 1)
stream.synchronize()

# %% [markdown]
# NumPy 版的参照（不需要 GPU）：

# %%
def stirred(v, i):
    """One round of mix with index i on v (numpy uint32); v stays as it is."""
    v = v ^ (v >> np.uint32(15))
    v = v * np.uint32(0x2C1B3C6D)
    return (v ^ (v >> np.uint32(12))) + np.uint32(i)


def mixed(x, rounds, first=0):
    """Return x (numpy uint32) after `rounds` rounds of mix, indices first, first + 1, …; x stays as it is."""
    for i in range(first, first + rounds):
        x = stirred(x, i)
    return x


def spread_out(x, salt):
    """What spread writes for x (numpy uint32)."""
    return stirred(x ^ np.uint32(0x9E3779B1), salt)


def reduced(x, a, b, c):
    """What reduce makes of x (all four numpy uint32, same shape)."""
    return stirred(stirred(stirred(x ^ a, 1) + b, 2) ^ c, 3)


# %% [markdown]
# ## 分叉与汇合：事件里装的是什么
#
# 捕获只在 `stream` 上开始，另外三条流怎么进来，又怎么回来？靠的全是事件（event）。在捕获里：
#
# - **记录**（record）一个事件，就是把“这条流的下一个节点本来要等谁”抄进事件；
# - **等待**（wait）这个事件，就是把抄来的名单并进另一条流自己的名单；那条流还没有在捕获，就从此刻起被拉进来，这叫分叉（fork）；
# - 起始流反过来等分支上的事件，就是汇合（join）。
#
# 没有一个事件会真的发生，它们只是在传名单。下面每走一步，就问驱动两条流的状态和“下一个节点要等几个”。
# 先猜：汇合两条分支以后，`stream` 的名单上有几个？

# %% tags=["demo", "gpu"]
import matplotlib.pyplot as plt

lab.plot_style()
STATUS = ("没有捕获", "捕获中", "已作废")  # cudaStreamCaptureStatus: 0, 1, 2
WORDS = {"MemAlloc": "alloc", "MemFree": "free", "WaitEvent": "event", "EventRecord": "event", "Graph": "child"}
SIZE = 4096
with stream:
    xs = cp.arange(SIZE, dtype=cp.uint32)
    trays = [cp.zeros(SIZE, cp.uint32) for _ in sides]
forked = cp.cuda.Event(disable_timing=True)
joined = [cp.cuda.Event(disable_timing=True) for _ in sides]
stream.synchronize()


def waits_for(queue):
    """The capture status of a stream, and how many nodes its next node would wait for."""
    status = int(lab.check_cuda(cudart.cudaStreamIsCapturing(queue.ptr)))
    if status != 1:
        return STATUS[status], "—"
    return STATUS[status], cudart.cudaStreamGetCaptureInfo(queue.ptr)[-1]  # the last value, in CUDA 12 and 13


def on(queue, work, *arguments):
    """work(*arguments) with `queue` as the current stream."""
    with queue:
        work(*arguments)


def topology(graph):
    """({number: kind}, [(tail, head), …], [node, …]) of a definition (cudaGraph_t or int) as the driver tells them."""
    _, count = lab.check_cuda(cudart.cudaGraphGetNodes(graph, 0))
    nodes, _ = lab.check_cuda(cudart.cudaGraphGetNodes(graph, count)) if count else ([], 0)
    kinds = [lab.check_cuda(cudart.cudaGraphNodeGetType(node)).name.removeprefix("cudaGraphNodeType") for node in nodes]
    number = {int(node): str(position) for position, node in enumerate(nodes)}
    n_edges = lab.check_cuda(cudart.cudaGraphGetEdges(graph, 0))[-1]
    ends = lab.check_cuda(cudart.cudaGraphGetEdges(graph, n_edges))[:2] if n_edges else ([], [])
    edges = [(number[int(tail)], number[int(head)]) for tail, head in zip(*ends, strict=True)]
    return {number[int(node)]: WORDS.get(kind, kind.lower()) for node, kind in zip(nodes, kinds, strict=True)}, edges, nodes


journey = [
    ("`stream` 上一个内核", partial(on, stream, launch_mix, xs, 0)),
    ("`forked.record(stream)`", partial(forked.record, stream)),
    ("`sides[0].wait_event(forked)`", partial(sides[0].wait_event, forked)),
    ("`sides[0]` 上一个内核", partial(on, sides[0], launch_spread, trays[0], xs, 0)),
    ("`sides[1].wait_event(forked)`", partial(sides[1].wait_event, forked)),
    ("`sides[1]` 上两个内核", lambda: [on(sides[1], launch_spread, trays[1], xs, 1), on(sides[1], launch_mix, trays[1], 0)]),
    ("`joined[0].record(sides[0])`，`stream` 等它", lambda: [joined[0].record(sides[0]), stream.wait_event(joined[0])]),
    ("`joined[1].record(sides[1])`，`stream` 等它", lambda: [joined[1].record(sides[1]), stream.wait_event(joined[1])]),
    ("`stream` 上一个内核", partial(on, stream, launch_reduce, xs, trays[0], trays[1], trays[0])),
]
rows = []
with capturing(stream) as captured:
    for step, call in journey:
        call()
        rows.append((step, *(word for queue in (stream, *sides[:2]) for word in waits_for(queue))))
lab.say(lab.table(("这一步", "stream", "要等", "sides[0]", "要等", "sides[1]", "要等"), rows))
nodes, edges, _ = topology(captured[0])
lab.draw_graph((nodes, edges), title=f"{len(nodes)} 个节点，{len(edges)} 条边")
plt.show()
lab.say("捕获结束以后，三条流的状态：" + "、".join(waits_for(queue)[0] for queue in (stream, *sides[:2])) + "。")
lab.check_cuda(cudart.cudaGraphDestroy(captured[0]))

# %% [markdown]
# - 分叉的那一刻，`sides[0]` 的状态从“没有捕获”变成“捕获中”：**被拉进来**，不需要自己开始，也不能自己结束。
# - 名单只在放进一个新节点以后才缩成一个：新节点等名单上的所有人，以后的只等它。
# - 汇合只是把分支的名单并进来，起始流自己原来等的那一个并不划掉：刚才猜的时候，把它也算上了吗？
#   它其实已经隐含在分支里，于是图里可能多出一条“不说也知道”的边（上图里从最左边直通最右边的那一条）；它不改变谁先谁后。
# - 起始流结束捕获，所有被拉进来的流一起恢复正常。
#
# 把这个套路收成一个函数，后面的实验都用它。它在捕获里、在捕获外都能用：在外面，它就是普通的多流代码。

# %% tags=["demo", "gpu"]
# Made once and kept: an event must not die while a capture may still use it.
ENDS = [cp.cuda.Event(disable_timing=True) for _ in range(64)]


def fork_join(branches, before=None, after=None, queues=sides, breadth_first=False):
    """before(), then the branches side by side on queues, then after(); a branch is a list of callables that launch.

    Branch by branch, or breadth first: one launch of each branch in turn.
    """
    if before is not None:
        on(stream, before)
    forked.record(stream)
    taken = list(zip(queues, branches, ENDS, strict=False))
    for queue, _, _ in taken:
        queue.wait_event(forked)
    if breadth_first:
        for step in range(max(map(len, branches))):
            for queue, works, _ in taken:
                if step < len(works):
                    on(queue, works[step])
    else:
        for queue, works, _ in taken:
            for work in works:
                on(queue, work)
    for queue, _, done in taken:
        done.record(queue)
        stream.wait_event(done)
    if after is not None:
        on(stream, after)


class Executable:
    """A captured graph for experiments: call it to launch it on `stream`. Keeps the definition in .graph, destroys both."""

    def __init__(self, work, flags=0, mode=THREAD_LOCAL):
        with capturing(stream, mode) as captured:
            work()
        self.graph = captured[0]
        self.executable = lab.check_cuda(cudart.cudaGraphInstantiate(self.graph, flags))

    def __call__(self):
        lab.check_cuda(cudart.cudaGraphLaunch(self.executable, stream.ptr))

    def __del__(self):
        cudart.cudaGraphExecDestroy(self.executable)
        cudart.cudaGraphDestroy(self.graph)


# %% [markdown]
# ### 904 与 905：忘了汇合，忘了分叉
#
# 两种错误听起来像一对，后果却很不一样。下面八种写法，每个都真的捕获一次。先猜三件事：哪几种是 904（没有汇合），
# 哪几种是 905（等了捕获之外的事件）；以及**哪几种里，分支的内核当场就执行了**。

# %% tags=["demo", "gpu"]
EXTERNAL_WAIT = cudart.cudaEventWaitExternal
outside = cp.cuda.Event(disable_timing=True)


def work_on(queue):
    on(queue, launch_mix, trays[0], 7)  # not index 0: it leaves zeros as they are


def record_on(queue, event):
    return cudart.cudaEventRecord(event.ptr, queue.ptr)[0]


def wait_on(queue, event, flags=0):
    return cudart.cudaStreamWaitEvent(queue.ptr, event.ptr, flags)[0]


def drawn_in(queue):
    """Fork to queue, and one launch there."""
    record_on(stream, forked)
    wait_on(queue, forked)
    work_on(queue)


def never_joined():
    drawn_in(sides[0])


def worked_after_the_join():
    drawn_in(sides[0])
    record_on(sides[0], joined[0])
    wait_on(stream, joined[0])
    work_on(sides[0])


def one_of_two():
    drawn_in(sides[0])
    drawn_in(sides[1])
    record_on(sides[0], joined[0])
    wait_on(stream, joined[0])


def idle_branch():
    record_on(stream, forked)
    wait_on(sides[0], forked)


def through_another():
    drawn_in(sides[0])
    drawn_in(sides[1])
    record_on(sides[0], joined[0])
    wait_on(sides[1], joined[0])
    work_on(sides[1])
    record_on(sides[1], joined[1])
    return wait_on(stream, joined[1])


def not_forked():
    work_on(sides[0])
    record_on(sides[0], joined[0])
    return wait_on(stream, joined[0])


def forked_too_early():
    wait_on(sides[0], outside)  # recorded before the capture began
    work_on(sides[0])
    record_on(sides[0], joined[0])
    return wait_on(stream, joined[0])


def waits_for_the_outside():
    return wait_on(stream, outside, EXTERNAL_WAIT)


VARIANTS = {
    never_joined: "分叉了，没有汇合",
    worked_after_the_join: "汇合了，又往分支里放了一个",
    one_of_two: "两条分支，只汇合了一条",
    idle_branch: "分叉了，分支什么也没做，没有汇合",
    through_another: "分支二等分支一，起始流只等分支二",
    not_forked: "没有分叉，直接汇合",
    forked_too_early: "分叉的事件记录得太早，在捕获之前",
    waits_for_the_outside: "等外面的事件，带 External 标志",
}


def again(x, times):
    """x after so many launches of mix with index 7."""
    for _ in range(times):
        x = mixed(x, 1, first=7)
    return x


rows, caught = [], {}
for body, what in VARIANTS.items():
    record_on(stream, outside)
    stream.synchronize()
    before_it = trays[0].get()
    lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, THREAD_LOCAL))
    work_on(stream)
    code = int(body() or 0)
    ended, captured_graph = cudart.cudaStreamEndCapture(stream.ptr)
    found = "—"
    if not int(ended):
        found = "，".join(topology(captured_graph)[0].values())
        cudart.cudaGraphDestroy(captured_graph)
    cudart.cudaGetLastError()
    cp.cuda.Device().synchronize()
    ran = next((times for times in range(3) if np.array_equal(trays[0].get(), again(before_it, times))), "?")
    states = {waits_for(queue)[0] for queue in (stream, *sides)}
    rows.append((what, code, int(ended), found, ran, "、".join(sorted(states))))
    caught[body] = code or int(ended)
lab.say(lab.table(("写法", "等待返回", "结束捕获返回", "图里的节点", "当场执行的内核", "结束以后各流"), rows))
lab.say(
    "904 的写法：" + "、".join(VARIANTS[body] for body, code in caught.items() if code == 904) + "。\n\n"
    "905 的写法：" + "、".join(VARIANTS[body] for body, code in caught.items() if code == 905) + "。"
)

# %% [markdown]
# - **904 是忘了汇合。** 录到的东西作废，什么也没执行过。汇合要覆盖到分支的**最后一个**节点：汇合以后又放一个，还是没有汇合。
#   拉进来却什么也没放的分支，没有节点要汇合，不算 904。
#   汇合可以绕路：分支二等过分支一，起始流只等分支二就够了。
# - **905 是忘了分叉。** 那条流根本没有被拉进来，所以它的内核**当场就执行了**，用的是捕获时还没有准备好的数据；
#   等到起始流去等它的事件，才发现那是一个捕获之外的事件。只看错误码，会以为错在等待；真正的错在更早，少了一次分叉。
#   905 还会让整个捕获作废，结束捕获时看到的只是回声 901；查日志，要找第一个出错的调用。
# - 真想让图等外面的工作，用 `cudaEventWaitExternal` 标志：等待变成一个节点，每次启动都真的等。
#
# 公开的问题报告里，这两个码最常见的病根正是：分支流没有汇合；从流池里拿来的流，没有从起始流分叉出来就用了。
#
# ### 被拉进来的流，手上还有活
#
# 从流池里拿来的流，也许还有没做完的活。把它拉进捕获，图会不会连那些活也一起等？`sides[0]` 先空转 20 毫秒，再录进一张图，马上启动。

# %% tags=["demo", "gpu"]
busy_done = cp.cuda.Event(disable_timing=True)


def after_foreign_work(wait_first):
    """Whether sides[0] had finished its earlier work when the graph was done."""
    on(sides[0], launch_spin, 20_000)
    busy_done.record(sides[0])
    graph = Executable(lambda: fork_join([[partial(launch_mix, trays[0], 0)]]))
    if wait_first:
        stream.wait_event(busy_done)  # outside the capture, before the launch
    graph()
    stream.synchronize()
    finished = busy_done.done
    sides[0].synchronize()
    return len(topology(graph.graph)[0]), "做完了" if finished else "还没做完"


rows = [(how, *after_foreign_work(wait)) for how, wait in (("直接启动", False), ("启动之前，先等那条流的事件", True))]
lab.say(lab.table(("启动图的办法", "图里的节点", "图做完时，那条流原来的活"), rows))

# %% [markdown]
# 图里只有分叉**以后**的工作。以前的活不在图里，图也不等它；如果图要用它的结果，就在启动之前、捕获之外，用一个普通的事件把先后排好，
# 或者捕获之前先把那条流清空。

# %% [markdown]
# ## 泳道：GPU 上到底几条在跑
#
# 图里没有流，只有节点和边。启动时，驱动把节点分到若干条内部的队列上，像游泳池的泳道（lane）：同一条泳道里一个接一个，泳道之间同时进行。
# 用 `stamp` 内核写下的时刻，可以直接画出来。同样的 14 个内核，每个空转 60 µs：一个开头，三条分支各四个，一个结尾。三种启动方式：

# %% tags=["demo", "gpu"]
with stream:
    log = cp.zeros(2 * 512, cp.uint64)
stream.synchronize()


def timeline(work, slots):
    """Run work() and return when each stamp began and ended: float64 (slots, 2), µs after the first one began."""
    work()
    cp.cuda.Device().synchronize()
    times = log.get()[: 2 * slots].reshape(slots, 2).astype(np.int64)
    return (times - times[:, 0].min()) / 1000


def most_at_once(times):
    """The largest number of stamps that ran at the same time."""
    return max(int(((times[:, 0] <= moment) & (moment < times[:, 1])).sum()) for moment in times[:, 0])


def stamps(first, count, us=60):
    return [partial(launch_stamp, log, slot, us) for slot in range(first, first + count)]


def three_branches(breadth_first=False):
    fork_join([stamps(1 + 4 * k, 4) for k in range(3)], stamps(0, 1)[0], stamps(13, 1)[0], breadth_first=breadth_first)


def one_stream():
    for work in stamps(0, 14):
        on(stream, work)


forked_graph = Executable(three_branches)
ways = {"逐个启动，一条流": one_stream, "逐个启动，三条分支": three_branches, "一张图，三条分支": forked_graph}
LANES = [0] + [k for k in range(3) for _ in range(4)] + [0]
fig, axes = plt.subplots(3, 1, figsize=(9, 5.6), sharex=True)
rows = []
for ax, (name, work) in zip(axes, ways.items(), strict=True):
    timeline(work, 14)  # discarded: the first run finds everything cold
    times = timeline(work, 14)
    for slot, (began, ended) in enumerate(times):
        ax.barh(LANES[slot], ended - began, left=began, height=0.7, color=f"C{LANES[slot]}", edgecolor="white")
    ax.set_yticks(range(3), [f"分支 {k}" for k in range(3)])
    ax.invert_yaxis()
    ax.set_title(name, fontsize=10)
    rows.append((name, f"{times[:, 1].max():.0f}", most_at_once(times)))
axes[-1].set_xlabel(f"GPU 上的时刻（µs，{lab.gpu_name()}）")
plt.show()
lab.say(lab.table(("启动方式", "第一个开始到最后一个结束 µs", "同时在跑的最多"), rows))

# %% [markdown]
# 并排不并排，由边决定，与用不用图无关；用图的那一张，三条分支的开头是不是更整齐？逐个启动时，分支二要等 CPU 走到它那里才开始。
#
# ### 误区一：捕获时先写谁，重放时就先做谁
#
# 逐个启动时，次序可能很要紧：先把分支零全部启动完，再轮到分支一，分支二就开始得晚；每条分支轮流放一个，三条几乎同时起步。
# 捕获时也有这两种写法。换了次序，图变不变，时间变不变？

# %% tags=["demo", "gpu"]
def ten_each(breadth_first):
    fork_join([[partial(launch_spin, 20)] * 10] * 3, breadth_first=breadth_first)


def shape_of(graph):
    """(nodes, edges, nodes on the longest path) of a definition."""
    nodes, edges, _ = topology(graph)
    length = dict.fromkeys(nodes, 1)
    for _ in nodes:
        for tail, head in edges:
            length[head] = max(length[head], length[tail] + 1)
    return len(nodes), len(edges), max(length.values())


in_turn, across = (Executable(partial(ten_each, breadth_first)) for breadth_first in (False, True))
lab.end_to_end_us(partial(ten_each, False), repeats=5)  # discarded
eager_pair = lab.compare_us(partial(ten_each, False), partial(ten_each, True), clock="end_to_end")
graph_pair = lab.compare_us(in_turn, across, clock="end_to_end")
rows = [
    (name, f"{eager.median:.0f}", f"{graph.median:.0f}", "，".join(map(str, shape_of(made.graph))))
    for name, eager, graph, made in (
        ("一条分支接一条分支", eager_pair.first, graph_pair.first, in_turn),
        ("三条分支轮流", eager_pair.second, graph_pair.second, across),
    )
]
lab.say(lab.table(("启动或捕获的次序（3 条分支 × 10 个 20 µs 的内核）", "逐个启动 µs", "图 µs", "图的节点数，边数，最长路径"), rows))
lab.say(
    f"换一种次序，逐个启动的时间变了 {abs(eager_pair.ratio - 1):.0%}，图的时间变了 {abs(graph_pair.ratio - 1):.0%}。"
)

# %% [markdown]
# 图只记住边。两种次序录出的边一样（看最后一列），CPU 的快慢也不再影响谁先起步，所以图的两个时间应当相差不大：**次序的功夫，图替你省了。**
#
# 有两处例外要知道。`cudaGraphExecUpdate` 按节点加入的先后来配对，所以更新用的那张图要照同样的次序捕获（见《更新一张活的图》）。
# 另外，泳道怎么分是驱动的内部事务，没有写进文档，别的版本可能不同；能依靠的只有边。
#
# ### 泳道有几条
#
# 分支一直加下去，同时在跑的会一直加吗？`k` 条分支，每条三个 200 µs 的内核，量“同时在跑的最多几个”。
# 逐个启动用 `k` 条流，图也从同样的 `k` 条流录来。分叉之前先空转 10 毫秒，让 CPU 有时间把活全交出去：
# 不然交到后面，前面的已经做完了，量到的是 CPU 的快慢，不是泳道。先猜：两条线会不会一直贴着虚线 y = k？

# %% tags=["demo", "gpu"]
BRANCHES = (1, 2, 4, 8, 12, 16, 32, 64)
many = [cp.cuda.Stream(non_blocking=True) for _ in range(max(BRANCHES))]


def k_branches(k):
    # The spin lets the CPU submit everything before the branches begin.
    fork_join([stamps(3 * b, 3, us=200) for b in range(k)], partial(launch_spin, 10_000), queues=many, breadth_first=True)


at_once = {"逐个启动，k 条流": [], "一张图，k 条分支": []}
spans = {name: [] for name in at_once}
for k in BRANCHES:
    branched = Executable(partial(k_branches, k))
    for name, work in zip(at_once, (partial(k_branches, k), branched), strict=True):
        timeline(work, 3 * k)
        seen = [timeline(work, 3 * k) for _ in range(3)]
        at_once[name].append(max(map(most_at_once, seen)))
        spans[name].append(min(float(times[:, 1].max()) for times in seen))

fig, ax = plt.subplots()
ax.loglog(BRANCHES, BRANCHES, linestyle="--", marker="", color="#555555", label="y = k：全部同时在跑")
for name, values in at_once.items():
    ax.loglog(BRANCHES, values, label=name)
ax.set_xticks(BRANCHES, [str(k) for k in BRANCHES])
ax.set_yticks(BRANCHES, [str(k) for k in BRANCHES])
ax.minorticks_off()
ax.set_xlabel("分支数 k")
ax.set_ylabel("同时在跑的内核，最多几个")
ax.set_title(f"泳道（{lab.gpu_name()}）")
ax.legend()
plt.show()
lab.say(
    lab.table(
        ("分支数 k", *(f"{name}：最多同时" for name in at_once), *(f"{name}：µs" for name in at_once)),
        [(k, *(at_once[name][i] for name in at_once), *(f"{spans[name][i]:.0f}" for name in at_once)) for i, k in enumerate(BRANCHES)],
    )
)
for name, values in at_once.items():
    left = [k for k, seen in zip(BRANCHES, values, strict=True) if seen < k]
    lab.say(f"{name}：" + (f"从 k = {left[0]} 起，有分支在排队。" if left else f"直到 k = {BRANCHES[-1]} 都全部同时在跑。"))

# %% [markdown]
# 这里的内核每个只用一个线程，GPU 的算力远远没有用完；哪条线离开了虚线，就是它的**泳道先用完了**：
# 几条分支合用一条硬件队列，互相挡路。要是一直贴着虚线，就是这台机器的泳道比这里试的还多。
# 逐个启动时，环境变量 `CUDA_DEVICE_MAX_CONNECTIONS` 管着队列的条数；文档写的默认值是 8，实际能同时跑几条，以你的图为准。
# 图的泳道由驱动另外安排，所以两条线可以不一样。
#
# 真实的内核占的 SM 多，往往两三条分支就把 GPU 填满了。所以分支数以量到的为准，不是越多越好。

# %% [markdown]
# ## 优先级：谁先拿到空位
#
# 图里有一条大块头的分支，占满整个 GPU；还有一条紧急的小分支，每一步都在等空位。流有优先级（priority），数越小越优先。
# 先看看流的优先级会不会被录进图里：

# %% tags=["demo", "gpu"]
from cuda.bindings import driver

least, greatest = lab.check_cuda(cudart.cudaDeviceGetStreamPriorityRange())
print(f"这块 GPU 的优先级：从 {least}（最低）到 {greatest}（最高）")
low, high = (cp.cuda.Stream(non_blocking=True, priority=priority) for priority in (least, greatest))

gpu = cp.cuda.Device().attributes
WIDE = min(1024, gpu["MaxThreadsPerMultiProcessor"])
SLOTS = gpu["MultiProcessorCount"] * (gpu["MaxThreadsPerMultiProcessor"] // WIDE)  # how many such blocks run at once
hog = partial(launch_spin, 50, blocks=40 * SLOTS, threads=WIDE)  # 40 waves of 50 µs
URGENT = 8


def hog_and_urgent(hog_stream, urgent_stream):
    fork_join([[hog], stamps(1, URGENT, us=10)], stamps(0, 1, us=10)[0], queues=[hog_stream, urgent_stream])


USE_PRIORITY = int(cudart.cudaGraphInstantiateFlags.cudaGraphInstantiateFlagUseNodePriority)
plain = Executable(partial(hog_and_urgent, low, high))
heeded = Executable(partial(hog_and_urgent, low, high), flags=USE_PRIORITY)
_, _, nodes = topology(plain.graph)
PRIORITY = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY
print("图里各个内核节点的优先级：", [lab.check_cuda(driver.cuGraphKernelNodeGetAttribute(node, PRIORITY)).priority for node in nodes])

# %% [markdown]
# 优先级是**节点**的属性，捕获时从流上抄来。图不记得流，却记得每个节点当时的优先级。那么它什么时候起作用？
#
# ### 误区二：把图启动到高优先级的流上，图里紧急的分支就优先
#
# 量紧急分支的最后一个内核什么时候做完。五种做法，轮流各量九次：

# %% tags=["demo", "gpu"]
def launch_on(executable, queue):
    lab.check_cuda(cudart.cudaGraphLaunch(executable.executable, queue.ptr))


ways = {
    "逐个启动，两条普通的流": partial(hog_and_urgent, *sides[:2]),
    "逐个启动，紧急的用高优先级流": partial(hog_and_urgent, low, high),
    "图，没有标志": plain,
    "图，没有标志，启动在高优先级的流上": partial(launch_on, plain, high),
    "图，实例化时带 UseNodePriority": heeded,
}
urgent_done = {name: [] for name in ways}
for turn in range(10):
    for name, work in ways.items():
        times = timeline(work, 1 + URGENT)
        if turn:  # the first turn is a warm-up
            urgent_done[name].append(times[:, 1].max())
lab.say(lab.table(("做法", "紧急分支做完（µs，中位数）"), [(name, f"{np.median(us):.0f}") for name, us in urgent_done.items()]))
without, heeding = (float(np.median(urgent_done[name])) for name in list(ways)[2::2])
lab.say(
    f"带标志以后，紧急分支的时间是原来的 {heeding / without:.0%}。"
    + ("优先级起了作用。" if heeding < 0.8 * without else "在这台机器上，优先级没有明显的作用。")
)

# %% [markdown]
# - 节点里写着优先级，还要在实例化时带上 `cudaGraphInstantiateFlagUseNodePriority`，驱动才理它；CuPy 的 `end_capture()` 不带这个标志。
# - 没有这个标志时，整张图用启动它的那条流的优先级：大块头和紧急分支一起变高，谁也不比谁优先，所以看表的第四行，它帮不上紧急分支的忙。
# - 优先级只决定**空位给谁**，不会打断已经在跑的块（block）。所以它对“块多而短”的大块头才有效；GPU 本来就有空位时，它什么也不改变。

# %% [markdown]
# ## 图的显存
#
# 临时缓冲可以在图里分配（流序分配，stream-ordered allocation），《流捕获：规则与恢复》里做过。这里看它的一生：
# 什么时候占、什么时候还。图的内存有自己的账本，`cudaDeviceGetGraphMemAttribute` 给出两个数：
#
# - **used**：此刻记在图名下的字节，按驱动给的整块算；
# - **reserved**：驱动为图留着的物理显存，释放以后也先不还给系统，等你修剪（trim）。
#
# 下面这张图**只分配、不释放**：结果留在图分配的显存里，让外面来读。这样的图第二次启动本来会被拒绝，
# 所以实例化时带上 `cudaGraphInstantiateFlagAutoFreeOnLaunch`：每次启动先自动释放上一次的。
# 一步步看账本。先猜：销毁图、修剪以后，used 是 0 吗？

# %% tags=["demo", "gpu"]
MIB = 1 << 20
DEVICE = cp.cuda.Device().id
ATTRIBUTE = cudart.cudaGraphMemAttributeType
AUTO_FREE = int(cudart.cudaGraphInstantiateFlags.cudaGraphInstantiateFlagAutoFreeOnLaunch)


def ledger():
    """(used, reserved) graph memory of the device in this process, MiB."""
    kinds = (ATTRIBUTE.cudaGraphMemAttrUsedMemCurrent, ATTRIBUTE.cudaGraphMemAttrReservedMemCurrent)
    return tuple(int(lab.check_cuda(cudart.cudaDeviceGetGraphMemAttribute(DEVICE, kind))) / MIB for kind in kinds)


def trim():
    """Give back what graph memory is reserved and not used."""
    return cudart.cudaDeviceGraphMemTrim(DEVICE)[0]


def noted(step, code=0):
    stream.synchronize()
    return (step, int(code), *(f"{mib:.0f}" for mib in ledger()))


trim()
rows = [noted("开始")]
with capturing(stream) as captured:
    kept_address = lab.check_cuda(cudart.cudaMallocAsync(32 * MIB, stream.ptr))
    lab.check_cuda(cudart.cudaMemsetAsync(kept_address, 7, 32 * MIB, stream.ptr))
rows.append(noted("捕获"))
auto = lab.check_cuda(cudart.cudaGraphInstantiate(captured[0], AUTO_FREE))
rows.append(noted("实例化"))
rows.append(noted("上传：`cudaGraphUpload`", cudart.cudaGraphUpload(auto, stream.ptr)[0]))
rows.append(noted("启动一次", cudart.cudaGraphLaunch(auto, stream.ptr)[0]))
rows.append(noted("再启动一百次", max(int(cudart.cudaGraphLaunch(auto, stream.ptr)[0]) for _ in range(100))))
cudart.cudaGraphExecDestroy(auto)
rows.append(noted("销毁可执行图和定义", cudart.cudaGraphDestroy(captured[0])[0]))
rows.append(noted("修剪：`cudaDeviceGraphMemTrim`", trim()))
unfreed = ledger()[0]
rows.append(noted("`cudaFreeAsync(地址)`", cudart.cudaFreeAsync(kept_address, stream.ptr)[0]))
freed = ledger()[0]
rows.append(noted("再修剪", trim()))
cudart.cudaGetLastError()
lab.say(lab.table(("这一步之后", "返回码", "used MiB", "reserved MiB"), rows))
lab.say(f"used：图销毁、修剪以后 **{unfreed:.0f} MiB**，释放以后 {freed:.0f} MiB，再修剪以后 {ledger()[0]:.0f} MiB。")

# %% [markdown]
# ### 误区三：图销毁了，它的显存就回来了
#
# 看“销毁”和紧跟着的“修剪”那两行。最后一次启动分配的那一块，活得比图还久：它的地址交出去了，驱动不知道外面还有没有人在用，不敢替你放。
# 没有人再去释放，就是泄漏；而且地址一旦忘了，就永远还不了了。
#
# `cudaFreeAsync` 那一行的 used 也许没有马上变小：释放过的那块可以给下一张图用，但在有的驱动上，要到修剪时才从账上划掉。
# 所以查泄漏要先等 GPU 做完、修剪，再看 used；没有释放的，修剪多少次都在。
#
# 所以在图里只分配、不释放，就欠了三笔账：
#
# 1. 用完以后 `cudaFreeAsync(地址, 流)`；
# 2. 销毁可执行图和定义；
# 3. 真正要把物理显存还给别人时，`cudaDeviceGraphMemTrim`。只有空着的才还，所以先同步。
#
# 能在图里释放的，就在图里释放，账自己会平。
#
# 看看第一笔账忘了还会怎样：每个请求建一张图，带一块 1 MiB 的输出，用完就销毁图，但不释放输出。另一种写法补上那一句。看哪条线随着张数一直往上长。

# %% tags=["demo", "gpu"]
def one_request(free_it):
    """Build, launch and destroy a graph with 1 MiB of output. Returns the address of the output."""
    with capturing(stream) as captured:
        output = lab.check_cuda(cudart.cudaMallocAsync(MIB, stream.ptr))
        lab.check_cuda(cudart.cudaMemsetAsync(output, 1, MIB, stream.ptr))
    executable = lab.check_cuda(cudart.cudaGraphInstantiate(captured[0], 0))
    lab.check_cuda(cudart.cudaGraphLaunch(executable, stream.ptr))
    if free_it:
        lab.check_cuda(cudart.cudaFreeAsync(output, stream.ptr))
    lab.check_cuda(cudart.cudaGraphExecDestroy(executable))
    lab.check_cuda(cudart.cudaGraphDestroy(captured[0]))
    return output


fig, ax = plt.subplots()
for label, free_it in (("忘了释放输出", False), ("释放输出", True)):
    used, reserved, outputs = [], [], []
    for _ in range(40):
        outputs.append(one_request(free_it))
        stream.synchronize()
        for history, mib in zip((used, reserved), ledger(), strict=True):
            history.append(mib)
    (line,) = ax.plot(range(1, 41), used, marker="", linestyle="-", label=f"{label}：used")
    ax.plot(range(1, 41), reserved, marker="", linestyle="--", color=line.get_color(), label=f"{label}：reserved")
    if not free_it:
        for output in outputs:
            lab.check_cuda(cudart.cudaFreeAsync(output, stream.ptr))
    stream.synchronize()
    trim()
ax.set_xlabel("建了又销毁的图（张）")
ax.set_ylabel("图的显存（MiB）")
ax.set_title(f"每张图 1 MiB 的输出（{lab.gpu_name()}）")
ax.legend()
plt.show()
print("全部释放、修剪以后（used, reserved）：", ledger())

# %% [markdown]
# 图例有四项，图上要是只看得见两条线，就是 used 的实线和 reserved 的虚线重在了一起：两者一样多。
#
# 对照纵轴：每张图的输出是 1 MiB，忘了释放的那条线，每张图涨的也是 1 MiB 吗？驱动按整块给图配物理显存，
# 再小的输出也占住一整块；一块多大，用线的终点除以张数算算看。所以漏掉许多小缓冲，比看上去贵得多。
#
# ### 两张图，一份显存
#
# 图里的地址是虚拟地址，物理显存在启动（或上传）时才配上。于是，如果两张图不会同时跑，它们可以轮流用同一份物理显存。
# 两张图各要 32 MiB、在图里释放：先都启动在同一条流上，再启动在两条流上同时跑。

# %% tags=["demo", "gpu"]
def scratchy():
    scratch = lab.check_cuda(cudart.cudaMallocAsync(32 * MIB, stream.ptr))
    launch_spin(2000)
    lab.check_cuda(cudart.cudaMemsetAsync(scratch, 1, 32 * MIB, stream.ptr))
    lab.check_cuda(cudart.cudaFreeAsync(scratch, stream.ptr))


def reserved_by(queues):
    """MiB reserved after two graphs with 32 MiB of scratch each were launched on these two streams."""
    pair = [Executable(scratchy) for _ in queues]
    for executable, queue in zip(pair, queues, strict=True):
        launch_on(executable, queue)
    cp.cuda.Device().synchronize()
    _, reserved = ledger()
    del pair
    trim()
    return reserved


rows = [("同一条流，一先一后", reserved_by([stream, stream])), ("两条流，同时", reserved_by([stream, sides[0]]))]
lab.say(lab.table(("两张各要 32 MiB 的图", "启动以后 reserved MiB"), [(how, f"{mib:.0f}") for how, mib in rows]))
lab.say("同一条流上，两张图" + ("共用了一份物理显存。" if rows[0][1] < rows[1][1] else "在这台机器上没有比同时跑的占得少。"))

# %% [markdown]
# 道理是：同一条流上，后一张图一定等前一张做完，驱动就可以让它们共用物理显存；可能同时跑，就得各占一份。
# 所以**不会同时跑的图，启动在同一条流上**，省的是实实在在的显存。
#
# ### 释放挂在了谁后面
#
# 三条分支都读同一块暂存区（scratch），释放写在哪里？写在某一条分支的末尾，看上去也是“最后用完的人释放”。
# 捕获不会报错，实例化也不会。问题只在边里：**每一个用到它的节点，都要有路径通到释放节点。**
# 下面两种写法，只捕获、不启动，让代码去找没有路径的使用者。

# %% tags=["demo", "gpu"]
def shared_scratch(free_in_branch):
    """Three branches use one scratch buffer; it is freed at the end of the first branch, or after the join."""
    scratch = lab.check_cuda(cudart.cudaMallocAsync(xs.nbytes, stream.ptr))
    on(stream, launch_spread, scratch, xs, 0)

    def free_on(queue):
        lab.check_cuda(cudart.cudaFreeAsync(scratch, queue.ptr))

    branches = [[partial(launch_absorb, tray, scratch)] for tray in trays]
    if free_in_branch:
        branches[0].append(partial(free_on, sides[0]))
    fork_join(branches, after=None if free_in_branch else partial(free_on, stream))


def unordered_users(graph):
    """Kernel nodes that come after an allocation and have no path to its free node."""
    nodes, edges, _ = topology(graph)
    after = {name: {name} for name in nodes}  # all that a node leads to
    for _ in nodes:
        for tail, head in edges:
            after[tail] |= after[head]
    frees = [name for name, kind in nodes.items() if kind == "free"]
    users = {name for alloc, kind in nodes.items() if kind == "alloc" for name in after[alloc] if nodes[name] == "kernel"}
    return sorted(name for name in users if not any(free in after[name] for free in frees))


fig, axes = plt.subplots(1, 2, figsize=(11, 3.6))
rows = []
for ax, (what, in_branch) in zip(axes, (("在分支零的末尾释放", True), ("汇合以后释放", False)), strict=True):
    with capturing(stream) as captured:
        shared_scratch(in_branch)
    lab.draw_graph(topology(captured[0])[:2], ax=ax, title=what)
    rows.append((what, len(unordered_users(captured[0]))))
    lab.check_cuda(cudart.cudaGraphDestroy(captured[0]))
plt.show()
lab.say(lab.table(("释放写在哪里", "没有路径通到释放的内核"), rows))

# %% [markdown]
# 前一种写法的图也许跑上几天都对：那块显存释放了，一时没有别人来要。等到哪天图里又多了一个分配，两块重叠，才会读到别人的数据，
# 或者访问非法地址。**释放要等所有的使用者**，多分支时，就是汇合以后。
#
# ### 捕获时的临时数组：给图一个自己的内存池
#
# 《流捕获：规则与恢复》里看过：在捕获里用 CuPy 的内存池（memory pool）要临时数组，捕获一结束，池子就把那块给了别人，图却还在往里写。
# 除了“事先分配”和“图里分配”，还有第三种治法，也是 PyTorch 的做法：**捕获时换一个私有的池子**，池子和图一起保管，别人永远拿不到里面的块。

# %% tags=["demo", "gpu"]
def with_temporaries():
    """A body whose temporary array comes from the allocator in force."""
    scratch = cp.empty_like(xs)
    launch_spread(scratch, xs, 1)
    launch_absorb(xs, scratch)


def spoilt_by(pool):
    """How many of 16 new arrays a replay spoils if the temporaries were taken from this pool while capturing."""
    with cp.cuda.using_allocator(pool.malloc):
        graph = Executable(with_temporaries, mode=RELAXED)
    with stream:
        tenants = [cp.full(SIZE, 13, cp.uint32) for _ in range(16)]  # from the default pool
    graph()
    stream.synchronize()
    return sum(not np.array_equal(tenant.get(), np.full(SIZE, 13, np.uint32)) for tenant in tenants)


private_pool = cp.cuda.MemoryPool()
rows = [("默认的池子", spoilt_by(cp.get_default_memory_pool())), ("私有的池子，和图一起保管", spoilt_by(private_pool))]
lab.say(lab.table(("捕获时，临时数组来自", "16 个新数组里，被重放写坏的"), rows))

# %% [markdown]
# 私有池里的块，捕获结束后也回到了池里，但只有同样从这个池子分配的人拿得到。几张**不会同时跑**的图可以合用一个私有池，又省一份显存；
# 可能同时跑的，就要各用各的，道理和上面一样。

# %% [markdown]
# ## 上传、销毁，和缓冲的告别
#
# ### 提前上传
#
# 实例化之后，第一次启动还要把编好的命令上传到 GPU。`cudaGraphUpload(可执行图, 流)` 让你挑个清闲的时候提前做；
# 看上面账本里“上传”那一行，图要的物理显存也可能在这时就配好。三条分支、每条 30 个内核的图，各建 12 张，比第一次启动：

# %% tags=["demo", "gpu"]
from time import perf_counter_ns


def thirty_each():
    fork_join([[partial(launch_mix, tray, i) for i in range(30)] for tray in trays])


def first_launch_us(upload):
    fresh = Executable(thirty_each)
    if upload:
        lab.check_cuda(cudart.cudaGraphUpload(fresh.executable, stream.ptr))
    stream.synchronize()
    began_ns = perf_counter_ns()
    fresh()
    stream.synchronize()
    return (perf_counter_ns() - began_ns) / 1000


firsts = {"没有上传": [], "提前上传": []}
for turn in range(13):
    for name, upload in (("没有上传", False), ("提前上传", True)):
        us = first_launch_us(upload)
        if turn:  # the first turn is a warm-up
            firsts[name].append(us)
steady = lab.end_to_end_us(Executable(thirty_each)).median
rows = [(f"第一次启动，{name}", f"{np.median(us):.0f}") for name, us in firsts.items()]
lab.say(lab.table(("90 个内核、三条分支", "端到端 µs（中位数）"), [*rows, ("以后的启动", f"{steady:.0f}")]))

# %% [markdown]
# 上传不会变没，只是挪到了没有人等的时候。服务第一个请求的延迟，就靠这一步。
#
# ### 图还在跑，就销毁它
#
# 启动一张要跑 20 毫秒的图，不等它做完就销毁。销毁要等多久？结果还对吗？

# %% tags=["demo", "gpu"]
def long_graph(array):
    """Spin 20 ms, then three rounds of mix on array."""
    launch_spin(20_000)
    launch_mix(array, 0, 3)


for _ in range(2):  # the first time is a warm-up
    before_it = xs.get()
    with capturing(stream) as captured:
        long_graph(xs)
    running = lab.check_cuda(cudart.cudaGraphInstantiate(captured[0], 0))
    lab.check_cuda(cudart.cudaGraphUpload(running, stream.ptr))
    stream.synchronize()
    began_ns = perf_counter_ns()
    lab.check_cuda(cudart.cudaGraphLaunch(running, stream.ptr))
    launched_ns = perf_counter_ns()
    codes = [int(cudart.cudaGraphExecDestroy(running)[0]), int(cudart.cudaGraphDestroy(captured[0])[0])]
    destroyed_ns = perf_counter_ns()
    stream.synchronize()
    finished_ns = perf_counter_ns()
lab.say(
    f"启动用了 {(launched_ns - began_ns) / 1000:.0f} µs，两次销毁（返回 {codes[0]}、{codes[1]}）共 {(destroyed_ns - launched_ns) / 1000:.0f} µs，"
    f"图在启动之后 {(finished_ns - began_ns) / 1e6:.1f} ms 做完。结果{'正确' if np.array_equal(xs.get(), mixed(before_it, 3)) else '不对'}。"
)

# %% [markdown]
# 文档的说法是：正在跑的可执行图，销毁不会打断它，做完以后才真正释放。看上面的时间：销毁有没有等图做完？
#
# 可是，**缓冲不归图管**。CuPy 的数组没有人要了，内存池立刻可以把它给别人，不管图是不是还要往里写。
# 同样的图，写一块自己的缓冲；启动以后马上放手，再分配一块新数组，填上 13。对比先等图做完、再放手：

# %% tags=["demo", "gpu"]
def spoilt_after_release(wait):
    """Whether a new array is spoilt by a graph that still ran when its buffer was released."""
    own = cp.zeros(SIZE, cp.uint32)  # on the default stream: so will the new array be
    cp.cuda.Device().synchronize()
    graph = Executable(partial(long_graph, own))
    graph()
    if wait:
        stream.synchronize()
    del own, graph
    news = [cp.full(SIZE, 13, cp.uint32) for _ in range(16)]
    cp.cuda.Device().synchronize()
    return sum(not np.array_equal(new.get(), np.full(SIZE, 13, np.uint32)) for new in news)


rows = [("马上放手", spoilt_after_release(False)), ("等图做完再放手", spoilt_after_release(True))]
lab.say(lab.table(("缓冲什么时候放手", "16 个新数组里，被写坏的"), rows))

# %% [markdown]
# 所以告别的次序是：**等图做完 → 销毁可执行图和定义 → 放掉缓冲。** 只有第一步要等，也只有它常被忘记。
#
# ### 销毁以后还去用
#
# 再启动一张销毁过的图，或者销毁两次，会怎样？句柄是一个地址，那里可能已经是别的东西了。可能弄崩解释器，所以在子进程里试：

# %% tags=["demo", "gpu"]
import signal
import subprocess
import sys

AFTERLIFE = r"""
import faulthandler, sys
from cuda.bindings import runtime as cudart

faulthandler.dump_traceback_later(10, exit=True)

def done(result):
    assert int(result[0]) == 0, result[0].name
    return result[1] if len(result) > 1 else None

done(cudart.cudaFree(0))
stream = done(cudart.cudaStreamCreate())
graph = done(cudart.cudaGraphCreate(0))
done(cudart.cudaGraphAddEmptyNode(graph, [], 0))
executable = done(cudart.cudaGraphInstantiate(graph, 0))
done(cudart.cudaGraphLaunch(executable, stream))
done(cudart.cudaStreamSynchronize(stream))
done(cudart.cudaGraphExecDestroy(executable))
if sys.argv[1] == "launch":
    print(cudart.cudaGraphLaunch(executable, stream)[0].name, flush=True)
    print(cudart.cudaStreamSynchronize(stream)[0].name, flush=True)
elif sys.argv[1] == "destroy":
    print(cudart.cudaGraphExecDestroy(executable)[0].name, flush=True)
else:
    done(cudart.cudaGraphDestroy(graph))
    print(cudart.cudaGraphDestroy(graph)[0].name, flush=True)
"""


def child(script, *arguments, seconds=120):
    """Run a Python script in a process of its own. Returns what it printed, and how it ended (None if well)."""
    try:
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "", f"{seconds} 秒没有做完"
    if done.returncode < 0:
        return done.stdout, f"被信号 {signal.Signals(-done.returncode).name} 终止"
    if done.returncode:
        return done.stdout, f"退出码 {done.returncode}：{(done.stderr.strip().splitlines() or ['没有留下话'])[-1][:120]}"
    return done.stdout, None


rows = []
for mode, what in (("launch", "启动销毁过的可执行图"), ("destroy", "可执行图销毁两次"), ("definition", "定义销毁两次")):
    printed, died = child(AFTERLIFE, mode)
    rows.append((what, "，".join(printed.split()) or "—", died or "平安结束"))
lab.say(lab.table(("做了什么", "返回", "子进程的下场"), rows))

# %% [markdown]
# 有返回码算走运；没有报错也不等于没事，也许只是那块内存还没有人用。句柄销毁以后，把变量也清掉（设成 `None`），这类错误就变成了一眼看得见的 Python 异常。
#
# 下面给出的 `LiveGraph` 就按这些规矩写：谁拥有图，谁就拥有图指向的一切；`close()` 先等、再销毁、再放手，调用几次都行。
# 析构函数 `__del__` 只销毁，**不等**；为什么，下一节就讲。

# %% tags=["gpu"]
class LiveGraph:
    """An instantiated graph that is launched on `stream` only, and all that its nodes point at.

    graph: the definition (cudaGraph_t), owned from now on. keep: arrays, pinned buffers … that live as long as the graph.
    Call it to launch it once, without waiting (RuntimeError once it is closed). close() waits for `stream`, then gives everything back; again: nothing.
    Raises lab.CudaError if the definition cannot be instantiated.
    """

    def __init__(self, graph, *keep):
        self.graph, self.keep, self.executable = graph, keep, None
        self.executable = lab.check_cuda(cudart.cudaGraphInstantiate(graph, 0))

    def __call__(self):
        if self.executable is None:
            raise RuntimeError("这张图已经关闭了")
        lab.check_cuda(cudart.cudaGraphLaunch(self.executable, stream.ptr))

    def close(self):
        if self.graph is not None:
            stream.synchronize()
            self._destroy()
            self.keep = ()

    def _destroy(self):
        if self.executable is not None:
            cudart.cudaGraphExecDestroy(self.executable)
        if self.graph is not None:
            cudart.cudaGraphDestroy(self.graph)
        self.graph = self.executable = None

    def __del__(self):
        self._destroy()  # no waiting here: Python may finalise an object at any moment, also while a stream is capturing


# %% [markdown]
# ## 垃圾回收：捕获进行时，有人在打扫
#
# Python 的对象大多在没有人引用时立刻消失。可是互相引用、绕成一圈的对象（reference cycle），要等垃圾回收（garbage collection，GC）来收；
# 什么时候收，看你又新建了多少对象，也就是**几乎任何一行代码都可能触发**。如果触发在捕获中间，圈里又有拿着 CUDA 资源的对象，
# 它的析构函数就在捕获中间运行了。
#
# 哪些析构会打断捕获？把各种对象藏进一个圈里，在捕获中强制回收一次，三种模式各试一遍。照例放在子进程里。

# %% tags=["demo", "gpu"]
import json

GARBAGE = r"""
import faulthandler, gc, json, sys
import cupy as cp
from cuda.bindings import runtime as cudart

faulthandler.dump_traceback_later(60, exit=True)
swallowed = []
sys.unraisablehook = lambda told: swallowed.append(type(told.exc_value).__name__)
stream = cp.cuda.Stream(non_blocking=True)
kernel = cp.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
with stream:
    kernel((1,), (1,), ())
stream.synchronize()

class Cycle:
    def __init__(self, thing):
        self.thing, self.myself = thing, self

class Courteous:
    def __del__(self):
        cudart.cudaStreamSynchronize(stream.ptr)

def old_graph():
    with stream:
        stream.begin_capture()
        kernel((1,), (1,), ())
        graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    return graph

def without_pool():
    with cp.cuda.using_allocator(None):
        return cp.zeros(1024)

THINGS = {
    "以前的图（cupy.cuda.Graph）": old_graph,
    "事件（cupy.cuda.Event）": cp.cuda.Event,
    "流（cupy.cuda.Stream）": lambda: cp.cuda.Stream(non_blocking=True),
    "数组，来自内存池": lambda: cp.zeros(1024),
    "数组，不用内存池（cudaFree）": without_pool,
    "自己写的类，析构时同步一下": Courteous,
}
gc.disable()
for name, make in THINGS.items():
    for mode in range(3):
        cycle = Cycle(make())
        cp.cuda.Device().synchronize()
        del cycle
        assert int(cudart.cudaStreamBeginCapture(stream.ptr, cudart.cudaStreamCaptureMode(mode))[0]) == 0
        with stream:
            kernel((1,), (1,), ())
        before = len(swallowed)
        gc.collect()
        ended, graph = cudart.cudaStreamEndCapture(stream.ptr)
        if not int(ended):
            cudart.cudaGraphDestroy(graph)
        cudart.cudaGetLastError()
        print(json.dumps([name, mode, int(ended), swallowed[before:]]), flush=True)
"""
printed, died = child(GARBAGE)
told = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
codes = {}
for name, mode, ended, swallowed in told:
    codes.setdefault(name, {})[mode] = f"{ended}" + (f"（吞掉 {swallowed[0]}）" if swallowed else "")
lab.say(
    lab.table(
        ("在捕获中被回收的", "global：结束捕获返回", "thread-local", "relaxed"),
        [(name, *(by_mode.get(mode, "—") for mode in range(3))) for name, by_mode in codes.items()],
    )
    + (f"\n\n子进程{died}。" if died else "")
)
breaking = [name for name, by_mode in codes.items() if any(not value.startswith("0") for value in by_mode.values())]
lab.say("至少在一种模式里打断了捕获的：" + ("、".join(breaking) or "在这台机器上一个也没有") + "。")

# %% [markdown]
# 表里的非零码就是被打断的捕获。哪些对象危险，随驱动、随库的版本变；自己写的、“好心同步一下”的析构函数则在哪种模式下都危险，
# 因为同步正在捕获的流是必然冲突。析构函数里的异常没有人接，Python 只是打印一行就丢掉，所以你看到的只有后面的 901。
#
# ### 误区四：垃圾回收和 CUDA 没有关系
#
# 真实的故障是间歇的。下面捕获 60 次，每次之前产生一点圈状垃圾，里面有一个好心的析构函数；捕获中间照常新建一些 Python 对象，
# 留着以后用，**没有人主动调用回收**。数一数录成了几次；再把回收关掉，数第二遍。

# %% tags=["demo", "gpu"]
# What a launch, or the end of the capture, raises once the capture is broken.
BROKEN = (lab.CudaError, cp.cuda.runtime.CUDARuntimeError, cp.cuda.driver.CUDADriverError)


class Courteous:
    """Garbage in a cycle that waits for `stream` when it is finalised."""

    def __init__(self):
        self.myself = self

    def __del__(self):
        cudart.cudaStreamSynchronize(stream.ptr)


def survived(rounds=60):
    """How many of `rounds` captures were not broken."""
    alive, kept = 0, []
    for _ in range(rounds):
        Courteous()
        try:
            with capturing(stream) as captured:
                launch_mix(xs, 0)
                kept += [[] for _ in range(300)]  # kept: only objects that stay bring the next collection nearer
                launch_mix(xs, 1)
            cudart.cudaGraphDestroy(captured[0])
            alive += 1
        except BROKEN:
            pass
    return alive


stream.synchronize()
gc.collect()
with_collector = survived()
gc.collect()
gc.disable()
try:
    without_collector = survived()
finally:
    gc.enable()
gc.collect()
lab.say(lab.table(("60 次捕获", "录成的"), [("照常", with_collector), ("捕获时关掉回收", without_collector)]))

# %% [markdown]
# 第一行要是不到 60，少掉的那些就是开头的“总有一次死在捕获上”。新建的对象比消失的多出一定的数目（`gc.get_threshold()` 的第一项），
# 就回收一次；哪一次捕获撞上，只看那时攒了多少；报错的那一行不过是碰巧走到了那里。治法有四步，少一步都不完整：
#
# 1. 捕获之前先 `gc.collect()`，把旧账清掉，免得垃圾越积越多；
# 2. `gc.disable()`；
# 3. 捕获；
# 4. 恢复**原来的**状态：原来开着才开。捕获失败也要恢复，不然整个服务就再也不回收了。
#
# 引用计数照常工作：没有绕成圈的对象，最后一个引用在捕获中消失，析构仍然当场运行。所以捕获时用到的事件、数组、旧图，要有人一直拿着。
# 要录几十张图时，整个阶段只关一次、只收一次：每张图都 `gc.collect()`，时间会花在打扫上。

# %% [markdown]
# ## 两样本事，各省什么
#
# 并排和图是两回事，可以各用各的，也可以合起来。同样的三条分支，每条 10 个 `mix`，内核从短到长，四种做法一起量。
# 先猜：内核很短时，哪一样更管用？内核很长时呢？

# %% tags=["demo", "gpu"]
from matplotlib.ticker import LogLocator

LENGTHS = (1, 30, 100, 300, 1000, 3000)


def side_by_side(rounds):
    fork_join([[partial(launch_mix, tray, i, rounds) for i in range(10)] for tray in trays])


def in_one_stream(rounds):
    with stream:
        for tray in trays:
            for i in range(10):
                launch_mix(tray, i, rounds)


def four_ways(rounds):
    """Median end-to-end µs: eager in one stream, eager in three, graph of a chain, graph of three branches."""
    eager = [partial(work, rounds) for work in (in_one_stream, side_by_side)]
    graphs = [Executable(work) for work in eager]
    one, three = (lab.compare_us(*pair, clock="end_to_end", pairs=15) for pair in ((eager[0], graphs[1]), (eager[1], graphs[0])))
    return one.first.median, three.first.median, three.second.median, one.second.median


four_ways(1)  # discarded
NAMES = ("逐个启动，一条流", "逐个启动，三条流", "一张图，一条链", "一张图，三条分支")
measured = np.array([four_ways(rounds) for rounds in LENGTHS])
chain_us = measured[:, 2] / 30  # time of a node of the chain
fig, ax = plt.subplots()
for name, line in zip(NAMES, measured.T, strict=True):
    ax.loglog(chain_us, line, label=name)
ax.set_xlabel("链式图里平均每个内核的时间（µs）")
ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
ax.xaxis.set_major_formatter("{x:g}")
ax.minorticks_off()
ax.set_ylabel("30 个内核的端到端时间（µs）")
ax.set_title(f"并排与图（{lab.gpu_name()}）")
ax.legend()
plt.show()
lab.say(
    lab.table(
        ("mix 的轮数", *(f"{name} µs" for name in NAMES), "只用三条流", "只用图", "合起来"),
        [(rounds, *(f"{us:.0f}" for us in line), *(f"{line[0] / us:.1f} 倍" for us in line[1:])) for rounds, line in zip(LENGTHS, measured, strict=True)],
    )
)

# %% [markdown]
# 看两头：
#
# - 左边，内核比启动短：CPU 一个个提交才是瓶颈，分成三条流也要提交 30 次，还多出记录和等待，可能反而更慢。省时间主要靠图；
#   录成图以后再并排，还能再省一截，因为这时 GPU 不必等 CPU 了。
# - 右边，内核比启动长：启动藏在后面，只用图省不了多少。省时间主要靠并排；逐个启动时，后面的分支要等 CPU 走到它那里才开始，
#   所以录成图，还能再快一截。
# - 中间那一段两样都要：**并排缩短 GPU 的路，图让 CPU 喂得上这么宽的路。** 项目就放在这一段。

# %% [markdown]
# ## 练习
#
# 四道练习，共 12 分，最后一道是“基础篇”的项目。解答里可以用这些给定的名字：
#
# - 模块与工具：`np`、`cp`、`cupyx`、`cudart`、`gc`、`partial`、`lab`、`contextmanager`；
# - 流与捕获：`stream`、`sides`（三条）、`RELAXED`、`THREAD_LOCAL`、`capturing`、`LiveGraph`；
# - 内核与函数：`BLOCK`、`address`、`launch_mix`、`launch_absorb`、`launch_spread`、`launch_reduce`、`launch_spin`、`launch_stamp`、`mixed`、`spread_out`、`reduced`；
# - 练习三、四里另外给出的名字。
#
# `fork_join`、`Executable`、`ledger`、`xs` 等名字来自演示单元（只做实验，评分时不运行），解答里不能用；要用就自己写。
#
# ### 练习一：这一串调用会录成什么（3 分，不需要 GPU）
#
# 写 `predict(calls)`。`calls` 是一串调用，每条是一个元组：
#
# | 调用 | 意思 |
# |:--|:--|
# | `("begin", s)` | 在流 `s` 上开始捕获，`s` 就是起始流 |
# | `("launch", s)` | 往流 `s` 里启动一个内核；所有的启动按出现的先后编号 0、1、2…… |
# | `("record", s, e)` | 在流 `s` 上记录事件 `e`；同一个事件可以重新记录，以最后一次为准 |
# | `("wait", s, e)` | 流 `s` 等事件 `e`（等的是此刻为止最后一次的记录） |
# | `("end", s)` | 在起始流上结束捕获 |
#
# 规则就是这一章开头讲的：
#
# - 捕获中的流，每条都有一份名单：下一个节点要等谁。开始捕获时，起始流的名单是空的。
# - 在捕获中的流上启动：新节点等名单上的所有人，名单随即缩成它一个。不在捕获中的流上启动：**当场执行**，不进图。
# - 在捕获中的流上记录：把名单抄进事件，这是“里面的”事件，名单空着也是。在别的流上记录：这是“外面的”事件。
# - 等里面的事件：名单并进来；原来不在捕获中的流从此被拉进来。
# - 等外面的事件：捕获中的流得到 **905**，到此为止；不在捕获中的流只是普通地等，什么也不发生。
# - 结束：被拉进来的每条流，名单上的节点都要已经是起始流名单上的节点，或者它们的祖先；有一个不是，就是 **904**。
#   成功或失败，所有的流都恢复正常，之后的启动当场执行。
#
# 返回三项 `(code, ran, before)`：
#
# - `code`：0、904 或 905；
# - `ran`：当场执行的启动的编号，一个列表，由小到大；
# - `before`：进了图的每个启动一项 `[编号, 祖先]`，按编号由小到大；`祖先` 是图里一定在它之前做完的**全部**启动的编号（不只是直接等的），由小到大。
#   `code` 不为 0 时是空列表。
#
# 可以放心的约定：一份 `calls` 里只有一次捕获；905 那一条是最后一条；等的事件都记录过；被拉进来的流，每次等完马上会启动一个内核；
# 捕获结束以后不再等里面的事件。

# %%
CASES = {
    "一个菱形": [
        ("begin", "s"), ("launch", "s"), ("record", "s", "f"),
        ("wait", "a", "f"), ("launch", "a"), ("record", "a", "ja"),
        ("wait", "b", "f"), ("launch", "b"), ("record", "b", "jb"),
        ("wait", "s", "ja"), ("wait", "s", "jb"), ("launch", "s"), ("end", "s"),
    ],
    "汇合以后又放了一个": [
        ("begin", "s"), ("record", "s", "f"), ("wait", "a", "f"), ("launch", "a"), ("record", "a", "ja"),
        ("wait", "s", "ja"), ("launch", "a"), ("launch", "s"), ("end", "s"),
    ],
    "事件记录得太早": [
        ("record", "s", "f"), ("begin", "s"), ("launch", "s"), ("wait", "a", "f"), ("launch", "a"), ("record", "a", "ja"), ("wait", "s", "ja"),
    ],
    "先分叉，后汇合，再从汇合处分叉": [
        ("begin", "s"), ("record", "s", "f"), ("wait", "a", "f"), ("launch", "a"), ("launch", "s"),
        ("record", "a", "ja"), ("wait", "s", "ja"), ("record", "s", "f"), ("wait", "b", "f"), ("launch", "b"), ("launch", "s"),
        ("record", "b", "jb"), ("wait", "s", "jb"), ("end", "s"), ("launch", "a"),
    ],
    "绕路汇合": [
        ("begin", "s"), ("launch", "s"), ("record", "s", "f"), ("wait", "a", "f"), ("launch", "a"), ("record", "a", "ja"),
        ("wait", "b", "ja"), ("launch", "b"), ("record", "b", "jb"), ("wait", "s", "jb"), ("end", "s"),
    ],
}

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 捕获其实只是在传名单。你要为谁记一份名单？一条流“在不在捕获中”，能不能就用“有没有名单”来表示？
# 里面的事件名单可以是空的，外面的事件没有名单，这两种怎么分开？
# 一个新节点的祖先，怎样由名单上那些节点的祖先得到？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 只用到字典和集合。`名单 = {流: 集合}`，`事件 = {事件: 集合或 None}`，`祖先 = {编号: 集合}`。
# 合并用 `|`，一次合并许多个用 `set().union(*一串集合)`；子集用 `<=`。抄名单时复制一份：`set(原来的)`，不然两边会一起变。
# `for name, s, *event in calls:` 可以同时拆开两项和三项的元组。
#
# </details>

# %% solution="predict"
def predict(calls):
    """Tell what a sequence of calls records.

    calls: tuples ("begin" | "launch" | "end", stream) or ("record" | "wait", stream, event).
    Returns (code, ran, before): 0, 904 or 905; numbers of the launches that ran at once; for each captured launch
    [number, numbers of all that must be done before it], or [] if code is not 0.
    """
    ### BEGIN SOLUTION: 给每条捕获中的流记一份名单；记录是抄名单，等待是并名单，启动让名单缩成一个；别忘了名单可以是空的
    waiting, events, ancestors, ran, launches = {}, {}, {}, [], 0
    for name, s, *event in calls:
        if name == "begin":
            origin, waiting[s] = s, set()
        elif name == "launch":
            if s in waiting:
                ancestors[launches] = set(waiting[s]).union(*(ancestors[node] for node in waiting[s]))
                waiting[s] = {launches}
            else:
                ran.append(launches)
            launches += 1
        elif name == "record":
            events[event[0]] = set(waiting[s]) if s in waiting else None
        elif name == "wait":
            listed = events[event[0]]
            if listed is not None:
                waiting[s] = waiting.get(s, set()) | listed
            elif s in waiting:
                return 905, ran, []
        else:
            covered = set(waiting[origin]).union(*(ancestors[node] for node in waiting[origin]))
            code = 0 if set().union(*waiting.values()) <= covered else 904
            waiting = {}
    return code, ran, [] if code else [[node, sorted(before)] for node, before in sorted(ancestors.items())]
    ### END SOLUTION


# %% test="predict" kind="answer" points=3
fork = [("begin", "s"), ("launch", "s"), ("record", "s", "f"), ("wait", "a", "f"), ("launch", "a"), ("record", "a", "j")]
check.equal(
    student.predict([*fork, ("wait", "s", "j"), ("launch", "s"), ("end", "s")]), (0, [], [[0, []], [1, [0]], [2, [0, 1]]]),
    why="分叉、汇合都齐了：0 在前，1 等 0，2 等 1（所以也在 0 之后）。祖先要列全部，不只是直接等的。",
)
check.equal(student.predict([*fork, ("launch", "s"), ("end", "s")]), (904, [], []), why="没有汇合：应当是 904。录到的都作废，也没有哪个当场执行过，后两项是空列表。")
check.equal(
    student.predict([("begin", "s"), ("launch", "s"), ("launch", "a"), ("record", "a", "j"), ("wait", "s", "j")]), (905, [1], []),
    why="没有分叉：a 不在捕获中，它的内核当场执行，事件是外面的，起始流一等就是 905。",
)
check.equal(
    student.predict([("begin", "s"), ("record", "s", "f"), ("wait", "a", "f"), ("launch", "a"), ("launch", "s"), ("record", "a", "j"), ("wait", "s", "j"), ("end", "s"), ("launch", "a")]),
    (0, [2], [[0, []], [1, []]]),
    why="一开头就分叉，名单是空的，可那也是里面的事件：两个内核都进图，互不相等。捕获结束以后，a 又是一条普通的流。",
)
### BEGIN HIDDEN TESTS
def rule(calls):
    """What the driver would make of it: (code, ran, before)."""
    lists, marks, known, at_once, number, code = {}, {}, {}, [], 0, 0
    for name, queue, *rest in calls:
        if name == "begin":
            lists, first = {queue: frozenset()}, queue
        elif name == "launch":
            if queue in lists:
                known[number] = lists[queue] | frozenset(a for node in lists[queue] for a in known[node])
                lists[queue] = frozenset([number])
            else:
                at_once.append(number)
            number += 1
        elif name == "record":
            marks[rest[0]] = lists.get(queue)
        elif name == "wait":
            if marks[rest[0]] is not None:
                lists[queue] = lists.get(queue, frozenset()) | marks[rest[0]]
            elif queue in lists:
                return 905, at_once, []
        else:
            joined = lists[first] | frozenset(a for node in lists[first] for a in known[node])
            code = 0 if all(nodes <= joined for nodes in lists.values()) else 904
            lists = {}
    return code, at_once, [] if code else [[node, sorted(before)] for node, before in sorted(known.items())]


def drawn(kind):
    """Calls of a random capture over an origin and up to four other streams: "joined", "unjoined" or "outside"."""
    names = [str(name) for name in secret.permutation(["s", "q", "main", "w", "z"])]
    first, others = names[0], names[1 : 2 + int(secret.integers(4))]
    calls, inside, unjoined, events = [], [first], set(), 0
    oldest = int(secret.integers(2))  # some captures keep an event from their beginning and come back to it
    for _ in range(int(secret.integers(3))):  # before the capture, on any stream
        calls.append(("launch", str(secret.choice(names))))
    # All events have been recorded outside before: what counts is the last time.
    calls += [("record", str(secret.choice(names)), event) for event in ("early", "first", "e0", "e1", "e2")] + [("begin", first)]
    calls += [("launch", first)] * int(secret.integers(2)) + [("record", first, "first")]

    def handed(source, target):
        nonlocal events
        event = f"e{events % 3}"  # used again and again
        events += 1
        return [("record", source, event), ("wait", target, event)]

    for _ in range(int(secret.integers(4, 12))):
        choice = secret.integers(4)
        idle = [name for name in others if name not in inside]
        if choice == 0 and idle:  # draw one in
            target = idle[0]
            calls += [*([("wait", target, "first")] if oldest else handed(str(secret.choice(inside)), target)), ("launch", target)]
            inside.append(target)
            unjoined.add(target)
        elif choice == 1 and len(inside) > 1:  # hand over between two
            source, target = (str(name) for name in secret.choice(inside, 2, replace=False))
            calls += [*handed(source, target), ("launch", target)]
            unjoined |= {target} - {first}
        elif choice == 2 and idle:  # a stream that is not drawn in
            calls += [("launch", idle[-1]), ("wait", idle[-1], "early")]
        else:
            target = str(secret.choice(inside))
            calls.append(("launch", target))
            unjoined |= {target} - {first}
    if kind == "outside":
        source = str(secret.choice([name for name in names if name not in inside] or ["other"]))
        target, event = str(secret.choice(inside)), str(secret.choice(["o", "first", "e0"]))  # a new one, or one that was inside
        return [*calls, ("launch", source), ("record", source, event), ("wait", target, event)]
    if kind == "unjoined" and not unjoined:
        target = others[0]
        calls += [*handed(first, target), ("launch", target)]
        inside.append(target)
        unjoined.add(target)
    ends = [str(name) for name in secret.permutation(sorted(set(inside) - {first}))]
    if kind == "unjoined":
        ends.remove(str(secret.choice(sorted(unjoined))))
    for name in ends:
        calls += handed(name, first)
        if secret.integers(2):
            calls.append(("launch", first))
    return [*calls, ("end", first), *[("launch", name) for name in names[:2]]]


listed = list(reference.value("CASES").values())
check.equal([student.predict(calls) for calls in listed], [rule(calls) for calls in listed], why="CASES 里有说错的。对着规则一条条走，先看哪条流在捕获中。")
late = [*fork, ("wait", "s", "j"), ("launch", "a"), ("launch", "s"), ("end", "s")]
check.equal(student.predict(late), (904, [], []), why="汇合以后，分支上又启动了一个：它没有汇合，是 904。要看结束那一刻各条流的名单。")
renewed = [("begin", "s"), ("launch", "s"), ("record", "s", "f"), ("launch", "s"), ("wait", "a", "f"), ("launch", "a"), ("record", "a", "f"), ("wait", "s", "f"), ("end", "s")]
kept = [("begin", "s"), ("record", "s", "f"), ("wait", "a", "f"), ("launch", "a"), ("record", "a", "j"), ("wait", "s", "j"), ("wait", "b", "f"), ("launch", "b"), ("record", "b", "j"), ("wait", "s", "j"), ("end", "s")]
check.equal(student.predict(kept), (0, [], [[0, []], [1, []]]), why="事件里的名单是记录那一刻抄下的，之后那条流再等别人，事件不跟着变。抄的时候复制了吗？")
check.equal(student.predict(renewed), (0, [], [[0, []], [1, [0]], [2, [0]]]), why="记录以后又启动的，不在事件的名单上；同一个事件重新记录，以最后一次为准。")
inward = [("record", "s", "f"), ("begin", "s"), ("launch", "s"), ("record", "s", "f"), ("wait", "a", "f"), ("launch", "a"), ("record", "a", "f"), ("wait", "s", "f"), ("end", "s")]
check.equal(student.predict(inward), (0, [], [[0, []], [1, [0]]]), why="捕获以前记录过的事件，在捕获中的流上重新记录以后，就是里面的事件：以最后一次为准。")
outward = [*fork, ("launch", "b"), ("record", "b", "f"), ("wait", "s", "f")]
check.equal(student.predict(outward), (905, [2], []), why="原来在里面的事件，在别的流上重新记录以后，就是外面的事件：以最后一次为准。")
for kind, why in (
    ("joined", "随机的、汇合齐全的捕获里有说错的。汇合可以绕路；名单要并，不是替换；祖先要一直追到头。"),
    ("unjoined", "随机的捕获里，有一条流没有完全汇合，结果不对。"),
    ("outside", "随机的捕获里，最后等了一个外面的事件，结果不对。事件记录的那一刻，那条流在捕获中吗？"),
):
    many_calls = [drawn(kind) for _ in range(40)]
    check.equal([student.predict(calls) for calls in many_calls], [rule(calls) for calls in many_calls], why=why)
### END HIDDEN TESTS

# %% [markdown]
# 现在让驱动来打分：把 `CASES` 里的调用真的做一遍。每个内核的节点里写着它的编号，谁在谁前面由图里的边算出来；
# 当场执行的内核会改动自己的那一格，也看得见。（这一格要先做完练习一。）

# %% tags=["demo", "gpu"]
import ctypes


def number_of(node):
    """The `first` that a mix node holds."""
    slots = ctypes.cast(lab.check_cuda(driver.cuGraphKernelNodeGetParams(node)).kernelParams, ctypes.POINTER(ctypes.c_void_p))
    return ctypes.c_uint32.from_address(slots[1]).value


def ancestors_in(graph):
    """[[number of a kernel, numbers of all that must be done before it], …], sorted."""
    found, edges, nodes = topology(graph)
    number = {name: number_of(node) - 1 for name, node in zip(found, nodes, strict=True)}
    before = {name: set() for name in found}
    for _ in found:
        for tail, head in edges:
            before[head] |= before[tail] | {tail}
    return sorted([number[name], sorted(number[other] for other in others)] for name, others in before.items())


def performed(calls):
    """Make the calls for real. Returns (code, ran, before), as predict does."""
    queues = {s: cp.cuda.Stream(non_blocking=True) for s in sorted({call[1] for call in calls})}
    marks = {call[2]: cp.cuda.Event(disable_timing=True) for call in calls if len(call) == 3}
    n_launches = sum(call[0] == "launch" for call in calls)
    with stream:
        board = cp.zeros(n_launches * BLOCK, cp.uint32)
    stream.synchronize()
    code, launched, made = 0, 0, None
    for name, s, *event in calls:
        if name == "begin":
            origin = queues[s]
            result = cudart.cudaStreamBeginCapture(origin.ptr, THREAD_LOCAL)
        elif name == "launch":
            on(queues[s], launch_mix, board[launched * BLOCK : (launched + 1) * BLOCK], launched + 1)  # never 0: it shows if it ran
            launched, result = launched + 1, (0,)
        elif name == "record":
            result = cudart.cudaEventRecord(marks[event[0]].ptr, queues[s].ptr)
        elif name == "wait":
            result = cudart.cudaStreamWaitEvent(queues[s].ptr, marks[event[0]].ptr, 0)
        else:
            result = cudart.cudaStreamEndCapture(queues[s].ptr)
            made = None if int(result[0]) else result[1]
        code = code or int(result[0])
    if int(lab.check_cuda(cudart.cudaStreamIsCapturing(origin.ptr))):
        cudart.cudaStreamEndCapture(origin.ptr)
    cudart.cudaGetLastError()
    cp.cuda.Device().synchronize()
    ran = [i for i in range(n_launches) if board[i * BLOCK].get()]
    before = [] if made is None else ancestors_in(made)
    if made is not None:
        cudart.cudaGraphDestroy(made)
    return code, ran, before


def put(answer):
    code, ran, before = answer
    ran_text = "，".join(map(str, ran)) or "没有"
    return f"{code}；当场：{ran_text}；" + ("　".join(f"{node}←{others}" for node, others in before) or "没有图")


rows = [(title, put(predict(calls)), put(performed(calls)), "一致" if predict(calls) == performed(calls) else "不一致") for title, calls in CASES.items()]
lab.say(lab.table(("调用", "你的判断（编号←祖先）", "驱动的回答", "对不对"), rows))

# %% [markdown]
# ### 练习二：一次不怕打扰的分叉捕获（3 分）
#
# 写 `capture_forked(before, branches, after)`，把任意的工作录成“开头 → 并排的分支 → 结尾”：
#
# - `before`、`after` 和 `branches` 里的每一项都是没有参数的函数，调用它，它就往**当前流**里启动一些工作；每个函数恰好调用一次；
# - `before()` 和 `after()` 在 `stream` 上，第 `k` 条分支在 `sides[k]` 上；分支有 1 到 3 条；
# - 每条分支都在 `before` 的全部工作之后，`after` 在所有分支之后，分支之间没有先后；
# - 返回捕获到的**定义**（`cudaGraph_t`，归调用者所有），不实例化，不启动；
# - 捕获期间垃圾回收是关着的；捕获之前先收一次；离开时恢复**原来的**状态，不管成功还是失败；
# - 开头、分支、结尾里抛出的异常都原样出去，所有的流都不再捕获，之后还能再捕获。（用给定的 `capturing`，这一条几乎不用操心。）
#
# 事件要在捕获开始之前创建，并且拿到捕获结束。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 一条分支要经过哪几步：进来、做事、回来？进来用的事件记录一次够不够几条分支用？回来用的事件呢？
# 回收原来是开是关，要在哪里记下，在哪里恢复，才能保证出错时也恢复？收一次，应当在捕获之前还是之后？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 捕获：`with capturing(stream) as captured:`，块里当前流就是 `stream`，块结束以后定义是 `captured[0]`。
# 事件：`cp.cuda.Event(disable_timing=True)`（不带计时，更轻）、`event.record(流)`、`流.wait_event(event)`；换当前流：`with sides[k]:`。
# 回收：`gc.collect()`、`gc.isenabled()`、`gc.disable()`、`gc.enable()`；善后放在 `try … finally`。
#
# </details>

# %% solution="capture_forked" tags=["gpu"]
def capture_forked(before, branches, after):
    """Capture before() on `stream`, then each branch on its own stream of `sides`, side by side, then after() on `stream`.

    Each is a callable that launches work on the current stream. 1 to len(sides) branches. Returns the definition
    (cudaGraph_t), which the caller owns. The garbage collector rests meanwhile and is left as it was found.
    """
    ### BEGIN SOLUTION: 先备好事件，收一次垃圾、记下回收的开关再关掉；捕获里每条分支三步：进来、做事、回来；最后在 finally 里恢复开关
    forked = cp.cuda.Event(disable_timing=True)
    joined = [cp.cuda.Event(disable_timing=True) for _ in branches]
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with capturing(stream) as captured:
            before()
            forked.record(stream)
            for side, branch, done in zip(sides[: len(branches)], branches, joined, strict=True):
                side.wait_event(forked)
                with side:
                    branch()
                done.record(side)
            for done in joined:
                stream.wait_event(done)
            after()
    finally:
        if was_enabled:
            gc.enable()
    return captured[0]
    ### END SOLUTION


# %% test="capture_forked_shape" kind="structure" points=2 tags=["gpu"]
# Planted work: chains of mix nodes on slices of one buffer, as functions without arguments.
JOBS = """
def jobs(launch, x, chains):
    def chain(lane, steps):
        def work():
            for first in steps:
                launch(x[lane * 256 : (lane + 1) * 256], first, 1)
        return work
    return [chain(lane, steps) for lane, steps in chains]
"""
EDGES = """
def shape(graph):
    from cuda.bindings import runtime
    graph = runtime.cudaGraph_t(int(graph))
    count = int(runtime.cudaGraphGetNodes(graph, 0)[2])
    nodes = list(runtime.cudaGraphGetNodes(graph, count)[1])
    position = {int(node): i for i, node in enumerate(nodes)}
    n_edges = runtime.cudaGraphGetEdges(graph, 0)[-1]
    ends = runtime.cudaGraphGetEdges(graph, n_edges)[1:3] if n_edges else ([], [])
    return [count, [[position[int(a)], position[int(b)]] for a, b in zip(*ends)]]
"""


def pairs(told):
    """How many pairs of nodes have an order, from [nodes, edges]: edges that say nothing new don't count."""
    n, links = told
    above = [set() for _ in range(n)]
    for _ in range(n):
        for tail, head in links:
            above[head] |= above[tail] | {tail}
    return sum(map(len, above))


def wanted(first, lengths, last):
    """The pairs of a graph of a chain, side-by-side chains, and a chain."""
    middle = sum(lengths)
    return sum(n * (n - 1) // 2 for n in (first, *lengths, last)) + first * middle + (first + middle) * last


shape, planted = student.define(EDGES, "shape"), student.define(JOBS, "jobs")
data = np.arange(4 * 256, dtype=np.uint32)
x = on_gpu(data)
start, left, middle, right, finish = planted(student.value("launch_mix"), x, [[0, [1]], [1, [2, 3]], [2, [4]], [3, [5, 6, 7]], [0, [8, 9]]])
definition = student.capture_forked(start, [left, middle, right], finish)
check.equal(x.read(), data, why="捕获完成后 x 就变了，有启动落在了捕获之外。分支都被拉进捕获了吗？")
check.nodes(definition, kernels=9, total=9, why="开头 1 个、三条分支 2 + 1 + 3 个、结尾 2 个，应当正好 9 个内核。每个函数恰好调用一次了吗？返回的是定义（cudaGraph_t）吗？")
check.equal(pairs(shape(definition)), wanted(1, (2, 1, 3), 2), why="谁在谁前面不对。开头在所有分支之前，结尾在所有分支之后，分支之间不能有先后：分叉的事件是只记录了一次，还是每条分支重新记录？")
live = student.LiveGraph(definition)
live.run(1)


def advanced(data, chains):
    parts = data.reshape(-1, 256).copy()
    for lane, steps in chains:
        for first in steps:
            parts[lane] = reference.mixed(parts[lane], 1, first)
    return parts.reshape(-1)


check.equal(x.read(), advanced(data, [[0, [1]], [1, [2, 3]], [2, [4]], [3, [5, 6, 7]], [0, [8, 9]]]), why="重放一次的结果不对。")
### BEGIN HIDDEN TESTS
for n_branches in (1, 2, 3, 3):
    lengths = [int(n) for n in secret.integers(1, 7, n_branches)]
    first, last = int(secret.integers(1, 4)), int(secret.integers(1, 4))
    chains = [[lane, [int(i) for i in secret.integers(0, 10**6, n)]] for lane, n in zip([0, *range(1, n_branches + 1), 0], [first, *lengths, last], strict=True)]
    data = secret.integers(0, 2**32, 4 * 256, dtype=np.uint32)
    x = on_gpu(data)
    work = planted(student.value("launch_mix"), x, chains)
    definition = student.capture_forked(work[0], work[1:-1], work[-1])
    total = first + sum(lengths) + last
    check.nodes(definition, kernels=total, total=total, why="换了分支的条数和长短，图里的内核个数不对。三条流用满了吗，还是写死了三条？")
    check.equal(pairs(shape(definition)), wanted(first, lengths, last), why="换了分支的条数和长短，谁在谁前面不对。")
    live = student.LiveGraph(definition)
    runs = int(secret.integers(2, 6))
    live.run(runs)
    for _ in range(runs):
        data = advanced(data, chains)
    check.equal(x.read(), data, why="换了数据，重放几次的结果不对。")
### END HIDDEN TESTS

# %% test="capture_forked_quiet" kind="structure" points=1 tags=["gpu"]
TRIALS = """
import gc
import weakref

from cuda.bindings import runtime


class Planned(Exception):
    pass


class Courteous:
    def __init__(self, stream):
        self.stream, self.myself = stream, self

    def __del__(self):
        runtime.cudaStreamSynchronize(self.stream.ptr)


def trial(name, capture_forked, stream, sides, launch, x):
    \"\"\"What came of a capture: [exception, collector on afterwards, old garbage gone inside, streams still capturing, nodes].\"\"\"
    gone = []
    ghost = Courteous(stream)
    old = weakref.ref(ghost)

    def work(place):
        def planted():
            if place == "branch":
                gone.append(int(old() is None))
            if place == "branch" and name == "young":
                Courteous(stream)
                _ = [[] for _ in range(20000)]
            if name.endswith(place):
                raise Planned
            launch(x, 1, 1)
        return planted

    was_enabled = gc.isenabled()
    gc.disable() if name.startswith("off") else gc.enable()
    del ghost
    raised, nodes = "", 0
    try:
        try:
            graph = capture_forked(work("before"), [work("branch")], work("after"))
            nodes = int(runtime.cudaGraphGetNodes(graph, 0)[2])
            runtime.cudaGraphDestroy(graph)
        except NotImplementedError:
            raise
        except BaseException as error:
            raised = type(error).__name__
        on = int(gc.isenabled())
        capturing = 0
        for queue in [stream, *sides]:
            if int(runtime.cudaStreamIsCapturing(queue.ptr)[1]):
                capturing += 1
                runtime.cudaStreamEndCapture(queue.ptr)
        runtime.cudaGetLastError()
        return [raised, on, (gone or [-1])[0], capturing, nodes]
    finally:
        gc.enable() if was_enabled else gc.disable()
        gc.collect()
"""
trial = student.define(TRIALS, "trial")
given = [student.value(name) for name in ("capture_forked", "stream", "sides", "launch_mix")]
x = on_gpu(np.arange(1000, dtype=np.uint32))
told = trial("plain", *given, x)
check.equal([told[0], told[1]], ["", 1], why="一次平常的捕获：应当没有异常，而且离开以后回收重新打开了。")
told = trial("young", *given, x)
check.equal([told[0], told[4]], ["", 3], why="捕获中间产生了圈状的垃圾，又新建了许多对象，捕获就被打断了：垃圾回收在捕获时还开着。")
### BEGIN HIDDEN TESTS
told = trial("off", *given, x)
check.equal(told[1], 0, why="进来之前回收是关着的，离开时却被打开了。要恢复的是原来的状态。")
check.equal(told, ["", 0, 1, 0, 3], why="捕获之前的圈状垃圾，到了捕获里还在：进捕获之前收一次了吗？")
told = trial("raises in branch", *given, x)
check.equal(told[0], "Planned", why="分支里抛出的异常没有原样出来。")
check.equal(told[1:4], [1, 1, 0], why="分支失败以后，回收没有恢复，或者还有流停在捕获里。")
told = trial("off, raises in branch", *given, x)
check.equal(told, ["Planned", 0, 1, 0, 0], why="进来之前回收是关着的，分支失败以后却被打开了。不管成功还是失败，要恢复的都是原来的状态。")
for place in ("before", "after"):
    told = trial(f"raises in {place}", *given, x)
    check.equal([told[0], told[1], told[3]], ["Planned", 1, 0], why="开头或结尾里抛出异常以后，异常没有原样出来，回收没有恢复，或者还有流停在捕获里。")
told = trial("plain", *given, x)
check.equal(told, ["", 1, 1, 0, 3], why="失败过一次以后，再捕获就不行了。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：两百张图以后，一个字节也不少（2 分）
#
# 有一类请求，每个的图都不一样，只能现建现用。`define_request(x, i)` 给出这样一张图的定义：它在图里分配一块和 `x` 一样大的显存，
# 把由 `x` 和 `i` 算出的结果写进去，**没有释放**，因为结果要在图外用。
#
# 写 `serve_all(x, numbers)`，对 `numbers` 里的每个 `i`，依次（全部在 `stream` 上）：
#
# 1. 用 `define_request(x, i)` 得到定义和结果的地址，实例化，启动；
# 2. 在图外把结果揉进 `x`：`launch_absorb(x, 地址)`。
#
# 并且让显存保持平坦：
#
# - 一个请求交出去了，就收拾它，不要攒到最后：两百张图之中，同时活着的只有少数几张。每张可执行图、每个定义都销毁，每块结果都释放；
# - 返回时，`stream` 上的工作已经做完，图的显存 used 和 reserved 都回到了调用之前；
# - `i` 是负数时，`define_request` 抛 `ValueError`（什么也没有捕获）。异常原样出去，但在它之前的请求照样要收拾干净，
#   已经启动的照样做完。
#
# 录图在给定的 `define_request` 里面，垃圾回收这一题不用管。

# %% tags=["gpu"]
def define_request(x, i):
    """Capture, on `stream`, a graph that allocates x.nbytes and writes spread(x, i) there. Returns (definition, address).

    The definition (cudaGraph_t) is the caller's. The memory is the caller's from the launch on: it is not freed in the
    graph. ValueError for a negative i.
    """
    if i < 0:
        raise ValueError(f"请求的编号不能是负数：{i}")
    with capturing(stream) as captured:
        result = lab.check_cuda(cudart.cudaMallocAsync(x.nbytes, stream.ptr))
        launch_spread(result, x, i)
    return captured[0], result


# %%
def all_served(x, numbers):
    """What the requests make of x (numpy uint32)."""
    for i in numbers:
        x = x ^ spread_out(x, i)
    return x


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 一个请求欠下几笔账？“图的显存”那一节数过。哪一笔可以马上还，哪一笔要等 GPU 做完？
# 释放也是流里的工作：排在 `launch_absorb` 之前还是之后？要不要为它停下来等？
# 最后那一步无论如何都要做，放在哪里？它只还空着的显存，所以之前要先做什么？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 都用 `lab.check_cuda(…)` 包起来：`cudart.cudaGraphInstantiate(定义, 0)`、`cudart.cudaGraphLaunch(可执行图, stream.ptr)`、
# `cudart.cudaFreeAsync(地址, stream.ptr)`、`cudart.cudaGraphExecDestroy(可执行图)`、`cudart.cudaGraphDestroy(定义)`；
# 也可以用 `LiveGraph`。`launch_absorb` 发往当前流：`with stream:`。
# 归还：`stream.synchronize()`，然后 `cudart.cudaDeviceGraphMemTrim(cp.cuda.Device().id)`；善后放在 `try … finally`。
#
# </details>

# %% solution="serve_all" tags=["gpu"]
def serve_all(x, numbers):
    """Serve the requests in order, each with a graph of its own: x ^= its result. Leaves no graph and no graph memory behind.

    x: cupy uint32, 1-D, advanced in place; done when this returns. numbers: iterable of int. What define_request raises
    goes on, after the requests before it have been served.
    """
    ### BEGIN SOLUTION: 每个请求还三笔账：结果的显存、可执行图、定义；全部做完（或出错）以后，先等，再把空着的显存还回去
    try:
        for i in numbers:
            definition, result = define_request(x, i)
            executable = lab.check_cuda(cudart.cudaGraphInstantiate(definition, 0))
            lab.check_cuda(cudart.cudaGraphLaunch(executable, stream.ptr))
            with stream:
                launch_absorb(x, result)
            lab.check_cuda(cudart.cudaFreeAsync(result, stream.ptr))
            lab.check_cuda(cudart.cudaGraphExecDestroy(executable))
            lab.check_cuda(cudart.cudaGraphDestroy(definition))
    finally:
        stream.synchronize()
        lab.check_cuda(cudart.cudaDeviceGraphMemTrim(cp.cuda.Device().id))
    ### END SOLUTION


# %% test="serve_all" kind="structure" points=2 tags=["gpu"]
# Runs serve_all and keeps count. Graph memory is this process's own; free device memory is everybody's.
AUDIT = """
import gc

import cupy
from cuda.bindings import driver, runtime

KINDS = runtime.cudaGraphMemAttributeType


def attribute(name):
    error, value = runtime.cudaDeviceGetGraphMemAttribute(cupy.cuda.Device().id, getattr(KINDS, "cudaGraphMemAttr" + name))
    return int(value)


def audit(serve_all, stream, x, numbers, launch_spin=None):
    \"\"\"[exception, graphs captured, instantiated, executables and definitions destroyed, used, reserved, most used, device bytes, launches, most alive, all done].\"\"\"
    counts = dict.fromkeys(["cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphInstantiateWithFlags", "cudaGraphExecDestroy", "cudaGraphDestroy", "cudaGraphLaunch"], 0)
    originals = {name: getattr(runtime, name) for name in counts}
    free_async, free_now = runtime.cudaFreeAsync, runtime.cudaFree
    alive = [0]

    def spoil_and_free(pointer, queue):
        # What is freed may be somebody else's at once: so it is here.
        runtime.cudaMemsetAsync(pointer, 0xA5, x.nbytes, queue)
        return free_async(pointer, queue)

    def spoil_and_free_now(pointer):
        runtime.cudaMemsetAsync(pointer, 0xA5, x.nbytes, stream.ptr)
        return free_now(pointer)

    def made():
        return counts["cudaGraphInstantiate"] + counts["cudaGraphInstantiateWithFlags"]

    def counted(name):
        def call(*arguments, **named):
            result = originals[name](*arguments, **named)
            counts[name] += int(result[0]) == 0
            alive.append(max(made() - counts["cudaGraphExecDestroy"], counts["cudaStreamEndCapture"] - counts["cudaGraphDestroy"]))
            return result
        return call

    gc.collect()
    cupy.cuda.runtime.deviceSynchronize()
    runtime.cudaDeviceGraphMemTrim(cupy.cuda.Device().id)
    used, reserved = attribute("UsedMemCurrent"), attribute("ReservedMemCurrent")
    runtime.cudaDeviceSetGraphMemAttribute(cupy.cuda.Device().id, KINDS.cudaGraphMemAttrUsedMemHigh, driver.cuuint64_t(0))
    free = cupy.cuda.runtime.memGetInfo()[0]
    raised = ""
    for name in counts:
        setattr(runtime, name, counted(name))
    runtime.cudaFreeAsync, runtime.cudaFree = spoil_and_free, spoil_and_free_now
    if launch_spin is not None:  # a GPU that is behind
        with stream:
            launch_spin(30_000)
    try:
        serve_all(x, numbers)
    except NotImplementedError:
        raise
    except Exception as error:
        raised = type(error).__name__
    finally:
        for name, original in originals.items():
            setattr(runtime, name, original)
        runtime.cudaFreeAsync, runtime.cudaFree = free_async, free_now
    # Before anything is waited for or collected here: this is what the learner left.
    done = stream.done
    left = [attribute("UsedMemCurrent") - used, attribute("ReservedMemCurrent") - reserved]
    high = attribute("UsedMemHigh") - used
    cupy.cuda.runtime.deviceSynchronize()
    gc.collect()
    lost = free - cupy.cuda.runtime.memGetInfo()[0]
    ended = [counts[name] for name in ("cudaGraphExecDestroy", "cudaGraphDestroy")]
    return [raised, counts["cudaStreamEndCapture"], made(), *ended, *left, high, lost, counts["cudaGraphLaunch"], max(alive), done]
"""
audit = student.define(AUDIT, "audit")
function, queue = student.value("serve_all"), student.value("stream")
data = np.arange(4096, dtype=np.uint32)
x = on_gpu(data)
told = audit(function, queue, x, [1, 2, 3])
check.equal(told[0], "", why="三个平常的请求，却抛出了异常。")
check.equal(x.read(), reference.all_served(data, [1, 2, 3]), why="三个请求之后 x 不对。每个请求：启动图，再把结果揉进 x，都在 stream 上。释放是不是排到了 launch_absorb 前面？释放以后，那里随时可能是别人的数据。")
check.equal(told[1:5], [3, 3, 3, 3], why="三个请求应当捕获 3 个定义、实例化 3 次、销毁 3 张可执行图和 3 个定义。有没有哪一样忘了销毁？")
check.equal(told[5], 0, why="返回以后，图的显存 used 没有回到原来：结果的显存都释放了吗？释放以后，等 stream 做完、修剪了吗？")
check.equal(told[6], 0, why="返回以后，图的显存 reserved 没有回到原来：最后修剪了吗？修剪只还空着的，之前先等 stream 做完。")
### BEGIN HIDDEN TESTS
numbers = [int(i) for i in secret.integers(0, 2**31, 200)]
size = int(secret.integers(300_000, 600_000))  # 1 to 2.4 MB
data = secret.integers(0, 2**32, size, dtype=np.uint32)
x = on_gpu(data)
# What one living result costs: graph memory comes in whole pages, far larger than it on some drivers.
single = reference.define(AUDIT, "audit")(reference.value("serve_all"), reference.value("stream"), on_gpu(data), numbers[:1])[7]
told = audit(function, queue, x, numbers)
check.equal(x.read(), reference.all_served(data, numbers), why="两百个请求之后 x 不对。")
check.equal(told[1:7], [200, 200, 200, 200, 0, 0], why="两百个请求以后，图没有全部销毁，或者图的显存没有全部还回去。")
check.equal(told[9], 200, why="两百个请求，图却不是正好启动两百次：结果要由每个请求自己的那一张图来算。")
check.that(told[7] <= 50 * max(single, 4 * size), why="两百张图的结果同时活着：请在每个请求之后马上释放，不要攒到最后。")
check.that(told[10] <= 20, why="许多张可执行图或定义同时活着：请在每个请求之后马上销毁，不要攒到最后。")
bad = int(secret.integers(20, 60))
short = [*numbers[:bad], -1, *numbers[bad:]]
data = x.write(secret.integers(0, 2**32, size, dtype=np.uint32))
told = audit(function, queue, x, short)
check.equal(told[0], "ValueError", why="编号是负数的请求，define_request 抛出的 ValueError 应当原样出来。")
check.equal(x.read(), reference.all_served(data, numbers[:bad]), why="出错之前的请求没有做完，或者出错之后的请求也做了。")
check.equal(told[1:7], [bad, bad, bad, bad, 0, 0], why="中途出错，之前的图没有全部销毁，或者图的显存没有全部还回去。善后放在 finally 里了吗？")
told = audit(function, queue, x, [1, 2, 3], student.value("launch_spin"))
check.that(told[11], why="GPU 还没有做完，serve_all 就返回了：返回以前要等 stream 做完，它才能把图的显存还给系统。")
check.equal(told[:7], ["", 3, 3, 3, 3, 0, 0], why="GPU 忙着别的，三个请求排在后面：返回时图没有全部销毁，或者图的显存没有全部还回去。先等 stream 做完，再修剪。")
told = audit(function, queue, x, [-1, 5])
check.equal(told[:7], ["ValueError", 0, 0, 0, 0, 0, 0], why="第一个请求的编号就是负数：什么也没有捕获，应当只有 define_request 的 ValueError 出来。")
losses = [audit(function, queue, x, numbers[:60])[8] for _ in range(3)]
check.that(min(losses) <= 16 << 20, why="再做三轮、每轮 60 张图，设备的空闲显存每轮都少了许多：还有东西没有还。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：项目，前处理 → 三个分支 → 汇总（4 分）
#
# 把“基础篇”合起来。一个请求是这样的：
#
# 1. **前处理**：把新数据从收件箱（锁页内存，pinned memory）拷到设备上的 `tray`，`launch_absorb(x, tray)` 吸收进状态 `x`；
# 2. **三个分支**：第 `k` 个分支（k = 0、1、2）在自己的缓冲 `part` 上做 `branch_work(part, x, k, n)`：1 个 `spread`，再 `n` 个 `mix`，每个 `ROUNDS` 轮；
# 3. **汇总**：`launch_reduce(x, 分支零的, 分支一的, 分支二的)`，揉回 `x`。
#
# `x` 每个请求都往前走一步，所以漏做一个内核、少做一个请求，结果都会不同。给定的 `EagerPipeline` 用最平常的写法，全在一条流里逐个启动。
# 写 `make_pipeline(x, n)`，在 `stream` 上把整个请求做成一张图，返回给定的 `Pipeline`：
#
# - 图里有 1 个拷贝、1 个 `absorb`、3 × (1 + n) 个分支内核、1 个 `reduce`；三个分支并排；
# - 建图时不改变 `x`，不怕垃圾回收打断（可以直接用练习二里你写的 `capture_forked`）；图指向的缓冲有人保管；
# - `pipeline.feed(batch)` 换一份数据，`pipeline()` 启动一个请求，`pipeline.close()` 善终，这些外壳已经给好；
# - 快：`n = 30` 时，一个请求的端到端时间（从提交到整个设备做完）不超过 `EagerPipeline` 的一半；
#   如果在这台机器上参考实现还不到 4 倍，门槛降为它的一半（不低于 1.2 倍）；加速只走完一半路的，给一半分。
#
# 动手之前先猜：只用图（录成一条链）够不够一半？只用三条流呢？

# %% tags=["gpu"]
ROUNDS = 300  # of each mix in a branch: a kernel about as long as a launch


def branch_work(part, x, k, n):
    """Branch k of a request, on the current stream: part = spread(x, k), then n launches of mix on part."""
    launch_spread(part, x, k)
    for j in range(n):
        launch_mix(part, 1_000_000 * k + ROUNDS * j, ROUNDS)


class Pipeline:
    """A request as a graph: call it to launch it once, without waiting.

    live: the LiveGraph, which also keeps the buffers. inbox: pinned numpy array that the graph copies from.
    """

    def __init__(self, live, inbox):
        self.live, self.inbox = live, inbox

    @property
    def graph(self):
        return self.live.graph

    def feed(self, batch):
        """Put batch (numpy, like inbox) in place, once earlier requests have read the inbox."""
        stream.synchronize()
        self.inbox[...] = batch

    def __call__(self):
        self.live()

    def close(self):
        self.live.close()


class EagerPipeline:
    """The same request, launched piece by piece in one stream: call it to do one, without waiting."""

    def __init__(self, x, n):
        self.x, self.n = x, n
        self.inbox = cupyx.zeros_pinned(x.shape, x.dtype)
        self.tray = cp.empty_like(x)
        self.parts = [cp.empty_like(x) for _ in range(3)]

    def feed(self, batch):
        stream.synchronize()
        self.inbox[...] = batch

    def __call__(self):
        to_device = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        lab.check_cuda(cudart.cudaMemcpyAsync(self.tray.data.ptr, self.inbox.ctypes.data, self.inbox.nbytes, to_device, stream.ptr))
        with stream:
            launch_absorb(self.x, self.tray)
            for k, part in enumerate(self.parts):
                branch_work(part, self.x, k, self.n)
            launch_reduce(self.x, *self.parts)


# %%
def answered(x, batch, n, rounds=300):
    """What a request with this batch makes of x (numpy uint32)."""
    x = x ^ batch
    parts = [spread_out(x, k) for k in range(3)]
    for k in range(3):
        parts[k] = mixed(parts[k], n * rounds, first=1_000_000 * k)
    return reduced(x, *parts)


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 哪些只准备一次：收件箱、`tray`、三个 `part`、图？哪些每个请求都变？
# 一个请求正好是练习二的三段：开头是什么，三条分支各是什么，结尾是什么？每一段都要写成没有参数的函数。
# 图只记得地址：五块缓冲，谁来保管到图销毁的那一天？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 缓冲：`cupyx.zeros_pinned(x.shape, x.dtype)`（锁页的 numpy 数组，地址是 `.ctypes.data`）、`cp.empty_like(x)`，都在捕获之前准备。
# 拷贝：`lab.check_cuda(cudart.cudaMemcpyAsync(目标地址, 源地址, 字节数, cudart.cudaMemcpyKind.cudaMemcpyHostToDevice, stream.ptr))`。
# 没有参数的函数：`partial(branch_work, part, x, k, n)`，或者在函数里定义的 `def`（小心循环变量）。
# 保管：`LiveGraph(定义, 缓冲, 缓冲, …)`，再交给 `Pipeline(live, inbox)`。
#
# </details>

# %% solution="make_pipeline" tags=["gpu"]
def make_pipeline(x, n):
    """Capture one request on x as a graph: copy and absorb, three branches side by side, reduce.

    x: cupy uint32, 1-D, advanced in place by each launch; it stays the caller's. n: mix launches of a branch, at least 1.
    Returns a Pipeline whose LiveGraph keeps the buffers; the inbox holds zeros at first.
    """
    ### BEGIN SOLUTION: 先备好五块缓冲，把请求拆成开头、三条分支、结尾，用练习二录下来，再连同缓冲一起交给 LiveGraph 保管
    inbox = cupyx.zeros_pinned(x.shape, x.dtype)
    tray = cp.empty_like(x)
    parts = [cp.empty_like(x) for _ in range(3)]
    to_device = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice

    def prepare():
        lab.check_cuda(cudart.cudaMemcpyAsync(tray.data.ptr, inbox.ctypes.data, inbox.nbytes, to_device, stream.ptr))
        launch_absorb(x, tray)

    branches = [partial(branch_work, part, x, k, n) for k, part in enumerate(parts)]
    definition = capture_forked(prepare, branches, partial(launch_reduce, x, *parts))
    return Pipeline(LiveGraph(definition, inbox, tray, *parts), inbox)
    ### END SOLUTION


# %% test="make_pipeline_result" kind="structure" points=2 tags=["gpu"]
data, batch = np.arange(1000, dtype=np.uint32), np.full(1000, 12345, np.uint32)
x = on_gpu(data)
pipeline = student.make_pipeline(x, 2)
check.equal(x.read(), data, why="建图的时候 x 就变了，有启动落在了捕获之外。")
check.nodes(pipeline.get("graph"), memcpys=1, kernels=11, total=12, why="n = 2 时应当是 1 个拷贝和 1 + 3 × 3 + 1 = 11 个内核。Pipeline 里装的是 LiveGraph 吗？")
PINNED = """
def is_pinned(pipeline):
    from cuda.bindings import runtime
    error, found = runtime.cudaPointerGetAttributes(pipeline.inbox.ctypes.data)
    return int(error) == 0 and found.type == runtime.cudaMemoryType.cudaMemoryTypeHost
"""
check.that(student.define(PINNED, "is_pinned")(pipeline), why="收件箱不是锁页内存。它是用 cupyx.zeros_pinned 分配的吗？")
pipeline.feed(batch)
pipeline.run(1)
check.equal(x.read(), reference.answered(data, batch, 2), why="一个请求的结果不对。拷贝、absorb、三条分支、reduce 都做了吗？三个分支的 k 和次序对吗？")
### BEGIN HIDDEN TESTS
# How long the longest path is, and how many pairs of nodes have an order, tell whether the branches are side by side.
SHAPE = """
def shape(graph):
    from cuda.bindings import runtime
    graph = runtime.cudaGraph_t(int(graph))
    count = int(runtime.cudaGraphGetNodes(graph, 0)[2])
    nodes = list(runtime.cudaGraphGetNodes(graph, count)[1])
    position = {int(node): i for i, node in enumerate(nodes)}
    n_edges = runtime.cudaGraphGetEdges(graph, 0)[-1]
    ends = runtime.cudaGraphGetEdges(graph, n_edges)[1:3] if n_edges else ([], [])
    links = [(position[int(a)], position[int(b)]) for a, b in zip(*ends)]
    above = [set() for _ in range(count)]
    for _ in range(count):
        for tail, head in links:
            above[head] |= above[tail] | {tail}
    return sum(map(len, above))
"""
TENANTS = """
def tenants(stream, size):
    import gc, cupy, cupyx
    gc.collect()
    arrays = [cupy.full(size, 0xA5A5A5A5, cupy.uint32) for _ in range(6)]
    with stream:
        arrays += [cupy.full(size, 0xA5A5A5A5, cupy.uint32) for _ in range(6)]
    letters = [cupyx.zeros_pinned(size, cupy.uint32) for _ in range(3)]
    for letter in letters:
        letter[...] = 0xA5A5A5A5
    cupy.cuda.runtime.deviceSynchronize()
    return [arrays, letters]
"""
# A launch that is in every branch leaves garbage whose finaliser waits for the stream: a collector that works then ends the capture.
LITTER = """
import gc

from cuda.bindings import runtime


class Courteous:
    def __init__(self, stream):
        self.stream, self.myself = stream, self

    def __del__(self):
        runtime.cudaStreamSynchronize(self.stream.ptr)


def amid_litter(make_pipeline, launch_spread, stream, x, n):
    \"\"\"[the pipeline or None, the exception's class].\"\"\"
    def littering(*arguments, **named):
        Courteous(stream)
        _ = [[] for _ in range(20000)]
        return launch_spread(*arguments, **named)

    was_enabled, names = gc.isenabled(), launch_spread.__globals__
    gc.enable()
    names["launch_spread"] = littering
    try:
        return [make_pipeline(x, n), ""]
    except Exception as error:
        return [None, type(error).__name__]
    finally:
        names["launch_spread"] = launch_spread
        gc.enable() if was_enabled else gc.disable()
        gc.collect()
"""
size, n = int(secret.integers(500, 3000)), int(secret.integers(3, 6))
data = secret.integers(0, 2**32, size, dtype=np.uint32)
x = on_gpu(data)
pipeline = student.make_pipeline(x, n)
branch = n + 1
check.nodes(pipeline.get("graph"), memcpys=1, kernels=3 * branch + 2, total=3 * branch + 3, why="换一个 n，图里的节点数就不对了。")
ordered = 1 + 2 * 3 * branch + 3 * branch * (branch - 1) // 2 + 2 + 3 * branch
check.equal(student.define(SHAPE, "shape")(pipeline.get("graph")), ordered, why="谁在谁前面不对。三个分支要并排，都在 absorb 之后、reduce 之前。")
others, letters = student.define(TENANTS, "tenants")(student.value("stream"), size)
for _ in range(3):
    batch = secret.integers(0, 2**32, size, dtype=np.uint32)
    runs = int(secret.integers(1, 4))
    pipeline.feed(batch)
    pipeline.run(runs)
    for _ in range(runs):
        data = reference.answered(data, batch, n)
    check.equal(x.read(), data, why="换了几份数据，结果不对。每个请求都要从收件箱重新拷贝当时的内容；缓冲有人保管吗？")
replay = pipeline.get("graph").instantiate()
replay.run(1)
data = reference.answered(data, batch, n)
check.equal(x.read(), data, why="把 pipeline.graph 这个定义实例化以后单独启动一次，结果不对：一个请求的全部工作都要在这张图里。")
pattern = np.full(size, 0xA5A5A5A5, np.uint32)
check.equal([other.numpy() for other in others], [pattern] * len(others), why="请求写坏了别人的数组：有的缓冲已经被内存池收回，给了别人，而图还在往里写。")
other_data = secret.integers(0, 2**32, size, dtype=np.uint32)
y = on_gpu(other_data)
second = student.make_pipeline(y, n)
second.feed(batch)
pipeline.close()
pipeline.close()
second.run(2)
check.equal(y.read(), reference.answered(reference.answered(other_data, batch, n), batch, n), why="两条流水线同时在，关掉一条，另一条就不对了：缓冲不能共用。")
check.equal(x.read(), data, why="处理另一条流水线的请求，却改动了这一条的 x。")
third, raised = student.define(LITTER, "amid_litter")(student.value("make_pipeline"), student.value("launch_spread"), student.value("stream"), x, n)
check.equal(raised, "", why="建图的中途有圈状的垃圾，捕获就被打断了：垃圾回收在捕获时还开着。可以直接用练习二里你写的 capture_forked。")
third.feed(batch)
third.run(1)
check.equal(x.read(), reference.answered(data, batch, n), why="建图的中途有圈状的垃圾，录到的图就不对了。")
### END HIDDEN TESTS

# %% test="make_pipeline_speed" kind="speedup" points=2 tags=["gpu"]
start = secret.integers(0, 2**32, 1024, dtype=np.uint32)
x, y, z = on_gpu(start), on_gpu(start), on_gpu(start)
pipeline, eager, best = student.make_pipeline(x, 30), reference.EagerPipeline(y, 30), reference.make_pipeline(z, 30)
batch = secret.integers(0, 2**32, 1024, dtype=np.uint32)
for each in (pipeline, eager, best):
    each.feed(batch)
check.nodes(pipeline.get("graph"), memcpys=1, kernels=95, total=96, why="n = 30 时应当是 1 个拷贝和 95 个内核。")
check.speedup(
    pipeline,
    over=eager,
    best=best,
    state=(x, z),
    at_least=2.0,
    why="还不够快。三个分支之间有没有路径相连？只要串在一起，GPU 上的路就是三倍长。每个请求只有一次图启动吗？",
)
### BEGIN HIDDEN TESTS
batch = secret.integers(0, 2**32, 1024, dtype=np.uint32)
pipeline.feed(batch)
data = x.write(secret.integers(0, 2**32, 1024, dtype=np.uint32))
pipeline.run(2)
for _ in range(2):
    data = reference.answered(data, batch, 30)
check.equal(x.read(), data, why="计时以后换一份数据再处理，结果不对：快，但没有做完该做的工作。")
### END HIDDEN TESTS

# %% [markdown]
# 验收：用你的流水线处理 50 份数据，和 `EagerPipeline` 对结果，再把四种做法摆在一起。（这一格要先做完练习二和练习四。）

# %% tags=["demo", "gpu"]
def chain_pipeline(x, n):
    """The request captured in one stream: a graph that is a chain."""
    plain = EagerPipeline(x, n)
    with capturing(stream) as captured:
        plain()
    return LiveGraph(captured[0], plain)


def eager_branches(pieces):
    """The request of an EagerPipeline, launched piece by piece, its branches in three streams."""
    to_device = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
    lab.check_cuda(cudart.cudaMemcpyAsync(pieces.tray.data.ptr, pieces.inbox.ctypes.data, pieces.inbox.nbytes, to_device, stream.ptr))
    branches = [[partial(branch_work, part, pieces.x, k, pieces.n)] for k, part in enumerate(pieces.parts)]
    fork_join(branches, partial(launch_absorb, pieces.x, pieces.tray), partial(launch_reduce, pieces.x, *pieces.parts))


with stream:
    states = [cp.arange(1024, dtype=cp.uint32) for _ in range(4)]
stream.synchronize()
mine, plainly = make_pipeline(states[0], 30), EagerPipeline(states[1], 30)
rng = np.random.default_rng(8)
for _ in range(50):
    arrived = rng.integers(0, 2**32, 1024, dtype=np.uint32)
    for each in (mine, plainly):
        each.feed(arrived)
        each()
stream.synchronize()
print("50 份数据以后，两种做法的状态一样：", np.array_equal(states[0].get(), states[1].get()))

only_graph, pieces = chain_pipeline(states[2], 30), EagerPipeline(states[3], 30)
lab.end_to_end_us(plainly, repeats=5)  # discarded
whole = lab.compare_us(plainly, mine, clock="end_to_end", pairs=31)
halves = lab.compare_us(partial(eager_branches, pieces), only_graph, clock="end_to_end", pairs=31)
bars = {"逐个启动，一条流": whole.first, "逐个启动，三条流": halves.first, "一张图，一条链": halves.second, "一张图，三条分支（你的）": whole.second}
fig, ax = plt.subplots(figsize=(8, 3))
names = list(bars)
ax.barh(names, [bars[name].median for name in names])
for row, name in enumerate(names):
    ax.text(bars[name].median, row, f" {bars[name].median:.0f} µs，{whole.first.median / bars[name].median:.1f} 倍", va="center")
ax.invert_yaxis()
ax.margins(x=0.25)
ax.set_xlabel("一个请求的端到端时间（µs，中位数）")
ax.set_title(f"前处理 → 三个分支 → 汇总，n = 30（{lab.gpu_name()}）")
plt.show()
mine.close()
print("善终以后，再启动会怎样：", end="")
try:
    mine()
except Exception as error:  # noqa: BLE001 - shown to the reader
    print(f"{type(error).__name__}：{error}")

# %% [markdown]
# 动手之前猜的，对了吗？只用图，或者只用三条流，时间有没有缩短到一半？
# 四根柱子是分两组量的：第一根和最后一根轮流量，中间两根轮流量。两组之间，启动的单价可能变了，所以不同组的两根只差一点点，不能算谁快谁慢。
#
# **轮到你**：把 `ROUNDS` 从 300 改成 30，重新运行练习四的给定格、你的解答和上面这一格。先猜：哪一根柱子变得最多，哪一样本事的功劳变小了？
# （改完记得改回来。）

# %% [markdown] tags=["instructor"]
# 给教师：练习一的规则由隐藏测试自己再写一遍，随机的捕获分三类（汇合齐全、缺一次汇合、等外面的事件），事件反复使用、流名随机、捕获前后都有普通的启动。
# 练习二用“有先后关系的节点有多少对”来判断形状，多出来的、不说也知道的边不算错；捕获中途植入一个会同步的析构函数，回收没有关掉就会打断捕获。
# 练习三数实例化、启动和销毁的次数、同时活着的张数，看图的显存账本；设备空闲显存只用很宽的界，因为同一块 GPU 上可能有别的程序。
# 练习四录成一条链也能得到正确的结果，但形状不对，加速也不够；隐藏测试还在每次 `launch_spread` 里留下圈状垃圾，捕获时没有关掉回收的写法会露馅。

# %% [markdown]
# ## 小结
#
# | 以前以为 | 实验以后 |
# |:--|:--|
# | 用了三条流，就是并行 | 边连对了才是：分叉一次，汇合到每条分支的最后一个节点 |
# | 904 和 905 差不多 | 904 是忘了汇合，什么也没做；905 是忘了分叉，内核当场就做了 |
# | 捕获时先写谁，重放就先做谁 | 图只看边；逐个启动才看次序 |
# | 分支越多越快 | 泳道和 SM 都有限，以量到的为准 |
# | 图启动到高优先级的流上，里面紧急的分支就优先 | 那样是整张图一起变高；分支之间要分先后，优先级写在节点里，实例化时带上 `UseNodePriority` |
# | 图销毁了，显存就回来了 | 图里没有释放的那一块不会，要自己释放；还给系统要修剪 |
# | 最后用完的分支负责释放 | 释放要等所有的使用者，也就是汇合以后 |
# | 图还在跑，不能销毁 | 可以；不能放手的是缓冲 |
# | 垃圾回收和 CUDA 没有关系 | 捕获时关掉它，析构函数里不要同步 |
#
# **带走三句话**
#
# 1. 捕获是在传名单：记录是抄，等待是并，启动让名单缩成一个。
# 2. 告别的次序：等做完，销毁图，放掉缓冲；图里拿的显存，谁拿到地址谁负责还。
# 3. 并排缩短 GPU 的路，图让 CPU 喂得上；中等长短的内核，两样一起用。
#
# “基础篇”到此结束。下一步：《构建第一个 TensorRT 引擎》开始用真实的网络；《多流调度》把几个引擎放进一张并排的图；
# 《内存池优化》接着讲图里的显存。
