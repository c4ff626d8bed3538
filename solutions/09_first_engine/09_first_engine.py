# %% [markdown]
# # 构建第一个 TensorRT 引擎
#
# 第一次用 TensorRT 的人，常常倒在同样的两件事上。
#
# 第一件：程序停在 `AttributeError: 'NoneType' object has no attribute 'create_execution_context'`。
# 报错的那一行没有错，错在十行以前，而那一行什么也没说。
#
# 第二件更糟：程序顺利跑完，没有异常，结果却是上一个请求的，或者干脆是乱码。
#
# 两件事的根子是同一个：**TensorRT 几乎不抛异常。它用返回值和日志说话，而没有人去听。**
#
# 这一章从空白开始造出一个引擎，每个对象第一次出现时都讲清楚它是什么、归谁管、出错时是什么样子。
#
# **学完以后，你能够**
#
# - 说出从网络到结果要经过哪几个对象，谁造出谁，谁可以先扔掉；
# - 用层一层一层地描述一个强类型的网络，构建成计划文件，再加载成引擎；
# - 按名字绑定缓冲，检查每一个返回值，让失败停在它发生的地方；
# - 写一个不接受错误缓冲的运行器；
# - 数出一个引擎真正启动几个内核，说出它比逐层启动快在哪里。
#
# **需要的基础**：《CUDA 执行模型》里的流（stream）和异步执行。数内核的那一节用到一次流捕获，见《CUDA 图优化概念》。
#
# **时间**：约 80 分钟，其中四道练习约 45 分钟。
#
# 下一格导入的 `check`、`student` 等五个名字只给练习后面的测试单元用，现在不用管它们。

# %%
import numpy as np
from functools import partial
from launchlab import lab
from launchlab.exam import check, on_gpu, reference, secret, student

lab.here()

# %% [markdown]
# ## 先看全貌：它是一个编译器
#
# TensorRT 要记的对象不少，但它们的分工你早就熟悉：**TensorRT 是一个编译器**，只不过编译的是神经网络，目标机器是你的这块 GPU。
#
# | 编译一个程序 | TensorRT 里的对象 | 它是什么 |
# |:--|:--|:--|
# | 编译器的输出窗口 | 日志（logger） | 所有的警告和错误都往这里写 |
# | 编译器 | 构建器（builder） | 造出网络和配置，并把它们编译成计划 |
# | 源代码 | 网络（network） | 有哪些层、怎样连接；只是描述，不会计算 |
# | 编译选项 | 构建配置（builder config） | 优化到几级、可以用多少工作区、显示进度 |
# | 可执行文件 | 计划文件（plan） | 编译的结果，一串字节，可以存盘 |
# | 操作系统的加载器 | 运行时（runtime） | 把计划读进来 |
# | 装进内存的程序 | 引擎（engine） | 内核和权重，只读，可以被许多人同时使用 |
# | 一个进程 | 执行上下文（execution context） | 自己的暂存、自己的形状和地址；一个上下文同一时刻只做一件事 |
# | 调用一次 | `execute_async_v3` | 把一次推理放进一条流，马上返回 |
#
# 先有谁，才有谁，画出来是这样（这一格不需要 GPU）：

# %% tags=["demo"]
import matplotlib.pyplot as plt

lab.plot_style()
LOGGER, BUILDER, NETWORK, CONFIG = "日志\nlogger", "构建器\nbuilder", "网络\nnetwork", "配置\nconfig"
PLAN, RUNTIME, ENGINE, CONTEXT = "计划\nplan", "运行时\nruntime", "引擎\nengine", "上下文\ncontext"
lab.draw_graph(
    (
        dict.fromkeys((LOGGER, BUILDER, NETWORK, CONFIG, PLAN, RUNTIME, ENGINE, CONTEXT), "other"),
        [
            (LOGGER, BUILDER),
            (LOGGER, RUNTIME),
            (BUILDER, NETWORK),
            (BUILDER, CONFIG),
            (NETWORK, PLAN),
            (CONFIG, PLAN),
            (PLAN, ENGINE),
            (RUNTIME, ENGINE),
            (ENGINE, CONTEXT),
        ],
    ),
    title="先有谁，才有谁",
)
plt.show()

# %% [markdown]
# 构建器、网络、配置只在构建时需要，慢：本章的小网络零点几秒，大模型几分钟到几十分钟。运行时、引擎、上下文在服务时需要，快。隔开两边的是计划：
# **构建的机器上造好，存成文件，服务的机器上只有运行时、引擎和上下文。**
#
# 计划认人：换一个 TensorRT 版本，或者换一种 GPU，它通常就加载不了（怎样放宽，见《引擎的生命周期》）。
#
# 下面是本章一直用到的几样东西。`stream` 用 `non_blocking=True` 创建，和默认流互不等待；为什么不用默认流，后面有一节专门讲。

# %% tags=["gpu"]
import cupy as cp
import tensorrt as trt
from cuda.bindings import runtime as cudart

STRONGLY_TYPED = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

stream = cp.cuda.Stream(non_blocking=True)
builder = trt.Builder(lab.trt_logger())
runtime = trt.Runtime(lab.trt_logger())

# %% [markdown]
# ## 第一步：日志
#
# 构建器和运行时的第一个参数都是日志。为什么一个编译器非要你先交出一个日志不可？因为它的**错误原因只写在日志里**：
# 函数只告诉你“没成”，为什么没成，写进日志。
#
# 日志是你自己写的一个类：继承 `trt.ILogger`，实现 `log(severity, message)`。`severity` 是严重程度，
# 从重到轻是 `INTERNAL_ERROR`、`ERROR`、`WARNING`、`INFO`、`VERBOSE`。
#
# 最小的一个是这样：来什么记什么。注意第一行，基类的 `__init__` 要**用类名直接调用**；忘了会怎样，也试一试。

# %% tags=["demo", "gpu"]
class Notes(trt.ILogger):
    """A logger that writes nothing and keeps everything: (severity name, text) in `lines`."""

    def __init__(self):
        trt.ILogger.__init__(self)
        self.lines = []

    def log(self, severity, message):
        self.lines.append((severity.name, message))


class Forgetful(trt.ILogger):
    def __init__(self):
        self.lines = []


notes = Notes()
noted_builder = trt.Builder(notes)
for severity, message in notes.lines[:6]:
    print(f"{severity:8} {message[:400]}")

try:
    trt.Builder(Forgetful())
except TypeError as error:
    print("忘了基类的 __init__：", type(error).__name__, str(error)[:160])

# %% [markdown]
# 看到一条消息，说这个日志和已经在用的那个不同（differs from one already provided）吗？它是警告还是 `INFO`，各个版本不一样。
# 进程里第一个交给 TensorRT 的日志有个特殊身份：
# 凡是不属于某个对象的消息都归它。所以**一个进程用一个日志**就好，本课程用的是 `lab.trt_logger()`：
#
# - 错误打印成一行“TensorRT 报告错误：…”，警告和更轻的消息不打印；
# - 同时留着，`lab.trt_errors()` 取走最近的几条，好写进异常里。
#
# 有了它，就可以写本章最重要的一个函数了。TensorRT 的“没成”多半是两种样子：该给对象的给了 `None`，该给真假的给了 `False`
# （还有两个调用另有样子，练习一的表里会列出来）。

# %%
class EngineError(RuntimeError):
    """A step of TensorRT failed; the class says which step, the message says why."""


class BuildError(EngineError):
    """The network could not be described or built."""


class LoadError(EngineError):
    """The plan gave no engine, or the engine no context."""


class BindError(EngineError):
    """A shape or an address was refused."""


class EnqueueError(EngineError):
    """The inference was not put on the stream."""


def require(result, error, what):
    """Return result; where it is None or False, raise error with `what` and the last error that TensorRT has logged.

    error: one of the classes above. what: Chinese, which step it was.
    """
    if result is None or result is False:
        raise error(f"{what}：{(lab.trt_errors() or ['日志里没有错误'])[-1]}")
    return result


# %% [markdown]
# `require` 里写的是 `is None`、`is False`，不是 `not result`。这不是咬文嚼字，练习一会看到为什么。
#
# ## 第二步：描述网络
#
# 我们的第一个网络是一个两层的感知机（multilayer perceptron，MLP）：
#
# $$y = \mathrm{ReLU}(x W_1 + b_1)\, W_2 + b_2$$
#
# `builder.create_network(flags)` 给出一个空的网络。标志 `STRONGLY_TYPED` 表示**强类型（strongly typed）**：
# 每个张量是什么类型，由输入和层的定义推出来，构建器不许为了快而偷偷改。TensorRT 11 里永远是强类型，10 里要自己写上。
#
# 每加一层，`add_…` 返回这一层，`get_output(0)` 是它的输出张量（tensor）。权重也是一层，叫常量层。
#
# 读代码时留意三处：
#
# - 偏置写成 `(1, 128)`：逐元素的层要求两个输入的**维数相同**，其中一边是 1 的维才会广播；
# - 输入和输出有名字，`"x"` 和 `"y"`。以后的一切都靠名字；
# - `mark_output` 指明哪个张量是输出。没有人用到的层，构建时会被扔掉。

# %% tags=["demo", "gpu"]
rng = np.random.default_rng(9)
BATCH, WIDTHS = 8, (64, 128, 16)
w1, w2 = ((rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32) for shape in (WIDTHS[:2], WIDTHS[1:]))
b1, b2 = (rng.standard_normal((1, width)).astype(np.float32) for width in WIDTHS[1:])
NO_TRANSPOSE = trt.MatrixOperation.NONE


def describe_mlp(batch):
    """Return a strongly typed network of the two-layer MLP above, with input "x" (batch, 64) and output "y" (batch, 16)."""
    network = builder.create_network(STRONGLY_TYPED)
    value = network.add_input("x", trt.DataType.FLOAT, (batch, WIDTHS[0]))
    for weights, bias in ((w1, b1), (w2, b2)):
        weights_layer = network.add_constant(weights.shape, trt.Weights(weights))
        product = network.add_matrix_multiply(value, NO_TRANSPOSE, weights_layer.get_output(0), NO_TRANSPOSE)
        bias_layer = network.add_constant(bias.shape, trt.Weights(bias))
        biased = network.add_elementwise(product.get_output(0), bias_layer.get_output(0), trt.ElementWiseOperation.SUM)
        value = biased.get_output(0)
        if bias is b1:
            value = network.add_activation(value, trt.ActivationType.RELU).get_output(0)
    value.name = "y"
    network.mark_output(value)
    return network


first_network = describe_mlp(BATCH)
rows = []
for index in range(first_network.num_layers):
    layer = first_network.get_layer(index)
    out = layer.get_output(0)
    rows.append((index, layer.type.name, tuple(out.shape), out.dtype.name, out.name))
lab.say(lab.table(("序号", "层的种类", "输出形状", "类型", "输出的名字"), rows), measured=False)

# %% [markdown]
# 网络知道每个张量的形状和类型，但**一次乘法也没有做**。没有起名字的张量，名字是自动生成的一长串；
# 如果忘了给输出起名，以后就得用那一长串去找它。
#
# ### 误区：权重交给网络，原来的数组就可以挪作他用
#
# `trt.Weights(w1)` 抄走了数据，还是只记住了地址？设一个小实验：描述完网络以后，把权重就地清零，再构建。
# 如果抄走了，清零没有影响。先猜，答案在第五步揭晓。

# %% tags=["demo", "gpu"]
borrowed = np.ones((4, 4), np.float32)
careless_network = builder.create_network(STRONGLY_TYPED)
four = careless_network.add_input("x", trt.DataType.FLOAT, (1, 4))
lent = careless_network.add_constant((4, 4), trt.Weights(borrowed)).get_output(0)
summed = careless_network.add_matrix_multiply(four, NO_TRANSPOSE, lent, NO_TRANSPOSE).get_output(0)
summed.name = "y"
careless_network.mark_output(summed)

borrowed[...] = 0
careless_plan = builder.build_serialized_network(careless_network, builder.create_builder_config())
borrowed[...] = 5
print("构建成功：", careless_plan is not None)

# %% [markdown]
# ## 第三步：配置和构建
#
# `builder.create_builder_config()` 给出一份默认的配置，常用的选项有：
#
# - `builder_optimization_level`：0 到 5，越高越肯花时间找快的做法，默认 3；
# - `set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 字节数)`：一层最多用多少工作区（workspace），默认是整块显存；
# - `set_flag` / `clear_flag`：例如 `trt.BuilderFlag.TF32`，默认打开，见第五步；
# - `progress_monitor`：构建时向谁报告进度；
# - `set_timing_cache`：计时缓存（timing cache）。
#
# 构建为什么慢？因为同一层往往有很多种做法（叫策略，tactic），构建器把它们**在这块 GPU 上真的跑一遍**，挑最快的。
# 计时缓存记下跑过的时间，下次遇到同样的层就不用再跑。
#
# 进度和计时缓存，都先用最原始的办法做一遍。进度监视器要实现三个方法；`step_complete` 返回 `True` 表示继续，返回 `False` 就是取消构建。

# %% tags=["demo", "gpu"]
from time import perf_counter


class Phases(trt.IProgressMonitor):
    """Keeps the phases of a build, each with its depth and number of steps. `patience`: steps until it cancels."""

    def __init__(self, patience=10**9):
        trt.IProgressMonitor.__init__(self)
        self.patience, self.open, self.seen = patience, [], []

    def phase_start(self, phase_name, parent_phase, num_steps):
        self.seen.append((len(self.open), phase_name, num_steps))
        self.open.append(phase_name)

    def step_complete(self, phase_name, step):
        self.patience -= 1
        return self.patience > 0

    def phase_finish(self, phase_name):
        if phase_name in self.open:
            self.open.remove(phase_name)


def timed_build(network, known=b"", patience=10**9):
    """Build network, starting from the timing cache `known` (bytes). Returns (plan or None, seconds, cache bytes, phases)."""
    config = builder.create_builder_config()
    config.progress_monitor = phases = Phases(patience)
    config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False)
    start = perf_counter()
    plan = builder.build_serialized_network(network, config)
    return plan, perf_counter() - start, bytes(config.get_timing_cache().serialize()), phases.seen


first_plan, cold_s, cache_bytes, phases = timed_build(first_network)
for depth, name, steps in phases[:12]:
    print("  " * depth + f"{name}（{steps} 步）")

_, warm_s, _, _ = timed_build(describe_mlp(BATCH), known=cache_bytes)
cancelled, _, _, _ = timed_build(describe_mlp(BATCH), patience=1)
lab.say(
    f"计划有 **{first_plan.nbytes / 1024:.0f} KiB**，其中权重本来就有 {(w1.nbytes + w2.nbytes + b1.nbytes + b2.nbytes) / 1024:.0f} KiB。"
    f"第一次构建 {cold_s:.2f} 秒，带着 {len(cache_bytes)} 字节的计时缓存再构建 {warm_s:.2f} 秒（各掐一次，只看数量级）。"
    f"第一步就说“取消”的那次，返回的是 **{cancelled}**。"
)

# %% [markdown]
# 构建的结果是 `IHostMemory`：一块主机内存，大小是 `.nbytes`（它没有 `len()`），`bytes(plan)` 就能存盘。
# 计划比权重大，因为里面还有编译好的内核，和运行它们要知道的一切。
#
# 被取消的构建没有抛异常，返回 `None`。构建失败也是同样的样子。
#
# 以后不再手写这些，用课程准备好的：`lab.build_progress()` 在一行里显示进度，`lab.timing_cache(config)` 把计时缓存留在你的缓存目录里，
# 下次打开笔记本还能用。包成一个函数，练习里也用它：

# %% tags=["gpu"]
def built(network: "trt.INetworkDefinition") -> bytes:
    """Build network with the course's log, progress line and timing cache. Returns the plan; BuildError where there is none."""
    config = builder.create_builder_config()
    config.progress_monitor = lab.build_progress()
    with lab.timing_cache(config):
        plan = builder.build_serialized_network(network, config)
    return bytes(require(plan, BuildError, "构建失败"))


# %% [markdown]
# ## 第四步：加载，然后问引擎
#
# 运行时把计划变成引擎。引擎知道自己的每个输入输出：名字、方向、类型、形状。**分配缓冲之前，一律问引擎**，不要凭记忆写。

# %% tags=["demo", "gpu"]
first_engine = require(runtime.deserialize_cuda_engine(first_plan), LoadError, "加载失败")


def io_table(engine: "trt.ICudaEngine"):
    """Markdown table of the engine's inputs and outputs."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    return lab.table(
        ("名字", "方向", "类型", "形状"),
        [(name, engine.get_tensor_mode(name).name, engine.get_tensor_dtype(name).name, tuple(engine.get_tensor_shape(name))) for name in names],
    )


lab.say(
    io_table(first_engine)
    + f"\n\n网络有 {first_network.num_layers} 层，引擎有 **{first_engine.num_layers}** 层。",
)

# %% [markdown]
# 层数为什么少了？编译器把几层合成了一层，这叫融合（fusion）。后面会去数，合到最后还剩几个内核。
#
# 现在构建用的那一半可以扔了：引擎已经在手里，网络、配置、构建器、计划和权重数组都不再需要。
# 服务用的那一半有先后：引擎在用，运行时要在；上下文在用，引擎要在（Python 的绑定会替你留住上一级）；
# **缓冲在 GPU 做完之前，要你自己留住**，因为上下文只记得地址。
#
# ## 第五步：绑定，执行
#
# 上下文由引擎造出来，同时分配好中间结果要用的显存。然后：
#
# 1. `set_tensor_address(名字, 地址)`：告诉它每个输入输出在显存的哪里，返回 `True` 或 `False`；
# 2. `execute_async_v3(流的句柄)`：把一次推理放进这条流，这叫入队（enqueue）。返回 `True` 只表示**放进去了**，不表示做完了；
# 3. 要读结果，先同步这条流。

# %% tags=["demo", "gpu"]
first_context = require(first_engine.create_execution_context(), LoadError, "没有得到执行上下文")
question = rng.standard_normal((BATCH, WIDTHS[0])).astype(np.float32)
with stream:
    xs = cp.asarray(question)
    ys = cp.full((BATCH, WIDTHS[-1]), np.nan, cp.float32)
stream.synchronize()

require(first_context.set_tensor_address("x", xs.data.ptr), BindError, "绑定 x 失败")
require(first_context.set_tensor_address("y", ys.data.ptr), BindError, "绑定 y 失败")
require(first_context.execute_async_v3(stream.ptr), EnqueueError, "入队失败")
stream.synchronize()


def mlp_exactly(x):
    """The two-layer MLP in float64, as the yardstick."""
    hidden = np.maximum(x.astype(np.float64) @ w1.astype(np.float64) + b1, 0)
    return hidden @ w2.astype(np.float64) + b2


error = np.abs(ys.get() - mlp_exactly(question)).max()
float32_error = np.abs((np.maximum(question @ w1 + b1, 0) @ w2 + b2) - mlp_exactly(question)).max()
lab.say(f"和 float64 的结果相比，最大误差 **{error:.1e}**；NumPy 用 float32 算，误差 {float32_error:.1e}。结果的大小在 {np.abs(ys.get()).max():.1f} 以内。")

# %% [markdown]
# 两个误差差不多，还是引擎的大了上千倍？差不多，就是没有用 TF32；大了上千倍，就是用上了。
#
# `trt.BuilderFlag.TF32` 默认打开：构建器可以用 TF32 做 float32 的矩阵乘，
# 乘数只留约 10 位尾数（float32 有 23 位），每个乘积的相对误差就有千分之一的量级。它不算违反强类型：存的仍是 float32。
#
# 是否真的用上，取决于哪种策略快：换一块 GPU、换一个版本、换一个尺寸，都可能不同。所以比较时**容差要按 TF32 给**，或者 `config.clear_flag(trt.BuilderFlag.TF32)`。
# 《强类型精度与显式量化》会讲透。
#
# 揭晓第二步的谜底：描述完就清零、构建完又改成 5 的那份权重，引擎里是什么？

# %% tags=["demo", "gpu"]
import gc

careless_context = runtime.deserialize_cuda_engine(careless_plan).create_execution_context()
del careless_network, careless_plan, borrowed
gc.collect()  # only the context is left, with what it keeps itself
with stream:
    four_ones, four_sums = cp.ones((1, 4), cp.float32), cp.full((1, 4), np.nan, cp.float32)
stream.synchronize()
careless_context.set_tensor_address("x", four_ones.data.ptr)
careless_context.set_tensor_address("y", four_sums.data.ptr)
careless_context.execute_async_v3(stream.ptr)
stream.synchronize()
got = float(four_sums.get()[0, 0])
print(f"四个 1 与权重相乘：{got}。", {0.0: "引擎里是 0：构建时才去读", 4.0: "引擎里是 1：描述时就抄走了"}.get(got, "引擎里是别的值"))

# %% [markdown]
# 描述网络时，`trt.Weights` **只记住地址**；构建时才读，读完就抄进计划，之后再改与引擎无关。
#
# 顺便看到：网络、计划、权重数组都删掉以后，上下文照样能推理；引擎没有起名字，是上下文替我们留住的。
#
# 所以从描述到构建结束，权重数组要活着，内容也不能变。这两件事，归两个人管：
#
# - **活着**，Python 的绑定替你管：网络会留住 `trt.Weights` 和它背后的 NumPy 数组，连 `trt.Weights(w.astype(np.float32))`
#   里的临时数组也不例外。C++ 里没有人替你管；在 Python 里写 `trt.Weights(类型, 地址, 个数)`，只给一个地址，也没有人管：
#   数组一被回收，构建时读到的就是别人的数据，运气不好进程直接崩溃；
# - **不变**，永远归你管。最容易出事的写法是反复用同一块缓冲：读一层的权重，描述一层，再读下一层。构建出来，每一层的权重都是最后读进来的那一份。
#
# **一层一个数组，构建结束以前不去碰它。** 本课程的代码把这些数组放进一个列表，谁留着，一眼看得出来。
#
# 还有一条：`trt.Weights` 只接受内存连续的数组，转置得到的视图要先 `np.ascontiguousarray`。
#
# ### 误区：推理之前先同步一下，更保险
#
# 前处理刚启动，还没做完，能不能马上入队？设一个慢吞吞的前处理：空转 2 毫秒才把输入写好。一次写在**同一条流**里，一次写在**另一条流**里，
# 都不同步，紧接着就入队。

# %% tags=["gpu"]
SOURCE = r"""
extern "C" __global__ void late_fill(float *x, float value, int size, unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
    for (int t = threadIdx.x; t < size; t += blockDim.x) x[t] = value;
}

extern "C" __global__ void matmul(const float *x, const float *w, float *y, int rows, int inner, int cols) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= rows * cols) return;
    float sum = 0.0f;
    for (int k = 0; k < inner; ++k) sum += x[t / cols * inner + k] * w[k * cols + t % cols];
    y[t] = sum;
}

extern "C" __global__ void add_row(const float *x, const float *b, float *y, int size, int cols) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) y[t] = x[t] + b[t % cols];
}

extern "C" __global__ void floor_div(const float *x, float divisor, float *y, int size) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) y[t] = floorf(x[t] / divisor);
}

extern "C" __global__ void times(const float *x, float factor, float *y, int size) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) y[t] = x[t] * factor;
}

extern "C" __global__ void minus(const float *a, const float *b, float *y, int size) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) y[t] = a[t] - b[t];
}

extern "C" __global__ void minus_number(const float *x, float number, float *y, int size) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) y[t] = x[t] - number;
}
"""
module = cp.RawModule(code=SOURCE)
late_fill, matmul, add_row, floor_div, times, minus, minus_number = (
    module.get_function(name) for name in ("late_fill", "matmul", "add_row", "floor_div", "times", "minus", "minus_number")
)

# %% tags=["demo", "gpu"]
side = cp.cuda.Stream(non_blocking=True)
wanted = mlp_exactly(np.ones((BATCH, WIDTHS[0]), np.float32))


def infer_after(filling):
    """Fill xs with ones, late, on the stream `filling`; enqueue on `stream` at once. Returns whether the result is right."""
    with stream:
        xs.fill(0)
        ys.fill(np.nan)
    stream.synchronize()
    with filling:
        late_fill((1,), (32,), (xs, np.float32(1), np.int32(xs.size), np.uint64(2_000_000)))
    require(first_context.execute_async_v3(stream.ptr), EnqueueError, "入队失败")
    stream.synchronize()
    filling.synchronize()
    return bool(np.abs(ys.get() - wanted).max() < 0.05)


infer_after(stream)  # the first launch of a kernel loads its code
print("前处理在同一条流，不同步：结果", "正确" if infer_after(stream) else "错误")
print("前处理在另一条流，不同步：结果", "正确" if infer_after(side) else "错误")

# %% [markdown]
# 同一条流里的工作按先后做，入队也是流里的工作，所以**一次同步也不需要**；多余的同步只会让 CPU 白等。
# 需要同步的只有两处：CPU 要读结果之前，和要改写、释放缓冲之前。
#
# 前处理在别的流里，才需要让 `stream` 等一个事件（`stream.wait_event`）；不等，推理就可能读到旧数据，而且不会报错。
#
# ### 为什么不用默认流
#
# `execute_async_v3(0)` 也能跑：0 是默认流的句柄。换一个肯记警告的日志（前面的 `Notes`），看 TensorRT 怎么说。

# %% tags=["demo", "gpu"]
noted_runtime = trt.Runtime(notes)
noted_engine = noted_runtime.deserialize_cuda_engine(first_plan)
noted_context = noted_engine.create_execution_context()
for name, buffer in (("x", xs), ("y", ys)):
    noted_context.set_tensor_address(name, buffer.data.ptr)

for label, handle in (("自己的流", stream.ptr), ("默认流", 0)):
    notes.lines.clear()
    went_in = noted_context.execute_async_v3(handle)
    cp.cuda.Device().synchronize()
    warnings = [message for severity, message in notes.lines if severity == "WARNING"]
    print(f"{label}：返回 {went_in}；警告 {len(warnings)} 条", *(message[:400] for message in warnings), sep="\n  ")

# %% [markdown]
# 用默认流会多出一些同步，TensorRT 会为此发一条警告（只写进日志，`lab.trt_logger()` 不打印警告，所以你平时看不见）。
# 更要紧的是，默认流不能被捕获成 CUDA 图。**自己建一条 `non_blocking=True` 的流，从头用到尾。**

# %% [markdown]
# ## 每一步失败是什么样子
#
# 现在故意犯错。每一行都是公开的问题报告里反复出现的一种，看它返回什么、日志里写了什么，有没有抛异常。
# 先备好一个输入的批大小可变的网络：形状里写 −1 的维叫动态维度（dynamic dimension），构建时要用优化 Profile
# （optimization profile）说明它的范围，《动态形状》一章细讲，这里只借来犯错。

# %% tags=["demo", "gpu"]
def dynamic_plan(name="x", added=True):
    """Build the MLP for a batch that may change, from 1 to 16, by a profile for the input `name`, if it is added at all."""
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    profile.set_shape(name, (1, WIDTHS[0]), (8, WIDTHS[0]), (16, WIDTHS[0]))
    if added:
        config.add_optimization_profile(profile)
    with lab.timing_cache(config):
        return builder.build_serialized_network(describe_mlp(-1), config)


def mixed_types():
    """A half-precision input times single-precision weights: strong typing does not allow it."""
    network = builder.create_network(STRONGLY_TYPED)
    half = network.add_input("x", trt.DataType.HALF, (BATCH, WIDTHS[0]))
    single = network.add_constant(w1.shape, trt.Weights(w1)).get_output(0)
    product = network.add_matrix_multiply(half, NO_TRANSPOSE, single, NO_TRANSPOSE)
    if product is None:
        return None
    network.mark_output(product.get_output(0))
    return builder.build_serialized_network(network, builder.create_builder_config())


def no_output():
    network = builder.create_network(STRONGLY_TYPED)
    network.add_input("x", trt.DataType.FLOAT, (1, 4))
    return builder.build_serialized_network(network, builder.create_builder_config())


elastic_plan = dynamic_plan()
elastic_engine = require(runtime.deserialize_cuda_engine(elastic_plan), LoadError, "加载失败")
elastic = require(elastic_engine.create_execution_context(), LoadError, "没有得到执行上下文")
unbound = first_engine.create_execution_context()
half_a_plan = bytes(first_plan)[: first_plan.nbytes // 2]

FAULTS = {
    "没有 mark_output": no_output,
    "半精度乘单精度": mixed_types,
    "Profile 造好了，忘了 add": partial(dynamic_plan, added=False),
    "Profile 写错了输入的名字": partial(dynamic_plan, name="input"),
    "计划只剩一半": lambda: runtime.deserialize_cuda_engine(half_a_plan),
    "名字打错": lambda: unbound.set_tensor_address("X", xs.data.ptr),
    "没有绑定就入队": lambda: unbound.execute_async_v3(stream.ptr),
    "批大小 99，Profile 到 16": lambda: elastic.set_input_shape("x", (99, WIDTHS[0])),
}
lab.trt_errors()
rows = []
for fault, call in FAULTS.items():
    try:
        returned = f"返回 `{call()}`"
    except Exception as error:  # noqa: BLE001 - shown in the table
        returned = f"抛出 {type(error).__name__}"
    logged = lab.trt_errors()
    rows.append((fault, returned, len(logged)))
lab.say(lab.table(("犯的错", "结果", "日志里的错误"), rows), measured=False)

# %% [markdown]
# 上面的“TensorRT 报告错误”大多说得很具体：少了什么、哪个张量、合法的范围是多少。可是程序得到的，只有表里“结果”那一列，多半是 `None` 和 `False`。
# 也看看“半精度乘单精度”那一行：错误如果不止一条，第一条在描述时就写进了日志，程序却到构建时才拿到 `None`。
#
# 不检查 `None`，下一行才出错，而且说的是另一回事：

# %% tags=["demo", "gpu"]
try:
    runtime.deserialize_cuda_engine(half_a_plan).create_execution_context()
except AttributeError as error:
    print("不检查：", error)
try:
    require(runtime.deserialize_cuda_engine(half_a_plan), LoadError, "加载失败")
except EngineError as error:
    print("检查：  ", type(error).__name__, str(error)[:150])

# %% [markdown]
# ### 误区：没有异常就是成功
#
# `None` 好歹会让下一行崩溃。`False` 连这也没有。把一个合法的批大小设好，再设一个非法的、不看返回值，接着入队：

# %% tags=["demo", "gpu"]
with stream:
    many = cp.asarray(rng.standard_normal((99, WIDTHS[0])).astype(np.float32))
    answers = cp.full((99, WIDTHS[-1]), np.nan, cp.float32)
stream.synchronize()
set_4 = elastic.set_input_shape("x", (4, WIDTHS[0]))
set_99 = elastic.set_input_shape("x", (99, WIDTHS[0]))
for name, buffer in (("x", many), ("y", answers)):
    elastic.set_tensor_address(name, buffer.data.ptr)
went_in = elastic.execute_async_v3(stream.ptr)
stream.synchronize()
written = int(np.isfinite(answers.get()).all(axis=1).sum())
print(f"设 4：{set_4}；设 99：{set_99}；入队：{went_in}；要 99 行，写出了 {written} 行，此刻的形状是 {tuple(elastic.get_tensor_shape('x'))}")

# %% [markdown]
# 看最后一行：入队成功了吗？写出了几行？如果是 `True` 和 4，那就是最坏的一种：**设置失败，程序带着旧形状跑完了**，
# 剩下的 95 行是缓冲里原来的东西，没有一处异常。四个会返回 `False` 的调用都要查：
# `set_input_shape`、`set_tensor_address`、`set_optimization_profile_async`、`execute_async_v3`。
#
# ### 误区：输出多大，问引擎就行
#
# 形状固定的引擎，问引擎没错。有动态维度时，引擎自己也不知道，要等输入的形状设好以后，问**上下文**：

# %% tags=["demo", "gpu"]
rows = []
for batch in (1, 5, 16):
    require(elastic.set_input_shape("x", (batch, WIDTHS[0])), BindError, "设形状失败")
    rows.append((batch, tuple(elastic_engine.get_tensor_shape("y")), tuple(elastic.get_tensor_shape("y"))))
lab.say(lab.table(("批大小", "引擎说 y 是", "上下文说 y 是"), rows), measured=False)

# %% [markdown]
# 按引擎的形状分配，得到的是 −1；按最大尺寸分配又不切片，结果后面就拖着一截旧数据。
#
# ### 类型错了呢
#
# TensorRT 收到的是一个地址，一个整数。地址后面是什么类型，它没有办法知道。给它一块 float64 的缓冲试试：

# %% tags=["demo", "gpu"]
with stream:
    xs.set(question)
    doubles = cp.asarray(question.astype(np.float64))
stream.synchronize()


def worst_error(buffer):
    """Largest error of the MLP when "x" is bound to buffer, which should hold the question."""
    bound = require(first_context.set_tensor_address("x", buffer.data.ptr), BindError, "绑定 x 失败")
    went_in = require(first_context.execute_async_v3(stream.ptr), EnqueueError, "入队失败")
    stream.synchronize()
    return bound, went_in, float(np.abs(ys.get() - mlp_exactly(question)).max())


rows = [(buffer.dtype, bound, went_in, f"{wrong:.2g}") for buffer in (xs, doubles) for bound, went_in, wrong in (worst_error(buffer),)]
require(first_context.set_tensor_address("x", xs.data.ptr), BindError, "绑定 x 失败")
lab.say(lab.table(("x 绑定到", "绑定", "入队", "最大误差"), rows))

# %% [markdown]
# 绑定成功，入队成功，结果是乱码。INT32 和 INT64 混用是最常见的一种：TensorRT 8 导入模型时把 INT64 变成 INT32，
# 只在日志里留一条警告；10 起原样保留。老代码照旧喂 INT32，引擎每次读八个字节，后一半就读到界外去了。
#
# 引擎不查，就得你来查。`trt.nptype(engine.get_tensor_dtype(name))` 给出对应的 NumPy 类型，拿它和缓冲的 `dtype` 比。
#
# 如果给的是一个 **NumPy 数组**的地址呢？那是 CPU 的内存。GPU 去读它，多半是非法访问，而非法访问会毁掉整个进程的 CUDA 环境。
# 所以放进一个子进程里试：

# %% tags=["demo", "gpu"]
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import sys
import cupy
import numpy
import tensorrt as trt
from launchlab import lab

engine = trt.Runtime(lab.trt_logger()).deserialize_cuda_engine(open(sys.argv[1], "rb").read())
context = engine.create_execution_context()
stream = cupy.cuda.Stream(non_blocking=True)
x = numpy.ones(tuple(engine.get_tensor_shape("x")), numpy.float32)
y = cupy.zeros(tuple(engine.get_tensor_shape("y")), cupy.float32)
cupy.cuda.Device().synchronize()
print("set_tensor_address:", context.set_tensor_address("x", x.ctypes.data), context.set_tensor_address("y", y.data.ptr))
print("execute_async_v3:", context.execute_async_v3(stream.ptr), flush=True)
for attempt in (1, 2):
    try:
        stream.synchronize()
        print("synchronize: OK")
    except Exception as error:
        print("synchronize:", str(error)[:100], flush=True)
"""
with tempfile.TemporaryDirectory() as folder:
    saved = Path(folder, "first.plan")
    saved.write_bytes(bytes(first_plan))
    child = subprocess.run([sys.executable, "-c", CHILD, str(saved)], capture_output=True, text=True, timeout=60, check=False)
told = child.stdout.strip().splitlines()
steps = [line for line in told if not line.startswith("TensorRT 报告错误")]
print(*steps, sep="\n")
print(f"子进程里，TensorRT 的日志还写了 {len(told) - len(steps)} 条错误。退出码：{child.returncode}。这个进程不受影响，再推理一次，结果{'正确' if worst_error(xs)[-1] < 0.05 else '错误'}。")

# %% [markdown]
# 绑定和入队照样说“好”，要到同步时才出事（在少数能让 GPU 直接读主机内存的系统上，甚至不出事，只是慢）。
# 出事以后，这个进程里的每一个 CUDA 调用都会失败，连清理引擎和上下文也不例外，只能重启
# （退出码如果是 0，那只是因为子进程把异常接住了）。所以**必须在入队之前就拒绝**，练习三就写一个这样的运行器。

# %% [markdown]
# ## 一个引擎有几个内核
#
# ### 误区：每一层对应一个或多个内核
#
# 讲义说：“一个典型的推理模型包含数十个层，每层对应一个或多个 kernel。”用框架逐层执行时，这句话不错。构建成引擎以后呢？
#
# 数内核有个干净的办法：把一次入队捕获成 CUDA 图，数里面的节点。上下文的第一次入队会做一些初始化，
# 捕获里可能不允许，所以**先正常入队一次，再捕获**。为什么不直接用这张图来推理？那是《捕获 TensorRT 推理》一章的事，这里只数节点。
#
# 下面的网络是一座“塔”：矩阵乘、加偏置、`tanh`，重复 `depth` 次。

# %% tags=["demo", "gpu"]
WIDTH, ROWS = 128, 16


def tower_weights(depth):
    return [(rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32) for _ in range(depth)]


def describe_tower(weights):
    """A network of tanh(x @ w + 1) for each w in weights."""
    network = builder.create_network(STRONGLY_TYPED)
    value = network.add_input("x", trt.DataType.FLOAT, (ROWS, WIDTH))
    one = network.add_constant((1, 1), trt.Weights(ONE)).get_output(0)
    for each in weights:
        layer = network.add_constant(each.shape, trt.Weights(each))
        product = network.add_matrix_multiply(value, NO_TRANSPOSE, layer.get_output(0), NO_TRANSPOSE)
        shifted = network.add_elementwise(product.get_output(0), one, trt.ElementWiseOperation.SUM)
        value = network.add_activation(shifted.get_output(0), trt.ActivationType.TANH).get_output(0)
    value.name = "y"
    network.mark_output(value)
    return network


ONE = np.ones((1, 1), np.float32)


class Tower:
    """An engine of a tower and the same layers in CuPy, both ready to run on `stream`."""

    def __init__(self, depth):
        weights = tower_weights(depth)
        network = describe_tower(weights)
        self.network_layers = network.num_layers - depth - 1  # constants are no work
        self.engine = require(runtime.deserialize_cuda_engine(built(network)), LoadError, "加载失败")
        self.context = require(self.engine.create_execution_context(), LoadError, "没有得到执行上下文")
        with stream:
            self.x, self.y, self.z = (cp.zeros((ROWS, WIDTH), cp.float32) for _ in range(3))
            self.weights = [cp.asarray(each) for each in weights]
        stream.synchronize()
        for name, buffer in (("x", self.x), ("y", self.y)):
            require(self.context.set_tensor_address(name, buffer.data.ptr), BindError, f"绑定 {name} 失败")

    def enqueue(self):
        require(self.context.execute_async_v3(stream.ptr), EnqueueError, "入队失败")

    def layer_by_layer(self):
        with stream:
            value = self.x
            for each in self.weights:
                value = cp.matmul(value, each, out=self.z if value is not self.z else self.y)
                value += 1
                cp.tanh(value, out=value)

    def kernels(self):
        """Capture one enqueue and count the kernel nodes of the graph."""
        self.enqueue()
        stream.synchronize()
        stream.begin_capture()
        try:
            self.enqueue()
        finally:
            captured = stream.end_capture()
        _, count = lab.check_cuda(cudart.cudaGraphGetNodes(captured.graph, 0))
        nodes, _ = lab.check_cuda(cudart.cudaGraphGetNodes(captured.graph, count))
        types = [lab.check_cuda(cudart.cudaGraphNodeGetType(node)) for node in nodes[:count]]
        return types.count(cudart.cudaGraphNodeType.cudaGraphNodeTypeKernel)


DEPTHS = (1, 2, 4, 8, 16)
towers = {depth: Tower(depth) for depth in DEPTHS}
counted = [(tower.network_layers, tower.engine.num_layers, tower.kernels()) for tower in towers.values()]
lab.say(
    lab.table(
        ("depth", "网络的层（不算常量）", "引擎的层", "捕获到的内核"),
        [(depth, *row) for depth, row in zip(DEPTHS, counted, strict=True)],
    )
    + f"\n\ndepth = {DEPTHS[-1]}：{counted[-1][0]} 层变成了 {counted[-1][2]} 个内核，平均 **{counted[-1][0] / counted[-1][2]:.1f}** 层合成一个。"
)

# %% [markdown]
# 引擎的检查器（engine inspector）能说出每一层的名字，名字里常常就写着谁和谁合在了一起，例如 `AddTan` 是加偏置和 `tanh` 合成了一个：

# %% tags=["demo", "gpu"]
inspector = towers[2].engine.create_engine_inspector()
for index in range(min(6, towers[2].engine.num_layers)):
    print(inspector.get_layer_information(index, trt.LayerInformationFormat.ONELINE).strip()[:240])

# %% [markdown]
# 所以更准确的说法是：**网络的层是源代码，内核是编译的结果，两者没有一一对应。**
# 偏置和激活可能彼此合成一个，也可能一起合进矩阵乘，还可能几层合成一大块，看上面的名字；引擎的“层”也不等于内核，一层可能启动不止一个。要知道真正有几个，就去数。
#
# 下面左图里，“引擎的层”和“捕获到的内核”两条线要是重在一起，就是在这里每一层恰好是一个内核。
#
# 层少了，启动就少了，CPU 要做的也少了。把同样的塔用 CuPy 逐层启动（每层 `cp.matmul`、加一、`cp.tanh` 三个调用），和引擎轮流上场：

# %% tags=["demo", "gpu"]
submits = {depth: lab.compare_us(tower.layer_by_layer, tower.enqueue) for depth, tower in towers.items()}
totals = {depth: lab.compare_us(tower.layer_by_layer, tower.enqueue, clock="end_to_end") for depth, tower in towers.items()}

fig, axes = plt.subplots(1, 3, figsize=(13, 3.9))
for label, column in zip(("网络的层", "引擎的层", "捕获到的内核"), zip(*counted, strict=True), strict=True):
    axes[0].plot(DEPTHS, column, label=label)
axes[0].set_ylabel("个数")
axes[0].set_title("层和内核")
for ax, pairs, title in ((axes[1], submits, "CPU 提交"), (axes[2], totals, "端到端")):
    ax.plot(DEPTHS, [pairs[depth].first.median for depth in DEPTHS], label="CuPy 逐层")
    ax.plot(DEPTHS, [pairs[depth].second.median for depth in DEPTHS], label="引擎入队")
    ax.set_ylabel("时间（µs）")
    ax.set_title(f"{title}（{lab.gpu_name()}）")
for ax in axes:
    ax.set_xticks(DEPTHS)
    ax.set_xlabel("depth")
    ax.set_ylim(bottom=0)
    ax.legend()
plt.show()

shallow, deep = DEPTHS[0], DEPTHS[-1]
more_kernels = towers[deep].kernels() - towers[shallow].kernels()
more_us = submits[deep].second.median - submits[shallow].second.median
lab.say(
    f"depth = {deep}：逐层提交 {submits[deep].first.median:.0f} µs，入队 {submits[deep].second.median:.0f} µs，端到端快 **{totals[deep].ratio:.1f} 倍**。"
    f"从 depth = {shallow} 到 {deep}，引擎多了 {more_kernels} 个内核，入队的 CPU 时间多了 {more_us:.0f} µs"
    + (f"，平均每个内核 {more_us / more_kernels:.1f} µs。" if more_kernels > 0 else "。")
)

# %% [markdown]
# 一次 `execute_async_v3` 看起来是一个调用，里面仍然要**逐个启动**引擎的每个内核：入队的 CPU 时间随内核数上升。
# 在 CPU 上，引擎省的是“合成以后内核少了”和“启动在 C++ 里做”两份；把剩下的启动也省掉，要靠 CUDA 图。
#
# 逐层的那条线，右图比中间那张高出来的，是 CPU 交完以后 GPU 还在做的。所以端到端快多少，既看 Python 逐层调用有多贵，
# 也看 GPU 上的内核要跑多久；网络再大一些，GPU 忙起来，差距就会缩小。以你自己的图为准。
#
# 最后看看每一步各要多少时间，它决定了什么该在服务启动时做，什么可以每个请求做：

# %% tags=["demo", "gpu"]
tower = towers[8]
plan_of_8 = bytes(tower.engine.serialize())


def seconds(work, times):
    """Median seconds of work(), which waits for itself."""
    spent = []
    for _ in range(times):
        start = perf_counter()
        work()
        stream.synchronize()
        spent.append(perf_counter() - start)
    return float(np.median(spent))


fresh_weights = tower_weights(8)
costs = {
    "构建（没有计时缓存，掐一次）": timed_build(describe_tower(fresh_weights))[1],
    "加载": seconds(lambda: runtime.deserialize_cuda_engine(plan_of_8), 5),
    "建上下文": seconds(tower.engine.create_execution_context, 5),
    "绑定两个地址": seconds(lambda: [tower.context.set_tensor_address("x", tower.x.data.ptr), tower.context.set_tensor_address("y", tower.y.data.ptr)], 21),
    "推理一次": seconds(tower.enqueue, 21),
}
fig, ax = plt.subplots(figsize=(7, 2.8))
ax.barh(list(costs), [cost * 1e6 for cost in costs.values()])
ax.set_xscale("log")
ax.set_xlabel("时间（µs，对数坐标）")
ax.set_title(f"从构建到推理（{lab.gpu_name()}）")
ax.invert_yaxis()
plt.show()
lab.say("；".join(f"{name} {cost * 1e6:,.0f} µs" for name, cost in costs.items()) + "。")

# %% [markdown]
# 相差好几个数量级。**构建一次存成文件，加载一次、建上下文一次留着用，每个请求只做绑定和入队**；地址不变，连绑定也不必重做。

# %% [markdown]
# ## 练习
#
# 四道练习，共 12 分。解答里可以用这些给定的名字：
#
# - 模块与工具：`np`、`cp`、`trt`、`cudart`、`partial`、`lab`；
# - TensorRT：`builder`、`runtime`、`STRONGLY_TYPED`、`built`；流：`stream`；
# - 异常：`BuildError`、`LoadError`、`BindError`、`EnqueueError`，以及 `require`；
# - 各题题目里给出的名字。
#
# `describe_mlp`、`Tower`、`xs`、`first_context` 等名字来自演示单元（只做实验，评分时不运行），解答里不能用，但可以照着写：
# 评分会在干净的环境里运行给定的单元和你的解答，跳过演示单元。
#
# ### 练习一：是哪一步先失败的（3 分，不需要 GPU）
#
# 一个程序不检查返回值，只把经过记了下来，一次调用记一项：`(调用的名字, 返回值, 这次调用期间日志里的错误)`。
# 对象记成字符串，例如 `"<ICudaEngine>"`；其余的返回值原样记下。错误是一串文本，警告不算在内。
#
# 每种调用失败是什么样子，都在下面的表里，表里没有的调用不返回任何东西，看不出成败，当作成功：
#
# | 调用 | 阶段 | 成功时返回 | 失败时返回 |
# |:--|:--|:--|:--|
# | `add_input`、`add_constant`、`add_matrix_multiply`、`add_elementwise`、`add_activation` | 描述 | 对象 | `None` |
# | `add_optimization_profile` | 描述 | Profile 的编号，从 0 数起 | −1 |
# | `build_serialized_network` | 构建 | 对象 | `None` |
# | `deserialize_cuda_engine`、`create_execution_context` | 加载 | 对象 | `None` |
# | `set_input_shape`、`set_tensor_address` | 绑定 | `True` | `False` |
# | `infer_shapes` | 绑定 | 空列表 | 还没有设好的输入的名字，一个列表 |
# | `execute_async_v3` | 执行 | `True` | `False` |
#
# 写 `first_failure(events)`，返回 `(序号, 阶段, 原因)`：
#
# - 序号：第一次失败的调用在 `events` 里的位置，从 0 数起；后面的失败只是回声，不管；
# - 阶段：表里的第二列，给定的字典 `STAGES` 里有；
# - 原因：到这一步为止（包括这一步），日志里**最后一条**错误；一条也没有就是空字符串。有的错误在描述时就写进了日志，到构建时才失败，所以要往前看。
#
# 全部成功就返回 `None`。

# %%
STAGES = {
    "add_input": "描述",
    "add_constant": "描述",
    "add_matrix_multiply": "描述",
    "add_elementwise": "描述",
    "add_activation": "描述",
    "add_optimization_profile": "描述",
    "build_serialized_network": "构建",
    "deserialize_cuda_engine": "加载",
    "create_execution_context": "加载",
    "set_input_shape": "绑定",
    "set_tensor_address": "绑定",
    "infer_shapes": "绑定",
    "execute_async_v3": "执行",
}

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 表里一共有几种“失败的样子”？把同一个返回值放到不同的调用上，意思一样吗：`None` 呢？`0` 呢？空列表呢？
# 哪些值在 Python 里是“假”，却表示成功？哪些是“真”，却表示失败？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `for index, (call, returned, errors) in enumerate(events):` 逐项看。
# Python 里 `0 == False` 为真，`0 in (None, False)` 也为真；要分清 `0` 和 `False`，用 `is`。
# 错误可以一路 `extend` 进一个列表，最后一条是 `[-1]`。
#
# </details>

# %% solution="first_failure"
def first_failure(events):
    """Find the call of a recorded program that failed first.

    events: list of (call, returned, errors): name of the call, what it returned (objects as strings), and the texts
    of the errors logged meanwhile. Returns (index, stage, reason), or None where no call failed.
    """
    ### BEGIN SOLUTION: 先想清楚每种调用失败时返回什么，同一个值在不同的调用上意思不同；再从头往后找第一个，边走边记下日志里的错误
    logged = []
    for index, (call, returned, errors) in enumerate(events):
        logged.extend(errors)
        if call == "add_optimization_profile":
            failed = returned == -1
        elif call == "infer_shapes":
            failed = len(returned) > 0
        else:
            failed = call in STAGES and (returned is None or returned is False)
        if failed:
            return index, STAGES[call], logged[-1] if logged else ""
    return None
    ### END SOLUTION


# %% test="first_failure" kind="answer" points=3
GOOD = [
    ("add_input", "<ITensor>", []),
    ("add_activation", "<IActivationLayer>", []),
    ("mark_output", None, []),
    ("build_serialized_network", "<IHostMemory>", []),
    ("deserialize_cuda_engine", "<ICudaEngine>", []),
    ("create_execution_context", "<IExecutionContext>", []),
    ("set_tensor_address", True, []),
    ("execute_async_v3", True, []),
]
check.equal(student.first_failure(GOOD), None, why="每一步都成功了，应当返回 None。mark_output 本来就不返回东西，不在表里。")
check.equal(
    student.first_failure([*GOOD[:3], ("build_serialized_network", None, ["x 没有 Profile"]), ("deserialize_cuda_engine", None, ["计划是空的"])]),
    (3, "构建", "x 没有 Profile"),
    why="第 3 步的构建返回了 None，这才是第一个失败；后面加载的失败是它的回声。",
)
check.equal(
    student.first_failure([("add_input", "<ITensor>", []), ("add_optimization_profile", 0, []), ("build_serialized_network", "<IHostMemory>", [])]),
    None,
    why="add_optimization_profile 返回的是编号，第一个 Profile 的编号就是 0，不是失败。",
)
### BEGIN HIDDEN TESTS
GIVEN = reference.value("STAGES")
OBJECTS = {call for call in GIVEN if call.startswith("add_") or call in ("build_serialized_network", "deserialize_cuda_engine", "create_execution_context")} - {"add_optimization_profile"}
SILENT = ("mark_output", "set_shape", "set_flag", "synchronize")


def outcome(call, good):
    """What such a call returns, and whether that is what the test asks for."""
    if call in SILENT:
        return None
    if call == "add_optimization_profile":
        return int(secret.integers(0, 3)) if good else -1
    if call == "infer_shapes":
        return [] if good else ["x", "mask"][: int(secret.integers(1, 3))]
    if call in OBJECTS:
        return "<object>" if good else None
    return good


def program(size, failing, chatty):
    """A recorded program of `size` calls and the answer; failing: the call that is to fail first, or None."""
    calls = [str(call) for call in secret.choice([*GIVEN, *SILENT], size)]
    at = int(secret.integers(size // 3, size))
    if failing:
        calls[at] = failing
    made, told, want = [], "", None
    for index, call in enumerate(calls):
        bad = failing is not None and (index == at or (index > at and secret.random() < 0.5))
        errors = [f"错误 {secret.integers(10**9)}" for _ in range(int(secret.integers(0, 3)))] if secret.random() < chatty else []
        made.append((call, outcome(call, not bad), errors))
        told = errors[-1] if errors else told
        if bad and want is None and call in GIVEN:
            want = (index, GIVEN[call], told)
    return made, want


check.equal(student.first_failure([]), None, why="一次调用也没有，就没有失败，应当返回 None。")
check.equal(student.first_failure([("add_input", None, ["名字重复"]), *GOOD[1:]]), (0, "描述", "名字重复"), why="第一次调用就失败，序号是 0。0 在 Python 里是“假”，却是一个序号。")
for chatty, failing, why in (
    (0.4, [None] * 12, "一路成功的程序被说成失败了。0、空列表、None 在哪些调用上是成功？日志里有错误，不等于这一步失败。"),
    (0.4, ["add_optimization_profile"] * 6 + ["infer_shapes"] * 6, "add_optimization_profile 或 infer_shapes 的失败没有认出来，它们失败时返回的值在 Python 里是“真”。"),
    (0.4, sorted(OBJECTS), "返回对象的调用，失败时是 None；有的没有认出来，或者阶段、原因不对。"),
    (0.4, ["set_input_shape", "set_tensor_address", "execute_async_v3"] * 4, "返回真假的调用，失败时是 False；有的没有认出来，或者阶段、原因不对。"),
    (0.0, sorted(GIVEN), "日志里一条错误也没有的时候，原因应当是空字符串。"),
    (1.0, sorted(GIVEN), "原因应当是到失败那一步为止最后一条错误：不是第一条，也不是后面回声里的。"),
):
    programs = [program(int(secret.integers(9, 24)), call, chatty) for call in failing]
    check.equal([student.first_failure(made) for made, _ in programs], [want for _, want in programs], why=why)
### END HIDDEN TESTS

# %% [markdown]
# ### 练习二：任意层的 MLP（3 分）
#
# 写 `build_mlp(layers, batch)`，构建一个 MLP，返回计划（`bytes`）：
#
# - `layers` 是一串 `(w, b)`，`w` 的形状是 `(进, 出)`，`b` 的形状是 `(出,)`，NumPy 数组；每层算 `x @ w + b`，
#   **除最后一层外**再做 ReLU；
# - 输入名叫 `"x"`，形状 `(batch, 第一层的进)`；输出名叫 `"y"`，形状 `(batch, 最后一层的出)`；都是 float32；
# - 权重可能是 float64，也可能不连续（例如转置得到的视图），要先变成连续的 float32；
# - 前一层的“出”和后一层的“进”对不上时，抛 `BuildError`；之后进程照常，还能构建别的。
#
# 评分在 GPU 上运行你的计划，与 float64 的结果比较。容差按 TF32 给：绝对误差 0.05，结果本身的大小在 1 左右。

# %%
def mlp_by_numpy(x, layers):
    """The MLP of the exercise in float64. x: (batch, in). layers: list of (w, b). Returns float64, (batch, out)."""
    value = x.astype(np.float64)
    for index, (w, b) in enumerate(layers):
        value = value @ w.astype(np.float64) + b.astype(np.float64)
        if index < len(layers) - 1:
            value = np.maximum(value, 0)
    return value


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 权重要变成连续的 float32，会产生新的数组。每层一个，还是反复用同一块？到 `built` 返回以前，它们的内容会不会变？
#
# 偏置是一维的，矩阵乘的结果是二维的。逐元素的层接受吗？
#
# 形状对不上时，`add_…` 可能返回 `None`，也可能要到构建才失败。两种都要变成 `BuildError`，而不是 `AttributeError`。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 连续的 float32：`np.ascontiguousarray(array, np.float32)`，放进一个列表。
#
# 网络：`builder.create_network(STRONGLY_TYPED)`、`network.add_input(name, dtype, shape)`、`network.add_constant(shape, trt.Weights(array))`、
# `network.add_matrix_multiply(a, trt.MatrixOperation.NONE, b, trt.MatrixOperation.NONE)`、
# `network.add_elementwise(a, b, trt.ElementWiseOperation.SUM)`、`network.add_activation(a, trt.ActivationType.RELU)`；
# 它们返回的层用 `require(层, BuildError, "…")` 检查，再取 `get_output(0)`。最后是 `built(network)`。
#
# </details>

# %% solution="build_mlp" tags=["gpu"]
def build_mlp(layers, batch):
    """Build an MLP: x @ w + b for each (w, b) of layers, with ReLU after each but the last.

    layers: list of (w, b), numpy, (in, out) and (out,), of any float type and memory order. batch: int.
    Returns the plan (bytes) with the float32 tensors "x", (batch, in), and "y", (batch, out). BuildError where the
    layers do not fit together.
    """
    ### BEGIN SOLUTION: 先准备一个列表留住转换出来的数组，再逐层描述，每个 add_… 都用 require 检查，最后一层不要 ReLU，交给 built
    kept = []

    def constant(array):
        kept.append(np.ascontiguousarray(array, np.float32))
        layer = network.add_constant(kept[-1].shape, trt.Weights(kept[-1]))
        return require(layer, BuildError, "加不上常量").get_output(0)

    none = trt.MatrixOperation.NONE
    network = builder.create_network(STRONGLY_TYPED)
    value = network.add_input("x", trt.DataType.FLOAT, (batch, layers[0][0].shape[0]))
    for index, (w, b) in enumerate(layers):
        product = require(network.add_matrix_multiply(value, none, constant(w), none), BuildError, f"第 {index} 层的矩阵乘加不上")
        biased = network.add_elementwise(product.get_output(0), constant(b.reshape(1, -1)), trt.ElementWiseOperation.SUM)
        value = require(biased, BuildError, f"第 {index} 层的偏置加不上").get_output(0)
        if index < len(layers) - 1:
            value = require(network.add_activation(value, trt.ActivationType.RELU), BuildError, "加不上 ReLU").get_output(0)
    value.name = "y"
    network.mark_output(value)
    return built(network)
    ### END SOLUTION


# %% test="build_mlp" kind="structure" points=3 tags=["gpu"]
RUN = """
import cupy
import tensorrt as trt
from launchlab import lab

def describe(plan):
    engine = trt.Runtime(lab.trt_logger()).deserialize_cuda_engine(plan)
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    return [[name, engine.get_tensor_mode(name).name, engine.get_tensor_dtype(name).name, list(engine.get_tensor_shape(name))] for name in names]

def run(plan, x, y):
    engine = trt.Runtime(lab.trt_logger()).deserialize_cuda_engine(plan)
    context = engine.create_execution_context()
    stream = cupy.cuda.Stream(non_blocking=True)
    if not (context.set_tensor_address("x", x.data.ptr) and context.set_tensor_address("y", y.data.ptr)):
        raise ValueError("no tensors x and y")
    if not context.execute_async_v3(stream.ptr):
        raise ValueError("not enqueued")
    stream.synchronize()
"""
describe, run = student.define(RUN, "describe"), student.define(RUN, "run")
small = [(np.eye(4, 6, dtype=np.float32), np.arange(6, dtype=np.float32) - 3), (np.full((6, 2), 0.25, np.float32), np.array([-9, 1], np.float32))]
plan = student.build_mlp(small, 3)
check.that(isinstance(plan, bytes), why="应当返回计划的字节（bytes）。build_serialized_network 给的是 IHostMemory，built 已经替你换成了 bytes。")
check.equal(describe(plan), [["x", "INPUT", "FLOAT", [3, 4]], ["y", "OUTPUT", "FLOAT", [3, 2]]], why="引擎的输入输出和要求的不一样：名字、类型、形状各是什么？")
asked = np.arange(12, dtype=np.float32).reshape(3, 4) / 4 - 1
x, y = on_gpu(asked), on_gpu(np.zeros((3, 2), np.float32))
y.poison()
run(plan, x, y)
check.equal(y.read(), reference.mlp_by_numpy(asked, small).astype(np.float32), abs=0.05, why="结果不对。偏置加了吗？ReLU 只在前面几层吗？最后一层的结果可以是负数。")
check.raises("BuildError", student.build_mlp, [small[0], small[0]], 3, why="前一层出 6 个，后一层进 4 个，对不上，应当抛出 BuildError。add_… 返回的 None 检查了吗？")
### BEGIN HIDDEN TESTS
CALL = """
import numpy

def build(build_mlp, layers, batch):
    return build_mlp([(numpy.asfortranarray(w, numpy.float64), b.astype(numpy.float64)[::-1].copy()[::-1]) for w, b in layers], batch)
"""
batch, depth = int(secret.integers(4, 40)), int(secret.integers(3, 6))
widths = [int(width) for width in secret.integers(20, 90, depth + 1)]
widths[1] = widths[2] = widths[0]  # square matrices of one size: a transposed or a mixed-up one would fit


def drawn():
    shapes = [(widths[index], widths[index + 1]) for index in range(depth)]
    return [((secret.standard_normal(shape) * np.sqrt(2 / shape[0])).astype(np.float32), (secret.standard_normal(shape[1]) / 2).astype(np.float32)) for shape in shapes]


for fortran in (False, True):
    layers = drawn()
    if fortran:
        plan = student.define(CALL, "build")(student.value("build_mlp"), layers, batch)
    else:
        plan = student.build_mlp(layers, batch)
    check.that(isinstance(plan, bytes), why="换一组层，返回的不是 bytes。")
    check.equal(describe(plan), [["x", "INPUT", "FLOAT", [batch, widths[0]]], ["y", "OUTPUT", "FLOAT", [batch, widths[-1]]]], why="换一组层和 batch，引擎的输入输出就不对了。有没有写死的形状？")
    x, y = on_gpu(np.zeros((batch, widths[0]), np.float32)), on_gpu(np.zeros((batch, widths[-1]), np.float32))
    for _ in range(2):
        asked = x.write(secret.standard_normal((batch, widths[0])).astype(np.float32))
        y.poison()
        run(plan, x, y)
        why = "float64 或者不连续的权重，结果不对。转换对了吗？构建以前，转换出来的数组有没有又被改写，例如几层轮流用同一块缓冲？" if fortran else "换一组层，结果不对。每一层都用了自己的权重和偏置吗？最后一层做了 ReLU 吗？"
        check.equal(y.read(), reference.mlp_by_numpy(asked, layers).astype(np.float32), abs=0.05, rel=0.02, why=why)
one = drawn()[:1]
plan = student.build_mlp(one, batch)
check.equal(describe(plan)[-1], ["y", "OUTPUT", "FLOAT", [batch, widths[1]]], why="只有一层的 MLP，输出不对。只有一层时，它就是最后一层。")
asked = secret.standard_normal((batch, widths[0])).astype(np.float32)
x, y = on_gpu(asked), on_gpu(np.zeros((batch, widths[1]), np.float32))
run(plan, x, y)
check.equal(y.read(), reference.mlp_by_numpy(asked, one).astype(np.float32), abs=0.05, rel=0.02, why="只有一层的 MLP，结果不对。只有一层时，它就是最后一层，不做 ReLU。")
check.raises("BuildError", student.build_mlp, [one[0], (np.ones((widths[1] + 1, 8), np.float32), np.ones(8, np.float32))], batch, why="最后一层对不上时，应当抛出 BuildError。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：不接受错误缓冲的运行器（3 分）
#
# 写 `Runner`，按名字绑定，拒绝一切不合格的缓冲。
#
# `Runner(runtime, plan)`：加载计划，建好上下文。引擎或上下文没有得到，抛 `LoadError`。
#
# `runner.infer(buffers)`：`buffers` 是字典，名字 → 缓冲，输入和输出都在里面。先检查**全部**缓冲，再绑定，再在给定的 `stream` 上入队，
# 不等 GPU 做完（`stream` 上先排着的工作也不等）就返回 `None`：
#
# | 情况 | 抛出 |
# |:--|:--|
# | 缺少某个名字，或者多出引擎里没有的名字 | `ValueError` |
# | 不是 `cp.ndarray`（例如 NumPy 数组） | `TypeError` |
# | `dtype` 和引擎要的不一样 | `TypeError` |
# | 形状不一样 | `ValueError` |
# | 内存不连续 | `ValueError` |
# | 绑定返回 `False` | `BindError` |
# | 入队返回 `False` | `EnqueueError` |
#
# 被拒绝的那一次，不能入队，任何缓冲都不能变；之后用正确的缓冲再调用，一切照常。每次调用都可能换一组缓冲。
# 本题的引擎形状都是固定的，没有动态维度，也没有标量。测试交来的 `runtime` 有时是假扮的（让某个调用返回 `None` 或 `False`），不要检查它的类型。
#
# 给定的 `signed_plan(rows, cols)` 造一个可以拿来试的引擎，它有三个输入、两个输出，类型各不相同：
# `y = a − b·n`，`half` 是 `y` 的半精度副本；`n` 是 INT64。

# %% tags=["gpu"]
def signed_plan(rows, cols):
    """Plan (bytes) of y = a - b * n and half = y as float16. b, a: float32 (rows, cols). n: int64 (rows, 1)."""
    network = builder.create_network(STRONGLY_TYPED)
    b = network.add_input("b", trt.DataType.FLOAT, (rows, cols))
    n = network.add_input("n", trt.DataType.INT64, (rows, 1))
    a = network.add_input("a", trt.DataType.FLOAT, (rows, cols))
    factor = network.add_cast(n, trt.DataType.FLOAT).get_output(0)
    scaled = network.add_elementwise(b, factor, trt.ElementWiseOperation.PROD).get_output(0)
    y = network.add_elementwise(a, scaled, trt.ElementWiseOperation.SUB).get_output(0)
    half = network.add_cast(y, trt.DataType.HALF).get_output(0)
    for tensor, name in ((half, "half"), (y, "y")):
        tensor.name = name
        network.mark_output(tensor)
    return built(network)


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 引擎有几个输入输出、叫什么、要什么类型和形状，哪些可以在 `__init__` 里一次问好？
#
# 如果边检查边绑定，检查到第三个才发现不对，前两个已经绑上了。怎样安排次序，才能“要么全部，要么什么也不做”？
#
# 检查的次序要紧吗？一个 NumPy 数组也有 `dtype` 和 `shape`。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `runtime.deserialize_cuda_engine(plan)`、`engine.create_execution_context()`；
# `engine.num_io_tensors`、`engine.get_tensor_name(index)`、`engine.get_tensor_dtype(name)`、`engine.get_tensor_shape(name)`；
# `trt.nptype(dtype)` 给出 NumPy 的类型，形状用 `tuple(…)` 变成元组再比；是否连续看 `array.flags.c_contiguous`。
#
# 绑定：`context.set_tensor_address(name, array.data.ptr)`；入队：`context.execute_async_v3(stream.ptr)`。都用 `require` 检查。
# 字典的键可以当集合比：`buffers.keys() != expected.keys()`。
#
# </details>

# %% solution="Runner" tags=["gpu"]
class Runner:
    """An engine that is run by names, and takes no buffer that does not fit."""

    def __init__(self, runtime: "trt.Runtime", plan):
        """Load plan (bytes). LoadError where there is no engine or no context."""
        ### BEGIN SOLUTION: 加载引擎、建上下文，两处都可能是 None；再向引擎问好每个名字要的类型和形状，留着以后比
        self.engine = require(runtime.deserialize_cuda_engine(plan), LoadError, "加载计划失败")
        self.context = require(self.engine.create_execution_context(), LoadError, "没有得到执行上下文")
        names = [self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)]
        self.expected = {name: (np.dtype(trt.nptype(self.engine.get_tensor_dtype(name))), tuple(self.engine.get_tensor_shape(name))) for name in names}
        ### END SOLUTION

    def infer(self, buffers):
        """Enqueue one inference on `stream` and return at once.

        buffers: dict from each tensor's name to a contiguous cupy array of just its dtype and shape. TypeError,
        ValueError, BindError or EnqueueError, before anything has run, where something is wrong.
        """
        ### BEGIN SOLUTION: 先把所有的名字和缓冲检查完，一个也不绑；全部合格再绑定，最后入队，每个返回值都要查
        if buffers.keys() != self.expected.keys():
            raise ValueError(f"引擎的张量是 {sorted(self.expected)}，给的是 {sorted(buffers)}")
        for name, buffer in buffers.items():
            dtype, shape = self.expected[name]
            if not isinstance(buffer, cp.ndarray):
                raise TypeError(f"{name} 应当是 cupy 数组，给的是 {type(buffer).__name__}")
            if buffer.dtype != dtype:
                raise TypeError(f"{name} 应当是 {dtype}，给的是 {buffer.dtype}")
            if buffer.shape != shape:
                raise ValueError(f"{name} 的形状应当是 {shape}，给的是 {buffer.shape}")
            if not buffer.flags.c_contiguous:
                raise ValueError(f"{name} 的内存不连续，请先用 cp.ascontiguousarray")
        for name, buffer in buffers.items():
            require(self.context.set_tensor_address(name, buffer.data.ptr), BindError, f"绑定 {name} 失败")
        require(self.context.execute_async_v3(stream.ptr), EnqueueError, "入队失败")
        ### END SOLUTION


# %% test="Runner" kind="structure" points=3 tags=["gpu"]
ROWS_, COLS_ = 4, 6
plan = reference.signed_plan(ROWS_, COLS_)


def lent(rows, cols, start):
    """Buffers for signed_plan, with numbers from `start` on, and what y must be."""
    a, b = (np.arange(first, first + rows * cols, dtype=np.float32).reshape(rows, cols) for first in (start, start + 7))
    n = np.arange(rows, dtype=np.int64).reshape(rows, 1) - 1
    outputs = {"y": on_gpu(np.zeros((rows, cols), np.float32)), "half": on_gpu(np.zeros((rows, cols), np.float16))}
    for buffer in outputs.values():
        buffer.poison()
    return {"a": on_gpu(a), "b": on_gpu(b), "n": on_gpu(n), **outputs}, a - b * n.astype(np.float32)


runner = student.Runner(student.value("runtime"), plan)
buffers, want = lent(ROWS_, COLS_, 0)
runner.infer(buffers)
check.equal(buffers["y"].read(), want, why="y = a − b·n 的结果不对。每个名字都绑到了自己的缓冲吗？引擎里的次序和字典的次序不一样。")
check.equal(buffers["half"].read(), want.astype(np.float16), why="第二个输出 half 不对。输出也要绑定。")
buffers["y"].poison()
untouched = buffers["y"].read()
check.raises("TypeError", runner.infer, buffers | {"a": np.zeros((ROWS_, COLS_), np.float32)}, why="a 是 NumPy 数组，在 CPU 的内存里，应当抛出 TypeError。")
check.raises("TypeError", runner.infer, buffers | {"n": on_gpu(np.zeros((ROWS_, 1), np.int32))}, why="引擎要的 n 是 int64，给了 int32，应当抛出 TypeError。")
check.raises("ValueError", runner.infer, {name: buffer for name, buffer in buffers.items() if name != "b"}, why="缺少 b，应当抛出 ValueError。")
check.equal(buffers["y"].read().view(np.uint32), untouched.view(np.uint32), why="被拒绝的那一次不应当入队，可是输出变了。")
### BEGIN HIDDEN TESTS
SHAPES = """
def strided(wide):
    return wide[:, ::2]

def turned(array):
    return array.T
"""
PROXY = """
import tensorrt as trt
from launchlab import lab

class Context:
    def __init__(self, real, fault, journal):
        self.real, self.fault, self.journal = real, fault, journal

    def __getattr__(self, name):
        return getattr(self.real, name)

    def set_tensor_address(self, name, memory):
        return False if self.fault == f"bind {name}" else self.real.set_tensor_address(name, memory)

    def execute_async_v3(self, stream_handle):
        self.journal.append(int(stream_handle))
        return False if self.fault == "enqueue" else self.real.execute_async_v3(int(stream_handle))

class Engine:
    def __init__(self, real, fault, journal):
        self.real, self.fault, self.journal = real, fault, journal

    def __getattr__(self, name):
        return getattr(self.real, name)

    def __getitem__(self, index):
        return self.real[index]

    def create_execution_context(self, *arguments, **more):
        return None if self.fault == "context" else Context(self.real.create_execution_context(*arguments, **more), self.fault, self.journal)

class Runtime:
    def __init__(self, fault):
        self.real, self.fault, self.journal = trt.Runtime(lab.trt_logger()), fault, []

    def __getattr__(self, name):
        return getattr(self.real, name)

    def deserialize_cuda_engine(self, serialized_engine):
        return Engine(self.real.deserialize_cuda_engine(serialized_engine), self.fault, self.journal)
"""
first_runner, (first_buffers, first_want) = runner, lent(ROWS_, COLS_, 3)
rows, cols = (int(value) for value in secret.integers(5, 30, 2))
cols += cols == rows
plan = reference.signed_plan(rows, cols)
planted = student.define(PROXY, "Runtime")
honest = planted("")
runner = student.Runner(honest, plan)
sets = [lent(rows, cols, int(start)) for start in secret.integers(-40, 40, 3)]
for index in secret.permutation([0, 1, 2, 0, 1, 2]):
    buffers, want = sets[index]
    names = [str(name) for name in secret.permutation(list(buffers))]
    for name in ("y", "half"):
        buffers[name].poison()
    runner.infer({name: buffers[name] for name in names})
    check.equal(buffers["y"].read(), want, why="换一组缓冲、换一个次序，结果不对。每次调用都要重新绑定全部缓冲，而且按名字绑定。")
    check.equal(buffers["half"].read(), want.astype(np.float16), why="换一组缓冲，第二个输出不对。")
check.equal(honest.get("journal"), [student.value("stream").get("ptr")] * 6, why="每次 infer 应当在给定的 stream 上正好入队一次。用的是不是别的流，或者默认流？")
first_runner.infer(first_buffers)
check.equal(first_buffers["y"].read(), first_want, why="又建了一个 Runner 以后，原来的那一个结果不对：它们各有各的引擎、上下文和要求。")
buffers, want = sets[0]
held_up = student.plant("held_up")
check.that(
    any(held_up(student.value("stream"), ms, first_runner.get("infer"), first_buffers)[0] for ms in (20, 60, 200)),  # longer if the machine may just have been busy
    why="infer 等到 GPU 做完才返回：stream 上先放一个长内核，再调用 infer，返回时长内核已经结束了。入队以前、以后都不要等，等不等由调用者决定。",
)
strided, turned = student.define(SHAPES, "strided"), student.define(SHAPES, "turned")
single = {shape: on_gpu(np.ones(shape, np.float32)) for shape in ((cols, rows), (rows + 1, cols), (rows, cols - 1), (rows * cols,), (1, rows, cols), (rows, 2 * cols))}
illegal = [
    ("TypeError", buffers | {"b": np.ones((rows, cols), np.float32)}, "输入是 NumPy 数组"),
    ("TypeError", buffers | {"y": np.ones((rows, cols), np.float32)}, "输出是 NumPy 数组"),
    ("TypeError", buffers | {"a": on_gpu(np.ones((rows, cols), np.float64))}, "输入是 float64"),
    ("TypeError", buffers | {"b": on_gpu(np.ones((rows, cols), np.int32))}, "输入是 int32，字节数和 float32 一样"),
    ("TypeError", buffers | {"n": on_gpu(np.ones((rows, 1), np.int32))}, "int64 的输入给了 int32"),
    ("TypeError", buffers | {"n": on_gpu(np.ones((rows, 1), np.float64))}, "int64 的输入给了 float64，字节数一样"),
    ("TypeError", buffers | {"half": on_gpu(np.ones((rows, cols), np.float32))}, "半精度的输出给了 float32"),
    ("ValueError", buffers | {"a": single[cols, rows]}, "行和列颠倒"),
    ("ValueError", buffers | {"y": single[rows + 1, cols]}, "输出多一行"),
    ("ValueError", buffers | {"b": single[rows, cols - 1]}, "输入少一列"),
    ("ValueError", buffers | {"a": single[rows * cols,]}, "元素个数对，但压成了一维"),
    ("ValueError", buffers | {"a": single[1, rows, cols]}, "多了一个维度"),
    ("ValueError", buffers | {"a": strided(single[rows, 2 * cols])}, "隔列取出来的视图，不连续"),
    ("ValueError", buffers | {"y": turned(single[cols, rows])}, "转置得到的输出，不连续"),
    ("ValueError", {name: buffer for name, buffer in buffers.items() if name != "half"}, "缺少一个输出"),
    ("ValueError", buffers | {"extra": buffers["a"]}, "多出一个名字"),
    ("ValueError", {("A" if name == "a" else name): buffer for name, buffer in buffers.items()}, "名字的大小写不对"),
]
for name in ("y", "half"):
    buffers[name].poison()
untouched = buffers["y"].read().view(np.uint32)
for error, given, what in illegal:
    check.raises(error, runner.infer, given, why=f"{what}，应当抛出 {error}。")
check.equal(buffers["y"].read().view(np.uint32), untouched, why="被拒绝的调用改动了输出：检查要在入队之前全部做完。")
check.equal(len(honest.get("journal")), 6, why="被拒绝的调用仍然入队了：检查要在入队之前全部做完。")
runner.infer(buffers)
check.equal(buffers["y"].read(), want, why="拒绝过错误的缓冲以后，再给正确的，结果不对。")
for fault, error, what in (*((f"bind {name}", "BindError", "set_tensor_address 返回了 False") for name in buffers), ("enqueue", "EnqueueError", "execute_async_v3 返回了 False")):
    check.raises(error, student.Runner(planted(fault), plan).infer, buffers, why=f"{what}，应当抛出 {error}。返回值检查了吗？")
check.raises("LoadError", student.Runner, planted("context"), plan, why="create_execution_context 返回了 None（例如显存不够），应当抛出 LoadError。")
real = student.value("runtime")
for damaged in (plan[: len(plan) // 2], b"", b"not a plan at all " * 40):
    check.raises("LoadError", student.Runner, real, damaged, why="计划不完整，或者根本不是计划，应当抛出 LoadError。")
buffers, want = sets[1]
buffers["y"].poison()
student.Runner(real, plan).infer(buffers)
check.equal(buffers["y"].read(), want, why="加载失败过以后，再加载好的计划，结果不对。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：比逐层启动快（3 分）
#
# 同样的层，一边是给定的 `make_eager`：每层一个 CuPy 内核，逐个启动；另一边是你的引擎。
#
# 网络由若干个块组成，每块六层，输入 `(w, b)`：
#
# 1. `m = x @ w`；2. `m = m + b`；3. `q = floor(m / 16)`；4. `q = q × 16`；5. `r = m − q`；6. `x = r − 8`。
#
# 这种古怪的网络有个好处：输入是 −8～7 的整数，`w` 只含 −1、0、1，所以每一步都是不大的整数，用 float32、TF32 算都**一点误差没有**。
# 不管构建器选了哪种策略，结果必须和给定的 `blocks_by_numpy` 逐个相等；而且 `x` 几乎不可能停在一个值上，少做一轮都看得出来。
#
# 写 `make_stepper(blocks, x)`：`blocks` 是一串 `(w, b)`（NumPy float32，`(宽, 宽)` 和 `(宽,)`），`x` 是 CuPy float32，`(行, 宽)`。
# 返回一个不带参数的函数 `step`，每调用一次：
#
# - 让 `x` 当时的内容依次通过所有的块，结果**写回 `x`**；全部工作放在 `stream` 上，不等待；
# - 入队返回 `False` 时抛 `EnqueueError`，`x` 不变。
#
# 所有的块都要由你构建的引擎来算，用 `execute_async_v3` 入队；这道题不需要 CUDA 图。
#
# `make_stepper` 自己不能改动 `x`。引擎要能在 `x` 的内容被别人改写以后接着用。可能同时有几个 `step`，互不影响。
#
# 评分按端到端时间：反复调用，最后整个设备同步一次。8 个块、16 行、128 宽时要比 `make_eager` 快 2 倍以上；
# 如果在这台机器上参考实现自己也快得不多，门槛会降到它的加速比的一半（不低于 1.2 倍）。

# %%
def blocks_by_numpy(x, blocks, times=1):
    """x (numpy, integers in float32) after `times` passes through all blocks. Returns float32."""
    value = x.astype(np.int64)
    for _ in range(times):
        for w, b in blocks:
            m = value @ w.astype(np.int64) + b.astype(np.int64)
            value = m - m // 16 * 16 - 8
    return value.astype(np.float32)


# %% tags=["gpu"]
BLOCK = 256


def make_eager(blocks, x):
    """Return a function that advances x by one pass, with one launch for each layer, on `stream`.

    blocks: list of (w, b), numpy float32, (width, width) and (width,). x: cupy float32, (rows, width).
    """
    rows, width = x.shape
    grid, size = (-(-x.size // BLOCK),), np.int32(x.size)
    on_device = [(cp.asarray(w), cp.asarray(b)) for w, b in blocks]
    m, q = cp.empty_like(x), cp.empty_like(x)
    cp.cuda.Device().synchronize()

    def step():
        with stream:
            for w, b in on_device:
                matmul(grid, (BLOCK,), (x, w, m, np.int32(rows), np.int32(width), np.int32(width)))
                add_row(grid, (BLOCK,), (m, b, m, size, np.int32(width)))
                floor_div(grid, (BLOCK,), (m, np.float32(16), q, size))
                times(grid, (BLOCK,), (q, np.float32(16), q, size))
                minus(grid, (BLOCK,), (m, q, m, size))
                minus_number(grid, (BLOCK,), (m, np.float32(8), x, size))

    return step


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 哪些事只做一次，哪些每一步都要做？引擎的输出写到哪里：能不能直接写进 `x`？如果几层还没有读完输入，输出就已经写上去了，会怎样？
# 一个稳妥的办法是另备一块 `y`，入队以后再把 `y` 拷回 `x`。
#
# `step` 返回以后，引擎、上下文、`y` 由谁留着？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 逐元素：`network.add_elementwise(a, b, op)`，`op` 有 `trt.ElementWiseOperation.SUM`、`SUB`、`PROD`、`FLOOR_DIV`（相除再向下取整）。
# 16 和 8 也是常量，形状 `(1, 1)`，类型 float32。
#
# 拷贝要放在同一条流上：`x.data.copy_from_device_async(y.data, x.nbytes, stream)`。
# 在 `make_stepper` 里定义 `step`，它用到的变量会被它留住。
#
# </details>

# %% solution="make_stepper" tags=["gpu"]
def make_stepper(blocks, x):
    """Build an engine of all blocks and return a function step() that advances x by one pass on `stream`.

    blocks: list of (w, b), numpy float32, (width, width) and (width,). x: cupy float32, (rows, width), left as it is
    until step() is called. step() does not wait; EnqueueError where the inference was refused.
    """
    ### BEGIN SOLUTION: 先逐块描述六层并构建，加载、绑定 x 和另一块 y 都只做一次；step 里只剩入队和把 y 拷回 x
    kept = []
    none, op = trt.MatrixOperation.NONE, trt.ElementWiseOperation
    network = builder.create_network(STRONGLY_TYPED)

    def constant(array):
        kept.append(np.ascontiguousarray(array, np.float32))
        return network.add_constant(kept[-1].shape, trt.Weights(kept[-1])).get_output(0)

    value = network.add_input("x", trt.DataType.FLOAT, x.shape)
    sixteen, eight = constant([[16]]), constant([[8]])
    for w, b in blocks:
        m = network.add_matrix_multiply(value, none, constant(w), none).get_output(0)
        m = network.add_elementwise(m, constant(b.reshape(1, -1)), op.SUM).get_output(0)
        q = network.add_elementwise(m, sixteen, op.FLOOR_DIV).get_output(0)
        q = network.add_elementwise(q, sixteen, op.PROD).get_output(0)
        r = network.add_elementwise(m, q, op.SUB).get_output(0)
        value = network.add_elementwise(r, eight, op.SUB).get_output(0)
    value.name = "y"
    network.mark_output(value)

    engine = require(runtime.deserialize_cuda_engine(built(network)), LoadError, "加载失败")
    context = require(engine.create_execution_context(), LoadError, "没有得到执行上下文")
    y = cp.empty_like(x)
    for name, buffer in (("x", x), ("y", y)):
        require(context.set_tensor_address(name, buffer.data.ptr), BindError, f"绑定 {name} 失败")

    def step():
        require(context.execute_async_v3(stream.ptr), EnqueueError, "入队失败")
        x.data.copy_from_device_async(y.data, x.nbytes, stream)

    return step
    ### END SOLUTION


# %% test="make_stepper_result" kind="structure" points=1 tags=["gpu"]
def drawn_blocks(count, width):
    """Blocks for the exercise: weights of -1, 0 and 1, small whole biases."""
    return [(secret.integers(-1, 2, (width, width)).astype(np.float32), secret.integers(-8, 9, width).astype(np.float32)) for _ in range(count)]


tiny = [(np.eye(4, dtype=np.float32), np.full(4, 5, np.float32))]
data = np.arange(8, dtype=np.float32).reshape(2, 4) - 4
x = on_gpu(data)
step = student.make_stepper(tiny, x)
check.equal(x.read(), data, why="建好引擎以后 x 就变了。make_stepper 只准备，不推进 x；预热要用别的缓冲。")
step.run(1)
check.equal(x.read(), reference.blocks_by_numpy(data, tiny), why="走一步的结果不对。六层的次序对吗？结果写回 x 了吗？")
step.run(2)
check.equal(x.read(), reference.blocks_by_numpy(data, tiny, 3), why="走第二、三步的结果不对。每一步都要从 x 当时的内容出发，并写回 x。")
### BEGIN HIDDEN TESTS
WATCHED = """
import cupy
import tensorrt as trt

def watched(make_stepper, blocks, x, refuse):
    \"\"\"[the exception's class, number of enqueues] of making a stepper and of one step; refuse: each enqueue returns False.\"\"\"
    # As it stands in the class: what attribute access gives would, put back, be no method any more.
    kept, enqueue, seen, raised = vars(trt.IExecutionContext)["execute_async_v3"], trt.IExecutionContext.execute_async_v3, [], ""

    def counted(self, *arguments, **named):
        seen.append(1)
        return False if refuse else enqueue(self, *arguments, **named)

    trt.IExecutionContext.execute_async_v3 = counted
    try:
        step = make_stepper(blocks, x)  # kept until its work is done
        step()
    except Exception as error:
        raised = type(error).__name__
    finally:
        trt.IExecutionContext.execute_async_v3 = kept
        cupy.cuda.runtime.deviceSynchronize()
    return [raised, len(seen)]
"""
TENANTS = """
def tenants(stream, rows, width):
    import gc, cupy
    gc.collect()
    pattern = [cupy.full((rows, width), 77, cupy.float32) for _ in range(4)]
    with stream:
        pattern += [cupy.full((rows, width), 77, cupy.float32) for _ in range(4)]
    cupy.cuda.runtime.deviceSynchronize()
    return pattern
"""
rows, width, count = int(secret.integers(3, 20)), int(secret.integers(24, 100)), int(secret.integers(2, 5))
blocks = drawn_blocks(count, width)
data = secret.integers(-8, 8, (rows, width)).astype(np.float32)
x = on_gpu(data)
step = student.make_stepper(blocks, x)
check.equal(x.read(), data, why="建好引擎以后 x 就变了。")
others = student.define(TENANTS, "tenants")(student.value("stream"), rows, width)
for _ in range(3):
    runs = int(secret.integers(2, 9))
    step.run(runs)
    data = reference.blocks_by_numpy(data, blocks, runs)
    check.equal(x.read(), data, why="换一组块和形状，结果不对。每块都用了自己的 w 和 b 吗？每次都写回 x 了吗？")
    data = x.write(secret.integers(-8, 8, (rows, width)).astype(np.float32))
for other in others:
    check.equal(other, np.full((rows, width), 77, np.float32), why="推理写坏了别人的数组：输出的缓冲已经被回收，引擎还在往老地址写。请让 step 留住它。")
overtakes = student.plant("overtakes")
for ms in (40, 100, 250):  # longer if the machine may just have been busy
    early, changed = overtakes(student.value("stream"), ms, x, step)
    if early:
        break
check.that(early, why="流里别人的工作还没做完，step 就一直没有返回：它是不是等了 GPU？入队和拷贝都放在 stream 上，马上返回。")
check.that(not changed, why="stream 里前面的工作还没做完，x 就变了：有工作没有放在 stream 上。")
data = x.write(secret.integers(-8, 8, (rows, width)).astype(np.float32))
step.run(1)
data = reference.blocks_by_numpy(data, blocks)
check.equal(x.read(), data, why="stream 堵过以后再走一步，结果不对。每一步都要从 x 当时的内容出发，并写回 x。")
watched = student.define(WATCHED, "watched")
small = np.arange(8, dtype=np.float32).reshape(2, 4) - 4
z = on_gpu(small)
raised, enqueued = watched(student.value("make_stepper"), tiny, z, False)
check.equal(raised, "", why="又建一个 stepper，走一步，却抛出了异常。")
check.that(isinstance(enqueued, int) and enqueued > 0, why="没有一次推理经过 TensorRT（execute_async_v3 没有被调用）：所有的块要由你构建的引擎来算。")
check.equal(z.read(), reference.blocks_by_numpy(small, tiny), why="又建一个 stepper，走一步的结果不对。")
step.run(1)
check.equal(x.read(), reference.blocks_by_numpy(data, blocks), why="又建一个 stepper 以后，原来的那一个结果不对：它们各有各的引擎、上下文和缓冲。")
small = z.write(small + 1)
check.equal(watched(student.value("make_stepper"), tiny, z, True)[0], "EnqueueError", why="入队返回了 False，应当抛出 EnqueueError。execute_async_v3 的返回值检查了吗？")
check.equal(z.read(), small, why="入队返回了 False，x 却变了：先查返回值，再拷贝。")
### END HIDDEN TESTS

# %% test="make_stepper_speed" kind="speedup" points=2 tags=["gpu"]
def draw():
    return secret.integers(-8, 8, (16, 128)).astype(np.float32)


blocks = [(secret.integers(-1, 2, (128, 128)).astype(np.float32), secret.integers(-8, 9, 128).astype(np.float32)) for _ in range(8)]
x, y, z = on_gpu(draw()), on_gpu(draw()), on_gpu(draw())
step = student.make_stepper(blocks, x)
check.speedup(
    step,
    over=reference.make_eager(blocks, y),
    best=reference.make_stepper(blocks, z),
    state=(x, z),
    at_least=2.0,
    ceiling=None,
    draw=draw,
    abs=0.5,
    why="还不够快。构建、加载、建上下文、绑定都只该做一次；step 里只剩入队和一次拷贝，没有同步。",
)
### BEGIN HIDDEN TESTS
data, runs = x.write(draw()), int(secret.integers(2, 9))
step.run(runs)
check.equal(x.read(), reference.blocks_by_numpy(data, blocks, runs), why="计时以后换一份输入再走几步，结果不对：快，但没有做完该做的工作。")
ENGINE = """
import cupy
import tensorrt as trt

def enqueued(make_stepper, blocks, x):
    \"\"\"How often making a stepper and one step of it enqueue an engine.\"\"\"
    # As it stands in the class: what attribute access gives would, put back, be no method any more.
    kept, enqueue, seen = vars(trt.IExecutionContext)["execute_async_v3"], trt.IExecutionContext.execute_async_v3, []

    def counted(self, *arguments, **named):
        seen.append(1)
        return enqueue(self, *arguments, **named)

    trt.IExecutionContext.execute_async_v3 = counted
    try:
        step = make_stepper(blocks, x)  # kept until its work is done
        step()
    finally:
        trt.IExecutionContext.execute_async_v3 = kept
        cupy.cuda.runtime.deviceSynchronize()
    return len(seen)
"""
enqueued = student.define(ENGINE, "enqueued")(student.value("make_stepper"), blocks[:1], x)
check.that(isinstance(enqueued, int) and enqueued > 0, why="快，可是没有一次推理经过 TensorRT（execute_async_v3 没有被调用）：所有的块要由你构建的引擎来算。")
### END HIDDEN TESTS

# %% [markdown] tags=["instructor"]
# 给教师：练习一的隐藏测试里，编号 0、空列表、不返回东西的调用都出现在成功的位置，`returned in (None, False)` 会把编号 0 认成失败；
# 回声和失败以后的日志也在里面。练习二的隐藏测试用方阵（转置也装得下）、float64 和按列存放的权重：没有转换、转换错了，或者反复用同一块缓冲，结果就会错；
# 只给地址又没有留住数组的，还可能崩溃，那时只有这道题失分。练习三用夹在中间的 `Runtime`、`Engine`、`Context` 替身逐个制造 `None` 和 `False`，并记下入队用的流。
# 练习三、四都查“不等待”：先在流里放一个长内核，再让 `Runner` 或 `step` 入队，它们返回的时候，长内核应当还在跑。问的是紧跟在长内核后面的事件，不是整条流：先等再入队的，返回时流里还有它自己的工作，只看流就看不出来。练习四还看 `x`：长内核没有做完它就变了，说明有工作放到了别的流上。
# 这里不靠捕获来查，因为驱动不许在捕获中启动图，那样会错怪把入队捕获成图的写法。
# 练习四还数 `execute_async_v3` 被调用了几次：把 CuPy 内核录成一张图也够快，但没有引擎。
# 练习四的状态全是整数，任何策略都没有误差，所以可以逐字节地证明每一轮都做了；不设上限，因为学生也可以把入队捕获成图，那样更快，而且是对的。

# %% [markdown]
# ## 小结
#
# | 以前的说法 | 实验以后的说法 |
# |:--|:--|
# | 没有异常就是成功 | TensorRT 用 `None`、`False` 和日志说话，每个返回值都要查 |
# | 报错的那一行有错 | 第一个返回 `None` 的那一行才有错，后面都是回声 |
# | 权重交给网络，原来的数组就可以挪作他用 | 只记住地址，构建时才读；数组到构建结束以前要活着，内容也不能变 |
# | 每一层对应一个或多个内核 | 层是源代码，内核是编译结果；几层合成一个，去数才知道 |
# | 推理之前先同步一下更保险 | 同一条流里不需要同步；只在读结果和改写缓冲之前同步 |
# | 类型、形状错了会报错 | 引擎只收到地址：类型错了没有任何错误，要自己按引擎的说法检查 |
# | 输出多大问引擎 | 有动态维度时，设好输入的形状以后问上下文 |
# | 一次入队就是一次启动 | 入队仍要逐个启动引擎的每个内核，CPU 时间随内核数上升 |
#
# **带走三句话**
#
# 1. 网络 → 计划 → 引擎 → 上下文：构建一次，加载一次，每个请求只绑定和入队。
# 2. 失败要停在它发生的地方：`None` 和 `False` 当场变成异常，带上日志。
# 3. 上下文只记得地址：类型、形状、在不在 GPU 上、还活不活着，都由你负责。
#
# 下一步：《ONNX 导入与数值验证》不再一层一层地写网络，而是从文件导入；《构建的代价》讲计时缓存和优化级别；
# 《动态形状》正式打开那个 −1。
