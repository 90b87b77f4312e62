"""Step times: what holds for every GPU and model, and the exact sum of many decode steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.timing.closed_loop import kv_capacity_tokens
from engine.timing.fitted import Fitted
from engine.timing.hardware import gpu, gpu_names
from engine.timing.measured import MEASURED
from engine.timing.roofline import IDEAL
from engine.timing.shapes import model_names, model_shape
from engine.timing.step_time import Batch, Roofline, StepTime, step_time

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-235b-a22b", "deepseek-v3", "gpt-oss-120b")
PIECEWISE = Fitted((0.02, 1e-4, 1e-9), (0.01, 1e-4, 2e-7), (0.005, 2e-4, 3e-7), large_from=95)
# A sum of n rounded numbers is off by at most n roundings; fsum rounds once
ROUNDING = 1e-12


@st.composite
def step_times(draw: st.DrawFn) -> StepTime:
    if draw(st.booleans()):
        return draw(st.sampled_from((*MEASURED.values(), PIECEWISE)))
    chosen = step_time(
        draw(st.sampled_from(gpu_names())),
        draw(st.sampled_from(MODELS)),
        draw(st.sampled_from((1, 2, 4, 8))),
        weight_dtype=draw(st.sampled_from(("bf16", "fp8"))),
        kv_dtype=draw(st.sampled_from(("bf16", "fp8"))),
    )
    if isinstance(chosen, Roofline) and chosen.shape.is_mixture:
        return replace(chosen, attention_replicas=draw(st.sampled_from((1, chosen.tp))))
    return chosen


@given(
    step_times(),
    st.integers(min_value=0, max_value=300),
    st.integers(min_value=0, max_value=2_000_000),
    st.integers(min_value=0, max_value=200),
)
def test_many_decode_steps_take_the_sum_of_single_ones(
    model: StepTime, num_decodes: int, context_tokens: int, num_steps: int
) -> None:
    single = [model.step_s(Batch((), num_decodes, context_tokens + i * num_decodes)) for i in range(num_steps)]
    whole_s = model.decode_steps_s(num_decodes, context_tokens, num_steps)
    assert whole_s == pytest.approx(math.fsum(single), rel=ROUNDING, abs=0)


@given(step_times(), st.integers(1, 200), st.integers(0, 500_000), st.integers(0, 60), st.integers(0, 60))
def test_decode_steps_can_be_cut_anywhere(model: StepTime, size: int, context: int, first: int, second: int) -> None:
    cut_s = model.decode_steps_s(size, context, first) + model.decode_steps_s(size, context + first * size, second)
    assert model.decode_steps_s(size, context, first + second) == pytest.approx(cut_s, rel=ROUNDING, abs=0)


@given(step_times(), st.integers(1, 8192), st.integers(0, 8192), st.integers(1, 64), st.integers(0, 100_000))
def test_more_work_never_takes_less_time(model: StepTime, new: int, before: int, decodes: int, context: int) -> None:
    alone_s = model.step_s(Batch((), decodes, context))
    assert alone_s <= model.step_s(Batch((), decodes, context + 1000))
    assert alone_s <= model.step_s(Batch(((new, before),), decodes, context)) * (1 + ROUNDING)
    assert model.step_s(Batch(((new, before),))) <= model.step_s(Batch(((new + 1, before),)))


@pytest.mark.parametrize("model", [step_time("h100", "llama-3.1-70b", 4), PIECEWISE])
def test_a_step_of_nothing_takes_no_time(model: StepTime) -> None:
    assert model.step_s(Batch()) == 0
    assert model.decode_steps_s(0, 0, 10) == 0


def test_an_ideal_decode_step_takes_the_time_that_its_bytes_take() -> None:
    shape = model_shape("llama-3.1-70b")
    roofline = Roofline(gpu("h100"), shape, 1, "fp8", "bf16", IDEAL)
    nbytes = (
        69_501_714_432 + 100_000 * 327_680
    )  # weights without the embedding table; KV of 80 layers x 8 heads x 128 x 2 x 2
    assert roofline.step_s(Batch((), 8, 100_000)) == pytest.approx(nbytes / 3.35e12)


def test_an_ideal_prompt_takes_the_time_that_its_flops_take() -> None:
    shape = model_shape("llama-3.1-8b")
    roofline = Roofline(gpu("h100"), shape, 1, "bf16", "bf16", IDEAL)
    matrices = 8192 * 2 * 6_979_321_856 + 2 * 4096 * 128_256  # layers for each token, the head for the last
    attention = 4 * 32 * 32 * 128 * (8192 * 8193 / 2)  # q k and p v: layers x heads x head size over the triangle
    assert roofline.step_s(Batch(((8192, 0),))) == pytest.approx((matrices + attention) / 989.5e12)


def test_two_chunks_attend_to_what_one_prompt_attends_to() -> None:
    assert Batch(((3000, 0), (1096, 3000))).num_prefill_pairs == Batch(((4096, 0),)).num_prefill_pairs


def test_all_reduces_are_paid_only_by_several_gpus() -> None:
    one = step_time("h100", "llama-3.1-70b", 1)
    four = step_time("h100", "llama-3.1-70b", 4)
    assert isinstance(one, Roofline)
    assert isinstance(four, Roofline)
    batch = Batch(((1024, 0),))
    assert one.terms(batch).link_s == one.terms(batch).num_allreduces == 0
    # Two per layer; a ring of four moves 2 x 3/4 of 1,024 tokens x 8,192 x 2 B over 450 GB/s
    assert four.terms(batch).link_s == pytest.approx(160 * 1.5 * 1024 * 8192 * 2 / 450e9)
    assert four.terms(batch).num_allreduces == 160


def test_a_latent_is_read_whole_by_every_rank_unless_attention_has_replicas() -> None:
    shared = Roofline(gpu("h200"), model_shape("deepseek-v3"), 8)
    assert shared.kv_ways == 1
    assert replace(shared, attention_replicas=8).kv_ways == 8
    assert Roofline(gpu("h200"), model_shape("qwen3-235b-a22b"), 8).kv_ways == 4  # it has 4 KV heads


def test_four_bit_mixtures_keep_all_but_experts_in_16_bits() -> None:
    batch = Batch((), 1, 0)
    four = Roofline(gpu("h100"), model_shape("gpt-oss-120b"), 1, "fp4").terms(batch)
    sixteen = Roofline(gpu("h100"), model_shape("gpt-oss-120b"), 1, "bf16").terms(batch)
    assert four.memory_s == sixteen.memory_s
    assert four.expert_memory_s == sixteen.expert_memory_s / 4


def test_what_was_measured_on_these_gpus_is_preferred_unless_one_yardstick_is_wanted() -> None:
    assert isinstance(step_time("h200", "llama-3.1-8b", 1), Fitted)
    assert isinstance(step_time("h200", "llama-3.1-8b", 1, measured=False), Roofline)
    assert isinstance(step_time("h200", "llama-3.1-8b", 1, kv_dtype="fp8"), Roofline)
    assert step_time("a100", "opt-66b", 4, weight_dtype="fp16") is step_time("a100", "opt-66b", 4, weight_dtype="bf16")


def test_later_chunks_of_a_measured_prompt_do_not_pay_the_front_end_again() -> None:
    model = step_time("h200", "llama-3.1-8b", 1)
    whole_s = model.step_s(Batch(((8192, 0),)))
    chunked_s = model.step_s(Batch(((4096, 0),))) + model.step_s(Batch(((4096, 4096),)))
    assert 0 < chunked_s - whole_s < 0.005  # one more step's 4.45 ms, not 18.5


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("h1000", "llama-3.1-8b", 1, "fp8"), "gpu 'h1000'"),
        (("h100", "llama-4", 1, "fp8"), "model 'llama-4'"),
        (("h100", "llama-3.1-8b", 0, "fp8"), "tp 0"),
        (("h100", "llama-3.1-8b", 1, "fp7"), "dtype 'fp7'"),
    ],
)
def test_what_is_unknown_is_named(names: tuple[str, str, int, str], message: str) -> None:
    name, model, tp, dtype = names
    with pytest.raises(ValueError, match=message):
        step_time(name, model, tp, weight_dtype=dtype)


def test_gpus_are_found_under_the_names_that_tables_use() -> None:
    assert gpu("h100_sxm") is gpu("H100") is gpu("h100-80gb")


def test_kv_of_a_70b_model_does_not_fit_one_small_gpu_in_16_bits() -> None:
    shape = model_shape("llama-3.1-70b")
    assert kv_capacity_tokens(Roofline(gpu("h100"), shape, 1, "bf16")) == 0
    # 2 x (0.9 x 80 - 2) - 70.55 GB of weights in fp8, over 327,680 B a token
    assert kv_capacity_tokens(Roofline(gpu("h100"), shape, 2, "fp8")) == pytest.approx(69.4476e9 / 327_680, rel=1e-5)


@pytest.mark.parametrize("name", model_names())
def test_every_model_has_a_step_time_on_every_gpu(name: str) -> None:
    for device in gpu_names():
        assert step_time(device, name, 8).step_s(Batch(((100, 0),), 4, 1000)) > 0
