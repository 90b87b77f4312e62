"""What a decode worker's spans say of sequences that were broken off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton import clock
from baton.errors import BatonError, Cancelled, TransferFailed
from baton.request import Request, SamplingParams
from baton.tracing import Trace, open_tracer
from decode_worker import decode_trace
from decode_worker.decode import Decode, State
from engine.ports import SequenceStats
from tests.otlp_collector import Collector, Seen, collecting, one, tree

PARENT = "b7ad6b7169203331"
TRACE = Trace(f"00-0af7651916cd43dd8448eb211c80319c-{PARENT}-01")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def told(
    collector: Collector, peer: str, outcome: str, error: BatonError | None = None, stats: SequenceStats | None = None
) -> list[Seen]:
    """Spans of a sequence that came ten seconds ago."""
    tracer, now_s = open_tracer(collector.config(), "worker", "d0"), clock.now_s()
    request = Request(1, (1, 2), SamplingParams(max_tokens=3), trace=TRACE)
    decode = Decode(request, peer, now_s - 10.0, now_s + 50.0, now_s, State.RESERVING)
    decode_trace.tell(tracer, decode, outcome, error, stats or SequenceStats(), now_s)
    tracer.close()
    return collector.spans


def test_a_ticket_that_its_caller_cancels_is_no_failure_and_one_that_is_lost_is(collector: Collector) -> None:
    cancelled = one(told(collector, ">p0/1", "given_up", Cancelled("the router cancelled the call")), "decode")
    assert (cancelled.failed, cancelled.attributes["error.type"]) == (False, "cancelled")
    collector.spans.clear()
    lost = one(told(collector, ">p0/1", "given_up", TransferFailed("the link broke")), "decode")
    assert (lost.failed, lost.attributes["error.type"]) == (True, "transfer_failed")


def test_of_a_local_sequence_that_was_cancelled_nobody_claims_that_it_began_at_once(collector: Collector) -> None:
    assert tree(told(collector, "", "cancelled"), PARENT) == {"decode": {}}
    collector.spans.clear()
    spans = told(collector, "", "finished", stats=SequenceStats(queue_ms=2_000.0, prefill_ms=3_000.0))
    assert tree(spans, PARENT) == {"decode": {"queue": {}, "compute": {}, "generate": {}}}
    assert one(spans, "queue").end_ns - one(spans, "queue").start_ns == pytest.approx(2e9, abs=1e3)
