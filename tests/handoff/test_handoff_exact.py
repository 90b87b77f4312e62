"""What arrives equals the reference, whatever the prompt's length and whatever shares the batch; and no byte too many moves."""

from __future__ import annotations

import pytest

from baton.request import SamplingParams
from tests.handoff.handoff_calls import FINISHED, HANDED_OFF, Rig, random_prompt
from tests.handoff.handoff_rig import EOS, Cluster, RigConfig

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200, 700)  # tokens; around block and chunk edges
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
SEEDED = SamplingParams(max_tokens=6, temperature=0.8, seed=11)


def rig(seed: int = 0, **changes: object) -> Rig:
    """Blocks of 16 tokens, as in production."""
    config = RigConfig(
        block_size=16,
        prefill_blocks=400,  # 8 prompts of 700 tokens need 352
        decode_blocks=400,
        chunk_tokens=64,
        step_tokens=128,
        blocks_per_frame=3,
        num_slots=4,
    )
    for name, value in changes.items():
        config = RigConfig(**{**{f: getattr(config, f) for f in RigConfig.__dataclass_fields__}, name: value})
    return Rig(seed, Cluster(seed, config))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("together", [1, 8], ids=["alone", "8 at once"])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("chunk_tokens", [64, 512])
def test_every_length_equals_the_reference(
    chunk_tokens: int, prefix_cache: bool, together: int, sampling: SamplingParams
) -> None:
    r = rig(chunk_tokens, chunk_tokens=chunk_tokens, step_tokens=2 * chunk_tokens, prefix_cache=prefix_cache)
    for length in LENGTHS:
        for _ in range(together):
            r.router.submit(random_prompt(r.rng, length), sampling=sampling)
        r.finish_all()
    phrase = random_prompt(r.rng, 5) * 60
    calls = [r.router.submit(phrase, sampling=sampling) for _ in range(together)]
    r.finish_all()
    assert all(call.outcome == FINISHED for call in calls)


def test_a_prompt_known_to_both_workers_is_neither_computed_nor_shipped_again() -> None:
    r = rig()
    prompt = random_prompt(r.rng, 100)  # 6 whole blocks and 4 tokens
    prefill, decode = r.cluster.workers["prefill-0"], r.cluster.workers["decode-0"]
    first = r.router.submit(prompt)
    r.finish_all()
    sent, computed = prefill.core.load().bytes_sent, prefill.local_engine.load().prompt_tokens_computed
    assert sent == 7 * r.cluster.config.layout.block_bytes
    again = r.router.submit(prompt)
    r.finish_all()
    assert prefill.core.load().bytes_sent - sent == r.cluster.config.layout.block_bytes  # the last, partial block
    assert prefill.local_engine.load().prompt_tokens_computed - computed == 4
    assert first.prefill is not None
    assert again.prefill is not None
    assert (first.prefill.stats.kv_blocks, again.prefill.stats.kv_blocks) == (7, 1)
    assert (first.prefill.stats.cached_tokens, again.prefill.stats.cached_tokens) == (0, 96)
    assert decode.core.load().bytes_received == prefill.core.load().bytes_sent


def test_decode_that_lost_its_cache_gets_every_block_though_prefill_computes_none_of_them() -> None:
    r = rig(num_decode=2)
    prompt = random_prompt(r.rng, 64)
    r.router.submit(prompt, decode="decode-0")
    r.finish_all()
    call = r.router.submit(prompt, decode="decode-1")
    r.finish_all()
    assert call.prefill is not None
    assert (call.prefill.stats.kv_blocks, call.prefill.stats.cached_tokens) == (4, 48)


@pytest.mark.parametrize("seed", range(10))
def test_the_first_frame_arrives_before_a_prefill_of_more_than_two_chunks_ends(seed: int) -> None:
    r = rig(seed)
    r.cluster.workers["prefill-0"].has_slow_engine = True
    call = r.router.submit(random_prompt(r.rng, 64 * 3))
    decode = r.cluster.workers["decode-0"]
    assert r.cluster.run_until(lambda: decode.core.load().bytes_received > 0, limit_s=5.0)
    assert not call.tokens
    assert r.cluster.workers["prefill-0"].prefill.num_leases() == 1
    assert r.cluster.workers["prefill-0"].local_engine.load().num_running == 1
    r.finish_all()


def test_a_first_token_that_ends_the_answer_reaches_no_decode_worker() -> None:
    r = rig()
    call = r.router.submit(random_prompt(r.rng, 100), max_tokens=16, script=(EOS,))
    r.finish_all()
    assert call.outcome == FINISHED
    assert call.tokens == {0: EOS}
    assert r.cluster.workers["decode-0"].local_engine.load().num_admitted == 0
    assert r.cluster.workers["decode-0"].local_engine.load().num_steps == 0


def test_with_ignore_eos_the_same_answer_goes_on() -> None:
    r = rig()
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    call = r.router.submit(random_prompt(r.rng, 100), sampling=sampling, script=(EOS,))
    r.finish_all()
    assert len(call.tokens) == 16
    assert call.prefill is not None
    assert call.prefill.outcome == HANDED_OFF


def test_one_token_is_all_that_is_wanted_and_decode_hears_nothing_of_it() -> None:
    r = rig()
    call = r.router.submit(random_prompt(r.rng, 100), max_tokens=1)
    r.finish_all()
    assert call.outcome == FINISHED
    assert len(call.tokens) == 1
    assert r.cluster.workers["decode-0"].local_engine.load().num_admitted == 0
    assert r.cluster.workers["decode-0"].core.load().bytes_received == 0


@pytest.mark.parametrize("num_sent", range(1, 6))
@pytest.mark.parametrize("length", [1, 15, 16, 40])
def test_a_continuation_gives_the_remaining_tokens_only(length: int, num_sent: int) -> None:
    r = rig(length)
    call = r.router.submit(random_prompt(r.rng, length), num_sent=num_sent, sampling=SEEDED)
    r.finish_all()
    assert sorted(call.tokens) == list(range(num_sent, 6))


def test_local_prefill_on_decode_needs_no_link() -> None:
    r = rig()
    call = r.router.submit(random_prompt(r.rng, 100), local=True)
    r.finish_all()
    assert call.is_finished
    assert r.cluster.workers["decode-0"].core.load().bytes_received == 0
