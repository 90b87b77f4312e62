"""uvicorn's httptools protocol with what a front door needs on top: paced intake, bounds, and responses written directly.

    Intake      bytes that arrive are fed to the parser in small slices, so thousands of requests that come at once leave
                room between them for the tokens of those that run
    Connections bounded in number; those without a request are closed after a time, or earlier to make room for new ones.
                One that has not sent a whole request head is idle, however often it sends a byte
    Exchange    one request's side of its connection, handed to the application in the ASGI scope: it writes the response
                itself, in as few writes as it likes, and is told when the client leaves or falls behind
    Upgrades    are not made (RFC 9110, 7.8 allows to ignore the wish): Java's HttpClient asks for h2c with every first request

Invariants: a response is begun at most once, by ASGI's `send` or by the Exchange, never by both. An Exchange that has ended
writes nothing more. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton import clock

EXTENSION = "baton.exchange"

# Reads per turn of the loop, each of which may start a request: fewer where turns take longer than they should, since a token
# of a stream that runs waits for two of them: 16 ms, of the 20 that it may be late by.
MAX_READS_PER_TURN = 8
TURN_S = 0.008
MAX_HEAD_BYTES = 64 << 10  # request line and headers; four times what common proxies let through
HEAD_TOO_LARGE = b"the request head is too large; the limit is %d bytes" % MAX_HEAD_BYTES
NO_HTTP = b"this is no HTTP/1.1 request"
KEEP_ALIVE_S = 75.0  # longer than the 60 s of common load balancers, so that they close first
SWEEP_S = 5.0  # how late an idle connection may be closed


class Intake:
    """What has arrived on all connections and is not parsed yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[FrontDoorProtocol] = deque()
        self._num_reads = MAX_READS_PER_TURN  # of the next turn
        self._took_s = 0.0  # when it was this one's turn last

    def add(self, protocol: FrontDoorProtocol) -> None:
        """Let `protocol` parse what it holds when its turn comes."""
        if not self._waiting:
            self._loop.call_soon(self._take)
            self._took_s = clock.now_s()
        self._waiting.append(protocol)

    def _take(self) -> None:
        last_s, self._took_s = self._took_s, clock.now_s()
        turn_s = self._took_s - last_s
        if turn_s < TURN_S:
            self._num_reads = min(MAX_READS_PER_TURN, self._num_reads + 1)
        else:  # but one for every two TURN_S, whatever it is that takes long
            self._num_reads = max(1, int(turn_s / TURN_S) // 2, self._num_reads // 2)
        try:
            for _ in range(min(self._num_reads, len(self._waiting))):
                self._waiting.popleft().parse()
        finally:  # what goes wrong with one connection must not end the parsing of all others
            if self._waiting:
                self._loop.call_soon(self._take)


class Connections:
    """How many there may be; and those without a request, the longest idle first, which make room for new ones."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_open: int) -> None:
        self._loop = loop
        self.leaving = False  # each request is its connection's last
        self._max_open = max_open
        self._num_open = 0
        self._idle_since_s: dict[FrontDoorProtocol, float] = {}
        self._timer = loop.call_later(SWEEP_S, self.sweep)

    def opened(self, protocol: FrontDoorProtocol) -> bool:
        """Returns False when it is one too many: every other one is busy."""
        self._num_open += 1
        if self._num_open > self._max_open:
            if not self._idle_since_s:
                return False
            self._end(next(iter(self._idle_since_s)))
        self.idle(protocol)
        return True

    def closed(self, protocol: FrontDoorProtocol) -> None:
        self._num_open -= 1
        self.busy(protocol)

    def idle(self, protocol: FrontDoorProtocol) -> None:
        self._idle_since_s[protocol] = self._loop.time()

    def busy(self, protocol: FrontDoorProtocol) -> None:
        self._idle_since_s.pop(protocol, None)

    def leave(self) -> None:
        """From now on each request is its connection's last, and connections between two requests are closed."""
        self.leaving = True
        for protocol in list(self._idle_since_s):
            if not protocol.is_wanted:
                protocol.transport.close()

    def stop(self) -> None:
        self._timer.cancel()

    def sweep(self) -> None:
        """Close those that were idle for too long, also where the client still takes its last answer byte by byte."""
        oldest_s = self._loop.time() - KEEP_ALIVE_S
        while self._idle_since_s:
            protocol, since_s = next(iter(self._idle_since_s.items()))
            if since_s > oldest_s:
                break
            del self._idle_since_s[protocol]
            protocol.transport.abort()
        self._timer = self._loop.call_later(SWEEP_S, self.sweep)

    def _end(self, protocol: FrontDoorProtocol) -> None:
        """Let it take what was written; where it does not, the next one in need of room, or the sweep, ends it."""
        del self._idle_since_s[protocol]
        if protocol.transport.is_closing():
            protocol.transport.abort()
        else:
            protocol.transport.close()
            self.idle(protocol)


class Exchange:
    """One request and its response, for an application that writes the response itself.

    `write` may be called until `end`; it never blocks. `behind` says that the client does not keep up: what is written
    nevertheless waits in memory.
    """

    __slots__ = ("_on_gone", "_on_pace", "_protocol", "arrival_s", "cycle", "write")

    cycle: RequestResponseCycle  # uvicorn's part of it; set before the application runs

    def __init__(self, protocol: FrontDoorProtocol, arrival_s: float) -> None:
        self.arrival_s = arrival_s  # monotonic, of the request's head
        self.write = protocol.transport.write
        self._protocol = protocol
        self._on_gone: Callable[[], object] = _nothing
        self._on_pace: Callable[[], object] = _nothing

    @property
    def gone(self) -> bool:
        """The client has left, or was cut off."""
        if self._protocol.transport.is_closing():
            self._leave()
        return self.cycle.disconnected

    @property
    def body_waits(self) -> bool:
        """All of the request's body is here."""
        return not self.cycle.more_body

    @property
    def chunked(self) -> bool:
        """Whether a body of unknown length goes out in chunks; to HTTP/1.0 it ends with the connection."""
        return self.cycle.scope["http_version"] == "1.1"

    @property
    def begun(self) -> bool:
        """The response's status is sent."""
        return self.cycle.response_started

    @property
    def ended(self) -> bool:
        return self.cycle.response_complete

    @property
    def behind(self) -> bool:
        return self._protocol.flow.write_paused

    async def caught_up(self) -> None:
        """Wait until the client has taken most of what was written for it before, or has left."""
        await self._protocol.flow.drain()

    def watch(self, on_gone: Callable[[], object]) -> None:
        """From now to `end`, hear that the client left: at most once."""
        self._on_gone = on_gone
        self._protocol.active = self

    def when_pace_changes(self, on_pace: Callable[[], object]) -> None:
        """While watching, hear that the client fell behind, caught up or left: `behind` and `gone` say which."""
        self._on_pace = on_pace

    def soon(self, callback: Callable[[], object]) -> None:
        """Call back in the next turn of the loop, after all that this one wakes."""
        loop = self._protocol.loop
        loop.call_soon(loop.call_soon, callback)

    def head(self, status: int, fields: bytes) -> bytes:
        """Status line and headers, to be written with the body's beginning. `fields`: lines with their CRLF, which name
        Content-Length unless the body has an unknown length."""
        cycle = self.cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        parts = [STATUS_LINE[status], self._protocol.default_fields(), fields]
        if not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        return b"".join(parts)

    def end(self) -> None:
        """The response is complete; the connection may take its next request."""
        self._forget()
        cycle = self.cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._protocol.transport.close()
        cycle.on_response()

    def cut(self) -> None:
        """Drop the connection, with what waits to be sent."""
        self._protocol.transport.abort()
        self._leave()

    def _leave(self) -> None:
        """uvicorn would hear of it a turn later, and blame an application that returns for it until then."""
        self.cycle.disconnected = True

    def close_after(self) -> None:
        """Let the connection take no request after this one."""
        self.cycle.keep_alive = False

    def client_left(self) -> None:
        on_gone, on_pace = self._on_gone, self._on_pace
        self._forget()
        on_pace()
        on_gone()

    def pace_changed(self) -> None:
        self._on_pace()

    def _forget(self) -> None:
        self._on_gone = self._on_pace = _nothing
        self._protocol.active = None


def _nothing() -> None:
    """Nobody listens."""


class _NotForUs(Exception):
    """Ends the parsing of a request that nobody may send."""


class FrontDoorProtocol(HttpToolsProtocol):
    """One connection of the server that owns `intake` and `connections`."""

    def __init__(
        self,
        intake: Intake,
        all_connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.active: Exchange | None = None  # whose response may be written now
        self._intake = intake
        self._all = all_connections
        self._unparsed: list[bytes] = []
        self._arrived_s = 0.0  # monotonic: when the oldest of it came
        self._exchange: Exchange | None = None  # of the request that is being received
        self._head_bytes = 0  # of its head, while that is not complete, without the part that is being parsed
        self._part_bytes = 0

    # -- connection --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if not self._all.opened(self):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.closed(self)
        self._unparsed.clear()
        super().connection_lost(exc)
        if self.active is not None:
            self.active.client_left()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.active is not None:
            self.active.pace_changed()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.active is not None:
            self.active.pace_changed()

    @property
    def is_wanted(self) -> bool:
        """A request is here and not parsed yet, or, on a new connection, on its way."""
        return bool(self._unparsed) or self.cycle is None

    def default_fields(self) -> bytes:
        """Header lines that every response has: the date."""
        return b"".join([b"%b: %b\r\n" % pair for pair in self.server_state.default_headers])

    # -- in ----------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Only takes note, but of a body, which begins no request. What comes while the first part still waits stops the
        reading, so that two parts at most wait."""
        if not self._unparsed:
            self._arrived_s = clock.now_s()
            if self._exchange is not None and not self._exchange.body_waits:
                self._part_bytes = len(data)
                self._feed(data)
                return
        self._unparsed.append(data)
        if len(self._unparsed) == 1:
            self._intake.add(self)
        else:
            self.flow.pause_reading()

    def parse(self) -> None:
        """Called by the intake."""
        parts, self._unparsed = self._unparsed, []
        if not parts or self.transport.is_closing():
            return
        data = parts[0]
        if len(parts) > 1:
            data = b"".join(parts)
            self.flow.resume_reading()
        self._part_bytes = len(data)
        self._feed(data)
        if self._exchange is None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(431, HEAD_TOO_LARGE)

    def _feed(self, data: bytes) -> None:
        """As uvicorn's `data_received`, without a log line for each client that speaks something else."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(*((431, HEAD_TOO_LARGE) if self._head_bytes > MAX_HEAD_BYTES else (400, NO_HTTP)))

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """Go on as if the client had not asked. The parser takes no body behind such a head, so another one gets the head
        again, without the wish; `rest` is what follows it."""
        lines = [b"%b: %b\r\n" % field for field in self.headers if field[0] not in (b"upgrade", b"connection")]
        version = self.parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, b"".join(lines))
        self.parser = httptools.HttpRequestParser(self)
        self._feed(head + rest)

    @property
    def _is_upgrade(self) -> bool:
        """The request that is being parsed is not taken: it comes again without the wish."""
        return bool(self.parser.should_upgrade())

    def _refuse(self, status: int, text: bytes) -> None:
        fields = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            text
        )
        self.transport.write(STATUS_LINE[status] + self.default_fields() + fields + text)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._exchange = None
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        if self._is_upgrade:
            if self.parser.get_method() == b"CONNECT":  # the parser's word for it, with or without that header
                raise _NotForUs
            return
        if self._head_bytes + self._part_bytes > MAX_HEAD_BYTES:  # perhaps the body's
            self._head_bytes = len(self.url) + sum([len(name) + len(value) for name, value in self.headers])
            if self._head_bytes > MAX_HEAD_BYTES:
                raise _NotForUs
        self._all.busy(self)
        exchange = self._exchange = Exchange(self, self._arrived_s)
        self.scope["extensions"] = {EXTENSION: exchange}  # type: ignore[dict-item]  # an object of ours
        super().on_headers_complete()
        exchange.cycle = self.cycle
        if self._all.leaving:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if not self._is_upgrade:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_upgrade:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """As uvicorn's, without a timer for each request."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._all.idle(self)


def exchange_of(scope: Scope) -> Exchange:
    """The request's Exchange."""
    exchange: Exchange = scope["extensions"][EXTENSION]
    return exchange
