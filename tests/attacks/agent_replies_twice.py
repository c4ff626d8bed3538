# ruff: noqa
# The agent answers each ask twice, first with a guess, and answers the next ask in advance.
# loses: longest_path
# %% before="longest_path"
import json

import launchlab.exam.agent as agent_module

honest_longest_path_answer = agent_module.Agent.answer
def twice(self, text, blobs):
    request = json.loads(text)
    if request.get("target") == "longest_path":
        comm = next(iter(get_ipython().kernel.comm_manager.comms.values()))
        for number in (request["n"], request["n"] + 1, request["n"] + 2):
            comm.send(data={"reply": json.dumps({"n": number, "value": 3})})
    return honest_longest_path_answer(self, text, blobs)


agent_module.Agent.answer = twice

# %% solution="longest_path"
def longest_path(edges):
    return 3
