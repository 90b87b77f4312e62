"""The tensors of a block pool, and the copies between them and the wire.

One tensor [L, 2, N, S, K, D]: for a layer and a component, block b is one contiguous run of bytes, so that gather is an
index_select straight into the caller's buffer. gather and scatter may run on the KV thread while the engine thread computes,
for blocks that only the caller owns; they take no lock.
Slots that no token has filled are read and masked, so they must hold finite numbers; fresh ones are 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kv_layout import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class TorchKVCache:
    """KV of all blocks of one engine."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        """Allocate, and touch every page: the first write to fresh memory is 30 times slower (DESIGN section 6)."""
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (layout.num_layers, layout.num_components, num_blocks)
        block = (layout.block_size, layout.num_kv_heads, layout.head_dim)
        self.blocks = torch.empty(shape + block, dtype=TORCH_DTYPES[layout.dtype]).zero_()  # [L, 2, N, S, K, D]

    @torch.inference_mode()
    def gather(self, block_ids: Sequence[int], layer_start: int, num_layers: int, out: memoryview) -> None:
        """Copy blocks into `out` in wire order; see KVCache."""
        if not block_ids:
            return
        index, wire = self._wire(block_ids, layer_start, num_layers, out)
        for i in range(num_layers):
            for component in range(self.layout.num_components):
                torch.index_select(self.blocks[layer_start + i, component], 0, index, out=wire[i, component])

    @torch.inference_mode()
    def scatter(self, block_ids: Sequence[int], layer_start: int, num_layers: int, data: memoryview) -> None:
        """Copy wire bytes into blocks; a read-only buffer costs one copy more."""
        if not block_ids:
            return
        if data.readonly:
            data = memoryview(bytearray(data))
        index, wire = self._wire(block_ids, layer_start, num_layers, data)
        for i in range(num_layers):
            for component in range(self.layout.num_components):
                self.blocks[layer_start + i, component].index_copy_(0, index, wire[i, component])

    def _wire(
        self, block_ids: Sequence[int], layer_start: int, num_layers: int, buffer: memoryview
    ) -> tuple[Tensor, Tensor]:
        """View `buffer` as [layers, 2, blocks, S, K, D]; the block index is checked by torch."""
        layout = self.layout
        assert layer_start in range(layout.num_layers + 1 - num_layers), "no such layers"
        assert buffer.nbytes == num_layers * layout.layer_block_bytes * len(block_ids), "the buffer does not fit"
        shape = (num_layers, layout.num_components, len(block_ids), *self.blocks.shape[3:])
        index = torch.tensor(block_ids, dtype=torch.int64)
        return index, torch.frombuffer(buffer, dtype=self.blocks.dtype).view(shape)
