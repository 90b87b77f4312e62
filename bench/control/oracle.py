"""The cheapest sequence of layouts, found offline by whoever knows every call to come. Pure.

Time goes in intervals; a layout is (prefill, decode) workers. What an interval costs under a layout is its GPU-seconds, and for
each of its calls that misses `miss_gpu_s`. What a change costs: a new worker the GPU-seconds of its start-up, since it was asked
for that much earlier; a worker that leaves those of its drain; a flip the drain and the flip, in which it serves nobody.
Dynamic programming over all layouts within the budget finds the sequence of least cost (Bellman 1957).

Planned without headroom it bounds from below what any policy costs, as far as model.py flatters every layout. The policy that
carries a sequence out (`Schedule`) is run in the simulator like all others, so what is reported as the oracle was reached: of
the plans with several headrooms it is the one that did best with that seed. New workers are asked for a start-up ahead, and who
is to leave decoding for prefill is told a drain ahead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.request import Role
from router.controller.autoscaler.acts import Act, Create, Drain, Flip, Proposal
from router.controller.autoscaler.facts import FleetFacts, State, WorkerFacts

Sizes = tuple[int, int]  # prefill, decode workers
Table = npt.NDArray[np.float64]  # [layouts, ...]


@dataclass(frozen=True, slots=True)
class Prices:
    """GPU-seconds."""

    miss: float  # of a call that misses its targets
    start_up: float
    leave: float  # a drain
    flip: float  # a drain, and the flip


def layouts(max_workers: int) -> list[Sizes]:
    return [(p, d) for p in range(1, max_workers) for d in range(1, max_workers - p + 1)]


def change_cost(before: Sizes, after: Sizes, prices: Prices, max_workers: int) -> float:
    """inf: who is new would have to start within a budget that those hold who leave."""
    more, fewer = _split(before, after)
    flips = min(more, fewer)
    if more > flips and sum(before) + more - flips > max_workers:
        return math.inf
    return prices.flip * flips + prices.start_up * (more - flips) + prices.leave * (fewer - flips)


def _split(before: Sizes, after: Sizes) -> tuple[int, int]:
    """How many workers come to pools, and how many go from them."""
    changes = [b - a for a, b in zip(before, after, strict=True)]
    return sum(c for c in changes if c > 0), -sum(c for c in changes if c < 0)


@dataclass(frozen=True, slots=True)
class Plan:
    sizes: tuple[Sizes, ...]  # by interval
    interval_s: float
    cost: float  # GPU-seconds, misses included


def cheapest(misses: Table, sizes: Sequence[Sizes], start: Sizes, interval_s: float, prices: Prices) -> Plan:
    """`misses`: [layouts, intervals], calls. Beginning in `start`."""
    most = max(sum(one) for one in sizes)
    changes = np.array([[change_cost(before, after, prices, most) for after in sizes] for before in sizes])
    costs = np.array([[interval_s * sum(one)] for one in sizes]) + prices.miss * misses
    best = changes[sizes.index(start)] + costs[:, 0]
    came_from = []
    for interval in range(1, misses.shape[1]):
        ways = best[:, None] + changes
        came_from.append(ways.argmin(axis=0))
        best = ways.min(axis=0) + costs[:, interval]
    at = int(best.argmin())
    cost, path = float(best[at]), [at]
    for step in reversed(came_from):
        path.append(int(step[path[-1]]))
    return Plan(tuple(sizes[at] for at in reversed(path)), interval_s, cost)


class Schedule:
    """Carries a plan out: brings the fleet to what it says of now, and what is to come on its way. Implements Scaler.

    What was refused is asked for again at the next look, since it goes by who is there.
    """

    def __init__(self, plan: Plan, *, start_up_s: float, drain_s: float) -> None:
        self._plan = plan
        self._start_up_s = start_up_s
        self._drain_s = drain_s

    def look(self, facts: FleetFacts) -> Sequence[Proposal]:
        now, soon = self._at(facts.now_s), self._at(facts.now_s + self._start_up_s)
        drained = self._at(facts.now_s + self._drain_s)
        fleet = _Fleet(facts)
        acts = [
            *fleet.flips(Role.DECODE, Role.PREFILL, now, drained),
            *fleet.flips(Role.PREFILL, Role.DECODE, now, now) * (now == drained),
            *fleet.grows(soon),
            *fleet.shrinks(now, soon),
        ]
        return [Proposal(act, "so it was planned") for act in acts]

    def _at(self, at_s: float) -> Sizes:
        return self._plan.sizes[min(int(at_s / self._plan.interval_s), len(self._plan.sizes) - 1)]


class _Fleet:
    """At one look; what was told to change counts as changed."""

    def __init__(self, facts: FleetFacts) -> None:
        self._facts = facts
        self._here = Counter(worker.role for worker in facts.workers if worker.state in _HERE)
        self._ready = [worker for worker in facts.workers if worker.state is State.READY]

    def flips(self, giver: Role, taker: Role, now: Sizes, then: Sizes) -> list[Act]:
        """Where the giver has more than it needs now or then, whichever is less, and the taker fewer than it needs then."""
        acts: list[Act] = []
        least = min(_of(giver, now), _of(giver, then))
        while self._here[giver] > least and self._here[taker] < _of(taker, then):
            if (worker := self._take(giver)) is None:
                break
            self._here[taker] += 1
            acts.append(Flip(worker.worker_id, taker))
        return acts

    def grows(self, soon: Sizes) -> list[Act]:
        acts: list[Act] = []
        while self._here.total() < sum(soon):
            role = max(_POOLS, key=lambda pool: _of(pool, soon) - self._here[pool])
            self._here[role] += 1
            acts.append(Create(role, self._facts.blueprints[role].shape))
        return acts

    def shrinks(self, now: Sizes, soon: Sizes) -> list[Act]:
        acts: list[Act] = []
        while self._here.total() > max(sum(now), sum(soon)):
            role = max(_POOLS, key=lambda pool: self._here[pool] - _of(pool, now))
            if (worker := self._take(role)) is None:
                break
            acts.append(Drain(worker.worker_id))
        return acts

    def _take(self, role: Role) -> WorkerFacts | None:
        """The least busy one of a pool."""
        giving = [worker for worker in self._ready if worker.role is role]
        if not giving:
            return None
        worker = min(giving, key=least_work)
        self._ready.remove(worker)
        self._here[role] -= 1
        return worker


def least_work(worker: WorkerFacts) -> tuple[float, str]:
    """Orders workers by how much would have to end first."""
    return (worker.load.num_seqs if worker.load is not None else 0, worker.worker_id)


def _of(role: Role, sizes: Sizes) -> int:
    return sizes[0] if role is Role.PREFILL else sizes[1]


_POOLS = (Role.PREFILL, Role.DECODE)
_HERE = (State.READY, State.PENDING, State.FLIPPING)
