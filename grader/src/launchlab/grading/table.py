"""Verdicts as a table in the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from launchlab.exam import judge
from launchlab.exam.show import WORDS

STYLES = {judge.PASSED: "green", judge.FAILED: "red", judge.CRASHED: "red", judge.TIMED_OUT: "red"}


def verdicts(title: str, rows: list[tuple[str, list[dict]]], remarks: dict[str, str] | None = None) -> Table:
    """One row per submission and exercise: name, exercise, verdict, points, reason.

    ``rows``: (name, checks), checks as in `Report.to_json`. ``remarks``: text by check id, shown
    under the reason of open verdicts (the recorded run's figures, say).
    """
    table = Table(title=title, show_lines=False, expand=True)
    for heading, ratio in (("提交", 4), ("练习", 4), ("结论", 2), ("得分", 1), ("原因", 9)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    for name, checks in rows:
        if len({(check["verdict"], check["reason"]) for check in checks}) == 1 and checks[0]["verdict"] == judge.REFUSED:
            checks = [checks[0] | {"id": "全部"}]
        for number, check in enumerate(checks):
            is_open = check["score"] is None
            style = STYLES.get(check["verdict"], "yellow")
            reason = check["reason"]
            if is_open and remarks and check["id"] in remarks:
                reason += f"\n{remarks[check['id']]}"
            table.add_row(
                name if number == 0 else "", check["id"].removeprefix("test_"), f"[{style}]{WORDS[check['verdict']]}[/]",
                "—" if is_open else f"{check['score']:g}/{check['points']:g}", Text(reason),
                end_section=number == len(checks) - 1,
            )
    return table
