"""What else could decide sizes: nothing at all, or each pool by itself. Pure; all implement Scaler.

static      the layout that it begins with
scale-only  each pool as large as its work needs, up at once, down to the most that was needed in a window, never flipped: what a
            Kubernetes HorizontalPodAutoscaler does (its stabilizationWindowSeconds is 300 by default), given a better signal than
            it has: the work that arrives, measured in seconds of a worker
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.request import Role
from bench.control.oracle import least_work
from router.controller.autoscaler.acts import Create, Drain, Proposal, Undrain
from router.controller.autoscaler.facts import ClassTraffic, FleetFacts, State
from router.controller.step_model import StepWork, Terms

POOLS = (Role.PREFILL, Role.DECODE)
_HERE = (State.READY, State.PENDING, State.FLIPPING, State.FAILED)


class Static:
    def look(self, facts: FleetFacts) -> Sequence[Proposal]:
        return ()


@dataclass(frozen=True, slots=True)
class ScaleOnlySetting:
    busy: float  # share of a worker's time that its pool is sized for
    window_s: float  # in which the largest size holds
    foresees: bool = True  # goes by the forecast where that is more

    def __str__(self) -> str:
        return f"busy {self.busy:g}, window {self.window_s:g} s{', forecast' if self.foresees else ''}"


SCALE_ONLY_SETTINGS = (
    ScaleOnlySetting(0.85, 60.0),
    ScaleOnlySetting(0.7, 60.0),
    ScaleOnlySetting(0.7, 300.0),
)


class ScaleOnly:
    def __init__(self, setting: ScaleOnlySetting) -> None:
        self._setting = setting
        self._needed: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in POOLS}

    def look(self, facts: FleetFacts) -> Sequence[Proposal]:
        traffic = [one for one in facts.classes if _is_known(one)]
        if not traffic and any(one.rate is None or math.isnan(one.rate) for one in facts.classes):
            return ()  # nobody knows anything
        return [proposal for role in POOLS for proposal in resize(facts, role, self._size(facts, role, traffic))]

    def _size(self, facts: FleetFacts, role: Role, traffic: Sequence[ClassTraffic]) -> int:
        busy = sum(self._rate(one) * worker_s(facts, role, one) for one in traffic)
        needed, window = max(1, math.ceil(busy / self._setting.busy)), self._needed[role]
        window.append((facts.now_s, needed))
        while window[0][0] < facts.now_s - self._setting.window_s:
            window.popleft()
        return max(size for _, size in window)

    def _rate(self, traffic: ClassTraffic) -> float:
        rate, coming = traffic.rate or 0.0, traffic.coming_rate or 0.0
        return max(rate, coming) if self._setting.foresees else rate


def _is_known(traffic: ClassTraffic) -> bool:
    numbers = (traffic.rate, traffic.prompt_tokens, traffic.output_tokens, traffic.prompt_pairs, traffic.cached_tokens)
    return all(number is not None and math.isfinite(number) for number in numbers)


# -- work --------------------------------------------------------------------------------------------------------------


def worker_s(facts: FleetFacts, role: Role, traffic: ClassTraffic) -> float:
    """That a call takes of a worker of this pool, in steps as full as they get."""
    terms, blueprint = facts.steps[role], facts.blueprints[role]
    prompt, output = traffic.prompt_tokens or 0.0, traffic.output_tokens or 0.0
    if role is Role.PREFILL:
        lacking, budget = prompt - (traffic.cached_tokens or 0.0), blueprint.most.max_num_batched_tokens
        full_s = terms.step_s(StepWork(budget))
        return full_s * lacking / budget + terms.s_per_pair * (traffic.prompt_pairs or 0.0)
    context = prompt + output / 2
    batch = largest_batch(terms, context, traffic.slo.tpot_ms / 1e3, blueprint.most.max_num_seqs, blueprint.kv_tokens)
    return output * terms.step_s(StepWork(batch, batch * context)) / batch


def largest_batch(terms: Terms, context: float, tpot_s: float, seats: int, kv_tokens: int) -> int:
    """That has seats and room, and keeps the target; at least one sequence."""
    batch = max(1, min(seats, int(kv_tokens / context) if kv_tokens and context else seats))
    while batch > 1 and terms.step_s(StepWork(batch, batch * context)) > tpot_s:
        batch -= 1
    return batch


# -- sizes -------------------------------------------------------------------------------------------------------------


def resize(facts: FleetFacts, role: Role, size: int) -> Iterator[Proposal]:
    """Bring one pool to a size: who drains is taken back first, then others are created; or the least busy drain."""
    here = [worker for worker in facts.workers if worker.role is role and worker.state in _HERE]
    why = f"{len(here)} {role.name.lower()} workers, {size} wanted"
    if (missing := size - len(here)) > 0:
        leaving = [w for w in facts.workers if w.role is role and w.state is State.DRAINING][:missing]
        yield from (Proposal(Undrain(worker.worker_id), why) for worker in leaving)
        shape = facts.blueprints[role].shape
        yield from (Proposal(Create(role, shape), why) for _ in range(missing - len(leaving)))
    ready = sorted((worker for worker in here if worker.state is State.READY), key=least_work)
    yield from (Proposal(Drain(worker.worker_id), why) for worker in ready[: max(0, -missing)])
