"""Whether a prompt's cached beginning is computed again, pulled from the decode worker that caches it, or used there. Pure.

All three forecast the time to the first token, in seconds; the least wins, the simpler one where they are equal:

    Compute          queue + lacking(prefill) / rate
    Pull             max(queue, overhead + holder's step + bytes / bandwidth) + lacking(holder) / rate
    PrefillOnDecode  queue there + holder's step + lacking(holder) / rate

queue = prompt tokens ahead / rate. A pull runs while the prompts ahead are computed, so only what sticks out of the queue
counts. A holder carries out what it is asked between two of its steps, so one of them is waited for. Decode workers are taken
to compute as fast as the prefill worker does; what they may compute is short (`local_prefill_tokens`), since it holds up the
sequences that decode there. Rates and overhead are measured: router/rates.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from router.placement import Choice, Demand, WorkerSnapshot, can_decode, can_lend
from router.rates import PULL_OVERHEAD_S


@dataclass(frozen=True, slots=True)
class Compute:
    forecast_s: float


@dataclass(frozen=True, slots=True)
class Pull:
    worker_id: str  # the holder
    num_blocks: int  # leading ones of the prompt that it caches
    nbytes: int  # that the prefill worker lacks of them
    forecast_s: float


@dataclass(frozen=True, slots=True)
class PrefillOnDecode:
    worker_id: str
    forecast_s: float


Decision = Compute | Pull | PrefillOnDecode


@dataclass(frozen=True, slots=True)
class Plan:
    """A Choice, completed by what is done about the prompt's cached beginning."""

    choice: Choice
    lacking_tokens: int  # of the prompt, to be computed
    pull: Pull | None = None
    forgone: bool = False  # a pull was possible, and something else is quicker


def plan(
    choice: Choice,
    demand: Demand,
    workers: Sequence[WorkerSnapshot],
    *,
    local_prefill_tokens: int = 0,
    avoid: frozenset[str] = frozenset(),
) -> Plan:
    """Complete a Choice among `workers`; those in `avoid` are asked for nothing."""
    by_id = {worker.worker_id: worker for worker in workers}
    prefill, lacking = by_id[choice.prefill], {w.worker_id: demand.prompt_tokens - w.cached_tokens for w in workers}
    if choice.local:
        return Plan(choice, lacking[choice.prefill])
    holders = [w for w in workers if w.cached_tokens and w.worker_id not in avoid and can_decode(w, demand)]
    found = options(demand.prompt_tokens, prefill, holders, local_prefill_tokens=local_prefill_tokens)
    forgone = any(isinstance(option, Pull) for option in found)
    match best(found):
        case Pull(holder) as pull:
            return Plan(choice, lacking[holder], pull)
        case PrefillOnDecode(holder):
            return Plan(replace(choice, prefill=holder, decode=holder), lacking[holder], forgone=forgone)
        case Compute():
            return Plan(choice, lacking[choice.prefill], forgone=forgone)


def options(
    prompt_tokens: int,
    prefill: WorkerSnapshot,
    holders: Iterable[WorkerSnapshot],
    *,
    local_prefill_tokens: int = 0,
) -> list[Decision]:
    """What could be done with one prompt, Compute first. `holders`: decode workers that cache some of it."""
    found: list[Decision] = [compute(prompt_tokens, prefill)]
    for holder in holders:
        if holder.cached_tokens > prefill.cached_tokens and can_lend(holder, prefill):
            found.append(pull_from(prompt_tokens, prefill, holder))
        if prompt_tokens - holder.cached_tokens <= local_prefill_tokens:
            found.append(prefill_on_decode(prompt_tokens, prefill, holder))
    return found


def best(decisions: Sequence[Decision]) -> Decision:
    """The first of those with the least forecast."""
    return min(decisions, key=lambda decision: decision.forecast_s)


def compute(prompt_tokens: int, prefill: WorkerSnapshot) -> Compute:
    return Compute(_compute_s(prefill.waiting_tokens + prompt_tokens - prefill.cached_tokens, prefill))


def pull_from(prompt_tokens: int, prefill: WorkerSnapshot, holder: WorkerSnapshot) -> Pull:
    assert holder.root is not None, "nothing is cached under no root"
    nbytes = (holder.cached_tokens - prefill.cached_tokens) * holder.token_bytes
    pull_s = PULL_OVERHEAD_S + holder.step_s + nbytes / prefill.kv_bytes_per_s
    ready_s = max(_compute_s(prefill.waiting_tokens, prefill), pull_s)
    num_blocks = holder.cached_tokens // holder.root.block_size
    forecast_s = ready_s + _compute_s(prompt_tokens - holder.cached_tokens, prefill)
    return Pull(holder.worker_id, num_blocks, nbytes, forecast_s)


def prefill_on_decode(prompt_tokens: int, prefill: WorkerSnapshot, holder: WorkerSnapshot) -> PrefillOnDecode:
    num_tokens = holder.waiting_tokens + prompt_tokens - holder.cached_tokens
    return PrefillOnDecode(holder.worker_id, holder.step_s + _compute_s(num_tokens, prefill))


def _compute_s(num_tokens: int, prefill: WorkerSnapshot) -> float:
    return num_tokens / prefill.prefill_tokens_per_s
