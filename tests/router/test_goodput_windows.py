"""Sliding windows, what a router counts of its calls, and adding routers up: all without a clock or a socket."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.slo import Verdict
from baton.v1 import control_pb2
from router.goodput import Goodput, Served, split_ttft
from router.ring import BUCKET_S, LONG_S, SHORT_S, Ring
from router.windows import (
    NUM_LENGTH_BUCKETS,
    ClassWindow,
    WorkerWindow,
    add_classes,
    add_workers,
    class_pb,
    length_bucket,
    length_quantile,
    windows_of,
    worker_pb,
)

SERVED = Served(
    slo_class="gold", verdict=Verdict.MET, ttft_met=True, pace_met=True, ttft_s=0.5,
    split=split_ttft(0.5, 0.1, 0.05, 0.3), handoff_gap_s=0.02, output_tokens=(10, 30), prefill_worker="p0",
    decode_worker="d0",
)  # fmt: skip

# -- rings -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 2_000), st.integers(0, 9)), max_size=60), st.sampled_from([SHORT_S, LONG_S]))
def test_a_window_holds_what_came_in_its_span_and_nothing_older(
    events: list[tuple[float, int]], span_s: float
) -> None:  # fmt: skip
    ring = Ring(1, 0.0)
    ordered = sorted(events)
    for at_s, count in ordered:
        ring.row(at_s)[0] += count
    now_s = ordered[-1][0] if ordered else 0.0
    (total,) = ring.sums(now_s, span_s).fields
    oldest_s = (math.floor(now_s / BUCKET_S) + 1) * BUCKET_S - span_s
    assert total == sum(count for at_s, count in ordered if at_s >= oldest_s)
    assert total >= 0


def test_a_window_is_empty_after_silence_and_says_what_it_covers() -> None:
    ring = Ring(1, 100.0)
    ring.row(101.0)[0] += 7
    assert (ring.sums(104.0, SHORT_S).fields[0], ring.sums(104.0, SHORT_S).span_s) == (7, 4.0)
    assert ring.sums(100.0 + SHORT_S + BUCKET_S, SHORT_S).fields[0] == 0
    assert ring.sums(101.0 + LONG_S - BUCKET_S, LONG_S).fields[0] == 7
    far = ring.sums(1e9, LONG_S)
    assert far.fields[0] == 0
    assert LONG_S - BUCKET_S <= far.span_s <= LONG_S


def test_an_instant_before_the_newest_counts_as_the_newest() -> None:
    ring = Ring(1, 0.0)
    ring.row(1_000.0)[0] += 1
    ring.row(3.0)[0] += 1
    assert ring.sums(1_000.0, SHORT_S).fields[0] == 2


# -- one router --------------------------------------------------------------------------------------------------------


def test_a_call_is_found_in_every_field_of_its_class_s_windows() -> None:
    goodput = Goodput(0.0)
    goodput.arrived("gold", 1.0)
    goodput.read("gold", 1_000, 400, 2, 1.0)
    goodput.ended(SERVED, 2.0)
    goodput.ended(replace(SERVED, verdict=Verdict.ITL, pace_met=False, split=None, handoff_gap_s=None), 2.0)
    goodput.ended(replace(SERVED, verdict=Verdict.E2E, output_tokens=(7,)), 2.0)
    goodput.refused("gold", 2.0)
    window = goodput.class_windows(3.0)[0]
    lengths = [0.0] * NUM_LENGTH_BUCKETS
    prompts, outputs = list(lengths), list(lengths)
    prompts[length_bucket(1_000)] = 1
    for num_tokens in (10, 30, 10, 30, 7):
        outputs[length_bucket(num_tokens)] += 1
    assert replace(window, parts=type(window.parts)()) == ClassWindow(
        class_name="gold", window_s=SHORT_S, span_s=3.0, num_met=1, num_missed_itl=1, num_missed_e2e=1, num_failed=1,
        met_tokens=40, num_first_tokens=3, ttft_s=1.5, num_handoffs=2, handoff_gap_s=0.04, num_arrived=1,
        num_sequences=2, num_prompts=1, prompt_tokens=1_000, cached_tokens=400, num_outputs=5, output_tokens=87,
        prompt_lengths=tuple(prompts), output_lengths=tuple(outputs),
    )  # fmt: skip
    parts = window.parts
    assert parts.num_calls == 2
    assert parts.admission_s + parts.queue_s + parts.prefill_s + parts.network_s == pytest.approx(1.0)
    assert (window.num_judged, window.attainment, window.cached_share) == (4, 0.25, 0.4)


def test_each_worker_answers_for_its_own_targets_and_shares_in_the_goodput_of_the_call() -> None:
    goodput = Goodput(0.0)
    goodput.ended(SERVED, 1.0)
    goodput.ended(replace(SERVED, verdict=Verdict.TTFT, ttft_met=False), 1.0)
    goodput.ended(replace(SERVED, verdict=Verdict.FAILED, pace_met=False, decode_worker=""), 1.0)
    windows = {(w.worker_id, w.role): w for w in goodput.worker_windows(2.0) if w.window_s == SHORT_S}
    prefill, decode = windows["p0", "prefill"], windows["d0", "decode"]
    assert (prefill.num_calls, prefill.num_in_target, prefill.num_met, prefill.met_tokens) == (3, 2, 1, 40)
    assert (decode.num_calls, decode.num_in_target, decode.num_met) == (2, 2, 1)
    assert decode.attainment == 1.0


def test_what_was_not_heard_of_for_five_minutes_takes_no_memory() -> None:
    goodput = Goodput(0.0)
    for number in range(50):
        goodput.ended(replace(SERVED, slo_class=f"class-{number}", decode_worker=f"d{number}"), 1.0)
    assert len(goodput.class_windows(2.0)) == 100
    later_s = 2.0 + LONG_S + BUCKET_S
    assert goodput.class_windows(later_s) == []
    assert list(goodput.worker_windows(later_s)) == []
    assert not goodput._classes
    assert not goodput._workers


def test_a_class_that_comes_back_is_counted_over_time_that_passed_not_over_a_moment() -> None:
    goodput = Goodput(0.0)
    goodput.arrived("gold", 1_000.0)
    window = goodput.class_windows(1_000.5)[0]
    assert window.per_s(window.num_arrived) == pytest.approx(1 / SHORT_S, rel=0.2)


@pytest.mark.parametrize(
    ("queue_s", "prefill_s"),
    [(math.nan, 0.1), (0.1, math.nan), (-0.1, 0.1), (0.1, 0.0), (math.inf, 0.1), (0.4, 0.4)],
)
def test_a_worker_s_part_of_a_ttft_is_left_out_where_it_cannot_be(queue_s: float, prefill_s: float) -> None:
    assert split_ttft(0.5, 0.01, queue_s, prefill_s) is None


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))
def test_the_parts_of_a_ttft_are_never_negative_and_sum_to_it(
    ttft_s: float, admission_s: float, queue_s: float, prefill_s: float
) -> None:
    split = split_ttft(ttft_s, admission_s, queue_s, prefill_s)
    if split is not None:
        parts = [getattr(split, field.name) for field in fields(split)]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(ttft_s, abs=2e-3)


# -- lengths -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000_000), st.integers(0, 10_000_000))
def test_longer_prompts_are_never_in_a_lower_bucket(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert 0 <= length_bucket(low) <= length_bucket(high) < NUM_LENGTH_BUCKETS


@given(st.lists(st.integers(2, 1_000_000), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_of_lengths_is_right_within_its_bucket(lengths: list[int], share: float) -> None:
    counts = [0.0] * NUM_LENGTH_BUCKETS
    for length in lengths:
        counts[length_bucket(length)] += 1
    exact = sorted(lengths)[max(0, math.ceil(share * len(lengths) - 1e-9) - 1)]
    found = length_quantile(counts, share)
    assert found is not None
    assert exact / 2**0.5 <= found <= exact * 2**0.5


def test_there_is_no_quantile_of_nothing() -> None:
    assert length_quantile([0.0] * NUM_LENGTH_BUCKETS, 0.5) is None


# -- adding up, and the wire -------------------------------------------------------------------------------------------

COUNTS = st.integers(0, 1_000).map(float)
WINDOWS = st.builds(
    ClassWindow,
    class_name=st.just("gold"), window_s=st.just(SHORT_S), span_s=st.floats(1, 30), num_met=COUNTS, num_failed=COUNTS,
    ttft_s=st.floats(0, 1e6), num_arrived=COUNTS,
    prompt_lengths=st.lists(COUNTS, min_size=NUM_LENGTH_BUCKETS, max_size=NUM_LENGTH_BUCKETS).map(tuple),
)  # fmt: skip


@given(st.lists(WINDOWS, min_size=1, max_size=5), st.randoms())
def test_routers_add_up_in_any_order_to_the_same_sums(windows: list[ClassWindow], random: object) -> None:
    shuffled = list(windows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert add_classes(windows) == add_classes(shuffled)
    assert add_classes(windows).num_met == sum(window.num_met for window in windows)
    assert sum(add_classes(windows).prompt_lengths) == sum(sum(window.prompt_lengths) for window in windows)


def test_windows_survive_the_wire() -> None:
    goodput = Goodput(0.0)
    goodput.arrived("gold", 1.0)
    goodput.read("gold", 77, 11, 1, 1.0)
    goodput.ended(SERVED, 1.0)
    classes, workers = goodput.class_windows(2.0), list(goodput.worker_windows(2.0))
    report = control_pb2.RouterReport(
        class_windows=map(class_pb, classes), worker_windows=map(worker_pb, workers), oldest_queued_s=1.5
    )
    read = windows_of(control_pb2.RouterReport.FromString(report.SerializeToString()))
    assert (list(read.classes), list(read.workers), read.oldest_queued_s) == (classes, workers, 1.5)
    assert add_workers(workers[:1], named_by_role=True).worker_id == workers[0].role


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e13])
@pytest.mark.parametrize("field", ["num_met", "ttft_s", "prompt_tokens", "span_s"])
def test_a_window_with_an_absurd_number_is_refused_by_the_name_of_its_field(field: str, value: float) -> None:
    window = class_pb(ClassWindow("gold", SHORT_S, 3.0))
    setattr(window, field, value)
    with pytest.raises(InvalidRequest) as refused:
        windows_of(control_pb2.RouterReport(class_windows=[window]))
    assert refused.value.field == field


def test_worker_windows_and_histograms_are_checked_likewise() -> None:
    worker = worker_pb(WorkerWindow("p0", "prefill", SHORT_S, 3.0))
    worker.num_calls = math.nan
    with pytest.raises(InvalidRequest, match="num_calls"):
        windows_of(control_pb2.RouterReport(worker_windows=[worker]))
    window = class_pb(ClassWindow("gold", SHORT_S, 3.0))
    del window.prompt_lengths[5:]
    with pytest.raises(InvalidRequest, match="prompt_lengths has 5 buckets"):
        windows_of(control_pb2.RouterReport(class_windows=[window]))
