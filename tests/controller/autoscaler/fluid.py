"""A fleet whose work flows like water: what an autoscaler proposes is carried out, in its time, and queues fill and drain.

Coarse on purpose: one step per tick, no single calls. What calls feel under a real scheduler is bench/sim's to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from baton.request import Role
from router.controller.autoscaler import need
from router.controller.autoscaler.acts import (
    Act,
    Create,
    Drain,
    Flip,
    GiveUp,
    LocalPrefill,
    Proposal,
    Tune,
    Undrain,
    Wake,
)
from router.controller.autoscaler.facts import ClassTraffic, FleetFacts, State, WorkerFacts, WorkerLoad
from router.controller.autoscaler.layouts import kinds_of
from router.controller.autoscaler.need import Kind
from router.controller.autoscaler.scaler import Scaler, Times
from router.controller.autoscaler.traffic import Load, loads_of, sizing
from router.controller.settings import Budget
from tests.controller.autoscaler.fleets import AT_LEAST_ONE, MOST, TERMS, facts, worker

PREFILL = Kind(Role.PREFILL, TERMS, MOST, 200_000)
DRAIN_S = 20.0  # what runs ends meanwhile


@dataclass
class Fluid:
    scaler: Scaler
    workers: tuple[WorkerFacts, ...]
    traffic: Callable[[float], Sequence[ClassTraffic]]  # by time
    budget: Budget = AT_LEAST_ONE
    times: Times = field(default_factory=Times)
    machines: int | None = None  # GPUs there are; None: as many as asked for
    now_s: float = 0.0
    queued_tokens: float = 0.0  # of prompts
    acts: list[tuple[float, Proposal]] = field(default_factory=list)
    sizes: list[tuple[float, int, int]] = field(default_factory=list)  # of what is ready: prefill, decode
    change: Callable[[FleetFacts], FleetFacts] = lambda facts: facts  # what the autoscaler is told instead

    def run(self, num_ticks: int) -> None:
        for _ in range(num_ticks):
            self.now_s += self.times.tick_s
            self._progress()
            told = self.change(self.facts())
            for proposal in self.scaler.look(told):
                self.acts.append((self.now_s, proposal))
                self._carry_out(proposal)
            self.sizes.append((self.now_s, self.ready(Role.PREFILL), self.ready(Role.DECODE)))

    def ready(self, role: Role) -> int:
        return sum(w.role is role and w.state is State.READY for w in self.workers)

    def counts(self) -> Counter[str]:
        return Counter(type(proposal.act).__name__ for _, proposal in self.acts)

    def times_of(self, kind: type[Act]) -> list[float]:
        return [at_s for at_s, proposal in self.acts if isinstance(proposal.act, kind)]

    def facts(self) -> FleetFacts:
        now = facts(self.workers, *self.traffic(self.now_s), now_s=self.now_s, budget=self.budget)
        free = None if self.machines is None else self.machines - sum(w.num_gpus for w in self.workers)
        load, kinds = sizing(loads_of(now.classes, {})), kinds_of(now)
        says = {role: self._loads(load, kinds[role]) for role in kinds if self.ready(role)}
        ready = tuple(replace(w, load=next(says[w.role])) if w.state is State.READY else w for w in self.workers)
        return replace(now, queued_tokens=int(self.queued_tokens), spare_gpus=free, workers=ready)

    def _loads(self, load: Load, kind: Kind) -> Iterator[WorkerLoad]:
        """Of one ready worker after the other. Decode's batch as Little's law has it, as far as memory goes; sequences are whole,
        and the pool's are as many as there should be."""
        batch, num = 0.0, self.ready(kind.role)
        if kind.role is not Role.PREFILL and load.classes:
            batch = min(need.most_seqs(kind, load)[0], need.steady_batch(kind, load, load.outputs_per_s / num))
        for place in range(num):
            num_seqs = round((place + 1) * batch) - round(place * batch)
            yield WorkerLoad(self.now_s, num_seqs, 0, round(num_seqs * load.context_tokens), 0.01, 0)

    def _progress(self) -> None:
        """What is under way comes true; prompts are computed."""
        self.workers = tuple(up for w in self.workers if (up := self._later(w)) is not None)
        load = sizing(loads_of(self.traffic(self.now_s), {}))
        if not load.classes or self.ready(Role.BOTH):
            return
        s_per_token = need.prefill_busy(PREFILL, load) / load.lacking_per_s
        done = self.ready(Role.PREFILL) * self.times.tick_s / s_per_token
        self.queued_tokens = max(0.0, self.queued_tokens + load.lacking_per_s * self.times.tick_s - done)

    def _later(self, of: WorkerFacts) -> WorkerFacts | None:
        age_s = self.now_s - of.since_s
        if of.state is State.PENDING and age_s >= self.times.start_up_s:
            return replace(of, state=State.READY, since_s=self.now_s)
        if of.state is State.FLIPPING and age_s >= self.times.flip_s:
            return replace(of, state=State.READY, since_s=self.now_s)
        if of.state is State.DRAINING and age_s >= DRAIN_S:
            return None
        return of

    def _carry_out(self, proposal: Proposal) -> None:
        match proposal.act:
            case Create(role, _):
                pending = worker(f"new-{len(self.acts)}", role, State.PENDING, self.now_s)
                self.workers = (*self.workers, pending)
            case Drain(worker_id, _):
                self._become(worker_id, State.DRAINING)
            case GiveUp(worker_id):
                self.workers = tuple(w for w in self.workers if w.worker_id != worker_id)
            case Flip(worker_id, role):
                self._become(worker_id, State.FLIPPING, role)
            case Wake(worker_id, role):
                self._become(worker_id, State.READY, role)
            case Undrain(worker_id):
                self._become(worker_id, State.READY)
            case Tune() | LocalPrefill():
                pass

    def _become(self, worker_id: str, state: State, role: Role | None = None) -> None:
        assert worker_id in {w.worker_id for w in self.workers}, f"{worker_id} is not there"
        self.workers = tuple(
            replace(w, state=state, since_s=self.now_s, role=role or w.role) if w.worker_id == worker_id else w
            for w in self.workers
        )
