# ruff: noqa
# The agent behaves until the end of the exercise, and answers the examiner's last ask there with what breaks a careless reader.
# loses: longest_path
# %% before="longest_path"
import json

import launchlab.exam.agent as agent_module

honest_longest_path_answer = agent_module.Agent.answer
SPITE = ['{"n": %d, "error": {"bases": 5}}', '{"n": %d, "value": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"n": %d, "value": {"t": "array"}}']
spite = iter(SPITE * 100)
asked = []


def at_the_end(self, text, blobs):
    request = json.loads(text)
    if request.get("target") == "longest_path":
        asked.append(request["n"])
    if request["op"] == "forget" and asked:
        return next(spite) % request["n"], []
    return honest_longest_path_answer(self, text, blobs)


agent_module.Agent.answer = at_the_end

# %% solution="longest_path"
def longest_path(edges):
    return 3
