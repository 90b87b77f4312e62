"""Who is there, counted as sizes go. Pure.

PENDING ones count as there already, so nobody is asked for twice, and FAILED ones as somebody brings them back; but not once they
are late, so that others are asked for; and then stuck. FLIPPING ones count in the role they will have. Who drains or stands by,
or did before it was lost, does no work, but has its GPUs, as whoever is late may. Whom an operator looks after is nobody's to
take back, to end or to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.request import Role
from router.controller.autoscaler.facts import FleetFacts, State, WorkerFacts
from router.controller.autoscaler.layouts import Layout
from router.controller.autoscaler.scaler import Times

LATE, STUCK = (
    1.5,
    3.0,
)  # start-up times: what takes half as long again is in doubt, what takes three times will not come
_COUNTED = (State.READY, State.PENDING, State.FLIPPING, State.FAILED)


@dataclass(frozen=True, slots=True)
class Census:
    counted: tuple[WorkerFacts, ...]  # towards their pools
    late: tuple[WorkerFacts, ...]  # not up, or back, when they should have been, or to do no work then
    stuck: tuple[WorkerFacts, ...]  # nor when nobody waits any longer
    standbys: tuple[WorkerFacts, ...]
    draining: tuple[WorkerFacts, ...]

    @property
    def leaving(self) -> list[WorkerFacts]:
        """Who drains for good, or to stand by."""
        return [worker for worker in self.draining if worker.leaves]

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


def census(facts: FleetFacts, in_state_s: Callable[[WorkerFacts], float], times: Times) -> Census:
    """`in_state_s`: for how long a worker has been what it is."""

    start_up_s = max(times.start_up_s, times.tick_s)
    patience_s = {
        State.PENDING: STUCK * start_up_s,
        State.FAILED: max(STUCK * start_up_s, times.bring_back_s),
    }

    def is_counted(worker: WorkerFacts) -> bool:
        if worker.state in patience_s:
            return worker.serves and in_state_s(worker) <= LATE * start_up_s
        return worker.state in _COUNTED

    def is_stuck(worker: WorkerFacts) -> bool:
        return worker.leaves and worker.state in patience_s and in_state_s(worker) > patience_s[worker.state]

    def those(state: State) -> tuple[WorkerFacts, ...]:
        return tuple(worker for worker in facts.workers if worker.state is state)

    return Census(
        counted=tuple(w for w in facts.workers if is_counted(w)),
        late=tuple(w for w in facts.workers if w.state in patience_s and not is_counted(w) and not is_stuck(w)),
        stuck=tuple(w for w in facts.workers if is_stuck(w)),
        standbys=those(State.STANDBY),
        draining=those(State.DRAINING),
    )
