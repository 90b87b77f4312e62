"""Links over real gRPC, without roles and with a data path that is always there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc

from baton.errors import BatonError
from baton.v1 import kv_pb2, kv_pb2_grpc, worker_pb2
from baton.wire import PROTOCOL_VERSION
from worker.links import Links

PATIENCE_S = 30.0  # generous: tests wait for behaviour, they do not time it
ROUTER, OTHER_ROUTER = 1, 2  # router epochs

LAYOUT = kv_pb2.KvLayout(num_layers=2, num_components=2, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")


def hello_of(worker_id: str, epoch: int, **fields: object) -> kv_pb2.Hello:
    hello = kv_pb2.Hello(
        protocol_version=PROTOCOL_VERSION, worker_id=worker_id, epoch=epoch, ucx_address=b"a", weights_hash="w",
        tokenizer_hash="t", rope="r", quantization="q", layout=LAYOUT, tp_size=1, frame_bytes=1 << 20, num_slots=8,
        transport_kind="loopback",
    )  # fmt: skip
    hello.MergeFrom(kv_pb2.Hello(**fields))  # type: ignore[arg-type]
    return hello


@dataclass
class Listener:
    """Notes what it hears; raises where a test wants a defect."""

    ready: list[str] = field(default_factory=list)
    lost: list[tuple[str, BatonError]] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    defect: bool = False

    def on_link(self, peer: str, message: kv_pb2.LinkMessage) -> None:
        kind = message.WhichOneof("message") or ""
        if kind == "ping":
            return
        if self.defect:
            raise KeyError("a defect of a role")
        self.heard.append(kind)

    def on_link_ready(self, peer: str) -> None:
        self.ready.append(peer)

    def on_link_lost(self, peer: str, error: BatonError) -> None:
        self.lost.append((peer, error))

    def live_tickets(self, peer: str) -> list[int]:
        return []


class End:
    """One worker's Links on a server of its own."""

    def __init__(self, worker_id: str, epoch: int, **fields: object) -> None:
        self.worker_id, self.epoch = worker_id, epoch
        self.listener = Listener()
        self.path_works = True
        self.num_connects = 0
        self.links = Links(
            hello_of(worker_id, epoch, **fields),
            self,
            self.listener,
            ping_s=0.05,
            silence_limit_s=20.0,
            hello_timeout_s=0.5,
        )
        self.server = grpc.aio.server()
        kv_pb2_grpc.add_KvLinkServicer_to_server(self.links, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    @property
    def peer(self) -> worker_pb2.Peer:
        return worker_pb2.Peer(worker_id=self.worker_id, epoch=self.epoch, address=f"127.0.0.1:{self.port}")

    def connect(
        self, peer: str, peer_epoch: int, address: bytes, pair_nonce: int, frame_bytes: int, num_slots: int
    ) -> None:
        self.num_connects += 1
        if self.path_works:
            asyncio.get_running_loop().call_soon(self.links.on_pair_ready, peer, pair_nonce, "loopback")

    def disconnect(self, peer: str) -> None:
        pass


@contextlib.asynccontextmanager
async def two_ends(**fields: object) -> AsyncIterator[tuple[End, End]]:
    """A prefill worker that may open links, and a decode worker; `fields` differ in the latter's Hello."""
    p, d = End("p", 10), End("d", 20, **fields)
    for end in (p, d):
        await end.server.start()
    try:
        yield p, d
    finally:
        for end in (p, d):
            await end.links.close()
            await end.server.stop(None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


RESERVE = kv_pb2.LinkMessage(reserve=kv_pb2.Reserve(ttl_ms=1))
GRANT = kv_pb2.LinkMessage(grant=kv_pb2.Grant())


async def test_a_defect_in_handling_a_message_loses_the_link_on_both_ends_and_it_comes_back() -> None:
    async with two_ends() as (p, d):
        key = p.links.open(d.peer)
        back = "<p/" + f"{p.epoch:016x}"
        await until(lambda: p.listener.ready == [key] and d.listener.ready == [back])
        for end, peer, message in ((p, key, RESERVE), (d, back, GRANT)):
            other = d if end is p else p
            num_ready, num_lost = len(p.listener.ready), [len(e.listener.lost) for e in (p, d)]
            other.listener.defect = True
            assert end.links.send(peer, message)
            await until(lambda n=num_lost: all(len(e.listener.lost) > k for e, k in zip((p, d), n, strict=True)))
            other.listener.defect = False
            await until(lambda n=num_ready: len(p.listener.ready) > n and len(d.listener.ready) > n)
            assert end.links.send(peer, message)
            await until(lambda o=other: len(o.listener.heard) > 0)
