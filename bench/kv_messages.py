"""What the bench says to its two workers (a question each, and the answer), and they to each other. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config import KVTransferConfig
from baton.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class Start:
    """The first question. Answer: Started."""

    layout: KVLayout
    num_blocks: int
    epoch: int
    seed: int | None  # of the pool's bytes; None = zeros
    config: KVTransferConfig


@dataclass(frozen=True, slots=True)
class Started:
    address: bytes


@dataclass(frozen=True, slots=True)
class Connect:
    """Answer: Connected."""

    peer_epoch: int
    address: bytes
    nonce: int


@dataclass(frozen=True, slots=True)
class Connected:
    transport: str
    mode: str  # direct | staged


@dataclass(frozen=True, slots=True)
class Transfer:
    seq: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Accept:
    """Clear these blocks and open tickets for them. Answer: Done."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Ship:
    """Ship all at once. Answer: Acked."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Acked:
    commit_s: tuple[float, ...]  # ship -> Ack, by transfer
    wall_s: float  # first ship -> last Ack


@dataclass(frozen=True, slots=True)
class ShipPaced:
    """Ship one prompt as a prefill would compute it. Answer: Paced."""

    transfer: Transfer
    chunk_blocks: int
    chunk_s: float  # between the ends of two chunks


@dataclass(frozen=True, slots=True)
class Paced:
    exposed_s: float  # end of the last chunk -> Ack
    num_chunks: int
    num_late: int  # chunks but the last whose bytes were not all acknowledged when the next chunk ended


@dataclass(frozen=True, slots=True)
class Digest:
    """Answer: DigestIs."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class DigestIs:
    sha256: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Answer: UsageIs."""


@dataclass(frozen=True, slots=True)
class UsageIs:
    cpu_s: float  # user and system, of the process so far


@dataclass(frozen=True, slots=True)
class Decode:
    """Run decode-like steps for a while. Answer: Decoded."""

    duration_s: float


@dataclass(frozen=True, slots=True)
class Decoded:
    step_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing more to say."""


Question = Start | Connect | Accept | Ship | ShipPaced | Digest | Usage | Decode


@dataclass(frozen=True, slots=True)
class Commit:
    """Sender -> receiver, as Link's Commit."""

    seq: int
    num_frames: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Missing:
    """Receiver -> sender: frames to send again."""

    seq: int
    frames: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ack:
    """Receiver -> sender: every byte is verified and in its blocks."""

    seq: int
