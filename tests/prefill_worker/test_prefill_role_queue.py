"""The prefill role's queue under load: nothing that is doomed starts, and nothing is asked twice."""

from __future__ import annotations

import pytest

from baton.errors import Unavailable
from baton.request import Request, SamplingParams
from baton.v1 import kv_pb2, worker_pb2
from prefill_worker.prefill_queue import PATIENCE_S
from prefill_worker.prefill_role import PrefillRole
from tests.worker.noting_ports import Notes
from worker.role import PullSource

ROUTER, OTHER_ROUTER = 1, 2
LEASE_S = 5.0


def make_role(notes: Notes, max_queued: int = 100) -> PrefillRole:
    role = PrefillRole(
        notes,
        block_size=16,
        lease_s=LEASE_S,
        transfer_timeout_s=10.0,
        max_resends=2,
        max_queued=max_queued,
    )
    role.on_link_ready("d")
    return role


def submit(
    role: PrefillRole,
    n: int,
    router: int = ROUTER,
    *,
    priority: int = 0,
    max_tokens: int = 5,
    pull: PullSource | None = None,
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens)
    request = Request(seq=router << 32 | n, token_ids=(9,) * 150, sampling=sampling, priority=priority)
    role.on_submit(request, "d", deadline_s=100.0, pull=pull)


def reserves(notes: Notes) -> list[int]:
    return [seq & 0xFFFF for seq in notes.sent_seqs("reserve")]


def test_a_lost_routers_prompts_are_not_started_while_they_are_ended() -> None:
    notes = Notes()
    role = make_role(notes)
    for n in range(20):
        submit(role, n)
    submit(role, 50, OTHER_ROUTER)
    assert reserves(notes) == [0, 1]
    role.on_router_lost(ROUTER)
    assert reserves(notes) == [0, 1, 50]
    assert role.num_open() == 1
    assert role.queued_tokens() == [150]


def test_prompts_start_by_priority_and_a_cancelled_one_makes_room() -> None:
    notes = Notes()
    role = make_role(notes)
    for n in range(2, 6):
        submit(role, n, priority=n)
    assert reserves(notes) == [2, 3]
    assert role.on_cancel(ROUTER << 32 | 4)
    assert reserves(notes) == [2, 3]
    assert role.on_cancel(ROUTER << 32 | 2)
    assert reserves(notes) == [2, 3, 5]
    assert notes.sent_seqs("cancel") == [ROUTER << 32 | 2]


def test_a_link_that_does_not_take_the_reserve_leaves_the_prompt_queued() -> None:
    notes = Notes(links_up=False)
    role = make_role(notes)
    submit(role, 1)
    assert reserves(notes) == []
    notes.links_up = True
    role.on_tick()
    assert reserves(notes) == [1]


def test_a_lost_link_ends_its_prompts_a_lease_later_but_those_that_need_no_decode_worker() -> None:
    notes = Notes()
    role = make_role(notes)
    submit(role, 1)
    submit(role, 2)
    submit(role, 3)
    submit(role, 4, max_tokens=1)
    role.on_link_lost("d", Unavailable("gone"))
    assert [(seq & 0xFFFF, error.message) for seq, error in notes.lost_] == [(n, "gone") for n in (1, 2, 3)]
    assert notes.ended_ == []
    notes.now += LEASE_S + 0.1
    role.on_tick()
    assert [message.seq & 0xFFFF for message in notes.ended_] == [1, 2, 3]
    assert notes.added == [ROUTER << 32 | 4]


def test_prompts_that_are_pulled_slowly_hold_nobody_up_and_count_as_waiting() -> None:
    notes = Notes()
    role = make_role(notes)
    for n in (1, 2):
        submit(role, n, max_tokens=1, pull=PullSource("holder", 9))
    submit(role, 3)
    assert (reserves(notes), role.queued_tokens()) == ([], [150, 150, 150])
    notes.now += 2 * PATIENCE_S
    role.on_tick()
    assert (reserves(notes), role.queued_tokens()) == ([3], [150, 150, 150])


def test_deadlines_end_queued_and_reserving_prompts_alike() -> None:
    notes = Notes()
    role = make_role(notes)
    for n in range(5):
        submit(role, n)
    notes.now = 101.0
    role.on_tick()
    assert {message.error.code for message in notes.ended_} == {"deadline_exceeded"}
    assert (role.num_open(), role.queued_tokens()) == (0, [])
    assert reserves(notes) == [0, 1]


@pytest.mark.parametrize(("draining", "code"), [(False, "overloaded"), (True, "unavailable")])
def test_a_full_queue_is_overloaded_but_a_draining_worker_says_that_first(draining: bool, code: str) -> None:
    notes = Notes()
    role = make_role(notes, max_queued=2)
    submit(role, 1)
    submit(role, 2)
    notes.draining = draining
    submit(role, 3)
    assert [error.code for _, error in notes.refused_] == [code]


def test_a_grant_that_is_said_twice_is_one_and_another_for_the_same_prompt_is_given_back() -> None:
    notes = Notes()
    role = make_role(notes)
    submit(role, 1)
    ticket = kv_pb2.Ticket(seq=ROUTER << 32 | 1, epoch=3, generation=7, num_blocks=10)
    for _ in range(2):
        assert role.on_link("d", kv_pb2.LinkMessage(grant=kv_pb2.Grant(ticket=ticket)))
    assert notes.added == [ticket.seq]
    assert notes.sent_seqs("cancel") == []
    other = kv_pb2.Ticket(seq=ticket.seq, epoch=3, generation=8, num_blocks=10)
    assert role.on_link("d", kv_pb2.LinkMessage(grant=kv_pb2.Grant(ticket=other)))
    assert [message.cancel.generation for message in notes.sent if message.HasField("cancel")] == [8]


def test_a_reserve_that_decode_does_not_know_is_lost_and_one_that_is_granted_does_not() -> None:
    notes = Notes()
    role = make_role(notes)
    lost = kv_pb2.TicketLost(seq=ROUTER << 32 | 1, error=worker_pb2.ErrorInfo(code="transfer_failed"))
    submit(role, 1)
    assert [(live.seq, live.generation) for live in role.live_tickets("d")] == [(lost.seq, 0)]
    ticket = kv_pb2.Ticket(seq=lost.seq, epoch=3, generation=7, num_blocks=10)
    assert role.on_link("d", kv_pb2.LinkMessage(grant=kv_pb2.Grant(ticket=ticket)))
    assert [(live.seq, live.generation) for live in role.live_tickets("d")] == [(lost.seq, 7)]
    assert role.on_link("d", kv_pb2.LinkMessage(ticket_lost=lost))  # of a ping that the Grant has crossed
    assert notes.ended_ == []
    submit(role, 2)
    lost.seq = ROUTER << 32 | 2
    assert role.on_link("d", kv_pb2.LinkMessage(ticket_lost=lost))
    assert [(seq, error.code) for seq, error in notes.lost_] == [(lost.seq, "transfer_failed")]
    assert notes.sent_seqs("cancel") == []  # there is nothing to give back
