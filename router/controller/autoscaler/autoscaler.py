"""One look at the fleet, and what to do about it. Pure.

    facts ─ what may be believed (sound) ─ who is there (census) ─ what calls ask for (traffic) ─ what they felt (lessons)
          ─ sizes (need, outlook, search) ─ by which means (levers), as far as it is time (patience) ─▶ proposals

It holds still where it cannot see: without a word of any router for HOLD_AFTER_S sizes stay, and what was seen before counts for
nothing afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.request import Role
from router.controller.autoscaler import need, outlook
from router.controller.autoscaler.acts import Proposal
from router.controller.autoscaler.census import Census, census
from router.controller.autoscaler.facts import ClassTraffic, FleetFacts
from router.controller.autoscaler.held import Held, Holding, Holdings
from router.controller.autoscaler.kept import Kept, KeptPool
from router.controller.autoscaler.layouts import Kinds, Layout, kinds_of
from router.controller.autoscaler.lessons import MOST, Lessons, blamed, judged_since, too_many
from router.controller.autoscaler.levers import Levers
from router.controller.autoscaler.outlook import Analytic, Evaluator
from router.controller.autoscaler.patience import Patience
from router.controller.autoscaler.scaler import Scaler, Times
from router.controller.autoscaler.sizes import Sizes, Sizing, roles_of
from router.controller.autoscaler.sound import pressure, sound
from router.controller.autoscaler.traffic import ClassLoad, Load, loads_of, sizing
from router.controller.autoscaler.tune import Tuner

__all__ = ["Autoscaler", "Scaler", "Times"]

HOLD_AFTER_S = 15.0  # without a word of any router: three reports were missed (router/controller/observer.py, FRESH_S)
SMOOTHING = 0.2  # per tick: about a minute, an answer's life
FULL = 0.9  # of decode's memory: as router/placement.py, HEADROOM


class Autoscaler:
    """Decides sizes of one fleet."""

    def __init__(
        self, times: Times | None = None, *, evaluator: Evaluator | None = None, max_standbys: int = 0
    ) -> None:
        """`max_standbys`: how many workers that are not needed stay on their GPUs, to be back at once."""
        self.wanted = Layout()  # at the last look
        self._short = Layout()  # up to it pools were to grow then
        self._times = times or Times()
        self._evaluator = evaluator or Analytic()
        self._max_standbys = max_standbys
        self._patience = Patience(self._times)
        self._lessons = Lessons()
        self._tuner = Tuner()
        self._holdings = {role: Holdings() for role in Role}
        self._last: dict[str, ClassLoad] = {}  # what was known of each class, by name
        self._batches: dict[Role, dict[str, float]] = {}  # that paces allowed at the last look: need.py
        self._roles: tuple[Role, ...] = ()
        self._context_tokens: float | None = None
        self._settled: tuple[Layout, float] = (Layout(), 0.0)  # what is ready, and since when

    def measured(self, times: Times) -> None:
        """From now on things take so long; told by who measures them (live_times.py)."""
        self._times = times
        self._patience.measured(times)

    def kept(self) -> Kept:
        """What the next process needs to go on as this one would."""
        now_s = self._patience.now_s
        pools = {
            role.name.lower(): KeptPool(*self._patience.kept(role), lesson=self._lessons.factor(role, now_s))
            for role in Role
        }
        return Kept(pools, self._lessons.kept(now_s))

    def restore(self, kept: Kept, away_s: float) -> None:
        """Before the first look: take over what was known `away_s` ago. Sizes that were enough count only where hardly anything
        was missed since, as in `look`."""
        found = {role: pool for role in Role if (pool := kept.pools.get(role.name.lower())) is not None}
        now_s, is_fresh = self._patience.now_s, 0.0 <= away_s <= HOLD_AFTER_S
        for role, pool in found.items():
            wanted = [(age_s + away_s, num) for age_s, num in pool.wanted] if is_fresh else []
            self._patience.restore(role, pool.num_regrets, wanted)
        factors = {role: pool.lesson for role, pool in found.items()}
        left_s = {name: seconds - max(0.0, away_s) for name, seconds in kept.counted_s.items()}
        self._lessons.restore(factors, left_s, now_s)

    def look(self, facts: FleetFacts) -> Sequence[Proposal]:
        self._patience.look(facts.now_s, facts.workers)
        if not facts.missing_s <= HOLD_AFTER_S:  # NaN, too
            for role in Role:
                self._patience.forget(role)
                self._holdings[role].forget()
            return []
        facts = sound(facts)
        there = census(facts, self._patience.in_state_s, self._times)
        self._roles = roles_of(facts, self._roles)
        loads = loads_of(facts.classes, self._last)
        self._last.update((load.slo.name, load) for load in loads)
        self._learn(judged_since(facts.classes, self._settled_for_s(there)), facts, there, Load(tuple(loads)))
        load = sizing(loads, self._lessons.counted(self._patience.now_s), self._context(there))
        misses = self._misses(facts, load)
        kinds = self._kinds(facts, load)
        sizes = self._sizes(facts, there, load, kinds, misses=misses)
        self.wanted, self._short = sizes.wanted, sizes.short
        if (
            misses
        ):  # so what is there is not known to be enough, unless it is so much that calls must miss for another reason
            for role in Role:
                if there.layout.of(role) <= MOST * sizes.wanted.of(role):
                    self._patience.forget(role)
        self._patience.wanted(sizes.enough, sizes.later)
        tunings = self._tuner.proposals(facts, there, load, self._patience.now_s, self._times.dwell_s)
        return [*tunings, *self._levers(facts, there, sizes).proposals()]

    def _kinds(self, facts: FleetFacts, load: Load) -> Kinds:
        """Each with the batches that its paces allowed at the last look."""
        kinds = {role: replace(kind, batches=self._batches.get(role, {})) for role, kind in kinds_of(facts).items()}
        self._batches = {role: need.batches_in_pace(kind, load) for role, kind in kinds.items()}
        return kinds

    def _sizes(self, facts: FleetFacts, there: Census, load: Load, kinds: Kinds, *, misses: bool) -> Sizes:
        lessons = {role: self._lessons.factor(role, self._patience.now_s) for role in Role}
        all_ready = there.ready == there.layout  # what calls felt is of these sizes, and no help is on its way
        holdings, evaluator = self._held(there), self._evaluator
        return Sizing(
            facts, there, load, kinds, self._roles, lessons, holdings, evaluator, is_missed=misses and all_ready
        ).sizes()

    def _levers(self, facts: FleetFacts, there: Census, sizes: Sizes) -> Levers:
        return Levers(
            facts,
            there,
            sizes,
            self._patience,
            max_standbys=self._max_standbys,
            standby_s=self._times.shrink_after_s,
        )

    def _held(self, there: Census) -> dict[Role, Holding | None]:
        """Workers that say nothing are taken to hold as much as the others."""
        holdings = {}
        for role, num in there.ready:
            says = pressure(there.of(role))
            held = None if says.num_seqs is None else Held(num * says.num_seqs, num * (says.used_share or 0.0))
            holdings[role] = self._holdings[role].look(held, self._patience.now_s)
        return holdings

    def _context(self, there: Census) -> float | None:
        """Tokens of a sequence that decodes, smoothed; None: none has been seen yet."""
        says = pressure([*there.of(Role.DECODE), *there.of(Role.BOTH)]).context_tokens
        if says is not None:
            before = says if self._context_tokens is None else self._context_tokens
            self._context_tokens = before + SMOOTHING * (says - before)
        return self._context_tokens

    def _settled_for_s(self, there: Census) -> float:
        """For how long these sizes have been, and should have been enough."""
        layout, since_s = self._settled
        is_all = there.ready == there.layout and not there.leaving
        enough = all(num >= self._short.of(role) for role, num in there.ready)
        if there.ready != layout or not is_all or not enough:
            since_s = self._patience.now_s
            self._lessons.changed()
        self._settled = (there.ready, since_s)
        return self._patience.now_s - since_s

    def _misses(self, facts: FleetFacts, load: Load) -> bool:
        """Whether more calls than may miss a target that could be kept, or are turned away."""
        kept = self._keepable(facts, load)
        return any(
            too_many(of_class.num_judged - of_class.num_met, of_class)
            for of_class in facts.classes
            if of_class.slo.name in kept
        )

    def _keepable(self, facts: FleetFacts, load: Load) -> set[str]:
        """Classes whose targets a size can keep."""
        kinds = kinds_of(facts)
        return {of_class.slo.name for of_class in load.classes if outlook.is_keepable(of_class, load, kinds)}

    def _learn(self, classes: Sequence[ClassTraffic], facts: FleetFacts, there: Census, load: Load) -> None:
        """`classes`: those whose calls felt these sizes."""
        now_s = self._patience.now_s
        for of_class in classes:
            num_missed = of_class.num_missed_ttft + of_class.num_missed_tpot
            if of_class.slo.priority < 0 and too_many(num_missed, of_class):
                self._lessons.count(of_class.slo.name, now_s)
        keepable = self._keepable(facts, load)
        share = pressure(there.of(Role.DECODE)).used_share
        judged = [of_class for of_class in classes if of_class.slo.name in keepable]
        for role, judged_s in blamed(judged, (share or 0.0) > FULL, self._roles).items():
            self._lessons.learn(role, now_s, judged_s)
