"""Our models against transformers, fp32: whole prompts, chunks, decode steps and mixtures over scattered blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from baton.config import EngineConfig
from baton.model_files import load_model_files
from baton.request import SamplingParams
from engine.models import attention
from engine.models.linear import Linear
from engine.ports import BatchEntry
from engine.torch_runner import TorchRunner, load_torch_runner
from tests.tiny_models import VOCAB_SIZE, make_tiny_gguf, make_tiny_model

torch.set_num_threads(1)  # tiny tensors: a second thread only waits

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
ATOL = 1e-4  # logits have a standard deviation near 3; fp32 reorderings give 2e-5
NUM_BLOCKS = 160
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"architecture": "qwen3", "head_dim": 32},
    "llama tied": {"tie_embeddings": True},
    "llama with biases": {"attention_bias": True},
    "qwen3 with biases": {"architecture": "qwen3", "attention_bias": True},
    "llama with one kv head": {"num_kv_heads": 1},
    "llama without grouping": {"num_kv_heads": 4},
    "llama3 rope scaling": {"rope_scaling": LLAMA3_ROPE},
    "linear rope scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama of two ranks": {"num_ranks": 2},
    "qwen3 of two ranks, tied, with biases": {
        "architecture": "qwen3", "tie_embeddings": True, "attention_bias": True, "num_ranks": 2,
    },
    "llama of three ranks": {  # whose parts of the vocabulary, 512, are filled up
        "hidden_size": 96, "num_heads": 6, "num_kv_heads": 3, "ffn_size": 96, "num_ranks": 3,
    },
}  # fmt: skip


class Pair:
    """A tiny model in both implementations."""

    def __init__(self, path: Path, num_ranks: int = 1) -> None:
        self.theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        engine = EngineConfig(tensor_parallel_size=num_ranks)
        self.ours = load_torch_runner(load_model_files(str(path)), engine, "float32", NUM_BLOCKS)

    @torch.inference_mode()
    def reference(self, token_ids: Sequence[int]) -> Tensor:
        """Logits [T, V] at every position, in one pass."""
        logits: Tensor = self.theirs(torch.tensor([token_ids])).logits[0]
        return logits

    def step(self, *entries: tuple[Sequence[int], int, Sequence[int]]) -> list[Tensor]:
        """Run entries of (token ids, start, block table) together; logits [V] of the last token of each."""
        return run_step(self.ours, *entries)


@torch.inference_mode()
def run_step(runner: TorchRunner, *entries: tuple[Sequence[int], int, Sequence[int]]) -> list[Tensor]:
    batch = [BatchEntry(i, ids, start, table, True, GREEDY) for i, (ids, start, table) in enumerate(entries)]
    step, logits = runner.compute(batch)
    return [logits[step.sampled_entries.index(i)] for i in range(len(batch))]


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    variant = dict(VARIANTS[request.param])
    num_ranks = variant.pop("num_ranks", 1)
    made = Pair(make_tiny_model(tmp_path_factory.mktemp("model"), **variant), num_ranks)
    yield made
    if made.ours.ranks is not None:
        made.ours.ranks.close()


@pytest.fixture(scope="module")
def rng() -> random.Random:
    return random.Random(7)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def tables(rng: random.Random, *lengths: int) -> list[list[int]]:
    """Scattered, disjoint block tables for sequences of these lengths."""
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [[free.pop() for _ in range(-(-length // 16))] for length in lengths]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=ATOL, rtol=0)


every_variant = pytest.mark.parametrize("pair", list(VARIANTS), indirect=True)
both_architectures = pytest.mark.parametrize("pair", ["llama", "qwen3", "llama of two ranks"], indirect=True)


@every_variant
def test_a_whole_prompt_gives_the_logits_of_transformers(pair: Pair, rng: random.Random) -> None:
    for length in (1, 2, 15, 16, 17, 200):
        ids = prompt(rng, length)
        (table,) = tables(rng, length)
        close(pair.step((ids, 0, table))[0], pair.reference(ids)[-1])


@every_variant
def test_chunks_of_any_size_then_decode_steps_give_the_logits_of_transformers(pair: Pair, rng: random.Random) -> None:
    ids = prompt(rng, 150)
    reference = pair.reference(ids)
    (table,) = tables(rng, len(ids))
    start = 0
    for size in (1, 2, 13, 16, 17, 64, 5, *(1,) * 32):
        close(pair.step((ids[start : start + size], start, table))[0], reference[start + size - 1])
        start += size
    assert start == len(ids)


@both_architectures
@pytest.mark.parametrize("group_tokens", [1, 200, 1 << 30])
def test_prefills_chunks_and_decodes_of_many_lengths_ride_in_one_batch(
    pair: Pair, rng: random.Random, group_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "GROUP_TOKENS", group_tokens)
    lengths = [1, 2, 16, 17, 33, 48, 150, 40, 40, 300]
    computed = [0, 1, 15, 16, 32, 47, 149, 0, 20, 299]  # before the step: decodes, a fresh prompt, a later chunk
    prompts = [prompt(rng, length) for length in lengths]
    table_of = tables(rng, *lengths)
    for ids, done, table in zip(prompts, computed, table_of, strict=True):
        if done:
            pair.step((ids[:done], 0, table))
    mixed = [(ids[done:], done, table) for ids, done, table in zip(prompts, computed, table_of, strict=True)]
    for ours, ids in zip(pair.step(*mixed), prompts, strict=True):
        close(ours, pair.reference(ids)[-1])


@both_architectures
def test_blocks_beyond_the_sequence_and_other_peoples_blocks_do_not_matter(pair: Pair, rng: random.Random) -> None:
    ids = prompt(rng, 40)
    ours, others = tables(rng, 100, 100)
    pair.step((ids[:39], 0, ours))
    clean = pair.step((ids[39:], 39, ours))[0]
    kv = pair.ours.kv_cache.blocks
    kept = kv.clone()
    kv[:, :, others] = torch.nan
    kv[:, :, ours[3:]] = 1e9
    kv[:, :, ours[2], 8:] = 1e9  # the slots after token 40 of its last block
    close(pair.step((ids[39:], 39, ours))[0], clean)
    kv.copy_(kept)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_fp32(dtype: str, tmp_path: Path, rng: random.Random) -> None:
    files = load_model_files(str(make_tiny_model(tmp_path)))
    ids = prompt(rng, 40)
    exact, rough = (load_torch_runner(files, EngineConfig(), kind, 8) for kind in ("float32", dtype))
    expected = run_step(exact, (ids, 0, range(8)))[0]
    run_step(rough, (ids[:20], 0, range(8)))
    run_step(rough, (ids[20:39], 20, range(8)))
    got = run_step(rough, (ids[39:], 39, range(8)))[0]
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got, expected, dim=0) > 0.98


def test_kv_may_be_kept_in_fewer_bits_than_the_arithmetic(tmp_path: Path, rng: random.Random) -> None:
    files = load_model_files(str(make_tiny_model(tmp_path)))
    runner = load_torch_runner(files, EngineConfig(kv_cache_dtype="bfloat16"), "float32", 8)
    assert runner.kv_cache.layout.dtype == "bfloat16"
    ids = prompt(rng, 40)
    whole = run_step(runner, (ids, 0, range(8)))[0]
    run_step(runner, (ids[:30], 0, range(8)))
    close(run_step(runner, (ids[30:], 30, range(8)))[0], whole)  # a chunk reads what the whole prompt rounded to


def test_a_gguf_file_gives_the_logits_of_the_directory_it_was_made_from(tmp_path: Path, rng: random.Random) -> None:
    directory = make_tiny_model(tmp_path / "hf")
    gguf = make_tiny_gguf(tmp_path / "tiny.gguf", directory)
    ids = prompt(rng, 50)
    logits = []
    for path in (directory, gguf):
        runner = load_torch_runner(load_model_files(str(path)), EngineConfig(), "float32", 8)
        logits.append(run_step(runner, (ids, 0, range(8)))[0])
    close(logits[1], logits[0])


@pytest.mark.parametrize("make_bias", [lambda: None, lambda: torch.randn(96)], ids=["plain", "bias"])
def test_the_packed_linear_equals_the_plain_one(make_bias: Callable[[], Tensor | None]) -> None:
    weight, bias = torch.randn(96, 64), make_bias()
    linear = Linear(weight, bias)
    for rows in (1, 2, 7, 64):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)
