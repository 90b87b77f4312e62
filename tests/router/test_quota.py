"""Limits of a key: kept to the number, refused by name, with the moment at which they would be kept again."""

from __future__ import annotations

import pytest

from baton.errors import InvalidRequest, Overloaded
from router.quota import Quotas
from router.tenants import OPEN, Tenant


def refusal(quotas: Quotas, tenant: Tenant, now_s: float, num_seqs: int = 1) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        quotas.take(tenant, num_seqs, now_s)
    return caught.value


def test_answers_at_once_are_counted_by_sequence_and_given_back() -> None:
    quotas, tenant = Quotas(), Tenant("a", max_concurrent=4)
    quotas.take(tenant, 3, 0.0)
    assert refusal(quotas, tenant, 0.0, num_seqs=2).field == "max_concurrent"
    quotas.take(tenant, 1, 0.0)
    quotas.give_back(tenant, 3)
    quotas.take(tenant, 3, 0.0)
    assert quotas.num_seqs(tenant) == 4


def test_a_minute_s_requests_may_come_at_once_and_then_at_their_rate() -> None:
    quotas, tenant = Quotas(), Tenant("a", requests_per_min=30)
    for _ in range(30):
        quotas.take(tenant, 1, 100.0)
    refused = refusal(quotas, tenant, 100.0)
    assert refused.field == "requests_per_min"
    assert refused.retry_after_s == pytest.approx(2.0)
    assert refusal(quotas, tenant, 101.9).retry_after_s == pytest.approx(0.1, abs=0.01)
    quotas.take(tenant, 1, 102.0)
    assert refusal(quotas, tenant, 102.0).field == "requests_per_min"
    for _ in range(30):
        quotas.take(tenant, 1, 1_000.0)


def test_less_than_one_request_per_minute_is_a_limit_and_not_a_closed_door() -> None:
    quotas, tenant = Quotas(), Tenant("a", requests_per_min=0.5)
    quotas.take(tenant, 1, 0.0)
    assert refusal(quotas, tenant, 0.0).retry_after_s == pytest.approx(120.0)
    quotas.take(tenant, 1, 120.0)


def test_more_answers_than_a_key_may_ever_have_at_once_are_refused_for_good() -> None:
    quotas, tenant = Quotas(), Tenant("a", max_concurrent=2)
    with pytest.raises(InvalidRequest, match="n is 3; the limit of this key is 2"):
        quotas.take(tenant, 3, 0.0)
    assert quotas.num_seqs(tenant) == 0


def test_who_comes_back_when_told_is_let_in() -> None:
    quotas, tenant = Quotas(), Tenant("a", requests_per_min=7, tokens_per_min=100)
    now_s, num_taken = 0.0, 0
    while now_s < 600.0:
        try:
            quotas.take(tenant, 1, now_s)
        except Overloaded as refused:
            now_s += refused.retry_after_s
            quotas.take(tenant, 1, now_s + 1e-6)
        num_taken += 1
        quotas.spend(tenant, 20, now_s)
    assert num_taken * 20 == pytest.approx(100 * 11, abs=60)  # ten minutes, and the one that was saved up


def test_tokens_are_taken_as_they_become_known_and_a_debt_is_waited_for() -> None:
    quotas, tenant = Quotas(), Tenant("a", tokens_per_min=600)
    quotas.take(tenant, 1, 0.0)
    quotas.spend(tenant, 500, 0.0)
    quotas.take(tenant, 1, 0.0)  # a hundred are left, whatever it will need
    quotas.spend(tenant, 700, 0.0)
    refused = refusal(quotas, tenant, 0.0)
    assert refused.field == "tokens_per_min"
    assert refused.retry_after_s == pytest.approx(60.0, abs=0.2)
    quotas.take(tenant, 1, 60.2)


def test_a_refused_call_takes_nothing() -> None:
    quotas, tenant = Quotas(), Tenant("a", max_concurrent=1, requests_per_min=60, tokens_per_min=10)
    quotas.take(tenant, 1, 0.0)
    for _ in range(500):
        refusal(quotas, tenant, 0.0)
    quotas.give_back(tenant, 1)
    quotas.take(tenant, 1, 0.0)


def test_who_has_no_limits_is_never_refused() -> None:
    quotas = Quotas()
    for _ in range(10_000):
        quotas.take(OPEN, 128, 0.0)
        quotas.spend(OPEN, 10**9, 0.0)
