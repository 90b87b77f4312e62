"""The workers of this machine as Ray actors: started, brought back when lost, ended. The local PoolScaler.

    start     all that the fleet names; a new fleet is the configured pools
    revive    for ever: lost ones again. Ray restarts killed actors itself, but gives up where a restart raised
    scale_up, scale_down    one more, one less (pool_scaler.py)
    stop      all of them, also those that are only being started

A configured worker that does not come up is tried again for ever, one that was asked for at run time is not: that one fails, and
whoever asked gives it up (levers.py). What Ray is asked, and how long for, is ray_actors.py's. Event loop only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable
from functools import partial

from baton.config import ClusterConfig, WorkerConfig
from baton.errors import BatonError, InvalidRequest, Unavailable
from baton.log import get_log
from baton.peer_trust import Part
from baton.request import Role
from router.controller.controller import Controller
from router.controller.fleet_state import FAILED, STARTING, AfterDrain, Member
from router.controller.pool_scaler import PoolSize
from router.controller.ray_actors import REVIVE_S, Connect, RayActors, connect

log = get_log("controller.ray")


class RayFleet:
    """Create it inside the event loop, before workers can announce themselves."""

    def __init__(
        self, controller: Controller, cluster: ClusterConfig, control_address: str, connect: Connect = connect
    ) -> None:
        self._controller = controller
        self._cluster = cluster
        self._make_config = WorkerConfigs(cluster, control_address, shared_out(cluster, os.cpu_count() or 1))
        self._actors = RayActors(controller, cluster, connect)
        if controller.fleet.saved().is_new:
            for role, num_workers in sizes_of(cluster).items():
                for _ in range(num_workers):
                    controller.expect(controller.fleet.new_name(role), role, self.shape_of(role))
            for _ in range(cluster.controller.standby):
                self._expect_standby()

    def _expect_standby(self) -> None:
        role = Role.DECODE if self._cluster.decode else Role.BOTH
        name = self._controller.fleet.new_name(role)
        self._controller.expect(name, role, self.shape_of(role))
        self._controller.fleet.want_draining(name, True, AfterDrain.STANDBY)

    # -- life --------------------------------------------------------------------------------------------------------

    async def start_and_revive(self) -> None:
        """Bring all workers up; then for ever bring lost ones back, or ask for Ray where that was away."""
        while True:
            if not self._actors.is_connected:
                await self._start()
            else:
                for member in self._controller.fleet.members():
                    if _is_lost(member):
                        self._begin(member)
            await asyncio.sleep(REVIVE_S)

    async def stop(self) -> None:
        """End all workers. What is asked for from now on is refused."""
        await self._actors.stop(member.worker_id for member in self._controller.fleet.members())

    async def _start(self) -> None:
        """Failures end as `failed` members, each with its reason."""
        members = self._controller.fleet.members()
        try:
            await self._actors.connect(len(members))
        except BatonError as error:
            log.error("ray_failed", reason=str(error))
            for member in members:
                self._controller.start_failed(member.worker_id, 0, str(error))
            return
        for member in members:
            self._begin(member)

    def _begin(self, member: Member) -> None:
        self._actors.begin(member.worker_id, partial(self._make_config, member.worker_id, member.role))

    # -- PoolScaler --------------------------------------------------------------------------------------------------

    async def get(self, shape: str) -> PoolSize:
        members = [m for m in self._controller.fleet.members() if m.shape == shape]
        pending = tuple(m.worker_id for m in members if m.state == STARTING)
        return PoolSize(
            desired=sum(m.after_drain is not AfterDrain.END for m in members),
            ready=sum(m.state not in (STARTING, FAILED) for m in members),
            pending=pending,
            victims=tuple(m.worker_id for m in members),
            spare=await self._num_spare(),
        )

    async def scale_up(self, role: Role, shape: str) -> str:
        if shape != self.shape_of(role):
            raise InvalidRequest(
                f"no {shape!r} here; {role.name.lower()} workers are {self.shape_of(role)!r}", field="shape"
            )
        if not await self._num_spare():
            raise Unavailable("this machine has no room for one more worker", retry_after_s=REVIVE_S, field="shape")
        worker_id = self._controller.fleet.new_name(role)
        self._controller.expect(worker_id, role, shape, extra=True)
        self._begin(self._controller.fleet.get(worker_id))
        return worker_id

    def can_end(self, worker_id: str) -> bool:
        return True

    async def scale_down(self, worker_id: str) -> None:
        await self._actors.end(worker_id)

    def shape_of(self, role: Role) -> str:
        return self._make_config.shape_of(role)

    async def _num_spare(self) -> int:
        """Raises: Unavailable."""
        num_places = await self._actors.num_places()
        num_taken = len(self._controller.fleet.members())  # one that is only asked for has its place, too
        return max(0, num_places - num_taken)


def _is_lost(member: Member) -> bool:
    """And to be brought back: not one that never came up although nobody configured it, nor one that is to end."""
    never_came = member.extra and not member.epoch
    return member.state == FAILED and not never_came and member.after_drain is not AfterDrain.END


def sizes_of(cluster: ClusterConfig) -> dict[Role, int]:
    """Of the configured pools."""
    return {Role.PREFILL: cluster.prefill, Role.DECODE: cluster.decode, Role.BOTH: cluster.both}


def shared_out(cluster: ClusterConfig, num_cores: int) -> Callable[[Role], int]:
    """Cores of one host among its configured workers."""
    each = max(1, num_cores // max(1, sum(sizes_of(cluster).values())))
    return lambda role: each


class WorkerConfigs:
    """What the controller tells each worker to be."""

    def __init__(self, cluster: ClusterConfig, control_address: str, cores_of: Callable[[Role], int]) -> None:
        """`cores_of`: what one worker computes with where engine.num_threads leaves it open."""
        self._cluster = cluster
        self._control_address = control_address
        self._cores_of = cores_of

    def __call__(self, worker_id: str, role: Role) -> WorkerConfig:
        cluster, name = self._cluster, role.name.lower()
        num_threads = cluster.engine.num_threads or self._cores_of(role)
        return WorkerConfig(
            worker_id=worker_id,
            role=name,
            host=cluster.controller.host,
            control_address=self._control_address,
            tls_dir=cluster.tls_dir_of(Part.WORKER),
            heartbeat_s=cluster.router.heartbeat_s,
            missed_heartbeats=cluster.router.missed_heartbeats,
            start_timeout_s=cluster.controller.worker_start_timeout_s,
            model=cluster.model,
            engine=dataclasses.replace(cluster.engine_of(name), num_threads=num_threads),
            kv=cluster.kv,
            emulation=cluster.emulation,
            tracing=cluster.tracing,
            log_level=cluster.controller.log_level,
        )

    def shape_of(self, role: Role) -> str:
        """Its hardware, and how its KV is kept where that depends on the role: a worker does not change that when it flips."""
        cluster = self._cluster
        ranks = cluster.engine.tensor_parallel_size
        cpus = "cpu" if ranks == 1 else f"{ranks}xcpu"
        hardware = f"{cluster.emulation.tp}x{cluster.emulation.gpu}" if cluster.emulation.gpu else cpus
        dtype = cluster.engine_of(role.name.lower()).kv_dtype(cluster.model.dtype)
        return hardware if cluster.decode_kv_cache_dtype == "auto" else f"{hardware}-{dtype}"
