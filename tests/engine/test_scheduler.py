"""What runs next: budget, seats, priorities, preemption, reservations, has_work."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.config import EngineConfig
from baton.request import FinishReason
from engine.block_pool import BlockPool
from engine.ports import Batch, Sample
from engine.prefix_cache import PrefixCache
from engine.scheduler import Plan, Scheduler
from engine.sequence import StopRules
from tests.engine.engine_rig import Rig, draw_tokens, expected, make_request


class Loop:
    """A scheduler alone; every sampled token is 0."""

    def __init__(self, num_blocks: int = 64, **config: int) -> None:
        self.pool = BlockPool(num_blocks)
        cache = PrefixCache(self.pool, block_size=16, fingerprint="f", kv_dtype="float32", enabled=False)
        stops = StopRules(frozenset(), max_len=10_000)
        self.scheduler = Scheduler(EngineConfig(**config), self.pool, cache, stops, block_size=16)  # type: ignore[arg-type]

    def add(self, seq: int, prompt: int, max_tokens: int = 100, priority: int = 0, prefill_only: bool = False) -> None:
        request = make_request(seq, prompt, max_tokens, priority=priority)
        self.scheduler.add(request, 0.0, prefill_only=prefill_only)

    def step(self) -> Plan:
        plan = self.scheduler.schedule(0.0)
        outcomes = [Sample(0, None) if chunk.sample else None for chunk in plan.chunks]
        self.shape = [(chunk.sequence.seq, chunk.start, chunk.num_tokens) for chunk in plan.chunks]
        self.scheduler.commit(plan, outcomes, 1, 0.0)
        self.scheduler.check_integrity()
        return plan


# --- budget and seats ---


def test_an_empty_scheduler_plans_nothing() -> None:
    loop = Loop()
    assert loop.step() == Plan()
    assert not loop.scheduler.has_work()


def test_decodes_go_first_and_prefill_chunks_fill_the_budget() -> None:
    loop = Loop(max_num_batched_tokens=40, chunk_tokens=32)
    loop.add(1, 10)
    loop.step()
    loop.add(2, 50)
    loop.add(3, 50)
    loop.step()
    assert loop.shape == [(1, 10, 1), (2, 0, 32), (3, 0, 7)]
    loop.step()
    assert loop.shape == [(1, 11, 1), (2, 32, 18), (3, 7, 21)]
    loop.step()
    assert loop.shape == [(1, 12, 1), (2, 50, 1), (3, 28, 22)]


def test_no_step_exceeds_the_token_budget_whatever_the_mix() -> None:
    loop = Loop(num_blocks=256, max_num_batched_tokens=33, chunk_tokens=17)
    for seq in range(1, 20):
        loop.add(seq, seq * 11, max_tokens=20)
    while loop.scheduler.has_work():
        loop.step()
        assert 0 < sum(num_tokens for _, _, num_tokens in loop.shape) <= 33
        assert max(num_tokens for _, _, num_tokens in loop.shape) <= 17


def test_at_most_max_num_seqs_run_at_once() -> None:
    loop = Loop(max_num_seqs=2)
    for seq in (1, 2, 3):
        loop.add(seq, 8, max_tokens=2)
    loop.step()
    assert [seq for seq, _, _ in loop.shape] == [1, 2]
    loop.step()
    loop.step()
    assert [seq for seq, _, _ in loop.shape] == [3]


def test_waiting_tokens_are_prompt_tokens_not_yet_computed() -> None:
    loop = Loop(max_num_batched_tokens=32, chunk_tokens=32)
    loop.add(1, 50)
    loop.add(2, 20)
    assert loop.scheduler.waiting_tokens == 70
    loop.step()
    assert loop.scheduler.waiting_tokens == 38
    loop.step()
    loop.step()
    assert loop.scheduler.waiting_tokens == 0


# --- order ---


def test_the_higher_priority_starts_first_and_equals_by_arrival() -> None:
    loop = Loop(max_num_seqs=1)
    for seq, priority in ((1, 0), (2, 5), (3, 0), (4, 5), (5, -1)):
        loop.add(seq, 8, max_tokens=1, priority=priority)
    admitted = []
    while loop.scheduler.has_work():
        admitted += loop.step().admitted
    assert admitted == [2, 4, 1, 3, 5]


def test_a_long_prompt_at_the_head_is_not_overtaken_by_short_ones() -> None:
    loop = Loop(num_blocks=10)
    loop.add(1, 100, max_tokens=10)
    loop.step()
    loop.add(2, 150, max_tokens=1)
    loop.add(3, 8, max_tokens=1)
    admitted = []
    while loop.scheduler.has_work():
        admitted += loop.step().admitted
    assert admitted == [2, 3]


def test_a_start_leaves_one_block_for_each_sequence_that_decodes() -> None:
    loop = Loop(num_blocks=4)
    loop.add(1, 16, max_tokens=50)
    loop.step()
    loop.add(2, 32)  # as many blocks as are left
    assert loop.step().admitted == []
    loop.scheduler.drop(2)
    loop.add(3, 16)
    assert loop.step().admitted == [3]


# --- preemption ---


def test_the_last_arrival_of_the_lowest_priority_is_preempted_and_returns_first() -> None:
    loop = Loop(num_blocks=10, max_num_seqs=4)
    for seq, priority in ((1, 0), (2, 1), (3, 0)):
        loop.add(seq, 32, priority=priority)
    loop.step()
    loop.add(4, 32)
    loop.add(5, 32)
    for _ in range(40):
        plan = loop.step()
        if plan.preempted:
            break
    assert plan.preempted == [3]
    loop.scheduler.drop(2)
    assert loop.step().admitted[:1] == [3]
    assert loop.scheduler.totals.num_preemptions == 1


def test_a_running_prefill_that_will_be_shipped_is_not_preempted_though_it_came_last() -> None:
    loop = Loop(num_blocks=10, chunk_tokens=2)
    loop.add(1, 30)
    loop.add(2, 30)
    while loop.scheduler.waiting_tokens:
        loop.step()
    loop.add(3, 64, prefill_only=True)
    preempted, last_chunk = [], 0
    while last_chunk < 64:
        preempted += loop.step().preempted
        last_chunk = max(start + num_tokens for seq, start, num_tokens in loop.shape if seq == 3)
    assert preempted == [2]


def test_a_held_prefill_keeps_its_memory_until_it_is_dropped() -> None:
    loop = Loop(num_blocks=7, chunk_tokens=16)
    loop.add(1, 16, max_tokens=80)
    loop.step()
    loop.add(2, 64, prefill_only=True)
    preempted = []
    for _ in range(60):
        preempted += loop.step().preempted
        assert 2 not in preempted
    assert preempted == [1]
    assert not loop.scheduler.has_work()  # the held prefill has the memory: only a drop helps
    loop.scheduler.drop(2)
    assert loop.scheduler.has_work()
    assert loop.step().admitted == [1]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_tight_pool_preempts_and_still_gives_every_answer(prefix_cache: bool) -> None:
    rig = Rig(num_blocks=64, config=EngineConfig(chunk_tokens=64, prefix_cache=prefix_cache))
    requests = [make_request(seq, 200 + seq, max_tokens=100) for seq in range(1, 17)]
    for request in requests:
        rig.engine.add(request, 0.0)
    rig.run()
    assert rig.engine.load().num_preemptions > 0
    assert rig.engine.load().num_preemptions == sum(rig.ended[r.seq].stats.num_preemptions for r in requests)
    for request in requests:
        assert rig.output(request.seq) == expected(request)[0]
        assert rig.tokens[request.seq][0].index == 0
        assert rig.ended[request.seq].stats.num_computed_tokens == len(request.token_ids)  # recomputes not counted
    assert rig.is_idle()


def test_two_answers_that_each_need_the_whole_pool_both_end() -> None:
    rig = Rig(num_blocks=8)
    requests = [make_request(seq, 30, max_tokens=97) for seq in (1, 2, 3)]
    for request in requests:
        rig.engine.add(request, 0.0)
    rig.run()
    for request in requests:
        assert rig.output(request.seq) == expected(request)[0]


# --- reservations ---


def hold_all_but(rig: Rig, num_blocks: int, seq: int = 900) -> None:
    """Occupy the pool with a held prefill until `seq` is dropped."""
    free = rig.engine.load().free_blocks + rig.engine.load().cached_blocks
    rig.engine.add(make_request(seq, 16 * (free - num_blocks)), 0.0, prefill_only=True)
    rig.run()


def test_a_reservation_is_granted_without_anything_to_compute() -> None:
    rig = Rig()
    rig.engine.reserve(make_request(1, 100), 0.0)
    assert rig.engine.has_work()
    result = rig.step()
    assert [(r.seq, len(r.block_ids), r.num_leading_blocks) for r in result.reserved] == [(1, 7, 0)]
    assert (rig.engine.load().reserved_blocks, rig.engine.load().num_steps) == (7, 0)
    assert not rig.engine.has_work()


def test_reservations_are_granted_first_come_first_served() -> None:
    rig = Rig(num_blocks=20)
    hold_all_but(rig, 4)
    for seq, num_tokens in ((1, 100), (2, 16), (3, 16)):
        rig.engine.reserve(make_request(seq, num_tokens, priority=seq), 0.0)
        assert not rig.engine.has_work()
    rig.engine.drop(900)
    rig.run()
    assert list(rig.reserved) == [1, 2, 3]


def test_dropping_the_first_reservation_lets_the_next_one_in() -> None:
    rig = Rig(num_blocks=20)
    hold_all_but(rig, 4)
    rig.engine.reserve(make_request(1, 100), 0.0)
    rig.engine.reserve(make_request(2, 16), 0.0)
    assert not rig.engine.has_work()
    rig.engine.drop(1)
    assert rig.engine.has_work()
    rig.run()
    assert list(rig.reserved) == [2]


def test_a_reservation_counts_what_is_cached_here_but_never_the_whole_prompt() -> None:
    rig = Rig()
    prompt = draw_tokens(1, 64)
    rig.engine.add(make_request(1, prompt), 0.0)
    rig.run()
    rig.engine.reserve(make_request(2, prompt), 0.0)
    rig.run()
    assert (len(rig.reserved[2].block_ids), rig.reserved[2].num_leading_blocks) == (4, 3)
    assert rig.engine.load().reserved_blocks == 4
    rig.engine.drop(2)
    assert rig.is_idle()


def test_cached_blocks_of_a_granted_reservation_are_not_evicted() -> None:
    rig = Rig(num_blocks=8)
    prompt = draw_tokens(1, 64)
    rig.engine.add(make_request(1, prompt, max_tokens=1), 0.0)
    rig.run()
    rig.engine.reserve(make_request(2, prompt), 0.0)
    rig.run()
    rig.engine.add(make_request(3, 48, max_tokens=10), 0.0)
    rig.run()
    leading = set(rig.reserved[2].block_ids[:3])
    assert not leading & set(rig.engine.free_block_ids())
    rig.engine.drop(2)
    rig.engine.add(make_request(4, prompt), 0.0)
    rig.run()
    assert rig.ended[4].stats.num_cached_tokens == 48


def test_no_reservation_takes_memory_that_a_preempted_sequence_waits_for() -> None:
    rig = Rig(num_blocks=12)
    for seq in (1, 2):
        rig.engine.add(make_request(seq, 60, max_tokens=120), 0.0)
    while not rig.engine.load().num_preemptions:
        rig.step()
    rig.engine.reserve(make_request(3, 8), 0.0)
    rig.engine.reserve(make_request(4, 8, priority=1), 0.0)
    while rig.engine.load().num_waiting == 3:  # the preempted one and both reservations
        assert rig.reserved == {}
        rig.step()
    rig.run()
    assert list(rig.reserved) == [3, 4]


def test_a_reservation_of_a_higher_priority_does_not_wait_for_preempted_lower_ones() -> None:
    rig = Rig(num_blocks=12)
    for seq in (1, 2):
        rig.engine.add(make_request(seq, 60, max_tokens=120), 0.0)
    while not rig.engine.load().num_preemptions:
        rig.step()
    rig.engine.reserve(make_request(3, 8, priority=1), 0.0)
    rig.step()
    assert list(rig.reserved) == [3]


def test_a_steady_stream_of_short_prompts_does_not_starve_a_large_reservation() -> None:
    rig = Rig(num_blocks=16)
    rig.engine.add(make_request(1, 60, max_tokens=20), 0.0)
    rig.step()
    rig.engine.reserve(make_request(2, 200), 0.0)
    for seq in range(10, 200):
        rig.engine.add(make_request(seq, 40, max_tokens=2), 0.0)
        rig.step()
        if 2 in rig.reserved:
            break
    assert 2 in rig.reserved
    assert len(rig.results) < 40


def test_a_steady_stream_of_reservations_does_not_starve_a_large_prompt() -> None:
    rig = Rig(num_blocks=16)
    rig.engine.reserve(make_request(1, 60), 0.0)
    rig.step()
    rig.engine.add(make_request(2, 200, max_tokens=1), 0.0)
    for seq in range(10, 60):
        rig.engine.reserve(make_request(seq, 30), 0.0)
        rig.step()
        rig.engine.drop(1 if seq == 10 else seq - 1)
    assert 2 in rig.ended


# --- adoption ---


def adopt_by_copy(rig: Rig, seq: int, prompt: Sequence[int], first_token: int) -> None:
    """Write the KV that a prefill worker would have shipped, then adopt."""
    source = Rig()
    source.engine.add(make_request(1, prompt), 0.0, prefill_only=True)
    source.run()
    reservation = rig.reserved[seq]
    lacking = slice(reservation.num_leading_blocks, None)
    frame = memoryview(bytearray(len(reservation.block_ids[lacking]) * rig.runner.kv_cache.layout.block_bytes))
    source.runner.kv_cache.gather(source.chunks[1][-1].block_ids[lacking], 0, 2, frame)
    rig.runner.kv_cache.scatter(reservation.block_ids[lacking], 0, 2, frame)
    rig.engine.adopt(seq, first_token, 0.0)


def test_an_adopted_sequence_goes_on_from_its_second_token_and_computes_no_prompt() -> None:
    request = make_request(1, 100, max_tokens=20)
    tokens, _ = expected(request)
    rig = Rig()
    rig.engine.reserve(request, 0.0)
    rig.run()
    adopt_by_copy(rig, 1, request.token_ids, tokens[0])
    rig.run()
    assert [(token.index, token.token) for token in rig.tokens[1]] == list(enumerate(tokens))[1:]
    stats = rig.ended[1].stats
    assert (stats.num_cached_tokens, stats.num_computed_tokens) == (0, 0)
    assert rig.runner.num_tokens_run == 19
    rig.engine.adopt(1, tokens[0], 0.0)  # a spent reservation is spent
    rig.ended.clear()
    rig.run()
    assert rig.ended[1].error is not None
    assert rig.is_idle()


def test_adopted_blocks_are_found_by_the_next_prompt() -> None:
    request = make_request(1, 100)
    rig = Rig()
    rig.engine.reserve(request, 0.0)
    rig.run()
    adopt_by_copy(rig, 1, request.token_ids, expected(request)[0][0])
    rig.run()
    rig.engine.add(make_request(2, request.token_ids), 0.0)
    rig.run()
    assert rig.ended[2].stats.num_cached_tokens == 96


def test_kv_that_arrived_stays_useful_when_its_call_is_dropped_before_it_runs() -> None:
    request = make_request(1, 100)
    rig = Rig()
    rig.engine.reserve(request, 0.0)
    rig.run()
    adopt_by_copy(rig, 1, request.token_ids, expected(request)[0][0])
    rig.engine.drop(1)
    assert rig.is_idle()
    rig.run()
    assert len(rig.cached_hashes) == 6  # routers are told without waiting for another call
    rig.engine.add(make_request(2, request.token_ids), 0.0)
    rig.run()
    assert rig.ended[2].stats.num_cached_tokens == 96


def test_adopted_sequences_that_are_preempted_recompute_here_and_end_exactly() -> None:
    requests = [make_request(seq, 128, max_tokens=128) for seq in (1, 2, 3, 4)]  # public case E1: 32 blocks
    rig = Rig(num_blocks=32)
    for request in requests:
        rig.engine.reserve(request, 0.0)
    adopted: set[int] = set()
    for _ in range(2_000):
        for request in requests:
            if request.seq in rig.reserved and request.seq not in adopted:
                adopted.add(request.seq)
                adopt_by_copy(rig, request.seq, request.token_ids, expected(request)[0][0])
        if not rig.engine.has_work():
            break
        rig.step()
    assert rig.engine.load().num_preemptions > 0
    for request in requests:
        assert rig.output(request.seq) == expected(request)[0][1:]
        assert rig.ended[request.seq].finish is FinishReason.LENGTH
    assert len(rig.reserved) == 4
    assert rig.is_idle()


def test_an_adopted_answer_that_is_already_whole_ends_without_a_step() -> None:
    rig = Rig()
    rig.engine.reserve(make_request(1, 40, max_tokens=1), 0.0)
    rig.run()
    rig.engine.adopt(1, 7, 0.0)
    rig.run()
    assert rig.ended[1].finish is FinishReason.LENGTH
    assert (rig.tokens, rig.engine.load().num_steps) == ({}, 0)
    assert rig.is_idle()


# --- drop ---


@pytest.mark.parametrize(
    "state", ["unknown", "waiting", "prefilling", "running", "preempted", "held", "queued", "granted"]
)
def test_drop_frees_in_every_state_and_is_idempotent(state: str) -> None:
    rig = Rig(num_blocks=12, config=EngineConfig(chunk_tokens=16))
    request = make_request(1, 60, max_tokens=100)
    if state in ("waiting", "queued"):
        hold_all_but(rig, 1)
    if state == "preempted":
        rig.engine.add(make_request(2, 60, max_tokens=100), 0.0)
    if state in ("queued", "granted"):
        rig.engine.reserve(request, 0.0)
    elif state != "unknown":
        rig.engine.add(request, 0.0, prefill_only=state in ("held", "prefilling"))
    for _ in range({"prefilling": 2, "running": 10, "preempted": 70, "held": 10, "granted": 1}.get(state, 0)):
        rig.step()
    assert state != "preempted" or rig.engine.load().num_waiting == 1
    for _ in range(2):
        rig.engine.drop(1)
        rig.check()
    for seq in (2, 900):
        rig.engine.drop(seq)
    assert rig.is_idle()
    rig.run()
    assert 1 not in rig.ended
    good = make_request(3, 60)
    rig.engine.add(good, 0.0)
    rig.run()
    assert rig.output(3) == expected(good)[0]


def test_a_dropped_sequence_is_in_no_later_batch() -> None:
    seen: list[list[int]] = []

    def before_run(batch: Batch) -> None:
        seen.append([entry.seq for entry in batch.entries])

    rig = Rig(before_run=before_run)
    for seq in (1, 2):
        rig.engine.add(make_request(seq, 200), 0.0, prefill_only=True)
    rig.step()
    rig.engine.drop(1)
    rig.run()
    assert seen[0] == [1, 2]
    assert all(1 not in seqs for seqs in seen[1:])
