"""The seams of the engine as plain data and Protocols: what goes in, what comes out, who computes.

Everything runs on the one engine thread, except `gather`, `scatter` and `clear` of a KVCache, which the KV thread calls for
blocks that a transfer owns exclusively (a ticket's, or a held prefill's finished ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.errors import BatonError
from baton.kv_copy import KVMemory
from baton.kv_layout import KVLayout
from baton.request import FinishReason, Logprobs, Request, SampledToken, SamplingParams
from engine.tuning import Tuning


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One sequence's part of a step: compute tokens [start, start + len(token_ids)) of it."""

    seq: int
    token_ids: Sequence[int]  # the tokens to compute, in order
    start: int  # absolute position of token_ids[0] = tokens whose KV is already in the blocks
    block_table: Sequence[int]  # covers start + len(token_ids) tokens at least
    sample: bool  # whether the last token's logits are sampled
    sampling: SamplingParams
    prompt_ids: Sequence[int] = ()  # for penalties; filled only where `sample`
    output_ids: Sequence[int] = ()  # for penalties and min_tokens; filled only where `sample`


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Prefill chunks and decodes ride together."""

    entries: Sequence[BatchEntry]


@dataclass(frozen=True, slots=True)
class Sample:
    """What the runner drew for one entry."""

    token: int
    logprobs: Logprobs | None


class KVCache(Protocol):
    """The tensors of a block pool. `block_ids` index the pool; layers are [layer_start, layer_start + num_layers)."""

    layout: KVLayout
    num_blocks: int

    @property
    def memory(self) -> KVMemory | None:
        """Where the pool lies in host memory, None where it does not."""
        ...

    def gather(self, block_ids: Sequence[int], layer_start: int, num_layers: int, out: memoryview) -> int:
        """Copy blocks into `out` in wire order (baton/kv_layout.py), len(out) is exact; returns the crc32c of these bytes."""
        ...

    def scatter(self, block_ids: Sequence[int], layer_start: int, num_layers: int, data: memoryview) -> int:
        """The inverse of gather; returns the crc32c of `data` as it reached the blocks."""
        ...

    def clear(self, block_ids: Sequence[int], layer_start: int, num_layers: int) -> None:
        """Write zeros."""
        ...


class RunnerLost(Exception):
    """A runner computes no more, whatever it is asked: its engine ends, and with it the worker."""


class Runner(Protocol):
    """Computes one step. Implementations: torch (engine/torch_runner.py), and scripted ones for tests."""

    @property
    def kv_cache(self) -> KVCache: ...

    def run(self, batch: Batch) -> list[Sample | None]:
        """One result per entry, None where it was not to be sampled. Blocks are complete when this returns.

        Raises: RunnerLost; anything else ends only what the batch holds.
        """
        ...


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks held on decode for a prompt that is being prefilled elsewhere."""

    seq: int
    block_ids: tuple[int, ...]  # for the whole prompt, in order
    num_leading_blocks: int  # already cached here: full, published, not to be written


@dataclass(frozen=True, slots=True)
class Pinned:
    """Blocks that another worker may read: the leading ones of those asked for that can be spared. Held until `unpin`."""

    seq: int
    block_ids: tuple[int, ...]  # empty: not even the first is here, or to spare


@dataclass(frozen=True, slots=True)
class Room:
    """Blocks set aside for what the prefix cache lacks of a prompt. Held until `publish`."""

    seq: int
    hashes: tuple[bytes, ...]  # of what is lacking, in order; empty: nothing is, or there is no memory to spare
    block_ids: tuple[int, ...]  # one per hash, of unknown content


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """A prefill-only sequence has KV for tokens [0, num_computed_tokens) in block_ids."""

    seq: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]  # of the whole prompt
    num_cached_tokens: int  # taken from the prefix cache at admission


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """Times in milliseconds on the engine's clock."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """A sequence ended by itself: finished, or failed (error is set). Its blocks are free, but for a prefill-only one that
    failed while it ran: those stay held until `drop`."""

    seq: int
    finish: FinishReason
    stats: SequenceStats
    error: BatonError | None = None


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """A prefill-only sequence has its first token; its blocks stay held until `drop`."""

    seq: int
    first: SampledToken  # first.finish says whether there is anything to hand over
    stats: SequenceStats


@dataclass(frozen=True, slots=True)
class StepResult:
    """All that one step changed. Empty lists where nothing did.

    Tokens of prefill-only sequences are in `prefilled`, never in `tokens`.
    """

    step: int
    tokens: list[SampledToken] = field(default_factory=list)
    chunks: list[ChunkDone] = field(default_factory=list)
    prefilled: list[PrefillEnded] = field(default_factory=list)
    reserved: list[Reservation] = field(default_factory=list)
    ended: list[SequenceEnded] = field(default_factory=list)
    pinned: list[Pinned] = field(default_factory=list)
    rooms: list[Room] = field(default_factory=list)
    cache_added: list[bytes] = field(default_factory=list)
    cache_removed: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Gauges and totals; idle means active_blocks, reserved_blocks, num_running and num_waiting are 0."""

    num_running: int
    num_waiting: int
    waiting_tokens: int
    active_blocks: int
    reserved_blocks: int
    cached_blocks: int
    free_blocks: int
    num_steps: int
    num_preemptions: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    output_tokens: int
    num_admitted: int
    step_ms: float
    busy_s: float  # in steps; what these computed, in all:
    step_tokens: int  # prompt tokens and decodes
    context_tokens: int  # whose KV the decodes read
    prompt_pairs: float  # (query, context) of the prompts' attention
    num_prompt_steps: int  # that computed prompts, alone or beside decodes; their parts of the above:
    prompt_steps_busy_s: float
    prompt_steps_tokens: int
    prompt_steps_context_tokens: int
    tuning: Tuning  # in force


class Engine(Protocol):
    """What a worker drives (engine/engine.py is the one implementation; tests may script it)."""

    def add(self, request: Request, now_s: float, *, prefill_only: bool = False) -> None:
        """Queue a sequence. prefill_only: stop after the first token, or a failure, and hold the blocks until `drop`."""
        ...

    def reserve(self, request: Request, now_s: float) -> None:
        """Queue a reservation, FIFO; it appears in StepResult.reserved once its blocks are set aside."""
        ...

    def adopt(self, seq: int, first_token: int, now_s: float) -> None:
        """Turn a reservation whose KV has arrived into a running sequence; output 0 is `first_token`, already sent."""
        ...

    def drop(self, seq: int) -> None:
        """End a sequence, reservation or hold in whatever state; its blocks are free on return. Idempotent."""
        ...

    def tune(self, tuning: Tuning) -> None:
        """Take these limits, each within what the engine was started with, from the next step on. Nothing that runs is ended."""
        ...

    def pin(self, seq: int, hashes: Sequence[bytes]) -> None:
        """Hold what is cached of these blocks for another worker, apart from any sequence; StepResult.pinned says what."""
        ...

    def unpin(self, seq: int) -> None:
        """Nobody reads them any more. Idempotent."""
        ...

    def make_room(self, request: Request, num_blocks: int) -> None:
        """Set blocks aside for what is lacking of the prompt's first `num_blocks`; StepResult.rooms says which."""
        ...

    def publish(self, seq: int, num_blocks: int) -> None:
        """Nobody writes a room any more: its first `num_blocks` are whole and cached from now on, the rest is free."""
        ...

    def step(self, now_s: float) -> StepResult:
        """schedule -> run -> commit; returns an empty result at once when there is nothing to do."""
        ...

    def has_work(self) -> bool: ...

    def load(self) -> EngineLoad: ...
