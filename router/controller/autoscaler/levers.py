"""From the sizes there are to those that are wanted, by the cheapest means. Pure; DESIGN section 9, 6 to 9.

    1 who did not come up in time is given up
    2 a budget that was lowered is obeyed: standbys go, then who is not up, then who is least busy
    3 a short pool takes, in this order: who drains, whom another pool can spare, who stands by, somebody new; where the budget is
      spent, a pool of another shape that can spare one makes room
    4 a pool that has been too large for long lets half of what is too much go, and the next ones a whole tick after
      it stopped taking calls

Each step sees what the ones before have done. Only who is ready flips or drains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from baton.request import Role
from router.controller.autoscaler.acts import Act, Create, Drain, Flip, GiveUp, Proposal, Undrain, Wake
from router.controller.autoscaler.census import Census
from router.controller.autoscaler.facts import FleetFacts, State, WorkerFacts
from router.controller.autoscaler.layouts import PAIR, blueprint_of, bounds_of
from router.controller.autoscaler.patience import Patience
from router.controller.autoscaler.sizes import Sizes

_NOT_UP = (State.PENDING, State.FAILED)


class Levers:
    """One look's."""

    def __init__(
        self, facts: FleetFacts, there: Census, sizes: Sizes, patience: Patience, *, max_standbys: int, standby_s: float
    ) -> None:
        """`max_standbys`: kept with their weights loaded when they leave; a standby beyond is ended after `standby_s`."""
        self._facts = facts
        self._there = there
        self._sizes = sizes
        self._patience = patience
        self._max_standbys = max_standbys
        self._standby_s = standby_s
        self._have = there.layout
        self._free = {worker.worker_id: worker for worker in facts.workers}  # of whom nothing was proposed yet
        self._num_gpus = there.num_gpus
        self._num_kept = 0  # of those that are told to leave by now, as standbys

    def proposals(self) -> list[Proposal]:
        return [*self._give_up(), *self._obey_budget(), *self._grow(), *self._shrink(), *self._end_standbys()]

    # -- 1, 2 ----------------------------------------------------------------------------------------------------------

    def _give_up(self) -> Iterator[Proposal]:
        self._patience.failed_starts(self._there.stuck)
        for worker in self._there.stuck:
            self._leave(worker)
            since_s = self._patience.in_state_s(worker)
            yield Proposal(
                GiveUp(worker.worker_id),
                f"{worker.worker_id} has been {worker.state} for {since_s:.0f} s, longer than a start may take",
                {"since_s": since_s},
            )

    def _obey_budget(self) -> Iterator[Proposal]:
        max_gpus = self._facts.budget.max_gpus
        leaving = sum(worker.num_gpus for worker in self._there.leaving)
        for worker in self._in(State.STANDBY):
            if max_gpus is not None and self._num_gpus - leaving > max_gpus:
                self._leave(worker)
                yield Proposal(GiveUp(worker.worker_id), f"the budget is {max_gpus} GPUs", {"max_gpus": max_gpus})
        for role, wanted in self._sizes.wanted:
            most = bounds_of(self._facts.budget, role).max_workers
            while self._have.of(role) > wanted:
                is_over = max_gpus is not None and self._num_gpus - leaving > max_gpus
                if not is_over and (most is None or self._have.of(role) <= most):
                    break
                bound = f"{max_gpus} GPUs" if is_over else f"{most} {role.name.lower()} workers"
                leaver = self._least_busy(role)
                if leaver is None:
                    break
                leaving += leaver.num_gpus if leaver.state not in _NOT_UP else 0
                yield self._end(leaver, f"the budget is {bound}", keep_standby=False)

    # -- 3 -------------------------------------------------------------------------------------------------------------

    def _grow(self) -> Iterator[Proposal]:
        for role, size in self._sizes.short:
            if size <= self._have.of(role):
                continue
            for lever in (self._undrain, self._flip, self._wake, self._create):
                while self._have.of(role) < size and (proposal := lever(role)) is not None:
                    self._have = self._have.plus(role)
                    self._patience.grows(role, _worker_id(proposal.act))
                    yield proposal
            if self._have.of(role) < size:
                yield from self._make_room(role)

    def _undrain(self, role: Role) -> Proposal | None:
        worker = next((w for w in self._in(State.DRAINING) if w.role is role and w.leaves), None)
        if worker is None:
            return None
        return self._take(worker, Undrain(worker.worker_id), role, "it was to leave and is wanted after all")

    def _flip(self, role: Role) -> Proposal | None:
        for giver in self._givers(role):
            worker = self._least_busy(giver, ready_only=True)
            if worker is not None and worker.shape in self._shapes(role):
                self._have = self._have.plus(giver, -1)
                self._patience.gives(giver, role, worker.worker_id)
                how = f"{giver.name.lower()} can spare one: {self._sizes.reasons.get(giver, '')}; {role.name.lower()} is short"
                return self._take(worker, Flip(worker.worker_id, role), role, how)
        return None

    def _wake(self, role: Role) -> Proposal | None:
        shapes = self._shapes(role)
        worker = next((worker for worker in self._in(State.STANDBY) if worker.shape in shapes), None)
        if worker is None:
            return None
        return self._take(worker, Wake(worker.worker_id, role), role, "a standby has its weights loaded")

    def _create(self, role: Role) -> Proposal | None:
        blueprint = blueprint_of(self._facts, role)
        if blueprint is None or not self._patience.may_create(role):
            return None
        if self._sizes.max_gpus is not None and self._num_gpus + blueprint.num_gpus > self._sizes.max_gpus:
            return None
        self._num_gpus += blueprint.num_gpus
        return self._propose(Create(role, blueprint.shape), role, "one more is needed")

    def _make_room(self, role: Role) -> Iterator[Proposal]:
        """Nobody can flip, and the budget is spent."""
        blueprint, max_gpus = blueprint_of(self._facts, role), self._sizes.max_gpus
        if blueprint is None or max_gpus is None or self._num_gpus + blueprint.num_gpus <= max_gpus:
            return
        if self._there.leaving:
            return  # room is being made
        for giver in self._givers(role):
            worker = self._least_busy(giver)
            if worker is not None and worker.shape not in self._shapes(role):
                self._patience.gives(giver, role, worker.worker_id)
                yield self._end(worker, f"makes room for {role.name.lower()} in a budget of {max_gpus} GPUs", False)
                return

    def _givers(self, taker: Role) -> list[Role]:
        """Pools that survive the loss of one, the load spread over the rest: `spare` says so."""
        return [
            giver
            for giver in PAIR
            if giver is not taker
            and taker in PAIR
            and self._num_ready(giver) > self._sizes.spare.of(giver)
            and self._patience.may_give(giver, taker)
        ]

    def _shapes(self, role: Role) -> set[str]:
        """That workers of the role have, or would have."""
        blueprint = blueprint_of(self._facts, role)
        return {worker.shape for worker in self._there.of(role)} | ({blueprint.shape} if blueprint else set())

    # -- 4 -------------------------------------------------------------------------------------------------------------

    def _shrink(self) -> Iterator[Proposal]:
        for role, wanted in self._sizes.wanted:
            enough = self._patience.enough(role)
            if enough is None or any(
                self._patience.just_left(worker) for worker in self._there.leaving if worker.role is role
            ):
                continue
            size = max(enough, wanted)
            for _ in range(math.ceil((self._have.of(role) - size) / 2)):
                worker = self._least_busy(role)
                if worker is None or not (worker.state in _NOT_UP or self._num_ready(role) > size):
                    break
                self._patience.shrinks(role, worker.worker_id)
                keep = worker.state not in _NOT_UP and self._num_standbys < self._max_standbys
                yield self._end(worker, f"{size} were enough for long: {self._why(role)}", keep)

    @property
    def _num_standbys(self) -> int:
        """Also those to come."""
        return sum(w.state is State.STANDBY or w.stands_by for w in self._free.values()) + self._num_kept

    def _end_standbys(self) -> Iterator[Proposal]:
        standbys = self._in(State.STANDBY)
        for worker in standbys[self._max_standbys :]:
            if self._patience.in_state_s(worker) >= self._standby_s:
                self._leave(worker)
                yield Proposal(GiveUp(worker.worker_id), "nobody needed this standby for long")

    # -- small things --------------------------------------------------------------------------------------------------

    def _in(self, state: State) -> list[WorkerFacts]:
        return [worker for worker in self._free.values() if worker.state is state]

    def _num_ready(self, role: Role) -> int:
        """Of whom nothing was proposed: who is not up yet is no reason to let others go."""
        return sum(worker.role is role for worker in self._in(State.READY))

    def _least_busy(self, role: Role, *, ready_only: bool = False) -> WorkerFacts | None:
        """Whoever is not up first: nobody is served there."""
        states: Sequence[State] = (State.READY,) if ready_only else (*_NOT_UP, State.READY)
        counted = {worker.worker_id for worker in self._there.counted}
        workers = [w for w in self._free.values() if w.role is role and w.state in states and w.worker_id in counted]
        return min(workers, key=lambda worker: (states.index(worker.state), *_busy(worker)), default=None)

    def _end(self, worker: WorkerFacts, why: str, keep_standby: bool) -> Proposal:
        self._have = self._have.plus(worker.role, -1)
        if worker.state in _NOT_UP:
            self._leave(worker)
            return Proposal(
                GiveUp(worker.worker_id), f"{worker.worker_id} is not up and not needed: {why}", self._sizes.inputs
            )
        del self._free[worker.worker_id]
        self._num_kept += keep_standby
        return Proposal(Drain(worker.worker_id, keep_standby), why, self._sizes.inputs)

    def _leave(self, worker: WorkerFacts) -> None:
        del self._free[worker.worker_id]
        self._num_gpus -= worker.num_gpus

    def _take(self, worker: WorkerFacts, act: Act, role: Role, how: str) -> Proposal:
        del self._free[worker.worker_id]
        return self._propose(act, role, how)

    def _propose(self, act: Act, role: Role, how: str) -> Proposal:
        return Proposal(act, f"{how}: {self._why(role)}", self._sizes.inputs)

    def _why(self, role: Role) -> str:
        return self._sizes.reasons.get(role, "")


def _worker_id(act: Act) -> str | None:
    """None: of somebody new."""
    return act.worker_id if isinstance(act, Undrain | Flip | Wake) else None


def _busy(worker: WorkerFacts) -> tuple[float, str]:
    """How much would have to end first; unknown comes last."""
    load = worker.load
    return (
        (math.inf, worker.worker_id) if load is None else (load.num_seqs + load.waiting_tokens / 1e3, worker.worker_id)
    )
