"""The sampler against a naive one written with Python floats, and its independence of batch and place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.errors import Internal
from baton.request import SamplingParams
from engine.ports import BatchEntry, Sample
from engine.randomness import exponentials
from engine.sampler import sample

torch.set_num_threads(1)  # tiny tensors: a second thread only waits

EOS = (2,)
VOCAB = 40
PINNED = (0.015333480781024391, 1.7108621855681325)


def entry(prompt: Sequence[int] = (3, 4, 5), output: Sequence[int] = (), **params: Any) -> BatchEntry:
    tokens = [*prompt, *output]
    sampling = SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **params})
    return BatchEntry(1, tokens[-1:], len(tokens) - 1, [0], True, sampling, tuple(prompt), tuple(output))


def logits_of(values: dict[int, float], fill: float = -5.0) -> Tensor:
    row = torch.full((1, VOCAB), fill)
    for token, value in values.items():
        row[0, token] = value
    return row


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draw(logits: Tensor, *entries: BatchEntry) -> list[Sample]:
    return sample(logits.clone(), entries, EOS)


def token(logits: Tensor, one: BatchEntry) -> int:
    return draw(logits, one)[0].token


def naive_probabilities(logits: Sequence[float], one: BatchEntry) -> list[float]:
    """The distribution that a row is drawn from, step by step as the sampler's docstring numbers them."""
    p = one.sampling
    row = list(logits)
    for i, bias in p.logit_bias:
        row[i] += bias
    if len(one.output_ids) < p.min_tokens:
        for i in {*p.stop_token_ids, *(() if p.ignore_eos else EOS)}:
            row[i] = -math.inf
    for i in {*one.prompt_ids, *one.output_ids}:
        row[i] = row[i] / p.repetition_penalty if row[i] > 0 else row[i] * p.repetition_penalty
    for i, count in Counter(one.output_ids).items():
        row[i] -= p.presence_penalty + p.frequency_penalty * count
    weights = [math.exp((value - max(row)) / p.temperature) for value in row]
    if p.top_k:
        limit = sorted(weights, reverse=True)[min(p.top_k, len(row)) - 1]
        weights = [w if w >= limit else 0.0 for w in weights]
    if p.top_p < 1:
        total, limit = 0.0, 0.0
        for w in sorted(weights, reverse=True):
            total, limit = total + w, w
            if total >= p.top_p * sum(weights):
                break
        weights = [w if w >= limit else 0.0 for w in weights]
    weights = [w if w >= p.min_p * max(weights) else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def naive_token(probabilities: Sequence[float], one: BatchEntry) -> tuple[int, float]:
    """The winner of the race, token by token, and how far the second is behind it (log of the ratios)."""
    p, position = one.sampling, len(one.prompt_ids) + len(one.output_ids)
    scores = [
        math.log(probability) - math.log(exponentials(p.seed, p.sample_index, position, np.array([i]))[0])
        if probability > 0
        else -math.inf
        for i, probability in enumerate(probabilities)
    ]
    best, second = sorted(scores, reverse=True)[:2]
    return scores.index(best), best - second


any_params = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.05, 3.0),
        "top_k": st.sampled_from([0, 1, 2, 5, VOCAB, 10 * VOCAB]),
        "top_p": st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.2, 1.0]),
        "seed": st.integers(0, 2**64 - 1),
        "sample_index": st.integers(0, 15),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 1.1]),
        "logit_bias": st.sampled_from([(), ((7, 3.0), (9, -100.0)), ((2, 100.0),)]),
        "min_tokens": st.sampled_from([0, 3]),
        "stop_token_ids": st.sampled_from([(), (11, 12)]),
        "ignore_eos": st.booleans(),
    }
)
some_ids = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@settings(deadline=None, max_examples=300)
@given(any_params, some_ids, some_ids, st.integers(0, 10_000))
def test_every_combination_of_parameters_draws_what_the_naive_sampler_draws(
    params: dict[str, Any], prompt: list[int], output: list[int], seed: int
) -> None:
    one = entry([3, *prompt], output, **params)
    logits = random_logits(seed)
    probabilities = naive_probabilities(logits[0].tolist(), one)
    expected, margin = naive_token(probabilities, one)
    got = token(logits, one)
    assert got == expected or (margin < 1e-5 and probabilities[got] > 0)  # fp32 rounding


@settings(deadline=None, max_examples=50)
@given(st.lists(any_params, min_size=2, max_size=6), st.integers(0, 1_000))
def test_a_row_is_drawn_alike_alone_and_in_any_company(rows: list[dict[str, Any]], seed: int) -> None:
    entries = [entry([3, 4], [5] * i, **{**params, "num_logprobs": 2}) for i, params in enumerate(rows)]
    logits = random_logits(seed, len(rows))
    alone = [draw(logits[i : i + 1], one)[0] for i, one in enumerate(entries)]
    assert draw(logits, *entries) == alone
    assert draw(logits.flip(0), *reversed(entries)) == alone[::-1]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert token(logits_of({30: 4.0, 8: 4.0, 21: 4.0}), entry()) == 8


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert token(logits_of({8: 4.0, 9: 4.1}), entry(temperature=1e-30)) == 9


def test_greedy_applies_bias_and_penalties() -> None:
    logits = logits_of({8: 4.0, 9: 3.0, 10: 2.5})
    assert token(logits, entry(logit_bias=((9, 1.5),))) == 9
    assert token(logits, entry(prompt=[8], repetition_penalty=2.0)) == 9
    assert token(logits, entry(output=[8, 9], presence_penalty=2.0)) == 10
    assert token(logits, entry(output=[8, 8, 9], frequency_penalty=0.6)) == 8
    assert token(logits, entry(output=[8, 8, 9], frequency_penalty=1.1)) == 10
    assert (
        token(logits, entry(prompt=[8], presence_penalty=2.0, frequency_penalty=2.0)) == 8
    )  # the prompt is not counted


def test_eos_and_stop_ids_wait_for_min_tokens() -> None:
    logits = logits_of({2: 9.0, 11: 8.0, 20: 1.0})
    held: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (11,)}
    assert token(logits, entry(output=[20], **held)) == 20
    assert token(logits, entry(output=[20, 20], **held)) == 2
    assert token(logits, entry(output=[20], ignore_eos=True, **held)) == 2  # there it ends nothing


def test_a_bias_cannot_lift_eos_before_min_tokens() -> None:
    assert token(logits_of({20: 1.0}), entry(min_tokens=10, logit_bias=((2, 100.0),))) == 20


def test_logprobs_are_of_the_raw_distribution_best_first() -> None:
    logits = logits_of({8: 4.0, 9: 3.0, 10: 2.5})
    raw = logits[0].log_softmax(-1)
    one = entry(num_logprobs=2, logit_bias=((10, 50.0),), temperature=0.3, top_k=1)
    (drawn,) = draw(logits, one)
    assert drawn.token == 10
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprob == pytest.approx(raw[10].item())
    assert drawn.logprobs.top_ids == (8, 9)
    assert drawn.logprobs.top_logprobs == pytest.approx((raw[8].item(), raw[9].item()))


def test_zero_logprobs_means_the_sampled_tokens_only() -> None:
    (with_zero, without) = draw(random_logits(1, 2), entry(num_logprobs=0), entry())
    assert with_zero.logprobs is not None
    assert with_zero.logprobs.top_ids == ()
    assert without.logprobs is None


def test_seed_sample_index_and_position_each_change_the_draw_and_nothing_else_does() -> None:
    logits = random_logits(5, vocab=10_000) * 0
    base = entry(temperature=1.0, seed=1)
    others = [entry(temperature=1.0, seed=2), entry(temperature=1.0, seed=1, sample_index=1)]
    others += [entry(output=[9], temperature=1.0, seed=1)]
    drawn = [token(logits, one) for one in (base, *others)]
    assert len(set(drawn)) == 4
    same_position = entry(prompt=[9, 9], output=[9], temperature=1.0, seed=1)
    assert token(logits, same_position) == drawn[0]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_frequencies_follow_the_distribution(params: dict[str, Any]) -> None:
    num_draws = 4_000
    logits = random_logits(3)
    entries = [entry(**{"temperature": 1.0, "seed": seed, **params}) for seed in range(num_draws)]
    counts = Counter(drawn.token for drawn in draw(logits.expand(num_draws, -1), *entries))
    expected = [num_draws * p for p in naive_probabilities(logits[0].tolist(), entries[0])]
    assert all(expected[i] > 0 for i in counts)
    cells = [(counts[i], e) for i, e in enumerate(expected) if e >= 5]  # the usual rule for a chi-square test
    rest = sum(e for e in expected if e < 5)
    if rest >= 5:
        cells.append((num_draws - sum(observed for observed, _ in cells), rest))
    chi_square = sum((observed - e) ** 2 / e for observed, e in cells)
    freedom = len(cells) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # mean + 4 sigma; the draws are fixed by their seeds


def test_the_numbers_of_a_draw_are_exponential_and_pinned() -> None:
    numbers = exponentials(7, 0, 3, np.arange(50_000))
    assert (numbers > 0).all()
    assert numbers.mean() == pytest.approx(1.0, abs=0.02)
    assert np.exp(-numbers).mean() == pytest.approx(0.5, abs=0.01)  # uniform again
    assert exponentials(7, 0, 3, np.array([41]))[0] == numbers[41]  # a token's number does not depend on its company
    assert exponentials(7, 0, 4, np.array([41]))[0] != numbers[41]
    # a change would break streams that continue on a worker of another version
    assert exponentials(0, 0, 0, np.array([0, 49_151])) == pytest.approx(PINNED, rel=1e-12)


def test_noise_of_another_batch_shape_changes_next_to_no_draw() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 20_000, generator=generator) * 2
    noisy = logits + 3e-5 * torch.randn(
        1, 20_000, generator=generator
    )  # measured between chunk sizes on the demo model
    entries = [entry(temperature=0.8, seed=seed) for seed in range(400)]
    changed = sum(token(logits.clone(), one) != token(noisy.clone(), one) for one in entries)
    assert changed <= 1


def test_top_p_holds_over_flat_and_long_tailed_distributions() -> None:
    flat = torch.zeros(1, 5_000)
    flat[0, 17] = 1e-3
    kept = {token(flat, entry(temperature=1.0, top_p=0.5, seed=seed)) for seed in range(200)}
    assert len(kept) > 150  # equals are kept together, so all but none is cut off
    assert token(flat, entry(temperature=1.0, top_p=1e-12)) == 17
    assert 0 <= token(flat * 0, entry(temperature=1.0, top_p=1e-12)) < 5_000
    steps = -torch.arange(5_000.0)[None] * 1e-3
    cut = 693  # the first half of exp(-x/1000) ends at 1000 ln 2
    drawn = [token(steps, entry(temperature=1.0, top_p=0.5, seed=seed)) for seed in range(300)]
    assert cut - 60 < max(drawn) < cut + 5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_numbers_are_an_error_and_no_answer(value: float) -> None:
    with pytest.raises(Internal):
        draw(torch.full((1, VOCAB), value), entry())


def test_no_rows_give_no_samples() -> None:
    assert draw(torch.empty(0, VOCAB)) == []
