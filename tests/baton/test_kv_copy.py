"""The compiled copies: every byte where it belongs and none elsewhere, the crc of what arrived, and refusal of bad arguments."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from google_crc32c import value as crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import _kv_copy, kv_copy
from baton.kv_copy import TIERS, KVMemory
from baton.kv_layout import DTYPE_BYTES, KVLayout

Bytes = npt.NDArray[np.uint8]

LAYOUT = KVLayout(num_layers=3, num_kv_heads=4, head_dim=6, dtype="float16", block_size=8)
GUARD = 0xEE


def random_bytes(count: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def move_one_row(tier: int, source: Bytes, target: Bytes | None, stream: bool) -> int:
    """Copy a row as it lies at any address."""

    def side(row: Bytes) -> tuple[str, memoryview, int, int, int, int, int, str, None, int]:
        return ("row", row.data, 0, 0, 0, 0, 0, "", None, 0)

    return _kv_copy.move(
        side(source), None if target is None else side(target), (1, 1, 1, 1, source.size), stream, tier
    )


def check_one_row(tier: int, length: int, source_offset: int, target_offset: int, stream: bool) -> None:
    source = random_bytes(source_offset + length)[source_offset:]
    room = np.full(target_offset + length + 64, GUARD, np.uint8)
    target = room[target_offset : target_offset + length]
    expected = crc32c(source.tobytes())
    assert move_one_row(tier, source, target, stream) == expected
    assert move_one_row(tier, source, None, stream) == expected
    assert np.array_equal(target, source)
    assert (room[:target_offset] == GUARD).all()
    assert (room[target_offset + length :] == GUARD).all()


@pytest.mark.parametrize("tier", range(len(TIERS)), ids=TIERS)
def test_every_tier_copies_every_length_exactly_with_the_crc32c_of_rfc_3720(tier: int) -> None:
    for length in range(1, 700):
        check_one_row(tier, length, 0, 0, stream=False)
        check_one_row(tier, length, length % 7, length % 67, stream=True)


@settings(deadline=None)
@given(
    tier=st.sampled_from(range(len(TIERS))),
    length=st.integers(1, 20_000),
    source_offset=st.integers(0, 130),
    target_offset=st.integers(0, 130),
    stream=st.booleans(),
)
def test_every_tier_copies_exactly_at_every_alignment(
    tier: int, length: int, source_offset: int, target_offset: int, stream: bool
) -> None:
    check_one_row(tier, length, source_offset, target_offset, stream)


def test_the_tiers_end_with_the_fastest_and_begin_with_what_runs_everywhere() -> None:
    assert TIERS[0] == "portable"
    assert list(TIERS) == sorted(TIERS, key=["portable", "pclmul", "avx512"].index)


class Pool:
    """Blocks as bytes [L][component][N][S][K][head_bytes], in the middle of guard bytes."""

    def __init__(self, layout: KVLayout, num_blocks: int, seed: int | None = None) -> None:
        self.layout, self.num_blocks = layout, num_blocks
        nbytes = num_blocks * layout.block_bytes
        self.room = np.full(nbytes + 256, GUARD, np.uint8)
        self.bytes = self.room[128 : 128 + nbytes].reshape(
            layout.num_layers, layout.num_components, num_blocks, layout.block_size, layout.num_kv_heads,
            layout.head_bytes,
        )  # fmt: skip
        self.bytes[:] = 0 if seed is None else random_bytes(nbytes, seed).reshape(self.bytes.shape)
        self.memory = KVMemory.dense(self.bytes.ctypes.data, layout, num_blocks)

    def part(self, ids: list[int], layer_start: int, num_layers: int, heads: range | None) -> Bytes:
        layers = self.bytes[layer_start : layer_start + num_layers, :, ids]
        return layers if heads is None else layers[:, :, :, :, heads.start : heads.stop]

    def guarded(self) -> bool:
        return bool((self.room[:128] == GUARD).all() and (self.room[-128:] == GUARD).all())


layouts = st.builds(
    KVLayout,
    num_layers=st.integers(1, 3),
    num_kv_heads=st.integers(1, 5),
    head_dim=st.integers(1, 40),
    dtype=st.sampled_from(list(DTYPE_BYTES)),
    block_size=st.integers(1, 17),
    num_components=st.integers(1, 2),
)


@st.composite
def pool_parts(draw: st.DrawFn) -> tuple[KVLayout, list[int], list[int], int, int, range | None]:
    """A layout, blocks of two pools of 9, layers and heads."""
    layout = draw(layouts)
    ids = draw(st.lists(st.integers(0, 8), unique=True, max_size=9))
    others = draw(st.permutations(range(9)))[: len(ids)]
    layer_start = draw(st.integers(0, layout.num_layers))
    num_layers = draw(st.integers(0, layout.num_layers - layer_start))
    first = draw(st.integers(0, layout.num_kv_heads))
    heads = draw(st.none() | st.builds(range, st.just(first), st.integers(first, layout.num_kv_heads)))
    return layout, ids, list(others), layer_start, num_layers, heads


@settings(deadline=None)
@given(pool_parts())
def test_gather_scatter_copy_checksum_and_clear_move_the_part_they_name_and_nothing_else(
    case: tuple[KVLayout, list[int], list[int], int, int, range | None],
) -> None:
    layout, ids, others, layer_start, num_layers, heads = case
    source = Pool(layout, 9, seed=1)
    wire = source.part(ids, layer_start, num_layers, heads).tobytes()

    out = memoryview(bytearray(len(wire)))
    assert kv_copy.gather(layout, source.memory, 9, ids, layer_start, num_layers, out, heads) == crc32c(wire)
    assert bytes(out) == wire
    assert kv_copy.checksum(layout, source.memory, 9, ids, layer_start, num_layers, heads) == crc32c(wire)

    target, expected = Pool(layout, 9, seed=2), Pool(layout, 9, seed=2)
    assert kv_copy.scatter(layout, target.memory, 9, others, layer_start, num_layers, out, heads) == crc32c(wire)
    layers = slice(layer_start, layer_start + num_layers)
    rows = slice(None) if heads is None else slice(heads.start, heads.stop)
    expected.bytes[layers, :, others, :, rows] = source.bytes[layers, :, ids, :, rows]
    assert np.array_equal(target.bytes, expected.bytes)

    kv_copy.clear(layout, target.memory, 9, others, layer_start, num_layers, heads)
    expected.bytes[layers, :, others, :, rows] = 0
    assert np.array_equal(target.bytes, expected.bytes)

    whole = source.part(ids, layer_start, num_layers, None)
    crc = kv_copy.copy_blocks(layout, source.memory, 9, ids, target.memory, 9, others, layer_start, num_layers)
    assert crc == crc32c(whole.tobytes())
    expected.bytes[layers, :, others] = source.bytes[layers, :, ids]
    assert np.array_equal(target.bytes, expected.bytes)
    assert source.guarded()
    assert target.guarded()


def test_pools_with_gaps_between_layers_and_components_are_followed_by_their_strides() -> None:
    inner = Pool(LAYOUT, 20, seed=3)  # a pool whose components hold 20 blocks, of which 5 are ours
    memory = inner.memory
    target = Pool(LAYOUT, 5)
    kv_copy.copy_blocks(LAYOUT, memory, 5, [4, 0], target.memory, 5, [1, 2], 0, 3)
    assert np.array_equal(target.bytes[:, :, [1, 2]], inner.bytes[:, :, [4, 0]])


def test_ids_may_be_any_sequence_of_integers() -> None:
    pool = Pool(LAYOUT, 9, seed=1)
    crcs = {
        kv_copy.checksum(LAYOUT, pool.memory, 9, ids, 0, 3)
        for ids in ([5, 2], (5, 2), array("I", [5, 2]), array("q", [5, 2]), memoryview(array("I", [5, 2])))
    }
    assert len(crcs) == 1


ALL_OF_ONE = 3 * LAYOUT.layer_block_bytes


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("block_ids", {"block_ids": [9]}),
        ("block_ids", {"block_ids": [-1]}),
        ("block_ids", {"block_ids": [2**32 - 1]}),
        ("block_ids", {"block_ids": [2**32]}),
        ("block_ids", {"block_ids": [2**80]}),
        ("block_ids", {"block_ids": [0.5]}),
        ("block_ids", {"num_blocks": 0}),
        ("block_ids", {"num_blocks": -3}),
        ("memory", {"num_blocks": 10}),
        ("memory", {"num_blocks": 2**62}),
        ("layer_start", {"layer_start": 1}),
        ("layer_start", {"layer_start": -1}),
        ("num_layers", {"num_layers": -1, "layer_start": 3}),
        ("num_layers", {"num_layers": 2**70}),
        ("heads", {"heads": range(5)}),
        ("heads", {"heads": range(-1, 3)}),
        ("heads", {"heads": range(0, 4, 2)}),
        ("heads", {"heads": range(3, 0, -1)}),
    ],
)
def test_a_bad_argument_is_named_and_moves_nothing(argument: str, change: dict[str, object]) -> None:
    pool = Pool(LAYOUT, 9, seed=1)
    before = pool.room.copy()
    usual = {"num_blocks": 9, "block_ids": [4], "layer_start": 0, "num_layers": 3, "heads": None}
    arguments = usual | change
    frame = memoryview(bytearray(ALL_OF_ONE))
    for call in (
        lambda **rest: kv_copy.gather(LAYOUT, pool.memory, out=frame, **rest),
        lambda **rest: kv_copy.scatter(LAYOUT, pool.memory, data=frame, **rest),
        lambda **rest: kv_copy.clear(LAYOUT, pool.memory, **rest),
    ):
        with pytest.raises(ValueError, match=argument):
            call(**arguments)
    assert np.array_equal(pool.room, before)
    assert not any(frame)


@pytest.mark.parametrize("nbytes", [0, ALL_OF_ONE - 1, ALL_OF_ONE + 1])
def test_a_buffer_of_another_length_is_refused(nbytes: int) -> None:
    pool = Pool(LAYOUT, 9)
    frame = memoryview(bytearray(nbytes))
    with pytest.raises(ValueError, match=f"out has {nbytes} bytes, {ALL_OF_ONE} move"):
        kv_copy.gather(LAYOUT, pool.memory, 9, [4], 0, 3, frame)
    with pytest.raises(ValueError, match=f"data has {nbytes} bytes, {ALL_OF_ONE} move"):
        kv_copy.scatter(LAYOUT, pool.memory, 9, [4], 0, 3, frame)


def test_a_buffer_that_cannot_be_written_or_has_gaps_is_refused() -> None:
    pool = Pool(LAYOUT, 9)
    with pytest.raises(ValueError, match="out is read-only"):
        kv_copy.gather(LAYOUT, pool.memory, 9, [4], 0, 3, memoryview(bytes(ALL_OF_ONE)))
    with pytest.raises(ValueError, match="data is not contiguous"):
        kv_copy.scatter(LAYOUT, pool.memory, 9, [4], 0, 3, memoryview(bytes(2 * ALL_OF_ONE))[::2])


def test_copy_blocks_names_the_side_that_is_wrong() -> None:
    pool, other = Pool(LAYOUT, 9), Pool(LAYOUT, 4)
    cases: list[tuple[str, Callable[[], int]]] = [
        ("src_ids", lambda: kv_copy.copy_blocks(LAYOUT, pool.memory, 9, [9], other.memory, 4, [0], 0, 3)),
        ("dst_ids", lambda: kv_copy.copy_blocks(LAYOUT, pool.memory, 9, [8], other.memory, 4, [4], 0, 3)),
        ("dst_ids", lambda: kv_copy.copy_blocks(LAYOUT, pool.memory, 9, [8], other.memory, 4, [], 0, 3)),
        ("src_memory", lambda: kv_copy.copy_blocks(LAYOUT, other.memory, 9, [8], pool.memory, 9, [4], 0, 3)),
        ("dst_memory", lambda: kv_copy.copy_blocks(LAYOUT, pool.memory, 9, [8], other.memory, 9, [4], 0, 3)),
    ]
    for name, call in cases:
        with pytest.raises(ValueError, match=name):
            call()


@pytest.mark.parametrize("field", ["address", "nbytes", "layer_stride", "component_stride"])
@pytest.mark.parametrize("number", [-1, 1 << 47, 1 << 70])
def test_memory_that_cannot_be_is_refused_by_the_name_of_its_field(field: str, number: int) -> None:
    memory = Pool(LAYOUT, 9).memory
    with pytest.raises(ValueError, match=field):
        replace(memory, **{field: number})


@pytest.mark.parametrize("field", ["layer_stride", "component_stride"])
def test_strides_that_lead_out_of_the_memory_are_refused(field: str) -> None:
    pool = Pool(LAYOUT, 9)
    for stride in (getattr(pool.memory, field) + 1, pool.memory.nbytes, (1 << 47) - 1):
        with pytest.raises(ValueError, match="memory"):
            kv_copy.checksum(LAYOUT, replace(pool.memory, **{field: stride}), 9, [0], 0, 3)


@pytest.mark.parametrize("tier", range(len(TIERS)), ids=TIERS)
def test_the_crc_is_of_what_arrived_even_while_the_source_changes(tier: int) -> None:
    source, target = random_bytes(1 << 20), np.zeros(1 << 20, np.uint8)
    stop = threading.Event()

    def scribble() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) & 255
            ctypes.memset(source.ctypes.data, value, source.size)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for stream in [False, True] * 20:
            crc = move_one_row(tier, source, target, stream)
            assert crc == crc32c(target.tobytes())
    finally:
        stop.set()
        thread.join(timeout=60)


def test_other_threads_run_while_bytes_move() -> None:
    """With this switch interval a thread runs only when another one lets go of the GIL by itself."""
    source, target = random_bytes(8 << 20), np.zeros(8 << 20, np.uint8)
    moving, seen = threading.Event(), threading.Event()

    def move() -> None:
        for _ in range(1_000):
            moving.set()
            move_one_row(-1, source, target, stream=False)
            moving.clear()
            if seen.is_set():
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    try:
        thread = threading.Thread(target=move)
        thread.start()
        while thread.is_alive():
            if moving.is_set():
                seen.set()
            time.sleep(0)  # lets go of the GIL
        thread.join(timeout=60)
    finally:
        sys.setswitchinterval(interval)
    assert seen.is_set()
