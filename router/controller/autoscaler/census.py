"""Who is there, counted as sizes go. Pure.

PENDING ones count as there already, so nobody is asked for twice, and FAILED ones as somebody brings them back; but not once they
are late, so that others are asked for; and then stuck. FLIPPING ones count in the role they will have. Who drains or stands by
does no work, but has its GPUs, as whoever is late may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.request import Role
from router.controller.autoscaler.facts import FleetFacts, State, WorkerFacts
from router.controller.autoscaler.layouts import Layout

LATE, STUCK = (
    1.5,
    3.0,
)  # start-up times: what takes half as long again is in doubt, what takes three times will not come
_COUNTED = (State.READY, State.PENDING, State.FLIPPING, State.FAILED)


@dataclass(frozen=True, slots=True)
class Census:
    counted: tuple[WorkerFacts, ...]  # towards their pools
    late: tuple[WorkerFacts, ...]  # not up, or back, when they should have been
    stuck: tuple[WorkerFacts, ...]  # nor when nobody waits any longer
    standbys: tuple[WorkerFacts, ...]
    draining: tuple[WorkerFacts, ...]

    @property
    def layout(self) -> Layout:
        return _layout(self.counted)

    @property
    def ready(self) -> Layout:
        """That serves now."""
        return _layout(worker for worker in self.counted if worker.state is State.READY)

    @property
    def num_gpus(self) -> int:
        """Also of those that are on their way out."""
        return sum(
            worker.num_gpus for worker in (*self.counted, *self.late, *self.stuck, *self.standbys, *self.draining)
        )

    def of(self, role: Role) -> list[WorkerFacts]:
        return [worker for worker in self.counted if worker.role is role]


def _layout(workers: Iterable[WorkerFacts]) -> Layout:
    layout = Layout()
    for worker in workers:
        layout = layout.plus(worker.role)
    return layout


def census(facts: FleetFacts, in_state_s: Callable[[WorkerFacts], float], start_up_s: float) -> Census:
    """`in_state_s`: for how long a worker has been what it is."""

    def start_ups(worker: WorkerFacts) -> float:
        """That a worker is on its way, or away."""
        return in_state_s(worker) / start_up_s if worker.state in (State.PENDING, State.FAILED) else 0.0

    def those(state: State) -> tuple[WorkerFacts, ...]:
        return tuple(worker for worker in facts.workers if worker.state is state)

    return Census(
        counted=tuple(w for w in facts.workers if w.state in _COUNTED and start_ups(w) <= LATE),
        late=tuple(w for w in facts.workers if LATE < start_ups(w) <= STUCK),
        stuck=tuple(w for w in facts.workers if start_ups(w) > STUCK),
        standbys=those(State.STANDBY),
        draining=those(State.DRAINING),
    )
