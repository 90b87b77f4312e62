"""From the sizes there are to those that are wanted, by the cheapest means. Pure; DESIGN section 9, 6 to 8.

    1 who did not come up in time is given up
    2 a short pool takes, in this order: who drains, who can be spared elsewhere (flip), who stands by, somebody new
    3 a pool that has been too large for long lets one go

Each step sees what the ones before have taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.request import Role
from router.controller.autoscaler.acts import Create, Drain, Flip, GiveUp, Proposal, Undrain, Wake
from router.controller.autoscaler.census import Census
from router.controller.autoscaler.facts import FleetFacts, State, WorkerFacts
from router.controller.autoscaler.layouts import Layout, blueprint_of, bounds_of
from router.controller.autoscaler.patience import Patience


@dataclass(frozen=True, slots=True)
class Sizes:
    """What was worked out."""

    wanted: Layout
    short: Layout  # what the least of doubts leaves wanted: only who is below it takes
    spare: Layout  # what a pool keeps if it gives a worker to another
    reason: str = ""
    inputs: dict[str, str | int | float | bool | None] = field(default_factory=dict)


class Levers:
    """One look's."""

    def __init__(self, facts: FleetFacts, census: Census, sizes: Sizes, patience: Patience) -> None:
        self._facts = facts
        self._census = census
        self._sizes = sizes
        self._patience = patience
        self._have = census.layout
        self._taken: set[str] = set()  # workers that something was proposed for
        self._num_gpus = census.num_gpus
        self._spare_gpus = math.inf if facts.spare_gpus is None else max(0, facts.spare_gpus)

    def proposals(self) -> Iterator[Proposal]:
        yield from self._give_up()
        for role, wanted in self._sizes.wanted:
            if self._sizes.short.of(role) > self._have.of(role):
                yield from self._grow(role, wanted)
        yield from self._shrink()

    def _give_up(self) -> Iterator[Proposal]:
        for worker in self._census.stuck:
            self._taken.add(worker.worker_id)
            yield Proposal(GiveUp(worker.worker_id), f"{worker.worker_id} has been {worker.state} for too long")

    def _grow(self, role: Role, wanted: int) -> Iterator[Proposal]:
        for lever in (self._undrain, self._flip, self._wake, self._create):
            while self._have.of(role) < wanted and (proposal := lever(role)) is not None:
                self._have = self._have.plus(role)
                self._patience.grew(role)
                yield proposal

    def _free(self, workers: tuple[WorkerFacts, ...]) -> list[WorkerFacts]:
        return [worker for worker in workers if worker.worker_id not in self._taken]

    def _propose(self, act: Undrain | Flip | Wake | Create | Drain, how: str) -> Proposal:
        return Proposal(act, f"{how}: {self._sizes.reason}", self._sizes.inputs)

    def _undrain(self, role: Role) -> Proposal | None:
        for worker in self._free(self._census.draining):
            if worker.role is role:
                self._taken.add(worker.worker_id)
                return self._propose(Undrain(worker.worker_id), "it was to leave, and is wanted after all")
        return None

    def _flip(self, role: Role) -> Proposal | None:
        for giver in Role:
            if giver is role or self._have.of(giver) <= self._sizes.spare.of(giver):
                continue
            candidates = [w for w in self._free(self._census.counted) if w.role is giver and w.state is State.READY]
            if candidates and self._patience.may_flip(giver, role):
                worker = min(candidates, key=_work)
                self._taken.add(worker.worker_id)
                self._have = self._have.plus(giver, -1)
                self._patience.flipped(giver, role)
                return self._propose(Flip(worker.worker_id, role), f"{giver.name.lower()} can spare one")
        return None

    def _wake(self, role: Role) -> Proposal | None:
        for worker in self._free(self._census.standbys):
            self._taken.add(worker.worker_id)
            return self._propose(Wake(worker.worker_id, role), "a standby is there")
        return None

    def _create(self, role: Role) -> Proposal | None:
        blueprint, budget = blueprint_of(self._facts, role), self._facts.budget
        most = bounds_of(budget, role).max_workers
        if blueprint is None or (most is not None and self._have.of(role) >= most):
            return None
        if blueprint.num_gpus > self._spare_gpus:
            return None
        if budget.max_gpus is not None and self._num_gpus + blueprint.num_gpus > budget.max_gpus:
            return None
        self._num_gpus += blueprint.num_gpus
        self._spare_gpus -= blueprint.num_gpus
        return self._propose(Create(role, blueprint.shape), "one more is needed")

    def _shrink(self) -> Iterator[Proposal]:
        for role, _ in self._sizes.wanted:
            enough = self._patience.enough(role)
            leaving = [worker for worker in self._census.draining if worker.role is role]
            if enough is None or leaving or self._have.of(role) <= max(enough, self._sizes.wanted.of(role)):
                continue
            ready = [w for w in self._free(self._census.counted) if w.role is role and w.state is State.READY]
            if ready:
                worker = min(ready, key=_work)
                self._have = self._have.plus(role, -1)
                yield self._propose(Drain(worker.worker_id), "fewer have been enough for long")


def _work(worker: WorkerFacts) -> tuple[float, str]:
    """How much would have to end first."""
    load = worker.load
    return (math.inf if load is None else load.num_seqs + load.waiting_tokens / 1e3, worker.worker_id)
