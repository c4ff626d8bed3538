# %% [markdown]
# # 优化 Profile 的设计与管理
#
# 一个文本服务，请求长度从 8 到 512 个 token。引擎（engine）已经支持动态形状（dynamic shape）：一个优化 Profile（optimization profile），
# 最小 8，最大 512，中间的那个 opt 照着示例填了 512。能跑，也算得对，可是同事问了三个问题，没有一个答得上来：
#
# - opt 填 512，可是过半的请求不到五十个 token。**填错了会怎样？**
# - 有人说应该分成三个 Profile。**多几个 Profile，到底快在哪里，又要付出什么？**
# - 还有人说，干脆都填充（padding）到 512，形状就固定了。**填充要花多少钱，结果还对吗？**
#
# 这一章不争论，只量：把每种做法的价钱录成一张表，再用真实流量的分布去加权。
#
# **学完以后，你能够**
#
# - 说出 opt 决定什么、不决定什么，并用测量证明；
# - 由一份流量直方图和一张成本表，算出该设几个 Profile、各是什么范围；
# - 让一个引擎的几个 Profile 交错着服务，每次都对，超出范围时给出清楚的错误；
# - 说清切换 Profile 的规矩：它清掉什么，排在哪条流上，为什么每个 Profile 一个上下文；
# - 在填充、Profile、静态引擎之间，按成本和显存作出选择。
#
# **需要的基础**：《动态形状》里的 min / opt / max、`set_input_shape` 和它的返回值。
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
# ## 两份数据：流量和价钱
#
# `lengths.csv` 是一份**合成的**流量：4000 个请求，每个请求多少个 token，由固定的随机种子造出来，形状照着常见的文本服务：
# 大部分是短查询，一部分是段落，少数是长文档。
#
# `costs.json` 是**录下来的**成本表：一个小的多层感知机（MLP，FP16，四次矩阵乘法，对每个 token 做同样的运算），用不同的 Profile 建成好几个引擎（批大小都是 1 到 8，opt 取 8），
# 在同一块 GPU 上轮流测量每种长度的时间。没有 GPU，也能用它学完本章的前半和前两道练习。引擎有三类（`kind`）：
#
# - `wide`：只有一个宽的 Profile，8 到 512，每个引擎的 opt 不同；
# - `three`：三个窄的 Profile，首尾相接；
# - `static`：静态引擎，长度写死，min、opt、max 是同一个数，只能跑那一种长度，短的请求要填充到它。

# %%
import csv
import json
from pathlib import Path

COSTS = json.loads(Path("costs.json").read_text(encoding="utf-8"))
GRID = COSTS["lengths"]  # tokens, ascending: the lengths that the table knows

with Path("lengths.csv").open(encoding="utf-8") as file:
    rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
REQUESTS = {int(row["length"]): int(row["requests"]) for row in rows}  # length -> how many requests had it


def counted(requests, grid):
    """Count requests (dict length -> number) by the smallest length of the grid (ascending) that holds them.

    Returns a list of int, one for each length of the grid. Lengths beyond the grid's last raise ValueError.
    """
    if max(requests) > grid[-1]:
        raise ValueError(f"长度 {max(requests)} 超出了表的最后一格 {grid[-1]}")
    counts = [0] * len(grid)
    for length, number in requests.items():
        counts[int(np.searchsorted(grid, length))] += number
    return counts


TRAFFIC = counted(REQUESTS, GRID)
REQUESTS_SORTED = [length for length, number in sorted(REQUESTS.items()) for _ in range(number)]  # one length for each request


def engines_of(kind):
    """The recorded engines of one kind: "wide", "three" or "static"."""
    return [each for each in COSTS["engines"] if each["kind"] == kind]


def cost_table(batch, clock):
    """What one inference costs on a wide profile, µs. Returns float64, shape (len(GRID), len(GRID)).

    Row i: the profile (GRID[0], GRID[i], GRID[-1]), that is, opt = GRID[i]. Column j: run at length GRID[j].
    batch: 1 or 8. clock: "gpu_us" (the GPU alone) or "end_to_end_us" (host clock, from the call to the result).
    """
    by_opt = {each["profiles"][0][1]: each["times"][str(batch)][clock] for each in engines_of("wide")}
    return np.array([by_opt[opt] for opt in GRID])


# %% tags=["demo"]
import matplotlib.pyplot as plt

lab.plot_style()
spread = np.array(REQUESTS_SORTED)
fig, ax = plt.subplots()
ax.hist(spread, bins=np.arange(0, 521, 8))
ax.set_xlabel("请求长度（token）")
ax.set_ylabel("请求数")
ax.set_title("流量（合成数据）")
plt.show()

lab.say(
    f"成本表录自 **{COSTS['gpu']}**（驱动 {COSTS['driver']}，{COSTS['recorded_at']}）。"
    + ("**这一份是占位的合成数据，不是测量。**" if COSTS["synthetic"] else "")
    + f"\n\n流量：中位数 {np.median(spread):.0f} 个 token，平均 {spread.mean():.0f}，"
    f"p99（99% 的请求不超过它）{np.percentile(spread, 99):.0f}；不超过 64 的占 {np.mean(spread <= 64):.0%}，超过 256 的占 {np.mean(spread > 256):.0%}。",
    measured=False,
)

# %% [markdown]
# 每个价钱都有两种时钟（clock）的读数，别混：
#
# - `gpu_us`：只算 GPU。先用一个空转内核把流堵住，等 CPU 把活儿都交完再放行，这样内核之间没有 CPU 造成的空隙；
# - `end_to_end_us`：一个请求从调用到拿到结果，主机的钟。CPU 逐个启动内核的时间也在里面。
#
# 表只有不多的几种长度。真实的长度归到**能装下它的最小一格**，`counted` 做的就是这件事。长的一般不比短的便宜，所以算出来的成本偏高；
# 格子稀的地方偏得多：129 个 token 的请求，如果下一格是 512，也按 512 算。做法之间比高低够用，绝对值别当真。
#
# ## opt 决定什么
#
# 构建器（builder）为每个 Profile 单独挑选策略（tactic）：同一层有许多种内核可用，它把形状设成 opt，给候选的内核逐个计时，留下最快的。
# **计时只在 opt 上做**，别的长度都用为 opt 挑出来的那一套。
#
# 所以在偏离 opt 的地方，选中的内核可能不是最快的。慢多少？把几个“只有 opt 不同”的引擎摆在一起，
# 每一列除以这一列里最快的那个，就看得见了。先猜猜：最糟的一格会慢多少，5%，50%，还是几倍？

# %% tags=["demo"]
fig, axes = plt.subplots(1, 2, figsize=(10.5, 4.2))
found = {}
for ax, batch in zip(axes, (1, 8), strict=True):
    table = cost_table(batch, "gpu_us")
    slower = table / table.min(axis=0)
    found[batch] = slower
    image = ax.imshow(slower, origin="lower", cmap="viridis", vmin=1, vmax=max(1.05, slower.max()))
    ax.set_xticks(range(len(GRID)), GRID, rotation=45)
    ax.set_yticks(range(len(GRID)), GRID)
    ax.set_xlabel("运行时的长度（token）")
    ax.set_ylabel("构建时的 opt（token）")
    ax.set_title(f"批大小 {batch}：是这一列最快的几倍")
    ax.grid(False)
    fig.colorbar(image, ax=ax)
plt.show()

lines = []
for batch, slower in found.items():
    opt, run = np.unravel_index(slower.argmax(), slower.shape)
    own = np.diag(slower)
    lines.append(
        f"- 批大小 {batch}：最糟的一格是 opt = {GRID[opt]}、实际跑 {GRID[run]}，慢 **{slower.max() - 1:.0%}**；所有格子的中位数慢 {np.median(slower) - 1:.1%}。"
        f"“opt 正好等于运行长度”在 {len(GRID)} 种长度里有 {int((own <= 1.02).sum())} 种离最快不到 2%，最多慢 {own.max() - 1:.0%}。"
    )
worst = max(slower.max() for slower in found.values()) - 1
verdict = "选错 opt 的代价很实在" if worst > 0.2 else "选错 opt 有代价，但不大" if worst > 0.05 else "opt 的影响和测量误差差不多"
lab.say(f"录制这张表的 GPU 和网络上（{COSTS['gpu']}，只算 GPU 的时间）：**{verdict}**。\n\n" + "\n".join(lines), measured=False)

# %% [markdown]
# 这张图有两个读法：
#
# - **竖着看一列**：固定一种长度，换不同的 opt，时间差多少。这就是“opt 选错了多少钱”。
# - **看对角线**：opt 正好等于运行长度，应当最好或接近最好。右图（批大小 8）是这样吗？左图不一定：这些引擎构建时 opt 的**批大小都是 8**，
#   批大小 1 时，对角线上的形状也不是 opt。opt 是整个形状，不只是长度。右图里若还有不是最好的列，多半是计时的噪声，或几种内核本来就不相上下。
#   选 opt 不必较真到个位数。
#
# ### “opt 无所谓”对不对
#
# 一种常见的说法是“opt 只是个提示，随便填”。上面的结论只属于录制的那块 GPU。在你的 GPU 上呢？
#
# 为了当场测，本章自带一个很小的网络，一个引擎几秒到二十秒就能建好。它对整数做运算，所以结果可以**逐位**核对：
#
# 1. 先把所有 token 加起来（每个 token 都知道别人，像注意力那样），再加回每个 token；
# 2. 然后是两次矩阵乘法：扩到 4096 维，再收回 256 维；
# 3. 每一步之后都把数折叠回 −8 … 7，所以中间结果都是小整数，FP32 下无论用什么内核、按什么次序相加，都一位不差。
#
# 输入叫 `tokens`，输出叫 `answers`，形状都是（长度，批大小，256），前两维是动态的。长度在最前面，于是“前 L 个 token”是一段连续的显存。

# %%
WIDTH, INNER = 256, 4096
SHORTEST, LONGEST = 8, 512

_rng = np.random.default_rng(14)
# One weight in eight is +1 or -1: sums stay far below 2**24, up to which float32 counts exactly.
WEIGHTS = [_rng.choice(np.array([-1, 0, 1], np.float32), shape, p=(1 / 16, 7 / 8, 1 / 16)) for shape in ((WIDTH, INNER), (INNER, WIDTH))]


def folded(values):
    """Fold integers (numpy float32) into -8 … 7."""
    return values - 16 * np.floor(values / 16) - 8


def answers(tokens):
    """What the network makes of tokens (numpy float32, whole numbers, shape (length, batch, WIDTH)); same shape."""
    x = (tokens + folded(tokens.sum(axis=0, keepdims=True))).reshape(-1, WIDTH)
    for weights in WEIGHTS:
        x = folded(x @ weights)
    return x.reshape(tokens.shape)


# %% [markdown]
# 下面是给定的 TensorRT 部分，练习都可以用：
#
# - `build_plan(ranges)`：构建，返回计划文件（plan，序列化的引擎）。`ranges` 里每一项是一个 Profile：`(min, opt, max)`，各是 `(长度, 批大小)`。
#   同样的 `ranges` 在一个进程里只建一次；
# - `open_engine(plan)`、`new_context(engine)`：反序列化、创建执行上下文（execution context）。失败时 TensorRT 返回 `None`，这里换成异常；
# - `must(ok, what)`：TensorRT 的许多调用用 `False` 表示失败，这里换成异常；
# - `stream`：本章的工作都放在这条流上。
#
# 网络用 FP32，关掉 TF32，为的是让这么小的网络也有足够的 GPU 工作可量。

# %% tags=["gpu"]
from time import perf_counter

import cupy as cp
import tensorrt as trt

stream = cp.cuda.Stream(non_blocking=True)
LEVEL = 1  # builder optimization level: quick, and still times the likeliest tactics
PLANS = {}  # ranges -> (plan, seconds of its build)


def must(ok, what):
    """Raise RuntimeError, with what TensorRT reported, if ok is False or None; otherwise return it."""
    if ok is None or ok is False:
        raise RuntimeError(f"{what}失败：" + "；".join(lab.trt_errors() or ["TensorRT 没有说明原因"]))
    return ok


class Layers:
    """Adds the layers of one network, and keeps the constants: TensorRT reads them at the build."""

    def __init__(self, network: trt.INetworkDefinition):
        self.network, self.kept = network, []

    def constant(self, values):
        self.kept.append(np.ascontiguousarray(values, np.float32))
        return self.network.add_constant(values.shape, trt.Weights(self.kept[-1])).get_output(0)

    def pair(self, a, operation, b):
        return self.network.add_elementwise(a, b, operation).get_output(0)

    def folded(self, x):
        """Fold x into -8 … 7, as the NumPy function does."""
        sixteen, eight = (self.constant(np.full((1,) * len(x.shape), value)) for value in (16, 8))
        down = self.pair(self.pair(x, trt.ElementWiseOperation.FLOOR_DIV, sixteen), trt.ElementWiseOperation.PROD, sixteen)
        return self.pair(self.pair(x, trt.ElementWiseOperation.SUB, down), trt.ElementWiseOperation.SUB, eight)

    def product(self, x, weights):
        return self.network.add_matrix_multiply(x, trt.MatrixOperation.NONE, self.constant(weights), trt.MatrixOperation.NONE).get_output(0)

    def answers(self, tokens):
        """The whole network, from (length, batch, WIDTH) to the same shape."""
        total = self.network.add_reduce(tokens, trt.ReduceOperation.SUM, 1 << 0, True).get_output(0)
        mixed = self.pair(tokens, trt.ElementWiseOperation.SUM, self.folded(total))
        flat = self.network.add_shuffle(mixed)
        flat.reshape_dims = (-1, WIDTH)
        x = flat.get_output(0)
        for weights in WEIGHTS:
            x = self.folded(self.product(x, weights))
        back = self.network.add_shuffle(x)
        back.set_input(1, self.network.add_shape(tokens).get_output(0))
        return back.get_output(0)


builder = trt.Builder(lab.trt_logger())  # kept: when the last one goes, its library is unloaded, and loading takes seconds


def build_plan(ranges):
    """Build the network for some profiles: (min, opt, max) each, and each of these (length, batch). Returns bytes."""
    key = tuple(tuple(tuple(each) for each in profile) for profile in ranges)
    if key not in PLANS:
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        layers = Layers(network)
        output = layers.answers(network.add_input("tokens", trt.DataType.FLOAT, (-1, -1, WIDTH)))
        output.name = "answers"
        network.mark_output(output)
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)
        config.builder_optimization_level = LEVEL
        for least, best, most in key:
            profile = builder.create_optimization_profile()
            profile.set_shape("tokens", (*least, WIDTH), (*best, WIDTH), (*most, WIDTH))
            if config.add_optimization_profile(profile) < 0:
                must(False, f"添加 Profile {(least, best, most)}")
        config.progress_monitor = lab.build_progress()
        began = perf_counter()
        with lab.timing_cache(config):
            plan = must(builder.build_serialized_network(network, config), "构建")
        PLANS[key] = bytes(plan), perf_counter() - began
    return PLANS[key][0]


RUNTIME = trt.Runtime(lab.trt_logger())


def open_engine(plan) -> trt.ICudaEngine:
    """Deserialize a plan (bytes). RuntimeError if TensorRT refuses it."""
    return must(RUNTIME.deserialize_cuda_engine(plan), "反序列化")


def new_context(engine: trt.ICudaEngine) -> trt.IExecutionContext:
    """A fresh execution context, with profile 0. RuntimeError if there isn't enough memory for it."""
    return must(engine.create_execution_context(), "创建执行上下文")


# %% [markdown]
# `config.progress_monitor = lab.build_progress()` 让构建时有一行进度；`lab.timing_cache(config)` 让同样的计时不必做第二次，《构建的代价》细讲这两样。
#
# 建三个引擎。前两个都是一个宽的 Profile，只有 opt 不同；第三个有两个窄的 Profile，故意把长的排在前面：序号只是序号，不说明长短。
# 批大小都是 1 到 16，opt 取 8。

# %% tags=["demo", "gpu"]
def ranges_of(*lengths, batches=(1, 8, 16)):
    """Profiles from length triples (min, opt, max), all with the same batches."""
    return [tuple(zip(each, batches, strict=True)) for each in lengths]


CHOICES = {
    "一个宽的，opt = 512": ranges_of((8, 512, 512)),
    "一个宽的，opt = 32": ranges_of((8, 32, 512)),
    "两个窄的": ranges_of((65, 512, 512), (8, 32, 64)),
}
engines = {name: open_engine(build_plan(ranges)) for name, ranges in CHOICES.items()}

# %% [markdown]
# 一个引擎里有几个 Profile、各管到哪里，都能问出来：`engine.num_optimization_profiles` 和
# `engine.get_tensor_profile_shape(名字, 序号)`，后者给出 `[min, opt, max]`。不要靠记忆，**计划文件自己知道**。

# %% tags=["demo", "gpu"]
rows = []
for name, engine in engines.items():
    for index in range(engine.num_optimization_profiles):
        least, best, most = (tuple(shape) for shape in engine.get_tensor_profile_shape("tokens", index))
        rows.append((name, index, least, best, most))
lab.say(lab.table(("引擎", "Profile", "min", "opt", "max"), rows), measured=False)

# %% [markdown]
# 先看 opt **不**决定什么。两个宽的引擎，同一份输入，长度远离两边的 opt：结果一样吗？能接受的范围一样吗？要的显存一样吗？
#
# 下一格的 `prepared` 备好一次推理：上下文、形状、地址，再预热一次，后面的实验都用它。
# 其中 `context_on` 会切换 Profile，为什么要那样等，“上下文和切换”一节再讲，现在可以跳过。

# %% tags=["demo", "gpu"]
BATCH = 8
rng = np.random.default_rng(7)


def context_on(engine: trt.ICudaEngine, index):
    """A fresh context on a profile of the engine; waits until the switch is done. IndexError if there is no such profile."""
    if not 0 <= index < engine.num_optimization_profiles:
        raise IndexError(f"引擎只有 {engine.num_optimization_profiles} 个 Profile，没有第 {index} 号")
    context = new_context(engine)
    if index != context.active_optimization_profile:
        must(context.set_optimization_profile_async(index, stream.ptr), "切换 Profile")
        stream.synchronize()
    return context


def prepared(engine, length, index=0, batch=BATCH, fill=None):
    """A context on a profile of the engine, with shapes and addresses set. Returns (run, tokens, answers on the GPU)."""
    context = context_on(engine, index)
    must(context.set_input_shape("tokens", (length, batch, WIDTH)), "设置形状")
    with stream:
        tokens = cp.asarray(rng.integers(-8, 9, (length, batch, WIDTH)).astype(np.float32) if fill is None else fill)
        outcome = cp.zeros_like(tokens)
    must(context.set_tensor_address("tokens", tokens.data.ptr) and context.set_tensor_address("answers", outcome.data.ptr), "设置地址")
    run = partial(context.execute_async_v3, stream.ptr)
    run.kept = tokens, outcome  # the context knows only addresses: the arrays have to live as long as run
    must(run(), "入队")  # warm-up: the first one of a shape sets things up
    stream.synchronize()
    return run, tokens, outcome


wide512, wide32 = engines["一个宽的，opt = 512"], engines["一个宽的，opt = 32"]
same_input = rng.integers(-8, 9, (100, BATCH, WIDTH)).astype(np.float32)
results = [prepared(engine, 100, fill=same_input)[2].get() for engine in (wide512, wide32)]
accepts = [[new_context(engine).set_input_shape("tokens", (length, BATCH, WIDTH)) for length in (8, 512)] for engine in (wide512, wide32)]
rows = [
    ("长度 100 的结果和 NumPy 相比", *("逐位相同" if np.array_equal(result, answers(same_input)) else "不同" for result in results)),
    ("长度 8、长度 512", *("、".join("接受" if taken else "拒绝" for taken in each) for each in accepts)),
    ("上下文要的显存", *(f"{engine.device_memory_size_v2 / 2**20:.1f} MiB" for engine in (wide512, wide32))),
]
lab.say(lab.table(("比什么", "opt = 512", "opt = 32"), rows))

# %% [markdown]
# 范围只由 min 和 max 决定；结果该是多少就是多少（浮点网络会差在最后几位，因为内核不同，相加的次序不同）；
# 上下文（context）的显存主要由 max 决定，opt 至多通过选中的内核影响一点暂存（scratch）。
#
# **opt 只决定一件事：构建时在哪个尺寸上比快慢。** 比出来的差别有多大，现在就在你的 GPU 上量：两个引擎轮流跑，每种长度 21 对。

# %% tags=["demo", "gpu"]
MEASURED = (8, 32, 64, 65, 128, 256, 512)  # tokens

rows, telling = [], []
for length in MEASURED:
    pair = lab.compare_us(prepared(wide32, length)[0], prepared(wide512, length)[0], clock="end_to_end")
    low, high = np.percentile(pair.ratios, (25, 75))
    if low > 1.05 or high < 1 / 1.05:
        telling.append((length, pair.ratio))
    rows.append((length, f"{pair.first.median:.0f}", f"{pair.second.median:.0f}", f"{pair.ratio:.2f}"))
if telling:
    length, ratio = max(telling, key=lambda each: abs(np.log(each[1])))
    told = (
        f"**“opt 无所谓”在这里不成立**：{len(MEASURED)} 种长度里有 {len(telling)} 种，两个引擎稳定地差 5% 以上；"
        f"差得最多的是长度 {length}，opt = 512 的引擎用时是另一个的 {1 / ratio:.2f} 倍。"
    )
else:
    told = (
        "在这块 GPU、这个网络上，两个引擎没有稳定地差到 5%：为 32 和为 512 挑出来的内核差不多，或者这些长度的时间主要花在 CPU 上。"
        "这说明 **opt 的影响要量了才知道**，不说明它永远无所谓：上面录下来的表是另一个网络的答案。"
    )
lab.say(lab.table(("长度", "opt = 32（µs）", "opt = 512（µs）", "前者 / 后者"), rows) + "\n\n" + told)

# %% [markdown]
# 所以准确的说法是：**opt 不影响对错和范围，只影响速度；影响多大，取决于网络、GPU 和长度，要量。**
# 既然一分钱不花，就没有理由随便填。但也别只看哪种长度最多：少数很长的请求，可能比多数短的加起来还贵。该填多少，要拿流量去加权（下面有一节）。
#
# ## 一个宽的，还是几个窄的
#
# 一个 Profile 只有一个 opt。范围很宽时，总有一头离它远。分成几个窄的 Profile，每一段都有自己的 opt。
# 下面是本章的主图：时间随长度的变化，一个宽的 Profile 对几个窄的。第一张是录下来的 MLP，三个窄的；第二张（有 GPU 时）是刚建的网络，两个窄的。

# %% tags=["demo"]
recorded_three = engines_of("three")[0]
SHOWN = 8  # batch
fig, ax = plt.subplots()
for clock, style, word in (("gpu_us", "-", "只算 GPU"), ("end_to_end_us", "--", "端到端")):
    wide = cost_table(SHOWN, clock)[-1]
    ax.plot(GRID, wide, style, color="C0", label=f"一个宽的，opt = {GRID[-1]}，{word}")
    ax.plot(GRID, recorded_three["times"][str(SHOWN)][clock], style, color="C1", label=f"三个窄的，{word}")
statics = {each["profiles"][0][1]: each["times"][str(SHOWN)] for each in engines_of("static")}
ax.plot(list(statics), [each["gpu_us"][0] for each in statics.values()], "s", color="C2", label="静态引擎，只算 GPU")
for _, _, most in recorded_three["profiles"][:-1]:
    ax.axvline(most, color="grey", linewidth=0.7, linestyle=":")
ax.set_xlabel("长度（token）")
ax.set_ylabel("一次推理（µs）")
ax.set_ylim(bottom=0)
ax.set_title(f"批大小 {SHOWN}（{COSTS['gpu']}）")
ax.legend()
plt.show()

gain = cost_table(SHOWN, "gpu_us")[-1] / np.array(recorded_three["times"][str(SHOWN)]["gpu_us"])
nearest = [cost_table(SHOWN, "gpu_us")[GRID.index(length), GRID.index(length)] / each["gpu_us"][0] for length, each in statics.items()]
lab.say(
    f"只算 GPU，opt = {GRID[-1]} 的宽 Profile 用时是三个窄的 {gain.min():.2f} ～ {gain.max():.2f} 倍，差得最多的长度是 {GRID[int(gain.argmax())]}。"
    f"“opt 正好等于这个长度的宽 Profile”用时是静态引擎的 {min(nearest):.2f} ～ {max(nearest):.2f} 倍（1 就是一样快）。",
    measured=False,
)

# %% tags=["demo", "gpu"]
narrow = engines["两个窄的"]


def covering(engine: trt.ICudaEngine, length):
    """The first profile of the engine that takes this length."""
    for index in range(engine.num_optimization_profiles):
        least, _, most = engine.get_tensor_profile_shape("tokens", index)
        if least[0] <= length <= most[0]:
            return index
    raise ValueError(f"没有 Profile 能装下长度 {length}")


wide_us, narrow_us, cpu_us = [], [], []
for length in MEASURED:
    wide_run, narrow_run = prepared(wide512, length)[0], prepared(narrow, length, covering(narrow, length))[0]
    pair = lab.compare_us(wide_run, narrow_run, clock="end_to_end")
    wide_us.append(pair.first)
    narrow_us.append(pair.second)
    cpu_us.append(lab.submit_us(narrow_run).median)

fig, ax = plt.subplots()
for label, samples in (("一个宽的，opt = 512", wide_us), ("两个窄的", narrow_us)):
    (line,) = ax.plot(MEASURED, [s.median for s in samples], label=label)
    ax.fill_between(MEASURED, [s.percentile(10) for s in samples], [s.percentile(90) for s in samples], color=line.get_color(), alpha=0.15)
ax.plot(MEASURED, cpu_us, ":", color="grey", label="其中 CPU 提交")
ax.set_xlabel("长度（token）")
ax.set_ylabel("端到端（µs）")
ax.set_ylim(bottom=0)
ax.set_title(f"本章的网络，批大小 {BATCH}（{lab.gpu_name()}）")
ax.legend()
plt.show()

ratio = np.array([a.median / b.median for a, b in zip(wide_us, narrow_us, strict=True)])
bound = [length for length, total, cpu in zip(MEASURED, narrow_us, cpu_us, strict=True) if cpu > 0.8 * total.median]
lab.say(
    f"宽 / 窄的时间比在 {ratio.min():.2f} 到 {ratio.max():.2f} 之间。"
    + (
        f"长度 {'、'.join(map(str, bound))} 上，端到端的时间八成以上是 CPU 在提交：那里换 opt、换 Profile 都省不下多少。"
        if bound
        else "没有一种长度是 CPU 提交占到八成的：这些时间主要是 GPU 的。"
    )
)

# %% [markdown]
# 第一张图里，竖的点线是三个窄 Profile 的边界。每条线只在成本表的那几种长度上有实测，中间是直接连过去的，所以边界上的跳变看起来像一段斜坡。
# 内核合不合身，看实线；虚线高出来的那一截主要花在 CPU 那一边，机器忙闲不同，就会差几微秒。
#
# 第二张图里，两个窄的中长的那个，opt 也是 512，所以从 65 起两条线应当差不多；64 以下，一个 opt 是 32，一个是 512，看它们分开了多少。
# 有用的不是“窄”，是 opt 离得近。
#
# 看第二张图时还要记住一点：哪条曲线贴着底下那条灰色的点线，那里就是**启动受限（launch-bound）**，GPU 在等 CPU。那里 GPU 快一点慢一点看不出来；
# 要先用 CUDA 图把提交的时间降下来，Profile 的差别才会露出来。《每个形状一张图》会把两件事合在一起做。
#
# ## 用流量加权
#
# 一条曲线还不是答案。某种长度快了一倍，可是没有人发这种长度，就等于没有快。要看的是**平均每个请求多少微秒**：
#
# $$\bar t = \frac{\sum_L n_L \, t(L)}{\sum_L n_L}$$
#
# $n_L$ 是直方图里的请求数，$t(L)$ 是服务一个这种请求的价钱。把五种做法都算一遍（批大小 8）：

# %% tags=["demo"]
def weighted(us, traffic):
    """Mean of us (one value for each length of the grid) under the traffic (requests for each)."""
    return float(np.dot(us, traffic) / np.sum(traffic))


def to_static(clock):
    """Cost of each grid length on the smallest static engine that holds it, padded."""
    return [statics[min(each for each in statics if each >= length)][clock][0] for length in GRID]


rows = {}
for clock in ("gpu_us", "end_to_end_us"):
    table = cost_table(SHOWN, clock)
    best = min(range(len(GRID)), key=lambda opt: weighted(table[opt], TRAFFIC))
    ways = (
        (f"全部填充到 {GRID[-1]}", [table[-1, -1]] * len(GRID)),
        (f"一个宽的，opt = {GRID[-1]}，按真实长度", table[-1]),
        ("一个宽的，opt 挑得最好，按真实长度", table[best]),
        ("三个窄的，按真实长度", recorded_three["times"][str(SHOWN)][clock]),
        (f"{len(statics)} 个静态引擎，填充到装得下的最小一个", to_static(clock)),
    )
    for name, us in ways:
        rows.setdefault(name, []).append(weighted(us, TRAFFIC))
    if clock == "gpu_us":
        chosen_opt = GRID[best]
padded = next(iter(rows.values()))
lab.say(
    lab.table(
        ("做法", "只算 GPU（µs）", "端到端（µs）", "GPU：全部填充用时是它的几倍"),
        [(name, f"{gpu:.1f}", f"{whole:.1f}", f"{padded[0] / gpu:.2f}") for name, (gpu, whole) in rows.items()],
    )
    + f"\n\n“挑得最好”的那个 opt 是 **{chosen_opt}**（按只算 GPU 的时间）。按流量加权："
    + "，".join(f"opt = {opt} 平均 {weighted(us, TRAFFIC):.1f} µs" for opt, us in zip(GRID, cost_table(SHOWN, "gpu_us"), strict=True))
    + "。",
    measured=False,
)

# %% [markdown]
# 表里有两级台阶，别把它们算到同一个账上：
#
# 1. **从“全部填充”到“真实长度”**：省下的是白算的 token。这一级靠的是动态形状，和有几个 Profile 无关；
# 2. **从“一个宽的”到“三个窄的”**：省下的是内核不合身的那一点。这一级才是 Profile 设计的功劳。
#
# 哪一级大，看表。第二级里还要再分：表的第三行仍然只有一个宽的 Profile，不过换了一个挑过的 opt。
# 它离第四行还差多少，才是“多几个 Profile”的功劳；从第二行到第三行，只是填对了一个数。
#
# 静态引擎那一行：填充到装得下的最小一个，每个尺寸一份引擎、一份权重；只录了一个尺寸时，它就等于“全部填充”。
# 和 opt 正好的宽 Profile 比，形状写死有没有换来更快的内核，看上一节的那句话；相差几个百分点，多半只是两次构建各自挑的内核不同。
#
# 再看表下面那行字：最好的 opt 不一定是最常见的那一格，也不一定是最长的那一格。
#
# ## 填充的两笔账
#
# ### 白算的 token
#
# 填充到桶（bucket，几个固定的尺寸）会浪费多少 token？桶越多浪费越少，可是每个桶都要一份东西：一个 Profile、一张图，或者一个引擎。
# 有一份公开的报告里，每种长度都录了一张图，256 张，显存就用完了；改成按倍数增长的桶，才装得下。

# %% tags=["demo"]
def waste(buckets):
    """Share of tokens that are padding, when every request is padded to the smallest bucket that holds it."""
    used = sum(length * number for length, number in REQUESTS.items())
    paid = sum(min(bucket for bucket in buckets if bucket >= length) * number for length, number in REQUESTS.items())
    return 1 - used / paid


schemes = {
    "1 个：512": [512],
    "4 个，等距": [128, 256, 384, 512],
    "4 个，按倍数": [64, 128, 256, 512],
    "7 个，按倍数": [8, 16, 32, 64, 128, 256, 512],
    "64 个，等距": list(range(8, 513, 8)),
}
lab.say(lab.table(("桶", "算的 token 里有多少是填充"), [(name, f"{waste(buckets):.0%}") for name, buckets in schemes.items()]), measured=False)

# %% [markdown]
# 按倍数增长的桶，只要请求比最小的桶长，就最多填充到不足两倍；同样多的等距桶，短请求可能填充到十几倍。流量集中在短请求时，差别很大。
#
# ### 结果还对吗
#
# 填充了零，结果一定不变吗？看网络里有没有跨 token 的运算。两种典型的：
#
# - **求和**：零加进去不变。但是填充的地方必须真的是零；
# - **softmax 注意力**：零并不是“没有”。得分是 0 的位置照样分走一份权重，除非另给一个掩码（mask）。
#
# 先用 NumPy 看 softmax：20 个真实的 token，后面填充 44 个零。

# %% tags=["demo"]
def attention(x, valid=None):
    """Attention of x (length, width) with itself; with `valid` (number of tokens), the rest is masked."""
    scores = x @ x.T / np.sqrt(x.shape[1])
    if valid is not None:
        scores[:, valid:] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights @ x, weights


sample = np.random.default_rng(3).normal(0, 0.5, (20, 32))
long_sample = np.vstack([sample, np.zeros((44, 32))])
right = attention(sample)[0]
careless, weights = attention(long_sample)
masked = attention(long_sample, valid=20)[0]
lab.say(
    f"没有掩码时，填充的位置平均分走了 **{weights[:20, 20:].sum(axis=1).mean():.0%}** 的注意力，结果最多差 {np.abs(careless[:20] - right).max():.2f}；"
    f"加上掩码，最多差 {np.abs(masked[:20] - right).max():.0e}。",
    measured=False,
)

# %% [markdown]
# 本章的网络是第一种：求和。那么填充零应当没事。可是服务的缓冲是重复使用的：上一个请求长，这一个请求短，**尾巴上留着上一个请求的数**。

# %% tags=["demo", "gpu"]
wide_run, box, outcome = prepared(wide512, 64)
long_one = rng.integers(-8, 9, (64, BATCH, WIDTH)).astype(np.float32)
short_one = rng.integers(-8, 9, (20, BATCH, WIDTH)).astype(np.float32)
rows = []
for clean in (True, False):
    with stream:
        box.set(long_one)
        must(wide_run(), "入队")
        if clean:
            box[20:] = 0
        box[:20] = cp.asarray(short_one)
        must(wide_run(), "入队")
    got = outcome.get(stream=stream)[:20]
    rows.append(("尾巴清零" if clean else "尾巴留着上一个请求", "和真实长度的结果一样" if np.array_equal(got, answers(short_one)) else f"{np.mean(got != answers(short_one)):.0%} 的值不对"))
lab.say(lab.table(("同一块缓冲，先长后短", "前 20 个 token 的结果"), rows))

# %% [markdown]
# 没有报错，只是答案悄悄地错了。填充省了形状的麻烦，换来的是两条纪律：每次清尾巴（或用掩码），每次只取前 L 行。
#
# ## 上下文和切换
#
# 一个引擎可以有好几个 Profile，但**一个上下文在一个时刻只用一个**，新上下文用的是 Profile 0，不会自动替你挑。
# 换一个用 `set_optimization_profile_async(序号, 流)`。名字里的 `async` 是认真的：切换可能要往显存里拷一点东西，这些拷贝排在你给的那条流上。
# 由此得到切换的规矩，四步，一步也不能少：
#
# 1. 序号先自己检查：0 到 `engine.num_optimization_profiles - 1`；
# 2. 这个上下文以前入队的活儿都做完了，再切换，并且看返回值；
# 3. **等那条流做完切换**，再碰这个上下文；
# 4. 所有的形状重新设一遍：形状属于“这个 Profile 里的这一次”，换了就不算数。
#
# 不守规矩会怎样？返回 `False`，抛异常，还是更糟？有些错会毁掉整个进程，所以放进一个子进程里试：它只加载计划文件，先照规矩来回切换，
# 再一步步犯错，每做一步就报一声。Profile 0 管 65～512，Profile 1 管 8～64。先猜：它能走到哪一步？

# %% tags=["demo", "gpu"]
import signal
import subprocess
import sys
import tempfile

SWITCHING = r"""
import sys
from pathlib import Path

import cupy as cp
import tensorrt as trt

logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
runtime = trt.Runtime(logger)
engine = runtime.deserialize_cuda_engine(Path(sys.argv[1]).read_bytes())
batch, width = int(sys.argv[2]), int(sys.argv[3])
stream = cp.cuda.Stream(non_blocking=True)
with stream:
    x = cp.zeros((512, batch, width), cp.float32)
    y = cp.zeros_like(x)
stream.synchronize()
context = engine.create_execution_context()


def step(name, call):
    print("begin", name, sep="\t", flush=True)
    try:
        result = call()
    except Exception as error:
        result = type(error).__name__
    print("end", result, sep="\t", flush=True)


def switch(index):
    stream.synchronize()
    done = context.set_optimization_profile_async(index, stream.ptr)
    stream.synchronize()
    return done


def infer(length):
    ready = context.set_input_shape("tokens", (length, batch, width))
    ready = ready and context.set_tensor_address("tokens", x.data.ptr) and context.set_tensor_address("answers", y.data.ptr)
    done = ready and context.execute_async_v3(stream.ptr)
    stream.synchronize()
    return done


def asked_at_once(index):
    context.set_optimization_profile_async(index, stream.ptr)
    return tuple(context.get_tensor_shape("tokens"))


step("刚创建，当前的 Profile 是几号", lambda: context.active_optimization_profile)
step("在 Profile 0 里推理长度 100", lambda: infer(100))
step("照规矩切换到 1", lambda: switch(1))
step("在 Profile 1 里推理长度 20", lambda: infer(20))
step("照规矩切换回 0", lambda: switch(0))
step("在 Profile 0 里推理长度 120", lambda: infer(120))
step("再切换到 1", lambda: switch(1))
step("再在 Profile 1 里推理长度 24", lambda: infer(24))
step("设了形状没有推理，就切换到 0", lambda: context.set_input_shape("tokens", (20, batch, width)) and switch(0))
step("犯错：在 Profile 0 里设长度 20", lambda: context.set_input_shape("tokens", (20, batch, width)))
step("犯错：再在 Profile 0 里推理长度 20", lambda: infer(20))
step("犯错：切换到 1，不等流，马上问形状", lambda: asked_at_once(1))
step("犯错：切换以后没有设形状就入队", lambda: (switch(0), context.execute_async_v3(stream.ptr))[1])
step("犯错：切换到不存在的 7", lambda: switch(7))
"""


def in_child(program, plan, *arguments):
    """Run a Python program in a process of its own. Its arguments: the path of a file with the plan, then the others.

    Returns (lines that it printed, how it ended in Chinese).
    """
    with tempfile.TemporaryDirectory() as folder:
        path, told = Path(folder, "engine.plan"), Path(folder, "told.txt")
        path.write_bytes(plan)
        with told.open("wb") as out:
            command = [sys.executable, "-X", "utf8", "-c", program, str(path), *map(str, arguments)]
            try:
                code = subprocess.run(command, stdout=out, stderr=subprocess.DEVNULL, timeout=12, check=False).returncode
            except subprocess.TimeoutExpired:
                code = None
        lines = told.read_text(encoding="utf-8", errors="replace").splitlines()
    if code is None:
        return lines, "一直没有结束，被停掉了"
    if code < 0:
        return lines, f"被信号 {signal.Signals(-code).name} 杀死"
    return lines, "正常结束" if code == 0 else f"退出，退出码是 {code}"


told, ended = in_child(SWITCHING, build_plan(CHOICES["两个窄的"]), BATCH, WIDTH)
marked = [line.split("\t", 1) for line in told if line.startswith(("begin\t", "end\t"))]
steps = [text for word, text in marked if word == "begin"]
outcomes = [text for word, text in marked if word == "end"]
by_rules = outcomes[:8] == ["0"] + ["True"] * 7  # the steps before the first unusual one
shown = [(name, outcomes[number] if number < len(outcomes) else f"**进程在这一步没有回来：{ended}**") for number, name in enumerate(steps)]
lab.say(lab.table(("子进程做的", "结果"), shown) + f"\n\n子进程{ended}。", measured=False)
if not by_rules:
    lab.say("在这台机器上，照规矩的切换也没有走通，看上面的表停在哪里。下面要切换旧上下文的两格会跳过。", measured=False)
elif len(outcomes) < len(steps):
    lab.say(
        f"停在“{steps[-1]}”。这一步的后果不会变成 `False`，也不会变成异常：**整个进程没有了**，`try` 也救不回来。所以规矩要靠自己守。",
        measured=False,
    )
elif ended == "正常结束":
    lab.say("这个版本的 TensorRT 每一步都回来了：拒绝写在返回值里，或者是一个异常。换一个版本不一定这样好说话，规矩照旧要守。", measured=False)
else:
    lab.say("每一步都回来了，进程却没有好好结束：错误的调用留下的后果，可以晚到退出的时候才出现。", measured=False)

# %% [markdown]
# 看“在 Profile 0 里设长度 20”那一行。如果是 `True`，说明 `set_input_shape` 只查了“有没有**某一个** Profile 装得下”，没有查是不是**当前**这一个：
# `True` 不等于选对了 Profile，挑 Profile 要靠自己。能返回的拒绝是 `False`，不是异常；不看返回值，程序就带着没有设好的形状继续走。
#
# ### 切换排在哪条流上
#
# 推理和切换在同一条流上，先后自然对；如果推理在**另一条**流上，要自己保证它在切换之后。最省心的写法是切换以后同步一次，
# 形状重新设，然后在哪条流上推理都行。漏掉这一步多半看不出错，因为拷贝很小、很快，正好赶上。正因为看不出来，才要靠规矩：

# %% tags=["demo", "gpu"]
if by_rules:
    other = cp.cuda.Stream(non_blocking=True)
    fill = rng.integers(-8, 9, (100, BATCH, WIDTH)).astype(np.float32)
    with other:
        tokens, outcome = cp.asarray(fill), cp.zeros(fill.shape, cp.float32)
    other.synchronize()

    context = new_context(narrow)
    must(context.set_input_shape("tokens", fill.shape), "设置形状")  # in profile 0
    must(context.set_tensor_address("tokens", tokens.data.ptr) and context.set_tensor_address("answers", outcome.data.ptr), "设置地址")
    must(context.execute_async_v3(stream.ptr), "入队")
    stream.synchronize()

    switched = must(context.set_optimization_profile_async(1, stream.ptr), "切换 Profile")
    stream.synchronize()
    short_one = fill[:40]
    must(context.set_input_shape("tokens", short_one.shape), "设置形状")
    must(context.execute_async_v3(other.ptr), "入队")
    print(f"切换返回 {switched}；在另一条流上推理，结果正确：", np.array_equal(outcome.get(stream=other)[:40], answers(short_one)))
else:
    print("照规矩的切换在子进程里就没有走通，这里不再试：这样的机器上，每个 Profile 用一个自己的上下文，只在创建时切换一次。")

# %% [markdown]
# ### 切换要多少时间
#
# 长短请求交替着来。一个上下文换来换去（每次换之前、之后都要等流），还是每个 Profile 一个上下文、什么也不换？

# %% tags=["demo", "gpu"]
def by_one(context, calls):
    """Serve calls (profile, length) by one context, which is switched by the rules."""
    for index, length in calls:
        if context.active_optimization_profile != index:
            stream.synchronize()
            must(context.set_optimization_profile_async(index, stream.ptr), "切换 Profile")
            stream.synchronize()
        must(context.set_input_shape("tokens", (length, BATCH, WIDTH)), "设置形状")
        must(context.execute_async_v3(stream.ptr), "入队")


def by_own(contexts, calls):
    """Serve calls (profile, length) by the contexts of the profiles."""
    for index, length in calls:
        must(contexts[index].set_input_shape("tokens", (length, BATCH, WIDTH)), "设置形状")
        must(contexts[index].execute_async_v3(stream.ptr), "入队")


if by_rules:
    with stream:
        tokens = cp.zeros((LONGEST, BATCH, WIDTH), cp.float32)
        outcome = cp.zeros_like(tokens)
    stream.synchronize()
    lone, own = new_context(narrow), [context_on(narrow, index) for index in range(narrow.num_optimization_profiles)]
    for each in (lone, *own):
        must(each.set_tensor_address("tokens", tokens.data.ptr) and each.set_tensor_address("answers", outcome.data.ptr), "设置地址")
    calls = [(1, 24), (0, 100)] * 4
    pair = lab.compare_us(partial(by_one, lone, calls), partial(by_own, own, calls), clock="end_to_end")
    saved = (pair.first.median - pair.second.median) / len(calls)
    lab.say(
        f"8 个请求，长短交替：一个上下文换来换去 **{pair.first.median:.0f} µs**，每个 Profile 一个上下文 **{pair.second.median:.0f} µs**"
        f"（前者是后者的 {pair.ratio:.2f} 倍，平均每个请求差 {saved:.1f} µs）。"
        + ("切换不是白送的，而且每次都要付。" if pair.at_least > 1.05 else "在这里，切换的价钱小得看不大出来；它仍然要清形状、要守流的次序。")
    )

# %% [markdown]
# 上下文可以常备，所以通常的做法是**每个 Profile 一个上下文，创建时切换一次、同步一次，以后不再换**：不付切换的钱，也不必操心切换排在哪条流上。
#
# ### 一个 Profile 只能给一个上下文用吗
#
# 老版本有一条规矩：一个 Profile 同时只能被一个上下文占用，第二个会得到“profile chosen by another context”。
# 网上还能找到许多为此复制 Profile 的代码。TensorRT 10 起，多个上下文共用一个 Profile 是默认允许的，试试：

# %% tags=["demo", "gpu"]
twins, streams = [context_on(narrow, 1) for _ in range(2)], [stream, cp.cuda.Stream(non_blocking=True)]
fills, outs = [], []
for twin, queue, length in zip(twins, streams, (20, 50), strict=True):
    fills.append(rng.integers(-8, 9, (length, BATCH, WIDTH)).astype(np.float32))
    must(twin.set_input_shape("tokens", fills[-1].shape), "设置形状")
    with queue:
        tokens = cp.asarray(fills[-1])
        outs.append((tokens, cp.zeros_like(tokens)))
    must(twin.set_tensor_address("tokens", tokens.data.ptr) and twin.set_tensor_address("answers", outs[-1][1].data.ptr), "设置地址")
for twin, queue in zip(twins, streams, strict=True):
    must(twin.execute_async_v3(queue.ptr), "入队")
right = [np.array_equal(out.get(stream=queue), answers(fill)) for (_, out), queue, fill in zip(outs, streams, fills, strict=True)]
print("两个上下文同时用 Profile 1，两条流，结果正确：", right)

# %% [markdown]
# 为了“一个上下文一个 Profile”而复制 Profile，在今天只会让构建更久、计划文件更大。
#
# ## Profile 不是越多越好
#
# 多一个 Profile，构建时就要多计一轮时，计划文件和显存也可能变大。三样都量得出来：

# %% tags=["demo", "gpu"]
rows = []
for name, ranges in CHOICES.items():
    plan, seconds = PLANS[tuple(ranges)]
    engine = engines[name]
    each = "、".join(f"{engine.get_device_memory_size_for_profile_v2(index) / 2**20:.1f}" for index in range(engine.num_optimization_profiles))
    rows.append((name, f"{seconds:.1f} s", f"{len(plan) / 2**20:.1f} MiB", each, f"{engine.device_memory_size_v2 / 2**20:.1f}"))
lab.say(
    lab.table(("引擎", "构建", "计划文件", "各 Profile 的上下文要多少 MiB", "引擎报的总数 MiB"), rows)
    + "\n\n构建的时间受计时缓存（timing cache）影响：以前建过，这里就短。",
)
recorded = {"一个宽的": engines_of("wide")[-1], "三个窄的": recorded_three}
lab.say(
    f"录下来的 MLP，没有计时缓存（{COSTS['gpu']}）：\n\n"
    + lab.table(("引擎", "构建", "计划文件"), [(name, f"{each['build_s']:.1f} s", f"{each['plan_mib']:.1f} MiB") for name, each in recorded.items()]),
    measured=False,
)

# %% [markdown]
# ### 为什么短请求也占很多显存
#
# 上下文默认的分配策略是 STATIC：创建时就按**所有 Profile 里最大的那个**要足暂存，不管你打算跑多短的请求。
# 于是“每个 Profile 一个上下文”时，短 Profile 的上下文也背着长 Profile 的显存。
# 另一种策略 ON_PROFILE_CHANGE 只按当前的 Profile 要，换 Profile 时再调整。每种策略创建四个上下文，再都切换到短的那个 Profile：

# %% tags=["demo", "gpu"]
from cuda.bindings import runtime as cudart


def free_mib():
    """Free device memory, MiB: of the whole device, so that other programs show in it, too."""
    stream.synchronize()
    return lab.check_cuda(cudart.cudaMemGetInfo())[0] / 2**20


def four_contexts(strategy):
    """What four contexts take, texts with MiB: when fresh, and when all have switched to profile 1. None outlives the call."""
    before = free_mib()
    kept = [must(narrow.create_execution_context(strategy), "创建执行上下文") for _ in range(4)]
    fresh = before - free_mib()
    if not by_rules:
        return f"{fresh:.0f} MiB", "—"
    for context in kept:
        must(context.set_optimization_profile_async(1, stream.ptr), "切换 Profile")
        stream.synchronize()
    return f"{fresh:.0f} MiB", f"{before - free_mib():.0f} MiB"


STRATEGIES = trt.ExecutionContextAllocationStrategy.STATIC, trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
rows = [(strategy.name, *four_contexts(strategy)) for strategy in STRATEGIES]
before = free_mib()
for _ in range(20):
    passing = new_context(narrow)
    del passing
lost = before - free_mib()
lab.say(
    lab.table(("分配策略", "4 个上下文，刚创建（Profile 0，长的）", "都切换到 Profile 1（短的）以后"), rows)
    + f"\n\n创建又丢掉 20 个上下文以后，空闲显存少了 {lost:.0f} MiB"
    + ("：丢掉的都还回来了。" if abs(lost) < 8 else "。全设备的数字里也有别的程序；再运行一次这一格，看它会不会一直涨。")
)

# %% [markdown]
# 上下文一直留着，显存就一直占着。有人报告过“第 n 次创建上下文得到 `None`”，就是一路创建、从不丢弃的结果：
# `new_context` 检查了 `None`，所以这里会是一个说得出原因的异常。更细的办法（几个上下文共用一块显存）是《执行上下文与显存》的内容。
#
# ### 没想到的长度
#
# 还有一种“动态”，是别的框架替你做的：来了一个范围外的长度，就悄悄重建引擎。于是大多数请求几毫秒，偶尔一个要等几十秒。
# 拿刚才的构建时间算一算。最后两行故意给它范围外的长度，那两条“报告错误”正是要看的：

# %% tags=["demo", "gpu"]
_, seconds = PLANS[tuple(CHOICES["一个宽的，opt = 512"])]
lab.say(
    f"建一次（很小的网络，还可能用上了计时缓存）{seconds:.1f} s，等于 **{seconds * 1e6 / wide_us[-1].median:,.0f} 次**长度 512 的推理。"
    "真实的模型要建几十秒到几分钟。"
)
print("长度 513：", new_context(wide512).set_input_shape("tokens", (513, BATCH, WIDTH)), "；长度 7：", new_context(wide512).set_input_shape("tokens", (7, BATCH, WIDTH)))
_ = lab.trt_errors()  # refusals that were asked for

# %% [markdown]
# 所以设计 Profile 的第一条不是速度，而是**一开始就把全部长度盖住，哪怕某一段今天还没有流量**；盖不住的，在入口就报清楚的错。
# 动态形状不是“无限灵活”，是“事先说好的范围之内”的灵活。

# %% [markdown]
# ## 练习
#
# 前两道不需要 GPU。可以用前面所有给定单元里的名字（没有“demo”标签的）：
# `COSTS`、`GRID`、`REQUESTS`、`TRAFFIC`、`counted`、`engines_of`、`cost_table`；
# `WIDTH`、`SHORTEST`、`LONGEST`、`answers`；`build_plan`、`open_engine`、`new_context`、`must`、`stream`、`cp`、`trt`、`lab`、`np`。
# 演示单元（只做实验，评分时不运行）里定义的名字不能用，比如 `prepared`、`context_on`、`covering`、`ranges_of`；可以照着写。后面的练习可以用你前面写的函数。
#
# ### 练习一：一种设计值多少（2 分）
#
# 写 `mean_us(profiles, lengths, traffic, cost_us)`：按这种设计，平均每个请求多少微秒。
#
# - `profiles`：若干个 `(min, opt, max)`，都是 token 数；可能互相重叠，次序不一定从短到长；
# - `lengths`：升序的长度；`traffic[j]`：长度 `lengths[j]` 的请求数；
# - `cost_us[i][j]`：opt 等于 `lengths[i]` 的 Profile 跑长度 `lengths[j]` 的微秒数，是列表的列表，也可能是二维的 NumPy 数组。每个 opt 都在 `lengths` 里；
# - 一个长度可能有好几个 Profile 装得下：用其中 **max 最小**的；max 也一样，用序号小的；
# - 有流量的长度谁也装不下：抛 `ValueError`。没有流量的长度装不下没关系。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 先只想一个长度：装得下它的是哪几个，其中该用谁，价钱在表的哪一行、哪一列？
# 然后才是加权：乘上请求数，加起来，除以什么？没有流量的长度，还要不要去找 Profile？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `min(候选, key=…)` 在并列时返回最先出现的那个；候选为空时它自己也抛 `ValueError`，但最好由你写明是哪个长度。
# `lengths.index(opt)` 给出行号。`enumerate`、`zip(…, strict=True)` 用来成对地走。
#
# </details>

# %% solution="mean_us"
def mean_us(profiles, lengths, traffic, cost_us):
    """Mean cost of a request, µs, when each length is served by the fitting profile with the smallest max.

    profiles: list of (min, opt, max). lengths: ascending ints. traffic: requests for each length, not all 0.
    cost_us[i][j]: opt = lengths[i], run at lengths[j]. ValueError for a length with traffic that fits no profile.
    """
    ### BEGIN SOLUTION: 对每个有流量的长度：找出装得下它的 Profile，取 max 最小的，到表里查价钱；最后按请求数加权平均
    total = 0.0
    for column, (length, requests) in enumerate(zip(lengths, traffic, strict=True)):
        if not requests:
            continue
        fitting = [profile for profile in profiles if profile[0] <= length <= profile[2]]
        if not fitting:
            raise ValueError(f"没有 Profile 能装下长度 {length}")
        _, opt, _ = min(fitting, key=lambda profile: profile[2])
        total += requests * cost_us[list(lengths).index(opt)][column]
    return float(total / sum(traffic))
    ### END SOLUTION


# %% test="mean_us" kind="answer" points=2
lengths, cost = [10, 20, 40], [[1.0, 3.0, 9.0], [2.0, 2.0, 6.0], [4.0, 4.0, 4.0]]
check.equal(student.mean_us([(10, 40, 40)], lengths, [5, 5, 10], cost), 4.0, rel=1e-9, why="只有一个 Profile，opt 是 40：三种长度都要 4 µs。表的行是 opt，列是运行长度。")
check.equal(student.mean_us([(10, 10, 10), (11, 20, 40)], lengths, [6, 3, 1], cost), 1.8, rel=1e-9, why="长度 10 用第一个，1 µs × 6；20 和 40 用第二个，2 µs × 3 和 6 µs × 1；共 18 µs，10 个请求。")
check.equal(student.mean_us([(10, 40, 40), (10, 10, 20)], lengths, [1, 1, 0], cost), 2.0, rel=1e-9, why="两个都装得下长度 10 和 20：应当用 max 较小的第二个，和书写的次序无关。")
check.raises("ValueError", student.mean_us, [(10, 20, 20)], lengths, [1, 1, 1], cost, why="长度 40 有流量，却没有 Profile 装得下，应当抛 ValueError。")
check.equal(student.mean_us([(10, 20, 20)], lengths, [1, 1, 0], cost), 2.0, rel=1e-9, why="长度 40 没有流量，装不下也没关系。")
### BEGIN HIDDEN TESTS
def mean_by_rule(profiles, lengths, traffic, cost):
    total = 0.0
    for j, length in enumerate(lengths):
        if traffic[j]:
            order = sorted(range(len(profiles)), key=lambda n: (profiles[n][2], n))
            chosen = next(n for n in order if profiles[n][0] <= length <= profiles[n][2])
            total += traffic[j] * cost[lengths.index(profiles[chosen][1])][j]
    return total / sum(traffic)


cases = []
for _ in range(30):
    n = int(secret.integers(4, 10))
    lengths = sorted(int(each) for each in secret.choice(np.arange(8, 513), n, replace=False))
    traffic = [int(each) for each in secret.integers(1, 1000, n)]
    cost = secret.uniform(5, 500, (n, n))
    profiles = [(lengths[0], int(secret.choice(lengths)), lengths[-1])]
    for _ in range(int(secret.integers(1, 5))):
        low, high = sorted(int(each) for each in secret.integers(0, n, 2))
        profiles.append((lengths[low], lengths[int(secret.integers(low, high + 1))], lengths[high]))
    profiles = [profiles[int(each)] for each in secret.permutation(len(profiles))]
    cases.append((profiles, lengths, traffic, cost))
got = [student.mean_us(*case) for case in cases]
check.equal(got, [mean_by_rule(*case) for case in cases], rel=1e-9, why="随机的设计里有算错的。几个 Profile 都装得下时，用的是 max 最小的吗？查表时，行是 opt、列是运行长度吗？")
twice = [[(10, opt, 40), (10, 60 - opt, 40)] for opt in (20, 40)]
same = [student.mean_us(profiles, [10, 20, 40], [1, 2, 3], [[1.0, 1.0, 1.0], [8.0, 7.0, 6.0], [3.0, 2.0, 1.0]]) for profiles in twice]
check.equal(same, [40 / 6, 10 / 6], rel=1e-9, why="两个 Profile 的 max 一样时，应当用序号小的。")
profiles, lengths, traffic, cost = cases[0]
check.raises("ValueError", student.mean_us, [(lengths[1], lengths[1], lengths[-1])], lengths, traffic, cost, why="最短的长度有流量却装不下，应当抛 ValueError。min 也要检查。")
inside = [(lengths[0], lengths[0], lengths[0]), (lengths[2], lengths[2], lengths[-1])]
check.raises("ValueError", student.mean_us, inside, lengths, traffic, cost, why="两个 Profile 之间的空隙里有流量，应当抛 ValueError。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习二：选出最好的几个（3 分）
#
# 写 `choose_profiles(lengths, traffic, cost_us, most)`：返回**至多** `most` 个 `(min, opt, max)`，让 `mean_us` 最小。要求：
#
# - 从短到长排好，首尾相接，不重叠也不留空：第一个的 min 是 `lengths[0]`，最后一个的 max 是 `lengths[-1]`，
#   后一个的 min 等于前一个的 max + 1。没有流量的长度也要盖住，因为明天可能就有了；
# - 每个 max 都是 `lengths` 里的一个；每个 opt 也是，并且在自己的 min 和 max 之间；
# - 可以少于 `most` 个：多一个不一定更好。
#
# 可能有几种设计一样好，返回哪一种都行：评分只比较算出来的平均成本。`lengths` 不超过 12 种，`most` 不超过 4，所以穷举也来得及。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 如果“从第 i 种到第 j 种长度归一个 Profile”已经定了，它最好的 opt 和别的段有关吗？
# 那么剩下的只是：在哪里切。最后一段从哪里开始，前面就变成了同一个问题的小号。
# 再想想：为什么多切一刀可能更差？（看看 opt 能选的范围变成了什么。）
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 穷举切法：`itertools.combinations(range(1, n), 刀数)`，刀数从 0 到 `most - 1`；每段的最好的 opt 用 `min(range(i, j + 1), key=…)`。
# 或者动态规划：`best[段数][前几种长度]`。
# 一段里某个 opt 的总价：`sum(traffic[j] * cost_us[opt][j] for j in 段)`，转成数组以后就是 `np.dot`。
#
# </details>

# %% solution="choose_profiles"
def choose_profiles(lengths, traffic, cost_us, most):
    """Choose at most `most` profiles that cover lengths[0] … lengths[-1] without gap or overlap, at the least mean cost.

    Arguments as for mean_us. Returns a list of (min, opt, max), ascending: each max and opt is one of the lengths,
    each min the previous max + 1.
    """
    ### BEGIN SOLUTION: 每一段的最好 opt 可以单独挑；再从头到尾决定在哪里切，刀数也要试：穷举或动态规划都行
    n, table = len(lengths), np.asarray(cost_us, float) * np.asarray(traffic, float)
    segment = {}  # (first, last) -> (total cost, the best opt's row)
    for first in range(n):
        for last in range(first, n):
            segment[first, last] = min((float(table[row, first : last + 1].sum()), row) for row in range(first, last + 1))
    best = {0: (0.0, [])}  # how many lengths are covered -> (total cost, segments), with as many profiles as rounds so far
    found = []
    for _ in range(min(most, n)):
        longer = {}
        for start, (total, parts) in best.items():
            for last in range(start, n):
                candidate = (total + segment[start, last][0], [*parts, (start, last)])
                longer[last + 1] = min(longer.get(last + 1, candidate), candidate)
        best = longer
        if n in best:
            found.append(best[n])
    _, parts = min(found)
    return [(lengths[first - 1] + 1 if first else lengths[0], lengths[segment[first, last][1]], lengths[last]) for first, last in parts]
    ### END SOLUTION


# %% test="choose_profiles" kind="answer" points=3
from itertools import pairwise


def fault(profiles, lengths, most):
    """What is wrong with a design (Chinese), or None."""
    ok = isinstance(profiles, (list, tuple)) and profiles and all(isinstance(each, (list, tuple)) and len(each) == 3 for each in profiles)
    if not ok or not all(isinstance(value, (int, np.integer)) and not isinstance(value, bool) for each in profiles for value in each):
        return "应当返回 (min, opt, max) 的列表，都是整数，至少一个。"
    if len(profiles) > most:
        return "Profile 太多了，至多 most 个。"
    if profiles[0][0] != lengths[0] or profiles[-1][2] != lengths[-1]:
        return "第一个的 min 应当是最短的长度，最后一个的 max 应当是最长的长度，没有流量的也要盖住。"
    if any(after[0] != before[2] + 1 for before, after in pairwise(profiles)):
        return "后一个的 min 应当等于前一个的 max + 1：不重叠，也不留空。"
    if not all(each[1] in lengths and each[2] in lengths and each[0] <= each[1] <= each[2] for each in profiles):
        return "每个 max 和 opt 都要是 lengths 里的，opt 要在自己的 min 和 max 之间。"
    return None


def mean_of(profiles, lengths, traffic, cost):
    """Mean cost of a design without faults."""
    served = [next(each for each in profiles if each[0] <= length <= each[2]) for length in lengths]
    return sum(t * cost[lengths.index(each[1])][j] for j, (t, each) in enumerate(zip(traffic, served, strict=True))) / sum(traffic)


small = [10, 20, 40], [6, 3, 1], [[1.0, 3.0, 9.0], [2.0, 2.0, 6.0], [4.0, 4.0, 4.0]]
for most, want in ((1, 2.4), (2, 1.8), (3, 1.6)):
    design = student.choose_profiles(*small, most)
    wrong = fault(design, small[0], most)
    check.that(wrong is None, why=wrong or "")
    check.equal(mean_of(design, *small), want, rel=1e-9, why=f"至多 {most} 个时，可以做到平均 {want} µs，你的设计没有做到。每一段的 opt 是按流量加权挑的吗？切的地方都试过了吗？")
### BEGIN HIDDEN TESTS
from itertools import combinations


def least(lengths, traffic, cost, most):
    n, lowest = len(lengths), np.inf
    for cuts in range(min(most, n)):
        for inner in combinations(range(1, n), cuts):
            ends = [0, *inner, n]
            lowest = min(lowest, sum(min(sum(traffic[j] * cost[i][j] for j in range(a, b)) for i in range(a, b)) for a, b in pairwise(ends)))
    return lowest / sum(traffic)


def some_lengths(n):
    return sorted(int(each) for each in secret.choice(np.arange(8, 513), n, replace=False))


def plausible(lengths):
    """A table like a recorded one: longer costs more, and so does being far from opt."""
    grid = np.log2(lengths)
    off = np.abs(grid[:, None] - grid[None, :])
    return (20 + 0.4 * np.array(lengths))[None, :] * (1 + secret.uniform(0.1, 0.5) * off + secret.uniform(0, 0.03, off.shape))


def posed(how):
    n = int(secret.integers(7, 11))
    lengths, traffic = some_lengths(n), [int(each) for each in secret.integers(1, 60, n)]
    cost = plausible(lengths)
    if how == "peaked":
        for place in secret.choice(n, 2, replace=False):
            traffic[int(place)] += 3000
    elif how == "empty ends":
        traffic[0] = traffic[-1] = traffic[n // 2] = 0
    elif how == "empty opt":
        # The opt that is worth most is a length without requests of its own.
        traffic[n // 2] = 0
        cost[n // 2] *= 0.4
    elif how == "any table":
        cost = secret.uniform(10, 400, (n, n))
    elif how == "even":
        # The best single cut is in the middle; the best two are not, so cutting again what was cut best fails.
        lengths, traffic = some_lengths(9), [int(secret.integers(1, 60))] * 9
        step = float(secret.uniform(2, 9))
        cost = 20 + step * np.abs(np.subtract.outer(np.arange(9), np.arange(9)))
        return lengths, traffic, cost, 3
    elif how == "one row for all":
        # Whoever cuts loses the one good opt for a part of the lengths: fewer profiles are better.
        cost[int(secret.integers(2, n - 2))] = 5.0
    return lengths, traffic, cost, int(secret.integers(2, 5))


for how, why in (
    ("plain", "随机的流量和成本表，你的设计不是最便宜的。"),
    ("peaked", "流量集中在少数长度上时，你的设计不是最便宜的。每个长度要按请求数加权。"),
    ("empty opt", "有的长度没有流量时，你的设计不是最便宜的。没有流量的长度也可以作 opt：它的内核跑别的长度可能更快。"),
    ("empty ends", "有的长度没有流量时，你的设计不是最便宜的。"),
    ("even", "流量均匀时，你的设计不是最便宜的。先找最好的一刀、再在两半里各找一刀，不一定得到最好的两刀：几刀要一起考虑。"),
    ("any table", "成本表的数字毫无规律时，你的设计不是最便宜的。opt 不一定是流量最多的、最长的或中间的那个：每一个都要试。"),
    ("one row for all", "这里少用几个 Profile 更便宜：“至多 most 个”不是“正好 most 个”。"),
):
    cases = [posed(how) for _ in range(4)]
    designs = [student.choose_profiles(*case) for case in cases]
    wrong = next((found for design, case in zip(designs, cases, strict=True) if (found := fault(design, case[0], case[3]))), None)
    check.that(wrong is None, why=wrong or "")
    got = [mean_of(design, *case[:3]) for design, case in zip(designs, cases, strict=True)]
    check.equal(got, [least(*case) for case in cases], rel=1e-9, why=why)
case = posed("plain")
wide = student.choose_profiles(*case[:3], 1)
check.that(fault(wide, case[0], 1) is None, why=fault(wide, case[0], 1) or "")
check.equal(mean_of(wide, *case[:3]), least(*case[:3], 1), rel=1e-9, why="只准一个 Profile 时，剩下的选择就是 opt，你选的不是最便宜的。")
check.equal(student.choose_profiles([33], [7], [[2.5]], 3), [(33, 33, 33)], why="只有一种长度时，只有一种设计。")
### END HIDDEN TESTS

# %% [markdown]
# 现在用在本章的数据上：合成的流量，录下来的成本表，从 1 个 Profile 起，一个个往上加。两种时钟各算一次。**先猜：第二个、第三个 Profile 各能再省多少？**

# %% tags=["demo"]
rows = []
for most in range(1, min(len(GRID), 4) + 1):
    row = [most]
    for clock in ("gpu_us", "end_to_end_us"):
        design = choose_profiles(GRID, TRAFFIC, cost_table(SHOWN, clock).tolist(), most)
        row += ["，".join(f"{SHORTEST if a == GRID[0] else a}–{z}（{o}）" for a, o, z in design), mean_us(design, GRID, TRAFFIC, cost_table(SHOWN, clock).tolist())]
    rows.append(row)
careless = weighted(cost_table(SHOWN, "gpu_us")[-1], TRAFFIC)
steps = [1 - after / before for before, after in zip([careless, *(row[2] for row in rows)], (row[2] for row in rows), strict=False)]
by_table = mean_us([tuple(each) for each in recorded_three["profiles"]], GRID, TRAFFIC, cost_table(SHOWN, "gpu_us").tolist())
directly = weighted(recorded_three["times"][str(SHOWN)]["gpu_us"], TRAFFIC)
lab.say(
    lab.table(
        ("至多几个", "只算 GPU：范围（opt）", "平均 µs", "端到端：范围（opt）", "平均 µs"),
        [(most, one, f"{gpu:.1f}", other, f"{whole:.1f}") for most, one, gpu, other, whole in rows],
    )
    + f"\n\n{COSTS['gpu']}，批大小 {SHOWN}，只算 GPU：一个 Profile，把 opt 从 {GRID[-1]} 换成挑出来的，省 {steps[0]:.1%}；"
    + "此后每多一个 Profile，再省 " + "、".join(f"{each:.1%}" for each in steps[1:]) + "。"
    + f"\n\n录的那三个窄 Profile：按表算平均 {by_table:.1f} µs，直接录到的是 {directly:.1f} µs。",
    measured=False,
)

# %% [markdown]
# 读这张表要留神四件事：
#
# - **每加一个 Profile，要拿构建时间、计划文件和显存去换**，所以看的是“再省多少”，不是“还能不能省”；
# - 平均成本只差百分之一二的两种设计，在测量误差之内，没有分别。端到端那一列若几乎不动，切在哪里就只是噪声，那时瓶颈在 CPU 的提交；
# - 练习里第一段的 min 是成本表的第一格；真的建引擎，要往下放到最短的请求，上表已经写成了 8；
# - 表是用宽 Profile 录的，拿来估窄的，是近似。上面最后一行就是这个近似差了多少。
#
# ### 练习三：几个 Profile 交错，次次都对（4 分）
#
# 写 `make_runner(plan)`，返回一个有 `infer(tokens, answers)` 方法的对象。`plan` 由 `build_plan` 造出，可能有任意几个 Profile，次序不定，可能重叠。
#
# - `tokens`、`answers` 都是 GPU 上的 `cupy.ndarray`：float32，形状 `(长度, 批大小, WIDTH)`，C 连续（C-contiguous，行优先，中间没有空当），两者形状相同。每次可以是不同的数组；
# - 长度和批大小**都**要在 Profile 的范围里才算装得下。几个都装得下时，用 max 的**长度**最小的（不比批大小）；再一样，用序号小的；
# - `infer` 把推理放进 `stream`，不等它做完（`stream` 上先排着的工作也不等）就返回，返回值是所用 Profile 的序号（`int`）；连着调用几次而不同步，每一次的结果都要对；
# - 不合法的输入（没有 Profile 装得下、类型或维数不对、不是 GPU 数组、不连续、`answers` 和 `tokens` 形状不同）抛 `ValueError`，
#   **在入队之前**，`answers` 一个字节也不动；之后这个 runner 照样能用；
# - `plan` 坏了（比如被截断），`make_runner` 抛 `RuntimeError`。
#
# 如果写成类，就写在同一格里。参数名 `answers` 会遮住给定的函数 `answers`，不要紧：`infer` 用不到那个函数。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 哪些事只需要在 `make_runner` 里做一次：打开引擎、问清每个 Profile 的范围、创建上下文、切换到各自的 Profile？
# 哪些每次都要做：检查、挑 Profile、设形状、设两个地址、入队？
# 检查全部放在碰上下文之前，失败时就什么也没有变。挑 Profile 的规矩和练习一是同一条，只是“装得下”多看了批大小。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# - `engine.num_optimization_profiles`，`engine.get_tensor_profile_shape("tokens", 序号)` → `[min, opt, max]`；
# - `context.set_optimization_profile_async(序号, stream.ptr)`，之后先 `stream.synchronize()`，再碰这个上下文；
# - `context.set_input_shape("tokens", 形状)`、`context.set_tensor_address(名字, 数组.data.ptr)`、`context.execute_async_v3(stream.ptr)`，每一个的返回值都交给 `must`；
# - 检查：`isinstance(x, cp.ndarray)`、`x.dtype`、`x.ndim`、`x.shape`、`x.flags.c_contiguous`。
#
# </details>

# %% solution="make_runner" tags=["gpu"]
def make_runner(plan):
    """Open a plan of build_plan. Returns an object with infer(tokens, answers) -> index of the profile used.

    tokens, answers: cupy float32, C-contiguous, the same shape (length, batch, WIDTH). Enqueues on `stream` and does
    not wait. Of the profiles that hold the shape, the one with the smallest max length, then the lowest index.
    ValueError for input that no profile holds or that is of another kind, before anything is enqueued; RuntimeError
    for a plan that cannot be opened.
    """
    ### BEGIN SOLUTION: 打开引擎，记下每个 Profile 的范围，给每个 Profile 备一个上下文；infer 先检查，再挑，再设形状和地址，最后入队
    engine = open_engine(plan)
    profiles = []
    for index in range(engine.num_optimization_profiles):
        least, _, most = (tuple(shape) for shape in engine.get_tensor_profile_shape("tokens", index))
        context = new_context(engine)
        must(context.set_optimization_profile_async(index, stream.ptr), "切换 Profile")
        stream.synchronize()  # no shape before the switch is done
        profiles.append((most[0], index, least, most, context))
    profiles.sort(key=lambda each: each[:2])

    class Runner:
        def infer(self, tokens, answers):
            for name, array in (("tokens", tokens), ("answers", answers)):
                if not (isinstance(array, cp.ndarray) and array.dtype == np.float32 and array.ndim == 3 and array.flags.c_contiguous):
                    raise ValueError(f"{name} 应当是 GPU 上的 cupy 数组：float32，三维，C 连续")
            if tokens.shape != answers.shape:
                raise ValueError(f"answers 的形状 {answers.shape} 和 tokens 的 {tokens.shape} 不同")
            for _, index, least, most, context in profiles:
                if all(a <= size <= z for a, size, z in zip(least, tokens.shape, most, strict=True)):
                    must(context.set_input_shape("tokens", tokens.shape), "设置形状")
                    must(context.set_tensor_address("tokens", tokens.data.ptr), "设置 tokens 的地址")
                    must(context.set_tensor_address("answers", answers.data.ptr), "设置 answers 的地址")
                    must(context.execute_async_v3(stream.ptr), "入队")
                    return index
            raise ValueError(f"没有 Profile 能装下形状 {tokens.shape}")

    return Runner()
    ### END SOLUTION


# %% test="make_runner_visible" kind="structure" points=1 tags=["gpu"]
TWO = [((65, 1), (512, 8), (512, 16)), ((8, 1), (32, 8), (64, 16))]
runner = student.make_runner(reference.build_plan(TWO))


def drawn(length, batch):
    """Random tokens (numpy float32, whole numbers) of that shape."""
    return secret.integers(-8, 9, (length, batch, 256)).astype(np.float32)


for length, batch, index in ((16, 4, 1), (100, 2, 0), (64, 8, 1), (65, 1, 0), (16, 1, 1)):
    data = drawn(length, batch)
    x, y = on_gpu(data), on_gpu(np.zeros_like(data))
    y.poison()
    check.equal(runner.infer(x, y), index, why=f"形状 ({length}, {batch}, 256) 应当用 Profile {index}：这个引擎的长 Profile 排在前面。序号和范围要问引擎，不要假定从短到长。")
    check.equal(y, reference.answers(data), abs=0.5, why=f"长度 {length} 的结果不对。每次都设了形状和两个地址吗？上下文在正确的 Profile 上吗？")
x, y = on_gpu(np.zeros((16, 5, 256), np.float32)), on_gpu(np.zeros((16, 5, 256), np.float32))
before = y.poison() or y.read().tobytes()
check.raises("ValueError", runner.infer, on_gpu(np.zeros((600, 1, 256), np.float32)), on_gpu(np.zeros((600, 1, 256), np.float32)), why="长度 600 超出所有 Profile，应当抛 ValueError。")
check.raises("ValueError", runner.infer, np.zeros((16, 5, 256), np.float32), y, why="tokens 是 NumPy 数组，不在 GPU 上，应当抛 ValueError。")
check.that(y.read().tobytes() == before, why="输入不合法，answers 却被改动了。检查要放在入队之前。")
### BEGIN HIDDEN TESTS
data = drawn(16, 5)
x.write(data)
runner.infer(x, y)
check.equal(y, reference.answers(data), abs=0.5, why="拒绝了不合法的输入以后，再给合法的输入，结果不对。失败的调用不应当改动任何状态。")
### END HIDDEN TESTS

# %% test="make_runner" kind="structure" points=3 tags=["gpu"]
TWO = [((65, 1), (512, 8), (512, 16)), ((8, 1), (32, 8), (64, 16))]
runner = student.make_runner(reference.build_plan(TWO))
pairs = []
for length, batch in ((300, 2), (20, 4), (300, 1), (21, 4)):
    data = secret.integers(-8, 9, (length, batch, 256)).astype(np.float32)
    x, y = on_gpu(data), on_gpu(np.zeros_like(data))
    y.poison()
    pairs.append((data, x, y))
used = [runner.infer(x, y) for _, x, y in pairs]
check.equal(used, [0, 1, 0, 1], why="长短交错时，选的 Profile 不对。")
for data, _, y in pairs:
    check.equal(y, reference.answers(data), abs=0.5, why="两个 Profile 交错时结果不对。每个 Profile 有自己的上下文吗？一个上下文换来换去，切换前后都要等流，而 infer 不许等。")
### BEGIN HIDDEN TESTS
BURST = """
def burst(runner, pairs):
    return [runner.infer(x, y) for x, y in pairs]
"""
burst = student.define(BURST, "burst")


def tokens_of(length, batch):
    return secret.integers(-8, 9, (length, batch, 256)).astype(np.float32)


low, high, longest = int(secret.integers(10, 20)), int(secret.integers(110, 140)), int(secret.integers(200, 300))
# Overlapping, in no order; profiles 1 and 2 have the same max length.
MANY = [
    ((low, 1), (128, 2), (longest, 3)),
    ((low + 10, 2), (32, 8), (high, 16)),
    ((low, 1), (64, 4), (high, 8)),
]
runner = student.make_runner(reference.build_plan(MANY))


def expected_index(length, batch):
    order = sorted(range(len(MANY)), key=lambda n: (MANY[n][2][0], n))
    return next((n for n in order if all(MANY[n][0][k] <= size <= MANY[n][2][k] for k, size in enumerate((length, batch)))), None)


shapes = [(low, 1), (low, 6), (low + 10, 1), (low + 10, 16), (high, 2), (high, 1), (high, 9), (high + 1, 3), (longest, 1), (low + 9, 8), (48, 7)]
shapes = [shapes[int(each)] for each in secret.permutation(len(shapes))]
work = []
for shape in shapes:
    data = tokens_of(*shape)
    x, y = on_gpu(data), on_gpu(np.zeros_like(data))
    y.poison()
    work.append((data, x, y))
used = burst(runner, [[x, y] for _, x, y in work])
check.equal(used, [expected_index(*shape) for shape in shapes], why="选的 Profile 不对。长度和批大小都要装得下；都装得下时用 max 的长度最小的，再一样用序号小的。")
for data, _, y in work:
    check.equal(y, reference.answers(data), abs=0.5, why="连着推理好几次、中间不同步，有的结果不对。地址和形状是每次都设的吗？")
# The same arrays again, with new data in place, the other way round.
for number in reversed(range(len(work))):
    data, x, y = work[number]
    data = tokens_of(*shapes[number])
    x.write(data)
    y.poison()
    work[number] = data, x, y
burst(runner, [[x, y] for _, x, y in reversed(work)])
for data, _, y in work:
    check.equal(y, reference.answers(data), abs=0.5, why="输入就地换成新数据以后，结果不对。")

plain = on_gpu(tokens_of(40, 2))
out = on_gpu(np.zeros((40, 2, 256), np.float32))
out.poison()
untouched = out.read().tobytes()


def lent(shape, dtype=np.float32):
    """Two buffers of that shape, one for input and one for output."""
    return on_gpu(np.zeros(shape, dtype)), on_gpu(np.zeros(shape, dtype))


refusals = [((length, batch, 256), "长度或批大小刚好在所有 Profile 之外时，应当抛 ValueError。两头、两个维度都要检查。") for length, batch in ((low - 1, 1), (longest + 1, 1), (high + 1, 4), (40, 17), (low, 9))]
refusals += [((40, 2, 255), "最后一维不是 256，应当抛 ValueError。"), ((40, 512), "只有两维，应当抛 ValueError。"), ((40, 2, 256, 1), "有四维，应当抛 ValueError。")]
for shape, why in refusals:
    x, y = lent(shape)
    y.poison()
    kept = y.read().tobytes()
    check.raises("ValueError", runner.infer, x, y, why=why)
    check.that(y.read().tobytes() == kept, why="输入不合法，answers 却被改动了。检查要放在入队之前。")
for x, y, why in (
    (lent((40, 2, 256), np.float64)[0], out, "tokens 是 float64，应当抛 ValueError。"),
    (plain, lent((40, 2, 256), np.int32)[1], "answers 是 int32，应当抛 ValueError。"),
    (plain, lent((41, 2, 256))[1], "answers 的形状和 tokens 不同，应当抛 ValueError。"),
    (plain, np.zeros((40, 2, 256), np.float32), "answers 是 NumPy 数组，不在 GPU 上，应当抛 ValueError。"),
    (np.zeros((40, 2, 256), np.float32), out, "tokens 是 NumPy 数组，不在 GPU 上，应当抛 ValueError。"),
):
    kept = None if isinstance(y, np.ndarray) else y.poison() or y.read().tobytes()
    check.raises("ValueError", runner.infer, x, y, why=why)
    check.that(kept is None or y.read().tobytes() == kept, why="输入不合法，answers 却被改动了。检查要放在入队之前。")
STRIDED = """
def strided_tokens(runner, x, y):
    return runner.infer(x[:, ::2], y)


def strided_answers(runner, x, y):
    return runner.infer(x, y[:, ::2])
"""
check.raises("ValueError", student.define(STRIDED, "strided_tokens"), runner, on_gpu(tokens_of(40, 4)), out, why="tokens 不连续（每隔一个取一个），TensorRT 会把它当成连续的来读；应当抛 ValueError。")
check.that(out.read().tobytes() == untouched, why="输入不合法，answers 却被改动了。检查要放在入队之前。")
wider = lent((40, 4, 256))[1]
wider.poison()
kept = wider.read().tobytes()
check.raises("ValueError", student.define(STRIDED, "strided_answers"), runner, plain, wider, why="answers 不连续（每隔一个取一个），TensorRT 会把它当成连续的来写；应当抛 ValueError。")
check.that(wider.read().tobytes() == kept, why="输入不合法，answers 却被改动了。检查要放在入队之前。")
runner.infer(plain, out)
check.equal(out, reference.answers(plain.read()), abs=0.5, why="拒绝了一批不合法的输入以后，runner 不能正常工作了。")
FILLED = """
def filled(stream, runner, pairs, news):
    "Writes the tokens, in the stream's turn, and then asks for the answers."
    with stream:
        for (x, _), new in zip(pairs, news):
            x[...] = new
    for x, y in pairs:
        runner.infer(x, y)
"""
fresh = [tokens_of(*shape) for shape in ((low, 1), (low + 10, 16), (longest, 1), (48, 7))]  # one profile after the other


def comes_back(party, runner):
    """Whether infer comes back at once; if not, whether its own work still runs then, as when it waits first and then enqueues.

    The first time, kernels are loaded; the last, only if the machine may just have been busy. Its answers are checked.
    """
    pairs, news = [[on_gpu(data), on_gpu(np.zeros_like(data))] for data in fresh], [on_gpu(data) for data in fresh]
    held_up, filled, tries = party.plant("held_up"), party.define(FILLED, "filled"), []
    for ms in (0, 200, 200):
        for x, y in pairs:
            x.write(np.zeros(x.shape, np.float32))
            y.poison()
        tries.append(held_up(party.value("stream"), ms, filled, party.value("stream"), runner, pairs, news))
        if ms and tries[-1][0]:
            break
    for data, (_, y) in zip(fresh, pairs, strict=True):
        check.equal(y, reference.answers(data), abs=0.5, why="stream 上先排着别的工作，然后才写 tokens，再轮到推理，结果却不对：推理要放进 stream，排在已有的工作后面。")
    return tries[-1][0], any(busy for _, busy in tries)


plan = reference.build_plan(MANY)
# Where TensorRT itself waits, the reference waits too.
early, running = comes_back(student, runner)
early = early or not comes_back(reference, reference.make_runner(plan))[0]
check.that(early or running, why="stream 正忙的时候，infer 一直等到它做完才返回：infer 只入队，不等待。每个 Profile 一个上下文，infer 里就不用切换，也不用同步。")
check.that(early, why="stream 正忙的时候，infer 先停下来等它，才接着入队：返回时，先排在 stream 上的工作已经做完了。设形状、设地址、入队都不用等 GPU；每个 Profile 一个上下文，infer 里就不用切换，也不用同步。")
for broken in (plan[: len(plan) // 2], b""):
    check.raises("RuntimeError", student.make_runner, broken, why="计划文件坏了，make_runner 应当抛 RuntimeError：open_engine 已经替你检查了。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：比“一个宽的、全部填充”快（3 分）
#
# 最省事的服务是这样的：一个宽 Profile，每个请求都填充到 512。它就是给定的 `PaddedServer`，也是这道题的对手。
#
# `state` 是 GPU 上的 float32 数组，形状 `(512, 批大小, WIDTH)`。服务一个长度为 L 的请求，就是：
#
# 1. 用 `state` 的前 L 个 token 推理；
# 2. `merge(state, out, L)`：把结果的前 L 行并进 `state` 的前 L 行（给定的内核，`stream` 上）。
#
# 下一个请求读到的就是新的 `state`，所以漏做、错序、取错长度，最后的 `state` 都会不同。

# %% tags=["gpu"]
MERGE = cp.RawKernel(
    r"""
extern "C" __global__ void merge(float *state, const float *out, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    float v = state[t] + 3.0f * out[t] + 5.0f;
    state[t] = v - 16.0f * floorf(v * 0.0625f) - 8.0f;
}
""",
    "merge",
)
BLOCK = 256


def merge(state, out, length):
    """Merge the first `length` tokens of out into those of state, in place, on `stream`. Returns at once.

    state, out: cupy float32, C-contiguous, (at least length, batch, WIDTH), of one batch.
    """
    size = length * state.shape[1] * state.shape[2]
    with stream:
        MERGE((-(-size // BLOCK),), (BLOCK,), (state, out, np.uint32(size)))


class PaddedServer:
    """The easy way: one wide profile, every request padded with zeros to LONGEST tokens.

    plan: of one profile that holds state's shape. state: cupy float32, (LONGEST, batch, WIDTH), advanced in place.
    """

    def __init__(self, plan, state):
        self.state, self.context = state, new_context(open_engine(plan))
        with stream:
            self.inbox, self.outbox = cp.zeros_like(state), cp.zeros_like(state)
        must(self.context.set_input_shape("tokens", state.shape), "设置形状")
        must(self.context.set_tensor_address("tokens", self.inbox.data.ptr), "设置 tokens 的地址")
        must(self.context.set_tensor_address("answers", self.outbox.data.ptr), "设置 answers 的地址")

    def __call__(self, lengths):
        """Serve requests of these lengths, one after the other, on `stream`; does not wait."""
        for length in lengths:
            with stream:
                self.inbox[:length] = self.state[:length]
                self.inbox[length:] = 0
            must(self.context.execute_async_v3(stream.ptr), "入队")
            merge(self.state, self.outbox, length)


def padded_server(plan, state):
    """Return a PaddedServer."""
    return PaddedServer(plan, state)


def merged(state, lengths):
    """What serving these lengths makes of state (numpy float32), computed by NumPy; state stays as it is."""
    state = state.copy()
    for length in lengths:
        sum_ = state[:length] + 3 * answers(state[:length]) + 5
        state[:length] = sum_ - 16 * np.floor(sum_ / 16) - 8
    return state


# The first launch of a kernel loads its code: not within a measurement.
with stream:
    merge(cp.zeros((1, 1, WIDTH), cp.float32), cp.zeros((1, 1, WIDTH), cp.float32), 1)
stream.synchronize()

# %% [markdown]
# 写 `make_server(plan, state)`：`plan` 有一个或几个互不重叠的 Profile，次序不定，合起来盖住长度 8 到 512，`state` 的批大小在每个 Profile 的范围里。
# 返回一个可以调用的 `server(lengths)`：
#
# - 在 `stream` 上依次服务这些请求，**按真实长度推理**，不填充；不等 GPU 做完（`stream` 上先排着的工作也不等）就返回；
# - 结果和 `PaddedServer` 逐位相同（它填充的是零，求和不受影响）；
# - 有一个长度没有 Profile 装得下：抛 `ValueError`，一个请求也不做，`state` 不变；
# - 要快：按流量抽出的一串请求，端到端（最后同步一次）不超过 `PaddedServer` 用时的一半；如果在这台机器上参考实现自己也快得不多，门槛会降到它的加速比的一半，但不低于 1.2 倍。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# `state[:L]` 的起始地址和 `state` 有什么关系？它连续吗？那么输入的地址要每次都设吗？输出呢？
# 每个请求真正会变的只有一样。还有：长短交替时，怎样才不用换 Profile？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 创建时，每个 Profile 一个上下文：`set_optimization_profile_async(序号, stream.ptr)`，`stream.synchronize()`，两个 `set_tensor_address`；一块输出缓冲 `cp.empty_like(state)` 大家共用（同一条流，前一个用完才轮到后一个）。
# 每个请求：`set_input_shape("tokens", (L, *state.shape[1:]))`、`execute_async_v3(stream.ptr)`、`merge(state, out, L)`。
# 先把所有长度都配好 Profile，再开始入队，出错时就什么也没有做。
#
# </details>

# %% solution="make_server" tags=["gpu"]
def make_server(plan, state):
    """Open a plan whose profiles do not overlap, and return server(lengths), which serves requests on `stream`.

    state: cupy float32, C-contiguous, (LONGEST, batch, WIDTH), advanced in place; it stays the caller's. A request of
    length L runs the engine on state[:L], at its true length, and merges the answers into state[:L]. ValueError, and
    nothing done, if a length fits no profile.
    """
    ### BEGIN SOLUTION: 每个 Profile 一个上下文，地址只设一次；每个请求设形状、入队、merge；长度先全部检查
    engine = open_engine(plan)
    with stream:
        out = cp.empty_like(state)
    served = []
    for index in range(engine.num_optimization_profiles):
        least, _, most = (tuple(shape) for shape in engine.get_tensor_profile_shape("tokens", index))
        context = new_context(engine)
        must(context.set_optimization_profile_async(index, stream.ptr), "切换 Profile")
        stream.synchronize()  # nothing else before the switch is done
        must(context.set_tensor_address("tokens", state.data.ptr), "设置 tokens 的地址")
        must(context.set_tensor_address("answers", out.data.ptr), "设置 answers 的地址")
        served.append((least[0], most[0], context))
    by_length = {length: context for low, high, context in served for length in range(low, high + 1)}

    def server(lengths):
        missing = [length for length in lengths if length not in by_length]
        if missing:
            raise ValueError(f"没有 Profile 能装下长度 {missing}")
        for length in lengths:
            context = by_length[length]
            must(context.set_input_shape("tokens", (length, *state.shape[1:])), "设置形状")
            must(context.execute_async_v3(stream.ptr), "入队")
            merge(state, out, length)

    return server
    ### END SOLUTION


# %% test="make_server_result" kind="structure" points=1 tags=["gpu"]
TWO = [((65, 1), (512, 8), (512, 16)), ((8, 1), (32, 8), (64, 16))]
start = secret.integers(-8, 8, (512, 8, 256)).astype(np.float32)
x = on_gpu(start)
server = student.make_server(reference.build_plan(TWO), x)
check.equal(x, start, why="创建服务的时候 state 就变了。make_server 只应当准备。")
server([16, 100, 24])
check.equal(x, reference.merged(start, [16, 100, 24]), abs=0.5, why="服务三个请求以后 state 不对。每个请求：用前 L 个 token 推理，再 merge 前 L 个，次序和给的一样。")
check.raises("ValueError", server, [20, 600], why="长度 600 没有 Profile 装得下，应当抛 ValueError。")
check.equal(x, reference.merged(start, [16, 100, 24]), abs=0.5, why="第二个请求装不下，第一个却已经做了。先把所有长度检查一遍，再开始。")
### BEGIN HIDDEN TESTS
lengths = [int(secret.integers(8, 65)), int(secret.integers(193, 400)), int(secret.integers(65, 193)), 8, 64, 65, 192, 193]
lengths = [lengths[int(each)] for each in secret.permutation(len(lengths))]
start = secret.integers(-8, 8, (512, 8, 256)).astype(np.float32)
x.write(start)
server(lengths)
check.equal(x, reference.merged(start, lengths), abs=0.5, why="换一串长度，结果不对。Profile 的两头、长短交替时形状有没有每次都设？")
for bad in ([513], [30, 7, 30]):
    before = x.read().tobytes()
    check.raises("ValueError", server, bad, why="长度在所有 Profile 之外，应当抛 ValueError。")
    check.that(x.read().tobytes() == before, why="抛出 ValueError 之前，state 已经变了。先把所有长度检查一遍，再开始。")
# A plan of another design: one profile for all lengths.
start = secret.integers(-8, 8, (512, 8, 256)).astype(np.float32)
x = on_gpu(start)
server = student.make_server(reference.build_plan([((8, 1), (512, 8), (512, 16))]), x)
server([64, 65, 40])
check.equal(x, reference.merged(start, [64, 65, 40]), abs=0.5, why="换一个引擎（只有一个 Profile），结果不对。范围要问引擎，不要写死。")
# And one with two profiles again, the short one first, that meet elsewhere.
most = int(secret.choice([96, 128, 160]))
plan = reference.build_plan([((8, 1), (32, 8), (most, 16)), ((most + 1, 1), (512, 8), (512, 16))])
x = on_gpu(start)
server = student.make_server(plan, x)
lengths = [most, 20, most + 1, 70, 300]
server(lengths)
check.equal(x, reference.merged(start, lengths), abs=0.5, why="换一个引擎（Profile 的次序和分界都不同），结果不对。次序和范围要问引擎，不要写死。")
# The lengths that are set in contexts of new_context; None where the contexts were made in another way.
SET = """
import cupy


class Context:
    def __init__(self, context, lengths):
        self._context, self._lengths = context, lengths

    def __getattr__(self, name):
        return getattr(self._context, name)

    def set_input_shape(self, name, shape):
        self._lengths.append(int(shape[0]))
        return self._context.set_input_shape(name, shape)


def lengths_set(make, plan, state, lengths):
    names, made, found = getattr(make, "__globals__", {}), [], []
    new_context = names.get("new_context")

    def noted(*args, **kwargs):
        made.append(True)
        return Context(new_context(*args, **kwargs), found)

    names["new_context"] = noted
    try:
        server = make(plan, state)
        server(lengths)
        cupy.cuda.runtime.deviceSynchronize()
    finally:
        names["new_context"] = new_context
    return found if made else None
"""
found = student.define(SET, "lengths_set")(student.value("make_server"), plan, on_gpu(start), lengths)
check.that(found is None or set(lengths) <= set(found), why="没有按真实长度推理：有的长度从来没有用 set_input_shape 设过。填充到 Profile 的最大长度，算出来的结果一样，工作却白做了许多。")
FILLED = """
def filled(stream, server, state, start, lengths):
    "Writes the state, in the stream's turn, and then serves."
    with stream:
        state[...] = start
    server(lengths)
"""
fresh = secret.integers(-8, 8, (512, 8, 256)).astype(np.float32)


def comes_back(party, server, state):
    """Whether a server comes back at once; if not, whether its own work still runs then, as when it waits first and then enqueues.

    At first, kernels are loaded and graphs made; the last time, only if the machine may just have been busy. Its state is checked.
    """
    held_up, filled, tries = party.plant("held_up"), party.define(FILLED, "filled"), []
    start = on_gpu(fresh)
    for ms in (0, 0, 200, 200):
        tries.append(held_up(party.value("stream"), ms, filled, party.value("stream"), server, state, start, lengths))
        if ms and tries[-1][0]:
            break
    check.equal(state, reference.merged(fresh, lengths), abs=0.5, why="stream 上先排着别的工作，然后才写 state，再轮到这串请求，结果却不对：所有的工作都要放进 stream，排在已有的工作后面。")
    return tries[-1][0], any(busy for _, busy in tries)


y = on_gpu(fresh)
# Where TensorRT itself waits, the reference waits too.
early, running = comes_back(student, server, x)
early = early or not comes_back(reference, reference.make_server(plan, y), y)[0]
check.that(early or running, why="stream 正忙的时候，server 一直等到它做完才返回：它只入队，不等待。每个 Profile 一个上下文，就不用切换，也不用同步。")
check.that(early, why="stream 正忙的时候，server 先停下来等它，才接着入队：返回时，先排在 stream 上的工作已经做完了。设形状、入队都不用等 GPU；每个 Profile 一个上下文，就不用切换，也不用同步。")
### END HIDDEN TESTS

# %% test="make_server_speed" kind="speedup" points=2 tags=["gpu"]
WIDE, TWO = [((8, 1), (512, 8), (512, 16))], [((65, 1), (512, 8), (512, 16)), ((8, 1), (32, 8), (64, 16))]


def drawn_state():
    """A random state."""
    return secret.integers(-8, 8, (512, 16, 256)).astype(np.float32)


# Four requests, one from each quarter of the traffic, in random order: random, and yet about as long as the traffic on the whole.
traffic = reference.value("REQUESTS_SORTED")
picked = [traffic[int((part + secret.random()) * len(traffic) / 4)] for part in range(4)]
trace = [picked[int(each)] for each in secret.permutation(4)]
x, y, z = (on_gpu(drawn_state()) for _ in range(3))
server, best = student.make_server(reference.build_plan(TWO), x), reference.make_server(reference.build_plan(TWO), z)
padded = reference.padded_server(reference.build_plan(WIDE), y)
check.speedup(
    partial(server, trace),
    over=partial(padded, trace),
    best=partial(best, trace),
    state=(x, z),
    at_least=2.0,
    draw=drawn_state,
    abs=0.5,
    ceiling=None,  # the states prove the work: whoever captures a graph for each length may be as fast as that
    why="还不够快。推理的是真实长度吗？上下文是不是每个请求都新建，或者每个请求都在切换 Profile、同步？",
)
### BEGIN HIDDEN TESTS
start = drawn_state()
x.write(start)
server(trace)
check.equal(x, reference.merged(start, trace), abs=0.5, why="计时以后再服务一串请求，结果不对：快，但没有做完该做的工作。")
### END HIDDEN TESTS

# %% [markdown]
# 你的服务快在哪里？把它和“宽 Profile、按真实长度”比一比，就知道两级台阶各有多高：

# %% tags=["demo", "gpu"]
trace = [REQUESTS_SORTED[int((part + 0.5) * len(REQUESTS_SORTED) / 8)] for part in range(8)]
with stream:
    states = [cp.zeros((LONGEST, 16, WIDTH), cp.float32) for _ in range(3)]
stream.synchronize()
wide_plan, narrow_plan = build_plan(CHOICES["一个宽的，opt = 512"]), build_plan(CHOICES["两个窄的"])
padded, wide_true, narrow_true = padded_server(wide_plan, states[0]), make_server(wide_plan, states[1]), make_server(narrow_plan, states[2])
for server in (padded, wide_true, narrow_true):
    server(trace)
outcomes = [state.get(stream=stream) for state in states]
print("三种做法的 state 逐位相同：", all(np.array_equal(outcomes[0], each) for each in outcomes[1:]))

step1 = lab.compare_us(partial(padded, trace), partial(wide_true, trace), clock="end_to_end")
step2 = lab.compare_us(partial(wide_true, trace), partial(narrow_true, trace), clock="end_to_end")
lab.say(
    f"长度 {trace} 的八个请求：\n\n"
    + lab.table(
        ("做法", "端到端 µs", "上一行用时是它的几倍"),
        [
            ("一个宽的，全部填充到 512", f"{step1.first.median:.0f}", "—"),
            ("一个宽的，按真实长度", f"{step1.second.median:.0f}", f"{step1.ratio:.2f}"),
            ("两个窄的，按真实长度", f"{step2.second.median:.0f}", f"{step2.ratio:.2f}"),
        ],
    )
    + "\n\n"
    + (
        ("在这里，大头是不填充；" + (f"Profile 分得细，再快到 {step2.ratio:.2f} 倍。" if step2.at_least > 1.02 else "分成两个 Profile，没有看出再快。"))
        if step1.ratio > step2.ratio
        else "在这里，大头是 Profile 分得合身；不填充反而是小头。"
    )
)

# %% [markdown] tags=["instructor"]
# 给教师：练习一的隐藏测试把 Profile 打乱、重叠，专门有 max 并列的；练习二用穷举作标准答案，只比较平均成本，所以并列的设计都算对，
# 其中一组的表让“少用几个”更好，一组的表毫无规律，凡是按流量最多、最长、中间、等分去猜的都会错。
# 练习三的引擎有三个重叠、乱序的 Profile，两个的 max 并列，连着推理十一次不同步，流忙着的时候也要马上返回（问的是紧跟在长内核后面的事件，不是整条流：先等、后入队的，流里也还有它自己的工作；整条流只用来分清是先等还是后等，两种说法不同），推理要排在流上已有的工作后面；NumPy 数组、错的类型、形状、不连续、坏的计划文件都要报错，
# 报错以后还要能用。练习四用同样的办法查服务等不等。它的基准是“一个宽的、全部填充”：与其和宽 Profile 比内核合不合身（常常只差百分之几），不如和真实服务里最常见的写法比；
# 网络的每个中间结果都是小整数，所以 K 串请求之后的 state 必须逐位相同。
# `costs.json` 由 `record_costs.py` 在一块真实的 GPU 上录制，`lengths.csv` 由 `make_lengths.py` 用固定的种子造出。

# %% [markdown]
# ## 小结
#
# | 以前的说法 | 实验以后的说法 |
# |:--|:--|
# | opt 随便填 | opt 不改变对错和范围，只决定在哪个尺寸上挑内核；差多少要量，填多少由流量加权来定，不一定是最常见的长度 |
# | Profile 越多越快 | 收益很快递减；每多一个都要构建时间、计划文件和显存 |
# | 填充到最大，形状固定就快 | 白算的 token 往往是最大的一笔；尾巴不清零，答案还会悄悄地错 |
# | 引擎会自动选 Profile | 新上下文总是 0；要自己挑、自己切换、重新设形状，还要看返回值；选错了，`set_input_shape` 也未必拒绝 |
# | 一个 Profile 只能给一个上下文用 | 那是老版本；TensorRT 10 起可以共用，不必复制 |
# | 动态形状无限灵活 | 只在事先说好的范围之内；先盖住全部长度，再谈速度 |
#
# **带走三句话**
#
# 1. 先量成本，再看流量，最后才画范围：没有直方图的 Profile 设计是猜。
# 2. 每个 Profile 一个常备的上下文，不要换来换去；非换不可时：查序号，等它空闲，切换，等流，重设形状。
# 3. 两级台阶分开算：不填充省的是白算的 token，分 Profile 省的是不合身的内核。
#
# 下一步：《形状张量与数据相关输出》讲形状由数据决定时怎么办；《每个形状一张图》把本章的 Profile 和 CUDA 图合在一起；《执行上下文与显存》让几个上下文共用一块显存。
