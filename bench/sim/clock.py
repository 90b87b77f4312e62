"""One heap of events and the virtual clock. An event is handled at its instant and returns what follows from it.

Invariants: time never goes back; events of one instant are handled in the order in which they were made, so a run is a
function of its input alone. An event that has been overtaken is not taken out of the heap: whoever made it sees that it is stale.
Knows nothing of what it simulates.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

Act = Callable[[float], Iterable["Event"]]  # told the instant


class Event(NamedTuple):
    """A tuple, since a run makes some twenty of them per call."""

    at_s: float
    act: Act


class Clock:
    """Handles events in order of time; starts at 0 s."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_handled = 0
        self._heap: list[tuple[float, int, Act]] = []
        self._num_made = 0

    def add(self, events: Iterable[Event]) -> None:
        heap, now_s = self._heap, self.now_s
        for at_s, act in events:
            assert at_s >= now_s, "an event lies in the past"
            self._num_made += 1
            heapq.heappush(heap, (at_s, self._num_made, act))

    def run(self, until: Callable[[], bool]) -> None:
        """Handle events until there are none, or `until` says that it is enough."""
        heap, pop, add = self._heap, heapq.heappop, self.add
        while heap and not until():
            now_s, _, act = pop(heap)
            self.now_s = now_s
            self.num_handled += 1
            if events := act(now_s):
                add(events)
