"""What may be done by now: the rules that keep sizes from flapping, whatever the numbers do. Pure; DESIGN section 9, 7 and 8.

    grow     at once; but after a start that failed only BACKOFF_S later, then twice that, and so on
    flip     dwell_s after the pool that would give took one, or the one that would take gave one
    shrink   to what was enough for HOLD_STARTS start-ups, shrink_after_s at most, none of which came before the pool last
             grew; for twice as long where it had to grow again within REGRET_STARTS start-ups, and so on: so bursts find what
             the last one needed. For FALLING of it, if it will be enough for the most that forecasts hold likely, too

What was proposed counts as done once the next look shows it: whether anything is carried out is not decided here.
Time here is what passed between looks, so a clock that jumps back takes nothing away and one that jumps forward gives nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from baton.request import Role
from router.controller.autoscaler.facts import State, WorkerFacts
from router.controller.autoscaler.layouts import Layout
from router.controller.autoscaler.scaler import Times
from router.ring import SHORT_S

MAX_STEP_TICKS = 3  # between two looks; what is longer was a pause or a jump, and nobody knows what happened in it
BACKOFF_S = 60.0  # a start-up
# A worker that was let go too early is missed for a start-up. Holding it for as long as that once more costs as much as its
# start, which is the least that it can cost to be wrong (ski rental: Karlin et al. 1988): docs/adr/0012
HOLD_STARTS = 2.0
# At least a short window, so that what is wanted is not twice of the same calls.
# measured: of 1/2 and 1/4 the latter loses less on rates that swing, and neither turns a constant one (docs/control.md)
FALLING = 0.25
LEAST_HOLD_S = 2 * SHORT_S  # so that all that is seen of the traffic came meanwhile, also where starts are instant
# A call that is missed is taken to be worth ten times its GPU time (docs/control.md), so a worker that comes back sooner than
# this should have been kept
REGRET_STARTS = 10.0
MAX_HOLD_S = 2_400.0  # what comes once an hour is cheaper to miss than to wait for
MAX_BACKOFF_S = 1_800.0  # machines that were full may have room again
MOST_KEPT_REGRETS = 8  # that a new process believes: 2^8 start-ups of 10 s are longer than any hold


@dataclass(slots=True)
class _Pool:
    wanted: deque[tuple[float, int]] = field(default_factory=deque)  # sizes that were wanted, and when
    gave_s: float = -math.inf  # when a worker was last flipped out of it
    took_s: float = -math.inf  # or into it
    shrunk_s: float = -math.inf  # when one was last drained and not yet missed
    num_regrets: int = 0
    num_failed_starts: int = 0  # since one succeeded
    failed_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class _Proposed:
    """At the last look."""

    worker_id: str | None  # None: somebody new
    role: Role
    done: Callable[[], None]  # what to note once it is


class Patience:
    """Of one fleet."""

    def __init__(self, times: Times) -> None:
        self.now_s = 0.0  # that has passed
        self._times = times
        self._clock_s: float | None = None  # the caller's, at the last look
        self._pools = {role: _Pool() for role in Role}
        self._states: dict[str, tuple[State, Role, float]] = {}  # by worker: what it is, and since when
        self._proposed: list[_Proposed] = []
        self._later: Layout | None = None  # sizes that forecasts ask for
        self._failed_starts: set[str] = set()  # workers that are pending still, and were counted

    def measured(self, times: Times) -> None:
        """From now on these hold."""
        self._times = times

    def look(self, clock_s: float, workers: Iterable[WorkerFacts]) -> None:
        """A tick."""
        if math.isfinite(clock_s):
            if self._clock_s is not None:
                self.now_s += min(max(0.0, clock_s - self._clock_s), MAX_STEP_TICKS * self._times.tick_s)
            else:  # of what was before nobody knows: as if everybody had just come
                for pool in self._pools.values():
                    pool.took_s = self.now_s
            self._clock_s = clock_s
        before, self._states = self._states, {}
        for worker in workers:
            known = before.get(worker.worker_id)
            if known is not None and known[0] is State.PENDING and worker.state is State.READY:
                self._pools[worker.role].num_failed_starts = 0
            is_same = known is not None and known[:2] == (worker.state, worker.role)
            since_s = known[2] if known is not None and is_same else self.now_s
            self._states[worker.worker_id] = (worker.state, worker.role, since_s)
        for proposed in self._proposed:
            if self._was_done(proposed, before):
                proposed.done()
        self._proposed.clear()
        self._failed_starts &= {name for name, (state, _, _) in self._states.items() if state is State.PENDING}

    def in_state_s(self, worker: WorkerFacts) -> float:
        """For how long the worker has been what it is, as far as was seen."""
        return self.now_s - self._states[worker.worker_id][2]

    def just_left(self, worker: WorkerFacts) -> bool:
        """Of one that drains: it takes no calls any more, but what that does to the others was not seen for a tick yet."""
        return self.in_state_s(worker) < self._times.tick_s

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def wanted(self, layout: Layout, later: Layout | None = None) -> None:
        """Sizes that would do now, and for the most that may come; None: nobody knows."""
        self._later = later
        for role, num in layout:
            sizes = self._pools[role].wanted
            sizes.append((self.now_s, num))
            while len(sizes) > 1 and sizes[1][0] <= self.now_s - self._hold_s(role):
                sizes.popleft()

    def enough(self, role: Role) -> int | None:
        """The size that was enough for as long as it must; None: that is not known yet."""
        hold_s = self._hold_s(role)
        found = [self._largest(role, hold_s)]
        soon_s = max(SHORT_S, FALLING * hold_s)
        if self._later is not None and (lately := self._largest(role, soon_s)) is not None:
            found.append(max(lately, self._later.of(role)))
        return min((size for size in found if size is not None), default=None)

    def _largest(self, role: Role, within_s: float) -> int | None:
        """That was wanted; None: it was not looked for so long."""
        sizes, since_s = self._pools[role].wanted, self.now_s - within_s
        before = [num for at_s, num in sizes if at_s <= since_s]
        if not before:
            return None
        return max([before[-1], *(num for at_s, num in sizes if at_s > since_s)])

    def forget(self, role: Role) -> None:
        """What was enough is no longer known."""
        self._pools[role].wanted.clear()

    def grows(self, role: Role, worker_id: str | None) -> None:
        """It is to take this one; None: somebody new."""
        self.forget(role)
        self._proposed.append(_Proposed(worker_id, role, lambda: self._grew(role)))

    def shrinks(self, role: Role, worker_id: str) -> None:
        """It is to let this one go, as more than enough."""
        self._proposed.append(_Proposed(worker_id, role, lambda: self._shrank(role)))

    def _grew(self, role: Role) -> None:
        pool = self._pools[role]
        if self.now_s - pool.shrunk_s <= self._regret_s(role):
            if self._hold_s(role) < MAX_HOLD_S:
                pool.num_regrets += 1
            pool.shrunk_s = -math.inf  # regretted once, however many it takes back

    def _shrank(self, role: Role) -> None:
        pool = self._pools[role]
        went_well = math.isfinite(pool.shrunk_s) and self.now_s - pool.shrunk_s > self._regret_s(role)
        pool.num_regrets = max(0, pool.num_regrets - went_well)
        pool.shrunk_s = self.now_s

    def _was_done(self, proposed: _Proposed, before: Mapping[str, tuple[State, Role, float]]) -> bool:
        """Somebody new came, or the one that was meant is no longer what it was."""
        if proposed.worker_id is None:
            return any(role is proposed.role and name not in before for name, (_, role, _) in self._states.items())
        was, now = before.get(proposed.worker_id), self._states.get(proposed.worker_id)
        return was is None or now is None or was[:2] != now[:2]

    def _hold_s(self, role: Role) -> float:
        times = self._times
        once_s = min(times.shrink_after_s, max(LEAST_HOLD_S, HOLD_STARTS * times.start_up_s))
        return min(max(MAX_HOLD_S, once_s), once_s * 2.0 ** self._pools[role].num_regrets)

    def _regret_s(self, role: Role) -> float:
        return max(self._hold_s(role), REGRET_STARTS * self._times.start_up_s)

    # -- for the next process --------------------------------------------------------------------------------------------

    def kept(self, role: Role) -> tuple[int, tuple[tuple[float, int], ...]]:
        """Regrets; sizes that were wanted, and how long ago."""
        pool = self._pools[role]
        return pool.num_regrets, tuple((self.now_s - at_s, num) for at_s, num in pool.wanted)

    def restore(self, role: Role, num_regrets: int, wanted: Iterable[tuple[float, int]]) -> None:
        """As if it had been seen here."""
        pool = self._pools[role]
        pool.num_regrets = max(0, min(MOST_KEPT_REGRETS, num_regrets))
        pool.wanted = deque(
            sorted((self.now_s - age_s, num) for age_s, num in wanted if 0 <= age_s < math.inf and num >= 0)
        )

    # -- flips and starts ----------------------------------------------------------------------------------------------

    def may_give(self, giver: Role, taker: Role) -> bool:
        """Not back at once."""
        latest_s = max(self._pools[giver].took_s, self._pools[taker].gave_s)
        return self.now_s - latest_s >= self._times.dwell_s

    def gives(self, giver: Role, taker: Role, worker_id: str) -> None:
        """It is to let this one go for the other."""
        self._proposed.append(_Proposed(worker_id, giver, lambda: self._gave(giver, taker)))

    def _gave(self, giver: Role, taker: Role) -> None:
        self._pools[giver].gave_s = self._pools[taker].took_s = self.now_s

    def failed_starts(self, stuck: Iterable[WorkerFacts]) -> None:
        """Of those that nobody waits for any longer. Each start counts once, whether or not the worker is given up, and those
        that failed together count as one: so does what they failed of. Who was up and is lost is no start that failed."""
        new = [w for w in stuck if w.state is State.PENDING and w.worker_id not in self._failed_starts]
        self._failed_starts |= {worker.worker_id for worker in new}
        for role in {worker.role for worker in new}:
            self._pools[role].num_failed_starts += 1
            self._pools[role].failed_s = self.now_s

    def may_create(self, role: Role) -> bool:
        pool = self._pools[role]
        if not pool.num_failed_starts:
            return True
        backoff_s = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(16, pool.num_failed_starts - 1))
        return self.now_s - pool.failed_s >= backoff_s
