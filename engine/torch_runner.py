"""Computes a step with torch: lay out the batch, one forward pass, sample. Runs on the engine thread only.

Entries come in any order and any mixture; results come back in theirs. When `run` returns, the blocks are complete: on a CPU
nothing runs behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.kv_layout import DTYPE_BYTES
from baton.memory import available_memory_bytes
from baton.model_files import ModelFiles
from engine.loading.weight_manifest import is_projection, weight_manifest
from engine.loading.weights import load_weights
from engine.models.architecture import ARCHITECTURES
from engine.models.attention import lay_out
from engine.models.deterministic import make_deterministic, numerics_digest
from engine.models.fixed_attention import FixedAttention
from engine.models.llama import Llama
from engine.ports import Batch, Sample
from engine.sampler import sample
from engine.torch_kv_cache import KV_TORCH_DTYPES, TORCH_DTYPES, TorchKVCache

_GIB = 1 << 30


class TorchRunner:
    """A model and its KV cache."""

    def __init__(self, model: Llama, kv_cache: TorchKVCache, attention: FixedAttention | None = None) -> None:
        """`attention`: how a deterministic model cuts it; None = as is quickest."""
        self.model = model
        self.kv_cache = kv_cache
        self._attention = attention
        self.numerics = "" if attention is None else numerics_digest(model, kv_cache, attention)  # of ModelSpec

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[Sample | None]:
        """Compute every entry's tokens and sample where asked; see Runner."""
        results: list[Sample | None] = [None] * len(batch.entries)
        if not batch.entries:
            return results
        step = lay_out(batch.entries, self.kv_cache.layout.block_size, self._attention)
        logits = self.model.forward(step, self.kv_cache.blocks)  # [R, V]
        rows = [batch.entries[i] for i in step.sampled_entries]
        for i, drawn in zip(step.sampled_entries, sample(logits, rows, self.model.spec.eos_token_ids), strict=True):
            results[i] = drawn
        return results


def load_torch_runner(
    files: ModelFiles,
    engine: EngineConfig,
    dtype: str,
    num_blocks: int = 0,
    allocate: Callable[[int], memoryview] | None = None,
    weights: dict[str, Tensor] | None = None,
) -> TorchRunner:
    """Load the weights and make a KV cache of `num_blocks`, 0 = what `engine` says, in memory of `allocate` if given.

    `weights`: those that are there already, all that the architecture needs; emptied.

    Raises: ConfigError naming the option, for a dtype we lack, a damaged file or too little memory.
    """
    kv_dtype = engine.kv_dtype(dtype)
    for field, value, known in (
        ("model.dtype", dtype, TORCH_DTYPES),
        ("engine.kv_cache_dtype", kv_dtype, KV_TORCH_DTYPES),
    ):
        if value not in known:
            raise ConfigError(f"{field} = {value!r} is not supported: use {', '.join(known)}", field=field)
    if engine.num_threads:
        torch.set_num_threads(engine.num_threads)
    layout = files.spec.kv_layout(kv_dtype, engine.block_size)
    num_blocks = num_blocks or engine.num_blocks or engine.kv_memory_bytes // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"engine.kv_memory_bytes = {engine.kv_memory_bytes} holds no block ({layout.block_bytes} bytes each): raise it",
            field="engine.kv_memory_bytes",
        )
    _check_memory(files, dtype, num_blocks * layout.block_bytes)
    architecture = ARCHITECTURES[files.spec.architecture]
    if weights is None:
        weights = load_weights(files, architecture.tensor_shapes(files.spec), TORCH_DTYPES[dtype])
    buffer = None if allocate is None else allocate(num_blocks * layout.block_bytes)
    model = architecture(files.spec, weights)
    attention = make_deterministic(model, engine.block_size) if engine.deterministic else None
    return TorchRunner(model, TorchKVCache(layout, num_blocks, buffer), attention)


def _check_memory(files: ModelFiles, dtype: str, kv_bytes: int) -> None:
    """Refuse before the kernel kills: weights, what laying them out takes beside them, and KV must fit what is free now."""
    spec, element_bytes = files.spec, DTYPE_BYTES[dtype]
    shapes = ARCHITECTURES[spec.architecture].tensor_shapes(spec)
    weight_bytes = sum(place.nbytes for place in weight_manifest(shapes, dtype, spec.is_int8).places)
    if spec.tie_embeddings:  # a packed head of its own; see models/linear.py
        weight_bytes += element_bytes * spec.vocab_size * spec.hidden_size
    # For a moment: one matrix in fp32 as it is read, put in order and divided by its scales; else gate and up once more, fused
    widest = max(math.prod(shape) for name, shape in shapes.items() if is_projection(name))
    weight_bytes += widest * (3 * DTYPE_BYTES["float32"] if spec.is_int8 else 2 * element_bytes)
    available_bytes = available_memory_bytes()
    if weight_bytes + kv_bytes > available_bytes:
        raise ConfigError(
            f"weights need {weight_bytes / _GIB:.2f} GiB and KV {kv_bytes / _GIB:.2f} GiB, but {available_bytes / _GIB:.2f} GiB "
            f"are free: lower engine.kv_memory_bytes or engine.num_blocks, or free memory",
            field="engine.kv_memory_bytes",
        )
