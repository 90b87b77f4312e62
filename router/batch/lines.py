"""The lines of an input file and those of the files that come of it. Pure.

A line is {"custom_id", "method": "POST", "url", "body"}. Its shape is judged when the file comes, all of it, and so is what no
batch does (streams, priorities, other endpoints): a fault names its line. What is in the body is judged as in any other call,
when the line is run, and a body that does not fit is an outcome in the error file, as OpenAI has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from baton.errors import BatonError, InvalidRequest
from router.batch.records import new_id

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_CUSTOM_ID_CHARS = 512  # as a metadata value: it is kept once for each line
_FIELDS = frozenset(("custom_id", "method", "url", "body"))


@dataclass(frozen=True, slots=True)
class Line:
    number: int  # from 1
    custom_id: str
    url: str
    body: Mapping[str, object]


class BadLine(InvalidRequest):
    """A line that no batch can run."""

    def __init__(self, number: int, param: str, message: str) -> None:
        super().__init__(f"line {number}: {message}", field="file")
        self.number = number
        self.param = param


def parse_line(number: int, text: bytes) -> Line:
    """Raises: BadLine."""
    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise BadLine(number, "line", "it is not valid JSON") from None
    if not isinstance(data, dict):
        raise BadLine(number, "line", "it is not a JSON object")
    for name in data.keys() - _FIELDS:
        raise BadLine(number, "line", f"{name[:64]!a} is not a field of a line; they are {', '.join(sorted(_FIELDS))}")
    custom_id, url, body = data.get("custom_id"), data.get("url"), data.get("body")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise BadLine(number, "custom_id", f"custom_id must be text of 1 to {MAX_CUSTOM_ID_CHARS} characters")
    if data.get("method") != "POST":
        raise BadLine(number, "method", "method must be POST")
    if url not in ENDPOINTS:
        raise BadLine(
            number, "url", f"url {_shown(url)} is not run in batches; the limit is one of {', '.join(ENDPOINTS)}"
        )
    if not isinstance(body, dict):
        raise BadLine(number, "body", "body must be a JSON object")
    if body.get("stream"):
        raise BadLine(number, "body.stream", "body.stream is true; nobody reads a stream here, leave it out")
    if body.get("priority"):
        raise BadLine(number, "body.priority", "body.priority is set; lines have their class's, leave it out")
    return Line(number, custom_id, url, body)


class LineCheck:
    """Judges a file's lines as they come."""

    def __init__(self, max_lines: int) -> None:
        self.num_lines = 0
        self._max_lines = max_lines
        self._custom_ids: set[str] = set()

    def take(self, number: int, text: bytes) -> Line:
        """Raises: BadLine."""
        line = parse_line(number, text)
        if line.custom_id in self._custom_ids:
            raise BadLine(number, "custom_id", "its custom_id is that of an earlier line")
        self._custom_ids.add(line.custom_id)
        self.num_lines += 1
        if self.num_lines > self._max_lines:
            raise BadLine(number, "line", f"the file goes on; the limit is {self._max_lines} lines")
        return line


# -- outcomes, as the lines of output and error files --------------------------------------------------------------------


def answered(custom_id: str, request_id: str, body: object) -> bytes:
    return _outcome(custom_id, {"status_code": 200, "request_id": request_id, "body": body}, None)


def refused(custom_id: str, request_id: str, error: BatonError, body: object) -> bytes:
    """`body`: the error as the endpoint would have said it."""
    return _outcome(custom_id, {"status_code": error.http_status, "request_id": request_id, "body": body}, None)


def not_run(custom_id: str, code: str, message: str) -> bytes:
    """Nobody came to it: the batch was cancelled, or its time is over."""
    return _outcome(custom_id, None, {"code": code, "message": message})


def _outcome(custom_id: str, response: object, error: object) -> bytes:
    return orjson.dumps(
        {"id": new_id("batch_req"), "custom_id": custom_id, "response": response, "error": error}
    )  # orjson ends lines nowhere but where we do


def _shown(value: object) -> str:
    return ascii(value[:64]) if isinstance(value, str) else "(no text)"
