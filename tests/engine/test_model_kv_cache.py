"""TorchKVCache: wire order, round trips, and copies that run beside each other."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from google_crc32c import value as crc32c

from baton.kv_layout import KVLayout
from engine.torch_kv_cache import TORCH_DTYPES, TorchKVCache

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", block_size=8)


def random_cache(layout: KVLayout = LAYOUT, num_blocks: int = 10) -> TorchKVCache:
    cache = TorchKVCache(layout, num_blocks)
    cache.blocks.copy_(torch.randn(cache.blocks.shape))
    return cache


def wire_buffer(layout: KVLayout, num_layers: int, num_blocks: int) -> memoryview:
    return memoryview(bytearray(num_layers * layout.layer_block_bytes * num_blocks))


def test_gather_writes_layer_component_block_slot_head_dim_in_this_order() -> None:
    cache, ids = random_cache(), [7, 0, 3]
    out = wire_buffer(LAYOUT, 2, len(ids))
    cache.gather(ids, 1, 2, out)
    expected = b"".join(
        cache.blocks[layer, component, block].numpy().tobytes()
        for layer in (1, 2)
        for component in (0, 1)
        for block in ids
    )
    assert bytes(out) == expected


@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
def test_scatter_is_the_inverse_of_gather_and_touches_no_other_block(dtype: str) -> None:
    layout = KVLayout(3, 2, 4, dtype, 8)
    source, target = random_cache(layout), TorchKVCache(layout, 20)
    out = wire_buffer(layout, 3, 3)
    source.gather([7, 0, 3], 0, 3, out)
    target.scatter([19, 2, 4], 0, 3, out)
    assert torch.equal(target.blocks[:, :, [19, 2, 4]], source.blocks[:, :, [7, 0, 3]])
    others = [b for b in range(20) if b not in (19, 2, 4)]
    assert not target.blocks[:, :, others].any()


def test_layers_move_one_by_one_too() -> None:
    source, target = random_cache(), TorchKVCache(LAYOUT, 10)
    for layer in range(LAYOUT.num_layers):
        out = wire_buffer(LAYOUT, 1, 2)
        source.gather([5, 6], layer, 1, out)
        target.scatter([5, 6], layer, 1, out)
    assert torch.equal(target.blocks[:, :, 5:7], source.blocks[:, :, 5:7])


def test_a_read_only_buffer_and_a_slice_of_a_ring_are_accepted() -> None:
    source, target = random_cache(), TorchKVCache(LAYOUT, 10)
    nbytes = 3 * LAYOUT.layer_block_bytes
    ring = memoryview(bytearray(64 + nbytes))
    source.gather([4], 0, 3, ring[64:])
    target.scatter([1], 0, 3, memoryview(bytes(ring[64:])))
    assert torch.equal(target.blocks[:, :, 1], source.blocks[:, :, 4])


def test_a_buffer_of_the_wrong_size_or_a_block_out_of_range_moves_nothing() -> None:
    cache = random_cache()
    with pytest.raises(ValueError, match="out has"):
        cache.gather([1], 0, 3, wire_buffer(LAYOUT, 3, 2))
    with pytest.raises(ValueError, match="layer_start"):
        cache.gather([1], 2, 2, wire_buffer(LAYOUT, 2, 1))
    before = cache.blocks.clone()
    with pytest.raises(ValueError, match="block_ids"):
        cache.scatter([10], 0, 3, wire_buffer(LAYOUT, 3, 1))
    assert torch.equal(cache.blocks, before)


def test_no_blocks_are_no_bytes() -> None:
    cache = random_cache()
    before = cache.blocks.clone()
    cache.gather([], 0, 3, memoryview(bytearray()))
    cache.scatter([], 0, 3, memoryview(bytearray()))
    assert torch.equal(cache.blocks, before)


def test_threads_may_move_disjoint_blocks_at_once() -> None:
    source, target = random_cache(num_blocks=64), TorchKVCache(LAYOUT, 64)
    ids = random.Random(3).sample(range(64), 64)

    def move(mine: list[int]) -> None:
        out = wire_buffer(LAYOUT, 3, len(mine))
        for _ in range(50):
            source.gather(mine, 0, 3, out)
            target.scatter(mine, 0, 3, out)

    threads = [threading.Thread(target=move, args=(ids[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert torch.equal(target.blocks, source.blocks)


@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
def test_a_pool_may_live_in_memory_of_others_and_starts_as_zeros(dtype: str) -> None:
    layout = KVLayout(3, 2, 4, dtype, 8)
    buffer = bytearray(b"\xff" * (10 * layout.block_bytes))
    cache = TorchKVCache(layout, 10, memoryview(buffer))
    assert not any(buffer)
    cache.blocks[1, 0, 7].fill_(1.0)
    out = wire_buffer(layout, 3, 1)
    cache.gather([7], 0, 3, out)
    run = layout.run_bytes
    start = (1 * 2 * 10 + 7) * run
    assert buffer[start : start + run] == cache.blocks[1, 0, 7].view(torch.uint8).numpy().tobytes()
    assert out[2 * run : 3 * run] == buffer[start : start + run]


def test_gather_and_scatter_return_the_crc32c_of_the_wire_and_clear_writes_zeros() -> None:
    source, target = random_cache(), random_cache()
    out = wire_buffer(LAYOUT, 2, 2)
    assert source.gather([5, 6], 1, 2, out) == crc32c(bytes(out)) == target.scatter([2, 9], 1, 2, out)
    before = target.blocks.clone()
    target.clear([9], 1, 1)
    assert not target.blocks[1, :, 9].any()
    before[1, :, 9] = 0
    assert torch.equal(target.blocks, before)
