"""One engine under virtual time: the product's scheduler, block pool and prefix cache, with steps that last as a StepTime says.

    1 IDLE ── command ──▶ 2 STEPPING ── end ──▶ commands since, then again
        ▲                     │ nothing to do
        └─────────────────────┘
    2 is one step (schedule, commit), or a run: as many steps as the scheduler says will all be one decode of everybody.

As in worker/engine_thread.py commands are carried out between steps only. One that comes during a run ends it at the end of the
step under way, which is exactly when stepping would have carried it out. Never asks what a token is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton.config import EngineConfig
from baton.request import Request
from bench.sim.call import ANSWER_TOKEN
from bench.sim.clock import Event
from engine.block_pool import BlockPool
from engine.ports import Reservation, Sample, SequenceEnded, StepResult
from engine.prefix_cache import PrefixCache
from engine.scheduler import Plan, Scheduler
from engine.sequence import StopRules
from engine.timing.step_time import Batch, StepTime

_SAMPLE = Sample(ANSWER_TOKEN, None)


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What every engine of one pool is like."""

    config: EngineConfig
    num_blocks: int
    step_time: StepTime
    fingerprint: str = "sim"

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.config.block_size


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
        )
        stops = StopRules(frozenset(), shape.pool_tokens + 1)
        self.scheduler = Scheduler(config, self.pool, self.cache, stops, block_size=config.block_size)
        self.busy_s = 0.0
        self.num_steps = 0
        self._listener = listener
        self._fast = fast
        self._commands: list[Callable[[], SequenceEnded | None]] = []
        self._run: _Run | None = None
        self._is_stepping = False
        self._version = 0  # of the event that ends the step under way

    # Commands

    def add(self, request: Request, now_s: float, *, prefill_only: bool) -> list[Event]:
        return self._do(partial(self.scheduler.add, request, now_s, prefill_only=prefill_only), now_s)

    def reserve(self, request: Request, now_s: float) -> list[Event]:
        return self._do(partial(self.scheduler.reserve, request, now_s), now_s)

    def adopt(self, seq: int, now_s: float) -> list[Event]:
        return self._do(partial(self.scheduler.adopt, seq, ANSWER_TOKEN), now_s)

    def drop(self, seq: int, now_s: float) -> list[Event]:
        return self._do(partial(self.scheduler.drop, seq), now_s)

    def _do(self, command: Callable[[], SequenceEnded | None], now_s: float) -> list[Event]:
        self._commands.append(command)
        if not self._is_stepping:
            return self._begin(now_s)
        if self._run is not None:
            return self._cut(self._run, now_s)
        return []

    # Steps

    def _begin(self, now_s: float) -> list[Event]:
        """At the end of a step, or out of idleness."""
        ended = [over for command in self._commands if (over := command()) is not None]
        self._commands.clear()
        assert not ended, "an answer that ends with its first token is not handed over"
        granted = self.scheduler.grant_beside_decodes(now_s) if self._fast else []
        num_steps = self.scheduler.steps_until_event() if self._fast else 0
        if num_steps:
            return self._start_run(num_steps, granted, now_s)
        plan = self.scheduler.schedule(now_s)
        plan.reserved[:0] = granted
        if plan.chunks:
            self._is_stepping = True
            self._version += 1
            end_s = now_s + self.shape.step_time.step_s(_batch(plan))
            return [Event(end_s, partial(self._end_step, plan, now_s))]
        self._is_stepping = False
        if not plan.reserved:
            return []
        return [*self._listener.after_step(StepResult(self.num_steps, reserved=plan.reserved), now_s)]

    def _end_step(self, plan: Plan, begin_s: float, now_s: float) -> Iterable[Event]:
        self.busy_s += now_s - begin_s
        self.num_steps += 1
        outcomes = [_SAMPLE if chunk.sample else None for chunk in plan.chunks]
        result = self.scheduler.commit(plan, outcomes, self.num_steps, now_s)
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
            result = StepResult(self.num_steps + 1, reserved=granted)
            events.append(Event(now_s + self._elapsed_s(self._run, 1), partial(self._listener.after_step, result)))
        return events

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
        self._run = None
        self.busy_s += now_s - run.begin_s
        self.num_steps += run.num_steps
        step_time = self.shape.step_time

        def step_s(number: int) -> float:
            return step_time.decode_steps_s(run.num_seqs, run.context_tokens + number * run.num_seqs, 1)

        self._listener.on_run(step_s, run.num_steps, run.begin_s)
        ended = self.scheduler.skip(run.num_steps, ANSWER_TOKEN)
        return self._after(StepResult(self.num_steps, ended=ended), now_s)

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

    def num_decoded_since(self, now_s: float) -> int:
        """Tokens of the run under way, which its sequences do not show yet."""
        return self._run.num_seqs * self._num_done(self._run, now_s) if self._run is not None else 0

    @property
    def waiting_tokens(self) -> int:
        """As of the end of the last step."""
        return self.scheduler.waiting_tokens


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
