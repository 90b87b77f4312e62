"""The client over real workers whose engine checks every byte of KV: answers are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from baton_client import AsyncClient
from tests.baton_client.router_processes import running_routers
from tests.router.router_rig import until
from tests.worker.scripted_worker import ScriptedWorker, running, worker_config

NUM_CALLS, NUM_TOKENS = 12, 60


async def test_many_streams_in_every_stage_survive_a_killed_router_and_then_a_killed_decode_worker(
    model_dir: Path,
) -> None:
    workers = [
        ScriptedWorker(worker_config(*names)) for names in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode"))
    ]
    for worker in workers:
        worker.runner.vocab_size = 512  # of the tiny model
        worker.runner.before_run = lambda _: time.sleep(0.01)  # answers must not be over before anything happens
    got: list[list[list[int]]] = [[[], []] for _ in range(NUM_CALLS)]
    async with (
        running(*workers),
        running_routers(model_dir, [worker.server.address for worker in workers]) as routers,
        AsyncClient(routers.target) as client,
    ):

        async def one(number: int, into: list[list[int]]) -> None:
            n = 1 + number % 2
            answer = client.generate(f"call {number}", max_tokens=NUM_TOKENS, ignore_eos=True, seed=number, n=n)
            async for chunk in answer:
                assert chunk.index == len(into[chunk.choice])
                into[chunk.choice] += chunk.token_ids

        calls = [asyncio.create_task(one(number, got[number])) for number in range(NUM_CALLS)]
        await until(lambda: any(len(choices[0]) > NUM_TOKENS // 4 for choices in got), "some are in mid-stream")
        await routers.kill_busy()
        begun = [len(choices[0]) for choices in got]
        await until(lambda: sum(map(len, (c[0] for c in got))) > sum(begun) + NUM_CALLS, "they go on")
        await asyncio.to_thread(workers[2].server.stop)
        await asyncio.gather(*calls)
        undisturbed: list[list[list[int]]] = [[[], []] for _ in range(NUM_CALLS)]
        await asyncio.gather(*(one(number, undisturbed[number]) for number in range(NUM_CALLS)))
        assert got == undisturbed
        assert all(len(choices[0]) == NUM_TOKENS for choices in got)
    assert not [fault for worker in workers for fault in worker.runner.faults]
