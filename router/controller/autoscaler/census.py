"""Who is there, counted as sizes go. Pure.

PENDING ones count as there already, so nobody is asked for twice; FAILED ones for as long as somebody may yet bring them back;
FLIPPING ones in the role they will have. Who drains or stands by does no work, but has its GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.request import Role
from router.controller.autoscaler.facts import FleetFacts, State, WorkerFacts
from router.controller.autoscaler.layouts import Layout

_COUNTED = (State.READY, State.PENDING, State.FLIPPING, State.FAILED)


@dataclass(frozen=True, slots=True)
class Census:
    counted: tuple[WorkerFacts, ...]  # towards their pools
    stuck: tuple[WorkerFacts, ...]  # did not come up, or back, in time
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
        return sum(worker.num_gpus for worker in (*self.counted, *self.stuck, *self.standbys, *self.draining))

    def of(self, role: Role) -> list[WorkerFacts]:
        return [worker for worker in self.counted if worker.role is role]


def _layout(workers: Iterable[WorkerFacts]) -> Layout:
    layout = Layout()
    for worker in workers:
        layout = layout.plus(worker.role)
    return layout


def census(facts: FleetFacts, in_state_s: Callable[[WorkerFacts], float], deadline_s: float) -> Census:
    """`deadline_s`: for how long a worker may be on its way, or away."""

    def is_late(worker: WorkerFacts) -> bool:
        return worker.state in (State.PENDING, State.FAILED) and in_state_s(worker) > deadline_s

    def those(state: State) -> tuple[WorkerFacts, ...]:
        return tuple(worker for worker in facts.workers if worker.state is state)

    return Census(
        counted=tuple(w for w in facts.workers if w.state in _COUNTED and not is_late(w)),
        stuck=tuple(w for w in facts.workers if is_late(w)),
        standbys=those(State.STANDBY),
        draining=those(State.DRAINING),
    )
