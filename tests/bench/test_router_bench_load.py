"""The compiled load generator and HTTP stub against scripted servers: what they count, how they call each end, when."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from bench import router_bench_load
from bench.router_bench_load import (
    CUT,
    DONE,
    FAILED,
    OPEN,
    PLACEHOLDER,
    REFUSED,
    Generator,
    HttpStub,
    Load,
    LoadError,
    Seen,
    build,
    run_load,
)
from bench.router_bench_target import post
from tests.bench.scripted_servers import Script, openai_server

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here: the load generator cannot be built")
SECONDS = 0.3  # in which requests begin
LEAD_S = 0.2  # before them: a generator has started by then
DRAIN_S = 10.0  # for the last of them: a bound, not a wait


@pytest.fixture(autouse=True)
def _short_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_bench_load, "LEAD_S", LEAD_S)


def completion(max_tokens: int, *, stream: bool = True) -> bytes:
    return post(1, "/v1/completions", {"x-request-id": PLACEHOLDER}, {"max_tokens": max_tokens, "stream": stream})


async def load_scripted(script: Callable[[Any], Script], load: Callable[[int], Load], requests: list[bytes]) -> Seen:
    async with openai_server(script) as (url, _):
        port = urlsplit(url).port
        assert port is not None
        with Generator(load(port), requests) as generator:
            return await asyncio.to_thread(generator.seen)


def few(port: int, *, connections: int = 4, requests: int = 12) -> Load:
    """However late the generator starts, all of them are made: it ends with the last one."""
    return Load(port, connections, DRAIN_S, DRAIN_S, max_requests=requests)


@needs_gcc
async def test_every_token_of_every_stream_is_an_event_in_its_order() -> None:
    seen = await load_scripted(lambda body: Script(), few, [completion(5)])
    assert seen.count(DONE) == len(seen.records) == 12
    assert seen.records["number"].tolist() == list(range(12))
    assert seen.records["num_events"].tolist() == seen.records["usage_tokens"].tolist() == [5] * 12
    for number in range(12):
        own = seen.events[seen.events["number"] == number]
        assert own["index"].tolist() == list(range(5))
        assert (np.diff(own["received_ns"]) >= 0).all()
        record = seen.records[number]
        assert record["due_ns"] <= record["sent_ns"] <= record["first_ns"] == own["received_ns"][0]
        assert own["received_ns"][-1] <= record["end_ns"]


@needs_gcc
async def test_a_stream_that_ends_early_is_cut_and_its_connection_made_anew() -> None:
    def script(body: Any) -> Script:
        return Script(stop_after=3)

    seen = await load_scripted(script, lambda port: few(port, connections=1, requests=2), [completion(5)])
    assert seen.count(CUT) == len(seen.records) == 2
    assert seen.records["num_events"].tolist() == [3, 3]
    assert seen.num_reconnects >= 2
    assert seen.failures() == "2 cut (status 200)"


@needs_gcc
async def test_a_stream_without_its_last_word_is_cut_too() -> None:
    seen = await load_scripted(lambda body: Script(done=False), few, [completion(2)])
    assert seen.count(CUT) == len(seen.records)


@needs_gcc
async def test_an_error_event_is_a_failed_answer_and_a_status_a_refused_one() -> None:
    def script(body: Any) -> Script:
        return Script(error_after=1) if body["max_tokens"] == 2 else Script(status=429)

    seen = await load_scripted(
        script, lambda port: few(port, connections=2, requests=2), [completion(2), completion(3)]
    )
    assert sorted(seen.records["outcome"].tolist()) == sorted([FAILED, REFUSED])
    refused = seen.records[seen.records["outcome"] == REFUSED]
    assert refused["status"].tolist() == [429]
    assert refused["num_events"].tolist() == [0]


@needs_gcc
async def test_what_is_still_running_at_the_end_is_neither_done_nor_failed() -> None:
    seen = await load_scripted(
        lambda body: Script(step_s=3600.0), lambda port: Load(port, 2, SECONDS, max_requests=2), [completion(5)]
    )
    assert seen.count(OPEN) == len(seen.records) == 2
    assert seen.failures() == ""


@needs_gcc
async def test_an_open_loop_sends_at_its_rate_whatever_the_answers_do() -> None:
    seen = await load_scripted(
        lambda body: Script(),
        lambda port: Load(port, 64, DRAIN_S, DRAIN_S, rate=100.0, max_requests=50),
        [completion(1)],
    )
    assert len(seen.records) == 50
    assert np.diff(seen.records["due_ns"]).tolist() == [10_000_000] * 49
    assert (seen.records["sent_ns"] >= seen.records["due_ns"]).all()


@asynccontextmanager
async def raw_server(answer: bytes, *, bytewise: bool = False) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Answers every request by the same bytes, on request one by one; the port, and the heads of the requests."""
    heads: list[bytes] = []
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                heads.append(head)
                for at in range(len(answer)) if bytewise else ():
                    writer.write(answer[at : at + 1])
                    await writer.drain()
                if not bytewise:
                    writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            handlers.discard(task)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], heads
    finally:
        server.close()
        for handler in list(handlers):
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def load_raw(answer: bytes, requests: int = 3, *, bytewise: bool = False) -> tuple[Seen, list[bytes]]:
    async with raw_server(answer, bytewise=bytewise) as (port, heads):
        with Generator(few(port, connections=1, requests=requests), [completion(1)]) as generator:
            return await asyncio.to_thread(generator.seen), heads


def chunked(*payloads: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(payload), payload) for payload in payloads) + b"0\r\n\r\n"


EVENTS = (
    b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n',
    b'data: {"choices":[{"text":"","finish_reason":null}]}\n\n',  # half a character
    b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
)


@needs_gcc
@pytest.mark.parametrize("bytewise", [False, True], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("width", [1, 7, 1000])
async def test_events_are_the_same_however_they_are_cut_into_chunks_and_reads(width: int, bytewise: bool) -> None:
    whole = b"".join(EVENTS)
    answer = chunked(*(whole[at : at + width] for at in range(0, len(whole), width)))
    seen, _ = await load_raw(answer, bytewise=bytewise)
    assert seen.count(DONE) == 3
    assert seen.records["num_events"].tolist() == seen.records["usage_tokens"].tolist() == [2, 2, 2]


@needs_gcc
async def test_a_whole_answer_is_one_event_with_the_servers_count_of_tokens() -> None:
    body = b'{"choices":[{"message":{"role":"assistant","content":"two words"}}],"usage":{"completion_tokens":2}}'
    seen, heads = await load_raw(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    assert seen.count(DONE) == 3
    assert seen.records["num_events"].tolist() == [1, 1, 1]
    assert seen.records["usage_tokens"].tolist() == [2, 2, 2]
    ids = [head.split(b"x-request-id: ")[1].split(b"\r\n")[0] for head in heads]
    assert [int(label, 16) for label in ids] == seen.records["number"].tolist()


@needs_gcc
async def test_what_is_no_http_is_cut() -> None:
    seen, _ = await load_raw(b"220 mail.example ESMTP\r\n\r\n", requests=1)
    assert seen.count(CUT) == 1


@needs_gcc
def test_a_port_where_nobody_listens_gets_no_request() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        seen = run_load(Load(probe.getsockname()[1], 2, SECONDS), [completion(1)])
    assert len(seen.records) == 0
    assert seen.num_reconnects > 0


@pytest.fixture
def stub() -> Iterator[HttpStub]:
    with HttpStub(period_s=0.001) as stub:
        yield stub


@needs_gcc
def test_the_http_stub_says_when_each_token_left_it(stub: HttpStub) -> None:
    seen = run_load(Load(stub.ports[0], 8, SECONDS, DRAIN_S), [completion(6)])
    assert seen.failures() == ""
    assert seen.count(DONE) == len(seen.records) > 0
    assert set(seen.records["num_events"].tolist()) == {6}
    assert (seen.events["sent_ns"] > 0).all()
    assert (seen.events["received_ns"] >= seen.events["sent_ns"]).all()


@needs_gcc
def test_the_http_stubs_prefill_worker_says_one_token(stub: HttpStub) -> None:
    seen = run_load(few(stub.ports[1]), [completion(6), completion(6, stream=False)])
    assert seen.count(DONE) == 12
    assert set(seen.records["num_events"].tolist()) == {1}


@needs_gcc
def test_a_canned_answer_is_given_byte_for_byte() -> None:
    body = json.dumps({"choices": [{"text": "canned"}]}).encode()
    canned = b"HTTP/1.1 200 OK\r\nx-own: yes\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with HttpStub(canned=canned) as stub:
        connection = http.client.HTTPConnection("127.0.0.1", stub.ports[0], timeout=DRAIN_S)
        for _ in range(2):
            connection.request("POST", "/", b"{}")
            answer = connection.getresponse()
            assert (answer.getheader("x-own"), answer.read()) == ("yes", body)
        connection.close()


def test_without_a_compiler_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(LoadError, match="install gcc"):
        build("router_load")


@needs_gcc
def test_a_source_is_built_once_and_what_gcc_refuses_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(router_bench_load, "SOURCES", tmp_path)
    source = tmp_path / "tiny.c"
    source.write_text("int main(void) { return 0; }")
    first = build("tiny")
    assert build("tiny") == first
    source.write_text("int main(void) { return none; }")
    with pytest.raises(LoadError, match=r"(?s)gcc refuses tiny\.c.*none"):
        build("tiny")
