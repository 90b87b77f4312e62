"""Which part of a model one rank computes. Pure but for slices of tensors.

    q, k, v, gate, up    rows, so whole heads      (no words between ranks until the next line)
    o, down              columns: each rank's product is a summand of the layer's output; scales of int8 rows are whole
    head                 rows of the vocabulary, filled up with zeros to the same number on every rank
    embeddings, norms    whole on every rank

This is the cut of Megatron-LM (Shoeybi et al. 2019): two sums per layer and nothing else crosses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.model_spec import ModelSpec
from engine.loading.weight_manifest import SCALE

_BY_COLUMNS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_SUMMED_BIAS = "self_attn.o_proj.bias"
_BY_ROWS = tuple(
    f"{name}_proj.{kind}"
    for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    for kind in ("weight", f"weight{SCALE}", "bias")
)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """What this rank's model looks like; its vocabulary is the whole one."""
        if self.size == 1:
            return spec
        return replace(
            spec,
            num_heads=spec.num_heads // self.size,
            num_kv_heads=spec.num_kv_heads // self.size,
            ffn_size=spec.ffn_size // self.size,
        )

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of the tensor of that Hugging Face name: a view, or `tensor` itself where all ranks have it whole."""
        if self.size == 1:
            return tensor
        if name == "lm_head.weight":
            return self.head_rows(tensor)
        if name.endswith(_BY_ROWS):
            return tensor.chunk(self.size, 0)[self.rank]
        if name.endswith(_BY_COLUMNS):
            return tensor.chunk(self.size, 1)[self.rank]
        if name.endswith(_SUMMED_BIAS) and self.rank > 0:
            return torch.zeros_like(tensor)  # added once
        return tensor

    def head_rows(self, weight: Tensor) -> Tensor:
        """Its rows [ceil(V / size), hidden] of weight [V, hidden]."""
        num_rows = -(-len(weight) // self.size)
        rows = weight[self.rank * num_rows : (self.rank + 1) * num_rows]
        return rows if len(rows) == num_rows else F.pad(rows, (0, 0, 0, num_rows - len(rows)))


ALONE = Shard()
