"""Reads multipart/form-data (RFC 7578) as it comes: small fields into memory, one file to a sink. Pure.

    form = Form(content_type, sink)
    form.feed(chunk) ...        any cuts
    form.end()                  -> fields and file name in `form.fields`, `form.filename`

Strict where guessing would be dangerous: parts have a plain name, no transfer encoding and no nested multipart, and behind a
boundary comes a line end or the end. Everything is bounded: headers, fields and their number here, the body by who feeds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from email.message import Message

from baton.errors import InvalidRequest

MAX_HEAD_BYTES = 4_096  # of one part; clients send two lines
MAX_FIELD_BYTES = 1_024  # of a value; ours are words and numbers
MAX_PARTS = 16  # purpose, file, two of expires_after, and as many again that are told to be unknown
MAX_NAME_CHARS = 256  # of a file; a file system's limit is 255
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{1,70}")  # RFC 2046, 5.1.1


class Form:
    """One body."""

    def __init__(self, content_type: str, sink: Callable[[bytes], None]) -> None:
        """`sink` hears the file's bytes. Raises: InvalidRequest."""
        header = _header("content-type", content_type)
        boundary = header.get_param("boundary", header="content-type")
        if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
            raise _bad("content-type must be multipart/form-data with a boundary")
        if not _BOUNDARY.fullmatch(boundary):
            raise _bad("the boundary in content-type is not one (RFC 2046)")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._sink = sink
        self._mark = b"\r\n--" + boundary.encode("ascii")
        self._rest = b"\r\n"  # not looked at yet; the first boundary has no line end before it
        self._take: Callable[[], bool] = self._take_preamble
        self._name = ""
        self._value = b""
        self._num_parts = 0

    def feed(self, chunk: bytes) -> None:
        """Raises: InvalidRequest."""
        self._rest += chunk
        while self._take():
            pass

    def end(self) -> None:
        """Raises: InvalidRequest: the body was cut."""
        if self._take != self._take_epilogue:
            raise _bad("the form ends before its last boundary")

    # -- states: each takes what it can and says whether another look is worth it -------------------------------------

    def _take_preamble(self) -> bool:
        at = self._rest.find(self._mark)
        if at < 0:
            self._rest = self._rest[-len(self._mark) :]
            return False
        self._rest = self._rest[at + len(self._mark) :]
        self._take = self._take_boundary_end
        return True

    def _take_boundary_end(self) -> bool:
        if len(self._rest) < 2:
            return False
        end, self._rest = self._rest[:2], self._rest[2:]
        if end == b"--":
            self._take = self._take_epilogue
        elif end == b"\r\n":
            self._take = self._take_head
        else:
            raise _bad("a boundary is not followed by a line end")
        return True

    def _take_head(self) -> bool:
        at = self._rest.find(b"\r\n\r\n")
        if (at if at >= 0 else len(self._rest)) > MAX_HEAD_BYTES:
            raise _bad(f"a part has more than {MAX_HEAD_BYTES} bytes of headers")
        if at < 0:
            return False
        self._begin(self._rest[:at].decode("utf-8", "replace"))
        self._rest = self._rest[at + 4 :]
        return True

    def _take_body(self) -> bool:
        at = self._rest.find(self._mark)
        end = at if at >= 0 else len(self._rest) - len(self._mark)
        if end > 0:
            self._hear(self._rest[:end])
            self._rest = self._rest[end:]
        if at < 0:
            return False
        self._finish()
        self._take = self._take_preamble
        return True

    def _take_epilogue(self) -> bool:
        self._rest = b""
        return False

    # -- one part ----------------------------------------------------------------------------------------------------

    def _begin(self, head: str) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _bad(f"the form has more than {MAX_PARTS} parts")
        lines = [line.partition(":") for line in head.split("\r\n")]
        headers = {name.strip().lower(): value.strip() for name, _, value in lines}
        if headers.get("content-transfer-encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
            raise _bad("a part has a content-transfer-encoding; the limit is none")
        disposition = _header("content-disposition", headers.get("content-disposition", ""))
        name = disposition.get_param("name", header="content-disposition")
        if disposition.get_content_disposition() != "form-data" or not isinstance(name, str):
            raise _bad("a part has no name")
        if name in self.fields or (name == "file" and self.filename is not None):
            raise InvalidRequest(f"{_shown(name)} is there twice", field=_shown(name))
        self._name, self._value = name, b""
        if name == "file":
            filename = disposition.get_filename("") or "file"
            self.filename = "".join(c for c in filename if c.isprintable())[:MAX_NAME_CHARS]
        self._take = self._take_body

    def _hear(self, data: bytes) -> None:
        """A piece of the part's content."""
        if self._name == "file":
            self._sink(data)
            return
        self._value += data
        if len(self._value) > MAX_FIELD_BYTES:
            name = _shown(self._name)
            raise InvalidRequest(f"{name} is longer than {MAX_FIELD_BYTES} bytes", field=name)

    def _finish(self) -> None:
        if self._name != "file":
            self.fields[self._name] = self._value.decode("utf-8", "replace")


def _header(name: str, value: str) -> Message:
    """The standard library's reader of header parameters, quotes and RFC 2231 included."""
    message = Message()
    message[name] = value.replace("\r", " ").replace("\n", " ")
    return message


def _shown(name: str) -> str:
    return ascii(name[:64])[1:-1]


def _bad(why: str) -> InvalidRequest:
    return InvalidRequest(why, field="body")
