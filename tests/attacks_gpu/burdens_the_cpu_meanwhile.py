# ruff: noqa
# One launch after the other; thirty children keep the CPU busy whenever the examiner measures someone else.
# loses: make_replayer_speed
# %% after="make_replayer"
import multiprocessing
import os
import time

make_for_real = make_replayer
busy = multiprocessing.get_context("fork").Value("b", 0, lock=False)
for _ in range(30):
    if os.fork() == 0:
        while True:
            if busy.value:
                pass
            else:
                time.sleep(0.0005)

import launchlab.exam.agent as agent_module

honest_repeat = agent_module.Agent._op_repeat


def repeat(self, *args, **kwargs):
    busy.value = 0
    try:
        return honest_repeat(self, *args, **kwargs)
    finally:
        busy.value = 1


agent_module.Agent._op_repeat = repeat

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
