"""A pool's size is changed by compare-and-swap: never blind, never below what is allowed, never by another pod than was meant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import InvalidRequest, NotFound, Unavailable
from router.controller.kube.api import KubeApi
from router.controller.kube.errors import Conflict
from router.controller.kube.objects import Scale
from router.controller.kube.ray_cluster import RayClusterPool
from router.controller.kube.sizes import StatefulSetPool
from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_faults import Fault
from tests.kube.fake_api_resources import Json
from tests.kube.kube_rig import kube_api, stateful_set


@pytest.fixture
def fake() -> Iterator[FakeApi]:
    with FakeApi() as fake:
        fake.load([stateful_set("decode", 3), ray_cluster()], "baton")
        yield fake


@pytest.fixture
def api(fake: FakeApi, tmp_path: Path) -> Iterator[KubeApi]:
    with kube_api(fake, tmp_path) as api:
        yield api


def ray_cluster() -> Json:
    groups = [{"groupName": "prefill", "replicas": 1}, {"groupName": "decode", "replicas": 2}]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "demo"},
        "spec": {"workerGroupSpecs": groups},
    }


def anything(size: int) -> None: ...


def at_least_two(size: int) -> None:
    if size < 2:
        raise InvalidRequest("decode.min_workers = 2", field="decode.min_workers")


def desired(api: KubeApi) -> int:
    return api.scale("demo-decode").desired


# -- StatefulSet -----------------------------------------------------------------------------------------------------


def test_a_set_says_what_is_there_and_who_would_go_first(api: KubeApi) -> None:
    size = StatefulSetPool(api, "demo-decode").get({"demo-decode-0", "demo-decode-2", "other-1"})
    assert (size.desired, size.ready, size.pending) == (3, 2, ("demo-decode-1",))
    assert size.victims == ("demo-decode-2", "demo-decode-1", "demo-decode-0")


def test_more_pods_are_asked_for_in_one_write_and_have_names_at_once(fake: FakeApi, api: KubeApi) -> None:
    names = StatefulSetPool(api, "demo-decode").scale_up(2, anything)
    assert (names, desired(api)) == (("demo-decode-3", "demo-decode-4"), 5)
    assert [call.access.verb for call in fake.calls if call.access.path.endswith("/scale")].count("update") == 1


def test_victims_are_the_last_ones_only(api: KubeApi) -> None:
    pool = StatefulSetPool(api, "demo-decode")
    with pytest.raises(Unavailable, match="demo-decode-2 has to end before demo-decode-1"):
        pool.scale_down({"demo-decode-1"}, anything)
    assert desired(api) == 3
    pool.scale_down({"demo-decode-1", "demo-decode-2"}, anything)
    assert desired(api) == 1


def test_a_victim_that_is_gone_already_costs_nobody_else(api: KubeApi) -> None:
    pool = StatefulSetPool(api, "demo-decode")
    pool.scale_down({"demo-decode-2"}, anything)
    pool.scale_down({"demo-decode-2"}, anything)
    assert desired(api) == 2


def test_a_size_is_refused_before_it_is_written(fake: FakeApi, api: KubeApi) -> None:
    pool = StatefulSetPool(api, "demo-decode")
    with pytest.raises(InvalidRequest, match=r"decode\.min_workers = 2"):
        pool.scale_down({"demo-decode-2", "demo-decode-1"}, at_least_two)
    assert desired(api) == 3
    assert not [call for call in fake.calls if call.access.verb == "update"]


def test_whoever_writes_meanwhile_is_not_overwritten_but_added_to(api: KubeApi) -> None:
    """As if `kubectl scale` came between read and write: what is written is decided from what stands there then."""
    rival, asked = StatefulSetPool(api, "demo-decode"), list[int]()

    def somebody_is_faster_once(size: int) -> None:
        asked.append(size)
        if len(asked) == 1:
            rival.scale_up(1, anything)

    names = StatefulSetPool(api, "demo-decode").scale_up(1, somebody_is_faster_once)
    assert (asked, names, desired(api)) == ([4, 5], ("demo-decode-4",), 5)


def test_a_shrink_that_somebody_has_done_meanwhile_is_not_done_twice(api: KubeApi) -> None:
    rival, asked = StatefulSetPool(api, "demo-decode"), list[int]()

    def somebody_is_faster_once(size: int) -> None:
        asked.append(size)
        if len(asked) == 1:
            rival.scale_down({"demo-decode-2"}, anything)

    StatefulSetPool(api, "demo-decode").scale_down({"demo-decode-2"}, somebody_is_faster_once)
    assert (asked, desired(api)) == ([2], 2)


def test_conflicts_without_end_are_given_up(fake: FakeApi, api: KubeApi) -> None:
    fault = fake.faults.add(Fault(verb="update", resource="statefulsets/scale", code=409))
    with pytest.raises(Unavailable, match="changes faster than it can be scaled"):
        StatefulSetPool(api, "demo-decode").scale_up(1, anything)
    assert (fault.hits, desired(api)) == (5, 3)


def test_a_version_that_is_stale_is_never_written(api: KubeApi) -> None:
    old = api.scale("demo-decode")
    api.put_scale(old, 4)
    with pytest.raises(Conflict):
        api.put_scale(Scale(old.name, old.version, old.desired, old.body), 9)
    assert desired(api) == 4


# -- RayCluster ------------------------------------------------------------------------------------------------------


def group_of(api: KubeApi) -> tuple[int, tuple[str, ...]]:
    group = api.ray_cluster("demo").groups[1]
    return group.replicas, group.to_delete


def test_a_worker_group_grows_and_names_its_victims_in_one_patch(fake: FakeApi, api: KubeApi) -> None:
    pods = {"demo-decode-worker-x", "demo-decode-worker-y"}
    pool = RayClusterPool(api, "demo", "decode", lambda: pods)
    assert pool.scale_up(1, anything) == ("demo-decode-awaited-0",)
    assert pool.get(pods).pending == ("demo-decode-awaited-0",)
    pods.add("demo-decode-worker-z")
    assert not pool.get(pods).pending
    assert group_of(api) == (3, ())
    pool.scale_down({"demo-decode-worker-x"}, anything)
    assert group_of(api) == (2, ("demo-decode-worker-x",))
    assert [call.access.verb for call in fake.calls if "rayclusters" in call.access.path].count("patch") == 2
    assert pool.get({"demo-decode-worker-y"}).victims == ("demo-decode-worker-y", "demo-decode-worker-z")


def test_what_was_asked_for_and_never_came_is_taken_back_once(fake: FakeApi, api: KubeApi) -> None:
    pool = RayClusterPool(api, "demo", "decode", lambda: {"demo-decode-worker-x"})
    assert pool.get(set()).victims == ("demo-decode-awaited-0", "demo-decode-worker-x")
    fake.faults.add(Fault(verb="patch", resource="rayclusters", drop_answer=True, times=1))
    with pytest.raises(Unavailable):
        pool.scale_down({"demo-decode-awaited-0"}, anything)
    pool.scale_down({"demo-decode-awaited-0"}, anything)
    assert group_of(api) == (1, ())


def test_a_shrink_of_which_the_answer_was_lost_is_not_done_twice(fake: FakeApi, api: KubeApi) -> None:
    pods = {"demo-decode-worker-x", "demo-decode-worker-y"}
    pool = RayClusterPool(api, "demo", "decode", lambda: pods)
    fake.faults.add(Fault(verb="patch", resource="rayclusters", drop_answer=True, times=1))
    with pytest.raises(Unavailable):
        pool.scale_down({"demo-decode-worker-x"}, anything)
    pool.scale_down({"demo-decode-worker-x"}, anything)
    assert group_of(api) == (1, ("demo-decode-worker-x",))


def test_a_group_that_moved_or_was_resized_meanwhile_is_decided_on_again(fake: FakeApi, api: KubeApi) -> None:
    rival, asked = RayClusterPool(api, "demo", "decode", set), list[int]()

    def somebody_is_faster_once(size: int) -> None:
        asked.append(size)
        if len(asked) == 1:
            rival.scale_up(2, anything)

    RayClusterPool(api, "demo", "decode", set).scale_up(1, somebody_is_faster_once)
    assert (asked, group_of(api)[0]) == ([3, 5], 5)


def test_pods_that_are_gone_are_left_out_of_what_is_to_go(api: KubeApi) -> None:
    pods = {"demo-decode-worker-x", "demo-decode-worker-y"}
    pool = RayClusterPool(api, "demo", "decode", lambda: pods)
    pool.scale_down({"demo-decode-worker-x"}, anything)
    pods.discard("demo-decode-worker-x")
    pool.scale_down({"demo-decode-worker-y"}, anything)
    assert group_of(api) == (0, ("demo-decode-worker-y",))


def test_a_group_that_is_not_there_is_said(api: KubeApi) -> None:
    with pytest.raises(NotFound, match="no worker group 'both'"):
        RayClusterPool(api, "demo", "both", set).desired()
