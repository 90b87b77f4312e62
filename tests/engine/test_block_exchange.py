"""Blocks lent to other workers and room for what they send: held while in use, findable only when whole, always given back."""

from __future__ import annotations

import pytest

from baton.config import EngineConfig
from baton.hashing import block_hashes, root_hash
from engine.scripted_runner import answer
from tests.engine.engine_rig import LAYOUT, Rig, draw_tokens, make_request

S = LAYOUT.block_size
ROOT = root_hash("scripted", "float32")


def chat(rig: Rig, num_prompt: int = 40, num_output: int = 30) -> list[int]:
    """Serve one turn; returns its whole text."""
    request = make_request(1, num_prompt, num_output)
    rig.engine.add(request, 0.0)
    rig.run()
    return [*request.token_ids, *rig.output(1)]


def receive(source: Rig, source_ids: tuple[int, ...], target: Rig, target_ids: tuple[int, ...]) -> None:
    """What the KV plane does: move blocks from one pool to the other."""
    target.runner.kv_cache.slots[:, :, list(target_ids)] = source.runner.kv_cache.slots[:, :, list(source_ids)]


def test_the_blocks_of_an_answer_stay_cached_after_its_end() -> None:
    rig = Rig()
    text = chat(rig)
    assert rig.cached_hashes == set(block_hashes(ROOT, text[:-1], S)), "all but the last token was computed"


def test_a_pin_holds_the_leading_blocks_until_unpin() -> None:
    rig = Rig()
    hashes = block_hashes(ROOT, chat(rig), S)
    rig.engine.pin(9, [*hashes, b"unknown", *hashes])
    (pinned,) = rig.step().pinned
    assert pinned.seq == 9
    assert len(pinned.block_ids) == len(hashes) == 4
    assert rig.engine.load().reserved_blocks == 4
    rig.engine.unpin(9)
    rig.engine.unpin(9)
    assert rig.is_idle()
    assert rig.engine.load().cached_blocks == 4


def test_of_a_chain_that_begins_elsewhere_nothing_is_pinned() -> None:
    rig = Rig()
    hashes = block_hashes(ROOT, chat(rig), S)
    rig.engine.pin(9, [b"unknown", *hashes])
    assert rig.step().pinned[0].block_ids == ()
    assert rig.is_idle()


@pytest.mark.parametrize("root", [root_hash("scripted", "float16"), root_hash("other", "float32")])
def test_blocks_of_another_precision_or_model_are_not_found(root: bytes) -> None:
    rig = Rig()
    rig.engine.pin(9, block_hashes(root, chat(rig), S))
    assert rig.step().pinned[0].block_ids == ()


def test_blocks_of_another_tenant_are_not_found() -> None:
    rig = Rig()
    text = chat(rig)
    rig.engine.make_room(make_request(9, text, tenant_salt=b"tenant"), 4)
    (room,) = rig.step().rooms
    assert not set(room.hashes) & rig.cached_hashes
    rig.engine.publish(9, 0)


def test_pinned_blocks_are_not_evicted_by_what_runs_meanwhile() -> None:
    rig = Rig(num_blocks=8)
    hashes = block_hashes(ROOT, chat(rig), S)
    rig.engine.pin(9, hashes)
    rig.step()
    rig.engine.add(make_request(2, 3 * S, 8), 0.0)
    rig.run()
    assert 2 in rig.ended
    assert set(hashes) <= rig.cached_hashes
    rig.engine.unpin(9)


def test_a_pin_leaves_a_running_sequence_the_block_that_it_needs_next() -> None:
    """7 blocks: 4 are cached, 3 are those of a sequence that is about to need a fourth."""
    rig = Rig(num_blocks=7)
    hashes = block_hashes(ROOT, chat(rig), S)
    rig.engine.add(make_request(2, 3 * S, S), 0.0)
    rig.step()
    rig.engine.pin(9, hashes)
    assert rig.engine.load().reserved_blocks == 3
    rig.run()
    assert 2 in rig.ended
    assert rig.engine.load().num_preemptions == 0
    rig.engine.unpin(9)


def test_blocks_that_are_in_use_are_lent_however_full_the_pool_is() -> None:
    rig = Rig(num_blocks=5)
    text = chat(rig)
    rig.engine.add(make_request(2, [*text, 5], 4), 0.0)
    rig.step()
    rig.engine.pin(9, block_hashes(ROOT, text, S))
    assert len(rig.step().pinned[0].block_ids) == 4
    rig.engine.unpin(9)


def test_a_prompt_that_does_not_fit_beside_a_pin_starts_when_it_goes() -> None:
    rig = Rig(num_blocks=8)
    rig.engine.pin(9, block_hashes(ROOT, chat(rig), S))
    rig.step()
    rig.engine.add(make_request(2, 6 * S, 1), 0.0)
    assert rig.run() == 0
    rig.engine.unpin(9)
    rig.run()
    assert 2 in rig.ended


def test_received_blocks_are_found_once_published_and_only_the_rest_is_computed() -> None:
    decode, prefill = Rig(), Rig()
    text = chat(decode)
    request = make_request(2, [*text, *draw_tokens(5, 10)], 4)
    prefill.engine.make_room(request, 4)
    (room,) = prefill.step().rooms
    decode.engine.pin(2, room.hashes)
    (pinned,) = decode.step().pinned
    assert len(room.block_ids) == len(pinned.block_ids) == 4
    receive(decode, pinned.block_ids, prefill, room.block_ids)
    assert not prefill.cached_hashes, "nothing is findable before it is whole"
    prefill.engine.publish(2, 4)
    prefill.engine.add(request, 0.0)
    prefill.run()
    assert prefill.output(2) == answer(request.token_ids, request.sampling, 4)
    assert prefill.engine.load().prompt_tokens_computed == len(request.token_ids) - 4 * S
    assert prefill.is_idle()


def test_only_what_came_is_published_and_all_the_rest_is_free() -> None:
    decode, prefill = Rig(), Rig()
    text = chat(decode)
    prefill.engine.make_room(make_request(2, [*text, 5], 4), 4)
    (room,) = prefill.step().rooms
    decode.engine.pin(2, room.hashes[:2])
    receive(decode, decode.step().pinned[0].block_ids, prefill, room.block_ids[:2])
    prefill.engine.publish(2, 2)
    load = prefill.engine.load()
    assert (load.cached_blocks, load.reserved_blocks, load.free_blocks) == (2, 0, 62)
    prefill.step()
    assert prefill.cached_hashes == set(room.hashes[:2])


def test_room_that_is_given_back_leaves_nothing_findable() -> None:
    rig = Rig()
    rig.engine.make_room(make_request(2, 80, 4), 5)
    rig.engine.publish(2, 0)
    rig.engine.publish(2, 0)
    assert not rig.engine.has_work(), "an answer nobody waits for is not given"
    assert rig.is_idle()
    assert rig.engine.load().cached_blocks == 0


def test_room_is_made_only_for_what_is_lacking_and_holds_what_is_here() -> None:
    rig = Rig(num_blocks=10)
    text = chat(rig, 40, 1)  # two whole blocks
    rig.engine.make_room(make_request(2, [*text, *draw_tokens(5, 60)], 4), 5)
    (room,) = rig.step().rooms
    assert list(room.hashes) == block_hashes(ROOT, [*text, *draw_tokens(5, 60)], S)[2:5]
    assert rig.engine.load().reserved_blocks == 5
    rig.engine.add(make_request(3, 4 * S, 8), 0.0)  # would evict the two if they were not held
    rig.run()
    assert set(block_hashes(ROOT, text, S)) <= rig.cached_hashes
    rig.engine.publish(2, 0)


def test_the_last_token_of_a_prompt_is_never_pulled() -> None:
    rig = Rig()
    rig.engine.make_room(make_request(2, 4 * S, 4), 4)
    assert len(rig.step().rooms[0].hashes) == 3
    rig.engine.publish(2, 0)


def test_no_room_is_made_of_memory_that_somebody_waits_for() -> None:
    rig = Rig(num_blocks=8)
    rig.engine.reserve(make_request(1, 5 * S, 4), 0.0)
    rig.step()
    rig.engine.add(make_request(2, 4 * S, 4), 0.0)  # waits for memory
    rig.engine.make_room(make_request(3, 3 * S, 4), 2)
    (room,) = rig.step().rooms
    assert room.block_ids == ()
    assert rig.engine.load().reserved_blocks == 5
    rig.engine.publish(3, 0)
    rig.engine.drop(1)
    rig.run()
    assert 2 in rig.ended


def test_a_block_that_was_computed_here_meanwhile_stays_and_its_twin_is_free() -> None:
    rig = Rig()
    request = make_request(2, 3 * S, 2)
    rig.engine.make_room(request, 2)
    (room,) = rig.step().rooms
    rig.engine.add(request, 0.0)
    rig.run()
    rig.runner.kv_cache.poison(room.block_ids)
    rig.engine.publish(2, 2)
    rig.engine.add(make_request(3, [*request.token_ids, 5], 2), 0.0)
    rig.run()
    assert rig.ended[3].error is None
    assert rig.is_idle()


def test_without_a_prefix_cache_there_is_nothing_to_pull_or_lend() -> None:
    rig = Rig(config=EngineConfig(chunk_tokens=64, prefix_cache=False))
    text = chat(rig)
    rig.engine.pin(8, block_hashes(ROOT, text, S))
    rig.engine.make_room(make_request(9, text, 4), 4)
    result = rig.step()
    assert result.pinned[0].block_ids == result.rooms[0].block_ids == ()
    rig.engine.unpin(8)
    rig.engine.publish(9, 0)
    assert rig.is_idle()
