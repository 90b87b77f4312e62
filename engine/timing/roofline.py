"""Step time from datasheets and shapes (Williams et al., Roofline, CACM 2009). Pure.

A step is cut into terms, each the time that the datasheet promises, and priced by what kernels reach of it:
  step + layers + matrices max(compute, bytes) + experts max(compute, bytes) + prompts' attention + KV bytes + all-reduces
For a given number of decodes that is linear in their context, which is what makes `decode_steps_s` exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.timing.batch import Batch
from engine.timing.hardware import Gpu
from engine.timing.shapes import ModelShape

Number = TypeVar(
    "Number", float, NDArray[np.float64]
)  # arrays where many steps are priced at once (engine/timing/fit.py)


@dataclass(frozen=True, slots=True)
class Terms(Generic[Number]):
    """One step at datasheet rates, on the busiest rank."""

    compute_s: Number  # matrices that every token passes, and the head
    memory_s: Number  # their weights
    expert_compute_s: Number
    expert_memory_s: Number  # weights of the experts touched
    attention_s: Number  # of prompts
    kv_s: Number  # KV that decodes read
    link_s: Number  # bytes of all-reduces
    num_allreduces: Number
    num_layers: Number


@dataclass(frozen=True, slots=True)
class Efficiency(Generic[Number]):
    """What kernels reach of the datasheet, and times that no datasheet has."""

    compute: Number
    memory: Number
    expert_compute: Number
    expert_memory: Number
    attention: Number
    kv: Number
    link: Number
    allreduce_s: Number  # of the smallest message
    layer_s: Number  # launches, norms, what small kernels lose
    step_s: Number  # schedule, sample, copy


def price_s(terms: Terms[Number], by: Efficiency[Number]) -> Number:
    matrices_s = _larger(terms.compute_s / by.compute, terms.memory_s / by.memory)
    experts_s = _larger(terms.expert_compute_s / by.expert_compute, terms.expert_memory_s / by.expert_memory)
    reads_s = terms.attention_s / by.attention + terms.kv_s / by.kv
    link_s = terms.link_s / by.link + terms.num_allreduces * by.allreduce_s
    return by.step_s + terms.num_layers * by.layer_s + matrices_s + experts_s + reads_s + link_s


def _larger(a: Number, b: Number) -> Number:
    apart: Number = abs(a - b)
    larger: Number = (a + b + apart) / 2  # max, the same for numbers and arrays
    return larger


IDEAL: Efficiency[float] = Efficiency(1, 1, 1, 1, 1, 1, 1, 0, 0, 0)

_ACTIVATION_BYTES = 2  # bf16, whatever the weights are
_ALLREDUCES_PER_LAYER = 2  # after attention and after the ffn: Megatron-LM (Shoeybi et al. 2019), section 3


@dataclass(frozen=True, slots=True)
class Roofline:
    """One model on `tp` GPUs."""

    gpu: Gpu
    shape: ModelShape
    tp: int = 1
    weight_dtype: str = "fp8"
    kv_dtype: str = "bf16"
    efficiency: Efficiency[float] = IDEAL
    attention_replicas: int = 1  # data-parallel attention among the tp ranks, as DeepSeek-V3 is served

    def step_s(self, batch: Batch) -> float:
        if not batch.num_tokens:
            return 0.0
        return price_s(self.terms(batch), self.efficiency)

    def decode_steps_s(self, num_decodes: int, context_tokens: int, num_steps: int) -> float:
        if not num_decodes:
            return 0.0
        first_s = self.step_s(Batch((), num_decodes, context_tokens))
        grown_tokens = num_decodes * (num_steps * (num_steps - 1) // 2)  # over the first step's context, summed
        return num_steps * first_s + self._kv_s(grown_tokens) / self.efficiency.kv

    def terms(self, batch: Batch) -> Terms[float]:
        shape, tokens = self.shape, batch.num_tokens
        ranks = self.tp // self.attention_replicas  # that share one copy of what is no expert
        flops = tokens * shape.common_flops + (len(batch.prefills) + batch.num_decodes) * shape.head_flops
        pair_flops = batch.num_prefill_pairs * shape.attention_flops_per_pair
        moved_bytes = (
            2 * (self.tp - 1) / self.tp * tokens * shape.hidden * _ACTIVATION_BYTES
        )  # ring: Patarasu, Yuan 2009
        num_allreduces = _ALLREDUCES_PER_LAYER * shape.num_layers if self.tp > 1 else 0
        return Terms(
            compute_s=flops / (self.tp * self.gpu.rate(self.weight_dtype)),
            memory_s=shape.common_weight_bytes(self.weight_dtype) / (ranks * self.gpu.memory_bytes_per_s),
            expert_compute_s=tokens * shape.expert_flops / (self.tp * self.gpu.rate(self.weight_dtype)),
            expert_memory_s=shape.touched_expert_bytes(self.weight_dtype, tokens)
            / (self.tp * self.gpu.memory_bytes_per_s),
            attention_s=pair_flops / (self.tp * self.gpu.rate("bf16")),
            kv_s=self._kv_s(batch.decode_context_tokens),
            link_s=num_allreduces * moved_bytes / self.gpu.link_bytes_per_s,
            num_allreduces=num_allreduces,
            num_layers=shape.num_layers,
        )

    def _kv_s(self, context_tokens: int) -> float:
        # KV heads are split as far as they go; a latent has none, so every rank of a replica reads all of it
        ranks = self.tp // self.attention_replicas
        ways = self.attention_replicas * (1 if self.shape.latent else min(ranks, self.shape.num_kv_heads))
        return context_tokens * self.shape.kv_bytes_per_token(self.kv_dtype) / (ways * self.gpu.memory_bytes_per_s)
