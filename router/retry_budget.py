"""How many sequences may be started again, so that retries never become the load that keeps a sick cluster sick. Pure.

A bucket of retries, full at start: each one takes a token out; time and finished sequences put some back. Its size is what the
deaths of two workers at once may cost at worst, which is every sequence in flight, twice. The refill is that of Finagle's
RetryBudget: 10 a second, so that a quiet router can retry, and a fifth of what finishes. An empty bucket means that retries
have not helped for a while; then the error goes to the client, who is told when to come back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PER_S = 10.0  # Finagle: RetryBudget.apply, minRetriesPerSec
PER_FINISHED = 0.2  # the same, percentCanRetry
DEATHS = 2
REFILL_S = 1.0  # when to come back to an empty bucket: PER_S retries are in it by then


@dataclass(slots=True)
class RetryBudget:
    max_inflight: int
    _left: float = field(init=False)
    _now_s: float = 0.0  # of the last refill, monotonic

    def __post_init__(self) -> None:
        self._left = self.size

    @property
    def size(self) -> float:
        return float(DEATHS * self.max_inflight)

    def finished(self) -> None:
        """A sequence came to its end."""
        self._left = min(self.size, self._left + PER_FINISHED)

    def take(self, now_s: float) -> bool:
        """Take one retry out; False = none is left."""
        self._left = min(self.size, self._left + PER_S * max(0.0, now_s - self._now_s))
        self._now_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True
