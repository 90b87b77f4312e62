"""Clients that read slowly get fewer, larger chunks; clients that do not read are given up and cost nobody anything."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import WorkerLost
from baton.model_files import ModelFiles
from baton.request import FinishReason, Logprobs, SampledToken
from baton.v1 import serving_pb2_grpc
from router.call_events import HIGH_WATER, ChoiceFinished, Outbox, Piece, Pieces, Queued, merged
from tests.router.router_rig import Rig, request, running_rig, until

NARROW = (("grpc.http2.lookahead_bytes", 65_535), ("grpc.http2.bdp_probe", 0))  # a window that does not grow
MANY: dict[str, object] = {"max_tokens": 900, "n": 8, "logprobs": 20}  # about 4 MB of answer


def piece(choice: int, index: int) -> Piece:
    return Piece(choice, f"{index} ", SampledToken(1, index, index))


@given(st.lists(st.integers(0, 3), max_size=100))
def test_merging_keeps_text_tokens_and_their_order_within_a_choice(choices: list[int]) -> None:
    counts = [0] * 4
    events: list[Queued] = []
    for choice in choices:
        events.append(piece(choice, counts[choice]))
        counts[choice] += 1
    events.append(ChoiceFinished(0, FinishReason.STOP, ""))
    out = merged(events)
    groups = [event for event in out if isinstance(event, Pieces)]
    assert isinstance(out[-1], ChoiceFinished)
    assert len(groups) == len(set(choices))
    for group in groups:
        assert [token.index for token in group.tokens] == list(range(counts[group.choice]))
        assert group.text == "".join(f"{index} " for index in range(counts[group.choice]))


async def test_a_writer_that_keeps_up_gets_tokens_one_by_one_and_one_that_is_behind_gets_them_together() -> None:
    outbox = Outbox(1 << 20)
    for index in range(HIGH_WATER):
        outbox.put(piece(0, index))
    (first,) = await outbox.take()
    assert isinstance(first, Pieces)
    assert len(first.tokens) == 1
    for index in range(HIGH_WATER, HIGH_WATER + 10):
        outbox.put(piece(0, index))
    outbox.put(WorkerLost("gone"))
    rest, error = await outbox.take()
    assert isinstance(rest, Pieces)
    assert [token.index for token in rest.tokens] == list(range(1, HIGH_WATER + 10))
    assert isinstance(error, WorkerLost)


def test_what_waits_is_counted_and_logprobs_count_too() -> None:
    plain, rich = Outbox(10_000), Outbox(10_000)
    with_logprobs = SampledToken(1, 0, 0, logprobs=Logprobs(-1.0, tuple(range(20)), (-1.0,) * 20))
    assert all(plain.put(piece(0, index)) for index in range(15))
    assert [rich.put(Piece(0, "", with_logprobs)) for _ in range(6)][-1] is False


async def test_a_client_that_is_late_gets_everything_in_fewer_chunks(rig: Rig) -> None:
    narrow = grpc.aio.insecure_channel(f"127.0.0.1:{rig.front_end.grpc_port}", options=NARROW)
    call = serving_pb2_grpc.ServingStub(narrow).Generate(request(max_tokens=900, logprobs=20))
    await until(lambda: len(rig.front_end.calls._running) == 1, "the call runs")
    [running] = rig.front_end.calls._running
    await until(lambda: running.reports[0].num_tokens == 900, "the router has the whole answer")
    chunks = [response.chunk async for response in call if response.HasField("chunk")]
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert token_ids == [300 + index % 40 for index in range(900)]
    assert [entry.token_id for chunk in chunks for entry in chunk.logprobs] == token_ids
    assert [chunk.index for chunk in chunks] == [sum(len(c.token_ids) for c in chunks[:n]) for n in range(len(chunks))]
    assert len(chunks) < 900
    await narrow.close(None)


async def test_a_grpc_client_that_does_not_read_is_given_up_and_its_sequences_with_it(files: ModelFiles) -> None:
    async with running_rig(files, client_backlog_bytes=50_000) as rig:
        narrow = grpc.aio.insecure_channel(f"127.0.0.1:{rig.front_end.grpc_port}", options=NARROW)
        call = serving_pb2_grpc.ServingStub(narrow).Generate(request("hello", **MANY))
        await until(lambda: bool(rig.decode.adopted), "it runs")
        await rig.idle()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            _ = [response async for response in call]
        assert ended.value.code() is grpc.StatusCode.CANCELLED
        assert (await rig.generate(request(max_tokens=3))).token_ids == [300, 301, 302]
        text = (await rig.http.get("/metrics")).text
        await narrow.close(None)
    assert 'baton_requests_total{api="grpc",outcome="cancelled"} 1.0' in text


async def test_an_http_client_that_does_not_read_is_given_up_and_its_connection_closed(files: ModelFiles) -> None:
    async with running_rig(files, client_backlog_bytes=50_000) as rig:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", rig.front_end.http_port))
            body = b'{"prompt": "a", "stream": true, "max_tokens": 900, "n": 16, "logprobs": 20}'
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(client, head.encode() + body)
            await until(lambda: bool(rig.decode.adopted), "it runs")
            await rig.idle()
            received = b""
            while part := await loop.sock_recv(client, 1 << 20):
                received += part
        assert b"[DONE]" not in received
        assert (await rig.generate(request(max_tokens=3))).token_ids == [300, 301, 302]


async def test_a_client_that_has_not_taken_its_answer_when_its_time_is_over_is_given_up(files: ModelFiles) -> None:
    async with running_rig(files) as rig:
        narrow = grpc.aio.insecure_channel(f"127.0.0.1:{rig.front_end.grpc_port}", options=NARROW)
        call = serving_pb2_grpc.ServingStub(narrow).Generate(request("hello", **MANY))
        await until(lambda: not rig.decode.num_open and bool(rig.decode.adopted), "the answer is made")
        (running,) = rig.front_end.calls._running
        running.lose_patience()  # as at the end of its time
        await rig.idle()
        assert not call.done()
        await narrow.close(None)
