"""Step times learned from what steps took: right where samples are, the roofline where they are not, proof against nonsense."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import worker_pb2
from engine.timing.batch import Batch
from engine.timing.step_time import step_time
from router.controller.step_model import MAX_STEP_S, StepModel, StepWork, Terms, terms_of
from router.controller.step_samples import FORGET_S, WARM_UP_S, Kinds, StepSamples, StepTotals, totals_of

ROOFLINE = Terms(2e-3, 1e-5, 4e-3, 2e-8, 1e-10)
TRUTH = Terms(3e-3, 2e-5, 6e-3, 3e-8, 8e-11)


def work(draw: random.Random) -> StepWork:
    """A decode step or a prompt's."""
    if draw.random() < 0.5:
        return StepWork(draw.randint(1, 256), draw.randint(1_000, 500_000))
    num_tokens = draw.randint(16, 8_192)
    return StepWork(num_tokens, 0.0, num_tokens**2 / 2)


def taught(model: StepModel, num_samples: int, noise: float = 0.05) -> StepModel:
    draw = random.Random(1)
    for _ in range(num_samples):
        step = work(draw)
        model.observe(step, TRUTH.step_s(step) * math.exp(draw.gauss(0, noise)))
    return model


def worst(model: StepModel) -> float:
    draw = random.Random(2)
    steps = [work(draw) for _ in range(200)]
    return max(abs(model.step_s(step) / TRUTH.step_s(step) - 1) for step in steps)


@pytest.mark.parametrize("scale", [0.03, 1.0, 30.0])
def test_it_is_right_within_a_minute_however_far_off_the_roofline_was(scale: float) -> None:
    model = taught(StepModel(Terms(*(scale * term for term in astuple(ROOFLINE)))), 500)
    assert worst(model) < 0.15
    assert model.error is not None
    assert 0.02 < model.error < 0.06, "what is left is the noise: 3.4 % in the median"


def test_before_there_are_samples_it_is_the_roofline_and_knows_no_error() -> None:
    model = StepModel(ROOFLINE)
    assert model.step_s(StepWork(1_000.0)) == ROOFLINE.step_s(StepWork(1_000.0))
    assert model.error is None


def test_what_samples_do_not_tell_apart_stays_in_the_roofline_s_proportions() -> None:
    """A decode pool sees no prompts: attention of prompts is off as much as the rest was."""
    model, draw = StepModel(ROOFLINE), random.Random(3)
    for _ in range(200):
        step = StepWork(draw.randint(1, 64), draw.randint(1_000, 100_000))
        model.observe(step, 3 * ROOFLINE.step_s(step))
    assert model.terms.s_per_pair == pytest.approx(3 * ROOFLINE.s_per_pair, rel=0.05)


def test_a_gpu_that_slowed_down_is_followed() -> None:
    model, draw = taught(StepModel(ROOFLINE), 300), random.Random(4)
    for _ in range(2_000):
        step = work(draw)
        model.observe(step, 6 * TRUTH.step_s(step))
    assert model.error is not None
    assert model.error < 0.2


@given(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([math.nan, math.inf, -1.0, 0.0, 2 * MAX_STEP_S]),
)
def test_what_cannot_be_a_step_teaches_nothing(tokens: float, context: float, step_s: float) -> None:
    model = taught(StepModel(ROOFLINE), 40)
    before = model.terms
    for _ in range(50):
        model.observe(StepWork(tokens, context), step_s)
    assert (model.terms, model.num_refused) == (before, 50)


@pytest.mark.parametrize("step_s", [59.0, 1e-9])
def test_a_few_absurd_but_possible_steps_hardly_move_it(step_s: float) -> None:
    model = taught(StepModel(ROOFLINE), 300)
    for _ in range(8):
        model.observe(StepWork(64.0, 10_000.0), step_s)
    assert worst(model) < 0.5


@given(st.lists(st.tuples(st.floats(1, 1e5), st.floats(0, 1e7), st.floats(0, 1e9), st.floats(1e-6, 60)), max_size=80))
def test_no_term_is_ever_negative_or_no_number(samples: list[tuple[float, float, float, float]]) -> None:
    model = StepModel(ROOFLINE)
    for tokens, context, pairs, step_s in samples:
        model.observe(StepWork(tokens, context, pairs), step_s)
    assert all(0 <= term < math.inf for term in astuple(model.terms))


def test_work_that_is_taken_to_cost_nothing_is_learned_like_any_other() -> None:
    model = taught(StepModel(ROOFLINE), 40)
    model.terms = Terms(0.0, 0.0, 0.0, 0.0, 0.0)
    for _ in range(64):
        model.observe(StepWork(64.0, 10_000.0), 0.01)
    assert model.step_s(StepWork(64.0, 10_000.0)) == pytest.approx(0.01, rel=0.5)


@pytest.mark.parametrize("term", [0.0, -1.0, math.nan, math.inf])
def test_a_roofline_term_that_is_no_time_is_refused(term: float) -> None:
    with pytest.raises(ValueError, match="roofline"):
        StepModel(replace(ROOFLINE, weights_s=term))


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b"])
def test_a_roofline_s_terms_price_steps_as_it_does(model: str) -> None:
    exact = step_time("h100", model, 4)
    terms = terms_of(exact)
    for batch in (Batch((), 32, 64_000), Batch(((4_096, 0),)), Batch(((2_048, 8_192),), 16, 32_000)):
        done = StepWork(batch.num_tokens, batch.decode_context_tokens, batch.num_prefill_pairs)
        assert terms.step_s(done) == pytest.approx(exact.step_s(batch), rel=0.25)


# -- samples -----------------------------------------------------------------------------------------------------------


def totals(num_steps: float) -> StepTotals:
    return StepTotals(num_steps, num_steps * 0.02, num_steps * 100, num_steps * 5_000, num_steps * 1e4)


def only(num_steps: float) -> Kinds:
    """Of a worker whose steps are all of one kind."""
    return (totals(num_steps),)


def test_a_sample_is_the_mean_of_the_steps_since_the_last_and_a_worker_s_first_half_minute_is_none() -> None:
    samples = StepSamples()
    taken = [samples.take("w", 7, only(10 * second), float(second)) for second in range(40)]
    assert taken[: int(WARM_UP_S) + 1] == [[]] * (int(WARM_UP_S) + 1)
    ((done, step_s),) = taken[-1]
    assert done == StepWork(100.0, 5_000.0, 1e4)
    assert step_s == pytest.approx(0.02)


def test_a_restarted_or_long_unheard_worker_warms_up_again() -> None:
    samples = StepSamples()
    for second in range(40):
        samples.take("w", 7, only(10 * second), float(second))
    assert samples.take("w", 8, only(1_000), 41.0) == []
    assert samples.take("w", 8, only(1_010), 42.0) == []
    assert samples.take("w", 8, only(2_000), 43.0 + FORGET_S) == []
    assert samples.take("w", 8, only(2_010), 44.0 + FORGET_S) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0])
def test_totals_that_are_no_numbers_or_went_back_teach_nothing(value: float) -> None:
    samples = StepSamples()
    for second in range(1, 40):
        samples.take("w", 7, only(10 * second), float(second))
    assert samples.take("w", 7, (replace(totals(400), tokens=value),), 41.0) == []
    assert samples.take("w", 7, only(410), 42.0) == []


def test_an_idle_worker_teaches_nothing() -> None:
    samples = StepSamples()
    assert [samples.take("w", 7, only(100), float(second)) for second in range(50)] == [[]] * 50


def test_workers_that_are_gone_are_forgotten() -> None:
    samples = StepSamples()
    for number in range(100):
        samples.take(f"w{number}", 1, only(1), 0.0)
    samples.forget(FORGET_S + 1)
    assert not samples._workers


# -- kinds of steps ----------------------------------------------------------------------------------------------------

_DECODE, _CHUNK = StepWork(24.0, 24_000.0), StepWork(24.0 + 512.0, 24_000.0, 512.0 * 900)  # of a worker that does both


def mixed(num_decode: int, num_chunk: int) -> worker_pb2.Load:
    """What a worker says that took such steps, in all."""

    def total(of: Callable[[StepWork], float]) -> float:
        return num_decode * of(_DECODE) + num_chunk * of(_CHUNK)

    return worker_pb2.Load(
        num_steps=num_decode + num_chunk,
        busy_s=total(TRUTH.step_s),
        step_tokens=int(total(lambda step: step.tokens)),
        context_tokens=int(total(lambda step: step.context)),
        prompt_pairs=total(lambda step: step.pairs),
        num_prompt_steps=num_chunk,
        prompt_steps_busy_s=num_chunk * TRUTH.step_s(_CHUNK),
        prompt_steps_tokens=int(num_chunk * _CHUNK.tokens),
        prompt_steps_context_tokens=int(num_chunk * _CHUNK.context),
    )


def learned_from(kinds_of: Callable[[worker_pb2.Load], Kinds]) -> StepModel:
    """Of one worker, whose steps each second are more or less of either kind."""
    model, samples, draw = StepModel(ROOFLINE), StepSamples(), random.Random(5)
    num_decode = num_chunk = 0
    for second in range(300):
        num_chunk += draw.randint(2, 30)
        num_decode += draw.randint(2, 60)
        for done, step_s in samples.take("w", 1, kinds_of(mixed(num_decode, num_chunk)), float(second)):
            model.observe(done, step_s)
    return model


def _in_one(load: worker_pb2.Load) -> Kinds:
    return (StepTotals(load.num_steps, load.busy_s, load.step_tokens, load.context_tokens, load.prompt_pairs),)


def test_steps_of_either_kind_are_known_as_they_are_where_a_worker_has_both() -> None:
    apart, together = learned_from(totals_of), learned_from(_in_one)
    for step in (_DECODE, _CHUNK):
        assert apart.step_s(step) == pytest.approx(TRUTH.step_s(step), rel=0.02)
    assert together.step_s(_DECODE) > 1.05 * TRUTH.step_s(_DECODE), "the mean of both hides which of them took the time"


def test_a_second_without_prompts_teaches_of_decodes_alone_whatever_sums_are_rounded_to() -> None:
    samples = StepSamples()
    for second in range(32):
        samples.take("w", 1, totals_of(mixed(30 * second, 7 * second)), float(second))
    ((done, step_s),) = samples.take("w", 1, totals_of(mixed(30 * 31 + 10, 7 * 31)), 32.0)
    assert done == _DECODE
    assert step_s == pytest.approx(TRUTH.step_s(_DECODE))
    ((done, step_s),) = samples.take("w", 1, totals_of(mixed(30 * 31 + 10, 7 * 31 + 5)), 33.0)
    assert done == _CHUNK
    assert step_s == pytest.approx(TRUTH.step_s(_CHUNK))


def test_a_worker_that_tells_of_no_kinds_teaches_as_before() -> None:
    old = worker_pb2.Load(num_steps=10, busy_s=0.2, step_tokens=1_000, context_tokens=500, prompt_pairs=1e4)
    every, prompts = totals_of(old)
    assert (every, prompts) == (StepTotals(10, 0.2, 1_000, 500, 1e4), StepTotals(0, 0.0, 0, 0, 0.0))
