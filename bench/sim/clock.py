"""One heap of events and the virtual clock. An event is handled at its instant and returns what follows from it.

Invariants: time never goes back; events of one instant are handled in the order in which they were made, so a run is a
function of its input alone. An event that has been overtaken is not taken out of the heap: whoever made it sees that it is stale.
Knows nothing of what it simulates.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Act = Callable[[float], Iterable["Event"]]  # told the instant


@dataclass(slots=True, frozen=True)
class Event:
    at_s: float
    act: Act

    def handle(self) -> Iterable[Event]:
        return self.act(self.at_s)


class Clock:
    """Handles events in order of time; starts at 0 s."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_handled = 0
        self._heap: list[tuple[float, int, Event]] = []
        self._num_made = 0

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            assert event.at_s >= self.now_s, "an event lies in the past"
            self._num_made += 1
            heapq.heappush(self._heap, (event.at_s, self._num_made, event))

    def run(self, until: Callable[[], bool]) -> None:
        """Handle events until there are none, or `until` says that it is enough."""
        while self._heap and not until():
            self.now_s, _, event = heapq.heappop(self._heap)
            self.num_handled += 1
            self.add(event.handle())
