"""`launchlab site`: the reading edition, a static site of all chapters with their recorded outputs, for readers without a GPU.

Sphinx builds it from notebooks that `pages` derives from the repository; nothing is downloaded, neither when it is built nor
when it is read, and it opens from the disk (``file://``) as well as from a server.
"""

from __future__ import annotations

import io
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from launchlab import paths, tools
from launchlab.paths import short


def main() -> int:
    """Build ``build/site`` anew; 0, 1 if Sphinx warned of anything, 2 where its packages are missing."""
    if missing := tools.missing("site"):
        print(f"✗ 没有安装 {'、'.join(missing)}，不能生成网站。{tools.INSTALL}", file=sys.stderr)
        return 2
    source, target = paths.BUILD / "site-source", paths.BUILD / "site"
    for folder in (source, target):
        shutil.rmtree(folder, ignore_errors=True)
    from launchlab.site import pages

    pages.write(source)
    warnings = _build(source, target)
    print(f"{'!' if warnings else '✓'} {short(target / 'index.html')}：用浏览器打开它就能读。要给别人看：python -m http.server -d {short(target)}")
    if warnings:
        print(f"✗ 网站生成了，但是有警告：\n{warnings}", file=sys.stderr)
    return 1 if warnings else 0


def _build(source: Path, target: Path) -> str:
    """Run Sphinx in this process; all that it warned of."""
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    said = io.StringIO()
    with patch_docutils(), docutils_namespace():
        application = Sphinx(source, None, target, source / ".doctrees", "html", confoverrides=_settings(), status=None, warning=said, parallel=2)
        application.build(force_all=True)
    return said.getvalue()


def _settings() -> dict[str, Any]:
    return {
        "extensions": ["myst_nb", "launchlab.site.extension"],
        "project": "CUDA 图优化与 TensorRT 动态形状",
        "language": "zh_CN",
        "locale_dirs": ["locales"],
        "exclude_patterns": [".doctrees"],
        # Notebooks are shown as they were recorded, and read as JupyterLab reads them: Markdown with maths, not MyST.
        "nb_execution_mode": "off",
        "nb_render_markdown_format": "myst",
        "nb_ipywidgets_js": {},
        "myst_enable_extensions": ["dollarmath"],
        "myst_disable_syntax": ["myst_role", "myst_target", "myst_line_comment", "myst_block_break"],
        "highlight_language": "none",
        "html_theme": "furo",
        "html_title": "CUDA 图优化与 TensorRT 动态形状",
        "html_math_renderer": "mathml",
        "html_search_language": "bigrams",
        "html_static_path": [str(files("launchlab.site") / "static")],
        "html_css_files": ["site.css"],
        "html_copy_source": False,
        "html_show_copyright": False,
        "html_use_index": False,
    }
