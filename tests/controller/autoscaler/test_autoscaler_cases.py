"""Rows of the public cases that an autoscaler decides: A1, A2, A3, A6; and D1, N3 as far as they do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.request import Role
from router.controller.autoscaler.acts import Drain, Proposal
from router.controller.autoscaler.autoscaler import Autoscaler, Times
from router.controller.autoscaler.facts import ClassTraffic, FleetFacts, State, WorkerLoad
from router.controller.settings import Budget
from tests.controller.autoscaler.fleets import AT_LEAST_ONE, CHAT, chat, facts, fleet
from tests.controller.autoscaler.fluid import Fluid

NAN: Any = math.nan  # where a whole number should be
INF: Any = math.inf
UNKNOWN = ClassTraffic(CHAT, 1.0, 1.0, None, None, None, None)


def holding(workers: int, used_share: float, now_s: float) -> FleetFacts:
    """Decode workers that say how full they are; nobody knows lengths or step times."""
    load = WorkerLoad(now_s, 10, 0, round(used_share * 200_000), 0.01, 0)
    full = tuple(replace(w, load=load if w.role is Role.DECODE else None) for w in fleet(1, workers))
    return replace(facts(full, UNKNOWN, now_s=now_s), steps={})


def test_a1_two_at_seventy_percent_stay_two() -> None:
    scaler = Autoscaler()
    assert [scaler.look(holding(2, 0.7, 10.0 * tick)) for tick in range(60)] == [[]] * 60


def test_a1_three_at_thirty_percent_lose_exactly_one() -> None:
    scaler, workers = Autoscaler(), 3
    acts: list[Proposal] = []
    for tick in range(120):
        proposals = scaler.look(holding(workers, 0.9 / workers, 10.0 * tick))
        acts += proposals
        workers -= len(proposals)
    assert [type(proposal.act) for proposal in acts] == [Drain]
    assert workers == 2


def test_a2_prefill_rises_by_the_second_tick_of_overload_and_is_enough_by_the_fifth() -> None:
    # A prompt of 5,500 tokens takes 0.11 s + attention's 0.0015: one worker carries 9 a second; 18 come
    fluid = Fluid(Autoscaler(), fleet(1, 2), lambda _: [chat(18.0, prompt=5_500.0, output=10.0)])
    fluid.run(2)
    assert sum(w.role is Role.PREFILL for w in fluid.workers) > 1
    fluid.run(3)
    assert sum(w.role is Role.PREFILL for w in fluid.workers) * 0.8 >= 2.0
    fluid.run(15)
    assert fluid.queued_tokens == 0


def test_a2_what_calls_felt_counts_where_step_times_promise_too_much() -> None:
    late = replace(chat(5.0), num_judged=150.0, num_missed_ttft=60.0)
    fluid = Fluid(Autoscaler(), fleet(1, 1), lambda _: [late])
    fluid.run(100)
    assert fluid.ready(Role.PREFILL) > 1
    assert fluid.ready(Role.DECODE) == 1


@pytest.mark.parametrize(("prompt", "output", "grows"), [(1_000.0, 4.0, Role.PREFILL), (16.0, 400.0, Role.DECODE)])
def test_a3_each_pool_is_judged_by_its_own_work(prompt: float, output: float, grows: Role) -> None:
    fluid = Fluid(Autoscaler(), fleet(1, 1), lambda _: [chat(150.0, prompt, output)])
    fluid.run(30)
    other = Role.DECODE if grows is Role.PREFILL else Role.PREFILL
    assert fluid.ready(grows) > 1
    assert fluid.ready(other) == 1


NONSENSE: dict[str, Callable[[WorkerLoad, float], WorkerLoad | None]] = {
    "timeout": lambda load, now_s: None,
    "NaN": lambda load, now_s: replace(load, used_tokens=NAN),
    "infinite": lambda load, now_s: replace(load, waiting_tokens=INF),
    "negative": lambda load, now_s: replace(load, num_seqs=-1),
    "5 min old": lambda load, now_s: replace(load, at_s=now_s - 300.0, used_tokens=200_000),
    "from the future": lambda load, now_s: replace(load, at_s=now_s + 300.0, used_tokens=200_000),
}


def decisions(spoil: str | None, used_share: float = 0.8) -> list[list[Proposal]]:
    """Of an hour of four workers, one of which says nothing (None) or nonsense."""
    scaler = Autoscaler()
    found: list[list[Proposal]] = []
    for tick in range(40):
        now = holding(4, used_share, 10.0 * tick)
        *others, bad = now.workers
        assert bad.load is not None
        load = NONSENSE[spoil or "timeout"](bad.load, now.now_s)
        found.append(list(scaler.look(replace(now, workers=(*others, replace(bad, load=load))))))
    return found


@pytest.mark.parametrize("spoil", NONSENSE)
@pytest.mark.parametrize("used_share", [0.2, 0.8, 0.95])
def test_a6_a_worker_whose_value_cannot_be_believed_leaves_the_decision_to_the_others(
    spoil: str, used_share: float
) -> None:
    assert decisions(spoil, used_share) == decisions(None, used_share)


def test_a6_what_an_unready_worker_says_does_not_count() -> None:
    def look(state: State, load: WorkerLoad | None) -> list[Proposal]:
        now = holding(4, 0.8, 10.0)
        *others, last = now.workers
        return list(Autoscaler().look(replace(now, workers=(*others, replace(last, state=state, load=load)))))

    full = WorkerLoad(10.0, 500, 900_000, 200_000, 0.01, 0)
    for state in (State.PENDING, State.FAILED, State.STANDBY, State.DRAINING, State.FLIPPING):
        assert look(state, full) == look(state, None)


@pytest.mark.parametrize("with_steps", [True, False])
def test_a6_an_idle_fleet_goes_to_its_minimum(with_steps: bool) -> None:
    times = Times(tick_s=60.0)
    idle = replace(UNKNOWN, rate=0.0, coming_rate=0.0)

    def told(now: FleetFacts) -> FleetFacts:
        return now if with_steps else replace(now, steps={})

    fluid = Fluid(Autoscaler(times), fleet(4, 4), lambda _: [idle], times=times, change=told)
    fluid.run(10)
    assert (fluid.ready(Role.PREFILL), fluid.ready(Role.DECODE)) == (1, 1)


def test_n3_without_traffic_the_wanted_size_is_the_minimum_within_five_ticks() -> None:
    scaler = Autoscaler()
    fluid = Fluid(scaler, fleet(4, 4), lambda at_s: [chat(100.0 if at_s < 600 else 0.0)])
    fluid.run(59)
    assert scaler.wanted.prefill > 1
    fluid.run(6)
    assert (scaler.wanted.prefill, scaler.wanted.decode) == (1, 1)


def test_d1_whoever_leaves_drains_and_it_is_the_least_busy_one() -> None:
    def told(now: FleetFacts) -> FleetFacts:
        loads = {
            w.worker_id: WorkerLoad(now.now_s, 5 if w.worker_id.endswith("1") else 9, 0, 0, 0.01, 0)
            for w in now.workers
        }
        return replace(now, workers=tuple(replace(w, load=loads[w.worker_id]) for w in now.workers))

    fluid = Fluid(Autoscaler(), fleet(1, 3), lambda _: [chat(5.0)], change=told)
    fluid.run(40)
    assert [proposal.act for _, proposal in fluid.acts] == [Drain("decode-1"), Drain("decode-0")]


def test_bounds_hold_whatever_is_wanted() -> None:
    budget = Budget(max_gpus=5, prefill=AT_LEAST_ONE.prefill, decode=AT_LEAST_ONE.decode)
    fluid = Fluid(Autoscaler(), fleet(1, 1), lambda _: [chat(1_000.0)], budget=budget)
    fluid.run(30)
    assert len(fluid.workers) == 5
