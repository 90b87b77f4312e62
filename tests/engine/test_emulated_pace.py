"""When emulated steps end, and how an engine that cannot keep up is found out."""

from __future__ import annotations

import logging

import pytest

from engine.pace import TOLERANCE, Pace
from tests.engine.test_emulated_runner import FakeTime

STEP_S = 1.0


class Oversleeping(FakeTime):
    """A machine on which every sleep lasts longer than asked for."""

    def __init__(self, extra_s: float) -> None:
        super().__init__()
        self.extra_s = extra_s

    def sleep(self, duration_s: float) -> None:
        super().sleep(duration_s + self.extra_s)


def steps(pace: Pace, time: FakeTime, num_steps: int, seqs: set[int], between_s: float = 0.0) -> float:
    """Take steps with work in between; returns how long one took on average."""
    begun_s = time.now_s
    for _ in range(num_steps):
        pace.begin(seqs)
        pace.finish(STEP_S)
        time.now_s += between_s
    return (time.now_s - begun_s) / num_steps


def test_the_engine_s_own_work_between_steps_of_one_sequence_is_part_of_them() -> None:
    time = FakeTime()
    assert steps(Pace(time.clock, time.sleep), time, 100, {1}, between_s=0.3) == pytest.approx(STEP_S, rel=0.01)


def test_a_small_delay_is_made_up_for_by_the_next_step() -> None:
    time = Oversleeping(0.5 * TOLERANCE)
    assert steps(Pace(time.clock, time.sleep), time, 100, {1}) == pytest.approx(STEP_S, rel=0.01)


def test_a_step_of_other_sequences_begins_when_it_is_called() -> None:
    time = FakeTime()
    pace = Pace(time.clock, time.sleep)
    steps(pace, time, 1, {1}, between_s=0.4)
    begun_s = time.now_s
    steps(pace, time, 1, {2})
    assert time.now_s - begun_s == pytest.approx(STEP_S)


def test_a_large_delay_is_not_hidden_by_shorter_steps_later() -> None:
    time = FakeTime()
    pace = Pace(time.clock, time.sleep)
    steps(pace, time, 1, {1}, between_s=2.5)
    pace.begin({1})
    pace.finish(STEP_S)  # ends 1.5 steps late
    begun_s = time.now_s
    steps(pace, time, 1, {1})
    assert time.now_s - begun_s == pytest.approx(STEP_S)


def test_an_engine_that_keeps_time_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    time = Oversleeping(0.5 * TOLERANCE)
    pace = Pace(time.clock, time.sleep)
    with caplog.at_level(logging.INFO):
        steps(pace, time, 100, {1})
    assert pace.p99_lateness < TOLERANCE
    assert not caplog.records


def test_one_that_cannot_says_so_once_and_once_more_when_it_can_again(caplog: pytest.LogCaptureFixture) -> None:
    time = Oversleeping(0.5)
    pace = Pace(time.clock, time.sleep)
    with caplog.at_level(logging.INFO):
        steps(pace, time, 150, {1})
        assert pace.p99_lateness == pytest.approx(0.5)
        time.extra_s = 0.0
        steps(pace, time, 1_000, {1})
    assert pace.p99_lateness < TOLERANCE
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [("WARNING", "emulation_pace"), ("INFO", "emulation_pace")]
