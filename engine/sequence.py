"""One request's state inside one engine, and the rules by which it stops.

    1 WAITING ── admit ──▶ 2 RUNNING ── stop, failure, drop ──▶ gone
        ▲─── preempt ────────┘  │ prefill_only: first token, or failure
                                ▼
                             3 HELD ── drop ──▶ gone
    4 QUEUED ── grant ──▶ 5 RESERVED ── adopt ──▶ 2 RUNNING

A sequence owns blocks in 2, 3 and 5 and none in 1 and 4. Drop is legal in every state. Tokens are only ever appended, so a
preempted sequence comes back as the same text with nothing computed.

    token_ids   [ prompt ............ | output ...... ]
                [ num_computed: KV in blocks | left   ]
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.hashing import BlockHash
from baton.priority import rank_s
from baton.request import FinishReason, Request
from engine.ports import SequenceStats


class SeqState(enum.Enum):
    """The numbered states above."""

    WAITING = 1
    RUNNING = 2
    HELD = 3
    QUEUED = 4
    RESERVED = 5


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends every sequence of this engine, besides its own sampling parameters."""

    eos_token_ids: frozenset[int]
    max_len: int  # tokens, prompt and output together

    def finish_reason(self, sequence: Sequence) -> FinishReason:
        """Judge the last token; NONE = go on. A stop token counts as output and is never judged before min_tokens."""
        sampling = sequence.request.sampling
        token = sequence.token_ids[-1]
        num_outputs = len(sequence.output_ids)
        if num_outputs >= sampling.min_tokens:
            is_eos = token in self.eos_token_ids and not sampling.ignore_eos
            if is_eos or token in sampling.stop_token_ids:
                return FinishReason.STOP
        if num_outputs >= sampling.max_tokens or len(sequence.token_ids) >= self.max_len:
            return FinishReason.LENGTH
        return FinishReason.NONE

    def num_tokens_left(self, sequence: Sequence) -> int:
        """Tokens until its length ends it, if nothing does before."""
        of_answer = sequence.request.sampling.max_tokens - len(sequence.output_ids)
        in_all = self.max_len - len(sequence.token_ids)
        return of_answer if of_answer < in_all else in_all  # `min` is a call too many in what simulations do most


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable; only the scheduler changes it."""

    request: Request
    arrival: int  # ordinal in this engine: first come, first served
    arrival_s: float
    state: SeqState
    prefill_only: bool = False
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()  # token_ids without the output
    output_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens
    num_published: int = 0  # leading blocks that are in the prefix cache, or were found to have a twin there
    hashes: list[BlockHash] = field(default_factory=list)  # of the leading whole blocks, as far as asked for
    started_s: float | None = None  # first admission
    first_token_s: float | None = None
    num_counted_tokens: int = (
        0  # prompt tokens already counted, as cached or computed: a recompute is not counted again
    )
    num_cached_tokens: int = 0  # by the first admission's lookup
    num_computed_tokens: int = 0  # prompt tokens computed here, once each
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        num_prompt = self.request.num_prompt_tokens
        self.token_ids = list(self.request.token_ids)
        self.prompt_ids = self.request.token_ids[:num_prompt]
        self.output_ids = self.token_ids[num_prompt:]

    @property
    def seq(self) -> int:
        return self.request.seq

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 = it decodes."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_preempted(self) -> bool:
        return self.state is SeqState.WAITING and self.num_preemptions > 0

    @property
    def order(self) -> tuple[float, int]:
        """Smaller starts first, and of running ones runs first and is preempted last.

        Those that wait go by priority and age, a preempted one as if it were half a level higher; those that run by priority.
        """
        if self.state is SeqState.RUNNING:
            return -self.request.priority, self.arrival
        return rank_s(self.request.priority + 0.5 * self.is_preempted, self.arrival_s), self.arrival

    def append(self, token: int) -> int:
        """Add one output token and return its output index."""
        self.token_ids.append(token)
        self.output_ids.append(token)
        return len(self.output_ids) - 1

    def advance(self, num_tokens: int) -> int:
        """Record that KV of `num_tokens` more is in the blocks; returns how many prompt tokens that counts for the first time."""
        start, self.num_computed = self.num_computed, self.num_computed + num_tokens
        end = min(self.num_computed, len(self.request.token_ids))
        fresh = max(0, end - max(start, self.num_counted_tokens))
        self.num_counted_tokens = max(self.num_counted_tokens, end)
        self.num_computed_tokens += fresh
        return fresh

    def stats(self) -> SequenceStats:
        started_s = self.arrival_s if self.started_s is None else self.started_s
        first_token_s = started_s if self.first_token_s is None else self.first_token_s
        return SequenceStats(
            queue_ms=1e3 * (started_s - self.arrival_s),
            prefill_ms=1e3 * (first_token_s - started_s),
            num_cached_tokens=self.num_cached_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_preemptions=self.num_preemptions,
        )
