"""Numbers from records: every figure checked against one worked by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.slo import SLO
from baton.timings import Timings
from bench.measure import (
    GAP_FROM_CLIENT,
    GAP_FROM_SERVER,
    Outcome,
    Record,
    nearest_rank,
    percentiles,
    summarise,
)
from bench.report import dump

LOOSE = SLO("test", ttft_ms=1e6, tpot_ms=1e6)


def record(
    times_s: tuple[float, ...] = (1.0, 1.5, 1.6, 1.7),
    *,
    outcome: Outcome = Outcome.COMPLETED,
    due_s: float = 0.5,
    sent_s: float = 0.75,
    end_s: float = 2.5,
    usage_tokens: int | None = None,
    timings: Timings | None = None,
    error_kind: str = "",
) -> Record:
    return Record(
        index=0,
        outcome=outcome,
        due_s=due_s,
        sent_s=sent_s,
        end_s=end_s,
        token_times_s=times_s,
        prompt_tokens=10,
        usage_tokens=usage_tokens,
        timings=timings,
        error_kind=error_kind,
        error_message="why" if error_kind else "",
    )


def test_latency_counts_from_the_due_instant_so_waiting_in_the_client_is_in_it() -> None:
    one = record()
    assert one.ttft_ms == pytest.approx(500)
    assert one.client_wait_ms == pytest.approx(250)
    assert one.e2e_ms == pytest.approx(2000)


def test_tpot_is_last_minus_first_over_n_minus_one_and_itl_the_single_gaps() -> None:
    one = record()
    assert one.tpot_ms == pytest.approx(700 / 3)
    assert one.itl_ms == pytest.approx([500, 100, 100])


def test_a_one_token_answer_has_no_tpot() -> None:
    assert record((1.0,)).tpot_ms is None


def test_tokens_that_share_a_chunk_of_text_are_counted_by_the_servers_usage() -> None:
    one = record((1.0, 2.0), usage_tokens=11)
    assert one.num_tokens == 11
    assert one.tpot_ms == pytest.approx(100)
    assert summarise([one], started_s=0.0, slo=LOOSE).num_unseen_tokens == 9


def test_percentiles_are_nearest_rank() -> None:
    values = percentiles(float(n) for n in range(1, 101))
    assert (values.n, values.p50, values.p95, values.p99, values.max) == (100, 50, 95, 99, 100)
    assert values.mean == pytest.approx(50.5)


def test_percentiles_of_nothing_are_not_numbers() -> None:
    assert percentiles([]).n == 0
    assert math.isnan(percentiles([]).p99)


def test_figures_of_numpy_are_numbers_in_json_too() -> None:
    figures = percentiles(np.array([1.0, 2.0]))
    document = {"gap_ms": figures.p99, "raw": np.float64(0.5), "missing": percentiles([]).p50}
    assert json.loads(dump(document)) == {"gap_ms": 2.0, "raw": 0.5, "missing": None}


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_percentile_was_observed_and_enough_values_do_not_exceed_it(values: list[float], share: float) -> None:
    found = nearest_rank(sorted(values), share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9


def test_the_servers_handoff_gap_is_preferred_and_never_mixed_with_the_clients() -> None:
    mixed = [record(timings=Timings(handoff_gap_ms=42.0)), record()]
    summary = summarise(mixed, started_s=0.0, slo=LOOSE)
    assert summary.handoff_gap_source == GAP_FROM_SERVER
    assert (summary.handoff_gap_ms.n, summary.handoff_gap_ms.max) == (1, 42.0)


def test_answers_of_one_worker_have_no_handoff_and_so_no_gap() -> None:
    here, shipped = record(timings=Timings()), record(timings=Timings(handoff_gap_ms=42.0))
    assert summarise([here, shipped], started_s=0.0, slo=LOOSE).handoff_gap_ms.n == 1
    assert summarise([here], started_s=0.0, slo=LOOSE).handoff_gap_ms.n == 0


def test_without_the_servers_word_the_gap_is_token_one_to_token_two() -> None:
    summary = summarise([record(), record((1.0,))], started_s=0.0, slo=LOOSE)
    assert summary.handoff_gap_source == GAP_FROM_CLIENT
    assert summary.handoff_gap_ms.n == 1
    assert summary.handoff_gap_ms.max == pytest.approx(500)


def test_failures_are_misses_cancels_are_not_judged_and_goodput_is_what_met_all() -> None:
    records = [
        record(),
        record((9.0, 9.1)),  # TTFT 8.5 s
        record((1.0, 2.0)),  # TPOT 1 s
        record((), outcome=Outcome.FAILED, error_kind="http_503", end_s=10.0),
        record((1.0,), outcome=Outcome.CANCELLED),
    ]
    summary = summarise(records, started_s=0.0, slo=SLO("test", ttft_ms=1000, tpot_ms=300))
    assert summary.slo.num_judged == 4
    assert summary.slo.verdicts == {"met": 1, "ttft": 1, "tpot": 1, "failed": 1}
    assert summary.slo.attainment == 0.25
    assert summary.slo.goodput_per_s == pytest.approx(1 / 10)
    assert summary.errors == {"http_503": 1}
    assert summary.error_examples == {"http_503": "why"}
    assert (summary.num_completed, summary.num_cancelled, summary.num_failed) == (3, 1, 1)


def test_throughput_counts_what_was_delivered_and_leaves_failed_answers_out() -> None:
    records = [
        record(),
        record((1.0,), outcome=Outcome.CANCELLED),
        record(outcome=Outcome.FAILED, error_kind="truncated"),
    ]
    summary = summarise(records, started_s=0.5, slo=LOOSE)
    assert summary.output_tokens == 5
    assert summary.output_tokens_per_s == pytest.approx(5 / 2.0)


def test_no_calls_give_zeros_not_a_crash() -> None:
    summary = summarise([], started_s=3.0, slo=LOOSE)
    assert (summary.num_calls, summary.duration_s, summary.slo.attainment) == (0, 0.0, 0.0)
