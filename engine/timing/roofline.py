"""Step time from datasheets and shapes (Williams et al., Roofline, CACM 2009). Pure.

A step is cut into terms, each the time that the datasheet promises, and priced by what kernels reach of it:
  step + layers + matrices max(compute, bytes) + experts max(compute, bytes) + prompts' attention + KV bytes + all-reduces
For a given number of decodes that is linear in their context, which is what makes `decode_steps_s` exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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


def common_dtype(shape: ModelShape, weight_dtype: str) -> str:
    """Return the type of all weights but routed experts: 4-bit checkpoints of mixtures (gpt-oss, Kimi-K2.5) keep them bf16."""
    return "bf16" if shape.is_mixture and weight_dtype in ("fp4", "int4") else weight_dtype


IDEAL: Efficiency[float] = Efficiency(1, 1, 1, 1, 1, 1, 1, 0, 0, 0)

_ACTIVATION_BYTES = 2  # bf16, whatever the weights are
_DISPATCH_BYTES = 1  # fp8 to the experts, bf16 back: DeepSeek-V3 (2024), section 3.4
_ALLREDUCES_PER_LAYER = 2  # after attention and after the ffn: Megatron-LM (Shoeybi et al. 2019), section 3


@dataclass(frozen=True)
class Roofline:
    """One model on `tp` GPUs."""

    gpu: Gpu
    shape: ModelShape
    tp: int = 1
    weight_dtype: str = "fp8"
    kv_dtype: str = "bf16"
    efficiency: Efficiency[float] = IDEAL
    attention_replicas: int = (
        1  # data-parallel attention among the tp ranks, experts over all: as DeepSeek-V3 is served
    )

    def step_s(self, batch: Batch) -> float:
        if not batch.num_tokens:
            return 0.0
        return price_s(self.terms(batch), self.efficiency)

    def decode_steps_s(self, num_decodes: int, context_tokens: int, num_steps: int) -> float:
        if not num_decodes:
            return 0.0
        first_s = self.step_s(Batch((), num_decodes, context_tokens))
        grown_tokens = num_decodes * (num_steps * (num_steps - 1) // 2)  # over the first step's context, summed
        return num_steps * first_s + grown_tokens * self._kv_s / self.efficiency.kv

    def terms(self, batch: Batch) -> Terms[float]:
        shape, tokens = self.shape, batch.num_tokens
        num_logits = len(batch.prefills) + batch.num_decodes
        touched_bytes = shape.touched_expert_bytes(self.weight_dtype, tokens)
        return Terms(
            compute_s=(tokens * shape.common_flops + num_logits * shape.head_flops) / self._common_rate,
            memory_s=self._common_memory_s,
            expert_compute_s=tokens * shape.expert_flops / self._expert_rate,
            expert_memory_s=touched_bytes / (self.tp * self.gpu.memory_bytes_per_s),
            attention_s=batch.num_prefill_pairs * shape.attention_flops_per_pair / self._attention_rate,
            kv_s=batch.decode_context_tokens * self._kv_s,
            link_s=tokens * self._link_s,
            num_allreduces=self._num_messages,
            num_layers=shape.num_layers,
        )

    @property
    def kv_ways(self) -> int:
        """Ranks that a context's KV is divided among: heads as far as they go; a latent has none and is copied."""
        return self.attention_replicas * (1 if self.shape.latent else min(self._ranks, self.shape.num_kv_heads))

    @property
    def _ranks(self) -> int:
        return self.tp // self.attention_replicas  # that share one copy of what is no expert

    # What does not depend on the batch, once: a simulation asks for millions of steps

    @cached_property
    def _common_rate(self) -> float:
        return self.tp * self.gpu.rate(common_dtype(self.shape, self.weight_dtype))

    @cached_property
    def _expert_rate(self) -> float:
        return self.tp * self.gpu.rate(self.weight_dtype)

    @cached_property
    def _attention_rate(self) -> float:
        return self.tp * self.gpu.rate("fp32" if self.weight_dtype == "fp32" else "bf16")

    @cached_property
    def _common_memory_s(self) -> float:
        nbytes = self.shape.common_weight_bytes(common_dtype(self.shape, self.weight_dtype))
        return nbytes / (self._ranks * self.gpu.memory_bytes_per_s)

    @cached_property
    def _kv_s(self) -> float:
        """Of one token of context."""
        return self.shape.kv_bytes_per_token(self.kv_dtype) / (self.kv_ways * self.gpu.memory_bytes_per_s)

    @cached_property
    def _link_s(self) -> float:
        """Of one token of the batch. A ring moves 2 (n - 1) / n of a message over each link (Patarasu and Yuan 2009); experts on
        other ranks than attention take a copy per expert there and back (DeepSeek-V3, section 3.4)."""
        shape, ranks = self.shape, self._ranks
        ring_bytes = 2 * (ranks - 1) / ranks * shape.hidden * _ACTIVATION_BYTES / self.attention_replicas
        exchanged_bytes = 0.0
        if self.attention_replicas > 1 and shape.is_mixture:
            exchanged_bytes = shape.num_active_experts * shape.hidden * (_DISPATCH_BYTES + _ACTIVATION_BYTES) / self.tp
        all_layers_bytes = (
            _ALLREDUCES_PER_LAYER * shape.num_layers * ring_bytes + shape.mixture_layers * exchanged_bytes
        )
        return all_layers_bytes / self.gpu.link_bytes_per_s

    @cached_property
    def _num_messages(self) -> int:
        return _ALLREDUCES_PER_LAYER * self.shape.num_layers if self.tp > 1 else 0
