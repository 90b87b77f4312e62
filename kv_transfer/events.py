"""What the KV thread tells the worker's event loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairReady:
    """Both directions of the data path were proved by a probe frame."""

    peer: str
    pair_nonce: int
    transport: str  # as the transport itself reports it: "posix/memory", "tcp/lo", "loopback"


@dataclass(frozen=True, slots=True)
class PairLost:
    """The data path is gone (or never came up); every transfer on it is closed before this event."""

    peer: str
    pair_nonce: int
    reason: str


@dataclass(frozen=True, slots=True)
class Shipped:
    """Every block of an outgoing transfer was posted; time to send Commit."""

    seq: int
    num_frames: int
    nbytes: int  # payload


@dataclass(frozen=True, slots=True)
class OutgoingClosed:
    """No frame of this transfer will be read from its blocks any more: they may be dropped."""

    seq: int
    reason: str  # "" = closed on request


@dataclass(frozen=True, slots=True)
class Committed:
    """Every byte of an incoming transfer arrived, was verified and is in its blocks. At most once per ticket."""

    seq: int
    generation: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Commit came, but these frames are missing or were damaged: ask the sender again."""

    seq: int
    generation: int
    missing_frames: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IncomingClosed:
    """Nothing will be written to this ticket's blocks any more: they may be dropped or adopted."""

    seq: int
    reason: str  # "" = closed on request; else "expired", "peer lost: ...", "damaged"


KVEvent = PairReady | PairLost | Shipped | OutgoingClosed | Committed | Incomplete | IncomingClosed


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """What the transport of one plane runs with; fixed at its start."""

    kind: str  # ucx | loopback
    version: str  # of UCX, "" elsewhere
    options: Mapping[str, str]  # UCX's, by name without UCX_


@dataclass(frozen=True, slots=True)
class KVLoad:
    """Gauges and totals of one plane."""

    num_outgoing: int
    num_incoming: int
    slots_in_use: int  # of num_slots: sent, and not answered by a credit yet
    num_slots: int  # of all pairs
    quarantined_slots: int
    bytes_sent: int
    bytes_received: int
    frames_dropped: int  # stale, unknown or damaged
    transfers_failed: int
    transfers_expired: int
