"""What users of a running cluster see when everything but the workers is killed: router, controller, Ray's head."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import httpx
import pytest

from cli.processes import living_pids
from tests.integration.cluster_rig import START_TIMEOUT_S, Answer, Client, ClusterUnderTest, take, until
from tests.tiny_models import VOCAB_SIZE
from tests.traffic import Traffic, soak


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(37 * i * i + 11 * i + salt) % (VOCAB_SIZE - 10) + 5 for i in range(length)]


def record(cluster: ClusterUnderTest) -> dict[str, Any]:
    """What `baton up` says of its processes."""
    return dict(json.loads((cluster.run_folder / "cluster.json").read_text()))


def pids(cluster: ClusterUnderTest) -> dict[str, int]:
    """Of its processes but the workers, by name."""
    return dict(record(cluster)["pids"])


def workers(cluster: ClusterUnderTest) -> list[tuple[object, ...]]:
    """Who they are, as far as it must not change."""
    said = cluster.status()["workers"]
    assert isinstance(said, list)
    return [tuple(worker[key] for key in ("worker_id", "pid", "epoch", "num_restarts")) for worker in said]


async def until_back(cluster: ClusterUnderTest, before: dict[str, int], *names: str) -> None:
    """Wait until these run again."""

    def back() -> bool:
        now = record(cluster)
        return all(now["pids"][name] != before[name] and now["states"][name] == "up" for name in names)

    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        if back():
            return
        assert time.monotonic() < deadline_s, f"{names} are not back: {record(cluster)}"
        await asyncio.sleep(0.1)


async def read_to_the_end(answer: AsyncIterator[object]) -> None:
    async for _ in answer:
        pass


def operator(cluster: ClusterUnderTest) -> httpx.Client:
    """A client of the admin endpoint that may change things."""
    secret = json.loads((cluster.run_folder / "tokens.json").read_text())["operator"]["secret"]
    url = f"http://127.0.0.1:{cluster.admin_port}/admin/v1"
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {secret}"})


@pytest.mark.timeout(240)
async def test_a_killed_router_s_calls_end_with_an_error_and_its_successor_serves_as_before(
    fault_cluster: ClusterUnderTest,
) -> None:
    before, workers_before = pids(fault_cluster), workers(fault_cluster)
    with operator(fault_cluster) as admin:
        tag = admin.get("/slo").headers["etag"]
        body = {"ttft_ms": 7_777.0, "tpot_ms": 777.0, "reason": "set live"}
        put = admin.put("/slo/interactive", json=body, headers={"if-match": tag})
        assert put.status_code == 200, put.text
        async with Client(fault_cluster) as client:
            reference = await client.generate(prompt(100), 20)
            calls = [aiter(client.stream(prompt(200, salt=n), 1_500)) for n in range(6)]
            for call in calls:
                await anext(call)
            os.kill(before["router"], signal.SIGKILL)
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as broken:
                    await read_to_the_end(call)
                assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
        async with Client(fault_cluster) as client:

            async def serves() -> bool:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    return len((await client.loads()).workers) == len(workers_before)
                return False

            await until(serves, "the next router lists all workers")
            assert (await client.generate(prompt(100), 20)).tokens == reference.tokens
            took_s = await client.until_idle()
            print(f"idle {took_s:.2f} s after the first call through the next router")
        await until_back(fault_cluster, before, "router")
        assert workers(fault_cluster) == workers_before
        assert admin.get("/slo/interactive").json()["ttft_ms"] == 7_777.0

        new_pid, version = pids(fault_cluster)["router"], int(put.headers["etag"].strip('"'))

        def in_force() -> bool:
            routers = admin.get("/attainment").json()["routers"]
            return any((router["pid"], router["slo_version"]) == (new_pid, version) for router in routers)

        await until(in_force, "the next router has the live targets")
        rollback = {"version": version - 1, "reason": "as other tests found it"}
        back = admin.post("/slo:rollback", json=rollback, headers={"if-match": "*"})
        assert back.status_code == 200, back.text


@pytest.mark.parametrize("away_s", [pytest.param(5.0), pytest.param(120.0, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
async def test_controller_and_ray_s_head_may_be_away_under_load_and_come_back_to_the_same_workers(
    fault_cluster: ClusterUnderTest, away_s: float
) -> None:
    before, workers_before = pids(fault_cluster), workers(fault_cluster)
    rng, stop = random.Random(7), asyncio.Event()
    async with Client(fault_cluster) as client:

        async def generate(prompt_ids: Sequence[int], max_tokens: int, cancel_after: int | None) -> list[int]:
            ids = [token % (VOCAB_SIZE - 10) + 5 for token in prompt_ids]
            answer = Answer()
            call = client.stream(ids, max_tokens, temperature=rng.choice([0.0, 0.8]))
            async for response in call:
                take(answer, response)
            return answer.tokens

        async def load() -> int:
            num_calls = 0
            while not stop.is_set():
                traffic = Traffic(seed=num_calls, num_clients=4, max_prompt_tokens=500, cancel_ratio=0.0)
                report = await soak(generate, traffic, num_calls=8)
                assert report.errors == []
                num_calls += report.num_completed
            return num_calls

        loading = asyncio.create_task(load())
        head = living_pids([before["ray"]])
        for pid in (before["controller"], *head):
            os.kill(pid, signal.SIGSTOP)
        await asyncio.wait([loading], timeout=away_s)
        for pid in (before["controller"], *head):
            os.kill(pid, signal.SIGKILL)
        await until_back(fault_cluster, before, "controller", "ray")
        stop.set()
        num_calls = await loading
        print(f"{num_calls} calls while controller and head were away")
        assert num_calls > 0
        assert workers(fault_cluster) == workers_before
        await client.until_ready(len(workers_before))
        await client.until_idle()
