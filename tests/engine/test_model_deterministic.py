"""Deterministic numerics: the logits of a token are the same bits whatever else is in its step and however it came there."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.model_files import ModelFiles, load_model_files
from baton.request import SamplingParams
from engine.models.attention import lay_out
from engine.models.fixed_sizes import agreeing
from engine.ports import BatchEntry
from engine.torch_runner import TorchRunner, load_torch_runner
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

BLOCK = 16
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
LENGTHS = (1, 3, 15, 16, 17, 64, 130, 200, 400, 513, 600)  # block, tile and split edges
CASES = {  # heads per KV head 2, 3 and 5; a model whose down projection splits its columns; what KV is stored as
    "fp32": ({"architecture": "llama", "ffn_size": 1536}, "float32", "auto", "auto"),
    "qwen3": ({"architecture": "qwen3", "num_heads": 6, "head_dim": 32}, "float32", "auto", "auto"),
    "bf16": ({"architecture": "llama", "num_heads": 5, "num_kv_heads": 1}, "bfloat16", "auto", "auto"),
    "fp8": ({"architecture": "llama"}, "float32", "fp8", "auto"),
    "int8": ({"architecture": "llama", "ffn_size": 1536}, "float32", "auto", "int8"),
    "int8, fp16": ({"architecture": "qwen3", "ffn_size": 1536, "attention_bias": True}, "float16", "auto", "int8"),
}
Edges = Callable[[int], list[int]]
Logits = dict[tuple[int, int], Tensor]  # by text and number of tokens before
VARIANTS: dict[str, tuple[Edges, int]] = {  # where chunks end, and how many texts share a step
    "whole, all at once": (lambda n: [n], len(LENGTHS)),
    "chunks of 64, alone": (lambda n: [*range(64, n, 64), n], 1),
    "chunks of 64, eight at once": (lambda n: [*range(64, n, 64), n], 8),
    "the last tokens one by one": (lambda n: [*range(max(1, n - 4), n + 1)], len(LENGTHS)),
    "chunks of any length": (lambda n: sorted({*random.Random(n).sample(range(1, n + 1), min(n, 5)), n}), 4),
}


def small_steps(n: int) -> list[int]:
    """Block by block, and the last tokens one by one."""
    return sorted({*range(BLOCK, n, BLOCK), *range(max(1, n - 6), n + 1)})


class Texts:
    """Some texts of one model, computed in whatever pieces a test likes."""

    def __init__(self, runner: TorchRunner, attention: bool = True) -> None:
        rng = random.Random(0)
        self._runner = runner
        self._attention = runner._attention if attention else None
        self.ids = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in LENGTHS]
        blocks = iter(rng.sample(range(runner.kv_cache.num_blocks), runner.kv_cache.num_blocks))
        self._tables = [[next(blocks) for _ in range(-(-n // BLOCK))] for n in LENGTHS]

    def compute(self, edges: Edges, num_together: int) -> Logits:
        """Start with blocks that hold no numbers at all; the logits at every edge."""
        self._runner.kv_cache.blocks.view(torch.uint8).fill_(0xFF)
        waiting = {n: edges(len(ids)) for n, ids in enumerate(self.ids)}
        done = dict.fromkeys(waiting, 0)
        logits: Logits = {}
        while waiting:
            batch = []
            for n in list(waiting)[:num_together]:
                end = waiting[n].pop(0)
                batch.append(BatchEntry(n, self.ids[n][done[n] : end], done[n], self._tables[n], True, GREEDY))
                done[n] = end
                if not waiting[n]:
                    del waiting[n]
            logits |= self.step(batch)
        return logits

    @torch.inference_mode()
    def step(self, batch: Sequence[BatchEntry]) -> Logits:
        if self._runner.ranks is not None:
            self._runner.ranks.begin(batch)
        step = lay_out(batch, BLOCK, self._attention)
        rows = self._runner.model.forward(step, self._runner.kv_cache.mine)
        entries = [batch[i] for i in step.sampled_entries]
        return {(e.seq, e.start + len(e.token_ids)): row.clone() for e, row in zip(entries, rows, strict=True)}


def load(
    path: Path,
    dtype: str,
    kv_dtype: str,
    quantization: str = "auto",
    *,
    num_threads: int = 1,
    deterministic: bool = True,
) -> TorchRunner:
    engine = EngineConfig(
        num_blocks=160, block_size=BLOCK, num_threads=num_threads, kv_cache_dtype=kv_dtype, deterministic=deterministic
    )
    return load_torch_runner(described(path, quantization), engine, dtype)


def described(path: Path, quantization: str) -> ModelFiles:
    files = load_model_files(str(path))
    return dataclasses.replace(files, spec=files.spec.quantized(quantization))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str, str]:
    shape, *kinds = CASES[request.param]
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", **shape), *kinds  # type: ignore[arg-type,return-value]


@pytest.fixture(scope="module")
def reference(case: tuple[Path, str, str, str]) -> Iterator[tuple[Texts, Logits]]:
    """Each text alone, in small steps."""
    before = torch.get_num_threads()
    texts = Texts(load(*case))
    yield texts, texts.compute(small_steps, 1)
    torch.set_num_threads(before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_the_same_bits_in_any_batch_and_any_chunks(reference: tuple[Texts, Logits], variant: str) -> None:
    texts, alone = reference
    got = texts.compute(*VARIANTS[variant])
    compared = got.keys() & alone.keys()
    assert {n for n, _ in compared} == set(range(len(LENGTHS)))
    assert [key for key in sorted(compared) if not torch.equal(got[key], alone[key])] == []


def test_another_number_of_threads_gives_the_same_bits(
    case: tuple[Path, str, str, str], reference: tuple[Texts, Logits]
) -> None:
    texts = Texts(load(*case, num_threads=2))
    got = texts.compute(*VARIANTS["chunks of 64, eight at once"])
    assert all(torch.equal(got[key], reference[1][key]) for key in got.keys() & reference[1].keys())
    assert texts._runner.numerics == reference[0]._runner.numerics


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_two_ranks_give_bits_of_their_own_and_these_in_any_batch(tmp_path: Path, quantization: str) -> None:
    path = make_tiny_model(tmp_path / "tiny", ffn_size=1536)
    engine = EngineConfig(num_blocks=160, block_size=BLOCK, num_threads=2, deterministic=True, tensor_parallel_size=2)
    runner = load_torch_runner(described(path, quantization), engine, "float32")
    assert runner.ranks is not None
    try:
        texts = Texts(runner)
        alone = texts.compute(small_steps, 1)
        for variant in VARIANTS.values():
            got = texts.compute(*variant)
            assert [key for key in got.keys() & alone.keys() if not torch.equal(got[key], alone[key])] == []
    finally:
        runner.ranks.close()
    assert runner.numerics != load(path, "float32", "auto", quantization).numerics  # so such workers never pair


def test_without_it_the_same_variants_give_other_bits(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny", ffn_size=1536)
    texts = Texts(load(path, "float32", "auto", deterministic=False))
    alone = texts.compute(small_steps, 1)
    got = texts.compute(*VARIANTS["whole, all at once"])
    assert any(not torch.equal(got[key], alone[key]) for key in got.keys() & alone.keys())


def test_what_it_computes_is_part_of_the_models_fingerprint(case: tuple[Path, str, str, str]) -> None:
    runner, spec = load(*case), load_model_files(str(case[0])).spec
    assert len(runner.numerics) == 16
    assert load(*case, deterministic=False).numerics == ""
    assert dataclasses.replace(spec, numerics=runner.numerics).fingerprint != spec.fingerprint


def test_its_logits_are_those_of_the_normal_engine_but_for_rounding(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny")
    fixed, free = (
        Texts(load(path, "float32", "auto", deterministic=on)).compute(*VARIANTS["chunks of 64, alone"])
        for on in (True, False)
    )
    assert all(torch.allclose(fixed[key], free[key], atol=1e-3) for key in fixed)  # DESIGN section 7's bound for fp32


def test_a_model_whose_rows_are_no_whole_vectors_is_refused_by_name(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny", ffn_size=100)
    with pytest.raises(ConfigError, match="multiple of 32") as raised:
        load(path, "float32", "auto")
    assert raised.value.field == "deterministic"


def test_only_sizes_that_agree_with_the_largest_are_used() -> None:
    values = {1: [1.0], 2: [1.0, 2.0], 4: [1.5, 2.0, 3.0, 4.0], 8: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]}
    assert agreeing((1, 2, 4, 8), lambda size: torch.tensor(values[size]), "a test") == (1, 2, 8)


def test_a_kernel_that_does_not_repeat_itself_is_refused() -> None:
    answers = iter((1.0, 2.0))
    with pytest.raises(ConfigError, match="not reproducible"):
        agreeing((1, 2), lambda size: torch.full((size,), next(answers)), "a test")
