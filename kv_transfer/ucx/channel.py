"""One pair on UCX: an endpoint, its tags, its ring and the way into the peer's.

Tags: pair nonce (folded to 48 bits) | direction (1) | credit or frame (1) | slot (14). Each tag has at most one message under
way, and its receive is posted before the message may be sent. Tagged messages are small: a frame's payload is written into the
peer's ring slot, in place where that is mapped, else by a put with a flush behind it; then its header goes as a message. So
RNDV_THRESH is inf: UCX needs no rendezvous, and only then are puts over TCP zero-copy with error handling (docs/kv_tcp.md).
The last credit slot carries the goodbye of a peer that closes while it lives: shared memory reports only death. What a peer had
under way when its pair closed lands in UCX's unexpected queue, and is swept from there for a while, or in a ring that only other
pairs will use.

Receives are posted on the endpoint: those on the worker are never cancelled when a peer dies. A receive that was cancelled or
abandoned in Python is still written to by UCX: slots of a closed channel are kept, and counted as quarantined, until each of its
requests has completed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from baton.errors import TransferFailed
from kv_transfer.block_store import BlockStore
from kv_transfer.channel import ChannelEvent, ChannelLost, Credit, FrameArrived, PeerPool, SendDone
from kv_transfer.frame import CREDIT_BYTES, HEADER_BYTES, pack_credit, unpack_credit
from kv_transfer.liveness import ProcessIdentity
from kv_transfer.ucx.exports import Exports, unpack_exports
from kv_transfer.ucx.memory import RemoteRegion, Slots
from kv_transfer.ucx.query import endpoint_transports
from kv_transfer.ucx.requests import PendingRequest, tag_send
from kv_transfer.ucx.ucp import OK, TRUNCATED

if TYPE_CHECKING:
    from kv_transfer.ucx.transport import UcxTransport

GOODBYE_SLOT = (1 << 14) - 1  # the last that a tag has room for
MAX_TAGGED_BYTES = 4096  # a frame up to this size goes as one message; of a longer one the payload is put first
MAX_PROBE_BYTES = 16 << 10  # header and two remote keys, each some ten bytes per memory domain of UCX


class UcxChannel:
    """One endpoint, its tags and its slots."""

    def __init__(
        self,
        transport: UcxTransport,
        endpoint: Any,  # ucxx has no types
        process: ProcessIdentity,
        nonce: int,
        outgoing_lane: int,
        frame_bytes: int,
        num_slots: int,
    ) -> None:
        self.num_slots = num_slots
        self.frame_bytes = frame_bytes
        self._transport = transport
        self._endpoint = endpoint
        self._process = process if process.is_running() else None  # None: not to be seen from here
        self._base = ((nonce ^ nonce >> 48) & 0xFFFF_FFFF_FFFF) << 16
        self._outgoing = outgoing_lane
        self._ring_slots: Slots | None = transport.borrow_slots(num_slots * frame_bytes)
        self._send_slots: Slots | None = None  # own ones; None where frames are made in the peer's ring
        self._ring_memory, self._ring_region = self._ring_slots
        self._send_memory: memoryview | None = None  # of all lanes, once `attach` was called
        self._probe_memory = memoryview(bytearray(min(frame_bytes, MAX_PROBE_BYTES)))
        self._peer_ring: RemoteRegion | None = None
        self._peer_pool: RemoteRegion | None = None
        self._puts: dict[int, PendingRequest] = {}  # by slot; the header follows
        self._credits = np.zeros((num_slots, CREDIT_BYTES), dtype=np.uint8)
        self._ring = [Array(self.ring_slot(slot)) for slot in range(num_slots)]
        self._frame_receives: dict[int, Any] = {}  # by slot
        self._credit_receives: dict[int, Any] = {}  # by slot
        self._sends: dict[int, PendingRequest] = {}  # by slot
        self._credit_sends: list[PendingRequest] = []  # and the goodbye
        self._closed = False
        self._failures: list[str] = []  # why the path is lost; the first one counts
        self._goodbye = Array(bytearray(1))
        self._goodbye_receive = self._receive(self._goodbye, self._tag(1 - outgoing_lane, True, GOODBYE_SLOT))
        endpoint.set_close_callback(self._failures.append, ("the peer closed or died",))  # no reference back to self

    def describe(self) -> str:
        names = endpoint_transports(self._endpoint.handle)
        return "+".join(dict.fromkeys(names))

    def ring_slot(self, slot: int) -> memoryview:
        return self._ring_memory[slot * self.frame_bytes : (slot + 1) * self.frame_bytes]

    def send_slot(self, slot: int) -> memoryview:
        if self._send_memory is None:  # the one frame that is sent before is the probe
            return self._probe_memory
        return self._send_memory[slot * self.frame_bytes : (slot + 1) * self.frame_bytes]

    def exports(self, store: BlockStore | None) -> bytes:
        pool = None if store is None else self._transport.export_pool(store)
        return Exports(self._ring_region, pool).pack()

    def attach(self, exports: bytes) -> PeerPool | None:
        told = unpack_exports(exports)
        if told is None or told.ring.nbytes != self.num_slots * self.frame_bytes:
            raise TransferFailed("the peer's probe does not describe a ring of the agreed size")
        self._peer_ring = RemoteRegion(self._endpoint.handle, told.ring)
        if self._peer_ring.address is None:
            self._send_slots = self._transport.borrow_slots(self.num_slots * self.frame_bytes)
            self._send_memory = self._send_slots[0]
            return None
        self._peer_ring.prefault(writable=True)
        self._send_memory = self._peer_ring.view()
        if told.pool is None:
            return None
        self._peer_pool = RemoteRegion(self._endpoint.handle, told.pool.region)
        address = self._peer_pool.address
        if address is None:
            return None
        self._peer_pool.prefault(writable=False)
        return PeerPool(told.pool.at(address), told.pool.num_blocks)

    def post_frame(self, slot: int) -> None:
        self._frame_receives[slot] = self._receive(self._ring[slot], self._tag(1 - self._outgoing, False, slot))

    def post_credit(self, slot: int) -> None:
        credit = Array(self._credits[slot])
        self._credit_receives[slot] = self._receive(credit, self._tag(self._outgoing, True, slot))

    def send_frame(self, slot: int, nbytes: int) -> None:
        if self._peer_ring is None or nbytes <= MAX_TAGGED_BYTES:
            self._send_tagged(slot, nbytes)
        elif self._peer_ring.address is not None:  # the payload was written in place
            self._send_tagged(slot, HEADER_BYTES)
        else:
            payload = self.send_slot(slot)[HEADER_BYTES:nbytes]
            self._puts[slot] = self._peer_ring.put(payload, slot * self.frame_bytes + HEADER_BYTES)

    def _send_tagged(self, slot: int, nbytes: int) -> None:
        self._sends[slot] = self._send(self.send_slot(slot)[:nbytes], self._tag(self._outgoing, False, slot))

    def send_credit(self, credit: Credit) -> None:
        data = memoryview(bytearray(pack_credit(credit.turn, credit.accepted, credit.can_pull)))
        self._credit_sends.append(self._send(data, self._tag(1 - self._outgoing, True, credit.slot)))

    def _send(self, data: memoryview, tag: int) -> PendingRequest:
        return tag_send(self._endpoint.handle, data, tag)

    def _receive(self, into: Array[Any], tag: int) -> Any:
        return self._endpoint.tag_recv(into, libucxx.UCXXTag(tag))

    def poll(self) -> list[ChannelEvent]:
        events: list[ChannelEvent] = []
        for slot in _take_completed(self._frame_receives, self._failures):
            events.append(FrameArrived(slot))
        for slot in _take_completed(self._credit_receives, self._failures):
            answer = unpack_credit(memoryview(self._credits[slot]))
            if answer is not None:
                events.append(Credit(slot, *answer))
        for slot in _take_completed(self._sends, self._failures):
            events.append(SendDone(slot))
        for slot in _take_completed(self._puts, self._failures):
            self._send_tagged(slot, HEADER_BYTES)
        self._credit_sends = [request for request in self._credit_sends if not request.completed]
        if self._goodbye_receive.completed:
            self._failures.append("the peer closed the pair")
        if self._failures or not self._endpoint.alive:
            events.append(ChannelLost([*self._failures, "the UCX endpoint failed"][0]))
        return events

    def check_peer(self) -> None:
        if self._process is not None and not self._process.is_running():
            self._failures.append("the peer's process is gone")

    def close(self) -> None:
        """Say goodbye, cancel every request and force the endpoint shut; a dead peer does not delay it."""
        self._closed = True
        if self._endpoint.alive and not self._failures:
            goodbye = self._send(memoryview(bytearray(1)), self._tag(self._outgoing, True, GOODBYE_SLOT))
            self._credit_sends.append(goodbye)
            self._transport.flush(goodbye)
        self._endpoint.remove_close_callback()
        self._endpoint.close_blocking()
        self._transport.retire(self)

    @property
    def num_quarantined(self) -> int:
        """Slots of a closed channel that UCX may still read or write; 0 before close."""
        if not self._closed:
            return 0
        requests = [*self._frame_receives.values(), *self._sends.values(), *self._puts.values()]
        return sum(not request.completed for request in requests)

    def release(self) -> bool:
        """Free the endpoint and the slots of a closed channel; False while UCX still uses any memory of it."""
        by_slot = (self._frame_receives, self._credit_receives, self._sends, self._puts)
        requests = [request for requests in by_slot for request in requests.values()]
        if not all(request.completed for request in (*requests, *self._credit_sends, self._goodbye_receive)):
            return False
        for requests_by_slot in by_slot:
            requests_by_slot.clear()
        self._credit_sends.clear()
        self._ring.clear()
        self._ring_memory = memoryview(b"")
        self._send_memory = None
        for slots in (self._ring_slots, self._send_slots):
            if slots is not None:
                self._transport.give_back(slots)
        for region in (self._peer_pool, self._peer_ring):
            if region is not None:
                region.close()
        self._goodbye_receive = self._endpoint = self._peer_pool = self._peer_ring = None
        self._ring_slots = self._send_slots = None
        return True

    def incoming_tags(self) -> list[int]:
        """Tags of all that the peer may send."""
        frames = [self._tag(1 - self._outgoing, False, slot) for slot in range(self.num_slots)]
        credits = [self._tag(self._outgoing, True, slot) for slot in range(self.num_slots)]
        return [*frames, *credits, self._tag(1 - self._outgoing, True, GOODBYE_SLOT)]

    def _tag(self, direction: int, is_credit: bool, slot: int) -> int:
        return self._base | direction << 15 | is_credit << 14 | slot


def _take_completed(requests: dict[int, Any], failures: list[str]) -> list[int]:
    """Remove completed requests; returns the slots of those that moved a message."""
    done = [slot for slot, request in requests.items() if request.completed]
    moved: list[int] = []
    for slot in done:
        status = int(requests.pop(slot).status)
        if status in (OK, TRUNCATED):
            moved.append(slot)
        else:
            failures.append(f"a UCX request failed with status {status}")
    return moved
