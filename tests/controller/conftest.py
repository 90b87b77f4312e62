"""A controller inside the test's event loop, its Control port, and stand-in workers that announce themselves to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from baton.config import ControllerConfig, ModelConfig, WorkerConfig
from baton.v1 import control_pb2_grpc
from router.controller.control_service import ControlService
from router.controller.control_store import ControlStore
from router.controller.controller import Controller
from router.controller.database import Database, SQLite, open_database
from tests.controller.postgres_rig import PostgresServer, postgres_server
from tests.controller.stand_in_server import StandInServer

StartWorker = Callable[..., "asyncio.Future[StandInServer]"]


@dataclass(frozen=True, slots=True)
class ControlPlane:
    controller: Controller
    address: str

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a state of the controller. Raises: TimeoutError after a generous bound."""
        async with asyncio.timeout(10.0):
            async for _ in self.controller.watch():
                if holds():
                    return


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[ControlPlane]:
    store = ControlStore(SQLite(tmp_path / "slo.sqlite"), now_unix_s=lambda: 7.0)
    controller = Controller(ControllerConfig(heartbeat_s=0.1), store)
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(controller), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield ControlPlane(controller, f"127.0.0.1:{port}")
    await controller.close()
    await server.stop(grace=None)


@pytest.fixture
def start_worker(plane: ControlPlane) -> Iterator[StartWorker]:
    started: list[StandInServer] = []

    def start(worker_id: str, role: str, model: str = "") -> asyncio.Future[StandInServer]:
        config = WorkerConfig(worker_id, role, control_address=plane.address, model=ModelConfig(path=model))
        server = StandInServer(config, lambda error: None)
        started.append(server)

        def run() -> StandInServer:
            server.start()
            return server

        return asyncio.get_running_loop().run_in_executor(None, run)

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One for all tests; each makes databases of its own."""
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database, of each kind."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/store.sqlite"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = open_database(database_url)
    yield opened
    opened.close()
