# %% [markdown]
# # 更新一张活的图
#
# 一个识别图片的服务用上了 CUDA 图（CUDA Graph），速度快了，测试也通过了。上线以后用户发现：
# **不管上传什么，返回的都是第一张图片的结果。** 没有报错，没有警告。
#
# 另一个服务重新加载了模型权重，算出来的还是旧权重的结果；还有一个干脆每个请求都重新捕获，结果比不用图还慢。
# 这些都是公开的问题报告里真实发生过的事，病根是同一个：**图里写死了地址和标量，而世界在变。**
#
# 这一章学习怎样让一张已经造好、正在服役的可执行图跟着变，以及什么时候只能重建。
#
# **学完以后，你能够**
#
# - 读出一张图里到底写死了哪些地址和标量；
# - 用节点参数把图引到新的缓冲上：内核节点、拷贝节点，以及临时关掉一个节点；
# - 用 `cudaGraphExecUpdate` 整张更新，被拒绝时说得出原因和出错的节点，并且安全地重建；
# - 事先判断一次更新会不会被接受；
# - 量出几种办法各要多少时间，挑出合适的那一种。
#
# **需要的基础**：《CUDA 图优化概念》里的捕获、实例化、启动，《显式构图》里的节点和依赖。
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
# ## 准备：一个会变的请求
#
# 四个小内核（kernel），前三个都是对 32 位整数的“搅拌”，结果依赖次序，多做、漏做、做错都看得出来：
#
# - `mix` 和 `twist`：两种不同的搅拌，参数表一样，都带一个标量 `i`；
# - `absorb`：把另一块缓冲的内容异或进来，当作“吸收输入”；
# - `spin`：让 GPU 空转一段给定的时间。
#
# 所有工作都放在同一条流（stream）`stream` 上；`non_blocking=True` 表示它和默认流互不等待。

# %% tags=["gpu"]
import ctypes

import cupy as cp
from cuda.bindings import driver
from cuda.bindings import runtime as cudart

SOURCE = r"""
extern "C" __global__ void mix(unsigned int *x, unsigned int i, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    unsigned int v = x[t];
    v ^= v >> 15;
    v *= 0x2c1b3c6du;
    v ^= v >> 12;
    v += i;
    x[t] = v;
}

extern "C" __global__ void twist(unsigned int *x, unsigned int i, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= size) return;
    unsigned int v = x[t] ^ i;
    v *= 0x85ebca6bu;
    v ^= v >> 13;
    x[t] = v;
}

extern "C" __global__ void absorb(unsigned int *x, const unsigned int *input, unsigned int size) {
    unsigned int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < size) x[t] ^= input[t];
}

extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}
"""
module = cp.RawModule(code=SOURCE)
mix, twist, absorb, spin = (module.get_function(name) for name in ("mix", "twist", "absorb", "spin"))

stream = cp.cuda.Stream(non_blocking=True)
BLOCK = 256


# -(-size // BLOCK) is size / BLOCK rounded up: enough blocks to cover every element.
def launch_mix(x, i, kernel=mix):
    """Launch mix (or twist) with the scalar i on x (cupy uint32, 1-D), on the current stream. Returns at once."""
    kernel((-(-x.size // BLOCK),), (BLOCK,), (x, np.uint32(i), np.uint32(x.size)))


def launch_absorb(x, source):
    """Launch x ^= source (cupy uint32, 1-D, same size), on the current stream. Returns at once."""
    absorb((-(-x.size // BLOCK),), (BLOCK,), (x, source, np.uint32(x.size)))


def launch_spin(us):
    """Keep one GPU thread busy for us microseconds, on the current stream. Returns at once."""
    spin((1,), (1,), (np.uint64(us * 1000),))


def launch_request(x, source, stamp, n):
    """One request, n + 2 launches: absorb source into x, mix with the scalar stamp, mix with 0 … n-1."""
    launch_absorb(x, source)
    launch_mix(x, stamp)
    for i in range(n):
        launch_mix(x, i)


# The first launch of a kernel loads its code, which may be refused while a stream is capturing: warm up.
with stream:
    warm = cp.zeros(BLOCK, cp.uint32)
    launch_request(warm, warm, 0, 1)
    launch_mix(warm, 0, twist)
    launch_spin(1)
stream.synchronize()

# %% [markdown]
# 每个请求都带来两样会变的东西：一块输入 `source`，和一个标量 `stamp`（比如序号、温度系数、随机种子）。
# 其余的 `n` 次 `mix` 每个请求都一样。正确答案用 NumPy 算：

# %%
def mixed(x, n, first=0):
    """Return x (numpy uint32) after n rounds of mix with scalars first, first + 1, …; x stays as it is."""
    v = x.copy()
    for i in range(first, first + n):
        v ^= v >> np.uint32(15)
        v *= np.uint32(0x2C1B3C6D)
        v ^= v >> np.uint32(12)
        v += np.uint32(i)
    return v


def twisted(x, i):
    """Return x (numpy uint32) after one round of twist with the scalar i; x stays as it is."""
    v = (x ^ np.uint32(i)) * np.uint32(0x85EBCA6B)
    return v ^ (v >> np.uint32(13))


def served(x, data, stamp, n):
    """Return x (numpy uint32) after the request (data, stamp) with n further rounds; x stays as it is."""
    return mixed(mixed(x ^ data, 1, first=stamp), n)


# %% [markdown]
# 再备好三个捕获用的小函数。`capture` 是 CuPy 的短写法，一次得到定义和可执行图；
# `define` 只捕获、不实例化，返回 `cudaGraph_t`，因为更新一张图时用不着再实例化一次；
# `run` 启动一张可执行图并等它做完。

# %% tags=["gpu"]
def capture(work):
    """Capture what work() launches on the current stream, which is `stream`. Returns a cupy Graph (.graph, .graphExec)."""
    with stream:
        stream.begin_capture()
        try:
            work()
        finally:
            captured = stream.end_capture()
    return captured


def capture_request(x, source, stamp, n):
    """Capture launch_request(x, source, stamp, n). Returns a cupy Graph: a chain of n + 2 kernel nodes."""
    return capture(partial(launch_request, x, source, stamp, n))


def define(work):
    """Capture like `capture`, but only the definition: returns a cudaGraph_t, which the caller destroys."""
    lab.check_cuda(cudart.cudaStreamBeginCapture(stream.ptr, cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
    try:
        with stream:
            work()
    finally:
        ended = cudart.cudaStreamEndCapture(stream.ptr)
    return lab.check_cuda(ended)


def run(graph_exec, times=1):
    """Launch an executable graph (cudaGraphExec_t or int) `times` times on `stream`, then wait for it."""
    for _ in range(times):
        lab.check_cuda(cudart.cudaGraphLaunch(graph_exec, stream.ptr))
    stream.synchronize()


# %% [markdown]
# ## 图里写死了什么
#
# 先把开头的事故重演一遍。捕获第一张图片的请求，然后来了第二张。三种情形，先猜每一种算的是谁：
#
# 1. 第二张图片放在一块**新数组**里，Python 变量 `image` 指向它；
# 2. 第二张图片**就地写进**捕获时的那块数组；
# 3. 捕获时的那块数组没有人要了，被释放，内存池（memory pool）把它给了别人。

# %% tags=["demo", "gpu"]
SIZE = 4096
rng = np.random.default_rng(7)
start, picture1, picture2, stranger = (rng.integers(0, 2**32, SIZE, dtype=np.uint32) for _ in range(4))
with stream:
    state, image = cp.asarray(start), cp.asarray(picture1)
stream.synchronize()
STAMP, N = 5, 3
service = capture_request(state, image, STAMP, N)


def whose():
    """Serve one request from the same start, and tell whose data it was that the graph absorbed."""
    with stream:
        state.set(start)
    run(service.graphExec)
    got = state.get()
    names = {"第一张图片": picture1, "第二张图片": picture2, "别人的数据": stranger}
    return next((name for name, data in names.items() if np.array_equal(got, served(start, data, STAMP, N))), "都不是")


rows = []
first_array = image
with stream:
    image = cp.asarray(picture2)
stream.synchronize()
rows.append(("放在新数组里", whose()))

with stream:
    first_array.set(picture2)
stream.synchronize()
rows.append(("就地写进捕获时的数组", whose()))

baked = first_array.data.ptr
del first_array
with stream:
    tenants = [cp.asarray(stranger) for _ in range(4)]
stream.synchronize()
reused = any(tenant.data.ptr == baked for tenant in tenants)
rows.append(("那块数组被释放，" + ("又给了别人" if reused else "这一次还没有人用到它"), whose()))
lab.say(lab.table(("第二张图片", "图算的是"), rows))

# %% [markdown]
# - 第一种就是开头的事故：图记的是**地址**，不是 Python 的变量。变量指向哪里，图并不知道。
# - 第二种算得对，图一点也不用动；只要前一次重放读完了再写。**能就地写，就不必更新。** 权重也一样：重新加载时写进原来的数组，图马上用新的权重；
#   换成一块新数组，图用的就还是旧的。
# - 第三种最危险：地址还在图里，主人却换了。轻则算错，重则写坏别人的数据，仍然没有一个错误码。
#
# 标量更没有“就地写”的机会：捕获时的 5 已经抄进了节点。要它变，只能改图。

# %% [markdown]
# ### 把写死的东西读出来
#
# 与其猜，不如看。节点的参数可以读：运行时 API 是 `cudaGraphKernelNodeGetParams`，驱动 API 是 `cuGraphKernelNodeGetParams`。
# 先试运行时的：

# %% tags=["demo", "gpu"]
_, (first_node, *_), *_ = cudart.cudaGraphGetRootNodes(service.graph, 1)
error, *_ = cudart.cudaGraphKernelNodeGetParams(first_node)
cudart.cudaGetLastError()
print(f"cudaGraphKernelNodeGetParams：{error.name}（{int(error)}）")
error, read = driver.cuGraphKernelNodeGetParams(first_node)
print(f"cuGraphKernelNodeGetParams：  {error.name}（{int(error)}）")
print(read)

# %% [markdown]
# 运行时 API 只认识和它一起编译的内核。CuPy 的 `RawModule`、`RawKernel` 是由驱动加载的，运行时不认识它们的函数。
# **所以和《显式构图》里一样，这一章改内核节点一律用驱动 API（`cu` 开头，没有 `da`）**；两套 API 的句柄通用，可以混着用。
#
# 读到的结构里，`func` 是函数，`gridDimX`、`blockDimX` 是网格和块，`kernelParams` 是一个 `void**`：
# 一串指针，每个指针指着一个参数的值。**这些内存属于节点，只准看，不准改**；往里写是未定义行为，
# llama.cpp 里就有人报告过这样的代码，当时碰巧能用。
#
# `kernelParams` 里没有类型，有几个参数、各是几个字节，要自己知道。下面几个给定的函数帮你读：

# %% tags=["gpu"]
# What each kernel takes, by the address of its function: the driver doesn't tell.
LAYOUT = {
    int(mix.kernel.ptr): (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32),
    int(twist.kernel.ptr): (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32),
    int(absorb.kernel.ptr): (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
    int(spin.kernel.ptr): (ctypes.c_uint64,),
}


def chain_nodes(graph):
    """Return [(node, kind), …] of a definition (cudaGraph_t or int) that is one chain, first to last. kind: "Kernel", …"""
    found = []
    after, count = lab.check_cuda(cudart.cudaGraphGetRootNodes(graph, 1))
    while count:
        node = after[0]
        found.append((node, lab.check_cuda(cudart.cudaGraphNodeGetType(node)).name.removeprefix("cudaGraphNodeType")))
        # CUDA 13 returns edge data in between, CUDA 12 does not: take the first and the last.
        after, *_, count = lab.check_cuda(cudart.cudaGraphNodeGetDependentNodes(node, 1))
    return found


def arguments(node):
    """Read a kernel node of a definition. Returns (params, types, values).

    params: driver.CUDA_KERNEL_NODE_PARAMS as read, not to be written through. types: ctypes types of the
    arguments. values: list of int, addresses for c_void_p.
    """
    params = lab.check_cuda(driver.cuGraphKernelNodeGetParams(node))
    types = LAYOUT[int(params.func)]
    places = (ctypes.c_void_p * len(types)).from_address(int(params.kernelParams))
    return params, types, [kind.from_address(place).value for kind, place in zip(types, places, strict=True)]


# %% tags=["demo", "gpu"]
def listed(graph):
    """A table of the nodes of a chain: kernel, blocks, arguments."""
    names = {int(kernel.kernel.ptr): name for kernel, name in ((mix, "mix"), (twist, "twist"), (absorb, "absorb"), (spin, "spin"))}
    rows = []
    for number, (node, kind) in enumerate(chain_nodes(graph)):
        if kind == "Kernel":
            params, types, values = arguments(node)
            shown = [hex(value) if each is ctypes.c_void_p else str(value) for each, value in zip(types, values, strict=True)]
            rows.append((number, f"`{names[int(params.func)]}`", params.gridDimX, "，".join(shown)))
        else:
            rows.append((number, kind, "—", "—"))
    return lab.table(("节点", "函数", "块数", "参数"), rows)


lab.say(
    listed(service.graph)
    + f"\n\n`state` 在 {hex(state.data.ptr)}，变量 `image` 现在指着 {hex(image.data.ptr)}，而图里写的是 {hex(baked)}。"
)

# %% [markdown]
# 一张表，事故的原因一目了然：`absorb` 的第二个参数还是老地址。
#
# ### 一个指针也不能漏
#
# 很多框架会在重放之前检查“地址变了没有”。检查得不全，比不检查还糟，因为大家都以为查过了：
# 有一份报告里，输入和输出都查了，唯独漏了一块每步都会重新分配的元数据。
#
# 别去列“应该检查谁”，反过来做：**把图里所有的指针都读出来，凡是不属于活着的数组的，就是失效的。**

# %% tags=["demo", "gpu"]
def stale(graph, alive):
    """Addresses in the kernel nodes of a chain that are the start of none of the arrays alive (dict by name)."""
    known = {array.data.ptr for array in alive.values()}
    held = set()
    for node, kind in chain_nodes(graph):
        if kind == "Kernel":
            _, types, values = arguments(node)
            held |= {value for each, value in zip(types, values, strict=True) if each is ctypes.c_void_p}
    return held - known


with stream:
    picture, weights, table = (cp.zeros(SIZE, cp.uint32) for _ in range(3))
stream.synchronize()
layered = capture(lambda: [launch_absorb(state, each) for each in (picture, weights, table)])
alive = {"state": state, "picture": picture, "weights": weights, "table": table}
print("捕获之后，失效的指针：", [hex(address) for address in stale(layered.graph, alive)])

with stream:
    moved = cp.zeros(2 * SIZE, cp.uint32)  # the table of a longer request: another array
stream.synchronize()
alive["table"] = moved
print("只查 picture 和 weights：", "没有变，放心重放" if alive["picture"] is picture and alive["weights"] is weights else "变了")
print("查图里的每一个指针：    ", [hex(address) for address in stale(layered.graph, alive)], "失效")

# %% [markdown]
# ## 三种改法
#
# 一张活的图（已经实例化、正在服役的可执行图），有三种办法让它跟着变：
#
# | 办法 | 改什么 | 要付出什么 |
# |:--|:--|:--|
# | 改节点参数 | 一个节点：内核的全部参数、拷贝的地址和大小、开或关 | 要留住节点句柄，要自己写全参数 |
# | 整图更新 `cudaGraphExecUpdate` | 所有节点，用一张结构相同的新定义去覆盖 | 要有新定义，通常是重新捕获来的；可能被拒绝 |
# | 重建 | 什么都能变 | 重新捕获，再实例化一次 |
#
# 从第一种开始。
#
# ## 改一个内核节点
#
# 用 `cuGraphExecKernelNodeSetParams(可执行图, 节点, 参数)`。三条规矩：
#
# - **节点句柄来自定义**，就是实例化时用的那一个。可执行图自己没有节点可查，驱动靠定义里的句柄去找对应的节点，所以定义要留着，不能销毁；
# - **参数要一份全新的结构**，每一项都填。它不是“只改这几项”，没填的就是零；
# - `kernelParams` 可以给一个元组 `(值的元组, ctypes 类型的元组)`，`cuda.bindings` 会替你排成 `void**`。
#
# 把 `absorb` 的输入改成变量 `image` 现在指着的那一块：

# %% tags=["demo", "gpu"]
node, _ = chain_nodes(service.graph)[0]
print("改之前：", whose())

params = driver.CUDA_KERNEL_NODE_PARAMS()
params.func = driver.CUfunction(absorb.kernel.ptr)
params.gridDimX, params.gridDimY, params.gridDimZ = -(-SIZE // BLOCK), 1, 1
params.blockDimX, params.blockDimY, params.blockDimZ = BLOCK, 1, 1
params.sharedMemBytes = 0
params.kernelParams = (
    (state.data.ptr, image.data.ptr, SIZE),
    (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
)
lab.check_cuda(driver.cuGraphExecKernelNodeSetParams(service.graphExec, node, params))
print("改之后：", whose())

# %% [markdown]
# 没有重新捕获，没有重新实例化。值在调用的当时就被抄走，`params` 用完可以扔掉；但数组 `image` 要留到图用完为止。
#
# ### 已经排上队的启动，会不会被改到？
#
# 服务不会停下来等。前一个请求刚提交，还没开始算，这时改参数，会不会把前一个请求也改了？
# 用 `spin` 把 GPU 堵住 5 毫秒，提交一次，改标量 `stamp`，再提交一次：

# %% tags=["demo", "gpu"]
def fresh_params(kernel, size, values):
    """New parameters of a launch of one of the kernels above over `size` elements. values: as LAYOUT says."""
    made = driver.CUDA_KERNEL_NODE_PARAMS()
    made.func = driver.CUfunction(kernel.kernel.ptr)
    made.gridDimX, made.gridDimY, made.gridDimZ = -(-size // BLOCK), 1, 1
    made.blockDimX, made.blockDimY, made.blockDimZ = BLOCK, 1, 1
    made.kernelParams = (tuple(values), LAYOUT[int(kernel.kernel.ptr)])
    return made


def set_stamp(stamp):
    """Change the scalar of the second node of `service`."""
    node, _ = chain_nodes(service.graph)[1]
    lab.check_cuda(driver.cuGraphExecKernelNodeSetParams(service.graphExec, node, fresh_params(mix, SIZE, (state.data.ptr, stamp, SIZE))))


with stream:
    state.set(start)
    launch_spin(5000)
lab.check_cuda(cudart.cudaGraphLaunch(service.graphExec, stream.ptr))
set_stamp(99)
lab.check_cuda(cudart.cudaGraphLaunch(service.graphExec, stream.ptr))
stream.synchronize()

after_both = served(served(start, picture2, STAMP, N), picture2, 99, N)
print("第一次用 5，第二次用 99：", np.array_equal(state.get(), after_both))
set_stamp(STAMP)

# %% [markdown]
# 不会。**更新只影响以后的启动**，排上队的和正在跑的都用提交时的参数。所以更新之前不必同步；
# 这一点比“就地写缓冲”更省心：就地写一定要排在前一次读完之后。

# %% [markdown]
# ## 误区一：改了定义，图就变了
#
# 驱动还有一个长得很像的函数 `cuGraphKernelNodeSetParams`，名字里没有 `Exec`。它改的是定义。两边各改一次，看看谁跟着变：

# %% tags=["demo", "gpu"]
def told(graph):
    """The stamp that a definition holds, and the one that its executable graph works with."""
    _, _, values = arguments(chain_nodes(graph.graph)[1][0])
    with stream:
        state.set(start)
    run(graph.graphExec)
    got = state.get()
    works = next((stamp for stamp in (5, 6, 7) if np.array_equal(got, served(start, picture2, stamp, N))), "?")
    return values[1], works


twin = capture_request(state, image, 5, N)
node, _ = chain_nodes(twin.graph)[1]
rows = [("刚造好", *told(twin))]
lab.check_cuda(driver.cuGraphKernelNodeSetParams(node, fresh_params(mix, SIZE, (state.data.ptr, 6, SIZE))))
rows.append(("只改定义，改成 6", *told(twin)))
lab.check_cuda(driver.cuGraphExecKernelNodeSetParams(twin.graphExec, node, fresh_params(mix, SIZE, (state.data.ptr, 7, SIZE))))
rows.append(("再改可执行图，改成 7", *told(twin)))
again = lab.check_cuda(cudart.cudaGraphInstantiate(twin.graph, 0))
with stream:
    state.set(start)
run(again)
reborn = next((stamp for stamp in (5, 6, 7) if np.array_equal(state.get(), served(start, picture2, stamp, N))), "?")
lab.check_cuda(cudart.cudaGraphExecDestroy(again))
rows.append(("由定义重新实例化一张", told(twin)[0], reborn))
lab.say(lab.table(("动作", "定义里写着", "可执行图用的是"), rows))

# %% [markdown]
# 两边各过各的日子：
#
# - 只改定义，活的图纹丝不动；
# - 只改可执行图，定义就“过时”了：以后读定义，读到的不是图正在用的值；由它重新实例化，刚才的修改就丢了。
#
# **可执行图没有读参数的接口**，图此刻用着什么，只有你自己知道。要么自己记账，要么两边一起改，让定义始终是真的。练习一会用到这一点。

# %% [markdown]
# ## 误区二：只填变了的那几项
#
# 请求变长了，于是换一块更大的数组，地址和 `size` 都改对了，只是忘了网格：块数还是照原来的长度算的。会报错吗？

# %% tags=["demo", "gpu"]
with stream:
    longer = cp.zeros(2 * SIZE, cp.uint32)
stream.synchronize()
single = capture(lambda: launch_mix(state, 1))
node, _ = chain_nodes(single.graph)[0]

kept_grid = fresh_params(mix, SIZE, (longer.data.ptr, 1, longer.size))
lab.check_cuda(driver.cuGraphExecKernelNodeSetParams(single.graphExec, node, kept_grid))
run(single.graphExec)
wrong = int(np.count_nonzero(longer.get() != mixed(np.zeros(2 * SIZE, np.uint32), 1, first=1)))

with stream:
    longer.fill(0)
lab.check_cuda(driver.cuGraphExecKernelNodeSetParams(single.graphExec, node, fresh_params(mix, longer.size, (longer.data.ptr, 1, longer.size))))
run(single.graphExec)
right = int(np.count_nonzero(longer.get() != mixed(np.zeros(2 * SIZE, np.uint32), 1, first=1)))
print(f"网格照旧：{2 * SIZE} 个元素里有 {wrong} 个没有算；网格也改：{right} 个没有算")

# %% [markdown]
# 不报错，只是后一半没有人算。参数结构是一个整体：**函数、网格、块、动态共享内存、每一个实参，改一项也要把其余的照抄一遍。**
# 照抄的办法就是先读定义里的（如果它没有过时），再填一份新的。

# %% [markdown]
# ## 改一个拷贝节点
#
# 拷贝节点不涉及内核函数，运行时 API 就够了：`cudaGraphExecMemcpyNodeSetParams1D(可执行图, 节点, 目标, 来源, 字节数, 方向)`，
# `1D` 指连续的一段内存；方向里的 D 是设备（device），H 是主机（host），`DtoD` 就是从设备到设备。地址和字节数都可以变，方向呢？

# %% tags=["demo", "gpu"]
DtoD, HtoD = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice, cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
with stream:
    tray1, tray2 = cp.asarray(picture1), cp.asarray(picture2)
stream.synchronize()


def copy_then_mix():
    lab.check_cuda(cudart.cudaMemcpyAsync(state.data.ptr, tray1.data.ptr, tray1.nbytes, DtoD, stream.ptr))
    launch_mix(state, 0)


copying = capture(copy_then_mix)
(node, kind), _ = chain_nodes(copying.graph)
run(copying.graphExec)
print(f"第一个节点是 {kind}，拷来的是 tray1：", np.array_equal(state.get(), mixed(picture1, 1)))

lab.check_cuda(cudart.cudaGraphExecMemcpyNodeSetParams1D(copying.graphExec, node, state.data.ptr, tray2.data.ptr, state.nbytes, DtoD))
run(copying.graphExec)
print("改了来源地址，拷来的是 tray2：", np.array_equal(state.get(), mixed(picture2, 1)))

on_host = picture1.copy()
(error,) = cudart.cudaGraphExecMemcpyNodeSetParams1D(copying.graphExec, node, state.data.ptr, on_host.ctypes.data, on_host.nbytes, HtoD)
cudart.cudaGetLastError()
print(f"改成从主机内存拷：{error.name}（{int(error)}）")

# %% [markdown]
# 文档的说法是：来源和目标要和原来的同属一类内存、同一个上下文（context，即一个进程在一块 GPU 上的全部状态）。
# 从设备内存换成主机内存，就不是同一件事了；个别平台比较宽松，以上面打印的返回码为准。
#
# 别的种类也各有一个：`cudaGraphExecMemsetNodeSetParams`、`cudaGraphExecHostNodeSetParams`、`cudaGraphExecEventRecordNodeSetEvent`、
# `cudaGraphExecChildGraphNodeSetParams`，用法都是“可执行图、定义里的节点、一份完整的新参数”。
#
# ## 关掉一个节点
#
# 有的步骤只是偶尔不做：调试时跳过一个后处理，某类请求不需要归一化。不用为它另造一张图：
# `cuGraphNodeSetEnabled(可执行图, 节点, 0)` 关掉，`1` 打开。内核、拷贝、memset 节点都可以；关掉的节点像一个空节点，依赖照旧。

# %% tags=["demo", "gpu"]
three = capture(lambda: [launch_mix(state, i) for i in range(3)])
middle, _ = chain_nodes(three.graph)[1]


def ran():
    """Which of the three mixes ran."""
    with stream:
        state.set(start)
    run(three.graphExec)
    got = state.get()
    without = mixed(mixed(start, 1), 1, first=2)
    return "三个都做了" if np.array_equal(got, mixed(start, 3)) else "中间那个没做" if np.array_equal(got, without) else "?"


rows = [("刚造好", ran())]
lab.check_cuda(driver.cuGraphNodeSetEnabled(three.graphExec, middle, 0))
rows.append(("关掉中间那个", ran()))
new_definition = define(lambda: [launch_mix(state, i) for i in range(3)])
lab.check_cuda(cudart.cudaGraphExecUpdate(three.graphExec, new_definition))
error, switch = driver.cuGraphNodeGetEnabled(three.graphExec, middle)
rows.append((f"整图更新之后，`cuGraphNodeGetEnabled` 说：{error.name if int(error) else switch}", ran()))
(error,) = driver.cuGraphNodeSetEnabled(three.graphExec, middle, 1)
rows.append((f"重新打开（{error.name}）", ran()))
lab.check_cuda(cudart.cudaGraphDestroy(new_definition))
lab.say(lab.table(("动作", "结果"), rows))

# %% [markdown]
# 第三行值得留意。文档说，整图更新（后面就讲）换掉的是参数，开关是另一本账：关着的还是关着。
# 所以关掉过节点的图，更新以后别忘了它。

# %% [markdown]
# ## 整图更新
#
# 变的地方多了，一个个节点去改就太啰嗦。`cudaGraphExecUpdate(可执行图, 新定义)` 一次更新所有节点：
# 新定义和原来的图结构相同，驱动把节点一一配对，用新的参数覆盖旧的。新定义通常就是把新请求再捕获一次。

# %% tags=["demo", "gpu"]
renewed = define(partial(launch_request, state, tray1, STAMP, N))
print("更新之前：", whose())
info = lab.check_cuda(cudart.cudaGraphExecUpdate(service.graphExec, renewed))
print(f"更新之后：{whose()}（{info.result.name}）")

grown = define(partial(launch_request, state, tray1, STAMP, N + 1))
error, info = cudart.cudaGraphExecUpdate(service.graphExec, grown)
print(f"多了一个节点：{error.name}（{int(error)}），结果信息：{info}")

# %% [markdown]
# 第一次成功。第二次被拒绝，错误码 910（`cudaErrorGraphExecUpdateFailure`）说的只是“不行”。
# 为什么不行？C 接口会把原因写进 `cudaGraphExecUpdateResultInfo`：`result` 是原因，`errorNode` 是新定义里出错的节点。
# 可是 `cuda.bindings` 的规矩是：**返回码不为零，其余的值一律给 `None`**，偏偏这里最需要它。
# 这就是那些“更新失败了，不知道为什么”的报告的来历。
#
# 办法是绕过包装，直接调驱动里的 `cuGraphExecUpdate`。`cuGetProcAddress` 给出函数的地址，
# `ctypes` 按 C 的签名去调用。12000 表示要 CUDA 12.0 起的那个版本：

# %% tags=["gpu"]
class UpdateInfo(ctypes.Structure):
    """CUgraphExecUpdateResultInfo: why an update was refused, and at which node of the new definition."""

    _fields_ = [("result", ctypes.c_int), ("error_node", ctypes.c_void_p), ("error_from_node", ctypes.c_void_p)]


update_address, _ = lab.check_cuda(driver.cuGetProcAddress(b"cuGraphExecUpdate", 12000, 0))
exec_update = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(UpdateInfo))(update_address)


def try_update(graph_exec, graph):
    """Ask the driver to update an executable graph (cudaGraphExec_t or int) by a definition (cudaGraph_t or int).

    Returns (error, reason, node). error: 0, 910 for a refusal, or any other CUDA error code. reason: name of the
    cudaGraphExecUpdateResult, such as "cudaGraphExecUpdateErrorTopologyChanged". node: handle (int) of the node of
    the new definition that it failed at, or None. Never raises for a CUDA error. With an error other than 0 and 910
    the driver owes no reason: whatever stands in `reason` then, "cudaGraphExecUpdateSuccess" included, means nothing.
    """
    info = UpdateInfo(result=cudart.cudaGraphExecUpdateResult.cudaGraphExecUpdateError.value)
    error = exec_update(int(graph_exec), int(graph), ctypes.byref(info))
    return error, cudart.cudaGraphExecUpdateResult(info.result).name, info.error_node


# %% tags=["demo", "gpu"]
error, reason, node = try_update(service.graphExec, grown)
print(f"错误码 {error}，原因 {reason}，出错的节点 {node}")
print("被拒绝以后，原来的图：", whose())

# %% [markdown]
# 这下知道了：拓扑（topology，节点和边的样子）变了。节点数不同，所以没有哪一个节点可怪，出错的节点是空的。
# 新一些的 `cuda.core` 也把原因写进了它的异常里。
#
# ### 拒绝的原因有哪些
#
# 枚举 `cudaGraphExecUpdateResult` 列出了全部可能。哪些变化被接受，哪些被拒绝、原因是哪个？都在这台机器上造出来看。
#
# 为了能一口气试很多种，用一个小字典描述一张图：`nodes` 是节点，`edges` 是边（起点、终点的编号）。
# 写描述用的四个小函数不需要 GPU：

# %%
def kernel(**changes):
    """A kernel node: function "mix" or "twist" on a buffer (its number) with a scalar, in so many blocks."""
    return {"kind": "Kernel", "function": "mix", "buffer": 0, "scalar": 0, "blocks": 16, "cooperative": False, "context": 0} | changes


def memcpy(**changes):
    """A copy of so many bytes: direction "HtoD" into the buffer, "DtoH" out of it, "DtoD" from the other one into it."""
    return {"kind": "Memcpy", "direction": "DtoD", "buffer": 0, "bytes": 1024} | changes


def memset(**changes):
    """A memset of width × height elements of 4 bytes at the start of a buffer; height 1 is one-dimensional."""
    return {"kind": "Memset", "buffer": 0, "value": 0, "width": 64, "height": 1} | changes


def chain(*nodes):
    """A graph in which each node depends on the one before it."""
    return {"nodes": list(nodes), "edges": [[i, i + 1] for i in range(len(nodes) - 1)]}


# %% [markdown]
# 字段里有两个生词：
#
# - `cooperative`：协作启动（cooperative launch），内核里的所有块可以互相等待，是节点的一个属性（attribute）；
# - `context`：函数属于哪个上下文，一般都是 0 号，也就是 CuPy 用的那一个。
#
# 下面的 `build` 把描述变成真正的定义，用的是《显式构图》里的那些调用；`mailbox` 是主机一侧的一块内存，给拷贝节点用。

# %% tags=["gpu"]
mailbox = np.zeros(1 << 14, np.uint32)
DIRECTIONS = {
    "HtoD": cudart.cudaMemcpyKind.cudaMemcpyHostToDevice,
    "DtoH": cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost,
    "DtoD": cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice,
}


def post(data):
    """Put data (numpy uint32) at the start of the mailbox."""
    mailbox[: data.size] = data


def add_kernel(graph, before, node, x):
    """Add a described kernel node on x after the nodes `before`; returns its handle."""
    made = driver.CUDA_KERNEL_NODE_PARAMS()
    made.func = driver.CUfunction({"mix": mix, "twist": twist}[node["function"]].kernel.ptr)
    made.gridDimX, made.gridDimY, made.gridDimZ = node["blocks"], 1, 1
    made.blockDimX, made.blockDimY, made.blockDimZ = BLOCK, 1, 1
    made.kernelParams = ((x.data.ptr, node["scalar"], x.size), (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32))
    added = lab.check_cuda(driver.cuGraphAddKernelNode(graph, before, len(before), made))
    if node["cooperative"]:
        value = driver.CUkernelNodeAttrValue()
        value.cooperative = 1
        lab.check_cuda(driver.cuGraphKernelNodeSetAttribute(added, driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
    return added


def add_memcpy(graph, before, node, x, other):
    """Add a described copy between x and the mailbox, or from other to x; returns its handle."""
    target = mailbox.ctypes.data if node["direction"] == "DtoH" else x.data.ptr
    source = {"HtoD": mailbox.ctypes.data, "DtoH": x.data.ptr, "DtoD": other.data.ptr}[node["direction"]]
    return lab.check_cuda(cudart.cudaGraphAddMemcpyNode1D(graph, before, len(before), target, source, node["bytes"], DIRECTIONS[node["direction"]]))


def add_memset(graph, before, node, x):
    """Add a described memset of x; returns its handle."""
    made = cudart.cudaMemsetParams()
    made.dst, made.value, made.elementSize = x.data.ptr, node["value"], 4
    made.width, made.height, made.pitch = node["width"], node["height"], 1024  # pitch: bytes from row to row
    return lab.check_cuda(cudart.cudaGraphAddMemsetNode(graph, before, len(before), made))


def build(description, arrays):
    """Make a definition (cudaGraph_t, the caller destroys it) from a description, working on arrays.

    arrays: two cupy uint32 arrays of at least 4096 elements, of which the description's buffers are the numbers.
    Nodes in the order of the description; only context 0.
    """
    graph = lab.check_cuda(cudart.cudaGraphCreate(0))
    made = []
    for number, node in enumerate(description["nodes"]):
        before = [cudart.cudaGraphNode_t(made[tail]) for tail, head in description["edges"] if head == number]
        x, other = arrays[node["buffer"]], arrays[1 - node["buffer"]]
        match node["kind"]:
            case "Kernel":
                added = add_kernel(graph, [driver.CUgraphNode(int(each)) for each in before], node, x)
            case "Memcpy":
                added = add_memcpy(graph, before, node, x, other)
            case "Memset":
                added = add_memset(graph, before, node, x)
        made.append(int(added))
    return graph


# %% tags=["demo", "gpu"]
CHANGES = [
    ("换地址，换标量", chain(kernel(), kernel(scalar=1)), chain(kernel(buffer=1), kernel(buffer=1, scalar=8))),
    ("网格变大", chain(kernel(), kernel()), chain(kernel(blocks=64), kernel(blocks=64))),
    ("换成另一个内核函数", chain(kernel(), kernel()), chain(kernel(), kernel(function="twist"))),
    ("拷贝的地址和字节数变了", chain(memcpy(), kernel()), chain(memcpy(buffer=1, bytes=512), kernel())),
    ("memset 的值变了", chain(kernel(), memset()), chain(kernel(), memset(value=7))),
    ("多一个节点", chain(kernel(), kernel()), chain(kernel(), kernel(), kernel())),
    (
        "节点数不变，少一条边",
        chain(kernel(), kernel(), kernel()),
        {"nodes": [kernel(), kernel(), kernel()], "edges": [[0, 1]]},
    ),
    ("内核换成 memset", chain(kernel(), kernel()), chain(kernel(), memset())),
    ("拷贝的方向反过来", chain(kernel(), memcpy(direction="HtoD")), chain(kernel(), memcpy(direction="DtoH"))),
    ("二维 memset 变宽", chain(kernel(), memset(height=4)), chain(kernel(), memset(width=128, height=4))),
    ("普通启动换成协作启动", chain(kernel(), kernel()), chain(kernel(), kernel(cooperative=True))),
]
with stream:
    desk = [cp.zeros(16 * BLOCK, cp.uint32) for _ in range(2)]
stream.synchronize()


def ask_driver(old, new, flags=0):
    """Instantiate one description, update it by another. Returns (error, reason, number of the failing node or None)."""
    before, after = build(old, desk), build(new, desk)
    live = lab.check_cuda(cudart.cudaGraphInstantiate(before, flags))
    error, reason, node = try_update(live, after)
    nodes, _ = lab.check_cuda(cudart.cudaGraphGetNodes(after, len(new["nodes"])))
    number = next((i for i, each in enumerate(nodes) if int(each) == node), None)
    lab.check_cuda(cudart.cudaGraphExecDestroy(live))
    for graph in (before, after):
        lab.check_cuda(cudart.cudaGraphDestroy(graph))
    return error, reason, number


rows = []
for title, old, new in CHANGES:
    error, reason, number = ask_driver(old, new)
    rows.append((title, "接受" if error == 0 else f"拒绝（{error}）", f"`{reason.removeprefix('cudaGraphExecUpdate')}`", "—" if number is None else number))
lab.say("原因都以 `cudaGraphExecUpdate` 开头，表里省略了。\n\n" + lab.table(("变化", "回答", "原因", "出错的节点"), rows))

# %% [markdown]
# 前五种是更新的本分：地址、标量、网格、值，连内核函数都能换。CUDA 11.2 以前的驱动不许换函数，那时的原因叫 `ErrorFunctionChanged`；
# 枚举里还留着它，今天的驱动已经用不到了，所以造不出来。
#
# 后六种动了图的骨架，或者动了实例化时已经定死的东西。文档是这样归类的：
#
# - 节点数、边变了：`ErrorTopologyChanged`；
# - 节点的种类变了：`ErrorNodeTypeChanged`；
# - 参数以不支持的方式变了，例如拷贝的方向、二维 memset 的大小：`ErrorParametersChanged`；
# - 属性变了，例如协作启动：`ErrorAttributesChanged`。
#
# 和你的表一致吗？文档特意留了一句：以后的版本可能添加限制，返回码一定要检查。哪一行不同，就以你的表为准。
#
# 另一个属性是优先级（priority）。它只在实例化时带了 `cudaGraphInstantiateFlagUseNodePriority` 才起作用；
# 那么，没带这个标志的图，优先级可以随便改吗？

# %% tags=["demo", "gpu"]
def ask_about_priority(flags):
    """Change the priority attribute of a node of a graph instantiated with flags."""
    graphs = [build(chain(kernel(), kernel()), desk) for _ in range(2)]
    value = driver.CUkernelNodeAttrValue()
    value.priority = -1
    second, _ = chain_nodes(graphs[1])[1]
    lab.check_cuda(driver.cuGraphKernelNodeSetAttribute(second, driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY, value))
    live = lab.check_cuda(cudart.cudaGraphInstantiate(graphs[0], flags))
    _, reason, _ = try_update(live, graphs[1])
    lab.check_cuda(cudart.cudaGraphExecDestroy(live))
    for graph in graphs:
        lab.check_cuda(cudart.cudaGraphDestroy(graph))
    return reason


USE_PRIORITY = cudart.cudaGraphInstantiateFlags.cudaGraphInstantiateFlagUseNodePriority
for flags in (0, int(USE_PRIORITY)):
    print(f"实例化的标志 {flags}，优先级变了：{ask_about_priority(flags)}")

# %% [markdown]
# ### 剩下的几个原因
#
# 枚举里还有 `ErrorUnsupportedFunctionChange`（函数以不支持的方式变了）、`ErrorNotSupported`（节点本身不支持更新）
# 和笼统的 `Error`（参数无效，或说不出别的原因）。想见到它们，得做一些平时不该做的事，做了也未必都见得到：
#
# - 把函数换成**另一个上下文**里的函数；
# - 图里有内存分配节点，而新定义自己已经被实例化过了（文档说，有内存节点的定义同时只能有一个实例）；
# - 传一个空的图句柄。
#
# 这类操作有可能把解释器弄崩，所以放到子进程里做：它崩了，我们只是看到它死在哪一步。
# 子进程里不用 CuPy，内核是手写的一行 PTX（GPU 的汇编）。

# %% tags=["demo", "gpu"]
import subprocess
import sys

RISKY = r'''
import ctypes
from cuda.bindings import driver

PTX = ctypes.create_string_buffer(b""".version 6.4
.target sm_75
.address_size 64
.visible .entry nothing() { ret; }
""")

class Info(ctypes.Structure):
    _fields_ = [("result", ctypes.c_int), ("node", ctypes.c_void_p), ("from_node", ctypes.c_void_p)]

def done(result):
    if int(result[0]):
        raise RuntimeError(result[0].name)
    return result[1] if len(result) == 2 else result[1:]

def ask(title, live, graph):
    print(title, flush=True)
    info = Info(result=1)
    print(update(int(live), int(graph), ctypes.byref(info)), info.result, flush=True)

def function_here():
    return done(driver.cuModuleGetFunction(done(driver.cuModuleLoadData(ctypes.addressof(PTX))), b"nothing"))

def graph_of(function):
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.func = function
    params.gridDimX = params.gridDimY = params.gridDimZ = params.blockDimX = params.blockDimY = params.blockDimZ = 1
    graph = done(driver.cuGraphCreate(0))
    done(driver.cuGraphAddKernelNode(graph, None, 0, params))
    return graph

def graph_with_memory(stream):
    done(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    done(driver.cuMemFreeAsync(done(driver.cuMemAllocAsync(1024, stream)), stream))
    return done(driver.cuStreamEndCapture(stream))

def instantiated(graph):
    return done(driver.cuGraphInstantiate(graph, 0))

done(driver.cuInit(0))
device = done(driver.cuDeviceGet(0))
primary = done(driver.cuDevicePrimaryCtxRetain(device))
done(driver.cuCtxSetCurrent(primary))
address, _ = done(driver.cuGetProcAddress(b"cuGraphExecUpdate", 12000, 0))
update = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(Info))(address)

stream = done(driver.cuStreamCreate(1))
with_memory, fresh, taken = (graph_with_memory(stream) for _ in range(3))
live = instantiated(with_memory)
ask("内存节点，新定义还没有实例化", live, fresh)
other_live = instantiated(taken)
ask("内存节点，新定义已经实例化", live, taken)

here = graph_of(function_here())
live = instantiated(here)
second = done(driver.cuCtxCreate(None, 0, device) if driver.CUDA_VERSION >= 13000 else driver.cuCtxCreate(0, device))
there = graph_of(function_here())
done(driver.cuCtxSetCurrent(primary))
ask("函数属于另一个上下文", live, there)
ask("空的图句柄", live, 0)
'''
child = subprocess.run([sys.executable, "-c", RISKY], capture_output=True, text=True, timeout=120)
lines = child.stdout.splitlines()
rows = []
for title, answer in zip(lines[0::2], [*lines[1::2], None][: len(lines[0::2])], strict=True):
    if answer is None:
        rows.append((title, "没有回答", "—"))
    else:
        error, outcome = map(int, answer.split())
        reply = "接受" if error == 0 else f"拒绝（{error}）" if error == 910 else f"出错（{error}）"
        rows.append((title, reply, f"`{cudart.cudaGraphExecUpdateResult(outcome).name.removeprefix('cudaGraphExecUpdate')}`"))
ending = "" if child.returncode == 0 else f"\n\n子进程没有走完，退出码 {child.returncode}：{(child.stderr.strip().splitlines() or ['没有留下话'])[-1]}"
lab.say(lab.table(("子进程里做的事", "回答", "原因"), rows) + ending)

# %% [markdown]
# 注意错误码：0 是接受，910 是“拒绝”，别的码是真的出了错（比如 1，参数无效；801，不支持）。
# **拒绝是预料之中的答复，出错不是**，代码里要分开处理，而且要看错误码来分：出错的时候“原因”那一栏不算数，
# 驱动不一定去填它，上面写着 `Success` 也不是成功。
#
# 如果把两张表加在一起，枚举里除了 `ErrorFunctionChanged`，还有没有哪个没有出现？你的驱动可能已经改用错误码来说那件事，以表为准。

# %% [markdown]
# ### 长得一样，也可能配不上
#
# 驱动怎样知道新定义的哪个节点对应旧图的哪个节点？它不比较名字，而是**按记录的先后配对**：节点的依赖按边加入的次序一个对一个。
# 下面两张图画出来一模一样：一个起点，分叉成一个内核和一个 memset，再汇合。唯一的差别是汇合的那个节点先等谁：

# %% tags=["demo", "gpu"]
import matplotlib.pyplot as plt

lab.plot_style()


def diamond(joins):
    """Root, a kernel and a memset side by side, and a last node that depends on the two in the order `joins`."""
    return {"nodes": [kernel(), kernel(buffer=1), memset(), kernel(scalar=9)], "edges": [[0, 1], [0, 2], *[[k, 3] for k in joins]]}


fig, axes = plt.subplots(1, 2, figsize=(9, 2.8))
for ax, joins, title in zip(axes, ((1, 2), (2, 1)), ("先等内核，再等 memset", "先等 memset，再等内核"), strict=True):
    shape = diamond(joins)
    lab.draw_graph(({str(i): each["kind"].lower() for i, each in enumerate(shape["nodes"])}, [(str(a), str(b)) for a, b in shape["edges"]]), ax=ax, title=title)
plt.show()
for joins in ((1, 2), (2, 1)):
    error, reason, number = ask_driver(diamond((1, 2)), diamond(joins))
    print(f"新定义的汇合次序 {joins}：{'接受' if error == 0 else '拒绝'}，{reason}")

# %% [markdown]
# 如果第二行是拒绝，原因就是配对：内核被配给了 memset。所以重新捕获一定要走**同一段代码、同样的次序**：
# 流、事件、分叉、汇合的先后都不能变。“用字典遍历分支”这种次序不定的写法，会让更新时好时坏。

# %% [markdown]
# ## 误区三：更新失败就是程序出了错
#
# 有人给程序套上检查工具，看到一串 910，以为 CUDA 坏了；也有人把 910 当成致命错误，跑了几千步的训练因为一次形状变化退出了。
#
# 其实“先试着更新，不行就重建”是正当的做法。只是要收拾干净：运行时 API 会记住最后一个错误，不清掉，
# 就会被后面某个毫不相干的检查捡到。

# %% tags=["demo", "gpu"]
cudart.cudaGetLastError()
error, _ = cudart.cudaGraphExecUpdate(service.graphExec, grown)
print("更新的返回码：            ", error.name)
print("后面某处检查“有没有出错”：", cudart.cudaPeekAtLastError()[0].name)
print("cudaGetLastError 取走它：  ", cudart.cudaGetLastError()[0].name)
print("再检查：                  ", cudart.cudaPeekAtLastError()[0].name)
try_update(service.graphExec, grown)
print("直接调驱动被拒绝以后：    ", cudart.cudaPeekAtLastError()[0].name)
for graph in (renewed, grown):
    lab.check_cuda(cudart.cudaGraphDestroy(graph))

# %% [markdown]
# 被拒绝以后，旧的可执行图还能不能用？前面那一次，它照旧工作。再看一次更刁钻的：新定义里第一个节点的变化是允许的，第二个不允许。
# 旧图会不会“改了一半”？

# %% tags=["demo", "gpu"]
with stream:
    for each in desk:
        each.fill(1)
stream.synchronize()
before = build(chain(kernel(scalar=3), memcpy(direction="HtoD", buffer=1)), desk)
after = build(chain(kernel(scalar=4), memcpy(direction="DtoH", buffer=1)), desk)
halfway = lab.check_cuda(cudart.cudaGraphInstantiate(before, 0))
error, reason, _ = try_update(halfway, after)
(launched,) = cudart.cudaGraphLaunch(halfway, stream.ptr)
stream.synchronize()
ones = np.ones(16 * BLOCK, np.uint32)
used = next((scalar for scalar in (3, 4) if np.array_equal(desk[0].get(), mixed(ones, 1, first=scalar))), "?")
print(f"更新的回答：{reason}")
print(f"旧图再启动一次：{launched.name}，第一个节点用的标量是 {used}（原来是 3，新定义是 4）")
lab.check_cuda(cudart.cudaGraphExecDestroy(halfway))
for graph in (before, after):
    lab.check_cuda(cudart.cudaGraphDestroy(graph))

# %% [markdown]
# 不管上面打印的是什么，文档都没有承诺过。所以稳妥的规矩是：**被拒绝以后，不再启动旧的那一个**；
# 用新定义实例化一个新的，再销毁旧的。正在执行的旧图也可以销毁，驱动会等它做完再释放。练习二就写这个。

# %% [markdown]
# ## 各要多少时间
#
# 每个请求只变一个标量，然后启动、等结果。下面六种做法，端到端各要多久？先猜一猜，谁最慢，谁和底线差不多：
#
# 1. 重新捕获，实例化，启动，再销毁；
# 2. 重新捕获，整图更新，启动；
# 3. 不捕获：改**定义**里的一个节点，再整图更新；
# 4. 用节点参数改一个节点；
# 5. 用节点参数把每个节点都改一遍；
# 6. 什么都不改，只启动（底线）。

# %% tags=["demo", "gpu"]
from itertools import count


class Routes:
    """The six ways to serve a request of n + 2 kernels whose stamp has changed, on one template and its executable."""

    def __init__(self, n):
        self.n, self.stamps = n, count(1)
        self.template = define(partial(launch_request, state, tray1, 0, n))
        self.live = lab.check_cuda(cudart.cudaGraphInstantiate(self.template, 0))
        self.nodes = [node for node, _ in chain_nodes(self.template)]

    def launch(self, graph_exec):
        lab.check_cuda(cudart.cudaGraphLaunch(graph_exec, stream.ptr))

    def recaptured(self):
        return define(partial(launch_request, state, tray1, next(self.stamps), self.n))

    def changed(self):
        return fresh_params(mix, SIZE, (state.data.ptr, next(self.stamps), SIZE))

    def rebuild(self):
        graph = self.recaptured()
        made = lab.check_cuda(cudart.cudaGraphInstantiate(graph, 0))
        self.launch(made)
        lab.check_cuda(cudart.cudaGraphExecDestroy(made))
        lab.check_cuda(cudart.cudaGraphDestroy(graph))

    def capture_and_update(self):
        graph = self.recaptured()
        lab.check_cuda(cudart.cudaGraphExecUpdate(self.live, graph))
        self.launch(self.live)
        lab.check_cuda(cudart.cudaGraphDestroy(graph))

    def edit_and_update(self):
        lab.check_cuda(driver.cuGraphKernelNodeSetParams(self.nodes[1], self.changed()))
        lab.check_cuda(cudart.cudaGraphExecUpdate(self.live, self.template))
        self.launch(self.live)

    def set_one(self):
        lab.check_cuda(driver.cuGraphExecKernelNodeSetParams(self.live, self.nodes[1], self.changed()))
        self.launch(self.live)

    def set_all(self):
        for node in self.nodes[1:]:
            lab.check_cuda(driver.cuGraphExecKernelNodeSetParams(self.live, node, self.changed()))
        self.launch(self.live)

    def plain(self):
        self.launch(self.live)

    def close(self):
        stream.synchronize()
        lab.check_cuda(cudart.cudaGraphExecDestroy(self.live))
        lab.check_cuda(cudart.cudaGraphDestroy(self.template))


WAYS = {
    "重新捕获 + 实例化": "rebuild",
    "重新捕获 + 整图更新": "capture_and_update",
    "改定义 + 整图更新": "edit_and_update",
    "改每一个节点": "set_all",
    "改一个节点": "set_one",
}
sizes = np.array([8, 30, 100, 300])
measured = {name: [] for name in [*WAYS, "什么都不改"]}
for n in sizes:
    routes = Routes(int(n) - 2)
    for name, way in WAYS.items():
        pair = lab.compare_us(getattr(routes, way), routes.plain, clock="end_to_end", pairs=15)
        measured[name].append(pair.first.median)
    measured["什么都不改"].append(pair.second.median)
    routes.close()

fig, ax = plt.subplots()
for name, times in measured.items():
    ax.loglog(sizes, times, label=name, linestyle="--" if name == "什么都不改" else "-")
ax.set_xticks(sizes, [str(n) for n in sizes])
ax.minorticks_off()
ax.set_xlabel("图的节点数")
ax.set_ylabel("一个请求的端到端时间（µs）")
ax.set_title(f"一个标量变了，怎么办（{lab.gpu_name()}）")
ax.legend()
plt.show()
floor = measured["什么都不改"][-1]
lab.say(
    lab.table(
        (f"{sizes[-1]} 个节点", "端到端 µs", "比只启动多 µs"),
        [(name, f"{times[-1]:.0f}", f"{times[-1] - floor:.0f}") for name, times in measured.items()],
    )
)

# %% [markdown]
# 把一步一步的 CPU 时间也拆开看，问题就是“钱花在哪一步”：

# %% tags=["demo", "gpu"]
from time import perf_counter_ns

NODES = 200
routes, edited = Routes(NODES - 2), Routes(NODES - 2)
steps = {"重新捕获": [], "实例化": [], "整图更新": [], "改定义里的一个节点": [], "改可执行图的一个节点": []}
for _ in range(13):
    clock = [perf_counter_ns()]
    graph = routes.recaptured()
    clock.append(perf_counter_ns())
    made = lab.check_cuda(cudart.cudaGraphInstantiate(graph, 0))
    clock.append(perf_counter_ns())
    lab.check_cuda(cudart.cudaGraphExecUpdate(routes.live, graph))
    clock.append(perf_counter_ns())
    lab.check_cuda(driver.cuGraphKernelNodeSetParams(routes.nodes[1], routes.changed()))
    clock.append(perf_counter_ns())
    lab.check_cuda(driver.cuGraphExecKernelNodeSetParams(edited.live, edited.nodes[1], edited.changed()))
    clock.append(perf_counter_ns())
    for spent, us in zip(steps.values(), np.diff(clock) / 1000, strict=True):
        spent.append(us)
    lab.check_cuda(cudart.cudaGraphExecDestroy(made))
    lab.check_cuda(cudart.cudaGraphDestroy(graph))
routes.close()
edited.close()

cost = {name: float(np.median(spent[3:])) for name, spent in steps.items()}  # the first three are warm-up
renewal, single_cost = cost["重新捕获"] + cost["整图更新"], cost["改可执行图的一个节点"]
lab.say(
    lab.table((f"{NODES} 个节点的图，一步", "CPU µs（中位数）"), [(name, f"{us:.1f}") for name, us in cost.items()])
    + f"\n\n实例化是整图更新的 **{cost['实例化'] / cost['整图更新']:.0f}** 倍；重新捕获是整图更新的 **{cost['重新捕获'] / cost['整图更新']:.0f}** 倍。"
    + f" 改可执行图的一个节点，连同准备参数 {single_cost:.1f} µs；"
    + f"重新捕获再整图更新一次的钱，够这样改大约 **{renewal / single_cost:.0f}** 个节点（图里一共 {NODES} 个）。"
)

# %% [markdown]
# 怎么读这两张表：
#
# - 课程最初的讲义建议“优先使用 `cudaGraphExecUpdate`，而不是重新捕获整张图”。这句话只说对了一半：
#   **更新省的是实例化**；如果新定义是重新捕获来的，捕获的钱照付。在 Python 里，捕获要把每次启动的代码重跑一遍，
#   往往是更贵的那一半。C++ 程序的捕获便宜些，比例会不同。
# - 连捕获也想省，就别捕获：直接改节点参数，或者改定义再整图更新。
# - 直接改节点参数，只为变了的节点付钱。改定义也要一个节点一个节点地改，还要再加一次整图更新，换来的是定义始终是真的。
# - 那么整图更新什么时候合算？新定义反正要有的时候：变的节点很多（和重新捕获相比的分界线，就是上面最后那个数；
#   它比图里的节点还多，就说明改遍所有节点也比重新捕获便宜），或者工作在库里，哪些节点变了你并不知道，只能重新捕获。
#
# **轮到你**：如果图里有 1000 个节点，每个请求都要换掉其中 10 个的地址，用哪一种？先写下猜测，再把上一格的 `NODES` 改成 1000 验证。

# %% [markdown]
# ## 什么时候更新，什么时候放弃
#
# 更新很便宜，但不是白送的。请求的“样子”（形状、地址、内核的选择合在一起，叫属性键）如果每次都在变，
# 那么每次都捕获、更新，还不如老老实实逐个启动。llama.cpp 就为这件事改过好几轮，大致是：
#
# - 最初的办法：连着变几次，就认定这个模型不适合用图，**永远关掉**。结果开头处理提示词时变了几次，后面几千步稳定的生成再也用不上图；
# - 去掉这个限制，又遇到另一种：两种样子来回跳，于是**每一步都更新**；
# - 后来的办法：连续几次样子相同才捕获，变了就先逐个启动，而且随时可以重新启用。
#
# 用一串模拟的请求比一比三种策略（这一格不需要 GPU，价格是假设的）：

# %% tags=["demo"]
PRICE = {"逐个启动": 1300, "捕获": 1300, "实例化": 400, "更新": 40, "重放": 210}  # µs, assumed for 200 kernels in Python
prompt = [f"提示词 {i}" for i in range(6)]
keys = prompt + ["生成"] * 60 + ["甲", "乙"] * 15 + ["生成"] * 60


def always(keys):
    """Capture and update whenever the key differs from the last one."""
    bill, last = [], None
    for key in keys:
        if key != last:
            bill += ["捕获", "实例化" if last is None else "更新"]
        bill.append("重放")
        last = key
    return bill


def gives_up(keys, limit=4):
    """The same, but after `limit` changes in a row never use a graph again."""
    bill, last, changes = [], None, 0
    for key in keys:
        changes = changes + 1 if key != last else 0
        if changes >= limit:
            return bill + ["逐个启动"] * (len(keys) - bill.count("重放"))
        if key != last:
            bill += ["捕获", "实例化" if last is None else "更新"]
        bill.append("重放")
        last = key
    return bill


def patient(keys, wait=2):
    """Launch one by one until the key has been the same `wait` times; then capture, and update what there is."""
    bill, last, same, captured = [], None, 0, None
    for key in keys:
        same = same + 1 if key == last else 1
        if key == captured:
            bill.append("重放")
        elif same >= wait:
            bill += ["捕获", "实例化" if captured is None else "更新", "重放"]
            captured = key
        else:
            bill.append("逐个启动")
        last = key
    return bill


rows = []
for name, policy in (("有变化就更新", always), ("变几次就永远关掉", gives_up), ("稳定了再捕获", patient)):
    bill = policy(keys)
    rows.append((name, *(bill.count(item) for item in PRICE), f"{sum(PRICE[item] for item in bill) / 1000:.0f}"))
lab.say(lab.table((f"{len(keys)} 个请求", *PRICE, "合计 ms"), rows), measured=False)

# %% [markdown]
# 没有一种策略对所有流量都最好。更新要捕获、捕获又和逐个启动一样贵的时候，“有变化就更新”并不亏多少；要是捕获贵得多，耐心就值钱了。
# 把 `PRICE` 里的“捕获”改成 3000 再运行一次看看。
#
# 如果来回跳的样子就那么几种，还有第四种办法：一种样子留一张图，《每个形状一张图》会讲。

# %% [markdown]
# ## 练习
#
# 四道练习，共 12 分。解答里可以用这些给定的名字：
#
# - 模块与工具：`np`、`cp`、`ctypes`、`cudart`、`driver`、`partial`、`lab`；
# - 流与内核：`stream`、`BLOCK`、`mix`、`twist`、`absorb`、`spin`、`launch_mix`、`launch_absorb`、`launch_spin`、`launch_request`；
# - 图：`capture`、`capture_request`、`define`、`run`、`LAYOUT`、`chain_nodes`、`arguments`、`try_update`；
# - 描述：`kernel`、`memcpy`、`memset`、`chain`、`build`、`mailbox`、`post`；
# - NumPy 参考：`mixed`、`twisted`、`served`；
# - 练习三给出的 `Server`、`serve_by_rebuilding`，练习四给出的 `CASES`。
#
# `fresh_params`、`stale`、`Routes`、`ask_driver` 等名字来自演示单元（只做实验，评分时不运行），解答里不能用，
# 但可以照着写：评分会在干净的环境里运行给定的单元和你的解答，跳过演示单元。
#
# ### 练习一：搬家（3 分）
#
# 内存池整理了一次，一批数组搬到了新地址。写 `retarget(graph, moves)`，让一张活的图跟着搬：
#
# - `graph` 是 `cupy.cuda.Graph`，一条由内核节点组成的链（内核都在 `LAYOUT` 里）；
# - `moves` 是一串 `(旧数组, 新数组)`，大小和类型都相同；
# - 凡是地址实参（类型是 `ctypes.c_void_p`）等于某个旧数组地址的，一律换成对应的新数组的地址；其余的实参、网格、块都照旧；
# - 只能改节点参数，不重新捕获，也不重新实例化；
# - 返回被改动的节点的个数（`int`）：一个旧地址也没有的节点不要动，也不算。
#
# 两个陷阱，也在考查之列：
#
# - 两块数组可能**互换**：`moves` 里同时有 `(a, b)` 和 `(b, a)`；
# - 搬过一次的图，以后**还会再搬**：第二次调用给出的旧数组，是第一次的新数组。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 参数从哪里读？改完以后，读到的还和图正在用的一样吗？如果不一样，第二次搬家时会找到什么？
#
# 互换时，如果按 `moves` 的次序一条一条地替换，`a` 先变成 `b`，接着会发生什么？怎样才能每个地址只查一次？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `arguments(node)` 返回读到的结构、类型和值；只有类型是 `ctypes.c_void_p` 的才是地址。
#
# 新建 `driver.CUDA_KERNEL_NODE_PARAMS()`，要填 `func`、`gridDimX/Y/Z`、`blockDimX/Y/Z`、`sharedMemBytes`、`kernelParams`，前几项可以从读到的结构照抄。
#
# 改可执行图：`driver.cuGraphExecKernelNodeSetParams(graph.graphExec, node, params)`；
# 改定义：`driver.cuGraphKernelNodeSetParams(node, params)`。都要用 `lab.check_cuda` 检查。
#
# </details>

# %% solution="retarget" tags=["gpu"]
def retarget(graph, moves):
    """Lead a live graph to new buffers by its nodes' parameters.

    graph: cupy.cuda.Graph, a chain of kernel nodes known to LAYOUT. moves: pairs (old array, new array), cupy, of
    equal sizes, all at the same time. Every argument that is the address of an old array becomes that of its new one.
    Returns the number of nodes changed. May be called again with arrays that an earlier call led to.
    """
    ### BEGIN SOLUTION: 先把 moves 变成“旧地址 → 新地址”的字典，再逐个节点读参数、换地址、写一份新的；想清楚要写到哪两个地方
    where = {old.data.ptr: new.data.ptr for old, new in moves}
    changed = 0
    for node, _ in chain_nodes(graph.graph):
        read, types, values = arguments(node)
        new_values = [where.get(value, value) if kind is ctypes.c_void_p else value for kind, value in zip(types, values, strict=True)]
        if new_values == values:
            continue
        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = read.func
        params.gridDimX, params.gridDimY, params.gridDimZ = read.gridDimX, read.gridDimY, read.gridDimZ
        params.blockDimX, params.blockDimY, params.blockDimZ = read.blockDimX, read.blockDimY, read.blockDimZ
        params.sharedMemBytes = read.sharedMemBytes
        params.kernelParams = (tuple(new_values), types)
        lab.check_cuda(driver.cuGraphExecKernelNodeSetParams(graph.graphExec, node, params))
        lab.check_cuda(driver.cuGraphKernelNodeSetParams(node, params))  # so that the definition stays true
        changed += 1
    return changed
    ### END SOLUTION


# %% test="retarget" kind="structure" points=3 tags=["gpu"]
data, other, feed = (np.arange(first, first + 1000, dtype=np.uint32) for first in (0, 5000, 90000))
x, y, source = on_gpu(data), on_gpu(other), on_gpu(feed)
graph = student.capture_request(x, source, 7, 3)
check.equal(student.retarget(graph, [(x, y)]), 5, why="3 + 2 个节点都用到了 x，应当改动 5 个，返回 5。")
graph.run(1)
check.equal(y.read(), reference.served(other, feed, 7, 3), why="搬家以后，图应当在 y 上算出同样的请求。标量、网格、块有没有照抄？改的是可执行图吗？")
check.equal(x.read(), data, why="搬家以后，图还在碰旧数组 x。每一个节点都改到了吗？")
check.equal(source.read(), feed, why="source 不在 moves 里，它的地址和内容都不应当变。")
check.equal(student.retarget(graph, [(y, x)]), 5, why="第二次搬家（从 y 搬回 x）没有找到该改的节点。定义和可执行图是两本账，第一次改完以后，定义里写的还是老地址吗？")
graph.run(1)
check.equal(x.read(), reference.served(data, feed, 7, 3), why="第二次搬家以后结果不对：图应当又在 x 上工作。")
### BEGIN HIDDEN TESTS
size, n, stamp = int(secret.integers(2000, 9000)), int(secret.integers(4, 30)), int(secret.integers(2**31, 2**32))
now = [secret.integers(0, 2**32, size, dtype=np.uint32) for _ in range(5)]
a, b, c, d, idle = (on_gpu(each) for each in now)
graph = student.capture_request(a, c, stamp, n)
check.equal(student.retarget(graph, [(c, d), (b, idle)]), 1, why="只有吸收输入的那个节点用到了要搬的数组，应当只改 1 个；没有用到的数组不算。")
graph.run(1)
now[0] = reference.served(now[0], now[3], stamp, n)
check.equal(a.read(), now[0], why="只搬输入数组，结果不对。只有地址才替换；标量很大时，类型还对吗？")
check.equal(student.retarget(graph, [(a, d), (d, a)]), n + 2, why="两块数组互换时，改动的节点数不对。")
graph.run(2)
for _ in range(2):
    now[3] = reference.served(now[3], now[0], stamp, n)
check.equal(d.read(), now[3], why="两块数组互换时结果不对。替换是同时发生的：每个地址只查一次，不要一条一条地接着替换。")
check.equal(a.read(), now[0], why="互换以后 a 成了输入，只能读，不能写。")
check.equal(student.retarget(graph, [(d, b), (a, c)]), n + 2, why="连续搬第三次时，没有找到该改的节点。")
graph.run(3)
for _ in range(3):
    now[1] = reference.served(now[1], now[2], stamp, n)
check.equal(b.read(), now[1], why="连续搬三次以后结果不对。")
check.equal(student.retarget(graph, [(d, idle)]), 0, why="图里已经没有这块旧数组，应当一个也不改，返回 0。")
graph.run(1)
now[1] = reference.served(now[1], now[2], stamp, n)
check.equal(b.read(), now[1], why="什么都不用搬的时候，图却变了。")
for buffer, expected in ((a, now[0]), (c, now[2]), (d, now[3]), (idle, now[4])):
    check.equal(buffer.read(), expected, why="搬走以后，有一块不该再碰的数组变了。")
# Chains of any kernels known to LAYOUT, in any order, with grids, blocks and sizes of their own.
PLANTED = """
def planted(capture, kernels, steps):
    import numpy as np

    def work():
        for name, x, source, scalar, size, blocks, threads in steps:
            second = source if name == "absorb" else np.uint32(scalar)
            kernels[name]((blocks,), (threads,), (x, second, np.uint32(size)))
    return capture(work)


def wound(capture, kernels, x):
    \"\"\"Never to be launched: how long the first node spins, an integer of 64 bits, is the number of an address.\"\"\"
    import numpy as np

    def work():
        kernels["spin"]((1,), (1,), (np.uint64(x.data.ptr),))
        kernels["mix"]((4,), (256,), (x, np.uint32(1), np.uint32(x.size)))
    return capture(work)
"""
steps = []
for number in range(9):
    at, source = (int(each) for each in secret.permutation(3)[:2])
    name = ("mix", "twist", "absorb")[number % 3 if number < 6 else int(secret.integers(3))]
    steps.append([name, at, source, int(secret.integers(2**32)), int(secret.integers(size // 2, size)), int(secret.integers(2, 8)), 64 * int(secret.integers(1, 9))])
steps = [steps[int(place)] for place in secret.permutation(len(steps))]
now = [each.write(secret.integers(0, 2**32, size, dtype=np.uint32)) for each in (a, b, c, d)]
kernels = {name: student.value(name) for name in ("mix", "twist", "absorb", "spin")}
graph = student.define(PLANTED, "planted")(student.value("capture"), kernels, [[name, (a, b, c)[at], (a, b, c)[source], *rest] for name, at, source, *rest in steps])
touched = sum(at < 2 or (name == "absorb" and source < 2) for name, at, source, *_ in steps)
check.equal(student.retarget(graph, [(a, d), (b, a)]), touched, why="链上有 LAYOUT 里别的内核，次序也不同，改动的节点数不对。每个节点的实参各是什么类型，问 arguments。")
graph.run(1)
led = {0: 3, 1: 0, 2: 2}
for name, at, source, scalar, length, blocks, threads in steps:
    part = min(length, blocks * threads)
    old = now[led[at]][:part].copy()
    new = old ^ now[led[source]][:part] if name == "absorb" else reference.twisted(old, scalar) if name == "twist" else reference.mixed(old, 1, first=scalar)
    now[led[at]] = np.concatenate([new, now[led[at]][part:]])
for buffer, expected in zip((a, b, c, d), now, strict=True):
    check.equal(buffer.read(), expected, why="链上有 LAYOUT 里别的内核，次序、网格、块、大小也各不相同，搬家以后结果不对。函数、网格、块和其余的实参都照抄读到的了吗？")
graph = student.define(PLANTED, "wound")(student.value("capture"), kernels, a)
check.equal(student.retarget(graph, [(a, b)]), 1, why="有一个 64 位整数的实参，数值碰巧和旧地址一样：它不是地址（类型不是 ctypes.c_void_p），不能替换。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习二：能更新就更新，不能就重建（3 分）
#
# 写 `update_or_rebuild(graph_exec, graph)`：用新定义 `graph`（`cudaGraph_t`）去更新活的图 `graph_exec`（`cudaGraphExec_t`），返回两个值。
#
# - 更新被接受：返回 `(graph_exec, None)`，还是原来的那一个，不再实例化；
# - 更新被**拒绝**（错误码 910）：由 `graph` 实例化一张新的，销毁旧的，返回 `(新的, 原因)`；
#   原因是枚举的名字，例如 `"cudaGraphExecUpdateErrorTopologyChanged"`；
# - 其它的错误码不是拒绝，是出错：抛出异常（那时的“原因”不算数，别拿它判断）。出错的时候，旧的那一张必须还能用；重建中途失败也一样，所以先有新的，再扔旧的。
#
# 销毁用 `cudart.cudaGraphExecDestroy`，实例化用 `cudart.cudaGraphInstantiate`；测试会数它们各被调用了几次。`graph` 是调用者的，不要销毁。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# `try_update` 的返回值一共有几种可能？各该走哪条路？如果把“不是 0”都当成拒绝，传来一个无效的图句柄时会发生什么？
# 实例化失败会抛异常：那一刻，旧的还在吗？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `error, reason, node = try_update(graph_exec, graph)`；拒绝的码是 `driver.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE`，也就是 910。
#
# 把别的错误码变成异常：`lab.check_cuda((driver.CUresult(error),))`，码不为零就抛 `CudaError`。
#
# `cudart.cudaGraphInstantiate(graph, 0)` 和 `cudart.cudaGraphExecDestroy(graph_exec)` 都返回元组，用 `lab.check_cuda` 拆开。
#
# </details>

# %% solution="update_or_rebuild" tags=["gpu"]
def update_or_rebuild(graph_exec, graph):
    """Bring a live executable graph to a new definition, in place if the driver allows it.

    graph_exec: cudaGraphExec_t; graph: cudaGraph_t, which stays the caller's. Returns (executable graph, reason):
    the same one and None if it was updated; a new one, the old one destroyed, and the name of the
    cudaGraphExecUpdateResult if the update was refused. Raises for any other error; graph_exec is then still good.
    """
    ### BEGIN SOLUTION: 先 try_update，再按错误码分三路：0、910、其它；重建时先有新的，再销毁旧的
    error, reason, _ = try_update(graph_exec, graph)
    if error == 0:
        return graph_exec, None
    if error != driver.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE:
        lab.check_cuda((driver.CUresult(error),))
    rebuilt = lab.check_cuda(cudart.cudaGraphInstantiate(graph, 0))
    lab.check_cuda(cudart.cudaGraphExecDestroy(graph_exec))
    return rebuilt, reason
    ### END SOLUTION


# %% test="update_or_rebuild" kind="structure" points=3 tags=["gpu"]
WATCH = """
class Watch:
    '''Notes what is instantiated (0) and destroyed (its handle) through cuda.bindings while it is on; memory may be short.'''

    def __init__(self, short=False):
        from cuda.bindings import driver, runtime
        self.events, self.kept, self.short = [], [], short
        self.errors = {runtime: runtime.cudaError_t.cudaErrorMemoryAllocation, driver: driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY}
        for module, prefix in ((runtime, "cuda"), (driver, "cu")):
            for name in ("GraphInstantiate", "GraphInstantiateWithFlags", "GraphInstantiateWithParams", "GraphExecDestroy"):
                original = getattr(module, prefix + name, None)
                if original is not None:
                    self.kept.append((module, prefix + name, original))
                    setattr(module, prefix + name, self.noted(original, name == "GraphExecDestroy", self.errors[module]))

    def noted(self, original, destroys, error):
        def call(*args, **kwargs):
            self.events.append(int(args[0]) if destroys else 0)
            if self.short and not destroys:
                return error, None
            return original(*args, **kwargs)
        return call

    def off(self):
        for module, name, original in self.kept:
            setattr(module, name, original)
        return self.events
"""
TOOLS = """
def instantiate(graph):
    from cuda.bindings import runtime
    error, made = runtime.cudaGraphInstantiate(graph, 0)
    assert int(error) == 0, error.name
    return made

def reason(before, after):
    '''None if an executable of `before` can be updated by `after`, else the reason, straight from the driver.'''
    import ctypes
    from cuda.bindings import driver, runtime

    class Info(ctypes.Structure):
        _fields_ = [("result", ctypes.c_int), ("node", ctypes.c_void_p), ("from_node", ctypes.c_void_p)]

    _, address, _ = driver.cuGetProcAddress(b"cuGraphExecUpdate", 12000, 0)
    update = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(Info))(address)
    info, made = Info(), instantiate(before)
    error = update(int(made), int(after), ctypes.byref(info))
    runtime.cudaGraphExecDestroy(made)
    return runtime.cudaGraphExecUpdateResult(info.result).name if error else None

def address_of(graph_exec):
    return int(graph_exec)
"""
instantiate, address_of = student.define(TOOLS, "instantiate"), student.define(TOOLS, "address_of")


def step(live, graph, reason, event):
    """One call of the learner's function under watch; returns the executable graph that it gave back."""
    was = address_of(live)
    watch = student.define(WATCH, "Watch")()
    try:
        answer = student.update_or_rebuild(live, graph)
    finally:
        events = watch.off()
    check.that(isinstance(answer, (list, tuple)) and len(answer) == 2, why="应当返回两个值：可执行图和原因（更新成功时原因是 None）。")
    check.equal(answer[1], reason, why=f"{event}：原因不对。更新成功时是 None，被拒绝时是枚举的名字。")
    if reason is None:
        check.equal(events, [], why=f"{event}：更新已经成功，不应当再实例化，也不应当销毁。")
        check.equal(address_of(answer[0]), was, why=f"{event}：更新已经成功，应当原样返回原来的那一张。")
    else:
        check.equal(events, [0, was], why=f"{event}：更新被拒绝，应当先实例化一张新的，再销毁旧的那一张，各一次。")
        check.that(address_of(answer[0]) != was, why=f"{event}：返回的还是已经销毁的那一张，应当返回新的。")
    return answer[0]


def mix_chain(*scalars):
    """The description of a chain of mixes on buffer 0."""
    one = {"kind": "Kernel", "function": "mix", "buffer": 0, "scalar": 0, "blocks": 16, "cooperative": False, "context": 0}
    return {"nodes": [one | {"scalar": scalar} for scalar in scalars], "edges": [[i, i + 1] for i in range(len(scalars) - 1)]}


data = np.arange(4096, dtype=np.uint32)
x, y = on_gpu(data), on_gpu(data)
live = instantiate(student.build(mix_chain(1, 2), [x, y]))
live = step(live, student.build(mix_chain(6, 7), [x, y]), None, "只有标量变了")
student.run(live)
data = reference.mixed(data, 2, first=6)
check.equal(x.read(), data, why="更新以后，图应当按新的标量计算。")
live = step(live, student.build(mix_chain(3, 4, 5), [x, y]), "cudaGraphExecUpdateErrorTopologyChanged", "多了一个节点")
student.run(live)
data = reference.mixed(data, 3, first=3)
check.equal(x.read(), data, why="重建以后，返回的图应当做新定义里的三个内核。")
check.raises("Exception", student.update_or_rebuild, live, 0, why="图句柄无效（0），这不是拒绝，应当抛出异常。判断的是错误码吗？出错的时候，原因里写着什么都不算数。")
student.run(live)
data = reference.mixed(data, 3, first=3)
check.equal(x.read(), data, why="出错以后，旧的那一张应当还能用：在有了新的之前，不要销毁旧的。")
### BEGIN HIDDEN TESTS
def refused(live, graph, short, why):
    """What is instantiated and destroyed by a call that must raise."""
    watch = student.define(WATCH, "Watch")(short)
    try:
        check.raises("Exception", student.update_or_rebuild, live, graph, why=why)
    finally:
        events = watch.off()
    return events


check.equal(refused(live, 0, False, "图句柄无效（0），应当抛出异常。"), [], why="图句柄无效（0）：错误码不是 910，不是拒绝，却去实例化或销毁了。只有 910 才重建，别的错误码直接抛出。")
noted = refused(live, student.build(mix_chain(1, 2, 3, 4), [x, y]), True, "更新被拒绝，重建时实例化又失败（显存不够）：应当抛出异常。检查实例化的返回码了吗？")
check.that(not any(noted), why="更新被拒绝，重建时实例化又失败（显存不够）：旧的那一张却被销毁了。有了新的，才能扔旧的。")
student.run(live)
data = reference.mixed(data, 3, first=3)
check.equal(x.read(), data, why="重建中途失败以后，旧的那一张应当还能用。")


def replaced(shape, number, **changes):
    """A description with the fields of one node changed."""
    nodes = list(shape["nodes"])
    nodes[number] = nodes[number] | changes
    return shape | {"nodes": nodes}


def fills(value):
    return {"kind": "Memset", "buffer": 0, "value": value, "width": 4096, "height": 1}


def copies(direction):
    return {"kind": "Memcpy", "direction": direction, "buffer": 0, "bytes": 16384}


i, j, k, m = (int(each) for each in secret.integers(2**20, 2**31, 4))
base = mix_chain(i, j, k)
inward = replaced(mix_chain(i, j), 0) | {"nodes": [copies("HtoD"), *mix_chain(j)["nodes"]]}
outward = inward | {"nodes": [copies("DtoH"), *mix_chain(j)["nodes"]]}


def one(v, scalar):
    return reference.mixed(v, 1, first=scalar)


# Name, old and new description, and what the new graph makes of (x, y).
planted = [
    ("换了缓冲和标量", base, replaced(replaced(base, 0, scalar=m), 2, buffer=1), lambda v, w: (one(one(v, m), j), one(w, k))),
    ("换了内核函数", base, replaced(base, 1, function="twist"), lambda v, w: (one(reference.twisted(one(v, i), j), k), w)),
    ("多了一个节点", base, mix_chain(i, j, k, m), lambda v, w: (one(one(one(one(v, i), j), k), m), w)),
    ("节点数不变，边变了", base, replaced(base, 2, buffer=1) | {"edges": [[0, 1], [0, 2]]}, lambda v, w: (one(one(v, i), j), one(w, k))),
    ("内核换成了 memset", base, base | {"nodes": [base["nodes"][0], fills(m), base["nodes"][2]]}, lambda v, w: (one(np.full(4096, m, np.uint32), k), w)),
    ("普通启动换成了协作启动", base, replaced(base, 1, cooperative=True), lambda v, w: (one(one(one(v, i), j), k), w)),
    ("拷贝的方向反了", inward, outward, lambda v, w: (one(v, j), w)),
]
mirror = [on_gpu(np.zeros(4096, np.uint32)) for _ in range(2)]
for number in secret.permutation(len(planted)):
    event, old, new, expected = planted[int(number)]
    wanted = [reference.define(TOOLS, "reason")(*(reference.build(each, mirror) for each in pair)) for pair in ((old, new), (new, old))]
    live = instantiate(student.build(old, [x, y]))
    live = step(live, student.build(new, [x, y]), wanted[0], event)
    v, w = x.write(secret.integers(0, 2**32, 4096, dtype=np.uint32)), y.write(secret.integers(0, 2**32, 4096, dtype=np.uint32))
    student.run(live)
    if new is outward:
        check.equal(student.value("mailbox")[:4096], v, why=f"{event}：重建以后，图应当先把缓冲拷到主机。")
    v, w = expected(v, w)
    check.equal(x.read(), v, why=f"{event}：返回的图算出来的结果不对。它应当做新定义里的工作。")
    check.equal(y.read(), w, why=f"{event}：返回的图把另一块缓冲算错了。")
    live = step(live, student.build(old, [x, y]), wanted[1], f"{event}，又变了回去")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：每个请求都不一样，图只造一次（3 分）
#
# 一个请求是 `(source, stamp)`：输入数组和标量都由它说了算，工作是 `launch_request(x, source, stamp, n)`。
# 笨办法 `serve_by_rebuilding` 每个请求重新捕获、重新实例化。你来写 `make_server(x, n)`：
#
# - 用给定的 `stream` 捕获**一次**；
# - 写一个函数 `change(source, stamp)`，把活的图改成处理这个请求；
# - 返回给定的 `Server(graph, change)`，`graph` 就是捕获到的那张图（CuPy 的 `Graph`），所有请求都由它来做，不换别的图；
#   它对每个请求先 `change`、再启动，不等待。可以先后造好几个，`x` 的大小和 `n` 各不相同，互不相干。
#
# `source` 可能是捕获时还不存在的数组，大小总是和 `x` 一样。
#
# 除了结果正确，还要快。量的是 `n = 150` 时一串请求的端到端时间：从开始提交，到整个设备做完。每个请求都是没有见过的：`stamp` 总是新的，`source` 也换来换去。
# 这段时间不超过 `serve_by_rebuilding` 的三分之一，得满分；只达到二分之一，得一半的分。如果在这台机器上参考实现自己也快得不多，门槛会降到它的加速比的一半。

# %% tags=["gpu"]
class Server:
    """One live graph that serves every request: change(source, stamp) adapts it, then it is launched on `stream`."""

    def __init__(self, graph, change):
        self.graph, self.change = graph, change

    def __call__(self, requests):
        """Serve requests, pairs (source, stamp), one after the other, without waiting."""
        for source, stamp in requests:
            self.change(source, stamp)
            self.graph.launch(stream)

    def wait(self):
        stream.synchronize()


def serve_by_rebuilding(x, n, requests):
    """Serve requests (pairs source, stamp) with a new graph each, without waiting. The baseline of this exercise."""
    for source, stamp in requests:
        graph = define(partial(launch_request, x, source, stamp, n))
        made = lab.check_cuda(cudart.cudaGraphInstantiate(graph, 0))
        lab.check_cuda(cudart.cudaGraphLaunch(made, stream.ptr))
        lab.check_cuda(cudart.cudaGraphExecDestroy(made))  # freed once it has run
        lab.check_cuda(cudart.cudaGraphDestroy(graph))


# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# `n + 2` 个节点里，随请求变的有几个，是哪几个？哪些东西可以在 `make_server` 里准备好，哪些一定要在 `change` 里做？
# 如果 `change` 里还要捕获，省下来的是哪一步？捕获的时候还没有请求，`source` 先放什么都行，反正第一次启动之前会改掉。
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `capture_request` 捕获，`chain_nodes(graph.graph)` 按先后给出节点。
#
# `driver.cuGraphExecKernelNodeSetParams(graph.graphExec, node, params)`，`params` 是一份填全了的 `driver.CUDA_KERNEL_NODE_PARAMS`；
# 它可以建一次反复用，每个请求只重新给 `kernelParams` 赋值，因为设置时值会被抄走。参数的类型在 `LAYOUT[int(absorb.kernel.ptr)]` 和 `LAYOUT[int(mix.kernel.ptr)]` 里。
#
# </details>

# %% solution="make_server" tags=["gpu"]
def make_server(x, n):
    """Capture launch_request(x, …, n) once, on `stream`, and return a Server that adapts it to each request.

    x: cupy uint32, 1-D, advanced in place by every request; it stays the caller's. n: at least 1. Sources are cupy
    uint32 arrays of the size of x, which the caller keeps until the work is done; stamps int below 2**32.
    """
    ### BEGIN SOLUTION: 捕获一次，找出随请求变的那两个节点，在 change 里只改它们的参数
    graph = capture_request(x, x, 0, n)
    (absorbing, _), (stamping, _), *_ = chain_nodes(graph.graph)

    def prepared(kernel):
        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = driver.CUfunction(kernel.kernel.ptr)
        params.gridDimX, params.gridDimY, params.gridDimZ = -(-x.size // BLOCK), 1, 1
        params.blockDimX, params.blockDimY, params.blockDimZ = BLOCK, 1, 1
        return params, LAYOUT[int(kernel.kernel.ptr)]

    (absorb_params, absorb_types), (mix_params, mix_types) = prepared(absorb), prepared(mix)

    def change(source, stamp):
        absorb_params.kernelParams = ((x.data.ptr, source.data.ptr, x.size), absorb_types)
        lab.check_cuda(driver.cuGraphExecKernelNodeSetParams(graph.graphExec, absorbing, absorb_params))
        mix_params.kernelParams = ((x.data.ptr, stamp, x.size), mix_types)
        lab.check_cuda(driver.cuGraphExecKernelNodeSetParams(graph.graphExec, stamping, mix_params))

    return Server(graph, change)
    ### END SOLUTION


# %% test="make_server_result" kind="structure" points=1 tags=["gpu"]
data, feeds = np.arange(1000, dtype=np.uint32), [np.full(1000, value, np.uint32) for value in (11, 22)]
x, sources = on_gpu(data), [on_gpu(feed) for feed in feeds]
server = student.make_server(x, 4)
check.equal(x.read(), data, why="建图的时候 x 就变了。make_server 只应当准备和捕获，不执行。")
check.nodes(server.get("graph"), kernels=6, total=6, edges=5, why="图应当是 n + 2 个内核连成的链。Server 的第一个参数是捕获到的图吗？")
server([(sources[0], 5), (sources[1], 6), (sources[0], 7)])
server.wait()
for which, stamp in ((0, 5), (1, 6), (0, 7)):
    data = reference.served(data, feeds[which], stamp, 4)
for buffer, feed in zip(sources, feeds, strict=True):
    check.equal(buffer.read(), feed, why="输入数组被改写了：absorb 的两个地址是不是写反了？")
check.equal(x.read(), data, why="三个请求处理下来，结果不对。每个请求的 source 和 stamp 都改到了吗？改的是可执行图，而不只是定义吗？")
### BEGIN HIDDEN TESTS
size, n = int(secret.integers(2000, 9000)), int(secret.integers(5, 30))
data = secret.integers(0, 2**32, size, dtype=np.uint32)
feeds = [secret.integers(0, 2**32, size, dtype=np.uint32) for _ in range(3)]
x, sources = on_gpu(data), [on_gpu(feed) for feed in feeds]
server = student.make_server(x, n)
for _ in range(2):
    picks = [(int(secret.integers(3)), int(secret.integers(2**32))) for _ in range(int(secret.integers(6, 15)))]
    server([(sources[which], stamp) for which, stamp in picks])
    server.wait()
    for which, stamp in picks:
        data = reference.served(data, feeds[which], stamp, n)
    check.equal(x.read(), data, why="换了大小、n 和一串随机的请求，结果不对。两个节点都改了吗？标量大到 32 位时类型还对吗？")
    for source, feed in zip(sources, feeds, strict=True):
        check.equal(source.read(), feed, why="输入数组被改写了：absorb 的两个地址是不是写反了？")
    feeds = [source.write(secret.integers(0, 2**32, size, dtype=np.uint32)) for source in sources]
stamp = int(secret.integers(2**32))
# The server's graph does the work: without one of its nodes, exactly what that node does is missing, whatever is asked.
SWITCH = """
def switch(graph, chain_nodes, number, on):
    from cuda.bindings import driver
    if not hasattr(graph, "graphExec"):
        return False
    node, _ = chain_nodes(graph.graph)[number]
    (error,) = driver.cuGraphNodeSetEnabled(graph.graphExec, node, on)
    return int(error) == 0
"""
graph, left_out = server.get("graph"), int(secret.integers(n))
switch = partial(student.define(SWITCH, "switch"), graph, student.value("chain_nodes"), 2 + left_out)
switched = switch(0)
server([(source, stamp) for source in sources])
server.wait()
for feed in feeds:
    begun = reference.mixed(reference.mixed(data ^ feed, 1, first=stamp), left_out)
    data = reference.mixed(begun, n - left_out - 1, first=left_out + 1)
check.that(switched, why="server.graph 里的节点关不掉（cuGraphNodeSetEnabled）。Server 的第一个参数应当是捕获到的那张 CuPy 图，它的 graphExec 由它的 graph 实例化而来。")
check.equal(x.read(), data, why="把 server.graph 的一个节点关掉，再来几个请求：结果里缺的应当正好是这个节点的工作，却不是。做事的是不是另一张图？是不是给每个请求各存了一张图，或者逐个启动了内核？")
check.that(switch(1), why="server.graph 里关掉的节点打不开了。处理请求的时候换了图吗？")
# Where absorb is launched no more, only what was captured before can do the work; what it is as a function stays to be asked.
WITHOUT_ABSORB = """
def without_absorb(server, requests, launch_absorb):
    names = launch_absorb.__globals__
    kept = names["absorb"]

    class Unlaunched:
        def __getattr__(self, name):
            return getattr(kept, name)

        def __call__(self, *args, **kwargs):
            pass

    names["absorb"] = Unlaunched()
    try:
        server(requests)
    finally:
        names["absorb"] = kept
"""
stamps = [int(each) for each in secret.integers(0, 2**32, 3)]
student.define(WITHOUT_ABSORB, "without_absorb")(server, list(zip(sources, stamps, strict=True)), student.value("launch_absorb"))
server.wait()
for feed, each in zip(feeds, stamps, strict=True):
    data = reference.served(data, feed, each, n)
check.equal(x.read(), data, why="造好以后，让 absorb 不再能启动，再来几个请求：捕获到的图照样能算，结果却不对。图只造一次，change 里是不是又捕获了一遍，或者启动了内核？")
# Behind a kernel that keeps the stream busy, a request comes back while it still does. A pause of this process may look like waiting: tried again.
WAITED = """
def waited(server, request, stream, launch_spin):
    import cupy
    behind = cupy.cuda.Event()
    for tries, us in enumerate((20_000, 80_000, 320_000), 1):
        stream.synchronize()
        with stream:
            launch_spin(us)
        behind.record(stream)
        server([request])
        busy = not behind.done
        stream.synchronize()
        if busy:
            return [tries, False]
    return [tries, True]
"""
tries, waits = student.define(WAITED, "waited")(server, (sources[0], stamp), student.value("stream"), student.value("launch_spin"))
check.that(waits is False, why="stream 里前面的任务还没有做完，server 就应当返回，它却等到做完才返回：change 里是不是同步了，或者读回了数据？更新只影响以后的启动，不必先等。")
for _ in range(tries):
    data = reference.served(data, feeds[0], stamp, n)
check.equal(x.read(), data, why="stream 里前面还有任务的时候来一个请求，结果不对。")
other_size, other_n = int(secret.integers(300, 1500)), n + int(secret.integers(1, 5))
other_data, other_feed = (secret.integers(0, 2**32, other_size, dtype=np.uint32) for _ in range(2))
y, other_source = on_gpu(other_data), on_gpu(other_feed)
other_server = student.make_server(y, other_n)
for own, request in ((server, (sources[1], stamp)), (other_server, (other_source, stamp))):
    own([request])
    own.wait()
check.equal(x.read(), reference.served(data, feeds[1], stamp, n), why="又建了一个大小和 n 都不同的 server 以后，原来的那一个结果不对：它们各有各的图和参数。")
check.equal(y.read(), reference.served(other_data, other_feed, stamp, other_n), why="两个 server 同时在，后建的那一个结果不对：它们各有各的图和参数。")
### END HIDDEN TESTS

# %% test="make_server_speed" kind="speedup" points=2 tags=["gpu"]
SIDE = 4096
# Requests never seen before, the same for both: which they are is told by the state that a sample begins with.
FRESH = """
class Fresh:
    def __init__(self, server, x, pool):
        self.server, self.x = server, x
        self.sources = [pool[start : start + x.size] for start in range(0, pool.size - x.size, 64)]

    @property
    def launch(self):
        stamp = None

        def three():
            nonlocal stamp
            if stamp is None:
                stamp = int(self.x[:1].get()[0])
            requests = []
            for _ in range(3):
                stamp = (stamp + 0x9E3779B1) % 2**32
                requests.append((self.sources[stamp % len(self.sources)], stamp))
            self.server(requests)

        return three
"""
start_state, pool = (secret.integers(0, 2**32, length, dtype=np.uint32) for length in (SIDE, 2 * SIDE))
x, y, z = on_gpu(start_state), on_gpu(start_state), on_gpu(start_state)
own, theirs = on_gpu(pool), on_gpu(pool)
server, best = student.make_server(x, 150), reference.make_server(z, 150)
check.speedup(
    student.define(FRESH, "Fresh")(server, x, own),
    over=partial(reference.serve_by_rebuilding, y, 150, [(theirs, int(stamp)) for stamp in secret.integers(0, 2**32, 3)]),
    best=reference.define(FRESH, "Fresh")(best, z, theirs),
    state=(x, z),
    at_least=3.0,
    why="还不够快。change 里是不是还在捕获、实例化，或者读回、同步？给见过的请求各存一张图也没有用，每个请求都是新的。每个请求真正要改的只有两个节点。",
)
### BEGIN HIDDEN TESTS
data = x.write(secret.integers(0, 2**32, SIDE, dtype=np.uint32))
feeds = [secret.integers(0, 2**32, SIDE, dtype=np.uint32) for _ in range(3)]
sources = [on_gpu(feed) for feed in feeds]
fresh_stamps = [int(each) for each in secret.integers(0, 2**32, 7)]
server([(sources[number % 3], stamp) for number, stamp in enumerate(fresh_stamps)])
server.wait()
for number, stamp in enumerate(fresh_stamps):
    data = reference.served(data, feeds[number % 3], stamp, 150)
check.equal(x.read(), data, why="计时以后换一串请求，结果不对：快，但没有做完该做的工作。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：这次更新会被接受吗（3 分）
#
# 碰运气不如事先知道。写 `verdict(old, new)`：两个参数是“拒绝的原因有哪些”一节里那样的描述，返回 `(accepted, reason)`：
# 接受是 `(True, "cudaGraphExecUpdateSuccess")`，拒绝是 `(False, 枚举的名字)`。
#
# 规则来自实验和文档：
#
# | 变化 | 回答 |
# |:--|:--|
# | 节点的个数不同，或者边不同 | `cudaGraphExecUpdateErrorTopologyChanged` |
# | 某个节点的 `kind` 不同 | `cudaGraphExecUpdateErrorNodeTypeChanged` |
# | 内核：`context` 变了（函数换成了另一个上下文里的） | `cudaGraphExecUpdateErrorUnsupportedFunctionChange` |
# | 内核：`cooperative` 变了 | `cudaGraphExecUpdateErrorAttributesChanged` |
# | 拷贝：`direction` 变了 | `cudaGraphExecUpdateErrorParametersChanged` |
# | memset：`height` 变了；或者它是二维的（`height` 大于 1），而 `width` 变了 | `cudaGraphExecUpdateErrorParametersChanged` |
# | 其余的一切：函数、缓冲、标量、块数、字节数、值 | 接受 |
#
# 约定：节点已经按配对的次序编号，同号的配成一对；边只看有哪些，不看书写的先后。一维 memset 的 `width` 不会变（驱动看情况，这里不考）。
# 每一对描述最多违反一条规则，但可以同时有许多允许的变化。
#
# 先不写代码，看看下面六种情形（`CASES`），猜一猜哪些会被接受。不需要 GPU。

# %%
CASES = [
    ("换一块输入缓冲，标量也变了", chain(memcpy(), kernel()), chain(memcpy(buffer=1), kernel(buffer=1, scalar=3))),
    ("批量加倍，网格也加倍", chain(kernel(), kernel()), chain(kernel(blocks=32), kernel(blocks=32))),
    ("长度超过门槛，换了另一个内核", chain(kernel(), kernel(scalar=1)), chain(kernel(), kernel(function="twist", scalar=1))),
    ("打开后处理，多一个内核", chain(memcpy(), kernel()), chain(memcpy(), kernel(), kernel(scalar=2))),
    (
        "并排的两个分支改成先后",
        {"nodes": [kernel(), kernel(scalar=1), kernel(buffer=1)], "edges": [[0, 1], [0, 2]]},
        chain(kernel(), kernel(scalar=1), kernel(buffer=1)),
    ),
    ("原来是拷回结果，现在是送入输入", chain(memcpy(direction="DtoH"), kernel()), chain(memcpy(direction="HtoD"), kernel())),
]

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 哪些规则要先看，否则后面的比较没有意义？节点数不同时，还能一对一对地比吗？
# memset 是不是二维的，看旧的还是看新的？（如果两者不同，会先撞上哪一条？）
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 边是两个数的列表，列表不能放进集合：`{tuple(edge) for edge in graph["edges"]}`。
# 成对地走：`zip(old["nodes"], new["nodes"])`。只有某一种节点才有的字段，要先看 `kind` 再取。
#
# </details>

# %% solution="verdict"
def verdict(old, new):
    """Tell whether an executable graph of `old` can be updated by `new`, both descriptions: {"nodes": …, "edges": …}.

    Returns (accepted, reason): (True, "cudaGraphExecUpdateSuccess"), or False and the name of the cudaGraphExecUpdateResult.
    """
    ### BEGIN SOLUTION: 按表里的次序检查：节点数和边、种类、各种节点自己的规矩；都没有违反才是接受
    prefix = "cudaGraphExecUpdateError"
    if len(old["nodes"]) != len(new["nodes"]) or {tuple(edge) for edge in old["edges"]} != {tuple(edge) for edge in new["edges"]}:
        return False, prefix + "TopologyChanged"
    for before, after in zip(old["nodes"], new["nodes"], strict=True):
        if before["kind"] != after["kind"]:
            return False, prefix + "NodeTypeChanged"
        if before["kind"] == "Kernel" and before["context"] != after["context"]:
            return False, prefix + "UnsupportedFunctionChange"
        if before["kind"] == "Kernel" and before["cooperative"] != after["cooperative"]:
            return False, prefix + "AttributesChanged"
        if before["kind"] == "Memcpy" and before["direction"] != after["direction"]:
            return False, prefix + "ParametersChanged"
        if before["kind"] == "Memset":
            flat = before["height"] == after["height"] == 1
            if before["height"] != after["height"] or (not flat and before["width"] != after["width"]):
                return False, prefix + "ParametersChanged"
    return True, "cudaGraphExecUpdateSuccess"
    ### END SOLUTION


# %% test="verdict" kind="answer" points=3
one_kernel = {"kind": "Kernel", "function": "mix", "buffer": 0, "scalar": 0, "blocks": 16, "cooperative": False, "context": 0}
one_copy = {"kind": "Memcpy", "direction": "DtoD", "buffer": 0, "bytes": 1024}
one_fill = {"kind": "Memset", "buffer": 0, "value": 0, "width": 64, "height": 1}
trio = {"nodes": [one_copy, one_kernel, one_fill], "edges": [[0, 1], [1, 2]]}


def changed(graph, number, **fields):
    """The graph with some fields of one node changed."""
    nodes = list(graph["nodes"])
    nodes[number] = nodes[number] | fields
    return graph | {"nodes": nodes}


accepted = (True, "cudaGraphExecUpdateSuccess")
check.equal(student.verdict(trio, trio), accepted, why="一点没变，当然接受：(True, \"cudaGraphExecUpdateSuccess\")。")
check.equal(student.verdict(trio, changed(trio, 1, function="twist", scalar=9, blocks=99, buffer=1)), accepted, why="函数、标量、块数、缓冲都可以变。")
check.equal(
    student.verdict(trio, {"nodes": trio["nodes"][:2], "edges": [[0, 1]]}), (False, "cudaGraphExecUpdateErrorTopologyChanged"), why="少了一个节点，是拓扑变了。"
)
check.equal(student.verdict(trio, trio | {"edges": [[1, 2], [0, 1]]}), accepted, why="边还是那两条，只是书写的先后变了，不算变化。")
check.equal(student.verdict(trio, trio | {"edges": [[0, 1], [0, 2]]}), (False, "cudaGraphExecUpdateErrorTopologyChanged"), why="边的条数没有变，但连的地方变了，也是拓扑变了。")
check.equal(student.verdict(trio, changed(trio, 0, direction="DtoH")), (False, "cudaGraphExecUpdateErrorParametersChanged"), why="拷贝的方向变了，原因是 ErrorParametersChanged。")
check.equal(
    student.verdict(trio, trio | {"nodes": [one_copy, one_fill, one_fill]}), (False, "cudaGraphExecUpdateErrorNodeTypeChanged"), why="内核换成了 memset，是种类变了。"
)
### BEGIN HIDDEN TESTS
WRONG = "cudaGraphExecUpdateError"


def any_kernel():
    return one_kernel | {
        "function": str(secret.choice(["mix", "twist"])), "buffer": int(secret.integers(2)), "scalar": int(secret.integers(2**32)),
        "blocks": int(secret.integers(1, 4096)), "cooperative": bool(secret.integers(2)), "context": int(secret.integers(2)),
    }


def any_copy():
    return one_copy | {"direction": str(secret.choice(["HtoD", "DtoH", "DtoD"])), "buffer": int(secret.integers(2)), "bytes": int(secret.integers(1, 2**20))}


def any_fill(height):
    return one_fill | {"buffer": int(secret.integers(2)), "value": int(secret.integers(256)), "width": int(secret.integers(1, 999)), "height": height}


def any_graph(n):
    """n nodes of each kind, and then some: at least one kernel, copy, flat fill and 2-d fill; random edges."""
    nodes = [any_kernel(), any_copy(), any_fill(1), any_fill(int(secret.integers(2, 9)))]
    nodes += [(any_kernel, any_copy, lambda: any_fill(1))[int(secret.integers(3))]() for _ in range(n - 4)]
    edges = [[a, b] for b in range(1, n) for a in range(b) if secret.integers(2)] or [[0, 1]]
    return {"nodes": [nodes[int(p)] for p in secret.permutation(n)], "edges": edges}


def harmless(graph):
    """The same graph with everything changed that may change."""
    nodes = []
    for node in graph["nodes"]:
        kept = {"Kernel": ("cooperative", "context"), "Memcpy": ("direction",), "Memset": ("width", "height")}[node["kind"]]
        new = {"Kernel": any_kernel, "Memcpy": any_copy, "Memset": lambda: any_fill(1)}[node["kind"]]()
        nodes.append(new | {field: node[field] for field in kept})
    return {"nodes": nodes, "edges": [graph["edges"][int(p)] for p in secret.permutation(len(graph["edges"]))]}


def some(graph, test):
    """The number of a random node for which test holds."""
    return int(secret.choice([number for number, node in enumerate(graph["nodes"]) if test(node)]))


def spoiled(graph, how):
    """A harmless change, and one that is not. Returns (new graph, reason)."""
    new = harmless(graph)
    if how == "count":
        extra = len(new["nodes"])
        return {"nodes": [*new["nodes"], any_kernel()], "edges": [*new["edges"], [0, extra]]}, "TopologyChanged"
    if how == "lone":
        return new | {"nodes": [*new["nodes"], any_kernel()]}, "TopologyChanged"
    if how == "fewer edges":
        return new | {"edges": new["edges"][1:]}, "TopologyChanged"
    if how == "moved edge":
        taken = {tuple(edge) for edge in new["edges"]}
        n = len(new["nodes"])
        free = [[a, b] for b in range(1, n) for a in range(b) if (a, b) not in taken]
        return (new | {"edges": [*new["edges"][1:], free[int(secret.integers(len(free)))]]} if free else new | {"edges": new["edges"][1:]}), "TopologyChanged"
    if how == "kind":
        number = int(secret.integers(len(new["nodes"])))
        others = {"Kernel": any_kernel, "Memcpy": any_copy, "Memset": partial(any_fill, int(secret.integers(1, 3)))}
        del others[new["nodes"][number]["kind"]]
        new["nodes"][number] = list(others.values())[int(secret.integers(2))]()
        return new, "NodeTypeChanged"
    if how == "context":
        number = some(new, lambda node: node["kind"] == "Kernel")
        return changed(new, number, context=1 - new["nodes"][number]["context"]), "UnsupportedFunctionChange"
    if how == "cooperative":
        number = some(new, lambda node: node["kind"] == "Kernel")
        return changed(new, number, cooperative=not new["nodes"][number]["cooperative"]), "AttributesChanged"
    if how == "direction":
        number = some(new, lambda node: node["kind"] == "Memcpy")
        others = [each for each in ("HtoD", "DtoH", "DtoD") if each != new["nodes"][number]["direction"]]
        return changed(new, number, direction=str(secret.choice(others))), "ParametersChanged"
    if how == "height":
        number = some(new, lambda node: node["kind"] == "Memset")
        return changed(new, number, height=new["nodes"][number]["height"] + int(secret.integers(1, 5))), "ParametersChanged"
    number = some(new, lambda node: node["kind"] == "Memset" and node["height"] > 1)
    return changed(new, number, width=new["nodes"][number]["width"] + 1), "ParametersChanged"


answers = [accepted] * 3 + [(False, WRONG + "TopologyChanged")] * 2 + [(False, WRONG + "ParametersChanged")]
check.equal([student.verdict(old, new) for _, old, new in reference.value("CASES")], answers, why="CASES 的六种情形里有判断错的。把每一种对着规则表再看一遍。")
pairs = [(graph, harmless(graph)) for graph in (any_graph(int(secret.integers(4, 9))) for _ in range(12))]
check.equal([student.verdict(*pair) for pair in pairs], [accepted] * len(pairs), why="有的变化本来是允许的，却被判成了拒绝。规则表最后一行里的字段随便怎么变都接受。")
for how, why in (
    ("count", "节点多了或少了一个，没有判成拓扑变了。"),
    ("lone", "多了或少了一个不连任何边的节点，也是拓扑变了：边一样，节点数可以不一样。"),
    ("fewer edges", "少了或多了一条边，没有判成拓扑变了。"),
    ("moved edge", "有一条边换了地方，没有判成拓扑变了。只比较边的条数是不够的。"),
    ("kind", "节点的种类变了，没有判对。取字段之前先比较 kind。"),
    ("context", "函数换到了另一个上下文，没有判对。"),
    ("cooperative", "协作启动变了，没有判对。从有到无、从无到有都算。"),
    ("direction", "拷贝的方向变了，没有判对。三种方向之间任何变化都算。"),
    ("height", "memset 的行数变了，没有判对。变多变少、一维的也算。"),
    ("width", "二维 memset 的宽变了，没有判对。"),
):
    olds = [any_graph(int(secret.integers(4, 9))) for _ in range(6)]
    news = [spoiled(old, how) for old in olds]
    both_ways = [pair for old, (new, _) in zip(olds, news, strict=True) for pair in ((old, new), (new, old))]  # each rule holds back and forth
    check.equal([student.verdict(*pair) for pair in both_ways], [(False, WRONG + reason) for _, reason in news for _ in range(2)], why=why)
### END HIDDEN TESTS

# %% [markdown]
# 现在让驱动来打分：把六种情形真的造出来更新一次，和你的 `verdict` 对一对。

# %% tags=["demo", "gpu"]
rows = []
for title, old, new in CASES:
    _, reason, _ = ask_driver(old, new)
    yours = verdict(old, new)[1]
    rows.append((title, *(f"`{each.removeprefix('cudaGraphExecUpdate')}`" for each in (yours, reason)), "一致" if yours == reason else "不一致"))
lab.say(lab.table(("情形", "你的判断", "驱动的回答", "对不对"), rows))

# %% [markdown] tags=["instructor"]
# 给教师：练习一的隐藏测试考互换（逐条替换会错）、连续搬三次（只改可执行图会在第二次找不到）、只搬输入、什么都不搬。
# 练习二的期望原因由考官在自己的进程里直接问驱动得到，不依赖打字；五种会被拒绝的变化各做一来一回，每次重建之后马上核对结果，
# 并数实例化和销毁的次数。练习三把随请求变的标量和输入混进状态，漏改一个节点，状态就对不上；
# 再关掉 `server.graph` 的一个节点，结果里要正好缺它那一份（另有一张图、每个请求各存一张图、逐个启动都会露馅）；让 `absorb` 不再能启动，
# 只有早就捕获的图还能算对（每个请求重新捕获再整图更新的写法会露馅）；用 `spin` 堵住 `stream`，`server` 要在它做完之前返回。
# 计时的每个请求都是没有见过的：`stamp` 从每次测量的初始状态推出来，所以两边一样，谁也不能事先准备。
# 练习四的隐藏测试给每条规则单独出题，其余字段全部随机地、合法地变化，忽略任何一个字段的解答都会被抓住。

# %% [markdown]
# ## 小结
#
# | 以前的说法 | 实验以后的说法 |
# |:--|:--|
# | 变量换成新数组，图就用新数据 | 图记的是地址；就地写最省事，换地址就要改图 |
# | 改了定义，图就变了 | 定义和可执行图是两本账，可执行图没有读参数的接口 |
# | 只填变了的那几项 | 参数结构是一个整体，网格忘了改，后一半就没有人算 |
# | 更新会影响正在排队的启动 | 只影响以后的启动，不必先同步 |
# | 更新失败就是出错 | 910 是预料之中的答复：读原因，重建，清掉最后一个错误 |
# | `cudaGraphExecUpdate` 告诉我们原因 | C 接口会；`cuda.bindings` 在失败时不给，要直接调驱动 |
# | 结构相同就能更新 | 还要按同样的次序捕获，配对看的是先后 |
# | 更新总比重建便宜很多 | 省的是实例化；重新捕获的钱照付，改节点参数才省得下 |
#
# **带走三句话**
#
# 1. 能就地写就别更新；只变几个节点就改节点参数；变得多就整图更新；骨架变了就重建。
# 2. 节点句柄来自定义，定义要留着；两本账要么一起改，要么自己记。
# 3. 更新要问原因，拒绝要能重建，重建要先有新的、再扔旧的。
#
# 下一步：《多流捕获与图的生命周期》讲图什么时候可以销毁、谁来保管缓冲；《形状变化时更新图》把这一章用到真实的引擎上。
