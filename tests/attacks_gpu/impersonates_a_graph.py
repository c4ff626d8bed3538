# ruff: noqa
# A callable with a launch of its own, one launch after the other, that shows the examiner a real graph of another array.
# loses: capture_chain
# %% after="capture_chain"
capture_for_real = capture_chain


class Impersonator:
    def __init__(self, x, n):
        self.x, self.n = x, n
        self.other = cp.zeros_like(x)
        self.shown = capture_for_real(self.other, n)
        self.graph, self.graphExec = self.shown.graph, self.shown.graphExec

    def launch(self, stream=None):
        eager_chain(self.x, self.n)

    __call__ = launch


Impersonator.__name__ = Impersonator.__qualname__ = "Graph"


def capture_chain(x, n):
    return Impersonator(x, n)
