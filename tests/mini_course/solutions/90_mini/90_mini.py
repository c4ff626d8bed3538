# %% [markdown]
# # 最小的一章
#
# 这一章不需要 GPU，只用 NumPy：预测一串启动的总时间，让一份状态原地前进，再求一张图的最长路径。

# %% [markdown] tags=["instructor"]
# 给教师：这一章只供测试使用。INSTRUCTOR-ONLY 这个单元不会出现在发布版里。

# %%
from pathlib import Path

import numpy as np
from launchlab.exam import check, reference, secret, student

# %%
MULTIPLIER = np.uint32(0x2C1B3C6D)
samples = np.loadtxt(Path("samples.csv"), delimiter=",", skiprows=1)

# %% tags=["demo"]
table = {int(kernels): total for kernels, total in samples}
for kernels, total in table.items():
    print(f"{kernels:4d} 个内核：{total:6.1f} µs，平均每个 {total / kernels:.2f} µs")

# %% tags=["gpu"]
import cupy as cp

on_device = cp.asarray(samples)

# %% [markdown]
# ## 练习一：总时间
#
# CPU 每 `launch_us` 微秒启动一个内核，GPU 上每个内核运行 `kernel_us` 微秒，内核排队依次运行。
# 从第一次启动开始，到最后一个内核结束，一共多少微秒？

# %% [markdown]
# <details><summary>点拨</summary>
#
# CPU 和 GPU 同时在忙：稳定以后，每个内核要等的是两者中较慢的那个。
#
# </details>
# <details><summary>写法</summary>
#
# 第一次启动和最后一个内核各算一次，中间的 `n - 1` 步每步是 `max(launch_us, kernel_us)`。
#
# </details>

# %% solution="total_us"
def total_us(launch_us: float, n: int, kernel_us: float) -> float:
    """Microseconds from the first launch to the end of the last of ``n`` kernels; 0 for n = 0."""
    ### BEGIN SOLUTION: 想一想：稳定以后，每一步等的是 CPU 的启动，还是 GPU 的运行？
    if n == 0:
        return 0.0
    return launch_us + (n - 1) * max(launch_us, kernel_us) + kernel_us
    ### END SOLUTION


# %% test="total_us" kind="answer" points=2
check.equal(student.total_us(5.0, 1, 2.0), 7.0, why="只有一个内核时，总时间是一次启动加一次运行。", rel=1e-9)
### BEGIN HIDDEN TESTS
check.equal(student.total_us(5.0, 0, 2.0), 0.0, why="没有内核时，总时间应该是 0。", rel=1e-9)
for _ in range(5):
    launch, n, kernel = float(secret.uniform(2, 9)), int(secret.integers(2, 500)), float(secret.uniform(1, 40))
    expected = launch + (n - 1) * max(launch, kernel) + kernel
    check.equal(student.total_us(launch, n, kernel), expected, why="启动和运行是重叠的：每一步只等较慢的那个。", rel=1e-9)
### END HIDDEN TESTS

# %% [markdown]
# ## 练习二：原地前进
#
# 把 `state`（`uint32` 数组）原地推进 `rounds` 轮。第 `i` 轮（从 0 数起）依次做：
# `x ^= x >> 15`，`x *= MULTIPLIER`，`x ^= x >> 12`，`x += i`，全部按 2³² 取模。

# %% [markdown]
# <details><summary>点拨</summary>
#
# 原地就是不换数组：调用者手里的那一个要变。
#
# </details>
# <details><summary>写法</summary>
#
# 用 `^=`、`*=`、`+=`，或者 `state[:] = …`；`uint32` 数组的溢出本来就按 2³² 取模。
#
# </details>

# %% solution="advance"
def advance(state: np.ndarray, rounds: int) -> None:
    """Advance ``state`` (uint32, any shape) in place by ``rounds`` rounds of mixing."""
    ### BEGIN SOLUTION: 每一轮四步，都直接改 state 本身，不要返回新数组
    for i in range(rounds):
        state ^= state >> np.uint32(15)
        state *= MULTIPLIER
        state ^= state >> np.uint32(12)
        state += np.uint32(i)
    ### END SOLUTION


# %% test="advance" kind="structure" points=3
one = np.array([1], np.uint32)
IN_PLACE = "def in_place(advance, state, rounds):\n    advance(state, rounds)\n    return state\n"
moved = student.define(IN_PLACE, "in_place")(student.value("advance"), one, 1)
check.equal(moved, np.array([0x2C19FDDE], np.uint32), why="一轮以后的值不对。四步的顺序对吗？是不是改了新数组，没有改 state？")
### BEGIN HIDDEN TESTS
for shape in ((257,), (3, 5)):
    state = secret.integers(0, 2**32, shape, dtype=np.uint32)
    rounds = int(secret.integers(5, 40))
    got = student.define(IN_PLACE, "in_place")(student.value("advance"), state, rounds)
    want = reference.define(IN_PLACE, "in_place")(reference.value("advance"), state, rounds)
    check.equal(got, want, why="多轮以后的值不对。每一轮加的 i 变了吗？")
### END HIDDEN TESTS

# %% [markdown]
# ## 练习三：最长路径
#
# `edges` 是一张有向无环图的边，每条是 `(from, to)`。返回最长路径上有几个节点；没有边时返回 0。

# %% [markdown]
# <details><summary>点拨</summary>
#
# 走到一个节点的最长路径，取决于它的前驱。
#
# </details>
# <details><summary>写法</summary>
#
# 对每个节点记住“从它出发最长有几个节点”，用字典缓存，递归地问它的后继。
#
# </details>

# %% solution="longest_path"
def longest_path(edges: list) -> int:
    """Number of nodes on the longest path of the acyclic graph of ``edges`` (pairs of ints); 0 without edges."""
    ### BEGIN SOLUTION: 先想一个节点：从它出发的最长路径，比它的后继里最长的多一个节点
    after: dict = {}
    for start, end in edges:
        after.setdefault(start, []).append(end)
    known: dict = {}

    def reach(node: int) -> int:
        if node not in known:
            known[node] = 1 + max((reach(following) for following in after.get(node, [])), default=0)
        return known[node]

    return max((reach(node) for node in after), default=0)
    ### END SOLUTION


# %% test="longest_path" kind="structure" points=3
check.equal(student.longest_path([[0, 1], [1, 2], [0, 2]]), 3, why="0 → 1 → 2 上有三个节点。")
### BEGIN HIDDEN TESTS
check.equal(student.longest_path([]), 0, why="没有边的时候应该返回 0。")
for _ in range(5):
    nodes = secret.permutation(12).tolist()
    pairs = [[nodes[i], nodes[j]] for i in range(12) for j in range(i + 1, 12) if secret.random() < 0.3]
    check.equal(student.longest_path(pairs), reference.longest_path(pairs), why="较大的图上结果不对。每个节点都看了所有后继吗？")
### END HIDDEN TESTS

# %% [markdown]
# ## 小结
#
# 三件事：重叠的时间取较慢的一方，原地更新要改同一个数组，路径可以一步步推出来。
