"""Models as the roofline sees them: sizes of their matrices, from which bytes and FLOPs follow. Pure data.

Every number is the field of the same meaning in the model's public config.json (Hugging Face repository in the comment).
Norms and biases are left out: under 0.01 % of the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from engine.timing.hardware import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): the cache holds one latent and one rope part per token."""

    query_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int  # per head
    value_dim: int  # per head


@dataclass(frozen=True)
class ModelShape:
    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int  # of a dense layer
    vocab: int
    num_experts: int = 0  # routed ones, per layer
    num_active_experts: int = 0  # routed ones that a token visits
    num_shared_experts: int = 0
    expert_ffn: int = 0
    num_dense_layers: int = 0  # of a mixture: its first layers have a plain ffn
    ffn_matrices: int = 3  # gate, up, down; 2 without a gate
    tied_embeddings: bool = False
    latent: Latent | None = None
    projection_params: int = 0  # of a layer's attention, on average, where its heads do not tell
    num_context_layers: int = 0  # layers whose attention sees the whole context, where that is not all of them

    @property
    def is_mixture(self) -> bool:
        return self.num_experts > 0

    @cached_property
    def context_layers(self) -> int:
        """Layers whose KV grows with the context; sliding windows and linear attention keep a constant state instead."""
        return self.num_context_layers or self.num_layers

    @cached_property
    def attention_params(self) -> int:
        """Parameters of one layer's projections."""
        if self.projection_params:
            return self.projection_params
        if self.latent is None:
            return self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        one = self.latent
        query = self.hidden * one.query_rank + one.query_rank * self.num_heads * (one.nope_dim + one.rope_dim)
        cache = self.hidden * (one.kv_rank + one.rope_dim) + one.kv_rank * self.num_heads * (
            one.nope_dim + one.value_dim
        )
        return query + cache + self.num_heads * one.value_dim * self.hidden

    @cached_property
    def expert_params(self) -> int:
        """Parameters of one routed expert of one layer."""
        return self.ffn_matrices * self.hidden * self.expert_ffn

    @cached_property
    def head_params(self) -> int:
        return self.hidden * self.vocab

    @cached_property
    def mixture_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.is_mixture else 0

    @cached_property
    def common_params(self) -> int:
        """Parameters that every token passes in the layers: all but routed experts, embeddings and the head."""
        dense = (self.num_layers - self.mixture_layers) * self.ffn_matrices * self.hidden * self.ffn
        shared = self.num_shared_experts * self.expert_params + self.hidden * self.num_experts  # and the router
        return self.num_layers * self.attention_params + dense + self.mixture_layers * shared

    @cached_property
    def params(self) -> int:
        embeddings = self.head_params * (1 if self.tied_embeddings else 2)
        return self.common_params + self.mixture_layers * self.num_experts * self.expert_params + embeddings

    def experts_touched(self, num_tokens: int) -> float:
        """Return the expected number of different routed experts of a layer that `num_tokens` visit, routed evenly.

        A token misses a given expert with probability 1 - k/E, so E (1 - (1 - k/E)^n) are hit.
        """
        if not self.is_mixture:
            return 0.0
        return self.num_experts * (1.0 - (1.0 - self.num_active_experts / self.num_experts) ** num_tokens)

    def weight_bytes(self, dtype: str) -> float:
        """Return what the weights occupy, all in `dtype`."""
        return self.params * DTYPE_BYTES[dtype]

    def active_weight_bytes(self, dtype: str, num_tokens: int = 1) -> float:
        """Return what a step over `num_tokens` reads: all but the embedding table (looked up) and untouched experts."""
        return self.common_weight_bytes(dtype) + self.touched_expert_bytes(dtype, num_tokens)

    def common_weight_bytes(self, dtype: str) -> float:
        return (self.common_params + self.head_params) * DTYPE_BYTES[dtype]

    def touched_expert_bytes(self, dtype: str, num_tokens: int) -> float:
        return self.mixture_layers * self.experts_touched(num_tokens) * self.expert_params * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> float:
        width = 2 * self.num_kv_heads * self.head_dim
        if self.latent is not None:
            width = self.latent.kv_rank + self.latent.rope_dim
        return self.context_layers * width * DTYPE_BYTES[dtype]

    @cached_property
    def flops_per_token(self) -> float:
        """Multiply-adds count two; the layers' matrices only, without attention over the context and the head."""
        return self.common_flops + self.expert_flops

    @cached_property
    def common_flops(self) -> float:
        return 2.0 * self.common_params

    @cached_property
    def expert_flops(self) -> float:
        """Of one token, in the routed experts that it visits."""
        return 2.0 * self.mixture_layers * self.num_active_experts * self.expert_params

    @cached_property
    def head_flops(self) -> float:
        """Of one position whose logits are wanted."""
        return 2.0 * self.head_params

    @cached_property
    def attention_flops_per_pair(self) -> float:
        """Of one query token against one context token, all layers: q k and p v, two FLOPs per multiply-add."""
        width = 2 * self.head_dim
        if self.latent is not None:  # prefill expands the latent; decode's absorbed form is bound by memory
            width = self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim
        return 2.0 * self.context_layers * self.num_heads * width


_DEEPSEEK_LATENT = Latent(query_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)

_SHAPES = (
    # The demo model: HuggingFaceTB/SmolLM2-135M
    ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, tied_embeddings=True),
    # meta-llama/Llama-3.1-8B, -70B, -405B
    ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
    ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256),
    ModelShape("llama-3.1-405b", 126, 16384, 128, 8, 128, 53248, 128256),
    # meta-llama/Llama-2-70b-hf
    ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000),
    # Qwen/Qwen3-8B, -32B, -30B-A3B, -235B-A22B
    ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
    ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
    ModelShape(
        "qwen3-30b-a3b", 48, 2048, 32, 4, 128, 6144, 151936, num_experts=128, num_active_experts=8, expert_ffn=768
    ),
    ModelShape(
        "qwen3-235b-a22b", 94, 4096, 64, 4, 128, 12288, 151936, num_experts=128, num_active_experts=8, expert_ffn=1536
    ),
    # openai/gpt-oss-120b: every second layer sees a window of 128 tokens
    ModelShape(
        "gpt-oss-120b",
        36,
        2880,
        64,
        8,
        64,
        2880,
        201088,
        num_experts=128,
        num_active_experts=4,
        expert_ffn=2880,
        num_context_layers=18,
    ),
    # MiniMaxAI/MiniMax-M2.5
    ModelShape(
        "minimax-m2.5", 62, 3072, 48, 8, 128, 1536, 200064, num_experts=256, num_active_experts=8, expert_ffn=1536
    ),
    # deepseek-ai/DeepSeek-V3; R1 has the same
    ModelShape(
        "deepseek-v3",
        61,
        7168,
        128,
        128,
        128,
        18432,
        129280,
        num_experts=256,
        num_active_experts=8,
        num_shared_experts=1,
        expert_ffn=2048,
        num_dense_layers=3,
        latent=_DEEPSEEK_LATENT,
    ),
    # moonshotai/Kimi-K2.5: its text model
    ModelShape(
        "kimi-k2.5",
        61,
        7168,
        64,
        64,
        128,
        18432,
        163840,
        num_experts=384,
        num_active_experts=8,
        num_shared_experts=1,
        expert_ffn=2048,
        num_dense_layers=1,
        latent=_DEEPSEEK_LATENT,
    ),
    # zai-org/GLM-5; its sparse attention reads at most 2,048 tokens, which is not modelled
    ModelShape(
        "glm-5",
        78,
        6144,
        64,
        64,
        192,
        12288,
        154880,
        num_experts=256,
        num_active_experts=8,
        num_shared_experts=1,
        expert_ffn=2048,
        num_dense_layers=3,
        latent=Latent(2048, 512, 64, 192, 256),
    ),
    # Qwen/Qwen3.5-397B-A17B. 15 layers have gated attention (query and gate 4096 x 16384, KV 4096 x 1024, out 8192 x 4096: 105 M)
    # and 45 a gated delta net (q, k 4096 x 4096, v 4096 x 8192, gate and out the same: 117 M): 114 M on average
    ModelShape(
        "qwen3.5-397b-a17b",
        60,
        4096,
        32,
        2,
        256,
        1024,
        248320,
        num_experts=512,
        num_active_experts=10,
        num_shared_experts=1,
        expert_ffn=1024,
        num_context_layers=15,
        projection_params=114_294_784,
    ),
    # facebook/opt-13b, -66b; opt-175b: Zhang et al. 2022, table 1
    ModelShape("opt-13b", 40, 5120, 40, 40, 128, 20480, 50272, ffn_matrices=2, tied_embeddings=True),
    ModelShape("opt-66b", 64, 9216, 72, 72, 128, 36864, 50272, ffn_matrices=2, tied_embeddings=True),
    ModelShape("opt-175b", 96, 12288, 96, 96, 128, 49152, 50272, ffn_matrices=2, tied_embeddings=True),
    # bigscience/bloom
    ModelShape("bloom-176b", 70, 14336, 112, 112, 128, 57344, 250880, ffn_matrices=2, tied_embeddings=True),
)
_BY_NAME = {shape.name: shape for shape in _SHAPES}


def model_shape(name: str) -> ModelShape:
    """Return the shape of that name.

    Raises:
        ValueError: no such model.
    """
    shape = _BY_NAME.get(name.lower())
    if shape is None:
        raise ValueError(f"model {name!r} is not known; known are {', '.join(model_names())}")
    return shape


def model_names() -> tuple[str, ...]:
    return tuple(_BY_NAME)
