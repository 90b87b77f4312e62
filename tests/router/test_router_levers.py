"""What routers make of the controller's levers: each is in force with the next placement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from baton.model_files import ModelFiles
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2
from router.turns import worker_loads
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.stub_worker import StubWorker, start_pair


class Controller(control_pb2_grpc.ControlServicer):
    """Says each state that it is given, to one router."""

    def __init__(self) -> None:
        self.states: asyncio.Queue[control_pb2.ControlState] = asyncio.Queue()

    async def Announce(self, request: object, context: object) -> control_pb2.AnnounceResponse:
        raise AssertionError("routers do not announce")

    async def Watch(self, request: object, context: object) -> AsyncIterator[control_pb2.ControlState]:
        while True:
            yield await self.states.get()

    async def Report(self, request: object, context: object) -> control_pb2.ReportResponse:
        return control_pb2.ReportResponse()

    async def Leave(self, request: object, context: object) -> control_pb2.LeaveResponse:
        raise AssertionError("nobody asks")

    async def Lenders(self, request: object, context: object) -> control_pb2.LendersResponse:
        raise AssertionError("nobody asks")


def records(workers: list[StubWorker], **states: str) -> list[control_pb2.WorkerRecord]:
    """All of them ready, but for those named with another state."""
    return [
        control_pb2.WorkerRecord(
            worker_id=w.worker_id, address=w.address, role=w.role, state=states.get(w.worker_id, "ready")
        )
        for w in workers
    ]


@asynccontextmanager
async def controlled(files: ModelFiles, workers: list[StubWorker]) -> AsyncIterator[tuple[Rig, Controller]]:
    """A router that hears of these workers from a controller."""
    controller, server = Controller(), grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(controller, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    controller.states.put_nowait(control_pb2.ControlState(workers=records(workers)))
    try:
        async with running_rig(files, [], wait_ready=False, control_address=address) as rig:
            rig.workers += workers
            await until(lambda: not rig.front_end.fleet.unready_reason(), "the fleet is known")
            yield rig, controller
    finally:
        await server.stop(None)


async def explained(rig: Rig, request_id: str) -> dict[str, object]:
    """What the router tells of why."""
    [told] = rig.front_end.fleet.explanations.get(request_id)
    rules: dict[str, object] = told.to_json()["rules"]
    return rules


async def test_a_local_prefill_limit_is_in_force_with_the_next_call_and_taken_back_likewise(files: ModelFiles) -> None:
    workers = list(await start_pair())
    prefill, decode = workers
    prefill.kv_load.waiting_tokens = 1_000_000  # so the decode worker would be quicker, where it may
    async with controlled(files, workers) as (rig, controller):
        fleet = rig.front_end.fleet
        endpoints = {endpoint.worker_id: endpoint for endpoint in fleet.endpoints}

        async def is_local(request_id: str) -> bool:
            made = request(max_tokens=3)
            made.request_id = request_id
            before = len(decode.submits)
            answer = await rig.generate(made)
            assert answer.token_ids == [300, 301, 302]
            return len(decode.submits) > before

        await until(lambda: endpoints["p0"].ledger.waiting_tokens > 1_000, "its queue is known")
        assert not await is_local("before")
        for told, in_force in ((200, 200), (1, 1), (None, 0), (300, 300), (0, 0)):
            state = control_pb2.ControlState(workers=records(workers), local_prefill_tokens=told)
            controller.states.put_nowait(state)
            await until(lambda in_force=in_force: fleet.local_prefill_tokens == in_force, "it is told")  # type: ignore[misc]
            assert await is_local(f"limit {told}") is (in_force >= 200)
            assert (await explained(rig, f"limit {told}"))["local_prefill_tokens"] == in_force
            page = (await rig.http.get("/metrics")).text
            assert f"baton_local_prefill_tokens {float(in_force)}" in page


@pytest.mark.parametrize("said_by", ["the worker", "the controller"])
async def test_nothing_new_is_placed_on_a_worker_that_waits_to_flip_or_stands_by(
    files: ModelFiles, said_by: str
) -> None:
    workers = [await StubWorker(f"w{number}").start() for number in range(2)]
    going = workers[0]
    async with controlled(files, workers) as (rig, controller):
        fleet = rig.front_end.fleet
        endpoint = next(e for e in fleet.endpoints if e.worker_id == "w0")
        await until(lambda: all(e.state == "ready" for e in fleet.endpoints), "both are ready")
        for worker in workers:
            worker.script.decode_gate.clear()
        running = [asyncio.create_task(rig.generate(request(max_tokens=3))) for _ in range(2)]
        await until(lambda: all(worker.num_open == 1 for worker in workers), "each has one")
        if said_by == "the worker":
            going.kv_load.next_role, going.kv_load.draining = worker_pb2.ROLE_PREFILL, True
        else:
            controller.states.put_nowait(control_pb2.ControlState(workers=records(workers, w0="standby")))
        expected = "flipping" if said_by == "the worker" else "standby"
        await until(lambda: endpoint.state == expected, "the router knows")
        for worker in workers:
            worker.script.decode_gate.set()
        later = [await rig.generate(request(max_tokens=3)) for _ in range(4)]
        answers = [*later, *await asyncio.gather(*running)]
        assert [answer.token_ids for answer in answers] == [[300, 301, 302]] * 6
        assert [len(worker.submits) for worker in workers] == [1, 5]
        assert f'state="{expected}"' in (await rig.http.get("/metrics")).text
        going.kv_load.Clear()
        controller.states.put_nowait(control_pb2.ControlState(workers=records(workers, w1="draining")))
        await until(lambda: endpoint.state == "ready", "it serves again")
        assert (await rig.generate(request(max_tokens=3))).token_ids == [300, 301, 302]
        assert [len(worker.submits) for worker in workers] == [2, 5]


async def test_admission_counts_the_seats_of_a_worker_as_it_is_tuned(files: ModelFiles) -> None:
    workers = list(await start_pair())
    async with controlled(files, workers) as (rig, _):
        fleet = rig.front_end.fleet
        assert {load.max_seqs for load in worker_loads(fleet)} == {
            64
        }  # as started: these stubs say nothing of a tuning
        workers[1].kv_load.max_num_seqs = 3
        await until(lambda: {load.max_seqs for load in worker_loads(fleet)} == {64, 3}, "the seats are counted anew")
        assert 'baton_engine_limit{limit="max_num_seqs",worker="d0"} 3.0' in (await rig.http.get("/metrics")).text
