"""The course's plot style, with a font that has Simplified Chinese glyphs."""

from functools import cache

FAMILIES = ("Noto Sans SC", "DejaVu Sans")  # as in the style: what one lacks, the next draws

ONE_DECADE = 10  # within less than it, more than 1, 2 and 5
MANY_DECADES = 300  # from where on 2 and 5 of each would be too much


def plot_style() -> None:
    """Switch matplotlib to the course's style. Call once, before the first figure of a notebook."""
    # Imported here: the exam runs given cells, and they need no plots.
    from matplotlib import style

    add_font()
    style.use("launchlab.lab.launchlab")


def log_ticks(axis) -> None:
    """Plain numbers on a logarithmic axis (`matplotlib.axis.Axis`): 1, 2 and 5 of each decade, more within one; of many decades the first alone.

    Call it when everything is drawn. What matplotlib writes by itself on less than a decade, 3 × 10², runs together.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs = (1, 1.5, 2, 3, 5, 7) if high < ONE_DECADE * low else (1, 2, 5) if high < MANY_DECADES * low else (1,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


@cache
def add_font() -> None:
    """Make the font known to matplotlib, once in a process: each time costs reading it, and an entry more in its list."""
    from matplotlib import font_manager
    from pylopdf_fonts_zh_cn import sans_path

    font_manager.fontManager.addfont(str(sans_path()))
