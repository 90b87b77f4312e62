"""The client against real router processes: a stream survives the one that serves it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton_client import AsyncClient, CallFailed, Client
from tests.baton_client.router_processes import Routers, running_routers
from tests.router.parking_worker import ParkingWorker, start_parking_pair
from tests.router.router_rig import until

TOKENS = [300 + index % 40 for index in range(60)]


@dataclass
class Cluster:
    """Two router processes over two stub workers of this process."""

    prefill: ParkingWorker
    decode: ParkingWorker
    routers: Routers

    @property
    def target(self) -> str:
        return self.routers.target

    def pause_at(self, index: int) -> None:
        self.decode.script.pause_at = index
        self.decode.script.decode_gate.clear()

    def go_on(self) -> None:
        self.decode.script.pause_at = None
        self.decode.script.decode_gate.set()


@asynccontextmanager
async def cluster(model_dir: Path) -> AsyncIterator[Cluster]:
    prefill, decode = await start_parking_pair()
    try:
        async with running_routers(model_dir, [prefill.address, decode.address]) as routers:
            yield Cluster(prefill, decode, routers)
    finally:
        await prefill.kill()
        await decode.kill()


async def test_a_stream_goes_on_at_another_router_when_its_own_is_killed(model_dir: Path) -> None:
    async with cluster(model_dir) as rig, AsyncClient(rig.target) as client:
        whole = await client.generate("hello", max_tokens=60).text()
        await rig.routers.idle()
        rig.pause_at(20)
        answer = client.generate("hello", max_tokens=60)
        token_ids: list[int] = []
        text = ""
        async for chunk in answer:
            token_ids += chunk.token_ids
            text += chunk.text
            if len(token_ids) == 20:
                await rig.routers.kill_busy()
                rig.go_on()
        assert token_ids == TOKENS
        assert text == whole
        assert answer.done is not None
        assert answer.done.usage.completion_tokens == 60
        again = [submit.request.num_output_tokens for submit in rig.prefill.submits[2:]]
        assert all(
            num_tokens >= 20 for num_tokens in again
        )  # none: decode was done before it noticed the router's death
        await until(lambda: not rig.prefill.num_open and not rig.decode.num_open, "nothing runs on")


async def test_a_bulk_stream_goes_on_with_all_of_its_calls(model_dir: Path) -> None:
    async with cluster(model_dir) as rig, AsyncClient(rig.target) as client:
        whole = await client.generate("hello", max_tokens=60).text()
        await rig.routers.idle()
        rig.pause_at(20)
        got: list[list[int]] = [[] for _ in range(8)]

        async def one(number: int) -> str:
            text = ""
            async for chunk in bulk.generate("hello", max_tokens=60):
                got[number] += chunk.token_ids
                text += chunk.text
            return text

        async with client.bulk(max_flush_ms=5) as bulk:
            calls = [asyncio.create_task(one(number)) for number in range(8)]
            await until(lambda: all(len(token_ids) == 20 for token_ids in got), "all are in mid-stream")
            await rig.routers.kill_busy()
            rig.go_on()
            texts = await asyncio.gather(*calls)
        assert got == [TOKENS] * 8
        assert texts == [whole] * 8


async def test_the_blocking_client_survives_the_same(model_dir: Path) -> None:
    async with cluster(model_dir) as rig:
        rig.pause_at(10)
        token_ids: list[int] = []

        def read() -> None:
            with Client(rig.target) as client:
                for chunk in client.generate([1, 2, 3], max_tokens=60):
                    token_ids.extend(chunk.token_ids)

        thread = threading.Thread(target=read)
        thread.start()
        await until(lambda: len(token_ids) == 10, "it is in mid-stream")
        await rig.routers.kill_busy()
        rig.go_on()
        await asyncio.to_thread(thread.join, 60)
        assert token_ids == TOKENS


async def test_a_call_that_is_not_resumable_ends_with_its_router_once_it_has_begun(model_dir: Path) -> None:
    async with cluster(model_dir) as rig, AsyncClient(rig.target) as client:
        rig.pause_at(10)
        answer = client.generate("hello", max_tokens=60, resumable=False)
        token_ids: list[int] = []

        async def read() -> None:
            async for chunk in answer:
                token_ids.extend(chunk.token_ids)
                if len(token_ids) == 10:
                    await rig.routers.kill_busy()

        with pytest.raises(CallFailed) as failed:
            await read()
        assert failed.value.status == "UNAVAILABLE"
        assert token_ids == TOKENS[:10]
        await until(lambda: not rig.decode.num_open, "its workers have let go of it")
