"""Some kv heads of a block pool, shown as a pool of whole blocks that have only these heads. For unequal tensor-parallel degrees.

A sender rank's slice and the receiver rank's slice of one `HeadMove` (head_plan.py) have the same layout, so that Sender and
Receiver of the pair need not know of heads. Copies nothing and owns nothing: the pool outlives it. What it reads and writes is
only its heads, so slices of one pool with different heads never touch each other's bytes, on whatever threads they work.

The heads of a slice are rows of the pool, not whole runs: `memory` is None, and a pair over slices moves in staged mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton import kv_copy
from baton.errors import ConfigError
from kv_transfer.block_store import BlockStore


class HeadSlice:
    """Heads `heads` of `store`, counted from 0 in the store's own layout. Satisfies BlockStore."""

    memory = None

    def __init__(self, store: BlockStore, heads: range) -> None:
        """
        Raises:
            ConfigError: the pool is not in host memory, where slices are cut.
        """
        if store.memory is None:
            raise ConfigError("the KV pool is not in host memory: its heads cannot be sliced", field="tp_size")
        assert heads, "a slice has heads"
        self._pool = store.layout, store.memory, store.num_blocks
        self._heads = heads
        self.layout = replace(store.layout, num_kv_heads=len(heads))
        self.num_blocks = store.num_blocks

    def gather(self, block_ids: Sequence[int], layer_start: int, num_layers: int, out: memoryview) -> int:
        """As BlockStore: copy the slice's part of blocks into `out`; returns its crc32c."""
        return kv_copy.gather(*self._pool, block_ids, layer_start, num_layers, out, self._heads)

    def scatter(self, block_ids: Sequence[int], layer_start: int, num_layers: int, data: memoryview) -> int:
        """The inverse of gather."""
        return kv_copy.scatter(*self._pool, block_ids, layer_start, num_layers, data, self._heads)

    def clear(self, block_ids: Sequence[int], layer_start: int, num_layers: int) -> None:
        """Zero the slice's part of blocks; other heads stay."""
        kv_copy.clear(*self._pool, block_ids, layer_start, num_layers, self._heads)
