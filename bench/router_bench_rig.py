"""The router under test: a process of its own over the stub fleet, and what of it is read from outside.

CPU time is what the kernel counted for the router's process and its children (utime + stime, all threads), so the cost of its
sockets is in it. One thread scrapes /metrics each second, as Prometheus would.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.config import ModelConfig, RouterConfig
from baton.config_load import to_json
from bench.child import STOP_TIMEOUT_S, Child, ChildError, python_path
from bench.router_bench_load import PLACEHOLDER
from bench.router_bench_messages import CountSessions, Sessions, StubFleet, StubStarted, class_name

START_TIMEOUT_S = 300.0  # a thousand Sessions, and what the router does at each
ANSWER_S = 60.0
SCRAPE_S = 1.0
MAX_INFLIGHT = 8_192  # above every load here: what is measured is the router's cost, not its admission
VOCABULARY = range(1_000, 20_000)  # ids of ordinary words in the usual vocabularies
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Features:
    """What is switched on, and how much of it there is."""

    num_prefill: int = 4
    num_decode: int = 4
    num_endpoints: int = 1_000  # with those
    num_classes: int = 16
    num_keys: int = 1_000
    blocks_each: int = 1_024  # in each endpoint's index
    prompt_tokens: int = 32
    num_processes: int = 1
    model: str = "smollm2"


class RouterProcess:
    """Owns the process; `close` ends it."""

    def __init__(self, config: RouterConfig, folder: Path) -> None:
        """Raises: ChildError: it did not start."""
        path = folder / "router.json"
        path.write_text(to_json(config))
        self._log = (folder / "router.log").open("w+b")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "router.main", "--config", str(path)],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(f"the router did not start: {self.last_words()}")
        self.pid = self._process.pid
        ready = json.loads(line)
        self.http_port: int = ready["http_port"]
        self.grpc_port: int = ready["grpc_port"]

    def last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 2_000))
        return self._log.read().decode(errors="replace").strip()

    def cpu_s(self) -> float:
        return sum(process_cpu_s(pid) for pid in family(self.pid))

    def memory_bytes(self) -> int:
        return sum(resident_bytes(pid) for pid in family(self.pid))

    def is_ready(self) -> bool:
        return get(self.http_port, "/readyz")[0] == http.client.OK

    def close(self) -> None:
        """Twice SIGTERM: the second ends what still runs."""
        self._process.terminate()
        time.sleep(0.1)  # two signals at once are one
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


class Scraper:
    """GET /metrics each second until closed."""

    def __init__(self, port: int) -> None:
        self.num_scrapes = 0
        self.num_bytes = 0  # of the last page
        self._port = port
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scraper")
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(SCRAPE_S):
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.num_bytes = len(get(self._port, "/metrics")[1])
                self.num_scrapes += 1

    def close(self) -> None:
        self._end.set()
        self._thread.join()


@dataclass(slots=True)
class Rig:
    """Everything that runs."""

    features: Features
    fleet: Child
    router: RouterProcess
    scraper: Scraper
    model: str  # as the router serves it
    keys: Sequence[str]
    folder: Path
    start_s: float  # until the router was ready with a Session to every endpoint
    start_cpu_s: float

    def requests(self, max_tokens: int) -> list[bytes]:
        """One streamed completion of token ids for each key; classes take turns."""
        draw = random.Random(max_tokens)
        texts = []
        for i, key in enumerate(self.keys):
            body = {
                "model": self.model,
                "prompt": draw.choices(VOCABULARY, k=self.features.prompt_tokens),
                "max_tokens": max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            texts.append(self.request("/v1/completions", body, key, class_name(i % self.features.num_classes)))
        return texts

    def request(self, path: str, body: object, key: str, slo_class: str) -> bytes:
        raw = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {HOST}:{self.router.http_port}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\nx-slo-class: {slo_class}\r\nx-request-id: {PLACEHOLDER}\r\n"
            f"content-length: {len(raw)}\r\n\r\n"
        )
        return head.encode() + raw


@contextlib.contextmanager
def running_rig(features: Features) -> Iterator[Rig]:
    """Start fleet and router; return when every endpoint has its Session.

    Raises:
        ChildError: one of them did not come up.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = Child("stub fleet", "bench.router_bench_stub")
        stack.callback(fleet.close)
        num_other = max(0, features.num_endpoints - features.num_prefill - features.num_decode)
        wanted = StubFleet(
            features.num_prefill, features.num_decode, num_other, features.blocks_each, features.num_classes, 0.025
        )
        started = fleet.ask(wanted, StubStarted, START_TIMEOUT_S)
        keys = [f"sk-bench-{i:06d}-{random.Random(i).randbytes(12).hex()}" for i in range(features.num_keys)]
        config = RouterConfig(
            host=HOST, http_port=0, grpc_port=0, control_address=started.control_address, max_inflight=MAX_INFLIGHT,
            model=ModelConfig(path=features.model),
        )  # fmt: skip
        began_s = time.monotonic()
        router = RouterProcess(config, folder)
        stack.callback(router.close)
        wait_for_sessions(fleet, router, features.num_endpoints * features.num_processes)
        start_s = time.monotonic() - began_s
        scraper = Scraper(router.http_port)
        stack.callback(scraper.close)
        model = json.loads(get(router.http_port, "/v1/models")[1])["data"][0]["id"]
        yield Rig(features, fleet, router, scraper, model, keys, folder, start_s, router.cpu_s())


def wait_for_sessions(fleet: Child, router: RouterProcess, wanted: int) -> None:
    """Raises: ChildError: they did not all open."""
    ends_s = time.monotonic() + START_TIMEOUT_S
    num_open = 0
    while time.monotonic() < ends_s:
        num_open = fleet.ask(CountSessions(), Sessions, ANSWER_S).num_open
        with contextlib.suppress(OSError, http.client.HTTPException):
            if num_open >= wanted and router.is_ready():
                return
        time.sleep(0.2)
    raise ChildError(
        f"after {START_TIMEOUT_S:g} s the router has {num_open} of {wanted} Sessions: {router.last_words()}"
    )


def get(port: int, path: str, timeout_s: float = ANSWER_S) -> tuple[int, bytes]:
    """One exchange on a connection of its own. Raises: OSError, HTTPException."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


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
