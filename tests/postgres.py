"""A real PostgreSQL server of a test's own: in a folder of its own, reached by a Unix socket alone."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DEBIAN = Path("/usr/lib/postgresql")
ACCOUNT = "postgres" if os.geteuid() == 0 else None  # PostgreSQL refuses to be run by root
# A server that is thrown away need not survive a power cut.
THROWAWAY = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "listen_addresses": "", "max_connections": "30"}


def programs() -> Path | None:
    """The folder of `initdb` and `pg_ctl`, which Debian keeps off the PATH; None where there is no server."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(DEBIAN.glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "pg_ctl").exists()), None)


@contextmanager
def server() -> Iterator[str]:
    """Start a server; yields the URL of its empty database. Skips the test where PostgreSQL is not installed, but not in CI."""
    folder = programs()
    if folder is None:
        assert "CI" not in os.environ, "CI must have a PostgreSQL server: see .ci/run"
        pytest.skip("not run: needs a PostgreSQL server (apt install postgresql)")
    place = Path(tempfile.mkdtemp(prefix="ll-pg-"))  # a short path: it holds a socket
    data = place / "data"
    data.mkdir()
    if ACCOUNT:
        account = pwd.getpwnam(ACCOUNT)
        for path in (place, data):
            os.chown(path, account.pw_uid, account.pw_gid)
    options = " ".join(f"-c {name}={value!r}" for name, value in {**THROWAWAY, "unix_socket_directories": str(place)}.items())

    def run(program: str, *arguments: str) -> None:
        command = [str(folder / program), "-D", str(data), *arguments]
        done = subprocess.run(command, user=ACCOUNT, cwd=place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert done.returncode == 0, done.stdout

    try:
        run("initdb", "-U", "launchlab", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions")
        run("pg_ctl", "-w", "-l", str(place / "log"), "-o", options, "start")
        try:
            yield f"postgresql://launchlab@/postgres?host={place}"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(place)
