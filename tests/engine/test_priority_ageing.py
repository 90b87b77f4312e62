"""A higher priority goes first, and delays a lower one for a bounded time only."""

from __future__ import annotations

import pytest

from baton.priority import PRIORITY_STEP_S, rank_s
from tests.engine.engine_rig import make_request
from tests.engine.test_scheduler import Loop

PERIOD_S = 0.5  # one of the higher priority comes this often, and takes the only seat for a step


def starts_after_s(levels: int) -> float:
    """How long one of the lower priority waits behind a stream of those above it that never ends."""
    loop, now_s = Loop(max_num_seqs=1), 0.0
    loop.scheduler.add(make_request(0, 8, 1), now_s, prefill_only=False)
    for seq in range(1, 100):
        loop.scheduler.add(make_request(seq, 8, 1, priority=levels), now_s, prefill_only=False)
        if 0 in loop.step().admitted:
            return now_s
        now_s += PERIOD_S
    raise AssertionError("it never starts")


@pytest.mark.parametrize("levels", [1, 2, 7])
def test_a_steady_stream_of_a_higher_priority_delays_a_lower_one_by_a_step_a_level(levels: int) -> None:
    bound_s = levels * PRIORITY_STEP_S
    assert bound_s - PERIOD_S <= starts_after_s(levels) <= bound_s + PERIOD_S


def test_ranks_say_who_goes_first_whenever_they_are_asked() -> None:
    assert rank_s(1, 10.0) < rank_s(0, 10.0) < rank_s(-1, 10.0)
    assert rank_s(0, 10.0 - PRIORITY_STEP_S - 0.1) < rank_s(1, 10.0)


def test_among_running_ones_priority_alone_says_who_gives_way() -> None:
    loop = Loop(num_blocks=6)
    loop.scheduler.add(make_request(1, 32, 100, priority=0), 0.0, prefill_only=False)
    loop.step()
    loop.scheduler.add(make_request(2, 32, 100, priority=1), 100 * PRIORITY_STEP_S, prefill_only=False)
    preempted = [seq for _ in range(60) for seq in loop.step().preempted]
    assert preempted[:1] == [1]


def test_a_grant_needs_a_seat_so_that_what_is_adopted_runs_at_once() -> None:
    loop = Loop(max_num_seqs=2)
    loop.add(1, 30)
    loop.step()
    for seq in (2, 3):
        loop.scheduler.reserve(make_request(seq, 30), 0.0)
    loop.add(4, 30)
    assert [reservation.seq for reservation in loop.step().reserved] == [2]
    assert loop.step().reserved == []
    loop.scheduler.adopt(2, 0)
    loop.step()
    assert {seq for seq, _, _ in loop.shape} == {1, 2}
    loop.scheduler.drop(1)
    assert [reservation.seq for reservation in loop.step().reserved] == [3]
    assert loop.scheduler.num_waiting == 1


def test_a_ticket_that_is_given_up_gives_its_seat_back() -> None:
    loop = Loop(max_num_seqs=1)
    loop.scheduler.reserve(make_request(1, 30), 0.0)
    assert [reservation.seq for reservation in loop.step().reserved] == [1]
    loop.add(2, 30)
    assert loop.step().admitted == []
    loop.scheduler.drop(1)
    assert loop.step().admitted == [2]
