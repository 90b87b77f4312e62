"""What a peer says of its memory is checked: nonsense costs a frame or direct mode, never the KV thread and other pairs."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from baton.kv_copy import KVMemory, crc32c
from kv_transfer import frame
from kv_transfer.channel import Credit, PeerPool
from kv_transfer.events import Committed, KVEvent
from kv_transfer.frame import HEADER_BYTES, PLACE_BYTES, FrameHeader, Kind, write_header
from kv_transfer.loopback import LoopbackChannel
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.ucx.exports import Exports, unpack_exports
from kv_transfer.ucx.memory import Region
from tests.kv_transfer.kv_fakes import LAYOUT, ByteStore, TwoCores, frame_bytes_for

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


def ignore(event: KVEvent) -> None: ...


PROBE_EXPORTS = b"exports"


def probe_frame(turn: int, payload: bytes = PROBE_EXPORTS, payload_crc: int | None = None) -> memoryview:
    slot = memoryview(bytearray(frame_bytes_for(6)))
    slot[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    crc = crc32c(memoryview(payload)) if payload_crc is None else payload_crc
    write_header(slot, FrameHeader(Kind.PROBE, EPOCH, 0, 0, 0, 0, 0, 0, 0, len(payload), turn, crc))
    return slot


def test_a_second_probe_is_dropped_whatever_it_says() -> None:
    receiver = Receiver(ByteStore(), ignore, EPOCH, num_slots=1, max_resends=3)
    assert receiver.on_frame(0, probe_frame(0), 0.0) == Credit(0, 1, accepted=True)
    assert receiver.on_frame(0, probe_frame(1, payload_crc=0), 0.0) == Credit(0, 2, accepted=False)
    assert receiver.on_frame(0, probe_frame(2, b"others"), 0.0) == Credit(0, 3, accepted=False)
    assert receiver.probe == PROBE_EXPORTS, "memory is attached once"


def test_a_peer_that_says_it_reads_a_pool_which_is_not_offered_is_sent_what_it_can_take() -> None:
    cores = TwoCores(mode="staged")
    take = LoopbackChannel.send_credit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopbackChannel, "send_credit", lambda self, credit: take(self, replace(credit, can_pull=True)))
        cores.connect()
    assert cores.a.peers()["b"].mode == "staged"
    cores.b.open_incoming("a", SEQ, 1, [20], 0, ttl_s=5.0)
    cores.a.open_outgoing("b", SEQ, cores.EPOCH_B, 1, 0, 1, lease_s=5.0)
    cores.a.ship(SEQ, [1], 1, last=True)
    cores.settle()
    assert cores.store_b.blocks([20]) == cores.store_a.blocks([1])


@pytest.mark.parametrize("turn", [2**31, 2**32 - 1])
def test_a_turn_far_ahead_is_no_turn_and_harms_nothing(turn: int) -> None:
    receiver = Receiver(ByteStore(), ignore, EPOCH, num_slots=1, max_resends=3)
    credit = receiver.on_frame(0, probe_frame(turn), 0.0)
    assert credit is None
    sender = Sender(ByteStore(), ignore, frame_bytes_for(6), 1, 10.0)
    assert not sender.on_credit(Credit(0, turn, accepted=True), 0.0)
    assert sender.take_lane(0.0) is None


def test_turns_wrap_at_32_bits_without_a_pause() -> None:
    """2^32 frames of one lane are a year at 136 a second."""
    store = ByteStore(seed=1)
    events: list[KVEvent] = []
    sender = Sender(store, events.append, frame_bytes_for(3), 1, 10.0)
    receiver = Receiver(ByteStore(), events.append, EPOCH, num_slots=1, max_resends=3)
    sender._lanes[0].turn = receiver._turns[0] = 2**32 - 2
    receiver.open(SEQ, GENERATION, range(4), 0, ttl_s=5.0, now_s=0.0)
    sender.open(SEQ, EPOCH, GENERATION, 0, 4, 5.0, 0.0)
    sender.ship(SEQ, range(4), 4, last=True, now_s=0.0)
    credit: Credit | None = Credit(0, 2**32 - 2, accepted=True)
    turns = []
    while sender.has_frames():
        assert credit is not None
        assert sender.on_credit(credit, 0.0)
        slot = sender.take_lane(0.0)
        assert slot == 0
        memory = memoryview(bytearray(frame_bytes_for(3)))
        sender.fill(slot, memory, 0.0)
        assert sender.stuck_since_s() == 0.0
        sender.on_send_done(slot)
        credit = receiver.on_frame(slot, memory, 0.0)
        assert credit is not None
        turns.append(credit.turn)
    assert turns == [2**32 - 1, 0, 1, 2]
    receiver.commit(SEQ, GENERATION, 4, 4 * LAYOUT.block_bytes, 0.0)
    assert events[-1] == Committed(SEQ, GENERATION, 4 * LAYOUT.block_bytes)


def test_a_header_that_its_writer_changes_while_it_is_read_is_judged_as_it_was_read() -> None:
    """The ring is memory of the peer's too."""
    slot = probe_frame(0)
    other = bytes(probe_frame(5)[:HEADER_BYTES])

    def change(data: memoryview) -> int:
        slot[:HEADER_BYTES] = other
        return crc32c(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "crc32c", change)
        header = frame.read_header(slot)
    assert header is not None
    assert header.turn == 0
