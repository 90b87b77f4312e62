"""Connections over real gRPC: pings, sizes, ages and streams. Times are shorter than those of clients in the field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable

import grpc
import grpc.aio
import psutil
import pytest

from baton import clock
from baton.config import RouterConfig
from baton.model_files import ModelFiles
from baton.v1 import serving_pb2, serving_pb2_grpc
from baton_client import AsyncClient
from router.grpc_api import GrpcServer, ServingApi
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.stub_worker import start_pair

PINGING = (
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


def channel_to(rig: Rig, *options: tuple[str, int]) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{rig.front_end.grpc_port}", options=(*OWN_CONNECTION, *options))


def client_ports(rig: Rig) -> set[int]:
    """Of the connections that are open to the router's gRPC port."""
    return {
        connection.raddr.port
        for connection in psutil.Process().net_connections("tcp")
        if connection.laddr.port == rig.front_end.grpc_port and connection.status == psutil.CONN_ESTABLISHED
    }


async def test_ten_calls_and_a_bulk_stream_that_are_silent_while_their_client_pings_each_second_go_through(
    rig: Rig,
) -> None:
    rig.decode.script.decode_gate.clear()
    async with channel_to(rig, *PINGING) as channel:
        rig.stub = serving_pb2_grpc.ServingStub(channel)
        start = serving_pb2.StartCall(call=1, generate=request(max_tokens=3))
        bulk = rig.stub.Session(iter([serving_pb2.SessionCall(start=start)]))
        replies = asyncio.create_task(_all(bulk))
        calls = [asyncio.create_task(rig.generate(request(max_tokens=3))) for _ in range(10)]
        await asyncio.sleep(4)  # case G1 has 20 s; strikes would end the connection at the third ping
        rig.decode.script.decode_gate.set()
        answers = await asyncio.gather(*calls)
        assert [token for reply in await replies for token in reply.token_ids] == [300, 301, 302]
    assert [answer.token_ids for answer in answers] == [[300, 301, 302]] * 10


async def _all(call: AsyncIterable[serving_pb2.SessionReply]) -> list[serving_pb2.SessionReply]:
    return [reply async for reply in call]


async def test_large_messages_are_refused_without_being_kept_and_300_kb_of_prompt_are_served(files: ModelFiles) -> None:
    workers = await start_pair(num_blocks=1 << 16, max_model_len=1 << 20)
    async with running_rig(files, workers) as rig:
        large = request("a" * 8_000_000)

        async def refused(number: int) -> None:
            for _ in range(number):
                answer = await rig.generate(large)
                assert answer.status is not None
                assert answer.status.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        await refused(5)
        before = psutil.Process().memory_info().rss
        await refused(25)
        grown = psutil.Process().memory_info().rss - before
        assert grown < 64 << 20, "200 MB came, and went through a client in this process, too"
        answer = await rig.generate(request("hello " * 50_000, max_tokens=2))
        assert answer.status is None
        assert answer.token_ids == [300, 301]


async def test_two_thousand_tokens_with_twenty_logprobs_each_pass_as_a_stream_gathered_and_in_bulk(
    files: ModelFiles,
) -> None:
    workers = await start_pair(num_blocks=256, max_model_len=4_096)
    async with running_rig(files, workers) as rig:
        made = request(max_tokens=2_000, logprobs=20)
        stream = await rig.generate(made)
        start = serving_pb2.StartCall(call=1, generate=made)
        opened = serving_pb2.SessionCall(open=serving_pb2.OpenSession(max_flush_ms=1_000))
        replies = await _all(rig.stub.Session(iter([opened, serving_pb2.SessionCall(start=start)])))
        made.max_flush_ms = 1_000
        gathered = await rig.generate(made)
    for answer in (stream, gathered):
        assert answer.status is None
        entries = [entry for chunk in answer.chunks for entry in chunk.logprobs]
        assert len(entries) == 2_000
        assert all(len(entry.top) == 20 for entry in entries)
    assert [entry for reply in replies for entry in reply.logprobs] == entries


async def test_clients_move_to_a_new_connection_at_its_age_and_no_call_is_cut(files: ModelFiles) -> None:
    async with running_rig(files, max_connection_age_s=1.0) as rig, channel_to(rig) as channel:
        rig.stub = serving_pb2_grpc.ServingStub(channel)
        rig.decode.script.pause_at = 3
        rig.decode.script.decode_gate.clear()
        running = asyncio.create_task(rig.generate(request(max_tokens=6)))
        await until(lambda: rig.front_end.calls.num_inflight == 1, "a call runs")
        (first,) = client_ports(rig)
        rig.decode.script.pause_at = None

        async def short_call() -> None:
            reply = await rig.stub.GetLoads(serving_pb2.GetLoadsRequest())
            assert reply.num_inflight == 1

        while client_ports(rig) <= {first}:
            await short_call()
            await asyncio.sleep(0.05)
        assert first in client_ports(rig), "the old connection stays for the call on it"
        rig.decode.script.decode_gate.set()
        assert (await running).token_ids == list(range(300, 306))
        await until(lambda: first not in client_ports(rig), "then it goes")


async def test_a_clock_however_slow_makes_ages_of_connections_that_grpc_can_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "_scale", 10_000.0)
    nobody = ServingApi.__new__(ServingApi)  # is called
    server = GrpcServer(RouterConfig(grpc_port=0, max_connection_age_s=86_400.0), nobody)
    assert server.port
    await server.stop()


async def test_more_calls_than_a_connection_may_have_wait_for_their_turn(files: ModelFiles) -> None:
    """In the client, or where its count of streams runs ahead of the router's, behind a refusal that it tries again."""
    async with (
        running_rig(files, max_concurrent_streams=2) as rig,
        AsyncClient(f"127.0.0.1:{rig.front_end.grpc_port}") as client,
    ):
        rig.decode.script.decode_gate.clear()
        calls = [client.generate("hello", max_tokens=3, resumable=False) for _ in range(4)]
        texts = [asyncio.create_task(call.text()) for call in calls]
        await until(lambda: rig.decode.num_open == 2, "two run")
        await asyncio.sleep(0.2)
        assert rig.front_end.calls.num_inflight == 2
        rig.decode.script.decode_gate.set()
        assert len(set(await asyncio.gather(*texts))) == 1
