"""Computes a step with torch: lay out the batch, one forward pass, sample. Runs on the engine thread only.

Entries come in any order and any mixture; results come back in theirs. When `run` returns, the blocks are complete: on a CPU
nothing runs behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.kv_layout import DTYPE_BYTES
from baton.memory import available_memory_bytes
from baton.model_files import ModelFiles
from baton.model_spec import ModelSpec
from engine.loading.weight_manifest import is_projection, weight_manifest
from engine.loading.weights import load_weights
from engine.models.architecture import ARCHITECTURES
from engine.models.attention import StepTensors, lay_out
from engine.models.deterministic import make_deterministic, numerics_digest
from engine.models.fixed_attention import FixedAttention
from engine.models.llama import Llama
from engine.ports import Batch, BatchEntry, RunnerLost, Sample
from engine.sampler import sample
from engine.tensor_parallel.degree import check_shards, more_bytes
from engine.tensor_parallel.exchange import Exchange, NoExchange
from engine.tensor_parallel.ranks import Job, Ranks
from engine.tensor_parallel.shard import ALONE, Shard
from engine.torch_kv_cache import KV_TORCH_DTYPES, TORCH_DTYPES, TorchKVCache

_GIB = 1 << 30


class TorchRunner:
    """A model and its KV cache; of one rank of it, where there are several."""

    def __init__(
        self,
        model: Llama,
        kv_cache: TorchKVCache,
        attention: FixedAttention | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`attention`: how a deterministic model cuts it; None = as is quickest. `ranks`: the others, if this is rank 0."""
        self.model = model
        self.kv_cache = kv_cache
        self.ranks = ranks
        self._attention = attention
        self.numerics = "" if attention is None else numerics_digest(model, kv_cache, attention)  # of ModelSpec

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[Sample | None]:
        """Compute every entry's tokens and sample where asked; see Runner."""
        results: list[Sample | None] = [None] * len(batch.entries)
        if not batch.entries:
            return results
        step, logits = self.compute(batch.entries)
        rows = [batch.entries[i] for i in step.sampled_entries]
        for i, drawn in zip(step.sampled_entries, sample(logits, rows, self.model.spec.eos_token_ids), strict=True):
            results[i] = drawn
        return results

    @torch.inference_mode()
    def compute(self, entries: Sequence[BatchEntry]) -> tuple[StepTensors, Tensor]:
        """Fill the entries' slots. Returns the step and its sampled rows' logits [R, V], which only rank 0 has.

        Raises: RunnerLost: another rank is gone, or this one failed within a step that others compute.
        """
        step = lay_out(entries, self.kv_cache.layout.block_size, self._attention)
        if self.ranks is None:
            return step, self.model.forward(step, self.kv_cache.mine)
        try:
            self.ranks.begin(entries)
            return step, self.model.forward(step, self.kv_cache.mine)
        except RunnerLost:
            raise
        except Exception as error:  # others are within this step, and nothing brings them out of it
            raise RunnerLost(f"a step of several ranks failed with {type(error).__name__}") from error


def load_torch_runner(
    files: ModelFiles,
    engine: EngineConfig,
    dtype: str,
    num_blocks: int = 0,
    allocate: Callable[[int], memoryview] | None = None,
    weights: dict[str, Tensor] | None = None,
) -> TorchRunner:
    """Load the weights and make a KV cache of `num_blocks`, 0 = what `engine` says, in memory of `allocate` if given.

    Of a model of several ranks the others are started, and the KV cache lies in memory that they share.
    `weights`: those that are there already, all that the architecture needs; emptied. Only for a model of one rank.

    Raises: ConfigError naming the option, for a dtype we lack, a damaged file or too little memory.
    """
    kv_dtype, size = engine.kv_dtype(dtype), engine.tensor_parallel_size
    for field, value, known in (
        ("model.dtype", dtype, TORCH_DTYPES),
        ("engine.kv_cache_dtype", kv_dtype, KV_TORCH_DTYPES),
    ):
        if value not in known:
            raise ConfigError(f"{field} = {value!r} is not supported: use {', '.join(known)}", field=field)
    check_shards(files.spec, size)
    layout = files.spec.kv_layout(kv_dtype, engine.block_size)
    num_blocks = num_blocks or engine.kv_bytes(layout.block_bytes) // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"engine.kv_memory_bytes = {engine.kv_memory_bytes} holds no block ({layout.block_bytes} bytes each): raise it",
            field="engine.kv_memory_bytes",
        )
    kv_bytes = num_blocks * layout.block_bytes
    _check_memory(loading_bytes(files.spec, dtype, size), kv_bytes)
    if size == 1:
        buffer = None if allocate is None else allocate(kv_bytes)
        return load_rank(files, engine, dtype, num_blocks, buffer, weights=weights).runner()
    each = replace(engine, num_threads=max(1, (engine.num_threads or torch.get_num_threads()) // size))
    ranks = Ranks(Job(files, each, dtype, num_blocks, Shard(0, size)), kv_bytes)
    try:
        rank = load_rank(files, each, dtype, num_blocks, ranks.kv_memory, Shard(0, size), ranks.exchange)
        ranks.loaded()
        return rank.runner(ranks)
    except BaseException as error:
        ranks.close()
        if isinstance(error, RunnerLost):
            raise ConfigError(
                f"the ranks of the model cannot begin: {error}", field="engine.tensor_parallel_size"
            ) from error
        raise


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank with its weights and its view of the KV cache, before its first step."""

    model: Llama
    kv_cache: TorchKVCache
    attention: FixedAttention | None

    def runner(self, ranks: Ranks | None = None) -> TorchRunner:
        """A deterministic model computes a first step here, with all its ranks."""
        return TorchRunner(self.model, self.kv_cache, self.attention, ranks)


def load_rank(
    files: ModelFiles,
    engine: EngineConfig,
    dtype: str,
    num_blocks: int,
    buffer: memoryview | None,
    shard: Shard = ALONE,
    exchange: Exchange | None = None,
    weights: dict[str, Tensor] | None = None,
) -> LoadedRank:
    """Load this rank's share of the weights, unless they are there, and lay the whole KV cache into `buffer`."""
    if engine.num_threads:
        torch.set_num_threads(engine.num_threads)
    architecture = ARCHITECTURES[files.spec.architecture]
    if weights is None:
        weights = load_weights(files, architecture.tensor_shapes(files.spec), TORCH_DTYPES[dtype], shard)
    model = architecture(files.spec, weights, shard, exchange or NoExchange())
    attention = make_deterministic(model, engine.block_size) if engine.deterministic else None
    layout = files.spec.kv_layout(engine.kv_dtype(dtype), engine.block_size)
    return LoadedRank(model, TorchKVCache(layout, num_blocks, buffer, shard), attention)


def loading_bytes(spec: ModelSpec, dtype: str, num_ranks: int = 1) -> int:
    """Of the weights in all ranks, and of what laying them out takes beside them for a moment."""
    element_bytes = DTYPE_BYTES[dtype]
    shapes = ARCHITECTURES[spec.architecture].tensor_shapes(spec)
    weight_bytes = sum(place.nbytes for place in weight_manifest(shapes, dtype, spec.is_int8).places)
    if spec.tie_embeddings:  # a packed head of its own; see models/linear.py
        weight_bytes += element_bytes * spec.vocab_size * spec.hidden_size
    weight_bytes += more_bytes(spec, num_ranks, element_bytes)
    # For a moment, in each rank: one matrix in fp32 as it is read, put in order and, for int8, divided by its scales; gate and up
    # once more, fused, take no more than that. A rank reads each tensor whole before it takes its part.
    widest = max(math.prod(shape) for name, shape in shapes.items() if is_projection(name) or num_ranks > 1)
    return weight_bytes + num_ranks * widest * (3 if spec.is_int8 else 2) * DTYPE_BYTES["float32"]


def _check_memory(weight_bytes: int, kv_bytes: int) -> None:
    """Refuse before the kernel kills: both must fit what is free now."""
    available_bytes = available_memory_bytes()
    if weight_bytes + kv_bytes > available_bytes:
        raise ConfigError(
            f"weights need {weight_bytes / _GIB:.2f} GiB and KV {kv_bytes / _GIB:.2f} GiB, but {available_bytes / _GIB:.2f} GiB "
            f"are free: lower engine.kv_memory_bytes or engine.num_blocks, or free memory",
            field="engine.kv_memory_bytes",
        )
