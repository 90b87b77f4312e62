"""The faults of a soak: drawn from a seed, at random moments, until told to be calm.

Mortal workers are killed (also while they are stopped or still starting) and come back a moment later at the same or another
address, with another transport and a roomy or a tiny pool; any worker may be stopped for a while, and any gRPC connection to
any worker cut. Event loop only.
"""

from __future__ import annotations

import asyncio
import enum
import random
import signal
from collections import Counter
from collections.abc import Coroutine, Mapping

from tests.soak.soak_cluster import SoakCluster, SoakWorker, Start

ROOMY_BLOCKS = 512  # 8,192 tokens: a dozen calls of the longest kind
TINY_BLOCKS = 48  # 768 tokens: one call of the longest kind, so that decode is full most of the time
SHORT_STOP_S = (0.1, 2.0)  # around the router's patience of 1.5 s
LONG_STOP_S = (5.5, 10.0)  # past the lease of 5 s
LONG_STOP_SHARE = 0.15
DOWN_S = (0.0, 1.0)  # between a death and the start of the next process


class Fault(enum.Enum):
    KILL = "kill"
    STOP = "stop"
    CUT = "cut"


SHARES = {Fault.KILL: 60, Fault.STOP: 20, Fault.CUT: 20}


class Faults:
    """Strikes about every `mean_gap_s` between `resume` and `calm`."""

    def __init__(
        self, cluster: SoakCluster, seed: int, mean_gap_s: float, shares: Mapping[Fault, float] = SHARES
    ) -> None:
        self.counts: Counter[Fault] = Counter()
        self._cluster = cluster
        self._rng = random.Random(f"{seed}/faults")
        self._mean_gap_s = mean_gap_s
        self._shares = shares
        self._storm: asyncio.Task[None] | None = None
        self._mending: dict[SoakWorker, asyncio.Task[None]] = {}  # what ends a worker's last fault

    def resume(self) -> None:
        self._storm = asyncio.create_task(self._run(), name="faults")

    async def calm(self) -> None:
        """Return once no fault lasts: everybody runs, or is starting."""
        if self._storm is not None:
            self._storm.cancel()
            await asyncio.wait((self._storm,))
            if not self._storm.cancelled():
                self._storm.result()
        for mending in list(self._mending.values()):
            await asyncio.wait((mending,))
            if not mending.cancelled():
                mending.result()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / self._mean_gap_s))
            fault = self._rng.choices(list(self._shares), list(self._shares.values()))[0]
            self.counts[fault] += self._strike(fault)

    def _strike(self, fault: Fault) -> bool:
        """Returns whether there was somebody to strike."""
        fitting = [worker for worker in self._cluster.workers.values() if self._fits(fault, worker)]
        if not fitting:
            return False
        worker = self._rng.choice(fitting)
        if fault is Fault.CUT:
            return worker.proxy.cut(self._rng)
        if fault is Fault.KILL:
            self._cluster.kill_worker(worker)
            mending = self._restart(worker)
        else:
            worker.send_signal(signal.SIGSTOP)
            mending = self._continue(worker)
        if earlier := self._mending.get(worker):
            earlier.cancel()
        self._mending[worker] = asyncio.create_task(mending, name=f"mend {worker.member.worker_id}")
        return True

    def _fits(self, fault: Fault, worker: SoakWorker) -> bool:
        is_struck = worker in self._mending and not self._mending[worker].done()
        return worker.alive and (worker.member.mortal if fault is Fault.KILL else fault is Fault.CUT or not is_struck)

    def _restart(self, worker: SoakWorker) -> Coroutine[None, None, None]:
        start = Start(
            num_blocks=self._rng.choice((ROOMY_BLOCKS, TINY_BLOCKS)),
            ucx_tls=self._rng.choice(("all", "tcp")),
            new_address=self._rng.random() < 0.5,
        )
        down_s = self._rng.uniform(*DOWN_S)

        async def restart() -> None:
            await asyncio.sleep(down_s)
            await self._cluster.start_worker(worker, start)

        return restart()

    def _continue(self, worker: SoakWorker) -> Coroutine[None, None, None]:
        is_long = self._rng.random() < LONG_STOP_SHARE
        stopped_s = self._rng.uniform(*(LONG_STOP_S if is_long else SHORT_STOP_S))

        async def go_on() -> None:
            await asyncio.sleep(stopped_s)
            worker.send_signal(signal.SIGCONT)

        return go_on()
