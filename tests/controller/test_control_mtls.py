"""The control port under mTLS: workers announce themselves, routers watch and report, and neither does the other's part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio
import pytest

from baton.config import ClusterConfig, ControllerConfig
from baton.peer_trust import PLAIN, Part, PeerTrust
from baton.request import Role
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2
from router.controller.control_service import ControlService
from router.controller.control_store import ControlStore
from router.controller.controller import Controller
from router.controller.database import SQLite
from router.controller.ray_fleet import WorkerConfigs
from tests.cluster_certificates import Authority, needs_openssl
from worker.announcer import announce

pytestmark = needs_openssl
RECORD = control_pb2.WorkerRecord(worker_id="w", epoch=1, address="127.0.0.1:1", role=worker_pb2.ROLE_BOTH)
Question: TypeAlias = "Callable[[control_pb2_grpc.ControlAsyncStub], Awaitable[object]]"


@pytest.fixture
async def address(authority: Authority, tmp_path: Path) -> AsyncIterator[str]:
    trust = authority.trust(Part.CONTROLLER)
    controller = Controller(
        ControllerConfig(), ControlStore(SQLite(tmp_path / "slo"), now_unix_s=lambda: 7.0), trust=trust
    )
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(controller, trust), server)
    port = trust.listen(server, "127.0.0.1", 0)
    await server.start()
    yield f"127.0.0.1:{port}"
    await controller.close()
    await server.stop(None)


QUESTIONS: dict[str, tuple[Question, Part]] = {
    "Announce": (lambda stub: stub.Announce(control_pb2.AnnounceRequest(worker=RECORD)), Part.WORKER),
    "Watch": (lambda stub: stub.Watch(control_pb2.WatchRequest(router_id="r")).read(), Part.ROUTER),
    "Report": (lambda stub: stub.Report(control_pb2.RouterReport(router_id="r")), Part.ROUTER),
}


async def outcome(address: str, trust: PeerTrust, question: Question) -> grpc.StatusCode:
    async with trust.channel(address, Part.CONTROLLER) as channel:
        try:
            await question(control_pb2_grpc.ControlStub(channel))
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", QUESTIONS)
async def test_each_part_may_do_its_own_and_strangers_nothing(
    address: str, authority: Authority, stranger: Authority, method: str
) -> None:
    question, its_part = QUESTIONS[method]
    for part in Part:
        expected = grpc.StatusCode.OK if part is its_part else grpc.StatusCode.PERMISSION_DENIED
        assert await outcome(address, authority.trust(part), question) is expected, part
        assert await outcome(address, stranger.trust(part), question) is grpc.StatusCode.UNAVAILABLE, part
    assert await outcome(address, PLAIN, question) is grpc.StatusCode.UNAVAILABLE


async def test_a_worker_announces_itself_over_tls(address: str, authority: Authority) -> None:
    answers: asyncio.Queue[control_pb2.AnnounceResponse] = asyncio.Queue()
    task = asyncio.create_task(announce(address, lambda: RECORD, answers.put_nowait, authority.trust(Part.WORKER)))
    assert (await asyncio.wait_for(answers.get(), 10.0)).role == worker_pb2.ROLE_BOTH
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_each_part_of_a_cluster_gets_its_own_folder() -> None:
    cluster = ClusterConfig(tls_dir="/certificates")
    assert cluster.tls_dir_of(Part.CONTROLLER) == "/certificates/controller"
    assert WorkerConfigs(cluster, "", lambda role: 2)("decode-0", Role.DECODE).tls_dir == "/certificates/worker"
    assert WorkerConfigs(ClusterConfig(), "", lambda role: 2)("decode-0", Role.DECODE).tls_dir == ""
