"""The answer that transformers gives, with a sampler written again from its definition: what exactness is measured against.

Shares with the product only the random numbers of a draw (engine/randomness.py); everything else is transformers' forward
and the plainest code for each sampling rule. A token that differs is excused only where the reference itself was
undecided: its two best logits within GAP (greedy), or the two first of the race (seeded).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from baton.request import SamplingParams
from engine.randomness import exponentials

GAP = 1e-3  # fp32 logits; DESIGN section 7


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    tokens: list[int]
    logprobs: list[float]  # of each token, raw
    undecided: list[bool]  # whether another token was within GAP


class Reference:
    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    @torch.inference_mode()
    def answer(self, prompt: list[int], sampling: SamplingParams) -> ReferenceAnswer:
        """Generate max_tokens tokens; EOS is ignored."""
        tokens: list[int] = []
        logprobs: list[float] = []
        undecided: list[bool] = []
        output = self._model(torch.tensor([prompt]), use_cache=True)
        while True:
            logits = output.logits[0, -1].double()
            adjusted = _adjusted(logits.clone(), prompt, tokens, sampling)
            token, close = _choose(adjusted, sampling, len(prompt) + len(tokens))
            tokens.append(token)
            undecided.append(close)
            logprobs.append(logits.log_softmax(-1)[token].item())
            if len(tokens) == sampling.max_tokens:
                return ReferenceAnswer(tokens, logprobs, undecided)
            output = self._model(torch.tensor([[token]]), cache=output.past_key_values, use_cache=True)


def _adjusted(logits: torch.Tensor, prompt: list[int], output: list[int], sampling: SamplingParams) -> torch.Tensor:
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if sampling.repetition_penalty != 1.0:
        for token in set(prompt) | set(output):
            score = logits[token]
            logits[token] = score / sampling.repetition_penalty if score > 0 else score * sampling.repetition_penalty
    for token in set(output):
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    return logits


def _choose(logits: torch.Tensor, sampling: SamplingParams, position: int) -> tuple[int, bool]:
    best = logits.topk(2)
    if sampling.temperature == 0:
        return int(best.indices[0]), bool(best.values[0] - best.values[1] <= GAP)
    weights = (logits / sampling.temperature).softmax(-1)
    kept = weights.clone()
    if sampling.top_k:
        kept[weights < weights.topk(sampling.top_k).values[-1]] = 0
    if sampling.top_p < 1:
        ordered, ids = kept.sort(descending=True)
        share_before = (ordered.cumsum(-1) - ordered) / kept.sum()
        kept[ids[share_before >= sampling.top_p]] = 0
    race = torch.from_numpy(exponentials(sampling.seed, sampling.sample_index, position, np.arange(len(kept))))
    ratios = (kept.log() - race.log()).topk(2)
    return int(ratios.indices[0]), bool(ratios.values[0] - ratios.values[1] <= GAP)
