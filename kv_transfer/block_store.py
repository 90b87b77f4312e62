"""The tensors that KV is read from and written to, as this package sees them: bytes in wire order.

`engine.ports.KVCache` satisfies this Protocol; kv_transfer does not import engine. Called on the KV thread only, for blocks
that a transfer owns exclusively.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.kv_layout import KVLayout


class BlockStore(Protocol):
    layout: KVLayout
    num_blocks: int

    def gather(self, block_ids: Sequence[int], layer_start: int, num_layers: int, out: memoryview) -> None:
        """Copy blocks into `out` in wire order [layer][component][block][S][K][D]; len(out) is exact."""
        ...

    def scatter(self, block_ids: Sequence[int], layer_start: int, num_layers: int, data: memoryview) -> None:
        """The inverse of gather."""
        ...
