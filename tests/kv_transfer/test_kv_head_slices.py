"""Slices of a pool by heads read and write what numpy's slices of the same array do, and together they are the whole."""

from __future__ import annotations

import itertools
import random

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.kv_layout import KVLayout
from kv_transfer.head_plan import plan_heads
from kv_transfer.head_slices import HeadSlice
from tests.kv_transfer.kv_ranks import POISON, RankPool, layout_of_rank, random_kv

NUM_BLOCKS = 8
LAYOUTS = st.builds(
    KVLayout,
    num_layers=st.integers(1, 4),
    num_kv_heads=st.integers(1, 8),
    head_dim=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3"]),
    block_size=st.sampled_from([1, 3, 16]),
    num_components=st.sampled_from([1, 2]),
)


@st.composite
def parts(draw: st.DrawFn) -> tuple[KVLayout, list[range], list[int], range]:
    """A layout, its heads cut into slices, blocks in any order, some layers."""
    layout = draw(LAYOUTS)
    cuts = sorted(draw(st.sets(st.integers(1, layout.num_kv_heads - 1)))) if layout.num_kv_heads > 1 else []
    edges = [0, *cuts, layout.num_kv_heads]
    slices = [range(start, stop) for start, stop in itertools.pairwise(edges)]
    blocks = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, min_size=1))
    layer = draw(st.integers(0, layout.num_layers - 1))
    return layout, slices, blocks, range(layer, draw(st.integers(layer + 1, layout.num_layers)))


def pool_with(layout: KVLayout, seed: int) -> RankPool:
    pool = RankPool(layout, NUM_BLOCKS)
    pool.kv[:] = random_kv(layout, NUM_BLOCKS, seed)
    return pool


@given(parts(), st.integers(0, 2**32), st.randoms())
def test_gathering_every_slice_and_scattering_them_in_any_order_copies_the_whole_and_nothing_else(
    case: tuple[KVLayout, list[range], list[int], range], seed: int, draw: random.Random
) -> None:
    layout, slices, blocks, layers = case
    source, target = pool_with(layout, seed), RankPool(layout, NUM_BLOCKS)
    places = list(reversed(blocks))
    draw.shuffle(slices)
    num_bytes = 0
    for heads in slices:
        out, into = HeadSlice(source, heads), HeadSlice(target, heads)
        data = bytearray(len(layers) * len(blocks) * out.layout.layer_block_bytes)
        num_bytes += len(data)
        crc = out.gather(blocks, layers.start, len(layers), memoryview(data))
        assert (
            crc == google_crc32c.value(bytes(data)) == into.scatter(places, layers.start, len(layers), memoryview(data))
        )
    window = slice(layers.start, layers.stop)
    assert num_bytes == source.kv[window, :, blocks].nbytes
    expected = np.full_like(target.kv, POISON)
    expected[window, :, places] = source.kv[window, :, blocks]
    assert np.array_equal(target.kv, expected)


@given(parts(), st.integers(0, 2**32))
def test_a_slice_gathers_in_wire_order_what_numpy_slices(
    case: tuple[KVLayout, list[range], list[int], range], seed: int
) -> None:
    layout, (heads, *_), blocks, layers = case
    pool = pool_with(layout, seed)
    view = HeadSlice(pool, heads)
    data = bytearray(len(layers) * len(blocks) * view.layout.layer_block_bytes)
    view.gather(blocks, layers.start, len(layers), memoryview(data))
    expected = pool.kv[layers.start : layers.stop][:, :, blocks][..., heads.start : heads.stop, :]
    assert bytes(data) == expected.tobytes()


@given(parts(), st.integers(0, 2**32))
def test_clearing_a_slice_zeroes_its_heads_and_leaves_those_that_came_from_other_ranks(
    case: tuple[KVLayout, list[range], list[int], range], seed: int
) -> None:
    layout, slices, blocks, layers = case
    pool = pool_with(layout, seed)
    expected = pool.kv.copy()
    heads = slices[-1]
    HeadSlice(pool, heads).clear(blocks, layers.start, len(layers))
    for layer in layers:
        expected[layer, :, blocks, :, heads.start : heads.stop] = 0
    assert np.array_equal(pool.kv, expected)


@pytest.mark.parametrize(("sender_tp_size", "receiver_tp_size"), [(1, 2), (2, 3), (6, 2), (12, 3)])
def test_both_ends_of_a_move_show_the_same_layout_and_offer_no_direct_mode(
    sender_tp_size: int, receiver_tp_size: int
) -> None:
    model = KVLayout(num_layers=2, num_kv_heads=6, head_dim=4, dtype="bfloat16")
    for move in plan_heads(model.num_kv_heads, sender_tp_size, receiver_tp_size):
        sender = RankPool(layout_of_rank(model, sender_tp_size, move.sender_rank), 4)
        receiver = RankPool(layout_of_rank(model, receiver_tp_size, move.receiver_rank), 9)
        ends = HeadSlice(sender, move.sender_heads), HeadSlice(receiver, move.receiver_heads)
        assert ends[0].layout == ends[1].layout
        assert [end.num_blocks for end in ends] == [4, 9]
        assert [end.memory for end in ends] == [None, None]


def test_what_is_not_in_host_memory_is_refused() -> None:
    view = HeadSlice(RankPool(KVLayout(num_layers=1, num_kv_heads=4, head_dim=4, dtype="float32"), 2), range(1, 3))
    with pytest.raises(ConfigError, match="not in host memory"):
        HeadSlice(view, range(1))
