"""Links that lead nowhere: of all pages and notebooks, to files and headings of this repository."""

import json
import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

from launchlab import paths

FENCE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(\s*<?([^)<>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)|<(?:a|img)\b[^>]*?\b(?:href|src)=[\"']([^\"']+)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def pages(root: Path) -> list[Path]:
    """The pages that git knows of, or would; not the site's templates, whose links are those of the pages made from them."""
    told = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md", "*.ipynb"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted(
        path for name in told.stdout.splitlines() if (path := root / name).is_file() and "templates" not in path.parts
    )


def texts(path: Path) -> list[str]:
    """The Markdown of a page; of a notebook, its cells and what they said."""
    if path.suffix == ".md":
        return [path.read_text(encoding="utf-8")]
    found = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            found.append("".join(cell["source"]))
        found += [
            "".join(output["data"]["text/markdown"])
            for output in cell.get("outputs", [])
            if "text/markdown" in output.get("data", {})
        ]
    return found


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and JupyterLab make them."""
    found = set()
    for text in texts(path):
        for title in HEADING.findall(FENCE.sub("", text) if path.suffix == ".md" else text):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*`]", r"\1", title)
            found |= {re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"), plain.replace(" ", "-")}
    return found


def broken(path: Path, root: Path) -> list[str]:
    """The links of ``path`` that lead nowhere within ``root``."""
    found = []
    for text in texts(path):
        for groups in LINK.findall(FENCE.sub("", text)):
            link = unquote(groups[0] or groups[1])
            if ELSEWHERE.match(link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            outside = not target.is_relative_to(root.resolve())
            if (
                outside
                or not target.exists()
                or (anchor and target.suffix in (".md", ".ipynb") and anchor not in anchors(target))
            ):
                found.append(link)
    return found


def test_every_local_link_leads_somewhere():
    found = pages(paths.ROOT)
    assert len(found) > 40
    lost = {str(path.relative_to(paths.ROOT)): links for path in found if (links := broken(path, paths.ROOT))}
    assert lost == {}


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[a](b.md) [c](b.md#标题-one) [d](#here) [e](https://example.org/x) [f](<b.md>)\n# Here\n", []),
        ("[a](none.md)", ["none.md"]),
        ("![a](none.png)", ["none.png"]),
        ('<img src="none.png">', ["none.png"]),
        ("[a](b.md#nothing)", ["b.md#nothing"]),
        ("[a](../../outside.md)", ["../../outside.md"]),
        ("`[a](none.md)`\n```\n[a](none.md)\n```\n", []),
        ('[a](b.md "title") [b](none%20here.md)', ["none here.md"]),
    ],
)
def test_broken_links_are_found(tmp_path, text, lost):
    (tmp_path / "b.md").write_text("## 标题 One\n", encoding="utf-8")
    (tmp_path.parent / "outside.md").touch()
    page = tmp_path / "a.md"
    page.write_text(text, encoding="utf-8")
    notebook = tmp_path / "a.ipynb"
    notebook.write_text(
        json.dumps({"cells": [{"cell_type": "markdown", "source": text.splitlines(keepends=True)}]}), encoding="utf-8"
    )
    assert broken(page, tmp_path) == lost
    assert broken(notebook, tmp_path) == lost
