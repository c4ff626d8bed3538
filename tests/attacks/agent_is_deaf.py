# ruff: noqa
# Unregisters the agent, so that no ask of this exercise is ever answered.
# loses: advance
# %% before="advance"
import json

import launchlab.exam.agent as agent_module

honest_advance_answer = agent_module.Agent.answer
def deaf(self, text, blobs):
    if json.loads(text)["op"] == "define":
        get_ipython().kernel.comm_manager.comms.clear()
        get_ipython().kernel.comm_manager.targets.clear()
        raise SystemExit
    return honest_advance_answer(self, text, blobs)


agent_module.Agent.answer = deaf

# %% solution="advance"
def advance(state, rounds):
    state += np.uint32(1)
