"""What a link keeps for a peer that does not read: bounded, shown, and the end of the link with its reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from baton.v1 import kv_pb2, kv_pb2_grpc
from tests.worker.scripted_worker import until
from tests.worker.test_links import ROUTER, End, hello_of, two_ends
from worker.link_outbox import LinkOutbox

NACK = kv_pb2.LinkMessage(nack=kv_pb2.Nack(seq=1, missing_frames=range(1 << 20, (1 << 20) + 250)))  # about 1 kB


async def written(outbox: LinkOutbox) -> list[kv_pb2.LinkMessage]:
    return [message async for message in outbox.messages()]


async def test_messages_leave_in_order_and_the_end_comes_after_them() -> None:
    outbox = LinkOutbox()
    messages = [kv_pb2.LinkMessage(ack=kv_pb2.Ack(seq=n)) for n in range(1, 4)]
    assert all(outbox.put(message) for message in messages)
    assert outbox.num_bytes == sum(message.ByteSize() for message in messages)
    outbox.end()
    assert not outbox.put(messages[0])
    assert await written(outbox) == messages
    assert outbox.num_bytes == 0


async def test_beyond_its_bytes_nothing_is_taken_or_kept_and_the_writer_finishes() -> None:
    outbox = LinkOutbox(max_bytes=10 * NACK.ByteSize())
    writer = outbox.messages()
    assert outbox.put(NACK)
    assert await anext(writer) == NACK  # gRPC has it in hand, and waits for the peer
    num_taken = sum(outbox.put(NACK) for _ in range(100))
    assert num_taken == 10  # and the one in hand: the bound and one message
    assert outbox.overflowed.is_set()
    assert outbox.num_bytes == 0
    with pytest.raises(StopAsyncIteration):
        await anext(writer)


async def test_one_message_larger_than_the_bound_still_goes_out() -> None:
    outbox = LinkOutbox(max_bytes=NACK.ByteSize() // 2)
    assert outbox.put(NACK)
    outbox.end()
    assert await written(outbox) == [NACK]


async def test_a_peer_that_never_reads_its_link_loses_it_and_holds_no_memory() -> None:
    """The peer says Hello and Ready, then pings but reads nothing: only the outbox can be what ends the link."""
    d = End("d", 20, max_outbox_bytes=20_000)
    await d.server.start()

    async def talk() -> AsyncIterator[kv_pb2.LinkMessage]:
        yield kv_pb2.LinkMessage(hello=hello_of("p", 10, pair_nonce=5))
        yield kv_pb2.LinkMessage(ready=kv_pb2.LinkReady())
        while True:
            yield kv_pb2.LinkMessage(pong=kv_pb2.LinkPong())
            await asyncio.sleep(0.05)

    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 << 10)]  # what gRPC itself reads ahead
    key, most = "<p/" + f"{10:016x}", 0
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{d.port}", options=small) as channel:
            kv_pb2_grpc.KvLinkStub(channel).Link(talk())
            await until(lambda: d.listener.ready == [key])
            while d.links.send(key, NACK):
                most = max(most, d.links.outbox_bytes())
                await asyncio.sleep(0)
            await until(lambda: bool(d.listener.lost))
            assert "does not read its link" in d.listener.lost[0][1].message
            assert "20000 bytes" in d.listener.lost[0][1].message
            assert 0 < most <= 20_000 + NACK.ByteSize()
            assert d.links.outbox_bytes() == 0
    finally:
        await d.links.close()
        await d.server.stop(None)


async def test_an_overflowing_opener_opens_again() -> None:
    async with two_ends() as (p, d):
        key = p.links.open(d.peer, ROUTER)
        await until(lambda: p.listener.ready == [key])
        link = p.links._links[key]
        link.outbox.max_bytes = -1  # as if nothing had been read for 4 MiB
        assert not p.links.send(key, NACK)
        await until(lambda: p.listener.ready == [key, key])
        assert "does not read" in p.listener.lost[0][1].message
        assert p.links.send(key, NACK)
