# %% [markdown]
# # 形状张量与数据相关输出
#
# 一个文字检测服务在图片里找字：有的图一个字也没有，有的图有几百个框。**结果有多长，要等算完才知道。**
#
# 三个团队接手过它。第一个团队按最大可能分配输出，每次拷回好几 MB，其中有用的只有一丁点；
# 第二个团队想把它录进 CUDA 图，捕获总是失败；第三个团队把“要缩放到多大”这个参数也放进了显存，进程当场崩溃，连报错都没有。
#
# 这一章弄清楚三种“多大”：写死的、由输入推得出的、由数据说了算的。它们的大小由谁决定、什么时候知道、能不能进图，全不一样。
#
# **学完以后，你能够**
#
# - 使用形状张量（shape tensor）：值放在主机上，用引擎要求的整数类型，在调用之前就拦下放错地方的；
# - 为数据相关输出（data-dependent output）写一个输出分配器（output allocator），处理零命中、全命中和显存不够；
# - 算出每个输出的上界，判断一个引擎能不能被捕获；
# - 把 NonZero 改写成固定尺寸，让“找到命中再处理”整个进一张图，并量出它值多少。
#
# **需要的基础**：《动态形状》里的 Profile、`set_input_shape`、`infer_shapes` 和“拒绝以 `False` 的样子到来”；《CUDA 图优化概念》里的捕获和重放。
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
# ## 三种“多大”
#
# 先不看代码，只看一张表。下面三行就是全章的地图：
#
# | 输出的大小 | 谁决定 | 什么时候知道 | 例子 |
# |:--|:--|:--|:--|
# | 静态 | 网络 | 构建时 | 固定的 (1, 1000) 个类别 |
# | 可推断 | 输入的形状，或形状张量的**值** | 入队（enqueue）之前，`infer_shapes` 就能算 | 批大小；“变形成几行几列”；“取前 k 名” |
# | 数据相关 | 输入的**数据** | 入队之后，GPU 算完才知道 | 有几个大于阈值；非极大值抑制剩下几个框 |
#
# 前两种，CPU 不必看数据就能备好内存、排好内核（kernel）。第三种不行：CPU 得停下来，等 GPU 告诉它一个数。
# 这个“等”，就是后面所有麻烦的来源。
#
# ### 准备
#
# `build` 把一个网络构建成引擎，步骤都在《构建第一个 TensorRT 引擎》里讲过：强类型（strongly typed）网络、Profile、共享的计时缓存、看得见的进度。
# 没有哪个返回值被放过去：`must` 遇到 `False` 就抛出异常，并带上 TensorRT 自己说的原因。
#
# `launch_spin` 让 GPU 空转一段给定的时间，实验里用它占住流（stream）。所有工作都放在同一条流 `stream` 上；`non_blocking=True` 表示它和默认流互不等待。

# %% tags=["gpu"]
import cupy as cp
import tensorrt as trt
from cuda.bindings import runtime as cudart

stream = cp.cuda.Stream(non_blocking=True)
builder = trt.Builder(lab.trt_logger())
loader = trt.Runtime(lab.trt_logger())


def must(ok, what):
    """Raise RuntimeError, with what TensorRT reported, unless ok (a returned bool) is True. what: the step, for the text."""
    if not ok:
        raise RuntimeError(f"{what}没有成功：" + ("；".join(lab.trt_errors()) or "TensorRT 没有说原因"))


def build(define, shapes=None, values=None):
    """Build a strongly typed network with one profile and load it. Returns a trt.ICudaEngine.

    define(network, constant): adds layers and marks outputs; constant(array) makes a numpy array a tensor of the network.
    shapes: {input: (min, opt, max)} for dynamic inputs; values: the same for shape inputs, values instead of shapes.
    RuntimeError if the build fails, with what TensorRT reported.
    """
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    kept = []  # TensorRT does not copy weights: they must live until the build is done

    def constant(array):
        kept.append(np.array(array, order="C"))
        return network.add_constant(kept[-1].shape, trt.Weights(kept[-1])).get_output(0)

    define(network, constant)
    config = builder.create_builder_config()
    config.builder_optimization_level = 1  # quick to build; speed of single layers is no subject here
    config.progress_monitor = lab.build_progress()
    profile = builder.create_optimization_profile()
    for name, (smallest, usual, largest) in (shapes or {}).items():
        profile.set_shape(name, smallest, usual, largest)
    for name, (smallest, usual, largest) in (values or {}).items():
        profile.set_shape_input(name, smallest, usual, largest)
    if shapes or values:
        config.add_optimization_profile(profile)
    lab.trt_errors()
    with lab.timing_cache(config):
        plan = builder.build_serialized_network(network, config)
    must(plan is not None, "构建")
    engine = loader.deserialize_cuda_engine(plan)
    must(engine is not None, "载入计划文件")
    return engine


def name_output(network: "trt.INetworkDefinition", tensor: "trt.ITensor", name):
    """Mark a tensor of the network as the output `name`."""
    tensor.name = name
    network.mark_output(tensor)


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


with stream:
    launch_spin(1)
stream.synchronize()

# %% [markdown]
# ## 形状张量：值就是形状
#
# 有的层，输出的形状要看另一个张量的**值**。比如“把 `x` 变形成 `grid` 所写的几行几列，再转置”：
#
# - `x` 是普通的输入，住在显存里，形状是 (−1,)，也就是任意长度；
# - `grid` 是形状输入，两个 INT64 整数：行数和列数。它的值决定了输出 `y` 的形状。
#
# `IShuffleLayer` 平时的目标形状写在 `reshape_dims` 里；用 `set_input(1, grid)` 接上一个张量，就改由那个张量的值决定。
#
# Profile 也要跟着变：普通输入用 `set_shape` 给**形状**的最小、最优、最大；形状输入用 `set_shape_input` 给**值**的最小、最优、最大。

# %% tags=["demo", "gpu"]
def define_turner(network: "trt.INetworkDefinition", constant):
    """y = x reshaped to grid = (rows, columns), transposed."""
    x = network.add_input("x", trt.DataType.FLOAT, (-1,))
    grid = network.add_input("grid", trt.DataType.INT64, (2,))
    turned = network.add_shuffle(x)
    turned.set_input(1, grid)
    turned.second_transpose = (1, 0)
    name_output(network, turned.get_output(0), "y")


turner = build(define_turner, shapes={"x": ((1,), (24,), (1024,))}, values={"grid": ((1, 1), (4, 6), (32, 32))})


def tensors(engine: "trt.ICudaEngine"):
    """A table of the engine's inputs and outputs, as the engine itself describes them."""
    rows = []
    for i in range(engine.num_io_tensors):
        name = engine.get_tensor_name(i)
        shape, dtype = tuple(engine.get_tensor_shape(name)), engine.get_tensor_dtype(name).name
        home, decides = engine.get_tensor_location(name).name, engine.is_shape_inference_io(name)
        rows.append((f"`{name}`", engine.get_tensor_mode(name).name, shape, dtype, home, "是" if decides else "否"))
    return lab.table(("张量", "方向", "形状", "类型", "住在哪里", "参与形状推断"), rows)


try:
    span = f"`grid` 的值的范围（最小、最优、最大）：{turner.get_tensor_profile_values(0, 'grid')}"
except (RuntimeError, TypeError) as error:
    span = f"`get_tensor_profile_values` 在这个版本里没有给出 `grid` 的范围：{error}"
lab.say(tensors(turner) + "\n\n" + span)

# %% [markdown]
# 看 `grid` 那一行的“住在哪里”：`HOST` 说的是主机内存。形状由 CPU 来推断，CPU 要读这两个整数，所以它们必须在 CPU 读得到的地方。
#
# Profile 里的最小、最优、最大还要**各自说得通**：1 个数排成 1 × 1，24 个数排成 4 × 6，1024 个数排成 32 × 32，三组的乘积都对得上。
# 写 Profile 时就按这个条件去凑，别指望构建器替你检查。
#
# **别背哪个张量在哪里，去问引擎**：`get_tensor_location(name)` 和 `is_shape_inference_io(name)`。类型也去问 `get_tensor_dtype(name)`：
# TensorRT 8 没有 INT64，读 ONNX 时把它收窄成 INT32，只在日志里留一句警告；10 以后保留 INT64，抄来的老代码就错在这里。错了会怎样？这一格不需要 GPU：

# %% tags=["demo"]
wrong = np.array([4, 6, 7, 9], np.int32)
lab.say(
    f"四个 INT32 整数 {wrong.tolist()}，如果按 INT64 去读前两个，读到的是 **{wrong.view('<i8').tolist()}**：两个 32 位的数被拼成了一个。"
    "TensorRT 只拿到一个地址，没有办法知道那里放的是什么类型。",
    measured=False,
)

# %% [markdown]
# ### 值什么时候被读走
#
# `set_tensor_address("grid", …)` 交出去的是**地址**。那么值是在什么时候读的：设地址的时候，推断形状的时候，入队的时候，还是 GPU 做到这一步的时候？
#
# 猜一猜下面四种情形各算出几行几列。`x` 总是 0…23，所以从结果可以反推出用的是哪个 `grid`。
#
# 第三种情形是故意犯规：文档要求，交出去的内存在流做完之前不要改。我们只想看看改了会怎样，写进去的又都是合法的值，所以不会出事。

# %% tags=["demo", "gpu"]
sizes = np.array([4, 6], np.int64)  # this name keeps the host memory alive
with stream:
    numbers, turned = cp.arange(24, dtype=cp.float32), cp.zeros(24, cp.float32)
stream.synchronize()
context = turner.create_execution_context()
must(context.set_input_shape("x", numbers.shape), "设 x 的形状")
must(context.set_tensor_address("x", numbers.data.ptr), "设 x 的地址")
must(context.set_tensor_address("y", turned.data.ptr), "设 y 的地址")
print("还缺的：", context.infer_shapes())
must(context.set_tensor_address("grid", sizes.ctypes.data), "设 grid 的地址")
print("还缺的：", context.infer_shapes(), "  y 的形状：", tuple(context.get_tensor_shape("y")))


def used():
    """Wait, then tell which (rows, columns) the engine used to turn 0 … 23, and clear the output."""
    stream.synchronize()
    got = turned.get()
    with stream:
        turned.fill(-1)
    stream.synchronize()
    every = np.arange(24, dtype=np.float32)
    grids = [(rows, 24 // rows) for rows in (2, 3, 4, 6, 8, 12)]
    return next((str(g) for g in grids if np.array_equal(got, every.reshape(g).T.ravel())), "都不是")


def enqueue():
    must(context.execute_async_v3(stream.ptr), "入队")


rows = []
enqueue()
rows.append(("写好 (4, 6)，入队", "(4, 6)", used()))

sizes[:] = 3, 8
enqueue()
rows.append(("就地改成 (3, 8)，什么也不重设，再入队", "(3, 8)", used()))

with stream:
    launch_spin(3000)
enqueue()
sizes[:] = 6, 4  # the GPU is still spinning
rows.append(("入队以后、GPU 还没做到这里，就改成 (6, 4)", "(6, 4)", used()))

sizes[:] = 2, 12
enqueue()  # warm up with these values
used()
RELAXED = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, RELAXED))
went_in = context.execute_async_v3(stream.ptr)
error, definition = cudart.cudaStreamEndCapture(stream.ptr)  # an error here is shown below, not raised
cudart.cudaGetLastError()  # clear it
if went_in and not int(error):
    baked = lab.check_cuda(cudart.cudaGraphInstantiate(definition, 0))
    sizes[:] = 8, 3
    lab.check_cuda(cudart.cudaGraphLaunch(baked, stream.ptr))
    rows.append(("用 (2, 12) 捕获，改成 (8, 3)，再重放", "(8, 3)", used()))
    lab.check_cuda(cudart.cudaGraphExecDestroy(baked))
    lab.check_cuda(cudart.cudaGraphDestroy(definition))
else:
    rows.append(("用 (2, 12) 捕获", "(2, 12)", f"没有捕获成：入队返回 {went_in}，{error.name}"))
lab.say(lab.table(("情形", "主机上写着", "真正用的"), rows))
_, _, third, fourth = (row[2] for row in rows)
lab.say(
    f"就地改了值，下一次入队用的是 **{rows[1][2]}**，" + ("新的值" if rows[1][2] == "(3, 8)" else "不是新写的值") + "；"
    "入队返回以后再改，" + ("**改不到**已经排上队的那一次" if third == "(3, 8)" else f"已经排上队的那一次用的是 {third}，**受了影响**") + "；"
    + (f"捕获以后再改，重放用的是 **{fourth}**，" + ("正是捕获时的值" if fourth == "(2, 12)" else "不是捕获时的值") if rows[3][1] == "(8, 3)" else "这个版本没有让带形状输入的引擎进图")
    + "。"
)

# %% [markdown]
# 对照你自己的表，记住两条规矩：
#
# - 形状的值在 CPU 这一边被读走，用来决定启动哪些内核、每个多大。那块主机内存要一直活着，流做完之前不去改它；
#   不想去记“哪次调用读了值”，就**每次入队之前重新设一遍**，再用 `get_tensor_shape` 问一次输出的形状。
# - 对图来说，形状张量的值应当**和形状一样看待：捕获时是几就是几**。换一个值，就换一张图，哪怕地址没变。
#   误区“动态形状与 CUDA 图天然兼容”在这里第一次碰壁：数据就地变，图跟着变；形状的值就地变，图不知道。
#
# ### 误区：动态形状就是无限灵活
#
# 值也有范围。下面的前三个请求都不合法，会由谁来拒绝：`set_input_shape`，`infer_shapes`，`execute_async_v3`，还是谁也不管？
#
# ### 误区：张量都该放在显存里
#
# 第四个请求重演第三个团队的崩溃：形状和值都合法，可是 `grid` 的值放在了 GPU 上，交出去的是设备地址。
# 设地址的函数只收到一个整数，分不出它指着哪里；等 TensorRT 用 CPU 去读这个地址，会发生什么？
#
# 几个输入各自合法、凑在一起却说不通的请求，有可能毁掉整个进程。所以**每个请求放进一个自己的子进程**：
# 它每做一步先说一声，我们就知道走到了哪里；做完以后再来一个合法的请求，看进程还好不好用。几个子进程同时跑，要等几秒。

# %% tags=["demo", "gpu"]
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


def in_children(program, engines: "list[trt.ICudaEngine]", arguments=((),), inputs=()):
    """Run a Python program once for each list of arguments, each time in a process of its own, all at once.

    program: its text; it finds the engines' plans as 0.plan, 1.plan … in the folder sys.argv[1], the arrays of `inputs` (a
    dict each) as 0.npz …, its own arguments from sys.argv[2] on. Returns [(lines printed, how it ended in Chinese), …].
    """
    told = []
    with tempfile.TemporaryDirectory() as folder:
        for number, engine in enumerate(engines):
            Path(folder, f"{number}.plan").write_bytes(bytes(engine.serialize()))
        for number, arrays in enumerate(inputs):
            np.savez(Path(folder, f"{number}.npz"), **arrays)
        command = [sys.executable, "-u", "-c", program, folder]  # -u: nothing printed is lost in a crash
        children = [
            subprocess.Popen([*command, *map(str, each)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
            for each in arguments
        ]
        for child in children:
            try:
                out, err = child.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                child.kill()
                out, _ = child.communicate()
                ended = "**没有返回**，被我们终止"
            else:
                reason = (err.strip().splitlines() or ["没有说明"])[-1][:160].replace("|", "/")
                if child.returncode < 0:
                    ended = f"**被信号 {signal.Signals(-child.returncode).name} 杀死**"
                else:
                    ended = "正常结束" if child.returncode == 0 else f"以退出码 {child.returncode} 结束：`{reason}`"
            told.append(([line for line in out.splitlines() if line.strip()], ended))
    return told


REQUESTS = r"""
import sys

import cupy as cp
import numpy as np
import tensorrt as trt

from launchlab import lab

with open(sys.argv[1] + "/0.plan", "rb") as file:
    engine = trt.Runtime(lab.trt_logger()).deserialize_cuda_engine(file.read())
stream = cp.cuda.Stream(non_blocking=True)
x, y = cp.zeros(4096, cp.float32), cp.zeros(4096, cp.float32)


def request(length, values, device):
    # Ask for x of that length in that grid, step by step; the name of each step is printed before it is taken.
    context = engine.create_execution_context()
    host = np.array(values, np.int64)
    grid = cp.asarray(host) if device else host
    cp.cuda.Device().synchronize()
    address = grid.data.ptr if device else grid.ctypes.data
    steps = (
        ("set_input_shape", lambda: context.set_input_shape("x", (length,))),
        ("set_tensor_address", lambda: all([context.set_tensor_address("x", x.data.ptr), context.set_tensor_address("y", y.data.ptr)])),
        ("set_tensor_address(grid)", lambda: context.set_tensor_address("grid", address)),
        ("infer_shapes", lambda: context.infer_shapes() == []),
        ("execute_async_v3", lambda: context.execute_async_v3(stream.ptr)),
        ("synchronize", lambda: stream.synchronize() is None),
    )
    for name, step in steps:
        print("step", name)
        try:
            fine = step()
        except Exception as error:
            print("threw", type(error).__name__)
            return
        if not fine:
            print("refused", name)
            return
    print("done")


length, rows, columns, device = map(int, sys.argv[2:])
request(length, (rows, columns), device)
print("second")
request(24, (6, 4), False)
"""
WRONG = {
    "24 个数排成 5 × 5": (24, 5, 5, 0),
    "64 个数排成 64 × 1，超出值的范围": (64, 64, 1, 0),
    "2000 个数，超出形状的范围": (2000, 2, 1000, 0),
    "24 个数排成 4 × 6，`grid` 在显存里": (24, 4, 6, 1),
}


def outcome(lines, ended):
    """What became of one request, from the lines that its process printed."""
    steps = [line.split(maxsplit=1)[1] for line in lines if line.startswith("step ")]
    last, step = (lines or [""])[-1].split(), f"`{steps[-1]}`" if steps else "第一步以前"
    if last[:1] == ["done"]:
        return "没有谁，照做了"
    if last[:1] == ["refused"]:
        return f"{step} 没有答应"
    if last[:1] == ["threw"]:
        return f"{step} 抛出 {last[1]}"
    return f"走到 {step}，进程{ended}"


rows = []
for what, (lines, ended) in zip(WRONG, in_children(REQUESTS, [turner], WRONG.values()), strict=True):
    told = [line for line in lines if line.startswith(("step", "done", "refused", "threw", "second"))]
    reports = [line.partition("：")[2].replace("|", "/") for line in lines if line.startswith("TensorRT 报告错误")]
    cut = told.index("second") if "second" in told else len(told)
    after = outcome(told[cut + 1 :], ended) if cut < len(told) else "没有轮到"
    rows.append((what, outcome(told[:cut], ended), after, "…" + reports[0][-130:] if reports else "—"))
lab.say(lab.table(("请求", "结果", "同一个进程里再来 24 个数、6 × 4", "TensorRT 的第一条报告"), rows))
died = [row[0] for row in rows if row[2] == "没有轮到"]
through = [row[0] for row in rows[:-1] if row[1] == "没有谁，照做了"]
lab.say(
    ("有去无回的：" + "；".join(died) + "。" if died else "这一次没有进程死掉，换一个版本、换一台机器就不一定了。")
    + ("不合法却没有人拦的：" + "；".join(through) + "。**没有人拦，不等于允许**：这时的结果，文档没有承诺过。" if through else "")
    + ("不该读的显存，CPU 读了也没有出事，只是运气。" if rows[-1][1] == "没有谁，照做了" else "")
)

# %% [markdown]
# - 每一步都可能是拒绝的那一步，样子也不同：返回 `False`、说还缺东西、抛出异常，甚至不说话就死掉。少看一个返回值，就会带着旧的形状继续跑。
# - 所以**在碰到 TensorRT 之前自己检查一遍**：类型、住在哪里、值在不在 Profile 里、乘积对不对。自己的检查能说出人话，而且死不了人。
#
# “灵活”的边界在构建时就画好了：形状的范围、值的范围，都是 Profile 的一部分。画好了，不等于每一条都有人守着。
#
# 引擎早就说了 `HOST`，只是没有人问。**在调用之前**问一句 `get_tensor_location`，收到 CuPy 数组就抛出 `TypeError`：
# 一行检查，换掉一次没有线索的事故。练习二会让你写上它。
#
# 反过来也别为了“保险”把主机上的值先送上 GPU 再取回来：取回要等 GPU，一次看不见的同步（synchronize）就这样混进了热路径。

# %% [markdown]
# ## 数据相关输出：谁也不知道有多长
#
# 现在来看第三种。`finder` 找出所有大于 4 的元素的下标：比较得到布尔张量，`add_non_zero` 给出其中为真的位置。
# 它的输出形状是 (维数, 命中数)，每一列是一个命中的坐标。

# %% tags=["demo", "gpu"]
LIMIT = 4.0


def define_finder(network: "trt.INetworkDefinition", constant):
    """where = indices of the elements of x above LIMIT, shape (1, hits)."""
    x = network.add_input("x", trt.DataType.FLOAT, (-1,))
    above = network.add_elementwise(x, constant(np.full(1, LIMIT, np.float32)), trt.ElementWiseOperation.GREATER)
    name_output(network, network.add_non_zero(above.get_output(0)).get_output(0), "where")


finder = build(define_finder, shapes={"x": ((1,), (256,), (4096,))})
context = finder.create_execution_context()
lab.say(tensors(finder))
must(context.set_input_shape("x", (256,)), "设 x 的形状")
most = context.get_max_output_size("where")
lab.say(
    f"输入的形状设好以后，`infer_shapes` 说还缺 {context.infer_shapes()}，`where` 的形状却还是 **{tuple(context.get_tensor_shape('where'))}**。"
    f"`get_max_output_size` 说最多要 **{most}** 字节；256 个元素全部命中，每个坐标一个 4 字节整数，手算是 {256 * 4} 字节"
    + ("，正好一样。" if most == 256 * 4 else "。两个数不同：它可能按对齐取整，也可能按 Profile 的最大形状算。")
)

# %% [markdown]
# “什么也不缺”，形状里却留着 −1。这不是错误，是实话：再问多少次，CPU 这边也没有答案。TensorRT 能给的只有一个上界。
#
# 那么输出放哪里？两条路：
#
# 1. **按上界给一块固定的内存**，和普通输出一样用 `set_tensor_address`；
# 2. **给一个输出分配器**，TensorRT 在知道大小以后来要内存，再告诉你形状。
#
# 第一条路有个缺口：内存够了，命中了几个，谁来告诉你？先试它：

# %% tags=["demo", "gpu"]
with stream:
    scores, whole = cp.zeros(256, cp.float32), cp.full(max(256, most // 4), -1, cp.int32)
    scores[10:13] = 9.0
stream.synchronize()
must(context.set_tensor_address("x", scores.data.ptr), "设 x 的地址")
must(context.set_tensor_address("where", whole.data.ptr), "设 where 的地址")
accepted = context.execute_async_v3(stream.ptr)
stream.synchronize()
lab.say(
    f"只给地址、不给分配器，入队返回 {accepted}。缓冲的前六个数：{whole[:6].get().tolist()}。"
    f"入队以后再问形状：{tuple(context.get_tensor_shape('where'))}。"
)

# %% [markdown]
# 形状里还有 −1 的话，长度就只能靠猜，或者靠自己在缓冲里预先填的 −1。要知道长度，就得用分配器。
#
# ### 输出分配器
#
# 分配器是 `trt.IOutputAllocator` 的子类，TensorRT 会调用它的三个方法：
#
# | 方法 | 什么时候 | 你要做什么 |
# |:--|:--|:--|
# | `reallocate_output(tensor_name, memory, size, alignment)` | 知道要多大时 | 返回至少 `size` 字节的设备地址；给不出就返回 0 |
# | `reallocate_output_async(…, stream)` | 同上，多给一条流 | 同上；两个都写，哪个版本叫哪个都不怕 |
# | `notify_shape(tensor_name, shape)` | 形状定下来时 | 记住它 |
#
# 五条容易踩的坑，都来自文档和公开的问题报告：
#
# - **要亲自调用 `trt.IOutputAllocator.__init__(self)`**，不写这一句，C++ 里的那一半没有造出来（新的版本会在构造时抛出 `TypeError`）；
# - **分配器要有人留住**，活得比执行上下文久；
# - **命中为零也要给一个非零的地址**：返回 0 的意思是“没有内存”，不是“不需要”；
# - **`size` 不一定是实际大小**：文档只说“至少要这么多”。它可能是真正的大小，也可能是上界。真正的大小只听 `notify_shape` 的；
# - **别在回调里抛异常**：回调是从 C++ 里叫的，异常未必传得到你的 `try`，后面会试。把出了什么事记在属性里，入队返回以后再说。
#
# 先写一个最老实的，把每次调用都记下来：

# %% tags=["demo", "gpu"]
class Diary(trt.IOutputAllocator):
    """An allocator that gives new memory each time, and writes down what it was asked."""

    def __init__(self):
        trt.IOutputAllocator.__init__(self)
        self.lines, self.memory, self.shape = [], None, None

    def reallocate_output(self, tensor_name, memory, size, alignment):
        self.lines.append(f"要 {size} 字节")
        self.memory = cp.cuda.alloc(max(size, 1))
        return self.memory.ptr

    def reallocate_output_async(self, tensor_name, memory, size, alignment, stream):
        self.lines.append("（async）")
        return self.reallocate_output(tensor_name, memory, size, alignment)

    def notify_shape(self, tensor_name, shape):
        self.shape = tuple(shape)
        self.lines.append(f"形状是 {self.shape}")


diary = Diary()
context = finder.create_execution_context()
must(context.set_input_shape("x", (256,)), "设 x 的形状")
must(context.set_tensor_address("x", scores.data.ptr), "设 x 的地址")
must(context.set_output_allocator("where", diary), "设分配器")
rows = []
for what, hits in (("3 个命中", slice(10, 13)), ("没有命中", slice(0, 0)), ("全部命中", slice(None)), ("又是全部命中", slice(None))):
    diary.lines.clear()
    diary.shape = None
    with stream:
        scores.fill(0)
        scores[hits] = 9.0
        must(context.execute_async_v3(stream.ptr), "入队")
    stream.synchronize()
    if diary.shape is None or min(diary.shape) < 0:
        rows.append((what, "，".join(diary.lines), "长度没有说清楚"))
        continue
    found = cp.ndarray(diary.shape, cp.int32, diary.memory).get()
    rows.append((what, "，".join(diary.lines), f"{found[0, :4].tolist()}，共 {found.shape[1]} 个"))
lab.say(lab.table(("数据", "TensorRT 依次说了什么", "结果"), rows))
calls = sum(row[1].count("字节") for row in rows)
lab.say(f"四次入队，要了 **{calls}** 次内存。全部命中时实际用 {256 * 4} 字节，3 个命中时实际用 12 字节：对照上表，看它要的是实际大小还是上界。")

# %% [markdown]
# 如果每次入队都来要内存，那么“要一次就分配一次”就等于每个请求都分配一次显存。来要，不等于必须给新的：
# **手里的那块够大，就把它再给一次**。练习二的分配器就要做到：只在变大时分配，平稳以后一次也不分配。
#
# 内核是异步的，可这里的次序不必担心：分配器给出的那块内存在流里写好以后，后面排进**同一条流**的工作才会用到它；CPU 自己要读，就先同步。
#
# 还要提防一种情况：公开的报告里，有的版本在某些平台上连 `notify_shape` 收到的形状也带着 −1。
# 遇到它别硬着头皮往下算：要么从别处推出长度，要么**响亮地失败**。
#
# ### 回调里抛异常，谁接得到
#
# 显存不够时，CuPy 会抛出 `MemoryError`。如果不去管它，任由它从回调里飞出去，入队外面的 `try` 接得到吗？又是可能毁掉进程的实验，放进子进程：

# %% tags=["demo", "gpu"]
THROWS = r"""
import sys
import cupy as cp
import tensorrt as trt


class Broken(trt.IOutputAllocator):
    def __init__(self):
        trt.IOutputAllocator.__init__(self)

    def reallocate_output(self, tensor_name, memory, size, alignment):
        raise MemoryError("no memory left")

    def reallocate_output_async(self, tensor_name, memory, size, alignment, stream):
        raise MemoryError("no memory left")

    def notify_shape(self, tensor_name, shape):
        pass


logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
with open(sys.argv[1] + "/0.plan", "rb") as file:
    engine = trt.Runtime(logger).deserialize_cuda_engine(file.read())
context = engine.create_execution_context()
stream, broken, x = cp.cuda.Stream(non_blocking=True), Broken(), cp.full(256, 9, cp.float32)
cp.cuda.Device().synchronize()
context.set_input_shape("x", (256,))
context.set_tensor_address("x", x.data.ptr)
context.set_output_allocator("where", broken)
try:
    print("returned", context.execute_async_v3(stream.ptr))
except MemoryError:
    print("caught")
"""
((told, ended),) = in_children(THROWS, [finder])
last = (told or [""])[-1]
if last == "caught":
    outcome_text = "这个版本里，`try` 接到了 `MemoryError`"
elif last.startswith("returned"):
    outcome_text = f"`try` **什么也没有接到**，入队只是返回了 {last.split()[-1]}：为什么失败，在这里已经看不出来了"
else:
    outcome_text = "入队**没有返回**，后面的代码一行也没有执行"
lab.say(f"{outcome_text}。子进程{ended}。")

# %% [markdown]
# 别把希望寄托在异常上。**规矩是：回调里自己接住，记下来，返回 0。** 入队返回 `False` 以后，再看自己记了什么。
#
# ### `async` 真的异步吗
#
# `execute_async_v3` 的名字里有 async，照理说它交完活就返回。对数据相关输出也是这样吗？
#
# 用 `launch_spin` 把流占住 3 毫秒，再入队，只看入队这一句花了 CPU 多少时间。
# 作对照的 `picker` 用 TopK 取最大的 64 个：**要几个是事先说好的**，所以大小和数据无关。

# %% tags=["demo", "gpu"]
from time import perf_counter

K = 64


def define_picker(network: "trt.INetworkDefinition", constant):
    """values, where = the K largest elements of x and their indices, both of shape (1, K)."""
    x = network.add_input("x", trt.DataType.FLOAT, (1, 256))
    largest = network.add_topk(x, trt.TopKOperation.MAX, K, 1 << 1)
    name_output(network, largest.get_output(0), "values")
    name_output(network, largest.get_output(1), "where")


picker = build(define_picker)
picking = picker.create_execution_context()
with stream:
    best, places = cp.zeros((1, K), cp.float32), cp.zeros((1, K), cp.int32)
stream.synchronize()
for name, array in (("x", scores), ("values", best), ("where", places)):
    must(picking.set_tensor_address(name, array.data.ptr), f"设 {name} 的地址")

SPIN_US = 3000


def behind_spin(each):
    """Enqueue behind a kernel that runs for SPIN_US. Returns the ms of CPU that the call took (the least of five)."""
    times = []
    for _ in range(5):
        with stream:
            launch_spin(SPIN_US)
            began = perf_counter()
            must(each.execute_async_v3(stream.ptr), "入队")
            times.append((perf_counter() - began) * 1000)
        stream.synchronize()
    return min(times)


waits = {"NonZero（数据相关）": behind_spin(context), "TopK（大小固定）": behind_spin(picking)}
lab.say(
    lab.table(("引擎", "`execute_async_v3` 占用 CPU"), [(name, f"{ms:.3f} ms") for name, ms in waits.items()])
    + "\n\n"
    + "；".join(f"{name}：入队**{'一直等到 GPU 空下来' if ms > SPIN_US / 2000 else '没有等 GPU'}**" for name, ms in waits.items())
    + "。"
)

# %% [markdown]
# 占住流的内核和引擎毫无关系。哪个引擎等了，就是因为 CPU 要拿到“命中了几个”才能往下走，只好连前面排着的一起等。
# 这种等待让后面的工作没法提前提交：CPU 和 GPU 轮流休息，谁也没有满载。
#
# ### 上界有多浪费
#
# 回到第一个团队：按上界分配、按上界拷回。上界有多大，用手就能算：
#
# | 层 | 输出的形状 | 最多多少个元素 |
# |:--|:--|:--|
# | NonZero | (维数, 命中数) | 维数 × 输入的元素个数 |
# | NMS（非极大值抑制，non-maximum suppression） | (框数, 3) | 批大小 × 类别数 × min(每类上限, 候选框数) × 3 |
# | TopK | 最后一维换成 k | 就是 k，没有浪费，也没有“不够”的余地 |
#
# 元素个数乘以每个元素的字节数，就是字节的上界（`get_max_output_size` 的答案还可能按对齐取整）。三种真实的大小（这一格不需要 GPU）；
# 图上，斜着上升的是真正有用的字节，水平的细虚线是上界：

# %% tags=["demo"]
import matplotlib.pyplot as plt

lab.plot_style()
MASKS = {"512 个 token": (512,), "720p 掩码": (720, 1280), "1080p 掩码": (1080, 1920)}
share = np.logspace(-3, 0, 50)
fig, ax = plt.subplots()
rows = []
for label, shape in MASKS.items():
    bound = len(shape) * int(np.prod(shape)) * 4
    (line,) = ax.loglog(100 * share, bound * share, label=label, marker="")
    ax.axhline(bound, color=line.get_color(), linestyle="--", linewidth=1, marker="")
    rows.append((label, shape, f"{bound:,}", f"{bound / 100:,.0f}"))
ax.set_xlabel("命中的比例（%）")
ax.set_ylabel("NonZero 的输出（字节）")
ax.set_title("斜线：真正有用的；水平的细虚线：上界")
ax.legend()
plt.show()
lab.say(lab.table(("NonZero 的输入", "形状", "上界（字节）", "命中 1% 时有用的（字节）"), rows), measured=False)

# %% [markdown]
# ### 谁进得了图
#
# 误区“TensorRT 动态形状与 CUDA 图天然兼容”第二次碰壁，也是最硬的一次。六个引擎，逐个先入队一次，再试捕获。
# 捕获失败会给上下文和进程留下什么，文档没有承诺，所以还是在子进程里试：
#
# - 前面的 `turner`、`finder`、`picker`；
# - NMS：从 256 个候选框里去掉重叠的；
# - 两个算**同一个数**的引擎：大于 4 的元素之和。一个“先找后加”（NonZero → Gather → Sum），一个“掩掉再加”（Select → Sum）。
#   两者的输出都是一个数，形状完全静态。它们会有不同的命运吗？

# %% tags=["demo", "gpu"]
def above_limit(network: "trt.INetworkDefinition", constant, x):
    """A bool tensor: x > LIMIT."""
    return network.add_elementwise(x, constant(np.full(1, LIMIT, np.float32)), trt.ElementWiseOperation.GREATER).get_output(0)


def define_found_sum(network: "trt.INetworkDefinition", constant):
    """total = sum of the elements of x above LIMIT: find them, gather them, add them up."""
    x = network.add_input("x", trt.DataType.FLOAT, (256,))
    where = network.add_non_zero(above_limit(network, constant, x)).get_output(0)
    gathered = network.add_gather(x, where, 0).get_output(0)
    total = network.add_reduce(gathered, trt.ReduceOperation.SUM, 1 << 1, False)
    name_output(network, total.get_output(0), "total")


def define_masked_sum(network: "trt.INetworkDefinition", constant):
    """total = sum of the elements of x above LIMIT: replace the others by 0, add all up."""
    x = network.add_input("x", trt.DataType.FLOAT, (256,))
    masked = network.add_select(above_limit(network, constant, x), x, constant(np.zeros(1, np.float32))).get_output(0)
    total = network.add_reduce(masked, trt.ReduceOperation.SUM, 1 << 0, True)
    name_output(network, total.get_output(0), "total")


def define_nms(network: "trt.INetworkDefinition", constant):
    """kept = (batch, class, box) of the boxes that survive, at most 32 of each class; count = how many."""
    boxes = network.add_input("boxes", trt.DataType.FLOAT, (1, 256, 4))
    confidence = network.add_input("scores", trt.DataType.FLOAT, (1, 256, 1))
    survivors = network.add_nms(boxes, confidence, constant(np.array(32, np.int32)))
    survivors.bounding_box_format = trt.BoundingBoxFormat.CORNER_PAIRS
    survivors.set_input(3, constant(np.array(0.5, np.float32)))  # overlap (intersection over union) above this: drop
    name_output(network, survivors.get_output(0), "kept")
    name_output(network, survivors.get_output(1), "count")


CAPTURES = r"""
import json
import sys
from pathlib import Path

import cupy as cp
import numpy as np
import tensorrt as trt
from cuda.bindings import runtime as cudart

from launchlab import lab

RELAXED = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
runtime = trt.Runtime(lab.trt_logger())


class Fresh(trt.IOutputAllocator):
    # New memory each time, and all of it kept.
    def __init__(self):
        trt.IOutputAllocator.__init__(self)
        self.kept = []

    def reallocate_output(self, tensor_name, memory, size, alignment):
        self.kept.append(cp.cuda.alloc(max(size, 1)))
        return self.kept[-1].ptr

    def reallocate_output_async(self, tensor_name, memory, size, alignment, stream):
        return self.reallocate_output(tensor_name, memory, size, alignment)

    def notify_shape(self, tensor_name, shape):
        pass


def attempt(engine, inputs):
    # Enqueue once, then once more within a capture, in a context and on a stream of their own.
    context, stream, held, told = engine.create_execution_context(), cp.cuda.Stream(non_blocking=True), {}, {}
    for i in range(engine.num_io_tensors):
        name = engine.get_tensor_name(i)
        on_host = engine.get_tensor_location(name) == trt.TensorLocation.HOST
        if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
            held[name] = inputs[name] if on_host else cp.asarray(inputs[name])
            if -1 in tuple(engine.get_tensor_shape(name)):
                context.set_input_shape(name, inputs[name].shape)
            context.set_tensor_address(name, held[name].ctypes.data if on_host else held[name].data.ptr)
    for i in range(engine.num_io_tensors):
        name = engine.get_tensor_name(i)
        on_host = engine.get_tensor_location(name) == trt.TensorLocation.HOST
        if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT:
            shape, dtype = tuple(context.get_tensor_shape(name)), trt.nptype(engine.get_tensor_dtype(name))
            if -1 in shape:
                held[name] = Fresh()
                context.set_output_allocator(name, held[name])
            else:
                held[name] = np.zeros(shape, dtype) if on_host else cp.zeros(shape, dtype)
                context.set_tensor_address(name, held[name].ctypes.data if on_host else held[name].data.ptr)
    cp.cuda.Device().synchronize()
    told["first"] = context.execute_async_v3(stream.ptr)
    stream.synchronize()
    if "total" in held:
        told["total"] = float(cp.asnumpy(held["total"]).ravel()[0])
    if not told["first"]:
        return told
    lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, RELAXED))
    told["second"] = context.execute_async_v3(stream.ptr)
    told["status"] = getattr(cudart.cudaStreamIsCapturing(stream.ptr)[-1], "name", "?").removeprefix("cudaStreamCaptureStatus")
    error, graph = cudart.cudaStreamEndCapture(stream.ptr)
    cudart.cudaGetLastError()
    told["nodes"] = 0 if int(error) else lab.check_cuda(cudart.cudaGraphGetNodes(graph, 0))[-1]
    return told


number = 0
while (plan := Path(sys.argv[1], f"{number}.plan")).exists():
    print("start", number)
    try:
        told = attempt(runtime.deserialize_cuda_engine(plan.read_bytes()), dict(np.load(plan.with_suffix(".npz"))))
    except Exception as error:
        told = {"error": type(error).__name__ + ": " + str(error)[:80]}
    print("told", json.dumps(told))
    number += 1
"""
noise = np.random.default_rng(15).normal(3, 2, 256).astype(np.float32)
corners = np.random.default_rng(16).uniform(0, 100, (1, 256, 4)).astype(np.float32)
corners[..., 2:] = corners[..., :2] + 20
cases = {
    "`turner`：形状张量": (turner, {"x": np.arange(24, dtype=np.float32), "grid": np.array([4, 6], np.int64)}),
    "`picker`：TopK": (picker, {"x": noise.reshape(1, 256)}),
    "掩掉再加": (define_masked_sum, {"x": noise}),
    "`finder`：NonZero": (finder, {"x": noise}),
    "先找后加": (define_found_sum, {"x": noise}),
    "NMS": (define_nms, {"boxes": corners, "scores": noise.reshape(1, 256, 1)}),
}
rows, ready = [], {}
for name, (engine, inputs) in cases.items():
    try:
        ready[name] = (engine if isinstance(engine, trt.ICudaEngine) else build(engine), inputs)
    except RuntimeError as error:
        rows.append((name, f"没有构建成：{str(error)[:80]}", "—", "—", "没有图"))
engines, inputs = zip(*ready.values(), strict=True)
((lines, ended),) = in_children(CAPTURES, engines, inputs=inputs)
told = [json.loads(line.removeprefix("told ")) for line in lines if line.startswith("told ")]
begun = sum(line.startswith("start ") for line in lines)
totals, captured, refused, unknown = {}, [], [], []
for number, name in enumerate(ready):
    if number >= len(told):
        unknown.append(name)
        rows.append((name, f"进程在这一步{ended}" if number < begun else "没有轮到", "—", "—", "—"))
        continue
    each = told[number]
    totals |= {name: each["total"]} if "total" in each else {}
    if not each.get("first"):
        unknown.append(name)
        rows.append((name, f"平常的入队就没有成：{each.get('error', False)}", "—", "—", "—"))
        continue
    (captured if each["second"] and each["nodes"] else refused).append(name)
    rows.append((name, "True", each["second"], each["status"], f"{each['nodes']} 个节点" if each["nodes"] else "没有图"))
lab.say(lab.table(("引擎", "平常入队", "捕获中入队", "之后的捕获状态", "得到"), rows))
lab.say(
    f"进得了图的：{'、'.join(captured) or '没有'}。进不了的：{'、'.join(refused) or '没有'}。"
    + (f"没有试成的：{'、'.join(unknown)}。" if unknown else "")
    + f"两种求和的结果：{'、'.join(f'{name} {value:.3f}' for name, value in totals.items())}。"
    + ("“先找后加”的输出是静态的，**照样进不了图**：看的是路上有没有数据相关的张量，不是终点有没有。" if "先找后加" in refused else "")
    + ("在这个版本里，“先找后加”进得了图：中间的长度没有再回到 CPU。" if "先找后加" in captured else "")
)

# %% [markdown]
# - NonZero 的引擎捕获不了，是公开的问题报告里反复出现的一条。道理在上一个实验里：CPU 要等 GPU 报一个数，
#   而捕获中什么都没有执行，等不来。捕获状态如果是 `Invalidated`，连累的就是**整次捕获**，不只这一次入队。
# - 别的数据相关的层（NMS，或者长度未知的中间结果）怎样，因版本而异，**以你自己的表为准**。没有试过，就当它进不了图：
#   输出是静态的，不等于路上也是静态的。
# - 大小由输入推得出的（形状张量、TopK）没有“等一个数”的问题：对一张图来说，它们就是定值。
#
# 两个求和还指出了出路：同一个数，换一种算法，就没有长度未知的张量了。这一招对一切框架都管用：`x[mask]` 要先数出几个为真，
# `where(mask, x, 0)` 不用数。
#
# 失败的捕获会在上下文里留下什么，文档没有承诺：扔掉那个上下文，重新建一个，最省心。

# %% [markdown]
# ## 三条出路
#
# 一个请求 =“算出分数 → 找出命中 → 处理命中”。卡住图的只有中间那一步。三种做法：
#
# | 做法 | 谁在图里 | 代价 |
# |:--|:--|:--|
# | 整个逐次入队 | 谁也不在 | 每次入队都等 GPU |
# | 拆开：静态的部分进图，找命中的部分逐次入队 | 重的那部分 | 还是要等一次 |
# | 改写成固定尺寸 | 全部 | 要事先定一个容量；放不下的要有说法 |
#
# ### 一个真实形状的例子
#
# 给它们一个共同的任务，名叫 `tracker`，练习四也用它。状态 `x` 有 256 个浮点数，其实都是 −8 到 7 的整数。走一步：
#
# 1. 三层网络由 `x` 算出 `y`（每层一次矩阵乘法，再折回 −8…7）；
# 2. 找出 `y` 大于 4 的下标，升序，记作第 0、1、2…个命中，总数 `count`；
# 3. 标记：不是命中的，`x` 取 `y`；第 j 个命中，`x` 取 `y + 3·j + count` 折回 −8…7。
#
# 第 3 步依赖命中的**次序和总数**，所以漏一个、乱一个、少走一步，结果都会不同。整数都不大，用 FP32 或 TF32 算都没有舍入，可以逐位比较。
#
# NumPy 的版本就是正确答案：

# %%
WIDTH, THRESHOLD = 256, 4
WEIGHTS = np.random.default_rng(15).integers(-1, 2, (3, WIDTH, WIDTH))  # -1, 0 or 1


def folded(v):
    """Fold integers into -8 … 7, modulo 16."""
    return (v + 8) % 16 - 8


def tracked(x, steps):
    """Return the state x (numpy, shape (WIDTH,), whole numbers) after `steps` steps, as float32; x stays as it is."""
    v = np.asarray(x).astype(np.int64)
    for _ in range(steps):
        for weights in WEIGHTS:
            v = folded(v @ weights)
        hits = np.flatnonzero(v > THRESHOLD)
        v[hits] = folded(v[hits] + 3 * np.arange(hits.size) + hits.size)
    return v.astype(np.float32)


# %% [markdown]
# 两个引擎：`scorer` 只做第 1 步；`scorer_and_finder` 连第 2 步也做，多一个数据相关的输出 `where`。
#
# 三个内核：
#
# - `mark_known` 做第 3 步，`count` 由 CPU 给；
# - `mark` 也做第 3 步，`count` 从显存里读，**CPU 不必知道它是几**；
# - `compact` 做第 2 步，固定尺寸：每个线程数一数自己前面有几个命中，就知道自己该写到第几格。`indices` 有 256 格，用几格由 `count` 说。
#   这叫前缀和（prefix sum）压缩；这里每个线程自己从头数，元素再多就该用真正的并行前缀和。

# %% tags=["gpu"]
SOURCE = r"""
__device__ float fold(int v) { return (float)((((v + 8) % 16) + 16) % 16 - 8); }

extern "C" __global__ void compact(const float *y, int *indices, int *count, int threshold, int size) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    int before = 0;
    for (int u = 0; u < t; u++) before += y[u] > threshold;
    bool hit = y[t] > threshold;
    if (hit) indices[before] = t;
    if (t == size - 1) *count = before + hit;
}

extern "C" __global__ void mark(float *x, const float *y, const int *indices, const int *count, int threshold, int size) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size && y[t] <= threshold) x[t] = y[t];
    if (t < *count) x[indices[t]] = fold((int)y[indices[t]] + 3 * t + *count);
}

extern "C" __global__ void mark_known(float *x, const float *y, const int *indices, int count, int threshold, int size) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size && y[t] <= threshold) x[t] = y[t];
    if (t < count) x[indices[t]] = fold((int)y[indices[t]] + 3 * t + count);
}
"""
module = cp.RawModule(code=SOURCE)
compact, mark, mark_known = (module.get_function(name) for name in ("compact", "mark", "mark_known"))


def launch_compact(y, indices, count):
    """Indices of y > THRESHOLD, ascending, to the front of indices (int32, (WIDTH,)), their number to count (int32, (1,)).

    y: float32, (WIDTH,). On the current stream; returns at once. The rest of indices stays as it is.
    """
    compact((1,), (WIDTH,), (y, indices, count, np.int32(THRESHOLD), np.int32(WIDTH)))


def launch_mark(x, y, indices, count):
    """Third step, with the number of hits in device memory: count is int32, (1,). On the current stream; returns at once."""
    mark((1,), (WIDTH,), (x, y, indices, count, np.int32(THRESHOLD), np.int32(WIDTH)))


def launch_mark_known(x, y, indices, count):
    """Third step, with the number of hits known to the CPU: count is an int. On the current stream; returns at once."""
    mark_known((1,), (WIDTH,), (x, y, indices, np.int32(count), np.int32(THRESHOLD), np.int32(WIDTH)))


def define_scorer(network: "trt.INetworkDefinition", constant, find):
    """y = three layers of x, each a product folded into -8 … 7; with find also where = indices of y > THRESHOLD."""
    operation = trt.ElementWiseOperation
    y = network.add_input("x", trt.DataType.FLOAT, (1, WIDTH))
    scalar = {value: constant(np.full((1, 1), value, np.float32)) for value in (8, 16, 1 / 16)}
    for weights in WEIGHTS:
        matrix = constant(weights.astype(np.float32))
        y = network.add_matrix_multiply(y, trt.MatrixOperation.NONE, matrix, trt.MatrixOperation.NONE).get_output(0)
        y = network.add_elementwise(y, scalar[8], operation.SUM).get_output(0)
        sixteenth = network.add_elementwise(y, scalar[1 / 16], operation.PROD).get_output(0)
        whole = network.add_unary(sixteenth, trt.UnaryOperation.FLOOR).get_output(0)
        multiple = network.add_elementwise(whole, scalar[16], operation.PROD).get_output(0)
        y = network.add_elementwise(y, multiple, operation.SUB).get_output(0)
        y = network.add_elementwise(y, scalar[8], operation.SUB).get_output(0)
    name_output(network, y, "y")
    if find:
        flat = network.add_shuffle(y)
        flat.reshape_dims = (WIDTH,)
        above = network.add_elementwise(flat.get_output(0), constant(np.full(1, THRESHOLD, np.float32)), operation.GREATER)
        name_output(network, network.add_non_zero(above.get_output(0)).get_output(0), "where")


scorer = build(partial(define_scorer, find=False))
scorer_and_finder = build(partial(define_scorer, find=True))

with stream:
    warm = [cp.zeros(WIDTH, cp.float32), cp.zeros(WIDTH, cp.float32), cp.zeros(WIDTH, cp.int32), cp.zeros(1, cp.int32)]
    launch_compact(*warm[1:])
    launch_mark(*warm)
    launch_mark_known(*warm[:3], 0)
stream.synchronize()

# %% [markdown]
# 基线是一个**写得好**的逐次入队版本：它的分配器一开始就按上界备好内存，从不再分配，省到只剩非付不可的钱。

# %% tags=["gpu"]
class WholeOutput(trt.IOutputAllocator):
    """Memory for the largest output, taken once. shape: what TensorRT told last, or None."""

    def __init__(self, most):
        trt.IOutputAllocator.__init__(self)
        room = max(most, 1 << 16)  # bytes: to spare, should TensorRT ask for more than its own bound
        self.array, self.shape = cp.empty(room // 4, cp.int32), None

    def reallocate_output(self, tensor_name, memory, size, alignment):
        return self.array.data.ptr if size <= self.array.nbytes else 0

    def reallocate_output_async(self, tensor_name, memory, size, alignment, stream):
        return self.reallocate_output(tensor_name, memory, size, alignment)

    def notify_shape(self, tensor_name, shape):
        self.shape = tuple(shape)


class EagerTracker:
    """The baseline: each call is one step of the state x (cupy float32, (WIDTH,), in place), enqueued by the CPU on `stream`.

    The engine's output `where` is data-dependent, so every call waits for the GPU before it can launch the third step.
    """

    def __init__(self, x):
        self.x = x
        self.context = scorer_and_finder.create_execution_context()
        with stream:
            self.y = cp.empty(WIDTH, cp.float32)
            self.where = WholeOutput(self.context.get_max_output_size("where"))
        must(self.context.set_tensor_address("x", x.data.ptr), "设 x 的地址")
        must(self.context.set_tensor_address("y", self.y.data.ptr), "设 y 的地址")
        must(self.context.set_output_allocator("where", self.where), "设分配器")

    def __call__(self):
        must(self.context.execute_async_v3(stream.ptr), "入队")
        with stream:
            launch_mark_known(self.x, self.y, self.where.array, self.where.shape[-1])


# %% [markdown]
# ### 拆开能省多少
#
# 先试第二条路：`scorer` 录成一张图，`finder` 照旧逐次入队，两者之间不必同步，流内的先后就是依赖。
# 分数由图写进 `y`，`finder` 从同一块 `y` 里读。

# %% tags=["demo", "gpu"]
class SplitTracker:
    """One step a call: a graph of `scorer`, then `finder` enqueued eagerly on its result, then the third step."""

    def __init__(self, x):
        self.x, self.scoring, self.finding = x, scorer.create_execution_context(), finder.create_execution_context()
        must(self.finding.set_input_shape("x", (WIDTH,)), "设 x 的形状")
        with stream:
            self.y = cp.empty(WIDTH, cp.float32)
            self.where = WholeOutput(self.finding.get_max_output_size("where"))
        must(self.scoring.set_tensor_address("x", x.data.ptr), "设 x 的地址")
        must(self.scoring.set_tensor_address("y", self.y.data.ptr), "设 y 的地址")
        must(self.finding.set_tensor_address("x", self.y.data.ptr), "设 x 的地址")
        must(self.finding.set_output_allocator("where", self.where), "设分配器")
        must(self.scoring.execute_async_v3(stream.ptr), "预热")  # writes y only
        stream.synchronize()
        with stream:
            stream.begin_capture()
            try:
                must(self.scoring.execute_async_v3(stream.ptr), "捕获中入队")
            finally:
                self.graph = stream.end_capture()

    def __call__(self):
        self.graph.launch(stream)
        must(self.finding.execute_async_v3(stream.ptr), "入队")
        with stream:
            launch_mark_known(self.x, self.y, self.where.array, self.where.shape[-1])


begin = np.random.default_rng(1).integers(-8, 8, WIDTH)
with stream:
    states = [cp.asarray(begin.astype(np.float32)) for _ in range(2)]
stream.synchronize()
eager_tracker, split_tracker = EagerTracker(states[0]), SplitTracker(states[1])
for each in (eager_tracker, split_tracker):
    for _ in range(5):
        each()
stream.synchronize()
right = [np.array_equal(state.get(), tracked(begin, 5)) for state in states]
pair = lab.compare_us(eager_tracker, split_tracker, clock="end_to_end")
lab.say(
    f"走 5 步，两种做法与 NumPy 一致：{right}。走一步的端到端时间：整个逐次入队 **{pair.first.median:.0f} µs**，拆开 **{pair.second.median:.0f} µs**，"
    f"前者是后者的 **{pair.ratio:.2f} 倍**。"
)

# %% [markdown]
# 拆开不改变结果，也不用定容量。省下的是被录进图的那部分的提交时间：**静态的部分内核越多，拆开越值**。
# 等的那一次却一点没少，还多了一次入队；这里只有三层，能省多少，以你自己的数字为准。
#
# ### 改写成固定尺寸：容量从哪里来
#
# 第三条路把“一共几个”和“是哪几个”分开：下标写进一块**固定 k 格**的缓冲，个数写进旁边的一个整数，后面的内核自己去读那个整数。
# CPU 全程不知道命中了几个，也就不用等。
#
# 代价是要选 k。选小了有的请求放不下，选大了每个请求都多搬、多算。拿流量说话：随本章发布的 `hits.csv` 是 5000 个请求的命中数
# （合成的，不是真实的记录：大多数是只有几行字的照片，一部分是满页的扫描件，还有些一个字也没有）。

# %% tags=["demo"]
hits, requests = np.loadtxt("hits.csv", delimiter=",", skiprows=2, dtype=np.int64).T
fig, ax = plt.subplots()
ax.bar(hits, requests, width=1.0)
ax.set_xlabel("命中数")
ax.set_ylabel("请求数")
ax.set_xlim(-5, 320)
ax.set_title("hits.csv：每个请求有几个命中（合成的流量）")
plt.show()
rows = []
for k in (16, 32, 64, 128, 256, 512):
    lost = requests[hits > k].sum() / requests.sum()
    used_share = (np.minimum(hits, k) * requests).sum() / (k * requests.sum())
    rows.append((k, f"{lost:.2%}", f"{used_share:.1%}"))
lab.say(lab.table(("容量 k", "放不下的请求", "平均用了几成"), rows), measured=False)

# %% [markdown]
# 没有一个 k 两头都好。常用的办法是：k 取到放不下的请求足够少，**同时让个数说实话**。
# `count` 报告真正的命中数，哪怕它比 k 大；`count > k` 的请求就走慢路，用数据相关的引擎重做一遍。
# 最坏的写法是悄悄截断：结果看着正常，少的那几个永远没有人知道。
#
# 固定尺寸的几种写法：
#
# | 写法 | 适合 | 注意 |
# |:--|:--|:--|
# | 掩掉（Select，`where`） | 后面是求和、求最大值这类归约 | 用归约的单位元去填：求和填 0，求最大值填 −∞ |
# | TopK 挑出来 | 后面要下标，k 不大（TensorRT 的 k 不超过 3840） | 键（key）不能有并列，并列时谁先谁后没有保证 |
# | 前缀和压缩，自己的内核 | 元素多，或者要放进图里的别的内核之间 | 别用原子操作抢位置，次序会变 |
# %% [markdown]
# ## 练习
#
# 可以用的给定名字：`np`、`partial`、`lab`；带 GPU 的练习里还有 `cp`、`trt`、`cudart`、`stream`、`must`、`build`、`name_output`、
# `launch_compact`、`launch_mark`、`scorer`、`WIDTH`、`THRESHOLD`。演示单元（demo cell）评分时不运行，只在那里定义的名字不能用。
# 需要的库请在自己的单元里导入。
#
# ### 练习一：这个网络进得了图吗（3 分）
#
# 写 `plan_outputs(layers, outputs)`：看一份网络的描述，说出每个输出是哪一种“多大”、最多占多少字节，以及整个引擎能不能被捕获。不需要 GPU。
#
# `layers` 是一列字典，前面的层先算。每层有名字 `name` 和种类 `op`，其余的键看种类：
#
# | `op` | 其余的键 | 输出的形状 |
# |:--|:--|:--|
# | `"input"` | `min`、`max`：Profile 里的最小、最大形状 | 两者相同的维是静态的，不同的维可推断 |
# | `"values"` | `min`、`max`：形状输入的值的范围，各一个数的列表 | 只能当 `topk` 的 `k` 用；两者相同，值就是定的，由它决定的那一维是静态的 |
# | `"pointwise"` | `of`：输入层的名字 | 和 `of` 一样 |
# | `"topk"` | `of`；`k`：整数，或者一个 `"values"` 层的名字 | 最后一维换成 k；k 是名字时，大小由值决定，上界取最大的值 |
# | `"nonzero"` | `of` | (维数, 命中数) |
# | `"nms"` | `scores`：形状是 (批, 框, 类) 的层；`limit`：每类最多几个 | (框数, 3) |
# | `"gather"` | `of`；`at`：一个 `"nonzero"` 层 | (`at` 的命中数, `of` 除第一维以外的各维) |
# | `"sum"` | `of`、`axis`：去掉的那一维（0 起算，不是负数） | 去掉 `axis` 那一维 |
#
# `outputs` 是输出层的名字。返回两个值 `(sizes, capturable)`：
#
# - `sizes`：列表，和 `outputs` 同序，每项 `(kind, bytes)`。`kind` 是 `"static"`、`"inferred"`、`"data"` 之一，看形状里最不确定的那一维；
#   `bytes` 是上界，每个元素都按 4 字节，可推断的维取最大，数据相关的维取上一节的上界；
# - `capturable`：`True` 或 `False`。这道练习的规则是从严的：**通向任何一个输出的路上**，有数据相关的张量就算不能捕获
#   （个别引擎在个别版本里也许能，规则不去赌）；不通向任何输出的层会被构建器删掉，不算数。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 给每一维记两件事：最大多少，属于哪一种。层一个一个往下推，输出的种类就是各维里最不确定的那一种。
# “先找后加”那个引擎，输出是静态的，为什么进不了图？所以能不能捕获，要另外沿着输入往回找，不能只看输出的形状。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 每一维用元组 `(最大值, 种类)`，形状是它们的列表；`math.prod` 求乘积，空的乘积是 1。
# 给三种种类排个次序，`max(…, key=次序.index)` 就能取最不确定的一种；没有维的张量是静态的，`max` 要给 `default`。
# 往回找：从 `outputs` 出发，用一个集合记住到过的层。
#
# </details>

# %% solution="plan_outputs"
def plan_outputs(layers, outputs):
    """Size up the outputs of a described network, and tell whether its engine can be captured.

    layers: list of dict, as described above; outputs: list of names. Returns (sizes, capturable): sizes is a list of
    (kind, bytes), in the order of outputs; kind "static", "inferred" or "data"; bytes int, the upper bound at 4 bytes
    an element. capturable: bool.
    """
    ### BEGIN SOLUTION: 先逐层推出每一维的最大值和种类，再从输出往回走，看路上有没有数据相关的层
    import math

    kinds = ("static", "inferred", "data")
    shapes, feeds = {}, {}
    for layer in layers:
        op = layer["op"]
        feeds[layer["name"]] = [layer[key] for key in ("of", "at", "scores", "k") if isinstance(layer.get(key), str)]
        of = shapes.get(layer.get("of"))
        if op in ("input", "values"):
            shape = [(most, "static" if least == most else "inferred") for least, most in zip(layer["min"], layer["max"], strict=True)]
        elif op == "pointwise":
            shape = of
        elif op == "topk":
            k = layer["k"]
            shape = [*of[:-1], shapes[k][0] if isinstance(k, str) else (k, "static")]
        elif op == "nonzero":
            shape = [(len(of), "static"), (math.prod(most for most, _ in of), "data")]
        elif op == "nms":
            batch, boxes, classes = (most for most, _ in shapes[layer["scores"]])
            shape = [(batch * classes * min(layer["limit"], boxes), "data"), (3, "static")]
        elif op == "gather":
            shape = [shapes[layer["at"]][1], *of[1:]]
        else:
            shape = of[: layer["axis"]] + of[layer["axis"] + 1 :]
        shapes[layer["name"]] = shape

    needed, todo = set(), list(outputs)
    while todo:
        name = todo.pop()
        if name not in needed:
            needed.add(name)
            todo += feeds[name]
    uncertain = {layer["name"] for layer in layers if layer["op"] in ("nonzero", "nms")}
    sizes = []
    for name in outputs:
        kind = max((each for _, each in shapes[name]), key=kinds.index, default="static")
        sizes.append((kind, 4 * math.prod(most for most, _ in shapes[name])))
    return sizes, not needed & uncertain
    ### END SOLUTION


# %% test="plan_outputs" kind="answer" points=3
tokens = {"name": "x", "op": "input", "min": [1, 8], "max": [16, 512]}
image = {"name": "x", "op": "input", "min": [1, 720, 1280], "max": [1, 1080, 1920]}
check.equal(
    student.plan_outputs([tokens, {"name": "y", "op": "pointwise", "of": "x"}], ["y"]),
    ([("inferred", 32768)], True),
    why="逐元素的层，形状跟着输入走：可推断，最多 16 × 512 个元素，4 字节一个；入队之前就知道多大，能捕获。",
)
check.equal(
    student.plan_outputs([image, {"name": "where", "op": "nonzero", "of": "x"}], ["where"]),
    ([("data", 24883200)], False),
    why="三维输入的 NonZero：每个命中要 3 个坐标，上界是 3 × 1080 × 1920 个元素；命中数由数据决定，不能捕获。",
)
check.equal(
    student.plan_outputs(
        [
            {"name": "k", "op": "values", "min": [1], "max": [64]},
            {"name": "x", "op": "input", "min": [1, 4096], "max": [1, 4096]},
            {"name": "best", "op": "topk", "of": "x", "k": "k"},
            {"name": "ten", "op": "topk", "of": "x", "k": 10},
        ],
        ["ten", "best"],
    ),
    ([("static", 40), ("inferred", 256)], True),
    why="k 写死的 TopK 是静态的；k 来自形状输入的，大小由值决定，入队之前就知道：可推断，上界取值的最大值。两者都能捕获。",
)
check.equal(
    student.plan_outputs([{"name": "s", "op": "input", "min": [1, 100, 5], "max": [4, 100, 5]}, {"name": "kept", "op": "nms", "scores": "s", "limit": 300}], ["kept"]),
    ([("data", 24000)], False),
    why="NMS：每一批、每一类最多留下 min(limit, 框数) 个，这里是 4 × 5 × 100 个框，每个 3 个数。limit 比框数大时，框数说了算。",
)
### BEGIN HIDDEN TESTS
FOUND_SUM = [
    {"name": "x", "op": "input", "min": [200, 8], "max": [200, 8]},
    {"name": "flag", "op": "input", "min": [200], "max": [200]},
    {"name": "where", "op": "nonzero", "of": "flag"},
    {"name": "rows", "op": "gather", "of": "x", "at": "where"},
    {"name": "total", "op": "sum", "of": "rows", "axis": 0},
]
check.equal(student.plan_outputs(FOUND_SUM, ["total"]), ([("static", 32)], False), why="输出的形状是静态的，路上却经过了长度由数据决定的张量：输出静态，仍然不能捕获。")
check.equal(student.plan_outputs(FOUND_SUM, ["x"]), ([("static", 6400)], True), why="NonZero 不通向任何输出，构建器会删掉它，不应当算数。")
check.equal(student.plan_outputs(FOUND_SUM, ["rows"]), ([("data", 6400)], False), why="Gather 取出来的行数，就是 NonZero 的命中数：数据相关，上界是全部命中。")
SUMMED = [
    {"name": "x", "op": "input", "min": [200, 4], "max": [200, 8]},
    {"name": "where", "op": "nonzero", "of": "x"},
    {"name": "rows", "op": "gather", "of": "x", "at": "where"},
    {"name": "total", "op": "sum", "of": "rows", "axis": 0},
    {"name": "k", "op": "values", "min": [3], "max": [3]},
    {"name": "best", "op": "topk", "of": "total", "k": "k"},
]
check.equal(student.plan_outputs(SUMMED, ["total"]), ([("inferred", 32)], False), why="行数由数据决定的那一维被 sum 去掉了，剩下的一维是可推断的：种类要一维一维地记。")
check.equal(student.plan_outputs(SUMMED, ["best"]), ([("static", 12)], False), why="形状输入的最小值和最大值相同，就是定值：由它决定的那一维是静态的。")


def dims(known, name):
    """Dims (most, rank of the kind) of a layer; known: the layers by name."""
    layer = known[name]
    op = layer["op"]
    if op in ("input", "values"):
        return [(high, int(low != high)) for low, high in zip(layer["min"], layer["max"], strict=True)]
    if op == "nms":
        b, n, c = (most for most, _ in dims(known, layer["scores"]))
        return [(b * c * min(n, layer["limit"]), 2), (3, 0)]
    of = dims(known, layer["of"])
    if op == "topk":
        return of[:-1] + (dims(known, layer["k"]) if isinstance(layer["k"], str) else [(layer["k"], 0)])
    if op == "nonzero":
        return [(len(of), 0), (int(np.prod([most for most, _ in of])), 2)]
    if op == "gather":
        return dims(known, layer["at"])[1:] + of[1:]
    return of[: layer["axis"]] + of[layer["axis"] + 1 :] if op == "sum" else of


def pictured(layers, outputs):
    """The rule once more, by recursion over dims."""
    known = {layer["name"]: layer for layer in layers}

    def fixed(name):
        layer = known[name]
        return layer["op"] not in ("nonzero", "nms") and all(fixed(layer[key]) for key in ("of", "at", "scores", "k") if isinstance(layer.get(key), str))

    names = ("static", "inferred", "data")
    shapes = [dims(known, name) for name in outputs]
    sizes = [(names[max((kind for _, kind in shape), default=0)], 4 * int(np.prod([most for most, _ in shape], dtype=np.int64))) for shape in shapes]
    return sizes, all(fixed(name) for name in outputs)


def drawn_network():
    """A random network: two inputs, a k, and eight layers, each fed by an earlier one that suits it."""
    least = [int(v) for v in secret.integers(1, 5, 3)]
    most = [low + int(secret.integers(0, 2) * secret.integers(1, 30)) for low in least]
    length = int(secret.integers(5, 90))
    layers = [
        {"name": "x", "op": "input", "min": least, "max": most},
        {"name": "flags", "op": "input", "min": [length], "max": [length]},
        {"name": "k", "op": "values", "min": [1], "max": [int(secret.choice([1, 7, 60]))]},
    ]
    ranks = {"x": 3, "flags": 1}
    found = []
    for number in range(8):
        name, op = f"n{number}", str(secret.choice(["pointwise", "topk", "nonzero", "nms", "gather", "sum"]))
        plain = [each for each, rank in ranks.items() if rank]
        of = str(secret.choice(plain))
        layer, rank = {"name": name, "op": op, "of": of}, ranks[of]
        if op == "topk":
            width = dims({each["name"]: each for each in layers}, of)[-1][0]  # no more can be the best
            layer["k"] = "k" if secret.integers(0, 2) and layers[2]["max"][0] <= width else int(secret.integers(1, min(9, width + 1)))
        elif op == "nonzero":
            rank = 2
            found.append(name)
        elif op == "nms":
            threes = [each for each in plain if ranks[each] == 3]
            layer = {"name": name, "op": op, "scores": str(secret.choice(threes)), "limit": int(secret.integers(1, 40))}
            rank = 2
        elif op == "gather":
            if not found:
                layer["op"] = "pointwise"
            else:
                layer["at"] = str(secret.choice(found))
        elif op == "sum":
            layer["axis"], rank = int(secret.integers(0, rank)), rank - 1
        layers.append(layer)
        ranks[name] = rank
    outputs = [str(each) for each in secret.choice([*ranks], 3, replace=False)]
    return layers, outputs


networks = [drawn_network() for _ in range(30)]
answers = [student.plan_outputs(*each) for each in networks]
wanted = [pictured(*each) for each in networks]
check.equal([[kind for kind, _ in sizes] for sizes, _ in answers], [[kind for kind, _ in sizes] for sizes, _ in wanted], why="随机的网络里，有的输出种类判断错了。要看最不确定的那一维；被 sum 去掉的维不再算数；形状输入的最小值和最大值相同，就是定值。")
check.equal([[size for _, size in sizes] for sizes, _ in answers], [[size for _, size in sizes] for sizes, _ in wanted], why="随机的网络里，有的上界算错了。可推断的维取最大值；NonZero 的上界要乘以维数；NMS 每类最多几个，要和框数取小。")
check.equal([fine for _, fine in answers], [fine for _, fine in wanted], why="随机的网络里，有的能不能捕获判断错了。要沿着每个输出的所有来路往回找，包括 gather 的 at、topk 的 k。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习二：一个不出错的定位器（4 分）
#
# `locator` 是一个两种麻烦都有的引擎：`x` 先按形状张量 `grid` 排成几行几列，再找出大于 4 的元素，输出它们的 (行, 列)。
#
# - `x`：显存里的 FP32，形状 (n,)，n 从 1 到 16384；行数 × 列数必须等于 n；
# - `grid`：主机上的 INT64，两个值各从 1 到 128；
# - `where`：INT32，形状 (2, 命中数)，第一行是行号，第二行是列号。
#
# 写两个类。**`OutputBuffer(limit=None)`**：`where` 的分配器。
#
# 1. 只在手里的内存不够时才分配，够用就把原来的再给一次；`limit` 是最多允许的字节数，TensorRT 要得更多（不管它要的是实际大小还是上界）、
#    或者显存真的不够时返回 0，**不许在回调里抛异常**；
# 2. `array(dtype)` 返回刚写好的输出：这块内存上的 CuPy 数组，形状是 TensorRT 通知的那个。形状没有来，或者带着 −1，就抛出 `RuntimeError`。
#
# **`Locator(engine, limit=None)`**：外壳已经给出，你来写 `start`、`check` 和 `infer`。
# `infer(x, grid)` 在 `stream` 上做一次，返回 CuPy 数组 (2, 命中数)，到下一次 `infer` 之前有效；`x` 里的数据已经就绪，不必等。
# 平稳以后（输出不再变大）一次显存也不分配。不合法的请求在**碰到 TensorRT 的执行上下文之前**拒绝（说不通的形状真的入队，
# 进程可能当场死掉，前面的实验试过），而且之后的请求照常。测试交来的 `engine` 有时是假扮的（会照测试的安排，让某个调用返回 `False`），不要检查它的类型。
#
# | 情形 | 抛出 |
# |:--|:--|
# | 数组不在它该在的地方（`x` 不是 CuPy 数组，`grid` 不是 NumPy 数组），或者元素类型不对 | `TypeError` |
# | `x` 不是一维、不连续，`grid` 不是两个数，值超出范围，行数 × 列数不等于 n | `ValueError` |
# | 分配器给不出内存 | `MemoryError` |
# | TensorRT 因为别的原因拒绝 | `RuntimeError` |

# %%
def located(values, grid):
    """The right answer (numpy): where values, laid out as grid, exceed THRESHOLD: int32, (2, hits), in row-major order."""
    return np.stack(np.nonzero(values.reshape(tuple(grid)) > THRESHOLD)).astype(np.int32)


# %% tags=["gpu"]
GRID_MOST = 128  # rows and columns: 1 … GRID_MOST


def define_locator(network: "trt.INetworkDefinition", constant):
    """where = (row, column) of the elements of x, laid out as grid = (rows, columns), above THRESHOLD: shape (2, hits)."""
    x = network.add_input("x", trt.DataType.FLOAT, (-1,))
    grid = network.add_input("grid", trt.DataType.INT64, (2,))
    laid_out = network.add_shuffle(x)
    laid_out.set_input(1, grid)
    above = network.add_elementwise(
        laid_out.get_output(0), constant(np.full((1, 1), THRESHOLD, np.float32)), trt.ElementWiseOperation.GREATER
    )
    name_output(network, network.add_non_zero(above.get_output(0)).get_output(0), "where")


locator = build(
    define_locator,
    shapes={"x": ((1,), (1024,), (GRID_MOST**2,))},
    values={"grid": ((1, 1), (32, 32), (GRID_MOST, GRID_MOST))},
)

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 哪些东西做一次就够（执行上下文、分配器、一块主机上的 `grid`），哪些每次都要做（形状、地址、检查）？
# 分配器给不出内存时只能返回 0，那么 `infer` 怎么知道入队失败是因为内存，还是因为别的？
# 入队失败过的执行上下文里留下了什么，没有人承诺；怎样保证下一个请求不受它影响？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `engine.get_tensor_location(name) == trt.TensorLocation.HOST`；`trt.nptype(engine.get_tensor_dtype(name))` 是它要的 NumPy 类型。
# `cp.cuda.alloc(字节数)` 返回的对象有 `.ptr`，显存不够时抛出 `MemoryError`（的子类）；`cp.ndarray(形状, 类型, 那个对象)` 就是它上面的数组。
# `context.set_output_allocator("where", …)`，`set_input_shape`，`set_tensor_address`（NumPy 数组的地址是 `.ctypes.data`，CuPy 的是 `.data.ptr`），
# `execute_async_v3(stream.ptr)`。把入队放进 `with stream:`，回调里的分配就归到这条流的内存池。
#
# </details>

# %% solution="OutputBuffer" tags=["gpu"]
class OutputBuffer(trt.IOutputAllocator):
    """Device memory for one data-dependent output: grows when it has to, else is given again.

    limit: most bytes, None for no limit. refused: bytes that were asked for in vain since the last reset(), 0 for none.
    """

    def __init__(self, limit=None):
        ### BEGIN SOLUTION: 先调用 trt.IOutputAllocator.__init__(self)，再备好要记住的东西：内存、它有多大、形状、被拒绝的大小
        trt.IOutputAllocator.__init__(self)
        self.limit, self.memory, self.capacity = limit, None, 0
        self.reset()
        ### END SOLUTION

    def reset(self):
        """Forget the last shape and the last refusal, keep the memory. To be called before each enqueue."""
        self.shape, self.refused = None, 0

    def reallocate_output(self, tensor_name, memory, size, alignment):
        """Called by TensorRT: the address of at least `size` bytes of device memory, 0 if there are none. Never raises."""
        ### BEGIN SOLUTION: 手里的够大就再给一次；不够才分配；超过 limit 或者分配失败就记下来，返回 0。size 可能是 0，也要给一个真的地址
        if self.memory is None or size > self.capacity:
            try:
                if self.limit is not None and size > self.limit:
                    raise MemoryError
                self.memory, self.capacity = cp.cuda.alloc(max(size, 1)), size
            except MemoryError:
                self.refused = size
                return 0
        return self.memory.ptr
        ### END SOLUTION

    def reallocate_output_async(self, tensor_name, memory, size, alignment, stream):
        """The same, as some versions of TensorRT call it."""
        return self.reallocate_output(tensor_name, memory, size, alignment)

    def notify_shape(self, tensor_name, shape):
        """Called by TensorRT: the output's shape is known. Never raises."""
        self.shape = tuple(shape)

    def array(self, dtype):
        """The output as a cupy array on this memory. RuntimeError if its shape is not known, or not wholly."""
        ### BEGIN SOLUTION: 先确认形状来了、没有 −1，再用 cp.ndarray(形状, 类型, 内存) 把它套在手里的内存上
        if self.shape is None or min(self.shape) < 0:
            raise RuntimeError(f"TensorRT 没有说清楚输出的形状：{self.shape}")
        return cp.ndarray(self.shape, dtype, self.memory)
        ### END SOLUTION


# %% solution="Locator" tags=["gpu"]
class Locator:
    """Runs the engine `locator`. infer() may be called with another size each time."""

    def __init__(self, engine: "trt.ICudaEngine", limit=None):
        """engine: of define_locator. limit: most bytes that the output may take, None for no limit."""
        self.engine, self.limit = engine, limit
        self.grid = np.ones(2, np.int64)  # the host memory that the engine reads the grid from
        self.start()

    def start(self):
        """Have a fresh execution context, self.context, with a fresh OutputBuffer, self.found, for its output."""
        ### BEGIN SOLUTION: 造执行上下文和 OutputBuffer，用 set_output_allocator 把它们接上；两个都存进 self，才有人留住
        self.context = self.engine.create_execution_context()
        self.found = OutputBuffer(self.limit)
        must(self.context.set_output_allocator("where", self.found), "设分配器")
        ### END SOLUTION

    def check(self, x, grid):
        """TypeError or ValueError, as the table says, for a request that must not reach the engine."""
        ### BEGIN SOLUTION: 先问引擎每个输入住在哪里、是什么类型，对不上就抛 TypeError；再查维数、范围、乘积，对不上就抛 ValueError
        for name, array in (("x", x), ("grid", grid)):
            on_host = self.engine.get_tensor_location(name) == trt.TensorLocation.HOST
            if not isinstance(array, np.ndarray if on_host else cp.ndarray):
                raise TypeError(f"{name} 应当是{'主机上的 NumPy' if on_host else '显存里的 CuPy'} 数组，收到的是 {type(array).__name__}")
            dtype = np.dtype(trt.nptype(self.engine.get_tensor_dtype(name)))
            if array.dtype != dtype:
                raise TypeError(f"{name} 的元素类型应当是 {dtype}，收到的是 {array.dtype}")
        if x.ndim != 1 or not x.flags.c_contiguous:
            raise ValueError(f"x 应当是一维、连续的，收到的形状是 {x.shape}")
        if grid.shape != (2,) or not all(1 <= each <= GRID_MOST for each in grid.tolist()):
            raise ValueError(f"grid 应当是两个 1 到 {GRID_MOST} 的整数，收到的是 {grid.tolist()}")
        if int(grid[0]) * int(grid[1]) != x.size:
            raise ValueError(f"{x.size} 个数排不成 {int(grid[0])} 行 {int(grid[1])} 列")
        ### END SOLUTION

    def infer(self, x, grid):
        """Find the elements of x above THRESHOLD, x laid out as grid = (rows, columns). Runs on `stream`.

        x: cupy float32, (n,), contiguous; grid: numpy int64, (2,). Returns cupy int32, (2, hits), valid until the next
        call. TypeError, ValueError: refused before the engine was touched. MemoryError: no memory for the output.
        RuntimeError: TensorRT refused. After any of them the next call works.
        """
        self.check(x, grid)
        ### BEGIN SOLUTION: 把 grid 抄进 self.grid，设形状和地址，入队；入队失败就分清是不是内存的事，并为下一个请求重新 start
        self.grid[...] = grid
        self.x = x  # kept until the next call: the GPU may still be reading it when this one returns
        self.found.reset()
        must(self.context.set_input_shape("x", x.shape), "设 x 的形状")
        must(self.context.set_tensor_address("x", x.data.ptr), "设 x 的地址")
        must(self.context.set_tensor_address("grid", self.grid.ctypes.data), "设 grid 的地址")
        with stream:
            ok = self.context.execute_async_v3(stream.ptr)
        refused = self.found.refused
        if refused or not ok:
            told = "；".join(lab.trt_errors())
            stream.synchronize()  # nothing may run in a context that goes away
            self.start()
            if refused:
                raise MemoryError(f"输出要 {refused} 字节，给不出")
            raise RuntimeError(f"入队没有成功：{told}")
        return self.found.array(trt.nptype(self.engine.get_tensor_dtype("where")))
        ### END SOLUTION


# %% test="locator_result" kind="structure" points=2 tags=["gpu"]
seeker = student.Locator(student.value("locator"))
ramp = np.arange(12, dtype=np.float32)
for layout in ((3, 4), (2, 6), (12, 1)):
    layout = np.array(layout, np.int64)
    check.equal(
        seeker.infer(on_gpu(ramp), layout),
        reference.located(ramp, layout),
        why="0 到 11 排成几行几列，大于 4 的有 7 个，(行, 列) 不对。每次入队之前都把这一次的 grid 写进主机内存了吗？返回的形状是 TensorRT 通知的那个吗？",
    )
ON_GPU = """
def on_gpu(array):
    import cupy
    return isinstance(array, cupy.ndarray)
"""
check.that(student.define(ON_GPU, "on_gpu")(seeker.infer(on_gpu(ramp), np.array([3, 4], np.int64))), why="infer 应当返回 CuPy 数组，结果留在显存里，不要拷回主机。")
check.equal(seeker.infer(on_gpu(ramp * 0), np.array([3, 4], np.int64)), np.zeros((2, 0), np.int32), why="一个命中也没有时，应当返回形状 (2, 0) 的数组，不是 None，也不是上一次的结果。")
### BEGIN HIDDEN TESTS
def drawn_case(density, most=128):
    """Random values of which about `density` exceed 4, and a grid that fits them."""
    layout = secret.integers(1, most + 1, 2).astype(np.int64)
    size = int(layout.prod())
    values = np.where(secret.random(size) < density, secret.uniform(4.5, 9, size), secret.uniform(-9, 4, size))
    return values.astype(np.float32), layout


for density in (0.0, 0.01, 0.3, 1.0, 0.02):
    values, layout = drawn_case(density)
    check.equal(seeker.infer(on_gpu(values), layout), reference.located(values, layout), why="换了大小和命中的比例，结果不对。形状、地址、grid 是不是每次都重新设？分配器返回的内存够大吗？")
lone = np.full(128 * 128, -1, np.float32)
lone[-1] = 5.0
check.equal(seeker.infer(on_gpu(lone), np.array([128, 128], np.int64)), np.array([[127], [127]], np.int32), why="最大的尺寸、只有一个命中，结果不对。")
# One buffer changes in place: nothing may be remembered of an earlier call.
values, layout = drawn_case(0.5, 60)
changing = on_gpu(values)
for density in (0.2, 0.9):
    values = np.where(secret.random(values.size) < density, 8, 0).astype(np.float32)
    changing.write(values)
    check.equal(seeker.infer(changing, layout), reference.located(values, layout), why="同一块缓冲就地换了数据，结果没有跟着变。")
check.equal(seeker.infer(changing, layout[::-1].copy()), reference.located(values, layout[::-1]), why="同样的数据换了行数和列数，结果不对。")
### END HIDDEN TESTS

# %% test="locator_refusals" kind="structure" points=2 tags=["gpu"]
seeker = student.Locator(student.value("locator"))
ramp, layout = np.arange(12, dtype=np.float32), np.array([3, 4], np.int64)
kept = seeker.infer(on_gpu(ramp), layout)
check.raises("TypeError", seeker.infer, ramp, layout, why="x 是 NumPy 数组，在主机上：应当在碰到引擎之前抛出 TypeError。")
check.raises("TypeError", seeker.infer, on_gpu(ramp), on_gpu(layout), why="grid 在显存里，CPU 去读它会让进程崩溃：应当先问 get_tensor_location，抛出 TypeError。")
check.raises("TypeError", seeker.infer, on_gpu(ramp), layout.astype(np.int32), why="grid 是 INT32，TensorRT 会把两个数读成一个：应当抛出 TypeError。")
check.raises("ValueError", seeker.infer, on_gpu(ramp), np.array([5, 5], np.int64), why="12 个数排不成 5 × 5：应当抛出 ValueError。")
check.equal(kept, reference.located(ramp, layout), why="被拒绝的请求改动了上一次的结果。")
check.equal(seeker.infer(on_gpu(ramp), layout), reference.located(ramp, layout), why="拒绝了几个请求以后，合法的请求不对了。")
### BEGIN HIDDEN TESTS
check.raises("TypeError", seeker.infer, on_gpu(ramp.astype(np.float64)), layout, why="x 的元素类型不对，应当抛出 TypeError。")
check.raises("TypeError", seeker.infer, on_gpu(ramp.astype(np.int32)), layout, why="x 的元素类型不对，应当抛出 TypeError。")
check.raises("TypeError", seeker.infer, on_gpu(ramp), [3, 4], why="grid 应当是 NumPy 数组；收到别的，应当抛出 TypeError。")
check.raises("ValueError", seeker.infer, on_gpu(ramp.reshape(3, 4)), layout, why="x 应当是一维的；收到二维的，应当抛出 ValueError。")
check.raises("ValueError", seeker.infer, on_gpu(ramp), np.array([3, 4, 1], np.int64), why="grid 不是两个数，应当抛出 ValueError。")
check.raises("ValueError", seeker.infer, on_gpu(ramp), np.array([12], np.int64), why="grid 不是两个数，应当抛出 ValueError。")
for beyond in ([129, 2], [2, 129]):
    check.raises("ValueError", seeker.infer, on_gpu(np.zeros(258, np.float32)), np.array(beyond, np.int64), why="行数或列数超出了 Profile 里值的范围，应当抛出 ValueError。两个都要查。")
check.raises("ValueError", seeker.infer, on_gpu(np.zeros(12, np.float32)), np.array([-3, -4], np.int64), why="负的行数、列数，乘积碰巧对，也应当抛出 ValueError。")
check.equal(seeker.infer(on_gpu(ramp), layout), reference.located(ramp, layout), why="拒绝了几个请求以后，合法的请求不对了。")

STRIDED = """
def strided(runner, x, grid):
    return runner.infer(x[::2], grid)
"""
check.raises("ValueError", student.define(STRIDED, "strided"), seeker, on_gpu(np.arange(24, dtype=np.float32)), layout, why="x 不连续（每隔一个取一个），TensorRT 会把它当成连续的来读；应当抛出 ValueError。")

# An engine whose contexts note what they are told to do, and answer False once where they are asked to.
DOUBTFUL = """
class Context:
    def __init__(self, context, engine):
        self._context, self._engine = context, engine

    def __getattr__(self, name):
        found = getattr(self._context, name)
        if not name.startswith(("set_", "execute", "infer_shapes")):
            return found

        def noted(*args, **kwargs):
            self._engine.calls += 1
            if self._engine.refused == name:
                self._engine.refused = None
                return False
            return found(*args, **kwargs)

        return noted


class Engine:
    def __init__(self, engine):
        self._engine, self.calls, self.refused = engine, 0, None

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def create_execution_context(self, *args, **kwargs):
        return Context(self._engine.create_execution_context(*args, **kwargs), self)

    def refuse(self, name):
        self.refused = name
"""
doubtful = student.define(DOUBTFUL, "Engine")(student.value("locator"))
doubter = student.Locator(doubtful)
check.equal(doubter.infer(on_gpu(ramp), layout), reference.located(ramp, layout), why="合法的请求，结果不对。")
before = doubtful.get("calls")
for error, wrong in (("TypeError", (ramp, layout)), ("TypeError", (on_gpu(ramp), layout.astype(np.int32))), ("ValueError", (on_gpu(ramp), np.array([5, 5], np.int64))), ("ValueError", (on_gpu(ramp.reshape(3, 4)), layout))):
    check.raises(error, doubter.infer, *wrong, why=f"不合法的请求，应当抛出 {error}。")
check.equal(doubtful.get("calls"), before, why="不合法的请求，应当在碰到执行上下文之前就拒绝：set_input_shape 这些都还没有调用。")
longer = np.arange(20, dtype=np.float32)  # another size each time: who sets a shape only when it changes is right, too
for refused in ("execute_async_v3", "set_input_shape"):
    doubtful.refuse(refused)
    check.raises("RuntimeError", doubter.infer, on_gpu(longer), np.array([4, 5], np.int64), why="TensorRT 的一个调用返回了 False，和内存无关：应当抛出 RuntimeError。每个返回值都看了吗？")
    doubtful.refuse(None)
    check.equal(doubter.infer(on_gpu(ramp + 1), layout), reference.located(ramp + 1, layout), why="TensorRT 拒绝过一次以后，合法的请求不对了。")

# Out of memory: the limit refuses a large output, and the next small one goes through. TensorRT may ask for the real size, a
# bound for this shape, or the most of the profile: an allocator of our own is asked first, and the limit drawn between.
ASKED_FOR = """
import cupy
import tensorrt as trt


class Meter(trt.IOutputAllocator):
    def __init__(self):
        trt.IOutputAllocator.__init__(self)
        self.most, self.kept = 0, []

    def reallocate_output(self, tensor_name, memory, size, alignment):
        self.most = max(self.most, size)
        self.kept.append(cupy.cuda.alloc(max(size, 1)))
        return self.kept[-1].ptr

    def reallocate_output_async(self, tensor_name, memory, size, alignment, stream):
        return self.reallocate_output(tensor_name, memory, size, alignment)

    def notify_shape(self, tensor_name, shape):
        pass


def asked_for(engine: "trt.ICudaEngine", stream, x, grid):
    context, meter = engine.create_execution_context(), Meter()
    fine = [context.set_output_allocator("where", meter), context.set_input_shape("x", x.shape)]
    fine += [context.set_tensor_address("x", x.data.ptr), context.set_tensor_address("grid", grid.ctypes.data)]
    fine.append(context.execute_async_v3(stream.ptr))
    stream.synchronize()
    return meter.most if all(fine) else 0
"""
everything, small = np.full(64 * 64, 7, np.float32), np.full(8, 7, np.float32)
many, few = np.array([64, 64], np.int64), np.array([2, 4], np.int64)
asked_for = reference.define(ASKED_FOR, "asked_for")
large_bytes, small_bytes = (asked_for(reference.value("locator"), reference.value("stream"), on_gpu(each), layout) for each, layout in ((everything, many), (small, few)))
differ = large_bytes > small_bytes
narrow = student.Locator(student.value("locator"), (large_bytes + small_bytes) // 2 if differ else large_bytes - 1)
if differ:
    check.equal(narrow.infer(on_gpu(small), few), reference.located(small, few), why="输出没有超过 limit，应当照常。")
for _ in range(2):
    check.raises("MemoryError", narrow.infer, on_gpu(everything), many, why="输出超过了 limit：分配器应当返回 0，infer 应当抛出 MemoryError。")
    if differ:
        check.equal(narrow.infer(on_gpu(small), few), reference.located(small, few), why="一次内存不够以后，放得下的请求不对了。失败之后，执行上下文和分配器都恢复了吗？")
check.equal(seeker.infer(on_gpu(small), few), reference.located(small, few), why="一个定位器内存不够以后，别的定位器也不对了。")

# Steady: no device memory is taken once the output has been as large as it gets.
COUNTED = """
def counted(runner, x, grid, times):
    import cupy

    class Count(cupy.cuda.MemoryHook):
        name = "count"

        def __init__(self):
            self.times = 0

        def malloc_preprocess(self, **asked):
            self.times += 1

    with Count() as count:
        for _ in range(times):
            runner.infer(x, grid)
    return count.times
"""
counted = student.define(COUNTED, "counted")
steady = student.Locator(student.value("locator"))
whole, square = on_gpu(everything), np.array([64, 64], np.int64)
check.that(counted(steady, whole, square, 12) <= 6, why="输出一样大的请求做了十几次，分配显存的次数却跟着涨。手里的内存够大，就应当再给一次。")
whole.write(np.where(secret.random(everything.size) < 0.3, everything, 0))
check.that(counted(steady, whole, square, 10) == 0, why="输出变小了，还是在分配显存。容量和形状是两回事：形状变小，容量不用变。")


ASKED = """
def asked(buffer, sizes):
    # What TensorRT would do, and whether anything was thrown: it must not be, in a callback.
    told = []
    for number, size in enumerate(sizes):
        call = buffer.reallocate_output_async if number % 2 else buffer.reallocate_output
        extra = (0,) if number % 2 else ()
        try:
            told.append(bool(call("where", 0, size, 256, *extra)))
        except Exception as error:
            told.append(type(error).__name__)
    return told


def unknown(buffer, shape):
    buffer.reallocate_output("where", 0, 64, 256)
    if shape is not None:
        buffer.notify_shape("where", shape)
    buffer.array("int32")
"""
asked = student.define(ASKED, "asked")
check.equal(asked(student.OutputBuffer(1000), [0, 8, 1000, 1001, 16, 1 << 40]), [True, True, True, False, True, False], why="直接向 OutputBuffer 要内存：不超过 limit 的（包括 0 字节）都要给真的地址，超过的返回 0；被拒绝以后，手里那块还能再给。")
check.equal(asked(student.OutputBuffer(), [700 << 30, 64]), [False, True], why="没有 limit，但显存真的不够：应当返回 0，而不是在回调里抛异常；之后放得下的照给。")
check.raises("RuntimeError", student.define(ASKED, "unknown"), student.OutputBuffer(), (2, -1), why="通知来的形状带着 −1：array 应当抛出 RuntimeError，别拿着 −1 往下算。")
check.raises("RuntimeError", student.define(ASKED, "unknown"), student.OutputBuffer(), None, why="没有收到形状：array 应当抛出 RuntimeError。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：NonZero 改写成固定尺寸（2 分）
#
# 写 `add_first_hits(network, constant, scores, n, k, threshold)`：往网络里添几层，找出每一行里大于 `threshold` 的**前 k 个**下标，形状不依赖数据。
#
# - `scores`：网络里的张量，FP32，形状 (−1, n)，一行一个请求，批大小 1、4、8、16 都可能；`n`、`k` 是构建时就知道的整数，1 ≤ k ≤ n ≤ 3840；
# - `constant(array)` 和 `build` 里的一样，把 NumPy 数组变成网络里的张量；
# - 返回两个张量 `(indices, count)`：`indices` 是 INT32，(−1, k)，命中的下标**升序**排列，不足 k 个的位置填 −1；
#   `count` 是 INT32，(−1, 1)，这一行**真正**的命中数，比 k 大也照实说。
#
# 分数有并列、一个命中也没有、全部命中，都要对。给定的 `Compactor` 负责构建、检查缓冲、运行和捕获。

# %% tags=["gpu"]
class Compactor:
    """The network of `add_first_hits` as an engine of its own. Buffers are cupy arrays; work goes to `stream`.

    scores: float32, (batch, n), batch 1 … 16; indices: int32, (batch, k); count: int32, (batch, 1).
    """

    def __init__(self, n, k, threshold):
        def define(network: "trt.INetworkDefinition", constant):
            scores = network.add_input("scores", trt.DataType.FLOAT, (-1, n))
            for tensor, name in zip(add_first_hits(network, constant, scores, n, k, threshold), ("indices", "count"), strict=True):
                name_output(network, tensor, name)

        self.engine = build(define, shapes={"scores": ((1, n), (8, n), (16, n))})
        self.context = self.engine.create_execution_context()

    def infer(self, scores, indices, count):
        """Fill indices and count from scores, in place. TypeError, ValueError: a buffer that the engine does not fit."""
        if not isinstance(scores, cp.ndarray) or scores.dtype != np.float32:
            raise TypeError("scores 应当是显存里的 float32 数组")
        must(self.context.set_input_shape("scores", scores.shape), f"把 scores 的形状设成 {scores.shape}，")
        for name, array in (("indices", indices), ("count", count)):
            dtype, shape = np.dtype(trt.nptype(self.engine.get_tensor_dtype(name))), tuple(self.context.get_tensor_shape(name))
            if array.dtype != dtype:
                raise TypeError(f"引擎的 {name} 是 {dtype}，应当是 {array.dtype}")
            if array.shape != shape:
                raise ValueError(f"引擎的 {name} 形状是 {shape}，应当是 {array.shape}")
        for name, array in (("scores", scores), ("indices", indices), ("count", count)):
            must(self.context.set_tensor_address(name, array.data.ptr), f"设 {name} 的地址")
        must(self.context.execute_async_v3(stream.ptr), "入队")

    def capture(self, scores, indices, count):
        """Capture the enqueue of infer() on these buffers, after one run outside. Returns a cupy Graph."""
        self.infer(scores, indices, count)
        stream.synchronize()
        with stream:
            stream.begin_capture()
            try:
                must(self.context.execute_async_v3(stream.ptr), "捕获中入队")
            finally:
                graph = stream.end_capture()
        return graph


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# “前 k 个命中”就是“下标最小的 k 个命中”。TopK 只会挑值最大的：给每个位置造一个**键**，让它挑出来的正好是你要的次序。
# 命中的要排在没命中的前面，命中之间下标小的排前面；键不能有并列。分数本身能不能当键？
# TopK 挑出来的总有 k 个，后面那些不是命中的，怎么知道从第几个开始该换成 −1？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `add_elementwise(a, b, trt.ElementWiseOperation.GREATER / PROD / SUB / LESS …)`：两边的维数要相同，长度为 1 的维会广播，类型要一致；
# `add_cast(张量, trt.DataType.FLOAT / INT32)`（布尔张量也能变），`add_reduce(张量, trt.ReduceOperation.SUM, 1 << 1, True)`（第三项是维的位掩码，`True` 保留这一维）；
# `add_topk(键, trt.TopKOperation.MAX, k, 1 << 1)`：`get_output(1)` 是下标，INT32；`add_select(条件, 真时取, 假时取)`。
# 用到 0…k−1、0…n−1 这样的数列，就用 `constant(np.arange(…))`，形状写成 (1, k)、(1, n)。层的结果用 `.get_output(0)` 取。
#
# </details>

# %% solution="add_first_hits" tags=["gpu"]
def add_first_hits(network: "trt.INetworkDefinition", constant, scores, n, k, threshold):
    """Add layers that find, in each row of scores, the first k indices whose score exceeds threshold.

    scores: ITensor, FLOAT, (-1, n). Returns the ITensors (indices, count): INT32, (-1, k), ascending and padded with -1;
    INT32, (-1, 1), the number of all hits. No shape depends on data.
    """
    ### BEGIN SOLUTION: 先得到布尔的命中，数出总数；再造一个没有并列的键，用 TopK 挑出前 k 个；最后把第 count 个以后的换成 −1
    operation = trt.ElementWiseOperation
    bar = constant(np.full((1, 1), threshold, np.float32))
    above = network.add_elementwise(scores, bar, operation.GREATER).get_output(0)
    hits = network.add_cast(above, trt.DataType.FLOAT).get_output(0)
    count = network.add_reduce(hits, trt.ReduceOperation.SUM, 1 << 1, True).get_output(0)

    # Keys: n - i for a hit at i, -i else. All differ, and are exact in float32.
    bonus = network.add_elementwise(hits, constant(np.full((1, 1), n, np.float32)), operation.PROD).get_output(0)
    places = constant(np.arange(n, dtype=np.float32).reshape(1, n))
    keys = network.add_elementwise(bonus, places, operation.SUB).get_output(0)
    first = network.add_topk(keys, trt.TopKOperation.MAX, k, 1 << 1).get_output(1)

    numbers = constant(np.arange(k, dtype=np.float32).reshape(1, k))
    valid = network.add_elementwise(numbers, count, operation.LESS).get_output(0)
    indices = network.add_select(valid, first, constant(np.full((1, 1), -1, np.int32))).get_output(0)
    return indices, network.add_cast(count, trt.DataType.INT32).get_output(0)
    ### END SOLUTION


# %% test="add_first_hits" kind="structure" points=2 tags=["gpu"]
def first_hits(values, k, threshold):
    """The right answer: int32 arrays (batch, k) and (batch, 1)."""
    chosen = np.full((len(values), k), -1, np.int32)
    total = np.zeros((len(values), 1), np.int32)
    for row, each in enumerate(values):
        places = np.flatnonzero(each > threshold)
        total[row] = places.size
        chosen[row, : min(k, places.size)] = places[:k]
    return chosen, total


machine = student.Compactor(6, 3, 0.5)
table = np.array([[0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0.1, 0.6, 0.9, 0.2, 0.7, 0.8]], np.float32)
places_out, count_out = on_gpu(np.zeros((4, 3), np.int32)), on_gpu(np.zeros((4, 1), np.int32))
machine.infer(on_gpu(table), places_out, count_out)
chosen, total = first_hits(table, 3, 0.5)
check.equal(count_out, total, why="四行的命中数应当是 2、0、6、4。count 要数全部的命中，不只是放得下的。")
check.equal(places_out, chosen, why="前 3 个命中的下标不对。要升序，不是按分数高低；不足 3 个的位置填 −1。")
### BEGIN HIDDEN TESTS
for n, k in ((int(secret.integers(2100, 3841)), int(secret.integers(20, 100))), (97, 97)):
    threshold = int(secret.integers(2, 7)) / 8  # one of the scores
    machine = student.Compactor(n, k, threshold)
    for batch in (1, 4, 16):
        values = secret.choice(np.arange(9, dtype=np.float32) / 8, (batch, n))  # many ties, and many at the threshold: no hits
        values[0] = secret.choice([0.0, 1.5])  # no hit, or nothing but hits
        if batch > 1:
            values[1] = 0.0
            values[1, int(secret.integers(0, n))] = 0.99
            values[2] = np.where(np.arange(n) == n - 1, 1.5, 0.0)
        chosen, total = first_hits(values, k, np.float32(threshold))
        scores_in, places_out, count_out = on_gpu(values), on_gpu(chosen), on_gpu(total)
        places_out.poison()
        count_out.poison()
        machine.infer(scores_in, places_out, count_out)
        check.equal(count_out, total, why="命中数不对：一个命中也没有、全部命中、只有一个命中，都要对；正好等于 threshold 的不算；比 k 多也要照实说。")
        check.equal(places_out, chosen, why="下标不对。分数有并列的时候，次序还对吗？超出 k 的部分应当丢掉下标最大的那些；不足的位置填 −1。")
    graph = machine.capture(scores_in, places_out, count_out)
    check.nodes(graph, kernels=(1, None), why="捕获到的图里应当有内核。")
    for _ in range(2):
        values = secret.choice(np.arange(9, dtype=np.float32) / 8, values.shape)
        chosen, total = first_hits(values, k, np.float32(threshold))
        scores_in.write(values)
        places_out.poison()
        count_out.poison()
        graph.run(1)
        check.equal(count_out, total, why="捕获以后就地换了分数再重放，命中数不对。")
        check.equal(places_out, chosen, why="捕获以后就地换了分数再重放，下标不对。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：整个一步进一张图（3 分）
#
# 写 `make_tracker(x)`：把 `tracker` 的一整步录成一张图，返回给定的 `Tracker`，调用它一次就走一步。
#
# - `x`：CuPy float32，形状 (WIDTH,)，连续；图在原地推进它。不合要求的，在做任何事之前抛出 `TypeError`（不在显存里、类型不对）或 `ValueError`（形状不对、不连续）；
# - 图里依次是：`scorer` 由 `x` 算出 `y`，`launch_compact` 由 `y` 找出命中，`launch_mark` 标记；
# - 建图的时候 `x` **一个字节也不能变**；
# - 用到的缓冲和执行上下文，要有人替图留住。
#
# 速度：考官启动 `Tracker` 里的那张图（`captured`），与 `EagerTracker` 比端到端时间（连走许多步，从提交第一步到全部做完，只在最后做一次整个设备的同步），至少快 2 倍。
# 如果在这台机器上参考实现自己也快得不多，门槛会降到它的加速比的一半。

# %% tags=["gpu"]
class Tracker:
    """A captured step: call it to go one step on `stream`, without waiting.

    captured: cupy.cuda.Graph. kept: whatever the graph needs that nobody else keeps (context, buffers).
    """

    def __init__(self, captured, kept):
        self.captured, self.kept = captured, kept

    def __call__(self):
        self.captured.launch(stream)


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 捕获之前要先真的入队一次，让执行上下文做完第一次才做的准备。三步里，哪一步预热不会碰 `x`，哪一步会？
# `EagerTracker` 为什么非等不可？`launch_mark` 和 `launch_mark_known` 只差一个参数，差的是什么？
# 函数返回以后，`y`、`indices`、`count` 和执行上下文还有谁拿着？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `scorer.create_execution_context()`，`set_tensor_address("x" / "y", 数组.data.ptr)`，`execute_async_v3(stream.ptr)`，返回值都交给 `must`。
# 缓冲的形状：`y` 是 float32 (WIDTH,)，`indices` 是 int32 (WIDTH,)，`count` 是 int32 (1,)，都在捕获之前分配好。
# 捕获：`with stream:` 里 `stream.begin_capture()`，`finally` 里 `stream.end_capture()`，后者返回 `cupy.cuda.Graph`。
#
# </details>

# %% solution="make_tracker" tags=["gpu"]
def make_tracker(x):
    """Capture one step of the state x as a graph: scorer, launch_compact, launch_mark. Captures on `stream`.

    x: cupy float32, (WIDTH,), contiguous, advanced in place by each call of the result; it stays the caller's, and is not
    changed here. Returns a Tracker. TypeError: x is no cupy float32 array. ValueError: wrong shape or not contiguous.
    """
    ### BEGIN SOLUTION: 先检查 x，再备好执行上下文和三块缓冲；预热只做不碰 x 的部分；然后捕获三步，连同缓冲一起交给 Tracker
    if not isinstance(x, cp.ndarray) or x.dtype != np.float32:
        raise TypeError("x 应当是显存里的 float32 数组")
    if x.shape != (WIDTH,) or not x.flags.c_contiguous:
        raise ValueError(f"x 的形状应当是 ({WIDTH},)，而且连续；收到的是 {x.shape}")
    context = scorer.create_execution_context()
    with stream:
        y, indices, count = cp.zeros(WIDTH, cp.float32), cp.zeros(WIDTH, cp.int32), cp.zeros(1, cp.int32)
    must(context.set_tensor_address("x", x.data.ptr), "设 x 的地址")
    must(context.set_tensor_address("y", y.data.ptr), "设 y 的地址")
    must(context.execute_async_v3(stream.ptr), "预热")
    stream.synchronize()
    with stream:
        stream.begin_capture()
        try:
            must(context.execute_async_v3(stream.ptr), "捕获中入队")
            launch_compact(y, indices, count)
            launch_mark(x, y, indices, count)
        finally:
            captured = stream.end_capture()
    return Tracker(captured, (context, x, y, indices, count))
    ### END SOLUTION


# %% test="make_tracker_result" kind="structure" points=1 tags=["gpu"]
began = np.arange(256) % 16 - 8.0
began = began.astype(np.float32)
state = on_gpu(began)
walker = student.make_tracker(state)
check.equal(state.read(), began, why="建图的时候 x 就变了。预热可以运行 scorer，它只写 y；标记那一步会改 x，只能在捕获里出现。")
walker.run(1)
check.equal(state.read(), reference.tracked(began, 1), abs=0.5, why="走一步的结果不对。顺序应当是：scorer，launch_compact，launch_mark，都在 stream 上，都在捕获里。")
check.nodes(walker.get("captured"), kernels=(3, None), why="图里至少要有引擎的内核、compact 和 mark。")
check.raises("TypeError", student.make_tracker, began, why="x 是 NumPy 数组，应当抛出 TypeError。")
### BEGIN HIDDEN TESTS
began = secret.integers(-8, 8, 256).astype(np.float32)
state = on_gpu(began)
check.raises("TypeError", student.make_tracker, on_gpu(began.astype(np.float64)), why="x 的元素类型不对，应当抛出 TypeError。")
check.raises("ValueError", student.make_tracker, on_gpu(began[:255].copy()), why="x 的形状不对，应当抛出 ValueError。")
check.raises("ValueError", student.make_tracker, on_gpu(began.reshape(1, 256)), why="x 的形状不对，应当抛出 ValueError。")
STRIDED = """
def strided(make, x):
    make(x[::2])
"""
check.raises("ValueError", student.define(STRIDED, "strided"), student.value("make_tracker"), on_gpu(np.tile(began, 2)), why="x 不连续（每隔一个取一个），图会把它当成连续的来读写；应当抛出 ValueError。")
# Contexts of `scorer` that are enqueued within a capture, and which of them are still there afterwards.
WATCHED = """
import gc
import weakref

import cupy


class Context:
    def __init__(self, context, captured):
        self._context, self._captured = context, captured

    def __getattr__(self, name):
        return getattr(self._context, name)

    def execute_async_v3(self, stream_handle):
        if cupy.cuda.runtime.streamIsCapturing(stream_handle):
            self._captured.append(weakref.ref(self))
        return self._context.execute_async_v3(stream_handle)


class Scorer:
    def __init__(self, engine, captured):
        self._engine, self._captured = engine, captured

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def create_execution_context(self, *args, **kwargs):
        return Context(self._engine.create_execution_context(*args, **kwargs), self._captured)


def made(make, x):
    names, captured = getattr(make, "__globals__", {}), []
    scorer = names.get("scorer")
    names["scorer"] = Scorer(scorer, captured)
    try:
        walker = make(x)
    finally:
        names["scorer"] = scorer
    gc.collect()
    return walker, all(each() is not None for each in captured)
"""
watched, alive = student.define(WATCHED, "made")(student.value("make_tracker"), on_gpu(began))
check.that(alive, why="make_tracker 返回以后，录进图的执行上下文已经没有人拿着、被回收了：图里的内核还要用它的显存。请把它也交给 Tracker 保管。")
walker = student.make_tracker(state)
check.equal(state.read(), began, why="建图的时候 x 就变了。")
# Whoever frees the graph's buffers lets the pool hand their memory to these arrays.
TENANTS = """
def tenants(stream, sizes):
    import gc, cupy
    gc.collect()
    held = []
    for size in sizes:
        held += [cupy.full(size, 0x5A5A5A5A, cupy.int32) for _ in range(4)]
        with stream:
            held += [cupy.full(size, 0x5A5A5A5A, cupy.int32) for _ in range(4)]
    cupy.cuda.runtime.deviceSynchronize()
    return held
"""
others = student.define(TENANTS, "tenants")(student.value("stream"), [256, 1])
expected = began
for _ in range(3):
    steps = int(secret.integers(1, 8))
    walker.run(steps)
    expected = reference.tracked(expected, steps)
    check.equal(state.read(), expected, abs=0.5, why="多走几步，结果不对。每次重放都要从 x 重新算起；缓冲还在吗，有没有被内存池给了别人？")
    walker.get("captured").instantiate().run(1)
    expected = reference.tracked(expected, 1)
    check.equal(state.read(), expected, abs=0.5, why="考官启动 captured 那张图，没有走成一步：一步的全部工作都要录在这张图里。")
    expected = state.write(secret.integers(-8, 8, 256).astype(np.float32))
for other in others:
    check.equal(other, np.full(other.numpy().shape, 0x5A5A5A5A, np.int32), why="重放写坏了别人的数组：图用到的缓冲已经被回收。请把它们交给 Tracker 保管。")
# No hit at all, then a state with many: the number of hits is read on the device, in each step.
expected = state.write(np.zeros(256, np.float32))
walker.run(2)
check.equal(state.read(), reference.tracked(expected, 2), abs=0.5, why="命中数变了以后，结果不对。count 是不是在捕获时就定死了？")
### END HIDDEN TESTS

# %% test="make_tracker_speed" kind="speedup" points=2 tags=["gpu"]
began = secret.integers(-8, 8, 256).astype(np.float32)
state, plain, other_state = on_gpu(began), on_gpu(began), on_gpu(began)
walker, best_walker = student.make_tracker(state), reference.make_tracker(other_state)
check.speedup(
    walker.get("captured").instantiate(),  # one graph, launched by the examiner: enqueues without waiting would be fast, too
    over=reference.EagerTracker(plain),
    best=best_walker.get("captured").instantiate(),
    state=(state, other_state),
    at_least=2.0,
    draw=lambda: secret.integers(-8, 8, 256).astype(np.float32),
    abs=0.5,
    why="还不够快。每走一步应当只有一次图启动：没有入队，没有分配器，没有同步。返回的是给定的 Tracker 吗？",
)
### BEGIN HIDDEN TESTS
expected = state.write(secret.integers(-8, 8, 256).astype(np.float32))
steps = int(secret.integers(3, 12))
walker.run(steps)
check.equal(state.read(), reference.tracked(expected, steps), abs=0.5, why="计时以后换一个状态再走几步，结果不对：快，但没有做完该做的工作。")
### END HIDDEN TESTS

# %% [markdown]
# 三种做法放在一张图上看。和练习四的测试一样，接连走许多步（这里是 20 步），只在最后同步一次。提交时间是 CPU 被占住的时间，在入队里等 GPU 也算；端到端是从提交到 GPU 做完；都除以 20。
# 前两种做法，CPU 差不多从头等到尾，所以两根条应当差不多长；两种时间是分两次量的，哪一根多出几微秒，不说明什么。

# %% tags=["demo", "gpu"]
with stream:
    own_state = cp.asarray(begin.astype(np.float32))
stream.synchronize()
ways = {"整个逐次入队": eager_tracker, "拆开：图 + 入队": split_tracker, "固定尺寸，一张图": make_tracker(own_state)}
STEPS = 20


def go(way):
    """Go STEPS steps of a way, one right behind the other."""
    for _ in range(STEPS):
        way()


walks = [partial(go, each) for each in ways.values()]
submits = [lab.submit_us(each) for each in walks]
totals_us = [lab.end_to_end_us(each) for each in walks]
fig, ax = plt.subplots()
rows_at = np.arange(len(ways))
ax.barh(rows_at - 0.2, [each.median / STEPS for each in totals_us], 0.38, label="端到端")
ax.barh(rows_at + 0.2, [each.median / STEPS for each in submits], 0.38, label="CPU 提交")
ax.set_yticks(rows_at, list(ways))
ax.invert_yaxis()
ax.set_xlabel(f"每一步的时间（µs，{STEPS} 步平均，中位数）")
ax.set_title(f"找出命中再处理，三种做法（{lab.gpu_name()}）")
ax.legend()
plt.show()
single = lab.compare_us(eager_tracker, ways["固定尺寸，一张图"], clock="end_to_end")
chained = lab.compare_us(walks[0], walks[2], clock="end_to_end")
lab.say(
    f"整个逐次入队的端到端时间，是固定尺寸一张图的几倍：走一步就同步一次，**{single.ratio:.1f} 倍**；连走 {STEPS} 步才同步一次，**{chained.ratio:.1f} 倍**"
    f"（轮流测，中位数；下界 {single.at_least:.1f} 倍和 {chained.at_least:.1f} 倍）。"
    + ("差别在等待上：逐次入队每一步都要等 GPU，连着走也省不掉；图不等，一步紧跟一步排上去。" if chained.at_least > single.ratio else "")
)

# %% [markdown] tags=["instructor"]
# 给教师：练习一的隐藏测试有“输出静态、路上数据相关”和“有 NonZero、但不通向输出”两个反例，再加三十个随机网络，种类、上界、能否捕获分三次比较。
# 练习二的 `limit` 测试先用自己的分配器问一遍：64 × 64 全命中和 8 个元素各要多少字节，再把 `limit` 定在两者之间；
# 两者一样多（TensorRT 按 Profile 的最大形状要）的话，只考“全都放不下”。考试里不会有说不通的形状真的入队，那可能让进程当场死掉。
# 交来的引擎有时是假扮的：记下不合法的请求有没有碰到执行上下文，或者让一次调用返回 `False`。
# 练习三的分数有许多正好等于阈值，一行有几千个，所以“大于等于”、半精度的键和计数都会露馅。
# 练习四计时的是 `captured` 那张图，由考官实例化、启动。状态是整数，折叠以后永远在 −8…7 之间，FP32、TF32 都没有舍入；标记依赖命中的次序和总数，所以漏步、乱序、把 `count` 定死都会露馅。

# %% [markdown]
# ## 小结
#
# | 以前的说法 | 实验以后的说法 |
# |:--|:--|
# | 动态形状就是无限灵活 | 形状有范围，形状张量的值也有范围，数据相关的输出有上界：都在构建时就定下来；越界未必有人拦，自己先查 |
# | 输入输出都该放在显存里 | 形状由 CPU 推断，形状输入住在主机上；放哪里、什么类型，问引擎 |
# | 就地改数据，图就跟着变 | 数据是这样；形状张量的值不是，它和形状一样被写死在图里 |
# | 设好输入，就问得到输出的形状 | 数据相关的输出，入队之前谁也不知道；只有上界 |
# | `execute_async_v3` 总是异步的 | 有数据相关的张量时，它可能要等 GPU 报一个数：去量 |
# | 动态形状与 CUDA 图天然兼容 | 值和形状一起写死；路上有数据相关的张量，就别指望能捕获，哪怕输出是静态的 |
# | 找几个命中，就得用 NonZero | 掩掉、TopK、前缀和压缩：个数留在显存里，CPU 不必知道 |
#
# **带走三句话**
#
# 1. 先问“多大”由谁决定：网络、输入的形状和值，还是数据。答案决定了内存怎么给、能不能进图。
# 2. 分配器在 C++ 里被叫到：够大就再给一次，给不出就返回 0，不抛异常，零命中也给真地址。
# 3. 想进图，就把“一共几个”变成显存里的一个数。容量看流量定，放不下的要说出来。
#
# 下一步：《引擎的生命周期》讲计划文件怎么保存、怎么换权重；《捕获 TensorRT 推理》把捕获这件事讲全：预热、地址、被拒绝以后的回退。
