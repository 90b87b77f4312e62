"""The best layout under one budget, by looking at neighbours: one worker more, one fewer, one flipped. Pure.

    1 from the start given, take away until the budget holds: all pools in proportion while it is MUCH over, then each time the
      worker whose loss costs least goodput per dollar
    2 while calls miss their targets, take the neighbour that gains most per dollar; a flip costs nothing
    3 while they do not, take away what costs nothing that matters

Goodput is counted up to each class's percentile and by its weight: what is more than was asked for is worth nothing, so nobody
pays for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations

from baton.request import Role
from router.controller.autoscaler.layouts import PAIR, Layout, bounds_of
from router.controller.autoscaler.outlook import Evaluator, Scene
from router.controller.settings import Budget

ENOUGH = 0.005  # of the weighted calls that may miss beyond what percentiles allow, before more is paid for
GAIN = 0.01  # of them, that a flip must gain where both pools are short: less is within the model's error
LEAST_GAIN = 0.1  # of what the workers there gain on average: where one more brings less, size is not what is missing
MUCH = 16  # workers beyond a budget: few enough to be looked at one by one, each twice, on the event loop
MAX_MOVES = 4_096  # more than any search takes: each move adds or takes one worker


@dataclass(slots=True)
class Search:
    """One look's: what was evaluated once is known."""

    evaluator: Evaluator
    scene: Scene
    budget: Budget
    roles: tuple[Role, ...]  # that the fleet has
    least: Layout  # below which no pool goes unless the budget asks for it
    floor: Layout  # nor then
    _values: dict[Layout, float] = field(default_factory=dict)

    def best(self, start: Layout) -> Layout:
        layout = self._within_budget(self._scaled(self._bounded(start)))
        for _ in range(MAX_MOVES):
            better = self._better(layout)
            if better is None:
                break
            layout = better
        for _ in range(MAX_MOVES):
            cheaper = self._cheaper(layout)
            if cheaper is None:
                break
            layout = cheaper
        return layout

    def value(self, layout: Layout) -> float:
        """Weighted calls a second that meet their targets, as far as they were asked for."""
        if layout not in self._values:
            outlook = self.evaluator.outlook(layout, self.scene)
            self._values[layout] = sum(
                of_class.slo.weight
                * of_class.rate
                * min(outlook.attainment[of_class.slo.name], of_class.slo.percentile)
                for of_class in self.scene.load.classes
            )
        return self._values[layout]

    # -- moves ---------------------------------------------------------------------------------------------------------

    def _better(self, layout: Layout) -> Layout | None:
        """The neighbour that gains most per dollar, where calls miss."""
        value = self.value(layout)
        if self._asked() - value <= ENOUGH * self._asked():
            return None
        flips = [(other, self.value(other) - value) for other in self._flips(layout)]
        flip, gain = max(flips, key=lambda move: move[1], default=(layout, 0.0))
        if gain > GAIN * self._asked():
            return flip
        adds = [(other, self.value(other) - value, self._usd(role)) for role, other in self._adds(layout)]
        other, gain, _ = max(adds, key=lambda move: move[1] / move[2], default=(layout, 0.0, 1.0))
        return other if gain > LEAST_GAIN * value / max(1, sum(num for _, num in layout)) else None

    def _cheaper(self, layout: Layout) -> Layout | None:
        """The neighbour that saves most and costs nothing that matters."""
        value = self.value(layout)
        least = min(value, (1 - ENOUGH) * self._asked())
        fewer = [
            (other, self._usd(role)) for role, other in self._removals(layout, self.least) if self.value(other) >= least
        ]
        return max(fewer, key=lambda move: (move[1], self.value(move[0])), default=(None, 0.0))[0]

    def _scaled(self, layout: Layout) -> Layout:
        """MUCH beyond the budget at most: what is more than pools must have goes down in proportion."""
        if self.budget.max_gpus is None:
            return layout
        allowed = self.budget.max_gpus + MUCH * max(self._gpus(Layout().plus(role)) for role in Role)
        must = Layout()
        for role, num in layout:
            must = must.plus(role, min(num, max(self.floor.of(role), bounds_of(self.budget, role).min_workers)))
        beyond = self._gpus(layout) - self._gpus(must)
        share = max(0, allowed - self._gpus(must)) / beyond if beyond else 1.0
        if share >= 1:
            return layout
        for role, num in layout:
            must = must.plus(role, int(share * (num - must.of(role))))
        return must

    def _within_budget(self, layout: Layout) -> Layout:
        while self.budget.max_gpus is not None and self._gpus(layout) > self.budget.max_gpus:
            removals = [
                (other, self.value(other), self._usd(role)) for role, other in self._removals(layout, self.floor)
            ]
            if not removals:
                break
            value = self.value(layout)
            layout = min(removals, key=lambda move: (value - move[1]) / move[2])[0]
        return layout

    def _adds(self, layout: Layout) -> Iterator[tuple[Role, Layout]]:
        for role in self.roles:
            most, other = bounds_of(self.budget, role).max_workers, layout.plus(role)
            fits = self.budget.max_gpus is None or self._gpus(other) <= self.budget.max_gpus
            if fits and (most is None or layout.of(role) < most):
                yield role, other

    def _removals(self, layout: Layout, least: Layout) -> Iterator[tuple[Role, Layout]]:
        for role in self.roles:
            if layout.of(role) > max(least.of(role), bounds_of(self.budget, role).min_workers):
                yield role, layout.plus(role, -1)

    def _flips(self, layout: Layout) -> Iterator[Layout]:
        kinds, can_grow = self.scene.kinds, any(True for _ in self._adds(layout))
        removals = dict(self._removals(layout, self.least if can_grow else self.floor))
        for giver, taker in permutations(PAIR):
            most = bounds_of(self.budget, taker).max_workers
            is_of_a_shape = giver in kinds and taker in kinds and kinds[giver].shape == kinds[taker].shape
            if giver in removals and is_of_a_shape and (most is None or layout.of(taker) < most):
                yield removals[giver].plus(taker)

    # -- small things --------------------------------------------------------------------------------------------------

    def _asked(self) -> float:
        return sum(
            of_class.slo.weight * of_class.rate * of_class.slo.percentile for of_class in self.scene.load.classes
        )

    def _usd(self, role: Role) -> float:
        return self.scene.kinds[role].usd_per_hour if role in self.scene.kinds else 1.0

    def _gpus(self, layout: Layout) -> int:
        kinds = self.scene.kinds
        return sum(num * (kinds[role].num_gpus if role in kinds else 1) for role, num in layout)

    def _bounded(self, layout: Layout) -> Layout:
        for role, num in layout:
            bounds = bounds_of(self.budget, role)
            most = max(num, self.least.of(role)) if bounds.max_workers is None else bounds.max_workers
            size = max(bounds.min_workers, min(most, max(num, self.least.of(role))))
            layout = layout.plus(role, size - num)
        return layout
