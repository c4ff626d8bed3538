"""The course's plot style, with a font that has Simplified Chinese glyphs."""


def plot_style() -> None:
    """Switch matplotlib to the course's style. Call once, before the first figure of a notebook."""
    # Imported here: the exam runs given cells, and they need no plots.
    from matplotlib import font_manager, style
    from pylopdf_fonts_zh_cn import sans_path

    font_manager.fontManager.addfont(str(sans_path()))
    style.use("launchlab.lab.launchlab")
