# %% [markdown]
# # 执行上下文与显存
#
# 一个服务为八种形状各备了一个执行上下文（execution context），又各捕获了一张图。引擎只有几 MiB，显存却没了好几个 GiB。
# 有人把上下文改成“共用一块显存”，显存省下来了；几天以后，两条流上的请求偶尔互相写坏，日志里一个字也没有。
#
# 显存去了哪里？什么时候可以共用，什么时候不可以？图又为什么会攥着一块谁都以为已经放掉的显存？这一章全部量给你看。
#
# **学完以后，你能够**
#
# - 说出一个引擎、一个上下文各占哪几种显存，哪些能共用；
# - 用 `cudaMemGetInfo` 量出来，并知道它的刻度有多粗、什么会骗到它；
# - 在 `STATIC`、`ON_PROFILE_CHANGE`、`USER_MANAGED` 三种分配策略里作选择；
# - 让许多上下文和许多图共用一块暂存，在形状交错、多条流、显存块搬家的时候仍然正确；
# - 让每种形状的上下文都常备，而不是来一个请求建一个；
# - 先捕获最大的，让峰值等于最大的那一个，而不是所有的总和。
#
# **需要的基础**：《优化 Profile 的设计与管理》里的 Profile 和上下文，《捕获 TensorRT 推理》里的预热与捕获，《多流捕获与图的生命周期》里的事件。
#
# **时间**：约 60 分钟，其中四道练习约 35 分钟。
#
# 下一格导入的 `check`、`student` 等五个名字只给练习后面的测试单元用，现在不用管它们。

# %%
import numpy as np
from functools import partial
from launchlab import lab
from launchlab.exam import check, on_gpu, reference, secret, student

lab.here()

# %% [markdown]
# ## 一个暂存很大的小网络
#
# 本章的网络只有两次矩阵乘法，中间的宽度 `width` 随便挑：
#
# | 步骤 | 形状 |
# |:--|:--|
# | 输入 `x` | (行数, 64) |
# | 乘权重、ReLU、折叠 | (行数, `width`) ← 中间结果 |
# | 再乘权重、折叠，得到 `y` | (行数, 64) |
#
# 行数是动态的。`width` 越大，中间结果越大，而权重和输入输出都还小：这样就能把“暂存”单独放大来看。
#
# 所有的数都是小整数（存成 FP32），权重只有 −1、0、1，`fold` 把数折回 −8 到 7，所以不管 TensorRT 怎么算，结果一位不差。
# NumPy 版是全章的标准答案；每一行各算各的，互不相干。

# %%
FEATURES = 64


def weights(inputs, outputs):
    """The weights of one product: float32, shape (inputs, outputs), values -1, 0, 1."""
    return np.random.default_rng(inputs * 7 + outputs).integers(-1, 2, (inputs, outputs)).astype(np.float32)


def fold(t):
    """Bring whole numbers (any float dtype) back to -8 … 7."""
    return t - 16 * np.floor(t / 16) - 8


def expected(x, width):
    """The right answer, by NumPy: float32, shape (rows, 64). x: float32 whole numbers in -8 … 8, shape (rows, 64)."""
    hidden = fold(np.maximum(x @ weights(FEATURES, width), 0)).astype(np.float32)
    return fold(hidden @ weights(width, FEATURES)).astype(np.float32)


# %% [markdown]
# 下面是 TensorRT 版，以及全章要用的几样东西：
#
# - `build_plan(width, ranges)`：构建，返回计划文件（plan）的字节；`ranges` 里每个 (最小, 最优, 最大) 行数是一个优化 Profile；
# - `load(plan)`：反序列化成引擎；`require`：把 `False` 和 `None` 变成异常；
# - `bind(context, x, y)`：检查两个数组，设形状，设两个地址；
# - `engines`：宽 512 和宽 192 的两个引擎，最多 256 行；`heavy`：宽 8192，最多 4096 行。
#
# 构建器（builder）只建一个，一直留着：装载它的库要几秒。构建用了计时缓存（timing cache），重复构建很快。

# %% tags=["gpu"]
import cupy as cp
import tensorrt as trt
from cuda.bindings import runtime as cudart

Strategy = trt.ExecutionContextAllocationStrategy
stream = cp.cuda.Stream(non_blocking=True)
builder = trt.Builder(lab.trt_logger())  # one, and it stays: its library takes seconds to load, and goes with the last builder
runtime = trt.Runtime(lab.trt_logger())
lanes = [cp.cuda.Stream(non_blocking=True) for _ in range(3)]  # on which requests arrive; `stream` is for everything else


def require(result, what):
    """Return result, unless it is False or None, TensorRT's ways of refusing: then RuntimeError with its reasons."""
    if result is False or result is None:
        raise RuntimeError(f"{what}失败。" + " ".join(lab.trt_errors()))
    return result


def build_plan(width, ranges):
    """Build the network for the (min, opt, max) numbers of rows in ranges, a profile each. Returns the plan, bytes."""
    kept = []
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    operation, plain = trt.ElementWiseOperation, trt.MatrixOperation.NONE

    def constant(array):
        kept.append(np.ascontiguousarray(array, np.float32))  # trt.Weights does not copy: alive until the build is done
        return network.add_constant(kept[-1].shape, trt.Weights(kept[-1])).get_output(0)

    def element(a, b, kind):
        return network.add_elementwise(a, b, kind).get_output(0)

    def product_folded(t, inputs, outputs, relu):
        t = network.add_matrix_multiply(t, plain, constant(weights(inputs, outputs)), plain).get_output(0)
        if relu:
            t = network.add_activation(t, trt.ActivationType.RELU).get_output(0)
        sixteen, eight = constant(np.full((1, 1), 16)), constant(np.full((1, 1), 8))
        whole = element(element(t, sixteen, operation.FLOOR_DIV), sixteen, operation.PROD)
        return element(element(t, whole, operation.SUB), eight, operation.SUB)

    x = network.add_input("x", trt.DataType.FLOAT, (-1, FEATURES))
    y = product_folded(product_folded(x, FEATURES, width, relu=True), width, FEATURES, relu=False)
    y.name = "y"
    network.mark_output(y)
    config = builder.create_builder_config()
    config.builder_optimization_level = 1  # quick to build; this chapter is not about the best tactic
    config.progress_monitor = lab.build_progress()
    for least, best, most in ranges:
        profile = builder.create_optimization_profile()
        profile.set_shape("x", (least, FEATURES), (best, FEATURES), (most, FEATURES))
        config.add_optimization_profile(profile)
    with lab.timing_cache(config):
        plan = bytes(require(builder.build_serialized_network(network, config), "构建"))
    kept.clear()
    return plan


def load(plan):
    """Deserialize a plan. Returns a trt.ICudaEngine; RuntimeError if TensorRT refuses."""
    return require(runtime.deserialize_cuda_engine(plan), "反序列化")


def bind(context: "trt.IExecutionContext", x, y):
    """Set the shape of x and the addresses of x and y; touches nothing unless both arrays are in order.

    x, y: contiguous cupy float32, both (rows, 64). TypeError: no such array. ValueError: wrong shape or not contiguous.
    RuntimeError: TensorRT refuses, say because the profile does not hold so many rows.
    """
    for name, array in (("x", x), ("y", y)):
        if not isinstance(array, cp.ndarray) or array.dtype != np.float32:
            raise TypeError(f"{name} 应当是显存里的 float32 数组，收到的是 {type(array).__name__}")
        if array.shape != (x.shape[0], FEATURES) or not array.flags.c_contiguous:
            raise ValueError(f"{name} 应当是连续的 (行数, {FEATURES})，两个数组一样大；收到的形状是 {array.shape}")
    require(context.set_input_shape("x", x.shape), "设 x 的形状")
    require(context.set_tensor_address("x", x.data.ptr), "设 x 的地址")
    require(context.set_tensor_address("y", y.data.ptr), "设 y 的地址")


WIDTHS = (512, 192)
engines = [load(build_plan(width, [(1, 16, 256)])) for width in WIDTHS]
heavy = load(build_plan(8192, [(1, 16, 4096)]))

# %% [markdown]
# ## 显存都在哪里
#
# 一个装载好的引擎牵涉到四种显存：
#
# | 显存 | 属于 | 几份 | 能共用吗 |
# |:--|:--|:--|:--|
# | 权重 | 引擎 | 一份，所有上下文共用 | 已经共用 |
# | 持久的小块（persistent memory） | 上下文 | 每个上下文一份 | 不能：它记着这个上下文自己的状态 |
# | **暂存（scratch）**：中间结果，加上内核的工作区（workspace） | 上下文 | 每个上下文一份 | **能**，只要不同时用 |
# | 输入和输出 | 你 | 你说了算 | 你说了算 |
#
# 暂存有个特别的性质：一次推理开始的时候，里面是什么都无所谓；推理结束以后，里面剩下什么也没有人要。
# 它只在“从入队到做完”这一段时间里不能被别人碰。先问问它有多大：
#
# - `engine.device_memory_size_v2`：所有 Profile 里最大的那个；
# - `engine.get_device_memory_size_for_profile_v2(序号)`：这个 Profile 的最大形状要多少；
# - `context.update_device_memory_size_for_shapes()`：**此刻这个形状**要多少。先设好所有输入的形状再问；
#   只有 `USER_MANAGED`（暂存由你给，后面讲）的上下文能问，别的返回 0，并在日志里报错。

# %% tags=["gpu"]
def scratch_of(engine: "trt.ICudaEngine", rows):
    """Bytes of scratch that an inference on so many rows needs."""
    context = require(engine.create_execution_context(Strategy.USER_MANAGED), "创建上下文")
    require(context.set_input_shape("x", (rows, FEATURES)), "设形状")
    return context.update_device_memory_size_for_shapes()


# %% tags=["demo", "gpu"]
MIB = 2**20
NAMED = {"宽 512": engines[0], "宽 192": engines[1], "宽 8192": heavy}
table_rows, curves = [], {}
for name, engine in NAMED.items():
    most, _ = tuple(engine.get_tensor_profile_shape("x", 0)[2])
    table_rows.append((name, most, f"{engine.device_memory_size_v2 / MIB:.2f}", f"{scratch_of(engine, most) / MIB:.2f}", f"{scratch_of(engine, 1) / MIB:.2f}"))
lab.say(lab.table(("引擎", "最多几行", "`device_memory_size_v2`（MiB）", "最多行时的暂存（MiB）", "1 行时的暂存（MiB）"), table_rows))

# %% tags=["demo", "gpu"]
import matplotlib.pyplot as plt

lab.plot_style()
fig, ax = plt.subplots()
for name, engine in NAMED.items():
    asking = require(engine.create_execution_context(Strategy.USER_MANAGED), "创建上下文")
    most, _ = tuple(engine.get_tensor_profile_shape("x", 0)[2])
    rows = sorted({int(r) for r in np.geomspace(1, most, 24)})
    curves[name] = []
    for r in rows:
        require(asking.set_input_shape("x", (r, FEATURES)), "设形状")
        curves[name].append(asking.update_device_memory_size_for_shapes())
    ax.loglog(rows, [max(size, 1) / MIB for size in curves[name]], marker=".", label=name)
ax.set_xlabel("行数")
ax.set_ylabel("这个形状要的暂存（MiB）")
ax.set_title(f"每个形状要的暂存（{lab.gpu_name()}）")
ax.legend()
plt.show()
varying = [name for name, sizes in curves.items() if sizes[-1] > sizes[0]]
lab.say(
    f"暂存随行数变的引擎：{'、'.join(varying) or '没有'}。"
    + ("按实际的形状备，小形状省得多。" if varying else "这几个引擎按最大的形状要，问哪个形状都一样；别的引擎、别的版本可能按实际的形状要，问法不变。")
)

# %% [markdown]
# 误区一：**“引擎是共用的，多建几个上下文不花显存。”** 权重确实只有一份，可暂存一个上下文一份，
# 而且默认策略按**最大的形状**备，不管你打算跑几行。

# %% [markdown]
# ## 怎么量：`cudaMemGetInfo` 的刻度
#
# `cudaMemGetInfo` 报告整块 GPU 还剩多少字节。它有三个脾气：
#
# 1. 它看的是**整块 GPU**，别的程序也会让它变；
# 2. 驱动按大块向 GPU 要显存，再零碎地分给你，所以小的分配常常一动不动，偶尔又跳一大步；
# 3. CuPy 有自己的内存池：数组没了，池子还攥着，剩余量不会回来。
#
# 申请 n 字节，连着八次，看剩余量每次少了多少：

# %% tags=["demo", "gpu"]
def free_bytes():
    """Free bytes of the whole GPU, when all that was enqueued is done."""
    cp.cuda.runtime.deviceSynchronize()
    return lab.check_cuda(cudart.cudaMemGetInfo())[0]


table_rows = []
for size in (1000, 64 * 1024, MIB, 2 * MIB, 5 * MIB):
    held, drops = [], []
    for _ in range(8):
        before = free_bytes()
        held.append(lab.check_cuda(cudart.cudaMalloc(size)))
        drops.append((before - free_bytes()) / MIB)
    for address in held:
        lab.check_cuda(cudart.cudaFree(address))
    table_rows.append((f"{size:,}", "、".join(f"{drop:g}" for drop in drops), f"{8 * size / MIB:.2f}", f"{sum(drops):.2f}"))
lab.say(lab.table(("每次申请（字节）", "剩余量每次少了（MiB）", "八次一共该少（MiB）", "实际少了（MiB）"), table_rows))

# %% [markdown]
# 所以：**要量的东西先弄多、弄大**，再除；一个几百 KiB 的暂存，单独量一次，可能读到 0，也可能读到好几倍。
# 本章用 `heavy` 量策略，就是因为它的暂存比刻度大得多。

# %% [markdown]
# ## 三种分配策略
#
# `engine.create_execution_context(策略)` 的策略有三种：
#
# | 策略 | 暂存由谁备 | 多大 | 什么时候 |
# |:--|:--|:--|:--|
# | `STATIC`（默认） | TensorRT | 所有 Profile 里最大的 | 创建上下文时，上下文没了才放 |
# | `ON_PROFILE_CHANGE` | TensorRT | 当前 Profile 的最大 | 选中一个 Profile 时重新分配 |
# | `USER_MANAGED` | **你** | 你给多少就是多少，够用就行 | 入队之前 |
#
# 建一个有两个 Profile 的引擎：0 号最多 64 行，1 号最多 4096 行，然后每种策略走一遍“创建 → 切到 1 号 → 切回 0 号 → 删除”。
# 切换 Profile 的实验放在子进程里：万一哪个版本在这里出事，出事的不是这本笔记。

# %% tags=["demo", "gpu"]
import os
import subprocess
import sys
import tempfile

double = load(build_plan(2048, [(1, 16, 64), (1, 64, 4096)]))
each = [double.get_device_memory_size_for_profile_v2(index) / MIB for index in range(2)]
lab.say(f"0 号 Profile 要 {each[0]:.2f} MiB，1 号要 {each[1]:.2f} MiB；`device_memory_size_v2` 是 {double.device_memory_size_v2 / MIB:.2f} MiB。")

FOLLOW = """
import gc
import sys
import cupy as cp
import tensorrt as trt
from launchlab import lab

engine = trt.Runtime(lab.trt_logger()).deserialize_cuda_engine(open(sys.argv[1], "rb").read())
stream, Strategy = cp.cuda.Stream(non_blocking=True), trt.ExecutionContextAllocationStrategy
lent = cp.empty(max(engine.device_memory_size_v2, 1), cp.uint8)


def free():
    cp.cuda.runtime.deviceSynchronize()
    return cp.cuda.runtime.memGetInfo()[0]


def follow(strategy, tell):
    gc.collect()
    start = free()

    def told():
        if tell:
            print("told", strategy.name, start - free(), sep="|", flush=True)

    context = engine.create_execution_context(strategy)
    if strategy == Strategy.USER_MANAGED:
        context.set_device_memory(lent.data.ptr, lent.nbytes)
    told()
    for index in (1, 0):
        assert context.set_optimization_profile_async(index, stream.ptr)
        stream.synchronize()
        told()
    del context
    gc.collect()
    told()


follow(Strategy.STATIC, False)  # what the first context takes once and for all is not to be counted
for strategy in (Strategy.STATIC, Strategy.ON_PROFILE_CHANGE, Strategy.USER_MANAGED):
    follow(strategy, True)
"""


def in_children(program, plan, count=1):
    """Run the program on the plan in count processes side by side, each told its number. Returns (lines, exit code) of each."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "engine.plan")
        with open(file, "wb") as out:
            out.write(plan)
        children = [subprocess.Popen([sys.executable, "-c", program, file, str(n)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for n in range(count)]
        ended = []
        for child in children:
            try:
                text = child.communicate(timeout=60)[0]
            except subprocess.TimeoutExpired:
                child.kill()
                text = child.communicate()[0]
            ended.append((text.splitlines(), child.returncode))
        return ended


((output, code),) = in_children(FOLLOW, bytes(double.serialize()))
said = [line.split("|") for line in output if line.startswith("told|")]
table_rows = []
for strategy in ("STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED"):
    used = [f"{int(value) / MIB:.0f}" for _, name, value in said if name == strategy]
    table_rows.append((f"`{strategy}`", *used, *["—"] * (4 - len(used))))
lab.say(
    lab.table(("策略", "创建以后", "切到 1 号", "切回 0 号", "删除以后"), table_rows)
    + "\n\n单位 MiB，比开始时多占的；`USER_MANAGED` 借的那一块事先就备好了，不算在内。"
    + ("" if code == 0 else f"子进程中途退出了（{code}），所以有的格子空着。")
)

# %% [markdown]
# 照文档说的，`STATIC` 从头到尾按最大的占着；`ON_PROFILE_CHANGE` 跟着 Profile 走，代价是切换时可能要分配、释放；
# `USER_MANAGED` 自己不占暂存，剩下的几 MiB 里有持久的小块，也有分配的刻度，这样量分不开。和你的表对一对：差了几 MiB 的，多半是刻度和别的程序。
#
# 再把个数加上去。`heavy` 的上下文建六个，四种做法：

# %% tags=["demo", "gpu"]
import gc


def grow(strategy, lent_rows=0, count=6):
    """MiB in use after 0, 1, … count contexts of heavy; lent_rows: they share a block for so many rows, taken first."""
    gc.collect()
    size = scratch_of(heavy, lent_rows) if lent_rows else 0
    start, contexts = free_bytes(), []
    address = lab.check_cuda(cudart.cudaMalloc(size)) if lent_rows else 0
    used = [(start - free_bytes()) / MIB]
    for _ in range(count):
        contexts.append(require(heavy.create_execution_context(strategy), "创建上下文"))
        if lent_rows:
            require(contexts[-1].set_input_shape("x", (lent_rows, FEATURES)), "设形状")
            contexts[-1].update_device_memory_size_for_shapes()
            contexts[-1].set_device_memory(address, size)
        used.append((start - free_bytes()) / MIB)
    contexts.clear()
    gc.collect()
    if lent_rows:
        lab.check_cuda(cudart.cudaFree(address))
    return used


lines = {"STATIC": grow(Strategy.STATIC), "ON_PROFILE_CHANGE": grow(Strategy.ON_PROFILE_CHANGE)}
lines["USER_MANAGED，共用一块，够 4096 行"] = grow(Strategy.USER_MANAGED, 4096)
lines["USER_MANAGED，共用一块，够 64 行"] = grow(Strategy.USER_MANAGED, 64)
totals = [used[-1] for used in lines.values()]
overlaid = all(abs(totals[i] - totals[i + 1]) < 0.05 * totals[0] for i in (0, 2))
fig, ax = plt.subplots()
for name, used in lines.items():
    ax.plot(range(len(used)), used, marker="o", label=name)
ax.set_xlabel("上下文的个数")
ax.set_ylabel("多占的显存（MiB）")
ax.set_title(f"heavy 的上下文要多少显存（{lab.gpu_name()}）")
ax.legend()
plt.show()
lab.say(
    lab.table(
        ("做法", "6 个上下文多占（MiB）", "第 2 到 6 个平均每个（MiB）"),
        [(name, f"{used[-1]:.0f}", f"{(used[-1] - used[1]) / (len(used) - 2):.1f}") for name, used in lines.items()],
    )
    + f"\n\n按账面，各备一份是 6 × {heavy.device_memory_size_v2 / MIB:.0f} MiB，共用是 1 × {heavy.device_memory_size_v2 / MIB:.0f} MiB。"
    + "量出来的和账面差得多的话，是同一块 GPU 上别的程序在动。"
    + ("图里看起来只有两条线：`heavy` 只有一个 Profile，所以前两种做法一样；后两种重合，就是 64 行也要那么多。" if overlaid else "")
)

# %% [markdown]
# 共用的时候，那一块只付一次钱，上下文再多也几乎免费。块的大小也由你定，够用就行；够用是多少，由 `update_device_memory_size_for_shapes()` 说了算。
# 上表最后两行要是一样大，说明这个引擎对 64 行也按最大的形状要，这一份省不下来；要是不一样，只跑 64 行以内的服务就用不着按 4096 行备。
#
# 随不随形状变，不只看版本，也看网络：《内存池优化》末尾的卷积网络，在录制用的同一个版本上，暂存就随批大小变。所以每个引擎都要自己问。

# %% [markdown]
# ## 自己给暂存：四步
#
# 1. 设好所有输入的形状；
# 2. `need = context.update_device_memory_size_for_shapes()`：问这个形状要多少；
# 3. 手里的块不够大就换一块，然后 `context.set_device_memory(地址, 字节数)`；
# 4. `execute_async_v3`，看返回值。**从这一刻到这次推理在 GPU 上做完，这块显存是它的。**
#
# **每设一次形状，第 2、3 步就要重来**：暂存里怎么划分，是第 2 步按当时的形状算的；文档要求先设好所有形状和 Profile 再问，否则那次划分作废。
# 最常见的事故就是：按第一个请求的形状问了一次，从此再也不问。
#
# `set_device_memory` 没有返回值，做错了不会抛异常。那么不给、给小了、形状变大以后忘了重新给，各会怎样？
# 这些都不在文档允许的范围里，可能返回 `False`，也可能写到别人的显存里去，所以放在子进程里试：

# %% tags=["demo", "gpu"]
FAULTS = """
import sys
import cupy as cp
import tensorrt as trt
from launchlab import lab

engine = trt.Runtime(lab.trt_logger()).deserialize_cuda_engine(open(sys.argv[1], "rb").read())
stream, CLEAN = cp.cuda.Stream(non_blocking=True), 0x5A
room = cp.full(16 << 20, CLEAN, cp.uint8)  # far more than any shape of this engine needs: what goes wrong, goes wrong in here
x, y = cp.ones((256, 64), cp.float32), cp.zeros((256, 64), cp.float32)


def prepared(rows):
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    assert context.set_input_shape("x", (rows, 64))
    assert context.set_tensor_address("x", x.data.ptr) and context.set_tensor_address("y", y.data.ptr)
    return context, context.update_device_memory_size_for_shapes()


def tell(context, given):
    accepted = context.execute_async_v3(stream.ptr)
    print("enqueued", accepted, sep="|", flush=True)
    stream.synchronize()
    touched = cp.flatnonzero(room != CLEAN)
    print("beyond", max(0, int(touched[-1]) + 1 - given) if touched.size else 0, sep="|", flush=True)


def too_small():
    context, need = prepared(256)
    context.set_device_memory(room.data.ptr, need // 2)
    tell(context, need // 2)


def grown():
    context, need = prepared(4)
    context.set_device_memory(room.data.ptr, need)
    assert context.execute_async_v3(stream.ptr)
    stream.synchronize()
    room.fill(CLEAN)
    cp.cuda.runtime.deviceSynchronize()
    assert context.set_input_shape("x", (256, 64))
    tell(context, need)


def nothing():
    context, _ = prepared(256)
    tell(context, 0)


cp.cuda.runtime.deviceSynchronize()
(too_small, grown, nothing)[int(sys.argv[2])]()
"""
table_rows, silent = [], []
WRONGS = ("给了一半", "4 行时给够了，变成 256 行以后没有再给", "根本没给")
for name, (output, code) in zip(WRONGS, in_children(FAULTS, bytes(engines[0].serialize()), len(WRONGS)), strict=True):
    said = dict(line.split("|") for line in output if line.startswith(("enqueued|", "beyond|")))
    reasons = [line for line in output if line.startswith("TensorRT 报告错误")]
    beyond = int(said.get("beyond", 0))
    silent += [name] if said.get("enqueued") == "True" and beyond else []
    outcome = f"{beyond:,}" if "beyond" in said else f"进程在这之后退出了（{code}）"
    text = reasons[0].removeprefix("TensorRT 报告错误：").replace("|", "/") if reasons else "—"
    text = text if len(text) <= 160 else text[:160].rsplit(" ", 1)[0] + " …"
    table_rows.append((name, said.get("enqueued", "没有走到"), outcome, text))
lab.say(lab.table(("怎么错的", "入队返回", "写到给定的字节以外（字节）", "TensorRT 说的第一句"), table_rows))
same = scratch_of(engines[0], 4) == scratch_of(engines[0], 256)
lab.say(
    (f"**{'、'.join(silent)}：入队返回 `True`，却写到了给定的范围以外。** 后面要是别人的显存，就悄悄写坏了。" if silent else "这几种情形，这一次都没有悄悄越界；别的版本、别的引擎没有承诺。")
    + ("第二种情形这一次其实没有给错：这个引擎 4 行和 256 行要的一样多。" if same else "")
    + "自己查大小，是唯一可靠的办法。"
)

# %% [markdown]
# ## 一块大家用
#
# 两个不同的引擎，两个上下文，一块显存。形状交错着来，而且每次推理之后故意把整块填成垃圾：

# %% tags=["gpu"]
class Block:
    """Device memory for scratch: ptr (address, a multiple of 256) and nbytes. It goes back when nobody refers to it.

    Its memory comes from CuPy's pool, which may hand it on at once: be sure that the GPU is done with it.
    """

    def __init__(self, nbytes):
        self._memory = cp.cuda.alloc(nbytes)
        self.ptr, self.nbytes = self._memory.ptr, nbytes


# %% tags=["demo", "gpu"]
def sample(rows, seed):
    """Return (x on the host, x on the GPU, y on the GPU full of NaN): float32, (rows, 64)."""
    host = np.random.default_rng(seed).integers(-8, 9, (rows, FEATURES)).astype(np.float32)
    with stream:
        x, y = cp.asarray(host), cp.full(host.shape, np.nan, cp.float32)
    stream.synchronize()
    return host, x, y


contexts = [require(engine.create_execution_context(Strategy.USER_MANAGED), "创建上下文") for engine in engines]
largest = max(engine.device_memory_size_v2 for engine in engines)
block, right, tried = Block(largest), 0, 0
with stream:
    garbage = cp.ndarray((largest,), cp.uint8, block._memory)
for number, rows in enumerate((1, 256, 7, 100, 255, 16, 200, 3) * 3):
    which = number % 2
    host, x, y = sample(rows, number)
    bind(contexts[which], x, y)
    need = contexts[which].update_device_memory_size_for_shapes()
    contexts[which].set_device_memory(block.ptr, need)
    require(contexts[which].execute_async_v3(stream.ptr), "入队")
    with stream:
        garbage.fill(number)
    stream.synchronize()
    tried += 1
    right += np.array_equal(y.get(), expected(host, WIDTHS[which]))
total = sum(engine.device_memory_size_v2 for engine in engines)
lab.say(f"{tried} 次推理，**{right} 次正确**。各备一份要 {total / MIB:.2f} MiB，共用只要 {largest / MIB:.2f} MiB：**取最大，不取总和**。")

# %% [markdown]
# 在**同一条流**上，一个做完才轮到下一个，共用总是安全的。

# %% [markdown]
# ## 重叠就坏
#
# 换成两条流，中间没有事件，两次推理就可能同时写那一块。撞不撞得上要看运气：GPU 得恰好让两边同时跑。
# 一张图里的两条并行分支最容易撞上，因为它们从同一刻出发。`heavy` 的两个上下文、一块暂存，三种排法各跑许多次：
#
# - 两条流，没有事件；
# - 一张图，两条并行的分支（分叉用事件，两边之间没有先后）；
# - 两条流，每一次都排在上一次后面（用事件）。

# %% tags=["demo", "gpu"]
ROWS, TRIALS = 64, 20
shared = Block(scratch_of(heavy, ROWS))
pairs, SEEDS = [], (1, 2)
for seed in SEEDS:
    context = require(heavy.create_execution_context(Strategy.USER_MANAGED), "创建上下文")
    host, x, y = sample(ROWS, seed)
    bind(context, x, y)
    context.update_device_memory_size_for_shapes()
    context.set_device_memory(shared.ptr, shared.nbytes)
    require(context.execute_async_v3(stream.ptr), "入队")
    stream.synchronize()
    pairs.append((context, x, y, expected(host, 8192)))
alone_right = all(np.array_equal(y.get(), want) for _, _, y, want in pairs)
turn, forked, joined = (cp.cuda.Event(disable_timing=True) for _ in range(3))


def two_streams():
    for (context, *_), on in zip(pairs, lanes[:2], strict=True):
        require(context.execute_async_v3(on.ptr), "入队")


def in_order():
    for (context, *_), on in zip(pairs, lanes[:2], strict=True):
        on.wait_event(turn)
        require(context.execute_async_v3(on.ptr), "入队")
        turn.record(on)


with stream:
    stream.begin_capture()
    try:
        forked.record(stream)
        lanes[0].wait_event(forked)
        accepted = [pairs[0][0].execute_async_v3(stream.ptr), pairs[1][0].execute_async_v3(lanes[0].ptr)]
        joined.record(lanes[0])
        stream.wait_event(joined)
    finally:
        branches = stream.end_capture()
require(all(accepted), "捕获中入队")


def wrong_of(work):
    """Of 2 × TRIALS answers, how many are wrong; work starts the two inferences, four times before each look."""
    wrong = 0
    for _ in range(TRIALS):
        for _, _, y, _ in pairs:
            y.fill(np.nan)
        cp.cuda.runtime.deviceSynchronize()
        for _ in range(4):
            work()
        cp.cuda.runtime.deviceSynchronize()
        wrong += sum(not np.array_equal(y.get(), want) for _, _, y, want in pairs)
    return wrong


counts = {"两条流，没有事件": wrong_of(two_streams), "一张图，两条分支": wrong_of(partial(branches.launch, stream)), "两条流，用事件排队": wrong_of(in_order)}
hit = [f"“{name}”" for name in list(counts)[:2] if counts[name]]
lab.say(
    lab.table(("排法", f"{2 * TRIALS} 个答案里错了"), list(counts.items()))
    + f"\n\n单独跑的时候，两个答案{'都对' if alone_right else '就不对，这张表不算数'}。"
    + (f"撞上了的：{'、'.join(hit)}。**没有一个返回 `False`，没有一行日志**。" if hit else "这一次没有撞上。")
    + ("" if len(hit) == 2 else "没有用事件、又没有撞上的，不等于安全：换一块 GPU、换一个形状，就可能撞上。")
)

# %% [markdown]
# 前两种排法，错没错、错多少，都是碰运气；最后一种不出错，是因为事件排好了先后。开头那个团队缺的就是它。
#
# `cp.cuda.Event` 记在一条流上（`event.record(流)`），另一条流等它（`流.wait_event(event)`）；
# **等待的是 GPU，CPU 不停**。从没记录过的事件，等它等于不等。
#
# 共用的规矩就一句话：**用同一块的推理，前后两次之间要么在同一条流上，要么隔着一个事件。** 图的重放也不例外：
# 图里的内核写的也是那一块，重放的前后同样要排队。

# %% [markdown]
# ## 图攥着什么
#
# 捕获把一切地址都抄进了图里：输入、输出，还有**暂存的地址**。捕获以后再 `set_device_memory`，改的是上下文，不是图。
# 做个实验：在旧块上捕获，然后给上下文换一块新的，两块都填上记号，重放，看哪一块变了：

# %% tags=["demo", "gpu"]
context = require(engines[0].create_execution_context(Strategy.USER_MANAGED), "创建上下文")
host, x, y = sample(100, 5)
bind(context, x, y)
need = context.update_device_memory_size_for_shapes()
old, new = cp.zeros(need, cp.uint8), cp.zeros(need, cp.uint8)
context.set_device_memory(old.data.ptr, need)
require(context.execute_async_v3(stream.ptr), "预热")
stream.synchronize()
with stream:
    stream.begin_capture()
    try:
        accepted = context.execute_async_v3(stream.ptr)
    finally:
        graph = stream.end_capture()
require(accepted, "捕获中入队")

context.set_device_memory(new.data.ptr, need)  # the context has moved; has the graph?
old.fill(0x77)
new.fill(0x77)
cp.cuda.runtime.deviceSynchronize()
graph.launch(stream)
stream.synchronize()
changed = [int((each != 0x77).sum()) for each in (old, new)]
lab.say(
    f"上下文搬到新块以后重放：旧块里变了 **{changed[0]:,}** 字节，新块里变了 **{changed[1]:,}** 字节；"
    f"结果{'正确' if np.array_equal(y.get(), expected(host, WIDTHS[0])) else '不正确'}。"
    + ("图仍然写旧块。" if changed[0] and not changed[1] else "")
)
del graph

# %% [markdown]
# 结果要是对的，恰恰是危险的地方：旧块要是已经还给内存池、成了别人的数组，这一次重放就把别人写坏了，自己还算得好好的。
# 这种图叫**陈旧的图**（stale graph）。
#
# 于是有三条规矩：
#
# - **谁捕获，谁保管**：图的包装对象里存一份块的引用，图在，块就在；
# - **一张图一个上下文**：捕获以后，这个上下文就不要再改形状、再入队了。改形状会动上下文自己的状态，图靠不靠它，没有谁承诺；
#   这也是 NVIDIA 的建议。共用暂存以后，多一个上下文几乎不花显存；
# - **先捕获最大的**：块是按当时的需要备的，先小后大（几个大小不同的引擎；暂存随形状变的引擎，还有几个形状），
#   块就一次次变大，而每张小图都攥着它当年的那一块。
#   先大后小，所有的图都在同一块上。
#
# 误区二：**“重放用的是上下文现在的暂存。”** 用的是捕获那一刻的。

# %% [markdown]
# ## 起步的代价
#
# 显存不够的团队还有另一种省法：上下文不常备，来一个请求建一个，用完就扔。这样暂存只有一份，代价在时间上。
#
# 用 8 行的请求量一量。一个请求是“x → y，再 y → x，等做完”，四种做法：
#
# - 现建现扔，`STATIC`：每次创建上下文、分配暂存，最后释放（给定的 `static_serve`，练习四的基准）；
# - 现建现扔，`USER_MANAGED`：借一块常备的暂存，上下文还是每次新建；
# - **常备**：上下文早就建好，形状也设好；暂存各备一份（`STATIC`），或者借一块共用的。
#
# 先猜：省掉分配暂存，能快多少？

# %% tags=["gpu"]
def static_serve(engine: "trt.ICudaEngine", x, y):
    """One request with a STATIC context of its own: x → y, then y → x, on `stream`. Waits. The baseline of the last exercise."""
    context = require(engine.create_execution_context(Strategy.STATIC), "创建上下文")
    for source, target in ((x, y), (y, x)):
        bind(context, source, target)
        require(context.execute_async_v3(stream.ptr), "入队")
    stream.synchronize()


# %% tags=["demo", "gpu"]
_, x, y = sample(8, 9)
lent = Block(scratch_of(heavy, 8))


def lent_serve(context: "trt.IExecutionContext"):
    for source, target in ((x, y), (y, x)):
        bind(context, source, target)
        context.update_device_memory_size_for_shapes()
        context.set_device_memory(lent.ptr, lent.nbytes)
        require(context.execute_async_v3(stream.ptr), "入队")
    stream.synchronize()


def fresh_serve():
    lent_serve(require(heavy.create_execution_context(Strategy.USER_MANAGED), "创建上下文"))


ready = require(heavy.create_execution_context(Strategy.USER_MANAGED), "创建上下文")
own_scratch = lab.compare_us(partial(static_serve, heavy, x, y), fresh_serve, clock="end_to_end", pairs=9, warmup=2)
kept = lab.compare_us(partial(static_serve, heavy, x, y), partial(lent_serve, ready), clock="end_to_end", pairs=9, warmup=2)
own = require(heavy.create_execution_context(Strategy.STATIC), "创建上下文")


def own_serve():
    for source, target in ((x, y), (y, x)):
        bind(own, source, target)
        require(own.execute_async_v3(stream.ptr), "入队")
    stream.synchronize()


resident = lab.compare_us(own_serve, partial(lent_serve, ready), clock="end_to_end", pairs=15, warmup=2)
lab.say(
    lab.table(
        ("做法", "一个请求，端到端"),
        [
            ("现建现扔，`STATIC`", own_scratch.first),
            ("现建现扔，`USER_MANAGED`", own_scratch.second),
            ("常备，`STATIC`，各备一份", resident.first),
            ("常备，共用一块", resident.second),
        ],
    )
    + f"\n\n省掉分配暂存：{own_scratch.ratio:.2f} 倍。"
    + ("分配占了大头。" if own_scratch.ratio > 2 else "**贵的是创建上下文本身**，分配暂存只是小头。")
    + f"再把现建现扔的 `STATIC` 和“常备、共用一块”直接交替着量：{kept.first.median:.0f} µs 对 {kept.second.median:.0f} µs，前者是后者的 **{kept.ratio:.1f} 倍**。"
)
del own  # its scratch goes with it

# %% [markdown]
# 所以共用一块真正买到的是这个：**上下文可以全部常备**。各备一份暂存的时候，显存只放得下一两个，只好现建现扔；
# 共用以后，多一个上下文几乎不花显存，请求来了直接入队。
#
# 直接交替的那一次，两个时间和表里的不一样，“常备、共用一块”可能慢出一截，不必奇怪：每次比较都是两种做法轮着跑，对手不同，各自的时间也会不同，
# 紧跟在一次现建现扔后面，同样的请求就可能慢一些。倍数是一对一对地比、再取中位数，所以也不正好等于那两个时间相除。看数量级就够了。
#
# 误区三：**“自己管暂存会更慢。”** 比上表最后两行：两个都是常备的，入队做的事一样，你多做的只有“问大小、给地址”，都是 CPU 上的小事。

# %% [markdown]
# ## 练习
#
# 四道题。练习里可以用的给定名字：
#
# | 名字 | 是什么 |
# |:--|:--|
# | `expected(x, width)`、`WIDTHS`、`FEATURES` | NumPy 的标准答案；两个小引擎的宽度；64 |
# | `engines`、`heavy`、`stream` | 两个小引擎的列表；暂存很大的引擎；一条非阻塞流 |
# | `require(结果, 做什么)`、`bind(context, x, y)`、`Strategy` | 见前面 |
# | `Block(nbytes)` | 一块显存，有 `ptr` 和 `nbytes` |
# | `scratch_of(engine, rows)` | 一个形状要多少暂存；它会另建一个临时的上下文，所以练习二、四里请直接问你自己的上下文 |
# | `lanes` | 三条非阻塞流，请求从那里来 |
# | `static_serve(engine, x, y)` | 练习四的基准 |
#
# 演示单元里的名字（`sample`、`contexts` 等）评分时不存在，不要用。
#
# 练习二到四都从 `new_block(nbytes)` 要显存：它返回一个有 `ptr`、`nbytes` 的对象，**没有人引用它的时候，显存就还回去了**；
# 给不出来就抛 `MemoryError`。自己试的时候，传 `Block` 这个类就行。测试传的是一本账，就是下面这段程序里的 `Audit`：它从一个小房间里切块，
# 记下每一块的去向，把引擎换成会记账的，还有一道“闸门”能把一条流拦住。不必细读；测试没有通过的时候，它能告诉你测试看的是什么。

# %%
AUDIT = r"""
import gc
import time
import weakref

import cupy as cp
import cupyx
import numpy as np
import tensorrt as trt

CLEAN, ROOM, APART, LIMIT_NS = 0xA5, 24 << 20, 4096, 500_000_000
HOLD = '''
extern "C" __global__ void hold(const volatile int *flag, unsigned long long limit) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (*flag == 0 && now - begin < limit);
}
'''


class Block:
    def __init__(self, ptr, nbytes):
        self.ptr, self.nbytes = ptr, nbytes


class Audit:
    '''Blocks cut from one room, never twice the same bytes; watched engines; a gate that holds a stream.'''

    def __init__(self, engines, streams):
        self.streams = streams
        self.room, self.end = cp.full(ROOM, CLEAN, cp.uint8), APART
        self.live, self.released, self.asked, self.captured = {}, [], [], weakref.WeakSet()
        self.peak, self.early, self.contexts, self.enqueued, self.faults, self.denied = 0, 0, 0, 0, [], None
        self.flag, self.kernel = cupyx.zeros_pinned(1, np.int32), cp.RawKernel(HOLD, "hold")
        self.hold(self.streams[0], open_gate=True)
        self.engines = [Engine(self, engine) for engine in engines]
        cp.cuda.runtime.deviceSynchronize()

    def new_block(self, nbytes):
        start = -(-self.end // 1024) * 1024
        if nbytes < 0 or start + nbytes + APART > ROOM:
            raise MemoryError(f"给不出 {nbytes} 字节")
        self.end = start + nbytes + APART
        block, number = Block(self.room.data.ptr + start, nbytes), len(self.asked)
        self.live[number] = (start, nbytes)
        self.asked.append(nbytes)
        self.peak = max(self.peak, self.held())
        weakref.finalize(block, self.gone, number).atexit = False
        return block

    def held(self):
        return sum(nbytes for _, nbytes in self.live.values())

    def gone(self, number):
        patience = time.monotonic() + 0.001  # an event may be done a moment before its stream says so
        while not (idle := all(each.done for each in self.streams)) and time.monotonic() < patience:
            pass
        self.early += not idle
        self.released.append(self.live.pop(number))

    def within(self, address, nbytes):
        at = address - self.room.data.ptr
        return any(start <= at and at + nbytes <= start + size for start, size in self.live.values())

    def clean(self):
        # Paint what was given back, so that whoever still writes there shows.
        gc.collect()
        if not all(self.within(*context._memory) for context in self.captured):
            self.fault("unpinned")
        cp.cuda.runtime.deviceSynchronize()
        for start, nbytes in self.released:
            self.room[start : start + nbytes] = CLEAN
        cp.cuda.runtime.deviceSynchronize()

    def touched(self):
        # [bytes changed outside of all blocks, bytes changed in blocks that were given back]
        cp.cuda.runtime.deviceSynchronize()
        changed = self.room.get() != CLEAN
        for start, nbytes in self.live.values():
            changed[start : start + nbytes] = False
        back = sum(int(changed[start : start + nbytes].sum()) for start, nbytes in self.released)
        return [int(changed.sum()) - back, back]

    def fault(self, what):
        if what not in self.faults:
            self.faults.append(what)

    def deny(self, name, after=0):
        # The call `name` of a context answers False, once, after `after` that go through.
        self.denied = [name, after]

    def denies(self, name):
        if self.denied is None or self.denied[0] != name:
            return False
        self.denied[1] -= 1
        if self.denied[1] >= 0:
            return False
        self.denied = None
        return True

    def hold(self, on, open_gate=False):
        self.flag[0] = int(open_gate)
        with on:
            self.kernel((1,), (1,), (np.uint64(self.flag.ctypes.data), np.uint64(LIMIT_NS)))

    def race(self, first, second):
        # Hold stream 0; first on it, second on stream 1. [the CPU waited for the GPU, second was done before first began]
        a, b, _ = self.streams
        cp.cuda.runtime.deviceSynchronize()
        self.hold(a)
        try:
            for task, on in ((first, a), (second, b)):
                getattr(task[0], task[1])(*task[2:], on)
            waited = a.done
            time.sleep(0.03)
            overtook = b.done and not a.done  # in this order: if the gate gives way meanwhile, both are done
        finally:
            self.flag[0] = 1
            cp.cuda.runtime.deviceSynchronize()
        return [waited, overtook]

    def drop(self, desk, which, x, y):
        # A graph that nobody keeps.
        graph = desk.capture(which, x, y)
        del graph
        gc.collect()

    def storm(self, desk, graphs, requests, source, target):
        # Requests in a row without waiting: [0, engine, first row, rows, stream] or [1, graph, first row, rows, stream].
        for captured, index, start, rows, lane in requests:
            on, fed, got = self.streams[lane], source[start : start + rows], target[start : start + rows]
            if captured:
                graph, x, y = graphs[index]
                with on:
                    x[...] = fed
                graph.launch(on)
                with on:
                    got[...] = y
            else:
                desk.infer(index, fed, got, on)
        cp.cuda.runtime.deviceSynchronize()

    def alive(self):
        # How many contexts that went into a graph are still there.
        gc.collect()
        return len(self.captured)

    def used(self):
        # What must not grow: bytes of CuPy's pool in use, bytes of blocks in use, contexts made.
        gc.collect()
        cp.cuda.runtime.deviceSynchronize()
        return [cp.get_default_memory_pool().used_bytes(), self.held(), self.contexts]


class Engine:
    '''Stands for an engine: its contexts are watched.'''

    def __init__(self, audit, engine: "trt.ICudaEngine"):
        self.audit, self._engine, self._needs = audit, engine, {}
        self._asking = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def create_execution_context(self, strategy=trt.ExecutionContextAllocationStrategy.STATIC):
        if strategy != trt.ExecutionContextAllocationStrategy.USER_MANAGED:
            self.audit.fault("static")
        self.audit.contexts += 1
        managed = strategy == trt.ExecutionContextAllocationStrategy.USER_MANAGED
        return Context(self, self._engine.create_execution_context(strategy), managed)

    def need(self, rows):
        if rows not in self._needs:
            self._asking.set_input_shape("x", (rows, 64))
            self._needs[rows] = self._asking.update_device_memory_size_for_shapes()
        return self._needs[rows]


class Context:
    '''Stands for a context: refuses what would write to somebody else's memory, and notes what is against the rules.'''

    def __init__(self, engine, context, managed):
        self.engine, self._context, self._audit, self._managed = engine, context, engine.audit, managed
        self._rows, self._memory, self._captured = None, (0, 0), False
        self._asked = self._given = False  # since the shape was set: steps two and three

    def __getattr__(self, name):
        return getattr(self._context, name)

    def _forward(self, name, *arguments):
        if self._captured:
            self._audit.fault("captured")
        return False if self._audit.denies(name) else getattr(self._context, name)(*arguments)

    def set_tensor_address(self, name, memory):
        return self._forward("set_tensor_address", name, memory)

    def set_input_shape(self, name, shape):
        accepted = self._forward("set_input_shape", name, shape)
        if accepted:
            self._rows, self._asked, self._given = tuple(shape)[0], False, False
        return accepted

    def update_device_memory_size_for_shapes(self):
        self._asked, self._given = True, False
        return self._context.update_device_memory_size_for_shapes()

    def set_device_memory(self, memory, size):
        if not self._audit.within(memory, size):
            self._audit.fault("foreign")
            raise RuntimeError("set_device_memory 得到的这一段，不全在 new_block 给的、还有人引用的块里。测试替你拦下了。")
        self._memory, self._given = (memory, size), True
        self._context.set_device_memory(memory, size)

    def execute_async_v3(self, stream_handle):
        self._audit.enqueued += 1
        if self._managed and self._rows is not None:
            self._inspect()
        accepted = self._forward("execute_async_v3", stream_handle)
        if accepted and cp.cuda.runtime.streamIsCapturing(stream_handle):
            self._captured = True
            self._audit.captured.add(self)
        return accepted

    def _inspect(self):
        if self._memory[1] < self.engine.need(self._rows):
            self._audit.fault("small")
            raise RuntimeError("暂存不够这个形状用，就入队了。形状变了以后要重新问大小。测试替你拦下了。")
        if not self._audit.within(*self._memory):
            self._audit.fault("gone")
            raise RuntimeError("上下文的暂存在一块已经没人引用的显存里。测试替你拦下了。")
        if not (self._asked and self._given):
            self._audit.fault("order")
            raise RuntimeError("设过形状以后，没有重新问大小（update_device_memory_size_for_shapes）、再给地址（set_device_memory），就入队了。测试替你拦下了。")
"""

# %% [markdown]
# ### 练习一：谁能和谁共用（3 分，不需要 GPU）
#
# 显存的规划表 `contexts` 是一个列表，每项是 `(nbytes, spans)`：
#
# - `nbytes`：这个上下文要多少字节暂存（正整数）；
# - `spans`：它在 GPU 上工作的时间段，列表，每段 `(begin, end)` 单位 ms，`begin < end`，可以有好几段，次序不定。
#
# 两个上下文只要有任何一段**重叠**，就不能用同一块。前一个的 `end` 等于后一个的 `begin` 不算重叠（中间有事件隔着）。
# 也只有重叠才要紧：甲在 0–10 和 90–100，乙在 20–30，可以共用。
#
# 写 `share_blocks(contexts)`，返回分组：一个列表，每项是共用一块的上下文序号（整数）的列表。每个上下文正好出现一次。
# 一块要多大，由组里最大的决定，再向上取整到 2 MiB（分配的刻度）；总数是各块之和，给定的 `total_bytes` 会算。
#
# 要求：分组合法，而且总数**不超过**下面这条规则的结果（能更小当然更好）：
#
# > 从 `nbytes` 最大的开始逐个安排（一样大的，序号小的先）；放进第一个“与组里每一个都不重叠”的组，没有这样的组就另开一组。

# %%
GRAIN = 2 * 2**20


def total_bytes(contexts, groups):
    """Bytes of all blocks: each as large as its largest member, rounded up to GRAIN. Says nothing of overlaps."""
    return sum(-(-max(contexts[index][0] for index in group) // GRAIN) * GRAIN for group in groups)


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 为什么先安排最大的？如果先安排小的，后来的大个子会把那一组的块撑大，小的省下什么了吗？
# 判断“能不能进这一组”，要和组里的几个上下文比？每个上下文又有几段？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `sorted(序号们, key=…)` 是稳定的：键一样的保持原来的次序。
# 两段 `(a, b)`、`(c, d)` 什么时候有公共的时间？画出四种位置关系，写成两个比较。
# `any(…)`、`all(…)` 和 `for … else` 都用得上。
#
# </details>

# %% solution="share_blocks"
def share_blocks(contexts):
    """Group contexts that may share a block of scratch.

    contexts: list of (nbytes, [(begin, end), ...]), bytes and ms. Returns a list of lists of indices, each index once.
    """
    ### BEGIN SOLUTION: 从最大的开始，逐个找第一个容得下它的组；“容得下”是和组里每一个的每一段都不重叠
    def overlap(one, other):
        return any(a < d and c < b for a, b in contexts[one][1] for c, d in contexts[other][1])

    groups = []
    for index in sorted(range(len(contexts)), key=lambda index: -contexts[index][0]):
        for group in groups:
            if not any(overlap(index, member) for member in group):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups
    ### END SOLUTION


# %% test="share_blocks" kind="answer" points=3
UNIT = 2**20


def faults_of(contexts, groups, bar):
    """[indices missing, twice or unknown; pairs that overlap in one group; bytes above the bar] of an answer."""
    placed = sorted(index for group in groups for index in group)
    if placed != list(range(len(contexts))):
        return [max(1, len(set(placed) ^ set(range(len(contexts))))), 0, 0]
    clashes = 0
    for group in groups:
        for at, one in enumerate(group):
            for other in group[:at]:
                clashes += any(max(a, c) < min(b, d) for a, b in contexts[one][1] for c, d in contexts[other][1])
    blocks = [-(-max(contexts[index][0] for index in group) // (2 * UNIT)) * 2 * UNIT for group in groups if group]
    return [0, clashes, max(0, sum(blocks) - bar)]


CASES = [  # contexts, and the total that the rule reaches
    ([(5 * UNIT, [(0, 10)]), (3 * UNIT, [(10, 20)])], 6 * UNIT),
    ([(5 * UNIT, [(0, 10)]), (3 * UNIT, [(9, 20)])], 10 * UNIT),
    ([(4 * UNIT, [(0, 10), (90, 100)]), (4 * UNIT, [(20, 30)])], 4 * UNIT),
    ([(1 * UNIT, [(0, 10)]), (8 * UNIT, [(5, 15)]), (8 * UNIT, [(20, 30)]), (1 * UNIT, [(12, 25)])], 10 * UNIT),
]
found = [faults_of(contexts, student.share_blocks(contexts), bar) for contexts, bar in CASES]
check.equal([each[0] for each in found], [0] * len(CASES), why="每个上下文要正好出现一次，序号从 0 开始。")
check.equal([each[1] for each in found], [0] * len(CASES), why="有重叠的上下文分在了同一组。每一段都比过了吗？和组里的每一个都比过了吗？")
check.equal([each[2] for each in found], [0] * len(CASES), why="分组合法，总数却比规则的大。首尾相接不算重叠；从最大的开始；两段之间的空当也能用。")
### BEGIN HIDDEN TESTS
def by_rule(contexts):
    """The total in bytes that the rule reaches."""
    groups = []
    for index in sorted(range(len(contexts)), key=lambda index: (-contexts[index][0], index)):
        fits = [group for group in groups if all(max(a, c) >= min(b, d) for other in group for a, b in contexts[index][1] for c, d in contexts[other][1])]
        if fits:
            fits[0].append(index)
        else:
            groups.append([index])
    return sum(-(-max(contexts[index][0] for index in group) // (2 * UNIT)) * 2 * UNIT for group in groups)


drawn = [[(7 * UNIT, [(0, 5)])]]
for _ in range(40):
    contexts = []
    for _ in range(int(secret.integers(4, 12))):
        edges = sorted(int(t) for t in secret.choice(31, 2 * int(secret.integers(1, 4)), replace=False))
        spans = [(edges[k], edges[k + 1]) for k in range(0, len(edges), 2)]
        contexts.append((int(secret.integers(1, 64)) * UNIT + int(secret.integers(0, 1000)), [spans[k] for k in secret.permutation(len(spans))]))
    drawn.append(contexts)
found = [faults_of(contexts, student.share_blocks(contexts), by_rule(contexts)) for contexts in drawn]
check.equal(sum(each[0] for each in found), 0, why="换一些规划表，有的上下文没有出现，或者出现了不止一次。")
check.equal(sum(each[1] for each in found), 0, why="换一些规划表，有重叠的上下文分在了同一组。一个上下文可以有好几段，次序不定；组里的每一个都要比。")
check.equal(sum(each[2] > 0 for each in found), 0, why="换一些规划表，总数比规则的大。是不是只看了第一段到最后一段的总跨度，或者没有从最大的开始？")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习二：一块大家用（4 分）
#
# 写 `make_desk(engines, new_block)`，返回一个对象，它让所有引擎、所有形状、所有图共用一块暂存：
#
# - `desk.infer(which, x, y, on)`：用第 `which` 个引擎推理，在流 `on` 上入队，**不让 CPU 等 GPU**（换更大的块的那一次除外）；
# - `desk.capture(which, x, y)`：在给定的 `stream` 上捕获一张图，返回一个对象，它有 `launch(on)`：在流 `on` 上重放，只启动图，不再入队，也不等。
#   捕获时 `y` 可以被改写；预热也要遵守“不重叠”；
# - `on` 是任意的非阻塞流，每次都可能换。**任何两次使用暂存的推理和重放都不能重叠**，不管在哪条流上、是哪个引擎；
# - 上下文一律 `USER_MANAGED`。`infer` 每个引擎用一个上下文，重复使用；每张图用一个自己的上下文，捕获以后不再碰它；
# - 暂存只从 `new_block` 来，大小按**这一次的形状**问；手里的块够大就接着用，不够才换大的；
# - 换块以后，旧的块没有图用着就该还（不再引用它），但要等 GPU 用完，最晚不过换块之后的下一次推理；有图用着就得留着；
# - 图没了（调用者不再引用它），它的上下文、只有它在用的块，最晚到下一次推理也要还：`desk` 自己不要留着图；
# - `False` 要变成 `RuntimeError`。`new_block` 抛了 `MemoryError`、`bind` 抛了异常，都让它传出去；之后合法的请求照常正确，也还能捕获。
#
# `desk` 和图各自保管它们需要的一切；`x`、`y` 由调用者保管。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 只用一个事件够不够？每一次推理或重放，之前做什么、之后做什么，就能首尾相接，不管下一次在哪条流上？
# 换块的时候，旧块可能正被 GPU 用着。CPU 拿什么等到“最后一次使用做完”？
# `new_block` 失败的时候，旧块要是已经放掉了，下一个小请求怎么办？
# 图重放时要等谁？它的暂存地址在捕获时就定了，谁来留住那一块？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `cp.cuda.Event(disable_timing=True)`，`流.wait_event(event)`，`event.record(流)`，`event.synchronize()`（CPU 等）。
# `context.update_device_memory_size_for_shapes()`，`context.set_device_memory(block.ptr, block.nbytes)`。
# 捕获：`with stream:` 里 `stream.begin_capture()`，`finally` 里 `stream.end_capture()`；等事件、记事件都放在捕获**外面**，捕获里只有入队。
# 入队在捕获里返回 `False` 时，`end_capture` 自己也可能抛异常；最后传出去的应当是说得清原因的 `RuntimeError`。
#
# </details>

# %% solution="make_desk" tags=["gpu"]
def make_desk(engines, new_block):
    """Let engines (a list of trt.ICudaEngine) share one block of scratch, taken from new_block(nbytes).

    Returns an object with infer(which, x, y, on) and capture(which, x, y); what capture returns has launch(on).
    x, y: as for `bind`; on: a non-blocking cupy.cuda.Stream. RuntimeError: TensorRT refused. MemoryError: new_block's.
    """
    ### BEGIN SOLUTION: 备好每个引擎的上下文和一个事件；写三个小动作：备够暂存，排队执行，捕获；infer、capture、launch 都由它们拼成
    turn = cp.cuda.Event(disable_timing=True)  # recorded after each use of the scratch, waited for before the next

    def in_turn(on, work):
        on.wait_event(turn)
        try:
            work()
        finally:
            turn.record(on)

    class Replay:
        """A graph and what it needs: its context, and the block whose address it has inside."""

        def __init__(self, graph, context, block):
            self.graph, self.context, self.block = graph, context, block

        def launch(self, on):
            in_turn(on, lambda: self.graph.launch(on))

    class Desk:
        def __init__(self):
            self.contexts = [self.new_context(which) for which in range(len(engines))]
            self.block = None

        def new_context(self, which) -> "trt.IExecutionContext":
            return require(engines[which].create_execution_context(Strategy.USER_MANAGED), "创建上下文")

        def prepare(self, context: "trt.IExecutionContext", x, y):
            bind(context, x, y)
            need = context.update_device_memory_size_for_shapes()
            if self.block is None or self.block.nbytes < need:
                block = new_block(need)  # may fail: the old one is still ours
                turn.synchronize()  # the old one may go back only when nobody writes to it any more
                self.block = block
            context.set_device_memory(self.block.ptr, self.block.nbytes)

        def infer(self, which, x, y, on):
            context = self.contexts[which]
            self.prepare(context, x, y)
            in_turn(on, lambda: require(context.execute_async_v3(on.ptr), "入队"))

        def capture(self, which, x, y):
            context = self.new_context(which)
            self.prepare(context, x, y)
            in_turn(stream, lambda: require(context.execute_async_v3(stream.ptr), "预热"))
            stream.synchronize()
            accepted = graph = None
            with stream:
                stream.begin_capture()
                try:
                    accepted = context.execute_async_v3(stream.ptr)
                finally:
                    try:
                        graph = stream.end_capture()
                    except cp.cuda.runtime.CUDARuntimeError as error:
                        raise RuntimeError("捕获失败。" + " ".join(lab.trt_errors())) from error
            require(accepted, "捕获中入队")
            return Replay(graph, context, self.block)

    return Desk()
    ### END SOLUTION


# %% test="desk_results" kind="structure" points=2 tags=["gpu"]
RULES = {
    "static": "上下文要用 USER_MANAGED 创建：别的策略会自己备一份暂存。",
    "foreign": "暂存要来自 new_block，报的字节数不能比块大，块也要有人引用着。",
    "small": "有一次入队时，暂存不够那个形状用。形状变了，就要重新问大小。",
    "gone": "有一次入队时，暂存所在的块已经没人引用了。",
    "order": "设过形状以后，要重新问大小、再给地址，才能入队。",
    "unpinned": "图还在，它写的那一块却已经没有人引用了。谁捕获，谁保管。",
    "captured": "图用的上下文，捕获以后又被改动或入队了。一张图一个上下文。",
}


def whole(*shape):
    return secret.integers(-8, 9, shape).astype(np.float32)


def pair(rows):
    return on_gpu(whole(rows, 64)), on_gpu(np.zeros((rows, 64), np.float32))


class Bench:
    """A desk on watched engines, and what is asked of it."""

    def __init__(self):
        self.audit = student.define(reference.value("AUDIT"), "Audit")(student.value("engines"), student.value("lanes"))
        self.watched, self.streams = self.audit.get("engines"), student.value("lanes")
        self.desk = student.make_desk(self.watched, self.audit.get("new_block"))

    def infer(self, which, rows, lane, why):
        """New x, poisoned y, one inference, compared."""
        x, y = pair(rows)
        data = x.read()
        y.poison()
        self.desk.infer(which, x, y, self.streams[lane])
        self.streams[lane].synchronize()
        check.equal(y.read(), reference.expected(data, reference.value("WIDTHS")[which]), why=why)

    def capture(self, which, rows):
        x, y = pair(rows)
        return which, x, y, self.desk.capture(which, x, y)

    def graphs_stand(self, count):
        """So many graphs hold the inference of a context each, which somebody keeps."""
        check.that(self.audit.alive() >= count, why="每张图要有一个自己的上下文：在捕获里入队，图还在就一直留着。有的图没有（没有真的捕获，或者图的上下文没有人引用、被回收了）。")

    def replay(self, captured, lane, why):
        """New x in place, poisoned y, one replay, compared."""
        which, x, y, graph = captured
        data = x.write(whole(*x.shape))
        y.poison()
        enqueued = self.audit.get("enqueued")
        graph.launch(self.streams[lane])
        self.streams[lane].synchronize()
        check.equal(y.read(), reference.expected(data, reference.value("WIDTHS")[which]), why=why)
        check.equal(self.audit.get("enqueued"), enqueued, why="launch 又入队了一次：它应当只启动捕获好的图。")

    def obeys(self):
        for fault in self.audit.get("faults"):
            check.that(False, why=RULES[fault])

    def needs(self, which, rows):
        return self.watched[which].need(rows)


bench = Bench()
bench.infer(1, 100, 0, "第一次推理，结果不对。")
bench.infer(1, 16, 1, "换一个小形状，结果不对。")
first = bench.capture(1, 40)
bench.graphs_stand(1)
bench.replay(first, 0, "捕获以后重放，结果不对。")
bench.infer(0, 256, 2, "换成要得更多的引擎，结果不对：暂存要跟着变大。")
bench.audit.clean()
bench.obeys()
bench.replay(first, 1, "换过更大的块以后，旧的图重放，结果不对。")
check.equal(bench.audit.touched(), [0, 0], why="重放写到了不该写的地方：换块以前捕获的图，仍然写旧块，旧块却已经还了。谁捕获，谁保管。")
bench.infer(0, 3, 0, "形状又变小，结果不对。")
bench.obeys()
### BEGIN HIDDEN TESTS
bench = Bench()
largest = 0
for which, rows, lane in ((1, 9, 0), (0, int(secret.integers(60, 90)), 1), (1, 256, 2), (0, 200, 0), (1, 1, 1), (0, 256, 2), (1, 128, 0)):
    before, grows = len(bench.audit.get("asked")), bench.needs(which, rows) > largest
    bench.infer(which, rows, lane, "形状和引擎交错着来，结果不对。")
    if grows:  # whoever lets go of the old block a little later, when the GPU is done with it, does so now
        bench.infer(which, rows, lane, "形状和引擎交错着来，结果不对。")
    bench.obeys()
    asked = bench.audit.get("asked")
    check.that(len(asked) <= before + grows, why="手里的块已经够大，却又要了一块。")
    largest = max(largest, bench.needs(which, rows))
    check.that(max(asked) <= largest, why="要的块比到此为止任何一个形状的需要都大：大小要按这一次的形状问，不是按 Profile 的最大形状。")
    check.that(bench.audit.used()[1] <= largest, why="换了更大的块以后，没有图用着的旧块应当还掉。")
check.equal(bench.audit.get("contexts"), 2, why="infer 每个引擎只用一个上下文，重复使用。")
check.equal(bench.audit.touched()[0], 0, why="块以外的显存被写坏了。")

# Graphs made on blocks of their time go on being right; what was given back is not written to.
bench = Bench()
graphs = [bench.capture(1, 30), bench.capture(0, 8), bench.capture(1, 250), bench.capture(0, 120), bench.capture(0, 256)]
bench.obeys()
bench.graphs_stand(len(graphs))
for _ in range(3):
    bench.audit.clean()
    bench.obeys()
    for number in secret.permutation(len(graphs)):
        bench.replay(graphs[number], int(secret.integers(3)), "几张图在几条流上交错重放，结果不对。")
        which, rows = int(secret.integers(2)), int(secret.integers(1, 257))
        bench.infer(which, rows, int(secret.integers(3)), "推理和重放交错，结果不对。")
    check.equal(bench.audit.touched(), [0, 0], why="重放写到了已经还掉的块里：图用着的块，要由图保管。")
bench.obeys()
bench.graphs_stand(len(graphs))
before = bench.audit.used()[1]
x, y = pair(256)
bench.audit.drop(bench.desk, 0, x, y)
check.equal(bench.audit.used()[1], before, why="一张图没了，它用的块如果别人不用，就应当还掉；它也不该另要一块。")

# A graph from before the block grew: the old block lives as long as the graph, and no longer.
OUTLIVED = """
def outlived(audit, desk, small, large, on):
    graph = desk.capture(*small)
    graph.launch(on)
    desk.infer(*large, on)
    on.synchronize()
    told = [audit.alive(), audit.held()]
    del graph
    desk.infer(*large, on)
    on.synchronize()
    return [*told, audit.alive(), audit.held()]
"""
bench = Bench()
small, large = [1, *pair(40)], [0, *pair(256)]
found = student.define(OUTLIVED, "outlived")(bench.audit, bench.desk, small, large, bench.streams[0])
check.equal(found[:2], [1, bench.needs(1, 40) + bench.needs(0, 256)], why="换了更大的块、旧的图还在的时候，应当正好有两块：图用着的旧块，和新的。")
check.equal(found[2:], [0, bench.needs(0, 256)], why="换了更大的块以后，旧的图没了，它的上下文和旧块却没有还：除了调用者，还有谁引用着那张图？")

# Refusals: they come out as exceptions, nothing is written, and the desk serves on.
bench = Bench()
bench.infer(1, 5, 0, "第一次推理，结果不对。")
x, y = pair(20)
kept = y.read()
for call in ("set_input_shape", "set_tensor_address", "execute_async_v3"):
    bench.audit.deny(call)
    check.raises("RuntimeError", bench.desk.infer, 0, x, y, bench.streams[0], why=f"{call} 返回了 False，应当变成 RuntimeError。")
    check.equal(y, kept, why="被拒绝的请求改动了 y。")
    bench.infer(0, 20, 1, "TensorRT 拒绝过一次以后，合法的请求结果不对。")
for after, why in ((0, "预热时"), (1, "捕获中")):
    bench.audit.deny("execute_async_v3", after)
    check.raises("RuntimeError", bench.desk.capture, 0, x, y, why=f"{why}入队返回了 False，应当变成 RuntimeError，不能返回一张空的图。")
    bench.replay(bench.capture(0, 20), 2, f"{why}入队被拒绝以后，再捕获的图重放，结果不对。捕获状态收尾了吗？")
check.raises("TypeError", bench.desk.infer, 0, x.read(), y, bench.streams[0], why="x 是 NumPy 数组，bind 会抛 TypeError，让它传出去。")
too_many = pair(257)
check.raises("RuntimeError", bench.desk.infer, 0, *too_many, bench.streams[0], why="行数超出了 Profile，bind 会抛 RuntimeError，让它传出去。")
check.raises("RuntimeError", bench.desk.capture, 0, *too_many, why="行数超出了 Profile，捕获也要抛 RuntimeError。")
bench.infer(0, 30, 0, "拒绝了坏的请求以后，合法的请求结果不对。")
EMPTY = """
def poor(audit, nbytes):
    def new_block(size):
        if size > nbytes:
            raise MemoryError("no more")
        return audit.new_block(size)
    return new_block
"""
bench.desk = student.make_desk(bench.watched, student.define(EMPTY, "poor")(bench.audit, bench.needs(1, 100)))
bench.infer(1, 100, 0, "第一次推理，结果不对。")
if bench.needs(0, 256) > bench.needs(1, 100):
    check.raises("MemoryError", bench.desk.infer, 0, *pair(256), bench.streams[1], why="new_block 给不出更大的块，抛了 MemoryError，应当传出去。")
    check.raises("MemoryError", bench.desk.capture, 0, *pair(256), why="捕获时 new_block 给不出更大的块，抛了 MemoryError，应当传出去。")
bench.infer(1, 64, 2, "new_block 失败过以后，放得下的请求结果不对：旧块还在吗？")
bench.obeys()
### END HIDDEN TESTS

# %% test="desk_overlap" kind="structure" points=2 tags=["gpu"]
streams, held = student.value("lanes"), []


def numbers(rows):
    return secret.integers(-8, 9, (rows, 64)).astype(np.float32)


def buffers(rows):
    """x and y for a request; they live as long as this cell."""
    held.append((on_gpu(numbers(rows)), on_gpu(np.zeros((rows, 64), np.float32))))
    return held[-1]


class Side:
    """A desk on watched engines in one of the two processes, and a request for each engine of `which`, all tried once."""

    def __init__(self, party, which=(0, 0, 1)):
        self.audit = party.define(reference.value("AUDIT"), "Audit")(party.value("engines"), party.value("lanes"))
        self.desk = party.make_desk(self.audit.get("engines"), self.audit.get("new_block"))
        self.tasks = [[self.desk, "infer", number, *buffers(64)] for number in which]
        for task in self.tasks:
            self.desk.infer(*task[2:], party.value("lanes")[0])


def apart(side, one, other, what, yardstick=True):
    """One task behind a closed gate on a stream, another on another stream: it must wait on the GPU, and the CPU must not."""
    waited, overtook = side.audit.race(one, other)
    if waited and yardstick:  # once more: the machine may just have been busy
        waited, again = side.audit.race(one, other)
        overtook = overtook or again
    check.that(not overtook, why=f"{what}：前一个还没有开始，后一个已经做完了，两次推理可以在同一块暂存上重叠。中间要有一个事件。")
    check.that(not (waited and yardstick), why=f"{what}：函数在等 GPU。排队要靠事件，让流等，CPU 不等。")


mine, theirs = Side(student), Side(reference)
audit, desk = mine.audit, mine.desk
free_cpu = not any(theirs.audit.race(theirs.tasks[0], task)[0] for task in theirs.tasks[1:])  # does TensorRT itself let the CPU go on, here?
apart(mine, *mine.tasks[:2], "同一个引擎，两条流上各推理一次", free_cpu)
### BEGIN HIDDEN TESTS
first, _, other = mine.tasks
apart(mine, first, other, "两个引擎，两条流上各推理一次", free_cpu)
replays = []
for which, rows in ((0, 50), (1, 90)):
    x, y = buffers(rows)
    replays.append([desk.capture(which, x, y), "launch"])
    for lane in streams[:2]:
        replays[-1][0].launch(lane)
apart(mine, first, replays[0], "先推理，再在另一条流上重放", free_cpu)
apart(mine, replays[0], other, "先重放，再在另一条流上推理", free_cpu)
apart(mine, replays[1], replays[0], "两张图在两条流上重放", free_cpu)
apart(mine, replays[0], replays[0], "同一张图在两条流上重放", free_cpu)

# The warm-up before a capture takes its turn, too.
CAPTURES = """
def captures(audit, task, desk, which, x, y):
    # Capture while a task waits behind a closed gate. Whether what was enqueued outside of the capture was done before the gate
    # opened. Creating a context may wait for the whole GPU: the capture gets some that were created, and have worked, before.
    import time
    import cupy as cp
    import tensorrt as trt
    a, _, c = audit.streams
    strategies, engine, early = trt.ExecutionContextAllocationStrategy, audit.engines[which], []
    create, managed = engine.create_execution_context, strategies.USER_MANAGED
    spare = [create(managed) for _ in range(3)]
    start, nbytes = max(audit.live.values(), key=lambda block: block[1])
    for context in spare:
        context.set_input_shape("x", x.shape)
        context.set_tensor_address("x", x.data.ptr)
        context.set_tensor_address("y", y.data.ptr)
        context.update_device_memory_size_for_shapes()
        context.set_device_memory(audit.room.data.ptr + start, nbytes)
        context.execute_async_v3(c.ptr)
        cp.cuda.runtime.deviceSynchronize()
    Context = type(spare[0])
    enqueue = Context.execute_async_v3

    def created(strategy=strategies.STATIC):
        return spare.pop() if spare and strategy == managed else create(strategy)

    def enqueued(context, stream_handle):
        accepted = enqueue(context, stream_handle)
        if not cp.cuda.runtime.streamIsCapturing(stream_handle):
            time.sleep(0.03)
            early.append(cp.cuda.runtime.streamQuery(stream_handle) == 0 and not a.done)  # in this order: if the gate gives way meanwhile, both are done
        return accepted

    audit.hold(a)
    try:
        getattr(task[0], task[1])(*task[2:], a)
        engine.create_execution_context, Context.execute_async_v3 = created, enqueued
        desk.capture(which, x, y)
        return any(early)
    finally:
        Context.execute_async_v3 = enqueue
        vars(engine).pop("create_execution_context", None)
        audit.flag[0] = 1
        cp.cuda.runtime.deviceSynchronize()
"""
overtook = student.define(CAPTURES, "captures")(audit, first, desk, 1, *buffers(64))
check.that(not overtook, why="前一个推理还没有开始，捕获之前的预热就已经做完了，两次推理可以在同一块暂存上重叠。预热也要等事件、记事件。")

# The block grows while the old one is in use: it may go back only afterwards.
growing = Side(student, (1, 1, 1))  # engine 1 needs less than engine 0, whether or not scratch depends on the shape
x, y = buffers(256)
growing.audit.race(growing.tasks[0], [growing.desk, "infer", 0, x, y])
check.equal(growing.audit.get("early"), 0, why="换更大的块时，GPU 还在用旧的块，旧块就还掉了。先要到新的，等最后一次使用做完，再放手。")

# A thousand requests of mixed shapes on three streams, eager and by graph: all right, and no memory grows.
graphs = []
for which, rows in ((0, 24), (1, 48), (0, 96)):
    x, y = buffers(rows)
    graphs.append([which, rows, [desk.capture(which, x, y), x, y]])
total = 0
requests, owners = [], []
for _ in range(1000):
    captured = int(secret.integers(2))
    if captured:
        index = int(secret.integers(len(graphs)))
        which, rows, lane = graphs[index][0], graphs[index][1], index
    else:
        index = which = int(secret.integers(2))
        rows, lane = int(secret.integers(1, 80)), int(secret.integers(3))
    requests.append([captured, index, total, rows, lane])
    owners += [which] * rows
    total += rows
data = numbers(total)
source, target = on_gpu(data), on_gpu(np.zeros((total, 64), np.float32))
packed = [each[2] for each in graphs]
audit.storm(desk, packed, requests[:100], source, target)
before = audit.used()
target.poison()
audit.storm(desk, packed, requests, source, target)
owners, want = np.array(owners), np.empty((total, 64), np.float32)
for which, width in enumerate(reference.value("WIDTHS")):
    want[owners == which] = reference.expected(data[owners == which], width)
check.equal(target.read(), want, why="一千个形状混杂的请求，推理和重放交错在三条流上，有的结果不对。")
check.that(all(now <= then for now, then in zip(audit.used(), before, strict=True)), why="一千个请求之后，显存、块或上下文比开始时多了。稳定以后不该再要任何东西。")
for fault in audit.get("faults"):
    check.that(False, why=f"一千个请求里，有的违反了规则（{fault}）：上下文是 USER_MANAGED 的吗？暂存够大、还有人引用吗？图的上下文没有再碰吧？")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：峰值只等于最大的那一个（2 分）
#
# 写 `capture_all(engines, requests, new_block)`，为一批形状各捕获一张图：
#
# - `requests` 是列表，每项 `(which, x, y)`：第几个引擎，两个 CuPy 数组；
# - 返回图的列表，**次序和 `requests` 一样**，每张都有 `launch(on)`，规矩和练习二相同；
# - **任何时刻**，从 `new_block` 要来而还没有还的字节，都不超过最大的那个请求需要的暂存。
#
# 可以用你的 `make_desk`。“最大的请求”是字节最多的，不是行数最多的：两个引擎的宽度不同。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 先捕获小的会怎样：它那一块什么时候才能还？先捕获哪一个，后面的就都不用另要了？
# 调用者要的次序和你捕获的次序不一样，怎么放回去？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `scratch_of(engines[which], x.shape[0])` 给出一个请求要多少字节，不占暂存。
# `sorted(range(len(requests)), key=…, reverse=True)` 给出捕获的次序；结果放进一个按序号的列表或字典。
#
# </details>

# %% solution="capture_all" tags=["gpu"]
def capture_all(engines, requests, new_block):
    """Capture one graph for each (which, x, y) of requests, all on one block of scratch from new_block.

    Returns the graphs in the order of requests; each has launch(on). The bytes held never exceed what the largest needs.
    """
    ### BEGIN SOLUTION: 问出每个请求要多少字节，从最多的开始，用同一个 desk 捕获；再按 requests 的次序放回去
    desk = make_desk(engines, new_block)

    def need(number):
        which, x, _ = requests[number]
        return scratch_of(engines[which], x.shape[0])

    graphs = {number: desk.capture(*requests[number]) for number in sorted(range(len(requests)), key=need, reverse=True)}
    return [graphs[number] for number in range(len(requests))]
    ### END SOLUTION


# %% test="capture_all" kind="structure" points=2 tags=["gpu"]
CAUSES = {
    "static": "上下文要用 USER_MANAGED 创建：别的策略会自己备一份暂存，不在 new_block 的账上。",
    "foreign": "暂存要来自 new_block，报的字节数不能比块大，块也要有人引用着。",
    "small": "有一次入队时，暂存不够那个形状用。",
    "gone": "有一次入队时，暂存所在的块已经没人引用了。",
    "order": "设过形状以后，要重新问大小、再给地址，才能入队。",
    "unpinned": "图还在，它写的那一块却已经没有人引用了。谁捕获，谁保管。",
    "captured": "图用的上下文，捕获以后又被改动或入队了。一张图一个上下文。",
}


def serves_all(shapes):
    """Capture all shapes, a list of (engine, rows), and replay them twice, in any order, on new data."""
    audit = student.define(reference.value("AUDIT"), "Audit")(student.value("engines"), student.value("lanes"))
    watched, streams = audit.get("engines"), student.value("lanes")
    asked = [(which, on_gpu(np.zeros((rows, 64), np.float32)), on_gpu(np.zeros((rows, 64), np.float32))) for which, rows in shapes]
    graphs = student.capture_all(watched, asked, audit.get("new_block"))
    check.equal(len(graphs), len(shapes), why="每个请求一张图，次序和 requests 一样。")
    most = max(watched[which].need(rows) for which, rows in shapes)
    check.that(audit.get("peak") <= most, why="同时占着的暂存超过了最大的那个请求的需要。先捕获的图攥着当时的块：应当从哪一个开始？")
    for fault in audit.get("faults"):
        check.that(False, why=CAUSES[fault])
    audit.clean()
    check.that("unpinned" not in audit.get("faults"), why=CAUSES["unpinned"])
    check.that(audit.alive() >= len(shapes), why="每张图要有一个自己的上下文：在捕获里入队，图还在就一直留着。有的图没有（没有真的捕获，或者图的上下文没有人引用、被回收了）。")
    enqueued = audit.get("enqueued")
    for number in [*secret.permutation(len(shapes)), *secret.permutation(len(shapes))]:
        which, x, y = asked[number]
        data = x.write(secret.integers(-8, 9, x.shape).astype(np.float32))
        y.poison()
        on = streams[int(secret.integers(3))]
        graphs[number].launch(on)
        on.synchronize()
        check.equal(y.read(), reference.expected(data, reference.value("WIDTHS")[which]), why="重放的结果不对。图的次序和 requests 对得上吗？块还有人留着吗？")
    check.equal(audit.touched(), [0, 0], why="重放写到了块以外，或者已经还掉的块里。")
    if len(shapes) > 1:
        _, overtook = audit.race([graphs[0], "launch"], [graphs[-1], "launch"])
        check.that(not overtook, why="两张图在两条流上重放，前一张还没有开始，后一张已经做完了：它们可以在同一块暂存上重叠。规矩和练习二相同，中间要有一个事件。")
    check.equal(audit.get("enqueued"), enqueued, why="launch 又入队了：它应当只启动捕获好的图。")


serves_all([(1, 16), (0, 256), (1, 64)])
### BEGIN HIDDEN TESTS
serves_all([(1, 256), (0, 130), (1, 20), (0, 8), (1, 140)])
serves_all([(0, int(rows)) for rows in secret.choice(np.arange(1, 257), 5, replace=False)])
serves_all([(1, 30)])
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：常备的上下文（3 分）
#
# 一个服务只收几种行数，每种都要随叫随到。各备一份暂存的话显存不够，于是有人现建现扔（基准 `static_serve`）。你来让它们全部常备。
#
# 写 `make_ready(engine, sizes, new_block)`，返回一个对象，它有 `serve(x, y)`：
#
# - `sizes` 是允许的行数，一个列表，没有重复，次序不定。返回之前，每种行数各建好一个 `USER_MANAGED` 的上下文，
#   大家共用从 `new_block` 要来的**一块**，够最大的用，也不多要；
# - `serve(x, y)` 做的事和 `static_serve(engine, x, y)` 一样：x → y，再 y → x（两次推理，都在 `stream` 上），等做完才返回；
# - `serve` 不创建上下文，不要新的块；`bind` 会设形状，所以每次 `bind` 以后，第 2、3 步要重来；
# - 行数不在 `sizes` 里，抛 `ValueError`，什么也不入队；`False` 变成 `RuntimeError`；`bind` 的异常传出去。之后合法的请求照常正确。
#
# 速度：`heavy`，8 行，端到端（从开始到结果算完，考官自己的钟）。`static_serve` 的时间是你的 2 倍以上得满分；
# 如果在这台机器上参考实现自己的加速不到 4 倍，门槛会降到它的一半。用图也可以（建图时 TensorRT 返回 `False`，由 `make_ready` 抛出 `RuntimeError`），但不用图已经够快。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 哪些事只和行数有关，可以在 `serve` 之前做完？哪些事每个请求都不同？
# 块要等知道了所有形状的需要才能要。块的引用由谁保管，`make_ready` 返回以后它才还在？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `engine.create_execution_context(Strategy.USER_MANAGED)`，`context.set_input_shape("x", (rows, FEATURES))`，
# `context.update_device_memory_size_for_shapes()`，`context.set_device_memory(block.ptr, block.nbytes)`；
# 每个请求：`bind`，`context.execute_async_v3(stream.ptr)`，`stream.synchronize()`。
#
# </details>

# %% solution="make_ready" tags=["gpu"]
def make_ready(engine: "trt.ICudaEngine", sizes, new_block):
    """Keep a context ready for each number of rows in sizes (a list of int), all on one block from new_block(nbytes).

    Returns an object with serve(x, y): x → y, then y → x, on `stream`; waits. x, y: as for `bind`. ValueError: rows not in sizes.
    """
    ### BEGIN SOLUTION: 先建好所有的上下文，设形状，问出各要多少；再要一块够最大的；serve 里挑上下文，每次推理都走四步，最后等做完
    contexts, most = {}, 0
    for rows in sizes:
        context = contexts[rows] = require(engine.create_execution_context(Strategy.USER_MANAGED), "创建上下文")
        require(context.set_input_shape("x", (rows, FEATURES)), "设 x 的形状")
        most = max(most, context.update_device_memory_size_for_shapes())
    block = new_block(most)

    class Ready:
        def __init__(self):
            self.block = block  # the contexts know its address, and nobody else keeps it

        def serve(self, x, y):
            context: trt.IExecutionContext = contexts.get(x.shape[0])
            if context is None:
                raise ValueError(f"没有为 {x.shape[0]} 行备好上下文，备好的是 {sorted(contexts)}")
            try:
                for source, target in ((x, y), (y, x)):
                    bind(context, source, target)
                    context.update_device_memory_size_for_shapes()  # bind has set the shape, if only to what it was
                    context.set_device_memory(block.ptr, block.nbytes)
                    require(context.execute_async_v3(stream.ptr), "入队")
            finally:
                stream.synchronize()

    return Ready()
    ### END SOLUTION


# %% test="ready_result" kind="structure" points=1 tags=["gpu"]
FAULTY = {
    "static": "上下文要用 USER_MANAGED 创建：别的策略会自己备一份暂存，常备几个就占几份。",
    "foreign": "暂存要来自 new_block，报的字节数不能比块大，块也要有人引用着。",
    "small": "有一次入队时，暂存不够那个形状用。块要够最大的那个形状。",
    "gone": "有一次入队时，暂存所在的块已经没人引用了。谁来保管它？",
    "order": "设过形状以后，要重新问大小、再给地址，才能入队。bind 也会设形状。",
}


class Service:
    """A ready service on a watched engine; its construction is looked at."""

    def __init__(self, which, sizes):
        self.audit = student.define(reference.value("AUDIT"), "Audit")(student.value("engines"), student.value("lanes"))
        engine = self.audit.get("engines")[which]
        self.width, self.ready = reference.value("WIDTHS")[which], student.make_ready(engine, sizes, self.audit.get("new_block"))
        check.equal(self.audit.get("contexts"), len(sizes), why="每种行数正好一个上下文，都在返回之前建好。")
        check.equal(self.audit.get("asked"), [max(engine.need(rows) for rows in sizes)], why="应当正好要一块，大小是各个形状的需要里最大的。")

    def served(self, rows, why):
        """One request on new data, compared."""
        data = secret.integers(-8, 9, (rows, 64)).astype(np.float32)
        x, y = on_gpu(data), on_gpu(np.zeros((rows, 64), np.float32))
        before = [self.audit.get("contexts"), self.audit.get("asked")]
        self.ready.serve(x, y)
        once = reference.expected(data, self.width)
        check.equal([y.read(), x.read()], [once, reference.expected(once, self.width)], why=why)
        for fault in self.audit.get("faults"):
            check.that(fault not in FAULTY, why=FAULTY.get(fault, ""))
        check.equal([self.audit.get("contexts"), self.audit.get("asked")], before, why="serve 里不应当再创建上下文，也不应当再要块。")


service = Service(0, [16, 200, 64])
for rows in (200, 16, 64, 16):
    service.served(rows, "结果不对：x → y，再 y → x，用这个行数的上下文。")
### BEGIN HIDDEN TESTS
sizes = [int(rows) for rows in secret.choice(np.arange(1, 257), 4, replace=False)]
service = Service(1, sizes)
for rows in (*sizes, *sizes[::-1]):
    service.served(rows, "换一个引擎、换几种行数，结果不对。")
missing = next(rows for rows in range(1, 257) if rows not in sizes)
x, y = on_gpu(np.ones((missing, 64), np.float32)), on_gpu(np.zeros((missing, 64), np.float32))
check.raises("ValueError", service.ready.serve, x, y, why="行数不在 sizes 里，应当抛 ValueError，哪怕引擎收得下。")
check.equal(y, np.zeros((missing, 64), np.float32), why="被拒绝的请求改动了 y。")
AT_RETURN = """
def at_return(audit, serve, x, y, stream):
    # What x and y hold when serve comes back; the stream is held before, until the gate gives way by itself.
    import cupy as cp
    looking = audit.streams[2]
    audit.hold(stream)
    try:
        serve(x, y)
        return [each.get(stream=looking) for each in (x, y)]
    finally:
        audit.flag[0] = 1
        cp.cuda.runtime.deviceSynchronize()
"""
data = secret.integers(-8, 9, (sizes[0], 64)).astype(np.float32)
x, y = on_gpu(data), on_gpu(np.zeros((sizes[0], 64), np.float32))
once = reference.expected(data, service.width)
found = student.define(AT_RETURN, "at_return")(service.audit, service.ready.get("serve"), x, y, student.value("stream"))
check.equal(found, [reference.expected(once, service.width), once], why="GPU 忙一点，serve 返回的时候结果就还没有好：等做完才返回。")
enqueued = service.audit.get("enqueued")
service.served(sizes[0], "等过一次 GPU 以后，结果不对。")
x, y = (on_gpu(np.zeros((sizes[0], 64), np.float32)) for _ in range(2))
if service.audit.get("enqueued") > enqueued:  # else it is graphs that serve, and the refusal is to come when they are made
    for after in (0, 1):
        service.audit.deny("execute_async_v3", after)
        check.raises("RuntimeError", service.ready.serve, x, y, why="execute_async_v3 返回了 False，应当变成 RuntimeError。")
        service.served(sizes[0], "TensorRT 拒绝过一次以后，合法的请求结果不对。")
else:
    service.audit.deny("execute_async_v3")
    check.raises("RuntimeError", student.make_ready, service.audit.get("engines")[1], sizes, service.audit.get("new_block"), why="execute_async_v3 返回了 False，make_ready 应当抛出 RuntimeError。")
check.raises("TypeError", service.ready.serve, np.zeros((sizes[0], 64), np.float32), y, why="x 是 NumPy 数组，bind 会抛 TypeError，让它传出去。")
service.served(sizes[1], "拒绝了坏的请求以后，合法的请求结果不对。")
check.equal(service.audit.touched()[0], 0, why="块以外的显存被写坏了。")
### END HIDDEN TESTS

# %% test="ready_speed" kind="speedup" points=2 tags=["gpu"]
def integers():
    return secret.integers(-8, 8, (8, 64)).astype(np.float32)


small = student.define(reference.value("AUDIT"), "Audit")(student.value("engines"), student.value("lanes"))
student.make_ready(small.get("engines")[0], [8, 32], small.get("new_block"))
check.that("static" not in small.get("faults"), why="常备的上下文各自备了一份暂存：快是快了，显存没有省。请用 USER_MANAGED。")
x, z = on_gpu(integers()), on_gpu(integers())
y, other, third = (on_gpu(np.zeros((8, 64), np.float32)) for _ in range(3))
ready = student.make_ready(student.value("heavy"), [64, 8, 256], student.value("Block"))
yardstick = reference.make_ready(reference.value("heavy"), [64, 8, 256], reference.value("Block"))
check.speedup(
    partial(ready.get("serve"), x, y),
    over=partial(reference.static_serve, reference.value("heavy"), on_gpu(integers()), third),
    best=partial(yardstick.get("serve"), z, other),
    state=(x, z),
    at_least=2.0,
    ceiling=None,
    draw=integers,
    abs=0.5,
    why="还不够快。serve 里是不是还在创建上下文？",
)
### BEGIN HIDDEN TESTS
data = x.write(integers())
for _ in range(3):
    ready.serve(x, y)
    data = reference.expected(reference.expected(data, 8192), 8192)
check.equal(x.read(), data, abs=0.5, why="计时以后再跑几次，结果不对：快，但没有做完该做的工作。")
### END HIDDEN TESTS

# %% [markdown] tags=["instructor"]
# 给教师：练习二到四的测试都用 `AUDIT` 里的 `Audit`。它的块从一间房里切，永不重复使用，所以“图还在写已经还掉的块”看得出来，又不会真的写坏别人。
# 房间里块与块之间、块以外的字节就是护栏。`Context` 在入队之前查暂存够不够、还在不在，不够的不会真的交给 TensorRT。
# “重叠”用闸门考：流 0 被一个等主机标志的内核拦住（最多半秒），前一个请求排在它后面，后一个请求在流 1 上；没有事件的话，
# 后一个 30 ms 之内就做完了。CPU 要是在等 GPU，也由同一次看出来；参考实现自己要是也等（TensorRT 在这台机器上非等不可），这一条就不考。
# 捕获之前的预热也这样考。创建上下文可能要等整块 GPU，等完了，闸门也早就开了，什么也看不出；所以这一次 `create_execution_context` 给出的是事先建好、
# 跑过这个形状的上下文，看的是预热入队以后 30 ms：它做完了，闸门还关着，就是没有等。
# 是不是真的有图，看两样：进过捕获的上下文还在不在（没人引用的会被回收），`launch` 有没有再入队。
# 练习四的加速来自上下文的创建，不是暂存的分配：“起步的代价”那张表里，分配只是小头，所以“现建现扔但共用”过不了速度这一关。

# %% [markdown]
# ## 小结
#
# | 以前的说法 | 实验以后的说法 |
# |:--|:--|
# | 引擎是共用的，多建上下文不花显存 | 权重一份；暂存一个上下文一份，默认按最大的形状备 |
# | 量一下剩余显存就知道了 | 刻度粗，整块 GPU 一起算，内存池还会藏；弄多、弄大再除 |
# | 暂存问一次就够 | 每设一次形状都要重新问、重新给；要多少由 TensorRT 说，可能随形状变，也可能不变 |
# | 自己管暂存会更慢 | 入队一样；而且上下文从此可以全部常备，请求不必等它创建 |
# | 换了上下文的暂存，图也就换了 | 图写的是捕获那一刻的地址；谁捕获，谁保管那一块 |
#
# **带走三句话**
#
# 1. 不重叠的上下文共用一块：取最大，不取总和。
# 2. 同一块的前后两次使用，要么同一条流，要么隔一个事件；图的重放也算一次使用。
# 3. 先捕获最大的，块由图保管。
#
# 下一步：《内存池优化》讲另一种省法：让分配本身进到流和图里。
