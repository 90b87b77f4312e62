"""Runs a trace through a deployment and says what came of it.

The seam for what changes a fleet while it runs: `Simulation.at` adds an event of anybody's, told the instant and returning what
follows. A controller is such an event that puts itself in again; workers and router are what it looks at.
Memory is that of what is open at one moment: rows are read as they arrive, calls forgotten as they end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from baton.request import Role
from baton.slo import DEFAULT_CLASSES, SLO
from bench.sim.call import Call
from bench.sim.clock import Act, Clock, Event
from bench.sim.deployment import Deployment
from bench.sim.measures import ClassMeasure, measures
from bench.sim.router import SimRouter
from bench.sim.worker import SimWorker
from bench.traces import TraceRow
from router.admission import Bounds, Shed

# No bound of a laptop's router is to be measured here; the forecast decides. As bench/overload.py.
BOUNDS = Bounds(max_inflight=100_000, max_queued=100_000, max_queued_tokens=1 << 40, window_s=0.01)
INTERACTIVE = DEFAULT_CLASSES[0]


@dataclass(frozen=True, slots=True)
class Mix:
    """SLO classes and the share of calls that each has."""

    classes: tuple[SLO, ...] = (INTERACTIVE,)
    shares: tuple[float, ...] = (1.0,)

    def draw(self, rng: random.Random) -> SLO:
        return self.classes[0] if len(self.classes) == 1 else rng.choices(self.classes, self.shares)[0]


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """What one worker did."""

    worker_id: str
    role: Role
    busy_share: float  # of the run's time
    num_served: int
    num_steps: int
    num_preemptions: int
    sent_bytes: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run. Measured: what came after the warm-up and before the last arrival."""

    classes: Sequence[ClassMeasure]
    workers: Sequence[WorkerUse]
    num_gpus: int
    measured_s: float
    run_s: float  # until the last call ended
    num_events: int

    @property
    def num_calls(self) -> int:
        return sum(measure.num for measure in self.classes)

    @property
    def goodput(self) -> float:
        """Calls per second within their targets."""
        met = sum((measure.attained.mean or 0.0) * measure.num for measure in self.classes)
        return met / self.measured_s if self.measured_s else 0.0

    @property
    def attainment(self) -> float:
        return self.goodput * self.measured_s / self.num_calls if self.num_calls else 0.0

    @property
    def gpu_hours(self) -> float:
        return self.num_gpus * self.run_s / 3_600


class Simulation:
    def __init__(
        self,
        deployment: Deployment,
        mix: Mix | None = None,
        *,
        seed: int = 0,
        warm_up_s: float = 0.0,
        bounds: Bounds | None = BOUNDS,
        fast: bool = True,
        on_call: Callable[[Call], None] | None = None,
    ) -> None:
        """`bounds`: None = no admission. `on_call` is told of every call when it is over."""
        self.clock = Clock()
        self.num_over = 0
        self._deployment = deployment
        self._mix = mix or Mix()
        self._warm_up_s = warm_up_s
        self._on_call = on_call
        self._rng = random.Random(f"{seed}/classes")
        self._measures = measures(self._mix.classes)
        self._rows: Iterator[TraceRow] = iter(())
        self._is_fed = True
        self._last_arrival_s = 0.0
        self.workers = self._make_workers(fast)
        self.router = SimRouter(
            self.workers,
            bounds=bounds,
            token_bytes=deployment.token_bytes,
            local_prefill_tokens=deployment.local_prefill_tokens,
            on_over=self._on_over,
        )

    def at(self, at_s: float, act: Act) -> None:
        self.clock.add((Event(at_s, act),))

    def run(self, rows: Iterable[TraceRow]) -> Outcome:
        """Until every call of `rows`, which come in order, is over."""
        self._rows, self._is_fed = iter(rows), False
        self.clock.add(self._next_arrival())
        self.clock.run(until=self._is_over)
        assert not self.router.num_open, "a call was forgotten"
        return self.outcome()

    def _is_over(self) -> bool:
        return self._is_fed and not self.router.num_open

    def _next_arrival(self) -> list[Event]:
        row = next(self._rows, None)
        if row is None:
            self._is_fed = True
            return []
        return [Event(row.at_s, partial(self._arrive, row))]

    def _arrive(self, row: TraceRow, now_s: float) -> Iterable[Event]:
        self._last_arrival_s = now_s
        return [*self.router.on_arrival(row, self._mix.draw(self._rng), now_s), *self._next_arrival()]

    def _on_over(self, call: Call, shed: Shed | None) -> None:
        self.num_over += 1
        if call.row.at_s >= self._warm_up_s:
            self._measures[call.slo.name].add(call, was_shed=shed is not None)
        if self._on_call is not None:
            self._on_call(call)

    def _make_workers(self, fast: bool) -> list[SimWorker]:
        deployment, numbers = self._deployment, dict.fromkeys(Role, 0)
        shapes = {role: deployment.shape(role) for role in set(deployment.layout.roles)}
        workers = []
        for role in deployment.layout.roles:
            worker_id = f"{role.name.lower()}-{numbers[role]}"
            numbers[role] += 1
            workers.append(
                SimWorker(
                    worker_id,
                    role,
                    shapes[role],
                    self,
                    block_bytes=deployment.token_bytes * deployment.engine.block_size,
                    nic_bytes_per_s=deployment.nic_bytes_per_s,
                    classes=self._mix.classes,
                    fast=fast,
                )
            )
        peers = {worker.worker_id: worker for worker in workers if worker.role is not Role.PREFILL}
        for worker in workers:
            worker.peers = peers
        return workers

    # The router is made after the workers and told by them.

    def on_first_token(self, call: Call, now_s: float) -> Iterable[Event]:
        return self.router.on_first_token(call, now_s)

    def on_end(self, call: Call, now_s: float) -> Iterable[Event]:
        return self.router.on_end(call, now_s)

    def outcome(self) -> Outcome:
        """Of what is over by now."""
        run_s = self.clock.now_s
        return Outcome(
            classes=[*self._measures.values()],
            workers=[_use(worker, run_s) for worker in self.workers],
            num_gpus=self._deployment.num_gpus,
            measured_s=max(0.0, self._last_arrival_s - self._warm_up_s),
            run_s=run_s,
            num_events=self.clock.num_handled,
        )


def _use(worker: SimWorker, run_s: float) -> WorkerUse:
    engine = worker.engine
    return WorkerUse(
        worker.worker_id,
        worker.role,
        engine.busy_s / run_s if run_s else 0.0,
        worker.num_served,
        engine.num_steps,
        engine.scheduler.totals.num_preemptions,
        worker.sent_bytes,
    )
