"""What traffic's numbers are, as far as chance leaves them. Pure; held in memory, of one fleet.

Each look brings a short window of a number and a long one. The long one's mean counts, as long as the last 30, 60 ... 150 s do
not differ from what was before them by more than chance explains. Once they do, what counts is the mean since then:

    load     ______|~~~~~~~~~~~~~~~~~~~~~~
    known    _________|~~~~~~~~~~~~~~~~~~~     large steps after one short window, small ones after some
    long     ______/-----------------~~~~~     of two loads until the new one fills it, so like neither

Where 30 s are no multiple of the time between looks, spans are the next longer ones. 30 s of 10 calls/s vary by 6 %, so a step
of a third shows in one short window, and one of a sixth in five.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from router.controller.autoscaler.chance import CHANGE, belief
from router.ring import BUCKET_S, LONG_S, SHORT_S

NUM_SPANS = 5  # that are compared with what was before: half of the long window, at most
# What five spans ask for beyond one, in standard deviations, so that as few changes are seen where there is none as with one:
# tests/controller/autoscaler/test_autoscaler_levels.py draws Poisson arrivals and counts
SCAN_DOUBTS = 0.5


@dataclass(frozen=True, slots=True)
class Seen:
    """In a window: something, over what it is counted by; tokens over calls, calls over seconds."""

    total: float = 0.0
    count: float = 0.0

    @property
    def mean(self) -> float | None:
        """None: there was nothing."""
        return self.total / self.count if self.count > 0 else None

    def __add__(self, other: Seen) -> Seen:
        return Seen(self.total + other.total, self.count + other.count)

    def __sub__(self, other: Seen) -> Seen:
        return Seen(max(0.0, self.total - other.total), max(0.0, self.count - other.count))


Deviation = Callable[[float, float], float]  # one standard one, of a mean that is so much over so large a count


@dataclass(frozen=True, slots=True)
class _Change:
    """That there may have been."""

    from_s: float
    mean: float  # since then
    doubts: float  # standard deviations by which it differs


@dataclass(slots=True)
class Level:
    """Of one number."""

    _looks: deque[tuple[float, Seen]] = field(default_factory=deque)  # when, and the short window that ended then
    _changed_s: float = -math.inf  # what was before is another level

    def look(self, now_s: float, short: Seen, long: Seen, deviation: Deviation) -> float | None:
        """What it is; None: nobody knows."""
        self._note(now_s, short)
        apart = list(self._apart())
        since = sum((seen for _, seen in apart), Seen())
        whole = since if now_s - self._changed_s < LONG_S and since.count else long
        if whole.mean is None:
            return short.mean
        changes = _changes(apart, whole, deviation)
        change = max(changes, key=lambda change: change.doubts, default=None)
        if change is None:
            return whole.mean
        if change.doubts >= CHANGE:
            self._changed_s = change.from_s
        return whole.mean + belief(change.doubts) * (change.mean - whole.mean)

    def _note(self, now_s: float, short: Seen) -> None:
        if self._looks and now_s < self._looks[-1][0]:  # a clock that went back: of the time since nothing is known
            self._looks.clear()
            self._changed_s = -math.inf
        if len(self._looks) > 1 and now_s - self._looks[-2][0] < BUCKET_S:  # windows move by as much
            self._looks.pop()
        self._looks.append((now_s, short))
        while self._looks[0][0] <= now_s - LONG_S:
            self._looks.popleft()

    def _apart(self) -> Iterator[tuple[float, Seen]]:
        """Short windows that have no moment in common, the latest first, back to the last change; with their beginnings."""
        next_s = math.inf
        for end_s, seen in reversed(self._looks):
            begin_s = end_s - SHORT_S
            if begin_s < self._changed_s:
                return
            if end_s <= next_s:
                yield begin_s, seen
                next_s = begin_s


def _changes(apart: list[tuple[float, Seen]], whole: Seen, deviation: Deviation) -> Iterator[_Change]:
    """The last spans against what was before them."""
    lately = Seen()
    for begin_s, seen in apart[:NUM_SPANS]:
        lately += seen
        before = whole - lately
        if lately.mean is None or before.mean is None or lately.mean == before.mean:
            continue
        of_difference = math.hypot(deviation(before.mean, lately.count), deviation(before.mean, before.count))
        doubts = abs(lately.mean - before.mean) / of_difference if of_difference else math.inf
        yield _Change(begin_s, lately.mean, doubts - SCAN_DOUBTS)


@dataclass(frozen=True, slots=True)
class ClassLevels:
    """Of one SLO class's calls."""

    rate: Level = field(default_factory=Level)  # calls a second
    prompt_tokens: Level = field(default_factory=Level)
    cached_tokens: Level = field(default_factory=Level)
    output_tokens: Level = field(default_factory=Level)


class Levels:
    """By class."""

    def __init__(self) -> None:
        self._classes: dict[str, ClassLevels] = {}

    def of(self, class_name: str) -> ClassLevels:
        return self._classes.setdefault(class_name, ClassLevels())

    def keep(self, class_names: Collection[str]) -> None:
        """Others are forgotten."""
        self._classes = {name: levels for name, levels in self._classes.items() if name in class_names}
