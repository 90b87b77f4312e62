"""Which TPOT targets are kept where a batch cannot keep all: those that are worth most, higher priorities first."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.capacity import WorkerLoad
from router.kept_targets import MEMORY_S, ROOM, Kept, Kind, Want, Wants, kept_targets

SEQ_TOKENS = 1_000.0
ALONE_S, GROWTH_S = 0.010, 0.001


def decode(
    num_seqs: int = 0, *, alone_s: float = ALONE_S, growth_s: float = GROWTH_S, max_seqs: int = 100
) -> WorkerLoad:
    step_s = alone_s + growth_s * max(0, num_seqs - 1)
    return WorkerLoad("d0", False, True, math.inf, 0, num_seqs, step_s, max_seqs, 1_000_000, 0, growth_s)


def want(tpot_s: float, tokens_per_s: float, *, value: float = 1.0, priority: int = 0) -> Want:
    return Want(priority, tpot_s, value, 0.0, tokens_per_s)


def tightest(*wants: Want, workers: tuple[WorkerLoad, ...] = (decode(),)) -> float:
    return kept_targets(workers, wants, SEQ_TOKENS).tightest_s


LOOSE = want(0.1, 800.0, value=9.0)  # 77 sequences make 900 tokens a second in steps of 86 ms


def test_where_all_fits_the_tightest_target_is_kept() -> None:
    # Of 20 ms 8.5 are left beyond 10 alone: 9 sequences, 500 tokens a second
    assert tightest(want(0.02, 10.0), want(0.1, 300.0)) == 0.02


def test_a_target_that_turns_away_more_than_it_brings_is_not_kept() -> None:
    assert tightest(want(0.02, 10.0), LOOSE) == 0.1
    assert tightest(want(0.02, 10.0, value=90.0), LOOSE) == 0.02, "what a call is worth is the operator's word"


def test_a_target_that_a_lone_sequence_misses_is_never_kept() -> None:
    kept = kept_targets((decode(40),), (want(0.009, 10.0, value=90.0), LOOSE), SEQ_TOKENS)
    assert kept.floor_s == pytest.approx(ALONE_S)
    assert kept.tightest_s == 0.1
    assert 0.009 not in kept
    assert 0.1 in kept
    assert math.inf in kept


def test_one_worker_that_is_quick_enough_is_enough() -> None:
    slow = decode(alone_s=0.03)
    assert 0.02 in kept_targets((slow, decode()), (), SEQ_TOKENS)
    assert 0.02 not in kept_targets((slow,), (), SEQ_TOKENS)


def test_a_crowd_of_lower_priority_never_outbids() -> None:
    crowd = want(0.1, 5_000.0, value=1_000.0, priority=-10)
    assert tightest(want(0.02, 10.0), crowd) == 0.02
    assert tightest(want(0.02, 10.0, priority=-10), want(0.1, 800.0)) == 0.1


def test_nothing_is_given_up_where_nobody_knows_what_a_step_takes_or_who_asks() -> None:
    unmeasured = decode(alone_s=0.0, growth_s=0.0)
    assert 0.001 in kept_targets((unmeasured,), (want(0.001, 1e9), want(1.0, 1e9)), SEQ_TOKENS)
    for kept in (kept_targets((), (LOOSE,), SEQ_TOKENS), kept_targets((decode(),), (), SEQ_TOKENS), Kept()):
        assert 0.02 in kept


def test_a_step_whose_growth_nobody_knows_yet_holds_as_many_as_the_worker_says() -> None:
    flat = decode(growth_s=0.0)
    assert tightest(want(0.011, 4_000.0), want(0.1, 4_000.0), workers=(flat,)) == 0.011  # 100 sequences each 10 ms


@given(st.lists(st.floats(0.0105, 0.1), min_size=2, max_size=8), st.floats(1.0, 2_000.0), st.floats(1.0, 2_000.0))
def test_a_looser_target_never_costs_worth_where_tokens_are_worth_the_same(
    targets: list[float], tokens: float, others: float
) -> None:
    def worth(tpot_s: float) -> float:
        """Of what is kept, by a formula of its own."""
        kept_s = tightest(want(tpot_s, tokens, value=tokens), want(0.1, others, value=others))
        num_seqs = min(100, 1 + math.floor(0.85 * (kept_s - ALONE_S) / GROWTH_S))
        rate = num_seqs / (ALONE_S + GROWTH_S * (num_seqs - 1))
        return min(rate / ROOM, tokens + others if tpot_s >= kept_s else others)

    found = [worth(tpot_s) for tpot_s in sorted(targets)]
    assert found == [pytest.approx(most, rel=1e-9) for most in accumulate(found, max)]


def test_rates_are_those_of_late_and_what_nobody_asks_for_any_more_is_forgotten() -> None:
    wants = Wants()
    outputs = {"chat": 100.0}
    assert wants.rates(outputs, 0.0) == []
    for tick in range(300):
        wants.add(Kind(0, 0.02, "chat"), 2.0, 50.0, 1, 0.1 * tick)
    [found] = wants.rates(outputs, 30.0)
    assert (found.value, found.prompt_tokens, found.output_tokens) == pytest.approx((20.0, 500.0, 1_000.0), rel=0.02)
    wants.add(Kind(5, 0.1, "new"), 1.0, 0.0, 2, 30.0)
    late = {one.tpot_s: one for one in wants.rates(outputs, 30.0 + MEMORY_S)}
    assert late[0.02].output_tokens == pytest.approx(1_000.0 / math.e, rel=0.05)
    assert late[0.1].priority == 5
    assert late[0.1].output_tokens == pytest.approx(2 * 100.0 / math.e / MEMORY_S, rel=0.05), (
        "as others of unknown length"
    )
    assert wants.rates(outputs, 1_000.0) == []


def test_the_first_call_of_all_is_no_flood() -> None:
    wants = Wants()
    wants.add(Kind(0, 0.02, "chat"), 1.0, 50.0, 1, 7.0)
    [found] = wants.rates({"chat": 100.0}, 7.0)
    assert found.output_tokens == pytest.approx(100.0, rel=0.06)
