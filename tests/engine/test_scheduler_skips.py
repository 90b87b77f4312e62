"""Steps that a simulation leaves out: as many as nothing would change in, and the same state after them."""

from __future__ import annotations

from baton.config import EngineConfig
from baton.request import Request, SamplingParams
from engine.block_pool import BlockPool
from engine.ports import Sample
from engine.prefix_cache import PrefixCache
from engine.scheduler import Scheduler
from engine.sequence import StopRules

BLOCK = 4
TOKEN = 9


def scheduler(num_blocks: int = 64, **changes: int) -> Scheduler:
    config = EngineConfig(block_size=BLOCK, **{"max_num_seqs": 8, **changes})  # type: ignore[arg-type]
    pool = BlockPool(num_blocks)
    cache = PrefixCache(pool, block_size=BLOCK, fingerprint="m", kv_dtype="fp32", enabled=True)
    return Scheduler(config, pool, cache, StopRules(frozenset(), 1_000), block_size=BLOCK)


def request(seq: int, num_prompt: int, max_tokens: int) -> Request:
    return Request(seq, tuple(range(100 * seq, 100 * seq + num_prompt)), SamplingParams(max_tokens=max_tokens))


def step(one: Scheduler) -> list[int]:
    """Seqs that ended."""
    plan = one.schedule(0.0)
    result = one.commit(plan, [Sample(TOKEN, None) if chunk.sample else None for chunk in plan.chunks], 0, 0.0)
    return [ended.seq for ended in result.ended]


def with_two_running(**changes: int) -> Scheduler:
    one = scheduler(**changes)
    one.add(request(1, 5, 20), 0.0, prefill_only=False)
    one.add(request(2, 7, 9), 0.0, prefill_only=False)
    step(one)
    return one


def test_nothing_is_skipped_while_a_prompt_is_to_be_computed_or_could_start() -> None:
    one = scheduler()
    assert one.steps_until_event() == 0
    one.add(request(1, 5, 20), 0.0, prefill_only=False)
    assert one.steps_until_event() == 0
    step(one)
    assert one.steps_until_event() == 19
    one.add(request(2, 5, 20), 0.0, prefill_only=False)
    assert one.steps_until_event() == 0


def test_skipped_steps_leave_what_single_ones_leave() -> None:
    one, other = with_two_running(), with_two_running()
    num_steps = one.steps_until_event()
    assert num_steps == 8
    assert [ended.seq for ended in one.skip(num_steps, TOKEN)] == [2]
    assert [seq for _ in range(num_steps) for seq in step(other)] == [2]
    assert one.totals == other.totals
    assert one.num_held_tokens == other.num_held_tokens
    one.check_integrity()
    assert one.steps_until_event() == other.steps_until_event() == 11


def test_a_run_ends_before_blocks_do() -> None:
    one = with_two_running(num_blocks=5)
    num_steps = one.steps_until_event()
    assert 0 < num_steps < 8
    one.skip(num_steps, TOKEN)
    one.check_integrity()
    assert one.steps_until_event() == 0
    assert one.schedule(0.0).preempted == [2]


def test_a_reservation_is_granted_beside_decodes_and_a_prompt_is_not() -> None:
    one = with_two_running()
    one.reserve(request(3, 6, 5), 1.0)
    (granted,) = one.grant_beside_decodes(1.0)
    assert granted.seq == 3
    assert one.steps_until_event() == 8
    one.add(request(4, 6, 5), 2.0, prefill_only=False)
    assert one.grant_beside_decodes(2.0) == []
    assert one.steps_until_event() == 0
