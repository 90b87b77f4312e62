"""Of two controllers whose pods are both Ready, the Service finds the one that leads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import Unavailable
from router.controller.kube import leader_label
from router.controller.kube import platform as kube_platform
from router.controller.kube.api import KubeApi
from router.controller.kube.calls import KubeCalls
from router.controller.kube.leader_label import LeaderLabel
from router.controller.kube.lease import KubeLease
from router.controller.kube.platform import Platform
from router.controller.lease import LEASE_S, MARGIN_S
from tests.chart.chart_rig import needs_helm, render
from tests.chart.chart_values import LEAST
from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_faults import Fault
from tests.kube.fake_api_resources import PODS, Json
from tests.kube.kube_fleet_rig import cluster_of
from tests.kube.kube_rig import FULLNAME, NAMESPACE, Clock, kube_api, release

PATIENCE_S = 20.0
SELECTOR = {"baton.dev/controller": FULLNAME, "baton.dev/leads": "true"}


def controller_pod(name: str, fullname: str = FULLNAME, **labels: str) -> Json:
    """Ready, as all of them are."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"baton.dev/controller": fullname, **labels}},
        "spec": {"containers": [{"name": "controller", "image": "baton-control:1"}]},
        "status": {"phase": "Running", "podIP": "10.0.0.9", "conditions": [{"type": "Ready", "status": "True"}]},
    }


@pytest.fixture
def fake() -> Iterator[FakeApi]:
    with FakeApi() as fake:
        fake.load([*release(), controller_pod("c-0"), controller_pod("c-1")], NAMESPACE)
        yield fake


@pytest.fixture
def api(fake: FakeApi, tmp_path: Path) -> Iterator[KubeApi]:
    with kube_api(fake, tmp_path) as api:
        yield api


@pytest.fixture
def calls() -> Iterator[KubeCalls]:
    calls = KubeCalls()
    yield calls
    calls.close()


def found(fake: FakeApi) -> list[str]:
    """Pods that the Service sends callers to."""
    pods = fake.verbs.objects(PODS, NAMESPACE)
    return [p["metadata"]["name"] for p in pods if SELECTOR.items() <= p["metadata"].get("labels", {}).items()]


class Two:
    """Controllers c-0 and c-1, on one clock."""

    def __init__(self, api: KubeApi, calls: KubeCalls) -> None:
        self.clock = Clock()
        names = ("c-0", "c-1")
        self.leases = [KubeLease(api, f"{FULLNAME}-controller", n, self.clock.now_s) for n in names]
        self.labels = [LeaderLabel(api, calls, FULLNAME, n, lease) for n, lease in zip(names, self.leases, strict=True)]


def test_the_leader_is_found_and_who_waits_is_not(fake: FakeApi, api: KubeApi, calls: KubeCalls) -> None:
    two = Two(api, calls)
    assert (two.leases[0].take(), two.leases[1].take()) == (True, False)
    two.labels[0].put()
    assert found(fake) == ["c-0"]
    with pytest.raises(Unavailable, match="does not lead"):
        two.labels[1].put()
    assert found(fake) == ["c-0"]


def test_the_successor_of_a_dead_leader_takes_its_label_off(fake: FakeApi, api: KubeApi, calls: KubeCalls) -> None:
    two = Two(api, calls)
    two.leases[0].take()
    two.labels[0].put()
    two.leases[1].take()
    two.clock.pass_s(LEASE_S + MARGIN_S + 0.1)
    assert two.leases[1].take()
    two.labels[1].put()
    assert found(fake) == ["c-1"]


def test_a_leader_whose_lease_ran_out_writes_nothing(fake: FakeApi, api: KubeApi, calls: KubeCalls) -> None:
    two = Two(api, calls)
    two.leases[0].take()
    two.clock.pass_s(LEASE_S + 0.1)
    with pytest.raises(Unavailable):
        two.labels[0].put()
    assert found(fake) == []


def test_a_pod_that_changes_meanwhile_is_labelled_at_the_next_look(
    fake: FakeApi, api: KubeApi, calls: KubeCalls
) -> None:
    two = Two(api, calls)
    two.leases[0].take()
    fake.faults.add(Fault(verb="patch", resource="pods", code=409, times=1))
    two.labels[0].put()
    assert found(fake) == []
    two.labels[0].put()
    assert found(fake) == ["c-0"]


def test_another_release_s_controllers_are_left_alone(fake: FakeApi, api: KubeApi, calls: KubeCalls) -> None:
    fake.load([controller_pod("x-0", "other", **{"baton.dev/leads": "true"})], NAMESPACE)
    two = Two(api, calls)
    two.leases[0].take()
    two.labels[0].put()
    assert fake.verbs.get(PODS, NAMESPACE, "x-0")["metadata"]["labels"]["baton.dev/leads"] == "true"


async def test_two_controllers_hand_the_service_over(
    fake: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is found, loses the Lease while it believes to lead, ends and is found no more; the second one is."""
    for module, name in ((leader_label, "LOOK_S"), (kube_platform, "_LOOK_S")):
        monkeypatch.setattr(module, name, 0.02)
    cluster = cluster_of(fake, tmp_path)
    first, second = Platform(cluster, "c-0"), Platform(cluster, "c-1")
    stop, at_once = asyncio.Event(), set[tuple[str, ...]]()

    async def until(wanted: list[str]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while found(fake) != wanted:
                at_once.add(tuple(found(fake)))
                await asyncio.sleep(0.01)

    assert await asyncio.to_thread(first.lease.take)
    leading = [asyncio.create_task(first.be_found()), asyncio.create_task(first.until_lost(stop))]
    await until(["c-0"])
    await asyncio.to_thread(first.lease.give_back)  # behind its back: as if it had run out while it was paused
    assert await asyncio.to_thread(second.lease.take)
    following = asyncio.create_task(second.be_found())
    await until(["c-1"])
    assert not await asyncio.to_thread(first.lease.take)  # it looks again, and learns of it
    async with asyncio.timeout(PATIENCE_S):
        await stop.wait()
    assert found(fake) == ["c-1"]
    assert max(map(len, at_once)) <= 1
    for task in (*leading, following):
        task.cancel()
    await asyncio.gather(*leading, following, return_exceptions=True)
    first.close()
    second.close()


async def test_who_loses_the_lease_takes_its_own_label_off(fake: FakeApi, tmp_path: Path) -> None:
    platform = Platform(cluster_of(fake, tmp_path), "c-0")
    await asyncio.to_thread(platform.lease.take)
    body = fake.verbs.get(PODS, NAMESPACE, "c-0")
    body["metadata"]["labels"]["baton.dev/leads"] = "true"
    fake.verbs.update(PODS, NAMESPACE, "c-0", body)
    platform.lease.is_lost = True
    stop = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S):
        await platform.until_lost(stop)
    assert (found(fake), stop.is_set()) == ([], True)
    platform.close()


@needs_helm
def test_the_chart_s_service_asks_for_what_the_leader_writes_and_no_template_has_it() -> None:
    chart = render(LEAST)
    selector = chart.get("Service", "demo-baton-controller")["spec"]["selector"]
    template = chart.get("Deployment", "demo-baton-controller")["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= (template | {"baton.dev/leads": "true"}).items()
    assert template["baton.dev/controller"] == "demo-baton"
    assert "baton.dev/leads" not in template
