"""The deployment and the times that every policy is measured with. Plain data.

8B on one A100 per worker, bf16, long prompts and answers: a call takes seconds of a GPU, so a fleet of some eight workers is
loaded by one or two calls a second, and hours of it are simulated in seconds. 16 seats, so that decode workers are short of them
long before memory is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from baton.config import EngineConfig
from baton.request import Role
from baton.slo import SLO
from bench.sim import simulation
from bench.sim.deployment import Deployment, Layout
from bench.traces import TraceRow
from engine.timing.step_time import Batch
from router.controller.autoscaler.scaler import Times

SEATS = 16
BLOCK_TOKENS = 512  # coarser than a real one's 16: as exact for times, and quicker (docs/simulator.md)
CACHED_BLOCK_TOKENS = 16
CHAT = SLO("chat", ttft_ms=10_000.0, tpot_ms=30.0)  # three times a 32k prompt's own prefill; twice a full batch's step
# A lane has some 0.2 s of work before it is given more, since prompts take seconds here: the default's 10 ms are for prompts of
# tens of milliseconds, and looking at who waits 20 times as often is most of what such a simulation takes
BOUNDS = replace(simulation.BOUNDS, window_s=0.2)
TIMES = Times()  # tick 10 s, start-up 60 s, flip 1 s once idle, dwell 60 s, shrink after two start-ups


def deployment(layout: Layout, *, caches: bool = False) -> Deployment:
    """`caches`: prefix caches, and blocks as fine as the trace's."""
    return Deployment(
        layout,
        gpu="a100",
        model="llama-3.1-8b",
        weight_dtype="bf16",
        engine=EngineConfig(
            block_size=CACHED_BLOCK_TOKENS if caches else BLOCK_TOKENS,
            max_num_seqs=SEATS,
            max_num_batched_tokens=2_048,
            chunk_tokens=512,
            prefix_cache=caches,
            max_queued_seqs=sys.maxsize,
        ),
        measured=False,
    )


@dataclass(frozen=True, slots=True)
class CallCost:
    """Of one call on workers of this deployment, when they are as busy as they should be."""

    prefill_s: float  # of a prefill worker
    decode_s: float  # of a decode worker, a full batch sharing its steps

    @property
    def gpu_s(self) -> float:
        return self.prefill_s + self.decode_s


class Costs:
    """What calls cost, from the simulator's own step times; the same for equal lengths."""

    def __init__(self, targets: SLO = CHAT) -> None:
        like = deployment(Layout(1, 1))
        self._prefill, self._decode = like.step_time(Role.PREFILL), like.step_time(Role.DECODE)
        self._budget = like.prefill_step_tokens
        self.kv_tokens = like.shape(Role.DECODE).pool_tokens
        self._tpot_s = targets.tpot_ms / 1e3
        self._known: dict[tuple[int, int, int], CallCost] = {}

    def of_all(self, rows: Sequence[TraceRow], *, caches: bool) -> list[CallCost]:
        """`caches`: what a prompt begins with in common with an earlier one costs nothing, as if no cache were ever full."""
        seen: set[int] = set()
        costs = []
        for row in rows:
            num_known = sum(1 for _ in takewhile(seen.__contains__, row.block_ids)) if caches else 0
            seen.update(row.block_ids)
            costs.append(self._of(row, min(num_known * row.block_tokens, row.input_tokens - 1)))
        return costs

    def _of(self, row: TraceRow, num_cached: int) -> CallCost:
        key = (row.input_tokens, num_cached, row.output_tokens)
        if key not in self._known:
            context = row.input_tokens + row.output_tokens / 2
            batch = self.batch(context)
            decode_s = row.output_tokens * self.step_s(batch, batch * context) / batch
            self._known[key] = CallCost(self.prompt_s(row.input_tokens, num_cached), decode_s)
        return self._known[key]

    def prompt_s(self, tokens: int, num_cached: int = 0) -> float:
        """Alone, in steps of the budget."""
        total_s, done = 0.0, num_cached
        while done < tokens:
            chunk = min(self._budget, tokens - done)
            total_s += self._prefill.step_s(Batch(((chunk, done),)))
            done += chunk
        return total_s

    def step_s(self, num_seqs: float, context_tokens: float) -> float:
        return self._decode.decode_steps_s(max(1, round(num_seqs)), round(context_tokens), 1)

    def batch(self, context: float) -> int:
        """The most sequences of this context that have seats and room, and whose step keeps the TPOT target."""
        batch = max(1, min(SEATS, int(self.kv_tokens / context)))
        while batch > 1 and self.step_s(batch, batch * context) > self._tpot_s:
            batch -= 1
        return batch
