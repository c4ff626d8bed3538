"""A learner's hour in a real browser: JupyterLab as `./grader/launch lab` opens it, in Chromium.

The course is a copy of chapter 3. What is looked at is kept under `build/screenshots`, for people to look at too.
"""

import io
import json
import os
import re
import shutil
import sys
import time

import lab_server
import nbformat
import pytest
from matplotlib import image
from nbgrader.utils import is_grade
from playwright import sync_api
from pylopdf_fonts_zh_cn import sans_path

from launchlab import paths
from launchlab.course import source
from launchlab.device import has_gpu
from launchlab.manifest import chapter

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
NAME = "03_cuda_graph_concepts"
EXERCISE = "break_even"  # an answer that needs no GPU
PICTURES = paths.BUILD / "screenshots"
SECONDS = 60_000  # ms: a busy machine of two cores
NEEDS_GPU = "需要 GPU"
CELLS = """() => [...jupyterapp.shell.currentWidget.content.model.cells].map(cell => ({
    id: cell.id, type: cell.type, source: cell.sharedModel.getSource(),
    ran: cell.type != 'code' || (cell.executionCount != null && cell.executionState == 'idle'),
    said: cell.type != 'code' ? '' : cell.outputs.toJSON().map(o => [o.text, o.traceback, o.data && o.data['text/plain']].flat(2).filter(Boolean).join('')).join(''),
    failed: cell.type == 'code' && cell.outputs.toJSON().some(o => o.output_type == 'error')}))"""
IDLE = "() => jupyterapp.shell.currentWidget.sessionContext?.session?.kernel?.status == 'idle'"


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course of chapter 3 alone, in which a learner may write."""
    root = tmp_path_factory.mktemp("course")
    for part in ("course", "solutions"):
        shutil.copytree(paths.ROOT / part / NAME, root / part / NAME)
    shutil.copytree(paths.GRADER / "jupyter", root / "grader" / "jupyter")
    for file in ("chapters.toml", "nbgrader_config.py"):
        shutil.copy(paths.GRADER / file, root / "grader")
    (root / "grader" / "launch").symlink_to(paths.GRADER / "launch")
    return root


@pytest.fixture(scope="module")
def page(course, tmp_path_factory):
    """The page that `./grader/launch lab` opens, loaded."""
    if BROWSER is None:
        # CI brings one (.ci/run): there its absence is a failure.
        (pytest.fail if os.environ.get("CI") else pytest.skip)("not run: needs Chromium (apt install chromium)")
    home = tmp_path_factory.mktemp("home")
    (home / ".fonts").mkdir()
    shutil.copy(sans_path(), home / ".fonts")  # a machine of CI has no Chinese font for its browser
    variables = {"LAUNCHLAB_ROOT": str(course), "LAUNCHLAB_PYTHON": sys.executable, "XDG_DATA_HOME": str(home / "data")}
    command = [str(paths.GRADER / "launch"), "lab", "--LabApp.expose_app_in_browser=True"]
    PICTURES.mkdir(parents=True, exist_ok=True)
    with lab_server.running(command, home, **variables) as lab, sync_api.sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=BROWSER, args=options, env={**os.environ, "HOME": str(home)})
        page = browser.new_page(viewport={"width": 1400, "height": 900}, locale="zh-CN")
        page.set_default_timeout(SECONDS)
        page.goto(f"{lab.address}/lab?token=t")
        menu(page, "文件").wait_for()
        try:
            yield page
            look(page, "last")
        finally:
            browser.close()


def look(page, name: str) -> bytes:
    return page.screenshot(path=PICTURES / f"{name}.png")


def menu(page, name: str):
    return page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{name}$"))


def choose(page, *names: str) -> None:
    """Choose an entry of a menu."""
    menu(page, names[0]).click()
    for name in names[1:]:
        page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{re.escape(name)}$")).locator("visible=true").click()


def opened(page, path: str) -> None:
    """Open a notebook by its path and wait for its kernel."""
    page.evaluate("async path => { await jupyterapp.commands.execute('docmanager:open', {path}) }", path)
    page.wait_for_function("path => jupyterapp.shell.currentWidget?.context?.path == path", arg=path)
    page.locator(".jp-NotebookPanel:visible h1").first.wait_for()
    page.wait_for_function(IDLE)


def cells(page) -> dict[str, dict]:
    return {cell["id"]: cell for cell in page.evaluate(CELLS)}


def run_to_the_end(page) -> dict[str, dict]:
    """Run all cells; from behind each one that fails, where JupyterLab stops, all that follow. The cells afterwards."""
    choose(page, "运行", "运行所有单元格")
    for _ in range(40):
        page.wait_for_timeout(300)
        page.wait_for_function(IDLE)
        found = page.evaluate(CELLS)
        waiting = [number for number, cell in enumerate(found) if not cell["ran"]]
        if not waiting:
            return {cell["id"]: cell for cell in found}
        if found[waiting[0] - 1]["failed"] or any(cell["failed"] for cell in found[: waiting[0]]):
            page.evaluate("number => { jupyterapp.shell.currentWidget.content.activeCellIndex = number }", waiting[0])
            choose(page, "运行", "运行选中的单元格及以下所有")
    raise AssertionError(f"cells that never ran: {waiting}")


def code_cell(page, text: str):
    """The cell on the screen whose source holds ``text``."""
    return page.locator(".jp-NotebookPanel:visible .jp-CodeCell", has=page.locator(".jp-InputArea", has_text=text)).first


def answer(page, line: str, text: str) -> str:
    """Type ``text`` into the cell that holds ``line`` and run it and its test, by keyboard alone; what the test says."""
    code_cell(page, line).locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(text)
    solution, test = f"solution-{EXERCISE}", f"test-{EXERCISE}"
    assert cells(page)[solution]["source"] == text
    before = page.evaluate(
        "id => [...jupyterapp.shell.currentWidget.content.model.cells].find(c => c.id == id).executionCount", test
    )
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Shift+Enter")
    page.wait_for_function(
        "([id, before]) => { const c = [...jupyterapp.shell.currentWidget.content.model.cells].find(c => c.id == id);"
        " return c.executionCount > (before || 0) && c.executionState == 'idle' }",
        arg=[test, before],
    )
    return cells(page)[test]["said"]


def test_learner_runs_fails_mends_and_gets_a_verdict(page, course):
    release = nbformat.read(course / "course" / NAME / f"{NAME}.ipynb", as_version=4)
    by_id = {cell.id: cell for cell in release.cells}
    # It opens on the course, in Chinese; a chapter is two double clicks away.
    assert menu(page, "编辑").is_visible() and menu(page, "内核").is_visible()
    page.locator(".jp-DirListing-item", has_text=NAME).dblclick()
    page.locator(".jp-DirListing-item", has_text=f"{NAME}.ipynb").dblclick()
    page.locator(".jp-NotebookPanel:visible h1").first.wait_for()
    page.wait_for_function(IDLE)
    # The table of contents has the chapter's headings.
    page.locator('.lm-TabBar-tab[data-id="table-of-contents"]').click()
    headings = page.locator(".jp-tocItem-heading")
    headings.first.wait_for()
    look(page, "chapter")
    assert headings.first.inner_text().strip() == chapter(NAME).title
    assert headings.filter(has_text="练习").count() >= 4
    # Top to bottom: given cells run or say that they need a GPU; tests fail, since nothing is answered yet.
    ran = run_to_the_end(page)
    graded = {cell.id for cell in release.cells if is_grade(cell)}
    failed = {name for name, cell in ran.items() if cell["failed"]}
    assert graded <= failed
    assert all("NotImplementedError" in ran[name]["said"] for name in failed - graded), "shown what an answer would give"
    if not has_gpu():
        said_so = [cell.id for cell in release.cells if "gpu" in source.tags(cell) and NEEDS_GPU in ran[cell.id]["said"]]
        assert len(said_so) > 10
    # Execution times stand beside the cells.
    assert page.locator(".execute-time").count() > 10
    # To an exercise, and its hints, by keyboard.
    title = next(
        cell.source.splitlines()[0].lstrip("# ")
        for cell in reversed(release.cells[: list(by_id).index(f"solution-{EXERCISE}")])
        if cell.source.startswith("#")
    )
    headings.filter(has_text=title.split("：")[0]).first.click()
    hint = (
        page.locator(".jp-NotebookPanel:visible .jp-MarkdownCell", has=page.locator("summary"))
        .locator("visible=true")
        .filter(has_text=by_hint(release))
        .first
    )
    hint.scroll_into_view_if_needed()
    for summary in hint.locator("summary").all():
        summary.focus()
        page.keyboard.press("Enter")
    assert hint.locator("details[open]").count() == 2
    look(page, "hints")
    # A wrong answer fails and says why, a right one passes.
    stub = by_id[f"solution-{EXERCISE}"].source
    line = stub.splitlines()[0]
    said = answer(page, line, re.sub(r"raise NotImplementedError\(.*\)", "return 1", stub))
    assert "没有通过" in said and len(re.findall(r"[\u4e00-\u9fff]", said)) > 10 and "Traceback" not in said
    look(page, "failed_test")
    solved = next(
        cell.source
        for cell in nbformat.read(course / "solutions" / NAME / f"{NAME}.ipynb", as_version=4).cells
        if cell.id == f"solution-{EXERCISE}"
    )
    said = answer(page, line, solved)
    assert "✓" in said and "没有通过" not in said
    look(page, "passed_test")
    page.keyboard.press("Control+s")
    page.wait_for_function("() => !jupyterapp.shell.currentWidget.context.model.dirty")
    # The verdict, as told in a terminal.
    page.evaluate("async () => { await jupyterapp.commands.execute('launcher:create') }")
    page.locator(".jp-LauncherCard", has_text=re.compile("^终端$")).locator("visible=true").click()
    page.locator(".jp-Terminal .xterm").wait_for()
    page.wait_for_timeout(1500)
    page.locator(".jp-Terminal .xterm").click()
    told, done = course / "verdict.txt", course / "done"
    # A terminal opens in the folder of the file browser: the command must be found from there.
    page.keyboard.insert_text(f"clear; launch check 3 | tee {told}; touch {done}")
    page.keyboard.press("Enter")
    for _ in range(SECONDS // 250):
        if done.exists():
            break
        time.sleep(0.25)
    page.wait_for_timeout(500)
    look(page, "verdict")
    verdict = told.read_text(encoding="utf-8")
    points = sum(cell.metadata.nbgrader.points for cell in release.cells if is_grade(cell) and cell.id == f"test-{EXERCISE}")
    assert f"得分 {points:g} / {chapter(NAME).points:g}" in verdict and "未通过" in verdict
    assert (NEEDS_GPU in verdict) is not has_gpu()


def by_hint(release) -> str:
    """A few words of the hints of the exercise."""
    names = [cell.id for cell in release.cells]
    hint = release.cells[names.index(f"solution-{EXERCISE}") - 1].source
    return re.search(r"</summary>\s*([\u4e00-\u9fff]{4,12})", hint)[1]


def test_validate_says_which_tests_fail(page):
    opened(page, f"course/{NAME}/{NAME}.ipynb")
    page.locator(".jp-NotebookPanel:visible").get_by_text("Validate", exact=True).click()
    dialog = page.locator(".jp-Dialog")
    dialog.wait_for()
    look(page, "validate")
    told = dialog.inner_text()
    assert "student.worth_a_graph" in told and "NotImplementedError" in told
    assert "showtraceback was disabled" not in told
    if not has_gpu():
        assert "这个测试单元需要 GPU" in told
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")


def test_formgrader_shows_the_course(page):
    choose(page, "Nbgrader", "Formgrader")
    frame = page.frame_locator("iframe").first
    frame.get_by_text(NAME, exact=True).first.wait_for()
    look(page, "formgrader")
    assert "Manage Assignments" in frame.locator("body").inner_text()


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_recorded_plots_are_readable_in_both_themes(page, theme):
    page.evaluate(
        "async theme => { await jupyterapp.commands.execute('apputils:change-theme', {theme}) }", f"JupyterLab {theme}"
    )
    opened(page, f"solutions/{NAME}/{NAME}.ipynb")
    page.wait_for_function("theme => document.body.dataset.jpThemeLight == theme", arg=json.dumps(theme == "Light"))
    recorded = nbformat.read(chapter(NAME).solution, as_version=4).cells
    number = next(n for n, cell in enumerate(recorded) if "CPU 提交时间" in cell.get("metadata", {}).get("alt", ""))
    picture = "number => jupyterapp.shell.currentWidget.content.widgets[number].node.querySelector('.jp-RenderedImage img')"
    page.evaluate("async number => { await jupyterapp.shell.currentWidget.content.scrollToItem(number, 'start') }", number)
    plot = page.wait_for_function(picture, arg=number).as_element()
    plot.scroll_into_view_if_needed()
    look(page, f"plot_{theme.lower()}")
    pixels = image.imread(io.BytesIO(plot.screenshot()), format="png")[..., :3]
    assert pixels[2, 2].min() > 0.9, "the card is light in either theme"
    assert (pixels.max(axis=2) < 0.5).sum() > 200, "axes and text are dark"
