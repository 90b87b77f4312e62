"""Loans of weights over real gRPC, with loopback planes in this process: what is refused, and what a loan leaves behind."""

from __future__ import annotations

import asyncio
import dataclasses
import mmap
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.config import KVTransferConfig, WorkerConfig
from baton.errors import PeerRefused
from baton.ids import new_epoch
from baton.kv_layout import KVLayout
from baton.peer_trust import PLAIN
from baton.v1 import control_pb2, control_pb2_grpc, kv_pb2, kv_pb2_grpc, worker_pb2
from engine.loading.weight_manifest import WeightManifest, weight_manifest
from engine.torch_kv_cache import TorchKVCache
from kv_transfer.events import KVEvent
from kv_transfer.pages import PageSource, page_layout
from kv_transfer.plane import KVPlane
from tests.silent_control import SilentControl
from tests.worker.scripted_worker import SPEC, until
from worker.weight_borrower import borrow_weights
from worker.weight_hello import check_weight_hello, weight_hello
from worker.weight_lender import WeightLender

KV = KVTransferConfig(transport="loopback", frame_bytes=(64 << 10) + 64, num_slots=2, hello_timeout_s=1.0)
MANIFEST = weight_manifest({"a": (100, 300), "b": (7,), "c": (50, 600)}, "float32")
LAYOUT = page_layout(KV.frame_bytes)
NUM_BYTES = PageSource(LAYOUT, MANIFEST.nbytes, lambda *_: None).num_blocks * LAYOUT.block_bytes
IMAGE = bytes(i * 7 % 251 for i in range(NUM_BYTES))


def config(worker_id: str, control_address: str = "", **kv: object) -> WorkerConfig:
    return WorkerConfig(
        worker_id,
        control_address=control_address,
        kv=dataclasses.replace(KV, **kv),  # type: ignore[arg-type]
    )


class Lending:
    """A worker that lends `IMAGE`, and the controller that names it."""

    def __init__(self, manifest: WeightManifest = MANIFEST) -> None:
        self.gate, self.reading = threading.Event(), threading.Event()
        self.gate.set()
        kv_cache = TorchKVCache(KVLayout(1, 1, 16, "float32"), 4)
        self._loop = asyncio.get_running_loop()
        epoch = new_epoch()
        self.plane = KVPlane(kv_cache, KV, epoch, self._on_event)
        self.plane.start()
        pages = PageSource(LAYOUT, manifest.nbytes, self._read)
        hello = weight_hello(config("lender"), SPEC, manifest, epoch, self.plane.address)
        self.lender = WeightLender(hello, pages, self.plane, KV)
        self.others: list[KVEvent] = []

    def _read(self, offset: int, out: memoryview) -> None:
        self.reading.set()
        self.gate.wait()
        out[:] = IMAGE[offset : offset + len(out)]

    def _on_event(self, event: KVEvent) -> None:
        self._loop.call_soon_threadsafe(self._sort, event)

    def _sort(self, event: KVEvent) -> None:
        if not self.lender.on_kv(event):
            self.others.append(event)

    @property
    def is_idle(self) -> bool:
        load = self.plane.load()
        return not (load.num_outgoing or load.num_slots or self.plane.peers())


class Names(SilentControl):
    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    async def Lenders(self, request: control_pb2.LendersRequest, context: object) -> control_pb2.LendersResponse:
        peers = [worker_pb2.Peer(worker_id=f"lender-{i}", address=at) for i, at in enumerate(self.addresses)]
        return control_pb2.LendersResponse(workers=peers)


@asynccontextmanager
async def serving(*lendings: Lending) -> AsyncIterator[str]:
    """All of them and a controller; yields its address."""
    servers = [grpc.aio.server() for _ in range(len(lendings) + 1)]
    addresses = [f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}" for server in servers]
    for server, lending in zip(servers[1:], lendings, strict=True):
        kv_pb2_grpc.add_KvWeightsServicer_to_server(lending.lender, server)
    control_pb2_grpc.add_ControlServicer_to_server(Names(*addresses[1:]), servers[0])
    for server in servers:
        await server.start()
    try:
        yield addresses[0]
    finally:
        for server in servers:
            await server.stop(None)
        for lending in lendings:
            await asyncio.to_thread(lending.plane.stop)


async def borrow(address: str, manifest: WeightManifest = MANIFEST, worker_id: str = "new") -> bytes | None:
    buffer = mmap.mmap(-1, NUM_BYTES)
    lent = await borrow_weights(config(worker_id, address), SPEC, manifest, buffer, PLAIN)
    return bytes(buffer) if lent else None


async def test_every_byte_arrives_and_nothing_of_the_loan_is_left() -> None:
    lending = Lending()
    async with serving(lending) as control:
        assert await borrow(control) == IMAGE
        await until(lambda: lending.is_idle)
        assert lending.lender.num_lent == 1
        assert not lending.others, "the host must not hear of a loan"
        assert await borrow(control) == IMAGE


async def test_a_lender_lends_to_one_at_a_time_and_the_next_one_asks_another() -> None:
    busy, free = Lending(), Lending()
    async with serving(busy, free) as control:
        busy.gate.clear()
        first = asyncio.create_task(borrow(control, worker_id="first"))
        await until(busy.reading.is_set)
        assert await borrow(control, worker_id="second") == IMAGE
        assert (busy.lender.num_lent, free.lender.num_lent) == (0, 1)
        busy.gate.set()
        assert await first == IMAGE


async def test_a_manifest_that_differs_is_refused_before_a_pair_is_made() -> None:
    lending = Lending(weight_manifest({"a": (300, 100), "b": (7,), "c": (50, 600)}, "float32"))
    async with serving(lending) as control:
        assert await borrow(control) is None
        assert lending.is_idle
        assert lending.plane.load().bytes_sent == 0


@pytest.mark.parametrize(
    ("shapes", "dtype", "field"),
    [
        ({"a": (100, 300), "b": (7,), "c": (50, 600)}, "bfloat16", "weights.dtype"),
        ({"a": (100, 300), "b": (7,)}, "float32", "weights.tensors"),
        ({"a": (100, 300), "b": (8,), "c": (50, 600)}, "float32", "weights.b"),
        ({"a": (100, 300), "x": (7,), "c": (50, 600)}, "float32", "weights.b"),
    ],
)
def test_what_differs_in_the_manifest_is_named(shapes: dict[str, tuple[int, ...]], dtype: str, field: str) -> None:
    mine = weight_hello(config("new"), SPEC, MANIFEST, 1, b"x")
    theirs = weight_hello(config("lender"), SPEC, weight_manifest(shapes, dtype), 2, b"y")
    for opener in (True, False):
        refusal = check_weight_hello(mine, theirs, opener=opener)
        assert refusal is not None
        assert refusal.field == field
        assert isinstance(refusal.error, PeerRefused)


def test_a_size_that_does_not_follow_from_the_shapes_is_refused() -> None:
    mine = weight_hello(config("new"), SPEC, MANIFEST, 1, b"x")
    theirs = kv_pb2.Hello()
    theirs.CopyFrom(mine)
    theirs.weights.tensors[1].nbytes += 4
    refusal = check_weight_hello(mine, theirs, opener=True)
    assert refusal is not None
    assert refusal.field == "weights.b"


def test_weights_that_one_of_them_rounds_at_loading_are_refused_by_that_name() -> None:
    mine = weight_hello(config("new"), SPEC, MANIFEST, 1, b"x")
    theirs = weight_hello(config("lender"), SPEC.quantized("int8"), MANIFEST, 2, b"y")
    refusal = check_weight_hello(mine, theirs, opener=True)
    assert refusal is not None
    assert refusal.field == "quantization"


def test_numerics_of_a_machine_are_no_part_of_the_weights() -> None:
    mine = weight_hello(config("new"), SPEC, MANIFEST, 1, b"x")
    other = dataclasses.replace(SPEC, numerics="0123456789abcdef")
    assert check_weight_hello(mine, weight_hello(config("lender"), other, MANIFEST, 2, b"y"), opener=True) is None


async def one_word(message: kv_pb2.LinkMessage) -> AsyncIterator[kv_pb2.LinkMessage]:
    """And silence."""
    yield message
    await asyncio.Event().wait()


async def test_a_borrower_that_says_nothing_after_its_hello_is_dropped() -> None:
    lending = Lending()
    async with serving(lending) as control:
        names = control_pb2_grpc.ControlStub(channel := grpc.aio.insecure_channel(control))
        peer = (await names.Lenders(control_pb2.LendersRequest())).workers[0]
        hello = weight_hello(config("mute"), SPEC, MANIFEST, 5, b"nobody")
        hello.pair_nonce = 77
        async with grpc.aio.insecure_channel(peer.address) as to_lender:
            call = kv_pb2_grpc.KvWeightsStub(to_lender).Borrow(one_word(kv_pb2.LinkMessage(hello=hello)))
            answers = [answer.WhichOneof("message") async for answer in call]
        await channel.close(None)
        assert answers == ["hello"]
        await until(lambda: lending.is_idle)
        assert await borrow(control) == IMAGE


async def test_without_a_controller_or_lenders_nothing_is_borrowed() -> None:
    assert await borrow("") is None
    async with serving() as control:
        assert await borrow(control) is None
    assert await borrow("127.0.0.1:1") is None
