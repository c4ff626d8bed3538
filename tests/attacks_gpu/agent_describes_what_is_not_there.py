# ruff: noqa
# The agent is rewritten to describe any graph as the chain that was asked, and to read what was asked for.
# loses: capture_chain
# %% after="capture_chain"
import launchlab.exam.agent as agent_module

asked = []
honest_description = agent_module.describe_graph


def capture_chain(x, n):
    stream.begin_capture()
    graph = stream.end_capture()
    asked[:] = [graph, n]
    return graph


def describe_graph(target):
    if target is not asked[0]:
        return honest_description(target)
    n = asked[1]
    return {"kinds": ["Kernel"] * n, "edges": [[i, i + 1] for i in range(n - 1)]}


agent_module.describe_graph = describe_graph
