"""The tensors that KV is read from and written to, as this package sees them: bytes in wire order.

`engine.ports.KVCache` satisfies this Protocol; kv_transfer does not import engine. Called on the KV thread only, for blocks
that a transfer owns exclusively.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.kv_copy import KVMemory
from baton.kv_layout import KVLayout


class BlockStore(Protocol):
    layout: KVLayout
    num_blocks: int

    @property
    def memory(self) -> KVMemory | None:
        """Where the pool lies in host memory, None where it does not."""
        ...

    def gather(self, block_ids: Sequence[int], layer_start: int, num_layers: int, out: memoryview) -> int:
        """Copy blocks into `out` in wire order (baton/kv_layout.py), len(out) is exact; returns the crc32c of these bytes."""
        ...

    def scatter(self, block_ids: Sequence[int], layer_start: int, num_layers: int, data: memoryview) -> int:
        """The inverse of gather; returns the crc32c of `data` as it reached the blocks."""
        ...

    def clear(self, block_ids: Sequence[int], layer_start: int, num_layers: int) -> None:
        """Write zeros."""
        ...
