"""The decode role alone: what a ticket is worth, and when it is given up."""

from __future__ import annotations

import pytest

from baton.errors import WorkerLost
from baton.request import FinishReason, Request, SampledToken, SamplingParams
from baton.v1 import kv_pb2, worker_pb2
from baton.wire import request_to_pb
from decode_worker.decode_role import DecodeRole
from engine.ports import Reservation, SequenceEnded, SequenceStats, StepResult
from kv_transfer.events import Committed, IncomingClosed, Incomplete
from tests.worker.noting_ports import Notes

LEASE_S = 5.0
SEQ = 1 << 32 | 1
PEER = "<p/1"


class Desk:
    """A role with its notes, and the messages that a prefill worker sends it."""

    def __init__(self, max_queued: int = 10) -> None:
        self.notes = Notes()
        self.role = DecodeRole(self.notes, lease_s=LEASE_S, transfer_timeout_s=10.0, max_queued=max_queued)

    def hear(self, peer: str = PEER, **message: object) -> None:
        assert self.role.on_link(peer, kv_pb2.LinkMessage(**message))  # type: ignore[arg-type]

    def reserve(self, seq: int = SEQ, ttl_ms: int = 60_000) -> None:
        request = Request(seq=seq, token_ids=(9,) * 40, sampling=SamplingParams(max_tokens=5))
        self.hear(reserve=kv_pb2.Reserve(request=request_to_pb(request), ttl_ms=ttl_ms))

    def grant(self, seq: int = SEQ) -> int:
        """Reserve and let the engine set blocks aside; returns the ticket's generation."""
        self.reserve(seq)
        self.role.on_step(StepResult(1, reserved=[Reservation(seq, (0, 1, 2), 1)]))
        return self.notes.sent[-1].grant.ticket.generation

    def commit(self, generation: int, seq: int = SEQ, epoch: int | None = None) -> None:
        epoch = self.notes.epoch if epoch is None else epoch
        self.hear(commit=kv_pb2.Commit(seq=seq, epoch=epoch, generation=generation, first_token=77))

    def run(self) -> None:
        generation = self.grant()
        self.commit(generation)
        self.role.on_kv(Committed(SEQ, generation, 100))

    @property
    def last(self) -> str:
        return self.notes.sent[-1].WhichOneof("message") or ""


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_ticket_is_adopted_once_and_acknowledged_once(desk: Desk) -> None:
    desk.run()
    desk.commit(1)
    assert desk.notes.adopted == [(SEQ, 77)]
    assert desk.notes.sent_seqs("ack") == [SEQ]
    assert desk.notes.sent_seqs("ticket_lost") == [SEQ]  # the second Commit
    assert desk.role.num_refused_commits == 1


def test_a_cancel_that_overtakes_its_reserve_refuses_it_for_a_lease(desk: Desk) -> None:
    assert not desk.role.on_cancel(SEQ)
    desk.reserve()
    assert desk.notes.sent[-1].reserve_refused.error.code == "cancelled"
    assert desk.role.num_open() == 0
    desk.notes.now += LEASE_S + 0.1
    desk.role.on_tick()
    assert len(desk.role._cancelled) == 0


@pytest.mark.parametrize(("generation", "epoch"), [(2, None), (1, 99), (0, None)])
def test_a_commit_of_another_generation_or_epoch_is_refused_and_writes_nothing(
    desk: Desk, generation: int, epoch: int | None
) -> None:
    desk.grant()
    desk.commit(generation, epoch=epoch)
    assert desk.last == "ticket_lost"
    assert desk.role.num_open() == 1
    assert desk.role.num_refused_commits == 1


def test_a_peer_cannot_commit_or_cancel_anothers_ticket(desk: Desk) -> None:
    generation = desk.grant()
    desk.hear("<x/1", commit=kv_pb2.Commit(seq=SEQ, epoch=desk.notes.epoch, generation=generation))
    desk.hear("<x/1", cancel=kv_pb2.CancelTicket(seq=SEQ, generation=generation))
    assert desk.role.num_open() == 1
    assert desk.notes.closed_incoming == []


def test_pings_of_its_own_peer_renew_a_ticket_and_without_them_it_is_given_up(desk: Desk) -> None:
    desk.grant()
    for peer, kept in ((PEER, True), ("<x/1", False)):
        desk.notes.now += LEASE_S - 0.1
        desk.hear(peer, ping=kv_pb2.LinkPing(live=[kv_pb2.LiveTicket(seq=SEQ, generation=1)]))
        desk.notes.now += 0.2
        desk.role.on_tick()
        assert (desk.notes.closed_incoming == []) is kept
    assert desk.notes.sent_seqs("ticket_lost") == [SEQ, SEQ]  # the stranger hears that it has none; then its owner


def ping(desk: Desk, generation: int) -> None:
    desk.hear(ping=kv_pb2.LinkPing(live=[kv_pb2.LiveTicket(seq=SEQ, generation=generation)]))


def test_what_a_link_lost_is_said_again_on_the_next_ping(desk: Desk) -> None:
    ping(desk, 0)
    assert desk.last == "ticket_lost"  # the Reserve never came
    generation = desk.grant()
    ping(desk, generation)
    assert desk.notes.sent_seqs("grant") == [SEQ]
    ping(desk, 0)
    assert desk.notes.sent_seqs("grant") == [SEQ, SEQ]
    assert desk.notes.sent[-1].grant.ticket == desk.notes.sent[-2].grant.ticket
    desk.commit(generation)
    desk.role.on_kv(Committed(SEQ, generation, 100))
    ping(desk, generation)
    assert desk.notes.sent_seqs("ack") == [SEQ, SEQ]
    assert desk.notes.adopted == [(SEQ, 77)]


def test_a_ticket_that_is_gone_is_lost_to_whoever_still_pings_for_it(desk: Desk) -> None:
    generation = desk.grant()
    desk.role.on_kv(IncomingClosed(SEQ, "expired"))
    num_lost = len(desk.notes.sent_seqs("ticket_lost"))
    ping(desk, generation)
    assert len(desk.notes.sent_seqs("ticket_lost")) == num_lost + 1
    assert desk.notes.sent[-1].ticket_lost.generation == generation


def test_blocks_of_a_ticket_are_dropped_only_after_the_plane_has_let_go(desk: Desk) -> None:
    generation = desk.grant()
    desk.hear(cancel=kv_pb2.CancelTicket(seq=SEQ, generation=generation))
    assert desk.notes.closed_incoming == [SEQ]
    assert desk.notes.dropped == []
    desk.role.on_kv(IncomingClosed(SEQ, ""))
    assert desk.notes.dropped == [SEQ]
    assert desk.role.num_open() == 0


def test_a_commit_that_comes_true_in_the_moment_of_a_cancel_is_not_adopted(desk: Desk) -> None:
    generation = desk.grant()
    desk.commit(generation)
    assert desk.role.on_cancel(SEQ)
    desk.role.on_kv(Committed(SEQ, generation, 100))
    assert desk.notes.adopted == []
    assert desk.notes.dropped == [SEQ]


def test_a_grant_that_cannot_be_sent_closes_its_ticket(desk: Desk) -> None:
    desk.reserve()
    desk.notes.links_up = False
    desk.role.on_step(StepResult(1, reserved=[Reservation(SEQ, (0, 1, 2), 0)]))
    assert desk.notes.closed_incoming == [SEQ]


def test_missing_frames_are_asked_for_and_an_early_end_is_told(desk: Desk) -> None:
    generation = desk.grant()
    desk.role.on_kv(Incomplete(SEQ, generation, (2, 3)))
    assert list(desk.notes.sent[-1].nack.missing_frames) == [2, 3]
    desk.role.on_kv(IncomingClosed(SEQ, "damaged"))
    assert desk.notes.sent[-1].ticket_lost.error.code == "transfer_failed"
    assert desk.notes.dropped == [SEQ]


@pytest.mark.parametrize("draining", [False, True])
def test_a_full_worker_is_overloaded_and_a_draining_one_unavailable(draining: bool) -> None:
    desk = Desk(max_queued=1)
    desk.grant()
    desk.notes.draining = draining
    desk.reserve(SEQ + 1)
    code = "unavailable" if draining else "overloaded"
    assert desk.notes.sent[-1].reserve_refused.error.code == code


def test_a_deadline_ends_a_running_sequence_to_its_router_and_a_ticket_to_its_peer(desk: Desk) -> None:
    desk.run()
    desk.grant(SEQ + 1)
    desk.notes.now += 60.1
    desk.role.on_tick()
    assert [m.error.code for m in desk.notes.ended_] == ["deadline_exceeded"]
    assert desk.notes.sent_seqs("ticket_lost") == [SEQ + 1]


def test_tokens_of_a_running_sequence_go_out_and_its_end_comes_once(desk: Desk) -> None:
    desk.run()
    token = SampledToken(SEQ, 1, 5, FinishReason.LENGTH, None)
    ended = SequenceEnded(SEQ, FinishReason.LENGTH, SequenceStats())
    desk.role.on_step(StepResult(2, tokens=[token], ended=[ended]))
    assert desk.notes.tokens == [token]
    desk.role.on_step(StepResult(3, tokens=[token], ended=[ended]))  # nothing of it is open any more
    assert desk.notes.tokens == [token]
    assert [m.outcome for m in desk.notes.ended_] == [worker_pb2.OUTCOME_FINISHED]
    desk.reserve()
    assert desk.notes.sent[-1].reserve_refused.error.field == "seq"


def test_a_prefill_worker_cannot_end_what_decode_has_adopted(desk: Desk) -> None:
    desk.run()
    desk.hear(cancel=kv_pb2.CancelTicket(seq=SEQ, generation=1, reason="transfer_failed"))
    desk.role.on_step(StepResult(2, tokens=[SampledToken(SEQ, 1, 5)]))
    assert [token.index for token in desk.notes.tokens] == [1]
    assert desk.role.num_open() == 1


@pytest.mark.parametrize("granted", [False, True])
def test_where_the_link_breaks_the_router_is_told_that_the_sequence_never_came(desk: Desk, granted: bool) -> None:
    if granted:
        desk.grant()
    else:
        desk.reserve()
    desk.role.on_link_lost(PEER, WorkerLost("it died"))
    ((seq, error),) = desk.notes.refused_
    assert (seq, error.code) == (SEQ, "transfer_failed")
    assert "it died" in error.message


def test_a_sequence_that_was_adopted_outlives_its_prefill_worker(desk: Desk) -> None:
    desk.run()
    desk.role.on_link_lost(PEER, WorkerLost("it died"))
    assert desk.notes.refused_ == []
    assert desk.role.num_open() == 1
