"""The tensors of a block pool, and the copies between them and the wire.

One tensor [L, 2, N, S, K, E] in host memory, own or lent by whoever moves KV; E = D numbers, or D + 4 bytes of float8_e4m3.
For a layer and a component, block b is one contiguous run of bytes, which baton/kv_copy.py copies. gather, scatter and clear
may run on the KV thread while the engine thread computes, for blocks that only the caller owns; they take no lock.
What a slot holds that no token has filled never matters (engine/models/attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton import kv_copy
from baton.kv_copy import KVMemory
from baton.kv_layout import KVLayout
from engine.tensor_parallel.shard import ALONE, Shard

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_TORCH_DTYPES = TORCH_DTYPES | {"float8_e4m3": torch.uint8}  # values and scales as bytes: baton/kv_fp8.py


class TorchKVCache:
    """KV of all blocks of one engine."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, buffer: memoryview | None = None, shard: Shard = ALONE
    ) -> None:
        """Lay the pool into `buffer`, of num_blocks * block_bytes and kept alive, or into memory of our own.

        `shard`: whose KV heads are computed here; the pool is that of all.

        Every page is touched: the first write to fresh memory is 30 times slower (DESIGN section 6).
        """
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (layout.num_layers, layout.num_components, num_blocks)
        dtype = KV_TORCH_DTYPES[layout.dtype]
        block = (layout.block_size, layout.num_kv_heads, layout.head_bytes // dtype.itemsize)
        flat = torch.empty(shape + block, dtype=dtype) if buffer is None else torch.frombuffer(buffer, dtype=dtype)
        self.blocks = flat.view(shape + block).zero_()  # [L, 2, N, S, K, E]
        num_heads = layout.num_kv_heads // shard.size
        self.mine = self.blocks.narrow(4, shard.rank * num_heads, num_heads)  # [L, 2, N, S, K / T, E]
        self.memory = KVMemory.dense(self.blocks.data_ptr(), layout, num_blocks)

    def gather(self, block_ids: Sequence[int], layer_start: int, num_layers: int, out: memoryview) -> int:
        return kv_copy.gather(self.layout, self.memory, self.num_blocks, block_ids, layer_start, num_layers, out)

    def scatter(self, block_ids: Sequence[int], layer_start: int, num_layers: int, data: memoryview) -> int:
        return kv_copy.scatter(self.layout, self.memory, self.num_blocks, block_ids, layer_start, num_layers, data)

    def clear(self, block_ids: Sequence[int], layer_start: int, num_layers: int) -> None:
        kv_copy.clear(self.layout, self.memory, self.num_blocks, block_ids, layer_start, num_layers)
