"""Sizes follow load: up at once, down late, each pool by its own work."""

from __future__ import annotations

from dataclasses import replace

from baton.request import Role
from router.controller.autoscaler.acts import Create
from router.controller.autoscaler.autoscaler import Autoscaler
from router.controller.autoscaler.facts import FleetFacts, Tuning, WorkerLoad
from tests.controller.autoscaler.fleets import MOST, carried_out, chat, facts, fleet


def sizes_after(num_ticks: int, start: tuple[int, int], rate: float, prompt: float, output: float) -> tuple[int, int]:
    scaler, now = Autoscaler(), facts(fleet(*start), chat(rate, prompt, output))
    for _ in range(num_ticks):
        now = carried_out(now, list(scaler.look(now)), 10.0)
    roles = [w.role for w in now.workers]
    return roles.count(Role.PREFILL), roles.count(Role.DECODE)


def test_a_fleet_that_is_too_small_grows_at_once() -> None:
    proposals = Autoscaler().look(facts(fleet(1, 1), chat(200.0)))
    assert [proposal.act for proposal in proposals if isinstance(proposal.act, Create)]


def test_long_prompts_want_prefill_and_long_answers_decode() -> None:
    prefill, decode = sizes_after(5, (1, 1), rate=100.0, prompt=1_000.0, output=4.0)
    assert prefill > 1
    assert decode == 1
    prefill, decode = sizes_after(5, (1, 1), rate=100.0, prompt=16.0, output=400.0)
    assert prefill == 1
    assert decode > 1


SEATS = Tuning(16, MOST.max_num_batched_tokens, MOST.chunk_tokens)


def holding(num_seqs: int, now_s: float) -> FleetFacts:
    """Three decode workers of 16 seats, 2.04 of them busy with what calls ask for."""
    load = WorkerLoad(now_s, num_seqs, 0, 1_100 * num_seqs, 5e-3, 0)
    few = tuple(replace(w, tuning=SEATS, most=SEATS, load=load if w.role is Role.DECODE else None) for w in fleet(1, 3))
    return facts(few, chat(30.5), now_s=now_s)


def created(nums: list[int]) -> list[int]:
    """The looks at which somebody was asked for, by the sequences on each decode worker at each look."""
    scaler = Autoscaler()
    looks = [scaler.look(holding(num, 10.0 * tick)) for tick, num in enumerate(nums)]
    return [tick for tick, look in enumerate(looks) if any(isinstance(proposal.act, Create) for proposal in look)]


def test_a_pool_that_is_full_for_a_moment_by_chance_stays() -> None:
    # 33 on average, 5.9 of them by chance: 47 is 2.4 of these, and 47 / 16 / 0.85 would be 3.5 workers
    assert created([11] * 30 + [16] + [11] * 30) == []


def test_a_pool_that_holds_more_than_chance_explains_grows_at_once_whatever_lengths_are_told() -> None:
    assert created([11] * 30 + [20])[:1] == [30]


def test_a_pool_that_holds_more_for_long_grows_however_slowly_it_came() -> None:
    assert created([11 + tick // 20 for tick in range(160)])
