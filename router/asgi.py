"""Bodies in and replies out, for applications that write to their Exchange: bounded bodies, errors in OpenAI's shape.

    read_body       at most `limit` bytes; a larger one is refused by its declared length, before it is read
    send_json, send_error, refuse_unread
Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
from collections.abc import Mapping

import orjson
from starlette.types import Receive, Scope

from baton import clock
from baton.errors import BatonError, InvalidRequest
from router.http_protocol import Exchange
from router.labels import EXPLAIN, REQUEST_ID, fields_of
from router.validate import MAX_LABEL_CHARS

# A client that is still sending cannot read our refusal: take in what it sends, but not for ever. Several times the largest
# body a well-meaning client sends, at loopback speed.
DISCARD_S = 2.0
# The largest body arrives in that time at 1 Mbit/s; a slower client holds a connection and memory for nothing.
READ_S = 35.0

_TYPES = {
    "invalid_request": "invalid_request_error",
    "unauthenticated": "authentication_error",
    "not_found": "invalid_request_error",
    "overloaded": "rate_limit_error",
}


async def read_body(exchange: Exchange, fields: Mapping[str, str], receive: Receive, limit: int) -> bytes:
    """The whole body.

    Raises:
        InvalidRequest: it is larger than `limit` bytes, or did not come within READ_S.
        ConnectionError: the client left before its end.
    """
    if exchange.body_waits:  # nearly always; a timer would cost more than the reading
        return await _read(fields, receive, limit)
    try:
        async with asyncio.timeout(READ_S):
            return await _read(fields, receive, limit)
    except TimeoutError:
        raise InvalidRequest(f"body is not complete; the limit is {READ_S:g} s", field="body") from None


async def _read(fields: Mapping[str, str], receive: Receive, limit: int) -> bytes:
    declared = fields.get("content-length", "")
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
    """Names in lower case, each once. A request id is always among them."""
    fields = fields_of([(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]])
    fields[REQUEST_ID] = request_id_of(fields)
    return fields


def request_id_of(fields: Mapping[str, str]) -> str:
    """What the caller calls its request; drawn where it does not say."""
    return fields.get(REQUEST_ID) or secrets.token_hex(16)


def send_json(exchange: Exchange, status: int, value: object, fields: bytes = b"") -> None:
    """The whole response, in one write. `fields`: more header lines, with their CRLF."""
    body = orjson.dumps(value)
    exchange.write(exchange.head(status, _json_fields(body) + fields) + body)
    exchange.end()


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


def send_error(exchange: Exchange, error: BatonError, request_id: str) -> None:
    fields = b"retry-after: %d\r\n" % math.ceil(clock.real_s(error.retry_after_s)) if error.retry_after_s else b""
    send_json(exchange, error.http_status, error_body(error), request_id_field(request_id) + fields)


async def refuse_unread(exchange: Exchange, receive: Receive, error: BatonError, request_id: str) -> None:
    """Answer before the body was read, and keep taking it in for a while so that the client gets to the answer."""
    body = orjson.dumps(error_body(error))
    exchange.close_after()
    exchange.write(exchange.head(error.http_status, _json_fields(body) + request_id_field(request_id)) + body)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            await _discard(receive)
    exchange.end()


async def _discard(receive: Receive) -> None:
    while (message := await receive())["type"] != "http.disconnect" and message.get("more_body", False):
        pass


def _too_large(size: str, limit: int) -> InvalidRequest:
    return InvalidRequest(f"body has {size}; the limit is {limit}", field="body")


def _json_fields(body: bytes) -> bytes:
    return b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)


def explanation_field(text: str) -> bytes:
    """The header line that says why an answer was made where it was; nothing where nobody asked."""
    return b"%b: %b\r\n" % (EXPLAIN.encode(), text.encode("ascii")) if text else b""


def request_id_field(request_id: str) -> bytes:
    """The header line that tells a caller what its call is known by; cut, where it is refused for its length."""
    return b"%b: %b\r\n" % (REQUEST_ID.encode(), request_id[:MAX_LABEL_CHARS].encode("latin-1", "replace"))
