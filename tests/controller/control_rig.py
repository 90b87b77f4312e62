"""A controller that acts, with stand-in workers on machines of its own and a scaler that says what a test tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
from fastapi import FastAPI

from baton.config import ClusterConfig, ControllerConfig, ModelConfig, WorkerConfig
from baton.errors import Unavailable
from baton.request import Role
from baton.v1 import control_pb2_grpc
from router.controller.admin_api import make_app
from router.controller.admin_tokens import Token
from router.controller.autoscale_loop import AutoscaleLoop
from router.controller.autoscaler.acts import Act, Proposal
from router.controller.autoscaler.facts import FleetFacts
from router.controller.autoscaler.scaler import Times
from router.controller.control_service import ControlService
from router.controller.control_store import ControlStore
from router.controller.controller import Controller
from router.controller.database import SQLite
from router.controller.decisions import Decision
from router.controller.fleet_state import FAILED
from router.controller.fleet_store import FleetStore
from router.controller.lease import Lease
from router.controller.levers import Levers, Waits
from router.controller.live_control import LiveControl
from router.controller.live_facts import LiveFacts
from router.controller.live_times import LiveTimes
from router.controller.pool_orders import PoolOrders
from router.controller.pool_scaler import PoolSize
from router.controller.settings import ControlSettings, Mode
from tests.controller.stand_in_server import StandInServer

SHAPE = "cpu"
PATIENCE_S = 10.0
AT_ONCE = Waits(resumed_s=0.0)


def shape_of(role: Role) -> str:
    return SHAPE


class Machines:
    """Start stand-ins in this process; they outlive a controller."""

    def __init__(self) -> None:
        self.servers: dict[str, StandInServer] = {}
        self.room = 8
        self.are_away = False
        self.starts = True  # false: what is asked for never comes
        self.controller: Controller
        self.address = ""

    async def start(self, worker_id: str, role: str = "decode", behaviour: str = "") -> StandInServer:
        config = WorkerConfig(worker_id, role, control_address=self.address, model=ModelConfig(path=behaviour))
        server = StandInServer(config, lambda error: None)
        self.servers[worker_id] = server  # also one whose start fails is to be stopped
        await asyncio.to_thread(server.start)
        return server

    async def get(self, shape: str) -> PoolSize:
        if self.are_away:
            raise Unavailable("machines are away")
        members = self.controller.fleet.members()
        names = tuple(member.worker_id for member in members)
        return PoolSize(len(names), len(self.servers), (), names, self.room - len(names))

    def shape_of(self, role: Role) -> str:
        return shape_of(role)

    async def scale_up(self, role: Role, shape: str) -> str:
        await self.get(shape)
        worker_id = self.controller.fleet.new_name(role)
        self.controller.expect(worker_id, role, shape, extra=True)
        if self.starts:
            await self.start(worker_id, role.name.lower())
        return worker_id

    def can_end(self, worker_id: str) -> bool:
        return True

    async def scale_down(self, worker_id: str) -> None:
        await self.get(SHAPE)
        await self.stop(worker_id)

    async def stop(self, worker_id: str) -> None:
        if server := self.servers.pop(worker_id, None):
            await asyncio.to_thread(server.stop)

    async def stop_all(self) -> None:
        await asyncio.gather(*(self.stop(worker_id) for worker_id in list(self.servers)))


@dataclass(slots=True)
class ScriptedScaler:
    """Proposes the same acts at every look."""

    acts: Sequence[Act] = ()
    looks: list[FleetFacts] = field(default_factory=list)
    failure: Exception | None = None
    times: Times | None = None

    def measured(self, times: Times) -> None:
        self.times = times

    def look(self, facts: FleetFacts) -> Sequence[Proposal]:
        self.looks.append(facts)
        if self.failure is not None:
            raise self.failure
        return [Proposal(act, "because the test says so", {"rate_per_s": 1.0}) for act in self.acts]


class Rig:
    """One life of a controller that acts."""

    def __init__(self, machines: Machines, controller: Controller, tick_s: float, lease: Lease, waits: Waits) -> None:
        self.machines = machines
        self.controller = controller
        self.scaler = ScriptedScaler()
        self.registry = controller.registry
        self.levers = Levers(controller, machines, gpus_per_worker=1, waits=waits)
        times = Times(tick_s=tick_s)
        self.live_times = LiveTimes(times)
        self.facts = LiveFacts(
            controller, ClusterConfig(), machines, shape_of, lambda: self.live_times.times.start_up_s, 0.0
        )
        self.loop = AutoscaleLoop(
            controller,
            self.levers,
            self.facts,
            self.scaler,
            self.live_times,
            lease,
            self.registry,
            look_s=0.05,
        )
        self.orders = PoolOrders(controller, self.levers, shape_of, self.loop.record, lease)

    def app(self, tokens: Sequence[Token]) -> FastAPI:
        """Its admin endpoint."""
        parts = SimpleNamespace(
            loop=self.loop, orders=self.orders, live_times=self.live_times, facts=self.facts, registry=self.registry
        )
        return make_app(self.controller, ClusterConfig(), lambda: tokens, control=cast("LiveControl", parts))

    async def worker(self, worker_id: str, role: str = "decode", behaviour: str = "") -> StandInServer:
        """One that is there."""
        self.controller.expect(worker_id, Role[role.upper()], SHAPE)
        server = await self.machines.start(worker_id, role, behaviour)
        await self.until(lambda: self.controller.view(worker_id) is not None)
        return server

    async def hang_up(self, worker_id: str) -> StandInServer:
        """Its Session to the controller breaks, and stays so until it picks up."""
        server = self.machines.servers[worker_id]
        server.hang_up()
        await self.until(lambda: self.state(worker_id) == FAILED)
        return server

    async def mode(self, mode: Mode, **budget: object) -> None:
        live = self.controller.in_force.settings
        settings = ControlSettings(mode, live.revision.value.budget)
        await live.put(live.revision.version, settings, "ann", "test")

    async def until(self, holds: Callable[[], bool]) -> None:
        """Raises: TimeoutError after a generous bound."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)

    async def ticks(self, num: int) -> None:
        """So many more looks of the scaler have come to their end."""
        wanted = len(self.scaler.looks) + num + 1  # the last one may still be acted upon
        await self.until(lambda: len(self.scaler.looks) >= wanted)

    def ids(self) -> list[str]:
        return [member.worker_id for member in self.controller.fleet.members()]

    def state(self, worker_id: str) -> str:
        return self.controller.fleet.get(worker_id).state

    async def decisions(self) -> list[Decision]:
        """Oldest first."""
        logged = await self.controller.query_decisions(100, 0.0, 1e11, 2**53)
        return [one.decision for one in reversed(logged)]

    async def decided(self, action: str) -> Decision:
        """The decision about it, once it is written down."""
        async with asyncio.timeout(PATIENCE_S):
            while not (found := [d for d in await self.decisions() if d.action == action]):  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0.01)
        return found[0]

    def metrics(self) -> str:
        return "".join(self.registry.lines())


@asynccontextmanager
async def life(
    folder: Path,
    machines: Machines,
    mode: Mode = Mode.AUTO,
    tick_s: float = 0.05,
    port: int = 0,
    holder: str = "first",
    waits: Waits = AT_ONCE,
) -> AsyncIterator[Rig]:
    """Of a controller, from its start to its end; its workers stay. `port`: of a successor that workers are to find."""
    store = ControlStore(SQLite(folder / "slo.sqlite"), now_unix_s=lambda: 7.0)
    lease = Lease(SQLite(folder / "slo.sqlite"), "autoscaler", holder)
    fleets = FleetStore(folder / "fleet.json")
    controller = Controller(ControllerConfig(heartbeat_s=0.1), store, fleets, leadership=lease)
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(controller), server)
    machines.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    machines.controller = controller
    await server.start()
    rig = Rig(machines, controller, tick_s, lease, waits)
    if controller.in_force.settings.revision.value.mode is not mode:
        await rig.mode(mode)
    running = asyncio.create_task(rig.loop.run())
    try:
        if holder == "first":  # orders are for the one that leads
            await rig.until(lambda: rig.loop.leads)
        yield rig
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await rig.loop.close()
        await controller.close()
        await server.stop(grace=None)
