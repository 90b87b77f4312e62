"""Order in the waiting room: shares by weight, priorities that age, and counts that come back to nothing."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from router.fair_queue import AGED_SHARE, AGEING_S, FairQueue, Waiting
from router.tenants import Tenant

A, B, HEAVY = Tenant("a"), Tenant("b"), Tenant("heavy", weight=3.0)


def call(tenant: Tenant, tokens: float = 100.0, band: int = 0, since_s: float = 0.0) -> Waiting:
    return Waiting(tenant, band, tokens, since_s)


def serve(queue: FairQueue[Waiting], now_s: float = 0.0) -> Waiting:
    head = queue.head(now_s)
    assert head is not None
    queue.take(head)
    return head


def test_tenants_with_a_backlog_are_served_by_their_weights() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    rng = random.Random(1)
    served: Counter[str] = Counter()
    for tenant in (A, HEAVY):
        for _ in range(400):
            queue.push(call(tenant, rng.uniform(10, 1_000)))
    for _ in range(400):
        leaving = serve(queue)
        served[leaving.tenant.name] += round(leaving.tokens)
    assert 2.8 < served["heavy"] / served["a"] < 3.2


def test_output_tokens_count_too() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    names = []
    for tenant in (A, B):
        for _ in range(40):
            queue.push(call(tenant))
    for _ in range(40):
        leaving = serve(queue)
        names.append(leaving.tenant.name)
        if leaving.tenant is A:
            queue.charge(A, 300)
    assert 3.5 < names.count("b") / names.count("a") < 4.5


def test_what_a_tenant_left_unused_is_saved_up_to_its_credit_only() -> None:
    for credit, first_of_b in ((0.0, 1), (250.0, 3)):
        queue: FairQueue[Waiting] = FairQueue()
        for _ in range(200):
            queue.push(call(A))
        for _ in range(100):
            serve(queue)
        for _ in range(10):
            queue.push(call(B), credit=credit)
        names = [serve(queue).tenant.name for _ in range(first_of_b + 2)]
        assert names.count("b") in (first_of_b, first_of_b + 1), (credit, names)


def test_a_tenant_that_overdrew_does_not_come_back_as_a_new_one() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    queue.push(call(A, 5_000))
    serve(queue)
    for _ in range(20):
        queue.push(call(B))
    queue.push(call(A))
    assert [serve(queue).tenant.name for _ in range(20)] == ["b"] * 20


def test_a_tenant_that_comes_and_goes_costs_no_more_each_time() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    for _ in range(200):  # the queue empties each time
        queue.push(call(A))
        serve(queue)
    queue.push(call(B))
    queue.charge(B, 1e9)
    for _ in range(200):  # somebody else stays, who has had so much that A comes first
        queue.push(call(A))
        assert serve(queue).tenant is A
    assert sum(len(band.ranks) for band in queue._bands.values()) <= 3


def test_calls_of_one_tenant_leave_in_the_order_of_their_arrival() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    calls = [call(A, tokens) for tokens in (5_000, 1, 300)]
    for each in calls:
        queue.push(each)
    assert [serve(queue) for _ in calls] == calls


def test_a_higher_priority_goes_first_whoever_asks() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    for band, tenant in ((-10, B), (0, A), (5, A)):
        queue.push(call(tenant, band=band))
    assert [serve(queue).band for _ in range(3)] == [5, 0, -10]


def test_a_low_priority_that_has_aged_gets_its_small_share_and_no_more() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    for _ in range(1_000):
        queue.push(call(A, band=0, since_s=AGEING_S))
        queue.push(call(B, band=-10))
    young = Counter(serve(queue, now_s=AGEING_S - 1).band for _ in range(100))
    assert young[-10] == 0
    aged = Counter(serve(queue, now_s=AGEING_S + 1).band for _ in range(480))
    assert abs(aged[-10] - 480 * AGED_SHARE) <= 1


def test_tokens_ahead_are_those_that_leave_before() -> None:
    rng = random.Random(2)
    tenants = [A, B, HEAVY]
    for _ in range(50):
        queue: FairQueue[Waiting] = FairQueue()
        for _ in range(rng.randrange(1, 60)):
            queue.push(call(rng.choice(tenants), rng.uniform(1, 500), band=rng.choice((0, 0, 5, -5))))
            if rng.random() < 0.3:
                serve(queue)
        late = call(rng.choice(tenants), 200)
        forecast = queue.ahead(late.tenant, late.band)
        queue.push(late)
        ahead = 0.0
        while (leaving := serve(queue)) is not late:
            ahead += leaving.tokens
        assert abs(ahead - forecast) <= 500 * len(tenants)  # a call is not cut: at most one per tenant more or less


def test_a_full_queue_turns_away_the_newest_of_whoever_takes_up_most() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    calls = [call(A) for _ in range(5)] + [call(B)]
    for each in calls:
        queue.push(each)
    assert queue.to_displace(B, 0) is calls[4]
    assert queue.to_displace(A, 0) is None
    assert queue.to_displace(A, -1) is None
    low = call(B, band=-10)
    queue.push(low)
    assert queue.to_displace(A, 0) is low


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([A, B, HEAVY]), st.integers(-2, 2)), max_size=80))
def test_nobody_is_served_twice_or_forgotten_and_every_count_ends_at_zero(steps: list[tuple[int, Tenant, int]]) -> None:
    queue: FairQueue[Waiting] = FairQueue()
    inside: list[Waiting] = []
    for step, (kind, tenant, band) in enumerate(steps):
        if kind < 2:
            inside.append(call(tenant, 10.0 + step, band, float(step)))
            queue.push(inside[-1], credit=50.0)
        elif kind == 2 and inside:
            gone = inside.pop(step % len(inside))
            assert queue.remove(gone)
            assert not queue.remove(gone)
        elif kind == 3 and inside:
            inside.remove(serve(queue, now_s=float(step)))
        else:
            queue.charge(tenant, 70.0)
        assert len(queue) == len(inside) == len(queue.calls)
        assert abs(queue.tokens - sum(each.tokens for each in inside)) < 1e-6
        assert queue.weight == sum(t.weight for t in {each.tenant for each in inside})
    while inside:
        inside.remove(serve(queue, now_s=1e9))
    assert queue.head(1e9) is None
    assert (len(queue), queue.tokens, queue.weight) == (0, 0.0, 0.0)
