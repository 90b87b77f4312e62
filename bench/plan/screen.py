"""A guess of what a deployment carries, in a fluid of calls of mean length. It says what is worth simulating, and what binds.

Per call a worker needs so long for its prompt, and a share of so many decode steps. With B sequences in a step of d(B) seconds,
and a share u of the time spent on what prompts add to steps:
  pace     TPOT = d(B) / (1 - u), with B = rate x answer x TPOT (Little's law), at most the target
  memory   B x held tokens, at most the pool
  prompts  the wait for prefill is beyond the TTFT target for no more calls than the percentile allows: M/G/c with an
           exponential tail (Kingman 1962; Sakasegawa 1977 for c servers)
  gaps     a step that holds a chunk, at most the target of the p99 gap
Each limit is a rate; the least of them is the guess. Off by 10 to 30 % (docs/planner.md), which is why it decides nothing. Pure.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.request import Role
from baton.slo import SLO
from bench.plan.space import Candidate
from bench.plan.traffic import Load
from bench.sim.deployment import Deployment
from bench.sim.worker import HOP_S
from engine.timing.batch import Batch


class Limit(enum.StrEnum):
    PROMPTS = "prompts"
    PACE = "pace"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Guess:
    limits: Mapping[Limit, float]  # calls per second
    batch: int  # sequences of a decoding worker's step, at the guess
    max_batch: int  # that hold pace and fit memory, without prompts between
    alone_s: float  # a decode step of one sequence

    @property
    def rate(self) -> float:
        return min(self.limits.values())

    @property
    def binding(self) -> Limit:
        return min(self.limits, key=lambda limit: self.limits[limit])


@dataclass(frozen=True, slots=True)
class Targets:
    """The strictest of all classes: what no class may miss on a common pool."""

    ttft_s: float
    tpot_s: float
    gap_s: float
    miss_share: float

    @classmethod
    def of(cls, classes: Sequence[SLO]) -> Targets:
        gaps = [slo.itl_p99_ms for slo in classes if slo.itl_p99_ms is not None]
        return cls(
            min(slo.ttft_ms for slo in classes) / 1e3,
            min(slo.tpot_ms for slo in classes) / 1e3,
            min(gaps, default=math.inf) / 1e3,
            max(1e-3, min(1 - slo.percentile for slo in classes)),
        )


def guess(candidate: Candidate, load: Load, targets: Targets) -> Guess:
    fluid = _Fluid(candidate.deployment, load, targets)
    top = _highest(lambda rate: fluid.prompts_hold(rate) or fluid.pace_holds(rate) or fluid.memory_holds(rate), 1e-3)
    limits = {
        Limit.PROMPTS: _between(fluid.prompts_hold, top),
        Limit.PACE: _between(fluid.pace_holds, top),
        Limit.MEMORY: _between(fluid.memory_holds, top),
    }
    return Guess(limits, fluid.batch(min(limits.values())), fluid.max_batch(), fluid.decode_s(1))


def _highest(holds: Callable[[float], bool], rate: float) -> float:
    while holds(rate) and rate < 1e6:  # no cluster that is planned here serves a million calls per second
        rate *= 2
    return rate


def _between(holds: Callable[[float], bool], top: float) -> float:
    low, high = 0.0, top
    for _ in range(10):  # to a thousandth of the top
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


class _Fluid:
    """One deployment under one load."""

    def __init__(self, deployment: Deployment, load: Load, targets: Targets) -> None:
        layout = deployment.layout
        self._layout, self._load, self._targets = layout, load, targets
        self._budget = deployment.engine.max_num_batched_tokens
        self._prompt_of_full_step_s: float | None = None
        self._step_tokens = deployment.prefill_step_tokens
        self._seats = deployment.engine.max_num_seqs
        self._prefill_times = deployment.step_time(Role.PREFILL)
        decoding = Role.DECODE if layout.num_decode else Role.BOTH
        self._times = deployment.step_time(decoding)
        self._pool_tokens = deployment.shape(decoding).pool_tokens
        self._num_decoding = layout.num_decode + layout.num_both
        gap_s = deployment.token_bytes * load.prompt_tokens / deployment.nic_bytes_per_s(Role.PREFILL) / _LAYERWISE
        self._handoff_s = gap_s + 4 * HOP_S if layout.num_prefill else 0.0  # KV of the last chunk; commit, adopt
        self._decode_s: dict[int, float] = {}  # by batch
        self._adds_s: dict[int, float] = {}
        self._local_share = self._share_of_local_prompts(deployment.local_prefill_tokens)

    def _share_of_local_prompts(self, limit: int) -> float:
        """Of prompt tokens: what decode workers compute themselves."""
        prompts = self._load.prompts
        return sum(one for one in prompts if one <= limit) / sum(prompts)

    # Prompts

    def _prompt_s(self) -> float:
        """Of a prefill worker that has a queue: its share of a full step."""
        if self._prompt_of_full_step_s is not None:
            return self._prompt_of_full_step_s
        tokens = self._load.computed_tokens
        together = max(1, int(self._step_tokens // tokens))
        before = max(0, round(self._load.prompt_tokens - tokens))
        step_s = self._prefill_times.step_s(Batch(((round(tokens), before),) * together))
        self._prompt_of_full_step_s = step_s / together
        return self._prompt_of_full_step_s

    def _added_s(self, batch: int) -> float:
        """What a prompt adds to the steps of `batch` decodes."""
        if batch not in self._adds_s:
            self._adds_s[batch] = self._new_added_s(batch)
        return self._adds_s[batch]

    def _new_added_s(self, batch: int) -> float:
        chunk = self._chunk(batch)
        before = round(self._load.prompt_tokens / 2)
        with_s = self._times.step_s(Batch(((round(chunk), before),), batch, round(batch * self._load.held_tokens)))
        return (with_s - self.decode_s(batch)) * self._load.computed_tokens / chunk

    def _chunk(self, batch: int) -> float:
        """Of one prompt, beside so many decodes."""
        return min(float(max(1, self._budget - batch)), self._load.computed_tokens)

    def _shipped_share(self, rate: float) -> float:
        """Of prompts: those that prefill workers take, as many as they can hold."""
        layout = self._layout
        if not layout.num_prefill:
            return 0.0
        wanted = 1 - self._local_share
        if not layout.num_both:
            return wanted
        room = 0.8 * layout.num_prefill / self._prompt_s()  # DESIGN section 9 (5) sizes prefill for it
        return min(wanted, room / rate) if rate else wanted

    def prompts_hold(self, rate: float) -> bool:
        shipped = self._shipped_share(rate)
        if shipped and not self._in_time(rate * shipped, self._prompt_s(), self._layout.num_prefill):
            return False
        own = (1 - shipped) * rate
        if not own:
            return True
        batch = self.batch(rate)
        chunks = self._load.computed_tokens / max(1, self._budget - batch)
        mixed_s = self.decode_s(batch) + self._added_s(batch) / max(1.0, chunks)
        return self._in_time(own, mixed_s * chunks, self._num_decoding)

    def _in_time(self, rate: float, prompt_s: float, num_workers: int) -> bool:
        spare_s = self._targets.ttft_s - prompt_s - 4 * HOP_S
        use = rate * prompt_s / num_workers
        if spare_s <= 0 or use >= 1:
            return False
        spread = (self._load.gap_cv2 + self._load.prompt_cv2) / 2
        mean_wait_s = prompt_s * max(spread, 0.05) / (num_workers * (1 - use))
        waits = use ** (math.sqrt(2 * (num_workers + 1)) - 1)
        return bool(waits * math.exp(-spare_s / mean_wait_s) <= self._targets.miss_share)

    # Decodes

    def decode_s(self, batch: int) -> float:
        if batch not in self._decode_s:
            context_tokens = round(batch * self._load.held_tokens)
            self._decode_s[batch] = self._times.decode_steps_s(batch, context_tokens, 1)
        return self._decode_s[batch]

    def _busy_with_prompts(self, rate: float, batch: int) -> float:
        own = rate * (1 - self._shipped_share(rate))
        return own * self._added_s(batch) / self._num_decoding if own else 0.0

    def batch(self, rate: float) -> int:
        """Of a decoding worker, so that as many tokens come out as are wanted; more than ever fit where that is impossible."""
        per_worker = rate * self._load.output_tokens / self._num_decoding

        def too_few(batch: int) -> bool:
            left = 1 - self._busy_with_prompts(rate, batch)
            return left <= 0 or batch * left < per_worker * self.decode_s(batch)

        low, high = 0, 1
        while too_few(high):
            low, high = high, 2 * high
            if high > 4 * self._seats:
                return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if too_few(middle) else (low, middle)
        return high

    def pace_holds(self, rate: float) -> bool:
        batch = self.batch(rate)
        if batch > self._seats:
            return False
        crowded = batch + math.ceil(math.sqrt(batch))  # a deviation above the mean
        left = 1 - self._busy_with_prompts(rate, batch)
        if left <= 0:
            return False
        token_s = self.decode_s(crowded) / left + self._handoff_s / max(1.0, self._load.output_tokens - 1)
        return token_s <= self._targets.tpot_s and self._longest_step_s(rate, crowded) <= self._targets.gap_s

    def _longest_step_s(self, rate: float, batch: int) -> float:
        if not self._busy_with_prompts(rate, batch):
            return self.decode_s(batch)
        chunk = self._chunk(batch)
        return self._times.step_s(Batch(((round(chunk), 0),), batch, round(batch * self._load.held_tokens)))

    def memory_holds(self, rate: float) -> bool:
        batch = self.batch(rate)
        return (batch + math.sqrt(batch)) * self._load.held_tokens <= self._pool_tokens

    def max_batch(self) -> int:
        """Of decodes alone."""

        def fits(batch: float) -> bool:
            num = int(batch)
            in_memory = num * self._load.held_tokens <= self._pool_tokens
            return bool(in_memory) and num <= self._seats and self.decode_s(max(1, num)) <= self._targets.tpot_s

        return int(_between(fits, float(self._seats + 1)))


_LAYERWISE = 4.0  # a prompt's KV leaves chunk by chunk: about the last quarter is still to be sent when it is computed
