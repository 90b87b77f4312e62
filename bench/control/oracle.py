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
from collections import deque
from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True, slots=True)
class _Due:
    at_s: float
    role: Role  # of the pool that grows, or that lets one go
    giver: Role | None = None  # a flip
    leaves: bool = False


class Schedule:
    """Carries a plan out. Implements Scaler."""

    def __init__(self, plan: Plan, start: Sizes, *, start_up_s: float, drain_s: float) -> None:
        self._due = deque(sorted(_dues(plan, start, start_up_s, drain_s), key=lambda due: due.at_s))

    def look(self, facts: FleetFacts) -> Sequence[Proposal]:
        proposals: list[Proposal] = []
        ready = [worker for worker in facts.workers if worker.state is State.READY]
        while self._due and self._due[0].at_s <= facts.now_s:
            if (act := _act(self._due.popleft(), facts, ready)) is not None:
                proposals.append(Proposal(act, "so it was planned"))
        return proposals


def _act(due: _Due, facts: FleetFacts, ready: list[WorkerFacts]) -> Act | None:
    """None: nobody is there to take it from. Who is told to change is taken out of `ready`."""
    if due.giver is None and not due.leaves:
        return Create(due.role, facts.blueprints[due.role].shape)
    giving = [worker for worker in ready if worker.role is (due.giver or due.role)]
    if not giving:
        return None
    worker = min(giving, key=least_work)
    ready.remove(worker)
    return Flip(worker.worker_id, due.role) if due.giver is not None else Drain(worker.worker_id)


def least_work(worker: WorkerFacts) -> tuple[float, str]:
    """Orders workers by how much would have to end first."""
    return (worker.load.num_seqs if worker.load is not None else 0, worker.worker_id)


def _dues(plan: Plan, start: Sizes, start_up_s: float, drain_s: float) -> Iterator[_Due]:
    before = start
    for interval, after in enumerate(plan.sizes):
        yield from _changes(before, after, interval * plan.interval_s, start_up_s, drain_s)
        before = after


def _changes(before: Sizes, after: Sizes, at_s: float, start_up_s: float, drain_s: float) -> Iterator[_Due]:
    (prefill, decode), roles = (b - a for a, b in zip(before, after, strict=True)), (Role.PREFILL, Role.DECODE)
    moved = min(abs(prefill), abs(decode)) if prefill * decode < 0 else 0
    taker, giver = roles if prefill > 0 else roles[::-1]
    for _ in range(moved):
        yield _Due(at_s - (drain_s if giver is Role.DECODE else 0.0), taker, giver)
    for role, change in zip(roles, (prefill, decode), strict=True):
        for _ in range(abs(change) - moved):
            yield _Due(at_s, role, leaves=True) if change < 0 else _Due(math.floor(at_s - start_up_s), role)
