"""What a number is taken to be after it changed, and before."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from router.controller.autoscaler.levels import Level, Levels, Seen
from router.ring import LONG_S, SHORT_S

TICK_S = 10.0


def poisson(mean: float, seconds: float) -> float:
    return math.sqrt(mean / seconds)


def sure(mean: float, count: float) -> float:
    return 0.01


def taken(arrivals: Sequence[float]) -> list[float]:
    """What a rate is taken to be each TICK_S from LONG_S on; `arrivals`: by second."""
    level, values = Level(), []
    for end in range(int(LONG_S), len(arrivals) + 1, int(TICK_S)):
        short, long = (Seen(sum(arrivals[end - int(span_s) : end]), span_s) for span_s in (SHORT_S, LONG_S))
        value = level.look(float(end), short, long, poisson)
        assert value is not None
        values.append(value)
    return values


def drawn(rate: Callable[[int], float], num_s: int, seed: int) -> list[float]:
    """Arrivals by second: of 20 chances each."""
    chance = random.Random(seed)
    return [float(sum(chance.random() < rate(second) / 20 for _ in range(20))) for second in range(num_s)]


def test_a_step_that_was_believed_is_not_doubted_again_while_the_long_window_catches_up() -> None:
    for low, high in ((1.0, 2.0), (2.0, 4.0), (4.0, 5.5), (5.5, 4.0), (2.0, 0.0)):
        values = taken([low] * 600 + [high] * 600)[30:]
        after_90_s = values[9:]
        assert max(abs(value - high) for value in after_90_s) < 0.1 * abs(high - low)


def test_a_second_change_within_the_long_window_is_seen_as_soon_as_the_first() -> None:
    values = taken([1.0] * 300 + [4.0] * 120 + [1.0] * 400)
    assert max(values) == 4.0
    assert max(values[int((120 + 2 * SHORT_S) / TICK_S) :]) < 1.4  # windows that hold the edge


def test_what_chance_explains_moves_little() -> None:
    values = [value for seed in range(8) for value in taken(drawn(lambda _: 1.44, 3_600, seed))]
    assert sum(abs(value - 1.44) > 0.25 * 1.44 for value in values) <= 0.005 * len(values)


def test_a_step_by_half_is_known_for_most_of_it_after_a_minute() -> None:
    shares = []
    for seed in range(40):
        values = taken(drawn(lambda second: 1.44 if second < 600 else 2.16, 720, seed))
        shares.append((values[30 + 7] - 1.44) / (2.16 - 1.44))  # 70 s after it
    assert math.fsum(shares) / len(shares) > 0.7


def test_a_swing_is_followed_closer_than_by_the_long_window() -> None:
    def rate(second: int) -> float:
        return 4.0 * (1 + 0.6 * math.sin(2 * math.pi * second / 3_600))

    def error(values: Sequence[float]) -> float:
        times = [LONG_S + TICK_S * place for place in range(len(values))]
        return math.fsum((value - rate(int(at_s))) ** 2 for at_s, value in zip(times, values, strict=True))

    arrivals = drawn(rate, 7_200, seed=0)
    long = [sum(arrivals[end - 300 : end]) / LONG_S for end in range(300, 7_201, 10)]
    assert error(taken(arrivals)) < error(long)


def test_lengths_that_never_vary_are_believed_at_once() -> None:
    level, alike = Level(), Seen(1_000.0, 10.0)
    assert level.look(0.0, alike, Seen(10_000.0, 100.0), lambda mean, count: 0.0) == 100.0
    assert level.look(60.0, Seen(2_000.0, 10.0), Seen(11_000.0, 100.0), lambda mean, count: 0.0) == 200.0


def test_a_window_without_calls_says_nothing() -> None:
    level, nothing, some = Level(), Seen(), Seen(1_000.0, 10.0)
    assert level.look(0.0, nothing, nothing, sure) is None
    assert level.look(10.0, nothing, some, sure) == 100.0
    assert level.look(20.0, some, some, sure) == 100.0
    assert level.look(30.0, Seen(5_000.0, 10.0), Seen(6_000.0, 20.0), sure) == 500.0  # a change
    assert level.look(70.0, nothing, Seen(6_000.0, 20.0), sure) == 500.0  # and nothing since


def test_a_clock_that_jumps_back_forgets_the_change() -> None:
    level = Level()
    assert level.look(1_000.0, Seen(60.0, 30.0), Seen(300.0, 300.0), poisson) == 2.0
    assert level.look(10.0, Seen(30.0, 30.0), Seen(300.0, 300.0), poisson) == 1.0


def test_looks_within_a_moment_are_one() -> None:
    often, once = Level(), Level()
    for end_s in range(10, 600, 10):
        short, long = Seen(60.0, SHORT_S), Seen(600.0, LONG_S)
        for later_s in (0.0, 0.1, 0.2):
            value = often.look(end_s + later_s, short, long, poisson)
        assert value == once.look(end_s + 0.2, short, long, poisson)


def test_looks_that_are_closer_than_windows_move_know_longer_spans_too() -> None:
    arrivals, level, values = drawn(lambda second: 10.0 if second < 600 else 20.0, 900, seed=1), Level(), []
    for end in range(300, 900, 2):
        short, long = (Seen(sum(arrivals[end - int(span_s) : end]), span_s) for span_s in (SHORT_S, LONG_S))
        values.append(level.look(float(end), short, long, poisson) or 0.0)
    lately = values[-30:]  # 240 to 300 s after the step: the mean since it, not of 30 s
    assert max(lately) - min(lately) < 1.0


def test_classes_that_are_no_more_leave_nothing() -> None:
    levels = Levels()
    chat = levels.of("chat")
    levels.of("gone")
    levels.keep(["chat"])
    assert levels.of("chat") is chat
    levels.keep([])
    assert levels.of("chat") is not chat
