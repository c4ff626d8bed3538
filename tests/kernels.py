"""What tests of a student's process share: where it can be tried, and what it tells."""

import json

import pytest

from launchlab.exam import sandbox
from launchlab.exam.kernel import Kernel

BEST = sandbox.works()  # what grading uses here
needs_sandbox = pytest.mark.skipif(not BEST, reason="bubblewrap is not installed, or may not be used here")
BOTH = [pytest.param(True, marks=needs_sandbox, id="sandboxed"), pytest.param(False, id="plain")]


def told(kernel: Kernel, code: str, seconds: float = 30) -> object:
    """What a cell prints as JSON."""
    result = kernel.run_cell(code, seconds)
    assert result.error is None, result
    return json.loads("".join(output.text for output in result.outputs if output.get("name") == "stdout"))
