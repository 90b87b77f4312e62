"""A private Postgres for the tests: its own cluster in a temporary folder, on a Unix socket, ended by its pid."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

USER = "baton"
_START_S = 30.0  # it takes one or two
_SETTINGS = (
    *("-c", "listen_addresses="),
    *("-c", "fsync=off"),
    *("-c", "max_connections=60"),
    *("-c", "dynamic_shared_memory_type=mmap"),  # leaves /dev/shm alone
)
_numbers = itertools.count()


class PostgresServer:
    def __init__(self, folder: Path, binaries: Path) -> None:
        self._folder = folder
        self._binaries = binaries
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = (self._folder / "log").open("ab")
        with log:
            command: list[str | Path] = [
                self._binaries / "postgres",
                "-D",
                self._folder / "data",
                "-k",
                self._folder,
                *_SETTINGS,
            ]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, user=_user())
        deadline_s = time.monotonic() + _START_S
        while self._run("psql", "-c", "SELECT 1", check=False).returncode != 0:
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline_s, "Postgres does not answer"
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # "fast": sessions are ended
            self._process.wait(timeout=_START_S)
            self._process = None

    def new_database(self) -> str:
        """A fresh one; its URL."""
        name = f"test_{next(_numbers)}"
        self._run("createdb", name)
        return f"postgresql://{USER}:not-needed@/{name}?host={self._folder}"

    def _run(self, program: str, *args: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        database = ("-d", "postgres") if program == "psql" else ()
        command: list[str | Path] = [self._binaries / program, "-h", self._folder, "-U", USER, *database, *args]
        return subprocess.run(command, capture_output=True, check=check)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Skips the test where Postgres is not installed."""
    pytest.importorskip("psycopg", reason="the extra postgres is not installed")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("no Postgres here: /usr/lib/postgresql/*/bin is empty; Debian's package is postgresql")
    folder = Path(tempfile.mkdtemp(prefix="baton-postgres-"))
    try:
        if user := _user():
            shutil.chown(folder, user)
        initdb: list[str | Path] = [
            found[-1],
            "-D",
            folder / "data",
            "-U",
            USER,
            "--auth=trust",
            "--no-sync",
            "--encoding=UTF8",
        ]
        subprocess.run(initdb, check=True, capture_output=True, user=_user(), env={**os.environ, "LC_ALL": "C"})
        server = PostgresServer(folder, found[-1].parent)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _user() -> str | None:
    """Postgres refuses to run as root."""
    return "postgres" if os.geteuid() == 0 else None
