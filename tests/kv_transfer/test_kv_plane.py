"""KVPlane: two real KV threads over loopback."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from baton.config import KVTransferConfig
from baton.errors import ConfigError
from kv_transfer.events import Committed, IncomingClosed, KVEvent, OutgoingClosed, PairLost, PairReady, Shipped
from kv_transfer.loopback import Faults, LoopbackNetwork
from kv_transfer.plane import KVPlane
from tests.kv_transfer.kv_fakes import LAYOUT, ByteStore, frame_bytes_for

CONFIG = KVTransferConfig(transport="loopback", mode="staged", frame_bytes=frame_bytes_for(6), num_slots=3)
PATIENCE_S = 30.0  # other work shares these cores


class Ends:
    """Two started planes and what they reported."""

    def __init__(self, faults: Faults | None = None) -> None:
        network = LoopbackNetwork(faults)
        self.store_a, self.store_b = ByteStore(seed=1), ByteStore()
        self.events_a: queue.Queue[KVEvent] = queue.Queue()
        self.events_b: queue.Queue[KVEvent] = queue.Queue()
        self.a = KVPlane(self.store_a, CONFIG, 0xA, self.events_a.put, network.transport("a"))
        self.b = KVPlane(self.store_b, CONFIG, 0xB, self.events_b.put, network.transport("b"))
        self.a.start()
        self.b.start()

    def connect(self, nonce: int = 7) -> None:
        self.a.connect("b", 0xB, self.b.address, nonce, CONFIG.frame_bytes, CONFIG.num_slots)
        self.b.connect("a", 0xA, self.a.address, nonce, CONFIG.frame_bytes, CONFIG.num_slots)
        assert self.events_a.get(timeout=PATIENCE_S) == PairReady("b", nonce, "loopback")
        assert self.events_b.get(timeout=PATIENCE_S) == PairReady("a", nonce, "loopback")

    def transfer(self, seq: int, num_blocks: int) -> None:
        blocks = list(range(num_blocks))
        self.b.open_incoming("a", seq, 1, blocks, 0, ttl_s=PATIENCE_S)
        self.a.open_outgoing("b", seq, 0xB, 1, 0, num_blocks, lease_s=PATIENCE_S)
        self.a.ship(seq, blocks, num_blocks, last=True)
        shipped = self.events_a.get(timeout=PATIENCE_S)
        assert isinstance(shipped, Shipped)
        self.b.commit_incoming(seq, 1, shipped.num_frames, shipped.nbytes)
        assert self.events_b.get(timeout=PATIENCE_S) == Committed(seq, 1, num_blocks * LAYOUT.block_bytes)
        self.a.close_outgoing(seq)
        assert self.events_a.get(timeout=PATIENCE_S) == OutgoingClosed(seq, "")
        assert self.store_b.blocks(blocks) == self.store_a.blocks(blocks)

    def stop(self) -> None:
        self.a.stop()
        self.b.stop()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.stop()


def test_commands_from_other_threads_move_blocks(ends: Ends) -> None:
    ends.connect()
    for seq in range(1, 20):
        ends.transfer(seq, num_blocks=seq)


def test_a_stopped_peer_closes_its_transfers_and_the_pair(ends: Ends) -> None:
    ends.connect()
    ends.a.open_incoming("b", 9, 1, [1], 0, ttl_s=PATIENCE_S)
    ends.b.stop()
    closed, lost = (ends.events_a.get(timeout=PATIENCE_S) for _ in range(2))
    assert isinstance(lost, PairLost)
    assert (lost.peer, lost.pair_nonce) == ("b", 7)
    assert closed == IncomingClosed(9, f"peer lost: {lost.reason}")


def test_stop_ends_the_thread_and_is_idempotent(ends: Ends) -> None:
    ends.connect()
    ends.stop()
    ends.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "baton-kv"]
    assert ends.a.peers() == {}


def test_an_unknown_transport_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="known: ucx, loopback"):
        KVPlane(ByteStore(), KVTransferConfig(transport="carrier"), 1, print)


def test_a_defect_on_the_kv_thread_ends_every_transfer_and_the_plane_goes_on(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends.connect()

    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(ends.store_b, "scatter", fail)
        ends.b.open_incoming("a", 1, 1, [0], 0, ttl_s=PATIENCE_S)
        ends.a.open_outgoing("b", 1, 0xB, 1, 0, 1, lease_s=PATIENCE_S)
        ends.a.ship(1, [0], 1, last=True)
        reason = "internal error of the KV plane"
        assert ends.events_b.get(timeout=PATIENCE_S) == IncomingClosed(1, f"peer lost: {reason}")
        assert ends.events_b.get(timeout=PATIENCE_S) == PairLost("a", 7, reason)
        assert isinstance(ends.events_a.get(timeout=PATIENCE_S), Shipped)
        assert ends.events_a.get(timeout=PATIENCE_S) == OutgoingClosed(1, "peer lost: the peer closed the pair")
        assert isinstance(ends.events_a.get(timeout=PATIENCE_S), PairLost)
    assert "a defect" in caplog.text
    ends.connect(nonce=8)
    ends.transfer(2, num_blocks=3)
