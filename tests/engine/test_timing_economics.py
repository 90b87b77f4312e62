"""DESIGN section 1's numbers, rows counted by hand for another GPU and model, and DeepSeek's published day."""

from __future__ import annotations

import pytest

from engine.timing.economics import (
    Day,
    Node,
    TokenPrices,
    decode_step_s,
    decode_tokens_per_s,
    expected_tokens_per_step,
    max_sequences,
    static_batch_slot_use,
    usd_per_million_tokens,
)
from engine.timing.hardware import gpu
from engine.timing.shapes import model_shape


def node(gpu_name: str, num_gpus: int, model: str, dtype: str) -> Node:
    device = gpu(gpu_name)
    weight_bytes = model_shape(model).weight_bytes(dtype)
    return Node(
        num_gpus * device.memory_bytes,
        num_gpus * device.memory_bytes_per_s,
        num_gpus * device.usd_per_hour,
        weight_bytes,
    )


DESIGN_NODE = node("h100", 8, "llama-3.1-70b", "fp8")
LLAMA_KV_BYTES = model_shape("llama-3.1-70b").kv_bytes_per_token("bf16")


def test_the_node_of_the_design_has_its_bytes_and_price() -> None:
    assert DESIGN_NODE.memory_bytes_per_s == 26.8e12
    assert DESIGN_NODE.usd_per_hour == pytest.approx(31.92)
    assert DESIGN_NODE.weight_bytes == pytest.approx(70.6e9, rel=1e-3)
    kv_bytes = 4096 * LLAMA_KV_BYTES
    assert kv_bytes == pytest.approx(1.34e9, rel=2e-3)


@pytest.mark.parametrize(
    ("batch", "tpot_ms", "tokens_per_s", "usd"),
    [
        (1, 2.7, 373, 23.80),
        (8, 3.0, 2_636, 3.36),
        (32, 4.2, 7_553, 1.17),
        (128, 9.0, 14_152, 0.63),
        (384, 21.9, 17_562, 0.505),
    ],
)
def test_the_batch_dial_is_that_of_the_design(batch: int, tpot_ms: float, tokens_per_s: float, usd: float) -> None:
    kv_bytes = 4096 * LLAMA_KV_BYTES
    rate = decode_tokens_per_s(DESIGN_NODE, batch, kv_bytes)
    assert 1e3 * decode_step_s(DESIGN_NODE, batch, kv_bytes) == pytest.approx(tpot_ms, abs=0.05)
    assert rate == pytest.approx(tokens_per_s, rel=1e-3)
    assert usd_per_million_tokens(DESIGN_NODE.usd_per_hour, rate) == pytest.approx(usd, rel=1e-3, abs=0.005)


def test_thirteen_long_contexts_fit_the_node() -> None:
    assert max_sequences(DESIGN_NODE, 131_072 * LLAMA_KV_BYTES) == 13


@pytest.mark.parametrize(
    ("num_gpus", "tokens_per_s", "usd"), [(1, 400, 2.78), (1, 1_800, 0.62), (1, 2_800, 0.40), (2, 4_200, 0.53)]
)
def test_a_million_tokens_cost_what_the_check_rows_say(num_gpus: int, tokens_per_s: float, usd: float) -> None:
    assert usd_per_million_tokens(num_gpus * 4.00, tokens_per_s) == pytest.approx(usd, abs=0.005)


@pytest.mark.parametrize(
    ("batch", "tpot_ms", "tokens_per_s", "usd"),
    [
        # Qwen3-32B in bf16 on 4 x A100, 2,048-token contexts, with pencil and paper: weights 32.7614 G x 2 B = 65.5229 GB, KV
        # 2 x 64 layers x 8 heads x 128 x 2 B = 262,144 B a token, 0.536871 GB a context, 4 x 2.039 = 8.156 TB/s,
        # 4 x $1.79 = $7.16/h.
        (1, 8.0996, 123.46, 16.109),  # 66.0598 GB
        (64, 12.2465, 5_225.97, 0.38058),  # 65.5229 + 34.3597 = 99.8826 GB
        (256, 24.8852, 10_287.3, 0.19333),  # 65.5229 + 137.4390 = 202.9619 GB
    ],
)
def test_rows_counted_by_hand_for_another_gpu_and_model(
    batch: int, tpot_ms: float, tokens_per_s: float, usd: float
) -> None:
    four = node("a100", 4, "qwen3-32b", "bf16")
    kv_bytes = 2048 * model_shape("qwen3-32b").kv_bytes_per_token("bf16")
    rate = decode_tokens_per_s(four, batch, kv_bytes)
    assert 1e3 * decode_step_s(four, batch, kv_bytes) == pytest.approx(tpot_ms, rel=1e-4)
    assert rate == pytest.approx(tokens_per_s, rel=1e-4)
    assert usd_per_million_tokens(four.usd_per_hour, rate) == pytest.approx(usd, rel=1e-3)
    assert max_sequences(four, 2 * kv_bytes) == 237  # (320 - 65.5229) / 1.073742


def test_speculation_pays_a_geometric_series() -> None:
    assert expected_tokens_per_step(0.8, 0) == 1
    assert expected_tokens_per_step(0.5, 3) == 1 + 0.5 + 0.25 + 0.125
    assert expected_tokens_per_step(0.7, 5) == pytest.approx((1 - 0.7**6) / (1 - 0.7))
    assert expected_tokens_per_step(1, 4) == 5


def test_a_static_batch_with_one_long_answer_uses_a_fifth_of_its_slots() -> None:
    assert static_batch_slot_use([100] * 7 + [1000]) == pytest.approx(0.2125)


# DeepSeek-V3/R1 Inference System Overview (DeepSeek, 1 March 2025), 24 hours of 27 and 28 February: 608 G input tokens, 342 G of
# them found in the disk cache, 168 G output tokens, 226.75 nodes of 8 H800 in use on average, $2 a GPU-hour, all sold at R1's
# prices. Published results: $87,072 a day, $562,027 revenue, 545 %, 73.7k tok/s in and 14.8k out per prefill and decode node.
DEEPSEEK_DAY = Day(608e9, 342 / 608, 168e9, 226.75, 8)
R1_PRICES = TokenPrices(cached_input=0.14, input=0.55, output=2.19)


def test_deepseeks_day_costs_and_earns_what_they_published() -> None:
    assert DEEPSEEK_DAY.cost_usd(2.00) == 87_072
    assert DEEPSEEK_DAY.revenue_usd(R1_PRICES) == pytest.approx(
        562_027, rel=2e-4
    )  # tokens are published in whole billions
    assert DEEPSEEK_DAY.margin(2.00, R1_PRICES) == pytest.approx(5.45, abs=0.01)


def test_deepseeks_rates_per_node_use_up_exactly_their_nodes() -> None:
    """They do not say how many nodes prefill. If the rates are day means of each pool, the two pools must add up to all nodes."""
    prefill_nodes = 608e9 / 86_400 / 73_700
    decode_nodes = 168e9 / 86_400 / 14_800
    assert prefill_nodes + decode_nodes == pytest.approx(226.75, rel=1e-3)
    share = prefill_nodes / 226.75
    assert DEEPSEEK_DAY.tokens_per_node_s(608e9, share_of_nodes=share) == pytest.approx(73_700)
    assert DEEPSEEK_DAY.tokens_per_node_s(168e9, share_of_nodes=1 - share) == pytest.approx(14_800, rel=2e-3)
