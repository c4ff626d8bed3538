"""Without a GPU: one plain line where a cell would fail for lack of it.

A cell that fails this way leaves names undefined, and later cells fail over those; they get the line too.
Cells that grade stay failed, so that no tool can take "not run" for "passed".
"""

import symtable
import traceback
from functools import cache

GPU_PACKAGES = {"cuda", "cupti", "cupy", "cupy_backends", "cupyx", "tensorrt"}
NO_DRIVER_CODES = {3, 35, 100}  # initialisation error, insufficient driver, no device


@cache
def install_notes() -> None:
    """Make the running IPython shell, if any, show the note. Does nothing outside IPython."""
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        return
    notes = _Notes()
    shell.set_custom_exc((Exception,), notes.on_error)
    shell.events.register("post_run_cell", notes.after_cell)


def is_for_lack_of_gpu(error: BaseException | None) -> bool:
    """Tell whether the error, or one that led to it, comes from a missing GPU, driver or CUDA package."""
    while error is not None:
        if isinstance(error, ImportError) and _package(error.name or "") in GPU_PACKAGES:
            return True
        if _package(type(error).__module__) in GPU_PACKAGES or "libcuda" in str(error):
            return True
        if getattr(error, "code", None) in NO_DRIVER_CODES:
            return True
        error = error.__cause__ or error.__context__
    return False


def names_bound_by(source: str) -> set[str]:
    """Return the global names that a cell's source would have bound: assignments, imports, definitions."""
    symbols = symtable.symtable(source, "<cell>", "exec").get_symbols()
    return {s.get_name() for s in symbols if s.is_assigned() or s.is_imported() or s.is_namespace()}


def _package(dotted: str) -> str:
    return dotted.partition(".")[0]


class _Notes:
    def __init__(self):
        self.unbound: set[str] = set()
        self.excused: BaseException | None = None

    def on_error(self, shell, kind, error, trace, tb_offset=None):
        follows = isinstance(error, NameError) and error.name in self.unbound
        if not (follows or is_for_lack_of_gpu(error)):
            shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
            return
        # The parsed history holds the cell as plain Python, with magics transformed.
        self.unbound |= names_bound_by(shell.history_manager.input_hist_parsed[-1])
        if _passed_through_exam(trace):
            # An error as any other, so that nbgrader's Validate has something to show.
            shell._showtraceback(kind, error, ["这个测试单元需要 GPU，这台机器上没有，所以没有运行：不算通过，也不算错。"])
        else:
            print("这个单元需要 GPU，这台机器上没有，所以没有执行。请接着看下一个单元。")
            self.excused = error

    def after_cell(self, result):
        # A cell without an error lets "Run All" go on to the cells that do run here.
        if self.excused is not None and result.error_in_exec is self.excused:
            result.error_in_exec = None
        self.excused = None


def _passed_through_exam(trace) -> bool:
    return any(_is_exam(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(trace))


def _is_exam(module: str) -> bool:
    return module == "launchlab.exam" or module.startswith("launchlab.exam.")
