import asyncio
from typing import Any

import grpc
import pytest

from baton.errors import Overloaded, Unavailable
from baton.request import Role
from baton.slo import SLO
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2
from router.controller.fleet_state import DRAINING, FAILED, READY
from tests.controller.conftest import ControlPlane, StartWorker


def state_of(plane: ControlPlane, worker_id: str) -> str:
    return plane.controller.fleet.get(worker_id).state


async def read_state(watch: grpc.aio.UnaryStreamCall[Any, Any]) -> control_pb2.ControlState:
    state = await asyncio.wait_for(watch.read(), 5)
    assert isinstance(state, control_pb2.ControlState)
    return state


async def test_a_watching_router_sees_workers_and_slo_changes_at_once(
    plane: ControlPlane, start_worker: StartWorker
) -> None:
    async with grpc.aio.insecure_channel(plane.address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        watch = stub.Watch(control_pb2.WatchRequest(router_id="r"))
        first = await read_state(watch)
        assert (len(first.workers), first.slo.version) == (0, 1)

        worker = await start_worker("prefill-0", "prefill")
        seen = await read_state(watch)
        [record] = seen.workers
        assert (record.worker_id, record.epoch, record.state) == ("prefill-0", worker.epoch, "ready")
        assert record.role == worker_pb2.ROLE_PREFILL

        await plane.controller.in_force.slo.put(1, (SLO("interactive", 10.0, 1.0, e2e_ms=500.0),), "ann", "")
        while seen.slo.version == 1:
            seen = await read_state(watch)
        [target] = seen.slo.classes
        assert (target.ttft_ms, target.e2e_ms, target.HasField("itl_p99_ms")) == (10.0, 500.0, False)
        watch.cancel()


async def test_a_silent_worker_is_failed_and_a_new_start_takes_its_place(
    plane: ControlPlane, start_worker: StartWorker
) -> None:
    first = await start_worker("decode-0", "decode")
    await plane.until(lambda: plane.controller.view("decode-0") is not None)
    await asyncio.to_thread(first.stop)
    await plane.until(lambda: state_of(plane, "decode-0") == FAILED)
    assert plane.controller.fleet.get("decode-0").reason

    second = await start_worker("decode-0", "decode")
    await plane.until(lambda: plane.controller.view("decode-0") is not None)
    member = plane.controller.fleet.get("decode-0")
    assert (member.state, member.epoch, member.num_restarts) == (READY, second.epoch, 1)


async def test_a_replaced_process_may_not_announce_itself_again(plane: ControlPlane, start_worker: StartWorker) -> None:
    first = await start_worker("decode-0", "decode")
    await start_worker("decode-0", "decode")
    stale = control_pb2.WorkerRecord(
        worker_id="decode-0", epoch=first.epoch, address="127.0.0.1:1", role=worker_pb2.ROLE_DECODE
    )
    async with grpc.aio.insecure_channel(plane.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await control_pb2_grpc.ControlStub(channel).Announce(control_pb2.AnnounceRequest(worker=stale))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    "record",
    [
        control_pb2.WorkerRecord(epoch=1, address="a:1", role=worker_pb2.ROLE_PREFILL),
        control_pb2.WorkerRecord(worker_id="w", address="a:1", role=worker_pb2.ROLE_PREFILL),
        control_pb2.WorkerRecord(worker_id="w", epoch=1, role=worker_pb2.ROLE_PREFILL),
        control_pb2.WorkerRecord(worker_id="w", epoch=1, address="a:1"),
    ],
)
async def test_an_incomplete_announcement_is_refused(plane: ControlPlane, record: control_pb2.WorkerRecord) -> None:
    async with grpc.aio.insecure_channel(plane.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await control_pb2_grpc.ControlStub(channel).Announce(control_pb2.AnnounceRequest(worker=record))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert plane.controller.fleet.members() == ()


async def test_drain_reaches_the_worker_and_a_restarted_one_keeps_draining(
    plane: ControlPlane, start_worker: StartWorker
) -> None:
    await start_worker("decode-0", "decode")
    await plane.until(lambda: plane.controller.view("decode-0") is not None)
    assert (await plane.controller.drain("decode-0", True)).state == DRAINING
    view = plane.controller.view("decode-0")
    assert view is not None
    assert view.load.draining
    second = await start_worker("decode-0", "decode")
    assert second.draining
    assert state_of(plane, "decode-0") == DRAINING


async def test_a_role_changes_only_when_the_worker_agrees(plane: ControlPlane, start_worker: StartWorker) -> None:
    await start_worker("idle-0", "decode")
    await start_worker("busy-0", "decode", "busy")
    await plane.until(lambda: all(plane.controller.view(worker) is not None for worker in ("idle-0", "busy-0")))
    assert (await plane.controller.set_role("idle-0", Role.BOTH)).role is Role.BOTH
    with pytest.raises(Overloaded, match="2 sequences are open"):
        await plane.controller.set_role("busy-0", Role.BOTH)
    assert plane.controller.fleet.get("busy-0").role is Role.DECODE


async def test_an_order_to_an_absent_worker_says_so(plane: ControlPlane) -> None:
    plane.controller.expect("decode-0", Role.DECODE)
    with pytest.raises(Unavailable, match="decode-0 is away"):
        await plane.controller.drain("decode-0", True)


async def test_reports_add_up_over_routers_and_a_router_s_own_report_replaces_its_last(plane: ControlPlane) -> None:
    async with grpc.aio.insecure_channel(plane.address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        for router_id, met in (("a", 3), ("b", 4), ("a", 5)):
            verdicts = [control_pb2.ClassVerdicts(class_name="interactive", num_met=met, num_missed_ttft=1)]
            await stub.Report(control_pb2.RouterReport(router_id=router_id, slo_version=1, verdicts=verdicts))
    total = plane.controller.verdicts()["interactive"]
    assert (total.num_met, total.num_missed_ttft) == (9, 2)


async def test_totals_of_forgotten_routers_are_kept(plane: ControlPlane) -> None:
    for number in range(200):
        verdicts = [control_pb2.ClassVerdicts(class_name="batch", num_failed=1)]
        plane.controller.report(control_pb2.RouterReport(router_id=f"r{number}", verdicts=verdicts))
    assert len(plane.controller.reports()) < 100
    assert plane.controller.verdicts()["batch"].num_failed == 200
