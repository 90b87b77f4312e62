"""A Transport whose frames take the time that they would take between the network cards of GPUs that are not here.

It wraps a real transport, which moves what there is to move: DATA and PULL frames are held back, on both ends, by an emulated
card each way (kv_transfer/nic.py); probes and credits pass. How long a frame lasts follows from the blocks and layers that its
header names, not from its bytes: payload is scaled down, and in direct mode not in the frame at all.

    sender    send_frame -> the card is free: the frame goes out -> SendDone
    receiver  FrameArrived -> its turn on the card -> its length later the pair hears of it, judges it and gives the lane back

So credits come back at the emulated pace, and a congested receiver slows its senders as a real one does. Frames leave outside of
their pair's turn, so a path that fails by it is lost as any path is, at its pair's next turn, and no other one with it. Runs on
the KV thread.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass

from baton import clock
from kv_transfer.block_store import BlockStore
from kv_transfer.channel import Channel, ChannelEvent, ChannelLost, Credit, FrameArrived, PeerPool, Transport
from kv_transfer.events import TransportSettings
from kv_transfer.frame import Kind, read_header
from kv_transfer.nic import Nic, Served

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkTime:
    """What a block takes on the wire."""

    layer_block_s: float  # of one layer of one block, one direction

    def frame_s(self, frame: memoryview) -> float:
        """0 for what carries no KV, or is no frame: the receiver will judge it."""
        header = read_header(frame)
        if header is None or header.kind is Kind.PROBE:
            return 0.0
        return header.num_blocks * header.num_layers * self.layer_block_s


class EmulatedTransport:
    """The Transport Protocol. Owns `inner`."""

    def __init__(self, inner: Transport, link: LinkTime) -> None:
        self.address = inner.address
        self.link = link
        self.now_s = 0.0
        self.out: Nic[_Departure] = Nic()
        self.into: Nic[_Arrival] = Nic()
        self._inner = inner
        self._flows = itertools.count()
        self._arriving: Served[_Arrival] | None = None

    def allocate(self, nbytes: int) -> memoryview:
        return self._inner.allocate(nbytes)

    def settings(self) -> TransportSettings:
        inner = self._inner.settings()
        return TransportSettings(f"emulated over {inner.kind}", inner.version, inner.options)

    def open_channel(
        self, peer_address: bytes, nonce: int, outgoing_lane: int, frame_bytes: int, num_slots: int
    ) -> Channel:
        inner = self._inner.open_channel(peer_address, nonce, outgoing_lane, frame_bytes, num_slots)
        return EmulatedChannel(self, inner, next(self._flows))

    def progress(self, now_s: float) -> bool:
        self.now_s = now_s
        moved = self._inner.progress(now_s)
        while (leaving := self.out.start_next(now_s)) is not None:
            leaving.item.go()
            moved = True
        return self._arrive(now_s) or moved

    def wait(self, timeout_s: float) -> None:
        instants = [self.out.next_start_s(), self.into.next_start_s()]
        if self._arriving is not None:
            instants = [instants[0], self._arriving.end_s]
        waits_s = (clock.real_s(instant - self.now_s) for instant in instants if instant is not None)
        self._inner.wait(max(0.0, min((timeout_s, *waits_s))))

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()

    def _arrive(self, now_s: float) -> bool:
        """Tell pairs of the frames whose last byte is in."""
        moved = False
        while (arriving := self._arriving or self.into.start_next(now_s)) is not None:
            self._arriving = arriving
            if arriving.end_s > now_s:
                break
            arriving.item.tell()
            self._arriving = None
            moved = True
        return moved


class EmulatedChannel:
    """The Channel Protocol. Owns `inner`."""

    def __init__(self, transport: EmulatedTransport, inner: Channel, flow: int) -> None:
        self.num_slots = inner.num_slots
        self.frame_bytes = inner.frame_bytes
        self._transport = transport
        self._inner = inner
        self._flow = flow
        self._closed = False
        self._arrived: list[ChannelEvent] = []

    def describe(self) -> str:
        return f"emulated over {self._inner.describe()}"

    def ring_slot(self, slot: int) -> memoryview:
        return self._inner.ring_slot(slot)

    def send_slot(self, slot: int) -> memoryview:
        return self._inner.send_slot(slot)

    def exports(self, store: BlockStore | None) -> bytes:
        return self._inner.exports(store)

    def attach(self, exports: bytes) -> PeerPool | None:
        return self._inner.attach(exports)

    def post_frame(self, slot: int) -> None:
        self._inner.post_frame(slot)

    def send_frame(self, slot: int, nbytes: int) -> None:
        transport = self._transport
        length_s = transport.link.frame_s(self.send_slot(slot))
        if length_s:
            transport.out.put(self._flow, _Departure(self, slot, nbytes), length_s, transport.now_s)
        else:
            self._inner.send_frame(slot, nbytes)

    def post_credit(self, slot: int) -> None:
        self._inner.post_credit(slot)

    def send_credit(self, credit: Credit) -> None:
        self._inner.send_credit(credit)

    def poll(self) -> list[ChannelEvent]:
        passed = [event for event in self._inner.poll() if not self._holds_back(event)]
        passed, self._arrived = passed + self._arrived, []
        return passed

    def _holds_back(self, event: ChannelEvent) -> bool:
        """Whether it is a frame that its card has yet to take in."""
        if not isinstance(event, FrameArrived):
            return False
        transport, length_s = self._transport, self._transport.link.frame_s(self.ring_slot(event.slot))
        if length_s:
            transport.into.put(self._flow, _Arrival(self, event), length_s, transport.now_s)
        return length_s > 0

    def leaves(self, slot: int, nbytes: int) -> None:
        """A frame that its card has let go."""
        try:
            self._inner.send_frame(slot, nbytes)
        except Exception as error:  # noqa: BLE001  the transport's boundary: its caller is everybody's progress
            _log.exception("a frame could not leave")
            self._forget_waiting()
            self._arrived.append(ChannelLost(f"a frame could not leave: {error or type(error).__name__}"))

    def arrived(self, event: ChannelEvent) -> None:
        """The next poll brings it; nothing after close."""
        if not self._closed:
            self._arrived.append(event)

    def close(self) -> None:
        self._closed = True
        self._forget_waiting()
        self._inner.close()

    def _forget_waiting(self) -> None:
        self._transport.out.forget(self._flow)
        self._transport.into.forget(self._flow)

    @property
    def num_quarantined(self) -> int:
        return self._inner.num_quarantined


@dataclass(frozen=True, slots=True)
class _Departure:
    """A frame that waits for its sender's card."""

    channel: EmulatedChannel
    slot: int
    nbytes: int

    def go(self) -> None:
        self.channel.leaves(self.slot, self.nbytes)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A frame that is in its ring slot, but would not be yet."""

    channel: EmulatedChannel
    event: FrameArrived

    def tell(self) -> None:
        self.channel.arrived(self.event)
