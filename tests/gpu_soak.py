"""A thousand mixed requests through the reference solutions of chapters 18, 20, 21 and 24: nothing wrong, memory flat.

usage: PYTHONPATH=grader/src python3 tests/gpu_soak.py OUT.json [--seconds 150] [CHAPTER …]

Each chapter's solution runs in a process of its own: its cells but for experiments and tests, then `soak_traffic`. OUT.json is
written anew after each chapter. Exit code 0 if all is as claimed, 1 if not, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import nbformat
from soak_traffic import CHAPTERS, EVERY, REQUESTS, WARM, Traffic

from launchlab.device import gpu
from launchlab.exam.report import versions
from launchlab.manifest import chapter
from launchlab.paths import BUILD, timing_cache_of

# Device memory is flat if never, after the warm-up, more than this is missing of what was free then. The driver deals in
# pages of 2 MiB, CuPy's pool keeps the largest mixture of blocks so far, and the neighbours hold up to 1 MiB: eight pages.
# Contexts or graphs that stayed behind would take far more: a context of chapter 18 holds 4 KiB a row of its largest shape
# and is thrown away a hundred times and more, a reader of chapter 24 holds 4.5 MiB a bucket and 6 MiB of buffers, ten times.
SLACK = 16 << 20
PATIENCE = 20.0  # seconds beyond its time that a chapter's process gets to end
LEAST = {"18_graph_per_shape": ("hits", "captures", "evictions", "fallbacks"), "20_multi_stream": ("pooled", "ensembles"), "21_context_memory": ("captures", "evictions"), "24_ocr_pipeline": ("pictures",)}  # fmt: skip


def problems(record: dict) -> list[str]:
    """What a record does not show, though it is to; [] if it shows a thousand right answers a chapter and flat memory."""
    found = [f"no {key}" for key in ("gpu", "driver", "date", "versions") if not record.get(key)]
    found += [f"{name}: no record" for name in CHAPTERS if name not in record.get("chapters", {})]
    for name, told in record.get("chapters", {}).items():
        if "error" in told:
            found.append(f"{name}: {told['error']}")
            continue
        if told["requests"] < REQUESTS:
            found.append(f"{name}: only {told['requests']} requests")
        if told["wrong"] or told["faults"]:
            found.append(f"{name}: {told['wrong']} wrong: {'; '.join(told['faults'])}")
        found += [f"{name}: no {count}" for count in (*LEAST[name], "renewed", "neighbours") if not told["counts"].get(count)]
        free = [sample["free"] for sample in told["memory"]]
        hundreds = [sample["served"] // EVERY for sample in told["memory"]]
        if hundreds != list(range(WARM // EVERY, REQUESTS // EVERY + 1)):
            found.append(f"{name}: memory was looked at after {[sample['served'] for sample in told['memory']]} requests")
        elif told["grown"] != free[0] - min(free):
            found.append(f"{name}: grown is {told['grown']}, its samples say {free[0] - min(free)}")
        elif told["grown"] > SLACK:
            found.append(f"{name}: {told['grown'] / 2**20:.1f} MiB more in use than after {WARM} requests")
    return found


def soak(name: str, seconds: float) -> dict:
    """Send a chapter's requests from this process; what came of it."""
    which, began = chapter(name), time.monotonic()
    os.chdir(which.solution.parent)
    namespace: dict = {"__name__": "__main__"}
    for cell in nbformat.read(which.solution, as_version=4).cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "code" and "demo" not in tags and not cell.metadata.get("nbgrader", {}).get("grade"):
            exec(compile(cell.source, f"<{name}: {cell.id}>", "exec"), namespace)
    prepared = time.monotonic()
    traffic = Traffic(REQUESTS, seconds - (prepared - began))
    counts = CHAPTERS[name](namespace, traffic)
    traffic.leave()
    free = [sample["free"] for sample in traffic.memory]
    return {
        "requests": traffic.served, "wrong": traffic.wrong, "faults": traffic.faults, "counts": {**counts, **traffic.counts},
        "memory": traffic.memory, "grown": free[0] - min(free) if free else None,
        "seconds": {"cells": round(prepared - began, 1), "requests": round(time.monotonic() - prepared, 1)},
    }  # fmt: skip


def child(name: str, out: Path, seconds: float) -> int:
    """The process of one chapter: writes what came of it, or why nothing did."""
    try:
        told = soak(name, seconds)
    except Exception as error:  # noqa: BLE001 - whatever a chapter does is part of the record
        traceback.print_exc()
        told = {"error": f"{type(error).__name__}: {error}"[:500]}
    out.write_text(json.dumps(told), encoding="utf-8")
    return 0


def in_child(name: str, seconds: float) -> dict:
    """Let a process of its own soak the chapter, with the compiled kernels and timings that exams keep, and keep its own."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        home, out = Path(folder, "home"), Path(folder, "told.json")
        caches = {BUILD / "cupy": Path(folder, "cupy"), BUILD / "timing": timing_cache_of(home)}
        for kept, own in caches.items():
            if kept.is_dir():
                shutil.copytree(kept, own)
            own.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "HOME": str(home), "CUPY_CACHE_DIR": str(caches[BUILD / "cupy"]), "MPLBACKEND": "Agg"}
        command = [sys.executable, __file__, str(out), name, "--within", "--seconds", str(seconds)]
        try:
            code = subprocess.run(command, env=environment, timeout=seconds + PATIENCE, check=False).returncode
        except subprocess.TimeoutExpired:
            code = "no end"
        for kept, own in caches.items():
            shutil.copytree(own, kept, dirs_exist_ok=True)
        return json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"error": f"the process ended with {code}"}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("names", nargs="*", choices=[[], *CHAPTERS])
    arguments.add_argument("--seconds", type=float, default=150.0, help="send no further request after so long")
    arguments.add_argument("--within", action="store_true", help="soak the one chapter in this very process")
    chosen = arguments.parse_args()
    if gpu() is None:
        print("not run: needs a GPU")
        return 3
    if chosen.within:
        return child(chosen.names[0], chosen.out.resolve(), chosen.seconds)
    began = time.monotonic()
    found = versions()
    for name in chapter("24_ocr_pipeline").needs.packages:
        with contextlib.suppress(metadata.PackageNotFoundError):  # a package may be on the path without having been installed
            found[name] = metadata.version(name)
    record = {
        "gpu": gpu().name, "driver": gpu().driver, "date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": found,
        "requests": REQUESTS, "slack": SLACK, "chapters": {},
    }  # fmt: skip
    for name in chosen.names or CHAPTERS:
        left = chosen.seconds - (time.monotonic() - began)
        if left <= 0:
            print(f"{name}: not reached", flush=True)
            continue
        told = record["chapters"][name] = in_child(name, left)
        record["seconds"] = round(time.monotonic() - began, 1)
        chosen.out.write_text(json.dumps(record, ensure_ascii=False, indent=1), encoding="utf-8")
        words = (
            told.get("error")
            or f"{told['requests']} requests, {told['wrong']} wrong, {(told['grown'] or 0) / 2**20:.1f} MiB, {told['seconds']}, {told['counts']}"
        )
        print(f"{record['seconds']:6.1f} s  {name}: {words}", flush=True)
    wrong = problems(record)
    print("\n".join(wrong) or f"all as claimed, in {record['seconds']} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
