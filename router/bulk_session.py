"""The public Session: many calls of one client on one gRPC stream.

    reader    StartCall -> a task per call, CancelCall -> that task's end
    calls     each heard by a Gatherer from within the workers' messages; their ends wait beside it
    writer    a SessionReply per engine step, or per `max_flush_ms`: the tokens of all calls in a few packed arrays
So a token costs an append here and a few bytes there, and neither a task switch nor a message: docs/grpc.md has the figures.

Every call ends in exactly one CallEnd, unless the stream ends before. The client closes its side: running calls go on to their
end, then the stream ends with OK. It leaves: they are cancelled. It does not read: what waits for it is bounded, for all of its
calls together, and beyond that the stream is cut. A stream that has reached the age at which connections are to move, or whose
router is to stop, says so (`going_away`) and takes no more calls. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc.aio

from baton.config import RouterConfig
from baton.errors import BatonError, Cancelled, Internal, InvalidRequest, Overloaded, Unavailable
from baton.log import get_log
from baton.v1 import serving_pb2
from router.call import Calls
from router.gather import Gatherer
from router.grpc_calls import open_call
from router.grpc_errors import error_detail
from router.grpc_messages import check_flush, done_to_pb, groups_to_reply

log = get_log("router.bulk")

STALL_S = 60.0  # a client that takes nothing for so long is gone: as over HTTP (router/http_server.py)
LAST_WRITE_S = 1.0  # for a client that reads; one that has left ends the writer by itself
MOVE_RETRY_S = 0.1  # for a call that came after `going_away`: another stream takes it at once

Context = grpc.aio.ServicerContext[Any, Any]


class SlowReader(Cancelled):
    """The client leaves more unread than may wait."""


class BulkSession:
    """One stream; `run` it once."""

    def __init__(self, calls: Calls, config: RouterConfig, metadata: Mapping[str, str], context: Context) -> None:
        self._calls = calls
        self._config = config
        self._metadata = metadata
        self._context = context
        self._gatherer = Gatherer(config.client_backlog_bytes, self._cut)
        self._max_flush_s = 0.0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ends: list[serving_pb2.CallEnd] = []
        self._going_away = False
        self._runner: asyncio.Task[None] | None = None
        self._is_cut = False

    async def run(self, messages: AsyncIterator[serving_pb2.SessionCall]) -> None:
        """Returns when the client has closed its side and every call has ended.

        Raises:
            InvalidRequest: the client's messages make no sense.
            SlowReader: it does not read.
        """
        self._runner = asyncio.current_task()
        writer = asyncio.create_task(self._write())
        age = asyncio.get_running_loop().call_later(self._config.max_connection_age_s, self._go_away)
        try:
            await self._until_closed(messages, writer)
        except asyncio.CancelledError:
            if not self._is_cut:
                raise
            assert self._runner is not None
            self._runner.uncancel()
            raise SlowReader("the client does not read its answers, or too slowly") from None
        finally:
            age.cancel()
            await self._end_calls()
            if not self._is_cut:  # a status cannot follow a message that is only half written
                self._gatherer.close()
                await asyncio.wait((writer,), timeout=LAST_WRITE_S)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _end_calls(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_closed(self, messages: AsyncIterator[serving_pb2.SessionCall], writer: asyncio.Task[None]) -> None:
        is_first = True
        async for message in messages:
            self._on_message(message, is_first=is_first)
            is_first = False
        while self._tasks:
            await asyncio.wait(self._tasks.values())
        self._gatherer.close()
        await writer

    def _cut(self) -> None:
        if self._runner is not None and not self._is_cut:
            self._is_cut = True
            self._runner.cancel()

    def _go_away(self) -> None:
        self._going_away = True
        self._gatherer.wake()

    # -- in ----------------------------------------------------------------------------------------------------------

    def _on_message(self, message: serving_pb2.SessionCall, *, is_first: bool) -> None:
        kind = message.WhichOneof("message")
        if kind == "start":
            self._start(message.start)
        elif kind == "cancel":
            if task := self._tasks.get(message.cancel.call):
                task.cancel()
        elif kind == "open" and is_first:
            check_flush(message.open.max_flush_ms)
            self._max_flush_s = message.open.max_flush_ms / 1e3
        else:
            raise InvalidRequest("a message is neither start nor cancel, nor open as the first one", field="message")

    def _start(self, start: serving_pb2.StartCall) -> None:
        if start.call in self._tasks:
            raise InvalidRequest(f"call {start.call} runs already; its number is free after its end", field="call")
        limit = self._config.max_session_calls
        if not self._calls.takes_calls:
            self._go_away()
        if self._going_away:
            self._end(start.call, Unavailable("this stream takes no more calls", retry_after_s=MOVE_RETRY_S))
        elif len(self._tasks) >= limit:
            error = Overloaded(f"the stream has {limit} running calls, which is the limit", retry_after_s=1.0)
            self._end(start.call, error)
        else:
            task = asyncio.create_task(self._run_call(start), name=f"bulk call {start.call}")
            self._tasks[start.call] = task
            task.add_done_callback(lambda _: self._tasks.pop(start.call, None))

    async def _run_call(self, start: serving_pb2.StartCall) -> None:
        """One call to its end, which is told whatever it is. The RPC's boundary."""
        heard = self._gatherer.audience(start.call)
        timeout_s = start.timeout_ms / 1e3 if start.timeout_ms else None
        request = start.resume if start.HasField("resume") else start.generate
        try:
            async with open_call(self._calls, request, self._metadata, timeout_s, self._config.max_body_bytes) as call:
                done = await call.tell(heard)
            end = serving_pb2.CallEnd(call=start.call, done=done_to_pb(done, heard.ends, call.request_id))
            self._ends.append(end)
            self._gatherer.wake()
        except BatonError as error:
            self._end(start.call, error)
        except asyncio.CancelledError:
            self._end(start.call, Cancelled("the call was cancelled"))
        except Exception:
            log.exception("bulk_call_failed", call=start.call)
            self._end(start.call, Internal("an internal error ended the call"))

    def _end(self, number: int, error: BatonError) -> None:
        self._ends.append(serving_pb2.CallEnd(call=number, error=error_detail(error)))
        self._gatherer.wake()

    # -- out ---------------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        is_last = told_going_away = False
        while not is_last:
            await self._gatherer.wait(self._max_flush_s)
            is_last = self._gatherer.closed
            reply = groups_to_reply(self._gatherer.take(), self._calls.table)
            ends, self._ends = self._ends, []
            reply.ends.extend(ends)
            reply.going_away = self._going_away and not told_going_away
            told_going_away = told_going_away or reply.going_away
            if not reply.ByteSize():
                continue
            try:
                async with asyncio.timeout(STALL_S):
                    await self._context.write(reply)
            except TimeoutError:
                self._cut()
                return
            except grpc.aio.UsageError:  # the client has left; its cancel is on its way to the runner
                return
