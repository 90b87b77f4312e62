"""When to try again, and when to stop. Pure.

Two bounds: `max_attempts` in a row of one call without a new token, and a budget of the whole client, so that a cluster in
trouble is not met by a multiple of its usual load: a token bucket that retries empty and successes fill slowly, as gRPC's own
retry throttling (gRFC A6) has it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    max_attempts: int = 6  # in a row without a new token; with the delays below they span 3 s, twice a router's restart
    first_delay_s: float = 0.1  # doubled each time; half of it is drawn, so that clients do not return in step
    max_delay_s: float = 5.0
    budget: float = 20.0  # retries that a client may make at once, beyond those that its successes earn
    earned: float = 0.1  # retries that one success earns: gRFC A6's example, 10 %

    def delay_s(self, attempt: int, said_s: float) -> float:
        """Before attempt number `attempt` (1 = the first retry). What the server said (RetryInfo) is waited for at least."""
        own_s = min(self.first_delay_s * 2.0 ** (attempt - 1), self.max_delay_s)
        return said_s + own_s * random.uniform(0.5, 1.0)


class RetryBudget:
    """One per client, shared by its calls."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._left = policy.budget

    def take(self) -> bool:
        """Whether one more retry may be made."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def succeeded(self) -> None:
        self._left = min(self._policy.budget, self._left + self._policy.earned)
