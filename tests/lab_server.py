"""`launchlab lab`, started as a learner starts it, for the tests that ask it over HTTP and those that look at it in a browser."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Lab:
    """A running JupyterLab; its token is "t"."""

    address: str

    def fetch(self, path: str) -> tuple[int, bytes]:
        """(status, body) of a path below the server."""
        request = urllib.request.Request(f"{self.address}/{path}", headers={"Authorization": "token t"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


@contextmanager
def running(command: Sequence[str], home: Path, **variables: str) -> Iterator[Lab]:
    """Start ``command`` (`… lab`) for a user whose home is ``home``; ended with all that it started."""
    port = free_port()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    options = ["--no-browser", f"--port={port}", "--IdentityProvider.token=t"]
    process = subprocess.Popen([*command, *options], env={**kept, "HOME": str(home), **variables}, start_new_session=True)
    lab = Lab(f"http://127.0.0.1:{port}")
    with answering(process, lambda: lab.fetch("api/status")):
        yield lab


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextmanager
def answering(process: subprocess.Popen, ask: Callable[[], object]) -> Iterator[None]:
    """Wait until a JupyterLab, the first process of its own session, answers ``ask``; ended with all that it started."""
    try:
        for _ in range(240):
            try:
                ask()
                break
            except urllib.error.URLError:
                assert process.poll() is None, "JupyterLab ended"
                time.sleep(0.25)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
