"""Qwen3: Llama with an RMSNorm on every query and key head, before the rotation; head_dim is free of hidden_size / H."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from baton.model_spec import ModelSpec
from engine.models.linear import Linear
from engine.models.llama import Layer, Llama, rms_norm
from engine.tensor_parallel.exchange import Exchange
from engine.tensor_parallel.shard import ALONE, Shard


class Qwen3(Llama):
    """Dense Qwen3."""

    def __init__(
        self, spec: ModelSpec, weights: dict[str, Tensor], shard: Shard = ALONE, exchange: Exchange | None = None
    ) -> None:
        self.q_norms: list[Tensor] = []  # L of [D]
        self.k_norms: list[Tensor] = []
        super().__init__(spec, weights, shard, exchange)

    @classmethod
    def layer_shapes(cls, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        norms = {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
        return super().layer_shapes(spec) | norms

    def _take_layer(self, weights: dict[str, Tensor], prefix: str) -> Layer:
        self.q_norms.append(weights.pop(prefix + "self_attn.q_norm.weight"))
        self.k_norms.append(weights.pop(prefix + "self_attn.k_norm.weight"))
        return super()._take_layer(weights, prefix)

    def _held_by_layer(self, i: int) -> Iterator[tuple[tuple[str, ...], Linear | Tensor]]:
        yield from super()._held_by_layer(i)
        yield ("self_attn.q_norm.weight",), self.q_norms[i]
        yield ("self_attn.k_norm.weight",), self.k_norms[i]

    def _position(self, i: int, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        eps = self.spec.norm_eps
        return super()._position(i, rms_norm(q, self.q_norms[i], eps), rms_norm(k, self.k_norms[i], eps), cos, sin)
