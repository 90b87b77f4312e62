"""Breakers under real calls: a worker that is ready and fails every call, clients that send nonsense or leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from baton.errors import Internal, WorkerLost
from baton.model_files import ModelFiles
from router.fleet import Endpoint
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.stub_worker import StubWorker


@pytest.fixture
async def two(files: ModelFiles) -> AsyncIterator[Rig]:
    """A router over two workers, each of which does everything."""
    workers = [await StubWorker(name).start() for name in ("b0", "b1")]
    async with running_rig(files, workers) as rig:
        await until(
            lambda: all(endpoint.state == "ready" for endpoint in rig.front_end.fleet.endpoints), "both are ready"
        )
        yield rig


def endpoint(rig: Rig, worker: StubWorker) -> Endpoint:
    [found] = [e for e in rig.front_end.fleet.endpoints if e.worker_id == worker.worker_id]
    return found


@pytest.mark.parametrize("error", [WorkerLost("fell over"), Internal("a defect")])
async def test_a_ready_worker_that_fails_every_call_is_ejected_within_a_few_and_probed_back(
    two: Rig, error: WorkerLost
) -> None:
    bad = two.workers[0]
    bad.script.fail_prefill = error
    for _ in range(12):
        answer = await two.generate(request(max_tokens=3))
        assert answer.token_ids == [300, 301, 302] or isinstance(error, Internal)
    assert endpoint(two, bad).health.is_open
    assert len(bad.submits) <= 5, "three failures, and a probe or two"
    assert (await two.http.get("/readyz")).status_code == 200
    bad.script.fail_prefill = None

    async def probed() -> None:
        while endpoint(two, bad).health.is_open:
            assert (await two.generate(request(max_tokens=3))).token_ids == [300, 301, 302]

    await asyncio.wait_for(probed(), 20)
    before = len(bad.submits)
    answers = await asyncio.gather(*(two.generate(request(max_tokens=3)) for _ in range(10)))
    assert all(answer.status is None for answer in answers)
    assert len(bad.submits) > before, "it has its share again"
    await two.idle()


async def test_bad_requests_and_clients_that_leave_open_no_breaker(two: Rig) -> None:
    for _ in range(15):
        answer = await two.generate(request(max_tokens=3, temperature=-1.0))
        assert answer.status is not None
        assert answer.status.code() is grpc.StatusCode.INVALID_ARGUMENT
    for worker in two.workers:
        worker.script.decode_gate.clear()
    for _ in range(10):
        call = two.stub.Generate(request(max_tokens=9))
        await call.read()
        call.cancel()
        late = await two.generate(request(max_tokens=9), timeout=0.05)
        assert late.status is not None
    for worker in two.workers:
        worker.script.decode_gate.set()
    assert not any(endpoint(two, worker).health.is_open for worker in two.workers)
    answers = await asyncio.gather(*(two.generate(request(max_tokens=3)) for _ in range(6)))
    assert all(answer.token_ids == [300, 301, 302] for answer in answers)
    await two.idle()


async def test_a_death_with_many_streams_on_it_is_one_failure(two: Rig) -> None:
    victim, other = two.workers
    for worker in two.workers:
        worker.script.decode_gate.clear()
    calls = [asyncio.create_task(two.generate(request(f"call {n}", max_tokens=3))) for n in range(20)]
    await until(lambda: victim.num_open >= 5, "the victim has its share")
    health = endpoint(two, victim).health
    await victim.kill()
    other.script.decode_gate.set()
    answers = await asyncio.gather(*calls)
    assert all(answer.token_ids == [300, 301, 302] for answer in answers)
    again = await StubWorker("b0", port=int(victim.address.rpartition(":")[2])).start()
    two.workers.append(again)
    await until(lambda: endpoint(two, again).session.epoch == again.epoch, "it is back")
    assert not health.is_open
    assert endpoint(two, again).state == "ready"
