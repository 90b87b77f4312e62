"""What a prefill worker's spans say of prompts that were broken off."""

from __future__ import annotations

import pytest

from baton import clock
from baton.errors import BatonError, InvalidRequest, TransferFailed
from baton.request import Request, SamplingParams
from baton.tracing import Trace, open_tracer
from baton.v1 import worker_pb2
from baton.wire import error_to_pb
from prefill_worker import prefill_trace
from prefill_worker.prefill import Prefill
from tests.otlp_collector import collecting, one, tree

PARENT = "b7ad6b7169203331"
TRACE = Trace(f"00-0af7651916cd43dd8448eb211c80319c-{PARENT}-01")


@pytest.mark.parametrize(("started_s", "queued_s"), [(None, 10.0), (-8.0, 2.0)])
def test_a_prompt_that_is_cancelled_was_queued_until_its_engine_was_given_it_and_no_longer(
    started_s: float | None, queued_s: float
) -> None:
    now_s = clock.now_s()
    request = Request(1, (1, 2), SamplingParams(max_tokens=3), trace=TRACE)
    prefill = Prefill(request, ">d0/1", now_s - 10.0, now_s + 50.0)
    prefill.started_s = None if started_s is None else now_s + started_s
    ended = worker_pb2.Ended(seq=1, outcome=worker_pb2.OUTCOME_CANCELLED, stats=prefill.to_stats(now_s, ""))
    with collecting() as collector:
        tracer = open_tracer(collector.config(), "worker", "p0")
        prefill_trace.tell(tracer, prefill, ended, now_s)
        tracer.close()
    assert tree(collector.spans, PARENT) == {"prefill": {"queue": {}}}
    queue, whole = one(collector.spans, "queue"), one(collector.spans, "prefill")
    assert queue.end_ns - queue.start_ns == pytest.approx(queued_s * 1e9, abs=1e3)
    assert (whole.failed, whole.attributes["baton.outcome"]) == (False, "cancelled")


@pytest.mark.parametrize(
    ("error", "failed"), [(InvalidRequest("too long", field="prompt"), False), (TransferFailed("it broke"), True)]
)
def test_what_callers_alone_are_to_blame_for_is_no_failure_of_prefill(error: BatonError, failed: bool) -> None:
    now_s = clock.now_s()
    prefill = Prefill(Request(1, (1, 2), SamplingParams(max_tokens=3), trace=TRACE), ">d0/1", now_s, now_s + 50.0)
    ended = worker_pb2.Ended(
        seq=1, outcome=worker_pb2.OUTCOME_FAILED, error=error_to_pb(error), stats=prefill.to_stats(now_s, "")
    )
    with collecting() as collector:
        tracer = open_tracer(collector.config(), "worker", "p0")
        prefill_trace.tell(tracer, prefill, ended, now_s)
        tracer.close()
    whole = one(collector.spans, "prefill")
    assert (whole.failed, whole.attributes["error.type"]) == (failed, error.code)
