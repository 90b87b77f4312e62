"""Two claims about disaggregation as verdicts of the simulator: what a pair of GPUs gains, and from how many GPUs on.

Colocated workers are tuned: the best of two chunk sizes and budgets stands, and on two GPUs of different kinds each takes what it
can, as if a router divided the calls without loss. All step times are rooflines: GPUs are compared by one yardstick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from baton.config import EngineConfig
from baton.slo import SLO
from bench.plan.judge import Judge
from bench.plan.space import OWN_WINDOW_S, SHIPPING_WINDOW_S, Candidate
from bench.plan.traffic import Drawn
from bench.sim.deployment import MAX_NUM_SEQS, Deployment, Hardware, Layout
from bench.sim.simulation import Mix
from bench.workload import Lengths

ATTAINMENT = 0.9  # the knee of DistServe (OSDI 2024): the highest rate at which so many calls are within their targets
BLOCK_SIZE = 64  # quicker to simulate than 16; the same attainment: docs/simulator.md


@dataclass(frozen=True, slots=True)
class Setting:
    """One model under one traffic: Poisson calls of uniform lengths, half to one and a half times the mean."""

    model: str
    tp: int
    prompt_tokens: int
    answer_tokens: int
    ttft_ms: float
    tpot_ms: float

    @property
    def name(self) -> str:
        return (
            f"{self.model} x{self.tp}, {self.prompt_tokens}/{self.answer_tokens},"
            f" {self.ttft_ms / 1e3:g} s / {self.tpot_ms:g} ms"
        )

    @property
    def slo(self) -> SLO:
        return SLO("chat", self.ttft_ms, self.tpot_ms, percentile=ATTAINMENT)

    @property
    def traffic(self) -> Drawn:
        return Drawn(1.0, _around(self.prompt_tokens), _around(self.answer_tokens))


def _around(mean: int) -> Lengths:
    return Lengths(mean // 2, mean // 2 * 3)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Of a worker that does both."""

    chunk_tokens: int
    step_tokens: int

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=self.step_tokens,
            chunk_tokens=self.chunk_tokens,
            prefix_cache=False,
            max_queued_seqs=sys.maxsize,
        )


CHUNKED = (Tuning(512, 2_048), Tuning(256, 512))
WHOLE_PROMPTS = Tuning(8_192, 8_192)  # no chunks: a prompt holds all streams up until it is done


@dataclass(frozen=True, slots=True)
class Effort:
    num_calls: int = 600  # of a trial, at least
    seeds: Sequence[int] = (1,)


class Bench:
    """Knees of one setting, means over seeds, calls per second."""

    def __init__(self, setting: Setting, effort: Effort) -> None:
        self.setting = setting
        self._effort = effort
        self._judge = Judge(setting.traffic, Mix((setting.slo,)))

    @property
    def num_calls(self) -> int:
        """Simulated so far."""
        return self._judge.num_calls

    def knee(self, layout: Layout, gpu: str, tuning: Tuning, guess: float, decode_gpu: str = "") -> float:
        setting = self.setting
        deployment = Deployment(
            layout,
            gpu=gpu,
            model=setting.model,
            tp=setting.tp,
            decode_hardware=Hardware(decode_gpu, setting.tp) if decode_gpu else None,
            measured=False,
            engine=tuning.engine,
        )
        window_s = SHIPPING_WINDOW_S if layout.num_prefill else OWN_WINDOW_S
        candidate = Candidate(deployment, window_s, deployment.usd_per_hour)
        seeds, num_calls = self._effort.seeds, self._effort.num_calls
        knees = [self._judge.knee(candidate, guess, num_calls=num_calls, seed=seed) for seed in seeds]
        return sum(knee.rate for knee in knees) / len(knees)

    def colocated(self, num_workers: int, gpu: str, guess: float, tunings: Sequence[Tuning] = CHUNKED) -> float:
        return max(self.knee(Layout(num_both=num_workers), gpu, tuning, guess) for tuning in tunings)


# -- a pair ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """Knees, calls per second: prefill on an H100 and decode on an H200 beside the same two, each for itself."""

    setting: Setting
    disaggregated: float
    h100: float
    h200: float
    whole_prompts: float  # both, colocated without chunks
    num_calls: int

    @property
    def gain(self) -> float:
        return self.disaggregated / (self.h100 + self.h200)

    @property
    def gain_over_one(self) -> float:
        """Two workers beside one: what it is not fair to compare, but may have been."""
        return self.disaggregated / self.h200

    @property
    def gain_over_whole_prompts(self) -> float:
        return self.disaggregated / self.whole_prompts

    def tokens_per_s(self, rate: float) -> float:
        """Of answers within their targets."""
        return ATTAINMENT * rate * self.setting.answer_tokens


def pair(setting: Setting, effort: Effort) -> Pair:
    bench = Bench(setting, effort)
    h100 = bench.colocated(1, "h100", 5.0)
    h200 = bench.colocated(1, "h200", h100)
    whole = sum(bench.colocated(1, gpu, h100, [WHOLE_PROMPTS]) for gpu in ("h100", "h200"))
    both = bench.knee(Layout(1, 1), "h100", CHUNKED[0], h100 + h200, decode_gpu="h200")
    return Pair(setting, both, h100, h200, whole, bench.num_calls)


# -- from how many on --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fleet:
    """Knees of so many workers on H100s, calls per second."""

    setting: Setting
    num_workers: int
    num_prefill: int  # of the best division
    disaggregated: float
    colocated: float
    num_calls: int

    @property
    def num_gpus(self) -> int:
        return self.num_workers * self.setting.tp

    @property
    def gain(self) -> float:
        return self.disaggregated / self.colocated


def fleets(setting: Setting, sizes: Sequence[int], effort: Effort) -> list[Fleet]:
    """`sizes`: workers. What was found for one size is the guess for the next."""
    bench = Bench(setting, effort)
    found: list[Fleet] = []
    per_worker, prefill_share = 5.0, 0.5
    for num_workers in sizes:
        guess = per_worker * num_workers
        colocated = bench.colocated(num_workers, "h100", guess)
        divided = {
            num_prefill: bench.knee(Layout(num_prefill, num_workers - num_prefill), "h100", CHUNKED[0], guess)
            for num_prefill in divisions_near(prefill_share * num_workers, num_workers)
        }
        best = max(divided, key=divided.__getitem__)
        found.append(Fleet(setting, num_workers, best, divided[best], colocated, bench.num_calls))
        per_worker = max(colocated, divided[best]) / num_workers
        prefill_share = best / num_workers
    return found


def divisions_near(num_prefill: float, num_workers: int) -> list[int]:
    """Numbers of prefill workers around it that leave at least one on either side."""
    middle = round(num_prefill)
    return [num for num in range(middle - 1, middle + 2) if 1 <= num < num_workers]
