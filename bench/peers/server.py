"""A router of others as a process: started in its interpreter, watched from outside, ended by signal."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.child import STOP_TIMEOUT_S, ChildError, die_with_parent
from bench.router_bench_target import ANSWER_S, HOST, Exchange

START_TIMEOUT_S = 60.0  # both answer within 10 s here
LAST_WORDS_BYTES = 2_000


class PeerServer:
    """Owns the process; `close` ends it."""

    def __init__(
        self, name: str, words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Raises: ChildError: no such interpreter."""
        self._name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    words, env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, cwd=folder, preexec_fn=die_with_parent,
                )  # fmt: skip
            except OSError as error:
                raise ChildError(f"{name}: {words[0]} cannot be started: {error.strerror}") from error
        self.pid = self._process.pid

    def wait_for(self, port: int, chat: Exchange) -> None:
        """Return once `chat` is answered. Raises: ChildError: it ended, or never answers."""
        ends_s = time.monotonic() + START_TIMEOUT_S
        status = 0
        while time.monotonic() < ends_s:
            if self._process.poll() is not None:
                raise ChildError(f"{self._name} ended, status {self._process.returncode}: {self.last_words()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                status = status_of(port, chat)
                if status == http.client.OK:
                    return
            time.sleep(0.2)
        raise ChildError(f"{self._name} answers {status or 'nothing'} after {START_TIMEOUT_S:g} s: {self.last_words()}")

    def last_words(self) -> str:
        return self._log.read_bytes()[-LAST_WORDS_BYTES:].decode(errors="replace").strip()

    def close(self) -> None:
        """Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def status_of(port: int, chat: Exchange) -> int:
    """Raises: OSError, HTTPException."""
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_S)
    try:
        connection.request("POST", chat.path, chat.body, {"content-type": "application/json", **chat.fields})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()
