"""The gRPC side of sessions: reads a router's messages into the host, writes its outbox back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc

from baton import clock
from baton.log import get_log
from baton.peer_trust import PLAIN, Part, PeerTrust
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.wire import PROTOCOL_VERSION
from worker.sessions import RouterSession

if TYPE_CHECKING:
    from worker.host import WorkerHost

log = get_log("worker.sessions")

STREAM_ENDED = "stream ended"  # by the router: the one end that needs no error
OPEN_TIMEOUT_S = 5.0  # a stream that does not open itself is dropped; a router opens at once


class SessionService(worker_pb2_grpc.WorkerServicer):
    def __init__(self, host: WorkerHost, trust: PeerTrust = PLAIN) -> None:
        self._host = host
        self._trust = trust

    async def Session(  # type: ignore[override]  # grpc.aio also takes a coroutine that writes to its context
        self,
        request_iterator: AsyncIterator[worker_pb2.SessionRequest],
        context: grpc.aio.ServicerContext[worker_pb2.SessionRequest, worker_pb2.SessionEvent],
    ) -> None:
        await self._trust.admit(context, Part.ROUTER, Part.CONTROLLER)
        requests = aiter(request_iterator)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                first = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be open")
        if first.WhichOneof("message") != "open" or first.open.router_epoch == 0:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be open, with a router_epoch")
        if first.open.protocol_version != PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol_version differs: mine {PROTOCOL_VERSION}, yours {first.open.protocol_version}",
            )
        session = self._host.open_session(first.open.router_id, first.open.router_epoch)
        reader = asyncio.create_task(self._read(requests, session))
        writer = asyncio.create_task(self._write(session, context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.close(STREAM_ENDED)
            self._host.sessions.closed(session)  # before any await: a second cancel must not skip it
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        if session.drop_reason != STREAM_ENDED:
            await context.abort(grpc.StatusCode.UNAVAILABLE, session.drop_reason)

    async def _read(self, requests: AsyncIterator[worker_pb2.SessionRequest], session: RouterSession) -> None:
        try:
            async for request in requests:
                if session.is_closed:  # what a router sent on a stream that it has replaced
                    return
                session.last_heard_s = clock.now_s()
                self._host.on_session(session, request)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return
        except Exception:  # the RPC boundary: a defect ends this Session and its sequences, not the worker
            log.exception("session_failed", router=session.router_id)
            session.close("a message of this router could not be handled")

    async def _write(
        self,
        session: RouterSession,
        context: grpc.aio.ServicerContext[worker_pb2.SessionRequest, worker_pb2.SessionEvent],
    ) -> None:
        closed = asyncio.create_task(session.wait_closed())
        try:
            async for event in session.events():
                write = asyncio.ensure_future(context.write(event))
                write.add_done_callback(_take_failure)
                try:
                    await asyncio.wait((write, closed), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    was_written = not write.cancel()
                if not was_written:  # the peer does not read, and the session was given up
                    return
                write.result()
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            return
        finally:
            closed.cancel()


def _take_failure(write: asyncio.Future[None]) -> None:
    """A stream that breaks in the middle of a write ends by its reader; asyncio should not report the write on top."""
    if not write.cancelled():
        write.exception()
