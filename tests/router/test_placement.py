"""The policy's choices, each of its considerations by itself, over tables of workers without a clock or a socket."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.hashing import block_hashes, root_hash
from baton.request import Role
from baton.v1 import worker_pb2
from router.forecast import MIN_STEP_SAMPLES, STEPS_PER_SAMPLE, DecodeSteps, StepModel, backlog
from router.holds import Ledger
from router.placement import AUTO_LOCAL_TOKENS, DEFAULT_TPOT_S, Choice, Demand, NoPlace, helps, look, place
from router.prefix_index import ExpectedPrefixes, PrefixIndex, PrefixRoot
from router.rates import DEFAULT_PREFILL_TOKENS_PER_S, SAME_SPEED, PeerSpeed, Rates
from router.worker_table import LinkView, WorkerSnapshot, WorkerTable, table_of

ROOT = PrefixRoot("f", "float32", 16)
PROMPT = Demand(1_000, 1_100)


def prefill(name: str, *peers: str, **changes: object) -> WorkerSnapshot:
    links = {peer: LinkView(1, "ready") for peer in peers or ("d0", "d1")}
    plain = WorkerSnapshot(
        name, 1, Role.PREFILL, "ready", "f", pool_tokens=10_000, root=ROOT, links=links, prefill_tokens_per_s=1_000.0
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def decode(name: str, **changes: object) -> WorkerSnapshot:
    plain = WorkerSnapshot(
        name, 1, Role.DECODE, "ready", "f", pool_tokens=10_000, root=ROOT, prefill_tokens_per_s=1_000.0, step_s=0.02
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def chosen(*workers: WorkerSnapshot, demand: Demand = PROMPT, **options: object) -> Choice:
    found = place(table_of(workers), demand, **options)  # type: ignore[arg-type]
    assert isinstance(found, Choice), found
    return found


# -- prefill -----------------------------------------------------------------------------------------------------------


def test_the_forecast_of_the_first_token_is_the_queue_and_what_is_lacking() -> None:
    choice = chosen(prefill("p0", waiting_tokens=500, cached_tokens=400), decode("d0"))
    assert choice.ttft_s == pytest.approx(1.1)
    assert choice.tpot_s == pytest.approx(0.02)


def test_a_slower_worker_gets_less_not_nothing() -> None:
    quick, slow = prefill("p0", prefill_tokens_per_s=2_000.0), prefill("p1")
    assert chosen(quick, slow, decode("d0")).prefill == "p0"
    assert chosen(replace(quick, waiting_tokens=4_000), slow, decode("d0")).prefill == "p1"


def test_what_is_cached_is_worth_more_than_it_saves_the_prompt_itself_since_others_wait_behind_it() -> None:
    cold, warm = prefill("p0"), prefill("p1", cached_tokens=800, waiting_tokens=1_200)
    assert chosen(cold, warm, decode("d0")).prefill == "p1"
    assert chosen(cold, replace(warm, waiting_tokens=2_000), decode("d0")).prefill == "p0"


def test_forecasts_that_differ_by_less_than_they_err_are_equal() -> None:
    sooner, other = prefill("p0", waiting_tokens=500, last_chosen=9), prefill("p1", waiting_tokens=520, last_chosen=3)
    assert chosen(sooner, other, decode("d0")).prefill == "p1"
    assert chosen(sooner, replace(other, waiting_tokens=800), decode("d0")).prefill == "p0"


# -- decode ------------------------------------------------------------------------------------------------------------


def test_a_decode_worker_whose_tokens_would_come_too_late_is_taken_last() -> None:
    slow, full = decode("d0", step_s=0.12), decode("d1", used_tokens=7_000)
    assert chosen(prefill("p0"), slow, full).decode == "d1"
    lenient = replace(PROMPT, tpot_ms=1_000.0)
    assert chosen(prefill("p0"), slow, full, demand=lenient).decode == "d0"


def test_what_the_sequence_adds_to_a_step_is_part_of_its_forecast() -> None:
    near = decode("d0", step_s=0.09, step_s_per_seq=0.005, step_s_per_token=1e-5)
    choice = chosen(prefill("p0"), near)
    assert choice.tpot_s == pytest.approx(0.09 + 0.005 + 0.01)
    assert choice.score.crowded, "over the target of 100 ms"


def test_steps_well_within_the_target_are_no_reason_to_prefer_a_worker() -> None:
    quick, idle = decode("d0", step_s=0.01, last_chosen=9), decode("d1", step_s=0.4 * DEFAULT_TPOT_S)
    assert chosen(prefill("p0"), quick, idle).decode == "d1"


def test_a_session_stays_at_home_where_load_is_about_equal_and_moves_where_it_is_not() -> None:
    at_home = replace(PROMPT, session_id="s", home="d1")
    busier = decode("d1", used_tokens=800, last_chosen=9)
    assert chosen(prefill("p0"), decode("d0"), busier).decode == "d0"
    assert chosen(prefill("p0"), decode("d0"), busier, demand=at_home).decode == "d1"
    assert chosen(prefill("p0"), decode("d0"), replace(busier, used_tokens=4_000), demand=at_home).decode == "d0"


def test_the_same_fabric_is_preferred_while_load_is_about_equal() -> None:
    east, west = decode("d0", fabric="east", used_tokens=1_500), decode("d1", fabric="west")
    assert chosen(prefill("p0", fabric="east"), east, west).decode == "d0"
    assert chosen(prefill("p0"), east, west).decode == "d1", "nobody said where p0 is"
    assert chosen(prefill("p0", fabric="east"), replace(east, used_tokens=5_000), west).decode == "d1"


def place_in_one_fabric(*workers: WorkerSnapshot) -> Choice | NoPlace:
    table = WorkerTable(one_fabric=True)
    for worker in workers:
        table.put(table.add(), worker)
    return place(table, PROMPT)


def test_where_one_fabric_is_required_no_load_makes_up_for_another_one() -> None:
    east, west = decode("d0", fabric="east", used_tokens=5_000), decode("d1", fabric="west")
    found = place_in_one_fabric(prefill("p0", fabric="east"), east, west)
    assert isinstance(found, Choice)
    assert found.decode == "d0"
    none = place_in_one_fabric(prefill("p0", fabric="east"), prefill("p1", fabric="north", state="lost"), west)
    assert isinstance(none, NoPlace)
    assert "p0 to d1 is refused (fabric 'east', not 'west')" in none.reason
    unsaid = place_in_one_fabric(prefill("p0", fabric="east"), decode("d0"), west)
    assert isinstance(unsaid, Choice)
    assert unsaid.decode == "d0", "who says none may be on any"


def test_a_worker_that_comes_back_on_another_fabric_is_paired_anew() -> None:
    table = WorkerTable(one_fabric=True)
    rows = [table.add(), table.add()]
    table.put(rows[0], prefill("p0", fabric="east"))
    there = decode("d0", fabric="west")
    table.put(rows[1], there)
    alone = place(table, PROMPT)
    assert isinstance(alone, Choice)
    assert alone.shape == "alone", "nobody fits it: it prefills for itself"
    table.put(rows[1], replace(there, fabric="east"))
    found = place(table, PROMPT)
    assert isinstance(found, Choice)
    assert (found.shape, found.decode) == ("remote", "d0")


# -- local prefill -----------------------------------------------------------------------------------------------------


def test_a_short_prompt_is_prefilled_on_decode_where_that_is_sooner() -> None:
    workers = (prefill("p0", waiting_tokens=2_000), decode("d0"))
    short = Demand(100, 200)
    assert chosen(*workers, demand=short).shape == "remote", "nobody allowed it"
    assert chosen(*workers, demand=short, local_prefill_tokens=AUTO_LOCAL_TOKENS).shape == "local"
    idle = (prefill("p0"), decode("d0", num_running=1))
    assert chosen(*idle, demand=short, local_prefill_tokens=AUTO_LOCAL_TOKENS).shape == "remote", "as soon there"


def test_a_mostly_cached_prompt_counts_as_short() -> None:
    workers = (prefill("p0", waiting_tokens=2_000), decode("d0", cached_tokens=992))
    assert chosen(*workers, local_prefill_tokens=16).shape == "local"
    assert chosen(*workers, local_prefill_tokens=4).shape == "remote"


def test_streams_that_run_on_a_decode_worker_keep_their_time_per_token() -> None:
    short = Demand(400, 500)
    workers = (prefill("p0", waiting_tokens=2_000), decode("d0", step_s=0.085, num_running=8))
    assert chosen(*workers, demand=short, local_prefill_tokens=512).shape == "remote"
    assert (
        chosen(workers[0], replace(workers[1], num_running=0), demand=short, local_prefill_tokens=512).shape == "local"
    )
    assert chosen(workers[0], replace(workers[1], step_s=0.02), demand=short, local_prefill_tokens=512).shape == "local"


def test_a_decode_worker_helps_that_has_no_other_prompt_to_compute_and_would_be_sooner() -> None:
    busy, idle = prefill("p0", waiting_tokens=2_000), decode("d0")
    short = Demand(400, 500)

    def help_of(*workers: WorkerSnapshot, max_tokens: int = 512) -> bool:
        return helps(look(table_of(workers), short), local_prefill_tokens=max_tokens)

    assert help_of(busy, idle)
    assert not help_of(busy, idle, max_tokens=0)
    assert not help_of(busy, idle, max_tokens=300)
    assert not help_of(busy, replace(idle, waiting_tokens=300)), "sooner, but it is computing another one"
    assert help_of(busy, replace(idle, waiting_tokens=300), decode("d1"))
    assert not help_of(prefill("p0"), replace(idle, num_running=1)), "as soon there"
    assert not help_of(busy, replace(idle, step_s=0.085, num_running=8)), "its streams would feel it"


# -- newcomers and crowds ----------------------------------------------------------------------------------------------


def spread(table: WorkerTable, num_calls: int, tokens: int = 0) -> Counter[str]:
    """Place calls one after the other, each adding to the load of whom it is given to."""
    counts = Counter[str]()
    for serial in range(100, 100 + num_calls):
        found = place(table, PROMPT)
        assert isinstance(found, Choice)
        for row in {found.prefill_row, found.decode_row}:
            table.last_chosen[row] = serial
        table.waiting_tokens[found.prefill_row] += tokens
        counts.update({found.prefill, found.decode})
    return counts


@pytest.mark.parametrize("tokens", [0, 1_000], ids=["one after the other", "all at once"])
def test_a_restarted_worker_gets_its_share_of_sixty_calls_and_no_more(tokens: int) -> None:
    names = [f"d{n}" for n in range(3)]
    known = [prefill(f"p{n}", *names, last_chosen=40 + n) for n in range(2)]
    workers = [*known, prefill("p2", *names), *(decode(name, last_chosen=30) for name in names)]
    counts = spread(table_of(workers), 60, tokens)
    assert all(counts[f"p{n}"] >= 12 for n in range(3)), counts
    assert all(counts[f"d{n}"] >= 12 for n in range(3)), counts


def test_a_newcomer_is_taken_to_be_as_fast_as_its_peers() -> None:
    everybody = PeerSpeed()
    shape = PeerSpeed(everybody)
    assert shape.of(Rates()) == DEFAULT_PREFILL_TOKENS_PER_S
    shape.observe(50_000.0)
    assert shape.of(Rates()) == 50_000.0
    assert PeerSpeed(everybody).of(Rates()) == 50_000.0, "also one of another shape, until it has said"
    near = Rates(prefill_tokens_per_s=50_000.0 / (SAME_SPEED - 0.1), has_computed=True)
    assert shape.of(near) == 50_000.0
    throttled = Rates(prefill_tokens_per_s=20_000.0, has_computed=True)
    assert shape.of(throttled) == 20_000.0


def test_routers_that_see_the_same_do_not_all_run_to_the_same_worker() -> None:
    """What each gave since the last report is added to it, so that only the first call of each can meet the others'."""
    names = [f"d{n}" for n in range(4)]
    tables = [
        table_of([prefill(f"p{n}", *names) for n in range(8)] + [decode(name) for name in names]) for _ in range(4)
    ]
    counts = sum((spread(table, 8, 1_000) for table in tables), Counter[str]())
    assert all(counts[f"p{n}"] == 4 for n in range(8)), counts


# -- the merged load ---------------------------------------------------------------------------------------------------


def test_what_was_given_since_the_last_report_is_added_to_it_and_then_part_of_it() -> None:
    ledger = Ledger(lambda: None)
    ledger.report(500, 2_000, 3)
    hold = ledger.hold(100, 300)
    assert (ledger.waiting_tokens, ledger.used_tokens, ledger.num_running) == (600, 2_300, 4)
    ledger.report(560, 2_300, 4)
    assert (ledger.waiting_tokens, ledger.used_tokens, ledger.num_running) == (560, 2_300, 4)
    hold.release()
    assert (ledger.waiting_tokens, ledger.num_held) == (560, 0)


def test_a_report_that_crossed_with_a_call_does_not_hide_it() -> None:
    ledger = Ledger(lambda: None)
    hold = ledger.hold(100, 300)
    ledger.report(0, 0, 0)
    assert (ledger.waiting_tokens, ledger.used_tokens, ledger.num_running) == (100, 300, 1)
    hold.waiting_tokens = 0
    assert (ledger.waiting_tokens, ledger.used_tokens) == (0, 300)
    hold.release()
    assert (ledger.waiting_tokens, ledger.used_tokens, ledger.num_running) == (0, 0, 0)


@given(st.lists(st.tuples(st.sampled_from("hrle"), st.integers(0, 500), st.integers(0, 500)), max_size=40))
def test_whatever_happens_every_hold_is_taken_back(events: list[tuple[str, int, int]]) -> None:
    ledger = Ledger(lambda: None)
    open_holds = []
    for kind, waiting, used in events:
        if kind == "h":
            open_holds.append(ledger.hold(waiting, used))
        elif kind == "r":
            ledger.report(waiting, used, len(open_holds))
        elif open_holds and kind == "l":
            open_holds[0].waiting_tokens = waiting
            open_holds[0].used_tokens = used
        elif open_holds:
            open_holds.pop().release()
        assert ledger.waiting_tokens >= sum(hold.waiting_tokens for hold in open_holds)
        assert ledger.used_tokens >= sum(hold.used_tokens for hold in open_holds)
    for hold in open_holds:
        hold.release()
    ledger.report(0, 0, 0)
    assert (ledger.waiting_tokens, ledger.used_tokens, ledger.num_running, ledger.num_held) == (0, 0, 0, 0)


def test_a_hold_that_was_released_counts_no_more_whatever_is_said_of_it() -> None:
    ledger = Ledger(lambda: None)
    hold = ledger.hold(5, 6)
    hold.release()
    hold.waiting_tokens = 50
    hold.release()
    assert (ledger.waiting_tokens, ledger.used_tokens, ledger.num_held) == (0, 0, 0)


# -- forecasts ---------------------------------------------------------------------------------------------------------


def test_steps_that_compute_prompts_teach_nothing_of_what_one_more_sequence_adds() -> None:
    steps, load = DecodeSteps(), worker_pb2.Load(num_steps=1_000, busy_s=22.0, step_ms=22.0)
    assert steps.take(load) == 0.0, "its whole life is of other batches than today's"
    load.num_steps += 20
    load.num_prompt_steps, load.prompt_steps_busy_s = 20, 5.0
    load.busy_s += 5.0
    load.step_ms = 250.0
    assert steps.take(load) == 0.0, "not one of them only decoded"
    load.num_steps += STEPS_PER_SAMPLE
    load.busy_s += 0.023 * STEPS_PER_SAMPLE
    assert steps.take(load) == pytest.approx(0.023)
    busy_s, load.num_steps, load.busy_s = load.busy_s, load.num_steps + STEPS_PER_SAMPLE, math.nan
    assert steps.take(load) == 0.0, "no number"
    load.busy_s = busy_s + 0.024 * STEPS_PER_SAMPLE
    assert steps.take(load) == pytest.approx(0.024)
    old, of_old = DecodeSteps(), worker_pb2.Load(num_steps=50, step_ms=30.0)
    assert old.take(of_old) == 0.0
    of_old.num_steps += STEPS_PER_SAMPLE
    assert old.take(of_old) == pytest.approx(0.030), "an earlier release tells of no kinds"


def test_the_step_model_learns_what_sequences_and_their_kv_add_to_a_step() -> None:
    model = StepModel()
    for number in range(4 * MIN_STEP_SAMPLES):
        batch, context = 1 + number * 7 % 60, 200 + number * 331 % 9_000
        kv_tokens = batch * context
        model.observe(batch, kv_tokens, 1e-3 * (6.09 + 0.0203 * batch + 2.93e-5 * kv_tokens))
    step_s = model.base_s + model.grow_s(32, 32 * 4_000)
    assert step_s == pytest.approx(1e-3 * (6.09 + 0.0203 * 32 + 2.93e-5 * 32 * 4_000), rel=0.06)
    assert model.grow_s(0, 4_000) == pytest.approx(1e-3 * 2.93e-5 * 4_000, rel=0.1)


def test_until_there_are_samples_a_step_is_forecast_as_it_was_measured() -> None:
    model = StepModel()
    model.observe(8, 1_000, 0.05)
    assert model.grow_s(1, 1_000) == 0.0


def test_the_backlog_is_of_those_who_compute_prompts() -> None:
    table = table_of([prefill("p0", waiting_tokens=3_000), prefill("p1", waiting_tokens=1_000), decode("d0")])
    work = backlog(table, table.topology().prefill)
    assert (work.num_workers, work.waiting_tokens, work.shortest_s, work.mean_s) == (2, 4_000, 1.0, 2.0)


# -- the table ---------------------------------------------------------------------------------------------------------


def test_a_row_that_was_given_up_is_chosen_no_more_and_serves_the_next_worker() -> None:
    table = table_of([prefill("p0"), decode("d0"), decode("d1")])
    row = table.row_of["d0"]
    table.clear(row)
    table.free(row)
    found = place(table, PROMPT)
    assert isinstance(found, Choice)
    assert found.decode == "d1"
    assert table.add() == row
    table.put(row, decode("d0", epoch=2, last_chosen=0))
    assert table.links[table.row_of["p0"], row] == 2, "the link was to another life of it: connecting"


def test_a_table_grows_with_its_fleet() -> None:
    names = [f"d{n}" for n in range(40)]
    table = table_of([*(decode(name) for name in names), prefill("p0", *names), prefill("p1", *names)])
    assert len(table.snapshots()) == 42
    assert table.snapshot(table.row_of["d39"]) == decode("d39")
    assert place(table, PROMPT) != place(table, replace(PROMPT, prompt_tokens=20_000, max_total_tokens=20_001))


# -- the index ---------------------------------------------------------------------------------------------------------

NUM_ROWS = 6
CHAINS = [block_hashes(root_hash(f"chain {chain}", ""), range(12), 1) for chain in range(3)]
POOL = [block for chain in CHAINS for block in chain]


@given(
    st.lists(
        st.tuples(
            st.integers(0, NUM_ROWS - 1),
            st.sets(st.sampled_from(POOL), max_size=20),
            st.sets(st.sampled_from(POOL), max_size=20),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_the_shared_index_knows_of_every_worker_what_that_one_said(
    messages: list[tuple[int, set[bytes], set[bytes], bool]],
) -> None:
    index = PrefixIndex(1_000, NUM_ROWS)
    follows = [index.follow(row, ROOT, 1_000) for row in range(NUM_ROWS)]
    cached = [set[bytes]() for _ in range(NUM_ROWS)]
    for row, added, removed, reset in messages:
        added -= removed
        follows[row].apply(follows[row]._generation + 1, list(added), list(removed), reset=reset)
        cached[row] = ((set() if reset else cached[row]) - removed) | added
        assert len(follows[row]) == len(cached[row])
    for chain in CHAINS:
        expected = [next((n for n, b in enumerate(chain) if b not in cached[row]), 12) for row in range(NUM_ROWS)]
        assert index.leading({ROOT: chain}, NUM_ROWS).tolist() == expected
    for row in range(NUM_ROWS):
        index.forget(row)
    for _ in range(3 * 256 * 16 // 1_024 + 8):  # what is dead is swept by later changes
        follows[0].apply(follows[0]._generation + 1, [], [], reset=False)
    assert not index.leading({ROOT: POOL}, NUM_ROWS).any()


def test_beyond_its_limit_the_index_ignores_blocks_and_says_how_many() -> None:
    index = PrefixIndex(10, 2)
    index.follow(0, ROOT, 1_000).apply(1, POOL, [], reset=True)
    assert (index.num_blocks, index.num_ignored) == (10, len(POOL) - 10)
    index.forget(0)
    other = index.follow(1, ROOT, 1_000)
    for _ in range(40):
        other.apply(other._generation + 1, [], [], reset=False)
    other.apply(other._generation + 1, POOL[:10], [], reset=False)
    assert index.leading({ROOT: POOL[:10]}, 2).tolist() == [0, 10], "what nobody caches any more made room"


def test_workers_beyond_the_limit_are_served_without_their_cache_being_known() -> None:
    index, expected = PrefixIndex(100, 2), ExpectedPrefixes(2)
    beyond = index.follow(2, ROOT, 100)
    beyond.apply(1, POOL[:4], [], reset=True)
    expected.add(2, {ROOT: POOL}, ROOT)
    assert len(beyond) == 4
    assert not index.leading({ROOT: POOL}, 3).any()
    assert not expected.leading({ROOT: POOL}, 3).any()
    index.forget(2)
    expected.forget(2)


def test_a_prompt_that_was_just_given_away_is_expected_there() -> None:
    expected = ExpectedPrefixes(2)
    chain = [n.to_bytes(16, "little") for n in range(1, 40)]
    expected.add(1, {ROOT: chain}, ROOT)
    assert expected.leading({ROOT: chain}, 2).tolist() == [0, 32], "in steps of 128 tokens"
    assert expected.leading({ROOT: [*chain[:20], *reversed(chain)]}, 2).tolist() == [0, 16]
    expected.forget(1)
    assert not expected.leading({ROOT: chain}, 2).any()


def test_a_prompt_that_is_cached_beyond_its_end_is_placed_as_any_other() -> None:
    assert chosen(prefill("p0", cached_tokens=2_000), prefill("p1"), decode("d0")).prefill == "p0"


@pytest.mark.parametrize("broken", ["p0", "p1", "d0", "d1"])
def test_a_worker_whose_forecast_is_no_number_is_left_out_and_nobody_looks_for_ever(broken: str) -> None:
    nan = float("nan")
    fleet = (prefill("p0", "d0", "d1"), prefill("p1", "d0", "d1"), decode("d0"), decode("d1"))
    workers = [
        replace(worker, prefill_tokens_per_s=nan, step_s=nan) if worker.worker_id == broken else worker
        for worker in fleet
    ]
    with np.errstate(invalid="ignore"):
        choice = chosen(*workers)
    assert broken not in (choice.prefill, choice.decode)


def test_a_worker_that_does_both_and_whose_forecast_is_no_number_leaves_the_call_to_another_one() -> None:
    nan = float("nan")
    broken = decode("b0", role=Role.BOTH, prefill_tokens_per_s=nan, step_s=nan)
    with np.errstate(invalid="ignore"):
        assert chosen(broken, decode("b1", role=Role.BOTH)).prefill == "b1"
