"""One sequence on the worker that generates it: plain data, which only decode_role.py changes. Its states are numbered there."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.request import Request
from baton.v1 import kv_pb2


class State(enum.IntEnum):
    """The numbered states of decode_role.py."""

    RESERVING = 1
    GRANTED = 2
    RUNNING = 3
    CLOSING = 4


@dataclass(slots=True)
class Decode:
    """Times are the worker's monotonic clock, seconds."""

    request: Request
    peer: str  # link key of the prefill worker; "" = local
    arrival_s: float
    deadline_s: float
    renewed_s: float
    state: State
    generation: int = 0
    ticket: kv_pb2.Ticket | None = None  # as granted
    in_plane: bool = False  # the KV plane may write the blocks
    granted_s: float = 0.0
    adopted_s: float = 0.0
    first_token: int = 0
    nbytes: int = 0  # of KV, as prefill has sent them
