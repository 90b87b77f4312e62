"""Links over real gRPC, without roles and with a data path that is always there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest

from baton.errors import BatonError, PeerRefused, Unavailable, WorkerLost
from baton.v1 import kv_pb2, kv_pb2_grpc, worker_pb2
from baton.wire import PROTOCOL_VERSION
from tests.worker.scripted_worker import until
from worker.hello import Refusal, check_hello, check_transport, refusal_by_peer
from worker.link_outbox import MAX_OUTBOX_BYTES
from worker.links import Links, PeerLink, State

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

    def forget(self) -> None:
        for noted in (self.ready, self.lost, self.heard):
            noted.clear()

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

    def live_tickets(self, peer: str) -> list[kv_pb2.LiveTicket]:
        return []


class End:
    """One worker's Links on a server of its own."""

    def __init__(
        self, worker_id: str, epoch: int, *, max_outbox_bytes: int = MAX_OUTBOX_BYTES, **fields: object
    ) -> None:
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
            max_outbox_bytes=max_outbox_bytes,
        )
        self.server = grpc.aio.server()
        kv_pb2_grpc.add_KvLinkServicer_to_server(self.links, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    @property
    def peer(self) -> worker_pb2.Peer:
        return worker_pb2.Peer(worker_id=self.worker_id, epoch=self.epoch, address=f"127.0.0.1:{self.port}")

    def connect(
        self,
        peer: str,
        peer_epoch: int,
        address: bytes,
        pair_nonce: int,
        frame_bytes: int,
        num_slots: int,
        peer_dtype: str = "",
    ) -> None:
        self.num_connects += 1
        if self.path_works:
            asyncio.get_running_loop().call_soon(self.links.on_pair_ready, peer, pair_nonce, "loopback")

    def disconnect(self, peer: str) -> None:
        pass


@contextlib.asynccontextmanager
async def two_ends(**fields: Any) -> AsyncIterator[tuple[End, End]]:
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


RESERVE = kv_pb2.LinkMessage(reserve=kv_pb2.Reserve(ttl_ms=1))
GRANT = kv_pb2.LinkMessage(grant=kv_pb2.Grant())


async def test_a_defect_in_handling_a_message_loses_the_link_on_both_ends_and_it_comes_back() -> None:
    async with two_ends() as (p, d):
        key = p.links.open(d.peer, ROUTER)
        back = "<p/" + f"{p.epoch:016x}"
        await until(lambda: p.listener.ready == [key] and d.listener.ready == [back])
        for end, peer, message in ((p, key, RESERVE), (d, back, GRANT)):
            other = d if end is p else p
            for listener in (p.listener, d.listener):
                listener.forget()
            other.listener.defect = True
            assert end.links.send(peer, message)
            await until(lambda: bool(p.listener.lost and d.listener.lost))
            other.listener.defect = False
            await until(lambda: bool(p.listener.ready and d.listener.ready))
            assert end.links.send(peer, message)
            await until(partial(bool, other.listener.heard))


async def test_what_one_router_wants_is_not_forgotten_because_another_wants_less() -> None:
    async with two_ends() as (p, d):
        p.links.want(ROUTER, [d.peer])
        p.links.want(OTHER_ROUTER, [])
        await until(lambda: len(p.listener.ready) == 1)
        p.links.on_pair_lost(p.listener.ready[0], nonce_of(p), "test")
        await until(lambda: len(p.listener.ready) == 2)


async def test_links_that_nobody_wants_any_more_are_forgotten_once_they_are_lost() -> None:
    async with two_ends() as (p, d):
        p.links.want(ROUTER, [d.peer])
        p.links.open(d.peer, OTHER_ROUTER)
        await until(lambda: len(p.listener.ready) == 1)
        for router in (ROUTER, OTHER_ROUTER):
            p.links.forget_router(router)
        p.links.on_pair_lost(p.listener.ready[0], nonce_of(p), "test")
        await until(lambda: not (p.links._links or p.links._openers or p.links._wanted or d.links._links))


async def test_a_refused_peer_is_not_asked_again_while_its_epoch_stays_and_then_forgotten() -> None:
    async with two_ends(rope="other") as (p, d):
        for _ in range(3):
            p.links.want(ROUTER, [d.peer])
            await until(lambda: bool(p.listener.lost))
            with pytest.raises(PeerRefused, match="rope"):
                p.links.open(d.peer, ROUTER)
        await until(lambda: not p.links._openers)
        assert len(p.listener.lost) == 1
        (status,) = p.links.statuses()
        assert (status.state, status.field) == ("refused", "rope")
        assert (status.mine, status.yours) == ("r", "other")
        assert status.reason == "rope does not fit: mine r, yours other"
        restarted = worker_pb2.Peer(worker_id="d", epoch=d.epoch + 1, address=d.peer.address)
        p.links.want(ROUTER, [restarted])
        assert p.links.statuses() == []


async def test_an_unreachable_peer_fails_within_its_time_and_harms_no_other() -> None:
    async with two_ends() as (p, d):
        silent = socket.create_server(("127.0.0.1", 0))  # connects, never answers
        port = silent.getsockname()[1]
        p.links.want(ROUTER, [worker_pb2.Peer(worker_id="x", epoch=9, address=f"127.0.0.1:{port}"), d.peer])
        await until(lambda: bool(p.listener.ready and p.listener.lost))
        assert p.listener.ready == [p.links.key_of(d.peer)]
        assert isinstance(p.listener.lost[0][1], WorkerLost)
        with pytest.raises(Unavailable, match="is down"):
            p.links.open(worker_pb2.Peer(worker_id="x", epoch=9), ROUTER)
        silent.close()


async def test_a_data_path_that_never_comes_up_loses_the_link_with_its_reason() -> None:
    async with two_ends() as (p, d):
        p.path_works = d.path_works = False
        key = p.links.open(d.peer, ROUTER)
        await until(lambda: p.num_connects > 0 and d.num_connects > 0)
        p.links.on_pair_lost(key, nonce_of(p), "no probe frame came through")
        await until(lambda: bool(d.listener.lost))
        assert p.listener.ready == []
        assert "no probe frame" in p.links.statuses()[0].reason
        p.path_works = d.path_works = True
        await until(lambda: p.listener.ready == [key])


@pytest.mark.parametrize("who", ["p", "d"])
async def test_a_pair_without_the_rdma_that_one_end_requires_is_refused_by_both_and_not_tried_again(who: str) -> None:
    async with two_ends() as (p, d):
        (p if who == "p" else d).links._hello.require_rdma = True
        p.links.want(ROUTER, [d.peer])
        await until(lambda: bool(p.listener.lost and d.listener.lost))
        await until(lambda: not p.links._openers)
        (status,) = p.links.statuses()
        assert (status.state, status.field, status.transport) == ("refused", "require_rdma", "loopback")
        assert (status.mine == "required", status.yours == "required") == (who == "p", who == "d")
        assert p.listener.ready == d.listener.ready == []
        for end in (p, d):
            assert isinstance(end.listener.lost[0][1], PeerRefused)


async def test_a_hello_that_comes_after_the_link_was_lost_opens_no_data_path() -> None:
    async with two_ends() as (p, d):
        link = PeerLink(p.links.key_of(d.peer), d.peer, opener=True, nonce=5, state=State.LOST)
        assert not p.links._on_message(link, kv_pb2.LinkMessage(hello=hello_of("d", d.epoch)))
        assert p.num_connects == 0


def nonce_of(end: End) -> int:
    return next(iter(end.links._links.values())).nonce


FIELDS: dict[str, object] = {
    "protocol_version": PROTOCOL_VERSION + 1,
    "transport_kind": "ucx",
    "weights_hash": "x",
    "tokenizer_hash": "x",
    "rope": "x",
    "quantization": "x",
    "speculation": "x",
    "numerics": "x",
    "fingerprint": "x",
    "tp_rank": 1,
    "tp_size": 2,
    "layout.num_layers": 3,
    "layout.num_components": 1,
    "layout.num_kv_heads": 1,
    "layout.head_dim": 8,
    "layout.block_size": 32,
    "layout.dtype": "bfloat16",
    "frame_bytes": 1,
    "num_slots": 65,
    "worker_id": "",
    "epoch": 0,
    "ucx_address": b"",
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_that_does_not_fit_is_refused_by_its_name(name: str) -> None:
    mine, theirs = hello_of("p", 10), hello_of("d", 20)
    assert check_hello(mine, theirs, opener=True) is None
    owner, _, attribute = name.rpartition(".")
    setattr(theirs.layout if owner else theirs, attribute, FIELDS[name])
    refusal = check_hello(mine, theirs, opener=True)
    assert refusal is not None
    assert refusal.field == name
    assert refusal.error.field == name
    assert name in refusal.error.message
    assert refusal.mine != refusal.yours


@pytest.mark.parametrize("wide", ["float32", "bfloat16", "float16"])
def test_kv_may_go_into_8_bits_and_never_out_of_them(wide: str) -> None:
    p, d = hello_of("p", 10), hello_of("d", 20)
    p.layout.dtype, d.layout.dtype = wide, "float8_e4m3"
    assert check_hello(p, d, opener=True) is None
    assert check_hello(d, p, opener=False) is None
    for mine, theirs, opener in ((d, p, True), (p, d, False)):
        refusal = check_hello(mine, theirs, opener=opener)
        assert refusal is not None
        assert refusal.field == "layout.dtype"
        assert {refusal.mine, refusal.yours} == {wide, "float8_e4m3"}
    p.layout.dtype = "float8_e4m3"
    assert check_hello(p, d, opener=True) is None


def test_a_peer_s_refusal_is_told_from_our_side() -> None:
    refusal = check_hello(hello_of("d", 20, rope="d's"), hello_of("p", 10, rope="p's"), opener=False)
    assert refusal is not None
    heard = refusal_by_peer(refusal.to_pb())
    assert (heard.field, heard.mine, heard.yours) == ("rope", "p's", "d's")


def test_values_in_a_refusal_are_cut_where_they_are_long_and_whole_beside_it() -> None:
    refusal = Refusal("weights_hash", "a" * 64, "b" * 64)
    assert refusal.error.message == f"weights_hash does not fit: mine {'a' * 32}..., yours {'b' * 32}..."
    assert refusal.to_pb().mine == "a" * 64


@pytest.mark.parametrize(("mine", "theirs"), [(True, False), (False, True), (True, True)])
def test_a_pair_whose_live_transport_is_not_rdma_is_refused_where_one_end_requires_it(mine: bool, theirs: bool) -> None:
    hello = hello_of("p", 10, require_rdma=mine)
    for transport in ("tcp/lo", "posix/memory", "rc_mlx5/mlx5_0:1+tcp/lo"):
        refusal = check_transport(hello, theirs, transport)
        assert refusal is not None
        assert refusal.field == "require_rdma"
        assert f"live transport is {transport}; bring RDMA up" in refusal.error.message
    assert check_transport(hello, theirs, "rc_mlx5/mlx5_0:1") is None


def test_any_live_transport_will_do_where_nobody_requires_rdma() -> None:
    assert check_transport(hello_of("p", 10), False, "tcp/lo") is None


def test_no_field_of_a_hello_goes_unchecked() -> None:
    # drawn per pair; judged with the live transport; by its fields; no link has it: test_weight_lender.py
    free = {"pair_nonce", "require_rdma", "layout", "weights"}
    names = {field.name for field in kv_pb2.Hello.DESCRIPTOR.fields} - free
    assert names | {f"layout.{field.name}" for field in kv_pb2.KvLayout.DESCRIPTOR.fields} == set(FIELDS)
