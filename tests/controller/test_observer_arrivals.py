"""Forecasts of arrivals: better than the last value where that can be, honest about their error, proof against bad ticks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.controller.arrivals import HOLD_TICKS, MAX_RATE, TARGET_TICKS, TICK_S, Forecaster, Level, Trend

LEAD_TICKS = 6  # of the first lead


def series(rate: object, num_ticks: int, seed: int = 0) -> list[float]:
    """Poisson counts of a rate that is a function of the tick, as rates."""
    draw = np.random.default_rng(seed)
    return [float(draw.poisson(rate(tick) * TICK_S)) / TICK_S for tick in range(num_ticks)]  # type: ignore[operator]


def errors(rates: list[float]) -> tuple[float, float]:
    """Mean absolute error at the first lead: ours, the last value's."""
    forecaster, ours, last = Forecaster(), [], []
    for tick, rate in enumerate(rates[: -LEAD_TICKS - 1]):
        forecaster.observe(rate)
        if tick >= 30:
            end = tick + LEAD_TICKS + 1
            realised = sum(rates[end - TARGET_TICKS : end]) / TARGET_TICKS
            ours.append(abs(forecaster.forecasts()[0].rate - realised))
            last.append(abs(rate - realised))
    return sum(ours) / len(ours), sum(last) / len(last)


@pytest.mark.parametrize(
    "rate",
    [
        lambda tick: 2.0,
        lambda tick: 20 + 12 * math.sin(tick / 57),  # +-60 % in an hour
        lambda tick: 200 + 0.5 * tick,
    ],
    ids=["constant", "swinging", "growing"],
)
def test_forecasts_beat_the_last_value(rate: object) -> None:
    ours, last = errors(series(rate, 500))
    assert ours < 0.95 * last


def test_a_trend_is_carried_on_and_ends() -> None:
    trend, level = Trend(0.003), Level(0.03)
    for tick in range(200):
        for candidate in (trend, level):
            candidate.update(100.0 + tick)
    assert level.predict(6) < 299 < trend.predict(6) <= 305.5
    assert trend.predict(10_000) < 320, "a slope fades: nothing grows for ever"


def test_intervals_hold_what_comes_about_as_often_as_they_say() -> None:
    forecaster = Forecaster()
    for rate in series(lambda tick: 20 + 12 * math.sin(tick / 57), 1_000):
        forecaster.observe(rate)
    for forecast in forecaster.forecasts():
        assert forecast.coverage is not None
        assert 0.7 <= forecast.coverage <= 0.97
        assert forecast.low <= forecast.rate <= forecast.high
        assert forecast.error is not None
        assert 0 < forecast.error < 0.5


def test_error_and_coverage_are_not_told_before_forecasts_came_true() -> None:
    forecaster = Forecaster()
    for _ in range(10):
        forecaster.observe(5.0)
    assert [(f.error, f.coverage) for f in forecaster.forecasts()] == [(None, None)] * 2


def test_traffic_that_stopped_is_believed_within_ten_ticks_and_its_return_at_once() -> None:
    forecaster = Forecaster()
    for rate in [*series(lambda tick: 10.0, 200), *[0.0] * 10]:
        forecaster.observe(rate)
    assert [forecast.rate for forecast in forecaster.forecasts()] == [0.0, 0.0]
    forecaster.observe(50.0)
    assert forecaster.forecasts()[0].rate > 5.0


def test_lost_metrics_change_nothing_at_first_and_decay_to_zero_later() -> None:
    forecaster = Forecaster()
    for rate in series(lambda tick: 10.0, 100):
        forecaster.observe(rate)
    before = forecaster.forecasts()[0].rate
    for _ in range(HOLD_TICKS):
        forecaster.observe(None)
    assert forecaster.forecasts()[0].rate == before
    faded = [before]
    for _ in range(60):
        forecaster.observe(None)
        faded.append(forecaster.forecasts()[0].rate)
    assert faded == sorted(faded, reverse=True)
    assert faded[-1] < 0.01 * before
    forecaster.observe(3.0)
    assert forecaster.forecasts()[0].rate == pytest.approx(3.0), "what was known before the silence is over"


@given(st.lists(st.sampled_from([math.nan, math.inf, -1.0, -math.inf, 2 * MAX_RATE]), max_size=5))
def test_a_tick_that_is_no_rate_is_one_without_data(bad: list[float]) -> None:
    clean, poisoned = Forecaster(), Forecaster()
    for rate in series(lambda tick: 8.0, 60):
        clean.observe(rate)
        poisoned.observe(rate)
    for value in bad:
        clean.observe(None)
        poisoned.observe(value)
    assert poisoned.forecasts() == clean.forecasts()


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)), max_size=120))
def test_no_series_makes_a_forecast_that_is_no_rate(rates: list[float | None]) -> None:
    forecaster = Forecaster()
    for rate in rates:
        forecaster.observe(rate)
    for forecast in forecaster.forecasts():
        assert 0 <= forecast.low <= forecast.high < math.inf
        assert 0 <= forecast.rate < math.inf


@pytest.mark.parametrize("lead_s", [10.0, 65.0, 0.0])
def test_a_lead_that_ticks_cannot_express_is_refused(lead_s: float) -> None:
    with pytest.raises(ValueError, match="lead_s"):
        Forecaster([lead_s])
