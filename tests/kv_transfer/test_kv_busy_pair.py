"""A pair whose receiver always has frames waiting keeps its deadlines all the same."""

from __future__ import annotations

from kv_transfer.events import Committed, IncomingClosed, Incomplete, KVEvent, OutgoingClosed, Shipped
from kv_transfer.loopback import Faults
from tests.kv_transfer.kv_fakes import LAYOUT, TwoCores

NUM_BLOCKS = 8  # of each transfer of the flood
SEQ = 1  # of the transfer that is looked at; its blocks are above those of the flood


class Flood:
    """Transfers without end from `a` to `b`, where `a` takes three turns for each of `b`: so frames wait at `b` at all times."""

    def __init__(self) -> None:
        self.cores = TwoCores()
        self.cores.connect()
        self.cores.take_events()
        self.next_seq = 100

    def run(self, duration_s: float) -> list[KVEvent]:
        """Events of the transfer that is looked at."""
        seen: list[KVEvent] = []
        stop_s = self.cores.now_s + duration_s
        while self.cores.now_s < stop_s:
            if self.cores.a.load().num_outgoing < 4:
                self._open_one()
            for _ in range(3):
                self.cores.a.poll(self.cores.now_s)
            self.cores.now_s += 0.005
            self.cores.b.poll(self.cores.now_s)
            seen += self._play_roles()
        return seen

    def _open_one(self) -> None:
        self.next_seq += 1
        self.cores.b.open_incoming("a", self.next_seq, 1, range(NUM_BLOCKS), 0, ttl_s=5.0)
        self.cores.a.open_outgoing("b", self.next_seq, self.cores.EPOCH_B, 1, 0, NUM_BLOCKS, lease_s=5.0)
        self.cores.a.ship(self.next_seq, range(NUM_BLOCKS), NUM_BLOCKS, last=True)

    def _play_roles(self) -> list[KVEvent]:
        events_a, events_b = self.cores.take_events()
        for event in events_a:
            if isinstance(event, Shipped) and event.seq != SEQ:
                self.cores.b.commit_incoming(event.seq, 1, event.num_frames, event.nbytes)
        for event in events_b:
            if isinstance(event, Committed) and event.seq != SEQ:
                self.cores.a.close_outgoing(event.seq)
        ours = (Shipped, OutgoingClosed, Committed, Incomplete, IncomingClosed)
        return [event for event in events_a + events_b if isinstance(event, ours) and event.seq == SEQ]


def test_a_silent_ticket_expires_while_other_transfers_keep_the_pair_busy() -> None:
    flood = Flood()
    flood.cores.b.open_incoming("a", SEQ, 1, [30, 31], 0, ttl_s=1.0)
    assert flood.run(2.0) == [IncomingClosed(SEQ, "expired")]


def test_lost_frames_are_asked_for_while_other_transfers_keep_the_pair_busy() -> None:
    flood = Flood()
    cores = flood.cores
    cores.b.open_incoming("a", SEQ, 1, [30, 31], 0, ttl_s=5.0)
    cores.a.open_outgoing("b", SEQ, cores.EPOCH_B, 1, 0, 2, lease_s=5.0)
    cores.network.faults = Faults(loss=1.0)
    cores.a.ship(SEQ, [30, 31], 2, last=True)
    cores.a.poll(cores.now_s)
    cores.network.faults = Faults()
    cores.b.commit_incoming(SEQ, 1, 1, 2 * LAYOUT.block_bytes)
    assert Incomplete(SEQ, 1, (0,)) in flood.run(1.0)


def test_the_lease_of_what_a_busy_receiver_sends_itself_expires() -> None:
    flood = Flood()
    flood.cores.b.open_outgoing("a", SEQ, flood.cores.EPOCH_A, 1, 0, 2, lease_s=1.0)
    assert flood.run(2.0) == [OutgoingClosed(SEQ, "lease expired")]
