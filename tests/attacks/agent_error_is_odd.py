# ruff: noqa
# The agent reports errors whose parts have the wrong kinds.
# loses: total_us
# %% before="total_us"
import json

import launchlab.exam.agent as agent_module

honest_total_us_answer = agent_module.Agent.answer
ODD = ({"type": None, "bases": 5, "message": [], "line": {}, "own": "x"}, {"bases": None}, "text", [], 0, {"type": "A" * 10**6, "bases": [[[]]] * 1000})
turn = iter(range(10**6))


def odd_error(self, text, blobs):
    request = json.loads(text)
    if request.get("target") != "total_us":
        return honest_total_us_answer(self, text, blobs)
    return json.dumps({"n": request["n"], "error": ODD[next(turn) % len(ODD)]}), []


agent_module.Agent.answer = odd_error

# %% solution="total_us"
def total_us(launch_us, n, kernel_us):
    return 7.0
