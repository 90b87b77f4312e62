"""What workers say crosses what the router decides: nobody is left running, nobody innocent is blamed, nothing waits in vain."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import Internal, PeerRefused, TransferFailed, Unavailable, WorkerLost
from baton.request import FinishReason, Logprobs
from baton.v1 import worker_pb2
from router.events import SequenceRefused, WorkerGone
from router.handoff import HOLE_S, SinkFailed
from tests.router.attempt_rig import FIRST, VOCAB_SIZE, Run

LOST = TransferFailed("the link broke")


async def test_a_lost_ack_does_not_end_a_stream_that_decode_has_taken_up() -> None:
    run = Run()
    await run.settle()
    run.say("p0", 0)
    run.say("d0", 1, 2)
    run.lose_handoff(LOST)
    await run.settle()
    assert not run.task.done()
    assert (run.prefill.cancels, run.prefill.reroutes) == ([False], [])
    run.end("p0", worker_pb2.OUTCOME_CANCELLED)
    run.say("d0", *range(3, 10), finish=FinishReason.LENGTH)
    await run.task
    assert run.sink.token_ids == list(range(FIRST, FIRST + 10))
    assert run.decodes[0].cancels == []


async def test_a_decode_worker_that_is_left_is_told_to_stop_and_forget() -> None:
    """It may have adopted what prefill believes to be lost; it would run to the end, and tell a Resume of tokens nobody got."""
    run = Run(parks=True)
    await run.settle()
    run.say("p0", 0)
    run.lose_handoff(LOST)
    await run.settle()
    assert run.decodes[0].cancels == [False]
    assert run.prefill.reroutes == ["d1"]
    run.hand_over(reroute=1)
    run.say("d1", *range(1, 10), finish=FinishReason.LENGTH)
    await run.task


async def test_a_decode_worker_that_cannot_be_left_for_another_one_is_told_to_stop() -> None:
    run = Run(num_decodes=1)
    await run.settle()
    run.say("p0", 0)
    run.lose_handoff(LOST)
    with pytest.raises(TransferFailed):
        await run.task
    assert len(run.decodes[0].cancels) == len(run.prefill.cancels) == 1


@pytest.mark.parametrize("worker", ["p0", "d0"])
async def test_a_worker_that_gives_up_by_a_flag_is_told_to_stop_where_another_one_goes_on(worker: str) -> None:
    run = Run(num_decodes=1)
    await run.settle()
    if worker == "d0":
        run.say("p0", 0)
        run.hand_over()
    run.say(worker, 1 if worker == "d0" else 0, finish=FinishReason.CANCELLED)
    with pytest.raises(Unavailable):
        await run.task
    assert len((run.prefill if worker == "p0" else run.decodes[0]).cancels) == 1
    assert run.attempt.blamed == worker


async def test_who_gave_up_is_whoever_said_so_also_where_the_other_one_s_token_came_last() -> None:
    """Else prefill, which did its part, would be taken for lost, and decode waited for that says nothing any more."""
    run = Run(num_decodes=1)
    await run.settle()
    run.say("d0", 1, 2, finish=FinishReason.CANCELLED)
    run.end("d0", worker_pb2.OUTCOME_FINISHED)
    run.say("p0", 0)
    run.hand_over()
    async with asyncio.timeout(HOLE_S):
        with pytest.raises(Unavailable, match="worker d0 gave the sequence up"):
            await run.task
    assert run.attempt.blamed == "d0"
    assert run.sink.token_ids == [FIRST, FIRST + 1]


async def test_a_token_that_a_worker_left_out_is_missed_also_where_an_earlier_one_only_came_late() -> None:
    run = Run(num_decodes=1)
    await run.settle()
    run.say("d0", 1, 2)
    run.end("d0", worker_pb2.OUTCOME_FINISHED)  # without the last one
    await run.settle()
    run.say("p0", 0)
    run.hand_over()
    async with asyncio.timeout(10 * HOLE_S):
        with pytest.raises(WorkerLost, match="worker d0 left out token 3"):
            await run.task
    assert run.attempt.blamed == "d0"


@pytest.mark.parametrize("worker", ["p0", "d0"])
@pytest.mark.parametrize("logprobs", [None, Logprobs(-0.1, (7, VOCAB_SIZE), (-0.1, -3.0))])
async def test_a_token_that_is_none_is_its_worker_s_fault_and_never_shown(
    worker: str, logprobs: Logprobs | None
) -> None:
    run = Run(num_decodes=1)
    await run.settle()
    if worker == "d0":
        run.say("p0", 0)
        run.hand_over()
    token_id = VOCAB_SIZE - 1 if logprobs else VOCAB_SIZE
    run.attempt.on_token(worker, 1 if worker == "d0" else 0, token_id, FinishReason.NONE, logprobs, 1.0)
    with pytest.raises(Internal, match=rf"{worker} said a token beyond the vocabulary, \[0, 999\]"):
        await run.task
    assert run.attempt.blamed == worker
    assert (run.prefill if worker == "p0" else run.decodes[0]).num_calls == 1
    assert run.sink.token_ids == run.report.token_ids == ([FIRST] if worker == "d0" else [])


async def test_our_own_defect_blames_no_worker_and_leaves_none_running() -> None:
    run = Run()
    run.sink.breaks = True
    await run.settle()
    run.say("p0", 0)
    with pytest.raises(SinkFailed):
        await run.task
    assert run.prefill.num_calls == run.decodes[0].num_calls == 0
    assert len(run.prefill.cancels) == len(run.decodes[0].cancels) == 1


async def test_what_a_worker_said_before_it_was_left_is_no_fault_of_the_next_one() -> None:
    run = Run()
    await run.settle()
    run.say("p0", 0)
    run.lose_handoff(LOST)
    run.end("d0", worker_pb2.OUTCOME_FAILED, error=Internal("it fell over"))
    run.attempt.put(SequenceRefused("d0", LOST))
    run.attempt.put(WorkerGone("d0", "reset"))
    await run.settle()
    assert run.prefill.reroutes == ["d1"]
    assert run.decodes[1].num_calls == 0
    run.hand_over(reroute=1)
    run.say("d1", *range(1, 10), finish=FinishReason.LENGTH)
    await run.task
    assert run.report.num_reroutes == 1


async def test_prefill_that_dies_after_a_reroute_is_not_waited_for() -> None:
    """Decode's word that the link broke came first, the loss of prefill a moment later: a kill, and the stream stands still."""
    run = Run()
    await run.settle()
    run.say("p0", 0)
    run.attempt.put(SequenceRefused("d0", LOST))
    await run.settle()
    assert run.prefill.reroutes == ["d1"]
    run.attempt.put(WorkerGone("p0", "reset"))
    await run.settle()
    assert run.task.done(), f"it waits {HOLE_S} s for what cannot come"
    with pytest.raises(WorkerLost):
        await run.task
    assert run.attempt.blamed == "p0"
    assert len(run.decodes[1].cancels) == 1


async def test_prefill_may_die_once_decode_streams_whoever_was_named_before() -> None:
    run = Run()
    await run.settle()
    run.say("p0", 0)
    run.lose_handoff(LOST)
    await run.settle()
    run.say("d1", 1, 2)
    run.attempt.put(WorkerGone("p0", "reset"))
    run.say("d1", *range(3, 10), finish=FinishReason.LENGTH)
    await run.task
    assert run.report.num_tokens == 10


async def test_of_a_pair_of_which_prefill_died_prefill_is_blamed_though_decode_refuses() -> None:
    run = Run()
    await run.settle()
    run.say("p0", 0)
    run.attempt.put(WorkerGone("p0", "reset"))
    run.attempt.put(SequenceRefused("d0", LOST))
    with pytest.raises(WorkerLost):
        await run.task
    assert run.attempt.blamed == "p0"


async def test_kv_that_went_to_a_worker_we_had_left_is_made_again_elsewhere_and_prefill_is_not_blamed() -> None:
    run = Run()
    await run.settle()
    run.say("p0", 0)
    run.attempt.put(WorkerGone("d0", "reset"))
    await run.settle()
    run.hand_over(reroute=0)
    with pytest.raises(WorkerLost):
        await run.task
    assert run.attempt.blamed == "d0"


async def test_a_pair_that_does_not_fit_is_unavailable_and_nobodys_fault() -> None:
    run = Run(num_decodes=1)
    await run.settle()
    run.lose_handoff(PeerRefused("dtype differs", field="dtype"))
    with pytest.raises(Unavailable):
        await run.task
    assert run.prefill.num_calls == run.decodes[0].num_calls == 0


@pytest.mark.parametrize("num_before", [0, 4])
async def test_a_death_after_the_last_token_loses_nothing(num_before: int) -> None:
    """The limit is reached at the very moment of the death: Ended never comes."""
    run = Run(num_before=num_before)
    await run.settle()
    run.say("p0", num_before)
    run.hand_over()
    run.say("d0", *range(num_before + 1, 10), finish=FinishReason.LENGTH)
    run.attempt.put(WorkerGone("d0", "reset"))
    await run.task
    assert run.report.finish is FinishReason.LENGTH
    assert run.report.num_tokens == 10


async def test_a_stop_string_that_is_complete_at_the_death_is_the_end() -> None:
    run = Run()
    run.sink.stop_at = 4
    await run.settle()
    run.say("p0", 0)
    run.hand_over()
    run.say("d0", 1, 2, 3, 4)
    run.attempt.put(WorkerGone("d0", "reset"))
    await run.task
    assert run.report.finish is FinishReason.STOP
    assert run.report.num_tokens == 5


@pytest.mark.parametrize("stops", [False, True])
async def test_a_decode_worker_that_does_its_part_is_trusted_for_it(stops: bool) -> None:
    """Also where the router ends the sequence; the end is not waited for, since everything is known without it."""
    run = Run()
    run.sink.stop_at = 9 if stops else -1
    await run.settle()
    run.say("p0", 0)
    run.hand_over()
    await run.settle()
    run.say("d0", *range(1, 10), finish=FinishReason.NONE if stops else FinishReason.LENGTH)
    await run.task
    assert list(run.prefill.health._failed) == list(run.decodes[0].health._failed) == [False]


async def test_a_worker_that_does_both_is_trusted_once_per_sequence() -> None:
    run = Run(local=True)
    await run.settle()
    run.say("p0", *range(10), finish=FinishReason.LENGTH)
    run.end("p0", worker_pb2.OUTCOME_FINISHED)
    await run.task
    assert list(run.prefill.health._failed) == [False]
    assert run.prefill.cancels == []


async def test_prefill_counts_a_sequence_no_longer_than_it_has_it() -> None:
    """Streams last minutes: neither its load nor the probe of its breaker may wait for their ends."""
    run = Run()
    await run.settle()
    assert run.prefill.ledger.num_held == 1
    run.say("p0", 0)
    run.hand_over()
    await run.settle()
    ledger = run.prefill.ledger
    assert (ledger.num_held, ledger.waiting_tokens, ledger.used_tokens) == (0, 0, 0)
    assert run.decodes[0].ledger.num_held == 1
    run.say("d0", *range(1, 10), finish=FinishReason.LENGTH)
    await run.task
    assert run.decodes[0].ledger.num_held == 0
    assert (ledger.num_held, ledger.waiting_tokens, ledger.used_tokens) == (0, 0, 0)


async def test_a_prefill_worker_that_was_lost_counts_nothing_while_the_stream_goes_on() -> None:
    run = Run()
    await run.settle()
    run.say("p0", 0)
    run.say("d0", 1)
    run.attempt.put(WorkerGone("p0", "reset"))
    await run.settle()
    assert run.prefill.ledger.num_held == run.prefill.ledger.used_tokens == 0
    run.say("d0", *range(2, 10), finish=FinishReason.LENGTH)
    await run.task


async def test_whoever_reads_of_no_end_is_told_to_stop_when_the_call_is_left() -> None:
    run = Run(parks=True)
    await run.settle()
    run.say("p0", 0)
    run.lose_handoff(LOST)
    await run.settle()
    run.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run.task
    assert run.prefill.cancels == [True], "a client may come back for it"
    assert run.decodes[1].cancels == [True]
    assert not run.prefill.listeners
    assert not any(worker.listeners for worker in run.decodes)
    assert not any(worker.ledger.num_held for worker in (run.prefill, *run.decodes))
