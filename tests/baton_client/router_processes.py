"""Router processes over workers of this process, to be killed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from baton.v1 import serving_pb2, serving_pb2_grpc


@dataclass
class Routers:
    processes: list[asyncio.subprocess.Process]
    ports: list[int]

    @property
    def target(self) -> str:
        """All of them; gRPC takes the first one that answers."""
        return "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    async def idle(self) -> None:
        """Every call is over, here too."""
        while await self._busy():  # noqa: ASYNC110  # other processes announce nothing
            await asyncio.sleep(0.01)

    async def kill_busy(self) -> None:
        """One that has a call."""
        process = (await self._busy())[0]
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async def _busy(self) -> list[asyncio.subprocess.Process]:
        found = []
        for process, port in zip(self.processes, self.ports, strict=True):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                loads = await serving_pb2_grpc.ServingStub(channel).GetLoads(serving_pb2.GetLoadsRequest())
            found += [process] if loads.num_inflight else []
        return found


@asynccontextmanager
async def running_routers(model_dir: Path, workers: Sequence[str], number: int = 2) -> AsyncIterator[Routers]:
    command = [sys.executable, "-m", "router.main", "--model", str(model_dir), "--workers", ",".join(workers)]
    routers = Routers([], [])
    try:
        for _ in range(number):
            process = await asyncio.create_subprocess_exec(
                *command, "--http-port", "0", "--grpc-port", "0", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            routers.processes.append(process)
        for process in routers.processes:
            assert process.stdout is not None
            routers.ports.append(json.loads(await process.stdout.readline())["grpc_port"])
        yield routers
    finally:
        for process in routers.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
