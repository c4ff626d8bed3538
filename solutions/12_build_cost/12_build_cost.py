# %% [markdown]
# # 构建的代价
#
# 服务上线那天，三件怪事凑到了一起：
#
# - 换了一次权重，网络的结构一点没变，机器却又“编译”了好几分钟；
# - 同一份模型、同一台机器、同一条命令，构建两次，得到的引擎不一样，结果的最后几位也不一样；
# - 另一台机器上构建失败，日志里只有一句 `Could not find any implementation for node`。
#
# 三件事是同一个原因的三副面孔：**TensorRT 的构建不是翻译，是一场现场测速。** 这一章弄清楚测的是什么，
# 花了多少，哪些可以存下来下次用，哪些存不下来。
#
# **学完以后，你能够**
#
# - 说清构建器（builder）在忙什么，并从日志里把它试过的策略（tactic）数出来；
# - 在构建时间和推理延迟之间选一个优化级别，凭自己的曲线，不凭印象；
# - 写一个可靠的计时缓存（timing cache）：重启还在，坏了能认出来，几个进程一起用也不丢；
# - 读懂引擎检查器（engine inspector）的报告，也读懂构建失败的日志；
# - 说清“两次构建不一样”从哪里来，缓存能管住哪一部分。
#
# **需要的基础**：《构建第一个 TensorRT 引擎》里的构建器、网络、计划文件（plan）和执行上下文。
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
# ## 准备：一串卷积
#
# 实验要反复构建，所以网络要小：几层 3×3 卷积，每层后面一个 ReLU。`channels = (3, 32, 64)` 表示两层卷积：3 → 32 → 64 个通道。
# 输入固定是 4 张 64×64 的图，通道在前（NCHW）。
#
# 用卷积而不用矩阵乘，是因为一层卷积的算法特别多，最能看出构建器在忙什么。先写权重和 NumPy 的参考答案，它们不需要 GPU。

# %%
import hashlib
import json
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

BATCH, SIDE = 4, 64  # images, pixels


def random_weights(channels, seed):
    """Weights of a chain of 3×3 convolutions. channels: numbers of channels, input first.

    Returns a list of float32 arrays (out, in, 3, 3), scaled so that values keep their size from layer to layer.
    """
    rng = np.random.default_rng(seed)
    return [
        (rng.standard_normal((out, into, 3, 3)) * np.sqrt(2 / (9 * into))).astype(np.float32)
        for into, out in pairwise(channels)
    ]


def random_images(channels, seed):
    """Float32 images (BATCH, channels, SIDE, SIDE), standard normal."""
    return np.random.default_rng(seed).standard_normal((BATCH, channels, SIDE, SIDE)).astype(np.float32)


def expected(weights, x):
    """The network's output in float64: for each layer a 3×3 convolution (padding 1), then ReLU.

    weights: list of arrays (out, in, 3, 3). x: (batch, in, height, width). Returns (batch, out, height, width).
    """
    y = x.astype(np.float64)
    for w in weights:
        padded = np.pad(y, ((0, 0), (0, 0), (1, 1), (1, 1)))
        rows, columns = y.shape[2:]
        shifts = [(r, c) for r in range(3) for c in range(3)]
        y = sum(np.einsum("oi,bihw->bohw", w[:, :, r, c], padded[:, :, r : r + rows, c : c + columns], optimize=True) for r, c in shifts)
        y = np.maximum(y, 0)
    return y


# %% [markdown]
# 再写 TensorRT 这一边。名字都是《构建第一个 TensorRT 引擎》里见过的：
#
# - `conv_network(weights)` 定义网络；权重是 float32 就全程 FP32，是 float16 就在两头各加一次类型转换，中间全程 FP16；
# - `make_config(level)` 给出构建配置；`level` 是优化级别，默认 3；
# - `built(network, config)` 构建，返回 plan 的字节；失败时抛出异常，带上 TensorRT 说的原因；
# - `build_from(blob, weights)` 从一份给定的计时缓存出发构建，`b""` 表示从零开始；
# - `Runner(plan)` 反序列化并准备好缓冲，`infer(x)` 推理一次。
#
# `make_config` 里的 `lab.build_progress()` 会显示构建进度，`lab.trt_logger()` 是本课程统一的日志。

# %% tags=["gpu"]
from collections import deque

import cupy as cp
import tensorrt as trt

builder = trt.Builder(lab.trt_logger())
runtime = trt.Runtime(lab.trt_logger())
stream = cp.cuda.Stream(non_blocking=True)  # 和默认流互不等待
STRONGLY_TYPED = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
THIS_MACHINE = {
    "tensorrt": trt.__version__,
    "cuda": cp.cuda.runtime.runtimeGetVersion(),
    "gpu": lab.gpu_name(),
    "capability": cp.cuda.Device().compute_capability,
}
lent = deque(maxlen=64)  # TensorRT reads weights during the build, without a copy: keep the latest ones alive


def conv_network(weights):
    """Define the network of `expected` with input "x" and output "y", both float32; layers conv1, relu1, conv2, …

    weights: list of C-contiguous arrays (out, in, 3, 3), all float32 or all float16, which is the type computed in.
    """
    lent.append(weights)
    network = builder.create_network(STRONGLY_TYPED)
    x = network.add_input("x", trt.DataType.FLOAT, (BATCH, weights[0].shape[1], SIDE, SIDE))
    half = weights[0].dtype == np.float16
    if half:
        cast = network.add_cast(x, trt.DataType.HALF)
        cast.name = "cast_in"
        x = cast.get_output(0)
    for number, w in enumerate(weights, 1):
        conv = network.add_convolution_nd(x, w.shape[0], (3, 3), trt.Weights(w))
        conv.padding_nd = (1, 1)
        conv.name = f"conv{number}"
        relu = network.add_activation(conv.get_output(0), trt.ActivationType.RELU)
        relu.name = f"relu{number}"
        x = relu.get_output(0)
    if half:
        cast = network.add_cast(x, trt.DataType.FLOAT)
        cast.name = "cast_out"
        x = cast.get_output(0)
    x.name = "y"
    network.mark_output(x)
    return network


def make_config(level=3, show=False):
    """A builder configuration without a timing cache. level: 0–5. show: whether a line tells the build's progress."""
    config = builder.create_builder_config()
    config.builder_optimization_level = level
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # so that the inspector has something to say
    if show:
        config.progress_monitor = lab.build_progress()
    return config


def built(network: "trt.INetworkDefinition", config: "trt.IBuilderConfig"):
    """Build and return the plan, bytes. RuntimeError with TensorRT's own words where it fails."""
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("构建失败：" + "；".join(lab.trt_errors()))
    return bytes(plan)


def build_from(blob, weights, strict=False):
    """Build the network of weights at level 3 with the timing cache whose bytes are blob (b"" for an empty one).

    strict: fail rather than time a tactic that the cache lacks. Returns the plan, bytes. ValueError where TensorRT
    does not take the blob for a timing cache of this machine.
    """
    config = make_config()
    cache = config.create_timing_cache(blob)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise ValueError("TensorRT 不接受这份计时缓存：" + "；".join(lab.trt_errors()))
    if strict:
        config.set_flag(trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS)
    return built(conv_network(weights), config)


class Runner:
    """An engine with a context and buffers of its own. Calling it enqueues on `stream`, without waiting."""

    def __init__(self, plan):
        self.engine = runtime.deserialize_cuda_engine(plan)
        if self.engine is None:
            raise RuntimeError("plan 不能反序列化：" + "；".join(lab.trt_errors()))
        self.context = self.engine.create_execution_context()
        self.x, self.y = (cp.zeros(tuple(self.engine.get_tensor_shape(name)), cp.float32) for name in ("x", "y"))
        cp.cuda.Device().synchronize()
        self.context.set_tensor_address("x", self.x.data.ptr)
        self.context.set_tensor_address("y", self.y.data.ptr)

    def __call__(self):
        if not self.context.execute_async_v3(stream.ptr):
            raise RuntimeError("入队被拒绝：" + "；".join(lab.trt_errors()))

    def infer(self, x):
        """Return the outputs, a numpy array, for x, numpy or cupy; both float32."""
        self.x[...] = cp.asarray(x)
        cp.cuda.Device().synchronize()
        self()
        stream.synchronize()
        return self.y.get()


def run_plan(plan, x):
    """Deserialise plan (bytes), infer once. See Runner.infer."""
    return Runner(plan).infer(x)


# %% [markdown]
# 造好的引擎对不对，先用级别 1 快快地造一个看看。构建器要把自己的一大堆内核加载进来，一个进程一次，要好几秒：
# 上一格慢就慢在 `trt.Builder(…)`（别的版本也可能拖到第一次构建）。这一格顺便当预热，后面计时都在它之后。

# %% tags=["demo", "gpu"]
from time import perf_counter

CHANNELS = (3, 32, 64)
trained, images = random_weights(CHANNELS, 1), random_images(3, 2)
start = perf_counter()
config = make_config(1, show=True)
plan = built(conv_network(trained), config)
first_build = perf_counter() - start
worst = np.abs(run_plan(plan, images) - expected(trained, images)).max()
lab.say(
    f"第一次构建 {first_build:.1f} 秒，plan {len(plan) / 1024:.0f} KiB；与 NumPy（float64）最多差 {worst:.1e}，"
    + ("是 FP32 舍入的样子。" if worst < 1e-4 else "比 FP32 的舍入大：这个引擎选了 TF32 一类的策略。")
)

# %% [markdown]
# 差多少，要看构建器选了什么：TensorRT 默认允许 FP32 的乘法用 TF32 来做（尾数只留 10 位，《强类型精度与显式量化》细讲），
# 选了它，误差就在千分之几；没选，只有百万分之几。两种都算对。
#
# ## 构建器在忙什么
#
# 一层卷积在 GPU 上有许多种做法：直接卷、变成矩阵乘、分块多大、用不用张量核心、数据怎么排。每一种具体的做法叫一个**策略（tactic）**。
# 哪个最快？这要看 GPU、形状、类型，没有公式可算。TensorRT 的办法最老实：**在这块 GPU 上一个个跑一遍，掐表，选最快的。**
#
# 这些都写在最详细的日志（VERBOSE）里。本课程的日志只留错误，所以下面另开一个子进程，用一个什么都留下的日志，构建两次：
# 第一次从零开始，第二次带着第一次留下的计时缓存。然后数一数，两次各掐了多少回表。子进程也要自己加载构建器，要等几秒；它先留着，后面还有一个实验用它。

# %%
LISTENER = r"""
import json
import re
import time

import numpy as np
import tensorrt as trt


class Log(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)
        self.lines = []

    def log(self, severity, message):
        self.lines.append((severity, message))


log = Log()
builder = trt.Builder(log)
"""
WATCHED_BUILD = r"""
weights = [np.random.default_rng(n).standard_normal(shape).astype(np.float32) for n, shape in enumerate([(32, 3, 3, 3), (64, 32, 3, 3)])]


def watched(blob, level=3):
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    x = network.add_input("x", trt.DataType.FLOAT, (4, 3, 64, 64))
    for number, w in enumerate(weights, 1):
        conv = network.add_convolution_nd(x, w.shape[0], (3, 3), trt.Weights(w))
        conv.padding_nd, conv.name = (1, 1), f"conv{number}"
        relu = network.add_activation(conv.get_output(0), trt.ActivationType.RELU)
        relu.name = f"relu{number}"
        x = relu.get_output(0)
    network.mark_output(x)
    config = builder.create_builder_config()
    config.builder_optimization_level = level
    config.set_timing_cache(config.create_timing_cache(blob), ignore_mismatch=False)
    log.lines.clear()
    start = time.perf_counter()
    plan = builder.build_serialized_network(network, config)
    seconds = time.perf_counter() - start
    timed, node, sample = {}, "?", []
    for _, line in log.lines:
        if found := re.search(r"Timing Runner: (.+?) \(", line):
            node = found[1]
        if line.startswith("Tactic") and (found := re.search(r"Time: ([0-9.]+)", line)):
            timed.setdefault(node, []).append(float(found[1]))
            sample.append(line if len(line) <= 150 else f"{line[:95]} … {line[-50:]}")
    told = {"seconds": seconds, "built": plan is not None, "timed": timed, "sample": sample[:4], "lines": len(log.lines)}
    return told, bytes(config.get_timing_cache().serialize())


watched(b"", level=1)  # in some versions the first build of a process also loads the builder's own kernels
cold, blob = watched(b"")
warm, _ = watched(blob)
print(json.dumps([cold, warm]))
"""

# %% tags=["demo", "gpu"]
import subprocess
import sys
from threading import Timer


class Child:
    """A Python process of its own: it runs programs one after the other, and keeps their names until it ends."""

    LOOP = "import json, sys\nnames = {}\nfor line in sys.stdin:\n    exec(json.loads(line), names)\n    print('(done)', flush=True)"

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.LOOP],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        )

    def run(self, program, patience=120):
        """Returns (the lines that the program printed, 0 or the exit code of the process that it brought down)."""
        watchdog, lines = Timer(patience, self.process.kill), []
        watchdog.start()
        try:
            self.process.stdin.write(json.dumps(program) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.strip() == "(done)":
                    return lines, 0
                lines.append(line.rstrip("\n"))
        except OSError:  # it is gone already
            pass
        finally:
            watchdog.cancel()
        return lines, self.process.wait(10)

    def close(self):
        """End the process."""
        self.process.kill()
        self.process.wait(10)


listener = Child()
listener.run(LISTENER)
printed, code = listener.run(WATCHED_BUILD)
cold_log, warm_log = json.loads(printed[-1]) if code == 0 else ({}, {})
for line in cold_log.get("sample", []):
    print(line)
counts = [sum(map(len, each.get("timed", {}).values())) for each in (cold_log, warm_log)]
if counts[0]:
    rows = [
        (name, f"{each['seconds']:.2f}", count, each["lines"])
        for name, each, count in (("从零开始", cold_log, counts[0]), ("带着计时缓存", warm_log, counts[1]))
    ]
    lab.say(lab.table(("构建", "秒", "掐表次数", "日志行数"), rows))
else:
    lab.say(f"这一版 TensorRT 的详细日志换了写法，没有数到掐表的行（子进程的退出码 {code}）。后面的实验不依赖它。", measured=False)

# %% [markdown]
# 画出来更直观：每个点是日志里的一个策略，横着看是同一层（日志里的时间以毫秒计，图上换成了微秒）。

# %% tags=["demo", "gpu"]
import matplotlib.pyplot as plt

lab.plot_style()
if counts[0]:
    shown = sorted(cold_log["timed"].items(), key=lambda item: -len(item[1]))[:6]
    fig, ax = plt.subplots(figsize=(8, 0.6 * len(shown) + 1.6))
    for row, (_, times) in enumerate(shown):
        us = np.array(sorted(times)) * 1000
        ax.plot(us, np.full(len(us), row), linestyle="", marker="o", alpha=0.5, color="#0072B2")
        ax.plot(us[:1], [row], linestyle="", marker="*", markersize=13, color="#D55E00")
    ax.set_xscale("log")
    ax.set_yticks(range(len(shown)), [f"{name[:34]}（{len(times)} 个）" for name, times in shown])
    ax.set_xlabel("策略用时（µs），★ 是最快的")
    ax.set_title(f"同一层的各种做法（{lab.gpu_name()}）")
    plt.show()
    name, times = shown[0]
    lab.say(f"`{name}`：试了 {len(times)} 个策略，最快 {min(times) * 1000:.1f} µs，最慢 {max(times) * 1000:.1f} µs，差 {max(times) / min(times):.0f} 倍。")

# %% [markdown]
# 这就是构建慢的原因，也是引擎快的原因：**它慢在量过了，快也快在量过了。** 由此可以推出三件事，后面一件一件地试：
#
# - 少试几个策略，构建就快；代价也许是延迟。这是**优化级别**；
# - 试过的结果记下来，下次不用再试。这是**计时缓存**；
# - 掐表有噪声，两个策略不相上下的时候，这次选甲，下次可能选乙。这是**两次构建不一样**的来历。
#
# ## 优化级别：花多少时间找
#
# `config.builder_optimization_level` 从 0 到 5，默认 3。官方文档的说法，简单地讲：
#
# | 级别 | 怎么找 |
# |:--|:--|
# | 0 | 不动态生成内核，第一个能跑的策略就用；不理会计时缓存 |
# | 1、2 | 按经验排序，只试排在最前面的几个，2 比 1 多试一些 |
# | 3 | 凭经验决定用预编译的内核，还是现场编译一个 |
# | 4 | 总是现场编译 |
# | 5 | 现场编译，并且和预编译的逐个比较 |
#
# 级别越高，构建越慢；引擎一定越快吗？先猜：从 0 到 5，构建时间差几倍，延迟差几倍？
# 下面每一级都从零开始构建一次，不用缓存；全部构建完，再一级一级地量延迟。为了少等，网络只留一层大一点的卷积：64 → 128 个通道。

# %% tags=["demo", "gpu"]
PATIENCE = 6.0  # seconds: stop climbing beyond
single = random_weights((64, 128), 3)
levels, began = {}, perf_counter()
for level in range(6):
    start = perf_counter()
    plan = built(conv_network(single), make_config(level, show=True))
    seconds = perf_counter() - start
    levels[level] = (seconds, Runner(plan), len(plan))
    if level < 5 and perf_counter() - began > PATIENCE:
        print(f"级别 {level} 以后不再试：这台机器上构建太久。想看全，把 PATIENCE 调大。")
        break
for _ in range(200):  # timed after the last build, and warmed up: neither a build nor a sleepy GPU is to be measured
    for _, runner, _ in levels.values():
        runner()
stream.synchronize()
levels = {level: (seconds, lab.end_to_end_us(runner, repeats=300), size) for level, (seconds, runner, size) in levels.items()}

fig, axes = plt.subplots(1, 2, figsize=(9.5, 3.8))
axes[0].plot(list(levels), [seconds for seconds, _, _ in levels.values()])
axes[0].set_ylabel("构建时间（s）")
axes[0].set_title("花的")
medians = np.array([samples.median for _, samples, _ in levels.values()])
spread = np.array([[s.median - s.percentile(25), s.percentile(75) - s.median] for _, s, _ in levels.values()]).T
axes[1].errorbar(list(levels), medians, yerr=np.maximum(spread, 0), capsize=3)
axes[1].set_ylabel("推理延迟（µs，中位数，p25–p75）")
axes[1].set_title("得的")
for ax in axes:
    ax.set_xlabel("优化级别")
    ax.set_ylim(bottom=0)
fig.suptitle(f"构建时间与延迟（{lab.gpu_name()}）")
plt.show()

latency = {level: samples.median for level, (_, samples, _) in levels.items()}
top = max(levels)
best = [str(level) for level in latency if latency[level] < 1.02 * min(latency.values())]
slower = [str(level) for level in latency if latency[level] > 1.05 * min(latency[lower] for lower in range(level + 1))]
lab.say(
    lab.table(
        ("级别", "构建 s", "延迟 µs", "延迟的 p90", "plan KiB"),
        [(level, f"{s:.2f}", f"{samples.median:.1f}", f"{samples.percentile(90):.0f}", f"{size / 1024:.0f}") for level, (s, samples, size) in levels.items()],
    )
    + f"\n\n从级别 0 到 {top}，构建时间变成 **{levels[top][0] / levels[0][0]:.1f} 倍**，延迟变成 {latency[top] / latency[0]:.0%}。"
    f"这一次延迟最低的是级别 **{'、'.join(best)}**{'（相差不到 2%，算平手）' if len(best) > 1 else ''}；"
    + (f"比更低的某一级还慢 5% 以上的：级别 {'、'.join(slower)}。" if slower else "没有哪一级比更低的级别慢 5% 以上。")
)

# %% [markdown]
# 先看右图的误差线，它从 p25 画到 p75。线往上拉得很长，说明有四分之一以上的推理被耽搁了；表里的 p90 比中位数大得多，说明至少有一成被耽搁了。
# 输入和内核都没有变，所以耽搁多半来自引擎以外，
# 比如系统的调度、同一台机器上的别的程序；这时中位数还能比。线往下也拉得很长，就是连中位数都被耽搁了，那一级要重跑。
# 中位数只差百分之几的两级，算平手：再跑一次，名次可能就换了。
#
# **误区一：“级别越高，引擎越快。”** 级别决定的是**怎么找、找多久**，不保证找到什么。比的是一个个策略单独跑的时间，
# 掐表有噪声，放进整个引擎以后也不一定还是那么快：高一级反而慢，也会出现；收益也可能在低级别就已经到头，而构建时间一分不少。以你自己的那张图为准：曲线从哪一级起变平，就停在哪一级。
#
# 开发时用低级别求快，发布时再升上去，是常见的折中。但要记得：**级别变了，引擎就变了**，数值也可能变，测试要用发布的级别。
#
# ## 计时缓存：别再量第二遍
#
# 计时缓存记的是：*这样的一层，在这块 GPU 上，用这个策略要多久*。用起来四步：
#
# 1. `cache = config.create_timing_cache(blob)`：从字节造一个缓存，`b""` 就是空的；
# 2. `config.set_timing_cache(cache, ignore_mismatch=False)`：挂到配置上，返回 `True` 才算数；
# 3. 构建：缓存里有的不再量，没有的照量，并添进缓存；
# 4. `bytes(config.get_timing_cache().serialize())`：构建完取出来，存好，下次用。
#
# 不挂缓存时，构建器自己用一个临时的，构建完就扔。
#
# 缓存里有没有权重？换一套权重，还能用吗？改了其中一层呢？先猜，再看：下面四种构建，慢的两种各量一遍，快的两种各量三遍取中位数。要看的是差几倍，不是差百分之几。

# %% tags=["demo", "gpu"]
def timed_build(blob, weights):
    """Seconds of a build with the timing cache blob, the cache's bytes afterwards, and the plan."""
    network, config = conv_network(weights), make_config()
    config.set_timing_cache(config.create_timing_cache(blob), ignore_mismatch=False)
    start = perf_counter()
    plan = built(network, config)
    return perf_counter() - start, bytes(config.get_timing_cache().serialize()), plan


cold_seconds, known, cold_plan = timed_build(b"", trained)
empty_size = len(bytes(make_config().create_timing_cache(b"").serialize()))
plans = {
    "同一个网络，再来一次": [trained] * 3,
    "换一套权重": [random_weights(CHANNELS, 100 + turn) for turn in range(3)],
    "最后一层改成 80 个通道": [random_weights((*CHANNELS[:-1], 80), 200)],
}
took, grown = {"从零开始": [cold_seconds]}, {"从零开始": len(known) - empty_size}
for name, each_time in plans.items():
    builds = [timed_build(known, weights) for weights in each_time]
    took[name] = [seconds for seconds, _, _ in builds]
    grown[name] = len(builds[-1][1]) - len(known)

typical = {name: float(np.median(each)) for name, each in took.items()}
cold, again, reweighted, widened = typical.values()
lab.say(
    lab.table(("构建", "秒", "是从零开始的", "缓存多了 KiB"), [(n, f"{s:.2f}", f"{s / cold:.0%}", f"{grown[n] / 1024:.1f}") for n, s in typical.items()])
    + f"\n\n第二次构建快 **{cold / again:.1f}** 倍；换一套权重快 {cold / reweighted:.1f} 倍；改一层快 {cold / widened:.1f} 倍。空缓存 {empty_size} 字节。"
)

# %% [markdown]
# **误区二：“计时缓存就是引擎的缓存。”** 里面没有引擎，也没有权重，只有“某种层配某个策略要多久”（以及现场编译出来的内核）。
# 所以：
#
# - 换权重，缓存照样命中：键是层的种类、形状、类型和参数，不是权重的值；
# - 改一层，只有那一层要重新量，其余照旧；
# - 即使全部命中，构建仍要花时间：解析、融合、编排、打包都要重做。想连这些也省掉，就要直接存 plan，那是《引擎的生命周期》的事。
#
# 本课程其他章用的 `lab.timing_cache(config)` 做的就是这四步，外加把文件放好；练习三由你来写一个更可靠的。
#
# ### 坏的缓存，外来的缓存
#
# 缓存是量出来的，换一块 GPU、换一版 TensorRT 就不算数了。文件还可能写到一半断电，或者被别的程序盖掉。
# 喂给 TensorRT 会怎样？这种实验可能弄垮进程，所以放进刚才那个子进程，一个一个地试；先试温和的。

# %%
BROKEN_CACHES = r"""
LOUD = (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR, trt.ILogger.Severity.WARNING)
w = np.ones((32, 3, 3, 3), np.float32)


def attempt(blob):
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    x = network.add_input("x", trt.DataType.FLOAT, (4, 3, 64, 64))
    network.mark_output(network.add_convolution_nd(x, 32, (3, 3), trt.Weights(w)).get_output(0))
    config = builder.create_builder_config()
    config.builder_optimization_level = 1
    log.lines.clear()
    cache = config.create_timing_cache(blob)
    taken = cache is not None and config.set_timing_cache(cache, ignore_mismatch=False)
    plan = builder.build_serialized_network(network, config)
    after = config.get_timing_cache()
    return cache is not None, bool(taken), plan is not None, [line for severity, line in log.lines if severity in LOUD][:1], b"" if after is None else bytes(after.serialize())


*_, good = attempt(b"")
middle = len(good) // 2
cases = {
    "好的": good,
    "乱码": b"not a timing cache" * 10,
    "截掉一半": good[:middle],
    "开头改一个字节": bytes([good[0] ^ 255]) + good[1:],
    "中间改一个字节": good[:middle] + bytes([good[middle] ^ 255]) + good[middle + 1 :],
}
for name, blob in cases.items():
    print(json.dumps([name], ensure_ascii=True), flush=True)
    print(json.dumps([name, *attempt(blob)[:4]], ensure_ascii=True), flush=True)
"""

# %% tags=["demo", "gpu"]
printed, code = listener.run(BROKEN_CACHES)
listener.close()
told = [json.loads(line) for line in printed if line.startswith("[")]
results = {each[0]: each[1:] for each in told}
word = {True: "是", False: "否"}
rows = [
    (name, *(word[each] for each in found[:3]), (found[3][0][:90] if found[3] else "—").replace("|", "／").replace("\n", " "))
    if found
    else (name, "—", "—", "—", "进程在这里没了")
    for name, found in results.items()
]
accepted = [name for name, found in results.items() if name != "好的" and found and found[1]]
silent = [name for name in accepted if not results[name][3]]
lab.say(
    lab.table(("喂给它的", "造出了缓存", "挂上了", "构建成功", "日志里的第一句"), rows)
    + f"\n\n子进程的退出码：{code}。"
    + (f"**{'、'.join(accepted)}**：TensorRT 的两个函数都说成功，" if accepted else "这一次，坏的都被 TensorRT 拒绝了。")
    + (f"其中**{'、'.join(silent)}**连日志里也一声不吭。" if silent else "只在日志里说了一句。" if accepted else "")
)

# %% [markdown]
# 看两列：“挂上了”和“构建成功”。丢了缓存，构建照样成功，只是慢；真正的危险有两种：
#
# - **悄悄变慢**：缓存不能用，返回值却可能是成功，只在日志里留一句话。没有人看，每次启动就都从零开始，谁也不知道为什么；
# - **悄悄用错**：坏掉的字节没有被认出来。TensorRT 检查的是它自己的文件头和格式，不是每一个字节。
#
# 所以两条规矩：**没验过的字节不要交给它；没用上缓存要大声说出来。** 怎么验？在外面再包一层：一行文件头，写明来自哪台机器、内容的摘要是多少
# （SHA-256：不管多长的内容，都算成 64 位十六进制数，内容改一个字节，算出来的就完全不同）。
# `ignore_mismatch=True` 则相反，它让 TensorRT 对“别的 GPU 上量的”也不在乎；除非清楚自己在做什么，不要打开。

# %%
def seal(blob, machine):
    """Wrap a timing cache's bytes for storing: one line of JSON (machine and the SHA-256 of blob), then blob.

    machine: dict of plain data that tells where the cache was measured.
    """
    head = {"machine": machine, "sha256": hashlib.sha256(blob).hexdigest()}
    return json.dumps(head, sort_keys=True).encode() + b"\n" + blob


def unseal(data, machine):
    """Return the blob that seal wrapped. ValueError, with the reason, if it is broken or from another machine."""
    line, _, blob = data.partition(b"\n")
    try:
        head = json.loads(line)
        origin, digest = head["machine"], head["sha256"]
    except (ValueError, KeyError, TypeError):
        raise ValueError("缓存文件没有可读的文件头") from None
    if hashlib.sha256(blob).hexdigest() != digest:
        raise ValueError("缓存内容和摘要不符：没有写完，或者被改过")
    if origin != machine:
        changed = [key for key in {*origin, *machine} if origin.get(key) != machine.get(key)]
        raise ValueError(f"缓存来自另一种环境，不同的有：{'、'.join(sorted(changed))}")
    return blob


# %% tags=["demo"]
pretended = b"pretend timings"
here, there = {"tensorrt": "10.6.0", "gpu": "A"}, {"tensorrt": "10.6.0", "gpu": "B"}
sealed = seal(pretended, here)
print(sealed[:40], "…")
for name, stored, machine in (("原样", sealed, here), ("换了 GPU", sealed, there), ("断了尾巴", sealed[:-3], here), ("乱码", b"\x00\x01\x02", here)):
    try:
        print(f"{name}：取出 {unseal(stored, machine)!r}")
    except ValueError as error:
        print(f"{name}：{error}")

# %% [markdown]
# ## 两次构建，是同一个引擎吗
#
# 前面从零开始构建过一个引擎，留下了缓存。同样的权重、同样的配置，再从零开始构建一次，再带着那份缓存构建两次。比三样东西：plan 的字节、每层选中的策略、同一批输入的输出。
# 策略从引擎检查器里读，它马上就会登场。

# %% tags=["demo", "gpu"]
def report_of(plan):
    """The inspector's report of a plan, as text (JSON)."""
    engine = runtime.deserialize_cuda_engine(plan)
    return engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)


def tactics(plan):
    """What the inspector tells of the tactic of each layer: a list of strings."""
    layers = json.loads(report_of(plan))["Layers"]
    return [str(layer.get("TacticName", layer.get("TacticValue"))) if isinstance(layer, dict) else layer for layer in layers]


cold_plans = [cold_plan, build_from(b"", trained)]
warm_plans = [build_from(known, trained) for _ in range(2)]
rows = []
for name, (one, two) in (("从零开始，两次", cold_plans), ("同一份缓存，两次", warm_plans), ("后一次从零开始，与带缓存", (cold_plans[1], warm_plans[0]))):
    chosen = [tactics(each) for each in (one, two)]
    outputs = [run_plan(each, images) for each in (one, two)]
    same = sum(a == b for a, b in zip(*chosen, strict=False)) if len(chosen[0]) == len(chosen[1]) else 0
    rows.append((name, word[one == two], " 和 ".join(str(len(each)) for each in chosen), word[same == len(chosen[0]) == len(chosen[1])], f"{np.abs(outputs[0] - outputs[1]).max():.1e}"))
truth = expected(trained, images)
error = max(np.abs(run_plan(each, images) - truth).max() for each in (*cold_plans, *warm_plans))
lab.say(lab.table(("比较", "plan 逐字节相同", "引擎层数", "每层的策略都相同", "输出最多差"), rows) + f"\n\n四个引擎和 NumPy（float64）最多差 {error:.1e}。")

# %% [markdown]
# **误区三：“同一份模型，构建出来的就是同一个引擎。”** 不保证。掐表的噪声会让势均力敌的策略轮流胜出，不同的策略，加法的次序可能不同，
# 最后几位就可能不同；一个用 FP32、一个用 TF32，差得还要多，连要不要插一次重排也可能不同。这一次你看到的，也许策略全都相同，也许策略不同、
# 输出恰好一样；多跑几次、换一台忙碌的机器再看。准确的说法是：
#
# - **不带缓存**：策略可能变，输出可能跟着变（末几位，或者 TF32 那么多），plan 的字节更可能变，哪怕策略全都相同；
# - **带同一份缓存**：选择大多固定下来，但官方并不承诺逐字节相同；有人报告过，大模型用同一份缓存重建，输出仍差了末几位；
# - 所以比较两个引擎，**用容差，不用字节**；要让线上的每台机器结果一致，就只构建一次，把 plan 分发出去，用摘要核对。
#
# 还有一个开关，专门用来守住“这次构建不许再量”：`trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS`，缓存里没有的就报错。试试它在这个版本上灵不灵：

# %% tags=["demo", "gpu"]
def outcome(work):
    """Say how a build went: success, or the beginning of its error."""
    try:
        work()
    except (RuntimeError, ValueError) as error:
        return f"被拒绝：{str(error)[:160]}"
    return "构建成功"


strict_rows = [
    ("缓存里都有", outcome(lambda: build_from(known, trained, strict=True))),
    ("空缓存", outcome(lambda: build_from(b"", trained, strict=True))),
]
lab.say(lab.table(("严格模式", "结果"), [(name, found.replace("|", "／").replace("\n", " ")) for name, found in strict_rows]))

# %% [markdown]
# 如果“空缓存”那一行也构建成功了，说明这个版本没有拦住；那么保险的做法是构建前后各算一次缓存的摘要，**变了就说明有没量过的**。
# 有的团队正是这样做的：缓存和它的摘要一起存进版本库，构建只读地使用，摘要一变就报错。
#
# ## 工作区，和那句最吓人的报错
#
# 有些策略要一块临时的显存来放中间结果，叫工作区（workspace）。`config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 字节数)` 给它设上限：
# 要得比上限多的策略，构建时直接跳过。默认的上限是多少？设成 0 会怎样？（为了少等，这里用级别 1。）

# %% tags=["demo", "gpu"]
default_limit = make_config().get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)
rows = []
for name, limit in (("默认", None), ("0", 0)):
    config = make_config(1)
    if limit is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, limit)
    try:
        runner = Runner(built(conv_network(trained), config))
        us = lab.end_to_end_us(runner, repeats=100).median
        rows.append((name, "成功", f"{runner.engine.device_memory_size_v2 / 1024:.0f}", f"{us:.1f}"))
    except RuntimeError as error:
        rows.append((name, str(error)[:90].replace("|", "／").replace("\n", " "), "—", "—"))
free, total = cp.cuda.runtime.memGetInfo()
lab.say(
    lab.table(("工作区上限", "构建", "引擎执行时要的显存 KiB", "延迟 µs"), rows)
    + f"\n\n默认上限 {default_limit / 2**30:.1f} GiB；这块 GPU 的显存一共 {total / 2**30:.1f} GiB，此刻空闲 {free / 2**30:.1f} GiB。"
)

# %% [markdown]
# **误区四：“工作区设多大，就占多大。”** 上限只决定构建时**哪些策略有资格参加**，引擎真正要多少由选中的策略决定，问 `engine.device_memory_size_v2`。
# 这个数里还有层与层之间的中间结果（这里一份就是 4×32×64×64 个 FP32，2048 KiB），那一份不归工作区的上限管，所以上限是 0，它也不是 0。
# 设得小，也许丢掉最快的策略；换上来的策略要另一种数据排列，就要多插一次重排、多放一份副本，于是上限小了，这个数反而变大，也会出现。
# 设得比空闲显存还大，构建时就会真的去要，要不到再跳过。
#
# 一层的策略**全被跳过**，就没有可选的了，于是有了那句 `Could not find any implementation for node …`。它只说结果，不说原因。原因至少有三种，治法完全不同：
#
# | 原因 | 日志里的线索 | 治法 |
# |:--|:--|:--|
# | 工作区上限太小 | 失败的这一层有“要多少、可用多少”的跳过，要的不超过空闲显存 | 把上限提到够最省的那个策略 |
# | 显存不够 | 同上，但连最省的策略也超过空闲显存 | 腾显存、缩小形状，提上限没有用 |
# | 没有这种内核 | 失败的这一层没有任何因内存的跳过 | 换类型、换算子写法、升级，或写插件 |
#
# 还有一种更早的失败：解析器不认识这个算子，根本没有走到构建。相反，**构建成功了，那些“跳过策略”的警告就不用管**：它只是说有几个候选没资格，别的候选赢了。
#
# 要先看空闲显存再定上限：`cp.cuda.runtime.memGetInfo()` 返回（空闲，总共）的字节数。练习二就写一个函数，从日志里断出是哪一种原因。
#
# ## 引擎检查器：它到底选了什么
#
# 网络里写的是 `conv1`、`relu1`、`conv2`……，引擎里却往往少了几层，又多了几层。`engine.create_engine_inspector()` 给出一份报告，
# `get_engine_information(trt.LayerInformationFormat.JSON)` 是 JSON 文本。报告有多详细，**构建时**就定了：
# `config.profiling_verbosity` 默认只留层的名字（LAYER_NAMES_ONLY），要看细节必须用 `DETAILED` 构建；以后再改就晚了。
#
# 没有 GPU 也能看：随章附了一份真实的报告 `inspector_report.json`，是一个 FP16 的卷积网络。

# %%
RECORDED = json.loads(Path("inspector_report.json").read_text(encoding="utf-8"))
REPORT = json.dumps(RECORDED["report"])  # the text that get_engine_information returned
NETWORK_LAYERS = RECORDED["network_layers"]  # the names that the network's author gave, in order

# %% tags=["demo"]
engine_layers = json.loads(REPORT)["Layers"]
print("网络：", " → ".join(NETWORK_LAYERS))
print("引擎：")
for layer in engine_layers:
    print("  ", layer["LayerType"], "|", layer["Name"])
print(json.dumps(next((layer for layer in engine_layers if layer["Outputs"]), engine_layers[0]), ensure_ascii=False)[:1100])
lab.say(
    f"网络 {len(NETWORK_LAYERS)} 层，引擎 {len(engine_layers)} 层。报告录自 {RECORDED['gpu']}，TensorRT {RECORDED['tensorrt']}，{RECORDED['recorded_at']}。",
    measured=False,
)

# %% [markdown]
# 三种变化，在报告里各有痕迹：
#
# - **融合（fusion）**：几个网络层变成一个内核，名字用 ` + ` 连起来，例如 `conv1 + relu1`；
# - **重排（reformat）**：相邻两层喜欢的数据排列不同，中间要插一次搬运，`LayerType` 是 `Reformat`。名字里会提到它为谁服务，但它**不是**那一层，纯粹是代价。
#   有一种例外：上面的 `cast_in` 种类也是 `Reformat`，却就是网络里的类型转换，借重排的内核来做（`Origin` 写着 `CAST`）。数搬运的字节时照样算它；
# - **消失**：有的层被吸收、消去，或者收进了整块编译的子图，报告里找不到它的名字。
#
# `Format/Datatype` 一栏写着类型，有的版本还写排列，例如 `Channel major FP16 format where channel % 8 == 0`：FP16，通道在最后一维，而且通道数**补齐到 8 的倍数**。
# 3 个通道也占 8 个通道的地方，数字节的时候别忘了。只写 `Half`、`Float` 的（就像上面那份），看不出排列，就按不补齐算。动态形状的引擎，这一栏是 `N/A due to dynamic shapes`：形状不定，排列也不定；
# 要把设好形状的执行上下文交给检查器（`inspector.execution_context = context`）再问。
#
# 刚才在你的 GPU 上构建的引擎呢？下面先用默认的详细程度构建一个（级别 1，快），再看前面用 `DETAILED` 构建的那个。

# %% tags=["demo", "gpu"]
quiet = make_config(1)
quiet.profiling_verbosity = trt.ProfilingVerbosity.LAYER_NAMES_ONLY
names_only = json.loads(report_of(built(conv_network(trained), quiet)))["Layers"]
detailed = json.loads(report_of(cold_plans[0]))["Layers"]
print("LAYER_NAMES_ONLY：", names_only)
for layer in detailed:
    print("DETAILED：", layer["LayerType"], "|", layer["Name"], "|", str(layer.get("TacticName", layer.get("TacticValue")))[:120])

# %% [markdown]
# `TacticName` 就是那场测速的冠军。看到 `f32f32`、`tf32f32`、`f16f16` 和 `tilesize128x128` 这样的词，就知道它用什么精度、多大的分块。

# %% [markdown]
# ## 练习
#
# 四道练习，共 12 分。解答里可以用这些给定的名字：
#
# - 模块与工具：`np`、`json`、`hashlib`、`Path`、`partial`、`lab`；需要 GPU 的单元里还有 `cp`、`trt`；
# - 网络：`random_weights`、`random_images`、`expected`，以及 `conv_network`、`make_config`、`built`、`build_from`、`Runner`、`run_plan`、`builder`、`runtime`、`stream`、`THIS_MACHINE`；
# - 缓存：`seal`、`unseal`，练习三给出的 `locked`；
# - 检查报告：`REPORT`、`NETWORK_LAYERS`，练习一给出的 `BYTES`、`TYPES`、`SMALL_REPORT`；练习二给出的 `LOG_LINES`、`PARSER_LINE`。
#
# `timed_build`、`report_of`、`Child` 等名字来自演示单元（只做实验，评分时不运行），解答里不能用，但可以照着写：
# 评分会在干净的环境里运行给定的单元和你的解答，跳过演示单元。
#
# ### 练习一：读一份检查报告（3 分）
#
# 写 `read_report(text, network_layers)`：`text` 是检查器给出的 JSON 文本，`network_layers` 是网络里各层的名字。返回一个字典，有三项：
#
# - `"where"`：字典，每个网络层的名字 → 承担它的引擎层的 `Name`；报告里找不到就是 `None`。
#   引擎层的名字按 ` + ` 拆开，有一段和网络层的名字**完全相同**，就是它承担的；`LayerType` 是 `Reformat` 的一律当作重排层，不承担任何网络层（本题里 `cast_in` 那样的也不例外）；
# - `"precisions"`：字典，类型 → 引擎层的个数（`int`），按每个引擎层**第一个输出**的类型数。没有输出的层不算；`TYPES` 把报告里的词（大写以后）对到类型，例如 `Int8` → `INT8`，`Half` → `FP16`；
# - `"reformat_bytes"`：所有重排层每次推理要读和写的字节总数（`int`）：每个输入、每个输出各是“元素个数 × 每个元素的字节数”。
#   `Format/Datatype` 里写着 `channel % k == 0` 的，先把第二维（通道）向上补到 `k` 的倍数。
#
# 报告不够详细的话，给一个清楚的 `ValueError`，不要猜：
#
# - 层只有名字（不是字典）：要用 DETAILED 重新构建；
# - 任何一个输入或输出写着 `N/A due to dynamic shapes`：要先设好形状。
#
# 不需要 GPU。

# %%
BYTES = {"FP32": 4, "FP16": 2, "BF16": 2, "FP8": 1, "INT8": 1, "INT32": 4, "INT64": 8, "BOOL": 1}  # per element
TYPES = {name: name for name in BYTES} | {"FLOAT": "FP32", "HALF": "FP16", "BFLOAT16": "BF16"}  # a word of the report, in capitals

SMALL_REPORT = """
{"Layers": [
 {"Name": "Reformatting CopyNode for Input Tensor 0 to conv1 + relu1", "LayerType": "Reformat",
  "Inputs": [{"Name": "x", "Dimensions": [2, 3, 4, 4], "Format/Datatype": "Row major linear FP32"}],
  "Outputs": [{"Name": "r", "Dimensions": [2, 3, 4, 4], "Format/Datatype": "Channel major FP16 format where channel % 8 == 0"}]},
 {"Name": "conv1 + relu1", "LayerType": "CaskConvolution",
  "Inputs": [{"Name": "r", "Dimensions": [2, 3, 4, 4], "Format/Datatype": "Channel major FP16 format where channel % 8 == 0"}],
  "Outputs": [{"Name": "y", "Dimensions": [2, 16, 4, 4], "Format/Datatype": "Channel major FP16 format where channel % 8 == 0"}]}],
 "Bindings": ["x", "y"]}
"""

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 重排层的名字里为什么会出现 `relu1`？如果先拆名字、后看种类，会怎样？用 `in` 判断 `conv1` 在不在名字里，遇到 `conv10` 会怎样？
# 字节数先手算一遍 `SMALL_REPORT`：输入 2×3×4×4 个 FP32；输出的 3 个通道补成几个？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `json.loads(text)["Layers"]` 是列表；`isinstance(layer, dict)` 区分详细与否。
#
# 类型：把那句话按空白拆开，`text.upper().split()`，看哪个词是 `TYPES` 的键。补齐的倍数：`re.search(r"channel % (\d+) == 0", text)`，
# 找到了就是 `int(found[1])`。元素个数：`math.prod(dimensions)`。向上补齐：`-(-channels // k) * k`。
#
# </details>

# %% solution="read_report"
def read_report(text, network_layers):
    """Read an engine inspector's report.

    text: JSON as get_engine_information returns it. network_layers: list of the names of the network's layers.
    Returns {"where": {network layer: engine layer or None}, "precisions": {type: int}, "reformat_bytes": int}.
    ValueError if the report holds names only, or shapes that are not yet known.
    """
    ### BEGIN SOLUTION: 先确认报告够详细，再把重排层和其余的层分开；名字按 " + " 拆开后整段比较，字节数记得补齐通道
    import math
    import re

    layers = json.loads(text)["Layers"]
    if not all(isinstance(layer, dict) for layer in layers):
        raise ValueError("报告里只有层的名字：请把 config.profiling_verbosity 设成 DETAILED，重新构建")
    if any("dynamic shapes" in tensor["Format/Datatype"] for layer in layers for tensor in layer["Inputs"] + layer["Outputs"]):
        raise ValueError("形状还没有定：请给检查器一个设好输入形状的执行上下文，再取报告")

    def kind(tensor):
        return next(TYPES[word] for word in tensor["Format/Datatype"].upper().split() if word in TYPES)

    def size(tensor):
        dims = list(tensor["Dimensions"])
        if found := re.search(r"channel % (\d+) == 0", tensor["Format/Datatype"]):
            dims[1] = -(-dims[1] // int(found[1])) * int(found[1])
        return math.prod(dims) * BYTES[kind(tensor)]

    where, precisions, reformat_bytes = dict.fromkeys(network_layers), {}, 0
    for layer in layers:
        if layer["Outputs"]:
            first = kind(layer["Outputs"][0])
            precisions[first] = precisions.get(first, 0) + 1
        if layer["LayerType"] == "Reformat":
            reformat_bytes += sum(map(size, layer["Inputs"] + layer["Outputs"]))
        else:
            where |= {part: layer["Name"] for part in layer["Name"].split(" + ") if part in where}
    return {"where": where, "precisions": precisions, "reformat_bytes": reformat_bytes}
    ### END SOLUTION


# %% test="read_report" kind="answer" points=3
import json
import math

found = student.read_report(student.value("SMALL_REPORT"), ["conv1", "relu1", "dropout1"])
check.that(found["where"] == {"conv1": "conv1 + relu1", "relu1": "conv1 + relu1", "dropout1": None}, why="where 不对：重排层不承担任何网络层，找不到的层应当是 None。")
check.that(found["precisions"] == {"FP16": 2}, why="两个引擎层的第一个输出都是 FP16，所以是 {'FP16': 2}。")
check.equal(found["reformat_bytes"], 2 * 3 * 4 * 4 * 4 + 2 * 8 * 4 * 4 * 2, why="重排层读 2×3×4×4 个 FP32，写 2×8×4×4 个 FP16：3 个通道补成了 8 个。")
check.raises("ValueError", student.read_report, '{"Layers": ["conv1 + relu1"], "Bindings": ["x", "y"]}', ["conv1"], why="报告里只有层的名字，应当抛出 ValueError。")
### BEGIN HIDDEN TESTS
SIZES = {"FP32": 4, "FP16": 2, "BF16": 2, "INT8": 1, "INT32": 4, "INT64": 8}
WRITTEN = {"INT8": ["Int8"], "INT32": ["Int32"], "INT64": ["Int64"], "FP16": ["FP16", "Half"], "FP32": ["FP32", "Float"]}


def tensor(name, kind, channels, multiple):
    word = secret.choice(WRITTEN.get(kind, [kind]))
    text = f"Channel major {word} format where channel % {multiple} == 0" if multiple > 1 else f"Row major linear {word}{secret.choice([' format', ''])}"
    return {"Name": name, "Location": "Device", "Dimensions": [int(secret.integers(1, 9)), channels, int(secret.integers(3, 40)), int(secret.integers(3, 40))], "Format/Datatype": text}


def volume(t, multiple):
    b, c, h, w = t["Dimensions"]
    return b * (math.ceil(c / multiple) * multiple) * h * w


def drawn():
    """A report and the right answers."""
    names, layers, where, precisions, moved = [], [], {}, {}, 0
    for number in secret.permutation(np.arange(1, 13)).tolist():
        conv, relu, gone = f"conv{number}", f"relu{number}", f"drop{number}"
        names += [conv, relu, gone]
        kind, channels, multiple = str(secret.choice(list(SIZES))), int(secret.integers(1, 70)), int(secret.choice([1, 4, 8, 16]))
        joined = [[conv], [conv, relu], [conv, relu, f"(Unnamed Layer* {number}) [Shuffle]"]][int(secret.integers(3))]
        label = " + ".join(joined)
        if secret.random() < 0.5:
            other = str(secret.choice(["FP32", "FP16", "BF16"]))
            into, out = tensor("a", other, channels, 1), tensor("b", kind, channels, multiple)
            layers.append({"Name": f"Reformatting CopyNode for Input Tensor 0 to {label}", "LayerType": "Reformat", "Inputs": [into], "Outputs": [out], "Origin": "REFORMAT", "TacticValue": "0x00000000000003e8", "StreamId": 0, "Metadata": ""})
            moved += volume(into, 1) * SIZES[other] + volume(out, multiple) * SIZES[kind]
            precisions[kind] = precisions.get(kind, 0) + 1
        into, out = tensor("b", "FP16", channels, multiple), tensor("c", kind, int(secret.integers(1, 70)), multiple)
        second = [tensor("e", "INT64" if kind == "FP32" else "FP32", channels, 1)] if number % 2 else []
        layers.append({"Name": label, "LayerType": str(secret.choice(["CaskConvolution", "kgen"])), "Inputs": [into], "Outputs": [out, *second], "TacticName": "sm80_xmma_fprop", "TacticValue": "0x11bde0e1d9f2f35d", "StreamId": 0, "Metadata": ""})
        precisions[kind] = precisions.get(kind, 0) + 1
        if secret.random() < 0.4:
            into, out = tensor("c", kind, channels, multiple), tensor("d", "FP32", channels, 1)
            layers.append({"Name": f"Reformatting CopyNode for Output Tensor 0 to {label}", "LayerType": "Reformat", "Inputs": [into], "Outputs": [out], "Origin": "REFORMAT", "TacticValue": "0x00000000000003ea", "StreamId": 0, "Metadata": ""})
            moved += volume(into, multiple) * SIZES[kind] + volume(out, 1) * 4
            precisions["FP32"] = precisions.get("FP32", 0) + 1
        where |= {name: label if name in joined else None for name in (conv, relu, gone)}
    layers.append({"Name": "signal", "LayerType": "signal", "Inputs": [], "Outputs": [], "Metadata": ""})
    return layers, names, {"where": where, "precisions": precisions, "reformat_bytes": moved}


for _ in range(4):
    layers, names, want = drawn()
    text = json.dumps({"Layers": layers, "Bindings": ["x", "y"]})
    got = student.read_report(text, names)
    check.that(got["where"] == want["where"], why="随机报告的 where 不对。重排层的名字里也会提到网络层；拆开以后要整段相等，conv1 和 conv10 不是一回事。")
    check.that(got["precisions"] == want["precisions"], why="随机报告的 precisions 不对。重排层也是引擎层；类型有大小写两种写法；没有输出的层不算，有几个输出的只看第一个。")
    check.equal(got["reformat_bytes"], want["reformat_bytes"], why="随机报告的 reformat_bytes 不对。读和写都要算；补齐的倍数各层不同，只补通道那一维。")
computing = [number for number, layer in enumerate(layers) if layer["LayerType"] in ("CaskConvolution", "kgen")]
forked = [number for number in computing if len(layers[number]["Outputs"]) == 2]
for spots, side, which in ((range(len(layers) - 1), "Outputs", 0), (computing, "Inputs", 0), (forked, "Outputs", 1)):
    undecided = json.loads(text)
    undecided["Layers"][int(secret.choice(spots))][side][which]["Format/Datatype"] = "N/A due to dynamic shapes"
    check.raises("ValueError", student.read_report, json.dumps(undecided), names, why="有一处形状还没有定，应当抛出 ValueError，而不是跳过它。每一层的每个输入、每个输出都看过了吗？")

recorded = json.loads(reference.value("REPORT"))["Layers"]
got = student.read_report(reference.value("REPORT"), reference.value("NETWORK_LAYERS"))
held = {part: layer["Name"] for layer in recorded if layer["LayerType"] != "Reformat" for part in layer["Name"].split(" + ")}
check.that(got["where"] == {name: held.get(name) for name in reference.value("NETWORK_LAYERS")}, why="随章附的那份真实报告，where 不对。")
check.equal(sum(got["precisions"].values()), sum(bool(layer["Outputs"]) for layer in recorded), why="随章附的那份真实报告，各类型的层数加起来，应当等于有输出的引擎层数。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习二：断案（2 分）
#
# 构建日志整理过以后，只剩下面五种行（前四种 `LOG_LINES` 里都有，最后一种见 `PARSER_LINE`）：
#
# - `Timing Runner: 节点名 (…)`：从这一行起，后面的行说的都是这个节点，直到下一个 `Timing Runner`；
# - `Tactic: 0x… Time: …`：一个策略量到了时间；
# - `Tactic Device request: 甲MB Available: 乙MB. Device memory is insufficient to use tactic.`：一个策略要甲 MiB，给不了，跳过；
# - `Could not find any implementation for node 节点名.`：构建失败在这个节点；
# - `Plugin not found …`：解析器不认识某个算子，没有走到构建。
#
# 写 `diagnose(lines, free_mib)`：`lines` 是这样的一串行，`free_mib` 是那时空闲的显存（MiB）。返回 `(原因, 兆数)`：
#
# - `("fine", 0)`：没有失败。有再多的跳过也不要紧；
# - `("operator", 0)`：解析器不认识算子；
# - `("workspace", need)`：失败的节点有策略因内存被跳过，而且把工作区上限提到 `need` MiB 就够**最省的那个策略**用，`need` 不超过 `free_mib`；
# - `("memory", need)`：失败的节点有策略因内存被跳过，但连最省的也要 `need` MiB，超过了 `free_mib`；
# - `("kernel", 0)`：失败的节点没有因内存被跳过的策略，根本没有合适的内核。
#
# 只看**失败的那个节点**自己的跳过，别的节点缺内存与它无关。同一个节点可能分几段出现。`Available` 后面的数受上限和别的程序影响，判断时不用它。不需要 GPU。

# %%
LOG_LINES = [
    "Timing Runner: conv1 + relu1 (CaskConvolution[0x80000009])",
    "Tactic Device request: 4364MB Available: 256MB. Device memory is insufficient to use tactic.",
    "Tactic: 0x3e8 Time: 0.0123",
    "Timing Runner: conv2 + relu2 (CaskConvolution[0x80000009])",
    "Tactic Device request: 900MB Available: 256MB. Device memory is insufficient to use tactic.",
    "Tactic Device request: 640MB Available: 256MB. Device memory is insufficient to use tactic.",
    "Could not find any implementation for node conv2 + relu2.",
]
PARSER_LINE = 'Plugin not found, are the plugin name, version, and namespace correct? (node 3: "NoSuchOp")'

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 失败的那一行在最后，线索在前面。读的时候还不知道谁会失败，那么每个节点的跳过先记在哪里？
# 要救活一个节点，得让它所有的策略都有资格，还是一个就够？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `re.match(r"Timing Runner: (.+) \(", line)`，`found[1]` 是节点名；`re.match(r"Tactic Device request: (\d+)MB", line)`；
# `re.match(r"Could not find any implementation for node (.+)\.$", line)`。
#
# 用字典按节点名记列表：`requests.setdefault(node, []).append(…)`；最小的用 `min`。
#
# </details>

# %% solution="diagnose"
def diagnose(lines, free_mib):
    """Tell why a build failed. lines: list of str, a tidied build log. free_mib: free device memory then, MiB.

    Returns (cause, MiB): ("fine", 0), ("operator", 0), ("workspace", need), ("memory", need) or ("kernel", 0).
    """
    ### BEGIN SOLUTION: 从头读到尾，把每个节点的跳过记在它自己名下；读到失败的那一行，再看它最省的策略要多少
    import re

    node, requests = None, {}
    for line in lines:
        if line.startswith("Plugin not found"):
            return "operator", 0
        if found := re.match(r"Timing Runner: (.+) \(", line):
            node = found[1]
        elif found := re.match(r"Tactic Device request: (\d+)MB", line):
            requests.setdefault(node, []).append(int(found[1]))
        elif found := re.match(r"Could not find any implementation for node (.+)\.$", line):
            if found[1] not in requests:
                return "kernel", 0
            need = min(requests[found[1]])
            return ("workspace" if need <= free_mib else "memory"), need
    return "fine", 0
    ### END SOLUTION


# %% test="diagnose" kind="answer" points=2
lines = student.value("LOG_LINES")
check.equal(student.diagnose(lines, 8000), ("workspace", 640), why="conv2 + relu2 最省的策略要 640 MiB，显存够：把工作区上限提到 640 就行。")
check.equal(student.diagnose(lines, 500), ("memory", 640), why="空闲显存只有 500 MiB，最省的策略也要 640：提上限没有用。")
check.equal(student.diagnose(lines[:-1], 8000), ("fine", 0), why="没有失败的那一行：构建成功，跳过几个策略不要紧。")
check.equal(student.diagnose([student.value("PARSER_LINE")], 8000), ("operator", 0), why="解析器不认识算子，应当是 operator。")
check.equal(student.diagnose([*lines[:3], "Timing Runner: topk (TopK[0x1])", "Could not find any implementation for node topk."], 8000), ("kernel", 0), why="topk 自己没有因内存被跳过的策略；conv1 + relu1 的跳过与它无关。")
### BEGIN HIDDEN TESTS
def skip(mib):
    return f"Tactic Device request: {mib}MB Available: {int(secret.integers(1, 9000))}MB. Device memory is insufficient to use tactic."


def about(node, requests, timed):
    body = [skip(each) for each in requests] + [f"Tactic: 0x{int(secret.integers(4096)):x} Time: 0.{int(secret.integers(10, 9999))}" for _ in range(timed)]
    return [f"Timing Runner: {node} (CaskConvolution[0x8000000{int(secret.integers(1, 9))}])", *secret.permutation(body).tolist()]


cases, wants = [], []
for turn, kind in enumerate(("fine", "workspace", "memory", "kernel", "operator") * 5):
    free = int(secret.integers(1000, 8000))
    failed, log = f"conv{turn} + relu{turn}", []
    alike = [f"{failed} + add{turn}", f"pad{turn} + {failed}"]  # other nodes, whose names hold the failed one's
    for node in secret.permutation([*alike, *(f"conv{number} + relu{number}" for number in range(31, 36))]).tolist():
        asked = secret.integers(10, 20000, int(secret.integers(0, 4))).tolist()
        log += about(node, [int(secret.integers(1, 10))] if node in alike else asked, int(secret.integers(1, 4)))
    low, high = (free + 1, 20000) if kind == "memory" else (10, free)
    need = int(secret.integers(low, high + 1)) if turn > 4 else (free + 1 if kind == "memory" else free)
    more = [need + int(each) for each in secret.integers(0, 12000, 3)]
    if kind in ("workspace", "memory"):
        parts = secret.permutation([need, *more]).tolist()
        log = about(failed, parts[:2], 0) + log + about(failed, parts[2:], 0)
    if kind == "kernel":
        log += about(failed, [], 0)
    if kind in ("workspace", "memory", "kernel"):
        log.append(f"Could not find any implementation for node {failed}.")
    if kind == "operator":
        log = [f'Plugin not found, are the plugin name, version, and namespace correct? (node {turn}: "Op{int(secret.integers(1000))}")']
    cases.append((log, free))
    wants.append((kind, need if kind in ("workspace", "memory") else 0))
check.equal([student.diagnose(log, free) for log, free in cases], wants, why="随机的日志里有判错的。节点分几段出现时都要算；看最省的策略，不是第一个；need 正好等于空闲显存时够用；别的节点的跳过不算，哪怕名字相像：节点名要整个相等。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：一份靠得住的缓存（4 分）
#
# 写 `cached_build(folder, machine, builder, network, config)`：带着 `folder` 里的计时缓存构建一次，返回 `(plan, notes)`。
# `plan` 是字节；`notes` 是一串中文说明，**一切正常就是空的**。`config` 还没有挂缓存，`machine` 是 `seal`、`unseal` 要的那个字典。
#
# 缓存存在 `Path(folder) / "timing.cache"`，内容是 `seal(blob, machine)`。要求：
#
# 1. 文件在、也信得过（`unseal` 通过），就从它开始；没有文件就从空缓存开始，这很正常，不必说明；
# 2. 文件坏了、来自别的机器、读不了，或者 TensorRT 不接受（`create_timing_cache` 给出 `None`，`set_timing_cache` 返回 `False`）：
#    换一个空缓存照常构建，并在 `notes` 里说明原因。**没有通过 `unseal` 的字节不许交给 TensorRT**，`ignore_mismatch` 一律是 `False`；
# 3. 构建返回 `None`：抛出 `RuntimeError`，文件保持原样；
# 4. 构建成功就把缓存存回去。**别的构建可能刚刚写过**：存之前在锁里重新读一遍文件，把里面信得过的条目并进来，谁的也不丢；
# 5. 锁用给定的 `locked`，锁文件是同一个文件夹里的 `timing.lock`，只在“读、并、写”的时候拿着。构建可能要几分钟，那时候不许占着锁；
# 6. 原子地写：先写到同一个文件夹的临时文件，再用 `replace` 换过去，这样别人任何时候读到的都是完整的一份。不留下临时文件；
# 7. 内容没有变就不要重写；存不了（磁盘满、没有权限）不能毁掉这次构建：照样返回 `plan`，在 `notes` 里说明。
#
# 前一半的测试不需要 GPU：用替身代替 `builder` 和 `config`，专门制造故障。后一半用真的 TensorRT。

# %%
@contextmanager
def locked(path):
    """Hold an exclusive lock for the ``with`` block, between threads and between processes. path: a file for the lock."""
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits until nobody else holds it; closing the file lets go
        yield


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# “从文件里取出信得过的字节，取不出就说明原因”这件事要做两次：构建之前一次，存之前一次。写成一个内层函数。
#
# 如果存之前不重新读，两个同时开始的构建，后存的那个会怎样？如果重新读了，但不在锁里呢？
#
# 哪些异常算“文件有问题”？没有文件、读不了、不可信，要分别怎么对待？存的时候又会出什么异常？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 读：`path.read_bytes()`，没有文件抛 `FileNotFoundError`，别的读写错误是 `OSError`；`unseal(data, machine)` 抛 `ValueError`。
#
# 缓存：`config.create_timing_cache(字节)`、`config.set_timing_cache(cache, ignore_mismatch=False)`、`config.get_timing_cache()`，
# `cache.combine(另一个缓存, ignore_mismatch=False)` 把另一个的条目并进来，`bytes(cache.serialize())`。
#
# 存：`with locked(path.with_suffix(".lock")):`；`Path.write_bytes`、`Path.replace`。构建：`builder.build_serialized_network(network, config)`。
#
# </details>

# %% solution="cached_build"
def cached_build(folder, machine, builder: "trt.Builder", network: "trt.INetworkDefinition", config: "trt.IBuilderConfig"):
    """Build network with the timing cache kept in folder, and keep there what this build has timed.

    folder: path, made if missing; the cache is its file timing.cache, sealed with machine (dict). config: without a
    timing cache. Returns (plan, notes): bytes, and a list of sentences on why the cache was not used or not kept.
    RuntimeError if the build fails. Builds of several processes and threads may share the folder.
    """
    ### BEGIN SOLUTION: 先写一个“取出信得过的字节”的内层函数；挂缓存、构建、再在锁里重新读、合并、原子地写
    path, notes = Path(folder) / "timing.cache", []

    def on_disk():
        """The bytes that can be trusted (b"" for none) and, where there is a file that cannot, why."""
        try:
            return unseal(path.read_bytes(), machine), None
        except FileNotFoundError:
            return b"", None
        except (OSError, ValueError) as error:
            return b"", f"没有用上已有的计时缓存：{error}"

    def attach(blob):
        cache = config.create_timing_cache(blob)
        return cache is not None and config.set_timing_cache(cache, ignore_mismatch=False)

    blob, why = on_disk()
    if not attach(blob):
        why = "没有用上已有的计时缓存：TensorRT 不接受它"
        attach(b"")
    if why:
        notes.append(why)

    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("构建失败：" + "；".join(lab.trt_errors()))

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            newest, _ = on_disk()
            merged = config.get_timing_cache()
            others = config.create_timing_cache(newest)
            if others is not None:
                merged.combine(others, ignore_mismatch=False)
            data = seal(bytes(merged.serialize()), machine)
            if not path.exists() or path.read_bytes() != data:
                fresh = path.with_suffix(".new")  # under the lock, the name is ours alone
                fresh.write_bytes(data)
                fresh.replace(path)
    except OSError as error:
        notes.append(f"没能保存计时缓存：{error}")
    return bytes(plan), notes
    ### END SOLUTION


# %% test="cached_build_faults" kind="structure" points=2
import json

STAND_INS = '''
import fcntl
import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path


class Cache:
    """Stands in for a timing cache: a set of names of layers."""
    def __init__(self, entries):
        self.entries = set(entries)
    def serialize(self):
        data = json.dumps(sorted(self.entries)).encode()
        time.sleep(0.02)  # a cache may be large
        return memoryview(data)
    def combine(self, input_cache, ignore_mismatch):
        if "foreign" in input_cache.entries and not ignore_mismatch:
            return False
        self.entries |= input_cache.entries
        return True


class Config:
    def __init__(self):
        self.cache, self.seen, self.lax = None, [], False
    def create_timing_cache(self, serialized_timing_cache):
        data = bytes(serialized_timing_cache)
        self.seen.append(data)
        try:
            return Cache(json.loads(data) if data else [])
        except ValueError:
            return None
    def set_timing_cache(self, cache, ignore_mismatch):
        self.lax = self.lax or bool(ignore_mismatch)
        if "foreign" in cache.entries and not ignore_mismatch:
            return False
        self.cache = cache
        return True
    def get_timing_cache(self):
        return self.cache


class Builder:
    def __init__(self, during=None, fails=False):
        self.during, self.fails, self.known = during, fails, None
    def build_serialized_network(self, network, config):
        cache = config.get_timing_cache() or Cache([])
        self.known = sorted(cache.entries)
        if self.during:
            self.during()
        cache.entries.update(network)
        return None if self.fails else memoryview(b"plan of " + " ".join(network).encode())


class Bench:
    """A folder for caches, and builds in it with stand-ins."""
    def __init__(self, cached_build, machine):
        self.cached_build, self.machine = cached_build, machine
        self.folder = Path(tempfile.mkdtemp()) / "kept"
        self.blocked = 0
    def build(self, layers, during=None, fails=False, folder=None):
        builder, config = Builder(during, fails), Config()
        plan, notes = self.cached_build(str(folder or self.folder), dict(self.machine), builder, list(layers), config)
        return {"plan": plan, "notes": list(notes), "known": builder.known, "seen": config.seen, "lax": config.lax}
    def path(self):
        return self.folder / "timing.cache"
    def content(self):
        return self.path().read_bytes() if self.path().is_file() else None
    def plant(self, data):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path().write_bytes(data)
    def move(self, disk=None):
        """Restart elsewhere: the file alone is carried to a new folder, on another disk if there is one."""
        data = self.content()
        try:
            self.room = tempfile.TemporaryDirectory(dir=disk)
        except OSError:
            self.room = tempfile.TemporaryDirectory()
        self.folder = Path(self.room.name) / "moved" / "on"
        self.plant(data)
    def files(self):
        return sorted(each.name for each in self.folder.iterdir())
    def nowhere(self, layers):
        """During the build, a file takes the place of the folder's parent: there is nowhere to save."""
        parent = Path(tempfile.mkdtemp()) / "parent"
        def block():
            shutil.rmtree(parent, ignore_errors=True)
            parent.write_bytes(b"")
        return self.build(layers, during=block, folder=parent / "folder")
    def unreadable(self, layers):
        """A folder lies where the cache's file should: it can be neither read nor replaced."""
        folder = Path(tempfile.mkdtemp()) / "kept"
        (folder / "timing.cache").mkdir(parents=True)
        try:
            return self.build(layers, folder=folder)
        except OSError:
            return {"plan": None, "notes": []}
    def save_while_locked(self, layers, data):
        """Another process, as it were, takes the lock during a build, writes data after a while and lets go.
        Whether the build saved without the lock."""
        before = self.content()
        with open(self.folder / "timing.lock", "w") as file:
            thread = threading.Thread(target=self.build, args=(layers, lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)), daemon=True)
            thread.start()
            thread.join(0.4)
            early = not thread.is_alive() or self.content() != before
            fresh = self.folder / "timing.other"
            fresh.write_bytes(data)
            fresh.replace(self.path())
        thread.join(5)
        return early
    def reader_keeps_its_copy(self, layers):
        """Does someone who opened the file before a build read the old content, whole, after it?"""
        before = self.content()
        with open(self.path(), "rb") as file:
            start = file.read(10)
            self.build(layers)
            return start + file.read() == before and self.content() != before
    def stamp(self):
        found = self.path().stat()
        return [found.st_ino, found.st_mtime_ns]
    def build_within(self, outer, inner):
        """While `outer` is being built, another build runs from its beginning to its end."""
        def other():
            thread = threading.Thread(target=self.build, args=(inner,), daemon=True)
            thread.start()
            thread.join(5)
            self.blocked += thread.is_alive()
        return self.build(outer, during=other)
    def build_together(self, jobs):
        """All begin before any ends; then all of them save."""
        gate, late, failed = threading.Barrier(len(jobs)), [], []
        def meet():
            try:
                gate.wait(5)
            except threading.BrokenBarrierError:
                late.append(1)
        def one(layers):
            try:
                self.build(layers, during=meet)
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}"[:200])
        threads = [threading.Thread(target=one, args=(layers,), daemon=True) for layers in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        self.blocked += len(late)
        return failed
'''
OPENED = '''
def opened(unseal, data, machine):
    """The blob of a cache file, or None where unseal does not trust it."""
    try:
        return unseal(data, machine)
    except Exception:
        return None
'''
opened = partial(reference.define(OPENED, "opened"), reference.value("unseal"))
machine = {"tensorrt": "10.6.0", "gpu": "A", "capability": "9.0"}
bench = student.define(STAND_INS, "Bench")(student.value("cached_build"), machine)


def kept():
    """The names of the layers in the cache file, or None where there is none that unseal trusts."""
    try:
        return sorted(json.loads(opened(bench.content(), machine)))
    except (TypeError, ValueError):
        return None


first = bench.build(["conv1", "conv2"])
check.that(first["plan"] == b"plan of conv1 conv2", why="返回的第一项应当是 plan 的字节：bytes(构建的结果)。")
check.equal(first["notes"], [], why="第一次构建本来就没有缓存文件，这很正常，notes 应当是空的。")
check.that(bench.content() is not None, why="构建完没有留下 timing.cache。文件夹可能还不存在，要先建好。")
check.equal(kept(), ["conv1", "conv2"], why="缓存文件里应当有这次构建量过的两层。存的是 seal(bytes(缓存.serialize()), machine) 吗？")
second = bench.build(["conv2", "conv3"])
check.equal(second["known"], ["conv1", "conv2"], why="第二次构建开始时，缓存里应当已经有第一次的两层。读出来以后挂到 config 上了吗？")
check.equal(kept(), ["conv1", "conv2", "conv3"], why="第二次构建以后，缓存里应当有三层：旧的还在，新的添了进去。")
bench.plant(b"garbage")
broken = bench.build(["conv4"])
check.that(broken["plan"] == b"plan of conv4", why="缓存文件坏了，也应当照常构建。")
check.that(len(broken["notes"]) > 0, why="缓存文件坏了、没有用上，应当在 notes 里说一句为什么。")
### BEGIN HIDDEN TESTS
check.equal(kept(), ["conv4"], why="坏掉的缓存文件，构建以后应当被新的、完好的一份换掉。")
names = [f"layer{each}" for each in secret.permutation(900)[:40].tolist()]
bench.build(names[:3])
bench.move()
moved = bench.build(names[3:5])
check.equal(moved["known"], sorted(["conv4", *names[:3]]), why="只把 timing.cache 搬到一个新文件夹（好比重启、换了进程），缓存就没有用上。是不是记在了变量里，而不是从文件里读？")
check.equal(moved["notes"], [], why="换个文件夹，文件完好，notes 应当是空的。")
good = bench.content()
blob = opened(good, machine)
check.that(blob is not None, why="换个文件夹构建以后，留下的缓存文件 unseal 不认。存的是 seal(bytes(缓存.serialize()), machine) 吗？")
check.that(all("timing" in name for name in bench.files()) and len(bench.files()) <= 2, why="构建以后，文件夹里除了 timing.cache 和锁文件，还留下了别的文件。")

middle = len(good) - int(secret.integers(2, 12))
faults = {
    "空文件": b"",
    "截断": good[:middle],
    "改了一个字节": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
    "没有文件头": blob,
    "别的 GPU": reference.seal(blob, machine | {"gpu": "B"}),
    "别的 TensorRT": reference.seal(blob, machine | {"tensorrt": "10.7.0"}),
    "TensorRT 造不出缓存": reference.seal(b"\x00\x01", machine),
    "TensorRT 不接受": reference.seal(json.dumps(["foreign", "old"]).encode(), machine),
}
for number, (name, data) in enumerate(faults.items()):
    bench.plant(data)
    layers = names[6 + 2 * number : 8 + 2 * number]
    found = bench.build(layers)
    check.that(found["plan"] == b"plan of " + " ".join(layers).encode(), why=f"缓存文件有毛病（{name}）时，构建没有照常完成。")
    check.equal(found["known"], [], why=f"缓存文件有毛病（{name}），却还是用上了里面的条目。")
    check.that(len(found["notes"]) > 0 and all(isinstance(note, str) and note for note in found["notes"]), why=f"缓存文件有毛病（{name}）、没有用上，notes 里却没有说。")
    check.that(not found["lax"], why="ignore_mismatch 应当一律是 False。")
    untrusted = [data, data.partition(b"\n")[2]] if "TensorRT " not in name or "别的" in name else []
    check.that(not any(each and each in untrusted for each in found["seen"]), why=f"没有通过 unseal 的字节（{name}）交给了 create_timing_cache。存之前重新读的那一次也要先验。")
    check.equal(kept(), sorted(layers), why=f"缓存文件有毛病（{name}），构建以后里面应当只有这次量过的层。")

before = bench.content()
check.raises("RuntimeError", bench.build, ["never"], fails=True, why="构建返回 None 时，应当抛出 RuntimeError。")
check.that(bench.content() == before, why="构建失败以后，缓存文件变了。")
layers = kept()
stamp = bench.stamp()
repeated = bench.build(layers)
check.equal(repeated["notes"], [], why="缓存完好、全部命中的构建，notes 应当是空的。")
check.equal(bench.stamp(), stamp, why="缓存的内容没有变，文件却被重写了。")
bench.move("/dev/shm")
check.that(bench.reader_keeps_its_copy([names[30]]), why="有人正在读旧的缓存文件时，它的内容被就地改掉了，或者根本没有换成。请写到同一个文件夹里的临时文件，再用 replace 换过去：别处的文件，可能隔着文件系统，换不成。")
lost = bench.nowhere([names[31]])
check.that(lost["plan"] == b"plan of " + names[31].encode(), why="文件夹建不出来、缓存存不了的时候，plan 仍然要返回。")
check.that(len(lost["notes"]) > 0, why="缓存没能保存，notes 里却没有说。")
unread = bench.unreadable([names[31]])
check.that(unread["plan"] == b"plan of " + names[31].encode(), why="缓存文件读不了（OSError）的时候，plan 仍然要返回。")
check.that(len(unread["notes"]) > 0, why="缓存文件读不了（OSError），notes 里却没有说。")

bench.build_within([names[32]], [names[33]])
check.equal(bench.get("blocked"), 0, why="一个构建还在进行，另一个构建就等着它：构建期间占着锁。锁只应当在“读、并、写”的时候拿着。")
check.that({names[32], names[33]} <= set(kept() or ()), why="一个构建进行到一半时，另一个构建完成并保存了缓存；前一个存的时候把它盖掉了。存之前要重新读、合并。")
locked_out = reference.seal(json.dumps(sorted([*kept(), "of another process"])).encode(), machine)
check.that(not bench.save_while_locked(["saved late"], locked_out), why="别的进程正拿着 timing.lock，这次构建却不等它就存了。只在线程之间管用的锁不够：请用 locked，锁文件是同一个文件夹里的 timing.lock。")
check.that({"of another process", "saved late"} <= set(kept() or ()), why="等锁的时候，别的进程写过缓存文件，存的时候把它盖掉了，或者拿到锁以后没有存成。重新读、合并、写，这三步要在同一把锁里。")
jobs = [[names[number], f"{names[number]} again"] for number in range(34, 40)]
check.equal(bench.build_together(jobs), [], why="几个线程同时构建时，有的抛出了异常。临时文件是不是重了名？")
check.equal(bench.get("blocked"), 0, why="几个线程同时构建时，有的在等别人构建完：构建期间占着锁。")
check.that({name for job in jobs for name in job} <= set(kept() or ()), why="几个线程同时保存，有的条目丢了。重新读、合并、写，这三步要在同一把锁里。")
check.that(len(bench.files()) <= 2, why="几个线程同时构建以后，文件夹里留下了临时文件。")
### END HIDDEN TESTS

# %% test="cached_build_engines" kind="structure" points=2 tags=["gpu"]
ROOM = '''
import shutil
import tempfile
from pathlib import Path

import tensorrt as trt


class Room:
    """A folder, and builds in it with the real TensorRT."""
    def __init__(self, cached_build, machine, builder, conv_network, make_config):
        self.cached_build, self.machine, self.builder = cached_build, machine, builder
        self.conv_network, self.make_config = conv_network, make_config
        self.folder = Path(tempfile.mkdtemp())
    def build(self, weights, level=3, strict=False):
        config = self.make_config(level)
        if strict:
            config.set_flag(trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS)
        plan, notes = self.cached_build(self.folder, dict(self.machine), self.builder, self.conv_network(weights), config)
        return {"plan": plan, "notes": list(notes), "level": config.builder_optimization_level}
    def times_nothing(self, weights):
        """Whether a build goes through that may time nothing."""
        try:
            return len(self.build(weights, strict=True)["plan"]) > 0
        except RuntimeError:
            return False
    def content(self):
        path = self.folder / "timing.cache"
        return path.read_bytes() if path.is_file() else None
    def plant(self, data):
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "timing.cache").write_bytes(data)
'''
TRIED = '''
def tried(function, *args):
    """What function returns, or None where it raises."""
    try:
        return function(*args)
    except Exception:
        return None
'''
names = ("cached_build", "THIS_MACHINE", "builder", "conv_network", "make_config")
room = student.define(ROOM, "Room")(*(student.value(name) for name in names))
machine = reference.value("THIS_MACHINE")
ran, opened = (partial(reference.define(TRIED, "tried"), reference.value(name)) for name in ("run_plan", "unseal"))


def agrees(plan, weights):
    """The plan must compute what the weights say. Tolerances: TF32 keeps 10 bits of each factor."""
    check.that(isinstance(plan, bytes), why="返回的第一项应当是 plan 的字节：bytes(构建的结果)。")
    x = reference.random_images(weights[0].shape[1], int(secret.integers(2**31)))
    found = ran(plan, x)
    if found is None:
        reference.run_plan(reference.build_from(b"", weights), x)  # raises where it is this machine that runs no plans
        check.that(False, why="返回的 plan，在另一个进程里装不进来，或者跑不起来：它应当是 build_serialized_network 给出的全部字节。")
    check.equal(found, reference.expected(weights, x).astype(np.float32), rel=0.02, abs=0.05, why="引擎算出的结果不对：返回的是这一次构建的 plan 吗？")


widths = (3, int(secret.integers(5, 9)) * 4)
weights = reference.random_weights(widths, int(secret.integers(2**31)))
first = room.build(weights)
check.equal(first["notes"], [], why="第一次构建，notes 应当是空的。")
agrees(first["plan"], weights)
check.that(room.content() is not None, why="构建以后，文件夹里没有 timing.cache。")
blob = opened(room.content(), machine)
check.that(blob is not None, why="构建以后的 timing.cache，unseal 不认。存的是 seal(bytes(缓存.serialize()), machine) 吗？")
small = len(blob)
### BEGIN HIDDEN TESTS
wider = (widths[1] + 4, int(secret.integers(5, 9)) * 4)
more = reference.random_weights(wider, int(secret.integers(2**31)))
room.plant(room.content())  # as after a restart: the file alone remains
second = room.build(more)
check.equal(second["notes"], [], why="缓存完好，换了一个网络，notes 应当是空的。")
agrees(second["plan"], more)
blob = opened(room.content(), machine)
check.that(blob is not None, why="第二次构建以后的 timing.cache，unseal 不认。")
check.that(len(blob) > small, why="构建了另一个形状的网络，缓存却没有变大：旧的没有留住，或者新的没有存进去。")


TIMING_NOTHING = '''
def timing_nothing(build_from, blob, weights):
    """Whether a build goes through that may time nothing."""
    try:
        return len(build_from(blob, weights, strict=True)) > 0
    except (RuntimeError, ValueError):
        return False
'''
covers = partial(reference.define(TIMING_NOTHING, "timing_nothing"), reference.value("build_from"))
fresh = [reference.random_weights(each, int(secret.integers(2**31))) for each in (widths, wider)]
missing = [number for number, each in enumerate(fresh) if not covers(blob, each)]
if missing:  # does this version refuse even what a right cache holds?
    own_room = reference.define(ROOM, "Room")(*(reference.value(name) for name in names))
    for each in (weights, more):
        own_room.build(each)
    own = reference.unseal(own_room.content(), machine)
    missing = [number for number in missing if covers(own, fresh[number])]
check.that(0 not in missing, why="缓存文件里缺了第一次构建量过的东西：存第二次的时候把它丢了。")
check.that(1 not in missing, why="缓存文件里缺了第二次构建量过的东西。")
if not room.times_nothing(fresh[0]):
    own_room = reference.define(ROOM, "Room")(*(reference.value(name) for name in names))
    own_room.plant(room.content())
    check.that(not own_room.times_nothing(fresh[0]), why="缓存文件里什么都有，构建时却还是重新量了：从文件里取出来的缓存，在构建之前挂到 config 上了吗？")

good = room.content()
for name, data in (("改了一个字节", good[:-9] + bytes([good[-9] ^ 1]) + good[-8:]), ("别的 GPU", reference.seal(blob, machine | {"gpu": "another"})), ("不是计时缓存", reference.seal(b"no timing cache", machine))):
    room.plant(data)
    found = room.build(weights, 1)
    agrees(found["plan"], weights)
    check.that(len(found["notes"]) > 0 or name == "不是计时缓存", why=f"缓存文件有毛病（{name}）、没有用上，notes 里却没有说。")
    check.equal(found["level"], 1, why="config 里的优化级别被改了：这个函数只管缓存，别的不要动。")
    check.that(len(opened(room.content(), machine) or b"") > 0, why="缓存文件有毛病，构建以后应当换成一份完好的。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：今晚先把缓存养好（3 分）
#
# 训练组说：凌晨会送来几套新权重，网络的样子现在就知道，权重要到那时才有，拿到以后要尽快上线。
#
# 写 `prewarm(family)`：`family` 是一串 `channels`（像 `CHANNELS` 那样的元组或列表，可能有重复），现在还没有权重。
# 返回一份计时缓存的字节（`bytes`）：到时候对 `family` 里的**任何一个**，`build_from(这份字节, 新权重)` 都要快得像第二次构建。
#
# - 到时候用的是 `make_config()` 的默认配置；养缓存用别的级别，量到的东西未必对得上；
# - 一份字节要管住整个 `family`；
# - 返回的是 `config.get_timing_cache().serialize()` 那样的字节，不用 `seal`。
#
# 评分时，考官另外画两个网络，请你的 `prewarm` 养一份缓存，再拿到参考进程里去用：先带着它把两个网络都构建出来，核对结果，挑出构建得较慢的那一个；
# 再量这一个三遍，每遍换一套权重，从空缓存、带你的缓存、带参考答案的缓存各构建一次。掐的是考官自己的表，从提出要求到拿到 plan。
#
# 每一遍里，从空缓存构建的时间都是带你的缓存的 **3 倍**以上就过关，都在 2 倍以上得一半分。参考答案自己到不了 6 倍的话，
# 过关的门槛降到它的一半（不低于 1.2 倍），得一半分的也跟着降。三遍有高有低、定不下来的，不算错：再量一次，或者由教师来定。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# “计时缓存”一节的表里，换一套权重的那一行说明了什么？没有权重，能不能先随便编一套？
# 一个配置可以用来构建几次？每次构建完，挂着的缓存里有什么？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 空缓存：`config.create_timing_cache(b"")`，挂上：`config.set_timing_cache(cache, ignore_mismatch=False)`。
# 网络：`conv_network(random_weights(channels, seed=0))`；构建：`built(network, config)`，plan 用不着，丢掉就行。
# 最后 `bytes(config.get_timing_cache().serialize())`。
#
# </details>

# %% solution="prewarm" tags=["gpu"]
def prewarm(family):
    """Time, ahead of the weights, all that building the networks of family will need.

    family: list of channels (see random_weights). Returns the bytes of one timing cache for build_from.
    """
    ### BEGIN SOLUTION: 计时和权重的值无关：用随便一套权重，把每个网络在同一份缓存上构建一遍
    config = make_config()
    config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)
    for channels in family:
        built(conv_network(random_weights(channels, seed=0)), config)
    return bytes(config.get_timing_cache().serialize())
    ### END SOLUTION


# %% test="prewarm_result" kind="structure" points=1 tags=["gpu"]
family = [(3, int(secret.integers(3, 8)) * 4), (int(secret.integers(3, 8)) * 4, 24)]
warm = student.prewarm(family)
check.that(isinstance(warm, bytes) and len(warm) > 0, why="应当返回 bytes：bytes(缓存.serialize())。")
weights = reference.random_weights(family[1], int(secret.integers(2**31)))
x = reference.random_images(family[1][0], int(secret.integers(2**31)))
check.equal(student.run_plan(student.build_from(warm, weights), on_gpu(x)), reference.expected(weights, x).astype(np.float32), rel=0.02, abs=0.05, why="带着这份缓存构建出来的引擎，结果不对。")
### BEGIN HIDDEN TESTS
TIMING_NOTHING = '''
def timing_nothing(build_from, blob, weights):
    """Whether a build goes through that may time nothing."""
    try:
        return len(build_from(blob, weights, strict=True)) > 0
    except (RuntimeError, ValueError):
        return False
'''
covers = partial(reference.define(TIMING_NOTHING, "timing_nothing"), reference.value("build_from"))
fresh = [reference.random_weights(each, int(secret.integers(2**31))) for each in family]
missing = [each for each in fresh if not covers(warm, each)]
if missing:  # does this version refuse even what a right cache holds?
    own = reference.prewarm(family)
    missing = [each for each in missing if covers(own, each)]
check.that(not missing, why="family 里有两个网络，你的缓存没有都养到：是不是每个网络换了一份新缓存，只返回了其中一份？用的是默认级别吗？")
### END HIDDEN TESTS

# %% test="prewarm_speed" kind="speedup" points=2 tags=["gpu"]
import time


BUILT = '''
def built_with(build_from, blob, weights):
    """The plan, or None where the cache is refused or the build fails."""
    try:
        return build_from(blob, weights)
    except (RuntimeError, ValueError):
        return None
'''
built_with = partial(reference.define(BUILT, "built_with"), reference.value("build_from"))


def drawn(channels):
    """Fresh weights."""
    return reference.random_weights(channels, int(secret.integers(2**31)))


def build_seconds(blob, weights):
    """Seconds of a build in the reference process, by this process's clock; and the plan."""
    build = built_with if blob is theirs else reference.build_from  # nothing but what the learner made may be refused
    start = time.perf_counter()
    plan = build(blob, weights)
    took = time.perf_counter() - start
    if plan is None:
        reference.build_from(b"", weights)  # raises where it is this machine that builds nothing
        check.that(False, why="在另一个进程里，build_from 不接受你的缓存，或者带着它构建失败。返回的应当是 serialize() 给出的全部字节，不用 seal。")
    return took, plan


family = [(3, int(secret.integers(3, 9)) * 8), (int(secret.integers(3, 9)) * 8, int(secret.integers(3, 9)) * 8)]
theirs = student.prewarm([*family, family[0]])
check.that(isinstance(theirs, bytes) and len(theirs) > 0, why="应当返回 bytes：bytes(缓存.serialize())。")
warm_seconds = []
for channels in family:
    weights = drawn(channels)
    student.build_from(theirs, weights)  # bytes that bring a process down bring down the one they come from
    first, _ = build_seconds(theirs, drawn(channels))  # the first build of a process may load what is loaded once
    again, plan = build_seconds(theirs, weights)
    warm_seconds.append(min(first, again))
    x = reference.random_images(channels[0], int(secret.integers(2**31)))
    check.equal(reference.run_plan(plan, x), reference.expected(weights, x).astype(np.float32), rel=0.02, abs=0.05, why="带着你的缓存构建出来的引擎，结果不对。")
slower = family[int(np.argmax(warm_seconds))]  # a network that was left out takes as long as without a cache
sides = {"baseline": b"", "candidate": theirs, "best": reference.prewarm([slower])}
seconds, plans = {name: [] for name in sides}, {}
for turn in range(3):
    weights = drawn(slower)
    for name in sides if turn % 2 == 0 else reversed(sides):
        took, plans[name] = build_seconds(sides[name], weights)
        seconds[name].append(took)
gain = float(np.median(np.array(seconds["baseline"]) / seconds["candidate"]))
check.that(gain >= 1.2, why=f"带着你的缓存，family 里较慢的那个网络没有变快（{gain:.2f} 倍）。每个网络都养到了吗？是用默认级别养的吗？返回的是构建以后的缓存吗？")
check.faster(seconds, at_least=3.0, why="还不够快。缓存是用默认级别养的吗？family 里的每个网络都养到了吗？")
### BEGIN HIDDEN TESTS
x = reference.random_images(slower[0], int(secret.integers(2**31)))
check.equal(reference.run_plan(plans["candidate"], x), reference.expected(weights, x).astype(np.float32), rel=0.02, abs=0.05, why="计时的那几次构建，带着你的缓存的，引擎结果不对。")
### END HIDDEN TESTS

# %% [markdown] tags=["instructor"]
# 给教师：练习三的第一半不碰 GPU，用替身制造四类故障：坏文件（空、截断、改字节、没有文件头、读不了）、外来文件（别的 GPU、别的版本、TensorRT 不认）、
# 并发（构建中途有别的构建保存、六个线程同时保存、锁在别的进程手里）、写入（就地改写、临时文件隔着文件系统、留下临时文件、存不了）。第二半用真引擎，只信缓存文件的字节：
# 在参考进程里用严格模式验证它确实覆盖了两次构建；不覆盖的话，再看参考答案自己的缓存通不通得过，通不过就不算学生的错。坏文件那几次构建用级别 1，省时间。
# 学生交出的 plan、缓存文件和缓存，都由参考进程打开：打不开就是错，但先用参考答案自己的试一次，免得把机器的毛病算在学生头上。
# “不是计时缓存”的字节在不同版本里可能被当作空缓存收下，所以不强求说明。
# 练习四的计时全部在参考进程里做，学生交出的只有字节；每一遍换新权重，存下来的 plan 没有用。构建比图启动慢几个数量级，
# 所以用 `check.faster`，不用 `check.speedup`：三遍的可信下界就是最小的比值，样本都留在报告里。没有养到的网络，带着缓存照样慢，
# 所以只量带缓存时较慢的那一个，另一个省下三次从零开始的构建。H200 上快几十倍，没有养到的网络是 1 倍上下，门槛离两边都远。

# %% [markdown]
# ## 小结
#
# | 常见的说法 | 实验以后的说法 |
# |:--|:--|
# | 构建是翻译，输入一样输出就一样 | 构建是现场测速；势均力敌的策略会轮流胜出，比较引擎要用容差 |
# | 级别越高，引擎越快 | 级别越高，候选越多、构建越慢；延迟从哪一级起变平，看自己的图 |
# | 换了权重就要从零构建 | 计时与权重的值无关，换权重照样命中；但融合、编排、打包还要重做 |
# | 计时缓存就是引擎缓存 | 里面没有引擎；要省掉整个构建，存 plan |
# | 缓存坏了会报错 | 返回值可能照样是成功，只在日志里留一句，甚至一声不吭；自己包一层文件头和摘要 |
# | 工作区设多大就占多大 | 上限只决定哪些策略有资格；实际占用问引擎 |
# | `Could not find any implementation` 就是不支持 | 先看失败的这一层有没有因内存的跳过，再看最省的要多少 |
# | 检查器随时能看 | 细节在构建时就定了：`DETAILED`；动态形状要先设形状 |
#
# **带走三句话**
#
# 1. 引擎快，是因为构建时量过；构建慢，也是因为量过。量过的可以存下来，不必量第二遍。
# 2. 缓存是提速，不是承诺：验过再用，用不上要说，存的时候先合并、再原子地换。
# 3. 要每台机器一模一样，就只构建一次，把 plan 连同摘要一起分发。
#
# 下一步：《动态形状》让一个引擎接受许多种尺寸，构建器量的是哪一种，由你来定。
