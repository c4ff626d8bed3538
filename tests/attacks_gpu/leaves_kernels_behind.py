# ruff: noqa
# One launch after the other; each time it is left alone, a kernel stays behind on the GPU to slow down whoever is measured next.
# opens: make_replayer_speed
# %% after="make_replayer"
import launchlab.exam.agent as agent_module

make_for_real = make_replayer
side = cp.cuda.Stream(non_blocking=True)


def synchronize():
    stream.synchronize()
    with side:
        launch_spin(60_000)


agent_module.synchronize = synchronize

class Eager(Replayer):
    def __call__(self):
        to_device = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        cudart.cudaMemcpyAsync(self.arrived.data.ptr, self.inbox.ctypes.data, self.inbox.nbytes, to_device, stream.ptr)
        with stream:
            launch_absorb(self.x, self.arrived)
        eager_chain(self.x, self.n)


def make_replayer(x, n):
    made = make_for_real(x, n)
    eager = Eager(made.captured, made.inbox, made.arrived)
    eager.x, eager.n = x, n
    return eager
