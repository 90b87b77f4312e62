"""Every head of every receiver rank is written exactly once, from a rank that holds it, whatever the degrees."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import PeerRefused
from kv_transfer.head_plan import MAX_TP_SIZE, HeadMove, heads_of_rank, plan_heads


@st.composite
def degrees(draw: st.DrawFn) -> tuple[int, int, int]:
    """(H, sender tp size, receiver tp size), each size a divisor or a multiple of H."""
    num_kv_heads = draw(st.integers(1, 48))
    divisors = [size for size in range(1, num_kv_heads + 1) if num_kv_heads % size == 0]
    multiples = [num_kv_heads * factor for factor in range(1, 9) if num_kv_heads * factor <= MAX_TP_SIZE]
    sizes = st.sampled_from(divisors) | st.sampled_from(multiples)
    return num_kv_heads, draw(sizes), draw(sizes)


@given(degrees())
def test_each_head_of_each_receiver_rank_is_written_exactly_once_and_from_a_rank_that_holds_it(
    case: tuple[int, int, int],
) -> None:
    num_kv_heads, sender_tp_size, receiver_tp_size = case
    written: Counter[tuple[int, int]] = Counter()
    for move in plan_heads(*case):
        held = heads_of_rank(num_kv_heads, sender_tp_size, move.sender_rank)
        wanted = heads_of_rank(num_kv_heads, receiver_tp_size, move.receiver_rank)
        assert len(move.sender_heads) == len(move.receiver_heads) > 0
        for here, there in zip(move.sender_heads, move.receiver_heads, strict=True):
            assert held[here] == wanted[there]
            written[move.receiver_rank, there] += 1
    every_head = {
        (rank, head)
        for rank in range(receiver_tp_size)
        for head in range(len(heads_of_rank(num_kv_heads, receiver_tp_size, rank)))
    }
    assert set(written) == every_head
    assert set(written.values()) == {1}


@given(degrees())
def test_a_pair_of_ranks_has_at_most_one_move(case: tuple[int, int, int]) -> None:
    pairs = [(move.sender_rank, move.receiver_rank) for move in plan_heads(*case)]
    assert len(pairs) == len(set(pairs))


@given(degrees())
def test_ranks_that_hold_copies_of_a_head_share_its_receivers_evenly(case: tuple[int, int, int]) -> None:
    num_kv_heads, sender_tp_size, _ = case
    sent = Counter(
        (heads_of_rank(num_kv_heads, sender_tp_size, move.sender_rank)[head], move.sender_rank)
        for move in plan_heads(*case)
        for head in move.sender_heads
    )
    loads: defaultdict[int, list[int]] = defaultdict(list)
    for rank in range(sender_tp_size):
        for head in heads_of_rank(num_kv_heads, sender_tp_size, rank):
            loads[head].append(sent[head, rank])
    for per_rank in loads.values():
        assert max(per_rank) - min(per_rank) <= 1


@given(degrees())
def test_the_ranks_of_one_degree_hold_every_head_equally_often(case: tuple[int, int, int]) -> None:
    num_kv_heads, tp_size, _ = case
    copies = Counter(head for rank in range(tp_size) for head in heads_of_rank(num_kv_heads, tp_size, rank))
    assert set(copies) == set(range(num_kv_heads))
    assert set(copies.values()) == {max(1, tp_size // num_kv_heads)}


@given(degrees())
def test_equal_degrees_pair_each_rank_with_its_like_and_move_all_it_holds(case: tuple[int, int, int]) -> None:
    num_kv_heads, tp_size, _ = case
    all_heads = range(len(heads_of_rank(num_kv_heads, tp_size, 0)))
    assert plan_heads(num_kv_heads, tp_size, tp_size) == [
        HeadMove(rank, rank, all_heads, all_heads) for rank in range(tp_size)
    ]


@pytest.mark.parametrize(
    ("num_kv_heads", "sender_tp_size", "receiver_tp_size", "moves"),
    [
        (8, 1, 1, [(0, 0, range(8), range(8))]),
        (8, 1, 2, [(0, 0, range(4), range(4)), (0, 1, range(4, 8), range(4))]),
        (8, 2, 1, [(0, 0, range(4), range(4)), (1, 0, range(4), range(4, 8))]),
        (3, 1, 3, [(0, 0, range(1), range(1)), (0, 1, range(1, 2), range(1)), (0, 2, range(2, 3), range(1))]),
        (3, 3, 1, [(0, 0, range(1), range(1)), (1, 0, range(1), range(1, 2)), (2, 0, range(1), range(2, 3))]),
        (
            6, 2, 3,
            [
                (0, 0, range(2), range(2)), (0, 1, range(2, 3), range(1)),
                (1, 1, range(1), range(1, 2)), (1, 2, range(1, 3), range(2)),
            ],
        ),
        (
            2, 2, 4,
            [
                (0, 0, range(1), range(1)), (0, 1, range(1), range(1)),
                (1, 2, range(1), range(1)), (1, 3, range(1), range(1)),
            ],
        ),
        (2, 4, 2, [(0, 0, range(1), range(1)), (2, 1, range(1), range(1))]),
        (1, 2, 3, [(0, 0, range(1), range(1)), (0, 1, range(1), range(1)), (1, 2, range(1), range(1))]),
        (2, 4, 1, [(0, 0, range(1), range(1)), (2, 0, range(1), range(1, 2))]),
    ],
)  # fmt: skip
def test_the_plans_that_a_person_would_draw(
    num_kv_heads: int, sender_tp_size: int, receiver_tp_size: int, moves: list[tuple[int, int, range, range]]
) -> None:
    assert plan_heads(num_kv_heads, sender_tp_size, receiver_tp_size) == [HeadMove(*move) for move in moves]


@pytest.mark.parametrize(
    ("num_kv_heads", "tp_size", "message"),
    [
        (8, 3, "tp_size is 3, which neither divides the model's 8 kv heads nor is a multiple of them"),
        (2, 3, "tp_size is 3, which neither divides the model's 2 kv heads nor is a multiple of them"),
        (8, 0, "tp_size is 0; the limits are 1 and 256"),
        (8, 4_000_000_000, "tp_size is 4000000000; the limits are 1 and 256"),
    ],
)
def test_a_degree_that_cannot_share_the_heads_is_refused_by_name_on_either_side(
    num_kv_heads: int, tp_size: int, message: str
) -> None:
    for sizes in ((tp_size, 1), (1, tp_size)):
        with pytest.raises(PeerRefused) as caught:
            plan_heads(num_kv_heads, *sizes)
        assert caught.value.field == "tp_size"
        assert caught.value.message == message
