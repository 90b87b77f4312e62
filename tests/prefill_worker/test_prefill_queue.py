"""Which prompts may reserve: order, budget, full and unready decode workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.prefill_queue import LOOKAHEAD_STEPS, PATIENCE_S, Queued, Underway, next_to_reserve

STEP_TOKENS = 100
BUDGET = LOOKAHEAD_STEPS * STEP_TOKENS
NOW_S = 50.0


def queued(seq: int, peer: str = "d", num_tokens: int = 60, priority: int = 0) -> Queued:
    return Queued(seq, peer, num_tokens, priority, arrival_s=float(seq))


def chosen(
    prompts: Sequence[Queued], underway: Sequence[Underway] = (), ready: Sequence[str] = ("d", "e")
) -> list[int]:
    in_order = sorted(prompts, key=lambda prompt: prompt.order)
    return next_to_reserve(in_order, underway, ready, step_tokens=STEP_TOKENS, now_s=NOW_S)


def waiting(peer: str, for_s: float, num_tokens: int = 60) -> Underway:
    return Underway(peer, num_tokens, NOW_S - for_s)


def test_prompts_start_until_the_lookahead_is_full_and_the_last_may_reach_over_it() -> None:
    assert chosen([queued(n) for n in range(10)]) == [0, 1, 2, 3]
    assert chosen([queued(1, num_tokens=10_000), queued(2)]) == [1]


def test_higher_priority_goes_first_and_first_come_first_within_one() -> None:
    prompts = [queued(1), queued(2, priority=5), queued(3, priority=5), queued(4, priority=-1)]
    assert chosen(prompts) == [2, 3, 1, 4]


def test_what_is_under_way_counts_and_a_granted_prompt_only_with_what_is_left_of_it() -> None:
    assert chosen([queued(1)], [Underway("d", BUDGET, None)]) == []
    assert chosen([queued(1)], [Underway("d", BUDGET - 1, None)]) == [1]
    assert chosen([queued(1)], [waiting("d", 0.0, BUDGET)]) == []


def test_a_full_decode_worker_holds_up_its_own_prompts_and_nobody_elses() -> None:
    full = [waiting("d", 2 * PATIENCE_S, 10 * BUDGET)]
    assert chosen([queued(1, "d"), queued(2, "e"), queued(3, "")], full) == [2, 3]


def test_a_prompt_that_is_pulled_slowly_leaves_its_budget_to_others_whoever_decodes_them() -> None:
    quick, slow = (Underway("d", BUDGET, None, NOW_S - for_s) for for_s in (0.0, 2 * PATIENCE_S))
    assert chosen([queued(1, "d"), queued(2, "e")], [quick]) == []
    assert chosen([queued(1, "d"), queued(2, "e")], [slow]) == [1, 2]


def test_a_prompt_whose_link_is_not_ready_waits_and_one_that_needs_none_does_not() -> None:
    assert chosen([queued(1, "x"), queued(2, ""), queued(3, "d")], ready=["d"]) == [2, 3]


def test_the_queue_is_not_read_beyond_what_fits() -> None:
    num_read = 0

    def endless() -> Iterator[Queued]:
        nonlocal num_read
        while True:
            num_read += 1
            yield queued(num_read)

    assert next_to_reserve(endless(), [], ["d"], step_tokens=STEP_TOKENS, now_s=NOW_S) == [1, 2, 3, 4]
    assert num_read <= 5


@given(
    st.lists(st.tuples(st.sampled_from(["", "d", "e", "x"]), st.integers(1, 300), st.integers(-2, 2)), max_size=30),
    st.lists(st.tuples(st.sampled_from(["d", "e"]), st.integers(0, 300), st.none() | st.floats(0.0, 1.0)), max_size=10),
)
def test_nobody_overtakes_a_prompt_that_could_start(
    prompts: list[tuple[str, int, int]], started: list[tuple[str, int, float | None]]
) -> None:
    waiting_prompts = [queued(n, *prompt) for n, prompt in enumerate(prompts)]
    underway = [Underway(peer, left, None if ago is None else NOW_S - ago) for peer, left, ago in started]
    seqs = chosen(waiting_prompts, underway)
    full = {u.peer for u in underway if u.reserve_sent_s is not None and NOW_S - u.reserve_sent_s > PATIENCE_S}
    able = [q for q in sorted(waiting_prompts, key=lambda q: q.order) if q.peer != "x" and q.peer not in full]
    assert seqs == [q.seq for q in able][: len(seqs)]
    by_seq = {q.seq: q for q in waiting_prompts}
    used = sum(
        u.num_tokens_left for u in underway if u.reserve_sent_s is None or NOW_S - u.reserve_sent_s <= PATIENCE_S
    )
    assert sum(by_seq[seq].num_tokens for seq in seqs[:-1]) < BUDGET or not seqs
    if used == 0 and able:
        assert seqs
