"""The checks of a test cell. Each leaves a record from which its verdict can be recomputed.

The first failing check decides; points are given on positive proof only. Texts are for the
learner: what happened, why, what to try, and never a hidden input.
"""

from __future__ import annotations

import builtins
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np

from launchlab.exam import judge, timing
from launchlab.exam.agent import NotAGraph
from launchlab.exam.compare import difference, word
from launchlab.exam.memory import Buffer, CudaError
from launchlab.exam.party import PartyError, PartyLost
from launchlab.exam.remote import Handle
from launchlab.exam.wire import WireError

NODE_KINDS = {
    "kernels": "Kernel", "memcpys": "Memcpy", "memsets": "Memset", "hosts": "Host", "children": "Graph", "empties": "Empty",
    "allocs": "MemAlloc", "frees": "MemFree", "conditionals": "Conditional", "waits": "WaitEvent", "records": "EventRecord",
}
NODE_WORDS = {
    "kernels": "内核节点", "memcpys": "拷贝节点", "memsets": "memset 节点", "hosts": "主机函数节点", "children": "子图节点", "empties": "空节点",
    "allocs": "分配节点", "frees": "释放节点", "conditionals": "条件节点", "waits": "事件等待节点", "records": "事件记录节点", "total": "节点", "edges": "边",
}


class CheckFailed(AssertionError):
    """A check did not hold; the text (Chinese) tells the learner why and what to try.

    ``why``: the author's words. ``detail``: what was found, which may hold hidden inputs, or words that a learner's
    process put there to carry them out: ``guarded`` is what of it may be told where the inputs are hidden.
    """

    def __init__(self, why: str, detail: str = "", guarded: str | None = None):
        super().__init__(why + detail)
        self.guarded = why + (re.sub(r"[0-9]+", "…", detail) if guarded is None else guarded)

    def _render_traceback_(self) -> list[str]:
        # IPython asks for this: in a notebook the reason helps, the examiner's frames don't.
        return [f"✗ 没有通过：{self}"]


class CannotTell(CheckFailed):
    """Measured again and again, and still too noisy to judge. Never counted as 0."""


@contextmanager
def alone_on(gpu: str) -> Iterator[None]:
    """Hold the lock of a GPU (see `launchlab.exam.timing.exclusive`); CannotTell where it is not to be had."""
    with ExitStack() as held:
        try:
            held.enter_context(timing.exclusive(gpu))
        except timing.GpuBusy:
            raise CannotTell("别的计时考试一直占着 GPU，没有轮到。请稍后再评一次。") from None
        yield


class Check:
    """``check`` in a test cell. ``announce`` is called with a line (Chinese) for each check passed.

    ``alone``: entered while something is timed, to have the GPU to oneself. ``ratio``: the median of the ratios that were
    measured last; no method returns it, as a notebook shows what the last line of a cell returns.
    """

    def __init__(self, secret: np.random.Generator, announce: Callable[[str], None] | None = None,
                 alone: Callable[[], AbstractContextManager] = nullcontext):
        self.records: list[dict] = []
        self.ratio: float | None = None
        self._open = announce is not None
        self._unsettled: list[tuple[dict, Any, Any]] = []
        self._secret, self._announce, self._alone = secret, announce or (lambda _: None), alone

    def equal(self, got: Any, want: Any, why: str = "结果和预期不同。", rel: float = 0.0, abs: float = 0.0) -> None:
        """``got`` must equal ``want``: same type or shape and dtype kind, every value within ``abs + rel * |want|``.

        ``got`` may be a `Handle` of an array or a `Buffer`. NaN equals nothing; a bool is no number.
        """
        if isinstance(got, Handle) and isinstance(want, np.ndarray):
            got = got.numpy()
        elif isinstance(got, Buffer):
            got = got.read()
        mismatch, differing, size = difference(got, want, rel, abs)
        self.records.append({"check": "equal", "mismatch": mismatch, "differing": differing, "size": size, "rel": rel, "abs": abs})
        if mismatch:
            raise CheckFailed(why, f"（{mismatch}）")
        if differing:
            raise CheckFailed(why, f"（{size} 个值里有 {differing} 个不对）" if size > 1 else "", "")
        self._announce("结果正确" + (f"（比较了 {size} 个值）" if size > 1 else ""))

    def that(self, condition: Any, why: str) -> None:
        """``condition`` must be the boolean True."""
        holds = isinstance(condition, (bool, np.bool_)) and bool(condition)
        self.records.append({"check": "that", "holds": holds})
        if not holds:
            raise CheckFailed(why)
        self._announce("条件成立")

    def raises(self, error: str, function: Callable, *args: Any, why: str = "", **kwargs: Any) -> None:
        """Calling ``function`` must raise an exception whose class, or a base of it, is named ``error``."""
        try:
            function(*args, **kwargs)
            raised: list[str] = []
        except PartyError as caught:
            raised = caught.info["bases"]
        except (CheckFailed, ImportError, PartyLost, CudaError, WireError):
            raise  # none of them is the code's own refusal
        except Exception as caught:  # noqa: BLE001 - open mode: the learner's own exception
            raised = [base.__name__ for base in type(caught).__mro__]
        self.records.append({"check": "raises", "wanted": error, "raised": raised})
        if error not in raised:
            what = f"实际抛出的是 {raised[0]}" if raised else "实际没有抛出任何异常"
            public = next((name for name in raised if hasattr(builtins, name)), "别的异常")
            guarded = f"实际抛出的是 {public}" if raised else what
            raise CheckFailed(why or f"这里应当抛出 {error}。", f"（{what}）", f"（{guarded}）")
        self._announce(f"如预期抛出 {error}")

    def nodes(self, graph: Any, why: str = "", **counts: int | tuple[int, int | None]) -> None:
        """Numbers of nodes that the driver reports of a captured graph.

        ``counts``: any of kernels, memcpys, memsets, hosts, children, empties, allocs, frees,
        conditionals, waits, records, and total, edges; a number, or (least, most) with None for
        no most, where the number depends on the GPU. Supporting evidence, never the only one.
        """
        try:
            told = graph.party.ask("graph", target=graph) if isinstance(graph, Handle) else None
        except (PartyError, NotAGraph) as error:
            if isinstance(error, PartyError) and error.info["type"] != "NotAGraph":
                raise
            told = None
        if told is None:
            self.records.append({"check": "nodes", "wanted": counts, "found": None})
            raise CheckFailed(why or "这里要一张捕获到的图。", f"（返回的是 {word(graph)}，里面没有图；Stream.end_capture() 返回的才是）")
        kinds = told.get("kinds") if type(told) is dict else None
        kinds, edges = (kinds, told.get("edges")) if type(kinds) is list else ([], [])
        edges = edges if type(edges) is list else []
        found = {name: kinds.count(NODE_KINDS[name]) for name in counts if name in NODE_KINDS}
        found |= {"total": len(kinds), "edges": len(edges)}
        self.records.append({"check": "nodes", "wanted": counts, "found": found})
        wrong = [name for name, count in counts.items() if not judge.counted(found[name], count)]
        if wrong:
            told_text = "，".join(f"{NODE_WORDS.get(name, name)}应有{_many(counts[name])}个，图里有 {found[name]} 个" for name in wrong)
            raise CheckFailed(why or "捕获到的图和要求的不一样。", f"（{told_text}）")
        self._announce("图的结构正确：" + "，".join(f"{NODE_WORDS.get(name, name)} {found[name]} 个" for name in counts))

    def speedup(self, work: Any, *, over: Any, best: Any, state: tuple[Buffer, Buffer], at_least: float,
                why: str = "", ceiling: float | None = judge.TOO_FAST, draw: Callable[[], np.ndarray] | None = None,
                rel: float = 0.0, abs: float = 0.0) -> None:
        """``work`` must be faster than ``over`` by a ratio, end to end. See `launchlab.exam.timing`.

        ``work``, ``over``, ``best``: handles, functions or partials of functions; ``work`` is
        the learner's, ``over`` the examiner's baseline, ``best`` the reference's own solution.
        ``state``: the buffers that ``work`` and ``best`` advance. ``at_least``: the ratio for
        full credit, lowered to half of what ``best`` reaches, never below 1.2. ``ceiling``: how
        many times faster than ``best`` is too good to be the work asked for; None for no limit.
        ``draw``: makes the secret state of each round, of the buffers' shape and dtype; without
        it all bytes are random, which floats rarely bear. ``rel``, ``abs``: how far the two
        states may lie apart, value by value (see `equal`); 0: not at all.
        ``over`` and ``best`` run once more when the test cell is over (see `settle`): what they
        need must outlive it.
        ``ratio`` is the median of the measured ratios afterwards.
        """
        with self._alone():
            record = timing.measure(over, work, best, state, at_least, self._secret, ceiling, draw, (rel, abs))
        self.records.append(record)
        if record["states_differ"]:
            raise CheckFailed("计时的时候，重放之后的数据和应有的不一样：有几次运行没有真正做完全部的工作。请确认每次重放都在同一块缓冲上推进状态，没有缓存旧结果，也没有漏掉同步。")
        ratios, result = judge.measured(record)
        self.ratio = statistics.median(ratios["candidate"])
        self._announce(_passed_on(result, self.ratio, why, f"测了 {len(record['attempts'])} 轮，噪声仍然太大"))
        self._unsettled.append((record, over, best))
        if self._open:
            self.settle()

    def faster(self, seconds: Mapping[str, Sequence[float]], *, at_least: float, why: str = "") -> None:
        """What the examiner timed itself, a few times each: "candidate" must be faster than "baseline" by a ratio.

        ``seconds``: of "baseline", "candidate" and "best" (the reference's own solution), each a list, three or more, of
        which those at one place were measured one right after the other. For work of milliseconds and more, where what
        asking costs does not count; all else is `speedup`'s. ``at_least`` and ``ratio`` as there.
        """
        kept = {name: [float(value) for value in values] for name, values in seconds.items()}
        record = {"check": "faster", "at_least": at_least, "seconds": kept}
        ratios, result = judge.measured(record)
        self.records.append(record)
        self.ratio = statistics.median(ratios["candidate"])
        self._announce(_passed_on(result, self.ratio, why, f"{len(kept['best'])} 次有快有慢，差得太多"))

    def settle(self) -> None:
        """Measure the trusted sides of each speed-up once more. To be called when the learner's process has ended."""
        while self._unsettled:
            record, over, best = self._unsettled.pop()
            with self._alone():
                record["quiet"] = timing.measure_quiet(over, best, record["attempts"][-1])
            if judge.disturbed(record):
                raise CannotTell("测量的时候有别的程序占用了 GPU 或 CPU，拖慢了基准，这次的结果不能算数。请确认没有后台线程和没做完的内核，等机器空闲时再测一次。")

    @property
    def unsettled(self) -> bool:
        """Whether a speed-up waits for `settle`."""
        return bool(self._unsettled)


def _passed_on(result: dict, median: float, why: str, noise: str) -> str:
    """What to announce of a judged speed-up that earned something; CheckFailed or CannotTell, with the reason, otherwise."""
    if result["why"] == "reference":
        raise CannotTell(f"在这块 GPU 上，参考实现自己也只快 {result['best']:.2f} 倍，无法用来评分。请换一块 GPU，或交给教师处理。")
    measured = f"实测 {median:.2f} 倍，可信下界 {result['low']:.2f} 倍；门槛 {result['bar']:.2f} 倍；参考实现 {result['best']:.2f} 倍"
    if result["verdict"] == judge.INCONCLUSIVE:
        raise CannotTell(f"{noise}，无法判断（{measured}）。这不算错：请等机器空闲时再测一次，或交给教师复核。")
    if result["why"] == "too fast":
        raise CheckFailed(f"比参考实现还快一倍以上（{measured}）。按要求的工作量不可能这么快：请检查是不是少启动了内核，或把多个内核合成了一个。")
    if result["verdict"] == judge.FAILED:
        raise CheckFailed(f"{why or '还不够快。请确认重放时只做一次图启动，不要在循环里重新捕获或逐个启动。'}（{measured}）")
    return ("达到要求的加速：" if result["credit"] == 1 else "达到一半的要求，得一半分：") + measured


def _many(count: int | tuple[int, int | None]) -> str:
    if isinstance(count, int):
        return f" {count} "
    least, most = count
    return f"至少 {least} " if most is None else f" {least} 到 {most} "
