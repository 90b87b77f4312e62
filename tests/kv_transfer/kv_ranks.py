"""Tensor-parallel ranks for tests: a pool of each rank's heads, and what a reference re-slice puts into it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from baton.kv_layout import KVLayout
from kv_transfer.head_plan import heads_of_rank
from tests.kv_transfer.kv_fakes import ByteStore

Bytes = NDArray[np.uint8]
POISON = 0xEE  # what memory holds that nobody wrote


class RankPool(ByteStore):
    """One rank's blocks, all poison. `kv` is its memory as [L][component][N][S][K][head_bytes]."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks)
        self.data[:] = POISON
        self.kv: Bytes = self.data.reshape(kv_shape(layout, num_blocks))


def kv_shape(layout: KVLayout, num_blocks: int) -> tuple[int, int, int, int, int, int]:
    return (
        layout.num_layers, layout.num_components, num_blocks, layout.block_size, layout.num_kv_heads, layout.head_bytes
    )  # fmt: skip


def random_kv(layout: KVLayout, num_blocks: int, seed: int) -> Bytes:
    """What a prompt of `num_blocks` blocks has, every head of it."""
    return np.random.default_rng(seed).integers(0, 256, size=kv_shape(layout, num_blocks), dtype=np.uint8)


def layout_of_rank(model: KVLayout, tp_size: int, rank: int) -> KVLayout:
    return replace(model, num_kv_heads=len(heads_of_rank(model.num_kv_heads, tp_size, rank)))


def kv_of_rank(kv: Bytes, tp_size: int, rank: int) -> Bytes:
    """The part of `kv`, which has every head of the model, that a rank holds."""
    heads = heads_of_rank(kv.shape[4], tp_size, rank)
    return kv[:, :, :, :, heads.start : heads.stop]
