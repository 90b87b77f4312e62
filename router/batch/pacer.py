"""How many lines may run beside interactive calls. Pure: a Slack and instants in, a number out.

    pressure    an interactive call waits or was shed, or running sequences miss a target: half of what runs, at once, again at
                each look while it lasts; then HOLD_S without growth
    no reserve  less than half of it is left: as many fewer as restore it
    no room     no lane or no seat behind the reserve: no more than run
    slack       more by a quarter, each GROW_S, within the seats that the reserve leaves

Multiplicative decrease is what makes a shared resource fair to those who cannot slow down (Chiu and Jain 1989); growth is
multiplicative too, since a night's slack is long and one line more per look would waste it.
"""

from __future__ import annotations

import math

from router.admission import Slack

LOOK_S = 0.05  # ten pumps of admission's queue: a call that waits is noticed well within any TTFT target
GROW_S = 0.25  # what was released is in the workers' reports by then: half a heartbeat (DESIGN section 5)
HOLD_S = 1.0  # two heartbeats: pressure that comes in bursts is one pressure
GROWTH = 0.25
FIRST = 4  # lines to begin with: the growth of what one would be is one
# Of a decode pool's seats that stay free for who comes. measured: docs/batch.md
RESERVE = 0.2


class Pacer:
    """One router's."""

    def __init__(self, max_lines: int) -> None:
        self._max_lines = max_lines
        self._num_shed = 0
        self._grow_after_s = -math.inf

    def look(self, slack: Slack, num_running: int, now_s: float) -> int:
        """How many lines may run from now on; those beyond it are to be preempted."""
        was_shed, self._num_shed = slack.num_shed > self._num_shed, slack.num_shed
        if slack.num_waiting or was_shed or slack.num_free < 0:
            self._grow_after_s = now_s + HOLD_S
            return num_running // 2
        num_reserved = math.ceil(RESERVE * (slack.num_free + slack.num_decoding))
        if 2 * slack.num_free < num_reserved:
            self._grow_after_s = now_s + GROW_S
            return max(0, num_running - (num_reserved - slack.num_free))
        num_more = slack.num_free - num_reserved
        if num_more <= 0 or not slack.has_lane or now_s < self._grow_after_s:
            return num_running
        self._grow_after_s = now_s + GROW_S
        step = max(FIRST, math.ceil(GROWTH * num_running))
        return max(num_running, min(self._max_lines, num_running + min(step, num_more)))
