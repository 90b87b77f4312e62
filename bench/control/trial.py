"""One policy on one load with one seed, in the simulator, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from baton.slo import Verdict
from bench.control.loads import Load
from bench.control.oracle import Sizes
from bench.control.rig import BOUNDS, CHAT, TIMES, deployment
from bench.sim.call import Call
from bench.sim.control import ControlledOutcome, ControlledRun, Faults
from bench.sim.control import Sizes as FleetSizes
from bench.sim.deployment import Layout
from bench.sim.simulation import Mix
from bench.traces import TraceRow
from router.controller.autoscaler.scaler import Scaler
from router.controller.settings import Budget, PoolBounds

WINDOW_S = 60.0  # of calls, in which attainment is looked at after something happened
BACK = 0.9  # of a window's calls within their targets: back to target
SETTLED = 0.1  # from the best static layout's size: the goal, docs/control.md
SETTLED_S = 600.0  # that it must stay so
_ROUNDING = 1 + 1e-9  # sums in another order: what is broken off is worse beyond doubt


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, or means of some."""

    in_slo: float  # of calls
    work_in_slo: float  # of prompt and output tokens
    gpu_hours: float
    reversals_per_hour: float
    loss: float  # GPU-hours, and those that misses are worth
    num_calls: float


@dataclass(frozen=True, slots=True)
class Trial:
    figures: Figures
    num_gpus: Sequence[int]  # that were wanted, by tick: serving, or on their way
    met: Sequence[tuple[float, bool]]  # by call, in order of arrival: when it came, whether it met its targets

    def settled_s(self, size: int) -> float | None:
        """From when on the fleet was within SETTLED of a size for SETTLED_S; None: never."""
        num_ticks, run = int(SETTLED_S / TIMES.tick_s), 0
        for tick, num in enumerate(self.num_gpus):
            run = run + 1 if abs(num / size - 1) <= SETTLED else 0
            if run == num_ticks:
                return (tick + 2 - num_ticks) * TIMES.tick_s
        return None

    def turns_after(self, at_s: float) -> int:
        """How often the fleet's size changed its direction."""
        sizes = self.num_gpus[int(at_s / TIMES.tick_s) :]
        steps = [after - before for before, after in pairwise(sizes) if after != before]
        return sum(one * other < 0 for one, other in pairwise(steps))

    def mean_gpus_after(self, at_s: float) -> float:
        return float(np.mean(self.num_gpus[int(at_s / TIMES.tick_s) :]))

    def back_s(self, from_s: float, to_s: float) -> float | None:
        """From an instant until windows were good again; None: the last one before `to_s` is not."""
        windows: dict[int, list[bool]] = {}
        for at_s, met in self.met:
            if from_s <= at_s < to_s:
                windows.setdefault(int((at_s - from_s) / WINDOW_S), []).append(met)
        bad = [window for window, flags in windows.items() if np.mean(flags) < BACK]
        last = max(windows, default=0)
        return None if bad and bad[-1] == last else (max(bad) + 1) * WINDOW_S if bad else 0.0


class Hopeless(Exception):
    """A run that was broken off, since its loss would have come out higher than asked for."""


def run(
    load: Load,
    scaler: Scaler,
    start: Sizes,
    seed: int,
    miss_gpu_s: float,
    *,
    faulty: bool = True,
    rows: Sequence[TraceRow] | None = None,
    worse_than: float = math.inf,
    least_gpus: int = 0,
) -> Trial:
    """`miss_gpu_s`: GPU-seconds that a missed call is worth. `faulty` off: nothing goes wrong. `rows`: the load's with this seed.
    `least_gpus`: the fleet never has fewer.

    Raises:
        TraceError: the load's trace is not there, or not as it should be.
        Hopeless: its loss is above `worse_than` for sure.
    """
    played = list(load.rows(seed)) if rows is None else rows
    end_s = played[-1].at_s if played else 0.0
    met: list[tuple[float, bool]] = []
    num_missed = 0

    def note(call: Call) -> None:
        nonlocal num_missed
        has_met = call.verdict is Verdict.MET
        met.append((call.row.at_s, has_met))
        num_missed += not has_met and call.row.at_s >= load.judge_from_s
        now_s = simulation.clock.now_s
        to_come_gpu_s = least_gpus * max(0.0, end_s - now_s)
        least_loss = simulation.fleet.gpu_hours(now_s) + (to_come_gpu_s + num_missed * miss_gpu_s) / 3_600
        if least_loss > worse_than * _ROUNDING:
            raise Hopeless

    controlled = ControlledRun(
        deployment(Layout(*start), caches=load.caches),
        Mix((CHAT,)),
        scaler,
        TIMES,
        Budget(load.max_workers, prefill=PoolBounds(1), decode=PoolBounds(1)),
        seed,
        faults=load.faults if faulty else Faults(),
        retargets=load.retargets,
        warm_up_s=load.judge_from_s,
        bounds=BOUNDS,
        on_call=note,
    )
    simulation = controlled.simulation
    outcome = controlled.run(played)
    return Trial(_figures(outcome, miss_gpu_s), [_wanted(sizes) for sizes in outcome.timeline], sorted(met))


def _figures(outcome: ControlledOutcome, miss_gpu_s: float) -> Figures:
    num_calls = outcome.outcome.num_calls
    missed_gpu_hours = miss_gpu_s * (1 - outcome.calls_in_slo) * num_calls / 3_600
    return Figures(
        in_slo=outcome.calls_in_slo,
        work_in_slo=outcome.tokens_in_slo,
        gpu_hours=outcome.gpu_hours,
        reversals_per_hour=outcome.reversals_per_hour,
        loss=outcome.gpu_hours + missed_gpu_hours,
        num_calls=num_calls,
    )


def _wanted(sizes: FleetSizes) -> int:
    return sizes.num_prefill + sizes.num_decode + sizes.num_both + sizes.num_coming


def mean(figures: Sequence[Figures]) -> Figures:
    return Figures(*(math.fsum(getattr(one, name) for one in figures) / len(figures) for name in Figures.__slots__))
