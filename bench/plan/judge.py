"""The judge of every plan: what share of calls a deployment keeps within their targets, by simulation. Pure.

A trial is one seed at one mean rate. Trials of different deployments at one seed see the same calls, so that their difference is
not chance (common random numbers: Law, Simulation Modeling and Analysis, section 11.2). A deployment starts empty, so what comes
before it has filled up is not counted: answers have long tails, and what a decoding worker holds is mostly tail.

The knee of a deployment is the highest rate at which every class holds its percentile. Goodput is what is within targets there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.slo import SLO, Verdict
from bench.plan.space import Candidate
from bench.plan.traffic import Traffic
from bench.sim.call import Call
from bench.sim.deployment import Deployment
from bench.sim.simulation import BOUNDS, Mix, Outcome, Simulation

SETTLED = 0.9  # of the sequences that will be there are there when counting begins
LENGTH = 2.5  # of a trial, at least, in times until then: as long is counted as is needed for its mean to be a mean
WARM_UP = 1 / LENGTH  # of a trial's calls
MAX_CALLS = 20_000  # of one trial: half a minute
_STEP = 1.25  # between rates that are tried until the knee is between two
_TRIES_OUT = 12  # of such steps: a factor of 15
FINE = 0.08  # relative width of the bracket of a knee; interpolation is finer


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated."""

    search_calls: int = 1_000  # of a trial that compares: attainment near 95 % to 0.8 points
    final_calls: int = 2_000  # of one that is reported
    final_seeds: int = 3
    seed: int = 0

    @property
    def final_seed_numbers(self) -> range:
        """Others than the one that the search has seen: what was chosen for a seed looks better on it."""
        return range(self.seed + 1, self.seed + 1 + self.final_seeds)


@dataclass(frozen=True, slots=True)
class ClassShare:
    """Of one class in one trial."""

    slo: SLO
    num_calls: int
    attainment: float | None  # None: no call of it was counted

    @property
    def margin(self) -> float:
        """Above its percentile; a class without calls has none to miss."""
        return 1.0 - self.slo.percentile if self.attainment is None else self.attainment - self.slo.percentile


@dataclass(frozen=True, slots=True)
class Trial:
    rate: float
    seed: int
    num_calls: int  # simulated
    goodput: float  # calls per second within their targets
    tokens_per_s: float  # prompt and answer, of calls within their targets or not
    output_tokens_per_s: float
    classes: Sequence[ClassShare]
    missed: Counter[Verdict]
    busy: dict[str, float]  # by role: share of the time that its workers step
    preemptions: int
    is_cut: bool = False  # by MAX_CALLS, before its fleet was full: who fills up serves more than who is full

    @property
    def margin(self) -> float:
        return min(share.margin for share in self.classes)

    @property
    def holds(self) -> bool:
        return self.margin >= 0.0


@dataclass(frozen=True, slots=True)
class Knee:
    """`rate`, interpolated, is between `below` (holds) and `above` (does not); 0 where nothing holds."""

    rate: float
    below: Trial | None
    above: Trial | None

    @property
    def goodput(self) -> float:
        """At the knee; a little less than its rate."""
        return self.rate * self.below.goodput / self.below.rate if self.below is not None else 0.0


class _HopelessError(Exception):
    """A trial cannot hold any more."""


class _Watch:
    """Counts what each class may still miss, and what it misses before anything counts.

    A deployment that is filling up has it easier than a full one. Bursts may come first all the same, so that misses before are
    held against it only once there are twice as many in all as there may be.
    """

    def __init__(self, mix: Mix, num_calls: int, warm_up_s: float) -> None:
        total = sum(mix.shares)
        shares = zip(mix.classes, mix.shares, strict=True)
        counted = (1 - WARM_UP) * num_calls
        # Classes are drawn, so one may have some more calls than its share: three deviations
        self._left = {
            slo.name: (1 - slo.percentile) * (counted * part / total + 3 * math.sqrt(counted)) for slo, part in shares
        }
        self._left_in_all = {name: 2 * left for name, left in self._left.items()}
        self._warm_up_s = warm_up_s

    def see(self, call: Call) -> None:
        """Raises: _HopelessError."""
        if call.verdict is Verdict.MET:
            return
        name = call.slo.name
        self._left[name] -= call.row.at_s >= self._warm_up_s
        self._left_in_all[name] -= 1
        if self._left[name] < 0 or self._left_in_all[name] < 0:
            raise _HopelessError


Distortion = Callable[[Deployment], Deployment]


class Judge:
    """Counts what it simulates. Trials are remembered: a search comes back to the same ones."""

    def __init__(
        self,
        traffic: Traffic,
        mix: Mix,
        *,
        distort: Distortion | None = None,
        on_call: Callable[[Call], None] | None = None,
    ) -> None:
        """`distort`: GPUs as they turn out to be, where that is not what a plan takes them for."""
        self.num_calls = 0
        self.num_trials = 0
        self._traffic = traffic
        self._mix = mix
        self._distort = distort
        self._on_call = on_call
        self._settling_s = _settling_s(traffic, mix)
        self._trials: dict[tuple[Candidate, float, int, int], Trial] = {}

    def trial(self, candidate: Candidate, rate: float, *, num_calls: int, seed: int, gives_up: bool = False) -> Trial:
        key = candidate, rate, num_calls, seed
        if key not in self._trials:
            self._trials[key] = self._try(*key, gives_up)
        return self._trials[key]

    def holds(self, candidate: Candidate, rate: float, *, num_calls: int, seed: int) -> bool:
        """As the trial would say; one that has missed too much already is not run to its end."""
        try:
            return self.trial(candidate, rate, num_calls=num_calls, seed=seed, gives_up=True).holds
        except _HopelessError:
            return False

    def _try(self, candidate: Candidate, rate: float, num_calls: int, seed: int, gives_up: bool) -> Trial:
        least = math.ceil(LENGTH * self._settling_s * rate)
        num_calls = min(MAX_CALLS, max(num_calls, least))
        rows = self._traffic.calls(rate, num_calls, seed)
        deployment = candidate.deployment if self._distort is None else self._distort(candidate.deployment)
        warm_up_s = rows[int(WARM_UP * num_calls)].at_s
        bounds = None if candidate.window_s == math.inf else replace(BOUNDS, window_s=candidate.window_s)
        watch = _Watch(self._mix, num_calls, warm_up_s) if gives_up else None

        def on_call(call: Call) -> None:
            self.num_calls += 1
            if self._on_call is not None:
                self._on_call(call)
            if watch is not None:
                watch.see(call)

        self.num_trials += 1
        simulation = Simulation(deployment, self._mix, seed=seed, warm_up_s=warm_up_s, bounds=bounds, on_call=on_call)
        outcome = simulation.run(rows)
        return _trial(outcome, rate, seed, num_calls, is_cut=num_calls < least)

    def knee(self, candidate: Candidate, guess: float, *, num_calls: int, seed: int, step: float = _STEP) -> Knee:
        """Look for it from `guess` outwards, by a factor of `step`, then between two."""

        def at(rate: float) -> Trial:
            return self.trial(candidate, rate, num_calls=num_calls, seed=seed)

        below: Trial | None = None
        above: Trial | None = None
        trial = at(guess)
        for _ in range(_TRIES_OUT):
            below, above = (trial, above) if trial.holds else (below, trial)
            if below is not None and above is not None:
                break
            trial = at(trial.rate * step if trial.holds else trial.rate / step)
        if below is None or above is None:
            return Knee(below.rate if below is not None else 0.0, below, above)
        while above.rate / below.rate > 1 + FINE:
            trial = at(math.sqrt(below.rate * above.rate))
            below, above = (trial, above) if trial.holds else (below, trial)
        return Knee(_crossing(below, above), below, above)


def _crossing(below: Trial, above: Trial) -> float:
    part = below.margin / (below.margin - above.margin)
    return below.rate + part * (above.rate - below.rate)


def _settling_s(traffic: Traffic, mix: Mix) -> float:
    """Until a deployment that just holds its pace has filled up: after t seconds, to E min(S, t) / E S, where calls last S."""
    calls = traffic.calls(traffic.rate, 2_000, 0)  # tails of lengths to some percent
    pace_s = sum(s.tpot_ms * part for s, part in zip(mix.classes, mix.shares, strict=True)) / sum(mix.shares) / 1e3
    lasts_s = sorted(call.output_tokens * pace_s for call in calls)
    wanted_s, over_s = SETTLED * sum(lasts_s), 0.0
    for number, last_s in enumerate(lasts_s):
        num_left = len(lasts_s) - number
        if over_s + num_left * last_s >= wanted_s:
            return (wanted_s - over_s) / num_left
        over_s += last_s
    raise AssertionError("the longest of them is reached before all is there")


def _trial(outcome: Outcome, rate: float, seed: int, num_calls: int, *, is_cut: bool) -> Trial:
    missed: Counter[Verdict] = Counter()
    busy: dict[str, list[float]] = {}
    for measure in outcome.classes:
        missed.update(measure.verdicts)
    del missed[Verdict.MET]
    for worker in outcome.workers:
        busy.setdefault(worker.role.name.lower(), []).append(worker.busy_share)
    output_tokens = sum(measure.output_tokens for measure in outcome.classes)
    prompt_tokens = sum(measure.prompt_tokens for measure in outcome.classes)
    return Trial(
        rate,
        seed,
        num_calls,
        outcome.goodput,
        (prompt_tokens + output_tokens) / outcome.measured_s,
        output_tokens / outcome.measured_s,
        [ClassShare(measure.slo, measure.num, measure.attained.mean) for measure in outcome.classes],
        missed,
        {role: sum(shares) / len(shares) for role, shares in busy.items()},
        sum(worker.num_preemptions for worker in outcome.workers),
        is_cut,
    )


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float | None]:
    """Of independent runs: their mean, and half of its 95 % interval by Student's t; None for one run."""
    num, mean = len(values), sum(values) / len(values)
    if num < 2:
        return mean, None
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (num - 1))
    return mean, student_t(num - 1) * deviation / math.sqrt(num)


_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # df 1 to 10, any table of Student's t


def student_t(df: int) -> float:
    """The two-sided 95 % point; beyond the table the first term of its expansion in 1 / df."""
    return _T_95[df - 1] if df <= len(_T_95) else 1.96 + 2.37 / df
