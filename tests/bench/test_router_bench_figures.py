"""The arithmetic of `baton bench router`, on made-up loads whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.router_bench_figures import (
    NoFigure,
    Window,
    added_gaps_ms,
    check_answers,
    cost,
    gaps_beyond_usual_ms,
    transit_ms,
    window,
)
from bench.router_bench_load import CUT, DONE, EVENT, OPEN, RECORD, Seen

MS = 1_000_000
FIXED_S, TOKEN_S, REQUEST_S = 0.5, 9e-6, 280e-6  # of CPU: in each window, per token, per request


def busy(tokens: int, requests: int, wall_s: float = 5.0) -> Window:
    fixed_s = FIXED_S * wall_s / 5.0
    return Window(wall_s, fixed_s + TOKEN_S * tokens + REQUEST_S * requests, requests, tokens)


def events(*rows: tuple[int, int, int, int]) -> NDArray[np.void]:
    """Of (number, index, received_ms, sent_ms)."""
    return np.array([(number, index, got * MS, sent * MS) for number, index, got, sent in rows], EVENT)


def seen_of(records: list[tuple[int, int, int, int]], tokens: NDArray[np.void] | None = None) -> Seen:
    """Of (outcome, num_events, usage_tokens, sent_ms)."""
    array = np.zeros(len(records), RECORD)
    for row, (outcome, num_events, usage, sent_ms) in zip(array, records, strict=True):
        row["outcome"], row["num_events"], row["usage_tokens"], row["sent_ns"] = (
            outcome,
            num_events,
            usage,
            sent_ms * MS,
        )
    return Seen(array, np.zeros(0, EVENT) if tokens is None else tokens, 0.0, 0, 0)


def test_two_pairs_of_windows_give_the_cost_of_a_token_and_of_a_request() -> None:
    found = cost((busy(10_000, 40), busy(200_000, 60)), (busy(500, 250), busy(2_500, 1_250)))
    assert found.us_per_token == pytest.approx(9.0)
    assert found.us_per_request == pytest.approx(280.0)


def test_windows_need_not_be_of_one_length() -> None:
    found = cost((busy(10_000, 0, 4.0), busy(200_000, 0, 6.0)), (busy(500, 250, 5.5), busy(2_500, 1_250, 5.0)))
    assert found.us_per_token == pytest.approx(9.0)


def test_windows_that_do_not_differ_have_no_cost() -> None:
    with pytest.raises(NoFigure, match="as much under the low load"):
        cost((busy(1_000, 10), busy(1_000, 10)), (busy(500, 250), busy(2_500, 1_250)))


def test_the_stubs_own_jitter_is_no_added_gap() -> None:
    said = events((1, 0, 0, 0), (1, 1, 0, 25), (1, 2, 0, 75), (1, 3, 0, 100))  # the stub was 25 ms late once
    received = events((1, 0, 2, 0), (1, 1, 27, 0), (1, 2, 77, 0), (1, 3, 109, 0))  # the router 7 ms at the end
    assert added_gaps_ms(received, said, 0, 200 * MS).tolist() == [0.0, 0.0, 7.0]
    assert transit_ms(received, said).tolist() == [2.0, 2.0, 2.0, 9.0]


def test_gaps_are_of_one_stream_and_of_neighbours_that_both_sides_know() -> None:
    said = events((1, 0, 0, 0), (1, 2, 0, 50), (1, 3, 0, 75), (2, 0, 0, 0))
    received = events((2, 0, 1, 0), (1, 3, 80, 0), (1, 2, 51, 0), (1, 1, 26, 0), (1, 0, 1, 0))
    assert added_gaps_ms(received, said, 0, 200 * MS).tolist() == [4.0]


def test_only_tokens_of_the_window_count() -> None:
    tokens = events((1, 0, 5, 0), (1, 1, 10, 0), (1, 2, 15, 0), (1, 3, 20, 0))
    assert added_gaps_ms(tokens, tokens, 10 * MS, 20 * MS).tolist() == [5.0, 5.0]
    part = window(seen_of([(DONE, 4, 4, 9), (OPEN, 0, 0, 12)], tokens), 10 * MS, 20 * MS, cpu_s=0.001)
    assert part == Window(wall_s=0.01, cpu_s=0.001, num_requests=1, num_tokens=2)
    assert part.cpu_share == pytest.approx(0.1)
    assert part.tokens_per_s == pytest.approx(200.0)


def test_where_nobody_knows_when_tokens_left_the_usual_gap_is_taken_off() -> None:
    tokens = events(*((1, i, 25 * i, 0) for i in range(6)), (1, 6, 175, 0))
    assert gaps_beyond_usual_ms(tokens, 0, 500 * MS).tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 25.0]
    assert len(gaps_beyond_usual_ms(tokens, 300 * MS, 500 * MS)) == 0


def test_answers_whose_events_are_not_their_tokens_give_no_figure() -> None:
    check_answers(seen_of([(DONE, 4, 4, 0), (DONE, 4, 0, 0), (OPEN, 3, 0, 0)]))
    with pytest.raises(NoFigure, match="1 of 2 answers"):
        check_answers(seen_of([(DONE, 4, 4, 0), (DONE, 3, 4, 0)]))


def test_answers_that_failed_give_no_figure_but_their_number() -> None:
    with pytest.raises(NoFigure, match=r"2 cut \(status 0\)"):
        check_answers(seen_of([(DONE, 4, 4, 0), (CUT, 4, 4, 0), (CUT, 0, 0, 0)]))
