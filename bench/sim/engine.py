"""One engine under virtual time: the product's scheduler, block pool and prefix cache, with steps that last as a StepTime says.

    1 IDLE ── command ──▶ 2 STEPPING ── end ──▶ commands since, then again
        ▲                     │ nothing to do
        └─────────────────────┘
    2 is one step (schedule, commit), or a run: as many steps as the scheduler says will all be one decode of everybody.

As in worker/engine_thread.py commands are carried out between steps only. One that comes during a run ends it at the end of the
step under way, which is exactly when stepping would have carried it out. Never asks what a token is.
`halt` is death: the step under way is lost, the ones before it are not, and nothing is ever done again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from baton.config import EngineConfig
from baton.request import Request
from bench.sim.call import ANSWER_TOKEN
from bench.sim.clock import Event
from bench.sim.hashing import block_hashes
from engine.block_pool import BlockPool
from engine.ports import Reservation, Sample, SequenceEnded, StepResult
from engine.prefix_cache import PrefixCache
from engine.scheduler import Plan, Scheduler
from engine.sequence import StopRules
from engine.timing.step_time import Batch, StepTime
from engine.tuning import Tuning

_SAMPLE = Sample(ANSWER_TOKEN, None)


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What every engine of one pool is like."""

    config: EngineConfig
    num_blocks: int
    step_time: StepTime
    fingerprint: str = "sim"
    scheduler: type[Scheduler] = Scheduler  # another one only to compare with
    first_tuning: Tuning | None = None  # that it begins with; None = all that `config` allows

    @property
    def tuning(self) -> Tuning:
        return self.first_tuning or self.most

    @property
    def most(self) -> Tuning:
        return Tuning.of(self.config)

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.config.block_size


@dataclass(slots=True)
class Work:
    """What steps computed in all, and how long they took: what workers tell a model of their steps, by kind."""

    num_steps: int = 0
    busy_s: float = 0.0
    tokens: int = 0
    context_tokens: int = 0  # whose KV the decodes read
    prompt_pairs: float = 0.0  # (query, context) of the prompts' attention

    def add(self, batch: Batch, took_s: float) -> None:
        """One step more."""
        self.num_steps += 1
        self.busy_s += took_s
        self.tokens += batch.num_tokens
        self.context_tokens += batch.decode_context_tokens
        self.prompt_pairs += batch.num_prefill_pairs

    def plus(self, other: Work) -> Work:
        return Work(
            self.num_steps + other.num_steps,
            self.busy_s + other.busy_s,
            self.tokens + other.tokens,
            self.context_tokens + other.context_tokens,
            self.prompt_pairs + other.prompt_pairs,
        )

    def add_run(self, num_seqs: int, context_tokens: int, num_steps: int, took_s: float) -> None:
        """So many steps more, of decodes alone; the first of them reads `context_tokens`."""
        self.num_steps += num_steps
        self.busy_s += took_s
        self.tokens += num_seqs * num_steps
        self.context_tokens += num_steps * context_tokens + num_seqs * (num_steps * (num_steps - 1) // 2)


class Listener(Protocol):
    """Whose engine it is."""

    def on_run(self, step_s: Callable[[int], float], num_steps: int, begin_s: float) -> None:
        """So many steps are over in which everybody decoded; number n took step_s(n)."""
        ...

    def on_step(self, plan: Plan, result: StepResult, begin_s: float, end_s: float) -> None: ...

    def after_step(self, result: StepResult, now_s: float) -> Iterable[Event]:
        """Act upon what came out of a step, or of a run."""
        ...


@dataclass(slots=True)
class _Run:
    """Steps of decodes alone."""

    begin_s: float
    num_seqs: int
    context_tokens: int
    num_steps: int
    length_s: float = 0.0


class _Sums(NamedTuple):
    """Over the scheduler's sequences; they are asked for much more often than they change."""

    waiting_tokens: int
    held_tokens: int


class SimEngine:
    def __init__(self, shape: EngineShape, listener: Listener, *, fast: bool) -> None:
        """`fast`: many equal steps at once; else one after the other, which is what the other is compared with."""
        config = shape.config
        self.shape = shape
        self.pool = BlockPool(shape.num_blocks)
        self.cache = PrefixCache(
            self.pool,
            block_size=config.block_size,
            fingerprint=shape.fingerprint,
            kv_dtype="auto",
            enabled=config.prefix_cache,
            hash_blocks=block_hashes,
        )
        stops = StopRules(frozenset(), shape.pool_tokens + 1)
        self.scheduler = shape.scheduler(config, self.pool, self.cache, stops, block_size=config.block_size)
        self.scheduler.tune(shape.tuning)
        self.is_halted = False
        self._decode_work, self._prompt_work = Work(), Work()
        self._listener = listener
        self._fast = fast
        self._commands: list[Callable[[], SequenceEnded | None]] = []
        self._run: _Run | None = None
        self._known_sums: _Sums | None = None  # None: something has changed
        self._is_stepping = False
        self._began_s = 0.0  # the step or run under way
        self._version = 0  # of the event that ends it

    # Commands

    def add(self, request: Request, now_s: float, *, prefill_only: bool) -> list[Event]:
        return self._do(partial(self.scheduler.add, request, now_s, prefill_only=prefill_only), now_s)

    def reserve(self, request: Request, now_s: float) -> list[Event]:
        return self._do(partial(self.scheduler.reserve, request, now_s), now_s)

    def adopt(self, seq: int, now_s: float) -> list[Event]:
        return self._do(partial(self.scheduler.adopt, seq, ANSWER_TOKEN), now_s)

    def drop(self, seq: int, now_s: float) -> list[Event]:
        return self._do(partial(self.scheduler.drop, seq), now_s)

    def tune(self, tuning: Tuning, now_s: float) -> list[Event]:
        return self._do(partial(self.scheduler.tune, tuning), now_s)

    def _do(self, command: Callable[[], SequenceEnded | None], now_s: float) -> list[Event]:
        self._commands.append(command)
        if not self._is_stepping:
            return self._begin(now_s)
        if self._run is not None:
            return self._cut(self._run, now_s)
        return []

    def halt(self, now_s: float) -> float:
        """Die. The steps before the one under way are still told of; returns when the last of them ended."""
        assert not self.is_halted, "it is dead"
        self.is_halted = True
        run, last_s = self._run, self._began_s
        if run is not None and (num_done := self._num_done(run, now_s)):
            last_s = self._tell_run(run, num_done)
            self.scheduler.skip(num_done, ANSWER_TOKEN)
        self._run = self._known_sums = None
        return last_s

    # Steps

    def _begin(self, now_s: float) -> list[Event]:
        """At the end of a step, or out of idleness."""
        self._known_sums = None
        for command in self._commands:
            ended = command()
            assert ended is None, "an answer that ends with its first token is not handed over"
        self._commands.clear()
        self._began_s = now_s
        if not self.scheduler.num_running and not self.scheduler.num_waiting:
            self._is_stepping = False
            return []
        granted = self.scheduler.grant_beside_decodes(now_s) if self._fast else []
        num_steps = self.scheduler.steps_until_event() if self._fast else 0
        if num_steps:
            return self._start_run(num_steps, granted, now_s)
        plan = self.scheduler.schedule(now_s)
        plan.reserved[:0] = granted
        if plan.chunks:
            self._is_stepping = True
            self._version += 1
            batch = _batch(plan)
            end_s = now_s + self.shape.step_time.step_s(batch)
            return [Event(end_s, partial(self._end_step, plan, batch, now_s))]
        self._is_stepping = False
        if not plan.reserved:
            return []
        return [*self._listener.after_step(StepResult(self._num_steps, reserved=plan.reserved), now_s)]

    def _end_step(self, plan: Plan, batch: Batch, begin_s: float, now_s: float) -> Iterable[Event]:
        if self.is_halted:
            return ()
        self._known_sums = None
        (self._prompt_work if batch.prefills else self._decode_work).add(batch, now_s - begin_s)
        outcomes = [_SAMPLE if chunk.sample else None for chunk in plan.chunks]
        result = self.scheduler.commit(plan, outcomes, self._num_steps, now_s)
        self._listener.on_step(plan, result, begin_s, now_s)
        return self._after(result, now_s)

    def _after(self, result: StepResult, now_s: float) -> Iterable[Event]:
        """What the worker does about a step waits for the engine's thread like any other command."""
        events = [*self._listener.after_step(result, now_s)]
        return [*events, *self._begin(now_s)]

    # Runs

    def _start_run(self, num_steps: int, granted: list[Reservation], now_s: float) -> list[Event]:
        """Its first step's end tells who was granted room."""
        self._is_stepping = True
        self._run = _Run(now_s, self.scheduler.num_running, self.scheduler.num_decode_context_tokens, num_steps)
        events = [self._run_end(self._run)]
        if granted:
            result = StepResult(self._num_steps + 1, reserved=granted)
            events.append(Event(now_s + self._elapsed_s(self._run, 1), partial(self._tell_granted, result)))
        return events

    def _tell_granted(self, result: StepResult, now_s: float) -> Iterable[Event]:
        return () if self.is_halted else self._listener.after_step(result, now_s)

    def _run_end(self, run: _Run) -> Event:
        self._version += 1
        run.length_s = self._elapsed_s(run, run.num_steps)
        return Event(run.begin_s + run.length_s, partial(self._end_run, self._version))

    def _cut(self, run: _Run, now_s: float) -> list[Event]:
        """End it with the step under way."""
        num_steps = self._num_done(run, now_s) + 1
        if num_steps >= run.num_steps:
            return []
        run.num_steps = num_steps
        return [self._run_end(run)]

    def _end_run(self, version: int, now_s: float) -> Iterable[Event]:
        run = self._run
        if version != self._version or run is None:
            return ()
        self._run = self._known_sums = None
        self._tell_run(run, run.num_steps)
        ended = self.scheduler.skip(run.num_steps, ANSWER_TOKEN)
        if not ended:  # it was cut
            return self._begin(now_s)
        return self._after(StepResult(self._num_steps, ended=ended), now_s)

    def _tell_run(self, run: _Run, num_steps: int) -> float:
        """Returns when the last of these steps ended."""
        step_time, length_s = self.shape.step_time, self._elapsed_s(run, num_steps)

        def step_s(number: int) -> float:
            return step_time.decode_steps_s(run.num_seqs, run.context_tokens + number * run.num_seqs, 1)

        self._decode_work.add_run(run.num_seqs, run.context_tokens, num_steps, length_s)
        self._listener.on_run(step_s, num_steps, run.begin_s)
        return run.begin_s + length_s

    def _elapsed_s(self, run: _Run, num_steps: int) -> float:
        return self.shape.step_time.decode_steps_s(run.num_seqs, run.context_tokens, num_steps)

    def _num_done(self, run: _Run, now_s: float) -> int:
        """Whole steps. Steps only get longer, so as many as an even pace would make are over for sure (but for rounding)."""
        elapsed_s, elapsed = now_s - run.begin_s, partial(self._elapsed_s, run)
        least = max(0, int(run.num_steps * elapsed_s / run.length_s) - 1)
        most = least + 2
        while most < run.num_steps and elapsed(most) <= elapsed_s:
            least, most = most, 2 * most - least
        return least + bisect_right(range(least + 1, min(most, run.num_steps)), elapsed_s, key=elapsed)

    # What others see

    def settle_cache(self, now_s: float) -> None:
        """Let the cache be as after the last step, where those of a run under way have taken blocks from it: others read it."""
        run = self._run
        if run is None or not self.shape.config.prefix_cache:
            return
        num_done = self._num_done(run, now_s)
        num_taken = run.num_seqs * (1 + num_done // self.shape.config.block_size)  # at most
        if not num_done or num_taken <= self.pool.num_free:
            return
        begin_s = self._tell_run(run, num_done)
        self.scheduler.skip(num_done, ANSWER_TOKEN)
        run.begin_s = self._began_s = begin_s
        run.context_tokens += num_done * run.num_seqs
        run.num_steps -= num_done
        run.length_s = self._elapsed_s(run, run.num_steps)
        self._known_sums = None

    def work(self, now_s: float) -> Work:
        """Of all steps that are over."""
        decodes, prompts = self.work_by_kind(now_s)
        return decodes.plus(prompts)

    def work_by_kind(self, now_s: float) -> tuple[Work, Work]:
        """Likewise, of steps that only decoded, and of those that computed prompts."""
        run, decodes = self._run, replace(self._decode_work)
        if run is not None and (num_done := self._num_done(run, now_s)):
            decodes.add_run(run.num_seqs, run.context_tokens, num_done, self._elapsed_s(run, num_done))
        return decodes, replace(self._prompt_work)

    @property
    def _num_steps(self) -> int:
        return self._decode_work.num_steps + self._prompt_work.num_steps

    def num_decoded_since(self, now_s: float) -> int:
        """Tokens of the run under way, which its sequences do not show yet."""
        return self._run.num_seqs * self._num_done(self._run, now_s) if self._run is not None else 0

    @property
    def waiting_tokens(self) -> int:
        """As of the end of the last step, or of the last command since."""
        return self._sums.waiting_tokens

    @property
    def held_tokens(self) -> int:
        """Of every sequence that owns blocks; likewise."""
        return self._sums.held_tokens

    @property
    def _sums(self) -> _Sums:
        if self._known_sums is None:
            self._known_sums = _Sums(self.scheduler.waiting_tokens, self.scheduler.num_held_tokens)
        return self._known_sums


def _batch(plan: Plan) -> Batch:
    """Decodes are chunks of one token that end with a sample; they come first."""
    prefills, num_decodes, context_tokens = [], 0, 0
    for chunk in plan.chunks:
        if chunk.num_tokens == 1 and chunk.sample:
            num_decodes += 1
            context_tokens += chunk.start + 1
        else:
            prefills.append((chunk.num_tokens, chunk.start))
    return Batch(tuple(prefills), num_decodes, context_tokens)
