"""Where a sealed exam's time goes: seconds of each of its parts, its own without what it calls. Begun from a configuration file."""

from __future__ import annotations

import atexit
import functools
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launchlab.course import gradebook
from launchlab.exam import examine, kernel, process, timing, waiting
from launchlab.grading import intake, sealed

PARTS = {
    "intake of the class": (intake.IntakeExporter, "__init__"),
    "cells into the gradebook": (gradebook, "ensure"),
    "exam, else": (sealed, "examine"),
    "reference: load": (examine.Reference, "load"),
    "reference: caches kept": (examine.Reference, "keep_caches"),
    "process: begin": (kernel.Kernel, "__init__"),
    "process: ready": (kernel.Kernel, "wait_ready"),
    "process: take or make": (waiting.Waiting, "take"),
    "process: cells": (process.Process, "_ran"),
    "process: end": (kernel.Kernel, "close"),
    "test cells": (examine, "_examine_one"),
    "asks": (kernel.Kernel, "ask"),
    "speed-up: rounds": (timing, "measure"),
    "speed-up: quiet rounds": (timing, "measure_quiet"),
}


def begin(out: str) -> None:
    """Count from now on; at the end of the process the seconds are written to ``out``, as JSON."""
    began, seconds, calls = time.perf_counter(), Counter(), Counter()
    inner = [0.0]  # seconds spent in parts that a part called, a level each

    def counted(name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            inner.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                whole = time.perf_counter() - start
                seconds[name] += whole - inner.pop()
                calls[name] += 1
                inner[-1] += whole

        return call

    for name, (owner, attribute) in PARTS.items():
        setattr(owner, attribute, counted(name, getattr(owner, attribute)))

    def write() -> None:
        seconds["nbgrader"] = time.perf_counter() - began - sum(seconds.values())
        found = {name: {"seconds": round(seconds[name], 3), "calls": calls[name]} for name in sorted(seconds, key=seconds.get, reverse=True)}
        Path(out).write_text(json.dumps(found, ensure_ascii=False, indent=1), encoding="utf-8")

    atexit.register(write)
