"""The router under test: a process of its own over the stub fleet, and what of it is read from outside.

Also started here: the stub fleet, and a thread that scrapes /metrics each second, as Prometheus would.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from baton.config import ModelConfig, RouterConfig, TracingConfig
from baton.config_load import to_json
from bench.child import STOP_TIMEOUT_S, Child, ChildError, die_with_parent, python_path
from bench.router_bench_messages import (
    VOCABULARY,
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
    streamed_completion,
)

START_TIMEOUT_S = 300.0  # a thousand Sessions, and what the router does at each
SETTLE_S = 30.0  # for a load's last sequences to be cancelled
MAX_INFLIGHT = 8_192  # above every load here: what is measured is the router's cost, not its admission


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
    trace_ratio: float | None = None  # of calls whose spans are sent to a collector; None = tracing is off


class RouterProcess:
    """Owns the process; `close` ends it."""

    def __init__(self, config: RouterConfig, folder: Path, name: str) -> None:
        """Raises: ChildError: it did not start."""
        path = folder / f"{name}.json"
        path.write_text(to_json(config))
        self._log = (folder / f"{name}.log").open("w+b")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "router.main", "--config", str(path)],
            env={**os.environ, "PYTHONPATH": python_path()}, start_new_session=True, preexec_fn=die_with_parent,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(f"the router did not start: {self.last_words()}")
        self.pid = self._process.pid
        ready = json.loads(line)
        self.http_port: int = ready["http_port"]
        self.grpc_port: int = ready["grpc_port"]
        self.own_port = config.process_port or self.http_port  # of this process alone

    def last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 2_000))
        return self._log.read().decode(errors="replace").strip()

    def is_ready(self) -> bool:
        return get(self.own_port, "/readyz")[0] == http.client.OK

    def close(self) -> None:
        """Twice SIGTERM: the second ends what still runs."""
        self._process.terminate()
        time.sleep(0.1)  # two signals at once are one
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


@contextlib.contextmanager
def running_routers(config: RouterConfig, number: int, folder: Path) -> Iterator[list[RouterProcess]]:
    """As many processes as wanted, on one pair of ports. Raises: ChildError: one did not start."""
    with contextlib.ExitStack() as stack:
        routers = []
        for i in range(number):
            if number > 1:
                config = replace(config, shared_ports=True, process_port=free_port())
            routers.append(RouterProcess(config, folder, f"router{i}"))
            stack.callback(routers[-1].close)
            config = replace(config, http_port=routers[0].http_port, grpc_port=routers[0].grpc_port)
        yield routers


def free_port() -> int:
    """One that nobody holds now; the system hands out others for a while before it comes round again."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Rig:
    """Routers and fleet, as a Target."""

    def __init__(
        self, features: Features, fleet: Child, routers: Sequence[RouterProcess], keys: Sequence[str], folder: Path,
        start_s: float,
    ) -> None:  # fmt: skip
        self.features = features
        self.start_s = start_s  # until every router was ready with a Session to every endpoint
        self.port, self.grpc_port = routers[0].http_port, routers[0].grpc_port
        self.keys = keys
        self._fleet = fleet
        self._routers = routers
        self.start_cpu_s = self.cpu_s()
        models = json.loads(get(self.port, "/v1/models", self._fields(0))[1])
        self.model: str = models["data"][0]["id"]
        self._said = folder / "said.npy"

    def cpu_s(self) -> float:
        return sum(family_cpu_s(router.pid) for router in self._routers)

    def memory_bytes(self) -> int:
        return sum(family_memory_bytes(router.pid) for router in self._routers)

    def requests(self, max_tokens: int) -> list[bytes]:
        """One streamed completion of token ids for each key; classes take turns."""
        draw = random.Random(max_tokens)
        prompts = [draw.choices(VOCABULARY, k=self.features.prompt_tokens) for _ in self.keys]
        return [
            streamed_completion(self.port, self.model, prompt, max_tokens, self._fields(i))
            for i, prompt in enumerate(prompts)
        ]

    def chat(self) -> Exchange:
        body = {"model": self.model, "messages": [{"role": "user", "content": SHORT_PROMPT}], "max_tokens": 1}
        return Exchange("/v1/chat/completions", self._fields(0), json.dumps(body).encode())

    def _fields(self, i: int) -> dict[str, str]:
        slo_class = class_name(i % self.features.num_classes)
        return {"authorization": f"Bearer {self.keys[i]}", "x-slo-class": slo_class}

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


def write_keys(keys: Sequence[str], path: Path) -> Path:
    """A tenant for each key, without limits; router/tenants.py. JSON is YAML too."""
    entries = [
        {"name": f"tenant{i:06d}", "sha256": hashlib.sha256(key.encode()).hexdigest()} for i, key in enumerate(keys)
    ]
    path.write_text(json.dumps({"keys": entries}))
    return path


@contextlib.contextmanager
def _tracing(ratio: float | None) -> Iterator[TracingConfig]:
    """Raises: ChildError: the collector did not start."""
    if ratio is None:
        yield TracingConfig()
        return
    sink = Child("trace sink", "bench.trace_sink")
    try:
        yield TracingConfig(f"http://{HOST}:{sink.hear(int, ANSWER_S)}", sample_ratio=ratio)
    finally:
        sink.close()


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
        keys = api_keys(features.num_keys)
        config = RouterConfig(
            host=HOST, http_port=0, grpc_port=0, control_address=started.control_address, max_inflight=MAX_INFLIGHT,
            max_queued=MAX_INFLIGHT, api_keys_file=str(write_keys(keys, folder / "keys.json")),
            model=ModelConfig(path=features.model), tracing=stack.enter_context(_tracing(features.trace_ratio)),
        )  # fmt: skip
        began_s = time.monotonic()
        routers = stack.enter_context(running_routers(config, features.num_processes, folder))
        wait_for_sessions(fleet, routers, features.num_endpoints * features.num_processes)
        start_s = time.monotonic() - began_s
        for router in routers:
            stack.callback(Scraper(router.own_port, "/metrics").close)
        yield Rig(features, fleet, routers, keys, folder, start_s)


def wait_for_sessions(fleet: Child, routers: Sequence[RouterProcess], wanted: int) -> None:
    """Raises: ChildError: they did not all open."""
    ends_s = time.monotonic() + START_TIMEOUT_S
    num_open = 0
    while time.monotonic() < ends_s:
        num_open = fleet.ask(CountSessions(), Sessions, ANSWER_S).num_open
        with contextlib.suppress(OSError, http.client.HTTPException):
            if num_open >= wanted and all(router.is_ready() for router in routers):
                return
        time.sleep(0.2)
    last = routers[0].last_words()
    raise ChildError(f"after {START_TIMEOUT_S:g} s there are {num_open} of {wanted} Sessions: {last}")
