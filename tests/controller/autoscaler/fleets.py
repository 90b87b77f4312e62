"""Fleets and traffic for autoscaler tests: 8B-like workers whose figures are round, so that sizes can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from baton.request import Role
from baton.slo import SLO
from router.controller.autoscaler.acts import Create, Drain, Flip, GiveUp, Proposal, Undrain, Wake
from router.controller.autoscaler.facts import (
    ClassTraffic,
    FleetFacts,
    State,
    Tuning,
    WorkerFacts,
    WorkerLoad,
)
from router.controller.settings import Budget, PoolBounds
from router.controller.step_model import Terms

CHAT = SLO("interactive", ttft_ms=2_000.0, tpot_ms=50.0)
TERMS = Terms(fixed_s=1e-3, s_per_token=2e-5, weights_s=4e-3, s_per_context_token=2e-8, s_per_pair=1e-10)
MOST = Tuning(max_num_seqs=256, max_num_batched_tokens=8_192, chunk_tokens=8_192)
AT_LEAST_ONE = Budget(prefill=PoolBounds(1), decode=PoolBounds(1))
TO_ZERO = Budget()


def worker(
    worker_id: str, role: Role, state: State = State.READY, since_s: float = 0.0, load: WorkerLoad | None = None
) -> WorkerFacts:
    return WorkerFacts(worker_id, role, state, since_s, "h100", 1, 200_000, MOST, MOST, load)


def fleet(prefill: int = 0, decode: int = 0, both: int = 0) -> tuple[WorkerFacts, ...]:
    sizes = {Role.PREFILL: prefill, Role.DECODE: decode, Role.BOTH: both}
    return tuple(worker(f"{role.name.lower()}-{n}", role) for role, size in sizes.items() for n in range(size))


def chat(
    rate: float | None, prompt: float = 1_000.0, output: float = 200.0, slo: SLO = CHAT, **more: float
) -> ClassTraffic:
    return ClassTraffic(
        slo,
        rate,
        coming_rate=rate,
        prompt_tokens=prompt,
        cached_tokens=0.0,
        prompt_pairs=prompt**2 / 2,
        output_tokens=output,
        **more,
    )


def facts(
    workers: tuple[WorkerFacts, ...], *classes: ClassTraffic, now_s: float = 0.0, budget: Budget = AT_LEAST_ONE
) -> FleetFacts:
    return FleetFacts(
        now_s=now_s,
        workers=workers,
        classes=classes,
        steps=dict.fromkeys(Role, TERMS),
        budget=budget,
        kv_bytes_per_token=131_072.0,
        link_bytes_per_s=40e9,
        local_prefill_tokens=0,
    )


def carried_out(before: FleetFacts, proposals: list[Proposal] | tuple[Proposal, ...], after_s: float) -> FleetFacts:
    """The facts one look later, everything proposed done at once."""
    workers = {w.worker_id: w for w in before.workers}
    now_s = before.now_s + after_s
    for number, proposal in enumerate(proposals):
        match proposal.act:
            case Create(role, _):
                name = f"new-{now_s:g}-{number}"
                workers[name] = worker(name, role, since_s=now_s)
            case Drain(worker_id, _) | GiveUp(worker_id):
                del workers[worker_id]
            case Flip(worker_id, role) | Wake(worker_id, role):
                workers[worker_id] = replace(workers[worker_id], role=role, state=State.READY, since_s=now_s)
            case Undrain(worker_id):
                workers[worker_id] = replace(workers[worker_id], state=State.READY, since_s=now_s)
            case _:
                pass
    return replace(before, workers=tuple(workers.values()), now_s=now_s)
