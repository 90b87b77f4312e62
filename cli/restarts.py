"""When a process that ended is started again, and when that has become pointless. Pure: instants come in."""

from __future__ import annotations

from collections import deque

MAX_ENDS = 5  # within WINDOW_S: one that lives less than 12 s on average is not mended by starting it again
WINDOW_S = 60.0
FIRST_DELAY_S = 0.1  # a single death is a single death: be back soon
MAX_DELAY_S = 5.0  # doubled each time; with the start itself, MAX_ENDS of them fit into WINDOW_S on a slow machine, too


class Restarts:
    """The ends of one process and its successors."""

    def __init__(self) -> None:
        self.num_ends = 0
        self._ends_s: deque[float] = deque(maxlen=MAX_ENDS)

    def ended(self, now_s: float) -> float | None:
        """Note an end. Returns seconds until the next start; None = it is not worth one."""
        self.num_ends += 1
        self._ends_s.append(now_s)
        recent = [end_s for end_s in self._ends_s if end_s > now_s - WINDOW_S]
        if len(recent) == MAX_ENDS:
            return None
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** (len(recent) - 1))
