"""One load: every policy on it, each baseline at its best setting, the oracle with each seed's own future.

    1 what calls cost           work of a mean call; ten times it is what a missed call is worth
    2 the static layout         all layouts through model.py, the best ones and their neighbours through the simulator
    3 settings of baselines     each in the simulator; the least loss stays. 2 and 3 use a seed that is not measured
    4 per seed                  ours, the baselines and the oracle's plan, in the simulator

Loss = GPU-hours + missed calls x MISS_FACTOR x a mean call's GPU-time: so a tenth of the calls missed costs as much as the work
of all, and nobody wins by serving little. It is what the oracle minimises, what settings are chosen by and what `recovered`
compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from baton.slo import SLO
from bench.control import oracle, trial
from bench.control.baselines import SCALE_ONLY_SETTINGS, ScaleOnly, Static
from bench.control.dynamo import DYNAMO_SETTINGS, Dynamo, DynamoPlanner
from bench.control.loads import Load, until
from bench.control.model import Arrived, decode_met, prefill_met
from bench.control.oracle import Plan, Prices, Schedule, Sizes
from bench.control.rig import CHAT, TIMES, Costs
from bench.control.trial import Figures, Trial
from router.controller.autoscaler.autoscaler import Autoscaler
from router.controller.autoscaler.scaler import Scaler

MISS_FACTOR = (
    10.0  # in GPU-time of a mean call. Assumed: an operator gives up a tenth of a fleet for a hundredth of the calls
)
INTERVAL_S = 60.0  # of the oracle's plan: a start-up
TUNING_SEED = 1_000
TUNING_S = 1_800.0  # of a load, at most, on which settings are chosen
HEADROOMS = (1.1, 1.25, 1.45)  # of the oracle's plans: fleets that are busy at 91, 80 and 69 %
NUM_STATIC = 2  # of the layouts that the model likes best, beside the best with one prefill or decode worker more

NewScaler = Callable[[], Scaler]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Baseline:
    """At its best setting."""

    name: str
    setting: str
    new: NewScaler


@dataclass(frozen=True, slots=True)
class Result:
    """Of one policy: means over seeds, and each seed's."""

    figures: Figures
    by_seed: tuple[Figures, ...]
    setting: str = ""


@dataclass(frozen=True, slots=True)
class Settling:
    """How sizes came to rest, means over seeds; None: in some seed they did not."""

    settled_s: float | None  # from when on within a tenth of the oracle's size
    gpus: float  # from then on, by the oracle's
    num_turns: float  # of the size's direction from then on


@dataclass(frozen=True, slots=True)
class Row:
    load: Load
    ours: Result
    baselines: Mapping[str, Result]
    oracle: Result
    bound: float  # the oracle's loss as planned, GPU-hours
    static: Sizes
    settling: Settling | None  # constant loads
    back_s: Sequence[float | None]  # until attainment was back after each thing that happened, the worst seed

    @property
    def recovered(self) -> float | None:
        """Of the loss that static has and the oracle has not. None: there is hardly any."""
        static, best = self.baselines["static"].figures.loss, self.oracle.figures.loss
        gap = static - best
        return (static - self.ours.figures.loss) / gap if gap > 0.05 * static else None


class Contest:
    """Of one load."""

    def __init__(self, load: Load, costs: Costs, *, planner: DynamoPlanner | None, tunes: bool, say: Say) -> None:
        """`tunes` off: the static layout that the model likes best, and each baseline's first setting.

        Raises:
            TraceError: the load's trace is not there, or not as it should be.
        """
        self._load = load
        self._tunes = tunes
        self._costs = costs
        self._planner = planner
        self._say = say
        self._tuning = replace(load, rows=until(load.rows, min(load.duration_s, TUNING_S)))
        self._tuned_on = self._arrivals(TUNING_SEED, self._tuning)
        num = max(1, len(self._tuned_on))
        self._gpu_s = math.fsum(call.cost.prefill_s + call.cost.decode_s for call in self._tuned_on) / num
        self._prices = self._priced()

    def _priced(self) -> Prices:
        drain_s = self._mean_drain_s()
        miss = MISS_FACTOR * self._gpu_s
        return Prices(miss, start_up=TIMES.start_up_s, leave=drain_s, flip=drain_s + TIMES.flip_s)

    def _mean_drain_s(self) -> float:
        """Half an answer's time: what runs on a worker is on average that far from its end."""
        step_s = self._costs.step_s(8, 8 * 8_000)  # half the seats, at some 8,000 tokens each
        lengths = [call.row.output_tokens for call in self._tuned_on]
        return 0.5 * step_s * float(np.mean(lengths)) if lengths else 0.0

    def row(self, seeds: Sequence[int]) -> Row:
        """Raises: TraceError, PlannerFailed."""
        static = self._best_static()
        start = _scaled(static, self._load.start)
        baselines = [Baseline("static", f"{static[0]}+{static[1]}", Static), *self._tuned(start)]
        ours, best = [], []
        others: dict[str, list[Trial]] = {baseline.name: [] for baseline in baselines}
        bounds = []
        for seed in seeds:
            self._say(f"seed {seed}: ours")
            ours.append(self._run(Autoscaler(TIMES), start, seed))
            for baseline in baselines:
                self._say(f"seed {seed}: {baseline.name}")
                begin = static if baseline.name == "static" else start
                others[baseline.name].append(self._run(baseline.new(), begin, seed))
            self._say(f"seed {seed}: oracle")
            calls = self._arrivals(seed, self._load)
            bounds.append(self._plan(calls, start, 1.0).cost / 3_600)
            best.append(self._oracle(calls, start, seed))
        settings = {baseline.name: baseline.setting for baseline in baselines}
        return Row(
            load=self._load,
            ours=_result(ours),
            baselines={name: _result(trials, settings[name]) for name, trials in others.items()},
            oracle=_result(best),
            bound=float(np.mean(bounds)),
            static=static,
            settling=_settling(ours, sum(static)) if self._load.start not in (0.0, 1.0) else None,
            back_s=[_worst([one.back_s(*span) for one in ours]) for span in _spans(self._load)],
        )

    def _run(self, scaler: Scaler, start: Sizes, seed: int, *, faulty: bool = True) -> Trial:
        return trial.run(self._load, scaler, start, seed, self._prices.miss, faulty=faulty)

    def _tune(self, scaler: Scaler, start: Sizes) -> float:
        return trial.run(self._tuning, scaler, start, TUNING_SEED, self._prices.miss).figures.loss

    # -- settings ------------------------------------------------------------------------------------------------------

    def _best_static(self) -> Sizes:
        sizes = oracle.layouts(self._load.max_workers)
        misses = self._misses(self._tuned_on, sizes, HEADROOMS[1]).sum(axis=1)
        duration_s = min(self._load.duration_s, TUNING_S)
        losses = duration_s * np.array([sum(one) for one in sizes]) + self._prices.miss * misses
        likely = [sizes[int(place)] for place in losses.argsort(kind="stable")[:NUM_STATIC]]
        if not self._tunes:
            return likely[0]
        p, d = likely[0]
        candidates = [one for one in dict.fromkeys([*likely, (p + 1, d), (p, d + 1)]) if one in sizes]
        found: dict[Sizes, float] = {}
        for one in candidates:
            self._say(f"static {one[0]}+{one[1]}")
            found[one] = self._tune(Static(), one)
        return min(candidates, key=lambda one: found[one])

    def _tuned(self, start: Sizes) -> Iterator[Baseline]:
        scale_only = [(str(setting), partial(ScaleOnly, setting)) for setting in SCALE_ONLY_SETTINGS]
        yield self._best("scale-only", scale_only, start)
        if (planner := self._planner) is not None:
            dynamo = [(str(setting), partial(Dynamo, planner, setting)) for setting in DYNAMO_SETTINGS]
            yield self._best("dynamo", dynamo, start)

    def _best(self, name: str, settings: Sequence[tuple[str, NewScaler]], start: Sizes) -> Baseline:
        if not self._tunes:
            return Baseline(name, *settings[0])
        found = []
        for setting, new in settings:
            self._say(f"{name} {setting}")
            found.append(self._tune(new(), start))
        setting, new = settings[found.index(min(found))]
        return Baseline(name, setting, new)

    # -- the oracle ----------------------------------------------------------------------------------------------------

    def _oracle(self, calls: Sequence[Arrived], start: Sizes, seed: int) -> Trial:
        plans = dict.fromkeys(self._plan(calls, start, headroom) for headroom in HEADROOMS)
        trials = [self._run(self._schedule(plan), start, seed, faulty=False) for plan in plans]
        return min(trials, key=lambda one: one.figures.loss)

    def _schedule(self, plan: Plan) -> Schedule:
        return Schedule(plan, start_up_s=TIMES.start_up_s, drain_s=self._prices.leave)

    def _plan(self, calls: Sequence[Arrived], start: Sizes, headroom: float) -> Plan:
        sizes = oracle.layouts(max(self._load.max_workers, sum(start)))
        return oracle.cheapest(self._misses(calls, sizes, headroom), sizes, start, INTERVAL_S, self._prices)

    def _misses(self, calls: Sequence[Arrived], sizes: Sequence[Sizes], headroom: float) -> oracle.Table:
        """[layouts, intervals], of the calls that count."""
        most = max(max(one) for one in sizes)
        prefill = [prefill_met(calls, num, headroom) for num in range(1, most + 1)]
        decode = [decode_met(self._costs, calls, num, headroom) for num in range(1, most + 1)]
        counts = np.array([call.row.at_s >= self._load.judge_from_s for call in calls], dtype=bool)
        intervals = np.array([int(call.row.at_s / INTERVAL_S) for call in calls], dtype=np.int64)
        num_intervals = math.ceil(self._load.duration_s / INTERVAL_S)
        return np.array(
            [
                np.bincount(intervals, counts & ~(prefill[p - 1] & decode[d - 1]), minlength=num_intervals)
                for p, d in sizes
            ]
        )

    def _arrivals(self, seed: int, load: Load) -> list[Arrived]:
        rows = list(load.rows(seed))
        costs = self._costs.of_all(rows, caches=load.caches)
        return [Arrived(row, cost, _slo_at(load, row.at_s)) for row, cost in zip(rows, costs, strict=True)]


def _slo_at(load: Load, at_s: float) -> SLO:
    slo = CHAT
    for change in load.retargets:
        if change.at_s <= at_s:
            slo = change.slo
    return slo


def _scaled(sizes: Sizes, factor: float) -> Sizes:
    prefill, decode = (max(1, round(num * factor)) for num in sizes)
    return prefill, decode


def _result(trials: Sequence[Trial], setting: str = "") -> Result:
    by_seed = tuple(one.figures for one in trials)
    return Result(trial.mean(by_seed), by_seed, setting)


def _settling(trials: Sequence[Trial], size: int) -> Settling:
    settled = [one.settled_s(size) for one in trials]
    from_s = [at_s if at_s is not None else 0.0 for at_s in settled]
    return Settling(
        settled_s=_worst(settled),
        gpus=float(np.mean([one.mean_gpus_after(at_s) / size for one, at_s in zip(trials, from_s, strict=True)])),
        num_turns=float(np.mean([one.turns_after(at_s) for one, at_s in zip(trials, from_s, strict=True)])),
    )


def _spans(load: Load) -> list[tuple[float, float]]:
    """From each thing that happens to the next one."""
    instants = [*(kill.at_s for kill in load.faults.kills), *(change.at_s for change in load.retargets)]
    instants += [outage.from_s for outage in load.faults.outages] + list(load.events_s)
    return list(pairwise([*sorted(instants), load.duration_s]))


def _worst(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None
