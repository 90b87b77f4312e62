"""What plans are compared with: colocated serving as it is done elsewhere. Not part of any plan.

Prefill first: while a prompt waits or is under way a step holds prompts only, whole ones as far as the budget goes, and running
sequences wait (as vLLM did before chunked prefill; the baseline of DistServe, OSDI 2024). That had no admission, and served in
order of arrival; a cap on running sequences is what its operator could set against long gaps, so it is tuned, too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product

from baton.request import Role
from bench.plan.space import Candidate, Space
from bench.sim.decode_times import FastDecodes
from bench.sim.deployment import STEP_TOKENS, Deployment
from bench.sim.engine import EngineShape
from engine.scheduler import Plan, Scheduler
from engine.timing.roofline import Roofline
from engine.timing.step_time import Efficiency, StepTime, step_time

WHOLE_PROMPTS = (2_048, STEP_TOKENS)  # budgets of a step of prompts: vLLM's least, and what a prefill worker has here
SEATS = (32, 64, 128, 256)  # running sequences: 256 was vLLM's default


class PrefillFirst(Scheduler):
    """Steps of prompts, and steps of decodes, in that order."""

    def schedule(self, now_s: float) -> Plan:
        plan, running = Plan(), list(self._running)
        budget = self._prefill(running, plan, self.tuning.max_num_batched_tokens)
        self._start(plan, budget, now_s)
        if not plan.chunks:
            self._decode(running, plan)
        return plan


@dataclass(frozen=True, slots=True)
class PrefillFirstDeployment(Deployment):
    def shape(self, role: Role) -> EngineShape:
        return replace(Deployment.shape(self, role), scheduler=PrefillFirst)


def prefill_first(space: Space, num_gpus: int, *, admits: bool) -> Iterator[Candidate]:
    """Of every width, with each budget and number of seats. `admits`: behind this router's admission, which it never had."""
    for one in space.of_size(num_gpus):
        if not one.is_colocated or one.budget != WHOLE_PROMPTS[0]:
            continue
        known, window_s = one.deployment.engine, one.window_s if admits else math.inf
        for tokens, seats in product(WHOLE_PROMPTS, SEATS):
            if seats <= known.max_num_seqs:
                engine = replace(known, max_num_batched_tokens=tokens, chunk_tokens=tokens, max_num_seqs=seats)
                yield Candidate(_prefill_first(replace(one.deployment, engine=engine)), window_s, one.usd_per_hour)


def _prefill_first(one: Deployment) -> PrefillFirstDeployment:
    return PrefillFirstDeployment(
        one.layout,
        gpu=one.gpu,
        model=one.model,
        tp=one.tp,
        weight_dtype=one.weight_dtype,
        kv_dtype=one.kv_dtype,
        measured=one.measured,
        engine=one.engine,
    )


class Perturbed:
    """GPUs whose steps take other times than a plan takes them for: each term of a step by so much longer or shorter."""

    def __init__(self, share: float, seed: int) -> None:
        """`share`: 0.2 = by 20 %, up or down as the seed says."""
        self._share = share
        self._seed = seed

    def __call__(self, deployment: Deployment) -> Deployment:
        return PerturbedDeployment(
            **{field.name: getattr(deployment, field.name) for field in fields(Deployment)},
            share=self._share,
            seed=self._seed,
        )


@dataclass(frozen=True, slots=True)
class PerturbedDeployment(Deployment):
    share: float = 0.0
    seed: int = 0

    def step_time(self, role: Role = Role.BOTH) -> StepTime:
        where = self.hardware(role)
        roofline = step_time(
            where.gpu, self.model, where.tp, weight_dtype=self.weight_dtype, kv_dtype=self.kv_dtype, measured=False
        )
        assert isinstance(roofline, Roofline), "only measured step times are none"
        return FastDecodes(replace(roofline, efficiency=_perturbed(roofline.efficiency, self.share, self.seed)))


_TIMES = ("allreduce_s", "layer_s", "step_s")  # of an Efficiency: times; the rest divide


def _perturbed(one: Efficiency[float], share: float, seed: int) -> Efficiency[float]:
    rng = random.Random(f"{seed}/step times")
    longer = {field.name: rng.choice((1 - share, 1 + share)) for field in fields(one)}
    changed = {
        name: getattr(one, name) * by if name in _TIMES else getattr(one, name) / by for name, by in longer.items()
    }
    return replace(one, **changed)
