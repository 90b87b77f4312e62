"""Of several holders of one Lease object one leads, whatever clocks, servers and other writers do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import Unavailable
from router.controller.kube.api import KubeApi
from router.controller.kube.lease import KubeLease
from router.controller.kube.objects import Stored
from router.controller.lease import LEASE_S, MARGIN_S
from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_faults import Fault
from tests.kube.kube_rig import Clock, kube_api, lease

NAME = "demo-controller"


@pytest.fixture
def fake() -> Iterator[FakeApi]:
    with FakeApi() as fake:
        fake.load([lease(NAME)], "baton")
        yield fake


@pytest.fixture
def api(fake: FakeApi, tmp_path: Path) -> Iterator[KubeApi]:
    with kube_api(fake, tmp_path) as api:
        yield api


@pytest.fixture
def clock() -> Clock:
    return Clock()


def of(api: KubeApi, holder: str, clock: Clock) -> KubeLease:
    return KubeLease(api, NAME, holder, clock.now_s, clock.now_unix_s)


def test_one_leads_until_it_gives_the_lease_back(api: KubeApi, clock: Clock) -> None:
    first, second = of(api, "a", clock), of(api, "b", clock)
    assert (first.take(), second.take()) == (True, False)
    assert (first.is_held, second.is_held) == (True, False)
    clock.pass_s(LEASE_S / 2)
    assert (first.take(), second.take()) == (True, False)
    first.give_back()
    assert not first.is_held
    assert (second.take(), first.take()) == (True, False)


def test_a_dead_holder_stops_before_the_next_one_begins(api: KubeApi, clock: Clock) -> None:
    dead, next_one = of(api, "a", clock), of(api, "b", clock)
    assert dead.take()
    assert not next_one.take()  # it has seen it: from now on it counts
    clock.pass_s(LEASE_S + MARGIN_S / 2)
    assert (dead.is_held, next_one.take()) == (False, False)
    clock.pass_s(MARGIN_S)
    assert next_one.take()
    assert (dead.take(), dead.is_lost) == (False, True)


def test_who_only_comes_counts_from_when_it_came(api: KubeApi, clock: Clock) -> None:
    assert of(api, "a", clock).take()
    clock.pass_s(1_000)
    late = of(api, "b", clock)
    assert not late.take()
    clock.pass_s(LEASE_S + MARGIN_S + 0.1)
    assert late.take()


def test_what_was_written_while_one_waited_for_the_answer_is_not_dated_back(
    api: KubeApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, waits, read = of(api, "a", clock), of(api, "b", clock), api.lease

    def slowly(name: str) -> Stored:
        monkeypatch.setattr(api, "lease", read)
        clock.pass_s(5.0)
        assert holder.take()
        return read(name)

    monkeypatch.setattr(api, "lease", slowly)
    assert not waits.take()
    clock.pass_s(LEASE_S + MARGIN_S - 4.0)
    assert (holder.is_held, waits.take()) == (True, False)


def test_wall_clocks_that_differ_decide_nothing(api: KubeApi) -> None:
    here, there = Clock(), Clock()
    there.unix_s += 1e6
    first, second = of(api, "a", here), of(api, "b", there)
    assert (first.take(), second.take(), first.take(), second.take()) == (True, False, True, False)


def test_a_write_that_lost_a_race_is_no_lease(fake: FakeApi, api: KubeApi, clock: Clock) -> None:
    fake.faults.add(Fault(verb="update", resource="leases", code=409))
    losing = of(api, "a", clock)
    with pytest.raises(Unavailable, match="changes faster"):
        losing.take()
    assert not losing.is_held


def test_somebody_else_who_writes_in_between_costs_nobody_the_lease(fake: FakeApi, api: KubeApi, clock: Clock) -> None:
    fake.faults.add(Fault(verb="update", resource="leases", code=409, times=1))
    assert of(api, "a", clock).take()


def test_a_server_that_is_away_leaves_the_lease_to_run_out(fake: FakeApi, api: KubeApi, clock: Clock) -> None:
    holder = of(api, "a", clock)
    assert holder.take()
    with fake.away():
        clock.pass_s(LEASE_S / 2)
        with pytest.raises(Unavailable):
            holder.take()
        assert holder.is_held
        clock.pass_s(LEASE_S)
        assert not holder.is_held
    assert holder.take()
    assert not holder.is_lost


def test_an_answer_that_is_lost_leaves_a_lease_that_nobody_else_takes_too_early(
    fake: FakeApi, api: KubeApi, clock: Clock
) -> None:
    fake.faults.add(Fault(verb="update", resource="leases", drop_answer=True, times=1))
    first, second = of(api, "a", clock), of(api, "b", clock)
    with pytest.raises(Unavailable):
        first.take()
    assert not first.is_held
    assert not second.take()
    assert first.take()


def test_who_held_it_is_told_from_who_waits(api: KubeApi, clock: Clock) -> None:
    waits, holder = of(api, "a", clock), of(api, "b", clock)
    assert holder.take()
    assert not waits.take()
    assert not waits.is_lost
    assert waits.holder_seen == "b"


def test_giving_back_what_another_one_holds_changes_nothing(api: KubeApi, clock: Clock) -> None:
    first, second = of(api, "a", clock), of(api, "b", clock)
    assert first.take()
    first.give_back()
    assert second.take()
    first.give_back()
    assert api.lease(NAME).data["holderIdentity"] == "b"


def test_the_object_says_what_kubectl_users_expect(api: KubeApi, clock: Clock) -> None:
    of(api, "a", clock).take()
    spec = api.lease(NAME).data
    assert spec["leaseDurationSeconds"] == LEASE_S + MARGIN_S
    assert spec["leaseTransitions"] == 1
    assert spec["renewTime"] == spec["acquireTime"] == "2023-11-14T22:13:20.000000Z"


def test_a_lease_that_nobody_rendered_is_said(api: KubeApi, clock: Clock) -> None:
    with pytest.raises(Unavailable, match="there is no Lease other: `helm upgrade` renders it"):
        KubeLease(api, "other", "a", clock.now_s, clock.now_unix_s).take()
