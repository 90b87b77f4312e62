"""The router under test: a process of its own over the stub fleet, and what of it is read from outside.

Also started here: the stub fleet, and a thread that scrapes /metrics each second, as Prometheus would.
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
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.config import ModelConfig, RouterConfig
from baton.config_load import to_json
from bench.child import STOP_TIMEOUT_S, Child, ChildError, python_path
from bench.router_bench_load import PLACEHOLDER
from bench.router_bench_messages import (
    CountSessions,
    EndLog,
    Sessions,
    SetStep,
    StartLog,
    StubDone,
    StubFleet,
    StubStarted,
    class_name,
)
from bench.router_bench_target import (
    ANSWER_S,
    HOST,
    SHORT_PROMPT,
    STEP_S,
    Exchange,
    Said,
    Scraper,
    family_cpu_s,
    family_memory_bytes,
    get,
    post,
)

START_TIMEOUT_S = 300.0  # a thousand Sessions, and what the router does at each
SETTLE_S = 30.0  # for a load's last sequences to be cancelled
MAX_INFLIGHT = 8_192  # above every load here: what is measured is the router's cost, not its admission
VOCABULARY = range(1_000, 20_000)  # ids of ordinary words in the usual vocabularies


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
        return family_cpu_s(self.pid)

    def memory_bytes(self) -> int:
        return family_memory_bytes(self.pid)

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


class Rig:
    """Router and fleet, as a Target."""

    def __init__(
        self, features: Features, fleet: Child, router: RouterProcess, scraper: Scraper, folder: Path, start_s: float
    ) -> None:
        self.features = features
        self.start_s = start_s  # until the router was ready with a Session to every endpoint
        self.start_cpu_s = router.cpu_s()
        self.scraper = scraper
        self.port = router.http_port
        self._fleet = fleet
        self._router = router
        self._model = json.loads(get(self.port, "/v1/models")[1])["data"][0]["id"]
        self._keys = api_keys(features.num_keys)
        self._said = folder / "said.npy"

    def cpu_s(self) -> float:
        return self._router.cpu_s()

    def memory_bytes(self) -> int:
        return self._router.memory_bytes()

    def requests(self, max_tokens: int) -> list[bytes]:
        """One streamed completion of token ids for each key; classes take turns."""
        draw = random.Random(max_tokens)
        texts = []
        for i in range(len(self._keys)):
            body = {
                "model": self._model,
                "prompt": draw.choices(VOCABULARY, k=self.features.prompt_tokens),
                "max_tokens": max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            fields = {**self._fields(i), "x-request-id": PLACEHOLDER}
            texts.append(post(self.port, "/v1/completions", fields, body))
        return texts

    def chat(self) -> Exchange:
        body = {"model": self._model, "messages": [{"role": "user", "content": SHORT_PROMPT}], "max_tokens": 1}
        return Exchange("/v1/chat/completions", self._fields(0), json.dumps(body).encode())

    def _fields(self, i: int) -> dict[str, str]:
        slo_class = class_name(i % self.features.num_classes)
        return {"authorization": f"Bearer {self._keys[i]}", "x-slo-class": slo_class}

    def settle(self) -> None:
        ends_s = time.monotonic() + SETTLE_S
        while time.monotonic() < ends_s:
            if self._fleet.ask(CountSessions(), Sessions, ANSWER_S).num_running == 0:
                return
            time.sleep(0.05)
        raise ChildError(f"{SETTLE_S:g} s after a load's end the fleet still has sequences")

    @contextlib.contextmanager
    def logged(self) -> Iterator[Said]:
        self._fleet.ask(StartLog(), StubDone, ANSWER_S)
        try:
            yield lambda seen: np.load(self._said)
        finally:
            self._fleet.ask(EndLog(self._said), StubDone, ANSWER_S)

    @contextlib.contextmanager
    def unpaced(self) -> Iterator[Rig]:
        self._fleet.ask(SetStep(0.0), StubDone, ANSWER_S)
        try:
            yield self
        finally:
            self._fleet.ask(SetStep(STEP_S), StubDone, ANSWER_S)


def api_keys(number: int) -> list[str]:
    return [f"bk-bench-{i:06d}-{random.Random(i).randbytes(16).hex()}" for i in range(number)]


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
            features.num_prefill, features.num_decode, num_other, features.blocks_each, features.num_classes, STEP_S
        )
        started = fleet.ask(wanted, StubStarted, START_TIMEOUT_S)
        config = RouterConfig(
            host=HOST, http_port=0, grpc_port=0, control_address=started.control_address, max_inflight=MAX_INFLIGHT,
            model=ModelConfig(path=features.model),
        )  # fmt: skip
        began_s = time.monotonic()
        router = RouterProcess(config, folder)
        stack.callback(router.close)
        wait_for_sessions(fleet, router, features.num_endpoints * features.num_processes)
        start_s = time.monotonic() - began_s
        scraper = Scraper(router.http_port, "/metrics")
        stack.callback(scraper.close)
        yield Rig(features, fleet, router, scraper, folder, start_s)


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
