"""Whether a call may enter: a bounded number in flight, and an honest hint when to try again. Pure.

With M calls in flight that last T seconds on average, one leaves every T / M seconds (Little's law); that is the earliest
moment at which trying again can help. Classes and forecasts join here with the SLO control loop.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_RETRY_AFTER_S = 1.0  # HTTP's Retry-After counts whole seconds
FIRST_GUESS_S = 5.0  # of a call's length before any has ended: 50 tokens at the interactive class's 100 ms
SMOOTHING = 0.1  # of the exponential mean: about the last 20 calls


@dataclass(frozen=True, slots=True)
class Shed:
    reason: str
    retry_after_s: float


@dataclass(slots=True)
class Admission:
    """Counts nothing itself: the caller says how many are in flight."""

    max_inflight: int
    mean_call_s: float = FIRST_GUESS_S

    def decide(self, num_inflight: int) -> Shed | None:
        """None = admit."""
        if num_inflight < self.max_inflight:
            return None
        retry_after_s = max(MIN_RETRY_AFTER_S, self.mean_call_s / self.max_inflight)
        return Shed(f"{num_inflight} calls are in flight; the limit is {self.max_inflight}", retry_after_s)

    def observe(self, call_s: float) -> None:
        """A call ended that lasted `call_s`."""
        self.mean_call_s += SMOOTHING * (call_s - self.mean_call_s)
