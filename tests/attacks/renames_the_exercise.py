# ruff: noqa
# Deletes the function after a test has found it, and puts a proxy in the place of the notebook's namespace.
# loses: longest_path
# %% solution="longest_path"
class Names(dict):
    def __missing__(self, name):
        return lambda *args: 3


def longest_path(edges):
    del globals()["longest_path"]
    get_ipython().user_ns = Names()
    return 3
