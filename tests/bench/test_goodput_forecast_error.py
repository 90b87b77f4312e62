"""The script that says how far off arrival forecasts are: its figures are of what it was given, and of real traffic they hold."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from bench import forecast_error
from bench.forecast_error import Row, Season, drawn, measure, recorded
from bench.traces import TraceError, find_trace
from router.controller.arrivals import TICK_S

AZURE = "azure2023/AzureLLMInferenceTrace_conv.csv"


def error_of(rows: list[Row], candidate: str, lead_s: float) -> float:
    [error] = [row.error for row in rows if (row.candidate, row.lead_s) == (candidate, lead_s)]
    return error


def test_a_steady_rate_is_forecast_without_error_and_holes_are_skipped() -> None:
    rows = measure("steady", [4.0] * 60 + [None] * 5 + [4.0] * 60)
    assert {row.candidate for row in rows} >= {"chosen", "last", "season"}
    assert all(row.error == pytest.approx(0.0, abs=1e-9) for row in rows)


def test_the_season_s_figure_is_that_of_a_forecaster_that_knows_the_day() -> None:
    """It lost on real traffic, not for being built wrongly: where days are alike and a jump is due, it wins."""
    season = Season.new()
    num_ticks = round(86_400 / TICK_S)
    day = [10.0 if tick < num_ticks // 2 else 30.0 for tick in range(num_ticks)]
    for rate in [*day, *day, *day[: num_ticks // 2 - 60]]:
        season.update(rate)
    assert season.predict(120) == pytest.approx(30.0, rel=0.2)


def test_a_rate_file_with_a_hole_has_ticks_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rates.csv"
    file.write_text("t_s,rate_rps\n0,5\n600,5\n3000,5\n3600,5\n")
    monkeypatch.setattr(forecast_error, "find_trace", lambda name: file)
    rates = drawn("any", 0)
    assert [rate is None for rate in rates] == [False] * 60 + [True] * 240 + [False] * 60
    file.write_text("t_s,rate_rps\n0,5\n600,nan\n")
    with pytest.raises(TraceError, match="line 3: rate_rps"):
        drawn("any", 0)


def test_on_recorded_traffic_the_forecast_beats_the_last_value_at_both_leads() -> None:
    try:
        find_trace(AZURE)
    except TraceError as error:
        pytest.skip(str(error))
    rows = measure("azure", recorded(AZURE, 0))
    for lead_s in (60.0, 300.0):
        assert error_of(rows, "chosen", lead_s) < 0.95 * error_of(rows, "last", lead_s)
    assert all(row.coverage is None or 0.7 <= row.coverage <= 0.97 for row in rows)
    assert not any(math.isnan(row.error) for row in rows)


def test_the_same_seed_draws_the_same_arrivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rates.csv"
    file.write_text("t_s,rate_rps\n0,5\n600,9\n")
    monkeypatch.setattr(forecast_error, "find_trace", lambda name: file)
    assert drawn("any", 1) == drawn("any", 1) != drawn("any", 2)
    known = [rate for rate in drawn("any", 1) if rate is not None]
    assert np.mean(known) == pytest.approx(7.0, rel=0.2)
