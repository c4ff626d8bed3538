"""A peer's process, as its parent sees it."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path


class Failed(Exception):
    """A peer gave no answer; the message says why. `absent`: because something is missing on this machine."""

    def __init__(self, why: str, absent: bool = False):
        super().__init__(why)
        self.absent = absent


class Process:
    """`launchlab.peers.child`, started anew. What it prints goes to a log in the folder."""

    def __init__(self, peer: str, model: str, folder: Path):
        self.peer, self.model, self.log = peer, model, folder / f"{peer}-{model}.log"
        reading, writing = os.pipe()
        caches = folder / f"{peer}-{model}"  # what an earlier run compiled would flatter the first request
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "CUPY_CACHE_DIR": str(caches / "cupy"),
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "launchlab.peers.child", peer, model, str(folder), str(writing)],
                stdin=subprocess.PIPE,
                bufsize=0,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
                env=environment,
                start_new_session=True,  # PyTorch's compiler has helpers, which are to end with it
            )
        os.close(writing)
        self._reading, self._rest = reading, b""

    def ask(self, before: int) -> None:
        """Have the stream served once, after so many requests before the clock."""
        try:
            self._process.stdin.write(f"{before}\n".encode())
        except BrokenPipeError:
            pass  # its last word says why it ended, and `answer` reads that

    def answer(self, seconds: float) -> dict:
        """The next message. Failed if none comes in time, or if the message, or the end of the process, says so."""
        until = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._reading], [], [], left)[0]:
                raise Failed(f"no answer within {seconds:.0f} s")
            chunk = os.read(self._reading, 1 << 16)
            if not chunk:
                raise Failed(f"the process ended with status {self._process.wait()}")
            self._rest += chunk
        line, self._rest = self._rest.split(b"\n", 1)
        message = json.loads(line)
        if "absent" in message:
            raise Failed(message["absent"], absent=True)
        if "failed" in message:
            raise Failed(message["failed"])
        return message

    def end(self) -> None:
        """End the process and its helpers; waits until they are gone."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._process.stdin.close()
        os.close(self._reading)
