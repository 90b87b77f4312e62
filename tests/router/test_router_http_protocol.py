"""The HTTP edge over raw sockets: bounds, order, pacing, and clients that do not do what clients should."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from starlette.types import Receive, Scope, Send

from baton.config import RouterConfig
from router import http_protocol, http_server
from router.asgi import send_json
from router.http_protocol import (
    MAX_HEAD_BYTES,
    MAX_READS_PER_TURN,
    TURN_S,
    Exchange,
    FrontDoorProtocol,
    exchange_of,
)
from router.http_server import HttpServer
from tests.router.router_rig import Rig, until

Answer = Callable[[Exchange, str], Awaitable[None]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[HttpServer]:
    """`answer` gets each request's Exchange and path."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        exchange.watch(on_gone=lambda: None)
        await answer(exchange, scope["path"])

    server = HttpServer(RouterConfig(http_port=0), app)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def echo(exchange: Exchange, path: str) -> None:
    send_json(exchange, 200, path)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, text: bytes) -> None:
        self.writer.write(text)
        await self.writer.drain()

    async def get(self, path: str) -> tuple[int, bytes]:
        await self.say(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
        return await self.hear()

    async def hear(self) -> tuple[int, bytes]:
        """Status and body of an answer that says its length."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        fields = {line.partition(b":")[0].lower(): line.partition(b":")[2].strip() for line in head.split(b"\r\n")[1:]}
        return int(head.split()[1]), await self.reader.readexactly(int(fields[b"content-length"]))

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        return await asyncio.wait_for(self.reader.read(), 10)


@asynccontextmanager
async def client_of(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def test_requests_on_one_connection_are_answered_in_their_order_also_when_they_come_together() -> None:
    async def slow_first(exchange: Exchange, path: str) -> None:
        if path == "/0":
            await asyncio.sleep(0.02)
        await echo(exchange, path)

    async with serving(slow_first) as server, client_of(server.port) as client:
        await client.say(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(5)))
        assert [await client.hear() for _ in range(5)] == [(200, b'"/%d"' % number) for number in range(5)]
        assert await client.get("/again") == (200, b'"/again"')


async def test_a_request_in_single_bytes_is_a_request() -> None:
    async with serving(echo) as server, client_of(server.port) as client:
        for byte in b"GET /bytes HTTP/1.1\r\nhost: x\r\n\r\n":
            await client.say(bytes([byte]))
            await asyncio.sleep(0)
        assert await client.hear() == (200, b'"/bytes"')


async def test_whoever_leaves_before_or_within_an_answer_is_no_fault_of_the_application(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """A request and its sender's end in one turn of the loop; an answer that is cut."""
    body = b'{"prompt": "a"}'
    head = b"POST /v1/tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", rig.front_end.http_port)) as hasty:
            await asyncio.sleep(0.01)  # it is accepted
            hasty.sendall(head + body)
        await asyncio.sleep(0.01)

    async def cut(exchange: Exchange, path: str) -> None:
        exchange.write(exchange.head(200, b"content-length: 9\r\n") + b"part")
        exchange.cut()

    async with serving(cut) as server, client_of(server.port) as client:
        await client.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await client.rest()
    assert [record.getMessage() for record in caplog.records if record.name == "uvicorn.error"] == []


@pytest.mark.parametrize("whole", [True, False])
async def test_a_head_that_is_too_large_is_refused_with_the_limit_and_nobody_else_is(whole: bool) -> None:
    async with serving(echo) as server, client_of(server.port) as greedy, client_of(server.port) as other:
        await greedy.say(b"GET / HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES + (b"\r\n\r\n" if whole else b""))
        status, text = await greedy.hear()
        assert status == 431
        assert str(MAX_HEAD_BYTES) in text.decode()
        assert await greedy.rest() == b""
        assert await other.get("/other") == (200, b'"/other"')


async def test_what_is_no_http_is_refused_and_its_connection_closed() -> None:
    async with serving(echo) as server, client_of(server.port) as client:
        await client.say(b"\x16\x03\x01 hello\r\n\r\n")
        assert (await client.hear())[0] == 400
        assert await client.rest() == b""


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_wish_to_upgrade_is_ignored_and_the_body_is_not_lost(rig: Rig, chunked: bool) -> None:
    """As Java's HttpClient asks: its first request on a connection, with a body, would go on in HTTP/2."""
    body = b'{"prompt": "hello", "max_tokens": 2}'
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%b%b\r\n\r\n"
    async with client_of(rig.front_end.http_port) as client:
        await client.say(post % (wish, length) + sent + post % (b"", length) + sent)
        assert [(await client.hear())[0] for _ in range(2)] == [200, 200]
    async with client_of(rig.front_end.http_port) as slow:
        for part in (post % (wish, length), sent[:5], sent[5:]):
            await slow.say(part)
            await asyncio.sleep(0.02)
        assert (await slow.hear())[0] == 200


async def test_a_server_that_leaves_answers_who_is_about_to_ask_and_closes_who_has_asked_before() -> None:
    async with serving(echo) as server, client_of(server.port) as new, client_of(server.port) as known:
        assert await known.get("/before") == (200, b'"/before"')
        await until(lambda: server._connections._num_open == 2, "both are there")
        server.leave()
        assert await known.rest() == b""
        assert await new.get("/after") == (200, b'"/after"')
        assert await new.rest() == b""


async def test_a_tunnel_is_refused() -> None:
    async with serving(echo) as server, client_of(server.port) as client:
        await client.say(b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.hear())[0] == 400
        assert await client.rest() == b""


async def test_a_client_that_does_not_take_its_answer_is_cut_off_once_it_was_idle_for_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "KEEP_ALIVE_S", 0.1)
    monkeypatch.setattr(http_protocol, "SWEEP_S", 0.05)

    async def long(exchange: Exchange, path: str) -> None:
        send_json(exchange, 200, "x" * (32 << 20))  # beyond what the kernel's buffers take

    async with serving(long) as server, client_of(server.port) as client:
        await client.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        connections = server._connections
        await until(lambda: connections._num_open == 1, "it is there")
        await until(lambda: connections._num_open == 0, "it is cut off, having read nothing")


async def test_connections_without_a_whole_request_are_closed_after_a_time_and_busy_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "KEEP_ALIVE_S", 0.0)
    monkeypatch.setattr(http_protocol, "SWEEP_S", 0.05)
    go_on, began = asyncio.Event(), asyncio.Event()

    async def patient(exchange: Exchange, path: str) -> None:
        began.set()
        await go_on.wait()
        await echo(exchange, path)

    async with serving(patient) as server, client_of(server.port) as busy:
        await busy.say(b"GET /busy HTTP/1.1\r\nhost: x\r\n\r\n")
        await began.wait()
        async with client_of(server.port) as silent, client_of(server.port) as half:
            await half.say(b"GET /half HTTP/1.1\r\nhost")
            assert await silent.rest() == b""
            assert await half.rest() == b""
        go_on.set()
        assert await busy.hear() == (200, b'"/busy"')


async def test_the_longest_idle_connection_makes_room_for_a_new_one_and_busy_ones_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "_max_connections", lambda: 2)
    go_on = asyncio.Event()

    async def patient(exchange: Exchange, path: str) -> None:
        if path == "/busy":
            await go_on.wait()
        await echo(exchange, path)

    async with serving(patient) as server, client_of(server.port) as first, client_of(server.port) as second:
        assert await first.get("/first") == (200, b'"/first"')
        assert await second.get("/second") == (200, b'"/second"')
        async with client_of(server.port) as third:
            assert await third.get("/third") == (200, b'"/third"')
            assert await first.rest() == b""
            await second.say(b"GET /busy HTTP/1.1\r\nhost: x\r\n\r\n")
            await third.say(b"GET /busy HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.sleep(0.05)
            async with client_of(server.port) as fourth:
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await fourth.get("/fourth")
            go_on.set()
            assert await second.hear() == (200, b'"/busy"')
            assert await third.hear() == (200, b'"/busy"')


async def begun_per_turn(num_requests: int, hold_up_s: float) -> Counter[int]:
    """How many of so many requests that come at once are begun in each turn of the loop, where each holds that up for so long."""
    turn, begun = 0, Counter[int]()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def note(exchange: Exchange, path: str) -> None:
        begun[turn] += 1
        time.sleep(hold_up_s)  # noqa: ASYNC251  # a turn of the loop that takes so long
        await echo(exchange, path)

    async with serving(note) as server:
        streams = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(num_requests)]
        counting = asyncio.create_task(count_turns())
        for _, writer in streams:
            writer.write(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
        answers = [await Client(reader, writer).hear() for reader, writer in streams]
        counting.cancel()
        for _, writer in streams:
            writer.close()
    assert answers == [(200, b'"/x"')] * num_requests
    return begun


async def test_many_requests_that_come_at_once_are_begun_a_few_per_turn_of_the_loop() -> None:
    assert max((await begun_per_turn(60, hold_up_s=0.0)).values()) <= MAX_READS_PER_TURN


async def test_the_longer_turns_take_the_fewer_requests_are_begun_in_one() -> None:
    begun = await begun_per_turn(40, hold_up_s=TURN_S)
    assert (
        Counter(begun.values())[1] >= 10
    )  # none where it does not count; others' work on these cores adds its own turns


async def test_the_time_of_a_request_begins_when_its_bytes_come_also_behind_another_one_s_body() -> None:
    arrivals_s: list[float] = []

    async def note(exchange: Exchange, path: str) -> None:
        arrivals_s.append(exchange.arrival_s)
        await echo(exchange, path)

    async with serving(note) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
        await until(lambda: len(arrivals_s) == 1, "the first is begun")
        sent_s = time.monotonic()
        writer.write(b"cdGET /b HTTP/1.1\r\nhost: x\r\n\r\n")
        client = Client(reader, writer)
        assert [await client.hear(), await client.hear()] == [(200, b'"/a"'), (200, b'"/b"')]
        writer.close()
    assert arrivals_s[0] < sent_s <= arrivals_s[1] <= time.monotonic()


async def test_a_connection_that_cannot_be_parsed_at_all_holds_nobody_else_up(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = FrontDoorProtocol.parse
    failed: list[FrontDoorProtocol] = []

    def fail_once(protocol: FrontDoorProtocol) -> None:
        if not failed:
            failed.append(protocol)
            raise RuntimeError("a defect of ours")
        parse(protocol)

    monkeypatch.setattr(FrontDoorProtocol, "parse", fail_once)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    async with serving(echo) as server:
        streams = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        for _, writer in streams:
            writer.write(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: bool(failed), "one has failed")
        hear = [asyncio.create_task(Client(*stream).hear()) for stream in streams]
        await until(lambda: sum(task.done() for task in hear) == 2, "the others are served")
        for task in hear:
            task.cancel()
        for _, writer in streams:
            writer.close()


async def test_a_client_that_does_not_read_gets_no_second_answer_made(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    async def large(exchange: Exchange, path: str) -> None:
        if exchange.behind:
            await exchange.caught_up()
        begun.append(path)
        send_json(exchange, 200, "a" * (8 << 20))

    async with serving(large) as server:
        async with client_of(server.port) as client:
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            await client.say(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(3)))
            await until(lambda: bool(begun), "the first is answered")
            await asyncio.sleep(0.05)
            assert begun == ["/0"]
            client.reader._transport.resume_reading()  # type: ignore[attr-defined]
            for _ in range(3):
                assert len((await client.hear())[1]) == (8 << 20) + 2
        assert begun == ["/0", "/1", "/2"]


async def test_an_http_1_0_client_gets_a_stream_that_ends_with_its_connection(rig: Rig) -> None:
    body = b'{"prompt": "a", "stream": true, "max_tokens": 3}'
    async with client_of(rig.front_end.http_port) as client:
        await client.say(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        head, _, events = (await client.rest()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


async def test_a_body_that_its_sender_may_hold_back_is_asked_for(rig: Rig) -> None:
    body = b'{"prompt": "a", "max_tokens": 3}'
    async with client_of(rig.front_end.http_port) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        await client.say(head)
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.say(body)
        assert (await client.hear())[0] == 200
