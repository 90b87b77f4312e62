"""Lends this worker's weights to one that starts: one loan at a time, on the KV plane's own thread and path.

    1 FREE
    2 PROVING   Hello fits: the pair is made, a probe frame goes each way    -> 3; -> 1 after `hello_timeout_s`
    3 LENDING   Grant: every page is open to frames there, and shipped       -> 4 Shipped: Commit
    4 COMMITTED waits for Ack; Nack: frames again, at most `max_resends` times
    -> 1 on Ack, when the borrower's stream, the pair or the plane's time limits end; nothing of a loan is left then

What serves goes on: the plane moves one frame of each pair in a turn, so a loan delays another pair's frame by its own one at
most, and no engine waits for either. Whoever comes during a loan is told that this worker is busy. Runs on the event loop, but
for the read of the weights, which is the KV thread's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from baton.config import KVTransferConfig
from baton.log import get_log
from baton.peer_trust import PLAIN, Part, PeerTrust
from baton.v1 import kv_pb2, kv_pb2_grpc
from kv_transfer.block_store import BlockStore
from kv_transfer.events import KVEvent, OutgoingClosed, PairLost, PairReady, Shipped
from kv_transfer.failure import FailureReason
from kv_transfer.pair import WireView
from kv_transfer.plane import KVPlane
from worker.hello import Refusal, check_transport
from worker.weight_hello import check_weight_hello

log = get_log("worker.weight_lender")

KEY_SIGN = "w"  # begins the name of a loan's pair in the plane; links' begin with > and <


def loan_seq(pair_nonce: int) -> int:
    """Of the transfer: 32 bits, while a sequence's number begins with its router's epoch, which is never 0."""
    return pair_nonce & 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """Of the borrower."""


Happening: TypeAlias = kv_pb2.LinkMessage | KVEvent | StreamEnded


@dataclass(slots=True)
class _Loan:
    """One, from its Hello to its end."""

    borrower: str
    epoch: int
    nonce: int
    requires_rdma: bool
    happened: asyncio.Queue[Happening] = field(default_factory=asyncio.Queue)
    granted: bool = False
    num_resends: int = 0

    @property
    def key(self) -> str:
        return f"{KEY_SIGN}{self.borrower}/{self.epoch:016x}"

    @property
    def seq(self) -> int:
        return loan_seq(self.nonce)

    def concerns(self, event: KVEvent) -> bool:
        if isinstance(event, PairReady | PairLost):
            return (event.peer, event.pair_nonce) == (self.key, self.nonce)
        return isinstance(event, Shipped | OutgoingClosed) and event.seq == self.seq


class WeightLender(kv_pb2_grpc.KvWeightsServicer):
    """Of one worker, whose model lies in `pages` as `hello` says."""

    def __init__(
        self,
        hello: kv_pb2.Hello,
        pages: BlockStore,
        plane: KVPlane,
        config: KVTransferConfig,
        trust: PeerTrust = PLAIN,
    ) -> None:
        self._hello = hello
        self._pages = pages
        self._plane = plane
        self._config = config
        self._trust = trust
        self._loan: _Loan | None = None
        self.num_lent = 0

    def on_kv(self, event: KVEvent) -> bool:
        """Whether the event was a loan's, this one's or one's that is over."""
        if self._loan is not None and self._loan.concerns(event):
            self._loan.happened.put_nowait(event)
            return True
        if isinstance(event, PairReady | PairLost):
            return event.peer.startswith(KEY_SIGN)
        return isinstance(event, Shipped | OutgoingClosed) and event.seq >> 32 == 0

    async def Borrow(
        self,
        request_iterator: AsyncIterator[kv_pb2.LinkMessage],
        context: grpc.aio.ServicerContext[kv_pb2.LinkMessage, kv_pb2.LinkMessage],
    ) -> AsyncIterator[kv_pb2.LinkMessage]:
        await self._trust.admit(context, Part.WORKER)
        requests = aiter(request_iterator)
        try:
            async with asyncio.timeout(self._config.hello_timeout_s):
                theirs = (await anext(requests)).hello
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
        if self._loan is not None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"it lends to {self._loan.borrower} already")
        refusal = check_weight_hello(self._hello, theirs, opener=False)
        if refusal is not None:
            log.warning("loan_refused", peer=theirs.worker_id, field=refusal.field)
            yield kv_pb2.LinkMessage(hello_refused=refusal.to_pb())
            return
        loan = self._loan = _Loan(theirs.worker_id, theirs.epoch, theirs.pair_nonce, theirs.require_rdma)
        reader = asyncio.create_task(_read(requests, loan), name=f"loan {loan.key}")
        try:
            yield self._begin(loan, theirs)
            async for message in self._lend(loan):
                yield message
        finally:
            self._loan = None
            self._plane.disconnect(loan.key)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _begin(self, loan: _Loan, theirs: kv_pb2.Hello) -> kv_pb2.LinkMessage:
        answer = kv_pb2.Hello()
        answer.CopyFrom(self._hello)
        answer.pair_nonce = loan.nonce
        self._plane.connect(
            loan.key,
            theirs.epoch,
            theirs.ucx_address,
            loan.nonce,
            min(theirs.frame_bytes, self._hello.frame_bytes),
            min(theirs.num_slots, self._hello.num_slots),
            wire=WireView(self._pages, self._pages),
        )
        return kv_pb2.LinkMessage(hello=answer)

    async def _lend(self, loan: _Loan) -> AsyncIterator[kv_pb2.LinkMessage]:
        """The loan's messages until it is over, and why."""
        outcome = ""
        while not outcome:
            try:
                # From the grant on the plane watches the time: OutgoingClosed.
                async with asyncio.timeout(None if loan.granted else self._config.hello_timeout_s):
                    happening = await loan.happened.get()
            except TimeoutError:
                outcome = "nothing came in time"
                break
            if isinstance(happening, kv_pb2.LinkMessage):
                outcome = self._on_message(loan, happening)
            elif isinstance(happening, StreamEnded):
                outcome = "the borrower left"
            elif isinstance(happening, PairReady):
                refusal = check_transport(self._hello, loan.requires_rdma, happening.transport)
                outcome = "" if refusal is None else refusal.error.message
                yield _ready(happening, refusal)
            elif isinstance(happening, Shipped):
                commit = kv_pb2.Commit(
                    seq=loan.seq, epoch=loan.epoch, num_frames=happening.num_frames, nbytes=happening.nbytes
                )
                yield kv_pb2.LinkMessage(commit=commit)
            elif isinstance(happening, PairLost | OutgoingClosed):
                outcome = happening.reason or "closed"
        log.info("loan_over", peer=loan.borrower, outcome=outcome)

    def _on_message(self, loan: _Loan, message: kv_pb2.LinkMessage) -> str:
        """Do what the borrower asks; why the loan is over, or ""."""
        kind = message.WhichOneof("message")
        if kind == "grant" and not loan.granted:
            loan.granted = True
            ticket, pages = message.grant.ticket, range(self._pages.num_blocks)
            self._plane.open_outgoing(
                loan.key, loan.seq, loan.epoch, ticket.generation, 0, len(pages), self._config.lease_s
            )
            self._plane.ship(loan.seq, pages, len(pages), last=True)
        elif kind == "nack" and loan.num_resends < self._config.max_resends:
            loan.num_resends += 1
            self._plane.resend(loan.seq, tuple(message.nack.missing_frames))
        elif kind == "nack":
            return FailureReason.DAMAGED
        elif kind == "ack":
            self._plane.close_outgoing(loan.seq)
            self.num_lent += 1
            return "lent"
        return ""


def _ready(event: PairReady, refusal: Refusal | None) -> kv_pb2.LinkMessage:
    if refusal is not None:
        return kv_pb2.LinkMessage(hello_refused=refusal.to_pb())
    return kv_pb2.LinkMessage(ready=kv_pb2.LinkReady(transport=event.transport))


async def _read(requests: AsyncIterator[kv_pb2.LinkMessage], loan: _Loan) -> None:
    try:
        async for message in requests:
            loan.happened.put_nowait(message)
    finally:
        loan.happened.put_nowait(StreamEnded())
