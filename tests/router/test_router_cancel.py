"""Callers that leave, at every stage and on both APIs: the workers are told at once and every count returns to 0."""

from __future__ import annotations

import asyncio
import random
import time

import grpc.aio
import httpx
import pytest

from baton.errors import Overloaded
from baton.model_files import ModelFiles
from baton.v1 import worker_pb2
from router.placement import Demand
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.stub_worker import StubWorker, start_pair

BODY: dict[str, object] = {"prompt": "hello", "max_tokens": 20}


async def leave_over_grpc(rig: Rig, ready_to_leave: asyncio.Event) -> None:
    call = rig.stub.Generate(request(max_tokens=20))
    reader = asyncio.create_task(call.read())
    await ready_to_leave.wait()
    call.cancel()
    await asyncio.gather(reader, return_exceptions=True)


async def leave_over_http(rig: Rig, ready_to_leave: asyncio.Event, *, stream: bool) -> None:
    async with httpx.AsyncClient(base_url=rig.base_url, timeout=30.0) as client:
        reading = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": stream}))
        await ready_to_leave.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.parametrize("way", ["grpc", "http", "http stream"])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_caller_that_leaves_frees_whoever_holds_the_sequence(rig: Rig, way: str, stage: str) -> None:
    gate = rig.prefill.script.prefill_gate if stage == "prefill" else rig.decode.script.decode_gate
    gate.clear()
    leave = asyncio.Event()
    if way == "grpc":
        call = asyncio.create_task(leave_over_grpc(rig, leave))
    else:
        call = asyncio.create_task(leave_over_http(rig, leave, stream=way == "http stream"))
    holder = rig.prefill if stage == "prefill" else rig.decode
    await until(lambda: holder.num_open == 1, f"{stage} holds the sequence")
    leave.set()
    await call
    await until(lambda: holder.num_open == 0, f"{stage} was told to cancel")
    await rig.idle()
    gate.set()
    assert (await rig.generate(request(max_tokens=3))).token_ids == [300, 301, 302]


@pytest.mark.parametrize("way", ["grpc", "http"])
async def test_a_caller_that_leaves_while_no_worker_is_there_is_forgotten(files: ModelFiles, way: str) -> None:
    prefill, decode = await start_pair()
    async with running_rig(files, [prefill, decode], unavailable_wait_s=60.0) as rig:
        await decode.kill()
        await until(lambda: bool(rig.front_end.fleet.unready_reason()), "the loss of decode is noticed")
        leave = asyncio.Event()
        call = asyncio.create_task(
            leave_over_grpc(rig, leave) if way == "grpc" else leave_over_http(rig, leave, stream=False)
        )
        await until(lambda: rig.front_end.calls.num_inflight == 1, "the call waits")
        leave.set()
        await call
        await rig.idle()
        assert not prefill.submits


@pytest.mark.parametrize("turns", range(4))
async def test_a_caller_that_leaves_at_the_moment_when_the_fleet_changes_is_gone(files: ModelFiles, turns: int) -> None:
    prefill, decode = await start_pair()
    async with running_rig(files, [prefill, decode]) as rig:
        fleet = rig.front_end.fleet
        await decode.kill()
        await until(lambda: bool(fleet.unready_reason()), "the loss of decode is noticed")
        waiting = asyncio.create_task(fleet.wait_for_place(Demand(3, 10), frozenset(), time.monotonic() + 60.0))
        await asyncio.sleep(0)
        fleet._wake()
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        done, _ = await asyncio.wait([waiting], timeout=5.0)
        assert done
        assert waiting.cancelled()


async def test_counts_return_to_zero_after_calls_of_which_half_are_cancelled_at_random(rig: Rig) -> None:
    rng = random.Random(1)

    async def one(leaves: bool) -> None:
        call = rig.stub.Generate(request(max_tokens=20))
        try:
            for _ in range(rng.randrange(1, 20) if leaves else 1_000):
                if await call.read() is grpc.aio.EOF:  # type: ignore[attr-defined]
                    return
        finally:
            if leaves:
                call.cancel()

    for _ in range(10):
        await asyncio.gather(*(one(leaves=number % 2 == 0) for number in range(20)), return_exceptions=True)
    await rig.idle()
    text = (await rig.http.get("/metrics")).text
    outcomes = [line for line in text.splitlines() if line.startswith("baton_requests_total")]
    assert sum(float(line.rpartition(" ")[2]) for line in outcomes) == 200
    assert "baton_num_requests_inflight 0.0" in text


async def test_a_restarted_worker_gets_its_share_and_no_more(files: ModelFiles) -> None:
    workers = [await StubWorker(f"w{number}", worker_pb2.ROLE_BOTH).start() for number in range(3)]
    async with running_rig(files, workers) as rig:
        await until(lambda: all(e.session.view for e in rig.front_end.fleet.endpoints), "all are connected")
        for number in range(30):
            await rig.generate(request(f"warm {number}", max_tokens=2))
        port = int(workers[0].address.rpartition(":")[2])
        await workers[0].kill()
        reborn = rig.workers[0] = await StubWorker("w0", worker_pb2.ROLE_BOTH, port=port).start()
        endpoint = rig.front_end.fleet.endpoints[0]
        await until(lambda: endpoint.session.epoch == reborn.epoch, "the new process is known")
        before = [len(worker.submits) for worker in rig.workers]
        for number in range(60):
            await rig.generate(request(f"new {number}", max_tokens=2))
        shares = [len(worker.submits) - count for worker, count in zip(rig.workers, before, strict=True)]
    assert sum(shares) == 60
    assert min(shares) >= 12


async def test_more_calls_than_allowed_are_refused_with_a_hint_and_leave_no_count(files: ModelFiles) -> None:
    async with running_rig(files, max_inflight=4) as rig:
        rig.decode.script.decode_gate.clear()
        calls = [asyncio.create_task(rig.generate(request(max_tokens=3))) for _ in range(4)]
        await until(lambda: rig.front_end.calls.num_inflight == 4, "four calls are in flight")
        refused = await rig.generate(request(max_tokens=3))
        reply = await rig.post("/v1/completions", BODY)
        rig.decode.script.decode_gate.set()
        served = await asyncio.gather(*calls)
        await rig.idle()
    assert refused.error is not None
    assert refused.error.code == Overloaded.code
    assert refused.error.retry_after_s >= 1
    assert reply.status_code == 429
    assert int(reply.headers["retry-after"]) >= 1
    assert all(answer.status is None for answer in served)


async def test_client_faults_open_no_breaker_and_are_counted_by_outcome(rig: Rig) -> None:
    for _ in range(15):
        await rig.generate(request(max_tokens=0))
    assert (await rig.generate(request(max_tokens=2))).status is None
    text = (await rig.http.get("/metrics")).text
    assert 'baton_requests_total{api="grpc",outcome="invalid_request"} 15.0' in text
    assert 'baton_requests_total{api="grpc",outcome="finished"} 1.0' in text
