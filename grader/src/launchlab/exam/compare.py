"""Comparing what came back with what is right: plain values, lists and arrays, exactly or within a tolerance."""

from __future__ import annotations

from typing import Any

import numpy as np


def difference(got: Any, want: Any, rel: float, abs: float) -> tuple[str | None, int, int]:
    """Compare; returns (mismatch in words (Chinese) or None, values that differ, values compared)."""
    if isinstance(want, np.ndarray):
        if not isinstance(got, np.ndarray):
            return f"应是数组，得到的是 {word(got)}", 1, 1
        if got.shape != want.shape:
            return f"形状应是 {want.shape}，得到的是 {got.shape}", 1, 1
        if got.dtype.kind != want.dtype.kind:
            return f"元素类型应是 {want.dtype}，得到的是 {got.dtype}", 1, 1
        return None, int(np.count_nonzero(~near(got, want, rel, abs))), want.size
    if isinstance(want, (list, tuple)):
        if not isinstance(got, (list, tuple)):
            return f"应是列表，得到的是 {word(got)}", 1, 1
        if len(got) != len(want):
            return f"长度应是 {len(want)}，得到的是 {len(got)}", 1, 1
        parts = [difference(g, w, rel, abs) for g, w in zip(got, want, strict=True)]
        return next((p[0] for p in parts if p[0]), None), sum(p[1] for p in parts), max(1, sum(p[2] for p in parts))
    want = want.item() if isinstance(want, np.generic) else want
    got = got.item() if isinstance(got, np.generic) else got
    if isinstance(want, (bool, str)) or want is None:
        if type(got) is not type(want):
            return f"应是 {word(want)}，得到的是 {word(got)}", 1, 1
        return None, int(got != want), 1
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return f"应是数值，得到的是 {word(got)}", 1, 1
    if isinstance(want, int) and not isinstance(got, int) and not (rel or abs):
        return "应是整数，得到的是小数", 1, 1
    if not (rel or abs):
        return None, int(got != want), 1  # Python's own comparison: float64 has no room for large integers
    try:
        return None, int(not near(float(got), float(want), rel, abs)), 1
    except OverflowError:
        return None, 1, 1


def near(got: Any, want: Any, rel: float, abs: float) -> Any:
    """Elementwise: ``|got - want| <= abs + rel * |want|``, or equal where both tolerances are 0. NaN is near nothing."""
    with np.errstate(all="ignore"):
        if not (rel or abs):
            return np.equal(got, want)
        return np.less_equal(np.abs(np.subtract(got, want, dtype=np.float64)), abs + rel * np.abs(want)) | np.equal(got, want)


def word(value: Any) -> str:
    """What kind of value it is, in Chinese."""
    words = {bool: "布尔值", int: "整数", float: "小数", str: "字符串", list: "列表", dict: "字典", np.ndarray: "数组", type(None): "None"}
    return words.get(type(value), "别的对象")  # not its class's name, which a learner chooses and could put anything into
