"""The bulk Session over real gRPC: what comes out is what Generate gives, in fewer messages, and nothing is without a bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
import pytest

from baton.errors import WorkerLost
from baton.model_files import ModelFiles
from baton.request import FinishReason, Logprobs
from baton.v1 import serving_pb2, serving_pb2_grpc
from baton_client.bulk import chunks
from router.call_events import PIECE_BYTES
from router.detokenizer import TextStream, TokenTable
from router.gather import Gatherer
from router.grpc_messages import groups_to_reply
from tests.router.router_rig import Answer, Rig, request, running_rig, until

NARROW = (("grpc.http2.lookahead_bytes", 65_535), ("grpc.http2.bdp_probe", 0))  # a window that does not grow


class Stream:
    """A client's side of one Session, by hand."""

    def __init__(self, stub: serving_pb2_grpc.ServingAsyncStub, max_flush_ms: int = 0) -> None:
        self.replies: list[serving_pb2.SessionReply] = []
        self.answers: dict[int, Answer] = {}
        self.ends: dict[int, serving_pb2.CallEnd] = {}
        self.going_away = False
        self._outbox: asyncio.Queue[serving_pb2.SessionCall | None] = asyncio.Queue()
        self.send(open=serving_pb2.OpenSession(max_flush_ms=max_flush_ms))
        self.call = stub.Session(self._messages())
        self.reader = asyncio.create_task(self._read())

    def send(self, **message: object) -> None:
        self._outbox.put_nowait(serving_pb2.SessionCall(**message))  # type: ignore[arg-type]

    def start(self, number: int, made: serving_pb2.GenerateRequest, timeout_ms: int = 0) -> None:
        self.send(start=serving_pb2.StartCall(call=number, generate=made, timeout_ms=timeout_ms))

    async def finish(self) -> None:
        """Close our side and read the rest."""
        self._outbox.put_nowait(None)
        await self.reader

    async def _messages(self) -> AsyncIterator[serving_pb2.SessionCall]:
        while (message := await self._outbox.get()) is not None:
            yield message

    async def _read(self) -> None:
        async for reply in self.call:
            self.replies.append(reply)
            self.going_away |= reply.going_away
            for number, chunk in chunks(reply):
                assert number not in self.ends, "a token behind its call's end"
                answer = self.answers.setdefault(number, Answer())
                assert chunk.index == sum(len(c.token_ids) for c in answer.chunks if c.choice == chunk.choice)
                answer.chunks.append(chunk)
                answer.text += chunk.text if chunk.choice == 0 else ""
                answer.token_ids += chunk.token_ids if chunk.choice == 0 else []
            for end in reply.ends:
                assert end.call not in self.ends, "a call ended twice"
                self.ends[end.call] = end


async def test_many_calls_on_one_stream_give_what_generate_gives_and_end_once_each(rig: Rig) -> None:
    single = await rig.generate(request(max_tokens=20))
    stream = Stream(rig.stub, max_flush_ms=5)
    for number in range(50):
        stream.start(number, request(max_tokens=20))
    await stream.finish()
    assert sorted(stream.ends) == list(range(50))
    for number in range(50):
        assert stream.answers[number].token_ids == single.token_ids
        assert stream.answers[number].text == single.text
        assert stream.ends[number].done.usage.completion_tokens == 20
        assert stream.ends[number].done.finish_reason == serving_pb2.FINISH_REASON_LENGTH
    assert len(stream.replies) < 50 * 20 / 4, "tokens of several calls share a message"
    await rig.idle()


async def test_several_answers_logprobs_and_stop_strings_come_as_they_do_alone(rig: Rig) -> None:
    made = request(max_tokens=8, n=2, logprobs=2)
    made.stop.append((await rig.generate(request(max_tokens=8))).text[-4:])
    single = await rig.generate(made)
    stream = Stream(rig.stub)
    stream.start(7, made)
    await stream.finish()
    answer, done = stream.answers[7], stream.ends[7].done
    for choice in (0, 1):
        alone = [chunk for chunk in single.chunks if chunk.choice == choice]
        ours = [chunk for chunk in answer.chunks if chunk.choice == choice]
        assert "".join(c.text for c in ours) == "".join(c.text for c in alone)
        assert [e for c in ours for e in c.logprobs] == [e for c in alone for e in c.logprobs]
    assert single.done is not None
    assert list(done.choices) == list(single.done.choices)


async def test_a_cancelled_call_ends_alone_and_costs_nothing_more(rig: Rig) -> None:
    rig.decode.script.decode_gate.clear()
    stream = Stream(rig.stub)
    for number in (1, 2):
        stream.start(number, request(max_tokens=6))
    await until(lambda: rig.decode.num_open == 2, "both run")
    stream.send(cancel=serving_pb2.CancelCall(call=1))
    stream.send(cancel=serving_pb2.CancelCall(call=99))
    await until(lambda: 1 in stream.ends and rig.decode.num_open == 1, "one is gone")
    assert stream.ends.pop(1).error.code == "cancelled"
    stream.answers.pop(1)
    stream.start(1, request(max_tokens=6))  # its number is free
    rig.decode.script.decode_gate.set()
    await stream.finish()
    assert [stream.answers[number].token_ids for number in (1, 2)] == [list(range(300, 306))] * 2
    await rig.idle()


async def test_a_client_that_leaves_takes_all_its_calls_along(rig: Rig) -> None:
    rig.decode.script.decode_gate.clear()
    stream = Stream(rig.stub)
    for number in range(10):
        stream.start(number, request(max_tokens=6))
    await until(lambda: rig.decode.num_open == 10, "they run")
    stream.call.cancel()
    await asyncio.gather(stream.reader, return_exceptions=True)
    await rig.idle()


async def test_errors_of_one_call_are_its_own_end(files: ModelFiles) -> None:
    async with running_rig(files, max_session_calls=2, max_retries=0) as rig:
        stream = Stream(rig.stub)
        stream.start(1, request(max_tokens=0))
        await until(lambda: 1 in stream.ends, "it is refused")
        rig.decode.script.fail_after = (3, WorkerLost("gone"))
        stream.start(2, request(max_tokens=9))
        await until(lambda: 2 in stream.ends, "it fails")
        rig.decode.script.fail_after = None
        rig.decode.script.decode_gate.clear()
        stream.start(3, request(max_tokens=4))
        stream.start(4, request(max_tokens=4), timeout_ms=200)
        stream.start(5, request(max_tokens=4))
        await until(lambda: {4, 5} <= set(stream.ends), "one too many, and one too late")
        rig.decode.script.decode_gate.set()
        await stream.finish()
        codes = {number: end.error.code for number, end in stream.ends.items()}
        assert codes == {1: "invalid_request", 2: "worker_lost", 3: "", 4: "deadline_exceeded", 5: "overloaded"}
        assert stream.ends[1].error.field == "max_tokens"
        assert stream.ends[5].error.retry_after_s > 0
        assert stream.answers[2].token_ids == [300, 301, 302]
        await rig.idle()


@pytest.mark.parametrize(
    "messages",
    [
        [serving_pb2.SessionCall(open=serving_pb2.OpenSession(max_flush_ms=1_001))],
        [serving_pb2.SessionCall()],
        [serving_pb2.SessionCall(open=serving_pb2.OpenSession())] * 2,
        [serving_pb2.SessionCall(start=serving_pb2.StartCall(call=1, generate=request(max_tokens=900)))] * 2,
    ],
)
async def test_a_stream_that_makes_no_sense_is_refused_and_its_calls_end(
    rig: Rig, messages: Sequence[serving_pb2.SessionCall]
) -> None:
    rig.prefill.script.prefill_gate.clear()

    async def said() -> AsyncIterator[serving_pb2.SessionCall]:
        for message in messages:
            yield message

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        _ = [reply async for reply in rig.stub.Session(said())]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await rig.idle()


async def test_a_stream_of_a_router_that_stops_says_so_to_who_starts_a_call(rig: Rig) -> None:
    rig.decode.script.decode_gate.clear()
    stream = Stream(rig.stub)
    stream.start(1, request(max_tokens=4))
    await until(lambda: bool(rig.decode.num_open), "it runs")
    rig.front_end.calls.close_door()
    stream.start(2, request(max_tokens=4))
    await until(lambda: stream.going_away, "it says so")
    rig.decode.script.decode_gate.set()
    await stream.finish()
    assert stream.ends[2].error.code == "unavailable"
    assert stream.answers[1].token_ids == [300, 301, 302, 303]


async def test_a_stream_of_age_takes_no_more_calls_and_cuts_none(files: ModelFiles) -> None:
    async with running_rig(files, max_connection_age_s=0.3) as rig:
        rig.decode.script.decode_gate.clear()
        stream = Stream(rig.stub)
        stream.start(1, request(max_tokens=4))
        await until(lambda: stream.going_away, "it says so")
        stream.start(2, request(max_tokens=4))
        await until(lambda: 2 in stream.ends, "no more calls")
        rig.decode.script.decode_gate.set()
        await stream.finish()
        assert stream.ends[2].error.code == "unavailable"
        assert stream.answers[1].token_ids == [300, 301, 302, 303]


async def test_a_client_that_does_not_read_loses_its_stream_and_nobody_elses(files: ModelFiles) -> None:
    async with running_rig(files, client_backlog_bytes=200_000) as rig:
        narrow = grpc.aio.insecure_channel(f"127.0.0.1:{rig.front_end.grpc_port}", options=NARROW)

        async def said() -> AsyncIterator[serving_pb2.SessionCall]:
            for number in range(16):
                made = request("hello", max_tokens=900, logprobs=20)
                yield serving_pb2.SessionCall(start=serving_pb2.StartCall(call=number, generate=made))

        call = serving_pb2_grpc.ServingStub(narrow).Session(said())
        await until(lambda: bool(rig.decode.adopted), "it runs")
        await rig.idle()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            _ = [reply async for reply in call]
        assert ended.value.code() is grpc.StatusCode.CANCELLED
        assert (await rig.generate(request(max_tokens=3))).token_ids == [300, 301, 302]
        await narrow.close(None)


@pytest.mark.parametrize("max_flush_ms", [1, 50, 1_000])
async def test_generate_gathers_tokens_for_as_long_as_it_is_told_and_changes_none(rig: Rig, max_flush_ms: int) -> None:
    single = await rig.generate(request(max_tokens=200, n=2, logprobs=1))
    made = request(max_tokens=200, n=2, logprobs=1)
    made.max_flush_ms = max_flush_ms
    gathered = await rig.generate(made)
    for choice in (0, 1):
        alone = [chunk for chunk in single.chunks if chunk.choice == choice]
        ours = [chunk for chunk in gathered.chunks if chunk.choice == choice]
        assert "".join(c.text for c in ours) == "".join(c.text for c in alone)
        assert [t for c in ours for t in c.token_ids] == [t for c in alone for t in c.token_ids]
        assert [e for c in ours for e in c.logprobs] == [e for c in alone for e in c.logprobs]
    assert gathered.done is not None
    assert single.done is not None
    assert list(gathered.done.choices) == list(single.done.choices)
    if max_flush_ms == 1_000:
        assert len(gathered.chunks) <= 6, "the first token at once, and the rest together"
    await rig.idle()


async def test_a_gathered_stream_that_is_not_read_is_given_up(files: ModelFiles) -> None:
    async with running_rig(files, client_backlog_bytes=50_000) as rig:
        narrow = grpc.aio.insecure_channel(f"127.0.0.1:{rig.front_end.grpc_port}", options=NARROW)
        made = request("hello", max_tokens=900, n=8, logprobs=20)
        made.max_flush_ms = 5
        call = serving_pb2_grpc.ServingStub(narrow).Generate(made)
        await until(lambda: bool(rig.decode.adopted), "it runs")
        await rig.idle()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            _ = [response async for response in call]
        assert ended.value.code() is grpc.StatusCode.CANCELLED
        await narrow.close(None)


async def test_a_gathered_call_that_fails_says_so_behind_what_was_sent(files: ModelFiles) -> None:
    async with running_rig(files, max_retries=0) as rig:
        rig.decode.script.fail_after = (4, WorkerLost("gone"))
        made = request(max_tokens=9)
        made.max_flush_ms = 20
        answer = await rig.generate(made)
        assert answer.status is not None
        assert answer.status.code() is grpc.StatusCode.UNAVAILABLE
        assert answer.error is not None
        assert answer.token_ids == [300, 301, 302, 303]


def test_groups_are_packed_without_what_is_the_same_everywhere() -> None:
    table = TokenTable([b"a", b"b"], {})
    gatherer = Gatherer(1 << 20, lambda: None)
    sinks = [gatherer.audience(number).choice(0, TextStream(table)) for number in (5, 6)]
    for index in range(3):
        for sink in sinks:
            sink.token(index, index % 2, FinishReason.NONE, None)
    reply = groups_to_reply(gatherer.take(), table)
    assert (list(reply.call), list(reply.num_tokens), list(reply.text)) == ([5, 6], [3, 3], ["aba", "aba"])
    assert list(reply.token_ids) == [0, 1, 0, 0, 1, 0]
    assert not reply.choice
    assert not reply.num_logprobs
    assert gatherer.take() == []


def test_what_waits_is_counted_with_its_logprobs_and_too_much_is_said_once() -> None:
    said: list[str] = []
    table = TokenTable([b"a"], {})
    gatherer = Gatherer(5 * PIECE_BYTES, lambda: said.append("stuck"))
    sink = gatherer.audience().choice(0, TextStream(table))
    for index in range(2):
        sink.token(index, 0, FinishReason.NONE, Logprobs(-1.0, (0,) * 4, (-1.0,) * 4))
    assert not said
    for index in range(2, 9):
        sink.token(index, 0, FinishReason.NONE, None)
    assert said == ["stuck"]
