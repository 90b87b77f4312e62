"""Clocks jump, routers go away, workers do not come: nothing is done in haste, and nothing stays stuck."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.request import Role
from baton.slo import SLO
from router.controller.autoscaler.acts import Create, Drain, Flip, GiveUp, Proposal, Undrain, Wake
from router.controller.autoscaler.autoscaler import Autoscaler, Times
from router.controller.autoscaler.facts import Blueprint, FleetFacts, State, WorkerFacts, WorkerLoad
from router.controller.autoscaler.patience import BACKOFF_S
from router.controller.settings import Budget, PoolBounds
from tests.controller.autoscaler.fleets import AT_LEAST_ONE, MOST, TO_ZERO, chat, facts, fleet, worker
from tests.controller.autoscaler.fluid import Fluid

TIMES = Times()


def test_without_routers_nothing_changes_and_nothing_is_made_up_for_afterwards() -> None:
    def told(now: FleetFacts) -> FleetFacts:
        away = 100.0 <= now.now_s < 900.0
        unknown = tuple(replace(c, rate=None, coming_rate=None) for c in now.classes)
        return replace(now, missing_s=now.now_s - 100.0, classes=unknown) if away else now

    fluid = Fluid(Autoscaler(TIMES), fleet(6, 6), lambda _: [chat(20.0)], change=told)
    fluid.run(101)
    assert not fluid.acts  # up to 1,010 s: two start-ups from 900 s on are not over
    fluid.run(10)
    assert set(fluid.counts()) == {"Drain"}


@pytest.mark.parametrize("jump_s", [-3_600.0, 3_600.0, 1e9])
def test_a_clock_that_jumps_neither_grows_nor_shrinks_nor_gives_up(jump_s: float) -> None:
    def told(now: FleetFacts) -> FleetFacts:
        return replace(now, now_s=now.now_s + (jump_s if now.now_s > 50.0 else 0.0))

    pending = worker("late", Role.DECODE, State.PENDING, since_s=45.0)
    fluid = Fluid(Autoscaler(TIMES), (*fleet(3, 3), pending), lambda _: [chat(100.0)], change=told)
    fluid.run(9)
    assert not fluid.acts


def test_who_is_pending_for_too_long_is_replaced_then_given_up_and_starts_are_tried_less_and_less_often() -> None:
    class NeverUp(Fluid):
        def _later(self, of):  # type: ignore[no-untyped-def]
            return of if of.state is State.PENDING else super()._later(of)

    fluid = NeverUp(
        Autoscaler(TIMES), fleet(1, 1), lambda _: [chat(60.0)], budget=Budget(4, PoolBounds(1), PoolBounds(1))
    )
    fluid.run(360)
    assert fluid.counts()["GiveUp"] >= 2
    assert len(fluid.times_of(Create)) < 14  # an hour: not one each minute
    assert len(fluid.workers) <= 4


def test_a_failed_worker_is_waited_for_and_then_replaced() -> None:
    lost = (*fleet(1, 2), worker("gone", Role.DECODE, State.FAILED))
    fluid = Fluid(Autoscaler(TIMES), lost, lambda _: [chat(200.0, 100.0, 400.0)])
    fluid.run(5)
    assert not fluid.times_of(Create)
    fluid.run(30)
    assert fluid.ready(Role.DECODE) >= 3
    assert GiveUp("gone") in [proposal.act for _, proposal in fluid.acts]


def test_a_worker_that_failed_for_good_and_is_not_needed_is_given_up() -> None:
    fluid = Fluid(Autoscaler(TIMES), (*fleet(2, 2), worker("gone", Role.DECODE, State.FAILED)), lambda _: [chat(5.0)])
    fluid.run(40)
    assert "gone" not in {w.worker_id for w in fluid.workers}


def test_a_budget_below_the_present_size_is_obeyed_at_once() -> None:
    budget = Budget(4, PoolBounds(1), PoolBounds(1))
    fluid = Fluid(Autoscaler(TIMES), fleet(4, 4), lambda _: [chat(100.0)], budget=budget)
    fluid.run(1)
    assert fluid.counts() == {"Drain": 4}
    fluid.run(10)
    assert len(fluid.workers) == 4
    assert fluid.ready(Role.PREFILL) >= 1
    assert fluid.ready(Role.DECODE) >= 1
    assert not fluid.times_of(Create)


def test_machines_without_room_are_not_asked() -> None:
    fluid = Fluid(Autoscaler(TIMES), fleet(1, 1), lambda _: [chat(300.0)], machines=3)
    fluid.run(30)
    assert len(fluid.workers) == 3


def test_a_pool_goes_to_zero_only_where_it_may_and_wakes_at_once_when_calls_wait() -> None:
    def quiet(at_s: float) -> float:
        return 20.0 if at_s < 600 else 0.0

    kept = Fluid(Autoscaler(TIMES), fleet(2, 2), lambda at_s: [chat(quiet(at_s))])
    kept.run(200)
    assert (kept.ready(Role.PREFILL), kept.ready(Role.DECODE)) == (1, 1)

    blueprints = {role: Blueprint("h100", 1, 200_000, MOST) for role in Role}
    gone = Fluid(
        Autoscaler(TIMES),
        fleet(2, 2),
        lambda at_s: [chat(quiet(at_s))],
        budget=TO_ZERO,
        change=lambda now: replace(now, blueprints=blueprints),
    )
    gone.run(200)
    assert not gone.workers
    gone.queued_tokens = 1_000.0  # lengths and rates are not known yet
    gone.run(1)
    assert sorted(w.role for w in gone.workers) == [Role.PREFILL, Role.DECODE]
    assert {w.state for w in gone.workers} == {State.PENDING}


def test_a_colocated_fleet_follows_its_load_too() -> None:
    fluid = Fluid(Autoscaler(TIMES), fleet(both=1), lambda at_s: [chat(200.0 if at_s < 900 else 10.0)])
    fluid.budget = Budget(both=PoolBounds(1))
    fluid.run(60)
    grown = fluid.ready(Role.BOTH)
    assert grown > 3
    assert not fluid.ready(Role.PREFILL) + fluid.ready(Role.DECODE)
    fluid.run(120)
    assert fluid.ready(Role.BOTH) == 1


def test_who_drains_is_taken_back_before_anybody_is_created() -> None:
    leaving = worker("leaving", Role.PREFILL, State.DRAINING)
    proposals = Autoscaler(TIMES).look(facts((*fleet(1, 2), leaving), chat(75.0)))
    assert [proposal.act for proposal in proposals] == [Undrain("leaving")]


def test_a_standby_is_woken_before_anybody_is_created_and_ended_when_nobody_needs_it() -> None:
    standby = worker("warm", Role.PREFILL, State.STANDBY)
    proposals = Autoscaler(TIMES).look(facts((*fleet(1, 2), standby), chat(75.0)))
    assert [proposal.act for proposal in proposals] == [Wake("warm", Role.PREFILL)]
    fluid = Fluid(Autoscaler(TIMES), (*fleet(1, 1), standby), lambda _: [chat(5.0)])
    fluid.run(40)
    assert [proposal.act for _, proposal in fluid.acts] == [GiveUp("warm")]


def test_a_worker_is_kept_warm_where_that_is_wanted() -> None:
    fluid = Fluid(Autoscaler(TIMES, max_standbys=1), fleet(1, 2), lambda _: [chat(5.0)])
    fluid.run(32)
    [(_, proposal)] = fluid.acts
    assert proposal.act in [Drain(f"decode-{n}", keep_standby=True) for n in range(2)]


def test_a_flip_takes_the_least_busy_worker_of_a_pool_that_survives_without_it() -> None:
    fluid = Fluid(Autoscaler(TIMES), fleet(2, 6), lambda at_s: [chat(60.0 if at_s < 100 else 150.0, 1_000.0, 4.0)])
    fluid.run(40)
    assert fluid.counts()["Flip"] >= 1
    assert not fluid.times_of(Create)


def test_no_pool_gives_what_it_needs_itself() -> None:
    both_short = Fluid(
        Autoscaler(TIMES), fleet(1, 1), lambda _: [chat(200.0)], budget=Budget(2, PoolBounds(1), PoolBounds(1))
    )
    both_short.run(60)
    assert not both_short.acts


def test_workers_of_another_shape_do_not_flip_but_make_room_in_a_full_budget() -> None:
    decode = tuple(replace(w, shape="h200") for w in fleet(0, 5))
    budget = Budget(6, PoolBounds(1), PoolBounds(1))
    fluid = Fluid(Autoscaler(TIMES), (*fleet(1, 0), *decode), lambda _: [chat(100.0, 1_000.0, 4.0)], budget=budget)
    fluid.run(60)
    assert not fluid.times_of(Flip)
    assert fluid.ready(Role.PREFILL) > 1
    assert len(fluid.workers) <= 6


def test_contradictory_classes_neither_stop_nor_drive_sizes_without_end() -> None:
    impossible = chat(5.0, slo=SLO("never", ttft_ms=1.0, tpot_ms=0.5), num_judged=150.0, num_missed_ttft=150.0)
    bulk = chat(50.0, slo=SLO("bulk", ttft_ms=60_000.0, tpot_ms=1_000.0, priority=-10))
    fluid = Fluid(Autoscaler(TIMES), fleet(2, 2), lambda _: [chat(30.0), impossible, bulk])
    fluid.run(200)
    assert fluid.ready(Role.PREFILL) <= 3
    assert fluid.ready(Role.DECODE) <= 3


def test_background_classes_ask_for_no_worker_until_they_miss_their_own_targets() -> None:
    slo = SLO("batch", ttft_ms=60_000.0, tpot_ms=1_000.0, priority=-10)
    slack = Fluid(Autoscaler(TIMES), fleet(1, 1), lambda _: [chat(10.0), chat(200.0, slo=slo)])
    slack.run(30)
    assert not slack.acts
    missed = Fluid(
        Autoscaler(TIMES),
        fleet(1, 1),
        lambda _: [chat(10.0), chat(200.0, slo=slo, num_judged=400.0, num_missed_ttft=300.0)],
    )
    missed.run(30)
    assert missed.ready(Role.PREFILL) > 1


def test_a_background_class_that_starves_is_counted_in_also_where_a_pool_rests_within_the_band() -> None:
    slo = SLO("batch", ttft_ms=60_000.0, tpot_ms=200.0, priority=-1)
    starved = chat(100.0, 4_000.0, 400.0, slo=slo, num_judged=3_000.0, num_missed_ttft=3_000.0)
    scaler = Autoscaler(TIMES)
    fluid = Fluid(scaler, fleet(11, 5), lambda _: [chat(440.0), starved])  # ten and six are wanted, five are enough
    fluid.run(1)
    assert scaler.wanted.decode > fluid.ready(Role.DECODE)
    assert not fluid.counts()["Create"]
    fluid.run(9)
    assert fluid.counts()["Create"]


def test_every_proposal_says_why_and_from_what() -> None:
    fluid = Fluid(Autoscaler(TIMES), fleet(1, 3), lambda at_s: [chat(100.0 if at_s < 300 else 5.0)])
    fluid.run(120)
    sized = [proposal for _, proposal in fluid.acts if isinstance(proposal.act, Create | Drain | Flip)]
    assert {type(proposal.act) for proposal in sized} >= {Create, Drain}
    for proposal in sized:
        assert "calls/s keep" in proposal.reason
        assert {
            "rate_per_s",
            "prefill_busy_workers",
            "decode_step_ms",
            "decode_wanted",
            "max_gpus",
        } <= proposal.inputs.keys()


def test_an_old_load_report_does_not_hold_a_pool_up() -> None:
    full = WorkerLoad(0.0, 250, 0, 200_000, 0.01, 0)

    def told(now: FleetFacts) -> FleetFacts:
        return replace(now, workers=tuple(replace(w, load=full) for w in now.workers))

    fluid = Fluid(Autoscaler(TIMES), fleet(1, 3), lambda _: [chat(5.0)], change=told, budget=AT_LEAST_ONE)
    fluid.run(60)
    assert fluid.ready(Role.DECODE) == 1


# -- machines that are away, and whom operators look after -------------------------------------------------------------

QUICK = Times(start_up_s=10.0)  # a start-up of small emulated workers: three of them are less than an outage
HEAVY = chat(200.0, 100.0, 400.0)  # keeps two decode workers busy, so it wants three
EIGHT = PoolBounds(8)


class Outage(Fluid):
    """Machines are away until `back_s`: nothing starts, and nobody is given up; then they bring back who was lost, within 30 s
    of which they know."""

    back_s = 60.0
    brings_back = True

    def _carry_out(self, proposal: Proposal) -> None:
        if self.now_s >= self.back_s or not isinstance(proposal.act, Create):
            super()._carry_out(proposal)

    def _later(self, of: WorkerFacts) -> WorkerFacts | None:
        if of.state is State.FAILED and self.brings_back and self.now_s >= self.back_s + 30.0:
            return replace(of, state=State.READY, since_s=self.now_s)
        return super()._later(of)


def lost(num: int) -> tuple[WorkerFacts, ...]:
    return tuple(replace(w, state=State.FAILED) for w in fleet(0, num))


def test_eight_that_an_outage_of_a_minute_took_come_back_with_the_machines_and_are_not_given_up() -> None:
    fluid = Outage(Autoscaler(QUICK), (*fleet(1), *lost(8)), lambda _: [HEAVY], Budget(9, PoolBounds(1), EIGHT), QUICK)
    fluid.run(12)
    assert not fluid.counts()["GiveUp"]
    assert fluid.ready(Role.DECODE) == 8


def test_eight_that_do_not_come_back_are_asked_for_again_at_once_when_nobody_waits_for_them_any_longer() -> None:
    fluid = Outage(Autoscaler(QUICK), (*fleet(1), *lost(8)), lambda _: [HEAVY], Budget(9, PoolBounds(1), EIGHT), QUICK)
    fluid.brings_back = False
    fluid.run(20)
    [given_up_s] = set(fluid.times_of(GiveUp))
    assert QUICK.bring_back_s < given_up_s <= QUICK.bring_back_s + 2 * QUICK.tick_s
    assert fluid.times_of(Create) == [given_up_s] * 8
    assert fluid.ready(Role.DECODE) == 8


def test_starts_that_failed_together_count_as_one() -> None:
    pending = tuple(worker(f"late-{n}", Role.DECODE, State.PENDING) for n in range(8))
    fluid = Fluid(Autoscaler(QUICK), (*fleet(1), *pending), lambda _: [HEAVY], Budget(9, PoolBounds(1), EIGHT), QUICK)
    fluid._later = lambda of: of  # type: ignore[method-assign]
    fluid.run(12)
    assert fluid.times_of(GiveUp) == [fluid.times_of(GiveUp)[0]] * 8
    assert fluid.times_of(Create)[0] == fluid.times_of(GiveUp)[0] + BACKOFF_S


@pytest.mark.parametrize("num_looks", [5, 30])
def test_a_start_that_is_not_given_up_although_it_should_be_counts_once(num_looks: int) -> None:
    scaler, stuck = Autoscaler(QUICK), worker("late", Role.DECODE, State.PENDING)
    created = []
    for tick in range(4 + num_looks):  # nothing is carried out
        proposals = scaler.look(facts((*fleet(1), stuck), HEAVY, now_s=10.0 * tick))
        assert tick < 4 or GiveUp("late") in [proposal.act for proposal in proposals]
        created.append(any(isinstance(proposal.act, Create) for proposal in proposals))
    assert created[4:] == [tick * 10.0 >= BACKOFF_S for tick in range(num_looks)]


def test_a_worker_that_an_operator_looks_after_is_neither_taken_back_nor_counted_nor_given_up() -> None:
    kept = replace(worker("kept", Role.PREFILL, State.DRAINING), leaves=False)
    [proposal] = Autoscaler(TIMES).look(facts((*fleet(1, 2), kept), chat(75.0)))
    assert isinstance(proposal.act, Create)
    away = replace(kept, state=State.FAILED, serves=False)
    fluid = Fluid(Autoscaler(TIMES), (*fleet(1, 2), away), lambda _: [chat(75.0)])
    fluid.run(60)
    assert fluid.times_of(Create) == [10.0]
    assert "kept" in {w.worker_id for w in fluid.workers}


def test_a_worker_that_an_operator_looks_after_is_no_reason_to_wait_for_it_to_leave() -> None:
    kept = replace(worker("kept", Role.DECODE, State.DRAINING), leaves=False)

    class Kept(Fluid):
        def _later(self, of: WorkerFacts) -> WorkerFacts | None:
            return of if of.worker_id == "kept" else super()._later(of)

    shrinks = Kept(Autoscaler(TIMES), (*fleet(2, 3), kept), lambda _: [chat(5.0)])
    shrinks.run(60)
    assert (shrinks.ready(Role.PREFILL), shrinks.ready(Role.DECODE)) == (1, 1)
    obeys = Kept(
        Autoscaler(TIMES), (*fleet(1, 3), kept), lambda _: [chat(5.0)], Budget(4, PoolBounds(1), PoolBounds(1))
    )
    obeys.run(1)
    assert obeys.counts() == {"Drain": 1}
    h200 = tuple(replace(w, shape="h200") for w in fleet(0, 5))
    makes_room = Kept(
        Autoscaler(TIMES),
        (*fleet(1, 0), *h200, kept),
        lambda _: [chat(100.0, 1_000.0, 4.0)],
        Budget(7, PoolBounds(1), PoolBounds(1)),
    )
    makes_room.run(30)
    assert makes_room.ready(Role.PREFILL) > 1


def test_who_was_lost_while_it_stood_by_or_drained_is_no_worker_of_its_pool() -> None:
    away = replace(worker("away", Role.PREFILL, State.FAILED), serves=False, stands_by=True)
    proposals = Autoscaler(TIMES).look(facts((*fleet(1, 2), away), chat(75.0)))
    assert [type(proposal.act) for proposal in proposals] == [Create]
    full = Autoscaler(TIMES).look(
        facts((*fleet(1, 2), away), chat(75.0), budget=Budget(4, PoolBounds(1), PoolBounds(1)))
    )
    assert not [p for p in full if isinstance(p.act, Create)]  # it has its GPUs


def test_no_more_workers_are_kept_warm_than_wanted_while_others_are_on_their_way_to_it() -> None:
    going = replace(worker("going", Role.DECODE, State.DRAINING), stands_by=True)

    class Slow(Fluid):
        def _later(self, of: WorkerFacts) -> WorkerFacts | None:
            return of if of.state is State.DRAINING else super()._later(of)

    fluid = Slow(Autoscaler(TIMES, max_standbys=1), (*fleet(3, 1), going), lambda _: [chat(5.0)])
    fluid.run(40)
    assert [p.act for _, p in fluid.acts] == [Drain(name, keep_standby=False) for name in ("prefill-0", "prefill-1")]
    both = Slow(Autoscaler(TIMES, max_standbys=1), fleet(2, 2), lambda _: [chat(5.0)])
    both.run(40)
    drains = [p.act for _, p in both.acts if isinstance(p.act, Drain)]
    assert [drain.keep_standby for drain in drains] == [True, False]
