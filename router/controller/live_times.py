"""How long starts take here, measured. Pure: instants come in, medians go out.

    start-up   asked for -> announced and heard from

A few medians ago is of other conditions, so only the last KEPT count; until there is one, the configured times hold.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from baton.v1 import worker_pb2
from router.controller.autoscaler.autoscaler import Times
from router.controller.fleet_state import READY, STARTING, Member

KEPT = 8
LEAST_S = 0.1  # nothing starts sooner than a heartbeat tells of it


@dataclass(slots=True)
class LiveTimes:
    """Of one fleet; call `look` about once a second, which is how exact it is."""

    configured: Times
    _start_ups_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _starting: dict[str, float] = field(default_factory=dict)

    @property
    def times(self) -> Times:
        return replace(
            self.configured,
            start_up_s=max(LEAST_S, median(self._start_ups_s)) if self._start_ups_s else self.configured.start_up_s,
        )

    def kept(self) -> tuple[float, ...]:
        """Start-ups that were measured, oldest first."""
        return tuple(self._start_ups_s)

    def restore(self, start_ups_s: Iterable[float]) -> None:
        """Those of an earlier process; what cannot be one is left out."""
        self._start_ups_s.extend(seconds for seconds in start_ups_s if 0.0 <= seconds < math.inf)

    def look(self, members: Iterable[Member], loads: Mapping[str, worker_pb2.Load], now_s: float) -> None:
        """`loads`: what workers that are there last said of themselves."""
        known_members = {member.worker_id: member for member in members}
        for worker_id, member in known_members.items():
            if member.state == STARTING:
                self._starting.setdefault(worker_id, now_s)
        for worker_id, since_s in list(self._starting.items()):
            known = known_members.get(worker_id)
            if known is not None and known.state == READY and worker_id in loads:
                self._start_ups_s.append(now_s - since_s)
            elif known is not None and known.state in (STARTING, READY):
                continue
            del self._starting[worker_id]  # up; or failed, or to drain: nobody knows how long it would have taken
