"""Which gaps between tokens were longer than a class's limit, without looking at every token of every call.

A sequence that decodes gets a token with every step of its worker that decodes at all, so its gaps are these steps, each with
those before it in which everybody waited: the worker counts the long ones, and a call takes the difference between two
readings. What is no such gap (handoff, preemption, the first one of a call that begins while others wait) is told on its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from bench.sim.call import Call


class LongSteps:
    """Of one worker: how many gaps between its steps' tokens were longer than each limit, so far."""

    def __init__(self) -> None:
        self._num_long: dict[float, int] = {}  # by limit, from the first call with it on
        self._waited_s = 0.0  # since the last step that decoded

    def wait(self, step_s: float) -> None:
        """A step of prompts alone: who runs got nothing from it."""
        self._waited_s += step_s

    def count(self, step_s: float) -> None:
        gap_ms, self._waited_s = 1e3 * (self._waited_s + step_s), 0.0
        for limit_ms in self._num_long:
            self._num_long[limit_ms] += gap_ms > limit_ms

    def count_run(self, num_steps: int, step_s: Callable[[int], float]) -> None:
        """Steps number 1 to num_steps - 1 of a run at once: `step_s` of them never falls."""
        for limit_ms in self._num_long:
            later = range(1, num_steps)
            self._num_long[limit_ms] += len(later) - bisect_right(later, limit_ms / 1e3, key=step_s)

    def begin(self, call: Call) -> None:
        """From now on each step is a gap of it."""
        if call.slo.itl_p99_ms is not None:
            call.long_steps_before = self._num_long.setdefault(call.slo.itl_p99_ms, 0)

    def end(self, call: Call) -> None:
        if call.slo.itl_p99_ms is not None:
            call.num_long_gaps += self._num_long[call.slo.itl_p99_ms] - call.long_steps_before


def count_gap(call: Call, gap_s: float) -> None:
    """One that is no step."""
    limit_ms = call.slo.itl_p99_ms
    call.num_long_gaps += limit_ms is not None and 1e3 * gap_s > limit_ms
