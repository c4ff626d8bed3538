# %% [markdown]
# # 流捕获：规则与恢复
#
# 一个推理服务启动时要捕获几十张图。一百次启动里有九十九次都好好的，剩下那一次死在 `end_capture`：
# `cudaErrorStreamCaptureInvalidated`，捕获作废。出错的那一行什么也没做错，重启一次又好了。
#
# 原来是另一个线程里的监控代码，正巧在那一刻问了一句“以前那个事件做完了吗”。
#
# 捕获像录音：录音的时候，谁能说话，谁一开口这一条就废了，有一套明确的规则。
# 这一章把规则一条条问出来，再学会在录废了以后收拾干净，让下一次还能录。
#
# **学完以后，你能够**
#
# - 说出一条流的三种捕获状态，并从一串返回码里找出**第一个**打断捕获的调用；
# - 为捕获选对流和模式，知道哪些操作、在哪个线程里，会打断谁的捕获；
# - 看到 900 到 908 中的任何一个错误码，知道它在说什么、怎么治；
# - 在捕获里要临时显存而不写坏别人的数据；
# - 写一个不管在哪里失败都收拾干净的捕获上下文管理器。
#
# **需要的基础**：《CUDA 图优化概念》里的捕获、实例化、图启动，以及“图只记住地址”。
#
# **时间**：约 75 分钟，其中四道练习约 45 分钟。
#
# 下一格导入的 `check`、`student` 等五个名字只给练习后面的测试单元用，现在不用管它们。

# %%
import numpy as np
from functools import partial
from launchlab import lab
from launchlab.exam import check, on_gpu, reference, secret, student

lab.here()

# %% [markdown]
# ## 一次捕获的一生
#
# 先备好本章的工具。内核有五个：
#
# - `mix`：把每个 32 位整数“搅拌”一次，漏做、多做、换序都会得到不同的结果；
# - `absorb`：把另一块缓冲异或进来；
# - `stir` 和 `turn`：一个把搅拌的结果写到暂存区（scratch，只在这一步用的临时缓冲）里，一个再从暂存区错开一格搬回来。
#   中间那块暂存区少不了，后面讲“在捕获里要显存”时用；
# - `spin`：空转一段给定的时间。
#
# 流有三条：`stream` 和 `side` 用 `non_blocking=True` 创建，`blocking` 没有。差别马上会看到。
#
# 本章还要真的开线程。`in_thread(work)` 在一个新线程里运行 `work()`，等它做完，把返回值（或者它抛出的异常）带回来；
# 等超过 10 秒就放弃，所以笔记本不会卡死。

# %% tags=["gpu"]
import threading
from contextlib import contextmanager

import cupy as cp
from cuda.bindings import runtime as cudart

SOURCE = r"""
__device__ unsigned int stirred(unsigned int v, unsigned int i) {
    v ^= v >> 15;
    v *= 0x2c1b3c6du;
    v ^= v >> 12;
    return v + i;
}

extern "C" __global__ void mix(unsigned int *x, unsigned int i, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) x[t] = stirred(x[t], i);
}

extern "C" __global__ void absorb(unsigned int *x, const unsigned int *input, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) x[t] ^= input[t];
}

extern "C" __global__ void stir(unsigned int *scratch, const unsigned int *x, unsigned int i, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) scratch[t] = stirred(x[t], i);
}

extern "C" __global__ void turn(unsigned int *x, const unsigned int *scratch, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) x[t] = scratch[(t + 1) % size];
}

extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
}
"""
module = cp.RawModule(code=SOURCE)
mix, absorb, stir, turn, spin = (module.get_function(name) for name in ("mix", "absorb", "stir", "turn", "spin"))

stream = cp.cuda.Stream(non_blocking=True)
side = cp.cuda.Stream(non_blocking=True)
blocking = cp.cuda.Stream()
BLOCK = 256

GLOBAL = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal
THREAD_LOCAL = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
RELAXED = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed


# -(-size // BLOCK) is size / BLOCK rounded up: enough blocks to cover every element.
def launch_mix(x, i):
    """Launch mix with index i on x (cupy uint32, 1-D), on the current stream. Returns at once."""
    mix((-(-x.size // BLOCK),), (BLOCK,), (x, np.uint32(i), np.uint32(x.size)))


def launch_absorb(x, other):
    """Launch x ^= other (cupy uint32, 1-D, same size), on the current stream. Returns at once."""
    absorb((-(-x.size // BLOCK),), (BLOCK,), (x, other, np.uint32(x.size)))


def launch_stir(scratch, x, i):
    """Launch scratch = one round of mix with index i of x, on the current stream; x stays. Returns at once.

    scratch: a cupy array like x, or the address (int) of as many bytes of device memory.
    """
    stir((-(-x.size // BLOCK),), (BLOCK,), (np.uint64(address(scratch)), x, np.uint32(i), np.uint32(x.size)))


def launch_turn(x, scratch):
    """Launch x[t] = scratch[t + 1], the last one from scratch[0], on the current stream. scratch: as for launch_stir."""
    turn((-(-x.size // BLOCK),), (BLOCK,), (x, np.uint64(address(scratch)), np.uint32(x.size)))


def address(memory):
    """Device address of a cupy array; an address stays as it is."""
    return memory if isinstance(memory, int) else memory.data.ptr


def launch_spin(us):
    """Keep one GPU thread busy for us microseconds, on the current stream. Returns at once."""
    spin((1,), (1,), (np.uint64(us * 1000),))


def in_thread(work, seconds=10):
    """Run work() in a thread of its own, wait for it, return its result; what it raises is raised here.

    TimeoutError if it takes longer than `seconds`.
    """
    outcome = {}

    def run():
        try:
            outcome["result"] = work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised in the thread that waits
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"线程 {seconds} 秒还没有做完")
    if "error" in outcome:
        raise outcome.pop("error")  # popped: an exception that this frame still held would outlive its use
    return outcome["result"]


def close_captures():
    """Throw away every capture that is still open on stream, side and blocking. Returns the codes of ending them."""
    codes = []
    for queue in (stream, side, blocking):
        if int(lab.check_cuda(cudart.cudaStreamIsCapturing(queue.ptr))):
            error, left = cudart.cudaStreamEndCapture(queue.ptr)
            codes.append(int(error))
            if not int(error):
                cudart.cudaGraphDestroy(left)
    cudart.cudaGetLastError()
    return codes


# The first launch of a kernel loads its code, which may be refused while a stream is capturing. Warm up on the stream
# that will capture, not on the default stream.
with stream:
    warm = cp.zeros(BLOCK, cp.uint32)
    launch_mix(warm, 0)
    launch_absorb(warm, warm)
    launch_stir(warm, warm, 0)
    launch_turn(warm, warm)
    launch_spin(1)
stream.synchronize()

# %% [markdown]
# 再要两个 NumPy 版的参照：`mixed` 搅拌 `n` 轮；`turned` 做 `n` 次“`stir` 再 `turn`”。

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


def turned(x, n):
    """Return x (numpy uint32) after n rounds of stir and turn, with indices 0 … n-1; x stays as it is."""
    v = x
    for i in range(n):
        v = np.roll(mixed(v, 1, first=i), -1)
    return v


# %% [markdown]
# ### 三种状态
#
# 一条流在任何时刻都处在三种捕获状态之一：没有捕获、进行中、已作废。问它的办法是 `cudaStreamIsCapturing`；
# 想知道更多，用 `cudaStreamGetCaptureInfo`：捕获的编号、正在生长的图，以及“下一个节点要等几个节点”。
#
# 这两个查询本身不会打扰捕获，所以可以在每一步之后都问一次。下面故意在捕获中途同步一下，看状态怎么走。
# 先猜：同步以后的那次 memset，返回什么？流什么时候才恢复正常？

# %% tags=["demo", "gpu"]
STATUS = ("没有捕获", "进行中", "已作废")  # cudaStreamCaptureStatus: 0, 1, 2

with stream:
    xs = cp.arange(4096, dtype=cp.uint32)
    ys = cp.zeros_like(xs)
stream.synchronize()


def clear_word(pointer):
    """Ask for a memset of 4 bytes of xs on a stream (its handle). Returns the result tuple of cuda.bindings."""
    return cudart.cudaMemsetAsync(xs.data.ptr, 0, 4, pointer)


journey = [
    ("cudaStreamBeginCapture", lambda: cudart.cudaStreamBeginCapture(stream.ptr, GLOBAL)),
    ("cudaMemsetAsync", lambda: clear_word(stream.ptr)),
    ("cudaMemsetAsync", lambda: clear_word(stream.ptr)),
    ("cudaStreamSynchronize", lambda: cudart.cudaStreamSynchronize(stream.ptr)),
    ("cudaMemsetAsync", lambda: clear_word(stream.ptr)),
    ("cudaStreamEndCapture", lambda: cudart.cudaStreamEndCapture(stream.ptr)),
    ("cudaMemsetAsync", lambda: clear_word(stream.ptr)),
]
rows = []
for name, call in journey:
    code = call()[0]
    state = lab.check_cuda(cudart.cudaStreamIsCapturing(stream.ptr))
    # By position: CUDA 12 and 13 return different things in the middle.
    info = cudart.cudaStreamGetCaptureInfo(stream.ptr) if int(state) == 1 else None
    more = (info[2], info[-1]) if info else ("—", "—")
    rows.append((f"`{name}`", f"{int(code)}", STATUS[int(state)], *more))
lab.say(lab.table(("调用", "返回码", "之后的状态", "捕获编号", "下一个节点要等几个"), rows))

# %% [markdown]
# 对照这张表看三件事：
#
# - **同步返回 900**（`cudaErrorStreamCaptureUnsupported`，捕获期间不支持），捕获当场作废。什么都没有真正执行，
#   “等它做完”没有意义，所以被拒绝。
# - **后面的调用返回 901**（`cudaErrorStreamCaptureInvalidated`，捕获已经作废）。它们自己没有错，只是碰上了残骸。
#   我们把 901 叫**回声**。
# - **作废以后还要结束捕获**，哪怕它也返回 901：`cudaStreamEndCapture` 之后，流才回到正常状态，最后那次 memset 才真的执行。
#
# 还有一样东西会留下来。CUDA 运行时（runtime）为每个线程记着“最近一次错误”（last error），等人来取：

# %% tags=["demo", "gpu"]
def last_error():
    """The code of the last error, which stays as it is."""
    return int(cudart.cudaPeekAtLastError()[0])


lab.check_cuda(clear_word(stream.ptr))  # all is well now …
left_over = last_error()  # … and still:
cudart.cudaGetLastError()  # reads it and clears it
lab.say(
    f"捕获早就结束了，一次成功的调用也做过了，`cudaPeekAtLastError` 仍然给出 **{left_over}**；"
    f"`cudaGetLastError` 取走以后是 {last_error()}。"
)

# %% [markdown]
# 如果留着不是 0，麻烦在哪里？很多 C++ 库启动内核以后会调用 `cudaGetLastError` 检查有没有出错。
# 它取到的是**你**留下的旧错误，于是一个结果正确的请求被判了失败。所以失败以后，要把它取走。
#
# 同一个进程里可以有好几份运行时：pip 装的 CuPy 自带一份，抛异常之前会清掉自己那份；上面说的是 `cuda.bindings` 这一份。

# %% [markdown]
# ## 误区一：报错的那一行就是凶手
#
# 下面是一次六步的捕获。只看返回码，你会怀疑哪一步？再看每一步之后的状态，真正打断捕获的是哪一步？
#
# `trace` 运行一串步骤，记下三样：调用的名字、返回码（CuPy 抛异常就取异常里的码，没抛就是 0）、之后 `stream` 的状态。

# %% tags=["demo", "gpu"]
CUPY_ERRORS = (cp.cuda.runtime.CUDARuntimeError, cp.cuda.driver.CUDADriverError)


def code_of(call):
    """Error code of call(): from the tuple of cuda.bindings that it returns, or from CuPy's exception; else 0."""
    try:
        result = call()
    except CUPY_ERRORS as error:
        return int(error.status)
    return int(result[0]) if isinstance(result, tuple) else 0


def trace(steps):
    """Run steps, pairs (name, call). Returns records (name, code, capture status of `stream` after it)."""
    records = []
    for name, call in steps:
        code = code_of(call)
        records.append((name, code, int(lab.check_cuda(cudart.cudaStreamIsCapturing(stream.ptr)))))
    cudart.cudaGetLastError()
    return records


def mix_once():
    with stream:
        launch_mix(xs, 0)


six_steps = trace(
    [
        ("stream.begin_capture()", stream.begin_capture),
        ("launch_mix", mix_once),
        ("if stream.done: …", lambda: stream.done),
        ("launch_mix", mix_once),
        ("cudaMemsetAsync", lambda: clear_word(stream.ptr)),
        ("cudaStreamEndCapture", lambda: cudart.cudaStreamEndCapture(stream.ptr)),
    ]
)
lab.say(lab.table(("步", "调用", "返回码", "之后的状态"), [(i, f"`{name}`", code, STATUS[state]) for i, (name, code, state) in enumerate(six_steps)]))
loud = next((i for i, (_, code, _) in enumerate(six_steps) if code), None)
fatal = next((i for i, (_, _, state) in enumerate(six_steps) if state == 2), None)
if fatal is not None and loud is not None:
    lab.say(
        f"第一个报错的是第 {loud} 步 `{six_steps[loud][0]}`（{six_steps[loud][1]}）；"
        f"状态第一次变成“已作废”是在第 {fatal} 步 **`{six_steps[fatal][0]}`** 之后，它的返回码是 {six_steps[fatal][1]}。"
    )

# %% [markdown]
# `stream.done` 看上去只是“看一眼做完没有”，底下却是 `cudaStreamQuery`：捕获中的流不许问。
# 更糟的是，CuPy 不检查它的返回码，只拿来和“成功”比较，于是得到 `False`，一点声音也没有。
# 等到后面有人报错，报的已经是回声了。
#
# 所以排错的办法不是看谁报错，而是**看状态在哪一步之后变了**。怀疑一段代码，就在每一步后面问一次状态，像这样二分下去。
# 想在捕获中途看进度，用 `stream.is_capturing()` 或 `cudaStreamIsCapturing`，不要用 `done`。
#
# （`is_capturing()` 遇到已经作废的捕获会抛 `RuntimeError`；它不会让情况更坏。）

# %% [markdown]
# ## 在哪条流上捕获
#
# `cp.cuda.Stream()` 创建的是阻塞流（blocking stream）：它和传统默认流（legacy default stream，句柄是 0，也叫 NULL 流）互相等待。
# 加上 `non_blocking=True`（C++ 里是 `cudaStreamNonBlocking`）就不互相等待了。另外还有每线程默认流（per-thread default stream），每个线程各有一条。
#
# 四种流都拿来捕获，中途往传统默认流里放一个 memset，就像某个库悄悄做的那样。
# 最后两行换成最宽松的模式，或者让**另一个线程**去碰默认流，看能不能躲过去。

# %% tags=["demo", "gpu"]
def here(work):
    return work()


def with_legacy_midway(pointer, mode, who):
    """Capture on a stream (its handle); who() asks for a memset on the legacy stream midway. Codes and a status, or dashes."""
    began = int(cudart.cudaStreamBeginCapture(pointer, mode)[0])
    if began:
        cudart.cudaGetLastError()
        return began, "—", "—", "—", "—"
    asked = int(cudart.cudaStreamIsCapturing(0)[0])
    alive = int(lab.check_cuda(cudart.cudaStreamIsCapturing(pointer)))
    touched = who(lambda: int(clear_word(0)[0]))
    ended, captured = cudart.cudaStreamEndCapture(pointer)
    if not int(ended):
        lab.check_cuda(cudart.cudaGraphDestroy(captured))
    cudart.cudaGetLastError()
    return began, asked, STATUS[alive], touched, int(ended)


cases = [
    ("传统默认流，global", 0, GLOBAL, here),
    ("每线程默认流，global", cudart.cudaStreamPerThread, GLOBAL, here),
    ("非阻塞流，global", stream.ptr, GLOBAL, here),
    ("阻塞流，global", blocking.ptr, GLOBAL, here),
    ("阻塞流，relaxed", blocking.ptr, RELAXED, here),
    ("阻塞流，thread-local，另一线程碰默认流", blocking.ptr, THREAD_LOCAL, in_thread),
]
found = {name: with_legacy_midway(*case) for name, *case in cases}
lab.say(
    lab.table(
        ("在什么流上捕获", "开始捕获", "问默认流的状态", "问完以后捕获", "往默认流里放 memset", "结束捕获"),
        [(name, *codes) for name, codes in found.items()],
    )
)
rescued = [name for name in list(found)[4:] if found[name][4] == 0]
lab.say("换模式、换线程，救得了阻塞流上的捕获吗：" + (f"在这台机器上，{'、'.join(rescued)}可以。" if rescued else "**都救不了**。"))

# %% [markdown]
# - 传统默认流自己不能捕获（CuPy 的 `begin_capture` 会提前抛 `RuntimeError`）。
# - 906（`cudaErrorStreamCaptureImplicit`）说的是“隐式依赖”：阻塞流（每线程默认流也算）和传统默认流天生互相等待，往默认流里放东西，
#   就等于让没有捕获的工作去等捕获中的工作，这没法录。
# - 只是**问**默认流的状态也可能得到 906，但看下一列：问一问并不伤害捕获。
# - 非阻塞流和默认流没有关系，所以两边各走各的。
#
# 结论很简单：**捕获用非阻塞流，捕获期间的每一件事都写明在哪条流上。** 预热也在捕获流上做，
# 别在默认流上预热：库有可能记住“上次用的是默认流”，捕获时再去碰它。
#
# ### 非阻塞的代价：顺序要自己排
#
# 既然谁也不等谁，“先准备输入，再重放”就不会自动成立了。`side` 上先空转 20 毫秒再改写 `xs`，
# `stream` 上重放一张把 `xs` 拷到 `ys` 的图。不用事件，和用事件排好顺序，各做五次：

# %% tags=["demo", "gpu"]
from collections import Counter


def record(work, mode=RELAXED):
    """Capture what work() launches on `stream`. Returns an instantiated cupy Graph."""
    with stream:
        stream.begin_capture(int(mode))
        try:
            work()
        finally:
            captured = stream.end_capture()
    return captured


def kinds(captured):
    """Count the nodes of a graph (a cupy Graph, or a cudaGraph_t) by kind."""
    definition = getattr(captured, "graph", captured)
    _, count = lab.check_cuda(cudart.cudaGraphGetNodes(definition, 0))  # asks only how many there are
    nodes, _ = lab.check_cuda(cudart.cudaGraphGetNodes(definition, count)) if count else ([], 0)
    types = (lab.check_cuda(cudart.cudaGraphNodeGetType(node)) for node in nodes)
    return dict(Counter(kind.name.removeprefix("cudaGraphNodeType") for kind in types))


def copy_out():
    kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    lab.check_cuda(cudart.cudaMemcpyAsync(ys.data.ptr, xs.data.ptr, xs.nbytes, kind, stream.ptr))


copying = record(copy_out)
produced = cp.cuda.Event(disable_timing=True)
right = {"不用事件": 0, "用事件": 0}
cp.cuda.Device().synchronize()
now = xs.get()
for way in right:
    for i in range(5):
        with side:
            launch_spin(20_000)
            launch_mix(xs, i)
        now = mixed(now, 1, first=i)
        if way == "用事件":
            produced.record(side)
            stream.wait_event(produced)
        copying.launch(stream)
        stream.synchronize()
        right[way] += int(np.array_equal(ys.get(), now))
        side.synchronize()
lab.say(lab.table(("先改写，再重放", "5 次里对了几次"), right.items()))

# %% [markdown]
# 不用事件的那一行也没有报错，只是结果会旧一拍。重放前后，凡是别的流来写输入、来读输出，都要用事件排好顺序（或者放进同一条流）。
# 注意这对 `record` 和 `wait_event` 都发生在捕获**之外**。

# %% [markdown]
# ## 捕获模式：谁会被谁打断
#
# `cudaStreamBeginCapture` 的第二个参数是捕获模式。它管的是一类“可能不安全”的调用：
# 它们不排进任何一条流，录不下来；或者底下可能偷偷等别的流，比如 `cudaMalloc`。
#
# | 模式 | 捕获开着的时候，谁不许做“可能不安全”的调用 |
# |:--|:--|
# | global（最严，也是 C++ 例子里常见的） | 所有线程 |
# | thread-local | 只有开始捕获的那个线程 |
# | relaxed（最松，CuPy 的默认） | 没有人 |
#
# 每个线程自己也有一个模式，默认是 global；`cudaThreadExchangeStreamCaptureMode` 把它换成另一个，并交还原来的，用完要换回去。
# 换成 relaxed 等于这个线程说：“我知道自己在做什么，别拦我。”
#
# 还有一类调用和捕获**必然冲突**，模式管不了它们，例如同步正在捕获的那条流。
#
# 哪个调用属于哪一类？文档说得不全，各版本也有变化。所以不背，**让你的 GPU 自己填这张表**：
# 每一格都是一次真的捕获，在指定的线程里做一次指定的操作，记下两个码：操作自己返回的，和结束捕获返回的。
# 结束捕获的码不是 0，就说明这次捕获被它打断了。
#
# 先猜三格：另一线程里的 `cudaDeviceSynchronize`，在 thread-local 模式下；同一线程里的 `cudaMalloc`，在 relaxed 模式下；
# 另一线程里查询一个很久以前就完成的事件，在 global 模式下。

# %% tags=["demo", "gpu"]
MEMCPY_TO_DEVICE = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
old = cp.cuda.Event(disable_timing=True)  # recorded before any capture, and long done
inside = cp.cuda.Event(disable_timing=True)  # recorded inside each capture
elsewhere = cp.cuda.Stream(non_blocking=True)
old.record(elsewhere)
elsewhere.synchronize()
few_bytes = np.zeros(64, np.uint8)
ready_made = record(lambda: lab.check_cuda(clear_word(stream.ptr)))
spare = []  # device memory for cudaFree to free


# Each operation returns its result tuple, and leaves what has to be undone after the capture in `later`.
def malloc(later):
    error, pointer = cudart.cudaMalloc(1 << 16)
    if not int(error):
        later.append(lambda: cudart.cudaFree(pointer))
    return (error,)


def free(later):
    result = cudart.cudaFree(spare[-1])
    if not int(result[0]):
        spare.pop()
    return result


def pin(later):
    error, pointer = cudart.cudaHostAlloc(1 << 12, cudart.cudaHostAllocDefault)
    if not int(error):
        later.append(lambda: cudart.cudaFreeHost(pointer))
    return (error,)


def malloc_async_here(later):
    error, pointer = cudart.cudaMallocAsync(1 << 16, stream.ptr)
    return (error,) if int(error) else cudart.cudaFreeAsync(pointer, stream.ptr)


def malloc_async_elsewhere(later):
    error, pointer = cudart.cudaMallocAsync(1 << 16, elsewhere.ptr)
    if not int(error):
        later.append(lambda: cudart.cudaFreeAsync(pointer, elsewhere.ptr))
    return (error,)


def instantiate(later):
    error, executable = cudart.cudaGraphInstantiate(ready_made.graph, 0)
    if not int(error):
        later.append(lambda: cudart.cudaGraphExecDestroy(executable))
    return (error,)


def launch_elsewhere(later):
    later.append(elsewhere.synchronize)
    return cudart.cudaGraphLaunch(ready_made.graphExec, elsewhere.ptr)


OPERATIONS = {
    "cudaStreamIsCapturing（捕获流）": lambda later: cudart.cudaStreamIsCapturing(stream.ptr),
    "cudaStreamSynchronize（捕获流）": lambda later: cudart.cudaStreamSynchronize(stream.ptr),
    "cudaStreamQuery（捕获流）": lambda later: cudart.cudaStreamQuery(stream.ptr),
    "cudaEventQuery（捕获中记录的事件）": lambda later: cudart.cudaEventQuery(inside.ptr),
    "cudaDeviceSynchronize": lambda later: cudart.cudaDeviceSynchronize(),
    "cudaStreamSynchronize（别的流）": lambda later: cudart.cudaStreamSynchronize(elsewhere.ptr),
    "cudaEventQuery（以前的事件）": lambda later: cudart.cudaEventQuery(old.ptr),
    "cudaMalloc": malloc,
    "cudaFree": free,
    "cudaHostAlloc（锁页内存）": pin,
    "cudaMemcpy（同步拷贝）": lambda later: cudart.cudaMemcpy(ys.data.ptr, few_bytes.ctypes.data, few_bytes.nbytes, MEMCPY_TO_DEVICE),
    "cudaMallocAsync（捕获流）": malloc_async_here,
    "cudaMallocAsync（别的流）": malloc_async_elsewhere,
    "cudaMemsetAsync（传统默认流）": lambda later: clear_word(0),
    "cudaGraphInstantiate（另一张图）": instantiate,
    "cudaGraphLaunch（别的流）": launch_elsewhere,
    "cudaMemGetInfo": lambda later: cudart.cudaMemGetInfo(),
}


def relaxed_first(work):
    """Run work() with this thread's own mode set to relaxed, and set it back."""
    before = lab.check_cuda(cudart.cudaThreadExchangeStreamCaptureMode(RELAXED))
    try:
        return work()
    finally:
        lab.check_cuda(cudart.cudaThreadExchangeStreamCaptureMode(before))


def relaxed_in_thread(work):
    return in_thread(partial(relaxed_first, work))


COLUMNS = {
    "同一线程\nglobal": (GLOBAL, here),
    "同一线程\nthread-local": (THREAD_LOCAL, here),
    "同一线程\nrelaxed": (RELAXED, here),
    "另一线程\nglobal": (GLOBAL, in_thread),
    "另一线程\nthread-local": (THREAD_LOCAL, in_thread),
    "另一线程\nrelaxed": (RELAXED, in_thread),
    "同一线程，自己\n换成 relaxed\nglobal": (GLOBAL, relaxed_first),
    "另一线程，自己\n换成 relaxed\nglobal": (GLOBAL, relaxed_in_thread),
}


def attempt(operation, mode, who):
    """One capture with one operation in it, done by who. Returns the codes of the operation and of ending the capture."""
    later = []
    if not spare:
        spare.append(lab.check_cuda(cudart.cudaMalloc(1 << 16)))
    lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, mode))
    try:
        lab.check_cuda(clear_word(stream.ptr))
        lab.check_cuda(cudart.cudaEventRecord(inside.ptr, stream.ptr))
        code = who(lambda: int(operation(later)[0]))
    finally:
        ended, captured = cudart.cudaStreamEndCapture(stream.ptr)
        if not int(ended):
            cudart.cudaGraphDestroy(captured)
        cudart.cudaGetLastError()
    for undo in later:
        undo()
    return code, int(ended)


matrix = {(name, column): attempt(operation, *how) for name, operation in OPERATIONS.items() for column, how in COLUMNS.items()}
while spare:
    lab.check_cuda(cudart.cudaFree(spare.pop()))
print(f"{len(matrix)} 次捕获，其中 {sum(bool(ended) for _, ended in matrix.values())} 次被打断")

# %% tags=["demo", "gpu"]
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

lab.plot_style()
COLOURS = ("#d3ecdf", "#f7ecc8", "#f3c1b8")  # fine, refused but the capture lives, capture broken
grade = [[2 if matrix[op, column][1] else int(bool(matrix[op, column][0])) for column in COLUMNS] for op in OPERATIONS]
fig, ax = plt.subplots(figsize=(11, 7.5))
ax.imshow(grade, cmap=ListedColormap(COLOURS), vmin=0, vmax=2, aspect="auto")
for row, op in enumerate(OPERATIONS):
    for column, name in enumerate(COLUMNS):
        ax.text(column, row, "{} / {}".format(*matrix[op, name]), ha="center", va="center", fontsize=8)
ax.set_xticks(range(len(COLUMNS)), COLUMNS, fontsize=8)
ax.xaxis.tick_top()
ax.set_yticks(range(len(OPERATIONS)), OPERATIONS, fontsize=8)
ax.grid(False)
ax.set_title(f"操作返回码 / 结束捕获返回码：绿 照常，黄 只是被拒绝，红 捕获作废（{lab.gpu_name()}）", fontsize=10)
plt.show()

# %% [markdown]
# 每一格的左边说“操作自己怎么了”，右边说“捕获怎么了”。也就是：谁被拒绝，谁受害。
# 把表读成几句话，同样让代码来读：

# %% tags=["demo", "gpu"]
SAME, OTHER = [f"同一线程\n{mode}" for mode in ("global", "thread-local", "relaxed")], [f"另一线程\n{mode}" for mode in ("global", "thread-local", "relaxed")]


def listed(condition):
    """The operations for which condition(broken) holds; broken(column): whether the capture was broken there."""
    names = [op for op in OPERATIONS if condition(lambda column, op=op: matrix[op, column][1] != 0)]
    return "、".join(f"`{name}`" for name in names) or "（没有）"


lab.say(
    "- **哪种模式、哪个线程都会打断捕获**（必然冲突）："
    + listed(lambda broken: all(map(broken, SAME + OTHER)))
    + "\n- 在捕获的线程里，global 和 thread-local 会打断，**relaxed 放行**（可能不安全）："
    + listed(lambda broken: broken(SAME[0]) and broken(SAME[1]) and not broken(SAME[2]))
    + "\n- 在另一个线程里，global 会打断，**thread-local 就不会**："
    + listed(lambda broken: broken(OTHER[0]) and not broken(OTHER[1]))
    + "\n- 那个线程自己先换成 relaxed，就连 global 也不会打断："
    + listed(lambda broken: broken(OTHER[0]) and not broken(list(COLUMNS)[7]))
    + "\n- 在另一个线程里，**thread-local 也挡不住**："
    + listed(lambda broken: broken(OTHER[1]))
    + "\n- 在这台机器上从来不打断捕获："
    + listed(lambda broken: not any(map(broken, COLUMNS)))
)

# %% [markdown]
# ### 误区二：用了 thread-local，别的线程就伤不到我
#
# 看上面倒数第二条：在另一个线程里，thread-local 挡得住“可能不安全”的调用，挡不住必然冲突的。
# 最常见的是整个设备的同步：它要等这块 GPU 上所有的流，正在捕获的那一条也在里面，谁来调用都一样。
# 所以**服务代码里不要用 `cudaDeviceSynchronize`**：等自己那条流，或者等一个事件。
#
# 据报告，别的 GPU 上的捕获不受影响：危险的单位是设备，不是进程。
#
# ### 看门狗
#
# 开头那个故事，现在可以重演了。一个看门狗线程不停地查询一个早已完成的事件；主线程捕获 200 次，
# 每次捕获中间都有一点 Python 的工作（这里睡 0.5 毫秒）。四种搭配，各能录成多少次？

# %% tags=["demo", "gpu"]
from time import sleep


def survived(mode, poll, rounds=200):
    """Capture `rounds` times while a watchdog thread polls. Returns how many captures lived, and the codes it saw."""
    stop, seen = threading.Event(), Counter()

    def watch():
        while not stop.is_set():
            seen[int(poll()[0])] += 1
            sleep(0.0002)

    watchdog = threading.Thread(target=watch, daemon=True)
    watchdog.start()
    alive = 0
    try:
        for _ in range(rounds):
            lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, mode))
            clear_word(stream.ptr)
            sleep(0.0005)
            clear_word(stream.ptr)
            ended, captured = cudart.cudaStreamEndCapture(stream.ptr)
            if not int(ended):
                alive += 1
                cudart.cudaGraphDestroy(captured)
    finally:
        stop.set()
        watchdog.join(10)
        close_captures()
    return alive, dict(seen)


def query():
    return cudart.cudaEventQuery(old.ptr)


setups = [
    ("global", "直接查", GLOBAL, query),
    ("global", "查之前把自己的线程换成 relaxed", GLOBAL, partial(relaxed_first, query)),
    ("thread-local", "直接查", THREAD_LOCAL, query),
    ("relaxed", "直接查", RELAXED, query),
]
rows = []
for mode_name, how, mode, poll in setups:
    alive, seen = survived(mode, poll)
    rows.append((mode_name, how, f"{alive} / 200", "，".join(f"{code}：{times} 次" for code, times in sorted(seen.items()))))
lab.say(lab.table(("捕获模式", "看门狗", "录成的捕获", "看门狗收到的返回码"), rows))

# %% [markdown]
# 看第一行，受害的是谁？看门狗收到了非 0 的码，被打断的是主线程的捕获：两个线程都看见了错，却没有一个做错了什么。
#
# 两种治法：捕获方用 thread-local；或者后台线程每次查询都把自己的模式换成 relaxed，查完换回来（别忘了 `finally`）。
#
# ### 两个线程同时捕获
#
# 服务里常常每个工作线程有自己的流，各捕获各的图。两个线程同时跑，每轮先 `cudaMalloc` 一小块（预热、建缓冲时常见），
# 再捕获，再释放。比较三种做法：global；thread-local；global 再加一把锁，锁住捕获**和**那些不安全的调用。

# %% tags=["demo", "gpu"]
from contextlib import nullcontext

queues = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]


def worker(queue, mode, lock, rounds, tally):
    """Allocate, capture, free, over and over; count in tally what went wrong."""
    for _ in range(rounds):
        with lock:
            error, pointer = cudart.cudaMalloc(1 << 16)
            tally["分配被拒绝"] += bool(int(error))
        with lock:
            lab.check_cuda(cudart.cudaStreamBeginCapture(queue.ptr, mode))
            clear_word(queue.ptr)
            sleep(0.0005)
            ended, captured = cudart.cudaStreamEndCapture(queue.ptr)
            tally["捕获作废"] += bool(int(ended))
            if not int(ended):
                cudart.cudaGraphDestroy(captured)
        while not int(error):  # the memory is ours: ask until it is taken back
            with lock:
                refused = int(cudart.cudaFree(pointer)[0])
            if not refused:
                break
            tally["释放被拒绝"] += 1
            sleep(0.0002)


def together(*works, seconds=30):
    """Run works in threads side by side and wait for them, no longer than `seconds` each; what one raises is raised here."""
    failed = []

    def run(work):
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised in the thread that waits
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if failed:
        raise failed[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError("有线程没有按时做完")


rows = []
for name, mode, locked in (("global", GLOBAL, False), ("thread-local", THREAD_LOCAL, False), ("global，加锁", GLOBAL, True)):
    tallies = [Counter(), Counter()]
    lock = threading.Lock() if locked else nullcontext()
    together(*(partial(worker, queue, mode, lock, 50, tally) for queue, tally in zip(queues, tallies, strict=True)))
    total = sum(tallies, Counter())
    rows.append((name, *(total[what] for what in ("捕获作废", "分配被拒绝", "释放被拒绝"))))
lab.say(lab.table(("2 个线程 × 50 轮", "捕获作废", "分配被拒绝", "释放被拒绝"), rows))

# %% [markdown]
# 锁要包住每一个可能打断捕获的调用，不只是捕获自己。真实的程序里很难找全，所以首选 thread-local，
# 再把分配、锁页这些准备工作挪到捕获之前。如果 thread-local 那一行在你那里也不全是 0，说明这些调用在你的驱动上和捕获必然冲突，
# 那就只有加锁，或者真的把它们挪走。
#
# 线程里的异常也要带出来：如果工作线程自己吞掉了 900，主线程只会在结束时看到 901。`in_thread` 把它原样抛给等它的人。

# %% [markdown]
# ## 错误码：从 900 到 908
#
# 九个错误码，九种惹祸的办法。下面每一种都当场做一遍，记下出错那一步的返回码、那时捕获的状态、结束捕获的返回码。

# %% tags=["demo", "gpu"]
mark = cp.cuda.Event(disable_timing=True)


def begin(queue, mode=GLOBAL):
    lab.check_cuda(cudart.cudaStreamBeginCapture(queue.ptr, mode))


def fork():
    """Draw `side` into the capture of `stream`: it waits for an event recorded inside."""
    lab.check_cuda(cudart.cudaEventRecord(mark.ptr, stream.ptr))
    lab.check_cuda(cudart.cudaStreamWaitEvent(side.ptr, mark.ptr, 0))
    lab.check_cuda(clear_word(side.ptr))


def synchronized():
    begin(stream)
    return cudart.cudaStreamSynchronize(stream.ptr)


def went_on():
    begin(stream)
    cudart.cudaStreamSynchronize(stream.ptr)
    return clear_word(stream.ptr)


def merged():
    begin(stream)
    begin(side)
    lab.check_cuda(cudart.cudaEventRecord(mark.ptr, stream.ptr))
    return cudart.cudaStreamWaitEvent(side.ptr, mark.ptr, 0)


def ended_on_the_wrong_stream():
    begin(stream)
    fork()
    return cudart.cudaStreamEndCapture(side.ptr)


def never_joined():
    begin(stream)
    fork()
    return cudart.cudaStreamEndCapture(stream.ptr)


def waited_for_the_outside():
    lab.check_cuda(cudart.cudaEventRecord(mark.ptr, elsewhere.ptr))
    begin(stream)
    return cudart.cudaStreamWaitEvent(stream.ptr, mark.ptr, 0)


def touched_the_legacy_stream():
    begin(blocking)
    return clear_word(0)


def asked_a_captured_event():
    begin(stream)
    lab.check_cuda(cudart.cudaEventRecord(mark.ptr, stream.ptr))
    return cudart.cudaEventQuery(mark.ptr)


def ended_in_another_thread():
    begin(stream)
    return in_thread(lambda: cudart.cudaStreamEndCapture(stream.ptr))


MISHAPS = {
    synchronized: ("同步正在捕获的流", "删掉它：同一条流里本来就有先后"),
    went_on: ("作废以后接着用", "这是回声，去找更早的那个调用"),
    merged: ("一次捕获里的流，等另一次捕获里记录的事件", "两次捕获分开做，或者合成一次"),
    ended_on_the_wrong_stream: ("在分叉（fork）出去的流上结束捕获", "在哪条流上开始，就在哪条流上结束"),
    never_joined: ("分叉出去的流没有汇合（join）就结束", "结束之前，让起始流等分支上的事件"),
    waited_for_the_outside: ("捕获中的流，等捕获之外记录的事件", "把等待挪到捕获之前"),
    touched_the_legacy_stream: ("阻塞流在捕获，又用了传统默认流", "捕获用非阻塞流，别碰默认流"),
    asked_a_captured_event: ("查询捕获中记录的事件", "捕获内外各用各的事件"),
    ended_in_another_thread: ("不是 relaxed，却在另一个线程里结束捕获", "同一个线程里开始和结束，或用 relaxed"),
}
rows = []
for mishap, (what, cure) in MISHAPS.items():
    result = mishap()[0]
    queue = blocking if mishap is touched_the_legacy_stream else stream
    state = STATUS[int(lab.check_cuda(cudart.cudaStreamIsCapturing(queue.ptr)))]
    ends = "，".join(map(str, close_captures())) or "—"
    rows.append((what, int(result), f"`{result.name.removeprefix('cudaError')}`", state, ends, cure))
lab.say(lab.table(("怎么惹的祸", "返回码", "名字", "当时捕获的状态", "结束捕获", "怎么治"), rows))
harmless = [f"{code}（{what}）" for what, code, _, state, _, _ in rows if state == STATUS[1]]
lab.say("出了错而捕获还在进行的：" + ("、".join(harmless) or "在这台机器上一个也没有") + "。")

# %% [markdown]
# 表里的“结束捕获”是事后收拾时得到的：“—”表示那一步自己已经把捕获结束了，出现两个码说明当时有两次捕获。
#
# 最后一句问的是：有没有哪个码只是拒绝了这一次调用，捕获却还在？这九种祸事的答案，不同的驱动不一定相同。
# 但这样的码前面见过一次：只是**问**默认流的状态，也会得到 906，捕获却照常进行。所以见到错误码，还是要看状态。
#
# 捕获中记录的事件还有一个后劲：捕获**结束以后**再查它呢？分配器、看门狗常常拿着旧事件去查，就会碰到。

# %% tags=["demo", "gpu"]
def record_mark():
    lab.check_cuda(clear_word(stream.ptr))
    lab.check_cuda(cudart.cudaEventRecord(mark.ptr, stream.ptr))


with_mark = record(record_mark)
after_capture = cudart.cudaEventQuery(mark.ptr)[0]
with_mark.launch(stream)
stream.synchronize()
after_replay = cudart.cudaEventQuery(mark.ptr)[0]
lab.check_cuda(cudart.cudaEventRecord(mark.ptr, stream.ptr))  # recorded anew, outside
stream.synchronize()
renewed = cudart.cudaEventQuery(mark.ptr)[0]
cudart.cudaGetLastError()
lab.say(
    lab.table(
        ("什么时候查同一个事件", "返回码"),
        [("捕获已经结束", int(after_capture)), ("图也重放过了", int(after_replay)), ("在捕获之外重新记录以后", int(renewed))],
    )
)

# %% [markdown]
# 前两行的码不一定是 907，以上表为准；例如 1 是 `cudaErrorInvalidValue`（参数不对）。意思是一样的：这个事件记的还是那次捕获，
# 重放也不会更新它；在捕获之外重新记录，它才又是普通的事件。
#
# 想知道图做完没有，就在**重放之后、捕获之外**另外记录一个事件，查那一个。

# %% [markdown]
# ## 在捕获里要显存
#
# 流程里常有临时缓冲。relaxed 模式不拒绝 `cudaMalloc`，CuPy 又默认用 relaxed，那么在捕获里写一句 `cp.empty_like` 有什么不好？
#
# ### 误区三：relaxed 最省心
#
# 下面这一步要一块暂存区，用 CuPy 的内存池（memory pool）分配。捕获完以后，给别人分配一块同样大的 `tenant`，再重放图。

# %% tags=["demo", "gpu"]
PATTERN = 0xA5A5A5A5
borrowed = []


def step_with_pool():
    scratch = cp.empty_like(xs)
    borrowed.append(scratch.data.ptr)
    launch_stir(scratch, xs, 0)
    launch_turn(xs, scratch)


pooled = record(step_with_pool)  # scratch died when the function returned: its memory is the pool's again
with stream:
    tenant = cp.full(xs.size, PATTERN, cp.uint32)
stream.synchronize()
same_place = tenant.data.ptr == borrowed[0]
pooled.launch(stream)
stream.synchronize()
intact = bool((tenant.get() == PATTERN).all())
lab.say(
    f"图里的节点：{kinds(pooled)}，没有一个是分配。新数组 `tenant` 拿到的{'正是' if same_place else '不是'}那块暂存区的地址；"
    f"重放以后，`tenant` **{'完好' if intact else '被图写坏了'}**。"
)

# %% [markdown]
# 捕获只记住了地址。暂存区的主人在捕获结束时就没了，内存池把那块显存给了别人，而图每次重放都往里写。没有任何报错。
#
# 两种办法：
#
# 1. 捕获**之前**分配好，由拿着图的人一起保管（上一次是《CUDA 图优化概念》里的 `Replayer`）；
# 2. 让分配本身也进图：流序分配（stream-ordered allocation），`cudaMallocAsync` 和 `cudaFreeAsync`。它们是流里的工作，录得下来。

# %% tags=["demo", "gpu"]
def step_in_graph():
    scratch = lab.check_cuda(cudart.cudaMallocAsync(xs.nbytes, stream.ptr))  # an address (int)
    launch_stir(scratch, xs, 0)
    launch_turn(xs, scratch)
    lab.check_cuda(cudart.cudaFreeAsync(scratch, stream.ptr))


owning = record(step_in_graph)
with stream:
    tenant = cp.full(xs.size, PATTERN, cp.uint32)
stream.synchronize()
before_owning = xs.get()
owning.launch(stream)
stream.synchronize()
lab.draw_graph(owning.debug_dot_str(), title="分配和释放也是节点")
plt.show()
lab.say(
    f"图里的节点：{kinds(owning)}。重放以后，结果{'正确' if np.array_equal(xs.get(), turned(before_owning, 1)) else '不对'}，"
    f"`tenant` {'完好' if bool((tenant.get() == PATTERN).all()) else '被图写坏了'}。"
)

# %% [markdown]
# 捕获时 `cudaMallocAsync` 就给出了地址：这个虚拟地址属于这张图，真正的显存在图启动时才配上。
#
# 如果只在图里分配，不在图里释放呢？显存会活到图外面去。那么第二次启动会怎样？

# %% tags=["demo", "gpu"]
begin(stream)
kept_alive = lab.check_cuda(cudart.cudaMallocAsync(1 << 16, stream.ptr))
lab.check_cuda(cudart.cudaMemsetAsync(kept_alive, 0, 1 << 16, stream.ptr))
unfreed = lab.check_cuda(cudart.cudaStreamEndCapture(stream.ptr))
unfreed_exec = lab.check_cuda(cudart.cudaGraphInstantiate(unfreed, 0))
launches = [cudart.cudaGraphLaunch(unfreed_exec, stream.ptr)[0], cudart.cudaGraphLaunch(unfreed_exec, stream.ptr)[0]]
cudart.cudaGetLastError()
lab.check_cuda(cudart.cudaFreeAsync(kept_alive, stream.ptr))  # outside the graph, after its launch
launches.append(cudart.cudaGraphLaunch(unfreed_exec, stream.ptr)[0])
if not int(launches[-1]):
    lab.check_cuda(cudart.cudaFreeAsync(kept_alive, stream.ptr))
stream.synchronize()
lab.check_cuda(cudart.cudaGraphExecDestroy(unfreed_exec))
lab.check_cuda(cudart.cudaGraphDestroy(unfreed))
lab.say(
    lab.table(
        ("只分配、不释放的图", "返回"),
        [(what, f"{error.name}（{int(error)}）") for what, error in zip(("第一次启动", "没释放，再启动", "在图外释放以后，再启动"), launches, strict=True)],
    )
)

# %% [markdown]
# 所以临时缓冲要在图里分配，也在图里释放。内存池、自动释放（AutoFreeOnLaunch）和占用，是《内存池优化》的内容。

# %% [markdown]
# ## CuPy 自己拒绝什么
#
# 自己的内核可以捕获，CuPy 的高层函数呢？它们底下可能要同步、要读回结果，或者调用 cuBLAS（矩阵运算）这样的库。先猜下面十二个里哪些录得成。
#
# 这一格在**子进程**里试：有的库在捕获里失败时可能带走整个进程，不能拿这个笔记本冒险。
# 死在哪一个上，就记下来，从下一个接着试。每个调用都先预热一遍，免得把第一次编译、建句柄算到捕获头上。

# %% tags=["demo", "gpu"]
import json
import signal
import subprocess
import sys

CALLS = (
    "x * 2 + 1",
    "x.sum()",
    "float(x.sum())",
    "x.get()",
    "x[mask]",
    "cp.where(mask, x, 0)",
    "cp.sort(x)",
    "square @ square",
    "cp.random.random(64)",
    "cp.linalg.solve(square, few)",
    "cp.fft.fft(x)",
    "stream.done",
)
PROBES = r"""
import json, sys
import cupy as cp
from cuda.bindings import runtime as cudart

stream = cp.cuda.Stream(non_blocking=True)
with stream:
    x = cp.arange(1024, dtype=cp.float32)
    square = cp.eye(32, dtype=cp.float32)
    few = cp.arange(32, dtype=cp.float32)
    mask = x > 3
stream.synchronize()
for call in sys.argv[1:]:
    report = {"name": call, "said": "", "state": 0, "ended": 0, "nodes": None}
    try:
        with stream:
            eval(call)
            eval(call)
        stream.synchronize()
    except Exception as error:
        report["said"] = f"warm-up: {type(error).__name__}: {error}"
        print(json.dumps(report), flush=True)
        continue
    stream.begin_capture()
    try:
        with stream:
            eval(call)
    except Exception as error:
        report["said"] = f"{type(error).__name__}: {error}"
    report["state"] = int(cudart.cudaStreamIsCapturing(stream.ptr)[1])
    ended, graph = cudart.cudaStreamEndCapture(stream.ptr)
    report["ended"] = int(ended)
    if not int(ended):
        report["nodes"] = int(cudart.cudaGraphGetNodes(graph, 0)[2])
        cudart.cudaGraphDestroy(graph)
    cudart.cudaGetLastError()
    print(json.dumps(report), flush=True)
"""


def child(script, *arguments, seconds=120):
    """Run a Python script in a process of its own. Returns what it printed, and how it ended (None if well)."""
    try:
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or ""
        return printed if isinstance(printed, str) else printed.decode(), f"{seconds} 秒没有做完"
    if done.returncode < 0:
        return done.stdout, f"被信号 {signal.Signals(-done.returncode).name} 终止"
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["没有留下话"])[-1]
        return done.stdout, f"退出码 {done.returncode}：{last_line[:120]}"
    return done.stdout, None


def probed(names):
    """Reports of the probes, in order; one that died has only a name and a reason."""
    reports, left = [], list(names)
    while left:
        printed, died = child(PROBES, *left)
        told = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        reports += told
        left = left[len(told):]
        if left:
            reports.append({"name": left.pop(0), "died": died or "没有报告"})
    return reports


def verdict(report):
    if "died" in report:
        return f"**进程{report['died']}**", "—"
    lives = ("没有捕获", "还活着", "**作废**")[report["state"]]
    if report["said"]:
        return report["said"].replace("|", "/").replace("\n", " ")[:110], lives
    return f"录成 {report['nodes']} 个节点" if report["nodes"] is not None else f"没有报错，结束捕获却返回 {report['ended']}", lives


lab.say(lab.table(("CuPy 调用", "捕获里怎么样", "之后捕获"), [(f"`{report['name']}`", *verdict(report)) for report in probed(CALLS)]))

# %% [markdown]
# 把结果分成三类看：
#
# - **录得成**：自己的内核、逐元素运算这一类，只启动内核，不读回结果。注意它们的输出数组也来自内存池，误区三照样适用。
# - **CuPy 提前拒绝**：消息里写着 `during stream capture` 或 `is capturing` 的那些。CuPy 在碰 CUDA **之前**先问了状态，
#   所以看最后一列：捕获往往还活着，去掉那一句就能继续。CuPy 拒绝 cuBLAS，不等于 cuBLAS 不能捕获，只是要换一层来捕获。
# - **真的打断了捕获**：最后一列写着作废的。
#
# `x[mask]` 是个典型：结果有多长要看数据，非读回 CPU 不可。改成长度固定的 `cp.where(mask, x, 0)`，就没有什么要读回的了。

# %% [markdown]
# ## 收拾残局
#
# 捕获会失败，这不可怕；可怕的是失败以后没收拾。下面两种常见写法，各在三个地方出错：
#
# - 什么都不管：`begin_capture`，做事，`end_capture`；
# - 只加一个 `finally: stream.end_capture()`。
#
# 看四样：外面接到的是哪个异常；流还在捕获吗；last error 干净吗；接着再捕获一次，行不行。

# %% tags=["demo", "gpu"]
class Misfit(Exception):
    """What the body of a capture raises of its own."""


def careless(body):
    stream.begin_capture()
    with stream:
        body()
    return stream.end_capture()


def with_finally(body):
    stream.begin_capture()
    try:
        with stream:
            body()
    finally:
        captured = stream.end_capture()
    return captured


def fails_at_once():
    raise Misfit("第 3 层的权重没有加载")


def fails_refused():
    launch_mix(xs, 0)
    lab.check_cuda(cudart.cudaStreamSynchronize(stream.ptr))


def fails_silently():
    launch_mix(xs, 0)
    cudart.cudaStreamSynchronize(stream.ptr)  # nobody looks at the code


def what_comes_out(way, body):
    """The exception, the state left behind, and whether the next capture works."""
    try:
        way(body)
        raised = "（没有异常）"
    except Exception as error:  # noqa: BLE001 - shown in the table
        raised = f"{type(error).__name__} {getattr(error, 'code', getattr(error, 'status', ''))}".strip()
    state = STATUS[int(lab.check_cuda(cudart.cudaStreamIsCapturing(stream.ptr)))]
    left = last_error()
    again = int(cudart.cudaStreamBeginCapture(stream.ptr, RELAXED)[0])
    close_captures()
    return raised, state, left, "可以" if not again else f"不行（{again}）"


bodies = {"自己的异常": fails_at_once, "被拒绝的调用（900）": fails_refused, "没人看返回码": fails_silently}
rows = [
    (name, where, *what_comes_out(way, body))
    for name, way in (("什么都不管", careless), ("只有 finally", with_finally))
    for where, body in bodies.items()
]
lab.say(lab.table(("写法", "哪里出错", "外面接到的异常", "流的状态", "last error", "再捕获"), rows))

# %% [markdown]
# - 什么都不管：块里一抛异常，就走不到 `end_capture` 了。这条流一直停在捕获里，再也不能捕获，还可能连累别的线程。
# - 只有 `finally`：流是回来了。可是看“被拒绝的调用”那一行：真正的原因是 900，外面接到的却是 `end_capture` 抛出的回声。
#   原来的异常躲在 `__context__` 里；日志只记最后一个异常时，它就丢了。
#
# 一次像样的善后要做五件事：
#
# 1. 不管从哪里出来，都结束捕获；但只结束**自己开始的**那一次；
# 2. 如果结束时得到了半张图，销毁它（`cudaGraphDestroy`），否则图和它引用的东西一直占着；
# 3. 让**原来的**异常出去，不是回声；
# 4. 取走 last error；
# 5. 当前流（`with stream:` 里的那条）恢复原样，不留住数组或异常对象。
#
# 练习三就写它。
#
# ### 有的残局收拾不了：子进程里看一次崩溃
#
# 上面都用 CuPy 和 `cuda.bindings`，捕获作废以后可以安全地继续。`cuda.core` 的 `GraphBuilder` 也能捕获，
# 但 1.2 系列在捕获作废以后，回收这个对象时可能让整个进程崩溃（它的发行说明说 1.3.0 修好了）。
# 是不是这样，在子进程里试：

# %% tags=["demo", "gpu"]
CRASH = r"""
import gc
from importlib.metadata import version
print("cuda-core", version("cuda-core"), flush=True)
from cuda.core import Device

device = Device()
device.set_current()
for attempt in range(20):
    builder = device.create_graph_builder()
    builder.begin_building("relaxed")
    for name, call in (("sync", builder.stream.sync), ("end_building", builder.end_building)):
        try:
            call()
            said = "ok"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:90]
        if attempt == 0:
            print(name, "->", said, flush=True)
    del builder
    gc.collect()
print("20 builders collected", flush=True)
"""
printed, died = child(CRASH, seconds=60)
lab.say("```text\n" + (printed.strip() or "（没有输出）") + "\n```\n\n" + (f"子进程{died}。" if died else "子进程平安结束：这个版本没有崩溃。"))

# %% [markdown]
# 不管你那里崩没崩，做法是一样的：**会不会崩溃说不准的东西，先放进子进程里试**；父进程看退出码，而不是跟着一起死。
#
# ### 这一次不行，就先不用图
#
# 捕获被别人打断，不是这个请求的错。扔掉半张图，这一次老老实实逐个启动，下一次再捕获：这叫回退（fall back）。
# 下面四个请求，第一个在捕获中途被另一个线程的设备同步打断：

# %% tags=["demo", "gpu"]
def three_mixes():
    for i in range(3):
        launch_mix(xs, i)


def served(disturbances):
    """Serve one request for each disturbance: by graph if there is one or can be one, else eagerly. Returns the ways."""
    ready, ways = None, []
    for disturb in disturbances:
        if ready is None:
            begin(stream, THREAD_LOCAL)
            with stream:
                code = code_of(three_mixes)
            disturb()
            ended, captured = cudart.cudaStreamEndCapture(stream.ptr)
            cudart.cudaGetLastError()
            if not int(ended) and not code:
                ready = lab.check_cuda(cudart.cudaGraphInstantiate(captured, 0))
                ways.append("捕获，重放")
            else:
                ways.append(f"捕获失败（{int(ended)}），逐个启动")
            if not int(ended):
                lab.check_cuda(cudart.cudaGraphDestroy(captured))
        else:
            ways.append("重放")
        if ready is None:
            with stream:
                three_mixes()
        else:
            lab.check_cuda(cudart.cudaGraphLaunch(ready, stream.ptr))
    stream.synchronize()
    if ready is not None:
        lab.check_cuda(cudart.cudaGraphExecDestroy(ready))
    return ways


def sync_elsewhere():
    in_thread(cudart.cudaDeviceSynchronize)


def quiet():
    pass


before_requests = xs.get()
ways = served([sync_elsewhere, quiet, quiet, quiet])
for _ in ways:
    before_requests = mixed(before_requests, 3)
lab.say(
    lab.table(("请求", "怎么做的"), enumerate(ways, 1))
    + f"\n\n四个请求之后，结果{'正确' if np.array_equal(xs.get(), before_requests) else '不对'}。"
)

# %% [markdown]
# 回退要**看得见**：记一个计数，否则图悄悄失效几个月，你只会觉得“变慢了”。
#
# ### 误区四：没有报错，就是录上了
#
# 最后一类失败根本没有错误码：工作落到了别的流上，图里少了节点。捕获以后数一数节点，画出来看一眼，再用新数据重放一次对一对结果。
# 练习二里就藏着一个。

# %% [markdown]
# ## 练习
#
# 四道练习，共 12 分。解答里可以用这些给定的名字：
#
# - 模块与工具：`np`、`cp`、`cudart`、`threading`、`contextmanager`、`partial`、`lab`；
# - 流与模式：`stream`、`side`、`blocking`、`GLOBAL`、`THREAD_LOCAL`、`RELAXED`；
# - 内核与函数：`BLOCK`、`launch_mix`、`launch_absorb`、`launch_stir`、`launch_turn`、`launch_spin`、`in_thread`、`mixed`、`turned`；
# - 练习二给出的 `guarded`，练习三给出的 `Recording`，练习四给出的 `eager_steps`。
#
# `record`、`kinds`、`xs`、`trace` 等名字来自演示单元（只做实验，评分时不运行），解答里不能用。
#
# ### 练习一：谁先打断了捕获（2 分，不需要 GPU）
#
# 写 `first_breakers(log)`。`log` 是一个线程的记录，每条三项 `(call, code, status)`：调用的名字、返回码、
# **这次调用之后**被观察的那条流的捕获状态（0 没有捕获，1 进行中，2 已作废）。一份记录里可以有好几次捕获。
#
# - 状态离开 0 的那一条开始一次捕获；状态回到 0 的那一条结束它。记录开头之前没有捕获；记录也可能在捕获结束之前就断了。
# - 一次捕获**作废**于其中第一条状态为 2 的记录；如果一直是 1，结束的那一条却返回了非 0 的码，就作废于结束的那一条。
# - 作废的那一条（包括作废于结束的那一条），如果返回码在 900～908 之间、又不是 901，凶手就是它。否则（返回 0、901，或者与捕获无关的码），
#   说明凶手不在这份记录里，是别的线程在它之前动的手。
# - 状态没有变的错误不是凶手：被拒绝、没做完（600）、参数不对，都可能与这次捕获无关。
#
# 返回一个列表，按先后每次捕获一项：没有作废的是 `None`；作废的是 `(index, code)`，
# `index` 是那一条在 `log` 里的下标（从 0 数起），`code` 是凶手的返回码；凶手不在记录里时 `code` 写 0。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 只看返回码找不到凶手，只看状态就能找到现场。顺着记录走一遍，你需要记住什么？
# 上一条之后的状态，以及眼下这次捕获是否已经作废过。
# 有两种“现场”：状态变成 2，和结束时才出错。记录断了的时候，最后那次捕获也要有一项。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 只用到 `enumerate` 和比较。可以先把记录切成一段段捕获，再在每一段里找；
# 也可以一遍走完：状态离开 0 时往结果里 `append(None)`，发现现场时改写 `result[-1]`。
# 判断凶手用 `900 <= code <= 908 and code != 901`。
#
# </details>

# %% solution="first_breakers"
def first_breakers(log):
    """Find what broke each capture in a log.

    log: records (call, code, status): a name, an error code, and the capture status after the call (0 none, 1 active,
    2 invalidated). Returns a list with one item for each capture, in order: None if it was not broken, else
    (index in log of the record that shows it broken, its code if that call did it or 0 if it was done elsewhere).
    """
    ### BEGIN SOLUTION: 顺着记录走：状态离开 0 时多一次捕获；第一次变成 2，或结束时才返回错误，就是作废的那一条；再看它的码是不是凶手的码
    found, before = [], 0
    for index, (_, code, status) in enumerate(log):
        if before == 0 and status != 0:
            found.append(None)
        ended_badly = before == 1 and status == 0 and code != 0
        if (before != 2 and status == 2) or ended_badly:
            found[-1] = (index, code if 900 <= code <= 908 and code != 901 else 0)
        before = status
    return found
    ### END SOLUTION


# %% test="first_breakers" kind="answer" points=2
begun, done = ("cudaStreamBeginCapture", 0, 1), ("cudaStreamEndCapture", 0, 0)
launched, echoed = ("cudaLaunchKernel", 0, 1), ("cudaLaunchKernel", 901, 2)
check.equal(student.first_breakers([begun, launched, launched, done]), [None], why="这次捕获平安结束，应当是 [None]。")
log = [begun, launched, ("cudaStreamSynchronize", 900, 2), echoed, ("cudaStreamEndCapture", 901, 0)]
check.equal(student.first_breakers(log), [(2, 900)], why="第 2 条返回 900，状态也从它开始变成 2：凶手就是它，后面的 901 都是回声。")
log = [begun, ("cudaEventQuery", 600, 1), launched, ("cudaMalloc", 900, 2), ("cudaStreamEndCapture", 901, 0)]
check.equal(student.first_breakers(log), [(3, 900)], why="第 1 条返回了 600，可是之后的状态还是 1，它没有打断捕获；作废在第 3 条。")
log = [begun, launched, echoed, ("cudaStreamEndCapture", 901, 0)]
check.equal(student.first_breakers(log), [(2, 0)], why="第一条状态为 2 的记录返回的是 901，它只是回声：凶手在别的线程，code 应当是 0。")
log = [begun, launched, ("cudaStreamEndCapture", 904, 0), begun, launched, done]
check.equal(student.first_breakers(log), [(2, 904), None], why="第一次捕获一直进行中，结束时才返回 904，作废于结束的那一条；第二次捕获平安。")
### BEGIN HIDDEN TESTS
NAMES = ["cudaLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaEventRecord", "cudaStreamWaitEvent"]
STARTS, ENDS = ["cudaStreamBeginCapture", "cuStreamBeginCapture_v2", "stream.begin_capture()"], ["cudaStreamEndCapture", "cuStreamEndCapture", "stream.end_capture()"]


def some(code, status, most, least=0):
    """A few records with a code and a status."""
    return [(str(secret.choice(NAMES)), code, status) for _ in range(int(secret.integers(least, most + 1)))]


def one_of(*codes):
    return int(secret.choice(codes))


def live():
    """A stretch of an open capture, with errors that do not harm it."""
    harmless = [(str(secret.choice([*NAMES, *STARTS, *ENDS])), one_of(1, 2, 401, 600, 900, 908), 1) for _ in range(int(secret.integers(0, 3)))]
    return some(0, 1, 4, 1) + harmless + some(0, 1, 2)


def start(status=1, code=0):
    return (str(secret.choice(STARTS)), code, status)


def end(code):
    return (str(secret.choice(ENDS)), code, 0)


def drawn(kind):
    """Records of one capture of a kind, and the offset and code of its answer (None if it was not broken)."""
    opening = [start(), *live()]
    at = len(opening)
    wreck = some(901, 2, 3) + [("cudaStreamSynchronize", 900, 2)] * int(secret.integers(0, 2)) + some(901, 2, 2)
    tail = [end(one_of(901, 901, 901, 900, 904))]
    if kind == "well":
        return [*opening, end(0)], None
    if kind == "refused":
        code = one_of(900, 902, 903, 904, 905, 906, 907, 908)
        return [*opening, ("cudaCall", code, 2), *wreck, *tail], (at, code)
    if kind == "elsewhere":
        return [*opening, ("cudaCall", one_of(0, 901), 2), *wreck, *tail], (at, 0)
    if kind == "unrelated":
        return [*opening, ("cudaEventQuery", one_of(1, 2, 600), 2), *wreck, *tail], (at, 0)
    if kind == "at the end":
        return [*opening, end(904)], (at, 904)
    if kind == "at once":  # the record that opens it shows it broken
        code = one_of(0, 901, 906)
        return [start(2, code), *wreck, *tail], (0, code if code == 906 else 0)
    return [*opening, end(901)], (at, 0)  # found out only at the end


def between():
    """Records outside of any capture, with errors that belong to others."""
    return [(str(secret.choice([*NAMES, "cudaStreamBeginCapture"])), one_of(0, 0, 0, 1, 600, 900, 901), 0) for _ in range(int(secret.integers(0, 4)))]


def whole(order):
    records, answer = between(), []
    for kind in order:
        part, told = drawn(kind)
        answer.append(None if told is None else (len(records) + told[0], told[1]))
        records += part + between()
    return records, answer


KINDS = ["well", "refused", "elsewhere", "unrelated", "at the end", "echo at the end"]
for kinds_drawn, reason in (
    ([["refused"], ["refused", "well"], ["well", "refused"]] * 4, "有被拒绝的调用时找错了。以状态第一次变成 2 为准；捕获之外、状态没有变的错误都不算。"),
    ([["elsewhere"], ["unrelated"], ["elsewhere", "well"]] * 4, "凶手不在记录里的情形算错了。作废的那一条返回 0、901 或与捕获无关的码时，code 应当是 0。"),
    ([["at the end"], ["echo at the end"], ["well", "at the end"]] * 4, "结束时才发现的情形算错了。状态一直是 1，结束那一条返回非 0：作废于它；返回 901 时 code 仍然是 0。"),
    ([[str(kind) for kind in secret.permutation(KINDS * 2)] for _ in range(6)], "一份记录里有许多次捕获时算错了。每次捕获一项，下标从整份记录的开头数起。"),
):
    logs = [whole(order) for order in kinds_drawn]
    check.equal([student.first_breakers(records) for records, _ in logs], [answer for _, answer in logs], why=reason)
logs, answers = [], []
for code, blamed in ((1, 0), (899, 0), (900, 900), (902, 902), (908, 908), (909, 0), (910, 0), (999, 0)):
    for last in ([("cudaCall", code, 2), end(901)], [end(code)]):  # broken midway, or found out at the end
        records, answer = whole(["well"])
        opening = [start(), *live()]
        logs.append([*records, *opening, *last])
        answers.append([*answer, (len(records) + len(opening), blamed)])
check.equal([student.first_breakers(records) for records in logs], answers, why="作废的那一条返回各种码时，有算错的。只有 900～908 之间、又不是 901 的码才是凶手的码；两头的码和这个范围以外的码都试一试，结束时才发现的也一样。")
logs = [whole(order) for order in (["at once"], ["at once", "well"], ["well", "at once", "refused"]) for _ in range(3)]
check.equal([student.first_breakers(records) for records, _ in logs], [answer for _, answer in logs], why="开始捕获的那一条，自己的状态就可能已经是 2：它既开始这次捕获，也是作废的那一条。")
records, answer = whole(["well", "refused"])
cut = [*records, begun, *live()]
check.equal(student.first_breakers(cut), [*answer, None], why="记录在捕获进行中断掉时，最后那次捕获也要有一项：还没有作废，是 None。")
check.equal(student.first_breakers([*cut, ("cudaFree", 900, 2)]), [*answer, (len(cut), 900)], why="记录断在作废之后、结束之前时，最后那次捕获也要有一项。")
check.equal(student.first_breakers([("cudaMalloc", 900, 0)]), [], why="没有任何捕获的记录，应当返回空列表。")
### END HIDDEN TESTS

# %% [markdown]
# 拿它去看“误区一”里真实的六步记录：

# %% tags=["demo", "gpu"]
for blamed in first_breakers(six_steps):
    if blamed is None:
        lab.say("那次捕获没有作废。")
    else:
        at, blame = blamed
        lab.say(f"作废于第 {at} 步 `{six_steps[at][0]}`；" + (f"凶手就是它（{blame}）。" if blame else "它的返回码看不出凶手。"))

# %% [markdown]
# 如果答案里的码是 0：`stream.done` 明明是凶手，可是 CuPy 吞掉了它的返回码，记录里只剩 0，规则就只能说“不在记录里”。
# 记录要记**真实的**返回码，才问得出真凶。

# %% [markdown]
# ### 练习二：八个坏掉的捕获（4 分）
#
# 下面八个短程序都来自真实的故障，各坏一处。先读代码猜错误码，再运行下一格看它们怎么死，最后在解答格里写出修好的版本：
# 名字里的 `broken_` 换成 `fixed_`，参数和返回值不变。
#
# `guarded(function, …)` 调用一个函数，事后不管它成没成，都把没结束的捕获收拾掉，免得一个坏程序连累下一个。评分时也用它调用你的函数。

# %% tags=["gpu"]
def guarded(function, *args):
    """Call function(*args) and return its result; no capture stays open on stream, side or blocking, also if it raises."""
    try:
        return function(*args)
    finally:
        close_captures()


# %% tags=["demo", "gpu"]
def broken_waits(x):
    """Capture mix(x, 1), then mix(x, 2), on `stream`. Returns the cupy Graph."""
    stream.begin_capture()
    with stream:
        launch_mix(x, 1)
        stream.synchronize()  # the second one needs the first one's result
        launch_mix(x, 2)
    return stream.end_capture()


def broken_polls(x):
    """Capture mix(x, 0) … mix(x, 3) on `stream`. Returns (graph, progress).

    progress: after each launch, 1 if the capture is still going on.
    """
    progress = []
    stream.begin_capture()
    with stream:
        for i in range(4):
            launch_mix(x, i)
            progress.append(int(not stream.done))
    return stream.end_capture(), progress


def broken_clears(x, y):
    """Capture: set x to zero, x ^= y, then mix(y, 3). Returns the cupy Graph: a memset and two kernels, one after the other."""
    blocking.begin_capture()
    lab.check_cuda(cudart.cudaMemsetAsync(x.data.ptr, 0, x.nbytes, 0))
    with blocking:
        launch_absorb(x, y)
        launch_mix(y, 3)
    return blocking.end_capture()


def broken_forgets(x, y):
    """Capture mix(x, 4), then y ^= x. Returns the cupy Graph: two kernels, one after the other."""
    stream.begin_capture()
    with stream:
        launch_mix(x, 4)
    launch_absorb(y, x)
    return stream.end_capture()


def broken_forks(x, y):
    """Capture mix(x, 1) on `stream` and mix(y, 2) on `side`, in one graph, independent of each other. Returns it."""
    forked = cp.cuda.Event(disable_timing=True)
    stream.begin_capture()
    forked.record(stream)
    side.wait_event(forked)
    with side:
        launch_mix(y, 2)
    with stream:
        launch_mix(x, 1)
    return stream.end_capture()


def broken_feeds(x, y):
    """Prepare y once, not in the graph: mix(y, 5) on `side`. Then capture on `stream`: x ^= y, mix(x, 6). Returns the graph.

    Whoever launches the graph on `stream` finds y prepared.
    """
    ready = cp.cuda.Event(disable_timing=True)
    with side:
        launch_mix(y, 5)
    ready.record(side)
    stream.begin_capture()
    stream.wait_event(ready)
    with stream:
        launch_absorb(x, y)
        launch_mix(x, 6)
    return stream.end_capture()


def broken_nests(x, y):
    """Capture two graphs: the first is mix(x, 7), the second is y ^= x. Returns (first, second).

    They are launched one after the other by whoever holds them.
    """
    order = cp.cuda.Event(disable_timing=True)
    stream.begin_capture()
    with stream:
        launch_mix(x, 7)
    order.record(stream)
    side.begin_capture()
    side.wait_event(order)  # the second one needs x
    with side:
        launch_absorb(y, x)
    second = side.end_capture()
    return stream.end_capture(), second


def broken_helper(x, work):
    """Capture mix(x, 1) and mix(x, 2) on `stream`; between the two, work() runs in a thread of its own.

    Returns (graph, what work() returned). When work() runs, and what it does, is not ours to change.
    """
    lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, GLOBAL))
    with stream:
        launch_mix(x, 1)
        told = in_thread(work)
        launch_mix(x, 2)
    return stream.end_capture(), told


# %% [markdown]
# 一个个运行，看各自怎么死：

# %% tags=["demo", "gpu"]
def poll_old():
    return lab.check_cuda(cudart.cudaEventQuery(old.ptr))


def autopsy(function, *arguments):
    """How a broken program ends: its exceptions from the first to the last, or what it captured."""
    try:
        made = guarded(function, *arguments)
    except Exception as error:  # noqa: BLE001 - shown in the table
        chain = []
        while error is not None:
            chain.append(f"{type(error).__name__} {getattr(error, 'code', getattr(error, 'status', ''))}".strip())
            error = error.__context__
        return " → ".join(reversed(chain))
    first = made[0] if isinstance(made, tuple) else made
    return f"没有异常；图里是 {kinds(first)}"


broken = [broken_waits, broken_polls, broken_clears, broken_forgets, broken_forks, broken_feeds, broken_nests, broken_helper]
needed = {broken_waits: (xs,), broken_polls: (xs,), broken_helper: (xs, poll_old)}
rows = [(f"`{each.__name__}`", autopsy(each, *needed.get(each, (xs, ys)))) for each in broken]
cp.cuda.Device().synchronize()
lab.say(lab.table(("程序", "怎么死的"), rows))

# %% [markdown]
# 有一个程序没有死，它才是最难查的：看看它的图里有几个节点，说明里要几个。
#
# 要求：
#
# - 捕获本身不改变 `x`（和 `y`）；唯一的例外是 `fixed_feeds`，它在图外把 `y` 准备一次；
# - 节点的数目和先后，都照各自的英文说明；
# - `fixed_polls` 的 `progress` 要在每次启动之后真的问一次：捕获还在进行记 1，不在进行记 0；
# - `fixed_helper` 里的 `work()` 照旧在捕获进行中、在另一个线程里运行，它做的事你管不着（评分时它会查询一个以前的事件）；
# - `fixed_clears` 在哪条流上捕获都行，只要修得对。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 一个个问：它想要的是什么？同一条流里的先后，要不要同步来保证？想知道捕获还在不在，有没有不打扰它的问法？
# 哪一行没写明流，或者写成了默认流？分出去的流，什么时候回来？一个事件是在捕获里记录的，还是在外面？
# 两张图之间的先后，能不能由图里的事件表达？打断捕获的是哪个线程，哪种模式不管别的线程？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 汇合：分支上 `event.record(side)`，再 `stream.wait_event(event)`，两者都在结束捕获之前；事件在捕获之前创建。
# 不打扰的查询：`stream.is_capturing()`，返回 `bool`。
# memset 的最后一个参数是流的句柄，例如 `stream.ptr`。
# 等一个捕获之外的事件：`wait_event` 放在 `begin_capture` 之前。
# 模式：`cudart.cudaStreamBeginCapture(stream.ptr, mode)`。
#
# </details>

# %% solution="repairs" tags=["gpu"]
def fixed_waits(x):
    """Capture mix(x, 1), then mix(x, 2), on `stream`. Returns the cupy Graph."""
    ### BEGIN SOLUTION: fixed_waits：同一条流里的先后，需要同步来保证吗？
    stream.begin_capture()
    with stream:
        launch_mix(x, 1)
        launch_mix(x, 2)
    return stream.end_capture()
    ### END SOLUTION


def fixed_polls(x):
    """Capture mix(x, 0) … mix(x, 3) on `stream`. Returns (graph, progress).

    progress: after each launch, 1 if the capture is still going on.
    """
    ### BEGIN SOLUTION: fixed_polls：想知道捕获是否还在进行，换一个不打扰它的问法
    progress = []
    stream.begin_capture()
    with stream:
        for i in range(4):
            launch_mix(x, i)
            progress.append(int(stream.is_capturing()))
    return stream.end_capture(), progress
    ### END SOLUTION


def fixed_clears(x, y):
    """Capture: set x to zero, x ^= y, then mix(y, 3). Returns the cupy Graph: a memset and two kernels, one after the other."""
    ### BEGIN SOLUTION: fixed_clears：memset 放进了哪条流？它和捕获的流是什么关系？
    stream.begin_capture()
    lab.check_cuda(cudart.cudaMemsetAsync(x.data.ptr, 0, x.nbytes, stream.ptr))
    with stream:
        launch_absorb(x, y)
        launch_mix(y, 3)
    return stream.end_capture()
    ### END SOLUTION


def fixed_forgets(x, y):
    """Capture mix(x, 4), then y ^= x. Returns the cupy Graph: two kernels, one after the other."""
    ### BEGIN SOLUTION: fixed_forgets：第二个内核启动在哪条流上？
    stream.begin_capture()
    with stream:
        launch_mix(x, 4)
        launch_absorb(y, x)
    return stream.end_capture()
    ### END SOLUTION


def fixed_forks(x, y):
    """Capture mix(x, 1) on `stream` and mix(y, 2) on `side`, in one graph, independent of each other. Returns it."""
    ### BEGIN SOLUTION: fixed_forks：分出去的流，结束捕获之前要回来
    forked, joined = cp.cuda.Event(disable_timing=True), cp.cuda.Event(disable_timing=True)
    stream.begin_capture()
    forked.record(stream)
    side.wait_event(forked)
    with side:
        launch_mix(y, 2)
    joined.record(side)
    with stream:
        launch_mix(x, 1)
    stream.wait_event(joined)
    return stream.end_capture()
    ### END SOLUTION


def fixed_feeds(x, y):
    """Prepare y once, not in the graph: mix(y, 5) on `side`. Then capture on `stream`: x ^= y, mix(x, 6). Returns the graph.

    Whoever launches the graph on `stream` finds y prepared.
    """
    ### BEGIN SOLUTION: fixed_feeds：这个事件是在捕获之外记录的，等它也要在捕获之外
    ready = cp.cuda.Event(disable_timing=True)
    with side:
        launch_mix(y, 5)
    ready.record(side)
    stream.wait_event(ready)
    stream.begin_capture()
    with stream:
        launch_absorb(x, y)
        launch_mix(x, 6)
    return stream.end_capture()
    ### END SOLUTION


def fixed_nests(x, y):
    """Capture two graphs: the first is mix(x, 7), the second is y ^= x. Returns (first, second).

    They are launched one after the other by whoever holds them.
    """
    ### BEGIN SOLUTION: fixed_nests：两张图之间的先后由启动它们的人安排，两次捕获不必相连
    stream.begin_capture()
    with stream:
        launch_mix(x, 7)
    first = stream.end_capture()
    stream.begin_capture()
    with stream:
        launch_absorb(y, x)
    return first, stream.end_capture()
    ### END SOLUTION


def fixed_helper(x, work):
    """Capture mix(x, 1) and mix(x, 2) on `stream`; between the two, work() runs in a thread of its own.

    Returns (graph, what work() returned). When work() runs, and what it does, is not ours to change.
    """
    ### BEGIN SOLUTION: fixed_helper：哪种捕获模式不管别的线程？
    lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, THREAD_LOCAL))
    with stream:
        launch_mix(x, 1)
        told = in_thread(work)
        launch_mix(x, 2)
    return stream.end_capture(), told
    ### END SOLUTION


# %% test="repair_order" kind="structure" points=1 tags=["gpu"]
data = np.arange(1000, dtype=np.uint32)
x = on_gpu(data)
graph = student.guarded(student.value("fixed_waits"), x)
check.nodes(graph, kernels=2, total=2, edges=1, why="fixed_waits：图里应当是两个内核，第二个等第一个。")
check.equal(x.read(), data, why="fixed_waits：捕获完成后 x 就变了，有启动落在了捕获之外。")
graph.run(1)
check.equal(x.read(), reference.mixed(data, 2, first=1), why="fixed_waits：重放的结果不对。先 mix(x, 1)，再 mix(x, 2)。")
graph, progress = student.guarded(student.value("fixed_polls"), x)


def counted(told):
    """A list of numbers, in which True and False are 1 and 0; what is no list stays."""
    return [int(each) if isinstance(each, bool) else each for each in told] if isinstance(told, list) else told


check.equal(counted(progress), [1, 1, 1, 1], why="fixed_polls：progress 应当是四个 1，每次启动之后捕获都还在进行。")
check.nodes(graph, kernels=4, total=4, edges=3, why="fixed_polls：图里应当是四个内核连成的一条链。")
### BEGIN HIDDEN TESTS
for name, n, first in (("fixed_waits", 2, 1), ("fixed_polls", 4, 0)):
    data = secret.integers(0, 2**32, int(secret.integers(2000, 9000)), dtype=np.uint32)
    x = on_gpu(data)
    graph = student.guarded(student.value(name), x)
    if name == "fixed_polls":
        graph, progress = graph
        check.equal(counted(progress), [1, 1, 1, 1], why="fixed_polls：progress 应当是四个 1。")
    check.nodes(graph, kernels=n, total=n, edges=n - 1, why=f"{name}：换一块缓冲再捕获，图的结构就不对了。")
    check.equal(x.read(), data, why=f"{name}：捕获不应当执行任何内核，可是 x 已经变了。")
    for _ in range(2):
        data = x.write(secret.integers(0, 2**32, data.size, dtype=np.uint32))
        runs = int(secret.integers(2, 9))
        graph.instantiate().run(runs)
        for _ in range(runs):
            data = reference.mixed(data, n, first=first)
        check.equal(x.read(), data, why=f"{name}：在同一块缓冲里换了新数据，重放的结果不对。内核的序号和先后对吗？")
# The capture is away for a while between two launches: what is told without asking stays 1.
MIDWAY = """
def midway(guarded, function, x, at):
    \"\"\"Call function(x); its capture is over after launch `at`, and begun anew before the next: [progress, launches seen].\"\"\"
    import cupy
    from cuda.bindings import runtime

    names = getattr(function, "__globals__", {})
    launch, seen, parts = names.get("launch_mix"), [], []

    def watched(*args, **kwargs):
        queue = cupy.cuda.get_current_stream().ptr
        if len(seen) == at + 1 and parts:
            runtime.cudaStreamBeginCapture(queue, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
        launch(*args, **kwargs)
        if len(seen) == at:
            error, part = runtime.cudaStreamEndCapture(queue)
            if not int(error):
                parts.append(part)
                runtime.cudaGraphDestroy(part)
            runtime.cudaGetLastError()
        seen.append(queue)

    if launch is None:
        return [[], 0]
    names["launch_mix"] = watched
    try:
        _, progress = guarded(function, x)
    finally:
        names["launch_mix"] = launch
    return [progress, len(seen) if parts else 0]
"""
at = int(secret.integers(0, 3))
progress, seen = student.define(MIDWAY, "midway")(student.value("guarded"), student.value("fixed_polls"), x, at)
if seen == 4:  # whoever launches in another way cannot be asked so
    check.equal(counted(progress), [int(i != at) for i in range(4)], why="fixed_polls：捕获在中途结束过，progress 里却没有一个 0（或者 0 的位置不对）。progress 是每次启动之后真的问出来的吗？")
### END HIDDEN TESTS

# %% test="repair_streams" kind="structure" points=1 tags=["gpu"]
data, more = np.arange(1000, dtype=np.uint32), np.arange(5000, 6000, dtype=np.uint32)
x, y = on_gpu(data), on_gpu(more)
graph = student.guarded(student.value("fixed_clears"), x, y)
check.equal([x.read(), y.read()], [data, more], why="fixed_clears：捕获完成后 x 或 y 就变了。memset 是不是当场执行了？")
check.nodes(graph, memsets=1, kernels=2, total=3, edges=2, why="fixed_clears：图里应当是一个 memset 和两个内核，依次相连。")
graph.run(1)
check.equal([x.read(), y.read()], [more, reference.mixed(more, 1, first=3)], why="fixed_clears：重放的结果不对。x 清零后吸收 y，然后 mix(y, 3)。")
x, y = on_gpu(data), on_gpu(more)
graph = student.guarded(student.value("fixed_forgets"), x, y)
check.nodes(graph, kernels=2, total=2, edges=1, why="fixed_forgets：图里应当是两个内核，第二个等第一个。第二个启动在哪条流上？")
check.equal([x.read(), y.read()], [data, more], why="fixed_forgets：捕获完成后 x 或 y 就变了：有内核当场执行了。")
### BEGIN HIDDEN TESTS
size = int(secret.integers(2000, 9000))
data, more = (secret.integers(0, 2**32, size, dtype=np.uint32) for _ in range(2))
x, y = on_gpu(data), on_gpu(more)
graph = student.guarded(student.value("fixed_clears"), x, y)
check.nodes(graph, memsets=1, kernels=2, total=3, edges=2, why="fixed_clears：换一块缓冲再捕获，图的结构就不对了。")
check.equal([x.read(), y.read()], [data, more], why="fixed_clears：捕获不应当执行任何工作，可是 x 或 y 已经变了。")
for _ in range(2):
    data, more = x.write(secret.integers(0, 2**32, size, dtype=np.uint32)), y.write(secret.integers(0, 2**32, size, dtype=np.uint32))
    runs = int(secret.integers(2, 9))
    graph.instantiate().run(runs)
    for _ in range(runs):
        data, more = more, reference.mixed(more, 1, first=3)
    check.equal([x.read(), y.read()], [data, more], why="fixed_clears：换了新数据，重放的结果不对。清零的是整个 x 吗？")
data, more = (secret.integers(0, 2**32, size, dtype=np.uint32) for _ in range(2))
x, y = on_gpu(data), on_gpu(more)
graph = student.guarded(student.value("fixed_forgets"), x, y)
check.nodes(graph, kernels=2, total=2, edges=1, why="fixed_forgets：换一块缓冲再捕获，图的结构就不对了。")
check.equal([x.read(), y.read()], [data, more], why="fixed_forgets：捕获不应当执行任何内核，可是 x 或 y 已经变了。")
for _ in range(2):
    data, more = x.write(secret.integers(0, 2**32, size, dtype=np.uint32)), y.write(secret.integers(0, 2**32, size, dtype=np.uint32))
    runs = int(secret.integers(2, 9))
    graph.instantiate().run(runs)
    for _ in range(runs):
        data = reference.mixed(data, 1, first=4)
        more = more ^ data
    check.equal([x.read(), y.read()], [data, more], why="fixed_forgets：换了新数据，重放的结果不对。先 mix(x, 4)，再 y ^= x。")
### END HIDDEN TESTS

# %% test="repair_events" kind="structure" points=1 tags=["gpu"]
data, more = np.arange(1000, dtype=np.uint32), np.arange(5000, 6000, dtype=np.uint32)
x, y = on_gpu(data), on_gpu(more)
graph = student.guarded(student.value("fixed_forks"), x, y)
check.nodes(graph, kernels=2, total=2, edges=0, why="fixed_forks：图里应当是两个互不依赖的内核，一条边也没有。汇合写在两个内核都启动之后了吗？")
graph.run(1)
check.equal([x.read(), y.read()], [reference.mixed(data, 1, first=1), reference.mixed(more, 1, first=2)], why="fixed_forks：重放的结果不对。x 用序号 1，y 用序号 2。")
# The preparation of y starts late: whoever does not wait for it, launches too early.
LATE = """
def late(guarded, function, launch_spin, side, stream, x, y):
    import time
    with side:
        launch_spin(30_000)
    graph = guarded(function, x, y)
    time.sleep(0.001)
    early = int(stream.done and not side.done)  # in this order: side was busy still when stream was idle
    graph.launch(stream)
    stream.synchronize()
    side.synchronize()
    return graph, early
"""
EARLY = "fixed_feeds：side 还忙着，stream 却已经空闲，可以启动图了。y 是在 side 上准备的吗？stream 等它了吗？"
late = student.define(LATE, "late")
given = [student.value("guarded"), student.value("fixed_feeds"), student.value("launch_spin"), student.value("side"), student.value("stream")]
x, y = on_gpu(data), on_gpu(more)
graph, early = late(*given, x, y)
check.equal(early, 0, why=EARLY)
check.nodes(graph, kernels=2, total=2, edges=1, why="fixed_feeds：图里应当只有 x ^= y 和 mix(x, 6) 两个内核。准备 y 不应当进图。")
check.equal(y.read(), reference.mixed(more, 1, first=5), why="fixed_feeds：y 应当正好准备一次：在捕获之外做 mix(y, 5)。")
want = reference.mixed(data ^ reference.mixed(more, 1, first=5), 1, first=6)
check.equal(x.read(), want, why="fixed_feeds：重放的结果不对。side 上的准备工作比较慢时，stream 上的重放等它了吗？")
### BEGIN HIDDEN TESTS
size = int(secret.integers(2000, 9000))
data, more = (secret.integers(0, 2**32, size, dtype=np.uint32) for _ in range(2))
x, y = on_gpu(data), on_gpu(more)
graph = student.guarded(student.value("fixed_forks"), x, y)
check.nodes(graph, kernels=2, total=2, edges=0, why="fixed_forks：换一块缓冲再捕获，图的结构就不对了。")
check.equal([x.read(), y.read()], [data, more], why="fixed_forks：捕获不应当执行任何内核，可是 x 或 y 已经变了。")
for _ in range(2):
    data, more = x.write(secret.integers(0, 2**32, size, dtype=np.uint32)), y.write(secret.integers(0, 2**32, size, dtype=np.uint32))
    runs = int(secret.integers(2, 9))
    graph.instantiate().run(runs)
    for _ in range(runs):
        data, more = reference.mixed(data, 1, first=1), reference.mixed(more, 1, first=2)
    check.equal([x.read(), y.read()], [data, more], why="fixed_forks：换了新数据，重放的结果不对。两个分支每次都做了吗？")
data, more = (secret.integers(0, 2**32, size, dtype=np.uint32) for _ in range(2))
x, y = on_gpu(data), on_gpu(more)
graph, early = late(*given, x, y)
check.equal(early, 0, why=EARLY)
check.nodes(graph, kernels=2, total=2, edges=1, why="fixed_feeds：换一块缓冲再捕获，图的结构就不对了。")
more = reference.mixed(more, 1, first=5)
data = reference.mixed(data ^ more, 1, first=6)
check.equal([x.read(), y.read()], [data, more], why="fixed_feeds：准备得慢的时候，第一次重放的结果不对。")
more = y.write(secret.integers(0, 2**32, size, dtype=np.uint32))
runs = int(secret.integers(2, 9))
graph.instantiate().run(runs)
for _ in range(runs):
    data = reference.mixed(data ^ more, 1, first=6)
check.equal([x.read(), y.read()], [data, more], why="fixed_feeds：y 里换了新数据，重放的结果不对。图应当读 y 的地址，并且不再改写 y。")
### END HIDDEN TESTS

# %% test="repair_captures" kind="structure" points=1 tags=["gpu"]
data, more = np.arange(1000, dtype=np.uint32), np.arange(5000, 6000, dtype=np.uint32)
x, y = on_gpu(data), on_gpu(more)
first, second = student.guarded(student.value("fixed_nests"), x, y)
check.nodes(first, kernels=1, total=1, why="fixed_nests：第一张图应当只有 mix(x, 7) 一个内核。")
check.nodes(second, kernels=1, total=1, why="fixed_nests：第二张图应当只有 y ^= x 一个内核。")
first.run(1)
second.run(1)
data = reference.mixed(data, 1, first=7)
check.equal([x.read(), y.read()], [data, more ^ data], why="fixed_nests：先后启动两张图，结果不对。返回的顺序是 (first, second) 吗？")
# What a watchdog does: it asks for an old event, and tells what it saw.
WORK = """
def make(stream):
    import threading
    import cupy
    from cuda.bindings import runtime

    past = cupy.cuda.Event(disable_timing=True)
    past.record(stream)
    stream.synchronize()

    def work():
        state = int(runtime.cudaStreamIsCapturing(stream.ptr)[1])
        elsewhere = threading.current_thread() is not threading.main_thread()
        return [state, int(elsewhere), int(runtime.cudaEventQuery(past.ptr)[0])]

    return work
"""
work = student.define(WORK, "make")(student.value("stream"))
x = on_gpu(data)
graph, told = student.guarded(student.value("fixed_helper"), x, work)
check.equal(told, [1, 1, 0], why="fixed_helper：三个数依次是 work 看到的捕获状态（应为 1，进行中）、是否在另一个线程（1）、查询以前的事件得到的码（0）。捕获模式选对了吗？")
check.nodes(graph, kernels=2, total=2, edges=1, why="fixed_helper：图里应当是两个内核，第二个等第一个。")
### BEGIN HIDDEN TESTS
size = int(secret.integers(2000, 9000))
data, more = (secret.integers(0, 2**32, size, dtype=np.uint32) for _ in range(2))
x, y = on_gpu(data), on_gpu(more)
first, second = student.guarded(student.value("fixed_nests"), x, y)
check.equal([x.read(), y.read()], [data, more], why="fixed_nests：捕获不应当执行任何内核，可是 x 或 y 已经变了。")
check.nodes(first, kernels=1, total=1, why="fixed_nests：换一块缓冲再捕获，第一张图的结构就不对了。")
check.nodes(second, kernels=1, total=1, why="fixed_nests：换一块缓冲再捕获，第二张图的结构就不对了。")
first, second = first.instantiate(), second.instantiate()
for _ in range(int(secret.integers(3, 6))):
    runs = int(secret.integers(1, 5))
    first.run(runs)
    second.run(1)
    for _ in range(runs):
        data = reference.mixed(data, 1, first=7)
    more = more ^ data
check.equal([x.read(), y.read()], [data, more], why="fixed_nests：换了新数据，轮流启动两张图，结果不对。两张图各自只做一件事吗？")
data = secret.integers(0, 2**32, size, dtype=np.uint32)
x = on_gpu(data)
graph, told = student.guarded(student.value("fixed_helper"), x, work)
check.equal(told, [1, 1, 0], why="fixed_helper：work 应当在捕获进行中、在另一个线程里运行，并且不被拒绝。")
check.nodes(graph, kernels=2, total=2, edges=1, why="fixed_helper：换一块缓冲再捕获，图的结构就不对了。")
check.equal(x.read(), data, why="fixed_helper：捕获不应当执行任何内核，可是 x 已经变了。")
runs = int(secret.integers(2, 9))
graph.instantiate().run(runs)
for _ in range(runs):
    data = reference.mixed(data, 2, first=1)
check.equal(x.read(), data, why="fixed_helper：重放的结果不对。先 mix(x, 1)，再 mix(x, 2)。")
secret_word = secret.integers(0, 2**32, 3, dtype=np.uint32)
ECHO = """
def make(word):
    return lambda: word
"""
graph, told = student.guarded(student.value("fixed_helper"), x, student.define(ECHO, "make")(secret_word))
check.equal(told, secret_word, why="fixed_helper：返回的第二项应当是 work() 的返回值。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：总能收拾干净的捕获（4 分）
#
# 写 `capturing(stream, mode)`，这样使用：
#
# ```python
# with capturing(stream, RELAXED) as recording:
#     launch_mix(x, 0)          # 当前流就是 stream，不必再写 with stream:
# recording.graph.launch(stream)
# ```
#
# - 进入时，用传进来的 `mode`（`GLOBAL`、`THREAD_LOCAL` 或 `RELAXED`）在传进来的 `stream`（一条 CuPy 的流，不一定是全局的那条）上开始捕获，
#   并把它设为当前流；`as` 得到一个 `Recording`，下一格给出了这个类。
# - 正常结束时，`recording.graph` 是实例化好的 `cupy.cuda.Graph`。
# - 块里抛出**任何**异常（包括 `KeyboardInterrupt` 这种不属于 `Exception` 的）：结束捕获，销毁半张图，
#   让**原来的**异常出去；`recording.graph` 仍是 `None`。
# - 块里没有异常，但捕获已经作废（比如有人吞掉了 900），或者结束时才出错（比如没有汇合）：让结束捕获得到的错误抛出去。
# - 进入时就开始不了（比如这条流已经在捕获）：把错误抛出去，**别去结束别人的捕获**。
# - 任何失败之后：流不在捕获状态（开始不了的除外），`cudart.cudaPeekAtLastError` 是 0，当前流恢复原样，马上可以再捕获；
#   不留住块里的数组（把异常对象存起来，就会连带留住它经过的每个函数里的数组）；别的流上正在进行的捕获不受影响。

# %% tags=["gpu"]
class Recording:
    """What a `with capturing(…)` block hands out. graph: the cupy Graph, once the block has ended well; else None."""

    def __init__(self):
        self.graph = None


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 画一条时间线：开始之前、开始失败、块里失败、结束失败、成功。每一段失败时，哪些东西已经是你的，哪些还不是？
# “开始”应不应该放在 `try` 里面？为什么把 `end_capture` 放进 `finally`，块里的异常就可能被换掉？
# 失败和成功这两条路，结束捕获以后要做的事一样吗？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `@contextmanager` 装饰一个只 `yield` 一次的生成器：块里的异常会在 `yield` 那一行抛出来，`raise` 让它继续往外走。
# `except BaseException:` 才接得住全部异常。
#
# `cudart.cudaStreamBeginCapture(stream.ptr, mode)`；`cudart.cudaStreamEndCapture(stream.ptr)` 返回 `(错误码, 图)`，
# 不抛异常，适合失败的路；`stream.end_capture()` 会抛异常并实例化，适合成功的路。
# `cudart.cudaGraphDestroy(图)`；`cudart.cudaGetLastError()`。`with stream:` 退出时会恢复当前流。
#
# </details>

# %% solution="capturing" tags=["gpu"]
@contextmanager
def capturing(stream, mode):
    """Context manager: capture what the block launches on `stream`, which is the current stream in the block.

    stream: a cupy Stream. mode: a cudaStreamCaptureMode. Yields a Recording, whose graph is the instantiated cupy Graph
    once the block has ended well. Whatever fails, the stream is left as it was, no part of the capture is kept, the last
    error is cleared, and the first exception goes on: the block's own, or that of beginning or ending the capture.
    """
    ### BEGIN SOLUTION: 先开始捕获；块里失败时结束、销毁、再抛原来的异常；块平安结束时才取图；不管哪里失败，都取走 last error
    recording = Recording()
    try:
        lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, mode))
        try:
            with stream:
                yield recording
        except BaseException:
            error, half = cudart.cudaStreamEndCapture(stream.ptr)
            if not int(error):
                cudart.cudaGraphDestroy(half)
            raise
        recording.graph = stream.end_capture()
    except BaseException:
        cudart.cudaGetLastError()
        raise
    ### END SOLUTION


# %% test="capturing_well" kind="structure" points=1 tags=["gpu"]
WELL = """
import threading
from contextlib import contextmanager

import cupy
from cuda.bindings import runtime

MODES = [runtime.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal,
         runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed]


def well(capturing, stream, launch, x, n):
    \"\"\"A capture in which nothing goes wrong: (graph, [no graph in the block, current stream in it, and after it, capture over]).\"\"\"
    before = cupy.cuda.get_current_stream().ptr
    with capturing(stream, MODES[2]) as recording:
        facts = [int(recording.graph is None), int(cupy.cuda.get_current_stream().ptr == stream.ptr)]
        for i in range(n):
            launch(x, i)
    facts.append(int(cupy.cuda.get_current_stream().ptr == before))
    facts.append(int(int(runtime.cudaStreamIsCapturing(stream.ptr)[1]) == 0))
    return recording.graph, facts


@contextmanager
def plain(stream, mode):
    runtime.cudaStreamBeginCapture(stream.ptr, mode)
    try:
        yield
    finally:
        runtime.cudaStreamEndCapture(stream.ptr)
        runtime.cudaGetLastError()


def refusals(capturing, stream):
    \"\"\"Codes of cudaMalloc in a capture of each mode, in another thread and in this one: by `capturing`, and by plain calls.\"\"\"
    told = []
    for manager in (capturing, plain):
        for mode in MODES:
            codes, pointers = [], []

            def ask():
                error, pointer = runtime.cudaMalloc(1 << 16)
                codes.append(int(error))
                if not int(error):
                    pointers.append(pointer)

            try:
                with manager(stream, mode):
                    thread = threading.Thread(target=ask, daemon=True)
                    thread.start()
                    thread.join(10)
                    ask()
            except Exception:
                pass
            told.append(codes)
            for pointer in pointers:
                runtime.cudaFree(pointer)
    return told[:3], told[3:]


def use(name):
    return {"well": well, "refusals": refusals}[name]
"""
data = np.arange(1000, dtype=np.uint32)
x = on_gpu(data)
use = student.define(WELL, "use")
capturing_, stream_, launch_ = student.value("capturing"), student.value("stream"), student.value("launch_mix")
graph, facts = student.guarded(use("well"), capturing_, stream_, launch_, x, 3)
check.equal(facts, [1, 1, 1, 1], why="四个数依次是：块里 recording.graph 还是 None、块里的当前流是 stream、块后当前流恢复、块后不在捕获。为 0 的那一项没有做到。")
check.nodes(graph, kernels=3, total=3, edges=2, why="recording.graph 应当是块里录下的三个内核。")
check.equal(x.read(), data, why="捕获不应当执行任何内核，可是 x 已经变了。")
graph.run(1)
check.equal(x.read(), reference.mixed(data, 3), why="重放的结果不对。")
### BEGIN HIDDEN TESTS
n = int(secret.integers(4, 20))
data = secret.integers(0, 2**32, int(secret.integers(2000, 9000)), dtype=np.uint32)
x = on_gpu(data)
graph, facts = student.guarded(use("well"), capturing_, student.value("side"), launch_, x, n)
check.equal(facts, [1, 1, 1, 1], why="换一条流捕获，就有做不到的了。用的是传进来的 stream 吗，还是写死了全局的那条？")
check.nodes(graph, kernels=n, total=n, edges=n - 1, why="换一条流捕获，图的结构就不对了。")
runs = int(secret.integers(2, 9))
graph.instantiate().run(runs)
for _ in range(runs):
    data = reference.mixed(data, n)
check.equal(x.read(), data, why="换一条流捕获，重放的结果不对。")
by_student, by_hand = student.guarded(use("refusals"), capturing_, stream_)
check.equal(by_student, by_hand, why="三种模式下，块里同一线程和另一线程的 cudaMalloc 得到的码，和直接用这些模式捕获时不一样。mode 原样传给 cudaStreamBeginCapture 了吗？")
### END HIDDEN TESTS

# %% test="capturing_unwinds" kind="structure" points=2 tags=["gpu"]
TRIALS = """
import gc

import cupy
from cuda.bindings import runtime
from launchlab import lab

RELAXED = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
GLOBAL = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal
forked = cupy.cuda.Event(disable_timing=True)


class Planned(Exception):
    pass


class Hurried(BaseException):
    pass


def trial(name, capturing, stream, side, launch, x):
    \"\"\"Fail in the way of that name; what came out, and what was left behind.\"\"\"

    def act():
        if name == "before":
            raise Planned
        launch(x, 1)
        if name == "launched":
            raise Planned
        if name == "hurried":
            raise Hurried
        if name == "refused":
            lab.check_cuda(runtime.cudaStreamSynchronize(stream.ptr))
        if name == "allocated":
            scratch = cupy.empty(1 << 20, cupy.uint8)
            launch(x, 2)
            raise Planned(scratch.nbytes)
        if name == "allocated in order":
            pointer = lab.check_cuda(runtime.cudaMallocAsync(1 << 16, stream.ptr))
            lab.check_cuda(runtime.cudaMemsetAsync(pointer, 0, 1 << 16, stream.ptr))
            raise Planned
        if name == "two refusals":
            runtime.cudaStreamSynchronize(stream.ptr)
            lab.check_cuda(runtime.cudaMemsetAsync(x.data.ptr, 0, 4, stream.ptr))
        if name == "swallowed":
            runtime.cudaStreamSynchronize(stream.ptr)
        if name == "unjoined":
            forked.record(stream)
            side.wait_event(forked)
            with side:
                launch(x, 2)

    before = cupy.cuda.get_current_stream().ptr
    runtime.cudaGetLastError()
    raised, code, recording = "nothing", 0, None
    try:
        with capturing(stream, GLOBAL if name == "refused" else RELAXED) as recording:
            act()
    except NotImplementedError:
        raise
    except BaseException as error:
        raised, code = type(error).__name__, int(getattr(error, "code", getattr(error, "status", 0)))
    told = {
        "raised": raised,
        "code": code,
        "status": int(runtime.cudaStreamIsCapturing(stream.ptr)[1]),
        "last error": int(runtime.cudaPeekAtLastError()[0]),
        "stream": int(cupy.cuda.get_current_stream().ptr == before),
        "graph": int(recording is not None and recording.graph is not None),
        "nodes": -1,
    }
    runtime.cudaGetLastError()
    if told["status"]:
        runtime.cudaStreamEndCapture(stream.ptr)
        runtime.cudaGetLastError()
        return told
    try:
        with capturing(stream, RELAXED) as recording:
            launch(x, 9)
        recording.graph.launch(stream)
        stream.synchronize()
        told["nodes"] = int(runtime.cudaGraphGetNodes(recording.graph.graph, 0)[2])
    except Exception:
        pass
    return told
"""
trial = student.define(TRIALS, "trial")
given = [student.value(name) for name in ("guarded", "capturing", "stream", "side", "launch_mix")]


def told_of(names, buffer):
    """What came of the trials of those names: a list for each question."""
    answers = [given[0](trial, name, *given[1:], buffer) for name in names]
    return {question: [answer[question] for answer in answers] for question in answers[0]}


data = np.arange(1000, dtype=np.uint32)
x = on_gpu(data)
told = told_of(["before", "launched"], x)
check.equal(told["raised"], ["Planned", "Planned"], why="块里抛出了异常（一次在第一个启动之前，一次在之后），外面应当接到原来的那一个。")
check.equal(told["status"], [0, 0], why="块里失败以后，流还停在捕获状态。失败的路上结束捕获了吗？")
check.equal(told["nodes"], [1, 1], why="失败以后马上再用 capturing 捕获一个内核，没有得到一个节点的图。")
check.equal(x.read(), reference.mixed(reference.mixed(data, 1, first=9), 1, first=9), why="失败的捕获不应当执行任何内核；之后成功的那两次各做一次 mix(x, 9)。")
### BEGIN HIDDEN TESTS
data = secret.integers(0, 2**32, int(secret.integers(2000, 9000)), dtype=np.uint32)
x = on_gpu(data)
raising = {"before": "Planned", "launched": "Planned", "hurried": "Hurried", "refused": "CudaError", "allocated": "Planned",
           "allocated in order": "Planned", "two refusals": "CudaError"}
names = [str(name) for name in secret.permutation([*raising, "swallowed", "unjoined"])]
told = told_of(names, x)
own = [name in raising for name in names]
check.equal(
    [raised for raised, mine in zip(told["raised"], own, strict=True) if mine], [raising[name] for name in names if name in raising],
    why="块里抛出的异常没有原样出来。不属于 Exception 的异常也要处理；结束捕获得到的 901 不能盖住原来的异常，也不能把异常吞掉。",
)
codes = {"refused": 900, "two refusals": 901, "swallowed": 901, "unjoined": 904}
check.equal(
    told["code"], [codes.get(name, 0) for name in names],
    why="错误码不对。块里被拒绝的调用，出来的应当是它自己的码；块里没有异常而捕获已经作废或没有汇合，应当抛出结束捕获得到的码。",
)
check.equal(told["status"], [0] * len(names), why="有的失败之后，流还停在捕获状态。每一条出路上都结束捕获了吗？")
check.equal(told["last error"], [0] * len(names), why="有的失败之后，cudaPeekAtLastError 不是 0。失败的路上取走 last error 了吗，包括结束时才失败的那几种？")
check.equal(told["stream"], [1] * len(names), why="有的失败之后，CuPy 的当前流没有恢复。")
check.equal(told["graph"], [0] * len(names), why="失败之后，recording.graph 应当仍是 None。")
check.equal(told["nodes"], [1] * len(names), why="有的失败之后，再捕获就不行了。")
for _ in names:
    data = reference.mixed(data, 1, first=9)
check.equal(x.read(), data, why="失败的捕获里有内核真的执行了，或者之后的捕获没有录对。")
### END HIDDEN TESTS

# %% test="capturing_keeps_nothing" kind="structure" points=1 tags=["gpu"]
LEFTOVERS = """
import ctypes
import gc
import time

import cupy
from cuda.bindings import runtime

RELAXED = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
alive = []  # what the driver may still call or read


class Planned(Exception):
    pass


def refused_twice(capturing, stream, side, launch, x):
    \"\"\"Begin on a stream that captures already: [the second one fails, the first one is not ended by it, last error 0, current stream].\"\"\"
    failed = status = clean = restored = 0
    try:
        with capturing(stream, RELAXED):
            launch(x, 1)
            with side:
                runtime.cudaGetLastError()
                try:
                    with capturing(stream, RELAXED):
                        launch(x, 2)
                except Exception:
                    failed = 1
                clean = int(int(runtime.cudaPeekAtLastError()[0]) == 0)
                restored = int(cupy.cuda.get_current_stream().ptr == side.ptr)
            status = int(runtime.cudaStreamIsCapturing(stream.ptr)[1])
    except NotImplementedError:
        raise
    except Exception:
        pass
    return [failed, int(status != 0), clean, restored]


def beside(capturing, stream, side, launch, x):
    \"\"\"Fail while another capture is open on `side`: its status, and its nodes when it is ended.\"\"\"
    side.begin_capture()
    with side:
        launch(x, 1)
    try:
        with capturing(stream, RELAXED):
            launch(x, 2)
            raise Planned
    except Planned:
        pass
    status = int(runtime.cudaStreamIsCapturing(side.ptr)[1])
    error, graph = runtime.cudaStreamEndCapture(side.ptr)
    nodes = -1 if int(error) else int(runtime.cudaGraphGetNodes(graph, 0)[2])
    if not int(error):
        runtime.cudaGraphDestroy(graph)
    runtime.cudaGetLastError()
    return [status, nodes]


def growth(capturing, stream, side, launch, x):
    \"\"\"Bytes that CuPy's pool still lends, and that the device lacks, after 20 captures that failed.\"\"\"

    def fail():
        scratch = cupy.empty(8 << 20, cupy.uint8)
        launch(x, 1)
        raise Planned(scratch.nbytes)

    def attempt():
        try:
            with capturing(stream, RELAXED):
                fail()
        except Planned:
            pass

    attempt()
    gc.collect()
    pool = cupy.get_default_memory_pool()
    lent, free = pool.used_bytes(), cupy.cuda.runtime.memGetInfo()[0]
    for _ in range(20):
        attempt()
    gc.collect()
    return [pool.used_bytes() - lent, free - cupy.cuda.runtime.memGetInfo()[0]]


def half_a_graph(capturing, stream, side, launch, x):
    \"\"\"What became of the graph of a capture that failed: "destroyed", "kept", or "unknown".

    The graph is given a user object whose destructor is libc's sem_post: no Python in the driver's thread.
    \"\"\"
    libc = ctypes.CDLL(None)
    semaphore = ctypes.create_string_buffer(64)
    libc.sem_init(semaphore, 0, 0)
    alive.append(semaphore)
    destructor = runtime.cudaHostFn_t(ctypes.cast(libc.sem_post, ctypes.c_void_p).value)
    no_sync = runtime.cudaUserObjectFlags.cudaUserObjectNoDestructorSync
    error, thing = runtime.cudaUserObjectCreate(ctypes.addressof(semaphore), destructor, 1, int(no_sync))
    if int(error):
        runtime.cudaGetLastError()
        return "unknown"
    move = runtime.cudaUserObjectRetainFlags.cudaGraphUserObjectMove
    retained = -1
    try:
        with capturing(stream, RELAXED):
            launch(x, 1)
            graph = runtime.cudaStreamGetCaptureInfo(stream.ptr)[3]
            retained = int(runtime.cudaGraphRetainUserObject(graph, thing, 1, int(move))[0])
            raise Planned
    except Planned:
        pass
    if retained:
        runtime.cudaUserObjectRelease(thing, 1)
        runtime.cudaGetLastError()
        return "unknown"
    gc.collect()
    until = time.monotonic() + 3
    while time.monotonic() < until:
        if libc.sem_trywait(semaphore) == 0:
            return "destroyed"
        time.sleep(0.01)
    return "kept"


def use(name):
    return {"refused_twice": refused_twice, "beside": beside, "growth": growth, "half_a_graph": half_a_graph}[name]
"""
use = student.define(LEFTOVERS, "use")
given = [student.value(name) for name in ("guarded", "capturing", "stream", "side", "launch_mix")]
x = on_gpu(np.arange(1000, dtype=np.uint32))
told = given[0](use("refused_twice"), *given[1:], x)
check.equal(told, [1, 1, 1, 1], why="在已经捕获的流上再进入一次 capturing，四个数依次是：里面那次失败了、没有结束外面那次捕获、last error 是 0、当前流恢复原样；为 0 的那一项没有做到。开始失败时，捕获是谁的？last error 取走了吗？")
### BEGIN HIDDEN TESTS
told = given[0](use("beside"), *given[1:], x)
check.equal(told, [1, 1], why="别的流上正在进行另一次捕获时，capturing 的失败把它也收拾掉了。只结束自己开始的那一次。")
became = given[0](use("half_a_graph"), *given[1:], x)
check.that(became != "kept", why="块里失败以后，半张图没有销毁。cudaStreamEndCapture 在失败的路上也可能交给你一张图。")
reference.value("BLOCK")  # the reference's process is up by now: its context would look like a leak
lent, lacking = zip(*(given[0](use("growth"), *given[1:], x) for _ in range(3)), strict=True)
check.equal(list(lent), [0, 0, 0], why="连续失败 20 次以后，CuPy 内存池借出的字节变多了：块里的数组没有被放掉。有没有把异常对象存起来？")
check.that(min(lacking) <= 1 << 20, why="连续失败 20 次以后，空闲显存少了 1 MiB 以上。失败的捕获留下的东西都放掉了吗？")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：把临时显存也录进去（2 分）
#
# `eager_steps` 每一轮都向 CuPy 的内存池要一块暂存区，用完就还。这是平常的写法，逐个启动时没有问题。
# 直接把它捕获下来会怎样，“误区三”已经看到了。
#
# 写 `capture_steps(x, n)`，在 `stream` 上捕获同样的 `n` 轮，但暂存区由图自己分配、自己释放：
#
# - 每一轮：在图里分配一块和 `x` 一样大的暂存区，`launch_stir(scratch, x, i)`，`launch_turn(x, scratch)`，在图里释放。
#   `i` 是 0 … n−1；
# - 图里正好 `n` 个分配、`2n` 个内核、`n` 个释放；可以反复启动；捕获本身不改变 `x`；
# - 返回 `cupy.cuda.Graph`；
# - `n = 50` 时，重放一次的端到端时间（从提交到整个设备做完）不超过 `eager_steps` 的一半。
#   如果参考解答在你的机器上快不到 4 倍，门槛就降到它的倍数的一半，最低 1.2 倍；差一点的，得一半分。
#   在笔记本里运行测试时，参考解答由你自己的答案充当，快慢判得不准；以 `./grader/launch check 5` 的结论为准。

# %% tags=["gpu"]
def eager_steps(x, n):
    """n rounds of stir and turn on x (cupy uint32, 1-D), indices 0 … n-1, on `stream`, with scratch memory from CuPy's pool."""
    with stream:
        for i in range(n):
            scratch = cp.empty_like(x)
            launch_stir(scratch, x, i)
            launch_turn(x, scratch)
            del scratch


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# “误区三”那一节有两个版本的一步，哪一个的分配成了节点？把它做成 `n` 轮。
# 如果分配了却没有在图里释放，第二次启动会怎样？中途出错时，流会停在哪里？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `lab.check_cuda(cudart.cudaMallocAsync(字节数, stream.ptr))` 返回地址（`int`），`launch_stir` 和 `launch_turn` 直接收地址；
# `lab.check_cuda(cudart.cudaFreeAsync(地址, stream.ptr))`。字节数是 `x.nbytes`。
# 捕获可以用 `stream.begin_capture()` 和 `stream.end_capture()`，也可以用你在练习三写的 `capturing`。
#
# </details>

# %% solution="capture_steps" tags=["gpu"]
def capture_steps(x, n):
    """Capture, on `stream`, n rounds of stir and turn on x, indices 0 … n-1, each with scratch memory of the graph's own.

    x: cupy uint32, 1-D; only read and written when the graph is launched. n: at least 1.
    Returns the instantiated cupy Graph: n allocations, 2 n kernels, n frees, in one chain.
    """
    ### BEGIN SOLUTION: 每一轮在捕获里用流序分配要一块暂存区，做 stir 和 turn，再在捕获里释放
    with capturing(stream, RELAXED) as recording:
        for i in range(n):
            scratch = lab.check_cuda(cudart.cudaMallocAsync(x.nbytes, stream.ptr))
            launch_stir(scratch, x, i)
            launch_turn(x, scratch)
            lab.check_cuda(cudart.cudaFreeAsync(scratch, stream.ptr))
    return recording.graph
    ### END SOLUTION


# %% test="capture_steps_result" kind="structure" points=1 tags=["gpu"]
data = np.arange(1000, dtype=np.uint32)
x = on_gpu(data)
graph = student.guarded(student.value("capture_steps"), x, 3)
check.nodes(graph, allocs=3, kernels=6, frees=3, total=12, why="n = 3 时应当是 3 个分配、6 个内核、3 个释放。暂存区是在捕获里用 cudaMallocAsync 分配、用 cudaFreeAsync 释放的吗？")
check.equal(x.read(), data, why="捕获完成后 x 就变了，有启动落在了捕获之外。")
graph.run(1)
check.equal(x.read(), reference.turned(data, 3), why="重放一次的结果不对。第 i 轮先 stir 再 turn，序号是 i（从 0 数起）吗？")
### BEGIN HIDDEN TESTS
size, n = int(secret.integers(2000, 9000)), int(secret.integers(4, 20))
data = secret.integers(0, 2**32, size, dtype=np.uint32)
x = on_gpu(data)
graph = student.guarded(student.value("capture_steps"), x, n)
check.nodes(graph, allocs=n, kernels=2 * n, frees=n, total=4 * n, edges=4 * n - 1, why="换一个 n，图的结构就不对了。n 是不是写死了？所有的工作都在同一条流上吗？")
# Whoever scratches in the pool's memory writes over these arrays.
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
SIZES = """
def sizes(graph):
    \"\"\"Bytes that each allocation node of a graph asks for; [] where the driver does not tell.\"\"\"
    from cuda.bindings import runtime
    from launchlab.exam.agent import definition
    graph, asked = definition(graph), []
    count = runtime.cudaGraphGetNodes(graph, 0)[-1]
    for node in list(runtime.cudaGraphGetNodes(graph, count)[1])[:count]:
        if runtime.cudaGraphNodeGetType(node)[1].name.endswith("MemAlloc"):
            error, params = runtime.cudaGraphMemAllocNodeGetParams(node)
            if int(error):
                return []
            asked.append(int(params.bytesize))
    return asked
"""
wide, wide_too = on_gpu(np.zeros(3 << 19, np.uint32)), on_gpu(np.zeros(3 << 19, np.uint32))  # 6 MiB: no rounding hides a factor
enough = reference.define(SIZES, "sizes")(reference.capture_steps(wide, 2))
asked = student.define(SIZES, "sizes")(student.guarded(student.value("capture_steps"), wide_too, 2))
if enough:
    check.that(len(asked) == 2 and max(enough) <= min(asked) and max(asked) <= max(enough) + 65536, why="图里分配的暂存区和 x 不一样大。cudaMallocAsync 要的是字节数，不是元素个数；x 多大，就要多大。")
others = student.define(TENANTS, "tenants")(student.value("stream"), size)
for _ in range(3):
    data = x.write(secret.integers(0, 2**32, size, dtype=np.uint32))
    runs = int(secret.integers(2, 7))
    graph.run(runs)
    for _ in range(runs):
        data = reference.turned(data, n)
    check.equal(x.read(), data, why="在同一块缓冲里换了新数据，重放几次的结果不对。每次启动都做完了吗？")
check.equal([other.numpy() for other in others], [np.full(size, 0xA5A5A5A5, np.uint32)] * len(others), why="重放写坏了别人的数组：暂存区来自内存池，捕获以后又被分给了别人。")
### END HIDDEN TESTS

# %% test="capture_steps_speed" kind="speedup" points=1 tags=["gpu"]
start = secret.integers(0, 2**32, 4096, dtype=np.uint32)
x, y, z = on_gpu(start), on_gpu(start), on_gpu(start)
replay, best = student.guarded(student.value("capture_steps"), x, 50), reference.capture_steps(z, 50)
check.nodes(replay, allocs=50, kernels=100, frees=50, total=200, why="n = 50 时应当是 50 个分配、100 个内核、50 个释放：计时的也要是这样的图，暂存区由图自己分配、自己释放。")
check.speedup(
    replay,
    over=partial(reference.eager_steps, y, 50),
    best=best,
    state=(x, z),
    at_least=2.0,
    why="还不够快。返回的是一张图吗，重放时只有一次图启动吗？图里除了 n 个分配、2n 个内核、n 个释放还有别的节点吗？",
)
### BEGIN HIDDEN TESTS
data = x.write(secret.integers(0, 2**32, 4096, dtype=np.uint32))
runs = int(secret.integers(2, 7))
replay.run(runs)
for _ in range(runs):
    data = reference.turned(data, 50)
check.equal(x.read(), data, why="计时以后换一份数据再重放，结果不对：快，但没有做完该做的工作。")
### END HIDDEN TESTS

# %% [markdown]
# 分配节点要花钱吗？用你写的 `capture_steps`，和一张“捕获之前就分配好暂存区”的图、和逐个启动比一比：

# %% tags=["demo", "gpu"]
def with_scratch_beforehand(n, scratch):
    """The same rounds with one scratch buffer that the caller keeps."""
    return record(lambda: [(launch_stir(scratch, xs, i), launch_turn(xs, scratch)) for i in range(n)])


with stream:
    own_scratch = cp.empty_like(xs)
ROUNDS = (5, 10, 20, 50)
lines = {"逐个启动，内存池": [], "图，图里分配": [], "图，事先分配": []}
for n in ROUNDS:
    inner, outer = capture_steps(xs, n), with_scratch_beforehand(n, own_scratch)
    lab.end_to_end_us(partial(eager_steps, xs, n), repeats=5)  # discarded: the first one finds everything cold
    against_eager = lab.compare_us(partial(eager_steps, xs, n), partial(inner.launch, stream), clock="end_to_end")
    against_outer = lab.compare_us(partial(inner.launch, stream), partial(outer.launch, stream), clock="end_to_end")
    for label, samples in zip(lines, (against_eager.first, against_outer.first, against_outer.second), strict=True):
        lines[label].append(samples.median)

fig, ax = plt.subplots()
for label, values in lines.items():
    ax.plot(ROUNDS, values, label=label)
ax.set_xlabel("轮数 n（每轮两个内核）")
ax.set_ylabel("端到端时间（µs，中位数）")
ax.set_title(f"把临时显存也录进图（{lab.gpu_name()}）")
ax.set_ylim(bottom=0)
ax.legend()
plt.show()
lab.say(
    f"n = {ROUNDS[-1]}：逐个启动 {lines['逐个启动，内存池'][-1]:.0f} µs；图里分配 {lines['图，图里分配'][-1]:.0f} µs；"
    f"事先分配 {lines['图，事先分配'][-1]:.0f} µs。图里分配比事先分配每轮"
    f"{'多' if lines['图，图里分配'][-1] >= lines['图，事先分配'][-1] else '少'}花 "
    f"{abs(lines['图，图里分配'][-1] - lines['图，事先分配'][-1]) / ROUNDS[-1]:.2f} µs。"
)

# %% [markdown]
# 事先分配的图少了两类节点，代价是缓冲要有人一直保管，别人不能用；图里分配的那块，图跑完就还回去了，几张图可以轮流用同一片显存。
#
# **轮到你**：回到“看门狗”那一格，把捕获中间的 `sleep(0.0005)` 删掉，再把看门狗的 `sleep(0.0002)` 改成 `sleep(0.05)`。
# 先猜第一行还剩几次被打断，再运行。捕获越短、查得越稀，就越难撞上：开头那个故事里，一百次启动才坏一次。

# %% [markdown] tags=["instructor"]
# 给教师：练习二的测试用 `guarded` 调用学习者的函数，所以一个坏程序不会把 `stream` 留在捕获状态，连累后面的题；
# `fixed_feeds` 的测试先在 `side` 上堵 30 ms，删掉等待的“修法”会读到旧的 `y`。
#
# 练习三的隐藏测试有九个失败点；半张图是否销毁，靠挂在图上的 user object 的析构函数（libc 的 `sem_post`）来看，驱动不支持时这一项自动放过。
# 空闲显存量三次取最小的一次，因为同一块 GPU 上可能有别的程序。
#
# 练习四：用内存池直接捕获，节点数就不对；即使骗过节点数，也会写坏隐藏测试里的几个数组。

# %% [markdown]
# ## 小结
#
# | 常见的想法 | 实验以后的说法 |
# |:--|:--|
# | 报错的那一行就是凶手 | 901 是回声；看状态在哪一步之后变成“已作废” |
# | 看一眼做完没有，不算打扰 | `done`、`cudaEventQuery` 这类查询可能打断捕获；`cudaStreamIsCapturing` 不会 |
# | 捕获作废了，流就坏了 | 结束捕获（哪怕返回 901）、取走 last error，流就恢复 |
# | 用 thread-local，别的线程就伤不到我 | 它挡得住“可能不安全”的调用，挡不住整个设备的同步 |
# | relaxed 最省心 | 它不拒绝分配，可分配也不进图：暂存区会被别人拿走 |
# | 阻塞流换个模式也能用 | 和传统默认流的隐式依赖与模式无关；捕获用非阻塞流 |
# | `finally: end_capture()` 就够了 | 还要让原来的异常出去、销毁半张图、只收拾自己的 |
# | 没有报错就是录上了 | 数节点，换新数据重放一次 |
#
# **带走三句话**
#
# 1. 捕获用自己的非阻塞流；准备工作（预热、分配、锁页）在捕获之前做完；模式首选 thread-local。
# 2. 出了错，看状态，找第一个；结束，销毁，清错，再抛原来的异常。
# 3. 会随时间和线程变化的规则不要背，让你的 GPU 自己填那张表。
#
# 下一步：《显式构图》不靠捕获，一个节点一个节点地搭图；《多流捕获与图的生命周期》把分叉、汇合和垃圾回收讲透；
# 《捕获 TensorRT 推理》用到这里的每一条规则。
