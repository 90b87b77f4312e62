"""The sending half of one pair: outgoing transfers and the send slots they share.

Life of an outgoing transfer; each is left for 5 exactly once, and every `open` ends in exactly one OutgoingClosed:

    1 open       blocks are held, nothing is ready                   -> 2 ship
    2 shipping   frames wait in FIFO order for a lane with credit    -> 3 the last one is posted: Shipped
    3 shipped    waits for close_outgoing, which the Ack causes      -> 2 resend
    4 expired    in 1 and 2: `lease_s` without a ship and without a credit for the pair;
                 in 3: `transfer_timeout_s` after Shipped            -> 5
    5 closed     OutgoingClosed; its blocks are not read again

In direct mode (`can_pull`) a frame carries the places of its blocks and the crc32c of their KV; the receiver reads them here, so
they must stay until the Ack. A transfer that closes before may have its blocks overwritten while they are read: the checksum
then fails there, and the ticket is gone or will be.

Life of a send slot: starved (no credit yet) -> free -> busy (sending, credit outstanding) -> free when both the send is done
and the credit is back. A slot is refilled only when free, so bytes under way are never overwritten; blocks are copied into
the slot at once (staged mode), so a transfer can close while its frames are still under way.

Pure: no thread, clock or socket; instants are arguments. Runs on the KV thread, or in a test.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.kv_copy import checksum, crc32c
from kv_transfer.block_store import BlockStore
from kv_transfer.channel import Credit
from kv_transfer.events import KVEvent, OutgoingClosed, Shipped
from kv_transfer.failure import FailureReason
from kv_transfer.frame import HEADER_BYTES, PLACE_BYTES, FrameHeader, Kind, is_older, next_turn, write_header
from kv_transfer.transfer_plan import FramePlan, plan_frames

PULL_BYTES = 8 << 20  # KV of one frame in direct mode. Measured: docs/kv_transfer.md
LEASE_EXPIRED = "lease expired"


@dataclass(slots=True)
class _Transfer:
    seq: int
    epoch: int  # of the receiver, from its ticket
    generation: int
    num_blocks: int  # of the whole prompt
    next_block: int  # blocks before this one are planned or not to be sent
    lease_s: float
    opened_s: float
    deadline_s: float
    block_ids: tuple[int, ...] = ()
    frames: list[FramePlan] = field(default_factory=list)  # all planned so far; the index is the position
    num_queued: int = 0  # frames of this transfer in the pair's queue
    last: bool = False  # no ship call will follow
    shipped: bool = False


@dataclass(slots=True)
class _Lane:
    turn: int = 0  # frames sent in it; wraps
    has_credit: bool = False
    sending: bool = False
    unanswered_s: float | None = None  # when the frame was sent that no credit came for yet


class Sender:
    """Fills send slots with frames as credits allow.

    Ownership: reads the blocks of open transfers through `store`; owns no memory. Byte totals count payload only.
    """

    def __init__(
        self,
        store: BlockStore,
        emit: Callable[[KVEvent], None],
        frame_bytes: int,
        num_slots: int,
        transfer_timeout_s: float,
    ) -> None:
        self._store = store
        self._emit = emit
        self._frame_bytes = frame_bytes
        self._transfer_timeout_s = transfer_timeout_s
        self.can_pull = False  # whether the peer reads our blocks by itself: direct mode
        self._lanes = [_Lane() for _ in range(num_slots)]
        self._transfers: dict[int, _Transfer] = {}
        self._queue: deque[tuple[_Transfer, FramePlan]] = deque()
        self.bytes_sent = 0
        self.num_failed = 0
        self.num_expired = 0
        self.num_closed = 0  # on request: acknowledged or cancelled
        self.total_transfer_s = 0.0  # open -> closed on request, summed

    @property
    def num_open(self) -> int:
        return len(self._transfers)

    @property
    def slots_in_use(self) -> int:
        return sum(lane.sending or lane.unanswered_s is not None for lane in self._lanes)

    def open(
        self,
        seq: int,
        epoch: int,
        generation: int,
        num_leading_blocks: int,
        num_blocks: int,
        lease_s: float,
        now_s: float,
    ) -> None:
        """Begin a transfer. The same generation again renews its lease; another one replaces the transfer."""
        old = self._transfers.get(seq)
        if old is not None and (old.epoch, old.generation) == (epoch, generation):
            old.lease_s = lease_s
            self._renew(old, now_s)
            return
        self.close(seq, "replaced", now_s)
        self._transfers[seq] = _Transfer(
            seq, epoch, generation, num_blocks, num_leading_blocks, lease_s, now_s, now_s + lease_s
        )

    def ship(self, seq: int, block_ids: Sequence[int], num_ready_blocks: int, last: bool, now_s: float) -> None:
        """Queue the blocks that became ready and were not planned before."""
        transfer = self._transfers.get(seq)
        if transfer is None or transfer.last:
            return
        transfer.block_ids = tuple(block_ids)
        stop = min(num_ready_blocks, transfer.num_blocks)
        if stop > transfer.next_block:
            frames = self._plan(transfer.next_block, stop, len(transfer.frames))
            transfer.frames += frames
            transfer.next_block = stop
            self._enqueue(transfer, frames)
        transfer.last = last
        self._renew(transfer, now_s)
        self._finish_if_posted(transfer, now_s)

    def resend(self, seq: int, frames: Sequence[int], now_s: float) -> None:
        """Queue frames again that the receiver misses; indices it cannot know of are ignored."""
        transfer = self._transfers.get(seq)
        if transfer is None:
            return
        wanted = sorted({index for index in frames if 0 <= index < len(transfer.frames)})
        self._enqueue(transfer, [transfer.frames[index] for index in wanted])
        self._renew(transfer, now_s)

    def close(self, seq: int, reason: str, now_s: float) -> None:
        """End a transfer, in whatever state; nothing happens where it is not open."""
        transfer = self._transfers.pop(seq, None)
        if transfer is None:
            return
        if transfer.num_queued:
            self._queue = deque(entry for entry in self._queue if entry[0] is not transfer)
        if reason:
            self.num_failed += 1
        else:
            self.num_closed += 1
            self.total_transfer_s += now_s - transfer.opened_s
        self._emit(OutgoingClosed(seq, reason))

    def close_all(self, reason: str, now_s: float) -> None:
        for seq in list(self._transfers):
            self.close(seq, reason, now_s)

    def on_credit(self, credit: Credit, now_s: float) -> bool:
        """Take a lane back; False for a credit older than the lane's last frame, which is a copy and means nothing."""
        lane = self._lanes[credit.slot]
        if is_older(credit.turn, lane.turn):
            return False
        lane.turn = credit.turn
        lane.has_credit = True
        lane.unanswered_s = None
        for transfer in self._transfers.values():
            if transfer.num_queued:
                self._renew(transfer, now_s)
        return True

    def on_send_done(self, slot: int) -> None:
        self._lanes[slot].sending = False

    def take_lane(self, now_s: float) -> int | None:
        """A lane that may be filled now, marked busy, or None. Its number is the slot's."""
        for slot, lane in enumerate(self._lanes):
            if lane.has_credit and not lane.sending:
                lane.has_credit = False
                lane.sending = True
                lane.unanswered_s = now_s
                return slot
        return None

    def has_frames(self) -> bool:
        return bool(self._queue)

    def fill(self, slot: int, memory: memoryview, now_s: float) -> int:
        """Write the next queued frame into `memory`, the send slot of a lane just taken; returns its length."""
        transfer, plan = self._queue.popleft()
        transfer.num_queued -= 1
        block_ids = transfer.block_ids[plan.block_start : plan.block_start + plan.num_blocks]
        if self.can_pull:
            kind, payload_bytes = Kind.PULL, PLACE_BYTES * plan.num_blocks
            crc = self._point_at(block_ids, plan, memory[HEADER_BYTES : HEADER_BYTES + payload_bytes])
        else:
            kind, payload_bytes = Kind.DATA, plan.nbytes(self._store.layout)
            payload = memory[HEADER_BYTES : HEADER_BYTES + payload_bytes]
            crc = self._store.gather(block_ids, plan.layer_start, plan.num_layers, payload)
        self._seal(slot, memory, kind, transfer.epoch, transfer.seq, transfer.generation, plan, payload_bytes, crc)
        self.bytes_sent += plan.nbytes(self._store.layout)
        self._finish_if_posted(transfer, now_s)
        return HEADER_BYTES + payload_bytes

    def fill_probe(self, slot: int, memory: memoryview, epoch: int, payload: bytes) -> int:
        """Write a probe frame for the receiver of `epoch` into the send slot of a lane just taken; returns its length."""
        memory[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
        self._seal(
            slot, memory, Kind.PROBE, epoch, 0, 0, FramePlan(0, 0, 0, 0, 0), len(payload), crc32c(memoryview(payload))
        )
        return HEADER_BYTES + len(payload)

    def poll(self, now_s: float) -> None:
        """Expire what has been silent for too long."""
        for transfer in list(self._transfers.values()):
            if now_s >= transfer.deadline_s:
                self.num_expired += 1
                self.close(transfer.seq, FailureReason.NO_ACK if transfer.shipped else LEASE_EXPIRED, now_s)

    def stuck_since_s(self) -> float | None:
        """When the oldest frame without a credit was sent, None if there is none."""
        return min((lane.unanswered_s for lane in self._lanes if lane.unanswered_s is not None), default=None)

    def _plan(self, block_start: int, block_stop: int, first_index: int) -> list[FramePlan]:
        frame_bytes = self._frame_bytes
        layout = self._store.layout
        if self.can_pull:  # only the places travel, so the slot is no limit; a frame is at least one block
            most_blocks = (frame_bytes - HEADER_BYTES) // PLACE_BYTES
            frame_bytes = HEADER_BYTES + max(layout.block_bytes, min(PULL_BYTES, most_blocks * layout.block_bytes))
        return plan_frames(layout, frame_bytes, block_start, block_stop, first_index)

    def _point_at(self, block_ids: Sequence[int], plan: FramePlan, payload: memoryview) -> int:
        """Write the blocks' places into `payload`; returns the crc32c of their KV."""
        assert self._store.memory is not None, "direct mode without a pool in host memory"
        payload[:] = array("I", block_ids).tobytes()
        return checksum(
            self._store.layout, self._store.memory, self._store.num_blocks, block_ids, plan.layer_start, plan.num_layers
        )

    def _seal(
        self,
        slot: int,
        memory: memoryview,
        kind: Kind,
        epoch: int,
        seq: int,
        generation: int,
        plan: FramePlan,
        nbytes: int,
        crc: int,
    ) -> None:
        """Put the header before a payload that is in `memory` already, and count the lane's turn."""
        lane = self._lanes[slot]
        header = FrameHeader(
            kind, epoch, seq, generation, plan.index, plan.block_start, plan.num_blocks, plan.layer_start,
            plan.num_layers, nbytes, lane.turn, crc,
        )  # fmt: skip
        write_header(memory, header)
        lane.turn = next_turn(lane.turn)

    def _enqueue(self, transfer: _Transfer, frames: Sequence[FramePlan]) -> None:
        self._queue.extend((transfer, plan) for plan in frames)
        transfer.num_queued += len(frames)

    def _renew(self, transfer: _Transfer, now_s: float) -> None:
        period_s = self._transfer_timeout_s if transfer.shipped else transfer.lease_s
        transfer.deadline_s = max(transfer.deadline_s, now_s + period_s)

    def _finish_if_posted(self, transfer: _Transfer, now_s: float) -> None:
        if not transfer.last or transfer.num_queued or transfer.shipped:
            return
        transfer.shipped = True
        transfer.deadline_s = now_s + self._transfer_timeout_s
        nbytes = sum(plan.nbytes(self._store.layout) for plan in transfer.frames)
        self._emit(Shipped(transfer.seq, len(transfer.frames), nbytes))
