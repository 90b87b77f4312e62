"""Parts end in any order, at any moment, well or not: the whole ends once, after them, and says what they said."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.events import Committed, IncomingClosed, OutgoingClosed
from kv_transfer.joined_tickets import JoinedLeases, JoinedTickets

SEQ, GENERATION = 5, 3
PEERS = ["a", "b", "c"]
End = Committed | IncomingClosed | OutgoingClosed


@dataclass
class Rig:
    """Joined tickets over parts that are ended by hand; remembers which parts it was told to close."""

    told_to_close: list[tuple[str, int]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    def tickets(self) -> JoinedTickets:
        return JoinedTickets(self.ends.append, lambda peer, seq: self.told_to_close.append((peer, seq)))

    def leases(self) -> JoinedLeases:
        return JoinedLeases(self.ends.append, lambda peer, seq: self.told_to_close.append((peer, seq)))


def committed(nbytes: int = 10) -> Committed:
    return Committed(SEQ, GENERATION, nbytes)


def test_a_ticket_is_committed_when_its_last_part_is_and_not_before() -> None:
    rig = Rig()
    tickets = rig.tickets()
    tickets.open(SEQ, GENERATION, PEERS)
    tickets.on_event("b", committed(1))
    tickets.on_event("a", committed(20))
    assert rig.ends == []
    tickets.on_event("c", committed(300))
    assert rig.ends == [Committed(SEQ, GENERATION, 321)]
    assert rig.told_to_close == []
    assert tickets.num_open == 0


def test_one_failed_part_closes_the_others_and_the_ticket_closes_after_the_last_of_them() -> None:
    rig = Rig()
    tickets = rig.tickets()
    tickets.open(SEQ, GENERATION, PEERS)
    tickets.on_event("a", committed())
    tickets.on_event("b", IncomingClosed(SEQ, "damaged"))
    assert rig.told_to_close == [("c", SEQ)]
    assert rig.ends == [], "c may still be written to"
    tickets.on_event("c", IncomingClosed(SEQ, ""))
    assert rig.ends == [IncomingClosed(SEQ, "damaged")]


def test_a_part_that_commits_while_the_ticket_closes_does_not_commit_it() -> None:
    rig = Rig()
    tickets = rig.tickets()
    tickets.open(SEQ, GENERATION, PEERS)
    tickets.close(SEQ)
    for peer in PEERS:
        tickets.on_event(peer, committed())
    assert rig.ends == [IncomingClosed(SEQ, "")]


def test_a_close_after_the_end_and_events_of_unknown_parts_change_nothing() -> None:
    rig = Rig()
    tickets = rig.tickets()
    tickets.open(SEQ, GENERATION, ["a", "b"])
    tickets.on_event("stranger", IncomingClosed(SEQ, "damaged"))
    tickets.on_event("a", committed())
    tickets.on_event("a", IncomingClosed(SEQ, "damaged"))
    tickets.on_event("b", committed())
    tickets.close(SEQ)
    tickets.on_event("b", committed())
    assert rig.ends == [Committed(SEQ, GENERATION, 20)]
    assert rig.told_to_close == []


def test_blocks_of_a_sender_rank_are_free_once_no_part_reads_them() -> None:
    rig = Rig()
    leases = rig.leases()
    leases.open(SEQ, GENERATION, ["a", "b"])
    leases.on_event("a", OutgoingClosed(SEQ, ""))
    assert rig.ends == []
    leases.on_event("b", OutgoingClosed(SEQ, ""))
    assert rig.ends == [OutgoingClosed(SEQ, "")]


def test_one_failed_part_of_a_sender_rank_closes_the_others_and_is_the_reason() -> None:
    rig = Rig()
    leases = rig.leases()
    leases.open(SEQ, GENERATION, ["a", "b"])
    leases.on_event("a", OutgoingClosed(SEQ, "lease expired"))
    assert rig.told_to_close == [("b", SEQ)]
    leases.on_event("b", OutgoingClosed(SEQ, ""))
    assert rig.ends == [OutgoingClosed(SEQ, "lease expired")]


def test_a_seq_can_be_joined_again_after_its_end_and_not_before() -> None:
    rig = Rig()
    tickets = rig.tickets()
    tickets.open(SEQ, GENERATION, ["a"])
    with pytest.raises(AssertionError, match="still joined"):
        tickets.open(SEQ, GENERATION + 1, ["a"])
    tickets.on_event("a", IncomingClosed(SEQ, "expired"))
    tickets.open(SEQ, GENERATION + 1, ["a"])
    tickets.on_event("a", Committed(SEQ, GENERATION + 1, 10))
    assert rig.ends == [IncomingClosed(SEQ, "expired"), Committed(SEQ, GENERATION + 1, 10)]


def test_a_close_that_is_answered_at_once_still_ends_the_whole_exactly_once() -> None:
    ends: list[End] = []
    tickets = JoinedTickets(ends.append, lambda peer, seq: tickets.on_event(peer, IncomingClosed(seq, "")))
    tickets.open(SEQ, GENERATION, PEERS)
    tickets.close(SEQ)
    tickets.open(SEQ, GENERATION, PEERS)
    tickets.on_event("a", IncomingClosed(SEQ, "damaged"))
    assert ends == [IncomingClosed(SEQ, ""), IncomingClosed(SEQ, "damaged")]
    assert tickets.num_open == 0


@dataclass
class Parts:
    """What planes do: each open part ends once; a close command is carried out later, and only where it finds the part."""

    running: dict[tuple[str, int], bool]  # by (peer, seq): whether a close command is queued
    draw: random.Random
    make_end: Callable[[int, str], End]  # of (seq, reason); "good" is the good one

    def close(self, peer: str, seq: int) -> None:
        assert not self.running.get((peer, seq), False), "told twice"
        if (peer, seq) in self.running:
            self.running[peer, seq] = True

    def end_one(self, good_share: float) -> tuple[str, End]:
        peer, seq = self.draw.choice(sorted(self.running))
        was_told = self.running.pop((peer, seq))
        if self.draw.random() < good_share:
            return peer, self.make_end(seq, "good")
        return peer, self.make_end(seq, "" if was_told else self.draw.choice(["damaged", "expired"]))


def end_of_incoming(seq: int, reason: str) -> End:
    return Committed(seq, GENERATION, 10 + seq) if reason == "good" else IncomingClosed(seq, reason)


def end_of_outgoing(seq: int, reason: str) -> End:
    return OutgoingClosed(seq, "" if reason == "good" else reason)


@given(
    st.booleans(),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.7, 0.95, 1.0]),
    st.sampled_from([0.0, 0.0, 0.1]),
    st.integers(0, 2**32),
)
def test_in_any_order_of_events_each_whole_ends_exactly_once_after_its_parts_and_as_they_ended(
    incoming: bool, num_peers: list[int], good_share: float, close_share: float, seed: int
) -> None:
    draw = random.Random(seed)
    wholes = {seq: [f"peer{index}" for index in range(count)] for seq, count in enumerate(num_peers)}
    parts = Parts({}, draw, end_of_incoming if incoming else end_of_outgoing)
    ends: list[End] = []
    joined = JoinedTickets(ends.append, parts.close) if incoming else JoinedLeases(ends.append, parts.close)
    expected: dict[int, End] = {}
    for seq, peers in wholes.items():
        parts.running |= {(peer, seq): False for peer in peers}
        joined.open(seq, GENERATION, peers)
    while parts.running:
        seq = draw.choice(sorted(wholes))
        if draw.random() < close_share:
            joined.close(seq)
            if any(running == seq for _, running in parts.running):
                expected.setdefault(seq, parts.make_end(seq, ""))
        peer, event = parts.end_one(good_share)
        bad = isinstance(event, IncomingClosed) or (isinstance(event, OutgoingClosed) and event.reason != "")
        if bad:
            expected.setdefault(event.seq, event)
        joined.on_event(peer, event)  # type: ignore[arg-type]  # the kind that matches `joined`
        over = not any(running == event.seq for _, running in parts.running)
        assert len([end for end in ends if end.seq == event.seq]) == over
    for end in ends:
        whole = Committed(end.seq, GENERATION, len(wholes[end.seq]) * (10 + end.seq))
        assert end == expected.get(end.seq, whole if incoming else OutgoingClosed(end.seq, ""))
    assert joined.num_open == 0
