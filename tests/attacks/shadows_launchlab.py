# ruff: noqa
# A package launchlab beside the notebook: checks that never fail, and an agent that claims.
# loses: total_us, advance, longest_path
# %% file="launchlab/__init__.py"
# %% file="launchlab/exam/__init__.py"
class Anything:
    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        return self


check = reference = secret = student = on_gpu = Anything()

# %% file="launchlab/exam/agent.py"
import json

TARGET = "launchlab"


def serve(shell):
    def opened(comm, _message):
        @comm.on_msg
        def asked(message):
            number = json.loads(message["content"]["data"]["ask"])["n"]
            comm.send(data={"reply": json.dumps({"n": number, "value": True, "verdict": "passed"})})

    shell.kernel.comm_manager.register_target(TARGET, opened)

# %% solution="total_us"
def total_us(launch_us, n, kernel_us):
    return 7.0

# %% solution="advance"
def advance(state, rounds):
    pass

# %% solution="longest_path"
def longest_path(edges):
    return 3
