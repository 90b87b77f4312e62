"""Runs a trace through a deployment and says what came of it.

The seam for what changes a fleet while it runs: `Simulation.at` adds an event of anybody's, told the instant and returning what
follows. A controller is such an event that puts itself in again (bench/sim/control.py); `fleet`, `router` and `set_slo` are
what it acts on.
Memory is that of what is open at one moment: rows are read as they arrive, calls forgotten as they end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from baton.errors import InvalidRequest
from baton.request import Role
from baton.slo import DEFAULT_CLASSES, SLO
from bench.sim.call import Attempt, Call
from bench.sim.clock import Act, Clock, Event
from bench.sim.delays import Delays
from bench.sim.deployment import Deployment
from bench.sim.fleet import Fleet
from bench.sim.measures import ClassMeasure, measures
from bench.sim.router import MostTokens, SimRouter, Watcher
from bench.sim.worker import SimWorker, WorkerUse
from bench.traces import TraceRow
from router.admission import Bounds, Shed

# No bound of a laptop's router is to be measured here; the forecast decides. As bench/overload.py.
BOUNDS = Bounds(max_inflight=100_000, max_queued=100_000, max_queued_tokens=1 << 40)
INTERACTIVE = DEFAULT_CLASSES[0]


@dataclass(frozen=True, slots=True)
class Mix:
    """SLO classes and the share of calls that each has."""

    classes: tuple[SLO, ...] = (INTERACTIVE,)
    shares: tuple[float, ...] = (1.0,)

    @property
    def itl_p99_ms(self) -> float:
        """The tightest; 0: no class limits it."""
        return min((slo.itl_p99_ms for slo in self.classes if slo.itl_p99_ms is not None), default=0.0)

    def draw(self, rng: random.Random) -> SLO:
        return self.classes[0] if len(self.classes) == 1 else rng.choices(self.classes, self.shares)[0]

    def with_class(self, slo: SLO) -> Mix:
        """With other targets of one class. Raises: InvalidRequest: there is none of that name."""
        if slo.name not in {known.name for known in self.classes}:
            raise InvalidRequest(f"there is no class {slo.name}", field="name")
        return replace(self, classes=tuple(slo if known.name == slo.name else known for known in self.classes))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run. Measured: what came after the warm-up and before the last arrival."""

    classes: Sequence[ClassMeasure]
    workers: Sequence[WorkerUse]  # every process that ever was
    gpu_hours: float  # of every worker from its creation until it was gone
    usd: float  # of these
    num_moved: int  # calls that went on elsewhere when a worker was lost
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
    def num_gpus(self) -> float:
        """On average."""
        return 3_600 * self.gpu_hours / self.run_s if self.run_s else 0.0


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
        delays: Delays | None = None,
        on_call: Callable[[Call], None] | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """`bounds`: None = no admission. `on_call` is told of every call when it is over, `watcher` of each at every turn."""
        self.clock = Clock()
        self.num_over = 0
        self.mix = mix or Mix()
        self._warm_up_s = warm_up_s
        self._on_call = on_call
        self._watcher = watcher
        self._rng = random.Random(f"{seed}/classes")
        self._measures = measures(self.mix.classes)
        self._rows: Iterator[TraceRow] = iter(())
        self._is_fed = True
        self._last_arrival_s = 0.0
        self._num_moved = 0
        self.router = SimRouter(
            bounds=bounds,
            token_bytes=deployment.token_bytes,
            caches=deployment.engine.prefix_cache,
            local_prefill_tokens=deployment.local_prefill_tokens,
            most_tokens=_most_tokens(deployment),
            watcher=self,
        )
        self.router.itl_p99_ms = self.mix.itl_p99_ms
        self.fleet = Fleet(deployment, self.router, self, delays=delays or Delays(), seed=seed, fast=fast)

    @property
    def workers(self) -> list[SimWorker]:
        return self.fleet.workers()

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
        return [*self.router.on_arrival(row, self.mix.draw(self._rng), now_s), *self._next_arrival()]

    def set_slo(self, slo: SLO) -> None:
        """Other targets of one class, for the calls that come from now on. Raises: InvalidRequest: there is no such class."""
        self.mix = self.mix.with_class(slo)
        self.router.itl_p99_ms = self.mix.itl_p99_ms
        self._measures[slo.name].slo = slo

    # What the router says of calls

    def on_arrival(self, call: Call, now_s: float) -> None:
        if self._watcher is not None:
            self._watcher.on_arrival(call, now_s)

    def on_placed(self, attempt: Attempt, now_s: float) -> None:
        if self._watcher is not None:
            self._watcher.on_placed(attempt, now_s)

    def on_over(self, call: Call, shed: Shed | None, now_s: float) -> None:
        self.num_over += 1
        self._num_moved += call.num_moves > 0
        if call.row.at_s >= self._warm_up_s:
            self._measures[call.slo.name].add(call, was_shed=shed is not None)
        if self._on_call is not None:
            self._on_call(call)
        if self._watcher is not None:
            self._watcher.on_over(call, shed, now_s)

    # What workers say, to router and fleet, which are made after each other

    def on_first_token(self, attempt: Attempt, now_s: float) -> Iterable[Event]:
        return self.router.on_first_token(attempt, now_s)

    def on_end(self, attempt: Attempt, now_s: float) -> Iterable[Event]:
        return self.router.on_end(attempt, now_s)

    def on_idle(self, worker: SimWorker, now_s: float) -> Iterable[Event]:
        return self.fleet.on_idle(worker, now_s)

    def outcome(self) -> Outcome:
        """Of what is over by now."""
        run_s = self.clock.now_s
        return Outcome(
            classes=[*self._measures.values()],
            workers=self.fleet.uses(run_s),
            gpu_hours=self.fleet.gpu_hours(run_s),
            usd=self.fleet.usd(run_s),
            num_moved=self._num_moved,
            measured_s=max(0.0, self._last_arrival_s - self._warm_up_s),
            run_s=run_s,
            num_events=self.clock.num_handled,
        )


def _most_tokens(deployment: Deployment) -> MostTokens:
    prefill, decode, both = (deployment.shape(role).pool_tokens for role in Role)
    return MostTokens(max(prefill, both), max(decode, both))
