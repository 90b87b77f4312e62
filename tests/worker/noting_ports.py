"""All ports of a role in one object that notes what the role asks for and does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.errors import BatonError, Unavailable
from baton.request import Request, Role, SampledToken
from baton.tracing import NO_TRACER, Tracer
from baton.v1 import kv_pb2, worker_pb2


@dataclass
class Notes:
    """Every port of a role, which notes what it is asked to do."""

    now: float = 10.0
    draining: bool = False
    links_up: bool = True
    epoch: int = 7
    role: Role = Role.PREFILL
    step_tokens: int = 100
    tracer: Tracer = NO_TRACER
    sent: list[kv_pb2.LinkMessage] = field(default_factory=list)
    ended_: list[worker_pb2.Ended] = field(default_factory=list)
    refused_: list[tuple[int, BatonError]] = field(default_factory=list)
    lost_: list[tuple[int, BatonError]] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    adopted: list[tuple[int, int]] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    closed_incoming: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    @property
    def engine(self) -> Notes:
        return self

    @property
    def kv(self) -> Notes:
        return self

    @property
    def links(self) -> Notes:
        return self

    @property
    def sessions(self) -> Notes:
        return self

    def now_s(self) -> float:
        return self.now

    def refusal(self, kind: Role) -> BatonError | None:
        return Unavailable("draining") if self.draining else None

    def add(self, request: Request, *, prefill_only: bool) -> None:
        self.added.append(request.seq)

    def drop(self, seq: int) -> None:
        self.dropped.append(seq)

    def send(self, peer: str, message: kv_pb2.LinkMessage) -> bool:
        if self.links_up:
            self.sent.append(message)
        return self.links_up

    def sent_seqs(self, kind: str) -> list[int]:
        """Of the messages of one kind, in order."""
        found = [message for message in self.sent if message.WhichOneof("message") == kind]
        return [m.reserve.request.seq or m.grant.ticket.seq or getattr(m, kind).seq for m in found]

    def transport(self, peer: str) -> str:
        return ""

    def ended(self, message: worker_pb2.Ended) -> None:
        self.ended_.append(message)

    def refused(self, seq: int, error: BatonError) -> None:
        self.refused_.append((seq, error))

    def handoff_lost(self, seq: int, error: BatonError, reroute: int) -> None:
        self.lost_.append((seq, error))

    def has_router(self, seq: int) -> bool:
        return True

    def reserve(self, request: Request) -> None:
        self.reserved.append(request.seq)

    def adopt(self, seq: int, first_token: int) -> None:
        self.adopted.append((seq, first_token))

    def close_incoming(self, seq: int) -> None:
        self.closed_incoming.append(seq)

    def token(self, token: SampledToken) -> None:
        self.tokens.append(token)

    def pin(self, seq: int, hashes: Sequence[bytes]) -> None: ...
    def unpin(self, seq: int) -> None: ...
    def make_room(self, request: Request, num_blocks: int) -> None: ...
    def publish(self, seq: int, num_blocks: int) -> None: ...
    def open_outgoing(self, *_: object) -> None: ...
    def ship(self, seq: int, block_ids: Sequence[int], num_ready_blocks: int, last: bool) -> None: ...
    def resend(self, seq: int, frames: Sequence[int]) -> None: ...
    def close_outgoing(self, seq: int, reason: str = "") -> None: ...
    def open_incoming(self, *_: object) -> None: ...
    def commit_incoming(self, seq: int, generation: int, num_frames: int, nbytes: int) -> None: ...
