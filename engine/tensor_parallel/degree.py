"""Which degrees a model can have, and what they cost in memory. Pure, and without torch: who starts workers asks, too."""

from __future__ import annotations

from baton.errors import ConfigError
from baton.model_spec import ModelSpec

# Of a rank's process beside its weights and the KV cache: Python and torch, unique set size after a step of a tiny model;
# 156 to 160 MiB in n = 6 ranks on x86-64 Linux, 3 dtypes.
RANK_BYTES = 160 << 20


def check_shards(spec: ModelSpec, size: int) -> None:
    """Raises: ConfigError where the model cannot be cut into `size` equal parts."""
    for name, count in (("KV heads", spec.num_kv_heads), ("heads", spec.num_heads), ("ffn_size", spec.ffn_size)):
        if count % size:
            fitting = [
                n
                for n in range(1, spec.num_kv_heads + 1)
                if not (spec.num_kv_heads % n or spec.num_heads % n or spec.ffn_size % n)
            ]
            raise ConfigError(
                f"engine.tensor_parallel_size = {size} does not divide {name} = {count} of {spec.name}:"
                f" use {', '.join(map(str, fitting))}",
                field="engine.tensor_parallel_size",
            )


def more_bytes(spec: ModelSpec, size: int, element_bytes: int) -> int:
    """What `size` ranks take beyond a model in one process: processes of their own, and embeddings, which are whole on each."""
    return (size - 1) * (RANK_BYTES + spec.vocab_size * spec.hidden_size * element_bytes)
