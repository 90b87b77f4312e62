"""`python -m bench.what_if`: answers the controller's what-ifs by simulation. A Question on stdin, the Answer on stdout.

Seed by seed every scenario is run on the same calls, and a seed counts when all of them are through; the budget is looked at
between calls, so the answer is there in time. Whoever starts this process limits its memory, priority and life.

Assumed, beyond docs/simulator.md: arrivals are Poisson at the measured rate; lengths are drawn from the measured histograms,
prompts and answers apart; what is cached is a beginning that all prompts share, as long as the measured share of each.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
import random
import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from baton.config import EngineConfig
from baton.request import Role
from baton.slo import SLO, Verdict
from bench.sim.arrivals import Constant, instants
from bench.sim.call import Call
from bench.sim.deployment import Deployment, Layout
from bench.sim.engine import EngineShape
from bench.sim.simulation import Mix, Simulation
from bench.traces import TraceRow
from engine.timing.batch import Batch
from router.controller.step_model import StepWork, Terms
from router.controller.what_if import ANSWER, QUESTION, Answer, ClassLoad, ClassRun, Question, Run, Scenario
from router.windows import BUCKETS_PER_DOUBLING

BLOCK_TOKENS = (
    64  # coarser than the product's 16 and quicker; times within 1 %, attainment the same. measured: docs/simulator.md
)
LEAST_CACHED = 0.02  # of prompts: below it a cache changes less than forecasts err, and costs time to simulate
_LOOK_CALLS = 16  # between two looks at the clock


class _OutOfTime(Exception):
    """The budget is spent."""


def answer(question: Question, now_s: Callable[[], float] = time.monotonic) -> Answer:
    """Whole seeds only: one whose scenarios are not all through says nothing."""
    until_s = now_s() + question.budget_s
    runs: list[Run] = []
    for seed in question.seeds:
        try:
            runs += [_run(question, scenario, seed, lambda: now_s() > until_s) for scenario in question.scenarios]
        except _OutOfTime:
            break
    return Answer(tuple(runs[: len(runs) // len(question.scenarios) * len(question.scenarios)]))


def _run(question: Question, scenario: Scenario, seed: int, is_late: Callable[[], bool]) -> Run:
    met: dict[str, list[bool]] = {slo.name: [] for slo in scenario.classes}

    def on_call(call: Call) -> None:
        if call.row.at_s >= question.warm_up_s:
            met[call.slo.name].append(_is_met(call, question.network_s))
        if call.seq % _LOOK_CALLS == 0 and is_late():
            raise _OutOfTime

    calls = _Calls(question, scenario, seed)
    Simulation(_deployment(question, scenario), calls.mix, seed=seed, on_call=on_call).run(calls)
    classes = tuple(ClassRun(name, len(verdicts), sum(verdicts)) for name, verdicts in met.items())
    return Run(scenario.name, seed, question.length_s - question.warm_up_s, classes)


def _is_met(call: Call, network_s: float) -> bool:
    """A first token's way takes longer than the simulator's hops by what routers measured."""
    slo, late_ms = call.slo, 1e3 * network_s
    e2e_ms = None if slo.e2e_ms is None else slo.e2e_ms - late_ms
    return replace(call, slo=replace(slo, ttft_ms=slo.ttft_ms - late_ms, e2e_ms=e2e_ms)).verdict is Verdict.MET


# -- calls -------------------------------------------------------------------------------------------------------------


class _Calls:
    """In order of arrival, until the question's length is over; a seed's calls are the same in every scenario."""

    def __init__(self, question: Question, scenario: Scenario, seed: int) -> None:
        self._question = question
        self._seed = seed
        self._classes = {slo.name: slo for slo in scenario.classes}
        self._order: deque[SLO] = deque()  # of the calls that were read and have not arrived
        self.mix = _Order(scenario.classes, tuple(1.0 for _ in scenario.classes), self._order)

    def __iter__(self) -> Iterator[TraceRow]:
        streams = [
            self._of_class(load) for load in self._question.load if load.class_name in self._classes and load.rate
        ]
        for row, slo in heapq.merge(*streams, key=lambda one: one[0].at_s):
            if row.at_s > self._question.length_s:
                return
            self._order.append(slo)
            yield row

    def _of_class(self, load: ClassLoad) -> Iterator[tuple[TraceRow, SLO]]:
        slo = self._classes[load.class_name]
        rng = random.Random(f"{self._seed}/{load.class_name}")
        prompts = MeasuredLengths(load.prompt_lengths, load.prompt_tokens)
        answers = MeasuredLengths(load.output_lengths, load.output_tokens)
        for at_s in instants(Constant(load.rate), rng.getrandbits(32)):
            tokens = prompts.sample(rng)
            shared = int(load.cached_share * tokens / BLOCK_TOKENS) if load.cached_share >= LEAST_CACHED else 0
            yield TraceRow(at_s, tokens, answers.sample(rng), tuple(range(shared)), BLOCK_TOKENS), slo


@dataclass(frozen=True, slots=True)
class _Order(Mix):
    """Classes as the calls have them: nothing is drawn."""

    order: deque[SLO] = field(default_factory=deque)

    def draw(self, rng: random.Random) -> SLO:
        return self.order.popleft()


class MeasuredLengths:
    """Draws from a router's histogram: evenly on the log scale within a bucket, and stretched to the mean that was measured."""

    def __init__(self, counts: Sequence[float], mean: float) -> None:
        self._sums = list(itertools.accumulate(counts))
        width = 2 ** (1 / BUCKETS_PER_DOUBLING)
        middles = [width**place * (width - 1) / math.log(width) for place in range(len(counts))]
        drawn = math.fsum(map(operator.mul, counts, middles)) / self._sums[-1]
        self._stretch = mean / drawn

    def sample(self, rng: random.Random) -> int:
        place = bisect_left(self._sums, rng.random() * self._sums[-1])
        return max(1, round(self._stretch * 2 ** ((place + rng.random()) / BUCKETS_PER_DOUBLING)))


# -- the fleet ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class MeasuredSteps:
    """A StepTime of terms that were learned."""

    terms: Terms
    slowness: float

    def step_s(self, batch: Batch) -> float:
        if not batch.num_tokens:
            return 0.0
        work = StepWork(batch.num_tokens, batch.decode_context_tokens, batch.num_prefill_pairs)
        return self.slowness * self.terms.step_s(work)

    def decode_steps_s(self, num_decodes: int, context_tokens: int, num_steps: int) -> float:
        grown_tokens = num_decodes * (num_steps * (num_steps - 1) // 2)
        context_s = self.slowness * self.terms.s_per_context_token * (num_steps * context_tokens + grown_tokens)
        return context_s + num_steps * self.slowness * self.terms.step_s(StepWork(num_decodes))


@dataclass(frozen=True, slots=True)
class _Measured(Deployment):
    """Of workers as they were measured, whatever GPUs they are."""

    question: Question | None = None
    scenario: Scenario | None = None

    def shape(self, role: Role) -> EngineShape:
        assert self.scenario is not None, "a deployment that is made here has one"
        pools = self.scenario.pools
        # Asked of all roles, used of those that are there.
        pool = next((pool for pool in pools if pool.role is role), pools[-1])
        config = replace(
            self.engine,
            max_num_seqs=pool.tuning.max_num_seqs,
            max_num_batched_tokens=pool.tuning.max_num_batched_tokens,
            chunk_tokens=pool.tuning.chunk_tokens,
        )
        steps = MeasuredSteps(pool.steps, self.scenario.slowness)
        return EngineShape(config, pool.kv_tokens // BLOCK_TOKENS, steps)

    @property
    def token_bytes(self) -> float:
        assert self.question is not None, "a deployment that is made here has one"
        return self.question.kv_bytes_per_token

    def nic_bytes_per_s(self, role: Role) -> float:
        assert self.question is not None, "a deployment that is made here has one"
        return self.question.link_bytes_per_s


def _deployment(question: Question, scenario: Scenario) -> Deployment:
    sizes = {pool.role: pool.num_workers for pool in scenario.pools}
    caches = any(load.cached_share >= LEAST_CACHED for load in question.load)
    return _Measured(
        Layout(*(sizes.get(role, 0) for role in (Role.PREFILL, Role.DECODE, Role.BOTH))),
        engine=EngineConfig(block_size=BLOCK_TOKENS, prefix_cache=caches, max_queued_seqs=sys.maxsize),
        local_prefill_tokens=scenario.local_prefill_tokens,
        question=question,
        scenario=scenario,
    )


def main() -> int:
    found = answer(QUESTION.validate_json(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(ANSWER.dump_json(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
