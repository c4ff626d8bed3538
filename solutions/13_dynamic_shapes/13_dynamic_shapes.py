# %% [markdown]
# # 动态形状
#
# 模型上线的第一天，来的请求是 4 句话、每句 64 个 token。第二天来了一句话、500 个 token。
# 程序照常跑完，结果却是错的，没有一行报错：它设了一个引擎不接受的形状，TensorRT 返回了 `False`，而没有人看返回值。
#
# 动态形状（dynamic shape）让一个引擎接受一个**范围**里的输入尺寸。范围要事先写明，缓冲要自己备足，
# 拒绝要自己听见，换一次形状还要付一次钱。这一章把这四件事逐个做给你看。
#
# **学完以后，你能够**
#
# - 用 −1 和优化 Profile（optimization profile）声明动态维度（dynamic dimension），说出最小、最优、最大尺寸各管什么；
# - 设好输入的形状，向执行上下文（execution context）问出输出的形状，为最大的形状备好缓冲；
# - 在启动之前就拦下不合法的请求，并说清楚哪一维错了、允许多少；
# - 量出换一次形状的代价，写一个“只重设变了的东西”的运行器；
# - 用实验反驳两个误区：“动态形状就是无限灵活”和“动态形状与 CUDA 图天然兼容”。
#
# **需要的基础**：《构建第一个 TensorRT 引擎》里的构建器、引擎、执行上下文、按名字绑定地址；《CUDA 图优化概念》里的捕获（误区二用到）。
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
# ## 请求长什么样
#
# 讲义举了三种会变的尺寸：句子 8 到 512 个 token，图片 720p 或 1080p，批大小（batch size）1、4、8、16。
# 本章的主角是第一种和第三种的组合，图片在后面出场。
#
# 随本章发布的 `traffic.csv` 是一段请求流，每行是到达时刻（毫秒）、批大小、长度（token 数）。
# **它是合成的，不是真实的记录**：下面这一格就是它的配方，随机数的种子也在里面。
# 六成多是短句，三成是一段话，少数是长文，还故意混进了十二个不守规矩的请求。

# %% tags=["demo"]
def synthetic_traffic(seed=13, n=1200):
    """The recipe of traffic.csv. Returns int64, shape (n, 3): arrival in ms, batch, length in tokens."""
    rng = np.random.default_rng(seed)
    time_ms = np.cumsum(rng.integers(1, 9, n))
    batch = rng.choice([1, 4, 8, 16], n, p=[0.55, 0.25, 0.13, 0.07])
    short, middle = rng.lognormal(np.log(28), 0.5, n), rng.normal(128, 30, n)
    kind = rng.choice(3, n, p=[0.62, 0.30, 0.08])
    length = np.clip(np.select([kind == 0, kind == 1], [short, middle], rng.integers(320, 513, n)).round(), 8, 512).astype(np.int64)
    odd = rng.choice(n, 12, replace=False)
    length[odd[:5]] = rng.integers(1, 8, 5)
    length[odd[5:10]] = rng.integers(513, 900, 5)
    batch[odd[10:]] = 0, 32
    return np.stack([time_ms, batch, length], axis=1)


traffic = np.loadtxt("traffic.csv", delimiter=",", skiprows=1, dtype=np.int64)
same = "一致" if np.array_equal(traffic, synthetic_traffic()) else "不一致（NumPy 的随机数在不同版本里可能不同，以文件为准）"
lab.say(f"`traffic.csv` 有 {len(traffic)} 个请求，与配方当场生成的**{same}**。", measured=False)

# %% tags=["demo"]
import matplotlib.pyplot as plt

lab.plot_style()
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(3, 1))
left.hist(traffic[:, 2], bins=np.arange(0, 905, 16))
for edge in (8, 512):
    left.axvline(edge, color="#D55E00", linewidth=1.2, linestyle="--")
left.set_yscale("log")
left.set_xlabel("长度（token）")
left.set_ylabel("请求数（对数轴）")
left.set_title("一段合成的请求流：长度（虚线：8 与 512）")
sizes, counts = np.unique(traffic[:, 1], return_counts=True)
right.bar([str(size) for size in sizes], counts)
right.set_yscale("log")
right.set_xlabel("批大小")
right.set_ylabel("请求数（对数轴）")
right.set_title("批大小")
plt.show()

# %% [markdown]
# 如果只许用固定的形状，这里有几百种（批大小，长度）的组合，就要几百个引擎，或者把每个请求都填充（padding）到 16 × 512。
# 动态形状是第三条路：一个引擎，一个范围。

# %% [markdown]
# ## 一个看得穿对错的小网络
#
# 要研究形状，就要随时知道结果对不对，最好连一位都不差。所以这里的网络只算整数：
# 输入是 −8 到 8 的整数（存成浮点数），权重只有 −1、0、1，每一层之后用 `fold` 把数折回 −8 到 7：
#
# $$\mathrm{fold}(t) = t - 16\left\lfloor t / 16 \right\rfloor - 8$$
#
# 所有中间值都是小整数，浮点数能精确表示，不管 TensorRT 用哪种策略（tactic）、按什么次序相加，结果都一位不差。
#
# 网络有两个输入、两个输出：
#
# | 张量 | 形状 | 是什么 |
# |:--|:--|:--|
# | `x` | (批, 长度, 64) | 每个 token 的特征 |
# | `mask` | (批, 长度, 1) | 1 是真的 token，0 是填充 |
# | `pooled` | (批, 1, 64) | 每句话里真 token 的特征之和，折回 |
# | `y` | (批, 长度, 64) | 每个 token 的特征，加上它那句话的 `pooled`，折回 |
#
# 注意 `y` 里的每个 token 都受整句话的影响：句子从哪里断开、有多长，只要弄错，`y` 就错。
#
# 先写 NumPy 版，它是全章的标准答案。`PROFILE` 马上会讲。

# %%
HIDDEN = 64
PROFILE = {  # tensor: (min, opt, max)
    "x": ((1, 8, HIDDEN), (4, 64, HIDDEN), (16, 512, HIDDEN)),
    "mask": ((1, 8, 1), (4, 64, 1), (16, 512, 1)),
}
DIMS = {"x": ("batch", "length", None), "mask": ("batch", "length", None)}  # equal names: equal sizes; None: nobody else's


def weights(hidden):
    """The network's weights: float32, shape (hidden, hidden), values -1, 0, 1."""
    return np.random.default_rng(hidden).integers(-1, 2, (hidden, hidden)).astype(np.float32)


def fold(t):
    """Bring integers (any float dtype) back to -8 … 7."""
    return t - 16 * np.floor(t / 16) - 8


def expected(x, mask):
    """The right answer, by NumPy: (y, pooled), float32, shapes (batch, length, hidden) and (batch, 1, hidden).

    x: float32 integers in -8 … 8, shape (batch, length, hidden); mask: float32 of 0 and 1, shape (batch, length, 1).
    """
    wide = x.astype(np.float64)
    h = fold(np.maximum(wide @ weights(x.shape[-1]), 0))
    pooled = fold((h * mask).sum(axis=1, keepdims=True))
    return fold(h + pooled).astype(np.float32), pooled.astype(np.float32)


# %% [markdown]
# ## 声明：−1 与优化 Profile
#
# 同样的网络，用 TensorRT 写一遍。动态形状要做三件事，缺一不可：
#
# 1. 加输入时，把会变的维度写成 **−1**；
# 2. 建一个优化 Profile，对**每个**有 −1 的输入给出最小（min）、最优（opt）、最大（max）尺寸；
# 3. 把这个 Profile 加进**这一次**构建所用的配置：`config.add_optimization_profile`。
#
# 最小和最大是承诺：构建器只保证范围以内的形状能跑。最优是提示：构建器按它挑选策略。最优选得好不好有什么差别，
# 是《优化 Profile 的设计与管理》一章的主题。
#
# `set_dimension_name` 给维度起名字。`x` 和 `mask` 的前两维同名，就是告诉 TensorRT：它们永远相等。
#
# 构建用 `lab.build_progress()` 显示进度，用 `lab.timing_cache` 记住各策略的计时，重复构建更快。
# `require` 是本章最重要的三行：**`False` 和 `None` 一律变成异常**，并带上 TensorRT 自己说的原因。

# %% tags=["gpu"]
import cupy as cp
import tensorrt as trt

STRONGLY_TYPED = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
stream = cp.cuda.Stream(non_blocking=True)
builder = trt.Builder(lab.trt_logger())
runtime = trt.Runtime(lab.trt_logger())


def require(result, what):
    """Return result, unless it is False or None, TensorRT's ways of refusing: then RuntimeError with its reasons."""
    if result is False or result is None:
        raise RuntimeError(f"{what}失败。" + " ".join(lab.trt_errors()))
    return result


def describe_encoder(network: "trt.INetworkDefinition", hidden, named=True):
    """Add the layers to an empty network; named: give the dynamic dimensions names. Returns what must live until the build is done."""
    kept = []

    def constant(array):
        kept.append(np.ascontiguousarray(array, np.float32))
        return network.add_constant(kept[-1].shape, trt.Weights(kept[-1])).get_output(0)

    def element(a, b, operation):
        return network.add_elementwise(a, b, operation).get_output(0)

    def folded(t):
        sixteen, eight = constant(np.full((1, 1, 1), 16)), constant(np.full((1, 1, 1), 8))
        whole = element(element(t, sixteen, trt.ElementWiseOperation.FLOOR_DIV), sixteen, trt.ElementWiseOperation.PROD)
        return element(element(t, whole, trt.ElementWiseOperation.SUB), eight, trt.ElementWiseOperation.SUB)

    x = network.add_input("x", trt.DataType.FLOAT, (-1, -1, hidden))
    mask = network.add_input("mask", trt.DataType.FLOAT, (-1, -1, 1))
    for tensor in (x, mask) if named else ():
        tensor.set_dimension_name(0, "batch")
        tensor.set_dimension_name(1, "length")
    none = trt.MatrixOperation.NONE
    product = network.add_matrix_multiply(x, none, constant(weights(hidden)[None]), none).get_output(0)
    h = folded(network.add_activation(product, trt.ActivationType.RELU).get_output(0))
    masked = element(h, mask, trt.ElementWiseOperation.PROD)
    pooled = folded(network.add_reduce(masked, trt.ReduceOperation.SUM, 1 << 1, True).get_output(0))  # over axis 1, kept as 1
    y = folded(element(h, pooled, trt.ElementWiseOperation.SUM))
    y.name, pooled.name = "y", "pooled"
    network.mark_output(y)
    network.mark_output(pooled)
    return kept


def add_profile(config: "trt.IBuilderConfig", network: "trt.INetworkDefinition", table):
    """Add one optimisation profile to config: table maps the name of each dynamic input to (min, opt, max).

    ValueError if a dynamic input is missing from the table, or a name in it is no input; RuntimeError if TensorRT refuses.
    """
    inputs = {tensor.name: tuple(tensor.shape) for tensor in map(network.get_input, range(network.num_inputs))}
    dynamic = {name for name, shape in inputs.items() if -1 in shape}
    if dynamic - set(table) or set(table) - set(inputs):
        raise ValueError(f"Profile 里缺少 {sorted(dynamic - set(table))}，多出 {sorted(set(table) - set(inputs))}")
    profile = builder.create_optimization_profile()
    for name, (smallest, best, largest) in table.items():
        profile.set_shape(name, tuple(smallest), tuple(best), tuple(largest))
    if config.add_optimization_profile(profile) < 0:
        raise RuntimeError("Profile 不被接受。" + " ".join(lab.trt_errors()))


def build_encoder(table, hidden=HIDDEN, named=True):
    """Build the small network for the shapes of table (see add_profile, describe_encoder). Returns a trt.ICudaEngine."""
    network = builder.create_network(STRONGLY_TYPED)
    kept = describe_encoder(network, hidden, named)
    config = builder.create_builder_config()
    config.builder_optimization_level = 1  # quick to build; this chapter is not about the best tactic
    config.progress_monitor = lab.build_progress()
    add_profile(config, network, table)
    with lab.timing_cache(config):
        plan = require(builder.build_serialized_network(network, config), "构建")
    kept.clear()  # the plan holds the weights now
    return require(runtime.deserialize_cuda_engine(plan), "反序列化")


engine = build_encoder(PROFILE)

# %% [markdown]
# 引擎知道自己的张量、每个的形状（会变的仍是 −1）和 Profile 的三个尺寸。全部可以问出来：

# %% tags=["demo", "gpu"]
names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
rows = []
for name in names:
    is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
    sizes = [str(tuple(shape)) for shape in engine.get_tensor_profile_shape(name, 0)] if is_input else ["—"] * 3
    rows.append((f"`{name}`", "输入" if is_input else "输出", tuple(engine.get_tensor_shape(name)), *sizes))
lab.say(lab.table(("张量", "方向", "引擎里的形状", "最小", "最优", "最大"), rows), measured=False)

# %% [markdown]
# `get_tensor_profile_shape(name, 0)` 里的 0 是 Profile 的编号；本章只有一个。输出没有 Profile：它的形状是算出来的。
#
# 有两样东西**不会**变，动态形状也帮不上：维度的个数（秩，rank），和没有写成 −1 的维度（这里的 64）。数据类型当然也不变。

# %% [markdown]
# ### 忘了一步会怎样
#
# 问题报告里最常见的抱怨是“有动态输入，却没有优化 Profile”。原因往往不是没建，而是建了没加、名字写错、漏了一个输入。
# 把这些错一个个种进去，看看各在哪一步、以什么方式露馅：

# %% tags=["demo", "gpu"]
import contextlib
import io


def quiet():
    """Keep the logger's lines out of the output of a cell that provokes errors and shows them in a table."""
    return contextlib.redirect_stdout(io.StringIO())


def attempt(table, add=True):
    """Build with a profile made by plain calls and no checks. Returns (result of add_optimization_profile, plan, errors)."""
    network = builder.create_network(STRONGLY_TYPED)
    kept = describe_encoder(network, HIDDEN)
    config = builder.create_builder_config()
    config.builder_optimization_level = 1
    profile = builder.create_optimization_profile()
    lab.trt_errors()
    added = "没有调用"
    try:
        for name, shapes in table.items():
            profile.set_shape(name, *shapes)
        if add:
            added = config.add_optimization_profile(profile)
        with lab.timing_cache(config):
            plan = builder.build_serialized_network(network, config)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}", None, [str(error)]
    del kept  # alive until here
    return added, plan, lab.trt_errors()


FAULTS = {
    "建了，没有加进配置": (PROFILE, False),
    "名字写错：`X`": ({"X": PROFILE["x"], "mask": PROFILE["mask"]}, True),
    "漏了 `mask`": ({"x": PROFILE["x"]}, True),
    "最小大于最优": (PROFILE | {"x": (PROFILE["x"][2], *PROFILE["x"][1:])}, True),
    "静态的一维写成 32": (PROFILE | {"x": tuple((b, length, 32) for b, length, _ in PROFILE["x"])}, True),
    "全对": (PROFILE, True),
}
rows = []
for what, (table, add) in FAULTS.items():
    with quiet():
        added, plan, errors = attempt(table, add)
    rows.append((what, added, "得到了计划文件" if plan is not None else "`None`", (errors[0][:240] if errors else "—").replace("|", "/").replace("\n", " ")))
lab.say(lab.table(("种下的错", "`add_optimization_profile`", "构建的结果", "TensorRT 说的第一句话"), rows))

# %% [markdown]
# 构建失败时返回的是 `None`，不是异常；真正的原因只在日志里。不检查它，下一步就会得到一句
# `'NoneType' object has no attribute …`，离真正的错很远。
#
# 所以给定的 `add_profile` 在构建**之前**就核对名字，`require` 在构建**之后**立刻拦住 `None`。

# %% [markdown]
# ## 使用：先设形状，再问形状
#
# 引擎是共享的，形状属于执行上下文。刚创建的上下文还不知道形状：

# %% tags=["demo", "gpu"]
context = require(engine.create_execution_context(), "创建执行上下文")


def shapes_of(context: "trt.IExecutionContext"):
    return {name: tuple(context.get_tensor_shape(name)) for name in names}


rows = [("刚创建", *shapes_of(context).values(), context.infer_shapes())]
require(context.set_input_shape("x", (4, 20, HIDDEN)), "设置 x 的形状")
rows.append(("设好 `x`", *shapes_of(context).values(), context.infer_shapes()))
require(context.set_input_shape("mask", (4, 20, 1)), "设置 mask 的形状")
rows.append(("又设好 `mask`", *shapes_of(context).values(), context.infer_shapes()))
lab.say(lab.table(("做了什么", *(f"`{name}`" for name in names), "`infer_shapes()`"), rows), measured=False)

# %% [markdown]
# `infer_shapes()` 返回**还缺哪些输入**才能推出所有形状；返回空列表，就是万事俱备。
#
# 输出的形状有三个地方可以“看到”，只有一个是对的：
#
# - 引擎的 `get_tensor_shape`：永远是 −1，不能用来分配；
# - Profile 的最大尺寸：能用来分配，但不是这一次的尺寸。把它当成输出的形状，末尾就会拖着一截上一次留下的数；
# - **上下文**的 `get_tensor_shape`，在设好所有输入之后：这一次的真实尺寸。
#
# 补上地址就可以跑了。把“设形状、设地址、入队”三步写成 `bind` 和 `run`，再拿讲义的尺寸对一遍答案：
# 批大小 1、4、8、16，长度 8 到 512。

# %% tags=["demo", "gpu"]
def bind(context: "trt.IExecutionContext", arrays):
    """Set the inputs' shapes and all addresses. arrays: tensor name -> cupy array; outputs may be larger than needed."""
    for name, array in arrays.items():
        if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
            require(context.set_input_shape(name, array.shape), f"设置 {name} 的形状")
        require(context.set_tensor_address(name, array.data.ptr), f"设置 {name} 的地址")


def run(context: "trt.IExecutionContext"):
    require(context.execute_async_v3(stream.ptr), "入队")


def sample(batch, length, seed=0):
    """A request: x and mask, float32 NumPy arrays of integers."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-8, 9, (batch, length, HIDDEN)).astype(np.float32)
    return x, rng.integers(0, 2, (batch, length, 1)).astype(np.float32)


LENGTHS, BATCHES = (8, 9, 31, 64, 100, 255, 511, 512), (1, 4, 8, 16)
right = 0
for batch in BATCHES:
    for length in LENGTHS:
        x_host, mask_host = sample(batch, length, seed=length)
        with stream:
            arrays = {"x": cp.asarray(x_host), "mask": cp.asarray(mask_host)}
            arrays |= {"y": cp.full((batch, length, HIDDEN), np.nan, cp.float32), "pooled": cp.full((batch, 1, HIDDEN), np.nan, cp.float32)}
        bind(context, arrays)
        run(context)
        stream.synchronize()
        right += all(np.array_equal(arrays[name].get(), want) for name, want in zip(("y", "pooled"), expected(x_host, mask_host), strict=True))
lab.say(f"{len(BATCHES) * len(LENGTHS)} 种形状，同一个引擎，没有重新构建：与 NumPy 一位不差的有 **{right}** 种。")

# %% [markdown]
# ## 拒绝是一个返回值
#
# 讲义说，超出范围“会报错”。在 Python 里，这个“错”长什么样？对 `x` 试一遍边界内外、错的秩、错的静态维、错的名字：

# %% tags=["demo", "gpu"]
PROBES = {
    "最小": ("x", (1, 8, 64)), "最大": ("x", (16, 512, 64)), "长度比最小少 1": ("x", (4, 7, 64)), "长度比最大多 1": ("x", (4, 513, 64)),
    "批大小比最大多 1": ("x", (17, 64, 64)), "批大小 0": ("x", (0, 64, 64)), "静态的一维是 63": ("x", (4, 64, 63)), "少一维": ("x", (64, 64)),
    "多一维": ("x", (4, 64, 64, 1)), "没有这个输入": ("tokens", (4, 64, 64)), "对输出设形状": ("y", (4, 64, 64)),
}


def gist(message):
    """The last two sentences of what stands in brackets in a message of TensorRT's, fit for a cell of a table."""
    sentences = (message.partition("(")[2] or message).split(". ")
    return ". ".join(sentences[-2:]).removesuffix(")").strip().replace("|", "/").replace("\n", " ")


rows = []
lab.trt_errors()
for what, (name, shape) in PROBES.items():
    try:
        with quiet():
            result = context.set_input_shape(name, shape)
    except Exception as error:  # noqa: BLE001 - shown in the table
        result = type(error).__name__
    errors = lab.trt_errors()
    rows.append((what, f"`{name}`", shape, result, gist(errors[0]) if errors else "—"))
lab.say(lab.table(("试什么", "张量", "形状", "`set_input_shape` 返回", "日志（要紧的一段）"), rows))

# %% [markdown]
# 两端都包含在内，过界一步就是 `False`。没有异常，程序照常往下走。
# 走下去会怎样？让上下文先停在 (4, 64)，再来一个 (4, 600) 的请求，返回值不看，直接入队：

# %% tags=["demo", "gpu"]
x_host, mask_host = sample(4, 64)
with stream:
    arrays = {"x": cp.asarray(x_host), "mask": cp.asarray(mask_host)}
    arrays |= {"y": cp.zeros((4, 64, HIDDEN), cp.float32), "pooled": cp.zeros((4, 1, HIDDEN), cp.float32)}
bind(context, arrays)
run(context)

long_x, long_mask = sample(4, 600, seed=1)
with stream:
    long = {"x": cp.asarray(long_x), "mask": cp.asarray(long_mask)}
    long |= {"y": cp.full((4, 600, HIDDEN), -99, cp.float32), "pooled": cp.full((4, 1, HIDDEN), -99, cp.float32)}
with quiet():
    answers = [context.set_input_shape(name, long[name].shape) for name in ("x", "mask")]
for name, array in long.items():
    context.set_tensor_address(name, array.data.ptr)
went = context.execute_async_v3(stream.ptr)
stream.synchronize()
written = int((long["y"].get() != -99).sum())
lab.trt_errors()
lab.say(
    f"`set_input_shape` 返回 {answers}；上下文现在的形状是 {tuple(context.get_tensor_shape('x'))}；`execute_async_v3` 返回 **{went}**。\n\n"
    f"600 个 token 的请求，`y` 应有 {long['y'].size} 个数，实际写了 **{written}** 个；"
    f"`pooled` 对吗？**{'对' if np.array_equal(long['pooled'].get(), expected(long_x, long_mask)[1]) else '不对'}**。"
)

# %% [markdown]
# 被拒绝的形状不生效，上下文停在**上一个合法的形状**上；上面的入队如果是 `True`，用的就是它：新的地址，旧的形状。
# 请求的开头一段被当成 (4, 64) 算了一遍，其余的输出没有人写，而程序以为一切正常。
#
# 凡是会返回 `bool` 的调用都要看：`set_input_shape`、`set_tensor_address`、`set_optimization_profile_async`、`execute_async_v3`。

# %% [markdown]
# ### 每个输入都合法，合在一起不合法
#
# `set_input_shape` 一次只看一个输入。`x` 是 (4, 64)、`mask` 是 (4, 32)，各自都在范围里，合在一起却没有意义。谁来发现？
# 再试一个更隐蔽的：`mask` 的批大小是 1。按广播（broadcasting）的规则，1 可以扩展成 4，这也许会被当成合法的。
# 维度起不起名字，会有差别吗？另建一个不起名字的引擎，一起试。
#
# 这一次没有谁保证你会得到一句客气的 `False`：TensorRT 可能在推导或入队的半路上让**整个进程退出**，连异常也没有。
# 所以放进子进程里试：一个死了，就另起一个，接着试剩下的。子进程不构建，只从文件读计划；每一步之前、之后各说一句，立刻送出（flush）。
# 它要是死了，最后那句“开始”就说明死在哪一步，笔记本自己安然无恙。

# %% tags=["demo", "gpu"]
import json
import subprocess
import sys
import tempfile
from pathlib import Path

TRIALS = r"""
import json
import sys
import cupy as cp
import tensorrt as trt

logger = trt.Logger(trt.Logger.ERROR)
runtime = trt.Runtime(logger)
with open(sys.argv[1], "rb") as file:
    engine = runtime.deserialize_cuda_engine(file.read())
stream = cp.cuda.Stream(non_blocking=True)
with stream:  # each is enough for every shape that may be read or written
    arrays = {name: cp.ones((16, 512, 64), cp.float32) for name in ("x", "mask", "y", "pooled")}
stream.synchronize()
for mask_shape in json.loads(sys.argv[2]):
    context = engine.create_execution_context()
    for name, array in arrays.items():
        context.set_tensor_address(name, array.data.ptr)
    steps = {
        "x": lambda: context.set_input_shape("x", (4, 64, 64)),
        "mask": lambda: context.set_input_shape("mask", tuple(mask_shape)),
        "infer": context.infer_shapes,
        "enqueue": lambda: context.execute_async_v3(stream.ptr),
        "wait": stream.synchronize,
    }
    for step, call in steps.items():
        print(json.dumps([mask_shape, step, "begun"]), flush=True)
        try:
            result = repr(call())
        except Exception as error:
            result = type(error).__name__
        print(json.dumps([mask_shape, step, result]), flush=True)
"""
MASKS = ((4, 64, 1), (4, 32, 1), (1, 64, 1))  # the first is right: for comparison


def trials_of(engine: "trt.ICudaEngine"):
    """Try MASKS on the engine's plan in child processes. Returns {(mask shape, step): result, or "begun" where the child ended}."""
    answers, left = {}, list(MASKS)
    with tempfile.TemporaryDirectory() as folder:
        plan, told = Path(folder, "engine.plan"), Path(folder, "told")
        plan.write_bytes(bytes(require(engine.serialize(), "序列化")))
        while left:
            command = [sys.executable, "-c", TRIALS, str(plan), json.dumps(left)]
            with told.open("w") as out:
                try:
                    subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=15, check=False)
                except subprocess.TimeoutExpired:
                    print("15 秒还没有试完，子进程被结束了，停在表里“退出”的那一步。")
            lines = told.read_text(errors="replace").splitlines()
            said = [json.loads(line) for line in lines if line.startswith("[[") and line.endswith("]")]
            if not said:
                print("子进程还没有开始试就结束了：", *lines[-1:])
                break
            answers |= {(tuple(mask_shape), step): result for mask_shape, step, result in said}
            left = [mask_shape for mask_shape in left if (mask_shape, "x") not in answers]
    return answers


def shown(result):
    return {"begun": "**进程在这一步退出了**", "None": "完成", None: "没有试到"}.get(result, f"`{result}`")


unnamed = build_encoder(PROFILE, named=False)
rows, ended, accepted, by_name = [], 0, 0, {}
for what, each in (("有名字", engine), ("没有名字", unnamed)):
    answers = trials_of(each)
    for mask_shape in MASKS:
        steps = [answers.get((mask_shape, step)) for step in ("x", "mask", "infer", "enqueue", "wait")]
        rows.append((what, mask_shape, *map(shown, steps)))
        by_name.setdefault(what, []).append(steps)
        if mask_shape != MASKS[0]:
            ended += "begun" in steps
            accepted += steps[3:] == ["True", "None"]
lab.say(
    lab.table(("维度", "`mask` 的形状", "设 `x` 的形状 (4, 64, 64)", "设 `mask` 的形状", "`infer_shapes()`", "`execute_async_v3`", "等它做完"), rows)
    + f"\n\n两个引擎、两种不一致，一共 4 行：让进程退出的 **{ended}** 行，入队成功、照样做完的 **{accepted}** 行，其余的看表。"
    + f"给维度起不起名字，结果**{'一样' if by_name['有名字'] == by_name['没有名字'] else '不一样'}**。"
)

# %% [markdown]
# 除去作对照的两行，看看矛盾在哪一步才露馅：逐个设形状的时候，还是推导、入队的时候？露馅的样子是一句拒绝、一个异常，还是进程没了？
# 有没有哪一行，两个输入对不上，却一路放行？换一个版本、换一个网络，答案都可能不同，所以哪一种都不能指望。
#
# **这就是自己的检查要排在 TensorRT 前面的原因。** 进程一旦退出，`require` 和 `try` 都来不及说话，同一个进程里别人的请求也跟着没了；
# 一路放行则更糟，错得没有声音。服务有什么约定，就自己查什么约定，而且在把形状交给上下文**之前**查完。
# 练习一写的就是这个检查，练习三把它摆在碰 TensorRT 之前。

# %% [markdown]
# ## 缓冲：按最大的备，按这一次的用
#
# 每个请求都按自己的尺寸分配，当然对，但慢。常用的办法是：**按 Profile 的最大尺寸分配一次**，每次只用开头的一段。
# 最大要多少，问上下文：先把输入都设成最大，输出的形状就是最大的。

# %% tags=["demo", "gpu"]
sizing = require(engine.create_execution_context(), "创建执行上下文")
for name in ("x", "mask"):
    require(sizing.set_input_shape(name, engine.get_tensor_profile_shape(name, 0)[2]), f"设置 {name} 的形状")
largest = {name: tuple(sizing.get_tensor_shape(name)) for name in names}
rows = []
for name in names:
    itemsize = np.dtype(trt.nptype(engine.get_tensor_dtype(name))).itemsize
    rows.append((f"`{name}`", largest[name], f"{np.prod(largest[name]) * itemsize / 1024:.0f} KiB"))
total = sum(np.prod(largest[name]) * np.dtype(trt.nptype(engine.get_tensor_dtype(name))).itemsize for name in names)
ordinary = traffic[(traffic[:, 1] >= 1) & (traffic[:, 1] <= 16) & (traffic[:, 2] >= 8) & (traffic[:, 2] <= 512)]
used = np.median(ordinary[:, 1] * ordinary[:, 2]) / (16 * 512)
lab.say(
    lab.table(("张量", "最大的形状", "容量"), rows)
    + f"\n\n合计 {total / 2**20:.1f} MiB。在 `traffic.csv` 里，合法的请求有一半只用到 `x` 容量的 **{used:.1%}** 以下：这是不再分配的代价。",
    measured=False,
)

# %% [markdown]
# **容量和形状是两回事，要分开记。** 容量是一块一维的存储，形状是这一次怎么看它。混起来会错得很安静：
# 把大数组“切”成小的，`big[:4, :64]`，形状是对的，可是在显存里不连续：一句话和下一句话之间隔着 512 个 token 的位置。
# TensorRT 拿到的只有一个地址，它按连续的读写。

# %% tags=["demo", "gpu"]
x_host, mask_host = sample(4, 64, seed=3)
want = expected(x_host, mask_host)[0]
with stream:
    room = cp.zeros((16, 512, HIDDEN), cp.float32)
    sliced = room[:4, :64]  # right shape, wrong layout
    flat = room.reshape(-1)[: 4 * 64 * HIDDEN].reshape(4, 64, HIDDEN)  # the beginning of the storage
    arrays = {"mask": cp.asarray(mask_host), "y": cp.zeros((4, 64, HIDDEN), cp.float32), "pooled": cp.zeros((4, 1, HIDDEN), cp.float32)}
rows = []
for what, view in (("`big[:4, :64]`", sliced), ("一维存储的开头，`reshape`", flat)):
    with stream:
        view[...] = cp.asarray(x_host)
    bind(context, arrays | {"x": view})
    run(context)
    stream.synchronize()
    rows.append((what, view.shape, view.flags.c_contiguous, f"{(arrays['y'].get() != want).mean():.0%}"))
lab.say(lab.table(("怎样得到 `x`", "形状", "连续吗", "`y` 里错的数"), rows))

# %% [markdown]
# 没有报错，形状也对，结果错了一大片。CuPy 数组的 `flags.c_contiguous` 可以问出来，运行器应当拒绝不连续的数组。
#
# ### 显存不够时
#
# 如果最大尺寸大得离谱，分配就会失败。CuPy 抛出 `OutOfMemoryError`（它是 Python 的 `MemoryError` 的一种），进程可以继续：

# %% tags=["demo", "gpu"]
try:
    cp.cuda.alloc(1 << 50)  # 1 PiB
    print("竟然分配到了 1 PiB？")
except MemoryError as error:
    print(f"{type(error).__name__}：{str(error)[:70]} …")
with stream:
    print("之后照常分配、计算：", int(cp.arange(10).sum()))

# %% [markdown]
# ## 换一次形状要付多少
#
# 设了新的形状，下一次入队就要重新安排：推导每一层的尺寸，选启动参数，有时还要准备资源。有人把它描述为“换形状后的第一次很慢”。
# 在新的上下文里跑一段请求流，每 8 个请求换一次形状，量每次“设形状 + 入队”的提交时间。重复多个上下文，取中位数：

# %% tags=["demo", "gpu"]
from time import perf_counter_ns

with stream:
    roomy = {name: cp.zeros(shape, cp.float32) for name, shape in largest.items()}
SHAPE_A, SHAPE_B = (4, 64), (8, 128)


def set_shape(context: "trt.IExecutionContext", shape):
    require(context.set_input_shape("x", (*shape, HIDDEN)), "设置 x 的形状")
    require(context.set_input_shape("mask", (*shape, 1)), "设置 mask 的形状")


def fresh_context():
    made = require(engine.create_execution_context(), "创建执行上下文")
    for name, array in roomy.items():
        require(made.set_tensor_address(name, array.data.ptr), f"设置 {name} 的地址")
    return made


STREAM = ([SHAPE_A] * 8 + [SHAPE_B] * 8) * 3
spent = []
for _ in range(9):
    made, now, times = fresh_context(), None, []
    for shape in STREAM:
        stream.synchronize()
        began = perf_counter_ns()
        if shape != now:
            set_shape(made, shape)
            now = shape
        run(made)
        times.append((perf_counter_ns() - began) / 1000)
    stream.synchronize()  # a context must not go while its work is under way
    spent.append(times)
per_request = np.median(spent[1:], axis=0)  # the first context warms the process up
changes = [i for i in range(len(STREAM)) if i and STREAM[i] != STREAM[i - 1]]
steady = float(np.median([us for i, us in enumerate(per_request) if i and i not in changes]))
changed = float(np.median(per_request[changes]))

fig, ax = plt.subplots(figsize=(8, 3.6))
ax.plot(per_request, marker="", label="每个请求")
ax.plot(changes, per_request[changes], linestyle="", marker="v", markersize=8, color="#D55E00", label="换了形状的请求")
ax.set_yscale("log")
ax.set_xlabel("请求的序号")
ax.set_ylabel("CPU 提交时间（µs，对数轴）")
ax.set_title(f"每 8 个请求换一次形状（{lab.gpu_name()}）")
ax.legend()
plt.show()
lab.say(
    f"新上下文的第一次：{per_request[0]:.0f} µs；形状不变的一次：{steady:.1f} µs；换了形状的一次：**{changed:.1f} µs**，"
    f"是不变时的 **{changed / steady:.1f} 倍**。\n\n第一次见到 {SHAPE_B} 是 {per_request[changes[0]]:.1f} µs，第三次换到它是 {per_request[changes[-1]]:.1f} µs。"
    f"\n\n在 `traffic.csv` 里，和前一个请求形状不同的有 **{(np.diff(traffic[:, 1:], axis=0) != 0).any(axis=1).mean():.1%}**。"
)

# %% [markdown]
# 看三角形的那几个点：它们比邻居高出多少，就是换一次形状的价钱。再看“第一次”和“第三次”那两个数：如果差不多，说明代价来自“换”，不来自“第一次见”，见过的形状再换回去也要付；
# 如果第一次明显更贵，就值得在上线前把常见的形状都跑一遍（预热，warm-up）。介于两者之间，就是两样都有：
# 那时拿第三次和“形状不变的一次”比，差的才是每次换都要付的。
#
# 不加整理的请求流，几乎每个请求都在换。把长度归到少数几档（分桶，bucket），形状就少了，《每个形状一张图》细讲；
# 再把同一档的请求排在一起，换的次数就更少。
#
# 另一个躲开的办法：**一个形状一个上下文**，谁也不用换。再看另一种浪费：形状没变，却每次都重设一遍。

# %% tags=["demo", "gpu"]
one, two, same = fresh_context(), fresh_context(), fresh_context()
for made, shape in ((two, SHAPE_B), (same, SHAPE_A)):
    set_shape(made, shape)
    run(made)
stay = fresh_context()
set_shape(stay, SHAPE_A)


def alternate():
    for shape in (SHAPE_A, SHAPE_B):
        set_shape(one, shape)
        run(one)


def two_contexts():
    run(stay)
    run(two)


def set_again():
    for _ in range(2):
        set_shape(same, SHAPE_A)
        run(same)


def leave_alone():
    run(same)
    run(same)


swapped = lab.compare_us(alternate, two_contexts)
repeated = lab.compare_us(set_again, leave_alone)
lab.say(
    lab.table(
        ("两个请求的 CPU 提交时间", "µs（中位数）"),
        [
            ("A、B 轮流，一个上下文来回换", f"{swapped.first.median:.1f}"),
            ("A、B 轮流，两个上下文各守一个形状", f"{swapped.second.median:.1f}"),
            ("一直是 A，每次都重设", f"{repeated.first.median:.1f}"),
            ("一直是 A，不去碰它", f"{repeated.second.median:.1f}"),
        ],
    )
    + f"\n\n来回换是各守一个的 **{swapped.ratio:.1f} 倍**；重设同一个形状是不碰它的 **{repeated.ratio:.1f} 倍**。"
)

# %% [markdown]
# 上下文不是免费的：每一个都要自己的显存，见《执行上下文与显存》一章。常见的几种形状值得各配一个，几百种就不行了。
#
# ### 一个请求的账
#
# 形状稳定的时候，真正需要的只有一次入队。网上的例子却常常每次从头做到尾：问名字、问方向、设形状、推导、分配、设地址、入队、同步。
# 下面的 `naive_infer` 就是这样写的，每一步都没有错。它也是练习四要超过的基准。

# %% tags=["gpu"]
naive_context = require(engine.create_execution_context(), "创建执行上下文")


def naive_infer(inputs):
    """One request, everything from the beginning each time. inputs: name -> cupy array. Returns name -> new cupy array, done."""
    for i in range(engine.num_io_tensors):
        name = engine.get_tensor_name(i)
        if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
            require(naive_context.set_input_shape(name, inputs[name].shape), f"设置 {name} 的形状")
            require(naive_context.set_tensor_address(name, inputs[name].data.ptr), f"设置 {name} 的地址")
    if naive_context.infer_shapes():
        raise RuntimeError("还有输入没有形状")
    outputs = {}
    for i in range(engine.num_io_tensors):
        name = engine.get_tensor_name(i)
        if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT:
            shape, dtype = tuple(naive_context.get_tensor_shape(name)), trt.nptype(engine.get_tensor_dtype(name))
            with stream:
                outputs[name] = cp.empty(shape, dtype)
            require(naive_context.set_tensor_address(name, outputs[name].data.ptr), f"设置 {name} 的地址")
    require(naive_context.execute_async_v3(stream.ptr), "入队")
    stream.synchronize()
    return outputs


with stream:
    warm = {"x": cp.zeros((4, 64, HIDDEN), cp.float32), "mask": cp.ones((4, 64, 1), cp.float32)}
warmed_up = naive_infer(warm)  # a context's first enqueue prepares it: not a cost of each request

# %% [markdown]
# 把它拆开，一项一项地量 CPU 花的时间（形状一直是 (4, 64)）：

# %% tags=["demo", "gpu"]
made = fresh_context()
set_shape(made, SHAPE_A)
run(made)
stream.synchronize()


def ask_engine():
    for i in range(engine.num_io_tensors):
        name = engine.get_tensor_name(i)
        engine.get_tensor_mode(name)
        engine.get_tensor_dtype(name)


def allocate():
    with stream:
        cp.empty((4, 64, HIDDEN), cp.float32)
        cp.empty((4, 1, HIDDEN), cp.float32)


PIECES = {
    "问引擎：名字、方向、类型": ask_engine,
    "设两个输入的形状（没有变）": partial(set_shape, made, SHAPE_A),
    "推导形状 `infer_shapes`": made.infer_shapes,
    "问两个输出的形状": lambda: [tuple(made.get_tensor_shape(name)) for name in ("y", "pooled")],
    "分配两个输出": allocate,
    "设四个地址（没有变）": lambda: [made.set_tensor_address(name, array.data.ptr) for name, array in roomy.items()],
    "入队 `execute_async_v3`": partial(run, made),
}
costs = {what: lab.submit_us(piece, repeats=100).median for what, piece in PIECES.items()}
whole = lab.compare_us(partial(naive_infer, warm), partial(run, made), clock="end_to_end", pairs=51)
fig, ax = plt.subplots(figsize=(8, 3.4))
ax.barh([what.replace("`", "") for what in costs], list(costs.values()))
ax.invert_yaxis()
ax.set_xlabel("CPU 时间（µs）")
ax.set_title(f"一个请求里的各项（{lab.gpu_name()}）")
plt.show()
needless = sum(costs.values()) - costs["入队 `execute_async_v3`"]
lab.say(
    f"入队 {costs['入队 `execute_async_v3`']:.1f} µs，其余各项合计 {needless:.1f} µs。"
    f"单个请求端到端：`naive_infer` {whole.first.median:.0f} µs，只入队 {whole.second.median:.0f} µs。"
    "连续的请求还有一项看不见的收益：不同步，CPU 就能在 GPU 算这一个时提交下一个。"
)

# %% [markdown]
# 图里最长的是哪一项？未必是入队：光是“问”，也要花 CPU 的时间。答案没有变，就不必再问。
# 各项加起来，不到 `naive_infer` 的端到端时间：后者还要等 GPU 算完；而且同一项反复做，总比各项轮着做快一些。
#
# 这个网络很小，所以零碎的开销显得大；网络越大，入队和 GPU 的时间占比越高，省下的比例越小，省下的微秒数却差不多。

# %% [markdown]
# ## 图片：720p 与 1080p
#
# 讲义的第二种尺寸是图片。搭一个小卷积网络，高和宽都是 −1，一个引擎同时接受 1280 × 720 和 1920 × 1080。
#
# 卷积多了一条**网络自己的**规矩：每过一层，图就变小，太小的输入会让某一层的输出变成 0。Profile 的最小尺寸必须避开它。
# 一层卷积（核 $k$、步长 $s$、填充 $p$）的输出边长是 $\lfloor (n + 2p - k) / s \rfloor + 1$。倒过来推：要让最后一层至少输出 1，
# 输入的边长最少是多少？

# %% tags=["demo"]
STACK = [(7, 2, 0), (5, 2, 0), (3, 2, 0)]  # kernel, stride, padding of each convolution


def side_after(side, stack):
    """Side of the output of a stack of convolutions for an input of this side; 0 or less: impossible."""
    for kernel, stride, padding in stack:
        side = (side + 2 * padding - kernel) // stride + 1
        if side < 1:
            return 0
    return side


def least_side(stack):
    """The smallest input side for which every layer of the stack has at least one output."""
    need = 1
    for kernel, stride, padding in reversed(stack):
        need = max(1, (need - 1) * stride + kernel - 2 * padding)
    return need


least = least_side(STACK)
lab.say(f"这一摞卷积的输入边长最少是 **{least}**：输入 {least} 时输出 {side_after(least, STACK)}，输入 {least - 1} 时输出 {side_after(least - 1, STACK)}。", measured=False)

# %% [markdown]
# 就用这个尺寸做 Profile 的最小值。如果写得比它小，构建器也许当场拒绝，也许只在日志里警告一句，等这么小的图真的来了才出事：别指望它，自己先算。
# 最小写对了，太小的图在 `set_input_shape` 那里就被拒绝：

# %% tags=["demo", "gpu"]
def build_images(smallest):
    """Build a convolutional network for images from smallest × smallest to 1080 × 1920. Returns a trt.ICudaEngine."""
    network, kept, channels = builder.create_network(STRONGLY_TYPED), [], 3
    t = network.add_input("image", trt.DataType.FLOAT, (1, 3, -1, -1))
    for kernel, stride, padding in STACK:
        kept.append(np.random.default_rng(kernel).normal(0, 0.1, (8, channels, kernel, kernel)).astype(np.float32))
        layer = network.add_convolution_nd(t, 8, (kernel, kernel), trt.Weights(kept[-1]))
        layer.stride_nd, layer.padding_nd = (stride, stride), (padding, padding)
        t = network.add_activation(layer.get_output(0), trt.ActivationType.RELU).get_output(0)
        channels = 8
    t.name = "map"
    network.mark_output(t)
    config = builder.create_builder_config()
    config.builder_optimization_level = 1
    config.progress_monitor = lab.build_progress()
    add_profile(config, network, {"image": ((1, 3, smallest, smallest), (1, 3, 720, 1280), (1, 3, 1080, 1920))})
    with lab.timing_cache(config):
        plan = require(builder.build_serialized_network(network, config), "构建")
    kept.clear()  # the plan holds the weights now
    return require(runtime.deserialize_cuda_engine(plan), "反序列化")


images = build_images(least)
trying = require(images.create_execution_context(), "创建执行上下文")
rows = []
for side in (least, least - 1):
    with quiet():
        accepted = trying.set_input_shape("image", (1, 3, side, side))
    rows.append((f"{side} × {side}", accepted, tuple(trying.get_tensor_shape("map")) if accepted else "—"))
lab.trt_errors()
lab.say(lab.table(("图片", "`set_input_shape` 返回", "输出的形状"), rows))

# %% tags=["demo", "gpu"]
watching = require(images.create_execution_context(), "创建执行上下文")
with stream:
    image_room = cp.zeros(3 * 1080 * 1920, cp.float32)
    map_room = cp.zeros(8 * side_after(1080, STACK) * side_after(1920, STACK), cp.float32)
for name, array in (("image", image_room), ("map", map_room)):
    require(watching.set_tensor_address(name, array.data.ptr), f"设置 {name} 的地址")
rows, took = [], {}
for what, (height, width) in {"720p": (720, 1280), "1080p": (1080, 1920)}.items():
    require(watching.set_input_shape("image", (1, 3, height, width)), "设置 image 的形状")
    took[what] = lab.end_to_end_us(partial(run, watching), repeats=100).median
    found, by_rule = tuple(watching.get_tensor_shape("map")), (1, 8, side_after(height, STACK), side_after(width, STACK))
    rows.append((what, height * width, found, "一致" if found == by_rule else "不一致", f"{took[what]:.0f}"))
lab.say(
    lab.table(("图片", "像素数", "上下文说的输出形状", "与公式", "端到端 µs"), rows)
    + f"\n\n像素数是 {1080 * 1920 / (720 * 1280):.2f} 倍，时间是 **{took['1080p'] / took['720p']:.2f}** 倍。"
)

# %% [markdown]
# 同一个引擎，不用重新构建；但形状大了，活就多了。时间的倍数小于像素的倍数时，可能是小尺寸还没有把 GPU 喂饱，也可能是有一段时间与尺寸无关；
# 大于的时候，可能是构建器按最优尺寸 720p 挑的策略到了 1080p 不那么合适。

# %% [markdown]
# ## 误区一：动态形状就是无限灵活
#
# 前面已经看到三条边界：范围之外返回 `False`；秩、静态维、数据类型都不能变；网络自己还有做不到的尺寸。
#
# 那么，把范围开得足够大不就行了？把最大长度从 512 改成 4096，再建一个引擎，比一比要备多少显存：

# %% tags=["demo", "gpu"]
def with_longest(longest):
    """PROFILE with another largest length."""
    return {name: (low, best, (high[0], longest, high[2])) for name, (low, best, high) in PROFILE.items()}


wide = build_encoder(with_longest(4096))
rows = []
for what, each, longest in (("到 512", engine, 512), ("到 4096", wide, 4096)):
    buffers = 16 * longest * (HIDDEN + 1 + HIDDEN) * 4 + 16 * HIDDEN * 4
    rows.append((what, f"{each.device_memory_size_v2 / 2**20:.1f}", f"{buffers / 2**20:.1f}"))
grew = wide.device_memory_size_v2 > engine.device_memory_size_v2
lab.say(
    lab.table(("长度的范围", "每个上下文的暂存（scratch）MiB", "按最大备的缓冲 MiB"), rows)
    + "\n\n范围开大以后，暂存" + ("跟着变大了。" if grew else "没有变大：这个网络的暂存不随长度增长；缓冲的价钱却躲不掉。")
)

# %% [markdown]
# 范围的价钱按**最大**付，不管这样的请求来不来：缓冲按最大的备；上下文内部如果有暂存，也按最大的备。
# 范围越宽，策略还越难在两头都合适，这一点留给《优化 Profile 的设计与管理》。
#
# 准确的说法是：动态形状解决**已知范围内**的变化，范围是构建之前就要做的决定。

# %% [markdown]
# ## 误区二：动态形状与 CUDA 图天然兼容
#
# 捕获一次 (4, 64) 的推理，得到一张图。然后请求变成 (2, 128)：元素个数一样，正好放在同一块缓冲里，地址没有变。
# 把上下文的形状设成 (2, 128)，写入新数据，再重放那张图。猜一猜：图算的是哪个形状？

# %% tags=["demo", "gpu"]
with stream:
    shared = {name: cp.zeros(shape, cp.float32) for name, shape in (("x", (4, 64, HIDDEN)), ("mask", (4, 64, 1)), ("y", (4, 64, HIDDEN)), ("pooled", (4, 1, HIDDEN)))}
graph_context = require(engine.create_execution_context(), "创建执行上下文")
bind(graph_context, shared)
run(graph_context)  # once outside: a fresh context prepares itself on its first enqueue, which a capture may not allow
stream.synchronize()
with stream:
    stream.begin_capture()
    try:
        recorded = graph_context.execute_async_v3(stream.ptr)
    finally:
        graph = stream.end_capture()
require(recorded, "捕获")

x_host, mask_host = sample(2, 128, seed=5)
with stream:
    shared["x"].reshape(2, 128, HIDDEN).set(x_host)
    shared["mask"].reshape(2, 128, 1).set(mask_host)
    shared["pooled"].fill(-99)
require(graph_context.set_input_shape("x", (2, 128, HIDDEN)), "设置 x 的形状")
require(graph_context.set_input_shape("mask", (2, 128, 1)), "设置 mask 的形状")
asked = tuple(graph_context.get_tensor_shape("y"))


def verdicts():
    """What y holds now: is it right for (2, 128)? for (4, 64)? And how many rows of pooled were written?"""
    stream.synchronize()
    y_now, rows_written = shared["y"].get(), int((shared["pooled"].get() != -99).all(axis=(1, 2)).sum())
    as_asked = np.array_equal(y_now.reshape(2, 128, HIDDEN), expected(x_host, mask_host)[0])
    as_captured = np.array_equal(y_now, expected(x_host.reshape(4, 64, HIDDEN), mask_host.reshape(4, 64, 1))[0])
    return "对" if as_asked else "错", "对" if as_captured else "错", rows_written


graph.launch(stream)
replayed = verdicts()
with stream:
    shared["pooled"].fill(-99)
run(graph_context)
eager = verdicts()
if replayed == ("错", "对", 4):
    moral = "没有一个调用报错。图照着**捕获时的形状**算完了，连 `pooled` 也写了 4 行，而 (2, 128) 只有 2 行：多写的两行，可能正是别人的数据。"
elif replayed[0] == "错":
    moral = "没有一个调用报错，图算出来的却不是这个请求要的。"
else:
    moral = "这一次图碰巧跟上了新的形状，但谁也没有这样承诺过：换一个网络、换一个版本，它就可能算旧的形状。"
lab.say(
    f"上下文说现在的形状是 {asked}。\n\n"
    + lab.table(("怎样执行", "按 (2, 128) 看", "按 (4, 64) 看", "写了 `pooled` 的几行"), [("重放旧图", *replayed), ("直接入队", *eager)])
    + f"\n\n{moral}"
)

# %% [markdown]
# `set_input_shape` 改的是上下文；已经捕获好的图里是当时的内核和参数，没有谁去通知它。
#
# 准确的说法是：图里写死的不只有地址，还有形状。形状变了，就要有另一张图，或者更新这一张。
# 怎样捕获、怎样给每种形状配一张图，是第三个模块“实战篇”的内容；讲义说的“重新绑定内存并更新图参数”也在那里逐条落实。

# %% [markdown]
# ## 练习
#
# 四道练习，共 12 分。解答里可以用这些给定的名字：
#
# - 模块与工具：`np`、`partial`、`lab`；需要 GPU 的还有 `cp`、`trt`、`stream`、`require`；
# - 网络：`HIDDEN`、`PROFILE`、`DIMS`、`weights`、`fold`、`expected`；
# - 引擎：`engine`、`builder`、`runtime`、`add_profile`、`build_encoder`、`naive_infer`；
# - 练习三给出的 `profile_of`，练习四给出的 `relay`、`naive_relay`。后面的练习可以用你前面写的函数。
#
# `bind`、`run`、`set_shape`、`largest` 等名字来自演示单元（只做实验，评分时不运行），解答里不能用，但可以照着写：
# 评分会在干净的环境里运行给定的单元和你的解答，跳过演示单元。
#
# 每道题的引擎都有两个输入 `x`、`mask` 和两个输出 `y`、`pooled`，数据类型都是 `float32`；
# 但**尺寸可能和 `engine` 不同**：隐藏测试会换一个特征数和范围都不一样的引擎。所有工作都放在给定的 `stream` 上。
# 测试交来的引擎外面有时套着一层，会记下对上下文的调用，也会让某个调用返回 `False` 或 `None`，不要检查它的类型。
#
# ### 练习一：说清楚为什么拒绝（3 分）
#
# 一句“形状不对”帮不了发请求的人。写 `review(request, profile, dims)`，返回一张**拒绝单**：所有毛病的列表，没有毛病就是空列表。
#
# - `request`：张量名 → 形状（整数的元组）；
# - `profile`：像 `PROFILE` 那样，张量名 → (最小, 最优, 最大)；
# - `dims`：像 `DIMS` 那样，张量名 → 各维的名字。名字相同的维必须一样大；`None` 不参加比较。
#
# 依次写下这些毛病，每条是一个元组：
#
# 1. 按 `profile` 里的次序看每个张量：
#     - 请求里没有它：`(张量名, "missing")`；
#     - 秩不对：`(张量名, "rank", 应有的秩)`，这个张量不再往下看，也不参加第 3 步；
#     - 秩对了，按轴的次序看每一维，不在 [最小, 最大] 里的：`(张量名, 轴, 最小, 最大)`，轴从 0 数起。静态维的最小等于最大，同样处理。
# 2. 按请求里的次序，`profile` 里没有的张量：`(张量名, "unknown")`。
# 3. 按维的名字第一次出现的次序（先 `profile` 的张量次序，再轴的次序；不参加比较的张量不算），同名的维大小不一的：`(维的名字, "differs", 最小的值, 最大的值)`。
#    超出范围的维也参加比较。
#
# 不需要 GPU。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 三步互不相干，可以写成三段。第一段里，哪个条件要先看，否则后面一比就出错？
# `zip` 遇到长短不一的两个序列会怎样？哪一段需要先把“同名的维都有哪些值”收集起来？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `for axis, (size, least, most) in enumerate(zip(shape, low, high, strict=True))` 同时走三个元组。
# 收集可以用 `values.setdefault(dim, []).append(size)`：字典记得键第一次出现的次序。
#
# </details>

# %% solution="review"
def review(request, profile, dims):
    """List everything that is wrong with the shapes of a request; an empty list if nothing is.

    request: name -> shape; profile: name -> (min, opt, max); dims: name -> names of the dimensions, None for unnamed.
    Returns tuples, in this order: (name, "missing"), (name, "rank", rank) or (name, axis, least, most) for each tensor of
    profile; (name, "unknown") for each that profile lacks; (dimension, "differs", smallest, largest).
    """
    ### BEGIN SOLUTION: 分三段写：profile 里的每个张量（先看有没有，再看秩，再看每一维），请求里多出来的，同名的维
    faults, sizes = [], {}
    for name, (low, _, high) in profile.items():
        if name not in request:
            faults.append((name, "missing"))
            continue
        shape = request[name]
        if len(shape) != len(low):
            faults.append((name, "rank", len(low)))
            continue
        for axis, (size, least, most) in enumerate(zip(shape, low, high, strict=True)):
            if not least <= size <= most:
                faults.append((name, axis, least, most))
            if dims[name][axis] is not None:
                sizes.setdefault(dims[name][axis], []).append(size)
    faults += [(name, "unknown") for name in request if name not in profile]
    faults += [(dim, "differs", min(found), max(found)) for dim, found in sizes.items() if min(found) != max(found)]
    return faults
    ### END SOLUTION


# %% test="review" kind="answer" points=3
LIMITS = {"x": ((1, 8, 64), (4, 64, 64), (16, 512, 64)), "mask": ((1, 8, 1), (4, 64, 1), (16, 512, 1))}
NAMED = {"x": ("batch", "length", None), "mask": ("batch", "length", None)}


def reviewed(x_shape, mask_shape):
    return student.review({"x": x_shape, "mask": mask_shape}, LIMITS, NAMED)


check.equal(reviewed((4, 64, 64), (4, 64, 1)), [], why="完全合法的请求，应当返回空列表。")
check.equal(reviewed((1, 8, 64), (1, 8, 1)), [], why="最小尺寸本身是合法的：两端都包含在内。")
check.equal(reviewed((16, 512, 64), (16, 512, 1)), [], why="最大尺寸本身是合法的：两端都包含在内。")
check.equal(reviewed((4, 600, 64), (4, 600, 1)), [("x", 1, 8, 512), ("mask", 1, 8, 512)], why="长度 600 超出了范围，两个输入各一条：轴是 1，允许 8 到 512。")
check.equal(reviewed((0, 7, 64), (0, 7, 1)), [("x", 0, 1, 16), ("x", 1, 8, 512), ("mask", 0, 1, 16), ("mask", 1, 8, 512)], why="空的批和太短的长度，四个毛病都要列出来，按张量、再按轴的次序。")
check.equal(reviewed((4, 64, 63), (4, 64, 1)), [("x", 2, 64, 64)], why="静态的一维也要查：它的最小等于最大。")
check.equal(reviewed((64, 64), (4, 64, 1)), [("x", "rank", 3)], why="x 少了一维：只报秩，不再逐维比较。")
check.equal(reviewed((4, 64, 64), (4, 32, 1)), [("length", "differs", 32, 64)], why="两个输入各自合法，长度却不一致。")
check.equal(student.review({"x": (4, 64, 64), "m": (4, 64, 1)}, LIMITS, NAMED), [("mask", "missing"), ("m", "unknown")], why="缺了 mask，多了 m：先报 profile 里的张量，再报多出来的。")
### BEGIN HIDDEN TESTS
def rule(request, profile, dims):
    faults, sizes = [], {}
    for name, (low, _, high) in profile.items():
        if name not in request:
            faults.append((name, "missing"))
        elif len(request[name]) != len(low):
            faults.append((name, "rank", len(low)))
        else:
            for axis, size in enumerate(request[name]):
                if size < low[axis] or size > high[axis]:
                    faults.append((name, axis, low[axis], high[axis]))
                if dims[name][axis] is not None:
                    sizes.setdefault(dims[name][axis], []).append(size)
    faults += [(name, "unknown") for name in request if name not in profile]
    return faults + [(dim, "differs", min(found), max(found)) for dim, found in sizes.items() if len(set(found)) > 1]


def drawn_case(kind):
    """A profile of three inputs of different ranks, and a request with a fault of this kind (or none)."""
    low = {"batch": int(secret.integers(1, 4)), "length": int(secret.integers(4, 30)), "width": int(secret.integers(2, 9))}
    high = {dim: least + int(secret.integers(3, 40)) for dim, least in low.items()}
    names = {"ids": ("batch", "length"), "image": ("batch", None, "width", "width"), "bias": (None, "length", "width")}
    order = [str(name) for name in secret.permutation(list(names))]
    dims = {name: names[name] for name in order}
    static = int(secret.integers(2, 70))

    def sized(values):
        return {name: tuple(static if dim is None else values[dim] for dim in dims[name]) for name in dims}

    best = {dim: int(secret.integers(low[dim], high[dim] + 1)) for dim in low}
    least, middle, most = sized(low), sized(best), sized(high)
    profile = {name: (least[name], middle[name], most[name]) for name in dims}
    request = dict(sized({dim: int(secret.integers(low[dim], high[dim] + 1)) for dim in low}))
    victim = str(secret.choice(order))
    shape = list(request[victim])
    axis = int(secret.integers(len(shape)))
    if kind == "below":
        shape[axis] = least[victim][axis] - 1
    elif kind == "above":
        shape[axis] = most[victim][axis] + 1
    elif kind == "rank":
        shape = shape[:-1] if secret.integers(2) else [*shape, 1]
    elif kind == "wild":
        request = {name: tuple(int(size) + int(secret.integers(-30, 60)) for size in each) for name, each in request.items()}
        shape = list(request[victim])
    request[victim] = tuple(shape)
    if kind == "several":
        other, third = (name for name in order if name != victim)
        size = low["length"] + int(secret.integers(-2, 3))
        request[victim] = (*request[victim], 1)  # "rank"
        request[other], request[third] = (tuple(each + int(secret.integers(-1, 2)) for each in request[name]) for name in (other, third))
        request = {"extra": (size,), **dict(reversed(request.items())), "more": ()}
        if secret.integers(2):
            del request[third]
    if kind == "missing":
        del request[victim]
    if kind == "unknown":
        request = {"extra": (1, 2), **request, victim + "_": (3,)}
    if kind == "edges":
        request = sized(low) if secret.integers(2) else sized(high)
    return request, profile, dims


for kinds, why in (
    (("none", "edges"), "合法的请求被拒绝了。范围的两端都包含在内，比的是最小和最大，不是最优。"),
    (("below", "above"), "差 1 越界的请求没有说对。每个张量、每个轴、两头都查了吗？数值取自 profile，而不是写死的吗？"),
    (("rank", "missing", "unknown"), "秩不对、缺张量、多张量的请求里有说错的。次序对吗？秩不对的张量不参加后面的比较。"),
    (("wild",), "毛病很多的请求没有说全，或者次序不对。列表里要有所有的毛病；同一个张量里同名的两维也要比较。"),
    (("several",), "几种毛病凑在一个请求里，没有说全，或者次序不对。三步依次写：profile 里的张量，多出来的张量，大小不一的维；一步里有毛病，后面的照样要看。"),
):
    cases = [drawn_case(kinds[number % len(kinds)]) for number in range(24)]
    check.equal([student.review(*case) for case in cases], [rule(*case) for case in cases], why=why)
### END HIDDEN TESTS

# %% [markdown]
# 用你写的 `review` 过一遍 `traffic.csv`：十二个不守规矩的请求都找到了吗？各错在哪里？

# %% tags=["demo"]
from collections import Counter

verdicts_of_traffic = Counter()
for _, batch, length in traffic.tolist():
    faults = review({"x": (batch, length, HIDDEN), "mask": (batch, length, 1)}, PROFILE, DIMS)
    for fault in faults:
        if fault[0] == "x":
            verdicts_of_traffic[("批大小" if fault[1] == 0 else "长度", f"{fault[2]} 到 {fault[3]}")] += 1
lab.say(lab.table(("哪一维", "允许", "拒绝的请求数"), [(*key, count) for key, count in verdicts_of_traffic.items()]), measured=False)

# %% [markdown]
# ### 练习二：哪个形状都对的运行器（3 分）
#
# 写 `make_runner(engine)`，返回一个对象，它有方法 `infer(x, mask)`：
#
# - `x`、`mask` 是 CuPy 数组，形状每次都可能不同，但总是合法的（这道题不用查）；
# - 返回 `(y, pooled)`，两个 CuPy 数组，**形状正好是这一次的**，不多一行；
# - 输出的存储按 Profile 的最大尺寸在 `make_runner` 里分配**一次**（照常用 CuPy 当前的分配器，例如 `cp.empty`），以后每次都用它：返回的数组总是从同一个地址开始，下一次 `infer` 会覆盖它们；
# - 形状向引擎和上下文问，不要写死；每个运行器有自己的上下文和存储，互不影响；
# - 每次都要设**两个**输入的形状：只设一个，另一个还停在上一次，就成了前面子进程里试过的那种不一致，运行笔记本的整个进程可能会退出；
# - 凡是可能返回 `False` 或 `None` 的调用都要检查，拒绝变成 `RuntimeError`（`require` 正好做这个）；分配不到显存时，让 `MemoryError` 原样抛出；
# - 在 `stream` 上入队，不必等它做完。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 输出最大有多大，谁知道？它要先知道什么才肯告诉你？这件事只需要做一次。
# 存储是一维的一大块；这一次的形状已知，怎样得到开头那一段、形状正好、而且连续的数组？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `engine.get_tensor_profile_shape(name, 0)` 返回 [最小, 最优, 最大]；`trt.nptype(engine.get_tensor_dtype(name))` 是 NumPy 的类型。
#
# `context.set_input_shape(name, shape)`、`context.get_tensor_shape(name)`、`context.set_tensor_address(name, 数组.data.ptr)`、`context.execute_async_v3(stream.ptr)`。
#
# `trt.volume(shape)` 是各维的乘积；`storage[:size].reshape(shape)` 是视图，不复制。在 `with stream:` 里分配。
#
# </details>

# %% solution="make_runner" tags=["gpu"]
def make_runner(engine: "trt.ICudaEngine"):
    """Make a runner with buffers for the largest outputs of the engine's profile 0.

    Returns an object whose infer(x, mask), cupy arrays of any legal shape, enqueues on `stream` and returns (y, pooled),
    cupy arrays of this request's exact shapes; they lie in the runner's own storage, which the next infer overwrites.
    """
    ### BEGIN SOLUTION: 先把上下文的输入都设成最大，问出两个输出的最大形状，各分配一块一维存储；infer 里设形状、问形状、取视图、设地址、入队
    context = require(engine.create_execution_context(), "创建执行上下文")
    for name in ("x", "mask"):
        require(context.set_input_shape(name, engine.get_tensor_profile_shape(name, 0)[2]), f"设置 {name} 的形状")
    storage = {}
    for name in ("y", "pooled"):
        with stream:
            storage[name] = cp.empty(trt.volume(context.get_tensor_shape(name)), trt.nptype(engine.get_tensor_dtype(name)))

    class Runner:
        def infer(self, x, mask):
            for name, array in (("x", x), ("mask", mask)):
                require(context.set_input_shape(name, array.shape), f"设置 {name} 的形状")
                require(context.set_tensor_address(name, array.data.ptr), f"设置 {name} 的地址")
            outputs = []
            for name, room in storage.items():
                shape = tuple(context.get_tensor_shape(name))
                outputs.append(room[: trt.volume(shape)].reshape(shape))
                require(context.set_tensor_address(name, room.data.ptr), f"设置 {name} 的地址")
            require(context.execute_async_v3(stream.ptr), "入队")
            return tuple(outputs)

    return Runner()
    ### END SOLUTION


# %% test="make_runner" kind="structure" points=3 tags=["gpu"]
def drawn_request(batch, length, hidden):
    """Secret x and mask of this size, float32."""
    x = secret.integers(-8, 9, (batch, length, hidden)).astype(np.float32)
    return x, secret.integers(0, 2, (batch, length, 1)).astype(np.float32)


def infers(runner, batch, length, hidden, why):
    """Run one request and compare both outputs, shapes included."""
    x, mask = drawn_request(batch, length, hidden)
    outputs = runner.infer(on_gpu(x), on_gpu(mask))
    two_arrays = isinstance(outputs, list) and len(outputs) == 2 and all(hasattr(output, "numpy") for output in outputs)
    check.that(two_arrays, why="infer 应当返回 (y, pooled)，两个 CuPy 数组。")
    check.equal([output.numpy() for output in outputs], list(reference.expected(x, mask)), why=why)


runner = student.make_runner(student.value("engine"))
infers(runner, 4, 64, 64, "最优形状 (4, 64) 的结果不对。形状、四个地址都设了吗？")
infers(runner, 16, 512, 64, "最大的形状 (16, 512) 不对。存储够大吗？")
infers(runner, 1, 8, 64, "大的之后来一个小的，(1, 8)，不对。返回的数组应当正好是这一次的形状，连续，而且不拖着上一次的尾巴。")
### BEGIN HIDDEN TESTS
for batch in (1, 16, 4, 8):
    for length in (8, int(secret.integers(9, 128)), 512, int(secret.integers(128, 512))):
        infers(runner, batch, length, 64, "批大小 1、4、8、16，长度 8 到 512 之间，有的形状结果不对。每次都重新设了形状、问了形状吗？")

WHERE = """
def addresses(runner, requests):
    kept = [runner.infer(x, mask) for x, mask in requests]
    return [[array.data.ptr for array in outputs] for outputs in kept]
"""
picks = [(1, 9), (16, 300), (4, 64), (8, 511), (1, 8), (16, 512)]
requests = [[on_gpu(array) for array in drawn_request(*pick, 64)] for pick in picks]
where = student.define(WHERE, "addresses")(student.make_runner(student.value("engine")), requests)  # a new one: nothing large yet
check.equal(where, [where[0]] * len(picks), why="输出的存储换了地方。它应当按最大尺寸只分配一次，每次都从同一个地址开始。")

rivals = [runner, student.make_runner(student.value("engine"))]
shapes = [(8, int(secret.integers(100, 200))), (1, int(secret.integers(300, 500)))]
sent = [drawn_request(*shape, 64) for shape in shapes]
answers = [rival.infer(on_gpu(x), on_gpu(mask)) for rival, (x, mask) in zip(rivals, sent, strict=True)]
for answer, (x, mask) in zip(answers, sent, strict=True):
    for got, want in zip(answer, reference.expected(x, mask), strict=True):
        check.equal(got, want, why="两个运行器交替使用，结果互相干扰。上下文和存储都要各有各的。")

other = {"x": ((2, 3, 32), (2, 20, 32), (5, 70, 32)), "mask": ((2, 3, 1), (2, 20, 1), (5, 70, 1))}
narrow = student.build_encoder(other, 32)
runner = student.make_runner(narrow)
for batch, length in ((5, 70), (2, 3), (3, int(secret.integers(10, 60)))):
    infers(runner, batch, length, 32, "换一个特征数和范围都不同的引擎，结果就不对了。尺寸是不是写死了？")

SHORT_OF_MEMORY = """
def make_with_little_memory(make_runner, engine):
    import cupy
    usual, small = cupy.cuda.get_allocator(), cupy.cuda.MemoryPool()
    small.set_limit(size=1024)
    cupy.cuda.set_allocator(small.malloc)
    try:
        return make_runner(engine)
    finally:
        cupy.cuda.set_allocator(usual)
"""
squeezed = student.define(SHORT_OF_MEMORY, "make_with_little_memory")
check.raises("MemoryError", squeezed, student.value("make_runner"), student.value("engine"), why="显存不够时，make_runner 应当让 MemoryError 抛出来，而不是返回一个没有存储的运行器。输出的存储是不是没有在 make_runner 里分配？")
infers(runner, 4, 33, 32, "别处分配失败以后，原来的运行器应当照常工作。")
infers(student.make_runner(student.value("engine")), 4, 100, 64, "显存恢复以后，make_runner 应当照常工作。")

DENYING = """
class Denying:
    '''Stands for an engine: the answer to one call, told by deny (0: the next), is None for a context, else False.'''
    def __init__(self, engine):
        self._engine, self._left, self._queues = engine, -1, []
    def __getattr__(self, name):
        return getattr(self._engine, name)
    def create_execution_context(self, *args, **kwargs):
        made = self._engine.create_execution_context(*args, **kwargs)
        return None if self.denied() else Context(self, made)
    def deny(self, number):
        self._left = number
    def denied(self):
        self._left -= 1
        return self._left == -1
    def asked(self):
        return -1 - self._left
    def queues(self):
        return self._queues

class Context:
    def __init__(self, denying, context):
        self._denying, self._context = denying, context
    def __getattr__(self, name):
        found = getattr(self._context, name)
        if not name.startswith(("set_", "execute")):
            return found
        def call(*args, **kwargs):
            if name == "execute_async_v3":
                self._denying._queues += map(int, [*args, *kwargs.values()][:1])
                return False if self._denying.denied() else found(*args, **kwargs)
            result = found(*args, **kwargs)
            return False if result is True and self._denying.denied() else result
        return call

def serve_one(make_runner, engine, x, mask):
    import cupy
    runner = make_runner(engine)
    runner.infer(x, mask)
    cupy.cuda.runtime.deviceSynchronize()  # a context must not go while its work is under way
"""
denying, serve_one = student.define(DENYING, "Denying")(student.value("engine")), student.define(DENYING, "serve_one")
request = [on_gpu(array) for array in drawn_request(16, 512, 64)]
denying.deny(-1)
serve_one(student.value("make_runner"), denying, *request)
asked = denying.asked()
check.that(set(denying.queues()) == {student.value("stream").get("ptr")}, why="infer 应当用传入的引擎的上下文、在给定的 stream 上入队。")
for number in range(min(asked, 20)):
    denying.deny(number)
    check.raises("RuntimeError", serve_one, student.value("make_runner"), denying, *request, why="建上下文、设形状、设地址、入队都可能被拒绝（None 或 False），有一处没有检查返回值。每一处都要变成 RuntimeError，而不是继续往下走。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：拦在启动之前（3 分）
#
# 写 `make_checked_runner(engine)`，返回一个对象，它有方法 `infer(x, mask, y, pooled)`：四个都由调用者给，结果写进 `y` 和 `pooled`，不返回什么。
# 这次的调用者什么都可能给。规矩是：**先查，再碰**。
#
# | 毛病 | 抛出 |
# |:--|:--|
# | 不是 `cp.ndarray`（例如 NumPy 数组、`None`、列表） | `TypeError` |
# | 数据类型和引擎的不同 | `TypeError` |
# | 不连续（`flags.c_contiguous` 为假） | `ValueError` |
# | `x`、`mask` 的形状不合法：秩、每一维的两头、静态维、两者的批大小或长度不一致 | `ValueError` |
# | `y`、`pooled` 的形状不正好等于这一次的输出形状（太大也不行） | `ValueError` |
# | TensorRT 的任何一次拒绝（`False`） | `RuntimeError`，`require` 正好做这个 |
#
# - 抛出以后，`y`、`pooled` 一个字节也没有变，也没有入过队；
# - 下一个合法的请求照常得到正确的结果；
# - 这道题不求省：每次 `infer` 都重设两个形状和四个地址，省下来是练习四的事；
# - 异常的文字要说清楚哪个张量、错在哪里（测试不比较文字，但以后会感谢自己）。
#
# 这道题里，测试套在引擎外面的那一层还有一道护栏：万一 `x`、`mask` 不一致还要往下走，它会抛出 `RuntimeError`，免得运行你的代码的进程真的退出。
#
# 给定的 `profile_of(engine)` 把引擎的 Profile 变成 `review` 要的样子；特征数和范围都从引擎来，不要写死。

# %% tags=["gpu"]
def profile_of(engine: "trt.ICudaEngine"):
    """The engine's profile 0 as PROFILE has it: input name -> (min, opt, max), tuples of int, in the engine's order."""
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    return {name: tuple(tuple(shape) for shape in engine.get_tensor_profile_shape(name, 0)) for name in inputs}


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 四个参数先逐个看“是什么”，再看形状。输入的形状可以在碰上下文之前查完；输出该是什么形状，要设好输入之后才问得到。
# 如果在那之后才发现 `y` 不对，抛出异常：上下文已经记住了新的输入形状，这要紧吗？下一次 `infer` 从哪里开始？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `isinstance(array, cp.ndarray)`；`array.dtype == trt.nptype(engine.get_tensor_dtype(name))`；`array.flags.c_contiguous`。
#
# `review({"x": x.shape, "mask": mask.shape}, profile_of(engine), DIMS)` 返回所有的毛病（如果练习一已经通过）。
#
# 输出：`tuple(context.get_tensor_shape(name))` 和 `array.shape` 比较。
#
# </details>

# %% solution="make_checked_runner" tags=["gpu"]
def make_checked_runner(engine: "trt.ICudaEngine"):
    """Make a runner that refuses bad requests before anything is enqueued.

    Returns an object whose infer(x, mask, y, pooled), cupy arrays, enqueues on `stream` and writes y and pooled. Raises
    TypeError for what is no cupy array or of another dtype, ValueError for shapes and layouts, RuntimeError where TensorRT
    refuses; y and pooled are then as they were, and the runner goes on.
    """
    ### BEGIN SOLUTION: 先查四个参数的类型、数据类型和连续，再用 review 查两个输入的形状；设好输入，问出输出的形状，和 y、pooled 比；最后才设地址、入队
    context = require(engine.create_execution_context(), "创建执行上下文")
    profile = profile_of(engine)
    dtypes = {name: np.dtype(trt.nptype(engine.get_tensor_dtype(name))) for name in ("x", "mask", "y", "pooled")}

    class Runner:
        def infer(self, x, mask, y, pooled):
            arrays = {"x": x, "mask": mask, "y": y, "pooled": pooled}
            for name, array in arrays.items():
                if not isinstance(array, cp.ndarray):
                    raise TypeError(f"{name} 应当是 GPU 上的 cupy.ndarray，得到的是 {type(array).__name__}")
                if array.dtype != dtypes[name]:
                    raise TypeError(f"{name} 的数据类型应当是 {dtypes[name]}，得到的是 {array.dtype}")
                if not array.flags.c_contiguous:
                    raise ValueError(f"{name} 在显存里不连续，TensorRT 只认地址，会读错")
            faults = review({"x": x.shape, "mask": mask.shape}, profile, DIMS)
            if faults:
                raise ValueError(f"请求的形状不合法：{faults}")
            for name in ("x", "mask"):
                require(context.set_input_shape(name, arrays[name].shape), f"设置 {name} 的形状")
            for name in ("y", "pooled"):
                shape = tuple(context.get_tensor_shape(name))
                if arrays[name].shape != shape:
                    raise ValueError(f"{name} 的形状应当是 {shape}，得到的是 {arrays[name].shape}")
            for name, array in arrays.items():
                require(context.set_tensor_address(name, array.data.ptr), f"设置 {name} 的地址")
            require(context.execute_async_v3(stream.ptr), "入队")

    return Runner()
    ### END SOLUTION


# %% test="make_checked_runner" kind="structure" points=3 tags=["gpu"]
WATCHED = """
class Watched:
    '''Stands for an engine: notes the calls of its contexts' methods, and answers False to the one told by deny (0: the next).'''
    def __init__(self, engine):
        self._engine, self._calls, self._queues, self._left = engine, [], [], -1
    def __getattr__(self, name):
        return getattr(self._engine, name)
    def create_execution_context(self, *args, **kwargs):
        return Context(self, self._engine.create_execution_context(*args, **kwargs))
    def seen(self):
        calls, self._calls = self._calls, []
        return calls
    def queues(self):
        queues, self._queues = self._queues, []
        return queues
    def deny(self, number):
        self._left = number
    def denied(self):
        self._left -= 1
        return self._left == -1

class Context:
    def __init__(self, watched, context):
        self._watched, self._context, self._sizes = watched, context, {}
    def note(self, name, shape):
        self._sizes[name] = tuple(shape)[:2]
    def guard(self, call, given):
        derives = call in ("infer_shapes", "execute_async_v3") or (call == "get_tensor_shape" and given[0] in ("y", "pooled"))
        if derives and len(set(self._sizes.values())) > 1:
            self._watched._calls.append("clash")
            raise RuntimeError(f"上下文里 x 和 mask 的形状不一致，却调用了 {call}：TensorRT 可能让整个进程退出，测试替它拦下了。")
    def __getattr__(self, name):
        found = getattr(self._context, name)
        if not callable(found):
            return found
        def call(*args, **kwargs):
            if name.startswith(("set_", "execute")) and self._watched.denied():
                return False
            self._watched._calls.append(name)
            if name == "execute_async_v3":
                self._watched._queues += map(int, [*args, *kwargs.values()][:1])
            self.guard(name, [*args, *kwargs.values()])
            result = found(*args, **kwargs)
            if name == "set_input_shape" and result:
                self.note(*args, **kwargs)
            return result
        return call
"""
CUT = """
def part(array, *ends):
    return array[tuple(slice(0, end) for end in ends)]
"""


class Desk:
    """One runner, its watched engine, and poisoned outputs that must stay as they are when a request is refused."""

    def __init__(self, engine, hidden, batch, length):
        self.watched = student.define(WATCHED, "Watched")(engine)
        self.runner, self.hidden = student.make_checked_runner(self.watched), hidden
        self.takes(batch, length)

    def takes(self, batch, length):
        """From now on the legal requests are of this size."""
        self.x, self.mask = (on_gpu(array) for array in self.drawn(batch, length))
        self.y, self.pooled = (on_gpu(np.zeros((batch, rows, self.hidden), np.float32)) for rows in (length, 1))

    def drawn(self, batch, length):
        x = secret.integers(-8, 9, (batch, length, self.hidden)).astype(np.float32)
        return x, secret.integers(0, 2, (batch, length, 1)).astype(np.float32)

    def refuses(self, error, why, **given):
        """Call with the legal arguments, changed by `given`: must raise, launch nothing and leave the outputs alone."""
        marks = [buffer.write(np.full(buffer.shape, mark, np.float32)) for buffer, mark in ((self.y, -77), (self.pooled, -55))]
        self.watched.seen()
        arguments = {"x": self.x, "mask": self.mask, "y": self.y, "pooled": self.pooled} | given
        check.raises(error, self.runner.infer, arguments["x"], arguments["mask"], arguments["y"], arguments["pooled"], why=why)
        calls = self.watched.seen()
        student.value("stream").synchronize()
        check.that("clash" not in calls, why="x 和 mask 的形状不一致，却已经交给 TensorRT 去推导了，它可能让整个进程退出。自己先查，再碰它。")
        found = [calls.count("execute_async_v3"), self.y.read(), self.pooled.read()]
        check.equal(found, [0, *marks], why="请求被拒绝了，却已经入过队，或者输出缓冲变了。所有的检查都要在 execute_async_v3 之前做完。")

    def serves(self, why):
        """The legal request must give the right result."""
        x, mask = self.drawn(*self.x.shape[:2])
        self.x.write(x)
        self.mask.write(mask)
        for buffer in (self.y, self.pooled):
            buffer.poison()
        self.watched.seen()
        self.watched.queues()
        self.runner.infer(self.x, self.mask, self.y, self.pooled)
        self.calls, queues = self.watched.seen(), self.watched.queues()
        student.value("stream").synchronize()
        check.equal(self.calls.count("execute_async_v3"), 1, why="一个合法的请求，应当用传入的引擎的上下文入队正好一次。")
        check.equal(queues, [student.value("stream").get("ptr")], why="请求应当在给定的 stream 上入队。")
        check.equal([self.y.read(), self.pooled.read()], list(reference.expected(x, mask)), why=why)


def zeros(*shape, dtype=np.float32):
    return on_gpu(np.zeros(shape, dtype))


desk = Desk(student.value("engine"), 64, 4, 64)
desk.serves("合法的请求 (4, 64) 结果不对。")
desk.refuses("ValueError", "长度 513 超出了范围。", x=zeros(4, 513, 64), mask=zeros(4, 513, 1), y=zeros(4, 513, 64))
desk.refuses("TypeError", "x 是 NumPy 数组，它的数据不在 GPU 上。", x=np.zeros((4, 64, 64), np.float32))
desk.refuses("ValueError", "y 只有 63 个 token 的位置，写下去就会越界。", y=zeros(4, 63, 64))
desk.serves("拒绝了几个请求之后，合法的请求结果不对。")
### BEGIN HIDDEN TESTS
cut = student.define(CUT, "part")
for why, given in (
    ("长度 7 比最小还小。", {"x": zeros(4, 7, 64), "mask": zeros(4, 7, 1), "y": zeros(4, 7, 64)}),
    ("批大小 17 比最大还大。", {"x": zeros(17, 64, 64), "mask": zeros(17, 64, 1), "y": zeros(17, 64, 64), "pooled": zeros(17, 1, 64)}),
    ("空的批（批大小 0）要拒绝。", {"x": cut(zeros(1, 64, 64), 0), "mask": cut(zeros(1, 64, 1), 0)}),
    ("静态的一维不对。", {"x": zeros(4, 64, 63)}),
    ("mask 的最后一维应当是 1。", {"mask": zeros(4, 64, 2)}),
    ("x 少了一维。", {"x": zeros(64, 64)}),
    ("mask 多了一维。", {"mask": zeros(4, 64, 1, 1)}),
    ("x 和 mask 的长度不一致。", {"mask": zeros(4, 32, 1)}),
    ("mask 的批大小是 1：不允许广播。", {"mask": zeros(1, 64, 1)}),
    ("x 不连续。", {"x": cut(zeros(4, 128, 64), 4, 64)}),
    ("mask 不连续。", {"mask": cut(zeros(4, 128, 1), 4, 64)}),
    ("y 不连续。", {"y": cut(zeros(4, 128, 64), 4, 64)}),
    ("pooled 不连续。", {"pooled": cut(zeros(4, 2, 64), 4, 1)}),
    ("静态的一维太大。", {"x": zeros(4, 64, 65)}),
    ("mask 的最后一维是 0。", {"mask": cut(zeros(4, 64, 1), 4, 64, 0)}),
    ("y 太大：形状要正好。", {"y": zeros(4, 65, 64)}),
    ("y 的最后一维太小。", {"y": zeros(4, 64, 63)}),
    ("y 的元素个数够，形状却不同。", {"y": zeros(8, 32, 64)}),
    ("pooled 太小。", {"pooled": zeros(3, 1, 64)}),
    ("pooled 太大。", {"pooled": zeros(5, 1, 64)}),
    ("pooled 少了一维。", {"pooled": zeros(4, 64)}),
):
    desk.refuses("ValueError", why, **given)
desk.serves("拒绝了许多请求之后，合法的请求结果不对。")
for why, given in (
    ("x 是 float64。", {"x": zeros(4, 64, 64, dtype=np.float64)}),
    ("x 是 int32：和 float32 一样长，但不是一回事。", {"x": zeros(4, 64, 64, dtype=np.int32)}),
    ("x 是 None。", {"x": None}),
    ("mask 是 float16。", {"mask": zeros(4, 64, 1, dtype=np.float16)}),
    ("mask 是 int32。", {"mask": zeros(4, 64, 1, dtype=np.int32)}),
    ("mask 是 NumPy 数组。", {"mask": np.ones((4, 64, 1), np.float32)}),
    ("y 是 int32。", {"y": zeros(4, 64, 64, dtype=np.int32)}),
    ("y 是 NumPy 数组。", {"y": np.zeros((4, 64, 64), np.float32)}),
    ("pooled 是 float64。", {"pooled": zeros(4, 1, 64, dtype=np.float64)}),
    ("pooled 是 None。", {"pooled": None}),
    ("pooled 是列表。", {"pooled": [0.0] * 4}),
):
    desk.refuses("TypeError", why, **given)
desk.serves("拒绝了数据类型不对的请求之后，合法的请求结果不对。")
desk.serves("合法的请求结果不对。")
calls = [call for call in desk.calls if call.startswith(("set_", "execute"))]
for number in range(min(len(calls), 20)):
    desk.watched.deny(number)
    desk.refuses("RuntimeError", "设形状、设地址或者入队返回了 False（不一定是对第一个张量），应当变成 RuntimeError，而不是继续往下走。")
    desk.serves("TensorRT 拒绝过一次之后，合法的请求结果不对。")
for batch, length in ((16, 512), (1, 8), (4, int(secret.integers(9, 500)))):
    desk.takes(batch, length)
    desk.serves("换一个合法的形状，请求被拒绝了，或者结果不对。范围的两端都包含在内；形状每次都要重设。")

limits = {"x": ((2, 3, 32), (2, 20, 32), (5, 70, 32)), "mask": ((2, 3, 1), (2, 20, 1), (5, 70, 1))}
desk = Desk(student.build_encoder(limits, 32), 32, 3, int(secret.integers(10, 60)))
desk.serves("换一个范围不同的引擎，合法的请求结果不对。尺寸是不是写死了？")
for batch, length in ((5, 70), (2, 3)):
    desk.takes(batch, length)
    desk.serves("换一个范围不同的引擎，最大或最小的请求结果不对。范围的两端都包含在内。")
for batch, length in ((1, 20), (6, 20), (3, 2), (3, 71), (4, 512)):
    desk.refuses("ValueError", "换一个范围不同的引擎，越界的请求没有被拒绝。范围要从引擎来。", x=zeros(batch, length, 32), mask=zeros(batch, length, 1), y=zeros(batch, length, 32), pooled=zeros(batch, 1, 32))
desk.serves("换一个范围不同的引擎，拒绝之后合法的请求结果不对。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：只重设变了的（3 分）
#
# 服务把请求分了桶，或者按形状排好了队，相邻的请求就常常形状相同，缓冲也来来回回就那几块。写 `make_steady_runner(engine)`，返回一个对象，它有方法 `infer(x, mask, y, pooled)`，
# 结果写进 `y` 和 `pooled`：
#
# - 四个参数都是类型正确、连续的 CuPy 数组，`y`、`pooled` 的形状与这一次相配（这道题不用查）；
# - `x`、`mask` 的**形状**仍可能不合法：那时抛出 `ValueError`，不入队。合法与否只在形状变了的时候查；
# - 形状没有变，就不碰形状；某个地址没有变，就不碰那个地址。**什么都没有变的时候，对上下文的调用只有一次 `execute_async_v3`**；
# - 变了的一定要重设：形状相同、换了缓冲；缓冲相同、换了形状；两者都换；
# - TensorRT 的拒绝（`False`）照旧变成 `RuntimeError`；设到一半失败的，不能算设过，下一个请求要重设；
# - 被拒绝的请求之后，下一个合法的请求照常正确；
# - 不同步，不分配，不用 CUDA 图（图是“实战篇”的事，这里比的是少做无用的调用）。
#
# 速度：用给定的 `relay` 连续推理，`y` 与 `x` 互换角色，所以每次都有两个地址变了。形状是 (4, 64)。
# 端到端时间（从开始提交到整个设备做完）不超过 `naive_relay` 的一半得满分。如果在这台机器上参考实现自己也快得不多，门槛会降到它的加速比的一半。

# %% tags=["gpu"]
def relay(runner, a, b, mask, pooled):
    """Two requests in a row: a → b, then b → a. a, b: cupy float32, same shape. Does not wait."""
    runner.infer(a, mask, b, pooled)
    runner.infer(b, mask, a, pooled)


def naive_relay(a, mask):
    """The same two requests by naive_infer, which allocates its outputs and waits. The baseline of this exercise."""
    once = naive_infer({"x": a, "mask": mask})
    naive_infer({"x": once["y"], "mask": mask})


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 运行器要记住什么，才能知道“变了没有”？形状和地址各记一份，分别比较。
# 如果设 `x` 的形状成功了，设 `mask` 的时候出了错，上下文停在什么状态？你记的那一份还可信吗？先作废，还是先设置？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 元组可以直接比较：`(x.shape, mask.shape) != self.shapes`。地址是 `array.data.ptr`，一个整数，四个各比各的。
# 把 `context.set_tensor_address` 这样的方法先取出来放在局部变量里，能省一点查找的时间。
# 检查形状可以用 `review` 和 `profile_of`，只在形状变了的时候。
#
# </details>

# %% solution="make_steady_runner" tags=["gpu"]
def make_steady_runner(engine: "trt.ICudaEngine"):
    """Make a runner that sets again only what has changed since the last request.

    Returns an object whose infer(x, mask, y, pooled), contiguous cupy arrays of the right dtypes, enqueues on `stream`,
    without waiting. ValueError, and nothing enqueued, if the shapes of x and mask are not legal.
    """
    ### BEGIN SOLUTION: 记住上一次的形状和四个地址；形状变了才查、才设，而且先作废再设；地址逐个比较，变了才设；最后入队
    context = require(engine.create_execution_context(), "创建执行上下文")
    profile = profile_of(engine)
    set_address, enqueue, handle = context.set_tensor_address, context.execute_async_v3, stream.ptr

    class Runner:
        def __init__(self):
            self.shapes, self.addresses = None, {}

        def infer(self, x, mask, y, pooled):
            shapes = (x.shape, mask.shape)
            if shapes != self.shapes:
                faults = review({"x": x.shape, "mask": mask.shape}, profile, DIMS)
                if faults:
                    raise ValueError(f"请求的形状不合法：{faults}")
                self.shapes = None  # until both are set, the context's state is nobody's
                require(context.set_input_shape("x", x.shape), "设置 x 的形状")
                require(context.set_input_shape("mask", mask.shape), "设置 mask 的形状")
                self.shapes = shapes
            addresses = self.addresses
            for name, array in (("x", x), ("mask", mask), ("y", y), ("pooled", pooled)):
                address = array.data.ptr
                if addresses.get(name) != address:
                    require(set_address(name, address), f"设置 {name} 的地址")
                    addresses[name] = address
            if not enqueue(handle):
                require(False, "入队")

    return Runner()
    ### END SOLUTION


# %% test="make_steady_runner_result" kind="structure" points=1 tags=["gpu"]
COUNTED = """
class Watched:
    '''Stands for an engine: notes the calls of its contexts' methods, and answers False once to the one told by deny.'''
    def __init__(self, engine):
        self._engine, self._calls, self._denied = engine, [], ("", None)
    def __getattr__(self, name):
        return getattr(self._engine, name)
    def create_execution_context(self, *args, **kwargs):
        return Context(self, self._engine.create_execution_context(*args, **kwargs))
    def seen(self):
        calls, self._calls = self._calls, []
        return sorted(calls)
    def deny(self, name, tensor):
        self._denied = name, tensor

class Context:
    def __init__(self, watched, context):
        self._watched, self._context, self._sizes = watched, context, {}
    def note(self, name, shape):
        self._sizes[name] = tuple(shape)[:2]
    def guard(self, call, given):
        derives = call in ("infer_shapes", "execute_async_v3") or (call == "get_tensor_shape" and given[0] in ("y", "pooled"))
        if derives and len(set(self._sizes.values())) > 1:
            self._watched._calls.append("clash")
            raise RuntimeError(f"上下文里 x 和 mask 的形状不一致，却调用了 {call}：TensorRT 可能让整个进程退出，测试替它拦下了。")
    def __getattr__(self, name):
        found = getattr(self._context, name)
        if not callable(found):
            return found
        def call(*args, **kwargs):
            self._watched._calls.append(name)
            denied, tensor = self._watched._denied
            if name == denied and tensor in (None, kwargs.get("name", *args[:1])):
                self._watched._denied = "", None
                return False
            self.guard(name, [*args, *kwargs.values()])
            result = found(*args, **kwargs)
            if name == "set_input_shape" and result:
                self.note(*args, **kwargs)
            return result
        return call
"""


class Line:
    """A steady runner on a watched engine, fed from buffers that are reused."""

    def __init__(self, engine, hidden):
        self.watched = student.define(COUNTED, "Watched")(engine)
        self.runner, self.hidden = student.make_steady_runner(self.watched), hidden

    def buffers(self, batch, length):
        shapes = ((batch, length, self.hidden), (batch, length, 1), (batch, length, self.hidden), (batch, 1, self.hidden))
        return [on_gpu(np.zeros(shape, np.float32)) for shape in shapes]

    def serves(self, buffers, why):
        """New data in place, poisoned outputs, one infer, both outputs compared. Returns the context's calls."""
        x, mask, y, pooled = buffers
        x_data = x.write(secret.integers(-8, 9, x.shape).astype(np.float32))
        mask_data = mask.write(secret.integers(0, 2, mask.shape).astype(np.float32))
        y.poison()
        pooled.poison()
        self.watched.seen()
        self.runner.infer(x, mask, y, pooled)
        calls = self.watched.seen()
        student.value("stream").synchronize()
        check.equal([y.read(), pooled.read()], list(reference.expected(x_data, mask_data)), why=why)
        return calls


line = Line(student.value("engine"), 64)
first, second = line.buffers(4, 64), line.buffers(4, 64)
line.serves(first, "第一个请求的结果不对。")
check.equal(line.serves(first, "同样的缓冲，换了数据，结果不对：数据是就地变的，仍要入队。"), ["execute_async_v3"], why="形状和地址都没有变，对上下文的调用应当只有一次 execute_async_v3。")
line.serves(second, "形状没有变、缓冲换了，结果不对：地址变了就要重设。")
third = line.buffers(8, 100)
line.serves(third, "形状和缓冲都换了，结果不对。")
line.serves(first, "换回第一个形状，结果不对。")
check.raises("ValueError", line.runner.infer, *line.buffers(4, 513), why="长度 513 不合法，应当抛出 ValueError。")
### BEGIN HIDDEN TESTS
line.serves(second, "拒绝了一个请求之后，合法的请求结果不对。")
x, mask, y, pooled = first
check.equal(line.serves([second[0], mask, second[2], second[3]], "只有 mask 换了缓冲，结果不对：四个地址要分别比较。"), ["execute_async_v3", "set_tensor_address"], why="只有一个地址变了，应当只重设这一个。")
line.serves([second[0], mask, y, second[3]], "只有 y 换了缓冲，结果不对：四个地址要分别比较。")
line.serves([second[0], mask, y, pooled], "只有 pooled 换了缓冲，结果不对：四个地址要分别比较。")
line.serves([x, mask, y, pooled], "只有 x 换了缓冲，结果不对：四个地址要分别比较。")

RESHAPED = """
def infer_as(runner, batch, length, x, mask, y, pooled):
    runner.infer(x.reshape(batch, length, -1), mask.reshape(batch, length, 1), y.reshape(batch, length, -1), pooled[:batch])
"""
infer_as = student.define(RESHAPED, "infer_as")
for batch, length in ((2, 128), (4, 64), (1, 256)):
    x_data, mask_data = x.write(secret.integers(-8, 9, x.shape).astype(np.float32)), mask.write(secret.integers(0, 2, mask.shape).astype(np.float32))
    y.poison()
    pooled.poison()
    line.watched.seen()
    infer_as(line.runner, batch, length, x, mask, y, pooled)
    calls = line.watched.seen()
    student.value("stream").synchronize()
    check.that("set_tensor_address" not in calls, why="形状变了，四个地址都没有变，却又设了地址。地址没有变，就不碰它。")
    y_want, pooled_want = reference.expected(x_data.reshape(batch, length, 64), mask_data.reshape(batch, length, 1))
    check.equal(y.read(), y_want.reshape(y.shape), why="缓冲没有变、形状变了，结果不对：地址相同不等于形状相同。")
    check.equal(pooled.read()[:batch], pooled_want, why="缓冲没有变、形状变了，pooled 不对：地址相同不等于形状相同。")

line.serves(first, "换过几个形状之后，结果不对。")
wrong = line.buffers(8, 100)
for bad in (line.buffers(4, 100)[1], line.buffers(1, 100)[1], line.buffers(8, 7)[1]):
    line.watched.seen()
    check.raises("ValueError", line.runner.infer, wrong[0], bad, wrong[2], wrong[3], why="x 合法而 mask 不合法（或者两者不一致），应当抛出 ValueError。")
    calls = line.watched.seen()
    check.that("execute_async_v3" not in calls, why="不合法的请求入队了。")
    check.that("clash" not in calls, why="x 和 mask 的形状不一致，却已经交给 TensorRT 去推导了，它可能让整个进程退出。自己先查，再碰它。")
    line.serves(first, "x 合法、mask 不合法的请求被拒绝以后，原来的形状结果不对：上下文已经被改了一半，记着的形状却没有作废。")
check.raises("ValueError", line.runner.infer, x, line.buffers(4, 32)[1], y, pooled, why="x 的形状没有变，mask 的却变了，而且与 x 不一致：应当抛出 ValueError。两个输入的形状都要看。")
for tensor in ("x", "mask"):
    for follows, why in (
        (first, "设形状半途失败以后，回到原来的形状，结果不对：记着的形状应当先作废。"),
        (wrong, "设形状半途失败以后，同样的形状再来一次，结果不对：失败的那一次不能算设过。"),
    ):
        line.serves(first, "换过几个形状之后，结果不对。")
        line.watched.deny("set_input_shape", tensor)
        line.watched.seen()
        check.raises("RuntimeError", line.runner.infer, *wrong, why="set_input_shape 返回 False，应当变成 RuntimeError。")
        check.that("clash" not in line.watched.seen(), why="set_input_shape 返回了 False，却还在往下走：两个输入的形状已经不一致，TensorRT 可能让整个进程退出。")
        line.serves(follows, why)
for number, tensor in enumerate(("x", "mask", "y", "pooled")):
    line.serves(first, "换过几个形状之后，结果不对。")
    changed = [*first[:number], second[number], *first[number + 1 :]]
    line.watched.deny("set_tensor_address", tensor)
    check.raises("RuntimeError", line.runner.infer, *changed, why="set_tensor_address 返回 False，应当变成 RuntimeError。四个地址都要看。")
    line.serves(changed, "设地址失败以后，同样的缓冲再来一次，结果不对：失败的那一次不能算设过。")
for buffers in (changed, second):
    line.watched.deny("execute_async_v3", None)
    check.raises("RuntimeError", line.runner.infer, *buffers, why="execute_async_v3 返回 False，应当变成 RuntimeError。")
    line.serves(buffers, "入队被拒绝以后，同样的请求再来一次，结果不对。")
limits = {"x": ((2, 3, 32), (2, 20, 32), (5, 70, 32)), "mask": ((2, 3, 1), (2, 20, 1), (5, 70, 1))}
line = Line(student.build_encoder(limits, 32), 32)
check.raises("ValueError", line.runner.infer, *line.buffers(1, 20), why="换一个范围不同的引擎，越界的请求没有被拒绝。")
for batch, length in ((5, 70), (2, 3), (3, int(secret.integers(10, 60)))):
    line.serves(line.buffers(batch, length), "换一个尺寸不同的引擎，结果不对。")
### END HIDDEN TESTS

# %% test="make_steady_runner_speed" kind="speedup" points=2 tags=["gpu"]
SHAPE = (4, 64, 64)


def integers():
    return secret.integers(-8, 8, SHAPE).astype(np.float32)


mask = secret.integers(0, 2, (4, 64, 1)).astype(np.float32)
x, z = on_gpu(integers()), on_gpu(integers())
own = [on_gpu(np.zeros(SHAPE, np.float32)), on_gpu(mask), on_gpu(np.zeros((4, 1, 64), np.float32))]
theirs = [on_gpu(np.zeros(SHAPE, np.float32)), on_gpu(mask), on_gpu(np.zeros((4, 1, 64), np.float32))]
TWICE = """
def twice(runner, a, b, mask, pooled):
    runner.infer(a, mask, b, pooled)
    runner.infer(b, mask, a, pooled)
"""
twice = student.define(TWICE, "twice")
runner = student.make_steady_runner(student.value("engine"))
yardstick = reference.make_steady_runner(reference.value("engine"))
check.speedup(
    partial(twice, runner, x, *own),
    over=partial(reference.naive_relay, on_gpu(integers()), on_gpu(mask)),
    best=partial(reference.relay, yardstick, z, *theirs),
    state=(x, z),
    at_least=2.0,
    draw=integers,
    abs=0.5,
    why="还不够快。形状没有变的时候，是不是还在设形状、推导、分配、同步，或者每次都在查形状？",
)
### BEGIN HIDDEN TESTS
data = x.write(integers())
for _ in range(3):
    twice(runner, x, *own)
    for _ in range(2):
        data, pooled_want = reference.expected(data, mask)
student.value("stream").synchronize()
check.equal(x.read(), data, why="计时以后再跑几次，结果不对：快，但没有做完该做的工作。")
check.equal(own[2].read(), pooled_want, why="计时以后再跑几次，pooled 不对：快，但没有做完该做的工作。")

LOOK_ON = """
def allocations(stream, runner, x, y, mask, pooled):
    '''How often two requests in a row allocate through CuPy.'''
    import cupy
    usual, sizes = cupy.cuda.get_allocator(), []
    def counted(size):
        sizes.append(size)
        return usual(size)
    cupy.cuda.set_allocator(counted)
    try:
        with stream:
            runner.infer(x, mask, y, pooled)
            runner.infer(y, mask, x, pooled)
    finally:
        cupy.cuda.set_allocator(usual)
    return len(sizes)

def recorded(stream, runner, x, y, mask, pooled):
    '''What two requests in a row put on the stream, as a graph; None if they waited for it.'''
    from cupy.cuda.runtime import CUDARuntimeError
    with stream:
        stream.begin_capture()
        try:
            runner.infer(x, mask, y, pooled)
            runner.infer(y, mask, x, pooled)
        except CUDARuntimeError:
            pass
        finally:
            try:
                graph = stream.end_capture()
            except CUDARuntimeError:
                graph = None
    return graph
"""
y, mask_buffer, pooled = own
allocated = student.define(LOOK_ON, "allocations")(student.value("stream"), runner, x, y, mask_buffer, pooled)
check.equal(allocated, 0, why="形状和地址都稳定的时候，infer 还在分配显存。输出是调用者给的，这里什么都不用分配。")
waits = student.define(LOOK_ON, "recorded")(student.value("stream"), runner, x, y, mask_buffer, pooled)
check.nodes(waits, kernels=(2, None), children=0, why="两次 infer 应当只是在给定的 stream 上入队两次推理：不同步，不放到别的流上，也不启动图。")
### END HIDDEN TESTS

# %% [markdown] tags=["instructor"]
# 给教师：网络的状态是整数，折回 −8…7，每一步有 ReLU，所以不是仿射映射，几千步内不重复、不收敛；计时用的是测试自带的 `twice`，和 `relay` 一样，跑 K 次就是 2K 次真的入队。
# 练习三、四用 `Watched` 代替引擎：它记下对上下文的每次调用，也能让某一次返回 `False`；练习二用 `Denying`。练习二、三里，每个可能被拒绝的调用都轮到一次。
# 练习四专门考“设到一半失败”：
# `x` 的形状已经改了、`mask` 被拒绝，记着的形状如果没有作废，下一个合法的请求就会用错形状。
# `Watched` 还有一道护栏：`x`、`mask` 在上下文里不一致时，推导和入队都被它拦下，因为真的交给 TensorRT，学生的 Jupyter 内核进程可能就没了。
# 练习四计时以后，再换上一个会数次数的分配器走两次，看它有没有分配；又在 `stream` 的捕获里走两次：等待会报错，别的流上的工作录不进来，也不许启动图。
# 练习二换上一个只有 1 KiB 的 CuPy 内存池（`set_limit`）来制造显存不足，不碰 GPU 上真正的余量。

# %% [markdown]
# ## 小结
#
# | 以前的说法 | 实验以后的说法 |
# |:--|:--|
# | 动态形状就是无限灵活 | 只在 Profile 的范围里灵活；秩、静态维、数据类型不变；最大尺寸的价钱总是要付 |
# | 超出范围会报错 | 返回 `False`，上下文停在旧形状上；不检查，就会用旧形状算新数据 |
# | 各个输入都合法，请求就合法 | 还要彼此一致，而 TensorRT 不保证替你发现：可能拒绝，可能放过，也可能让整个进程退出 |
# | 输出的形状看引擎 | 引擎里是 −1；设好所有输入以后，问上下文 |
# | 大数组切一块就能用 | 切出来的不连续；容量是一维的，形状是看它的方式 |
# | 无需重新构建，所以换形状免费 | 不用重新构建，但换一次要多付一次提交时间；各守一个形状的上下文可以躲开它 |
# | 与 CUDA 图天然兼容 | 图记住的是捕获时的形状；换了形状再重放，没有谁会报错：要么另备一张图，要么更新这一张 |
#
# **带走三句话**
#
# 1. 范围是构建之前的决定，缓冲按最大的备，形状每次向上下文问。
# 2. TensorRT 的拒绝是返回值：`False` 和 `None` 一律变成异常，而且在碰它之前先自己查一遍。
# 3. 稳定的时候什么都别碰，变了的一样也别漏。
#
# 下一步：《优化 Profile 的设计与管理》用实测决定最优尺寸和 Profile 的个数；《形状张量与数据相关输出》讲输出的尺寸连上下文也说不准的情形。
