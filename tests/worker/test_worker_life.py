"""Starting, stopping, restarting and storms of cancels, on whole workers: nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import threading
import time
from functools import partial

import grpc
import pytest

from baton.errors import ConfigError
from baton.request import SamplingParams
from baton.v1 import worker_pb2
from engine.scripted_runner import answer
from tests.worker.scripted_worker import PATIENCE_S, ScriptedWorker, running, until, worker_config, worker_threads
from tests.worker.session_client import SessionClient, request

EPOCH = 0xABC
STEP_S = 0.002  # of long streams: steps of no time fill a router's outbox faster than a busy machine's loop empties it
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
GAUGES = ("num_running", "num_waiting", "waiting_tokens", "active_blocks", "reserved_blocks", "num_tickets", "num_leases",
          "slots_in_use", "quarantined_slots")  # fmt: skip


def seq(n: int) -> int:
    return EPOCH << 32 | n


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(31 * i + salt) % 900 + 20 for i in range(length)]


def busy_gauges(*routers: SessionClient) -> dict[str, int]:
    return {name: getattr(r.load, name) for r in routers for name in GAUGES if getattr(r.load, name)}


def has_failed(router: SessionClient) -> bool:
    return router.failure is not None


def test_a_taken_port_is_one_clear_error_and_leaves_no_thread_and_no_descriptor() -> None:
    before, num_fds = set(threading.enumerate()), []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for _ in range(3):  # the first also starts what gRPC keeps for the whole process
            worker = ScriptedWorker(worker_config("w", "both", port=taken.getsockname()[1]))
            with pytest.raises(ConfigError, match="is in use"):
                worker.server.start()
            worker.server.stop()
            num_fds.append(len(os.listdir("/proc/self/fd")))
    assert worker_threads(before) == set()
    assert num_fds[2] <= num_fds[0]


def test_frames_too_small_for_a_block_are_one_clear_error_at_start_and_ucx_is_shut_down() -> None:
    before, num_fds = set(threading.enumerate()), []
    for _ in range(3):  # the first also loads UCX
        worker = ScriptedWorker(worker_config("w", "both", transport="ucx", ucx_tls="tcp", frame_bytes=4096))
        with pytest.raises(ConfigError, match="frame_bytes is 4096; one layer of one block needs at least 4160"):
            worker.server.start()
        del worker
        gc.collect()
        num_fds.append(len(os.listdir("/proc/self/fd")))
    assert worker_threads(before) == set()
    assert num_fds[2] <= num_fds[0]


def test_a_server_that_cannot_start_ends_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    worker = ScriptedWorker(worker_config("w", "both"))

    start = grpc.aio._server.Server.start  # type: ignore[attr-defined]

    async def fail(server: grpc.aio.Server) -> None:
        await start(server)
        raise OSError("no listening today")

    monkeypatch.setattr("grpc.aio._server.Server.start", fail)
    with pytest.raises(OSError, match="no listening"):
        worker.server.start()
    assert worker_threads(before) == set()


async def test_stopping_does_not_wait_for_a_router_that_keeps_coming_back() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    worker.server.start()
    opened_late: list[SessionClient] = []

    async def come_back() -> None:
        while True:
            async with SessionClient(worker.server.address, EPOCH) as client:
                await client.until(partial(has_failed, client))
            opened_late.append(client)

    knocking = asyncio.create_task(come_back())
    await asyncio.sleep(0.1)
    await asyncio.to_thread(worker.server.stop)
    knocking.cancel()
    await asyncio.gather(knocking, return_exceptions=True)
    assert len(opened_late) <= 1


async def test_a_worker_that_fails_while_it_is_stopped_stops_all_the_same() -> None:
    for _ in range(20):
        worker = ScriptedWorker(worker_config("w", "both"))
        worker.server.start()
        worker.server._loop.call_soon_threadsafe(worker.server._on_fatal, RuntimeError("test"))
        await asyncio.gather(*(asyncio.to_thread(worker.server.stop) for _ in range(3)))
        assert len(worker.fatal) <= 1


async def test_a_restarted_decode_worker_serves_again_on_the_same_and_on_another_port() -> None:
    p = ScriptedWorker(worker_config("p", "prefill"))
    async with running(p), SessionClient(p.server.address, EPOCH) as prefill:
        port = 0
        for n in range(4):
            d = ScriptedWorker(worker_config("d", "decode", port=port if n % 2 else 0))
            async with running(d), SessionClient(d.server.address, EPOCH) as decode:
                port = d.server.port
                prefill.send(peers=worker_pb2.Peers(decode=[d.peer]))
                prefill.submit(request(seq(n), prompt(100, n), 5, ignore_eos=True), d.peer)
                await decode.until(lambda n=n: seq(n) in decode.ended)  # type: ignore[misc]
                tokens = prefill.tokens[seq(n)] | decode.tokens[seq(n)]
                assert [tokens[i] for i in range(5)] == answer(prompt(100, n), GREEDY, 5)
            await until(lambda: len(p.server._host.links._links) <= 2)
        prefill.send(peers=worker_pb2.Peers())
        await until(lambda: not p.server._host.links._links and not p.server._host.links._openers)
        assert p.fatal == []


async def test_a_set_role_to_what_the_worker_is_already_refuses_nobody() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    worker.runner.before_run = lambda _: time.sleep(STEP_S)
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        router.submit(request(seq(1), prompt(20), 1_500, ignore_eos=True))
        await router.until(lambda: bool(router.tokens))
        router.send(set_role=worker_pb2.SetRole(role=worker_pb2.ROLE_PREFILL))  # drains first ...
        router.send(set_role=worker_pb2.SetRole(role=worker_pb2.ROLE_BOTH))  # ... and is taken back
        router.submit(request(seq(2), prompt(20), 3, ignore_eos=True))
        await router.until(lambda: seq(2) in router.ended or seq(2) in router.refused)
        assert seq(2) in router.ended
        router.send(set_role=worker_pb2.SetRole(role=worker_pb2.ROLE_UNSPECIFIED))
        router.submit(request(seq(3), prompt(20), 3, ignore_eos=True))
        await router.until(lambda: seq(3) in router.ended)


async def test_draining_prefill_lets_queued_prompts_be_computed_and_handed_over() -> None:
    p, d = ScriptedWorker(worker_config("p", "prefill")), ScriptedWorker(worker_config("d", "decode"), num_blocks=48)
    async with (
        running(p, d),
        SessionClient(p.server.address, EPOCH) as prefill,
        SessionClient(d.server.address, EPOCH) as decode,
    ):
        for n in range(12):  # three fit into decode at once: the others queue on prefill
            prefill.submit(request(seq(n), prompt(200, n), 20, ignore_eos=True), d.peer)
        prefill.send(drain=worker_pb2.Drain(draining=True))
        prefill.submit(request(seq(99), prompt(20), 3), d.peer)
        await prefill.until(lambda: seq(99) in prefill.refused)
        await decode.until(lambda: len(decode.ended) == 12)
        for n in range(12):
            tokens = prefill.tokens[seq(n)] | decode.tokens[seq(n)]
            assert [tokens[i] for i in range(20)] == answer(prompt(200, n), GREEDY, 20)


async def test_a_thousand_cancels_at_random_moments_leave_every_gauge_at_zero_and_nothing_alive() -> None:
    seed = 20_261
    rng = random.Random(seed)
    p, d = ScriptedWorker(worker_config("p", "prefill")), ScriptedWorker(worker_config("d", "decode"), num_blocks=96)
    async with (
        running(p, d),
        SessionClient(p.server.address, EPOCH) as prefill,
        SessionClient(d.server.address, EPOCH) as decode,
    ):
        prefill.submit(request(seq(5_000), prompt(33), 2, ignore_eos=True), d.peer)
        await decode.until(lambda: seq(5_000) in decode.ended)
        tasks = [await all_tasks(worker) for worker in (p, d)]
        threads, num_fds = threading.active_count(), len(os.listdir("/proc/self/fd"))

        async def call(n: int) -> None:
            target = None if n % 7 == 0 else d.peer
            to = decode if target is None else prefill
            to.submit(request(seq(n), prompt(rng.randrange(1, 400), n), rng.randrange(1, 60), ignore_eos=True), target)
            await asyncio.sleep(rng.choice((0.0, rng.random() * 0.01, rng.random() * 0.2)))
            for router in rng.sample((prefill, decode), 2):
                router.send(cancel=worker_pb2.Cancel(seq=seq(n)))
                await asyncio.sleep(rng.choice((0.0, 0.001)))

        for start in range(0, 1_000, 50):
            await asyncio.gather(*(call(n) for n in range(start, start + 50)))
        for router in (prefill, decode):
            await router.until(partial(lambda r: not busy_gauges(r), router))
        await until(lambda: all(seq(n) in prefill.ended or n % 7 == 0 for n in range(1_000)))
        assert p.runner.faults == d.runner.faults == []
        await until(lambda: all(not role.num_open() for w in (p, d) for role in w.server._host._roles))
        give_up_s = time.monotonic() + PATIENCE_S
        for worker, before in zip((p, d), tasks, strict=True):
            while len(more := await all_tasks(worker)) > len(before):  # a write of gRPC's may be under way
                assert time.monotonic() < give_up_s, more - before
                await asyncio.sleep(0.05)
        assert threading.active_count() <= threads
        assert len(os.listdir("/proc/self/fd")) <= num_fds
        prefill.submit(request(seq(6_000), prompt(33), 5, ignore_eos=True), d.peer)
        await decode.until(lambda: seq(6_000) in decode.ended)
        tokens = prefill.tokens[seq(6_000)] | decode.tokens[seq(6_000)]
        assert [tokens[i] for i in range(5)] == answer(prompt(33), GREEDY, 5)


async def all_tasks(worker: ScriptedWorker) -> set[str]:
    """Names of what runs on a worker's loop, without the question itself."""
    loop = worker.server._loop

    async def ask() -> set[str]:
        return {str(task) for task in asyncio.all_tasks() - {asyncio.current_task()}}

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(), loop))
