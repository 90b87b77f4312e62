"""Plain bytes as blocks: what is not KV, but is to move like it. A page is a block of one layer, in the order of the bytes.

A lender shows bytes that it makes when they are asked for (`PageSource`); a borrower takes them into memory that holds them all
(`PageBuffer`). Between the two lies an ordinary pair, so tickets, checksums, re-sends and time limits are those of KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton import kv_copy
from baton.kv_copy import KVMemory, crc32c
from baton.kv_layout import KVLayout
from kv_transfer.frame import HEADER_BYTES

MAX_PAGE_BYTES = 1 << 20  # a usual frame holds four; the tables of a transfer of 100 GB then have 100,000 rows


def page_layout(frame_bytes: int) -> KVLayout:
    """Of pages that fit a frame: the largest power of two. Its dtype is a name for four bytes, nothing more."""
    page_bytes = 1 << (min(MAX_PAGE_BYTES, frame_bytes - HEADER_BYTES).bit_length() - 1)
    return KVLayout(
        num_layers=1, num_kv_heads=1, head_dim=page_bytes // 4, dtype="float32", block_size=1, num_components=1
    )


def num_pages(layout: KVLayout, nbytes: int) -> int:
    """Pages that hold `nbytes`, the last one perhaps in part."""
    return -(-nbytes // layout.block_bytes)


class PageSource:
    """Bytes to send from, page by page. Satisfies BlockStore, but takes nothing; peers cannot read it in place."""

    memory = None

    def __init__(self, layout: KVLayout, nbytes: int, read: Callable[[int, memoryview], None]) -> None:
        """`read(offset, out)` fills `out` on the KV thread; beyond the last byte with zeros."""
        self.layout = layout
        self.num_blocks = num_pages(layout, nbytes)
        self._read = read

    def gather(self, block_ids: Sequence[int], layer_start: int, num_layers: int, out: memoryview) -> int:
        page_bytes = self.layout.block_bytes
        assert out.nbytes == len(block_ids) * page_bytes, "the buffer does not fit"
        for i, page in enumerate(block_ids):
            self._read(page * page_bytes, out[i * page_bytes : (i + 1) * page_bytes])
        return crc32c(out)

    def scatter(self, block_ids: Sequence[int], layer_start: int, num_layers: int, data: memoryview) -> int:
        raise AssertionError("what is lent is never written")

    def clear(self, block_ids: Sequence[int], layer_start: int, num_layers: int) -> None:
        raise AssertionError("what is lent is never written")


class PageBuffer:
    """Memory that pages are received into. Satisfies BlockStore. Ownership: the caller's, for as long as a plane uses this."""

    def __init__(self, layout: KVLayout, address: int, nbytes: int) -> None:
        """`nbytes`: a whole number of pages."""
        assert nbytes % layout.block_bytes == 0, "not a whole number of pages"
        self.layout = layout
        self.num_blocks = nbytes // layout.block_bytes
        self.memory = KVMemory.dense(address, layout, self.num_blocks)

    def gather(self, block_ids: Sequence[int], layer_start: int, num_layers: int, out: memoryview) -> int:
        return kv_copy.gather(self.layout, self.memory, self.num_blocks, block_ids, layer_start, num_layers, out)

    def scatter(self, block_ids: Sequence[int], layer_start: int, num_layers: int, data: memoryview) -> int:
        return kv_copy.scatter(self.layout, self.memory, self.num_blocks, block_ids, layer_start, num_layers, data)

    def clear(self, block_ids: Sequence[int], layer_start: int, num_layers: int) -> None:
        kv_copy.clear(self.layout, self.memory, self.num_blocks, block_ids, layer_start, num_layers)
