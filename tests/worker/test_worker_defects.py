"""Defects of our own code: they must end the stream or the process, never leave a worker that looks well and does nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from kv_transfer.events import Shipped
from tests.worker.scripted_worker import ScriptedWorker, worker_config, worker_threads
from tests.worker.session_client import SessionClient, request
from worker.server import WorkerServer

EPOCH = 0xABC
PROMPT = list(range(20, 60))


class Defect(Exception):
    pass


def fail(*_: object) -> None:
    raise Defect


def break_engine(server: WorkerServer) -> None:
    server._host._thread.post(fail)


def break_tick(server: WorkerServer) -> None:
    server._host._decode.on_tick = fail  # type: ignore[method-assign]


def break_result(server: WorkerServer) -> None:
    server._host._decode.on_step = fail  # type: ignore[method-assign, assignment]
    server._host._thread.post(lambda engine, now_s: None)


def break_kv_event(server: WorkerServer) -> None:
    server._host._decode.on_kv = fail  # type: ignore[method-assign, assignment]
    server._forward_kv_event(Shipped(1, 0, 0))


def break_kv_thread(server: WorkerServer) -> None:
    core = server._host._plane._core  # type: ignore[attr-defined]
    core.receive = core.lose_all = fail


@pytest.mark.parametrize("break_it", [break_engine, break_tick, break_result, break_kv_event, break_kv_thread])
async def test_a_defect_behind_the_streams_ends_sessions_and_process(break_it: Callable[[WorkerServer], None]) -> None:
    before = set(threading.enumerate())
    worker = ScriptedWorker(worker_config("w", "both"))
    worker.server.start()
    try:
        async with SessionClient(worker.server.address, EPOCH) as router:
            router.submit(request(EPOCH << 32 | 1, PROMPT, 1_500, ignore_eos=True))
            await router.until(lambda: bool(router.tokens))
            break_it(worker.server)
            await router.until(lambda: router.failure is not None)
    finally:
        await asyncio.to_thread(worker.server.stop)
    assert [type(error) for error in worker.fatal] == [Defect]
    assert worker_threads(before) == set()
