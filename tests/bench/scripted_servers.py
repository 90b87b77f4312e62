"""Tiny servers with scripted answers: an OpenAI SSE one on raw asyncio, and a grpc.aio Serving one.

A Script says what one answer looks like and where it goes wrong. Both bind a port the system picks and count what they saw.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.v1 import serving_pb2, serving_pb2_grpc


@dataclass(frozen=True)
class Script:
    first_s: float = 0.0  # request -> first token
    gap_s: float = 0.0  # token 1 -> token 2
    step_s: float = 0.0  # later gaps
    tokens_per_chunk: int = 1
    stop_after: int | None = None  # tokens, then the stream just ends
    error_after: int | None = None  # tokens, then an error event
    status: int = 200  # HTTP status, or grpc.StatusCode.UNAVAILABLE where it is not 200
    shed_s: float | None = None  # turned away, with this much to wait
    done: bool = True  # the closing [DONE]
    with_ids: bool = False  # HTTP: token_ids in chunks
    with_timings: bool = True
    empty: bool = False  # finishes without a token
    server_cancels: bool = False  # gRPC: status CANCELLED

    def wait_before(self, index: int) -> float:
        return self.first_s if index == 0 else self.gap_s if index == 1 else self.step_s


@dataclass
class Seen:
    """What a server was asked and what became of it."""

    bodies: list[Any] = field(default_factory=list)
    num_connections: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)  # a client went away mid-answer
    num_inflight: int = 0
    max_inflight: int = 0

    def enter(self, body: object) -> None:
        self.bodies.append(body)
        self.num_inflight += 1
        self.max_inflight = max(self.max_inflight, self.num_inflight)


ScriptFor = Callable[[Any], Script]


@asynccontextmanager
async def openai_server(
    script_for: ScriptFor, *, refuses: tuple[str, ...] = ()
) -> AsyncGenerator[tuple[str, Seen], None]:
    """Serve /v1/models and both completion endpoints; `refuses` names prompt kinds answered with 400: ids, text."""
    seen = Seen()
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        seen.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.split(b" ", 2)
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length) or b"{}")
                if method == b"GET":
                    write_json(writer, 200, {"data": [{"id": "scripted", "max_model_len": 4096, "vocab_size": 512}]})
                elif path.endswith(b"/completions") and not is_refused(body, refuses):
                    await answer(reader, writer, body)
                else:
                    write_json(writer, 400, {"error": {"message": "no such prompt here"}})
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            handlers.discard(task)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        script = script_for(body)
        if script.shed_s is not None:
            write_json(writer, 429, {"error": {"message": "scripted"}}, b"retry-after: %d\r\n" % script.shed_s)
            return
        if script.status != 200:
            write_json(writer, script.status, {"error": {"message": "scripted refusal"}})
            return
        seen.enter(body)
        try:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            async for event in sse_events(script, body):
                if reader.at_eof() or writer.is_closing():
                    seen.left.set()
                    raise ConnectionResetError
                if event is None:
                    raise ConnectionResetError
                data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
                writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        finally:
            seen.num_inflight -= 1

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()
        for handler in list(handlers):
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


def is_refused(body: dict[str, Any], refuses: tuple[str, ...]) -> bool:
    kind = "ids" if isinstance(body.get("prompt"), list) else "text" if "prompt" in body else "chat"
    return kind in refuses


def write_json(writer: asyncio.StreamWriter, status: int, document: object, fields: bytes = b"") -> None:
    body = json.dumps(document).encode()
    writer.write(b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n%b" % (status, fields, len(body), body))


async def sse_events(script: Script, body: dict[str, Any]) -> AsyncIterator[dict[str, Any] | bytes | None]:
    """The events of one answer; None cuts the connection."""
    chat = "messages" in body
    num_tokens = 0 if script.empty else body["max_tokens"]
    if chat:
        yield {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    for index in range(0, num_tokens, script.tokens_per_chunk):
        if script.stop_after is not None and index >= script.stop_after:
            yield None
        if script.error_after is not None and index >= script.error_after:
            yield {"error": {"code": "worker_lost", "message": "scripted"}}
            return
        await asyncio.sleep(script.wait_before(index))
        count = min(script.tokens_per_chunk, num_tokens - index)
        choice: dict[str, Any] = {"delta": {"content": "x" * count}} if chat else {"text": "x" * count}
        if script.with_ids:
            choice["token_ids"] = list(range(count))
        yield {"choices": [{**choice, "finish_reason": None}]}
    yield {"choices": [{"delta": {}, "text": "", "finish_reason": "length"}]}
    final: dict[str, Any] = {
        "choices": [],
        "usage": {
            "prompt_tokens": len(body.get("prompt", ())) or 7,
            "completion_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    if script.with_timings:
        final["baton"] = {"handoff_gap_ms": 12.5, "kv_bytes": 1024, "transport": "tcp/lo", "prefill_ms": 4.0}
    yield final
    if script.done:
        yield b"[DONE]"


class ScriptedServing(serving_pb2_grpc.ServingServicer):
    def __init__(self, script_for: ScriptFor, seen: Seen) -> None:
        self._script_for = script_for
        self._seen = seen

    async def Abort(self, request: serving_pb2.AbortRequest, context: Any) -> serving_pb2.AbortResponse:
        raise NotImplementedError

    def Resume(self, request: serving_pb2.ResumeRequest, context: Any) -> AsyncIterator[serving_pb2.GenerateResponse]:
        raise NotImplementedError

    def Session(self, requests: Any, context: Any) -> AsyncIterator[serving_pb2.SessionReply]:
        raise NotImplementedError

    async def GetLoads(self, request: serving_pb2.GetLoadsRequest, context: Any) -> serving_pb2.GetLoadsResponse:
        raise NotImplementedError

    async def GetModelInfo(
        self, request: serving_pb2.GetModelInfoRequest, context: Any
    ) -> serving_pb2.GetModelInfoResponse:
        return serving_pb2.GetModelInfoResponse(
            model="scripted", max_model_len=4096, max_prompt_tokens=2048, vocab_size=512
        )

    async def Generate(
        self, request: serving_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[serving_pb2.GenerateResponse]:
        script = self._script_for(request)
        if script.shed_s is not None:
            error = serving_pb2.ErrorDetail(code="overloaded", message="scripted", retry_after_s=script.shed_s)
            yield serving_pb2.GenerateResponse(error=error)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "scripted")
        if script.status != 200:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted refusal")
        self._seen.enter(request)
        try:
            async for response in grpc_events(script, request, context):
                yield response
        except asyncio.CancelledError:
            self._seen.left.set()
            raise
        finally:
            self._seen.num_inflight -= 1


async def grpc_events(
    script: Script, request: serving_pb2.GenerateRequest, context: Any
) -> AsyncIterator[serving_pb2.GenerateResponse]:
    num_tokens = 0 if script.empty else request.sampling.max_tokens
    for index in range(0, num_tokens, script.tokens_per_chunk):
        if script.stop_after is not None and index >= script.stop_after:
            return
        if script.server_cancels and index:
            await context.abort(grpc.StatusCode.CANCELLED, "scripted")
        if script.error_after is not None and index >= script.error_after:
            yield serving_pb2.GenerateResponse(error=serving_pb2.ErrorDetail(code="worker_lost", message="scripted"))
            return
        await asyncio.sleep(script.wait_before(index))
        count = min(script.tokens_per_chunk, num_tokens - index)
        yield serving_pb2.GenerateResponse(chunk=serving_pb2.Chunk(token_ids=range(count), index=index))
    timings = serving_pb2.Timings(handoff_gap_ms=12.5, kv_bytes=1024, transport="tcp/lo", prefill_ms=4.0)
    yield serving_pb2.GenerateResponse(
        done=serving_pb2.Done(
            finish_reason=serving_pb2.FINISH_REASON_LENGTH,
            usage=serving_pb2.Usage(
                prompt_tokens=len(request.token_ids.ids), completion_tokens=num_tokens, cached_tokens=3
            ),
            timings=timings if script.with_timings else None,
        )
    )


@asynccontextmanager
async def grpc_server(script_for: ScriptFor) -> AsyncGenerator[tuple[str, Seen], None]:
    seen = Seen()
    server = grpc.aio.server()
    serving_pb2_grpc.add_ServingServicer_to_server(ScriptedServing(script_for, seen), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"grpc://127.0.0.1:{port}", seen
    finally:
        await server.stop(grace=None)
