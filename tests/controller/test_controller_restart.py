"""A controller that was killed and started again: routers and workers notice nothing but that it was away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from baton.config import ControllerConfig, WorkerConfig
from baton.errors import ConfigError, PeerRefused
from baton.request import Role
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2
from cli.ports import free_port
from router.controller import controller as controller_module
from router.controller.autoscaler.facts import Tuning
from router.controller.control_service import ControlService
from router.controller.control_store import ControlStore
from router.controller.controller import Controller
from router.controller.database import SQLite
from router.controller.fleet_state import DRAINING, FAILED, READY, AfterDrain, Announcement, Member, SavedFleet
from router.controller.fleet_store import FleetStore
from tests.controller.stand_in_server import StandInServer
from worker.announcer import announce


@pytest.fixture
def port() -> int:
    return free_port()


@asynccontextmanager
async def controller(folder: Path, port: int) -> AsyncIterator[Controller]:
    """One life of the controller process."""
    one = Controller(
        ControllerConfig(heartbeat_s=0.1),
        ControlStore(SQLite(folder / "slo.sqlite"), now_unix_s=lambda: 7.0),
        FleetStore(folder / "fleet.json"),
    )
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(one), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    yield one
    await server.stop(grace=None)
    await one.close()


async def until(one: Controller, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        async for _ in one.watch():
            if holds():
                return


async def start_worker(worker_id: str, port: int) -> StandInServer:
    server = StandInServer(WorkerConfig(worker_id, "decode", control_address=f"127.0.0.1:{port}"), lambda error: None)
    await asyncio.to_thread(server.start)
    return server


async def test_a_fleet_that_cannot_be_written_is_written_once_it_can(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "_RETRY_S", 0.02)
    save, num_failed = FleetStore.save, 0

    def save_or_not(store: FleetStore, fleet: SavedFleet) -> None:
        nonlocal num_failed
        if num_failed < 3:
            num_failed += 1
            raise OSError(28, "No space left on device")
        save(store, fleet)

    monkeypatch.setattr(FleetStore, "save", save_or_not)
    async with controller(tmp_path, port) as one:
        one.expect("decode-0", Role.DECODE)
        await until_saved(tmp_path, lambda saved: len(saved.members) == 1)
        one.expect("decode-1", Role.DECODE)
        await until_saved(tmp_path, lambda saved: len(saved.members) == 2)
    assert num_failed == 3


async def test_its_successor_names_the_same_fleet_from_its_first_word(tmp_path: Path, port: int) -> None:
    async with controller(tmp_path, port) as first:
        workers = [await start_worker(f"decode-{n}", port) for n in range(2)]
        await until(first, lambda: all(first.view(f"decode-{n}") is not None for n in range(2)))
        await first.drain("decode-1", True)
        await until(first, lambda: first.fleet.get("decode-1").state == DRAINING)
        before = [await anext(first.watch())]
        await until_saved(tmp_path, lambda saved: any(member.draining for member in saved.members))
    try:
        async with controller(tmp_path, port) as second:
            after = await anext(second.watch())
            assert list(after.workers) == list(before[0].workers)
            await until(second, lambda: all(second.view(f"decode-{n}") is not None for n in range(2)))
            assert [(m.state, m.num_restarts) for m in second.fleet.members()] == [(READY, 0), (DRAINING, 0)]
            await asyncio.to_thread(workers[0].stop)
            await until(second, lambda: second.fleet.get("decode-0").state == FAILED)
    finally:
        for worker in workers:
            await asyncio.to_thread(worker.stop)


async def until_saved(folder: Path, holds: Callable[[SavedFleet], bool]) -> None:
    async with asyncio.timeout(10.0):
        while True:
            if holds(FleetStore(folder / "fleet.json").load()):
                return
            await asyncio.sleep(0.01)


async def test_a_worker_that_died_meanwhile_is_failed_and_a_replaced_one_stays_replaced(
    tmp_path: Path, port: int
) -> None:
    async with controller(tmp_path, port) as first:
        old = await start_worker("decode-0", port)
        await asyncio.to_thread(old.stop)
        new = await start_worker("decode-0", port)
        await until_saved(tmp_path, lambda saved: bool(saved.replaced_epochs))
        assert first.fleet.get("decode-0").epoch == new.epoch
    await asyncio.to_thread(new.stop)
    async with controller(tmp_path, port) as second:
        await until(second, lambda: second.fleet.get("decode-0").state == FAILED)
        with pytest.raises(PeerRefused, match="was replaced"):
            second.announce(Announcement("decode-0", old.epoch, "127.0.0.1:1", Role.DECODE, pid=1))


def test_a_fleet_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    assert FleetStore(file).load() == SavedFleet()
    fleet = SavedFleet(
        (Member("decode-0", Role.DECODE, epoch=2**63 + 1, address="a:1"),), frozenset({("decode-0", 2**64 - 1)})
    )
    FleetStore(file).save(fleet)
    assert FleetStore(file).load() == fleet
    wishes = Member(
        "decode-7", Role.BOTH, draining=True, after_drain=AfterDrain.END, tuning=Tuning(1, 2, 3), extra=True
    )
    fleet = SavedFleet((wishes,), frozenset(), ("decode-3",), {"decode": 8}, 512)
    FleetStore(file).save(fleet)
    assert FleetStore(file).load() == fleet
    earlier = {"worker_id": "decode-0", "role": 2, "state": "ready", "epoch": 5, "address": "a:1"}
    file.write_text(json.dumps({"members": [earlier], "replaced_epochs": []}))
    [member] = FleetStore(file).load().members
    assert (member.epoch, member.after_drain, member.tuning) == (5, AfterDrain.STAY, None), "an earlier release's"
    file.write_text('{"members": [{"surprise": 1}]}')
    with pytest.raises(ConfigError, match=r"fleet\.json"):
        FleetStore(file).load()


class CountingControl(control_pb2_grpc.ControlServicer):
    def __init__(self, refuse: bool = False) -> None:
        self.announced = asyncio.Event()
        self.refuse = refuse

    async def Announce(
        self,
        request: control_pb2.AnnounceRequest,
        context: grpc.aio.ServicerContext[control_pb2.AnnounceRequest, control_pb2.AnnounceResponse],
    ) -> control_pb2.AnnounceResponse:
        self.announced.set()
        if self.refuse:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "epoch 1 was replaced")
        return control_pb2.AnnounceResponse(role=worker_pb2.ROLE_DECODE)

    async def Watch(self, request: object, context: object) -> AsyncIterator[control_pb2.ControlState]:
        raise AssertionError("workers do not watch")
        yield

    async def Report(self, request: object, context: object) -> control_pb2.ReportResponse:
        raise AssertionError("workers do not report")

    async def Leave(self, request: object, context: object) -> control_pb2.LeaveResponse:
        raise AssertionError("nobody asks")

    async def Lenders(self, request: object, context: object) -> control_pb2.LendersResponse:
        return control_pb2.LendersResponse()


async def serve(control: CountingControl, port: int) -> grpc.aio.Server:
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(control, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server


async def test_a_worker_announces_itself_to_each_controller_until_one_says_that_it_was_replaced(port: int) -> None:
    wishes: list[control_pb2.AnnounceResponse] = []
    record = control_pb2.WorkerRecord(worker_id="decode-0", epoch=1, address="127.0.0.1:1")
    announcing = asyncio.create_task(announce(f"127.0.0.1:{port}", lambda: record, wishes.append))
    try:
        for life in range(3):
            control = CountingControl(refuse=life == 2)
            server = await serve(control, port)
            await asyncio.wait_for(control.announced.wait(), 10)
            await server.stop(grace=1.0)
        await asyncio.wait_for(announcing, 10)
    finally:
        announcing.cancel()
    assert len(wishes) == 2
