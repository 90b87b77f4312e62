"""The calls of a soak and the answers that must come: of the scripted model, whose answers follow from the prompt, and of a
random torch model, whose greedy answers a colocated worker gives beforehand.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import grpc.aio

from baton.request import SamplingParams
from baton.v1 import serving_pb2, serving_pb2_grpc
from bench.workload import Lengths, PlannedCall, Workload
from engine.scripted_runner import answer
from tests.soak.soak_cluster import Member, SoakCluster, Start
from tests.soak.soak_faults import ROOMY_BLOCKS
from tests.soak.soak_load import Asked
from tests.tiny_models import VOCAB_SIZE

INPUT, OUTPUT = Lengths(8, 600), Lengths(2, 24)  # up to 38 blocks in 10 chunks
VOCABULARY = range(3, VOCAB_SIZE)  # no special tokens
NUM_RECORDED = 64
# DESIGN section 7: logits depend a little on batch shape and chunking, so only clear choices can be compared across them.
CLEAR_GAP = 1e-3


def scripted_calls(seed: int) -> Callable[[int], Asked]:
    """Half of them are sampled, with a seed; some share prefixes."""
    workload = Workload(seed, INPUT, OUTPUT, shared_prefix_ratio=0.3, vocabulary=VOCABULARY)

    def asked(index: int) -> Asked:
        call = workload.call(index)
        params = SamplingParams(max_tokens=call.max_tokens, temperature=float(index % 2), seed=call.seed)
        expected = answer(call.token_ids, params, call.max_tokens, VOCAB_SIZE)
        return Asked(call.token_ids, _sampling(call, params.temperature), expected)

    return asked


async def recorded_calls(seed: int, model_dir: Path, folder: Path) -> Callable[[int], Asked]:
    """Greedy calls, in any order, whose answers a colocated worker has given; only those in which each choice was clear."""
    cluster = SoakCluster([Member("both-0", "both")], "worker.main", model_dir, folder, prefix_cache=False)
    try:
        await cluster.start(Start(ROOMY_BLOCKS))
        await cluster.wait_announced()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
            stub = serving_pb2_grpc.ServingStub(channel)
            calls = Workload(seed, INPUT, OUTPUT, vocabulary=VOCABULARY).calls()
            recorded = [
                found
                for call, _ in zip(calls, range(NUM_RECORDED), strict=False)
                if (found := await _record(stub, call))
            ]
    finally:
        await cluster.stop()
    assert not cluster.findings, cluster.findings
    assert len(recorded) > NUM_RECORDED / 2, "too few answers in which every choice was clear"
    rng = random.Random(f"{seed}/recorded")
    return lambda _: rng.choice(recorded)


async def _record(stub: serving_pb2_grpc.ServingAsyncStub, call: PlannedCall) -> Asked | None:
    """None where some choice was not clear."""
    sampling = _sampling(call, 0.0)
    request = serving_pb2.GenerateRequest(sampling=sampling, token_ids=serving_pb2.TokenIds(ids=call.token_ids))
    request.sampling.logprobs = 2
    tokens: list[int] = []
    entries: list[serving_pb2.Logprob] = []
    async for response in stub.Generate(request):
        tokens += response.chunk.token_ids
        entries += response.chunk.logprobs
    gaps = [entry.top[0].logprob - entry.top[1].logprob for entry in entries]
    assert len(tokens) == len(gaps) == call.max_tokens
    return Asked(call.token_ids, sampling, tokens) if min(gaps) > CLEAR_GAP else None


def _sampling(call: PlannedCall, temperature: float) -> serving_pb2.Sampling:
    return serving_pb2.Sampling(max_tokens=call.max_tokens, temperature=temperature, seed=call.seed, ignore_eos=True)
