"""When an emulated step has to end, and how late it did: what makes an emulation say that it is not true any more.

A step begins when the runner is called, unless it goes on with sequences of the step before: then the engine was never idle,
what passed in between was its own work, and the step begins where that one should have ended. So the CPUs' work between steps
is part of a step, as the fitted step times have it (engine/timing), and a small delay is made up for by the next step. One
beyond TOLERANCE of its step is not: it shows in every time that a client measures.

`p99_lateness` covers the last WINDOW steps, as shares of what each should have taken. Runs on the engine thread, which sleeps
in `finish`; the one number may be read from any.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Set

from baton import clock
from baton.log import get_log

log = get_log("engine.pace")

TOLERANCE = (
    0.10  # of a step: beyond it the CPUs do not carry the load; as close as emulator and simulator have to agree
)
WINDOW = 1_000  # steps: 10 of them make up the p99
LOOK_S = 1.0  # between two looks at the window: routers report once a second


class Pace:
    """The clock of one emulated engine."""

    def __init__(self, now_s: Callable[[], float] = clock.now_s, sleep: Callable[[float], None] = clock.sleep) -> None:
        self._now_s = now_s
        self._sleep = sleep
        self._begun_s = 0.0
        self._due_s = -math.inf  # of the step before
        self._ended_s = -math.inf
        self._was_late = False  # beyond tolerance
        self._seqs: Set[int] = frozenset()
        self._shares: deque[float] = deque(maxlen=WINDOW)
        self._looked_s = -math.inf
        self.p99_lateness = 0.0

    def begin(self, seqs: Set[int]) -> None:
        """A step of these sequences starts."""
        goes_on = not self._seqs.isdisjoint(seqs)
        self._seqs = seqs
        last_s = self._ended_s if self._was_late else self._due_s
        self._begun_s = last_s if goes_on else self._now_s()

    def finish(self, step_s: float) -> None:
        """Sleep until the step that began should end, and note by how much that was missed."""
        self._due_s = self._begun_s + step_s
        left_s = self._due_s - self._now_s()
        if left_s > 0:
            self._sleep(left_s)
        self._ended_s = self._now_s()
        share = max(0.0, self._ended_s - self._due_s) / step_s if step_s else 0.0
        self._was_late = share > TOLERANCE
        self._note(share)

    def _note(self, share: float) -> None:
        self._shares.append(share)
        if self._ended_s < self._looked_s + LOOK_S:
            return
        self._looked_s = self._ended_s
        before, ordered = self.p99_lateness, sorted(self._shares)
        self.p99_lateness = ordered[math.ceil(0.99 * len(ordered)) - 1]
        if (before > TOLERANCE) != (self.p99_lateness > TOLERANCE):
            say = log.warning if self.p99_lateness > TOLERANCE else log.info
            say("emulation_pace", is_true=self.p99_lateness <= TOLERANCE, p99_lateness=round(self.p99_lateness, 3))
