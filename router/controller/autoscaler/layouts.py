"""How many workers of each role: plain counts, what workers of a role are like, and the sizes that a load needs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from baton.request import Role
from router.controller.autoscaler.facts import Blueprint, FleetFacts, Tuning, WorkerFacts
from router.controller.autoscaler.need import Kind
from router.controller.autoscaler.traffic import known
from router.controller.settings import Budget, PoolBounds
from router.controller.step_model import Terms

# Whose steps tell most of another role's, where it has no model of its own: a worker of both does all kinds of them
_LIKE = {
    Role.PREFILL: (Role.PREFILL, Role.BOTH, Role.DECODE),
    Role.DECODE: (Role.DECODE, Role.BOTH, Role.PREFILL),
    Role.BOTH: (Role.BOTH, Role.DECODE, Role.PREFILL),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers by role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    def of(self, role: Role) -> int:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.BOTH: self.both}[role]

    def plus(self, role: Role, num: int = 1) -> Layout:
        return replace(self, **{role.name.lower(): self.of(role) + num})

    def __iter__(self) -> Iterator[tuple[Role, int]]:
        return iter(((Role.PREFILL, self.prefill), (Role.DECODE, self.decode), (Role.BOTH, self.both)))

    def __str__(self) -> str:
        return " + ".join(f"{num} {role.name.lower()}" for role, num in self if num) or "no workers"


Kinds = Mapping[Role, Kind]
PAIR = (Role.PREFILL, Role.DECODE)  # between which workers flip


def bounds_of(budget: Budget, role: Role) -> PoolBounds:
    return budget.pools()[role.name.lower()]


def kinds_of(facts: FleetFacts) -> dict[Role, Kind]:
    """By role; a role is left out where nobody can say what its workers would be like, or how long their steps take."""
    kinds = {}
    for role in Role:
        terms = next((facts.steps[like] for like in _LIKE[role] if like in facts.steps), None)
        blueprint = blueprint_of(facts, role)
        if terms is not None and blueprint is not None:
            kinds[role] = _kind(role, terms, blueprint, facts.usd_per_gpu_hour)
    return kinds


def blueprint_of(facts: FleetFacts, role: Role) -> Blueprint | None:
    """What one more worker of the role would be: as it is said, else like the workers there are."""
    if (told := facts.blueprints.get(role)) is not None:
        return told
    for like in _LIKE[role]:
        if workers := [worker for worker in facts.workers if worker.role is like]:
            return _typical(workers)
    return None


def _typical(workers: list[WorkerFacts]) -> Blueprint:
    """The shape that most have, and of these the middle one's limits."""
    shapes = [worker.shape for worker in workers]
    shape = max(sorted(set(shapes)), key=shapes.count)
    alike = [worker for worker in workers if worker.shape == shape]
    known_kv = [worker.kv_tokens for worker in alike if worker.kv_tokens > 0]
    return Blueprint(
        shape,
        median_low([worker.num_gpus for worker in alike]),
        median_low(known_kv) if known_kv else 0,
        Tuning(
            median_low([worker.most.max_num_seqs for worker in alike]),
            median_low([worker.most.max_num_batched_tokens for worker in alike]),
            median_low([worker.most.chunk_tokens for worker in alike]),
        ),
    )


def _kind(role: Role, terms: Terms, blueprint: Blueprint, usd_per_gpu_hour: Mapping[str, float]) -> Kind:
    usd = known(usd_per_gpu_hour.get(blueprint.shape), math.inf) or 1.0
    num_gpus = max(1, blueprint.num_gpus)
    return Kind(role, terms, blueprint.most, blueprint.kv_tokens, num_gpus, usd * num_gpus, blueprint.shape)
