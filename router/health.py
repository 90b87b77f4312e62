"""Whether a worker can be trusted with calls, judged by what became of those this router gave it. Pure: instants come in.

Life of one worker's breaker:
    1. closed      it takes calls
    2. open        ejected for a backoff that doubles each time
    3. half open   the backoff is over: one call at a time is a probe; a success closes, a failure opens for twice as long
It opens when calls fail through the worker's own fault, when its Session is lost again and again, and when it is many times
slower than its peers; one that is merely slower is `demoted`: used where nobody else is left. What a client brings upon itself
(a bad request, a cancel, its deadline) and what is a matter of capacity never counts.

`judge` decides which open breakers are honoured: of each pool at most half, rounded down, hence never the last one. A worker
that fails some calls serves more than none, and where over half of a pool fails, the cause is more likely common to all
(a model, a network, a request that kills) than theirs. Envoy gives ejections up at the same share (its panic threshold, 50 %).
Each router judges for itself: workers may be reachable from one and not from another.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean

from baton.errors import BatonError, Internal, Unavailable

FAILURES_IN_A_ROW = 3  # as Kubernetes' failureThreshold; each costs its call one retry
WINDOW_CALLS = 20
FAILURE_SHARE = 0.5  # of the last WINDOW_CALLS: Resilience4j's failureRateThreshold
FIRST_BACKOFF_S = 1.0  # a probe that fails costs one retry, so the first one may come soon
# By then a worker that is mended in any way waits no longer than one that Ray starts afresh with its model
MAX_BACKOFF_S = 60.0
FORGIVEN_S = 60.0  # healthy for as long as the longest backoff: the next ejection is a first one again
BURST_S = 0.25  # failures of one pair within it are one event: what a lost link ends, it ends in one turn of a loop
LOSSES = 3  # of the Session, within LOSS_WINDOW_S: one is a restart, two a restart that failed once
LOSS_WINDOW_S = 120.0  # holds three restarts of 9 s (DESIGN section 10) and some service between them
PACE_WINDOW_S = 5.0
MIN_SAMPLES = 3  # of one size in a window: below it a mean is a single event
# Sizes of one class differ by up to 2 and lengths of context add to that: less than 3 may be the load
DEMOTE_RATIO = 3.0
EJECT_RATIO = 6.0  # twice that, in two windows: a peer then does its work beside its own with time to spare
DEMOTED_S = 30.0  # where it gets no work that shows it is well again, it is tried again


class Pace:
    """Seconds that steps and first tokens took in the running window, by what was measured and how much work it was."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], list[float]] = {}

    def add(self, kind: str, size: int, seconds: float) -> None:
        """Sizes fall into classes that double: 1, 2-3, 4-7, ..."""
        self._samples.setdefault((kind, size.bit_length()), []).append(seconds)

    def means(self) -> dict[tuple[str, int], float]:
        return {key: fmean(samples) for key, samples in self._samples.items() if len(samples) >= MIN_SAMPLES}


class Health:
    """One worker's record at one router. `ejected` is for `judge` to set; read it with `takes_calls`.

    `on_open` is called when the breaker opens, so that its owner judges the pools at once.
    """

    def __init__(self, on_open: Callable[[], None]) -> None:
        self.ejected = False
        self.reason = ""  # why the breaker opened last
        self.opened_s = 0.0
        self.pace = Pace()
        self._on_open = on_open
        self._is_up = True
        self.is_open = False  # or half open
        self._until_s = 0.0  # of the backoff
        self._closed_s = 0.0
        self._num_openings = 0  # since it was last forgiven
        self._failed: deque[bool] = deque(maxlen=WINDOW_CALLS)
        self._pair_failed_s: dict[str, float] = {}  # by peer: the last failure of the pair that counted
        self._losses_s: deque[float] = deque(maxlen=LOSSES)
        self._demoted_until_s = 0.0
        self._slow_windows = 0

    # -- what happened -----------------------------------------------------------------------------------------------

    def succeeded(self, now_s: float) -> None:
        """The worker did its part of a sequence, whatever became of the rest."""
        self._failed.append(False)
        if self.is_open and now_s >= self._until_s:
            self.is_open, self.ejected, self._closed_s = False, False, now_s

    def failed(self, error: BatonError, now_s: float, peer: str = "") -> None:
        """A sequence failed, and this worker is the one to blame if anybody is: `error` says whether it counts.

        What fails with a lost Session is that one event (`lost`), however many calls there were. `peer`: whom it was dealing
        with, where it may be that one's fault; what fails with one peer at once is one event, too, so that a decode worker
        that dies does not take the trust in those along that were sending to it.
        """
        if not self._is_up or not is_worker_fault(error):
            return
        if peer:
            if now_s - self._pair_failed_s.get(peer, -BURST_S) < BURST_S:
                return
            self._pair_failed_s[peer] = now_s
        self._failed.append(True)
        if self.is_open:
            if now_s >= self._until_s:
                self._open(f"a probe failed: {error.message}", now_s)
            return  # a call from before it opened
        last = list(self._failed)[-FAILURES_IN_A_ROW:]
        if len(last) == FAILURES_IN_A_ROW and all(last):
            self._open(f"{FAILURES_IN_A_ROW} calls in a row failed: {error.message}", now_s)
        elif sum(self._failed) >= FAILURE_SHARE * WINDOW_CALLS:
            self._open(f"{sum(self._failed)} of its last {len(self._failed)} calls failed: {error.message}", now_s)

    def lost(self, now_s: float) -> None:
        """Its Session broke."""
        self._is_up = False
        self._losses_s.append(now_s)

    def returned(self, now_s: float) -> None:
        """A new Session is open: a fresh start, unless it comes and goes."""
        self._is_up = True
        self._pair_failed_s.clear()
        self._failed.clear()
        if len(self._losses_s) == LOSSES and now_s - self._losses_s[0] < LOSS_WINDOW_S:
            self._open(f"it was lost {LOSSES} times in {now_s - self._losses_s[0]:.0f} s", now_s)

    def stepped(self, num_seqs: int, step_s: float) -> None:
        """A step with this many sequences took so long."""
        self.pace.add("step", num_seqs, step_s)

    def first_token(self, work_tokens: int, waited_s: float) -> None:
        """A first token came after so long, with so many prompt tokens queued and its own to compute."""
        self.pace.add("first token", work_tokens, waited_s)

    # -- what follows ------------------------------------------------------------------------------------------------

    def takes_calls(self, num_inflight: int, now_s: float) -> bool:
        """Whether a call may be placed here now; half open only as the one probe."""
        return not self.ejected or (now_s >= self._until_s and num_inflight == 0)

    def is_demoted(self, now_s: float) -> bool:
        return now_s < self._demoted_until_s

    def left_s(self, now_s: float) -> float:
        """Of the backoff."""
        return max(0.0, self._until_s - now_s)

    def end_window(self, ratio: float, num_peers: int, what: str, now_s: float) -> None:
        """Take the verdict on the last window: how many times slower than the median of `num_peers` it was; 0 = unknown."""
        self.pace = Pace()
        if ratio == 0:
            return
        self._slow_windows = self._slow_windows + 1 if ratio >= EJECT_RATIO else 0
        self._demoted_until_s = now_s + DEMOTED_S if ratio >= DEMOTE_RATIO else 0.0
        if self._slow_windows >= 2 and num_peers > 1 and not self.is_open:  # of two, who is the odd one?
            self._slow_windows = 0
            self._open(f"its {what} takes {ratio:.1f} times that of its peers", now_s)

    def _open(self, reason: str, now_s: float) -> None:
        if not self.is_open and now_s - self._closed_s > FORGIVEN_S:
            self._num_openings = 0
        self._num_openings += 1
        backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self._num_openings - 1))
        if not self.is_open:
            self.opened_s = now_s
        self.is_open, self._until_s, self.reason = True, now_s + backoff_s, reason
        self._failed.clear()
        self._on_open()


def is_worker_fault(error: BatonError) -> bool:
    """Lost, broken or refusing workers and transfers; not clients' faults, deadlines, full queues, or pairs that do not fit."""
    return isinstance(error, Unavailable | Internal)


def judge(pools: Sequence[Sequence[Health]]) -> None:
    """Set `ejected` of all: of each pool at most half, whoever opened first before others. A worker may be in several
    pools; those that are away are left out by the caller, so they make the bound smaller."""
    wanting = {id(health): health for pool in pools for health in pool if health.is_open}
    if not wanting:
        return
    members, quotas = [set(map(id, pool)) for pool in pools], [len(pool) // 2 for pool in pools]
    for key, health in sorted(wanting.items(), key=lambda entry: entry[1].opened_s):
        indices = [index for index, pool in enumerate(members) if key in pool]
        health.ejected = all(quotas[index] > 0 for index in indices)
        for index in indices if health.ejected else ():
            quotas[index] -= 1


def judge_pace(pool: Sequence[Health], now_s: float) -> None:
    """Compare what each did in the window that ends now with the median of its peers, like with like, and start the next."""
    means = [health.pace.means() for health in pool]
    by_kind: dict[tuple[str, int], list[float]] = {}
    for own in means:
        for key, mean_s in own.items():
            by_kind.setdefault(key, []).append(mean_s)
    for values in by_kind.values():
        values.sort()
    for health, own in zip(pool, means, strict=True):
        ratio, key = max(
            ((mean_s / _median_of_others(by_kind[key], mean_s), key) for key, mean_s in own.items()),
            default=(0.0, ("", 0)),
        )
        health.end_window(ratio, len(by_kind.get(key, ())) - 1, key[0], now_s)


def _median_of_others(values: Sequence[float], own: float) -> float:
    """Of sorted values, without one that equals `own`; inf where there is no other, or nothing took any time."""
    at, last = bisect_left(values, own), len(values) - 2
    if last < 0:
        return math.inf
    low, high = (values[index if index < at else index + 1] for index in (last // 2, (last + 1) // 2))
    return (low + high) / 2 or math.inf
