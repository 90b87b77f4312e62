"""Who owns which field, found out by doing it: Helm installs, upgrades and rolls back while a scaler and a controller write."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from kubernetes import client

from tests.chart.chart_rig import merged, needs_helm
from tests.chart.chart_values import STILL
from tests.chart.helm_cluster import NAMESPACE, HelmCluster

pytestmark = needs_helm

SLO = {"slo.v7": "{}"}  # what a controller would write
CHANGED = merged(STILL, {"engine": {"maxNumSeqs": 8}, "commonLabels": {"team": "search"}})
POOLS = ("demo-baton-prefill", "demo-baton-decode")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HelmCluster]:
    with HelmCluster(tmp_path, monkeypatch) as cluster:
        yield cluster


def scale(apps: client.AppsV1Api, name: str, size: int) -> None:
    read = apps.read_namespaced_stateful_set_scale(name, NAMESPACE)
    read.spec.replicas = size
    apps.replace_namespaced_stateful_set_scale(name, NAMESPACE, read)


def sizes(apps: client.AppsV1Api) -> dict[str, int]:
    return {name: apps.read_namespaced_stateful_set(name, NAMESPACE).spec.replicas for name in POOLS}


def write_state(core: client.CoreV1Api, leases: client.CoordinationV1Api) -> None:
    slo = core.read_namespaced_config_map("demo-baton-slo", NAMESPACE)
    slo.data = dict(SLO)
    core.replace_namespaced_config_map("demo-baton-slo", NAMESPACE, slo)
    lease = leases.read_namespaced_lease("demo-baton-controller", NAMESPACE)
    lease.spec = client.V1LeaseSpec(holder_identity="me", lease_duration_seconds=10)
    leases.replace_namespaced_lease("demo-baton-controller", NAMESPACE, lease)


def test_upgrade_and_rollback_leave_sizes_slo_state_and_lease_to_their_owners(cluster: HelmCluster) -> None:
    cluster.install(STILL)
    with cluster.api.client() as whole:
        apps, core, leases = client.AppsV1Api(whole), client.CoreV1Api(whole), client.CoordinationV1Api(whole)
        for size, name in enumerate(POOLS, 4):
            scale(apps, name, size)
        write_state(core, leases)
        marks = []
        for step in (partial(cluster.upgrade, CHANGED), partial(cluster.rollback, 1)):
            step()
            assert sizes(apps) == {"demo-baton-prefill": 4, "demo-baton-decode": 5}
            slo = core.read_namespaced_config_map("demo-baton-slo", NAMESPACE)
            assert slo.data == SLO
            assert leases.read_namespaced_lease("demo-baton-controller", NAMESPACE).spec.holder_identity == "me"
            pod = apps.read_namespaced_stateful_set(POOLS[1], NAMESPACE).spec.template.metadata
            marks.append((slo.metadata.labels.get("team"), pod.annotations["baton.dev/config"]))
    assert marks[0][0] == "search"
    assert marks[1][0] is None
    assert marks[0][1] != marks[1][1]  # so the pods are replaced, one way and the other


def test_a_size_that_values_name_is_taken_back_by_an_upgrade_as_a_contrast(cluster: HelmCluster) -> None:
    """scaler.type none: the number is the chart's, and whoever scales by hand is told of the conflict."""
    fixed = merged(STILL, {"scaler": {"type": "none"}})
    cluster.install(fixed)
    with cluster.api.client() as whole:
        apps = client.AppsV1Api(whole)
        assert set(sizes(apps).values()) == {1}
        scale(apps, POOLS[1], 5)
        with pytest.raises(AssertionError, match="conflict"):
            cluster.upgrade(merged(fixed, CHANGED))


def test_sizes_that_were_the_charts_stay_when_a_scaler_takes_over(cluster: HelmCluster) -> None:
    replicas = {"replicas": {"initial": 4}}
    fixed = merged(STILL, {"scaler": {"type": "none"}, "pools": {"prefill": replicas, "decode": replicas}})
    scaled = merged(fixed, {"scaler": {"type": "slo"}})
    cluster.install(fixed)
    with cluster.api.client() as whole:
        apps = client.AppsV1Api(whole)
        for values in (scaled, merged(scaled, CHANGED)):
            cluster.upgrade(values)
            assert set(sizes(apps).values()) == {4}
        scale(apps, POOLS[1], 5)  # from here on it is the scaler's
        cluster.upgrade(scaled)
        assert sizes(apps) == {POOLS[0]: 4, POOLS[1]: 5}


def test_routers_keep_their_number_when_an_autoscaler_takes_over(cluster: HelmCluster) -> None:
    cluster.install(merged(STILL, {"router": {"replicas": 6}}))
    with cluster.api.client() as whole:
        cluster.upgrade(merged(STILL, {"router": {"replicas": 6, "hpa": {"enabled": True}}}))
        assert client.AppsV1Api(whole).read_namespaced_deployment("demo-baton-router", NAMESPACE).spec.replicas == 6


def test_groups_of_a_ray_cluster_keep_their_sizes_over_a_forced_upgrade(cluster: HelmCluster) -> None:
    kuberay = merged(STILL, {"ray": {"mode": "kuberay"}})
    cluster.install(kuberay)
    leaving = {"workersToDelete": ["demo-baton-prefill-worker-x"]}
    with cluster.api.client() as whole:
        custom = client.CustomObjectsApi(whole)
        of = ("ray.io", "v1", NAMESPACE, "rayclusters", "demo-baton")
        sized = [
            {"op": "add", "path": "/spec/workerGroupSpecs/0/replicas", "value": 3},
            {"op": "add", "path": "/spec/workerGroupSpecs/0/scaleStrategy", "value": leaving},
            {"op": "add", "path": "/spec/workerGroupSpecs/1/replicas", "value": 0},
        ]
        custom.patch_namespaced_custom_object(*of, sized, _content_type="application/json-patch+json")
        with pytest.raises(AssertionError, match="conflict"):
            cluster.upgrade(merged(kuberay, CHANGED))
        cluster.upgrade(merged(kuberay, CHANGED), "--force-conflicts")
        groups = custom.get_namespaced_custom_object(*of)["spec"]["workerGroupSpecs"]
    assert [group["replicas"] for group in groups] == [3, 0]
    assert groups[0]["scaleStrategy"] == leaving
    assert "scaleStrategy" not in groups[1]
    assert groups[0]["template"]["metadata"]["labels"]["team"] == "search"


def test_the_heads_storage_changes_once_its_set_is_gone_as_the_guide_says(cluster: HelmCluster) -> None:
    other = merged(STILL, {"ray": {"gcs": {"storage": "memory"}}})
    cluster.install(STILL)
    with cluster.api.client() as whole:
        apps = client.AppsV1Api(whole)
        with pytest.raises(AssertionError, match="Forbidden"):
            cluster.upgrade(other)
        apps.delete_namespaced_stateful_set("demo-baton-head", NAMESPACE, propagation_policy="Orphan")
        cluster.upgrade(other)
        assert not apps.read_namespaced_stateful_set("demo-baton-head", NAMESPACE).spec.volume_claim_templates


def test_slo_state_outlives_an_uninstall_and_is_found_again(cluster: HelmCluster) -> None:
    cluster.install(STILL)
    with cluster.api.client() as whole:
        core, apps = client.CoreV1Api(whole), client.AppsV1Api(whole)
        write_state(core, client.CoordinationV1Api(whole))
        cluster.uninstall()
        assert not apps.list_namespaced_stateful_set(NAMESPACE).items
        assert {found.metadata.name for found in core.list_namespaced_config_map(NAMESPACE).items} == {"demo-baton-slo"}
        cluster.install(CHANGED)
        assert core.read_namespaced_config_map("demo-baton-slo", NAMESPACE).data == SLO
