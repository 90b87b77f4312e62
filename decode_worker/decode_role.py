"""The decode role: a sequence's life on the worker that generates it.

    1 RESERVING  Reserve came over a link; the engine sets blocks aside in FIFO order  -> 2
    2 GRANTED    Grant sent; frames land in the blocks                                -> 3 once every byte is verified
    3 RUNNING    adopted and acknowledged, or submitted here (local prefill)           -> gone when it ends
    4 CLOSING    given up; the KV plane lets go of the blocks                          -> gone

A ticket is adopted at most once. It is given up on cancel, on a lost link, router or deadline, and when no link ping has
renewed it for a lease. The prefill worker is told (TicketLost) unless it asked. Pings say what it knows of its tickets; what
it has missed is said again. The router hears of 3 only from here, of 1 and 2 from the prefill worker; but where the link to
that one breaks, it is told at once that the sequence never came (Refused): prefill may be dead, and can say nothing. Blocks
are dropped once, after the KV plane has said that it writes them no more. A cancel that overtakes its Reserve leaves a
tombstone for one lease. What it caches is lent to whoever asks over a link (worker/block_lender.py). Runs on the worker's
event loop; never blocks.
"""

from __future__ import annotations

from baton.config import WorkerConfig
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TransferFailed,
    Unavailable,
)
from baton.request import FinishReason, Request
from baton.request import Role as RoleKind
from baton.v1 import kv_pb2, worker_pb2
from baton.wire import error_to_pb, request_from_pb
from decode_worker import decode_trace
from decode_worker.decode import Decode, State
from engine.ports import Reservation, SequenceEnded, SequenceStats, StepResult
from kv_transfer.events import Committed, IncomingClosed, Incomplete, KVEvent
from worker.block_lender import BlockLender
from worker.role import Ports, PullSource
from worker.tombstones import Tombstones


class DecodeRole:
    """Implements worker.role.Role."""

    def __init__(self, ports: Ports, *, lease_s: float, transfer_timeout_s: float, max_queued: int) -> None:
        self._ports = ports
        self._lender = BlockLender(ports, timeout_s=transfer_timeout_s, lease_s=lease_s)
        self._lease_s = lease_s
        self._max_queued = max_queued
        self._open: dict[int, Decode] = {}
        self._cancelled = Tombstones(lease_s)  # before they came
        self._ended = Tombstones(lease_s)
        self._last_generation = 0
        self.num_refused_commits = 0

    # --- the router ---

    def on_submit(self, request: Request, decode_peer: str, deadline_s: float, pull: PullSource | None = None) -> None:
        """Prefill and decode here, where whatever helps is cached already: nothing is pulled."""
        refusal = self._refusal()
        if request.seq in self._open:
            refusal = InvalidRequest("seq is already open on this worker", field="seq")
        elif request.seq in self._ended:
            refusal = InvalidRequest("seq was used on this worker before", field="seq")
        if refusal is not None:
            self._ports.sessions.refused(request.seq, refusal)
            return
        now_s = self._ports.now_s()
        self._open[request.seq] = Decode(request, "", now_s, deadline_s, now_s, State.RUNNING)
        self._ports.engine.add(request, prefill_only=False)

    def on_cancel(self, seq: int) -> bool:
        decode = self._open.get(seq)
        if decode is None:
            self._cancelled.add(seq, self._ports.now_s())
            return False
        if decode.state is State.RUNNING:
            self._end(decode, worker_pb2.OUTCOME_CANCELLED, FinishReason.CANCELLED)
        else:
            self._ended.add(seq, self._ports.now_s())
            self._give_up(decode, Cancelled("the router cancelled the call"))
        return True

    def can_reroute(self, seq: int) -> bool:
        return False

    def on_reroute(self, seq: int, peer: str, serial: int) -> bool:
        return False  # nothing is handed over from here

    def on_router_lost(self, router_epoch: int) -> None:
        """Its Session here has ended. Where it lives on, prefill has a ticket's KV, and may ship it to another worker."""
        for seq, decode in list(self._open.items()):
            if decode.request.router_epoch != router_epoch:
                continue
            if decode.state is State.RUNNING:
                self.on_cancel(seq)
            else:
                self._give_up(decode, Unavailable("the call's router has lost its session with this decode worker"))

    def _refusal(self) -> BatonError | None:
        refusal = self._ports.refusal(RoleKind.DECODE)
        if refusal is None and len(self._open) >= self._max_queued:
            refusal = Overloaded(f"the decode queue is full; the limit is {self._max_queued}", retry_after_s=1.0)
        return refusal

    # --- the prefill worker ---

    def on_link(self, peer: str, message: kv_pb2.LinkMessage) -> bool:
        kind = message.WhichOneof("message")
        if kind == "reserve":
            self._on_reserve(peer, message.reserve)
        elif kind == "commit":
            self._on_commit(peer, message.commit)
        elif kind == "cancel":
            decode = self._ticket(peer, message.cancel.seq, message.cancel.generation)
            if decode is not None and decode.state is not State.RUNNING:  # adopted: only its router may end it now
                self._close(decode)
        elif kind == "ping":
            for live in message.ping.live:
                self._on_live(peer, live)
        else:
            return self._lender.on_link(peer, message)
        return True

    def _on_reserve(self, peer: str, reserve: kv_pb2.Reserve) -> None:
        seq = reserve.request.seq
        try:
            request = request_from_pb(reserve.request)
            refusal = self._refusal()
            if seq in self._cancelled:
                refusal = Cancelled("the router cancelled the call")
            elif seq in self._open or seq in self._ended:  # rerouted here again: elsewhere it may go on
                refusal = Unavailable("this worker has had the call before", field="seq")
            elif not self._ports.sessions.has_router(seq):
                refusal = Unavailable("the call's router has no session with this decode worker")
        except InvalidRequest as error:
            refusal = error
        if refusal is not None:
            refused = kv_pb2.ReserveRefused(seq=seq, error=error_to_pb(refusal))
            self._ports.links.send(peer, kv_pb2.LinkMessage(reserve_refused=refused))
            return
        now_s = self._ports.now_s()
        self._open[seq] = Decode(request, peer, now_s, now_s + reserve.ttl_ms / 1_000, now_s, State.RESERVING)
        self._ports.engine.reserve(request)

    def _grant(self, decode: Decode, reservation: Reservation) -> None:
        self._last_generation += 1
        decode.generation = self._last_generation
        decode.state = State.GRANTED
        decode.granted_s = self._ports.now_s()
        decode.in_plane = True
        self._ports.kv.open_incoming(
            decode.peer,
            reservation.seq,
            decode.generation,
            reservation.block_ids,
            reservation.num_leading_blocks,
            # The role watches lease and deadline; the plane's own time limit is the backstop behind both.
            max(0.0, decode.deadline_s - decode.granted_s) + self._lease_s,
        )
        decode.ticket = kv_pb2.Ticket(
            seq=reservation.seq,
            epoch=self._ports.epoch,
            generation=decode.generation,
            num_blocks=len(reservation.block_ids),
            num_leading_blocks=reservation.num_leading_blocks,
            ttl_ms=int(1_000 * self._lease_s),
        )
        self._send_grant(decode)

    def _on_live(self, peer: str, live: kv_pb2.LiveTicket) -> None:
        """Renew a ticket; where the prefill worker knows less of it than we told, something was lost: say it again.

        Link and pings are one ordered stream, so without a loss this finds nothing but what is on its way.
        """
        decode = self._ticket(peer, live.seq, live.generation)
        if decode is None:
            self._send_ticket_lost(peer, live.seq, live.generation, TransferFailed("the ticket is not open here"))
            return
        decode.renewed_s = self._ports.now_s()
        if decode.state is State.GRANTED and not live.generation:
            self._send_grant(decode)
        elif decode.state is State.RUNNING:
            self._send_ack(decode)

    def _send_grant(self, decode: Decode) -> None:
        grant = kv_pb2.Grant(ticket=decode.ticket)
        if not self._ports.links.send(decode.peer, kv_pb2.LinkMessage(grant=grant)):
            self._close(decode)

    def _send_ack(self, decode: Decode) -> None:
        ack = kv_pb2.Ack(seq=decode.request.seq, generation=decode.generation)
        self._ports.links.send(decode.peer, kv_pb2.LinkMessage(ack=ack))

    def _on_commit(self, peer: str, commit: kv_pb2.Commit) -> None:
        decode = self._ticket(peer, commit.seq, commit.generation) if commit.generation else None
        if decode is None or decode.state is not State.GRANTED or commit.epoch != self._ports.epoch:
            self.num_refused_commits += 1
            error = TransferFailed("the ticket is spent, stale or unknown")
            self._send_ticket_lost(peer, commit.seq, commit.generation, error)
            return
        decode.first_token, decode.nbytes = commit.first_token, commit.nbytes
        self._ports.kv.commit_incoming(commit.seq, commit.generation, commit.num_frames, commit.nbytes)

    # --- the KV plane ---

    def on_kv(self, event: KVEvent) -> bool:
        if not isinstance(event, Committed | Incomplete | IncomingClosed):
            return self._lender.on_kv(event)
        decode = self._open.get(event.seq)
        if decode is None:
            return False
        if isinstance(event, Committed):
            self._on_committed(decode, event)
        elif isinstance(event, Incomplete):
            if decode.state is State.GRANTED and decode.generation == event.generation:
                nack = kv_pb2.Nack(seq=event.seq, generation=event.generation, missing_frames=event.missing_frames)
                self._ports.links.send(decode.peer, kv_pb2.LinkMessage(nack=nack))
        else:
            self._on_closed(decode, event.reason)
        return True

    def _on_committed(self, decode: Decode, event: Committed) -> None:
        if decode.generation != event.generation:
            return
        decode.in_plane = False
        if decode.state is State.CLOSING:  # given up in the same moment
            self._forget(decode)
            return
        decode.state = State.RUNNING
        decode.adopted_s = self._ports.now_s()
        self._ports.engine.adopt(event.seq, decode.first_token)
        self._send_ack(decode)

    def _on_closed(self, decode: Decode, reason: str) -> None:
        if not decode.in_plane:
            return
        decode.in_plane = False
        if decode.state is State.CLOSING:
            self._forget(decode)
            return
        error = TransferFailed(f"KV transfer ended early: {reason}")
        self._send_ticket_lost(decode.peer, decode.request.seq, decode.generation, error)
        self._forget(decode)
        self._trace(decode, "given_up", error)

    # --- the engine ---

    def on_step(self, result: StepResult) -> None:
        self._lender.on_step(result)
        for reservation in result.reserved:
            decode = self._open.get(reservation.seq)
            if decode is not None and decode.state is State.RESERVING:
                self._grant(decode, reservation)
        for token in result.tokens:
            decode = self._open.get(token.seq)
            if decode is not None and decode.state is State.RUNNING:
                self._ports.sessions.token(token)
        for ended in result.ended:
            decode = self._open.get(ended.seq)
            if decode is not None:
                self._on_ended(decode, ended)

    def _on_ended(self, decode: Decode, ended: SequenceEnded) -> None:
        if decode.state is State.RUNNING:
            outcome = worker_pb2.OUTCOME_FAILED if ended.error is not None else worker_pb2.OUTCOME_FINISHED
            self._end(decode, outcome, ended.finish, ended.error, ended.stats)
        elif decode.state is State.RESERVING:
            self._give_up(decode, ended.error or Unavailable("the reservation was refused by the engine"))

    # --- links and time ---

    def on_link_ready(self, peer: str) -> None:
        """Nothing to do: prefill workers ask."""

    def on_link_lost(self, peer: str, error: BatonError) -> None:
        for decode in list(self._open.values()):
            if decode.peer == peer and decode.state in (State.RESERVING, State.GRANTED):
                lost = TransferFailed(f"the link to the prefill worker broke: {error.message}")
                self._ports.sessions.refused(decode.request.seq, lost)
                self._close(decode, lost)
        self._lender.on_link_lost(peer)

    def live_tickets(self, peer: str) -> list[kv_pb2.LiveTicket]:
        return []

    def on_tick(self) -> None:
        now_s = self._ports.now_s()
        self._cancelled.expire(now_s)
        self._ended.expire(now_s)
        self._lender.on_tick()
        for decode in list(self._open.values()):
            if decode.state is State.CLOSING:
                continue
            if now_s > decode.deadline_s:
                error = DeadlineExceeded("the call's deadline passed during decode")
                if decode.state is State.RUNNING:
                    self._end(decode, worker_pb2.OUTCOME_FAILED, error=error)
                else:
                    self._give_up(decode, error)
            elif decode.state is not State.RUNNING and now_s - decode.renewed_s > self._lease_s:
                self._give_up(decode, TransferFailed(f"the ticket was not renewed within {self._lease_s:g} s"))

    # --- ends ---

    def _end(
        self,
        decode: Decode,
        outcome: worker_pb2.Outcome.ValueType,
        finish: FinishReason = FinishReason.NONE,
        error: BatonError | None = None,
        stats: SequenceStats | None = None,
    ) -> None:
        """End a running sequence and tell the router."""
        stats = stats or SequenceStats()
        message = worker_pb2.Ended(
            seq=decode.request.seq,
            outcome=outcome,
            finish_reason=int(finish),
            error=error_to_pb(error) if error is not None else None,
            stats=worker_pb2.SeqStats(
                queue_ms=stats.queue_ms,
                prefill_ms=stats.prefill_ms,
                cached_tokens=stats.num_cached_tokens,
                computed_tokens=stats.num_computed_tokens,
                num_preemptions=stats.num_preemptions,
            ),
        )
        self._ports.sessions.ended(message)
        self._ended.add(decode.request.seq, self._ports.now_s())
        self._forget(decode)
        self._trace(decode, worker_pb2.Outcome.Name(outcome).removeprefix("OUTCOME_").lower(), error, stats)

    def _give_up(self, decode: Decode, error: BatonError) -> None:
        """End a ticket that is not yet adopted and tell the prefill worker, which tells the router."""
        if decode.state is State.CLOSING:
            return
        if decode.generation:
            self._send_ticket_lost(decode.peer, decode.request.seq, decode.generation, error)
        else:
            refused = kv_pb2.ReserveRefused(seq=decode.request.seq, error=error_to_pb(error))
            self._ports.links.send(decode.peer, kv_pb2.LinkMessage(reserve_refused=refused))
        self._close(decode, error)

    def _close(self, decode: Decode, error: BatonError | None = None) -> None:
        """Stop writes into the ticket's blocks, then drop them. `error`: why, where nobody asked for it."""
        was_open, decode.state = decode.state is not State.CLOSING, State.CLOSING
        if decode.in_plane:
            self._ports.kv.close_incoming(decode.request.seq)
        else:
            self._forget(decode)
        if was_open:
            self._trace(decode, "given_up", error)

    def _trace(
        self, decode: Decode, outcome: str, error: BatonError | None, stats: SequenceStats | None = None
    ) -> None:
        now_s = self._ports.now_s()
        decode_trace.tell(self._ports.tracer, decode, outcome, error, stats or SequenceStats(), now_s)

    def _forget(self, decode: Decode) -> None:
        self._ports.engine.drop(decode.request.seq)
        del self._open[decode.request.seq]

    def _send_ticket_lost(self, peer: str, seq: int, generation: int, error: BatonError) -> None:
        lost = kv_pb2.TicketLost(seq=seq, generation=generation, error=error_to_pb(error))
        self._ports.links.send(peer, kv_pb2.LinkMessage(ticket_lost=lost))

    def _ticket(self, peer: str, seq: int, generation: int) -> Decode | None:
        """The open ticket that a link message means; generation 0 = sent before the Grant came."""
        decode = self._open.get(seq)
        if decode is None or decode.peer != peer or generation not in (0, decode.generation):
            return None
        return decode

    def queued_tokens(self) -> list[int]:
        return []  # reservations that wait are in the engine, which counts them

    def num_open(self) -> int:
        return len(self._open) + self._lender.num_open()


def build(ports: Ports, config: WorkerConfig) -> DecodeRole:
    """What WorkerConfig.decode_role names."""
    return DecodeRole(
        ports,
        lease_s=config.kv.lease_s,
        transfer_timeout_s=config.kv.transfer_timeout_s,
        max_queued=config.engine.max_queued_seqs,
    )
