"""What is known of traffic outlives a controller: its successor forecasts as it would have."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import EmulationConfig
from router.controller.measures import Measures, roofline_of
from router.controller.rate_store import RateStore, SavedRates
from router.windows import RouterWindows

ROOFLINE = roofline_of(EmulationConfig())


def after_traffic() -> Measures:
    measures = Measures(ROOFLINE, 0.0)
    for second in range(600):
        calls = 5 * second if second < 300 else 1_500 + 20 * (second - 300)
        measures.heard("a", RouterWindows(arrived=(("gold", float(calls)),)), float(second))
    return measures


def test_a_successor_forecasts_alike(tmp_path: Path) -> None:
    first, store = after_traffic(), RateStore(tmp_path / "rates.json")
    store.save(first.saved(now_unix_s=5_000.0))
    second = Measures(ROOFLINE, 77.0, store.load(), now_unix_s=5_002.0)
    [before], [after] = first.forecasts(599.5), second.forecasts(77.5)
    assert after == before


def test_what_passed_meanwhile_is_time_without_data(tmp_path: Path) -> None:
    saved = after_traffic().saved(now_unix_s=5_000.0)
    [after] = Measures(ROOFLINE, 0.0, saved, now_unix_s=5_030.0).forecasts(0.5)
    assert after.rate is None
    assert after.forecasts[0].rate == pytest.approx(20.0, rel=0.1)
    [late] = Measures(ROOFLINE, 0.0, saved, now_unix_s=5_000.0 + 3_600).forecasts(0.5)
    assert late.forecasts[0].rate < 0.1
    [back] = Measures(ROOFLINE, 0.0, saved, now_unix_s=4.0).forecasts(0.5)
    assert back.forecasts[0].rate == pytest.approx(20.0, rel=0.1), "the wall clock was set back"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"ticks": 3}', '{"at_unix_s": 1, "ticks": {"gold": ["x"]}}', '{"ticks": {}}']
)
def test_a_file_that_makes_no_sense_is_left_aside(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rates.json"
    file.write_text(text)
    assert RateStore(file).load() == SavedRates()
    assert Measures(ROOFLINE, 0.0, RateStore(file).load(), now_unix_s=1.0).forecasts(0.5) == []
