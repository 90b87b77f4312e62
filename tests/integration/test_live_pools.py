"""`baton scale`, `flip` and `standby` on a running emulated cluster: pools change under streams, and no token is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.cluster_rig import Client, ClusterUnderTest, until
from tests.integration.conftest import serve
from tests.integration.pools_rig import Streams, Workers, ordered, until_led, workers

NUM_TOKENS = 60  # some 3 s: longer than an order takes


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterUnderTest]:
    """1 prefill + 1 decode. That it ends with nothing left is asserted when it does."""
    gpus = ("--emulate", "a100", "--emulate-model", "llama-3.1-405b", "--tp", "8", "--time-scale", "1.5")
    home = tmp_path_factory.mktemp("home")
    yield from serve("--model", str(tiny_model), "--prefill", "1", "--decode", "1", *gpus, home=home)


async def test_pools_grow_flip_and_rest_under_streams_while_the_controller_is_killed(cluster: ClusterUnderTest) -> None:
    async def until_there(holds: Callable[[Workers], bool], what: str) -> None:
        async def holds_now() -> bool:
            return holds(await workers(cluster))

        await until(holds_now, what)

    async with Client(cluster) as client:
        streams = Streams(client, NUM_TOKENS)
        streams.start(4)
        assert await ordered(cluster, "scale", "decode", "2", "--reason", "a launch") == "create decode-1"
        await until_there(lambda now: now.get("decode-1") == ("decode", "ready"), "a second decode worker")

        streams.start(8)
        assert await ordered(cluster, "flip", "decode-0", "prefill") == "flip decode-0 to prefill"
        streams.start(4)
        os.kill(cluster.pid_of("router.controller.main"), signal.SIGKILL)  # the flip waits for streams of decode-0
        await streams.check()

        def flipped(now: Workers) -> bool:
            return now.get("decode-0") == ("prefill", "ready") and now.get("decode-1") == ("decode", "ready")

        await until_there(flipped, "the flip, under the next controller")
        await until_led(cluster)
        streams.start(4)
        await ordered(cluster, "standby", "prefill-0")
        streams.start(4)
        await until_there(lambda now: now.get("prefill-0") == ("prefill", "standby"), "a standby")
        await streams.check()
        refused = await asyncio.to_thread(cluster.baton, "flip", "decode-1", "prefill")
        assert (refused.returncode, "decode.min_workers = 1" in refused.stderr) == (1, True)
        await ordered(cluster, "standby", "prefill-0", "--wake", "decode")
        streams.start(4)
        await streams.check()
        shown = await ordered(cluster, "decisions")
        await client.until_idle()
    for action in ("create decode-1: a launch", "flip decode-0 to prefill", "wake prefill-0 as decode", "NOT DONE"):
        assert action in shown
    await ordered(cluster, "scale", "prefill", "2")  # the cluster is stopped while that worker is being created
