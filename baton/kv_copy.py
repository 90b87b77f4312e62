"""Moves KV blocks between a pool in host memory and wire buffers or another pool, and says the crc32c of what it moved.

A run is the bytes of one (layer, component, block): [S][K][head_bytes], contiguous in a pool. The wire has runs one after the
other, [layer][component][block], and the crc32c (RFC 3720) is always that of the bytes in wire order, which for `copy_blocks`
is the same on both sides. With `heads` only these KV heads of every token move: rows of the pool, dense on the wire.

The crc is that of what reached the destination, even while somebody else writes the source: such a copy fails its crc.
Source and destination may not overlap. Every argument is checked before a byte moves; ids may come from a peer. Memory itself
is the caller's: it must stay mapped during the call. Any thread; the GIL is released while bytes move.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baton import _kv_copy
from baton.kv_layout import KVLayout

TIERS = _kv_copy.TIERS
_FASTEST = -1
_MAX_BYTES = 1 << 47  # user addresses on x86-64 and arm64; sums of such numbers stay far below 2^63

_Side: TypeAlias = tuple[str, memoryview, int, int, int, int, int, str, memoryview | None, int]


@dataclass(frozen=True, slots=True)
class KVMemory:
    """Where a pool lies: run (layer, component, block) is at address + layer * layer_stride + component * component_stride
    + block * run_bytes. All in bytes."""

    address: int
    nbytes: int
    layer_stride: int
    component_stride: int

    def __post_init__(self) -> None:
        for name in ("address", "nbytes", "layer_stride", "component_stride"):
            if getattr(self, name) not in range(_MAX_BYTES):
                raise ValueError(f"{name} = {getattr(self, name)} is not in [0, {_MAX_BYTES})")

    @classmethod
    def dense(cls, address: int, layout: KVLayout, num_blocks: int) -> KVMemory:
        """A pool [L][component][N] without gaps."""
        component_stride = num_blocks * layout.run_bytes
        layer_stride = layout.num_components * component_stride
        return cls(address, layout.num_layers * layer_stride, layer_stride, component_stride)

    def view(self) -> memoryview:
        return memoryview((ctypes.c_char * self.nbytes).from_address(self.address))


def gather(
    layout: KVLayout,
    memory: KVMemory,
    num_blocks: int,
    block_ids: Sequence[int],
    layer_start: int,
    num_layers: int,
    out: memoryview,
    heads: range | None = None,
) -> int:
    """Copy blocks of a pool into `out`, whose length is exact. Raises: ValueError naming the argument."""
    part = _Part(layout, layer_start, num_layers, len(block_ids), heads)
    part.check_buffer("out", out)
    if out.readonly:
        raise ValueError("out is read-only")
    pool = part.pool("memory", memory, num_blocks, "block_ids", block_ids)
    return part.move(pool, part.wire("out", out), stream=False)


def scatter(
    layout: KVLayout,
    memory: KVMemory,
    num_blocks: int,
    block_ids: Sequence[int],
    layer_start: int,
    num_layers: int,
    data: memoryview,
    heads: range | None = None,
) -> int:
    """Copy `data`, whose length is exact, into blocks of a pool. Raises: ValueError naming the argument."""
    part = _Part(layout, layer_start, num_layers, len(block_ids), heads)
    part.check_buffer("data", data)
    pool = part.pool("memory", memory, num_blocks, "block_ids", block_ids)
    return part.move(part.wire("data", data), pool)


def copy_blocks(
    layout: KVLayout,
    src_memory: KVMemory,
    src_num_blocks: int,
    src_ids: Sequence[int],
    dst_memory: KVMemory,
    dst_num_blocks: int,
    dst_ids: Sequence[int],
    layer_start: int,
    num_layers: int,
) -> int:
    """Copy blocks of one pool into another of the same layout. Raises: ValueError naming the argument."""
    if len(src_ids) != len(dst_ids):
        raise ValueError(f"src_ids and dst_ids differ in length: {len(src_ids)} and {len(dst_ids)}")
    part = _Part(layout, layer_start, num_layers, len(src_ids), None)
    src = part.pool("src_memory", src_memory, src_num_blocks, "src_ids", src_ids)
    return part.move(src, part.pool("dst_memory", dst_memory, dst_num_blocks, "dst_ids", dst_ids))


def checksum(
    layout: KVLayout,
    memory: KVMemory,
    num_blocks: int,
    block_ids: Sequence[int],
    layer_start: int,
    num_layers: int,
    heads: range | None = None,
) -> int:
    """The crc32c that `gather` would return, without a copy. Raises: ValueError naming the argument."""
    part = _Part(layout, layer_start, num_layers, len(block_ids), heads)
    return part.move(part.pool("memory", memory, num_blocks, "block_ids", block_ids), None)


def clear(
    layout: KVLayout,
    memory: KVMemory,
    num_blocks: int,
    block_ids: Sequence[int],
    layer_start: int,
    num_layers: int,
    heads: range | None = None,
) -> None:
    """Write zeros into blocks of a pool. Raises: ValueError naming the argument."""
    part = _Part(layout, layer_start, num_layers, len(block_ids), heads)
    part.move(None, part.pool("memory", memory, num_blocks, "block_ids", block_ids))


def crc32c(data: memoryview) -> int:
    """Of any contiguous bytes. Raises: BufferError if they are not."""
    return _kv_copy.crc32c(data)


class _Part:
    """What of every block moves: the layers, and the rows of a run. A row is what is contiguous on both sides."""

    def __init__(self, layout: KVLayout, layer_start: int, num_layers: int, num_runs: int, heads: range | None) -> None:
        if layer_start < 0 or num_layers < 0 or layer_start + num_layers > layout.num_layers:
            raise ValueError(
                f"layer_start = {layer_start}, num_layers = {num_layers} are not in {layout.num_layers} layers"
            )
        num_heads = layout.num_kv_heads
        heads = range(num_heads) if heads is None else heads
        if heads.step != 1 or heads.start < 0 or heads.stop > num_heads:
            raise ValueError(f"heads = {heads} is not a part of {num_heads} heads")
        self.layout = layout
        self.layer_start = layer_start
        self.first_head_byte = heads.start * layout.head_bytes
        row_bytes = len(heads) * layout.head_bytes
        self.run_bytes = layout.block_size * row_bytes  # what moves of one run
        whole = len(heads) == num_heads
        rows = (1, self.run_bytes) if whole else (layout.block_size, row_bytes)
        self.shape = (num_layers, layout.num_components, num_runs, *rows)
        self.nbytes = num_layers * layout.num_components * num_runs * self.run_bytes

    def check_buffer(self, name: str, buffer: memoryview) -> None:
        if not buffer.c_contiguous:
            raise ValueError(f"{name} is not contiguous")
        if buffer.nbytes != self.nbytes:
            raise ValueError(f"{name} has {buffer.nbytes} bytes, {self.nbytes} move")

    def pool(self, name: str, memory: KVMemory, num_blocks: int, ids_name: str, block_ids: Sequence[int]) -> _Side:
        layout, layer_stride = self.layout, memory.layer_stride
        first_byte = self.layer_start * layer_stride + self.first_head_byte
        row_stride = layout.num_kv_heads * layout.head_bytes
        ids = memoryview(_as_u32(ids_name, block_ids))
        return (
            name, memory.view(), first_byte, layer_stride, memory.component_stride, layout.run_bytes, row_stride,
            ids_name, ids, num_blocks,
        )  # fmt: skip

    def wire(self, name: str, buffer: memoryview) -> _Side:
        _, num_components, num_runs, _, row_bytes = self.shape
        component_stride = num_runs * self.run_bytes
        layer_stride = num_components * component_stride
        return (name, buffer, 0, layer_stride, component_stride, self.run_bytes, row_bytes, "", None, 0)

    def move(self, src: _Side | None, dst: _Side | None, *, stream: bool = True) -> int:
        """Copy. `stream` writes around the caches: right for a pool, wrong for a frame, which is read again at once."""
        if self.nbytes == 0:
            return 0  # the crc32c of nothing
        return _kv_copy.move(src, dst, self.shape, stream, _FASTEST)


def _as_u32(name: str, block_ids: Sequence[int]) -> array[int]:
    try:
        return array("I", block_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"{name}: not block ids: {error}") from error
