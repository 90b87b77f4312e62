"""What one router, or several, may do to a worker over their Sessions."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterable, AsyncIterator

import grpc
import pytest

from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.wire import PROTOCOL_VERSION, request_to_pb
from tests.worker.scripted_worker import ScriptedWorker, running, until, worker_config
from tests.worker.session_client import SessionClient, request
from worker.parked import ParkedCalls
from worker.session_service import SessionService
from worker.sessions import RouterSession, Sessions

EPOCH, OTHER = 0xABC, 0xDEF
PROMPT = list(range(20, 60))


def seq(n: int, epoch: int = EPOCH) -> int:
    return epoch << 32 | n


def opening(epoch: int) -> worker_pb2.Open:
    return worker_pb2.Open(router_id="r", router_epoch=epoch, protocol_version=PROTOCOL_VERSION)


async def read_all(call: AsyncIterable[worker_pb2.SessionEvent]) -> list[worker_pb2.SessionEvent]:
    return [event async for event in call]


def idle(router: SessionClient) -> bool:
    load = router.load
    return load.num_running == load.num_waiting == load.active_blocks == load.reserved_blocks == 0


async def test_a_router_that_opens_again_starts_anew_and_its_old_sequences_end() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    async with running(worker), SessionClient(worker.server.address, EPOCH) as old:
        old.submit(request(seq(1), PROMPT, 1_900, ignore_eos=True))
        await old.until(lambda: len(old.tokens.get(seq(1), ())) > 3)
        async with SessionClient(worker.server.address, EPOCH) as new:
            await old.until(lambda: old.failure is not None)
            assert old.failure is not None
            assert old.failure.code() is grpc.StatusCode.UNAVAILABLE
            await new.until(lambda: idle(new))
            assert new.tokens == {}
            assert new.ended == {}
            new.submit(request(seq(2), PROMPT, 3, ignore_eos=True))
            await new.until(lambda: seq(2) in new.ended)


async def test_a_router_cannot_submit_or_cancel_in_the_name_of_another() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    async with (
        running(worker),
        SessionClient(worker.server.address, EPOCH) as mine,
        SessionClient(worker.server.address, OTHER) as other,
    ):
        mine.submit(request(seq(1), PROMPT, 400, ignore_eos=True))
        await mine.until(lambda: len(mine.tokens.get(seq(1), ())) > 3)
        other.send(cancel=worker_pb2.Cancel(seq=seq(1)))
        other.submit(request(seq(2), PROMPT, 3, ignore_eos=True))
        await other.until(lambda: seq(2) in other.refused)
        assert other.refused[seq(2)].field == "seq"
        await mine.until(lambda: seq(1) in mine.ended)
        assert len(mine.output(seq(1))) == 400


async def test_a_defect_in_handling_a_message_breaks_the_session_and_nothing_else() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    async with running(worker), SessionClient(worker.server.address, OTHER) as watcher:

        def fail(*_: object) -> None:
            raise KeyError

        async with SessionClient(worker.server.address, EPOCH) as router:
            router.submit(request(seq(1), PROMPT, 1_900, ignore_eos=True))
            await router.until(lambda: bool(router.tokens))
            on_submit = worker.server._host._decode.on_submit
            worker.server._host._decode.on_submit = fail  # type: ignore[method-assign, assignment]
            router.submit(request(seq(2), PROMPT, 3))
            await router.until(lambda: router.failure is not None)
            assert router.failure is not None
            assert router.failure.code() is grpc.StatusCode.UNAVAILABLE
            worker.server._host._decode.on_submit = on_submit  # type: ignore[method-assign]
        await watcher.until(lambda: idle(watcher))
        watcher.submit(request(seq(1, OTHER), PROMPT, 3, ignore_eos=True))
        await watcher.until(lambda: seq(1, OTHER) in watcher.ended)
        assert worker.fatal == []


async def test_a_router_that_does_not_read_loses_its_session_and_its_sequences_alone() -> None:
    async def talk() -> AsyncIterator[worker_pb2.SessionRequest]:
        yield worker_pb2.SessionRequest(open=opening(EPOCH))
        for n in range(40):
            logged = request_to_pb(request(seq(n), PROMPT, 1_900, ignore_eos=True, num_logprobs=20))
            yield worker_pb2.SessionRequest(submit=worker_pb2.Submit(request=logged, ttl_ms=600_000))
        while True:  # heartbeats go on, so that only the outbox can be what ends the Session
            yield worker_pb2.SessionRequest(heartbeat=worker_pb2.Heartbeat(sent_ns=1))
            await asyncio.sleep(0.2)

    worker = ScriptedWorker(worker_config("w", "both", outbox_bytes=20_000))
    async with running(worker), SessionClient(worker.server.address, OTHER) as watcher:
        small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 << 10)]  # what gRPC itself reads ahead
        async with grpc.aio.insecure_channel(worker.server.address, options=small) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Session(talk())
            watcher.submit(request(seq(1, OTHER), PROMPT, 20, ignore_eos=True))
            await watcher.until(lambda: seq(1, OTHER) in watcher.ended)
            await until(lambda: not worker.server._host.sessions.has_router(seq(0)))
            await watcher.until(lambda: idle(watcher))
            with pytest.raises(grpc.aio.AioRpcError, match="outbox"):
                await read_all(call)


class BreakingContext:
    """A stream whose first write is under way when its connection breaks, and fails then."""

    def __init__(self) -> None:
        self.writing = asyncio.Event()
        self.broken = asyncio.Event()

    async def write(self, event: worker_pb2.SessionEvent) -> None:
        self.writing.set()
        await self.broken.wait()
        raise grpc.aio.InternalError("the write failed with its connection")


class NothingButSessions:
    """A host that says one thing to each router that comes."""

    def __init__(self) -> None:
        self.sessions = Sessions(max_bytes=1_000, max_age_s=60.0, on_lost=lambda _: None, parked=ParkedCalls(0))

    def open_session(self, router_id: str, router_epoch: int) -> RouterSession:
        session = self.sessions.open(router_id, router_epoch)
        session.send(worker_pb2.SessionEvent(load=worker_pb2.Load()))
        return session


async def test_a_connection_that_breaks_while_a_router_is_written_to_is_not_reported_as_a_defect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context, host = BreakingContext(), NothingButSessions()

    async def opens_and_breaks() -> AsyncIterator[worker_pb2.SessionRequest]:
        yield worker_pb2.SessionRequest(open=opening(EPOCH))
        await context.writing.wait()

    await SessionService(host).Session(opens_and_breaks(), context)  # type: ignore[arg-type]
    context.broken.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()  # an exception that nobody took is reported when its task is collected
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_time_in_which_the_loop_stood_still_is_not_held_against_routers() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        loop = worker.server._loop
        for _ in range(2):
            loop.call_soon_threadsafe(time.sleep, 2.5)  # longer than 4 heartbeats of 0.5 s
        router.submit(request(seq(1), PROMPT, 3, ignore_eos=True))
        await router.until(lambda: seq(1) in router.ended or router.failure is not None)
        assert router.failure is None


def test_forgiven_silence_does_not_end_a_session() -> None:
    lost: list[int] = []
    sessions = Sessions(max_bytes=1 << 20, max_age_s=5.0, on_lost=lost.append, parked=ParkedCalls(0))
    session = sessions.open("r", EPOCH)
    sessions.forgive(10.0)
    sessions.check(session.last_heard_s + 1.0, silence_limit_s=2.0)
    assert not session.is_closed
    sessions.check(session.last_heard_s + 2.1, silence_limit_s=2.0)
    assert session.is_closed


def test_a_router_that_said_it_would_send_fewer_heartbeats_is_given_the_time() -> None:
    sessions = Sessions(max_bytes=1 << 20, max_age_s=5.0, on_lost=lambda epoch: None, parked=ParkedCalls(0))
    session = sessions.open("r", EPOCH)
    session.extra_silence_s = 6.0
    sessions.check(session.last_heard_s + 7.9, silence_limit_s=2.0)
    assert not session.is_closed
    sessions.check(session.last_heard_s + 8.1, silence_limit_s=2.0)
    assert session.is_closed


def test_an_outbox_over_its_bytes_or_age_closes_the_session() -> None:
    big = RouterSession("r", EPOCH, max_bytes=100, max_age_s=5.0)
    big.send(worker_pb2.SessionEvent(cache_delta=worker_pb2.CacheDelta(added=[bytes(101)])))
    assert "100 bytes" in big.drop_reason
    old = RouterSession("r", EPOCH, max_bytes=100, max_age_s=5.0)
    old.check_age(time.monotonic() + 60.0)
    assert not old.is_closed  # nothing waits
    old.send(worker_pb2.SessionEvent(load=worker_pb2.Load()))
    old.check_age(time.monotonic() + 5.1)
    assert "5 s behind" in old.drop_reason


@pytest.mark.parametrize(
    "first",
    [
        worker_pb2.SessionRequest(heartbeat=worker_pb2.Heartbeat()),
        worker_pb2.SessionRequest(open=worker_pb2.Open(router_id="r", protocol_version=PROTOCOL_VERSION)),
        worker_pb2.SessionRequest(open=worker_pb2.Open(router_epoch=EPOCH, protocol_version=PROTOCOL_VERSION + 1)),
    ],
)
async def test_a_stream_that_does_not_open_properly_is_refused(first: worker_pb2.SessionRequest) -> None:
    async def talk() -> AsyncIterator[worker_pb2.SessionRequest]:
        yield first

    worker = ScriptedWorker(worker_config("w", "both"))
    async with running(worker), grpc.aio.insecure_channel(worker.server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(worker_pb2_grpc.WorkerStub(channel).Session(talk()))
        assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


async def test_reports_that_routers_have_yet_to_read_keep_no_drained_worker_busy_and_ends_of_calls_do() -> None:
    sessions = Sessions(max_bytes=1 << 20, max_age_s=5.0, on_lost=lambda _: None, parked=ParkedCalls(0))
    sessions.open("r", EPOCH)
    sessions.open("s", OTHER)
    sessions.broadcast(worker_pb2.SessionEvent(load=worker_pb2.Load()))
    sessions.broadcast(worker_pb2.SessionEvent(heartbeat=worker_pb2.HeartbeatReply()))
    assert sessions.outbox_bytes() > 0
    assert not sessions.owe()
    sessions.ended(worker_pb2.Ended(seq=seq(1)))
    sessions.flush(1, worker_pb2.Load())
    assert sessions.owe()
