"""A measured fleet and its traffic as plain values, and a simulator that answers from a script."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from baton.request import Role
from baton.slo import SLO
from engine.timing.step_time import step_time
from router.controller.autoscaler.facts import ClassTraffic, FleetFacts, State, Tuning, WorkerFacts
from router.controller.measured_fleet import WINDOW_S, Measured
from router.controller.settings import Budget
from router.controller.step_model import terms_of
from router.controller.what_if import Answer, ClassRun, Question, Run
from router.windows import NUM_LENGTH_BUCKETS, ClassWindow, TTFTParts, length_bucket

CHAT = SLO("interactive", ttft_ms=500.0, tpot_ms=15.0)
BULK = SLO("batch", ttft_ms=60_000.0, tpot_ms=1_000.0, priority=-10)
TERMS = terms_of(step_time("h100", "llama-3.1-8b", 1))
TUNING = Tuning(max_num_seqs=256, max_num_batched_tokens=2_048, chunk_tokens=512)


def window(
    name: str,
    rate: float,
    *,
    prompt: int = 1_000,
    output: int = 100,
    met: float = 0.95,
    span_s: float = WINDOW_S,
    cached: float = 0.0,
) -> ClassWindow:
    """What routers would say of so many calls a second, of lognormal lengths with these medians."""
    rng, num = random.Random(name), round(rate * span_s)
    prompts = [round(rng.lognormvariate(0.0, 0.6) * prompt) for _ in range(num)]
    outputs = [max(1, round(rng.lognormvariate(0.0, 0.6) * output)) for _ in range(num)]
    return ClassWindow(
        name,
        WINDOW_S,
        span_s,
        num_met=round(met * num),
        num_missed_ttft=num - round(met * num),
        num_arrived=num,
        num_sequences=num,
        num_prompts=num,
        prompt_tokens=sum(prompts),
        cached_tokens=cached * sum(prompts),
        num_outputs=num,
        output_tokens=sum(outputs),
        parts=TTFTParts(num, network_s=0.003 * num),
        prompt_lengths=_histogram(prompts),
        output_lengths=_histogram(outputs),
    )


def _histogram(lengths: Sequence[int]) -> tuple[float, ...]:
    counts = [0.0] * NUM_LENGTH_BUCKETS
    for length in lengths:
        counts[length_bucket(length)] += 1
    return tuple(counts)


def worker(name: str, role: Role, shape: str = "h100", state: State = State.READY) -> WorkerFacts:
    return WorkerFacts(name, role, state, 0.0, shape, 1, 400_000, TUNING, TUNING)


def fleet(
    num_prefill: int = 1,
    num_decode: int = 1,
    num_both: int = 0,
    *,
    local_prefill_tokens: int = 0,
    classes: Sequence[SLO] = (CHAT,),
    decode_shape: str = "h100",
    now_s: float = 0.0,
) -> FleetFacts:
    workers = [
        *(worker(f"prefill-{n}", Role.PREFILL) for n in range(num_prefill)),
        *(worker(f"decode-{n}", Role.DECODE, decode_shape) for n in range(num_decode)),
        *(worker(f"both-{n}", Role.BOTH) for n in range(num_both)),
    ]
    return FleetFacts(
        now_s=now_s,
        workers=tuple(workers),
        classes=tuple(ClassTraffic(slo, 5.0, 5.0, 1_000.0, 0.0, 700_000.0, 100.0) for slo in classes),
        steps=dict.fromkeys(Role, TERMS),
        budget=Budget(),
        kv_bytes_per_token=131_072.0,
        link_bytes_per_s=4e10,
        local_prefill_tokens=local_prefill_tokens,
    )


def measured(facts: FleetFacts, *windows: ClassWindow, is_settled: bool = True) -> Measured:
    return Measured(facts, windows, {}, is_settled)


class ScriptedSimulator:
    """Says how many of 1,000 calls of each class met their targets, by scenario and seed."""

    def __init__(self, met: Callable[[str, int], int], num_seeds: int = 4, num_calls: int = 1_000) -> None:
        self.asked: list[Question] = []
        self._met = met
        self._num_seeds = num_seeds
        self._num_calls = num_calls

    async def ask(self, question: Question) -> Answer:
        self.asked.append(question)
        return Answer(
            tuple(
                Run(scenario.name, seed, 100.0, tuple(self._classes(scenario.name, seed, question)))
                for seed in question.seeds[: self._num_seeds]
                for scenario in question.scenarios
            )
        )

    def _classes(self, scenario: str, seed: int, question: Question) -> Sequence[ClassRun]:
        return [ClassRun(load.class_name, self._num_calls, self._met(scenario, seed)) for load in question.load]


def by_scenario(met: Mapping[str, int]) -> Callable[[str, int], int]:
    """With a little noise, the same in each scenario of a seed."""
    return lambda scenario, seed: min(1_000, met[scenario] + seed % 3)
