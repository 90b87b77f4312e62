"""What a run was like, in memory that does not grow with it: histograms, batch means, counts per SLO class. Pure.

Confidence: calls that follow each other wait in the same queues, so their spread says too little. Means of long batches of them
are nearly independent; their spread gives the interval (batch means, Law, Simulation Modeling and Analysis, section 9.5.3).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from baton.slo import SLO, Verdict
from bench.sim.call import Call

_STEP = 0.005  # of a bin's edges, relative: a percentile is off by half of it
_LEAST_S = 1e-5
_NUM_BINS = 4_800  # up to 2.5e5 s
MAX_BATCHES = (
    64  # halved by joining neighbours: 32 to 64 of them, beyond which intervals hardly change (Schmeiser 1982)
)
_MIN_BATCHES = 10
_Z = 1.96


class Histogram:
    """Percentiles of times, to 0.25 %."""

    def __init__(self) -> None:
        self.num = 0
        self._counts = [0] * _NUM_BINS

    def add(self, seconds: float) -> None:
        self.num += 1
        number = int(math.log(seconds / _LEAST_S) / _STEP) if seconds > _LEAST_S else 0
        self._counts[min(number, _NUM_BINS - 1)] += 1

    def percentile(self, percent: float) -> float | None:
        """Nearest rank; None where nothing was added."""
        if not self.num:
            return None
        rank = max(1, math.ceil(self.num * percent / 100))
        number = bisect_left(list(accumulate(self._counts)), rank)
        return _LEAST_S * math.exp((number + 0.5) * _STEP)


class BatchMeans:
    """The mean of a stream of values, and how sure it is."""

    def __init__(self) -> None:
        self.num = 0
        self._sums: list[float] = []  # of whole batches
        self._size = 1
        self._sum = 0.0
        self._num_open = 0

    def add(self, value: float) -> None:
        self.num += 1
        self._sum += value
        self._num_open += 1
        if self._num_open < self._size:
            return
        self._sums.append(self._sum)
        self._sum, self._num_open = 0.0, 0
        if len(self._sums) == MAX_BATCHES:
            self._sums = [a + b for a, b in zip(self._sums[::2], self._sums[1::2], strict=True)]
            self._size *= 2

    @property
    def mean(self) -> float | None:
        return (sum(self._sums) + self._sum) / self.num if self.num else None

    @property
    def half_width(self) -> float | None:
        """Of the 95 % interval; None below _MIN_BATCHES. Student's t by the first term of its expansion in 1 / df."""
        means, num = [total / self._size for total in self._sums], len(self._sums)
        if num < _MIN_BATCHES:
            return None
        mean = sum(means) / num
        variance = sum((value - mean) ** 2 for value in means) / (num - 1)
        t = _Z + (_Z**3 + _Z) / (4 * (num - 1))
        return t * math.sqrt(variance / num)

    @property
    def halves(self) -> tuple[float, float] | None:
        """Means of the first and of the second half of the batches."""
        middle = len(self._sums) // 2
        if len(self._sums) < _MIN_BATCHES:
            return None
        first, second = self._sums[:middle], self._sums[middle:]
        return sum(first) / (len(first) * self._size), sum(second) / (len(second) * self._size)

    @property
    def drift(self) -> float | None:
        """Second half less first half."""
        return self.halves[1] - self.halves[0] if self.halves is not None else None


@dataclass(slots=True)
class ClassMeasure:
    """Calls of one SLO class that came after the warm-up; one that was shed or refused has missed its targets."""

    slo: SLO
    attained: BatchMeans = field(default_factory=BatchMeans)
    mean_ttft: BatchMeans = field(default_factory=BatchMeans)  # of those that ended, s
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    handoff_gap: Histogram = field(default_factory=Histogram)
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    num_shed: int = 0
    num_local: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, call: Call, *, was_shed: bool) -> None:
        verdict = call.verdict
        self.verdicts[verdict] += 1
        self.attained.add(verdict is Verdict.MET)
        self.num_shed += was_shed
        if call.end_s is None:
            return
        self.mean_ttft.add(call.ttft_s)
        self.ttft.add(call.ttft_s)
        if call.row.output_tokens > 1:
            self.tpot.add(call.tpot_s)
        if call.handoff_gap_s is not None:
            self.handoff_gap.add(call.handoff_gap_s)
        self.num_local += call.plan is not None and call.plan.choice.local
        self.prompt_tokens += call.row.input_tokens
        self.output_tokens += call.row.output_tokens

    @property
    def num(self) -> int:
        return self.attained.num

    @property
    def is_steady(self) -> bool | None:
        """Whether attainment and mean TTFT of the two halves agree, as far as chance allows; None: too few calls to say.

        The difference of two halves has twice the standard error of the whole.
        """
        if self.attained.drift is None or self.mean_ttft.drift is None:
            return None
        means = (self.attained, self.mean_ttft)
        return all(abs(m.drift or 0.0) <= 2 * (m.half_width or 0.0) + _SAME * abs(m.mean or 0.0) for m in means)


_SAME = 0.05  # of the mean: what forecasts err by anyway (router/placement.py, NEARLY)


def measures(classes: Iterable[SLO]) -> dict[str, ClassMeasure]:
    return {slo.name: ClassMeasure(slo) for slo in classes}
