"""A transport inside one process, with faults on demand: for tests, and for clusters without UCX.

A `LoopbackNetwork` joins any number of `LoopbackTransport`s by name. Messages are copied when sent and matched on arrival with
posted receives, in the order of arrival on each lane, as UCX does. Faults are drawn from one seeded generator in sending
order, so a single-threaded test repeats exactly. Loss and corruption hit frames only, unless `credit_loss` asks for more: a
real transport loses neither, and a lane whose credit is lost stays unusable until its pair is set up again.

Thread-safe: each transport is driven by its own thread; the network's lock guards the inboxes.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections import deque
from dataclasses import dataclass, field

from baton.errors import TransferFailed
from kv_transfer.block_store import BlockStore
from kv_transfer.channel import ChannelEvent, ChannelLost, Credit, FrameArrived, PeerPool, SendDone
from kv_transfer.events import TransportSettings
from kv_transfer.frame import pack_credit, unpack_credit

_GOODBYE_SLOT = -1  # the credit lane that tells the peer of close()
MAX_CLOSED_NONCES = 1024  # messages of older pairs have arrived long ago
MAX_UNEXPECTED = 64  # messages kept for receives not posted yet, per lane; only copies ever get there


@dataclass(frozen=True, slots=True)
class Faults:
    """What a network does to messages. Probabilities are per message."""

    seed: int = 0
    delay_s: float = 0.0  # of every message
    jitter_s: float = 0.0  # uniform in [0, jitter_s) on top
    loss: float = 0.0  # of frames
    corrupt: float = 0.0  # one byte of a frame is changed
    duplicate: float = 0.0  # of any message
    reorder: float = 0.0  # of any message: it may overtake those sent before it that have not arrived
    credit_loss: float = 0.0


@dataclass(frozen=True, slots=True)
class _Lane:
    nonce: int
    direction: int
    is_credit: bool
    slot: int


@dataclass(order=True, slots=True)
class _Message:
    due_s: float
    order: float
    lane: _Lane = field(compare=False)
    data: bytes = field(compare=False)


class LoopbackNetwork:
    """The wire between the transports of one process."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self._random = random.Random(self.faults.seed)
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._inboxes: dict[bytes, list[_Message]] = {}
        self._transports: dict[bytes, LoopbackTransport] = {}
        self.exported: dict[tuple[bytes, int], BlockStore] = {}  # by address and nonce, while that channel is open

    def transport(self, name: str) -> LoopbackTransport:
        transport = LoopbackTransport(self, name.encode())
        with self._lock:
            self._transports[transport.address] = transport
            self._inboxes[transport.address] = []
        return transport

    def is_up(self, address: bytes) -> bool:
        return address in self._inboxes

    def remove(self, address: bytes) -> None:
        """Take a transport off the wire, as the death of its process would."""
        with self._lock:
            self._inboxes.pop(address, None)
            self._transports.pop(address, None)
            others = list(self._transports.values())
        for transport in others:
            transport.wake()

    def send(self, address: bytes, lane: _Lane, data: bytes, now_s: float) -> None:
        with self._lock:
            inbox = self._inboxes.get(address)
            if inbox is None:
                return
            for copy in self._apply_faults(lane, data):
                heapq.heappush(inbox, self._message(lane, copy, now_s))
            transport = self._transports[address]
        transport.wake()

    def receive(self, address: bytes, now_s: float) -> list[_Message]:
        """Messages that are due."""
        due: list[_Message] = []
        with self._lock:
            inbox = self._inboxes.get(address, [])
            while inbox and inbox[0].due_s <= now_s:
                due.append(heapq.heappop(inbox))
        return due

    def _apply_faults(self, lane: _Lane, data: bytes) -> list[bytes]:
        draw = self._random.random
        if lane.slot == _GOODBYE_SLOT:
            return [data]
        if draw() < (self.faults.credit_loss if lane.is_credit else self.faults.loss):
            return []
        if not lane.is_credit and draw() < self.faults.corrupt:
            place = self._random.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ self._random.randrange(1, 256)]) + data[place + 1 :]
        return [data, data] if draw() < self.faults.duplicate else [data]

    def _message(self, lane: _Lane, data: bytes, now_s: float) -> _Message:
        due_s = now_s + self.faults.delay_s + self.faults.jitter_s * self._random.random()
        order = float(next(self._order))
        if self._random.random() < self.faults.reorder:
            order *= self._random.random()
        return _Message(due_s, order, lane, data)


class LoopbackTransport:
    """One worker's end of a LoopbackNetwork."""

    def __init__(self, network: LoopbackNetwork, address: bytes) -> None:
        self.address = address
        self._network = network
        self._channels: dict[int, LoopbackChannel] = {}  # by nonce
        self._early: dict[int, list[_Message]] = {}  # of pairs that this end has not opened yet
        self._closed_nonces: dict[int, None] = {}  # the latest, oldest first
        self._wake = threading.Event()
        self.now_s = 0.0

    def allocate(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def export(self, nonce: int, store: BlockStore) -> None:
        self._network.exported[self.address, nonce] = store

    def exported(self, peer_address: bytes, nonce: int) -> BlockStore | None:
        return self._network.exported.get((peer_address, nonce))

    def settings(self) -> TransportSettings:
        return TransportSettings("loopback", "", {})

    def open_channel(
        self, peer_address: bytes, nonce: int, outgoing_lane: int, frame_bytes: int, num_slots: int
    ) -> LoopbackChannel:
        if nonce in self._channels or nonce in self._closed_nonces:
            raise TransferFailed("the peer has closed the pair, or its nonce was used before")
        channel = LoopbackChannel(self, peer_address, nonce, outgoing_lane, frame_bytes, num_slots)
        self._channels[nonce] = channel
        for message in self._early.pop(nonce, []):
            channel.deliver(message.lane, message.data)
        return channel

    def progress(self, now_s: float) -> bool:
        self.now_s = now_s
        messages = self._network.receive(self.address, now_s)
        for message in messages:
            nonce = message.lane.nonce
            if nonce in self._channels:
                self._channels[nonce].deliver(message.lane, message.data)
            elif message.lane.slot == _GOODBYE_SLOT:
                self.forget(nonce)
            elif nonce not in self._closed_nonces:
                self._early.setdefault(nonce, []).append(message)
        return bool(messages) or any(not self._network.is_up(c.peer_address) for c in self._channels.values())

    def wait(self, timeout_s: float) -> None:
        faults = self._network.faults
        if faults.delay_s or faults.jitter_s:
            timeout_s = min(timeout_s, 0.001)  # a message due later than its wake-up has no other alarm
        self._wake.wait(timeout_s)
        self._wake.clear()

    def wake(self) -> None:
        self._wake.set()

    def close(self) -> None:
        self._network.remove(self.address)

    def send(self, peer_address: bytes, lane: _Lane, data: bytes) -> None:
        self._network.send(peer_address, lane, data, self.now_s)

    def is_up(self, peer_address: bytes) -> bool:
        return self._network.is_up(peer_address)

    def forget(self, nonce: int) -> None:
        """End a pair, opened or not: what still comes for it is dropped."""
        self._channels.pop(nonce, None)
        self._early.pop(nonce, None)
        self._network.exported.pop((self.address, nonce), None)
        self._closed_nonces[nonce] = None
        if len(self._closed_nonces) > MAX_CLOSED_NONCES:
            del self._closed_nonces[next(iter(self._closed_nonces))]


class LoopbackChannel:
    """One end of a pair: plain memory, matched by lane."""

    def __init__(
        self,
        transport: LoopbackTransport,
        peer_address: bytes,
        nonce: int,
        outgoing_lane: int,
        frame_bytes: int,
        num_slots: int,
    ) -> None:
        self.peer_address = peer_address
        self.num_slots = num_slots
        self.frame_bytes = frame_bytes
        self.num_quarantined = 0  # nothing is written to a slot behind our back
        self._transport = transport
        self._nonce = nonce
        self._outgoing = outgoing_lane
        self._ring = [bytearray(frame_bytes) for _ in range(num_slots)]
        self._send_slots = [bytearray(frame_bytes) for _ in range(num_slots)]
        self._posted: set[_Lane] = set()
        self._unexpected: dict[_Lane, deque[bytes]] = {}
        self._events: list[ChannelEvent] = []
        self._lost = False
        self._peer_store: BlockStore | None = None  # kept, as a mapping would: the peer may end before we do
        self.post_credit(_GOODBYE_SLOT)

    def describe(self) -> str:
        return "loopback"

    def ring_slot(self, slot: int) -> memoryview:
        return memoryview(self._ring[slot])

    def send_slot(self, slot: int) -> memoryview:
        return memoryview(self._send_slots[slot])

    def exports(self, store: BlockStore | None) -> bytes:
        if store is None:
            return b""
        self._transport.export(self._nonce, store)
        return b"pool"

    def attach(self, exports: bytes) -> PeerPool | None:
        self._peer_store = store = self._transport.exported(self.peer_address, self._nonce) if exports else None
        return None if store is None or store.memory is None else PeerPool(store.memory, store.num_blocks)

    def post_frame(self, slot: int) -> None:
        self._post(_Lane(self._nonce, 1 - self._outgoing, False, slot))

    def post_credit(self, slot: int) -> None:
        self._post(_Lane(self._nonce, self._outgoing, True, slot))

    def send_frame(self, slot: int, nbytes: int) -> None:
        lane = _Lane(self._nonce, self._outgoing, False, slot)
        self._transport.send(self.peer_address, lane, bytes(self.send_slot(slot)[:nbytes]))
        self._events.append(SendDone(slot))

    def send_credit(self, credit: Credit) -> None:
        lane = _Lane(self._nonce, 1 - self._outgoing, True, credit.slot)
        self._transport.send(self.peer_address, lane, pack_credit(credit.turn, credit.accepted, credit.can_pull))

    def poll(self) -> list[ChannelEvent]:
        if not self._lost and not self._transport.is_up(self.peer_address):
            self._lost = True
            self._events.append(ChannelLost("the peer's transport is gone"))
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self._transport.send(self.peer_address, _Lane(self._nonce, 1 - self._outgoing, True, _GOODBYE_SLOT), b"")
        self._transport.forget(self._nonce)
        self._peer_store = None

    def deliver(self, lane: _Lane, data: bytes) -> None:
        """Match a message with its receive, or keep it until one is posted."""
        if lane in self._posted:
            self._posted.discard(lane)
            self._complete(lane, data)
            return
        waiting = self._unexpected.setdefault(lane, deque())
        if len(waiting) < MAX_UNEXPECTED:
            waiting.append(data)

    def _post(self, lane: _Lane) -> None:
        waiting = self._unexpected.get(lane)
        if waiting:
            self._complete(lane, waiting.popleft())
        else:
            self._posted.add(lane)

    def _complete(self, lane: _Lane, data: bytes) -> None:
        if lane.slot == _GOODBYE_SLOT:
            self._events.append(ChannelLost("the peer closed the pair"))
        elif not lane.is_credit:
            self._ring[lane.slot][: len(data)] = data
            self._events.append(FrameArrived(lane.slot))
        elif (answer := unpack_credit(memoryview(data))) is not None:
            self._events.append(Credit(lane.slot, *answer))


PROCESS_NETWORK = LoopbackNetwork()  # what `transport: loopback` means where no other network is given
