"""Whom a starting worker may ask for its model's weights. Pure.

All that have announced themselves and were not lost, those of the same model first; of a deterministic model the fingerprint
differs by machine, so that others may fit as well: the two find out. Standby workers come first, as they serve nobody. Among
equals the order turns with the name of the one that asks: workers that start together do not all ask the same one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from router.controller.fleet_state import DRAINING, READY, STANDBY, Member


def lenders_for(members: Iterable[Member], worker_id: str, fingerprint: str) -> list[Member]:
    """`fingerprint`: of the model of `worker_id`, without the numerics of a machine."""
    alive = [
        member
        for member in members
        if member.worker_id != worker_id and member.address and member.state in (STANDBY, READY, DRAINING)
    ]
    turn = zlib.crc32(worker_id.encode()) % max(1, len(alive))
    turned = alive[turn:] + alive[:turn]
    return sorted(turned, key=lambda member: (member.fingerprint != fingerprint, member.state != STANDBY))
