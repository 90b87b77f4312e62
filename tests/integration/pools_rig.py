"""An emulated cluster whose pools change under streams: what its controller says, and answers that are known."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import httpx

from baton.request import SamplingParams
from engine.emulated_runner import emulated_answer
from tests.integration.cluster_rig import Answer, Client, ClusterUnderTest, until
from tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

Workers = dict[str, tuple[str, str]]  # role, as the worker itself has it, and state


class Streams:
    """Calls whose answers are known, each with a prompt of its own."""

    def __init__(self, client: Client, num_tokens: int) -> None:
        self._client = client
        self._num_tokens = num_tokens
        self._tasks: list[asyncio.Task[Answer]] = []

    def start(self, num: int) -> None:
        for _ in range(num):
            prompt = _prompt(len(self._tasks))
            self._tasks.append(asyncio.create_task(self._client.generate(prompt, self._num_tokens)))

    async def check(self) -> None:
        """Each answer so far is the one it must be, whole."""
        sampling = SamplingParams(max_tokens=self._num_tokens, temperature=0.0, ignore_eos=True)
        for number, got in enumerate(await asyncio.gather(*self._tasks)):
            assert got.code is grpc.StatusCode.OK, (got.code, got.details)
            assert got.tokens == emulated_answer(
                _prompt(number), sampling, self._num_tokens, VOCAB_SIZE, (EOS_TOKEN_ID,)
            )


def _prompt(number: int) -> list[int]:
    return [(31 * i + 7 * number) % 400 + 20 for i in range(100 + number)]


async def asked(cluster: ClusterUnderTest, path: str) -> dict[str, Any]:
    """Of the admin endpoint; empty while the controller is away."""
    tokens = json.loads((cluster.run_folder / "tokens.json").read_text())
    url, headers = f"http://127.0.0.1:{cluster.admin_port}", {"authorization": f"Bearer {tokens['viewer']['secret']}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=10) as admin:
        try:
            return dict((await admin.get(f"/admin/v1/{path}")).json())
        except httpx.TransportError:
            return {}


async def workers(cluster: ClusterUnderTest) -> Workers:
    """Empty while the controller is away."""
    listed = (await asked(cluster, "workers")).get("workers", ())
    return {w["worker_id"]: (w["load"]["role"] if w["load"] else "", w["state"]) for w in listed}


async def worker_pid(cluster: ClusterUnderTest, worker_id: str) -> int:
    listed = (await asked(cluster, "workers"))["workers"]
    return int(next(w["pid"] for w in listed if w["worker_id"] == worker_id))


async def until_led(cluster: ClusterUnderTest) -> None:
    """A controller is there and takes orders."""

    async def leads() -> bool:
        return bool((await asked(cluster, "pools")).get("autoscaler", {}).get("leads"))

    await until(leads, "a controller that leads")


async def ordered(cluster: ClusterUnderTest, *words: str) -> str:
    """What `baton` said of it."""
    done = await asyncio.to_thread(cluster.baton, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
