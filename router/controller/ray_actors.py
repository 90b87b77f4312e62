"""Worker actors as the event loop deals with them: begun, ended, counted. Ray's calls block and run on threads here.

No start waits for another one, and no worker is started twice at once; one that is being ended is not begun. Ray hangs while its
head is away, so the same question is not asked again before it is answered, and nobody waits for an answer longer than _ASK_S.
Whatever Ray raises is Unavailable. After `stop` everything is refused. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from baton.config import ClusterConfig, WorkerConfig
from baton.errors import BatonError, Unavailable
from baton.log import get_log
from router.controller.controller import Controller
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


Connect = Callable[[ClusterConfig], Pools]


def connect(cluster: ClusterConfig) -> Pools:
    """Raises: ConnectionError: Ray is away."""
    config, kubernetes = cluster.controller, cluster.kubernetes
    placement = Placement(
        config.worker_num_cpus,
        config.worker_server,
        config.worker_start_timeout_s,
        "" if kubernetes.fullname else str(Path(config.run_dir, LOGS_DIR)),  # a pod's log is what it prints
        float(kubernetes.gpus_per_worker) if kubernetes.fullname else 0.0,
        "pod:" if kubernetes.fullname else "",
    )
    return RayPools(config.ray_address, config.ray_node_dir, placement)


class RayActors:
    """Of one controller. Create it inside the event loop."""

    def __init__(self, controller: Controller, cluster: ClusterConfig, connect: Connect) -> None:
        self._controller = controller
        self._cluster = cluster
        self._connect = connect
        self._starts = ThreadPoolExecutor(_MAX_STARTS, thread_name_prefix="ray-start")
        self._calls = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="ray")
        self._starting: dict[str, asyncio.Task[None]] = {}  # by worker
        self._ending: set[str] = set()  # workers that are being killed: they are not started again meanwhile
        self._open: dict[str, asyncio.Task[Any]] = {}  # questions that Ray has not answered yet
        self._pools: Pools | None = None
        self.is_stopping = False

    @property
    def is_connected(self) -> bool:
        return self._pools is not None

    async def connect(self, num_workers: int = 0) -> None:
        """`num_workers`: that have to fit. Raises: BatonError: they do not; Unavailable: Ray is away."""
        self._pools = await self._ask(self._calls, "connect", lambda: self._connected(num_workers))

    def _connected(self, num_workers: int) -> Pools:
        """On a thread. Ray takes one connection at a time, so one that is of no use is closed."""
        pools = self._connect(self._cluster)
        try:
            if num_workers:
                pools.check_fits(num_workers)
        except BaseException:
            pools.close()
            raise
        return pools

    def is_starting(self, worker_id: str) -> bool:
        return worker_id in self._starting

    def begin(self, worker_id: str, config: Callable[[], WorkerConfig], *, is_fresh: bool = False) -> None:
        """Start it beside all others, unless it is being started or ended already. `is_fresh`: what had its name before is ended
        first, where nobody would do so otherwise. A start that fails, whatever of it, is a failed member with the reason."""
        if worker_id not in self._starting and worker_id not in self._ending:
            epoch = self._controller.fleet.get(worker_id).epoch
            task = asyncio.create_task(self._start(worker_id, config, epoch, is_fresh), name=f"start {worker_id}")
            self._starting[worker_id] = task
            task.add_done_callback(partial(self._started, worker_id, epoch))

    async def end(self, worker_id: str) -> None:
        """For good, started or not. Raises: Unavailable."""
        is_starting = worker_id in self._starting
        self._ending.add(worker_id)
        try:
            await self._asked(f"kill {worker_id}", lambda pools: pools.kill(worker_id, is_starting=is_starting))
        finally:
            self._ending.discard(worker_id)

    async def num_places(self) -> int:
        """How many workers fit in all. Raises: Unavailable."""
        num_places = await self._asked("num_places", lambda pools: pools.num_places())
        self._check_goes_on()  # while Ray was asked
        return num_places

    async def stop(self, worker_ids: Iterable[str]) -> None:
        """End these, as far as Ray allows, its refusals are in the log; leave Ray. What is asked for from now on is refused."""
        self.is_stopping = True
        if (pools := self._pools) is not None:
            await asyncio.gather(*(self._kill(pools, worker_id) for worker_id in worker_ids))
            with contextlib.suppress(BatonError):
                await self._ask(self._calls, "close", pools.close)
        for task in list(self._starting.values()):
            task.cancel()
        for threads in (self._starts, self._calls):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _start(self, worker_id: str, config: Callable[[], WorkerConfig], epoch: int, is_fresh: bool) -> None:
        """Its actor, made or found. A process that announces itself meanwhile, under another epoch, has not failed."""
        if (pools := self._pools) is None or self.is_stopping:
            return
        resolved = config()
        try:
            if is_fresh:
                await self._ask(self._calls, f"kill {worker_id}", lambda: pools.kill(worker_id, is_starting=False))
            await self._ask(self._starts, f"start {worker_id}", lambda: pools.start(resolved))
        except BatonError as error:
            self._controller.start_failed(worker_id, epoch, error.message)

    def _started(self, worker_id: str, epoch: int, task: asyncio.Task[None]) -> None:
        """Nobody awaits a start: what it ran into is told here."""
        del self._starting[worker_id]
        if not task.cancelled() and (error := task.exception()):
            log.error("start_raised", worker=worker_id, reason=str(error), error=type(error).__name__)
            self._controller.start_failed(worker_id, epoch, f"its start failed: {error}")

    async def _kill(self, pools: Pools, worker_id: str) -> None:
        is_starting = worker_id in self._starting
        with contextlib.suppress(BatonError):
            await self._ask(self._calls, f"kill {worker_id}", lambda: pools.kill(worker_id, is_starting=is_starting))

    def _check_goes_on(self) -> None:
        """Raises: Unavailable."""
        if self.is_stopping:
            raise Unavailable("the controller stops")

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

    async def _asked(self, what: str, call: Callable[[Pools], Answer]) -> Answer:
        """What Ray answers.

        Raises:
            Unavailable: it is away, fails, or does not answer in time; or the controller stops.
        """
        self._check_goes_on()
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
