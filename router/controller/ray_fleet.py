"""The workers of this machine as Ray actors: started, brought back when lost, ended. The local PoolScaler.

    start     all that the fleet names; a new fleet is the configured pools
    revive    for ever: lost ones again. Ray restarts killed actors itself, but gives up where a restart raised
    scale_up, scale_down    one more, one less (pool_scaler.py)
    stop      all of them, also those that are only being started

A configured worker that does not come up is tried again for ever, one that was asked for at run time is not: that one fails, and
whoever asked gives it up (levers.py). No start waits for another one, and no worker is started twice at once. Ray's calls block
and run on threads: starts, which may wait for their deadline, on other ones than the rest. Event loop only otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
REVIVE_S = 15.0  # longer than Ray's own restart of a killed actor (1-9 s), so that the two do not race
_MAX_STARTS = 32  # at once; more wait for their turn. A host holds far fewer workers
_MAX_CALLS = 8  # of the short ones: a kill takes 3 s at most
_ASK_S = 5.0  # Ray answers in milliseconds; a worker that is asked to stop has 3 s

Answer = TypeVar("Answer")


class Pools(Protocol):
    """What is asked of Ray: pools.RayPools, and stand-ins in tests. Its methods block."""

    def start(self, config: WorkerConfig) -> str: ...
    def kill(self, worker_id: str, *, is_starting: bool) -> None: ...
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
        self._starting: dict[str, asyncio.Task[None]] = {}  # by worker
        self._ending: set[str] = set()  # workers that are being killed: they are not started again meanwhile
        self._is_stopping = False
        self._open: dict[str, asyncio.Task[Any]] = {}  # questions that Ray has not answered yet
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
        while True:
            if self._pools is None:
                await self._start()
            else:
                for member in self._controller.fleet.members():
                    if _is_lost(member):
                        self._begin(member)
            await asyncio.sleep(REVIVE_S)

    async def stop(self) -> None:
        """End all workers. What is asked for from now on is refused."""
        self._is_stopping = True
        if (pools := self._pools) is not None:
            members = self._controller.fleet.members()
            await asyncio.gather(*(self._end(pools, member.worker_id) for member in members))
            with contextlib.suppress(BatonError):
                await self._ask(self._calls, "close", pools.close)
        for task in list(self._starting.values()):
            task.cancel()
        for threads in (self._starts, self._calls):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _start(self) -> None:
        """Failures end as `failed` members, each with its reason."""
        members = self._controller.fleet.members()
        try:
            self._pools = await self._ask(self._calls, "connect", lambda: self._connected(len(members)))
        except BatonError as error:
            log.error("ray_failed", reason=str(error))
            for member in members:
                self._controller.start_failed(member.worker_id, 0, str(error))
            return
        for member in members:
            self._begin(member)

    def _connected(self, num_workers: int) -> Pools:
        """On a thread. Ray takes one connection at a time, so one that is of no use is closed."""
        pools = self._connect(self._cluster)
        try:
            pools.check_fits(num_workers)
        except BaseException:
            pools.close()
            raise
        return pools

    def _begin(self, member: Member) -> None:
        """Start it beside all others, unless it is being started or ended already."""
        worker_id = member.worker_id
        if worker_id not in self._starting and worker_id not in self._ending:
            task = self._starting[worker_id] = asyncio.create_task(self._start_one(member), name=f"start {worker_id}")
            task.add_done_callback(partial(self._started, member))

    def _started(self, member: Member, task: asyncio.Task[None]) -> None:
        """Nobody awaits a start: what it ran into is told here."""
        del self._starting[member.worker_id]
        if not task.cancelled() and (error := task.exception()):
            log.error("start_raised", worker=member.worker_id, reason=str(error), error=type(error).__name__)
            self._controller.start_failed(member.worker_id, member.epoch, f"its start failed: {error}")

    async def _start_one(self, member: Member) -> None:
        """Its actor, made or found. A process that announces itself meanwhile has not failed."""
        if (pools := self._pools) is None or self._is_stopping:
            return
        config = self._make_config(member.worker_id, member.role)
        try:
            await self._ask(self._starts, f"start {member.worker_id}", lambda: pools.start(config))
        except BatonError as error:
            self._controller.start_failed(member.worker_id, member.epoch, error.message)

    async def _end(self, pools: Pools, worker_id: str) -> None:
        """As far as Ray allows; its refusal is in the log."""
        is_starting = worker_id in self._starting
        with contextlib.suppress(BatonError):
            await self._ask(self._calls, f"kill {worker_id}", lambda: pools.kill(worker_id, is_starting=is_starting))

    async def _ask(self, threads: ThreadPoolExecutor, what: str, call: Callable[[], Answer]) -> Answer:
        """Raises: BatonError: as the call says; Unavailable: whatever else Ray raised."""
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, call)
        except BatonError:
            raise
        except ConnectionError as error:
            raise Unavailable(str(error), retry_after_s=REVIVE_S) from error
        except Exception as error:  # the RPC boundary: errors of Ray are of many classes, RuntimeError among them
            log.exception("ray_raised", what=what)
            raise Unavailable(f"Ray failed: {error or type(error).__name__}", retry_after_s=REVIVE_S) from error

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

    async def scale_down(self, worker_id: str) -> None:
        is_starting = worker_id in self._starting
        self._ending.add(worker_id)
        try:
            await self._asked(f"kill {worker_id}", lambda pools: pools.kill(worker_id, is_starting=is_starting))
        finally:
            self._ending.discard(worker_id)

    def shape_of(self, role: Role) -> str:
        return self._make_config.shape_of(role)

    async def _num_spare(self) -> int:
        """Raises: Unavailable."""
        num_places = await self._asked("num_places", lambda pools: pools.num_places())
        if self._is_stopping:  # while Ray was asked
            raise Unavailable("the controller stops")
        num_taken = len(self._controller.fleet.members())  # one that is only asked for has its place, too
        return max(0, num_places - num_taken)

    async def _asked(self, what: str, call: Callable[[Pools], Answer]) -> Answer:
        """What Ray answers. It hangs while its head is away, so the same is not asked again before it has answered.

        Raises:
            Unavailable: it is away, fails, or does not answer in time; or the controller stops.
        """
        if self._is_stopping:
            raise Unavailable("the controller stops")
        if (pools := self._pools) is None:
            raise Unavailable("Ray is away", retry_after_s=REVIVE_S)
        if (asked := self._open.get(what)) is None:
            asked = self._open[what] = asyncio.create_task(self._ask(self._calls, what, lambda: call(pools)), name=what)
            asked.add_done_callback(lambda _: self._answered(what))
        try:
            async with asyncio.timeout(_ASK_S):
                answer: Answer = await asyncio.shield(asked)
                return answer
        except TimeoutError:
            raise Unavailable(f"Ray did not answer within {_ASK_S:g} s", retry_after_s=REVIVE_S) from None

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
