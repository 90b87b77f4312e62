"""One load: every policy on it, each baseline at its best setting, the oracle with each seed's own future.

    1 what calls cost           work of a mean call; ten times it is what a missed call is worth
    2 the static layout         all layouts through model.py, the best ones and their neighbours through the simulator
    3 settings of baselines     each in the simulator; the least loss stays. 2 and 3 use a seed that is not measured
    4 per seed                  ours, the baselines and the oracle's plan, in the simulator

Loss = GPU-hours + missed calls x MISS_FACTOR x a mean call's GPU-time: so a tenth of the calls missed costs as much as the work
of all, and nobody wins by serving little. It is what the oracle minimises, what settings are chosen by and what `recovered`
compares.

Here is only who waits for whom; what runs (runs.py) runs in other processes, whatever is ready at once. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np

from bench.control import runs, trial
from bench.control.baselines import SCALE_ONLY_SETTINGS, ScaleOnly, Static
from bench.control.dynamo import DYNAMO_SETTINGS, new_dynamo
from bench.control.jobs import Do
from bench.control.loads import Load
from bench.control.oracle import Prices, Sizes
from bench.control.rig import TIMES
from bench.control.runs import NewScaler
from bench.control.trial import Figures, Trial
from router.controller.autoscaler.autoscaler import Autoscaler

Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Result:
    """Of one policy: means over seeds, and each seed's."""

    figures: Figures
    by_seed: tuple[Figures, ...]
    setting: str = ""


@dataclass(frozen=True, slots=True)
class Settling:
    """How sizes came to rest, means over seeds; None: in some seed they did not."""

    settled_s: float | None  # from when on within a tenth of the best static layout's size, as of the tuning seed
    gpus: float  # from then on, by that size
    num_turns: float  # of the size's direction from then on


@dataclass(frozen=True, slots=True)
class Row:
    load: Load
    played: str  # digest of the load: its calls, and what goes wrong
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

    def __init__(self, load: Load, do: Do, *, planner_python: str | None, tunes: bool, say: Say) -> None:
        """`tunes` off: the static layout that the model likes best, and each baseline's first setting."""
        self._load = load
        self._do = do
        self._planner_python = planner_python
        self._tunes = tunes
        self._say = say
        self._num_over = 0

    async def row(self, seeds: Sequence[int]) -> Row:
        """Raises: TraceError: the load's trace is not there, or not as it should be. PlannerFailed."""
        load = self._load
        self._say("the static layout")
        static, prices = await self._do(runs.best_static, load, self._tunes)
        start = _scaled(static, load.start)
        rivals = self._rivals()
        others, oracles, ours = await asyncio.gather(  # first what the most has to wait for
            asyncio.gather(
                *(self._tuned(settings, start, seeds, prices) for settings in rivals.values()),
                self._fixed(f"{static[0]}+{static[1]}", Static, static, seeds, prices),
            ),
            asyncio.gather(*(self._oracle(start, seed, prices) for seed in seeds)),
            self._each(partial(Autoscaler, TIMES), start, seeds, prices),
        )
        results = dict(zip((*rivals, "static"), others, strict=True))
        return Row(
            load=load,
            played=await self._do(runs.digest, load, seeds),
            ours=_result(ours),
            baselines={name: results[name] for name in ("static", *rivals)},
            oracle=_result([best for _, best in oracles]),
            bound=float(np.mean([planned for planned, _ in oracles])),
            static=static,
            settling=_settling(ours, sum(static)) if load.start not in (0.0, 1.0) else None,
            back_s=[_worst([one.back_s(*span) for one in ours]) for span in _spans(load)],
        )

    def _rivals(self) -> dict[str, dict[str, NewScaler]]:
        """Baselines that have settings, and those that are tried, by what they are called."""
        rivals: dict[str, dict[str, NewScaler]] = {
            "scale-only": {str(setting): partial(ScaleOnly, setting) for setting in SCALE_ONLY_SETTINGS}
        }
        if (python := self._planner_python) is not None:
            rivals["dynamo"] = {str(setting): partial(new_dynamo, python, setting) for setting in DYNAMO_SETTINGS}
        return rivals

    async def _tuned(
        self, settings: Mapping[str, NewScaler], start: Sizes, seeds: Sequence[int], prices: Prices
    ) -> Result:
        """At the best of its settings."""
        names, news = [*settings], [*settings.values()]
        best = await self._do(runs.best_setting, self._load, news, start, prices.miss) if self._tunes else 0
        return await self._fixed(names[best], news[best], start, seeds, prices)

    async def _fixed(self, setting: str, new: NewScaler, start: Sizes, seeds: Sequence[int], prices: Prices) -> Result:
        return _result(await self._each(new, start, seeds, prices), setting)

    async def _each(self, new: NewScaler, start: Sizes, seeds: Sequence[int], prices: Prices) -> list[Trial]:
        plays = (self._do(runs.play, self._load, new, start, seed, prices.miss) for seed in seeds)
        return await asyncio.gather(*map(self._counted, plays))

    async def _oracle(self, start: Sizes, seed: int, prices: Prices) -> tuple[float, Trial]:
        return await self._counted(self._do(runs.play_oracle, self._load, start, seed, prices))

    async def _counted(self, play: Awaitable[T]) -> T:
        done = await play
        self._num_over += 1
        self._say(f"{self._num_over} runs")
        return done


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
