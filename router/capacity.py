"""What the fleet can take on now, as admission sees it: lanes that prefill and seats that decode. Pure.

A lane is a prefill worker and the moment at which the work it has is done: prompts are computed one after the other at its
measured rate, so what counts is when it is free, not how much waits. It is open for more its window before that
(router/lane_window.py). A seat is one more sequence on a decode worker: as many
as its step time allows under the TPOT target, as its KV blocks hold and as it says it takes. Whose target is below a lone
sequence's step has none; above it seats come one by one.

Both are made of WorkerLoads, which lag by a heartbeat at worst; calls released since are added as they go.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

KV_HEADROOM = 0.9  # of a decode pool, as placement's HEADROOM: beyond it a new sequence soon preempts another one
# Of what a TPOT target leaves beyond a lone sequence's step, that a batch may take; the rest is jitter, gaps and error.
# docs/adr/0015-targets-are-kept-for-their-worth.md
TPOT_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One ready worker: what it reported last, and what this router has placed there since."""

    worker_id: str
    prefills: bool
    decodes: bool
    tokens_per_s: float  # of prompts; inf = not measured yet
    waiting_tokens: int  # of prompts, of all routers
    num_seqs: int  # there, or on their way
    step_s: float  # of a step with them; 0 = not measured yet
    max_seqs: int
    kv_tokens: int  # what its pool holds
    used_tokens: int  # reported: active and reserved blocks
    step_s_per_seq: float = 0.0  # what one more sequence adds
    step_s_per_token: float = 0.0  # what its KV adds
    grant_s: float = 0.0  # that its prompts wait for room elsewhere, at most


# -- prefill -----------------------------------------------------------------------------------------------------------


class Lanes:
    """Prefill workers by the moment they are open for more. Instants are the caller's clock."""

    def __init__(self, lanes: Iterable[tuple[float, float, float]] = ()) -> None:
        """`lanes`: (free at, tokens per second, window) of each worker."""
        self._heap = [(free_s - window_s, rate, window_s) for free_s, rate, window_s in lanes]
        heapq.heapify(self._heap)
        self.tokens_per_s = sum(rate for _, rate, _ in self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def open_s(self) -> float:
        """When the first one takes more. There is at least one."""
        return self._heap[0][0]

    @property
    def free_s(self) -> float:
        """When that one has no work left."""
        return self.open_s + self._heap[0][2]

    def add(self, tokens: float, now_s: float) -> None:
        """Give the first open lane a prompt."""
        rate, window_s = self._heap[0][1:]
        heapq.heapreplace(self._heap, (max(self.free_s, now_s) + tokens / rate - window_s, rate, window_s))

    def own_s(self, tokens: float) -> float:
        """How long a prompt takes on an average lane."""
        return tokens * len(self._heap) / self.tokens_per_s

    def start_s(self, tokens_ahead: float, now_s: float) -> float:
        """When a prompt starts that has this much before it in the queue."""
        if not tokens_ahead or math.isinf(self.tokens_per_s):
            return max(now_s, self.free_s)
        work = sum(max(0.0, open_s + window_s - now_s) * rate for open_s, rate, window_s in self._heap)
        return max(self.free_s, now_s + (work + tokens_ahead) / self.tokens_per_s)


# -- decode ------------------------------------------------------------------------------------------------------------


def step_limit_s(alone_s: float, tpot_s: float) -> float:
    """That a step may take under a TPOT target; less than `alone_s`, what a lone sequence's takes, where none keeps it."""
    return alone_s + TPOT_SHARE * (tpot_s - alone_s)


class Seats:
    """How many more sequences the decode workers take under one TPOT target; inf: as many as their KV and their limits hold."""

    def __init__(self, workers: Iterable[WorkerLoad], tpot_s: float, seq_tokens: float) -> None:
        """`seq_tokens`: what a sequence comes to hold on average."""
        self.num_free = 0  # below 0: more were taken
        self.num_seats = 0  # free or in use; fewer than in use where steps are too long
        self._num_over = math.inf  # sequences that must end on some worker before one has a seat
        for worker in workers:
            num_free = _num_free(worker, tpot_s, seq_tokens)
            self.num_free += max(0, num_free)
            self.num_seats += worker.num_seqs + num_free
            self._num_over = min(self._num_over, max(0, -num_free))

    def take(self, num_seqs: int) -> None:
        self.num_free -= num_seqs

    @property
    def num_lacking(self) -> float:
        """Sequences that must end before one more has a seat; 0 or less: there is one."""
        return 1 - self.num_free + self._num_over


def alone_s(worker: WorkerLoad) -> float:
    """A step with one sequence, as long as those that are there; 0 = not measured yet."""
    if worker.num_seqs < 2:
        return worker.step_s
    tokens = worker.used_tokens / worker.num_seqs
    return max(0.0, worker.step_s - growth_s(worker, tokens) * (worker.num_seqs - 1))


def growth_s(worker: WorkerLoad, seq_tokens: float) -> float:
    """What one more sequence adds to a step."""
    return worker.step_s_per_seq + worker.step_s_per_token * seq_tokens


def _num_free(worker: WorkerLoad, tpot_s: float, seq_tokens: float) -> int:
    """Below 0: so many must end before its steps are short enough again."""
    num_free = worker.max_seqs - worker.num_seqs
    num_free = min(num_free, math.floor((KV_HEADROOM * worker.kv_tokens - worker.used_tokens) / seq_tokens))
    limit_s = step_limit_s(alone_s(worker), tpot_s)
    if math.isfinite(limit_s):
        num_free = min(num_free, _num_in_time(worker, limit_s - worker.step_s, growth_s(worker, seq_tokens), num_free))
    # An idle worker takes one in any case: nobody is there to be slowed down, and whatever fits at all fits there.
    return num_free if worker.num_seqs else max(1, num_free)


def _num_in_time(worker: WorkerLoad, spare_s: float, growth_s: float, most: int) -> int:
    """Sequences that fit into what a step may take longer; where it takes too long already, less those that are too many."""
    if not growth_s:
        return most if spare_s >= 0 else 0
    return math.trunc(max(-worker.num_seqs, min(most, spare_s / growth_s)))
