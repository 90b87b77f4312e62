"""What may be done by now: the rules that keep sizes from flapping, whatever the numbers do. Pure; DESIGN section 9, 7 and 8.

Time here is what passed between looks, so a clock that jumps back takes nothing away and one that jumps forward gives nothing.

    grow     at once
    flip     dwell_s after the last flip that took from the pool it would give to; a worker that has just come into its role stays
             in it as long
    shrink   to what was enough for all of shrink_after_s, none of which came before the pool last grew
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.request import Role
from router.controller.autoscaler.facts import State, WorkerFacts
from router.controller.autoscaler.layouts import Layout
from router.controller.autoscaler.scaler import Times

MAX_STEP_TICKS = 3  # between two looks; what is longer was a pause or a jump, and nobody knows what happened in it


@dataclass(slots=True)
class _Pool:
    wanted: deque[tuple[float, int]] = field(default_factory=deque)  # sizes that were wanted, and when
    gave_s: float = float("-inf")  # when a worker was last flipped out of it
    got_s: float = float("-inf")  # or into it


class Patience:
    """Of one fleet."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._clock_s: float | None = None  # the caller's, at the last look
        self.now_s = 0.0  # that has passed
        self._pools = {role: _Pool() for role in Role}
        self._states: dict[str, tuple[State, Role, float]] = {}  # by worker: what it is, and since when

    def look(self, clock_s: float, workers: Iterable[WorkerFacts]) -> None:
        """A tick."""
        if self._clock_s is not None:
            self.now_s += min(max(0.0, clock_s - self._clock_s), MAX_STEP_TICKS * self._times.tick_s)
        self._clock_s = clock_s
        before, self._states = self._states, {}
        for worker in workers:
            known = before.get(worker.worker_id)
            is_same = known is not None and known[:2] == (worker.state, worker.role)
            since_s = known[2] if known is not None and is_same else self.now_s
            self._states[worker.worker_id] = (worker.state, worker.role, since_s)

    def in_state_s(self, worker: WorkerFacts) -> float:
        """For how long the worker has been what it is."""
        return self.now_s - self._states[worker.worker_id][2]

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def wanted(self, layout: Layout) -> None:
        """Sizes that would do now."""
        for role, num in layout:
            sizes = self._pools[role].wanted
            sizes.append((self.now_s, num))
            while len(sizes) > 1 and sizes[1][0] <= self.now_s - self._times.shrink_after_s:
                sizes.popleft()

    def enough(self, role: Role) -> int | None:
        """The size that was enough for all of shrink_after_s; None: that is not known yet."""
        sizes = self._pools[role].wanted
        if not sizes or self.now_s - sizes[0][0] < self._times.shrink_after_s:
            return None
        return max(num for _, num in sizes)

    def grew(self, role: Role) -> None:
        """What was enough before is no longer known."""
        self._pools[role].wanted.clear()

    # -- flips ---------------------------------------------------------------------------------------------------------

    def may_flip(self, giver: Role, taker: Role) -> bool:
        """Not back at once."""
        dwell_s = self._times.dwell_s
        return self.now_s - self._pools[giver].got_s >= dwell_s and self.now_s - self._pools[taker].gave_s >= dwell_s

    def flipped(self, giver: Role, taker: Role) -> None:
        self._pools[giver].gave_s = self._pools[taker].got_s = self.now_s
        self.grew(taker)
