"""What a peer says of its memory is checked: nonsense costs a frame or direct mode, never the KV thread and other pairs."""

from __future__ import annotations

import struct

import pytest

from baton.kv_copy import KVMemory
from kv_transfer.channel import Credit, PeerPool
from kv_transfer.events import KVEvent
from kv_transfer.frame import HEADER_BYTES, PLACE_BYTES, FrameHeader, Kind, write_header
from kv_transfer.receiver import Receiver
from kv_transfer.ucx.exports import Exports, unpack_exports
from kv_transfer.ucx.memory import Region
from tests.kv_transfer.kv_fakes import LAYOUT, ByteStore

EPOCH, SEQ, GENERATION = 1, 5, 1
POOL = struct.Struct("<QQQQI")  # what ends the exports: address, bytes, layer stride, component stride, blocks


@pytest.mark.parametrize("place", range(4))
def test_a_pool_of_impossible_addresses_or_strides_is_no_export(place: int) -> None:
    region = Region(1 << 20, 1 << 20, b"key")
    packed = Exports(region, None).pack()
    fields = [1 << 20, 1 << 19, 64, 64]
    fields[place] = 1 << 63
    assert unpack_exports(packed + packed + POOL.pack(*fields, 4)) is None


def pull_frame(places: list[int]) -> memoryview:
    """A frame of direct mode for the first blocks of the ticket, all layers."""
    slot = memoryview(bytearray(HEADER_BYTES + PLACE_BYTES * len(places)))
    slot[HEADER_BYTES:] = struct.pack(f"<{len(places)}I", *places)
    header = FrameHeader(
        Kind.PULL, EPOCH, SEQ, GENERATION, 0, 0, len(places), 0, LAYOUT.num_layers, PLACE_BYTES * len(places), 0, 0
    )
    write_header(slot, header)
    return slot


def test_a_pool_that_is_smaller_than_its_strides_say_costs_the_frame_only() -> None:
    store, theirs = ByteStore(), ByteStore(seed=1)
    before = store.data.copy()
    events: list[KVEvent] = []
    receiver = Receiver(store, events.append, EPOCH, num_slots=1, max_resends=3)
    memory = theirs.memory
    half = KVMemory(memory.address, memory.nbytes // 2, memory.layer_stride, memory.component_stride)
    receiver.peer_pool = PeerPool(half, theirs.num_blocks)
    receiver.open(SEQ, GENERATION, [1, 2], 0, ttl_s=5.0, now_s=0.0)
    assert receiver.on_frame(0, pull_frame([3, 4]), 0.0) == Credit(0, 1, accepted=False)
    assert (store.data == before).all()
    assert events == []
