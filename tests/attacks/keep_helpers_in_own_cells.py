# ruff: noqa
# An honest solution whose helpers, imports and constants stand in cells of the learner's own, and whose answer is a method.
# loses: nothing
# %% before="longest_path"
from collections import defaultdict
from functools import lru_cache

NOTHING = 0

# %% before="longest_path"
def successors(edges):
    after = defaultdict(list)
    for start, end in edges:
        after[start].append(end)
    return after

# %% solution="longest_path"
class Paths:
    def __call__(self, edges):
        after = successors(edges)

        @lru_cache(None)
        def reach(node):
            return 1 + max(map(reach, after[node]), default=0)

        return max(map(reach, list(after)), default=NOTHING)


longest_path = Paths()

# %% after="longest_path"
assert longest_path([[0, 1]]) == 2
longest_path([[0, 1], [1, 2]])
