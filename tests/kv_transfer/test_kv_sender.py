"""The sender alone: credits, slots, leases, and what it puts into frames."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.kv_copy import crc32c
from kv_transfer.channel import Credit
from kv_transfer.events import KVEvent, OutgoingClosed, Shipped
from kv_transfer.failure import FailureReason
from kv_transfer.frame import HEADER_BYTES, FrameHeader, read_header
from kv_transfer.sender import LEASE_EXPIRED, Sender
from tests.kv_transfer.kv_fakes import LAYOUT, ByteStore, frame_bytes_for

EPOCH, SEQ, GENERATION = 11, 5, 2
LEASE_S, TIMEOUT_S = 5.0, 10.0


class Bench:
    """A sender whose slots are plain memory."""

    def __init__(self, num_slots: int = 2) -> None:
        self.store = ByteStore(seed=1)
        self.events: list[KVEvent] = []
        self.memory = [memoryview(bytearray(frame_bytes_for(3))) for _ in range(num_slots)]  # one block per frame
        self.sender = Sender(self.store, self.events.append, frame_bytes_for(3), num_slots, TIMEOUT_S)

    def give_credits(self, turn: int = 0, now_s: float = 0.0) -> None:
        for slot in range(len(self.memory)):
            self.sender.on_credit(Credit(slot, turn, accepted=True), now_s)

    def send(self, now_s: float = 0.0) -> list[FrameHeader]:
        """Fill every lane that can be filled."""
        headers = []
        while self.sender.has_frames() and (slot := self.sender.take_lane(now_s)) is not None:
            nbytes = self.sender.fill(slot, self.memory[slot], now_s)
            header = read_header(self.memory[slot])
            assert header is not None
            assert nbytes == HEADER_BYTES + header.nbytes
            headers.append(header)
        return headers


def test_nothing_is_gathered_before_a_credit_came_and_one_frame_per_credit_after() -> None:
    bench = Bench(num_slots=2)
    bench.sender.open(SEQ, EPOCH, GENERATION, 0, 5, LEASE_S, 0.0)
    bench.sender.ship(SEQ, range(5), 5, True, 0.0)
    assert bench.send() == []
    assert bench.store.reads == []
    bench.give_credits()
    assert [header.index for header in bench.send()] == [0, 1]
    assert bench.sender.slots_in_use == 2


def test_a_slot_is_refilled_only_after_both_its_send_and_its_credit() -> None:
    for first in ("send", "credit"):
        bench = Bench(num_slots=1)
        bench.sender.open(SEQ, EPOCH, GENERATION, 0, 5, LEASE_S, 0.0)
        bench.sender.ship(SEQ, range(5), 5, True, 0.0)
        bench.give_credits()
        assert len(bench.send()) == 1
        for what in ("send", "credit") if first == "send" else ("credit", "send"):
            assert bench.send() == []
            if what == "send":
                bench.sender.on_send_done(0)
            else:
                bench.give_credits(turn=1)
        assert [header.index for header in bench.send()] == [1]


def test_a_credit_for_an_earlier_frame_of_the_lane_means_nothing() -> None:
    bench = Bench(num_slots=1)
    bench.sender.open(SEQ, EPOCH, GENERATION, 0, 5, LEASE_S, 0.0)
    bench.sender.ship(SEQ, range(5), 5, True, 0.0)
    bench.give_credits()
    bench.send()
    bench.sender.on_send_done(0)
    assert not bench.sender.on_credit(Credit(0, 0, accepted=True), 0.0)
    assert bench.send() == []


def test_frames_name_their_ticket_and_hold_their_blocks() -> None:
    bench = Bench(num_slots=8)
    bench.give_credits()
    bench.sender.open(SEQ, EPOCH, GENERATION, 2, 5, LEASE_S, 0.0)
    bench.sender.ship(SEQ, [9, 8, 7, 6, 5], 5, True, 0.0)
    for slot, header in enumerate(bench.send()):
        assert (header.epoch, header.seq, header.generation, header.index) == (EPOCH, SEQ, GENERATION, slot)
        assert (header.block_start, header.num_blocks, header.layer_start) == (2 + slot, 1, 0)
        payload = bench.memory[slot][HEADER_BYTES:]
        assert bytes(payload) == bench.store.blocks([9 - 2 - slot])
        assert header.payload_crc == crc32c(payload)
    assert bench.events == [Shipped(SEQ, 3, 3 * LAYOUT.block_bytes)]


@given(st.lists(st.integers(0, 12), max_size=6), st.integers(0, 12))
def test_any_sequence_of_ship_calls_posts_each_block_after_the_leading_ones_once(
    ready: list[int], leading: int
) -> None:
    bench = Bench(num_slots=16)
    bench.give_credits()
    bench.sender.open(SEQ, EPOCH, GENERATION, leading, 12, LEASE_S, 0.0)
    for num_ready in ready:
        bench.sender.ship(SEQ, range(12), num_ready, False, 0.0)
    bench.sender.ship(SEQ, range(12), 12, True, 0.0)
    assert [header.block_start for header in bench.send()] == list(range(leading, 12))
    assert bench.events == [Shipped(SEQ, 12 - leading, (12 - leading) * LAYOUT.block_bytes)]


def test_a_resend_repeats_frames_it_has_sent_and_ignores_others() -> None:
    bench = Bench(num_slots=8)
    bench.give_credits()
    bench.sender.open(SEQ, EPOCH, GENERATION, 0, 3, LEASE_S, 0.0)
    bench.sender.ship(SEQ, range(3), 3, True, 0.0)
    bench.send()
    bench.sender.resend(SEQ, [2, 1, 2, 3, -1, 10**9], 0.0)
    assert [header.index for header in bench.send()] == [1, 2]
    assert len(bench.events) == 1, "Shipped is said once"


def test_close_stops_reading_blocks_at_once_and_answers_once() -> None:
    bench = Bench(num_slots=1)
    bench.give_credits()
    for seq in (SEQ, SEQ + 1):
        bench.sender.open(seq, EPOCH, GENERATION, 0, 3, LEASE_S, 0.0)
        bench.sender.ship(seq, range(3), 3, True, 0.0)
    bench.send()
    bench.sender.close(SEQ, "", 0.0)
    bench.sender.close(SEQ, "", 0.0)
    bench.sender.ship(SEQ, range(3), 3, True, 0.0)
    bench.sender.resend(SEQ, [0], 0.0)
    assert bench.events == [OutgoingClosed(SEQ, "")]
    bench.sender.on_send_done(0)
    bench.give_credits(turn=1)
    assert [header.seq for header in bench.send()] == [SEQ + 1]


def test_silence_ends_the_lease_and_ships_and_credits_renew_it() -> None:
    bench = Bench(num_slots=1)
    bench.sender.open(SEQ, EPOCH, GENERATION, 0, 3, LEASE_S, 0.0)
    bench.sender.ship(SEQ, range(3), 3, True, 4.0)
    bench.sender.poll(8.9)
    assert bench.events == []
    bench.sender.on_credit(Credit(0, 0, accepted=True), 8.9)
    bench.sender.poll(13.8)
    assert bench.events == []
    bench.sender.poll(13.9)
    assert bench.events == [OutgoingClosed(SEQ, LEASE_EXPIRED)]
    assert (bench.sender.num_expired, bench.sender.num_open) == (1, 0)


def test_after_shipped_the_transfer_timeout_counts() -> None:
    bench = Bench(num_slots=4)
    bench.give_credits()
    bench.sender.open(SEQ, EPOCH, GENERATION, 0, 3, LEASE_S, 0.0)
    bench.sender.ship(SEQ, range(3), 3, True, 1.0)
    bench.send(1.0)
    bench.sender.poll(1.0 + TIMEOUT_S - 0.1)
    assert len(bench.events) == 1
    bench.sender.poll(1.0 + TIMEOUT_S)
    assert bench.events[1:] == [OutgoingClosed(SEQ, FailureReason.NO_ACK)]
