# %% [markdown]
# # 用 Nsight Systems 读时间线
#
# 一个服务慢了，会上有三种意见：有人说内核启动太贵，该上 CUDA 图；有人指着报表说 `cudaStreamSynchronize` 占了九成时间，该去掉同步；
# 还有人说 GPU 利用率看着挺高，该换更快的卡。三个人看的是同一份录制，每个人都能指着一个数字。
#
# 数字都是真的，结论却只能有一个对。时间线（timeline）上同时画着 CPU 在做什么、GPU 在做什么，
# 而“慢在哪里”，要看 **GPU 闲着的时候，CPU 正在忙什么**。这一章用真实的录制练习怎么看，再把它写成几条 SQL：人会看走眼，查询不会。
#
# **学完以后，你能够**
#
# - 用 `nsys profile` 录一段程序，用 `nsys stats` 和 SQL 读它，知道每张表里是什么；
# - 用 `correlationId` 把 CPU 上的一次调用和 GPU 上的工作连起来，哪怕它们在时间上错开很远；
# - 算出 GPU 真正忙了多久、空隙（gap）有几段、启动调用占了 CPU 多少时间；
# - 判断一个程序受限于启动、重新捕获、拷贝、CPU 的活，还是 GPU 自己，也就知道 CUDA 图有没有用；
# - 在自己的 GPU 上用 CUPTI 录同样的表，找出一个空隙，把它去掉。
#
# **需要的基础**：《捕获 TensorRT 推理》里的捕获与重放；会写一句带 `JOIN` 的 SQL 更好，用到的写法都会讲。
#
# **时间**：约 60 分钟，其中四道练习约 35 分钟。前半和前两道练习不需要 GPU。
#
# 下一格导入的 `check`、`student` 等五个名字只给练习后面的测试单元用，现在不用管它们。

# %%
import numpy as np
from functools import partial
from launchlab import lab
from launchlab.exam import check, on_gpu, reference, secret, student

lab.here()

# %% [markdown]
# ## 录制是怎么来的
#
# 十个小程序，跑的都是这门课的引擎。每个程序整个放在一个以它的名字命名的 NVTX 区间（range）里，里面再按 CPU 在做的事分成小区间：
# `upload` 上传、`enqueue` 入队或图启动、`capture` 捕获、`download` 下载、`wait` 等待、`decode` 在 CPU 上解码结果。
# NVTX 是给程序加注释的一套接口：没有工具在听的时候，几乎不花时间；有工具在录的时候，时间线上就有了名字。
#
# | 程序 | 做什么 |
# |:--|:--|
# | `eager` | 小号 BERT（内核多而短），逐次入队，每个请求取回结果 |
# | `graph` | 同上，换成 CUDA 图 |
# | `recapture` | 同上，可是每个请求都重新捕获、实例化一遍 |
# | `two_streams` | 两个上下文、两条流（stream），图轮流启动，最后才等 |
# | `big_eager`、`big_graph` | 一个只有几个长内核的 MLP，逐次入队和用图，最后才等 |
# | `serial` | 那个 MLP，算完取回，CPU 解码，再算下一个 |
# | `pipelined` | 同上，但解码上一个之前，先把下一个交给 GPU |
# | `pageable_copy`、`pinned_copy` | 那个 MLP，每个请求先上传 4 MiB，从可分页内存（pageable）和从锁页内存（pinned） |
#
# 录制用的命令是这样的，录制的程序 `record_timelines.py` 和裁剪的程序 `export_timelines.py` 在课程的源文件夹里：
#
# ```
# nsys profile -t cuda,nvtx --cuda-graph-trace=node --sample=none --cpuctxsw=none -o node python record_timelines.py run …
# nsys export --type sqlite node.nsys-rep
# ```
#
# - `-t cuda,nvtx`：只录 CUDA 调用、GPU 上的工作和 NVTX 区间；`--sample=none --cpuctxsw=none` 关掉 CPU 采样，少打扰一点；
# - `--cuda-graph-trace=node`：图里的每个节点各记一行；
# - `nsys export --type sqlite`：把录制变成一个 SQLite 文件。SQLite 是装在一个文件里的数据库，Python 自带的 `sqlite3` 就能查。
#
# 文件夹 `timelines/` 里是每个程序裁出来的一小份，表名和列名都是 nsys 自己的；`nsys.json` 是 nsys 对每一份自己给出的报表，`about.json` 记着怎么录的。

# %%
import json
import sqlite3
from contextlib import closing
from pathlib import Path

TIMELINES = Path("timelines")
ABOUT = json.loads((TIMELINES / "about.json").read_text(encoding="utf-8"))
NSYS = json.loads((TIMELINES / "nsys.json").read_text(encoding="utf-8"))  # program -> report of nsys -> its rows
PROGRAMS = list(ABOUT["us_per_request"]["node"])
MAYBE_MISSING = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE")


def complete(db):
    """Add empty tables for what did not occur: nsys exports no empty tables, and a query needs them. Returns db."""
    for table in MAYBE_MISSING:
        db.execute(f"CREATE TABLE IF NOT EXISTS {table} (start INTEGER, end INTEGER, streamId INTEGER, correlationId INTEGER, graphNodeId INTEGER)")
    return db


def opened(program):
    """The export of a program: a sqlite3.Connection to a copy in memory. Times in ns."""
    db = sqlite3.connect(":memory:")
    with closing(sqlite3.connect(TIMELINES / f"{program}.sqlite")) as file:
        file.backup(db)
    return complete(db)


def range_of(db, name):
    """(start, end) of the NVTX range of that name, ns; the first one if there are several. LookupError if there is none."""
    query = """
        SELECT start, end FROM NVTX_EVENTS
        WHERE eventType = 59 AND coalesce(text, (SELECT value FROM StringIds WHERE id = textId)) = ?
        ORDER BY start LIMIT 1
    """
    row = db.execute(query, (name,)).fetchone()
    if row is None:
        raise LookupError(f"录制里没有叫 {name!r} 的 NVTX 区间")
    return row


# %% tags=["demo"]
sources = f"录制于 {ABOUT['recorded_at']}，GPU：**{ABOUT['gpu']}**，Nsight Systems {ABOUT['versions'].get('nsys', '?')}，每个程序 {ABOUT['requests']} 个请求。"
eager = opened("eager")
tables = [row[0] for row in eager.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
counts = [(f"`{table}`", eager.execute(f"SELECT count(*) FROM {table}").fetchone()[0]) for table in tables if not table.startswith("ENUM")]
lab.say(sources + "\n\n程序 `eager` 的表：\n\n" + lab.table(("表", "行数"), counts), measured=False)

# %% [markdown]
# 认识五张就够了：
#
# - `CUPTI_ACTIVITY_KIND_RUNTIME`：CPU 上的 CUDA 调用（运行时 API 和驱动 API 都在），从几时到几时；
# - `CUPTI_ACTIVITY_KIND_KERNEL`、`…_MEMCPY`、`…_MEMSET`：GPU 上的内核、拷贝、填充，从几时到几时，在哪条流；
# - `NVTX_EVENTS`：我们自己起的名字。`eventType = 59` 是用 push / pop 打开、关上的区间。
#
# 名字不直接写在表里：`nameId`、`shortName`、`demangledName` 都是编号，要到 `StringIds` 里查。
# `CUPTI` 是 NVIDIA 的追踪接口，nsys 自己也用它，表名由此而来；后面我们会直接用它。
#
# 所有时间都是纳秒（ns），CPU 和 GPU 的时间已经换算到**同一个**时钟，所以可以直接相减。来看一个请求的开头：

# %% tags=["demo"]
FIRST_ROWS = """
    SELECT start, 'NVTX' AS who, text AS what, end - start AS ns FROM NVTX_EVENTS
    UNION ALL
    SELECT r.start, 'CPU', s.value, r.end - r.start FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN StringIds s ON s.id = r.nameId
    UNION ALL
    SELECT k.start, 'GPU', s.value, k.end - k.start FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.shortName
    UNION ALL
    SELECT start, 'GPU', '拷贝', end - start FROM CUPTI_ACTIVITY_KIND_MEMCPY
    ORDER BY start LIMIT 14
"""
rows = [(who, f"`{what[:44]}`", f"{start / 1e3:.1f}", f"{ns / 1e3:.1f}") for start, who, what, ns in eager.execute(FIRST_ROWS)]
lab.say(lab.table(("谁", "什么", "开始（µs）", "持续（µs）"), rows), measured=False)

# %% [markdown]
# ## 先问 nsys，再自己问
#
# nsys 已经会算的，不要自己再算一遍。在装了 Nsight Systems 的机器上，一行命令就有：
#
# ```
# nsys stats --report cuda_gpu_kern_sum,cuda_api_sum,nvtx_gpu_proj_sum timelines/eager.sqlite
# ```
#
# - `cuda_gpu_kern_sum`：每种内核跑了几次、一共多久；
# - `cuda_api_sum`：CPU 上每种 CUDA 调用几次、一共多久；
# - `nvtx_gpu_proj_sum`：每种 NVTX 区间**投影到 GPU 上**有多长、里面有几件 GPU 工作（录制本章的版本把一次图启动只算作一件，不数里面的内核）。
#
# 它对 `big_eager` 的 CPU 调用是这么说的（下面的表原样取自 `nsys.json`）：

# %% tags=["demo"]
def show(program, report, columns, most=5):
    rows = [[str(row[column])[:60] for column in columns] for row in NSYS[program][report][:most]]
    lab.say(f"`nsys stats --report {report}`，程序 `{program}`：\n\n" + lab.table(columns, rows), measured=False)


show("big_eager", "cuda_api_sum", ("Name", "Time (%)", "Num Calls", "Total Time (ns)"))

# %% [markdown]
# ### 误区：谁占的时间多，谁就是瓶颈
#
# 看这张表，很容易说：“等待占了大头，去掉同步就快了。”等的是什么呢？把 GPU 那边的账也拿来，问一句：这段时间里 GPU 忙不忙？

# %% tags=["demo"]
def total_ns(program, report):
    return sum(row["Total Time (ns)"] for row in NSYS[program][report])


begin, end = range_of(opened("big_eager"), "big_eager")
waiting = sum(row["Total Time (ns)"] for row in NSYS["big_eager"]["cuda_api_sum"] if "Synchronize" in row["Name"])
running = total_ns("big_eager", "cuda_gpu_kern_sum")
lab.say(
    f"`big_eager` 一共 {(end - begin) / 1e3:.0f} µs。CPU 用 **{waiting / (end - begin):.0%}** 的时间在等待，"
    f"而 GPU 上的内核加起来占了 **{running / (end - begin):.0%}**。",
    measured=False,
)

# %% [markdown]
# 如果 GPU 几乎一直在忙，CPU 等它就是**应该的**：没有别的事可做。等待不是浪费，闲着才是。
# 这时去掉同步，换来的只是 CPU 早点空出来，结果不会早到。所以只看 CPU 的账，分不清“等得值”和“等得冤”。
#
# ## 一根线连起两边：correlationId
#
# CPU 上的一次启动，和它在 GPU 上引出的工作，`correlationId` 相同。一次 `cudaGraphLaunch` 引出几十个内核，它们就都带着那一次调用的号码。
# 先数一数：每次调用引出了几个内核？

# %% tags=["demo"]
BY_CALL = """
    SELECT s.value, count(DISTINCT r.correlationId), count(*), count(k.graphNodeId)
    FROM CUPTI_ACTIVITY_KIND_KERNEL k
    JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId
    JOIN StringIds s ON s.id = r.nameId
    GROUP BY s.value
"""
rows = [(f"`{program}`", *row) for program in ("eager", "graph", "recapture") for row in opened(program).execute(BY_CALL)]
lab.say(lab.table(("程序", "调用", "次数", "引出的内核", "其中在图里"), rows), measured=False)

# %% [markdown]
# `graphNodeId` 是图里节点的编号；不在图里的内核，这一列是空的（NULL），`count(列)` 不数空值。
# 同一个节点每次重放都带同一个编号，《图内剖析》会靠它给每个节点算账。
#
# 再看 `recapture`：捕获期间的那些启动调用也在 `CUPTI_ACTIVITY_KIND_RUNTIME` 里，却一个内核也没有引出，它们只是录进了图。
# 所以**数启动要从内核往回找**，不能去数名字像启动的调用。
#
# ### 误区：区间有多长，里面的工作就在 GPU 上花了多长
#
# NVTX 区间量的是 CPU。`big_eager` 的每个 `enqueue` 区间，CPU 上很快就结束了，它交出去的内核还在排队。
# 用“时间落在区间里”去数内核，和用 `correlationId` 去数，看看差多少：

# %% tags=["demo"]
INSIDE = "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE start >= :start AND end <= :end"
LAUNCHED = """
    SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL k
    JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId
    WHERE r.start >= :start AND r.end <= :end
"""
big = opened("big_eager")
requests = big.execute("SELECT start, end FROM NVTX_EVENTS WHERE text = 'request' ORDER BY start").fetchall()
rows = []
for number, (start, end) in enumerate(requests, 1):
    window = {"start": start, "end": end}
    rows.append((number, f"{(end - start) / 1e3:.0f}", big.execute(INSIDE, window).fetchone()[0], big.execute(LAUNCHED, window).fetchone()[0]))
early = sum(row[2] for row in rows)
strangers = big.execute("""
    SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL k
    JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId
    JOIN NVTX_EVENTS n ON n.text = 'request' AND k.start >= n.start AND k.end <= n.end
    WHERE r.end < n.start
""").fetchone()[0]
note = f"按时间数到的 {early} 个里，有 {strangers} 个还是**前面的请求**引出的。" if early else "按时间数，一个也没有。"
lab.say(lab.table(("请求", "区间长（µs）", "按时间数内核", "按 correlationId 数"), rows) + f"\n\n{note}", measured=False)
show("big_eager", "nvtx_gpu_proj_sum", ("Range", "Range Instances", "Total Range Time (ns)", "Total Proj Time (ns)", "Total GPU Ops"))

# %% [markdown]
# nsys 的投影（projection）就是按 `correlationId` 做的：一个区间投影到 GPU 上，从它引出的第一件工作开始，到最后一件结束。
# 上面第二张表里，`enqueue` 的投影和它自己的长度差得很远，原因就在这里。
#
# ## 画出来看
#
# 现在把 `eager` 和 `graph` 的同一个请求画在一起，横轴的刻度相同。三行从上到下：NVTX 区间，CPU 上的 CUDA 调用，GPU 上的工作。

# %% tags=["demo"]
import matplotlib.pyplot as plt

lab.plot_style()
COLOURS = {"NVTX": "#c9c9c9", "CPU": "#d98a3d", "等待": "#ecd9c6", "GPU": "#3b7dbd", "拷贝": "#57a773"}
LANES = """
    SELECT 'NVTX' AS lane, 'NVTX' AS kind, start, end, text FROM NVTX_EVENTS WHERE text <> 'request'
    UNION ALL
    SELECT 'CPU', CASE WHEN s.value LIKE '%Synchronize%' THEN '等待' ELSE 'CPU' END, r.start, r.end, NULL
    FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN StringIds s ON s.id = r.nameId
    UNION ALL
    SELECT 'GPU', 'GPU', start, end, NULL FROM CUPTI_ACTIVITY_KIND_KERNEL
    UNION ALL
    SELECT 'GPU', '拷贝', start, end, NULL FROM CUPTI_ACTIVITY_KIND_MEMCPY
"""
HEIGHTS = {"NVTX": 2, "CPU": 1, "GPU": 0}


def draw(ax, db, window, title):
    """Draw what happened within window = (start, end), ns, with time in µs from its start."""
    start, end = window
    for lane, kind, a, b, text in db.execute(LANES):
        if b < start or a > end or (lane == "NVTX" and b - a > 0.98 * (end - start)):
            continue
        a, b = max(a, start), min(b, end)
        left, width = (a - start) / 1e3, (b - a) / 1e3
        ax.broken_barh([(left, width)], (HEIGHTS[lane] - 0.35, 0.7), color=COLOURS[kind], edgecolor="white", linewidth=0.3)
        if text and b - a > 0.08 * (end - start):
            ax.text(left + width / 2, HEIGHTS[lane], text, ha="center", va="center", fontsize=8)
    ax.set_yticks(list(HEIGHTS.values()), ["NVTX 区间", "CPU 调用", "GPU 工作"])
    ax.set_title(title)
    ax.set_xlabel("时间（µs）")


def request_window(db, number, margin=5000):
    """(start, end), ns, of the request of that number (from 0), and a little around."""
    start, end = db.execute("SELECT start, end FROM NVTX_EVENTS WHERE text = 'request' ORDER BY start LIMIT 1 OFFSET ?", (number,)).fetchone()
    return start - margin, end + margin


def compare(upper, lower, number=2, where=ABOUT["gpu"]):
    """Draw one request of two recordings above each other, on one scale. upper, lower: (title, db)."""
    figure, axes = plt.subplots(2, 1, figsize=(9.5, 4.6), sharex=True, layout="constrained")
    for ax, (title, db) in zip(axes, (upper, lower), strict=True):
        draw(ax, db, request_window(db, number), title)
    axes[0].set_xlabel("")
    figure.suptitle(f"一个请求的时间线（{where}）")
    plt.show()


compare(("eager：逐次入队", opened("eager")), ("graph：一次图启动", opened("graph")))

# %% [markdown]
# 中间一行的条是 CPU 在调用 CUDA，最淡的是在等；最下面一行是内核，请求头尾的两小段是拷贝。上图里 CPU 和 GPU 交替前进，最下面一行的条之间有缝，
# 那是 GPU 做完了手上的，下一个还没有交来；下图里所有内核由一次启动交出去。
#
# 图好看，但肉眼会骗人：条与条之间的缝，放大了才看得见。下面让查询来量。
#
# ## 忙了多久，空了几段
#
# ### 误区：把内核的时间加起来，就是 GPU 忙的时间
#
# 两条流上的内核可以同时跑。同一微秒里有两个内核，加起来就成了两微秒。先看 `two_streams`：

# %% tags=["demo"]
SUMMED = "SELECT sum(end - start), max(end) - min(start) FROM CUPTI_ACTIVITY_KIND_KERNEL"
rows = []
for program in ("graph", "two_streams"):
    summed, span = opened(program).execute(SUMMED).fetchone()
    rows.append((f"`{program}`", f"{summed / 1e3:.0f}", f"{span / 1e3:.0f}", f"{summed / span:.0%}"))
lab.say(lab.table(("程序", "内核时间之和（µs）", "从第一个到最后一个（µs）", "之和 / 跨度"), rows), measured=False)

# %% [markdown]
# 之和可以超过跨度，也可以碰巧显得“很满”，而其中还有空隙。要的是**并集**（union）：至少有一件工作在做的时间。
# 并集的反面就是空隙。SQL 里有一个漂亮的写法：按开始时间排好，对每一件工作，看排在它前面的所有工作最晚什么时候结束；如果这一件开始得更晚，中间就是一段空隙。

# %% tags=["demo"]
GAPS = """
    WITH work AS (
        SELECT start, end FROM CUPTI_ACTIVITY_KIND_KERNEL
        UNION ALL SELECT start, end FROM CUPTI_ACTIVITY_KIND_MEMCPY
        UNION ALL SELECT start, end FROM CUPTI_ACTIVITY_KIND_MEMSET
    ), ordered AS (
        SELECT start, end, max(end) OVER (ORDER BY start, end ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before FROM work
    )
    SELECT before AS start, start AS end FROM ordered WHERE start > before ORDER BY 1
"""
rows = []
for program in PROGRAMS:
    db = opened(program)
    gaps = [end - start for start, end in db.execute(GAPS)]
    first, last = db.execute("SELECT min(start), max(end) FROM (SELECT start, end FROM CUPTI_ACTIVITY_KIND_KERNEL UNION ALL SELECT start, end FROM CUPTI_ACTIVITY_KIND_MEMCPY)").fetchone()
    long = [each for each in gaps if each >= 5000]
    theirs = sum(duration >= 5000 for _, duration in NSYS[program]["gpu_gaps"])
    rows.append((f"`{program}`", f"{(last - first) / 1e3:.0f}", f"{1 - sum(gaps) / (last - first):.0%}", len(long), theirs, f"{max(gaps, default=0) / 1e3:.0f}"))
header = ("程序", "GPU 跨度（µs）", "忙", "5 µs 以上的空隙", "nsys 数的", "最长（µs）")
lab.say(lab.table(header, rows), measured=False)

# %% [markdown]
# `max(end) OVER (…)` 是窗口函数：对每一行，取它**之前**所有行里 `end` 的最大值。用“前一行的 `end`”是不够的：前一个短，再前一个长，长的可能还没做完。
#
# “nsys 数的”一列来自 `nsys analyze --rule gpu_gaps:gap=0:rows=-1`，也是 nsys 自带的：后面两个参数要它不管长短、全部报出来，
# 不写的话，只报 500 ms 以上的，而且最多 50 条。两边的定义相同，数目就该相同；对不上的时候，先怀疑自己的查询。
#
# ## 闲的时候，CPU 在做什么
#
# 空隙只说“GPU 没事做”，没说怪谁。把空隙和 NVTX 区间叠在一起：GPU 闲着的每一微秒，CPU 处在哪个区间里？
# 这就是起名字的用处。先认识三个处理区间的小函数，后面的练习也要用。一个区间是 `(start, end)`，单位 ns。

# %%
def merge(intervals):
    """The union of intervals (start, end): sorted, disjoint, none empty."""
    merged = []
    for start, end in sorted((start, end) for start, end in intervals if end > start):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def minus(intervals, others):
    """The parts of intervals that lie in none of the others: sorted, disjoint."""
    left = []
    others = merge(others)
    for start, end in merge(intervals):
        for a, b in others:
            if b <= start or a >= end:
                continue
            if a > start:
                left.append((start, a))
            start = max(start, b)
        if start < end:
            left.append((start, end))
    return left


def length(intervals):
    """How long intervals that do not overlap are together, ns."""
    return sum(end - start for start, end in intervals)


# %% tags=["demo"]
def idle_by_phase(db, program):
    """({phase: idle ns}, busy share): where the CPU was while no kernel and no copy ran within the program's range."""
    start, end = range_of(db, program)
    work = [row for table in MAYBE_MISSING[:3] for row in db.execute(f"SELECT start, end FROM {table}")]
    idle = minus([(start, end)], work)
    phases = {}
    for name, a, b in db.execute("SELECT text, start, end FROM NVTX_EVENTS WHERE text NOT IN ('request', ?)", (program,)):
        phases.setdefault(name, []).append((a, b))
    found = {name: length(idle) - length(minus(idle, ranges)) for name, ranges in phases.items()}  # what the phase takes away
    return found, 1 - length(idle) / (end - start)


PHASES = ("enqueue", "capture", "upload", "download", "wait", "decode")
rows = []
for program in PROGRAMS:
    idle, busy = idle_by_phase(opened(program), program)
    rows.append((f"`{program}`", f"{busy:.0%}", *(f"{idle[name] / 1e3:.0f}" if name in idle else "" for name in PHASES)))
lab.say("GPU 闲着（没有内核也没有拷贝）的时间里，CPU 在哪个区间，单位 µs：\n\n" + lab.table(("程序", "GPU 忙", *PHASES), rows), measured=False)

# %% [markdown]
# 怎么读这张表：
#
# - 闲在 `enqueue` 里，而且里面是许多次启动调用：CPU 在一个一个地交内核，GPU 等着收。这才是**启动受限**（launch-bound），CUDA 图治的就是它。
#   `graph` 和 `recapture` 的 `enqueue` 里只有一次图启动，闲的是这一次调用自己的开销（按 `node` 录制放大了它，刚实例化的图第一次启动还更贵），再加一张图也去不掉；
# - 闲在 `capture` 里：图用错了地方，每个请求都重新捕获，省下的又赔了回去；
# - 闲在 `decode` 里：CPU 在干自己的活，GPU 没有活。图帮不上，要把 CPU 的活和 GPU 的活**错开**，比如 `pipelined`；
# - 闲在 `upload`、`download` 里：CPU 卡在拷贝调用里；
# - 闲在 `wait` 里：活都交完了，CPU 在等。里面有前后两个内核之间的小缝（图里也有，内核越多越显眼），也有 GPU 做完以后、CPU 醒来之前的那一小段；
# - GPU 已经很忙：没有多少空闲可省。要看它忙的是什么：这一列把拷贝也算作忙，`pageable_copy` 和 `pinned_copy` 忙的有一大块是拷贝，
#   该治的是拷贝（练习二会把它单独算出来）；忙的若是内核，就受限于 GPU 自己，要快只有换更快的内核，图不会有多少用。
#
# 光说“有空隙，所以要用图”，常常会错：表里 GPU 最闲的几个程序，只有一个该用图来治。看 `serial` 和 `pipelined` 画出来的样子：

# %% tags=["demo"]
compare(("serial：算完才解码，解码完才算", opened("serial")), ("pipelined：解码的时候 GPU 在算下一个", opened("pipelined")))
us = ABOUT["us_per_request"]["plain"]
lab.say(
    f"不带 nsys 时，每个请求：`serial` {us['serial']:.0f} µs，`pipelined` {us['pipelined']:.0f} µs；"
    f"`big_eager` {us['big_eager']:.0f} µs，`big_graph` {us['big_graph']:.0f} µs；`eager` {us['eager']:.0f} µs，`graph` {us['graph']:.0f} µs。",
    measured=False,
)

# %% [markdown]
# 错开以后，一个请求的时间不会短于两者里长的那个。如果解码比 GPU 的活还长，`pipelined` 的 GPU 照样有空，
# 瓶颈就是解码自己：要么让它更快，要么多用几个 CPU 线程。
#
# ## 粒度：图在时间线上是一块，还是一串
#
# 有人第一次录带图的程序，看到的是一整块不透明的条：里面几十个内核，一个也看不见。也有人什么都看不见。这由 `--cuda-graph-trace` 决定：
#
# - `graph`（默认）：一次图启动记一行，记在 `CUPTI_ACTIVITY_KIND_GRAPH_TRACE`，打扰小；
# - `node`：图里每个节点各记一行，和普通内核在同一张表，看得清，打扰大。
#
# `whole_graph` 是同一个程序 `graph` 用 `--cuda-graph-trace=graph` 录的。两份并排：

# %% tags=["demo"]
def rows_in(db, table):
    return db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


by_node, by_graph = opened("graph"), opened("whole_graph")
launches = "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN StringIds s ON s.id = r.nameId WHERE s.value LIKE 'cudaGraphLaunch%' OR s.value LIKE 'cuGraphLaunch%'"
rows = [
    (f"`--cuda-graph-trace={granularity}`", db.execute(launches).fetchone()[0], rows_in(db, "CUPTI_ACTIVITY_KIND_KERNEL"), rows_in(db, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"))
    for granularity, db in (("node", by_node), ("graph", by_graph))
]
verdict = "这一份里整图的行也没有：这个版本的 nsys 配这个驱动，按 `graph` 录不到图里的工作。**空白不等于没做事**：启动调用明明在。" if not rows[1][3] else "整图各有一行，里面的内核看不见。"
lab.say(lab.table(("录法", "图启动调用", "内核的行", "整图的行"), rows) + f"\n\n{verdict}", measured=False)
took = ABOUT["us_per_request"]
rows = [(f"`{program}`", *(f"{took[how][program]:.0f}" if program in took[how] else "" for how in ("plain", "graph", "node"))) for program in PROGRAMS]
dearer = [f"`{program}`" for program in PROGRAMS if took["node"][program] > 1.2 * took["plain"][program]]
noise = [took["graph"]["eager"], took["node"]["eager"]]
notes = [f"按 node 录，慢了两成以上的：{'、'.join(dearer)}。" if dearer else "按 node 录，没有哪个慢了两成以上。"]
if max(noise) > 1.05 * min(noise):
    notes.append(f"`eager` 里没有图，粒度对它没有区别，所以它那两格（{noise[0]:.0f} 和 {noise[1]:.0f}）的差别是噪声：每格只跑了一遍，一次的偶然就能差这么多，这张表只看方向。")
lab.say("录制本身也可能花时间。每个请求的 µs，由程序自己的时钟量：\n\n" + lab.table(("程序", "不录", "按 graph 录", "按 node 录"), rows) + "\n\n" + "".join(notes), measured=False)

# %% [markdown]
# 按 `node` 录，图里每个节点都要多做一点记录，所以内核多而短的图最容易被拖慢。带着工具量出来的微秒数，不能当成程序自己的微秒数。时间线用来看**结构**：谁等谁，空隙落在哪里；要报延迟，关掉工具再量。
# 《图内剖析》会把这笔账算细。
#
# 还有一个容易踩的坑：录完先查一查 `NVTX_EVENTS` 里有没有你的区间。新版的 Python 包 `nvtx` 配旧版的 nsys，区间会一个不剩，也不报错；
# 本章的录制因此用的是 CuPy 自带的 `cupy.cuda.nvtx.RangePush` 和 `RangePop`。
#
# ## 在你自己的 GPU 上录
#
# 不一定要装 nsys。它背后的 CUPTI 有 Python 的接口 `cupti-python`：打开几种活动（activity）的记录，跑程序，把缓冲区里的记录取出来。
# 原始的调用大致是这样的：
#
# ```python
# from cupti import cupti
#
# def completed(activities):                       # CUPTI 交来一批记录
#     for a in activities:
#         if a.kind == cupti.ActivityKind.CONCURRENT_KERNEL:
#             print(a.name, a.start, a.end, a.correlation_id, a.graph_node_id)
#
# cupti.activity_register_callbacks(lambda: (8 << 20, 0), completed)
# cupti.activity_enable(cupti.ActivityKind.CONCURRENT_KERNEL)   # RUNTIME、DRIVER、MEMCPY、MEMSET 也一样
# ...                                              # 在这里运行要看的程序
# cupti.activity_flush_all(1)
# ```
#
# 课程把这几步包成了 `launchlab.lab.tracing`，记录放进内存里的 SQLite，表名列名和 nsys 的一样，所以上面的查询一个字也不用改：
#
# - `with tracing.record() as recording:` 录这一段，结束后 `recording.db` 就是数据库。图里每个节点各一行；`tracing.record("graph")` 则每次图启动一行；
# - `with tracing.range("名字"):` 给这一段 CPU 起名字：录制中就写进 `NVTX_EVENTS`；外面有 nsys 在录，它也看得见。
#
# 要录的图，放在录制里面捕获，节点的编号才可靠。

# %% tags=["gpu"]
import cupy as cp

from launchlab.lab import tracing

MIX = r"""
extern "C" __global__ void mix(unsigned* x, unsigned key, unsigned step, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned v = x[i];
    v ^= v >> 15; v *= 0x2c1b3c6du; v ^= key + step * 0x9e3779b9u; v ^= v >> 12; v += (unsigned)i;
    x[i] = v;
}
"""
FOLD = r"""
extern "C" __global__ void fold(unsigned* x, int n) {  // x[n], the key of the next request, takes in all n words
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&x[n], x[i] * (2u * i + 1u));
}
"""
STEPS, THREADS = 8, 256
stream = cp.cuda.Stream(non_blocking=True)
mix, fold = cp.RawKernel(MIX, "mix"), cp.RawKernel(FOLD, "fold")


def blocks(n):
    """How many blocks of THREADS threads n words need, as a grid."""
    return ((n + THREADS - 1) // THREADS,)


def slow_request(x):
    """One request, the slow way. x: cupy uint32 (n + 1,): n words of data, then the key of the next request.

    Reads the key back to the CPU, mixes the data STEPS times with it, then folds the data into the key; on `stream`.
    """
    n = x.size - 1
    with tracing.range("read key"), stream:
        key = int(x[n:].get()[0])
    with tracing.range("launch"), stream:
        for step in range(STEPS):
            mix(blocks(n), (THREADS,), (x, np.uint32(key), np.uint32(step), np.int32(n)))
        fold(blocks(n), (THREADS,), (x, np.int32(n)))


with stream:
    slow_request(cp.zeros(THREADS + 1, cp.uint32))  # the first launch of a kernel loads its code
stream.synchronize()

# %% [markdown]
# 先录一个真的引擎：和录制里一样的小号 BERT，逐次入队和用图各四个请求，查询和画法都是前面的那些。

# %% tags=["demo", "gpu"]
import tensorrt as trt

from launchlab.lab import models

builder = trt.Builder(lab.trt_logger())
config = builder.create_builder_config()
config.builder_optimization_level = 1
config.progress_monitor = lab.build_progress()
with lab.timing_cache(config):
    plan = builder.build_serialized_network(models.bert(builder, layers=6, hidden=128, heads=2, batch=1, length=32), config)
if plan is None:
    raise RuntimeError("构建失败：" + "；".join(lab.trt_errors()))
loader = trt.Runtime(lab.trt_logger())
engine = loader.deserialize_cuda_engine(plan)
context = engine.create_execution_context()
with stream:
    arrays = {name: cp.ones(tuple(engine.get_tensor_shape(name)), trt.nptype(engine.get_tensor_dtype(name))) for name in map(engine.get_tensor_name, range(engine.num_io_tensors))}
for name, array in arrays.items():
    context.set_tensor_address(name, array.data.ptr)


def enqueue():
    if not context.execute_async_v3(stream.ptr):
        raise RuntimeError("入队没有成功：" + "；".join(lab.trt_errors()))


def captured(work):
    """What work() puts on `stream`, as a graph."""
    with stream:
        stream.begin_capture()
        try:
            work()
        finally:
            graph = stream.end_capture()
    return graph


def serve(run, requests=4):
    """Run requests one after the other, each in a range of its own, waiting for each."""
    for _ in range(requests):
        with tracing.range("request"):
            with tracing.range("enqueue"):
                run()
            with tracing.range("wait"):
                stream.synchronize()


for _ in range(3):
    enqueue()
stream.synchronize()
with tracing.record() as here_eager:
    serve(enqueue)
with tracing.record() as here_graph:
    bert_graph = captured(enqueue)
    bert_graph.launch(stream)
    stream.synchronize()
    serve(partial(bert_graph.launch, stream))
compare(("逐次入队", here_eager.db), ("CUDA 图", here_graph.db), where=lab.gpu_name())
LAST = "SELECT start, end FROM NVTX_EVENTS WHERE text = 'request' ORDER BY start DESC LIMIT 1"
rows = []
for title, recording in (("逐次入队", here_eager), ("CUDA 图", here_graph)):
    start, end = recording.db.execute(LAST).fetchone()
    window = {"start": start, "end": end}
    idle = minus([(start, end)], recording.db.execute("SELECT start, end FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchall())
    rows.append((title, recording.db.execute(LAUNCHED, window).fetchone()[0], f"{(end - start) / 1e3:.0f}", f"{1 - length(idle) / (end - start):.0%}"))
lab.say("最后一个请求，录制中：\n\n" + lab.table(("走法", "内核", "请求（µs）", "GPU 忙"), rows))

# %% [markdown]
# 同样的程序，换一种粒度再录一次，数一数行：

# %% tags=["demo", "gpu"]
rows = []
for granularity in ("node", "graph"):
    with tracing.record(granularity) as recording:
        again = captured(enqueue)
        for _ in range(3):
            again.launch(stream)
        stream.synchronize()
    rows.append((granularity, *(rows_in(recording.db, table) for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"))))
lab.say("图启动 3 次：\n\n" + lab.table(("粒度", "内核的行", "整图的行"), rows))

# %% [markdown]
# ### 一条有空隙的时间线
#
# 最后一道练习的程序 `slow_request` 很短：把上一个请求留下的钥匙（key）读回 CPU，用它搅拌数据 8 次，再把数据折进新的钥匙。
# 录几个请求，看看它的时间线：

# %% tags=["demo", "gpu"]
with stream:
    words = cp.arange(2049, dtype=cp.uint32)
stream.synchronize()
with tracing.record() as slow:
    for _ in range(5):
        with tracing.range("request"):
            slow_request(words)
figure, ax = plt.subplots(figsize=(9.5, 2.4), layout="constrained")
start, _ = request_window(slow.db, 2)
_, end = request_window(slow.db, 3)
draw(ax, slow.db, (start, end), f"slow_request 的两个请求（{lab.gpu_name()}）")
plt.show()
gaps = [end - start for start, end in slow.db.execute(GAPS)]
first, last = slow.db.execute("SELECT min(start), max(end) FROM (SELECT start, end FROM CUPTI_ACTIVITY_KIND_KERNEL UNION ALL SELECT start, end FROM CUPTI_ACTIVITY_KIND_MEMCPY)").fetchone()
waits = slow.db.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN StringIds s ON s.id = r.nameId WHERE s.value LIKE '%Synchronize%'").fetchone()[0]
lab.say(f"5 个请求，从 GPU 上第一件工作到最后一件（内核和拷贝）一共 {(last - first) / 1e3:.0f} µs，其中空隙 **{sum(gaps) / 1e3:.0f} µs**；CPU 等待了 {waits} 次。")

# %% [markdown]
# ## 练习
#
# 四道题，共 12 分。前两道不需要 GPU。可以用的给定名字：
#
# - `opened`、`complete`、`range_of`，`PROGRAMS`、`NSYS`，`merge`、`minus`、`length`；
# - 后两道还有 `tracing`、`stream`、`mix`、`fold`、`MIX`、`STEPS`、`THREADS`、`blocks`、`slow_request`；
# - 各题前面另外给出的名字。演示单元（标着 demo，评分时不运行）里的名字不能用，里面的 SQL 可以抄。
#
# 测试会把录制改头换面：时间平移、拉长，内核丢掉几个或者拉长到重叠，两个程序混在一份里。`tables_of` 和 `database` 是为此准备的，把录制变成普通的字典，再变回来；你不需要用它们。

# %%
KEPT = ("id", "value", "start", "end", "eventType", "text", "textId", "domainId", "globalTid", "nameId", "correlationId", "streamId", "shortName", "graphNodeId", "bytes")


def tables_of(db):
    """A recording as plain data: {table: {"columns": [...], "rows": [[...], …]}}, without what no exercise asks for."""
    found = {}
    for table in ("StringIds", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME", *MAYBE_MISSING[:3]):
        cursor = db.execute(f"SELECT * FROM {table}")
        columns = [column[0] for column in cursor.description]
        wanted = [i for i, name in enumerate(columns) if name in KEPT]
        found[table] = {"columns": [columns[i] for i in wanted], "rows": [[row[i] for i in wanted] for row in cursor]}
    return found


def database(tables):
    """The sqlite3.Connection, in memory, of what tables_of returned."""
    db = sqlite3.connect(":memory:")
    for table, content in tables.items():
        columns = content["columns"]
        db.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
        db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", content["rows"])
    return complete(db)


def program_tables(program):
    """tables_of the export of a program."""
    return tables_of(opened(program))


# %% [markdown]
# ### 练习一：一份录制的六个数（3 分）
#
# 写 `summarize(db, name)`：`db` 是一份录制，`name` 是其中一个 NVTX 区间的名字，整份里只有一个区间叫这个名字。
# **属于这个区间**的调用，是开始和结束都在区间之内（含端点）的 CUDA 调用；属于这个区间的 GPU 工作，是这些调用引出的内核、拷贝和填充，不管它们在 GPU 上什么时候跑。
# 返回一个字典：
#
# - `"kernels"`：属于这个区间的内核有几个；
# - `"launches"`：其中至少引出了一个内核的调用有几次；
# - `"launch_share"`：这些调用（引出了内核的）持续时间之和，占区间长度的比例；
# - `"span_us"`：属于这个区间的 GPU 工作，从第一件开始到最后一件结束，µs；
# - `"gaps"`：在这个跨度里，没有任何**属于这个区间的** GPU 工作、并且不短于 5 µs（5000 ns）的空隙有几段；
# - `"longest_gap_us"`：没有工作的空隙里最长的一段，µs，不管它够不够 5 µs；一段也没有就是 0。
#
# 一件 GPU 工作也没有的区间：`launch_share`、`span_us` 和后面两项都是 0。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 区间里有的调用什么也没引出（捕获中的启动、等待），有的引出拷贝，有的一次引出几十个内核：从哪张表出发数，才不会数错？
# 空隙呢：排好序以后，一件工作的“前面”是指前一件，还是前面所有的？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 先 `range_of(db, name)` 得到 `start, end`。`db.execute(sql, {"start": start, "end": end}).fetchall()`，SQL 里写 `:start`、`:end`。
# 内核表 `JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId`；`count(DISTINCT …)`，或者拿到 Python 里用集合。
# 并集可以用 `merge`，空隙就是相邻两段之间；也可以用正文里带窗口函数的 SQL。
#
# </details>

# %% solution="summarize"
def summarize(db, name):
    """Six numbers of the NVTX range `name` in a recording (sqlite3.Connection, times in ns).

    Returns {"kernels": int, "launches": int, "launch_share": float, "span_us": float, "gaps": int, "longest_gap_us": float}.
    """
    ### BEGIN SOLUTION: 先找出区间，再从三张 GPU 的表各自按 correlationId 往回连到区间里的调用；内核另外数一遍它们的调用
    start, end = range_of(db, name)
    work, launching, kernels = [], {}, 0
    for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"):
        query = f"""
            SELECT w.start, w.end, r.correlationId, r.end - r.start
            FROM {table} w JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = w.correlationId
            WHERE r.start >= :start AND r.end <= :end
        """
        for begin, finish, call, duration in db.execute(query, {"start": start, "end": end}):
            work.append((begin, finish))
            if table == "CUPTI_ACTIVITY_KIND_KERNEL":
                kernels += 1
                launching[call] = duration
    busy = merge(work)
    gaps = [busy[i][0] - busy[i - 1][1] for i in range(1, len(busy))]
    return {
        "kernels": kernels,
        "launches": len(launching),
        "launch_share": sum(launching.values()) / (end - start),
        "span_us": (busy[-1][1] - busy[0][0]) / 1e3 if busy else 0.0,
        "gaps": sum(gap >= 5000 for gap in gaps),
        "longest_gap_us": max(gaps, default=0) / 1e3,
    }
    ### END SOLUTION


# %% test="summarize" kind="answer" points=3
def recording(ranges, calls, kernels, copies=()):
    return {
        "StringIds": {"columns": ["id", "value"], "rows": [[1, "cudaLaunchKernel_v7000"], [2, "cudaMemcpyAsync_v3020"]]},
        "NVTX_EVENTS": {"columns": ["start", "end", "eventType", "text", "textId"], "rows": [[a, b, 59, text, None] for text, a, b in ranges]},
        "CUPTI_ACTIVITY_KIND_RUNTIME": {"columns": ["start", "end", "correlationId", "nameId"], "rows": [[a, b, c, 1] for a, b, c in calls]},
        "CUPTI_ACTIVITY_KIND_KERNEL": {"columns": ["start", "end", "correlationId", "streamId"], "rows": [[a, b, c, 7] for a, b, c in kernels]},
        "CUPTI_ACTIVITY_KIND_MEMCPY": {"columns": ["start", "end", "correlationId", "bytes"], "rows": [[a, b, c, 4] for a, b, c in copies]},
    }


def six(side, tables, name):
    found = side.summarize(side.database(tables), name)
    return [found[key] for key in ("kernels", "launches", "launch_share", "span_us", "gaps", "longest_gap_us")]


SMALL = recording(
    [("work", 1_000, 21_000)], [(2_000, 4_000, 1), (5_000, 7_000, 2), (8_000, 9_000, 3), (10_000, 12_000, 4)],
    [(5_000, 9_000, 1), (30_000, 31_000, 2), (33_000, 34_000, 2)], [(15_000, 16_000, 4)],
)
check.equal(six(student, SMALL, "work"), [3, 2, 0.2, 29.0, 2, 14.0], rel=1e-9, why="手算的小例子不对：3 个内核由 2 次调用引出（各 2 µs，区间长 20 µs，所以占 0.2）；GPU 从 5 到 34 µs；空隙是 6、14、2 µs，其中两段不短于 5 µs。")
theirs, shipped = reference.value("NSYS"), reference.value("PROGRAMS")
mine = [six(student, reference.program_tables(which), which) for which in shipped]
check.equal([each[0] for each in mine], [sum(row["Instances"] for row in theirs[which]["cuda_gpu_kern_sum"]) for which in shipped], why="十份录制的内核数，和 nsys stats 的 cuda_gpu_kern_sum 对不上。")
projected = [next(row["Total Proj Time (ns)"] for row in theirs[which]["nvtx_gpu_proj_sum"] if row["Range"] == which) for which in shipped]
check.equal([each[3] for each in mine], [ns / 1e3 for ns in projected], rel=1e-6, why="十份录制的 GPU 跨度，和 nsys stats 的 nvtx_gpu_proj_sum 对不上。拷贝和填充也算 GPU 工作。")
check.equal([each[4] for each in mine], [sum(ns >= 5000 for _, ns in theirs[which]["gpu_gaps"]) for which in shipped], why="十份录制里 5 µs 以上的空隙数，和 nsys analyze 的 gpu_gaps 对不上。")
### BEGIN HIDDEN TESTS
def rule(tables, name):
    def column(table, *names):
        content = tables[table]
        places = [content["columns"].index(each) for each in names]
        return [tuple(row[place] for place in places) for row in content["rows"]]

    start, end = next((a, b) for a, b, kind, text in column("NVTX_EVENTS", "start", "end", "eventType", "text") if kind == 59 and text == name)
    inside = {c: b - a for a, b, c in column("CUPTI_ACTIVITY_KIND_RUNTIME", "start", "end", "correlationId") if a >= start and b <= end}
    kernels = [row for row in column("CUPTI_ACTIVITY_KIND_KERNEL", "start", "end", "correlationId") if row[2] in inside]
    extra = [row for table in ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET") if table in tables for row in column(table, "start", "end", "correlationId") if row[2] in inside]
    callers = {c for _, _, c in kernels}
    busy_until, gaps, everything = None, [], sorted(kernels + extra)
    for a, b, _ in everything:
        if busy_until is not None and a > busy_until:
            gaps.append(a - busy_until)
        busy_until = b if busy_until is None else max(busy_until, b)
    span = (busy_until - everything[0][0]) / 1e3 if everything else 0.0
    return [len(kernels), len(callers), sum(inside[c] for c in callers) / (end - start), span, sum(g >= 5000 for g in gaps), max(gaps, default=0) / 1e3]


def changed(tables, table, change):
    """A copy of tables in which change(row as a dict, its number) → dict or None made the rows of a table."""
    columns = tables[table]["columns"]
    rows = [change(dict(zip(columns, row, strict=True)), i) for i, row in enumerate(tables[table]["rows"])]
    return tables | {table: {"columns": columns, "rows": [list(row.values()) for row in rows if row is not None]}}


TIMED = ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")


def moved(tables, factor=1, offset=0, calls=0, rename=None):
    """Times scaled and shifted, correlation ids raised, one range renamed: another program for the same recording."""
    def change(row, _):
        row |= {"start": row["start"] * factor + offset, "end": row["end"] * factor + offset}
        if row.get("correlationId") is not None:
            row["correlationId"] += calls
        if rename and row.get("text") == rename[0]:
            row["text"] = rename[1]
        return row

    for table in TIMED:
        tables = changed(tables, table, change)
    return tables


def joined(first, second):
    """Both in one recording, columns by name. Their correlation ids must differ."""
    both = {}
    for table in TIMED:
        columns, theirs = first[table]["columns"], second[table]["columns"]
        both[table] = {"columns": columns, "rows": first[table]["rows"] + [[dict(zip(theirs, row, strict=True)).get(each) for each in columns] for row in second[table]["rows"]]}
    return first | both


def examine_six(tables, name, why):
    check.equal(six(student, tables, name), rule(tables, name), rel=1e-9, why=why)


order = [str(each) for each in secret.permutation(shipped)]
for which in order[:3]:
    parts = reference.program_tables(which)
    examine_six(moved(parts, int(secret.integers(2, 5)), int(secret.integers(10**6, 10**9))), which, "整份录制的时间平移并拉长以后，结果不对。时间不能写死，比例也别用绝对值去算。")
    keep = int(secret.integers(3, 6))
    fewer = changed(parts, "CUPTI_ACTIVITY_KIND_KERNEL", lambda row, i, keep=keep: None if i % keep else row)
    examine_six(fewer, which, "丢掉了大部分内核以后，结果不对：没有引出内核的调用不算启动。")
    longer = changed(parts, "CUPTI_ACTIVITY_KIND_KERNEL", lambda row, i: row | {"end": row["end"] + (60_000 if i % 7 == 0 else 0)})
    examine_six(longer, which, "有的内核很长，盖过了后面好几个：空隙要看前面**所有**工作最晚的结束。")
both = joined(reference.program_tables(order[3]), moved(reference.program_tables(order[4]), 1, int(secret.integers(2_000, 9_000)), 10**6))
for which in order[3:5]:
    examine_six(both, which, "一份录制里有两个程序，时间上交错：只算这个区间引出的工作，别人的内核填不了它的空隙。")
bare = changed(reference.program_tables("recapture"), "CUPTI_ACTIVITY_KIND_KERNEL", lambda row, i: None)
examine_six(bare, "recapture", "一个内核也没有、只有拷贝的录制算错了。")
examine_six(recording([("work", 0, 10_000), ("late", 20_000, 30_000)], [(1_000, 2_000, 1), (9_000, 10_001, 2)], [(50_000, 60_000, 1), (70_000, 80_000, 2)]), "work", "结束时已经出了区间的调用，不属于这个区间。")
fills = {"columns": ["start", "end", "correlationId", "bytes"], "rows": [[30_000, 31_000, 2, 64]]}
examine_six(recording([("work", 0, 20_000)], [(1_000, 2_000, 1), (3_000, 4_000, 2)], [(10_000, 12_000, 1)]) | {"CUPTI_ACTIVITY_KIND_MEMSET": fills}, "work", "填充（memset）也是 GPU 工作。")
examine_six(recording([("work", 10_000, 20_000)], [(9_999, 11_000, 1), (12_000, 13_000, 2), (20_000, 21_000, 3)], [(50_000, 60_000, 1), (70_000, 80_000, 2), (90_000, 99_000, 3)]), "work", "开始时还没有进区间、或者区间结束才开始的调用，不属于这个区间。")
examine_six(recording([("work", 10_000, 20_000)], [(10_000, 11_000, 1), (18_000, 20_000, 2)], [(50_000, 60_000, 1), (70_000, 80_000, 2)]), "work", "恰好从区间的起点开始、或者恰好在终点结束的调用，也属于这个区间。")
examine_six(recording([("work", 0, 10_000), ("idle", 20_000, 30_000)], [(1_000, 2_000, 1)], [(50_000, 60_000, 1)]), "idle", "区间里一件 GPU 工作也没有的时候，该返回 0，而不是出错。")
examine_six(recording([("work", 0, 100_000)], [(a, a + 1_000, a) for a in range(0, 50_000, 10_000)], [(a, a + b, a) for a, b in zip(range(0, 50_000, 10_000), (5_000, 5_001, 4_999, 25_000, 1_000), strict=True)]), "work", "恰好 5 µs 的空隙也算。")
examine_six(recording([("work", 0, 20_000)], [(1_000, 2_000, 1)], [(3_000, 4_000, 1), (7_000, 8_000, 1)]), "work", "只有短于 5 µs 的空隙时，段数是 0，最长的一段照样要报。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习二：下判断（3 分）
#
# 写 `diagnose(db, name)`：只看 NVTX 区间 `name` 的起止之间（窗口），不管工作是谁引出的，录制里所有的内核和拷贝都算，超出窗口的部分截掉。
# 一个窗口里的时间分成两份：至少有一个**内核**在跑的，和没有的。没有内核的时间再分给五个原因，每一段只给一个，从上往下，先符合的拿走：
#
# 1. `"copy"`：有拷贝或填充在做；
# 2. `"launch"`：CPU 在名叫 `enqueue` 的区间里；
# 3. `"capture"`：CPU 在名叫 `capture` 的区间里；
# 4. `"host"`：CPU 在名叫 `decode` 或 `prepare` 的区间里；
# 5. `"wait"`：剩下的。
#
# 返回字典：
#
# - `"busy"`：有内核在跑的时间占窗口的比例；
# - `"idle_us"`：字典，五个原因各多少 µs（没有就是 0）；
# - `"cause"`：`busy` 不小于 0.8 是 `"gpu"`；否则是五个原因里时间最长的那个（测试里没有并列，也没有恰好 0.8 的）。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 从整个窗口开始，一层一层往下减：减去内核的并集，剩下的就是没有内核的时间；再减去拷贝，减掉了多少，`copy` 就是多少。后面每一层都一样。
# 窗口外面的工作，减的时候会不会碍事？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `minus([(start, end)], kernels)` 从窗口里减去内核，返回剩下的区间；窗口外的部分自动不算。`length(…)` 给出总长（ns）。
# 两次 `length` 之差就是这一层拿走的。区间的名字在 `text` 列：`SELECT start, end FROM NVTX_EVENTS WHERE text IN ('decode', 'prepare')`。
# `max(idle, key=idle.get)` 是字典里值最大的键。
#
# </details>

# %% solution="diagnose"
def diagnose(db, name):
    """Why the range `name` of a recording takes as long as it does, by what the CPU did while no kernel ran.

    Returns {"busy": float, "idle_us": {"copy", "launch", "capture", "host", "wait": float}, "cause": str}; the cause is
    "gpu" from a busy share of 0.8, otherwise the key of the longest idle time.
    """
    ### BEGIN SOLUTION: 从窗口开始，依次减去内核、拷贝、enqueue、capture、decode 与 prepare 的区间；每一层减掉多少，就是多少
    window = range_of(db, name)
    layers = {
        "copy": "SELECT start, end FROM CUPTI_ACTIVITY_KIND_MEMCPY UNION ALL SELECT start, end FROM CUPTI_ACTIVITY_KIND_MEMSET",
        "launch": "SELECT start, end FROM NVTX_EVENTS WHERE text = 'enqueue'",
        "capture": "SELECT start, end FROM NVTX_EVENTS WHERE text = 'capture'",
        "host": "SELECT start, end FROM NVTX_EVENTS WHERE text IN ('decode', 'prepare')",
    }
    left = minus([window], db.execute("SELECT start, end FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchall())
    busy = 1 - length(left) / length([window])
    idle = {}
    for cause, query in layers.items():
        remaining = minus(left, db.execute(query).fetchall())
        idle[cause] = (length(left) - length(remaining)) / 1e3
        left = remaining
    idle["wait"] = length(left) / 1e3
    return {"busy": busy, "idle_us": idle, "cause": "gpu" if busy >= 0.8 else max(idle, key=idle.get)}
    ### END SOLUTION


# %% test="diagnose" kind="answer" points=3
CAUSES = ("copy", "launch", "capture", "host", "wait")


def said(side, tables, name):
    found = side.diagnose(side.database(tables), name)
    return [found["busy"], *(found["idle_us"][cause] for cause in CAUSES)], found["cause"]


def traced(ranges, kernels, copies=()):
    return {
        "StringIds": {"columns": ["id", "value"], "rows": [[1, "?"]]},
        "NVTX_EVENTS": {"columns": ["start", "end", "eventType", "text", "textId"], "rows": [[a, b, 59, text, None] for text, a, b in ranges]},
        "CUPTI_ACTIVITY_KIND_RUNTIME": {"columns": ["start", "end", "correlationId", "nameId"], "rows": []},
        "CUPTI_ACTIVITY_KIND_KERNEL": {"columns": ["start", "end", "correlationId", "streamId"], "rows": [[a, b, 1, 7] for a, b in kernels]},
        "CUPTI_ACTIVITY_KIND_MEMCPY": {"columns": ["start", "end", "correlationId", "bytes"], "rows": [[a, b, 1, 4] for a, b in copies]},
    }


TINY = traced([("work", 0, 100_000), ("enqueue", 0, 60_000), ("decode", 70_000, 90_000)], [(10_000, 20_000), (15_000, 30_000), (95_000, 120_000)], [(28_000, 40_000)])
numbers, cause = said(student, TINY, "work")
check.equal(numbers, [0.25, 10.0, 30.0, 0.0, 20.0, 15.0], rel=1e-9, why="手算的小例子不对：窗口 100 µs；内核占 10–30 和 95–100，重叠的只算一次，窗口外的截掉；拷贝独占 30–40；enqueue 里还剩 0–10 和 40–60；decode 20；其余 15。")
check.equal(cause, "launch", why="小例子里没有内核的时间，最多的一份是 30 µs，CPU 在 enqueue 里。")
numbers, cause = said(student, traced([("work", 0, 100_000), ("decode", 0, 19_000), ("wait", 19_000, 100_000)], [(19_500, 100_000)]), "work")
check.equal(cause, "gpu", why="GPU 忙了八成以上，瓶颈就是 GPU：那一点点空闲不是原因。")
### BEGIN HIDDEN TESTS
def judged(tables, name):
    """The same by sweeping over all points where anything begins or ends."""
    def column(table, *names):
        places = [tables[table]["columns"].index(each) for each in names]
        return [tuple(row[place] for place in places) for row in tables[table]["rows"]] if table in tables else []

    marks = column("NVTX_EVENTS", "start", "end", "text")
    start, end = next((a, b) for a, b, text in marks if text == name)
    groups = {
        "gpu": column("CUPTI_ACTIVITY_KIND_KERNEL", "start", "end"),
        "copy": [row for table in ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET") if table in tables for row in column(table, "start", "end")],
        "launch": [(a, b) for a, b, text in marks if text == "enqueue"],
        "capture": [(a, b) for a, b, text in marks if text == "capture"],
        "host": [(a, b) for a, b, text in marks if text in ("decode", "prepare")],
    }
    edges = sorted([(at, group, step) for group, rows in groups.items() for a, b in rows for at, step in ((a, 1), (b, -1))])
    depth, took, last = dict.fromkeys(groups, 0), dict.fromkeys(("gpu", *CAUSES), 0), start
    for at, group, step in [*edges, (end, "gpu", 0)]:
        here = min(max(at, start), end)
        if here > last:
            took[next((each for each in groups if depth[each] > 0), "wait")] += here - last
            last = here
        depth[group] += step
    busy = took["gpu"] / (end - start)
    idle = {cause: took[cause] / 1e3 for cause in CAUSES}
    first, second = sorted(idle.values())[-1:-3:-1]
    clear = abs(busy - 0.8) > 0.01 and (busy > 0.8 or first > 1.02 * second)
    return [busy, *idle.values()], "gpu" if busy >= 0.8 else max(idle, key=idle.get), clear


def edit(tables, table, change):
    columns = tables[table]["columns"]
    rows = [change(dict(zip(columns, row, strict=True)), i) for i, row in enumerate(tables[table]["rows"])]
    return tables | {table: {"columns": columns, "rows": [list(row.values()) for row in rows if row is not None]}}


def examine_verdict(tables, name, why):
    numbers, cause, clear = judged(tables, name)
    got, verdict = said(student, tables, name)
    check.equal(got, numbers, rel=1e-9, abs=1e-6, why=why)
    if clear:
        check.equal(verdict, cause, why=why + "（数都对，cause 不对。）")


KERNELS, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"
for which in reference.value("PROGRAMS"):
    parts = reference.program_tables(which)
    examine_verdict(parts, which, f"录制 {which} 的判断不对。")
    columns = parts[KERNELS]["columns"]
    spans = [(row[columns.index("start")], row[columns.index("end")]) for row in parts[KERNELS]["rows"]]
    reported = sum(row["Total Time (ns)"] for row in reference.value("NSYS")[which]["cuda_gpu_kern_sum"])
    if reference.length(reference.merge(spans)) == reported:  # no two kernels overlap: then nsys's sum is the busy time
        low, high = reference.range_of(reference.database(parts), which)
        check.equal(said(student, parts, which)[0][0], reported / (high - low), abs=1e-3, why=f"{which}：busy 和 nsys stats 的 cuda_gpu_kern_sum 对不上。")
for which in [str(each) for each in secret.permutation(reference.value("PROGRAMS"))][:4]:
    parts = reference.program_tables(which)
    for old, new in (("enqueue", "decode"), ("enqueue", "capture"), ("decode", "enqueue"), ("capture", "prepare")):
        renamed = edit(parts, NVTX, lambda row, i, old=old, new=new: row | {"text": new if row["text"] == old else row["text"]})
        examine_verdict(renamed, which, "同样的时间线，CPU 的区间换了名字，原因也该跟着换。")
    stretched = edit(parts, KERNELS, lambda row, i: row | {"end": row["end"] + 400_000})
    examine_verdict(stretched, which, "内核拉长到互相重叠、把空隙都填上以后，判断不对。重叠的时间只算一次，窗口之外的不算。")
    gone = edit(parts, KERNELS, lambda row, i: row if i % 5 == 0 else None)
    examine_verdict(gone, which, "丢掉了大部分内核以后，判断不对。")
    slow_copy = edit(gone, "CUPTI_ACTIVITY_KIND_MEMCPY", lambda row, i: row | {"end": row["end"] + 300_000})
    examine_verdict(slow_copy, which, "拷贝变得很长以后，判断不对：没有内核、却有拷贝在做的时间，先归 copy。")
fills = {"columns": ["start", "end", "correlationId", "bytes"], "rows": [[50_000, 95_000, 1, 64]]}
examine_verdict(traced([("work", 0, 100_000), ("enqueue", 0, 100_000)], [(0, 40_000)]) | {"CUPTI_ACTIVITY_KIND_MEMSET": fills}, "work", "填充（memset）在做的时间，也归 copy。")
share = int(secret.integers(740, 790))
numbers, cause = said(student, traced([("work", 0, 100_000), ("prepare", 0, 100_000)], [(0, share * 100)]), "work")
check.equal(numbers, [share / 1000, 0.0, 0.0, 0.0, (1000 - share) / 10, 0.0], rel=1e-9, abs=1e-9, why="GPU 忙了将近八成的时候，数不对。")
check.equal(cause, "host", why="GPU 忙得还不到八成，cause 就不是 gpu，而是没有内核的时间里最长的那一份。")
numbers, cause = said(student, traced([("a", 0, 50_000), ("b", 50_000, 100_000), ("enqueue", 0, 40_000), ("decode", 60_000, 95_000)], [(0, 5_000), (50_000, 55_000)]), "b")
check.equal(cause, "host", why="一份录制里有两个窗口：只看 name 的那一个。")
check.equal(numbers, [0.1, 0.0, 0.0, 0.0, 35.0, 10.0], rel=1e-9, abs=1e-9, why="一份录制里有两个窗口：只看 name 的那一个，别的窗口里的区间不算。")
numbers, cause = said(student, traced([("a", 0, 100_000), ("prepare", 10_000, 80_000)], [(0, 30_000)], [(70_000, 95_000)]), "a")
check.equal(numbers, [0.3, 25.0, 0.0, 0.0, 40.0, 5.0], rel=1e-9, abs=1e-9, why="prepare 也是 CPU 自己的活；它和拷贝重叠的部分归 copy。")
check.equal(cause, "host", why="prepare 也是 CPU 自己的活。")
numbers, cause = said(student, traced([("a", 0, 100_000), ("capture", 10_000, 60_000), ("enqueue", 20_000, 40_000)], [(0, 10_000), (60_000, 100_000)]), "a")
check.equal(numbers, [0.5, 0.0, 20.0, 30.0, 0.0, 0.0], rel=1e-9, abs=1e-9, why="enqueue 套在 capture 里面的时候：五个原因从上往下，先符合的拿走，每一段只给一个。")
check.equal(cause, "capture", why="enqueue 套在 capture 里面的时候，cause 不对。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习三：在这块 GPU 上起名字、录下来（3 分）
#
# 服务 `handle(i)` 处理第 `i` 个请求：把工作交给 GPU 就返回，不等它做完。有的请求逐个启动内核，有的当场捕获一张图再启动，有的两样都有，也有一个内核都没有的，中间还夹着别的操作。
# 每个请求引出了几个内核？写 `trace_requests(handle, count)`：
#
# - 录制一段：依次调用 `handle(0)`、……、`handle(count - 1)`，每个调用**一次**，放进名叫 `request` 加编号的区间，比如 `"request 3"`；
# - 请求之间不要等待（录制结束的时候，`tracing.record` 自己会等 GPU 做完）；
# - 录完以后，返回一个列表，第 `i` 项是 `[内核数, 其中在图里的, 引出内核的调用次数]`，三个整数。
#
# GPU 可能忙着前面的事，等轮到这个请求的内核，它的区间早就关上了。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 前面某个请求的内核可能要跑很久，等它跑完，后面所有的区间都已经结束了。拿什么认出一个内核是哪个请求引出的？
# 捕获中的启动也是调用，它们引出内核了吗？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# `with tracing.record() as recording:` 和里面的 `with tracing.range(f"request {i}"):`；块结束以后才有 `recording.db`。
# 每个请求 `range_of(recording.db, f"request {i}")`，再用 `correlationId` 把内核连到区间里的调用。
# `count(*)`、`count(k.graphNodeId)`（空值不数）、`count(DISTINCT r.correlationId)`，一条 SQL 就够。
#
# </details>

# %% solution="trace_requests" tags=["gpu"]
def trace_requests(handle, count):
    """Record handle(0) … handle(count - 1), each within a range "request i", and count the kernels of each request.

    Returns a list of [kernels, kernels within graphs, calls that launched kernels], one for each request.
    """
    ### BEGIN SOLUTION: 一个 record 包住所有请求，每个请求一个 range；录完以后，按 correlationId 把内核归到各自的请求
    with tracing.record() as recording:
        for i in range(count):
            with tracing.range(f"request {i}"):
                handle(i)
    query = """
        SELECT count(*), count(k.graphNodeId), count(DISTINCT r.correlationId)
        FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId
        WHERE r.start >= ? AND r.end <= ?
    """
    return [list(recording.db.execute(query, range_of(recording.db, f"request {i}")).fetchone()) for i in range(count)]
    ### END SOLUTION


# %% test="trace_requests" kind="structure" points=3 tags=["gpu"]
SERVICE = r"""
def service(stream, state, plan):
    # plan: for each request "hold" or (kernels, graphed, more): some kernels, in a graph or not, then more one by one.
    # The state counts and mixes every kernel that really ran; handle.pauses: how long after a "hold" the next request came, s.
    import time
    import cupy
    tick = cupy.RawKernel('extern "C" __global__ void tick(unsigned* x) {'
                          ' unsigned v = x[0]; v ^= v >> 15; v *= 0x2c1b3c6du; v ^= v >> 12; v += 0x9e3779b9u; x[0] = v; x[1] += 1; }', "tick")
    hold = cupy.RawKernel(r'''extern "C" __global__ void hold(unsigned ns) {
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
    }''', "hold")
    with stream:
        scratch = cupy.zeros(1024, cupy.uint32)
        tick((1,), (1,), (scratch,))
        hold((1,), (1,), (cupy.uint32(1),))
    stream.synchronize()
    kept, held = [], []

    def handle(i):
        if held:
            handle.pauses.append(time.perf_counter() - held.pop())
        with stream:
            if plan[i] == "hold":
                hold((1,), (1,), (cupy.uint32(HOLD_MS * 1000000),))
                held.append(time.perf_counter())
                return
            kernels, graphed, more = plan[i]
            scratch.data.memset_async(0, 64, stream)
            if graphed:
                stream.begin_capture()
            for _ in range(kernels):
                tick((1,), (1,), (state,))
            if graphed:
                kept.append(stream.end_capture())
                kept[-1].launch(stream)
            for _ in range(more):
                tick((1,), (1,), (state,))

    handle.pauses = []
    return handle
""".replace("HOLD_MS", "150")


def counted(state, kernels):
    """The state after so many ticks. state: uint32 (2,)."""
    v, n = int(state[0]), int(state[1])
    for _ in range(kernels):
        v ^= v >> 15
        v = v * 0x2C1B3C6D & 0xFFFFFFFF
        v ^= v >> 12
        v = v + 0x9E3779B9 & 0xFFFFFFFF
        n += 1
    return np.array([v, n & 0xFFFFFFFF], np.uint32)


def wanted(orders):
    return [[1, 0, 1] if each == "hold" else [each[0] + each[2], each[0] if each[1] else 0, (1 if each[1] else each[0]) + each[2]] for each in orders]


orders = [(3, False, 0), (5, True, 0), (2, False, 0)]
fresh = np.array([7, 0], np.uint32)
state = on_gpu(fresh)
found = student.trace_requests(student.define(SERVICE, "service")(student.value("stream"), state, orders), 3)
check.equal(state.read(), counted(fresh, 10), why="三个请求应当各处理一次：GPU 上一共要跑 10 个内核。handle 调了几遍？")
check.equal(found, wanted(orders), why="三个请求：3 个内核逐个启动；5 个内核在一张图里，由 1 次调用引出；2 个内核逐个启动。捕获中的启动没有引出内核；填充（memset）不是内核。")
### BEGIN HIDDEN TESTS
for holds in (0, 1):
    orders = [(int(secret.integers(1, 12)), bool(graphed), int(more)) for graphed, more in secret.permutation([[True, 0], [True, 3], [False, 0], [False, 2], [True, 1]])]
    orders.insert(int(secret.integers(len(orders))), (0, False, 0))
    if holds:
        orders.insert(int(secret.integers(len(orders))), "hold")
    fresh = secret.integers(0, 2**32, 2, dtype=np.uint32)
    state = on_gpu(fresh)
    handle = student.define(SERVICE, "service")(student.value("stream"), state, orders)
    found = student.trace_requests(handle, len(orders))
    check.equal(state.read(), counted(fresh, sum(each[0] + each[2] for each in orders if each != "hold")), why="每个请求应当正好处理一次。")
    pauses = handle.get("pauses")
    check.that(len(pauses) == holds and all(pause < 0.075 for pause in pauses), why="请求之间等了 GPU：一个请求还没有做完，下一个就该交进来。不等，区间和内核就不能靠时间去对，要靠 correlationId。")
    check.equal(found, wanted(orders), why="请求和内核对错了号：GPU 还忙着前面的请求时，后面的区间已经关上了，不能靠时间去对，要靠 correlationId。一个请求里可能既有图，又有逐个启动的内核；也可能一个内核都没有。")
check.equal(student.trace_requests(student.define(SERVICE, "service")(student.value("stream"), on_gpu(np.zeros(2, np.uint32)), []), 0), [], why="一个请求也没有，就返回空列表。")
### END HIDDEN TESTS

# %% [markdown]
# ### 练习四：去掉时间线上的那个空隙（3 分）
#
# 前面画过 `slow_request` 的时间线，上面有两种空隙：
#
# - 每个请求的开头，CPU 等 GPU 做完、把钥匙 `x[n]` 拷回来，再把它当作内核的参数交回去，这期间 GPU 闲着；
# - 接下来 CPU 一个一个地启动内核，如果启动比内核还久，内核之间也有缝。
#
# 第二种本来可以靠图去掉，可是钥匙要经过 CPU，录不成图。所以先要去掉第一种。
#
# 写 `capture_request(x)`：
#
# - `x` 是 `slow_request` 那样的 cupy 数组，uint32，n + 1 个：n 个数据，最后一个是钥匙；
# - 返回一张 CuPy 的图（`cupy.cuda.Graph`）。每次 `graph.launch(stream)`，效果和一次 `slow_request(x)` **完全相同**，包括 `x[n]` 里的新钥匙；
# - 图里正好 `STEPS + 1` 个节点，全是内核：没有拷贝，没有 CPU 参与，一个请求的全部工作都在这张图里；
# - 构造的时候不能改动 `x`。
#
# 数据换了、`x` 被就地改写以后，重放仍然要对：每次都用**那一刻**的钥匙。
#
# 速度怎么评：测试的时钟从外面看，连续启动你返回的这张图许多次，最后等一次 GPU，算每个请求端到端的时间；基线是 `slow_request`。
# 要求快到 2.5 倍；参考实现在这台机器上快得不多时，门槛降到它的加速比的一半，但不低于 1.2 倍。

# %% [markdown]
# <details><summary>提示一：想一想</summary>
#
# 钥匙从哪里来？GPU 算的。用在哪里？GPU 上。那它为什么要到 CPU 走一趟？
# 传值的参数在捕获那一刻就抄进了图；什么样的参数，重放的时候才去读？
#
# </details>
# <details><summary>提示二：用到的 API</summary>
#
# 给定的 `mix(x, key, step, n)` 按值拿钥匙。照着它的源码 `MIX` 写一个 `cp.RawKernel`，不要 `key` 参数，改成读 `x[n]`：所有的 `mix` 做完，`fold` 才改钥匙，所以中途它不变。
# 新内核的第一次启动要编译、加载代码，别把它留到捕获里：先对一个**别的**小数组启动一次，再 `stream.synchronize()`。
# `with stream: stream.begin_capture() … graph = stream.end_capture()`，`end_capture` 放进 `finally`。
#
# </details>

# %% solution="capture_request" tags=["gpu"]
def capture_request(x):
    """Capture one request on x (cupy uint32 (n + 1,): data, then the key) on `stream`; returns the cupy.cuda.Graph.

    Each launch does what slow_request(x) does, with the key that is in x[n] then. x itself is left as it was.
    """
    ### BEGIN SOLUTION: 让内核自己去 x[n] 读钥匙，CPU 就不用再读；STEPS 个搅拌和一个 fold 录成一张图
    kernel = cp.RawKernel(
        r"""
        extern "C" __global__ void mix_at(unsigned* x, unsigned step, int n) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i >= n) return;
            unsigned v = x[i];
            v ^= v >> 15; v *= 0x2c1b3c6du; v ^= x[n] + step * 0x9e3779b9u; v ^= v >> 12; v += (unsigned)i;
            x[i] = v;
        }
        """,
        "mix_at",
    )
    n = x.size - 1
    with stream:
        kernel((1,), (THREADS,), (cp.zeros(THREADS + 1, cp.uint32), np.uint32(0), np.int32(THREADS)))  # loads its code
        stream.synchronize()
        stream.begin_capture()
        try:
            for step in range(STEPS):
                kernel(blocks(n), (THREADS,), (x, np.uint32(step), np.int32(n)))
            fold(blocks(n), (THREADS,), (x, np.int32(n)))
        finally:
            graph = stream.end_capture()
    return graph
    ### END SOLUTION


# %% test="capture_request" kind="structure" points=1 tags=["gpu"]
def after(x, requests):
    """What so many requests make of x, by NumPy."""
    data, key = x[:-1].copy(), x[-1:].copy()
    where = np.arange(data.size, dtype=np.uint32)
    for _ in range(requests):
        for step in range(8):
            data ^= data >> np.uint32(15)
            data *= np.uint32(0x2C1B3C6D)
            data ^= key + np.uint32(step * 0x9E3779B9 & 0xFFFFFFFF)
            data ^= data >> np.uint32(12)
            data += where
        key += (data * (2 * where + np.uint32(1))).sum(dtype=np.uint32)
    return np.concatenate([data, key])


fresh = np.arange(1025, dtype=np.uint32)
lent = on_gpu(fresh)
replay = student.capture_request(lent)
check.equal(lent.read(), fresh, why="捕获不该改动 x：为了加载代码而启动的那一次，用的是别的数组吗？")
check.nodes(replay, kernels=9, total=9, why="图里应当正好有 STEPS + 1 = 9 个内核节点，没有别的。")
replay.run(1)
check.equal(lent.read(), after(fresh, 1), why="重放一次，和一次 slow_request 的结果不同：钥匙是从 x[n] 读的吗？内核里的每一步都照抄了吗？")
replay.run(2)
check.equal(lent.read(), after(fresh, 3), why="重放第二、第三次以后结果不同：钥匙是捕获那一刻的，还是重放那一刻的？")
### BEGIN HIDDEN TESTS
for n in (int(secret.integers(2, 256)), 256, int(secret.integers(257, 5000))):
    fresh = secret.integers(0, 2**32, n + 1, dtype=np.uint32)
    lent = on_gpu(fresh)
    replay = student.capture_request(lent)
    check.nodes(replay, kernels=9, total=9, why="换了大小以后，图里不是正好 STEPS + 1 = 9 个内核节点了。")
    captured_graph = replay.instantiate()  # by the examiner: what works is what was counted
    times = int(secret.integers(2, 6))
    captured_graph.run(times)
    check.equal(lent.read(), after(fresh, times), why="换了大小和数据以后，重放的结果不同。线程数不是 THREADS 的整数倍时，多出来的线程要停下。")
    fresh = secret.integers(0, 2**32, n + 1, dtype=np.uint32)
    lent.write(fresh)
    replay.run(1)
    check.equal(lent.read(), after(fresh, 1), why="x 被就地改写以后，重放用的还是旧的数据或旧的钥匙。")
    captured_graph.run(2)
    check.equal(lent.read(), after(fresh, 3), why="考官启动返回的那张图，结果不对：一个请求的全部工作都要在这张图里。")
### END HIDDEN TESTS

# %% test="capture_request_speed" kind="speedup" points=2 tags=["gpu"]
fresh = secret.integers(0, 2**32, 2049, dtype=np.uint32)
mine, baseline, yardstick = on_gpu(fresh), on_gpu(fresh), on_gpu(fresh)
quick, model = student.capture_request(mine), reference.capture_request(yardstick)
check.nodes(quick, kernels=9, total=9, why="图里应当正好有 STEPS + 1 = 9 个内核节点，没有别的。")
check.speedup(
    quick.instantiate(),
    over=partial(reference.slow_request, baseline),
    best=model,
    state=(mine, yardstick),
    at_least=2.5,
    why="还不够快：每个请求应当只有一次图启动，CPU 不读钥匙，也不等。",
)
### BEGIN HIDDEN TESTS
fresh, turns = secret.integers(0, 2**32, 2049, dtype=np.uint32), int(secret.integers(3, 30))
mine.write(fresh)
yardstick.write(fresh)
quick.run(turns)
model.run(turns)
check.equal(mine.read(), yardstick.read(), why="量完速度以后，再换一份数据重放几次，结果不对：每次重放都要用那一刻的数据和钥匙。")
### END HIDDEN TESTS

# %% [markdown]
# ## 小结
#
# | 以前的说法 | 实验以后的说法 |
# |:--|:--|
# | 同步占了九成时间，去掉它就快 | CPU 等着忙碌的 GPU，是应该的；看 GPU 闲不闲 |
# | 区间多长，里面的工作就花了多长 | 区间量的是 CPU；GPU 上的账按 `correlationId` 投影过去 |
# | 数一数名字里有 Launch 的调用 | 捕获中的启动不引出内核，一次图启动引出几十个：从内核往回数 |
# | 内核时间加起来，就是 GPU 忙的时间 | 会重叠：要并集 |
# | 有空隙，所以要用 CUDA 图 | 先看闲的时候 CPU 在哪个区间：入队才归图管，解码、拷贝、重新捕获各有各的治法 |
# | 时间线上没有，就是没做 | 可能只是没录到：图的粒度、NVTX 的版本，录完先查行数 |
#
# **带走三句话**
#
# 1. 一个问题问到底：GPU 闲着的时候，CPU 在做什么？
# 2. 给每段代码起名字：平时几乎不花时间，出了问题才知道怪谁。
# 3. 时间线看结构，关掉工具再看时间。
#
# 下一步：《图内剖析》给图里的每个节点算账，并量出追踪本身的代价；《图何时无用》先预测、再测量。
