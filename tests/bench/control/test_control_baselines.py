"""Baselines decide by what they are told, and do nothing when they are told nothing."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.request import Role
from bench.control.baselines import ScaleOnly, ScaleOnlySetting, Static, largest_batch, resize, worker_s
from bench.control.dynamo import DYNAMO_SETTINGS, Dynamo, DynamoPlanner, PlannerFailed
from router.controller.autoscaler.acts import Create, Drain, Flip, Proposal, Undrain
from router.controller.autoscaler.facts import Blueprint, ClassTraffic, FleetFacts, State, WorkerFacts
from tests.controller.autoscaler.fleets import MOST, TERMS, chat, facts, fleet, worker

SETTING = ScaleOnlySetting(busy=0.8, window_s=60.0)
BLUEPRINTS = {role: Blueprint("h100", 1, 200_000, MOST) for role in Role}
PLANNER_PYTHON = "BATON_PLANNER_PYTHON"  # an interpreter that has ai-dynamo


def looked(workers: tuple[WorkerFacts, ...], *classes: ClassTraffic, now_s: float = 0.0) -> FleetFacts:
    return replace(facts(workers, *classes, now_s=now_s), blueprints=BLUEPRINTS)


def kinds(proposals: Sequence[Proposal]) -> list[type]:
    return [type(proposal.act) for proposal in proposals]


def test_static_does_nothing_whatever_comes() -> None:
    assert not Static().look(looked(fleet(1, 1), chat(1_000.0)))


def test_scale_only_grows_each_pool_at_once_to_what_its_work_needs() -> None:
    traffic = chat(60.0)
    need = {role: 60.0 * worker_s(looked(fleet(1, 1)), role, traffic) / 0.8 for role in (Role.PREFILL, Role.DECODE)}
    proposals = ScaleOnly(SETTING).look(looked(fleet(1, 1), traffic))
    for role, wanted in need.items():
        created = [p for p in proposals if isinstance(p.act, Create) and p.act.role is role]
        assert len(created) == math.ceil(wanted) - 1
    assert set(kinds(proposals)) == {Create}


def test_scale_only_shrinks_when_the_window_has_passed_and_never_flips() -> None:
    scaler = ScaleOnly(SETTING)
    assert not kinds(scaler.look(looked(fleet(3, 2), chat(90.0))))
    acts = [kinds(scaler.look(looked(fleet(3, 2), chat(1.0), now_s=now_s))) for now_s in (10.0, 60.0, 70.0)]
    assert acts == [[], [], [Drain, Drain, Drain]]
    assert not any(Flip in each for each in acts)


@pytest.mark.parametrize("rate", [None, math.nan])
def test_scale_only_stays_as_it_is_while_nobody_says_anything(rate: float | None) -> None:
    assert not ScaleOnly(SETTING).look(looked(fleet(3, 3), chat(rate)))


def test_who_drains_is_taken_back_before_another_is_created() -> None:
    workers = (*fleet(1, 1), worker("leaving", Role.DECODE, State.DRAINING))
    proposals = list(resize(looked(workers), Role.DECODE, 3))
    assert kinds(proposals) == [Undrain, Create]


def test_the_largest_batch_ends_with_seats_memory_or_pace() -> None:
    assert largest_batch(TERMS, 100.0, 1.0, 256, 200_000) == 256
    assert largest_batch(TERMS, 10_000.0, 1.0, 256, 200_000) == 20
    step_of_10_s = 1e-3 + 4e-3 + 10 * 10_000 * 2e-8
    assert largest_batch(TERMS, 10_000.0, step_of_10_s * 1.001, 256, 200_000) == 10
    assert largest_batch(TERMS, 10_000.0, 1e-9, 256, 200_000) == 1


def test_an_interpreter_without_the_planner_is_refused_with_a_word_why() -> None:
    with pytest.raises(PlannerFailed, match="dynamo"):
        DynamoPlanner(sys.executable)


def test_dynamos_core_grows_a_pool_that_is_too_small() -> None:
    python = os.environ.get(PLANNER_PYTHON)
    if python is None:
        pytest.skip(f"point {PLANNER_PYTHON} at an interpreter that has ai-dynamo, numpy, pandas, filterpy, pmdarima")
    planner = DynamoPlanner(python)
    try:
        scaler = Dynamo(planner, DYNAMO_SETTINGS[0])
        acts = [kinds(scaler.look(looked(fleet(1, 4), chat(100.0), now_s=10.0 * tick))) for tick in range(12)]
    finally:
        planner.close()
    assert max(each.count(Create) for each in acts) >= 2
