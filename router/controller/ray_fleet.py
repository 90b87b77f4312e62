"""The workers of this machine as Ray actors: started, brought back when lost, ended. The local PoolScaler.

    start     all that the fleet names; a new fleet is the configured pools
    revive    for ever: lost ones again. Ray restarts killed actors itself, but gives up where a restart raised
    scale_up, scale_down    one more, one less (pool_scaler.py)
    stop      all of them, also those that are only being started

A configured worker that does not come up is tried again for ever, one that was asked for at run time is not: that one fails, and
whoever asked gives it up (levers.py). Ray's calls block and run on threads: starts, which may wait for their deadline, on other
ones than the rest. Event loop only otherwise.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from baton.config import ClusterConfig, WorkerConfig
from baton.errors import BatonError, InvalidRequest, Unavailable
from baton.log import get_log
from baton.peer_trust import Part
from baton.request import Role
from router.controller.controller import Controller
from router.controller.fleet_state import FAILED, STARTING, AfterDrain, Member
from router.controller.pool_scaler import PoolSize
from router.controller.pools import Placement, RayPools

log = get_log("controller.ray")

LOGS_DIR = "logs"  # in the run folder
_REVIVE_S = 15.0  # longer than Ray's own restart of a killed actor (1-9 s), so that the two do not race
_MAX_STARTS = 32  # at once; more wait for their turn. A host holds far fewer workers
_MAX_CALLS = 8  # of the short ones: a kill takes 3 s at most
_ASK_S = 5.0  # Ray answers in milliseconds; a worker that is asked to stop has 3 s

Answer = TypeVar("Answer")


class Pools(Protocol):
    """What is asked of Ray: pools.RayPools, and stand-ins in tests. Its methods block."""

    def start(self, config: WorkerConfig) -> str: ...
    def kill(self, worker_id: str) -> None: ...
    def num_places(self) -> int: ...
    def check_fits(self, num_workers: int) -> None: ...
    def close(self) -> None: ...


def connect(cluster: ClusterConfig) -> Pools:
    """Raises: ConnectionError: Ray is away."""
    config = cluster.controller
    log_dir = str(Path(config.run_dir, LOGS_DIR))
    placement = Placement(config.worker_num_cpus, config.worker_server, config.worker_start_timeout_s, log_dir)
    return RayPools(config.ray_address, config.ray_node_dir, placement)


class RayFleet:
    """Create it inside the event loop, before workers can announce themselves."""

    def __init__(
        self,
        controller: Controller,
        cluster: ClusterConfig,
        control_address: str,
        connect: Callable[[ClusterConfig], Pools] = connect,
    ) -> None:
        self._controller = controller
        self._cluster = cluster
        self._connect = connect
        self._make_config = WorkerConfigs(cluster, control_address, os.cpu_count() or 1)
        self._starts = ThreadPoolExecutor(_MAX_STARTS, thread_name_prefix="ray-start")
        self._calls = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="ray")
        self._starting: set[asyncio.Task[None]] = set()
        self._open: dict[str, asyncio.Future[Any]] = {}  # questions that Ray has not answered yet
        self._pools: Pools | None = None
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
        await self._start()
        while True:
            await asyncio.sleep(_REVIVE_S)
            if self._pools is None:
                await self._start()
            else:
                lost = [member for member in self._controller.fleet.members() if _is_lost(member)]
                await asyncio.gather(*(self._start_one(member) for member in lost))

    async def stop(self) -> None:
        """End all workers. Nothing may be asked for any more."""
        if self._pools is not None:
            members = self._controller.fleet.members()
            await asyncio.gather(*(self._in_thread(self._pools.kill, member.worker_id) for member in members))
            await self._in_thread(self._pools.close)
        for task in self._starting:
            task.cancel()
        for threads in (self._starts, self._calls):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _start(self) -> None:
        """Failures end as `failed` members, each with its reason."""
        members = self._controller.fleet.members()
        try:
            pools = await self._in_thread(self._connect, self._cluster)
            await self._in_thread(pools.check_fits, len(members))
            self._pools = pools
        except (BatonError, ConnectionError) as error:
            log.error("ray_failed", reason=str(error))
            for member in members:
                self._controller.start_failed(member.worker_id, 0, str(error))
            return
        await asyncio.gather(*(self._start_one(member) for member in members))

    async def _start_one(self, member: Member) -> None:
        """Its actor, made or found. A process that announces itself meanwhile has not failed."""
        assert self._pools is not None
        config = self._make_config(member.worker_id, member.role)
        try:
            await asyncio.get_running_loop().run_in_executor(self._starts, self._pools.start, config)
        except BatonError as error:
            self._controller.start_failed(member.worker_id, member.epoch, error.message)

    async def _in_thread(self, call: Callable[..., Answer], *args: object) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._calls, call, *args)

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
            raise Unavailable("this machine has no room for one more worker", retry_after_s=_REVIVE_S, field="shape")
        worker_id = self._controller.fleet.new_name(role)
        self._controller.expect(worker_id, role, shape, extra=True)
        task = asyncio.create_task(self._start_one(self._controller.fleet.get(worker_id)), name=f"start {worker_id}")
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        return worker_id

    async def scale_down(self, worker_id: str) -> None:
        await self._asked(f"kill {worker_id}", lambda pools: pools.kill(worker_id))

    def shape_of(self, role: Role) -> str:
        return self._make_config.shape_of(role)

    async def _num_spare(self) -> int:
        """Raises: Unavailable."""
        num_places = await self._asked("num_places", lambda pools: pools.num_places())
        num_taken = len(self._controller.fleet.members())  # one that is only asked for has its place, too
        return max(0, num_places - num_taken)

    async def _asked(self, what: str, call: Callable[[Pools], Answer]) -> Answer:
        """What Ray answers. It hangs while its head is away, so the same is not asked again before it has answered.

        Raises:
            Unavailable: it is away, or does not answer in time.
        """
        if (pools := self._pools) is None:
            raise Unavailable("Ray is away", retry_after_s=_REVIVE_S)
        if (asked := self._open.get(what)) is None:
            asked = self._open[what] = asyncio.get_running_loop().run_in_executor(self._calls, call, pools)
            asked.add_done_callback(lambda _: self._answered(what))
        try:
            async with asyncio.timeout(_ASK_S):
                answer: Answer = await asyncio.shield(asked)
                return answer
        except TimeoutError:
            raise Unavailable(f"Ray did not answer within {_ASK_S:g} s", retry_after_s=_REVIVE_S) from None

    def _answered(self, what: str) -> None:
        asked = self._open.pop(what)
        if not asked.cancelled() and (error := asked.exception()):  # nobody may be waiting any more
            log.warning("ray_refused", what=what, reason=str(error))


def _is_lost(member: Member) -> bool:
    """And to be brought back: not one that never came up although nobody configured it, nor one that is to end."""
    never_came = member.extra and not member.epoch
    return member.state == FAILED and not never_came and member.after_drain is not AfterDrain.END


def sizes_of(cluster: ClusterConfig) -> dict[Role, int]:
    """Of the configured pools."""
    return {Role.PREFILL: cluster.prefill, Role.DECODE: cluster.decode, Role.BOTH: cluster.both}


class WorkerConfigs:
    """What the controller tells each worker of this host to be."""

    def __init__(self, cluster: ClusterConfig, control_address: str, num_cores: int) -> None:
        """Cores are shared out among the configured workers where engine.num_threads leaves it open."""
        num_workers = sum(sizes_of(cluster).values())
        self._cluster = cluster
        self._control_address = control_address
        self._num_threads = cluster.engine.num_threads or max(1, num_cores // max(1, num_workers))

    def __call__(self, worker_id: str, role: Role) -> WorkerConfig:
        cluster, name = self._cluster, role.name.lower()
        return WorkerConfig(
            worker_id=worker_id,
            role=name,
            host=cluster.controller.host,
            control_address=self._control_address,
            tls_dir=cluster.tls_dir_of(Part.WORKER),
            heartbeat_s=cluster.router.heartbeat_s,
            missed_heartbeats=cluster.router.missed_heartbeats,
            model=cluster.model,
            engine=dataclasses.replace(cluster.engine_of(name), num_threads=self._num_threads),
            kv=cluster.kv,
            emulation=cluster.emulation,
            log_level=cluster.controller.log_level,
        )

    def shape_of(self, role: Role) -> str:
        """Its hardware, and how its KV is kept where that depends on the role: a worker does not change that when it flips."""
        cluster = self._cluster
        hardware = f"{cluster.emulation.tp}x{cluster.emulation.gpu}" if cluster.emulation.gpu else "cpu"
        dtype = cluster.engine_of(role.name.lower()).kv_dtype(cluster.model.dtype)
        return hardware if cluster.decode_kv_cache_dtype == "auto" else f"{hardware}-{dtype}"
