"""One peer: a sender, a receiver and the channel between them and theirs.

Life of a pair; every `Pair` ends in exactly one PairLost:

    1 probing   the ring is posted and its first credits sent; a probe frame goes out on the first lane with credit
    2 ready     our probe was accepted there and theirs here: PairReady; blocks may flow
    3 lost      refused probe, `hello_timeout_s` without one, broken channel, a frame without its credit for
                `transfer_timeout_s`, or disconnect: first every transfer closes, then the channel, then PairLost

A peer may be ready, and send, before we are: its frames are judged in state 1 too. Ours wait for 2.

The probe carries what we export of our memory. Who takes it maps what it can and says in its credit whether it reads our pool:
then blocks go in direct mode, else staged. Each direction of a pair has a mode of its own.

Runs on the KV thread, or in a test; instants are arguments.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.config import KVTransferConfig
from baton.errors import TransferFailed
from kv_transfer.block_store import BlockStore
from kv_transfer.channel import Channel, ChannelLost, Credit, FrameArrived, SendDone
from kv_transfer.events import KVEvent, PairLost, PairReady
from kv_transfer.frame import erase_header
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WireView:
    """The stores of a pair whose ends keep KV differently: what is sent from, what is received into. Such a pair is staged."""

    send: BlockStore
    receive: BlockStore


class PairState(enum.StrEnum):
    PROBING = "probing"
    READY = "ready"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class PairStatus:
    """One pair as operators see it. Totals since connect; bytes are payload."""

    peer: str
    pair_nonce: int
    state: PairState
    transport: str  # "" before the pair was ready
    mode: str  # of what we send: "direct", "staged", "" before the pair was ready
    bytes_sent: int
    bytes_received: int
    num_sent: int  # transfers that were acknowledged or cancelled by their owner
    num_received: int  # transfers committed
    send_s: float  # open -> close, summed over num_sent
    receive_s: float  # open -> Committed, summed over num_received
    sending_s: float  # while at least one frame of ours had no credit yet


class Pair:
    """Drives one channel. Owns it: `lose` closes it."""

    def __init__(
        self,
        peer: str,
        peer_epoch: int,
        pair_nonce: int,
        channel: Channel,
        store: BlockStore,
        wire: WireView | None,
        config: KVTransferConfig,
        epoch: int,
        emit: Callable[[KVEvent], None],
        now_s: float,
    ) -> None:
        wire = wire or WireView(store, store)
        self.peer = peer
        self.peer_epoch = peer_epoch
        self.pair_nonce = pair_nonce
        self.channel = channel
        self.state = PairState.PROBING
        self.transport = ""
        self.sender = Sender(wire.send, emit, channel.frame_bytes, channel.num_slots, config.transfer_timeout_s)
        self.receiver = Receiver(wire.receive, emit, epoch, channel.num_slots, config.max_resends, config.quiet_s)
        self._emit = emit
        self._direct_required = config.mode == "direct"
        self._offers_pool = config.mode != "staged" and wire.send is store and store.memory is not None
        self._exports = channel.exports(store if self._offers_pool else None)
        self._probe_deadline_s = now_s + config.hello_timeout_s
        self._silence_limit_s = config.transfer_timeout_s
        self._probe_slot: int | None = None  # the lane our probe went out on
        self._probe_accepted = False
        self._arrivals: deque[int] = deque()  # ring slots not judged yet
        self._sending_s = 0.0
        self._polled_s = now_s
        for slot in range(channel.num_slots):
            erase_header(channel.ring_slot(slot))  # a ring may have served another pair
            channel.post_frame(slot)
            channel.post_credit(slot)
            channel.send_credit(Credit(slot, turn=0, accepted=True))

    def poll(self, now_s: float) -> bool:
        """Take what came, judge one frame, send one frame; True where there was anything to do.

        One of each, so that the transport progresses between two copies and no pair starves another.
        """
        if self.sender.slots_in_use:
            self._sending_s += now_s - self._polled_s
        self._polled_s = now_s
        events = self.channel.poll()
        for event in events:
            match event:
                case FrameArrived(slot):
                    self._arrivals.append(slot)
                case Credit():
                    self._on_credit(event, now_s)
                case SendDone(slot):
                    self.sender.on_send_done(slot)
                case ChannelLost(reason):
                    self.lose(reason, now_s)
            if self.state is PairState.LOST:
                return True
        judged = self._judge_one(now_s)
        self._advance_probe(now_s)
        sent = self.state is PairState.READY and self._send_one(now_s)
        return bool(events) or judged or sent

    def check_timers(self, now_s: float) -> None:
        """Expire what is overdue. Arrived frames are judged first, so that our own delay is not taken for the peer's."""
        while self._arrivals and self.state is not PairState.LOST:  # at most `num_slots` of them
            self._judge_one(now_s)
        if self.state is PairState.LOST:
            return
        self.sender.poll(now_s)
        self.receiver.poll(now_s)
        stuck_since_s = self.sender.stuck_since_s()
        if self.state is PairState.PROBING:
            if now_s >= self._probe_deadline_s:
                self.lose("the data path was not proved in time: no probe frame came through", now_s)
        elif stuck_since_s is not None and now_s - stuck_since_s >= self._silence_limit_s:
            self.lose(f"no credit for {self._silence_limit_s:g} s", now_s)

    def lose(self, reason: str, now_s: float) -> None:
        """Close everything. Idempotent."""
        if self.state is PairState.LOST:
            return
        self.state = PairState.LOST
        self.sender.close_all(f"peer lost: {reason}", now_s)
        self.receiver.close_all(f"peer lost: {reason}")
        self._arrivals.clear()
        self.channel.close()
        _log.info("kv pair lost peer=%s nonce=%016x reason=%s", self.peer, self.pair_nonce, reason)
        self._emit(PairLost(self.peer, self.pair_nonce, reason))

    @property
    def mode(self) -> str:
        if self.state is PairState.PROBING:
            return ""
        return "direct" if self.sender.can_pull else "staged"

    def status(self) -> PairStatus:
        sender, receiver = self.sender, self.receiver
        return PairStatus(
            self.peer, self.pair_nonce, self.state, self.transport, self.mode, sender.bytes_sent, receiver.bytes_received,
            sender.num_closed, receiver.num_committed, sender.total_transfer_s, receiver.total_transfer_s,
            self._sending_s,
        )  # fmt: skip

    def _on_credit(self, credit: Credit, now_s: float) -> None:
        if not self.sender.on_credit(credit, now_s):
            self.channel.post_credit(credit.slot)  # a copy took the place of the real one
            return
        if credit.slot == self._probe_slot and not self._probe_accepted:
            self._probe_accepted = credit.accepted
            self.sender.can_pull = credit.can_pull and self._offers_pool
            if not credit.accepted:
                self.lose("the peer refused our probe frame: it is of another epoch or damaged", now_s)
            elif self._direct_required and not self.sender.can_pull:
                what = "the peer cannot map our block pool" if self._offers_pool else "the two keep KV differently"
                self.lose(f"kv.mode is direct, and {what}: set kv.mode to auto", now_s)

    def _judge_one(self, now_s: float) -> bool:
        if not self._arrivals:
            return False
        slot = self._arrivals.popleft()
        memory = self.channel.ring_slot(slot)
        was_probed = self.receiver.probe is not None
        credit = self.receiver.on_frame(slot, memory, now_s)
        if credit is not None and self.receiver.probe is not None and not was_probed:
            try:
                self.receiver.peer_pool = self.channel.attach(self.receiver.probe)
            except TransferFailed as error:
                self.lose(error.message, now_s)
                return True
            credit = replace(credit, can_pull=self._can_pull())
        erase_header(memory)
        self.channel.post_frame(slot)
        if credit is not None:
            self.channel.send_credit(credit)
        return True

    def _can_pull(self) -> bool:
        """Whether blocks can go straight from the peer's pool into ours."""
        return self.receiver.peer_pool is not None and self.receiver.reads_pools

    def _send_one(self, now_s: float) -> bool:
        if not self.sender.has_frames():
            return False
        slot = self.sender.take_lane(now_s)
        if slot is None:
            return False
        nbytes = self.sender.fill(slot, self.channel.send_slot(slot), now_s)
        self._send(slot, nbytes)
        return True

    def _send(self, slot: int, nbytes: int) -> None:
        self.channel.post_credit(slot)
        self.channel.send_frame(slot, nbytes)

    def _advance_probe(self, now_s: float) -> None:
        if self.state is not PairState.PROBING:
            return
        if self._probe_slot is None:
            self._probe_slot = self.sender.take_lane(now_s)
            if self._probe_slot is None:
                return
            memory = self.channel.send_slot(self._probe_slot)
            self._send(
                self._probe_slot, self.sender.fill_probe(self._probe_slot, memory, self.peer_epoch, self._exports)
            )
        if self._probe_accepted and self.receiver.probe is not None:
            self.state = PairState.READY
            self.transport = self.channel.describe()
            _log.info(
                "kv pair ready peer=%s nonce=%016x transport=%s mode=%s",
                self.peer, self.pair_nonce, self.transport, self.mode,
            )  # fmt: skip
            self._emit(PairReady(self.peer, self.pair_nonce, self.transport))
