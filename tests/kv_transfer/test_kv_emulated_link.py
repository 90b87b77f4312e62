"""Frames between emulated network cards: one flow takes its length, flows that share a card share its rate."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest

from baton.config import KVTransferConfig
from kv_transfer.core import PlaneCore
from kv_transfer.emulated_link import EmulatedTransport, LinkTime
from kv_transfer.events import Committed, KVEvent, OutgoingClosed, PairLost, PairReady, Shipped
from kv_transfer.loopback import LoopbackChannel, LoopbackNetwork, LoopbackTransport
from tests.kv_transfer.kv_fakes import LAYOUT, ByteStore, frame_bytes_for

BLOCK_S = 1.0  # of one block alone; frames hold one
STEP_S = 0.05
NUM_SLOTS = 4
CONFIG = KVTransferConfig(
    transport="loopback", mode="staged", frame_bytes=frame_bytes_for(LAYOUT.num_layers), num_slots=NUM_SLOTS,
    lease_s=100.0, transfer_timeout_s=100.0, quiet_s=100.0,
)  # fmt: skip


class Node:
    """One worker's KV plane behind an emulated card, and when what happened to it."""

    def __init__(self, network: LoopbackNetwork, name: str, epoch: int, now_s: float) -> None:
        self.name, self.epoch = name, epoch
        self.store = ByteStore(seed=epoch)
        self.transport = EmulatedTransport(network.transport(name), LinkTime(layer_block_s=BLOCK_S / LAYOUT.num_layers))
        self.events: list[KVEvent] = []
        self.core = PlaneCore(self.store, CONFIG, epoch, self.events.append, self.transport, now_s)


class Nodes:
    """Nodes of one clock, every pair of them connected."""

    def __init__(self, *names: str) -> None:
        self.now_s = 100.0
        network = LoopbackNetwork()
        self.by_name: Mapping[str, Node] = {
            name: Node(network, name, index + 1, self.now_s) for index, name in enumerate(names)
        }
        for nonce, (one, other) in enumerate(itertools.combinations(self.by_name.values(), 2)):
            for node, peer in ((one, other), (other, one)):
                node.core.connect(
                    peer.name, peer.epoch, peer.name.encode(), nonce, CONFIG.frame_bytes, CONFIG.num_slots
                )
        self.settle()
        assert all(isinstance(event, PairReady) for node in self.by_name.values() for event in node.events)

    def settle(self) -> None:
        while any([node.core.poll(self.now_s) for node in self.by_name.values()]):  # noqa: C419  each is polled
            pass

    def run(self, *transfers: tuple[str, str, int]) -> list[float]:
        """Move blocks from one node to another, all at once; returns how long each took until it was committed."""
        begun_s = self.now_s
        for seq, (source, target, num_blocks) in enumerate(transfers, start=1):
            sender, receiver = self.by_name[source], self.by_name[target]
            block_ids = list(range(num_blocks))
            receiver.core.open_incoming(source, seq, 1, block_ids, 0, ttl_s=100.0)
            sender.core.open_outgoing(target, seq, receiver.epoch, 1, 0, num_blocks, lease_s=100.0)
            sender.core.ship(seq, block_ids, num_blocks, last=True)
        took_s: dict[int, float] = {}
        while len(took_s) < len(transfers):
            self.settle()
            for seq, (source, target, _) in enumerate(transfers, start=1):
                self._promise(seq, self.by_name[source], self.by_name[target])
                if any(isinstance(e, Committed) and e.seq == seq for e in self.by_name[target].events):
                    took_s.setdefault(seq, self.now_s - begun_s)
            self.now_s += STEP_S
            assert self.now_s < begun_s + 100.0, "the transfers do not end"
        return [took_s[seq] for seq in sorted(took_s)]

    def _promise(self, seq: int, sender: Node, receiver: Node) -> None:
        """Commit, as the prefill role does once every frame is posted."""
        for event in [event for event in sender.events if isinstance(event, Shipped) and event.seq == seq]:
            sender.events.remove(event)
            receiver.core.commit_incoming(seq, 1, event.num_frames, event.nbytes)


def about(seconds: Sequence[float]) -> object:
    return pytest.approx(list(seconds), abs=4 * STEP_S)


def test_an_undisturbed_transfer_takes_its_bytes_once_not_once_per_card() -> None:
    assert Nodes("a", "b").run(("a", "b", 12)) == about([12.0])


def test_what_arrives_late_arrives_whole() -> None:
    nodes = Nodes("a", "b")
    nodes.run(("a", "b", 9))
    a, b = nodes.by_name["a"].store, nodes.by_name["b"].store
    assert b.blocks(range(9)) == a.blocks(range(9))


def test_senders_of_one_receiver_share_its_card_evenly() -> None:
    assert Nodes("a", "b", "c").run(("a", "c", 8), ("b", "c", 8)) == about([15.0, 16.0])


def test_receivers_of_one_sender_share_its_card_evenly() -> None:
    assert Nodes("a", "b", "c").run(("a", "b", 8), ("a", "c", 8)) == about([15.0, 16.0])


def test_a_short_transfer_does_not_wait_for_the_whole_of_a_long_one() -> None:
    long_s, short_s = Nodes("a", "b", "c").run(("a", "c", 12), ("b", "c", 2))
    assert short_s <= 2 * 2 * BLOCK_S + NUM_SLOTS * BLOCK_S
    assert long_s == pytest.approx(14.0, abs=4 * STEP_S)


def test_pairs_without_a_common_card_do_not_disturb_each_other() -> None:
    assert Nodes("a", "b", "c", "d").run(("a", "b", 8), ("c", "d", 8)) == about([8.0, 8.0])


def test_both_directions_of_a_card_are_free_at_once() -> None:
    assert Nodes("a", "b").run(("a", "b", 8), ("b", "a", 8)) == about([8.0, 8.0])


def test_a_transfer_that_is_closed_under_way_leaves_the_card_to_the_others() -> None:
    nodes = Nodes("a", "b", "c")
    nodes.by_name["c"].core.open_incoming("a", 9, 1, list(range(10)), 0, ttl_s=100.0)
    nodes.by_name["a"].core.open_outgoing("c", 9, nodes.by_name["c"].epoch, 1, 0, 10, lease_s=100.0)
    nodes.by_name["a"].core.ship(9, list(range(10)), 10, last=True)
    nodes.settle()
    nodes.by_name["a"].core.disconnect("c")
    nodes.settle()
    assert any(isinstance(event, OutgoingClosed) for event in nodes.by_name["a"].events)
    assert nodes.run(("b", "c", 4))[0] <= 4 * BLOCK_S + 2 * BLOCK_S


def test_the_thread_sleeps_until_the_next_frame_is_due_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(LoopbackTransport, "wait", lambda _, timeout_s: waits.append(timeout_s))
    nodes = Nodes("a", "b")
    a, b = nodes.by_name["a"], nodes.by_name["b"]
    a.transport.wait(0.05)
    b.core.open_incoming("a", 1, 1, [0, 1], 0, ttl_s=100.0)
    a.core.open_outgoing("b", 1, b.epoch, 1, 0, 2, lease_s=100.0)
    a.core.ship(1, [0, 1], 2, last=True)
    nodes.settle()
    a.transport.wait(30.0)
    assert waits == pytest.approx([0.05, BLOCK_S])


def test_a_frame_that_cannot_leave_ends_the_transfers_of_its_pair_and_of_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = Nodes("a", "b", "c")
    a, b, c = (nodes.by_name[name] for name in "abc")
    send, num_sent = LoopbackChannel.send_frame, 0

    def breaks(channel: LoopbackChannel, slot: int, nbytes: int) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 3:
            raise BufferError("the card is on fire")
        send(channel, slot, nbytes)

    monkeypatch.setattr(LoopbackChannel, "send_frame", breaks)
    for seq, node in ((8, b), (9, c)):  # both under way when the third frame leaves, one of 9's
        node.core.open_incoming("a", seq, 1, list(range(4)), 0, ttl_s=100.0)
        a.core.open_outgoing(node.name, seq, node.epoch, 1, 0, 4, lease_s=100.0)
    a.core.ship(9, list(range(4)), 4, last=True)
    nodes.settle()
    while num_sent < 3:
        nodes.now_s += STEP_S
        nodes.settle()
    lost = [event for event in a.events if isinstance(event, PairLost)]
    assert [(event.peer, event.reason) for event in lost] == [("c", "a frame could not leave: the card is on fire")]
    assert [event.seq for event in a.events if isinstance(event, OutgoingClosed)] == [9]
    assert "a frame could not leave" in caplog.text
    a.core.close_outgoing(8)
    nodes.settle()
    assert nodes.run(("a", "b", 4))[0] <= 4 * BLOCK_S + 2 * BLOCK_S
