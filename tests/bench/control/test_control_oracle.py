"""The oracle's plan against every sequence there is, and what it plans with against what more workers can do."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.request import Role
from bench.control.loads import ESSAY, catalogue
from bench.control.model import Arrived, decode_met, prefill_met
from bench.control.oracle import Plan, Prices, Schedule, change_cost, cheapest, layouts
from bench.control.rig import CHAT, Costs
from bench.traces import TraceRow
from router.controller.autoscaler.acts import Create, Drain, Flip
from router.controller.autoscaler.facts import Blueprint, FleetFacts, State
from tests.controller.autoscaler.fleets import MOST, carried_out, facts, fleet

PRICES = Prices(miss=10.0, start_up=60.0, leave=20.0, flip=21.0)
BLUEPRINTS = {role: Blueprint("h100", 1, 200_000, MOST) for role in Role}
INTERVAL_S = 60.0


def looked(prefill: int, decode: int, now_s: float = 0.0) -> FleetFacts:
    return replace(facts(fleet(prefill, decode), now_s=now_s), blueprints=BLUEPRINTS)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), min_size=3, max_size=3))
def test_no_sequence_of_layouts_costs_less_than_the_plan(misses: list[list[int]]) -> None:
    sizes = layouts(3)  # 1+1, 1+2, 2+1
    table = np.array(misses, dtype=float)  # [layouts, intervals]
    plan = cheapest(table, sizes, (1, 1), INTERVAL_S, PRICES)

    def cost(places: tuple[int, ...]) -> float:
        path = [(1, 1), *(sizes[place] for place in places)]
        moved = sum(change_cost(before, after, PRICES, 3) for before, after in pairwise(path))
        stayed = sum(INTERVAL_S * sum(sizes[p]) + PRICES.miss * float(table[p, i]) for i, p in enumerate(places))
        return moved + stayed

    assert plan.cost == pytest.approx(min(cost(places) for places in product(range(3), repeat=3)))
    assert cost(tuple(sizes.index(one) for one in plan.sizes)) == pytest.approx(plan.cost)


def test_a_change_costs_a_flip_where_one_pool_gives_what_the_other_takes_and_a_start_up_beyond_that() -> None:
    assert change_cost((3, 3), (3, 3), PRICES, 7) == 0.0
    assert change_cost((3, 3), (4, 2), PRICES, 7) == 21.0
    assert change_cost((3, 3), (5, 2), PRICES, 7) == 21.0 + 60.0
    assert change_cost((3, 3), (2, 2), PRICES, 7) == 2 * 20.0


def test_nobody_new_starts_in_the_place_of_one_who_is_still_there() -> None:
    assert change_cost((3, 3), (5, 2), PRICES, 6) == math.inf
    assert change_cost((3, 3), (4, 2), PRICES, 6) == 21.0


def test_a_plan_is_carried_out_with_new_workers_asked_for_a_start_up_ahead_and_flips_when_they_are_due() -> None:
    plan = Plan(((2, 2), (2, 2), (4, 1), (1, 1)), INTERVAL_S, 0.0)
    schedule, now = Schedule(plan, start_up_s=60.0, drain_s=20.0), looked(2, 2)
    acts = []
    for _ in range(20):
        proposals = schedule.look(now)
        acts += [(now.now_s, type(proposal.act)) for proposal in proposals]
        now = carried_out(now, list(proposals), 10.0)
    assert acts == [(60.0, Create), (100.0, Flip), (180.0, Drain), (180.0, Drain), (180.0, Drain)]
    assert [w.role for w in now.workers if w.state is State.READY].count(Role.PREFILL) == 1


def test_what_was_refused_is_asked_for_again() -> None:
    schedule = Schedule(Plan(((2, 2), (3, 2)), INTERVAL_S, 0.0), start_up_s=60.0, drain_s=20.0)
    for now_s in (0.0, 10.0, 70.0):
        [proposal] = schedule.look(looked(2, 2, now_s))
        assert isinstance(proposal.act, Create)
    assert not schedule.look(looked(3, 2, 80.0))


def arrived(seed: int, duration_s: float) -> tuple[Costs, list[Arrived]]:
    [swing] = [load for load in catalogue() if load.name == "mix swings"]
    costs = Costs()
    rows = [row for row in swing.rows(seed) if row.at_s < duration_s]
    return costs, [Arrived(row, cost, CHAT) for row, cost in zip(rows, costs.of_all(rows, caches=False), strict=True)]


def test_more_workers_serve_no_fewer_calls_and_enough_of_them_serve_all() -> None:
    costs, calls = arrived(seed=1, duration_s=1_200.0)
    by_prefill = [prefill_met(calls, num).sum() for num in range(1, 10)]
    by_decode = [decode_met(costs, calls, num).sum() for num in range(1, 10)]
    assert by_prefill == sorted(by_prefill)
    assert by_decode == sorted(by_decode)
    assert by_prefill[0] < 0.6 * len(calls)
    assert by_decode[0] < 0.8 * len(calls)
    assert by_prefill[-1] == by_decode[-1] == len(calls)


def test_a_lone_call_meets_its_targets_and_one_whose_prompt_takes_too_long_does_not() -> None:
    costs = Costs()
    rows = [TraceRow(0.0, 5_000, 2_000), TraceRow(1_000.0, 100_000, 10)]
    calls = [Arrived(row, cost, CHAT) for row, cost in zip(rows, costs.of_all(rows, caches=False), strict=True)]
    assert calls[1].cost.prefill_s > CHAT.ttft_ms / 1e3
    assert prefill_met(calls, 1).tolist() == [True, False]
    assert decode_met(costs, calls, 1).tolist() == [True, True]


def test_decode_takes_as_many_essays_at_once_as_there_are_seats() -> None:
    costs = Costs()
    rows = [TraceRow(0.0, ESSAY.prompts.low, ESSAY.answers.low)] * 40
    calls = [Arrived(row, cost, CHAT) for row, cost in zip(rows, costs.of_all(rows, caches=False), strict=True)]
    assert decode_met(costs, calls, 1).sum() == 16
    assert decode_met(costs, calls, 2).sum() == 32


def test_what_prompts_have_in_common_costs_nothing_the_second_time() -> None:
    rows = [TraceRow(0.0, 8_192, 10, tuple(range(16))), TraceRow(9.0, 9_216, 10, tuple(range(18)))]
    costs = Costs()
    cold, warm = costs.of_all(rows, caches=True)
    assert warm.prefill_s < 0.3 * cold.prefill_s
    assert costs.of_all(rows, caches=False)[1].prefill_s > cold.prefill_s
