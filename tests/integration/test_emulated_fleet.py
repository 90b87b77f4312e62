"""A prefill and a decode worker on emulated GPUs, as real processes: times as the timing module says, tokens exact."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from baton import clock
from baton.config import EmulationConfig, EngineConfig, KVTransferConfig, ModelConfig, WorkerConfig
from baton.request import SamplingParams
from baton.v1 import worker_pb2
from engine.emulated_model import emulated_model
from engine.emulated_runner import emulated_answer
from engine.timing.step_time import Batch
from tests.integration.fleet_rig import Fleet, WorkerProcess, fleet, stopping
from tests.router.router_rig import until
from tests.slow_clock import Slowed
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
    return WorkerProcess(config, folder)


def prompts(num_prompts: int, num_tokens: int) -> list[list[int]]:
    return [[(31 * i + 7 * n) % 400 + 20 for i in range(num_tokens + n)] for n in range(num_prompts)]


def emulated_ms(batch: Batch) -> float:
    return 1e3 * emulated_model(EMULATION).step_time().step_s(batch)


@Slowed(TIME_SCALE)
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


@Slowed(TIME_SCALE)
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


@Slowed(TIME_SCALE)
async def test_the_controller_sees_goodput_of_both_pools_and_what_steps_computed(
    pair: tuple[WorkerProcess, WorkerProcess], model_dir: Path, tmp_path: Path
) -> None:
    async with fleet(model_dir, tmp_path, *pair) as made:
        await made.until_ready()
        await until(lambda: all(map(made.controller.view, ("prefill-0", "decode-0"))), "the controller hears both")
        before = {worker: _load(made, worker) for worker in ("prefill-0", "decode-0")}
        prompt = prompts(1, 333)[0][::-1]  # that nobody has cached
        assert (await made.generate(prompt, NUM_TOKENS)).code is grpc.StatusCode.OK
        measures = made.controller.measures
        await until(
            lambda: any(window.num_judged for window in measures.view(clock.now_s()).classes),
            "the router has reported the call's end",
        )
        await until(lambda: all(_load(made, name).busy_s > old.busy_s for name, old in before.items()), "both said so")
        goodput = (await made.admin.get("/admin/v1/goodput")).json()
        prefill, decode = _load(made, "prefill-0"), _load(made, "decode-0")
        status = await made.status()
    window = goodput["classes"]["interactive"]["30s"]
    assert (window["num_judged"], window["arrived_per_s"] > 0, window["prompt_tokens"]["mean"]) == (1, True, 333)
    parts_ms = window["ttft_parts_ms"]
    assert sum(parts_ms.values()) == pytest.approx(window["ttft_ms"], rel=0.01)
    assert parts_ms["prefill"] >= emulated_ms(Batch(((333, 0),)))
    assert goodput["workers"]["prefill"]["prefill-0"]["30s"]["num_calls"] == 1
    assert goodput["workers"]["decode"]["decode-0"]["30s"]["num_calls"] == 1
    assert prefill.step_tokens - before["prefill-0"].step_tokens == 333
    assert prefill.prompt_pairs - before["prefill-0"].prompt_pairs == 333 * 334 / 2
    assert 1e3 * (prefill.busy_s - before["prefill-0"].busy_s) >= emulated_ms(Batch(((333, 0),)))
    assert decode.context_tokens > before["decode-0"].context_tokens
    assert "interactive: " in status


def _load(made: Fleet, worker_id: str) -> worker_pb2.Load:
    view = made.controller.view(worker_id)
    return view.load if view is not None else worker_pb2.Load()
