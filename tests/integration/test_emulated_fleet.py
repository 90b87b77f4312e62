"""A prefill and a decode worker on emulated GPUs, as real processes: times as the timing module says, tokens exact."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from baton.config import EmulationConfig, EngineConfig, KVTransferConfig, ModelConfig, WorkerConfig
from baton.request import SamplingParams
from baton.scaled_clock import slowed
from engine.emulated_model import emulated_model
from engine.emulated_runner import emulated_answer
from engine.timing.step_time import Batch
from tests.integration.fleet_rig import WorkerProcess, fleet, stopping
from tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, make_tiny_model

TIME_SCALE = 10.0  # a decode step of the 70B on 4 H100 takes about 0.1 s then: 2 cores of CI keep up
EMULATION = EmulationConfig(gpu="h100", model="llama-3.1-70b", tp=4, time_scale=TIME_SCALE)
NUM_PROMPT_TOKENS = 1_200
NUM_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
GENEROUS = 2.0  # how much longer a busy machine may make what should take a given time


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    folder = tmp_path_factory.mktemp("emulated")
    with stopping(start(folder, model_dir, "prefill"), start(folder, model_dir, "decode")) as (prefill, decode):
        yield prefill, decode


def start(folder: Path, model_dir: Path, role: str) -> WorkerProcess:
    config = WorkerConfig(
        f"{role}-0",
        role=role,
        model=ModelConfig(path=str(model_dir), served_name="emulated"),
        engine=EngineConfig(num_blocks=2_000, chunk_tokens=2_048),
        kv=KVTransferConfig(mode="staged", frame_bytes=64 << 10, num_slots=4),
        emulation=EMULATION,
        log_level="warning",
    )
    return WorkerProcess(slowed(config, TIME_SCALE), folder)


def prompts(num_prompts: int, num_tokens: int) -> list[list[int]]:
    return [[(31 * i + 7 * n) % 400 + 20 for i in range(num_tokens + n)] for n in range(num_prompts)]


def emulated_ms(batch: Batch) -> float:
    """What a step takes on this machine's clock."""
    return 1e3 * TIME_SCALE * emulated_model(EMULATION).step_time().step_s(batch)


async def test_times_are_the_timing_module_s_and_tokens_the_sequence_s_own(
    pair: tuple[WorkerProcess, WorkerProcess], model_dir: Path, tmp_path: Path
) -> None:
    async with fleet(model_dir, tmp_path, *pair) as made:
        await made.until_ready()
        (prompt,) = prompts(1, NUM_PROMPT_TOKENS)
        got = await made.generate(prompt, NUM_TOKENS)
    assert got.code is grpc.StatusCode.OK, got.details
    assert got.tokens == emulated_answer(prompt, GREEDY, NUM_TOKENS, VOCAB_SIZE, (EOS_TOKEN_ID,))
    assert got.done is not None
    timings = got.done.timings
    prefill_ms = emulated_ms(Batch(((NUM_PROMPT_TOKENS, 0),)))
    decode_ms = emulated_ms(Batch((), 1, NUM_PROMPT_TOKENS + NUM_TOKENS // 2))
    transfer_ms = 1e3 * emulated_model(EMULATION).block_wire_s(16) * NUM_PROMPT_TOKENS / 16
    assert prefill_ms <= timings.ttft_ms <= GENEROUS * prefill_ms
    assert 0.98 * decode_ms <= timings.tpot_ms <= GENEROUS * decode_ms
    assert transfer_ms + 0.98 * decode_ms <= timings.handoff_gap_ms <= GENEROUS * (transfer_ms + 2 * decode_ms)
    assert timings.kv_bytes < NUM_PROMPT_TOKENS * emulated_model(EMULATION).kv_bytes_per_token / 1_000
    assert timings.transport.startswith("emulated over ")


async def test_streams_that_share_steps_and_network_cards_stay_exact(
    pair: tuple[WorkerProcess, WorkerProcess], model_dir: Path, tmp_path: Path
) -> None:
    asked = prompts(6, 100)
    async with fleet(model_dir, tmp_path, *pair) as made:
        await made.until_ready()
        answers = await asyncio.gather(*(made.generate(prompt, NUM_TOKENS) for prompt in asked))
        status = await made.status()
    for prompt, got in zip(asked, answers, strict=True):
        assert got.code is grpc.StatusCode.OK, got.details
        assert got.tokens == emulated_answer(prompt, GREEDY, NUM_TOKENS, VOCAB_SIZE, (EOS_TOKEN_ID,))
    assert "emulated over " in status
