"""Loans: cached blocks that another worker pulls. The holder's side of block_puller.py.

    1 PINNING   Pull came; the engine holds what it has of the blocks     -> 2; -> gone where it has none
    2 PINNED    PullAnswer says how many                                  -> 3 on PullGrant
    3 SHIPPING  the KV plane reads them; Commit once all are sent,
                a PullNack sends frames again                             -> 4 on PullDone
    4 CLOSING   the KV plane lets go of the blocks                        -> gone

A loan ends with PullDone, the asker's link, or its time (`ttl_ms` of Pull, at most `timeout_s`); whenever it ends before
all was sent, the asker is told that it will get nothing. Only exact hashes are answered, so a block of another prompt, model,
tenant or precision is never lent. Runs on the worker's event loop; never blocks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.request import Role as RoleKind
from baton.v1 import kv_pb2
from engine.ports import Pinned, StepResult
from kv_transfer.events import KVEvent, OutgoingClosed, Shipped
from worker.role import Ports


class State(enum.IntEnum):
    PINNING = 1
    PINNED = 2
    SHIPPING = 3
    CLOSING = 4


@dataclass(slots=True)
class _Loan:
    seq: int
    peer: str  # link key of the asker
    generation: int
    deadline_s: float  # the worker's monotonic clock
    state: State = State.PINNING
    block_ids: tuple[int, ...] = ()
    epoch: int = 0  # of the asker, from its grant


class BlockLender:
    def __init__(self, ports: Ports, *, timeout_s: float, lease_s: float) -> None:
        self._ports = ports
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._open: dict[int, _Loan] = {}  # by seq

    # --- the asker ---

    def on_link(self, peer: str, message: kv_pb2.LinkMessage) -> bool:
        kind = message.WhichOneof("message")
        if kind == "pull":
            self._on_pull(peer, message.pull)
        elif kind == "pull_grant":
            ticket = message.pull_grant.ticket
            loan = self._at(peer, ticket.seq, ticket.generation)
            if loan is not None and loan.state is State.PINNED:
                self._ship(loan, ticket)
        elif kind == "pull_nack":
            nack = message.pull_nack
            loan = self._at(peer, nack.seq, nack.generation)
            if loan is not None and loan.state is State.SHIPPING:
                self._ports.kv.resend(nack.seq, tuple(nack.missing_frames))
        elif kind == "pull_done":
            loan = self._at(peer, message.pull_done.seq, message.pull_done.generation)
            if loan is not None:
                self._close(loan)
        else:
            return False
        return True

    def _on_pull(self, peer: str, pull: kv_pb2.Pull) -> None:
        if self._at(peer, pull.seq, pull.generation) is not None:
            return  # said twice
        # A draining worker lends: whoever continues elsewhere what ran here should not compute it again.
        if pull.seq in self._open or self._ports.role not in (RoleKind.DECODE, RoleKind.BOTH):
            self._answer(peer, pull.seq, pull.generation, 0)
            return
        deadline_s = self._ports.now_s() + min(pull.ttl_ms / 1_000, self._timeout_s)
        self._open[pull.seq] = _Loan(pull.seq, peer, pull.generation, deadline_s)
        self._ports.engine.pin(pull.seq, tuple(pull.hashes))

    def _ship(self, loan: _Loan, ticket: kv_pb2.Ticket) -> None:
        if ticket.num_blocks != len(loan.block_ids):
            self._fail(loan)
            return
        loan.state = State.SHIPPING
        loan.epoch = ticket.epoch
        num_blocks = len(loan.block_ids)
        # This class watches the time; the plane's own lease is the backstop behind it.
        lease_s = max(0.0, loan.deadline_s - self._ports.now_s()) + self._lease_s
        self._ports.kv.open_outgoing(loan.peer, loan.seq, ticket.epoch, loan.generation, 0, num_blocks, lease_s)
        self._ports.kv.ship(loan.seq, loan.block_ids, num_blocks, True)

    def on_link_lost(self, peer: str) -> None:
        for loan in list(self._open.values()):
            if loan.peer == peer:
                self._close(loan)

    # --- the engine ---

    def on_step(self, result: StepResult) -> None:
        for pinned in result.pinned:
            loan = self._open.get(pinned.seq)
            if loan is not None and loan.state is State.PINNING:
                self._on_pinned(loan, pinned)

    def _on_pinned(self, loan: _Loan, pinned: Pinned) -> None:
        loan.state = State.PINNED
        loan.block_ids = pinned.block_ids
        if not self._answer(loan.peer, loan.seq, loan.generation, len(pinned.block_ids)) or not pinned.block_ids:
            self._close(loan)

    # --- the KV plane ---

    def on_kv(self, event: KVEvent) -> bool:
        if not isinstance(event, Shipped | OutgoingClosed):
            return False
        loan = self._open.get(event.seq)
        if loan is None or loan.state < State.SHIPPING:
            return False
        if isinstance(event, OutgoingClosed):
            if loan.state is State.SHIPPING:
                self._answer(loan.peer, loan.seq, loan.generation, 0)
            self._forget(loan)
        elif loan.state is State.SHIPPING:
            commit = kv_pb2.Commit(
                seq=loan.seq,
                epoch=loan.epoch,
                generation=loan.generation,
                num_frames=event.num_frames,
                nbytes=event.nbytes,
            )
            self._ports.links.send(loan.peer, kv_pb2.LinkMessage(pull_commit=commit))
        return True

    # --- time and ends ---

    def on_tick(self) -> None:
        now_s = self._ports.now_s()
        for loan in list(self._open.values()):
            if now_s > loan.deadline_s:
                self._fail(loan)

    def _fail(self, loan: _Loan) -> None:
        """End a loan that the asker still counts on."""
        if loan.state is not State.CLOSING:
            self._answer(loan.peer, loan.seq, loan.generation, 0)
            self._close(loan)

    def _close(self, loan: _Loan) -> None:
        """Stop reading the blocks, then give them back."""
        if loan.state is State.SHIPPING:
            loan.state = State.CLOSING
            self._ports.kv.close_outgoing(loan.seq)
        elif loan.state is not State.CLOSING:
            self._forget(loan)

    def _forget(self, loan: _Loan) -> None:
        del self._open[loan.seq]
        self._ports.engine.unpin(loan.seq)

    def _answer(self, peer: str, seq: int, generation: int, num_blocks: int) -> bool:
        answer = kv_pb2.PullAnswer(seq=seq, generation=generation, num_blocks=num_blocks)
        return self._ports.links.send(peer, kv_pb2.LinkMessage(pull_answer=answer))

    def _at(self, peer: str, seq: int, generation: int) -> _Loan | None:
        loan = self._open.get(seq)
        return loan if loan is not None and (loan.peer, loan.generation) == (peer, generation) else None

    def num_open(self) -> int:
        return len(self._open)
