"""What the measurements of `baton bench router` want of a router under test, and how it is looked at from outside.

CPU time is what the kernel counted for the router's processes (utime + stime, all threads), so the cost of its sockets is in it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.router_bench_load import PLACEHOLDER, Records, Seen

HOST = "127.0.0.1"
ANSWER_S = 60.0
SCRAPE_S = 1.0  # Prometheus' usual interval is 15 s; each window is to hold a scrape
STEP_S = 0.025  # of decode: 40 tokens/s for each stream
SHORT_PROMPT = "Name one word that rhymes with time."

Said = Callable[[Seen], Records | None]  # when a load's tokens left the stubs, as EVENTs; None where nobody knows


@dataclass(frozen=True, slots=True)
class Exchange:
    """A POST as an ordinary client sends it."""

    path: str
    fields: Mapping[str, str]
    body: bytes


class Target(Protocol):
    """A router with workers behind it that say a token of each stream every STEP_S."""

    @property
    def port(self) -> int: ...
    def cpu_s(self) -> float:
        """Of the router alone, so far."""
        ...

    def memory_bytes(self) -> int:
        """Resident."""
        ...

    def requests(self, max_tokens: int) -> list[bytes]:
        """Streamed completions, whole."""
        ...

    def chat(self) -> Exchange:
        """A short chat, answered whole by one token."""
        ...

    def settle(self) -> None:
        """Wait until nothing runs any more. Raises: ChildError: something does not end."""
        ...

    def logged(self) -> AbstractContextManager[Said]:
        """Note when tokens leave the workers; to be asked after the block."""
        ...

    def unpaced(self) -> AbstractContextManager[Target]:
        """Workers that say a token as soon as the last one was taken."""
        ...


class Scraper:
    """GET a page of metrics each second until closed."""

    def __init__(self, port: int, path: str) -> None:
        self.num_scrapes = 0
        self.num_bytes = 0  # of the last page
        self._port, self._path = port, path
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scraper")
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(SCRAPE_S):
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.num_bytes = len(get(self._port, self._path)[1])
                self.num_scrapes += 1

    def close(self) -> None:
        self._end.set()
        self._thread.join()


def get(port: int, path: str, fields: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """One exchange on a connection of its own. Raises: OSError, HTTPException."""
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_S)
    try:
        connection.request("GET", path, headers=fields or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def post(port: int, path: str, fields: Mapping[str, str], body: object) -> bytes:
    """A whole request, for the load generator."""
    raw = json.dumps(body, separators=(",", ":")).encode()
    head = {
        "host": f"{HOST}:{port}",
        "content-type": "application/json",
        **fields,
        "content-length": str(len(raw)),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + raw


def streamed_completion(
    port: int, model: str, prompt: str | Sequence[int], max_tokens: int, fields: Mapping[str, str] | None = None
) -> bytes:
    """A `post` of the kind that every router in the bench is asked: streamed, with usage, numbered by the load generator."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return post(port, "/v1/completions", {**(fields or {}), "x-request-id": PLACEHOLDER}, body)


def family_cpu_s(pid: int) -> float:
    return sum(process_cpu_s(member) for member in family(pid))


def family_memory_bytes(pid: int) -> int:
    return sum(resident_bytes(member) for member in family(pid))


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in task.read_text().split()]
    return found


def process_cpu_s(pid: int) -> float:
    """utime + stime of all its threads; proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
