"""Resumed calls: no token and no character lost, repeated or changed, wherever the stream broke and whoever goes on with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
import pytest

from baton.errors import Cancelled, InvalidRequest, NotFound
from baton.model_files import ModelFiles
from baton.request import FinishReason, Request, Resumption, SamplingParams
from baton.v1 import router_state_pb2, serving_pb2, worker_pb2
from baton.wire import request_to_pb
from router.grpc_messages import to_spec
from router.resume import KnownToken, Told, call_key, join, take_up, within
from tests.router.router_rig import Answer, request, until
from tests.router.two_routers import TwoRouters, read, resumable, two_routers


@pytest.fixture
async def rig(files: ModelFiles) -> AsyncIterator[TwoRouters]:
    async with two_routers(files) as rig:
        yield rig


@pytest.mark.parametrize("at", [1, 2, 7, 19])
async def test_a_broken_stream_goes_on_at_another_router_where_it_was(rig: TwoRouters, at: int) -> None:
    whole = await rig.generate(request(max_tokens=20))
    before = await rig.broken(resumable(max_tokens=20), at)
    after = await rig.resume("r1", at)
    assert after.status is None
    assert before.token_ids + after.token_ids == whole.token_ids
    assert before.text + after.text == whole.text
    assert [chunk.index for chunk in after.chunks] == list(range(at, 20))
    assert after.done is not None
    assert after.done.usage.completion_tokens == 20
    assert after.done.usage.prompt_tokens == whole.done.usage.prompt_tokens  # type: ignore[union-attr]
    assert rig.prefill.submits[-1].request.num_output_tokens >= at
    await rig.idle()


async def test_text_is_whole_wherever_the_stream_breaks_between_characters_and_stop_strings(rig: TwoRouters) -> None:
    token_of = rig.front_end.tokenizer.table.token_bytes.index
    heart = [token_of(bytes([byte])) for byte in "\N{HEAVY BLACK HEART}".encode()]
    script = [300, *heart, 301, *heart, 302, 303]
    for worker in rig.workers:
        worker.script.tokens = script
    whole = (await rig.generate(request(max_tokens=10, ignore_eos=True))).text
    assert "\N{HEAVY BLACK HEART}" in whole
    stop = whole[-3:]
    for number, at in enumerate(range(1, 9)):
        made = resumable(f"s{number}", max_tokens=10, ignore_eos=True)
        made.stop.append(stop)
        before = await rig.broken(made, at)
        after = await rig.resume(f"s{number}", at)
        assert before.text + after.text == whole[:-3], f"broken after {at} tokens"
        assert after.done is not None
        assert after.done.finish_reason == serving_pb2.FINISH_REASON_STOP
        assert after.done.choices[0].stop_match == stop


async def test_an_answer_that_is_whole_can_be_fetched_again_from_anywhere_in_it(rig: TwoRouters) -> None:
    whole = await rig.generate(resumable(max_tokens=8))
    for at in (0, 5, 8):
        rest = await rig.resume("r1", at)
        assert rest.token_ids == whole.token_ids[at:]
        assert rest.done is not None
        assert rest.done.finish_reason == serving_pb2.FINISH_REASON_LENGTH
    assert len(rig.prefill.submits) == 1, "nothing is computed again"


async def test_each_of_several_answers_goes_on_where_it_was(rig: TwoRouters) -> None:
    rig.decode.script.pause_at = 5
    rig.decode.script.decode_gate.clear()
    call = rig.stub.Generate(resumable(max_tokens=9, n=3, seed=1))
    got: list[list[int]] = [[], [], []]
    async for response in call:
        got[response.chunk.choice] += response.chunk.token_ids
        if sum(map(len, got)) == 15:
            break
    call.cancel()
    await rig.idle()
    rig.decode.script.decode_gate.set()
    assert [len(tokens) for tokens in got] == [5, 5, 5]
    got[1], got[2] = got[1][:3], []
    after = await rig.resume("r1", *map(len, got))
    for chunk in after.chunks:
        assert chunk.index == len(got[chunk.choice])
        got[chunk.choice] += chunk.token_ids
    assert got == [list(range(300, 309))] * 3
    assert after.done is not None
    assert [end.choice for end in after.done.choices] == [0, 1, 2]
    assert after.done.usage.completion_tokens == 27


async def test_logprobs_of_what_the_client_lacks_are_those_that_were_drawn(rig: TwoRouters) -> None:
    whole = await rig.generate(request(max_tokens=8, logprobs=3))
    before = await rig.broken(resumable(max_tokens=8, logprobs=3), 5)
    after = await rig.resume("r1", 0)

    def entries(answer: Answer) -> list[serving_pb2.Logprob]:
        return [entry for chunk in answer.chunks for entry in chunk.logprobs]

    assert len(entries(before)) == 5
    assert entries(after) == entries(whole)


async def test_a_call_that_still_runs_is_taken_over_and_its_old_stream_told_so(rig: TwoRouters) -> None:
    rig.decode.script.pause_at = 4
    rig.decode.script.decode_gate.clear()
    old = rig.stub.Generate(resumable(max_tokens=8))
    before = await read(aiter(old), 4)
    new = asyncio.create_task(rig.resume("r1", 4))
    rest = await read(aiter(old))
    await until(lambda: len(rig.prefill.submits) == 2, "the other router goes on")
    assert sum(worker.num_open for worker in rig.workers) <= 1, "one copy runs"
    rig.decode.script.decode_gate.set()
    after = await new
    assert rest.status is not None
    assert rest.status.code() is grpc.StatusCode.CANCELLED
    assert before.token_ids + after.token_ids == list(range(300, 308))
    await rig.idle()


async def test_the_same_router_takes_a_call_over_from_a_connection_whose_end_it_has_not_noticed(
    rig: TwoRouters,
) -> None:
    rig.decode.script.pause_at = 4
    rig.decode.script.decode_gate.clear()
    old = rig.stub.Generate(resumable(max_tokens=8))
    before = await read(aiter(old), 4)
    message = serving_pb2.ResumeRequest(request_id="r1", next_index=[4])
    new = asyncio.create_task(read(aiter(rig.stub.Resume(message))))
    await until(lambda: len(rig.prefill.submits) == 2, "it goes on")
    rig.decode.script.decode_gate.set()
    assert before.token_ids + (await new).token_ids == list(range(300, 308))
    await rig.idle()


async def test_of_two_routers_that_are_asked_at_once_one_goes_on_to_the_end(rig: TwoRouters) -> None:
    before = await rig.broken(resumable(max_tokens=12), 4)
    message = serving_pb2.ResumeRequest(request_id="r1", next_index=[4])
    rig.decode.script.decode_gate.clear()
    asked = [asyncio.create_task(read(aiter(stub.Resume(message)))) for stub in (rig.stub, rig.other_stub) * 3]
    await until(
        lambda: bool(rig.decode.num_open) and sum(task.done() for task in asked) == 5, "all others are turned away"
    )
    await until(lambda: sum(worker.num_open for worker in rig.workers) == 1, "nothing of theirs is left")
    rig.decode.script.decode_gate.set()
    answers = [await task for task in asked]
    (winner,) = [answer for answer in answers if answer.status is None]
    assert before.token_ids + winner.token_ids == list(range(300, 312))
    codes = {answer.status.code() for answer in answers if answer.status is not None}
    assert codes <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    await rig.idle()


@pytest.mark.parametrize("request_id", ["never", "plain"])
async def test_what_nobody_keeps_is_not_found(rig: TwoRouters, request_id: str) -> None:
    plain = request(max_tokens=8)
    plain.request_id = "plain"
    await rig.broken(plain, 4)
    answer = await rig.resume(request_id, 4)
    assert answer.status is not None
    assert answer.status.code() is grpc.StatusCode.NOT_FOUND
    assert rig.decode.num_parks == rig.prefill.num_parks == 0  # type: ignore[attr-defined]


async def test_an_aborted_call_cannot_be_resumed(rig: TwoRouters) -> None:
    await rig.broken(resumable(max_tokens=8), 4)
    with pytest.raises(grpc.aio.AioRpcError):  # none is running; what is kept goes all the same
        await rig.stub.Abort(serving_pb2.AbortRequest(request_id="r1"))
    assert (await rig.resume("r1", 4)).status.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[union-attr]


async def test_a_request_id_is_for_one_resumable_call_at_a_time_and_any_number_of_others(rig: TwoRouters) -> None:
    rig.decode.script.decode_gate.clear()
    first = asyncio.create_task(rig.generate(resumable(max_tokens=4)))
    await until(lambda: bool(rig.decode.adopted), "it runs")
    twin = await rig.generate(resumable(max_tokens=4))
    assert twin.status is not None
    assert twin.status.code() is grpc.StatusCode.ALREADY_EXISTS
    rig.decode.script.decode_gate.set()
    assert (await first).token_ids == [300, 301, 302, 303]
    plain = request(max_tokens=4)
    plain.request_id = "r2"
    answers = await asyncio.gather(*(rig.generate(plain) for _ in range(3)))
    assert [answer.token_ids for answer in answers] == [[300, 301, 302, 303]] * 3


async def test_a_client_that_says_what_it_has_can_go_on_beyond_what_the_workers_know(rig: TwoRouters) -> None:
    await rig.broken(resumable(max_tokens=8), 4)
    has = serving_pb2.TokenIds(ids=[300, 301, 302, 303, 304, 305])
    after = await rig.resume("r1", received=[has])
    assert after.token_ids == [306, 307]


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"next_index": [9]}, grpc.StatusCode.NOT_FOUND, "next_index"),
        ({"next_index": [1, 1]}, grpc.StatusCode.INVALID_ARGUMENT, "next_index"),
        ({"received": [serving_pb2.TokenIds(ids=[7])]}, grpc.StatusCode.INVALID_ARGUMENT, "received"),
        ({"request_id": ""}, grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        ({"max_flush_ms": 1_001}, grpc.StatusCode.INVALID_ARGUMENT, "max_flush_ms"),
    ],
)
async def test_a_resumption_that_makes_no_sense_is_refused_by_the_field(
    rig: TwoRouters, fields: dict[str, object], code: grpc.StatusCode, field: str
) -> None:
    await rig.broken(resumable(max_tokens=8), 4)
    message = serving_pb2.ResumeRequest(**{"request_id": "r1", **fields})  # type: ignore[arg-type]
    answer = await read(aiter(rig.other_stub.Resume(message)))
    assert answer.status is not None
    assert answer.status.code() is code
    assert answer.error is not None
    assert answer.error.field == field


@pytest.mark.parametrize("beyond", [0, 2**31])
async def test_a_resumption_with_a_token_beyond_the_vocabulary_is_refused_before_it_is_looked_for(
    rig: TwoRouters, beyond: int
) -> None:
    await rig.broken(resumable(max_tokens=8), 4)
    vocab_size = rig.other.calls.limits.vocab_size
    has = serving_pb2.TokenIds(ids=[300, 301, 302, 303, vocab_size + beyond])
    refused = await rig.resume("r1", received=[has])
    assert refused.error is not None
    assert (
        refused.error.message
        == f"received contains {vocab_size + beyond}; the limit is the vocabulary, [0, {vocab_size - 1}]"
    )
    assert (await rig.resume("r1", 4)).token_ids == [304, 305, 306, 307]


async def test_a_worker_that_cannot_be_asked_is_no_proof_that_nobody_knows_the_call(rig: TwoRouters) -> None:
    await rig.decode.kill()
    await until(lambda: bool(rig.other.fleet.unready_reason()), "the loss of decode is noticed")
    answer = await rig.resume("r1", 4)
    assert answer.status is not None
    assert answer.status.code() is grpc.StatusCode.UNAVAILABLE


# -- pure --------------------------------------------------------------------------------------------------------------


def told(
    seq: int,
    *token_ids: int,
    tail: Sequence[int] = (),
    generation: int = 0,
    choice: int = 0,
    n: int = 1,
    fingerprint: str = "",
    **fields: object,
) -> Told:
    state = router_state_pb2.CallState(request_id="r", api="grpc", n=n).SerializeToString()
    made = Request(
        seq,
        (1, 2, 3, *tail),
        SamplingParams(max_tokens=9, sample_index=choice),
        num_output_tokens=len(tail),
        resumption=Resumption(b"k", 30.0, state, generation),
    )
    sequence = worker_pb2.ParkedSequence(request=request_to_pb(made), tokens=token_ids, **fields)  # type: ignore[arg-type]
    return Told(fingerprint, sequence)


def ids(known: Sequence[KnownToken]) -> list[int]:
    return [token.token_id for token in known]


def test_prefills_token_and_decodes_make_one_answer() -> None:
    found = join([told(1, 7), told(1, 7, 8, 9)])
    assert ids(found.answers[0]) == [7, 8, 9]
    assert found.request.token_ids == (1, 2, 3)
    assert found.request.resumption is not None
    assert found.request.resumption.generation == 1


def test_the_latest_attempt_counts_and_not_the_longest_one() -> None:
    stopped = told(1, 7, 8, 9, 10)  # went on after the router had given it up
    moved = told(2, 5, tail=(7, 8))
    resumed = told(1 << 33, 6, tail=(7, 8, 5), generation=1)
    assert ids(join([stopped, moved]).answers[0]) == [7, 8, 5]
    assert ids(join([resumed, stopped, moved]).answers[0]) == [7, 8, 5, 6]


def test_a_token_beyond_the_vocabulary_and_what_follows_it_is_made_again() -> None:
    found = join([told(1, 7, 9, 10, 8, n=2), told(2, 7, choice=1, n=2)])
    assert [ids(known) for known in within(found, 10).answers] == [[7, 9], [7]]
    assert within(found, 11) == found


def test_answers_that_no_worker_has_begun_begin_anew() -> None:
    found = join([told(1, 7, n=3), told(2, 8, choice=2, n=3)])
    assert [ids(known) for known in found.answers] == [[7], [], [8]]
    points = take_up(found, [1, 0, 0], []).points
    assert [(len(point.known), point.num_shown) for point in points] == [(1, 1), (0, 0), (1, 0)]


def test_the_shortest_time_that_a_worker_knows_of_is_what_is_left() -> None:
    assert join([told(1, 7), told(1, 7, ttl_ms=2_000)]).ttl_s == 2.0
    assert join([told(1, 7)]).ttl_s is None


def test_a_whole_answer_has_its_finish() -> None:
    (known,) = join([told(1, 7, 8, finish_reason=FinishReason.LENGTH)]).answers
    assert [token.finish for token in known] == [FinishReason.NONE, FinishReason.LENGTH]


def test_tenants_do_not_share_request_ids_however_they_are_cut() -> None:
    assert len({call_key("ab", "c"), call_key("a", "bc"), call_key("", "abc"), call_key("abc", "")}) == 4


def test_a_client_cannot_have_what_was_never_said() -> None:
    found = join([told(1, 7, 8)])
    with pytest.raises(NotFound):
        take_up(found, [3], [])
    with pytest.raises(InvalidRequest):
        take_up(found, [], [[7, 9]])
    with pytest.raises(InvalidRequest):
        take_up(found, [], [[7, 8, 1, 1, 1, 1, 1, 1, 1]])
    assert take_up(found, [], [[7, 8, 1]]).points[0].num_shown == 3


def test_what_lacks_its_logprobs_is_made_again_unless_the_client_has_it() -> None:
    lacking = told(1, 7, 8)
    sequence = lacking.sequence
    sequence.request.sampling.num_logprobs = 1
    sequence.logprobs.add(entry=1, logprob=-1.0)
    found = join([lacking])
    assert len(take_up(found, [0], []).points[0].known) == 0
    assert len(take_up(found, [1], []).points[0].known) == 2


def test_a_call_goes_on_with_the_model_that_made_its_tokens() -> None:
    old, new = "a" * 32, "b" * 32
    found = join([told(1, 7, n=2, fingerprint=old), told(2, 8, tail=(7,), n=2, fingerprint=new)])
    points = take_up(found, [], []).points
    assert [point.fingerprint for point in points] == [new, ""], "what has no token may begin anywhere"


def test_tokens_that_the_client_alone_knows_are_of_the_model_that_had_the_call() -> None:
    found = join([told(1, fingerprint="a" * 32)])
    assert take_up(found, [], [[7, 8]]).points[0].fingerprint == "a" * 32


async def test_after_an_upgrade_a_call_of_the_old_model_is_not_continued_by_the_new_one(rig: TwoRouters) -> None:
    """The prefill worker's journal has the first token; the fleet that could go on with it is gone."""
    await rig.broken(resumable(max_tokens=8), 4)
    for endpoint in rig.other.fleet.endpoints:
        assert endpoint.opened is not None
        endpoint.opened.fingerprint = "a" * 32  # as if the journals were of an older model than what now serves
    answer = await rig.resume("r1", 4)
    assert answer.token_ids == []
    assert answer.status is not None
    assert answer.status.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_call_that_is_taken_over_before_it_begins_to_be_served_makes_nobody_wait(rig: TwoRouters) -> None:
    calls = rig.front_end.calls
    async with calls.open(to_spec(resumable(max_tokens=8), {}, None, 1 << 20), time.monotonic()) as call:
        taking_over = asyncio.create_task(calls.resumable.find(call.spec.tenant.name, "r1"))
        await until(lambda: not calls.resumable._running, "it is taken over")
        with pytest.raises(Cancelled):
            await call.tell(call)
        with pytest.raises(NotFound):  # since it never came to a worker
            await asyncio.wait_for(taking_over, 5)


async def test_a_call_that_is_taken_over_and_never_served_makes_nobody_wait(rig: TwoRouters) -> None:
    calls = rig.front_end.calls
    async with calls.open(to_spec(resumable(max_tokens=8), {}, None, 1 << 20), time.monotonic()) as call:
        taking_over = asyncio.create_task(calls.resumable.find(call.spec.tenant.name, "r1"))
        await until(lambda: not calls.resumable._running, "it is taken over")
    with pytest.raises(NotFound):
        await asyncio.wait_for(taking_over, 5)
