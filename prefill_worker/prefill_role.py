"""The prefill role: a prompt's life on the worker that computes it.

    1 QUEUED      Submit came; waits its turn and for a ready link            -> 2; -> 3 where one token is all that is wanted
    2 RESERVING   Reserve sent; decode grants in FIFO order                   -> 3
    3 PULLING     blocks that a decode worker caches come from there; passed
                  where Submit names none (worker/block_puller.py)            -> 4, whatever comes of it
    4 PREFILLING  the engine computes chunks, each leaves when it is done     -> 5; -> 7 where the first token ends it
    5 SHIPPING    the first token is out, the last frames leave               -> 6
    6 COMMITTING  Commit sent; a Nack sends frames again                      -> 7 on Ack
    7 CLOSING     the router has its Ended; the KV plane lets go of the blocks -> gone

On a worker that decodes, too, a prompt for a peer of a higher epoch goes 1 -> 4 and asks decode once it has its own blocks: 2 is
then part of 4 and 5. So block pools are taken in the order of their workers' epochs, and workers that fill each other's pools
never wait in a circle (Havender 1968: resources asked for in one order cannot deadlock).

Every state may go to 7 by cancel, deadline, lost router or an engine error; the router gets exactly one Ended.

Where decode dies, refuses or does not acknowledge, the router is told (HandoffLost) and may name another decode worker
(Reroute), also before we notice. Meanwhile a prompt in 1 and 2 waits in 1, out of the queue; 3 and 4 go on; 5 and 6 hold the
KV in 5, so it is shipped again and not computed again. A lease without an answer, and the sequence fails. A rerouted one asks
with its own blocks taken, whatever the epochs' order, so its wait for a Grant is bounded by the transfer timeout.

Blocks belong to the engine from 4 on and are dropped once, after the KV plane has said that it reads them no more.
Runs on the worker's event loop; never blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from baton.config import WorkerConfig
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    Overloaded,
    PeerRefused,
    TransferFailed,
)
from baton.request import FinishReason, Request
from baton.request import Role as RoleKind
from baton.v1 import kv_pb2, worker_pb2
from baton.wire import error_from_pb, error_to_pb, request_to_pb
from engine.ports import ChunkDone, PrefillEnded, StepResult
from kv_transfer.events import KVEvent, OutgoingClosed, Shipped
from kv_transfer.failure import FailureReason
from prefill_worker import prefill_trace
from prefill_worker.prefill import Prefill, State
from prefill_worker.prefill_queue import Queued, Underway, next_to_reserve
from worker.block_puller import BlockPuller, Pulled
from worker.links import peer_epoch
from worker.role import Ports, PullSource
from worker.tombstones import Tombstones

# Of transfer_timeout_s, which bounds moving a whole prompt: a pull that takes longer than half of it is worth less than
# computing at once, and the prompt's own handoff is still to come.
PULL_TIMEOUT_SHARE = 0.5


_order = attrgetter("order")


class PrefillRole:
    """Implements worker.role.Role."""

    def __init__(
        self,
        ports: Ports,
        *,
        block_size: int,
        lease_s: float,
        transfer_timeout_s: float,
        max_resends: int,
        max_queued: int,
    ) -> None:
        self._ports = ports
        self._puller = BlockPuller(
            ports, timeout_s=PULL_TIMEOUT_SHARE * transfer_timeout_s, lease_s=lease_s, on_done=self._on_pulled
        )
        self._block_size = block_size
        self._lease_s = lease_s
        self._transfer_timeout_s = transfer_timeout_s
        self._max_resends = max_resends
        self._max_queued = max_queued
        self._open: dict[int, Prefill] = {}
        self._queue: list[Queued] = []  # those in state 1, by order
        self._ended = Tombstones(lease_s)
        self._ready_peers: set[str] = set()
        self.num_refused_commits = 0  # nobody commits to a prefill worker

    # --- the router ---

    def on_submit(self, request: Request, decode_peer: str, deadline_s: float, pull: PullSource | None = None) -> None:
        refusal = self._refusal(request.seq)
        if refusal is not None:
            self._ports.sessions.refused(request.seq, refusal)
            return
        prefill = Prefill(request, decode_peer, self._ports.now_s(), deadline_s, pull)
        self._open[request.seq] = prefill
        insort(self._queue, prefill.queued, key=_order)
        self._start_queued()

    def can_reroute(self, seq: int) -> bool:
        prefill = self._open.get(seq)
        return prefill is not None and prefill.state is not State.CLOSING and prefill.needs_decode

    def on_reroute(self, seq: int, peer: str, serial: int) -> bool:
        if not self.can_reroute(seq):
            return False
        prefill = self._open[seq]
        prefill.reroute = serial
        if prefill.lost is None:
            if prefill.peer == peer:
                return True
            self._leave_decode(prefill, "rerouted", FailureReason.PEER_LOST)
        prefill.peer, prefill.lost = peer, None
        if prefill.state is State.QUEUED:
            insort(self._queue, prefill.queued, key=_order)
        else:
            self._reserve_late(prefill)
        self._start_queued()
        return True

    def _refusal(self, seq: int) -> BatonError | None:
        if seq in self._open:
            return InvalidRequest("seq is already open on this worker", field="seq")
        if seq in self._ended:
            return InvalidRequest("seq was used on this worker before", field="seq")
        refusal = self._ports.refusal(RoleKind.PREFILL)
        if refusal is None and len(self._open) >= self._max_queued:
            refusal = Overloaded(f"the prefill queue is full; the limit is {self._max_queued}", retry_after_s=1.0)
        return refusal

    def on_cancel(self, seq: int) -> bool:
        prefill = self._open.get(seq)
        if prefill is None:
            return False
        self._end(prefill, worker_pb2.OUTCOME_CANCELLED, FinishReason.CANCELLED)
        self._start_queued()
        return True

    def on_router_lost(self, router_epoch: int) -> None:
        for prefill in list(self._open.values()):
            if prefill.request.router_epoch == router_epoch:
                self._end(prefill, worker_pb2.OUTCOME_CANCELLED, FinishReason.CANCELLED)
        self._start_queued()

    # --- 1 -> 2 -> 3 -> 4 ---

    def _start_queued(self) -> None:
        """Every handler that may have made room ends with this, once, however many prompts it ended."""
        if not self._queue:
            return
        underway = [
            Underway(
                peer=p.peer,
                num_tokens_left=len(p.request.token_ids) - p.num_computed_tokens,
                reserve_sent_s=p.reserve_sent_s if p.state is State.RESERVING else None,
                pull_started_s=p.started_s if p.state is State.PULLING else None,
            )
            for p in self._open.values()
            if State.RESERVING <= p.state <= State.PREFILLING
        ]
        now_s = self._ports.now_s()
        for seq in next_to_reserve(
            self._queue, underway, self._ready_peers, step_tokens=self._ports.step_tokens, now_s=now_s
        ):
            self._start(self._open[seq], now_s)

    def _dequeue(self, prefill: Prefill) -> None:
        del self._queue[bisect_left(self._queue, prefill.queued.order, key=_order)]

    def _start(self, prefill: Prefill, now_s: float) -> None:
        if not prefill.needs_decode or self._takes_own_blocks_first(prefill.peer):
            self._dequeue(prefill)
            self._pull(prefill)
        elif self._reserve(prefill, now_s):
            self._dequeue(prefill)
            prefill.state = State.RESERVING

    def _takes_own_blocks_first(self, peer: str) -> bool:
        return self._ports.role is RoleKind.BOTH and self._ports.epoch < peer_epoch(peer)

    def _reserve(self, prefill: Prefill, now_s: float) -> bool:
        ttl_ms = max(1, int(1_000 * (prefill.deadline_s - now_s)))
        reserve = kv_pb2.Reserve(request=request_to_pb(prefill.request), ttl_ms=ttl_ms)
        sent = self._ports.links.send(prefill.peer, kv_pb2.LinkMessage(reserve=reserve))
        prefill.reserve_sent_s = now_s if sent else None
        return sent

    def _reserve_late(self, prefill: Prefill) -> None:
        """Ask decode for a prompt that has its own blocks."""
        lacks_decode = prefill.needs_decode and prefill.lost is None and prefill.reserve_sent_s is None
        if lacks_decode and prefill.block_ids and prefill.state is not State.CLOSING:
            self._reserve(prefill, self._ports.now_s())

    def _on_grant(self, prefill: Prefill, ticket: kv_pb2.Ticket) -> None:
        prefill.ticket = ticket
        prefill.granted_s = self._ports.now_s()
        prefill.reserve_wait_s = prefill.granted_s - (prefill.reserve_sent_s or prefill.granted_s)
        if prefill.state is State.RESERVING:
            self._pull(prefill)
        elif not prefill.in_plane:
            self._open_transfer(prefill, ticket)
            self._ship_ready(prefill)
        self._start_queued()

    def _pull(self, prefill: Prefill) -> None:
        prefill.started_s = self._ports.now_s()
        if prefill.pull is None:
            self._compute(prefill)
            return
        prefill.state = State.PULLING
        self._puller.start(prefill.request, prefill.pull, prefill.deadline_s)

    def _on_pulled(self, seq: int, pulled: Pulled) -> None:
        prefill = self._open[seq]
        prefill.pulled, prefill.pull_ended_s = pulled, self._ports.now_s()
        self._compute(prefill)

    def _compute(self, prefill: Prefill) -> None:
        prefill.state = State.PREFILLING
        if prefill.ticket is not None:
            self._open_transfer(prefill, prefill.ticket)
        self._ports.engine.add(prefill.request, prefill_only=True)

    def _open_transfer(self, prefill: Prefill, ticket: kv_pb2.Ticket) -> None:
        prefill.in_plane = True
        self._ports.kv.open_outgoing(
            prefill.peer,
            prefill.request.seq,
            ticket.epoch,
            ticket.generation,
            ticket.num_leading_blocks,
            ticket.num_blocks,
            # The role watches deadline and transfer timeout; the plane's own lease is the backstop behind both.
            max(0.0, prefill.deadline_s - self._ports.now_s()) + self._lease_s,
        )

    # --- 4 -> 5 -> 6 ---

    def on_step(self, result: StepResult) -> None:
        self._puller.on_step(result)
        for chunk in result.chunks:
            self._on_chunk(chunk)
        for prefilled in result.prefilled:
            self._on_prefilled(prefilled)
        for ended in result.ended:
            prefill = self._open.get(ended.seq)
            if prefill is not None:
                prefill.stats = ended.stats
                error = ended.error or Internal("the engine ended a prefill without an error")
                self._end(prefill, worker_pb2.OUTCOME_FAILED, error=error)
        if result.chunks or result.ended:
            self._start_queued()

    def _on_chunk(self, chunk: ChunkDone) -> None:
        prefill = self._open.get(chunk.seq)
        if prefill is None or prefill.state is not State.PREFILLING:
            return
        prefill.block_ids = chunk.block_ids
        prefill.num_computed_tokens = chunk.num_computed_tokens
        if prefill.request.trace:
            prefill.chunks.append((self._ports.now_s(), chunk.num_computed_tokens))
        self._reserve_late(prefill)
        self._ship_ready(prefill)

    def _on_prefilled(self, prefilled: PrefillEnded) -> None:
        prefill = self._open.get(prefilled.seq)
        if prefill is None or prefill.state is not State.PREFILLING:
            return
        prefill.first = prefilled.first
        prefill.stats = prefilled.stats
        prefill.prefill_ended_s = self._ports.now_s()
        self._ports.sessions.token(prefilled.first)
        if prefilled.first.finish is not FinishReason.NONE:
            self._end(prefill, worker_pb2.OUTCOME_FINISHED, prefilled.first.finish)
            return
        prefill.state = State.SHIPPING
        self._ship_ready(prefill)

    def _ship_ready(self, prefill: Prefill) -> None:
        """Let go what is computed, where decode has granted."""
        if not prefill.is_shipping:
            return
        last = prefill.state is State.SHIPPING
        num_ready_blocks = len(prefill.block_ids) if last else prefill.num_computed_tokens // self._block_size
        if prefill.ship_started_s is None:
            prefill.ship_started_s = self._ports.now_s()
        self._ports.kv.ship(prefill.request.seq, prefill.block_ids, num_ready_blocks, last)

    def _on_shipped(self, prefill: Prefill, event: Shipped) -> None:
        assert prefill.ticket is not None
        assert prefill.first is not None
        prefill.state = State.COMMITTING
        prefill.nbytes = event.nbytes
        commit = kv_pb2.Commit(
            seq=event.seq,
            epoch=prefill.ticket.epoch,
            generation=prefill.ticket.generation,
            num_frames=event.num_frames,
            nbytes=event.nbytes,
            first_token=prefill.first.token,
        )
        if not self._ports.links.send(prefill.peer, kv_pb2.LinkMessage(commit=commit)):
            error = TransferFailed("the link to the decode worker went away before Commit")
            self._lose_decode(prefill, error, FailureReason.PEER_LOST)

    # --- the KV plane ---

    def on_kv(self, event: KVEvent) -> bool:
        if not isinstance(event, Shipped | OutgoingClosed):
            return self._puller.on_kv(event)
        prefill = self._open.get(event.seq)
        if prefill is None:
            return False
        if isinstance(event, Shipped):
            if prefill.state is State.SHIPPING and prefill.is_shipping:
                self._on_shipped(prefill, event)
            return True
        was_asked, prefill.in_plane, prefill.leaves_plane = prefill.leaves_plane, False, False
        if prefill.state is State.CLOSING:
            self._forget(prefill)
        elif not was_asked:
            self._lose_decode(prefill, TransferFailed(f"KV transfer ended early: {event.reason}"))
        elif prefill.ticket is not None:  # of another decode worker, which has granted meanwhile
            self._open_transfer(prefill, prefill.ticket)
            self._ship_ready(prefill)
        self._start_queued()
        return True

    # --- the decode worker ---

    def on_link(self, peer: str, message: kv_pb2.LinkMessage) -> bool:
        kind = message.WhichOneof("message")
        if kind == "grant":
            return self._on_link_grant(peer, message.grant.ticket)
        if kind == "reserve_refused":
            prefill = self._at(peer, message.reserve_refused.seq)
            if prefill is not None and prefill.awaits_grant:
                prefill.reserve_sent_s = None  # nothing is reserved there, so nothing to cancel
                self._lose_decode(prefill, error_from_pb(message.reserve_refused.error))
                self._start_queued()
            return True
        if kind == "ack":
            prefill = self._holding(peer, message.ack.seq, message.ack.generation)
            if prefill is not None and prefill.state is State.COMMITTING:
                self._end(prefill, worker_pb2.OUTCOME_HANDED_OFF)
            return True
        if kind == "nack":
            self._on_nack(peer, message.nack)
            return True
        if kind == "ticket_lost":
            self._on_ticket_lost(peer, message.ticket_lost)
            return True
        return self._puller.on_link(peer, message)

    def _on_ticket_lost(self, peer: str, lost: kv_pb2.TicketLost) -> None:
        if lost.generation:
            prefill = self._holding(peer, lost.seq, lost.generation)
        else:  # decode does not know our Reserve, or gave it up and we have not heard
            prefill = self._at(peer, lost.seq)
            if prefill is not None and not prefill.awaits_grant:
                return
        if prefill is not None:
            prefill.ticket = None
            prefill.reserve_sent_s = None
            self._lose_decode(prefill, error_from_pb(lost.error), FailureReason.STALE_TICKET)
            self._start_queued()

    def _on_link_grant(self, peer: str, ticket: kv_pb2.Ticket) -> bool:
        prefill = self._at(peer, ticket.seq)
        if prefill is not None and prefill.ticket == ticket:
            return True  # said twice
        if prefill is None or not prefill.awaits_grant:
            self._cancel_ticket(peer, ticket.seq, ticket.generation, "no longer wanted")
            return True
        num_blocks = -(-len(prefill.request.token_ids) // self._block_size)
        if ticket.num_blocks != num_blocks or ticket.num_leading_blocks >= num_blocks:
            prefill.ticket = ticket  # so that it is given back
            error = TransferFailed(f"ticket is for {ticket.num_blocks} blocks, the prompt has {num_blocks}")
            self._lose_decode(prefill, error)
            return True
        self._on_grant(prefill, ticket)
        return True

    def _on_nack(self, peer: str, nack: kv_pb2.Nack) -> None:
        prefill = self._holding(peer, nack.seq, nack.generation)
        if prefill is None or prefill.state is not State.COMMITTING:
            return
        prefill.num_resends += 1
        if nack.HasField("error"):
            self._lose_decode(prefill, error_from_pb(nack.error), FailureReason.DAMAGED)
        elif prefill.num_resends > self._max_resends:
            error = TransferFailed(f"frames were damaged or lost more than {self._max_resends} times")
            self._lose_decode(prefill, error, FailureReason.DAMAGED)
        else:
            self._ports.kv.resend(nack.seq, tuple(nack.missing_frames))

    def on_link_ready(self, peer: str) -> None:
        self._ready_peers.add(peer)
        for prefill in self._open.values():
            if prefill.peer == peer:
                self._reserve_late(prefill)
        self._start_queued()

    def on_link_lost(self, peer: str, error: BatonError) -> None:
        self._ready_peers.discard(peer)
        for prefill in list(self._open.values()):
            if prefill.peer == peer and prefill.needs_decode:
                prefill.ticket = None
                prefill.reserve_sent_s = None
                self._lose_decode(prefill, error, FailureReason.PEER_LOST)
        self._puller.on_link_lost(peer)
        self._start_queued()

    def live_tickets(self, peer: str) -> list[kv_pb2.LiveTicket]:
        return [
            kv_pb2.LiveTicket(seq=seq, generation=p.ticket.generation if p.ticket is not None else 0)
            for seq, p in self._open.items()
            if p.peer == peer and p.reserve_sent_s is not None and p.state is not State.CLOSING
        ]

    # --- time ---

    def on_tick(self) -> None:
        now_s = self._ports.now_s()
        self._ended.expire(now_s)
        self._puller.on_tick()
        for prefill in list(self._open.values()):
            if prefill.state is State.CLOSING:
                continue
            if now_s > prefill.deadline_s:
                self._fail(prefill, DeadlineExceeded("the call's deadline passed during prefill"))
            elif self._is_ack_late(prefill, now_s):
                late = TransferFailed(f"no Ack within {self._transfer_timeout_s:g} s of the prefill's end")
                self._lose_decode(prefill, late, FailureReason.NO_ACK)
            elif self._is_second_grant_late(prefill, now_s):
                full = Overloaded(f"no Grant within {self._transfer_timeout_s:g} s", retry_after_s=1.0)
                self._lose_decode(prefill, full)
            elif prefill.lost is not None and self._is_lease_over(prefill, now_s):
                self._fail(prefill, prefill.lost)
            else:
                self._reserve_late(prefill)
        self._start_queued()

    def _is_ack_late(self, prefill: Prefill, now_s: float) -> bool:
        """Waiting for a Grant is no transfer: that lasts as long as the call may, where it is the first."""
        started_s = max(prefill.prefill_ended_s, prefill.granted_s)
        return bool(prefill.is_shipping and prefill.prefill_ended_s) and now_s - started_s > self._transfer_timeout_s

    def _is_second_grant_late(self, prefill: Prefill, now_s: float) -> bool:
        holds_blocks = bool(prefill.lost_s) and prefill.state is not State.RESERVING
        waited_s = now_s - (prefill.reserve_sent_s or now_s)
        return holds_blocks and prefill.awaits_grant and waited_s > self._transfer_timeout_s

    def _is_lease_over(self, prefill: Prefill, now_s: float) -> bool:
        """Never while it is pulled or computed: whoever cancels that is the router."""
        is_held = prefill.state not in (State.PULLING, State.PREFILLING)
        return is_held and now_s - max(prefill.lost_s, prefill.prefill_ended_s) > self._lease_s

    # --- decode is lost ---

    def _lose_decode(self, prefill: Prefill, error: BatonError, reason: FailureReason = FailureReason.OTHER) -> None:
        """Keep what is there for another decode worker, unless the error is one that any would give."""
        if prefill.state is State.CLOSING:
            return
        if not (error.retryable or isinstance(error, PeerRefused)):
            self._fail(prefill, error, reason)
            return
        self._leave_decode(prefill, error.code, reason)
        prefill.lost = error
        self._ports.sessions.handoff_lost(prefill.request.seq, error, prefill.reroute)

    def _leave_decode(self, prefill: Prefill, cause: str, reason: FailureReason) -> None:
        """Give the ticket back and stop its transfer: back to a state in which no decode worker has a part."""
        if prefill.state is State.QUEUED:
            self._dequeue(prefill)
        self._give_ticket_back(prefill, cause)
        if prefill.is_shipping:
            prefill.leaves_plane = True
            self._ports.kv.close_outgoing(prefill.request.seq, reason)
        prefill.peer = ""
        prefill.lost_s = self._ports.now_s()
        prefill.num_resends, prefill.ship_started_s = 0, None
        if prefill.state is State.RESERVING:
            prefill.state = State.QUEUED
        elif prefill.state is State.COMMITTING:
            prefill.state = State.SHIPPING

    def _give_ticket_back(self, prefill: Prefill, cause: str) -> None:
        if prefill.reserve_sent_s is not None:
            generation = prefill.ticket.generation if prefill.ticket is not None else 0
            self._cancel_ticket(prefill.peer, prefill.request.seq, generation, cause)
        prefill.ticket = prefill.reserve_sent_s = None

    # --- 7 ---

    def _fail(self, prefill: Prefill, error: BatonError, reason: FailureReason = FailureReason.OTHER) -> None:
        """`reason` is what a transfer under way failed by."""
        if isinstance(error, Cancelled):  # the router's Cancel reached decode before us
            self._end(prefill, worker_pb2.OUTCOME_CANCELLED, FinishReason.CANCELLED)
        else:
            reason = FailureReason.DEADLINE if isinstance(error, DeadlineExceeded) else reason  # whoever saw it first
            self._end(prefill, worker_pb2.OUTCOME_FAILED, error=error, reason=reason)

    def _end(
        self,
        prefill: Prefill,
        outcome: worker_pb2.Outcome.ValueType,
        finish: FinishReason = FinishReason.NONE,
        error: BatonError | None = None,
        reason: FailureReason = FailureReason.OTHER,
    ) -> None:
        """Tell the router once, give the ticket back unless decode has adopted it, let go of the blocks."""
        if prefill.state is State.CLOSING:
            return
        seq = prefill.request.seq
        now_s = self._ports.now_s()
        stats = prefill.to_stats(now_s, self._ports.links.transport(prefill.peer))
        message = worker_pb2.Ended(
            seq=seq, outcome=outcome, finish_reason=int(finish), stats=stats, reroute=prefill.reroute
        )
        if error is not None:
            message.error.CopyFrom(error_to_pb(error))
        self._ports.sessions.ended(message)
        if prefill.state is State.QUEUED and prefill.lost is None:
            self._dequeue(prefill)
        if outcome != worker_pb2.OUTCOME_HANDED_OFF:
            self._give_ticket_back(prefill, error.code if error is not None else worker_pb2.Outcome.Name(outcome))
        prefill.state = State.CLOSING
        self._puller.cancel(seq)
        if prefill.in_plane:
            self._ports.kv.close_outgoing(seq, "" if error is None else reason)
        else:
            self._forget(prefill)
        prefill_trace.tell(self._ports.tracer, prefill, message, now_s)

    def _forget(self, prefill: Prefill) -> None:
        self._ports.engine.drop(prefill.request.seq)
        del self._open[prefill.request.seq]
        self._ended.add(prefill.request.seq, self._ports.now_s())

    def _cancel_ticket(self, peer: str, seq: int, generation: int, reason: str) -> None:
        cancel = kv_pb2.CancelTicket(seq=seq, generation=generation, reason=reason)
        self._ports.links.send(peer, kv_pb2.LinkMessage(cancel=cancel))  # a lost link has closed the ticket already

    def _at(self, peer: str, seq: int) -> Prefill | None:
        prefill = self._open.get(seq)
        return prefill if prefill is not None and prefill.peer == peer else None

    def _holding(self, peer: str, seq: int, generation: int) -> Prefill | None:
        prefill = self._at(peer, seq)
        if prefill is None or prefill.ticket is None or prefill.ticket.generation != generation:
            return None
        return prefill

    def queued_tokens(self) -> list[int]:
        return [len(p.request.token_ids) for p in self._open.values() if p.state <= State.PULLING]

    def num_open(self) -> int:
        return len(self._open) + self._puller.num_open()

    def num_leases(self) -> int:
        """Sequences whose blocks are held for a transfer."""
        return sum(p.in_plane for p in self._open.values())


def build(ports: Ports, config: WorkerConfig) -> PrefillRole:
    """What WorkerConfig.prefill_role names."""
    return PrefillRole(
        ports,
        block_size=config.engine.block_size,
        lease_s=config.kv.lease_s,
        transfer_timeout_s=config.kv.transfer_timeout_s,
        max_resends=config.kv.max_resends,
        max_queued=config.engine.max_queued_seqs,
    )
