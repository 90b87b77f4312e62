"""What may be believed. Pure.

A value that is missing, no number, too old, from the future or of a worker that is not ready is left out, by rule: the decision
is the one that the others give. Nothing left out counts as 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from router.controller.autoscaler.facts import FleetFacts, State, WorkerFacts, WorkerLoad
from router.controller.step_model import Terms

FRESH_LOAD_S = 30.0  # workers report after each step and each 0.5 s; ticks are 10 s
MIN_SEQS = 8  # of a pool, whose mean context says something
CLOCK_SLACK_S = 1.0  # by which two clocks of one host may differ


@dataclass(frozen=True, slots=True)
class Pressure:
    """What the ready workers of a pool say, on average. None: none of them says anything to be believed."""

    used_share: float | None = None  # of KV
    waiting_tokens: float | None = None
    num_seqs: float | None = None
    context_tokens: float | None = None  # of a sequence


def sound(facts: FleetFacts) -> FleetFacts:
    """The facts without what cannot be believed."""
    workers = tuple(
        worker if _is_sound(worker.load, facts.now_s) and worker.state is State.READY else replace(worker, load=None)
        for worker in facts.workers
    )
    steps = {role: terms for role, terms in facts.steps.items() if _can_be(terms)}
    return replace(
        facts,
        workers=workers,
        steps=steps,
        queued_tokens=max(0, facts.queued_tokens),
        oldest_queued_s=facts.oldest_queued_s if 0 <= facts.oldest_queued_s < math.inf else 0.0,
    )


def pressure(workers: Iterable[WorkerFacts]) -> Pressure:
    """Of sound workers of one pool."""
    loads = [(worker, worker.load) for worker in workers if worker.load is not None]
    if not loads:
        return Pressure()
    with_kv = [(worker.kv_tokens, load.used_tokens) for worker, load in loads if worker.kv_tokens > 0]
    return Pressure(
        used_share=sum(used / kv for kv, used in with_kv) / len(with_kv) if with_kv else None,
        waiting_tokens=sum(load.waiting_tokens for _, load in loads) / len(loads),
        num_seqs=sum(load.num_seqs for _, load in loads) / len(loads),
        context_tokens=_context(loads),
    )


def _context(loads: Sequence[tuple[WorkerFacts, WorkerLoad]]) -> float | None:
    """Who waits has none, and no engine gives any to more than it has seats."""
    num_seqs = sum(min(load.num_seqs - load.num_waiting, worker.tuning.max_num_seqs) for worker, load in loads)
    return sum(load.used_tokens for _, load in loads) / num_seqs if num_seqs >= MIN_SEQS else None


def _is_sound(load: WorkerLoad | None, now_s: float) -> bool:
    if load is None:
        return False
    numbers = (
        load.num_seqs,
        load.waiting_tokens,
        load.used_tokens,
        load.step_s,
        load.num_preemptions,
        load.num_waiting,
    )
    are_numbers = all(0 <= number < math.inf for number in numbers)  # NaN fails, too
    return are_numbers and -CLOCK_SLACK_S <= now_s - load.at_s <= FRESH_LOAD_S


def _can_be(terms: Terms) -> bool:
    coefficients = (terms.fixed_s, terms.s_per_token, terms.weights_s, terms.s_per_context_token, terms.s_per_pair)
    return all(0 <= value < math.inf for value in coefficients) and terms.fixed_s + terms.weights_s > 0
