"""How many lines may run: at once fewer under pressure, more only where there is slack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission import Slack
from router.batch.pacer import CALM_S, GROW_S, HOLD_S, Allowance, Pacer


def slack(**fields: Any) -> Slack:
    return replace(Slack(num_waiting=0, num_shed=0, has_lane=True, num_free=80, num_decoding=20), **fields)


def calm() -> Pacer:
    """One that has seen no want of seats for long enough."""
    pacer = Pacer(256)
    pacer.look(slack(has_lane=False), 0, 0, -CALM_S)
    return pacer


def looks(pacer: Pacer, left: Slack, num_running: int, now_s: float) -> int:
    """How many may run, where all of them have begun."""
    return pacer.look(left, num_running, 0, now_s).num_running


@pytest.mark.parametrize(
    "pressure", [{"num_waiting": 1, "num_free": 0}, {"num_shed": 1, "num_free": 0}, {"num_free": -1}]
)
def test_want_of_seats_halves_what_runs_at_each_look_until_nothing_does(pressure: dict[str, int]) -> None:
    pacer, num_running = Pacer(256), 20
    for look in range(10):
        fields = {**pressure, "num_shed": look + 1} if "num_shed" in pressure else pressure
        num_running = looks(pacer, slack(**fields), num_running, 0.05 * look)
    assert num_running == 0


@pytest.mark.parametrize("pressure", [{"num_waiting": 1}, {"num_shed": 1}])
def test_want_of_lanes_takes_lines_without_a_first_token_and_no_others(pressure: dict[str, int]) -> None:
    assert Pacer(256).look(slack(**pressure), 20, 6, 0.0) == Allowance(20, 3)
    assert Pacer(256).look(slack(**pressure), 20, 1, 0.0) == Allowance(20, 0)


def test_it_grows_by_a_quarter_each_time_and_not_for_a_while_behind_want_of_seats() -> None:
    pacer = Pacer(256)
    assert looks(pacer, slack(num_waiting=1, num_free=0), 20, 0.0) == 10
    assert looks(pacer, slack(), 10, HOLD_S - 0.01) == 10
    assert looks(pacer, slack(), 10, HOLD_S) == 14
    assert looks(pacer, slack(), 14, HOLD_S + GROW_S / 2) == 14
    assert looks(pacer, slack(), 40, HOLD_S + GROW_S) == 50


def test_a_reserve_of_seats_is_left_and_restored_before_anybody_waits() -> None:
    assert looks(calm(), slack(num_free=22, num_decoding=78), 70, 0.0) == 72
    assert looks(calm(), slack(num_free=20, num_decoding=80), 70, 0.0) == 70
    assert looks(calm(), slack(num_free=9, num_decoding=91), 70, 0.0) == 59


def test_the_reserve_is_larger_for_a_while_behind_want_of_seats() -> None:
    pacer = calm()
    looks(pacer, slack(num_waiting=1, num_free=0), 2, 0.0)
    assert looks(pacer, slack(num_free=50, num_decoding=50), 50, CALM_S - 0.1) == 50
    assert looks(pacer, slack(num_free=50, num_decoding=50), 50, CALM_S) == 63


def test_a_lane_that_is_not_free_and_a_fleet_that_is_not_there_let_nothing_begin() -> None:
    assert Pacer(256).look(slack(has_lane=False), 5, 2, 0.0) == Allowance(5, 2)
    assert looks(Pacer(256), slack(has_lane=False, num_free=0, num_decoding=0), 0, 0.0) == 0


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans(), st.integers(-5, 99), st.integers(0, 99)))
)
def test_it_never_allows_more_than_the_limit_nor_growth_into_the_reserve(
    seen: list[tuple[int, int, bool, int, int]],
) -> None:
    pacer, num_running, num_shed = Pacer(32), 0, 0
    for number, (num_waiting, shed, has_lane, num_free, num_decoding) in enumerate(seen):
        num_shed += shed
        left = Slack(num_waiting, num_shed, has_lane, num_free, num_decoding)
        allowed = looks(pacer, left, num_running, 0.1 * number)
        assert 0 <= allowed <= 32
        assert allowed <= num_running or num_free - (allowed - num_running) >= 0.2 * (num_free + num_decoding)
        num_running = allowed
