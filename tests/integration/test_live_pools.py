"""`baton scale`, `flip` and `standby` on a running emulated cluster: pools change under streams, and no token is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from baton.request import SamplingParams
from engine.emulated_runner import emulated_answer
from tests.integration.cluster_rig import Client, ClusterUnderTest, until
from tests.integration.conftest import serve
from tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

Workers = dict[str, tuple[str, str]]  # role, as the worker itself has it, and state
NUM_TOKENS = 60  # some 3 s at this scale: longer than an order takes


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterUnderTest]:
    """1 prefill + 1 decode. That it ends with nothing left is asserted when it does."""
    gpus = ("--emulate", "h100", "--emulate-model", "llama-3.1-70b", "--tp", "4", "--time-scale", "5")
    home = tmp_path_factory.mktemp("home")
    yield from serve("--model", str(tiny_model), "--prefill", "1", "--decode", "1", *gpus, home=home)


def prompt(number: int) -> list[int]:
    return [(31 * i + 7 * number) % 400 + 20 for i in range(100 + number)]


async def asked(cluster: ClusterUnderTest, path: str) -> dict[str, Any]:
    """Empty while the controller is away."""
    tokens = json.loads((cluster.run_folder / "tokens.json").read_text())
    url, headers = f"http://127.0.0.1:{cluster.admin_port}", {"authorization": f"Bearer {tokens['viewer']['secret']}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=10) as admin:
        try:
            return dict((await admin.get(f"/admin/v1/{path}")).json())
        except httpx.TransportError:
            return {}


async def workers(cluster: ClusterUnderTest) -> Workers:
    """None while the controller is away."""
    listed = (await asked(cluster, "workers")).get("workers", ())
    return {w["worker_id"]: (w["load"]["role"] if w["load"] else "", w["state"]) for w in listed}


async def until_led(cluster: ClusterUnderTest) -> None:
    """The controller takes orders: one that was killed is waited for, until its lease has run out."""

    async def leads() -> bool:
        return bool((await asked(cluster, "pools")).get("autoscaler", {}).get("leads"))

    await until(leads, "a controller that leads")


async def check(streams: list[asyncio.Task[Any]]) -> None:
    """Each answer is the one it must be, whole."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for number, got in enumerate(await asyncio.gather(*streams)):
        assert got.code is grpc.StatusCode.OK, got.details
        assert got.tokens == emulated_answer(prompt(number), sampling, NUM_TOKENS, VOCAB_SIZE, (EOS_TOKEN_ID,))


async def test_pools_grow_flip_and_rest_under_streams_while_the_controller_is_killed(cluster: ClusterUnderTest) -> None:
    async def ordered(*words: str) -> str:
        done = await asyncio.to_thread(cluster.baton, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    async def until_there(holds: Callable[[Workers], bool], what: str) -> None:
        async def holds_now() -> bool:
            return holds(await workers(cluster))

        await until(holds_now, what)

    streams: list[asyncio.Task[Any]] = []
    async with Client(cluster) as client:

        def start(num: int) -> None:
            for _ in range(num):
                number = len(streams)
                streams.append(asyncio.create_task(client.generate(prompt(number), NUM_TOKENS)))

        start(4)
        assert await ordered("scale", "decode", "2", "--reason", "a launch") == "create decode-1"
        await until_there(lambda now: now.get("decode-1") == ("decode", "ready"), "a second decode worker")

        start(8)
        assert await ordered("flip", "decode-0", "prefill") == "flip decode-0 to prefill"
        start(4)
        os.kill(cluster.pid_of("router.controller.main"), signal.SIGKILL)  # the flip waits for streams of decode-0
        await check(streams[:])

        def flipped(now: Workers) -> bool:
            return now.get("decode-0") == ("prefill", "ready") and now.get("decode-1") == ("decode", "ready")

        await until_there(flipped, "the flip, under the next controller")
        await until_led(cluster)
        start(4)
        await ordered("standby", "prefill-0")
        start(4)
        await until_there(lambda now: now.get("prefill-0") == ("prefill", "standby"), "a standby")
        await check(streams)
        refused = await asyncio.to_thread(cluster.baton, "flip", "decode-1", "prefill")
        assert (refused.returncode, "decode.min_workers = 1" in refused.stderr) == (1, True)
        await ordered("standby", "prefill-0", "--wake", "decode")
        start(4)
        await check(streams)
        shown = await ordered("decisions")
        await client.until_idle()
    for action in ("create decode-1: a launch", "flip decode-0 to prefill", "wake prefill-0 as decode", "NOT DONE"):
        assert action in shown
    await ordered("scale", "prefill", "2")  # the cluster is stopped while that worker is being created
