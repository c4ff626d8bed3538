# ruff: noqa
# The agent's reply to this exercise is no JSON, then JSON of the wrong kinds, then the right kind with the wrong number.
# loses: total_us
# %% before="total_us"
import json

import launchlab.exam.agent as agent_module

honest_total_us_answer = agent_module.Agent.answer
def no_json(self, text, blobs):
    request = json.loads(text)
    if request.get("target") != "total_us":
        return honest_total_us_answer(self, text, blobs)
    comm = next(iter(get_ipython().kernel.comm_manager.comms.values()))
    for reply in ("{", "[]", "null", "3", '"x"', '{"n": null}', '{"n": [1]}', json.dumps({"n": request["n"] + 1, "value": 7.0})):
        comm.send(data={"reply": reply})
    for data in ({"reply": 5}, {"reply": None}, {"reply": ["{}"]}, {}, {"other": 1}):
        comm.send(data=data)
    return json.dumps({"n": request["n"], "error": [1, 2]}), []


agent_module.Agent.answer = no_json

# %% solution="total_us"
def total_us(launch_us, n, kernel_us):
    return 7.0
