"""When the client tries again, with what, and when it gives up: against a server that says what the test tells it."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from baton.errors import AlreadyExists, BatonError, InvalidRequest, NotFound, Overloaded, Unavailable
from baton.v1 import serving_pb2, serving_pb2_grpc
from baton_client import AsyncClient, CallFailed, Client, Connection, RetryPolicy
from baton_client.bulk import chunks
from router.grpc_errors import error_detail, status_code, status_message, trailing_metadata

QUICK = RetryPolicy(first_delay_s=0.001, max_delay_s=0.01)
Context = grpc.aio.ServicerContext[Any, Any]
Step = Callable[[Context], Coroutine[Any, Any, None]]


def say(*token_ids: int, index: int = 0, text: str = "x") -> Step:
    async def step(context: Context) -> None:
        chunk = serving_pb2.Chunk(text=text * (len(token_ids) or 1), token_ids=token_ids, index=index)
        await context.write(serving_pb2.GenerateResponse(chunk=chunk))

    return step


async def done(context: Context) -> None:
    await context.write(
        serving_pb2.GenerateResponse(done=serving_pb2.Done(finish_reason=serving_pb2.FINISH_REASON_STOP))
    )


def fail(error: BatonError) -> Step:
    async def step(context: Context) -> None:
        await context.write(serving_pb2.GenerateResponse(error=error_detail(error)))
        await context.abort(status_code(error), status_message(error), trailing_metadata(error))

    return step


async def break_off(context: Context) -> None:
    """As a connection breaks: a status that no router has said."""
    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


class Told(serving_pb2_grpc.ServingServicer):
    """Each call does the next of `scripts`."""

    def __init__(self, *scripts: Sequence[Step]) -> None:
        self.scripts = list(scripts)
        self.calls: list[serving_pb2.GenerateRequest | serving_pb2.ResumeRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []

    async def Generate(self, request: serving_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        await self._run(request, context)

    async def Resume(self, request: serving_pb2.ResumeRequest, context: Context) -> None:  # type: ignore[override]
        await self._run(request, context)

    async def _run(self, request: serving_pb2.GenerateRequest | serving_pb2.ResumeRequest, context: Context) -> None:
        self.calls.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        for step in self.scripts.pop(0):
            await step(context)

    @property
    def kinds(self) -> list[str]:
        return [type(call).__name__.removesuffix("Request") for call in self.calls]


@asynccontextmanager
async def serving(*scripts: Sequence[Step], retry: RetryPolicy = QUICK) -> AsyncIterator[tuple[Told, AsyncClient]]:
    server = grpc.aio.server()
    told = Told(*scripts)  # type: ignore[abstract]  # nobody calls the rest
    serving_pb2_grpc.add_ServingServicer_to_server(told, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(Connection(f"127.0.0.1:{port}", api_key="bk-1"), retry=retry) as client:
        yield told, client
    await server.stop(None)


async def read(client: AsyncClient, **options: Any) -> list[int]:
    return [token_id async for chunk in client.generate("hi", **options) for token_id in chunk.token_ids]


async def test_a_broken_stream_is_resumed_with_what_has_come_and_the_same_id() -> None:
    async with serving([say(1, 2), break_off], [say(3, index=2), break_off], [say(4, index=3), done]) as (told, client):
        assert await read(client) == [1, 2, 3, 4]
    assert told.kinds == ["Generate", "Resume", "Resume"]
    first, *resumed = told.calls
    assert isinstance(first, serving_pb2.GenerateRequest)
    assert first.resumable
    assert {call.request_id for call in resumed} == {first.request_id}
    last = resumed[-1]
    assert isinstance(last, serving_pb2.ResumeRequest)
    assert list(last.next_index) == [3]
    assert list(last.received[0].ids) == [1, 2, 3]
    assert {headers["authorization"] for headers in told.metadata} == {"Bearer bk-1"}


async def test_a_call_that_nobody_knows_is_made_anew_only_while_nothing_has_come() -> None:
    gone = fail(NotFound("gone"))
    async with serving([break_off], [gone], [say(1), done]) as (told, client):
        assert await read(client) == [1]
        assert told.kinds == ["Generate", "Resume", "Generate"]
    async with serving([say(1), break_off], [gone]) as (told, client):
        with pytest.raises(CallFailed) as failed:
            await read(client)
        assert failed.value.code == "not_found"


async def test_an_own_call_that_runs_already_is_resumed() -> None:
    async with serving([fail(AlreadyExists("runs"))], [say(1), done]) as (told, client):
        assert await read(client) == [1]
        assert told.kinds == ["Generate", "Resume"]


async def test_a_refusal_is_asked_again_after_the_time_that_it_names() -> None:
    async with serving([fail(Overloaded("full", retry_after_s=0.2))], [say(1), done]) as (told, client):
        started_s = time.monotonic()
        assert await read(client) == [1]
        assert time.monotonic() - started_s >= 0.2
        assert told.kinds == ["Generate", "Generate"]


async def test_a_fault_of_the_callers_is_not_tried_again_and_names_its_field() -> None:
    async with serving([fail(InvalidRequest("too hot", field="temperature"))]) as (_, client):
        with pytest.raises(CallFailed) as failed:
            await read(client)
    assert (failed.value.status, failed.value.field) == ("INVALID_ARGUMENT", "temperature")


async def test_retries_in_a_row_are_bounded_and_a_token_begins_the_count_anew() -> None:
    policy = dataclasses.replace(QUICK, max_attempts=3)
    moving: list[list[Step]] = [[say(index, index=index), break_off] for index in range(6)]
    async with serving(*moving, [done], retry=policy) as (_, client):
        assert await read(client) == list(range(6))
    broken: list[list[Step]] = [[break_off]] * 3
    async with serving(*broken, retry=policy) as (told, client):
        with pytest.raises(CallFailed):
            await read(client)
    assert len(told.calls) == 3


async def test_a_client_whose_retries_all_fail_stops_making_them() -> None:
    policy = dataclasses.replace(QUICK, budget=4.0, max_attempts=100)
    broken: list[list[Step]] = [[break_off]] * 20
    async with serving(*broken, retry=policy) as (told, client):
        for _ in range(5):
            with pytest.raises(CallFailed):
                await read(client)
    assert len(told.calls) == 5 + 4


async def test_nothing_is_tried_behind_the_deadline() -> None:
    async with serving([fail(Unavailable("away", retry_after_s=30.0))]) as (_, client):
        with pytest.raises(CallFailed) as failed:
            await asyncio.wait_for(read(client, timeout_s=5.0), 4.0)
    assert failed.value.code == "unavailable"


async def test_calls_that_are_not_resumable_are_tried_again_only_before_their_first_token() -> None:
    async with serving([break_off], [say(1), break_off]) as (told, client):
        with pytest.raises(CallFailed):
            await read(client, resumable=False)
        assert told.kinds == ["Generate", "Generate"]
        assert not told.calls[0].request_id


async def test_text_behind_the_last_token_is_shown_once() -> None:
    tail = say(index=1, text="y")
    async with serving([say(1), tail, break_off], [tail, done]) as (_, client):
        assert await client.generate("hi").text() == "xy"


async def test_the_blocking_client_does_the_same() -> None:
    async with serving([say(1, 2), break_off], [say(3, index=2), done]) as (told, client):
        target = client._connection.target

        def read_all() -> list[int]:
            with Client(target, retry=QUICK) as blocking:
                answer = blocking.generate([("user", "hi")], max_tokens=3)
                token_ids = [token_id for chunk in answer for token_id in chunk.token_ids]
                assert answer.done is not None
                return token_ids

        assert await asyncio.to_thread(read_all) == [1, 2, 3]
    assert isinstance(told.calls[0], serving_pb2.GenerateRequest)
    assert told.calls[0].chat.messages[0].role == "user"
    assert told.calls[0].sampling.max_tokens == 3


async def test_a_call_that_is_closed_in_mid_stream_is_cancelled_on_the_server() -> None:
    gone = asyncio.Event()

    async def stay(context: Context) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            gone.set()

    async with serving([say(1), stay]) as (_, client):
        answer = client.generate("hi")
        await anext(aiter(answer))
        await answer.close()
        await asyncio.wait_for(gone.wait(), 10)


def test_packed_groups_are_unpacked_in_order() -> None:
    reply = serving_pb2.SessionReply(
        call=[5, 6], index=[0, 3], num_tokens=[2, 1], text=["ab", "c"], token_ids=[1, 2, 3],
        num_logprobs=[0, 1], logprobs=[serving_pb2.Logprob(token_id=3)],
    )  # fmt: skip
    (first, a), (second, b) = chunks(reply)
    assert (first, list(a.token_ids), a.text, a.index, len(a.logprobs)) == (5, [1, 2], "ab", 0, 0)
    assert (second, list(b.token_ids), b.text, b.index, b.logprobs[0].token_id) == (6, [3], "c", 3, 3)


def test_the_client_loads_of_baton_nothing_but_its_stubs() -> None:
    code = "import sys, baton_client; print(*sorted(m for m in sys.modules if m.split('.')[0] in sys.argv[1:]))"
    packages = ["baton", "torch", "ray", "numpy", "router", "worker", "engine", "kv_transfer", "cli", "bench"]
    listed = subprocess.run([sys.executable, "-c", code, *packages], capture_output=True, text=True, check=True)
    assert {name for name in listed.stdout.split() if not name.startswith("baton.v1")} == {"baton"}


class Silent(serving_pb2_grpc.ServingServicer):
    """Takes Sessions and says nothing."""

    def __init__(self) -> None:
        self.num_streams = self.num_calls = 0
        self.heard = asyncio.Event()

    async def Session(self, requests: AsyncIterator[serving_pb2.SessionCall], context: Context) -> None:  # type: ignore[override]
        self.num_streams += 1
        async for message in requests:
            if message.HasField("start"):
                self.num_calls += 1
                self.heard.set()


async def test_leaving_a_bulk_block_ends_what_still_runs_and_opens_nothing_new() -> None:
    server, silent = grpc.aio.server(), Silent()  # type: ignore[abstract]  # nobody calls the rest
    serving_pb2_grpc.add_ServingServicer_to_server(silent, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}", retry=QUICK) as client:
        async with client.bulk() as bulk:
            late = bulk.generate("hi")
            reading = asyncio.create_task(bulk.generate("hi").text())
            await silent.heard.wait()
        for answer in (reading, late.text()):
            with pytest.raises(CallFailed) as left:
                await asyncio.wait_for(answer, 10)
            assert left.value.status == "CANCELLED"
    await server.stop(None)
    assert silent.num_streams == silent.num_calls == 1
