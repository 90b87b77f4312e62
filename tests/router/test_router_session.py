"""A Session by itself, without a worker."""

from __future__ import annotations

import asyncio

import pytest

from baton.v1 import worker_pb2
from baton.wire import PROTOCOL_VERSION
from router.session import Liveness, SessionIdentity, SessionLost, WorkerSession


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
