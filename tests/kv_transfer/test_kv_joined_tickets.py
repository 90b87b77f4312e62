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

SEQ, GENERATION = 50, 3
A, B, C = PARTS = [50, 51, 52]
End = Committed | IncomingClosed | OutgoingClosed


@dataclass
class Rig:
    """Joined tickets over parts that are ended by hand; remembers which parts it was told to close."""

    told_to_close: list[int] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    def tickets(self) -> JoinedTickets:
        return JoinedTickets(self.ends.append, self.told_to_close.append)

    def leases(self) -> JoinedLeases:
        return JoinedLeases(self.ends.append, self.told_to_close.append)


def committed(part: int, nbytes: int = 10) -> Committed:
    return Committed(part, GENERATION, nbytes)


def test_a_ticket_is_committed_when_its_last_part_is_and_not_before() -> None:
    rig = Rig()
    tickets = rig.tickets()
    tickets.open(SEQ, GENERATION, PARTS)
    tickets.on_event(committed(B, 1))
    tickets.on_event(committed(A, 20))
    assert rig.ends == []
    tickets.on_event(committed(C, 300))
    assert rig.ends == [Committed(SEQ, GENERATION, 321)]
    assert rig.told_to_close == []
    assert tickets.num_open == 0


def test_one_failed_part_closes_the_others_and_the_ticket_closes_after_the_last_of_them() -> None:
    rig = Rig()
    tickets = rig.tickets()
    tickets.open(SEQ, GENERATION, PARTS)
    tickets.on_event(committed(A))
    tickets.on_event(IncomingClosed(B, "damaged"))
    assert rig.told_to_close == [C]
    assert rig.ends == [], "C may still be written to"
    tickets.on_event(IncomingClosed(C, ""))
    assert rig.ends == [IncomingClosed(SEQ, "damaged")]


def test_a_part_that_commits_while_the_ticket_closes_does_not_commit_it() -> None:
    rig = Rig()
    tickets = rig.tickets()
    tickets.open(SEQ, GENERATION, PARTS)
    tickets.close(SEQ)
    for part in PARTS:
        tickets.on_event(committed(part))
    assert rig.ends == [IncomingClosed(SEQ, "")]
    assert rig.told_to_close == PARTS


def test_a_close_after_the_end_and_events_of_parts_that_are_not_open_change_nothing() -> None:
    rig = Rig()
    tickets = rig.tickets()
    tickets.open(SEQ, GENERATION, [A, B])
    tickets.on_event(IncomingClosed(C, "damaged"))
    tickets.on_event(committed(A))
    tickets.on_event(IncomingClosed(A, "damaged"))
    tickets.on_event(committed(B))
    tickets.close(SEQ)
    tickets.on_event(committed(B))
    assert rig.ends == [Committed(SEQ, GENERATION, 20)]
    assert rig.told_to_close == []


def test_blocks_of_a_sender_are_free_once_no_part_reads_them() -> None:
    rig = Rig()
    leases = rig.leases()
    leases.open(SEQ, GENERATION, [A, B])
    leases.on_event(OutgoingClosed(A, ""))
    assert rig.ends == []
    leases.on_event(OutgoingClosed(B, ""))
    assert rig.ends == [OutgoingClosed(SEQ, "")]


def test_one_failed_part_of_a_sender_closes_the_others_and_is_the_reason() -> None:
    rig = Rig()
    leases = rig.leases()
    leases.open(SEQ, GENERATION, [A, B])
    leases.on_event(OutgoingClosed(A, "lease expired"))
    assert rig.told_to_close == [B]
    leases.on_event(OutgoingClosed(B, ""))
    assert rig.ends == [OutgoingClosed(SEQ, "lease expired")]


def test_a_seq_can_be_used_again_after_its_end_and_not_before() -> None:
    rig = Rig()
    tickets = rig.tickets()
    tickets.open(SEQ, GENERATION, [A])
    with pytest.raises(AssertionError, match="still joined"):
        tickets.open(SEQ, GENERATION + 1, [A])
    with pytest.raises(AssertionError, match="still open"):
        tickets.open(SEQ + 100, GENERATION, [A, B])
    tickets.on_event(IncomingClosed(A, "expired"))
    tickets.open(SEQ, GENERATION + 1, [A])
    tickets.on_event(Committed(A, GENERATION + 1, 10))
    assert rig.ends == [IncomingClosed(SEQ, "expired"), Committed(SEQ, GENERATION + 1, 10)]


def test_a_close_that_is_answered_at_once_still_ends_the_whole_exactly_once() -> None:
    ends: list[End] = []
    tickets = JoinedTickets(ends.append, lambda part: tickets.on_event(IncomingClosed(part, "")))
    tickets.open(SEQ, GENERATION, PARTS)
    tickets.close(SEQ)
    tickets.open(SEQ, GENERATION, PARTS)
    tickets.on_event(IncomingClosed(A, "damaged"))
    assert ends == [IncomingClosed(SEQ, ""), IncomingClosed(SEQ, "damaged")]
    assert tickets.num_open == 0


@dataclass
class Plane:
    """What a plane does: each open part ends once; a close command is carried out later, and only where it finds the part."""

    draw: random.Random
    make_end: Callable[[int, str], End]  # of (seq, reason); "good" is the good one
    running: dict[int, bool] = field(default_factory=dict)  # by seq of the part: whether a close command is queued

    def close(self, part: int) -> None:
        assert not self.running[part], "told twice"
        self.running[part] = True

    def end_one(self, good_share: float) -> End:
        part = self.draw.choice(sorted(self.running))
        was_told = self.running.pop(part)
        if self.draw.random() < good_share:
            return self.make_end(part, "good")
        return self.make_end(part, "" if was_told else self.draw.choice(["damaged", "expired"]))


def end_of_incoming(seq: int, reason: str) -> End:
    return Committed(seq, GENERATION, seq) if reason == "good" else IncomingClosed(seq, reason)


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
    incoming: bool, nums_parts: list[int], good_share: float, close_share: float, seed: int
) -> None:
    draw = random.Random(seed)
    parts_of = {100 * seq: [100 * seq + part for part in range(count)] for seq, count in enumerate(nums_parts)}
    plane = Plane(draw, end_of_incoming if incoming else end_of_outgoing)
    ends: list[End] = []
    joined = JoinedTickets(ends.append, plane.close) if incoming else JoinedLeases(ends.append, plane.close)
    for seq, parts in parts_of.items():
        plane.running |= dict.fromkeys(parts, False)
        joined.open(seq, GENERATION, parts)
    expected: dict[int, End] = {}  # of wholes that failed, by seq: the first failure
    while plane.running:
        seq = draw.choice(sorted(parts_of))
        if draw.random() < close_share:
            joined.close(seq)
            if plane.running.keys() & set(parts_of[seq]):
                expected.setdefault(seq, plane.make_end(seq, ""))
        event = plane.end_one(good_share)
        seq = event.seq // 100 * 100
        if not isinstance(event, Committed) and (incoming or event.reason):
            expected.setdefault(seq, plane.make_end(seq, event.reason))
        joined.on_event(event)  # type: ignore[arg-type]  # the kind that matches `joined`
        over = not plane.running.keys() & set(parts_of[seq])
        assert len([end for end in ends if end.seq == seq]) == over
    for end in ends:
        whole = Committed(end.seq, GENERATION, sum(parts_of[end.seq])) if incoming else OutgoingClosed(end.seq, "")
        assert end == expected.get(end.seq, whole)
    assert joined.num_open == 0
