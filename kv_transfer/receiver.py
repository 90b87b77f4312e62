"""The receiving half of one pair: open tickets, and the judgement of every frame that lands in the ring.

Life of an incoming transfer (a ticket); every `open` ends in exactly one Committed or IncomingClosed:

    1 open        blocks are reserved; frames are verified and scattered as they come
    2 promised    commit_incoming said how many frames and bytes there are
    3 incomplete  promised, and a frame was damaged, or nothing came for a while: Incomplete, then back to 2; at most
                  `max_resends` times, then damage, or silence for `ttl_s`        -> 5 "damaged"
    4 committed   every (block, layer) was written exactly once and the totals are those promised: Committed, after the last
                  scatter; the ticket is gone, a late copy finds none
    5 closed      on request, "expired" (silent for `ttl_s`), "peer lost: ...", "damaged": IncomingClosed

A frame is dropped at its header unless it is for this epoch, an open ticket, that ticket's generation, a range inside the
ticket and above its leading blocks that no frame wrote before, and the length that range has. What it brings, or points at in
the peer's pool, goes into the ticket's blocks, checksummed on the way; if the checksum fails they are cleared again: nobody reads
blocks before Committed. Every frame, dropped or not, gives its lane back, so a sender never hangs on a stale one; only a
second copy of one message gives nothing back, as its lane was given back with the first.

Pure: no thread, clock or socket; instants are arguments. Runs on the KV thread, or in a test. Scatter is synchronous: after
a terminal event no write of this ticket can happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.config import KVTransferConfig
from baton.kv_copy import copy_blocks, crc32c
from kv_transfer.block_store import BlockStore
from kv_transfer.channel import Credit, PeerPool
from kv_transfer.events import Committed, IncomingClosed, Incomplete, KVEvent
from kv_transfer.frame import HEADER_BYTES, PLACE_BYTES, FrameHeader, Kind, is_older, next_turn, read_header

EXPIRED = "expired"
DAMAGED = "damaged"
QUIET_S = KVTransferConfig().quiet_s  # after Commit, silence that counts as loss


@dataclass(slots=True)
class _Promise:
    num_frames: int
    nbytes: int


@dataclass(slots=True)
class _Ticket:
    seq: int
    generation: int
    block_ids: tuple[int, ...]  # of the whole prompt
    num_leading_blocks: int
    ttl_s: float
    opened_s: float
    deadline_s: float
    layers_written: list[int]  # per block of the prompt: bit l is set once layer l was scattered
    frames: set[int] = field(default_factory=set)  # indices scattered
    last_index: int = -1  # the greatest of them
    damaged: set[int] = field(default_factory=set)  # indices of bad copies since the last Incomplete
    nbytes: int = 0
    promise: _Promise | None = None
    num_incomplete: int = 0
    quiet_deadline_s: float = 0.0


class Receiver:
    """Judges frames and writes the good ones. Owns no memory; writes blocks of open tickets through `store`."""

    def __init__(
        self,
        store: BlockStore,
        emit: Callable[[KVEvent], None],
        epoch: int,
        num_slots: int,
        max_resends: int,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._store = store
        self._emit = emit
        self._epoch = epoch
        self._max_resends = max_resends
        self._quiet_s = quiet_s  # KVTransferConfig
        self._turns = [0] * num_slots  # frames taken from each lane; wraps
        self._tickets: dict[int, _Ticket] = {}
        self.peer_pool: PeerPool | None = None  # where frames of direct mode point
        self.probe: bytes | None = None  # the payload of the peer's probe frame, once it came
        self.bytes_received = 0
        self.frames_dropped = 0
        self.num_failed = 0
        self.num_expired = 0
        self.num_committed = 0
        self.total_transfer_s = 0.0  # open -> Committed, summed

    @property
    def reads_pools(self) -> bool:
        """Whether blocks can be copied straight into ours."""
        return self._store.memory is not None

    @property
    def num_open(self) -> int:
        return len(self._tickets)

    def open(
        self, seq: int, generation: int, block_ids: Sequence[int], num_leading_blocks: int, ttl_s: float, now_s: float
    ) -> None:
        """Take frames for a ticket. The same generation again renews its ttl; another one replaces the ticket."""
        old = self._tickets.get(seq)
        if old is not None and old.generation == generation:
            old.ttl_s = ttl_s
            old.deadline_s = max(old.deadline_s, now_s + ttl_s)
            return
        self.close(seq, "replaced")
        self._tickets[seq] = _Ticket(
            seq, generation, tuple(block_ids), num_leading_blocks, ttl_s, now_s, now_s + ttl_s, [0] * len(block_ids)
        )

    def commit(self, seq: int, generation: int, num_frames: int, nbytes: int, now_s: float) -> None:
        """Note what the sender promises; the answer is Committed, Incomplete or IncomingClosed."""
        ticket = self._tickets.get(seq)
        if ticket is None or ticket.generation != generation:
            return
        if num_frames > len(ticket.block_ids) * self._store.layout.num_layers:  # a frame carries one layer of one block
            self.close(seq, DAMAGED)
            return
        ticket.promise = _Promise(num_frames, nbytes)
        ticket.deadline_s = max(ticket.deadline_s, now_s + ticket.ttl_s)
        self._restart_quiet(ticket, now_s)
        self._settle(ticket, now_s)
        if seq in self._tickets and ticket.damaged:
            self._report(ticket, sorted(ticket.damaged), now_s)

    def close(self, seq: int, reason: str) -> None:
        """End a ticket, in whatever state; nothing happens where it is not open."""
        if self._tickets.pop(seq, None) is None:
            return
        self.num_failed += bool(reason)
        self._emit(IncomingClosed(seq, reason))

    def close_all(self, reason: str) -> None:
        for seq in list(self._tickets):
            self.close(seq, reason)

    def on_frame(self, slot: int, frame: memoryview, now_s: float) -> Credit | None:
        """Judge what arrived in a ring slot. The caller posts the slot again, then sends the credit, if there is one."""
        header = read_header(frame)
        if header is not None and is_older(header.turn, self._turns[slot]):
            self.frames_dropped += 1
            return None
        accepted = header is not None and self._take(header, frame, now_s)
        self.frames_dropped += not accepted
        self._turns[slot] = next_turn(self._turns[slot] if header is None else header.turn)
        return Credit(slot, self._turns[slot], accepted)

    def poll(self, now_s: float) -> None:
        """Expire silent tickets and report silent promises. Call it only when no arrived frame waits to be judged."""
        for ticket in list(self._tickets.values()):
            if now_s >= ticket.deadline_s:
                self.num_expired += 1
                self.close(ticket.seq, DAMAGED if ticket.promise else EXPIRED)
            elif ticket.promise and now_s >= ticket.quiet_deadline_s and self._may_report(ticket):
                self._report(ticket, self._missing(ticket), now_s)

    def _take(self, header: FrameHeader, frame: memoryview, now_s: float) -> bool:
        """Whether the frame was meant for something open here, whole, and is now where it belongs."""
        if header.epoch != self._epoch:
            return False
        payload = frame[HEADER_BYTES : HEADER_BYTES + header.nbytes]
        if header.kind is Kind.PROBE:
            return self._take_probe(bytes(payload), header.payload_crc)
        ticket = self._tickets.get(header.seq)
        if ticket is None or ticket.generation != header.generation or not self._in_range(header, ticket):
            return False
        ticket.deadline_s = max(ticket.deadline_s, now_s + ticket.ttl_s)
        self._restart_quiet(ticket, now_s)
        if header.index in ticket.frames:
            return True  # a resent frame whose first copy came after all
        mask = ((1 << header.num_layers) - 1) << header.layer_start
        blocks = range(header.block_start, header.block_start + header.num_blocks)
        fresh = not any(ticket.layers_written[block] & mask for block in blocks)
        if not (fresh and self._write(ticket, header, payload)):
            ticket.damaged.add(header.index)
            self._restart_quiet(ticket, now_s)
            return False
        for block in blocks:
            ticket.layers_written[block] |= mask
        self._count(ticket, header)
        self._settle(ticket, now_s)
        return True

    def _take_probe(self, payload: bytes, crc: int) -> bool:
        """Keep the peer's one probe; another is refused, as its memory is attached once."""
        if self.probe is not None or crc32c(memoryview(payload)) != crc:
            return False
        self.probe = payload
        return True

    def _in_range(self, header: FrameHeader, ticket: _Ticket) -> bool:
        layout = self._store.layout
        payload_bytes = PLACE_BYTES * header.num_blocks if header.kind is Kind.PULL else self._kv_bytes(header)
        return (
            header.num_blocks > 0
            and header.num_layers > 0
            and header.block_start >= ticket.num_leading_blocks
            and header.block_start + header.num_blocks <= len(ticket.block_ids)
            and header.layer_start + header.num_layers <= layout.num_layers
            and header.index < len(ticket.block_ids) * layout.num_layers
            and header.nbytes == payload_bytes
        )

    def _write(self, ticket: _Ticket, header: FrameHeader, payload: memoryview) -> bool:
        """Copy a frame's KV into its blocks; False, and nothing of it is left there, if it is not what was sent."""
        block_ids = ticket.block_ids[header.block_start : header.block_start + header.num_blocks]
        if header.kind is Kind.PULL:
            crc = self._pull(block_ids, header, payload.cast("I"))
        else:
            crc = self._store.scatter(block_ids, header.layer_start, header.num_layers, payload)
        if crc != header.payload_crc:
            self._store.clear(block_ids, header.layer_start, header.num_layers)
        return crc == header.payload_crc

    def _pull(self, block_ids: Sequence[int], header: FrameHeader, places: memoryview) -> int | None:
        """Read blocks at `places` of the peer's pool into ours; the crc32c of what was read, None for places it has not."""
        pool = self.peer_pool
        if pool is None or self._store.memory is None:
            return None
        try:
            return copy_blocks(
                self._store.layout, pool.memory, pool.num_blocks, places, self._store.memory, self._store.num_blocks,
                block_ids, header.layer_start, header.num_layers,
            )  # fmt: skip
        except ValueError:  # said before a byte moved: the peer's pool is not what it told, or has no such place
            return None

    def _count(self, ticket: _Ticket, header: FrameHeader) -> None:
        ticket.frames.add(header.index)
        ticket.last_index = max(ticket.last_index, header.index)
        ticket.damaged.discard(header.index)
        ticket.nbytes += self._kv_bytes(header)
        self.bytes_received += self._kv_bytes(header)

    def _kv_bytes(self, header: FrameHeader) -> int:
        return header.num_blocks * header.num_layers * self._store.layout.layer_block_bytes

    def _settle(self, ticket: _Ticket, now_s: float) -> None:
        """Commit, if what came is exactly what was promised; close, if it can never be."""
        promise = ticket.promise
        if promise is None:
            return
        if len(ticket.frames) < promise.num_frames and ticket.last_index < promise.num_frames:
            return
        every_layer = (1 << self._store.layout.num_layers) - 1
        whole = all(written == every_layer for written in ticket.layers_written[ticket.num_leading_blocks :])
        if not whole or len(ticket.frames) != promise.num_frames or ticket.nbytes != promise.nbytes:
            self.close(ticket.seq, DAMAGED)
            return
        del self._tickets[ticket.seq]
        self.num_committed += 1
        self.total_transfer_s += now_s - ticket.opened_s
        self._emit(Committed(ticket.seq, ticket.generation, ticket.nbytes))

    def _missing(self, ticket: _Ticket) -> list[int]:
        assert ticket.promise is not None
        return [index for index in range(ticket.promise.num_frames) if index not in ticket.frames]

    def _report(self, ticket: _Ticket, missing: Sequence[int], now_s: float) -> None:
        """Ask for frames again, or give the ticket up when that was done often enough."""
        if ticket.num_incomplete >= self._max_resends:
            self.close(ticket.seq, DAMAGED)
            return
        ticket.num_incomplete += 1
        ticket.damaged.clear()
        self._restart_quiet(ticket, now_s)
        self._emit(Incomplete(ticket.seq, ticket.generation, tuple(missing)))

    def _may_report(self, ticket: _Ticket) -> bool:
        """Silence is a reason to ask again, but alone no reason to give up before the ticket's time is over."""
        return ticket.num_incomplete < self._max_resends or bool(ticket.damaged)

    def _restart_quiet(self, ticket: _Ticket, now_s: float) -> None:
        ticket.quiet_deadline_s = now_s + self._quiet_s * 2**ticket.num_incomplete
