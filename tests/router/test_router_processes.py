"""Two router processes on one pair of ports: both serve, workers get a fair share, one's death is not the other's."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import httpx
import pytest

from baton.config import ModelConfig, RouterConfig
from baton.config_load import to_json
from baton.v1 import serving_pb2_grpc
from cli.ports import HeldPorts, free_port
from tests.router.router_rig import request
from tests.router.stub_worker import StubWorker

NUM_WORKERS = 4


@dataclass
class Shared:
    """Two routers and their workers."""

    config: RouterConfig
    processes: list[asyncio.subprocess.Process]
    process_ports: list[int]
    workers: list[StubWorker]

    async def call(self, number: int) -> int:
        """One call on a connection of its own; returns its status."""
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.config.http_port}", timeout=30) as client:
            body = {"prompt": f"call {number}", "max_tokens": 3}
            return (await client.post("/v1/completions", json=body)).status_code

    async def finished(self) -> list[int]:
        """Calls that each process says it served."""
        counts = []
        for port in self.process_ports:
            async with httpx.AsyncClient(timeout=30) as client:
                text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
            counts.append(
                sum(int(float(n)) for n in re.findall(r'baton_requests_total{.*outcome="finished"} (\S+)', text))
            )
        return counts


@pytest.fixture
async def shared(model_dir: Path, tmp_path: Path) -> AsyncIterator[Shared]:
    async with AsyncExitStack() as stack:
        held = HeldPorts()
        stack.callback(held.release)
        ports = [free_port() for _ in range(4)]
        assert all(held.hold(port) for port in ports[:2])
        config = RouterConfig(
            http_port=ports[0], grpc_port=ports[1], shared_ports=True, model=ModelConfig(path=str(model_dir))
        )
        workers = [await StubWorker(f"b{n}").start() for n in range(NUM_WORKERS)]
        for worker in workers:
            stack.push_async_callback(worker.kill)
        routers = [
            await stack.enter_async_context(
                router(tmp_path / f"{port}.json", dataclasses.replace(config, process_port=port), workers)
            )
            for port in ports[2:]
        ]
        yield Shared(config, routers, ports[2:], workers)


async def until_ready_is(status: int, port: int) -> None:
    async with httpx.AsyncClient(timeout=30) as client:
        while True:
            if (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == status:
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def router(
    file: Path, config: RouterConfig, workers: list[StubWorker]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """One router process, ready; killed at the end if it still runs."""
    await asyncio.to_thread(file.write_text, to_json(config))
    addresses = ",".join(worker.address for worker in workers)
    command = [sys.executable, "-m", "router.main", "--config", str(file), "--workers", addresses]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        assert json.loads(await process.stdout.readline())["pid"] == process.pid
        await until_ready_is(200, config.process_port)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_two_routers_share_ports_and_workers_and_outlive_each_other(shared: Shared, tmp_path: Path) -> None:
    # More calls than any plausible imbalance of the kernel's choice by connection: 120 on 2 processes.
    statuses = [
        status for n in range(0, 120, 10) for status in await asyncio.gather(*map(shared.call, range(n, n + 10)))
    ]
    assert statuses == [200] * 120
    finished = await shared.finished()
    assert sum(finished) == 120
    assert min(finished) >= 20
    shares = [len(worker.submits) for worker in shared.workers]
    assert sum(shares) == 120
    assert min(shares) >= 0.6 * 120 / NUM_WORKERS, shares

    stranger = dataclasses.replace(shared.config, shared_ports=False)
    (tmp_path / "stranger.json").write_text(to_json(stranger))
    command = [sys.executable, "-m", "router.main", "--config", str(tmp_path / "stranger.json")]
    refused = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, said = await refused.communicate()
    assert refused.returncode == 1
    assert f"HTTP port {shared.config.http_port}".encode() in said

    os.kill(shared.processes[0].pid, signal.SIGKILL)
    await shared.processes[0].wait()
    assert await asyncio.gather(*map(shared.call, range(20))) == [200] * 20


async def test_routers_that_are_told_to_stop_each_let_their_calls_end(shared: Shared) -> None:
    for worker in shared.workers:
        worker.script.decode_gate.clear()
    async with AsyncExitStack() as stack:
        answers = []
        for _ in range(12):
            options = [("grpc.use_local_subchannel_pool", 1)]  # a connection each
            address = f"127.0.0.1:{shared.config.grpc_port}"
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            answer = aiter(serving_pb2_grpc.ServingStub(channel).Generate(request(max_tokens=4)))
            assert (await anext(answer)).chunk.token_ids == [300]
            answers.append(answer)
        for process in shared.processes:
            process.terminate()
        for port in shared.process_ports:
            await until_ready_is(503, port)
        for worker in shared.workers:
            worker.script.decode_gate.set()
        for answer in answers:
            rest = [response async for response in answer]
            assert [token for response in rest for token in response.chunk.token_ids] == [301, 302, 303]
            assert rest[-1].done.usage.completion_tokens == 4
    assert [await process.wait() for process in shared.processes] == [0, 0]


async def test_clients_of_a_router_that_is_told_to_stop_go_to_the_other_one_and_are_refused_nothing(
    shared: Shared,
) -> None:
    """A client holds one connection for long: as long as that is the leaving router's, all of its calls would be refused."""
    for worker in shared.workers:
        worker.script.decode_gate.clear()
    options = [("grpc.use_local_subchannel_pool", 1)]
    base_url = f"http://127.0.0.1:{shared.config.http_port}"
    body = {"prompt": "hello", "max_tokens": 1}
    async with AsyncExitStack() as stack:
        stubs, answers, clients = [], [], []
        for _ in range(12):  # on 2 processes: some are the leaving one's
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{shared.config.grpc_port}", options=options)
            stubs.append(serving_pb2_grpc.ServingStub(await stack.enter_async_context(channel)))
            answers.append(aiter(stubs[-1].Generate(request(max_tokens=4))))
            assert (await anext(answers[-1])).chunk.token_ids == [300]
            clients.append(await stack.enter_async_context(httpx.AsyncClient(base_url=base_url, timeout=30)))
            assert (await clients[-1].post("/v1/completions", json=body)).status_code == 200
        shared.processes[0].terminate()
        await until_ready_is(503, shared.process_ports[0])
        for _ in range(2):
            assert [(await client.post("/v1/completions", json=body)).status_code for client in clients] == [200] * 12
            for stub in stubs:
                said = [response async for response in stub.Generate(request(max_tokens=1))]
                assert said[0].chunk.token_ids == [300]
        assert shared.processes[0].returncode is None, "its own calls still run"
        for worker in shared.workers:
            worker.script.decode_gate.set()
        for answer in answers:
            assert [token async for response in answer for token in response.chunk.token_ids] == [301, 302, 303]
    assert await shared.processes[0].wait() == 0
