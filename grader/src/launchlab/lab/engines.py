"""What notebooks with TensorRT lean on: a log that is kept, the progress of a build, and a timing cache that stays.

The building itself stands in the notebooks. TensorRT is imported on first use only.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from launchlab.paths import timing_cache_of

KEPT = 20
_errors: deque[str] = deque(maxlen=KEPT)


@cache
def trt_logger():
    """The one `tensorrt.ILogger` of this process: prints errors in one line each, and keeps them for `trt_errors`.

    One for all, because TensorRT uses the first that it was given for everything that belongs to no object.
    """
    import tensorrt as trt

    class Log(trt.ILogger):
        def __init__(self):
            trt.ILogger.__init__(self)  # not super(): the bindings ask for it

        def log(self, severity, message):
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                _errors.append(message)
                print(f"TensorRT 报告错误：{message[:400]}")

    return Log()


def trt_errors() -> list[str]:
    """The last errors that TensorRT reported to `trt_logger`, oldest first, and none twice: reading takes them away."""
    found = list(_errors)
    _errors.clear()
    return found


def build_progress():
    """An `IProgressMonitor` for ``config.progress_monitor``: one line in the notebook that follows the build's phases."""
    import tensorrt as trt

    class Progress(trt.IProgressMonitor):
        def __init__(self):
            trt.IProgressMonitor.__init__(self)
            self._line = _Line()
            self._steps: dict[str, tuple[int, int]] = {}

        def phase_start(self, phase_name, parent_phase, num_steps):
            self._steps[phase_name] = (0, num_steps)
            self._show()

        def step_complete(self, phase_name, step):
            done, of = self._steps.get(phase_name, (0, 0))
            self._steps[phase_name] = (max(done, step + 1), of)
            self._show()
            return True  # go on

        def phase_finish(self, phase_name):
            self._steps.pop(phase_name, None)
            self._show()

        def _show(self):
            self._line.show(" › ".join(f"{name} {done}/{of}" for name, (done, of) in self._steps.items()))

    return Progress()


class _Line:
    """One line of output, written over at most a few times a second; at the end the seconds that passed."""

    def __init__(self):
        self._began, self._last, self._handle = time.perf_counter(), 0.0, None

    def show(self, text: str) -> None:
        now = time.perf_counter()
        if text and now - self._last < 0.25:
            return
        self._last = now
        line = f"构建中：{text}" if text else f"构建完成，用时 {now - self._began:.1f} 秒"
        if self._handle is None:
            self._handle = _display(line)
        elif self._handle:
            self._handle.update(_Text(line))


class _Text:
    """A line that IPython shows as it is, without quotes."""

    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _display(line: str):
    """Show a line that can be updated; False outside of a notebook, where the line is printed once."""
    from IPython import display, get_ipython

    if get_ipython() is None:
        print(line)
        return False
    return display.display(_Text(line), display_id=True)


@contextlib.contextmanager
def timing_cache(config) -> Iterator[None]:
    """Build with the timings that earlier builds on this GPU left, and keep those of this one.

    config: an `IBuilderConfig`; the builds stand within the ``with``. The cache lies in the user's own cache folder, a
    file for each version of TensorRT and each GPU. One that is broken or foreign is left alone, and written anew.
    """
    import tensorrt as trt

    from launchlab.device import gpu

    name = "".join(c if c.isalnum() else "-" for c in f"{trt.__version__} {gpu().name}")
    path = timing_cache_of(Path.home()) / f"{name}.cache"
    try:
        known = path.read_bytes()
    except OSError:
        known = b""
    cache = config.create_timing_cache(known)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)
    yield
    with contextlib.suppress(OSError):  # a full disk costs the next build its time, not this one its result
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(bytes(config.get_timing_cache().serialize()))
        fresh.replace(path)
