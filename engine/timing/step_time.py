"""The time of one engine step on a GPU: types that the simulator and the emulator build on, and the roofline. Pure.

A step is priced as the sum of what cannot overlap:
  fixed overhead + matrices max(compute, weight bytes) + attention of prompts + KV bytes of decodes + all-reduces
so for a given number of decodes it is linear in their context, which is what makes `decode_steps_s` exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.timing.hardware import Gpu, gpu
from engine.timing.shapes import ModelShape, model_shape


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes."""

    prefills: tuple[tuple[int, int], ...] = ()  # (new tokens, tokens before them) per prompt chunk
    num_decodes: int = 0
    decode_context_tokens: int = 0  # whose KV the decodes read, summed over them

    @property
    def num_prefill_tokens(self) -> int:
        return sum(new for new, _before in self.prefills)

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decodes

    @property
    def num_prefill_pairs(self) -> float:
        """(query, context) pairs of the prompts' causal attention: new x before, and the triangle among the new ones."""
        return sum(new * before + new * (new + 1) / 2 for new, before in self.prefills)


class StepTime(Protocol):
    def step_s(self, batch: Batch) -> float:
        """Return the time of one step; an empty batch takes none."""
        ...

    def decode_steps_s(self, num_decodes: int, context_tokens: int, num_steps: int) -> float:
        """Return the time of `num_steps` steps of decodes alone: the sum of the single ones, each of whose context is
        `num_decodes` tokens longer than the last."""
        ...


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What kernels reach of the datasheet, and what no datasheet has. docs/timing.md derives each default."""

    compute: float = 0.6
    memory: float = 0.8
    attention: float = 0.5
    link: float = 0.7
    allreduce_s: float = 8e-6  # of the smallest message
    overhead_s: float = 2e-3


IDEAL = Efficiency(compute=1.0, memory=1.0, attention=1.0, link=1.0, allreduce_s=0.0, overhead_s=0.0)

_ACTIVATION_BYTES = 2  # bf16, whatever the weights are
_ALLREDUCES_PER_LAYER = 2  # after attention and after the ffn: Megatron-LM (Shoeybi et al. 2019), section 3


@dataclass(frozen=True, slots=True)
class Roofline:
    """Step time from datasheets and shapes (Williams et al., Roofline, CACM 2009)."""

    gpu: Gpu
    shape: ModelShape
    tp: int = 1
    weight_dtype: str = "fp8"
    kv_dtype: str = "bf16"
    efficiency: Efficiency = Efficiency()

    def step_s(self, batch: Batch) -> float:
        if not batch.num_tokens:
            return 0.0
        num_logits = len(batch.prefills) + batch.num_decodes
        return (
            self.efficiency.overhead_s
            + self._matrices_s(batch.num_tokens, num_logits)
            + self._prefill_attention_s(batch.num_prefill_pairs)
            + self._kv_s_per_token * batch.decode_context_tokens
            + self._allreduces_s(batch.num_tokens)
        )

    def decode_steps_s(self, num_decodes: int, context_tokens: int, num_steps: int) -> float:
        if not num_decodes:
            return 0.0
        first_s = self.step_s(Batch((), num_decodes, context_tokens))
        grown_tokens = num_decodes * (num_steps * (num_steps - 1) // 2)  # over the first step's context, summed
        return num_steps * first_s + self._kv_s_per_token * grown_tokens

    def _matrices_s(self, num_tokens: int, num_logits: int) -> float:
        flops = num_tokens * self.shape.flops_per_token + num_logits * self.shape.head_flops
        compute_s = flops / (self.tp * self.gpu.rate(self.weight_dtype) * self.efficiency.compute)
        nbytes = self.shape.active_weight_bytes(self.weight_dtype, num_tokens)
        memory_s = nbytes / (self.tp * self.gpu.memory_bytes_per_s * self.efficiency.memory)
        return max(compute_s, memory_s)

    def _prefill_attention_s(self, num_pairs: float) -> float:
        flops = num_pairs * self.shape.attention_flops_per_pair
        return flops / (self.tp * self.gpu.rate("bf16") * self.efficiency.attention)

    @property
    def _kv_s_per_token(self) -> float:
        # KV heads are split as far as they go; a latent has no heads, so every rank reads all of it
        ways = 1 if self.shape.latent is not None else min(self.tp, self.shape.num_kv_heads)
        nbytes = self.shape.kv_bytes_per_token(self.kv_dtype) / ways
        return nbytes / (self.gpu.memory_bytes_per_s * self.efficiency.memory)

    def _allreduces_s(self, num_tokens: int) -> float:
        """A ring moves 2 (n - 1) / n of the message over each link (Patarasu and Yuan 2009)."""
        if self.tp == 1:
            return 0.0
        nbytes = num_tokens * self.shape.hidden * _ACTIVATION_BYTES
        move_s = 2 * (self.tp - 1) / self.tp * nbytes / (self.gpu.link_bytes_per_s * self.efficiency.link)
        return _ALLREDUCES_PER_LAYER * self.shape.num_layers * (self.efficiency.allreduce_s + move_s)


def step_time(
    gpu_name: str, model_name: str, tp: int = 1, *, weight_dtype: str = "fp8", kv_dtype: str = "bf16"
) -> StepTime:
    """Return the best known step time of that model on `tp` GPUs.

    Raises:
        ValueError: unknown GPU or model.
    """
    return Roofline(gpu(gpu_name), model_shape(model_name), tp, weight_dtype, kv_dtype)
