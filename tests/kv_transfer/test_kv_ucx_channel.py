"""Two UCX transports in one process, driven by hand: what happens between and after the frames."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest
from ucxx._lib import libucxx

from baton.config import KVTransferConfig
from baton.errors import ConfigError, TransferFailed
from kv_transfer.channel import ChannelEvent, ChannelLost, Credit, FrameArrived, SendDone
from kv_transfer.ucx import transport
from kv_transfer.ucx.channel import UcxChannel
from kv_transfer.ucx.memory import Region
from kv_transfer.ucx.transport import LIVENESS_PERIOD_S, SWEEP_S, UcxTransport

PATIENCE_S = 30.0
FRAME_BYTES, NUM_SLOTS = 4096, 3


@dataclass
class Ends:
    transport_a: UcxTransport
    transport_b: UcxTransport
    a: UcxChannel
    b: UcxChannel
    now_s: float = 1000.0

    def run_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, "it never came"
            self.transport_a.progress(self.now_s)
            self.transport_b.progress(self.now_s)

    def events(self, channel: UcxChannel, count: int) -> list[ChannelEvent]:
        got: list[ChannelEvent] = []

        def enough() -> bool:
            got.extend(channel.poll())
            return len(got) >= count

        self.run_until(enough)
        return got


@pytest.fixture(params=["tcp", "posix"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    config = KVTransferConfig(ucx_tls=request.param)
    transport_a, transport_b = UcxTransport(config), UcxTransport(config)
    a = transport_a.open_channel(transport_b.address, 7, 0, FRAME_BYTES, NUM_SLOTS)
    b = transport_b.open_channel(transport_a.address, 7, 1, FRAME_BYTES, NUM_SLOTS)
    yield Ends(transport_a, transport_b, a, b)
    for end in (transport_a, transport_b):
        for channel in list(end._open):
            channel.close()
        while end._closing:
            end.progress(0.0)
        end.close()


def test_a_frame_and_its_credit_cross_on_the_lane_they_were_sent_on(ends: Ends) -> None:
    ends.b.post_frame(2)
    ends.a.post_credit(2)
    ends.a.send_slot(2)[:5] = b"hello"
    ends.a.send_frame(2, 5)
    assert ends.events(ends.b, 1) == [FrameArrived(2)]
    assert bytes(ends.b.ring_slot(2)[:5]) == b"hello"
    ends.b.send_credit(Credit(2, 1, accepted=False))
    assert set(ends.events(ends.a, 2)) == {SendDone(2), Credit(2, 1, accepted=False)}


def test_a_frame_larger_than_its_slot_arrives_as_something_to_judge(ends: Ends) -> None:
    small = ends.transport_b.open_channel(ends.transport_a.address, 9, 1, 64, NUM_SLOTS)
    large = ends.transport_a.open_channel(ends.transport_b.address, 9, 0, FRAME_BYTES, NUM_SLOTS)
    small.post_frame(0)
    large.send_frame(0, FRAME_BYTES)
    assert ends.events(small, 1) == [FrameArrived(0)]


def test_close_cancels_posted_receives_and_frees_the_slots(ends: Ends) -> None:
    for slot in range(NUM_SLOTS):
        ends.b.post_frame(slot)
        ends.b.post_credit(slot)
    assert ends.b.num_quarantined == 0
    ends.b.close()
    ends.run_until(lambda: not ends.transport_b._closing)
    assert ends.b.num_quarantined == 0


def test_a_peer_that_closes_says_so(ends: Ends) -> None:
    ends.b.send_credit(Credit(0, 0, accepted=True))  # so that both ends are wired up
    ends.a.post_credit(0)
    assert ends.events(ends.a, 1) == [Credit(0, 0, accepted=True)]
    ends.b.close()
    assert ends.events(ends.a, 1) == [ChannelLost("the peer closed the pair")]


def test_messages_to_a_closed_pair_do_not_stay_in_the_unexpected_queue(ends: Ends) -> None:
    ends.b.send_credit(Credit(0, 0, accepted=True))
    ends.a.post_credit(0)
    ends.events(ends.a, 1)
    tags = [libucxx.UCXXTag(tag) for tag in ends.b.incoming_tags()]
    for slot in range(NUM_SLOTS):
        ends.a.send_frame(slot, FRAME_BYTES)
        ends.a.send_credit(Credit(slot, 0, accepted=True))
    ends.run_until(
        lambda: sum(isinstance(event, SendDone) for event in ends.a.poll()) == NUM_SLOTS or not ends.a._sends
    )
    worker = ends.transport_b._worker
    ends.run_until(lambda: sum(worker.tag_probe(tag).matched for tag in tags) == 2 * NUM_SLOTS)
    ends.b.close()
    ends.now_s += LIVENESS_PERIOD_S
    ends.run_until(lambda: not any(worker.tag_probe(tag).matched for tag in tags))
    ends.now_s += SWEEP_S + LIVENESS_PERIOD_S
    ends.run_until(lambda: not ends.transport_b._retired and not ends.transport_b._swept)


def test_a_wake_before_the_wait_ends_it_at_once(ends: Ends) -> None:
    for _ in range(3):  # the first waits may find UCX itself busy
        ends.transport_a.wake()
        started_s = time.monotonic()
        ends.transport_a.wait(PATIENCE_S)
        assert time.monotonic() - started_s < PATIENCE_S / 2


def listening_ports() -> set[int]:
    connections = psutil.Process().net_connections(kind="inet")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def test_a_pair_that_is_lost_before_its_endpoints_are_wired_leaves_nothing_that_keeps_ucx_alive() -> None:
    before = listening_ports()
    for nonce in range(4):  # whether a connection is made in time is left to the system
        config = KVTransferConfig(ucx_tls="tcp")
        here, there = UcxTransport(config), UcxTransport(config)
        channel = here.open_channel(there.address, nonce, 0, FRAME_BYTES, NUM_SLOTS)
        channel.send_credit(Credit(0, 0, accepted=True))
        channel.close()
        while here._closing:
            here.progress(0.0)
        here.close()
        there.close()
        del here, there, channel
        gc.collect()
    assert listening_ports() <= before


def test_what_comes_between_the_last_poll_and_a_wait_is_not_taken_by_the_wait(ends: Ends) -> None:
    for slot in range(2):
        ends.a.post_credit(slot)
    ends.b.send_credit(Credit(0, 0, accepted=True))  # so that both ends are wired up
    assert ends.events(ends.a, 1) == [Credit(0, 0, accepted=True)]
    ends.b.send_credit(Credit(1, 0, accepted=True))
    while not ends.b.poll() and ends.b._credit_sends:
        ends.transport_b.progress(ends.now_s)
    ends.transport_a.wait(0.0)
    assert not ends.a.poll(), "whoever waits polls only after progress() said that something happened"
    ends.run_until(lambda: ends.transport_a.progress(ends.now_s))
    assert ends.a.poll() == [Credit(1, 0, accepted=True)]


def test_a_ring_or_send_slots_without_memory_cost_their_pair_only(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(context: object, nbytes: int) -> tuple[memoryview, Region]:
        raise ConfigError("UCX cannot allocate", field="engine.kv_memory_bytes")

    exports = ends.b.exports(None)
    with monkeypatch.context() as patch:
        patch.setattr(transport, "allocate", refuse)
        with pytest.raises(TransferFailed, match="no memory for frames: UCX cannot allocate"):
            ends.transport_a.open_channel(ends.transport_b.address, 9, 0, FRAME_BYTES, NUM_SLOTS)
        if "tcp" in ends.a.describe():  # elsewhere frames are made in the peer's ring
            with pytest.raises(TransferFailed, match="no memory for frames: UCX cannot allocate"):
                ends.a.attach(exports)
    assert ends.transport_a._open == [ends.a]
