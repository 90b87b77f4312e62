"""One prompt on the worker that computes it: plain data, which only prefill_role.py changes. Its states are numbered there."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.errors import BatonError
from baton.request import Request, SampledToken
from baton.v1 import kv_pb2, worker_pb2
from engine.ports import SequenceStats
from prefill_worker.prefill_queue import Queued
from worker.block_puller import Pulled
from worker.role import PullSource


class State(enum.IntEnum):
    """The numbered states of prefill_role.py."""

    QUEUED = 1
    RESERVING = 2
    PULLING = 3
    PREFILLING = 4
    SHIPPING = 5
    COMMITTING = 6
    CLOSING = 7


@dataclass(slots=True)
class Prefill:
    """Times are the worker's monotonic clock, seconds."""

    request: Request
    peer: str  # link key of the decode worker; "" while `lost`
    arrival_s: float
    deadline_s: float
    pull: PullSource | None = None
    state: State = State.QUEUED
    started_s: float | None = None  # left the queues: nothing to wait for but a pull and the engine
    reroute: int = 0  # serial of the last Reroute obeyed
    lost: BatonError | None = None  # why decode cannot have it; the router may name another one
    lost_s: float = 0.0
    reserve_sent_s: float | None = None
    reserve_wait_s: float = 0.0
    granted_s: float = 0.0
    ticket: kv_pb2.Ticket | None = None
    in_plane: bool = False  # the KV plane may read the blocks
    leaves_plane: bool = False  # it was asked to let go of them, for a transfer that is given up
    block_ids: tuple[int, ...] = ()
    num_computed_tokens: int = 0
    first: SampledToken | None = None
    ship_started_s: float | None = None
    prefill_ended_s: float = 0.0
    num_resends: int = 0
    nbytes: int = 0
    pulled: Pulled = field(default_factory=Pulled)
    pull_ended_s: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)  # when, and tokens computed by then; of traced ones
    stats: SequenceStats = field(default_factory=SequenceStats)

    @property
    def needs_decode(self) -> bool:
        return self.request.num_tokens_left > 1

    @property
    def awaits_grant(self) -> bool:
        return self.reserve_sent_s is not None and self.ticket is None and self.state is not State.CLOSING

    @property
    def is_shipping(self) -> bool:
        """Whether the KV plane takes blocks of it."""
        return self.in_plane and not self.leaves_plane

    @property
    def queued(self) -> Queued:
        request = self.request
        peer = self.peer if self.needs_decode else ""
        return Queued(request.seq, peer, len(request.token_ids), request.priority, self.arrival_s)

    def to_stats(self, now_s: float, transport: str) -> worker_pb2.SeqStats:
        """What the router is told of it at its end; `transport`: what the blocks went over, if any did."""
        queue_s = (now_s if self.started_s is None else self.started_s) - self.arrival_s
        shipped = self.ship_started_s is not None
        return worker_pb2.SeqStats(
            queue_ms=1_000 * queue_s + self.stats.queue_ms,
            prefill_ms=self.stats.prefill_ms,
            cached_tokens=self.stats.num_cached_tokens,
            computed_tokens=self.stats.num_computed_tokens,
            num_preemptions=self.stats.num_preemptions,
            kv_bytes=self.nbytes,
            kv_transfer_ms=1_000 * (now_s - self.ship_started_s) if self.ship_started_s is not None else 0.0,
            exposed_transfer_ms=1_000 * (now_s - self.prefill_ended_s) if self.prefill_ended_s else 0.0,
            reserve_wait_ms=1_000 * self.reserve_wait_s,
            transport=transport if shipped else "",
            pulled_blocks=self.pulled.num_blocks,
            pulled_bytes=self.pulled.nbytes,
            pull_ms=1_000 * self.pulled.moving_s,
            kv_blocks=len(self.block_ids) - self.ticket.num_leading_blocks if shipped and self.ticket else 0,
        )
