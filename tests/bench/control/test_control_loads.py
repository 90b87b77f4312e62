"""Loads are what they are said to be, and the same each time."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from bench.control.loads import Load, Rows, catalogue, shrunk, stretched
from bench.control.rig import Costs
from bench.traces import TraceError, TraceRow

BY_NAME = {load.name: load for load in catalogue()}
RECORDED = ("mooncake conversation", "azure conv", "agentic", "servegen day")


def work(load: Load, from_s: float, to_s: float) -> tuple[float, float]:
    """GPU-seconds a second of prefill and of decode."""
    rows = [row for row in load.rows(0) if from_s <= row.at_s < to_s]
    costs = Costs().of_all(rows, caches=False)
    return sum(c.prefill_s for c in costs) / (to_s - from_s), sum(c.decode_s for c in costs) / (to_s - from_s)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in RECORDED])
def test_a_seed_always_gives_the_same_calls_in_order_and_another_gives_others(name: str) -> None:
    load = BY_NAME[name]
    first, again, other = (list(islice(load.rows(seed), 200)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(before.at_s <= after.at_s < load.duration_s for before, after in pairwise(first))


def test_the_mix_swings_between_15_and_85_percent_of_prefill_at_the_same_total() -> None:
    totals = []
    for phase in range(4):
        prefill, decode = work(BY_NAME["mix swings"], 900.0 * phase, 900.0 * (phase + 1))
        totals.append(prefill + decode)
        assert prefill / totals[-1] == pytest.approx(0.85 if phase % 2 == 0 else 0.15, abs=0.03)
    assert max(totals) < 1.12 * min(totals)


def test_the_steady_load_keeps_six_gpus_70_percent_busy() -> None:
    prefill, decode = work(BY_NAME["constant from half"], 0.0, 7_200.0)
    assert prefill / 3 == pytest.approx(0.68, abs=0.03)
    assert decode / 3 == pytest.approx(0.68, abs=0.05)


def test_the_rate_swings_by_60_percent_within_an_hour() -> None:
    rises, falls = (sum(work(BY_NAME["rate swings"], at_s, at_s + 300.0)) for at_s in (750.0, 2_550.0))
    assert rises / falls == pytest.approx(1.6 / 0.4, rel=0.25)


def test_a_burst_is_four_times_the_prompts_for_a_minute() -> None:
    burst, usual = (work(BY_NAME["prefill bursts"], at_s, at_s + 60.0)[0] for at_s in (540.0, 300.0))
    assert burst > 2.5 * usual


def test_traffic_that_stops_comes_back() -> None:
    rows = list(BY_NAME["traffic stops"].rows(0))
    assert not [row for row in rows if 300.0 <= row.at_s < 1_200.0]
    assert [row for row in rows if row.at_s >= 1_200.0]


def recorded(num: int) -> Rows:
    return lambda _seed: iter([TraceRow(2.0 * n, 1_000 + n, 100, (n, n + 1), 64) for n in range(num)])


def test_a_stretched_trace_has_fewer_and_longer_calls_and_as_many_tokens_a_second() -> None:
    rows = list(stretched(recorded(400), every=4, speed=2.0)(3))
    before = list(recorded(400)(0))
    assert len(rows) == 100
    tokens, told = (sum(row.input_tokens for row in each) / each[-1].at_s for each in (rows, before))
    assert tokens == pytest.approx(2 * told, rel=0.02)


def test_a_shrunk_trace_keeps_what_prompts_have_in_common() -> None:
    rows = list(shrunk(recorded(1_000), by=4, speed=2.0)(0))
    assert rows[0].at_s == 0.0
    assert rows[1] == TraceRow(1.0, 351, 25, (401, 402), 16)


@pytest.mark.parametrize("name", [*RECORDED[:2], RECORDED[3], pytest.param("agentic", marks=pytest.mark.slow)])
def test_a_recorded_load_plays_its_trace(name: str) -> None:
    try:
        rows = list(islice(BY_NAME[name].rows(0), 50))
    except TraceError as error:
        pytest.skip(str(error))
    assert len(rows) == 50
    assert all(before.at_s <= after.at_s for before, after in pairwise(rows))
