"""A worker changes its role, or stands by and comes back, while calls come and go: every one of them is whole.

Real workers whose engine checks every byte of KV, behind a router of this process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

from baton.request import Role
from baton.v1 import worker_pb2
from tests.integration.test_drain_streams import NUM_TOKENS, Rig, four_workers
from tests.router.router_rig import Answer, until

NUM_PROMPTS = 12
NUM_AT_ONCE = 6


class Load:
    """NUM_AT_ONCE calls at any time, until it is told to stop; they repeat NUM_PROMPTS prompts."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._numbers = itertools.count()
        self.answers: list[tuple[int, Answer]] = []
        self.stopped = False

    async def run(self) -> None:
        await asyncio.gather(*(self._one_after_the_other() for _ in range(NUM_AT_ONCE)))

    async def _one_after_the_other(self) -> None:
        while not self.stopped:
            number, answer = next(self._numbers) % NUM_PROMPTS, Answer()
            self.answers.append((number, answer))
            await self._rig.generate(number, answer)

    def prefilled_on(self, worker_id: str) -> bool:
        ended = [answer.done for _, answer in self.answers if answer.done is not None]
        return any(done.timings.prefill_worker == worker_id for done in ended)


async def test_flips_and_standby_under_load_lose_no_call_and_change_no_token(tmp_path: Path) -> None:
    async with four_workers(tmp_path) as rig:
        undisturbed = await asyncio.gather(*(rig.generate(number, Answer()) for number in range(NUM_PROMPTS)))
        load = Load(rig)
        flips, rests = rig.endpoint(rig.workers[3]), rig.endpoint(rig.workers[0])
        running = asyncio.create_task(load.run())
        await until(lambda: sum(len(a.token_ids) > 5 for _, a in load.answers) == NUM_AT_ONCE, "all are in mid-stream")
        assert flips.num_inflight

        asked_s, held = time.monotonic(), []
        flips.session.set_role(worker_pb2.ROLE_PREFILL)
        await until(lambda: flips.state == "flipping", "the router knows")

        def has_flipped() -> bool:
            if flips.state == "flipping":
                held.append(flips.num_inflight)
            return flips.role is Role.PREFILL and flips.state == "ready"

        await until(has_flipped, "it has flipped")
        print(f"flipped in {time.monotonic() - asked_s:.2f} s, with streams of {NUM_TOKENS} tokens to end first")
        assert held == sorted(held, reverse=True), "a call was placed on it meanwhile"
        await until(lambda: load.prefilled_on(flips.worker_id), "it serves in its new role")

        rests.session.drain(True)
        await until(lambda: rests.session.view is not None and rests.session.view.load.idle, "it has drained")
        assert not rig.workers[0].server._host._is_busy()
        rests.session.drain(False)
        flips.session.set_role(worker_pb2.ROLE_DECODE)
        await until(lambda: flips.role is Role.DECODE and flips.state == rests.state == "ready", "both serve again")
        load.stopped = True
        await running
        for number, answer in load.answers:
            assert (answer.status, answer.token_ids) == (None, undisturbed[number].token_ids)
        assert {len(answer.token_ids) for answer in undisturbed} == {NUM_TOKENS}
    assert not [fault for worker in rig.workers for fault in worker.runner.faults]
