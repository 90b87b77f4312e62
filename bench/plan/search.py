"""Finds the best candidate: a guess says which ones are worth it, the simulator decides among them.

For so many GPUs: the one that holds the highest rate for its price.
    1 the best guesses of each structure (colocated, P/D, ...) and hardware are the short list
    2 the first is measured to its knee; each other must hold a little more than the best so far, in one trial, to be
      measured
    3 neighbours of the best (a worker in another role, the next setting of a knob) are tried likewise, until none is better
For a rate: the cheapest that holds it.
    1 of each structure and hardware, sizes around the one whose guess is enough are tried, cheaper ones after one that holds
    2 the best guesses of one GPU fewer are tried; then 3 as above
Never knows whether a better one lies elsewhere: bench/plan_figures.py compares with looking at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bench.plan.judge import Effort, Judge, Knee
from bench.plan.screen import Guess, Targets, guess
from bench.plan.space import MAX_WORKERS, Candidate, Space, neighbours
from bench.plan.traffic import Load
from bench.sim.deployment import Hardware

BETTER = 1.02  # what a challenger must hold: less is chance at a thousand calls
SHORT_LIST = 6  # candidates that are simulated, beside neighbours
NEIGHBOURS = 4  # of them, per round
PLAUSIBLE = 0.7  # of the best guess of its kind: guesses are off by up to 30 % (docs/planner.md)
_ROUNDS = 2
_SIZES_OFF = 6  # from the guessed size, each way


class Structure(StrEnum):
    COLOCATED = "colocated"
    SPLIT = "P/D"
    LOCAL = "P/D with local prefill"
    MIXED = "mixed roles"


def structure(candidate: Candidate) -> Structure:
    if candidate.is_colocated:
        return Structure.COLOCATED
    if candidate.layout.num_both:
        return Structure.MIXED
    return Structure.LOCAL if candidate.deployment.local_prefill_tokens else Structure.SPLIT


@dataclass(frozen=True, slots=True)
class Screened:
    candidate: Candidate
    guess: Guess

    @property
    def value(self) -> float:
        """Calls per second and USD per hour."""
        return self.guess.rate / self.candidate.usd_per_hour

    @property
    def kind(self) -> tuple[Structure, Hardware, Hardware | None]:
        deployment = self.candidate.deployment
        return structure(self.candidate), Hardware(deployment.gpu, deployment.tp), deployment.decode_hardware


@dataclass(frozen=True, slots=True)
class Found:
    candidate: Candidate
    guess: Guess
    knee: Knee

    @property
    def value(self) -> float:
        return self.knee.rate / self.candidate.usd_per_hour


class Search:
    def __init__(self, space: Space, load: Load, targets: Targets, judge: Judge, effort: Effort) -> None:
        self.judge = judge
        self._space = space
        self._load = load
        self._targets = targets
        self._effort = effort
        self._screened: dict[int, list[Screened]] = {}  # by number of GPUs

    # For so many GPUs

    def best(self, num_gpus: int, *, wanted: Callable[[Candidate], bool] = lambda _: True) -> Found | None:
        """None: no candidate is wanted, or none holds any rate."""
        ranked = [one for one in self.screen(num_gpus) if wanted(one.candidate)]
        return self._improved(self.race(_short_list(ranked)), wanted)

    def _improved(self, found: Found | None, wanted: Callable[[Candidate], bool]) -> Found | None:
        """By going to neighbours while one is better."""
        for _ in range(_ROUNDS):
            if found is None:
                return None
            near = [self._screen(other) for other in neighbours(self._space, found.candidate) if wanted(other)]
            near.sort(key=lambda one: -one.value)
            better = self.race(near[:NEIGHBOURS], found)
            if better is found:
                return found
            found = better
        return found

    def race(
        self, contenders: Iterable[Screened], best: Found | None = None, *, better: float = BETTER
    ) -> Found | None:
        for one in contenders:
            if best is None or best.knee.rate == 0:
                best = self._measured(one, one.guess.rate)
                continue
            if best.candidate == one.candidate:
                continue
            target = better * best.value * one.candidate.usd_per_hour
            if self._trial_holds(one.candidate, target):
                challenger = self._measured(one, target)
                best = max(best, challenger, key=lambda found: found.value)
        return best

    def _measured(self, one: Screened, guess_rate: float) -> Found:
        effort = self._effort
        knee = self.judge.knee(one.candidate, guess_rate, num_calls=effort.search_calls, seed=effort.seed)
        return Found(one.candidate, one.guess, knee)

    def _trial_holds(self, candidate: Candidate, rate: float) -> bool:
        return self.judge.holds(candidate, rate, num_calls=self._effort.search_calls, seed=self._effort.seed)

    def screen(self, num_gpus: int) -> list[Screened]:
        """Best value first."""
        if num_gpus not in self._screened:
            found = [self._screen(candidate) for candidate in self._space.of_size(num_gpus)]
            self._screened[num_gpus] = sorted(found, key=lambda one: -one.value)
        return self._screened[num_gpus]

    def _screen(self, candidate: Candidate) -> Screened:
        return Screened(candidate, guess(candidate, self._load, self._targets))

    # For a rate

    def cheapest(self, rate: float, *, wanted: Callable[[Candidate], bool] = lambda _: True) -> Found | None:
        """None: nothing of up to MAX_WORKERS workers holds it."""
        found = self._cheapest(rate, wanted)
        return self._improved(self.race([found]), wanted) if found is not None else None

    def _cheapest(self, rate: float, wanted: Callable[[Candidate], bool]) -> Screened | None:
        best: Screened | None = None
        for sizes in self._families(rate, wanted):
            best = self._walk(sizes, rate, best)
        if best is None:
            return None
        cheaper = [
            one
            for one in self.screen(best.candidate.num_gpus - 1)
            if wanted(one.candidate) and one.candidate.usd_per_hour < best.candidate.usd_per_hour
        ]
        return next((one for one in cheaper[:NEIGHBOURS] if self._trial_holds(one.candidate, rate)), best)

    def _families(self, rate: float, wanted: Callable[[Candidate], bool]) -> list[list[Screened]]:
        """Of each kind the best guess per size, cheapest first; kinds whose guess is enough for the least money first."""
        kinds: dict[object, dict[float, Screened]] = {}
        for num_gpus in range(1, self._max_gpus(rate) + 1):
            for one in self.screen(num_gpus):
                if wanted(one.candidate):
                    kinds.setdefault(one.kind, {}).setdefault(one.candidate.usd_per_hour, one)
        families = [sorted(sizes.values(), key=lambda one: one.candidate.usd_per_hour) for sizes in kinds.values()]
        families = [family for family in families if family[-1].guess.rate >= rate / 2]
        families.sort(key=lambda family: family[_enough(family, rate)].candidate.usd_per_hour)
        chosen = families[:SHORT_LIST]
        for kept in Structure:  # one of each, so that the plan can say what they would cost
            if not any(family[0].kind[0] is kept for family in chosen):
                chosen += [family for family in families if family[0].kind[0] is kept][:1]
        return chosen

    def _max_gpus(self, rate: float) -> int:
        """Twice what the guess says is enough, and no more workers than a plan has."""
        widest = MAX_WORKERS * max(where.tp for where in self._space.hardware)
        for num_gpus in range(1, widest + 1):
            screened = self.screen(num_gpus)
            if screened and max(one.guess.rate for one in screened) >= 1.5 * rate:
                return num_gpus
        return widest

    def _walk(self, sizes: Sequence[Screened], rate: float, best: Screened | None) -> Screened | None:
        """From the guessed size up until one holds, or down until one does not."""
        at = _enough(sizes, rate)
        if not self._holds_for_less(sizes[at], rate, best):
            above = sizes[at + 1 : at + 1 + _SIZES_OFF]
            return next((one for one in above if self._holds_for_less(one, rate, best)), best)
        found = sizes[at]
        for one in reversed(sizes[max(0, at - _SIZES_OFF) : at]):
            if not self._holds_for_less(one, rate, found):
                break
            found = one
        return found

    def _holds_for_less(self, one: Screened, rate: float, best: Screened | None) -> bool:
        dearer = best is not None and one.candidate.usd_per_hour >= best.candidate.usd_per_hour
        return not dearer and self._trial_holds(one.candidate, rate)


def _enough(sizes: Sequence[Screened], rate: float) -> int:
    """The cheapest whose guess holds the rate; the largest where none does."""
    return next((number for number, one in enumerate(sizes) if one.guess.rate >= rate), len(sizes) - 1)


def _short_list(ranked: Sequence[Screened]) -> list[Screened]:
    """The best of each kind, then the best of the rest; colocated ones first, so that a race starts from the plainest.

    Every colocated one that may be the best of them is there: a plan must never be worse than a tuned colocated worker.
    """
    firsts: dict[object, Screened] = {}
    for one in ranked:
        firsts.setdefault(one.kind, one)
    colocated = [one for one in ranked if one.candidate.is_colocated]
    chosen = [one for one in colocated if one.value >= PLAUSIBLE * colocated[0].value]
    others = [one for one in firsts.values() if not one.candidate.is_colocated][:SHORT_LIST]
    chosen += others + _without(ranked, [*chosen, *others])[: SHORT_LIST - len(others)]
    return sorted(chosen, key=lambda one: (not one.candidate.is_colocated, -one.value))


def _without(ranked: Sequence[Screened], chosen: Sequence[Screened]) -> list[Screened]:
    taken = {one.candidate for one in chosen}
    return [one for one in ranked if one.candidate not in taken]
