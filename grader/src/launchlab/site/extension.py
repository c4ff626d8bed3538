"""What the reading edition adds to Sphinx: a search that finds Chinese, formulas without scripts, and links that last."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.search import SearchLanguage

from launchlab.site.pages import RELEASE, read

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"


class Bigrams(SearchLanguage):
    """Chinese has no spaces: each pair of neighbouring characters is a term, and each character for itself.

    A query is cut likewise, in the browser; a page is found when it has all of its pairs. No dictionary is needed, so a
    term of the trade is found as surely as an everyday word.
    """

    lang = "bigrams"
    language_name = "Chinese"
    js_splitter_code = f"""
function splitQuery(query) {{
  const terms = [];
  for (const [run] of query.matchAll(/[{HAN}]+|[\\p{{L}}\\p{{N}}_]+?(?=[{HAN}]|[^\\p{{L}}\\p{{N}}_]|$)/gu)) {{
    if (!/[{HAN}]/.test(run) || run.length === 1) terms.push(run);
    else for (let i = 0; i + 2 <= run.length; i++) terms.push(run.slice(i, i + 2));
  }}
  return terms;
}}
"""
    _run = re.compile(f"[{HAN}]+|[^\\W{HAN}]+")

    def split(self, input: str) -> list[str]:
        """The terms of a text: words of other scripts whole, Chinese as single characters and pairs."""
        terms = []
        for run in self._run.findall(input):
            if re.match(f"[{HAN}]", run):
                terms += [*run, *(run[place : place + 2] for place in range(len(run) - 1))]
            else:
                terms.append(run)
        return terms

    def stem(self, word: str) -> str:
        """As the browser compares: without regard to case."""
        return word.lower()


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the parts; called by Sphinx."""
    app.add_search_language(Bigrams)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("doctree-read", _name_sections, priority=100)  # before Sphinx collects the table of contents
    app.connect("html-page-context", _neighbours)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def mathml(formula: str, display: str) -> str:
    """A formula of TeX as MathML, which browsers draw themselves; ``display``: "inline" or "block"."""
    # Within \text the converter takes an escape for two characters.
    plain = re.sub(r"\\text\{[^{}]*\}", lambda text: re.sub(r"\\([_%#&$])", r"\1", text[0]), formula)
    return convert(plain, display=display)


def _inline(writer: HTML5Translator, node: nodes.math) -> None:
    writer.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def _block(writer: HTML5Translator, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math-wrapper">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def _name_sections(app: Sphinx, document: nodes.document) -> None:
    """Ids of sections made from their titles, Chinese too: a link to one outlives the sections that are added before it."""
    taken: set[str] = set()
    for section in document.findall(nodes.section):
        base = re.sub(r"[^\w]+", "-", section[0].astext().lower()).strip("-") or "section"
        name = next(name for name in (base, *(f"{base}-{number}" for number in range(2, 1000))) if name not in taken)
        taken.add(name)
        section["ids"] = [name]
    for image in document.findall(nodes.image):
        image["alt"] = "录制的图"


def _neighbours(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """A release leads to the releases before and after it; it stands outside the table of contents, which has the solutions."""
    chapters = read()
    place = next((place for place, each in enumerate(chapters) if each.name + RELEASE == page), None)
    if place is None:
        return
    for key, other in (("prev", place - 1), ("next", place + 1)):
        if 0 <= other < len(chapters):
            context[key] = {"link": context["pathto"](chapters[other].name + RELEASE), "title": chapters[other].title}
