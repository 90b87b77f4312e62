"""A soak that finds nothing must be one that could: what it must not let pass."""

from __future__ import annotations

import grpc
import pytest

from baton.v1 import serving_pb2
from tests.soak.soak_growth import Footprint, Rest, growth, slope
from tests.soak.soak_load import LATE_S, Asked, Kind, Seen, judge

ASKED = Asked((5, 6, 7), serving_pb2.Sampling(max_tokens=3), (11, 12, 13))
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
OK, UNAVAILABLE, EXPIRED = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
LOST = serving_pb2.ErrorDetail(code="worker_lost", retryable=True)
SHED = serving_pb2.ErrorDetail(code="overloaded", retryable=True)
INTERNAL = serving_pb2.ErrorDetail(code="internal", retryable=False)
CANCELLED = serving_pb2.ErrorDetail(code="cancelled", retryable=False)
LATE = serving_pb2.ErrorDetail(code="deadline_exceeded", retryable=False)
DONE = serving_pb2.Done()
TIMEOUT_S = 30.0


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        (Kind.PLAIN, Seen([11, 12, 13], done=DONE, code=OK)),
        (Kind.PLAIN, Seen([], error=SHED, code=EXHAUSTED)),
        (Kind.CANCEL, Seen([11, 12])),
        (Kind.ABORT, Seen([11], error=CANCELLED, code=grpc.StatusCode.CANCELLED)),
        (Kind.HURRY, Seen([], error=LATE, code=EXPIRED)),
        (Kind.HURRY, Seen([11], code=EXPIRED)),
        (Kind.HANG_UP, Seen()),
    ],
)
def test_what_may_come_of_a_call_passes(kind: Kind, seen: Seen) -> None:
    assert judge(kind, ASKED, seen, TIMEOUT_S) == ""


@pytest.mark.parametrize(
    ("kind", "seen", "finding"),
    [
        (Kind.PLAIN, Seen([11, 99, 13], done=DONE, code=OK), "wrong output: token 1 of 3"),
        (Kind.CANCEL, Seen([11, 13]), "wrong output"),
        (Kind.PLAIN, Seen([11, 12, 13, 14], done=DONE, code=OK), "wrong output"),
        (Kind.PLAIN, Seen([11, 12], done=DONE, code=OK), "2 tokens of 3"),
        (Kind.PLAIN, Seen([11, 12, 13], code=OK), "without done"),
        (Kind.PLAIN, Seen([11, 12, 13], done=DONE, code=OK, took_s=TIMEOUT_S + LATE_S + 1), "after its deadline"),
        (Kind.PLAIN, Seen([11], error=INTERNAL, code=grpc.StatusCode.INTERNAL), "failed with internal"),
        (Kind.PLAIN, Seen([11], error=LOST, code=UNAVAILABLE), "failed with worker_lost after 1 tokens"),
        (Kind.PLAIN, Seen([11], error=SHED, code=EXHAUSTED), "failed with overloaded"),
        (Kind.PLAIN, Seen([], error=SHED, code=EXHAUSTED, took_s=9.0), "failed with overloaded"),
        (Kind.PLAIN, Seen([11], code=UNAVAILABLE), "without an error event"),
        (Kind.PLAIN, Seen([11], error=LATE, code=EXPIRED), "failed with deadline_exceeded"),
        (Kind.PLAIN, Seen([11]), "nobody had cancelled it"),
        (Kind.PLAIN, Seen([11], error=CANCELLED, code=grpc.StatusCode.CANCELLED), "failed with cancelled"),
    ],
)
def test_what_must_not_come_of_a_call_is_found(kind: Kind, seen: Seen, finding: str) -> None:
    assert finding in judge(kind, ASKED, seen, TIMEOUT_S)


def test_a_hole_a_repetition_and_a_second_end_are_found() -> None:
    def chunk(index: int) -> serving_pb2.GenerateResponse:
        return serving_pb2.GenerateResponse(chunk=serving_pb2.Chunk(token_ids=[11 + index], index=index))

    done, error = serving_pb2.GenerateResponse(done=DONE), serving_pb2.GenerateResponse(error=LOST)
    for responses in (
        [chunk(0), chunk(2)],
        [chunk(0), chunk(0)],
        [chunk(0), done, error],
        [error, error],
        [done, chunk(0)],
    ):
        seen = Seen(code=OK)
        for response in responses:
            seen.take(response)
        assert judge(Kind.PLAIN, ASKED, seen, TIMEOUT_S) == seen.broken != ""


def test_the_slope_is_that_of_the_least_squares_line() -> None:
    assert slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert slope([(0, 0), (1, 1), (2, 0)]) == pytest.approx(0)
    assert slope([(3, 1)]) == slope([]) == 0


def test_growth_after_the_first_third_is_found_and_growth_before_is_not() -> None:
    def rests(rss: list[int], fds: list[int]) -> list[Rest]:
        return [Rest(100 * n, {"w": Footprint(r, f, 5)}) for n, (r, f) in enumerate(zip(rss, fds, strict=True))]

    assert list(growth(rests([0, 9_000, 9_000, 9_010, 9_000, 9_010], [30, 31, 30, 33, 31, 30]), 10)) == []
    assert "w grows by 20 bytes" in next(growth(rests([0, 0, 0, 2_000, 4_000, 6_000], [30] * 6), 10))
    assert "descriptors" in next(growth(rests([0] * 6, [30, 40, 50, 60, 70, 80]), 10))
