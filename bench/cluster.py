"""A cluster of its own for one bench: `baton up` as a child process on free ports, stopped whatever happens.

The bench is above no other process: it talks to the cluster as any client does, and starts it by the installed command.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.model_store import store_dir
from bench.client import CallFailed
from bench.http_wire import Pool

READY_TIMEOUT_S = 300.0  # a Ray head 5 s, two engines with their memory touched 20 s; the rest is for a loaded machine
STOP_TIMEOUT_S = 60.0  # Ctrl-C drains and cleans up; nothing is in flight by then
POLL_S = 0.25
LOG_LINES = 20  # of a cluster that did not start
NUM_PORTS = 3
BATON = Path(sys.executable).with_name("baton")  # the command of this very environment


class ClusterError(Exception):
    """`baton up` did not come up; the message ends with its last lines."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How many workers of each kind."""

    name: str
    prefill: int = 0
    decode: int = 0
    both: int = 0
    sheds: bool = False  # most benches ask what workers do with their calls, not which of them a router would turn away

    @property
    def environment(self) -> dict[str, str]:
        """What makes `baton up` start just these, all three said so that no default adds one."""
        return {
            "BATON__ROUTER__SHED_BY_FORECAST": str(self.sheds).lower(),
            "BATON__PREFILL": str(self.prefill),
            "BATON__DECODE": str(self.decode),
            "BATON__BOTH": str(self.both),
        }


# Threads of an engine are cores / workers on the host (EngineConfig.num_threads = 0): on 2 cores the lone worker has 2.
DISAGGREGATED = Layout("P/D 1+1", prefill=1, decode=1)
COLOCATED = Layout("colocated", both=1)
REPLICAS = Layout("2 colocated replicas", both=2)


@dataclass(frozen=True, slots=True)
class Cluster:
    http_port: int
    grpc_port: int
    admin_port: int

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def run_folder(self) -> Path:
        """Where `baton up` keeps what it writes; its name is a port that was free, so it is this cluster's alone."""
        return store_dir() / "run" / str(self.admin_port)

    @property
    def grpc_target(self) -> str:
        return f"grpc://127.0.0.1:{self.grpc_port}"


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now; another process could still take one before the cluster does."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@asynccontextmanager
async def running(layout: Layout, extra_flags: Sequence[str] = ()) -> AsyncGenerator[Cluster, None]:
    """Start a cluster, wait until it is ready, stop it at the end.

    Raises:
        ClusterError: it ended or was not ready in time.
    """
    cluster = Cluster(*free_ports(NUM_PORTS))
    ports = ("--http-port", cluster.http_port, "--grpc-port", cluster.grpc_port, "--admin-port", cluster.admin_port)
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            BATON,
            "up",
            *map(str, ports),
            *extra_flags,
            env={**os.environ, **layout.environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a Ctrl-C at the bench reaches the cluster through `stop`, once
        )
        leave = asyncio.current_task()
        assert leave is not None
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, leave.cancel)  # so that a cluster never outlives its bench
        try:
            await until_ready(cluster, process, layout, log.fileno())
            yield cluster
        finally:
            await stop(process)
            loop.remove_signal_handler(signal.SIGTERM)
    shutil.rmtree(cluster.run_folder, ignore_errors=True)  # after a success: else its logs say why


async def until_ready(cluster: Cluster, process: asyncio.subprocess.Process, layout: Layout, log_fd: int) -> None:
    pool = Pool(cluster.http_url)
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not await is_ready(pool):
        if process.returncode is not None:
            raise ClusterError(f"{layout.name}: `baton up` ended with status {process.returncode}\n{tail(log_fd)}")
        if time.monotonic() > deadline_s:
            raise ClusterError(f"{layout.name}: not ready within {READY_TIMEOUT_S:g} s\n{tail(log_fd)}")
        await asyncio.sleep(POLL_S)
    pool.close()


async def is_ready(pool: Pool) -> bool:
    try:
        status, _ = await pool.fetch("GET", "/readyz")
    except CallFailed:
        return False
    return status == 200


def tail(log_fd: int) -> str:
    size = os.fstat(log_fd).st_size
    return "\n".join(os.pread(log_fd, size, 0).decode(errors="replace").splitlines()[-LOG_LINES:])


async def stop(process: asyncio.subprocess.Process) -> None:
    """Ask as Ctrl-C does, then end the whole session that was started here."""
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
