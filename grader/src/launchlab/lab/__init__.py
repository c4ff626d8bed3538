"""What the chapters' notebooks import: `from launchlab import lab`.

Nothing here captures, instantiates or launches anything: those calls stand in the notebooks. Importing this
package needs neither a GPU nor matplotlib.
"""

from .cuda_errors import CudaError, check_cuda
from .drawing import draw_graph
from .machine import gpu_name, here
from .measuring import Comparison, Samples, compare_us, end_to_end_us, submit_us
from .plotting import plot_style
from .prose import say, table

__all__ = [
    "Comparison",
    "CudaError",
    "Samples",
    "check_cuda",
    "compare_us",
    "draw_graph",
    "end_to_end_us",
    "gpu_name",
    "here",
    "plot_style",
    "say",
    "submit_us",
    "table",
]
