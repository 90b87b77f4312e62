"""The Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU; embeddings tied or not.

A plain class over tensors: what it computes stands in `forward` from top to bottom. Runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.model_spec import ModelSpec
from engine.loading.weight_manifest import SCALE
from engine.models.attention import StepTensors, attend
from engine.models.linear import Linear
from engine.models.quantized_linear import QuantizedLinear
from engine.models.rope import Rope, rotate
from engine.tensor_parallel.exchange import Exchange, NoExchange
from engine.tensor_parallel.shard import ALONE, Shard


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block's weights; projections that read the same input are one matrix."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # hidden -> (H + 2K) * D
    output: Linear  # H * D -> hidden
    post_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 * ffn
    down: Linear  # ffn -> hidden


class Llama:
    """A decoder-only transformer; subclasses change what differs."""

    def __init__(
        self, spec: ModelSpec, weights: dict[str, Tensor], shard: Shard = ALONE, exchange: Exchange | None = None
    ) -> None:
        """Take the tensors of `tensor_shapes(spec)` out of `weights`, one layer at a time, so that none is held twice.

        `shard`: which part of the model of `spec` this is, of whose tensors `weights` has that part; the others compute theirs
        at the same time and are reached through `exchange`.
        """
        self.spec = shard.spec(spec)
        self.exchange = exchange or NoExchange()
        self.rope = Rope(spec)
        self.layers = [self._take_layer(weights, f"model.layers.{i}.") for i in range(spec.num_layers)]
        self.norm = weights.pop("model.norm.weight")
        self.embeddings = weights.pop("model.embed_tokens.weight")  # [V, hidden]
        self.head = Linear(shard.head_rows(self.embeddings) if spec.tie_embeddings else weights.pop("lm_head.weight"))

    @classmethod
    def tensor_shapes(cls, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return every tensor this architecture needs, by Hugging Face name."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
            "model.norm.weight": (spec.hidden_size,),
        }
        if not spec.tie_embeddings:
            shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
        layer = cls.layer_shapes(spec)
        for i in range(spec.num_layers):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes

    @classmethod
    def layer_shapes(cls, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        outputs = {"q": q_size, "k": kv_size, "v": kv_size, "o": spec.hidden_size}
        shapes: dict[str, tuple[int, ...]] = {
            f"self_attn.{name}_proj.weight": (size, q_size if name == "o" else spec.hidden_size)
            for name, size in outputs.items()
        }
        if spec.attention_bias:
            shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in outputs.items()}
        return shapes | {
            "input_layernorm.weight": (spec.hidden_size,),
            "post_attention_layernorm.weight": (spec.hidden_size,),
            "mlp.gate_proj.weight": (spec.ffn_size, spec.hidden_size),
            "mlp.up_proj.weight": (spec.ffn_size, spec.hidden_size),
            "mlp.down_proj.weight": (spec.hidden_size, spec.ffn_size),
        }

    def held(self) -> Iterator[tuple[tuple[str, ...], Linear | Tensor]]:
        """Yield all that was taken out of `weights`: each piece with the names of the tensors that are its rows, in order."""
        yield ("model.embed_tokens.weight",), self.embeddings
        yield ("model.norm.weight",), self.norm
        if not self.spec.tie_embeddings:
            yield ("lm_head.weight",), self.head
        for i in range(self.spec.num_layers):
            for names, piece in self._held_by_layer(i):
                yield tuple(f"model.layers.{i}.{name}" for name in names), piece

    def _held_by_layer(self, i: int) -> Iterator[tuple[tuple[str, ...], Linear | Tensor]]:
        layer = self.layers[i]
        yield ("input_layernorm.weight",), layer.input_norm
        yield ("post_attention_layernorm.weight",), layer.post_norm
        for names, linear in (
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.qkv),
            (("self_attn.o_proj",), layer.output),
            (("mlp.gate_proj", "mlp.up_proj"), layer.gate_up),
            (("mlp.down_proj",), layer.down),
        ):
            for part, piece in linear.parts():
                yield tuple(f"{name}.{part}" for name in names), piece

    def forward(self, step: StepTensors, kv: Tensor) -> Tensor:
        """Compute a step: fill its slots in kv [L, 2, N, S, K, E] and return the sampled rows' logits [R, V] in fp32."""
        spec, exchange = self.spec, self.exchange
        x = self.embeddings[step.token_ids]  # [T, hidden]
        cos, sin = self.rope.tables(step.positions, x.dtype)  # [T, 1, D]
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(self._norm(x, layer.input_norm)).view(len(x), -1, spec.head_dim)  # [T, H + 2K, D]
            q, k, v = torch.split(qkv, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
            q, k = self._position(i, q, k, cos, sin)
            x = x + exchange.sum(layer.output(attend(q, k, v, kv[i], step)))
            gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, -1)  # [T, ffn] each
            x = x + exchange.sum(layer.down(F.silu(gate) * up))
        logits = self.head(self._norm(x[step.sampled_rows], self.norm))  # [R, V], or this rank's columns
        return exchange.gather(logits)[:, : spec.vocab_size].float()

    def _position(self, i: int, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Give q [T, H, D] and k [T, K, D] of layer i their positions."""
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.spec.norm_eps)

    def _take_layer(self, weights: dict[str, Tensor], prefix: str) -> Layer:
        def take(*names: str) -> Tensor:
            return torch.cat([weights.pop(f"{prefix}{name}.weight") for name in names])

        def bias(*names: str) -> Tensor | None:
            return torch.cat([weights.pop(f"{prefix}{n}.bias") for n in names]) if self.spec.attention_bias else None

        def linear(*names: str, bias: Tensor | None = None) -> Linear:
            weight = take(*names)
            if weight.dtype != torch.int8:
                return Linear(weight, bias)
            scales = [weights.pop(f"{prefix}{name}.weight{SCALE}") for name in names]
            return QuantizedLinear(weight, torch.cat(scales), bias)

        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return Layer(
            input_norm=take("input_layernorm"),
            qkv=linear(*qkv, bias=bias(*qkv)),
            output=linear("self_attn.o_proj", bias=bias("self_attn.o_proj")),
            post_norm=take("post_attention_layernorm"),
            gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
            down=linear("mlp.down_proj"),
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis in fp32, scale in x's dtype, as Hugging Face does."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
