"""What a contest has carried out, each in some process (jobs.py): functions of plain data that pickle tells.

Of several runs of which the one of least loss is wanted, those that cannot be it any more are broken off: a run's GPU-hours
and misses only grow. So the choice is the same as if all had been run to their ends.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from bench.control import trial
from bench.control.baselines import Static
from bench.control.foresight import Foresight
from bench.control.loads import Load, until
from bench.control.oracle import Plan, Prices, Schedule, Sizes
from bench.control.rig import TIMES
from bench.control.trial import Hopeless, Trial
from router.controller.autoscaler.scaler import Scaler

TUNING_SEED = 1_000
TUNING_S = 1_800.0  # of a load, at most, on which settings are chosen
HEADROOMS = (1.1, 1.25, 1.45)  # of the oracle's plans: fleets that are busy at 91, 80 and 69 %
NUM_STATIC = 2  # of the layouts that the model likes best, beside the best with one prefill or decode worker more

NewScaler = Callable[[], Scaler]


@dataclass(frozen=True, slots=True)
class Entry:
    """One of those of which the best is wanted."""

    new: NewScaler
    start: Sizes
    least_gpus: int = 0  # that its fleet has throughout


def least_loss(
    load: Load, entries: Sequence[Entry], seed: int, miss_gpu_s: float, *, faulty: bool = True
) -> tuple[int, Trial]:
    """The first of the best. Raises: TraceError."""
    rows = list(load.rows(seed))
    found: list[tuple[int, Trial]] = []
    for number, entry in enumerate(entries):
        limit = found[-1][1].figures.loss if found else math.inf
        try:
            one = trial.run(
                load, entry.new(), entry.start, seed, miss_gpu_s,
                faulty=faulty, rows=rows, worse_than=limit, least_gpus=entry.least_gpus,
            )  # fmt: skip
        except Hopeless:
            continue
        if one.figures.loss < limit:
            found.append((number, one))
    return found[-1]


def play(load: Load, new: NewScaler, start: Sizes, seed: int, miss_gpu_s: float) -> Trial:
    """One policy, one seed. Raises: TraceError, PlannerFailed."""
    return trial.run(load, new(), start, seed, miss_gpu_s)


def best_setting(load: Load, settings: Sequence[NewScaler], start: Sizes, miss_gpu_s: float) -> int:
    """Its number. Raises: TraceError, PlannerFailed."""
    entries = [Entry(new, start) for new in settings]
    return least_loss(_for_tuning(load), entries, TUNING_SEED, miss_gpu_s)[0]


def best_static(load: Load, tunes: bool) -> tuple[Sizes, Prices]:
    """And what things cost. `tunes` off: the layout that the model likes best.

    Raises:
        TraceError: the load's trace is not there, or not as it should be.
    """
    tuning = _for_tuning(load)
    foresight = Foresight(load, list(tuning.rows(TUNING_SEED)))
    likely = foresight.likely(NUM_STATIC, HEADROOMS[1], min(load.duration_s, TUNING_S))
    if not tunes:
        return likely[0], foresight.prices
    p, d = likely[0]
    candidates = [
        one for one in dict.fromkeys([*likely, (p + 1, d), (p, d + 1)]) if min(one) and sum(one) <= load.max_workers
    ]
    stays = not load.faults.kills  # the dead are missing until they are back
    entries = [Entry(Static, one, sum(one) if stays else 0) for one in candidates]
    number, _ = least_loss(tuning, entries, TUNING_SEED, foresight.prices.miss)
    return candidates[number], foresight.prices


def digest(load: Load, seeds: Sequence[int]) -> str:
    """Of all that a load is but its name and what it is called for: two of one digest are the same. Raises: TraceError."""
    found = hashlib.sha256()
    for part in fields(load):
        if part.name not in ("name", "goal", "rows"):
            found.update(f"{part.name}={getattr(load, part.name)!r}\n".encode())
    for seed in (TUNING_SEED, *seeds):
        for row in load.rows(seed):
            found.update(f"{seed} {row!r}\n".encode())
    return found.hexdigest()


def _for_tuning(load: Load) -> Load:
    return replace(load, rows=until(load.rows, min(load.duration_s, TUNING_S)))


def play_oracle(load: Load, start: Sizes, seed: int, prices: Prices) -> tuple[float, Trial]:
    """What its plan without headroom costs, GPU-hours, and the best of its runs. Raises: TraceError."""
    foresight = Foresight(load, list(load.rows(seed)))
    plans = dict.fromkeys(foresight.plan(start, headroom, prices) for headroom in HEADROOMS)
    entries = [Entry(partial(_schedule, plan, prices), start) for plan in plans]
    _, best = least_loss(load, entries, seed, prices.miss, faulty=False)
    return foresight.plan(start, 1.0, prices).cost / 3_600, best


def _schedule(plan: Plan, prices: Prices) -> Schedule:
    return Schedule(plan, start_up_s=TIMES.start_up_s, drain_s=prices.leave)
