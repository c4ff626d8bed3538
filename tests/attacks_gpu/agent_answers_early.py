# ruff: noqa
# The agent answers a repetition before it is done, and goes on with it afterwards.
# loses: make_replayer_result, make_replayer_speed
# %% after="make_replayer"
import threading
import time

import launchlab.exam.agent as agent_module

honest_repeat = agent_module.Agent._op_repeat


def early(self, **fields):
    if fields["state"] is not None or not isinstance(fields["target"], Replayer):
        return honest_repeat(self, **fields)
    threading.Thread(target=lambda: (time.sleep(0.02), honest_repeat(self, **fields))).start()
    return None


agent_module.Agent._op_repeat = early
