"""Text that a notebook computes: numbers in prose come from the run, never from the keyboard."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .machine import gpu_name

FIGURES = "application/vnd.launchlab.figures+json"


def say(markdown: str, *, measured: bool = True, figures: Mapping[str, Any] | None = None) -> None:
    """Show Markdown as the cell's output, followed by the GPU that the numbers were measured on.

    measured: False for numbers that were computed or quoted, which owe nothing to this GPU. figures: name → plain data
    that the chapter's receipt is to keep, too; the reader sees only the text. Outside IPython the text is printed.
    """
    name = gpu_name()
    if measured and name:
        markdown = f"{markdown}\n\n<small>实测：{name}</small>"
    from IPython import get_ipython
    from IPython.display import Markdown, display

    if get_ipython() is None:
        print(markdown)
    elif figures is None:
        display(Markdown(markdown))
    else:
        display({"text/markdown": markdown, "text/plain": markdown, FIGURES: dict(figures)}, raw=True)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table for `say`; the first column is aligned left, the others right.

    A row of another length than the header raises ValueError.
    """
    lines = [_line(header), _line([":--"] + ["--:"] * (len(header) - 1))]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"row of {len(row)} cells under a header of {len(header)}: {row!r}")
        lines.append(_line(row))
    return "\n".join(lines)


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
