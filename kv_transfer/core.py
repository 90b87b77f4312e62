"""All pairs of one worker: commands in, events out. The logic of the KV plane without its thread.

Every command is answered by events, never by a return value:

    connect         PairReady or PairLost; a second connect to a peer loses the first pair before
    open_outgoing   exactly one OutgoingClosed in the end; Shipped before it, if every block was posted
    open_incoming   exactly one Committed or IncomingClosed in the end; Incomplete before it, at most `max_resends` times

so a close command for something that ended by itself, or never was, changes and emits nothing. Opening the same ticket (peer,
generation) again renews its time. Events are delivered from `advance`, never from inside a command, so a handler may give
commands. Runs on the KV thread, or in a single-threaded test that calls `poll`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.config import KVTransferConfig
from baton.errors import ConfigError, TransferFailed
from kv_transfer.block_store import BlockStore
from kv_transfer.channel import Channel, Transport
from kv_transfer.events import Committed, IncomingClosed, KVEvent, KVLoad, OutgoingClosed, PairLost
from kv_transfer.pair import Pair, PairState, PairStatus, WireView
from kv_transfer.transfer_plan import check_frame_bytes

TIMER_PERIOD_S = 0.02  # the finest deadline is QUIET_S = 0.25 s


@dataclass(frozen=True, slots=True)
class _Totals:
    """Counters that outlive a pair."""

    bytes_sent: int = 0
    bytes_received: int = 0
    frames_dropped: int = 0
    num_failed: int = 0
    num_expired: int = 0

    def plus(self, pair: Pair) -> _Totals:
        sender, receiver = pair.sender, pair.receiver
        return _Totals(
            self.bytes_sent + sender.bytes_sent,
            self.bytes_received + receiver.bytes_received,
            self.frames_dropped + receiver.frames_dropped,
            self.num_failed + sender.num_failed + receiver.num_failed,
            self.num_expired + sender.num_expired + receiver.num_expired,
        )


class PlaneCore:
    """Owns every pair and its channel; uses `store` and `transport`, which outlive it."""

    def __init__(
        self,
        store: BlockStore,
        config: KVTransferConfig,
        epoch: int,
        on_event: Callable[[KVEvent], None],
        transport: Transport,
        now_s: float,
    ) -> None:
        self._store = store
        self._config = config
        self._epoch = epoch
        self._on_event = on_event
        self._transport = transport
        self._pairs: dict[str, Pair] = {}
        self._outgoing: dict[int, Pair] = {}  # by seq
        self._incoming: dict[int, Pair] = {}  # by seq
        self._closing: list[Channel] = []  # closed, some slots still quarantined
        self._past = _Totals()  # of pairs that are gone
        self._now_s = now_s  # of the last poll: what commands take for the present
        self._next_timer_s = 0.0
        self._busy = False
        self._events: deque[KVEvent] = deque()  # not delivered yet

    # Pairs

    def connect(
        self,
        peer: str,
        peer_epoch: int,
        address: bytes,
        pair_nonce: int,
        frame_bytes: int,
        num_slots: int,
        wire: WireView | None = None,
    ) -> None:
        """Set up the data path after Hello; both ends call it with the same nonce, frame size and slots.

        `wire` is given where the two keep KV differently: the layouts of the stores that meet are then equal.
        """
        self._busy = True
        if peer in self._pairs:
            self._lose(self._pairs[peer], "replaced by a new connection")
        try:
            for store in (wire.send, wire.receive) if wire else (self._store,):
                check_frame_bytes(store.layout, frame_bytes)
            lane = int(self._epoch > peer_epoch)
            channel = self._transport.open_channel(address, pair_nonce, lane, frame_bytes, num_slots)
        except (ConfigError, TransferFailed) as error:
            self._events.append(PairLost(peer, pair_nonce, error.message))
            return
        self._pairs[peer] = Pair(
            peer, peer_epoch, pair_nonce, channel, self._store, wire, self._config, self._epoch, self._emit, self._now_s
        )

    def disconnect(self, peer: str) -> None:
        if peer in self._pairs:
            self._lose(self._pairs[peer], "disconnected")

    def lose_all(self, reason: str) -> None:
        for pair in list(self._pairs.values()):
            self._lose(pair, reason)

    # Outgoing transfers

    def open_outgoing(
        self, peer: str, seq: int, epoch: int, generation: int, num_leading_blocks: int, num_blocks: int, lease_s: float
    ) -> None:
        """Hold the blocks of `seq` for a peer's ticket {epoch, generation, leading blocks}."""
        pair = self._pairs.get(peer)
        old = self._outgoing.get(seq)
        if old is not None and (old is not pair or epoch != pair.peer_epoch):
            old.sender.close(seq, "replaced", self._now_s)
        if pair is None:
            self._events.append(OutgoingClosed(seq, "peer lost: not connected"))
        elif epoch != pair.peer_epoch:
            self._events.append(OutgoingClosed(seq, "the ticket is of another epoch than the peer's"))
        else:
            pair.sender.open(seq, epoch, generation, num_leading_blocks, num_blocks, lease_s, self._now_s)
            self._outgoing[seq] = pair

    def ship(self, seq: int, block_ids: Sequence[int], num_ready_blocks: int, last: bool) -> None:
        """Send the blocks of the prompt before `num_ready_blocks` that were not sent yet. `last`: no more will come."""
        if seq in self._outgoing:
            self._outgoing[seq].sender.ship(seq, block_ids, num_ready_blocks, last, self._now_s)
            self._busy = True

    def resend(self, seq: int, frames: Sequence[int]) -> None:
        if seq in self._outgoing:
            self._outgoing[seq].sender.resend(seq, frames, self._now_s)
            self._busy = True

    def close_outgoing(self, seq: int, reason: str = "") -> None:
        """End a transfer; `reason` (kv_transfer/failure.py) is given where it has failed."""
        if seq in self._outgoing:
            self._outgoing[seq].sender.close(seq, reason, self._now_s)

    # Incoming transfers

    def open_incoming(
        self, peer: str, seq: int, generation: int, block_ids: Sequence[int], num_leading_blocks: int, ttl_s: float
    ) -> None:
        """Accept frames of `seq` from `peer` into the blocks after the leading ones."""
        pair = self._pairs.get(peer)
        old = self._incoming.get(seq)
        if old is not None and old is not pair:
            old.receiver.close(seq, "replaced")
        if pair is None:
            self._events.append(IncomingClosed(seq, "peer lost: not connected"))
        else:
            pair.receiver.open(seq, generation, block_ids, num_leading_blocks, ttl_s, self._now_s)
            self._incoming[seq] = pair

    def commit_incoming(self, seq: int, generation: int, num_frames: int, nbytes: int) -> None:
        if seq in self._incoming:
            self._incoming[seq].receiver.commit(seq, generation, num_frames, nbytes, self._now_s)

    def close_incoming(self, seq: int) -> None:
        if seq in self._incoming:
            self._incoming[seq].receiver.close(seq, "")

    # Driving

    def poll(self, now_s: float) -> bool:
        """`receive`, then `advance`: one turn where commands come from the same thread."""
        moved = self.receive(now_s)
        return self.advance() or moved

    def receive(self, now_s: float) -> bool:
        """Let the transport move bytes and set the present for the commands that follow.

        Commands given before a peer sent a frame must be carried out before that frame is judged. A thread that takes
        commands from others therefore carries out what is queued between `receive` and `advance`.
        """
        self._now_s = now_s
        moved = self._transport.progress(now_s)
        self._busy |= moved
        return moved

    def advance(self) -> bool:
        """Judge, send, expire and deliver events; False where nothing happened, so that the caller may sleep."""
        timers_due = self._now_s >= self._next_timer_s
        if self._busy or timers_due:
            self._busy = self._poll_pairs(self._now_s, timers_due)
        return self.deliver_events() or self._busy

    def deliver_events(self) -> bool:
        """Call on_event with what has happened; whether anything had."""
        delivered = bool(self._events)
        while self._events:
            self._on_event(self._events.popleft())
        return delivered

    def _poll_pairs(self, now_s: float, timers_due: bool) -> bool:
        busy = False
        for pair in list(self._pairs.values()):
            busy |= pair.poll(now_s)
            if timers_due:
                pair.check_timers(now_s)
            if pair.state is PairState.LOST:
                self._forget(pair)
        if timers_due:
            self._next_timer_s = now_s + TIMER_PERIOD_S
            self._closing = [channel for channel in self._closing if channel.num_quarantined]
        return busy

    def load(self) -> KVLoad:
        pairs = self._pairs.values()
        totals = self._past
        for pair in pairs:
            totals = totals.plus(pair)
        return KVLoad(
            num_outgoing=len(self._outgoing),
            num_incoming=len(self._incoming),
            slots_in_use=sum(pair.sender.slots_in_use for pair in pairs),
            num_slots=sum(pair.channel.num_slots for pair in pairs),
            quarantined_slots=sum(channel.num_quarantined for channel in self._closing),
            bytes_sent=totals.bytes_sent,
            bytes_received=totals.bytes_received,
            frames_dropped=totals.frames_dropped,
            transfers_failed=totals.num_failed,
            transfers_expired=totals.num_expired,
        )

    def peers(self) -> dict[str, PairStatus]:
        return {peer: pair.status() for peer, pair in self._pairs.items()}

    @property
    def num_closing(self) -> int:
        """Closed channels whose memory is still quarantined."""
        return len(self._closing)

    def _lose(self, pair: Pair, reason: str) -> None:
        pair.lose(reason, self._now_s)
        self._forget(pair)

    def _forget(self, pair: Pair) -> None:
        del self._pairs[pair.peer]
        self._past = self._past.plus(pair)
        self._closing.append(pair.channel)

    def _emit(self, event: KVEvent) -> None:
        """Pass an event of a pair on; what it ended is no longer routed."""
        match event:
            case OutgoingClosed(seq, _):
                self._outgoing.pop(seq, None)
            case Committed(seq, _, _) | IncomingClosed(seq, _):
                self._incoming.pop(seq, None)
        self._events.append(event)
