"""The router's conversation with a controller that vanishes without a word."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from baton.keepalive import CLIENT_OPTIONS, PING_MS, SERVER_OPTIONS
from baton.model_files import ModelFiles
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2
from router import control_client
from router.fleet import Endpoint
from tests.router.router_rig import request, running_rig, until
from tests.router.stub_worker import StubWorker


class Controller(control_pb2_grpc.ControlServicer):
    """Says one state at the beginning of each Watch."""

    def __init__(self, state: control_pb2.ControlState) -> None:
        self.state = state
        self.num_met = 0

    async def Announce(self, request: object, context: object) -> control_pb2.AnnounceResponse:
        raise AssertionError("routers do not announce")

    async def Watch(self, request: object, context: object) -> AsyncIterator[control_pb2.ControlState]:
        yield self.state
        await asyncio.Event().wait()

    async def Report(self, request: control_pb2.RouterReport, context: object) -> control_pb2.ReportResponse:
        self.num_met = sum(verdict.num_met for verdict in request.verdicts)
        return control_pb2.ReportResponse()

    async def Leave(self, request: object, context: object) -> control_pb2.LeaveResponse:
        raise AssertionError("nobody asks")

    async def Lenders(self, request: object, context: object) -> control_pb2.LendersResponse:
        raise AssertionError("nobody asks")


class Wire:
    """A TCP relay in front of the controller. Frozen, it keeps its connections and moves nothing, as a host that is gone."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._frozen: set[asyncio.StreamWriter] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def freeze(self) -> None:
        """All connections of now, not those to come."""
        self._frozen |= self._writers

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        out_reader, out_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, out_writer}
        for source, target in ((reader, out_writer), (out_reader, writer)):
            self._tasks.add(asyncio.create_task(self._relay(source, target)))

    async def _relay(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65_536):
                if target not in self._frozen:
                    target.write(data)
                    await target.drain()


async def test_a_controller_that_vanished_without_a_word_is_noticed_and_its_successor_followed(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster = tuple((name, 200 if value == PING_MS else value) for name, value in CLIENT_OPTIONS)
    monkeypatch.setattr(control_client, "_CHANNEL_OPTIONS", faster)
    worker = await StubWorker("b0").start()
    record = control_pb2.WorkerRecord(worker_id="b0", address=worker.address, role=worker_pb2.ROLE_BOTH, state="ready")
    target = control_pb2.SloClass(name="interactive", ttft_ms=60_000, tpot_ms=60_000, percentile=0.95)
    slo = control_pb2.SloSet(version=1, classes=[target])
    control = Controller(control_pb2.ControlState(workers=[record], slo=slo))
    server = grpc.aio.server(options=SERVER_OPTIONS)
    control_pb2_grpc.add_ControlServicer_to_server(control, server)
    wire = Wire(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    address = f"127.0.0.1:{await wire.start()}"
    try:
        async with running_rig(files, [], wait_ready=False, control_address=address) as rig:
            rig.workers.append(worker)
            await until(lambda: not rig.front_end.fleet.unready_reason(), "the fleet is known")
            wire.freeze()
            slo.version = 2
            control.state = control_pb2.ControlState(workers=[record], slo=slo)
            assert (await rig.generate(request(max_tokens=3))).token_ids == [300, 301, 302], "calls need no controller"
            await until(lambda: rig.front_end.slo_watch.version == 2, "a new connection is made")
            await until(lambda: control.num_met == 1, "the call's verdict arrives with a later report")
    finally:
        await wire.stop()
        await server.stop(None)


async def test_a_report_that_cannot_be_made_is_not_the_last_one(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, failed, said = control_client._view, asyncio.Event(), asyncio.Event()

    def fail_once(endpoint: Endpoint) -> control_pb2.WorkerView:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("a defect of ours")
        said.set()
        return view(endpoint)

    monkeypatch.setattr(control_client, "_view", fail_once)
    monkeypatch.setattr(control_client, "REPORT_S", 0.05)
    nowhere = control_pb2.WorkerRecord(worker_id="b0", address="127.0.0.1:1", role=worker_pb2.ROLE_BOTH, state="ready")
    control = Controller(control_pb2.ControlState(workers=[nowhere]))
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(control, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with running_rig(files, [], wait_ready=False, control_address=address):
            await until(failed.is_set, "a report could not be made")
            await until(said.is_set, "the next one is made")
    finally:
        await server.stop(None)


def test_of_very_many_links_only_those_that_are_down_are_reported() -> None:
    def link(number: int, state: str) -> worker_pb2.LinkStatus:
        return worker_pb2.LinkStatus(peer=worker_pb2.Peer(worker_id=f"d{number}"), state=state)

    few = [link(number, "ready") for number in range(64)]
    assert control_client.worth_telling(few) == few
    many = [*few, *(link(64 + number, "lost" if number % 2 else "ready") for number in range(300))]
    told = control_client.worth_telling(many)
    assert len(told) == 64
    assert {status.state for status in told} == {"lost"}
