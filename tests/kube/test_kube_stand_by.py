"""A controller that waits for the Lease, and a pod that waits for its worker to drain."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import grpc
import httpx
import pytest

from baton.peer_trust import PeerTrust
from baton.request import Role
from baton.v1 import control_pb2_grpc
from router.controller.control_service import ControlService
from router.controller.controller import Controller
from router.controller.fleet_state import READY, AfterDrain
from router.controller.kube import prestop, stand_by
from router.controller.kube.calls import KubeCalls
from router.controller.kube.lease import KubeLease
from router.controller.kube.stand_by import lead
from tests.controller.control_rig import Machines, life
from tests.kube.fake_api import FakeApi
from tests.kube.kube_rig import kube_api, lease

PATIENCE_S = 10.0


@pytest.fixture
def fake() -> Iterator[FakeApi]:
    with FakeApi() as fake:
        fake.load([lease("demo-controller")], "baton")
        yield fake


@pytest.fixture
def calls() -> Iterator[KubeCalls]:
    calls = KubeCalls()
    yield calls
    calls.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def status(port: int, path: str) -> int:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{port}{path}")).status_code


async def test_who_waits_answers_its_probes_and_leads_once_the_lease_is_free(
    fake: FakeApi, calls: KubeCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_by, "_TRY_S", 0.02)
    with kube_api(fake, tmp_path) as api:
        leader, waits, port = (
            KubeLease(api, "demo-controller", "a"),
            KubeLease(api, "demo-controller", "b"),
            free_port(),
        )
        leader.take()
        waiting = asyncio.create_task(lead(waits, calls, "127.0.0.1", port, asyncio.Event()))
        async with asyncio.timeout(PATIENCE_S):
            while waits.holder_seen != "a":  # noqa: ASYNC110 - another thread's
                await asyncio.sleep(0.01)
            assert (await status(port, "/healthz"), await status(port, "/leaderz")) == (200, 503)
            assert await status(port, "/admin/v1/slo") == 503
            leader.give_back()
            assert await waiting
        assert waits.is_held
        socket.create_server(("127.0.0.1", port)).close()  # it is free for the admin endpoint


async def test_who_is_stopped_while_it_waits_does_not_lead(fake: FakeApi, calls: KubeCalls, tmp_path: Path) -> None:
    with kube_api(fake, tmp_path) as api:
        KubeLease(api, "demo-controller", "a").take()
        stop = asyncio.Event()
        waiting = asyncio.create_task(lead(KubeLease(api, "demo-controller", "b"), calls, "127.0.0.1", 0, stop))
        await asyncio.sleep(0.05)
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            assert not await waiting


async def test_a_server_that_is_away_is_waited_for(
    fake: FakeApi, calls: KubeCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_by, "_TRY_S", 0.02)
    with kube_api(fake, tmp_path) as api:
        with fake.away():
            waits = KubeLease(api, "demo-controller", "b")
            waiting = asyncio.create_task(lead(waits, calls, "127.0.0.1", 0, asyncio.Event()))
            await asyncio.sleep(0.1)
            assert not waiting.done()
        async with asyncio.timeout(PATIENCE_S):
            assert await waiting


# -- prestop ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def ask_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prestop, "ASK_S", 0.02)


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[str, int]]:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()
    finally:
        server.close()


async def wait_for(control: str, worker_id: str, address: tuple[str, int], limit_s: float = PATIENCE_S) -> str:
    return await prestop.wait_until_drained(control, worker_id, address, limit_s, PeerTrust())


async def test_a_pod_waits_until_its_worker_has_drained_and_its_next_process_works_again(tmp_path: Path) -> None:
    machines = Machines()
    async with life(tmp_path, machines) as rig:
        server = await rig.worker("demo-decode-0", behaviour="working")
        async with listening() as address:
            waiting = asyncio.create_task(wait_for(machines.address, "demo-decode-0", address))
            await rig.until(lambda: rig.controller.fleet.get("demo-decode-0").after_drain is AfterDrain.RETURN)
            await rig.until(lambda: bool((view := rig.controller.view("demo-decode-0")) and view.load.draining))
            assert not waiting.done()
            server.finish()
            async with asyncio.timeout(PATIENCE_S):
                assert await waiting == "drained"
        await machines.stop("demo-decode-0")
        await machines.start("demo-decode-0", "decode")
        await rig.until(lambda: rig.state("demo-decode-0") == READY)
        assert not rig.controller.fleet.get("demo-decode-0").draining
        assert rig.controller.fleet.get("demo-decode-0").role is Role.DECODE
    await machines.stop_all()


async def test_a_worker_that_nobody_knows_is_not_waited_for(tmp_path: Path) -> None:
    machines = Machines()
    async with life(tmp_path, machines), listening() as address:
        assert await wait_for(machines.address, "nobody", address) == "drained"


async def test_the_limit_ends_the_wait_and_so_does_a_worker_that_is_gone(tmp_path: Path) -> None:
    machines = Machines()
    async with life(tmp_path, machines) as rig:
        await rig.worker("demo-decode-0", behaviour="working")
        async with listening() as address:
            assert "not drained after 0.1 s" in await wait_for(machines.address, "demo-decode-0", address, limit_s=0.1)
        nobody = ("127.0.0.1", free_port())
        assert "nobody listens" in await wait_for(machines.address, "demo-decode-0", nobody)
    await machines.stop_all()


async def test_a_controller_that_is_away_is_asked_again_when_it_is_back() -> None:
    asked: list[str] = []

    class Back:
        async def leave(self, worker_id: str) -> bool:
            asked.append(worker_id)
            return True

    port = free_port()
    async with listening() as address:
        waiting = asyncio.create_task(wait_for(f"127.0.0.1:{port}", "demo-decode-0", address))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        server = grpc.aio.server()
        control_pb2_grpc.add_ControlServicer_to_server(ControlService(cast("Controller", Back())), server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        async with asyncio.timeout(PATIENCE_S):
            assert await waiting == "drained"
        await server.stop(None)
    assert asked == ["demo-decode-0"]


def test_what_ends_a_pod_loads_nothing_heavy() -> None:

    code = (
        "import sys, router.controller.kube.prestop; print(sorted({'torch', 'ray', 'kubernetes'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == "[]"
