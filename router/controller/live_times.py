"""How long starts and flips take here, measured. Pure: instants come in, medians go out.

    start-up   asked for -> announced and heard from
    flip       idle, or ordered if that came later -> the role has changed: what comes before is its calls' own time

A few medians ago is of other conditions, so only the last KEPT count; until there is one, the configured times hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from baton.request import Role
from baton.v1 import worker_pb2
from router.controller.autoscaler.autoscaler import Times
from router.controller.fleet_state import READY, STARTING, Member

KEPT = 8
LEAST_S = 0.1  # nothing starts or flips sooner than a heartbeat tells of it


@dataclass(slots=True)
class _Flip:
    role: Role
    epoch: int
    since_s: float


@dataclass(slots=True)
class LiveTimes:
    """Of one fleet; call `look` about once a second, which is how exact it is."""

    configured: Times
    _start_ups_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _flips_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _starting: dict[str, float] = field(default_factory=dict)
    _flipping: dict[str, _Flip] = field(default_factory=dict)

    @property
    def times(self) -> Times:
        return replace(
            self.configured,
            start_up_s=max(LEAST_S, median(self._start_ups_s)) if self._start_ups_s else self.configured.start_up_s,
            flip_s=max(LEAST_S, median(self._flips_s)) if self._flips_s else self.configured.flip_s,
        )

    def look(self, members: Iterable[Member], loads: Mapping[str, worker_pb2.Load], now_s: float) -> None:
        """`loads`: what workers that are there last said of themselves."""
        known = {member.worker_id: member for member in members}
        self._look_at_starts(known, loads, now_s)
        self._look_at_flips(known, loads, now_s)

    def _look_at_starts(
        self, members: Mapping[str, Member], loads: Mapping[str, worker_pb2.Load], now_s: float
    ) -> None:
        for worker_id, member in members.items():
            if member.state == STARTING:
                self._starting.setdefault(worker_id, now_s)
        for worker_id, since_s in list(self._starting.items()):
            known = members.get(worker_id)
            if known is not None and known.state == READY and worker_id in loads:
                self._start_ups_s.append(now_s - since_s)
            elif known is not None and known.state in (STARTING, READY):
                continue
            del self._starting[worker_id]  # up; or failed, or to drain: nobody knows how long it would have taken

    def _look_at_flips(self, members: Mapping[str, Member], loads: Mapping[str, worker_pb2.Load], now_s: float) -> None:
        for worker_id, load in loads.items():
            member = members.get(worker_id)
            if member is not None and load.next_role:
                flip = self._flipping.get(worker_id)
                if flip is None or not load.idle:
                    self._flipping[worker_id] = _Flip(Role(load.next_role), member.epoch, now_s)
        for worker_id, flip in list(self._flipping.items()):
            there = loads.get(worker_id)
            if there is not None and there.next_role:
                continue
            member = members.get(worker_id)
            same = member is not None and member.epoch == flip.epoch
            if same and there is not None and there.role == worker_pb2.Role.ValueType(flip.role):
                self._flips_s.append(now_s - flip.since_s)
            del self._flipping[worker_id]
