"""Whether a prompt's cached beginning is computed again or pulled from the decode worker that caches it. Pure.

Both forecast the time to the first token, in seconds; the least wins, the simpler one where they are equal:

    Compute   queue + lacking(prefill) / rate
    Pull      max(queue, overhead + holder's step + bytes / bandwidth) + lacking(holder) / rate

queue = prompt tokens ahead / rate. A pull runs while the prompts ahead are computed, so only what sticks out of the queue
counts. A holder carries out what it is asked between two of its steps, so one of them is waited for. The third way, to prefill
where the conversation is, is a choice of place: router/placement.py. Rates and overhead are measured: router/rates.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from router.forecast import Forecasts
from router.rates import PULL_OVERHEAD_S
from router.worker_table import Floats, Mask, WorkerSnapshot, WorkerTable

if TYPE_CHECKING:
    from router.placement import Choice, Outlook

Number = TypeVar("Number", float, Floats)


@dataclass(frozen=True, slots=True)
class Compute:
    forecast_s: float


@dataclass(frozen=True, slots=True)
class Pull:
    worker_id: str  # the holder
    num_blocks: int  # leading ones of the prompt that it caches
    nbytes: int  # that the prefill worker lacks of them
    forecast_s: float


Decision = Compute | Pull


@dataclass(frozen=True, slots=True)
class Plan:
    """A Choice, completed by what is done about the prompt's cached beginning."""

    choice: Choice
    lacking_tokens: int  # of the prompt, to be computed
    pull: Pull | None = None
    forgone: bool = False  # a pull was possible, and something else is quicker


def best_holder(workers: WorkerTable, lenders: Mask, used_share: Floats) -> int | None:
    """Of `lenders` the one that caches most of the prompt; of those that cache the same the one with most room."""
    cached = workers.cached_tokens * lenders
    row = int((cached - used_share).argmax())
    return row if cached[row] else None


def pulled(workers: WorkerTable, prompt_tokens: int, forecasts: Forecasts, holder: int) -> tuple[Floats, Floats]:
    """When every row that pulls from `holder` has what that one caches, and computing the rest, [rows] each; inf for who cannot.

    A row that caches more than the holder gains nothing by it: its rest is longer than what it lacks.
    """
    num_cached = workers.cached_tokens[holder]
    nbytes = (num_cached - workers.cached_tokens) * workers.token_bytes[holder]
    ready_s = np.maximum(forecasts.queue_s, _move_s(nbytes, workers.kv_bytes_per_s, workers.step_s[holder]))
    ready_s += workers.pull_cost(holder)
    return ready_s, (prompt_tokens - num_cached) / workers.prefill_tokens_per_s


def _move_s(nbytes: Number, bytes_per_s: Number, step_s: float) -> Number:
    return PULL_OVERHEAD_S + step_s + nbytes / bytes_per_s


def plan(choice: Choice, outlook: Outlook) -> Plan:
    """Complete a Choice."""
    workers, row, holder = outlook.workers, choice.prefill_row, outlook.holder
    lacking = int(outlook.forecasts.lacking_tokens[row])
    if choice.local or holder is None:
        return Plan(choice, lacking)
    num_cached = int(workers.cached_tokens[holder])
    nbytes = int((num_cached - workers.cached_tokens[row]) * workers.token_bytes[holder])
    if not outlook.pulls(row):
        return Plan(choice, lacking, forgone=nbytes > 0 and workers.pull_cost(holder)[row] == 0)
    pull = Pull(workers.name(holder), num_cached // int(workers.block_size[holder]), nbytes, choice.ttft_s)
    return Plan(choice, outlook.demand.prompt_tokens - num_cached, pull)


def options(prompt_tokens: int, prefill: WorkerSnapshot, holders: Iterable[WorkerSnapshot]) -> list[Decision]:
    """What could be done with one prompt, Compute first. `holders`: those that can lend what they cache of it."""
    found: list[Decision] = [compute(prompt_tokens, prefill)]
    return found + [pull_from(prompt_tokens, prefill, h) for h in holders if h.cached_tokens > prefill.cached_tokens]


def best(decisions: Sequence[Decision]) -> Decision:
    """The first of those with the least forecast."""
    return min(decisions, key=lambda decision: decision.forecast_s)


def compute(prompt_tokens: int, prefill: WorkerSnapshot) -> Compute:
    return Compute(_compute_s(prefill.waiting_tokens + prompt_tokens - prefill.cached_tokens, prefill))


def pull_from(prompt_tokens: int, prefill: WorkerSnapshot, holder: WorkerSnapshot) -> Pull:
    assert holder.root is not None, "nothing is cached under no root"
    nbytes = (holder.cached_tokens - prefill.cached_tokens) * holder.token_bytes
    ready_s = max(_compute_s(prefill.waiting_tokens, prefill), _move_s(nbytes, prefill.kv_bytes_per_s, holder.step_s))
    num_blocks = holder.cached_tokens // holder.root.block_size
    forecast_s = ready_s + _compute_s(prompt_tokens - holder.cached_tokens, prefill)
    return Pull(holder.worker_id, num_blocks, nbytes, forecast_s)


def _compute_s(num_tokens: int, prefill: WorkerSnapshot) -> float:
    return num_tokens / prefill.prefill_tokens_per_s
