"""One look at the fleet, and what to do about it. Pure.

facts ─ who is there (census) ─ what calls ask for (traffic) ─ sizes (need, layouts) ─ what may be done by now (patience)
      ─ by which means (levers) ─▶ proposals
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.request import Role
from router.controller.autoscaler import need
from router.controller.autoscaler.acts import Proposal
from router.controller.autoscaler.census import Census, census
from router.controller.autoscaler.facts import FleetFacts
from router.controller.autoscaler.layouts import Kinds, Layout, bounds_of, kinds_of
from router.controller.autoscaler.levers import Levers, Sizes
from router.controller.autoscaler.patience import Patience
from router.controller.autoscaler.scaler import Scaler, Times
from router.controller.autoscaler.traffic import ClassLoad, Load, loads_of, sizing

__all__ = ["Autoscaler", "Scaler", "Times"]

HOLD_AFTER_S = 15.0  # without a word of any router: three reports were missed (router/controller/observer.py, FRESH_S)
DEADLINE_START_UPS = 3.0  # a start that takes longer than three will not come
BAND = 1.1  # how far a load must exceed what there is before a pool grows, and lie below it before it gives


class Autoscaler:
    """Decides sizes of one fleet."""

    def __init__(self, times: Times | None = None) -> None:
        self._times = times or Times()
        self._patience = Patience(self._times)
        self._last: dict[str, ClassLoad] = {}  # what was known of each class, by name

    def look(self, facts: FleetFacts) -> Sequence[Proposal]:
        self._patience.look(facts.now_s, facts.workers)
        if facts.missing_s > HOLD_AFTER_S:
            return []
        there = census(facts, self._patience.in_state_s, DEADLINE_START_UPS * self._times.start_up_s)
        loads = loads_of(facts.classes, self._last)
        self._last.update((load.slo.name, load) for load in loads)
        kinds, load = kinds_of(facts), sizing(loads)
        sizes = Sizes(
            wanted=_bounded(_needed(facts, kinds, load, there), facts),
            short=_bounded(_needed(facts, kinds, load.times(1 / BAND), there), facts),
            spare=_bounded(_needed(facts, kinds, load.times(BAND), there), facts),
            reason=f"{load.rate:.3g} calls/s want {_needed(facts, kinds, load, there)}, there are {there.layout}",
            inputs={"rate_per_s": load.rate, "queued_tokens": facts.queued_tokens},
        )
        self._patience.wanted(sizes.wanted)
        return list(Levers(facts, there, sizes, self._patience).proposals())


def _needed(facts: FleetFacts, kinds: Kinds, load: Load, there: Census) -> Layout:
    wakes = int(facts.queued_tokens > 0)
    busy = {role: _busy(kinds, role, load, facts, there) for role in Role}
    if there.layout.both or facts.budget.both.min_workers:
        return Layout(both=max(wakes, math.ceil(busy[Role.BOTH])))
    return Layout(max(wakes, math.ceil(busy[Role.PREFILL])), max(wakes, math.ceil(busy[Role.DECODE])))


def _busy(kinds: Kinds, role: Role, load: Load, facts: FleetFacts, there: Census) -> float:
    if role not in kinds or not load.classes:
        return 0.0
    if role is Role.PREFILL:
        waiting = facts.queued_tokens + sum(w.load.waiting_tokens for w in there.of(role) if w.load)
        return need.prefill_busy(kinds[role], load) / need.PREFILL_BUSY + need.backlog_busy(kinds[role], load, waiting)
    return need.decode_busy(kinds[role], load) / need.DECODE_BUSY


def _bounded(layout: Layout, facts: FleetFacts) -> Layout:
    for role, num in layout:
        bounds = bounds_of(facts.budget, role)
        most = num if bounds.max_workers is None else bounds.max_workers
        layout = layout.plus(role, max(bounds.min_workers, min(num, most)) - num)
    return layout
