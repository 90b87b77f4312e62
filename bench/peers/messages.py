"""What the bench says to the two processes of a library, and they to each other. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass

from baton.kv_layout import KVLayout

Table = tuple[int, ...]  # block ids of one transfer


@dataclass(frozen=True, slots=True)
class PeerStart:
    """The first question. Answer: PeerStarted."""

    name: str  # of this process, as the library wants one
    layout: KVLayout
    num_blocks: int
    seed: int | None  # of the pool's bytes; None = zeros
    progress_thread: bool


@dataclass(frozen=True, slots=True)
class PeerStarted:
    """What the other process needs to reach this one."""

    hello: bytes
    address: int  # of the pool


@dataclass(frozen=True, slots=True)
class Meet:
    """To the sender alone. Answer: Done."""

    other: PeerStarted


@dataclass(frozen=True, slots=True)
class Expect:
    """Clear these blocks, answer Done, then tell the sender when every byte is there."""

    tables: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Answer: Written."""

    source: tuple[Table, ...]
    target: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class Written:
    wall_s: float  # first call into the library -> the receiver's answer


@dataclass(frozen=True, slots=True)
class PeerDigest:
    """Answer: PeerDigestIs."""

    tables: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class PeerDigestIs:
    sha256: str


@dataclass(frozen=True, slots=True)
class PeerDone:
    """Nothing more to say."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Receiver -> sender: every byte is in its place."""
