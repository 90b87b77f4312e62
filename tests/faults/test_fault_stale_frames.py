"""Frames for tickets that are not there, between real processes over UCX: dropped at their header, in any number."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.kv_transfer.test_kv_ucx import Peer, Peers, connect, transfer, wait_until

NUM_STALE = 1_000
WARM = 50  # frames until pools of UCX and the allocator have their size
GROWTH_BYTES = 4 << 20  # far below what 1,000 frames of this size hold: 128 MiB staged


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.end()


def send_stale(sender: Peer, receiver: Peer, name: str, first_seq: int, num_frames: int) -> None:
    """Ship one block each for tickets that `receiver` has never granted; each is sent, credited and closed."""
    for seq in range(first_seq, first_seq + num_frames):
        sender.call("open_outgoing", name, seq, receiver.pid, 1, 0, 1, 60.0)
        sender.call("ship", seq, [seq % 256], 1, True)
        assert sender.expect("Shipped")[:2] == [seq, 1]
        sender.call("close_outgoing", seq)
        assert sender.expect("OutgoingClosed") == [seq, ""]


@pytest.mark.parametrize("tls", ["tcp", "all"])
def test_a_thousand_stale_frames_each_way_cost_no_memory_and_hang_no_sender(peers: Peers, tls: str) -> None:
    a, b = peers.start(tls, seed=3), peers.start(tls, seed=4)
    connect(a, b)
    sides = ((a, b, "b"), (b, a, "a"))
    for sender, receiver, name in sides:
        send_stale(sender, receiver, name, 1, WARM)
    before = [psutil.Process(peer.pid).memory_info().rss for peer in (a, b)]
    for sender, receiver, name in sides:
        send_stale(sender, receiver, name, 10_000, NUM_STALE)
    for peer, held in zip((a, b), before, strict=True):
        assert wait_until(lambda: peer.ask("load")["frames_dropped"] == WARM + NUM_STALE)  # noqa: B023  called at once
        load = peer.ask("load")
        assert (load["slots_in_use"], load["num_outgoing"], load["num_incoming"]) == (0, 0, 0)
        grown = psutil.Process(peer.pid).memory_info().rss - held
        print(f"{tls}: {grown >> 10} KiB more after {NUM_STALE} stale frames")
        assert grown < GROWTH_BYTES
    assert transfer(a, b, 5, list(range(100))) > 0
