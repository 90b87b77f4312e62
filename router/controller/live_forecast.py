"""What a change of SLO classes would do to attainment, by simulating the fleet as it is measured. Implements Forecast.

    1 the classes in force, simulated           -> how far the simulation is from what routers measure of the same classes
    2 the changed classes, simulated            -> moved by as much, on the log-odds scale, as far as the measurement is worth
    3 the same, with slower and quicker steps   -> what an error of the step model does
    interval: 3, chance in the simulation and chance in what will be counted over one window, together; at most MAX_WIDTH wide

Runs on the event loop; the simulator is a process of its own (planner_process.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import stdev

from baton.errors import BatonError
from baton.slo import SLO
from router.controller.feasibility import NoForecast, Outlook, Prediction
from router.controller.measured_fleet import MIN_CALLS, WINDOW_S, Measured, Unknown, loads, pools, question, slower
from router.controller.what_if import Answer, Run, Scenario, Simulator

MAX_WIDTH = 0.10  # of an interval
# Of the interval: 1.28 standard deviations hold 80 % of what is normal, and errors of models have longer tails.
_Z = 1.64
# Of step times, that a model may be off by as a whole: its own error is of single steps, noise included, and much of that cancels
_LEAST_OFF, _MOST_OFF = 0.02, 0.10
_UNKNOWN_OFF = 0.05  # where a model has not said yet: what fitted ones miss held-out runs by, docs/timing.md
_NOW, _AFTER, _SLOWER, _QUICKER = "now", "after", "slower", "quicker"
_MAX_SHIFT = 1.5  # log-odds: from 90 to 97.6 %; a simulation that is off by more is not moved into place by one number
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
            loaded = {load.class_name for load in loads(measured.windows)}
            asked = question(measured.facts, measured.windows, _scenarios(measured, before, after), self._budget_s)
            answer = await self._simulator.ask(asked)
        except (Unknown, BatonError) as error:
            raise NoForecast(str(error)) from error
        if not answer.runs:
            raise NoForecast(f"the traffic is too much to simulate within {self._budget_s:g} s")
        names = [slo.name for slo in after if slo.name in loaded]
        few = f"fewer than {MIN_CALLS} calls in the last {WINDOW_S:g} s"
        return Outlook(
            {name: prediction(answer, name, measured) for name in names},
            {slo.name: few for slo in after if slo.name not in loaded},
            ASSUMPTIONS,
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
    """Of a class that every scenario's calls include."""
    attained = {name: _mean(answer.of(name), class_name) for name in (_NOW, _AFTER, _SLOWER, _QUICKER)}
    runs = [run.of(class_name) for run in answer.of(_AFTER)]
    num_calls = sum(run.num_calls for run in runs)
    shift = _shift(attained[_NOW], num_calls, measured.attained(class_name))
    center, low, high = (_moved(attained[name], shift, num_calls) for name in (_AFTER, _SLOWER, _QUICKER))
    by_model = max(abs(high - center), abs(center - low))
    by_chance = _chance([run.attainment for run in runs if run.num_calls], center, num_calls)
    half = min(MAX_WIDTH / 2, math.hypot(by_model, _Z * by_chance))
    return Prediction(center, max(0.0, center - half), min(1.0, center + half))


def _mean(runs: Sequence[Run], class_name: str) -> float:
    found = [run.of(class_name) for run in runs]
    num_calls = sum(run.num_calls for run in found)
    return sum(run.num_met for run in found) / num_calls if num_calls else 0.0


def _shift(simulated: float, num_simulated: int, attained: tuple[float, float] | None) -> float:
    """Log-odds from what was simulated of the classes in force to what was measured; 0 where nothing was."""
    if attained is None:
        return 0.0
    num_met, num_judged = attained
    difference = _log_odds(num_met / num_judged, num_judged) - _log_odds(simulated, num_simulated)
    return max(-_MAX_SHIFT, min(_MAX_SHIFT, difference))


def _log_odds(share: float, num: float) -> float:
    """Half a call from certainty at most: all of 50 says less than all of 5,000."""
    share = min(1 - 0.5 / (num + 1), max(0.5 / (num + 1), share))
    return math.log(share / (1 - share))


def _moved(share: float, shift: float, num: int) -> float:
    if not shift or share in (0.0, 1.0):  # what no call met, or all did, is beyond what odds say
        return share
    return 1 / (1 + math.exp(-_log_odds(share, num) - shift))


def _chance(shares: Sequence[float], center: float, num_calls: int) -> float:
    """Standard deviation of one run of a seed, which is what a window of live traffic is; a lone run is taken for independent
    calls, of which one more or less is always possible."""
    per_run = max(1.0, num_calls / max(1, len(shares)))
    lone = math.sqrt(max(center * (1 - center), 1 / per_run) / per_run)
    if len(shares) < 2:
        return lone
    return max(lone, math.hypot(stdev(shares), stdev(shares) / math.sqrt(len(shares))))
