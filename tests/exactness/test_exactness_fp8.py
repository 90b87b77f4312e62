"""Decode from an 8-bit pool, in whole workers over UCX: what is converted on the way, what is equal to what, what is refused.

P fp8  -> D fp8   equals a colocated fp8 worker, token for token: the bytes are shipped as they are
P fp32 -> D fp8   equals one process that prefills in fp32, converts and decodes in 8 bits, token for token; a colocated
                  fp8 worker it only comes near (tests/engine/test_model_fp8.py), whose prefill attends to 8-bit KV itself
P fp8  -> D fp32  is refused by name
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.config import EngineConfig, ModelConfig, WorkerConfig
from baton.kv_layout import KVLayout
from baton.model_files import load_model_files
from kv_transfer.kv_views import Fp8Export
from tests.engine.fp8_scoring import Scorer
from tests.exactness.pair_calls import NUM_TOKENS, PROMPTS, Calls, running
from tests.tiny_models import make_tiny_model
from worker.server import WorkerServer

WORKERS = {  # role and KV dtype
    "prefill-32": ("prefill", "float32"),
    "prefill-8": ("prefill", "fp8"),
    "decode-8": ("decode", "fp8"),
    "decode-32": ("decode", "float32"),
    "both-8": ("both", "fp8"),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def workers(model_dir: Path) -> Iterator[dict[str, WorkerServer]]:
    engine = EngineConfig(num_blocks=128, prefix_cache=False, num_threads=1)
    configs = (
        WorkerConfig(
            name, role=role, model=ModelConfig(str(model_dir)), engine=replace(engine, kv_cache_dtype=kv_dtype)
        )
        for name, (role, kv_dtype) in WORKERS.items()
    )
    with running(configs) as started:
        yield started


@pytest.fixture
async def calls(workers: dict[str, WorkerServer]) -> AsyncIterator[Calls]:
    async with Calls(workers) as calls:
        yield calls


async def test_equal_precisions_equal_the_colocated_worker_token_for_token(calls: Calls) -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float8_e4m3")
    for prompt in PROMPTS:
        together, _ = await calls.answer("both-8", "both-8", prompt)
        apart, stats = await calls.answer("prefill-8", "decode-8", prompt)
        assert apart == together
        assert stats.kv_bytes == layout.num_blocks_for(len(prompt)) * layout.block_bytes


async def test_fp32_prefill_feeds_an_8_bit_decode_worker_as_one_process_would(calls: Calls, model_dir: Path) -> None:
    files = load_model_files(str(model_dir))
    wide, narrow = Scorer(files, "float32"), Scorer(files, "fp8")
    export = Fp8Export(wide.runner.kv_cache)
    for prompt in PROMPTS:
        apart, stats = await calls.answer("prefill-32", "decode-8", prompt)
        last = wide.score(prompt)[-1]
        num_blocks = export.layout.num_blocks_for(len(prompt))
        wire = memoryview(bytearray(num_blocks * export.layout.block_bytes))
        export.gather(wide.table[:num_blocks], 0, export.layout.num_layers, wire)
        narrow.take_over(wire)
        assert apart == narrow.go_on(prompt, last, NUM_TOKENS)[0]
        assert stats.kv_bytes == len(wire), "converted before it goes over the wire"


async def test_8_bit_kv_is_not_sent_to_a_wider_pool(calls: Calls) -> None:
    seq = await calls.submit("prefill-8", "decode-32", PROMPTS[2])
    session = calls.sessions["prefill-8"]
    error = session.refused[seq] if seq in session.refused else session.ended[seq].error
    assert error.field == "layout.dtype"
    assert "float8_e4m3" in error.message
    assert "float32" in error.message
    await calls.answer("prefill-8", "decode-8", PROMPTS[2])  # the refusal has cost other pairs nothing
