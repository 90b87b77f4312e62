"""A worker is told to go while it has streams (as SIGTERM tells it): all of them are whole, and new calls go elsewhere.

Real workers whose engine checks every byte of KV, behind a router of this process. Case D1.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from baton.config import RouterConfig
from baton.model_files import load_model_files
from baton.v1 import serving_pb2, serving_pb2_grpc
from router.fleet import Endpoint
from router.front_end import FrontEnd
from tests.router.router_rig import Answer, until
from tests.tiny_models import make_tiny_model
from tests.worker.scripted_worker import ScriptedWorker, running, worker_config

NAMES = (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode"))
NUM_STREAMS, NUM_TOKENS = 6, 80
STEP_S = 0.01


class Rig:
    def __init__(self, front_end: FrontEnd, workers: list[ScriptedWorker], channel: grpc.aio.Channel) -> None:
        self.front_end = front_end
        self.workers = workers
        self.stub = serving_pb2_grpc.ServingStub(channel)

    async def generate(self, number: int, into: Answer) -> Answer:
        sampling = serving_pb2.Sampling(max_tokens=NUM_TOKENS, seed=number, ignore_eos=True)
        made = serving_pb2.GenerateRequest(prompt=f"call {number}", sampling=sampling)
        try:
            async for response in self.stub.Generate(made):
                into.token_ids += response.chunk.token_ids
                if response.HasField("done"):
                    into.done = response.done
                elif response.HasField("error"):
                    into.error = response.error
        except grpc.aio.AioRpcError as error:
            into.status = error
        return into

    def endpoint(self, worker: ScriptedWorker) -> Endpoint:
        [found] = [e for e in self.front_end.fleet.endpoints if e.worker_id == worker.config.worker_id]
        return found


@asynccontextmanager
async def four_workers(folder: Path, **settings: int) -> AsyncIterator[Rig]:
    workers = [ScriptedWorker(worker_config(*names)) for names in NAMES]
    for worker in workers:
        worker.runner.vocab_size = 512  # of the tiny model
        worker.runner.before_run = lambda _: time.sleep(STEP_S)
    files = load_model_files(str(make_tiny_model(folder / "tiny")))
    async with running(*workers):
        config = RouterConfig(http_port=0, grpc_port=0, **settings)  # type: ignore[arg-type]
        front_end = FrontEnd(config, files, [worker.server.address for worker in workers])
        await front_end.start()
        try:
            await until(lambda: not front_end.fleet.unready_reason(), "the router is ready")
            links = [e.session for e in front_end.fleet.endpoints if e.worker_id.startswith("p")]
            await until(lambda: all(s.view is not None and len(s.view.links) == 2 for s in links), "all are linked")
            async with grpc.aio.insecure_channel(f"127.0.0.1:{front_end.grpc_port}") as channel:
                yield Rig(front_end, workers, channel)
        finally:
            await front_end.stop()


async def sent_away(worker: ScriptedWorker, grace_s: float) -> bool:
    """What `worker.main` does at SIGTERM. Returns whether nothing was left to end."""
    is_idle = await asyncio.to_thread(worker.server.drain, threading.Event(), grace_s)
    await asyncio.to_thread(worker.server.stop)
    return is_idle


@pytest.mark.parametrize(("kind", "grace_s"), [("d", 60.0), ("d", 0.1), ("p", 60.0)])
async def test_streams_of_a_worker_that_goes_are_whole_and_new_calls_go_elsewhere(
    tmp_path: Path, kind: str, grace_s: float
) -> None:
    async with four_workers(tmp_path) as rig:
        undisturbed = await asyncio.gather(*(rig.generate(number, Answer()) for number in range(2 * NUM_STREAMS)))
        answers = [Answer() for _ in range(2 * NUM_STREAMS)]
        calls = [asyncio.create_task(rig.generate(number, answers[number])) for number in range(NUM_STREAMS)]
        await until(lambda: all(len(a.token_ids) > 5 for a in answers[:NUM_STREAMS]), "all are in mid-stream")
        candidates = [worker for worker in rig.workers if worker.config.worker_id.startswith(kind)]
        leaving = max(candidates, key=lambda worker: rig.endpoint(worker).num_inflight)
        going = asyncio.create_task(sent_away(leaving, grace_s))
        await until(lambda: rig.endpoint(leaving).state != "ready", "the router knows")
        calls += [asyncio.create_task(rig.generate(n, answers[n])) for n in range(NUM_STREAMS, 2 * NUM_STREAMS)]
        await asyncio.gather(*calls)
        assert await going is (grace_s > 1)
        assert [a.status for a in answers] == [None] * len(answers)
        assert [a.token_ids for a in answers] == [a.token_ids for a in undisturbed]
        name = leaving.config.worker_id
        for answer in answers[NUM_STREAMS:]:
            assert answer.done is not None
            assert name not in (answer.done.timings.prefill_worker, answer.done.timings.decode_worker)
    assert not [fault for worker in rig.workers for fault in worker.runner.faults]


async def test_where_nothing_is_moved_what_the_grace_cuts_is_unavailable_and_says_so(tmp_path: Path) -> None:
    async with four_workers(tmp_path, max_retries=0) as rig:
        answers = [Answer() for _ in range(NUM_STREAMS)]
        calls = [asyncio.create_task(rig.generate(number, answers[number])) for number in range(NUM_STREAMS)]
        await until(lambda: all(len(answer.token_ids) > 5 for answer in answers), "all are in mid-stream")
        leaving = max(rig.workers[2:], key=lambda worker: rig.endpoint(worker).num_inflight)
        assert not await sent_away(leaving, 0.1)
        await asyncio.gather(*calls)
    cut = [answer for answer in answers if answer.status is not None]
    assert cut
    for answer in cut:
        assert answer.status is not None
        assert answer.status.code() is grpc.StatusCode.UNAVAILABLE
        assert answer.error is not None
        assert answer.error.retryable
        assert answer.done is None
    assert all(len(answer.token_ids) == NUM_TOKENS for answer in answers if answer.status is None)
