"""From logits to tokens. Each row follows its own parameters and depends on nothing else in the batch.

Order, which is vLLM's where vLLM defines one (docs/design/logits_processors, v1 sampler):

    1 logprobs are taken from the raw logits      5 presence and frequency penalty (output only, OpenAI's formula)
    2 logit_bias                                  6 temperature; 0 = the best token, the lowest id among equals
    3 min_tokens: EOS and stop ids are forbidden  7 top_k, top_p, min_p: each may only raise a threshold on the probability
    4 repetition penalty (prompt and output)      8 draw: the exponential race of engine/randomness.py

Tokens that equal the last one kept by top_k or top_p are kept too (as in Hugging Face's top_k), so no result depends on how a
sort breaks ties. The draw needs no sort of the vocabulary. EOS ids are not forbidden by min_tokens under ignore_eos, where
they stop nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.errors import Internal
from baton.request import Logprobs
from engine.ports import BatchEntry, Sample
from engine.randomness import exponentials

_MIN_TEMPERATURE = 1e-5  # below it a row is greedy, as in vLLM; dividing by less overflows


def sample(logits: Tensor, entries: Sequence[BatchEntry], eos_token_ids: Sequence[int]) -> list[Sample]:
    """Draw one token per row of logits [R, V], fp32; `logits` is the caller's no more.

    Raises: Internal where a row's best logit is not a number, rather than answer with noise.
    """
    if not entries:
        return []
    logprobs = _raw_logprobs(logits, entries)
    for row, entry in zip(logits, entries, strict=True):
        _adjust(row, entry, eos_token_ids)
    best, tokens = logits.max(-1)  # [R]; the first of equals
    if not all(map(math.isfinite, best.tolist())):
        raise Internal("the model's logits are not finite")
    chosen: list[int] = tokens.tolist()
    random = [i for i, entry in enumerate(entries) if entry.sampling.temperature >= _MIN_TEMPERATURE]
    if random:
        drawn = _draw(logits[random], [entries[i] for i in random])
        for i, token in zip(random, drawn, strict=True):
            chosen[i] = token
    return [Sample(token, _logprobs(logprobs.get(i), token, entries[i])) for i, token in enumerate(chosen)]


def _raw_logprobs(logits: Tensor, entries: Sequence[BatchEntry]) -> dict[int, Tensor]:
    """Return log_softmax [V] of the rows that want logprobs, before anything touches them."""
    return {i: logits[i].log_softmax(-1) for i, e in enumerate(entries) if e.sampling.num_logprobs is not None}


def _logprobs(row: Tensor | None, token: int, entry: BatchEntry) -> Logprobs | None:
    if row is None:
        return None
    top = row.topk(min(entry.sampling.num_logprobs or 0, len(row)))
    return Logprobs(row[token].item(), tuple(top.indices.tolist()), tuple(top.values.tolist()))


def _adjust(row: Tensor, entry: BatchEntry, eos_token_ids: Sequence[int]) -> None:
    """Steps 2 to 5, in place on row [V]."""
    params = entry.sampling
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        row.index_add_(0, torch.tensor(ids), torch.tensor(biases, dtype=row.dtype))
    if len(entry.output_ids) < params.min_tokens:
        forbidden = params.stop_token_ids + (() if params.ignore_eos else tuple(eos_token_ids))
        row[list(forbidden)] = -torch.inf
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(list({*entry.prompt_ids, *entry.output_ids}))
        old = row[seen]
        row[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and entry.output_ids:
        counts = Counter(entry.output_ids)
        penalties = torch.tensor(list(counts.values()), dtype=row.dtype) * params.frequency_penalty
        row[torch.tensor(list(counts))] -= penalties + params.presence_penalty


def _draw(logits: Tensor, entries: Sequence[BatchEntry]) -> list[int]:
    """Steps 6 to 8 for rows [R, V] with a temperature."""
    temperatures = torch.tensor([entry.sampling.temperature for entry in entries], dtype=logits.dtype)[:, None]
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperatures  # [R, V]
    return [_draw_row(row, entry) for row, entry in zip(scaled, entries, strict=True)]


def _draw_row(row: Tensor, entry: BatchEntry) -> int:
    """The winner among the tokens that the thresholds keep. row [V]: logits / temperature."""
    weights = row.softmax(-1)
    threshold = _threshold(weights, entry)
    kept = (weights >= threshold).nonzero()[:, 0] if threshold > 0.0 else torch.arange(len(row))  # ids, ascending
    params = entry.sampling
    position = entry.start + len(entry.token_ids)
    race = torch.from_numpy(exponentials(params.seed, params.sample_index, position, kept.numpy()))
    winner = (row[kept].double() - race.log()).argmax()  # log(weight / number), up to a constant
    return int(kept[winner])


def _threshold(row: Tensor, entry: BatchEntry) -> float:
    """Return the lowest probability that top_k, then top_p (of what is left), then min_p keep. row [V]."""
    params = entry.sampling
    lowest = 0.0
    if 0 < params.top_k < len(row):
        lowest = row.topk(params.top_k).values[-1].item()
    if params.top_p < 1.0:
        lowest = max(lowest, _top_p_threshold(row, lowest, params.top_p))
    if params.min_p > 0.0:
        lowest = max(lowest, params.min_p * row.amax().item())
    return lowest


def _top_p_threshold(row: Tensor, lowest: float, top_p: float) -> float:
    """Return the least probability in the smallest set of best tokens that holds top_p of all that is >= lowest. row [V].

    Only candidates are sorted: all tokens below (1 - top_p) / V together weigh less than what top_p may leave out.
    """
    total = row[row >= lowest].sum(dtype=torch.float64).item() if lowest > 0.0 else 1.0
    negligible = min(total * (1 - top_p) / len(row), row.amax().item())  # the best always stays, whatever the rounding
    candidates = row[row >= max(lowest, negligible)]  # [n]
    best = candidates.sort(descending=True).values
    num_short = int(
        (best.cumsum(0, dtype=torch.float64) < top_p * total).sum()
    )  # tokens that do not reach the goal yet
    return best[min(num_short, len(best) - 1)].item()
