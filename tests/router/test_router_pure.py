"""Parts of the router that know no clock and no socket: merging, verdicts, labels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.request import FinishReason
from baton.slo import Verdict
from baton.v1 import control_pb2
from router.call_spec import CallLabels
from router.labels import labels_from
from router.sequence import Token, TokenMerge
from router.slo_watch import SloWatch


@given(st.integers(1, 30).flatmap(lambda n: st.lists(st.integers(0, n - 1), max_size=90).map(lambda extra: (n, extra))))
def test_tokens_come_out_once_and_in_order_whatever_order_and_copies_they_came_in(drawn: tuple[int, list[int]]) -> None:
    count, arrivals = drawn
    merge = TokenMerge()
    out = [
        token.token_id for index in [*arrivals, *reversed(range(count))] for token in merge.push(index, _token(index))
    ]
    assert out == list(range(count))
    assert not merge.early


def test_a_token_that_comes_early_is_a_hole_until_the_missing_one_comes() -> None:
    merge = TokenMerge()
    assert merge.push(1, _token(11)) == []
    assert merge.early
    assert [token.token_id for token in merge.push(0, _token(10))] == [10, 11]
    assert not merge.early


def _token(token_id: int) -> Token:
    return Token(token_id, FinishReason.NONE, None)


def test_new_targets_replace_the_old_set_and_an_empty_one_says_nothing() -> None:
    watch = SloWatch()
    watch.apply(control_pb2.SloSet())
    assert set(watch.classes) == {"interactive", "batch"}
    gold = control_pb2.SloClass(name="gold", ttft_ms=100, tpot_ms=20, itl_p99_ms=50, percentile=0.99, priority=5)
    watch.apply(control_pb2.SloSet(version=7, classes=[gold]))
    slo = watch.targets(CallLabels(slo_class="gold", slo_tpot_ms=30))
    assert (watch.version, slo.ttft_ms, slo.tpot_ms, slo.itl_p99_ms, slo.e2e_ms) == (7, 100, 30, 50, None)
    with pytest.raises(InvalidRequest, match="gold"):
        watch.targets(CallLabels())


def test_verdicts_are_counted_by_class() -> None:
    watch = SloWatch()
    for verdict in (Verdict.MET, Verdict.MET, Verdict.ITL, Verdict.FAILED):
        watch.count("interactive", verdict)
    (total,) = watch.totals()
    assert (total.num_met, total.num_missed_itl, total.num_failed, total.num_missed_ttft) == (2, 1, 1, 0)


def test_what_a_request_says_itself_wins_over_its_headers() -> None:
    headers = {"x-request-id": "header", "x-slo-ttft-ms": "500", "x-request-timeout-ms": "1500"}
    labels = labels_from(headers, CallLabels(request_id="own", slo_ttft_ms=100.0))
    assert (labels.request_id, labels.slo_ttft_ms, labels.timeout_s) == ("own", 100.0, 1.5)


@pytest.mark.parametrize("text", ["soon", "", "1e"])
def test_a_header_that_is_no_number_is_named(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        labels_from({"x-request-timeout-ms": text})
    assert refused.value.field == "x-request-timeout-ms"
