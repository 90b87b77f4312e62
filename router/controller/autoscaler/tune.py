"""Limits of engines that fit the traffic: seats, token budget, chunk. Pure; DESIGN section 9, 6.

The step model says where to go at once, from wherever the limits are; what calls felt corrects it by small steps.

    seats    of who decodes: the batch at whose steps most calls keep their pace. Where classes differ, a strict one's batch or a
             loose one's, whichever is worth more: what a small batch makes wait counts as missed. Fewer at once, more only once
             steps STEP longer would allow them, too: else where four or five fit an error of 1 % turns them every minute
    budget   of who computes prompts beside decodes: the largest step that keeps the pace, but never fewer tokens than prompts
             need to keep up, so that under overload steps balance both
             of who only computes prompts: the largest step that takes STEP_OF_TTFT of the strictest target, as large ones use
             the GPU best, but not below where reading weights costs as much as computing
    chunk    as much as the budget

Correction (hill climbing on what calls felt): too many late tokens make the pace that is aimed at stricter by STEP; too many
late first tokens make it looser, where every seat is taken, steps as measured leave room, and the looser one has not failed
within REMEMBER_S. Once in SETTLED_S, within SLACKEST. Engines are told of what matters (NEARLY), once in dwell_s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.request import Role
from router.controller.autoscaler import need
from router.controller.autoscaler.acts import Proposal, Tune
from router.controller.autoscaler.census import Census
from router.controller.autoscaler.facts import ClassTraffic, FleetFacts, State, Tuning, WorkerFacts
from router.controller.autoscaler.layouts import kinds_of
from router.controller.autoscaler.lessons import SETTLED_S, judged_since, too_many
from router.controller.autoscaler.need import Kind
from router.controller.autoscaler.traffic import ClassLoad, Load
from router.controller.step_model import StepWork

STEP = 1.05  # of a correction: what a best setting may be off
SLACKEST = (
    1.5  # times the model's pace, or a part of it: what its error can be (33 % in the worst group: docs/timing.md)
)
NEARLY = 0.04  # of a limit: less than a STEP; a smaller change moves goodput by less than that
REMEMBER_S = 3_600.0  # a pace that failed; by then the traffic is another
PACE = (
    0.97  # of a target of time per token: the rest is the gap of the handoff, over a median answer (129 tokens, azure)
)
KEEP_UP = 1.1  # times the prompts that come, so that a queue of them drains
STEP_OF_TTFT = 0.25  # a prompt waits for the step under way, and is computed in one or two more
FULL = 0.95  # of the seats


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a step may be for a class, seconds."""

    of_class: ClassLoad
    limit_s: float


def best(
    kind: Kind, load: Load, num_workers: int, now: Tuning, slack: float = 1.0, *, local_prefill: bool = False
) -> Tuning:
    """For each of so many workers that share the load. `kind.tuning`: the most it may be; `now`: what it is. `slack`: of the
    pace, learned. `local_prefill`: decode computes prompts, too; else its budget does not matter and stays."""
    if kind.role is Role.PREFILL:
        return _for_prompts(kind, load)
    paces = [Pace(c, slack * _pace_s(c)) for c in load.classes]
    seats = _seats(kind, load, num_workers, paces, now.max_num_seqs)
    if kind.role is Role.DECODE and not local_prefill:
        budget = min(kind.tuning.max_num_batched_tokens, max(seats, now.max_num_batched_tokens))
        return Tuning(seats, budget, min(budget, now.chunk_tokens))
    return replace(kind.tuning, max_num_seqs=seats, **_budget(kind, load, num_workers, seats, paces))


def _pace_s(of_class: ClassLoad) -> float:
    slo = of_class.slo
    return min(PACE * slo.tpot_ms, slo.itl_p99_ms if slo.itl_p99_ms is not None else math.inf) / 1e3


def _seats(kind: Kind, load: Load, num_workers: int, paces: Sequence[Pace], now: int) -> int:
    most = kind.tuning.max_num_seqs
    batches = {pace.of_class.slo.name: _batch(kind, load, pace.limit_s, now) for pace in paces}

    def worth(seats: float) -> float:
        """Weighted calls that keep their pace, of those that find a seat."""
        in_time = num_workers * seats / need.step_s(kind, load, seats)
        kept = sum(c.slo.weight * c.rate for c in load.classes if batches[c.slo.name] >= seats)
        return kept * min(1.0, in_time / load.outputs_per_s)

    candidates = [min(float(most), batch) for batch in batches.values() if batch >= 1]
    return int(max(candidates, key=lambda seats: (worth(seats), seats), default=most))


def _batch(kind: Kind, load: Load, limit_s: float, now: int) -> float:
    """The whole batch that keeps the pace; as now where that is in doubt. 0: none does."""
    perhaps, most, surely = (
        need.whole(need.batch_within(kind, load, limit)) for limit in (STEP * limit_s, limit_s, limit_s / STEP)
    )
    return min(most if most >= 1 else perhaps, max(surely, float(now)))


def _budget(kind: Kind, load: Load, num_workers: int, seats: int, paces: Sequence[Pace]) -> Mapping[str, int]:
    most = kind.tuning.max_num_batched_tokens
    batch = min(float(seats), need.steady_batch(kind, load, load.outputs_per_s / max(1, num_workers)))
    kept = [
        pace.limit_s
        for pace in paces
        if need.batch_within(kind, load, pace.limit_s) >= min(batch, seats) * (1 - NEARLY)
    ]
    tokens = float(most)
    if kept:
        tokens = _largest_step(kind, load, batch, min(kept))
    if kind.role is Role.BOTH:
        tokens = max(tokens, KEEP_UP * batch * (1 + load.lacking_per_s / load.outputs_per_s))
    budget = max(min(seats, most), int(min(most, tokens)), 1)
    return {"max_num_batched_tokens": budget, "chunk_tokens": min(budget, kind.tuning.chunk_tokens)}


def _largest_step(kind: Kind, load: Load, batch: float, limit_s: float) -> float:
    """Tokens of a step of so many decodes and otherwise prompts that takes just so long."""
    terms = kind.terms
    pairs = load.pairs_per_s / load.lacking_per_s  # per prompt token
    room_s = limit_s - terms.step_s(StepWork(batch, batch * load.context_tokens))
    hidden = (
        max(0.0, terms.weights_s / terms.s_per_token - batch) if terms.s_per_token else 0.0
    )  # computed while weights load
    if room_s <= 0:
        return batch
    beside = room_s / (terms.s_per_pair * pairs) if terms.s_per_pair * pairs > 0 else math.inf
    if beside <= hidden:
        return batch + beside
    per_token_s = terms.s_per_token + terms.s_per_pair * pairs
    left_s = room_s - hidden * terms.s_per_pair * pairs
    return batch + hidden + (left_s / per_token_s if per_token_s > 0 else math.inf)


def _for_prompts(kind: Kind, load: Load) -> Tuning:
    most, terms = kind.tuning, kind.terms
    limit_s = STEP_OF_TTFT * min((c.slo.ttft_ms / 1e3 for c in load.classes), default=math.inf)
    knee = terms.weights_s / terms.s_per_token if terms.s_per_token else 0.0
    tokens = max(knee, _largest_step(kind, load, 0.0, limit_s))
    budget = max(1, most.max_num_seqs, int(min(most.max_num_batched_tokens, tokens)))
    budget = min(budget, most.max_num_batched_tokens)
    return replace(most, max_num_batched_tokens=budget, chunk_tokens=min(budget, most.chunk_tokens))


class Tuner:
    """Of one fleet."""

    def __init__(self) -> None:
        self._slack = dict.fromkeys(Role, 1.0)
        self._failed = dict.fromkeys(Role, (math.inf, -math.inf))  # slack that was too much, and when
        self._corrected_s = dict.fromkeys(Role, -math.inf)
        self._tuned_s: dict[str, float] = {}  # by worker

    def proposals(
        self, facts: FleetFacts, there: Census, load: Load, now_s: float, dwell_s: float
    ) -> Iterator[Proposal]:
        """`now_s`: of patience's clock."""
        self._tuned_s = {w.worker_id: self._tuned_s.get(w.worker_id, -math.inf) for w in facts.workers}
        if now_s < SETTLED_S:
            return  # of the calls that came so far the long ones have not ended
        kinds = kinds_of(facts)
        for role, kind in kinds.items():
            ready = [worker for worker in there.of(role) if worker.state is State.READY]
            if not ready or not load.classes:
                continue
            far = [
                (worker, goal) for worker, goal in self._goals(facts, kind, load, ready) if _is_far(worker.tuning, goal)
            ]
            if not far:
                changed_s = max(self._corrected_s[role], *(self._tuned_s[worker.worker_id] for worker in ready))
                self._correct(kind, load, judged_since(facts.classes, now_s - changed_s), ready, now_s)
            for worker, goal in far:
                if now_s - self._tuned_s[worker.worker_id] >= dwell_s:
                    self._tuned_s[worker.worker_id] = now_s
                    yield self._propose(worker, goal, role)

    def _goals(
        self, facts: FleetFacts, kind: Kind, load: Load, ready: Sequence[WorkerFacts]
    ) -> Iterator[tuple[WorkerFacts, Tuning]]:
        for worker in ready:
            of_worker = replace(kind, tuning=worker.most, kv_tokens=worker.kv_tokens)
            is_local = facts.local_prefill_tokens > 0
            yield (
                worker,
                best(of_worker, load, len(ready), worker.tuning, self._slack[kind.role], local_prefill=is_local),
            )

    def _correct(
        self, kind: Kind, load: Load, classes: Sequence[ClassTraffic], ready: Sequence[WorkerFacts], now_s: float
    ) -> None:
        """`classes`: those whose calls felt the settings as they are."""
        role = kind.role
        if role is Role.PREFILL:
            return
        slack = self._slack[role]
        if any(too_many(c.num_missed_tpot, c) for c in classes):
            self._failed[role] = (slack, now_s)
            slack /= STEP
        elif any(too_many(c.num_missed_ttft, c) for c in classes) and self._has_room(kind, load, ready, now_s):
            slack *= STEP
        else:
            return
        self._slack[role] = min(SLACKEST, max(1 / SLACKEST, slack))
        self._corrected_s[role] = now_s

    def _has_room(self, kind: Kind, load: Load, ready: Sequence[WorkerFacts], now_s: float) -> bool:
        """Whether a looser pace would let more calls in, and still be in time."""
        loads = [(worker, worker.load) for worker in ready if worker.load is not None]
        paces = [_pace_s(c) for c in load.classes if need.batch_within(kind, load, _pace_s(c)) >= 1]
        if not loads or not paces:
            return False
        failed, failed_s = self._failed[kind.role]
        may_try = now_s - failed_s > REMEMBER_S or self._slack[kind.role] * STEP < failed
        are_full = all(says.num_seqs >= FULL * worker.tuning.max_num_seqs for worker, says in loads)
        longest_s = max(says.step_s for _, says in loads)
        return may_try and are_full and STEP * longest_s <= min(paces)

    def _propose(self, worker: WorkerFacts, goal: Tuning, role: Role) -> Proposal:
        before = worker.tuning
        return Proposal(
            Tune(worker.worker_id, goal),
            f"steps of {goal.max_num_seqs} sequences and {goal.max_num_batched_tokens} tokens keep most calls' pace",
            {
                "max_num_seqs_before": before.max_num_seqs,
                "max_num_batched_tokens_before": before.max_num_batched_tokens,
                "chunk_tokens_before": before.chunk_tokens,
                "slack": self._slack[role],
            },
        )


def _is_far(now: Tuning, goal: Tuning) -> bool:
    pairs = (
        (now.max_num_seqs, goal.max_num_seqs),
        (now.max_num_batched_tokens, goal.max_num_batched_tokens),
        (now.chunk_tokens, goal.chunk_tokens),
    )
    return any(abs(one - other) > NEARLY * max(one, other) for one, other in pairs)
