"""Which queued prompts may ask for a reservation now. Pure: snapshots in, seqs out.

Late reservation: a prompt reserves decode memory only when this worker is about to compute it, since an early one idles
memory that running sequences could use. A decode worker that lets a Reserve wait is full: prompts bound for it stay queued
while those for other decode workers go ahead, so one full worker stalls nobody else; nor does one from which KV flows back
slowly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from baton.priority import rank_s

# Granted prompt tokens kept ready, in step budgets: one being computed, one ready behind it, so that the engine never
# waits for a Grant (a link round trip is well under one step).
LOOKAHEAD_STEPS = 2
# A Reserve unanswered for this long means that decode is full; a link round trip takes about 1 ms (gRPC, loopback). A pull
# that lasts longer waits for its holder or the wire, and the engine would wait with it.
PATIENCE_S = 0.05


@dataclass(frozen=True, slots=True)
class Queued:
    """A prompt that has not reserved yet."""

    seq: int
    peer: str  # "" = needs no reservation
    num_tokens: int
    priority: int
    arrival_s: float

    @property
    def order(self) -> tuple[float, int]:
        """By priority and age (baton/priority.py), first come first within one priority."""
        return rank_s(self.priority, self.arrival_s), self.seq


@dataclass(frozen=True, slots=True)
class Underway:
    """A prompt that reserves, pulls or is being computed."""

    peer: str
    num_tokens_left: int
    reserve_sent_s: float | None  # None once granted
    pull_started_s: float | None = None  # None unless its blocks are on their way here


def next_to_reserve(
    queued: Iterable[Queued],
    underway: Iterable[Underway],
    ready_peers: Collection[str],
    *,
    step_tokens: int,
    now_s: float,
) -> list[int]:
    """Seqs to start now; empty when enough is under way. `queued` comes sorted by `order`; it is not read to its end."""
    budget = LOOKAHEAD_STEPS * step_tokens
    full_peers: set[str] = set()
    for started in underway:
        if _is_slow(started.reserve_sent_s, now_s):
            full_peers.add(started.peer)  # waits for memory, not for us: it takes none of our budget
        elif not _is_slow(started.pull_started_s, now_s):
            budget -= started.num_tokens_left
    chosen: list[int] = []
    for prompt in queued:
        if budget <= 0:
            break
        if prompt.peer and (prompt.peer not in ready_peers or prompt.peer in full_peers):
            continue
        chosen.append(prompt.seq)
        budget -= prompt.num_tokens
    return chosen


def _is_slow(since_s: float | None, now_s: float) -> bool:
    return since_s is not None and now_s - since_s > PATIENCE_S
