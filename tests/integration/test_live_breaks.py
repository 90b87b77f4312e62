"""Processes that die or stop in the middle of a change of pools: the change comes to its end, and no token is lost.

GPUs so slow that the clock need not be: a step of the 405B on 8 A100 takes 34 ms.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.cluster_rig import Client, ClusterUnderTest, until
from tests.integration.conftest import serve
from tests.integration.pools_rig import Streams, Workers, asked, ordered, until_led, worker_pid, workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 150  # some 6 s: longer than any order takes
STOPPED_S = 20.0
CONTROLLER = "router.controller.main"


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterUnderTest]:
    """1 prefill + 2 decode. That it ends with nothing left is asserted when it does."""
    gpus = ("--emulate", "a100", "--emulate-model", "llama-3.1-405b", "--tp", "8")
    home = tmp_path_factory.mktemp("home")
    yield from serve("--model", str(tiny_model), "--prefill", "1", "--decode", "2", *gpus, home=home)


async def until_there(cluster: ClusterUnderTest, holds: Callable[[Workers], bool], what: str) -> None:
    began_s = time.monotonic()

    async def holds_now() -> bool:
        return holds(await workers(cluster))

    await until(holds_now, what)
    print(f"{what}: {time.monotonic() - began_s:.1f} s")


async def kill_controller(cluster: ClusterUnderTest) -> None:
    os.kill(cluster.pid_of(CONTROLLER), signal.SIGKILL)
    began_s = time.monotonic()
    await until_led(cluster)
    print(f"a controller leads again: {time.monotonic() - began_s:.1f} s")


async def test_a_worker_that_is_being_created_comes_up_under_the_next_controller(cluster: ClusterUnderTest) -> None:
    async with Client(cluster) as client:
        streams = Streams(client, NUM_TOKENS)
        streams.start(6)
        new = (await ordered(cluster, "scale", "decode", "3")).removeprefix("create ")
        assert (await workers(cluster))[new][1] == "starting"
        await kill_controller(cluster)
        await until_there(cluster, lambda now: now.get(new) == ("decode", "ready"), f"{new} is up")
        streams.start(6)
        await streams.check()


async def test_a_flip_is_done_under_the_next_controller(cluster: ClusterUnderTest) -> None:
    async with Client(cluster) as client:
        streams = Streams(client, NUM_TOKENS)
        streams.start(9)
        assert await ordered(cluster, "flip", "decode-1", "prefill") == "flip decode-1 to prefill"
        await kill_controller(cluster)
        streams.start(3)
        await until_there(cluster, lambda now: now.get("decode-1") == ("prefill", "ready"), "decode-1 has flipped")
        streams.start(3)
        await streams.check()


async def test_a_worker_that_dies_while_it_drains_is_ended_and_its_streams_go_on(cluster: ClusterUnderTest) -> None:
    async with Client(cluster) as client:
        streams = Streams(client, NUM_TOKENS)
        streams.start(9)
        done = await ordered(cluster, "scale", "decode", "1")
        leaving = done.removeprefix("drain ").removesuffix(", then end it")
        os.kill(await worker_pid(cluster, leaving), signal.SIGKILL)
        streams.start(3)
        await streams.check()
        await until_there(cluster, lambda now: leaving not in now, f"{leaving} is gone")
        streams.start(3)
        await streams.check()
        decisions = (await asked(cluster, "decisions"))["decisions"]
    assert any(d["lever"] == "end" and d["action"] == f"end {leaving}" for d in decisions)


async def test_streams_of_a_router_that_stood_still_for_a_while_go_on_where_they_were(
    cluster: ClusterUnderTest,
) -> None:
    router = cluster.pid_of("router.main")
    async with Client(cluster) as client:
        streams = Streams(client, NUM_TOKENS)
        streams.start(6)
        await until(lambda: client.loads(), "it has them")
        os.kill(router, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            while time.monotonic() < began_s + STOPPED_S:
                await until_led(cluster)
                assert (await asked(cluster, "workers"))["workers"], "the controller answers all the while"
                await asyncio.sleep(0.5)
        finally:
            os.kill(router, signal.SIGCONT)
        streams.start(3)
        await streams.check()
        await client.until_idle()
        print(f"idle again: {time.monotonic() - began_s - STOPPED_S:.1f} s after it went on")
