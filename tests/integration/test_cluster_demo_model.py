"""The demo model, served P/D and colocated by two clusters: the same answers through every door."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from typing import Any

import grpc
import openai
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from openai.types.chat import ChatCompletionMessageParam

from tests.integration.cluster_rig import Client, ClusterUnderTest, until

QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Name three colours and say why you like them."}
]
LONG = "The harbour was quiet in the morning, and the boats lay side by side. " * 90  # more than two chunks


@pytest.mark.timeout(400)
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
async def test_pd_answers_as_colocated(
    pd_cluster: ClusterUnderTest, colocated_cluster: ClusterUnderTest, sampling: dict[str, Any]
) -> None:
    prompts = ["Hello", "The capital of France is", LONG]
    async with Client(pd_cluster) as pd, Client(colocated_cluster) as colocated:
        for prompt in prompts:
            apart = await pd.generate(prompt, 16, logprobs=2, **sampling)
            together = await colocated.generate(prompt, 16, logprobs=2, **sampling)
            assert apart.code is together.code is grpc.StatusCode.OK, (apart.details, together.details)
            if apart.tokens != together.tokens:  # allowed only where the reference itself was undecided (DESIGN 7)
                first = next(i for i in range(16) if apart.tokens[i] != together.tokens[i])
                best, second = together.logprobs[first].top[:2]
                assert best.logprob - second.logprob <= 1e-3, f"token {first} of {prompt[:20]!r} differs"
            assert apart.done is not None
            assert together.done is not None
            assert apart.done.usage.prompt_tokens == together.done.usage.prompt_tokens
            assert apart.done.timings.prefill_worker == "prefill-0"
            assert apart.done.timings.decode_worker == "decode-0"
            assert "memory" in apart.done.timings.transport, "shared memory, as UCX itself reports it"
            assert together.done.timings.kv_bytes == 0


async def test_a_repeated_prompt_is_cached_on_prefill_and_not_shipped_twice(pd_cluster: ClusterUnderTest) -> None:
    ids = [(7 * i) % 900 + 100 for i in range(100)]
    async with Client(pd_cluster) as client:
        first, second = await client.generate(ids, 4), await client.generate(ids, 4)
        assert first.done is not None
        assert second.done is not None
        assert (first.done.usage.cached_tokens, second.done.usage.cached_tokens) == (0, 96)
        assert first.done.usage.prompt_tokens == second.done.usage.prompt_tokens == 100
        assert first.tokens == second.tokens
        block_bytes = 46_080 * 16
        assert first.done.timings.kv_bytes == 7 * block_bytes
        assert second.done.timings.kv_bytes == 1 * block_bytes, "decode holds six of the seven blocks"


def test_the_official_openai_client_streams(pd_cluster: ClusterUnderTest) -> None:
    with openai.OpenAI(base_url=f"{pd_cluster.http_url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        whole = client.chat.completions.create(
            model=model,
            messages=QUESTION,
            max_tokens=24,
            temperature=0,
        )
        pieces = []
        usage = None
        with client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=24, temperature=0, stream=True,
            stream_options={"include_usage": True},
        ) as stream:  # fmt: skip
            for chunk in stream:
                if chunk.choices:
                    pieces.append(chunk.choices[0].delta.content or "")
                if chunk.usage:
                    usage = chunk.usage
        assert "".join(pieces) == whole.choices[0].message.content
        assert usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_reflection_lists_the_service(pd_cluster: ClusterUnderTest) -> None:
    with grpc.insecure_channel(pd_cluster.grpc_address) as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert "baton.v1.Serving" in services
    assert "grpc.health.v1.Health" in services


def test_chat_and_status_talk_to_the_cluster(pd_cluster: ClusterUnderTest) -> None:
    chat = pd_cluster.baton("chat", "--stats", "Say hello.")
    assert chat.returncode == 0, chat.stderr
    assert "TTFT" in chat.stdout + chat.stderr
    status = pd_cluster.baton("status")
    assert status.returncode == 0
    assert "prefill-0" in status.stdout
    assert "decode-0" in status.stdout


def test_a_second_cluster_on_a_taken_port_says_which_and_how_to_move(pd_cluster: ClusterUnderTest) -> None:
    other = ClusterUnderTest("--model", "smollm2")
    other.grpc_port = pd_cluster.grpc_port
    with pytest.raises(AssertionError) as failure:
        other.start()
    said = str(failure.value)
    assert str(pd_cluster.grpc_port) in said
    assert "--grpc-port" in said
    assert other.process.returncode != 0


async def test_an_slo_change_is_in_force_within_a_second_and_counts_verdicts(pd_cluster: ClusterUnderTest) -> None:
    token = json.loads((pd_cluster.run_folder / "tokens.json").read_text())

    def admin(method: str, path: str, body: object = None, **headers: str) -> tuple[int, str, dict[str, object]]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{pd_cluster.admin_port}/admin/v1{path}",
            method=method,
            data=json.dumps(body).encode() if body is not None else None,
            headers={
                "authorization": f"Bearer {token['operator']['secret']}",
                "content-type": "application/json",
                **headers,
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return reply.status, reply.headers["etag"] or "", json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, "", json.loads(error.read())

    status, etag, before = await asyncio.to_thread(admin, "GET", "/slo/interactive")
    assert status == 200
    impossible = {"ttft_ms": 0.5, "reason": "a test"}
    assert (await asyncio.to_thread(admin, "PATCH", "/slo/interactive", impossible))[0] == 428
    assert (await asyncio.to_thread(admin, "PATCH", "/slo/interactive", impossible, **{"if-match": '"999"'}))[0] == 412
    status, etag, after = await asyncio.to_thread(admin, "PATCH", "/slo/interactive", impossible, **{"if-match": etag})
    assert status == 200, after
    changed_s = time.monotonic()

    async def in_force() -> bool:
        status, _, seen = await asyncio.to_thread(admin, "GET", "/slo")
        assert status == 200
        routers = seen["routers"]
        assert isinstance(routers, list)
        return all(router["slo_version"] == seen["version"] for router in routers)

    await until(in_force, "the router reports the new version")
    print(f"in force and reported after {time.monotonic() - changed_s:.2f} s")
    async with Client(pd_cluster) as client:
        assert (await client.generate("Hello", 3)).done is not None
    restore = {"ttft_ms": before["ttft_ms"], "reason": "a test is over"}
    assert (await asyncio.to_thread(admin, "PATCH", "/slo/interactive", restore, **{"if-match": etag}))[0] == 200
    metrics = pd_cluster.get("/metrics")[1].decode()
    violations = [line for line in metrics.splitlines() if line.startswith("baton_request_slo_violation_total{")]
    assert any('type="ttft"' in line and float(line.split()[-1]) >= 1 for line in violations), violations
