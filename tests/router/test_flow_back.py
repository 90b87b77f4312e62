"""What the router knows of caches, what it learns of speeds, and what it decides from both. All pure."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.hashing import block_hashes, root_hash
from baton.request import Role
from baton.v1 import worker_pb2
from router.flow_back import Compute, Plan, Pull, best, options, plan
from router.placement import AFFINITY, Choice, Demand, choose, look
from router.prefix_index import PrefixIndex, PrefixRoot, WorkerPrefixes, hash_prompt
from router.rates import DEFAULT_KV_BYTES_PER_S, DEFAULT_PREFILL_TOKENS_PER_S, PULL_OVERHEAD_S, Rates
from router.worker_table import LinkView, WorkerSnapshot, table_of

ROOT = PrefixRoot("f", "float32", 16)
TOKENS = list(range(100))
HASHES = block_hashes(root_hash("f", "float32"), TOKENS, 16)


def index(*added: bytes, max_blocks: int = 100) -> WorkerPrefixes:
    made = PrefixIndex(1_000, 1).follow(0, ROOT, max_blocks)
    made.apply(7, added, (), reset=True)
    return made


# --- the index ---


def test_the_router_hashes_a_prompt_as_workers_do_and_never_its_last_token() -> None:
    assert hash_prompt(TOKENS, b"", [ROOT])[ROOT] == HASHES
    assert len(hash_prompt(TOKENS[:96], b"", [ROOT])[ROOT]) == 5
    assert hash_prompt(TOKENS, b"tenant", [ROOT])[ROOT] != HASHES
    other = replace(ROOT, kv_dtype="float8_e4m3")
    assert not set(hash_prompt(TOKENS, b"", [other])[other]) & set(HASHES), "precision is part of the hash"


def test_only_an_unbroken_beginning_counts_as_cached() -> None:
    hashes = {ROOT: HASHES}
    assert index(*HASHES).num_leading(hashes) == 6
    assert index(HASHES[0], HASHES[1], HASHES[3]).num_leading(hashes) == 2
    assert index(*HASHES[1:]).num_leading(hashes) == 0
    assert index(*HASHES).num_leading({replace(ROOT, kv_dtype="float16"): HASHES}) == 0


def test_changes_are_followed_and_pages_of_one_change_are_one() -> None:
    known = index(*HASHES[:2])
    known.apply(8, HASHES[2:4], HASHES[:1], reset=False)
    known.apply(8, HASHES[4:5], (), reset=False)
    assert known.num_leading({ROOT: HASHES[1:]}) == 4


@pytest.mark.parametrize("generation", [9, 6, 100])
def test_after_a_gap_only_what_comes_then_is_known(generation: int) -> None:
    known = index(*HASHES[:2])
    known.apply(generation, HASHES[2:3], (), reset=False)
    assert len(known) == 1
    known.apply(generation + 1, HASHES[:2], (), reset=False)
    assert known.num_leading({ROOT: HASHES}) == 3


def test_a_worker_that_claims_more_blocks_than_it_has_is_not_believed_and_takes_no_memory() -> None:
    known = index(*HASHES, max_blocks=5)
    assert len(known) == 0
    for generation in range(8, 2_000):
        known.apply(generation, [generation.to_bytes(16, "big")], (), reset=False)
        assert len(known) <= 5


@given(st.lists(st.tuples(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)), st.booleans()), max_size=20))
def test_without_gaps_the_index_is_the_workers_cache(changes: list[tuple[set[int], set[int], bool]]) -> None:
    known, cached = index(), set[int]()
    for number, (added, removed, reset) in enumerate(changes):
        fresh = added - removed if reset else added - removed - cached
        gone = set() if reset else removed & cached
        cached = (set() if reset else cached - gone) | fresh
        names = [[n.to_bytes(16, "big") for n in numbers] for numbers in (fresh, gone)]
        known.apply(8 + number, names[0], names[1], reset=reset)
        assert len(known) == len(cached)


# --- the rates ---


def load(num_tokens: int, num_steps: int, step_ms: float) -> worker_pb2.Load:
    return worker_pb2.Load(prompt_tokens_computed=num_tokens, num_steps=num_steps, step_ms=step_ms)


def test_the_first_report_of_a_worker_tells_its_speed_and_later_ones_move_it() -> None:
    rates = Rates()
    rates.observe_load(load(0, 0, 0.0))
    assert rates.prefill_tokens_per_s == DEFAULT_PREFILL_TOKENS_PER_S
    rates.observe_load(load(10_000, 100, 50.0))
    assert rates.prefill_tokens_per_s == pytest.approx(2_000)
    rates.observe_load(load(10_010, 101, 500.0))
    assert rates.prefill_tokens_per_s == pytest.approx(2_000), "ten tokens say nothing"
    for n in range(1, 60):
        rates.observe_load(load(10_000 + 1_000 * n, 100 + 10 * n, 25.0))
    assert rates.prefill_tokens_per_s == pytest.approx(4_000, rel=0.05)


def test_a_decode_worker_is_as_fast_at_prompts_as_its_steps_with_prompts_were_however_long_it_only_decoded() -> None:
    rates = Rates()
    told = load(600, 4_000, 23.0)
    told.num_prompt_steps, told.prompt_steps_busy_s = 2, 0.3
    assert rates.observe_load(told)
    assert rates.prefill_tokens_per_s == pytest.approx(2_000)
    for n in range(1, 60):
        told = load(600 + 1_000 * n, 4_000 + 100 * n, 23.0)
        told.num_prompt_steps, told.prompt_steps_busy_s = 2 + 4 * n, 0.3 + 0.25 * n
        rates.observe_load(told)
    assert rates.prefill_tokens_per_s == pytest.approx(4_000, rel=0.05)
    told.prompt_tokens_computed, told.prompt_steps_busy_s = 10**6, math.nan
    assert not rates.observe_load(told)


def pulled(nbytes: int, moving_s: float) -> worker_pb2.SeqStats:
    return worker_pb2.SeqStats(pulled_bytes=nbytes, pull_ms=1e3 * moving_s)


def test_pulls_teach_the_speed_of_the_wire_and_failures_only_that_it_is_slow() -> None:
    rates = Rates()
    for _ in range(60):
        rates.observe_pull(pulled(10**9, 0.1), 10**9)
    assert rates.kv_bytes_per_s == pytest.approx(1e10, rel=0.05)
    rates.observe_pull(pulled(0, 0.0), 10**9)  # the blocks were evicted
    assert rates.kv_bytes_per_s == pytest.approx(1e10, rel=0.05)
    for _ in range(60):
        rates.observe_pull(pulled(0, 5.0), 10**9)
    assert rates.kv_bytes_per_s == pytest.approx(2e8, rel=0.05)


def test_a_wire_that_was_slow_once_is_tried_again_some_day() -> None:
    rates = Rates(kv_bytes_per_s=1e6)
    num_forgone = 0
    while rates.kv_bytes_per_s < DEFAULT_KV_BYTES_PER_S / 2:
        rates.forgo_pull()
        num_forgone += 1
    assert 20 < num_forgone < 100


# --- the decision ---


def prefill(worker_id: str = "p0", **changes: object) -> WorkerSnapshot:
    links = {"d0": LinkView(1, "ready"), "d1": LinkView(1, "ready")}
    plain = WorkerSnapshot(
        worker_id, 1, Role.PREFILL, "ready", "f", pool_tokens=10_000, root=ROOT, links=links,
        prefill_tokens_per_s=1_000.0, kv_bytes_per_s=1e9,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def holder(worker_id: str = "d0", **changes: object) -> WorkerSnapshot:
    plain = WorkerSnapshot(
        worker_id, 1, Role.DECODE, "ready", "f", pool_tokens=10_000, root=ROOT, token_bytes=50_000, step_s=0.05
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_a_long_conversation_is_pulled_where_moving_it_is_quicker_than_computing_it() -> None:
    decision = best(options(1_100, prefill(), [holder(cached_tokens=1_008)]))
    assert isinstance(decision, Pull)
    assert (decision.num_blocks, decision.nbytes) == (63, 1_008 * 50_000)
    assert decision.forecast_s == pytest.approx(PULL_OVERHEAD_S + 0.05 + 0.0504 + 0.092)


def test_a_few_blocks_are_not_worth_the_holders_step() -> None:
    decision = best(options(1_100, prefill(cached_tokens=976), [holder(cached_tokens=1_008)]))
    assert isinstance(decision, Compute)
    assert decision.forecast_s == pytest.approx(0.124)


def test_a_pull_that_hides_behind_the_queue_costs_nothing() -> None:
    busy = prefill(cached_tokens=976, waiting_tokens=500)
    assert isinstance(best(options(1_100, busy, [holder(cached_tokens=1_008)])), Pull)


def test_a_slow_wire_makes_computing_the_better_choice() -> None:
    slow = prefill(kv_bytes_per_s=10e6)
    assert isinstance(best(options(1_100, slow, [holder(cached_tokens=1_008)])), Compute)


def test_of_two_holders_the_one_that_saves_more_is_asked() -> None:
    holders = [holder("d0", cached_tokens=512), holder("d1", cached_tokens=1_008)]
    decision = best(options(1_100, prefill(), holders))
    assert isinstance(decision, Pull)
    assert decision.worker_id == "d1"


@pytest.mark.parametrize(
    "changes",
    [{"root": replace(ROOT, kv_dtype="float8_e4m3")}, {"fingerprint": "g"}, {"epoch": 2}],
    ids=["another precision", "another model", "a link of an earlier life"],
)
def test_nothing_is_pulled_from_a_worker_whose_blocks_do_not_fit(changes: dict[str, object]) -> None:
    stranger = replace(holder(cached_tokens=1_008), **changes)  # type: ignore[arg-type]
    made = planned([prefill(), holder("d1"), stranger])
    assert (made.pull, made.forgone) == (None, False)


@given(
    prompt=st.integers(1, 5_000),
    mine=st.integers(0, 300),
    theirs=st.integers(0, 300),
    queued=st.integers(0, 5_000),
    bytes_per_s=st.floats(1e6, 1e11),
)
def test_the_decision_is_never_forecast_slower_than_computing(
    prompt: int, mine: int, theirs: int, queued: int, bytes_per_s: float
) -> None:
    at_most = (prompt - 1) // 16
    worker = prefill(cached_tokens=16 * min(mine, at_most), waiting_tokens=queued, kv_bytes_per_s=bytes_per_s)
    found = options(prompt, worker, [holder(cached_tokens=16 * min(theirs, at_most))])
    assert best(found).forecast_s <= found[0].forecast_s
    for option in found:
        if isinstance(option, Pull):
            assert option.nbytes > 0
            assert option.num_blocks * 16 < prompt


def planned(
    workers: list[WorkerSnapshot], prompt_tokens: int = 1_100, avoid: frozenset[str] = frozenset(), **options_: object
) -> Plan:
    outlook = look(table_of(workers), Demand(prompt_tokens, prompt_tokens + 100), avoid)
    choice = choose(outlook, avoid=avoid, **options_)  # type: ignore[arg-type]
    assert isinstance(choice, Choice)
    return plan(choice, outlook)


def test_a_plan_names_the_holder_and_what_is_left_to_compute() -> None:
    made = planned([prefill(), holder("d0"), holder("d1", cached_tokens=1_008)])
    assert made.pull is not None
    assert made.pull.worker_id == made.choice.decode == "d1"
    assert made.lacking_tokens == 92
    assert not made.forgone


def test_a_worker_that_just_failed_is_asked_for_nothing() -> None:
    made = planned([prefill(), holder("d0"), holder("d1", cached_tokens=1_008)], avoid=frozenset({"d1"}))
    assert made.pull is None
    assert made.lacking_tokens == 1_100


def test_a_pull_that_was_possible_and_not_made_is_said() -> None:
    made = planned([prefill(kv_bytes_per_s=10e6), holder(cached_tokens=1_008)])
    assert made.pull is None
    assert made.forgone


def test_a_plan_may_leave_the_prompt_to_the_holder() -> None:
    made = planned([prefill(), holder(cached_tokens=1_008)], 1_020, local_prefill_tokens=16)
    assert made.choice.local
    assert made.choice.decode == "d0"
    assert made.lacking_tokens == 12


# --- placement ---


def test_a_conversation_stays_with_the_decode_worker_that_caches_it_while_there_is_room() -> None:
    other, home = holder("d0"), holder("d1", cached_tokens=1_008, used_tokens=3_000, last_chosen=9)
    assert planned([prefill(), other, home]).choice.decode == "d1"
    full = replace(home, used_tokens=9_000)
    assert planned([prefill(), other, full]).choice.decode == "d0"
    assert planned([prefill(), other, full]).pull is not None, "its KV still comes from there"


def test_a_shared_beginning_does_not_gather_everybody_on_one_decode_worker() -> None:
    share = 160 / 1_100
    busy = holder("d1", cached_tokens=160, used_tokens=round(10_000 * share * AFFINITY) + 200)
    assert planned([prefill(), holder("d0"), busy]).choice.decode == "d0"


def test_a_prompt_goes_to_the_prefill_worker_that_caches_it_unless_others_are_much_freer() -> None:
    cold, warm = prefill("p0"), prefill("p1", cached_tokens=800, waiting_tokens=500, last_chosen=9)
    assert planned([cold, warm, holder()]).choice.prefill == "p1"
    assert planned([cold, replace(warm, waiting_tokens=2_000), holder()]).choice.prefill == "p0"


def test_where_both_can_have_it_the_prefill_worker_with_less_to_pull_is_chosen() -> None:
    cold, warm = prefill("p0"), prefill("p1", cached_tokens=800, last_chosen=9)
    assert planned([cold, warm, holder(cached_tokens=1_008)]).choice.prefill == "p1"
