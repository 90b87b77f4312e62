"""A whole cluster under test: `baton up` as a user runs it, and plain clients to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from baton.model_store import store_dir
from baton.v1 import serving_pb2, serving_pb2_grpc
from bench.cluster import free_ports

BATON = Path(sys.executable).with_name("baton")
START_TIMEOUT_S = 240.0  # generous: Ray, two engines, two loaded cores
PATIENCE_S = 60.0  # for every wait; tests poll, print the time and assert behaviour


class ClusterUnderTest:
    """One `baton up`. Start it with `start`, end it with `stop`."""

    def __init__(self, *flags: str, home: Path | None = None) -> None:
        self.http_port, self.grpc_port, self.admin_port = free_ports(3)
        self.flags = flags
        # Calls are to end, however long they take on the machine that runs this.
        self.env = (
            os.environ | {"BATON__ROUTER__SHED_BY_FORECAST": "false"} | ({"BATON_HOME": str(home)} if home else {})
        )
        self.output: list[str] = []

    @property
    def run_folder(self) -> Path:
        home = Path(self.env["BATON_HOME"]) if "BATON_HOME" in self.env else store_dir()
        return home / "run" / str(self.admin_port)

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def port_flags(self) -> list[str]:
        ports = {"--http-port": self.http_port, "--grpc-port": self.grpc_port, "--admin-port": self.admin_port}
        return [str(part) for pair in ports.items() for part in pair]

    def start(self) -> ClusterUnderTest:
        self.process = subprocess.Popen(
            [BATON, "up", *self.flags, *self.port_flags()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.env,
            start_new_session=True,
        )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip())
            if line.startswith("Ready."):
                return self
            if time.monotonic() > deadline_s:
                break
        self.stop()
        raise AssertionError("the cluster did not come up:\n" + "\n".join(self.output))

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """End it as a user does; returns the exit status. What it printed is in `output`."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            rest, _ = self.process.communicate(timeout=PATIENCE_S + 30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            rest, _ = self.process.communicate()
        self.output += rest.splitlines()
        return self.process.returncode

    def baton(self, *args: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Run a `baton` command against this cluster."""
        return subprocess.run(
            [BATON, *args, "--admin-port", str(self.admin_port)],
            capture_output=True, text=True, env=self.env, timeout=timeout_s, check=False,
        )  # fmt: skip

    def status(self) -> dict[str, object]:
        done = self.baton("status", "--json")
        assert done.returncode == 0, done.stderr
        parsed: dict[str, object] = json.loads(done.stdout)
        return parsed

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.http_url + path, timeout=10) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def processes(self) -> list[psutil.Process]:
        """Everything that `baton up` has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def pid_of(self, module: str) -> int:
        """The process that runs `python -m module`."""
        (pid,) = [p.pid for p in self.processes() if f"-m {module}" in " ".join(p.cmdline())]
        return pid


@dataclass(slots=True)
class Answer:
    """What one gRPC call brought."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[serving_pb2.Logprob] = field(default_factory=list)
    done: serving_pb2.Done | None = None
    error: serving_pb2.ErrorDetail | None = None
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""


class Client:
    """A gRPC client of one cluster; use inside `async with`."""

    def __init__(self, cluster: ClusterUnderTest) -> None:
        self._address = cluster.grpc_address

    async def __aenter__(self) -> Client:
        self._channel = grpc.aio.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = serving_pb2_grpc.ServingStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    def stream(
        self, prompt: Sequence[int] | str, max_tokens: int, *, timeout_s: float = PATIENCE_S, **sampling: Any
    ) -> grpc.aio.UnaryStreamCall[serving_pb2.GenerateRequest, serving_pb2.GenerateResponse]:
        params: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True} | sampling
        request = serving_pb2.GenerateRequest(sampling=serving_pb2.Sampling(max_tokens=max_tokens, **params))
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return self.stub.Generate(request, timeout=timeout_s)

    async def generate(
        self, prompt: Sequence[int] | str, max_tokens: int, *, timeout_s: float = PATIENCE_S, **sampling: Any
    ) -> Answer:
        """One call to its end, whatever that is."""
        return await collect(self.stream(prompt, max_tokens, timeout_s=timeout_s, **sampling))

    async def loads(self) -> serving_pb2.GetLoadsResponse:
        return await self.stub.GetLoads(serving_pb2.GetLoadsRequest(), timeout=10)

    async def until_idle(self) -> float:
        """Wait until no gauge shows work; returns the seconds it took."""
        started_s = time.monotonic()

        async def idle() -> bool:
            loads = await self.loads()
            return loads.num_inflight == 0 and all(
                worker.num_running == worker.num_waiting == worker.active_blocks == worker.reserved_blocks == 0
                for worker in loads.workers
            )

        await until(idle, "idle")
        return time.monotonic() - started_s

    async def until_ready(self, num_workers: int) -> float:
        """Wait until all workers are ready; returns the seconds it took."""
        started_s = time.monotonic()

        async def ready() -> bool:
            loads = await self.loads()
            return sum(worker.state == "ready" for worker in loads.workers) == num_workers

        await until(ready, f"{num_workers} workers ready")
        return time.monotonic() - started_s


async def collect(call: AsyncIterable[serving_pb2.GenerateResponse]) -> Answer:
    answer = Answer()
    try:
        async for response in call:
            take(answer, response)
    except grpc.aio.AioRpcError as error:
        answer.code, answer.details = error.code(), error.details() or ""
    return answer


def take(answer: Answer, response: serving_pb2.GenerateResponse) -> None:
    """Add one message; asserts that nothing follows a terminal one and that no index is skipped."""
    assert answer.done is None, "a message after done"
    kind = response.WhichOneof("event")
    if kind == "chunk":
        if response.chunk.token_ids:
            assert response.chunk.index == len(answer.tokens), "a hole or a repetition"
        answer.tokens += response.chunk.token_ids
        answer.text += response.chunk.text
        answer.logprobs += response.chunk.logprobs
    elif kind == "done":
        answer.done = response.done
    else:
        answer.error = response.error


async def until(condition: Callable[[], object], what: str) -> None:
    """Poll an async or plain condition until it holds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        held = condition()
        if asyncio.iscoroutine(held):
            held = await held
        if held:
            return
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}"
        await asyncio.sleep(0.05)
