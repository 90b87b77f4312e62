"""Routers that have nothing on a worker hear at once of a long prompt that another one gave it, and of its end."""

from __future__ import annotations

import asyncio
import time

from baton.v1 import worker_pb2
from tests.worker.scripted_worker import ScriptedWorker, running, worker_config
from tests.worker.session_client import SessionClient, request
from worker.load_news import NEWS_TOKENS, LoadNews

EPOCH, OTHER_EPOCH = 0xABC, 0xDEF


def test_small_changes_and_small_parts_of_a_long_queue_are_no_news() -> None:
    news = LoadNews()
    assert not news.is_news(NEWS_TOKENS - 1)
    assert news.is_news(50_000)
    assert not news.is_news(48_000)
    assert not news.is_news(38_000)
    assert news.is_news(37_000)
    assert news.is_news(0)
    assert not news.is_news(0)


class Mute(SessionClient):
    """A router that sends no heartbeats, and so hears only what it is told unasked."""

    def __init__(self, address: str, router_epoch: int) -> None:
        super().__init__(address, router_epoch)
        self.told_tokens: list[int] = []

    async def _beat(self) -> None:
        await asyncio.Event().wait()

    def _on_event(self, event: worker_pb2.SessionEvent) -> None:
        super()._on_event(event)
        if event.HasField("load"):
            self.told_tokens.append(event.load.waiting_tokens)


async def test_a_router_without_sequences_hears_of_what_another_gave_the_worker() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    worker.runner.before_run = lambda batch: time.sleep(0.01)  # a step: else all may be computed before anybody looks
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        other = Mute(worker.server.address, OTHER_EPOCH)
        async with other:
            await share_news(router, other)


async def share_news(router: SessionClient, other: Mute) -> None:
    for n in range(4):
        router.submit(request(EPOCH << 32 | n, [20 + (i + n) % 900 for i in range(700)], 2, ignore_eos=True))
    await other.until(lambda: max(other.told_tokens, default=0) >= NEWS_TOKENS)
    await other.until(lambda: other.told_tokens[-1] < NEWS_TOKENS)
    await router.until(lambda: len(router.ended) == 4)
