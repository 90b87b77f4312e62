"""Just enough HTTP/1.1 and SSE for a load generator: POST or GET out, a status and a body in, over asyncio streams.

A full client costs the core that it shares with the cluster under test; this one does per chunk: one read, one split, one JSON
parse by the caller. Connections are kept alive and used again only after their response was read to its end, so a call that
leaves early closes its socket, which is how the server learns of it. Runs on the caller's event loop.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from bench.client import CallFailed

NO_FIELDS: Mapping[str, str] = {}
READ_BYTES = 1 << 16  # asyncio's default stream limit
CONNECT_TIMEOUT_S = 10.0  # a loopback or data-centre connection takes milliseconds; this only ends hopeless ones


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: Mapping[str, str]  # lower-case names


def parse_head(raw: bytes) -> Head:
    """Read a status line and headers.

    Raises:
        CallFailed: this is not HTTP/1.
    """
    status_line, *lines = raw.decode("latin-1").split("\r\n")
    parts = status_line.split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
        raise CallFailed("protocol", "the answer is not HTTP/1.1")
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return Head(int(parts[1]), {name.strip().lower(): value.strip() for name, value in pairs})


class ChunkedBody:
    """Decode `Transfer-Encoding: chunked`. Sans-io: feed what was read, get the payload of whole chunks back."""

    def __init__(self) -> None:
        self.finished = False
        self._pending = b""

    def feed(self, data: bytes) -> bytes:
        self._pending += data
        payload = []
        while not self.finished and (chunk := self._next_chunk()) is not None:
            payload.append(chunk)
        return b"".join(payload)

    def _next_chunk(self) -> bytes | None:
        """Take one chunk off, b"" for the last; None when it is not whole yet."""
        line, newline, rest = self._pending.partition(b"\r\n")
        if not newline:
            return None
        try:
            size = int(line.split(b";")[0], 16)
        except ValueError:
            raise CallFailed("protocol", "a chunk has no size") from None
        if len(rest) < size + 2:  # CRLF ends every chunk; trailers, which no server here sends, would follow the last
            return None
        self._pending = rest[size + 2 :]
        self.finished = size == 0
        return rest[:size]


class SizedBody:
    """Decode a body of known length, or (None) one that ends with the connection."""

    def __init__(self, length: int | None) -> None:
        self._left = length

    @property
    def finished(self) -> bool:
        return self._left == 0

    def feed(self, data: bytes) -> bytes:
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        return data


def body_of(head: Head) -> ChunkedBody | SizedBody:
    if head.headers.get("transfer-encoding", "").lower() == "chunked":
        return ChunkedBody()
    length = head.headers.get("content-length")
    return SizedBody(int(length) if length is not None else None)


class SseLines:
    """Split a body into the payloads of its `data:` lines; OpenAI servers put one event on one line. Sans-io."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class Connection:
    """One socket, one response at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.reusable = False  # true between a whole response and the next request

    async def request(self, raw: bytes) -> Head:
        """Send and read the head.

        Raises:
            OSError, EOFError: the connection is gone.
            CallFailed: what came back is no head.
        """
        self.reusable = False
        self._writer.write(raw)
        await self._writer.drain()
        try:
            return parse_head(await self._reader.readuntil(b"\r\n\r\n"))
        except asyncio.LimitOverrunError as error:
            raise CallFailed("protocol", "the answer's headers have no end") from error

    async def body(self, head: Head) -> AsyncGenerator[bytes, None]:
        """Yield the body as it comes; a connection that ends too early just ends it, `reusable` stays false."""
        body = body_of(head)
        while not body.finished:
            data = await self._reader.read(READ_BYTES)
            if not data:
                return
            yield body.feed(data)
        self.reusable = head.headers.get("connection", "").lower() != "close"

    def close(self) -> None:
        self._writer.close()


class Pool:
    """Connections to one origin. `take`, then `give` back whatever happened."""

    def __init__(self, url: str, fields: Mapping[str, str] = NO_FIELDS) -> None:
        """`fields`: headers of every request; empty ones are left out.

        Raises:
            CallFailed: this is no URL that can be called.
        """
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise CallFailed("connect", f"{url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CallFailed("connect", f"{url} is not an http:// or https:// URL with a host")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        more = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
        self._common = f"host: {parts.netloc.rpartition('@')[2]}\r\n{more}"
        self._idle: list[Connection] = []

    def encode(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = f"{method} {path} HTTP/1.1\r\n{self._common}content-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def send(self, raw: bytes) -> tuple[Connection, Head]:
        """Send on an idle connection or a new one; an idle one that the server has closed meanwhile is replaced.

        Ownership: the caller gives the Connection back with `give`.

        Raises:
            CallFailed: no connection, or it ended before a head came.
        """
        while self._idle:
            connection = self._idle.pop()
            try:
                return connection, await connection.request(raw)
            except (OSError, EOFError):
                connection.close()
            except BaseException:
                connection.close()
                raise
        connection = await self._connect()
        try:
            return connection, await connection.request(raw)
        except (OSError, EOFError) as error:
            connection.close()
            raise CallFailed("disconnected", f"the server hung up before it answered ({error!r})") from error
        except BaseException:
            connection.close()
            raise

    def give(self, connection: Connection) -> None:
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """One whole exchange."""
        connection, head = await self.send(self.encode(method, path, body))
        try:
            return head.status, b"".join([part async for part in connection.body(head)])
        finally:
            self.give(connection)

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return Connection(*await asyncio.open_connection(self._host, self._port, ssl=self._tls))
        except (OSError, TimeoutError) as error:
            raise CallFailed("connect", f"no connection to {self._host}:{self._port} ({error})") from error

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
