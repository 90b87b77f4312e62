"""How much work a prefill worker has before it gets more: enough to last until the next prompt can begin. Pure.

    window = LEAST_S + what nearly every prompt waits for room on a decode worker, at most MOST_S

A prompt that is decoded elsewhere is computed once room is granted there, which happens between two steps: a worker that gets its
next prompt when it has almost nothing left to do stands still for what is left of a decode step. That wait is for the end of a
step that began at any time, so it is evenly spread, and the mean with twice the mean deviation holds all of it; both are learned
as RFC 6298 learns a round trip. A worker that decodes what it prefills asks nobody, and has LEAST_S. What is beyond MOST_S is no
wait for a step but for memory: more work in front of it would not shorten that, so nothing is learned from it.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_S = 0.01  # hops, and what a worker may run dry for against what others wait. measured: docs/overload.md
MOST_S = 0.1  # nothing is gained beyond, and all of it is time that no order of the queue can change. measured: docs/overload.md
MEAN_WEIGHT, DEVIATION_WEIGHT = 1 / 8, 1 / 4  # of the newest wait: RFC 6298, section 2.3
DEVIATIONS = 2.0  # of an even spread from 0 to T the mean is T/2, the mean deviation T/4


@dataclass(slots=True)
class GrantWait:
    """Of one prefill worker's prompts, from Reserve to Grant."""

    mean_s: float = 0.0
    deviation_s: float = 0.0
    is_known: bool = False

    def observe(self, wait_s: float) -> None:
        """Take a wait; 0 = the prompt asked for no room."""
        if not 0 < wait_s <= MOST_S:  # NaN fails, too
            return
        if not self.is_known:
            self.mean_s, self.deviation_s, self.is_known = wait_s, wait_s / 2, True
            return
        self.deviation_s += DEVIATION_WEIGHT * (abs(wait_s - self.mean_s) - self.deviation_s)
        self.mean_s += MEAN_WEIGHT * (wait_s - self.mean_s)

    @property
    def most_s(self) -> float:
        """That it nearly always stays below; 0 = nobody has waited yet."""
        return self.mean_s + DEVIATIONS * self.deviation_s


def window_s(grant_s: float) -> float:
    """`grant_s`: what the worker's prompts wait for room, at most."""
    return min(MOST_S, LEAST_S + grant_s)
