"""The data path of one pair, and the transport that makes such paths: what pair.py needs from loopback.py and ucx/.

A channel has the same numbered lanes on both ends, `num_slots` in each direction. A lane carries one message at a time:

    receiver                                   sender
    post_frame(i)  -> ring slot i can be hit
    send_credit(i) ------------ Credit ------> post_credit(i) was called before
                   <----------- frame -------- post_credit(i), then send_frame(i, nbytes)

So each message finds its receive posted and nothing piles up at either end. A channel moves bytes and believes nothing in
them. It is driven by one thread; only `Transport.wake` may be called from others.

The probe frame, which is small, carries `exports()`; the other end calls `attach` with them before it sends any other. Where a
transport can map memory of another process, send slots then are the peer's ring slots themselves, and the peer's block pool can
be read in place (direct mode).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.kv_copy import KVMemory
from kv_transfer.block_store import BlockStore
from kv_transfer.events import TransportSettings


@dataclass(frozen=True, slots=True)
class Credit:
    """The answer to a frame: its lane can be used again. `turn` counts the frames this lane has taken."""

    slot: int
    turn: int
    accepted: bool  # False: dropped at its header
    can_pull: bool = False  # whoever answers a probe can read our block pool


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """Ring slot `slot` holds a message and is not posted any more. The receiver owns it until post_frame."""

    slot: int


@dataclass(frozen=True, slots=True)
class SendDone:
    """Send slot `slot` may be written again. Proves nothing about arrival."""

    slot: int


@dataclass(frozen=True, slots=True)
class ChannelLost:
    """The path is broken; nothing else comes. The owner still has to close()."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeerPool:
    """A peer's block pool, readable at addresses of this process while the channel is open."""

    memory: KVMemory
    num_blocks: int


ChannelEvent = FrameArrived | Credit | SendDone | ChannelLost


class Channel(Protocol):
    """One pair's path. After close() only `num_quarantined` may be asked."""

    num_slots: int
    frame_bytes: int  # of one slot, header and payload

    def describe(self) -> str:
        """The transport in use as the transport itself reports it, e.g. "posix/memory"."""
        ...

    def ring_slot(self, slot: int) -> memoryview:
        """Where frames arrive; written by the peer while posted."""
        ...

    def send_slot(self, slot: int) -> memoryview:
        """Where frames are made; read by the transport between send_frame and SendDone. May be the peer's ring slot."""
        ...

    def exports(self, store: BlockStore | None) -> bytes:
        """What a peer needs to map our ring, and the pool of `store` if it is given and can be mapped."""
        ...

    def attach(self, exports: bytes) -> PeerPool | None:
        """Reach what the peer exports: frames can be sent now. Returns its pool, if that is readable from here.

        Raises:
            TransferFailed: its ring cannot be reached.
        """
        ...

    def post_frame(self, slot: int) -> None: ...
    def send_frame(self, slot: int, nbytes: int) -> None: ...
    def post_credit(self, slot: int) -> None: ...
    def send_credit(self, credit: Credit) -> None: ...

    def poll(self) -> list[ChannelEvent]:
        """What happened since the last call, in order."""
        ...

    def close(self) -> None:
        """Tell the peer, if it can be told, and stop its writes; slots stay quarantined until that is confirmed."""
        ...

    @property
    def num_quarantined(self) -> int:
        """Slots of a closed channel whose memory a peer may still touch."""
        ...


class Transport(Protocol):
    """Everything a worker's channels share: one address, one place to wait."""

    address: bytes

    def allocate(self, nbytes: int) -> memoryview:
        """Zeroed memory for a block pool, such that peers can map it if the transport has a way. Lives as long as its views.

        Raises:
            ConfigError: there is not enough.
        """
        ...

    def settings(self) -> TransportSettings:
        """What operators are shown."""
        ...

    def open_channel(
        self, peer_address: bytes, nonce: int, outgoing_lane: int, frame_bytes: int, num_slots: int
    ) -> Channel:
        """Make this end of a pair's path. `outgoing_lane` is 0 on one end and 1 on the other.

        Raises:
            TransferFailed: the address is not one, or memory is short.
        """
        ...

    def progress(self, now_s: float) -> bool:
        """Move bytes; True where something may have happened."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until something may have happened, `wake` or the timeout."""
        ...

    def wake(self) -> None:
        """End a wait; callable from any thread."""
        ...

    def close(self) -> None:
        """Free everything. Channels must be closed before."""
        ...
