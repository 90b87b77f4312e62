"""The receiver alone: every way a frame can be wrong, one at a time, and every way a ticket can end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.kv_copy import crc32c
from kv_transfer.channel import Credit
from kv_transfer.events import Committed, IncomingClosed, Incomplete, KVEvent
from kv_transfer.frame import HEADER_BYTES, FrameHeader, Kind, write_header
from kv_transfer.receiver import QUIET_S, Receiver
from tests.kv_transfer.kv_fakes import LAYOUT, ByteStore, frame_bytes_for

EPOCH, SEQ, GENERATION = 11, 5, 2
MAX_RESENDS = 2
TTL_S = 5.0
TARGET = [20, 21, 22, 23]  # the ticket's blocks; block 0 of the prompt is held already


class Bench:
    """A receiver with one open ticket, fed by hand."""

    def __init__(self, num_slots: int = 2) -> None:
        self.store = ByteStore()
        self.events: list[KVEvent] = []
        self.receiver = Receiver(self.store, self.events.append, EPOCH, num_slots, MAX_RESENDS)
        self.receiver.open(SEQ, GENERATION, TARGET, 1, TTL_S, 0.0)
        self.turn = 0

    def feed(self, header: FrameHeader, payload: bytes, now_s: float = 0.0) -> Credit | None:
        slot = memoryview(bytearray(frame_bytes_for(12)))
        slot[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
        write_header(slot, replace(header, turn=self.turn))
        credit = self.receiver.on_frame(0, slot, now_s)
        self.turn += 1
        return credit


def frame(index: int, block_start: int, num_blocks: int = 1) -> tuple[FrameHeader, bytes]:
    """A right frame: all layers of some blocks."""
    payload = bytes([index + 1]) * (num_blocks * LAYOUT.block_bytes)
    crc = crc32c(memoryview(bytearray(payload)))
    header = FrameHeader(
        Kind.DATA, EPOCH, SEQ, GENERATION, index, block_start, num_blocks, 0, LAYOUT.num_layers, len(payload), 0, crc
    )
    return header, payload


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": EPOCH + 1},
        {"seq": SEQ + 1},
        {"generation": GENERATION - 1},
        {"generation": GENERATION + 1},
        {"block_start": 0},
        {"block_start": 4},
        {"block_start": 2**32 - 1},
        {"num_blocks": 0},
        {"num_blocks": 2},
        {"num_blocks": 2**32 - 1},
        {"layer_start": 1},
        {"num_layers": 0},
        {"num_layers": LAYOUT.num_layers + 1},
        {"num_layers": 2**32 - 1, "layer_start": 2**32 - 1},
        {"nbytes": LAYOUT.block_bytes - 1},
        {"index": len(TARGET) * LAYOUT.num_layers},
        {"payload_crc": 0},
    ],
    ids=str,
)
def test_a_frame_that_is_wrong_in_one_field_leaves_nothing_and_gives_its_lane_back(change: dict[str, Any]) -> None:
    bench = Bench()
    header, payload = frame(0, 1)
    assert bench.feed(replace(header, **change), payload) == Credit(0, 1, accepted=False)
    assert bench.store.blocks(TARGET) == bytes(len(TARGET) * LAYOUT.block_bytes)
    assert bench.receiver.frames_dropped == 1
    assert bench.feed(header, payload) == Credit(0, 2, accepted=True)
    assert bench.store.blocks([21]) == payload


def test_bytes_that_are_no_frame_give_their_lane_back() -> None:
    bench = Bench()
    assert bench.receiver.on_frame(0, memoryview(bytearray(100)), 0.0) == Credit(0, 1, accepted=False)
    assert bench.receiver.on_frame(0, memoryview(bytearray(10)), 0.0) == Credit(0, 2, accepted=False)


def test_a_second_copy_of_one_message_gives_nothing_back() -> None:
    bench = Bench()
    header, payload = frame(0, 1)
    assert bench.feed(header, payload) == Credit(0, 1, accepted=True)
    bench.turn = 0
    assert bench.feed(header, payload) is None
    assert bench.store.writes == [(21,)]


def test_a_frame_that_overlaps_another_is_not_written() -> None:
    bench = Bench()
    bench.feed(*frame(0, 1, num_blocks=2))
    assert bench.feed(*frame(1, 2, num_blocks=2)) == Credit(0, 2, accepted=False)
    assert bench.store.writes == [(21, 22)]


def test_commit_comes_before_or_after_the_last_frame_and_is_answered_once() -> None:
    nbytes = 3 * LAYOUT.block_bytes
    for commit_first in (True, False):
        bench = Bench()
        bench.feed(*frame(0, 1, num_blocks=2))
        if commit_first:
            bench.receiver.commit(SEQ, GENERATION, 2, nbytes, 0.0)
        bench.feed(*frame(1, 3))
        if not commit_first:
            bench.receiver.commit(SEQ, GENERATION, 2, nbytes, 0.0)
        assert bench.events == [Committed(SEQ, GENERATION, nbytes)]
        bench.receiver.commit(SEQ, GENERATION, 2, nbytes, 0.0)
        assert bench.feed(*frame(1, 3)) == Credit(0, 3, accepted=False)
        bench.receiver.close(SEQ, "")
        assert len(bench.events) == 1
        assert len(bench.store.writes) == 2


@pytest.mark.parametrize(
    ("num_frames", "nbytes"),
    [(2, 3 * LAYOUT.block_bytes + 1), (1, 3 * LAYOUT.block_bytes), (2, 2 * LAYOUT.block_bytes), (2**32 - 1, 0)],
)
def test_a_promise_that_differs_from_what_came_closes_the_ticket(num_frames: int, nbytes: int) -> None:
    bench = Bench()
    bench.feed(*frame(0, 1, num_blocks=2))
    bench.feed(*frame(1, 3))
    bench.receiver.commit(SEQ, GENERATION, num_frames, nbytes, 0.0)
    assert bench.events == [IncomingClosed(SEQ, "damaged")]


def test_blocks_that_nobody_sent_are_never_committed() -> None:
    bench = Bench()
    bench.feed(*frame(0, 1, num_blocks=2))
    bench.receiver.commit(SEQ, GENERATION, 1, 2 * LAYOUT.block_bytes, 0.0)
    assert bench.events == [IncomingClosed(SEQ, "damaged")]


def test_a_commit_of_another_generation_is_ignored() -> None:
    bench = Bench()
    bench.receiver.commit(SEQ, GENERATION + 1, 0, 0, 0.0)
    assert bench.events == []
    assert bench.receiver.num_open == 1


def test_missing_frames_are_asked_for_after_a_pause_that_doubles_and_at_most_max_resends_times() -> None:
    bench = Bench()
    bench.feed(*frame(1, 3))
    bench.receiver.commit(SEQ, GENERATION, 3, 3 * LAYOUT.block_bytes, 0.0)
    bench.receiver.poll(QUIET_S * 0.9)
    assert bench.events == []
    bench.receiver.poll(QUIET_S)
    assert bench.events == [Incomplete(SEQ, GENERATION, (0, 2))]
    bench.receiver.poll(QUIET_S * 2.9)
    assert len(bench.events) == 1
    bench.receiver.poll(QUIET_S * 3)
    assert bench.events[1:] == [Incomplete(SEQ, GENERATION, (0, 2))]
    bench.receiver.poll(TTL_S * 0.9)
    assert len(bench.events) == 2
    bench.receiver.poll(TTL_S)
    assert bench.events[2:] == [IncomingClosed(SEQ, "damaged")]


def test_a_frame_known_to_be_damaged_is_asked_for_as_soon_as_commit_comes() -> None:
    bench = Bench()
    header, payload = frame(0, 1)
    bench.feed(replace(header, payload_crc=header.payload_crc ^ 1), payload)
    bench.receiver.commit(SEQ, GENERATION, 2, 3 * LAYOUT.block_bytes, 0.0)
    assert bench.events == [Incomplete(SEQ, GENERATION, (0,))]
    bench.feed(header, payload)
    bench.feed(*frame(1, 2, num_blocks=2))
    assert bench.events[1:] == [Committed(SEQ, GENERATION, 3 * LAYOUT.block_bytes)]


def test_a_silent_ticket_expires_and_arriving_frames_renew_it() -> None:
    bench = Bench()
    bench.feed(*frame(0, 1), now_s=TTL_S - 0.1)
    bench.receiver.poll(TTL_S)
    assert bench.events == []
    bench.receiver.poll(2 * TTL_S)
    assert bench.events == [IncomingClosed(SEQ, "expired")]
    assert bench.receiver.num_expired == 1


def test_opening_the_same_ticket_again_renews_it_and_another_generation_replaces_it() -> None:
    bench = Bench()
    bench.feed(*frame(0, 1))
    bench.receiver.open(SEQ, GENERATION, TARGET, 1, TTL_S, TTL_S - 0.1)
    bench.receiver.poll(TTL_S + 0.1)
    assert bench.events == []
    bench.receiver.open(SEQ, GENERATION + 1, TARGET, 1, TTL_S, TTL_S)
    assert bench.events == [IncomingClosed(SEQ, "replaced")]
    assert bench.feed(*frame(1, 2)) == Credit(0, 2, accepted=False)


def test_a_probe_counts_only_for_this_epoch_and_whole() -> None:
    bench = Bench()
    payload = b"12345678"
    header = FrameHeader(Kind.PROBE, EPOCH, 0, 0, 0, 0, 0, 0, 0, 8, 0, crc32c(memoryview(bytearray(payload))))
    wrongs: list[dict[str, Any]] = [{"epoch": EPOCH - 1}, {"payload_crc": 1}]
    for wrong in wrongs:
        bench.feed(replace(header, **wrong), payload)
        assert bench.receiver.probe is None
    bench.feed(header, payload)
    assert bench.receiver.probe == payload
