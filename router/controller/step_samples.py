"""Steps of workers, as samples to learn from: differences of the totals that workers report. Pure.

A worker's first WARM_UP_S teach nothing: caches are cold, kernels are compiled, memory is touched for the first time. A total
that is no number or went back is a fault or a restart: counting begins anew.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from baton.v1 import worker_pb2
from router.controller.step_model import StepWork

WARM_UP_S = 30.0  # DESIGN section 9, step 1
MIN_SPAN_S = 1.0  # of a sample; routers report as often
FORGET_S = 60.0  # a worker that is heard of again after that warms up again


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Of a worker since its start: worker.proto, Load."""

    num_steps: float
    busy_s: float
    tokens: float
    context_tokens: float
    prompt_pairs: float

    @property
    def are_numbers(self) -> bool:
        return all(0 <= total < math.inf for total in astuple(self))


def totals_of(load: worker_pb2.Load) -> StepTotals:
    return StepTotals(load.num_steps, load.busy_s, load.step_tokens, load.context_tokens, load.prompt_pairs)


@dataclass(slots=True)
class _Worker:
    epoch: int
    began_s: float
    at_s: float  # of `totals`
    totals: StepTotals


class StepSamples:
    """Of all workers."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def take(self, worker_id: str, epoch: int, totals: StepTotals, now_s: float) -> tuple[StepWork, float] | None:
        """The mean of the steps since the last sample: what one computed, and its seconds. None: nothing to learn."""
        worker = self._workers.get(worker_id)
        if not totals.are_numbers:
            self._workers.pop(worker_id, None)
            return None
        if worker is None or worker.epoch != epoch or now_s - worker.at_s > FORGET_S:
            self._workers[worker_id] = _Worker(epoch, now_s, now_s, totals)
            return None
        if now_s - worker.at_s < MIN_SPAN_S:
            return None
        grown = StepTotals(*(new - old for new, old in zip(astuple(totals), astuple(worker.totals), strict=True)))
        worker.at_s, worker.totals = now_s, totals
        if not grown.are_numbers:
            self._workers[worker_id] = _Worker(epoch, now_s, now_s, totals)
            return None
        if not grown.num_steps or now_s - worker.began_s <= WARM_UP_S:
            return None
        num_steps = grown.num_steps
        work = StepWork(grown.tokens / num_steps, grown.context_tokens / num_steps, grown.prompt_pairs / num_steps)
        return work, grown.busy_s / num_steps

    def forget(self, now_s: float) -> None:
        """Let go of workers that nobody has reported for long."""
        gone = [name for name, worker in self._workers.items() if now_s - worker.at_s > FORGET_S]
        for name in gone:
            del self._workers[name]
