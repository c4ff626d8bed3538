"""What exercises are called, as their chapter's headings have it."""

from __future__ import annotations

import json

from launchlab.manifest import Chapter

KINDS = {"answer": "答案", "structure": "正确性", "speedup": "速度"}


def exercise_titles(chapter: Chapter) -> dict[str, str]:
    """id of a test -> the heading of its exercise and what is tested; of the solution, which no learner writes to.

    Read as JSON: nbformat and nbgrader take seconds to import.
    """
    titles, heading = {}, chapter.title
    for cell in json.loads(chapter.solution.read_text(encoding="utf-8"))["cells"]:
        metadata = cell["metadata"]
        if cell["cell_type"] == "markdown" and "instructor" not in metadata.get("tags", ()):
            lines = "".join(cell["source"]).splitlines()
            heading = ([line.lstrip("# ") for line in lines if line.startswith("##")] or [heading])[-1]
        elif metadata.get("nbgrader", {}).get("grade"):
            titles[metadata["nbgrader"]["grade_id"]] = f"{heading} · {KINDS[metadata['launchlab']['kind']]}"
    return titles
