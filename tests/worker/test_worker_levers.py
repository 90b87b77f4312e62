"""What a controller may ask of a worker while it serves: other limits, another role, to leave, to stand by."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from baton.request import SamplingParams
from baton.v1 import control_pb2, worker_pb2
from engine.ports import Batch
from engine.scripted_runner import answer
from tests.worker.scripted_worker import ScriptedWorker, running, until, worker_config
from tests.worker.session_client import SessionClient, request

EPOCH = 0xABD
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
BEAT_S = 0.5  # WorkerConfig.heartbeat_s
STEP_S = 0.002  # of long streams: see test_worker_life.py


def seq(n: int) -> int:
    return EPOCH << 32 | n


def prompt(length: int) -> list[int]:
    return [(31 * i) % 900 + 20 for i in range(length)]


def tuning(load: worker_pb2.Load) -> tuple[int, int, int]:
    return load.max_num_seqs, load.max_num_batched_tokens, load.chunk_tokens


async def test_a_tuned_worker_says_so_and_computes_in_smaller_chunks() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        assert router.opened is not None
        most = router.opened.most
        assert tuning(router.load) == (most.max_num_seqs, most.max_num_batched_tokens, most.chunk_tokens)
        assert tuning(router.load) == (64, 2_048, 64)
        router.send(tune=worker_pb2.Tune(max_num_seqs=2, max_num_batched_tokens=32, chunk_tokens=16))
        await router.until(lambda: tuning(router.load) == (2, 32, 16))
        router.submit(request(seq(1), prompt(160), 3, ignore_eos=True))
        await router.until(lambda: seq(1) in router.ended)
        assert router.load.num_steps >= 160 // 16 + 2
        assert router.output(seq(1)) == answer(prompt(160), GREEDY, 3)
        assert not router.refused


@pytest.mark.parametrize(
    ("wanted", "field", "limit"),
    [
        (worker_pb2.Tune(max_num_seqs=65, max_num_batched_tokens=64, chunk_tokens=64), "max_num_seqs", "1 to 64"),
        (worker_pb2.Tune(max_num_seqs=8, max_num_batched_tokens=64), "chunk_tokens", "1 to 64"),
        (worker_pb2.Tune(), "max_num_seqs", "1 to 64"),
    ],
)
async def test_limits_that_the_engine_was_not_started_with_are_refused_and_change_nothing(
    wanted: worker_pb2.Tune, field: str, limit: str
) -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        router.send(tune=wanted)
        await router.until(lambda: 0 in router.refused)
        assert (router.refused[0].code, router.refused[0].field) == ("invalid_request", field)
        assert limit in router.refused[0].message
        router.submit(request(seq(1), prompt(20), 3, ignore_eos=True))
        await router.until(lambda: seq(1) in router.ended)
        assert tuning(router.load) == (64, 2_048, 64)


async def test_tuning_amid_many_streams_cuts_none_and_changes_no_token() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    worker.runner.before_run = lambda _: time.sleep(STEP_S)
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        for n in range(8):
            router.submit(request(seq(n), prompt(20 + n), 200, ignore_eos=True))
        await router.until(lambda: len(router.tokens) == 8)
        for limit in (1, 8, 2, 64, 3):
            router.send(tune=worker_pb2.Tune(max_num_seqs=limit, max_num_batched_tokens=limit, chunk_tokens=1))
            await router.until(lambda limit=limit: router.load.max_num_seqs == limit)  # type: ignore[misc]
        await router.until(lambda: len(router.ended) == 8)
        for n in range(8):
            assert router.output(seq(n)) == answer(prompt(20 + n), GREEDY, 200)
        assert router.load.num_preemptions == 0


async def test_a_worker_that_starts_again_takes_the_tuning_that_the_controller_wants() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        host, loop = worker.server._host, worker.server._loop

        def announced(max_num_seqs: int) -> None:
            wanted = worker_pb2.Tune(max_num_seqs=max_num_seqs, max_num_batched_tokens=512, chunk_tokens=32)
            loop.call_soon_threadsafe(host.adopt_wishes, control_pb2.AnnounceResponse(tuning=wanted))

        announced(5)
        await router.until(lambda: tuning(router.load) == (5, 512, 32))
        announced(5_000)  # of an earlier start with other settings
        announced(4)
        await router.until(lambda: tuning(router.load) == (4, 512, 32))
        loop.call_soon_threadsafe(host.adopt_wishes, control_pb2.AnnounceResponse())
        router.submit(request(seq(1), prompt(20), 3, ignore_eos=True))
        await router.until(lambda: seq(1) in router.ended)
        assert tuning(router.load) == (4, 512, 32)
        assert not worker.fatal


async def test_a_busy_worker_says_which_role_it_takes_once_it_is_idle() -> None:
    worker = ScriptedWorker(worker_config("w", "decode"))
    worker.runner.before_run = lambda _: time.sleep(STEP_S)
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        router.submit(request(seq(1), prompt(20), 300, ignore_eos=True))
        await router.until(lambda: bool(router.tokens))
        router.send(set_role=worker_pb2.SetRole(role=worker_pb2.ROLE_PREFILL))
        await router.until(lambda: router.load.next_role == worker_pb2.ROLE_PREFILL)
        assert (router.load.role, router.load.draining) == (worker_pb2.ROLE_DECODE, True)
        await router.until(lambda: router.load.role == worker_pb2.ROLE_PREFILL)
        assert (router.load.next_role, router.load.draining) == (worker_pb2.ROLE_UNSPECIFIED, False)
        assert router.output(seq(1)) == answer(prompt(20), GREEDY, 300)
        assert worker.fatal == []


async def test_what_a_worker_says_grows_old_while_its_engine_stands_still_and_is_new_again_afterwards() -> None:
    worker, may_go_on = ScriptedWorker(worker_config("w", "both")), threading.Event()
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        await asyncio.sleep(2 * BEAT_S)
        assert router.load.age_s == 0.0, "who has nothing to do has nothing new to say"

        def stand_still(batch: Batch) -> None:
            if len(batch.entries) > 1:
                may_go_on.wait(10.0)

        worker.runner.before_run = stand_still
        router.submit(request(seq(1), prompt(20), 5_000, ignore_eos=True))
        await router.until(lambda: bool(router.tokens))
        router.submit(request(seq(2), prompt(20), 3, ignore_eos=True))
        await router.until(lambda: router.load.age_s > BEAT_S)
        may_go_on.set()
        await router.until(lambda: seq(2) in router.ended and router.load.age_s < BEAT_S)


async def test_what_a_worker_says_grows_old_while_an_idle_engine_s_first_step_stands_still() -> None:
    worker, may_go_on = ScriptedWorker(worker_config("w", "both")), threading.Event()

    def stand_still(_: Batch) -> None:
        may_go_on.wait(10.0)

    worker.runner.before_run = stand_still
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        await asyncio.sleep(2 * BEAT_S)
        router.submit(request(seq(1), prompt(20), 3, ignore_eos=True))
        await router.until(lambda: router.load.age_s > BEAT_S)
        assert router.load.num_running == 0, "its last word is of before"
        may_go_on.set()
        await router.until(lambda: seq(1) in router.ended and router.load.age_s == 0.0)


async def test_a_drained_worker_says_that_it_is_idle_only_after_its_last_call_and_a_heartbeat() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    worker.runner.before_run = lambda _: time.sleep(STEP_S)
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        await asyncio.sleep(2 * BEAT_S)
        assert not router.load.idle  # it may be given a call at any moment
        router.submit(request(seq(1), prompt(20), 300, ignore_eos=True))
        await router.until(lambda: bool(router.tokens))
        router.send(drain=worker_pb2.Drain(draining=True))
        seen: list[bool] = []

        def is_idle() -> bool:
            if router.load.idle:
                seen.append(seq(1) in router.ended)
            return router.load.idle

        await router.until(is_idle)
        assert all(seen)
        assert router.output(seq(1)) == answer(prompt(20), GREEDY, 300)


async def test_after_a_stall_of_the_loop_a_drained_worker_is_not_idle_while_a_call_is_open() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    worker.runner.before_run = lambda _: time.sleep(STEP_S)
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        router.submit(request(seq(1), prompt(20), 300, ignore_eos=True))
        await router.until(lambda: bool(router.tokens))
        router.send(drain=worker_pb2.Drain(draining=True))
        await router.until(lambda: router.load.draining)
        host = worker.server._host
        assert host is not None

        async def stall() -> tuple[bool, bool]:
            time.sleep(1.2 * BEAT_S)  # noqa: ASYNC251 - the stall
            return host._is_busy(), host.load().idle

        stalled = asyncio.run_coroutine_threadsafe(stall(), worker.server._loop)
        assert await asyncio.wrap_future(stalled) == (True, False)
        await router.until(lambda: router.load.idle)
        assert seq(1) in router.ended


async def test_a_standby_takes_nothing_and_serves_again_with_one_message() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        router.send(drain=worker_pb2.Drain(draining=True))
        await router.until(lambda: router.load.idle)
        num_steps = router.load.num_steps
        router.submit(request(seq(1), prompt(20), 3))
        await router.until(lambda: seq(1) in router.refused)
        assert router.refused[seq(1)].code == "unavailable"
        assert router.load.num_steps == num_steps
        router.send(drain=worker_pb2.Drain(draining=False))
        router.submit(request(seq(2), prompt(20), 3, ignore_eos=True))
        await router.until(lambda: seq(2) in router.ended)
        assert router.output(seq(2)) == answer(prompt(20), GREEDY, 3)
        await router.until(lambda: not router.load.idle)


async def test_a_standby_changes_its_role_at_once_and_stays_one() -> None:
    worker = ScriptedWorker(worker_config("w", "prefill"))
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        router.send(drain=worker_pb2.Drain(draining=True))
        router.send(set_role=worker_pb2.SetRole(role=worker_pb2.ROLE_DECODE))
        await router.until(lambda: router.load.role == worker_pb2.ROLE_DECODE)
        assert router.load.draining
        router.send(drain=worker_pb2.Drain(draining=False))
        router.submit(request(seq(1), prompt(20), 3, ignore_eos=True))
        await router.until(lambda: seq(1) in router.ended)
        await until(lambda: not worker.server._host._is_busy())
