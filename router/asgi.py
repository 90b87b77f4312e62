"""What Starlette leaves to its users: bounded bodies, errors in OpenAI's shape, and callers that leave.

    read_body            at most `limit` bytes; a larger one is refused by its declared length, before it is read
    send_json, send_error
    cancel_when_gone     runs an answer and cancels it within milliseconds of the client's disconnect
Everything here is plain ASGI on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Coroutine, Mapping

import orjson
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError, InvalidRequest
from router.labels import REQUEST_ID

# A client that is still sending cannot read our refusal: take in what it sends, but not for ever. Several times the largest
# body a well-meaning client sends, at loopback speed.
DISCARD_S = 2.0
# The largest body arrives in that time at 1 Mbit/s; a slower client holds a connection and memory for nothing.
READ_S = 35.0

_TYPES = {
    "invalid_request": "invalid_request_error",
    "not_found": "invalid_request_error",
    "overloaded": "rate_limit_error",
}


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body.

    Raises:
        InvalidRequest: it is larger than `limit` bytes, or did not come within READ_S.
        ConnectionError: the client left before its end.
    """
    try:
        async with asyncio.timeout(READ_S):
            return await _read(scope, receive, limit)
    except TimeoutError:
        raise InvalidRequest(f"body is not complete; the limit is {READ_S:g} s", field="body") from None


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes:
    declared = headers(scope).get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(f"{int(declared)} bytes", limit)
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client left while sending")
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
        if num_bytes > limit:
            raise _too_large(f"over {limit} bytes", limit)
        if not message.get("more_body", False):
            return b"".join(chunks)


def parse_json(body: bytes) -> object:
    """The JSON value of a body.

    orjson refuses NaN and lone surrogates without saying where; Python's parser lets both through, so that the check of
    the field can name it.

    Raises:
        InvalidRequest: no JSON, or nested too deeply.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            return json.loads(body)
        except RecursionError:
            raise InvalidRequest("body is nested too deeply; the limit is about 1,000 levels", field="body") from None
        except (ValueError, UnicodeDecodeError):
            raise InvalidRequest("body is not valid JSON", field="body") from None


def headers(scope: Scope) -> Mapping[str, str]:
    """Names in lower case; where one is repeated the last wins."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def send_json(send: Send, status: int, value: object, extra: Mapping[str, str] | None = None) -> None:
    body = orjson.dumps(value)
    await send(_start(status, {"content-type": "application/json", "content-length": str(len(body)), **(extra or {})}))
    await send({"type": "http.response.body", "body": body})


async def start_sse(send: Send, request_id: str) -> None:
    """The head of a stream of server-sent events."""
    await send(
        _start(
            200,
            {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", REQUEST_ID: request_id},
        )
    )


async def send_event(send: Send, value: object) -> None:
    await send({"type": "http.response.body", "body": b"data: " + orjson.dumps(value) + b"\n\n", "more_body": True})


def error_body(error: BatonError) -> dict[str, object]:
    """OpenAI's error object; its `param` is our field."""
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(error.code, "server_error"),
            "param": error.field or None,
            "code": error.code,
        }
    }


async def send_error(send: Send, error: BatonError) -> None:
    extra = {"retry-after": str(math.ceil(error.retry_after_s))} if error.retry_after_s else {}
    await send_json(send, error.http_status, error_body(error), extra)


async def refuse_unread(receive: Receive, send: Send, error: BatonError) -> None:
    """Answer before the body was read, and keep taking it in for a while so that the client gets to the answer."""
    body = orjson.dumps(error_body(error))
    await send(
        _start(
            error.http_status,
            {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"},
        )
    )
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_discard(receive), DISCARD_S)
    await send({"type": "http.response.body", "body": b""})


async def cancel_when_gone(receive: Receive, answer: Coroutine[None, None, None]) -> None:
    """Run `answer`; cancel it as soon as the client disconnects. Call after the body was read."""
    work = asyncio.create_task(answer)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        unfinished = not work.done()
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
    if not unfinished:
        work.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _discard(receive: Receive) -> None:
    while (message := await receive())["type"] != "http.disconnect" and message.get("more_body", False):
        pass


def _too_large(size: str, limit: int) -> InvalidRequest:
    return InvalidRequest(f"body has {size}; the limit is {limit}", field="body")


def _start(status: int, fields: Mapping[str, str]) -> dict[str, object]:
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}
