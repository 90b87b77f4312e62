"""What runs next. Owns every sequence of the engine, its queues and its blocks; touches no tensor, socket or clock.

`schedule(now_s)` moves sequences between the states of engine/sequence.py, sets blocks aside and returns a Plan; the engine
computes it; `commit` applies what came out. Between the two nothing else may be called.

A step, in this order, within max_num_batched_tokens:
  1. decodes of running sequences by (priority, arrival), one token each. A missing block is taken
     from the running sequence last in that order, perhaps the asker itself: it goes back to the queue, half a level of
     priority up, and is recomputed later. Prefill-only sequences own all their blocks from the start and are never preempted.
  2. prefill chunks of running sequences, at most chunk_tokens each.
  3. starts: the sequence first in the queue is admitted, or the first reservation granted, whichever comes first by
     priority and age (baton/priority.py): a higher priority delays a lower one for a bounded time only. It takes one of
     max_num_seqs seats and blocks for all its tokens, so what is adopted later runs at once. Where blocks are not there, nobody
     overtakes: so nobody starves. Where only budget is missing, reservations may pass, but never a preempted sequence that
     is before them in that order. Among themselves reservations are first come, first served, whatever their priority.

Watermark: a start must leave one available block for each sequence that decodes here or will (running ones and granted
reservations), so that it is not paid for with an immediate preemption. With nothing running the watermark is 0, so
whatever fits the pool can start.

`tune` changes the three limits from the next step on, and costs nobody what it has: sequences beyond a lowered max_num_seqs
run on, even one that was preempted meanwhile, and a lowered budget bounds what comes after the decodes.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter

from baton.config import EngineConfig
from baton.errors import BatonError, TransferFailed
from baton.request import FinishReason, Request, SampledToken
from engine.block_pool import BlockPool, Hold
from engine.ports import ChunkDone, PrefillEnded, Reservation, Sample, SequenceEnded, SequenceStats, StepResult
from engine.prefix_cache import PrefixCache
from engine.sequence import SeqState, Sequence, StopRules
from engine.tuning import Tuning


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute tokens [start, start + num_tokens) of one sequence; a decode is a chunk of one."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def sample(self) -> bool:
        """Whether it ends with the last token, so that the next one is drawn."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class Plan:
    """What changed and what to compute; all plain data."""

    chunks: list[Chunk] = field(default_factory=list)  # decodes first; empty: nothing to compute
    admitted: list[int] = field(default_factory=list)  # seqs that left the queue; empty: none did
    preempted: list[int] = field(default_factory=list)  # seqs that went back to it; empty: memory sufficed
    reserved: list[Reservation] = field(default_factory=list)  # grants; empty: none was possible


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    num_admitted: int = 0
    num_preemptions: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    output_tokens: int = 0


_order = attrgetter("order")
_arrival = attrgetter("arrival")

Outcome = Sample | BatonError | None  # of one chunk: a token, a failure, or computed without a token


class Scheduler:
    def __init__(
        self, config: EngineConfig, pool: BlockPool, cache: PrefixCache, stops: StopRules, *, block_size: int
    ) -> None:
        self.totals = Totals()
        self.tuning = self._most = Tuning.of(config)
        self._pool = pool
        self._cache = cache
        self._stops = stops
        self._block_size = block_size
        self._sequences: dict[int, Sequence] = {}  # all of them, whatever their state
        self._in_state: dict[SeqState, list[Sequence]] = {state: [] for state in SeqState}  # each list by order
        self._waiting = self._in_state[SeqState.WAITING]
        self._running = self._in_state[SeqState.RUNNING]
        self._queued = self._in_state[SeqState.QUEUED]  # but reservations are first come, first served
        self._num_arrived = 0

    def __contains__(self, seq: int) -> bool:
        return seq in self._sequences

    def runs(self, seq: int) -> bool:
        sequence = self._sequences.get(seq)
        return sequence is not None and sequence.state is SeqState.RUNNING

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences and reservations without blocks."""
        return len(self._waiting) + len(self._queued)

    @property
    def waiting_tokens(self) -> int:
        """Tokens to be computed before every admitted or waiting prompt is; decodes not counted."""
        started = sum(sequence.num_left for sequence in self._running if sequence.num_left > 1)
        return started + sum(sequence.num_left for sequence in self._waiting)

    @property
    def num_decode_context_tokens(self) -> int:
        """Tokens of the running sequences: whose KV a step of decodes alone reads."""
        return sum(len(sequence.token_ids) for sequence in self._running)

    @property
    def num_held_tokens(self) -> int:
        """Of every sequence that owns blocks."""
        states = (SeqState.RUNNING, SeqState.HELD, SeqState.RESERVED)
        return sum(len(sequence.token_ids) for state in states for sequence in self._in_state[state])

    def num_output_tokens(self, seq: int) -> int:
        """That the sequence has by now, those of earlier workers included; 0 where it is not known."""
        sequence = self._sequences.get(seq)
        return len(sequence.output_ids) if sequence is not None else 0

    def add(self, request: Request, now_s: float, *, prefill_only: bool) -> None:
        """Queue a sequence that fits (the engine has checked)."""
        insort(self._waiting, self._enter(request, now_s, SeqState.WAITING, prefill_only), key=_order)

    def reserve(self, request: Request, now_s: float) -> None:
        """Queue a reservation that fits."""
        self._queued.append(self._enter(request, now_s, SeqState.QUEUED, prefill_only=False))

    def adopt(self, seq: int, first_token: int) -> SequenceEnded | None:
        """Run a reservation whose KV is there. Returns its end where there is nothing to run. A second adopt does nothing."""
        sequence = self._sequences.get(seq)
        if sequence is None or sequence.state is SeqState.QUEUED:
            self.drop(seq)
            return failed(seq, TransferFailed("its reservation is gone"))
        if sequence.state is not SeqState.RESERVED:
            return None
        self._pool.adopt(sequence.blocks)
        sequence.num_computed = sequence.num_counted_tokens = len(sequence.token_ids)
        self._cache.publish(sequence)
        sequence.append(first_token)
        sequence.first_token_s = sequence.started_s
        self._move(sequence, SeqState.RUNNING)
        self.totals.num_admitted += 1
        finish = self._stops.finish_reason(sequence)
        return self._end(sequence, finish) if finish else None

    def tune(self, tuning: Tuning) -> None:
        """Take these limits, which are within those of the start (the host has checked)."""
        self.tuning = tuning

    def drop(self, seq: int) -> None:
        """Forget a sequence in any state; its blocks are free, or cached, on return."""
        sequence = self._sequences.pop(seq, None)
        if sequence is None:
            return
        self._in_state[sequence.state].remove(sequence)
        self._release(sequence)

    def num_spare(self) -> int:
        """Blocks that nobody waits for: what is queued here and what decodes comes first. Negative where they are too few."""
        num_waiting = sum(self._num_blocks_for(sequence) for sequence in self._waiting + self._queued)
        return self._pool.num_available - num_waiting - self._watermark()

    def has_work(self) -> bool:
        """Whether a step would compute or grant something."""
        return bool(self._running) or self._startable(self.tuning.max_num_batched_tokens) is not None

    def schedule(self, now_s: float) -> Plan:
        plan = Plan()
        running = list(self._running)  # preemption takes from it
        self._decode(running, plan)
        budget = self._prefill(running, plan, self.tuning.max_num_batched_tokens - len(plan.chunks))
        self._start(plan, budget, now_s)
        return plan

    def commit(self, plan: Plan, outcomes: Seq[Outcome], step: int, end_s: float) -> StepResult:
        """Apply one outcome per chunk; `end_s` is when the step's tokens were there."""
        result = StepResult(step, reserved=plan.reserved)
        for chunk, outcome in zip(plan.chunks, outcomes, strict=True):
            sequence = chunk.sequence
            if isinstance(outcome, BatonError):
                result.ended.append(self._fail(sequence, outcome))
                continue
            self._advance(sequence, chunk.num_tokens, result)
            if outcome is not None:
                self._emit(sequence, outcome, end_s, result)
        return result

    # What simulations do in place of many equal steps

    def steps_until_event(self) -> int:
        """How many coming steps would each compute one decode of every running sequence and nothing else, unless a command
        comes; the last of them may end some. 0: the next one would start, prefill or preempt something.

        Nothing can become startable meanwhile: seats and watermark stay, available blocks only get fewer, and what is published
        is output, which no prompt that waits begins with.
        """
        running = self._running
        if not self._all_decode() or self._startable(self.tuning.max_num_batched_tokens - len(running)) is not None:
            return 0
        num_steps = min(map(self._stops.num_tokens_left, running))
        if self._num_blocks_lacking(num_steps) > self._pool.num_available:
            allowed = range(num_steps)
            num_steps = bisect_right(allowed, self._pool.num_available, key=self._num_blocks_lacking) - 1
        return num_steps

    def grant_beside_decodes(self, now_s: float) -> list[Reservation]:
        """What the next step would grant after its decodes, where it would do nothing else before; so that it may be skipped."""
        if not self._queued or not self._all_decode() or self._num_blocks_lacking(1) > self._pool.num_available:
            return []
        plan, budget = Plan(), self.tuning.max_num_batched_tokens - len(self._running)
        for sequence in self._running:
            self._can_grow(sequence, plan)
        while (head := self._startable(budget)) is not None and head.state is SeqState.QUEUED:
            head.started_s = now_s
            self._grant(head, plan)
        return plan.reserved

    def _all_decode(self) -> bool:
        """Whether a step would compute one token of every running sequence, none of them the first."""
        running = self._running
        if not 0 < len(running) <= self._most.max_num_batched_tokens:
            return False
        for sequence in running:
            if sequence.num_computed + 1 != len(sequence.token_ids) or sequence.first_token_s is None:
                return False
        return True

    def skip(self, num_steps: int, token: int) -> list[SequenceEnded]:
        """Do at once what `num_steps` <= `steps_until_event()` steps would have done, each token being `token`, which stops
        nothing."""
        ended, tokens, size = [], [token] * num_steps, self._block_size
        for sequence in self._running:  # as in a step: everybody has its blocks before anybody gives some back
            sequence.num_computed += num_steps  # of output alone: no prompt token is among them
            sequence.token_ids += tokens
            sequence.output_ids += tokens
            lacking = -(-sequence.num_computed // size) - len(sequence.blocks)
            if lacking > 0:
                sequence.blocks += self._pool.allocate(lacking, Hold.ACTIVE)
        for sequence in list(self._running):
            self._cache.publish(sequence)
            if not self._stops.num_tokens_left(sequence):
                ended.append(self._end(sequence, FinishReason.LENGTH))
        self.totals.output_tokens += num_steps * (len(self._running) + len(ended))
        return ended

    def _num_blocks_lacking(self, num_steps: int) -> int:
        """For so many steps of all that run."""
        size, more, num_lacking = self._block_size, num_steps - 1, 0
        for sequence in self._running:
            lacking = -(-(len(sequence.token_ids) + more) // size) - len(sequence.blocks)
            if lacking > 0:
                num_lacking += lacking
        return num_lacking

    def check_integrity(self, exchanged: Set[int] = frozenset()) -> None:
        """Assert that blocks, queues and states agree; `exchanged` blocks are reserved by others (engine/block_exchange.py)."""
        self._pool.check_integrity()
        self._cache.check_integrity()
        for state, sequences in self._in_state.items():
            key = _arrival if state is SeqState.QUEUED else _order
            assert sequences == sorted(sequences, key=key), f"the {state.name} list is out of order"
            assert all(sequence.state is state for sequence in sequences), f"a stranger in the {state.name} list"
        assert sum(map(len, self._in_state.values())) == len(self._sequences), "a sequence is in no list, or in two"
        active = {block for s in self._running + self._in_state[SeqState.HELD] for block in s.blocks}
        reserved = ({block for s in self._in_state[SeqState.RESERVED] for block in s.blocks} | exchanged) - active
        assert self._pool.num_active == len(active), "active blocks without a sequence"
        assert self._pool.num_reserved == len(reserved), "reserved blocks without a reservation"
        assert not any(s.blocks or s.num_computed for s in self._waiting + self._queued), "a queued sequence owns KV"

    def _enter(self, request: Request, now_s: float, state: SeqState, prefill_only: bool) -> Sequence:
        self._num_arrived += 1
        sequence = Sequence(request, self._num_arrived, now_s, state, prefill_only)
        self._sequences[request.seq] = sequence
        return sequence

    # schedule: decodes, prefills, starts

    def _decode(self, running: Seq[Sequence], plan: Plan) -> None:
        for sequence in running:
            if len(plan.chunks) == self._most.max_num_batched_tokens:
                break
            if sequence.num_left == 1 and self._can_grow(sequence, plan):
                plan.chunks.append(Chunk(sequence, sequence.num_computed, 1))

    def _prefill(self, running: Seq[Sequence], plan: Plan, budget: int) -> int:
        for sequence in running:
            if budget <= 0:
                break
            if sequence.state is SeqState.RUNNING and sequence.num_left > 1:
                budget -= self._plan_chunk(sequence, plan, budget)
        return budget

    def _start(self, plan: Plan, budget: int, now_s: float) -> None:
        while (sequence := self._startable(budget)) is not None:
            if sequence.started_s is None:
                sequence.started_s = now_s
            if sequence.state is SeqState.WAITING:
                self._admit(sequence, plan)
                budget -= self._plan_chunk(sequence, plan, budget)
            else:
                self._grant(sequence, plan)

    def _plan_chunk(self, sequence: Sequence, plan: Plan, budget: int) -> int:
        num_tokens = min(sequence.num_left, self.tuning.chunk_tokens, budget)
        plan.chunks.append(Chunk(sequence, sequence.num_computed, num_tokens))
        return num_tokens

    def _can_grow(self, sequence: Sequence, plan: Plan) -> bool:
        """Give it a block for its last token if it lacks one; False where it was preempted, now or before in this step."""
        while sequence.state is SeqState.RUNNING:
            if self._num_blocks_for(sequence) <= len(sequence.blocks):
                return True
            if self._pool.num_available:
                sequence.blocks += self._pool.allocate(1, Hold.ACTIVE)
            else:
                self._preempt(next(s for s in reversed(self._running) if not s.prefill_only), plan)
        return False

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        self._release(sequence)
        sequence.num_preemptions += 1
        self._move(sequence, SeqState.WAITING)
        self.totals.num_preemptions += 1
        plan.preempted.append(sequence.seq)

    def _startable(self, budget: int) -> Sequence | None:
        """The one sequence or reservation that may start now."""
        if not self._waiting and not self._queued:
            return None
        heads = [head for head in self._waiting[:1] if budget > 0 and self._has_seat(head)]
        heads += [head for head in self._queued[:1] if self._has_seat(head) and not self._waits_for_preempted(head)]
        head = min(heads, key=_order, default=None)
        return head if head is not None and self._fits(head) else None

    def _has_seat(self, sequence: Sequence) -> bool:
        """A preempted sequence had one: it waits for memory only, not for a limit that was lowered meanwhile."""
        limits = self._most if sequence.is_preempted else self.tuning
        return len(self._running) + len(self._in_state[SeqState.RESERVED]) < limits.max_num_seqs

    def _waits_for_preempted(self, reservation: Sequence) -> bool:
        """Whether a preempted sequence of its own or a higher priority has no blocks: new work must not take them."""
        order = reservation.order
        ahead = takewhile(lambda sequence: sequence.order < order, self._waiting)
        return any(sequence.is_preempted for sequence in ahead)

    def _fits(self, sequence: Sequence) -> bool:
        hits = self._cache.lookup(sequence)
        num_taken = self._num_blocks_for(sequence) - len(hits) + self._pool.num_unheld(hits)
        return self._pool.num_available - num_taken >= self._watermark()

    def _watermark(self) -> int:
        num_decoding = sum(not sequence.prefill_only for sequence in self._running)
        return num_decoding + len(self._in_state[SeqState.RESERVED])

    def _admit(self, sequence: Sequence, plan: Plan) -> None:
        sequence.num_computed = self._take_blocks(sequence, Hold.ACTIVE) * self._block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_counted_tokens = sequence.num_computed
            self.totals.num_admitted += 1
            self.totals.prompt_tokens_cached += sequence.num_cached_tokens
        self._move(sequence, SeqState.RUNNING)
        plan.admitted.append(sequence.seq)

    def _grant(self, sequence: Sequence, plan: Plan) -> None:
        num_leading = self._take_blocks(sequence, Hold.RESERVED)
        self._move(sequence, SeqState.RESERVED)
        plan.reserved.append(Reservation(sequence.seq, tuple(sequence.blocks), num_leading))

    def _take_blocks(self, sequence: Sequence, hold: Hold) -> int:
        """Set aside blocks for all its tokens; returns how many lead with known content."""
        hits = self._cache.lookup(sequence)
        self._pool.acquire(hits, hold)
        sequence.blocks = hits + self._pool.allocate(self._num_blocks_for(sequence) - len(hits), hold)
        sequence.num_published = len(hits)
        return len(hits)

    def _num_blocks_for(self, sequence: Sequence) -> int:
        return -(-len(sequence.token_ids) // self._block_size)

    # commit: advance, emit, end

    def _advance(self, sequence: Sequence, num_tokens: int, result: StepResult) -> None:
        self.totals.prompt_tokens_computed += sequence.advance(num_tokens)
        self._cache.publish(sequence)
        if sequence.prefill_only:
            result.chunks.append(
                ChunkDone(sequence.seq, sequence.num_computed, tuple(sequence.blocks), sequence.num_cached_tokens)
            )

    def _emit(self, sequence: Sequence, sample: Sample, end_s: float, result: StepResult) -> None:
        index = sequence.append(sample.token)
        finish = self._stops.finish_reason(sequence)
        token = SampledToken(sequence.seq, index, sample.token, finish, sample.logprobs)
        self.totals.output_tokens += 1
        if sequence.first_token_s is None:
            sequence.first_token_s = end_s
        if sequence.prefill_only:
            self._move(sequence, SeqState.HELD)
            result.prefilled.append(PrefillEnded(sequence.seq, token, sequence.stats()))
            return
        result.tokens.append(token)
        if finish:
            result.ended.append(self._end(sequence, finish))

    def _end(self, sequence: Sequence, finish: FinishReason, error: BatonError | None = None) -> SequenceEnded:
        self.drop(sequence.seq)
        return SequenceEnded(sequence.seq, finish, sequence.stats(), error)

    def _fail(self, sequence: Sequence, error: BatonError) -> SequenceEnded:
        """End a sequence; a prefill-only one keeps its blocks until `drop`, since a transfer may still read them."""
        if not sequence.prefill_only:
            return self._end(sequence, FinishReason.NONE, error)
        self._move(sequence, SeqState.HELD)
        return SequenceEnded(sequence.seq, FinishReason.NONE, sequence.stats(), error)

    def _release(self, sequence: Sequence) -> None:
        """The one place where blocks are given back."""
        hold = Hold.RESERVED if sequence.state is SeqState.RESERVED else Hold.ACTIVE
        self._pool.release(sequence.blocks, hold)
        sequence.blocks = []
        sequence.num_computed = 0

    def _move(self, sequence: Sequence, state: SeqState) -> None:
        self._in_state[sequence.state].remove(sequence)
        sequence.state = state
        insort(self._in_state[state], sequence, key=_order)


def failed(seq: int, error: BatonError) -> SequenceEnded:
    """The end of a sequence that never started."""
    return SequenceEnded(seq, FinishReason.NONE, SequenceStats(), error)
