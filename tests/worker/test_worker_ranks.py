"""Workers of several ranks, as real processes: their KV fits workers of any degree, and a dead rank takes its worker with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from baton.config import EngineConfig, KVTransferConfig, ModelConfig, WorkerConfig
from baton.v1 import serving_pb2
from tests.integration.cluster_rig import Answer, take
from tests.integration.fleet_rig import WorkerProcess, fleet, stopping
from tests.tiny_models import make_tiny_model

PROMPT = [(31 * i + 7) % 400 + 20 for i in range(100)]  # six blocks and a part of one, in four chunks
NUM_TOKENS = 40
LONG = 600


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def start(folder: Path, model: Path, worker_id: str, num_ranks: int) -> WorkerProcess:
    config = WorkerConfig(
        worker_id,
        role=worker_id.partition("-")[0],
        model=ModelConfig(path=str(model)),
        engine=EngineConfig(num_blocks=256, chunk_tokens=32, num_threads=1, tensor_parallel_size=num_ranks),
        kv=KVTransferConfig(frame_bytes=64 << 10, num_slots=4),
        log_level="warning",
    )
    return WorkerProcess(config, folder)


def ranks_of(worker: WorkerProcess) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(worker.process.pid).children()
        if "engine.tensor_parallel.rank" in child.cmdline()
    ]


async def test_kv_goes_between_workers_of_any_degree(model_dir: Path, tmp_path: Path) -> None:
    answers = {}
    with stopping(start(tmp_path, model_dir, "both-0", 1)) as (alone,):
        async with fleet(model_dir, tmp_path, alone) as served:
            await served.until_ready()
            answers["one worker of one rank"] = (await served.generate(PROMPT, NUM_TOKENS)).tokens
    for prefill_ranks, decode_ranks in ((2, 1), (1, 2)):
        name = f"{prefill_ranks} to {decode_ranks}"
        folder = tmp_path / name
        folder.mkdir()
        pair = (
            start(folder, model_dir, "prefill-0", prefill_ranks),
            start(folder, model_dir, "decode-0", decode_ranks),
        )
        with stopping(*pair) as workers:
            ranks = [rank for worker in workers for rank in ranks_of(worker)]
            assert len(ranks) == prefill_ranks + decode_ranks - 2
            async with fleet(model_dir, folder, *workers) as served:
                await served.until_ready()
                answers[name] = (await served.generate(PROMPT, NUM_TOKENS)).tokens
        assert not [rank for rank in ranks if rank.is_running()]
    assert len(answers["1 to 2"]) == NUM_TOKENS
    assert set(map(tuple, answers.values())) == {tuple(answers["1 to 2"])}


def test_a_rank_that_dies_takes_a_worker_along_that_has_nothing_to_do(model_dir: Path, tmp_path: Path) -> None:
    worker = start(tmp_path, model_dir, "both-0", 2).wait_ready()
    (rank,) = ranks_of(worker)
    rank.kill()
    assert "both-0 ended with 1" in worker.wait_ended()


async def test_a_rank_that_dies_takes_its_worker_along_and_its_streams_go_on(model_dir: Path, tmp_path: Path) -> None:
    lost = start(tmp_path, model_dir, "decode-0", 2)
    others = (start(tmp_path, model_dir, "prefill-0", 1), start(tmp_path, model_dir, "decode-1", 1))
    with stopping(*others) as (prefill, decode):
        lost.wait_ready()
        (rank,) = ranks_of(lost)
        async with fleet(model_dir, tmp_path, prefill, lost) as served:
            await served.until_ready()
            answer = Answer()
            async for response in served.stub.Generate(greedy(PROMPT, LONG), timeout=60.0):
                take(answer, response)
                if len(answer.tokens) > NUM_TOKENS and not served.controller.view(decode.worker_id):
                    served.add(decode)
                    await served.until_link(prefill.worker_id, decode.worker_id, "ready")
                    rank.kill()
            assert "decode-0 ended with 1" in await asyncio.to_thread(lost.wait_ended)
            assert len(answer.tokens) == LONG
            assert answer.tokens == (await served.generate(PROMPT, LONG)).tokens


def greedy(prompt: list[int], max_tokens: int) -> serving_pb2.GenerateRequest:
    sampling = serving_pb2.Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return serving_pb2.GenerateRequest(sampling=sampling, token_ids=serving_pb2.TokenIds(ids=prompt))
