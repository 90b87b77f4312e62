"""A pool of wide KV shown as one of float8_e4m3, for a receiver that keeps 8 bits. The other views are in head_slices.py.

Conversion happens while blocks are gathered: half or a quarter of the bytes go over the wire, and the receiver's pool takes
them as they are, each head vector followed by its scale (baton/kv_fp8.py). The crc is that of the 8-bit bytes, so what is
verified is what is served from. Nothing comes back this way: bits that were dropped cannot be sent.

Runs on the KV thread. Loads torch at the first conversion, never at import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from baton.kv_copy import crc32c
from baton.kv_layout import DTYPE_BYTES, KVLayout, wire_dtype
from kv_transfer.block_store import BlockStore
from kv_transfer.pair import WireView


def wire_views(store: BlockStore) -> Mapping[str, WireView]:
    """How `store` goes to peers that keep KV in another dtype, by that dtype. They send nothing that it could take."""
    return {
        dtype: WireView(send=Fp8Export(store), receive=store)
        for dtype in DTYPE_BYTES
        if dtype != store.layout.dtype and wire_dtype(store.layout.dtype, dtype)
    }


class Fp8Export:
    """A float32, bfloat16 or float16 store as a float8_e4m3 one, to send from. Satisfies BlockStore, but takes nothing.

    Ownership: borrows `store`; owns one buffer of a layer's blocks, as large as the largest frame needs.
    """

    memory = None  # what a peer may read in place is not what it must get

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._wide = bytearray()
        self.layout = replace(store.layout, dtype="float8_e4m3")
        self.num_blocks = store.num_blocks

    def gather(self, block_ids: Sequence[int], layer_start: int, num_layers: int, out: memoryview) -> int:
        """Convert blocks into `out` in wire order; returns their crc32c. Layer by layer: that stays in a near cache."""
        nbytes = self.layout.layer_block_bytes * len(block_ids)
        assert out.nbytes == num_layers * nbytes, "the buffer does not fit"
        for i in range(num_layers):
            self._convert(block_ids, layer_start + i, out[i * nbytes : (i + 1) * nbytes])
        return crc32c(out)

    def scatter(self, block_ids: Sequence[int], layer_start: int, num_layers: int, data: memoryview) -> int:
        raise AssertionError("a pool of wide KV takes no 8-bit blocks")

    def clear(self, block_ids: Sequence[int], layer_start: int, num_layers: int) -> None:
        raise AssertionError("an export is never written")

    def _convert(self, block_ids: Sequence[int], layer: int, out: memoryview) -> None:
        import torch  # a worker has loaded it long before; whatever else imports this package has not

        from baton.kv_fp8 import quantise

        wide: KVLayout = self._store.layout
        nbytes = wide.layer_block_bytes * len(block_ids)
        if nbytes > len(self._wide):
            self._wide = bytearray(nbytes)
        buffer = memoryview(self._wide)[:nbytes]
        self._store.gather(block_ids, layer, 1, buffer)
        vectors = torch.frombuffer(buffer, dtype=getattr(torch, wide.dtype)).view(-1, wide.head_dim)
        torch.frombuffer(out, dtype=torch.uint8).view(-1, self.layout.head_bytes).copy_(quantise(vectors))
