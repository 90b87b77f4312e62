"""How long starts take here, measured. Pure: instants come in, medians go out.

    start-up   asked for -> announced and heard from

A few medians ago is of other conditions, so only the last KEPT count; until there is one, the configured times hold. A start
whose weights a peer lent is another thing than one that read them: the next is taken to go like the last one, so that only those
of its kind count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from types import MappingProxyType

from baton.v1 import worker_pb2
from router.controller.autoscaler.autoscaler import Times
from router.controller.fleet_state import READY, STARTING, Member

KEPT = 8
NOTHING_SAID: Mapping[str, str] = MappingProxyType({})
LEAST_S = 0.1  # nothing starts sooner than a heartbeat tells of it


@dataclass(slots=True)
class LiveTimes:
    """Of one fleet; call `look` about once a second, which is how exact it is."""

    configured: Times
    _start_ups: deque[tuple[float, str]] = field(
        default_factory=lambda: deque(maxlen=KEPT)
    )  # seconds, where the weights came from
    _starting: dict[str, float] = field(default_factory=dict)

    @property
    def times(self) -> Times:
        if not self._start_ups:
            return self.configured
        last_from = self._start_ups[-1][1]
        like_it = [seconds for seconds, weights_from in self._start_ups if weights_from == last_from]
        return replace(self.configured, start_up_s=max(LEAST_S, median(like_it)))

    def kept(self) -> tuple[tuple[float, str], ...]:
        """Start-ups that were measured, oldest first: seconds, and where the weights came from, "" = not known."""
        return tuple(self._start_ups)

    def restore(self, start_ups: Iterable[tuple[float, str]]) -> None:
        """Those of an earlier process; what cannot be one is left out."""
        self._start_ups.extend(known for known in start_ups if 0.0 <= known[0] < math.inf)

    def look(
        self,
        members: Iterable[Member],
        loads: Mapping[str, worker_pb2.Load],
        now_s: float,
        weights_from: Mapping[str, str] = NOTHING_SAID,
    ) -> None:
        """`loads`: what workers that are there last said of themselves; `weights_from`: where theirs came from."""
        known_members = {member.worker_id: member for member in members}
        for worker_id, member in known_members.items():
            if member.state == STARTING:
                self._starting.setdefault(worker_id, now_s)
        for worker_id, since_s in list(self._starting.items()):
            known = known_members.get(worker_id)
            if known is not None and known.state == READY and worker_id in loads:
                self._start_ups.append((now_s - since_s, weights_from.get(worker_id, "")))
            elif known is not None and known.state in (STARTING, READY):
                continue
            del self._starting[worker_id]  # up; or failed, or to drain: nobody knows how long it would have taken
