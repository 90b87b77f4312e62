"""What users of a running cluster see when clients leave and workers die. The router process is never touched."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence

import grpc
import psutil
import pytest

from tests.integration.cluster_rig import Answer, Client, ClusterUnderTest, take, until
from tests.tiny_models import VOCAB_SIZE
from tests.traffic import Traffic, soak


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(37 * i * i + 11 * i + salt) % (VOCAB_SIZE - 10) + 5 for i in range(length)]


def worker_pids(cluster: ClusterUnderTest) -> dict[str, int]:
    status = cluster.status()
    workers = status["workers"]
    assert isinstance(workers, list)
    return {worker["worker_id"]: worker["pid"] for worker in workers}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_killed_worker_ends_its_calls_by_name_and_the_next_call_works(
    fault_cluster: ClusterUnderTest, victim: str
) -> None:
    before = worker_pids(fault_cluster)
    router_pid = fault_cluster.pid_of("router.main")
    async with Client(fault_cluster) as client:
        reference = await client.generate(prompt(100), 30)
        assert reference.done is not None
        answer = Answer()
        call = client.stream(prompt(1_500, salt=3), 2_000)
        if victim == "decode-0":
            async for response in call:
                take(answer, response)
                if len(answer.tokens) >= 5:
                    break
        os.kill(before[victim], signal.SIGKILL)
        try:
            async for response in call:
                take(answer, response)
        except grpc.aio.AioRpcError as error:
            answer.code, answer.details = error.code(), error.details() or ""
        if answer.tokens and len(answer.tokens) < 2_000:
            assert answer.code is grpc.StatusCode.UNAVAILABLE
            assert victim in answer.details
        again = await client.generate(prompt(100), 30)  # waits for the actor that Ray restarts
        assert again.code is grpc.StatusCode.OK, again.details
        assert again.tokens == reference.tokens
        took_s = await client.until_ready(2)
        print(f"{victim} killed: all ready {took_s:.1f} s after the next answer")
        await client.until_idle()
    after = worker_pids(fault_cluster)
    assert after[victim] != before[victim]
    assert [pid for name, pid in after.items() if name != victim] == [
        pid for name, pid in before.items() if name != victim
    ]
    assert fault_cluster.pid_of("router.main") == router_pid


@pytest.mark.parametrize("stage", ["at once", "prefill", "first token", "decode"])
async def test_a_client_that_leaves_frees_everything_and_the_next_call_is_right(
    fault_cluster: ClusterUnderTest, stage: str
) -> None:
    async with Client(fault_cluster) as client:
        reference = await client.generate(prompt(100), 20)
        for n in range(8):
            call = client.stream(prompt(1_900, salt=n), 1_000)
            if stage == "prefill":
                await asyncio.sleep(0.01 * n)
            elif stage != "at once":
                answer = Answer()
                async for response in call:
                    take(answer, response)
                    if len(answer.tokens) > (1 if stage == "first token" else 10):
                        break
            call.cancel()
        took_s = await client.until_idle()
        print(f"idle {took_s:.2f} s after the last cancel ({stage})")
        assert (await client.generate(prompt(100), 20)).tokens == reference.tokens


async def test_queued_calls_can_leave_too(fault_cluster: ClusterUnderTest) -> None:
    async with Client(fault_cluster) as client:
        calls = [asyncio.create_task(client.generate(prompt(1_900, salt=n), 50)) for n in range(40)]
        await asyncio.sleep(0.2)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await client.until_idle()
        assert len((await client.generate(prompt(33), 7)).tokens) == 7


@pytest.mark.timeout(240)
@pytest.mark.parametrize("duration_s", [20.0, pytest.param(60.0, marks=pytest.mark.slow)])
async def test_a_time_of_mixed_traffic_leaves_nothing_behind(
    fault_cluster: ClusterUnderTest, duration_s: float
) -> None:
    def footprint() -> dict[int, tuple[int, int]]:
        return {
            process.pid: (process.num_threads(), process.num_fds())
            for process in fault_cluster.processes()
            if process.pid in interesting
        }

    interesting = {*worker_pids(fault_cluster).values()}
    rng = random.Random(5)
    async with Client(fault_cluster) as client:

        async def generate(prompt_ids: Sequence[int], max_tokens: int, cancel_after: int | None) -> list[int]:
            ids = [token % (VOCAB_SIZE - 10) + 5 for token in prompt_ids]
            answer = Answer()
            call = client.stream(ids, max_tokens, temperature=rng.choice([0.0, 0.8]))
            if cancel_after == 0:
                await asyncio.sleep(0.05 * rng.random())
                call.cancel()
                return []
            async for response in call:
                take(answer, response)
                if cancel_after is not None and len(answer.tokens) >= cancel_after:
                    call.cancel()
                    return answer.tokens
            return answer.tokens

        await soak(generate, Traffic(seed=1), num_calls=32)  # warm-up: connections, thread pools
        await client.until_idle()
        before = footprint()
        report = await soak(generate, Traffic(seed=2), duration_s=duration_s)
        print(
            f"{report.num_completed} calls done, {report.num_cancelled} cancelled in {report.duration_s:.0f} s, "
            f"{report.num_completed / report.duration_s:.1f} calls/s"
        )
        assert report.errors == []
        assert report.num_completed > 0
        assert report.num_cancelled > 0
        took_s = await client.until_idle()
        print(f"idle {took_s:.2f} s after the last call")
        loads = {worker.worker: worker for worker in (await client.loads()).workers}
        assert set(loads) == {"prefill-0", "decode-0"}

        def settled() -> bool:
            after = footprint()
            # gRPC and torch keep small pools that grow on demand; a leak per call would be hundreds here
            return all(
                after[pid][0] <= threads + 8 and after[pid][1] <= fds + 16 for pid, (threads, fds) in before.items()
            )

        await until(settled, f"threads and fds back: before {before}, now {footprint()}")


def test_every_listening_port_is_on_loopback(fault_cluster: ClusterUnderTest) -> None:
    outside = [
        (process.name(), connection.laddr)
        for process in fault_cluster.processes()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    ]
    assert outside == []
