"""A pool too small for its sequences: preempted ones are recomputed where they are and their text does not change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.config import EngineConfig, ModelConfig, WorkerConfig
from baton.request import Request, SamplingParams
from baton.v1 import worker_pb2
from tests.exactness.transformers_reference import Reference
from tests.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.worker.session_client import SessionClient
from worker.server import WorkerServer

EPOCH = 0xE1
NUM_CALLS = 16
NUM_BLOCKS = 64  # 1,024 tokens, where 16 calls would need over 4,000
SAMPLING = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
PROMPTS = [[(37 * i * i + 11 * i + 53 * n) % (VOCAB_SIZE - 10) + 5 for i in range(200 + n)] for n in range(NUM_CALLS)]


@pytest.mark.parametrize("colocated", [True, False], ids=["colocated", "disaggregated"])
async def test_sixteen_calls_in_64_blocks_equal_the_reference(tmp_path: Path, colocated: bool) -> None:
    model_dir = make_tiny_model(tmp_path / "tiny")
    reference = Reference(model_dir)
    expected = [reference.answer(prompt, SAMPLING) for prompt in PROMPTS]
    roles = ("both",) if colocated else ("prefill", "decode")
    engine = EngineConfig(num_blocks=NUM_BLOCKS, chunk_tokens=64, num_threads=1)
    workers = [
        WorkerServer(WorkerConfig(role, role=role, model=ModelConfig(path=str(model_dir)), engine=engine))
        for role in roles
    ]
    sessions: list[SessionClient] = []
    try:
        for worker in workers:
            worker.start()
            sessions.append(await SessionClient(worker.address, EPOCH).__aenter__())
        first, last = sessions[0], sessions[-1]
        decode = worker_pb2.Peer(worker_id="decode", epoch=workers[-1].epoch, address=workers[-1].address)
        for n, prompt in enumerate(PROMPTS):
            first.submit(Request(EPOCH << 32 | n + 1, tuple(prompt), SAMPLING), None if colocated else decode)
        async with asyncio.timeout(90):
            await last.until(lambda: len(last.ended) == NUM_CALLS)
        for n, answer in enumerate(expected):
            seq = EPOCH << 32 | n + 1
            tokens = first.tokens[seq] | last.tokens[seq]
            for index, token in enumerate(answer.tokens):
                if tokens[index] != token:
                    assert answer.undecided[index], f"call {n} token {index} is {tokens[index]}, not {token}"
                    break
        assert last.load.num_preemptions > 0
        await last.until(lambda: last.load.active_blocks == last.load.reserved_blocks == 0)
    finally:
        for session in sessions:
            await session.__aexit__()
        for worker in workers:
            worker.stop()
