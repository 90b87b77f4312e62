"""What a change of SLO classes would do to attainment, by simulating the fleet as it is measured. Implements Forecast.

    1 the classes in force, simulated           -> how far the simulation is from what routers measure of the same classes
    2 the changed classes, simulated            -> moved by as much, on the log-odds scale, as far as the measurement is worth
    3 the same, with slower and quicker steps   -> what an error of the step model does
    interval: 3, chance in the simulation and chance in what will be counted over one window, together; at most MAX_WIDTH wide,
    and where it would be much wider nothing is promised

Nor is it of a class whose TPOT target is so near to a lone sequence's step that routers, which see steps wander, take it for one
that can be kept at one moment and for none at the next (`undecided`). What was measured under such a target moves nothing.

Runs on the event loop; the simulator is a process of its own (planner_process.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import stdev

from baton.errors import BatonError
from baton.request import Role
from baton.slo import SLO
from router.controller.feasibility import NoForecast, Outlook, Prediction
from router.controller.measured_fleet import (
    MIN_CALLS,
    TOO_MUCH,
    WINDOW_S,
    Measured,
    Unknown,
    loads,
    pools,
    question,
    slower,
)
from router.controller.step_model import StepWork
from router.controller.what_if import Answer, ClassLoad, ClassRun, Scenario, Simulator, WorkerPool

MAX_WIDTH = 0.10  # of an interval
# Of an interval, on either side. Where nearly all calls meet their targets odds and chance leave next to nothing, but some
# always wait for what no simulation has: a step that stalls, a core that is busy. measured: docs/slo.md
_LEAST_HALF = 0.01
_TOO_WIDE = 1.5  # times MAX_WIDTH: what is as uncertain as that is not squeezed into an interval
_Z = 1.28  # standard deviations hold 80 % of what is normal
# Of step times, that a model may be off by as a whole: its own error is of single steps, noise included, and much of that cancels
_LEAST_OFF, _MOST_OFF = 0.02, 0.10
_UNKNOWN_OFF = 0.05  # where a model has not said yet: what fitted ones miss held-out runs by, docs/timing.md
_NOW, _AFTER, _SLOWER, _QUICKER = "now", "after", "slower", "quicker"
# Log-odds, standard deviations: how far simulations are off where nothing was measured, and still are where it was, since
# other targets are missed by other calls. measured: docs/slo.md
_OFF, _STAYS_OFF = 0.5, 0.2
_WANDERS = 0.06  # what a router takes a step for, from one moment to the next. measured: docs/slo.md
_CLUMPED = 1.5  # times the spread that independent calls would have: they wait in the same queues
ASSUMPTIONS = (
    f"traffic, layout and tuning stay as they were over the last {WINDOW_S:g} s; arrivals are Poisson",
    "calls of a class that is removed do not come any more; a class without traffic is not predicted",
)


class LiveForecast:
    """Of one fleet."""

    def __init__(self, simulator: Simulator, measured: Callable[[], Measured], budget_s: float) -> None:
        """`budget_s`: of the clock, for simulating."""
        self._simulator = simulator
        self._measured = measured
        self._budget_s = budget_s

    async def predict(self, before: Sequence[SLO], after: Sequence[SLO]) -> Outlook:
        """Raises: NoForecast."""
        try:
            measured = self._measured()
            come, of = loads(measured.windows), pools(measured.facts)
            loaded = {load.class_name for load in come}
            was_doubted, is_doubted = undecided(before, come, of), undecided(after, come, of)
            asked = question(measured.facts, measured.windows, _scenarios(measured, before, after), self._budget_s)
            answer = await self._simulator.ask(asked)
        except (Unknown, BatonError) as error:
            raise NoForecast(str(error)) from error
        if not all(answer.of(scenario.name) for scenario in asked.scenarios):
            raise NoForecast(f"such traffic cannot be simulated within {self._budget_s:g} s: {TOO_MUCH}")
        found: dict[str, Prediction] = {}
        unknown: dict[str, str] = {}
        for slo in after:
            try:
                if slo.name not in loaded:
                    raise Unknown(f"fewer than {MIN_CALLS} calls in the last {WINDOW_S:g} s")
                if slo.name in is_doubted:
                    raise Unknown(_doubt(slo))
                is_settled = measured.is_settled and slo.name not in was_doubted
                found[slo.name] = prediction(answer, slo.name, replace(measured, is_settled=is_settled))
            except Unknown as error:
                unknown[slo.name] = str(error)
        return Outlook(found, unknown, ASSUMPTIONS)


def undecided(classes: Sequence[SLO], come: Sequence[ClassLoad], of: Sequence[WorkerPool]) -> frozenset[str]:
    """Classes under whose TPOT target it is not sure whether a router takes it for one that can be kept: it is what a lone
    sequence's step takes, as far as that wanders."""
    context_tokens = _context_tokens(come)
    alone_s = [pool.steps.step_s(StepWork(1.0, context_tokens)) for pool in of if pool.role is not Role.PREFILL]
    return frozenset(
        slo.name for slo in classes if any(abs(slo.tpot_ms / 1e3 - step_s) <= _WANDERS * step_s for step_s in alone_s)
    )


def _context_tokens(come: Sequence[ClassLoad]) -> float:
    """Of a mean sequence, as routers count it: its prompt and all that it will answer."""
    rate = math.fsum(load.rate for load in come)
    tokens = math.fsum(load.rate * (load.prompt_tokens + load.output_tokens) for load in come)
    return tokens / rate if rate else 0.0


def _doubt(slo: SLO) -> str:
    return (
        f"its TPOT target of {slo.tpot_ms:g} ms is about what a step of one sequence alone takes: it may be kept or not"
    )


def _scenarios(measured: Measured, before: Sequence[SLO], after: Sequence[SLO]) -> list[Scenario]:
    of, local_tokens = pools(measured.facts), measured.facts.local_prefill_tokens
    off = min(_MOST_OFF, max(_LEAST_OFF, *(measured.errors.get(pool.role, _UNKNOWN_OFF) for pool in of)))
    changed = Scenario(_AFTER, tuple(after), of, local_tokens)
    return [
        Scenario(_NOW, tuple(before), of, local_tokens),
        changed,
        slower(changed, _SLOWER, 1 + off),
        slower(changed, _QUICKER, 1 - off),
    ]


def prediction(answer: Answer, class_name: str, measured: Measured) -> Prediction:
    """Of a class that every scenario's calls include. Raises: Unknown: it may be anything in a wide range."""
    now = _Share.of([run.of(class_name) for run in answer.of(_NOW)])
    after, slower, quicker = (
        _Share.of([run.of(class_name) for run in answer.of(name)]) for name in (_AFTER, _SLOWER, _QUICKER)
    )
    shift, unsure = _shift(now, measured.attained(class_name))
    center, low, high = (share.moved(shift) for share in (after, slower, quicker))
    by_model = max(abs(high - center), abs(center - low))
    by_shift = unsure * center * (1 - center)
    by_chance = after.spread * math.sqrt(1 / after.num_runs + after.run_calls / max(1.0, measured.arrived(class_name)))
    half = math.hypot(by_model, _Z * by_shift, _Z * by_chance)
    if half > _TOO_WIDE * MAX_WIDTH / 2:
        span = f"{max(0.0, center - half):.0%} to {min(1.0, center + half):.0%}"
        why = (
            "step times are not known well enough for this target"
            if by_model > half / 2
            else "too few calls to be surer"
        )
        raise Unknown(f"anything from {span}: {why}")
    half = min(MAX_WIDTH / 2, max(_LEAST_HALF, half))
    return Prediction(center, max(0.0, center - half), min(1.0, center + half))


@dataclass(frozen=True, slots=True)
class _Share:
    """Of simulated calls that met their targets."""

    num_met: float
    num_calls: float
    num_runs: int
    spread: float  # of one run, standard deviation

    @classmethod
    def of(cls, runs: Sequence[ClassRun]) -> _Share:
        num_met, num_calls = sum(run.num_met for run in runs), sum(run.num_calls for run in runs)
        share = _cautious(num_met, num_calls)
        alone = math.sqrt(share * (1 - share) * len(runs) / max(1, num_calls))  # if calls were independent
        attained = [run.attainment for run in runs if run.num_calls]
        found = stdev(attained) if len(attained) > 2 else _CLUMPED * alone
        return cls(num_met, num_calls, len(runs), max(alone, found))

    @property
    def run_calls(self) -> float:
        return self.num_calls / self.num_runs

    def moved(self, shift: float) -> float:
        """By log-odds; what all calls met, or none, is beyond what odds say."""
        if self.num_met in (0, self.num_calls):
            return float(self.num_met > 0)
        return 1 / (1 + math.exp(-_log_odds(self.num_met, self.num_calls) - shift))


def _shift(simulated: _Share, attained: tuple[float, float] | None) -> tuple[float, float]:
    """Log-odds from what was simulated of the classes in force to what was measured, and the standard deviation left.

    As far as the two are known: the usual combination of a prior, which is that a simulation is _OFF off, with a measurement.
    """
    if attained is None:
        return 0.0, _OFF
    num_met, num_judged = attained
    difference = _log_odds(num_met, num_judged) - _log_odds(simulated.num_met, simulated.num_calls)
    variance = _variance(num_met, num_judged) + _variance(simulated.num_met, simulated.num_calls)
    weight = _OFF**2 / (_OFF**2 + variance)
    return weight * difference, max(_STAYS_OFF, _OFF * math.sqrt(1 - weight))


def _cautious(num_met: float, num_calls: float) -> float:
    """A share that is never 0 or 1: half a call on either side."""
    return (num_met + 0.5) / (num_calls + 1)


def _log_odds(num_met: float, num_calls: float) -> float:
    share = _cautious(num_met, num_calls)
    return math.log(share / (1 - share))


def _variance(num_met: float, num_calls: float) -> float:
    """Of log-odds; calls that miss come in clumps."""
    return _CLUMPED**2 * (1 / (num_met + 0.5) + 1 / (num_calls - num_met + 0.5))
