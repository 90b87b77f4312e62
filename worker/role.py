"""The Role protocol: what makes a worker a prefill or a decode worker.

A role is a state machine on the worker's event loop. It never blocks, never awaits, owns no thread and reads no clock of its
own: messages come in through `on_*`, everything it does goes out through `Ports`. So one test can drive two roles, two
engines and a faulty network in one thread, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.errors import BatonError
from baton.request import Request, SampledToken
from baton.request import Role as BatonRole
from baton.v1 import kv_pb2, worker_pb2
from engine.ports import StepResult
from kv_transfer.events import KVEvent


class EnginePort(Protocol):
    """Commands to the engine thread, carried out in order before its next step."""

    def add(self, request: Request, *, prefill_only: bool) -> None: ...
    def reserve(self, request: Request) -> None: ...
    def adopt(self, seq: int, first_token: int) -> None: ...
    def drop(self, seq: int) -> None: ...


class KVPort(Protocol):
    """Commands to the KV thread; answers come as KVEvents. See kv_transfer/plane.py."""

    def open_outgoing(
        self, peer: str, seq: int, epoch: int, generation: int, num_leading_blocks: int, num_blocks: int, lease_s: float
    ) -> None: ...
    def ship(self, seq: int, block_ids: Sequence[int], num_ready_blocks: int, last: bool) -> None: ...
    def resend(self, seq: int, frames: Sequence[int]) -> None: ...
    def close_outgoing(self, seq: int) -> None: ...
    def open_incoming(
        self, peer: str, seq: int, generation: int, block_ids: Sequence[int], num_leading_blocks: int, ttl_s: float
    ) -> None: ...
    def commit_incoming(self, seq: int, generation: int, num_frames: int, nbytes: int) -> None: ...
    def close_incoming(self, seq: int) -> None: ...


class LinkPort(Protocol):
    """Control messages to a peer, in order. False: the link is not ready, nothing was sent."""

    def send(self, peer: str, message: kv_pb2.LinkMessage) -> bool: ...
    def transport(self, peer: str) -> str: ...


class SessionPort(Protocol):
    """Events to the router that owns `seq` (its high 32 bits). False: that router has no Session here."""

    def has_router(self, seq: int) -> bool: ...
    def token(self, token: SampledToken) -> None: ...
    def ended(self, message: worker_pb2.Ended) -> None: ...
    def refused(self, seq: int, error: BatonError) -> None: ...


class Ports(Protocol):
    """All that a role can touch."""

    engine: EnginePort
    kv: KVPort
    links: LinkPort
    sessions: SessionPort
    epoch: int  # of this worker

    def now_s(self) -> float: ...

    def refusal(self, kind: BatonRole) -> BatonError | None:
        """Why new work for this role is not taken now (another role, draining); None = it is."""
        ...


class Role(Protocol):
    """One side of a request's life on a worker. Every handler ignores seqs it does not own and returns whether it did."""

    def on_submit(self, request: Request, decode_peer: str, deadline_s: float) -> None: ...
    def on_cancel(self, seq: int) -> bool: ...
    def on_step(self, result: StepResult) -> None: ...
    def on_kv(self, event: KVEvent) -> bool: ...
    def on_link(self, peer: str, message: kv_pb2.LinkMessage) -> bool: ...
    def on_link_ready(self, peer: str) -> None: ...
    def on_link_lost(self, peer: str, error: BatonError) -> None:
        """The pair cannot be used: refused, unreachable, or gone. Its transfers were closed by the KV plane already."""
        ...

    def on_router_lost(self, router_epoch: int) -> None: ...
    def on_tick(self) -> None:
        """Called several times a second: deadlines, leases, queue heads."""
        ...

    def live_tickets(self, peer: str) -> list[int]:
        """Seqs whose tickets on `peer` are still wanted; each link ping renews them."""
        ...

    def num_open(self) -> int:
        """Sequences, tickets and leases that this role still answers for; 0 = idle."""
        ...
