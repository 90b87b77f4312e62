"""Makes a model batch-invariant: what a token's logits are does not depend on batch, chunks, cache hits or worker.

Products and attention are called at fixed sizes (fixed_linear.py, fixed_attention.py). All else works on one row or one number
at a time and was measured not to vary, but for silu where threads cut rows that are no whole number of vectors
(docs/determinism.md). What a machine computes it shows by a digest, which is part of the model's fingerprint: workers whose
numbers differ never pair.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import torch

from baton.errors import ConfigError
from baton.request import SamplingParams
from engine.models.attention import lay_out
from engine.models.fixed_attention import FixedAttention, fixed_attention
from engine.models.fixed_linear import ROW_SIZES, FixedLinear, row_sizes
from engine.models.linear import Linear
from engine.models.llama import Llama
from engine.ports import BatchEntry
from engine.torch_kv_cache import TorchKVCache

MAX_HEAD_ROWS = 64  # the head computes sampled rows alone, about one per sequence; its matrix is the largest by far
VECTOR = 32  # numbers that torch's elementwise loops take at once with AVX-512: two registers of 16
DIGEST_TOKENS = 100  # several blocks, a rest, and more than one tile of queries with grouped heads


@torch.inference_mode()
def make_deterministic(model: Llama, block_size: int) -> FixedAttention:
    """Fix the sizes at which `model` calls its kernels; returns those of attention.

    Raises: ConfigError where this machine's kernels cannot be held to any.
    """
    spec = model.spec
    if spec.ffn_size % VECTOR:
        raise ConfigError(
            f"engine.deterministic needs an ffn_size that is a multiple of {VECTOR} on each rank; here it is {spec.ffn_size}",
            field="deterministic",
        )
    _fix_linears(model)
    return fixed_attention(spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size)


@torch.inference_mode()
def numerics_digest(model: Llama, cache: TorchKVCache, attention: FixedAttention) -> str:
    """16 hex digits of what this machine makes of a fixed text; `cache` is empty and stays so to all that read it."""
    ids = [7 * i % model.spec.vocab_size for i in range(min(DIGEST_TOKENS, cache.num_blocks * cache.layout.block_size))]
    entry = BatchEntry(0, ids, 0, range(cache.num_blocks), True, SamplingParams(max_tokens=1))
    step = lay_out([entry], cache.layout.block_size, attention)
    logits = model.forward(step, cache.mine)
    return hashlib.blake2b(logits.numpy().tobytes(), digest_size=8).hexdigest()


def _fix_linears(model: Llama) -> None:
    """Replace every matrix of `model` by one whose rows do not depend on their number; equal shapes are tried once."""
    spec = model.spec
    sizes: dict[str, tuple[int, ...]] = {}

    def fixed(name: str, linear: Linear, num_inputs: int, candidates: Iterable[int] = ROW_SIZES) -> FixedLinear:
        if name not in sizes:
            sizes[name] = row_sizes(linear, num_inputs, tuple(candidates))
        return FixedLinear(linear, sizes[name])

    model.layers = [
        replace(
            layer,
            qkv=fixed("qkv", layer.qkv, spec.hidden_size),
            output=fixed("output", layer.output, spec.num_heads * spec.head_dim),
            gate_up=fixed("gate_up", layer.gate_up, spec.hidden_size),
            down=fixed("down", layer.down, spec.ffn_size),
        )
        for layer in model.layers
    ]
    head_rows = (size for size in ROW_SIZES if size <= MAX_HEAD_ROWS)
    model.head = fixed("head", model.head, spec.hidden_size, head_rows)
