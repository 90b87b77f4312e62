"""Starts, timed by what members and load reports show."""

from __future__ import annotations

from baton.request import Role
from baton.v1 import worker_pb2
from router.controller.autoscaler.scaler import Times
from router.controller.fleet_state import DRAINING, FAILED, READY, STARTING, Member
from router.controller.live_times import KEPT, LiveTimes

CONFIGURED = Times(start_up_s=60.0)
IDLE = worker_pb2.Load(role=worker_pb2.ROLE_DECODE, idle=True)


def member(state: str, epoch: int = 1, name: str = "decode-0") -> list[Member]:
    return [Member(name, Role.DECODE, state=state, epoch=epoch)]


def test_a_start_lasts_from_its_asking_until_the_worker_is_heard() -> None:
    times = LiveTimes(CONFIGURED)
    times.look(member(STARTING, 0), {}, 10.0)
    times.look(member(READY), {}, 18.0)  # announced, not heard yet
    assert times.times.start_up_s == 60.0
    times.look(member(READY), {"decode-0": IDLE}, 19.0)
    assert times.times.start_up_s == 9.0
    times.look(member(READY), {"decode-0": IDLE}, 500.0)
    assert times.times.start_up_s == 9.0


def test_a_start_that_failed_or_was_cut_short_says_nothing() -> None:
    times = LiveTimes(CONFIGURED)
    for state in (FAILED, DRAINING):
        times.look(member(STARTING, 0), {}, 10.0)
        times.look(member(state, 0), {}, 130.0)
        times.look(member(READY), {"decode-0": IDLE}, 150.0)
    times.look([], {}, 160.0)
    assert times.times == CONFIGURED


def test_the_median_of_the_last_ones_counts() -> None:
    times = LiveTimes(CONFIGURED)
    for n in range(3 * KEPT):
        name, took_s = f"decode-{n}", 500.0 if n < 2 * KEPT else 20.0
        times.look(member(STARTING, 0, name), {}, 0.0)
        times.look(member(READY, 1, name), {name: IDLE}, took_s)
    assert times.times.start_up_s == 20.0
