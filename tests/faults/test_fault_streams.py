"""Workers are killed under load, and every answer is the one of the undisturbed run, to the last bit of its logprobs.

With `deterministic: true` and real torch engines: what one worker has begun another one goes on with. The scripted soak
(tests/soak) has more deaths, stops and cuts, and compares tokens only.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest

from baton.v1 import serving_pb2, serving_pb2_grpc
from tests.soak.soak_cluster import Member, SoakCluster, Start
from tests.soak.soak_faults import ROOMY_BLOCKS
from tests.tiny_models import make_tiny_model

MEMBERS = (
    Member("prefill-0", "prefill", mortal=True),
    Member("prefill-1", "prefill", mortal=True),
    Member("decode-0", "decode", mortal=True),
    Member("decode-1", "decode", mortal=True),
)
MAX_TOKENS = 60
NUM_KILLS = 4
BETWEEN_S = (0.1, 0.6)  # after a worker is back, until the next one dies
PATIENCE_S = 60.0

KINDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "narrowed": {"temperature": 0.8, "seed": 8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "seed": 9, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "several": {"temperature": 1.0, "seed": 10, "n": 3},
    "minimum": {"temperature": 1.0, "seed": 11, "min_tokens": 40, "stop_token_ids": list(range(3, 60))},
    "logprobs": {"temperature": 1.0, "seed": 12, "logprobs": 5},
    "biased": {"temperature": 0.0, "logit_bias": {300: 2.0}},
}


@dataclass
class Heard:
    """One whole answer."""

    text: dict[int, str] = field(default_factory=dict)  # by choice
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[tuple[int, int, float, tuple[float, ...]]] = field(default_factory=list)  # choice, index, own, top
    ends: list[tuple[int, int, str]] = field(default_factory=list)  # choice, finish reason, stop match
    completion_tokens: int = 0


def requests(num_rounds: int) -> list[serving_pb2.GenerateRequest]:
    rng = random.Random(0)
    made = []
    for _ in range(num_rounds):
        for sampling in KINDS.values():
            request = serving_pb2.GenerateRequest(
                sampling=serving_pb2.Sampling(max_tokens=MAX_TOKENS, **sampling),  # type: ignore[arg-type]
                slo=serving_pb2.Slo(class_name="batch"),  # it may take long: nothing is shed
            )
            request.token_ids.ids.extend(rng.randrange(3, 500) for _ in range(rng.randrange(5, 200)))
            made.append(request)
    return made


async def hear(stub: serving_pb2_grpc.ServingAsyncStub, request: serving_pb2.GenerateRequest) -> Heard:
    heard = Heard()
    async for response in stub.Generate(request, timeout=PATIENCE_S):
        match response.WhichOneof("event"):
            case "chunk":
                chunk = response.chunk
                ids = heard.token_ids.setdefault(chunk.choice, [])
                assert not chunk.token_ids or chunk.index == len(ids), "a token is lost or repeated"
                heard.logprobs += [
                    (chunk.choice, len(ids) + at, entry.logprob, tuple(top.logprob for top in entry.top))
                    for at, entry in enumerate(chunk.logprobs)
                ]
                ids += chunk.token_ids
                heard.text[chunk.choice] = heard.text.get(chunk.choice, "") + chunk.text
            case "done":
                heard.ends = [(end.choice, end.finish_reason, end.stop_match) for end in response.done.choices]
                heard.completion_tokens = response.done.usage.completion_tokens
            case _:
                raise AssertionError(f"it failed with {response.error.code}: {response.error.message}")
    heard.logprobs.sort()
    return heard


def with_stop_strings(
    asked: Sequence[serving_pb2.GenerateRequest], undisturbed: Sequence[Heard]
) -> list[serving_pb2.GenerateRequest]:
    """The same with a stop string taken from the middle of the answer, so that it is found, often across tokens."""
    made = []
    for request, heard in zip(asked, undisturbed, strict=True):
        text = heard.text[0]
        stop = text[len(text) // 2 : len(text) // 2 + 4]
        if stop and "\ufffd" not in stop:  # which stands for bytes that are no text
            again = serving_pb2.GenerateRequest()
            again.CopyFrom(request)
            again.stop.append(stop)
            made.append(again)
    return made


async def kill_in_turn(cluster: SoakCluster, rng: random.Random) -> None:
    """One of each pair after the other, each back before the next one goes."""
    for number in range(NUM_KILLS):
        await asyncio.sleep(rng.uniform(*BETWEEN_S))
        worker = list(cluster.workers.values())[(2 if number % 2 else 0) + rng.randrange(2)]
        cluster.kill_worker(worker)
        await cluster.start_worker(worker, Start(ROOMY_BLOCKS))
        assert await cluster.wait_announced(), cluster.findings + cluster.deaths()


@pytest.mark.timeout(240)
async def test_answers_are_those_of_the_undisturbed_run_whoever_is_killed(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path / "model", seed=3)
    cluster = SoakCluster(
        MEMBERS, "worker.main", model_dir, tmp_path, prefix_cache=True, deterministic=True
    )  # fmt: skip
    try:
        await cluster.start(Start(ROOMY_BLOCKS))
        assert await cluster.wait_announced(), cluster.findings + cluster.deaths()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
            stub = serving_pb2_grpc.ServingStub(channel)
            asked = requests(num_rounds=2)
            plain = [await hear(stub, request) for request in asked]
            asked += with_stop_strings(asked, plain)
            undisturbed = plain + [await hear(stub, request) for request in asked[len(plain) :]]
            killing = asyncio.create_task(kill_in_turn(cluster, random.Random(1)))
            num_rounds = 0
            while not killing.done():
                answers = await asyncio.gather(*(hear(stub, request) for request in asked))
                assert answers == undisturbed
                num_rounds += 1
            await killing
    finally:
        await cluster.stop()
    assert cluster.findings == []
    assert num_rounds
    assert any(match for heard in undisturbed for _, _, match in heard.ends), "no stop string was found"
