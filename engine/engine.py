"""LocalEngine: schedule -> run -> commit, for one model on one worker.

Owns the scheduler, the block pool, the prefix cache, the block exchange and the calls into the Runner. Commands (`add`,
`reserve`, `adopt`, `drop`, `tune`, and those of the exchange) never raise and never compute; what they end or answer at once
comes out of the next `step`. All of it runs on the one engine thread. Its only clock measures how long a run took.

When the Runner raises, each sequence of that batch is run again alone (computing the same tokens into the same blocks is
idempotent), so one bad sequence fails alone and a batch that was merely too big succeeds in parts; whoever fails again
ends with an error and its blocks are free (a prefill-only one's on `drop`: a transfer may still read them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton import clock
from baton.config import EngineConfig
from baton.errors import BatonError, Internal, InvalidRequest, Overloaded, Unavailable
from baton.hashing import BlockHash
from baton.log import get_log
from baton.request import Request
from engine.block_exchange import BlockExchange
from engine.block_pool import BlockPool
from engine.ports import Batch, BatchEntry, EngineLoad, Runner, RunnerLost, SequenceEnded, StepResult
from engine.prefix_cache import PrefixCache
from engine.scheduler import Chunk, Outcome, Plan, Scheduler, failed
from engine.sequence import StopRules
from engine.tuning import Tuning

STEP_MEAN_WEIGHT = 1 / 8  # of the newest step in step_ms: the smoothing of RFC 6298 (SRTT), about the last 8 steps
log = get_log("engine")


class LocalEngine:
    """The Engine of engine/ports.py."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        fingerprint: str,
        eos_token_ids: Iterable[int],
        max_model_len: int,
        clock_s: Callable[[], float] = clock.now_s,
        check_integrity: bool = False,
    ) -> None:
        """Build an idle engine over the runner's KV cache, whose size and layout count, not the configuration's.

        `fingerprint` is the model's (ModelSpec.fingerprint). `clock_s` only ever measures durations. With
        `check_integrity` every step that leaves the engine idle asserts that nothing leaked.
        """
        layout, num_blocks = runner.kv_cache.layout, runner.kv_cache.num_blocks
        self._config = config
        self._runner = runner
        self._clock_s = clock_s
        self._check_integrity = check_integrity
        # The last token of an answer is never computed, so a full pool carries one token more than it has slots.
        self.max_len = min(max_model_len, num_blocks * layout.block_size + 1)
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(
            self._pool,
            block_size=layout.block_size,
            fingerprint=fingerprint,
            kv_dtype=layout.dtype,
            enabled=config.prefix_cache,
        )
        stops = StopRules(frozenset(eos_token_ids), self.max_len)
        self._scheduler = Scheduler(config, self._pool, self._cache, stops, block_size=layout.block_size)
        self._exchange = BlockExchange(self._pool, self._cache, self._scheduler.num_spare, block_size=layout.block_size)
        self._ended: list[SequenceEnded] = []  # by commands, since the last step
        self._num_steps = 0
        self._step_ms = 0.0
        self._decode_steps, self._prompt_steps = _Work(), _Work()

    # Commands

    def add(self, request: Request, now_s: float, *, prefill_only: bool = False) -> None:
        """Queue a sequence; a seq that is already here is left alone. One that cannot be served ends in the next step."""
        if self._accepts(request):
            self._scheduler.add(request, now_s, prefill_only=prefill_only)

    def reserve(self, request: Request, now_s: float) -> None:
        """Queue a reservation for the whole of token_ids, under the rules of `add`."""
        if self._accepts(request):
            self._scheduler.reserve(request, now_s)

    def adopt(self, seq: int, first_token: int, now_s: float) -> None:
        """Run a granted reservation; without one it ends in the next step with TransferFailed."""
        ended = self._scheduler.adopt(seq, first_token)
        if ended is not None:
            self._ended.append(ended)

    def drop(self, seq: int) -> None:
        self._scheduler.drop(seq)
        self._ended = [ended for ended in self._ended if ended.seq != seq]

    def tune(self, tuning: Tuning) -> None:
        self._scheduler.tune(tuning)

    # Commands: KV flows back

    def pin(self, seq: int, hashes: Sequence[BlockHash]) -> None:
        self._exchange.pin(seq, hashes)

    def unpin(self, seq: int) -> None:
        self._exchange.unpin(seq)

    def make_room(self, request: Request, num_blocks: int) -> None:
        self._exchange.make_room(request, num_blocks)

    def publish(self, seq: int, num_blocks: int) -> None:
        self._exchange.publish(seq, num_blocks)

    # The step

    def has_work(self) -> bool:
        """Whether a step would change anything. Only a command can turn False into True."""
        answers = self._ended or self._exchange.has_answers() or self._cache.has_delta()
        return bool(answers) or self._scheduler.has_work()

    def step(self, now_s: float) -> StepResult:
        started_s = self._clock_s()
        plan = self._scheduler.schedule(now_s)
        outcomes = self._run(plan)
        return self._commit(plan, outcomes, now_s, self._clock_s() - started_s)

    def _run(self, plan: Plan) -> list[Outcome]:
        outcomes = self._try(plan.chunks)
        if len(outcomes) > 1 and all(isinstance(outcome, BatonError) for outcome in outcomes):
            return [outcome for chunk in plan.chunks for outcome in self._try([chunk])]
        return outcomes

    def _try(self, chunks: list[Chunk]) -> list[Outcome]:
        """Compute chunks in one batch; all of them fail together."""
        if not chunks:
            return []
        try:
            samples = self._runner.run(Batch([_entry(chunk) for chunk in chunks]))
            if [sample is not None for sample in samples] != [chunk.sample for chunk in chunks]:
                raise Internal("the runner did not answer every entry of its batch")
        except RunnerLost:
            raise
        except Exception as exception:  # the model boundary: whatever it raises ends sequences, not the worker
            error = _to_error(exception)
            request_ids = [chunk.sequence.request.request_id for chunk in chunks]
            log.exception("run_failed", code=error.code, request_ids=request_ids)
            return [error] * len(chunks)
        return list(samples)

    def _commit(self, plan: Plan, outcomes: list[Outcome], now_s: float, duration_s: float) -> StepResult:
        if plan.chunks:
            weight = STEP_MEAN_WEIGHT if self._num_steps else 1.0
            self._step_ms += weight * (1e3 * duration_s - self._step_ms)
            self._num_steps += 1
            work = _Work.of(plan.chunks, duration_s)
            (self._prompt_steps if work.prompt_pairs else self._decode_steps).add(work)
        result = self._scheduler.commit(plan, outcomes, self._num_steps, now_s + duration_s)
        added, removed = self._cache.take_delta()
        result.cache_added.extend(added)
        result.cache_removed.extend(removed)
        pinned, rooms = self._exchange.take_answers()
        result.pinned.extend(pinned)
        result.rooms.extend(rooms)
        result.ended.extend(self._ended)
        self._ended = []
        if self._check_integrity and self._pool.is_idle:
            self.check_integrity()
        return result

    # What others may see

    def load(self) -> EngineLoad:
        scheduler, pool, totals = self._scheduler, self._pool, self._scheduler.totals
        decode_steps, prompt_steps = self._decode_steps, self._prompt_steps
        return EngineLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.waiting_tokens,
            active_blocks=pool.num_active,
            reserved_blocks=pool.num_reserved,
            cached_blocks=pool.num_cached,
            free_blocks=pool.num_free,
            num_steps=self._num_steps,
            num_preemptions=totals.num_preemptions,
            prompt_tokens_computed=totals.prompt_tokens_computed,
            prompt_tokens_cached=totals.prompt_tokens_cached,
            output_tokens=totals.output_tokens,
            num_admitted=totals.num_admitted,
            step_ms=self._step_ms,
            busy_s=decode_steps.busy_s + prompt_steps.busy_s,
            step_tokens=decode_steps.tokens + prompt_steps.tokens,
            context_tokens=decode_steps.context_tokens + prompt_steps.context_tokens,
            prompt_pairs=prompt_steps.prompt_pairs,
            num_prompt_steps=prompt_steps.num_steps,
            prompt_steps_busy_s=prompt_steps.busy_s,
            prompt_steps_tokens=prompt_steps.tokens,
            prompt_steps_context_tokens=prompt_steps.context_tokens,
            tuning=scheduler.tuning,
        )

    def free_block_ids(self) -> tuple[int, ...]:
        """Blocks whose content is nobody's; tests poison them."""
        return self._pool.free_ids()

    def check_integrity(self) -> None:
        """Assert that every block, queue and state agrees."""
        self._scheduler.check_integrity(self._exchange.blocks())

    # Admission by size; by memory and seats it is the scheduler's

    def _accepts(self, request: Request) -> bool:
        if request.seq in self._scheduler:
            return False
        error = self._refusal(request)
        if error is not None:
            self._ended.append(failed(request.seq, error))
        return error is None

    def _refusal(self, request: Request) -> BatonError | None:
        num_tokens, max_tokens = len(request.token_ids), self.max_len - 1
        if not 1 <= num_tokens <= max_tokens:
            message = f"token_ids has {num_tokens} tokens; the limit of this worker is 1 to {max_tokens}"
            return InvalidRequest(message, field="token_ids")
        if request.num_tokens_left < 1:
            return InvalidRequest("max_tokens leaves nothing to generate; the limit is at least 1", field="max_tokens")
        if self._scheduler.num_waiting >= self._config.max_queued_seqs:
            return Overloaded("this worker's queue is full", retry_after_s=self._queue_s())
        return None

    def _queue_s(self) -> float:
        """Seconds until what waits is computed: whole steps of the token budget at the recent pace."""
        num_steps = 1 + self._scheduler.waiting_tokens // self._scheduler.tuning.max_num_batched_tokens
        return 1e-3 * self._step_ms * num_steps


@dataclass(slots=True)
class _Work:
    """What steps have computed and how long they took, in all: what a model of their time is learned from."""

    num_steps: int = 0
    busy_s: float = 0.0
    tokens: int = 0
    context_tokens: int = 0
    prompt_pairs: float = 0.0

    @classmethod
    def of(cls, chunks: Iterable[Chunk], duration_s: float) -> _Work:
        """One step. A chunk of one token costs what a decode does, and counts as one."""
        work = cls(1, duration_s)
        for chunk in chunks:
            num_tokens = chunk.num_tokens
            work.tokens += num_tokens
            if num_tokens == 1:
                work.context_tokens += chunk.start + 1
            else:
                work.prompt_pairs += num_tokens * (chunk.start + (num_tokens + 1) / 2)
        return work

    def add(self, other: _Work) -> None:
        self.num_steps += other.num_steps
        self.busy_s += other.busy_s
        self.tokens += other.tokens
        self.context_tokens += other.context_tokens
        self.prompt_pairs += other.prompt_pairs


def _entry(chunk: Chunk) -> BatchEntry:
    """View one chunk for the runner; lists are the sequence's own, valid until its next change."""
    sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
    return BatchEntry(
        seq=sequence.seq,
        token_ids=sequence.token_ids[chunk.start : end],
        start=chunk.start,
        block_table=sequence.blocks,
        sample=chunk.sample,
        sampling=sequence.request.sampling,
        prompt_ids=sequence.prompt_ids if chunk.sample else (),
        output_ids=sequence.output_ids if chunk.sample else (),
    )


def _to_error(exception: Exception) -> BatonError:
    """Keep what is ours; never put a foreign message, which may quote a prompt, before a client."""
    if isinstance(exception, BatonError):
        return exception
    if isinstance(exception, MemoryError):
        return Unavailable("the worker ran out of memory")
    return Internal(f"the model failed with {type(exception).__name__}")
