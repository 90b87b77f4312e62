"""Shapes: parameters and bytes against published counts and counts made by hand."""

from __future__ import annotations

import pytest

from engine.timing.hardware import gpu
from engine.timing.shapes import model_names, model_shape

# Billions of parameters as the model cards give them
PUBLISHED = {
    "smollm2-135m": 0.1345,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.1-405b": 405.9,
    "llama-2-70b": 69.0,
    "qwen3-8b": 8.2,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "gpt-oss-120b": 116.8,
    "deepseek-v3": 671,
    "kimi-k2.5": 1026,
    "glm-5": 744,
    "qwen3.5-397b-a17b": 397,
    "minimax-m2.5": 229,
    "opt-13b": 12.9,
    "opt-66b": 65.7,
    "opt-175b": 175,
    "bloom-176b": 176.2,
}
# And those that a token passes. Cards differ in whether they count the embedding table
PUBLISHED_ACTIVE = {
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "gpt-oss-120b": 5.1,
    "deepseek-v3": 37,
    "kimi-k2.5": 32,
    "glm-5": 40,
    "qwen3.5-397b-a17b": 17,
    "minimax-m2.5": 10,
}


def test_every_model_that_is_known_is_checked() -> None:
    assert set(PUBLISHED) == set(model_names())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert model_shape(name).params / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED_ACTIVE)
def test_a_token_passes_as_many_parameters_as_published(name: str) -> None:
    shape = model_shape(name)
    passed = (shape.flops_per_token + shape.head_flops) / 2
    assert passed / 1e9 == pytest.approx(PUBLISHED_ACTIVE[name], rel=0.05, abs=shape.head_params / 1e9)


def test_kv_of_a_token_is_counted_by_hand() -> None:
    assert model_shape("llama-3.1-70b").kv_bytes_per_token("bf16") == 2 * 80 * 8 * 128 * 2
    assert model_shape("deepseek-v3").kv_bytes_per_token("bf16") == 61 * (512 + 64) * 2
    assert model_shape("smollm2-135m").kv_bytes_per_token("fp32") == 46_080  # DESIGN section 7
    assert model_shape("gpt-oss-120b").kv_bytes_per_token("fp8") == 2 * 18 * 8 * 64  # half of its layers see a window


def test_a_batch_touches_more_experts_the_larger_it_is() -> None:
    shape = model_shape("qwen3-235b-a22b")  # 128 experts, 8 a token
    assert shape.experts_touched(1) == pytest.approx(8)
    assert shape.experts_touched(2) == pytest.approx(8 + 8 * 120 / 128)
    assert shape.experts_touched(1000) == pytest.approx(128)
    one, many = (shape.active_weight_bytes("fp8", size) for size in (1, 1000))
    assert many - one == pytest.approx(94 * 120 * 3 * 4096 * 1536)


def test_a_dense_model_reads_all_but_its_embedding_table() -> None:
    shape = model_shape("llama-3.1-8b")
    assert shape.active_weight_bytes("bf16") == shape.weight_bytes("bf16") - 2 * 4096 * 128_256


def test_weights_are_multiplied_in_a_type_that_the_gpu_has() -> None:
    assert gpu("h100").rate("fp8") == 2 * gpu("h100").rate("bf16")
    assert gpu("a100").rate("fp8") == gpu("a100").rate("bf16")  # no fp8 units
    assert gpu("h100").rate("fp4") == gpu("h100").rate("bf16")
    assert gpu("b200").rate("fp4") == 9000e12
