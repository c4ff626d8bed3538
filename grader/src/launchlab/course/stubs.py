"""What a learner finds in the place of a solution: an error whose message teaches."""

from __future__ import annotations

import json
import re

from nbgrader.preprocessors import ClearSolutions

STUB_TEXT = re.compile(r"BEGIN SOLUTION\s*[:：]\s*(\S.*?)\s*$")


class StubSolutions(ClearSolutions):
    """nbgrader's ClearSolutions, with a stub text of its own for each region.

    ``### BEGIN SOLUTION: text`` up to ``### END SOLUTION`` becomes
    ``raise NotImplementedError("text")`` at the same indentation.
    ValueError, naming the cell: a region without text, a nested or open region, or a
    solution cell without a region.
    """

    def _replace_solution_region(self, cell, language):
        name = cell.metadata.get("nbgrader", {}).get("grade_id") or cell.get("id")
        kept, inside, found = [], False, False
        for line in cell.source.split("\n"):
            if self.begin_solution_delimeter in line:
                if inside:
                    raise ValueError(f"答题单元 {name}：上一个 BEGIN SOLUTION 还没有 END SOLUTION，又来了一个")
                inside = found = True
                kept.append(_stub(line, name))
            elif self.end_solution_delimeter in line:
                inside = False
            elif not inside:
                kept.append(line)
        if inside:
            raise ValueError(f"答题单元 {name}：BEGIN SOLUTION 没有对应的 END SOLUTION")
        if not found and cell.metadata.get("nbgrader", {}).get("solution"):
            raise ValueError(f"答题单元 {name}：没有 ### BEGIN SOLUTION: … 到 ### END SOLUTION 的区域")
        cell.source = "\n".join(kept)
        return found


def _stub(line: str, name: str) -> str:
    text = STUB_TEXT.search(line)
    if text is None:
        raise ValueError(
            f"答题单元 {name}：BEGIN SOLUTION 后面缺一句会教人的话。学习者还没作答时看到的就是它，"
            "例如 ### BEGIN SOLUTION: 先在流上捕获，再实例化"
        )
    indent = line[: len(line) - len(line.lstrip())]
    # A JSON string is a valid Python string in double quotes, and keeps Chinese readable.
    return f"{indent}raise NotImplementedError({json.dumps(text[1], ensure_ascii=False)})"
