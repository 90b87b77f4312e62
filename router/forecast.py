"""What a call could expect of each worker: when its first token comes, how long each further one takes. Pure arrays.

    ttft_s = (waiting_tokens + lacking_tokens) / prefill_tokens_per_s                      [+ step_s on a decode worker]
    tpot_s = step_s + step_s_per_seq + step_s_per_token * prompt_tokens

Everything comes from what workers report: speeds from router/rates.py; a step's marginal costs from StepModel, which learns
them from all steps of like workers. A pull may shorten ttft_s: router/flow_back.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.v1 import worker_pb2
from router.worker_table import Floats, Mask, WorkerTable

STEPS_PER_SAMPLE = 16  # of the step model: learning costs 20 us
STEP_MEMORY = 1 - 1 / 256  # per sample: a pool of 8 workers, sampled each 16 steps, forgets within 512 steps of each
MIN_STEP_SAMPLES = 32  # below it three parameters are fitted to noise
RIDGE = 1e-3  # of the normalised normal equations: what the samples do not tell apart stays near 0


@dataclass(frozen=True, slots=True)
class Forecasts:
    """Of one sequence on every worker, [rows]."""

    lacking_tokens: Floats  # of the prompt, to be computed
    queue_s: Floats
    compute_s: Floats  # of what is lacking
    ttft_s: Floats  # where the worker computes all that it lacks
    tpot_s: Floats


def forecast(workers: WorkerTable, prompt_tokens: int) -> Forecasts:
    lacking = prompt_tokens - workers.cached_tokens
    queue_s = workers.waiting_tokens / workers.prefill_tokens_per_s
    compute_s = lacking / workers.prefill_tokens_per_s
    tpot_s = workers.step_s + workers.step_s_per_seq + workers.step_s_per_token * prompt_tokens
    return Forecasts(lacking, queue_s, compute_s, queue_s + compute_s, tpot_s)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Prompts that wait to be computed."""

    num_workers: int  # that compute prompts
    waiting_tokens: int  # in all
    shortest_s: float  # until the first of these workers has nothing to do
    mean_s: float  # until one of them has, on average


def backlog(workers: WorkerTable, rows: Mask) -> Backlog:
    """The work that waits on these rows."""
    queue_s = workers.waiting_tokens[rows] / workers.prefill_tokens_per_s[rows]
    if not len(queue_s):
        return Backlog(0, 0, 0.0, 0.0)
    return Backlog(len(queue_s), int(workers.waiting_tokens[rows].sum()), float(queue_s.min()), float(queue_s.mean()))


@dataclass(slots=True)
class DecodeSteps:
    """How long the steps of one worker take that only decode. One that computes a prompt, too, says nothing of what one more
    sequence adds: a model that learned from those would leave a decode worker that has helped with prompts one seat."""

    _num_steps: int | None = (
        None  # by the last sample; None: none yet, and what was before the first is of other batches
    )
    _busy_s: float = 0.0

    def take(self, load: worker_pb2.Load) -> float:
        """The mean, seconds, since the last sample; 0 = too few steps since then, or nothing that a step can take."""
        num_steps, busy_s = load.num_steps - load.num_prompt_steps, load.busy_s - load.prompt_steps_busy_s
        if not math.isfinite(busy_s):
            return 0.0
        if self._num_steps is None:
            self._num_steps, self._busy_s = num_steps, busy_s
        num_new, spent_s = num_steps - self._num_steps, busy_s - self._busy_s
        if num_new < STEPS_PER_SAMPLE:
            return 0.0
        self._num_steps, self._busy_s = num_steps, busy_s
        if not load.busy_s:  # an earlier release tells of no totals
            return 1e-3 * load.step_ms
        return max(0.0, spent_s / num_new)


@dataclass(slots=True)
class StepModel:
    """How a decode step's length grows with sequences and KV: t = base + per_seq * n + per_token * kv, least squares.

    One for workers that are alike. Old samples fade. Until there are enough, and where the fit says less than nothing, growth
    is 0: the step's length as measured is the forecast.
    """

    base_s: float = 0.0
    per_seq_s: float = 0.0
    per_token_s: float = 0.0
    _num_samples: int = 0
    _products: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, 3)))  # fading sums of x x'
    _sums: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))  # and of x t

    def observe(self, num_running: int, used_tokens: float, step_s: float) -> None:
        """Take a step; some microseconds, so not every one."""
        x = np.array((1.0, num_running, used_tokens))
        self._products = STEP_MEMORY * self._products + np.outer(x, x)
        self._sums = STEP_MEMORY * self._sums + x * step_s
        self._num_samples += 1
        if self._num_samples % MIN_STEP_SAMPLES == 0:
            self._fit()

    def _fit(self) -> None:
        scale = np.sqrt(np.diag(self._products))
        if not scale.all():
            return
        normal = self._products / np.outer(scale, scale) + RIDGE * np.eye(3)
        base, per_seq, per_token = np.linalg.solve(normal, self._sums / scale) / scale
        if min(per_seq, per_token) < 0:  # batch and KV grow together: what one does not explain the other does
            per_seq, per_token = self._kv_only(scale)
        self.base_s, self.per_seq_s, self.per_token_s = max(0.0, base), max(0.0, per_seq), max(0.0, per_token)

    def _kv_only(self, scale: npt.NDArray[np.float64]) -> tuple[float, float]:
        pick = [0, 2]
        normal = self._products[np.ix_(pick, pick)] / np.outer(scale[pick], scale[pick]) + RIDGE * np.eye(2)
        _, per_token = np.linalg.solve(normal, self._sums[pick] / scale[pick]) / scale[pick]
        return 0.0, float(per_token)

    def grow_s(self, num_seqs: float, num_tokens: float) -> float:
        """What so many more sequences and tokens add to a step."""
        return self.per_seq_s * num_seqs + self.per_token_s * num_tokens
