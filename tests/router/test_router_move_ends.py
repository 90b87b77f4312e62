"""Where moving on ends: at the budget, at the deadline, and with each with the error that says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.errors import BatonError, Internal, Overloaded, Unavailable, WorkerLost
from baton.model_files import ModelFiles
from baton.request import Request, SamplingParams
from router.sequence import SequenceJob, SequenceReport
from tests.router.attempt_rig import Sink
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.stub_worker import StubWorker
from tests.router.test_router_moves import ANSWER, owner, pause, two_pairs


@asynccontextmanager
async def failing_without_budget(files: ModelFiles, error: BatonError) -> AsyncIterator[Rig]:
    """Each worker fails a call after three tokens, and no retry is left. For one call: several open breakers."""
    workers = [await StubWorker(f"w{i}").start() for i in range(2)]  # one stream each: no failure overtakes a token
    async with running_rig(files, workers) as rig:
        budget = rig.front_end.calls._sequences._budget
        while budget.take(0.0):
            pass
        budget._now_s = time.monotonic() + 3_600  # no refill while the test runs
        for worker in workers:
            worker.script.fail_after = (3, error)
        yield rig
        await rig.idle()


@pytest.mark.parametrize(
    "error", [WorkerLost("it fell over"), Internal("defect"), Overloaded("full", retry_after_s=9.0)]
)
async def test_beyond_the_budget_a_call_is_unavailable_and_told_when_to_come_back(
    files: ModelFiles, error: BatonError
) -> None:
    async with failing_without_budget(files, error) as rig:
        answer = await rig.generate(request(max_tokens=10))
    assert answer.token_ids == ANSWER[:3]
    assert answer.done is None
    assert answer.status is not None
    assert answer.status.code() is grpc.StatusCode.UNAVAILABLE
    assert answer.error is not None
    assert answer.error.retry_after_s > 0
    async with failing_without_budget(files, error) as rig:
        reply = await rig.post("/v1/completions", {"prompt": "hello", "max_tokens": 10})
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1
    async with failing_without_budget(files, error) as rig:
        events = await rig.events("/v1/completions", {"prompt": "hello", "max_tokens": 10})
    assert events[-1]["error"]["code"] == "unavailable"
    assert not any(choice.get("finish_reason") for event in events for choice in event.get("choices", ()))


async def test_a_deadline_that_ends_the_wait_for_another_worker_is_a_deadline(files: ModelFiles) -> None:
    worker = await StubWorker("w").start()
    async with running_rig(files, [worker], unavailable_wait_s=60.0) as rig:
        pause([worker], 3)
        body = {"prompt": "hello", "max_tokens": 10}
        call = asyncio.create_task(
            rig.http.post("/v1/completions", json=body, headers={"x-request-timeout-ms": "1500"})
        )
        dying = await owner([worker])
        await dying.kill()
        reply = await call
        await rig.idle()
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_exceeded"


async def test_a_client_that_leaves_while_its_sequence_waits_for_another_try_leaves_nothing(files: ModelFiles) -> None:
    async with two_pairs(files) as rig:
        for prefill in rig.workers[:2]:
            prefill.script.fail_prefill = Unavailable("not yet")
        call = asyncio.create_task(rig.generate(request(max_tokens=10)))
        await until(lambda: sum(len(worker.submits) for worker in rig.workers) >= 2, "it was tried again")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await rig.idle()
        num_submits = sum(len(worker.submits) for worker in rig.workers)
        await asyncio.sleep(0.5)  # longer than the next pause
        assert sum(len(worker.submits) for worker in rig.workers) == num_submits


async def test_only_the_model_that_made_the_known_tokens_goes_on_with_a_sequence(files: ModelFiles) -> None:
    new = await StubWorker("new", fingerprint="b" * 32).start()
    async with running_rig(files, [new]) as rig:
        sequences = rig.front_end.calls._sequences
        made = Request(0, (1, 2, 3), SamplingParams(max_tokens=3))
        other = SequenceJob(made, time.monotonic() + 0.3, 60.0, fingerprint="a" * 32)
        with pytest.raises(Unavailable):
            await sequences.serve(other, Sink(), SequenceReport(token_ids=[300]))
        same, sink = SequenceJob(made, time.monotonic() + 60, 60.0, fingerprint="b" * 32), Sink()
        await sequences.serve(same, sink, SequenceReport(token_ids=[300]))
    assert sink.token_ids == [301, 302]
    assert len(new.submits) == 1
