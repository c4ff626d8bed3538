"""The course's plot style, with a font that has Simplified Chinese glyphs."""

from functools import cache

FAMILIES = ("Noto Sans SC", "DejaVu Sans")  # as in the style: what one lacks, the next draws


def plot_style() -> None:
    """Switch matplotlib to the course's style. Call once, before the first figure of a notebook."""
    # Imported here: the exam runs given cells, and they need no plots.
    from matplotlib import style

    add_font()
    style.use("launchlab.lab.launchlab")


@cache
def add_font() -> None:
    """Make the font known to matplotlib, once in a process: each time costs reading it, and an entry more in its list."""
    from matplotlib import font_manager
    from pylopdf_fonts_zh_cn import sans_path

    font_manager.fontManager.addfont(str(sans_path()))
