"""What a load's calls cost, and what the queue models say of them: worth of a miss, likely layouts, the oracle's plans. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from baton.slo import SLO
from bench.control import oracle
from bench.control.loads import Load
from bench.control.model import Arrived, decode_met, prefill_met
from bench.control.oracle import Plan, Prices, Sizes
from bench.control.rig import CHAT, TIMES, Costs
from bench.traces import TraceRow

MISS_FACTOR = (
    10.0  # in GPU-time of a mean call. Assumed: an operator gives up a tenth of a fleet for a hundredth of the calls
)
INTERVAL_S = 60.0  # of the oracle's plan: a start-up


class Foresight:
    """Of one load and the calls of one seed."""

    def __init__(self, load: Load, rows: Sequence[TraceRow]) -> None:
        self._load = load
        self._costs = Costs()
        costs = self._costs.of_all(rows, caches=load.caches)
        self._calls = [Arrived(row, cost, _slo_at(load, row.at_s)) for row, cost in zip(rows, costs, strict=True)]

    @cached_property
    def prices(self) -> Prices:
        drain_s = self._mean_drain_s()
        gpu_s = math.fsum(call.cost.prefill_s + call.cost.decode_s for call in self._calls) / max(1, len(self._calls))
        return Prices(MISS_FACTOR * gpu_s, start_up=TIMES.start_up_s, leave=drain_s, flip=drain_s + TIMES.flip_s)

    def _mean_drain_s(self) -> float:
        """Half an answer's time: what runs on a worker is on average that far from its end."""
        step_s = self._costs.step_s(8, 8 * 8_000)  # half the seats, at some 8,000 tokens each
        lengths = [call.row.output_tokens for call in self._calls]
        return 0.5 * step_s * float(np.mean(lengths)) if lengths else 0.0

    def likely(self, num: int, headroom: float, duration_s: float) -> list[Sizes]:
        """The static layouts of least loss, best first."""
        sizes = oracle.layouts(self._load.max_workers)
        misses = self._misses(sizes, headroom).sum(axis=1)
        losses = duration_s * np.array([sum(one) for one in sizes]) + self.prices.miss * misses
        return [sizes[int(place)] for place in losses.argsort(kind="stable")[:num]]

    def plan(self, start: Sizes, headroom: float, prices: Prices) -> Plan:
        sizes = oracle.layouts(max(self._load.max_workers, sum(start)))
        return oracle.cheapest(self._misses(sizes, headroom), sizes, start, INTERVAL_S, prices)

    def _misses(self, sizes: Sequence[Sizes], headroom: float) -> oracle.Table:
        """[layouts, intervals], of the calls that count."""
        calls, load = self._calls, self._load
        most = max(max(one) for one in sizes)
        prefill = [prefill_met(calls, num, headroom) for num in range(1, most + 1)]
        decode = [decode_met(self._costs, calls, num, headroom) for num in range(1, most + 1)]
        counts = np.array([call.row.at_s >= load.judge_from_s for call in calls], dtype=bool)
        intervals = np.array([int(call.row.at_s / INTERVAL_S) for call in calls], dtype=np.int64)
        num_intervals = math.ceil(load.duration_s / INTERVAL_S)
        return np.array(
            [
                np.bincount(intervals, counts & ~(prefill[p - 1] & decode[d - 1]), minlength=num_intervals)
                for p, d in sizes
            ]
        )


def _slo_at(load: Load, at_s: float) -> SLO:
    slo = CHAT
    for change in load.retargets:
        if change.at_s <= at_s:
            slo = change.slo
    return slo
