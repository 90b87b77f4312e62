"""Which gaps between tokens were longer than a class's limit, without looking at every token of every call.

A sequence that decodes gets a token with every step of its worker, so its gaps are the steps: the worker counts its long steps,
and a call takes the difference between two readings. What is no step (handoff, preemption) is told as a gap of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

from baton.slo import SLO
from bench.sim.call import Call


class LongSteps:
    """Of one worker: how many of its steps were longer than each limit, so far."""

    def __init__(self, classes: Iterable[SLO]) -> None:
        self._num_long = {slo.itl_p99_ms: 0 for slo in classes if slo.itl_p99_ms is not None}

    def count(self, step_s: float) -> None:
        for limit_ms in self._num_long:
            self._num_long[limit_ms] += 1e3 * step_s > limit_ms

    def count_run(self, num_steps: int, step_s: Callable[[int], float]) -> None:
        """So many steps at once; `step_s` of number 0 to num_steps - 1 never falls."""
        for limit_ms in self._num_long:
            self._num_long[limit_ms] += num_steps - bisect_right(range(num_steps), limit_ms / 1e3, key=step_s)

    def begin(self, call: Call) -> None:
        """From now on each step is a gap of it."""
        if call.slo.itl_p99_ms is not None:
            call.long_steps_before = self._num_long[call.slo.itl_p99_ms]

    def end(self, call: Call) -> None:
        if call.slo.itl_p99_ms is not None:
            call.num_long_gaps += self._num_long[call.slo.itl_p99_ms] - call.long_steps_before


def count_gap(call: Call, gap_s: float) -> None:
    """One that is no step."""
    limit_ms = call.slo.itl_p99_ms
    call.num_long_gaps += limit_ms is not None and 1e3 * gap_s > limit_ms
