"""Which calls would meet their targets on so many workers: two queues, by call, in milliseconds of CPU. Pure.

    prefill   one FIFO queue before p workers; a call whose wait and own prompt exceed the TTFT target is turned away
    decode    d workers as one: everybody's next token takes the step of a worker with n/d sequences; a call is turned away where
              that step would exceed the TPOT target, or where no seat or KV is free

Both flatter a layout: one queue before all workers is never worse than one before each, sequences spread evenly step fastest, and
each pool is looked at as if the other were ample. So what this calls missed a real fleet of that size would hardly have met;
it bounds what the oracle can do. For plans that a real fleet can follow, `headroom` makes its workers slower.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.slo import SLO
from bench.control.rig import SEATS, CallCost, Costs
from bench.traces import TraceRow

Flags = npt.NDArray[np.bool_]  # [calls], in order of arrival


@dataclass(frozen=True, slots=True)
class Arrived:
    """One call: what it asks for, and by when."""

    row: TraceRow
    cost: CallCost
    slo: SLO


def prefill_met(calls: Sequence[Arrived], num_workers: int, headroom: float = 1.0) -> Flags:
    """`headroom`: as if every prompt took so many times as long."""
    met = np.zeros(len(calls), dtype=bool)
    free_s = [0.0] * num_workers
    for number, call in enumerate(calls):
        end_s = max(call.row.at_s, free_s[0]) + headroom * call.cost.prefill_s
        if 1e3 * (end_s - call.row.at_s) <= call.slo.ttft_ms:
            met[number] = True
            heapq.heapreplace(free_s, end_s)
    return met


def decode_met(costs: Costs, calls: Sequence[Arrived], num_workers: int, headroom: float = 1.0) -> Flags:
    """`headroom`: as if there were so many times fewer workers."""
    met = np.zeros(len(calls), dtype=bool)
    pool = _Decoding(costs, num_workers / headroom)
    for number, call in enumerate(calls):
        pool.go_on(call.row.at_s + call.cost.prefill_s)
        met[number] = pool.take(call)
    return met


class _Decoding:
    """Time is counted in tokens that everybody has got since the start: a call ends when it has got its own."""

    def __init__(self, costs: Costs, num_workers: float) -> None:
        self._costs = costs
        self._num_workers = num_workers
        self._running: list[tuple[float, float]] = []  # (tokens at which it ends, its context)
        self._tokens = self._now_s = self._context = 0.0

    def go_on(self, until_s: float) -> None:
        while self._running:
            step_s = self._step_s(len(self._running), self._context)
            end_s = self._now_s + (self._running[0][0] - self._tokens) * step_s
            if end_s > until_s:
                self._tokens += max(0.0, until_s - self._now_s) / step_s
                break
            self._now_s = end_s
            self._tokens, context = heapq.heappop(self._running)
            self._context -= context
        self._now_s = max(self._now_s, until_s)

    def take(self, call: Arrived) -> bool:
        """Whether it is let in: then it will have met its target."""
        num, mean_context = len(self._running) + 1, call.row.input_tokens + call.row.output_tokens / 2
        context = self._context + mean_context
        fits = num <= SEATS * self._num_workers and context <= self._costs.kv_tokens * self._num_workers
        if not fits or 1e3 * self._step_s(num, context) > call.slo.tpot_ms:
            return False
        self._context = context
        heapq.heappush(self._running, (self._tokens + call.row.output_tokens, mean_context))
        return True

    def _step_s(self, num: int, context: float) -> float:
        return self._costs.step_s(num / self._num_workers, context / self._num_workers)
