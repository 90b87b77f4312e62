"""The HTTP and SSE decoders give the same bytes however the network cuts them."""

from __future__ import annotations

from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.client import CallFailed
from bench.client_openai import Answer
from bench.http_wire import ChunkedBody, Pool, SizedBody, SseLines, body_of, parse_head


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(0, 10_000), max_size=12))
def test_chunked_bodies_survive_any_cut(parts: list[bytes], places: list[int]) -> None:
    wire = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    body = ChunkedBody()
    pieces = cut(wire, places)
    assert b"".join(body.feed(piece) for piece in pieces) == b"".join(parts)
    assert body.finished


def test_a_chunked_body_without_its_last_chunk_is_not_finished() -> None:
    body = ChunkedBody()
    assert body.feed(b"3\r\nabc\r\n") == b"abc"
    assert not body.finished


def test_a_chunk_without_a_size_is_a_protocol_error() -> None:
    with pytest.raises(CallFailed, match="no size") as raised:
        ChunkedBody().feed(b"zz\r\n")
    assert raised.value.kind == "protocol"


@given(st.lists(st.integers(0, 100), max_size=6))
def test_events_survive_any_cut(places: list[int]) -> None:
    wire = b': comment\r\ndata: {"a":1}\r\n\r\nevent: x\ndata:{"b":2}\n\ndata: [DONE]\n\n'
    lines = SseLines()
    payloads = [payload for piece in cut(wire, places) for payload in lines.feed(piece)]
    assert payloads == [b'{"a":1}', b'{"b":2}', b"[DONE]"]


def test_a_sized_body_ends_at_its_length() -> None:
    body = SizedBody(4)
    assert body.feed(b"ab") + body.feed(b"cdef") == b"abcd"
    assert body.finished


def test_heads_are_read_and_choose_the_body() -> None:
    head = parse_head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b:c\r\n\r\n")
    assert (head.status, head.headers["x-a"]) == (200, "b:c")
    assert isinstance(body_of(head), ChunkedBody)
    assert isinstance(body_of(parse_head(b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\n")), SizedBody)


@pytest.mark.parametrize("raw", [b"\x00\x16\r\n\r\n", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n"])
def test_what_is_not_http_is_a_protocol_error(raw: bytes) -> None:
    with pytest.raises(CallFailed, match=r"not HTTP/1\.1"):
        parse_head(raw)


def test_a_url_without_a_host_is_refused() -> None:
    for url in ("ftp://x", "http://", "http://x:abc"):
        with pytest.raises(CallFailed, match=url):
            Pool(url)


CHAT_OPENING = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}


@pytest.mark.parametrize(
    ("choice", "tokens"),
    [
        ({"text": "ab", "finish_reason": None}, 1),
        ({"text": "", "finish_reason": None}, 1),  # half a UTF-8 character: its text comes with the next token
        ({"delta": {"content": ""}, "finish_reason": None}, 1),
        ({"text": "ab", "token_ids": [1, 2, 3], "finish_reason": None}, 3),
        (CHAT_OPENING, 0),
        ({"delta": {"role": "assistant", "content": "a"}, "finish_reason": None}, 1),
    ],
)
def test_each_kind_of_chunk_counts_its_tokens(choice: dict[str, object], tokens: int) -> None:
    assert Answer().take(orjson.dumps({"choices": [choice]})) == tokens


def test_an_answer_whose_only_token_has_no_text_is_seen_when_it_finishes() -> None:
    answer = Answer()
    assert answer.take(orjson.dumps({"choices": [CHAT_OPENING]})) == 0
    assert answer.take(b'{"choices": [{"delta": {}, "finish_reason": "stop"}]}') == 1
    assert answer.take(b"[DONE]") == 0
    answer.finish()


@pytest.mark.parametrize("payload", [b"{", b"[1]", b"null"])
def test_a_payload_that_is_no_object_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(CallFailed):
        Answer().take(payload)
