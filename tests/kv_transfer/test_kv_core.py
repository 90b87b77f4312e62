"""Two cores over a faultless loopback: the plain life of a transfer, command by command."""

from __future__ import annotations

from kv_transfer.events import (
    Committed,
    IncomingClosed,
    OutgoingClosed,
    PairLost,
    PairReady,
    Shipped,
)
from kv_transfer.frame import read_header
from tests.kv_transfer.kv_fakes import LAYOUT, TwoCores


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


def test_a_probe_for_another_epoch_is_refused_and_the_pair_says_why() -> None:
    cores = TwoCores()
    slots, size = cores.config.num_slots, cores.config.frame_bytes
    cores.a.connect("b", cores.EPOCH_B + 5, b"b", 7, size, slots)  # b restarted since
    cores.b.connect("a", cores.EPOCH_A, b"a", 7, size, slots)
    cores.settle()
    events_a, events_b = cores.take_events()
    assert events_a == [PairLost("b", 7, "the peer refused our probe frame: it is of another epoch or damaged")]
    assert events_b == [PairLost("a", 7, "the peer closed the pair")]


def test_a_pair_that_hears_no_probe_is_lost_within_the_hello_timeout() -> None:
    cores = TwoCores()
    cores.a.connect("b", cores.EPOCH_B, b"b", 7, cores.config.frame_bytes, cores.config.num_slots)
    cores.run_for(cores.config.hello_timeout_s - 0.1)
    assert cores.take_events() == ([], [])
    cores.run_for(0.2)
    (event,), _ = cores.take_events()
    assert isinstance(event, PairLost)
    assert "no probe frame" in event.reason


def test_a_ticket_of_another_epoch_than_the_pairs_is_not_sent() -> None:
    cores = TwoCores()
    cores.connect()
    cores.take_events()
    cores.a.open_outgoing("b", 5, cores.EPOCH_B + 1, 1, 0, 2, lease_s=5.0)
    cores.settle()
    assert cores.take_events() == ([OutgoingClosed(5, "the ticket is of another epoch than the peer's")], [])


def test_a_new_connection_to_a_peer_ends_the_old_one_first_and_then_works() -> None:
    cores = TwoCores()
    cores.connect(nonce=7)
    cores.take_events()
    cores.a.open_outgoing("b", 5, cores.EPOCH_B, 1, 0, 2, lease_s=5.0)
    cores.connect(nonce=8)
    events_a, events_b = cores.take_events()
    assert events_a == [
        OutgoingClosed(5, "peer lost: replaced by a new connection"),
        PairLost("b", 7, "replaced by a new connection"),
        PairReady("b", 8, "loopback"),
    ]
    assert events_b[-1] == PairReady("a", 8, "loopback")


def test_a_frame_size_that_fits_no_layer_loses_the_pair_at_once() -> None:
    cores = TwoCores()
    cores.a.connect("b", cores.EPOCH_B, b"b", 7, 100, 2)
    cores.settle()
    (event,), _ = cores.take_events()
    assert isinstance(event, PairLost)
    assert "frame_bytes is 100" in event.reason


def test_a_peer_that_returns_no_credit_is_given_up_after_the_transfer_timeout() -> None:
    cores = TwoCores()
    cores.connect()
    cores.take_events()
    cores.b.open_incoming("a", 5, 1, list(range(8)), 0, ttl_s=60.0)
    cores.a.open_outgoing("b", 5, cores.EPOCH_B, 1, 0, 8, lease_s=60.0)
    cores.a.ship(5, range(8), 8, last=True)
    for _ in range(1200):  # b is stuck
        cores.now_s += 0.01
        cores.a.poll(cores.now_s)
    closed, lost = cores.take_events()[0]
    assert closed == OutgoingClosed(5, "peer lost: no credit for 10 s")
    assert lost == PairLost("b", 7, "no credit for 10 s")


def test_events_are_delivered_from_poll_so_that_a_handler_may_give_commands() -> None:
    cores = TwoCores()
    cores.connect()
    cores.take_events()
    cores.a.open_outgoing("b", 5, cores.EPOCH_B, 1, 0, 2, lease_s=5.0)
    cores.a.close_outgoing(5)
    assert cores.events_a == []
    cores.a.poll(cores.now_s)
    assert cores.events_a == [OutgoingClosed(5, "")]


def test_both_ends_can_send_at_once() -> None:
    cores = TwoCores()
    cores.connect()
    cores.take_events()
    cores.b.open_incoming("a", 5, 1, list(range(8)), 0, ttl_s=5.0)
    cores.a.open_incoming("b", 6, 1, list(range(10, 18)), 0, ttl_s=5.0)
    cores.a.open_outgoing("b", 5, cores.EPOCH_B, 1, 0, 8, lease_s=5.0)
    cores.b.open_outgoing("a", 6, cores.EPOCH_A, 1, 0, 8, lease_s=5.0)
    cores.a.ship(5, range(8), 8, last=True)
    cores.b.ship(6, range(20, 28), 8, last=True)
    cores.settle()
    nbytes = 8 * LAYOUT.block_bytes
    cores.b.commit_incoming(5, 1, 4, nbytes)
    cores.a.commit_incoming(6, 1, 4, nbytes)
    cores.settle()
    assert cores.take_events() == (
        [Shipped(5, 4, nbytes), Committed(6, 1, nbytes)],
        [Shipped(6, 4, nbytes), Committed(5, 1, nbytes)],
    )
    assert cores.store_b.blocks(range(8)) == cores.store_a.blocks(range(8))
    assert cores.store_a.blocks(range(10, 18)) == cores.store_b.blocks(range(20, 28))
    status = cores.a.peers()["b"]
    assert (status.bytes_sent, status.bytes_received, status.num_received) == (nbytes, nbytes, 1)


def test_a_worker_that_was_late_itself_judges_what_has_arrived_before_it_asks_again() -> None:
    cores = TwoCores()
    cores.connect()
    cores.take_events()
    nbytes = 2 * LAYOUT.block_bytes
    for seq in (5, 6):
        cores.b.open_incoming("a", seq, 1, [2 * seq, 2 * seq + 1], 0, ttl_s=5.0)
        cores.a.open_outgoing("b", seq, cores.EPOCH_B, 1, 0, 2, lease_s=5.0)
        cores.a.ship(seq, [2 * seq, 2 * seq + 1], 2, last=True)
        cores.b.commit_incoming(seq, 1, 1, nbytes)
    while cores.a.poll(cores.now_s):
        pass
    cores.now_s += 1.0  # b did not run for longer than the pause that means loss
    cores.settle()
    assert cores.take_events()[1] == [Committed(5, 1, nbytes), Committed(6, 1, nbytes)]


def test_a_judged_slot_is_unreadable_so_that_an_empty_message_is_not_taken_for_the_last_frame() -> None:
    cores = TwoCores(num_slots=1)
    cores.connect()  # the probe was in slot 0
    assert read_header(cores.b._pairs["a"].channel.ring_slot(0)) is None


def test_a_ticket_of_another_epoch_ends_the_transfer_that_it_would_replace_too() -> None:
    cores = TwoCores()
    cores.connect()
    cores.take_events()
    cores.a.open_outgoing("b", 5, cores.EPOCH_B, 1, 0, 2, lease_s=5.0)
    cores.a.open_outgoing("b", 5, cores.EPOCH_B + 1, 2, 0, 2, lease_s=5.0)
    cores.settle()
    stale = "the ticket is of another epoch than the peer's"
    assert cores.take_events()[0] == [OutgoingClosed(5, "replaced"), OutgoingClosed(5, stale)]
    assert cores.a.load().num_outgoing == 0
    assert cores.a._pairs["b"].sender.num_open == 0, "after OutgoingClosed no block is read"
