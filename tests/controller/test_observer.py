"""What the controller makes of several routers' words: sums that do not depend on order, and silence that counts as absence."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.controller.observer import FRESH_S, MAX_ROUTERS, Observer
from router.ring import LONG_S, SHORT_S
from router.windows import ClassWindow, RouterWindows, WorkerWindow

GOLD = ClassWindow("gold", SHORT_S, 30.0, num_met=3, num_failed=1, num_arrived=4)
PREFILL = WorkerWindow("p0", "prefill", SHORT_S, 30.0, num_calls=4, num_in_target=3, num_met=3)
DECODE = replace(PREFILL, worker_id="d0", role="decode")


def told(*arrived: tuple[str, float], scale: int = 1) -> RouterWindows:
    gold = replace(GOLD, num_met=3.0 * scale)
    return RouterWindows((gold, replace(gold, window_s=LONG_S)), (PREFILL, DECODE), arrived)


@given(st.permutations(range(5)))
def test_the_order_in_which_routers_speak_changes_nothing(order: list[int]) -> None:
    one, other = Observer(), Observer()
    for number in range(5):
        one.heard(f"r{number}", told(scale=number), 1.0)
    for number in order:
        other.heard(f"r{number}", told(scale=number), 1.0)
    assert one.view(2.0) == other.view(2.0)
    assert one.view(2.0).classes[0].num_met == 30


def test_a_router_s_word_replaces_its_last_one() -> None:
    observer = Observer()
    observer.heard("a", told(scale=1), 1.0)
    observer.heard("a", told(scale=5), 2.0)
    assert [window.num_met for window in observer.view(2.0).classes] == [15, 15]


def test_pools_are_the_sums_of_their_workers_over_all_routers() -> None:
    observer = Observer()
    more = replace(PREFILL, worker_id="p1", num_calls=10, num_in_target=1)
    observer.heard("a", RouterWindows(workers=(PREFILL, more, DECODE)), 1.0)
    observer.heard("b", RouterWindows(workers=(PREFILL,)), 1.0)
    view = observer.view(1.0)
    assert [(w.role, w.worker_id, w.num_calls) for w in view.workers] == [
        ("decode", "d0", 4), ("prefill", "p0", 8), ("prefill", "p1", 10),
    ]  # fmt: skip
    assert [(w.worker_id, w.num_calls, w.num_in_target) for w in view.pools] == [("decode", 4, 3), ("prefill", 18, 7)]


def test_a_router_that_vanished_stops_counting() -> None:
    observer = Observer()
    observer.heard("a", told(), 0.0)
    observer.heard("b", told(), FRESH_S)
    assert observer.view(FRESH_S).num_routers == 2
    view = observer.view(FRESH_S + 0.1)
    assert (view.num_routers, view.classes[0].num_met) == (1, 3)
    assert not observer.hears(100.0)
    assert observer.view(100.0).classes == ()


def test_arrivals_are_counted_once_whatever_reports_are_lost() -> None:
    observer = Observer()
    observer.heard("a", told(("gold", 1_000)), 0.0)
    assert observer.take_arrivals()["gold"] == 0, "an hour's calls are no burst: a first word is where counting starts"
    observer.heard("a", told(("gold", 1_005)), 1.0)
    observer.heard("a", told(("gold", 1_012), ("batch", 2)), 4.0)
    assert dict(observer.take_arrivals()) == {"gold": 12, "batch": 2}
    observer.heard("a", told(("gold", 3)), 5.0)
    assert observer.take_arrivals()["gold"] == 0, "a total that went back is no number of calls"


def test_many_routers_that_come_and_go_take_bounded_memory() -> None:
    observer = Observer()
    for number in range(3 * MAX_ROUTERS):
        observer.heard(f"r{number}", told(), 1.0 + number * 1e-6)
    assert observer.view(1.1).num_routers == MAX_ROUTERS


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), max_size=40), st.randoms())
def test_counted_arrivals_equal_those_that_came_after_each_router_s_first_word(
    steps: list[tuple[int, int]], chance: random.Random
) -> None:
    observer, expected = Observer(), 0
    totals: dict[int, int] = {}
    for router, num_new in steps:
        if router in totals:
            totals[router] += num_new
            expected += num_new
        else:
            totals[router] = chance.randrange(1_000)
        observer.heard(str(router), told(("gold", totals[router])), 1.0)
    assert observer.take_arrivals()["gold"] == expected
