"""Step times learned from what steps took: right where samples are, the roofline where they are not, proof against nonsense."""

from __future__ import annotations

import math
import random
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.timing.batch import Batch
from engine.timing.step_time import step_time
from router.controller.step_model import MAX_STEP_S, StepModel, StepWork, Terms, terms_of
from router.controller.step_samples import FORGET_S, WARM_UP_S, StepSamples, StepTotals

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


def test_a_sample_is_the_mean_of_the_steps_since_the_last_and_a_worker_s_first_half_minute_is_none() -> None:
    samples = StepSamples()
    taken = [samples.take("w", 7, totals(10 * second), float(second)) for second in range(40)]
    assert taken[: int(WARM_UP_S) + 1] == [None] * (int(WARM_UP_S) + 1)
    sample = taken[-1]
    assert sample is not None
    done, step_s = sample
    assert done == StepWork(100.0, 5_000.0, 1e4)
    assert step_s == pytest.approx(0.02)


def test_a_restarted_or_long_unheard_worker_warms_up_again() -> None:
    samples = StepSamples()
    for second in range(40):
        samples.take("w", 7, totals(10 * second), float(second))
    assert samples.take("w", 8, totals(1_000), 41.0) is None
    assert samples.take("w", 8, totals(1_010), 42.0) is None
    assert samples.take("w", 8, totals(2_000), 43.0 + FORGET_S) is None
    assert samples.take("w", 8, totals(2_010), 44.0 + FORGET_S) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0])
def test_totals_that_are_no_numbers_or_went_back_teach_nothing(value: float) -> None:
    samples = StepSamples()
    for second in range(1, 40):
        samples.take("w", 7, totals(10 * second), float(second))
    assert samples.take("w", 7, replace(totals(400), tokens=value), 41.0) is None
    assert samples.take("w", 7, totals(410), 42.0) is None


def test_an_idle_worker_teaches_nothing() -> None:
    samples = StepSamples()
    assert [samples.take("w", 7, totals(100), float(second)) for second in range(50)] == [None] * 50


def test_workers_that_are_gone_are_forgotten() -> None:
    samples = StepSamples()
    for number in range(100):
        samples.take(f"w{number}", 1, totals(1), 0.0)
    samples.forget(FORGET_S + 1)
    assert not samples._workers
