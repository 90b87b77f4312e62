"""A Session by itself, without a worker."""

from __future__ import annotations

import asyncio

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
