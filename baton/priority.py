"""Priority with ageing: who is next where sequences wait. Pure.

    rank_s = arrival_s - priority * PRIORITY_STEP_S        the smallest goes first

One level is worth PRIORITY_STEP_S of waiting: whoever came d * PRIORITY_STEP_S before one that is d levels above goes first. So
nobody waits for those above who come later than that, however many they are. Ranks do not change with time: a queue stays sorted.
"""

from __future__ import annotations

# 10 levels, which `batch` is below `interactive`, are worth 30 s: half of batch's TTFT target (baton/slo.py), and the
# AGEING_S of the router's own queue.
PRIORITY_STEP_S = 3.0


def rank_s(priority: float, arrival_s: float) -> float:
    """Orders those that wait; seconds on the clock of `arrival_s`."""
    return arrival_s - priority * PRIORITY_STEP_S
