"""Direct mode on two cores: frames say where blocks lie, the receiver reads them there."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from baton.kv_copy import crc32c
from kv_transfer.channel import PeerPool
from kv_transfer.events import Committed, IncomingClosed, KVEvent, PairLost, Shipped
from kv_transfer.frame import HEADER_BYTES, FrameHeader, Kind, write_header
from kv_transfer.pair import WireView
from kv_transfer.receiver import Receiver
from tests.kv_transfer.kv_fakes import LAYOUT, ByteStore, TwoCores, frame_bytes_for

EPOCH, SEQ, GENERATION = 11, 5, 2


def modes(cores: TwoCores) -> tuple[str, str]:
    return cores.a.peers()["b"].mode, cores.b.peers()["a"].mode


def test_equal_pools_that_can_be_mapped_are_read_in_place_and_one_frame_names_them_all() -> None:
    cores = TwoCores(mode="auto")
    cores.connect()
    assert modes(cores) == ("direct", "direct")
    cores.take_events()
    source, target = list(range(10)), list(range(20, 30))
    cores.b.open_incoming("a", SEQ, 1, target, 3, ttl_s=5.0)
    cores.a.open_outgoing("b", SEQ, cores.EPOCH_B, 1, 3, 10, lease_s=5.0)
    cores.a.ship(SEQ, source, 10, last=True)
    cores.settle()
    nbytes = 7 * LAYOUT.block_bytes
    cores.b.commit_incoming(SEQ, 1, 1, nbytes)
    cores.settle()
    assert cores.take_events() == ([Shipped(SEQ, 1, nbytes)], [Committed(SEQ, 1, nbytes)])
    assert cores.store_b.blocks(target[3:]) == cores.store_a.blocks(source[3:])
    assert cores.store_b.blocks(target[:3]) == bytes(3 * LAYOUT.block_bytes)
    assert (cores.store_a.reads, cores.store_b.writes) == ([], []), "nothing was staged"
    assert cores.a.load().bytes_sent == cores.b.load().bytes_received == nbytes


def test_blocks_that_change_between_their_checksum_and_the_read_are_refused_and_leave_nothing() -> None:
    cores = TwoCores(mode="auto")
    cores.connect()
    cores.take_events()
    cores.b.open_incoming("a", SEQ, 1, [20], 0, ttl_s=5.0)
    cores.a.open_outgoing("b", SEQ, cores.EPOCH_B, 1, 0, 1, lease_s=5.0)
    cores.a.ship(SEQ, [1], 1, last=True)
    cores.a.poll(cores.now_s)
    cores.a.close_outgoing(SEQ)
    cores.store_a.data[:, :, 1] ^= 0xFF  # given to another prompt
    cores.b.commit_incoming(SEQ, 1, 1, LAYOUT.block_bytes)
    cores.run_for(10.0)
    closed = [event for event in cores.events_b if isinstance(event, IncomingClosed)]
    assert closed == [IncomingClosed(SEQ, "damaged")]
    assert not any(isinstance(event, Committed) for event in cores.events_b)
    assert not cores.store_b.data.any()
    assert cores.b.load().frames_dropped >= 1


def test_who_must_have_direct_mode_gives_up_a_peer_that_cannot_read_its_pool() -> None:
    cores = TwoCores(mode="direct")
    cores.store_b.memory = None  # type: ignore[assignment]  # a pool outside host memory
    cores.connect()
    lost = [event for event in cores.events_a if isinstance(event, PairLost)]
    assert [event.peer for event in lost] == ["b"]
    assert "kv.mode" in lost[0].reason


def test_a_pair_that_keeps_kv_differently_is_staged() -> None:
    cores = TwoCores(mode="auto")
    slots, size = cores.config.num_slots, cores.config.frame_bytes
    view = ByteStore(seed=3)
    cores.a.connect("b", cores.EPOCH_B, b"b", 7, size, slots, WireView(send=view, receive=cores.store_a))
    cores.b.connect("a", cores.EPOCH_A, b"a", 7, size, slots)
    cores.settle()
    assert modes(cores) == ("staged", "direct")
    cores.b.open_incoming("a", SEQ, 1, [20], 0, ttl_s=5.0)
    cores.a.open_outgoing("b", SEQ, cores.EPOCH_B, 1, 0, 1, lease_s=5.0)
    cores.a.ship(SEQ, [1], 1, last=True)
    cores.settle()
    assert cores.store_b.blocks([20]) == view.blocks([1])


def test_who_must_have_direct_mode_gives_up_a_peer_that_keeps_kv_differently_and_says_so() -> None:
    cores = TwoCores(mode="direct")
    slots, size = cores.config.num_slots, cores.config.frame_bytes
    view = WireView(send=ByteStore(seed=3), receive=cores.store_a)
    cores.a.connect("b", cores.EPOCH_B, b"b", 7, size, slots, view)
    cores.b.connect("a", cores.EPOCH_A, b"a", 7, size, slots)
    cores.settle()
    lost = [event.reason for event in cores.events_a if isinstance(event, PairLost)]
    assert lost == ["kv.mode is direct, and the two keep KV differently: set kv.mode to auto"]


class Bench:
    """A receiver with one open ticket and a mapped pool, fed by hand."""

    def __init__(self) -> None:
        self.source = ByteStore(num_blocks=8, seed=1)
        self.store = ByteStore()
        self.events: list[KVEvent] = []
        self.receiver = Receiver(self.store, self.events.append, EPOCH, 2, 2)
        self.receiver.peer_pool = PeerPool(self.source.memory, self.source.num_blocks)
        self.receiver.open(SEQ, GENERATION, [20, 21], 0, 5.0, 0.0)
        self.turn = 0

    def feed(self, places: list[int], **change: Any) -> bool:
        payload = struct.pack(f"<{len(places)}I", *places)
        slot = memoryview(bytearray(frame_bytes_for(12)))
        slot[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
        crc = crc32c(memoryview(bytearray(self.source.blocks([place for place in places if place < 8]))))
        header = FrameHeader(
            Kind.PULL, EPOCH, SEQ, GENERATION, 0, 0, len(places), 0, LAYOUT.num_layers, len(payload), self.turn, crc
        )
        write_header(slot, replace(header, **change))
        credit = self.receiver.on_frame(0, slot, 0.0)
        self.turn += 1
        assert credit is not None, "the lane is given back"
        return credit.accepted


@pytest.mark.parametrize("place", [8, 2**31, 2**32 - 1])
def test_a_place_outside_the_peers_pool_is_not_read(place: int) -> None:
    bench = Bench()
    assert not bench.feed([0, place])
    assert not bench.store.data.any()
    assert bench.feed([0, 7])
    assert bench.store.blocks([20, 21]) == bench.source.blocks([0, 7])


@pytest.mark.parametrize(
    "change", [{"nbytes": 4}, {"nbytes": 12}, {"nbytes": 0}, {"num_blocks": 1}, {"layer_start": 1}]
)
def test_a_frame_of_places_whose_length_is_not_its_blocks_is_dropped_at_its_header(change: dict[str, int]) -> None:
    bench = Bench()
    assert not bench.feed([0, 7], **change)
    assert not bench.store.data.any()


def test_a_frame_of_places_from_a_peer_whose_pool_is_not_mapped_is_dropped() -> None:
    bench = Bench()
    bench.receiver.peer_pool = None
    assert not bench.feed([0, 7])
    assert not bench.store.data.any()
