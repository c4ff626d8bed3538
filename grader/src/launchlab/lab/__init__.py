"""What the chapters' notebooks import: `from launchlab import lab`.

Nothing here captures, instantiates or launches anything: those calls stand in the notebooks. Importing this
package needs no GPU, no matplotlib and no TensorRT.
"""

from . import models
from .cuda_errors import CudaError, check_cuda
from .drawing import draw_graph
from .engines import build_progress, timing_cache, trt_errors, trt_logger
from .machine import gpu_name, here
from .measuring import Comparison, Samples, compare_us, end_to_end_us, submit_us
from .plotting import log_ticks, plot_style
from .prose import say, table

__all__ = [
    "Comparison",
    "CudaError",
    "Samples",
    "build_progress",
    "check_cuda",
    "compare_us",
    "draw_graph",
    "end_to_end_us",
    "gpu_name",
    "here",
    "log_ticks",
    "models",
    "plot_style",
    "say",
    "submit_us",
    "table",
    "timing_cache",
    "trt_errors",
    "trt_logger",
]
