"""The scripted runner must see every kind of wrong KV, or the tests built on it prove nothing."""

from __future__ import annotations

import pytest

from baton.errors import Internal
from baton.request import SamplingParams
from engine.ports import Batch, BatchEntry, Sample
from engine.scripted_runner import ScriptedKVCache, ScriptedRunner, answer, next_token
from tests.engine.engine_rig import LAYOUT, draw_tokens

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
TOKENS = draw_tokens(7, 40)
TABLE = (5, 1, 3)


def entry(start: int, end: int, *, table: tuple[int, ...] = TABLE, sample: bool = False, seq: int = 1) -> BatchEntry:
    prompt_ids = TOKENS[:end] if sample else ()
    return BatchEntry(seq, TOKENS[start:end], start, table, sample, GREEDY, prompt_ids, ())


def run(runner: ScriptedRunner, part: BatchEntry) -> Sample | None:
    [sample] = runner.run(Batch([part]))
    return sample


def prefilled() -> ScriptedRunner:
    """A runner that has computed 39 of 40 tokens."""
    runner = ScriptedRunner(LAYOUT, 8)
    run(runner, entry(0, 20))
    run(runner, entry(20, 39))
    return runner


def test_right_kv_gives_the_scripted_token() -> None:
    sample = run(prefilled(), entry(39, 40, sample=True))
    assert sample == Sample(next_token(TOKENS, GREEDY), None)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("component", [0, 1])
@pytest.mark.parametrize("position", [0, 15, 16, 38])
@pytest.mark.parametrize("byte", [0, 7])
def test_one_flipped_bit_anywhere_is_found(layer: int, component: int, position: int, byte: int) -> None:
    runner = prefilled()
    runner.kv_cache.slots[layer, component, TABLE[position // 16], position % 16, byte] ^= 1
    with pytest.raises(Internal, match=f"wrong KV at position {position} of 39"):
        run(runner, entry(39, 40, sample=True))
    assert len(runner.faults) == 1


def test_swapped_blocks_are_found() -> None:
    with pytest.raises(Internal, match="position 0"):
        run(prefilled(), entry(39, 40, table=(1, 5, 3), sample=True))


def test_a_chunk_that_samples_nothing_is_verified_too() -> None:
    runner = prefilled()
    runner.kv_cache.poison([TABLE[1]])
    with pytest.raises(Internal, match="position 16"):
        run(runner, entry(39, 40))


def test_kv_of_another_prompt_at_the_same_positions_is_found_when_a_token_is_drawn() -> None:
    runner = prefilled()
    other = draw_tokens(8, 40)
    part = BatchEntry(1, other[39:], 39, TABLE, True, GREEDY, other, ())
    with pytest.raises(Internal, match="wrong KV"):
        run(runner, part)


def test_poisoned_blocks_are_found() -> None:
    runner = prefilled()
    runner.kv_cache.poison([TABLE[2]])
    with pytest.raises(Internal, match="position 32"):
        run(runner, entry(39, 40, sample=True))


def test_a_table_that_is_too_short_or_repeats_a_block_is_found() -> None:
    with pytest.raises(Internal, match="too few blocks"):
        run(ScriptedRunner(LAYOUT, 8), entry(0, 20, table=(5,)))
    with pytest.raises(Internal, match="twice"):
        run(ScriptedRunner(LAYOUT, 8), entry(0, 20, table=(5, 5)))


def test_gather_and_scatter_are_inverse_and_in_wire_order() -> None:
    source = prefilled().kv_cache
    target = ScriptedKVCache(LAYOUT, 4)
    for layer in range(LAYOUT.num_layers):
        frame = bytearray(len(TABLE) * LAYOUT.layer_block_bytes)
        source.gather(TABLE, layer, 1, memoryview(frame))
        half = len(frame) // 2
        assert bytes(frame[:half]) == source.slots[layer, 0, list(TABLE)].tobytes()  # component K first
        assert bytes(frame[half:]) == source.slots[layer, 1, list(TABLE)].tobytes()
        target.scatter((0, 2, 1), layer, 1, memoryview(frame))
    whole = bytearray(len(TABLE) * LAYOUT.block_bytes)
    again = bytearray(len(whole))
    source.gather(TABLE, 0, LAYOUT.num_layers, memoryview(whole))
    target.gather((0, 2, 1), 0, LAYOUT.num_layers, memoryview(again))
    assert whole == again


def test_the_pool_may_live_in_memory_of_others_and_starts_as_zeros() -> None:
    buffer = bytearray(b"\xff" * (4 * LAYOUT.block_bytes))
    cache = ScriptedKVCache(LAYOUT, 4, memoryview(buffer))
    assert not any(buffer)
    source = prefilled().kv_cache
    frame = memoryview(bytearray(LAYOUT.block_bytes))
    assert source.gather([TABLE[0]], 0, LAYOUT.num_layers, frame) == cache.scatter([2], 0, LAYOUT.num_layers, frame)
    assert memoryview(buffer).cast("B")[2 * LAYOUT.run_bytes : 3 * LAYOUT.run_bytes] == frame[: LAYOUT.run_bytes]
    cache.clear([2], 0, LAYOUT.num_layers)
    assert not any(buffer)


def test_a_script_goes_before_the_hash() -> None:
    runner = ScriptedRunner(LAYOUT, 8, script={1: [11]})
    first = run(runner, entry(0, 40, sample=True))
    assert first is not None
    assert first.token == 11


def test_the_seed_counts_unless_greedy() -> None:
    seeds = [SamplingParams(max_tokens=4, temperature=0.7, seed=seed) for seed in (1, 2)]
    assert answer(TOKENS, seeds[0], 4) != answer(TOKENS, seeds[1], 4)
    greedy = [SamplingParams(max_tokens=4, temperature=0.0, seed=seed) for seed in (1, 2)]
    assert answer(TOKENS, greedy[0], 4) == answer(TOKENS, greedy[1], 4)
