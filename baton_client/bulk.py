"""Many calls over one stream, for callers that care for throughput: serving.proto's Session.

A stream that breaks, or whose router is about to leave, is followed by another one; calls that ran on a broken one go on
there, as single calls do. Event loop only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import TracebackType

import grpc.aio

from baton.v1 import serving_pb2, serving_pb2_grpc
from baton_client.connection import Prompt, to_request
from baton_client.errors import CallFailed, from_detail, from_rpc_error
from baton_client.progress import Progress

_Event = serving_pb2.Chunk | serving_pb2.Done | CallFailed
_Metadata = tuple[tuple[str, str], ...]


class Bulk:
    """Made by AsyncClient.bulk; leaving its block ends what still runs."""

    def __init__(
        self,
        stub: serving_pb2_grpc.ServingAsyncStub,
        metadata: _Metadata,
        progress: Callable[[serving_pb2.GenerateRequest, float | None], Progress],
        max_flush_ms: int,
        max_calls: int,
    ) -> None:
        self._stub = stub
        self._metadata = metadata
        self._progress = progress
        self._max_flush_ms = max_flush_ms
        self.places = asyncio.Semaphore(max_calls)
        self._stream: _Stream | None = None
        self._leaving: set[_Stream] = set()
        self._is_left = False

    def generate(
        self,
        prompt: Prompt | serving_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        resumable: bool = True,
        **sampling: object,
    ) -> BulkAnswer:
        """Like AsyncClient.generate; waits for a place among the calls of this stream when its answer is first read."""
        return BulkAnswer(self, self._progress(to_request(prompt, resumable, sampling), timeout_s))

    def stream(self) -> _Stream:
        """One that takes calls. Raises: CallFailed, where the block was left."""
        if self._is_left:
            raise _left()
        stream = self._stream
        if stream is None or not stream.takes_calls:
            if stream is not None and not stream.ended:
                self._leaving.add(stream)
                stream.task.add_done_callback(lambda _: self._leaving.discard(stream))
            stream = self._stream = _Stream(self._stub, self._metadata, self._max_flush_ms)
        return stream

    async def __aenter__(self) -> Bulk:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._is_left = True
        streams = [*self._leaving, *([self._stream] if self._stream is not None else [])]
        for stream in streams:
            stream.task.cancel()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)


class BulkAnswer:
    """The chunks of one call, to be read once."""

    def __init__(self, bulk: Bulk, progress: Progress) -> None:
        self._bulk = bulk
        self._progress = progress
        self._chunks = self._run()

    @property
    def done(self) -> serving_pb2.Done | None:
        """Finish reasons, usage and timings; None until the last chunk was read."""
        return self._progress.done

    def __aiter__(self) -> AsyncIterator[serving_pb2.Chunk]:
        return self._chunks

    async def text(self) -> str:
        """Read to the end; the text of choice 0. Raises: CallFailed."""
        return "".join([chunk.text async for chunk in self if chunk.choice == 0])

    async def close(self) -> None:
        await self._chunks.aclose()

    async def _run(self) -> AsyncGenerator[serving_pb2.Chunk, None]:
        progress = self._progress
        async with self._bulk.places:
            while progress.done is None:
                stream, events = self._bulk.stream(), asyncio.Queue[_Event]()
                number = stream.start(progress, events)
                failed: CallFailed | None = None
                try:
                    while progress.done is None and failed is None:
                        event = await events.get()
                        if isinstance(event, serving_pb2.Chunk):
                            if progress.take(event):
                                yield event
                        elif isinstance(event, serving_pb2.Done):
                            progress.finish(event)
                        else:
                            failed = event
                finally:
                    stream.leave(number)
                if failed is not None:
                    await asyncio.sleep(progress.delay_s(failed))


def _left() -> CallFailed:
    return CallFailed("CANCELLED", "the block of these calls was left")


class _Stream:
    """One Session and the calls on it."""

    def __init__(self, stub: serving_pb2_grpc.ServingAsyncStub, metadata: _Metadata, max_flush_ms: int) -> None:
        self._stub = stub
        self._metadata = metadata
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Queue[_Event]] = {}
        self._outbox: asyncio.Queue[serving_pb2.SessionCall | None] = asyncio.Queue()
        self._send(serving_pb2.SessionCall(open=serving_pb2.OpenSession(max_flush_ms=max_flush_ms)))
        self.takes_calls = True
        self.task = asyncio.create_task(self._run(), name="baton bulk")

    @property
    def ended(self) -> bool:
        return self.task.done()

    def start(self, progress: Progress, events: asyncio.Queue[_Event]) -> int:
        number = next(self._numbers)
        self._calls[number] = events
        message, timeout_s = progress.next_message(), progress.timeout_s
        start = serving_pb2.StartCall(
            call=number, timeout_ms=max(1, int(timeout_s * 1e3)) if timeout_s is not None else 0
        )
        if isinstance(message, serving_pb2.ResumeRequest):
            start.resume.CopyFrom(message)
        else:
            start.generate.CopyFrom(message)
        self._send(serving_pb2.SessionCall(start=start))
        return number

    def leave(self, number: int) -> None:
        """Nobody reads this call any more; end it where it still runs."""
        if self._calls.pop(number, None) is not None:
            self._send(serving_pb2.SessionCall(cancel=serving_pb2.CancelCall(call=number)))
        self._end_if_left()

    def _end_if_left(self) -> None:
        if not self.takes_calls and not self._calls:
            self._outbox.put_nowait(None)

    def _send(self, message: serving_pb2.SessionCall) -> None:
        self._outbox.put_nowait(message)

    async def _messages(self) -> AsyncIterator[serving_pb2.SessionCall]:
        while (message := await self._outbox.get()) is not None:
            yield message

    async def _run(self) -> None:
        failed = _left()
        call = self._stub.Session(self._messages(), metadata=self._metadata)
        try:
            async for reply in call:
                self._on_reply(reply)
            failed = CallFailed("UNAVAILABLE", "the stream ended without the ends of its calls")
        except grpc.aio.AioRpcError as error:
            failed = from_rpc_error(error)
        finally:
            call.cancel()
            self.takes_calls = False
            self._outbox.put_nowait(None)
            calls, self._calls = self._calls, {}
            for events in calls.values():
                events.put_nowait(failed)

    def _on_reply(self, reply: serving_pb2.SessionReply) -> None:
        for number, chunk in chunks(reply):
            if events := self._calls.get(number):
                events.put_nowait(chunk)
        for end in reply.ends:
            if events := self._calls.pop(end.call, None):
                events.put_nowait(end.done if end.HasField("done") else from_detail(end.error))
        if reply.going_away:
            self.takes_calls = False
            self._end_if_left()


def chunks(reply: serving_pb2.SessionReply) -> list[tuple[int, serving_pb2.Chunk]]:
    """Unpack the groups of a reply: (call number, chunk). Pure."""
    unpacked, token, logprob = [], 0, 0
    choices, nums_logprobs = reply.choice or [0] * len(reply.call), reply.num_logprobs or [0] * len(reply.call)
    groups = zip(reply.call, choices, reply.index, reply.num_tokens, reply.text, nums_logprobs, strict=True)
    for number, choice, index, num_tokens, text, num_logprobs in groups:
        chunk = serving_pb2.Chunk(
            text=text,
            token_ids=reply.token_ids[token : token + num_tokens],
            logprobs=reply.logprobs[logprob : logprob + num_logprobs],
            index=index,
            choice=choice,
        )
        unpacked.append((number, chunk))
        token += num_tokens
        logprob += num_logprobs
    return unpacked
