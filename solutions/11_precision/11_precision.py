# %% [markdown]
# # 强类型精度与显式量化
#
# 一位工程师把模型换成 FP16，推理快了三倍，演示一切正常。上线三天后，个别请求返回了 NaN；
# 而回归测试是绿的，因为 `abs(nan) > 容差` 永远是假。另一位同事照旧代码写了 `config.set_flag(trt.BuilderFlag.FP16)`，
# 换到 TensorRT 11 以后，这一行直接抛出 `AttributeError`。
#
# 两件事的病根相同：**精度从来不是一个开关，而是每个张量的类型。** 这一章就学着自己决定它。
#
# **学完以后，你能够**
#
# - 说出 FP16、BF16、TF32 各丢掉了什么，并用一个引擎从外面“验指纹”，看它到底用了哪一种；
# - 用强类型（strongly typed）网络写出混合精度：该窄的窄，该宽的宽，并用检查器（inspector）证明；
# - 从数据里选出量化（quantise）的刻度，插入 Q/DQ，并让误差不超过能证明的上界；
# - 给低精度的结果定一个有根据的误差预算，而不是随手写一个容差；
# - 事先算出 FP16 在哪里划算、在哪里不划算，以及为什么。
#
# **需要的基础**：《构建第一个 TensorRT 引擎》里的构建器（builder）、网络（network）、计划（plan）和执行上下文（execution context）；
# 《ONNX 导入与数值验证》里的容差。
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
# ## 三种窄一点的浮点数
#
# 一个浮点数由三部分组成：符号、指数、尾数（mantissa）。**指数的位数决定能走多远，尾数的位数决定看得多细。**
# 先猜一猜：FP16 和 BF16 都是 16 位，谁更“准”？
#
# 下面用 NumPy 模拟它们，不需要 GPU。NumPy 自带 `float16`；BF16 和 TF32 的指数与 FP32 一样长，
# 所以只要把 FP32 的尾数舍入到 7 位或 10 位就行，`keep_bits` 做的就是这件事。

# %%
MANTISSA = {"FP32": 23, "TF32": 10, "BF16": 7, "FP16": 10}
# The unit roundoff of a format: no normal value moves by more than this share when it is rounded to nearest.
UNIT = {name: 2.0 ** -(bits + 1) for name, bits in MANTISSA.items()}


def keep_bits(x, bits):
    """Round x (float32, finite) to `bits` explicit mantissa bits, ties to even; the exponent keeps its 8 bits."""
    drop = 23 - bits
    if drop == 0:
        return np.float32(x)
    u = np.asarray(x, np.float32).view(np.uint32)
    u = u + np.uint32((1 << (drop - 1)) - 1) + ((u >> np.uint32(drop)) & np.uint32(1))
    return (u & np.uint32(~((1 << drop) - 1) & 0xFFFFFFFF)).view(np.float32)


def rounded(x, name):
    """x (float32) as the format `name` ("FP32", "TF32", "BF16", "FP16") stores it, as float32."""
    if name == "FP16":
        with np.errstate(over="ignore"):
            return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)
    return keep_bits(x, MANTISSA[name])


# %% tags=["demo"]
probes = np.array([1 + 2.0**-7, 1 + 2.0**-10, 1 + 2.0**-12, 0.1, 2049, 65504, 65520, 1e6, 2.0**-24, 2.0**-26], np.float32)
names = ("1 + 2⁻⁷", "1 + 2⁻¹⁰", "1 + 2⁻¹²", "0.1", "2049", "65504", "65520", "10⁶", "2⁻²⁴", "2⁻²⁶")
lab.say(
    lab.table(
        ("原来的数", *MANTISSA),
        [(name, *(f"{float(rounded(p, f)):.9g}" for f in MANTISSA)) for name, p in zip(names, probes, strict=True)],
    ),
    measured=False,
)

# %% [markdown]
# 一行一行读：
#
# - `1 + 2⁻⁷` 谁都存得下，`1 + 2⁻¹⁰` 只有 BF16 存不下：它的尾数只有 7 位，约等于两位半的十进制数字；
# - `1 + 2⁻¹²` 只有 FP32 留得住；
# - `2049` 在 FP16 里变成 2048：从 2048 起，FP16 相邻两个数之差是 2，**整数都存不全了**（TF32 的尾数一样长，也如此；BF16 从 256 起就存不全）；
# - `65520` 在 FP16 里是 `inf`：最大只到 65504。BF16 和 TF32 没有这个问题，它们的指数和 FP32 一样长；
# - `2⁻²⁶` 在 FP16 里是 0：比最小的次正规数（subnormal，即放弃首位 1 换来的更小的数）的一半还小，就被冲掉了。
#
# 把“舍入以后差了百分之几”画在整条数轴上，三种性格一目了然。

# %% tags=["demo"]
import matplotlib.pyplot as plt

lab.plot_style()
exponents = np.arange(-32, 24)
within = np.random.default_rng(0).uniform(1, 2, 400)
fig, ax = plt.subplots()
for name in ("BF16", "FP16", "TF32"):
    worst = []
    for e in exponents:
        values = (within * 2.0**e).astype(np.float32)
        kept = rounded(values, name)
        worst.append(np.max(np.abs(kept.astype(np.float64) - values) / values) if np.isfinite(kept).all() else np.nan)
    ax.plot(2.0**exponents, worst, label=name, lw=4 if name == "TF32" else 2, alpha=0.5 if name == "TF32" else 1)
ax.axvline(65504, ls=":", color="gray")
ax.text(65504, 1e-2, " FP16 到此为止", va="center")
ax.set(xscale="log", yscale="log", xlabel="数的大小", ylabel="舍入的最大相对误差", title="走得远，还是看得细（NumPy 模拟）")
ax.legend()
plt.show()

# %% [markdown]
# - **FP16**：中间一段平，和 TF32 重合；往左，过了 $2^{-14}$ 就一路变差，直到 100%（变成 0）；往右，65504 处断掉。
# - **BF16**：哪里都一样粗，但哪里都在。
# - **TF32**：FP16 的细，BF16 的远。可它不是一种存储类型：数在显存里仍占 4 字节，只在进入张量核心（Tensor Core）做乘法时丢掉尾数的后 13 位。
#
# 所以“FP16 和 BF16 谁更准”没有答案：数的大小合适，FP16 细八倍；大小不合适，FP16 给你 `inf` 或 0。
#
# ### 加着加着，就加不动了
#
# 矩阵乘是许多乘积的**累加**（accumulation）。乘数窄一点问题不大，累加器窄了会怎样？把 4096 个 1 加起来：

# %% tags=["demo"]
running = np.add.accumulate(np.ones(4096, np.float16))
tenths = np.add.accumulate(np.full(4096, 0.1, np.float16))
print(f"FP16 累加器：4096 个 1 加成了 {float(running[-1]):.0f}，从第 {int(np.argmax(running == running[-1])) + 1} 个起再也不动")
print(f"FP16 累加器：4096 个 0.1 加成了 {float(tenths[-1]):.0f}（应为 409.6）")
print(f"FP32 累加器：4096 个 FP16 的 0.1 加成了 {np.full(4096, 0.1, np.float16).astype(np.float32).sum(dtype=np.float32):.1f}")

# %% [markdown]
# 2048 + 1 在 FP16 里还是 2048，于是后面的一半全白加了。所以张量核心的做法通常是：**乘数用 16 位，累加用 32 位**。
# 但这是“通常”，不是保证：有的硬件、有的策略（tactic）会用 16 位累加。后面我们量一量你这块 GPU。
#
# 由此也得到一个写测试的窍门：让每个中间结果都是绝对值小于 2048 的整数，那么不论怎么累加、按什么次序，
# FP16、TF32、FP32 都是**精确的**，可以逐字节比较。练习三就这么证明你真的算了。

# %% [markdown]
# ## 强类型：类型写在网络里
#
# 下面是全章共用的零件。真正决定精度的调用（`add_cast`、权重的 `dtype`、`add_quantize`）以后都在各格里直接写，不藏起来。
#
# - `Draft`：一张正在画的强类型网络。`constant(array)` 把 NumPy 数组按**它自己的类型**变成常量，
#   `matmul(a, b)`、`cast(x, dtype)` 各加一层，`output(y)` 标记输出，`plan()` 构建并返回字节；
# - `Runner`：反序列化一份计划，按名字绑定缓冲，入队（enqueue）。它先检查再启动，错的输入一概不碰输出。
#
# `trt.Weights` 不复制数据，只记地址，构建时才读，所以 `Draft` 给每个常量另留一份数组，到构建完成都没有人改动它。`lab.trt_logger()`、`lab.build_progress()` 和
# `lab.timing_cache(config)` 是课程给的日志、进度和计时缓存（timing cache），
# 《构建第一个 TensorRT 引擎》和《构建的代价》分别讲它们。
# 强类型网络里还管用的精度开关只剩 `trt.BuilderFlag.TF32`，默认开着；我们每次都明说要不要。
# 构建的优化级别（`level`）默认取 1：少试几种策略，构建快；这一章关心的是类型，不是最后几个百分点的速度。

# %% tags=["gpu"]
import json

import cupy as cp
import tensorrt as trt

FLOAT, HALF, BF16, INT8 = trt.DataType.FLOAT, trt.DataType.HALF, trt.DataType.BF16, trt.DataType.INT8
NONE = trt.MatrixOperation.NONE
OP = trt.ElementWiseOperation

builder = trt.Builder(lab.trt_logger())
stream = cp.cuda.Stream(non_blocking=True)


class Draft:
    """A strongly typed network being drawn, and the NumPy arrays that its constants point at.

    network: the `trt.INetworkDefinition`; every call of TensorRT's is made on it.
    """

    def __init__(self):
        self.network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self._kept = []  # trt.Weights remembers an address, no copy

    def constant(self, array):
        """Add array (numpy float32, float16 …) as a constant of that very dtype; returns its ITensor."""
        array = np.array(array, order="C")
        self._kept.append(array)
        return self.network.add_constant(array.shape, trt.Weights(array)).get_output(0)

    def matmul(self, a, b):
        """The product of two ITensors, which must be of one type; so is the result."""
        return self.network.add_matrix_multiply(a, NONE, b, NONE).get_output(0)

    def cast(self, x, dtype):
        """x as dtype (a trt.DataType): a layer of its own."""
        return self.network.add_cast(x, dtype).get_output(0)

    def elementwise(self, a, b, operation):
        """a ∘ b (trt.ElementWiseOperation), with broadcasting between dimensions of size 1."""
        return self.network.add_elementwise(a, b, operation).get_output(0)

    def scalar(self, value, like):
        """value as a 1 × 1 constant of the type of the ITensor `like` (FLOAT or HALF)."""
        return self.constant(np.full((1, 1), value, trt.nptype(like.dtype)))

    def output(self, tensor, name="y"):
        """Mark tensor as the network's output."""
        tensor.name = name
        self.network.mark_output(tensor)

    def plan(self, tf32=False, level=1):
        """Build; returns the plan (bytes). Raises RuntimeError with TensorRT's own words.

        tf32: whether FLOAT products may use TF32. level: the builder's optimisation level, 0–5; 1 tries few tactics, so it is quick.
        """
        config = builder.create_builder_config()
        (config.set_flag if tf32 else config.clear_flag)(trt.BuilderFlag.TF32)
        config.builder_optimization_level = level
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # or the inspector tells names only
        config.progress_monitor = lab.build_progress()
        lab.trt_errors()
        with lab.timing_cache(config):
            plan = builder.build_serialized_network(self.network, config)
        if plan is None:
            raise RuntimeError("构建失败：" + "；".join(lab.trt_errors() or ["TensorRT 没有说明原因"]))
        return bytes(plan)


class Runner:
    """An engine with one input "x" and one output "y", run on `stream`."""

    def __init__(self, plan):
        self.runtime = trt.Runtime(lab.trt_logger())
        self.engine = self.runtime.deserialize_cuda_engine(plan)
        if self.engine is None:
            raise RuntimeError("这份计划读不出来：" + "；".join(lab.trt_errors() or ["TensorRT 没有说明原因"]))
        self.context = self.engine.create_execution_context()
        if self.context is None:
            raise RuntimeError("没有得到执行上下文：" + "；".join(lab.trt_errors() or ["TensorRT 没有说明原因"]))
        self.bound = ()

    def bind(self, x, y):
        """Point the engine at x and y (cupy, C order, the engine's shapes and dtypes). Raises TypeError or ValueError before it binds anything."""
        for name, array in (("x", x), ("y", y)):
            if not isinstance(array, cp.ndarray):
                raise TypeError(f"{name} 不在 GPU 上：这里要 cupy 数组，给的是 {type(array).__name__}")
            dtype = np.dtype(trt.nptype(self.engine.get_tensor_dtype(name)))
            if array.dtype != dtype:
                raise TypeError(f"{name} 应是 {dtype}，给的是 {array.dtype}：TensorRT 只拿地址，不会替你转换")
            shape = tuple(self.engine.get_tensor_shape(name))
            if array.shape != shape or not array.flags.c_contiguous:
                raise ValueError(f"{name} 应是连续的、形状 {shape}，给的形状是 {array.shape}")
        for name, array in (("x", x), ("y", y)):
            if not self.context.set_tensor_address(name, array.data.ptr):
                raise RuntimeError(f"{name} 的地址没有被接受：" + "；".join(lab.trt_errors()))
        self.bound = (x, y)  # the context remembers addresses only

    def enqueue(self):
        """Enqueue once on `stream`, without waiting. Raises RuntimeError if TensorRT refuses."""
        if not self.context.execute_async_v3(stream.ptr):
            raise RuntimeError("入队失败：" + "；".join(lab.trt_errors()))

    def infer(self, x, y):
        """Bind x and y, run once, wait."""
        self.bind(x, y)
        cp.cuda.runtime.deviceSynchronize()  # x may have been written on another stream
        self.enqueue()
        stream.synchronize()

    def __call__(self, x):
        """The result for x (numpy) as a new numpy array."""
        y = cp.empty(tuple(self.engine.get_tensor_shape("y")), trt.nptype(self.engine.get_tensor_dtype("y")))
        self.infer(cp.asarray(x), y)
        return y.get()


# %% [markdown]
# ### 拒绝猜测
#
# 强类型的意思是：张量的类型由输入、权重和你加的层**推出来**，TensorRT 一律照办，既不升也不降。
# 那么 FP16 的输入乘上 FP32 的权重，结果是什么类型？

# %% tags=["demo", "gpu"]
mixed = Draft()
x = mixed.network.add_input("x", HALF, (4, 8))
try:
    mixed.output(mixed.matmul(x, mixed.constant(np.ones((8, 8), np.float32))))
    mixed.plan()
    print("构建成功了：这一版 TensorRT 放行了混着的类型")
except (RuntimeError, AttributeError) as error:  # AttributeError: where add_matrix_multiply itself gives None
    print("被拒绝了。原话：", "；".join([str(error), *lab.trt_errors()])[:400])

# %% [markdown]
# 强类型的规则里没有“自动提升”，没有“就近取整”。这是好事：类型不对，在构建时就停下，而不是带着一个你没料到的精度去上线。
# 提醒一句：`build_serialized_network` 自己不抛异常，只返回 `None`；原因在日志里，`Draft.plan` 把两者接在了一起。
#
# 顺带记下另一句常见的原话：`could not find any implementation for node …`。它往往不是“不支持这个算子”，而是三种原因之一：
# 这块 GPU 没有这种类型的内核（比如计算能力 7.5 的 GPU 上的 BF16）；工作区（workspace）的上限太小；或者上限比剩下的显存还大。先读完整的日志再下结论。
#
# 类型不一致的修法只有两种：让权重也是 FP16（`constant(w.astype(np.float16))`，转换在构建之前做完），或者给一边加一层 `add_cast`（转换在引擎里做）。
#
# ### 验指纹：它到底用了哪一种
#
# 你说是 FP16，怎么证明？一个办法是从外面看：喂进几个特别的数，看回来的是什么。
# 上面那张表已经给了配方：
#
# | 喂进去 | FP32 | TF32 | BF16 | FP16 |
# |:--|:--|:--|:--|:--|
# | $1 + 2^{-10}$ | 留住 | 留住 | 变成 1 | 留住 |
# | $1 + 2^{-12}$ | 留住 | 留不住 | 变成 1 | 变成 1 |
# | $2^{-30}$ | 留住 | 留住 | 留住 | **变成 0** |
# | $70000$ | 留住 | 留个大概 | 留个大概 | **变成 inf** |
#
# 用单位矩阵去乘，只有一次乘法进得了结果，回来的就是“乘数被存成了什么样”。每个数单独占一行：inf × 0 是 NaN，不让它连累别的数。
# BF16 的张量核心要计算能力 8.0 以上（安培架构起）；FP16 从 7.0 就有。精度的能力随 GPU 而变，所以先问，再用。

# %% tags=["gpu"]
HAS_BF16 = int(cp.cuda.Device().compute_capability) >= 80


def typed_weights(draft, array, dtype):
    """array (float32) as a constant of dtype FLOAT, HALF or BF16 (NumPy has no BF16: cast in the network, folded by the build)."""
    if dtype == BF16:
        return draft.cast(draft.constant(np.float32(array)), BF16)
    return draft.constant(np.asarray(array, trt.nptype(dtype)))


def relu_chain(rows, weights, dtype):
    """A Draft: x (FLOAT, rows × k) → [cast] → for each w of weights: matmul, ReLU, all in dtype → [cast] → y (FLOAT)."""
    draft = Draft()
    x = draft.network.add_input("x", FLOAT, (rows, weights[0].shape[0]))
    h = x if dtype == FLOAT else draft.cast(x, dtype)
    for w in weights:
        h = draft.network.add_activation(draft.matmul(h, typed_weights(draft, w, dtype)), trt.ActivationType.RELU).get_output(0)
    draft.output(h if dtype == FLOAT else draft.cast(h, FLOAT))
    return draft


FORMATS = {"FP32": (FLOAT, False), "TF32": (FLOAT, True), "FP16": (HALF, False)} | ({"BF16": (BF16, False)} if HAS_BF16 else {})

# %% tags=["demo", "gpu"]
values = np.array([1 + 2.0**-10, 1 + 2.0**-12, 2.0**-30, 70000], np.float32)
fingers = np.zeros((16, 64), np.float32)
fingers[:4, 0] = values
prints = {}
for name, (dtype, tf32) in FORMATS.items():
    prints[name] = Runner(relu_chain(16, [np.eye(64, dtype=np.float32)], dtype).plan(tf32=tf32))(fingers)[:4, 0]
rows = [(name, *(f"{v:.9g}" for v in got)) for name, got in prints.items()]
lab.say(lab.table(("网络", "1 + 2⁻¹⁰", "1 + 2⁻¹²", "2⁻³⁰", "70000"), rows))
tf32_used = prints["TF32"][1] != values[1]
differ = [name for name, got in prints.items() if name != "TF32" and not np.array_equal(got, rounded(values, name))]
lab.say("除了 TF32，引擎给出的指纹" + ("和 NumPy 的模拟一个不差。" if not differ else f"和 NumPy 的模拟有出入（{'、'.join(differ)}），以引擎为准。"))
lab.say("打开 TF32 的那个引擎" + ("真的丢了尾数：它用了 TF32。" if tf32_used else "并没有丢尾数：**允许不等于一定用**，构建器按速度挑，这一次挑了 FP32 的策略（也可能这块 GPU 没有 TF32）。"))

# %% [markdown]
# **TF32 不是一种类型，是一张许可证。** 网络里写的都是 FP32，`BuilderFlag.TF32` 只是允许构建器在乘法里偷工；用不用，由它计时以后决定。
# 所以打开 TF32 的 FP32 网络，容差要按 $2^{-11}$ 来定，而不是 $2^{-24}$：换一块 GPU、重新构建一次，它都可能变。

# %% [markdown]
# ## 检查器：从里面看
#
# 外面看是物证，里面看是口供，两样都要。引擎检查器（engine inspector）会说出融合（fusion，几层并成一个内核）以后的每一层、每个张量的类型；
# 前提是构建时 `config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED`（`Draft.plan` 里写了），否则它只肯说层名。

# %% tags=["gpu"]
def tensor_types(plan):
    """What the inspector tells of a plan: a list of (layer, type of layer, [types read], [types written]), as TensorRT words them."""
    runtime = trt.Runtime(lab.trt_logger())
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise RuntimeError("这份计划读不出来：" + "；".join(lab.trt_errors()))
    report = json.loads(engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON))

    def types(layer, side):
        return [tensor.get("Format/Datatype", "?") for tensor in layer.get(side, [])]

    return [(layer["Name"], layer.get("LayerType", "?"), types(layer, "Inputs"), types(layer, "Outputs")) for layer in report["Layers"] if isinstance(layer, dict)]


# %% tags=["demo", "gpu"]
rng = np.random.default_rng(11)
two = [rng.normal(0, 0.1, (256, 256)).astype(np.float32) for _ in range(2)]
plans = {name: relu_chain(64, two, dtype).plan(tf32=tf32) for name, (dtype, tf32) in FORMATS.items() if name in ("FP32", "FP16")}
for name, plan in plans.items():
    lab.say(f"**{name}**：权重 {sum(w.nbytes for w in two) // (2 if name == 'FP16' else 1) / 1024:.0f} KiB，计划 {len(plan) / 1024:.0f} KiB\n\n" + lab.table(("层", "种类", "读", "写"), [(f"`{layer[:60]}`", kind, "，".join(reads), "，".join(writes)) for layer, kind, reads, writes in tensor_types(plan)]))

# %% [markdown]
# 读这张表要留意三件事：
#
# 1. 层名和网络里的不一样：相邻的层会被融合，`ReLU` 往往并进了矩阵乘，`cast` 也可能消失在邻居里。
#    表里如果写着 `gemm`，那是矩阵乘；`kgen` 是 TensorRT 现场生成的内核，名字里带 `Cas` 的就是没有并进邻居的 `cast`，各占一个内核；
# 2. 类型的写法随版本变（`Half`、`FP16`、`Row major linear FP16 format`……），程序里要认词，别比整句；
# 3. 权重存成 FP16，权重那一部分就只有一半大。计划里还装着内核，所以小网络的计划未必小一半，大网络看得最清楚。

# %% [markdown]
# ## 误差预算：容差从哪里来
#
# 记 $u$ 为单位舍入误差（unit roundoff）：舍入到最近的一次，相对误差不超过 $u$。尾数 $p$ 位时 $u = 2^{-(p+1)}$，
# 所以 FP16 和 TF32 是 $2^{-11}$，BF16 是 $2^{-8}$，FP32 是 $2^{-24}$。
#
# 一次矩阵乘 $y = xw$，内侧长 $K$。$x$ 和 $w$ 各舍入一次，FP32 里累加 $K$ 次，结果再舍入一次。把每一步的最坏情况加起来：
#
# $$|\hat y - y| \;\le\; (3u + K \cdot 2^{-24}) \cdot (|x|\,|w|)$$
#
# 右边的 $|x||w|$ 是把绝对值相乘再相加，不是 $|y|$。正负相消时 $|y|$ 可以很小，误差却不会跟着小：**这就是为什么“相对误差 1e-3”在个别元素上总会失败。**
#
# `budget_used` 算出“误差用掉了预算的几成”：不超过 1 就在预算之内。它不含溢出和下溢，那两件事预算管不了，要靠设计躲开。

# %%
def budget_used(got, x, w, unit):
    """The largest share of the error budget of x @ w that `got` uses; inf if anything in it is NaN or infinite.

    got: the result to be judged, any float dtype; x, w: float32, 2-D; unit: the unit roundoff of the type in use. At most 1: accept.
    """
    got = np.asarray(got, np.float64)
    if not np.isfinite(got).all():
        return np.inf
    x, w = np.float64(x), np.float64(w)
    budget = (3 * unit + x.shape[1] * UNIT["FP32"]) * (np.abs(x) @ np.abs(w))
    return float(np.max(np.abs(got - x @ w) / np.maximum(budget, np.finfo(np.float64).tiny)))


# %% tags=["demo", "gpu"]
def product(rows, w, dtype):
    """A Runner of x @ w in dtype, from FLOAT to FLOAT."""
    draft = Draft()
    x = draft.cast(draft.network.add_input("x", FLOAT, (rows, w.shape[0])), dtype)
    draft.output(draft.cast(draft.matmul(x, typed_weights(draft, w, dtype)), FLOAT))
    return Runner(draft.plan())


rows = []
for k in (256, 4096):
    w = rng.uniform(0.5, 1, (k, 64)).astype(np.float32)
    for name in ("FP16", "BF16"):
        if name not in FORMATS:
            continue
        runner = product(64, w, FORMATS[name][0])
        for kind, least in (("正负都有", -1), ("全是正数", 0.5)):
            x = rng.uniform(least, 1, (64, k)).astype(np.float32)
            y, exact = runner(x), np.float64(x) @ np.float64(w)
            rows.append((k, kind, name, f"{np.max(np.abs(y - exact)):.2g}", f"{np.max(np.abs(y - exact) / np.abs(exact)):.2g}", f"{budget_used(y, x, w, UNIT[name]):.2f}"))
lab.say(lab.table(("K", "数据", "类型", "最大绝对误差", "最大相对误差", "用掉的预算"), rows))
worst = max(float(row[-1]) for row in rows)
lab.say(f"用掉的预算最多 {worst:.2f}。" + ("都在 1 以内：这些引擎的累加比 16 位宽。" if worst <= 1 else "有超过 1 的：多半是有的引擎用 16 位累加，预算里的 $K \\cdot 2^{-24}$ 对它不成立。"))

# %% [markdown]
# 比一比“正负都有”和“全是正数”的相对误差：前者大得多，用掉的预算却没有跟着变大。因为结果接近 0 的那些元素，误差是从大得多的中间量里来的。
# 反过来，为了让那些元素通过，一路放宽相对容差，又会放过真正的错误。
#
# 如果表里有哪一行用掉的预算超过了 1，先别急着放宽容差。公式里的 $K \cdot 2^{-24}$ 假定累加用 32 位；有的 FP16 策略用 16 位累加，
# 那是构建器按速度挑出来的，网络里没有写，重新构建一次可能又换成别的。要它一定用 32 位，就写进网络：
# 矩阵乘之前，把两个 FP16 的输入各 `cast` 成 FLOAT，乘完再 `cast` 回去。TensorRT 可能把这几层 `cast` 并进矩阵乘，变成一个“FP16 输入、FP32 累加”的内核；
# 没有并，也只是慢一些。并了没有，用检查器看。
# 把公式里的 $2^{-24}$ 换成 $2^{-11}$ 倒没有用：$K$ 到了 4096，$K \cdot 2^{-11}$ 就是 2，连全是 0 的结果也放得过去。
#
# ### 误区：`max(abs(差)) > 容差` 能挡住坏引擎
#
# 公开的问题报告里有这样一例：TensorRT 换了版本，一处融合出了错，输出变成 NaN，而流水线没有拦住。
# 拦截的代码往往就是下面第一行那样。往一个好结果里放进一个 NaN，看谁拦得住：

# %% tags=["demo"]
x, w = np.random.default_rng(1).normal(size=(2, 32, 32)).astype(np.float32)
good = x @ w
planted = good.copy()
planted[3, 5] = np.nan
print("abs(差).max() > 容差，报警了吗？", bool(np.abs(planted - good).max() > 1e-2))
print("budget_used 不超过 1 吗？", budget_used(planted, x, w, UNIT["FP16"]) <= 1, "；好结果：", budget_used(good, x, w, UNIT["FP16"]) <= 1)

# %% [markdown]
# 和 NaN 比大小，永远是假。**每次构建都要过一道对等关卡（parity gate）**：拿另一个实现（NumPy、ONNX Runtime）的结果，按预算比较，
# 条件写成“确实在预算之内才放行”，而不是“没发现超出就放行”。

# %% [markdown]
# ## 溢出：预算管不了的事
#
# 归一化（normalisation）要算平方的平均。一行数都在 300 左右，离 65504 远得很，放心吗？

# %% tags=["demo", "gpu"]
def squares(dtype):
    """A Runner of the squares of x (FLOAT, 4 × 64), written to memory in dtype (FLOAT or HALF)."""
    draft = Draft()
    x = draft.network.add_input("x", FLOAT, (4, 64))
    x = x if dtype == FLOAT else draft.cast(x, dtype)
    draft.output(draft.elementwise(x, x, OP.PROD))  # an output is stored in its own type: no fusion can hide the overflow
    return Runner(draft.plan())


row = np.repeat(np.float32([[100], [250], [300], [1000]]), 64, axis=1)
rows = [(f"{value:g}", f"{value * value:g}") for value in row[:, 0]]
for dtype in (FLOAT, HALF):
    got = squares(dtype)(row)[:, 0]
    rows = [(*old, f"{v:g}") for old, v in zip(rows, got, strict=True)]
lab.say(lab.table(("每个数", "平方应为", "FP32 里的平方", "FP16 里的平方"), rows))

# %% [markdown]
# 只要 256 以上，平方就过 65504。接下来 `1 / sqrt(inf)` 是 0，整行输出静悄悄地变成 0；或者 `inf − inf`，变成 NaN。
#
# 所以混合精度的常见写法是：**矩阵乘用 FP16，归一化、softmax、求和这类“先变大再变小”的地方围成一座 FP32 的小岛**，
# 进出各一层 `cast`。在强类型网络里，这座岛由你来画，TensorRT 一步也不会越过。练习一就画一座。
#
# 顺便说：有的融合内核在寄存器里用 FP32 算中间结果，FP16 的写法也可能碰巧没事。碰巧不是保证，下一个版本、下一块 GPU 可能就换一种融合。
#
# ### 误区：把 FP16 的数组传进去，就是 FP16 推理
#
# 引擎的输入类型在构建时就定了。TensorRT 只拿一个地址，地址里是什么类型，它无从知道；真塞进去，读到的就是乱码。
# 给定的 `Runner` 先检查再绑定，四种错各说一句人话，输出原封不动，程序照常往下走：

# %% tags=["demo", "gpu"]
runner = Runner(plans["FP16"])
x, y = cp.ones((64, 256), cp.float32), cp.full((64, 256), 7, cp.float32)
tries = {
    "FP16 的数组": partial(runner.infer, x.astype(cp.float16), y),
    "CPU 上的数组": partial(runner.infer, x.get(), y),
    "形状不对": partial(runner.infer, x[:32], y),
    "截断的计划": partial(Runner, plans["FP16"][: len(plans["FP16"]) // 2]),
}
for name, attempt in tries.items():
    try:
        attempt()
        print(f"{name}：被接受了")
    except (TypeError, ValueError, RuntimeError) as error:
        print(f"{name}：{type(error).__name__}：{str(error)[:160]}")
print("输出有没有被动过：", bool((y != 7).any()))
runner.infer(x, y)
print("再来一次对的，结果有限：", bool(cp.isfinite(y).all()))

# %% [markdown]
# ## TensorRT 11 拿走了什么
#
# 老教程里的精度是这样开的：在构建配置上打开 FP16 或 INT8 的开关，TensorRT 在每一层里“觉得合适就用”；不放心，再给个别层钉上 `precision`。
# 这叫弱类型（weak typing）。它方便，但结果取决于计时的运气：同一份代码，两次构建可能给出不同的精度。
# TensorRT 11 把弱类型整个拿走了，强类型是唯一的选择。
#
# 代码要同时在 10 和 11 上跑，就别比版本字符串，直接**问有没有**：名字在不在，由 `hasattr` 说了算。

# %% tags=["demo", "gpu"]
TAKEN = [
    (trt.BuilderFlag, "FP16", "权重和 `add_cast` 的类型"),
    (trt.BuilderFlag, "BF16", "`add_cast(x, trt.DataType.BF16)`"),
    (trt.BuilderFlag, "INT8", "`add_quantize` / `add_dequantize`"),
    (trt.BuilderFlag, "OBEY_PRECISION_CONSTRAINTS", "不需要：强类型一律照办"),
    (trt.ILayer, "precision", "`add_cast`"),
    (trt.ILayer, "set_output_type", "`add_cast`"),
    (trt.ITensor, "set_dynamic_range", "Q/DQ 的刻度"),
    (trt, "IInt8EntropyCalibrator2", "自己从数据里选刻度"),
    (trt.Builder, "platform_has_fast_fp16", "问 CUDA 要计算能力"),
    (trt.NetworkDefinitionCreationFlag, "EXPLICIT_BATCH", "不需要：一向是显式批"),
    (trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", "还在；11 里总是开着"),
    (trt.BuilderFlag, "TF32", "还在"),
]
lab.say(f"你装的是 TensorRT {trt.__version__}：\n\n" + lab.table(("名字", "这里有吗", "现在怎么写"), [(f"`{owner.__name__.split('.')[-1]}` 的 `{name}`", "有" if hasattr(owner, name) else "没有", instead) for owner, name, instead in TAKEN]))

old_flag = getattr(trt.BuilderFlag, "FP16", None)
if old_flag is None:
    print("这个版本没有 FP16 开关，想开也开不了。")
else:
    draft = relu_chain(16, [np.eye(64, dtype=np.float32)], FLOAT)
    config = builder.create_builder_config()
    config.set_flag(old_flag)
    lab.trt_errors()
    plan = builder.build_serialized_network(draft.network, config)
    if plan is None:
        print("强类型网络 + FP16 开关：构建被拒绝。", "；".join(lab.trt_errors())[:300])
    else:
        tiny = Runner(bytes(plan))(fingers)[2, 0]
        print(f"强类型网络 + FP16 开关：构建成功，但 2⁻³⁰ 回来是 {tiny:.3g}：" + ("开关没有起作用，类型仍由网络说了算。" if tiny else "它真的用了 FP16。"))

# %% [markdown]
# ## 显式量化：Q 和 DQ
#
# 量化（quantise）把浮点数除以一个刻度（scale）再取整，存成 INT8；反量化（dequantise）乘回去：
#
# $$q = \mathrm{clip}\big(\mathrm{round}(x / s),\, -128,\, 127\big), \qquad \hat x = s\,q$$
#
# 只要 $|x| \le 127s$，就有 $|\hat x - x| \le s/2$。**刻度就是全部的学问**：大了，格子粗；小了，两头被截断（clip），叫饱和（saturation）。
#
# 显式量化（explicit quantisation）的意思是，网络里明明白白写着 `add_quantize`（Q）和 `add_dequantize`（DQ）两层，
# TensorRT 看到两个 DQ → 矩阵乘，一般就把它们合成一个 INT8 的矩阵乘。Q/DQ 放在哪里、刻度是多少，都由你定。
#
# 激活（activation，即层间的数据）整个张量共用一个刻度（per-tensor）；权重可以每个输出通道一个（per-channel）。差别有多大？
# 拿一个有“离群通道”（outlier channel）的权重试试：64 列里，有一列比别的大 100 倍。这一格不需要 GPU。

# %%
def quantised(values, scale):
    """values after Q and DQ: float64, rounded to the nearest of the 256 steps of `scale` (broadcast), saturating."""
    scale = np.asarray(scale, np.float64)
    return np.clip(np.rint(np.asarray(values, np.float64) / scale), -128, 127) * scale


# %% tags=["demo"]
rng = np.random.default_rng(3)
w = rng.normal(size=(256, 64)).astype(np.float32)
w[:, 17] *= 100
x = rng.normal(size=(128, 256)).astype(np.float32)
exact = np.float64(x) @ w
fig, ax = plt.subplots()
for label, scale in (("整个张量一个刻度", np.abs(w).max() / 127), ("每列一个刻度", np.abs(w).max(axis=0) / 127)):
    error = np.abs(x.astype(np.float64) @ quantised(w, scale) - exact).max(axis=0)
    ax.plot(np.arange(64), error / np.abs(exact).max(axis=0), "o-", ms=3, label=label)
ax.set(yscale="log", xlabel="输出通道", ylabel="最大误差 / 该通道的最大值", title="一个离群通道拖累所有人（NumPy 模拟）")
ax.legend()
plt.show()

# %% [markdown]
# 只有一个刻度时，那一列把格子撑到原来的 100 倍，其余 63 列只剩两三个格子可用。每列一个刻度，互不相干。
# 代价几乎没有：刻度在累加之后才乘，每列乘一个不同的数，和乘同一个数一样快。
#
# 那**激活**里有离群通道怎么办？矩阵乘沿着这个方向累加，刻度提不到外面，所以激活不能每通道一个刻度。
# 但有一条等价的路：$x w = (x / f)(f w)$，把 $x$ 的第 $k$ 列除以 $f_k$，同时把 $w$ 的第 $k$ 行乘以 $f_k$，难量化的部分就**挪到了权重里**。
# 下面取 $f_k = \sqrt{\max|x_{:,k}| \,/\, \max|w_{k,:}|}$：$x$ 的第 $k$ 列和 $w$ 的第 $k$ 行的最大绝对值于是一样大，难处两边各担一半。

# %% tags=["demo"]
w, x = (rng.normal(size=shape).astype(np.float32) for shape in ((256, 64), (128, 256)))
x[:, 40] *= 100
exact = np.float64(x) @ w


def int8_error(x, w):
    """The root mean square error of x @ w by Q/DQ with one scale for x and one per column of w, as a share of the exact result's."""
    product = quantised(x, np.abs(x).max() / 127) @ quantised(w, np.abs(w).max(axis=0) / 127)
    return np.sqrt(np.mean((product - exact) ** 2) / np.mean(exact**2))


factor = np.sqrt(np.abs(x).max(axis=0) / np.abs(w).max(axis=1))
lab.say(f"激活里有一个 100 倍的离群通道：直接量化，误差 {int8_error(x, w):.1%}；按上面的 $f$ 挪一半到权重里，误差 {int8_error(x / factor, w * factor[:, None]):.1%}。", measured=False)

# %% [markdown]
# 再到引擎里看一眼 Q/DQ 怎么写。要点有四个：
#
# - 刻度是常量张量：激活的是 0 维（`np.float32(s)`，形状 `()`），权重的是一维，长度等于通道数；
# - 权重的两层要说沿哪一维分通道：`layer.axis = 1`（这里 $w$ 是 $K \times N$，通道是列）；
# - `add_quantize(tensor, scale, INT8)` 和 `add_dequantize(tensor, scale, FLOAT)` 都写明输出类型：TensorRT 11 只有三个参数的写法；
# - 刻度必须是构建时就知道的正数。一列权重全是 0，`最大值 / 127` 就是 0，要另给一个，比如 1。

# %% tags=["demo", "gpu"]
def qdq(draft, tensor, scale, axis=None):
    """Q and DQ around tensor with a constant scale (float32, 0-D, or 1-D along axis); returns FLOAT."""
    scale = draft.constant(np.asarray(scale, np.float32))
    down = draft.network.add_quantize(tensor, scale, INT8)
    if axis is not None:
        down.axis = axis
    up = draft.network.add_dequantize(down.get_output(0), scale, FLOAT)
    if axis is not None:
        up.axis = axis
    return up.get_output(0)


w = rng.normal(size=(256, 64)).astype(np.float32)
w[:, 17] *= 100
x = rng.normal(size=(128, 256)).astype(np.float32)
exact = np.float64(x) @ np.float64(w)
x_scale = np.abs(x).max() / 127
rows, shares = [], []
for label, w_scale, axis in (("整个张量一个刻度", np.abs(w).max() / 127, None), ("每列一个刻度", np.abs(w).max(axis=0) / 127, 1)):
    draft = Draft()
    a = qdq(draft, draft.network.add_input("x", FLOAT, x.shape), x_scale)
    draft.output(draft.matmul(a, qdq(draft, draft.constant(w), w_scale, axis)))
    plan = draft.plan()
    y = Runner(plan)(x)
    ordinary = np.arange(64) != 17
    simulated = quantised(x, x_scale) @ quantised(w, w_scale)
    error, gap = (np.abs(y - other)[:, ordinary].max() for other in (exact, simulated))
    shares.append(gap / error)
    rows.append((label, f"{error:.3g}", f"{gap:.2g}", "有" if "int8" in str(tensor_types(plan)).lower() else "没看到"))
lab.say(lab.table(("权重的刻度", "普通通道的最大误差", "和 NumPy 模拟之差", "检查器里有 INT8 吗"), rows))
lab.say("引擎和模拟之差" + (f"至多是量化误差的 {max(shares):.2g} 倍：量化的误差是**算得出来的**，不是碰运气。" if max(shares) < 0.5 else f"达到量化误差的 {max(shares):.2g} 倍，比预想的大：这个引擎还在别处舍入了。"))

# %% [markdown]
# 引擎和模拟为什么还会差一点？除法的最后几位不同，一个正好落在两格中间的数，就可能去了另一格，差出一格来；其余只是 FP32 的舍入。
# 练习二就拿“和模拟几乎一样”来判分，那里的数据离两格中间都够远。

# %% [markdown]
# ## 快多少：先看大小
#
# 现在轮到速度。同样三层“矩阵乘 + ReLU”，三种大小，输入输出都是 FP32（FP16 的网络首尾各一层 `cast`，也算在内）。
# 每个样本连续入队 20 次，一次同步，分别和关掉 TF32 的 FP32 交替着量；表里的“甲 → 乙”是同一轮比较里两边各用的时间；
# 两列是两轮，同一个 FP32 引擎在两轮里也有快有慢（越短的越明显），所以只比同一列里的两边。BF16 占的字节和 FP16 一样多，这里不重复。先猜：最小的那个，FP16 快几倍？

# %% tags=["demo", "gpu"]
CASES = [(8, 256), (8, 2048), (1024, 1024)]


def bound_runner(rows, layers, name):
    """A function that enqueues 20 times an engine of layers in a format of FORMATS, bound to buffers of its own."""
    dtype, tf32 = FORMATS[name]
    runner, width = Runner(relu_chain(rows, layers, dtype).plan(tf32=tf32)), layers[0].shape[0]
    runner.bind(cp.ones((rows, width), cp.float32), cp.empty((rows, width), cp.float32))
    return lambda: [runner.enqueue() for _ in range(20)]


gains, table = {"TF32": [], "FP16": []}, []
for rows, width in CASES:
    layers = [rng.normal(0, np.sqrt(2 / width), (width, width)).astype(np.float32) for _ in range(3)]
    base, line = bound_runner(rows, layers, "FP32"), []
    for name, ratios in gains.items():
        result = lab.compare_us(base, bound_runner(rows, layers, name), clock="end_to_end", pairs=9)
        ratios.append(result.ratio)
        line.append(f"{result.first.median / 20:.1f} → {result.second.median / 20:.1f} µs（{result.ratio:.2f}×）")
    table.append((f"{rows} × {width} × {width}", *line))
lab.say(lab.table(("行 × K × N", *(f"FP32（关 TF32）→ {name}" for name in gains)), table))

fig, ax = plt.subplots()
for (name, ratios), offset in zip(gains.items(), (-0.15, 0.15), strict=True):
    ax.bar(np.arange(len(CASES)) + offset, ratios, 0.28, label=name)
ax.axhline(1, color="gray", ls=":")
ax.set_xticks(range(len(CASES)), [f"{rows}×{width}" for rows, width in CASES])
ax.set(xlabel="行 × 宽（三层）", ylabel="比 FP32（关 TF32）快几倍", title=f"窄类型在哪里划算 · {lab.gpu_name()}")
ax.legend()
plt.show()

# %% [markdown]
# 以你自己的那张表为准，一般会看到：
#
# - 最小的那个，大家差不多，FP16 的甚至更慢。时间花在启动上：每个内核再短也要几微秒，多两层 `cast` 就可能多两个内核；
# - 又矮又宽的（8 行 × 2048），算得少，权重却多，理想的内核会把时间都花在**搬权重**上：权重从 4 字节变 2 字节，搬运最多省一半，
#   和张量核心有多快没有关系。看看你的表守不守这个规矩：TF32 的权重仍是 4 字节，要是它也快了，或者 FP16 超过了 2 倍，那么省下的不止是搬运。
#   要么 FP32 的内核还没有把带宽用满（只有 8 行，这里的优化级别又低），两边的内核写法不同；
#   要么 FP16 的权重恰好装得进片上的 L2 缓存，而 FP32 的装不下；
# - 最大的那个，时间花在计算上，张量核心才真正派上用场。
#
# 所以“FP16 快几倍”这句话缺一个前提：**你被什么限制着**。
#
# ### 一个可以算的模型
#
# 一个内核的时间，取三者里最长的（这个模型通常叫屋顶线，roofline，我们给它加了启动这一项）：
#
# | 限制 | 时间（µs） |
# |:--|:--|
# | `"compute"` | $2mkn \,/\, (\text{TFLOPS} \times 10^6)$ |
# | `"memory"` | $(mk + kn + mn) \times \text{每个数的字节数} \,/\, (\text{GB/s} \times 10^3)$ |
# | `"launch"` | 每个内核至少要占的时间 `launch_us` |
#
# 单独成为内核的 `cast` 读 4 字节、写 2 字节（或者反过来），共 $6mn$ 字节，几乎不计算：它的时间是 $\max(\text{launch\_us},\ 6mn / (\text{GB/s} \times 10^3))$。

# %% [markdown]
# ## 练习
#
# 练习里可以用这些给定的名字：`Draft`（`.network`、`constant`、`matmul`、`cast`、`elementwise`、`scalar`、`output`、`plan`）、`Runner`、`tensor_types`、
# `FLOAT`、`HALF`、`BF16`、`INT8`、`OP`、`stream`、`quantised`、`budget_used`，以及每道题前面给出的函数。
# 演示单元（demo，评分时不运行）里的名字不能用，比如 `qdq`、`product`。
#
# ### 练习一：一座 FP32 的小岛（3 分）
#
# 给定的 `plain_block(rows, w1, w2)` 画出一个全 FP32 的小网络：`x` → 乘 `w1` → 每行归一化（`rms_norm`）→ 乘 `w2` → `y`。
#
# 写 `mixed_block(rows, w1, w2)`，画同一个网络的混合精度版，返回 `Draft`（已标记输出，不用构建）：
#
# 1. 输入 `"x"`、输出 `"y"` 仍是 FLOAT，形状不变；
# 2. 两次矩阵乘都在 HALF 里做，权重也存成 HALF；
# 3. 归一化的每一层都在 FLOAT 里做：行里有上千的数时也不许溢出；
# 4. 和 float64 的结果相差不超过 0.05（`y` 的大小约为 1；有几次 $2^{-11}$ 的舍入，矩阵乘还可能用 16 位累加，0.05 留足了余量）。
#
# 评分看三样：网络里写的类型；用极小和很大的数从外面验的指纹；检查器的口供（参考答案的引擎里看得见 FP16 时，你的也应当看得见）。

# %% tags=["gpu"]
EPS = 1e-20  # keeps a row of zeros from 0 / 0; FP16 could not even store it


def rms_norm(draft, h):
    """h (ITensor, rows × n) divided by the root mean square of its row, each layer in the type of h."""
    square = draft.elementwise(h, h, OP.PROD)
    mean = draft.network.add_reduce(square, trt.ReduceOperation.AVG, 1 << 1, True).get_output(0)
    root = draft.network.add_unary(draft.elementwise(mean, draft.scalar(EPS, h), OP.SUM), trt.UnaryOperation.SQRT).get_output(0)
    return draft.elementwise(h, root, OP.DIV)


def plain_block(rows, w1, w2):
    """A Draft, all FLOAT: x (rows × k) → @ w1 → rms_norm → @ w2 → y. w1: float32 k × n; w2: float32 n × p."""
    draft = Draft()
    x = draft.network.add_input("x", FLOAT, (rows, w1.shape[0]))
    h = rms_norm(draft, draft.matmul(x, draft.constant(w1)))
    draft.output(draft.matmul(h, draft.constant(w2)))
    return draft


# %% [markdown]
# 它的 float64 答案，不需要 GPU：

# %%
def block(x, w1, w2):
    """What plain_block computes, in float64."""
    h = np.float64(x) @ np.float64(w1)
    return h / np.sqrt(np.mean(h * h, axis=1, keepdims=True) + 1e-20) @ np.float64(w2)


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 沿着数据走一遍：每到一层，问它的两个输入各是什么类型，是不是同一种？哪几处类型要变，每一处就是一层 `cast`。
# `rms_norm` 用的是传给它的张量的类型，所以进去之前是什么类型，里面就全是什么类型。一共需要几层 `cast`？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `draft.cast(tensor, HALF)` 和 `draft.cast(tensor, FLOAT)`，就是 `network.add_cast(tensor, dtype).get_output(0)`；
# 权重：`draft.constant(w1.astype(np.float16))`。`draft.output(...)` 之前别忘了输出也要变回 FLOAT。
#
# </details>

# %% solution="mixed_block" tags=["gpu"]
def mixed_block(rows, w1, w2):
    """A Draft of plain_block's network with both products in HALF and the normalisation in FLOAT; x and y stay FLOAT.

    rows: int. w1: float32, k × n. w2: float32, n × p.
    """
    ### BEGIN SOLUTION: 照 plain_block 画，在每一处类型要变的地方加一层 cast：进矩阵乘之前变窄，进归一化之前变宽，权重存成 float16
    draft = Draft()
    x = draft.cast(draft.network.add_input("x", FLOAT, (rows, w1.shape[0])), HALF)
    h = draft.cast(draft.matmul(x, draft.constant(w1.astype(np.float16))), FLOAT)
    h = draft.cast(rms_norm(draft, h), HALF)
    draft.output(draft.cast(draft.matmul(h, draft.constant(w2.astype(np.float16))), FLOAT))
    return draft
    ### END SOLUTION


# %% test="mixed_block" kind="structure" points=3 tags=["gpu"]
TYPES = """
import tensorrt as trt

def types(draft):
    found = {"products": [], "norm": [], "ends": []}
    network = draft.network
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        read = [layer.get_input(k).dtype.name for k in range(layer.num_inputs)]
        if layer.type == trt.LayerType.MATRIX_MULTIPLY:
            found["products"] += read
        elif layer.type in (trt.LayerType.ELEMENTWISE, trt.LayerType.REDUCE, trt.LayerType.UNARY):
            found["norm"] += read
    ends = [network.get_input(i) for i in range(network.num_inputs)] + [network.get_output(i) for i in range(network.num_outputs)]
    found["ends"] = [tensor.dtype.name for tensor in ends]
    return found
"""
INSPECT = """
import tensorrt as trt
from launchlab import lab

def reported(plan):
    runtime = trt.Runtime(lab.trt_logger())
    engine = runtime.deserialize_cuda_engine(plan)
    return engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON).lower()
"""
rng = np.random.default_rng(2)
w1, w2 = (rng.normal(0, 1 / np.sqrt(n), (n, p)).astype(np.float32) for n, p in ((64, 96), (96, 32)))
x = rng.normal(size=(16, 64)).astype(np.float32)
draft = student.mixed_block(16, w1, w2)
check.that(draft is not None, why="mixed_block 什么也没有返回。最后一行 return draft 写了吗？")
types = student.define(TYPES, "types")(draft)
check.equal(types["ends"], ["FLOAT", "FLOAT"], why="网络的输入 x 和输出 y 都应当是 FLOAT：调用者仍然用 FP32 的缓冲。输出之前有没有变回去？用 draft.output 标记了吗？")
check.equal(types["products"], ["HALF"] * 4, why="两次矩阵乘的两个输入都应当是 HALF：权重存成 float16 了吗？归一化的结果有没有变回 HALF？")
check.that(set(types["norm"]) == {"FLOAT"} and len(types["norm"]) >= 6, why="归一化的每一层都应当在 FLOAT 里做。传给 rms_norm 的张量是什么类型？它就在那个类型里算。")
plan = draft.plan()
NARROW = ("half", "fp16", "f16")  # TensorRT words it differently from layer to layer; what it tells of the reference's engine is asked of the learner's
told = reference.define(INSPECT, "reported")(reference.mixed_block(16, w1, w2).plan())
report = student.define(INSPECT, "reported")(plan)
check.that(any(word in report for word in NARROW) or not any(word in told for word in NARROW), why="检查器在引擎里没有看到 FP16 的张量。矩阵乘真的在 HALF 里做吗？")
out = on_gpu(np.zeros((16, 32), np.float32))
out.poison()
runner = student.Runner(plan)
runner.infer(on_gpu(x), out)
check.equal(out, reference.block(x, w1, w2).astype(np.float32), abs=0.05, why="结果和 float64 相差太多。次序是：乘 w1、归一化、乘 w2；两份权重有没有用反？")
### BEGIN HIDDEN TESTS
rows, k, n, p = (int(secret.integers(3, 7)) * 8 for _ in range(4))
w1, w2 = (secret.normal(0, 1 / np.sqrt(a), (a, b)).astype(np.float32) for a, b in ((k, n), (n, p)))
w2[:, 3] = 2.0**-27  # what FP16 can't hold: this column of the output is 0 in FP16 only
x = secret.normal(size=(rows, k)).astype(np.float32)
x[0] *= 900  # squares far beyond 65504
x[1] *= 300
x[2] = 2.0**-28  # vanishes in FP16, and is brought back to 1 by the normalisation anywhere else
want = reference.block(x, w1, w2)
want[:, 3] = 0
want[2] = 0
draft = student.mixed_block(rows, w1, w2)
types = student.define(TYPES, "types")(draft)
check.equal([types["ends"], types["products"]], [["FLOAT"] * 2, ["HALF"] * 4], why="换了尺寸，矩阵乘、输入或输出的类型就不对了。")
check.that(set(types["norm"]) == {"FLOAT"}, why="换了尺寸，归一化就不全在 FLOAT 里了。")
runner = student.Runner(draft.plan())
source, out = on_gpu(x), on_gpu(np.zeros((rows, p), np.float32))
out.poison()
runner.infer(source, out)
got = out.read()
check.that(bool(np.isfinite(got).all()), why="很大的输入给出了 NaN 或 inf：有一处在 FP16 里溢出了。平方、求和都在小岛里面吗？")
check.equal(got[:2], want[:2].astype(np.float32), abs=0.05, why="行里有上千的数时，结果不对：平方超过了 65504。归一化要整个留在 FLOAT 里。")
check.equal(got[2], want[2].astype(np.float32), abs=0.0, why="指纹不对：第一次矩阵乘的输入没有经过 FP16。极小的数在 FP16 里应当变成 0，这里却留住了。")
check.equal(got[3:, 3], want[3:, 3].astype(np.float32), abs=0.0, why="指纹不对：第二次矩阵乘的权重没有存成 FP16。")
check.equal(got[3:], want[3:].astype(np.float32), abs=0.05, why="换了尺寸和数据，结果不对。行数、各层的宽度都取自参数吗？")
x = secret.normal(size=(rows, k)).astype(np.float32)
source.write(x)
out.poison()
runner.infer(source, out)
want = reference.block(x, w1, w2)
want[:, 3] = 0
check.equal(out, want.astype(np.float32), abs=0.05, why="就地换一份输入，再推理一次，结果不对。")
for bad, error in ((on_gpu(x.astype(np.float16)), "TypeError"), (x, "TypeError"), (on_gpu(x[:-1]), "ValueError")):
    out.poison()
    before = out.read()
    check.raises(error, runner.infer, bad, out, why="错的输入应当在启动之前就被拒绝：输入应是 FLOAT、固定形状、在 GPU 上。")
    check.equal(out.read().view(np.uint32), before.view(np.uint32), why="输入被拒绝了，输出却被动过。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习二：从数据里选刻度（3 分）
#
# 写 `int8_linear(rows, samples, w)`，画一个量化的线性层 $y = xw$，返回 `Draft`（已标记输出，不用构建）：
#
# 1. 输入 `"x"` 是 FLOAT，形状 `rows × k`；输出 `"y"` 是 FLOAT；
# 2. `x` 和 `w` 各经过一对 Q/DQ（INT8），DQ 的结果再做矩阵乘；
# 3. 激活的刻度只有一个：标定数据（calibration data，专门用来选刻度的一批有代表性的输入）`samples` 的最大绝对值除以 127；
# 4. 权重的刻度每列一个：该列的最大绝对值除以 127；
# 5. 最大绝对值是 0 时，刻度用 1；
# 6. 推理时的 `x` 可能比标定数据大：那就饱和，刻度不跟着变。
#
# 这样选刻度，只要 `x` 没有超出标定范围，误差就有一个**能证明**的上界（$s_x$、$s_j$ 是激活和第 $j$ 列的刻度，$K$ 是内侧的长度）：
#
# $$|\hat y_{ij} - y_{ij}| \;\le\; \tfrac{s_x}{2} \sum_k |w_{kj}| + \tfrac{s_j}{2} \sum_k |x_{ik}| + \tfrac{K}{4} s_x s_j$$
#
# 测试检查这个上界，也检查结果和 NumPy 模拟是否一致。隐藏的数据里有离群通道。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 沿哪一维取最大值，才能给每一列一个数？这一维在网络里叫第几维，Q 和 DQ 又怎么知道？
# 全是 0 的一列，0 / 127 得 0，除以 0 会怎样？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `np.abs(w).max(axis=0)`；`np.where(条件, 甲, 乙)`。刻度用 `draft.constant(np.float32(...))` 变成张量：一个的是 0 维，多个的是一维。
# 刻度要是 FP32：中途若成了 float64，`np.float32(...)` 正好把它变回来。
# `layer = draft.network.add_quantize(tensor, scale, INT8)`，`layer.axis = 1`，`layer.get_output(0)`；
# `add_dequantize(tensor, scale, FLOAT)` 同样有 `axis`。激活只有一个刻度，不用设 `axis`。
#
# </details>

# %% solution="int8_linear" tags=["gpu"]
def int8_linear(rows, samples, w):
    """A Draft of y = x @ w with Q/DQ on both sides: one scale for x from the calibration samples, one per column of w.

    rows: int. samples: float32, any number of rows × k. w: float32, k × n. x (rows × k) and y (rows × n) are FLOAT.
    """
    ### BEGIN SOLUTION: 先算刻度（激活一个，权重每列一个，0 换成 1），再给 x 和 w 各加一层 Q、一层 DQ，权重的两层说明沿第 1 维分通道
    def scales(largest):
        return np.where(largest > 0, largest / 127, 1).astype(np.float32)

    def pair(tensor, scale, axis=None):
        scale = draft.constant(scale)
        q = draft.network.add_quantize(tensor, scale, INT8)
        if axis is not None:
            q.axis = axis
        dq = draft.network.add_dequantize(q.get_output(0), scale, FLOAT)
        if axis is not None:
            dq.axis = axis
        return dq.get_output(0)

    draft = Draft()
    x = draft.network.add_input("x", FLOAT, (rows, w.shape[0]))
    a = pair(x, scales(np.abs(samples).max()))
    b = pair(draft.constant(np.float32(w)), scales(np.abs(w).max(axis=0)), axis=1)
    draft.output(draft.matmul(a, b))
    return draft
    ### END SOLUTION


# %% test="int8_linear" kind="structure" points=3 tags=["gpu"]
PAIRS = """
import tensorrt as trt

def pairs(draft):
    network = draft.network
    kinds = [network.get_layer(i).type for i in range(network.num_layers)]
    return [kinds.count(trt.LayerType.QUANTIZE), kinds.count(trt.LayerType.DEQUANTIZE), kinds.count(trt.LayerType.MATRIX_MULTIPLY)]
"""


def on_steps(rng, shape, scale, reach=100):
    """Float32 values within reach + 1 steps of scale, never near the middle between two steps."""
    return ((rng.integers(-reach, reach + 1, shape) + rng.uniform(-0.4, 0.4, shape)) * scale).astype(np.float32)


def layer(rng, k, scale):
    """Weights, k × len(scale): the largest of a column is 127 steps of its scale exactly, of either sign."""
    w = on_steps(rng, (k, scale.size), scale)
    w[rng.integers(k)] = 127 * scale * rng.choice([-1, 1], scale.size)
    return w


def calibration(rng, rows, k, scale):
    """Samples, rows × k: one value alone is the largest, 127 steps below zero."""
    samples = on_steps(rng, (rows, k), scale)
    samples[rng.integers(rows), rng.integers(k)] = -127 * scale
    return samples


def simulated(x, samples, w):
    """Result by Q/DQ; bound of its distance to x @ w where x does not saturate; what one x on another step may change. All float64."""
    largest = np.abs(np.float64(w)).max(axis=0)
    s_x, s_w = np.float32(np.abs(samples).max() / np.float32(127)) or np.float32(1), np.where(largest > 0, largest / 127, 1).astype(np.float32)
    bound = s_x / 2 * np.abs(np.float64(w)).sum(axis=0) + s_w / 2 * np.abs(np.float64(x)).sum(axis=1, keepdims=True) + w.shape[0] / 4 * s_x * np.float64(s_w)
    want = reference.quantised(x, s_x) @ reference.quantised(w, s_w)
    return want, bound * 1.001 + 1e-6, s_x * largest + np.abs(want).max(axis=0) * 1e-3 + 1e-6


rng = np.random.default_rng(4)
w = layer(rng, 64, 2.0 ** rng.integers(-9, -4, 32))
w[:, 5] = 0
samples = calibration(rng, 40, 64, 0.03)
x = on_steps(rng, (32, 64), 0.03)
draft = student.int8_linear(32, samples, w)
check.that(draft is not None, why="int8_linear 什么也没有返回。最后一行 return draft 写了吗？")
check.equal(student.define(PAIRS, "pairs")(draft), [2, 2, 1], why="网络里应当有两对 Q/DQ 和一次矩阵乘：激活一对，权重一对。")
runner, out = student.Runner(draft.plan()), on_gpu(np.zeros((32, 32), np.float32))
out.poison()
runner.infer(on_gpu(x), out)
got, (want, bound, slack) = out.read(), simulated(x, samples, w)
check.that(bool(np.isfinite(got).all()), why="结果里有 NaN 或 inf。有没有一列权重全是 0，刻度也成了 0？")
check.that(bool((np.abs(got - np.float64(x) @ w) <= bound).all()), why="误差超过了能证明的上界。权重是不是每列一个刻度，axis 是不是 1？求最大值之前取绝对值了吗？")
check.that(bool((np.abs(got - want) <= slack).all()), why="误差在上界之内，却和 NumPy 的模拟不一致。激活的刻度是不是 samples 的最大绝对值除以 127？")
### BEGIN HIDDEN TESTS
rows, k, n = (int(secret.integers(1, 4)) * 32 for _ in range(3))
scale = 2.0 ** secret.integers(-10, -6, n)
scale[[3, 7]] *= 400  # outlier channels
w = layer(secret, k, scale)
w[:, 9] = 0
samples = calibration(secret, int(secret.integers(20, 60)), k, 0.05)
x = on_steps(secret, (rows, k), 0.05)
draft = student.int8_linear(rows, samples, w)
check.equal(student.define(PAIRS, "pairs")(draft), [2, 2, 1], why="换了尺寸，网络里 Q/DQ 的数目就不对了。")
runner = student.Runner(draft.plan())
source, out = on_gpu(x), on_gpu(np.zeros((rows, n), np.float32))
out.poison()
runner.infer(source, out)
got, (want, bound, slack) = out.read(), simulated(x, samples, w)
check.that(bool(np.isfinite(got).all()), why="结果里有 NaN 或 inf。有没有一列权重全是 0，刻度也成了 0？")
check.that(bool((np.abs(got - np.float64(x) @ w) <= bound).all()), why="有离群通道时，普通通道的误差超过了上界：它们的刻度被离群通道撑大了。权重要每列一个刻度。")
check.that(bool((np.abs(got - want) <= slack).all()), why="和 NumPy 的模拟不一致。刻度是不是按要求从 samples 和 w 算的？最大绝对值要先取绝对值。")
x = on_steps(secret, (rows, k), 0.05)
x[1] = on_steps(secret, k, 0.05, reach=400)
x[2] = -x[1]
source.write(x)
out.poison()
runner.infer(source, out)
got, (want, _, slack) = out.read(), simulated(x, samples, w)
check.that(bool((np.abs(got - want) <= slack).all()), why="超出标定范围的输入应当饱和，刻度不变。")
samples = np.zeros((30, k), np.float32)
x = on_steps(secret, (rows, k), 1)
x[1] = on_steps(secret, k, 1, reach=400)
source.write(x)
out.poison()
student.Runner(student.int8_linear(rows, samples, w).plan()).infer(source, out)
got, (want, _, slack) = out.read(), simulated(x, samples, w)
check.that(bool((np.abs(got - want) <= slack).all()), why="标定数据全是 0 的时候，激活的刻度应当是 1。最大绝对值是 0，刻度用 1，这对激活和权重都一样。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：在划算的地方用 FP16（3 分）
#
# 给定的 `strict_chain(rows, weights)` 画一条 FP32 的长链：每层乘一个由 −1、0、1 组成的矩阵，再用 `fold` 把结果折回 −8…7。
# 所有的中间结果都是绝对值小于 2048 的整数，所以 FP16 也是精确的，快慢之外，**一个字节都不许差**。
#
# 写 `half_chain(rows, weights)`，画同一条链的 FP16 版，返回 `Draft`：
#
# 1. 输入 `"x"`、输出 `"y"` 仍是 FLOAT；
# 2. 每一次矩阵乘和 `fold` 都在 HALF 里做；
# 3. 整个网络里最多两层 `cast`；
# 4. 4 层、1024 × 1024 时，速度是 `strict_chain`（关掉 TF32）的 2 倍以上。
#
# 怎么计时：给定的 `Chain(plan, x)` 每调用一次，入队一次引擎，再用一个小内核 `feed` 把 `y` 搅拌进 `x`，作为下一次的输入，都在 `stream` 上。
# 测试连续调用许多次，最后整个设备同步一次，量端到端的时间。
# 如果参考实现在你的 GPU 上快不到 4 倍，门槛就降到它的加速比的一半（不低于 1.2 倍）；差一点的，得一半分。
#
# 为什么和关掉 TF32 的比？因为 T4 这样的 GPU 没有 TF32，题目要在哪里都一样。在有 TF32 的 GPU 上，光打开那张许可证也能快不少，
# 但那不是 FP16：测试自己调用 `plan()`（TF32 关着），还会验指纹，输入里极小的数应当变成 0。

# %% tags=["gpu"]
FEED = r"""
extern "C" __global__ void feed(float *x, const float *y, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    int v = (int)y[t] + (int)x[t] + (int)(t % 5u);
    x[t] = (float)(((v + 8) & 15) - 8);
}
"""
feed = cp.RawModule(code=FEED).get_function("feed")


def fold(draft, y):
    """y − 16·floor(y / 16) − 8: back to −8 … 7, in the type of y (FLOAT or HALF); exact for integers below 2048."""
    sixteen = draft.scalar(16, y)
    whole = draft.elementwise(y, sixteen, OP.FLOOR_DIV)
    rest = draft.elementwise(y, draft.elementwise(whole, sixteen, OP.PROD), OP.SUB)
    return draft.elementwise(rest, draft.scalar(8, y), OP.SUB)


def strict_chain(rows, weights):
    """A Draft, all FLOAT: x (rows × width) → for each w of weights (int8, layers × width × width): @ w, fold → y."""
    draft = Draft()
    h = draft.network.add_input("x", FLOAT, (rows, weights.shape[1]))
    for w in weights:
        h = fold(draft, draft.matmul(h, draft.constant(w.astype(np.float32))))
    draft.output(h)
    return draft


class Chain:
    """An engine that feeds itself: a call enqueues it on `stream` and mixes y into x, without waiting.

    plan: of strict_chain's or half_chain's kind. x: cupy float32, integers −8 … 7, advanced in place.
    """

    def __init__(self, plan, x):
        self.runner, self.x, self.y = Runner(plan), x, cp.zeros_like(x)
        cp.cuda.runtime.deviceSynchronize()
        self.runner.bind(x, self.y)

    def __call__(self):
        self.runner.enqueue()
        feed((-(-self.x.size // 256),), (256,), (self.x, self.y, np.uint32(self.x.size)), stream=stream)


with stream:
    warm = cp.zeros(256, cp.float32)
    feed((1,), (256,), (warm, warm, np.uint32(256)))
stream.synchronize()

# %% [markdown]
# 权重和正确答案，用 NumPy 写：

# %%
def sign_weights(seed, layers, width):
    """Random weights of −1, 0, 1: int8, layers × width × width, at most 96 of them not 0 in a column, so that sums stay below 8·96."""
    rng = np.random.default_rng(seed)
    busy = min(48, width // 4)
    column = np.zeros((width, 1), np.int8)
    column[:busy], column[busy : 2 * busy] = 1, -1
    return np.stack([rng.permuted(np.repeat(column, width, axis=1), axis=0) for _ in range(layers)])


def chained(x, weights, runs=0):
    """The chain's y for x if runs is 0, else x after so many calls of a Chain; x is stored as FP16 first. float64."""
    def y_of(x):
        h = x.astype(np.float16).astype(np.float64)
        for w in weights:
            h = h @ w
            h = h - 16 * np.floor(h / 16) - 8
        return h

    if runs == 0:
        return y_of(x)
    for _ in range(runs):
        v = y_of(x) + x + (np.arange(x.size) % 5).reshape(x.shape)
        x = (v + 8) % 16 - 8
    return x


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 每乘一次就变窄、变宽各一次，一共要几层 `cast`？它们能不能只出现在整条链的两头？
# `fold` 里的常量是什么类型，由谁决定？权重呢？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 和练习一相同：`draft.cast(tensor, HALF)`、`w.astype(np.float16)`、最后 `draft.cast(tensor, FLOAT)`。
# `draft.scalar(value, like)` 用 `like` 的类型，所以 `fold` 不用改。写好以后，用 `tensor_types(half_chain(64, weights).plan())` 看一眼；
# `weights` 可以用 `sign_weights(0, 2, 64)` 造。
#
# </details>

# %% solution="half_chain" tags=["gpu"]
def half_chain(rows, weights):
    """A Draft of strict_chain's network in HALF between two casts; x and y stay FLOAT. weights: int8, layers × width × width."""
    ### BEGIN SOLUTION: 照 strict_chain 画：入口变窄一次，出口变宽一次，中间的权重都存成 float16
    draft = Draft()
    h = draft.cast(draft.network.add_input("x", FLOAT, (rows, weights.shape[1])), HALF)
    for w in weights:
        h = fold(draft, draft.matmul(h, draft.constant(w.astype(np.float16))))
    draft.output(draft.cast(h, FLOAT))
    return draft
    ### END SOLUTION


# %% test="half_chain" kind="speedup" points=3 tags=["gpu"]
CASTS = """
import tensorrt as trt

def casts(draft):
    network = draft.network
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    products = [layer for layer in layers if layer.type == trt.LayerType.MATRIX_MULTIPLY]
    return [sum(layer.type == trt.LayerType.CAST for layer in layers), [layer.get_input(k).dtype.name for layer in products for k in range(2)]]
"""
weights = reference.sign_weights(5, 3, 64)
start = np.random.default_rng(6).integers(-8, 8, (32, 64)).astype(np.float32)
draft = student.half_chain(32, weights)
check.that(draft is not None, why="half_chain 什么也没有返回。最后一行 return draft 写了吗？")
casts, products = student.define(CASTS, "casts")(draft)
check.equal(products, ["HALF"] * 6, why="三层，每层一次矩阵乘，两个输入都应当是 HALF。入口变窄了吗？权重存成 float16 了吗？")
check.that(casts <= 2, why="网络里的 cast 超过了两层：它们只该出现在整条链的两头。")
source, out = on_gpu(start), on_gpu(np.zeros((32, 64), np.float32))
out.poison()
student.Runner(draft.plan()).infer(source, out)
check.equal(out, reference.chained(start, weights).astype(np.float32), why="结果不对。链里都是小整数，FP16 应当一个不差：漏了哪一层的 fold 吗？")

LAYERS, SIZE = 4, 1024
weights = reference.sign_weights(int(secret.integers(2**40)), LAYERS, SIZE)
start = secret.integers(-8, 8, (SIZE, SIZE)).astype(np.float32)
x, y, z = on_gpu(start), on_gpu(start), on_gpu(start)
draft = student.half_chain(SIZE, weights)
casts, products = student.define(CASTS, "casts")(draft)
check.that(casts <= 2 and products == ["HALF"] * 2 * LAYERS, why="计时用的网络和前面的不一样：每次矩阵乘的两个输入都应当是 HALF，cast 最多两层，不论多大。")
check.speedup(
    student.Chain(draft.plan(), x),
    over=reference.Chain(reference.strict_chain(SIZE, weights).plan(), y),
    best=reference.Chain(reference.half_chain(SIZE, weights).plan(), z),
    state=(x, z),
    at_least=2.0,
    draw=lambda: secret.integers(-8, 8, (SIZE, SIZE)).astype(np.float32),
    why="还不够快。每一层的权重都是 HALF 吗？cast 是不是只在两头？",
)
### BEGIN HIDDEN TESTS
layers, rows, width = int(secret.integers(2, 6)), int(secret.integers(2, 6)) * 8, int(secret.integers(2, 6)) * 32
weights = reference.sign_weights(int(secret.integers(2**40)), layers, width)
draft = student.half_chain(rows, weights)
plan = draft.plan()
start = secret.integers(-8, 8, (rows, width)).astype(np.float32)
source, out = on_gpu(start), on_gpu(np.zeros((rows, width), np.float32))
out.poison()
student.Runner(plan).infer(source, out)
check.equal(out, reference.chained(start, weights).astype(np.float32), why="换了层数和尺寸，结果不对。层数、行数、宽度都取自参数吗？")
faint = (secret.choice([-1, 1], (rows, width)) * 2.0**-30).astype(np.float32)  # 0 in FP16; elsewhere a negative sum is folded to 8, not to -8
source.write(faint)
out.poison()
student.Runner(student.half_chain(rows, weights[:1]).plan()).infer(source, out)
check.equal(out, reference.chained(faint, weights[:1]).astype(np.float32), why="指纹不对：输入没有经过 FP16。极小的数在 FP16 里应当变成 0。是不是只打开了 TF32，或者用了 BF16？")
start = secret.integers(-8, 8, (rows, width)).astype(np.float32)
source.write(start)
runs = int(secret.integers(3, 8))
student.Chain(plan, source).run(runs)
check.equal(source, reference.chained(start, weights, runs).astype(np.float32), why="把输出喂回输入，连续跑几次，结果不对。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：FP16 在哪里不划算，为什么（3 分）
#
# 写 `half_gain(task, machine)`，按“一个可以算的模型”那一节，预测 FP16 比 FP32 快几倍，以及各被什么限制。这道题不需要 GPU。
#
# - `task` 是字典：`m`、`k`、`n`（一层矩阵乘的大小）、`layers`（层数，都一样大）、`casts`（FP16 版里单独成为内核的 `cast` 有几个）；
# - `machine` 是字典：`fp32_tflops`、`fp16_tflops`、`gb_per_s`、`launch_us`；
# - FP32 版：`layers` 个矩阵乘，每个数 4 字节。FP16 版：`layers` 个矩阵乘，每个数 2 字节，再加 `casts` 个 `cast`，每个 $mn$ 个数；
# - 返回 `(gain, limit32, limit16)`：总时间之比（FP32 / FP16），以及两种**矩阵乘**各被 `"compute"`、`"memory"`、`"launch"` 中的哪一个限制（测试里不会有两项一样长）。

# %%
# Peaks from the vendors' data sheets (dense), not measured; launch_us is a round figure.
MACHINES = {
    "T4": {"fp32_tflops": 8.1, "fp16_tflops": 65.0, "gb_per_s": 320.0, "launch_us": 3.0},
    "H200": {"fp32_tflops": 67.0, "fp16_tflops": 989.0, "gb_per_s": 4800.0, "launch_us": 2.0},
}
TASKS = {
    "1 句 × 8 个 token，宽 768": {"m": 8, "k": 768, "n": 768, "layers": 12, "casts": 2},
    "1 句 × 8 个 token，宽 4096": {"m": 8, "k": 4096, "n": 4096, "layers": 12, "casts": 2},
    "4 句 × 128 个 token，宽 768": {"m": 512, "k": 768, "n": 768, "layers": 12, "casts": 2},
    "16 句 × 512 个 token，宽 768": {"m": 8192, "k": 768, "n": 768, "layers": 12, "casts": 2},
    "同上，每层前后各一个 cast": {"m": 8192, "k": 768, "n": 768, "layers": 12, "casts": 24},
    "8 个 token，宽 256，只有 1 层": {"m": 8, "k": 256, "n": 256, "layers": 1, "casts": 2},
}

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 先写一个小函数：给定每个数的字节数和算力，返回三种时间。最大的那个既是时间，也说明了限制。
# 两种类型各调用一次，只有两样东西不同。`cast` 的时间为什么没有 `"compute"` 那一项？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 三种时间放进字典 `times`，`max(times, key=times.get)` 给出限制的名字，`times[名字]` 是时间。
# 单位都换成 µs：TFLOPS × 10⁶ 是每微秒的运算次数，GB/s × 10³ 是每微秒的字节数。
#
# </details>

# %% solution="half_gain"
def half_gain(task, machine):
    """Predict (gain, limit32, limit16): FP32's time over FP16's, and what limits the products of each.

    task: dict with m, k, n, layers, casts (ints). machine: dict with fp32_tflops, fp16_tflops, gb_per_s, launch_us.
    Limits: "compute", "memory" or "launch".
    """
    ### BEGIN SOLUTION: 先写一个求三种时间的小函数，FP32 和 FP16 各用一次，取最大的；FP16 再加上 cast 的时间，最后相除
    m, k, n = task["m"], task["k"], task["n"]
    per_us = machine["gb_per_s"] * 1e3

    def product(size, tflops):
        times = {"compute": 2 * m * k * n / (tflops * 1e6), "memory": (m * k + k * n + m * n) * size / per_us, "launch": machine["launch_us"]}
        limit = max(times, key=times.get)
        return limit, times[limit]

    limit32, us32 = product(4, machine["fp32_tflops"])
    limit16, us16 = product(2, machine["fp16_tflops"])
    cast_us = max(machine["launch_us"], 6 * m * n / per_us)
    return task["layers"] * us32 / (task["layers"] * us16 + task["casts"] * cast_us), limit32, limit16
    ### END SOLUTION


# %% test="half_gain" kind="answer" points=3
easy = {"fp32_tflops": 10.0, "fp16_tflops": 80.0, "gb_per_s": 1000.0, "launch_us": 2.0}
big = {"m": 1000, "k": 1000, "n": 1000, "layers": 4, "casts": 0}
why = "手算一遍：每层 2×10⁹ 次运算，FP32 要 200 µs，FP16 要 25 µs；搬运是 12 µs 和 6 µs。两种都被计算限制，快 8 倍。"
check.equal(student.half_gain(big, easy), [8.0, "compute", "compute"], rel=1e-9, why=why)
check.equal(student.half_gain(big | {"casts": 2}, easy), [800 / 112, "compute", "compute"], rel=1e-9, why="两个 cast 各搬 6×10⁶ 字节，6 µs 一个：FP16 一共 112 µs，FP32 是 800 µs。")
check.equal(student.half_gain(big | {"m": 1}, easy), [4.004 / 2.002, "memory", "memory"], rel=1e-9, why="只有一行时，时间都花在搬权重上：4.004 µs 对 2.002 µs，快 2 倍。")
check.equal(student.half_gain({"m": 1, "k": 100, "n": 100, "layers": 1, "casts": 2}, easy), [1 / 3, "launch", "launch"], rel=1e-9, why="内核都短到只剩启动：FP32 一个内核 2 µs，FP16 三个内核 6 µs，反而慢到三倍。")
### BEGIN HIDDEN TESTS
def terms(task, machine, size, tflops):
    m, k, n = task["m"], task["k"], task["n"]
    return {"compute": 2 * m * k * n / tflops / 1e6, "memory": size * (m * k + k * n + m * n) / machine["gb_per_s"] / 1e3, "launch": machine["launch_us"]}


def rule(task, machine):
    wide, narrow = terms(task, machine, 4, machine["fp32_tflops"]), terms(task, machine, 2, machine["fp16_tflops"])
    cast = max(machine["launch_us"], 6 * task["m"] * task["n"] / machine["gb_per_s"] / 1e3)
    limits = [max(each, key=each.get) for each in (wide, narrow)]
    return [max(wide.values()) * task["layers"] / (max(narrow.values()) * task["layers"] + cast * task["casts"]), *limits]


def clear(task, machine):
    """Whether no two terms that compete for the longest are close."""
    for size, tflops in ((4, machine["fp32_tflops"]), (2, machine["fp16_tflops"])):
        first, second = sorted(terms(task, machine, size, tflops).values())[:-3:-1]
        if first < 1.1 * second:
            return False
    return True


cases = []
while len(cases) < 60:
    task = {"m": int(2 ** secret.uniform(0, 13)), "k": int(2 ** secret.uniform(6, 12)), "n": int(2 ** secret.uniform(6, 12)), "layers": int(secret.integers(1, 30)), "casts": int(secret.integers(0, 40))}
    machine = {"fp32_tflops": float(secret.uniform(3, 80)), "fp16_tflops": float(secret.uniform(20, 1000)), "gb_per_s": float(secret.uniform(200, 5000)), "launch_us": float(secret.uniform(1, 6))}
    if clear(task, machine):
        cases.append((task, machine))
listed = [(task, machine) for task in reference.value("TASKS").values() for machine in reference.value("MACHINES").values()]
cases.append(({"m": 512, "k": 1024, "n": 1024, "layers": 6, "casts": 0}, {"fp32_tflops": 8.0, "fp16_tflops": 1000.0, "gb_per_s": 500.0, "launch_us": 1.0}))  # compute, then memory
for group, why in ((listed, "给定的任务里有算错的。三项都代进去了吗？两种类型的字节数和算力都换了吗？"), (cases, "随机的任务里有算错的。k 和 n 不相等时对吗？cast 也不会比 launch_us 更短。两种类型的限制要分开判断。")):
    got = [list(student.half_gain(task, machine)) for task, machine in group]
    want = [rule(task, machine) for task, machine in group]
    check.equal([each[1:] for each in got], [each[1:] for each in want], why=why)
    check.equal([each[0] for each in got], [each[0] for each in want], rel=1e-6, why=why)
### END HIDDEN TESTS

# %% [markdown]
# 现在用你写的函数看看这些任务。哪一个的倍数离手册上的算力之比（T4 约 8 倍，H200 约 15 倍）最远？为什么？

# %% tags=["demo"]
rows = []
for name, task in TASKS.items():
    for gpu, machine in MACHINES.items():
        gain, limit32, limit16 = half_gain(task, machine)
        rows.append((name, gpu, f"{gain:.2f}×", limit32, limit16))
lab.say(lab.table(("任务", "GPU（手册数字）", "FP16 快几倍", "FP32 受限于", "FP16 受限于"), rows), measured=False)

# %% [markdown]
# 三个规律：
#
# - 限制会**换人**：FP32 被计算限制，换成 FP16 以后计算快了，就可能轮到带宽或启动当瓶颈，倍数也就到不了手册上的比值。
#   看“4 句 × 128 个 token”在 H200 上的那一行：限制从计算换成了启动，15 倍只剩不到 4 倍；
# - 两边都被启动限制，FP16 最好也就是 1 倍，`cast` 只会帮倒忙。这时该做的是融合，或者用 CUDA 图；
# - `cast` 按层加，能把赚来的赔掉一大半。能融合的 `cast` 不收钱，不能融合的每个都是一个内核；所以练习三只许有两层。

# %% [markdown] tags=["instructor"]
# 给教师：练习一、三的隐藏测试都从外面验指纹：极小的数（2⁻²⁸、2⁻³⁰）在 FP16 里是 0，在 FP32、TF32、BF16 里都留得住，
# 所以“只打开 TF32”或“改用 BF16”会被发现，不依赖检查器的措辞；检查器只在参考答案自己的引擎里也看得见 FP16 时才问。
# 练习三的指纹只用一层：第一层以后，8 和 −8 对 16 同余，差别就折没了。练习一用几百上千的行触发平方溢出；有的融合内核会在寄存器里用 FP32，
# 全 HALF 的写法数值上可能碰巧正确，所以还查网络里归一化各层的类型。
# 练习二的数据离取整的分界点至少 0.1 格，除法换成乘倒数也不会误判，此外还放过一个数差一格；离群通道比别的大 400 倍，整张量一个刻度会超过上界。
# 练习三的状态是 −8…7 的整数，永不收敛，逐字节比较；计时的基线是参考进程里关掉 TF32 的 FP32 引擎。

# %% [markdown]
# ## 小结
#
# | 以前的说法 | 实验以后的说法 |
# |:--|:--|
# | 打开 FP16 开关，就是 FP16 推理 | 精度是每个张量的类型；开关在 11 里没有了，在强类型网络里本来也用不上 |
# | BF16 比 FP16 准 | BF16 走得远，FP16 看得细；数的大小合适时 FP16 细八倍 |
# | TF32 就是 FP32 | TF32 是一张许可证：允许乘法丢尾数，用不用由构建器决定 |
# | 离 65504 远得很，不会溢出 | 256 以上的数，平方就溢出；归一化和求和要围成 FP32 的小岛 |
# | 容差写个 1e-3 | 按预算算：$(3u + K\cdot 2^{-24})\,|x||w|$（累加用 32 位时），并且“在预算之内才放行”，NaN 才挡得住 |
# | 量化的误差靠碰运气 | 刻度定了，上界就定了；离群通道要每通道一个刻度，或者挪到权重里 |
# | FP16 快 N 倍 | 先问被什么限制：计算、带宽，还是启动；`cast` 要算钱 |
#
# **带走三句话**
#
# 1. 精度写在网络里，用物证（特别的输入）和口供（检查器）一起证明。
# 2. 误差先算上界再比较；溢出不归预算管，靠设计躲开。
# 3. 窄类型省的是计算和带宽，省不了启动；换了类型，瓶颈会换人。
#
# 精度的能力还随 GPU 而变：T4 没有 TF32 和 BF16 的张量核心，同一份代码在一种 GPU 上能构建、能捕获，在另一种上未必。
# 所以在目标机器上先试，留一条退路。《捕获 TensorRT 推理》会把退路做实。
#
# 下一步：《构建的代价》拆开构建的时间，讲清策略和计时缓存；《动态形状》让尺寸也动起来。
