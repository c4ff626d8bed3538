"""The reading edition: built by the real command from three recorded chapters and a planned one, and read in a browser where there is one."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin

from launchlab import manifest, paths
from launchlab.site.extension import Bigrams, mathml

CHOSEN, PLANNED = ("01_introduction", "02_execution_model", "03_cuda_graph_concepts"), "99_planned"
STALE = "02_execution_model"  # changed after it was recorded
HIDDEN = re.compile(r"### BEGIN HIDDEN TESTS\n(.*?)### END HIDDEN TESTS", re.DOTALL)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """What a page loads (scripts, styles, images, frames), what it links to, its ids, and its text."""

    def __init__(self, path: Path):
        super().__init__()
        self.loads, self.links, self.ids, self.words = [], [], set(), []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id"))
        if tag == "a":
            self.links += [given["href"]] if "href" in given else []
        elif tag == "link" and given["rel"] not in ("stylesheet", "icon", "preload"):
            self.links.append(given["href"])
        else:
            self.loads += [given[name] for name in ("src", "srcset", "href", "data", "poster") if given.get(name)]

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site of a small course, built by the command."""
    root = tmp_path_factory.mktemp("course")
    head, *blocks = (paths.GRADER / "chapters.toml").read_text(encoding="utf-8").split("[[chapters]]\n")
    blocks = [block for block in blocks if int(re.search(r"number = (\d+)", block)[1]) <= len(CHOSEN)]
    blocks.append('number = 99\nslug = "planned"\ntitle = "以后再写"\nmodule = "tuning"\nminutes = 60\npoints = 10\nneeds = {}\nprerequisites = ["03_cuda_graph_concepts"]\nready = false\n')
    grader = root / "grader"
    grader.mkdir()
    (grader / "chapters.toml").write_text("[[chapters]]\n".join([head, *blocks]), encoding="utf-8")
    (root / "solutions").mkdir()
    for name in CHOSEN:
        if name != STALE:
            (root / "solutions" / name).symlink_to(paths.SOLUTIONS / name)
    shutil.copytree(paths.SOLUTIONS / STALE, root / "solutions" / STALE)
    with open(root / "solutions" / STALE / f"{STALE}.py", "a", encoding="utf-8") as source:
        source.write("\n# %%\nadded = \"since the recording\"\n")
    for name in ("receipts", "PLATFORMS.md"):
        (grader / name).symlink_to(paths.GRADER / name)
    environment = {**os.environ, "LAUNCHLAB_ROOT": str(root), "LAUNCHLAB_BUILD": str(root / "build")}
    # Nothing may be downloaded: a proxy that nobody answers for.
    environment |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    ended = subprocess.run([sys.executable, "-m", "launchlab", "site"], env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "index.html" in ended.stdout
    return root / "build" / "site"


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Page]:
    return {path.relative_to(site).as_posix(): Page(path) for path in sorted(site.rglob("*.html"))}


def test_the_whole_course_makes_a_site_without_a_warning(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "launchlab", "site"], env=os.environ | {"LAUNCHLAB_BUILD": str(tmp_path)}, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for chapter in manifest.chapters():
        assert chapter.title in (tmp_path / "site" / chapter.name / "solution.html").read_text(encoding="utf-8")


def test_each_chapter_has_its_two_pages_and_a_planned_one_says_so(pages):
    for name in CHOSEN:
        solution, release = pages[f"{name}/solution.html"], pages[f"{name}/release.html"]
        assert "release.html" in solution.links and "solution.html" in release.links
        assert manifest.chapter(name).title in "".join(solution.words)
    assert "以后再写（计划中）" in "".join(pages[f"{PLANNED}.html"].words)
    for page in pages.values():
        assert any(link.endswith(f"{PLANNED}.html") for link in page.links) or page is pages[f"{PLANNED}.html"]


def test_chapters_are_read_one_after_the_other(pages):
    for kind in ("solution", "release"):
        for before, after in pairwise(CHOSEN):
            assert f"../{after}/{kind}.html" in pages[f"{before}/{kind}.html"].links
            assert f"../{before}/{kind}.html" in pages[f"{after}/{kind}.html"].links


def test_each_page_names_gpu_driver_and_date_of_its_figures(pages):
    for name in CHOSEN:
        proof = json.loads(manifest.chapter(name).receipt.read_text(encoding="utf-8"))
        for kind in ("solution", "release"):
            text = "".join(pages[f"{name}/{kind}.html"].words)
            for fact in (proof["gpu"], f"驱动 {proof['driver']}", proof["recorded_at"][:10]):
                assert fact in text, f"{name}/{kind}: {fact}"


def test_a_page_says_where_its_outputs_are_older_than_its_source(pages):
    for name in CHOSEN:
        assert ("还没有重新录制" in pages[f"{name}/solution.html"].text) == (name == STALE)


def test_nothing_is_loaded_from_elsewhere(site, pages):
    for name, page in pages.items():
        for address in page.loads:
            assert not urlsplit(address).netloc and urlsplit(address).scheme in ("", "data"), f"{name}: {address}"
    for path in [*site.rglob("*.css"), *site.rglob("*.js")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"url\(\s*[\"']?(https?:)?//|@import|import\(|importScripts|(fetch\(|src *=|open\() *[\"'`](https?:)?//", text), path


def test_every_link_within_the_site_leads_somewhere(site, pages):
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = os.path.normpath(os.path.join(os.path.dirname(name), parts.path)) if parts.path else name
            assert (site / target).is_file(), f"{name}: {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].ids, f"{name}: {link}"


def test_hidden_tests_and_notes_for_instructors_are_not_shown(site):
    published = [path.read_text(encoding="utf-8") for pattern in ("*.html", "*.js", "*.ipynb", "*.txt") for path in site.rglob(pattern)]
    text = re.sub(r"<[^>]+>", "", "\n".join(published)).replace("&quot;", '"').replace("&#39;", "'").replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    secrets, notes = [], []
    for name in CHOSEN:
        cells = nbformat.read(manifest.chapter(name).solution, as_version=4).cells
        visible = HIDDEN.sub("", "\n".join(cell.source for cell in cells))
        for cell in cells:
            secrets += [line.strip() for part in HIDDEN.findall(cell.source) for line in part.splitlines() if len(line.strip()) > 40 and line.strip() not in visible]
            if "instructor" in cell.metadata.get("tags", []):
                notes += [line for line in cell.source.splitlines() if len(line) > 15]
    assert len(secrets) > 30 and notes
    assert not [line for line in secrets + notes if line in text]
    assert "HIDDEN TESTS" not in text and "BEGIN SOLUTION" not in text


def test_a_release_shows_what_a_learner_gets_and_a_solution_what_was_recorded(pages):
    solution, release = pages["03_cuda_graph_concepts/solution.html"], pages["03_cuda_graph_concepts/release.html"]
    assert "NotImplementedError" in "".join(release.words) and "NotImplementedError" not in "".join(solution.words)
    assert solution.text.count("<img") >= 3 and "<img" not in release.text
    assert "录制时的封闭考试：通过，3 / 3 分" in "".join(solution.words)
    assert "加速比的可信下界" in "".join(solution.words)
    assert solution.text.count("<details>") == solution.text.count("<summary>") >= 6
    assert "<math" in solution.text
    assert "图记住了什么-没记住什么" in solution.ids


def index(site: Path) -> dict:
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    return json.loads(text[text.index("(") + 1 : text.rindex(")")])


def test_the_search_index_finds_chinese(site):
    found = index(site)
    for query, wanted in {"捕获": "03_cuda_graph_concepts/solution", "启动开销": "01_introduction/solution", "cudaStreamBeginCapture": "03_cuda_graph_concepts/solution"}.items():
        terms = [term for term in Bigrams({}).split(query.lower()) if len(term) > 1]
        sets = [pages_with(found["terms"], term) | pages_with(found["titleterms"], term) for term in terms]
        assert wanted in {found["docnames"][number] for number in set.intersection(*sets)}, query
    # The prose stands on both pages of a chapter; one of them is enough.
    indexed = set().union(*(pages_with(found["terms"], term) for term in found["terms"]))
    assert {found["docnames"][number].rpartition("/")[2] for number in indexed} >= {"solution", "index"}
    assert not [found["docnames"][number] for number in indexed if found["docnames"][number].endswith("/release")]
    assert (site / "searchindex.js").stat().st_size < 2_000_000


def pages_with(terms: dict, term: str) -> set[int]:
    found = terms.get(term, [])
    return set(found) if isinstance(found, list) else {found}


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("流捕获", ["流", "捕", "获", "流捕", "捕获"]),
        ("用 cp.cuda.Graph 捕获", ["用", "cp", "cuda", "Graph", "捕", "获", "捕获"]),
        ("N=64个内核", ["N", "64", "个", "内", "核", "个内", "内核"]),
        ("", []),
    ],
)
def test_text_is_cut_into_terms(text, terms):
    assert Bigrams({}).split(text) == terms


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_it_is_read_and_searched_from_the_disk(site):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        try:
            for scheme, width in (("light", 1440), ("dark", 390)):
                page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
                asked = []
                page.on("request", lambda request, asked=asked: asked.append(request.url))
                for name in ("index.html", "03_cuda_graph_concepts/solution.html", "03_cuda_graph_concepts/release.html"):
                    page.goto((site / name).as_uri())
                    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                    assert wide <= 0, f"{name} is {wide} px too wide at {width} px"
                page.goto((site / "03_cuda_graph_concepts" / "solution.html").as_uri())
                hint = page.locator("details").first
                assert not hint.locator("p").first.is_visible()
                hint.locator("summary").click()
                assert hint.locator("p").first.is_visible()
                colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (sum(map(int, re.findall(r"\d+", colour)[:3])) < 300) == (scheme == "dark"), colour
                for query, wanted in (("流捕获", "CUDA 图优化概念"), ("没有这个词组", None), ("Stream捕获", "CUDA 图优化概念")):
                    page.goto((site / "search.html").as_uri() + f"?q={query}")
                    page.wait_for_function("document.querySelector('#search-results p.search-summary')?.innerText.match(/\\d|没有|未/)")
                    titles = page.locator("#search-results li a").all_inner_texts()
                    assert (wanted in titles) if wanted else not titles, (query, titles)
                assert all(url.startswith(("file:", "data:")) for url in asked), asked
        finally:
            browser.close()


def test_every_formula_of_the_course_is_understood():
    reader = MarkdownIt().use(dollarmath_plugin)
    formulas = set()
    for chapter in manifest.chapters():
        if chapter.ready:
            for cell in nbformat.read(chapter.solution, as_version=4).cells:
                texts = [cell.source] if cell.cell_type == "markdown" else [output.data.get("text/markdown", "") for output in cell.outputs if "data" in output]
                for token in reader.parse("\n\n".join(texts)):
                    formulas |= {each.content for each in (token, *(token.children or ())) if each.type.startswith("math_")}
    assert len(formulas) > 50
    for formula in formulas:
        assert "\\" not in mathml(formula, "inline"), formula
