"""Two cores over a faultless loopback: the plain life of a transfer, command by command."""

from __future__ import annotations

from kv_fakes import LAYOUT, TwoCores

from kv_transfer.events import (
    Committed,
    IncomingClosed,
    OutgoingClosed,
    PairLost,
    PairReady,
    Shipped,
)


def test_a_pair_is_ready_on_both_ends_after_one_probe_each_way() -> None:
    cores = TwoCores()
    cores.connect()
    assert cores.take_events() == ([PairReady("b", 7, "loopback")], [PairReady("a", 7, "loopback")])


def test_blocks_arrive_bit_exact_and_only_those_that_the_receiver_lacks() -> None:
    cores = TwoCores()
    cores.connect()
    cores.take_events()
    source, target = list(range(10)), list(range(20, 30))
    cores.b.open_incoming("a", 5, 1, target, 3, ttl_s=5.0)
    cores.a.open_outgoing("b", 5, cores.EPOCH_B, 1, 3, 10, lease_s=5.0)
    cores.a.ship(5, source, 6, last=False)
    cores.settle()
    cores.a.ship(5, source, 10, last=True)
    cores.settle()
    nbytes = 7 * LAYOUT.block_bytes
    events_a, events_b = cores.take_events()
    assert events_a == [Shipped(5, 4, nbytes)]
    assert events_b == []
    cores.b.commit_incoming(5, 1, 4, nbytes)
    cores.a.close_outgoing(5)
    cores.settle()
    assert cores.take_events() == ([OutgoingClosed(5, "")], [Committed(5, 1, nbytes)])
    assert cores.store_b.blocks(target[3:]) == cores.store_a.blocks(source[3:])
    assert not cores.store_b.data[:, :, target[:3]].any()
    assert cores.a.load().bytes_sent == cores.b.load().bytes_received == nbytes
    assert cores.a.load().slots_in_use == 0
    assert cores.b.load().frames_dropped == 0


def test_a_transfer_of_no_blocks_is_committed_too() -> None:
    cores = TwoCores()
    cores.connect()
    cores.take_events()
    cores.b.open_incoming("a", 5, 1, [1, 2], 2, ttl_s=5.0)
    cores.a.open_outgoing("b", 5, cores.EPOCH_B, 1, 2, 2, lease_s=5.0)
    cores.a.ship(5, [1, 2], 2, last=True)
    cores.b.commit_incoming(5, 1, 0, 0)
    cores.settle()
    assert cores.take_events() == ([Shipped(5, 0, 0)], [Committed(5, 1, 0)])


def test_opening_towards_an_unknown_peer_closes_at_once() -> None:
    cores = TwoCores()
    cores.a.open_outgoing("b", 5, 1, 1, 0, 2, lease_s=5.0)
    cores.a.open_incoming("b", 6, 1, [1], 0, ttl_s=5.0)
    cores.settle()
    events, _ = cores.take_events()
    assert events == [OutgoingClosed(5, "peer lost: not connected"), IncomingClosed(6, "peer lost: not connected")]


def test_disconnect_closes_every_transfer_before_the_pair_is_reported_lost() -> None:
    cores = TwoCores()
    cores.connect()
    cores.take_events()
    cores.a.open_outgoing("b", 5, cores.EPOCH_B, 1, 0, 2, lease_s=5.0)
    cores.a.open_incoming("b", 6, 1, [1], 0, ttl_s=5.0)
    cores.a.disconnect("b")
    cores.settle()
    events, _ = cores.take_events()
    assert events == [
        OutgoingClosed(5, "peer lost: disconnected"),
        IncomingClosed(6, "peer lost: disconnected"),
        PairLost("b", 7, "disconnected"),
    ]
    assert cores.a.load().num_outgoing == cores.a.load().num_incoming == 0
