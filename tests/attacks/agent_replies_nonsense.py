# ruff: noqa
# Replies that are JSON and follow no format: NaN, huge lists, bytes of the wrong size, deep nesting, endless numbers, objects for names.
# loses: longest_path
# %% before="longest_path"
import json

import launchlab.exam.agent as agent_module

honest_longest_path_answer = agent_module.Agent.answer
DEEP = "[" * 100_000 + "]" * 100_000
NONSENSE = [
    '{"t": "list", "v": ' + DEEP + "}",
    "NaN",
    '{"t": "list", "v": [' + ",".join(["0"] * 200_000) + "]}",
    '{"t": "array", "dtype": "<f8", "shape": [1000000], "blob": 0}',
    '{"t": "array", "dtype": "<f8", "shape": [4611686018427387904, 0], "blob": 0}',
    '{"t": "array", "dtype": "<u4", "shape": [-1], "blob": -1}',
    '{"t": "array", "dtype": "O", "shape": [1], "blob": 0}',
    '{"t": "array", "dtype": ["x"], "shape": {}, "blob": null}',
    '{"t": "ref", "id": 1e400, "kind": {}}',
    '{"t": "ref", "id": -5, "kind": "int"}',
    '{"t": "buffer", "id": 1}',
    '{"t": {"t": 1}}',
    '{"t": "dict", "v": [[1, 2]]}',
    '{"t": "dict", "v": [["__class__", 3]]}',
    "9" * 5000,
]
told = iter(NONSENSE)


def nonsense(self, text, blobs):
    request = json.loads(text)
    if request.get("target") != "longest_path":
        return honest_longest_path_answer(self, text, blobs)
    return '{"n": %d, "value": %s}' % (request["n"], next(told, "3")), [b"\0" * 8]


agent_module.Agent.answer = nonsense

# %% solution="longest_path"
def longest_path(edges):
    return 3
