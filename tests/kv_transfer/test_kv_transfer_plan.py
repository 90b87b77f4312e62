"""Plans cover every (block, layer) exactly once, whatever the sizes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.kv_layout import KVLayout
from kv_transfer.frame import HEADER_BYTES
from kv_transfer.transfer_plan import FramePlan, check_frame_bytes, plan_frames

LAYOUTS = st.builds(
    KVLayout,
    num_layers=st.integers(1, 40),
    num_kv_heads=st.integers(1, 8),
    head_dim=st.sampled_from([16, 64, 128]),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3"]),
    block_size=st.sampled_from([1, 16, 64]),
)


@given(LAYOUTS, st.integers(0, 300_000), st.lists(st.integers(0, 40), max_size=5), st.integers(0, 10))
def test_each_byte_is_in_exactly_one_frame_over_any_cut_into_chunks(
    layout: KVLayout, room_bytes: int, chunks: list[int], first_block: int
) -> None:
    frame_bytes = HEADER_BYTES + layout.layer_block_bytes + room_bytes
    covered: Counter[tuple[int, int]] = Counter()
    frames: list[FramePlan] = []
    start = first_block
    for num_blocks in chunks:
        frames += plan_frames(layout, frame_bytes, start, start + num_blocks, len(frames))
        start += num_blocks
    for frame in frames:
        assert HEADER_BYTES + frame.nbytes(layout) <= frame_bytes
        for block in range(frame.block_start, frame.block_start + frame.num_blocks):
            for layer in range(frame.layer_start, frame.layer_start + frame.num_layers):
                covered[block, layer] += 1
    assert covered == Counter({(b, n): 1 for b in range(first_block, start) for n in range(layout.num_layers)})
    assert [frame.index for frame in frames] == list(range(len(frames)))
    assert sum(frame.nbytes(layout) for frame in frames) == (start - first_block) * layout.block_bytes


def test_a_block_larger_than_a_frame_is_cut_between_layers() -> None:
    layout = KVLayout(num_layers=5, num_kv_heads=1, head_dim=16, dtype="float32")
    frames = plan_frames(layout, HEADER_BYTES + 2 * layout.layer_block_bytes, 3, 5, 0)
    assert [(f.block_start, f.num_blocks, f.layer_start, f.num_layers) for f in frames] == [
        (3, 1, 0, 2), (3, 1, 2, 2), (3, 1, 4, 1), (4, 1, 0, 2), (4, 1, 2, 2), (4, 1, 4, 1),
    ]  # fmt: skip


def test_a_frame_too_small_for_one_layer_of_one_block_is_refused_with_the_size_it_needs() -> None:
    layout = KVLayout(num_layers=5, num_kv_heads=1, head_dim=16, dtype="float32")
    least = HEADER_BYTES + layout.layer_block_bytes
    check_frame_bytes(layout, least)
    with pytest.raises(ConfigError, match=f"at least {least}") as refused:
        check_frame_bytes(layout, least - 1)
    assert refused.value.field == "kv.frame_bytes"
