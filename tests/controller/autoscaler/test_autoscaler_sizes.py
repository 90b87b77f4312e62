"""Sizes follow load: up at once, down late, each pool by its own work."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.request import Role
from router.controller.autoscaler.acts import Create, Drain, Proposal
from router.controller.autoscaler.autoscaler import Autoscaler
from router.controller.autoscaler.facts import ClassTraffic, FleetFacts, Tuning, WorkerLoad
from router.controller.autoscaler.lessons import Lessons, too_many
from router.controller.autoscaler.scaler import Times
from tests.controller.autoscaler.fleets import CHAT, MOST, carried_out, chat, facts, fleet
from tests.controller.autoscaler.fluid import Fluid


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


@pytest.mark.parametrize(("start_up_s", "hold_s"), [(5.0, 60.0), (60.0, 120.0), (100.0, 200.0), (600.0, 300.0)])
def test_a_pool_shrinks_once_less_was_enough_for_two_start_ups_within_a_minute_and_five(
    start_up_s: float, hold_s: float
) -> None:
    fluid = Fluid(Autoscaler(), fleet(1, 2), lambda _: [chat(5.0)])
    fluid.scaler = Autoscaler(Times(start_up_s=start_up_s))
    fluid.run(40)
    assert fluid.times_of(Drain) == [10.0 + hold_s]


@pytest.mark.parametrize("drain_s", [20.0, 600.0])
def test_half_of_what_is_too_much_leaves_at_once_and_the_rest_a_tick_after_these_take_no_calls(
    drain_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.controller.autoscaler.fluid.DRAIN_S", drain_s)
    fluid = Fluid(Autoscaler(), fleet(1, 9), lambda _: [chat(5.0)])
    fluid.run(40)
    assert fluid.times_of(Drain) == [130.0] * 4 + [150.0] * 2 + [170.0] + [190.0]
    assert fluid.ready(Role.DECODE) == 1


def test_a_pool_that_was_missed_soon_is_kept_for_twice_as_long_each_time() -> None:
    def bursts(at_s: float) -> list[ClassTraffic]:
        return [chat(250.0 if at_s % 600.0 < 60.0 else 5.0, prompt=16.0)]

    fluid = Fluid(Autoscaler(), fleet(1, 2), bursts)
    fluid.run(400)
    drains = fluid.times_of(Drain)
    waits = sorted({at_s - 600.0 * (at_s // 600.0) for at_s in drains})
    assert waits[0] < 60.0 + 150.0
    assert max(drains) < 2_400.0  # from the fourth burst on it is kept for the next one
    assert fluid.ready(Role.DECODE) > 1


def swinging(at_s: float) -> list[ClassTraffic]:
    return [chat(450.0 if at_s % 600.0 < 300.0 else 5.0, prompt=16.0)]


class Unheard(Fluid):
    """Nobody carries out what is proposed: mode advisory."""

    def _carry_out(self, proposal: Proposal) -> None:
        pass


@pytest.mark.parametrize(("fleets", "num_regrets"), [(Fluid, 1), (Unheard, 0)])
def test_only_what_was_done_is_regretted(fleets: type[Fluid], num_regrets: int) -> None:
    scaler = Autoscaler()
    fluid = fleets(scaler, fleet(1, 2), swinging)
    fluid.run(240)
    assert fluid.counts()["Drain"] > 0
    assert fluid.counts()["Create"] > 0
    regrets = scaler.kept().pools["decode"].num_regrets
    assert min(regrets, 1) == num_regrets


@pytest.mark.parametrize(("later_rate", "drained_s"), [(20.0, 40.0), (250.0, 130.0), (None, 130.0), (math.nan, 130.0)])
def test_a_pool_shrinks_sooner_where_forecasts_say_that_it_will_not_be_missed(
    later_rate: float | None, drained_s: float
) -> None:
    fluid = Fluid(Autoscaler(), fleet(1, 2), lambda _: [replace(chat(5.0, prompt=16.0), later_rate=later_rate)])
    fluid.run(40)
    assert fluid.times_of(Drain) == [drained_s]


@pytest.mark.parametrize(("rate", "grows"), [(0.05, True), (0.3, True), (0.3, False)])
def test_a_slow_load_of_heavy_calls_that_miss_gets_more_workers(rate: float, grows: bool) -> None:
    """Few calls end in 30 s, so five minutes of them say what is missed."""
    calls = 300.0 * rate
    missed = calls if grows else 0.05 * calls

    def traffic(_: float) -> list[ClassTraffic]:
        slow = chat(rate, 1_000.0, 200.0, num_arrived=calls, judged_s=300.0, num_judged=calls, num_missed_tpot=missed)
        return [slow]

    fluid = Fluid(Autoscaler(), fleet(1, 1), traffic)
    fluid.run(180)
    assert (fluid.ready(Role.DECODE) > 1) == grows


@pytest.mark.parametrize(
    ("num_missed", "num_judged", "percentile", "many"),
    [
        (1, 1, 0.95, False),
        (2, 6, 0.95, False),
        (3, 6, 0.95, True),
        (3, 20, 0.95, False),
        (4, 20, 0.95, True),
        (10, 100, 0.95, False),
        (11, 100, 0.95, True),
        (50_500, 1_000_000, 0.95, True),
        (50_100, 1_000_000, 0.95, False),
        (1, 20, 1.0, False),
        (2, 20, 1.0, True),
        (0, 0, 0.95, False),
        (math.nan, 20, 0.95, False),
        (5, math.nan, 0.95, False),
        (math.inf, math.inf, 0.95, False),
    ],
)
def test_more_calls_miss_than_chance_explains(
    num_missed: float, num_judged: float, percentile: float, many: bool
) -> None:
    of_class = replace(chat(1.0), slo=replace(CHAT, percentile=percentile), num_judged=num_judged)
    assert too_many(num_missed, of_class) is many


def test_no_pool_shrinks_while_calls_miss_and_not_before_they_have_been_served_for_as_long_as_it_must() -> None:
    def missed(at_s: float) -> list[ClassTraffic]:
        return [chat(5.0, num_judged=100.0, num_failed=30.0 if at_s < 500.0 else 0.0)]

    fluid = Fluid(Autoscaler(), fleet(1, 2), missed)
    fluid.run(80)
    assert fluid.times_of(Drain) == [490.0 + 120.0]


def test_calls_that_fail_whatever_the_sizes_keep_no_more_than_twice_what_they_need() -> None:
    def traffic(now_s: float) -> list[ClassTraffic]:
        rate = 1_000.0 if now_s < 600.0 else 50.0
        judged = 30.0 * rate
        return [replace(chat(rate, 1_000, 200), num_arrived=300.0 * rate, num_judged=judged, num_failed=0.1 * judged)]

    fluid = Fluid(Autoscaler(Times()), fleet(1, 1), traffic)
    fluid.run(60)
    assert min(fluid.sizes[-1][1:]) > 10
    fluid.run(60)
    assert max(fluid.sizes[-1][1:]) <= 4


def test_a_pool_that_is_short_by_less_than_the_band_grows_where_calls_miss() -> None:
    def after_a_minute(num_failed: float) -> int:
        fluid = Fluid(Autoscaler(), fleet(1, 2), lambda _: [chat(365.0, 16.0, num_judged=100.0, num_failed=num_failed)])
        fluid.run(6)
        return fluid.counts()["Create"]

    assert (after_a_minute(0.0), after_a_minute(30.0)) == (0, 1)


def test_one_bad_window_is_no_lesson_and_two_that_share_no_call_are() -> None:
    lessons = Lessons()
    for now_s in (0.0, 10.0, 20.0):
        lessons.learn(Role.DECODE, now_s)
    assert lessons.factor(Role.DECODE, 20.0) == 1.0
    lessons.learn(Role.DECODE, 200.0)
    assert lessons.factor(Role.DECODE, 200.0) == 1.0
    lessons.learn(Role.DECODE, 230.0)
    assert lessons.factor(Role.DECODE, 230.0) == pytest.approx(1.1)


def test_a_change_of_sizes_ends_what_was_suspected_of_the_old_ones() -> None:
    lessons = Lessons()
    lessons.learn(Role.DECODE, 1_000.0, 300.0)
    lessons.changed()
    lessons.learn(Role.DECODE, 1_340.0, 300.0)
    assert lessons.factor(Role.DECODE, 1_340.0) == 1.0


def test_a_class_with_many_calls_does_not_reset_what_is_suspected_of_one_with_few() -> None:
    lessons = Lessons()
    for now_s in (0.0, 100.0, 200.0, 300.0):
        lessons.learn(Role.DECODE, now_s, 30.0)
        lessons.learn(Role.DECODE, now_s, 300.0)
    assert lessons.factor(Role.DECODE, 300.0) > 1.0


@pytest.mark.parametrize(("num_arrived", "num_created"), [(4.0, 0), (200.0, 1), (20_000.0, 2)])
def test_a_pool_takes_what_is_sure_and_more_once_more_calls_were_seen(num_arrived: float, num_created: int) -> None:
    # 560 calls/s want four decode workers, 10 % fewer three, 40 % fewer two
    proposals = Autoscaler().look(facts(fleet(1, 2), chat(560.0, 16.0, num_arrived=num_arrived)))
    assert sum(isinstance(proposal.act, Create) for proposal in proposals) == num_created
