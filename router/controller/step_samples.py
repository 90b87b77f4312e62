"""Steps of workers, as samples to learn from: differences of the totals that workers report. Pure.

Steps that compute prompts and steps that only decode are samples of their own: the mean of both is a step that never was, and a
model of a sum of terms with a `max` among them, learned from such means, takes either kind for longer than it is. A worker's
first WARM_UP_S teach nothing: caches are cold, kernels are compiled, memory is touched for the first time. A total that is no
number or went back is a fault or a restart: counting begins anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.v1 import worker_pb2
from router.controller.step_model import StepWork

WARM_UP_S = 30.0  # DESIGN section 9, step 1
MIN_SPAN_S = 1.0  # of a sample; routers report as often
FORGET_S = 60.0  # a worker that is heard of again after that warms up again


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Of a worker's steps of one kind, since its start."""

    num_steps: float
    busy_s: float
    tokens: float
    context_tokens: float
    prompt_pairs: float

    @property
    def _numbers(self) -> tuple[float, ...]:  # astuple copies deeply, and each look asks this of each worker
        return self.num_steps, self.busy_s, self.tokens, self.context_tokens, self.prompt_pairs

    @property
    def are_numbers(self) -> bool:
        return all(0 <= total < math.inf for total in self._numbers)

    def less(self, other: StepTotals) -> StepTotals:
        return StepTotals(*(mine - its for mine, its in zip(self._numbers, other._numbers, strict=True)))

    @property
    def mean(self) -> Sample:
        """One step. There is at least one."""
        num = self.num_steps
        return StepWork(self.tokens / num, self.context_tokens / num, self.prompt_pairs / num), self.busy_s / num


Kinds = tuple[StepTotals, ...]
Sample = tuple[StepWork, float]  # what a step computed, and its seconds


def totals_of(load: worker_pb2.Load) -> Kinds:
    """Of steps that only decoded, and of those that computed prompts. A worker of an earlier release tells of no kinds: all of
    its steps are the first one."""
    prompts = StepTotals(
        load.num_prompt_steps,
        load.prompt_steps_busy_s,
        load.prompt_steps_tokens,
        load.prompt_steps_context_tokens,
        load.prompt_pairs if load.num_prompt_steps else 0.0,
    )
    every = StepTotals(load.num_steps, load.busy_s, load.step_tokens, load.context_tokens, load.prompt_pairs)
    return every.less(prompts), prompts


@dataclass(slots=True)
class _Worker:
    epoch: int
    began_s: float
    at_s: float  # of `kinds`
    kinds: Kinds


class StepSamples:
    """Of all workers."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def take(self, worker_id: str, epoch: int, kinds: Kinds, now_s: float) -> list[Sample]:
        """The mean of the steps of each kind since the last sample; empty: nothing to learn. `kinds`: always as many."""
        worker = self._workers.get(worker_id)
        if not all(totals.are_numbers for totals in kinds):
            self._workers.pop(worker_id, None)
            return []
        if worker is None or worker.epoch != epoch or now_s - worker.at_s > FORGET_S:
            self._workers[worker_id] = _Worker(epoch, now_s, now_s, kinds)
            return []
        if now_s - worker.at_s < MIN_SPAN_S:
            return []
        grown = [new.less(old) for new, old in zip(kinds, worker.kinds, strict=True)]
        worker.at_s, worker.kinds = now_s, kinds
        if not all(
            steps.are_numbers for steps in grown if steps.num_steps
        ):  # of none, seconds may be a rounding below 0
            self._workers[worker_id] = _Worker(epoch, now_s, now_s, kinds)
            return []
        if now_s - worker.began_s <= WARM_UP_S:
            return []
        return [steps.mean for steps in grown if steps.num_steps]

    def forget(self, now_s: float) -> None:
        """Let go of workers that nobody has reported for long."""
        gone = [name for name, worker in self._workers.items() if now_s - worker.at_s > FORGET_S]
        for name in gone:
            del self._workers[name]
