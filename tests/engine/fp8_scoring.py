"""Scores of one text under different KV precisions and paths: step by step, in one pass, in chunks, after a handoff."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.kv_fp8 import E4M3_MAX
from baton.model_files import ModelFiles, load_model_files
from baton.request import SamplingParams
from engine.models.attention import lay_out
from engine.ports import BatchEntry
from engine.torch_runner import TorchRunner, load_torch_runner

torch.set_num_threads(1)  # tiny tensors: a second thread only waits
S = 16  # block size
NUM_BLOCKS = 64  # two tables of 32 blocks: 512 tokens each
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


DEMO_PROMPT = (
    "The tide comes in and the tide goes out again. A letter to the harbour master, asking when the next boat leaves:"
)


def demo_files() -> ModelFiles:
    """Of the demo model; skips the test where it is not here."""
    try:
        return load_model_files("smollm2")
    except ConfigError:
        pytest.skip("the demo model is not here: baton model fetch smollm2")


class Scorer:
    """A model with one KV precision. Log-probs are [tokens, V]; a text's blocks are scattered over the pool."""

    def __init__(self, files: ModelFiles, kv_dtype: str) -> None:
        self.runner: TorchRunner = load_torch_runner(
            files, EngineConfig(kv_cache_dtype=kv_dtype), "float32", NUM_BLOCKS
        )
        self._tables = itertools.cycle((range(0, NUM_BLOCKS, 2), range(NUM_BLOCKS - 1, 0, -2)))
        self.table: Sequence[int] = next(self._tables)  # of the text scored last

    @torch.inference_mode()
    def extend(self, ids: Sequence[int], start: int) -> Tensor:
        """Compute the text's tokens [start, start + len(ids)) in the blocks of `table`; log-probs after each of them."""
        step = lay_out([BatchEntry(0, ids, start, self.table, True, GREEDY)], S)
        step = dataclasses.replace(step, sampled_rows=torch.arange(len(ids)))
        return self.runner.model.forward(step, self.runner.kv_cache.blocks).log_softmax(-1)

    def score(self, ids: Sequence[int], chunk: int = 1 << 30) -> Tensor:
        """Log-probs after every token, computed in chunks, in one pass where they are large."""
        self.table = next(self._tables)
        return torch.cat([self.extend(ids[i : i + chunk], i) for i in range(0, len(ids), chunk)])

    def generate(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Tensor]:
        """Greedy tokens after `prompt`, step by step, and the log-probs each was drawn from, [num_tokens, V]."""
        return self.go_on(prompt, self.score(prompt)[-1], num_tokens)

    def go_on(self, ids: Sequence[int], last: Tensor, num_tokens: int) -> tuple[list[int], Tensor]:
        """Like generate, where the KV of `ids` is in `table` already and `last` are the log-probs after it."""
        text, drawn_from = list(ids), []
        for _ in range(num_tokens):
            drawn_from.append(last)
            text.append(int(last.argmax()))
            last = self.extend(text[-1:], len(text) - 1)[0]
        return text[len(ids) :], torch.stack(drawn_from)

    def take_over(self, wire: memoryview) -> None:
        """Write a text's KV that came over the wire, all layers of it."""
        self.table = next(self._tables)
        layout = self.runner.kv_cache.layout
        num_blocks = wire.nbytes // layout.block_bytes
        self.runner.kv_cache.scatter(self.table[:num_blocks], 0, layout.num_layers, wire)


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """How two scores of one text differ, on the tokens it has."""

    greatest: float  # |dlogprob| of one token
    window: float  # the greatest mean of |dlogprob| over a window of S tokens, wherever it starts

    @classmethod
    def of(cls, ids: Sequence[int], a: Tensor, b: Tensor) -> Disagreement:
        tokens = torch.tensor(ids)[:, None]
        difference = (a.gather(1, tokens) - b.gather(1, tokens)).abs().flatten()  # [tokens]
        return cls(float(difference.max()), float(difference.unfold(0, S, 1).mean(1).max()))


def mean_kl(true: Tensor, other: Tensor) -> float:
    """KL(true || other) in nats, mean over positions."""
    return float((true.exp() * (true - other)).sum(1).mean())


def top1_agreement(a: Tensor, b: Tensor) -> float:
    return float((a.argmax(1) == b.argmax(1)).float().mean())


def edge_p_value(errors: npt.NDArray[np.float64], num_draws: int = 2_000) -> float:
    """How likely errors [tokens] that have nothing to do with block edges look as uneven over positions in a block as these do.

    A permutation test: the statistic is the spread of the mean ranks of the S positions, its distribution that of shuffled
    errors. The least value is 1 / (num_draws + 1).
    """
    ranks = errors.argsort().argsort().astype(np.float64)
    position = np.arange(len(errors)) % S

    def spread(values: npt.NDArray[np.float64]) -> float:
        return float(np.var(np.bincount(position, values) / np.bincount(position)))

    rng = np.random.default_rng(0)
    seen = spread(ranks)
    return (1 + sum(spread(rng.permutation(ranks)) >= seen for _ in range(num_draws))) / (num_draws + 1)


class BlockScale:
    """The mutant: one scale per block and head. In one pass it suits the whole block, step by step the block's first token.

    Takes the place of `quantise` for one text that is computed from its beginning, by a model of `num_layers`.
    """

    def __init__(self, num_layers: int) -> None:
        self._keys = itertools.cycle(range(2 * num_layers))  # K and V of each layer, in this order
        self._positions = [0] * (2 * num_layers)
        self._scales: dict[int, Tensor] = {}  # [1, K, 1]

    def __call__(self, x: Tensor) -> Tensor:
        key = next(self._keys)
        parts: list[Tensor] = []
        while x.numel():
            position = self._positions[key]
            part, x = x[: S - position % S], x[S - position % S :]
            if position % S == 0:
                self._scales[key] = part.abs().amax((0, 2), keepdim=True) / E4M3_MAX
            scale = self._scales[key].expand(*part.shape[:2], 1).contiguous()
            values = (part / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            parts.append(torch.cat((values.view(torch.uint8), scale.view(torch.uint8)), -1))
            self._positions[key] += len(part)
        return torch.cat(parts)
