"""A Session by itself, without a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.v1 import worker_pb2
from baton.wire import PROTOCOL_VERSION
from router.events import Inbox, WorkerGone
from router.session import Liveness, SessionIdentity, SessionLost, WorkerSession
from tests.router.router_rig import until
from tests.router.stub_worker import StubWorker


class EndsWhenCancelled(WorkerSession):
    """Its stream ends with an error at the moment of the cancel, as grpc's does when the worker leaves just then."""

    async def _one_stream(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise SessionLost("the worker left") from None


async def test_a_session_closes_though_its_stream_ends_at_that_moment() -> None:
    session = EndsWhenCancelled("w", "127.0.0.1:1", SessionIdentity("r", 1), Liveness(0.5, 3), lambda: None)
    session.start()
    await asyncio.sleep(0)
    closing = asyncio.create_task(session.close())
    done, _ = await asyncio.wait({closing}, timeout=5)
    assert done == {closing}, "it reconnects for ever"


@pytest.mark.parametrize(("want_kv", "num_known"), [(False, 2), (True, 0)])
async def test_who_places_follows_a_workers_prefix_cache_and_who_only_watches_does_not(
    want_kv: bool, num_known: int
) -> None:
    session = WorkerSession(
        "w", "127.0.0.1:1", SessionIdentity("r", 1), Liveness(0.5, 3), lambda: None, want_kv=want_kv
    )
    opened = worker_pb2.Opened(worker_id="w", epoch=1, num_blocks=8, block_size=16, protocol_version=PROTOCOL_VERSION)
    session._dispatch(worker_pb2.SessionEvent(opened=opened))
    added = worker_pb2.CacheDelta(generation=1, added=[b"a", b"b"], reset=True)
    session._dispatch(worker_pb2.SessionEvent(cache_delta=added))
    assert session.view is not None
    assert len(session.view.prefixes) == num_known


@asynccontextmanager
async def idle_session(idle_heartbeat_s: float) -> AsyncIterator[tuple[WorkerSession, StubWorker]]:
    """Of a router with very many workers: this one is asked less often while it has nothing to do."""
    worker = await StubWorker("w").start()
    session = WorkerSession("w", worker.address, SessionIdentity("r", 1), Liveness(0.1, 3), lambda: None)
    session.idle_heartbeat_s = idle_heartbeat_s
    session.start()
    try:
        await until(lambda: session.view is not None and bool(worker.heartbeats), "it is open")
        yield session, worker
    finally:
        await session.close()
        await worker.kill()


async def test_a_worker_without_sequences_of_ours_is_asked_less_often_and_told_so() -> None:
    async with idle_session(30.0) as (session, worker):
        await asyncio.sleep(0.5)
        assert [beat.next_ms for beat in worker.heartbeats] == [30_000]
        session.attach(1, Inbox())  # type: ignore[arg-type]  # it hears of no token
        await until(lambda: len(worker.heartbeats) > 3, "it is asked at the usual pace")
        assert {beat.next_ms for beat in worker.heartbeats[1:]} == {100}
        assert session.view is not None


async def test_a_worker_that_fell_silent_while_idle_is_noticed_soon_after_it_gets_a_sequence() -> None:
    async with idle_session(30.0) as (session, worker):
        worker.script.silent = True
        inbox = Inbox()
        session.attach(1, inbox)  # type: ignore[arg-type]
        async with asyncio.timeout(5.0):
            event = await inbox.get()
        assert isinstance(event, WorkerGone)
        assert "heartbeats" in event.reason
