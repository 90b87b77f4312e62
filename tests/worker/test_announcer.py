"""How a worker tells the controller where it is."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from baton import clock
from baton.v1 import control_pb2, control_pb2_grpc
from tests.silent_control import SilentControl
from worker import announcer


class SlowController(SilentControl):
    async def Announce(self, request: control_pb2.AnnounceRequest, context: object) -> control_pb2.AnnounceResponse:
        await asyncio.sleep(0.2)
        return control_pb2.AnnounceResponse(draining=request.worker.worker_id == "w")


async def test_a_slow_clock_gives_the_controller_as_much_longer_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "ANSWER_S", 0.05)
    monkeypatch.setattr(clock, "_scale", 1_000.0)
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(SlowController(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    heard: asyncio.Future[control_pb2.AnnounceResponse] = asyncio.get_running_loop().create_future()
    record = control_pb2.WorkerRecord(worker_id="w")
    announcing = asyncio.create_task(announcer.announce(address, lambda: record, heard.set_result))
    try:
        async with asyncio.timeout(10):
            assert (await heard).draining
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
        await server.stop(None)
