"""Prompts whose callers have left cost nobody anything but the chunk that was under way. Case X1."""

from __future__ import annotations

import time

from baton.v1 import worker_pb2
from engine.ports import Batch
from tests.worker.scripted_worker import ScriptedWorker, running, worker_config
from tests.worker.session_client import SessionClient, request

EPOCH = 0xC1
NUM_LEFT, LONG, SHORT = 10, 1_500, 16


def seq(n: int) -> int:
    return EPOCH << 32 | n


async def test_ten_long_prompts_that_were_cancelled_are_not_computed_before_a_short_one() -> None:
    worker = ScriptedWorker(worker_config("w", "both"), num_blocks=1_024)
    step_tokens = worker.config.engine.max_num_batched_tokens

    def slow(_: Batch) -> None:
        time.sleep(0.02)

    worker.runner.before_run = slow
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        for n in range(NUM_LEFT):
            router.submit(request(seq(n), [(13 * i + n) % 900 + 20 for i in range(LONG)], 3))
        await router.until(lambda: router.load.num_running + router.load.num_waiting == NUM_LEFT)
        for n in range(NUM_LEFT):
            router.send(cancel=worker_pb2.Cancel(seq=seq(n)))
        router.submit(request(seq(99), [(7 * i) % 900 + 20 for i in range(SHORT)], 1))
        await router.until(lambda: len(router.ended) == NUM_LEFT)
        before = router.load.prompt_tokens_computed
        await router.until(lambda: seq(99) in router.ended)
        assert router.ended[seq(99)].outcome == worker_pb2.OUTCOME_FINISHED
        assert router.load.prompt_tokens_computed - before <= 2 * step_tokens + SHORT
        assert router.load.prompt_tokens_computed < NUM_LEFT * LONG / 2
        assert (router.load.active_blocks, router.load.reserved_blocks) == (0, 0)
