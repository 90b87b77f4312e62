"""How many lines may run beside interactive calls. Pure: a Slack and instants in, an Allowance out.

    seats short    an interactive call waits, was shed or misses its TPOT for want of seats: half of what runs, at once, again
                   at each look while it lasts; then HOLD_S without growth
    lanes short    one waits or was shed while seats are free: half of the lines without a first token, which are what keeps
                   lanes busy; a line that decodes would be given up for nothing
    no reserve     less than half of it is left: as many fewer as restore it
    no room        no lane, or no seat behind the reserve: no more than run
    slack          more by a quarter, each GROW_S, within the seats that the reserve leaves

Multiplicative decrease is what makes a shared resource fair to those who cannot slow down (Chiu and Jain 1989); growth is
multiplicative too, since a night's slack is long and one line more per look would waste it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.admission import Slack

LOOK_S = 0.05  # ten pumps of admission's queue: a call that waits is noticed well within any TTFT target
GROW_S = 0.25  # what was released is in the workers' reports by then: half a heartbeat (DESIGN section 5)
HOLD_S = 1.0  # two heartbeats: pressure that comes in bursts is one pressure
GROWTH = 0.25
FIRST = 4  # lines to begin with, and that may begin at one look
# Of a decode pool's seats that stay free for who comes: where seats were not short for CALM_S, and else.
# measured: docs/batch.md
CALM_RESERVE, RESERVE = 0.2, 0.65
CALM_S = 300.0  # traffic that bursts once in five minutes is not calm


@dataclass(frozen=True, slots=True)
class Allowance:
    """Lines; those beyond it are to be preempted."""

    num_running: int
    num_starting: int  # of these, without a first token


class Pacer:
    """One router's."""

    def __init__(self, max_lines: int) -> None:
        self._max_lines = max_lines
        self._num_shed = 0
        self._grow_after_s = -math.inf
        self._calm_after_s: float | None = None  # who has seen nothing yet does not call it calm

    def look(self, slack: Slack, num_running: int, num_starting: int, now_s: float) -> Allowance:
        """What may run from now on."""
        if self._calm_after_s is None:
            self._calm_after_s = now_s + CALM_S
        was_shed, self._num_shed = slack.num_shed > self._num_shed, slack.num_shed
        is_pressed = bool(slack.num_waiting or was_shed)
        if slack.num_free < 0 or (is_pressed and slack.num_free < 1):
            self._grow_after_s, self._calm_after_s = now_s + HOLD_S, now_s + CALM_S
            return Allowance(num_running // 2, num_starting // 2)
        reserve = CALM_RESERVE if now_s >= self._calm_after_s else RESERVE
        num_reserved = math.ceil(reserve * (slack.num_free + slack.num_decoding))
        if 2 * slack.num_free < num_reserved:
            self._grow_after_s = now_s + GROW_S
            num_running = max(0, num_running - (num_reserved - slack.num_free))
            return Allowance(num_running, num_starting // 2 if is_pressed else num_starting)
        if is_pressed:
            return Allowance(num_running, num_starting // 2)
        num_more = slack.num_free - num_reserved
        if num_more <= 0 or not slack.has_lane:
            return Allowance(num_running, num_starting)
        if now_s >= self._grow_after_s:
            self._grow_after_s = now_s + GROW_S
            step = max(FIRST, math.ceil(GROWTH * num_running))
            num_running = max(num_running, min(self._max_lines, num_running + min(step, num_more)))
        return Allowance(num_running, num_starting + FIRST)
